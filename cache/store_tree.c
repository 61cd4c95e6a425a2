/* The records in memory: a tree of pages by namespace, and their order of use.
 *
 * A page hangs under the page before it, or under the root of its namespace; only whole pages have
 * children. Two hash tables find a child: by all its tokens, and by its first token for the page in
 * which a match ends. Touching goes from a page to the root, so that no page is older than what
 * hangs on it: the oldest record has no children, unless one is still being written.
 * Everything here is under the store's lock, or before its threads run. */
#include "cache/store_internal.h"

#include <string.h>
#include <xxhash.h>

/* A tail is looked for among this many children with its first token; more share a page's beginning
 * only where thousands of sessions part inside one page. */
#define TAIL_CANDIDATES_MAX 4096

static int32_t *tokens_of(const kv_store *store, uint32_t at)
{
    return store->tokens + (size_t)at * KV_PAGE_TOKENS;
}

static uint32_t mix(const kv_store *store, uint32_t parent, uint64_t key)
{
    uint64_t h = key ^ ((uint64_t)parent + 1) * 0x9E3779B97F4A7C15u;
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCDu;
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53u;
    return (uint32_t)(h ^ h >> 33) & store->bucket_mask;
}

static uint32_t *first_bucket(const kv_store *store, uint32_t parent, int32_t token)
{
    return &store->by_first[mix(store, parent, (uint32_t)token)];
}

static uint32_t *page_bucket(const kv_store *store, uint32_t parent, const int32_t *tokens)
{
    return &store
                ->by_page[mix(store, parent, XXH3_64bits(tokens, KV_PAGE_TOKENS * sizeof *tokens))];
}

static uint32_t *root_bucket(const kv_store *store, uint64_t space)
{
    return &store->by_page[mix(store, KV_REC_NONE, space)];
}

uint32_t kv_store__rec_take(kv_store *store)
{
    uint32_t at = store->rec_free;
    if (at != KV_REC_NONE)
        store->rec_free = store->recs[at].next;
    else if (store->rec_used < store->options.records_max)
        at = store->rec_used++;
    else
        return KV_REC_NONE;
    store->recs[at] = (kv_rec){
        .parent = KV_REC_NONE,
        .child = KV_REC_NONE,
        .next = KV_REC_NONE,
        .prev = KV_REC_NONE,
        .by_first = KV_REC_NONE,
        .by_page = KV_REC_NONE,
        .side = KV_REC_NONE,
        .older = KV_REC_NONE,
        .newer = KV_REC_NONE,
        .seg_next = KV_REC_NONE,
        .seg_prev = KV_REC_NONE,
        .segment = KV_SEGMENT_NONE,
    };
    return at;
}

void kv_store__rec_give(kv_store *store, uint32_t at)
{
    store->recs[at].state = KV_REC_FREE;
    store->recs[at].next = store->rec_free;
    store->rec_free = at;
}

uint32_t kv_store__root(kv_store *store, uint64_t space, bool make)
{
    uint32_t *bucket = root_bucket(store, space), at = *bucket;
    while (at != KV_REC_NONE &&
           (store->recs[at].state != KV_REC_ROOT || store->recs[at].space != space))
        at = store->recs[at].by_page;
    if (at != KV_REC_NONE || !make || (at = kv_store__rec_take(store)) == KV_REC_NONE)
        return at;
    kv_rec *root = &store->recs[at];
    root->state = KV_REC_ROOT;
    root->space = space;
    root->rows = KV_PAGE_TOKENS;
    root->chain = kv_form__root_chain(&store->forms[KV_STORE_TARGET], space);
    root->by_page = *bucket;
    *bucket = at;
    return at;
}

static void out_of_bucket(kv_store *store, uint32_t *link, uint32_t at, bool by_page)
{
    while (*link != at)
        link = by_page ? &store->recs[*link].by_page : &store->recs[*link].by_first;
    *link = by_page ? store->recs[at].by_page : store->recs[at].by_first;
}

void kv_store__root_tidy(kv_store *store, uint32_t at)
{
    const kv_rec *root = &store->recs[at];
    if (root->state != KV_REC_ROOT || root->child != KV_REC_NONE)
        return;
    out_of_bucket(store, root_bucket(store, root->space), at, true);
    kv_store__rec_give(store, at);
}

