/* Grammars: the cases, what each compiler enforces and refuses, masks against plain stepping, and
 * the two public suites where WHIMBREL_TEST_DATA holds them. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/rand.h"
#include "engine/grammar.h"

#define CASES SOURCE_ROOT "/tests/engine/cases/schema-grammar.json"
#define NANO_TOKENIZER SOURCE_ROOT "/config/models/nano/tokenizer.json"

/* As a validator judges: any order, any spelling of a number, formats as asked. */
static const eng_grammar_options judge = {.any_order = true, .any_number = true};

static eng_grammar *compile(const char *schema, const eng_grammar_options *options)
{
    base_err err = BASE_ERR_INIT;
    eng_grammar *g;
    cr_assert_eq(eng_grammar_schema(&g, schema, strlen(schema), options, &err), BASE_OK, "%s: %s",
                 schema, err.text);
    return g;
}

static eng_grammar_run *run_of(eng_grammar *g)
{
    base_err err = BASE_ERR_INIT;
    eng_grammar_run *run;
    cr_assert_eq(eng_grammar_run_create(&run, g, NULL, &err), BASE_OK, "%s", err.text);
    return run;
}

static bool run_accepts(eng_grammar_run *run, const char *text, size_t length)
{
    eng_grammar_state state;
    eng_grammar_start(&state, run);
    bool accepted = eng_grammar_advance(&state, text, length) && eng_grammar_accepts(&state);
    eng_grammar_end(&state);
    return accepted;
}

static bool accepts_bytes(eng_grammar *g, const char *text, size_t length)
{
    eng_grammar_run *run = run_of(g);
    bool accepted = run_accepts(run, text, length);
    eng_grammar_run_destroy(run);
    return accepted;
}

static void expect(const char *schema, const eng_grammar_options *options, const char *text,
                   bool accepted)
{
    eng_grammar *g = compile(schema, options);
    cr_expect_eq(accepts_bytes(g, text, strlen(text)), accepted, "%s: %s %s", schema, text,
                 accepted ? "is refused" : "is accepted");
    eng_grammar_unref(g);
}

static void expect_refused(const char *schema, base_code code, const char *keyword,
                           const char *pointer)
{
    base_err err = BASE_ERR_INIT;
    eng_grammar *g;
    cr_expect_eq(eng_grammar_schema(&g, schema, strlen(schema), NULL, &err), code, "%s: %d %s",
                 schema, (int)err.code, err.text);
    cr_expect_null(g);
    cr_expect_not_null(strstr(err.text, keyword), "%s: %s", schema, err.text);
    cr_expect_str_eq(err.param, pointer);
}

/* jansson's reals have a fixed number of digits: 15 give back what a document wrote, unless it
 * wrote more. */
static char *dump_as(const json_t *json, size_t digits)
{
    char *text = json_dumps(json, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(digits));
    cr_assert_not_null(text);
    return text;
}

static char *dump(const json_t *json)
{
    return dump_as(json, 16);
}

/* ---- the cases ---- */

static void case_texts(eng_grammar *g, const char *id, const json_t *texts, bool accepted)
{
    size_t i;
    json_t *text;
    json_array_foreach(texts, i, text)
    {
        char raw[256];
        size_t n = 0;
        for (const char *s = json_string_value(text); *s != '\0';) {
            unsigned code;
            if (sscanf(s, "<U+%4x>", &code) == 1) {
                raw[n++] = (char)code;
                s += 8;
            } else {
                raw[n++] = *s++;
            }
        }
        cr_expect_eq(accepts_bytes(g, raw, n), accepted, "%s: %.*s", id, (int)n, raw);
    }
}

Test(eng_grammar, the_cases_of_schema_grammar)
{
    json_error_t error;
    json_t *cases = json_load_file(CASES, 0, &error), *one;
    cr_assert_not_null(cases, "%s", error.text);
    size_t i, seen = 0;
    json_array_foreach(cases, i, one)
    {
        const char *id = json_string_value(json_object_get(one, "id"));
        json_t *expected = json_object_get(one, "expect");
        json_t *schema = json_object_get(json_object_get(one, "input"), "schema");
        if (schema == NULL) {
            json_t *at = json_object_get(one, "request");
            if (at == NULL)
                at = json_object_get(json_object_get(one, "input"), "request");
            else
                at = json_object_get(at, "body");
            at = json_object_get(json_object_get(at, "response_format"), "json_schema");
            schema = json_object_get(at, "schema");
        }
        cr_assert_not_null(schema, "%s", id);
        char *text = dump(schema);
        json_t *rows = json_object_get(expected, "rows"), *row;
        size_t k;
        base_err err = BASE_ERR_INIT;
        eng_grammar *g = NULL;
        seen++;
        json_array_foreach(rows, k, row)
        {
            char *own = dump(json_object_get(row, "schema"));
            base_err row_err = BASE_ERR_INIT;
            base_code code = eng_grammar_schema(&g, own, strlen(own), NULL, &row_err);
            cr_expect_eq(code == BASE_OK, json_integer_value(json_object_get(row, "status")) == 200,
                         "%s: %s %s", id, own, row_err.text);
            eng_grammar_unref(g);
            free(own);
        }
        if (rows == NULL && json_integer_value(json_object_get(expected, "status")) == 400) {
            cr_expect_eq(eng_grammar_schema(&g, text, strlen(text), NULL, &err), BASE_INVALID);
            cr_expect_not_null(
                strstr(err.text, json_string_value(json_object_get(expected, "error_contains"))));
        } else if (rows == NULL) {
            g = compile(text, NULL);
            json_t *loose = json_object_get(expected, "non_strict");
            case_texts(g, id, json_object_get(expected, "accept"), true);
            case_texts(g, id, json_object_get(expected, "reject"), false);
            case_texts(g, id, json_object_get(expected, "reject_raw"), false);
            case_texts(g, id, json_object_get(loose, "accept"), true);
            case_texts(g, id, json_object_get(loose, "reject"), false);
            eng_grammar_unref(g);
            json_t *closed = json_object_get(expected, "with_false");
            if (closed != NULL) {
                json_object_set_new(schema, "additionalProperties", json_false());
                char *own = dump(schema);
                g = compile(own, NULL);
                case_texts(g, id, json_object_get(closed, "accept"), true);
                case_texts(g, id, json_object_get(closed, "reject"), false);
                eng_grammar_unref(g);
                free(own);
            }
        }
        free(text);
    }
    cr_assert_eq(seen, 9);
    json_decref(cases);
}

