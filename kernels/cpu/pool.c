/* The pool's protocol. `open` is the job's number while pieces may be taken and 0 otherwise;
 * `active` counts the workers that look at the job. A worker raises `active` before it reads
 * `open`; the caller clears `open` before it waits for `active` to fall to 0. Both are sequentially
 * consistent, so either the worker sees the job closed and leaves, or the caller sees the worker
 * and waits: no worker can touch fn, ctx or count of a job that is over. */
#include "kernels/cpu/pool.h"

#include "engine/base/clock.h"
#include "engine/base/thread.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define THREADS_MAX 64
#define SPIN_NS                                                                                    \
    50000 /* longer than any serial stretch within a step, far shorter than a scheduler's tick */
#define SPINS_A_CLOCK 64 /* pauses between two looks at the clock */
#define SPINS_TO_YIELD                                                                             \
    256 /* of a caller that waits for a piece in flight; the worker may have lost its core */

typedef struct worker {
    kn_pool *pool;
    pthread_t thread;
    uint32_t index;
} worker;

struct kn_pool {
    _Alignas(64) atomic_uint open; /* number of the job, 0: none */
    kn_pool_fn *fn;                /* fn, ctx, count: written while closed and nobody is active */
    void *ctx;
    uint32_t count;
    uint32_t job; /* the caller's own count of jobs */
    _Alignas(64) atomic_uint next;
    _Alignas(64) atomic_uint active;
    _Alignas(64) atomic_uint signal; /* futex word, raised once a job when someone is parked */
    atomic_uint parked;
    atomic_bool stop;
    uint32_t threads;
    uint32_t started;
    worker workers[THREADS_MAX];
};

static _Thread_local uint32_t
    inside; /* 1 + the pool's number of this thread while it executes a piece, else 0 */

static void futex_wait(atomic_uint *word, uint32_t value)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake_all(atomic_uint *word)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, THREADS_MAX, NULL, NULL, 0);
}

static void take_pieces(kn_pool *pool, uint32_t thread)
{
    inside = thread + 1;
    for (;;) {
        const uint32_t i = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (i >= pool->count)
            break;
        pool->fn(pool->ctx, i, thread);
    }
    inside = 0;
}

/* True if a job other than `seen` is open, or the pool stops. */
static bool has_news(kn_pool *pool, uint32_t seen)
{
    const uint32_t open = atomic_load(&pool->open);
    return (open && open != seen) || atomic_load_explicit(&pool->stop, memory_order_relaxed);
}

/* True once there are news, false if there were none for SPIN_NS. */
static bool spin(kn_pool *pool, uint32_t seen)
{
    const uint64_t end = base_now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < SPINS_A_CLOCK; i++) {
            if (has_news(pool, seen))
                return true;
            __builtin_ia32_pause();
        }
    } while (base_now_ns() < end);
    return false;
}

static void wait_for_news(kn_pool *pool, uint32_t seen)
{
    while (!spin(pool, seen)) {
        atomic_fetch_add(&pool->parked, 1);
        /* The word is read before the last look: a job opened after that look has raised it, and
         * the wait returns. */
        const uint32_t word = atomic_load(&pool->signal);
        if (!has_news(pool, seen))
            futex_wait(&pool->signal, word);
        atomic_fetch_sub(&pool->parked, 1);
    }
}

static void *worker_main(void *arg)
{
    worker *self = arg;
    kn_pool *pool = self->pool;
    char name[16];
    snprintf(name, sizeof name, "kernel-%u", self->index);
    base_thread_enter(BASE_THREAD_OTHER, name);
    uint32_t seen = 0;
    while (!atomic_load(&pool->stop)) {
        wait_for_news(pool, seen);
        atomic_fetch_add(&pool->active, 1);
        const uint32_t open = atomic_load(&pool->open);
        if (open) {
            seen = open;
            take_pieces(pool, self->index);
        }
        atomic_fetch_sub(&pool->active, 1);
    }
    return NULL;
}

base_code kn_pool_create(kn_pool **out, uint32_t threads, base_err *err)
{
    CHECK(threads >= 1 && threads <= THREADS_MAX);
    kn_pool *pool = aligned_alloc(64, sizeof *pool);
    if (!pool)
        return base_fail(err, BASE_NOMEM, "kernel pool of %u threads: out of memory", threads);
    *pool = (kn_pool){.threads = threads};
    for (uint32_t i = 1; i < threads; i++) {
        worker *w = &pool->workers[i];
        *w = (worker){.pool = pool, .index = i};
        if (pthread_create(&w->thread, NULL, worker_main, w) != 0) {
            kn_pool_destroy(pool);
            return base_fail(err, BASE_IO, "kernel pool: thread %u of %u cannot be started", i,
                             threads);
        }
        pool->started = i;
    }
    *out = pool;
    return BASE_OK;
}

void kn_pool_destroy(kn_pool *pool)
{
    if (!pool)
        return;
    atomic_store(&pool->stop, true);
    atomic_fetch_add(&pool->signal, 1);
    futex_wake_all(&pool->signal);
    for (uint32_t i = 1; i <= pool->started; i++)
        pthread_join(pool->workers[i].thread, NULL);
    free(pool);
}

void kn_pool_wake(kn_pool *pool)
{
    if (!atomic_load(&pool->parked))
        return;
    atomic_fetch_add(&pool->signal, 1);
    futex_wake_all(&pool->signal);
}

uint32_t kn_pool_threads(const kn_pool *pool)
{
    return pool->threads;
}

void kn_pool_run(kn_pool *pool, kn_pool_fn *fn, void *ctx, uint32_t count)
{
    if (count == 0)
        return;
    if (count == 1 || pool->threads == 1 || inside) {
        const uint32_t thread = inside ? inside - 1 : 0;
        for (uint32_t i = 0; i < count; i++)
            fn(ctx, i, thread);
        return;
    }
    pool->fn = fn;
    pool->ctx = ctx;
    pool->count = count;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    if (++pool->job == 0)
        pool->job = 1;
    atomic_store(&pool->open, pool->job);
    kn_pool_wake(pool);
    take_pieces(pool, 0);
    atomic_store(&pool->open, 0);
    for (uint32_t spins = 0; atomic_load(&pool->active) != 0; spins++) {
        if (spins < SPINS_TO_YIELD)
            __builtin_ia32_pause();
        else
            sched_yield();
    }
}
