/* cpu/device: creation, scratch and page memory of the cpu backend. */
#include "kernels/cpu/device.h"

#include "engine/base/num.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGN 64
#define THREADS_MAX 64

float kn_cpu_nvfp4_table[256][16];

/* Not a constructor of a variant's source: that would run the variant's instructions on processors
 * without them. */
static void fill_table(void)
{
    for (int s = 0; s < 256; s++)
        for (int c = 0; c < 16; c++)
            kn_cpu_nvfp4_table[s][c] = kn_nvfp4_read((uint8_t)c, (uint8_t)s);
}

/* Anonymous memory, zeroed, on huge pages where the system grants them: without them a scan of the
 * weights or of the pages loses a sixth of its bandwidth to page walks. */
static void *map_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

/* ---- scratch ---- */

/* Hands out pieces of one block; with `base` NULL it only counts. */
typedef struct carver {
    uint8_t *base;
    size_t used;
    bool overflow;
} carver;

static void *carve(carver *c, size_t count, size_t size)
{
    size_t bytes;
    if (!base_mul(&bytes, count, size) || !base_add(&bytes, bytes, ALIGN) || bytes > SIZE_MAX / 4) {
        c->overflow = true;
        return NULL;
    }
    void *at = c->base ? c->base + c->used : NULL;
    c->used = base_align_up(c->used + bytes - ALIGN, ALIGN);
    return at;
}

static void lay_out(cpu_device *d, carver *c, uint32_t threads)
{
    const size_t rows = d->rows_max;
    const size_t width = base_align_up(d->width_max, 16);
    const size_t blocks = d->context_max / KN_BLOCK_TOKENS + 1;

    /* The slack lets one row of a mixture with many chosen experts pass whatever the step's size.
     */
    d->wide_floats = 3 * rows * width + (CPU_TOPK_MAX + 1) * width;
    d->tile_floats = base_max(16 * width, CPU_TILE_OUTS * 2 * CPU_PANEL_COLS);
    d->score_floats = base_max(base_max((size_t)1 << 18, CPU_INDEX_HEADS_MAX * blocks),
                               4 * (blocks * KN_BLOCK_TOKENS));
    d->normed = carve(c, rows * width, sizeof(float));
    d->logits = carve(c, rows * width, sizeof(float));
    d->wide = carve(c, d->wide_floats, sizeof(float));
    /* The slack: one input row of up to 65,536 columns, the activations of one row with as many
     * experts as can be. */
    const size_t row = cpu_quant_row((uint32_t)width);
    d->quant_bytes[0] = rows * row + cpu_quant_row(1 << 16);
    d->quant_bytes[1] = rows * (row + 8 * CPU_QUANT_BYTES) + (CPU_TOPK_MAX + 1) * row;
    for (int i = 0; i < 2; i++)
        d->quant[i] = carve(c, d->quant_bytes[i], 1);
    d->scores = carve(c, d->score_floats, sizeof(float));
    d->route_ids = carve(c, rows * CPU_TOPK_MAX, sizeof(int32_t));
    d->route_weights = carve(c, rows * CPU_TOPK_MAX, sizeof(float));
    d->slot_rows = carve(c, rows * CPU_TOPK_MAX, sizeof(uint32_t));
    d->slot_weights = carve(c, rows * CPU_TOPK_MAX, sizeof(float));
    d->expert_first = carve(c, width + 2, sizeof(uint32_t));
    d->piece_first = carve(c, width + 2, sizeof(uint32_t));
    d->groups = carve(c, rows + 1, sizeof(uint32_t));
    d->threads = carve(c, threads, sizeof(cpu_thread));
    for (uint32_t i = 0; i < threads; i++) {
        cpu_thread t = {
            .tile = carve(c, d->tile_floats, sizeof(float)),
            .waiting = carve(c, CPU_PANEL_ROWS * CPU_TILE_OUTS * 16, sizeof(float)),
            .y0 = carve(c, rows * CPU_TILE_OUTS, sizeof(float)),
            .y1 = carve(c, rows * CPU_TILE_OUTS, sizeof(float)),
            .y2 = carve(c, rows * CPU_TILE_OUTS, sizeof(float)),
            .block_k = carve(c, CPU_HEAD_DIM_MAX * KN_BLOCK_TOKENS, sizeof(float)),
            .block_v = carve(c, CPU_HEAD_DIM_MAX * KN_BLOCK_TOKENS, sizeof(float)),
            .p = carve(c, CPU_GROUP_HEADS_MAX * KN_BLOCK_TOKENS, sizeof(float)),
            .m = carve(c, CPU_GROUP_ROWS * CPU_GROUP_HEADS_MAX, sizeof(float)),
            .l = carve(c, CPU_GROUP_ROWS * CPU_GROUP_HEADS_MAX, sizeof(float)),
        };
        if (d->threads)
            d->threads[i] = t;
    }
}

