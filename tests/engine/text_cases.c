/* The shared cases (the JSON files of tests/engine/cases), as far as tokenizer, codec and decoder
 * decide them. Each case is a test of its own; those that need HTTP or a running engine are listed
 * with the reason, and are checks of FRONT_DOOR under their numbers. A case of the files that is in
 * neither list, or in the second and not there, fails. */
#include "engine/base/clock.h"
#include "engine/base/rand.h"
#include "tests/engine/chat_rig.h"

#define FRONT_DOOR SOURCE_ROOT "/tests/e2e/cases.test.mjs"

static const char *const files[] = {"tokenizer", "chat-template", "tool-parsing", "reasoning",
                                    "streaming"};

/* clang-format off */
#define CASES_RUN(X)                                                                               \
    X(B001) X(B002) X(B004) X(B005) X(B006) X(B007) X(B008) X(B010) X(B011) X(B012) X(B013)        \
    X(B015) X(B016) X(B017) X(B019) X(B020) X(B021) X(B029) X(B030) X(B031) X(B032) X(B037)        \
    X(B038) X(B039) X(B040) X(B041) X(B042) X(B043) X(B046) X(B061) X(B062) X(B063) X(B067)        \
    X(B070) X(B073) X(B075) X(B081) X(B083)
/* clang-format on */

static const struct {
    const char *id, *reason;
} elsewhere[] = {
    {"B024", "forced calls: tool_choice is the engine's, finish_reason the dialect's"},
    {"B025", "tool_choice none bans a token in the engine's sampler"},
    {"B036", "each dialect's thinking switch is its own mapping"},
    {"B069", "bytes of a request body: the JSON reader of the front door"},
    {"B071", "usage chunk of the chat dialect"},
    {"B072", "chunk shape of the chat dialect"},
    {"B077", "checks of the field stop"},
    {"B078", "log probabilities come from the engine"},
    {"B080", "n answers: engine and dialect"},
    {"B082", "a failing engine behind a stream"},
    {"B085", "events of the responses dialect"},
    {"B086", "two requests, streamed and not"},
};

/* ---- finding a case ---- */

/* The whole of FRONT_DOOR. */
static char *front_door(void)
{
    FILE *file = fopen(FRONT_DOOR, "r");
    char *text = NULL;
    size_t size = 0;
    cr_assert_not_null(file, FRONT_DOOR);
    cr_assert_gt(getdelim(&text, &size, '\0', file), 0);
    fclose(file);
    return text;
}

static json_t *find_case(const char *id)
{
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char path[256];
        snprintf(path, sizeof path, CASES "%s.json", files[i]);
        json_t *list = load_json(path), *one, *found = NULL;
        size_t k;
        json_array_foreach(list, k, one)
        {
            if (strcmp(json_string_value(json_object_get(one, "id")), id) == 0)
                found = json_incref(one);
        }
        json_decref(list);
        if (found != NULL)
            return found;
    }
    cr_assert_fail("%s: no such case", id);
    return NULL;
}

typedef struct rig {
    const char *id;
    json_t *json;
    const json_t *input, *expect;
    eng_tok *tok;
    eng_codec *codec;
    base_arena *arena;
    eng_decoder_options options;
} rig;

static rig make_rig(const char *id)
{
    rig r = {.id = id, .json = find_case(id)};
    r.input = json_object_get(r.json, "input");
    r.expect = json_object_get(r.json, "expect");
    r.tok = load_tok(NANO_TOKENIZER);
    r.codec = make_codec(r.tok, "I am a test.", ENG_THINK_ADAPTIVE);
    r.arena = base_arena_create(4096, (size_t)1 << 28);
    const json_t *list = json_object_get(r.input, "tools"),
                 *stops = json_object_get(r.input, "stop");
    eng_text *tools = base_arena_calloc(r.arena, json_array_size(list) + 1, sizeof *tools);
    for (size_t i = 0; i < json_array_size(list); i++)
        tools[i] = text_of_json(r.arena, json_object_get(json_array_get(list, i), "function"));
    eng_text *stop = base_arena_calloc(r.arena, json_array_size(stops) + 1, sizeof *stop);
    for (size_t i = 0; i < json_array_size(stops); i++)
        stop[i] = text_of(json_string_value(json_array_get(stops, i)));
    r.options = (eng_decoder_options){.parse = ENG_PARSE_CHAT,
                                      .thinking = ENG_THINK_ADAPTIVE,
                                      .tools = tools,
                                      .tool_count = (uint32_t)json_array_size(list),
                                      .stops = stop,
                                      .stop_count = (uint32_t)json_array_size(stops)};
    return r;
}

