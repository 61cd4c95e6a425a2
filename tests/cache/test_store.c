/* What the disk tier promises, one claim a test. */
#include <criterion/criterion.h>

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <sqlite3.h>
#include <stdio.h>
#include <sys/mount.h>
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
    {KV_PLANE_K, 0, 0, 1100}, {KV_PLANE_V, 0, 0, 1100}, {KV_PLANE_K, 1, 0, 1100},
    {KV_PLANE_V, 1, 0, 1100}, {KV_PLANE_K, 2, 0, 100},  {KV_PLANE_V, 2, 0, 1100},
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

Test(kv_store, a_match_is_exact_to_the_token_and_to_the_namespace)
{
    set_up(target_planes, 5, false);
    open_store();
    static int32_t other[1000];
    save(SPACE, text(1000, 500), 500);
    for (uint32_t keep = 0; keep < 500; keep += 37) {
        memcpy(other, text(1000, 500), sizeof(int32_t) * 500);
        other[keep] = -1;
        cr_assert_eq(kv_store_peek(store, SPACE, other, 500), keep);
        cr_assert_eq(load(SPACE, other, 500), keep);
    }
    cr_assert_eq(load(SPACE + 1, text(1000, 500), 500), 0);
    cr_assert_eq(load(SPACE & 0xFFFFFFFF, text(1000, 500), 500), 0);
    tear_down();
}

Test(kv_store, a_longer_tail_takes_the_place_of_a_shorter)
{
    set_up(target_planes, 5, false);
    open_store();
    save(SPACE, text(1000, 300), 300);
    cr_assert_eq(kv_store_get_stats(store).records, 3);
    save(SPACE, text(1000, 340), 340);
    cr_assert_eq(kv_store_get_stats(store).records, 3);
    save(SPACE, text(1000, 390), 390);
    cr_assert_eq(kv_store_get_stats(store).records, 4);
    cr_assert_eq(offer(SPACE, text(1000, 350), 350, UINT32_MAX), 0, "the longer one covers it");
    cr_assert_eq(load(SPACE, text(1000, 390), 390), 390);
    reopen();
    cr_assert_eq(kv_store_get_stats(store).records, 4);
    cr_assert_eq(load(SPACE, text(1000, 390), 390), 390);
    tear_down();
}

Test(kv_store, branches_share_their_stem)
{
    set_up(target_planes, 5, false);
    open_store();
    static int32_t b[1000];
    memcpy(b, text(1000, 800), sizeof(int32_t) * 800);
    for (int i = 300; i < 800; i++)
        b[i] += 50000;
    save(SPACE, text(1000, 800), 800);
    uint64_t before = kv_store_get_stats(store).records;
    cr_assert_eq(offer(SPACE, b, 800, UINT32_MAX), 5, "two whole pages are there");
    cr_assert(flush());
    cr_assert_eq(kv_store_get_stats(store).records, before + 5);
    reopen();
    cr_assert_eq(load(SPACE, text(1000, 800), 800), 800);
    cr_assert_eq(load(SPACE, b, 800), 800);
    tear_down();
}

Test(kv_store, side_records_come_back_with_their_pages)
{
    uint32_t drafts;
    set_up(target_planes, 5, true);
    open_store();
    cr_assert_eq(offer(SPACE, text(1000, 700), 700, 3), 6 + 3);
    cr_assert(flush());
    cr_assert_eq(load_from(SPACE, text(1000, 700), 700, 0, 0, &drafts), 700);
    cr_assert_eq(drafts, 3);
    cr_assert_eq(load_from(SPACE, text(1000, 700), 700, 0, 4, &drafts), 700);
    cr_assert_eq(drafts, 2);
    reopen();
    cr_assert_eq(offer(SPACE, text(1000, 700), 700, 2), 1, "one side record more");
    cr_assert(flush());
    cr_assert_eq(load_from(SPACE, text(1000, 700), 700, 256, 0, &drafts), 700);
    cr_assert_eq(drafts, 4);
    /* Another drafter: the pages serve on, its side records are not ours. */
    check();
    kv_store_close(store, false);
    options.draft_fingerprint = "another";
    open_store();
    cr_assert_eq(load_from(SPACE, text(1000, 700), 700, 0, 0, &drafts), 700);
    cr_assert_eq(drafts, 0);
    tear_down();
}