static uint32_t cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    const int count = CPU_COUNT(&set);
    return count < 1 ? 1 : count > THREADS_MAX ? THREADS_MAX : (uint32_t)count;
}

base_code kn_cpu_device_create(kn_device **out, const kn_ops *ops, const kn_device_options *options,
                               base_err *err)
{
    if (options->rows_max == 0 || options->width_max == 0 || options->context_max == 0)
        return base_fail(err, BASE_INVALID,
                         "device: rows_max %u, width_max %u and context_max %u must be at least 1",
                         options->rows_max, options->width_max, options->context_max);
    if (options->threads > THREADS_MAX)
        return base_fail(err, BASE_INVALID, "device: %u threads exceed %d", options->threads,
                         THREADS_MAX);
    const uint32_t threads = options->threads ? options->threads : cores();

    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_table);
    cpu_device *d = calloc(1, sizeof *d);
    if (!d)
        return base_fail(err, BASE_NOMEM, "device: out of memory");
    d->base = (kn_device){.ops = ops, .impl = d};
    d->rows_max = options->rows_max;
    d->width_max = options->width_max;
    d->context_max = options->context_max;

    carver count = {0};
    lay_out(d, &count, threads);
    if (!count.overflow) {
        d->memory = map_memory(count.used);
        d->memory_bytes = count.used;
    }
    if (!d->memory) {
        free(d);
        return base_fail(err, BASE_NOMEM,
                         "device: no memory for the scratch of %u rows of width %u",
                         options->rows_max, options->width_max);
    }
    carver give = {.base = d->memory};
    lay_out(d, &give, threads);

    const base_code code = kn_pool_create(&d->pool, threads, err);
    if (code) {
        kn_device_destroy(&d->base);
        return code;
    }
    *out = &d->base;
    return BASE_OK;
}

void kn_device_destroy(kn_device *device)
{
    if (!device)
        return;
    cpu_device *d = cpu_of(device);
    kn_pool_destroy(d->pool);
    munmap(d->memory, d->memory_bytes);
    free(d);
}

typedef struct plain_job {
    void (*fn)(void *ctx, uint32_t i);
    void *ctx;
} plain_job;

static void run_plain(void *ctx, uint32_t piece, uint32_t thread)
{
    const plain_job *job = ctx;
    job->fn(job->ctx, piece);
}

void kn_device_parallel(kn_device *device, void (*fn)(void *ctx, uint32_t i), void *ctx,
                        uint32_t count)
{
    plain_job job = {.fn = fn, .ctx = ctx};
    kn_pool_run(cpu_of(device)->pool, run_plain, &job, count);
}

void kn_device_wake(kn_device *device)
{
    kn_pool_wake(cpu_of(device)->pool);
}

/* ---- pages ---- */

/* Bytes of a layer's planes. */
static size_t layer_bytes(const kn_kv_shape *shape, uint32_t layer)
{
    const size_t kv = 2 * (size_t)shape->kv_heads * kn_kv_row_bytes(shape->type, shape->head_dim);
    const size_t index =
        shape->has_index[layer] ? kn_kv_row_bytes(shape->type, shape->index_dim) : 0;
    return (kv + index) * KN_PAGE_TOKENS;
}

size_t kn_kv_page_bytes(const kn_kv_shape *shape)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < shape->layers; i++)
        bytes += layer_bytes(shape, i);
    return base_align_up(bytes, ALIGN);
}

static base_code check_shape(const kn_kv_shape *shape, base_err *err)
{
    if (shape->layers == 0 || shape->layers > KN_LAYERS_MAX)
        return base_fail(err, BASE_INVALID, "pages: %u layers, must be 1 to %d", shape->layers,
                         KN_LAYERS_MAX);
    if (shape->kv_heads == 0 || shape->kv_heads > 1024)
        return base_fail(err, BASE_INVALID, "pages: %u kv heads, must be 1 to 1024",
                         shape->kv_heads);
    if (shape->head_dim == 0 || shape->head_dim % 16 || shape->head_dim > CPU_HEAD_DIM_MAX)
        return base_fail(err, BASE_INVALID, "pages: head_dim %u, must be a multiple of 16 up to %d",
                         shape->head_dim, CPU_HEAD_DIM_MAX);
    if (shape->index_dim % 16 || shape->index_dim > CPU_HEAD_DIM_MAX)
        return base_fail(err, BASE_INVALID,
                         "pages: index_dim %u, must be a multiple of 16 up to %d", shape->index_dim,
                         CPU_HEAD_DIM_MAX);
    if (shape->page_count == 0)
        return base_fail(err, BASE_INVALID, "pages: page_count 0, must be at least 1");
    return BASE_OK;
}

