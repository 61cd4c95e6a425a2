/* gpu/rows: what is done to a row of a step between the products: norms, rotations, the insert into
 * pages, routes; and the device's own memory: fills and copies.
 *
 * Sums of a block: a thread adds its own in ascending order; then the tree over lanes 16, 8, 4, 2,
 * 1, then the warps in ascending order. Of a warp (heads): lane i adds k = i, i + 32, …, then
 * the same tree. */
#pragma once
#include "kernels/gpu/linear.h"

GPU_FN float warp_sum(float v)
{
    for (uint32_t m = 16; m; m /= 2)
        v = add_rn(v, shfl_xor(v, m));
    return v;
}

GPU_FN float warp_max(float v)
{
    for (uint32_t m = 16; m; m /= 2)
        v = fmaxf(v, shfl_xor(v, m));
    return v;
}

/* Of a whole block; `shared`: a float a warp. */
GPU_FN float block_sum(float v, float *shared)
{
    v = warp_sum(v);
    sync_block();
    if (lane_of() == 0)
        shared[warp_of()] = v;
    sync_block();
    float sum = shared[0];
    for (uint32_t i = 1; i < threads_x() / 32; i++)
        sum = add_rn(sum, shared[i]);
    return sum;
}

GPU_FN float block_max(float v, float *shared)
{
    v = warp_max(v);
    sync_block();
    if (lane_of() == 0)
        shared[warp_of()] = v;
    sync_block();
    float most = shared[0];
    for (uint32_t i = 1; i < threads_x() / 32; i++)
        most = fmaxf(most, shared[i]);
    return most;
}

/* Sum of v over the threads before this one; *all: over all. `shared`: 32 words. */
GPU_FN uint32_t block_before(uint32_t v, uint32_t *shared, uint32_t *all)
{
    uint32_t sum = v;
    for (uint32_t by = 1; by < 32; by *= 2) {
        const uint32_t other = shfl_up_u(sum, by);
        sum += lane_of() >= by ? other : 0;
    }
    sync_block();
    if (lane_of() == 31)
        shared[warp_of()] = sum;
    sync_block();
    uint32_t before = 0, total = 0;
    for (uint32_t i = 0; i < threads_x() / 32; i++) {
        before += i < warp_of() ? shared[i] : 0;
        total += shared[i];
    }
    *all = total;
    return before + sum - v;
}

GPU_FN float inverse_rms(float squares, uint32_t n, float eps)
{
    return div_rn(1.0f, sqrt_rn(add_rn(div_rn(squares, (float)n), eps)));
}

typedef struct gpu_norm_args {
    const float *x, *w;   /* w NULL: x as it is */
    const uint32_t *pick; /* NULL, or which row of x each row reads */
    uint32_t cols;
    float eps;
    float *y;         /* NULL, or [rows, cols]; may be x */
    uint32_t *halves; /* NULL, or as gpu/linear.h wants them, and */
    float *scale;     /* [rows] */
} gpu_norm_args;

#define NORM_THREADS 512
#define NORM_KEPT 16 /* values a thread keeps: rows of up to 8,192 are read once */

/* Grid: rows. cols even where halves are asked for. Thread i takes the pairs i, i + 512, …; sums as
 * above, of 16 warps. */
GPU_KERNEL(NORM_THREADS) gpu_norm(gpu_norm_args args)
{
    GPU_SHARED float shared[NORM_THREADS / 32];
    launch_dependents();
    const uint32_t r = block_x(), i = thread_x();
    float kept[NORM_KEPT], gain[NORM_KEPT];
    if (args.w)
#pragma unroll
        for (int j = 0; j < NORM_KEPT; j++) {
            const uint32_t k = (i + j / 2 * NORM_THREADS) * 2 + j % 2;
            gain[j] = k < args.cols ? add_rn(1.0f, args.w[k]) : 0.0f;
        }
    wait_for_previous();
    const float *x = args.x + (uint64_t)(args.pick ? args.pick[r] : r) * args.cols;
#pragma unroll
    for (int j = 0; j < NORM_KEPT; j++) {
        const uint32_t k = (i + j / 2 * NORM_THREADS) * 2 + j % 2;
        kept[j] = k < args.cols ? x[k] : 0.0f;
    }
    float rs = 1.0f;
    if (args.w) {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < NORM_KEPT; j++)
            squares = fma_rn(kept[j], kept[j], squares);
        for (uint32_t k = NORM_KEPT * NORM_THREADS + i; k < args.cols; k += NORM_THREADS)
            squares = fma_rn(x[k], x[k], squares);
        rs = inverse_rms(block_sum(squares, shared), args.cols, args.eps);
#pragma unroll
        for (int j = 0; j < NORM_KEPT; j++)
            kept[j] = mul_rn(mul_rn(kept[j], rs), gain[j]);
    }
