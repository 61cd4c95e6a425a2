/* Tokenizer, codec and decoder when the Nth allocation fails, for every N: each says so or is not
 * touched by it, and nothing leaks. */
#include <criterion/criterion.h>

#include <string.h>

#include "engine/chat.h"
#include "tests/failing_alloc.h"

#define NS "]<]minimax[>["
#define PATH SOURCE_ROOT "/tests/engine/cases/tokenizer_small.json"

Test(text_faults, loading_fails_cleanly)
{
    bool done = false;
    long n = 0;
    alive = 0;
    for (; !done; n++) {
        base_err err = BASE_ERR_INIT;
        eng_tok *tok;
        left = n;
        base_code code = eng_tok_load(&tok, PATH, &err);
        done = left >= 0; /* fewer were made than it takes to fail */
        left = -1;
        cr_assert(code == BASE_NOMEM || done, "allocation %ld: %s %s", n, base_code_name(code),
                  err.text);
        cr_assert_eq(code == BASE_OK, tok != NULL);
        eng_tok_destroy(tok);
        cr_assert_eq(alive, 0, "allocation %ld leaks", n);
    }
    cr_assert_gt(n, 10);
}

Test(text_faults, encoding_fails_cleanly)
{
    eng_tok *tok;
    cr_assert_eq(eng_tok_load(&tok, PATH, NULL), BASE_OK);
    char *text = malloc(100000);
    memset(text, 'q', 100000);
    long before = alive;
    bool done = false;
    for (long n = 0; !done; n++) {
        eng_ids ids;
        base_err err = BASE_ERR_INIT;
        eng_ids_init(&ids, 0);
        left = n;
        base_code code = eng_tok_encode(tok, &ids, text, 100000, true, &err);
        done = left >= 0;
        left = -1;
        cr_assert(code == (done ? BASE_OK : BASE_NOMEM));
        eng_ids_deinit(&ids);
        cr_assert_eq(alive, before, "allocation %ld leaks", n);
    }
    free(text);
    eng_tok_destroy(tok);
}

static base_code render(const eng_codec *codec, base_arena *arena)
{
    static const int32_t run[] = {327, 'h', 'm', 326, 323, '\n', 326, '<', 'x', '>'};
    eng_call call = {.name = {"f", 1}, .arguments = {"{\"a\":[1,{\"b\":\"c\"}]}", 19}};
    eng_text tool = {"{\"name\":\"f\",\"s\":\"\\u00e9\"}", 25};
    eng_item items[] = {
        {.role = ENG_ROLE_SYSTEM, .text = {"be", 2}},
        {.role = ENG_ROLE_USER, .text = {"hello", 5}},
        {.role = ENG_ROLE_ASSISTANT, .reasoning = {"r", 1}, .calls = &call, .call_count = 1},
        {.role = ENG_ROLE_TOOL, .text = {"one", 3}},
        {.role = ENG_ROLE_TOOL, .text = {"two", 3}},
        {.role = ENG_ROLE_ASSISTANT, .tokens = run, .token_count = sizeof run / sizeof *run}};
    eng_chat chat = {.items = items, .item_count = 6, .tools = &tool, .tool_count = 1};
    eng_prompt prompt;
    base_err err = BASE_ERR_INIT;
    base_buf text;
    base_buf_init(&text, 0);
    base_code code = eng_codec_render(codec, &prompt, &chat, 0, 10000, &text, arena, &err);
    base_buf_deinit(&text);
    cr_assert(code == BASE_OK || code == BASE_NOMEM, "%s %s", base_code_name(code), err.text);
    return code;
}

