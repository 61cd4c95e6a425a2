/* gpu/attend: the index scan, the choice of blocks, and attention over pages.
 *
 * Attention, the written reduction: each block of 128 positions apart: s = scale * dot; m its
 * largest; p = gpu_exp(s - m), 0 where masked; l the sum of p; o = sum of p v. Then, with M the
 * largest m and w = gpu_exp(m - M): L = sum of l w and O = sum of o w, blocks in ascending number,
 * from 0; O / L. Who computes a block, and when, changes nothing. */
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
    launch_dependents();
    wait_for_previous();
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

/* Queries as halves in page_halves' order, in shared memory by the whole block: row c is
 * columns[c]'s, DIM / 2 words, rows DIM / 2 + 4 apart so that eight lanes meet eight banks. Word
 * t * DIM / 8 + i of a row is what lane t reads as number i: values t DIM / 4 + 8 (i / 4) + i % 4
 * and the fourth after it. */
template <int DIM>
GPU_FN void query_stage(uint32_t *to, const float *q, uint64_t heads_apart, uint32_t count)
{
    for (uint32_t w = thread_x(); w < count * (DIM / 2); w += threads_x()) {
        const uint32_t c = w / (DIM / 2), i = w % (DIM / 2), j = i % (DIM / 8);
        const float *at = q + c * heads_apart + i / (DIM / 8) * (DIM / 4) + j / 4 * 8 + j % 4;
        to[c * (DIM / 2 + 4) + i] = h2_of(at[0], at[4]);
    }
}

/* A lane's share of row `c`. */
template <int DIM>
GPU_FN void query_halves(uint32_t out[DIM / 8], const uint32_t *staged, uint32_t c)
{
    const uint32_t *mine = staged + c * (DIM / 2 + 4) + (lane_of() & 3) * (DIM / 8);
#pragma unroll
    for (int i = 0; i < DIM / 8; i += 4) {
        const uint4 v = *(const uint4 *)(mine + i);
        out[i] = v.x;
        out[i + 1] = v.y;
        out[i + 2] = v.z;
        out[i + 3] = v.w;
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

/* NVFP4 pages: a warp a block at a time, 16 keys a product, whose columns are the heads of as many
 * rows as fit; rows of several sequences in turn. `heads` divides 8. Grid: any, rows / (NT * 8 /
 * heads). 128 threads. */
template <int DIM, int NT> GPU_FN void index_scan_nvfp4(const gpu_select_args *a)
{
    const uint32_t g = lane_of() >> 2, t = lane_of() & 3, each = NT * 8 / a->heads;
    GPU_SHARED __align__(16) uint32_t staged[NT * 8 * (DIM / 2 + 4)];
    const uint32_t first = block_y() * each;
    const uint32_t end = first + each < a->rows.rows ? first + each : a->rows.rows;
    uint32_t row = first;
    while (row < end) {
        /* Rows of one sequence stand together, ascending. */
        const uint32_t seq = a->rows.seq[row];
        uint32_t after = row + 1;
        while (after < end && a->rows.seq[after] == seq)
            after++;
        uint32_t q[NT][DIM / 8], pos[NT][2];
        sync_block();
        query_stage<DIM>(staged, a->index_q + (uint64_t)row * a->heads * DIM, DIM,
                         (after - row) * a->heads);
        sync_block();
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint32_t mine = n * 8 + g;
            query_halves<DIM>(q[n], staged, mine < (after - row) * a->heads ? mine : 0);
#pragma unroll
            for (uint32_t i = 0; i < 2; i++) { /* of the columns that this lane gets back */
                const uint32_t c = row + (n * 8 + t * 2 + i) / a->heads;
                pos[n][i] = (uint32_t)a->rows.pos[c < after ? c : row];
            }
        }
        const uint32_t last = (uint32_t)a->rows.pos[after - 1] / 128;
        for (uint32_t b = block_x() * 4 + warp_of(); b <= last; b += blocks_x() * 4) {
            const uint8_t *rows =
                page_row(&a->kv, page_of(&a->rows, seq, b * 128), 2 * a->kv.kv_heads, 0);
            float most[NT][2];
#pragma unroll
            for (int n = 0; n < NT; n++)
                most[n][0] = most[n][1] = -GPU_INFINITY;
#pragma unroll(NT == 1 ? 4 : 2)
            for (uint32_t k = 0; k < 8; k++) {
                float acc[NT][4];
#pragma unroll
                for (int n = 0; n < NT; n++)
                    acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
                keys_times<DIM, NT>(acc, rows + k * 16 * (DIM / 2 + DIM / 16), q);
                const uint32_t u = b * 128 + k * 16 + g;
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        if (u <= pos[n][i])
                            most[n][i] = fmaxf(most[n][i], acc[n][i]);
                        if (u + 8 <= pos[n][i])
                            most[n][i] = fmaxf(most[n][i], acc[n][i + 2]);
                    }
            }
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) {
                    for (uint32_t m = 4; m < 32; m *= 2)
                        most[n][i] = fmaxf(most[n][i], shfl_xor(most[n][i], m));
                    const uint32_t c = n * 8 + t * 2 + i, r = row + c / a->heads;
                    if (g == 0 && r < after && b <= pos[n][i] / 128)
                        a->score[((uint64_t)r * a->heads + c % a->heads) * a->stride + b] =
                            most[n][i];
                }
        }
        row = after;
    }
}

