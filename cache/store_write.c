/* The disk tier's writer thread. It takes jobs in batches: copies the planes out, gives the pages
 * back, appends the batch to the active segment, syncs, commits its rows, and only then may a
 * record be matched. It also buries what was dropped (first the row, then the bytes), moves what is
 * left of hollow segments, and notes last uses.
 *
 * After an error of the disk the tier pauses: what is queued is given back, nothing is taken on,
 * and after retry_ms it tries again. A failed batch is cut off its segment, which is closed: pages
 * whose sync failed may be on disk or not. A damaged index.db found while running ends writing
 * until the next start. Reading and serving go on. */
#include "cache/store_internal.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/thread.h"

#define TOUCH_MS 60000 /* last uses are written down this often */
#define TOUCH_BATCH 512
#define BURY_BATCH 256
#define COMPACT_RETRY_NS 100000000u
#define SUPERSEDE_MAX 256 /* neighbours that are looked at for a tail to drop */

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

void kv_store__refuse_jobs(kv_store *store, uint64_t *refused)
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
            store->recs_now[count].offset = *bytes; /* in the batch, until it has a place */
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

/* Commits what was begun if all of it went well. */
static base_code end_transaction(kv_store *store, base_code code)
{
    if (code == BASE_OK)
        code = kv_store__db_commit(store);
    if (code != BASE_OK)
        kv_store__db_rollback(store);
    store->log_used = true;
    return code;
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
    return end_transaction(store, code);
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
    return end_transaction(store, code);
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

bool kv_store__has_work(const kv_store *store)
{
    return store->job_count > 0 || store->busy || store->dead != KV_REC_NONE ||
           store->grave != KV_REC_NONE || store->graves_held > 0 || store->scrub;
}

static void wait_until(kv_store *store, uint64_t at_ns)
{
    struct timespec at = {.tv_sec = (time_t)(at_ns / 1000000000u),
                          .tv_nsec = (long)(at_ns % 1000000000u)};
    pthread_cond_timedwait(&store->work, &store->lock, &at);
}

void *kv_store__writer(void *arg)
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
            kv_store__refuse_jobs(store, &store->stats.refused_stopped);
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
        if (!kv_store__has_work(store) || store->paused)
            pthread_cond_broadcast(&store->idle);
    }
    bool clean = !store->abandon && !store->paused;
    pthread_mutex_unlock(&store->lock);
    if (clean)
        note_uses(store);
    return NULL;
}