Test(kv_store, another_world_is_refused_and_goes_first)
{
    const char *prints[] = {"weights", "weights2", "weights"};
    const char *numerics[] = {"cpu/1", "cpu/1", "cuda/1"};
    set_up(target_planes, 5, false);
    open_store();
    save(SPACE, text(1000, 700), 700);
    for (int i = 1; i < 3; i++) {
        kv_store_close(store, false);
        options.fingerprint = prints[i];
        options.numerics = numerics[i];
        open_store();
        cr_assert_eq(kv_store_peek(store, SPACE, text(1000, 700), 700), 0);
        cr_assert_eq(kv_store_get_stats(store).records, 6);
    }
    options.bytes_max = kv_store_get_stats(store).bytes + 3 * 8192;
    kv_store_close(store, false);
    open_store();
    save(SPACE, text(5000, 700), 700);
    cr_assert_gt(kv_store_get_stats(store).evicted, 0);
    cr_assert_eq(load(SPACE, text(5000, 700), 700), 700);
    tear_down();
}

static int64_t fake_ms = 1000000000000;

static int64_t fake_clock(void)
{
    return fake_ms;
}

Test(kv_store, another_world_is_swept_by_age)
{
    set_up(target_planes, 5, false);
    options.io.wall_ms = fake_clock;
    options.other_ttl_s = 1000;
    open_store();
    save(SPACE, text(1000, 700), 700);
    kv_store_close(store, false);
    options.fingerprint = "weights2";
    fake_ms += 500 * 1000;
    open_store();
    cr_assert_eq(kv_store_get_stats(store).records, 6);
    kv_store_close(store, false);
    fake_ms += 600 * 1000;
    open_store();
    cr_assert_eq(kv_store_get_stats(store).records, 0);
    cr_assert_eq(kv_store_get_stats(store).bytes, 0);
    tear_down();
}

Test(kv_store, key_parts_carry_their_kind)
{
    /* Fingerprint "ab" with numerics "c" is not "a" with "bc". */
    set_up(target_planes, 5, false);
    options.fingerprint = "ab";
    options.numerics = "c";
    open_store();
    save(SPACE, text(1000, 300), 300);
    kv_store_close(store, false);
    options.fingerprint = "a";
    options.numerics = "bc";
    open_store();
    cr_assert_eq(load(SPACE, text(1000, 300), 300), 0);
    tear_down();
}

Test(kv_store, the_least_recently_used_goes_when_the_bound_is_reached)
{
    set_up(target_planes, 5, false);
    options.bytes_max = 40 * 8192;
    options.io.wall_ms = fake_clock;
    open_store();
    for (int i = 0; i < 12; i++) {
        fake_ms += 1000;
        save(SPACE, text(10000 * (i + 1), 600), 600);
        fake_ms += 1000;
        cr_assert_eq(load(SPACE, text(10000, 600), 600), 600, "the first is used all the time");
        cr_assert_leq(kv_store_get_stats(store).bytes, options.bytes_max);
        check();
    }
    cr_assert_gt(kv_store_get_stats(store).evicted, 10);
    cr_assert_eq(load(SPACE, text(120000, 600), 600), 600);
    cr_assert_eq(load(SPACE, text(20000, 600), 600), 0);
    reopen();
    cr_assert_eq(load(SPACE, text(10000, 600), 600), 600);
    tear_down();
}

