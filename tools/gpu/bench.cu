/* gpu_bench MODULE.so [NAME…]: how fast a backend's operations are on this GPU, and how fast they
 * could be.
 *
 *   k.bw             read stream over 4 GiB; every other row's limit is its bytes over this
 *   k.gemv.TYPE.mN   N rows with a ring of 6,144 x 9,216 (MXFP8) or 3,072 x 6,144 (NVFP4, BF16)
 *   k.gemm.TYPE.mN   the same for the rows of a prefill, in TFLOP/s
 *   k.moe.mN         router, 4 of 128 experts a row, shared expert of M3.1; bytes of the experts
 * touched k.qkv_fused.mN   norm, five products, norms of heads, rotation, insert; and the bare
 * products k.index.L        index scan and choice of 16 blocks at L tokens k.sparse.mN attention
 * over 16 blocks of 128 e.decode.L       24 layers of full width (3 dense, 21 mixtures) and the
 * head, one row at L tokens e.prefill.N@L    N rows of one sequence at L tokens, the same slice
 *
 * Each row is a graph of some operations on rotating data, replayed: median and best of 9 rounds.
 * Operations are those of kernels/backend.h, with all that belongs to them. Bytes are counted by
 * hand: weights and their scales once, and what is read of the pages. */
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#define _Noreturn [[noreturn]]
extern "C" {
#include "engine/base/clock.h"
#include "engine/base/num.h"
#include "kernels/backend.h"
}

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS 9

static kn_device *gpu;
static const kn_backend *backend;
static double read_gbs;
static uint64_t next_key = 1, next_stream = 1;
static std::vector<std::string> wanted;

static bool is_wanted(const char *name)
{
    if (wanted.empty())
        return true;
    for (const std::string &w : wanted)
        if (strncmp(name, w.c_str(), w.size()) == 0)
            return true;
    return false;
}

static void stop_if_broken(void)
{
    base_err err = BASE_ERR_INIT;
    if (backend->status(gpu, &err)) {
        fprintf(stderr, "gpu_bench: %s\n", err.text);
        exit(1);
    }
}

/* ---- data ---- */

static uint8_t *take(size_t bytes)
{
    base_err err = BASE_ERR_INIT;
    void *p = backend->alloc(gpu, bytes, &err);
    if (!p) {
        fprintf(stderr, "gpu_bench: %s\n", err.text);
        exit(1);
    }
    return (uint8_t *)p;
}

/* Random bytes low … low + count - 1, without E4M3's NaN. */
static void random_bytes(void *dst, size_t bytes, uint32_t low, uint32_t count)
{
    uint8_t table[256];
    for (uint32_t i = 0; i < 256; i++) {
        const uint32_t b = low + i % count;
        table[i] = (uint8_t)(count > 128 && (b & 0x7f) == 0x7f ? b ^ 1 : b);
    }
    backend->fill(gpu, dst, bytes, 1, next_stream++, table);
}

/* Floats in (-size, size). */
static float *random_floats(size_t count, float size)
{
    std::vector<float> host(count);
    for (size_t i = 0; i < count; i++)
        host[i] = size * (float)((double)(rand() % 65536) / 32768.0 - 1.0);
    float *p = (float *)take(count * 4);
    backend->upload(gpu, p, host.data(), count * 4);
    return p;
}

static size_t weight_bytes(kn_type type, uint32_t rows, uint32_t cols)
{
    const size_t n = (size_t)rows * cols;
    return type == KN_NVFP4 ? n / 2 + n / 16 : type == KN_MXFP8 ? n + n / 32 : n * 2;
}

static kn_weight weight(kn_type type, uint32_t rows, uint32_t cols)
{
    const size_t n = (size_t)rows * cols;
    kn_weight w = {type, rows, cols, nullptr, nullptr, 1.0f, nullptr};
    const size_t codes = type == KN_NVFP4 ? n / 2 : type == KN_MXFP8 ? n : n * 2;
    uint8_t *data = take(base_align_up(weight_bytes(type, rows, cols), 256));
    w.data = data;
    if (type == KN_BF16) { /* both halves 0x3a … 0x3d: values around 0.01 */
        random_bytes(data, codes, 0x3a, 4);
    } else {
        random_bytes(data, codes, 0, 256);
        w.scale = data + codes;
        random_bytes(data + codes, type == KN_NVFP4 ? n / 16 : n / 32,
                     type == KN_NVFP4 ? 0x18 : 108, type == KN_NVFP4 ? 16 : 4);
        if (type == KN_NVFP4)
            w.scale_global = 64.0f;
    }
    return w;
}

