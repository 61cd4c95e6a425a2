/* cpu/linear: products with stored matrices.
 *
 * Few rows (decode, verify): bound by the weights' bytes. R rows x N outputs of accumulators stay
 * in registers, each weight is decoded once and used for all rows. Many rows (prefill): bound by
 * arithmetic. A tile of outputs x a panel of columns is decoded to scratch, small enough for the
 * first-level cache; blocks of M rows x N outputs pass over it. Accumulators of a panel that is not
 * the last wait in scratch, lane by lane, so that a sum has the same order whatever the panels.
 * Both walk k upwards with sixteen lanes and end in sum16: a value's bits depend on its row and its
 * output alone. */
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/variant.h"

#ifdef KN_VARIANT_AVX512
#define WIDE_M 4
#define WIDE_N 4
#else
#define WIDE_M 2
#define WIDE_N 2
#endif

#define TILE_BYTES                                                                                 \
    24576 /* of decoded weights: half of a 48 KiB first-level cache, the rest is for rows of x */
#define FEW_WEIGHTS 24576 /* weights a piece when rows are few: some 2 us */
#define SMALL_PRODUCT                                                                              \
    32768 /* multiply-adds below which waking another thread costs more than it brings */

static const float e2m1_table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* ---- decoding to scratch ---- */

/* The same columns of packed MXFP8. */
static void decode_packed(float *dst, const kn_weight *w, uint32_t row, uint32_t first,
                          uint32_t last)
{
    const uint8_t *band = (const uint8_t *)w->tiles + row / BAND_OUTS * tile_band_bytes(w);
    const uint32_t n = row % TILE_OUTS;
    for (uint32_t k = first; k < last;) {
        const uint32_t block = k / MXFP8_COLS * MXFP8_COLS;
        const uint32_t padded = tile_mxfp8_cols(w->cols, block);
        const uint8_t *tile = band + block / MXFP8_COLS * BAND_TILES * (size_t)MXFP8_TILE_BYTES +
                              row % BAND_OUTS / TILE_OUTS * ((size_t)TILE_OUTS * padded + 64);
        float scale[16];
        scales_e8m0_256(scale, tile + TILE_OUTS * padded + n * 8, 8);
        for (; k < last && k < block + MXFP8_COLS; k += 32, dst += 32) {
            const uint32_t at = k - block;
            const v16 f = v16_set1(scale[at / 32]);
            v16 a, b;
            v16_e4m3_256th_pair(&a, &b, tile + at / 64 * (TILE_OUTS * 64) + n * 64 + at % 64);
            v16_store(dst, v16_mul(a, f));
            v16_store(dst + 16, v16_mul(b, f));
        }
    }
}

void cpu_decode_row(float *dst, const kn_weight *w, uint32_t row, uint32_t first, uint32_t last)
{
    const size_t cols = w->cols;
    const uint32_t n = last - first;
    uint32_t k = 0;
    float scale[16];
    switch (w->type) {
    case KN_F32: {
        const float *p = (const float *)w->data + row * cols + first;
        for (; k + 16 <= n; k += 16)
            v16_store(dst + k, v16_load(p + k));
        if (k < n)
            v16_store(dst + k, v16_load_part(p + k, n - k));
        break;
    }
    case KN_BF16: {
        const uint16_t *p = (const uint16_t *)w->data + row * cols + first;
        for (; k + 16 <= n; k += 16)
            v16_store(dst + k, v16_bf16(p + k));
        if (k < n) {
            uint16_t tail[16] = {0};
            memcpy(tail, p + k, (n - k) * sizeof *tail);
            v16_store(dst + k, v16_bf16(tail));
        }
        break;
    }
    case KN_MXFP8: {
        if (w->tiles) {
            decode_packed(dst, w, row, first, last);
            break;
        }
        const uint8_t *p = (const uint8_t *)w->data + row * cols + first;
        const uint8_t *s = (const uint8_t *)w->scale + row * (cols / 32) + first / 32;
        for (; k < n; k += 32) {
            if (k % 512 == 0)
                scales_e8m0_256(scale, s + k / 32, (n - k) / 32);
            const v16 f = v16_set1(scale[k / 32 % 16]);
            v16 a, b;
            v16_e4m3_256th_pair(&a, &b, p + k);
            v16_store(dst + k, v16_mul(a, f));
            v16_store(dst + k + 16, v16_mul(b, f));
        }
        break;
    }
    case KN_NVFP4: {
        const uint8_t *p = (const uint8_t *)w->data + row * (cols / 2) + first / 2;
        const uint8_t *s = (const uint8_t *)w->scale + row * (cols / 16) + first / 16;
        for (; k < n; k += 16) {
            if (k % 256 == 0)
                scales_e4m3(scale, s + k / 16, (n - k) / 16, 256.0f);
            v16_store(dst + k, v16_mul(v16_pick(i16_nibbles(p + k / 2), e2m1_table),
                                       v16_set1(scale[k / 16 % 16])));
        }
        break;
    }
    }
}