Test(kv_store, a_full_queue_and_a_spent_budget_refuse)
{
    set_up(target_planes, 5, false);
    options.queue_max = 2;
    options.write_bytes_day = 5 * 8192;
    options.io.wall_ms = fake_clock;
    open_store();
    uint32_t queued = offer(SPACE, text(1000, 1024), 1024, UINT32_MAX);
    cr_assert_lt(queued, 8);
    cr_assert_geq(queued, 2);
    cr_assert_eq(kv_store_get_stats(store).refused_queue, 1);
    for (int i = 0; i < 10; i++) {
        flush();
        offer(SPACE, text(1000, 1024), 1024, UINT32_MAX);
    }
    cr_assert(flush());
    kv_store_stats s = kv_store_get_stats(store);
    cr_assert_gt(s.refused_budget, 0);
    cr_assert_eq(s.written_bytes, 5 * 8192);
    cr_assert_eq(load(SPACE, text(1000, 1024), 1024), 5 * 128);
    reopen();
    cr_assert_eq(offer(SPACE, text(9000, 1024), 1024, UINT32_MAX), 0, "spent over a restart, too");
    fake_ms += 24 * 3600 * 1000;
    cr_assert_gt(offer(SPACE, text(9000, 1024), 1024, UINT32_MAX), 0);
    tear_down();
}

Test(kv_store, reading_must_pay)
{
    cr_assert(kv_restore_pays(1000000, 1e9, 0, 1000, 1e-3));
    cr_assert_not(kv_restore_pays(1000000, 1e9, 0, 1000, 1e-7));
    cr_assert_not(kv_restore_pays(1000000, 1e9, 2, 1000, 1e-3));
    cr_assert_not(kv_restore_pays(1, 0, 0, 1000, 1));
}

Test(kv_store, a_cancelled_restore_ends_and_a_started_one_holds_its_pages)
{
    uint32_t pages[8];
    set_up(target_planes, 5, false);
    open_store();
    save(SPACE, text(1000, 1000), 1000);
    for (int i = 0; i < 8; i++)
        pages[i] = kv_pool_alloc(pool, 99);
    for (int i = 0; i < 30; i++) {
        kv_restore *r = kv_store_find(store, SPACE, text(1000, 1000), 1000, 0);
        cr_assert_not_null(r);
        kv_restore_start(r, pages, UINT32_MAX);
        kv_restore_cancel(r);
        wait_done(r);
        kv_restore_end(r);
    }
    kv_restore *r = kv_store_find(store, SPACE, text(1000, 1000), 1000, 0);
    kv_store_erase_space(store, SPACE);
    cr_assert_null(kv_store_find(store, SPACE, text(1000, 1000), 1000, 0));
    kv_restore_start(r, pages, UINT32_MAX);
    wait_done(r);
    cr_assert_eq(kv_restore_good(r), 8, "it was found before");
    kv_restore_end(r);
    cr_assert(flush());
    cr_assert_eq(kv_store_get_stats(store).records, 0);
    for (int i = 0; i < 8; i++)
        kv_pool_unref(pool, pages[i]);
    tear_down();
}

/* ---- erasing ---- */

/* How many of the files under the folder hold these bytes. */
static int files_with(const void *bytes, size_t length)
{
    char pattern[128];
    glob_t found;
    int count = 0;
    snprintf(pattern, sizeof pattern, "%s/*", dir);
    if (glob(pattern, 0, NULL, &found) != 0)
        return 0;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        FILE *f = fopen(found.gl_pathv[i], "rb");
        fseek(f, 0, SEEK_END);
        size_t size = (size_t)ftell(f);
        char *data = malloc(size + 1);
        rewind(f);
        cr_assert_eq(fread(data, 1, size, f), size);
        count += memmem(data, size, bytes, length) != NULL;
        free(data);
        fclose(f);
    }
    globfree(&found);
    return count;
}

