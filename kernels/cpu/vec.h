/* cpu/vec: sixteen float lanes, as one 512-bit or two 256-bit registers. The lanes are those of
 * ops.h's written reductions, so code on this header gives the same bits for either width: every
 * operation here is exact or rounded once (IEEE), and the order of additions is the one of sum16.
 * Built with -ffp-contract=off: an fma is where it is written.
 *
 * Included by sources that are compiled once a variant, with KN_VARIANT_AVX2 or KN_VARIANT_AVX512.
 */
#pragma once
#include "kernels/cpu/math.h"

#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#if defined(KN_VARIANT_AVX512)
#define VN(name) name##_avx512
#elif defined(KN_VARIANT_AVX2)
#define VN(name) name##_avx2
#else
#error "build with KN_VARIANT_AVX2 or KN_VARIANT_AVX512"
#endif

#if defined(KN_VARIANT_AVX512)

typedef __m512 v16;
typedef __m512i i16; /* sixteen 32-bit integers */

INLINE v16 v16_zero(void)
{
    return _mm512_setzero_ps();
}

INLINE v16 v16_set1(float x)
{
    return _mm512_set1_ps(x);
}

INLINE v16 v16_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

INLINE void v16_store(float *p, v16 a)
{
    _mm512_storeu_ps(p, a);
}

/* The first n < 16 lanes, the others 0; nothing past them is touched. */
INLINE v16 v16_load_part(const float *p, size_t n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}

INLINE void v16_store_part(float *p, size_t n, v16 a)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a);
}

INLINE v16 v16_add(v16 a, v16 b)
{
    return _mm512_add_ps(a, b);
}

INLINE v16 v16_sub(v16 a, v16 b)
{
    return _mm512_sub_ps(a, b);
}

INLINE v16 v16_mul(v16 a, v16 b)
{
    return _mm512_mul_ps(a, b);
}

INLINE v16 v16_div(v16 a, v16 b)
{
    return _mm512_div_ps(a, b);
}

INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* b if either is NaN. */
INLINE v16 v16_max(v16 a, v16 b)
{
    return _mm512_max_ps(a, b);
}

INLINE v16 v16_min(v16 a, v16 b)
{
    return _mm512_min_ps(a, b);
}

/* a > b ? x : y, lane by lane. */
INLINE v16 v16_if_gt(v16 a, v16 b, v16 x, v16 y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}

/* a is NaN ? a : y. */
INLINE v16 v16_keep_nan(v16 a, v16 y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), y, a);
}

/* Lanes below n from a, the others from b. */
INLINE v16 v16_first(v16 a, v16 b, size_t n)
{
    return _mm512_mask_blend_ps((__mmask16)(n >= 16 ? 0xffffu : (1u << n) - 1), b, a);
}

INLINE i16 v16_bits(v16 a)
{
    return _mm512_castps_si512(a);
}

INLINE v16 i16_float(i16 a)
{
    return _mm512_castsi512_ps(a);
}

INLINE i16 i16_set1(int32_t x)
{
    return _mm512_set1_epi32(x);
}

INLINE i16 i16_add(i16 a, i16 b)
{
    return _mm512_add_epi32(a, b);
}

INLINE i16 i16_sub(i16 a, i16 b)
{
    return _mm512_sub_epi32(a, b);
}

INLINE i16 i16_and(i16 a, i16 b)
{
    return _mm512_and_si512(a, b);
}

INLINE i16 i16_or(i16 a, i16 b)
{
    return _mm512_or_si512(a, b);
}

INLINE i16 i16_max(i16 a, i16 b)
{
    return _mm512_max_epi32(a, b);
}

INLINE i16 i16_min(i16 a, i16 b)
{
    return _mm512_min_epi32(a, b);
}

INLINE i16 i16_from_bytes(__m128i a)
{
    return _mm512_cvtepu8_epi32(a);
}

/* The first n bytes, zeros after them. */
INLINE __m128i bytes_part(const uint8_t *p, size_t n)
{
    return _mm_maskz_loadu_epi8((__mmask16)(n >= 16 ? 0xffffu : (1u << n) - 1), p);
}

