/* A backend for tests that keeps kernels/backend.h's contract to the letter: the cpu's operations
 * on memory that nobody else can touch.
 *
 * - Device memory is inaccessible but while an operation runs, so that a host access faults; fresh
 *   memory is NaN throughout, large blocks aside.
 * - Every argument is checked to lie where it belongs, and matrices to stay as they were first
 * seen.
 * - Rows are staged by rows_begin: operations that get the begun rows, or their token and pos
 *   arrays, run on a copy made then.
 * - A graph is recorded and run at its end; under a known key and row count it is run from the
 *   record.
 * - One thread at a time may call.
 * - Allocation number `fail_alloc` fails, operation number `fail_op` loses the device; both count
 *   from 0, -1: never.
 *
 * One device at a time. */
#pragma once
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/backend.h"

#define GUARD_REGIONS 64
#define GUARD_WEIGHTS 16384
#define GUARD_GRAPHS 64
#define GUARD_CALLS 2048
#define GUARD_FILLED ((size_t)4 << 20)
#define GUARD_HUGE ((size_t)2 << 20) /* a page that is protected in one go */

typedef struct guard_region {
    uint8_t *at;
    size_t bytes;
    void *map; /* what `at` is an aligned part of */
} guard_region;

typedef struct guard_call {
    enum {
        GUARD_EMBED,
        GUARD_ATTN_IN,
        GUARD_SELECT,
        GUARD_ATTEND,
        GUARD_LINEAR,
        GUARD_MLP,
        GUARD_MOE,
        GUARD_NORM,
        GUARD_COPY
    } kind;
    float *y;
    const float *x, *w;
    const kn_weight *weight;
    kn_kv *kv;
    uint32_t cols;
    float eps;
    bool add;
    void *dst;
    const void *src;
    size_t dst_stride, src_stride, bytes, count;
    union {
        kn_attn_in attn_in;
        kn_select select;
        kn_attend attend;
        kn_mlp mlp;
        kn_moe moe;
    };
} guard_call;

typedef struct guard_graph {
    uint64_t key;
    uint32_t rows, count;
    guard_call *calls;
} guard_graph;

static struct {
    long fail_alloc, fail_op; /* the tests' */
    size_t memory_max;        /* of all allocations; 0: 1 GiB */
    uint32_t graph_runs, replays, uploads, downloads;
    size_t held; /* bytes */

