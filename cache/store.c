/* The disk tier: opening, closing and the engine's calls.
 *
 * A page is offered at a turn's end: its record enters the tree at once (so that nothing is queued
 * twice), with a job and a reference on the page. The rest is the writer's: store_write.c.
 *
 * Locks: one, short; never held over a call of the system's that reads, writes or waits for a disk.
 */
#include "cache/store_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/thread.h"

#define DAY_MS (24 * 3600 * 1000ll)
#define SEGMENT_BYTES (256ull << 20)
#define RECORDS_MAX (1u << 20)

int64_t kv_store__now_ms(const kv_store *store)
{
    return store->options.io.wall_ms();
}

/* ---- opening ---- */

static void set_defaults(kv_store_options *o, uint64_t record_bytes_min)
{
    o->segment_bytes =
        o->segment_bytes != 0 ? o->segment_bytes : base_max(SEGMENT_BYTES, o->bytes_max / 256);
    o->queue_max = o->queue_max != 0 ? o->queue_max : 256;
    o->restores_max = o->restores_max != 0 ? o->restores_max : 32;
    o->readers = o->readers != 0 ? o->readers : 4;
    o->retry_ms = o->retry_ms != 0 ? o->retry_ms : 30000;
    o->other_ttl_s = o->other_ttl_s != 0 ? o->other_ttl_s : 14 * 24 * 3600;
    o->read_bytes_s = o->read_bytes_s > 0 ? o->read_bytes_s : 1e9;
    if (o->records_max == 0)
        o->records_max = (uint32_t)base_min(o->bytes_max / record_bytes_min + 64, RECORDS_MAX);
    if (o->io.pwrite == NULL)
        o->io.pwrite = pwrite;
    if (o->io.pread == NULL)
        o->io.pread = pread;
    if (o->io.fdatasync == NULL)
        o->io.fdatasync = fdatasync;
    if (o->io.wall_ms == NULL)
        o->io.wall_ms = base_wall_ms;
}

static void clear_tree(kv_store *store)
{
    size_t buckets = store->bucket_mask + 1;
    memset(store->by_first, 0xFF, buckets * sizeof *store->by_first); /* KV_REC_NONE */
    memset(store->by_page, 0xFF, buckets * sizeof *store->by_page);
    store->rec_used = 0;
    store->rec_free = store->newest = store->oldest = store->dead = store->grave = KV_REC_NONE;
    store->next_id = 1;
    store->stats.records = 0;
    for (uint32_t i = 0; i < KV_SEGMENTS_MAX; i++) {
        store->segments[i].first = KV_REC_NONE;
        store->segments[i].live = 0;
    }
}

static base_code allocate(kv_store *store, base_err *err)
{
    const kv_store_options *o = &store->options;
    size_t buckets = 64, batch = KV_BATCH_BYTES;
    while (buckets < o->records_max)
        buckets *= 2;
    for (int kind = 0; kind < 2; kind++) {
        const kv_form *form = &store->forms[kind];
        if (form->layout != NULL)
            batch = base_max(batch, kv_form__group_offset(form, form->group_count, KV_PAGE_TOKENS));
    }
    store->bucket_mask = (uint32_t)buckets - 1;
    store->batch_bytes = batch;
    store->held_max = o->queue_max + KV_BATCH_RECORDS;
    store->recs = calloc(o->records_max, sizeof *store->recs);
    store->tokens = calloc(o->records_max, KV_PAGE_TOKENS * sizeof *store->tokens);
    store->by_first = malloc(buckets * sizeof *store->by_first);
    store->by_page = malloc(buckets * sizeof *store->by_page);
    store->jobs = malloc(o->queue_max * sizeof *store->jobs);
    store->released = malloc(store->held_max * sizeof *store->released);
    store->readers = calloc(o->readers, sizeof *store->readers);
    store->batch = aligned_alloc(KV_BLOCK, batch);
    if (store->recs == NULL || store->tokens == NULL || store->by_first == NULL ||
        store->by_page == NULL || store->jobs == NULL || store->released == NULL ||
        store->readers == NULL || store->batch == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for a disk tier of %u records",
                         o->records_max);
    return kv_store__reads_init(store, err);
}

