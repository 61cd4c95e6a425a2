/* eng_sched: which rows one step runs. Pure: no clock, no device, no heap.
 *
 * Decode rows first: every sequence that only waits for its next token gets its one row; then draft
 * rows while they fit; then prefill rows in order of arrival, bounded by prefill_chunk while anyone
 * decodes, so that a long prompt stretches the others' inter-token time by one chunk at most. */
#pragma once
#include "engine/base/err.h"

typedef struct eng_sched_seq {
    uint32_t need; /* known tokens whose K/V are not in pages yet, at least 1; 1 means it decodes */
    uint32_t draft;   /* draft tokens offered for verification; 0 unless need == 1 */
    uint64_t arrival; /* smaller goes first among prefills */
    bool picks_all;   /* a prefill that takes the logits of every row, not of the last one alone */
    uint32_t rows;    /* out: rows of this step, 0 if it waits; > need by the draft rows granted */
} eng_sched_seq;

typedef struct eng_sched_limits {
    uint32_t rows_max;
    uint32_t prefill_chunk; /* prefill rows of a step in which others decode */
    uint32_t picks_max;     /* rows whose logits are taken: decode, draft, the last row of a
                               finished prefill, and those of prefills that take all */
} eng_sched_limits;

/* Returns the sum of rows. `order` is scratch of `count` entries. */
uint32_t eng_sched_plan(eng_sched_seq *seqs, uint32_t count, const eng_sched_limits *limits,
                        uint32_t *order);
