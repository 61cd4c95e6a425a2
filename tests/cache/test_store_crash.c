/* kill -9 at random moments: a child writes, erases and compacts; afterwards every page that is
 * matched is whole and right, and every start succeeds. 50 rounds, 200 with WHIMBREL_LONG=1;
 * WHIMBREL_TEST_SEED chooses other moments. */
#include <criterion/criterion.h>

#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "engine/base/rand.h"
#include "store_fixture.h"

static const kv_plane planes[] = {
    {KV_PLANE_K, 0, 0, 50}, {KV_PLANE_V, 0, 0, 50}, {KV_PLANE_K, 1, 0, 50}, {KV_PLANE_V, 1, 0, 50}};
static const kv_plane draft_planes[] = {{KV_PLANE_DRAFT_K, 0, 0, 20}};

#define TEXTS 24
#define LENGTH 900

static kv_layout target, draft;
static fix_device device;
static kv_pool *pool;
static kv_store *store;
static char dir[64];

static void open_store(void)
{
    base_err err = BASE_ERR_INIT;
    kv_store_options options = {
        .dir = dir,
        .fingerprint = "weights",
        .numerics = "cpu/1",
        .layout = &target,
        .draft_fingerprint = "drafter",
        .draft = &draft,
        .device = {.ctx = &device, .copy_out = fix_copy_out, .copy_in = fix_copy_in},
        .bytes_max = 3 << 20,
        .segment_bytes = 512 << 10,
        .slots_max = 16,
    };
    cr_assert_eq(kv_store_open(&store, pool, &options, &err), BASE_OK, "%s", err.text);
    cr_assert(kv_store_check(store, &err), "%s", err.text);
}

/* Text number n: half of it is shared with its neighbours. */
static void make_text(uint32_t n, int32_t *tokens)
{
    for (uint32_t i = 0; i < LENGTH; i++)
        tokens[i] = (int32_t)((i < 350 ? n / 4 : n + 100) * 10000 + i);
}

static void work(uint64_t seed)
{
    int32_t tokens[LENGTH];
    for (uint64_t i = 0;; i++) {
        base_rand4 r = base_rand(seed, 1, i);
        uint32_t n = r.v[0] % TEXTS, count = 1 + r.v[1] % LENGTH, pages[16];
        make_text(n, tokens);
        if (r.v[2] % 16 == 0) {
            kv_store_erase(store, 7, tokens, count, 350);
        } else {
            uint32_t used = (count + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
            for (uint32_t p = 0; p < used; p++) {
                pages[p] = kv_pool_alloc(pool, 1);
                uint32_t rows = count - p * KV_PAGE_TOKENS;
                kv_pool_set_filled(pool, pages[p], 1,
                                   rows < KV_PAGE_TOKENS ? rows : KV_PAGE_TOKENS);
            }
            fix_compute(&device, 7, tokens, 0, count, pages);
            kv_store_write(store, 7, tokens, count, pages, r.v[2] % 8);
            for (uint32_t p = 0; p < used; p++)
                kv_pool_unref(pool, pages[p]);
        }
        if (r.v[3] % 4 == 0)
            kv_store_flush(store);
        kv_store_poll(store);
    }
}

/* Restores every text and checks every row; returns tokens found. */
static uint64_t look(void)
{
    int32_t tokens[LENGTH];
    uint32_t pages[16];
    uint64_t found = 0;
    for (uint32_t n = 0; n < TEXTS; n++) {
        make_text(n, tokens);
        kv_restore *restore = kv_store_find(store, 7, tokens, LENGTH, 0);
        if (restore == NULL)
            continue;
        uint32_t count = kv_restore_page_count(restore), end = kv_restore_tokens(restore);
        for (uint32_t p = 0; p < count; p++)
            pages[p] = kv_pool_alloc(pool, 2);
        kv_restore_start(restore, pages, 0);
        while (!kv_restore_done(restore))
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        cr_assert_eq(kv_restore_good(restore), count, "a matched page was not whole");
        cr_assert(fix_right(&device, 0, 7, tokens, 0, end, pages, 0));
        for (uint32_t p = 0; p < count; p++) {
            uint32_t last = (p + 1) * KV_PAGE_TOKENS;
            if (kv_restore_has_draft(restore, p))
                cr_assert(fix_right(&device, 1, 7, tokens, p * KV_PAGE_TOKENS,
                                    last < end ? last : end, pages, 0));
        }
        kv_restore_end(restore);
        for (uint32_t p = 0; p < count; p++)
            kv_pool_unref(pool, pages[p]);
        found += end;
    }
    return found;
}

Test(kv_store_crash, after_a_kill_what_is_matched_is_whole, .timeout = 280)
{
    const char *seed_text = getenv("WHIMBREL_TEST_SEED"), *lasting = getenv("WHIMBREL_LONG");
    uint64_t seed = seed_text != NULL ? strtoull(seed_text, NULL, 10) : 20260102, total = 0;
    int rounds = lasting != NULL && *lasting == '1' ? 200 : 50;
    base_log_set_level(BASE_LOG_ERROR);
    cr_assert_eq(kv_layout_init(&target, planes, 4, NULL), BASE_OK);
    cr_assert_eq(kv_layout_init(&draft, draft_planes, 1, NULL), BASE_OK);
    snprintf(dir, sizeof dir, "/tmp/whimbrel-crash-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    strcat(dir, "/kv");
    fix_device_init(&device, &target, &draft);
    for (int i = 0; i < rounds; i++) {
        base_rand4 r = base_rand(seed, 0, (uint64_t)i);
        cr_assert_eq(kv_pool_create(&pool, FIX_PAGES, NULL), BASE_OK);
        pid_t child = fork();
        if (child == 0) {
            open_store();
            work(seed + (uint64_t)i);
            _exit(0);
        }
        uint32_t us = r.v[1] % (r.v[0] % 2 == 0 ? 20000 : 150000);
        nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
        kill(child, SIGKILL);
        int status;
        cr_assert_eq(waitpid(child, &status, 0), child);
        cr_assert(WIFSIGNALED(status), "seed %lu, round %d: the child ended by itself", seed, i);
        open_store();
        uint64_t found = look();
        total += found;
        kv_store_stats s = kv_store_get_stats(store);
        cr_assert_eq(s.corrupt + s.read_errors, 0, "seed %lu, round %d", seed, i);
        cr_assert_leq(s.bytes, 3 << 20, "seed %lu, round %d: %lu bytes, %lu compacted", seed, i,
                      s.bytes, s.compacted_segments);
        kv_store_close(store, i % 2 == 0);
        cr_assert_eq(kv_pool_free_count(pool), FIX_PAGES);
        kv_pool_destroy(pool);
    }
    cr_assert_gt(total, 1000, "hardly anything was ever written");
    fix_device_deinit(&device);
    *strrchr(dir, '/') = '\0';
    fix_remove_dir(dir);
}