Test(text_faults, rendering_fails_cleanly)
{
    eng_tok *tok;
    cr_assert_eq(eng_tok_load(&tok, PATH, NULL), BASE_OK);
    long before = alive;
    bool done = false;
    for (long n = 0; !done; n++) {
        eng_codec *codec = NULL;
        base_arena *arena = NULL;
        left = n;
        base_code code = eng_codec_create(&codec, tok, "I", ENG_THINK_DEFAULT, NULL);
        if (code == BASE_OK) {
            arena = base_arena_create(256, 1 << 20);
            code = arena == NULL ? BASE_NOMEM : render(codec, arena);
        }
        done = left >= 0;
        left = -1;
        cr_assert_eq(code, done ? BASE_OK : BASE_NOMEM, "allocation %ld: %s", n,
                     base_code_name(code));
        base_arena_destroy(arena);
        eng_codec_destroy(codec);
        cr_assert_eq(alive, before, "allocation %ld leaks", n);
    }
    eng_tok_destroy(tok);
}

typedef struct seen {
    char parts[2048]; /* all that was given out, in order */
    size_t length;
} seen;

static void on_part(void *ctx, const eng_part *part)
{
    seen *s = ctx;
    cr_assert_lt(s->length + part->length + 1, sizeof s->parts);
    s->parts[s->length++] = (char)('A' + part->kind);
    if (part->length > 0)
        memcpy(s->parts + s->length, part->text, part->length);
    s->length += part->length;
}

/* Returns whether the decoder took everything; byte by byte, so that parts are the same each time.
 */
static bool decode(const eng_codec *codec, seen *s)
{
    static const char output[] =
        "<mm:think>why</mm:think>text EN" NS "<tool_call>\n" NS "<invoke name=\"f\">" NS
        "<s>a\"b" NS "</s>" NS "<o>" NS "<x>1" NS "</x>" NS "<x>2" NS "</x>" NS "<y>z" NS "</y>" NS
        "</o>stray" NS "</k>" NS "</invoke>\n" NS "<invoke name=\"f\">" NS "<s>\xFF" NS "</s>" NS
        "</invoke>\n" NS "</tool_call> bye END";
    static const char schema[] =
        "{\"name\":\"f\",\"parameters\":{\"properties\":{\"s\":{\"type\":\"string\"},\"o\":{\"$"
        "ref\":\"#/$defs/o\"}},"
        "\"$defs\":{\"o\":{\"type\":\"object\",\"properties\":{\"x\":{\"type\":\"integer\"}}}}}}";
    eng_text tool = {schema, sizeof schema - 1}, stop = {"END", 3};
    eng_decoder_options options = {.parse = ENG_PARSE_CHAT,
                                   .tools = &tool,
                                   .tool_count = 1,
                                   .stops = &stop,
                                   .stop_count = 1,
                                   .part = on_part,
                                   .ctx = s};
    eng_decoder *decoder;
    s->length = 0;
    if (eng_decoder_create(&decoder, codec, &options, NULL) != BASE_OK)
        return false;
    bool more = true;
    for (size_t i = 0; i + 1 < sizeof output && more; i++)
        more = eng_decoder_push(decoder, -1, output + i, 1);
    bool whole = eng_decoder_stop_index(decoder) == 0;
    eng_decoder_finish(decoder);
    eng_decoder_destroy(decoder);
    return whole;
}

/* A decoder that ran out of memory has given out a beginning of what it would have given, and
 * stops. */
Test(text_faults, decoding_stops_cleanly)
{
    eng_tok *tok;
    eng_codec *codec;
    cr_assert_eq(eng_tok_load(&tok, PATH, NULL), BASE_OK);
    cr_assert_eq(eng_codec_create(&codec, tok, "I", ENG_THINK_DEFAULT, NULL), BASE_OK);
    static seen whole, got;
    cr_assert(decode(codec, &whole));
    long before = alive;
    bool done = false;
    for (long n = 0; !done; n++) {
        left = n;
        bool all = decode(codec, &got);
        done = left >= 0;
        left = -1;
        cr_assert_eq(all, done, "allocation %ld goes unnoticed", n);
        cr_assert_leq(got.length, whole.length);
        cr_assert_eq(memcmp(got.parts, whole.parts, got.length), 0,
                     "allocation %ld: other parts: %.*s", n, (int)got.length, got.parts);
        cr_assert_eq(alive, before, "allocation %ld leaks", n);
    }
    eng_codec_destroy(codec);
    eng_tok_destroy(tok);
}
