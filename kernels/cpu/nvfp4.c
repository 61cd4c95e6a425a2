/* cpu/nvfp4: products with NVFP4 matrices, in the integer form of ops.h, for any number of rows.
 *
 * x becomes 24-bit integers in three signed bytes (q = 65536 a + 256 b + c), whose products with
 * the codes are exact in 32 bits whatever their order. A code is looked up as 2 * value + 12, so
 * that the byte product takes it as the unsigned side; 12 times the group's sum of q goes off at
 * the end. Eight lanes are eight groups of 16 columns: one output in 256 bits, two in 512, a tile
 * of tiles.h in four 512-bit sums. The tile is decoded once for all rows of a pass; the rows' sums
 * wait in scratch between blocks.
 *
 * Per tile of 1,024 weights and row: 48 byte products, 2 a cycle, against 64 multiply-adds of the
 * float form, for which each code had to be decoded to four bytes. */
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/variant.h"

#define PASS_ROWS 16 /* their sums (16 KB) and one block of their inputs (7 KB) stay at hand */
#define SUMS (TILE_OUTS * 8) /* floats a row and tile */
#define AHEAD 8192 /* bytes between what is used and what is asked for; 4 and 16 KiB do as well */
#define TINY_EXPONENT (127 - 90)

_Static_assert(PASS_ROWS *BAND_TILES *SUMS <= CPU_PANEL_ROWS * CPU_TILE_OUTS * 16,
               "the sums lie in cpu_thread.waiting");

/* A block of 128 quantised inputs: three planes of [4 steps][8 groups][4], step s of group g being
 * columns 16g + 4s …; then 12 * sum of q, then the factor of each group. */
typedef struct quant_block {
    int8_t plane[3][4][32];
    int32_t offset[8];
    float factor[8]; /* 2^(e-22) * 256: scales are looked up as 256ths */
} quant_block;

_Static_assert(sizeof(quant_block) == CPU_QUANT_BYTES, "device.h sizes the scratch by it");

/* ---- inputs ---- */

static void quantize_group(quant_block *b, uint32_t g, v16 x)
{
    const i16 magnitude = i16_and(v16_bits(x), i16_set1(0x7fffffff));
    const uint32_t exponent = (uint32_t)i16_hmax(magnitude) >> 23;
    const bool bad = exponent == 255;
    uint32_t bits = 0;
    i16 q = i16_set1(0);
    b->factor[g] = bad ? NAN : 0.0f;
    if (!bad && exponent >= TINY_EXPONENT) {
        float up;
        bits = (275 - exponent) << 23; /* 2^(21-e) */
        memcpy(&up, &bits, sizeof up);
        q = v16_to_int(v16_mul(x, v16_set1(up)));
        bits = (exponent - 14) << 23;
        memcpy(&b->factor[g], &bits, sizeof bits);
    }
    b->offset[g] = 12 * i16_sum(q);
    /* Digits in [-128, 127]: those of q + 0x808080, each less 128. */
    const i16 t = i16_add(q, i16_set1(0x808080));
    const __m128i flip = _mm_set1_epi8((char)0x80);
    const __m128i digits[3] = {i16_low_bytes(i16_and(i16_shr(t, 16), i16_set1(255))),
                               i16_low_bytes(i16_and(i16_shr(t, 8), i16_set1(255))),
                               i16_low_bytes(i16_and(t, i16_set1(255)))};
    UNROLL for (int p = 0; p < 3; p++)
    {
        uint32_t words[4];
        _mm_storeu_si128((__m128i *)words, _mm_xor_si128(digits[p], flip));
        UNROLL for (int s = 0; s < 4; s++) memcpy(&b->plane[p][s][4 * g], &words[s], 4);
    }
}

void cpu_quantize_row(uint8_t *dst, const float *x, uint32_t cols)
{
    for (uint32_t k = 0; k < cols; k += NVFP4_COLS, dst += sizeof(quant_block))
        for (uint32_t g = 0; g < 8; g++) {
            const uint32_t at = k + 16 * g;
            quantize_group((quant_block *)dst, g, at < cols ? v16_load(x + at) : v16_zero());
        }
}

typedef struct quant_job {
    uint8_t *dst;
    const float *x;
    size_t dst_stride, x_stride;
    uint32_t rows, cols;
} quant_job;

static void quantize_piece(void *ctx, uint32_t piece, uint32_t thread)
{
    const quant_job *job = ctx;
    const uint32_t last = min_u32(job->rows, (piece + 1) * CPU_FEW_ROWS);
    for (uint32_t r = piece * CPU_FEW_ROWS; r < last; r++)
        cpu_quantize_row(job->dst + r * job->dst_stride, job->x + r * job->x_stride, job->cols);
}

void cpu_quantize(cpu_device *d, cpu_in *in, int which, uint32_t rows, uint32_t cols)
{
    in->q_stride = cpu_quant_row(cols);
    in->q = d->quant[which];
    CHECK(rows * in->q_stride <= d->quant_bytes[which]);
    quant_job job = {.dst = d->quant[which],
                     .x = in->x,
                     .dst_stride = in->q_stride,
                     .x_stride = in->stride,
                     .rows = rows,
                     .cols = cols};
    kn_pool_run(d->base.pool, quantize_piece, &job, ceil_div(rows, CPU_FEW_ROWS));
}

