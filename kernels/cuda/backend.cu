/* cuda/backend: the kernels of kernels/gpu behind kernels/backend.h, as a module.
 *
 * One stream, in the order of the calls. Weights are rearranged into tiles where they lie, when an
 * operation first sees them (gpu/linear.h), and known by the address of their data. Buffers between
 * kernels grow when a step needs more and are given back with the device, so that graphs that were
 * recorded with an older one stay valid. Every kernel begins with wait_for_previous, so launches of
 * a chain overlap (programmatic dependent launch, CUDA C++ Programming Guide). */
#include <cuda_runtime.h>

#include <map>
#include <new>
#include <tuple>
#include <vector>

#define _Noreturn [[noreturn]]
extern "C" {
#include "engine/base/num.h"
#include "kernels/backend.h"
}

#include "kernels/gpu/attend.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RING 16                  /* copies of host arrays under way */
#define PIECE ((size_t)64 << 20) /* of a matrix that is rearranged at once */
#define GRAPHS_MAX 512
#define PARTS ((size_t)256 << 20) /* of attention, before blocks are merged */
#define SMALL_ROWS 32             /* from here on, products are wide */

struct buffer {
    void *data = nullptr;
    size_t bytes = 0;
};

/* Host arrays on their way to fixed places of the device. */
struct staging {
    uint8_t *device = nullptr, *host[RING] = {};
    cudaEvent_t done[RING] = {};
    size_t bytes = 0;
    uint32_t next = 0;
};

struct experts {
    const gpu_weight *gate, *up, *down; /* [experts + 1] on the device */
    bool halves_in, floats_in, halves_h, wide;
    uint32_t h_width;
};

struct graph {
    cudaGraphExec_t exec;
    uint64_t used;
};

struct cuda_device {
    kn_device base = {};
    int index = 0, processors = 0;
    cudaStream_t stream = nullptr, side = nullptr;
    cudaError_t fault = cudaSuccess;
    char fault_at[128] = "", text[400] = "";
    size_t memory_max = 0, used = 0;
    uint32_t rows_max = 0, pages_max = 0;
    std::vector<void *> owned; /* device memory of the backend's own */
    buffer halves, scale, floats, wide, logits, ids, weights, pairs, tiles, h, out, score, part,
        move;
    staging begun, other, small;
    const kn_rows *begun_rows = nullptr; /* by address, with its arrays */
    gpu_rows begun_at = {};
    uint32_t longest = 0; /* blocks of the longest context of the rows at hand */
    bool recording = false;
    std::tuple<uint64_t, uint32_t, uint32_t> recorded;
    std::map<std::tuple<uint64_t, uint32_t, uint32_t>, graph> graphs;
    uint64_t clock = 0;
    std::map<const void *, bool> tiled; /* weights seen: whether they lie in tiles */
    std::map<const kn_weight *, experts> mixtures;
};

static cuda_device *of(const kn_device *device)
{
    return (cuda_device *)device->impl;
}

/* The first fault stays. */
static bool good(cuda_device *d, cudaError_t code, const char *what)
{
    if (code == cudaSuccess)
        return true;
    if (d->fault == cudaSuccess) {
        d->fault = code;
        snprintf(d->fault_at, sizeof d->fault_at, "%s", what);
    }
    (void)cudaGetLastError();
    return false;
}

#define TRY(d, call) good(d, call, #call)

/* What a model may ask for and the kernels do not have is a fault, too: the step says so. */
static bool have(cuda_device *d, bool fits, const char *what)
{
    return good(d, fits ? cudaSuccess : cudaErrorNotSupported, what);
}

/* At least this much, contents undefined. */
static void *grow(cuda_device *d, buffer *b, size_t bytes)
{
    if (b->bytes >= bytes)
        return b->data;
    bytes = bytes + bytes / 4 + 4096;
    void *data = nullptr;
    if (!good(d, cudaMalloc(&data, bytes), "no memory for a step's buffers"))
        return b->data;
    d->owned.push_back(data);
    b->data = data;
    b->bytes = bytes;
    return data;
}

template <typename... Params, typename... Args>
static void launch_with(cuda_device *d, uint32_t shared, void (*kernel)(Params...), dim3 grid,
                        uint32_t threads, const Args &...args)
{
    if (d->fault != cudaSuccess || !grid.x || !grid.y || !grid.z)
        return;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = d->stream;
    config.attrs = &early;
    config.numAttrs = 1;
    good(d, cudaLaunchKernelEx(&config, kernel, (Params)args...), "launch");
}

template <typename... Params, typename... Args>
static void launch(cuda_device *d, void (*kernel)(Params...), dim3 grid, uint32_t threads,
                   const Args &...args)
{
    launch_with(d, 0, kernel, grid, threads, args...);
}

static uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* ---- host arrays ---- */

static bool staging_create(cuda_device *d, staging *s, size_t bytes)
{
    s->bytes = bytes;
    bool fine = TRY(d, cudaMalloc((void **)&s->device, bytes));
    for (int i = 0; i < RING && fine; i++)
        fine = TRY(d, cudaMallocHost((void **)&s->host[i], bytes)) &&
               TRY(d, cudaEventCreateWithFlags(&s->done[i], cudaEventDisableTiming));
    return fine;
}

static void staging_destroy(staging *s)
{
    cudaFree(s->device);
    for (int i = 0; i < RING; i++) {
        if (s->host[i])
            cudaFreeHost(s->host[i]);
        if (s->done[i])
            cudaEventDestroy(s->done[i]);
    }
}

/* A host piece that no copy reads any more. */
static uint8_t *staging_begin(cuda_device *d, staging *s)
{
    s->next = (s->next + 1) % RING;
    TRY(d, cudaEventSynchronize(s->done[s->next]));
    return s->host[s->next];
}

