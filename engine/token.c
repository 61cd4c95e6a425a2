/* A loaded tokenizer in use: look-ups, encoding, bytes of tokens. The file is read by token_load.c,
 * text is split by pretok.c and merged by bpe.c. */
#include "engine/token.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "engine/token_internal.h"

/* ---- ids ---- */

void eng_ids_init(eng_ids *ids, size_t max)
{
    *ids = (eng_ids){.max = max};
}

void eng_ids_deinit(eng_ids *ids)
{
    free(ids->data);
    *ids = (eng_ids){.max = ids->max};
}

void eng_ids_add(eng_ids *ids, int32_t id)
{
    if (ids->failed)
        return;
    if (ids->max != 0 && ids->count >= ids->max) {
        ids->failed = true;
        return;
    }
    if (ids->count == ids->capacity) {
        size_t capacity = ids->capacity + ids->capacity / 2 + 256, bytes;
        int32_t *data = base_mul(&bytes, capacity, sizeof *data) ? realloc(ids->data, bytes) : NULL;
        if (data == NULL) {
            ids->failed = true;
            return;
        }
        ids->data = data;
        ids->capacity = capacity;
    }
    ids->data[ids->count++] = id;
}

/* ---- look-ups ---- */

int32_t tok_word(const eng_tok *tok, const char *bytes, size_t length)
{
    for (uint32_t i = (uint32_t)XXH3_64bits(bytes, length);; i++) {
        int32_t id = tok->words[i & tok->word_mask];
        if (id < 0)
            return -1;
        const tok_piece *piece = &tok->pieces[id];
        if (piece->length == length && memcmp(tok->blob + piece->at, bytes, length) == 0)
            return id;
    }
}

uint32_t tok_pair_hash(uint64_t key)
{
    key *= 0x9E3779B97F4A7C15u;
    return (uint32_t)(key >> 32) ^ (uint32_t)key;
}

const tok_pair *tok_pair_find(const eng_tok *tok, int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    for (uint32_t i = tok_pair_hash(key);; i++) {
        const tok_pair *pair = &tok->pairs[i & tok->pair_mask];
        if (pair->key == key)
            return pair;
        if (pair->key == TOK_NO_PAIR)
            return NULL;
    }
}

void eng_tok_destroy(eng_tok *tok)
{
    if (tok == NULL)
        return;
    free(tok->pieces);
    free(tok->blob);
    free(tok->words);
    free(tok->pairs);
    free(tok->added);
    pcre2_code_free(tok->split);
    free(tok);
}

/* ---- use ---- */

uint32_t eng_tok_vocab(const eng_tok *tok)
{
    return tok->vocab;
}

/* The added token that the text begins with, the longest; -1 if there is none. */
static int32_t added_at(const eng_tok *tok, const char *text, size_t length)
{
    unsigned char first = (unsigned char)text[0];
    for (uint32_t i = tok->added_first[first]; i < tok->added_first[first + 1]; i++) {
        const tok_piece *piece = &tok->pieces[tok->added[i]];
        if (piece->length <= length && memcmp(tok->blob + piece->at, text, piece->length) == 0)
            return tok->added[i];
    }
    return -1;
}

int32_t eng_tok_special(const eng_tok *tok, const char *text)
{
    size_t length = strlen(text);
    unsigned char first = (unsigned char)text[0];
    for (uint32_t i = tok->added_first[first]; i < tok->added_first[first + 1]; i++) {
        const tok_piece *piece = &tok->pieces[tok->added[i]];
        if (piece->length == length && memcmp(tok->blob + piece->at, text, length) == 0)
            return tok->added[i];
    }
    return -1;
}

static const tok_piece *piece_of(const eng_tok *tok, int32_t id)
{
    if (id < 0 || (uint32_t)id >= tok->vocab || tok->pieces[id].flags == 0)
        return NULL;
    return &tok->pieces[id];
}

bool eng_tok_is_special(const eng_tok *tok, int32_t id)
{
    const tok_piece *piece = piece_of(tok, id);
    return piece != NULL && (piece->flags & TOK_ADDED) != 0;
}

const char *eng_tok_bytes(const eng_tok *tok, int32_t id, size_t *length)
{
    const tok_piece *piece = piece_of(tok, id);
    *length = piece == NULL ? 0 : piece->length;
    return piece == NULL ? NULL : tok->blob + piece->at;
}

/* Text without added tokens: valid stretches are split and merged, a byte that is no UTF-8 is a
 * pre-token of its own. */
static void encode_plain(tok_encoder *encoder, const char *text, size_t length)
{
    size_t from = 0, at = 0;
    while (at < length && !encoder->out->failed) {
        size_t n =
            (unsigned char)text[at] < 0x80 ? 1 : base_utf8_char(text + at, length - at, NULL);
        if (n > 0) {
            at += n;
            continue;
        }
        tok_split_encode(encoder, text + from, at - from);
        eng_ids_add(encoder->out, encoder->tok->byte_id[(unsigned char)text[at]]);
        from = ++at;
    }
    tok_split_encode(encoder, text + from, at - from);
}

static void encode_with_added(tok_encoder *encoder, const char *text, size_t length)
{
    const eng_tok *tok = encoder->tok;
    size_t from = 0;
    for (size_t at = 0; at < length && !encoder->out->failed;) {
        int32_t id = added_at(tok, text + at, length - at);
        if (id < 0) {
            at++;
            continue;
        }
        encode_plain(encoder, text + from, at - from);
        eng_ids_add(encoder->out, id);
        from = at += tok->pieces[id].length;
    }
    encode_plain(encoder, text + from, length - from);
}

base_code eng_tok_encode(const eng_tok *tok, eng_ids *out, const char *text, size_t length,
                         bool specials, base_err *err)
{
    tok_encoder encoder = {.tok = tok, .out = out};
    encoder.match = pcre2_match_data_create_from_pattern(tok->split, NULL);
    if (encoder.match == NULL)
        out->failed = true;
    else if (specials)
        encode_with_added(&encoder, text, length);
    else
        encode_plain(&encoder, text, length);
    free(encoder.work);
    pcre2_match_data_free(encoder.match);
    if (!out->failed)
        return BASE_OK;
    if (out->max != 0 && out->count >= out->max)
        return base_fail(err, BASE_TOO_LONG, "more than %zu tokens", out->max);
    return base_fail(err, BASE_NOMEM, "tokens: no memory");
}

const char *eng_tok_digest(const eng_tok *tok)
{
    return tok->digest;
}