static void end_rig(rig *r)
{
    base_arena_destroy(r->arena);
    eng_codec_destroy(r->codec);
    eng_tok_destroy(r->tok);
    json_decref(r->json);
}

/* ---- what an output must give ---- */

static json_t *parsed_arguments(const rig *r, const rig_call *call)
{
    json_error_t error;
    json_t *json =
        json_loadb(buf_text(&call->arguments), call->arguments.length, JSON_ALLOW_NUL, &error);
    cr_assert_not_null(json, "%s: %s: %s", r->id, error.text, buf_text(&call->arguments));
    return json;
}

static bool call_is(const rig *r, const rig_call *call, const json_t *want)
{
    json_t *arguments = parsed_arguments(r, call);
    bool same =
        call->whole &&
        strcmp(buf_text(&call->name), json_string_value(json_object_get(want, "name"))) == 0 &&
        json_equal(arguments, json_object_get(want, "arguments"));
    json_decref(arguments);
    return same;
}

static void expect_string(const rig *r, const json_t *want, const base_buf *got, const char *what)
{
    if (want == NULL)
        return;
    const char *text = json_is_null(want) ? "" : json_string_value(want);
    size_t length = json_is_null(want) ? 0 : json_string_length(want);
    cr_assert(got->length == length && (length == 0 || memcmp(got->data, text, length) == 0),
              "%s: %s is \"%s\", not \"%s\"", r->id, what, buf_text(got), text);
}

static void expect_calls(const rig *r, const rig_result *got)
{
    const json_t *calls = json_object_get(r->expect, "tool_calls"),
                 *one = json_object_get(r->expect, "must_contain_call");
    const json_t *joined = json_object_get(r->expect, "joined_arguments_equal");
    if (calls != NULL)
        cr_assert_eq(got->call_count, json_array_size(calls), "%s: %u calls", r->id,
                     got->call_count);
    for (size_t i = 0; i < json_array_size(calls); i++)
        cr_assert(call_is(r, &got->calls[i], json_array_get(calls, i)), "%s: call %zu: %s", r->id,
                  i, buf_text(&got->calls[i].arguments));
    bool found = one == NULL;
    for (uint32_t i = 0; i < got->call_count; i++)
        found = found || call_is(r, &got->calls[i], one);
    cr_assert(found, "%s: the call is missing", r->id);
    const char *text = json_string_value(json_object_get(r->expect, "arguments_text"));
    if (text != NULL)
        cr_assert_str_eq(buf_text(&got->calls[0].arguments), text);
    if (joined != NULL) {
        json_t *arguments = parsed_arguments(r, &got->calls[0]);
        cr_assert(json_equal(arguments, joined), "%s", r->id);
        json_decref(arguments);
    }
}

static void expect_result(const rig *r, const rig_result *got)
{
    const json_t *also = json_object_get(r->expect, "content_has_no"), *part;
    size_t i;
    expect_string(r, json_object_get(r->expect, "content"), &got->text, "content");
    expect_string(r, json_object_get(r->expect, "reasoning_content"), &got->reasoning,
                  "reasoning_content");
    expect_string(r, json_object_get(r->expect, "joined"), &got->text, "joined");
    expect_calls(r, got);
    json_array_foreach(also, i, part)
        cr_assert_null(strstr(buf_text(&got->text), json_string_value(part)), "%s", r->id);
    const char *contains = json_string_value(json_object_get(r->expect, "content_contains"));
    if (contains != NULL)
        cr_assert_not_null(strstr(buf_text(&got->text), contains), "%s: %s", r->id,
                           buf_text(&got->text));
    const char *finish = json_string_value(json_object_get(r->expect, "finish_reason"));
    uint32_t whole = 0;
    for (uint32_t k = 0; k < got->call_count; k++)
        whole += got->calls[k].whole;
    if (finish != NULL)
        cr_assert_str_eq(finish, whole > 0 ? "tool_calls" : "stop", "%s", r->id);
    /* What must hold of every case. */
    cr_assert(got->text.length == 0 ||
              memmem(got->text.data, got->text.length, NS, strlen(NS)) == NULL);
    cr_assert(got->reasoning.length == 0 ||
              memmem(got->reasoning.data, got->reasoning.length, NS, strlen(NS)) == NULL);
    for (uint32_t k = 0; k < got->call_count; k++)
        cr_assert(!got->calls[k].whole || is_json_object(&got->calls[k].arguments));
}

