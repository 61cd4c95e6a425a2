/* The scalar conversions: published bytes, every code, ties. */
#include "tests/numerics/support.h"

#include <math.h>
#include <string.h>

Test(convert, e4m3_codes_survive_the_round_trip)
{
    for (int c = 0; c < 256; c++) {
        const float x = kn_e4m3_to_f32((uint8_t)c);
        if ((c & 0x7f) == 0x7f) {
            cr_assert(isnan(x));
            cr_assert_eq(kn_f32_to_e4m3(x), 0x7f);
        } else {
            cr_assert_eq(kn_f32_to_e4m3(x), c, "code %02x came back as %02x", c, kn_f32_to_e4m3(x));
        }
    }
}

Test(convert, e4m3_takes_the_nearest_and_even_on_ties)
{
    for (int c = 0; c < 0x7e; c++) {
        const float low = kn_e4m3_to_f32((uint8_t)c);
        const float high = kn_e4m3_to_f32((uint8_t)(c + 1));
        const float tie = (low + high) / 2.0f; /* exact: one bit more than the codes have */
        cr_assert_eq(kn_f32_to_e4m3(tie), c & 1 ? c + 1 : c);
        cr_assert_eq(kn_f32_to_e4m3(nextafterf(tie, 0.0f)), c);
        cr_assert_eq(kn_f32_to_e4m3(nextafterf(tie, 1e9f)), c + 1);
        cr_assert_eq(kn_f32_to_e4m3(-tie), 0x80 | (c & 1 ? c + 1 : c));
    }
    cr_assert_eq(kn_f32_to_e4m3(448.0f), 0x7e);
    cr_assert_eq(kn_f32_to_e4m3(1e30f), 0x7e);
    cr_assert_eq(kn_f32_to_e4m3(-INFINITY), 0xfe);
}

Test(convert, nvfp4_groups_give_the_published_bytes)
{
    float x[4][16] = {{0},
                      {6, 5, 3.5f, 2.5f, 1.75f, 1.25f, .75f, .25f, -6, -5, -3.5f, -2.5f, -1.75f,
                       -1.25f, -.75f, -.25f}};
    for (int i = 0; i < 16; i++) {
        x[2][i] = i & 1 ? -3000.0f : 3000.0f;
        x[3][i] = kn_bf16_to_f32(kn_f32_to_bf16((float)(3.1 * sin(0.7 * i))));
    }
    static const uint8_t codes[4][8] = {{0},
                                        {0x67, 0x46, 0x24, 0x02, 0xef, 0xce, 0xac, 0x0a},
                                        {0xf7, 0xf7, 0xf7, 0xf7, 0xf7, 0xf7, 0xf7, 0xf7},
                                        {0x60, 0x77, 0xc4, 0xff, 0x0e, 0x76, 0x47, 0xfc}};
    static const uint8_t scales[4] = {0x01, 0x38, 0x7e, 0x30};
    for (int g = 0; g < 4; g++) {
        uint8_t code[8], scale;
        kn_nvfp4_quantize16(code, &scale, x[g]);
        cr_assert_eq(scale, scales[g], "group %d: scale %02x", g, scale);
        cr_assert_arr_eq(code, codes[g], 8, "group %d", g);
    }
}

Test(convert, second_rounding_changes_275_of_1008_products)
{
    int changed = 0;
    for (int s = 1; s <= 0x7e; s++)
        for (int c = 0; c < 8; c++)
            changed += kn_nvfp4_read((uint8_t)c, (uint8_t)s) !=
                       kn_e2m1_to_f32((uint8_t)c) * kn_e4m3_to_f32((uint8_t)s);
    cr_assert_eq(changed, 275);
}

Test(convert, bf16_rounds_to_even_and_keeps_nan)
{
    cr_assert_eq(kn_f32_to_bf16(0x1.01p0f), 0x3f80); /* tie, even below */
    cr_assert_eq(kn_f32_to_bf16(0x1.03p0f), 0x3f82); /* tie, even above */
    cr_assert_eq(kn_f32_to_bf16(0x1.010002p0f), 0x3f81);
    cr_assert_eq(kn_f32_to_bf16(3.4e38f), 0x7f80); /* rounds up to infinity */
    const uint32_t low_payload = 0x7f800001;
    float nan;
    memcpy(&nan, &low_payload, 4);
    cr_assert(isnan(kn_bf16_to_f32(kn_f32_to_bf16(nan))));
}

Test(convert, e8m0_spans_its_range)
{
    cr_assert_eq(kn_e8m0_to_f32(127), 1.0f);
    cr_assert_eq(kn_e8m0_to_f32(0), 0x1p-127f);
    cr_assert_eq(kn_e8m0_to_f32(254), 0x1p127f);
    cr_assert(isnan(kn_e8m0_to_f32(255)));
}

/* ---- the oracle's bytes ---- */

static void same_or_nan(float a, float b, const char *what, size_t i)
{
    cr_assert((isnan(a) && isnan(b)) || a == b, "%s %zu: %.9g, not %.9g", what, i, a, b);
}