static void staging_send(cuda_device *d, staging *s, size_t bytes)
{
    TRY(d, cudaMemcpyAsync(s->device, s->host[s->next], bytes, cudaMemcpyHostToDevice, d->stream));
    TRY(d, cudaEventRecord(s->done[s->next], d->stream));
}

/* A few words that one operation reads. */
static const void *send_small(cuda_device *d, const void *src, size_t bytes)
{
    CHECK(bytes <= d->small.bytes && !d->recording);
    memcpy(staging_begin(d, &d->small), src, bytes);
    staging_send(d, &d->small, bytes);
    return d->small.device;
}

static gpu_rows send_rows(cuda_device *d, staging *s, const kn_rows *rows)
{
    const uint32_t n = d->rows_max;
    CHECK(rows->rows <= n && !d->recording);
    uint32_t *host = (uint32_t *)staging_begin(d, s), *first = host + 3 * n, *pages = host + 4 * n;
    memcpy(host, rows->token ? (const void *)rows->token : (const void *)rows->pos, rows->rows * 4);
    memcpy(host + n, rows->pos, rows->rows * 4);
    memcpy(host + 2 * n, rows->seq, rows->rows * 4);
    uint32_t used = 0;
    d->longest = 1;
    for (uint32_t r = 0; r < rows->rows; r++) {
        /* The last row of a sequence is its farthest. */
        if (r + 1 < rows->rows && rows->seq[r + 1] == rows->seq[r])
            continue;
        const uint32_t count = (uint32_t)rows->pos[r] / KN_PAGE_TOKENS + 1;
        CHECK(rows->seq[r] < n && (4 * (size_t)n + used + count) * 4 <= s->bytes);
        first[rows->seq[r]] = used;
        memcpy(pages + used, rows->pages[rows->seq[r]], count * 4);
        used += count;
        if (count > d->longest)
            d->longest = count;
    }
    staging_send(d, s, (4 * (size_t)n + used) * 4);
    const uint32_t *at = (const uint32_t *)s->device;
    return {(const int32_t *)at, (const int32_t *)at + n, at + 2 * n, at + 3 * n, at + 4 * n,
            rows->rows};
}

static gpu_rows stage(cuda_device *d, const kn_rows *rows)
{
    return rows == d->begun_rows ? d->begun_at : send_rows(d, &d->other, rows);
}

static void rows_begin(kn_device *device, const kn_rows *rows)
{
    cuda_device *d = of(device);
    d->begun_rows = rows;
    d->begun_at = send_rows(d, &d->begun, rows);
}

/* ---- weights ---- */

static bool can_tile(const kn_weight *w)
{
    return w->rows % GPU_TILE == 0 && w->cols % GPU_UNIT == 0;
}

static void tile(cuda_device *d, const kn_weight *w)
{
    const size_t strip = (size_t)16 * w->cols;
    const size_t bytes = w->type == KN_BF16 ? strip * 2 : w->type == KN_MXFP8 ? strip : strip / 2;
    const size_t scales = w->type == KN_BF16 ? 0 : strip / (w->type == KN_MXFP8 ? 32 : 16);
    const uint32_t strips = w->rows / 16;
    const uint32_t most =
        (uint32_t)base_max((size_t)1, base_min(PIECE / (bytes + scales), (size_t)strips));
    uint8_t *copy = (uint8_t *)grow(d, &d->move, most * (bytes + scales));
    /* On a stream of its own: the main one may be recording. */
    for (uint32_t s = 0; s < strips && d->fault == cudaSuccess; s += most) {
        const uint32_t n = most < strips - s ? most : strips - s;
        uint8_t *data = (uint8_t *)w->data + s * bytes;
        uint8_t *scale = scales ? (uint8_t *)w->scale + s * scales : nullptr;
        TRY(d, cudaMemcpyAsync(copy, data, n * bytes, cudaMemcpyDeviceToDevice, d->side));
        if (scales)
            TRY(d, cudaMemcpyAsync(copy + n * bytes, scale, n * scales, cudaMemcpyDeviceToDevice,
                                   d->side));
        gpu_tile<<<n, 256, 0, d->side>>>(data, scale, copy, copy + n * bytes, w->type, w->cols);
        TRY(d, cudaGetLastError());
    }
}

/* `plain`: to be read as it is stored, if nobody rearranged it yet. */
static gpu_weight weight_of(cuda_device *d, const kn_weight *w, bool plain)
{
    auto seen = d->tiled.find(w->data);
    if (seen == d->tiled.end()) {
        const bool tiles = !plain && can_tile(w);
        if (tiles && w->type != KN_F32) {
            if (!d->recording)
                TRY(d, cudaStreamSynchronize(d->stream)); /* uploads of it */
            tile(d, w);
            TRY(d, cudaStreamSynchronize(d->side));
        }
        seen = d->tiled.emplace(w->data, tiles).first;
    }
    return {(const uint8_t *)w->data,
            (const uint8_t *)w->scale,
            w->scale_global,
            (uint32_t)w->type,
            w->rows,
            w->cols,
            seen->second};
}

static bool halves(const gpu_weight *w)
{
    return w->tiled && (w->type == KN_MXFP8 || w->type == KN_NVFP4);
}

/* ---- products ---- */

/* Warps of a small product's strip: as many as let all strips run at once, `most` on a processor.
 */
static uint32_t strip_warps(const cuda_device *d, uint32_t strips, uint32_t most)
{
    uint32_t warps = GPU_SLICES;
    while (warps > 1 && strips * warps > (uint32_t)d->processors * most)
        warps /= 2;
    return warps;
}

/* `strips` in the grid's first two dimensions; `parts` of them share a block. `most`: warps that a
 * processor holds of the kernel. */
