/* The disk tier: the engine's calls, and the writer thread.
 *
 * A page is offered at a turn's end: its record enters the tree at once (so that nothing is queued
 * twice), with a job and a reference on the page. The writer takes jobs in batches: copies the
 * planes out, gives the pages back, appends the batch to the active segment, syncs, commits its
 * rows, and only then may a record be matched. It also buries what was dropped (first the row, then
 * the bytes), moves what is left of hollow segments, and notes last uses.
 *
 * After an error of the disk the tier pauses: what is queued is given back, nothing is taken on,
 * and after retry_ms it tries again. A failed batch is cut off its segment, which is closed: pages
 * whose sync failed may be on disk or not. A damaged index.db found while running ends writing
 * until the next start. Reading and serving go on.
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
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/thread.h"

#define DAY_MS (24 * 3600 * 1000ll)
#define SEGMENT_BYTES (256ull << 20)
#define RECORDS_MAX (1u << 20)
#define TOUCH_MS 60000 /* last uses are written down this often */
#define TOUCH_BATCH 512
#define BURY_BATCH 256
#define COMPACT_RETRY_NS 100000000u
#define SUPERSEDE_MAX 256 /* neighbours that are looked at for a tail to drop */

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

static void *write_loop(void *arg);

static base_code start_threads(kv_store *store, base_err *err)
{
    int rc = pthread_create(&store->writer, NULL, write_loop, store);
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

static bool has_work(const kv_store *store)
{
    return store->job_count > 0 || store->busy || store->dead != KV_REC_NONE ||
           store->grave != KV_REC_NONE || store->graves_held > 0 || store->scrub;
}

bool kv_store_flush(kv_store *store)
{
    pthread_mutex_lock(&store->lock);
    pthread_cond_signal(&store->work);
    while (has_work(store) && !(store->paused && !store->busy))
        pthread_cond_wait(&store->idle, &store->lock);
    bool ok = !has_work(store) && store->failures == store->failures_told;
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

/* ---- the writer ---- */

/* Notes an error of the disk and pauses the tier. Takes the lock. */
static void give_up(kv_store *store, base_code code, const char *doing)
{
    pthread_mutex_lock(&store->lock);
    bool full = code == BASE_FULL;
    store->stats.disk_full += full;
    store->stats.write_errors += !full;
    store->failures++;
    store->full = full;
    store->paused = true;
    store->broken |= code == BASE_FORMAT;
    store->resume_ns = base_now_ns() + store->options.retry_ms * 1000000ull;
    base_log(BASE_LOG_ERROR, "kv_store_paused doing=%s error=%s retry_ms=%u", doing,
             full ? "disk_full" : base_code_name(code),
             store->broken ? 0 : store->options.retry_ms);
    pthread_mutex_unlock(&store->lock);
}

static base_code code_of_errno(int error)
{
    return error == ENOSPC || error == EDQUOT || error == EFBIG ? BASE_FULL : BASE_IO;
}

/* Under lock. */
static void release_page(kv_store *store, uint32_t page)
{
    CHECK(store->released_count < store->held_max);
    store->released[store->released_count++] = page;
}

/* Gives back what waits; each is counted in `refused`. Under lock. */
static void refuse_jobs(kv_store *store, uint64_t *refused)
{
    for (; store->job_count > 0; store->job_count--) {
        kv_job job = store->jobs[store->job_first];
        store->job_first = (store->job_first + 1) % store->options.queue_max;
        if (store->recs[job.rec].state == KV_REC_QUEUED) {
            ++*refused;
            kv_store__drop(store, job.rec);
        }
        release_page(store, job.page);
        kv_store__rec_give(store, job.rec);
    }
}

void kv_store_shed(kv_store *store)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    pthread_mutex_lock(&store->lock);
    refuse_jobs(store, &store->stats.refused_queue);
    pthread_mutex_unlock(&store->lock);
    kv_store_poll(store);
}

static void wake(const kv_store *store)
{
    if (store->options.device.wake != NULL)
        store->options.device.wake(store->options.device.ctx);
}

/* Gives a record's bytes back. Its row is gone, and nobody reads it. */
static void bury_one(kv_store *store, uint32_t at)
{
    pthread_mutex_lock(&store->lock);
    kv_rec rec = store->recs[at];
    pthread_mutex_unlock(&store->lock);
    bool freed = rec.segment != KV_SEGMENT_NONE &&
                 kv_store__punch(store, rec.segment, rec.offset, rec.length);
    pthread_mutex_lock(&store->lock);
    kv_store__unplace(store, at);
    if (freed || (store->no_punch && rec.segment != KV_SEGMENT_NONE)) {
        /* Without holes the file keeps its length until it is hollow: twice the bound at most. */
        store->segments[rec.segment].punched += rec.length;
        store->bytes -= rec.length;
    }
    kv_store__rec_give(store, at);
    pthread_mutex_unlock(&store->lock);
}

/* Removes segments that hold nothing any more. Under lock. */
static void drop_empty_segments(kv_store *store)
{
    for (uint32_t i = 0; i < KV_SEGMENTS_MAX && store->segment_count > 0; i++) {
        const kv_segment *seg = &store->segments[i];
        if (seg->fd >= 0 && seg->sealed && seg->live == 0 && seg->users == 0)
            kv_store__segment_close(store, i, true);
    }
}

/* Deletes the rows of what was dropped, then the bytes. */
static void bury(kv_store *store)
{
    for (;;) {
        uint32_t dead[BURY_BATCH], count = 0;
        uint64_t ids[BURY_BATCH];
        pthread_mutex_lock(&store->lock);
        while (store->grave != KV_REC_NONE && count < BURY_BATCH) {
            dead[count++] = store->grave;
            store->grave = store->recs[store->grave].older;
        }
        uint32_t graves = count;
        while (store->dead != KV_REC_NONE && count < BURY_BATCH) {
            dead[count] = store->dead;
            ids[count] = store->recs[store->dead].id;
            store->dead = store->recs[store->dead].older;
            count++;
        }
        pthread_mutex_unlock(&store->lock);
        if (count == 0)
            break;
        base_code code = count > graves ? kv_store__db_begin(store) : BASE_OK;
        for (uint32_t i = graves; code == BASE_OK && i < count; i++)
            code = kv_store__db_remove(store, ids[i]);
        if (code == BASE_OK && count > graves)
            code = kv_store__db_commit(store);
        if (code != BASE_OK) {
            kv_store__db_rollback(store);
            pthread_mutex_lock(&store->lock);
            for (uint32_t i = graves; i < count; i++) {
                store->recs[dead[i]].older = store->dead;
                store->dead = dead[i];
            }
            pthread_mutex_unlock(&store->lock);
            count = graves;
            give_up(store, code, "delete");
        }
        store->log_used = true;
        for (uint32_t i = 0; i < count; i++) {
            pthread_mutex_lock(&store->lock);
            bool held = store->recs[dead[i]].holds > 0;
            if (held) {
                store->recs[dead[i]].state = KV_REC_GRAVE;
                store->graves_held++;
            }
            pthread_mutex_unlock(&store->lock);
            if (!held)
                bury_one(store, dead[i]);
        }
        if (code != BASE_OK)
            return;
    }
    pthread_mutex_lock(&store->lock);
    drop_empty_segments(store);
    bool scrub = store->scrub;
    pthread_mutex_unlock(&store->lock);
    if (!scrub)
        return;
    base_code code = kv_store__db_checkpoint(store, true);
    if (code != BASE_OK) {
        give_up(store, code, "checkpoint");
        return;
    }
    pthread_mutex_lock(&store->lock);
    store->scrub = store->dead != KV_REC_NONE; /* erased meanwhile */
    pthread_mutex_unlock(&store->lock);
}

/* Takes the jobs that make a batch; returns how many, *bytes on disk. */
static uint32_t take_jobs(kv_store *store, uint64_t *bytes)
{
    uint32_t count = 0;
    *bytes = 0;
    pthread_mutex_lock(&store->lock);
    while (store->job_count > 0 && count < KV_BATCH_RECORDS) {
        kv_job job = store->jobs[store->job_first];
        kv_rec *rec = &store->recs[job.rec];
        if (rec->state == KV_REC_QUEUED) {
            if (count > 0 && *bytes + rec->length > store->batch_bytes)
                break;
            rec->state = KV_REC_WRITING;
            store->jobs_now[count] = job;
            store->recs_now[count] = *rec;
            store->recs_now[count].offset = *bytes; /* in the batch, for now */
            *bytes += rec->length;
            count++;
        } else { /* dropped while it waited */
            release_page(store, job.page);
            kv_store__rec_give(store, job.rec);
        }
        store->job_first = (store->job_first + 1) % store->options.queue_max;
        store->job_count--;
    }
    store->taken = count;
    kv_store__make_room(store, *bytes + KV_BLOCK, 0);
    pthread_mutex_unlock(&store->lock);
    return count;
}

/* Copies a record's planes out; false if the device could not. */
static bool copy_record(kv_store *store, const kv_rec *rec, uint32_t page)
{
    const kv_form *form = &store->forms[rec->kind];
    uint8_t *at = store->batch + rec->offset;
    for (uint32_t g = 0; g < form->group_count; g++) {
        const kv_group *group = &form->groups[g];
        uint8_t *plane = at + kv_form__plane_offset(form, g, 0, rec->rows);
        for (uint32_t i = group->first_plane; i < group->first_plane + group->plane_count; i++) {
            if (!store->options.device.copy_out(store->options.device.ctx, (kv_store_kind)rec->kind,
                                                page, i, rec->rows, plane)) {
                memset(store->batch + rec->offset, 0, rec->length);
                return false;
            }
            plane += form->layout->planes[i].row_bytes * rec->rows;
        }
        kv_group_key key = {
            .id = rec->id, .chain = rec->chain, .kind = rec->kind, .rows = rec->rows, .group = g};
        kv_form__seal(form, &key, at);
        at += kv_form__group_bytes(form, g, rec->rows);
    }
    return true;
}

/* Frees a batch whose bytes are not on disk. */
static void forget_batch(kv_store *store, uint32_t count)
{
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = store->jobs_now[i].rec;
        if (store->recs[at].state == KV_REC_WRITING)
            kv_store__drop(store, at);
    }
    for (uint32_t i = 0; i < count; i++)
        kv_store__rec_give(store, store->jobs_now[i].rec);
    pthread_mutex_unlock(&store->lock);
}

