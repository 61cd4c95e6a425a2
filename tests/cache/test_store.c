/* What the disk tier promises, one claim a test. */
#include <criterion/criterion.h>

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <sqlite3.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "store_fixture.h"

#define SPACE 0x8000000000000007u

static const kv_plane target_planes[] = {
    {KV_PLANE_K, 0, 0, 9},     {KV_PLANE_V, 0, 0, 7}, {KV_PLANE_K, 1, 0, 9},
    {KV_PLANE_INDEX, 1, 0, 3}, {KV_PLANE_V, 1, 0, 7},
};
static const kv_plane big_planes[] = {
    {KV_PLANE_K, 0, 0, 400}, {KV_PLANE_V, 0, 0, 400}, {KV_PLANE_K, 1, 0, 400},
    {KV_PLANE_V, 1, 0, 400}, {KV_PLANE_K, 2, 0, 100}, {KV_PLANE_V, 2, 0, 400},
};
static const kv_plane draft_planes[] = {{KV_PLANE_DRAFT_K, 0, 0, 6}, {KV_PLANE_DRAFT_V, 0, 0, 6}};

static kv_layout target, draft;
static fix_device device;
static kv_pool *pool;
static kv_store *store;
static kv_store_options options;
static char dir[64];
static uint64_t owner = 1;

