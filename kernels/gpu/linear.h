/* gpu/linear: products with weights.
 *
 * THE WRITTEN REDUCTION ("cuda-1"), one for one row and for thousands: K is cut into GPU_SLICES
 * parts at multiples of 64 (unit u of U belongs to the slice s with s U / 8 <= u < (s+1) U / 8). In
 * a slice the matrix instruction adds up in ascending k, apart for the high and the low part of x;
 * the slice's sum is high + low; the slices are added in ascending order, from 0. Then the scale of
 * the row and of the matrix. A column of the instruction never sees another column, so a row's bits
 * do not depend on its neighbours or on which kernel made them.
 *
 * x is two halves: x 2^e = high + low, 22 bits, e such that the row's largest value has 15 bits. A
 * weight is a half and exact: NVFP4 as code * scale (6 bits), MXFP8 as its e4m3 code; the latter's
 * scale multiplies the sum of its 32 products. BF16 and F32 weights are multiplied as tf32: x in
 * two parts of 11 bits, an F32 weight too (22 bits).
 *
 * TILES. 16 outputs, as the instruction's lanes want them; a strip of 16 rows keeps its place in
 * memory, so a matrix is rearranged where it lies. Lane = 4 g + t holds rows g and g + 8.
 *   MXFP8  32 columns, 512 bytes: lane's 16 bytes are columns 8 t … 8 t + 7 of row g, then g + 8;
 *          scales of 64 columns, 32 bytes: 4 bytes a g: (row g, row g + 8) of each 32 columns.
 *   NVFP4  64 columns, 512 bytes: lane's 16 bytes are columns 16 t … 16 t + 15 of row g (two words
 *          of nvfp4_tile_word), then of row g + 8; scales, 64 bytes: 2 bytes a lane.
 *   BF16   16 columns, 512 bytes: lane's 16 bytes are columns 4 t … 4 t + 3 of row g, then g + 8.
 *   F32    as stored. */
#pragma once
#include "kernels/gpu/args.h"
#include "kernels/gpu/formats.h"

/* ---- any place of a matrix ---- */

GPU_FN float weight_at(const gpu_weight *w, uint32_t r, uint32_t k)
{
    const uint64_t cols = w->cols;
    const uint64_t strip = (uint64_t)(r / 16) * 16 * cols;
    const uint32_t g = r % 8, upper = r % 16 / 8;
    switch (w->type) {
    case GPU_F32:
        return ((const float *)w->data)[r * cols + k];
    case GPU_BF16: {
        uint64_t at = r * cols + k;
        if (w->tiled)
            at = strip + k / 16 * 256 + (g * 4 + k % 16 / 4) * 8 + upper * 4 + k % 4;
        return bf16_to_f32(((const uint16_t *)w->data)[at]);
    }
    case GPU_MXFP8: {
        uint64_t at = r * cols + k, scale = r * (cols / 32) + k / 32;
        if (w->tiled) {
            at = strip + k / 32 * 512 + (g * 4 + k % 32 / 8) * 16 + upper * 8 + k % 8;
            scale = strip / 32 + k / 64 * 32 + g * 4 + k % 64 / 32 * 2 + upper;
        }
        return e4m3_to_f32(w->data[at]) * e8m0_to_f32(w->scale[scale]);
    }
    default: {
        uint32_t code;
        uint64_t scale = r * (cols / 16) + k / 16;
        if (w->tiled) {
            const uint64_t word =
                strip / 8 + k / 64 * 128 + (g * 4 + k % 64 / 16) * 4 + upper * 2 + k % 16 / 8;
            code = nvfp4_tile_code(((const uint32_t *)w->data)[word], k % 8);
            scale = strip / 16 + k / 64 * 64 + (g * 4 + k % 64 / 16) * 2 + upper;
        } else {
            code = w->data[(r * cols + k) / 2] >> 4 * (k & 1) & 15;
        }
        return e2m1_to_f32(code) * e4m3_to_f32(w->scale[scale]);
    }
    }
}

GPU_FN float weight_global(const gpu_weight *w)
{
    return w->type == GPU_NVFP4 ? w->global : 1.0f;
}

/* Strips of 16 rows from their order in the file (`from`, `from_scale`) to tiles (`to`, `scale`).
 * Grid: strips. */
GPU_KERNEL(256)
gpu_tile(uint8_t *to, uint8_t *scale, const uint8_t *from, const uint8_t *from_scale, uint32_t type,
         uint32_t cols)
{
    const uint32_t bits = type == GPU_BF16 ? 16 : type == GPU_MXFP8 ? 8 : 4;
    const uint32_t bytes = 16 * (cols / 8 * bits);
    const uint32_t group = type == GPU_MXFP8 ? 32 : 16;
    const uint32_t scales = type == GPU_BF16 ? 0 : 16 * (cols / group);
    to += (uint64_t)block_x() * bytes;
    from += (uint64_t)block_x() * bytes;
    scale += (uint64_t)block_x() * scales;
    from_scale += (uint64_t)block_x() * scales;
    /* The 8 bytes that a lane holds of one row. */
    for (uint32_t i = thread_x(); i < bytes / 8; i += threads_x()) {
        const uint32_t chunks = bytes / 16 / 8; /* of a row */
        const uint32_t r = i / chunks, c = i % chunks;
        const uint32_t *src = (const uint32_t *)from + i * 2;
        uint32_t *dst = (uint32_t *)(to + c / 4 * 512 + (r % 8 * 4 + c % 4) * 16 + r / 8 * 8);
        dst[0] = type == GPU_NVFP4 ? nvfp4_tile_word(src[0]) : src[0];
        dst[1] = type == GPU_NVFP4 ? nvfp4_tile_word(src[1]) : src[1];
    }
    for (uint32_t i = thread_x(); i < scales; i += threads_x()) {
        const uint32_t groups = cols / group, r = i / groups, q = i % groups;
        const uint32_t at = type == GPU_NVFP4 ? q / 4 * 64 + (r % 8 * 4 + q % 4) * 2 + r / 8
                                              : q / 2 * 32 + r % 8 * 4 + q % 2 * 2 + r / 8;
        scale[at] = from_scale[i];
    }
}

