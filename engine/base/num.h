/* base/num: checked and rounded integer arithmetic for sizes. Thread: any. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* True and *out = a * b (or a + b) if it fits a size_t; false and *out untouched otherwise. */
static inline bool base_mul(size_t *out, size_t a, size_t b)
{
    size_t product;
    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *out = product;
    return true;
}

static inline bool base_add(size_t *out, size_t a, size_t b)
{
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *out = sum;
    return true;
}

/* `align` is a power of two. */
static inline size_t base_align_up(size_t n, size_t align)
{
    return (n + align - 1) & ~(align - 1);
}

static inline size_t base_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t base_max(size_t a, size_t b)
{
    return a > b ? a : b;
}
