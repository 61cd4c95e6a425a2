/* eng_past: which pages were listed once, so that a miss can be told from an eviction.
 *
 * A table of hashes, one a whole page, each over its namespace and all tokens up to the page's end.
 * Newer ones overwrite: what it has forgotten counts as never listed. Thread: one. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

typedef struct eng_past {
    uint64_t *marks;
    uint32_t mask;
} eng_past;

bool eng_past_init(eng_past *past, uint32_t page_count); /* false: no memory */
void eng_past_deinit(eng_past *past);
void eng_past_note(eng_past *past, uint64_t space, const int32_t *tokens, uint32_t count);
/* How many tokens from `from` on, in whole pages of tokens[0..count), were listed without a gap. */
uint32_t eng_past_gone(const eng_past *past, uint64_t space, const int32_t *tokens, uint32_t count,
                       uint32_t from);