static base_code open_files(kv_store *store, base_err *err)
{
    if (mkdir(store->dir, 0700) != 0 && errno != EEXIST)
        return base_fail(err, BASE_IO, "%s: %s", store->dir, strerror(errno));
    store->dir_fd = open(store->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (store->dir_fd < 0)
        return base_fail(err, BASE_IO, "%s: %s", store->dir, strerror(errno));
    base_err why = BASE_ERR_INIT;
    clear_tree(store);
    /* The index first: its lock keeps a second process off the segments. */
    base_code code = kv_store__db_open(store, &why);
    bool segments = false;
    if (code == BASE_OK) {
        code = kv_store__files_open(store, &why);
        segments = true;
    }
    if (code == BASE_OK)
        code = kv_store__db_load(store, &why);
    if (code == BASE_FORMAT) {
        base_log(BASE_LOG_ERROR, "kv_index_corrupt moved=%s/index.db.corrupt error=\"%s\"",
                 store->dir, why.text);
        clear_tree(store);
        why = (base_err)BASE_ERR_INIT;
        code = kv_store__db_reset(store, &why);
        if (code == BASE_OK && !segments)
            code = kv_store__files_open(store, &why);
        if (code == BASE_OK)
            code = kv_store__db_load(store, &why);
    }
    if (code != BASE_OK)
        return base_fail(err, code, "%s", why.text);
    kv_store__files_sweep(store);
    kv_store__make_room(store, 0, 0);
    return BASE_OK;
}

static base_code start_threads(kv_store *store, base_err *err)
{
    int rc = pthread_create(&store->writer, NULL, kv_store__writer, store);
    store->writer_runs = rc == 0;
    while (rc == 0 && store->reader_count < store->options.readers) {
        rc = pthread_create(&store->readers[store->reader_count], NULL, kv_store__reader, store);
        store->reader_count += rc == 0;
    }
    return rc == 0 ? BASE_OK
                   : base_fail(err, BASE_NOMEM, "no thread for the disk tier: %s", strerror(rc));
}

base_code kv_store_open(kv_store **out, kv_pool *pool, const kv_store_options *options,
                        base_err *err)
{
    base_code code = BASE_OK;
    *out = NULL;
    if (options->bytes_max == 0 || options->slots_max == 0)
        return base_fail(err, BASE_INVALID, "a disk tier of %llu bytes for %u pages",
                         (unsigned long long)options->bytes_max, options->slots_max);
    kv_store *store = calloc(1, sizeof *store);
    if (store == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for a disk tier");
    store->options = *options;
    store->pool = pool;
    store->dir_fd = -1;
    store->active = KV_SEGMENT_NONE;
    for (uint32_t i = 0; i < KV_SEGMENTS_MAX; i++)
        store->segments[i].fd = store->segments[i].fd_direct = -1;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->work, &attr);
    pthread_cond_init(&store->reads, NULL);
    pthread_cond_init(&store->idle, NULL);
    pthread_condattr_destroy(&attr);
    uint32_t group_bytes = options->group_bytes != 0 ? options->group_bytes : KV_GROUP_BYTES;
    store->dir = strdup(options->dir);
    if (store->dir == NULL)
        code = base_fail(err, BASE_NOMEM, "no memory for a disk tier");
    if (code == BASE_OK)
        code = kv_form__init(&store->forms[KV_STORE_TARGET], options->layout, options->fingerprint,
                             options->numerics, group_bytes, err);
    if (code == BASE_OK && options->draft != NULL)
        code = kv_form__init(&store->forms[KV_STORE_DRAFT], options->draft,
                             options->draft_fingerprint, options->numerics, group_bytes, err);
    if (code == BASE_OK) {
        set_defaults(&store->options, KV_BLOCK * (uint64_t)store->forms[0].group_count);
        code = allocate(store, err);
    }
    if (code == BASE_OK)
        code = open_files(store, err);
    if (code == BASE_OK) {
        store->last_touch_ms = kv_store__now_ms(store);
        code = start_threads(store, err);
    }
    if (code != BASE_OK) {
        kv_store_close(store, true);
        return code;
    }
    base_log(BASE_LOG_INFO, "kv_store_open dir=%s records=%llu bytes=%llu swept=%llu", store->dir,
             (unsigned long long)store->stats.records, (unsigned long long)store->bytes,
             (unsigned long long)store->stats.swept_bytes);
    *out = store;
    return BASE_OK;
}

void kv_store_close(kv_store *store, bool abandon)
{
    if (store == NULL)
        return;
    pthread_mutex_lock(&store->lock);
    store->stop = true;
    store->abandon = abandon;
    pthread_cond_broadcast(&store->work);
    pthread_cond_broadcast(&store->reads);
    pthread_mutex_unlock(&store->lock);
    if (store->writer_runs)
        pthread_join(store->writer, NULL);
    for (uint32_t i = 0; i < store->reader_count; i++)
        pthread_join(store->readers[i], NULL);
    if (store->released != NULL)
        kv_store_poll(store);
    for (; store->job_count > 0; store->job_count--) {
        kv_pool_unref(store->pool, store->jobs[store->job_first].page);
        store->job_first = (store->job_first + 1) % store->options.queue_max;
    }
    kv_store__db_close(store);
    for (uint32_t i = 0; i < KV_SEGMENTS_MAX; i++)
        if (store->segments[i].fd >= 0)
            kv_store__segment_close(store, i, false);
    if (store->dir_fd >= 0)
        close(store->dir_fd);
    kv_store__reads_deinit(store);
    for (int kind = 0; kind < 2; kind++)
        kv_form__deinit(&store->forms[kind]);
    pthread_mutex_destroy(&store->lock);
    pthread_cond_destroy(&store->work);
    pthread_cond_destroy(&store->reads);
    pthread_cond_destroy(&store->idle);
    free(store->dir);
    free(store->recs);
    free(store->tokens);
    free(store->by_first);
    free(store->by_page);
    free(store->jobs);
    free(store->released);
    free(store->readers);
    free(store->batch);
    free(store);
}

/* ---- the engine's side of writing ---- */

/* Under lock. KV_REC_NONE if it is refused. */
static uint32_t enqueue(kv_store *store, kv_store_kind kind, uint32_t parent, const int32_t *tokens,
                        uint32_t rows, uint32_t page)
{
    kv_store_options *o = &store->options;
    const kv_form *form = &store->forms[kind];
    uint64_t length = kv_form__group_offset(form, form->group_count, rows);
    if (store->job_count == o->queue_max || store->stats.held == store->held_max) {
        store->stats.refused_queue++;
        return KV_REC_NONE;
    }
    int64_t day = kv_store__now_ms(store) / DAY_MS;
    if (day != store->day) {
        store->day = day;
        store->day_bytes = 0;
    }
    if (o->write_bytes_day != 0 && store->day_bytes + length > o->write_bytes_day) {
        store->stats.refused_budget++;
        return KV_REC_NONE;
    }
    uint32_t at = length + 2 * KV_BLOCK > o->bytes_max ? KV_REC_NONE : kv_store__rec_take(store);
    if (at == KV_REC_NONE) {
        store->stats.refused_records++;
        if (store->dead == KV_REC_NONE)
            kv_store__make_room(store, 0, o->records_max / 64 + 1);
        pthread_cond_signal(&store->work);
        return KV_REC_NONE;
    }
    CHECK(kv_pool_filled(store->pool, page) >= rows); /* nothing is written before it is computed */
    kv_rec *rec = &store->recs[at];
    const kv_rec *before = &store->recs[parent];
    rec->id = store->next_id++;
    rec->space = before->space;
    rec->parent = parent;
    rec->kind = (uint8_t)kind;
    rec->rows = (uint8_t)rows;
    rec->length = (uint32_t)length;
    rec->state = KV_REC_QUEUED;
    rec->used_ms = kv_store__now_ms(store);
    if (kind == KV_STORE_TARGET) {
        memcpy(store->tokens + (size_t)at * KV_PAGE_TOKENS, tokens, rows * sizeof *tokens);
        rec->chain = kv_form__page_chain(before->chain, rows, tokens);
    } else {
        rec->chain = kv_form__side_chain(form, before->chain, rows);
    }
    kv_store__link(store, at);
    kv_pool_ref(store->pool, page);
    store->jobs[(store->job_first + store->job_count++) % o->queue_max] =
        (kv_job){.rec = at, .page = page};
    store->stats.held++;
    store->day_bytes += length;
    return at;
}

uint32_t kv_store_write(kv_store *store, uint64_t space, const int32_t *tokens, uint32_t count,
                        const uint32_t *pages, uint32_t draft_from)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    uint32_t queued = 0, last = KV_REC_NONE;
    if (count == 0)
        return 0;
    pthread_mutex_lock(&store->lock);
    if (store->paused || store->stop) {
        store->stats.refused_stopped++;
        pthread_mutex_unlock(&store->lock);
        return 0;
    }
    uint32_t root = kv_store__root(store, space, true), parent = root;
    for (uint32_t page = 0;
         parent != KV_REC_NONE && page * KV_PAGE_TOKENS < count && page < store->options.slots_max;
         page++) {
        const int32_t *here = tokens + page * KV_PAGE_TOKENS;
        uint32_t rows = (uint32_t)base_min(count - page * KV_PAGE_TOKENS, KV_PAGE_TOKENS);
        uint32_t less = rows - 1; /* a record that covers these rows will do */
        uint32_t at = rows == KV_PAGE_TOKENS
                          ? kv_store__find_page(store, parent, here)
                          : kv_store__find_tail(store, parent, here, rows, true, &less);
        if (at == KV_REC_NONE) {
            at = enqueue(store, KV_STORE_TARGET, parent, here, rows, pages[page]);
            queued += at != KV_REC_NONE;
        }
        if (at != KV_REC_NONE && page >= draft_from && store->recs[at].rows == rows &&
            store->recs[at].side == KV_REC_NONE && store->forms[KV_STORE_DRAFT].layout != NULL)
            queued += enqueue(store, KV_STORE_DRAFT, at, here, rows, pages[page]) != KV_REC_NONE;
        last = at != KV_REC_NONE ? at : last;
        parent = at;
    }
    if (last != KV_REC_NONE)
        kv_store__touch_path(store, last, kv_store__now_ms(store));
    else if (root != KV_REC_NONE)
        kv_store__root_tidy(store, root);
    if (queued > 0)
        pthread_cond_signal(&store->work);
    pthread_mutex_unlock(&store->lock);
    return queued;
}

