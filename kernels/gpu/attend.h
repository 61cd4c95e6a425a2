/* gpu/attend: the index scan, the choice of blocks, and attention over pages.
 *
 * Attention, the written reduction: each block of 128 positions apart: s = scale * dot; m its
 * largest; p = gpu_exp(s - m), 0 where masked; l the sum of p; o = sum of p v. Blocks are merged in
 * ascending number: M' = max(M, m), c = exp(M - M'), d = exp(m - M'): L = L c + l d, O = O c + o d.
 * At the end O / L. Who computes a block, and when, changes nothing. */
#pragma once
#include "kernels/gpu/rows.h"

#define GPU_GROUP_MAX 16 /* query heads of a kv head */

typedef struct gpu_select_args {
    gpu_rows rows;
    gpu_pages kv;
    const float *index_q;
    uint32_t heads, topk, init, local;
    float *score;    /* [rows, heads, stride] */
    uint32_t stride; /* at least the blocks of the longest context */
    int32_t *blocks;
    float *margin;
} gpu_select_args;

/* ---- scores ---- */

/* Any page type: a thread a key, d ascending; a warp's largest, then the block's. Grid: blocks of
 * the context (more are skipped), rows. 128 threads. */
GPU_KERNEL(128) gpu_index_scan(gpu_select_args a)
{
    GPU_SHARED float q[GPU_HEAD_DIM_MAX], most[4];
    wait_for_previous();
    launch_dependents();
    const uint32_t b = block_x(), r = block_y(), pos = (uint32_t)a.rows.pos[r];
    if (b > pos / 128)
        return;
    const uint32_t u = b * 128 + thread_x(), dim = a.kv.index_dim;
    const uint8_t *row =
        page_row(&a.kv, page_of(&a.rows, a.rows.seq[r], b * 128), 2 * a.kv.kv_heads, thread_x());
    for (uint32_t h = 0; h < a.heads; h++) {
        for (uint32_t k = thread_x(); k < dim; k += 128)
            q[k] = a.index_q[((uint64_t)r * a.heads + h) * dim + k];
        sync_block();
        float dot = 0.0f;
        if (u <= pos)
            for (uint32_t k = 0; k < dim; k++)
                dot = fma_rn(q[k], load_value(row, k, dim, a.kv.type), dot);
        const float v = warp_max(u <= pos ? dot : -GPU_INFINITY);
        if (lane_of() == 0)
            most[warp_of()] = v;
        sync_block();
        if (thread_x() == 0)
            a.score[((uint64_t)r * a.heads + h) * a.stride + b] =
                fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
        sync_block();
    }
}

/* Halves of the eight codes of a word as pages keep them, with the second rounding: pair i is codes
 * i and i + 4. `scale`: the e4m3 scale as a half, twice. */
GPU_FN void page_halves(uint32_t out[4], uint32_t w, uint32_t scale)
{
    out[0] = (w << 9 & 0x0e000e00u) | (w << 12 & 0x80008000u);
    out[1] = (w << 5 & 0x0e000e00u) | (w << 8 & 0x80008000u);
    out[2] = (w << 1 & 0x0e000e00u) | (w << 4 & 0x80008000u);
    out[3] = (w >> 3 & 0x0e000e00u) | (w & 0x80008000u);
#pragma unroll
    for (int i = 0; i < 4; i++) /* 0x7400: 2^14, what the codes' place in a half leaves out */
        out[i] = h2_of_e4m3(e4m3_of_h2(h2_mul(h2_mul(out[i], 0x74007400u), scale)));
}

/* A lane's share of a query of DIM values for page_halves' order: t covers DIM / 4 of them. */
template <int DIM> GPU_FN void query_halves(uint32_t out[DIM / 8], const float *q)
{
    const float *mine = q + (lane_of() & 3) * (DIM / 4);
#pragma unroll
    for (int i = 0; i < DIM / 8; i++) { /* word i / 4, pair i % 4 */
        const int k = i / 4 * 8 + i % 4;
        out[i] = h2_of(mine[k], mine[k + 4]);
    }
}