/* ---- cuts ---- */

typedef struct cutting {
    const rig *r;
    const char *text;
    size_t length;
    size_t *cuts;
    size_t count;
    const rig_result *whole;
    uint32_t runs;
} cutting;

static void run_cut(cutting *c)
{
    rig_result got = {.check_prefixes = c->length < 400};
    decode_cut(c->r->codec, &got, c->r->options, c->text, c->length, c->cuts, c->count, true);
    expect_result(c->r, &got);
    cr_assert(rig_same(&got, c->whole), "%s: a cut changes the result", c->r->id);
    rig_clear(&got);
    c->runs++;
}

static bool begins_character(const cutting *c, size_t at)
{
    return ((unsigned char)c->text[at] & 0xC0) != 0x80;
}

/* Pieces of `least`…`most` characters (or bytes). */
static void run_pieces_of(cutting *c, uint32_t least, uint32_t most, bool bytes, uint64_t seed)
{
    c->count = 0;
    uint32_t left = 0, index = 0;
    for (size_t at = 0; at < c->length; at++) {
        if (!bytes && !begins_character(c, at))
            continue;
        if (left == 0) {
            if (at > 0)
                c->cuts[c->count++] = at;
            left = least + base_rand(seed, 1, index++).v[0] % (most - least + 1);
        }
        left--;
    }
    run_cut(c);
}

static void run_lines(cutting *c)
{
    c->count = 0;
    for (size_t at = 1; at < c->length; at++)
        if (c->text[at - 1] == '\n')
            c->cuts[c->count++] = at;
    run_cut(c);
}

static void run_all(cutting *c)
{
    c->count = 0;
    run_cut(c);
    for (uint32_t size = 1; size <= 16; size++)
        run_pieces_of(c, size, size, false, 0);
    run_lines(c);
    for (size_t at = 1; at < c->length; at++) { /* at every offset, so inside every marker too */
        c->cuts[0] = at;
        c->count = 1;
        run_cut(c);
    }
    for (uint64_t seed = 1; seed <= 200; seed++)
        run_pieces_of(c, 1, 40, false, seed);
    run_pieces_of(c, 1, 1, true, 0);
    for (uint64_t seed = 1; seed <= 50; seed++)
        run_pieces_of(c, 1, 12, true, seed);
}

static void run_given_pieces(cutting *c, const json_t *pieces)
{
    size_t at = 0;
    c->count = 0;
    for (size_t i = 0; i + 1 < json_array_size(pieces); i++)
        c->cuts[c->count++] = at += json_string_length(json_array_get(pieces, i));
    run_cut(c);
}

static void run_split(cutting *c, const json_t *split)
{
    if (json_is_array(split)) {
        size_t i;
        json_t *one;
        json_array_foreach(split, i, one) run_split(c, one);
        return;
    }
    const char *name = json_is_string(split) ? json_string_value(split) : "";
    uint32_t size = (uint32_t)json_integer_value(split);
    if (json_is_integer(split))
        run_pieces_of(c, size, size, false, 0);
    else if (strcmp(name, "bytes") == 0)
        run_pieces_of(c, 1, 1, true, 0);
    else if (strcmp(name, "line") == 0)
        run_lines(c);
    else if (strcmp(name, "pieces") == 0)
        run_given_pieces(c, json_object_get(c->r->input, "pieces"));
    else if (strcmp(name, "random") == 0)
        for (uint64_t seed = 1; seed <= 200; seed++)
            run_pieces_of(c, 1, 40, false, seed);
    else
        run_all(c);
}

