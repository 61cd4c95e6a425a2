/* kv__table: memory for the tables of pool and tree, in huge pages where there is enough of it.
 *
 * A match reads 512 KiB of tokens from anywhere in gigabytes, and a few lines of every other table
 * besides. In pages of 4 KiB each of these misses the TLB, and a miss whose page-table entries are
 * cold as well costs more than what it is for: on a virtual machine the 1,024 reference counts of a
 * match of 128K tokens, 4 KiB in a row, took 15 us of which 0.6 were the counting. */
#pragma once
#include <stdlib.h>
#include <sys/mman.h>

#include "engine/base/num.h"

#define KV_HUGE_BYTES ((size_t)2 << 20)

/* `count` elements of `size`, aligned to a cache line, not cleared; NULL if memory is used up or
 * the size overflows. Given back by free. */
static inline void *kv__table(size_t count, size_t size)
{
    size_t bytes, align;
    if (!base_mul(&bytes, count, size) || bytes > SIZE_MAX - KV_HUGE_BYTES)
        return NULL;
    align = bytes < KV_HUGE_BYTES ? 64 : KV_HUGE_BYTES;
    void *at = aligned_alloc(align, base_align_up(bytes, align));
    if (at != NULL && align == KV_HUGE_BYTES)
        (void)madvise(at, base_align_up(bytes, align), MADV_HUGEPAGE);
    return at;
}
