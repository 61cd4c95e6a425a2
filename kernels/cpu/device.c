/* cpu/device: creation, scratch and memory of the cpu backend. */
#include "kernels/cpu/device.h"

#include "engine/base/num.h"
#include "engine/base/rand.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGN 64

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

static base_code create(kn_device **out, const kn_device_options *options, base_err *err)
{
    const kn_ops *ops;
    const base_code code =
        kn_cpu_choose(&ops, options->variant ? options->variant : "auto", kn_cpu_features(), err);
    if (code)
        return code;
    if (options->rows_max == 0 || options->width_max == 0 || options->context_max == 0)
        return base_fail(err, BASE_INVALID,
                         "device: rows_max %u, width_max %u and context_max %u must be at least 1",
                         options->rows_max, options->width_max, options->context_max);
    const uint32_t threads = options->threads;
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_table);
    cpu_device *d = calloc(1, sizeof *d);
    if (!d)
        return base_fail(err, BASE_NOMEM, "device: out of memory");
    d->base = (kn_device){.ops = ops, .backend = &kn_backend_cpu, .impl = d};
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

    *out = &d->base;
    return BASE_OK;
}

static void destroy(kn_device *device)
{
    cpu_device *d = cpu_of(device);
    munmap(d->memory, d->memory_bytes);
    free(d);
}

static const char *describe(const kn_device *device)
{
    return device->ops->name;
}

/* ---- memory: the host's ---- */

static void *take(kn_device *device, size_t bytes, base_err *err)
{
    void *memory = map_memory(bytes);
    if (!memory)
        base_fail(err, BASE_NOMEM, "device: no memory for %zu bytes", bytes);
    return memory;
}

static void give(kn_device *device, void *memory, size_t bytes)
{
    if (memory)
        munmap(memory, bytes);
}

static void memory(const kn_device *device, size_t *available, size_t *total)
{
    *available = *total = 0;
}

static void move(kn_device *device, void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

static void copy(kn_device *device, void *dst, size_t dst_stride, const void *src,
                 size_t src_stride, size_t bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        memcpy((uint8_t *)dst + i * dst_stride, (const uint8_t *)src + i * src_stride, bytes);
}

static void fill(kn_device *device, void *dst, size_t bytes, uint64_t seed, uint64_t stream,
                 const uint8_t table[256])
{
    uint8_t *at = dst;
    if (!table)
        memset(dst, 0, bytes);
    for (size_t i = 0; table && i < bytes; i += 16) {
        const base_rand4 words = base_rand(seed, stream, i / 16);
        for (size_t j = 0; j < base_min(16, bytes - i); j++)
            at[i + j] = table[words.v[j / 4] >> 8 * (j % 4) & 255];
    }
}

static void wait(kn_device *device)
{
}

static base_code status(const kn_device *device, base_err *err)
{
    return BASE_OK;
}

static void rows_begin(kn_device *device, const kn_rows *rows)
{
}

static bool graph_begin(kn_device *device, uint64_t key)
{
    return true;
}

static void graph_end(kn_device *device)
{
}

static void copy_plane(kn_kv *kv, uint32_t to, uint32_t from, uint32_t layer, kn_plane_kind kind,
                       uint32_t head, uint32_t tokens)
{
    memcpy(cpu_kv_plane(kv, to, layer, kind, head), cpu_kv_plane(kv, from, layer, kind, head),
           (size_t)tokens * (kind == KN_PLANE_INDEX ? kv->index_row_bytes : kv->row_bytes));
}

static void kv_copy_page(kn_kv *kv, uint32_t to, uint32_t from, uint32_t tokens)
{
    for (uint32_t layer = 0; layer < kv->shape.layers; layer++) {
        for (uint32_t head = 0; head < kv->shape.kv_heads; head++) {
            copy_plane(kv, to, from, layer, KN_PLANE_K, head, tokens);
            copy_plane(kv, to, from, layer, KN_PLANE_V, head, tokens);
        }
        if (kv->shape.has_index[layer])
            copy_plane(kv, to, from, layer, KN_PLANE_INDEX, 0, tokens);
    }
}

#define TEXT_OF(number) #number
#define NUMERICS(version) "cpu-" TEXT_OF(version)

const kn_backend kn_backend_cpu = {
    .version = KN_BACKEND_VERSION,
    .name = "cpu",
    .numerics = NUMERICS(KN_CPU_REDUCTION),
    .create = create,
    .destroy = destroy,
    .describe = describe,
    .alloc = take,
    .free = give,
    .memory = memory,
    .upload = move,
    .download = move,
    .copy = copy,
    .fill = fill,
    .wait = wait,
    .status = status,
    .rows_begin = rows_begin,
    .graph_begin = graph_begin,
    .graph_end = graph_end,
    .kv_copy_page = kv_copy_page,
};
