/* Elements of bodies that come again: the scan against what jansson makes of the same text, and the
 * trees that are kept. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/buf.h"
#include "engine/base/rand.h"
#include "gateway/body.h"
#include "gateway/slice.h"

TestSuite(slice, .timeout = 120);

Test(slice, the_scan_finds_the_elements_or_nothing)
{
    static const struct {
        const char *text, *name, *elements; /* elements NULL: not looked through */
    } rows[] = {
        {"{\"messages\":[]}", "messages", ""},
        {" {\"a\":1, \"messages\" : [ 1 ,\"x\",{\"a\":[1,2]} , [ ] ] } ", "messages",
         "1|\"x\"|{\"a\":[1,2]}|[ ]|"},
        {"{\"input\":[{\"t\":\"]},\\\"\"}],\"z\":{\"messages\":[3]}}", "input",
         "{\"t\":\"]},\\\"\"}|"},
        {"{\"input\":\"text\"}", NULL, NULL},
        {"{\"messages\":[1],\"messages\":[2,3]}", "messages", "2|3|"}, /* the last one counts */
        {"{\"messages\":[1],\"messages\":4}", NULL, NULL},
        {"{\"messages\":[1],\"input\":\"text\"}", "messages", "1|"},
        {"{\"messages\":[1],\"input\":[2]}", NULL, NULL},
        {"{\"mess\\u0061ges\":[1]}", NULL, NULL},
        {"{\"messages\":[1,]}", NULL, NULL},
        {"{\"messages\":[,1]}", NULL, NULL},
        {"{\"messages\":[1 2]}", NULL, NULL},
        {"{\"messages\":[1}", NULL, NULL},
        {"{\"messages\":[1]", NULL, NULL},
        {"{\"messages\":[1]}x", NULL, NULL},
        {"{\"messages\":[\"1]}", NULL, NULL},
        {"{\"messages\":[\"1\\", NULL, NULL},
        {"{\"messages\"[1]}", NULL, NULL},
        {"{messages:[1]}", NULL, NULL},
        {"[\"messages\",[1]]", NULL, NULL},
        {"{", NULL, NULL},
        {"", NULL, NULL},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        gw_slice at[8];
        const char *name, *text = rows[i].text;
        uint32_t count = gw_slice_scan(at, 8, &name, text, strlen(text));
        cr_expect_eq(count == UINT32_MAX, rows[i].elements == NULL, "row %zu", i);
        if (count == UINT32_MAX)
            continue;
        cr_expect_str_eq(name, rows[i].name, "row %zu", i);
        char said[128] = "";
        for (uint32_t k = 0; k < count; k++)
            sprintf(said + strlen(said), "%.*s|", (int)at[k].length, text + at[k].begin);
        cr_expect_str_eq(said, rows[i].elements, "row %zu", i);
    }
    gw_slice one;
    const char *name;
    cr_assert_eq(gw_slice_scan(&one, 1, &name, "{\"input\":[1,2,3]}", 17), 3);
    cr_assert_eq(one.begin, 10);
}

static void add_message(base_buf *out, uint32_t n)
{
    base_buf_printf(out, "%s{\"role\":\"%s\",\"n\":%u,\"content\":\"", n ? "," : "",
                    n % 2 ? "assistant" : "user", n);
    for (uint32_t i = 0; i < 20 + n % 7; i++)
        base_buf_printf(out, "%u \\\"words\\\" of it\\n ", n);
    base_buf_puts(out, "\"}");
}

static void make_body(base_buf *out, uint32_t first, uint32_t count)
{
    base_buf_init(out, 0);
    base_buf_puts(out, "{\"model\":\"m\",\"messages\":[");
    for (uint32_t i = 0; i < count; i++) {
        if (i == 0 && first) /* a first one that is new each time */
            base_buf_printf(out, "{\"role\":\"system\",\"content\":\"%u\"}", first);
        else
            add_message(out, i);
    }
    base_buf_puts(out, "],\"stream\":true}");
}