GPU_KERNEL(128) gpu_index_scan64(gpu_select_args a)
{
    launch_dependents();
    wait_for_previous();
    index_scan_nvfp4<64, 1>(&a);
}

GPU_KERNEL(128) gpu_index_scan128(gpu_select_args a)
{
    launch_dependents();
    wait_for_previous();
    index_scan_nvfp4<128, 1>(&a);
}

GPU_KERNEL(128) gpu_index_scan64_many(gpu_select_args a)
{
    launch_dependents();
    wait_for_previous();
    index_scan_nvfp4<64, 4>(&a);
}

GPU_KERNEL(128) gpu_index_scan128_many(gpu_select_args a)
{
    launch_dependents();
    wait_for_previous();
    index_scan_nvfp4<128, 4>(&a);
}

/* ---- the choice ---- */

#define CHOOSE_BLOCKS 8192 /* in shared memory: contexts of 1,048,576 */

/* Order of a score, as an unsigned number. */
GPU_FN uint32_t rank_of(float score)
{
    const uint32_t u = bits_of(score);
    return u >> 31 ? ~u : u | 0x80000000u;
}

GPU_FN float score_of(uint32_t rank)
{
    return float_of(rank >> 31 ? rank & 0x7fffffffu : ~rank);
}

/* The k-th largest score bit by bit, by counting who is not below; then what is above it, and of
 * its equals the lowest block numbers. A thread has consecutive blocks. Grid: heads, rows. Dynamic
 * shared memory: a word a block of the context. */