/* Cuts a failed batch off the segment and closes it. */
static void cut_batch(kv_store *store, uint32_t segment)
{
    kv_segment *seg = &store->segments[segment];
    if (ftruncate(seg->fd, (off_t)seg->end) != 0)
        base_log(BASE_LOG_WARN, "kv_truncate_failed segment=%u", seg->number);
    pthread_mutex_lock(&store->lock);
    seg->sealed = true;
    store->active = KV_SEGMENT_NONE;
    pthread_mutex_unlock(&store->lock);
}

/* Appends the batch and syncs it; KV_SEGMENT_NONE if it could not. */
static uint32_t append_batch(kv_store *store, uint64_t bytes, base_code *code)
{
    int error = 0;
    uint32_t segment = kv_store__segment_for(store, bytes, &error);
    if (segment == KV_SEGMENT_NONE) {
        *code = code_of_errno(error);
        return segment;
    }
    kv_segment *seg = &store->segments[segment];
    error = kv_store__write_at(store, seg->fd, store->batch, bytes, seg->end);
    if (error == 0 && store->options.io.fdatasync(seg->fd) != 0)
        error = errno;
    if (error == 0)
        return segment;
    *code = code_of_errno(error);
    cut_batch(store, segment);
    return KV_SEGMENT_NONE;
}

