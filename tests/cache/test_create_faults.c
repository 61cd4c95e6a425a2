/* Creation when the Nth allocation fails, for every N: it says so and leaks nothing. */
#include <criterion/criterion.h>

#include "cache/index.h"
#include "store_fixture.h"
#include "tests/failing_alloc.h"

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

Test(cache_create, a_disk_tier_without_memory_is_told_and_leaks_nothing)
{
    static const kv_plane planes[] = {{KV_PLANE_K, 0, 0, 8}};
    kv_layout layout;
    fix_device device;
    kv_pool *pool;
    kv_store *store;
    char dir[64] = "/tmp/whimbrel-nomem-XXXXXX";
    cr_assert_eq(kv_layout_init(&layout, planes, 1, NULL), BASE_OK);
    fix_device_init(&device, &layout, &layout);
    cr_assert_eq(kv_pool_create(&pool, 8, NULL), BASE_OK);
    cr_assert_not_null(mkdtemp(dir));
    kv_store_options options = {
        .dir = dir,
        .fingerprint = "weights",
        .numerics = "cpu/1",
        .layout = &layout,
        .draft_fingerprint = "drafter",
        .draft = &layout,
        .device = {.ctx = &device, .copy_out = fix_copy_out, .copy_in = fix_copy_in},
        .bytes_max = 1 << 20,
        .restores_max = 2,
        .slots_max = 4,
    };
    long before = alive, n = 0;
    for (bool done = false; !done; n++) {
        base_err err = BASE_ERR_INIT;
        cr_assert_lt(n, 100);
        left = n;
        base_code made = kv_store_open(&store, pool, &options, &err);
        left = -1;
        done = made == BASE_OK;
        if (!done) {
            cr_assert_eq(made, BASE_NOMEM, "allocation %ld: %s", n, err.text);
            cr_assert_null(store);
        }
        kv_store_close(store, true);
        cr_assert_eq(alive, before, "allocation %ld: %ld are left", n, alive - before);
    }
    cr_assert_gt(n, 20);
    kv_pool_destroy(pool);
    fix_device_deinit(&device);
    fix_remove_dir(dir);
}