#define FAR(k) (args.w ? mul_rn(mul_rn(x[k], rs), add_rn(1.0f, args.w[k])) : x[k])
    float *y = args.y ? args.y + (uint64_t)r * args.cols : 0;
    if (args.halves) {
        float most = 0.0f, factor, inverse;
#pragma unroll
        for (int j = 0; j < NORM_KEPT; j++)
            most = fmaxf(most, fabsf(kept[j]));
        for (uint32_t k = NORM_KEPT * NORM_THREADS + i; k < args.cols; k += NORM_THREADS)
            most = fmaxf(most, fabsf(FAR(k)));
        halves_scale(block_max(most, shared), &factor, &inverse);
        uint32_t *row = args.halves + (uint64_t)r * args.cols;
#pragma unroll
        for (int j = 0; j < NORM_KEPT; j += 2) {
            const uint32_t k = (i + j / 2 * NORM_THREADS) * 2;
            if (k < args.cols)
                halves_put(row, k, kept[j] * factor, kept[j + 1] * factor);
        }
        for (uint32_t k = NORM_KEPT * NORM_THREADS + i * 2; k < args.cols; k += NORM_THREADS * 2)
            halves_put(row, k, FAR(k) * factor, FAR(k + 1) * factor);
        if (i == 0)
            args.scale[r] = inverse;
    }
    if (y) {
        /* y may be x: what lies far is read above by other threads, and here. */
        sync_block();
#pragma unroll
        for (int j = 0; j < NORM_KEPT; j++) {
            const uint32_t k = (i + j / 2 * NORM_THREADS) * 2 + j % 2;
            if (k < args.cols)
                y[k] = kept[j];
        }
        for (uint32_t k = NORM_KEPT * NORM_THREADS + i; k < args.cols; k += NORM_THREADS)
            y[k] = FAR(k);
    }
#undef FAR
}

/* Grid: rows. Ids outside the table are the caller's bug. */
GPU_KERNEL(256) gpu_embed(float *y, gpu_weight table, const int32_t *ids)
{
    launch_dependents();
    wait_for_previous();
    const uint32_t r = block_x();
    for (uint32_t k = thread_x(); k < table.cols; k += 256)
        y[(uint64_t)r * table.cols + k] =
            div_rn(weight_at(&table, (uint32_t)ids[r], k), weight_global(&table));
}

/* ---- heads ---- */

typedef struct gpu_rope {
    const float *cos, *sin;
    uint32_t rotary_dim;
} gpu_rope;

/* One head by one warp: norm by w (NULL: none), rotation at `pos`. `head` is the warp's shared
 * memory. */
GPU_FN void head_prepare(float *head, const float *x, const float *w, uint32_t dim, float eps,
                         const gpu_rope *rope, int32_t pos)
{
    const uint32_t lane = lane_of();
    float rs = 1.0f;
    if (w) {
        float squares = 0.0f;
        for (uint32_t k = lane; k < dim; k += 32)
            squares = fma_rn(x[k], x[k], squares);
        rs = inverse_rms(warp_sum(squares), dim, eps);
    }
    for (uint32_t k = lane; k < dim; k += 32)
        head[k] = w ? mul_rn(mul_rn(x[k], rs), add_rn(1.0f, w[k])) : x[k];
    sync_warp();
    const uint32_t half = rope->rotary_dim / 2;
    for (uint32_t i = lane; i < half; i += 32) {
        const float c = rope->cos[(uint64_t)pos * half + i],
                    s = rope->sin[(uint64_t)pos * half + i];
        const float a = head[i], b = head[i + half];
        head[i] = fma_rn(a, c, -mul_rn(b, s));
        head[i + half] = fma_rn(b, c, mul_rn(a, s));
    }
    sync_warp();
}