void kv_store__link(kv_store *store, uint32_t at)
{
    kv_rec *rec = &store->recs[at], *parent = &store->recs[rec->parent];
    if (rec->kind == KV_STORE_DRAFT) {
        parent->side = at;
        return;
    }
    const int32_t *tokens = tokens_of(store, at);
    uint32_t *bucket = first_bucket(store, rec->parent, tokens[0]);
    rec->by_first = *bucket;
    *bucket = at;
    if (rec->rows == KV_PAGE_TOKENS) {
        bucket = page_bucket(store, rec->parent, tokens);
        rec->by_page = *bucket;
        *bucket = at;
    }
    rec->next = parent->child;
    rec->prev = KV_REC_NONE;
    if (rec->next != KV_REC_NONE)
        store->recs[rec->next].prev = at;
    parent->child = at;
}

static void unlink_rec(kv_store *store, uint32_t at)
{
    kv_rec *rec = &store->recs[at], *parent = &store->recs[rec->parent];
    if (rec->kind == KV_STORE_DRAFT) {
        parent->side = KV_REC_NONE;
        return;
    }
    const int32_t *tokens = tokens_of(store, at);
    out_of_bucket(store, first_bucket(store, rec->parent, tokens[0]), at, false);
    if (rec->rows == KV_PAGE_TOKENS)
        out_of_bucket(store, page_bucket(store, rec->parent, tokens), at, true);
    if (rec->next != KV_REC_NONE)
        store->recs[rec->next].prev = rec->prev;
    if (rec->prev != KV_REC_NONE)
        store->recs[rec->prev].next = rec->next;
    else
        parent->child = rec->next;
    kv_store__root_tidy(store, rec->parent);
}

uint32_t kv_store__find_page(const kv_store *store, uint32_t parent, const int32_t *tokens)
{
    uint32_t at = *page_bucket(store, parent, tokens);
    while (at != KV_REC_NONE &&
           (store->recs[at].parent != parent || store->recs[at].state == KV_REC_ROOT ||
            memcmp(tokens_of(store, at), tokens, KV_PAGE_TOKENS * sizeof *tokens) != 0))
        at = store->recs[at].by_page;
    return at;
}

static uint32_t common(const int32_t *a, const int32_t *b, uint32_t count)
{
    uint32_t i = 0;
    while (i < count && a[i] == b[i])
        i++;
    return i;
}

uint32_t kv_store__find_tail(const kv_store *store, uint32_t parent, const int32_t *tokens,
                             uint32_t count, bool any, uint32_t *best)
{
    uint32_t found = KV_REC_NONE, seen = 0;
    if (count == 0)
        return found;
    for (uint32_t at = *first_bucket(store, parent, tokens[0]);
         at != KV_REC_NONE && seen < TAIL_CANDIDATES_MAX; at = store->recs[at].by_first) {
        const kv_rec *rec = &store->recs[at];
        if (rec->parent != parent || (!any && rec->state != KV_REC_STORED))
            continue;
        uint32_t rows = rec->rows < count ? rec->rows : count;
        seen++;
        if (rows <= *best)
            continue;
        uint32_t length = common(tokens_of(store, at), tokens, rows);
        if (length > *best) {
            *best = length;
            found = at;
        }
    }
    return found;
}

/* ---- order of use ---- */

static void list_after(kv_store *store, uint32_t at, uint32_t newer)
{
    kv_rec *rec = &store->recs[at];
    rec->newer = newer;
    rec->older = newer == KV_REC_NONE ? store->newest : store->recs[newer].older;
    if (rec->older != KV_REC_NONE)
        store->recs[rec->older].newer = at;
    else
        store->oldest = at;
    if (newer != KV_REC_NONE)
        store->recs[newer].older = at;
    else
        store->newest = at;
    rec->listed = true;
}

