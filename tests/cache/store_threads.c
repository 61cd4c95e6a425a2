/* The disk tier's threads at work at once: writing, restoring, cancelling, erasing, compacting and
 * statistics. A plain program, so that it runs under any sanitizer; exit status 1 and a line if a
 * restored row is wrong. Arguments: rounds (default 3000). */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "engine/base/rand.h"
#include "store_fixture.h"

#define TEXTS 16
#define LENGTH 700

static const kv_plane planes[] = {{KV_PLANE_K, 0, 0, 40}, {KV_PLANE_V, 0, 0, 40}};
static const kv_plane draft_planes[] = {{KV_PLANE_DRAFT_K, 0, 0, 12}};
static kv_store *store;
static _Atomic bool over;

static void make_text(uint32_t n, int32_t *tokens)
{
    for (uint32_t i = 0; i < LENGTH; i++)
        tokens[i] = (int32_t)((i < 300 ? n / 4 : n + 100) * 10000 + i);
}

/* What a worker does: estimates, statistics, deletions. */
static void *bystander(void *arg)
{
    int32_t tokens[LENGTH];
    for (uint64_t i = 0; !over; i++) {
        base_rand4 r = base_rand(99, 1, i);
        make_text(r.v[0] % TEXTS, tokens);
        kv_store_peek(store, 7, tokens, LENGTH);
        kv_store_get_stats(store);
        kv_store_read_rate(store);
        if (r.v[1] % 16 == 0)
            kv_store_erase(store, 7, tokens, LENGTH, r.v[2] % LENGTH);
        if (r.v[1] % 512 == 1)
            kv_store_erase_space(store, 7);
        if (r.v[1] % 64 == 2)
            kv_store_flush(store);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    return NULL;
}

#define MUST(cond)                                                                                 \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "line %d: %s\n", __LINE__, #cond);                                     \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

int main(int argc, char **argv)
{
    kv_layout target, draft;
    fix_device device;
    kv_pool *pool;
    pthread_t other;
    base_err err = BASE_ERR_INIT;
    char dir[64] = "/tmp/whimbrel-threads-XXXXXX";
    uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 10) : 3000, restored = 0;
    base_log_set_level(BASE_LOG_ERROR);
    MUST(kv_layout_init(&target, planes, 2, NULL) == BASE_OK);
    MUST(kv_layout_init(&draft, draft_planes, 1, NULL) == BASE_OK);
    MUST(mkdtemp(dir) != NULL);
    strcat(dir, "/kv");
    fix_device_init(&device, &target, &draft);
    MUST(kv_pool_create(&pool, FIX_PAGES, NULL) == BASE_OK);
    kv_store_options options = {
        .dir = dir,
        .fingerprint = "weights",
        .numerics = "cpu/1",
        .layout = &target,
        .draft_fingerprint = "drafter",
        .draft = &draft,
        .device = {.ctx = &device, .copy_out = fix_copy_out, .copy_in = fix_copy_in},
        .bytes_max = 1 << 20,
        .segment_bytes = 200 << 10,
        .slots_max = 8,
    };
    MUST(kv_store_open(&store, pool, &options, &err) == BASE_OK);
    MUST(pthread_create(&other, NULL, bystander, NULL) == 0);
    for (uint64_t i = 0; i < rounds; i++) {
        base_rand4 r = base_rand(5, 1, i);
        int32_t tokens[LENGTH];
        uint32_t pages[8], count = 1 + r.v[1] % LENGTH;
        make_text(r.v[0] % TEXTS, tokens);
        if (r.v[2] % 2 == 0) {
            uint32_t used = (count + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
            for (uint32_t p = 0; p < used; p++) {
                uint32_t rows = count - p * KV_PAGE_TOKENS;
                while ((pages[p] = kv_pool_alloc(pool, 1)) == KV_PAGE_NONE)
                    kv_store_poll(store);
                kv_pool_set_filled(pool, pages[p], 1,
                                   rows < KV_PAGE_TOKENS ? rows : KV_PAGE_TOKENS);
            }
            fix_compute(&device, 7, tokens, 0, count, pages);
            kv_store_write(store, 7, tokens, count, pages, r.v[3] % 8);
            for (uint32_t p = 0; p < used; p++)
                kv_pool_unref(pool, pages[p]);
        } else {
            kv_restore *restore = kv_store_find(store, 7, tokens, LENGTH, r.v[1] % 300);
            if (restore == NULL)
                continue;
            uint32_t n = kv_restore_page_count(restore), end = kv_restore_tokens(restore);
            uint32_t base = kv_restore_first_page(restore) * KV_PAGE_TOKENS;
            for (uint32_t p = 0; p < n; p++)
                while ((pages[p] = kv_pool_alloc(pool, 2)) == KV_PAGE_NONE)
                    kv_store_poll(store);
            kv_restore_start(restore, pages, 0);
            if (r.v[3] % 4 == 0)
                kv_restore_cancel(restore);
            while (!kv_restore_done(restore)) {
                kv_restore_planes(restore);
                kv_store_poll(store);
            }
            uint32_t good = kv_restore_good(restore);
            MUST(good == n || r.v[3] % 4 == 0);
            if (good == n)
                MUST(fix_right(&device, 0, 7, tokens, base, end, pages, base));
            restored += good;
            kv_restore_end(restore);
            for (uint32_t p = 0; p < n; p++)
                kv_pool_unref(pool, pages[p]);
        }
        kv_store_poll(store);
        if (i % 256 == 0)
            MUST(kv_store_check(store, &err));
    }
    over = true;
    pthread_join(other, NULL);
    MUST(kv_store_flush(store));
    MUST(kv_store_check(store, &err));
    kv_store_stats s = kv_store_get_stats(store);
    MUST(s.corrupt + s.read_errors == 0);
    MUST(restored > rounds / 10);
    kv_store_close(store, false);
    MUST(kv_pool_free_count(pool) == FIX_PAGES);
    kv_pool_destroy(pool);
    fix_device_deinit(&device);
    *strrchr(dir, '/') = '\0';
    fix_remove_dir(dir);
    return 0;
}