void kv_store_poll(kv_store *store)
{
    uint32_t pages[64], count;
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    do {
        pthread_mutex_lock(&store->lock);
        count = (uint32_t)base_min(store->released_count, sizeof pages / sizeof *pages);
        store->released_count -= count;
        store->stats.held -= count;
        memcpy(pages, store->released + store->released_count, count * sizeof *pages);
        pthread_mutex_unlock(&store->lock);
        for (uint32_t i = 0; i < count; i++)
            kv_pool_unref(store->pool, pages[i]);
    } while (count > 0);
}

void kv_store_shed(kv_store *store)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    pthread_mutex_lock(&store->lock);
    kv_store__refuse_jobs(store, &store->stats.refused_queue);
    pthread_mutex_unlock(&store->lock);
    kv_store_poll(store);
}

/* ---- forgetting ---- */

void kv_store_erase_space(kv_store *store, uint64_t space)
{
    pthread_mutex_lock(&store->lock);
    uint32_t at;
    /* Other worlds' records of this namespace are no tree; they are looked for one by one. */
    for (at = 0; at < store->rec_used; at++)
        if (store->recs[at].state == KV_REC_STORED && store->recs[at].foreign &&
            store->recs[at].space == space)
            store->stats.erased += kv_store__drop(store, at);
    while ((at = kv_store__root(store, space, false)) != KV_REC_NONE)
        store->stats.erased += kv_store__drop(store, store->recs[at].child);
    store->scrub = true;
    pthread_cond_signal(&store->work);
    pthread_mutex_unlock(&store->lock);
}