template <typename Args>
static void launch_strips(cuda_device *d, void (*kernel)(Args), dim3 grid, uint32_t parts,
                          uint32_t most, const Args &args)
{
    const uint32_t warps = strip_warps(d, grid.x * grid.y * parts, most) * parts;
    launch_with(d, warps * RING_BYTES, kernel, grid, warps * 32, args);
}

/* What products read of x: normed by `norm` (NULL: as it is), rows picked by `pick` (device; NULL:
 * all). */
static gpu_input input_of(cuda_device *d, const float *x, const float *norm, const uint32_t *pick,
                          uint32_t rows, uint32_t cols, float eps, bool want_halves,
                          bool want_floats)
{
    gpu_input in = {nullptr, nullptr, x};
    gpu_norm_args args = {x, norm, pick, cols, eps, nullptr, nullptr, nullptr};
    if (want_halves) {
        args.halves = (uint32_t *)grow(d, &d->halves, (size_t)rows * cols * 4);
        args.scale = (float *)grow(d, &d->scale, (size_t)rows * 4);
        in.halves = args.halves;
        in.scale = args.scale;
    }
    if (want_floats && (norm || pick))
        in.floats = args.y = (float *)grow(d, &d->floats, (size_t)rows * cols * 4);
    if (args.halves || args.y)
        launch(d, gpu_norm, dim3(rows), NORM_THREADS, args);
    return in;
}

/* Matrices of one input, each to its own y. */
static void products(cuda_device *d, const gpu_segment *segments, uint32_t count, gpu_input in,
                     uint32_t rows, uint32_t cols, bool add)
{
    gpu_linear_args tiles = {}, wide = {};
    tiles.rows = wide.rows = rows;
    tiles.cols = wide.cols = cols;
    tiles.add = wide.add = add;
    tiles.in = wide.in = in;
    uint32_t strips = 0, groups = 0;
    for (uint32_t i = 0; i < count; i++) {
        const gpu_segment *s = &segments[i];
        if (!s->w.tiled) {
            gpu_linear_args plain = tiles;
            plain.segments = 1;
            plain.segment[0] = *s;
            launch(d, gpu_linear_plain, dim3(ceil_div(s->w.rows, 8), rows), 256, plain);
        } else if (halves(&s->w) && rows > SMALL_ROWS) {
            wide.segment[wide.segments] = *s;
            wide.segment[wide.segments++].first_tile = groups * 8;
            groups += ceil_div(s->w.rows / 16, 8);
        } else {
            tiles.segment[tiles.segments] = *s;
            tiles.segment[tiles.segments++].first_tile = strips;
            strips += s->w.rows / 16;
        }
    }
    if (tiles.segments && rows <= 4)
        launch_strips(d, gpu_linear4, dim3(strips), 1, 32, tiles);
    else if (tiles.segments)
        launch_strips(d, gpu_linear8, dim3(strips, ceil_div(rows, 8)), 1, 16, tiles);
    if (wide.segments)
        launch_with(d, WIDE_SHARED, gpu_linear_wide, dim3(groups, ceil_div(rows, GPU_WIDE)), 256,
                    wide);
}

static void product(cuda_device *d, float *y, const float *x, const float *norm,
                    const uint32_t *pick, const kn_weight *w, uint32_t rows, float eps, bool add)
{
    gpu_segment s = {weight_of(d, w, false), 0, y, w->rows};
    const gpu_input in =
        input_of(d, x, norm, pick, rows, w->cols, eps, halves(&s.w), !halves(&s.w));
    products(d, &s, 1, in, rows, w->cols, add);
}

static void linear(kn_device *device, float *y, const float *x, const kn_weight *w, uint32_t rows,
                   bool add)
{
    product(of(device), y, x, nullptr, nullptr, w, rows, 0.0f, add);
}

static void head(kn_device *device, float *logits, const float *x, const float *norm,
                 const kn_weight *w, const uint32_t *pick, uint32_t picks, uint32_t hidden,
                 float eps)
{
    cuda_device *d = of(device);
    const uint32_t *at = (const uint32_t *)send_small(d, pick, picks * 4);
    product(d, logits, x, norm, at, w, picks, eps, false);
}

static void embed(kn_device *device, float *y, const kn_weight *table, const int32_t *ids,
                  uint32_t rows)
{
    cuda_device *d = of(device);
    const bool begun = d->begun_rows && ids == d->begun_rows->token;
    const int32_t *at = begun ? d->begun_at.token : (const int32_t *)send_small(d, ids, rows * 4);
    launch(d, gpu_embed, dim3(rows), 256, y, weight_of(d, table, true), at);
}

static void norm(kn_device *device, float *y, const float *x, const float *w, uint32_t rows,
                 uint32_t cols, float eps)
{
    const gpu_norm_args args = {x, w, nullptr, cols, eps, y, nullptr, nullptr};
    launch(of(device), gpu_norm, dim3(rows), NORM_THREADS, args);
}

static gpu_rope rope_of(const kn_rope *rope)
{
    return {rope->cos, rope->sin, rope->rotary_dim};
}

static void head_norm_rope(kn_device *device, float *x, const float *w, uint32_t rows,
                           uint32_t heads, uint32_t dim, float eps, const kn_rope *rope,
                           const int32_t *pos)
{
    cuda_device *d = of(device);
    if (!have(d, dim <= GPU_HEAD_DIM_MAX, "heads of more than 256 dimensions"))
        return;
    const int32_t *at = nullptr;
    if (d->begun_rows && pos == d->begun_rows->pos)
        at = d->begun_at.pos;
    else if (rope->rotary_dim)
        at = (const int32_t *)send_small(d, pos, rows * 4);
    launch(d, gpu_head_norm_rope, dim3(ceil_div(rows * heads, 8)), 256, x, w, rows * heads, heads,
           dim, eps, rope_of(rope), at);
}