/* As the plain parser, whatever the text: tree, code and error. */
static json_t *parse(gw_slices *slices, const char *text, size_t length, int64_t tenant)
{
    char *one = malloc(length + 1), *two = malloc(length + 1);
    memcpy(one, text, length);
    memcpy(two, text, length);
    one[length] = two[length] = '\0';
    json_t *tree = NULL, *plain = NULL;
    base_err a = BASE_ERR_INIT, b = BASE_ERR_INIT;
    base_code code = gw_slices_parse(slices, &tree, one, length, tenant, &a);
    cr_assert_eq(code, gw_body_parse(&plain, two, length, &b));
    cr_assert_str_eq(a.text, b.text);
    cr_assert(code || json_equal(tree, plain));
    json_decref(plain);
    free(one);
    free(two);
    return tree;
}

Test(slice, a_note_is_found_by_the_text_of_a_kept_tree_and_goes_with_it)
{
    gw_slices *slices = gw_slices_create(0);
    uint8_t digest[GW_SLICE_DIGEST_BYTES], noted[GW_SLICE_DIGEST_BYTES];
    memset(noted, 7, sizeof(noted));
    base_buf body;
    base_buf_init(&body, 0);
    base_buf_puts(&body, "{\"messages\":[0,1,2");
    for (uint32_t i = 3; i < 10; i++)
        base_buf_printf(&body, ",{\"role\":\"tool\",\"n\":%u,\"content\":\"%0900u\"}", i, i);
    base_buf_puts(&body, "]}");
    json_t *tree = parse(slices, body.data, body.length, 1);
    json_t *other = parse(slices, body.data, body.length, 2);
    json_t *text = json_object_get(json_array_get(json_object_get(tree, "messages"), 3), "content");
    const char *at = json_string_value(text);
    size_t length = json_string_length(text);
    char *copy = strdup(at);
    cr_assert_not(gw_slices_recall(slices, digest, at, length, 1), "nothing was noted");
    gw_slices_note(slices, noted, at, length, 1);
    cr_assert(gw_slices_recall(slices, digest, at, length, 1));
    cr_assert_arr_eq(digest, noted, sizeof(noted));
    cr_assert_not(gw_slices_recall(slices, digest, at, length, 2), "of another kind");
    cr_assert_not(gw_slices_recall(slices, digest, at, length - 1, 1), "a part of it");
    /* Equal bytes elsewhere: a text that no tree keeps, and another tenant's tree. */
    gw_slices_note(slices, noted, copy, length, 1);
    cr_assert_not(gw_slices_recall(slices, digest, copy, length, 1));
    text = json_object_get(json_array_get(json_object_get(other, "messages"), 3), "content");
    cr_assert_not(gw_slices_recall(slices, digest, json_string_value(text), length, 1));
    /* The same element in the next turn's body. */
    json_t *next = parse(slices, body.data, body.length, 1);
    text = json_object_get(json_array_get(json_object_get(next, "messages"), 3), "content");
    cr_assert(gw_slices_recall(slices, digest, json_string_value(text), length, 1));
    /* The caller still holds the text; who keeps it does not. */
    gw_slices_clear(slices);
    cr_assert_eq(gw_slices_get_stats(slices).bytes, 0);
    cr_assert_not(gw_slices_recall(slices, digest, at, length, 1));
    gw_slices_note(slices, noted, at, length, 1);
    cr_assert_not(gw_slices_recall(slices, digest, at, length, 1));
    json_decref(tree);
    json_decref(other);
    json_decref(next);
    base_buf_deinit(&body);
    free(copy);
    gw_slices_destroy(slices);
}