/* ---- endings ---- */

typedef struct sink {
    float *y; /* output o of row r at y[r * stride + o] */
    size_t stride;
    const kn_weight *w;
    bool add;
} sink;

INLINE void put(const sink *s, size_t row, uint32_t out, float sum)
{
    float *at = s->y + row * s->stride + out;
    *at = s->add ? *at + sum : sum;
}

INLINE void put4(const sink *s, size_t row, uint32_t out, __m128 sum)
{
    float *at = s->y + row * s->stride + out;
    if (s->add)
        sum = _mm_add_ps(_mm_loadu_ps(at), sum);
    _mm_storeu_ps(at, sum);
}

/* Sums of rows x outs accumulators (row by row); only the first `live_rows` and `live_outs` are
 * wanted. */
INLINE void finish(const sink *s, const v16 *acc, const int rows, const int outs, size_t row,
                   uint32_t out, uint32_t live_rows, uint32_t live_outs)
{
    if (rows == 4 && outs == 4 && live_outs >= 4) {
        __m128 sum[4];
        v16_sum4x4(sum, acc);
        for (uint32_t r = 0; r < live_rows; r++)
            put4(s, row + r, out, sum[r]);
        return;
    }
    float sum[64];
    const int count = rows * outs;
    UNROLL for (int i = 0; i < count; i += 4)
    {
        const int top = count - 1;
        _mm_storeu_ps(sum + i,
                      v16_sum4(acc[i], acc[i + 1 < top ? i + 1 : top],
                               acc[i + 2 < top ? i + 2 : top], acc[i + 3 < top ? i + 3 : top]));
    }
    for (uint32_t r = 0; r < live_rows; r++)
        for (uint32_t o = 0; o < live_outs; o++)
            put(s, row + r, out + o, sum[r * (uint32_t)outs + o]);
}

/* ---- few rows ---- */

/* acc[r * N + n] += the lanes of x[r] and row o[n]. type, R and N are constants of the caller. */
INLINE void few_lanes(const kn_type type, const int R, const int N, v16 *acc, const float *const *x,
                      const kn_weight *w, const uint32_t *o)
{
    const size_t cols = w->cols;
    size_t k = 0;
    switch (type) {
    case KN_F32: {
        const float *p[8];
        UNROLL for (int n = 0; n < N; n++) p[n] = (const float *)w->data + o[n] * cols;
        for (; k + 16 <= cols; k += 16) {
            v16 a[8];
            UNROLL for (int n = 0; n < N; n++) a[n] = v16_load(p[n] + k);
            UNROLL for (int r = 0; r < R; r++)
            {
                const v16 b = v16_load(x[r] + k);
                UNROLL for (int n = 0; n < N; n++) acc[r * N + n] =
                    v16_fma(b, a[n], acc[r * N + n]);
            }
        }
        if (k < cols) {
            UNROLL for (int r = 0; r < R; r++)
            {
                const v16 b = v16_load_part(x[r] + k, cols - k);
                UNROLL for (int n = 0; n < N; n++) acc[r * N + n] =
                    v16_fma(b, v16_load_part(p[n] + k, cols - k), acc[r * N + n]);
            }
        }
        break;
    }
    case KN_BF16: {
        const uint16_t *p[8];
        UNROLL for (int n = 0; n < N; n++) p[n] = (const uint16_t *)w->data + o[n] * cols;
        for (; k + 16 <= cols; k += 16) {
            v16 a[8];
            UNROLL for (int n = 0; n < N; n++) a[n] = v16_bf16(p[n] + k);
            UNROLL for (int r = 0; r < R; r++)
            {
                const v16 b = v16_load(x[r] + k);
                UNROLL for (int n = 0; n < N; n++) acc[r * N + n] =
                    v16_fma(b, a[n], acc[r * N + n]);
            }
        }
        if (k < cols) {
            v16 a[8];
            for (int n = 0; n < N; n++) {
                uint16_t tail[16] = {0};
                memcpy(tail, p[n] + k, (cols - k) * sizeof *tail);
                a[n] = v16_bf16(tail);
            }
            UNROLL for (int r = 0; r < R; r++)
            {
                const v16 b = v16_load_part(x[r] + k, cols - k);
                UNROLL for (int n = 0; n < N; n++) acc[r * N + n] =
                    v16_fma(b, a[n], acc[r * N + n]);
            }
        }
        break;
    }
    case KN_MXFP8: {
        const uint8_t *p[8], *s[8];
        float scale[8][16];
        UNROLL for (int n = 0; n < N; n++)
        {
            p[n] = (const uint8_t *)w->data + o[n] * cols;
            s[n] = (const uint8_t *)w->scale + o[n] * (cols / 32);
        }
        while (k < cols) {
            const size_t groups = cols - k < 512 ? (cols - k) / 32 : 16;
            UNROLL for (int n = 0; n < N; n++) scales_e8m0_256(scale[n], s[n] + k / 32, groups);
            for (size_t g = 0; g < groups; g++, k += 32) {
                v16 a[8], b[8];
                UNROLL for (int n = 0; n < N; n++)
                {
                    const v16 f = v16_set1(scale[n][g]);
                    v16_e4m3_256th_pair(&a[n], &b[n], p[n] + k);
                    a[n] = v16_mul(a[n], f);
                    b[n] = v16_mul(b[n], f);
                }
                UNROLL for (int r = 0; r < R; r++)
                {
                    const v16 xa = v16_load(x[r] + k);
                    const v16 xb = v16_load(x[r] + k + 16);
                    UNROLL for (int n = 0; n < N; n++) acc[r * N + n] =
                        v16_fma(xb, b[n], v16_fma(xa, a[n], acc[r * N + n]));
                }
            }
        }
        break;
    }
    case KN_NVFP4:
        break; /* never here: nvfp4.c */
    }
}