GPU_KERNEL(256) gpu_choose(gpu_select_args a)
{
    GPU_SHARED uint32_t counts[33], shared[32];
    uint32_t *key = (uint32_t *)dynamic_shared();
    launch_dependents();
    if (thread_x() < 33)
        counts[thread_x()] = 0;
    wait_for_previous();
    const uint32_t h = block_x(), r = block_y(), i = thread_x();
    const uint32_t own = (uint32_t)a.rows.pos[r] / 128, count = own + 1;
    const float *score = a.score + ((uint64_t)r * a.heads + h) * a.stride;
    /* Forced: the first `init`, and own - local + 1 … own. Between them is the contest. */
    const uint32_t init = a.init < count ? a.init : count;
    const uint32_t near = own + 1 > a.local ? own + 1 - a.local : 0;
    const uint32_t to = near > init ? near : init, n = to - init, forced = init + (count - to);
    const uint32_t k = a.topk - forced, taken = n < k ? n : k;
    const bool contest = n > k && k > 0;
    for (uint32_t b = i; b < n; b += 256)
        key[b] = rank_of(score[init + b]);
    sync_block();
    const uint32_t part = (n + 255) / 256, from = i * part < n ? i * part : n;
    const uint32_t end = from + part < n ? from + part : n;
    uint32_t limit = 0;
    for (int bit = 31; bit >= 0 && contest; bit--) {
        const uint32_t next = limit | 1u << bit;
        uint32_t c = 0;
        for (uint32_t b = i; b < n; b += 256)
            c += key[b] >= next;
        c = warp_sum_u(c);
        if (lane_of() == 0 && c)
            add_shared(&counts[bit], c);
        sync_block();
        const uint32_t reached = counts[bit];
        if (reached >= k)
            limit = next;
        if (reached == k) /* exactly those: their lowest is of no interest, but for the margin */
            break;
    }
    uint32_t above = 0, equal = 0, all, all_above, all_equal;
    for (uint32_t b = from; b < end; b++) {
        above += n <= k || (contest && key[b] > limit);
        equal += contest && key[b] == limit;
    }
    block_before(above, shared, &all_above);
    const uint32_t equal_before = block_before(equal, shared, &all_equal);
    const uint32_t room = taken - all_above; /* for equals, in ascending order */
    uint32_t mine = above;
    if (equal_before < room)
        mine += equal < room - equal_before ? equal : room - equal_before;
    uint32_t at = block_before(mine, shared, &all) + init, equals = equal_before;
    int32_t *out = a.blocks + ((uint64_t)r * a.heads + h) * a.topk;
    for (uint32_t b = from; b < end; b++) {
        bool take = n <= k || (contest && key[b] > limit);
        if (contest && key[b] == limit)
            take = equals++ < room;
        if (take)
            out[at++] = (int32_t)(init + b);
    }
    for (uint32_t b = i; b < init; b += 256)
        out[b] = (int32_t)b;
    for (uint32_t b = i; to + b < count; b += 256)
        out[init + taken + b] = (int32_t)(to + b);
    for (uint32_t b = forced + taken + i; b < a.topk; b += 256)
        out[b] = -1;
    if (!a.margin)
        return;
    float last = GPU_INFINITY, next = -GPU_INFINITY; /* the worst taken, the best left out */
    for (uint32_t b = i; b < n; b += 256) {
        const float v = score_of(key[b]);
        if (contest && key[b] >= limit)
            last = fminf(last, v);
        else
            next = fmaxf(next, v);
    }
    last = -block_max(-last, (float *)shared);
    next = block_max(next, (float *)shared);
    if (all_equal > room)
        next = last;
    if (i == 0)
        a.margin[(uint64_t)r * a.heads + h] = contest ? last - next : GPU_INFINITY;
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
    float *part;    /* [rows at once, q_heads, slots, head_dim + 2]: o, m, l */
    uint32_t slots; /* of `part`: topk, or the blocks of the longest context */
    uint32_t first; /* row of block_y() 0 */
    float *out;
} gpu_attend_args;

/* The block number of a slot; -1: none. */
GPU_FN int32_t slot_block(const gpu_attend_args *a, uint32_t r, uint32_t kv_head, uint32_t slot)
{
    if (a->blocks)
        return a->blocks[((uint64_t)r * a->kv.kv_heads + kv_head) * a->topk + slot];
    return slot <= (uint32_t)a->rows.pos[r] / 128 ? (int32_t)slot : -1;
}

