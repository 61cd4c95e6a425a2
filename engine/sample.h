/* eng_sample: the next token as a pure function of (logits, request, seed, output index, choice)
 * and the tokens before.
 *
 * Order: bias and bans, repetition, presence and frequency penalties, then (temperature 0) the
 * largest logit, ties to the lower id; else logits / temperature, min_p, top_k, top_p, and the
 * largest of logit + Gumbel noise over what is left. The noise of token v at output index i is
 * -log(-log(u)), u from base_rand(seed, i << 8 | choice, v / 4) word v % 4: it depends on nothing
 * else, so that a draft, a batch or a resumed run draws the same. Thread: engine; scratch is the
 * caller's. */
#pragma once
#include "engine/engine.h"

/* Counts of tokens so far, for penalties and min_tokens; zero-initialised, one a sequence. */
typedef struct eng_counts {
    uint16_t *output; /* [vocab] occurrences in the output, saturating; NULL when no penalty asks
                         for it */
    uint8_t *prompt;  /* [vocab] 1 if it occurs in the prompt; NULL likewise */
} eng_counts;

typedef struct eng_sampler_input {
    const float *logits; /* [vocab] */
    uint32_t vocab;      /* ids at or above it do not exist */
    const eng_sampling *sampling;
    const eng_counts *counts;
    const int32_t *end_tokens; /* banned while output_index < min_tokens, and with ignore_eos */
    uint32_t end_token_count;
    int32_t ban;          /* one more banned token, -1: none */
    const uint32_t *mask; /* [vocab bits] what a grammar allows, at least one token; NULL: all. It
                             is stronger than bias, bans and min_tokens */
    uint64_t output_index;
    uint32_t choice;
} eng_sampler_input;

/* Bytes of scratch eng_sample needs for a vocabulary. */
size_t eng_sample_scratch(uint32_t vocab);
/* Returns the token. `logprob`, if not NULL, gets the log-softmax of the logits after bias and
 * penalties, before temperature and filters, with sampling->top_logprobs alternatives, largest
 * first. */
int32_t eng_sample(const eng_sampler_input *input, eng_logprob *logprob, void *scratch);
/* log-softmax of logits [vocab] at `token`, with `top` alternatives, largest first. Thread: any. */
void eng_sample_logprob(eng_logprob *out, const float *logits, uint32_t vocab, int32_t token,
                        uint32_t top);
/* Checks ranges; the text names field and bound. */
base_code eng_sampling_check(const eng_sampling *sampling, uint32_t vocab, base_err *err);