/* 16 keys times 8 queries. `rows`: the first key's row; keys are row_bytes apart. */
template <int DIM, int NT>
GPU_FN void keys_times(float acc[NT][4], const uint8_t *rows, const uint32_t q[NT][DIM / 8])
{
    const uint32_t g = lane_of() >> 2, t = lane_of() & 3;
    const uint32_t bytes = DIM / 2 + DIM / 16;
    uint32_t words[2][DIM / 32], scales[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint8_t *row = rows + (g + 8 * i) * bytes;
#pragma unroll
        for (int j = 0; j < DIM / 32; j += 2) {
            const uint8_t *at = row + t * (DIM / 8) + j * 4;
            if (DIM == 128) { /* rows of 72 bytes; those of 36 lie at multiples of 4 */
                const uint2 v = *(const uint2 *)at;
                words[i][j] = v.x;
                words[i][j + 1] = v.y;
            } else {
                words[i][j] = *(const uint32_t *)at;
                words[i][j + 1] = *(const uint32_t *)(at + 4);
            }
        }
        /* DIM / 64 groups of 16 a lane */
        scales[i] = DIM == 128 ? *(const uint16_t *)(row + DIM / 2 + t * 2) : row[DIM / 2 + t];
        scales[i] = h2_of_e4m3(scales[i]);
    }
#pragma unroll
    for (int j = 0; j < DIM / 32; j++) {
        uint32_t lower[4], upper[4];
        const uint32_t half = j < 2 ? 0x1010 : 0x3232;
        page_halves(lower, words[0][j], pick_bytes(scales[0], scales[0], half));
        page_halves(upper, words[1][j], pick_bytes(scales[1], scales[1], half));
#pragma unroll
        for (int p = 0; p < 4; p += 2) {
            const uint32_t a[4] = {lower[p], upper[p], lower[p + 1], upper[p + 1]};
#pragma unroll
            for (int n = 0; n < NT; n++)
                mma_f16(acc[n], a, q[n][j * 4 + p], q[n][j * 4 + p + 1]);
        }
    }
}