/* ---- the public suites ---- */

static bool unpack(const char *name, const char *program, char folder[64])
{
    const char *data = getenv("WHIMBREL_TEST_DATA");
    char archive[1024], command[2400];
    if (data == NULL || *data == '\0')
        return false;
    snprintf(archive, sizeof archive, "%s/%s", data, name);
    strcpy(folder, "/tmp/grammar-suite-XXXXXX");
    if (access(archive, R_OK) != 0 || mkdtemp(folder) == NULL)
        return false;
    snprintf(command, sizeof command, program, archive, folder);
    return system(command) == 0;
}

static void drop(const char *folder)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    cr_assert_eq(system(command), 0);
}

typedef struct tally {
    uint32_t groups, refused, tests, wrong;
} tally;

static void judge_group(tally *t, const char *file, const json_t *group, uint32_t draft,
                        bool format)
{
    eng_grammar_options options = judge;
    options.draft = draft;
    options.any_format = !format;
    char *schema = dump(json_object_get(group, "schema"));
    base_err err = BASE_ERR_INIT;
    eng_grammar *g;
    json_t *test;
    size_t i;
    t->groups++;
    base_code code = eng_grammar_schema(&g, schema, strlen(schema), &options, &err);
    bool nothing = code == BASE_INVALID && strstr(err.text, "admits no text") != NULL;
    eng_grammar_run *run = code == BASE_OK ? run_of(g) : NULL;
    if (code == BASE_OK || nothing) {
        json_array_foreach(json_object_get(group, "tests"), i, test)
        {
            char *data = dump(json_object_get(test, "data"));
            bool valid = json_is_true(json_object_get(test, "valid"));
            bool ours = !nothing && run_accepts(run, data, strlen(data));
            t->tests++;
            if (ours != valid) {
                t->wrong++;
                cr_log_error("%s: %s / %s: %s with %s", file,
                             json_string_value(json_object_get(group, "description")),
                             json_string_value(json_object_get(test, "description")), data, schema);
            }
            free(data);
        }
    } else {
        t->refused++;
        if (getenv("GRAMMAR_VERBOSE") != NULL)
            printf("%s: %s\n", file, err.text);
        /* The place, and its keyword by name. */
        const char *keyword = strrchr(err.param, '/');
        cr_expect(keyword != NULL && strstr(err.text, keyword + 1) != NULL, "%s: %s at %s", file,
                  err.text, err.param);
    }
    eng_grammar_run_destroy(run);
    eng_grammar_unref(g);
    free(schema);
}

static tally judge_folder(const char *folder, const char *draft_name, uint32_t draft)
{
    char command[256], line[512];
    tally t = {0};
    snprintf(command, sizeof command, "ls %s/tests/%s/*.json", folder, draft_name);
    FILE *list = popen(command, "r");
    while (list != NULL && fgets(line, sizeof line, list) != NULL) {
        json_error_t error;
        line[strcspn(line, "\n")] = '\0';
        json_t *groups = json_load_file(line, JSON_DECODE_ANY | JSON_ALLOW_NUL, &error), *group;
        size_t i;
        cr_assert_not_null(groups, "%s: %s", line, error.text);
        json_array_foreach(groups, i, group)
            judge_group(&t, strrchr(line, '/') + 1, group, draft, false);
        json_decref(groups);
    }
    if (list != NULL)
        pclose(list);
    return t;
}

Test(eng_grammar, the_json_schema_test_suite, .timeout = 300)
{
    char folder[64];
    if (!unpack("json-schema-test-suite/tests.tar.xz", "tar -xJf '%s' -C '%s'", folder))
        cr_skip_test("WHIMBREL_TEST_DATA names no json-schema-test-suite");
    tally new = judge_folder(folder, "draft2020-12", 2020), old = judge_folder(folder, "draft7", 7);
    drop(folder);
    cr_log_info("2020-12: %u groups, %u refused, %u tests, %u wrong; draft 7: %u, %u, %u, %u",
                new.groups, new.refused, new.tests, new.wrong, old.groups, old.refused, old.tests,
                old.wrong);
    printf("2020-12: %u groups, %u refused, %u tests, %u wrong; draft 7: %u, %u, %u, %u\n",
           new.groups, new.refused, new.tests, new.wrong, old.groups, old.refused, old.tests,
           old.wrong);
    cr_assert_gt(new.groups, 300);
    cr_assert_eq(new.wrong + old.wrong, 0);
    cr_assert_leq(new.refused * 100, new.groups * 10, "%u of %u are refused", new.refused,
                  new.groups);
}

static int by_value(const void *pa, const void *pb)
{
    uint64_t a = *(const uint64_t *)pa, b = *(const uint64_t *)pb;
    return a < b ? -1 : a > b;
}