/* The output as tokens of the model's tokenizer, special ones by id. */
static void run_tokens(cutting *c)
{
    rig_result got = {0};
    eng_ids ids;
    eng_ids_init(&ids, 0);
    cr_assert_eq(eng_tok_encode(c->r->tok, &ids, c->text, c->length, true, NULL), BASE_OK);
    eng_decoder *decoder = make_decoder(c->r->codec, &got, c->r->options);
    eng_ids_add(&ids, eng_codec_end_token(c->r->codec));
    for (size_t i = 0; i < ids.count; i++) {
        size_t length;
        const char *bytes = eng_tok_bytes(c->r->tok, ids.data[i], &length);
        eng_decoder_push(decoder, ids.data[i], bytes, length);
    }
    eng_decoder_finish(decoder);
    cr_assert_eq(eng_decoder_whole_tokens(decoder), ids.count);
    cr_assert(rig_same(&got, c->whole), "%s: tokens give another result", c->r->id);
    eng_decoder_destroy(decoder);
    eng_ids_deinit(&ids);
    rig_clear(&got);
}

static void run_output(rig *r, const json_t *output, const json_t *prefill, const json_t *split)
{
    rig_result whole = {.check_prefixes = true};
    cutting c = {.r = r,
                 .text = json_string_value(output),
                 .length = json_string_length(output),
                 .whole = &whole};
    const char *tail = prefill == NULL ? "" : json_string_value(prefill);
    r->options.starts_in_reasoning = strcmp(tail, "<mm:think>") == 0;
    r->options.thinking = r->options.starts_in_reasoning     ? ENG_THINK_ENABLED
                          : strcmp(tail, "</mm:think>") == 0 ? ENG_THINK_DISABLED
                                                             : ENG_THINK_ADAPTIVE;
    c.cuts = calloc(c.length + 1, sizeof *c.cuts);
    decode_cut(r->codec, &whole, r->options, c.text, c.length, NULL, 0, true);
    expect_result(r, &whole);
    run_split(&c, split);
    run_tokens(&c);
    printf("%s: %u cuttings\n", r->id, c.runs);
    rig_clear(&whole);
    free(c.cuts);
}

/* A case with an output; `also` runs it again with fields of its own. */
static void run_model_output(rig *r)
{
    const json_t *also = json_object_get(r->input, "also"),
                 *split = json_object_get(r->input, "split"), *prefill;
    run_output(r, json_object_get(r->input, "model_output"), json_object_get(r->input, "prefill"),
               split);
    if (also == NULL)
        return;
    json_t *expect = json_deep_copy(r->expect);
    json_object_update_existing(expect, (json_t *)also);
    r->expect = expect;
    prefill = json_object_get(also, "prefill");
    run_output(r, json_object_get(also, "model_output"), prefill, split);
    json_decref(expect);
}

/* Output tokens one by one, `<eos>` for the end of turn; returns the parts. */
static void push_pieces(rig *r, rig_result *got, const json_t *pieces, bool hex)
{
    eng_decoder *decoder = make_decoder(r->codec, got, r->options);
    size_t i;
    json_t *piece;
    bool more = true;
    json_array_foreach(pieces, i, piece)
    {
        const char *text = json_string_value(piece);
        char bytes[64];
        size_t length = json_string_length(piece);
        if (hex) {
            length /= 2;
            for (size_t k = 0; k < length; k++)
                bytes[k] = (char)strtol((char[]){text[2 * k], text[2 * k + 1], 0}, NULL, 16);
        }
        if (!more)
            break;
        bool end = strcmp(text, "<eos>") == 0;
        more = eng_decoder_push(decoder, end ? eng_codec_end_token(r->codec) : -1,
                                hex ? bytes : text, length);
    }
    eng_decoder_finish(decoder);
    eng_decoder_destroy(decoder);
}

static void run_pieces(rig *r)
{
    rig_result got = {0};
    push_pieces(r, &got, json_object_get(r->input, "pieces"), false);
    expect_result(r, &got);
    rig_clear(&got);
}