/* NVFP4 pages: a warp a block at a time, 16 keys a product. Grid: any, rows. 128 threads. */
template <int DIM> GPU_FN void index_scan_nvfp4(const gpu_select_args *a)
{
    const uint32_t r = block_y(), pos = (uint32_t)a->rows.pos[r], g = lane_of() >> 2,
                   t = lane_of() & 3;
    uint32_t q[1][DIM / 8];
    query_halves<DIM>(q[0], a->index_q + ((uint64_t)r * a->heads + (g < a->heads ? g : 0)) * DIM);
    for (uint32_t b = block_x() * 4 + warp_of(); b <= pos / 128; b += blocks_x() * 4) {
        const uint8_t *rows =
            page_row(&a->kv, page_of(&a->rows, a->rows.seq[r], b * 128), 2 * a->kv.kv_heads, 0);
        float most[2] = {-GPU_INFINITY, -GPU_INFINITY};
        const uint32_t seen = pos - b * 128 < 127 ? pos - b * 128 : 127; /* last visible key */
#pragma unroll 4
        for (uint32_t i = 0; i < 8; i++) {
            float acc[1][4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
            keys_times<DIM, 1>(acc, rows + i * 16 * (DIM / 2 + DIM / 16), q);
            if (i * 16 + g <= seen) {
                most[0] = fmaxf(most[0], acc[0][0]);
                most[1] = fmaxf(most[1], acc[0][1]);
            }
            if (i * 16 + g + 8 <= seen) {
                most[0] = fmaxf(most[0], acc[0][2]);
                most[1] = fmaxf(most[1], acc[0][3]);
            }
        }
        for (uint32_t m = 4; m < 32; m *= 2) {
            most[0] = fmaxf(most[0], shfl_xor(most[0], m));
            most[1] = fmaxf(most[1], shfl_xor(most[1], m));
        }
        for (uint32_t i = 0; i < 2; i++)
            if (g == 0 && t * 2 + i < a->heads)
                a->score[((uint64_t)r * a->heads + t * 2 + i) * a->stride + b] = most[i];
    }
}

GPU_KERNEL(128) gpu_index_scan64(gpu_select_args a)
{
    wait_for_previous();
    launch_dependents();
    index_scan_nvfp4<64>(&a);
}

GPU_KERNEL(128) gpu_index_scan128(gpu_select_args a)
{
    wait_for_previous();
    launch_dependents();
    index_scan_nvfp4<128>(&a);
}

/* ---- the choice ---- */

/* Order of a score, as an unsigned number; with the block's number below it, larger is better and
 * equal scores go to the lower block. 0 is nothing. */
GPU_FN uint64_t rank_of(float score, uint32_t block)
{
    const uint32_t u = bits_of(score);
    return (uint64_t)(u >> 31 ? ~u : u | 0x80000000u) << 32 | (0xffffffffu - block);
}

GPU_FN float score_of(uint64_t rank)
{
    const uint32_t u = (uint32_t)(rank >> 32);
    return float_of(u >> 31 ? u & 0x7fffffffu : ~u);
}

GPU_FN uint64_t warp_best(uint64_t v)
{
    for (uint32_t m = 16; m; m /= 2) {
        const uint64_t other =
            (uint64_t)shfl_xor_u((uint32_t)(v >> 32), m) << 32 | shfl_xor_u((uint32_t)v, m);
        v = other > v ? other : v;
    }
    return v;
}

/* Each of 8 warps takes the best of its eighth, the first warp the best of those. Grid: heads,
 * rows. The loop of a warp: the lane whose best was taken looks for its next. */
GPU_KERNEL(256) gpu_choose(gpu_select_args a)
{
    GPU_SHARED uint64_t best[8 * (GPU_TOPK_MAX + 1)];
    GPU_SHARED int32_t chosen[GPU_TOPK_MAX];
    wait_for_previous();
    launch_dependents();
    const uint32_t h = block_x(), r = block_y(), lane = lane_of();
    const uint32_t own = (uint32_t)a.rows.pos[r] / 128, count = own + 1;
    const float *score = a.score + ((uint64_t)r * a.heads + h) * a.stride;
    /* Forced: the first `init`, and own - local + 1 … own. */
    const uint32_t init = a.init < count ? a.init : count;
    const uint32_t near = own + 1 > a.local ? own + 1 - a.local : 0;
    const uint32_t from = init, to = near > init ? near : init; /* the contest's blocks */
    const uint32_t forced = init + (count - to);
    const uint32_t wanted = a.topk - forced + 1; /* and the first one left out */
    const uint32_t part = (to - from + 7) / 8, first = from + warp_of() * part;
    const uint32_t end = first + part < to ? first + part : to;
    uint64_t mine = 0;
    for (uint32_t b = first + lane; b < end; b += 32)
        mine = rank_of(score[b], b) > mine ? rank_of(score[b], b) : mine;
    for (uint32_t i = 0; i < wanted; i++) {
        const uint64_t top = warp_best(mine);
        if (lane == 0)
            best[warp_of() * wanted + i] = top;
        if (top && mine == top) {
            mine = 0;
            for (uint32_t b = first + lane; b < end; b += 32) {
                const uint64_t rank = rank_of(score[b], b);
                mine = rank < top && rank > mine ? rank : mine;
            }
        }
    }
    sync_block();
    if (warp_of())
        return;
    uint64_t last = 0, next = 0;
    uint32_t n = 0;
    uint32_t head = 0; /* lanes 0 to 7: how much of a warp's list was taken */
    for (uint32_t i = 0; i < wanted; i++) {
        const uint64_t top = warp_best(lane < 8 && head < wanted ? best[lane * wanted + head] : 0);
        if (lane < 8 && head < wanted && top && best[lane * wanted + head] == top)
            head++;
        if (i + 1 == wanted) {
            next = top;
        } else if (top) {
            last = top;
            if (lane == 0)
                chosen[n] = (int32_t)(0xffffffffu - (uint32_t)top);
            n++;
        }
    }
    sync_warp();
    for (uint32_t i = lane; i < forced; i += 32)
        chosen[n + i] = (int32_t)(i < init ? i : to + i - init);
    n += forced;
    sync_warp();
    int32_t *out = a.blocks + ((uint64_t)r * a.heads + h) * a.topk;
    for (uint32_t i = lane; i < a.topk; i += 32) {
        if (i >= n) {
            out[i] = -1;
            continue;
        }
        uint32_t below = 0;
        for (uint32_t j = 0; j < n; j++)
            below += chosen[j] < chosen[i];
        out[below] = chosen[i];
    }
    if (a.margin && lane == 0)
        a.margin[(uint64_t)r * a.heads + h] =
            next ? (last ? score_of(last) : GPU_INFINITY) - score_of(next) : GPU_INFINITY;
}

/* ---- attention ---- */

typedef struct gpu_attend_args {
    gpu_rows rows;
    gpu_pages kv;
    const float *q;
    uint32_t q_heads;
    const int32_t *blocks; /* [rows, kv_heads, topk], or NULL: all */
    uint32_t topk;
    float scale;
    uint32_t split; /* slots side by side; 1: one block does them all, in order */
    float *part;    /* [rows, q_heads, slots, head_dim + 2]: o, m, l */
    uint32_t slots; /* of `part`: topk, or the blocks of the longest context */
    float *out;
} gpu_attend_args;

/* Merges a block's part into the running one. */
GPU_FN void merge(float *m, float *l, float *o, float bm, float bl, float bo)
{
    const float most = fmaxf(*m, bm), c = gpu_exp(*m - most), d = gpu_exp(bm - most);
    *l = fma_rn(*l, c, mul_rn(bl, d));
    *o = fma_rn(*o, c, mul_rn(bo, d));
    *m = most;
}

/* The block number of a slot; -1: none. */
GPU_FN int32_t slot_block(const gpu_attend_args *a, uint32_t r, uint32_t kv_head, uint32_t slot)
{
    if (a->blocks)
        return slot < a->topk ? a->blocks[((uint64_t)r * a->kv.kv_heads + kv_head) * a->topk + slot]
                              : -1;
    return slot <= (uint32_t)a->rows.pos[r] / 128 ? (int32_t)slot : -1;
}

/* s[head][key] of one block to p, m and l: shared p[G][128], m[G], l[G]. 128 threads. */
GPU_FN void block_softmax(float *p, float *m, float *l, uint32_t group, uint32_t seen)
{
    for (uint32_t h = warp_of(); h < group; h += 4) {
        float s[4], most = -GPU_INFINITY, sum = 0.0f;
        for (uint32_t i = 0; i < 4; i++) {
            s[i] = p[h * 128 + i * 32 + lane_of()];
            most = fmaxf(most, i * 32 + lane_of() <= seen ? s[i] : -GPU_INFINITY);
        }
        most = warp_max(most);
        for (uint32_t i = 0; i < 4; i++) {
            s[i] = i * 32 + lane_of() <= seen ? gpu_exp(s[i] - most) : 0.0f;
            p[h * 128 + i * 32 + lane_of()] = s[i];
            sum = add_rn(sum, s[i]);
        }
        sum = warp_sum(sum);
        if (lane_of() == 0) {
            m[h] = most;
            l[h] = sum;
        }
    }
    sync_block();
}

/* Any page type and size. Thread = key, then thread = dim. Grid: kv heads, rows, split. */
GPU_KERNEL(128) gpu_attend_any(gpu_attend_args a)
{
    GPU_SHARED float p[GPU_GROUP_MAX * 128], m[GPU_GROUP_MAX], l[GPU_GROUP_MAX];
    GPU_SHARED float q[GPU_HEAD_DIM_MAX];
    wait_for_previous();
    launch_dependents();
    const uint32_t kv_head = block_x(), r = block_y(), dim = a.kv.head_dim;
    const uint32_t group = a.q_heads / a.kv.kv_heads, pos = (uint32_t)a.rows.pos[r];
    const uint64_t head0 = (uint64_t)r * a.q_heads + kv_head * group;
    float M[GPU_GROUP_MAX][2], L[GPU_GROUP_MAX][2], O[GPU_GROUP_MAX][2];
    for (uint32_t h = 0; h < GPU_GROUP_MAX; h++)
        for (uint32_t i = 0; i < 2; i++) {
            M[h][i] = -GPU_INFINITY;
            L[h][i] = O[h][i] = 0.0f;
        }
    const uint32_t slots = a.blocks ? a.topk : pos / 128 + 1;
    for (uint32_t slot = block_z(); slot < slots; slot += a.split) {
        const int32_t b = slot_block(&a, r, kv_head, slot);
        if (b < 0)
            break;
        const uint32_t page = page_of(&a.rows, a.rows.seq[r], (uint32_t)b * 128);
        const uint32_t seen = pos - (uint32_t)b * 128 < 127 ? pos - (uint32_t)b * 128 : 127;
        const uint8_t *key = page_row(&a.kv, page, kv_head, thread_x());
        const uint8_t *value = page_row(&a.kv, page, a.kv.kv_heads + kv_head, 0);
        for (uint32_t h = 0; h < group; h++) {
            sync_block();
            for (uint32_t k = thread_x(); k < dim; k += 128)
                q[k] = a.q[(head0 + h) * dim + k];
            sync_block();
            float dot = 0.0f;
            if (thread_x() <= seen)
                for (uint32_t k = 0; k < dim; k++)
                    dot = fma_rn(q[k], load_value(key, k, dim, a.kv.type), dot);
            p[h * 128 + thread_x()] = mul_rn(dot, a.scale);
        }
        sync_block();
        block_softmax(p, m, l, group, seen);
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t k = thread_x() + 128 * i;
            if (k >= dim)
                break;
            float o[GPU_GROUP_MAX];
            for (uint32_t h = 0; h < GPU_GROUP_MAX; h++)
                o[h] = 0.0f;
            for (uint32_t u = 0; u <= seen; u++) {
                const float v = load_value(value + u * a.kv.row_bytes, k, dim, a.kv.type);
#pragma unroll
                for (uint32_t h = 0; h < GPU_GROUP_MAX; h++)
                    if (h < group)
                        o[h] = fma_rn(p[h * 128 + u], v, o[h]);
            }
#pragma unroll
            for (uint32_t h = 0; h < GPU_GROUP_MAX; h++) {
                if (h >= group)
                    break;
                if (a.split > 1) {
                    float *part = a.part + ((head0 + h) * a.slots + slot) * (dim + 2);
                    part[k] = o[h];
                    if (k == 0) {
                        part[dim] = m[h];
                        part[dim + 1] = l[h];
                    }
                } else {
                    merge(&M[h][i], &L[h][i], &O[h][i], m[h], l[h], o[h]);
                }
            }
        }
    }
    if (a.split > 1)
        return;
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t k = thread_x() + 128 * i;
        if (k >= dim)
            break;
#pragma unroll
        for (uint32_t h = 0; h < GPU_GROUP_MAX; h++)
            if (h < group)
                a.out[(head0 + h) * dim + k] = div_rn(O[h][i], L[h][i]);
    }
}