/* A record of the page at `base` that holds nothing but the path, and some of it past `kept`. */
static bool is_on_path(const kv_store *store, uint32_t at, const int32_t *tokens, uint32_t count,
                       uint32_t base, uint32_t kept)
{
    uint32_t rows = (uint32_t)base_min(store->recs[at].rows, count - base);
    return base + store->recs[at].rows > kept && memcmp(store->tokens + (size_t)at * KV_PAGE_TOKENS,
                                                        tokens + base, rows * sizeof *tokens) == 0;
}

void kv_store_erase(kv_store *store, uint64_t space, const int32_t *tokens, uint32_t count,
                    uint32_t kept)
{
    if (kept >= count)
        return;
    pthread_mutex_lock(&store->lock);
    uint32_t parent = kv_store__root(store, space, false), base = 0;
    while (parent != KV_REC_NONE && base + KV_PAGE_TOKENS <= kept) {
        parent = kv_store__find_page(store, parent, tokens + base);
        base += KV_PAGE_TOKENS;
    }
    uint32_t at = parent == KV_REC_NONE ? KV_REC_NONE : store->recs[parent].child;
    while (at != KV_REC_NONE) {
        uint32_t next = store->recs[at].next;
        if (is_on_path(store, at, tokens, count, base, kept))
            store->stats.erased += kv_store__drop(store, at);
        at = next;
    }
    store->scrub = true;
    pthread_cond_signal(&store->work);
    pthread_mutex_unlock(&store->lock);
}

bool kv_store_flush(kv_store *store)
{
    pthread_mutex_lock(&store->lock);
    pthread_cond_signal(&store->work);
    while (kv_store__has_work(store) && !(store->paused && !store->busy))
        pthread_cond_wait(&store->idle, &store->lock);
    bool ok = !kv_store__has_work(store) && store->failures == store->failures_told;
    store->failures_told = store->failures;
    pthread_mutex_unlock(&store->lock);
    return ok;
}

kv_store_stats kv_store_get_stats(kv_store *store)
{
    pthread_mutex_lock(&store->lock);
    kv_store_stats stats = store->stats;
    stats.bytes = store->bytes;
    stats.queued = store->job_count + store->taken;
    stats.writing = !store->paused;
    stats.full = store->full;
    pthread_mutex_unlock(&store->lock);
    return stats;
}