/* ---- cases with a test of their own ---- */

/* Once it cannot be a call any more, prose comes out with the next byte at the latest. */
static void run_prose_at_once(rig *r)
{
    const char *text = json_string_value(json_object_get(r->input, "model_output"));
    const char *prose = strstr(text, "is how");
    rig_result got = {0};
    eng_decoder *decoder = make_decoder(r->codec, &got, r->options);
    for (const char *at = text; *at != '\0'; at++) {
        eng_decoder_push(decoder, -1, at, 1);
        if (at > prose)
            cr_assert_geq(got.text.length + 1, (size_t)(at - prose), "%s: held back at %s", r->id,
                          at);
    }
    eng_decoder_destroy(decoder);
    rig_clear(&got);
}

/* A long string comes in at least eight fragments before it is closed. */
static void run_long_string(rig *r)
{
    const char *text = json_string_value(json_object_get(r->input, "model_output"));
    size_t close = (size_t)(strstr(text, NS "</content>") - text),
           size = (size_t)json_integer_value(json_object_get(r->input, "split"));
    rig_result got = {.check_prefixes = true};
    eng_decoder *decoder = make_decoder(r->codec, &got, r->options);
    for (size_t at = 0; at < close; at += size)
        eng_decoder_push(decoder, -1, text + at, at + size < close ? size : close - at);
    cr_assert_geq(got.calls[0].fragments, 8);
    eng_decoder_destroy(decoder);
    rig_clear(&got);
}

static void run_bytes(rig *r)
{
    rig_result got = {0};
    push_pieces(r, &got, json_object_get(r->input, "token_bytes_hex"), true);
    const char *joined = json_string_value(json_object_get(r->expect, "joined"));
    cr_assert_str_eq(buf_text(&got.text), joined != NULL ? joined : "abc\xEF\xBF\xBD");
    rig_clear(&got);
}

/* ---- rendering ---- */

typedef struct rendered {
    base_buf text;
    eng_prompt prompt;
    base_err err;
} rendered;

static base_code render(rig *r, rendered *out, eng_chat chat)
{
    base_buf_clear(&out->text);
    out->err = (base_err)BASE_ERR_INIT;
    return eng_codec_render(r->codec, &out->prompt, &chat, 0, 1 << 20, &out->text, r->arena,
                            &out->err);
}

static void expect_rendered(const rig *r, const rendered *got)
{
    const json_t *has = json_object_get(r->expect, "rendered_contains"),
                 *order = json_object_get(r->expect, "rendered_contains_in_order");
    const json_t *none = json_object_get(r->expect, "rendered_has_no"), *one;
    /* The instructions at the front are the template's own. */
    const char *at = strstr(buf_text(&got->text), "]~b]developer");
    size_t i;
    if (json_is_string(has))
        cr_assert_not_null(strstr(at, json_string_value(has)), "%s: %s", r->id, at);
    json_array_foreach(has, i, one)
        cr_assert_not_null(strstr(at, json_string_value(one)), "%s", r->id);
    json_array_foreach(none, i, one)
        cr_assert_null(strstr(at, json_string_value(one)), "%s", r->id);
    json_array_foreach(order, i, one)
    {
        at = strstr(at, json_string_value(one));
        cr_assert_not_null(at, "%s: %s", r->id, json_string_value(one));
    }
}

/* The body of the case's request, or its `render`. */
static json_t *body_of(const rig *r)
{
    json_t *render_only = json_object_get(r->input, "render");
    return render_only != NULL ? render_only
                               : json_object_get(json_object_get(r->json, "request"), "body");
}

static void run_rendering(rig *r)
{
    rendered got = {0};
    cr_assert_eq(render(r, &got, chat_of_json(r->arena, body_of(r))), BASE_OK, "%s", got.err.text);
    expect_rendered(r, &got);
    base_buf_deinit(&got.text);
}