#define i16_shl(a, n) _mm512_slli_epi32(a, n)
#define i16_shr(a, n) _mm512_srli_epi32(a, n)
#define i16_sar(a, n) _mm512_srai_epi32(a, n)

INLINE i16 v16_to_int(v16 a)
{
    return _mm512_cvtps_epi32(a);
}

/* Lanes 0 … 15 must lie in 0 … 15: table[lane], a byte each, zero-extended. */
INLINE i16 i16_lookup(i16 a, __m128i table)
{
    return i16_and(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), a), i16_set1(0xff));
}

INLINE __m128i i16_low_bytes(i16 a)
{
    return _mm512_cvtepi32_epi8(a);
}

INLINE int32_t i16_sum(i16 a)
{
    return _mm512_reduce_add_epi32(a);
}

INLINE int32_t i16_hmax(i16 a)
{
    return _mm512_reduce_max_epi32(a);
}

/* The tree of ops.h: lane j += lane j + h for h = 8, 4, 2, 1. */
INLINE float v16_sum(v16 a)
{
    const __m256 h8 = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
    const __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
    return _mm_cvtss_f32(_mm_add_ss(h2, _mm_movehdup_ps(h2)));
}

/* Four such trees at once. */
INLINE __m128 v16_sum4(v16 a, v16 b, v16 c, v16 d)
{
    const __m512 ab =
        _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd =
        _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    const __m512 h4 =
        _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    /* 128-bit parts a, b, c, d of four lanes each; the rest of the tree works within a part. */
    const __m512 h2 = _mm512_add_ps(h4, _mm512_permute_ps(h4, 0x4e));
    const __m512 h1 = _mm512_add_ps(h2, _mm512_permute_ps(h2, 0xb1));
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), h1));
}

/* Sixteen trees: out[i] = sums of a[4i … 4i+3]. */
INLINE void v16_sum4x4(__m128 out[4], const v16 a[16])
{
    __m512 h4[4];
    UNROLL for (int i = 0; i < 4; i++)
    {
        /* Part i of the result comes from the i-th vector of each pair below. */
        const __m512 p = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[4 + i], 0x44),
                                       _mm512_shuffle_f32x4(a[i], a[4 + i], 0xee));
        const __m512 q = _mm512_add_ps(_mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x44),
                                       _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xee));
        h4[i] = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
    }
    const __m512 h2a =
        _mm512_add_ps(_mm512_shuffle_ps(h4[0], h4[1], 0x44), _mm512_shuffle_ps(h4[0], h4[1], 0xee));
    const __m512 h2b =
        _mm512_add_ps(_mm512_shuffle_ps(h4[2], h4[3], 0x44), _mm512_shuffle_ps(h4[2], h4[3], 0xee));
    const __m512 h1 =
        _mm512_add_ps(_mm512_shuffle_ps(h2a, h2b, 0x88), _mm512_shuffle_ps(h2a, h2b, 0xdd));
    out[0] = _mm512_castps512_ps128(h1);
    out[1] = _mm512_extractf32x4_ps(h1, 1);
    out[2] = _mm512_extractf32x4_ps(h1, 2);
    out[3] = _mm512_extractf32x4_ps(h1, 3);
}

INLINE float v16_hmax(v16 a)
{
    return _mm512_reduce_max_ps(a);
}

/* ---- stored codes ---- */

INLINE v16 v16_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

/* Third and fourth byte of the float that is code/256, for E4M3 codes 0 … 127 (127, a NaN code, as
 * 480/256). */
