/* Output held to a grammar: through the whole loop, with drafts and without, with reasoning before
 * it. What the texts must be is checked by a JSON parser and by hand-written rules, not by the
 * grammar. */
#include <jansson.h>
#include <unistd.h>

#include "engine/engine.h"
#include "tests/engine/loop_rig.h"

#define NANO SOURCE_ROOT "/config/models/nano"
#ifdef __SANITIZE_ADDRESS__ /* twenty times slower */
#define ROUNDS 3
#define SHARE 4
#else
#define ROUNDS 10
#define SHARE 1
#endif

static const char SCHEMA[] =
    "{\"type\":\"object\",\"additionalProperties\":false,\"required\":[\"city\",\"days\",\"ok\"],"
    "\"properties\":{\"city\":{\"type\":\"string\",\"maxLength\":12},"
    "\"days\":{\"type\":\"integer\",\"minimum\":3,\"maximum\":40},\"ok\":{\"type\":\"boolean\"}}}";

static eng_grammar *compile(eng_format_kind kind, const char *text)
{
    base_err err = BASE_ERR_INIT;
    eng_grammar *grammar = NULL;
    eng_output output = {.format = {.kind = kind, .text = {text, strlen(text)}}};
    cr_assert_eq(eng_output_compile(&grammar, &output, NULL, &err), BASE_OK, "%s", err.text);
    return grammar;
}

static void check_object(const result *r)
{
    json_error_t error;
    json_t *value = json_loadb(r->text, r->text_length, JSON_REJECT_DUPLICATES, &error);
    cr_assert_not_null(value, "%s: %.*s", error.text, (int)r->text_length, r->text);
    const json_t *city = json_object_get(value, "city"), *days = json_object_get(value, "days"),
                 *ok = json_object_get(value, "ok");
    cr_assert(json_is_string(city) && json_is_integer(days) && json_is_boolean(ok));
    cr_assert_eq(json_object_size(value), 3);
    cr_assert(json_integer_value(days) >= 3 && json_integer_value(days) <= 40);
    json_decref(value);
}

static eng_request held(const int32_t *tokens, uint32_t count, eng_grammar *grammar, uint64_t seed,
                        result *r)
{
    eng_request req = request(tokens, count, OUTPUT_MAX, 1.5f, r);
    req.grammar = grammar;
    req.sampling.seed = seed;
    req.sampling.ignore_eos = false;
    return req;
}

Test(constrain, a_random_model_writes_valid_objects, .timeout = 300)
{
    eng_options opts = options();
    eng_engine *engine = start(&opts);
    eng_grammar *grammar = compile(ENG_FORMAT_SCHEMA, SCHEMA);
    int32_t prompt[40];
    make_prompt(prompt, 40, 7);
    result *r = calloc(ROUNDS, sizeof *r);
    for (uint32_t i = 0; i < ROUNDS; i++) {
        eng_request req = held(prompt, 40, grammar, i, &r[i]);
        submit(engine, &req);
    }
    eng_grammar_unref(grammar); /* the requests hold it */
    wait_done(r, ROUNDS);
    for (uint32_t i = 0; i < ROUNDS; i++) {
        cr_assert_eq(r[i].finish, ENG_FINISH_STOP, "%.*s", (int)r[i].text_length, r[i].text);
        check_object(&r[i]);
    }
    cr_assert_gt(eng_get_stats(engine).forced_tokens, 0);
    check_clean(engine);
    eng_destroy(engine);
    free(r);
}

Test(constrain, bias_and_min_tokens_give_way)
{
    eng_options opts = options();
    eng_engine *engine = start(&opts);
    eng_grammar *grammar = compile(ENG_FORMAT_REGEX, "yes|no");
    int32_t prompt[8];
    make_prompt(prompt, 8, 8);
    eng_bias bias[] = {{'y', -100}, {'n', -100}};
    result r;
    eng_request req = held(prompt, 8, grammar, 1, &r);
    req.sampling.bias = bias;
    req.sampling.bias_count = 2;
    req.sampling.min_tokens = 50;
    req.sampling.ignore_eos = true;
    submit(engine, &req);
    wait_done(&r, 1);
    r.text[r.text_length] = 0;
    cr_assert(strcmp(r.text, "yes") == 0 || strcmp(r.text, "no") == 0, "%s", r.text);
    cr_assert_eq(r.finish, ENG_FINISH_STOP);
    eng_grammar_unref(grammar);
    eng_destroy(engine);
}