/* ---- the input as halves ---- */

/* Words of a row: [cols / 64][high, low][64 halves]. */
GPU_FN uint32_t halves_word(uint32_t k)
{
    return k / 64 * 64 + k % 64 / 2;
}

/* Exponent that brings `largest` to 15 bits; as a factor and its inverse. */
GPU_FN void halves_scale(float largest, float *factor, float *inverse)
{
    int32_t e = (int32_t)(bits_of(largest) >> 23) - 127;
    e = e < -100 ? -100 : e > 100 ? 100 : e;
    *factor = float_of((uint32_t)(127 + 14 - e) << 23);
    *inverse = float_of((uint32_t)(127 - 14 + e) << 23);
}

/* Two values of columns k and k + 1, k even, into a row. */
GPU_FN void halves_put(uint32_t *row, uint32_t k, float a, float b)
{
    const uint32_t high = h2_of(a, b);
    row[halves_word(k)] = high;
    row[halves_word(k) + 32] = h2_of(a - h_low(high), b - h_high(high));
}

/* ---- one strip times up to 8 columns ---- */

/* Where a lane reads x: its columns' row and part, and its share of the columns. */
typedef struct lane_input {
    const uint32_t *halves[2]; /* by group of four rows */
    const float *floats[2];
    uint32_t low; /* this lane's column is the low part */
} lane_input;

GPU_FN uint4 load_words(const uint32_t *at)
{
    return *(const uint4 *)at;
}

/* The lane's 32 weights of a tile as halves (times 2^-14): four times the instruction's A. */
GPU_FN void nvfp4_tile_halves(uint32_t a[4][4], uint4 c, uint32_t scales)
{
    const uint32_t s = h2_of_e4m3(scales);
    const uint32_t lower = pick_bytes(s, s, 0x1010), upper = pick_bytes(s, s, 0x3232);
    const uint32_t words[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t h[4];
        nvfp4_halves(h, words[i]);
#pragma unroll
        for (int p = 0; p < 4; p++)
            a[(i & 1) * 2 + p / 2][(p & 1) * 2 + i / 2] = h2_mul(h[p], i < 2 ? lower : upper);
    }
}

/* x as tf32: its upper 11 bits, or what they leave. */
GPU_FN uint32_t tf32_part(float x, uint32_t low)
{
    const uint32_t high = bits_of(x) & 0xffffe000u;
    return low ? bits_of(x - float_of(high)) : high;
}

/* ---- a warp's strip, streamed ---- */

/* Each lane copies what it will read itself into a ring of its own in shared memory, so that loads
 * are always under way and nothing need be waited for but the copies. A stage is a unit of 64
 * columns. */
#define RING_BYTES 4096 /* a warp */

GPU_FN void put_slice(float *to, float acc[4])
{
    const uint32_t g = lane_of() >> 2, t = lane_of() & 3;
    to[t * 16 + g] = add_rn(acc[0], acc[1]);
    to[t * 16 + g + 8] = add_rn(acc[2], acc[3]);
    acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
}

template <int TYPE> struct ring_of;
template <> struct ring_of<GPU_MXFP8> {
    static const int data = 1024, pieces = 2, extra = 4, stages = 3; /* of 1,152 bytes */
};
template <> struct ring_of<GPU_NVFP4> {
    static const int data = 512, pieces = 1, extra = 4, stages = 6; /* of 640 bytes */
};
template <> struct ring_of<GPU_BF16> {
    static const int data = 2048, pieces = 4, extra = 0, stages = 2;
};

/* Unit u of the strip into its stage. */
template <int TYPE>
GPU_FN void ring_fetch(uint8_t *ring, const uint8_t *data, const uint8_t *scale, uint32_t u,
                       uint32_t stage)
{
    typedef ring_of<TYPE> r;
    const uint32_t lane = lane_of();
    uint8_t *to = ring + stage * (r::data + r::extra * 32);
#pragma unroll
    for (int i = 0; i < r::pieces; i++)
        copy_async16(to + i * 512 + lane * 16, data + (uint64_t)u * r::data + i * 512 + lane * 16);
    if (TYPE == GPU_MXFP8)
        copy_async4(to + r::data + lane * 4, scale + u * 32 + (lane >> 2) * 4);
    if (TYPE == GPU_NVFP4)
        copy_async4(to + r::data + lane * 4, scale + u * 64 + (lane >> 1) * 4);
}

/* What a lane reads of x for a unit: fetched one unit ahead, for it comes from the second cache. */
template <int TYPE, int NT> struct unit_input {
    uint4 x[NT][TYPE == GPU_BF16 ? 4 : 2];
};

