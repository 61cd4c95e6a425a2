/* Scalar conversions between the stored number formats and float, exact by construction: the
 * yardstick of every faster form. OCP MX v1.0 for E2M1, E4M3 (FN) and E8M0. Thread: any. */
#include "kernels/ops.h"

#include <math.h>
#include <string.h>

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

float kn_e4m3_to_f32(uint8_t code)
{
    const uint32_t exponent = code >> 3 & 15;
    const uint32_t mantissa = code & 7;
    float magnitude;
    if ((code & 0x7f) == 0x7f)
        magnitude = NAN;
    else if (exponent == 0)
        magnitude = (float)mantissa * 0x1p-9f;
    else /* three of float's mantissa bits; the bias goes from 7 to 127 */
        magnitude = float_of((exponent + 120) << 23 | mantissa << 20);
    return code & 0x80 ? -magnitude : magnitude;
}

uint8_t kn_f32_to_e4m3(float x)
{
    if (isnan(x))
        return 0x7f;
    const uint8_t sign = signbit(x) ? 0x80 : 0;
    const float a = fabsf(x);
    if (a >= 448.0f)
        return sign | 0x7e;
    if (a < 0x1p-6f) /* steps of 2^-9; 8 of them are the smallest normal, whose code is 8 */
        return sign | (uint8_t)rintf(a * 512.0f);
    /* Round to three mantissa bits in place, then move the bias from 127 to 7. */
    uint32_t u = bits_of(a);
    u += 0x7ffff + (u >> 20 & 1);
    const uint32_t code = (u >> 20) - (120u << 3);
    return sign | (uint8_t)(code > 0x7e ? 0x7e : code);
}

float kn_e2m1_to_f32(uint8_t nibble)
{
    static const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const float x = magnitude[nibble & 7];
    return nibble & 8 ? -x : x;
}

float kn_e8m0_to_f32(uint8_t code)
{
    if (code == 255)
        return NAN;
    return code == 0 ? 0x1p-127f : float_of((uint32_t)code << 23);
}

float kn_bf16_to_f32(uint16_t x)
{
    return float_of((uint32_t)x << 16);
}

uint16_t kn_f32_to_bf16(float x)
{
    const uint32_t u = bits_of(x);
    if (isnan(x))
        return (uint16_t)(u >> 16 |
                          0x40); /* quiet, so that a payload in the low bits is not lost */
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static uint8_t e2m1_code(float a, float scale)
{
    /* Thresholds times the stored scale are exact in float (at most 7 significant bits); a quotient
     * would not be. */
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

void kn_nvfp4_quantize16(uint8_t codes[8], uint8_t *scale, const float x[16])
{
    float amax = 0.0f;
    for (int i = 0; i < 16; i++)
        amax = fmaxf(amax, fabsf(x[i]));
    *scale = kn_f32_to_e4m3(fminf(fmaxf(amax / 6.0f, 1.0f / 512.0f), 448.0f));
    const float stored = kn_e4m3_to_f32(*scale);
    uint8_t nibble[16];
    for (int i = 0; i < 16; i++) {
        nibble[i] = e2m1_code(fabsf(x[i]), stored);
        if (nibble[i] && signbit(x[i]))
            nibble[i] |= 8;
    }
    for (int i = 0; i < 8; i++)
        codes[i] = (uint8_t)(nibble[2 * i] | nibble[2 * i + 1] << 4);
}

float kn_nvfp4_read(uint8_t nibble, uint8_t scale)
{
    return kn_e4m3_to_f32(kn_f32_to_e4m3(kn_e2m1_to_f32(nibble) * kn_e4m3_to_f32(scale)));
}