/* ---- attention ---- */

static gpu_pages pages_of(const kn_kv *kv, uint32_t layer)
{
    return {
        kv->pages,          kv->page_bytes,     kv->layer_offset[layer], (uint32_t)kv->shape.type,
        kv->shape.kv_heads, kv->shape.head_dim, kv->shape.index_dim,     kv->row_bytes,
        kv->index_row_bytes};
}

static void attn_in(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attn_in *a)
{
    cuda_device *d = of(device);
    if (!have(d, a->head_dim <= GPU_HEAD_DIM_MAX && a->index_dim <= GPU_HEAD_DIM_MAX,
              "heads of more than 256 dimensions"))
        return;
    const kn_weight *weights[] = {a->q, a->k, a->v, a->index_q, a->index_k};
    const uint32_t count = a->index_heads ? 5 : 3, n = rows->rows;
    gpu_segment segments[5];
    uint32_t stride = 0;
    bool any_halves = false, any_floats = false;
    for (uint32_t i = 0; i < count; i++)
        stride += weights[i]->rows;
    float *y = (float *)grow(d, &d->wide, (size_t)n * stride * 4);
    for (uint32_t i = 0; i < count; i++) {
        segments[i] = {weight_of(d, weights[i], false), 0, y, stride};
        y += weights[i]->rows;
        (halves(&segments[i].w) ? any_halves : any_floats) = true;
    }
    const gpu_input in =
        input_of(d, a->x, a->norm, nullptr, n, a->hidden, a->eps, any_halves, any_floats);
    const gpu_rows at = stage(d, rows);
    products(d, segments, count, in, n, a->hidden, false);
    const gpu_insert_args args = {at,
                                  pages_of(kv, a->layer),
                                  (float *)d->wide.data,
                                  stride,
                                  a->q_heads,
                                  a->index_heads,
                                  a->eps,
                                  a->q_norm,
                                  a->k_norm,
                                  a->index_q_norm,
                                  a->index_k_norm,
                                  rope_of(&a->rope),
                                  a->q_out,
                                  a->index_q_out};
    const uint32_t heads = a->q_heads + 2 * a->kv_heads + (a->index_heads ? a->index_heads + 1 : 0);
    launch(d, gpu_insert, dim3(ceil_div(heads, 8), n), 256, args);
}

static void kv_put(kn_device *device, kn_kv *kv, const kn_rows *rows, uint32_t layer,
                   const float *k, const float *v)
{
    cuda_device *d = of(device);
    launch(d, gpu_kv_put, dim3(ceil_div(2 * kv->shape.kv_heads, 8), rows->rows), 256,
           stage(d, rows), pages_of(kv, layer), k, v);
}

/* Recorded steps serve every context of their bucket. */
static uint32_t bucket(uint32_t blocks)
{
    uint32_t b = 16;
    while (b < blocks)
        b *= 2;
    return b;
}

static void select_blocks(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_select *a)
{
    cuda_device *d = of(device);
    CHECK(a->init + a->local <= a->topk);
    if (!have(d, bucket(d->longest) <= CHOOSE_BLOCKS, "contexts of more than 1,048,576 tokens"))
        return;
    const gpu_rows at = stage(d, rows);
    const uint32_t n = rows->rows, blocks = bucket(d->longest);
    gpu_select_args args = {at,         pages_of(kv, a->layer),
                            a->index_q, a->index_heads,
                            a->topk,    a->init,
                            a->local,   nullptr,
                            blocks,     a->blocks,
                            a->margin};
    args.score = (float *)grow(d, &d->score, (size_t)n * a->index_heads * blocks * 4);
    const bool fits = kv->shape.type == KN_KV_NVFP4 && 8 % a->index_heads == 0;
    if (fits && (a->index_dim == 64 || a->index_dim == 128)) {
        const bool wide = a->index_dim == 128, many = n * a->index_heads > 8;
        const uint32_t most = (uint32_t)d->processors * 16;
        const dim3 grid(base_min(ceil_div(blocks, 4), most),
                        ceil_div(n * a->index_heads, many ? 32 : 8));
        launch(d,
               many ? (wide ? gpu_index_scan128_many : gpu_index_scan64_many)
                    : (wide ? gpu_index_scan128 : gpu_index_scan64),
               grid, 128, args);
    } else {
        launch(d, gpu_index_scan, dim3(blocks, n), 128, args);
    }
    launch_with(d, blocks * 4, gpu_choose, dim3(a->index_heads, n), 256, args);
}

static void attend(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attend *a)
{
    cuda_device *d = of(device);
    const uint32_t n = rows->rows, group = a->q_heads / a->kv_heads, dim = a->head_dim;
    if (!have(d, group <= GPU_GROUP_MAX && dim <= GPU_HEAD_DIM_MAX,
              "more than 16 query heads of a kv head, or heads of more than 256 dimensions"))
        return;
    const gpu_rows at = stage(d, rows);
    gpu_attend_args args = {};
    args.rows = at;
    args.kv = pages_of(kv, a->layer);
    args.q = a->q;
    args.q_heads = a->q_heads;
    args.blocks = a->blocks;
    args.topk = a->topk;
    args.scale = (float)(1.0 / sqrt((double)dim));
    args.slots = a->blocks ? a->topk : bucket(d->longest);
    args.out = a->out;
    const size_t row = (size_t)a->q_heads * args.slots * (dim + 2) * 4;
    const uint32_t most = (uint32_t)base_min(n, base_max(1, PARTS / row));
    args.part = (float *)grow(d, &d->part, most * row);
    for (; args.first < n; args.first += most) {
        const uint32_t rows_now = n - args.first < most ? n - args.first : most;
        const dim3 grid(a->kv_heads, rows_now, args.slots);
        if (kv->shape.type == KN_KV_NVFP4 && dim == 128)
            launch(d, gpu_attend128, grid, 256, args);
        else if (kv->shape.type == KN_KV_NVFP4 && dim == 64)
            launch(d, gpu_attend64, grid, 128, args);
        else
            launch(d, gpu_attend_any, grid, 128, args);
        launch(d, gpu_attend_merge, dim3(a->q_heads, rows_now), 128, args);
    }
}