/* Tails that a new record holds, too, are dropped. Under lock. */
static void supersede(kv_store *store, uint32_t at)
{
    const kv_rec *rec = &store->recs[at];
    const int32_t *tokens = store->tokens + (size_t)at * KV_PAGE_TOKENS;
    if (rec->kind == KV_STORE_DRAFT)
        return;
    uint32_t seen = 0; /* the newest stand first */
    for (uint32_t other = store->recs[rec->parent].child, next;
         other != KV_REC_NONE && seen < SUPERSEDE_MAX; other = next, seen++) {
        const kv_rec *old = &store->recs[other];
        next = old->next;
        if (other != at && old->state == KV_REC_STORED && old->rows < rec->rows &&
            old->holds == 0 &&
            memcmp(store->tokens + (size_t)other * KV_PAGE_TOKENS, tokens,
                   old->rows * sizeof *tokens) == 0)
            kv_store__drop(store, other);
    }
}

static base_code commit_batch(kv_store *store, uint32_t count, uint32_t segment, uint64_t base)
{
    bool wanted[KV_BATCH_RECORDS];
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = store->jobs_now[i].rec;
        kv_rec *now = &store->recs_now[i];
        wanted[i] = store->recs[at].state == KV_REC_WRITING;
        now->offset += base;
        if (!wanted[i])
            continue;
        const kv_rec *parent = &store->recs[now->parent];
        store->parents_now[i] = parent->state == KV_REC_ROOT ? 0 : parent->id;
        if (now->kind == KV_STORE_TARGET)
            memcpy(store->tokens_now[i], store->tokens + (size_t)at * KV_PAGE_TOKENS,
                   now->rows * sizeof(int32_t));
    }
    int64_t day = store->day, day_bytes = (int64_t)store->day_bytes;
    uint64_t next_id = store->next_id;
    pthread_mutex_unlock(&store->lock);
    base_code code = kv_store__db_begin(store);
    for (uint32_t i = 0; code == BASE_OK && i < count; i++)
        if (wanted[i])
            code = kv_store__db_insert(store, &store->recs_now[i], store->tokens_now[i],
                                       store->parents_now[i], store->segments[segment].number);
    if (code == BASE_OK)
        code = kv_store__db_set(store, "next_id", (int64_t)next_id);
    if (code == BASE_OK)
        code = kv_store__db_set(store, "day", day);
    if (code == BASE_OK)
        code = kv_store__db_set(store, "day_bytes", day_bytes);
    if (code == BASE_OK)
        code = kv_store__db_commit(store);
    if (code != BASE_OK)
        kv_store__db_rollback(store);
    store->log_used = true;
    return code;
}