template <int TYPE, int NT>
GPU_FN void input_fetch(unit_input<TYPE, NT> *to, const lane_input *in, uint32_t u)
{
    const uint32_t t = lane_of() & 3;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        if (TYPE == GPU_MXFP8) {
            const uint32_t *at = in->halves[n] + u * 64 + in->low * 32 + t * 4;
            to->x[n][0] = load_words(at);
            to->x[n][1] = load_words(at + 16);
        } else if (TYPE == GPU_NVFP4) {
            const uint32_t *at = in->halves[n] + u * 64 + in->low * 32 + t * 8;
            to->x[n][0] = load_words(at);
            to->x[n][1] = load_words(at + 4);
        } else {
#pragma unroll
            for (int j = 0; j < (TYPE == GPU_BF16 ? 4 : 2); j++)
                to->x[n][j] = load_words((const uint32_t *)in->floats[n] + u * 64 + j * 16 + t * 4);
        }
    }
}

/* x times one unit. */
template <int TYPE, int NT>
GPU_FN void ring_unit(float acc[NT][4], const uint8_t *at, const unit_input<TYPE, NT> *in,
                      uint32_t low)
{
    typedef ring_of<TYPE> r;
    const uint32_t lane = lane_of();
    at += lane * 16;
    if (TYPE == GPU_MXFP8) {
        const uint32_t s = *(const uint32_t *)(at + r::data - lane * 12);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint4 c = *(const uint4 *)(at + j * 512);
            const uint32_t a[8] = {h2_of_e4m3(c.x & 0xffff), h2_of_e4m3(c.z & 0xffff),
                                   h2_of_e4m3(c.x >> 16),    h2_of_e4m3(c.z >> 16),
                                   h2_of_e4m3(c.y & 0xffff), h2_of_e4m3(c.w & 0xffff),
                                   h2_of_e4m3(c.y >> 16),    h2_of_e4m3(c.w >> 16)};
            const float lower = float_of((s >> 16 * j & 255) << 23);
            const float upper = float_of((s >> (16 * j + 8) & 255) << 23);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const uint4 x = in->x[n][j];
                float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                mma_f16(sum, a, x.x, x.y);
                mma_f16(sum, a + 4, x.z, x.w);
                acc[n][0] = fma_rn(sum[0], lower, acc[n][0]);
                acc[n][1] = fma_rn(sum[1], lower, acc[n][1]);
                acc[n][2] = fma_rn(sum[2], upper, acc[n][2]);
                acc[n][3] = fma_rn(sum[3], upper, acc[n][3]);
            }
        }
    } else if (TYPE == GPU_NVFP4) {
        const uint32_t s = *(const uint32_t *)(at + r::data - lane * 12) >> 16 * (lane & 1);
        uint32_t a[4][4];
        nvfp4_tile_halves(a, *(const uint4 *)at, s);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint4 x = in->x[n][0], y = in->x[n][1];
            mma_f16(acc[n], a[0], x.x, x.y);
            mma_f16(acc[n], a[1], x.z, x.w);
            mma_f16(acc[n], a[2], y.x, y.y);
            mma_f16(acc[n], a[3], y.z, y.w);
        }
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint4 w = *(const uint4 *)(at + j * 512);
            const uint32_t a[8] = {w.x << 16, w.z << 16, w.x & 0xffff0000u, w.z & 0xffff0000u,
                                   w.y << 16, w.w << 16, w.y & 0xffff0000u, w.w & 0xffff0000u};
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const uint4 x = in->x[n][TYPE == GPU_BF16 ? j : 0];
                mma_tf32(acc[n], a, tf32_part(float_of(x.x), low), tf32_part(float_of(x.y), low));
                mma_tf32(acc[n], a + 4, tf32_part(float_of(x.z), low),
                         tf32_part(float_of(x.w), low));
            }
        }
    }
}

/* Slices of F32 weights, read where they lie. */
template <int NT>
GPU_FN void strip_f32(float *sums, const float *data, uint32_t cols, const lane_input *in,
                      uint32_t slice, uint32_t last, bool first)
{
    const uint32_t lane = lane_of(), g = lane >> 2, t = lane & 3, units = cols / GPU_UNIT;
    const float *lower = data + (uint64_t)g * cols, *upper = data + (uint64_t)(g + 8) * cols;
    if (first)
        wait_for_previous();
    for (; slice < last; slice++) {
        float acc[NT][4] = {};
        const uint32_t end = (slice + 1) * units / GPU_SLICES * 4;
#pragma unroll 2
        for (uint32_t v = slice * units / GPU_SLICES * 4; v < end; v++) {
            const float4 l = *(const float4 *)(lower + v * 16 + t * 4);
            const float4 r = *(const float4 *)(upper + v * 16 + t * 4);
#pragma unroll
            for (uint32_t part = 0; part < 2; part++) {
                const uint32_t a[8] = {tf32_part(l.x, part), tf32_part(r.x, part),
                                       tf32_part(l.y, part), tf32_part(r.y, part),
                                       tf32_part(l.z, part), tf32_part(r.z, part),
                                       tf32_part(l.w, part), tf32_part(r.w, part)};
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float4 x = *(const float4 *)(in->floats[n] + v * 16 + t * 4);
                    mma_tf32(acc[n], a, tf32_part(x.x, in->low), tf32_part(x.y, in->low));
                    mma_tf32(acc[n], a + 4, tf32_part(x.z, in->low), tf32_part(x.w, in->low));
                }
            }
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
            put_slice(sums + (slice * NT + n) * 64, acc[n]);
    }
}

