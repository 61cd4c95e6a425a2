/* gpu/formats: number formats in registers, to the bit what kernels/convert.c says; and the
 * exponential of kernels/cpu/math.h in the same operations. */
#pragma once
#include "kernels/gpu/port.h"

enum { GPU_F32, GPU_BF16, GPU_MXFP8, GPU_NVFP4 };           /* kn_type */
enum { GPU_KV_NVFP4, GPU_KV_FP8, GPU_KV_BF16, GPU_KV_F32 }; /* kn_kv_type */

#define GPU_INFINITY float_of(0x7f800000u)

GPU_FN float bf16_to_f32(uint16_t x)
{
    return float_of((uint32_t)x << 16);
}

GPU_FN uint16_t f32_to_bf16(float x)
{
    const uint32_t u = bits_of(x);
    if (x != x)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

GPU_FN float round_bf16(float x)
{
    return bf16_to_f32(f32_to_bf16(x));
}

GPU_FN float e4m3_to_f32(uint32_t code)
{
    return h_low(h2_of_e4m3(code));
}

/* Scalar, as convert.c does it: from float, not by way of a half, which would round twice. */
GPU_FN uint32_t f32_to_e4m3(float x)
{
    if (x != x)
        return 0x7f;
    const uint32_t sign = bits_of(x) >> 24 & 0x80;
    const float a = fabsf(x);
    if (a >= 448.0f)
        return sign | 0x7e;
    if (a < 0x1p-6f)
        return sign | (uint32_t)rintf(a * 512.0f);
    uint32_t u = bits_of(a);
    u += 0x7ffff + (u >> 20 & 1);
    const uint32_t code = (u >> 20) - (120u << 3);
    return sign | (code > 0x7e ? 0x7e : code);
}

GPU_FN float round_e4m3(float x)
{
    return e4m3_to_f32(f32_to_e4m3(x));
}

GPU_FN float e2m1_to_f32(uint32_t nibble)
{
    /* Exponent and mantissa at the top of a half's: off by 2^14, subnormals alike. */
    return h_low((nibble & 8) << 12 | (nibble & 7) << 9) * 16384.0f;
}

GPU_FN float e8m0_to_f32(uint32_t code)
{
    if (code == 255)
        return float_of(0x7fc00000u);
    return float_of(code ? code << 23 : 0x00400000u);
}

/* e4m3(e2m1 * scale): the second rounding on read. The product has six bits, so a half holds it. */
GPU_FN float nvfp4_read(uint32_t nibble, uint32_t scale)
{
    return round_e4m3(e2m1_to_f32(nibble) * e4m3_to_f32(scale));
}

GPU_FN uint32_t e2m1_code(float a, float scale)
{
    if (a > 5.0f * scale)
        return 7;
    if (a >= 3.5f * scale)
        return 6;
    if (a > 2.5f * scale)
        return 5;
    if (a >= 1.75f * scale)
        return 4;
    if (a > 1.25f * scale)
        return 3;
    if (a >= 0.75f * scale)
        return 2;
    return a > 0.25f * scale;
}

/* A group of 16 as the pages keep it; the eight bytes of codes in two words. */
GPU_FN void nvfp4_quantize16(uint32_t codes[2], uint8_t *scale, const float *x)
{
    float amax = 0.0f;
    for (int i = 0; i < 16; i++)
        amax = fmaxf(amax, fabsf(x[i]));
    *scale = (uint8_t)f32_to_e4m3(fminf(fmaxf(div_rn(amax, 6.0f), 1.0f / 512.0f), 448.0f));
    const float stored = e4m3_to_f32(*scale);
    codes[0] = codes[1] = 0;
    for (int i = 0; i < 16; i++) {
        uint32_t nibble = e2m1_code(fabsf(x[i]), stored);
        if (nibble && bits_of(x[i]) >> 31)
            nibble |= 8;
        codes[i / 8] |= nibble << 4 * (i % 8);
    }
}

/* Four pairs of halves, times 2^-14, of a word whose codes lie as `nvfp4_tile_word` puts them. */
GPU_FN void nvfp4_halves(uint32_t out[4], uint32_t w)
{
    out[0] = w & 0x8e008e00u;
    out[1] = w << 3 & 0x8e008e00u;
    out[2] = (w << 6 & 0x0e000e00u) | (w << 1 & 0x80008000u);
    out[3] = (w << 9 & 0x0e000e00u) | (w << 2 & 0x80008000u);
}

/* Eight codes, code i in bits 4 i, rearranged: pair p is codes 2 p (low half) and 2 p + 1 (high
 * half), each at the bits from where one shift brings them to a half's sign and exponent. */
GPU_FN uint32_t nvfp4_tile_word(uint32_t codes)
{
    uint32_t w = 0;
    for (int i = 0; i < 8; i++) {
        const uint32_t c = codes >> 4 * i & 15, sign = c >> 3, magnitude = c & 7;
        const int pair = i / 2;
        const int top = pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13;
        const int low = 9 - 3 * pair;
        w |= (sign << top | magnitude << low) << 16 * (i & 1);
    }
    return w;
}

/* The code at place i of such a word. */
GPU_FN uint32_t nvfp4_tile_code(uint32_t w, uint32_t i)
{
    const uint32_t pair = i / 2, half = w >> 16 * (i & 1);
    const uint32_t top = pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13;
    return (half >> top & 1) << 3 | (half >> (9 - 3 * pair) & 7);
}

GPU_FN float gpu_exp(float x)
{
    if (x > 88.72283f)
        return GPU_INFINITY;
    if (x < -87.33654f)
        return 0.0f;
    if (x != x)
        return x;
    const float t = fma_rn(x, 1.44269504f, 12582912.0f);
    const float n = add_rn(t, -12582912.0f);
    float r = fma_rn(n, -0.693359375f, x);
    r = fma_rn(n, 2.12194440e-4f, r);
    float p = fma_rn(0x1.6c16c2p-10f, r, 0x1.111112p-7f);
    p = fma_rn(p, r, 0x1.555556p-5f);
    p = fma_rn(p, r, 0x1.555556p-3f);
    p = fma_rn(p, r, 0.5f);
    p = fma_rn(p, r, 1.0f);
    p = fma_rn(p, r, 1.0f);
    const int32_t n_int = (int32_t)(bits_of(t) - 0x4b400000u);
    const int32_t half = n_int >> 1;
    return mul_rn(mul_rn(p, float_of((uint32_t)(half + 127) << 23)),
                  float_of((uint32_t)(n_int - half + 127) << 23));
}

GPU_FN float sigmoid(float x)
{
    return div_rn(1.0f, add_rn(1.0f, gpu_exp(-x)));
}

GPU_FN float swiglu(float g, float u, float alpha, float limit)
{
    g = fminf(g, limit);
    u = fminf(fmaxf(u, -limit), limit);
    return mul_rn(mul_rn(add_rn(u, 1.0f), g), sigmoid(mul_rn(alpha, g)));
}
