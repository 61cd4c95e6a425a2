/* The chat decoder: what a model wrote, cut in three ways, which must come to the same.
 *
 * The first byte is flags (1 raw, 2 begins in reasoning, 4 with tools, 8 with stop strings, 16 the
 * end of turn follows), the second the seed of the cuts, the rest the text. */
#include "tests/fuzz/fuzz.h"

#include "engine/base/json.h"
#include "engine/base/utf8.h"
#include "engine/chat.h"

/* All that was said, as one text: a kind's letter before what follows it. */
typedef struct said {
    base_buf text;
    char kind;
    bool open;
} said;

static void part(void *ctx, const eng_part *p)
{
    said *s = ctx;
    MUST(base_utf8_valid(p->text, p->length));
    MUST(s->open == (p->kind == ENG_PART_CALL_ARGS || p->kind == ENG_PART_CALL_END));
    char kind = "rt{a}"[p->kind];
    if (kind != s->kind || kind == '{' || kind == '}') {
        base_buf_add(&s->text, "\xFF", 1);
        base_buf_add(&s->text, &kind, 1);
    }
    s->kind = kind;
    s->open = p->kind == ENG_PART_CALL_BEGIN || p->kind == ENG_PART_CALL_ARGS;
    base_buf_add(&s->text, p->text, p->length);
}

/* `every` 0: whole; else pieces of 1 to `every` bytes. */
static void decode(const eng_codec *codec, said *out, const eng_decoder_options *given,
                   const char *text, size_t length, uint32_t every, uint32_t seed, bool ends)
{
    base_err err = BASE_ERR_INIT;
    eng_decoder *decoder;
    eng_decoder_options options = *given;
    *out = (said){.kind = ' '};
    base_buf_init(&out->text, 0);
    options.part = part;
    options.ctx = out;
    MUST(eng_decoder_create(&decoder, codec, &options, &err) == BASE_OK);
    bool more = true;
    uint32_t pushed = 0;
    for (size_t at = 0; more && at < length; pushed++) {
        seed = seed * 1664525u + 1013904223u;
        size_t n = every == 0 ? length : 1 + (seed >> 24) % every;
        n = n < length - at ? n : length - at;
        more = eng_decoder_push(decoder, -1, text + at, n);
        at += n;
    }
    if (more && ends)
        eng_decoder_push(decoder, eng_codec_end_token(codec), "[e~[", 4);
    eng_decoder_finish(decoder);
    MUST(eng_decoder_whole_tokens(decoder) <= pushed + 1);
    MUST(more || eng_decoder_stop_index(decoder) >= 0);
    eng_decoder_destroy(decoder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static eng_tok *tok;
    static eng_codec *codec;
#define TEXT(s) ((eng_text){(s), sizeof(s) - 1})
    static const eng_text tools[] = {
        TEXT("{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":{"
             "\"s\":{\"type\":\"string\"},\"n\":{\"type\":\"number\"},\"i\":{\"type\":\"integer\"},"
             "\"b\":{\"type\":\"boolean\"},\"z\":{\"type\":\"null\"},"
             "\"e\":{\"enum\":[\"a\",1]},\"u\":{\"type\":[\"string\",\"integer\"]},"
             "\"a\":{\"type\":\"array\",\"items\":{\"type\":\"string\"}},"
             "\"m\":{\"type\":\"array\",\"items\":{\"type\":\"array\",\"items\":{\"type\":"
             "\"integer\"}}},"
             "\"o\":{\"type\":\"object\",\"properties\":{\"s\":{\"type\":\"string\"},"
             "\"l\":{\"type\":\"array\",\"items\":{\"type\":\"object\",\"properties\":{\"k\":{}}}}}"
             "}}}}"),
        TEXT("{\"name\":\"g\"}"),
        TEXT("{\"name\":\"c\",\"parameters\":{\"type\":\"object\",\"properties\":{"
             "\"input\":{\"type\":\"string\"}},\"required\":[\"input\"]}}")};
    static const eng_text stops[] = {TEXT("stop"), TEXT("st"), TEXT("\n\n"), TEXT("\xC3\xA9")};
    base_err err = BASE_ERR_INIT;
    if (codec == NULL) {
        MUST(eng_tok_load(&tok, SMALL_TOKENIZER, &err) == BASE_OK);
        MUST(eng_codec_create(&codec, tok, "You are.", ENG_THINK_ADAPTIVE, &err) == BASE_OK);
    }
    if (size < 2)
        return 0;
    eng_decoder_options options = {
        .parse = data[0] & 1 ? ENG_PARSE_RAW : ENG_PARSE_CHAT,
        .starts_in_reasoning = data[0] & 2,
        .thinking = data[0] & 2 ? ENG_THINK_ENABLED : ENG_THINK_ADAPTIVE,
        .tools = tools,
        .tool_count = data[0] & 4 ? 3 : 0,
        .stops = stops,
        .stop_count = data[0] & 8 ? 4 : 0,
    };
    char *text = fuzz_copy(data + 2, size - 2);
    said whole, bytes, pieces;
    bool ends = data[0] & 16;
    decode(codec, &whole, &options, text, size - 2, 0, 0, ends);
    decode(codec, &bytes, &options, text, size - 2, 1, 0, ends);
    decode(codec, &pieces, &options, text, size - 2, 13, data[1], ends);
    MUST(whole.text.length == bytes.text.length && whole.text.length == pieces.text.length);
    if (whole.text.length > 0) {
        MUST(memcmp(whole.text.data, bytes.text.data, whole.text.length) == 0);
        MUST(memcmp(whole.text.data, pieces.text.data, whole.text.length) == 0);
    }
    base_buf_deinit(&whole.text);
    base_buf_deinit(&bytes.text);
    base_buf_deinit(&pieces.text);
    free(text);
    return 0;
}