/* In place. Grid: rows * heads / 8. */
GPU_KERNEL(256)
gpu_head_norm_rope(float *x, const float *w, uint32_t count, uint32_t heads, uint32_t dim,
                   float eps, gpu_rope rope, const int32_t *pos)
{
    GPU_SHARED float head[8][GPU_HEAD_DIM_MAX];
    launch_dependents();
    wait_for_previous();
    const uint32_t at = block_x() * 8 + warp_of();
    if (at >= count)
        return;
    float *mine = head[warp_of()], *row = x + (uint64_t)at * dim;
    head_prepare(mine, row, w, dim, eps, &rope, rope.rotary_dim ? pos[at / heads] : 0);
    for (uint32_t k = lane_of(); k < dim; k += 32)
        row[k] = mine[k];
}

/* Queries as the page type wants them. */
GPU_FN float round_query(float q, uint32_t type)
{
    if (type == GPU_KV_F32)
        return q;
    q = round_bf16(q);
    return type == GPU_KV_BF16 ? q : round_e4m3(q);
}

/* A row into its place in a page, by one warp. */
GPU_FN void store_row(uint8_t *dst, const float *x, uint32_t dims, uint32_t type)
{
    const uint32_t lane = lane_of();
    if (type == GPU_KV_NVFP4) {
        for (uint32_t group = lane; group < dims / 16; group += 32) {
            float v[16];
            uint32_t codes[2];
            for (int i = 0; i < 16; i++)
                v[i] = round_bf16(x[group * 16 + i]);
            nvfp4_quantize16(codes, dst + dims / 2 + group, v);
            ((uint32_t *)dst)[group * 2] = codes[0];
            ((uint32_t *)dst)[group * 2 + 1] = codes[1];
        }
        return;
    }
    for (uint32_t k = lane; k < dims; k += 32) {
        if (type == GPU_KV_FP8)
            dst[k] = (uint8_t)f32_to_e4m3(round_bf16(x[k]));
        else if (type == GPU_KV_BF16)
            ((uint16_t *)dst)[k] = f32_to_bf16(x[k]);
        else
            ((float *)dst)[k] = x[k];
    }
}

GPU_FN float load_value(const uint8_t *row, uint32_t k, uint32_t dims, uint32_t type)
{
    switch (type) {
    case GPU_KV_NVFP4:
        return nvfp4_read(row[k / 2] >> 4 * (k & 1) & 15, row[dims / 2 + k / 16]);
    case GPU_KV_FP8:
        return e4m3_to_f32(row[k]);
    case GPU_KV_BF16:
        return bf16_to_f32(((const uint16_t *)row)[k]);
    default:
        return ((const float *)row)[k];
    }
}

/* Plane `plane` (K heads, V heads, index) of the page that holds a position: its row there. */
GPU_FN uint8_t *page_row(const gpu_pages *kv, uint32_t page, uint32_t plane, uint32_t pos)
{
    const uint32_t bytes = plane == 2 * kv->kv_heads ? kv->index_row_bytes : kv->row_bytes;
    return kv->base + page * kv->page_bytes + kv->layer_offset +
           (uint64_t)plane * kv->row_bytes * 128 + (uint64_t)(pos % 128) * bytes;
}

GPU_FN uint32_t page_of(const gpu_rows *rows, uint32_t seq, uint32_t pos)
{
    return rows->pages[rows->first[seq] + pos / 128];
}

typedef struct gpu_insert_args {
    gpu_rows rows;
    gpu_pages kv;
    const float *y; /* [rows, stride]: q, k, v, index q, index k as the products left them */
    uint32_t stride, q_heads, index_heads;
    float eps;
    const float *q_norm, *k_norm, *index_q_norm, *index_k_norm;
    gpu_rope rope;
    float *q_out, *index_q_out;
} gpu_insert_args;