static const uint8_t kn_e4m3_bytes[2][128] __attribute__((aligned(64))) = {
    {0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0,
     0xf0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0,
     0xe0, 0xf0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0,
     0xd0, 0xe0, 0xf0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0,
     0xc0, 0xd0, 0xe0, 0xf0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0,
     0xb0, 0xc0, 0xd0, 0xe0, 0xf0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90,
     0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80,
     0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70,
     0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0},
    {0x00, 0x37, 0x37, 0x37, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38,
     0x38, 0x39, 0x39, 0x39, 0x39, 0x39, 0x39, 0x39, 0x39, 0x39, 0x39, 0x39, 0x39, 0x39, 0x39,
     0x39, 0x39, 0x3a, 0x3a, 0x3a, 0x3a, 0x3a, 0x3a, 0x3a, 0x3a, 0x3a, 0x3a, 0x3a, 0x3a, 0x3a,
     0x3a, 0x3a, 0x3a, 0x3b, 0x3b, 0x3b, 0x3b, 0x3b, 0x3b, 0x3b, 0x3b, 0x3b, 0x3b, 0x3b, 0x3b,
     0x3b, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c,
     0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d,
     0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e,
     0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f,
     0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f}};

/* Where bytes 3 and 4 of lane l come from in those of lanes 16i …; bytes 1 and 2 are masked. */
#define SPREAD1(n) 0, 0, n, 64 + (n)
#define SPREAD4(n) SPREAD1(n), SPREAD1((n) + 1), SPREAD1((n) + 2), SPREAD1((n) + 3)
#define SPREAD16(n)                                                                                \
    {                                                                                              \
        SPREAD4(n), SPREAD4((n) + 4), SPREAD4((n) + 8), SPREAD4((n) + 12)                          \
    }
static const uint8_t kn_e4m3_spread[4][64]
    __attribute__((aligned(64))) = {SPREAD16(0), SPREAD16(16), SPREAD16(32), SPREAD16(48)};
#undef SPREAD1
#undef SPREAD4
#undef SPREAD16

/* Sixteen E4M3 codes, the values divided by 256: the code's bits as a half-precision number. NaN
 * codes are not looked for and read as 480/256. */
INLINE v16 v16_e4m3_256th(__m128i codes)
{
    __m256i w = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
    w = _mm256_and_si256(_mm256_srai_epi16(w, 1), _mm256_set1_epi16((short)0xbfff));
    return _mm512_cvtph_ps(w);
}

/* The same for 32 codes. */
INLINE void v16_e4m3_256th_pair(v16 *a, v16 *b, const uint8_t *p)
{
    __m512i w = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p)), 8);
    w = _mm512_and_si512(_mm512_srai_epi16(w, 1), _mm512_set1_epi16((short)0xbfff));
    *a = _mm512_cvtph_ps(_mm512_castsi512_si256(w));
    *b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(w, 1));
}

/* The same for 64 codes, by tables of the two upper bytes of the float (the lower ones are zero).
 */
INLINE void v16_e4m3_256th_four(v16 w[4], const uint8_t *p)
{
    const __m512i code = _mm512_loadu_si512(p);
    const __m512i third = _mm512_permutex2var_epi8(_mm512_load_si512(kn_e4m3_bytes[0]), code,
                                                   _mm512_load_si512(kn_e4m3_bytes[0] + 64));
    /* The sign is the code's. */
    const __m512i fourth = _mm512_ternarylogic_epi32(
        _mm512_permutex2var_epi8(_mm512_load_si512(kn_e4m3_bytes[1]), code,
                                 _mm512_load_si512(kn_e4m3_bytes[1] + 64)),
        code, _mm512_set1_epi8((char)0x80), 0xf8);
    UNROLL for (int i = 0; i < 4; i++) w[i] = _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi8(
        0xccccccccccccccccu, third, _mm512_load_si512(kn_e4m3_spread[i]), fourth));
}

/* Nibble j of 8 bytes in the low bits of lane j (even column low); the lane's upper bits are not
 * cleared. */
INLINE i16 i16_nibbles(const uint8_t *p)
{
    const __m512i both = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)p));
    const __m512i spread = _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), both);
    return _mm512_srlv_epi32(
        spread, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
}

/* table[nibble], where table[8 + i] == -table[i]. */
INLINE v16 v16_pick(i16 nibbles, const float table[16])
{
    return _mm512_permutexvar_ps(nibbles, _mm512_loadu_ps(table));
}

