/* kernels/table: devices of any backend, and which variant of the cpu serves one. */
#include "kernels/cpu/device.h"

#include <sched.h>
#include <string.h>

#define THREADS_MAX 64

#define AVX2 (KN_CPU_AVX2 | KN_CPU_FMA | KN_CPU_F16C)
#define AVX512                                                                                     \
    (AVX2 | KN_CPU_AVX512F | KN_CPU_AVX512BW | KN_CPU_AVX512VL | KN_CPU_AVX512DQ |                 \
     KN_CPU_AVX512VBMI | KN_CPU_AVX512VNNI)

/* By bit number. */
static const char *const feature_names[] = {"AVX2",       "FMA",          "F16C",
                                            "AVX-512 F",  "AVX-512 BW",   "AVX-512 VL",
                                            "AVX-512 DQ", "AVX-512 VBMI", "AVX-512 VNNI"};

/* Best first: "auto" takes the first that the processor has. */
static const struct variant {
    const char *name;
    const kn_ops *ops;
    uint32_t needs;
} variants[] = {
    {"avx512", &kn_cpu_ops_avx512, AVX512},
    {"avx2", &kn_cpu_ops_avx2, AVX2},
    {"ref", &kn_cpu_ops_ref, 0},
};

uint32_t kn_cpu_features(void)
{
    uint32_t features = 0;
    features |= __builtin_cpu_supports("avx2") ? KN_CPU_AVX2 : 0;
    features |= __builtin_cpu_supports("fma") ? KN_CPU_FMA : 0;
    features |= __builtin_cpu_supports("f16c") ? KN_CPU_F16C : 0;
    features |= __builtin_cpu_supports("avx512f") ? KN_CPU_AVX512F : 0;
    features |= __builtin_cpu_supports("avx512bw") ? KN_CPU_AVX512BW : 0;
    features |= __builtin_cpu_supports("avx512vl") ? KN_CPU_AVX512VL : 0;
    features |= __builtin_cpu_supports("avx512dq") ? KN_CPU_AVX512DQ : 0;
    features |= __builtin_cpu_supports("avx512vbmi") ? KN_CPU_AVX512VBMI : 0;
    features |= __builtin_cpu_supports("avx512vnni") ? KN_CPU_AVX512VNNI : 0;
    return features;
}

base_code kn_cpu_choose(const kn_ops **out, const char *variant, uint32_t features, base_err *err)
{
    const bool any = strcmp(variant, "auto") == 0;
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        const struct variant *b = &variants[i];
        const uint32_t missing = b->needs & ~features;
        if (!any && strcmp(variant, b->name) != 0)
            continue;
        if (missing == 0) {
            *out = b->ops;
            return BASE_OK;
        }
        if (!any)
            return base_fail(err, BASE_UNSUPPORTED, "variant %s: this processor lacks %s", b->name,
                             feature_names[__builtin_ctz(missing)]);
    }
    return base_fail(err, BASE_UNSUPPORTED,
                     "variant \"%s\" unknown; there are auto, ref, avx2 and avx512", variant);
}

/* ---- devices ---- */

static uint32_t cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    const int count = CPU_COUNT(&set);
    return count < 1 ? 1 : count > THREADS_MAX ? THREADS_MAX : (uint32_t)count;
}

base_code kn_device_create(kn_device **out, const kn_device_options *options, base_err *err)
{
    const kn_backend *backend = options->backend ? options->backend : &kn_backend_cpu;
    kn_device_options final = *options;
    if (options->threads > THREADS_MAX)
        return base_fail(err, BASE_INVALID, "device: %u threads exceed %d", options->threads,
                         THREADS_MAX);
    final.threads = options->threads ? options->threads : cores();
    kn_device *device;
    base_code code = backend->create(&device, &final, err);
    if (code)
        return code;
    code = kn_pool_create(&device->pool, final.threads, err);
    if (code) {
        backend->destroy(device);
        return code;
    }
    *out = device;
    return BASE_OK;
}

void kn_device_destroy(kn_device *device)
{
    if (!device)
        return;
    kn_pool_destroy(device->pool);
    device->backend->destroy(device);
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
    kn_pool_run(device->pool, run_plain, &job, count);
}

void kn_device_wake(kn_device *device)
{
    kn_pool_wake(device->pool);
}