static void draft_attend(kn_device *device, const kn_kv *kv, const kn_draft_attend *a)
{
    cuda_device *d = of(device);
    if (!have(d, a->head_dim <= GPU_HEAD_DIM_MAX && a->block_rows <= 128,
              "draft blocks of more than 128 rows, or heads of more than 256 dimensions"))
        return;
    uint32_t *host = (uint32_t *)staging_begin(d, &d->other), used = 3 * a->blocks;
    for (uint32_t b = 0; b < a->blocks; b++) {
        const uint32_t count = ceil_div(a->hi[b], KN_PAGE_TOKENS);
        CHECK((used + (size_t)count) * 4 <= d->other.bytes);
        host[b] = used;
        host[a->blocks + b] = a->lo[b];
        host[2 * a->blocks + b] = a->hi[b];
        memcpy(host + used, a->pages[b], count * 4);
        used += count;
    }
    staging_send(d, &d->other, (size_t)used * 4);
    const uint32_t *at = (const uint32_t *)d->other.device;
    const gpu_draft_args args = {pages_of(kv, a->layer),
                                 a->q,
                                 a->block_k,
                                 a->block_v,
                                 a->block_rows,
                                 a->q_heads,
                                 at,
                                 at,
                                 at + a->blocks,
                                 at + 2 * a->blocks,
                                 a->window,
                                 (float)(1.0 / sqrt((double)a->head_dim)),
                                 a->out};
    launch(d, gpu_draft_attend, dim3(a->q_heads, a->blocks * a->block_rows), 128, args);
}

/* ---- MLP and mixture ---- */

/* The experts' tables on the device, by the address of the first array. A dense MLP is a mixture of
 * one. NULL: not for these kernels. */
static const experts *mixture_of(cuda_device *d, const kn_weight *gate, const kn_weight *up,
                                 const kn_weight *down, uint32_t count,
                                 const kn_weight *shared_gate, const kn_weight *shared_up,
                                 const kn_weight *shared_down)
{
    auto seen = d->mixtures.find(gate);
    if (seen != d->mixtures.end())
        return &seen->second;
    const uint32_t all = count + (shared_gate ? 1 : 0);
    std::vector<gpu_weight> host((size_t)all * 3);
    experts m = {};
    m.wide = true;
    for (uint32_t e = 0; e < all; e++) {
        const kn_weight *w[3] = {e < count ? &gate[e] : shared_gate, e < count ? &up[e] : shared_up,
                                 e < count ? &down[e] : shared_down};
        for (int i = 0; i < 3; i++) {
            if (!have(d, can_tile(w[i]), "an MLP that is not a multiple of 16 by 64"))
                return nullptr;
            host[i * all + e] = weight_of(d, w[i], false);
        }
        const bool in = halves(&host[e]), h = halves(&host[2 * all + e]);
        if (!have(d, in == halves(&host[all + e]), "a gate and an up of different kinds"))
            return nullptr;
        (in ? m.halves_in : m.floats_in) = true;
        m.halves_h |= h;
        m.wide &= in && h;
        m.h_width = m.h_width > w[2]->cols ? m.h_width : w[2]->cols;
    }
    void *device = nullptr;
    if (TRY(d, cudaMalloc(&device, host.size() * sizeof(gpu_weight)))) {
        d->owned.push_back(device);
        TRY(d, cudaMemcpyAsync(device, host.data(), host.size() * sizeof(gpu_weight),
                               cudaMemcpyHostToDevice, d->side));
        TRY(d, cudaStreamSynchronize(d->side));
    }
    m.gate = (const gpu_weight *)device;
    m.up = m.gate + all;
    m.down = m.up + all;
    return &d->mixtures.emplace(gate, m).first->second;
}

/* Fields that gate, up and down share; h and out grow. */
static gpu_expert_args expert_args(cuda_device *d, const experts *m, gpu_input in, uint32_t rows,
                                   uint32_t slots, uint32_t hidden, const kn_act *act)
{
    gpu_expert_args a = {};
    a.gate = m->gate;
    a.up = m->up;
    a.down = m->down;
    a.slots = slots;
    a.cols = hidden;
    a.hidden = hidden;
    a.rows = rows;
    a.in = in;
    const size_t words = (size_t)rows * slots * m->h_width;
    a.h_halves = (uint32_t *)grow(d, &d->h, words * 4 * (m->wide ? 1 : 2));
    a.h_floats = (float *)(a.h_halves + (m->wide ? 0 : words));
    a.h_stride = m->h_width;
    /* |h| <= (limit + 1) limit: as large a power of two as keeps that below 2^15. */
    int e;
    frexpf((act->limit + 1.0f) * act->limit, &e);
    a.h_scale = ldexpf(1.0f, 15 - e);
    a.alpha = act->alpha;
    a.limit = act->limit;
    a.out = (float *)grow(d, &d->out, (size_t)rows * slots * hidden * 4);
    return a;
}

