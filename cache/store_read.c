/* Reading pages back.
 *
 * A restore is worked off layer by layer: group 0 of every page, group 1 of every page and so on,
 * so that what computes later positions can follow close behind; side records come last. Readers
 * take the next piece of the oldest restore; a piece is one group of one page, or, where a page is
 * a single group, neighbours in the file up to KV_READ_BYTES. A damaged page ends the run before
 * it: `good` falls, what lies behind is not read, and the record is dropped with all that hangs on
 * it. */
#include "cache/store_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/thread.h"

#define NEIGHBOURS_MAX 64
#define RATE_KEPT 0.8        /* of the older measurements' weight, by restore */
#define RATE_HALF_LIFE_S 120 /* an old figure is worth half */

typedef struct piece {
    kv_restore *restore;
    kv_store_kind kind;
    uint32_t group, at, count; /* pages [at, at + count) of the run */
    uint32_t segment;
    int fd, fd_direct;
    uint64_t offset;
    uint32_t length;
    struct {
        uint32_t rec, page, rows; /* rows that are copied in */
        kv_group_key key;
    } pages[NEIGHBOURS_MAX];
} piece;

base_code kv_store__reads_init(kv_store *store, base_err *err)
{
    const kv_store_options *o = &store->options;
    uint32_t groups = store->forms[KV_STORE_TARGET].group_count;
    store->restores = calloc(o->restores_max, sizeof *store->restores);
    if (store->restores == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for %u restores", o->restores_max);
    for (uint32_t i = 0; i < o->restores_max; i++) {
        kv_restore *restore = &store->restores[i];
        restore->store = store;
        restore->recs = malloc(o->slots_max * sizeof *restore->recs);
        restore->pages = malloc(o->slots_max * sizeof *restore->pages);
        restore->draft = malloc(o->slots_max);
        restore->left = malloc(groups * sizeof *restore->left);
        restore->next = store->restores_free;
        store->restores_free = restore;
        if (restore->recs == NULL || restore->pages == NULL || restore->draft == NULL ||
            restore->left == NULL)
            return base_fail(err, BASE_NOMEM, "no memory for restores of %u pages", o->slots_max);
    }
    return BASE_OK;
}

void kv_store__reads_deinit(kv_store *store)
{
    for (uint32_t i = 0; store->restores != NULL && i < store->options.restores_max; i++) {
        free(store->restores[i].recs);
        free(store->restores[i].pages);
        free(store->restores[i].draft);
        free(store->restores[i].left);
    }
    free(store->restores);
}

/* Under lock. */
static void release(kv_store *store, uint32_t at)
{
    kv_rec *rec = &store->recs[at];
    CHECK(rec->holds > 0);
    if (--rec->holds > 0 || rec->state != KV_REC_GRAVE)
        return;
    store->graves_held--;
    rec->older = store->grave;
    store->grave = at;
    pthread_cond_signal(&store->work);
}

static uint32_t rows_wanted(const kv_restore *restore, uint32_t i)
{
    uint32_t base = (restore->first_page + i) * KV_PAGE_TOKENS;
    return (uint32_t)base_min(restore->tokens - base, KV_PAGE_TOKENS);
}

static void publish(kv_restore *restore)
{
    const kv_form *form = &restore->store->forms[KV_STORE_TARGET];
    uint32_t group = 0;
    while (group < form->group_count && restore->left[group] == 0)
        group++;
    atomic_store_explicit(&restore->planes,
                          group == form->group_count ? form->layout->plane_count
                                                     : form->groups[group].first_plane,
                          memory_order_release);
}

static void add_page(piece *out, const kv_store *store, uint32_t rec_at, uint32_t i)
{
    const kv_rec *rec = &store->recs[rec_at];
    const kv_restore *restore = out->restore;
    out->pages[out->count].rec = rec_at;
    out->pages[out->count].page = restore->pages[i];
    out->pages[out->count].rows = rows_wanted(restore, i);
    out->pages[out->count].key = (kv_group_key){.id = rec->id,
                                                .chain = rec->chain,
                                                .kind = rec->kind,
                                                .rows = rec->rows,
                                                .group = out->group};
    out->count++;
    out->length += kv_form__group_bytes(&store->forms[out->kind], out->group, rec->rows);
}

/* The piece that begins with page `at` of the run. Under lock. */
static void make_piece(kv_store *store, kv_restore *restore, piece *out)
{
    kv_store_kind kind = restore->drafting ? KV_STORE_DRAFT : KV_STORE_TARGET;
    const kv_form *form = &store->forms[kind];
    uint32_t at = restore->at, rec_at = restore->recs[at];
    if (kind == KV_STORE_DRAFT)
        rec_at = store->recs[rec_at].side;
    const kv_rec *rec = &store->recs[rec_at];
    out->restore = restore;
    out->kind = kind;
    out->group = restore->group;
    out->at = at;
    out->count = 0;
    out->length = 0;
    out->segment = rec->segment;
    out->offset = rec->offset + kv_form__group_offset(form, restore->group, rec->rows);
    add_page(out, store, rec_at, at++);
    uint32_t good = atomic_load_explicit(&restore->good, memory_order_relaxed);
    while (kind == KV_STORE_TARGET && form->group_count == 1 && at < good &&
           out->count < NEIGHBOURS_MAX) {
        const kv_rec *next = &store->recs[restore->recs[at]];
        if (next->segment != out->segment || next->offset != out->offset + out->length ||
            out->length + next->length > KV_READ_BYTES)
            break;
        add_page(out, store, restore->recs[at], at);
        at++;
    }
    restore->at = at;
    if (kind == KV_STORE_DRAFT)
        store->recs[rec_at].holds++; /* a page's hold is not its side record's */
    kv_segment *segment = &store->segments[out->segment];
    segment->users++;
    out->fd = segment->fd;
    out->fd_direct = segment->fd_direct;
    restore->reading++;
}

/* The next piece of a restore; false if there is none. Under lock. */
static bool next_piece(kv_store *store, kv_restore *restore, piece *out)
{
    while (!restore->cancelled) {
        const kv_form *form = &store->forms[restore->drafting ? KV_STORE_DRAFT : KV_STORE_TARGET];
        uint32_t good = atomic_load_explicit(&restore->good, memory_order_relaxed);
        if (restore->group == form->group_count) {
            if (restore->drafting || restore->draft_from >= good)
                return false;
            restore->drafting = true;
            restore->group = 0;
            restore->at = restore->draft_from;
        } else if (restore->at >= good) {
            if (!restore->drafting) {
                restore->left[restore->group] -= restore->page_count - restore->at;
                publish(restore);
            }
            restore->group++;
            restore->at = restore->drafting ? restore->draft_from : 0;
        } else if (restore->drafting &&
                   (restore->draft[restore->at] == 0 ||
                    store->recs[restore->recs[restore->at]].side == KV_REC_NONE)) {
            restore->draft[restore->at++] = 0; /* it has gone since */
        } else {
            make_piece(store, restore, out);
            return true;
        }
    }
    return false;
}

/* Reads, checks and copies a piece; *bad is the first of its pages that could not be had. */
static const char *work_off(kv_store *store, const piece *p, uint8_t *bytes, uint32_t *bad)
{
    const kv_form *form = &store->forms[p->kind];
    *bad = 0;
    int error = p->fd_direct >= 0
                    ? kv_store__read_at(store, p->fd_direct, bytes, p->length, p->offset)
                    : EINVAL;
    if (error == EINVAL)
        error = kv_store__read_at(store, p->fd, bytes, p->length, p->offset);
    if (error != 0)
        return "read";
    for (uint32_t offset = 0; *bad < p->count; (*bad)++) {
        const kv_group_key *key = &p->pages[*bad].key;
        const kv_group *group = &form->groups[p->group];
        const char *wrong = kv_form__verify(form, key, bytes + offset);
        if (wrong != NULL)
            return wrong;
        const uint8_t *plane = bytes + offset + kv_form__plane_offset(form, p->group, 0, key->rows);
        for (uint32_t i = 0; i < group->plane_count; i++) {
            if (!store->options.device.copy_in(store->options.device.ctx, p->kind,
                                               p->pages[*bad].page, group->first_plane + i,
                                               p->pages[*bad].rows, plane))
                return "device";
            plane += form->layout->planes[group->first_plane + i].row_bytes * key->rows;
        }
        offset += kv_form__group_bytes(form, p->group, key->rows);
    }
    return NULL;
}

/* A record that could not be read back is not kept. Under lock. */
static void condemn(kv_store *store, const piece *p, uint32_t bad, const char *wrong)
{
    const kv_rec *rec = &store->recs[p->pages[bad].rec];
    if (strcmp(wrong, "device") == 0)
        return;
    if (strcmp(wrong, "read") == 0)
        store->stats.read_errors++;
    else
        store->stats.corrupt++;
    base_log(BASE_LOG_WARN, "kv_record_dropped id=%llu segment=%u wrong=%s",
             (unsigned long long)p->pages[bad].key.id, store->segments[p->segment].number, wrong);
    if (rec->state == KV_REC_STORED && rec->id == p->pages[bad].key.id)
        kv_store__drop(store, p->pages[bad].rec);
    pthread_cond_signal(&store->work);
}

static void account(kv_store *store, const kv_restore *restore)
{
    uint64_t now = base_now_ns();
    if (restore->read_bytes == 0)
        return;
    store->rate_bytes = store->rate_bytes * RATE_KEPT + (double)restore->read_bytes;
    store->rate_s = store->rate_s * RATE_KEPT + (double)(now - restore->begin_ns) * 1e-9;
    store->rate_ns = now;
}

/* Under lock. */
static void settle(kv_store *store, const piece *p, uint32_t bad, const char *wrong)
{
    kv_restore *restore = p->restore;
    store->segments[p->segment].users--;
    restore->reading--;
    restore->read_bytes += p->length;
    store->stats.read_bytes += p->length;
    if (p->group == 0)
        store->stats.read_records += bad;
    if (wrong != NULL && p->kind == KV_STORE_TARGET) {
        if (p->at + bad < atomic_load_explicit(&restore->good, memory_order_relaxed))
            atomic_store_explicit(&restore->good, p->at + bad, memory_order_release);
        condemn(store, p, bad, wrong);
    } else if (wrong != NULL) {
        restore->draft[p->at] = 0;
        condemn(store, p, bad, wrong);
    }
    if (p->kind == KV_STORE_TARGET) {
        restore->left[p->group] -= p->count;
        publish(restore);
    } else {
        release(store, p->pages[0].rec);
    }
}

/* Takes a restore that has no piece left off the readers' list. Under lock; true: it is done. */
static bool finish(kv_store *store, kv_restore *restore)
{
    kv_restore **link = &store->reading_first, *before = NULL;
    while (*link != NULL && *link != restore) {
        before = *link;
        link = &before->next;
    }
    if (*link == restore) {
        *link = restore->next;
        if (store->reading_last == restore)
            store->reading_last = before;
    }
    if (restore->reading > 0 || atomic_load_explicit(&restore->done, memory_order_relaxed))
        return false;
    uint32_t good = atomic_load_explicit(&restore->good, memory_order_relaxed);
    for (uint32_t i = 0; i < restore->page_count; i++)
        restore->draft[i] = restore->draft[i] != 0 && i < good && !restore->cancelled ? 2 : 0;
    if (restore->cancelled && atomic_load_explicit(&restore->planes, memory_order_relaxed) <
                                  store->forms[KV_STORE_TARGET].layout->plane_count)
        atomic_store_explicit(&restore->good, 0, memory_order_release);
    account(store, restore);
    atomic_store_explicit(&restore->done, true, memory_order_release);
    return true;
}

void *kv_store__reader(void *arg)
{
    kv_store *store = arg;
    size_t size = base_max(
        KV_READ_BYTES, base_max(store->forms[0].group_bytes_max, store->forms[1].group_bytes_max));
    base_thread_enter(BASE_THREAD_WORKER, "kv-reader");
    uint8_t *bytes = aligned_alloc(KV_BLOCK, size);
    pthread_mutex_lock(&store->lock);
    while (!store->stop) {
        kv_restore *restore = store->reading_first;
        piece p;
        if (restore == NULL) {
            pthread_cond_wait(&store->reads, &store->lock);
            continue;
        }
        bool done;
        if (next_piece(store, restore, &p)) {
            uint32_t bad = 0;
            pthread_mutex_unlock(&store->lock);
            const char *wrong = bytes == NULL ? "device" : work_off(store, &p, bytes, &bad);
            pthread_mutex_lock(&store->lock);
            settle(store, &p, bad, wrong);
            /* Others may have handed the last piece out meanwhile. */
            bool listed = false;
            for (kv_restore *r = store->reading_first; r != NULL; r = r->next)
                listed |= r == restore;
            done = !listed && finish(store, restore);
        } else {
            done = finish(store, restore);
        }
        pthread_mutex_unlock(&store->lock);
        if (store->options.device.wake != NULL)
            store->options.device.wake(store->options.device.ctx);
        pthread_mutex_lock(&store->lock);
        if (done)
            pthread_cond_broadcast(&store->idle);
    }
    pthread_mutex_unlock(&store->lock);
    free(bytes);
    return NULL;
}

/* ---- the engine's side ---- */

typedef struct walk {
    uint32_t tokens; /* matched */
    uint32_t last;   /* record of the last page */
} walk;

/* Records of the pages from `first_page` on are written to `recs`, unless it is NULL. Under lock.
 */
static walk look_up(const kv_store *store, uint32_t root, const int32_t *tokens, uint32_t count,
                    uint32_t first_page, uint32_t *recs)
{
    walk w = {.last = KV_REC_NONE};
    uint32_t parent = root, page = 0;
    if (root == KV_REC_NONE)
        return w;
    for (; page < store->options.slots_max && (page + 1) * KV_PAGE_TOKENS <= count; page++) {
        uint32_t at = kv_store__find_page(store, parent, tokens + page * KV_PAGE_TOKENS);
        if (at == KV_REC_NONE || store->recs[at].state != KV_REC_STORED)
            break;
        if (recs != NULL && page >= first_page)
            recs[page - first_page] = at;
        parent = w.last = at;
        w.tokens += KV_PAGE_TOKENS;
    }
    if (page == store->options.slots_max)
        return w;
    uint32_t rows = 0;
    uint32_t tail =
        kv_store__find_tail(store, parent, tokens + w.tokens,
                            (uint32_t)base_min(count - w.tokens, KV_PAGE_TOKENS), false, &rows);
    if (tail != KV_REC_NONE) {
        if (recs != NULL && page >= first_page)
            recs[page - first_page] = tail;
        w.last = tail;
        w.tokens += rows;
    }
    return w;
}

uint32_t kv_store_peek(kv_store *store, uint64_t space, const int32_t *tokens, uint32_t count)
{
    pthread_mutex_lock(&store->lock);
    walk w = look_up(store, kv_store__root(store, space, false), tokens, count, 0, NULL);
    pthread_mutex_unlock(&store->lock);
    return w.tokens;
}

kv_restore *kv_store_find(kv_store *store, uint64_t space, const int32_t *tokens, uint32_t count,
                          uint32_t from)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    pthread_mutex_lock(&store->lock);
    kv_restore *restore = store->restores_free;
    walk w = {0};
    if (restore != NULL) {
        restore->first_page = from / KV_PAGE_TOKENS;
        w = look_up(store, kv_store__root(store, space, false), tokens, count, restore->first_page,
                    restore->recs);
    }
    if (restore == NULL || w.tokens <= from) {
        pthread_mutex_unlock(&store->lock);
        return NULL;
    }
    store->restores_free = restore->next;
    restore->next = NULL;
    restore->tokens = w.tokens;
    restore->page_count = (w.tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS - restore->first_page;
    restore->bytes = restore->read_bytes = 0;
    restore->started = restore->cancelled = restore->drafting = false;
    restore->group = restore->at = restore->reading = 0;
    restore->draft_from = UINT32_MAX;
    atomic_store(&restore->planes, 0);
    atomic_store(&restore->good, restore->page_count);
    atomic_store(&restore->done, false);
    for (uint32_t i = 0; i < restore->page_count; i++) {
        kv_rec *rec = &store->recs[restore->recs[i]];
        rec->holds++;
        restore->bytes += rec->length;
        restore->draft[i] =
            rec->side != KV_REC_NONE && store->recs[rec->side].state == KV_REC_STORED;
    }
    kv_store__touch_path(store, w.last, kv_store__now_ms(store));
    pthread_mutex_unlock(&store->lock);
    return restore;
}

uint32_t kv_restore_tokens(const kv_restore *restore)
{
    return restore->tokens;
}

uint32_t kv_restore_first_page(const kv_restore *restore)
{
    return restore->first_page;
}

uint32_t kv_restore_page_count(const kv_restore *restore)
{
    return restore->page_count;
}

uint64_t kv_restore_bytes(const kv_restore *restore)
{
    return restore->bytes;
}

bool kv_restore_pays(uint64_t bytes, double bytes_s, double latency_s, uint32_t gain_tokens,
                     double token_s)
{
    return bytes_s > 0 && latency_s + (double)bytes / bytes_s < gain_tokens * token_s;
}

double kv_store_read_rate(kv_store *store)
{
    pthread_mutex_lock(&store->lock);
    double rate = store->options.read_bytes_s;
    if (store->rate_s > 0) {
        double age_s = (double)(base_now_ns() - store->rate_ns) * 1e-9;
        double weight = RATE_HALF_LIFE_S / (RATE_HALF_LIFE_S + age_s);
        rate = weight * store->rate_bytes / store->rate_s + (1 - weight) * rate;
    }
    pthread_mutex_unlock(&store->lock);
    return rate;
}

void kv_restore_start(kv_restore *restore, const uint32_t *pages, uint32_t draft_from)
{
    kv_store *store = restore->store;
    CHECK(!restore->started);
    pthread_mutex_lock(&store->lock);
    restore->started = true;
    restore->draft_from = store->forms[KV_STORE_DRAFT].layout == NULL ? UINT32_MAX : draft_from;
    memcpy(restore->pages, pages, restore->page_count * sizeof *pages);
    for (uint32_t i = 0; i < restore->page_count && i < restore->draft_from; i++)
        restore->draft[i] = 0;
    for (uint32_t i = 0; i < store->forms[KV_STORE_TARGET].group_count; i++)
        restore->left[i] = restore->page_count;
    restore->begin_ns = base_now_ns();
    if (store->reading_last != NULL)
        store->reading_last->next = restore;
    else
        store->reading_first = restore;
    store->reading_last = restore;
    pthread_cond_broadcast(&store->reads);
    pthread_mutex_unlock(&store->lock);
}

uint32_t kv_restore_planes(const kv_restore *restore)
{
    return atomic_load_explicit(&restore->planes, memory_order_acquire);
}

uint32_t kv_restore_good(const kv_restore *restore)
{
    return atomic_load_explicit(&restore->good, memory_order_acquire);
}

bool kv_restore_done(const kv_restore *restore)
{
    return atomic_load_explicit(&restore->done, memory_order_acquire);
}

bool kv_restore_has_draft(const kv_restore *restore, uint32_t i)
{
    CHECK(kv_restore_done(restore));
    CHECK(i < restore->page_count);
    return restore->draft[i] == 2;
}

void kv_restore_cancel(kv_restore *restore)
{
    kv_store *store = restore->store;
    pthread_mutex_lock(&store->lock);
    restore->cancelled = true;
    pthread_cond_broadcast(&store->reads);
    pthread_mutex_unlock(&store->lock);
}

void kv_restore_end(kv_restore *restore)
{
    kv_store *store = restore->store;
    CHECK(!restore->started || kv_restore_done(restore));
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < restore->page_count; i++)
        release(store, restore->recs[i]);
    restore->next = store->restores_free;
    store->restores_free = restore;
    pthread_mutex_unlock(&store->lock);
}