Test(kv_store, nothing_of_what_was_erased_is_in_any_file)
{
    set_up(target_planes, 5, true);
    open_store();
    static int32_t secret[600], other[600];
    memcpy(other, text(1000, 600), sizeof other);
    memcpy(secret, text(1000, 600), sizeof secret);
    for (int i = 200; i < 600; i++)
        secret[i] = 0x43414E00 + i; /* a canary */
    uint32_t page = kv_pool_alloc(pool, 5), pages[5] = {page, page, page, page, page};
    uint8_t row[9];
    fix_compute(&device, SPACE, secret, 500, 501, pages);
    memcpy(row, fix_plane(&device, 0, page, 0) + (500 % 128) * 9, sizeof row);
    kv_pool_unref(pool, page);
    save(SPACE, other, 600);
    cr_assert_eq(offer(SPACE, secret, 600, 0), 4 + 5);
    cr_assert(flush());
    reopen();
    cr_assert_gt(files_with(&secret[300], 64), 0);
    cr_assert_gt(files_with(row, sizeof row), 0);
    kv_store_erase(store, SPACE, secret, 600, 200);
    cr_assert_leq(kv_store_peek(store, SPACE, secret, 600), 200);
    cr_assert(flush());
    for (int i = 201; i < 590; i += 10)
        cr_assert_eq(files_with(&secret[i], 16), 0, "token %d", i);
    cr_assert_eq(files_with(row, sizeof row), 0);
    cr_assert_eq(load(SPACE, other, 600), 600, "the session beside it is untouched");
    reopen();
    cr_assert_eq(files_with(&secret[300], 16), 0);
    cr_assert_eq(load(SPACE, secret, 600), 200);
    kv_store_erase_space(store, SPACE);
    cr_assert(flush());
    cr_assert_eq(files_with(&other[300], 16), 0);
    tear_down();
}

Test(kv_store, hollow_segments_are_moved_and_removed)
{
    set_up(target_planes, 5, false);
    options.segment_bytes = 20 * 8192;
    open_store();
    for (int i = 0; i < 20; i++)
        save(SPACE + (uint64_t)(i % 5), text(10000 * (i + 1), 512), 512);
    for (int i = 0; i < 4; i++)
        kv_store_erase_space(store, SPACE + (uint64_t)i);
    cr_assert(flush());
    for (int i = 0; i < 2000 && kv_store_get_stats(store).compacted_segments < 3; i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    cr_assert_geq(kv_store_get_stats(store).compacted_segments, 3);
    check();
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 4; i < 20; i += 5)
            cr_assert_eq(load(SPACE + 4, text(10000 * (i + 1), 512), 512), 512);
        reopen();
    }
    tear_down();
}

/* ---- what the disk does ---- */

static _Atomic long writes_left = -1, syncs_left = -1, reads_left = -1;
static int write_errno = EIO;

static ssize_t faulty_pwrite(int fd, const void *bytes, size_t length, off_t offset)
{
    if (writes_left >= 0 && writes_left-- == 0) {
        if (length > 4096) /* half of it arrives */
            (void)!pwrite(fd, bytes, length / 2, offset);
        errno = write_errno;
        return -1;
    }
    return pwrite(fd, bytes, length, offset);
}

static ssize_t faulty_pread(int fd, void *bytes, size_t length, off_t offset)
{
    if (reads_left >= 0 && reads_left-- == 0) {
        errno = EIO;
        return -1;
    }
    return pread(fd, bytes, length, offset);
}

static int faulty_fdatasync(int fd)
{
    if (syncs_left >= 0 && syncs_left-- == 0) {
        errno = EIO;
        return -1;
    }
    return fdatasync(fd);
}

static void set_up_faulty(void)
{
    set_up(target_planes, 5, true);
    options.io = (kv_store_io){
        .pwrite = faulty_pwrite, .pread = faulty_pread, .fdatasync = faulty_fdatasync};
    options.retry_ms = 1;
}