/* ---- tiles ---- */

static const uint8_t code_table[64] __attribute__((aligned(64))) = {
    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, /* four times: the look-up of 64 */
    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, /* takes two bits of a neighbour */
    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, /* along and so needs no mask */
    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

#ifdef KN_VARIANT_AVX512

#define BOTH(p) _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i *)(p)))

/* sum[r][i] of R rows and P output pairs from codes w[i][step] and scales (256ths) scale[i]. The
 * three digits have sums of their own: one chain of twelve products would wait for its latency. */
INLINE void tile_rows(const int R, const int P, float *sum, const __m512i *w, const __m512 *scale,
                      const quant_block *const *x)
{
    __m512i c[3][4];
    UNROLL for (int p = 0; p < 3; p++) UNROLL for (int i = 0; i < R * P; i++) c[p][i] =
        _mm512_setzero_si512();
    UNROLL for (int s = 0; s < 4; s++) UNROLL for (int p = 0; p < 3; p++)
        UNROLL for (int r = 0; r < R; r++)
    {
        const __m512i a = BOTH(x[r]->plane[p][s]);
        UNROLL for (int i = 0; i < P; i++) c[p][r * P + i] =
            _mm512_dpbusd_epi32(c[p][r * P + i], w[i * 4 + s], a);
    }
    UNROLL for (int r = 0; r < R; r++)
    {
        const __m512i offset = BOTH(x[r]->offset);
        const __m512 factor = _mm512_castsi512_ps(BOTH(x[r]->factor));
        UNROLL for (int i = 0; i < P; i++)
        {
            const __m512i high =
                _mm512_add_epi32(_mm512_slli_epi32(c[0][r * P + i], 8), c[1][r * P + i]);
            const __m512i all = _mm512_add_epi32(_mm512_slli_epi32(high, 8),
                                                 _mm512_sub_epi32(c[2][r * P + i], offset));
            float *at = sum + (size_t)r * SUMS + i * 16;
            _mm512_storeu_ps(at,
                             _mm512_fmadd_ps(_mm512_cvtepi32_ps(all),
                                             _mm512_mul_ps(scale[i], factor), _mm512_loadu_ps(at)));
        }
    }
}

/* One tile x `rows` rows; x[r] is their block. */
static void tile_product(float *sum, const uint8_t *tile, const quant_block *const *x,
                         uint32_t rows)
{
    const __m512i table = _mm512_load_si512(code_table);
    __m512i w[16];
    __m512 scale[4];
    UNROLL for (int i = 0; i < 4; i++)
    {
        const __m512i low = _mm512_loadu_si512(tile + i * 128);
        const __m512i high = _mm512_loadu_si512(tile + i * 128 + 64);
        _mm_prefetch((const char *)tile + AHEAD + i * 128, _MM_HINT_T0);
        _mm_prefetch((const char *)tile + AHEAD + i * 128 + 64, _MM_HINT_T0);
        w[i * 4] = _mm512_permutexvar_epi8(low, table);
        w[i * 4 + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(low, 4), table);
        w[i * 4 + 2] = _mm512_permutexvar_epi8(high, table);
        w[i * 4 + 3] = _mm512_permutexvar_epi8(_mm512_srli_epi16(high, 4), table);
        scale[i] = v16_e4m3_256th(_mm_loadu_si128((const __m128i *)(tile + 512 + i * 16)));
    }
    _mm_prefetch((const char *)tile + AHEAD + 512, _MM_HINT_T0);
    if (rows == 1) {
        tile_rows(1, 4, sum, w, scale, x);
        return;
    }
    UNROLL for (int half = 0; half < 2; half++)
    {
        uint32_t r = 0;
        for (; r + 2 <= rows; r += 2)
            tile_rows(2, 2, sum + (size_t)r * SUMS + half * 32, w + half * 8, scale + half * 2,
                      x + r);
        if (r < rows)
            tile_rows(1, 2, sum + (size_t)r * SUMS + half * 32, w + half * 8, scale + half * 2,
                      x + r);
    }
}

#else

/* Digit p of one row's block with one output's codes: eight sums. A byte product pair is at most 2
 * * 24 * 128 and four of them stay within 16 bits. */
INLINE __m256i digit_sums(const __m256i w[4], const int8_t plane[4][32])
{
    __m256i pairs = _mm256_setzero_si256();
    UNROLL for (int s = 0; s < 4; s++) pairs = _mm256_add_epi16(
        pairs, _mm256_maddubs_epi16(w[s], _mm256_loadu_si256((const __m256i *)plane[s])));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

static void tile_product(float *sum, const uint8_t *tile, const quant_block *const *x,
                         uint32_t rows)
{
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)code_table));
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int n = 0; n < TILE_OUTS; n++) {
        const uint8_t *part = tile + n / 2 * 128 + n % 2 * 32;
        __m256i w[4];
        float scale[16];
        UNROLL for (int h = 0; h < 2; h++)
        {
            const __m256i both = _mm256_loadu_si256((const __m256i *)(part + h * 64));
            w[2 * h] = _mm256_shuffle_epi8(table, _mm256_and_si256(both, nibble));
            w[2 * h + 1] =
                _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble));
        }
        v16_store(scale, v16_e4m3_256th(_mm_loadl_epi64((const __m128i *)(tile + 512 + n * 8))));
        _mm_prefetch((const char *)tile + AHEAD + n * 64, _MM_HINT_T0);
        for (uint32_t r = 0; r < rows; r++) {
            const __m256i high = _mm256_add_epi32(
                _mm256_slli_epi32(digit_sums(w, x[r]->plane[0]), 8), digit_sums(w, x[r]->plane[1]));
            const __m256i low = _mm256_sub_epi32(digit_sums(w, x[r]->plane[2]),
                                                 _mm256_loadu_si256((const __m256i *)x[r]->offset));
            const __m256i all = _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
            float *at = sum + (size_t)r * SUMS + n * 8;
            _mm256_storeu_ps(at, _mm256_fmadd_ps(_mm256_cvtepi32_ps(all),
                                                 _mm256_mul_ps(_mm256_loadu_ps(scale),
                                                               _mm256_loadu_ps(x[r]->factor)),
                                                 _mm256_loadu_ps(at)));
        }
    }
    _mm_prefetch((const char *)tile + AHEAD + 512, _MM_HINT_T0);
}