static void experts_run(cuda_device *d, const gpu_expert_args *a, uint32_t inner, uint32_t tiles,
                        uint32_t most)
{
    const uint32_t up = inner / 16, down = a->hidden / 16;
    if (most == GPU_WIDE) {
        launch_with(d, WIDE_SHARED, gpu_expert_up_wide, dim3(ceil_div(up, 4), tiles), 256, *a);
        launch_with(d, WIDE_SHARED, gpu_expert_down_wide, dim3(ceil_div(down, 8), tiles), 256, *a);
    } else if (most == 8) {
        launch_strips(d, gpu_expert_up8, dim3(up, tiles), 2, 16, *a);
        launch_strips(d, gpu_expert_down8, dim3(down, tiles), 1, 16, *a);
    } else {
        launch_strips(d, gpu_expert_up4, dim3(up, tiles), 2, 32, *a);
        launch_strips(d, gpu_expert_down4, dim3(down, tiles), 1, 32, *a);
    }
}

static void mlp(kn_device *device, uint32_t rows, const kn_mlp *a)
{
    cuda_device *d = of(device);
    const experts *m = mixture_of(d, a->gate, a->up, a->down, 1, nullptr, nullptr, nullptr);
    if (!m)
        return;
    const gpu_input in =
        input_of(d, a->x, a->norm, nullptr, rows, a->hidden, a->eps, m->halves_in, m->floats_in);
    const gpu_expert_args args = expert_args(d, m, in, rows, 1, a->hidden, &a->act);
    const uint32_t most = m->wide && rows > SMALL_ROWS ? GPU_WIDE : rows > 4 ? 8 : 4;
    experts_run(d, &args, a->inner, ceil_div(rows, most), most);
    launch(d, gpu_expert_add, dim3(rows, ceil_div(a->hidden, 256)), 256, a->x,
           (const float *)args.out, (const float *)nullptr, 1u, 0u, a->hidden);
}

static void moe(kn_device *device, uint32_t rows, const kn_moe *a)
{
    cuda_device *d = of(device);
    if (!have(d, a->experts < 1024 && a->topk <= GPU_ROUTES_MAX,
              "more than 1,023 experts, or 16 of them a row"))
        return;
    const bool shared = a->shared_inner > 0;
    const uint32_t slots = a->topk + shared;
    const experts *m = mixture_of(d, a->w1, a->w3, a->w2, a->experts,
                                  shared ? a->shared_gate : nullptr, a->shared_up, a->shared_down);
    if (!m)
        return;
    const gpu_input in =
        input_of(d, a->x, a->norm, nullptr, rows, a->hidden, a->eps, m->halves_in, true);

    const size_t pairs = (size_t)rows * slots;
    gpu_route_args route = {
        nullptr,      a->bias,         1, rows, a->experts, a->topk, a->routed_scale,
        a->route_ids, a->route_weights};
    if (a->experts % 16 == 0 && a->hidden % 16 == 0) {
        float *part = (float *)grow(d, &d->logits, (size_t)rows * a->experts * ROUTER_SLICES * 4);
        route.logits = part;
        route.slices = ROUTER_SLICES;
        launch(d, gpu_router, dim3(a->experts / 16, ceil_div(rows, 8), ROUTER_SLICES / 8), 256,
               a->router, in.floats, a->hidden, rows, a->experts, part);
    } else {
        gpu_segment plain = {};
        plain.w = {(const uint8_t *)a->router, nullptr, 1.0f, KN_F32, a->experts, a->hidden, 0};
        plain.stride = a->experts;
        plain.y = (float *)grow(d, &d->logits, (size_t)rows * a->experts * 4);
        route.logits = plain.y;
        products(d, &plain, 1, in, rows, a->hidden, false);
    }
    if (!route.ids)
        route.ids = (int32_t *)grow(d, &d->ids, pairs * 4);
    if (!route.weights)
        route.weights = (float *)grow(d, &d->weights, pairs * 4);
    launch(d, gpu_route, dim3(rows), 256, route);

    const bool wide = m->wide && rows * a->topk > a->experts * 8;
    const uint32_t most = wide ? GPU_WIDE : rows > 4 ? 8 : 4;
    const uint32_t full = (uint32_t)(pairs / most) + a->experts + 1;
    const uint32_t tiles = full < pairs ? full : (uint32_t)pairs;
    gpu_group_args group = {route.ids, rows, a->experts, a->topk, slots, most};
    group.pairs = (uint32_t *)grow(d, &d->pairs, pairs * 4);
    group.tiles = (uint32_t *)grow(d, &d->tiles, ((size_t)tiles * 3 + 1) * 4) + 1;
    group.tile_count = (uint32_t *)d->tiles.data;
    launch(d, gpu_group, dim3(1), ceil_div(a->experts + 1, 256) * 256, group);

    gpu_expert_args args = expert_args(d, m, in, rows, slots, a->hidden, &a->act);
    args.tiles = group.tiles;
    args.tile_count = group.tile_count;
    args.pairs = group.pairs;
    experts_run(d, &args, a->inner > a->shared_inner ? a->inner : a->shared_inner, tiles, most);
    launch(d, gpu_expert_add, dim3(rows, ceil_div(a->hidden, 256)), 256, a->x,
           (const float *)args.out, (const float *)route.weights, slots, a->topk, a->hidden);
}

/* ---- memory ---- */

static void *take(kn_device *device, size_t bytes, base_err *err)
{
    cuda_device *d = of(device);
    void *memory = nullptr;
    if ((d->memory_max && d->used + bytes > d->memory_max) ||
        cudaMalloc(&memory, bytes ? bytes : 1) != cudaSuccess) {
        (void)cudaGetLastError();
        size_t free_now = 0, total = 0;
        (void)cudaMemGetInfo(&free_now, &total);
        base_fail(err, BASE_NOMEM, "GPU %d: no memory for %.2f GiB: %.2f of %.2f GiB are free",
                  d->index, (double)bytes / 0x1p30, (double)free_now / 0x1p30,
                  (double)total / 0x1p30);
        return nullptr;
    }
    d->used += bytes;
    return memory;
}