static void publish_batch(kv_store *store, uint32_t count, uint32_t segment, uint64_t bytes)
{
    pthread_mutex_lock(&store->lock);
    store->full = false;
    store->segments[segment].end += bytes;
    store->bytes += bytes;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = store->jobs_now[i].rec;
        kv_rec *rec = &store->recs[at];
        kv_store__place(store, at, segment, store->recs_now[i].offset);
        if (rec->state == KV_REC_WRITING) {
            rec->state = KV_REC_STORED;
            store->stats.records++;
            store->stats.written_records++;
            store->stats.written_bytes += rec->length;
            if (rec->kind == KV_STORE_TARGET)
                kv_store__list(store, at);
            supersede(store, at);
        } else { /* dropped meanwhile: what was written of it goes again */
            rec->state = KV_REC_DEAD;
            rec->older = store->dead;
            store->dead = at;
        }
    }
    pthread_mutex_unlock(&store->lock);
}

/* The next write may begin when the budget has paid for this one. */
static void pace(kv_store *store, uint64_t bytes)
{
    uint64_t now = base_now_ns(), rate = store->options.write_bytes_s;
    if (rate > 0)
        store->next_write_ns =
            base_max(store->next_write_ns, now) + (uint64_t)((double)bytes * 1e9 / (double)rate);
}