/* NVFP4 pages. Keys as gpu/index_scan; values by the same instruction: A is p (16 query heads by 16
 * keys, in two parts, 22 bits), B the values, column g of product j being value 8 g + j of each 64.
 * A warp takes 32 keys of the block; the four warps' sums are added in ascending order. Grid as
 * gpu_attend_any's. */
template <int DIM, int NT> GPU_FN void attend_nvfp4(const gpu_attend_args *a, float *shared)
{
    /* [16][128] p, then [4][16][DIM] sums of the warps */
    GPU_SHARED float m[16], l[16];
    float *p = shared;
    const uint32_t kv_head = block_x(), r = block_y(), lane = lane_of(), g = lane >> 2,
                   t = lane & 3;
    const uint32_t group = a->q_heads / a->kv.kv_heads, pos = (uint32_t)a->rows.pos[r];
    const uint64_t head0 = (uint64_t)r * a->q_heads + kv_head * group;
    uint32_t q[NT][DIM / 8];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const uint32_t h = n * 8 + g < group ? n * 8 + g : 0;
        query_halves<DIM>(q[n], a->q + (head0 + h) * DIM);
    }
    /* thread: value k = thread % DIM of heads thread / DIM, + 128 / DIM, … */
    const uint32_t k = thread_x() % DIM, step = 128 / DIM;
    float M[16], L[16], O[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        M[i] = -GPU_INFINITY;
        L[i] = O[i] = 0.0f;
    }
    const uint32_t slots = a->blocks ? a->topk : pos / 128 + 1;
    for (uint32_t slot = block_z(); slot < slots; slot += a->split) {
        const int32_t b = slot_block(a, r, kv_head, slot);
        if (b < 0)
            break;
        const uint32_t page = page_of(&a->rows, a->rows.seq[r], (uint32_t)b * 128);
        const uint32_t seen = pos - (uint32_t)b * 128 < 127 ? pos - (uint32_t)b * 128 : 127;
        const uint32_t bytes = DIM / 2 + DIM / 16;
        const uint8_t *key = page_row(&a->kv, page, kv_head, 0);
        const uint8_t *value = page_row(&a->kv, page, a->kv.kv_heads + kv_head, 0);
        /* The values' words first: they depend on nothing. Word g of each 64 values, of the keys 2
         * t, 2 t + 1, 2 t + 8, 2 t + 9 of each 16. */
        uint32_t words[2][4][DIM / 64], scales[2][4][DIM / 64];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t u = warp_of() * 32 + i * 16 + 2 * t + j % 2 + j / 2 * 8;
#pragma unroll
                for (int d = 0; d < DIM / 64; d++) {
                    words[i][j][d] = *(const uint32_t *)(value + u * bytes + d * 32 + g * 4);
                    /* What nobody wrote yet may be NaN, and p is 0 there: 0 it is, too. */
                    scales[i][j][d] = u <= seen ? value[u * bytes + DIM / 2 + d * 4 + g / 2] : 0;
                }
            }
        sync_block(); /* the last block's sums were read */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float acc[NT][4];