static void unlist(kv_store *store, uint32_t at)
{
    kv_rec *rec = &store->recs[at];
    if (!rec->listed)
        return;
    if (rec->older != KV_REC_NONE)
        store->recs[rec->older].newer = rec->newer;
    else
        store->oldest = rec->newer;
    if (rec->newer != KV_REC_NONE)
        store->recs[rec->newer].older = rec->older;
    else
        store->newest = rec->older;
    rec->older = rec->newer = KV_REC_NONE;
    rec->listed = false;
}

void kv_store__list(kv_store *store, uint32_t at)
{
    const kv_rec *rec = &store->recs[at];
    bool behind = !rec->foreign && store->recs[rec->parent].listed;
    list_after(store, at, behind ? rec->parent : KV_REC_NONE);
}

void kv_store__touch_path(kv_store *store, uint32_t at, int64_t now_ms)
{
    for (; at != KV_REC_NONE && store->recs[at].state != KV_REC_ROOT; at = store->recs[at].parent) {
        kv_rec *rec = &store->recs[at];
        if (!rec->listed)
            continue; /* on its way to the disk */
        if (now_ms > rec->used_ms) {
            rec->used_ms = now_ms;
            rec->dirty = true;
        }
        unlist(store, at);
        list_after(store, at, KV_REC_NONE);
    }
}

/* ---- bytes ---- */

void kv_store__place(kv_store *store, uint32_t at, uint32_t segment, uint64_t offset)
{
    kv_rec *rec = &store->recs[at];
    kv_segment *seg = &store->segments[segment];
    rec->segment = segment;
    rec->offset = offset;
    rec->seg_prev = KV_REC_NONE;
    rec->seg_next = seg->first;
    if (seg->first != KV_REC_NONE)
        store->recs[seg->first].seg_prev = at;
    seg->first = at;
    seg->live += rec->length;
}

void kv_store__unplace(kv_store *store, uint32_t at)
{
    kv_rec *rec = &store->recs[at];
    if (rec->segment == KV_SEGMENT_NONE)
        return;
    kv_segment *seg = &store->segments[rec->segment];
    if (rec->seg_next != KV_REC_NONE)
        store->recs[rec->seg_next].seg_prev = rec->seg_prev;
    if (rec->seg_prev != KV_REC_NONE)
        store->recs[rec->seg_prev].seg_next = rec->seg_next;
    else
        seg->first = rec->seg_next;
    seg->live -= rec->length;
    rec->segment = KV_SEGMENT_NONE;
}

/* ---- dropping ---- */

/* Out of the tree, without its children. */
static void drop_one(kv_store *store, uint32_t at)
{
    kv_rec *rec = &store->recs[at];
    if (!rec->foreign)
        unlink_rec(store, at);
    unlist(store, at);
    if (rec->state == KV_REC_STORED) {
        rec->state = KV_REC_DEAD;
        rec->older = store->dead;
        store->dead = at;
        store->stats.records--;
    } else {
        rec->state = KV_REC_LOST;
    }
    memset(tokens_of(store, at), 0, KV_PAGE_TOKENS * sizeof(int32_t));
}

uint32_t kv_store__drop(kv_store *store, uint32_t at)
{
    uint32_t top = at, dropped = 0;
    for (;;) {
        while (store->recs[at].child != KV_REC_NONE)
            at = store->recs[at].child;
        if (store->recs[at].side != KV_REC_NONE) {
            at = store->recs[at].side;
            continue;
        }
        uint32_t parent = store->recs[at].parent;
        bool last = at == top;
        drop_one(store, at);
        dropped++;
        if (last)
            return dropped;
        at = parent;
    }
}

uint32_t kv_store__make_room(kv_store *store, uint64_t bytes, uint32_t records)
{
    uint32_t dropped = 0;
    uint64_t going = 0;
    for (uint32_t at = store->oldest;
         at != KV_REC_NONE &&
         (dropped < records || store->bytes - going + bytes > store->options.bytes_max);) {
        const kv_rec *rec = &store->recs[at];
        uint32_t newer = rec->newer, side = rec->side;
        bool held = rec->holds > 0 || (side != KV_REC_NONE && store->recs[side].holds > 0);
        bool writing = side != KV_REC_NONE && store->recs[side].state != KV_REC_STORED;
        if (rec->child == KV_REC_NONE && !held && !writing) {
            going += rec->length + (side != KV_REC_NONE ? store->recs[side].length : 0);
            dropped += kv_store__drop(store, at);
        }
        at = newer;
    }
    store->stats.evicted += dropped;
    return dropped;
}