Test(kv_store, each_failing_write_and_sync_costs_its_batch_only)
{
    for (long n = 0; n < 8; n++) {
        set_up_faulty();
        write_errno = n % 2 == 0 ? EIO : ENOSPC;
        open_store();
        writes_left = n < 4 ? n : -1;
        syncs_left = n < 4 ? -1 : n - 4;
        uint64_t failed = 0;
        for (int i = 0; i < 5; i++) {
            offer(SPACE, text(10000 * (i + 1), 500), 500, 0);
            failed += !flush();
            nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL); /* longer than retry_ms */
            check();
        }
        cr_assert_eq(failed, 1, "n %ld: %lu", n, failed);
        kv_store_stats s = kv_store_get_stats(store);
        cr_assert_eq(s.disk_full + s.write_errors, 1);
        cr_assert_eq(s.disk_full, n < 4 && write_errno == ENOSPC);
        for (int pass = 0; pass < 2; pass++) {
            int whole = 0;
            for (int i = 0; i < 5; i++)
                whole += load(SPACE, text(10000 * (i + 1), 500), 500) == 500;
            cr_assert_geq(whole, 3, "n %ld", n);
            reopen();
        }
        tear_down();
        store = NULL;
    }
}

Test(kv_store, each_failing_read_shortens_the_run)
{
    for (long n = 0; n < 6; n++) {
        set_up_faulty();
        options.readers = 1;
        options.segment_bytes = 2 * 8192; /* so that no two pages are read together */
        options.queue_max = 1;
        open_store();
        while (kv_store_peek(store, SPACE, text(1000, 640), 640) < 640) {
            offer(SPACE, text(1000, 640), 640, UINT32_MAX);
            flush();
        }
        reads_left = n;
        cr_assert_eq(load(SPACE, text(1000, 640), 640), n < 5 ? 128 * n : 640);
        reads_left = -1;
        cr_assert_eq(kv_store_get_stats(store).read_errors, n < 5);
        cr_assert(flush());
        check();
        tear_down();
        store = NULL;
    }
}

Test(kv_store, a_device_that_fails_harms_nothing)
{
    set_up(target_planes, 5, false);
    open_store();
    device.fail_out = true;
    offer(SPACE, text(1000, 500), 500, UINT32_MAX);
    flush();
    cr_assert_eq(kv_store_get_stats(store).records, 0);
    device.fail_out = false;
    save(SPACE, text(1000, 500), 500);
    device.fail_in = true;
    cr_assert_eq(load(SPACE, text(1000, 500), 500), 0);
    device.fail_in = false;
    cr_assert_eq(load(SPACE, text(1000, 500), 500), 500);
    tear_down();
}

/* ---- damage ---- */

static void file_path(char out[200], const char *name)
{
    snprintf(out, 200, "%s/%s", dir, name);
}

static long file_size(const char *name)
{
    char path[200];
    struct stat info;
    file_path(path, name);
    return stat(path, &info) == 0 ? (long)info.st_size : -1;
}

/* Bytes that are damaged one after the other: each costs a folder's copy and two opens. */
static long stride(void)
{
    return getenv("WHIMBREL_LONG") != NULL ? 1 : 4;
}