static void set_up(const kv_plane *planes, uint32_t count, bool with_draft)
{
    cr_assert_eq(kv_layout_init(&target, planes, count, NULL), BASE_OK);
    cr_assert_eq(kv_layout_init(&draft, draft_planes, 2, NULL), BASE_OK);
    fix_device_init(&device, &target, with_draft ? &draft : NULL);
    cr_assert_eq(kv_pool_create(&pool, FIX_PAGES, NULL), BASE_OK);
    snprintf(dir, sizeof dir, "/tmp/whimbrel-store-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    strcat(dir, "/kv");
    options = (kv_store_options){
        .dir = dir,
        .fingerprint = "weights",
        .numerics = "cpu/1",
        .layout = &target,
        .draft_fingerprint = with_draft ? "drafter" : NULL,
        .draft = with_draft ? &draft : NULL,
        .device = {.ctx = &device, .copy_out = fix_copy_out, .copy_in = fix_copy_in},
        .bytes_max = 64 << 20,
        .slots_max = 64,
        .retry_ms = 50,
    };
}

static base_code try_open(base_err *err)
{
    return kv_store_open(&store, pool, &options, err);
}

static void open_store(void)
{
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(try_open(&err), BASE_OK, "%s", err.text);
}

static void check(void)
{
    base_err err = BASE_ERR_INIT;
    cr_assert(kv_store_check(store, &err), "%s", err.text);
}

static void reopen(void)
{
    check();
    kv_store_close(store, false);
    open_store();
    check();
}

static void tear_down(void)
{
    if (store != NULL)
        check();
    kv_store_close(store, false);
    cr_assert_eq(kv_pool_free_count(pool), FIX_PAGES, "a page has leaked");
    kv_pool_destroy(pool);
    fix_device_deinit(&device);
    *strrchr(dir, '/') = '\0';
    fix_remove_dir(dir);
}

/* `count` tokens that differ from those of another `from`. */
static const int32_t *text(int32_t from, uint32_t count)
{
    static int32_t tokens[FIX_TOKENS_MAX];
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = from + (int32_t)i;
    return tokens;
}

static uint32_t pages_for(uint32_t count)
{
    return (count + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
}

/* Computes a sequence and offers it; the pages are the store's alone afterwards. */
static uint32_t offer(uint64_t space, const int32_t *tokens, uint32_t count, uint32_t draft_from)
{
    uint32_t pages[64], n = pages_for(count);
    for (uint32_t i = 0; i < n; i++) {
        pages[i] = kv_pool_alloc(pool, owner);
        cr_assert_neq(pages[i], KV_PAGE_NONE);
        kv_pool_set_filled(pool, pages[i], owner,
                           count - i * KV_PAGE_TOKENS < KV_PAGE_TOKENS ? count - i * KV_PAGE_TOKENS
                                                                       : KV_PAGE_TOKENS);
    }
    fix_compute(&device, space, tokens, 0, count, pages);
    uint32_t queued = kv_store_write(store, space, tokens, count, pages, draft_from);
    for (uint32_t i = 0; i < n; i++)
        kv_pool_unref(pool, pages[i]);
    return queued;
}

static bool flush(void)
{
    bool ok = kv_store_flush(store);
    kv_store_poll(store);
    return ok;
}

static void save(uint64_t space, const int32_t *tokens, uint32_t count)
{
    offer(space, tokens, count, UINT32_MAX);
    cr_assert(flush());
}

static void wait_done(const kv_restore *restore)
{
    for (int i = 0; !kv_restore_done(restore); i++) {
        cr_assert_lt(i, 20000);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

/* Restores what is on disk past `from` and checks every row; returns how far it reached. */
static uint32_t load_from(uint64_t space, const int32_t *tokens, uint32_t count, uint32_t from,
                          uint32_t draft_from, uint32_t *drafts)
{
    uint32_t pages[64];
    kv_restore *restore = kv_store_find(store, space, tokens, count, from);
    if (restore == NULL)
        return from;
    uint32_t n = kv_restore_page_count(restore), base = from / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
    uint32_t end = kv_restore_tokens(restore);
    cr_assert_eq(kv_restore_first_page(restore), from / KV_PAGE_TOKENS);
    cr_assert_eq(n, pages_for(end) - from / KV_PAGE_TOKENS);
    for (uint32_t i = 0; i < n; i++) {
        pages[i] = kv_pool_alloc(pool, 99);
        cr_assert_neq(pages[i], KV_PAGE_NONE);
        for (int k = 0; k < 2; k++)
            if (device.layouts[k] != NULL)
                memset(fix_plane(&device, k, pages[i], 0), 0xEE, device.layouts[k]->record_bytes);
    }
    kv_restore_start(restore, pages, draft_from);
    wait_done(restore);
    uint32_t good = kv_restore_good(restore);
    cr_assert_eq(kv_restore_planes(restore), target.plane_count);
    if (base + good * KV_PAGE_TOKENS < end)
        end = base + good * KV_PAGE_TOKENS;
    cr_assert(fix_right(&device, 0, space, tokens, base, end, pages, base));
    if (drafts != NULL)
        *drafts = 0;
    for (uint32_t i = 0; i < good; i++) {
        uint32_t first = base + i * KV_PAGE_TOKENS, last = first + KV_PAGE_TOKENS;
        if (!kv_restore_has_draft(restore, i))
            continue;
        cr_assert(
            fix_right(&device, 1, space, tokens, first, last < end ? last : end, pages, base));
        *drafts += 1;
    }
    kv_restore_end(restore);
    for (uint32_t i = 0; i < n; i++)
        kv_pool_unref(pool, pages[i]);
    return end > from ? end : from;
}

static uint32_t load(uint64_t space, const int32_t *tokens, uint32_t count)
{
    return load_from(space, tokens, count, 0, UINT32_MAX, NULL);
}

static uint64_t record_bytes(void)
{
    kv_store_stats s = kv_store_get_stats(store);
    return s.records == 0 ? 0 : s.written_bytes / s.written_records;
}

Test(kv_store, what_was_written_comes_back_exactly)
{
    set_up(target_planes, 5, false);
    open_store();
    cr_assert_eq(offer(SPACE, text(1000, 1000), 1000, UINT32_MAX), 8);
    cr_assert(flush());
    cr_assert_eq(load(SPACE, text(1000, 1000), 1000), 1000);
    reopen();
    cr_assert_eq(kv_store_peek(store, SPACE, text(1000, 1000), 1000), 1000);
    cr_assert_eq(load(SPACE, text(1000, 1000), 1000), 1000);
    cr_assert_eq(load_from(SPACE, text(1000, 1000), 1000, 300, UINT32_MAX, NULL), 1000);
    cr_assert_eq(offer(SPACE, text(1000, 1000), 1000, UINT32_MAX), 0, "it is on disk already");
    tear_down();
}

Test(kv_store, layers_of_large_pages_come_one_by_one)
{
    set_up(big_planes, 6, false);
    options.direct = true;
    open_store();
    save(SPACE, text(1000, 700), 700);
    cr_assert_eq(load(SPACE, text(1000, 700), 700), 700);
    reopen();
    cr_assert_eq(load(SPACE, text(1000, 700), 700), 700);
    cr_assert_gt(kv_store_read_rate(store), 0);
    tear_down();
}