static void write_batch(kv_store *store)
{
    uint64_t bytes;
    base_code code = BASE_OK;
    uint32_t count = take_jobs(store, &bytes);
    bury(store);
    bool copied[KV_BATCH_RECORDS];
    for (uint32_t i = 0; i < count; i++)
        copied[i] = copy_record(store, &store->recs_now[i], store->jobs_now[i].page);
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < count; i++) {
        release_page(store, store->jobs_now[i].page);
        if (!copied[i] && store->recs[store->jobs_now[i].rec].state == KV_REC_WRITING) {
            store->stats.write_errors++;
            kv_store__drop(store, store->jobs_now[i].rec);
        }
    }
    bool fits = store->bytes + bytes + KV_BLOCK <= store->options.bytes_max;
    store->stats.refused_records += fits ? 0 : count;
    pthread_mutex_unlock(&store->lock);
    wake(store);
    if (count == 0)
        return;
    if (!fits) {
        forget_batch(store, count);
        return;
    }
    pace(store, bytes);
    uint32_t segment = append_batch(store, bytes, &code);
    if (segment != KV_SEGMENT_NONE) {
        code = commit_batch(store, count, segment, store->segments[segment].end);
        if (code == BASE_OK) {
            publish_batch(store, count, segment, bytes);
            return;
        }
        cut_batch(store, segment);
    }
    forget_batch(store, count);
    give_up(store, code, "write");
}

/* ---- compaction ---- */

/* Under lock. A closed segment of which more than half is gone. */
static uint32_t hollow_segment(const kv_store *store)
{
    for (uint32_t i = 0; i < KV_SEGMENTS_MAX; i++) {
        const kv_segment *seg = &store->segments[i];
        if (seg->fd < 0 || !seg->sealed || seg->live >= (seg->end - KV_BLOCK) / 2)
            continue;
        for (uint32_t at = seg->first; at != KV_REC_NONE; at = store->recs[at].seg_next)
            if (store->recs[at].state == KV_REC_STORED && !store->recs[at].foreign)
                return i;
    }
    return KV_SEGMENT_NONE;
}

/* Reads a record whole into the batch and checks it. */
static bool load_record(kv_store *store, const kv_rec *rec, uint64_t to)
{
    const kv_form *form = &store->forms[rec->kind];
    uint8_t *at = store->batch + to;
    if (kv_store__read_at(store, store->segments[rec->segment].fd, at, rec->length, rec->offset) !=
        0)
        return false;
    for (uint32_t g = 0; g < form->group_count; g++) {
        kv_group_key key = {
            .id = rec->id, .chain = rec->chain, .kind = rec->kind, .rows = rec->rows, .group = g};
        if (kv_form__verify(form, &key, at) != NULL)
            return false;
        at += kv_form__group_bytes(form, g, rec->rows);
    }
    return true;
}

static base_code commit_moves(kv_store *store, uint32_t count, uint32_t segment, uint64_t base)
{
    base_code code = kv_store__db_begin(store);
    for (uint32_t i = 0; code == BASE_OK && i < count; i++) {
        kv_rec moved = store->recs_now[i];
        moved.offset += base;
        code = kv_store__db_move(store, &moved, store->tokens_now[i], store->parents_now[i],
                                 store->segments[segment].number);
    }
    if (code == BASE_OK)
        code = kv_store__db_commit(store);
    if (code != BASE_OK)
        kv_store__db_rollback(store);
    store->log_used = true;
    return code;
}

