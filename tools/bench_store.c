/* The disk tier's row of whimbrel-bench.
 *
 * p.tier: a run of 8,192 tokens, 128 MiB in pages of 32 planes, comes back by kv_restore with
 * O_DIRECT, checksums and the copy into its pages among the work. The limit is a plain O_DIRECT
 * read of the same segment files, in preads of 1 MiB on as many threads as the tier has readers and
 * on one thread; what is faster counts. Tier and reads alternate in every round, each is first in
 * turn, and the value is the median of rounds: a virtual disk's rate changes by the second. */
#include "tools/bench.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cache/store.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/rand.h"

#define ROUNDS 21
#define PAGES 64
#define PLANES 32
#define ROW_BYTES 512
#define TOKENS (PAGES * KV_PAGE_TOKENS)
#define PLANE_BYTES ((size_t)ROW_BYTES * KV_PAGE_TOKENS)
#define RECORD_BYTES (PLANES * PLANE_BYTES)
#define READERS 4
#define READ_BYTES ((size_t)1 << 20)
#define FILES_MAX 64
#define SPACE 1

typedef struct tier {
    char dir[64], kv[72];
    uint8_t *bytes; /* [2 * PAGES][RECORD_BYTES]: as written, as they came back */
    int32_t tokens[TOKENS];
    kv_plane planes[PLANES];
    kv_layout layout;
    kv_pool *pool;
    kv_store *store;
    int files[FILES_MAX];
    off_t sizes[FILES_MAX];
    int file_count;
} tier;

static bool wrong(const char *what)
{
    fprintf(stderr, "whimbrel-bench: p.tier: %s\n", what);
    return false;
}

static bool copy_out(void *ctx, kv_store_kind kind, uint32_t page, uint32_t plane, uint32_t rows,
                     void *bytes)
{
    const tier *t = ctx;
    memcpy(bytes, t->bytes + page * RECORD_BYTES + plane * PLANE_BYTES, (size_t)rows * ROW_BYTES);
    return true;
}

static bool copy_in(void *ctx, kv_store_kind kind, uint32_t page, uint32_t plane, uint32_t rows,
                    const void *bytes)
{
    tier *t = ctx;
    memcpy(t->bytes + page * RECORD_BYTES + plane * PLANE_BYTES, bytes, (size_t)rows * ROW_BYTES);
    return true;
}

/* ---- plain reads ---- */

typedef struct reader {
    const tier *t;
    int first, step; /* chunks first, first + step, … of all files in a row */
    uint64_t bytes;
    bool failed;
} reader;

static void *read_chunks(void *arg)
{
    reader *r = arg;
    void *chunk = aligned_alloc(4096, READ_BYTES);
    int at = 0;
    r->failed = chunk == NULL;
    for (int f = 0; f < r->t->file_count && !r->failed; f++)
        for (off_t from = 0; from < r->t->sizes[f]; from += (off_t)READ_BYTES)
            if (at++ % r->step == r->first) {
                ssize_t n = pread(r->t->files[f], chunk, READ_BYTES, from);
                r->failed |= n <= 0;
                r->bytes += n > 0 ? (uint64_t)n : 0;
            }
    free(chunk);
    return NULL;
}

/* GB/s of a plain read of all segments; 0 if it failed. */
static double read_plain(const tier *t, int threads)
{
    pthread_t ids[READERS];
    reader readers[READERS];
    uint64_t before = base_now_ns(), bytes = 0;
    bool failed = false;
    for (int i = 0; i < threads; i++) {
        readers[i] = (reader){.t = t, .first = i, .step = threads};
        if (pthread_create(&ids[i], NULL, read_chunks, &readers[i]) != 0)
            abort();
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
        bytes += readers[i].bytes;
        failed |= readers[i].failed;
    }
    return failed ? 0 : (double)bytes / (double)(base_now_ns() - before);
}

static bool open_segments(tier *t)
{
    DIR *dir = opendir(t->kv);
    if (dir == NULL)
        return false;
    for (struct dirent *e; (e = readdir(dir)) != NULL && t->file_count < FILES_MAX;) {
        if (strncmp(e->d_name, "seg-", 4) != 0)
            continue;
        int fd = openat(dirfd(dir), e->d_name, O_RDONLY | O_DIRECT | O_CLOEXEC);
        if (fd < 0)
            continue;
        t->sizes[t->file_count] = lseek(fd, 0, SEEK_END);
        t->files[t->file_count++] = fd;
    }
    closedir(dir);
    return t->file_count > 0;
}

/* ---- the tier ---- */

/* GB/s of a restore of the whole run; 0 if it is not what was written. */
static double restore(tier *t)
{
    uint32_t pages[PAGES];
    for (uint32_t i = 0; i < PAGES; i++)
        pages[i] = kv_pool_alloc(t->pool, 2);
    uint64_t before = base_now_ns();
    kv_restore *r = kv_store_find(t->store, SPACE, t->tokens, TOKENS, 0);
    double rate = 0;
    if (r != NULL && kv_restore_page_count(r) == PAGES) {
        uint64_t bytes = kv_restore_bytes(r);
        kv_restore_start(r, pages, UINT32_MAX);
        while (!kv_restore_done(r))
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        rate = (double)bytes / (double)(base_now_ns() - before);
        bool right = kv_restore_good(r) == PAGES;
        for (uint32_t i = 0; i < PAGES && right; i++)
            right = memcmp(t->bytes + i * RECORD_BYTES, t->bytes + pages[i] * RECORD_BYTES,
                           RECORD_BYTES) == 0;
        for (uint32_t i = 0; i < PAGES; i++) /* nothing of it stays for the next round */
            memset(t->bytes + pages[i] * RECORD_BYTES, 0, RECORD_BYTES);
        rate = right ? rate : 0;
    }
    if (r != NULL)
        kv_restore_end(r);
    for (uint32_t i = 0; i < PAGES; i++)
        kv_pool_unref(t->pool, pages[i]);
    return rate;
}

