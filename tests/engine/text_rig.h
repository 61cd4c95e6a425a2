/* What the tests of tokenizer, codec and decoder share: files, a codec on the small tokenizer, and
 * a collector of parts that checks what must hold of every part. */
#pragma once
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/utf8.h"
#include "engine/chat.h"

/* 256 bytes, thirty merges and ten added tokens, written by hand; merges in both forms. */
#define SMALL_TOKENIZER SOURCE_ROOT "/tests/engine/cases/tokenizer_small.json"
#define NANO_TOKENIZER SOURCE_ROOT "/config/models/nano/tokenizer.json"
#define CASES SOURCE_ROOT "/tests/engine/cases/"

#define NS "]<]minimax[>["
#define TEXT(s) ((eng_text){(s), sizeof(s) - 1})

static inline eng_text text_of(const char *s)
{
    return (eng_text){s, s == NULL ? 0 : strlen(s)};
}

static inline eng_tok *load_tok(const char *path)
{
    base_err err = BASE_ERR_INIT;
    eng_tok *tok;
    cr_assert_eq(eng_tok_load(&tok, path, &err), BASE_OK, "%s", err.text);
    return tok;
}

static inline eng_codec *make_codec(const eng_tok *tok, const char *identity, eng_thinking thinking)
{
    base_err err = BASE_ERR_INIT;
    eng_codec *codec;
    cr_assert_eq(eng_codec_create(&codec, tok, identity, thinking, &err), BASE_OK, "%s", err.text);
    return codec;
}

static inline json_t *load_json(const char *path)
{
    json_error_t error;
    json_t *json = json_load_file(path, JSON_ALLOW_NUL, &error);
    cr_assert_not_null(json, "%s: %s", path, error.text);
    return json;
}

/* ---- decoding ---- */

#define RIG_CALLS 64

typedef struct rig_call {
    base_buf name, arguments;
    uint32_t fragments;
    bool whole;
} rig_call;

typedef struct rig_result {
    base_buf reasoning, text;
    rig_call calls[RIG_CALLS];
    uint32_t call_count;
    bool open; /* a call is */
    bool check_prefixes;
} rig_result;

static inline bool is_json_object(const base_buf *text)
{
    base_json json;
    base_json_init(&json, text->data == NULL ? "" : text->data, text->length, BASE_JSON_DEPTH_MAX);
    if (base_json_next(&json) != BASE_JSON_OBJECT_BEGIN)
        return false;
    base_json_kind kind;
    do
        kind = base_json_next(&json);
    while (kind != BASE_JSON_END && kind != BASE_JSON_ERROR);
    return kind == BASE_JSON_END;
}

/* A prefix of arguments ends inside a string or behind a value: closing both must give an object.
 */
static inline void check_prefix(const base_buf *prefix)
{
    base_buf whole;
    base_buf_init(&whole, 0);
    base_buf_add(&whole, prefix->data, prefix->length);
    bool string = false;
    for (size_t i = 0; i < prefix->length; i++) {
        if (string && prefix->data[i] == '\\')
            i++;
        else if (prefix->data[i] == '"')
            string = !string;
    }
    if (string)
        base_buf_puts(&whole, "\"");
    if (prefix->length == 0)
        base_buf_puts(&whole, "{");
    bool valid = is_json_object(&whole);
    if (!valid) {
        base_buf_puts(&whole, "}");
        valid = is_json_object(&whole);
    }
    cr_assert(valid, "arguments so far are no prefix of an object: %s", prefix->data);
    base_buf_deinit(&whole);
}

static inline void rig_part(void *ctx, const eng_part *part)
{
    rig_result *r = ctx;
    cr_assert(part->length == 0 || base_utf8_valid(part->text, part->length),
              "a part splits a character");
    rig_call *call = r->call_count == 0 ? NULL : &r->calls[r->call_count - 1];
    switch (part->kind) {
    case ENG_PART_REASONING:
        cr_assert_not(r->open);
        base_buf_add(&r->reasoning, part->text, part->length);
        break;
    case ENG_PART_TEXT:
        cr_assert_not(r->open);
        base_buf_add(&r->text, part->text, part->length);
        break;
    case ENG_PART_CALL_BEGIN:
        cr_assert_not(r->open);
        cr_assert_eq(part->call, r->call_count, "call indexes are dense");
        cr_assert_lt(r->call_count, RIG_CALLS);
        base_buf_add(&r->calls[r->call_count++].name, part->text, part->length);
        r->open = true;
        break;
    case ENG_PART_CALL_ARGS:
        cr_assert(r->open);
        cr_assert_eq(part->call + 1, r->call_count);
        base_buf_add(&call->arguments, part->text, part->length);
        call->fragments++;
        if (r->check_prefixes)
            check_prefix(&call->arguments);
        break;
    case ENG_PART_CALL_END:
        cr_assert(r->open);
        call->whole = true;
        r->open = false;
        break;
    }
}

static inline void rig_clear(rig_result *r)
{
    base_buf_deinit(&r->reasoning);
    base_buf_deinit(&r->text);
    for (uint32_t i = 0; i < r->call_count; i++) {
        base_buf_deinit(&r->calls[i].name);
        base_buf_deinit(&r->calls[i].arguments);
    }
    *r = (rig_result){0};
}

static inline bool same_buf(const base_buf *a, const base_buf *b)
{
    return a->length == b->length && (a->length == 0 || memcmp(a->data, b->data, a->length) == 0);
}

static inline bool rig_same(const rig_result *a, const rig_result *b)
{
    if (!same_buf(&a->reasoning, &b->reasoning) || !same_buf(&a->text, &b->text) ||
        a->call_count != b->call_count)
        return false;
    for (uint32_t i = 0; i < a->call_count; i++)
        if (!same_buf(&a->calls[i].name, &b->calls[i].name) ||
            !same_buf(&a->calls[i].arguments, &b->calls[i].arguments) ||
            a->calls[i].whole != b->calls[i].whole)
            return false;
    return true;
}

static inline const char *buf_text(const base_buf *buf)
{
    return buf->data == NULL ? "" : buf->data;
}

static inline eng_decoder *make_decoder(const eng_codec *codec, rig_result *result,
                                        eng_decoder_options options)
{
    base_err err = BASE_ERR_INIT;
    eng_decoder *decoder;
    options.part = rig_part;
    options.ctx = result;
    cr_assert_eq(eng_decoder_create(&decoder, codec, &options, &err), BASE_OK, "%s", err.text);
    return decoder;
}

/* One output, cut before each of `cuts` (ascending, any of them may repeat); the end of turn
 * follows if `ends`. */
static inline void decode_cut(const eng_codec *codec, rig_result *result,
                              eng_decoder_options options, const char *text, size_t length,
                              const size_t *cuts, size_t cut_count, bool ends)
{
    eng_decoder *decoder = make_decoder(codec, result, options);
    size_t from = 0;
    bool more = true;
    for (size_t i = 0; i <= cut_count && more; i++) {
        size_t to = i < cut_count ? cuts[i] : length;
        more = eng_decoder_push(decoder, -1, text + from, to - from);
        from = to;
    }
    if (ends && more)
        eng_decoder_push(decoder, eng_codec_end_token(codec), "[e~[", 4);
    eng_decoder_finish(decoder);
    eng_decoder_destroy(decoder);
}

static inline void decode(const eng_codec *codec, rig_result *result, eng_decoder_options options,
                          const char *text)
{
    decode_cut(codec, result, options, text, strlen(text), NULL, 0, true);
}