/* Moves a batch of records out of a hollow segment. */
static void compact(kv_store *store, uint32_t from)
{
    uint32_t count = 0, kept = 0;
    uint64_t bytes = 0;
    base_code code = BASE_OK;
    pthread_mutex_lock(&store->lock);
    for (uint32_t at = store->segments[from].first; at != KV_REC_NONE && count < KV_BATCH_RECORDS;
         at = store->recs[at].seg_next) {
        const kv_rec *rec = &store->recs[at];
        if (rec->state != KV_REC_STORED || rec->foreign)
            continue;
        if (count > 0 && bytes + rec->length > store->batch_bytes)
            break;
        const kv_rec *parent = &store->recs[rec->parent];
        store->jobs_now[count].rec = at;
        store->recs_now[count] = *rec;
        store->parents_now[count] = parent->state == KV_REC_ROOT ? 0 : parent->id;
        memcpy(store->tokens_now[count], store->tokens + (size_t)at * KV_PAGE_TOKENS,
               KV_PAGE_TOKENS * sizeof(int32_t));
        bytes += rec->length;
        count++;
    }
    kv_store__make_room(store, bytes + KV_BLOCK, 0); /* both copies are there for a while */
    pthread_mutex_unlock(&store->lock);
    bury(store);
    pthread_mutex_lock(&store->lock);
    bool fits = store->bytes + bytes + KV_BLOCK <= store->options.bytes_max;
    pthread_mutex_unlock(&store->lock);
    if (!fits) { /* readers hold what is to go */
        store->next_write_ns = base_now_ns() + COMPACT_RETRY_NS;
        return;
    }
    bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        kv_rec rec = store->recs_now[i];
        if (!load_record(store, &rec, bytes)) {
            pthread_mutex_lock(&store->lock);
            kv_rec *now = &store->recs[store->jobs_now[i].rec];
            if (now->state == KV_REC_STORED && now->id == rec.id) {
                store->stats.corrupt++;
                kv_store__drop(store, store->jobs_now[i].rec);
            }
            pthread_mutex_unlock(&store->lock);
            continue;
        }
        rec.offset = bytes; /* in the batch */
        bytes += rec.length;
        store->recs_now[kept] = rec;
        store->jobs_now[kept] = store->jobs_now[i];
        store->parents_now[kept] = store->parents_now[i];
        memmove(store->tokens_now[kept], store->tokens_now[i], sizeof store->tokens_now[i]);
        kept++;
    }
    if (kept == 0)
        return;
    pace(store, bytes);
    uint32_t segment = append_batch(store, bytes, &code);
    uint64_t base = segment != KV_SEGMENT_NONE ? store->segments[segment].end : 0;
    if (segment != KV_SEGMENT_NONE) {
        code = commit_moves(store, kept, segment, base);
        if (code != BASE_OK)
            cut_batch(store, segment);
    }
    if (code != BASE_OK) {
        give_up(store, code, "compact");
        return;
    }
    pthread_mutex_lock(&store->lock);
    store->segments[segment].end += bytes;
    store->bytes += bytes;
    pthread_mutex_unlock(&store->lock);
    for (uint32_t i = 0; i < kept; i++) {
        uint32_t at = store->jobs_now[i].rec;
        const kv_rec *now = &store->recs_now[i];
        pthread_mutex_lock(&store->lock);
        bool moved = store->recs[at].state == KV_REC_STORED && store->recs[at].id == now->id;
        if (moved) {
            kv_store__unplace(store, at);
            kv_store__place(store, at, segment, base + now->offset);
        }
        pthread_mutex_unlock(&store->lock);
        if (moved)
            continue;
        /* Dropped meanwhile: its row goes by number, the copy goes here. */
        if (kv_store__punch(store, segment, base + now->offset, now->length)) {
            pthread_mutex_lock(&store->lock);
            store->segments[segment].punched += now->length;
            store->bytes -= now->length;
            pthread_mutex_unlock(&store->lock);
        }
    }
    pthread_mutex_lock(&store->lock);
    drop_empty_segments(store);
    store->stats.compacted_segments += store->segments[from].fd < 0;
    pthread_mutex_unlock(&store->lock);
}

/* ---- last uses ---- */