#endif

/* Four outputs' eight lanes each, summed by the tree of ops.h. */
INLINE __m128 sum8x4(const float *sum)
{
    __m128 h4[4];
    UNROLL for (int i = 0; i < 4; i++) h4[i] =
        _mm_add_ps(_mm_loadu_ps(sum + i * 8), _mm_loadu_ps(sum + i * 8 + 4));
    const __m128 ab =
        _mm_add_ps(_mm_shuffle_ps(h4[0], h4[1], 0x44), _mm_shuffle_ps(h4[0], h4[1], 0xee));
    const __m128 cd =
        _mm_add_ps(_mm_shuffle_ps(h4[2], h4[3], 0x44), _mm_shuffle_ps(h4[2], h4[3], 0xee));
    return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
}

static void put_outputs(float *y, const float *sum, const kn_weight *w, uint32_t outs, bool add)
{
    for (uint32_t n = 0; n < outs; n += 4) {
        float value[4];
        _mm_storeu_ps(value, _mm_div_ps(sum8x4(sum + n * 8), _mm_set1_ps(w->scale_global)));
        for (uint32_t i = 0; i < min_u32(4, outs - n); i++)
            y[n + i] = add ? y[n + i] + value[i] : value[i];
    }
}

void cpu_nvfp4_product(const cpu_thread *t, float *y, size_t y_stride, const cpu_in *in,
                       uint32_t rows, const kn_weight *w, uint32_t first, uint32_t last, bool add)
{
    const uint32_t blocks = ceil_div(w->cols, NVFP4_COLS);
    const size_t band_bytes = tile_band_bytes(w);
    CHECK(in->q && first % BAND_OUTS == 0);
    for (uint32_t r0 = 0; r0 < rows; r0 += PASS_ROWS) {
        const uint32_t count = min_u32(PASS_ROWS, rows - r0);
        for (uint32_t band = first; band < last; band += BAND_OUTS) {
            const uint8_t *at =
                w->tiles ? (const uint8_t *)w->tiles + band / BAND_OUTS * band_bytes : NULL;
            const uint32_t tiles = ceil_div(min_u32(BAND_OUTS, last - band), TILE_OUTS);
            for (uint32_t i = 0; i < tiles; i++)
                memset(t->waiting + (size_t)i * PASS_ROWS * SUMS, 0,
                       (size_t)count * SUMS * sizeof(float));
            for (uint32_t b = 0; b < blocks; b++) {
                const quant_block *x[PASS_ROWS];
                for (uint32_t r = 0; r < count; r++)
                    x[r] = (const quant_block *)(in->q + (in->index ? in->index[r0 + r] : r0 + r) *
                                                             in->q_stride) +
                           b;
                for (uint32_t i = 0; i < tiles; i++) {
                    uint8_t made[NVFP4_TILE_BYTES];
                    const uint8_t *tile =
                        at ? at + ((size_t)b * BAND_TILES + i) * NVFP4_TILE_BYTES : made;
                    if (!at)
                        kn_tile_nvfp4(made, w, band + i * TILE_OUTS, b * NVFP4_COLS);
                    tile_product(t->waiting + (size_t)i * PASS_ROWS * SUMS, tile, x, count);
                }
            }
            for (uint32_t i = 0; i < tiles; i++)
                for (uint32_t r = 0; r < count; r++)
                    put_outputs(y + (r0 + r) * y_stride + band - first + i * TILE_OUTS,
                                t->waiting + ((size_t)i * PASS_ROWS + r) * SUMS, w,
                                min_u32(TILE_OUTS, last - band - i * TILE_OUTS), add);
        }
    }
}