INLINE void few_rows(const kn_type type, const int R, const int N, const sink *s,
                     const float *const *x, uint32_t first, uint32_t last)
{
    for (uint32_t o = first; o < last; o += (uint32_t)N) {
        uint32_t outs[8];
        v16 acc[32];
        UNROLL for (int n = 0; n < N; n++) outs[n] = min_u32(o + (uint32_t)n, last - 1);
        UNROLL for (int i = 0; i < R * N; i++) acc[i] = v16_zero();
        few_lanes(type, R, N, acc, x, s->w, outs);
        finish(s, acc, R, N, 0, o - first, (uint32_t)R, min_u32((uint32_t)N, last - o));
    }
}

/* One function a weight type keeps each of them within the compiler's patience. */
#define FEW(name, type)                                                                            \
    static void name(const sink *s, const float *const *x, uint32_t rows, uint32_t first,          \
                     uint32_t last)                                                                \
    {                                                                                              \
        switch (rows) {                                                                            \
            FEW_CASES(type)                                                                        \
        default:                                                                                   \
            CHECK(false);                                                                          \
        }                                                                                          \
    }

#define FEW_CASE(type, R, N)                                                                       \
    case R:                                                                                        \
        few_rows(type, R, N, s, x, first, last);                                                   \
        break;

#ifdef KN_VARIANT_AVX512
#define FEW_CASES(type)                                                                            \
    FEW_CASE(type, 1, 8)                                                                           \
    FEW_CASE(type, 2, 4)                                                                           \
    FEW_CASE(type, 3, 4)                                                                           \
    FEW_CASE(type, 4, 4)                                                                           \
    FEW_CASE(type, 5, 4)                                                                           \
    FEW_CASE(type, 6, 4)                                                                           \
    FEW_CASE(type, 7, 2)                                                                           \
    FEW_CASE(type, 8, 2)
#else
#define FEW_CASES(type)                                                                            \
    FEW_CASE(type, 1, 4)                                                                           \
    FEW_CASE(type, 2, 2)                                                                           \
    FEW_CASE(type, 3, 1)                                                                           \
    FEW_CASE(type, 4, 1)
#endif

FEW(few_f32, KN_F32)
FEW(few_bf16, KN_BF16)
FEW(few_mxfp8, KN_MXFP8)

/* ---- many rows ---- */