/* Writes down last uses and cuts the log. All that was used since lies at the newest end. */
static void note_uses(kv_store *store)
{
    base_code code = BASE_OK;
    for (uint32_t count = TOUCH_BATCH; code == BASE_OK && count == TOUCH_BATCH;) {
        struct {
            uint64_t id;
            int64_t used_ms;
        } uses[TOUCH_BATCH];
        count = 0;
        pthread_mutex_lock(&store->lock);
        for (uint32_t at = store->newest; at != KV_REC_NONE && count < TOUCH_BATCH;
             at = store->recs[at].older) {
            kv_rec *rec = &store->recs[at];
            if (rec->used_ms < store->last_touch_ms)
                break;
            if (!rec->dirty)
                continue;
            rec->dirty = false;
            uses[count].id = rec->id;
            uses[count++].used_ms = rec->used_ms;
        }
        pthread_mutex_unlock(&store->lock);
        if (count == 0)
            break;
        code = kv_store__db_begin(store);
        for (uint32_t i = 0; code == BASE_OK && i < count; i++)
            code = kv_store__db_touch(store, uses[i].id, uses[i].used_ms);
        if (code == BASE_OK)
            code = kv_store__db_commit(store);
        if (code != BASE_OK)
            kv_store__db_rollback(store);
        store->log_used = true;
    }
    pthread_mutex_lock(&store->lock);
    store->last_touch_ms = kv_store__now_ms(store);
    drop_empty_segments(store);
    pthread_mutex_unlock(&store->lock);
    if (code == BASE_OK && store->log_used)
        code = kv_store__db_checkpoint(store, false);
    store->log_used = false;
    if (code != BASE_OK)
        give_up(store, code, "note");
}

/* ---- the thread ---- */

static void wait_until(kv_store *store, uint64_t at_ns)
{
    struct timespec at = {.tv_sec = (time_t)(at_ns / 1000000000u),
                          .tv_nsec = (long)(at_ns % 1000000000u)};
    pthread_cond_timedwait(&store->work, &store->lock, &at);
}

static void *write_loop(void *arg)
{
    kv_store *store = arg;
    base_thread_enter(BASE_THREAD_WRITER, "kv-writer");
    pthread_mutex_lock(&store->lock);
    while (!(store->stop && store->abandon)) {
        uint64_t now = base_now_ns();
        int64_t touch_in_ms = store->last_touch_ms + TOUCH_MS - kv_store__now_ms(store);
        bool may_write = now >= store->next_write_ns || store->stop;
        uint32_t hollow = KV_SEGMENT_NONE;
        if (store->paused && !store->broken && now >= store->resume_ns)
            store->paused = false;
        enum { WAIT, BURY, REFUSE, WRITE, COMPACT, NOTE } todo = WAIT;
        if (store->paused)
            todo = store->job_count > 0 ? REFUSE : WAIT;
        else if (store->dead != KV_REC_NONE || store->grave != KV_REC_NONE || store->scrub)
            todo = BURY;
        else if (store->job_count > 0 && may_write)
            todo = WRITE;
        else if (store->job_count == 0 && !store->stop && may_write &&
                 (hollow = hollow_segment(store)) != KV_SEGMENT_NONE)
            todo = COMPACT;
        else if (touch_in_ms <= 0 || touch_in_ms > TOUCH_MS)
            todo = NOTE;
        if (todo == WAIT) {
            pthread_cond_broadcast(&store->idle);
            if (store->stop)
                break;
            uint64_t until = now + TOUCH_MS * 1000000ull;
            if (store->paused && !store->broken)
                until = store->resume_ns;
            else if (store->job_count > 0)
                until = store->next_write_ns;
            wait_until(store, until);
            continue;
        }
        store->busy = true;
        if (todo == REFUSE)
            refuse_jobs(store, &store->stats.refused_stopped);
        pthread_mutex_unlock(&store->lock);
        if (todo == BURY)
            bury(store);
        else if (todo == REFUSE)
            wake(store);
        else if (todo == WRITE)
            write_batch(store);
        else if (todo == COMPACT)
            compact(store, hollow);
        else if (todo == NOTE)
            note_uses(store);
        pthread_mutex_lock(&store->lock);
        store->busy = false;
        store->taken = 0;
        if (!has_work(store) || store->paused)
            pthread_cond_broadcast(&store->idle);
    }
    bool clean = !store->abandon && !store->paused;
    pthread_mutex_unlock(&store->lock);
    if (clean)
        note_uses(store);
    return NULL;
}