/* s[head][key] of one block to p, m and l: shared p[group][STRIDE], m[group], l[group]. */
template <int STRIDE>
GPU_FN void block_softmax(float *p, float *m, float *l, uint32_t group, uint32_t seen)
{
    for (uint32_t h = warp_of(); h < group; h += threads_x() / 32) {
        float s[4], most = -GPU_INFINITY, sum = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            s[i] = p[h * STRIDE + i * 32 + lane_of()];
            most = fmaxf(most, i * 32 + lane_of() <= seen ? s[i] : -GPU_INFINITY);
        }
        most = warp_max(most);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            s[i] = i * 32 + lane_of() <= seen ? gpu_exp(s[i] - most) : 0.0f;
            p[h * STRIDE + i * 32 + lane_of()] = s[i];
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

/* Where a block's o, m and l go. */
GPU_FN float *part_of(const gpu_attend_args *a, uint32_t head, uint32_t slot)
{
    return a->part +
           (((uint64_t)block_y() * a->q_heads + head) * a->slots + slot) * (a->kv.head_dim + 2);
}

/* Any page type and size. Thread = key, then thread = dim. Grid: kv heads, rows, slots. */
GPU_KERNEL(128) gpu_attend_any(gpu_attend_args a)
{
    GPU_SHARED float p[GPU_GROUP_MAX * 128], m[GPU_GROUP_MAX], l[GPU_GROUP_MAX];
    GPU_SHARED float q[GPU_HEAD_DIM_MAX];
    launch_dependents();
    wait_for_previous();
    const uint32_t kv_head = block_x(), r = a.first + block_y(), slot = block_z();
    const uint32_t dim = a.kv.head_dim, group = a.q_heads / a.kv.kv_heads;
    const uint32_t pos = (uint32_t)a.rows.pos[r];
    const uint64_t head0 = (uint64_t)r * a.q_heads + kv_head * group;
    const int32_t b = slot_block(&a, r, kv_head, slot);
    if (b < 0)
        return;
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
    block_softmax<128>(p, m, l, group, seen);
    for (uint32_t k = thread_x(); k < dim; k += 128) {
        float o[GPU_GROUP_MAX];
#pragma unroll
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
        for (uint32_t h = 0; h < GPU_GROUP_MAX; h++)
            if (h < group)
                part_of(&a, kv_head * group + h, slot)[k] = o[h];
    }
    if (thread_x() < group) {
        float *part = part_of(&a, kv_head * group + thread_x(), slot);
        part[dim] = m[thread_x()];
        part[dim + 1] = l[thread_x()];
    }
}

/* NVFP4 pages. Keys as the index scan's; values by the same instruction: A is p (16 query heads by
 * 16 keys, in two parts, 22 bits), B the values, column g of product j being value 8 g + j of each
 * 64. DIM / 16 warps: of the keys each takes its share, of the values 32 keys by 64; the sums of
 * four warps are added in ascending order. `shared`: [16][132] p, then [4][16][DIM + 8] sums, value
 * 8 c + j at 8 j + c of its 64. Grid as gpu_attend_any's. */
template <int DIM, int NT> GPU_FN void attend_nvfp4(const gpu_attend_args *a, float *shared)
{
    GPU_SHARED float m[16], l[16];
    float *p = shared;
    const uint32_t bytes = DIM / 2 + DIM / 16;
    const uint32_t kv_head = block_x(), r = a->first + block_y(), slot = block_z();
    const uint32_t lane = lane_of(), g = lane >> 2, t = lane & 3;
    const uint32_t group = a->q_heads / a->kv.kv_heads, pos = (uint32_t)a->rows.pos[r];
    const uint32_t seq = a->rows.seq[r];
    const int32_t b = slot_block(a, r, kv_head, slot);
    if (b < 0)
        return;
    const uint32_t page = page_of(&a->rows, seq, (uint32_t)b * 128);
    const uint32_t seen = pos - (uint32_t)b * 128 < 127 ? pos - (uint32_t)b * 128 : 127;
    const uint64_t head0 = (uint64_t)r * a->q_heads + kv_head * group;
    uint32_t q[NT][DIM / 8];
    query_stage<DIM>((uint32_t *)shared, a->q + head0 * DIM, DIM, group);
    const uint8_t *key = page_row(&a->kv, page, kv_head, 0);
    const uint8_t *value = page_row(&a->kv, page, a->kv.kv_heads + kv_head, 0);
    /* The values' words first: they depend on nothing. Word g of each 64 values, of the keys 2 t,
     * 2 t + 1, 2 t + 8, 2 t + 9 of each 16. */
    const uint32_t keys0 = warp_of() % 4 * 32, d = warp_of() / 4;
    uint32_t words[2][4], scales[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t u = keys0 + i * 16 + 2 * t + j % 2 + j / 2 * 8;
            words[i][j] = *(const uint32_t *)(value + u * bytes + d * 32 + g * 4);
            /* What nobody wrote yet may be NaN, and p is 0 there: 0 it is, too. */
            scales[i][j] = u <= seen ? value[u * bytes + DIM / 2 + d * 4 + g / 2] : 0;
        }
    sync_block();
#pragma unroll
    for (int n = 0; n < NT; n++)
        query_halves<DIM>(q[n], (const uint32_t *)shared, n * 8 + g < group ? n * 8 + g : 0);
    sync_block(); /* p lies in the same place */
    const uint32_t tiles = 8 / (DIM / 16);
#pragma unroll
    for (uint32_t i = 0; i < tiles; i++) {
        float acc[NT][4];
#pragma unroll
        for (int n = 0; n < NT; n++)
            acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
        const uint32_t u = (warp_of() * tiles + i) * 16;
        keys_times<DIM, NT>(acc, key + u * bytes, q);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                p[(n * 8 + 2 * t + j % 2) * 132 + u + g + j / 2 * 8] = mul_rn(acc[n][j], a->scale);
    }
    sync_block();
    block_softmax<132>(p, m, l, group, seen);
    float sum[8][4];
#pragma unroll
    for (int j = 0; j < 8; j++)
        sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t high[4], low[4], v[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++) { /* rows g, g + 8 of keys 2 t …, then 2 t + 8 … */
            const uint32_t h = g + j % 2 * 8, u = keys0 + i * 16 + 2 * t + j / 2 * 8;
            const bool there = h < group;
            const float x = there ? p[h * 132 + u] * 16384.0f : 0.0f;
            const float y = there ? p[h * 132 + u + 1] * 16384.0f : 0.0f;
            high[j] = h2_of(x, y);
            low[j] = h2_of(x - h_low(high[j]), y - h_high(high[j]));
            const uint32_t s = h2_of_e4m3(scales[i][j]);
            page_halves(v[j], words[i][j], pick_bytes(s, s, 0x1010));
        }
#pragma unroll
        for (int j = 0; j < 8; j++) { /* value j of the word: pair j % 4, half j / 4 */
            const uint32_t half = j < 4 ? 0x5410 : 0x7632;
            const uint32_t b0 = pick_bytes(v[0][j % 4], v[1][j % 4], half);
            const uint32_t b1 = pick_bytes(v[2][j % 4], v[3][j % 4], half);
            mma_f16(sum[j], high, b0, b1);
            mma_f16(sum[j], low, b0, b1);
        }
    }
    sync_block(); /* p was read */
    float *sums = shared + warp_of() % 4 * 16 * (DIM + 8);
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) { /* row g + 8 i, columns 2 t and 2 t + 1 */
            float2 *to = (float2 *)(sums + (g + i * 8) * (DIM + 8) + d * 64 + j * 8 + 2 * t);
            to->x = sum[j][2 * i];
            to->y = sum[j][2 * i + 1];
        }
    sync_block();
    for (uint32_t i = thread_x(); i < group * DIM; i += threads_x()) {
        const uint32_t h = i / DIM, k = i % DIM;
        const uint32_t at = h * (DIM + 8) + k / 64 * 64 + k % 8 * 8 + k % 64 / 8;
        float o = 0.0f;
        for (int w = 0; w < 4; w++)
            o = add_rn(o, shared[w * 16 * (DIM + 8) + at]);
        part_of(a, kv_head * group + h, slot)[k] = mul_rn(o, 0x1p-14f);
    }
    if (thread_x() < group) {
        float *part = part_of(a, kv_head * group + thread_x(), slot);
        part[DIM] = m[thread_x()];
        part[DIM + 1] = l[thread_x()];
    }
}

