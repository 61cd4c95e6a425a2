/* The cpu backend's products and its threads, alone, and a model that is larger than any cache.
 *
 * c.gemv.TYPE.tN: one row with a ring of matrices of 3,072 x 6,144 that together fill a gigabyte,
 * against the read bandwidth of as many threads in the same call. c.gemm.TYPE.tN.mROWS: as a verify
 * step has (2, 4, 8) or a prefill (64, 512), against that or against the rate of the instruction
 * that does the work with operands in registers, whichever is less: float multiply-adds, or byte
 * products, of which NVFP4 takes three a weight (ops.h). Outputs are compared with sums in double.
 *
 * c.pool.spin, c.pool.wake: from a call with a piece a thread to the arrival of the last thread:
 * right behind another call, and after a pause in which the threads have parked.
 *
 * c.model.big.TOKENS.tN: tokens a second of one stream of a random checkpoint of 1.7 GB, with so
 * many positions in pages of random rows; limit: bytes a token / read bandwidth. */
#include "tools/bench.h"

#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "engine/base/clock.h"
#include "engine/base/rand.h"
#include "engine/base/thread.h"
#include "engine/model.h"

#define OUTS 3072
#define COLS 6144
#define RING_BYTES ((size_t)1 << 30)
#define ROWS_MAX 512
#define ROUNDS 7
#define VNNI_LOOPS 4000000u

static kn_device *open_device(uint32_t threads, uint32_t width)
{
    kn_device *device;
    base_err err = BASE_ERR_INIT;
    kn_device_options options = {
        .threads = threads, .rows_max = ROWS_MAX, .width_max = width, .context_max = 128};
    if (kn_device_create(&device, &options, &err) != BASE_OK) {
        fprintf(stderr, "whimbrel-bench: %s\n", err.text);
        exit(2);
    }
    return device;
}

/* ---- products ---- */

typedef struct ring {
    kn_weight stored;   /* the last matrix as a checkpoint has it */
    kn_weight *weights; /* packed; their stored form is gone, but for the last */
    uint32_t count;
    void *memory;
    size_t bytes;        /* of memory */
    size_t matrix_bytes; /* codes and scales */
} ring;

static void *map_huge(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        fprintf(stderr, "whimbrel-bench: no memory for %zu MiB of weights\n", bytes >> 20);
        exit(1);
    }
    (void)madvise(at, bytes, MADV_HUGEPAGE);
    return at;
}

/* Codes of every kind but E4M3's NaN; scales near 1/16. */
static void fill_matrix(kn_weight *w, uint8_t *data, uint8_t *scale, uint64_t seed)
{
    const bool four = w->type == KN_NVFP4;
    const size_t codes = (size_t)w->rows * w->cols / (four ? 2 : 1);
    const size_t scales = (size_t)w->rows * w->cols / (four ? 16 : 32);
    for (size_t i = 0; i < codes; i += 16) {
        base_rand4 r = base_rand(seed, 1, i);
        memcpy(data + i, r.v, 16);
        for (size_t j = 0; j < 16 && !four; j++)
            if ((data[i + j] & 0x7f) == 0x7f)
                data[i + j] ^= 1;
    }
    for (size_t i = 0; i < scales; i++)
        scale[i] = (uint8_t)((four ? 0x18 : 120) + (base_rand(seed, 2, i).v[0] & 7));
    w->data = data;
    w->scale = scale;
}

/* Each matrix but the last is packed from the same bytes, begun at another place of them. */
static ring make_ring(kn_type type)
{
    ring r = {.stored = {.type = type, .rows = OUTS, .cols = COLS, .scale_global = 1}};
    const size_t codes = (size_t)OUTS * COLS / (type == KN_NVFP4 ? 2 : 1);
    const size_t scales = (size_t)OUTS * COLS / (type == KN_NVFP4 ? 16 : 32);
    const size_t packed = kn_pack_bytes(&r.stored);
    uint8_t *data = malloc(2 * codes), *scale = malloc(scales);
    r.count = (uint32_t)(RING_BYTES / packed) + 1;
    r.weights = calloc(r.count, sizeof *r.weights);
    r.bytes = packed * r.count;
    r.memory = map_huge(r.bytes);
    if (data == NULL || scale == NULL || r.weights == NULL)
        exit(1);
    r.matrix_bytes = codes + scales;
    fill_matrix(&r.stored, data, scale, 7);
    memcpy(data + codes, data, codes);
    for (uint32_t i = 0; i < r.count; i++) {
        kn_weight *w = &r.weights[i];
        *w = r.stored;
        w->data = data + (size_t)(r.count - 1 - i) * 4096 % codes;
        kn_pack((uint8_t *)r.memory + packed * i, w);
        w->tiles = (uint8_t *)r.memory + packed * i;
    }
    return r;
}