INLINE void wide_lanes(v16 *acc, const float *const *x, const float *tile, size_t tile_stride,
                       uint32_t cols)
{
    uint32_t k = 0;
    for (; k + 16 <= cols; k += 16) {
        v16 a[WIDE_N];
        UNROLL for (int n = 0; n < WIDE_N; n++) a[n] = v16_load(tile + (size_t)n * tile_stride + k);
        UNROLL for (int m = 0; m < WIDE_M; m++)
        {
            const v16 b = v16_load(x[m] + k);
            UNROLL for (int n = 0; n < WIDE_N; n++) acc[m * WIDE_N + n] =
                v16_fma(b, a[n], acc[m * WIDE_N + n]);
        }
    }
    if (k < cols) {
        UNROLL for (int m = 0; m < WIDE_M; m++)
        {
            const v16 b = v16_load_part(x[m] + k, cols - k);
            UNROLL for (int n = 0; n < WIDE_N; n++) acc[m * WIDE_N + n] =
                v16_fma(b, v16_load(tile + (size_t)n * tile_stride + k), acc[m * WIDE_N + n]);
        }
    }
}

/* One tile x one panel x `rows` rows from `row` on. first_panel and last_panel: where accumulators
 * begin and end. */
static void wide_panel(const sink *s, const float *x, size_t x_stride, const uint32_t *index,
                       uint32_t row, uint32_t rows, const float *tile, size_t tile_stride,
                       uint32_t out, uint32_t outs, uint32_t k0, uint32_t cols, float *waiting,
                       bool first_panel, bool last_panel)
{
    for (uint32_t r = 0; r < rows; r += WIDE_M) {
        const float *xr[WIDE_M];
        UNROLL for (uint32_t m = 0; m < WIDE_M; m++)
        {
            const uint32_t at = row + min_u32(r + m, rows - 1);
            xr[m] = x + (index ? index[at] : at) * x_stride + k0;
        }
        for (uint32_t n = 0; n < outs; n += WIDE_N) {
            v16 acc[WIDE_M * WIDE_N];
            float *hold = waiting + ((size_t)r * CPU_TILE_OUTS + n * WIDE_M) * 16;
            if (first_panel) {
                UNROLL for (int i = 0; i < WIDE_M * WIDE_N; i++) acc[i] = v16_zero();
            } else {
                UNROLL for (int i = 0; i < WIDE_M * WIDE_N; i++) acc[i] = v16_load(hold + i * 16);
            }
            wide_lanes(acc, xr, tile + n * tile_stride, tile_stride, cols);
            if (last_panel) {
                finish(s, acc, WIDE_M, WIDE_N, row + r, out + n, min_u32(WIDE_M, rows - r),
                       min_u32(WIDE_N, outs - n));
            } else {
                UNROLL for (int i = 0; i < WIDE_M * WIDE_N; i++) v16_store(hold + i * 16, acc[i]);
            }
        }
    }
}

static void wide_rows(const cpu_thread *t, const sink *s, const float *x, size_t x_stride,
                      const uint32_t *index, uint32_t rows, uint32_t first, uint32_t last)
{
    const uint32_t cols = s->w->cols;
    const uint32_t padded = (cols + 15) & ~15u;
    const bool one = padded <= 2 * CPU_PANEL_COLS;
    const uint32_t panel = one ? padded : CPU_PANEL_COLS;
    uint32_t step = (TILE_BYTES / (uint32_t)sizeof(float) / panel) & ~3u;
    step = step < CPU_TILE_MIN ? CPU_TILE_MIN : step > CPU_TILE_OUTS ? CPU_TILE_OUTS : step;
    const uint32_t rows_step = one ? rows : CPU_PANEL_ROWS;
    for (uint32_t o = first; o < last; o += step) {
        const uint32_t outs = min_u32(step, last - o);
        for (uint32_t r = 0; r < rows; r += rows_step) {
            for (uint32_t k = 0; k < cols; k += panel) {
                const uint32_t end = min_u32(k + panel, cols);
                for (uint32_t n = 0; n < ((outs + 3) & ~3u); n++)
                    cpu_decode_row(t->tile + (size_t)n * panel, s->w, o + min_u32(n, outs - 1), k,
                                   end);
                wide_panel(s, x, x_stride, index, r, min_u32(rows_step, rows - r), t->tile, panel,
                           o - first, outs, k, end - k, t->waiting, k == 0, end == cols);
            }
        }
    }
}

