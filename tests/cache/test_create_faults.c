/* Creation when the Nth allocation fails, for every N: it says so and leaks nothing. The linker
 * puts the counting versions in place of the C library's (see meson.build). */
#include <criterion/criterion.h>

#include <stdlib.h>

#include "cache/index.h"

static long left = -1; /* allocations until one fails; negative: none does */
static long alive;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_aligned_alloc(size_t align, size_t size);
void __real_free(void *at);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_aligned_alloc(size_t align, size_t size);
void __wrap_free(void *at);

static bool fails(void)
{
    return left >= 0 && left-- == 0;
}

static void *count(void *at)
{
    alive += at != NULL;
    return at;
}

void *__wrap_malloc(size_t size)
{
    return fails() ? NULL : count(__real_malloc(size));
}

void *__wrap_calloc(size_t number, size_t size)
{
    return fails() ? NULL : count(__real_calloc(number, size));
}

void *__wrap_aligned_alloc(size_t align, size_t size)
{
    return fails() ? NULL : count(__real_aligned_alloc(align, size));
}

void __wrap_free(void *at)
{
    alive -= at != NULL;
    __real_free(at);
}

Test(cache_create, each_failing_allocation_is_told_and_leaks_nothing)
{
    kv_pool *pool = NULL;
    kv_index *index = NULL;
    long n = 0, pools = 0, indexes = 0;
    alive = 0;
    for (bool done = false; !done; n++) {
        base_err err = BASE_ERR_INIT;
        cr_assert_lt(n, 100);
        left = n;
        base_code made = kv_pool_create(&pool, 100, &err);
        if (made == BASE_OK)
            made = kv_index_create(&index, pool, 50, &err);
        left = -1;
        done = made == BASE_OK;
        if (!done) {
            cr_assert_eq(made, BASE_NOMEM);
            cr_assert_eq(err.code, BASE_NOMEM);
            cr_assert_null(index);
            pools += pool == NULL;
            indexes += pool != NULL;
        }
        kv_index_destroy(index);
        kv_pool_destroy(pool);
        cr_assert_eq(alive, 0, "allocation %ld: %ld are left", n, alive);
        pool = NULL;
        index = NULL;
    }
    cr_assert_eq(pools, 5);
    cr_assert_eq(indexes, 10);
}

/* Serving is free of the heap. */
Test(cache_create, nothing_is_allocated_afterwards)
{
    kv_pool *pool;
    kv_index *index;
    static int32_t tokens[64 * KV_PAGE_TOKENS];
    uint32_t pages[64], got[64];
    cr_assert_eq(kv_pool_create(&pool, 100, NULL), BASE_OK);
    cr_assert_eq(kv_index_create(&index, pool, 50, NULL), BASE_OK);
    long before = alive;
    left = 0; /* any would fail, and be seen */
    for (uint32_t i = 0; i < 64; i++) {
        pages[i] = kv_pool_alloc(pool, 1);
        kv_pool_set_filled(pool, pages[i], 1, KV_PAGE_TOKENS);
    }
    bool inserted = kv_index_insert(index, 1, tokens, 64 * KV_PAGE_TOKENS, pages, 1);
    uint32_t matched = kv_index_match(index, 1, tokens, 64 * KV_PAGE_TOKENS, got, 2).tokens;
    for (uint32_t i = 0; i < 64; i++) {
        kv_pool_unref(pool, pages[i]);
        kv_pool_unref(pool, got[i]);
    }
    kv_index_pin(index, 1, tokens, 100, 3);
    uint32_t evicted = kv_index_evict(index, 100, 4);
    bool asked = left != 0;
    left = -1;
    cr_assert_not(asked);
    cr_assert(inserted);
    cr_assert_eq(matched, 64 * KV_PAGE_TOKENS);
    cr_assert_eq(evicted, 64);
    cr_assert_eq(alive, before);
    kv_index_destroy(index);
    kv_pool_destroy(pool);
}
