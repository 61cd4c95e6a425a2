/* gpu/args: what the launchers hand to the kernels. Pointers are device memory. */
#pragma once
#include <stdint.h>

#define GPU_SLICES 8   /* parts of K whose sums are added in order; the warps of a small product */
#define GPU_UNIT 64    /* columns that a slice is a multiple of */
#define GPU_TILE 16    /* outputs of a tile */
#define GPU_COLUMNS 8  /* rows of a step that a small product takes at once */
#define GPU_WIDE 64    /* and a wide one */
#define GPU_SEGMENTS 5 /* matrices with one input: q, k, v, index q, index k */
#define GPU_HEAD_DIM_MAX 256
#define GPU_ROUTES_MAX 16 /* experts of a row */

typedef struct gpu_weight {
    const uint8_t *data, *scale;
    float global;
    uint32_t type, rows, cols;
    uint32_t tiled; /* in the order of gpu/linear.h, else as stored */
} gpu_weight;

/* Rows of a step, staged. */
typedef struct gpu_rows {
    const int32_t *token, *pos;
    const uint32_t *seq;
    const uint32_t *first; /* of a sequence: where its page numbers begin */
    const uint32_t *pages;
    uint32_t rows;
} gpu_rows;

typedef struct gpu_pages {
    uint8_t *base;
    uint64_t page_bytes;
    uint64_t layer_offset; /* of the layer at hand */
    uint32_t type, kv_heads, head_dim, index_dim;
    uint32_t row_bytes, index_row_bytes;
} gpu_pages;

/* What products read: halves for MXFP8 and NVFP4 weights (gpu/linear.h), floats for the others. */
typedef struct gpu_input {
    const uint32_t *halves; /* [rows, cols] words: high and low half of each value */
    const float *scale;     /* [rows]: times this */
    const float *floats;    /* [rows, cols] */
} gpu_input;

typedef struct gpu_segment {
    gpu_weight w;
    uint32_t first_tile;
    float *y; /* [rows, stride] */
    uint32_t stride;
} gpu_segment;

typedef struct gpu_linear_args {
    gpu_segment segment[GPU_SEGMENTS];
    uint32_t segments, rows, cols, add;
    gpu_input in;
} gpu_linear_args;

/* Gate and up, then the activation: `pairs` of (row, chosen expert), sorted by expert. */
typedef struct gpu_expert_args {
    const gpu_weight *gate, *up, *down; /* [experts + 1]; the last is the shared one */
    uint32_t slots;                     /* chosen experts a row, and the shared one */
    uint32_t cols, hidden;
    const uint32_t *tiles; /* {expert, first pair, pairs} each; or NULL: one expert, all rows */
    const uint32_t *tile_count;
    const uint32_t *pairs; /* row * slots + slot */
    uint32_t rows;
    gpu_input in;       /* of the rows */
    uint32_t *h_halves; /* [rows * slots, h_stride] words */
    float *h_floats;
    uint32_t h_stride;
    float h_scale; /* halves are h times this, a power of two */
    float alpha, limit;
    float *out; /* [rows * slots, hidden] */
} gpu_expert_args;