static void free_ring(ring *r)
{
    munmap(r->memory, r->bytes);
    free((void *)r->stored.data);
    free((void *)r->stored.scale);
    free(r->weights);
}

static double stored_value(const kn_weight *w, uint32_t out, uint32_t k)
{
    const size_t at = (size_t)out * w->cols + k;
    if (w->type == KN_MXFP8)
        return (double)kn_e4m3_to_f32(((const uint8_t *)w->data)[at]) *
               (double)kn_e8m0_to_f32(((const uint8_t *)w->scale)[at / 32]);
    const uint8_t byte = ((const uint8_t *)w->data)[at / 2];
    return (double)kn_e2m1_to_f32(k & 1 ? byte >> 4 : byte & 15) *
           (double)kn_e4m3_to_f32(((const uint8_t *)w->scale)[at / 16]);
}

/* Every 61st output of the first and the last row, against sums in double. */
static bool right(const char *row, const kn_weight *w, const float *x, const float *y,
                  uint32_t rows)
{
    for (uint32_t r = 0; r<rows; r += rows> 1 ? rows - 1 : 1)
        for (uint32_t o = 0; o < OUTS; o += 61) {
            double sum = 0, size = 0;
            for (uint32_t k = 0; k < COLS; k++) {
                double product = (double)x[(size_t)r * COLS + k] * stored_value(w, o, k);
                sum += product;
                size += fabs(product);
            }
            if (!(fabs((double)y[(size_t)r * OUTS + o] - sum) <= 1e-6 * size)) {
                fprintf(stderr, "whimbrel-bench: %s: output %u of row %u is %g, not %g\n", row, o,
                        r, (double)y[(size_t)r * OUTS + o], sum);
                return false;
            }
        }
    return true;
}

/* `rows` rows with matrices of the ring: all of it, or as many as take some 100 ms. Returns seconds
 * a matrix. */
static double pass(kn_device *device, const ring *set, const float *x, float *y, uint32_t rows,
                   uint32_t matrices, uint32_t *at)
{
    uint64_t before = base_now_ns();
    for (uint32_t i = 0; i < matrices; i++, *at = (*at + 1) % set->count)
        device->ops->linear(device, y, x, &set->weights[*at], rows, false);
    return (double)(base_now_ns() - before) / 1e9 / matrices;
}

static bool product_row(kn_device *device, const ring *set, const float *x, float *y, uint32_t rows,
                        const char *row, double read_gbs, double peak_gflops)
{
    samples s = {0};
    char config[160];
    const double flops = 2.0 * OUTS * COLS * rows, bytes = (double)set->matrix_bytes;
    const kn_weight *last = &set->weights[set->count - 1];
    uint32_t at = 0, matrices = rows <= 8 ? set->count : rows <= 64 ? 16 : 2;
    device->ops->linear(device, y, x, last, rows, false);
    if (!right(row, last, x, y, rows))
        return false;
    for (int round = -1; round < ROUNDS; round++) {
        double seconds = pass(device, set, x, y, rows, matrices, &at);
        if (round >= 0)
            s.v[s.n++] = rows == 1 ? bytes / seconds / 1e9 : flops / seconds / 1e9;
    }
    snprintf(config, sizeof config, "%s %u x %u, ring of %.2f GB", device->ops->name, OUTS, COLS,
             (double)set->bytes / 1e9);
    if (rows == 1) {
        bench_report(row, config, "GB/s", true, &s, read_gbs, "read bandwidth");
        return true;
    }
    double stream = flops / (bytes / read_gbs); /* GFLOP/s at which the weights' bytes run out */
    bool bound = stream < peak_gflops || peak_gflops <= 0;
    bench_report(row, config, "GFLOP/s", true, &s, bound ? stream : peak_gflops,
                 bound ? "read bandwidth" : "its instruction, from registers");
    return true;
}