/* ---- time ---- */

typedef struct timing {
    double median, best; /* seconds of one run of `issue` */
} timing;

/* `issue` as a graph. */
static timing measure(const kn_rows *rows, const std::function<void()> &issue, bool graph = true)
{
    const uint64_t key = next_key++;
    std::vector<double> seconds;
    backend->rows_begin(gpu, rows);
    uint32_t repeat = 1;
    for (int round = -2; round < ROUNDS; round++) {
        backend->wait(gpu);
        const uint64_t start = base_now_ns();
        for (uint32_t i = 0; i < repeat; i++)
            if (!graph || backend->graph_begin(gpu, key)) {
                issue();
                if (graph)
                    backend->graph_end(gpu);
            }
        backend->wait(gpu);
        const double s = (double)(base_now_ns() - start) * 1e-9 / repeat;
        if (round >= 0)
            seconds.push_back(s);
        else if (round == -1) /* at least 20 ms a round */
            repeat = (uint32_t)fmin(200.0, fmax(1.0, 0.02 / s));
    }
    stop_if_broken();
    std::sort(seconds.begin(), seconds.end());
    return {seconds[ROUNDS / 2], seconds[0]};
}

static void report(const std::string &name, timing t, double count, double bytes, const char *note)
{
    const double us = t.median / count * 1e6, limit = bytes / read_gbs * 1e-3;
    printf("%-24s %9.2f us (best %.2f)", name.c_str(), us, t.best / count * 1e6);
    if (bytes > 0)
        printf("  %8.3f MB  %7.0f GB/s  %5.1f %% of limit", bytes * 1e-6, bytes / us * 1e-3,
               100.0 * limit / us);
    printf("  %s\n", note);
    fflush(stdout);
}

static kn_rows rows_of(uint32_t rows, uint32_t last, const uint32_t *const *pages)
{
    int32_t *pos = (int32_t *)calloc(rows, 4), *token = (int32_t *)calloc(rows, 4);
    uint32_t *seq = (uint32_t *)calloc(rows, 4);
    for (uint32_t r = 0; r < rows; r++) {
        pos[r] = (int32_t)(last + 1 - rows + r);
        token[r] = (int32_t)r;
    }
    return {rows, token, pos, seq, pages};
}

static const uint32_t *some_pages(uint32_t count)
{
    uint32_t *p = (uint32_t *)calloc(count, 4);
    for (uint32_t i = 0; i < count; i++)
        p[i] = i;
    for (uint32_t i = count - 1; i > 0; i--)
        std::swap(p[i], p[(uint32_t)rand() % (i + 1)]);
    return p;
}

/* ---- rows ---- */

__global__ void read_kernel(const uint4 *at, size_t count, uint32_t *out)
{
    uint32_t sum = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x * 4 + threadIdx.x; i + 3 * blockDim.x < count;
         i += (size_t)gridDim.x * blockDim.x * 4) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint4 v = at[i + (size_t)j * blockDim.x];
            sum += v.x ^ v.y ^ v.z ^ v.w;
        }
    }
    if (sum == 12345)
        *out = sum;
}

static void bench_bandwidth(void)
{
    const size_t bytes = (size_t)4 << 30;
    uint8_t *p = take(bytes);
    random_bytes(p, bytes, 0, 256);
    backend->wait(gpu);
    double best = 1e9;
    for (int grid = 1; grid <= 8; grid *= 2)
        for (int i = 0; i < 4; i++) {
            cudaEvent_t a, b;
            float ms;
            cudaEventCreate(&a);
            cudaEventCreate(&b);
            cudaEventRecord(a);
            read_kernel<<<132 * grid, 512>>>((const uint4 *)p, bytes / 16, (uint32_t *)p);
            cudaEventRecord(b);
            cudaEventSynchronize(b);
            cudaEventElapsedTime(&ms, a, b);
            best = fmin(best, ms * 1e-3);
        }
    read_gbs = (double)bytes / best * 1e-9;
    printf("%-24s %9.0f GB/s read\n", "k.bw", read_gbs);
    backend->free(gpu, p, bytes);
}