static bool fill_tier(tier *t)
{
    uint32_t pages[PAGES];
    base_err err = BASE_ERR_INIT;
    for (uint32_t i = 0; i < PLANES; i++)
        t->planes[i] = (kv_plane){i % 2 ? KV_PLANE_V : KV_PLANE_K, (uint16_t)(i / 2), 0, ROW_BYTES};
    for (uint32_t i = 0; i < TOKENS; i++)
        t->tokens[i] = (int32_t)(base_rand(8, 1, i).v[0] % 200000);
    t->bytes = calloc(2 * PAGES, RECORD_BYTES);
    if (t->bytes == NULL)
        return wrong("no memory for the pages");
    for (size_t i = 0; i < PAGES * RECORD_BYTES; i += 16) {
        base_rand4 r = base_rand(8, 2, i);
        memcpy(t->bytes + i, &r, 16);
    }
    snprintf(t->dir, sizeof t->dir, "/tmp/whimbrel-bench-XXXXXX");
    if (mkdtemp(t->dir) == NULL)
        return wrong("no folder under /tmp");
    snprintf(t->kv, sizeof t->kv, "%s/kv", t->dir);
    kv_store_options options = {.dir = t->kv,
                                .fingerprint = "bench",
                                .numerics = "bench",
                                .layout = &t->layout,
                                .device = {.ctx = t, .copy_out = copy_out, .copy_in = copy_in},
                                .bytes_max = 1u << 30,
                                .slots_max = PAGES,
                                .readers = READERS,
                                .direct = true};
    if (kv_layout_init(&t->layout, t->planes, PLANES, &err) != BASE_OK ||
        kv_pool_create(&t->pool, 2 * PAGES, &err) != BASE_OK ||
        kv_store_open(&t->store, t->pool, &options, &err) != BASE_OK)
        return wrong(err.text);
    for (uint32_t i = 0; i < PAGES; i++) {
        pages[i] = kv_pool_alloc(t->pool, 1);
        if (pages[i] != i)
            return wrong("a new pool gives its pages in another order");
        kv_pool_set_filled(t->pool, i, 1, KV_PAGE_TOKENS);
    }
    kv_store_write(t->store, SPACE, t->tokens, TOKENS, pages, UINT32_MAX);
    if (!kv_store_flush(t->store) || kv_store_peek(t->store, SPACE, t->tokens, TOKENS) != TOKENS)
        return wrong("the disk did not take the pages");
    kv_store_poll(t->store);
    return true;
}

static void empty_tier(tier *t)
{
    kv_store_close(t->store, true);
    kv_pool_destroy(t->pool);
    for (int i = 0; i < t->file_count; i++)
        close(t->files[i]);
    free(t->bytes);
    DIR *dir = t->kv[0] != '\0' ? opendir(t->kv) : NULL;
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;)
        unlinkat(dirfd(dir), e->d_name, 0);
    if (dir != NULL)
        closedir(dir);
    rmdir(t->kv);
    rmdir(t->dir);
}

bool bench_store(void)
{
    static tier t;
    samples own = {0};
    bench_peer peers[2] = {{.name = "O_DIRECT x1"}, {.name = "O_DIRECT x4"}};
    if (!bench_wanted("p.tier"))
        return true;
    base_log_set_level(BASE_LOG_ERROR);
    bool right = fill_tier(&t);
    if (right && !open_segments(&t))
        right = wrong("absent: the file system has no O_DIRECT");
    for (int r = 0; r < ROUNDS && right; r++)
        for (int k = 0; k < 3 && right; k++) {
            int way = (k + r) % 3;
            double rate = way == 0 ? restore(&t) : read_plain(&t, way == 1 ? 1 : READERS);
            samples *to = way == 0 ? &own : &peers[way - 1].s;
            to->v[to->n++] = rate;
            right = rate > 0 || wrong(way == 0 ? "what came back is not what was written"
                                               : "a segment cannot be read");
        }
    if (right) {
        double limit = 0;
        for (int i = 0; i < 2; i++) {
            double sorted[ROUNDS];
            memcpy(sorted, peers[i].s.v, sizeof sorted);
            for (int a = 1; a < ROUNDS; a++)
                for (int b = a; b > 0 && sorted[b] < sorted[b - 1]; b--) {
                    double kept = sorted[b];
                    sorted[b] = sorted[b - 1];
                    sorted[b - 1] = kept;
                }
            limit = sorted[ROUNDS / 2] > limit ? sorted[ROUNDS / 2] : limit;
        }
        bench_report_beside("p.tier", "8,192 tokens, 128 MiB in 64 records of 32 planes, 4 readers",
                            "GB/s", true, &own, limit, "median of plain O_DIRECT reads", peers, 2);
    }
    empty_tier(&t);
    return right;
}
