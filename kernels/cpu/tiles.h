/* cpu/tiles: the form in which the vector variants stream NVFP4 and MXFP8 matrices.
 *
 * Outputs come in bands of 32, a band in blocks of columns, a block in four tiles of eight outputs;
 * a band is one ascending stream, and a piece of the input row serves 32 outputs before the next
 * one is needed: with eight, a row of 6,144 inputs and the weights pushed each other out of a 48
 * KiB first-level cache (20 instead of 26 GB/s a thread). Every tile is a whole number of cache
 * lines and holds its own scales. What lies past the matrix is zero codes.
 *
 *   NVFP4, 128 columns:  output pair i (of 4), 128 bytes: [low part: output 2i | output 2i+1],
 *                        [high part: the same]. A part of an output is 32 bytes: byte 4g + j has
 *                        columns 16g + j and 16g + 4 + j of the block (low part) or 16g + 8 + j and
 *                        16g + 12 + j, the first in the low nibble; g = 0 … 7 is the group of 16.
 *                        Then 64 scale bytes: [output][group].
 *   MXFP8, 256 columns:  per 64 columns [output][64 codes]; then 64 scale bytes: [output][8]. The
 *                        last block has as many columns as are left, rounded up to 64.
 *
 * The same bytes serve every variant. Private to kernels. */
#pragma once
#include "kernels/ops.h"

#define TILE_OUTS 8
#define BAND_TILES 4
#define BAND_OUTS (TILE_OUTS * BAND_TILES)
#define NVFP4_COLS 128
#define NVFP4_TILE_BYTES (TILE_OUTS * NVFP4_COLS / 2 + 64)
#define MXFP8_COLS 256
#define MXFP8_TILE_BYTES (TILE_OUTS * MXFP8_COLS + 64)

/* Columns of the MXFP8 block that begins at column k, rounded up to 64. */
static inline uint32_t tile_mxfp8_cols(uint32_t cols, uint32_t k)
{
    const uint32_t left = cols - k;
    return left >= MXFP8_COLS ? MXFP8_COLS : (left + 63) & ~63u;
}

static inline size_t tile_band_bytes(const kn_weight *w)
{
    if (w->type == KN_NVFP4)
        return (size_t)((w->cols + NVFP4_COLS - 1) / NVFP4_COLS) * BAND_TILES * NVFP4_TILE_BYTES;
    const size_t blocks = (w->cols + MXFP8_COLS - 1) / MXFP8_COLS;
    return BAND_TILES * (TILE_OUTS * (((size_t)w->cols + 63) & ~(size_t)63) + blocks * 64);
}

/* One tile: outputs [out, out + 8), columns [k, k + 128) or [k, k + 256); from the stored form. */
void kn_tile_nvfp4(uint8_t *tile, const kn_weight *w, uint32_t out, uint32_t k);
void kn_tile_mxfp8(uint8_t *tile, const kn_weight *w, uint32_t out, uint32_t k);
