/* eng_tok: a Hugging Face tokenizer.json: byte-level BPE with a split pattern and added (special)
 * tokens.
 *
 * Immutable after load, so any thread may use it. Text of clients is encoded with specials off: the
 * spelling of a special token is then ordinary text. Decoding is by bytes: a token may end inside a
 * character. */
#pragma once
#include "engine/base/buf.h"
#include "engine/base/err.h"

typedef struct eng_tok eng_tok;

/* A growing list of ids with a bound (0: none); `failed` is set when it would pass `max` or
 * memory. */
typedef struct eng_ids {
    int32_t *data;
    size_t count, capacity, max;
    bool failed;
} eng_ids;

void eng_ids_init(eng_ids *ids, size_t max);
void eng_ids_deinit(eng_ids *ids);
void eng_ids_add(eng_ids *ids, int32_t id);

/* Reads and checks tokenizer.json (model.vocab, model.merges as "a b" or ["a","b"], pre_tokenizer,
 * added_tokens). BASE_FORMAT / BASE_UNSUPPORTED name the key. */
base_code eng_tok_load(eng_tok **out, const char *path, base_err *err);
void eng_tok_destroy(eng_tok *tok);
uint32_t eng_tok_vocab(const eng_tok *tok); /* largest id + 1 */
/* The id of an added token by its text, -1 if there is none. */
int32_t eng_tok_special(const eng_tok *tok, const char *text);
/* An added token, whatever its `special` flag says. */
bool eng_tok_is_special(const eng_tok *tok, int32_t id);
/* Bytes of a token (a special's spelling); NULL for an id that is not in the vocabulary. Borrowed
 * from tok. */
const char *eng_tok_bytes(const eng_tok *tok, int32_t id, size_t *length);
/* Appends the ids of `text`. Linear in the text's length whatever it holds (10 MB of one letter
 * included); stops early once out->max is passed. Invalid UTF-8 is encoded byte by byte.
 * BASE_NOMEM, or BASE_TOO_LONG when out->max is passed. */
base_code eng_tok_encode(const eng_tok *tok, eng_ids *out, const char *text, size_t length,
                         bool specials, base_err *err);
/* xxh3-128 over the file's bytes, hex. */
const char *eng_tok_digest(const eng_tok *tok);