    kn_device device, *inner;
    pthread_mutex_t lock;
    long allocs, ops;
    bool lost;
    guard_region regions[GUARD_REGIONS];
    uint32_t region_count;
    struct {
        const kn_weight *at;
        kn_weight was;
    } weights[GUARD_WEIGHTS];
    const kn_rows *begun; /* the caller's, whose address is all that stays valid, */
    const int32_t *begun_token, *begun_pos;
    kn_rows staged; /* and the copy */
    void *staged_memory;
    guard_graph graphs[GUARD_GRAPHS];
    uint32_t graph_count;
    guard_graph *recording;
} guard = {.fail_alloc = -1, .fail_op = -1, .lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- memory ---- */

static inline bool guard_inside(const void *at, size_t bytes)
{
    const uint8_t *p = at;
    for (uint32_t i = 0; i < guard.region_count; i++)
        if (p >= guard.regions[i].at && p < guard.regions[i].at + guard.regions[i].bytes) {
            CHECK(p + bytes <= guard.regions[i].at + guard.regions[i].bytes);
            return true;
        }
    return false;
}

static inline void guard_device(const void *at, size_t bytes)
{
    CHECK(guard_inside(at, bytes));
}

static inline void guard_floats(const float *at, size_t count)
{
    guard_device(at, count * sizeof *at);
    CHECK((uintptr_t)at % 16 == 0);
}

static inline void guard_host(const void *at)
{
    CHECK(at != NULL);
    CHECK(!guard_inside(at, 1));
}

static inline void guard_protect(int protection)
{
    for (uint32_t i = 0; i < guard.region_count; i++)
        CHECK(mprotect(guard.regions[i].at, guard.regions[i].bytes, protection) == 0);
}

/* Around everything that touches device memory. False: the device is lost, nothing is done. */
static inline bool guard_enter(void)
{
    CHECK(pthread_mutex_trylock(&guard.lock) == 0); /* else two threads call at once */
    if (!guard.lost)
        guard_protect(PROT_READ | PROT_WRITE);
    guard.inner->pool = guard.device.pool;
    return !guard.lost;
}

static inline void guard_leave(void)
{
    guard_protect(PROT_NONE);
    pthread_mutex_unlock(&guard.lock);
}

/* The same around an operation, which may be the one that loses the device. */
static inline bool guard_enter_op(void)
{
    if (guard.ops++ == guard.fail_op)
        guard.lost = true;
    CHECK(guard.recording == NULL); /* nothing but what may stand in a graph */
    return guard_enter();
}

static inline size_t guard_round(size_t bytes)
{
    return (bytes + 4095) / 4096 * 4096;
}

static void *guard_alloc(kn_device *device, size_t bytes, base_err *err)
{
    const size_t most = guard.memory_max > 0 ? guard.memory_max : (size_t)1 << 30;
    void *map = MAP_FAILED;
    CHECK(bytes > 0);
    CHECK(guard.region_count < GUARD_REGIONS);
    CHECK(guard.recording == NULL);
    if (guard.allocs++ != guard.fail_alloc && guard.held + bytes <= most)
        map = mmap(NULL, guard_round(bytes) + GUARD_HUGE, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        base_fail(err, BASE_NOMEM, "guard: no memory for %zu bytes", bytes);
        return NULL;
    }
    uint8_t *memory = (uint8_t *)(((uintptr_t)map + GUARD_HUGE - 1) / GUARD_HUGE * GUARD_HUGE);
    (void)madvise(memory, guard_round(bytes), MADV_HUGEPAGE);
    if (bytes <= GUARD_FILLED) /* what nobody touches is quickly protected */
        memset(memory, 0xff, guard_round(bytes));
    CHECK(mprotect(memory, guard_round(bytes), PROT_NONE) == 0);
    guard.regions[guard.region_count++] = (guard_region){memory, guard_round(bytes), map};
    guard.held += bytes;
    return memory;
}

static void guard_free(kn_device *device, void *memory, size_t bytes)
{
    uint32_t i = 0;
    if (memory == NULL)
        return;
    while (i < guard.region_count && guard.regions[i].at != memory)
        i++;
    CHECK(i < guard.region_count);
    CHECK(guard.regions[i].bytes == guard_round(bytes));
    munmap(guard.regions[i].map, guard_round(bytes) + GUARD_HUGE);
    guard.regions[i] = guard.regions[--guard.region_count];
    guard.held -= bytes;
}

static void guard_memory(const kn_device *device, size_t *available, size_t *total)
{
    *total = guard.memory_max > 0 ? guard.memory_max : (size_t)1 << 30;
    *available = *total - guard.held;
}

static void guard_upload(kn_device *device, void *dst, const void *src, size_t bytes)
{
    guard_device(dst, bytes);
    guard_host(src);
    CHECK(guard.recording == NULL);
    guard.uploads++;
    if (guard_enter())
        memcpy(dst, src, bytes);
    guard_leave();
}

static void guard_download(kn_device *device, void *dst, const void *src, size_t bytes)
{
    guard_host(dst);
    guard_device(src, bytes);
    CHECK(guard.recording == NULL);
    guard.downloads++;
    if (guard_enter())
        memcpy(dst, src, bytes);
    guard_leave();
}

static void guard_fill(kn_device *device, void *dst, size_t bytes, uint64_t seed, uint64_t stream,
                       const uint8_t table[256])
{
    guard_device(dst, bytes);
    CHECK((uintptr_t)dst % 16 == 0);
    CHECK(guard.recording == NULL);
    if (guard_enter())
        kn_backend_cpu.fill(guard.inner, dst, bytes, seed, stream, table);
    guard_leave();
}

static void guard_wait(kn_device *device)
{
    CHECK(guard.recording == NULL);
}

static base_code guard_status(const kn_device *device, base_err *err)
{
    return guard.lost
               ? base_fail(err, BASE_DEVICE, "guard: operation %ld lost the device", guard.fail_op)
               : BASE_OK;
}

static void guard_kv_copy_page(kn_kv *kv, uint32_t to, uint32_t from, uint32_t tokens)
{
    if (guard_enter_op())
        kn_backend_cpu.kv_copy_page(kv, to, from, tokens);
    guard_leave();
}

/* ---- arguments ---- */

static inline size_t guard_type_bytes(kn_type type, size_t count)
{
    return type == KN_F32     ? count * 4
           : type == KN_BF16  ? count * 2
           : type == KN_MXFP8 ? count
                              : count / 2;
}

static inline void guard_weight(const kn_weight *w)
{
    const size_t count = (size_t)w->rows * w->cols;
    size_t slot = (uintptr_t)w / sizeof(void *) * 2654435761u % GUARD_WEIGHTS, tries = 0;
    guard_host(w);
    CHECK(w->tiles == NULL);
    guard_device(w->data, guard_type_bytes(w->type, count));
    if (w->type == KN_MXFP8 || w->type == KN_NVFP4)
        guard_device(w->scale, count / (w->type == KN_MXFP8 ? 32 : 16));
    while (guard.weights[slot].at != NULL && guard.weights[slot].at != w) {
        CHECK(++tries < GUARD_WEIGHTS);
        slot = (slot + 1) % GUARD_WEIGHTS;
    }
    if (guard.weights[slot].at == NULL) {
        guard.weights[slot].at = w;
        guard.weights[slot].was = *w;
    }
    const kn_weight *was = &guard.weights[slot].was;
    CHECK(was->type == w->type && was->rows == w->rows && was->cols == w->cols);
    CHECK(was->data == w->data && was->scale == w->scale);
}

static inline void guard_weights(const kn_weight *w, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        guard_weight(&w[i]);
}

static inline void guard_kv(const kn_kv *kv)
{
    CHECK(kv->device == &guard.device);
    guard_device(kv->pages, kv->bytes);
}

/* ---- rows ---- */

static void guard_rows_begin(kn_device *device, const kn_rows *rows)
{
    const uint32_t n = rows->rows;
    uint32_t seqs = 0;
    size_t entries = 0;
    CHECK(guard.recording == NULL);
    for (uint32_t r = 0; r < n; r++) {
        seqs = rows->seq[r] >= seqs ? rows->seq[r] + 1 : seqs;
        if (r + 1 == n || rows->seq[r + 1] != rows->seq[r])
            entries += (size_t)rows->pos[r] / KN_PAGE_TOKENS + 1;
    }
    free(guard.staged_memory);
    guard.staged_memory = calloc(1, seqs * sizeof(uint32_t *) + (3 * n + entries) * 4);
    CHECK(guard.staged_memory != NULL);
    const uint32_t **pages = guard.staged_memory;
    int32_t *token = (int32_t *)(pages + seqs), *pos = token + n;
    uint32_t *seq = (uint32_t *)(pos + n), *table = seq + n;
    memcpy(token, rows->token, n * sizeof *token);
    memcpy(pos, rows->pos, n * sizeof *pos);
    memcpy(seq, rows->seq, n * sizeof *seq);
    for (uint32_t r = 0; r < n; r++)
        if (r + 1 == n || seq[r + 1] != seq[r]) {
            const size_t count = (size_t)pos[r] / KN_PAGE_TOKENS + 1;
            memcpy(table, rows->pages[seq[r]], count * sizeof *table);
            pages[seq[r]] = table;
            table += count;
        }
    guard.begun = rows;
    guard.begun_token = rows->token;
    guard.begun_pos = rows->pos;
    guard.staged = (kn_rows){.rows = n, .token = token, .pos = pos, .seq = seq, .pages = pages};
}

static inline const kn_rows *guard_rows(const kn_rows *rows)
{
    guard_host(rows->token);
    guard_host(rows->pos);
    guard_host(rows->seq);
    guard_host(rows->pages);
    return rows == guard.begun ? &guard.staged : rows;
}

/* ---- graphs ---- */

static void guard_play(const guard_call *c)
{
    const kn_ops *ops = guard.inner->ops;
    const kn_rows *rows = &guard.staged;
    kn_device *d = guard.inner;
    if (guard_enter_op())
        switch (c->kind) {
        case GUARD_EMBED:
            ops->embed(d, c->y, c->weight, rows->token, rows->rows);
            break;
        case GUARD_ATTN_IN:
            ops->attn_in(d, c->kv, rows, &c->attn_in);
            break;
        case GUARD_SELECT:
            ops->select(d, c->kv, rows, &c->select);
            break;
        case GUARD_ATTEND:
            ops->attend(d, c->kv, rows, &c->attend);
            break;
        case GUARD_LINEAR:
            ops->linear(d, c->y, c->x, c->weight, rows->rows, c->add);
            break;
        case GUARD_MLP:
            ops->mlp(d, rows->rows, &c->mlp);
            break;
        case GUARD_MOE:
            ops->moe(d, rows->rows, &c->moe);
            break;
        case GUARD_NORM:
            ops->norm(d, c->y, c->x, c->w, rows->rows, c->cols, c->eps);
            break;
        case GUARD_COPY:
            kn_backend_cpu.copy(d, c->dst, c->dst_stride, c->src, c->src_stride, c->bytes,
                                c->count);
            break;
        }
    guard_leave();
}

static void guard_run(const guard_graph *graph)
{
    CHECK(guard.staged.rows == graph->rows);
    for (uint32_t i = 0; i < graph->count; i++)
        guard_play(&graph->calls[i]);
}

static bool guard_graph_begin(kn_device *device, uint64_t key)
{
    CHECK(guard.recording == NULL);
    CHECK(guard.begun != NULL);
    for (uint32_t i = 0; i < guard.graph_count; i++)
        if (guard.graphs[i].key == key && guard.graphs[i].rows == guard.staged.rows) {
            guard.replays++;
            guard_run(&guard.graphs[i]);
            return false;
        }
    if (guard.graph_count == GUARD_GRAPHS) /* the oldest goes */
        guard.graph_count = 0;
    guard.recording = &guard.graphs[guard.graph_count++];
    if (guard.recording->calls == NULL)
        guard.recording->calls = calloc(GUARD_CALLS, sizeof(guard_call));
    CHECK(guard.recording->calls != NULL);
    guard.recording->key = key;
    guard.recording->rows = guard.staged.rows;
    guard.recording->count = 0;
    return true;
}

static void guard_graph_end(kn_device *device)
{
    const guard_graph *graph = guard.recording;
    CHECK(graph != NULL);
    guard.recording = NULL;
    guard.graph_runs++;
    guard_run(graph);
}

/* Takes the call into the graph that is recorded; false: there is none. `rows` have to be the
 * begun ones. */
static inline bool guard_record(const guard_call *call, uint32_t rows)
{
    guard_graph *graph = guard.recording;
    if (graph == NULL)
        return false;
    CHECK(rows == graph->rows);
    CHECK(graph->count < GUARD_CALLS);
    graph->calls[graph->count++] = *call;
    return true;
}

static void guard_copy(kn_device *device, void *dst, size_t dst_stride, const void *src,
                       size_t src_stride, size_t bytes, size_t count)
{
    const guard_call call = {.kind = GUARD_COPY,
                             .dst = dst,
                             .dst_stride = dst_stride,
                             .src = src,
                             .src_stride = src_stride,
                             .bytes = bytes,
                             .count = count};
    guard_device(dst, (count - 1) * dst_stride + bytes);
    guard_device(src, (count - 1) * src_stride + bytes);
    if (guard_record(&call, guard.staged.rows))
        return;
    if (guard_enter_op())
        kn_backend_cpu.copy(guard.inner, dst, dst_stride, src, src_stride, bytes, count);
    guard_leave();
}

/* ---- operations ---- */

static void guard_embed(kn_device *device, float *y, const kn_weight *table, const int32_t *ids,
                        uint32_t rows)
{
    const guard_call call = {.kind = GUARD_EMBED, .y = y, .weight = table};
    guard_floats(y, (size_t)rows * table->cols);
    guard_weight(table);
    guard_host(ids);
    const bool begun = guard.begun != NULL && ids == guard.begun_token;
    if (guard_record(&call, begun ? rows : UINT32_MAX))
        return;
    if (guard_enter_op())
        guard.inner->ops->embed(guard.inner, y, table, begun ? guard.staged.token : ids, rows);
    guard_leave();
}

static void guard_norm(kn_device *device, float *y, const float *x, const float *w, uint32_t rows,
                       uint32_t cols, float eps)
{
    const guard_call call = {.kind = GUARD_NORM, .y = y, .x = x, .w = w, .cols = cols, .eps = eps};
    guard_floats(y, (size_t)rows * cols);
    guard_floats(x, (size_t)rows * cols);
    guard_floats(w, cols);
    if (guard_record(&call, rows))
        return;
    if (guard_enter_op())
        guard.inner->ops->norm(guard.inner, y, x, w, rows, cols, eps);
    guard_leave();
}

static inline void guard_rope(const kn_rope *rope, const int32_t *pos, uint32_t rows)
{
    int32_t most = 0;
    for (uint32_t r = 0; r < rows; r++)
        most = pos[r] > most ? pos[r] : most;
    if (rope->rotary_dim == 0)
        return;
    guard_floats(rope->cos, ((size_t)most + 1) * rope->rotary_dim / 2);
    guard_floats(rope->sin, ((size_t)most + 1) * rope->rotary_dim / 2);
}

static void guard_head_norm_rope(kn_device *device, float *x, const float *w, uint32_t rows,
                                 uint32_t heads, uint32_t dim, float eps, const kn_rope *rope,
                                 const int32_t *pos)
{
    guard_floats(x, (size_t)rows * heads * dim);
    guard_floats(w, dim);
    guard_host(rope);
    guard_host(pos);
    guard_rope(rope, pos, rows);
    if (guard_enter_op())
        guard.inner->ops->head_norm_rope(
            guard.inner, x, w, rows, heads, dim, eps, rope,
            guard.begun != NULL && pos == guard.begun_pos ? guard.staged.pos : pos);
    guard_leave();
}

static void guard_linear(kn_device *device, float *y, const float *x, const kn_weight *w,
                         uint32_t rows, bool add)
{
    const guard_call call = {.kind = GUARD_LINEAR, .y = y, .x = x, .weight = w, .add = add};
    guard_floats(y, (size_t)rows * w->rows);
    guard_floats(x, (size_t)rows * w->cols);
    guard_weight(w);
    if (guard_record(&call, rows))
        return;
    if (guard_enter_op())
        guard.inner->ops->linear(guard.inner, y, x, w, rows, add);
    guard_leave();
}

static void guard_attn_in(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attn_in *a)
{
    const guard_call call = {.kind = GUARD_ATTN_IN, .kv = kv, .attn_in = *a};
    const size_t n = rows->rows;
    guard_kv(kv);
    guard_floats(a->x, n * a->hidden);
    guard_floats(a->norm, a->hidden);
    guard_weight(a->q);
    guard_weight(a->k);
    guard_weight(a->v);
    guard_floats(a->q_norm, a->head_dim);
    guard_floats(a->k_norm, a->head_dim);
    guard_floats(a->q_out, n * a->q_heads * a->head_dim);
    guard_rope(&a->rope, rows->pos, rows->rows);
    if (a->index_heads > 0) {
        guard_weight(a->index_q);
        guard_weight(a->index_k);
        guard_floats(a->index_q_norm, a->index_dim);
        guard_floats(a->index_k_norm, a->index_dim);
        guard_floats(a->index_q_out, n * a->index_heads * a->index_dim);
    }
    if (guard_record(&call, rows == guard.begun ? rows->rows : UINT32_MAX))
        return;
    if (guard_enter_op())
        guard.inner->ops->attn_in(guard.inner, kv, guard_rows(rows), a);
    guard_leave();
}

static void guard_select(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_select *a)
{
    const guard_call call = {.kind = GUARD_SELECT, .kv = kv, .select = *a};
    const size_t n = rows->rows;
    guard_kv(kv);
    guard_floats(a->index_q, n * a->index_heads * a->index_dim);
    guard_device(a->blocks, n * a->index_heads * a->topk * sizeof *a->blocks);
    if (a->margin != NULL)
        guard_floats(a->margin, n * a->index_heads);
    if (guard_record(&call, rows == guard.begun ? rows->rows : UINT32_MAX))
        return;
    if (guard_enter_op())
        guard.inner->ops->select(guard.inner, kv, guard_rows(rows), a);
    guard_leave();
}

static void guard_attend(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attend *a)
{
    const guard_call call = {.kind = GUARD_ATTEND, .kv = kv, .attend = *a};
    const size_t n = rows->rows;
    guard_kv(kv);
    guard_floats(a->q, n * a->q_heads * a->head_dim);
    guard_floats(a->out, n * a->q_heads * a->head_dim);
    if (a->blocks != NULL)
        guard_device(a->blocks, n * a->kv_heads * a->topk * sizeof *a->blocks);
    if (guard_record(&call, rows == guard.begun ? rows->rows : UINT32_MAX))
        return;
    if (guard_enter_op())
        guard.inner->ops->attend(guard.inner, kv, guard_rows(rows), a);
    guard_leave();
}

static void guard_mlp(kn_device *device, uint32_t rows, const kn_mlp *a)
{
    const guard_call call = {.kind = GUARD_MLP, .mlp = *a};
    guard_floats(a->x, (size_t)rows * a->hidden);
    guard_floats(a->norm, a->hidden);
    guard_weight(a->gate);
    guard_weight(a->up);
    guard_weight(a->down);
    if (guard_record(&call, rows))
        return;
    if (guard_enter_op())
        guard.inner->ops->mlp(guard.inner, rows, a);
    guard_leave();
}

static void guard_moe(kn_device *device, uint32_t rows, const kn_moe *a)
{
    const guard_call call = {.kind = GUARD_MOE, .moe = *a};
    guard_floats(a->x, (size_t)rows * a->hidden);
    guard_floats(a->norm, a->hidden);
    guard_floats(a->router, (size_t)a->experts * a->hidden);
    guard_floats(a->bias, a->experts);
    guard_weights(a->w1, a->experts);
    guard_weights(a->w2, a->experts);
    guard_weights(a->w3, a->experts);
    if (a->shared_inner > 0) {
        guard_weight(a->shared_gate);
        guard_weight(a->shared_up);
        guard_weight(a->shared_down);
    }
    if (a->route_ids != NULL)
        guard_device(a->route_ids, (size_t)rows * a->topk * sizeof *a->route_ids);
    if (a->route_weights != NULL)
        guard_floats(a->route_weights, (size_t)rows * a->topk);
    if (guard_record(&call, rows))
        return;
    if (guard_enter_op())
        guard.inner->ops->moe(guard.inner, rows, a);
    guard_leave();
}

static void guard_head(kn_device *device, float *logits, const float *x, const float *norm,
                       const kn_weight *head, const uint32_t *pick, uint32_t picks, uint32_t hidden,
                       float eps)
{
    guard_floats(logits, (size_t)picks * head->rows);
    for (uint32_t i = 0; i < picks; i++)
        guard_floats(x + (size_t)pick[i] * hidden, hidden);
    guard_floats(norm, hidden);
    guard_weight(head);
    guard_host(pick);
    if (guard_enter_op())
        guard.inner->ops->head(guard.inner, logits, x, norm, head, pick, picks, hidden, eps);
    guard_leave();
}

static void guard_kv_put(kn_device *device, kn_kv *kv, const kn_rows *rows, uint32_t layer,
                         const float *k, const float *v)
{
    const size_t count = (size_t)rows->rows * kv->shape.kv_heads * kv->shape.head_dim;
    guard_kv(kv);
    guard_floats(k, count);
    guard_floats(v, count);
    if (guard_enter_op())
        guard.inner->ops->kv_put(guard.inner, kv, guard_rows(rows), layer, k, v);
    guard_leave();
}

static void guard_draft_attend(kn_device *device, const kn_kv *kv, const kn_draft_attend *a)
{
    const size_t rows = (size_t)a->blocks * a->block_rows;
    guard_kv(kv);
    guard_floats(a->q, rows * a->q_heads * a->head_dim);
    guard_floats(a->out, rows * a->q_heads * a->head_dim);
    guard_floats(a->block_k, rows * a->kv_heads * a->head_dim);
    guard_floats(a->block_v, rows * a->kv_heads * a->head_dim);
    guard_host(a->pages);
    guard_host(a->lo);
    guard_host(a->hi);
    if (guard_enter_op())
        guard.inner->ops->draft_attend(guard.inner, kv, a);
    guard_leave();
}

static const kn_ops guard_ops = {
    .name = "guard",
    .embed = guard_embed,
    .norm = guard_norm,
    .head_norm_rope = guard_head_norm_rope,
    .linear = guard_linear,
    .attn_in = guard_attn_in,
    .select = guard_select,
    .attend = guard_attend,
    .mlp = guard_mlp,
    .moe = guard_moe,
    .head = guard_head,
    .kv_put = guard_kv_put,
    .draft_attend = guard_draft_attend,
};

/* ---- devices ---- */

static const kn_backend guard_backend;

static base_code guard_create(kn_device **out, const kn_device_options *options, base_err *err)
{
    kn_device_options inner = *options;
    CHECK(guard.inner == NULL);
    if (options->index > 0)
        return base_fail(err, BASE_UNSUPPORTED, "guard: there is no device %u, only 0",
                         options->index);
    inner.variant = "auto";
    base_code code = kn_backend_cpu.create(&guard.inner, &inner, err);
    if (code != BASE_OK)
        return code;
    guard.device = (kn_device){.ops = &guard_ops, .backend = &guard_backend};
    guard.lost = false;
    guard.allocs = guard.ops = 0;
    *out = &guard.device;
    return BASE_OK;
}

static void guard_destroy(kn_device *device)
{
    CHECK(guard.region_count == 0);
    CHECK(guard.held == 0);
    kn_backend_cpu.destroy(guard.inner);
    guard.inner = NULL;
    for (uint32_t i = 0; i < GUARD_GRAPHS; i++)
        free(guard.graphs[i].calls);
    memset(guard.graphs, 0, sizeof guard.graphs);
    memset(guard.weights, 0, sizeof guard.weights);
    guard.graph_count = 0;
    guard.begun = NULL;
    free(guard.staged_memory);
    guard.staged_memory = NULL;
}

static const char *guard_describe(const kn_device *device)
{
    return "guarded memory";
}

static const kn_backend guard_backend = {
    .version = KN_BACKEND_VERSION,
    .name = "guard",
    .numerics = "guard-1",
    .create = guard_create,
    .destroy = guard_destroy,
    .describe = guard_describe,
    .alloc = guard_alloc,
    .free = guard_free,
    .memory = guard_memory,
    .upload = guard_upload,
    .download = guard_download,
    .copy = guard_copy,
    .fill = guard_fill,
    .wait = guard_wait,
    .status = guard_status,
    .rows_begin = guard_rows_begin,
    .graph_begin = guard_graph_begin,
    .graph_end = guard_graph_end,
    .kv_copy_page = guard_kv_copy_page,
};