#pragma unroll
            for (int n = 0; n < NT; n++)
                acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
            const uint32_t u = warp_of() * 32 + i * 16;
            keys_times<DIM, NT>(acc, key + u * bytes, q);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    p[(n * 8 + 2 * t + j % 2) * 128 + u + g + j / 2 * 8] =
                        mul_rn(acc[n][j], a->scale);
        }
        sync_block();
        block_softmax(p, m, l, group, seen);
        float sum[DIM / 64][8][4];
#pragma unroll
        for (int d = 0; d < DIM / 64; d++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                sum[d][j][0] = sum[d][j][1] = sum[d][j][2] = sum[d][j][3] = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t high[4], low[4];
#pragma unroll
            for (int j = 0; j < 4; j++) { /* rows g, g + 8 of keys 2 t …, then 2 t + 8 … */
                const uint32_t h = g + j % 2 * 8, u = warp_of() * 32 + i * 16 + 2 * t + j / 2 * 8;
                const bool there = h < group;
                const float x = there ? p[h * 128 + u] * 16384.0f : 0.0f;
                const float y = there ? p[h * 128 + u + 1] * 16384.0f : 0.0f;
                high[j] = h2_of(x, y);
                low[j] = h2_of(x - h_low(high[j]), y - h_high(high[j]));
            }
#pragma unroll
            for (int d = 0; d < DIM / 64; d++) {
                uint32_t v[4][4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint32_t s = h2_of_e4m3(scales[i][j][d]);
                    page_halves(v[j], words[i][j][d], pick_bytes(s, s, 0x1010));
                }
#pragma unroll
                for (int j = 0; j < 8; j++) { /* value j of the word: pair j % 4, half j / 4 */
                    const uint32_t half = j < 4 ? 0x5410 : 0x7632;
                    const uint32_t b0 = pick_bytes(v[0][j % 4], v[1][j % 4], half);
                    const uint32_t b1 = pick_bytes(v[2][j % 4], v[3][j % 4], half);
                    mma_f16(sum[d][j], high, b0, b1);
                    mma_f16(sum[d][j], low, b0, b1);
                }
            }
        }
        sync_block(); /* p was read */
        float *sums = shared + warp_of() * 16 * DIM;