Test(eng_grammar, the_instances_of_json_schema_bench, .timeout = 600)
{
    char folder[64], path[128];
    if (!unpack("jsonschemabench/maskbench_subset.jsonl.xz", "xz -dc '%s' > '%s/all'", folder))
        cr_skip_test("WHIMBREL_TEST_DATA names no jsonschemabench");
    snprintf(path, sizeof path, "%s/all", folder);
    FILE *file = fopen(path, "r");
    char *line = NULL;
    size_t capacity = 0, i;
    uint32_t schemas = 0, accepted = 0, tests = 0, wrong = 0, unread = 0, lines = 0;
    uint32_t every = getenv("WHIMBREL_LONG") != NULL ? 1 : 16; /* all of them take minutes */
    static uint64_t times[8192];
    while (getline(&line, &capacity, file) > 0) {
        if (lines++ % every != 0)
            continue;
        json_error_t error;
        json_t *whole = json_loads(line, JSON_ALLOW_NUL, &error), *test;
        if (whole == NULL) { /* a NUL in a key, which jansson does not read */
            unread++;
            continue;
        }
        json_t *one = json_object_get(whole, "case");
        char *schema = dump(json_object_get(one, "schema"));
        base_err err = BASE_ERR_INIT;
        eng_grammar *g;
        uint64_t begin = base_now_ns();
        base_code code = eng_grammar_schema(&g, schema, strlen(schema), &judge, &err);
        times[schemas++] = base_now_ns() - begin;
        accepted += code == BASE_OK;
        if (code != BASE_OK && getenv("GRAMMAR_VERBOSE") != NULL)
            printf("refused %s: %s\n", json_string_value(json_object_get(whole, "file")), err.text);
        eng_grammar_run *run = code == BASE_OK ? run_of(g) : NULL;
        json_array_foreach(code == BASE_OK ? json_object_get(one, "tests") : NULL, i, test)
        {
            char *data = dump_as(json_object_get(test, "data"), 15);
            bool valid = json_is_true(json_object_get(test, "valid"));
            tests++;
            if (run_accepts(run, data, strlen(data)) != valid) {
                wrong++;
                if (getenv("GRAMMAR_VERBOSE") != NULL)
                    printf("wrong %s %s: %.300s\n",
                           json_string_value(json_object_get(whole, "file")),
                           valid ? "valid" : "invalid", data);
            }
            free(data);
        }
        eng_grammar_run_destroy(run);
        eng_grammar_unref(g);
        free(schema);
        json_decref(whole);
    }
    free(line);
    fclose(file);
    drop(folder);
    qsort(times, schemas, sizeof *times, by_value);
    printf("%u schemas, %u accepted (%.1f %%), %u instances, %u wrong; compile p50 %.3f ms, "
           "p99 %.3f ms\n",
           schemas, accepted, 100.0 * accepted / schemas, tests, wrong,
           (double)times[schemas / 2] / 1e6, (double)times[schemas * 99 / 100] / 1e6);
    cr_assert_lt(unread, 10);
    cr_assert_geq(tests - wrong, tests * 0.995);
}

/* ---- what the compilers enforce ---- */

Test(eng_grammar, schemas_in_either_order_and_spelling)
{
    static const char ab[] =
        "{\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"type\":\"number\"}},"
        "\"type\":\"object\",\"required\":[\"b\"],\"additionalProperties\":false}";
    expect(ab, NULL, "{\"a\":1,\"b\":2.5}", true);
    expect(ab, NULL, "{\"a\": 1, \"b\": 2.5}", true);
    expect(ab, NULL, "{\"a\":1, \"b\": 2.5}", false); /* the first separator decides */
    expect(ab, NULL, "{\"a\": 1,\"b\": 2.5}", false);
    expect(ab, NULL, "{\"b\":2.5}", true);
    expect(ab, NULL, "{\"b\":2.5,\"a\":1}", false); /* the schema's order */
    expect(ab, NULL, "{\"a\":1.0,\"b\":2}", false);
    expect(ab, NULL, "{\"a\":1}", false);
    expect(ab, NULL, "{\"a\":1,\"a\":1,\"b\":2}", false);
    expect(ab, &judge, "{\"b\":2.5,\"a\":1.0}", true);
    expect("{\"type\":\"array\",\"items\":{\"enum\":[\"x\",\"y\"]},\"uniqueItems\":true}", NULL,
           "[\"x\",\"x\"]", false);
    expect("{\"type\":\"number\",\"multipleOf\":0.25,\"minimum\":-1,\"exclusiveMaximum\":1e1}",
           NULL, "9.75", true);
    expect("{\"type\":\"number\",\"multipleOf\":0.25,\"minimum\":-1,\"exclusiveMaximum\":1e1}",
           NULL, "10", false);
    expect("{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}", NULL,
           "\"\\ud83d\\ude00\xC3\xA9\"", true);
    expect("{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}", NULL, "\"abcd\"", false);
    expect("{\"type\":\"string\",\"format\":\"date\"}", NULL, "\"2023-02-29\"", false);
}