static void give(kn_device *device, void *memory, size_t bytes)
{
    cuda_device *d = of(device);
    if (!memory)
        return;
    /* Weights in it are gone; what is put at their addresses is new. */
    const uint8_t *from = (const uint8_t *)memory;
    d->tiled.erase(d->tiled.lower_bound(from), d->tiled.lower_bound(from + bytes));
    d->mixtures.clear();
    TRY(d, cudaStreamSynchronize(d->stream));
    TRY(d, cudaFree(memory));
    d->used -= bytes;
}

static void memory(const kn_device *device, size_t *available, size_t *total)
{
    cuda_device *d = of(device);
    if (cudaMemGetInfo(available, total) != cudaSuccess)
        *available = *total = 0;
    if (d->memory_max) {
        const size_t left = d->memory_max > d->used ? d->memory_max - d->used : 0;
        *available = *available < left ? *available : left;
    }
}

static void upload(kn_device *device, void *dst, const void *src, size_t bytes)
{
    cuda_device *d = of(device);
    TRY(d, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, d->stream));
    TRY(d, cudaStreamSynchronize(d->stream));
}

static void download(kn_device *device, void *dst, const void *src, size_t bytes)
{
    cuda_device *d = of(device);
    if (!TRY(d, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, d->stream)) ||
        !TRY(d, cudaStreamSynchronize(d->stream)))
        memset(dst, 0, bytes);
}

static void copy(kn_device *device, void *dst, size_t dst_stride, const void *src,
                 size_t src_stride, size_t bytes, size_t count)
{
    cuda_device *d = of(device);
    TRY(d, cudaMemcpy2DAsync(dst, dst_stride, src, src_stride, bytes, count,
                             cudaMemcpyDeviceToDevice, d->stream));
}

static void fill(kn_device *device, void *dst, size_t bytes, uint64_t seed, uint64_t stream,
                 const uint8_t table[256])
{
    cuda_device *d = of(device);
    if (!table) {
        TRY(d, cudaMemsetAsync(dst, 0, bytes, d->stream));
        return;
    }
    const uint8_t *at = (const uint8_t *)send_small(d, table, 256);
    if (d->fault == cudaSuccess && bytes) {
        gpu_fill<<<(uint32_t)((bytes + 4095) / 4096), 256, 0, d->stream>>>((uint8_t *)dst, bytes,
                                                                           seed, stream, at);
        TRY(d, cudaGetLastError());
    }
    /* What was filled may be a weight, and those are read ahead of wait_for_previous. */
    TRY(d, cudaStreamSynchronize(d->stream));
}

static void wait(kn_device *device)
{
    cuda_device *d = of(device);
    TRY(d, cudaStreamSynchronize(d->stream));
}

static base_code status(const kn_device *device, base_err *err)
{
    cuda_device *d = of(device);
    if (d->fault == cudaSuccess)
        return BASE_OK;
    return base_fail(err, BASE_DEVICE, "GPU %d: %s (%s)", d->index, cudaGetErrorString(d->fault),
                     d->fault_at);
}

static bool graph_begin(kn_device *device, uint64_t key)
{
    cuda_device *d = of(device);
    const auto name = std::make_tuple(key, d->begun_at.rows, bucket(d->longest));
    const auto seen = d->graphs.find(name);
    if (seen != d->graphs.end()) {
        seen->second.used = ++d->clock;
        if (d->fault == cudaSuccess)
            TRY(d, cudaGraphLaunch(seen->second.exec, d->stream));
        return false;
    }
    if (TRY(d, cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeRelaxed))) {
        d->recording = true;
        d->recorded = name;
    }
    return true;
}

static void graph_end(kn_device *device)
{
    cuda_device *d = of(device);
    if (!d->recording)
        return;
    d->recording = false;
    cudaGraph_t made = nullptr;
    cudaGraphExec_t exec = nullptr;
    if (!TRY(d, cudaStreamEndCapture(d->stream, &made)))
        return;
    if (TRY(d, cudaGraphInstantiate(&exec, made, 0)) && TRY(d, cudaGraphLaunch(exec, d->stream))) {
        if (d->graphs.size() >= GRAPHS_MAX) {
            auto oldest = d->graphs.begin();
            for (auto i = d->graphs.begin(); i != d->graphs.end(); ++i)
                if (i->second.used < oldest->second.used)
                    oldest = i;
            cudaGraphExecDestroy(oldest->second.exec);
            d->graphs.erase(oldest);
        }
        d->graphs[d->recorded] = {exec, ++d->clock};
    }
    cudaGraphDestroy(made);
}

static void kv_copy_page(kn_kv *kv, uint32_t to, uint32_t from, uint32_t tokens)
{
    cuda_device *d = of(kv->device);
    std::vector<uint64_t> planes;
    for (uint32_t l = 0; l < kv->shape.layers; l++)
        for (uint32_t p = 0; p < 2 * kv->shape.kv_heads + kv->shape.has_index[l]; p++) {
            const bool index = p == 2 * kv->shape.kv_heads;
            planes.push_back(
                kn_kv_plane_offset(kv, l, index ? KN_PLANE_INDEX : KN_PLANE_K, index ? 0 : p));
            planes.push_back(index ? kv->index_row_bytes : kv->row_bytes);
        }
    if (!have(d, planes.size() * 8 <= d->small.bytes, "pages of more than 8,192 planes"))
        return;
    const uint64_t *at = (const uint64_t *)send_small(d, planes.data(), planes.size() * 8);
    if (d->fault == cudaSuccess) {
        gpu_copy_page<<<(uint32_t)planes.size() / 2, 256, 0, d->stream>>>(
            kv->pages + to * kv->page_bytes, kv->pages + from * kv->page_bytes, at, tokens);
        TRY(d, cudaGetLastError());
    }
}

/* ---- the device ---- */