/* content null, empty or absent beside calls. */
static void run_same_content(rig *r)
{
    rendered got = {0};
    json_t *body = body_of(r), *message = json_array_get(json_object_get(body, "messages"), 1);
    run_rendering(r);
    cr_assert_eq(render(r, &got, chat_of_json(r->arena, body)), BASE_OK);
    char *first = strdup(got.text.data);
    json_object_set_new(message, "content", json_string(""));
    cr_assert_eq(render(r, &got, chat_of_json(r->arena, body)), BASE_OK);
    cr_assert_str_eq(got.text.data, first);
    json_object_del(message, "content");
    cr_assert_eq(render(r, &got, chat_of_json(r->arena, body)), BASE_OK);
    cr_assert_str_eq(got.text.data, first);
    free(first);
    base_buf_deinit(&got.text);
}

static void run_argument_rows(rig *r)
{
    rendered got = {0};
    json_t *body = body_of(r), *row,
           *message = json_array_get(json_object_get(body, "messages"), 1);
    json_t *function =
        json_object_get(json_array_get(json_object_get(message, "tool_calls"), 0), "function");
    size_t i;
    json_array_foreach(json_object_get(r->expect, "rows"), i, row)
    {
        json_object_set(function, "arguments", json_object_get(row, "arguments"));
        base_code code = render(r, &got, chat_of_json(r->arena, body));
        if (json_integer_value(json_object_get(row, "status")) == 200) {
            cr_assert_eq(code, BASE_OK, "%s", got.err.text);
            cr_assert_not_null(strstr(got.text.data, "<invoke name=\"now\">" NS "</invoke>"));
        } else {
            cr_assert_eq(code, BASE_INVALID);
            cr_assert_str_eq(got.err.param, "messages[1].tool_calls[0].function.arguments");
        }
    }
    base_buf_deinit(&got.text);
}

/* Two instruction messages in either role and order. */
static void run_two_instructions(rig *r)
{
    json_t *messages = json_object_get(body_of(r), "messages");
    static const char *const roles[][2] = {
        {"system", "developer"}, {"developer", "system"}, {"system", "system"}};
    for (size_t i = 0; i < 3; i++) {
        for (size_t k = 0; k < 2; k++)
            json_object_set_new(json_array_get(messages, k), "role", json_string(roles[i][k]));
        run_rendering(r);
    }
}

/* A Messages body as chat messages: system first, tool_use blocks as calls, tool_result blocks as
 * tool messages. */
static json_t *chat_of_messages(const json_t *body)
{
    json_t *out = json_array(), *message, *block;
    size_t i, k;
    if (json_object_get(body, "system") != NULL)
        json_array_append_new(out, json_pack("{s:s,s:O}", "role", "system", "content",
                                             json_object_get(body, "system")));
    json_array_foreach(json_object_get(body, "messages"), i, message)
    {
        json_t *content = json_object_get(message, "content");
        if (json_is_string(content)) {
            json_array_append(out, message);
            continue;
        }
        json_array_foreach(content, k, block)
        {
            const char *type = json_string_value(json_object_get(block, "type"));
            if (strcmp(type, "tool_use") == 0)
                json_array_append_new(out, json_pack("{s:s,s:[{s:{s:O,s:O}}]}", "role", "assistant",
                                                     "tool_calls", "function", "name",
                                                     json_object_get(block, "name"), "arguments",
                                                     json_object_get(block, "input")));
            else if (strcmp(type, "tool_result") == 0)
                json_array_append_new(out, json_pack("{s:s,s:O}", "role", "tool", "content",
                                                     json_object_get(block, "content")));
        }
    }
    return json_pack("{s:o}", "messages", out);
}

static void run_messages(rig *r)
{
    json_t *chat = chat_of_messages(body_of(r));
    rendered got = {0};
    cr_assert_eq(render(r, &got, chat_of_json(r->arena, chat)), BASE_OK, "%s", got.err.text);
    expect_rendered(r, &got);
    if (strcmp(r->id, "B041") == 0) /* in its own place, as a developer turn */
        cr_assert_not_null(
            strstr(got.text.data,
                   "Hello.[e~[\n]~b]developer\nNOTE-4410: the working directory changed.[e~[\n"
                   "]~b]user\nGo on.[e~[\n"));
    else
        cr_assert_not_null(strstr(got.text.data, "<response>part onepart two</response>"));
    base_buf_deinit(&got.text);
    json_decref(chat);
}