Test(constrain, what_has_one_way_on_is_not_asked_for)
{
    eng_options opts = options();
    eng_engine *engine = start(&opts);
    static const char WORDS[] = "the only text there is, word for word";
    eng_text choice = {WORDS, strlen(WORDS)};
    eng_output output = {
        .format = {.kind = ENG_FORMAT_CHOICE, .choices = &choice, .choice_count = 1}};
    base_err err = BASE_ERR_INIT;
    eng_grammar *grammar = NULL;
    cr_assert_eq(eng_output_compile(&grammar, &output, NULL, &err), BASE_OK, "%s", err.text);
    int32_t prompt[8];
    make_prompt(prompt, 8, 9);
    result r;
    eng_request req = held(prompt, 8, grammar, 1, &r);
    submit(engine, &req);
    wait_done(&r, 1);
    cr_assert_eq(r.text_length, strlen(WORDS));
    cr_assert_eq(memcmp(r.text, WORDS, strlen(WORDS)), 0);
    cr_assert_eq(r.usage.steps, 0);
    cr_assert_eq(r.finish, ENG_FINISH_STOP);
    eng_grammar_unref(grammar);
    check_clean(engine);
    eng_destroy(engine);
}

/* Names, separators and the rest of a word are forced, each run in the step of the next choice. */
Test(constrain, only_choices_take_steps)
{
    static const char TWO[] =
        "{\"type\":\"object\",\"additionalProperties\":false,\"required\":[\"one\",\"two\"],"
        "\"properties\":{\"one\":{\"type\":\"boolean\"},\"two\":{\"type\":\"boolean\"}}}";
    eng_options opts = options();
    eng_engine *engine = start(&opts);
    eng_grammar *grammar = compile(ENG_FORMAT_SCHEMA, TWO);
    int32_t prompt[8];
    make_prompt(prompt, 8, 10);
    for (uint32_t seed = 0; seed < 8; seed++) {
        static result r;
        eng_request req = held(prompt, 8, grammar, seed, &r);
        submit(engine, &req);
        wait_done(&r, 1);
        cr_assert_eq(r.finish, ENG_FINISH_STOP);
        r.text[r.text_length] = '\0';
        bool blank = strchr(r.text, ' ') != NULL;
        cr_expect_eq(r.usage.steps, blank ? 3 : 2, "%u: %s", r.usage.steps, r.text);
        cr_expect_eq(strstr(r.text, blank ? ", \"two\": " : ",\"two\":") != NULL, true, "%s",
                     r.text);
    }
    eng_grammar_unref(grammar);
    check_clean(engine);
    eng_destroy(engine);
}

/* ---- the bundled model ---- */

static eng_engine *start_nano(int32_t draft_tokens)
{
    if (access(NANO "/model.safetensors", R_OK) != 0)
        cr_skip_test("config/models/nano has no weights");
    eng_options opts = options();
    opts.model = NANO;
    opts.context_max = 4096;
    opts.draft_tokens = draft_tokens;
    return start(&opts);
}

static void ask_nano(eng_engine *engine, eng_thinking thinking, eng_grammar *grammar, uint64_t seed,
                     result *r, base_arena *arena)
{
    base_err err = BASE_ERR_INIT;
    static const char ASK[] = "Which city is it, and for how many days? Answer in JSON.";
    eng_item item = {.role = ENG_ROLE_USER, .text = {ASK, strlen(ASK)}};
    eng_chat chat = {.items = &item, .item_count = 1, .thinking = thinking};
    eng_prompt prompt;
    cr_assert_eq(eng_render(engine, &prompt, &chat, 0, NULL, arena, &err), BASE_OK, "%s", err.text);
    eng_request req = held(prompt.tokens, prompt.token_count, grammar, seed, r);
    req.parse = ENG_PARSE_CHAT;
    req.starts_in_reasoning = prompt.starts_in_reasoning;
    req.thinking = prompt.thinking;
    submit(engine, &req);
    wait_done(r, 1);
}