INLINE void v16_transpose(v16 r[16])
{
    __m512 t[16];
    UNROLL for (int i = 0; i < 8; i++)
    {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 4; i++)
    {
        r[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    /* r[4g + c] has in part b the rows 4g … 4g+3 of column 4b + c: now a transpose of parts over g.
     */
    UNROLL for (int c = 0; c < 4; c++)
    {
        const __m512 ab_lo = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);
        const __m512 ab_hi = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        const __m512 cd_lo = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        const __m512 cd_hi = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_f32x4(ab_lo, cd_lo, 0x88);
        t[4 + c] = _mm512_shuffle_f32x4(ab_hi, cd_hi, 0x88);
        t[8 + c] = _mm512_shuffle_f32x4(ab_lo, cd_lo, 0xdd);
        t[12 + c] = _mm512_shuffle_f32x4(ab_hi, cd_hi, 0xdd);
    }
    UNROLL for (int i = 0; i < 16; i++) r[i] = t[i];
}

#else /* AVX2 */

typedef struct v16 {
    __m256 lo, hi;
} v16;

typedef struct i16 {
    __m256i lo, hi;
} i16;

INLINE v16 v16_zero(void)
{
    return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()};
}

INLINE v16 v16_set1(float x)
{
    return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}

INLINE v16 v16_load(const float *p)
{
    return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

INLINE void v16_store(float *p, v16 a)
{
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}

/* All ones in lanes below n - base. */
INLINE __m256i lanes_below(size_t n, int base)
{
    const __m256i lane =
        _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(base));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane);
}

INLINE v16 v16_load_part(const float *p, size_t n)
{
    return (v16){_mm256_maskload_ps(p, lanes_below(n, 0)),
                 _mm256_maskload_ps(p + 8, lanes_below(n, 8))};
}

INLINE void v16_store_part(float *p, size_t n, v16 a)
{
    _mm256_maskstore_ps(p, lanes_below(n, 0), a.lo);
    _mm256_maskstore_ps(p + 8, lanes_below(n, 8), a.hi);
}

