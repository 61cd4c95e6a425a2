/* eng_spec: how many draft tokens a step verifies, and whose. Pure: times, confidences and outcomes
 * in, lengths out.
 *
 * Draft tokens come from the drafter's block, from a copy of earlier text, or from a prediction. Of
 * each it is learned how often a token was right: of the drafter by its own confidence, of copies
 * by the length of the match. With that, and with the learned times of passes (engine/cost.h), a
 * step verifies what makes the most tokens a second:
 *
 *   rate = (sequences + sum over verified tokens of the chance that it and all before it are right)
 *          / (time of a pass of that many rows + time of the draft pass, if it is run)
 *
 * A draft token is kept only if it equals the target's own draw, so no choice of lengths biases
 * what comes out (DSpark's Algorithm 1 has to stop at the first number of rows that does not raise
 * the rate, because its acceptance is by chance; here all are looked at, which finds the steps in
 * the time of a pass). Before the draft pass its gain is known only from the sequence's last ones;
 * it is left out where it would gain less than 2 % over doing without. So that neither side's
 * figures grow old, the opposite is done in at most one round of a hundred, and as rarely as it
 * takes for all such rounds together to lose no more than half a percent of the time. */
#pragma once
#include "engine/cost.h"

#define ENG_SPEC_BLOCK_MAX 16
#define ENG_SPEC_BINS 16

typedef enum eng_spec_kind {
    ENG_SPEC_BLOCK,      /* the drafter's */
    ENG_SPEC_COPY,       /* of earlier text */
    ENG_SPEC_PREDICTION, /* of what the client expects */
    ENG_SPEC_KINDS,
} eng_spec_kind;

/* What drafting has been worth lately: of a sequence, or of all. */
typedef struct eng_spec_history {
    float tokens; /* expected of a round with a draft pass; 0: none was run */
    float rows;   /* draft rows that were verified for it */
} eng_spec_history;

/* All that is worth keeping from one run to the next: plain data. */
typedef struct eng_spec_learned {
    eng_cost verify;                                /* passes that only decode and verify */
    eng_cost prefill;                               /* passes with prefill rows */
    eng_cost draft;                                 /* draft passes, by sequences */
    float accept[2][ENG_SPEC_KINDS][ENG_SPEC_BINS]; /* [sampled]: how often a token was right */
    float seen[2][ENG_SPEC_KINDS][ENG_SPEC_BINS];
    eng_spec_history history[2];
} eng_spec_learned;

typedef struct eng_spec {
    eng_spec_learned learned;
    uint32_t fixed;          /* not 0: always so many of the drafter's */
    uint64_t rounds, probed; /* probed: the last round with a probe */
    double earned_ns;        /* since then: what the next one may lose */
    bool probe;              /* the opposite is done in this round */
} eng_spec;

/* Draft tokens of one sequence. */
typedef struct eng_spec_offer {
    eng_spec_kind kind;
    bool sampled;
    uint32_t count;                   /* at most ENG_SPEC_BLOCK_MAX */
    uint8_t bin[ENG_SPEC_BLOCK_MAX];  /* see eng_spec_bin_… */
    float accept[ENG_SPEC_BLOCK_MAX]; /* that a token is right if those before it are */
    uint32_t length;                  /* out: how many of them to verify */
    float tokens;                     /* out: expected of the round, the sequence's own included */
    float product;                    /* scratch */
} eng_spec_offer;

/* `fixed`: 0 adaptive, else a constant length. */
void eng_spec_init(eng_spec *spec, uint32_t fixed);
/* False if a value is none that this module writes. */
bool eng_spec_check(const eng_spec_learned *learned);

uint32_t eng_spec_bin_confidence(float confidence);
uint32_t eng_spec_bin_match(uint32_t match);
/* Fills `accept` from kind, sampled, count and bin. */
void eng_spec_fill(const eng_spec *spec, eng_spec_offer *offer);
/* Sets length and tokens of each; at most `rows_max` draft rows in all. `extra_ns` is spent beside
 * the pass. Returns the expected rate in tokens a nanosecond; 0: no pass was timed yet, nothing is
 * verified. */
double eng_spec_choose(const eng_spec *spec, eng_spec_offer *offers, uint32_t count,
                       uint32_t context, double extra_ns, uint32_t rows_max);
/* Whether to run the draft pass for these sequences; `rate` is what can be had without one. Once a
 * round. */
bool eng_spec_worthwhile(eng_spec *spec, const eng_spec_history *const *histories, uint32_t count,
                         uint32_t context, double rate);

/* A pass of `rows` rows took `ns`; `context`: the furthest position. */
void eng_spec_observe_step(eng_spec *spec, uint32_t rows, bool prefill, uint32_t context,
                           uint64_t ns);
void eng_spec_observe_draft(eng_spec *spec, uint32_t sequences, uint32_t context, uint64_t ns);
/* The drafter has made this offer, and so much of it will be verified. */
void eng_spec_observe_offer(eng_spec *spec, eng_spec_history *history, const eng_spec_offer *offer);
/* Of the offer's first `judged` tokens the first `accepted` were right. */
void eng_spec_observe_round(eng_spec *spec, const eng_spec_offer *offer, uint32_t judged,
                            uint32_t accepted);

/* ---- speculate_file.c ---- */

/* Reads what an earlier run has learned. BASE_NOT_FOUND: no file; BASE_FORMAT: not one of ours, cut
 * short or damaged; BASE_CONFLICT: of another device, model or binary; BASE_IO. `learned` is as it
 * was then. */
base_code eng_spec_load(eng_spec_learned *learned, const char *path, const char *key,
                        base_err *err);
/* Replaces the file in one step; an old one stays whole if the disk refuses (BASE_IO). */
base_code eng_spec_save(const eng_spec_learned *learned, const char *path, const char *key,
                        base_err *err);