#pragma unroll
        for (int d = 0; d < DIM / 64; d++)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) /* row g + 8 (i / 2), column 2 t + i % 2 */
                    sums[(g + i / 2 * 8) * DIM + d * 64 + (2 * t + i % 2) * 8 + j] = sum[d][j][i];
        sync_block();
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const uint32_t h = thread_x() / DIM + i * step;
            if (h >= group)
                break;
            float o = 0.0f;
            for (int w = 0; w < 4; w++)
                o = add_rn(o, shared[(w * 16 + h) * DIM + k]);
            o = mul_rn(o, 0x1p-14f);
            if (a->split > 1) {
                float *part = a->part + ((head0 + h) * a->slots + slot) * (DIM + 2);
                part[k] = o;
                if (k == 0) {
                    part[DIM] = m[h];
                    part[DIM + 1] = l[h];
                }
            } else {
                merge(&M[i], &L[i], &O[i], m[h], l[h], o);
            }
        }
    }
    if (a->split > 1)
        return;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const uint32_t h = thread_x() / DIM + i * step;
        if (h < group)
            a->out[(head0 + h) * DIM + k] = div_rn(O[i], L[i]);
    }
}

GPU_KERNEL(128) gpu_attend64(gpu_attend_args a)
{
    GPU_SHARED float shared[4 * 16 * 64];
    wait_for_previous();
    launch_dependents();
    if (a.q_heads / a.kv.kv_heads > 8)
        attend_nvfp4<64, 2>(&a, shared);
    else
        attend_nvfp4<64, 1>(&a, shared);
}

