/* base/rand: counter-based random numbers: a pure function of (seed, stream, index), so that a draw
 * never depends on what was drawn before or by whom. Philox4x32-10 (Salmon et al., "Parallel random
 * numbers: as easy as 1, 2, 3", SC11; the known-answer vectors of its Random123 distribution are
 * tests). Thread: any. */
#pragma once
#include <stdint.h>

typedef struct base_rand4 {
    uint32_t v[4];
} base_rand4;

base_rand4 base_philox(const uint32_t counter[4], const uint32_t key[2]);

/* Four words for the given seed, stream and index. */
static inline base_rand4 base_rand(uint64_t seed, uint64_t stream, uint64_t index)
{
    const uint32_t counter[4] = {(uint32_t)index, (uint32_t)(index >> 32), (uint32_t)stream,
                                 (uint32_t)(stream >> 32)};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    return base_philox(counter, key);
}

/* In (0, 1), never 0 or 1: (word + 0.5) / 2^32 in double. */
static inline double base_rand_unit(uint32_t word)
{
    return ((double)word + 0.5) * 0x1p-32;
}
