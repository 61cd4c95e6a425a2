/* eng_constrain: a sequence's visible output held to a grammar, token by token.
 *
 * A grammar knows bytes. Three special tokens have a meaning to it, and stand in it as bytes that
 * no UTF-8 text holds, so that client text and ordinary tokens can never spell them:
 * ENG_CONSTRAIN_SEPARATOR, _CALL and _CALL_CLOSE. Reasoning stays free, but it can neither end the
 * turn nor open a call; the grammar begins with the visible text. Thread: one at a time. */
#pragma once
#include "engine/chat.h"
#include "engine/grammar.h"

#define ENG_CONSTRAIN_SEPARATOR 0xFF
#define ENG_CONSTRAIN_CALL 0xFE
#define ENG_CONSTRAIN_CALL_CLOSE 0xFD

typedef struct eng_constrain eng_constrain;

/* The vocabulary that grammars of a codec's output are masked over; shared by all. */
base_code eng_constrain_vocab(eng_vocab **out, const eng_codec *codec, const eng_tok *tok,
                              base_err *err);

typedef struct eng_constrain_options {
    const eng_codec *codec; /* these outlive the constraint */
    const eng_tok *tok;
    const eng_vocab *vocab;
    const int32_t *end_tokens;
    uint32_t end_token_count;
    eng_grammar *grammar; /* gets a reference */
    bool reasons;         /* the output begins inside reasoning */
    bool may_reason;      /* the first token may open (or refuse) reasoning */
} eng_constrain_options;

base_code eng_constrain_create(eng_constrain **out, const eng_constrain_options *options,
                               base_err *err);
void eng_constrain_destroy(eng_constrain *constrain); /* NULL is fine */

/* A bit per id that may come next, 32 a word, low bit first; ids at or past the vocabulary's end
 * have none. Borrowed until the next call. */
const uint32_t *eng_constrain_mask(eng_constrain *constrain);
/* A token of the output, sampled or forced; `in_reasoning`: the decoder's word behind it. False:
 * the grammar refuses it. */
bool eng_constrain_take(eng_constrain *constrain, int32_t token, bool in_reasoning);
/* Tokens that have to come next, as long as there is one way on: at most `max`; returns how many.
 * An end token, if the text is over. The last token of a forced run is left to the model where a
 * longer one may stand in its place: what follows may want to be one token with it. */
uint32_t eng_constrain_forced(eng_constrain *constrain, int32_t *tokens, uint32_t max);
/* Nothing may follow, not even the end: a bound of the grammar was hit. */
bool eng_constrain_stuck(eng_constrain *constrain);

/* The same for drafts: begin where the output is, then a mask for each drafted token, given the one
 * before (-1 at first). */
void eng_constrain_draft(eng_constrain *constrain);
const uint32_t *eng_constrain_draft_mask(void *constrain, int32_t previous);
