/* How sets of strings are built: what grammar_set.c lends to grammar_regex.c. */
#pragma once
#include "engine/grammar_internal.h"

#define GR_CODE_MAX 0x10FFFFu
#define GR_SET_STATES_MAX 40000u
#define GR_NOWHERE UINT32_MAX /* no state */

/* As gr_push, in the arena. */
#define gr_add(c, vector)                                                                          \
    (gr_arena_grow((c), (void **)&(vector)->data, &(vector)->count, &(vector)->capacity,           \
                   sizeof *(vector)->data),                                                        \
     &(vector)->data[(vector)->count - 1])
void gr_arena_grow(gr_compile *c, void **data, uint32_t *count, uint32_t *capacity, size_t size);

/* An automaton in the making; states are built in the order of their numbers, ranges of one state
 * in ascending order. */
typedef struct gr_set {
    GR_VECTOR(uint32_t) first;
    GR_VECTOR(gr_range) ranges;
    GR_VECTOR(bool) accept;
} gr_set;

void gr_set_state(gr_compile *c, gr_set *set, bool accept);
void gr_set_range(gr_compile *c, gr_set *set, uint32_t lo, uint32_t hi, uint32_t to);
/* Trimmed to the states that reach an end; its states' numbers are its own. */
gr_dfa *gr_set_finish(gr_compile *c, gr_set *set);
