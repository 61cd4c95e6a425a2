/* eng_cost: how long a pass takes, by its rows and the context behind them, learned from passes
 * that ran. Pure.
 *
 * A table of nodes: numbers of rows, every one where kernels are tuned row by row and sparser
 * above, times buckets of context, each twice as long as the one before. Between nodes a time is
 * interpolated; an observation moves both of its neighbours. What was never seen follows from what
 * was: the nearest nodes of the bucket, the nearest bucket that has any, and before anything was
 * seen nothing is known. One slow pass (the machine was taken away) moves a node by a bounded
 * share.
 *
 * A table is plain data without pointers, so that it can be written to a file and read back. */
#pragma once
#include "engine/base/err.h"

#define ENG_COST_NODES 26
#define ENG_COST_BUCKETS 12

typedef struct eng_cost {
    float ns[ENG_COST_BUCKETS][ENG_COST_NODES]; /* 0: never seen */
    float seen[ENG_COST_BUCKETS][ENG_COST_NODES];
} eng_cost;

/* A pass of `rows` rows, the furthest of them at position `context`, took `ns`. rows 0 is ignored.
 */
void eng_cost_observe(eng_cost *cost, uint32_t rows, uint32_t context, uint64_t ns);
/* Never less for more rows; 0 if nothing was seen. */
double eng_cost_of(const eng_cost *cost, uint32_t rows, uint32_t context);
/* The same for choosing among numbers of rows: one that was seen a few times only may have been
 * unlucky, so it is taken to cost less until it was seen 16 times, though not less than fewer rows
 * that were. */
double eng_cost_hope(const eng_cost *cost, uint32_t rows, uint32_t context);
/* Whether passes of about so many rows were seen in this bucket often enough to be believed. */
bool eng_cost_known(const eng_cost *cost, uint32_t rows, uint32_t context);
/* The most rows, from 1 to `rows_max`, that take at most `ns`; rows_max if nothing was seen. */
uint32_t eng_cost_rows(const eng_cost *cost, double ns, uint32_t context, uint32_t rows_max);
/* False if a value is none that this module writes. */
bool eng_cost_check(const eng_cost *cost);