static void bench_products(void)
{
    static const struct {
        kn_type type;
        const char *name;
        uint32_t outs, cols;
    } types[] = {{KN_MXFP8, "mxfp8", 9216, 6144},
                 {KN_NVFP4, "nvfp4", 3072, 6144},
                 {KN_BF16, "bf16", 3072, 6144}};
    static const uint32_t counts[] = {1, 2, 4, 8, 64, 512, 2048};
    for (const auto &t : types) {
        const size_t bytes = weight_bytes(t.type, t.outs, t.cols);
        const uint32_t ring = (uint32_t)(((size_t)1 << 30) / bytes) + 1;
        std::vector<kn_weight> w;
        for (uint32_t i = 0; i < ring; i++)
            w.push_back(weight(t.type, t.outs, t.cols));
        for (uint32_t m : counts) {
            char name[64];
            snprintf(name, sizeof name, "k.%s.%s.m%u", m > 8 ? "gemm" : "gemv", t.name, m);
            if (!is_wanted(name) || (m > 64 && t.type == KN_BF16))
                continue;
            float *x = random_floats((size_t)m * t.cols, 1.0f);
            float *y = (float *)take((size_t)m * t.outs * 4);
            const uint32_t n = m > 8 ? 4 : ring;
            const uint32_t *pages[1] = {some_pages(1 + m / 128)};
            const kn_rows rows = rows_of(m, m - 1, pages);
            const timing time = measure(&rows, [&] {
                for (uint32_t i = 0; i < n; i++)
                    gpu->ops->linear(gpu, y, x, &w[i], m, false);
            });
            char note[64] = "";
            if (m > 8)
                snprintf(note, sizeof note, "%.1f TFLOP/s of the model's",
                         2.0 * m * t.outs * t.cols * n / time.median * 1e-12);
            report(name, time, n, (double)bytes, note);
            backend->free(gpu, x, (size_t)m * t.cols * 4);
            backend->free(gpu, y, (size_t)m * t.outs * 4);
        }
        for (kn_weight &one : w)
            backend->free(gpu, (void *)one.data, base_align_up(bytes, 256));
    }
}

/* ---- a slice of M3.1-Flash ---- */

#define HIDDEN 6144u
#define Q_HEADS 64u
#define KV_HEADS 4u
#define DIM 128u
#define INDEX_HEADS 4u
#define EXPERTS 128u
#define ROUTES 4u
#define INNER 3072u
#define DENSE 12288u
#define VOCAB 200064u
#define TOPK 16u

typedef struct layer {
    kn_weight q, k, v, o, index_q, index_k, gate, up, down, shared_gate, shared_up, shared_down;
    std::vector<kn_weight> w1, w2, w3;
    float *norm, *head_norm, *router, *bias;
    bool moe;
} layer;

typedef struct slice {
    std::vector<layer> layers;
    kn_weight embedding, head;
    kn_rope rope;
    kn_kv *kv;
    uint32_t pages;
    float *x, *q, *index_q, *out, *logits;
    int32_t *blocks, *route_ids;
    uint32_t rows_max;
} slice;

static layer make_layer(bool moe)
{
    layer l = {};
    l.q = weight(KN_MXFP8, Q_HEADS * DIM, HIDDEN);
    l.k = weight(KN_MXFP8, KV_HEADS * DIM, HIDDEN);
    l.v = weight(KN_MXFP8, KV_HEADS * DIM, HIDDEN);
    l.index_q = weight(KN_MXFP8, INDEX_HEADS * DIM, HIDDEN);
    l.index_k = weight(KN_MXFP8, DIM, HIDDEN);
    l.o = weight(KN_MXFP8, HIDDEN, Q_HEADS * DIM);
    l.norm = random_floats(HIDDEN, 0.1f);
    l.head_norm = random_floats(DIM, 0.1f);
    l.moe = moe;
    if (!moe) {
        l.gate = weight(KN_MXFP8, DENSE, HIDDEN);
        l.up = weight(KN_MXFP8, DENSE, HIDDEN);
        l.down = weight(KN_MXFP8, HIDDEN, DENSE);
        return l;
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        l.w1.push_back(weight(KN_NVFP4, INNER, HIDDEN));
        l.w3.push_back(weight(KN_NVFP4, INNER, HIDDEN));
        l.w2.push_back(weight(KN_NVFP4, HIDDEN, INNER));
    }
    l.shared_gate = weight(KN_MXFP8, INNER, HIDDEN);
    l.shared_up = weight(KN_MXFP8, INNER, HIDDEN);
    l.shared_down = weight(KN_MXFP8, HIDDEN, INNER);
    l.router = random_floats((size_t)EXPERTS * HIDDEN, 0.05f);
    l.bias = random_floats(EXPERTS, 0.01f);
    return l;
}