Test(constrain, drafts_change_nothing, .timeout = 300)
{
    static result plain[ROUNDS], drafted[ROUNDS];
    base_arena *arena = base_arena_create(1 << 16, 1 << 22);
    uint32_t accepted = 0;
    for (int drafts = 0; drafts < 2; drafts++) {
        eng_engine *engine = start_nano(drafts ? 7 : 0);
        eng_grammar *grammar = compile(ENG_FORMAT_SCHEMA, SCHEMA);
        for (uint32_t i = 0; i < ROUNDS; i++) {
            result *r = drafts ? &drafted[i] : &plain[i];
            ask_nano(engine, ENG_THINK_DISABLED, grammar, i, r, arena);
            cr_assert_eq(r->finish, ENG_FINISH_STOP);
            check_object(r);
            accepted += r->usage.accepted;
        }
        eng_grammar_unref(grammar);
        check_clean(engine);
        eng_destroy(engine);
    }
    for (uint32_t i = 0; i < ROUNDS; i++)
        same(&plain[i], &drafted[i], "drafted");
    cr_assert_gt(accepted, 0);
    base_arena_destroy(arena);
}

/* Reasoning is in the rig's text too: the object follows it. */
Test(constrain, the_grammar_begins_behind_reasoning, .timeout = 300)
{
    eng_engine *engine = start_nano(7);
    eng_grammar *grammar = compile(ENG_FORMAT_SCHEMA, SCHEMA);
    base_arena *arena = base_arena_create(1 << 16, 1 << 22);
    static const eng_thinking MODES[] = {ENG_THINK_ENABLED, ENG_THINK_ADAPTIVE};
    uint32_t whole = 0, reasoned = 0;
    for (uint32_t i = 0; i < ROUNDS; i++) {
        static result r;
        ask_nano(engine, MODES[i % 2], grammar, i, &r, arena);
        if (r.finish == ENG_FINISH_LENGTH) /* it may think until the end */
            continue;
        cr_assert_eq(r.finish, ENG_FINISH_STOP);
        reasoned += r.usage.reasoning_tokens > 0;
        result tail = r;
        char *object = memmem(r.text, r.text_length, "{\"city\"", 7);
        cr_assert_not_null(object, "%.*s", (int)r.text_length, r.text);
        tail.text_length = (size_t)(r.text + r.text_length - object);
        memmove(tail.text, object, tail.text_length);
        check_object(&tail);
        whole++;
    }
    cr_assert_gt(whole, 0);
    cr_assert_gt(reasoned, 0);
    eng_grammar_unref(grammar);
    base_arena_destroy(arena);
    check_clean(engine);
    eng_destroy(engine);
}

/* ---- calls ---- */

#define CALLS_MAX 16

typedef struct calls {
    result r; /* first: what the rig's sink fills in */
    uint32_t count, whole;
    base_err err;
    char name[CALLS_MAX][64];
    char arguments[CALLS_MAX][4096];
} calls;

/* The rig's sink, and calls apart. Free text must not surround calls that were demanded. */
static void on_call_event(void *ctx, const eng_event *event)
{
    calls *c = event->user;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < event->part_count; i++) {
        const eng_part *part = &event->parts[i];
        if (part->kind == ENG_PART_CALL_BEGIN && c->count < CALLS_MAX)
            snprintf(c->name[c->count++], 64, "%.*s", (int)part->length, part->text);
        if (part->kind == ENG_PART_CALL_ARGS && part->call < CALLS_MAX) {
            char *to = c->arguments[part->call];
            size_t at = strlen(to);
            cr_assert_lt(at + part->length, sizeof c->arguments[0]);
            memcpy(to + at, part->text, part->length);
            to[at + part->length] = 0;
        }
        if (part->kind == ENG_PART_CALL_END)
            c->whole++;
    }
    c->err = event->err;
    pthread_mutex_unlock(&lock);
    on_event(ctx, event);
}

static const char *const TOOLS[] = {
    "{\"name\":\"send\",\"parameters\":{\"type\":\"object\",\"additionalProperties\":false,"
    "\"required\":[\"to\",\"body\",\"urgent\"],\"properties\":{"
    "\"to\":{\"type\":\"array\",\"items\":{\"type\":\"string\",\"maxLength\":6},\"minItems\":1,"
    "\"maxItems\":3},"
    "\"body\":{\"type\":\"object\",\"additionalProperties\":false,\"required\":[\"subject\"],"
    "\"properties\":{\"subject\":{\"type\":\"string\",\"enum\":[\"a b\",\"c\"]},"
    "\"size\":{\"type\":[\"integer\",\"null\"],\"minimum\":5,\"maximum\":9}}},"
    "\"urgent\":{\"type\":\"boolean\"}}}}",
    "{\"name\":\"pick\",\"parameters\":{\"type\":\"object\",\"additionalProperties\":false,"
    "\"required\":[\"what\",\"map\"],\"properties\":{"
    "\"what\":{\"type\":[\"string\",\"integer\"],\"minimum\":100,\"maximum\":200,"
    "\"maxLength\":4},"
    "\"map\":{\"type\":\"object\",\"additionalProperties\":{\"type\":\"boolean\"},"
    "\"maxProperties\":2}}}}",
};

