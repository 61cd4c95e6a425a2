/* cpu/variant: what the sources of one vector variant share. Each of those sources is compiled once
 * a variant; the names below carry the variant's suffix. Private to kernels/cpu. */
#pragma once
#include "kernels/cpu/device.h"
#include "kernels/cpu/vec.h"

#define cpu_matmul VN(kn_cpu_matmul)
#define cpu_nvfp4_product VN(kn_cpu_nvfp4_product)
#define cpu_mxfp8_few VN(kn_cpu_mxfp8_few)
#define cpu_quantize_row VN(kn_cpu_quantize_row)
#define cpu_quantize VN(kn_cpu_quantize)
#define cpu_decode_row VN(kn_cpu_decode_row)
#define cpu_norm_row VN(kn_cpu_norm_row)
#define cpu_head_row VN(kn_cpu_head_row)
#define cpu_norm_rows VN(kn_cpu_norm_rows)
#define cpu_piece_outs VN(kn_cpu_piece_outs)
#define cpu_embed VN(kn_cpu_embed)
#define cpu_norm VN(kn_cpu_norm)
#define cpu_head_norm_rope VN(kn_cpu_head_norm_rope)
#define cpu_linear VN(kn_cpu_linear)
#define cpu_attn_in VN(kn_cpu_attn_in)
#define cpu_select VN(kn_cpu_select)
#define cpu_attend VN(kn_cpu_attend)
#define cpu_mlp VN(kn_cpu_mlp)
#define cpu_moe VN(kn_cpu_moe)
#define cpu_head VN(kn_cpu_head)
#define cpu_kv_put VN(kn_cpu_kv_put)
#define cpu_draft_attend VN(kn_cpu_draft_attend)

/* Up to here rows are few: weights are decoded on the fly, once for all rows. Above, a tile of
 * weights is decoded to scratch and the rows pass by. */
#ifdef KN_VARIANT_AVX512
#define CPU_FEW_ROWS 8
#else
#define CPU_FEW_ROWS 4
#endif

/* Rows that products read. */
typedef struct cpu_in {
    const float *x;
    size_t stride;    /* floats */
    const uint8_t *q; /* the same rows quantised; NULL if no weight that reads them is NVFP4 */
    size_t q_stride;
    const uint32_t *index; /* NULL, or which rows, in this order */
} cpu_in;

/* Quantises rows x cols values of in->x into d->quant[which] and sets in->q. */
void cpu_quantize(cpu_device *d, cpu_in *in, int which, uint32_t rows, uint32_t cols);
void cpu_quantize_row(uint8_t *dst, const float *x, uint32_t cols);
/* y[r, o - first] = dot(row r of `in`, w[o]) / scale_global for outputs first <= o < last; with
 * `add` it is added to what stands there. y_stride in floats. `first` is a multiple of 32 (any
 * output unless w is packed or NVFP4); last - first at most CPU_TILE_OUTS unless rows are few. */
void cpu_matmul(cpu_device *d, uint32_t thread, float *y, size_t y_stride, const cpu_in *in,
                uint32_t rows, const kn_weight *w, uint32_t first, uint32_t last, bool add);
/* The parts of cpu_matmul for NVFP4, and for at most CPU_FEW_ROWS rows of packed MXFP8. */
void cpu_nvfp4_product(const cpu_thread *t, float *y, size_t y_stride, const cpu_in *in,
                       uint32_t rows, const kn_weight *w, uint32_t first, uint32_t last, bool add);
void cpu_mxfp8_few(const cpu_thread *t, float *y, size_t y_stride, const float *const *x,
                   uint32_t rows, const kn_weight *w, uint32_t first, uint32_t last, bool add);
/* How many outputs of a matrix with `cols` inputs one piece of work takes: a multiple of 32. */
uint32_t cpu_piece_outs(const cpu_device *d, uint32_t rows, uint32_t cols, uint32_t outs,
                        uint32_t outs_max);
/* Row `row` in float before the division by scale_global, columns [first, last) only, padded with
 * zeros to a multiple of 16; `first` is a multiple of 32. */
void cpu_decode_row(float *dst, const kn_weight *w, uint32_t row, uint32_t first, uint32_t last);
void cpu_norm_row(float *y, const float *x, const float *w, uint32_t cols, float eps);
/* Norm of one head's row, then RoPE if rope and its rotary_dim are given. */
void cpu_head_row(float *x, const float *w, uint32_t dim, float eps, const kn_rope *rope,
                  int32_t pos);
/* y[i] = norm(x[pick ? pick[i] : i]) over the threads. */
void cpu_norm_rows(cpu_device *d, float *y, const float *x, const float *w, const uint32_t *pick,
                   uint32_t rows, uint32_t cols, float eps);

void cpu_embed(kn_device *device, float *y, const kn_weight *table, const int32_t *ids,
               uint32_t rows);
void cpu_norm(kn_device *device, float *y, const float *x, const float *w, uint32_t rows,
              uint32_t cols, float eps);
void cpu_head_norm_rope(kn_device *device, float *x, const float *w, uint32_t rows, uint32_t heads,
                        uint32_t dim, float eps, const kn_rope *rope, const int32_t *pos);
void cpu_linear(kn_device *device, float *y, const float *x, const kn_weight *w, uint32_t rows,
                bool add);
void cpu_attn_in(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attn_in *args);
void cpu_select(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_select *args);
void cpu_attend(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attend *args);
void cpu_mlp(kn_device *device, uint32_t rows, const kn_mlp *args);
void cpu_moe(kn_device *device, uint32_t rows, const kn_moe *args);
void cpu_head(kn_device *device, float *logits, const float *x, const float *norm,
              const kn_weight *head, const uint32_t *pick, uint32_t picks, uint32_t hidden,
              float eps);
void cpu_kv_put(kn_device *device, kn_kv *kv, const kn_rows *rows, uint32_t layer, const float *k,
                const float *v);
void cpu_draft_attend(kn_device *device, const kn_kv *kv, const kn_draft_attend *args);

static inline uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static inline uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}