Test(convert, agrees_with_the_oracle)
{
    const tensors *file = open_tensors("formats.safetensors");
    const tensor ex = get_tensor(file, "e4m3.x");
    const tensor eb = get_tensor(file, "e4m3.bytes");
    for (size_t i = 0; i < ex.count; i++)
        cr_assert_eq(kn_f32_to_e4m3(((const float *)ex.data)[i]), ((const uint8_t *)eb.data)[i],
                     "e4m3.x %zu = %.9g", i, ((const float *)ex.data)[i]);
    const float *ev = get_tensor(file, "e4m3.values").data;
    const float *e8 = get_tensor(file, "e8m0.values").data;
    const float *e2 = get_tensor(file, "e2m1.values").data;
    for (size_t c = 0; c < 256; c++) {
        same_or_nan(kn_e4m3_to_f32((uint8_t)c), ev[c], "e4m3", c);
        same_or_nan(kn_e8m0_to_f32((uint8_t)c), e8[c], "e8m0", c);
        same_or_nan(kn_e2m1_to_f32(c & 15), e2[c & 15], "e2m1", c & 15);
    }
    const tensor bx = get_tensor(file, "bf16.x");
    const uint16_t *bb = get_tensor(file, "bf16.bits").data;
    for (size_t i = 0; i < bx.count; i++)
        cr_assert_eq(kn_f32_to_bf16(((const float *)bx.data)[i]), bb[i], "bf16.x %zu", i);

    const tensor nx = get_tensor(file, "nvfp4.x");
    const uint8_t *codes = get_tensor(file, "nvfp4.codes").data;
    const uint8_t *scales = get_tensor(file, "nvfp4.scales").data;
    const float *read = get_tensor(file, "nvfp4.read").data;
    for (size_t g = 0; g < nx.shape[0]; g++) {
        uint8_t code[8], scale;
        kn_nvfp4_quantize16(code, &scale, (const float *)nx.data + g * 16);
        cr_assert_eq(scale, scales[g], "group %zu: scale %02x", g, scale);
        cr_assert_arr_eq(code, codes + g * 8, 8, "group %zu", g);
        for (size_t i = 0; i < 16; i++)
            same_or_nan(kn_nvfp4_read(code[i / 2] >> 4 * (i & 1) & 15, scale), read[g * 16 + i],
                        "nvfp4.read", g * 16 + i);
    }
    const uint8_t *table = get_tensor(file, "readback.table").data;
    for (size_t i = 0; i < 4096; i++)
        same_or_nan(kn_nvfp4_read(i % 16, (uint8_t)(i / 16)), kn_e4m3_to_f32(table[i]), "readback",
                    i);
}

/* Weights as the operations read them: a unit row picks out one column. */
static void check_columns(const char *variant, const kn_weight *w, const float *values,
                          uint32_t scale_code_max)
{
    kn_device *device = open_device(variant, 1);
    if (!device)
        return;
    float *x = zeroed(w->cols * sizeof *x);
    float *y = zeroed(w->rows * sizeof *y);
    for (uint32_t k = 0; k < w->cols; k++) {
        x[k] = 1.0f;
        device->ops->linear(device, y, x, w, 1, false);
        x[k] = 0.0f;
        for (uint32_t o = 0; o < w->rows; o++) {
            bool finite = true; /* an infinite neighbour makes the sum NaN: 0 * inf */
            for (uint32_t i = 0; i < w->cols; i++)
                finite &= i == k || isfinite(values[o * w->cols + i]);
            for (uint32_t i = 0; i < w->cols / 32 && w->type == KN_MXFP8; i++)
                finite &= ((const uint8_t *)w->scale)[o * (w->cols / 32) + i] <= scale_code_max;
            if (finite)
                same_or_nan(y[o], values[o * w->cols + k], variant, (size_t)o * w->cols + k);
        }
    }
    kn_device_destroy(device);
}

Test(convert, stored_weights_have_the_oracles_values)
{
    const tensors *file = open_tensors("formats.safetensors");
    const kn_weight nvfp4 = {.type = KN_NVFP4,
                             .rows = 8,
                             .cols = 64,
                             .data = get_tensor(file, "nvfp4w.packed").data,
                             .scale = get_tensor(file, "nvfp4w.scales").data,
                             .scale_global =
                                 *(const float *)get_tensor(file, "nvfp4w.global").data};
    const kn_weight mxfp8 = {.type = KN_MXFP8,
                             .rows = 8,
                             .cols = 64,
                             .data = get_tensor(file, "mxfp8.bytes").data,
                             .scale = get_tensor(file, "mxfp8.scales").data,
                             .scale_global = 1.0f};
    static const char *const variants[] = {"ref", "avx2", "avx512"};
    for (int i = 0; i < 3; i++) {
        check_columns(variants[i], &nvfp4, get_tensor(file, "nvfp4w.values").data, 255);
        /* The vector variants read block scales up to 2^119: see vec.h. */
        check_columns(variants[i], &mxfp8, get_tensor(file, "mxfp8.values").data, i ? 246 : 255);
    }
}