static double attention_bytes(void)
{
    return (double)weight_bytes(KN_MXFP8, (Q_HEADS + 2 * KV_HEADS + INDEX_HEADS + 1) * DIM, HIDDEN);
}

static double moe_bytes(double touched)
{
    return touched * 3.0 * (double)weight_bytes(KN_NVFP4, INNER, HIDDEN) +
           3.0 * (double)weight_bytes(KN_MXFP8, INNER, HIDDEN) + 4.0 * EXPERTS * HIDDEN;
}

static slice make_slice(uint32_t layers, uint32_t pages, uint32_t rows_max)
{
    slice s = {};
    for (uint32_t l = 0; l < layers; l++)
        s.layers.push_back(make_layer(l >= 3));
    kn_kv_shape shape = {KN_KV_NVFP4, layers, KV_HEADS, DIM, DIM, {}, pages};
    memset(shape.has_index, 1, layers);
    base_err err = BASE_ERR_INIT;
    if (kn_kv_create(&s.kv, gpu, &shape, &err)) {
        fprintf(stderr, "gpu_bench: %s\n", err.text);
        exit(1);
    }
    random_bytes(s.kv->pages, s.kv->bytes, 0, 120); /* scales up to 240 */
    s.pages = pages;
    s.rope = {random_floats((size_t)pages * 128 * 32, 1.0f),
              random_floats((size_t)pages * 128 * 32, 1.0f), 64};
    s.rows_max = rows_max;
    s.x = random_floats((size_t)rows_max * HIDDEN, 1.0f);
    s.q = (float *)take((size_t)rows_max * Q_HEADS * DIM * 4);
    s.out = (float *)take((size_t)rows_max * Q_HEADS * DIM * 4);
    s.index_q = (float *)take((size_t)rows_max * INDEX_HEADS * DIM * 4);
    s.blocks = (int32_t *)take((size_t)rows_max * INDEX_HEADS * TOPK * 4);
    s.route_ids = (int32_t *)take((size_t)rows_max * ROUTES * 4);
    return s;
}

static void attn_in(const slice *s, const layer *l, uint32_t number, const kn_rows *rows, float *x)
{
    const kn_attn_in a = {
        x,           HIDDEN,      Q_HEADS,      KV_HEADS,     DIM,          INDEX_HEADS,
        DIM,         1e-6f,       l->norm,      &l->q,        &l->k,        &l->v,
        &l->index_q, &l->index_k, l->head_norm, l->head_norm, l->head_norm, l->head_norm,
        s->rope,     number,      s->q,         s->index_q};
    gpu->ops->attn_in(gpu, s->kv, rows, &a);
}

static void choose(const slice *s, uint32_t number, const kn_rows *rows)
{
    const kn_select a = {s->index_q, INDEX_HEADS, DIM, number, TOPK, 0, 1, s->blocks, nullptr};
    gpu->ops->select(gpu, s->kv, rows, &a);
}

static void attend(const slice *s, uint32_t number, const kn_rows *rows)
{
    const kn_attend a = {s->q, Q_HEADS, KV_HEADS, DIM, number, s->blocks, TOPK, s->out};
    gpu->ops->attend(gpu, s->kv, rows, &a);
}

static void mixture(const slice *s, const layer *l, uint32_t rows, float *x)
{
    const kn_act act = {1.702f, 7.0f};
    const kn_moe a = {x,
                      HIDDEN,
                      INNER,
                      INNER,
                      EXPERTS,
                      ROUTES,
                      1e-6f,
                      2.0f,
                      l->norm,
                      l->router,
                      l->bias,
                      l->w1.data(),
                      l->w2.data(),
                      l->w3.data(),
                      &l->shared_gate,
                      &l->shared_up,
                      &l->shared_down,
                      act,
                      s->route_ids,
                      nullptr};
    gpu->ops->moe(gpu, rows, &a);
}

