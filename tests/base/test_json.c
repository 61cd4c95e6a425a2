/* The scanner against fixed cases, against jansson on random documents and on damaged ones, and on
 * the vectors of JSONTestSuite where WHIMBREL_TEST_DATA holds them. */
#include <criterion/criterion.h>

#include <dirent.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/json.h"
#include "engine/base/rand.h"

static bool accepts(const char *text, size_t length, uint32_t depth_max)
{
    base_json json;
    base_json_kind kind;
    /* Its own allocation, so that a sanitizer sees a read past the end. */
    char *copy = malloc(length + (length == 0));
    memcpy(copy, text, length);
    base_json_init(&json, copy, length, depth_max);
    do {
        kind = base_json_next(&json);
        if (kind != BASE_JSON_END && kind != BASE_JSON_ERROR)
            cr_assert(json.raw >= copy && json.raw + json.raw_length <= copy + length);
    } while (kind != BASE_JSON_END && kind != BASE_JSON_ERROR);
    cr_assert(kind == BASE_JSON_END || json.error != NULL);
    cr_assert_eq(base_json_next(&json), kind, "the last event repeats");
    free(copy);
    return kind == BASE_JSON_END;
}

Test(base_json, accepts_what_the_standard_does)
{
    static const char *const good[] = {
        "null",
        " true ",
        "false\n",
        "0",
        "-0",
        "-0.0e+10",
        "1E5",
        "123456789012345678901234567890",
        "1.5e-300",
        "[]",
        "{}",
        "[ ]",
        "{ }",
        "[1,2 , 3]",
        "{\"a\":1}",
        "{\"\":{\"\":[]}}",
        "\"\"",
        "\"\\u0000\"",
        "\"\\ud800\"",
        "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u12aB\"",
        "\"\xF0\x9F\x98\x80\"",
        "\t[\r\n{\"a\" : [null]}\t]",
        "\"\x7F\"",
        "{\"a\":1,\"a\":2}",
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        cr_assert(accepts(good[i], strlen(good[i]), 8), "%s", good[i]);
}

Test(base_json, rejects_all_else)
{
    static const char *const bad[] = {
        "",
        " ",
        "nul",
        "nullx",
        "True",
        "NaN",
        "Infinity",
        "-",
        "+1",
        "01",
        "-01",
        "1.",
        ".5",
        "1.e1",
        "1e",
        "1e+",
        "0x1",
        "1 2",
        "[",
        "]",
        "{",
        "}",
        "[1",
        "[1,",
        "[1,]",
        "[,1]",
        "[1 2]",
        "[1}",
        "{1:2}",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{\"a\":1 \"b\":2}",
        "{\"a\" 1}",
        "{,}",
        "{\"a\":1]",
        "\"",
        "\"abc",
        "\"\\",
        "\"\\\"",
        "\"\\x\"",
        "\"\\u\"",
        "\"\\u12\"",
        "\"\\u12g4\"",
        "\"\\u123",
        "\"a\nb\"",
        "\"\x1F\"",
        "'a'",
        "\"\xC3\"",
        "\"\xC0\x80\"",
        "\"\xED\xA0\x80\"",
        "\"\xF4\x90\x80\x80\"",
        "\xEF\xBB\xBF[]",
        "[1]//x",
        "/**/1",
        "\"a\":1",
        "[\"a\":1]",
        "{null:1}",
        "[1]]",
        "{}{}",
        "\xC2\xA0[]",
        "\f1",
        "\v1",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_assert_not(accepts(bad[i], strlen(bad[i]), 8), "%s", bad[i]);
    cr_assert_not(accepts("1\0", 2, 8));
    cr_assert_not(accepts("\0", 1, 8));
    cr_assert_not(accepts("\"\0\"", 3, 8));
    cr_assert_not(accepts("\"\\\0\"", 4, 8));
    cr_assert_not(accepts("-\0", 2, 8));
}

Test(base_json, depth_is_bounded)
{
    enum { DEEP = 100000 };
    char *text = malloc(2 * DEEP);
    uint32_t bounds[] = {1, 7, 8, 9, 511, BASE_JSON_DEPTH_MAX, BASE_JSON_DEPTH_MAX + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) {
        uint32_t depth = bounds[i] < BASE_JSON_DEPTH_MAX ? bounds[i] : BASE_JSON_DEPTH_MAX;
        for (uint32_t d = depth; d <= depth + 1; d++) {
            memset(text, '[', d);
            memset(text + d, ']', d);
            cr_assert_eq(accepts(text, 2 * d, bounds[i]), d == depth);
        }
    }
    memset(text, '[', DEEP);
    memset(text + DEEP, ']', DEEP);
    cr_assert_not(accepts(text, 2 * DEEP, UINT32_MAX));
    /* A level's kind survives deeper ones. */
    const char *mixed = "{\"a\":[{\"b\":[[],{}]},[{}]],\"c\":{}}";
    cr_assert(accepts(mixed, strlen(mixed), 5));
    cr_assert_not(accepts("[0]", 3, 0));
    cr_assert(accepts("0", 1, 0));
    free(text);
}

Test(base_json, raw_bytes_are_kept)
{
    const char *text =
        " {\"n\" : -1.50e+2, \"s\":\"a\\u0062\" ,\"l\":[ 1, {\"x\":[]} ] ,\"e\":{} }";
    base_json json;
    base_json_init(&json, text, strlen(text), 8);
    cr_assert_eq(base_json_next(&json), BASE_JSON_OBJECT_BEGIN);
    cr_assert_eq(base_json_next(&json), BASE_JSON_KEY);
    cr_assert(base_json_string_is(json.raw, json.raw_length, "n"));
    cr_assert_eq(base_json_next(&json), BASE_JSON_NUMBER);
    cr_assert_eq(json.raw_length, 8);
    cr_assert_eq(memcmp(json.raw, "-1.50e+2", 8), 0);
    cr_assert_eq(base_json_next(&json), BASE_JSON_KEY);
    cr_assert(base_json_skip(&json));
    cr_assert_eq(json.raw_length, 9);
    cr_assert(base_json_string_is(json.raw, json.raw_length, "ab"));
    cr_assert_not(base_json_string_is(json.raw, json.raw_length, "a"));
    cr_assert_not(base_json_string_is(json.raw, json.raw_length, "abc"));
    cr_assert_eq(base_json_next(&json), BASE_JSON_KEY);
    cr_assert_eq(base_json_next(&json), BASE_JSON_ARRAY_BEGIN);
    cr_assert(base_json_skip(&json));
    cr_assert_eq(json.raw_length, strlen("[ 1, {\"x\":[]} ]"));
    cr_assert_eq(memcmp(json.raw, "[ 1, {\"x\":[]} ]", json.raw_length), 0);
    cr_assert_eq(base_json_next(&json), BASE_JSON_KEY);
    cr_assert(base_json_skip(&json));
    cr_assert_eq(json.raw_length, 2);
    cr_assert_eq(base_json_next(&json), BASE_JSON_OBJECT_END);
    cr_assert_eq(base_json_next(&json), BASE_JSON_END);

    base_json_init(&json, text, strlen(text), 8);
    cr_assert(base_json_skip(&json), "before the first event it passes over the whole value");
    cr_assert_eq(json.raw_length, strlen(text) - 1);
    cr_assert_eq(base_json_next(&json), BASE_JSON_END);

    base_json_init(&json, "{\"a\":[1,}", 9, 8);
    base_json_next(&json);
    base_json_next(&json);
    cr_assert_not(base_json_skip(&json));
    cr_assert_eq(base_json_next(&json), BASE_JSON_ERROR);
}

static void unescapes_to(const char *raw, const char *want, size_t want_length)
{
    base_buf out;
    base_buf_init(&out, 0);
    base_buf_add(&out, "", 0);
    base_json_unescape(&out, raw, strlen(raw));
    cr_assert_eq(out.length, want_length, "%s", raw);
    cr_assert_eq(memcmp(out.data, want, want_length), 0, "%s", raw);
    base_buf_deinit(&out);
}

Test(base_json, unescape_joins_surrogates_and_replaces_lone_ones)
{
    unescapes_to("\"\"", "", 0);
    unescapes_to("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\/\b\f\n\r\t", 8);
    unescapes_to("\"a\\u0000b\"", "a\0b", 3);
    unescapes_to("\"\\u00e9\\u00E9\"", "\xC3\xA9\xC3\xA9", 4);
    unescapes_to("\"\\ud83d\\ude00\"", "\xF0\x9F\x98\x80", 4);
    unescapes_to("\"\\uDBFF\\uDFFF\"", "\xF4\x8F\xBF\xBF", 4);
    unescapes_to("\"\\ud83d\"", "\xEF\xBF\xBD", 3);
    unescapes_to("\"\\ude00\"", "\xEF\xBF\xBD", 3);
    unescapes_to("\"\\ud83dx\"", "\xEF\xBF\xBDx", 4);
    unescapes_to("\"\\ud83d\\n\"", "\xEF\xBF\xBD\n", 4);
    unescapes_to("\"\\ud83d\\u0041\"",
                 "\xEF\xBF\xBD"
                 "A",
                 4);
    unescapes_to("\"\\ud83d\\ud83d\\ude00\"", "\xEF\xBF\xBD\xF0\x9F\x98\x80", 7);
    unescapes_to("\"\\ude00\\ud83d\"", "\xEF\xBF\xBD\xEF\xBF\xBD", 6);
    unescapes_to("\"x\\\\u0041\"", "x\\u0041", 7);
}

/* ---- random documents ---- */

static uint64_t draws;

static uint32_t draw(uint32_t bound)
{
    return (uint32_t)((uint64_t)base_rand(77, 0, draws++).v[0] * bound >> 32);
}

static json_t *random_string(void)
{
    char text[64];
    size_t n = 0;
    for (uint32_t i = draw(8); i > 0; i--) {
        static const uint32_t spans[] = {0x20, 0x80, 0x800, 0x10000, 0x110000};
        uint32_t c = draw(spans[draw(5)]);
        if (c != 0 && (c < 0xD800 || c > 0xDFFF)) {
            char one[5] = {0};
            /* jansson's own encoder makes the bytes, not ours. */
            char escaped[32];
            if (c >= 0x10000)
                snprintf(escaped, sizeof escaped, "\"\\u%04x\\u%04x\"",
                         0xD800 + ((c - 0x10000) >> 10), 0xDC00 + ((c - 0x10000) & 0x3FF));
            else
                snprintf(escaped, sizeof escaped, "\"\\u%04x\"", c);
            json_t *s = json_loads(escaped, JSON_DECODE_ANY, NULL);
            strcpy(one, json_string_value(s));
            memcpy(text + n, one, strlen(one));
            n += strlen(one);
            json_decref(s);
        }
    }
    return json_stringn(text, n);
}

static json_t *random_value(uint32_t depth)
{
    switch (draw(depth == 0 ? 6 : 9)) {
    case 0:
        return json_null();
    case 1:
        return json_boolean(draw(2));
    case 2:
        return json_integer((json_int_t)((uint64_t)draw(UINT32_MAX) << draw(32)));
    case 3:
        return json_real(((double)draw(UINT32_MAX) - 2e9) * (draw(2) ? 1e-30 : 1e20));
    case 4:
    case 5:
        return random_string();
    case 6: {
        json_t *object = json_object();
        for (uint32_t i = draw(5); i > 0; i--) {
            json_t *key = random_string();
            json_object_set_new(object, json_string_value(key), random_value(depth - 1));
            json_decref(key);
        }
        return object;
    }
    default: {
        json_t *array = json_array();
        for (uint32_t i = draw(5); i > 0; i--)
            json_array_append_new(array, random_value(depth - 1));
        return array;
    }
    }
}

static void expect_string(const base_json *json, const char *want, size_t length)
{
    base_buf out;
    base_buf_init(&out, 0);
    base_buf_add(&out, "", 0);
    base_json_unescape(&out, json->raw, json->raw_length);
    cr_assert_eq(out.length, length);
    cr_assert_eq(memcmp(out.data, want, length), 0);
    cr_assert(base_json_string_is(json->raw, json->raw_length, want));
    /* Written by us and read again. */
    base_buf_clear(&out);
    base_buf_json_string(&out, want, length);
    json_t *again = json_loadb(out.data, out.length, JSON_DECODE_ANY, NULL);
    cr_assert_str_eq(json_string_value(again), want);
    json_decref(again);
    base_buf_deinit(&out);
}

/* The scanner's events for one value must be those of the tree. */
static void expect_value(base_json *json, json_t *want)
{
    base_json_kind kind = base_json_next(json);
    char number[64];
    switch (json_typeof(want)) {
    case JSON_NULL:
        cr_assert_eq(kind, BASE_JSON_NULL);
        break;
    case JSON_TRUE:
        cr_assert_eq(kind, BASE_JSON_TRUE);
        break;
    case JSON_FALSE:
        cr_assert_eq(kind, BASE_JSON_FALSE);
        break;
    case JSON_INTEGER:
    case JSON_REAL:
        cr_assert_eq(kind, BASE_JSON_NUMBER);
        snprintf(number, sizeof number, "%.*s", (int)json->raw_length, json->raw);
        if (json_is_integer(want))
            cr_assert_eq(strtoll(number, NULL, 10), json_integer_value(want));
        else
            cr_assert(strtod(number, NULL) == json_real_value(want));
        break;
    case JSON_STRING:
        cr_assert_eq(kind, BASE_JSON_STRING);
        expect_string(json, json_string_value(want), json_string_length(want));
        break;
    case JSON_ARRAY:
        cr_assert_eq(kind, BASE_JSON_ARRAY_BEGIN);
        for (size_t i = 0; i < json_array_size(want); i++)
            expect_value(json, json_array_get(want, i));
        cr_assert_eq(base_json_next(json), BASE_JSON_ARRAY_END);
        break;
    case JSON_OBJECT: {
        const char *key;
        json_t *value;
        cr_assert_eq(kind, BASE_JSON_OBJECT_BEGIN);
        json_object_foreach(want, key, value)
        {
            cr_assert_eq(base_json_next(json), BASE_JSON_KEY);
            expect_string(json, key, strlen(key));
            expect_value(json, value);
        }
        cr_assert_eq(base_json_next(json), BASE_JSON_OBJECT_END);
        break;
    }
    }
}

Test(base_json, random_documents_read_as_jansson_wrote_them, .timeout = 120)
{
    for (int round = 0; round < 10000; round++) {
        json_t *tree = json_array();
        for (int i = 0; i < 4; i++)
            json_array_append_new(tree, random_value(6));
        size_t flags =
            JSON_ENCODE_ANY | JSON_REAL_PRECISION(17) | (draw(2) ? JSON_ENSURE_ASCII : 0) |
            (draw(2) ? JSON_COMPACT : JSON_INDENT(draw(4))) | (draw(2) ? JSON_ESCAPE_SLASH : 0);
        char *text = json_dumps(tree, flags);
        base_json json;
        base_json_init(&json, text, strlen(text), 16);
        expect_value(&json, tree);
        cr_assert_eq(base_json_next(&json), BASE_JSON_END, "round %d: %s", round, text);
        free(text);
        json_decref(tree);
    }
}

/* jansson refuses some texts that are JSON: numbers past its range, lone surrogates, NUL in a key.
 */
static bool own_limit(const json_error_t *error)
{
    return json_error_code(error) == json_error_numeric_overflow ||
           strstr(error->text, "Unicode") != NULL || strstr(error->text, "NUL") != NULL;
}

Test(base_json, damaged_documents_are_refused_as_jansson_does, .timeout = 120)
{
    uint32_t accepted = 0, refused = 0;
    static const char bytes[] = "{}[]:,\"\\0123456789eE+-.tfnu \n\x01\x80\xC3\xED\xFF/a";
    for (int round = 0; round < 60000; round++) {
        json_t *tree = random_value(3);
        char *dumped = json_dumps(tree, JSON_ENCODE_ANY | (draw(2) ? JSON_ENSURE_ASCII : 0));
        size_t length = strlen(dumped);
        char *text = malloc(length + 2);
        memcpy(text, dumped, length + 1);
        for (uint32_t edits = 1 + draw(2); edits > 0; edits--) {
            uint32_t at = draw((uint32_t)length);
            char c = bytes[draw(sizeof bytes - 1)];
            switch (draw(3)) {
            case 0:
                if (length > 0)
                    text[at] = c;
                break;
            case 1:
                if (length > 0)
                    memmove(text + at, text + at + 1, --length - at);
                break;
            default:
                length = at; /* cut */
            }
        }
        json_error_t error;
        json_t *parsed = json_loadb(text, length, JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
        bool ours = accepts(text, length, 64);
        if (ours != (parsed != NULL) && !(ours && own_limit(&error)))
            cr_assert_fail("round %d: %.*s: %s", round, (int)length, text,
                           parsed ? "jansson accepts" : error.text);
        accepted += ours;
        refused += !ours;
        json_decref(parsed);
        json_decref(tree);
        free(dumped);
        free(text);
    }
    cr_assert_gt(accepted, 1000);
    cr_assert_gt(refused, 1000);
}

/* ---- JSONTestSuite ---- */

static char *read_file(const char *path, size_t *length)
{
    FILE *file = fopen(path, "rb");
    cr_assert_not_null(file, "%s", path);
    char *text = malloc(1 << 20);
    *length = fread(text, 1, 1 << 20, file);
    fclose(file);
    return text;
}

Test(base_json, the_vectors_of_json_test_suite)
{
    const char *data = getenv("WHIMBREL_TEST_DATA");
    char archive[1024], folder[] = "/tmp/json-test-suite-XXXXXX", command[2400], vectors[64];
    if (data == NULL || *data == '\0')
        cr_skip_test("WHIMBREL_TEST_DATA names no data folder");
    snprintf(archive, sizeof archive, "%s/json-test-suite/test_parsing.tar.xz", data);
    if (access(archive, R_OK) != 0)
        cr_skip_test("%s is not there", archive);
    cr_assert_not_null(mkdtemp(folder));
    snprintf(command, sizeof command, "tar -xJf '%s' -C '%s'", archive, folder);
    int unpacked = system(command);
    snprintf(vectors, sizeof vectors, "%s/test_parsing", folder);
    DIR *dir = opendir(vectors);
    uint32_t must = 0, must_not = 0, either = 0, wrong = 0;
    for (struct dirent *e; unpacked == 0 && dir != NULL && (e = readdir(dir)) != NULL;) {
        char path[512];
        size_t length;
        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", vectors, e->d_name);
        char *text = read_file(path, &length);
        bool ours = accepts(text, length, BASE_JSON_DEPTH_MAX);
        must += e->d_name[0] == 'y';
        must_not += e->d_name[0] == 'n';
        either += e->d_name[0] == 'i'; /* read without a fault is all that is asked */
        if ((e->d_name[0] == 'y' && !ours) || (e->d_name[0] == 'n' && ours)) {
            cr_log_error("%s: %s", e->d_name, ours ? "accepted" : "refused");
            wrong++;
        }
        free(text);
    }
    if (dir != NULL)
        closedir(dir);
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    int removed = system(command);
    if (unpacked != 0)
        cr_skip_test("tar cannot unpack %s", archive);
    cr_assert_eq(removed, 0);
    cr_assert_eq(wrong, 0);
    cr_assert_gt(must, 90);
    cr_assert_gt(must_not, 180);
    cr_log_info("%u to accept, %u to refuse, %u either", must, must_not, either);
}
