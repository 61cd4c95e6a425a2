/* The pool and the layout digest. */
#include <criterion/criterion.h>

#include <signal.h>
#include <string.h>

#include "cache/page.h"

static kv_pool *make(uint32_t pages)
{
    kv_pool *pool;
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(kv_pool_create(&pool, pages, &err), BASE_OK, "%s", err.text);
    return pool;
}

static void check(const kv_pool *pool)
{
    base_err err = BASE_ERR_INIT;
    cr_assert(kv_pool_check(pool, &err), "%s", err.text);
}

Test(kv_pool, every_page_is_given_once_and_then_none)
{
    kv_pool *pool = make(300);
    bool seen[300] = {false};
    for (int i = 0; i < 300; i++) {
        uint32_t page = kv_pool_alloc(pool, 1);
        cr_assert_lt(page, 300);
        cr_assert_not(seen[page]);
        seen[page] = true;
    }
    cr_assert_eq(kv_pool_free_count(pool), 0);
    cr_assert_eq(kv_pool_alloc(pool, 1), KV_PAGE_NONE);
    check(pool);
    kv_pool_unref(pool, 77);
    cr_assert_eq(kv_pool_alloc(pool, 2), 77);
    check(pool);
    kv_pool_destroy(pool);
}

Test(kv_pool, a_page_is_free_after_its_last_reference)
{
    kv_pool *pool = make(2);
    uint32_t page = kv_pool_alloc(pool, 9);
    kv_pool_ref(pool, page);
    cr_assert_eq(kv_pool_refs(pool, page), 2);
    kv_pool_unref(pool, page);
    cr_assert_eq(kv_pool_free_count(pool), 1);
    check(pool);
    kv_pool_unref(pool, page);
    cr_assert_eq(kv_pool_free_count(pool), 2);
    check(pool);
    kv_pool_destroy(pool);
}

Test(kv_pool, a_reused_page_starts_anew)
{
    kv_pool *pool = make(1);
    uint32_t page = kv_pool_alloc(pool, 5);
    kv_pool_set_filled(pool, page, 5, 100);
    kv_pool_unref(pool, page);
    cr_assert_eq(kv_pool_alloc(pool, 6), page);
    cr_assert_eq(kv_pool_refs(pool, page), 1);
    cr_assert_eq(kv_pool_filled(pool, page), 0);
    kv_pool_set_filled(pool, page, 6, 1);
    kv_pool_destroy(pool);
}

Test(kv_pool, one_sequence_may_append_at_a_time)
{
    kv_pool *pool = make(1);
    uint32_t page = kv_pool_alloc(pool, 5);
    kv_pool_set_filled(pool, page, 5, 100);
    cr_assert_not(kv_pool_claim(pool, page, 6, 100), "5 still appends");
    kv_pool_release(pool, page, 6); /* not its own: nothing happens */
    cr_assert_not(kv_pool_claim(pool, page, 6, 100));
    kv_pool_release(pool, page, 5);
    cr_assert_not(kv_pool_claim(pool, page, 6, 99), "row 99 is written already");
    cr_assert_not(kv_pool_claim(pool, page, 6, 101));
    cr_assert(kv_pool_claim(pool, page, 6, 100));
    kv_pool_set_filled(pool, page, 6, KV_PAGE_TOKENS);
    kv_pool_release(pool, page, 6);
    cr_assert_not(kv_pool_claim(pool, page, 7, KV_PAGE_TOKENS),
                  "a full page has nothing to append to");
    check(pool);
    kv_pool_destroy(pool);
}

Test(kv_pool, filled_never_falls, .signal = SIGABRT)
{
    kv_pool *pool = make(1);
    uint32_t page = kv_pool_alloc(pool, 5);
    kv_pool_set_filled(pool, page, 5, 100);
    kv_pool_set_filled(pool, page, 5, 99);
}

Test(kv_pool, only_the_owner_raises_filled, .signal = SIGABRT)
{
    kv_pool *pool = make(1);
    uint32_t page = kv_pool_alloc(pool, 5);
    kv_pool_set_filled(pool, page, 6, 1);
}

Test(kv_pool, a_free_page_cannot_be_released_again, .signal = SIGABRT)
{
    kv_pool *pool = make(1);
    uint32_t page = kv_pool_alloc(pool, 5);
    kv_pool_unref(pool, page);
    kv_pool_unref(pool, page);
}

Test(kv_pool, sizes_that_cannot_be_are_refused)
{
    kv_pool *pool;
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(kv_pool_create(&pool, 0, &err), BASE_INVALID);
    cr_assert_null(pool);
    cr_assert_eq(kv_pool_create(&pool, KV_PAGE_NONE, NULL), BASE_INVALID);
    kv_pool_destroy(NULL);
}

Test(kv_layout, record_is_the_sum_of_its_planes)
{
    kv_plane planes[] = {
        {KV_PLANE_K, 0, 0, 72}, {KV_PLANE_V, 0, 0, 72}, {KV_PLANE_INDEX, 0, 0, 36}};
    kv_layout layout;
    cr_assert_eq(kv_layout_init(&layout, planes, 3, NULL), BASE_OK);
    cr_assert_eq(layout.record_bytes, (72 + 72 + 36) * 128);
    cr_assert_eq(layout.plane_count, 3);
    cr_assert_eq(strlen(layout.id), 32);
    cr_assert_eq(strspn(layout.id, "0123456789abcdef"), 32);
    /* Stored pages carry the id: it may not change from one build to the next. */
    cr_assert_str_eq(layout.id, "16b625c9ca3da6fc0564e9161953666b");
}

Test(kv_layout, every_field_and_the_order_enter_the_id)
{
    kv_plane base[] = {{KV_PLANE_K, 1, 2, 72}, {KV_PLANE_V, 1, 2, 72}};
    kv_plane other[7][2];
    kv_layout want, same, got;
    for (int i = 0; i < 7; i++)
        memcpy(other[i], base, sizeof base);
    other[0][0].type = KV_PLANE_DRAFT_K;
    other[1][0].layer = 2;
    other[2][1].head = 3;
    other[3][1].row_bytes = 73;
    other[4][0].layer = 257;
    other[5][0].row_bytes = 72 << 16;
    other[6][0] = base[1];
    other[6][1] = base[0];
    cr_assert_eq(kv_layout_init(&want, base, 2, NULL), BASE_OK);
    cr_assert_eq(kv_layout_init(&same, base, 2, NULL), BASE_OK);
    cr_assert_str_eq(want.id, same.id);
    for (int i = 0; i < 7; i++) {
        cr_assert_eq(kv_layout_init(&got, other[i], 2, NULL), BASE_OK);
        cr_assert_str_neq(got.id, want.id, "variant %d", i);
    }
    cr_assert_eq(kv_layout_init(&got, base, 1, NULL), BASE_OK);
    cr_assert_str_neq(got.id, want.id);
}

Test(kv_layout, planes_that_cannot_be_are_refused)
{
    kv_layout layout;
    base_err err = BASE_ERR_INIT;
    kv_plane empty_row = {KV_PLANE_K, 0, 0, 0}, unknown = {(kv_plane_type)9, 0, 0, 1};
    cr_assert_eq(kv_layout_init(&layout, &empty_row, 0, &err), BASE_INVALID);
    cr_assert_str_eq(err.text, "a page layout has no plane");
    cr_assert_eq(kv_layout_init(&layout, &empty_row, 1, NULL), BASE_INVALID);
    cr_assert_eq(kv_layout_init(&layout, &unknown, 1, NULL), BASE_INVALID);
}
