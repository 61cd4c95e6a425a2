/* kernels/pack: matrices into the form that the vector variants stream (cpu/tiles.h). Scalar; runs
 * once a checkpoint. */
#include "kernels/cpu/tiles.h"

#include <string.h>

/* Four nibbles, the lowest first, to the low halves of four bytes. */
static uint32_t spread(uint32_t nibbles)
{
    const uint32_t pairs = (nibbles | nibbles << 8) & 0x00ff00ff;
    return (pairs | pairs << 4) & 0x0f0f0f0f;
}

void kn_tile_nvfp4(uint8_t *tile, const kn_weight *w, uint32_t out, uint32_t k)
{
    const uint32_t groups = (w->cols - k < NVFP4_COLS ? w->cols - k : NVFP4_COLS) / 16;
    memset(tile, 0, NVFP4_TILE_BYTES);
    for (uint32_t n = 0; n < TILE_OUTS && out + n < w->rows; n++) {
        const uint8_t *row = (const uint8_t *)w->data + (size_t)(out + n) * (w->cols / 2);
        const uint8_t *scale =
            (const uint8_t *)w->scale + (size_t)(out + n) * (w->cols / 16) + k / 16;
        uint8_t *part = tile + n / 2 * 128 + n % 2 * 32;
        for (uint32_t g = 0; g < groups; g++) {
            uint32_t half[2]; /* columns 0 to 7 and 8 to 15 of the group */
            memcpy(half, row + (k + 16 * g) / 2, sizeof half);
            for (int h = 0; h < 2; h++) {
                const uint32_t bytes = spread(half[h] & 0xffff) | spread(half[h] >> 16) << 4;
                memcpy(part + 64 * h + 4 * g, &bytes, sizeof bytes);
            }
        }
        memcpy(tile + TILE_OUTS * NVFP4_COLS / 2 + n * 8, scale, groups);
    }
}

void kn_tile_mxfp8(uint8_t *tile, const kn_weight *w, uint32_t out, uint32_t k)
{
    const uint32_t padded = tile_mxfp8_cols(w->cols, k);
    const uint32_t cols = w->cols - k < padded ? w->cols - k : padded;
    memset(tile, 0, TILE_OUTS * padded + 64);
    for (uint32_t n = 0; n < TILE_OUTS && out + n < w->rows; n++) {
        const uint8_t *row = (const uint8_t *)w->data + (size_t)(out + n) * w->cols + k;
        const uint8_t *scale =
            (const uint8_t *)w->scale + (size_t)(out + n) * (w->cols / 32) + k / 32;
        for (uint32_t c = 0; c < cols; c += 32)
            memcpy(tile + c / 64 * (TILE_OUTS * 64) + n * 64 + c % 64, row + c, 32);
        memcpy(tile + TILE_OUTS * padded + n * 8, scale, cols / 32);
    }
}

size_t kn_pack_bytes(const kn_weight *w)
{
    if (w->type == KN_NVFP4 || w->type == KN_MXFP8)
        return (w->rows + BAND_OUTS - 1) / BAND_OUTS * tile_band_bytes(w);
    return 0;
}

void kn_pack(void *dst, const kn_weight *w)
{
    uint8_t *at = dst;
    const uint32_t step = w->type == KN_NVFP4 ? NVFP4_COLS : MXFP8_COLS;
    for (uint32_t band = 0; band < w->rows; band += BAND_OUTS)
        for (uint32_t k = 0; k < w->cols; k += step)
            for (uint32_t t = 0; t < BAND_TILES; t++) {
                if (w->type == KN_NVFP4) {
                    kn_tile_nvfp4(at, w, band + t * TILE_OUTS, k);
                    at += NVFP4_TILE_BYTES;
                } else {
                    kn_tile_mxfp8(at, w, band + t * TILE_OUTS, k);
                    at += TILE_OUTS * tile_mxfp8_cols(w->cols, k) + 64;
                }
            }
}