base_code kn_kv_create(kn_kv **out, kn_device *device, const kn_kv_shape *shape, base_err *err)
{
    const base_code code = check_shape(shape, err);
    if (code)
        return code;
    kn_kv *kv = calloc(1, sizeof *kv);
    if (!kv)
        return base_fail(err, BASE_NOMEM, "pages: out of memory");
    kv->shape = *shape;
    kv->page_bytes = kn_kv_page_bytes(shape);
    kv->row_bytes = kn_kv_row_bytes(shape->type, shape->head_dim);
    kv->index_row_bytes = kn_kv_row_bytes(shape->type, shape->index_dim);
    size_t offset = 0;
    for (uint32_t i = 0; i < shape->layers; i++) {
        kv->layer_offset[i] = offset;
        offset += layer_bytes(shape, i);
    }
    if (base_mul(&kv->bytes, kv->page_bytes, shape->page_count))
        kv->pages = map_memory(kv->bytes);
    if (!kv->pages) {
        base_fail(err, BASE_NOMEM, "pages: no memory for %u pages of %zu bytes", shape->page_count,
                  kv->page_bytes);
        free(kv);
        return BASE_NOMEM;
    }
    *out = kv;
    return BASE_OK;
}

void kn_kv_destroy(kn_kv *kv)
{
    if (!kv)
        return;
    munmap(kv->pages, kv->bytes);
    free(kv);
}

const kn_kv_shape *kn_kv_get_shape(const kn_kv *kv)
{
    return &kv->shape;
}

/* The plane's first byte after checking that it exists; *bytes gets the length of its first
 * `tokens` rows. */
static uint8_t *plane_rows(const kn_kv *kv, uint32_t page, uint32_t layer, kn_plane_kind kind,
                           uint32_t head, uint32_t tokens, size_t *bytes)
{
    CHECK(page < kv->shape.page_count);
    CHECK(layer < kv->shape.layers);
    CHECK(tokens <= KN_PAGE_TOKENS);
    if (kind == KN_PLANE_INDEX)
        CHECK(kv->shape.has_index[layer] && head == 0);
    else
        CHECK(head < kv->shape.kv_heads);
    *bytes = (size_t)tokens * (kind == KN_PLANE_INDEX ? kv->index_row_bytes : kv->row_bytes);
    return cpu_kv_plane(kv, page, layer, kind, head);
}

void kn_kv_copy_out(const kn_kv *kv, void *dst, uint32_t page, uint32_t layer, kn_plane_kind kind,
                    uint32_t head, uint32_t tokens)
{
    size_t bytes;
    const uint8_t *plane = plane_rows(kv, page, layer, kind, head, tokens, &bytes);
    memcpy(dst, plane, bytes);
}

void kn_kv_copy_in(kn_kv *kv, const void *src, uint32_t page, uint32_t layer, kn_plane_kind kind,
                   uint32_t head, uint32_t tokens)
{
    size_t bytes;
    uint8_t *plane = plane_rows(kv, page, layer, kind, head, tokens, &bytes);
    memcpy(plane, src, bytes);
}

static void copy_plane(kn_kv *kv, uint32_t to, uint32_t from, uint32_t layer, kn_plane_kind kind,
                       uint32_t head, uint32_t tokens)
{
    size_t bytes;
    uint8_t *dst = plane_rows(kv, to, layer, kind, head, tokens, &bytes);
    memcpy(dst, plane_rows(kv, from, layer, kind, head, tokens, &bytes), bytes);
}

void kn_kv_copy_page(kn_kv *kv, uint32_t to, uint32_t from, uint32_t tokens)
{
    if (to == from)
        return;
    for (uint32_t layer = 0; layer < kv->shape.layers; layer++) {
        for (uint32_t head = 0; head < kv->shape.kv_heads; head++) {
            copy_plane(kv, to, from, layer, KN_PLANE_K, head, tokens);
            copy_plane(kv, to, from, layer, KN_PLANE_V, head, tokens);
        }
        if (kv->shape.has_index[layer])
            copy_plane(kv, to, from, layer, KN_PLANE_INDEX, 0, tokens);
    }
}