/* Slices `slice` … `last` - 1 of a strip to sums[slice][NT * 4 rows][16]. */
template <int TYPE, int NT>
GPU_FN void ring_slices(float *sums, uint8_t *ring, const uint8_t *data, const uint8_t *scale,
                        uint32_t units, const lane_input *in, uint32_t slice, uint32_t last,
                        bool first)
{
    typedef ring_of<TYPE> r;
    const uint32_t begin = slice * units / GPU_SLICES, end = last * units / GPU_SLICES;
    float acc[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < r::stages - 1; i++) {
        if (begin + i < end)
            ring_fetch<TYPE>(ring, data, scale, begin + i, i);
        copy_commit();
    }
    if (first)
        wait_for_previous();
    unit_input<TYPE, NT> x = {}, next = {};
    if (begin < end)
        input_fetch<TYPE, NT>(&next, in, begin);
    uint32_t stage = 0, ahead = r::stages - 1;
#pragma unroll 1
    for (uint32_t u = begin; u < end || slice < last; u++) {
        /* Slices that end here; of a narrow matrix some are empty. */
        while (slice < last && (slice + 1) * units / GPU_SLICES <= u) {
#pragma unroll
            for (int n = 0; n < NT; n++)
                put_slice(sums + (slice * NT + n) * 64, acc[n]);
            slice++;
        }
        if (u >= end)
            break;
        if (u + r::stages - 1 < end)
            ring_fetch<TYPE>(ring, data, scale, u + r::stages - 1, ahead);
        copy_commit();
        x = next;
        if (u + 1 < end)
            input_fetch<TYPE, NT>(&next, in, u + 1);
        copy_wait(r::stages - 1);
        ring_unit<TYPE, NT>(acc, ring + stage * (r::data + r::extra * 32), &x, in->low);
        stage = stage + 1 == r::stages ? 0 : stage + 1;
        ahead = ahead + 1 == r::stages ? 0 : ahead + 1;
    }
}

/* Strip number `strip` of a matrix, all slices, into shared memory: [slice][NT * 4 rows][16
 * outputs], by `warps` warps (a divisor of GPU_SLICES) of which this is number `warp`; add_slices
 * after a sync_block. `first`: nothing was waited for yet; weights may be read before. */
template <int NT>
GPU_FN void strip_product(float *sums, uint8_t *ring, const gpu_weight *w, uint32_t strip,
                          const lane_input *in, uint32_t warp, uint32_t warps, bool first)
{
    const uint32_t units = w->cols / GPU_UNIT, each = GPU_SLICES / warps, slice = warp * each;
    const uint64_t values = (uint64_t)strip * 16 * w->cols;
    if (w->type == GPU_NVFP4)
        ring_slices<GPU_NVFP4, NT>(sums, ring, w->data + values / 2, w->scale + values / 16, units,
                                   in, slice, slice + each, first);
    else if (w->type == GPU_MXFP8)
        ring_slices<GPU_MXFP8, NT>(sums, ring, w->data + values, w->scale + values / 32, units, in,
                                   slice, slice + each, first);
    else if (w->type == GPU_BF16)
        ring_slices<GPU_BF16, NT>(sums, ring, w->data + values * 2, 0, units, in, slice,
                                  slice + each, first);
    else
        strip_f32<NT>(sums, (const float *)w->data + values, w->cols, in, slice, slice + each,
                      first);
}

/* Sum i = row * 16 + output. */
template <int NT> GPU_FN float add_slices(const float *shared, uint32_t i)
{
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < GPU_SLICES; s++)
        sum = add_rn(sum, shared[s * NT * 64 + i]);
    return sum;
}

/* The factor after the sum: the row's scale, and 2^14 for NVFP4. */
GPU_FN float finish(float sum, const gpu_weight *w, float row_scale)
{
    if (w->type == GPU_NVFP4)
        return div_rn(mul_rn(sum, row_scale * 16384.0f), w->global);
    return w->type == GPU_MXFP8 ? mul_rn(sum, row_scale) : sum;
}

GPU_FN uint32_t reads_halves(const gpu_weight *w)
{
    return w->type == GPU_NVFP4 || w->type == GPU_MXFP8;
}

/* The lane's input for columns given by rows[0 … count): row numbers in `in`. A column past the
 * count reads row 0's; nobody takes its sum. */
template <int NT>
GPU_FN lane_input lane_columns(const gpu_input *in, uint32_t cols, const uint32_t *rows,
                               uint32_t count)
{
    const uint32_t g = lane_of() >> 2;
    lane_input out = {{0, 0}, {0, 0}, g & 1};
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const uint32_t c = n * 4 + g / 2;
        const uint64_t row = rows[c < count ? c : 0];
        out.halves[n] = in->halves + row * cols;
        out.floats[n] = in->floats + row * cols;
    }
    return out;
}

