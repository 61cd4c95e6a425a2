/* tests/numerics/support: random inputs from a seed, the devices under test, comparisons that name
 * the first difference, and a reader of .safetensors files. */
#pragma once
#include "kernels/ops.h"

#include <criterion/criterion.h>

#define ROWS_MAX 132
#define WIDTH_MAX 1600
#define CONTEXT_MAX 8192

/* Row counts that a chunk of a step may have: around the border between few and many rows, odd
 * ones, and one past 128. */
extern const uint32_t chunk_sizes[8];

/* ---- random inputs ---- */

/* Uniform in (-1, 1), a pure function of (seed, index). */
float random_value(uint64_t seed, uint64_t index);
/* `count` values in (-size, size); 64-aligned; lives until the process ends, as everything below
 * does. */
float *random_floats(uint64_t seed, size_t count, float size);
/* A matrix of the type with entries around 0.1. `absolute`: the same with all signs cleared. */
kn_weight random_weight(uint64_t seed, kn_type type, uint32_t rows, uint32_t cols);
kn_weight absolute_weight(const kn_weight *w);
/* The same matrix with its streaming form beside it, if its type has one. */
kn_weight packed_weight(const kn_weight *w);
void *zeroed(size_t bytes);

/* ---- devices ---- */

/* The vector variants this processor has; at least one, or the test is skipped. */
uint32_t vector_variants(const char *names[2]);
kn_device *open_device(const char *variant, uint32_t threads);

/* ---- pages ---- */

/* One row as the page type stores it, by the conversions of ops.h. */
void store_row(kn_kv_type type, uint8_t *dst, const float *x, uint32_t dims);
/* Random rows in every plane of every page. */
void fill_pages(kn_kv *kv, uint64_t seed, float size);
kn_kv *open_pages(kn_device *device, const kn_kv_shape *shape);

/* ---- comparisons ---- */

void same_bits(const void *a, const void *b, size_t count, const char *what);
/* |a - b| <= bound[i / width] for every i. */
void within(const float *a, const float *b, size_t count, const float *bound, size_t width,
            const char *what);
/* |a - b| <= share * largest |b| of the row. */
void within_rows(const float *a, const float *b, size_t rows, size_t width, float share,
                 const char *what);

/* ---- vectors ---- */

typedef struct tensors tensors;

typedef struct tensor {
    const char *dtype; /* as the file spells it */
    const void *data;
    size_t count;      /* elements */
    uint32_t shape[4]; /* missing dimensions are 1 */
} tensor;

bool have_tensors(const char *name);
/* A file below tests/vectors. Fails the test if it does not exist. */
tensors *open_tensors(const char *name);
/* Fails the test if the name is missing. */
tensor get_tensor(const tensors *file, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