/* ---- check ---- */

#define HOLDS(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            base_fail(err, BASE_INVALID, "record %u: %s", at, #cond);                              \
            return false;                                                                          \
        }                                                                                          \
    } while (0)

static bool check_rec(const kv_store *store, uint32_t at, base_err *err)
{
    const kv_rec *rec = &store->recs[at];
    HOLDS(rec->state <= KV_REC_LOST);
    HOLDS(rec->listed == (rec->state == KV_REC_STORED && rec->kind == KV_STORE_TARGET) ||
          rec->foreign);
    HOLDS((rec->segment != KV_SEGMENT_NONE) == (rec->state == KV_REC_STORED) ||
          rec->state == KV_REC_DEAD || rec->state == KV_REC_GRAVE);
    if (rec->segment != KV_SEGMENT_NONE) {
        const kv_segment *seg = &store->segments[rec->segment];
        HOLDS(seg->fd >= 0);
        HOLDS(rec->offset >= KV_BLOCK);
        HOLDS(rec->offset + rec->length <= seg->end);
    }
    if (rec->state == KV_REC_ROOT) {
        HOLDS(rec->child != KV_REC_NONE);
        return true;
    }
    if (rec->foreign || rec->state == KV_REC_DEAD || rec->state == KV_REC_GRAVE ||
        rec->state == KV_REC_LOST)
        return true;
    const kv_rec *parent = &store->recs[rec->parent];
    HOLDS(parent->state == KV_REC_ROOT || parent->state == KV_REC_QUEUED ||
          parent->state == KV_REC_WRITING || parent->state == KV_REC_STORED);
    HOLDS(rec->state != KV_REC_STORED || parent->state == KV_REC_ROOT ||
          parent->state == KV_REC_STORED);
    HOLDS(rec->space == parent->space);
    if (rec->kind == KV_STORE_DRAFT) {
        HOLDS(parent->side == at);
        HOLDS(parent->rows == rec->rows);
        HOLDS(rec->chain ==
              kv_form__side_chain(&store->forms[KV_STORE_DRAFT], parent->chain, rec->rows));
        return true;
    }
    HOLDS(parent->rows == KV_PAGE_TOKENS);
    HOLDS(rec->rows > 0);
    HOLDS(rec->child == KV_REC_NONE || rec->rows == KV_PAGE_TOKENS);
    HOLDS(rec->chain == kv_form__page_chain(parent->chain, rec->rows, tokens_of(store, at)));
    HOLDS(rec->rows < KV_PAGE_TOKENS ||
          kv_store__find_page(store, rec->parent, tokens_of(store, at)) == at);
    return true;
}

bool kv_store_check(kv_store *store, base_err *err)
{
    bool ok = true;
    uint64_t stored = 0, listed = 0, walked = 0;
    pthread_mutex_lock(&store->lock);
    for (uint32_t at = 0; ok && at < store->rec_used; at++) {
        const kv_rec *rec = &store->recs[at];
        if (rec->state == KV_REC_FREE)
            continue;
        ok = check_rec(store, at, err);
        stored += rec->state == KV_REC_STORED;
        listed += rec->listed;
    }
    for (uint32_t at = store->oldest; at != KV_REC_NONE; at = store->recs[at].newer)
        walked++;
    uint64_t live = 0;
    for (uint32_t i = 0; i < KV_SEGMENTS_MAX; i++)
        live += store->segments[i].fd >= 0 ? store->segments[i].live : 0;
    if (ok && (stored != store->stats.records || listed != walked || live > store->bytes)) {
        base_fail(err, BASE_INVALID,
                  "%llu records, %llu counted; %llu listed, %llu walked; %llu bytes live of %llu",
                  (unsigned long long)stored, (unsigned long long)store->stats.records,
                  (unsigned long long)listed, (unsigned long long)walked, (unsigned long long)live,
                  (unsigned long long)store->bytes);
        ok = false;
    }
    pthread_mutex_unlock(&store->lock);
    return ok;
}