static const char *describe(const kn_device *device)
{
    return of(device)->text;
}

static void destroy(kn_device *device)
{
    cuda_device *d = of(device);
    cudaSetDevice(d->index);
    if (d->stream)
        cudaStreamSynchronize(d->stream);
    for (auto &g : d->graphs)
        cudaGraphExecDestroy(g.second.exec);
    for (void *memory : d->owned)
        cudaFree(memory);
    staging_destroy(&d->begun);
    staging_destroy(&d->other);
    staging_destroy(&d->small);
    if (d->stream)
        cudaStreamDestroy(d->stream);
    if (d->side)
        cudaStreamDestroy(d->side);
    delete d;
}

static const kn_ops ops = {
    .name = "cuda",
    .embed = embed,
    .norm = norm,
    .head_norm_rope = head_norm_rope,
    .linear = linear,
    .attn_in = attn_in,
    .select = select_blocks,
    .attend = attend,
    .mlp = mlp,
    .moe = moe,
    .head = head,
    .kv_put = kv_put,
    .draft_attend = draft_attend,
};

static base_code create(kn_device **out, const kn_device_options *options, base_err *err);

static const kn_backend backend = {
    .version = KN_BACKEND_VERSION,
    .name = "cuda",
    .numerics = "cuda-1",
    .create = create,
    .destroy = destroy,
    .describe = describe,
    .alloc = take,
    .free = give,
    .memory = memory,
    .upload = upload,
    .download = download,
    .copy = copy,
    .fill = fill,
    .wait = wait,
    .status = status,
    .rows_begin = rows_begin,
    .graph_begin = graph_begin,
    .graph_end = graph_end,
    .kv_copy_page = kv_copy_page,
};

static base_code create(kn_device **out, const kn_device_options *options, base_err *err)
{
    int count = 0;
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess || count == 0)
        return base_fail(err, BASE_UNSUPPORTED, "cuda: no GPU here (%s)",
                         code == cudaSuccess ? "none found" : cudaGetErrorString(code));
    if (options->index >= (uint32_t)count)
        return base_fail(err, BASE_UNSUPPORTED, "cuda: GPU %u does not exist, there are %d",
                         options->index, count);
    cudaDeviceProp prop;
    cudaFuncAttributes loaded;
    if (cudaSetDevice((int)options->index) != cudaSuccess ||
        cudaGetDeviceProperties(&prop, (int)options->index) != cudaSuccess)
        return base_fail(err, BASE_DEVICE, "cuda: GPU %u does not answer", options->index);
    code = cudaFuncGetAttributes(&loaded, gpu_norm);
    static const struct {
        const void *kernel;
        int bytes;
    } large[] = {{(const void *)gpu_linear_wide, WIDE_SHARED},
                 {(const void *)gpu_expert_up_wide, WIDE_SHARED},
                 {(const void *)gpu_expert_down_wide, WIDE_SHARED},
                 {(const void *)gpu_linear4, 8 * RING_BYTES},
                 {(const void *)gpu_linear8, 8 * RING_BYTES},
                 {(const void *)gpu_expert_up4, 16 * RING_BYTES},
                 {(const void *)gpu_expert_up8, 16 * RING_BYTES},
                 {(const void *)gpu_expert_down4, 8 * RING_BYTES},
                 {(const void *)gpu_expert_down8, 8 * RING_BYTES}};
    for (const auto &k : large)
        if (code == cudaSuccess)
            code = cudaFuncSetAttribute(k.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        k.bytes);
    if (code != cudaSuccess)
        return base_fail(err, BASE_UNSUPPORTED, "cuda: no code for %s (sm_%d%d): %s", prop.name,
                         prop.major, prop.minor, cudaGetErrorString(code));
    if (options->rows_max == 0 || options->context_max == 0)
        return base_fail(err, BASE_INVALID,
                         "device: rows_max %u and context_max %u must be at least 1",
                         options->rows_max, options->context_max);
    cuda_device *d = new (std::nothrow) cuda_device;
    if (!d)
        return base_fail(err, BASE_NOMEM, "device: out of memory");
    d->base.ops = &ops;
    d->base.backend = &backend;
    d->base.impl = d;
    d->index = (int)options->index;
    d->processors = prop.multiProcessorCount;
    d->memory_max = options->memory_max;
    d->rows_max = options->rows_max;
    d->pages_max = options->context_max / KN_PAGE_TOKENS + 1;
    snprintf(d->text, sizeof d->text, "%s, sm_%d%d, %d processors, %.1f GiB", prop.name, prop.major,
             prop.minor, prop.multiProcessorCount, (double)prop.totalGlobalMem / 0x1p30);
    /* Page tables: of every row its own sequence, as far as 64 MiB go. */
    const size_t tables = base_min((size_t)d->rows_max * d->pages_max, (size_t)16 << 20);
    const size_t bytes = ((size_t)d->rows_max * 4 + tables) * 4;
    bool fine = TRY(d, cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking));
    fine = fine && TRY(d, cudaStreamCreateWithFlags(&d->side, cudaStreamNonBlocking));
    fine = fine && staging_create(d, &d->begun, bytes) && staging_create(d, &d->other, bytes) &&
           staging_create(d, &d->small, base_max((size_t)d->rows_max * 4, (size_t)1 << 17));
    if (!fine) {
        base_fail(err, BASE_NOMEM, "cuda: GPU %u: %s (%s)", options->index,
                  cudaGetErrorString(d->fault), d->fault_at);
        destroy(&d->base);
        return BASE_NOMEM;
    }
    *out = &d->base;
    return BASE_OK;
}

extern "C" __attribute__((visibility("default"))) const kn_backend *kn_backend_get(uint32_t version)
{
    return version == KN_BACKEND_VERSION ? &backend : nullptr;
}
