/* What token_load.c (the file), token.c (its use), pretok.c (the split) and bpe.c (the merges)
 * share. */
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "engine/token.h"

/* A merge: the pair of ids (left << 32 | right), its place in the list of merges and what it makes.
 */
typedef struct tok_pair {
    uint64_t key; /* TOK_NO_PAIR: an empty slot */
    uint32_t rank;
    int32_t id;
} tok_pair;

#define TOK_NO_PAIR UINT64_MAX
#define TOK_NO_RANK UINT32_MAX

enum {
    TOK_EXISTS = 1,
    TOK_ADDED = 2,
    TOK_WORD = 4,   /* findable by its bytes: made by merges, not added */
    TOK_MADE = 8,   /* by a merge */
    TOK_WHOLE = 16, /* merging its own bytes gives this one token, so a pre-token that equals it
                       needs no merging */
};

typedef struct tok_piece {
    uint32_t at, length; /* in `blob` */
    uint8_t flags;
} tok_piece;

struct eng_tok {
    uint32_t vocab; /* largest id + 1 */
    tok_piece *pieces;
    char *blob;
    size_t blob_length;

    int32_t *words; /* open addressing by the bytes' hash; -1 is empty */
    uint32_t word_mask;
    uint32_t word_max; /* longest, in bytes */
    tok_pair *pairs;
    uint32_t pair_mask;
    int32_t byte_id[256];
    bool ignore_merges;

    int32_t *added; /* ids, by first byte, then longest first */
    uint32_t added_count;
    uint32_t added_first[257]; /* range of a first byte in `added` */

    pcre2_code *split;
    char digest[33];
};

/* One call of eng_tok_encode: scratch that would otherwise be made for every word. */
typedef struct tok_encoder {
    const eng_tok *tok;
    eng_ids *out;
    pcre2_match_data *match;
    void *work; /* of bpe.c, made when the first long word comes */
} tok_encoder;

/* The id of a token by its bytes, -1 if there is none. */
int32_t tok_word(const eng_tok *tok, const char *bytes, size_t length);
/* The merge of two neighbours, NULL if there is none. */
uint32_t tok_pair_hash(uint64_t key);
const tok_pair *tok_pair_find(const eng_tok *tok, int32_t left, int32_t right);

/* Compiles the split pattern. BASE_FORMAT with the pattern's error. */
base_code tok_split_create(pcre2_code **out, const char *pattern, size_t length, base_err *err);
/* Splits valid UTF-8 and merges each pre-token; sets out->failed when it must stop. */
void tok_split_encode(tok_encoder *encoder, const char *text, size_t length);

/* Appends the ids of one pre-token. */
void tok_merge(tok_encoder *encoder, const char *bytes, size_t length);