/* A warp a head. Grid: heads of all kinds / 8, rows. */
GPU_KERNEL(256) gpu_insert(gpu_insert_args a)
{
    GPU_SHARED float head[8][GPU_HEAD_DIM_MAX];
    launch_dependents();
    wait_for_previous();
    const uint32_t n = a.kv.kv_heads,
                   heads = a.q_heads + 2 * n + (a.index_heads ? a.index_heads + 1 : 0);
    uint32_t h = block_x() * 8 + warp_of();
    const uint32_t r = block_y();
    if (h >= heads)
        return;
    float *mine = head[warp_of()];
    const float *y = a.y + (uint64_t)r * a.stride;
    const int32_t pos = a.rows.pos[r];
    const uint32_t page = page_of(&a.rows, a.rows.seq[r], (uint32_t)pos), dim = a.kv.head_dim;
    const gpu_rope none = {0, 0, 0};
    if (h < a.q_heads) {
        head_prepare(mine, y + h * dim, a.q_norm, dim, a.eps, &a.rope, pos);
        for (uint32_t k = lane_of(); k < dim; k += 32)
            a.q_out[((uint64_t)r * a.q_heads + h) * dim + k] = round_query(mine[k], a.kv.type);
        return;
    }
    y += a.q_heads * dim;
    h -= a.q_heads;
    if (h < 2 * n) {
        head_prepare(mine, y + h * dim, h < n ? a.k_norm : 0, dim, a.eps, h < n ? &a.rope : &none,
                     pos);
        store_row(page_row(&a.kv, page, h, (uint32_t)pos), mine, dim, a.kv.type);
        return;
    }
    y += 2 * n * dim;
    h -= 2 * n;
    const uint32_t index_dim = a.kv.index_dim;
    if (h < a.index_heads) {
        head_prepare(mine, y + h * index_dim, a.index_q_norm, index_dim, a.eps, &a.rope, pos);
        for (uint32_t k = lane_of(); k < index_dim; k += 32)
            a.index_q_out[((uint64_t)r * a.index_heads + h) * index_dim + k] =
                round_query(mine[k], a.kv.type);
        return;
    }
    head_prepare(mine, y + h * index_dim, a.index_k_norm, index_dim, a.eps, &a.rope, pos);
    store_row(page_row(&a.kv, page, 2 * n, (uint32_t)pos), mine, index_dim, a.kv.type);
}

/* K and V as they come. Grid: 2 kv heads / 8 rounded up, rows. */
GPU_KERNEL(256) gpu_kv_put(gpu_rows rows, gpu_pages kv, const float *k, const float *v)
{
    launch_dependents();
    wait_for_previous();
    const uint32_t h = block_x() * 8 + warp_of(), r = block_y(), n = kv.kv_heads;
    if (h >= 2 * n)
        return;
    const uint32_t pos = (uint32_t)rows.pos[r];
    const float *x = (h < n ? k : v) + ((uint64_t)r * n + h % n) * kv.head_dim;
    store_row(page_row(&kv, page_of(&rows, rows.seq[r], pos), h, pos), x, kv.head_dim, kv.type);
}

/* ---- routes ---- */

#define ROUTER_SLICES 32 /* of 16 columns each or a multiple */

/* The router's products: F32 weights as gpu/linear.h has them, but in 32 slices of K, cut at
 * multiples of 16, so that many blocks share it: part [32][rows][experts]. Grid: experts / 16,
 * rows / 8, 4. */
GPU_KERNEL(256)
gpu_router(const float *router, const float *x, uint32_t cols, uint32_t rows, uint32_t experts,
           float *part)
{
    launch_dependents();
    const uint32_t units = cols / 16, slice = block_z() * 8 + warp_of();
    const uint32_t u = slice * units / ROUTER_SLICES, end = (slice + 1) * units / ROUTER_SLICES;
    const uint32_t lane = lane_of(), g = lane >> 2, t = lane & 3, first = block_y() * 8;
    const float *lower = router + (uint64_t)(block_x() * 16 + g) * cols + t * 4;
    const float *upper = lower + (uint64_t)8 * cols;
    const float *in[2];
    for (uint32_t n = 0; n < 2; n++) {
        const uint32_t r = first + n * 4 + g / 2;
        in[n] = x + (uint64_t)(r < rows ? r : first) * cols + t * 4;
    }
    const uint32_t low = g & 1;
    float acc[2][4] = {};
#define DEPTH 12 /* as much as a slice of M3.1 has: all loads are under way at once */
    for (uint32_t v = u; v < end; v += DEPTH) {
        float4 l[DEPTH], r[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const uint32_t at = v + i < end ? v + i : end - 1;
            l[i] = *(const float4 *)(lower + at * 16);
            r[i] = *(const float4 *)(upper + at * 16);
        }
        if (v == u)
            wait_for_previous();
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (v + i >= end)
                break;
#pragma unroll
            for (uint32_t p = 0; p < 2; p++) {
                const uint32_t a[8] = {tf32_part(l[i].x, p), tf32_part(r[i].x, p),
                                       tf32_part(l[i].y, p), tf32_part(r[i].y, p),
                                       tf32_part(l[i].z, p), tf32_part(r[i].z, p),
                                       tf32_part(l[i].w, p), tf32_part(r[i].w, p)};
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float4 f = *(const float4 *)(in[n] + (v + i) * 16);
                    mma_tf32(acc[n], a, tf32_part(f.x, low), tf32_part(f.y, low));
                    mma_tf32(acc[n], a + 4, tf32_part(f.z, low), tf32_part(f.w, low));
                }
            }
        }
    }