GPU_KERNEL(128) gpu_attend128(gpu_attend_args a)
{
    GPU_SHARED float shared[4 * 16 * 128];
    wait_for_previous();
    launch_dependents();
    attend_nvfp4<128, 2>(&a, shared);
}

/* The parts of a split, merged. Grid: query heads, rows. 128 threads. */
GPU_KERNEL(128) gpu_attend_merge(gpu_attend_args a)
{
    wait_for_previous();
    launch_dependents();
    const uint32_t head = block_x(), r = block_y(), dim = a.kv.head_dim;
    const uint32_t kv_head = head / (a.q_heads / a.kv.kv_heads);
    const uint64_t at = (uint64_t)r * a.q_heads + head;
    const uint32_t slots = a.blocks ? a.topk : (uint32_t)a.rows.pos[r] / 128 + 1;
    for (uint32_t k = thread_x(); k < dim; k += 128) {
        float m = -GPU_INFINITY, l = 0.0f, o = 0.0f;
        for (uint32_t slot = 0; slot < slots && slot_block(&a, r, kv_head, slot) >= 0; slot++) {
            const float *part = a.part + (at * a.slots + slot) * (dim + 2);
            merge(&m, &l, &o, part[dim], part[dim + 1], part[k]);
        }
        a.out[at * dim + k] = div_rn(o, l);
    }
}

/* ---- draft blocks ---- */