/* ---- special tokens spelled by clients ---- */

static uint32_t special_count(const rig *r, const eng_prompt *prompt)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < prompt->token_count; i++)
        count += eng_tok_is_special(r->tok, prompt->tokens[i]);
    return count;
}

/* A conversation with `text` in every field that a client fills; `object` is a JSON object with it
 * as a member. */
static eng_chat fields_with(rig *r, const char *text, const char *object)
{
    eng_item *items = base_arena_calloc(r->arena, 6, sizeof *items);
    eng_call *call = base_arena_calloc(r->arena, 1, sizeof *call);
    eng_text *tool = base_arena_calloc(r->arena, 1, sizeof *tool);
    eng_text same = text_of(text);
    *call = (eng_call){.name = same, .arguments = text_of(object)};
    *tool = text_of(object);
    items[0] = (eng_item){.role = ENG_ROLE_ROOT, .text = same};
    items[1] = (eng_item){.role = ENG_ROLE_SYSTEM, .text = same};
    items[2] = (eng_item){.role = ENG_ROLE_USER, .text = same};
    items[3] = (eng_item){.role = ENG_ROLE_ASSISTANT,
                          .reasoning = same,
                          .text = same,
                          .calls = call,
                          .call_count = 1};
    items[4] = (eng_item){.role = ENG_ROLE_TOOL, .text = same};
    items[5] = (eng_item){.role = ENG_ROLE_SYSTEM, .text = same};
    return (eng_chat){.items = items,
                      .item_count = 6,
                      .tools = tool,
                      .tool_count = 1,
                      .effort = same,
                      .thinking = ENG_THINK_ENABLED};
}

static void run_spelled_specials(rig *r)
{
    const json_t *message = json_array_get(json_object_get(r->input, "messages"), 0);
    const char *text = json_string_value(json_object_get(message, "content"));
    char object[512];
    base_buf quoted;
    rendered got = {0}, plain = {0};
    base_buf_init(&quoted, 0);
    base_buf_json_string(&quoted, text, strlen(text));
    snprintf(object, sizeof object, "{%s:%s}", quoted.data, quoted.data);
    cr_assert_eq(render(r, &plain, fields_with(r, "hello", "{\"hello\":\"hello\"}")), BASE_OK);
    cr_assert_eq(render(r, &got, fields_with(r, text, object)), BASE_OK);
    cr_assert_eq(special_count(r, &got.prompt), special_count(r, &plain.prompt));
    uint32_t seen = 0;
    for (const char *at = got.text.data; (at = strstr(at, text)) != NULL; at++)
        seen++;
    /* Root, both system items, user, reasoning, content, effort, result; of the call its name, key
     * (twice) and value. In the tool's JSON it stands escaped. */
    cr_assert_eq(seen, 12, "%u", seen);
    base_buf_deinit(&got.text);
    base_buf_deinit(&plain.text);
    base_buf_deinit(&quoted);
}

/* Between two special tokens the ids are those of `user\n` and the content encoded at once. */
static void run_leading_space(rig *r)
{
    const json_t *messages = json_object_get(r->input, "messages");
    rendered got = {0};
    json_t *body = json_pack("{s:O}", "messages", messages);
    cr_assert_eq(render(r, &got, chat_of_json(r->arena, body)), BASE_OK);
    for (size_t i = 0; i < json_array_size(messages); i++) {
        char text[256];
        snprintf(text, sizeof text, "user\n%s",
                 json_string_value(json_object_get(json_array_get(messages, i), "content")));
        eng_ids ids;
        eng_ids_init(&ids, 0);
        eng_tok_encode(r->tok, &ids, text, strlen(text), false, NULL);
        uint32_t end = got.prompt.item_end[i] - 2; /* end of turn, line end */
        cr_assert_eq(
            memcmp(got.prompt.tokens + end - ids.count, ids.data, ids.count * sizeof *ids.data), 0,
            "%s", text);
        cr_assert_eq(got.prompt.tokens[end - ids.count - 1], eng_tok_special(r->tok, "]~b]"));
        eng_ids_deinit(&ids);
    }
    json_decref(body);
    base_buf_deinit(&got.text);
}