#undef DEPTH
    wait_for_previous();
    for (uint32_t n = 0; n < 2; n++) {
        const uint32_t r = first + n * 4 + t;
        if (r >= rows)
            continue;
        float *to = part + ((uint64_t)slice * rows + r) * experts + block_x() * 16 + g;
        to[0] = add_rn(acc[n][0], acc[n][1]);
        to[8] = add_rn(acc[n][2], acc[n][3]);
    }
}

typedef struct gpu_route_args {
    const float *logits; /* [slices, rows, experts], to be added in ascending order */
    const float *bias;   /* [experts] */
    uint32_t slices, rows, experts, topk;
    float routed_scale;
    int32_t *ids;   /* [rows, topk], ascending */
    float *weights; /* [rows, topk] */
} gpu_route_args;

/* A block a row: a thread an expert, then the first warp takes the topk of p + bias, ties to the
 * lower id. Grid: rows. Experts up to 1,024. */
GPU_KERNEL(256) gpu_route(gpu_route_args a)
{
    GPU_SHARED float p[1024];
    launch_dependents();
    wait_for_previous();
    const uint32_t r = block_x(), lane = lane_of();
    for (uint32_t e = thread_x(); e < a.experts; e += threads_x()) {
        float sum = 0.0f;
        if (a.slices == ROUTER_SLICES) {
            float v[ROUTER_SLICES];
#pragma unroll
            for (uint32_t s = 0; s < ROUTER_SLICES; s++)
                v[s] = a.logits[((uint64_t)s * a.rows + r) * a.experts + e];
#pragma unroll
            for (uint32_t s = 0; s < ROUTER_SLICES; s++)
                sum = add_rn(sum, v[s]);
        } else {
            sum = a.logits[(uint64_t)r * a.experts + e];
        }
        p[e] = sigmoid(sum);
    }
    sync_block();
    if (warp_of())
        return;
    uint32_t taken = 0; /* bit i: expert lane + 32 i */
    for (uint32_t i = 0; i < a.topk; i++) {
        float best = -GPU_INFINITY;
        uint32_t id = 0xffffffffu;
        for (uint32_t e = lane; e < a.experts; e += 32) {
            const float v = add_rn(p[e], a.bias[e]);
            if (!(taken >> e / 32 & 1) && (id == 0xffffffffu || v > best)) {
                best = v;
                id = e;
            }
        }
        for (uint32_t m = 16; m; m /= 2) {
            const float other = shfl_xor(best, m);
            const uint32_t other_id = shfl_xor_u(id, m);
            if (other_id != 0xffffffffu &&
                (id == 0xffffffffu || other > best || (other == best && other_id < id))) {
                best = other;
                id = other_id;
            }
        }
        if (id % 32 == lane)
            taken |= 1u << id / 32;
    }
    /* Ascending ids: expert 32 i + lane comes after all of lower i and lower lanes of the same. */
    uint32_t before = 0, mine = 0;
    float total = 0.0f;
    for (uint32_t i = 0; i * 32 < a.experts; i++)
        for (uint32_t left = ballot(taken >> i & 1); left; left &= left - 1) {
            const uint32_t id = i * 32 + lowest_bit(left);
            total = add_rn(total, p[id]);
            if (before == lane)
                mine = id;
            before++;
        }
    if (lane < a.topk) {
        a.ids[(uint64_t)r * a.topk + lane] = (int32_t)mine;
        a.weights[(uint64_t)r * a.topk + lane] = mul_rn(div_rn(p[mine], total), a.routed_scale);
    }
}