typedef struct gpu_draft_args {
    gpu_pages kv;
    const float *q, *block_k, *block_v;
    uint32_t block_rows, q_heads;
    const uint32_t *pages, *first, *lo, *hi; /* by block */
    uint32_t window;
    float scale;
    float *out;
} gpu_draft_args;

/* A query head of a row: the context's blocks of 128 positions, then the draft block, merged as
 * attention's. Grid: query heads, rows. 128 threads. */
GPU_KERNEL(128) gpu_draft_attend(gpu_draft_args a)
{
    GPU_SHARED float q[GPU_HEAD_DIM_MAX], p[128], m[1], l[1];
    wait_for_previous();
    launch_dependents();
    const uint32_t head = block_x(), r = block_y(), block = r / a.block_rows, dim = a.kv.head_dim;
    const uint32_t n = a.kv.kv_heads, kv_head = head / (a.q_heads / n);
    const uint64_t at = ((uint64_t)r * a.q_heads + head) * dim;
    const uint32_t hi = a.hi[block];
    uint32_t low = a.lo[block];
    if (a.window && hi + r % a.block_rows + 1 > a.window + low)
        low = hi + r % a.block_rows + 1 - a.window;
    low = low < hi ? low : hi;
    for (uint32_t k = thread_x(); k < dim; k += 128)
        q[k] = a.q[at + k];
    float M[2] = {-GPU_INFINITY, -GPU_INFINITY}, L[2] = {0.0f, 0.0f}, O[2] = {0.0f, 0.0f};
    const uint32_t last = hi > low ? (hi - 1) / 128 + 1 : 0; /* the own block's turn */
    for (uint32_t b = hi > low ? low / 128 : 0; b <= last; b++) {
        const bool own = b == last;
        const uint32_t u = own ? thread_x() : b * 128 + thread_x();
        const bool seen = own ? u < a.block_rows : u >= low && u < hi;
        const uint32_t page = own ? 0 : a.pages[a.first[block] + b];
        sync_block();
        float dot = -GPU_INFINITY;
        if (seen) {
            const uint8_t *row = own ? 0 : page_row(&a.kv, page, kv_head, u);
            const float *mine =
                a.block_k + (((uint64_t)block * a.block_rows + u) * n + kv_head) * dim;
            dot = 0.0f;
            for (uint32_t k = 0; k < dim; k++)
                dot = fma_rn(q[k], own ? mine[k] : load_value(row, k, dim, a.kv.type), dot);
            dot = mul_rn(dot, a.scale);
        }
        p[thread_x()] = dot;
        sync_block();
        if (warp_of() == 0) {
            float s[4], most = -GPU_INFINITY, sum = 0.0f;
            for (uint32_t i = 0; i < 4; i++)
                most = fmaxf(most, s[i] = p[i * 32 + lane_of()]);
            most = warp_max(most);
            for (uint32_t i = 0; i < 4; i++) {
                s[i] = s[i] == -GPU_INFINITY ? 0.0f : gpu_exp(s[i] - most);
                p[i * 32 + lane_of()] = s[i];
                sum = add_rn(sum, s[i]);
            }
            sum = warp_sum(sum);
            if (lane_of() == 0) {
                m[0] = most;
                l[0] = sum;
            }
        }
        sync_block();
        const uint32_t keys = own ? a.block_rows : 128;
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t k = thread_x() + 128 * i;
            if (k >= dim)
                break;
            float o = 0.0f;
            for (uint32_t j = 0; j < keys; j++) {
                if (p[j] == 0.0f)
                    continue;
                const float v =
                    own ? a.block_v[(((uint64_t)block * a.block_rows + j) * n + kv_head) * dim + k]
                        : load_value(page_row(&a.kv, page, n + kv_head, j), k, dim, a.kv.type);
                o = fma_rn(p[j], v, o);
            }
            merge(&M[i], &L[i], &O[i], m[0], l[0], o);
        }
    }
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t k = thread_x() + 128 * i;
        if (k < dim)
            a.out[at + k] = div_rn(O[i], L[i]);
    }
}
