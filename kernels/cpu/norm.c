/* cpu/norm: Gemma RMSNorm, per-head norm with RoPE, embedding rows. */
#include "kernels/cpu/variant.h"

#define ROWS_A_PIECE 8

/* 1 / sqrt(mean square + eps). */
static float inverse_rms(const float *x, uint32_t n, float eps)
{
    v16 sum = v16_zero();
    uint32_t k = 0;
    for (; k + 16 <= n; k += 16) {
        const v16 a = v16_load(x + k);
        sum = v16_fma(a, a, sum);
    }
    if (k < n) {
        const v16 a = v16_load_part(x + k, n - k);
        sum = v16_fma(a, a, sum);
    }
    return 1.0f / sqrtf(v16_sum(sum) / (float)n + eps);
}

INLINE v16 norm_lanes(v16 x, v16 rs, v16 w)
{
    return v16_mul(v16_mul(x, rs), v16_add(v16_set1(1.0f), w));
}

void cpu_norm_row(float *y, const float *x, const float *w, uint32_t cols, float eps)
{
    const v16 rs = v16_set1(inverse_rms(x, cols, eps));
    uint32_t k = 0;
    for (; k + 16 <= cols; k += 16)
        v16_store(y + k, norm_lanes(v16_load(x + k), rs, v16_load(w + k)));
    if (k < cols)
        v16_store_part(
            y + k, cols - k,
            norm_lanes(v16_load_part(x + k, cols - k), rs, v16_load_part(w + k, cols - k)));
}

INLINE void rotate(v16 *a, v16 *b, v16 cos, v16 sin)
{
    const v16 x = v16_sub(v16_mul(*a, cos), v16_mul(*b, sin));
    *b = v16_add(v16_mul(*b, cos), v16_mul(*a, sin));
    *a = x;
}

void cpu_head_row(float *x, const float *w, uint32_t dim, float eps, const kn_rope *rope,
                  int32_t pos)
{
    cpu_norm_row(x, x, w, dim, eps);
    if (!rope || !rope->rotary_dim)
        return;
    const uint32_t half = rope->rotary_dim / 2;
    const float *cos = rope->cos + (size_t)pos * half;
    const float *sin = rope->sin + (size_t)pos * half;
    uint32_t i = 0;
    for (; i + 16 <= half; i += 16) {
        v16 a = v16_load(x + i);
        v16 b = v16_load(x + half + i);
        rotate(&a, &b, v16_load(cos + i), v16_load(sin + i));
        v16_store(x + i, a);
        v16_store(x + half + i, b);
    }
    if (i < half) {
        v16 a = v16_load_part(x + i, half - i);
        v16 b = v16_load_part(x + half + i, half - i);
        rotate(&a, &b, v16_load_part(cos + i, half - i), v16_load_part(sin + i, half - i));
        v16_store_part(x + i, half - i, a);
        v16_store_part(x + half + i, half - i, b);
    }
}

typedef struct norm_job {
    float *y;
    const float *x, *w;
    const uint32_t *pick;
    uint32_t rows, cols;
    float eps;
} norm_job;

static void norm_piece(void *ctx, uint32_t piece, uint32_t thread)
{
    const norm_job *job = ctx;
    const uint32_t last = min_u32(job->rows, (piece + 1) * ROWS_A_PIECE);
    for (uint32_t r = piece * ROWS_A_PIECE; r < last; r++)
        cpu_norm_row(job->y + (size_t)r * job->cols,
                     job->x + (size_t)(job->pick ? job->pick[r] : r) * job->cols, job->w, job->cols,
                     job->eps);
}

void cpu_norm_rows(cpu_device *d, float *y, const float *x, const float *w, const uint32_t *pick,
                   uint32_t rows, uint32_t cols, float eps)
{
    norm_job job = {.y = y, .x = x, .w = w, .pick = pick, .rows = rows, .cols = cols, .eps = eps};
    kn_pool_run(d->base.pool, norm_piece, &job, ceil_div(rows, ROWS_A_PIECE));
}

void cpu_norm(kn_device *device, float *y, const float *x, const float *w, uint32_t rows,
              uint32_t cols, float eps)
{
    cpu_norm_rows(cpu_of(device), y, x, w, NULL, rows, cols, eps);
}

typedef struct head_job {
    float *x;
    const float *w;
    uint32_t rows, heads, dim;
    float eps;
    const kn_rope *rope;
    const int32_t *pos;
} head_job;

static void head_piece(void *ctx, uint32_t piece, uint32_t thread)
{
    const head_job *job = ctx;
    const uint32_t last = min_u32(job->rows, (piece + 1) * ROWS_A_PIECE);
    for (uint32_t r = piece * ROWS_A_PIECE; r < last; r++)
        for (uint32_t h = 0; h < job->heads; h++)
            cpu_head_row(job->x + ((size_t)r * job->heads + h) * job->dim, job->w, job->dim,
                         job->eps, job->rope, job->rope->rotary_dim ? job->pos[r] : 0);
}

void cpu_head_norm_rope(kn_device *device, float *x, const float *w, uint32_t rows, uint32_t heads,
                        uint32_t dim, float eps, const kn_rope *rope, const int32_t *pos)
{
    head_job job = {.x = x,
                    .w = w,
                    .rows = rows,
                    .heads = heads,
                    .dim = dim,
                    .eps = eps,
                    .rope = rope,
                    .pos = pos};
    kn_pool_run(device->pool, head_piece, &job, ceil_div(rows, ROWS_A_PIECE));
}

void cpu_embed(kn_device *device, float *y, const kn_weight *table, const int32_t *ids,
               uint32_t rows)
{
    float *row = cpu_of(device)->threads[0].tile;
    CHECK(table->cols <= cpu_of(device)->width_max);
    for (uint32_t r = 0; r < rows; r++) {
        CHECK(ids[r] >= 0 && (uint32_t)ids[r] < table->rows);
        float *at = y + (size_t)r * table->cols;
        cpu_decode_row(row, table, (uint32_t)ids[r], 0, table->cols);
        memcpy(at, row, table->cols * sizeof *at);
        if (table->type == KN_NVFP4)
            for (uint32_t k = 0; k < table->cols; k++)
                at[k] /= table->scale_global;
    }
}