template <int NT> GPU_FN void linear_small(const gpu_linear_args *args)
{
    GPU_SHARED float sums[GPU_SLICES * NT * 64];
    launch_dependents();
    uint32_t s = 0;
    while (s + 1 < args->segments && block_x() >= args->segment[s + 1].first_tile)
        s++;
    const gpu_segment *segment = &args->segment[s];
    const uint32_t strip = block_x() - segment->first_tile;
    const uint32_t first = block_y() * NT * 4;
    const uint32_t count = args->rows - first < NT * 4 ? args->rows - first : NT * 4;
    uint32_t rows[NT * 4];
#pragma unroll
    for (uint32_t i = 0; i < NT * 4; i++)
        rows[i] = first + i;
    const lane_input in = lane_columns<NT>(&args->in, args->cols, rows, count);
    strip_product<NT>(sums, dynamic_shared() + warp_of() * RING_BYTES, &segment->w, strip, &in,
                      warp_of(), threads_x() / 32, true);
    sync_block();
    for (uint32_t i = thread_x(); i < count * 16; i += threads_x()) {
        const uint32_t row = first + i / 16;
        const float scale = reads_halves(&segment->w) ? args->in.scale[row] : 1.0f;
        float *y = segment->y + (uint64_t)row * segment->stride + strip * 16 + i % 16;
        const float v = finish(add_slices<NT>(sums, i), &segment->w, scale);
        *y = args->add ? add_rn(*y, v) : v;
    }
}

/* Grid: strips of all segments; rows / 4 (or 8). 1 to 8 warps, RING_BYTES of dynamic shared memory
 * each. */
GPU_DENSE_KERNEL(256, 4) gpu_linear4(gpu_linear_args args)
{
    linear_small<1>(&args);
}

GPU_DENSE_KERNEL(256, 2) gpu_linear8(gpu_linear_args args)
{
    linear_small<2>(&args);
}

/* ---- wide: 128 outputs times 64 columns a block ---- */

#define WIDE_TILES (GPU_WIDE / 4)   /* of the instruction */
#define WIDE_STAGE (GPU_WIDE * 256) /* bytes of x: 64 columns of K, both parts */
#define WIDE_STAGES 3
/* Bytes of the sums of slices, each thread's own. */
#define WIDE_TOTALS (WIDE_TILES * 2 * 256 * 4)
#define WIDE_SHARED (WIDE_STAGES * WIDE_STAGE + WIDE_TOTALS) /* dynamic */

/* A thread's sum i (output g + 8 i) of column n * 4 + t. */
#define WIDE_TOTAL(n, i) total[((n)*2 + (i)) * 256 + thread_x()]

/* One unit of 64 k of the block's rows into shared memory: 16-byte pieces, where those of the low
 * part are permuted so that eight lanes meet eight banks. rows[] in shared memory. */
GPU_FN void wide_fetch(uint8_t *stage, const gpu_input *in, uint32_t cols, const uint32_t *rows,
                       uint32_t count, uint32_t u)
{
#pragma unroll
    for (int i = 0; i < WIDE_STAGE / 16 / 256; i++) {
        const uint32_t piece = i * 256 + thread_x();
        const uint32_t c = piece / 16, part = piece % 16 / 8, k = piece % 8;
        if (c >= (count + 3) / 4 * 4)
            continue;
        const uint64_t row = rows[c < count ? c : 0];
        copy_async16(stage + c * 256 + part * 128 + (k ^ part * 5) * 16,
                     in->halves + row * cols + u * 64 + part * 32 + k * 4);
    }
}

GPU_FN uint4 wide_x(const uint8_t *stage, uint32_t n, uint32_t k)
{
    const uint32_t g = lane_of() >> 2;
    return *(const uint4 *)(stage + (n * 4 + g / 2) * 256 + (g & 1) * 128 + (k ^ (g & 1) * 5) * 16);
}