GPU_KERNEL(128) gpu_attend64(gpu_attend_args a)
{
    GPU_SHARED __align__(16) float shared[4 * 16 * 72];
    launch_dependents();
    wait_for_previous();
    if (a.q_heads / a.kv.kv_heads > 8)
        attend_nvfp4<64, 2>(&a, shared);
    else
        attend_nvfp4<64, 1>(&a, shared);
}

GPU_KERNEL(256) gpu_attend128(gpu_attend_args a)
{
    GPU_SHARED __align__(16) float shared[4 * 16 * 136];
    launch_dependents();
    wait_for_previous();
    attend_nvfp4<128, 2>(&a, shared);
}

/* Grid: query heads, rows. 128 threads. */
GPU_KERNEL(128) gpu_attend_merge(gpu_attend_args a)
{
    GPU_SHARED float most[4], weight[128], length[128];
    launch_dependents();
    wait_for_previous();
    const uint32_t head = block_x(), r = a.first + block_y(), dim = a.kv.head_dim, i = thread_x();
    const uint32_t kv_head = head / (a.q_heads / a.kv.kv_heads);
    const uint32_t count = a.blocks ? a.topk : (uint32_t)a.rows.pos[r] / 128 + 1;
    const float *part = part_of(&a, head, 0);
    float m = -GPU_INFINITY;
    for (uint32_t s = i; s < count; s += 128)
        if (slot_block(&a, r, kv_head, s) >= 0)
            m = fmaxf(m, part[(uint64_t)s * (dim + 2) + dim]);
    const float M = block_max(m, most);
    float L = 0.0f, O[2] = {0.0f, 0.0f};
    for (uint32_t first = 0; first < count; first += 128) {
        const uint32_t n = count - first < 128 ? count - first : 128;
        sync_block();
        if (i < n) {
            const bool there = slot_block(&a, r, kv_head, first + i) >= 0;
            const float *at = part + (uint64_t)(first + i) * (dim + 2) + dim;
            weight[i] = there ? gpu_exp(at[0] - M) : 0.0f;
            length[i] = there ? at[1] : 0.0f;
        }
        sync_block();
        /* Absent slots hold anything: they are read, and not taken. */
#pragma unroll 16
        for (uint32_t s = 0; s < n; s++) {
            const float *at = part + (uint64_t)(first + s) * (dim + 2);
            const float w = weight[s], o = i < dim ? at[i] : 0.0f;
            L = fma_rn(length[s], w, L);
            O[0] = fma_rn(w > 0.0f ? o : 0.0f, w, O[0]);
            if (i + 128 < dim)
                O[1] = fma_rn(w > 0.0f ? at[i + 128] : 0.0f, w, O[1]);
        }
    }
    float *out = a.out + ((uint64_t)r * a.q_heads + head) * dim;
    if (i < dim)
        out[i] = div_rn(O[0], L);
    if (i + 128 < dim)
        out[i + 128] = div_rn(O[1], L);
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

/* Merges a block's part into the running one. */
GPU_FN void merge(float *m, float *l, float *o, float bm, float bl, float bo)
{
    const float most = fmaxf(*m, bm), c = gpu_exp(*m - most), d = gpu_exp(bm - most);
    *l = fma_rn(*l, c, mul_rn(bl, d));
    *o = fma_rn(*o, c, mul_rn(bo, d));
    *m = most;
}

/* A query head of a row: the context's blocks of 128 positions, then the draft block, merged as
 * attention's. Grid: query heads, rows. 128 threads. */
GPU_KERNEL(128) gpu_draft_attend(gpu_draft_args a)
{
    GPU_SHARED float q[GPU_HEAD_DIM_MAX], p[128], m[1], l[1];
    launch_dependents();
    wait_for_previous();
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
