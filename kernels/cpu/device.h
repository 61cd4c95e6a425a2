/* cpu/device: what the cpu's operations share: threads, scratch, and where a page's planes are.
 *
 * All scratch is sized and taken by kn_device_create. Private to kernels/cpu. */
#pragma once
#include "kernels/backend.h"
#include "kernels/cpu/pool.h"

#define CPU_TOPK_MAX 64 /* experts or blocks chosen by one row */
#define CPU_HEAD_DIM_MAX 512
#define CPU_GROUP_HEADS_MAX 128 /* query heads on one kv head */
#define CPU_INDEX_HEADS_MAX 64
#define CPU_GROUP_ROWS 64 /* rows that share one decoded block in attention and selection */
#define CPU_TILE_OUTS 32  /* most outputs of a matrix that one piece of work computes */
#define CPU_TILE_MIN 4    /* … and the fewest */
#define CPU_PANEL_COLS                                                                             \
    384 /* columns of a matrix that are decoded at a time, or up to twice as many at once */
#define CPU_PANEL_ROWS 128 /* rows whose accumulators wait between two panels */
#define CPU_QUANT_BYTES                                                                            \
    448 /* of 128 quantised inputs (nvfp4.c): three bytes each, an offset and a factor a group */

/* One thread's scratch; every pointer is 64-aligned. */
typedef struct cpu_thread {
    float *tile;         /* decoded weights: [CPU_TILE_OUTS, 2 * CPU_PANEL_COLS], of ref one row */
    float *waiting;      /* [CPU_PANEL_ROWS, CPU_TILE_OUTS, 16] accumulators */
    float *y0, *y1, *y2; /* [rows_max, CPU_TILE_OUTS] each */
    float *block_k, *block_v; /* [CPU_HEAD_DIM_MAX * KN_BLOCK_TOKENS] each */
    float *p;                 /* [CPU_GROUP_HEADS_MAX * KN_BLOCK_TOKENS] */
    float *m, *l;             /* [CPU_GROUP_ROWS * CPU_GROUP_HEADS_MAX] each */
} cpu_thread;

typedef struct cpu_device {
    kn_device base;
    uint32_t rows_max, width_max, context_max;
    size_t tile_floats;  /* of cpu_thread.tile */
    size_t wide_floats;  /* of `wide` */
    size_t score_floats; /* of `scores` */
    float *normed;       /* [rows_max * width_max] */
    float *logits;       /* [rows_max * width_max]: router */
    uint8_t *quant[2];   /* quantised rows: of inputs, of activations */
    size_t quant_bytes[2];
    float *wide;            /* at least [rows_max * 3 * width_max]: projections, activations */
    float *scores;          /* block scores; of ref: two doubles a position */
    int32_t *route_ids;     /* [rows_max * CPU_TOPK_MAX] */
    float *route_weights;   /* the same */
    uint32_t *slot_rows;    /* the same: rows of a step, by expert */
    float *slot_weights;    /* the same */
    uint32_t *expert_first; /* [width_max + 2]: first slot of an expert */
    uint32_t *piece_first;  /* [width_max + 2]: first piece of work of an expert */
    uint32_t *groups; /* [rows_max + 1]: first row of each run of rows that share a sequence */
    cpu_thread *threads;
    void *memory; /* all of the above */
    size_t memory_bytes;
} cpu_device;

/* Bytes of a quantised row of `cols` inputs. */
static inline size_t cpu_quant_row(uint32_t cols)
{
    return ((size_t)cols + 127) / 128 * CPU_QUANT_BYTES;
}

static inline cpu_device *cpu_of(kn_device *device)
{
    return device->impl;
}

/* What of the processor the variants use, as the system lets programs use it. */
enum {
    KN_CPU_AVX2 = 1,
    KN_CPU_FMA = 2,
    KN_CPU_F16C = 4,
    KN_CPU_AVX512F = 8,
    KN_CPU_AVX512BW = 16,
    KN_CPU_AVX512VL = 32,
    KN_CPU_AVX512DQ = 64,
    KN_CPU_AVX512VBMI = 128,
    KN_CPU_AVX512VNNI = 256,
    KN_CPU_ALL = 511,
};

uint32_t kn_cpu_features(void);
/* The variant of that name ("auto": the best) for a processor with these features. Fails:
 * BASE_UNSUPPORTED, naming what is unknown or missing. */
base_code kn_cpu_choose(const kn_ops **out, const char *variant, uint32_t features, base_err *err);

extern const kn_ops kn_cpu_ops_ref, kn_cpu_ops_avx2, kn_cpu_ops_avx512;

/* kn_nvfp4_read by scale byte and nibble; filled when the first device is created. */
extern float kn_cpu_nvfp4_table[256][16];

/* ---- pages ---- */

static inline uint8_t *cpu_kv_plane(const kn_kv *kv, uint32_t page, uint32_t layer,
                                    kn_plane_kind kind, uint32_t head)
{
    return kv->pages + page * kv->page_bytes + kn_kv_plane_offset(kv, layer, kind, head);
}
