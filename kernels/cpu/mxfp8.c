/* cpu/mxfp8: packed MXFP8 matrices and few rows, in the float lanes of ops.h.
 *
 * A band of tiles.h is walked block by block; the sums of its 32 outputs wait in scratch while the
 * block's 256 inputs are at hand. A code becomes a float by two look-ups and a byte shuffle for
 * four registers of sixteen, times its block's scale: some 20 instructions for 64 weights. */
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/variant.h"

#define AHEAD 4096 /* bytes between what is used and what is asked for */

/* sum[r][n] += the lanes of R rows from x[r] on and N outputs from `code` on, over `cols` columns
 * of which the last 32 may be missing. scale: [N][8], 256ths. R and N are constants of the caller.
 */
INLINE void tile_lanes(const int R, const int N, float *sum, const uint8_t *code,
                       const float *scale, const float *const *x, uint32_t cols)
{
    v16 acc[32];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) acc[r * N + n] =
        v16_load(sum + ((size_t)r * BAND_OUTS + n) * 16);
    uint32_t k = 0;
    for (; k + 64 <= cols; k += 64, code += TILE_OUTS * 64) {
        UNROLL for (int n = 0; n < N; n++)
        {
            v16 w[4];
            _mm_prefetch((const char *)code + AHEAD + n * 64, _MM_HINT_T0);
            v16_e4m3_256th_four(w, code + n * 64);
            const v16 a = v16_set1(scale[n * 8 + k / 32]);
            const v16 b = v16_set1(scale[n * 8 + k / 32 + 1]);
            w[0] = v16_mul(w[0], a);
            w[1] = v16_mul(w[1], a);
            w[2] = v16_mul(w[2], b);
            w[3] = v16_mul(w[3], b);
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < 4; i++) acc[r * N + n] =
                v16_fma(v16_load(x[r] + k + i * 16), w[i], acc[r * N + n]);
        }
    }
    if (k < cols) {
        UNROLL for (int n = 0; n < N; n++)
        {
            v16 w[2];
            v16_e4m3_256th_pair(&w[0], &w[1], code + n * 64);
            const v16 a = v16_set1(scale[n * 8 + k / 32]);
            UNROLL for (int i = 0; i < 2; i++) w[i] = v16_mul(w[i], a);
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < 2; i++) acc[r * N + n] =
                v16_fma(v16_load(x[r] + k + i * 16), w[i], acc[r * N + n]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++)
        v16_store(sum + ((size_t)r * BAND_OUTS + n) * 16, acc[r * N + n]);
}

/* One tile, whose 64-column parts are `code`, N outputs at a time. */
#define TILE(R, N)                                                                                 \
    case R:                                                                                        \
        for (int n = 0; n < TILE_OUTS; n += N)                                                     \
            tile_lanes(R, N, sum + n * 16, code + n * 64, scale + n * 8, x, cols);                 \
        break;

static void tile_product(float *sum, const uint8_t *code, const float *scale, const float *const *x,
                         uint32_t rows, uint32_t cols)
{
    switch (rows) {
#ifdef KN_VARIANT_AVX512
        TILE(1, 8)
        TILE(2, 8)
        TILE(3, 4)
        TILE(4, 4)
        TILE(5, 4)
        TILE(6, 4)
        TILE(7, 2)
        TILE(8, 2)
#else
        TILE(1, 4)
        TILE(2, 2)
        TILE(3, 1)
        TILE(4, 1)
#endif
    default:
        CHECK(false);
    }
}

void cpu_mxfp8_few(const cpu_thread *t, float *y, size_t y_stride, const float *const *x,
                   uint32_t rows, const kn_weight *w, uint32_t first, uint32_t last, bool add)
{
    const size_t band_bytes = tile_band_bytes(w);
    float *sum = t->waiting; /* [rows][32 outputs][16] */
    CHECK(first % BAND_OUTS == 0 && rows <= CPU_FEW_ROWS);
    for (uint32_t band = first; band < last; band += BAND_OUTS) {
        const uint8_t *tile = (const uint8_t *)w->tiles + band / BAND_OUTS * band_bytes;
        const uint32_t outs = min_u32(BAND_OUTS, last - band);
        memset(sum, 0, (size_t)rows * BAND_OUTS * 16 * sizeof *sum);
        for (uint32_t k = 0; k < w->cols; k += MXFP8_COLS) {
            const uint32_t padded = tile_mxfp8_cols(w->cols, k);
            const float *at[CPU_FEW_ROWS];
            for (uint32_t r = 0; r < rows; r++)
                at[r] = x[r] + k;
            for (uint32_t i = 0; i < BAND_TILES; i++, tile += TILE_OUTS * padded + 64) {
                float scale[64];
                if (i * TILE_OUTS >= outs)
                    continue;
                for (uint32_t s = 0; s < 64; s += 16)
                    scales_e8m0_256(scale + s, tile + TILE_OUTS * padded + s, 16);
                _mm_prefetch((const char *)tile + TILE_OUTS * padded + AHEAD, _MM_HINT_T0);
                tile_product(sum + i * TILE_OUTS * 16, tile, scale, at, rows,
                             min_u32(padded, w->cols - k));
            }
        }
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t n = 0; n < outs; n += 4) {
                const float *s = sum + ((size_t)r * BAND_OUTS + n) * 16;
                float *to = y + r * y_stride + band - first + n;
                float value[4];
                _mm_storeu_ps(value, v16_sum4(v16_load(s), v16_load(s + 16), v16_load(s + 32),
                                              v16_load(s + 48)));
                for (uint32_t i = 0; i < min_u32(4, outs - n); i++)
                    to[i] = add ? to[i] + value[i] : value[i];
            }
    }
}
