/* The kernels' thread pool under ThreadSanitizer: jobs back to back, nested, with pauses in which
 * workers park, wake-ups from another thread, pools that come and go. A plain program, since
 * Criterion does not run under that sanitizer. Exit status 0: every piece ran once, and no race was
 * seen. */
#include "kernels/cpu/pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

#define JOBS 4000

typedef struct job {
    kn_pool *pool;
    uint32_t plain[64]; /* written by whoever runs the piece, read by the caller */
    atomic_uint nested;
} job;

static void piece(void *ctx, uint32_t i, uint32_t thread)
{
    job *j = ctx;
    j->plain[i]++;
}

static void inner(void *ctx, uint32_t i, uint32_t thread)
{
    atomic_fetch_add(&((job *)ctx)->nested, 1);
}

static void outer(void *ctx, uint32_t i, uint32_t thread)
{
    kn_pool_run(((job *)ctx)->pool, inner, ctx, 3);
}

static atomic_bool over;

static void *waker(void *arg)
{
    while (!atomic_load(&over)) {
        kn_pool_wake(arg);
        nanosleep(&(struct timespec){.tv_nsec = 70000}, NULL);
    }
    return NULL;
}

static int run(uint32_t threads)
{
    static job j;
    pthread_t other;
    j = (job){0};
    if (kn_pool_create(&j.pool, threads, NULL) != BASE_OK)
        return 1;
    atomic_store(&over, false);
    if (pthread_create(&other, NULL, waker, j.pool) != 0)
        return 1;
    int wrong = 0;
    for (uint32_t n = 0; n < JOBS; n++) {
        const uint32_t count = n % 64 + 1;
        for (uint32_t i = 0; i < 64; i++)
            j.plain[i] = 0;
        kn_pool_run(j.pool, piece, &j, count);
        for (uint32_t i = 0; i < 64; i++)
            wrong += j.plain[i] != (i < count);
        if (n % 100 == 0)
            kn_pool_run(j.pool, outer, &j, 8);
        if (n % 200 == 0)
            nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
    }
    wrong += atomic_load(&j.nested) != JOBS / 100 * 8 * 3;
    atomic_store(&over, true);
    pthread_join(other, NULL);
    kn_pool_destroy(j.pool);
    return wrong;
}

int main(void)
{
    int wrong = 0;
    for (uint32_t threads = 1; threads <= 4; threads++)
        wrong += run(threads);
    if (wrong)
        printf("%d pieces ran wrongly\n", wrong);
    return wrong != 0;
}