/* ---- the rate of byte products ---- */

#ifdef __x86_64__
__attribute__((target("avx512f,avx512vnni"))) static int vnni_all(uint32_t loops)
{
    __m512i acc[12], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        acc[i] = _mm512_set1_epi32(i);
    for (uint32_t n = 0; n < loops; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            acc[i] = _mm512_dpbusd_epi32(acc[i], a, b);
            __asm__("" : "+v"(acc[i])); /* a chain of its own, in a register */
        }
    }
#pragma GCC unroll 12
    for (int i = 1; i < 12; i++)
        acc[0] = _mm512_add_epi32(acc[0], acc[i]);
    return _mm512_reduce_add_epi32(acc[0]);
}

typedef struct vnni_job {
    atomic_int sink;
} vnni_job;

static void vnni_piece(void *ctx, uint32_t i)
{
    vnni_job *job = ctx;
    atomic_fetch_add(&job->sink, vnni_all(VNNI_LOOPS));
}

/* GFLOP/s of the NVFP4 form: 64 byte products an instruction, three for a weight. 0: the processor
 * has none. */
static double vnni_gflops(kn_device *device, uint32_t threads)
{
    vnni_job job = {0};
    double best = 0;
    if (!__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512f"))
        return 0;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t before = base_now_ns();
        kn_device_parallel(device, vnni_piece, &job, threads);
        double rate = 12.0 * VNNI_LOOPS * threads * 64 * 2 / 3 / (double)(base_now_ns() - before);
        best = rate > best ? rate : best;
    }
    return best;
}
#else
static double vnni_gflops(kn_device *device, uint32_t threads)
{
    return 0;
}
#endif

typedef struct product {
    kn_type type;
    const char *name;
} product;

/* All rows of one type; the ring is made for the first of them that is wanted. */
static bool bench_type(const bench_limits *limits, const product *p)
{
    static const uint32_t ROWS[] = {1, 2, 4, 8, 64, 512};
    const size_t x_bytes = (size_t)ROWS_MAX * COLS * sizeof(float),
                 y_bytes = (size_t)ROWS_MAX * OUTS * sizeof(float);
    float *x = NULL, *y = NULL;
    ring r = {0};
    bool good = true;
    for (int all = 0; all < (limits->threads > 1 ? 2 : 1); all++) {
        const uint32_t threads = all ? limits->threads : 1;
        kn_device *device = NULL;
        double peak = 0;
        for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS && good; i++) {
            char row[48];
            snprintf(row, sizeof row, ROWS[i] == 1 ? "c.gemv.%s.t%u" : "c.gemm.%s.t%u.m%u", p->name,
                     threads, ROWS[i]);
            if (!bench_wanted(row))
                continue;
            if (r.weights == NULL) {
                r = make_ring(p->type);
                x = map_huge(x_bytes);
                y = map_huge(y_bytes);
                for (size_t k = 0; k < x_bytes / sizeof *x; k++)
                    x[k] = (float)base_rand(3, 4, k).v[0] * 0x1p-31f - 1;
            }
            if (device == NULL) {
                device = open_device(threads, COLS);
                peak = limits->fma_gflops[all];
                if (p->type == KN_NVFP4 && strcmp(device->ops->name, "cpu-avx512") == 0)
                    peak = vnni_gflops(device, threads);
            }
            good = product_row(device, &r, x, y, ROWS[i], row, limits->read_gbs[all], peak);
        }
        kn_device_destroy(device);
    }
    if (r.weights != NULL) {
        munmap(x, x_bytes);
        munmap(y, y_bytes);
        free_ring(&r);
    }
    return good;
}