static void run_long_runs(rig *r)
{
    static const struct {
        const char *unit;
        size_t count;
    } texts[] = {{"Z", 131072},  {".", 131072}, {" ", 131072},        {"_", 131072},
                 {"\n", 131072}, {"字", 65536}, {"e\xCC\x81", 65536}, {NULL, 131072}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        base_buf text;
        eng_ids ids;
        base_buf_init(&text, 0);
        eng_ids_init(&ids, 0);
        for (size_t k = 0; k < texts[i].count; k++)
            if (texts[i].unit != NULL)
                base_buf_puts(&text, texts[i].unit);
            else
                base_buf_add(&text,
                             &"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
                                 [base_rand(9, 9, k).v[0] % 64],
                             1);
        uint64_t from = base_now_ns();
        cr_assert_eq(eng_tok_encode(r->tok, &ids, text.data, text.length, false, NULL), BASE_OK);
        cr_assert_lt((double)(base_now_ns() - from) / 1e9, 2.0, "text %zu", i);
        base_buf back;
        base_buf_init(&back, 0);
        for (size_t k = 0; k < ids.count; k++) {
            size_t length;
            const char *bytes = eng_tok_bytes(r->tok, ids.data[k], &length);
            base_buf_add(&back, bytes, length);
        }
        cr_assert(same_buf(&text, &back));
        base_buf_deinit(&back);
        base_buf_deinit(&text);
        eng_ids_deinit(&ids);
    }
}

/* ---- the runner ---- */

static void run_case(const char *id)
{
    static const struct {
        const char *id;
        void (*run)(rig *r);
    } own[] = {{"B004", run_prose_at_once},
               {"B011", run_long_string},
               {"B037", run_rendering},
               {"B038", run_same_content},
               {"B039", run_argument_rows},
               {"B040", run_rendering},
               {"B041", run_messages},
               {"B042", run_two_instructions},
               {"B043", run_messages},
               {"B046", run_rendering},
               {"B061", run_spelled_specials},
               {"B062", run_leading_space},
               {"B063", run_bytes},
               {"B067", run_long_runs},
               {"B070", run_bytes},
               {"B073", run_pieces},
               {"B075", run_pieces}};
    rig r = make_rig(id);
    bool ran = json_object_get(r.input, "model_output") != NULL;
    if (ran)
        run_model_output(&r);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (strcmp(own[i].id, id) == 0) {
            own[i].run(&r);
            ran = true;
        }
    cr_assert(ran, "%s: nothing runs it", id);
    end_rig(&r);
}

#define CASE(name)                                                                                 \
    Test(text_cases, name, .timeout = 300)                                                         \
    {                                                                                              \
        run_case(#name);                                                                           \
    }
CASES_RUN(CASE)

Test(text_cases, every_case_is_run_or_belongs_elsewhere)
{
#define NAME(name) #name,
    static const char *const run[] = {CASES_RUN(NAME)};
    size_t total = 0;
    char *door = front_door(), check[32];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char path[256];
        snprintf(path, sizeof path, CASES "%s.json", files[i]);
        json_t *list = load_json(path), *one;
        size_t k;
        json_array_foreach(list, k, one)
        {
            const char *id = json_string_value(json_object_get(one, "id"));
            uint32_t found = 0;
            for (size_t n = 0; n < sizeof run / sizeof *run; n++)
                found += strcmp(run[n], id) == 0;
            for (size_t n = 0; n < sizeof elsewhere / sizeof *elsewhere; n++)
                if (strcmp(elsewhere[n].id, id) == 0) {
                    found++;
                    snprintf(check, sizeof check, "\nawait test('%s', ", id);
                    cr_assert_not_null(strstr(door, check), "%s: no check at the front door", id);
                    printf("%s is run by " FRONT_DOOR ": %s\n", id, elsewhere[n].reason);
                }
            cr_assert_eq(found, 1, "%s", id);
            total++;
        }
        json_decref(list);
    }
    cr_assert_eq(total, sizeof run / sizeof *run + sizeof elsewhere / sizeof *elsewhere);
    free(door);
}