Test(slice, what_comes_again_is_the_same_tree)
{
    gw_slices *slices = gw_slices_create(0);
    base_buf body;
    json_t *last = NULL;
    for (uint32_t turns = 0; turns < 10; turns++) {
        make_body(&body, turns + 1, 20 + 2 * turns);
        json_t *tree = parse(slices, body.data, body.length, 1);
        json_t *now = json_object_get(tree, "messages"), *then = json_object_get(last, "messages");
        for (size_t i = 1; i < json_array_size(then); i++)
            cr_assert_eq(json_array_get(now, i), json_array_get(then, i), "element %zu", i);
        cr_assert(!then || json_array_get(now, 0) != json_array_get(then, 0));
        json_decref(last);
        last = tree;
        base_buf_deinit(&body);
    }
    gw_slice_stats stats = gw_slices_get_stats(slices);
    cr_assert_eq(stats.parsed, 19 + 9 * 2 + 10);
    cr_assert_eq(stats.known + stats.parsed, 20 * 10 + 2 * 45);
    /* Another tenant has trees of its own; what is forgotten is parsed anew. */
    make_body(&body, 1, 20);
    json_t *other = parse(slices, body.data, body.length, 2);
    cr_assert_neq(json_array_get(json_object_get(other, "messages"), 3),
                  json_array_get(json_object_get(last, "messages"), 3));
    gw_slices_clear(slices);
    cr_assert_eq(gw_slices_get_stats(slices).bytes, 0);
    json_t *anew = parse(slices, body.data, body.length, 1);
    cr_assert_neq(json_array_get(json_object_get(anew, "messages"), 3),
                  json_array_get(json_object_get(last, "messages"), 3));
    json_decref(other);
    json_decref(anew);
    gw_slices_destroy(slices);
    /* Trees outlive what kept them. */
    cr_assert_eq(json_integer_value(
                     json_object_get(json_array_get(json_object_get(last, "messages"), 5), "n")),
                 5);
    json_decref(last);
    base_buf_deinit(&body);
}

Test(slice, what_is_kept_is_bounded)
{
    gw_slices *slices = gw_slices_create(64 << 10);
    for (uint32_t n = 0; n < 200; n++) {
        base_buf body;
        base_buf_init(&body, 0);
        base_buf_puts(&body, "{\"input\":[");
        for (uint32_t i = 0; i < 10; i++)
            base_buf_printf(&body, "%s{\"text\":\"%0*u\"}", i ? "," : "", 500, n + i);
        base_buf_puts(&body, "]}");
        json_decref(parse(slices, body.data, body.length, 1));
        base_buf_deinit(&body);
        cr_assert_leq(gw_slices_get_stats(slices).bytes, 64 << 10);
    }
    cr_assert_gt(gw_slices_get_stats(slices).known, 0);
    gw_slices_destroy(slices);
}

/* Bytes changed, cut out, doubled and cut off at random: always what the plain parser says. */
Test(slice, any_text_is_parsed_as_without_it)
{
    static const char marks[] = "{}[]\",:\\0123456789eE+-.untrlfas \n\t";
    gw_slices *slices = gw_slices_create(1 << 20);
    base_buf body;
    make_body(&body, 0, 24);
    json_decref(parse(slices, body.data, body.length, 1));
    uint32_t good = 0;
    const char *rounds = getenv("WHIMBREL_LONG");
    for (uint64_t n = 0; n < (rounds ? 200000 : 4000); n++) {
        char *text = malloc(2 * body.length + 1);
        size_t length = body.length;
        memcpy(text, body.data, length);
        uint32_t changes = 1 + base_rand(1, 1, n).v[0] % 3;
        for (uint32_t k = 0; k < changes; k++) {
            base_rand4 rand = base_rand(1, 2 + k, n);
            const uint32_t *r = rand.v;
            size_t at = r[0] % length, span = r[1] % 40;
            span = span < length - at ? span : length - at;
            switch (r[2] % 4) {
            case 0:
                text[at] = marks[r[3] % (sizeof marks - 1)];
                break;
            case 1:
                memmove(text + at, text + at + span, length - at - span);
                length -= span;
                break;
            case 2:
                if (length + span > 2 * body.length)
                    break;
                memmove(text + at + span, text + at, length - at);
                length += span;
                break;
            default:
                length = r[3] % 8 ? length : at + 1;
            }
        }
        text[length] = '\0';
        if (!gw_body_mend(text, length, 128, NULL)) {
            json_t *tree = parse(slices, text, length, 1);
            good += tree != NULL;
            json_decref(tree);
        }
        free(text);
    }
    cr_assert_gt(good, 100);
    base_buf_deinit(&body);
    gw_slices_destroy(slices);
}

static void *parse_many(void *ctx)
{
    for (uint32_t n = 0; n < 200; n++) {
        base_buf body;
        make_body(&body, n % 5, 20 + n % 11);
        json_decref(parse(ctx, body.data, body.length, n % 2));
        base_buf_deinit(&body);
    }
    return NULL;
}

Test(slice, threads_share_the_trees)
{
    gw_slices *slices = gw_slices_create(100 << 10); /* so little that trees leave while in use */
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, parse_many, slices), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    gw_slices_destroy(slices);
}