static void check_send(const json_t *a)
{
    const json_t *to = json_object_get(a, "to"), *body = json_object_get(a, "body");
    cr_assert(json_is_array(to) && json_array_size(to) >= 1 && json_array_size(to) <= 3);
    for (size_t i = 0; i < json_array_size(to); i++)
        cr_assert(json_is_string(json_array_get(to, i)));
    cr_assert(json_is_object(body));
    const char *subject = json_string_value(json_object_get(body, "subject"));
    cr_assert(subject != NULL && (strcmp(subject, "a b") == 0 || strcmp(subject, "c") == 0));
    const json_t *size = json_object_get(body, "size");
    cr_assert(
        size == NULL || json_is_null(size) ||
        (json_is_integer(size) && json_integer_value(size) >= 5 && json_integer_value(size) <= 9));
    cr_assert(json_is_boolean(json_object_get(a, "urgent")));
    cr_assert_eq(json_object_size(a), 3);
}

static void check_pick(const json_t *a)
{
    const json_t *what = json_object_get(a, "what"), *map = json_object_get(a, "map");
    const char *key;
    json_t *value;
    cr_assert(json_is_string(what) || (json_is_integer(what) && json_integer_value(what) >= 100 &&
                                       json_integer_value(what) <= 200));
    cr_assert(json_is_object(map) && json_object_size(map) <= 2);
    json_object_foreach((json_t *)map, key, value)
    {
        cr_assert(json_is_boolean(value));
    }
    cr_assert_eq(json_object_size(a), 2);
}