static void step(const slice *s, const kn_rows *rows)
{
    gpu->ops->embed(gpu, s->x, &s->embedding, rows->token, rows->rows);
    for (uint32_t i = 0; i < s->layers.size(); i++) {
        const layer *l = &s->layers[i];
        attn_in(s, l, i, rows, s->x);
        choose(s, i, rows);
        attend(s, i, rows);
        gpu->ops->linear(gpu, s->x, s->out, &l->o, rows->rows, true);
        if (l->moe) {
            mixture(s, l, rows->rows, s->x);
            continue;
        }
        const kn_mlp a = {s->x,     HIDDEN, DENSE,    1e-6f,         l->norm,
                          &l->gate, &l->up, &l->down, {1.702f, 7.0f}};
        gpu->ops->mlp(gpu, rows->rows, &a);
    }
}

static void bench_layer(void)
{
    slice s = make_slice(8, 2049, 64);
    const uint32_t *pages[1] = {some_pages(2049)};
    const uint32_t mixtures = 5;
    for (uint32_t m : {1u, 2u, 4u, 8u}) {
        const std::string tail = ".m" + std::to_string(m);
        const kn_rows rows = rows_of(m, 128 * 1024 - 1, pages);
        if (is_wanted("k.moe")) {
            /* Inputs of many kinds, so that the routes differ. */
            float *many = random_floats((size_t)16 * m * HIDDEN, 1.0f);
            float *x = (float *)take((size_t)m * HIDDEN * 4);
            std::vector<int32_t> ids(m * ROUTES);
            double touched = 0;
            for (int i = 0; i < 16; i++) {
                mixture(&s, &s.layers[3 + i % mixtures], m, many + (size_t)i * m * HIDDEN);
                backend->download(gpu, ids.data(), s.route_ids, ids.size() * 4);
                std::sort(ids.begin(), ids.end());
                touched += (double)(std::unique(ids.begin(), ids.end()) - ids.begin());
            }
            const timing t = measure(&rows, [&] {
                for (int i = 0; i < 16; i++)
                    mixture(&s, &s.layers[3 + i % mixtures], m, many + (size_t)i * m * HIDDEN);
            });
            char note[64];
            snprintf(note, sizeof note, "%.1f experts touched", touched / 16);
            report("k.moe" + tail, t, 16, moe_bytes(touched / 16), note);
            backend->free(gpu, x, (size_t)m * HIDDEN * 4);
        }
        if (is_wanted("k.qkv_fused")) {
            const timing t = measure(&rows, [&] {
                for (uint32_t i = 0; i < 8; i++)
                    attn_in(&s, &s.layers[i], i, &rows, s.x);
            });
            report("k.qkv_fused" + tail, t, 8, attention_bytes(), "");
        }
        if (is_wanted("k.sparse")) {
            for (uint32_t i = 0; i < 8; i++)
                attn_in(&s, &s.layers[i], i, &rows, s.x);
            choose(&s, 0, &rows);
            const timing t = measure(&rows, [&] {
                for (uint32_t i = 0; i < 8; i++)
                    attend(&s, i, &rows);
            });
            report("k.sparse" + tail, t, 8, (double)m * KV_HEADS * TOPK * 128 * 2 * 72, "");
        }
        if (is_wanted("k.o")) {
            const timing t = measure(&rows, [&] {
                for (uint32_t i = 0; i < 8; i++)
                    gpu->ops->linear(gpu, s.x, s.out, &s.layers[i].o, m, true);
            });
            report("k.o" + tail, t, 8, (double)weight_bytes(KN_MXFP8, HIDDEN, Q_HEADS * DIM), "");
        }
    }
    for (uint32_t k : {8u, 32u, 128u, 256u}) {
        const std::string name = "k.index." + std::to_string(k) + "K";
        if (!is_wanted("k.index"))
            continue;
        const kn_rows rows = rows_of(1, k * 1024 - 1, pages);
        attn_in(&s, &s.layers[0], 0, &rows, s.x);
        const timing t = measure(&rows, [&] {
            for (uint32_t i = 0; i < 8; i++)
                choose(&s, i, &rows);
        });
        report(name, t, 8, 72.0 * k * 1024, "");
    }
}