static bool bench_products(const bench_limits *limits)
{
    static const product TYPES[] = {{KN_NVFP4, "nvfp4"}, {KN_MXFP8, "mxfp8"}};
    return bench_type(limits, &TYPES[0]) && bench_type(limits, &TYPES[1]);
}

/* ---- threads ---- */

typedef struct meeting {
    atomic_uint came;
    uint32_t threads;
} meeting;

/* Each thread waits for all others, so that none can take two pieces. */
static void meet(void *ctx, uint32_t i)
{
    meeting *m = ctx;
    atomic_fetch_add(&m->came, 1);
    while (atomic_load_explicit(&m->came, memory_order_relaxed) < m->threads)
        __builtin_ia32_pause();
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bench_pool(const bench_limits *limits)
{
    enum { CALLS = 200 };
    static double us[CALLS];
    if (limits->threads < 2 || (!bench_wanted("c.pool.spin") && !bench_wanted("c.pool.wake")))
        return;
    kn_device *device = open_device(limits->threads, 64);
    for (int parked = 0; parked < 2; parked++) {
        samples s = {0};
        char config[64];
        double p99 = 0;
        for (int round = 0; round < ROUNDS; round++) {
            for (int i = 0; i < CALLS; i++) {
                meeting m = {.threads = limits->threads};
                if (parked)
                    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
                uint64_t before = base_now_ns();
                kn_device_parallel(device, meet, &m, limits->threads);
                us[i] = (double)(base_now_ns() - before) / 1e3;
            }
            qsort(us, CALLS, sizeof *us, by_value);
            s.v[s.n++] = us[CALLS / 2];
            p99 += us[CALLS * 99 / 100] / ROUNDS;
        }
        snprintf(config, sizeof config, "%u threads, p50 of %d calls; p99 %.1f us", limits->threads,
                 CALLS, p99);
        bench_report(parked ? "c.pool.wake" : "c.pool.spin", config, "us", false, &s,
                     parked ? 20 : 0, "20 us");
    }
    kn_device_destroy(device);
}

/* ---- a large model ---- */

#define BIG "random:mid"
#define STEPS 24
static const uint32_t CONTEXTS[] = {0, 8192, 32768};

static const char *big_name(char row[48], uint32_t context, uint32_t threads)
{
    snprintf(row, 48, "c.model.big.%u.t%u", context, threads);
    return row;
}

static bool big_wanted(const bench_limits *limits)
{
    char row[48];
    bool wanted = false;
    for (size_t i = 0; i < sizeof CONTEXTS / sizeof *CONTEXTS; i++)
        wanted = wanted || bench_wanted(big_name(row, CONTEXTS[i], 1)) ||
                 bench_wanted(big_name(row, CONTEXTS[i], limits->threads));
    return wanted;
}

static void fill_pages(kn_kv *kv)
{
    const kn_kv_shape *s = kn_kv_get_shape(kv);
    uint8_t rows[KN_PAGE_TOKENS * 512];
    for (uint32_t page = 0; page < s->page_count; page++)
        for (uint32_t l = 0; l < s->layers; l++)
            for (uint32_t p = 0; p < 2 * s->kv_heads + s->has_index[l]; p++) {
                kn_plane_kind kind = p < s->kv_heads       ? KN_PLANE_K
                                     : p < 2 * s->kv_heads ? KN_PLANE_V
                                                           : KN_PLANE_INDEX;
                const uint32_t dims = kind == KN_PLANE_INDEX ? s->index_dim : s->head_dim;
                const uint32_t bytes = kn_kv_row_bytes(s->type, dims);
                for (size_t i = 0; i < (size_t)bytes * KN_PAGE_TOKENS; i += 16) {
                    base_rand4 r = base_rand(9, (uint64_t)page << 32 | l << 8 | p, i);
                    memcpy(rows + i, r.v, 16);
                }
                for (uint32_t t = 0; t < KN_PAGE_TOKENS; t++)
                    for (uint32_t g = 0; g < dims / 16; g++)
                        rows[t * bytes + dims / 2 + g] = (uint8_t)(0x28 + (g + t) % 8);
                kn_kv_copy_in(kv, rows, page, l, kind, p % s->kv_heads, KN_PAGE_TOKENS);
            }
}

/* Bytes that one token's step reads of pages at this context. */
static double page_bytes(const eng_model_config *c, uint32_t context)
{
    double bytes = 0, chosen = c->topk_blocks * (double)KN_BLOCK_TOKENS;
    for (uint32_t l = 0; l < c->layers; l++) {
        bytes += (c->sparse[l] && context > chosen ? chosen : context) * 2 * c->kv_heads *
                 c->head_dim * 9 / 16;
        if (c->sparse[l])
            bytes += (double)context * c->index_dim * 9 / 16;
    }
    return bytes;
}

static void big_row(eng_model *model, kn_kv *kv, const uint32_t *table, uint32_t context,
                    uint32_t threads, double read_gbs)
{
    const eng_model_config *c = eng_model_get_config(model);
    double macs, bytes = bench_token_bytes(c, &macs) + page_bytes(c, context);
    const uint32_t *pages[1] = {table};
    char row[48];
    if (!bench_wanted(big_name(row, context, threads)))
        return;
    float *logits = malloc(c->vocab * sizeof *logits);
    uint32_t seq = 0, pick = 0;
    samples s = {0};
    for (int round = -1; round < ROUNDS; round++) {
        uint64_t before = base_now_ns();
        for (uint32_t i = 0; i < STEPS; i++) {
            int32_t token = (int32_t)(base_rand(2, (uint64_t)(round + 1), i).v[0] % c->vocab);
            int32_t pos = (int32_t)(context + i);
            kn_rows rows = {.rows = 1, .token = &token, .pos = &pos, .seq = &seq, .pages = pages};
            eng_model_forward(model, kv, &rows, &pick, 1, logits, NULL, 0, NULL);
        }
        if (round >= 0)
            s.v[s.n++] = STEPS * 1e9 / (double)(base_now_ns() - before);
    }
    char config[128];
    snprintf(config, sizeof config, "%s, %.2f GB of weights, %.0f MB a token", BIG,
             (double)eng_model_weight_bytes(model) / 1e9, bytes / 1e6);
    bench_report(row, config, "tok/s", true, &s, read_gbs * 1e9 / bytes, "read bandwidth");
    free(logits);
}

/* The engine's thread, as far as the model can tell. */
static void *run_big(void *arg)
{
    const bench_limits *limits = arg;
    base_thread_enter(BASE_THREAD_ENGINE, "bench");
    for (int all = 0; all < 2; all++) {
        const uint32_t threads = all ? limits->threads : 1;
        if (all && threads == 1)
            continue;
        eng_model *model;
        kn_kv *kv;
        base_err err = BASE_ERR_INIT;
        eng_model_options options = {.variant = "auto",
                                     .kv = "nvfp4",
                                     .threads = threads,
                                     .rows_max = 8,
                                     .context_max = 32768 + 128};
        const uint32_t page_count = options.context_max / KN_PAGE_TOKENS;
        if (eng_model_load(&model, BIG, &options, &err) != BASE_OK) {
            fprintf(stderr, "whimbrel-bench: %s\n", err.text);
            exit(2);
        }
        kn_kv_shape shape = eng_model_kv_shape(model, page_count);
        if (kn_kv_create(&kv, eng_model_device(model), &shape, &err) != BASE_OK) {
            fprintf(stderr, "whimbrel-bench: %s\n", err.text);
            exit(2);
        }
        fill_pages(kv);
        uint32_t *table = malloc(page_count * sizeof *table);
        for (uint32_t i = 0; i < page_count; i++)
            table[i] = i;
        for (size_t i = 0; i < sizeof CONTEXTS / sizeof *CONTEXTS; i++)
            big_row(model, kv, table, CONTEXTS[i], threads, limits->read_gbs[all]);
        free(table);
        kn_kv_destroy(kv);
        eng_model_destroy(model);
    }
    return NULL;
}

bool bench_kernels(const bench_limits *limits)
{
    bool good = bench_products(limits);
    bench_pool(limits);
    if (big_wanted(limits)) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, run_big, (void *)limits) != 0)
            return false;
        pthread_join(thread, NULL);
    }
    return good;
}