INLINE v16 v16_add(v16 a, v16 b)
{
    return (v16){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}

INLINE v16 v16_sub(v16 a, v16 b)
{
    return (v16){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}

INLINE v16 v16_mul(v16 a, v16 b)
{
    return (v16){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

INLINE v16 v16_div(v16 a, v16 b)
{
    return (v16){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}

INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    return (v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

INLINE v16 v16_max(v16 a, v16 b)
{
    return (v16){_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}

INLINE v16 v16_min(v16 a, v16 b)
{
    return (v16){_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}

INLINE v16 v16_if_gt(v16 a, v16 b, v16 x, v16 y)
{
    return (v16){_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
                 _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
}

INLINE v16 v16_keep_nan(v16 a, v16 y)
{
    return (v16){_mm256_blendv_ps(y.lo, a.lo, _mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)),
                 _mm256_blendv_ps(y.hi, a.hi, _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))};
}

INLINE v16 v16_first(v16 a, v16 b, size_t n)
{
    return (v16){_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(lanes_below(n, 0))),
                 _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(lanes_below(n, 8)))};
}

INLINE i16 v16_bits(v16 a)
{
    return (i16){_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)};
}

INLINE v16 i16_float(i16 a)
{
    return (v16){_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}

INLINE i16 i16_set1(int32_t x)
{
    return (i16){_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}

INLINE i16 i16_add(i16 a, i16 b)
{
    return (i16){_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}

INLINE i16 i16_sub(i16 a, i16 b)
{
    return (i16){_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}

INLINE i16 i16_and(i16 a, i16 b)
{
    return (i16){_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}

INLINE i16 i16_or(i16 a, i16 b)
{
    return (i16){_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}

INLINE i16 i16_max(i16 a, i16 b)
{
    return (i16){_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}

INLINE i16 i16_min(i16 a, i16 b)
{
    return (i16){_mm256_min_epi32(a.lo, b.lo), _mm256_min_epi32(a.hi, b.hi)};
}

INLINE i16 i16_from_bytes(__m128i a)
{
    return (i16){_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))};
}

INLINE __m128i bytes_part(const uint8_t *p, size_t n)
{
    if (n >= 16)
        return _mm_loadu_si128((const __m128i *)p);
    uint64_t word[2] = {0, 0};
    if (n >= 8) {
        memcpy(&word[0], p, 8);
        if (n > 8) {
            memcpy(&word[1], p + n - 8, 8);
            word[1] >>= 8 * (16 - n);
        }
    } else {
        for (size_t i = 0; i < n; i++)
            word[0] |= (uint64_t)p[i] << 8 * i;
    }
    return _mm_set_epi64x((int64_t)word[1], (int64_t)word[0]);
}

#define i16_shl(a, n) ((i16){_mm256_slli_epi32((a).lo, n), _mm256_slli_epi32((a).hi, n)})
#define i16_shr(a, n) ((i16){_mm256_srli_epi32((a).lo, n), _mm256_srli_epi32((a).hi, n)})
#define i16_sar(a, n) ((i16){_mm256_srai_epi32((a).lo, n), _mm256_srai_epi32((a).hi, n)})

INLINE i16 v16_to_int(v16 a)
{
    return (i16){_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
}

INLINE i16 i16_lookup(i16 a, __m128i table)
{
    const __m256i t = _mm256_broadcastsi128_si256(table);
    return i16_and((i16){_mm256_shuffle_epi8(t, a.lo), _mm256_shuffle_epi8(t, a.hi)},
                   i16_set1(0xff));
}

INLINE __m128i i16_low_bytes(i16 a)
{
    const __m256i packed = _mm256_packus_epi32(a.lo, a.hi); /* lanes 0-3 8-11 | 4-7 12-15 */
    const __m256i words = _mm256_permute4x64_epi64(packed, 0xd8);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

INLINE int32_t i16_sum(i16 a)
{
    const __m256i h8 = _mm256_add_epi32(a.lo, a.hi);
    __m128i h4 = _mm_add_epi32(_mm256_castsi256_si128(h8), _mm256_extracti128_si256(h8, 1));
    h4 = _mm_add_epi32(h4, _mm_shuffle_epi32(h4, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(h4, _mm_shuffle_epi32(h4, 0xb1)));
}

INLINE int32_t i16_hmax(i16 a)
{
    const __m256i h8 = _mm256_max_epi32(a.lo, a.hi);
    __m128i h4 = _mm_max_epi32(_mm256_castsi256_si128(h8), _mm256_extracti128_si256(h8, 1));
    h4 = _mm_max_epi32(h4, _mm_shuffle_epi32(h4, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(h4, _mm_shuffle_epi32(h4, 0xb1)));
}

INLINE float v16_sum(v16 a)
{
    const __m256 h8 = _mm256_add_ps(a.lo, a.hi);
    const __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
    const __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
    return _mm_cvtss_f32(_mm_add_ss(h2, _mm_movehdup_ps(h2)));
}

INLINE __m128 v16_sum4(v16 a, v16 b, v16 c, v16 d)
{
    const __m256 a8 = _mm256_add_ps(a.lo, a.hi);
    const __m256 b8 = _mm256_add_ps(b.lo, b.hi);
    const __m256 c8 = _mm256_add_ps(c.lo, c.hi);
    const __m256 d8 = _mm256_add_ps(d.lo, d.hi);
    const __m256 ac =
        _mm256_add_ps(_mm256_permute2f128_ps(a8, c8, 0x20), _mm256_permute2f128_ps(a8, c8, 0x31));
    const __m256 bd =
        _mm256_add_ps(_mm256_permute2f128_ps(b8, d8, 0x20), _mm256_permute2f128_ps(b8, d8, 0x31));
    const __m256 h2 =
        _mm256_add_ps(_mm256_shuffle_ps(ac, bd, 0x44), _mm256_shuffle_ps(ac, bd, 0xee));
    /* Halves a0 a1 b0 b1 | c0 c1 d0 d1. */
    const __m128 ab = _mm256_castps256_ps128(h2);
    const __m128 cd = _mm256_extractf128_ps(h2, 1);
    return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
}

INLINE void v16_sum4x4(__m128 out[4], const v16 a[16])
{
    UNROLL for (int i = 0; i < 4; i++) out[i] =
        v16_sum4(a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]);
}

INLINE float v16_hmax(v16 a)
{
    const __m256 h8 = _mm256_max_ps(a.lo, a.hi);
    const __m128 h4 = _mm_max_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
    const __m128 h2 = _mm_max_ps(h4, _mm_movehl_ps(h4, h4));
    return _mm_cvtss_f32(_mm_max_ss(h2, _mm_movehdup_ps(h2)));
}

INLINE v16 v16_bf16(const uint16_t *p)
{
    const __m128i lo = _mm_loadu_si128((const __m128i *)p);
    const __m128i hi = _mm_loadu_si128((const __m128i *)(p + 8));
    return i16_float((i16){_mm256_slli_epi32(_mm256_cvtepu16_epi32(lo), 16),
                           _mm256_slli_epi32(_mm256_cvtepu16_epi32(hi), 16)});
}

INLINE v16 v16_e4m3_256th(__m128i codes)
{
    __m256i w = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
    w = _mm256_and_si256(_mm256_srai_epi16(w, 1), _mm256_set1_epi16((short)0xbfff));
    return (v16){_mm256_cvtph_ps(_mm256_castsi256_si128(w)),
                 _mm256_cvtph_ps(_mm256_extracti128_si256(w, 1))};
}

INLINE void v16_e4m3_256th_pair(v16 *a, v16 *b, const uint8_t *p)
{
    *a = v16_e4m3_256th(_mm_loadu_si128((const __m128i *)p));
    *b = v16_e4m3_256th(_mm_loadu_si128((const __m128i *)(p + 16)));
}

INLINE void v16_e4m3_256th_four(v16 w[4], const uint8_t *p)
{
    v16_e4m3_256th_pair(&w[0], &w[1], p);
    v16_e4m3_256th_pair(&w[2], &w[3], p + 32);
}

INLINE i16 i16_nibbles(const uint8_t *p)
{
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    int32_t half[2];
    memcpy(half, p, sizeof half);
    return (i16){_mm256_srlv_epi32(_mm256_set1_epi32(half[0]), shift),
                 _mm256_srlv_epi32(_mm256_set1_epi32(half[1]), shift)};
}

INLINE __m256 pick8(__m256i nibbles, __m256 table)
{
    const __m256 magnitude = _mm256_permutevar8x32_ps(table, nibbles);
    const __m256i sign =
        _mm256_and_si256(_mm256_slli_epi32(nibbles, 28), _mm256_set1_epi32(INT32_MIN));
    return _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign));
}

INLINE v16 v16_pick(i16 nibbles, const float table[16])
{
    const __m256 t = _mm256_loadu_ps(table);
    return (v16){pick8(nibbles.lo, t), pick8(nibbles.hi, t)};
}

INLINE void transpose8(__m256 out[8], const __m256 in[8])
{
    __m256 t[8], u[8];
    UNROLL for (int i = 0; i < 4; i++)
    {
        t[2 * i] = _mm256_unpacklo_ps(in[2 * i], in[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(in[2 * i], in[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++)
    {
        u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++)
    {
        out[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
        out[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
    }
}

INLINE void v16_transpose(v16 r[16])
{
    __m256 in[8], out[4][8];
    for (int q = 0; q < 4; q++) {
        UNROLL for (int i = 0; i < 8; i++) in[i] =
            q & 1 ? r[(q >> 1) * 8 + i].hi : r[(q >> 1) * 8 + i].lo;
        transpose8(out[q], in);
    }
    UNROLL for (int i = 0; i < 8; i++)
    {
        r[i] = (v16){out[0][i], out[2][i]};
        r[8 + i] = (v16){out[1][i], out[3][i]};
    }
}

#endif

/* ---- for either width ---- */

/* kn_exp of each lane: the operations of cpu/math.h in their order. */
INLINE v16 v16_exp(v16 x)
{
    const v16 t = v16_fma(x, v16_set1(KN_EXP_LOG2E), v16_set1(KN_EXP_MAGIC));
    const v16 n = v16_sub(t, v16_set1(KN_EXP_MAGIC));
    v16 r = v16_fma(n, v16_set1(-KN_EXP_LN2_HI), x);
    r = v16_fma(n, v16_set1(-KN_EXP_LN2_LO), r);
    v16 p = v16_fma(v16_set1(KN_EXP_C6), r, v16_set1(KN_EXP_C5));
    p = v16_fma(p, r, v16_set1(KN_EXP_C4));
    p = v16_fma(p, r, v16_set1(KN_EXP_C3));
    p = v16_fma(p, r, v16_set1(0.5f));
    p = v16_fma(p, r, v16_set1(1.0f));
    p = v16_fma(p, r, v16_set1(1.0f));
    const i16 n_int = i16_sub(v16_bits(t), i16_set1(KN_EXP_MAGIC_BITS));
    const i16 half = i16_sar(n_int, 1);
    const v16 a = i16_float(i16_shl(i16_add(half, i16_set1(127)), 23));
    const v16 b = i16_float(i16_shl(i16_add(i16_sub(n_int, half), i16_set1(127)), 23));
    v16 y = v16_mul(v16_mul(p, a), b);
    y = v16_if_gt(x, v16_set1(KN_EXP_MAX), v16_set1(INFINITY), y);
    y = v16_if_gt(v16_set1(KN_EXP_MIN), x, v16_zero(), y);
    return v16_keep_nan(x, y);
}

/* Nearest BF16, ties to even; NaN stays NaN. */
INLINE v16 v16_round_bf16(v16 x)
{
    const i16 u = v16_bits(x);
    const i16 bias = i16_add(i16_and(i16_shr(u, 16), i16_set1(1)), i16_set1(0x7fff));
    return v16_keep_nan(x, i16_float(i16_and(i16_add(u, bias), i16_set1((int32_t)0xffff0000))));
}

/* Nearest E4M3, ties to even, saturating at 448: adding and taking away 2^(e+20) for |x| in [2^e,
 * 2^(e+1)) leaves three mantissa bits; e is at least -6, where the steps of 2^-9 begin. */
INLINE v16 v16_round_e4m3(v16 x)
{
    const i16 sign = i16_and(v16_bits(x), i16_set1(INT32_MIN));
    const v16 a = v16_min(i16_float(i16_and(v16_bits(x), i16_set1(0x7fffffff))), v16_set1(448.0f));
    const i16 exponent = i16_and(v16_bits(a), i16_set1(0x7f800000));
    const v16 big =
        i16_float(i16_add(i16_max(exponent, i16_set1((127 - 6) << 23)), i16_set1(20 << 23)));
    const v16 rounded = v16_sub(v16_add(a, big), big);
    return v16_keep_nan(x, i16_float(i16_or(v16_bits(rounded), sign)));
}

/* E4M3 codes of lanes that already hold E4M3 values. */
INLINE __m128i v16_e4m3_codes(v16 x)
{
    /* Times 2^-120 the exponent's bias becomes 7, and subnormals stand as float's own. */
    const i16 u = v16_bits(v16_mul(x, v16_set1(0x1p-120f)));
    const i16 magnitude =
        i16_min(i16_and(i16_shr(u, 20), i16_set1(0x7ff)), i16_set1(0x7f)); /* NaN: 0x7f */
    return i16_low_bytes(i16_or(magnitude, i16_and(i16_shr(u, 24), i16_set1(0x80))));
}

/* Sixteen E4M3 scale bytes, of which n exist, as floats times `factor`/256. */
INLINE void scales_e4m3(float out[16], const uint8_t *p, size_t n, float factor)
{
    v16_store(out, v16_mul(v16_e4m3_256th(bytes_part(p, n)), v16_set1(factor)));
}

/* The same for E8M0, times 256: what v16_e4m3_256th has to be multiplied by. Codes from 247 on give
 * infinity: no finite weight has them. */
INLINE void scales_e8m0_256(float out[16], const uint8_t *p, size_t n)
{
    const i16 exponent =
        i16_min(i16_add(i16_from_bytes(bytes_part(p, n)), i16_set1(8)), i16_set1(255));
    v16_store(out, i16_float(i16_shl(exponent, 23)));
}
