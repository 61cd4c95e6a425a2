/* cpu/mxfp8: packed MXFP8 matrices and few rows, in the float lanes of ops.h.
 *
 * A band of tiles.h is walked block by block, or a few blocks at a time; the sums of its 32 outputs
 * wait in scratch while these inputs are at hand. A code becomes a float by two look-ups and a byte
 * shuffle for four registers of sixteen, times its block's scale: some 20 instructions for 64
 * weights. */
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/variant.h"

#define AHEAD 4096    /* bytes between what is used and what is asked for */
#define STREAM_ROWS 2 /* up to here the weights' bytes are the bound: block after block */
#define BLOCKS_MAX 2  /* above, sums stay in registers for so many blocks; 8 rows of x: 16 KB */

/* One tile in up to BLOCKS_MAX blocks of columns. */
typedef struct piece {
    const uint8_t *code[BLOCKS_MAX];
    float scale[BLOCKS_MAX][TILE_OUTS][8]; /* 256ths */
    uint32_t cols;                         /* of all its blocks */
} piece;

/* sum[r][n] += the lanes of R rows from x[r] on and N outputs from number `first` of the tile on. R
 * and N are constants of the caller. What is loaded of x serves N products, what is decoded R. */
INLINE void tile_lanes(const int R, const int N, float *sum, const piece *p, int first,
                       const float *const *x)
{
    v16 acc[32];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) acc[r * N + n] =
        v16_load(sum + ((size_t)r * BAND_OUTS + n) * 16);
    for (uint32_t b = 0, at = 0; at < p->cols; b++, at += MXFP8_COLS) {
        const uint8_t *code = p->code[b] + first * 64;
        const float(*scale)[8] = &p->scale[b][first];
        const uint32_t cols = min_u32(MXFP8_COLS, p->cols - at);
        uint32_t k = 0;
        for (; k + 64 <= cols; k += 64, code += TILE_OUTS * 64) {
            v16 w[8][4];
            UNROLL for (int n = 0; n < N; n++)
            {
                _mm_prefetch((const char *)code + AHEAD + n * 64, _MM_HINT_T0);
                v16_e4m3_256th_four(w[n], code + n * 64);
                const v16 low = v16_set1(scale[n][k / 32]);
                const v16 high = v16_set1(scale[n][k / 32 + 1]);
                UNROLL for (int i = 0; i < 4; i++) w[n][i] = v16_mul(w[n][i], i < 2 ? low : high);
            }
            UNROLL for (int i = 0; i < 4; i++) UNROLL for (int r = 0; r < R; r++)
            {
                const v16 a = v16_load(x[r] + at + k + i * 16);
                UNROLL for (int n = 0; n < N; n++) acc[r * N + n] =
                    v16_fma(a, w[n][i], acc[r * N + n]);
            }
        }
        if (k < cols) {
            UNROLL for (int n = 0; n < N; n++)
            {
                v16 w[2];
                v16_e4m3_256th_pair(&w[0], &w[1], code + n * 64);
                const v16 f = v16_set1(scale[n][k / 32]);
                UNROLL for (int i = 0; i < 2; i++) UNROLL for (int r = 0; r < R; r++)
                    acc[r * N + n] =
                        v16_fma(v16_load(x[r] + at + k + i * 16), v16_mul(w[i], f), acc[r * N + n]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++)
        v16_store(sum + ((size_t)r * BAND_OUTS + n) * 16, acc[r * N + n]);
}

/* One tile, N outputs at a time. */
#define TILE(R, N)                                                                                 \
    case R:                                                                                        \
        for (int n = 0; n < TILE_OUTS; n += N)                                                     \
            tile_lanes(R, N, sum + n * 16, p, n, x);                                               \
        break;

static void tile_product(float *sum, const piece *p, const float *const *x, uint32_t rows)
{
    switch (rows) {
#ifdef KN_VARIANT_AVX512
        TILE(1, 4)
        TILE(2, 4)
        TILE(3, 4)
        TILE(4, 4)
        TILE(5, 2)
        TILE(6, 2)
        TILE(7, 1)
        TILE(8, 1)
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

/* Points the piece at the tile of outputs [8i, 8i + 8) in the blocks from `block`, which begins at
 * column k, on. */
static void take_tile(piece *p, const uint8_t *block, const kn_weight *w, uint32_t k, uint32_t i)
{
    for (uint32_t b = 0; b * MXFP8_COLS < p->cols; b++) {
        const uint32_t padded = tile_mxfp8_cols(w->cols, k + b * MXFP8_COLS);
        const uint8_t *tile = block + (size_t)b * BAND_TILES * MXFP8_TILE_BYTES +
                              (size_t)i * (TILE_OUTS * padded + 64);
        p->code[b] = tile;
        for (uint32_t s = 0; s < TILE_OUTS; s += 2)
            scales_e8m0_256(p->scale[b][s], tile + TILE_OUTS * padded + s * 8, 16);
        _mm_prefetch((const char *)tile + TILE_OUTS * padded + AHEAD, _MM_HINT_T0);
    }
}

void cpu_mxfp8_few(const cpu_thread *t, float *y, size_t y_stride, const float *const *x,
                   uint32_t rows, const kn_weight *w, uint32_t first, uint32_t last, bool add)
{
    const size_t band_bytes = tile_band_bytes(w);
    const uint32_t step = (rows <= STREAM_ROWS ? 1 : BLOCKS_MAX) * MXFP8_COLS;
    float *sum = t->waiting; /* [rows][32 outputs][16] */
    CHECK(first % BAND_OUTS == 0 && rows <= CPU_FEW_ROWS);
    for (uint32_t band = first; band < last; band += BAND_OUTS) {
        const uint8_t *block = (const uint8_t *)w->tiles + band / BAND_OUTS * band_bytes;
        const uint32_t outs = min_u32(BAND_OUTS, last - band);
        memset(sum, 0, (size_t)rows * BAND_OUTS * 16 * sizeof *sum);
        for (uint32_t k = 0; k < w->cols;
             k += step, block += (size_t)step / MXFP8_COLS * BAND_TILES * MXFP8_TILE_BYTES) {
            const float *at[CPU_FEW_ROWS];
            piece p = {.cols = min_u32(step, w->cols - k)};
            for (uint32_t r = 0; r < rows; r++)
                at[r] = x[r] + k;
            for (uint32_t i = 0; i * TILE_OUTS < outs; i++) {
                take_tile(&p, block, w, k, i);
                tile_product(sum + i * TILE_OUTS * 16, &p, at, rows);
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