static void bench_slice(void)
{
    const uint32_t count = 24;
    const uint64_t start = base_now_ns();
    slice s = make_slice(count, 4097, 2048);
    s.embedding = weight(KN_BF16, VOCAB, HIDDEN);
    s.head = weight(KN_BF16, VOCAB, HIDDEN);
    s.logits = (float *)take((size_t)8 * VOCAB * 4);
    backend->wait(gpu);
    size_t available, total;
    backend->memory(gpu, &available, &total);
    printf("%u layers in place after %.1f s; %.1f of %.1f GiB are left\n", count,
           (double)(base_now_ns() - start) * 1e-9, (double)available / 0x1p30,
           (double)total / 0x1p30);
    const uint32_t *pages[1] = {some_pages(4097)};
    for (uint32_t m : {1u, 4u, 8u})
        for (uint32_t k : {4u, 128u, 512u}) {
            if (!is_wanted(("e.decode." + std::to_string(k) + "K.m" + std::to_string(m)).c_str()))
                continue;
            const kn_rows rows = rows_of(m, k * 1024 - 1, pages);
            const double context = k * 1024.0;
            std::vector<uint32_t> pick(m);
            for (uint32_t i = 0; i < m; i++)
                pick[i] = i;
            const timing layers = measure(&rows, [&] { step(&s, &rows); });
            const double bytes =
                count * (attention_bytes() + 72 * context + m * KV_HEADS * TOPK * 128 * 2 * 72.0 +
                         (double)weight_bytes(KN_MXFP8, HIDDEN, Q_HEADS * DIM)) +
                3 * 3.0 * (double)weight_bytes(KN_MXFP8, DENSE, HIDDEN) +
                (count - 3) * moe_bytes(4);
            char name[64];
            snprintf(name, sizeof name, "e.layers.%uK.m%u", k, m);
            report(name, layers, 1, m == 1 ? bytes : 0, "24 layers, no head");
            const timing all = measure(
                &rows,
                [&] {
                    const uint64_t key = 1000 + m * 1000 + k;
                    backend->rows_begin(gpu, &rows);
                    if (backend->graph_begin(gpu, key)) {
                        step(&s, &rows);
                        backend->graph_end(gpu);
                    }
                    gpu->ops->head(gpu, s.logits, s.x, s.layers[0].norm, &s.head, pick.data(), m,
                                   HIDDEN, 1e-6f);
                    backend->wait(gpu);
                },
                false);
            snprintf(name, sizeof name, "e.decode.%uK.m%u", k, m);
            char note[64];
            snprintf(note, sizeof note, "%.0f steps/s", 1.0 / all.median);
            report(name, all, 1, m == 1 ? bytes + (double)weight_bytes(KN_BF16, VOCAB, HIDDEN) : 0,
                   note);
        }
    for (uint32_t n : {64u, 700u, 2048u}) {
        char name[64];
        snprintf(name, sizeof name, "e.prefill.%u@100K", n);
        if (!is_wanted(name))
            continue;
        const kn_rows rows = rows_of(n, 100 * 1024 - 1, pages);
        const timing t = measure(&rows, [&] { step(&s, &rows); });
        char note[64];
        snprintf(note, sizeof note, "%.0f tok/s", n / t.median);
        report(name, t, 1, 0, note);
    }
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: gpu_bench MODULE.so [NAME…]\n");
        return 2;
    }
    for (int i = 2; i < argc; i++)
        wanted.push_back(argv[i]);
    char *path = realpath(argv[1], nullptr); /* without a slash it would be looked for elsewhere */
    void *module = dlopen(path ? path : argv[1], RTLD_NOW | RTLD_LOCAL);
    kn_backend_get_fn *get =
        module ? (kn_backend_get_fn *)dlsym(module, KN_BACKEND_SYMBOL) : nullptr;
    backend = get ? get(KN_BACKEND_VERSION) : nullptr;
    if (!backend) {
        fprintf(stderr, "gpu_bench: %s\n", module ? "not a module of this version" : dlerror());
        return 1;
    }
    base_err err = BASE_ERR_INIT;
    kn_device_options options = {};
    options.backend = backend;
    options.rows_max = 2048;
    options.width_max = 16384;
    options.context_max = 4097 * 128;
    if (kn_device_create(&gpu, &options, &err)) {
        fprintf(stderr, "gpu_bench: %s\n", err.text);
        return 77;
    }
    printf("%s\n", backend->describe(gpu));
    bench_bandwidth();
    bool kernels = wanted.empty();
    for (const std::string &w : wanted)
        kernels |= w[0] == 'k';
    if (kernels) {
        bench_products();
        bench_layer();
    }
    bool slice = wanted.empty();
    for (const std::string &w : wanted)
        slice |= w[0] == 'e';
    if (slice)
        bench_slice();
    kn_device_destroy(gpu);
    return 0;
}
