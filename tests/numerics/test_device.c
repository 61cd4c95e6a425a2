/* Devices and their thread pool. */
#include "kernels/cpu/device.h"
#include "tests/numerics/support.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

static atomic_uint hits[1000];

static void count_piece(void *ctx, uint32_t i)
{
    atomic_fetch_add((atomic_uint *)ctx, 1);
    atomic_fetch_add(&hits[i], 1);
}

Test(device, every_piece_runs_once)
{
    for (uint32_t threads = 1; threads <= 9; threads += 4) {
        kn_device *device = open_device("auto", threads);
        for (uint32_t count = 0; count <= 1000; count = count * 2 + 1) {
            atomic_uint total = 0;
            memset(hits, 0, sizeof hits);
            kn_device_parallel(device, count_piece, &total, count);
            cr_assert_eq(atomic_load(&total), count);
            for (uint32_t i = 0; i < 1000; i++)
                cr_assert_eq(atomic_load(&hits[i]), i < count);
        }
        kn_device_destroy(device);
    }
}

/* Jobs back to back and with pauses that let the workers park: a lost wake-up would hang, a late
 * worker would count into a job that is over. */
Test(device, jobs_follow_one_another)
{
    kn_device *device = open_device("auto", 4);
    for (int i = 0; i < 3000; i++) {
        atomic_uint total = 0;
        kn_device_parallel(device, count_piece, &total, 5);
        cr_assert_eq(atomic_load(&total), 5);
        if (i % 500 == 0)
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    kn_device_destroy(device);
}

typedef struct nested {
    kn_device *device;
    atomic_uint total;
} nested;

static void run_nested(void *ctx, uint32_t i)
{
    nested *n = ctx;
    kn_device_parallel(n->device, count_piece, &n->total, 3);
}

Test(device, a_piece_may_start_pieces)
{
    nested n = {.device = open_device("auto", 3)};
    kn_device_parallel(n.device, run_nested, &n, 20);
    cr_assert_eq(atomic_load(&n.total), 60);
    kn_device_destroy(n.device);
}

/* Every processor that there could be gets the best variant that it can run, and what it cannot run
 * is refused by the name of what it lacks. */
Test(device, the_variant_follows_from_the_processor)
{
    enum { AVX2 = KN_CPU_AVX2 | KN_CPU_FMA | KN_CPU_F16C };
    for (uint32_t features = 0; features <= KN_CPU_ALL; features++) {
        const bool wide = features == KN_CPU_ALL, vectors = (features & AVX2) == AVX2;
        const kn_ops *ops = NULL;
        base_err err = BASE_ERR_INIT;
        cr_assert_eq(kn_cpu_choose(&ops, "auto", features, NULL), BASE_OK);
        cr_assert_eq(ops, wide ? &kn_cpu_ops_avx512 : vectors ? &kn_cpu_ops_avx2 : &kn_cpu_ops_ref);
        cr_assert_eq(kn_cpu_choose(&ops, "ref", features, NULL), BASE_OK);
        cr_assert_eq(ops, &kn_cpu_ops_ref);
        cr_assert_eq(kn_cpu_choose(&ops, "avx2", features, &err) == BASE_OK, vectors);
        cr_assert(vectors || strstr(err.text, "lacks"));
        err = (base_err)BASE_ERR_INIT;
        cr_assert_eq(kn_cpu_choose(&ops, "avx512", features, &err) == BASE_OK, wide);
        if (features == (KN_CPU_ALL & ~KN_CPU_AVX512VBMI))
            cr_assert_str_eq(err.text, "variant avx512: this processor lacks AVX-512 VBMI");
    }
}

/* A wake-up without a job leads to nothing but a short spin. */
Test(device, threads_may_be_woken_for_nothing)
{
    kn_device *device = open_device("auto", 3);
    for (int i = 0; i < 300; i++) {
        atomic_uint total = 0;
        kn_device_wake(device);
        if (i % 3)
            kn_device_parallel(device, count_piece, &total, 7);
        cr_assert_eq(atomic_load(&total), i % 3 ? 7 : 0);
        nanosleep(&(struct timespec){.tv_nsec = 100000 * (i % 4)}, NULL);
    }
    kn_device_destroy(device);
}

Test(device, idle_threads_sleep)
{
    kn_device *device = open_device("auto", 4);
    atomic_uint total = 0;
    kn_device_parallel(device, count_piece, &total, 100);
    kn_device_wake(device);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    nanosleep(&(struct timespec){.tv_nsec = 400000000}, NULL);
    getrusage(RUSAGE_SELF, &after);
    const long used = (after.ru_utime.tv_sec - before.ru_utime.tv_sec) * 1000000 +
                      after.ru_utime.tv_usec - before.ru_utime.tv_usec;
    cr_assert_lt(used, 4000, "%ld us of processor time in 400 ms", used); /* 1 % */
    kn_device_destroy(device);
}

Test(device, bad_options_are_named)
{
    kn_device *device = NULL;
    base_err err = BASE_ERR_INIT;
    kn_device_options o = {
        .variant = "sse9", .threads = 1, .rows_max = 1, .width_max = 64, .context_max = 128};
    cr_assert_eq(kn_device_create(&device, &o, &err), BASE_UNSUPPORTED);
    cr_assert_not_null(strstr(err.text, "sse9"));
    err = (base_err)BASE_ERR_INIT;
    o.variant = "ref";
    o.rows_max = 0;
    cr_assert_eq(kn_device_create(&device, &o, &err), BASE_INVALID);
    o.rows_max = 1;
    o.threads = 65;
    cr_assert_eq(kn_device_create(&device, &o, NULL), BASE_INVALID);
    o.threads = 1;
    o.rows_max = o.width_max = o.context_max = UINT32_MAX;
    cr_assert_eq(kn_device_create(&device, &o, NULL), BASE_NOMEM);
    cr_assert_null(device);
}

Test(device, variants_say_their_names)
{
    static const char *const names[][2] = {
        {"ref", "cpu-ref"}, {"avx2", "cpu-avx2"}, {"avx512", "cpu-avx512"}};
    for (int i = 0; i < 3; i++) {
        kn_device *device = open_device(names[i][0], 1);
        if (device)
            cr_assert_str_eq(device->ops->name, names[i][1]);
        kn_device_destroy(device);
    }
}
