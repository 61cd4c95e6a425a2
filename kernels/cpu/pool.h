/* cpu/pool: the device's threads. The caller is thread 0 and takes part; workers take pieces from
 * one counter.
 *
 * A worker that finds nothing spins for about 50 us, which covers the gaps inside a step, and then
 * sleeps on a futex, so that an idle server costs nothing. A run never waits for a worker that has
 * not joined it: the caller can finish alone. Thread: run is called by one thread at a time; a run
 * inside a run is executed by the thread that asks. */
#pragma once
#include "engine/base/err.h"

typedef struct kn_pool kn_pool;

typedef void kn_pool_fn(void *ctx, uint32_t piece, uint32_t thread);

/* `threads` counts the caller, 1 … 64. Fails: BASE_NOMEM, BASE_IO (a thread cannot be started). */
base_code kn_pool_create(kn_pool **out, uint32_t threads, base_err *err);
void kn_pool_destroy(kn_pool *pool); /* NULL is fine */
uint32_t kn_pool_threads(const kn_pool *pool);
/* A job is about to come: threads that sleep begin to spin. Thread: any. */
void kn_pool_wake(kn_pool *pool);
/* fn(ctx, i, thread) for every i < count; returns when all are done. thread < kn_pool_threads. */
void kn_pool_run(kn_pool *pool, kn_pool_fn *fn, void *ctx, uint32_t count);