/* What several keywords ask together. */
Test(eng_grammar, schemas_that_look_at_each_other)
{
    static const struct {
        const char *schema, *yes[4], *no[4];
    } rows[] = {
        {"{\"anyOf\":[{\"properties\":{\"a\":{}}},{\"properties\":{\"b\":{}},\"required\":[\"b\"]}]"
         ","
         "\"unevaluatedProperties\":false,\"type\":\"object\"}",
         {"{\"a\":1}", "{\"b\":1,\"a\":2}", "{}"},
         {"{\"c\":1}", "{\"b\":1,\"c\":2}"}},
        {"{\"type\":\"array\",\"prefixItems\":[{\"type\":\"null\"}],\"contains\":{\"type\":"
         "\"string\"},"
         "\"unevaluatedItems\":{\"type\":\"integer\"}}",
         {"[null,\"a\",1]", "[null,2,\"a\",\"b\"]"},
         {"[null]", "[null,1]", "[null,true,\"a\"]"}},
        {"{\"type\":\"array\",\"items\":{\"type\":[\"integer\",\"string\"]},\"contains\":{\"type\":"
         "\"integer\"},\"minContains\":1,\"maxContains\":2}",
         {"[1]", "[\"a\",1,2]", "[1,\"a\",\"b\",2]"},
         {"[]", "[\"a\"]", "[1,2,3]", "[1,\"a\",2,3]"}},
        {"{\"type\":\"array\",\"maxItems\":2,\"allOf\":[{\"contains\":{\"minimum\":5}},"
         "{\"contains\":{\"multipleOf\":3}}],\"items\":{\"type\":\"integer\"}}",
         {"[6]", "[5,3]", "[1,9]"},
         {"[5]", "[3,4]", "[1,2]", "[5,7,3]"}},
        {"{\"type\":\"object\",\"not\":{\"additionalProperties\":{\"type\":\"integer\"}}}",
         {"{\"x\":\"a\"}", "{\"x\":1,\"y\":null}"},
         {"{}", "{\"x\":1}"}},
        {"{\"type\":\"object\",\"properties\":{\"k\":{}},\"oneOf\":[{\"properties\":{\"k\":{"
         "\"type\":"
         "\"integer\"}}},{\"patternProperties\":{\"^k\":{\"minimum\":0}}}]}",
         {"{\"k\":-1}", "{\"k\":\"a\"}", "{\"k\":1,\"kk\":-1}"},
         {"{}", "{\"k\":1}", "{\"k\":\"a\",\"kk\":-1}"}},
        {"{\"$id\":\"http://a.b/c/d\",\"$ref\":\"../e\",\"$defs\":{\"x\":{\"$id\":\"/e\","
         "\"$ref\":\"#n\",\"$defs\":{\"y\":{\"$anchor\":\"n\",\"type\":\"null\"}}}}}",
         {"null"},
         {"1"}},
        {"{\"$id\":\"http://a/t\",\"$ref\":\"list\",\"$defs\":{\"own\":{\"$dynamicAnchor\":\"t\","
         "\"type\":\"null\"},\"list\":{\"$id\":\"list\",\"type\":\"array\",\"items\":{\"$"
         "dynamicRef\":"
         "\"#t\"},\"$defs\":{\"any\":{\"$dynamicAnchor\":\"t\"}}}}}",
         {"[]", "[null]"},
         {"[1]"}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (size_t k = 0; k < 4; k++) {
            if (rows[i].yes[k] != NULL)
                expect(rows[i].schema, &judge, rows[i].yes[k], true);
            if (rows[i].no[k] != NULL)
                expect(rows[i].schema, &judge, rows[i].no[k], false);
        }
}

Test(eng_grammar, refuses_by_name_and_pointer)
{
    expect_refused("{\"properties\":{\"a\":{\"uniqueItems\":true}}}", BASE_UNSUPPORTED,
                   "uniqueItems", "/properties/a/uniqueItems");
    expect_refused("{\"items\":{\"pattern\":\"a\\\\b\"}}", BASE_UNSUPPORTED, "pattern",
                   "/items/pattern");
    expect_refused("{\"$ref\":\"http://example.com/x\"}", BASE_UNSUPPORTED, "$ref", "/$ref");
    expect_refused("{\"not\":{\"uniqueItems\":true}}", BASE_UNSUPPORTED, "not", "/not");
    expect_refused("{\"$defs\":{\"a\":{\"$recursiveRef\":\"#\"}},\"$ref\":\"#/$defs/a\"}",
                   BASE_UNSUPPORTED, "$recursiveRef", "/$defs/a/$recursiveRef");
    expect_refused("{\"type\":\"string\",\"format\":\"iri\"}", BASE_UNSUPPORTED, "format",
                   "/format");
    expect_refused("{\"pattern\":\"(a\"}", BASE_INVALID, "pattern", "/pattern");
    /* no keyword alone is too much, so the place is named */
    expect_refused("{\"items\":{\"type\":\"string\",\"pattern\":\"a\",\"maxLength\":50000}}",
                   BASE_TOO_LONG, "a length of 50000", "/items");
    expect_refused("{\"dependentRequired\":{\"a\":[1]}}", BASE_INVALID, "dependentRequired",
                   "/dependentRequired");
    expect_refused("{\"type\":\"string\",\"pattern\":\"(((a{900}){900}){900}){900}\"}",
                   BASE_TOO_LONG, "pattern", "/pattern");
}

/* Members that a minimum asks for, or that a maximum has no room for, count like required ones. */
Test(eng_grammar, what_no_object_can_be_is_refused)
{
    static const char *const none[] = {
        "{\"type\":\"object\",\"required\":[\"a\"],\"maxProperties\":0}",
        "{\"type\":\"object\",\"minProperties\":1,\"additionalProperties\":{\"$ref\":\"#\"}}",
        "{\"type\":\"object\",\"minProperties\":2,\"properties\":{\"a\":{\"$ref\":\"#\"},\"b\":{}},"
        "\"additionalProperties\":false}",
    };
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        expect_refused(none[i], BASE_INVALID, "admits no text", "");
    /* One that has to be nested so deep, and no deeper. */
    static const char chain[] =
        "{\"$ref\":\"#/$defs/3\",\"$defs\":{\"3\":{\"type\":\"object\",\"minProperties\":2,"
        "\"properties\":{\"n\":{\"type\":\"null\"},\"d\":{\"$ref\":\"#/$defs/2\"}},"
        "\"additionalProperties\":false},\"2\":{\"type\":\"object\",\"minProperties\":1,"
        "\"additionalProperties\":{\"type\":\"array\",\"items\":{\"type\":\"null\"}}}}}";
    expect(chain, NULL, "{\"n\":null,\"d\":{\"x\":[]}}", true);
    expect(chain, NULL, "{\"d\":{\"x\":[]}}", false);
    eng_grammar_options shallow = {0};
    base_err err = BASE_ERR_INIT;
    eng_grammar *g;
    uint32_t least = 0;
    for (shallow.limits.depth_max = 1; shallow.limits.depth_max < 16 && least == 0;
         shallow.limits.depth_max++)
        if (eng_grammar_schema(&g, chain, strlen(chain), &shallow, &err) == BASE_OK) {
            least = shallow.limits.depth_max;
            cr_expect(accepts_bytes(g, "{\"n\":null,\"d\":{\"x\":[]}}", 23));
            eng_grammar_unref(g);
        }
    cr_expect_eq(least, 3);
}

static void expect_gbnf(const char *grammar, const char *text, bool accepted)
{
    base_err err = BASE_ERR_INIT;
    eng_grammar *g;
    cr_assert_eq(eng_grammar_gbnf(&g, grammar, strlen(grammar), NULL, &err), BASE_OK, "%s: %s",
                 grammar, err.text);
    cr_expect_eq(accepts_bytes(g, text, strlen(text)), accepted, "%s: %s", grammar, text);
    eng_grammar_unref(g);
}

Test(eng_grammar, gbnf_regex_and_choices)
{
    static const char sums[] = "# sums\nroot ::= (expr \"=\" ws term \"\\n\")+\n"
                               "expr ::= term ([-+*/] term)*\nterm ::= ident | num |\n"
                               "  \"(\" ws expr \")\" ws\nident ::= [a-z] [a-z0-9_]* ws\n"
                               "num ::= [0-9]+ ws\nws ::= [ \\t\\n]*\n";
    expect_gbnf(sums, "a +(b*2) = 7\n", true);
    expect_gbnf(sums, "a + = 7\n", false);
    expect_gbnf("root ::= \"a\"{2,3} [^b\\x63]? \"\\u00e9\"", "aaa\xC3\xA9", true);
    expect_gbnf("root ::= \"a\"{2,3} [^b\\x63]? \"\\u00e9\"", "aac\xC3\xA9", false);
    expect_gbnf("root ::= \"(\" root \")\" | \"\"", "((()))", true);
    expect_gbnf("root ::= .{2}", "\xE6\x9D\xB1x", true);
    static const char *const bad[] = {"root ::= root \"a\" | \"b\"",
                                      "root ::= a",
                                      "root ::= \"a",
                                      "root ::= [a",
                                      "root ::= (\"a\"",
                                      "a ::= \"b\"",
                                      "root = \"a\"",
                                      "root ::= e root\ne ::= \"\""};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        base_err err = BASE_ERR_INIT;
        eng_grammar *g;
        cr_expect_neq(eng_grammar_gbnf(&g, bad[i], strlen(bad[i]), NULL, &err), BASE_OK, "%s",
                      bad[i]);
        cr_expect_null(g);
    }
    base_err err = BASE_ERR_INIT;
    eng_grammar *g;
    static const char regex[] = "(\\d{3}-)?\\d{4}(?: ext\\.? [1-9]\\d*)?";
    cr_assert_eq(eng_grammar_regex(&g, regex, sizeof regex - 1, NULL, &err), BASE_OK, "%s",
                 err.text);
    cr_expect(accepts_bytes(g, "555-1234 ext 9", 14));
    cr_expect(accepts_bytes(g, "1234", 4));
    cr_expect_not(accepts_bytes(g, "x1234", 5));
    eng_grammar_unref(g);
    const char *texts[] = {"yes", "no", "nothing"};
    const size_t lengths[] = {3, 2, 7};
    cr_assert_eq(eng_grammar_choice(&g, texts, lengths, 3, NULL, &err), BASE_OK, "%s", err.text);
    cr_expect(accepts_bytes(g, "no", 2));
    cr_expect(accepts_bytes(g, "nothing", 7));
    cr_expect_not(accepts_bytes(g, "noth", 4));
    eng_grammar_unref(g);
}

/* ---- masks ---- */

static const char *const walked[] = {
    "{\"type\":\"object\",\"properties\":{\"id\":{\"type\":\"integer\",\"minimum\":3,\"maximum\":"
    "120},"
    "\"name\":{\"type\":\"string\",\"maxLength\":12},\"tags\":{\"type\":\"array\",\"items\":{"
    "\"enum\":["
    "\"a\",\"b "
    "c\",\"\\u00e9\"]},\"maxItems\":4,\"uniqueItems\":true}},\"required\":[\"id\",\"tags\"],"
    "\"additionalProperties\":false}",
    "{\"$ref\":\"#/$defs/"
    "n\",\"$defs\":{\"n\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":["
    "\"number\",\"null\"]},\"kids\":{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/n\"},"
    "\"maxItems\":2}},\"required\":[\"kids\"],\"additionalProperties\":false}}}",
    "{\"type\":\"string\",\"pattern\":\"^[A-Z][a-z]+( [A-Z][a-z]+)?$\",\"maxLength\":24}",
    "{\"anyOf\":[{\"type\":\"string\"},{\"type\":\"object\"},{\"const\":[1,{\"k\":false}]}]}",
};

static bool bit(const uint32_t *mask, int32_t id)
{
    return mask[id / 32] >> id % 32 & 1;
}

/* Every bit of a mask is what stepping says, every walk that is not cut ends accepted and parses.
 */
Test(eng_grammar, masks_agree_with_stepping_and_walks_end_well, .timeout = 300)
{
    base_err err = BASE_ERR_INIT;
    eng_tok *tok;
    eng_vocab *vocab;
    cr_assert_eq(eng_tok_load(&tok, NANO_TOKENIZER, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(eng_vocab_create_tok(&vocab, tok, &err), BASE_OK);
    uint32_t count = eng_tok_vocab(tok), ended = 0;
    for (size_t w = 0; w < sizeof walked / sizeof *walked; w++) {
        eng_grammar *g = compile(walked[w], NULL), *check = compile(walked[w], &judge);
        eng_grammar_run *run;
        cr_assert_eq(eng_grammar_run_create(&run, g, vocab, &err), BASE_OK);
        for (uint32_t seed = 0; seed < 40; seed++) {
            eng_grammar_state state;
            char text[4096];
            size_t length = 0;
            eng_grammar_start(&state, run);
            for (uint32_t step = 0; length < 3000; step++) {
                const uint32_t *mask = eng_grammar_mask(&state, NULL, 0);
                base_rand4 r = base_rand(seed, w, step);
                uint32_t allowed = 0, pick;
                for (uint32_t i = 0; i < eng_vocab_words(vocab); i++)
                    allowed += (uint32_t)__builtin_popcount(mask[i]);
                for (uint32_t i = 0; seed < 4 && i < count; i++) {
                    size_t n;
                    const char *bytes = eng_tok_bytes(tok, (int32_t)i, &n);
                    eng_grammar_state other;
                    eng_grammar_clone(&other, &state);
                    bool may = bytes != NULL && n > 0 && !eng_tok_is_special(tok, (int32_t)i) &&
                               eng_grammar_advance(&other, bytes, n);
                    eng_grammar_end(&other);
                    cr_assert_eq(bit(mask, (int32_t)i), may, "%s: %.*s, then token %u", walked[w],
                                 (int)length, text, i);
                }
                bool end = eng_grammar_accepts(&state);
                cr_assert(end || allowed > 0, "%s: nothing after %.*s", walked[w], (int)length,
                          text);
                if (allowed == 0 || (end && r.v[0] % 4 == 0)) {
                    ended++;
                    break;
                }
                pick = r.v[1] % allowed;
                int32_t id = 0;
                for (;; id++)
                    if (bit(mask, id) && pick-- == 0)
                        break;
                size_t n;
                const char *bytes = eng_tok_bytes(tok, id, &n);
                cr_assert(eng_grammar_advance(&state, bytes, n));
                memcpy(text + length, bytes, n);
                length += n;
            }
            if (eng_grammar_accepts(&state)) {
                json_error_t error;
                json_t *json = json_loadb(text, length, JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
                cr_expect(json != NULL || strstr(error.text, "NUL") != NULL, "%.*s: %s",
                          (int)length, text, error.text);
                cr_expect(accepts_bytes(check, text, length));
                json_decref(json);
            }
            eng_grammar_end(&state);
        }
        eng_grammar_run_destroy(run);
        eng_grammar_unref(g);
        eng_grammar_unref(check);
    }
    cr_assert_gt(ended, 60);
    eng_vocab_destroy(vocab);
    eng_tok_destroy(tok);
}

/* What counts for one `contains` counts for another that has an upper bound: where that leaves no
 * room for what must still come, the way there is not entered. */
Test(eng_grammar, items_that_count_twice_leave_a_way_to_the_end)
{
    static const struct {
        const char *schema, *yes[3], *no[3];
    } rows[] = {
        {"{\"type\":[\"array\",\"null\"],\"allOf\":[{\"contains\":{\"const\":1},\"minContains\":2},"
         "{\"contains\":{\"type\":\"number\"},\"maxContains\":1}]}",
         {"null"},
         {"["}},
        {"{\"type\":[\"array\",\"null\"],\"allOf\":[{\"contains\":{\"type\":\"integer\"}},{"
         "\"contains\":{"
         "\"type\":\"number\"},\"minContains\":0,\"maxContains\":0}]}",
         {"null"},
         {"["}},
        {"{\"type\":\"array\",\"items\":{\"enum\":[1,2,\"a\"]},\"allOf\":[{\"contains\":{\"const\":"
         "1},"
         "\"minContains\":2},{\"contains\":{\"type\":\"number\"},\"maxContains\":2}]}",
         {"[1, 1]", "[\"a\", 1, \"a\", 1", "[1"},
         {"[2", "[1, 2", "[1, 1, 1"}},
        {"{\"type\":\"array\",\"maxItems\":2,\"items\":{\"enum\":[1,2,\"a\"]},\"allOf\":[{"
         "\"contains\":{"
         "\"const\":1}},{\"not\":{\"contains\":{\"const\":2}}}]}",
         {"[1]", "[\"a\", 1]", "[1, 1]"},
         {"[2", "[\"a\", \"a", "[]"}},
    };
    base_err err = BASE_ERR_INIT;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        eng_grammar *g;
        eng_grammar_state state;
        cr_assert_eq(eng_grammar_schema(&g, rows[i].schema, strlen(rows[i].schema), NULL, &err),
                     BASE_OK, "%s: %s", rows[i].schema, err.text);
        eng_grammar_run *run = run_of(g);
        for (size_t k = 0; k < 3; k++)
            for (int yes = 0; yes < 2; yes++) {
                const char *text = yes ? rows[i].yes[k] : rows[i].no[k];
                if (text == NULL)
                    continue;
                eng_grammar_start(&state, run);
                cr_expect_eq(eng_grammar_advance(&state, text, strlen(text)), yes, "%s: %s",
                             rows[i].schema, text);
                eng_grammar_end(&state);
            }
        eng_grammar_run_destroy(run);
        eng_grammar_unref(g);
    }
}

/* A way that the depth has no room for is not entered: however deep a walk goes, it ends. */
Test(eng_grammar, the_bound_of_depth_leaves_a_way_to_the_end, .timeout = 120)
{
    static const char *const deep[] = {
        "{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#\"}}}",
        /* a third of its levels may be the last */
        "{\"$ref\":\"#/$defs/"
        "0\",\"$defs\":{\"0\":{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":"
        "\"#/$defs/"
        "1\"}},\"additionalProperties\":false},\"1\":{\"type\":\"object\",\"properties\":{"
        "\"a\":{\"$ref\":\"#/$defs/"
        "2\"}},\"required\":[\"a\"]},\"2\":{\"type\":\"object\",\"properties\":"
        "{\"a\":{\"$ref\":\"#/$defs/0\"},\"b\":{\"type\":\"null\"}},\"required\":[\"b\",\"a\"]}}}",
        "{\"type\":\"object\",\"minProperties\":2,\"properties\":{\"b\":{\"type\":\"null\"},\"c\":{"
        "\"type\":"
        "\"null\"}},\"additionalProperties\":{\"$ref\":\"#\"}}",
        "{\"type\":\"array\",\"minItems\":2,\"maxItems\":4,\"items\":{\"anyOf\":[{\"type\":"
        "\"null\"},"
        "{\"$ref\":\"#\"}]}}",
        "{\"type\":[\"array\",\"null\"],\"maxItems\":1,\"contains\":{\"$ref\":\"#\"}}",
        "{\"type\":[\"array\",\"null\"],\"prefixItems\":[{\"$ref\":\"#\"}],\"items\":{\"type\":"
        "\"null\"},"
        "\"minItems\":1}",
        "root ::= \"((\" root \"))\" | \"[\" list \"]\" | \"x\"\nlist ::= root \",\" list | root",
    };
    base_err err = BASE_ERR_INIT;
    for (size_t s = 0; s < sizeof deep / sizeof *deep; s++)
        for (uint32_t depth = 4; depth < 12; depth++) {
            eng_grammar_options options = {.limits.depth_max = depth};
            eng_grammar *g;
            base_code code = deep[s][0] == '{'
                                 ? eng_grammar_schema(&g, deep[s], strlen(deep[s]), &options, &err)
                                 : eng_grammar_gbnf(&g, deep[s], strlen(deep[s]), &options, &err);
            cr_assert_eq(code, BASE_OK, "%s: %s", deep[s], err.text);
            eng_grammar_run *run = run_of(g);
            for (uint32_t seed = 0; seed < 60; seed++) {
                eng_grammar_state state;
                char text[600];
                eng_grammar_start(&state, run);
                for (uint32_t length = 0; length < sizeof text; length++) {
                    base_rand4 r = base_rand(seed, s, length);
                    /* what nests most first, then any */
                    const char *first = r.v[0] % 8 > 0 ? "{[(\"a:," : "";
                    bool on = false;
                    for (; *first != '\0' && !on; first++)
                        if ((on = eng_grammar_advance(&state, first, 1)))
                            text[length] = *first;
                    for (uint32_t i = 0; i < 256 && !on; i++) {
                        char byte = (char)(r.v[1] + i);
                        if ((on = eng_grammar_advance(&state, &byte, 1)))
                            text[length] = byte;
                    }
                    if (on)
                        continue;
                    cr_assert(eng_grammar_accepts(&state), "%s at depth %u: nothing after %.*s",
                              deep[s], depth, (int)length, text);
                    break;
                }
                eng_grammar_end(&state);
            }
            eng_grammar_run_destroy(run);
            eng_grammar_unref(g);
        }
}

Test(eng_grammar, what_is_forced_is_told)
{
    base_err err = BASE_ERR_INIT;
    const eng_grammar_options compact = {.space = ENG_GRAMMAR_SPACE_COMPACT};
    eng_grammar *g = compile("{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\"}},"
                             "\"required\":[\"city\"],\"additionalProperties\":false}",
                             &compact);
    eng_grammar_run *run;
    eng_grammar_state state;
    char out[64];
    cr_assert_eq(eng_grammar_run_create(&run, g, NULL, &err), BASE_OK);
    eng_grammar_start(&state, run);
    size_t n = eng_grammar_forced(&state, out, sizeof out);
    cr_expect_eq(n, 9);
    cr_expect_eq(memcmp(out, "{\"city\":\"", 9), 0);
    cr_expect(eng_grammar_advance(&state, out, n));
    cr_expect_eq(eng_grammar_forced(&state, out, sizeof out), 0);
    cr_expect_not(eng_grammar_advance(&state, "\n", 1));
    cr_expect(eng_grammar_advance(&state, "x\"", 2));
    cr_expect_eq(eng_grammar_forced(&state, out, sizeof out), 1);
    /* A long text sweeps the pools; a clone that stayed behind goes on. */
    eng_grammar_state behind;
    eng_grammar_clone(&behind, &state);
    eng_grammar_end(&state);
    cr_expect(eng_grammar_advance(&behind, "}", 1));
    cr_expect(eng_grammar_accepts(&behind));
    eng_grammar_end(&behind);
    eng_grammar_run_destroy(run);
    eng_grammar_unref(g);
}

/* Behind the first ':' there is a choice; it is made once. */
Test(eng_grammar, the_first_blank_forces_the_others)
{
    base_err err = BASE_ERR_INIT;
    static const struct {
        const char *first, *forced;
    } rows[] = {{" t", "rue, \"b\": [0, "}, {"t", "rue,\"b\":[0,"}};
    eng_grammar *g =
        compile("{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"boolean\"},"
                "\"b\":{\"type\":\"array\",\"prefixItems\":[{\"const\":0},{\"enum\":[1,2]"
                "}],\"minItems\":2}},\"required\":[\"a\",\"b\"],"
                "\"additionalProperties\":false}",
                NULL);
    eng_grammar_run *run;
    cr_assert_eq(eng_grammar_run_create(&run, g, NULL, &err), BASE_OK);
    for (size_t i = 0; i < 2; i++) {
        eng_grammar_state state, other;
        char out[64];
        eng_grammar_start(&state, run);
        size_t n = eng_grammar_forced(&state, out, sizeof out);
        cr_assert_eq(n, 5);
        cr_assert(eng_grammar_advance(&state, out, n));
        eng_grammar_clone(&other, &state); /* states of both styles live side by side */
        cr_assert(eng_grammar_advance(&state, rows[i].first, strlen(rows[i].first)));
        cr_assert(eng_grammar_advance(&other, rows[1 - i].first, strlen(rows[1 - i].first)));
        n = eng_grammar_forced(&state, out, sizeof out);
        cr_expect_eq(n, strlen(rows[i].forced));
        cr_expect_eq(memcmp(out, rows[i].forced, n), 0, "%.*s", (int)n, out);
        n = eng_grammar_forced(&other, out, sizeof out);
        cr_expect_eq(memcmp(out, rows[1 - i].forced, n), 0, "%.*s", (int)n, out);
        eng_grammar_end(&state);
        eng_grammar_end(&other);
    }
    eng_grammar_run_destroy(run);
    eng_grammar_unref(g);
}

/* ---- the time of a mask ---- */

#define VOCAB 200064u

static const char *made_bytes(const void *context, int32_t id, size_t *length)
{
    const char(*texts)[20] = context;
    *length = strlen(texts[id]);
    return *length == 0 ? NULL : texts[id];
}

Test(eng_grammar, masks_of_a_large_vocabulary, .timeout = 120)
{
    static char texts[VOCAB][20];
    static uint64_t fresh[4096], kept[4096];
    static const char *const odd[] = {"\"",  "\",", "\":", "\": \"", "\"}",
                                      "{\"", "\\n", "\\",  "],",     "\n"};
    base_err err = BASE_ERR_INIT;
    eng_vocab *vocab;
    for (uint32_t id = 0; id < VOCAB; id++) {
        base_rand4 r = base_rand(5, 1, id), q = base_rand(5, 2, id);
        size_t n = 1 + r.v[0] % 7, at = 0;
        if (id < 256) {
            texts[id][0] = (char)id;
            continue;
        }
        if (r.v[1] % 100 < 55)
            texts[id][at++] = ' ';
        for (size_t i = 0; i < n; i++) {
            uint32_t ch = (i % 2 == 0 ? q.v[i / 2] : q.v[i / 2] >> 16) & 0xFFFF;
            if (r.v[2] % 100 < 75)
                texts[id][at++] = (char)('a' + ch % 26);
            else if (r.v[2] % 100 < 90)
                at += (size_t)snprintf(texts[id] + at, 4, "%c%c", 0xD0, 0x80 + ch % 48);
            else
                texts[id][at++] = (char)(33 + ch % 94);
        }
        if (r.v[3] % 100 < 4)
            strcpy(texts[id] + at, odd[r.v[3] / 100 % 10]);
    }
    cr_assert_eq(eng_vocab_create(&vocab, made_bytes, texts, VOCAB, &err), BASE_OK);
    uint32_t count = 0, firsts = 0;
    for (size_t w = 0; w < sizeof walked / sizeof *walked; w++) {
        eng_grammar *g = compile(walked[w], NULL);
        eng_grammar_run *run;
        cr_assert_eq(eng_grammar_run_create(&run, g, vocab, &err), BASE_OK);
        for (uint32_t seed = 0; seed < 8; seed++) {
            eng_grammar_state state;
            eng_grammar_start(&state, run);
            for (uint32_t step = 0; step < 60 && count < 4096; step++) {
                uint64_t t0 = base_now_ns();
                const uint32_t *mask = eng_grammar_mask(&state, NULL, 0);
                uint64_t t1 = base_now_ns();
                mask = eng_grammar_mask(&state, NULL, 0);
                kept[count] = base_now_ns() - t1;
                /* A place seen before is no first time. */
                fresh[firsts] = t1 - t0;
                firsts += t1 - t0 > 1000;
                count++;
                int32_t id = (int32_t)(base_rand(seed, w, step).v[0] % VOCAB);
                uint32_t tries = 0;
                while (tries++ < VOCAB && !bit(mask, id))
                    id = (int32_t)((uint32_t)(id + 1) % VOCAB);
                size_t n;
                if (!bit(mask, id))
                    break;
                const char *bytes = made_bytes(texts, id, &n);
                cr_assert(eng_grammar_advance(&state, bytes, n));
            }
            eng_grammar_end(&state);
        }
        eng_grammar_run_destroy(run);
        eng_grammar_unref(g);
    }
    qsort(fresh, firsts, sizeof *fresh, by_value);
    qsort(kept, count, sizeof *kept, by_value);
    printf("%u masks of %u tokens, %u first: first p50 %.1f us, p99 %.1f us; cached p50 %.2f us\n",
           count, VOCAB, firsts, (double)fresh[firsts / 2] / 1e3,
           (double)fresh[firsts * 99 / 100] / 1e3, (double)kept[count / 2] / 1e3);
    eng_vocab_destroy(vocab);
}
