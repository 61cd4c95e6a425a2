/* sample_internal: the noise and the draw, shared by the sampler, the drafter (which must guess
 * what the sampler will draw) and their tests. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Temperatures below this are greedy: logits / temperature would overflow, and the distribution is
 * one-hot anyway. */
#define ENG_SAMPLE__TEMPERATURE_MIN 1e-5f

/* Gumbel noise of token v at an output index. */
double eng_sample__noise(uint64_t seed, uint64_t output_index, uint32_t choice, uint32_t v);
/* The largest of logits[v] / temperature + noise over all v < vocab; ties to the lower id. NaN
 * counts as -infinity. */
int32_t eng_sample__draw(const float *logits, uint32_t vocab, float temperature, uint64_t seed,
                         uint64_t output_index, uint32_t choice);
/* Takes what the mask (a bit per id, 32 a word) does not allow to -infinity. */
void eng_sample__mask(float *logits, uint32_t vocab, const uint32_t *mask);
/* The largest logit, ties to the lower id; NaN counts as -infinity. */
int32_t eng_sample__greedy(const float *logits, uint32_t vocab);