static void flip(const char *name, long at)
{
    char path[200];
    file_path(path, name);
    int fd = open(path, O_RDWR);
    uint8_t byte;
    cr_assert_eq(pread(fd, &byte, 1, at), 1);
    byte ^= 0x55;
    cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

Test(kv_store, a_damaged_byte_of_a_segment_is_never_served)
{
    const char *name = "seg-00000000.kv";
    set_up(target_planes, 5, false);
    open_store();
    save(SPACE, text(1000, 500), 500);
    kv_store_close(store, false);
    char keep[200], path[200], command[512];
    file_path(path, name);
    snprintf(keep, sizeof keep, "%s.kept", dir);
    snprintf(command, sizeof command, "cp -r '%s' '%s'", dir, keep);
    cr_assert_eq(system(command), 0);
    long size = file_size(name);
    cr_assert_gt(size, 4 * 8192);
    int shorter = 0;
    for (long at = 0; at < size; at += (at % 8192 < 4096 + 200 ? 83 : 797) * stride()) {
        snprintf(command, sizeof command, "rm -rf '%s' && cp -r '%s' '%s'", dir, keep, dir);
        cr_assert_eq(system(command), 0);
        flip(name, at);
        open_store();
        uint32_t got = load(SPACE, text(1000, 500), 500); /* checks every row that is served */
        cr_assert(got % 128 == 0 || got == 500);
        shorter += got < 500;
        cr_assert_eq(kv_store_get_stats(store).corrupt,
                     got < 500 && got + at >= 4096 && at >= 4096);
        flush();
        check();
        kv_store_close(store, false);
    }
    cr_assert_gt(shorter, 20 / stride());
    open_store();
    tear_down();
}

static void count_wrong(void *ctx, const char *why)
{
    cr_assert_not_null(strstr(why, "record"), "%s", why);
    ++*(int *)ctx;
}

Test(kv_store, a_folder_that_nobody_has_open_is_looked_over_without_the_model)
{
    set_up(big_planes, 6, true);
    int wrong = 0;
    kv_audit audit;
    base_err err = BASE_ERR_INIT;
    open_store();
    offer(SPACE, text(1000, 500), 500, 1);
    cr_assert(flush());
    offer(SPACE + 1, text(1000, 130), 130, UINT32_MAX);
    cr_assert(flush());
    uint64_t records = kv_store_get_stats(store).records;
    cr_assert_eq(kv_store_audit(&audit, dir, count_wrong, &wrong, NULL), BASE_CONFLICT);
    kv_store_close(store, false);
    cr_assert_eq(kv_store_audit(&audit, dir, count_wrong, &wrong, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(audit.wrong, 0);
    cr_assert_eq(audit.records, records);
    cr_assert_gt(records, 6);
    cr_assert_eq(audit.worlds, 2);
    cr_assert_eq(audit.segments, 1);
    /* A byte of a head, of a plane's sum and of a plane. */
    static const long at[] = {4096 + 9, 4096 + 70, 4096 + 30000};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        flip("seg-00000000.kv", at[i]);
        wrong = 0;
        cr_assert_eq(kv_store_audit(&audit, dir, count_wrong, &wrong, NULL), BASE_OK);
        cr_expect_gt(audit.wrong, 0, "byte %ld", at[i]);
        cr_expect_eq(audit.wrong, (uint64_t)wrong);
        cr_expect_lt(audit.records, records);
        flip("seg-00000000.kv", at[i]);
    }
    cr_assert_eq(kv_store_audit(&audit, "/nowhere/kv", count_wrong, &wrong, NULL), BASE_IO);
    open_store();
    tear_down();
}

Test(kv_store, a_damaged_index_is_dropped_row_by_row_or_moved_aside)
{
    set_up(target_planes, 5, false);
    open_store();
    save(SPACE, text(1000, 500), 500);
    kv_store_close(store, false);
    char keep[200], command[512];
    snprintf(keep, sizeof keep, "%s.kept", dir);
    snprintf(command, sizeof command, "cp -r '%s' '%s'", dir, keep);
    cr_assert_eq(system(command), 0);
    long size = file_size("index.db");
    int aside = 0, shorter = 0;
    for (long at = 0; at < size; at += (at < 120 ? 1 : 101) * stride()) {
        snprintf(command, sizeof command, "rm -rf '%s' && cp -r '%s' '%s'", dir, keep, dir);
        cr_assert_eq(system(command), 0);
        flip("index.db", at);
        base_err err = BASE_ERR_INIT;
        base_code code = try_open(&err);
        if (code != BASE_OK) { /* the byte made the schema newer than ours */
            cr_assert_eq(code, BASE_UNSUPPORTED, "byte %ld: %s", at, err.text);
            continue;
        }
        shorter += load(SPACE, text(1000, 500), 500) < 500;
        offer(SPACE, text(7000, 300), 300, UINT32_MAX);
        flush();
        if (kv_store_get_stats(store).writing)
            load(SPACE, text(7000, 300), 300);
        check();
        kv_store_close(store, false);
        aside += file_size("index.db.corrupt") > 0;
    }
    cr_assert_gt(aside, 5 / stride());
    cr_assert_gt(shorter, 5 / stride());
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    cr_assert_eq(system(command), 0);
    open_store();
    cr_assert_eq(kv_store_get_stats(store).records, 0, "without its folder it begins anew");
    tear_down();
}

Test(kv_store, torn_tails_and_bytes_without_a_row_are_swept)
{
    set_up(target_planes, 5, false);
    open_store();
    save(SPACE, text(1000, 500), 500);
    kv_store_close(store, false);
    long size = file_size("seg-00000000.kv");
    char path[200];
    file_path(path, "seg-00000000.kv");
    int fd = open(path, O_WRONLY | O_APPEND);
    cr_assert_eq(write(fd, path, 100), 100);
    close(fd);
    file_path(path, "seg-00000007.kv");
    fd = open(path, O_WRONLY | O_CREAT, 0600);
    cr_assert_eq(write(fd, path, 100), 100);
    close(fd);
    open_store();
    cr_assert_eq(file_size("seg-00000000.kv"), size);
    cr_assert_eq(file_size("seg-00000007.kv"), -1);
    cr_assert_eq(kv_store_get_stats(store).swept_bytes, 200);
    cr_assert_eq(load(SPACE, text(1000, 500), 500), 500);
    kv_store_close(store, false);
    file_path(path, "seg-00000000.kv");
    cr_assert_eq(truncate(path, size - 1), 0);
    open_store();
    cr_assert_eq(load(SPACE, text(1000, 500), 500), 384, "the last record is not whole");
    cr_assert_eq(kv_store_get_stats(store).swept_records, 1);
    kv_store_close(store, false);
    cr_assert_eq(unlink(path), 0);
    open_store();
    cr_assert_eq(load(SPACE, text(1000, 500), 500), 0);
    tear_down();
}

Test(kv_store, locked_newer_and_foreign_databases_are_named)
{
    base_err err = BASE_ERR_INIT;
    kv_store *second;
    set_up(target_planes, 5, false);
    open_store();
    cr_assert_eq(kv_store_open(&second, pool, &options, &err), BASE_CONFLICT);
    cr_assert_null(second);
    cr_assert_not_null(strstr(err.text, "index.db: locked by another process"), "%s", err.text);
    kv_store_close(store, false);
    char path[200];
    sqlite3 *db;
    file_path(path, "index.db");
    cr_assert_eq(sqlite3_open(path, &db), SQLITE_OK);
    cr_assert_eq(sqlite3_exec(db, "PRAGMA user_version=7", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    err = (base_err)BASE_ERR_INIT;
    cr_assert_eq(try_open(&err), BASE_UNSUPPORTED);
    cr_assert_not_null(strstr(err.text, "schema 7 is newer than 1"), "%s", err.text);
    options.dir = "/proc/whimbrel/kv";
    err = (base_err)BASE_ERR_INIT;
    cr_assert_eq(try_open(&err), BASE_IO);
    cr_assert_not_null(strstr(err.text, "/proc/whimbrel/kv"), "%s", err.text);
    store = NULL;
    tear_down();
}

/* ---- format ---- */

/* Made by a program of its own (XXH3-64 written from its specification in Python): one record of
 * two rows of the tokens 5 and -7 in the namespace 0x1122334455667788. */
static const uint8_t golden_segment[] =
    "\x57\x4b\x56\x53\x45\x47\x30\x31\x00\x00\x00\x00\x00\x00\x00\x00"
    "\x54\xb6\x36\xf8\xe0\x44\x60\xda";
static const uint8_t golden_record[] =
    "\x57\x4b\x56\x50\x01\x00\x00\x02\x01\x00\x00\x00\x00\x00\x00\x00"
    "\x60\xfb\x5a\x44\x2c\x6a\x17\x47\x00\x00\x00\x00\x00\x00\x00\x00"
    "\x02\x00\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
    "\x00\x00\x00\x00\x00\x00\x00\x00\xd3\xe9\x91\x32\x4a\x3e\x97\x5c"
    "\x0a\x3a\xd1\x7a\x4a\x8d\x04\x59\xae\x72\xa8\xc9\xee\x79\x7a\x96"
    "\x10\x11\x12\x20\x21\x22\x30\x31\x40\x41";

Test(kv_store, a_record_looks_as_it_always_did)
{
    static const kv_plane two[] = {{KV_PLANE_K, 0, 0, 3}, {KV_PLANE_V, 0, 0, 2}};
    static const uint8_t k[] = {0x10, 0x11, 0x12, 0x20, 0x21, 0x22}, v[] = {0x30, 0x31, 0x40, 0x41};
    uint8_t file[3 * 4096], want[2 * 4096] = {0};
    set_up(two, 2, false);
    open_store();
    uint32_t page = kv_pool_alloc(pool, owner);
    kv_pool_set_filled(pool, page, owner, 2);
    memcpy(fix_plane(&device, 0, page, 0), k, sizeof k);
    memcpy(fix_plane(&device, 0, page, 1), v, sizeof v);
    cr_assert_eq(
        kv_store_write(store, 0x1122334455667788, (const int32_t[]){5, -7}, 2, &page, UINT32_MAX),
        1);
    kv_pool_unref(pool, page);
    cr_assert(flush());
    memcpy(want, golden_segment, sizeof golden_segment - 1);
    memcpy(want + 4096, golden_record, sizeof golden_record - 1);
    char path[200];
    file_path(path, "seg-00000000.kv");
    int fd = open(path, O_RDONLY);
    cr_assert_eq(read(fd, file, sizeof file), 2 * 4096);
    close(fd);
    cr_assert_eq(memcmp(file, want, sizeof want), 0);
    tear_down();
}

/* ---- a disk that is really full ---- */

Test(kv_store, a_full_disk_stops_writing_and_nothing_else)
{
    set_up(target_planes, 5, false);
    *strrchr(dir, '/') = '\0';
    bool mounted = mount("tmpfs", dir, "tmpfs", 0, "size=256k") == 0;
    strcat(dir, "/kv");
    if (!mounted) {
        *strrchr(dir, '/') = '\0';
        fix_remove_dir(dir);
        cr_skip_test("a small tmpfs cannot be mounted here");
    }
    open_store();
    for (int i = 0; i < 12; i++) {
        offer(SPACE, text(10000 * (i + 1), 500), 500, UINT32_MAX);
        flush();
        nanosleep(&(struct timespec){.tv_nsec = 60000000}, NULL); /* longer than retry_ms */
        check();
    }
    kv_store_stats s = kv_store_get_stats(store);
    cr_assert_gt(s.disk_full, 0);
    cr_assert_gt(s.records, 4);
    cr_assert_eq(load(SPACE, text(10000, 500), 500), 500);
    kv_store_erase_space(store, SPACE);
    for (int i = 0; i < 50 && !flush(); i++)
        nanosleep(&(struct timespec){.tv_nsec = 60000000}, NULL);
    cr_assert_eq(kv_store_get_stats(store).records, 0);
    save(SPACE, text(10000, 500), 500);
    cr_assert_eq(load(SPACE, text(10000, 500), 500), 500, "there is room again");
    check();
    kv_store_close(store, false);
    *strrchr(dir, '/') = '\0';
    cr_assert_eq(umount(dir), 0);
    fix_remove_dir(dir);
    cr_assert_eq(kv_pool_free_count(pool), FIX_PAGES);
    kv_pool_destroy(pool);
    fix_device_deinit(&device);
}