void cpu_matmul(cpu_device *d, uint32_t thread, float *y, size_t y_stride, const cpu_in *in,
                uint32_t rows, const kn_weight *w, uint32_t first, uint32_t last, bool add)
{
    const cpu_thread *t = &d->threads[thread];
    const sink s = {.y = y, .stride = y_stride, .w = w, .add = add};
    if (rows == 0)
        return;
    if (w->type == KN_NVFP4) {
        cpu_nvfp4_product(t, y, y_stride, in, rows, w, first, last, add);
        return;
    }
    if (rows > CPU_FEW_ROWS) {
        wide_rows(t, &s, in->x, in->stride, in->index, rows, first, last);
        return;
    }
    const float *xr[CPU_FEW_ROWS];
    for (uint32_t r = 0; r < rows; r++)
        xr[r] = in->x + (in->index ? in->index[r] : r) * in->stride;
    if (w->type == KN_F32)
        few_f32(&s, xr, rows, first, last);
    else if (w->type == KN_BF16)
        few_bf16(&s, xr, rows, first, last);
    else if (w->tiles)
        cpu_mxfp8_few(t, y, y_stride, xr, rows, w, first, last, add);
    else
        few_mxfp8(&s, xr, rows, first, last);
}

uint32_t cpu_piece_outs(const cpu_device *d, uint32_t rows, uint32_t cols, uint32_t outs,
                        uint32_t outs_max)
{
    uint32_t piece = CPU_TILE_OUTS;
    if ((uint64_t)rows * cols * outs <= SMALL_PRODUCT)
        piece = outs;
    else if (rows <= CPU_FEW_ROWS)
        piece = FEW_WEIGHTS / cols;
    piece = min_u32((piece + BAND_OUTS - 1) & ~(BAND_OUTS - 1u), outs_max & ~(BAND_OUTS - 1u));
    return piece < BAND_OUTS ? BAND_OUTS : piece;
}

/* ---- the operation ---- */

typedef struct linear_job {
    cpu_device *d;
    float *y;
    cpu_in in;
    const kn_weight *w;
    uint32_t rows, outs;
    bool add;
} linear_job;

static void linear_piece(void *ctx, uint32_t piece, uint32_t thread)
{
    const linear_job *job = ctx;
    const uint32_t first = piece * job->outs;
    cpu_matmul(job->d, thread, job->y + first, job->w->rows, &job->in, job->rows, job->w, first,
               min_u32(first + job->outs, job->w->rows), job->add);
}

static void linear_rows(cpu_device *d, float *y, const float *x, const kn_weight *w, uint32_t rows,
                        bool add)
{
    linear_job job = {.d = d, .y = y, .w = w, .rows = rows, .add = add};
    job.in = (cpu_in){.x = x, .stride = w->cols};
    if (w->type == KN_NVFP4)
        cpu_quantize(d, &job.in, 0, rows, w->cols);
    job.outs = cpu_piece_outs(d, rows, w->cols, w->rows, UINT32_MAX);
    kn_pool_run(d->base.pool, linear_piece, &job, ceil_div(w->rows, job.outs));
}

void cpu_linear(kn_device *device, float *y, const float *x, const kn_weight *w, uint32_t rows,
                bool add)
{
    cpu_device *d = cpu_of(device);
    /* A 64-byte load that crosses a line costs two; with many rows that halves the speed. */
    if (rows > 2 && ((uintptr_t)x & 63) && w->cols <= d->width_max && rows <= d->rows_max) {
        memcpy(d->normed, x, (size_t)rows * w->cols * sizeof *x);
        x = d->normed;
    }
    /* As many rows at a time as their quantised form has room for. */
    uint32_t pass = rows;
    if (w->type == KN_NVFP4)
        pass = (uint32_t)(d->quant_bytes[0] / cpu_quant_row(w->cols));
    CHECK(pass > 0 || rows == 0);
    for (uint32_t r = 0; r < rows; r += pass)
        linear_rows(d, y + (size_t)r * w->rows, x + (size_t)r * w->cols, w, min_u32(pass, rows - r),
                    add);
}

void cpu_head(kn_device *device, float *logits, const float *x, const float *norm,
              const kn_weight *head, const uint32_t *pick, uint32_t picks, uint32_t hidden,
              float eps)
{
    cpu_device *d = cpu_of(device);
    CHECK(picks <= d->rows_max && hidden <= d->width_max && hidden == head->cols);
    cpu_norm_rows(d, d->normed, x, norm, pick, picks, hidden, eps);
    cpu_linear(device, logits, d->normed, head, picks, false);
}
