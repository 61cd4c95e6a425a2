/* eng_copy: drafts from text that a sequence has seen: its prompt (tool results, files, earlier
 * turns), its own output, and what the client predicts of the output.
 *
 * The last tokens of the sequence are looked up among earlier runs of ENG_COPY_GRAM tokens; what
 * followed the longest match is the draft. Slots hold where a run ended, two a bucket, the newest
 * first, so look-up and insert are constant; a bucket that is full forgets its older end. Every hit
 * is compared with the tokens themselves. Memory: at most ENG_COPY_BYTES_MAX a table, two tables.
 *
 * Thread: create any; the rest one at a time. */
#pragma once
#include "engine/base/err.h"

#define ENG_COPY_GRAM 3
#define ENG_COPY_MATCH_MAX 32 /* a longer match is not told from this */
#define ENG_COPY_BYTES_MAX (1u << 18)

typedef struct eng_copy eng_copy;

/* `prompt` and `prediction` are borrowed and outlive it; `output` is where output tokens will be
 * written, at most output_max. Indexes prompt and prediction. NULL: no memory. */
eng_copy *eng_copy_create(const int32_t *prompt, uint32_t prompt_count, const int32_t *prediction,
                          uint32_t prediction_count, const int32_t *output, uint32_t output_max);
void eng_copy_destroy(eng_copy *copy); /* NULL is fine */

typedef struct eng_copy_draft {
    uint32_t count;
    uint32_t match; /* tokens before the draft that agree, at most ENG_COPY_MATCH_MAX */
    bool predicted; /* from the prediction */
} eng_copy_draft;

/* What may follow the prompt and the first `output_count` output tokens: at most `max` tokens.
 * Indexes the output up to there; output_count never falls. */
eng_copy_draft eng_copy_propose(eng_copy *copy, uint32_t output_count, int32_t *tokens,
                                uint32_t max);