typedef struct gpu_group_args {
    const int32_t *ids;
    uint32_t rows, experts, topk, slots; /* slots: topk, and one if there is a shared expert */
    uint32_t most;                       /* pairs of a tile */
    uint32_t *pairs, *tiles, *tile_count;
} gpu_group_args;

/* Pairs sorted by expert, cut into tiles; the shared expert, the largest, first. One block of more
 * threads than experts, which are at most 1,023. */
GPU_KERNEL(1024) gpu_group(gpu_group_args a)
{
    GPU_SHARED uint32_t count[1024], at[1024], shared[32];
    launch_dependents();
    wait_for_previous();
    const uint32_t i = thread_x(), e = i ? i - 1 : a.experts;
    count[i] = 0;
    sync_block();
    for (uint32_t p = i; p < a.rows * a.topk; p += threads_x())
        add_shared(&count[a.ids[p]], 1);
    sync_block();
    uint32_t mine = 0, all;
    if (i <= a.experts)
        mine = i ? count[e] : a.slots > a.topk ? a.rows : 0;
    const uint32_t first = block_before(mine, shared, &all);
    const uint32_t tile = block_before((mine + a.most - 1) / a.most, shared, &all);
    for (uint32_t n = 0; n * a.most < mine; n++) {
        uint32_t *to = a.tiles + (tile + n) * 3;
        to[0] = e;
        to[1] = first + n * a.most;
        to[2] = mine - n * a.most < a.most ? mine - n * a.most : a.most;
    }
    if (i <= a.experts)
        at[e] = first;
    if (i == 0)
        *a.tile_count = all;
    sync_block();
    if (a.slots > a.topk)
        for (uint32_t r = i; r < a.rows; r += threads_x())
            a.pairs[at[a.experts] + r] = r * a.slots + a.topk;
    for (uint32_t p = i; p < a.rows * a.topk; p += threads_x())
        a.pairs[add_shared(&at[a.ids[p]], 1)] = p / a.topk * a.slots + p % a.topk;
}

/* ---- memory ---- */

GPU_FN uint32_t mul_high(uint32_t a, uint32_t b)
{
    return (uint32_t)((uint64_t)a * b >> 32);
}

/* 16 bytes a thread by Philox4x32-10 (engine/base/rand.h), through the table. */
GPU_KERNEL(256)
gpu_fill(uint8_t *dst, uint64_t bytes, uint64_t seed, uint64_t stream, const uint8_t *table)
{
    const uint64_t i = (uint64_t)block_x() * 256 + thread_x();
    if (i * 16 >= bytes)
        return;
    uint32_t c[4] = {(uint32_t)i, (uint32_t)(i >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint32_t low0 = 0xd2511f53u * c[0], high0 = mul_high(0xd2511f53u, c[0]);
        const uint32_t low1 = 0xcd9e8d57u * c[2], high1 = mul_high(0xcd9e8d57u, c[2]);
        c[0] = high1 ^ c[1] ^ k0;
        c[1] = low1;
        c[2] = high0 ^ c[3] ^ k1;
        c[3] = low0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    for (uint32_t j = 0; j < 16 && i * 16 + j < bytes; j++)
        dst[i * 16 + j] = table[c[j / 4] >> 8 * (j % 4) & 255];
}

/* Rows [0, tokens) of every plane of a page. Grid: planes of all layers. `offsets`: where each
 * plane begins in a page, and its bytes a row. */
GPU_KERNEL(256)
gpu_copy_page(uint8_t *to, const uint8_t *from, const uint64_t *offsets, uint32_t tokens)
{
    const uint64_t at = offsets[block_x() * 2];
    const uint32_t bytes = (uint32_t)offsets[block_x() * 2 + 1] * tokens;
    for (uint32_t i = thread_x() * 4; i < bytes; i += 1024)
        *(uint32_t *)(to + at + i) = *(const uint32_t *)(from + at + i);
}