/* WIDE_TOTAL: the lane's sums. Called by all 256 threads; the strip is the warp's own. */
GPU_FN void wide_product(float *total, const gpu_weight *w, uint32_t strip, const gpu_input *in,
                         const uint32_t *rows, uint32_t count, uint8_t *stages, uint32_t stride)
{
    const uint32_t lane = lane_of(), g = lane >> 2, t = lane & 3;
    const uint32_t units = w->cols / GPU_UNIT;
    const bool nvfp4 = w->type == GPU_NVFP4;
    const uint64_t values = (uint64_t)strip * 16 * w->cols;
    const uint8_t *data = w->data + (nvfp4 ? values / 2 : values) + lane * 16;
    const uint8_t *scale =
        nvfp4 ? w->scale + values / 16 + lane * 2 : w->scale + values / 32 + g * 4;
    const uint32_t tiles = (count + 3) / 4;
    float acc[WIDE_TILES][4];
#pragma unroll
    for (int n = 0; n < WIDE_TILES; n++) {
        WIDE_TOTAL(n, 0) = WIDE_TOTAL(n, 1) = 0.0f;
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    }
    for (uint32_t i = 0; i < WIDE_STAGES - 1; i++) {
        if (i < units)
            wide_fetch(stages + i * WIDE_STAGE, in, stride, rows, count, i);
        copy_commit();
    }
    uint4 next[2] = {load_once(data), {0, 0, 0, 0}};
    uint32_t next_scale = nvfp4 ? *(const uint16_t *)scale : *(const uint32_t *)scale;
    if (!nvfp4)
        next[1] = load_once(data + 512);
    uint32_t slice = 0;
    for (uint32_t u = 0; u < units; u++) {
        const uint4 codes[2] = {next[0], next[1]};
        const uint32_t s = next_scale;
        copy_wait(WIDE_STAGES - 2);
        sync_block();
        if (u + WIDE_STAGES - 1 < units)
            wide_fetch(stages + (u + WIDE_STAGES - 1) % WIDE_STAGES * WIDE_STAGE, in, stride, rows,
                       count, u + WIDE_STAGES - 1);
        copy_commit();
        if (u + 1 < units) {
            next[0] = load_once(data + (uint64_t)(u + 1) * (nvfp4 ? 512 : 1024));
            if (!nvfp4)
                next[1] = load_once(data + (uint64_t)(u + 1) * 1024 + 512);
            next_scale = nvfp4 ? *(const uint16_t *)(scale + (u + 1) * 64)
                               : *(const uint32_t *)(scale + (u + 1) * 32);
        }
        const uint8_t *stage = stages + u % WIDE_STAGES * WIDE_STAGE;
        while ((slice + 1) * units / GPU_SLICES <= u) { /* a slice ended before this unit */
            slice++;
#pragma unroll
            for (int n = 0; n < WIDE_TILES; n++) {
                WIDE_TOTAL(n, 0) = add_rn(WIDE_TOTAL(n, 0), add_rn(acc[n][0], acc[n][1]));
                WIDE_TOTAL(n, 1) = add_rn(WIDE_TOTAL(n, 1), add_rn(acc[n][2], acc[n][3]));
                acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
            }
        }
        if (nvfp4) {
            uint32_t a[4][4];
            nvfp4_tile_halves(a, codes[0], s);
#pragma unroll
            for (int n = 0; n < WIDE_TILES; n++) {
                if (n >= tiles)
                    break;
                const uint4 x = wide_x(stage, n, t * 2), y = wide_x(stage, n, t * 2 + 1);
                mma_f16(acc[n], a[0], x.x, x.y);
                mma_f16(acc[n], a[1], x.z, x.w);
                mma_f16(acc[n], a[2], y.x, y.y);
                mma_f16(acc[n], a[3], y.z, y.w);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint4 c = codes[j];
                const uint32_t a[8] = {h2_of_e4m3(c.x & 0xffff), h2_of_e4m3(c.z & 0xffff),
                                       h2_of_e4m3(c.x >> 16),    h2_of_e4m3(c.z >> 16),
                                       h2_of_e4m3(c.y & 0xffff), h2_of_e4m3(c.w & 0xffff),
                                       h2_of_e4m3(c.y >> 16),    h2_of_e4m3(c.w >> 16)};
                const float lower = float_of((s >> 16 * j & 255) << 23);
                const float upper = float_of((s >> (16 * j + 8) & 255) << 23);
#pragma unroll
                for (int n = 0; n < WIDE_TILES; n++) {
                    if (n >= tiles)
                        break;
                    const uint4 x = wide_x(stage, n, j * 4 + t);
                    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    mma_f16(sum, a, x.x, x.y);
                    mma_f16(sum, a + 4, x.z, x.w);
                    acc[n][0] = fma_rn(sum[0], lower, acc[n][0]);
                    acc[n][1] = fma_rn(sum[1], lower, acc[n][1]);
                    acc[n][2] = fma_rn(sum[2], upper, acc[n][2]);
                    acc[n][3] = fma_rn(sum[3], upper, acc[n][3]);
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < WIDE_TILES; n++) {
        WIDE_TOTAL(n, 0) = add_rn(WIDE_TOTAL(n, 0), add_rn(acc[n][0], acc[n][1]));
        WIDE_TOTAL(n, 1) = add_rn(WIDE_TOTAL(n, 1), add_rn(acc[n][2], acc[n][3]));
    }
    sync_block(); /* the stages are free again */
}

/* One matrix, halves only. Grid: strips / 8, rows / 64. */
GPU_DENSE_KERNEL(256, 2) gpu_linear_wide(gpu_linear_args args)
{
    uint8_t *stages = dynamic_shared();
    GPU_SHARED uint32_t rows[GPU_WIDE];
    launch_dependents();
    wait_for_previous();
    uint32_t s = 0;
    while (s + 1 < args.segments && block_x() * 8 >= args.segment[s + 1].first_tile)
        s++;
    const gpu_segment *segment = &args.segment[s];
    const uint32_t strips = segment->w.rows / 16;
    const uint32_t mine = block_x() * 8 - segment->first_tile + warp_of();
    const uint32_t strip = mine < strips ? mine : strips - 1;
    const uint32_t first = block_y() * GPU_WIDE;
    const uint32_t count = args.rows - first < GPU_WIDE ? args.rows - first : GPU_WIDE;
    if (thread_x() < GPU_WIDE)
        rows[thread_x()] = first + thread_x();
    sync_block();
    float *total = (float *)(stages + WIDE_STAGES * WIDE_STAGE);
    wide_product(total, &segment->w, strip, &args.in, rows, count, stages, args.cols);
    if (mine >= strips)
        return;
    const uint32_t g = lane_of() >> 2, t = lane_of() & 3;
#pragma unroll
    for (int n = 0; n < WIDE_TILES; n++) {
        const uint32_t c = n * 4 + t;
        if (c >= count)
            continue;
        float *y = segment->y + (uint64_t)(first + c) * segment->stride + strip * 16 + g;
        const float scale = args.in.scale[first + c];
        const float a = finish(WIDE_TOTAL(n, 0), &segment->w, scale);
        const float b = finish(WIDE_TOTAL(n, 1), &segment->w, scale);
        y[0] = args.add ? add_rn(y[0], a) : a;
        y[8] = args.add ? add_rn(y[8], b) : b;
    }
}

/* Any shape: a warp an output, lane l adds k = l, l + 32, … in ascending order, then the tree over
 * lanes 16, 8, 4, 2, 1. Grid: outputs / 8, rows. */
GPU_KERNEL(256) gpu_linear_plain(gpu_linear_args args)
{
    wait_for_previous();
    const gpu_segment *segment = &args.segment[0];
    const uint32_t o = block_x() * 8 + warp_of(), r = block_y();
    if (o >= segment->w.rows)
        return;
    const float *x = args.in.floats + (uint64_t)r * args.cols;
    float sum = 0.0f;
    for (uint32_t k = lane_of(); k < args.cols; k += 32)
        sum = fma_rn(x[k], weight_at(&segment->w, o, k), sum);
    for (uint32_t m = 16; m; m /= 2)
        sum = add_rn(sum, shfl_xor(sum, m));
    if (lane_of() == 0) {
        float *y = segment->y + (uint64_t)r * segment->stride + o;
        const float v = div_rn(sum, weight_global(&segment->w));
        *y = args.add ? add_rn(*y, v) : v;
    }
}

/* ---- experts ---- */

/* A tile of pairs: which expert, and the pairs' numbers into `list`. */
GPU_FN uint32_t expert_tile(const gpu_expert_args *args, uint32_t tile, uint32_t most,
                            uint32_t *expert, uint32_t *list)
{
    uint32_t first, count;
    if (args->tiles) {
        if (tile >= *args->tile_count)
            return 0;
        *expert = args->tiles[tile * 3];
        first = args->tiles[tile * 3 + 1];
        count = args->tiles[tile * 3 + 2];
    } else {
        *expert = 0;
        first = tile * most;
        count = args->rows - first < most ? args->rows - first : most;
    }
    if (thread_x() < most)
        list[thread_x()] = thread_x() >= count ? 0
                           : args->pairs       ? args->pairs[first + thread_x()]
                                               : first + thread_x();
    sync_block();
    return count;
}

/* h of a pair at output o, beside its even neighbour where halves are kept. */
GPU_FN void put_h(const gpu_expert_args *args, const gpu_weight *down, uint32_t pair, uint32_t o,
                  float h)
{
    const uint64_t at = (uint64_t)pair * args->h_stride;
    if (!reads_halves(down)) {
        args->h_floats[at + o] = h;
        return;
    }
    uint16_t *row = (uint16_t *)(args->h_halves + at);
    const float v = h * args->h_scale;
    const uint32_t high = h2_of(v, 0.0f);
    row[halves_word(o) * 2 + (o & 1)] = (uint16_t)high;
    row[(halves_word(o) + 32) * 2 + (o & 1)] = (uint16_t)h2_of(v - h_low(high), 0.0f);
}

template <int NT> GPU_FN void expert_up_small(const gpu_expert_args *args)
{
    GPU_SHARED float sums[2 * GPU_SLICES * NT * 64];
    GPU_SHARED uint32_t list[8], rows[8];
    uint32_t expert;
    launch_dependents();
    wait_for_previous();
    const uint32_t count = expert_tile(args, block_y(), NT * 4, &expert, list);
    if (!count)
        return;
    const gpu_weight gate = args->gate[expert], up = args->up[expert];
    if (block_x() * 16 >= gate.rows)
        return;
    if (thread_x() < NT * 4)
        rows[thread_x()] = list[thread_x()] / args->slots;
    sync_block();
    const lane_input in = lane_columns<NT>(&args->in, args->cols, rows, count);
    const uint32_t half = threads_x() / 64, second = warp_of() >= half; /* the gate's warps, up's */
    strip_product<NT>(sums + second * GPU_SLICES * NT * 64,
                      dynamic_shared() + warp_of() * RING_BYTES, second ? &up : &gate, block_x(),
                      &in, warp_of() - second * half, half, false);
    sync_block();
    for (uint32_t i = thread_x(); i < count * 16; i += threads_x()) {
        const uint32_t c = i / 16;
        const float scale = reads_halves(&gate) ? args->in.scale[rows[c]] : 1.0f;
        const float g = finish(add_slices<NT>(sums, i), &gate, scale);
        const float u = finish(add_slices<NT>(sums + GPU_SLICES * NT * 64, i), &up, scale);
        put_h(args, &args->down[expert], list[c], block_x() * 16 + i % 16,
              swiglu(g, u, args->alpha, args->limit));
    }
}

template <int NT> GPU_FN void expert_down_small(const gpu_expert_args *args)
{
    GPU_SHARED float sums[GPU_SLICES * NT * 64];
    GPU_SHARED uint32_t list[8];
    uint32_t expert;
    launch_dependents();
    wait_for_previous();
    const uint32_t count = expert_tile(args, block_y(), NT * 4, &expert, list);
    if (!count)
        return;
    const gpu_weight down = args->down[expert];
    const gpu_input h = {args->h_halves, 0, args->h_floats};
    const lane_input in = lane_columns<NT>(&h, args->h_stride, list, count);
    strip_product<NT>(sums, dynamic_shared() + warp_of() * RING_BYTES, &down, block_x(), &in,
                      warp_of(), threads_x() / 32, false);
    sync_block();
    for (uint32_t i = thread_x(); i < count * 16; i += threads_x())
        args->out[(uint64_t)list[i / 16] * args->hidden + block_x() * 16 + i % 16] =
            finish(add_slices<NT>(sums, i), &down, 1.0f / args->h_scale);
}

/* Grid: strips of the widest expert, tiles of pairs. 1 to 8 warps (2 to 16 for up), RING_BYTES of
 * dynamic shared memory each. */
GPU_DENSE_KERNEL(512, 2) gpu_expert_up4(gpu_expert_args args)
{
    expert_up_small<1>(&args);
}

GPU_DENSE_KERNEL(512, 1) gpu_expert_up8(gpu_expert_args args)
{
    expert_up_small<2>(&args);
}

GPU_DENSE_KERNEL(256, 4) gpu_expert_down4(gpu_expert_args args)
{
    expert_down_small<1>(&args);
}

GPU_DENSE_KERNEL(256, 2) gpu_expert_down8(gpu_expert_args args)
{
    expert_down_small<2>(&args);
}

/* 64 outputs a block: warps 0 to 3 the gate's strips, 4 to 7 the same of up. Grid: strips / 4,
 * tiles of 64 pairs. */
GPU_DENSE_KERNEL(256, 2) gpu_expert_up_wide(gpu_expert_args args)
{
    uint8_t *stages = dynamic_shared();
    GPU_SHARED uint32_t list[GPU_WIDE], rows[GPU_WIDE];
    launch_dependents();
    wait_for_previous();
    uint32_t expert;
    const uint32_t count = expert_tile(&args, block_y(), GPU_WIDE, &expert, list);
    if (!count || block_x() * 64 >= args.gate[expert].rows)
        return;
    if (thread_x() < GPU_WIDE)
        rows[thread_x()] = list[thread_x()] / args.slots;
    sync_block();
    const uint32_t strips = args.gate[expert].rows / 16, mine = block_x() * 4 + warp_of() % 4;
    const uint32_t strip = mine < strips ? mine : strips - 1;
    const gpu_weight w = warp_of() < 4 ? args.gate[expert] : args.up[expert];
    float *total = (float *)(stages + WIDE_STAGES * WIDE_STAGE);
    wide_product(total, &w, strip, &args.in, rows, count, stages, args.cols);
    const uint32_t g = lane_of() >> 2, t = lane_of() & 3;
    float *ups = (float *)stages + warp_of() % 4 * 16 * GPU_WIDE; /* [column][output] */
    if (warp_of() >= 4)
#pragma unroll
        for (int n = 0; n < WIDE_TILES; n++) {
            const uint32_t c = n * 4 + t;
            const float scale = args.in.scale[rows[c]];
            ups[c * 16 + g] = finish(WIDE_TOTAL(n, 0), &w, scale);
            ups[c * 16 + g + 8] = finish(WIDE_TOTAL(n, 1), &w, scale);
        }
    sync_block();
    if (warp_of() >= 4 || mine >= strips)
        return;
#pragma unroll
    for (int n = 0; n < WIDE_TILES; n++) {
        const uint32_t c = n * 4 + t;
        if (c >= count)
            continue;
        const float scale = args.in.scale[rows[c]];
        put_h(&args, &args.down[expert], list[c], strip * 16 + g,
              swiglu(finish(WIDE_TOTAL(n, 0), &w, scale), ups[c * 16 + g], args.alpha, args.limit));
        put_h(&args, &args.down[expert], list[c], strip * 16 + g + 8,
              swiglu(finish(WIDE_TOTAL(n, 1), &w, scale), ups[c * 16 + g + 8], args.alpha,
                     args.limit));
    }
}

/* Grid: strips / 8, tiles of 64 pairs. */
GPU_DENSE_KERNEL(256, 2) gpu_expert_down_wide(gpu_expert_args args)
{
    uint8_t *stages = dynamic_shared();
    GPU_SHARED uint32_t list[GPU_WIDE];
    launch_dependents();
    wait_for_previous();
    uint32_t expert;
    const uint32_t count = expert_tile(&args, block_y(), GPU_WIDE, &expert, list);
    if (!count)
        return;
    const gpu_weight w = args.down[expert];
    const uint32_t strips = w.rows / 16, mine = block_x() * 8 + warp_of();
    const uint32_t strip = mine < strips ? mine : strips - 1;
    /* h_stride may exceed this expert's width: rows lie h_stride apart. */
    const gpu_input h = {args.h_halves, 0, 0};
    float *total = (float *)(stages + WIDE_STAGES * WIDE_STAGE);
    wide_product(total, &w, strip, &h, list, count, stages, args.h_stride);
    if (mine >= strips)
        return;
    const uint32_t g = lane_of() >> 2, t = lane_of() & 3;
#pragma unroll
    for (int n = 0; n < WIDE_TILES; n++) {
        const uint32_t c = n * 4 + t;
        if (c >= count)
            continue;
        float *out = args.out + (uint64_t)list[c] * args.hidden + strip * 16 + g;
        out[0] = finish(WIDE_TOTAL(n, 0), &w, 1.0f / args.h_scale);
        out[8] = finish(WIDE_TOTAL(n, 1), &w, 1.0f / args.h_scale);
    }
}

/* x += the experts' outputs in ascending id, times their weights, then the shared one's. Grid:
 * rows, hidden / 256. With `weights` NULL there is one slot and its weight is 1. */
GPU_KERNEL(256)
gpu_expert_add(float *x, const float *out, const float *weights, uint32_t slots, uint32_t routed,
               uint32_t hidden)
{
    wait_for_previous();
    launch_dependents();
    const uint32_t r = block_x(), k = block_y() * 256 + thread_x();
    if (k >= hidden)
        return;
    const float *at = out + (uint64_t)r * slots * hidden + k;
    float acc = 0.0f;
    for (uint32_t i = 0; i < routed; i++)
        acc = fma_rn(weights[r * routed + i], at[(uint64_t)i * hidden], acc);
    if (slots > routed)
        acc = add_rn(acc, at[(uint64_t)routed * hidden]);
    float *to = x + (uint64_t)r * hidden + k;
    *to = add_rn(*to, acc);
}
