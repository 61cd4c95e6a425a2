/* eng_spec: how many draft tokens a step verifies. Pure: times and confidences in, lengths out.
 *
 * cost(rows) = a + b * rows of a forward pass and the time of a draft pass are learned from steps
 * that ran (least squares with forgetting). A round of R sequences verifies the draft tokens whose
 * expected gain raises tokens per second: candidates by falling product of confidences (DSpark's
 * Algorithm 1), taken while (R + sum of products) / (cost(R + taken) + draft) rises. That stops at
 * the first non-rise and looks only at the prefix's confidences, so acceptance is not biased; the
 * result never changes what is sampled. Where the expected gain over plain decoding is below 2 %,
 * no draft pass is run, except a probe every hundredth round. */
#pragma once
#include "engine/base/err.h"

#define ENG_SPEC_BLOCK_MAX 16

typedef struct eng_spec {
    double weight, rows, rows2, time, rows_time; /* sums of the fit, decayed */
    double draft_ns;                             /* of one draft pass, averaged */
    double gain;     /* tokens a sequence and round, averaged, over rounds that drafted */
    double verified; /* draft rows a sequence and round, likewise */
    uint32_t fixed;  /* not 0: always this many */
    uint64_t rounds;
} eng_spec;

/* `fixed`: 0 adaptive, else a constant length. */
void eng_spec_init(eng_spec *spec, uint32_t fixed);
/* A forward pass without prefill rows took `ns`. */
void eng_spec_observe_step(eng_spec *spec, uint32_t rows, uint64_t ns);
void eng_spec_observe_draft(eng_spec *spec, uint64_t ns);
/* A sequence verified `drafted` tokens and moved on by `tokens` (accepted + 1). */
void eng_spec_observe_round(eng_spec *spec, uint32_t drafted, uint32_t tokens);
/* Whether to run the draft pass for `sequences` decoding sequences. */
bool eng_spec_worthwhile(eng_spec *spec, uint32_t sequences);
/* confidence: [sequences, block]; lengths: [sequences], out, at most `block`. */
void eng_spec_choose(const eng_spec *spec, uint32_t *lengths, const float *confidence,
                     uint32_t sequences, uint32_t block);