static void check_calls(const calls *c)
{
    cr_assert_gt(c->count, 0);
    cr_assert_eq(c->whole, c->count);
    for (uint32_t i = 0; i < c->count; i++) {
        json_error_t error;
        json_t *a = json_loads(c->arguments[i], JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
        cr_assert(json_is_object(a), "%s: %s", error.text, c->arguments[i]);
        if (strcmp(c->name[i], "send") == 0)
            check_send(a);
        else {
            cr_assert_str_eq(c->name[i], "pick");
            check_pick(a);
        }
        json_decref(a);
    }
}

/* Models that know nothing, at a high temperature: what comes out right is the grammar's work. */
static void sample_calls(const char *model, int32_t draft_tokens, eng_tool_choice choice,
                         uint32_t call_max, uint32_t rounds)
{
    if (model == NULL || access(NANO "/model.safetensors", R_OK) != 0)
        cr_skip_test("config/models/nano has no weights");
    base_err err = BASE_ERR_INIT;
    eng_options opts = options();
    opts.model = model;
    opts.draft_tokens = draft_tokens;
    opts.sink.event = on_call_event;
    eng_engine *engine = start(&opts);
    eng_text tools[] = {{TOOLS[0], strlen(TOOLS[0])}, {TOOLS[1], strlen(TOOLS[1])}};
    bool strict[] = {true, true};
    eng_output output = {.tools = tools,
                         .tool_count = 2,
                         .strict = strict,
                         .tool_choice = choice,
                         .tool_name = {"pick", 4},
                         .call_max = call_max};
    eng_grammar *grammar = NULL;
    cr_assert_eq(eng_output_compile(&grammar, &output, NULL, &err), BASE_OK, "%s", err.text);
    int32_t prompt[40];
    make_prompt(prompt, 40, 5);
    calls *all = calloc(rounds, sizeof *all);
    for (uint32_t i = 0; i < rounds; i++) {
        eng_request req = held(prompt, 40, grammar, i, &all[i].r);
        req.parse = ENG_PARSE_CHAT;
        req.thinking = ENG_THINK_DISABLED;
        req.tools = tools;
        req.tool_count = 2;
        submit(engine, &req);
        wait_done(&all[i].r, 1);
    }
    uint32_t whole = 0;
    for (uint32_t i = 0; i < rounds; i++) {
        if (all[i].r.finish == ENG_FINISH_LENGTH) /* a list without end, many calls */
            continue;
        cr_assert_eq(all[i].r.finish, ENG_FINISH_CALLS, "finish %d, %s: %.*s", all[i].r.finish,
                     all[i].err.text, (int)all[i].r.text_length, all[i].r.text);
        check_calls(&all[i]);
        cr_assert(call_max == 0 || all[i].count <= call_max);
        for (uint32_t k = 0; choice == ENG_TOOL_NAMED && k < all[i].count; k++)
            cr_assert_str_eq(all[i].name[k], "pick");
        whole++;
    }
    cr_assert_gt(whole, rounds / 4, "%u of %u ended", whole, rounds);
    free(all);
    eng_grammar_unref(grammar);
    check_clean(engine);
    eng_destroy(engine);
}

Test(constrain, calls_are_what_their_schemas_say, .timeout = 300)
{
    sample_calls(MODEL, 0, ENG_TOOL_REQUIRED, 0, 24 / SHARE);
}

Test(constrain, a_named_tool_alone_is_called, .timeout = 300)
{
    sample_calls(NANO, 7, ENG_TOOL_NAMED, 1, 8 / SHARE);
}

Test(constrain, calls_of_the_bundled_model, .timeout = 300)
{
    sample_calls(NANO, 7, ENG_TOOL_REQUIRED, 1, 16 / SHARE);
}

/* A custom tool: its one text follows a grammar, however wild the model. */
Test(constrain, a_custom_tool_writes_what_its_grammar_says)
{
    static const char *const JSON =
        "{\"name\":\"patch\",\"parameters\":{\"type\":\"object\",\"required\":[\"input\"],"
        "\"properties\":{\"input\":{\"type\":\"string\"}}}}";
    static const eng_format INPUTS[] = {
        {.kind = ENG_FORMAT_REGEX, .text = {"@@ [0-9]{1,3}", 13}},
        {.kind = ENG_FORMAT_GBNF, .text = {"root ::= \"@@ \" [0-9] [0-9]? [0-9]?", 34}},
    };
    base_err err = BASE_ERR_INIT;
    eng_options opts = options();
    opts.sink.event = on_call_event;
    eng_engine *engine = start(&opts);
    eng_text tool = {JSON, strlen(JSON)};
    int32_t prompt[40];
    make_prompt(prompt, 40, 5);
    for (uint32_t i = 0; i < 8; i++) {
        static calls all;
        unsigned number;
        eng_output output = {.tools = &tool,
                             .tool_count = 1,
                             .tool_choice = ENG_TOOL_REQUIRED,
                             .call_max = 1,
                             .inputs = &INPUTS[i % 2]};
        eng_grammar *grammar = NULL;
        cr_assert_eq(eng_output_compile(&grammar, &output, NULL, &err), BASE_OK, "%s", err.text);
        all = (calls){0};
        eng_request req = held(prompt, 40, grammar, i, &all.r);
        req.parse = ENG_PARSE_CHAT;
        req.thinking = ENG_THINK_DISABLED;
        req.tools = &tool;
        req.tool_count = 1;
        submit(engine, &req);
        wait_done(&all.r, 1);
        eng_grammar_unref(grammar);
        cr_assert_eq(all.r.finish, ENG_FINISH_CALLS);
        cr_assert_eq(all.count, 1);
        cr_assert_str_eq(all.name[0], "patch");
        cr_assert_eq(sscanf(all.arguments[0], "{\"input\":\"@@ %3u\"}", &number), 1, "%s",
                     all.arguments[0]);
    }
    /* Whose grammar is wrong, and a tool with nowhere to put a text. */
    eng_format wrong = {.kind = ENG_FORMAT_GBNF, .text = {"root ::= other", 14}};
    eng_output output = {.tools = &tool, .tool_count = 1, .inputs = &wrong};
    eng_grammar *grammar = NULL;
    uint32_t index = 7;
    cr_assert_eq(eng_output_compile(&grammar, &output, &index, &err), BASE_INVALID);
    cr_assert_eq(index, 0);
    cr_assert_not_null(strstr(err.text, "other"), "%s", err.text);
    eng_text bare = {"{\"name\":\"bare\"}", 15};
    output = (eng_output){.tools = &bare, .tool_count = 1, .inputs = INPUTS};
    err = (base_err)BASE_ERR_INIT;
    cr_assert_eq(eng_output_compile(&grammar, &output, &index, &err), BASE_INVALID);
    cr_assert_not_null(strstr(err.text, "one parameter"), "%s", err.text);
    check_clean(engine);
    eng_destroy(engine);
}
