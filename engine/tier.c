/* The disk tier's glue: the store knows pages and tokens, the engine sequences and a device.
 *
 * A sequence that waits for admission and of which the disk has more than memory is fetched first:
 * it keeps its place in the queue while readers fill pages that nobody else sees, and everybody
 * else goes on. When they are there, they are listed as computed ones are, and the sequence is
 * admitted as if they had always been in memory.
 *
 *   QUEUED --fetch--> FETCHING (seq->fetch) --settle: listed, its pages go back--> QUEUED
 *                         |--abandon: the sequence ends--> (the fetch goes on alone until done)
 *
 * What a turn has run is offered to the store when it ends; the pages' references that the store
 * takes come back by poll. Thread: engine, but for the copy functions and wake. */
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/engine_internal.h"

#define FETCH_LATENCY_S 1e-3  /* of the first read */
#define TOKEN_S_KEPT 0.8      /* of the older measurements of a prefill token, by step */
#define PREFILL_ROWS_MIN 32   /* fewer tell little of what a prefill costs */
#define PATIENCE_NS 50000000u /* that pages may be short because the tier holds some */
#define PATIENCE_MAX_NS 1000000000u
#define RECORDS_MIN 4096
#define RECORDS_PER_PAGE 4 /* turns' ends make many short ones */

/* ---- the store's device ---- */

static kn_plane_kind kind_of(kv_plane_type type)
{
    switch (type) {
    case KV_PLANE_K:
    case KV_PLANE_DRAFT_K:
        return KN_PLANE_K;
    case KV_PLANE_V:
    case KV_PLANE_DRAFT_V:
        return KN_PLANE_V;
    default:
        return KN_PLANE_INDEX;
    }
}

static const kv_plane *plane_of(const eng_engine *engine, kv_store_kind kind, uint32_t plane)
{
    return kind == KV_STORE_TARGET ? &eng_model_layout(engine->model)->planes[plane]
                                   : &engine->tier.draft_layout.planes[plane];
}

static bool copy_out(void *ctx, kv_store_kind kind, uint32_t page, uint32_t plane, uint32_t rows,
                     void *bytes)
{
    const eng_engine *engine = ctx;
    const kv_plane *p = plane_of(engine, kind, plane);
    kn_kv_copy_out(kind == KV_STORE_TARGET ? engine->kv : engine->draft_kv, bytes, page, p->layer,
                   kind_of(p->type), p->head, rows);
    return true;
}

static bool copy_in(void *ctx, kv_store_kind kind, uint32_t page, uint32_t plane, uint32_t rows,
                    const void *bytes)
{
    eng_engine *engine = ctx;
    const kv_plane *p = plane_of(engine, kind, plane);
    kn_kv_copy_in(kind == KV_STORE_TARGET ? engine->kv : engine->draft_kv, bytes, page, p->layer,
                  kind_of(p->type), p->head, rows);
    return true;
}

static void wake(void *ctx)
{
    eng_engine *engine = ctx;
    pthread_mutex_lock(&engine->lock);
    engine->woken = true;
    pthread_cond_signal(&engine->wake);
    pthread_mutex_unlock(&engine->lock);
}

/* ---- start and stop ---- */

/* Record order: layer by layer K heads, V heads. */
static base_code make_draft_layout(eng_engine *engine, base_err *err)
{
    kn_kv_shape shape = eng_draft_kv_shape(engine->draft, 1);
    uint32_t count = 0, row = kn_kv_row_bytes(shape.type, shape.head_dim);
    kv_plane *planes = calloc((size_t)shape.layers * 2 * shape.kv_heads, sizeof *planes);
    if (planes == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory for a page layout");
    for (uint16_t l = 0; l < shape.layers; l++)
        for (uint16_t h = 0; h < 2 * shape.kv_heads; h++)
            planes[count++] =
                (kv_plane){.type = h < shape.kv_heads ? KV_PLANE_DRAFT_K : KV_PLANE_DRAFT_V,
                           .layer = l,
                           .head = (uint16_t)(h % shape.kv_heads),
                           .row_bytes = row};
    engine->tier.draft_planes = planes;
    return kv_layout_init(&engine->tier.draft_layout, planes, count, err);
}

base_code eng__tier_open(eng_engine *engine, base_err *err)
{
    eng_tier *tier = &engine->tier;
    const eng_options *options = &engine->options;
    const kv_layout *layout = eng_model_layout(engine->model);
    base_code code = BASE_OK;
    if (options->disk == NULL)
        return BASE_OK;
    if (!eng_memory_is_shared(eng_model_device(engine->model))) {
        /* The store's threads copy pages in and out; such a device is one thread's. */
        base_log(BASE_LOG_WARN, "disk_tier_off reason=\"pages of backend %s stay in its memory\"",
                 eng_model_device(engine->model)->backend->name);
        return BASE_OK;
    }
    if (engine->draft != NULL)
        code = make_draft_layout(engine, err);
    tier->fetch_max = (uint32_t)base_min(options->sequences_max, ENG_FETCHES_MAX);
    for (uint32_t i = 0; code == BASE_OK && i < tier->fetch_max; i++) {
        tier->fetches[i].pages = malloc(engine->pages_max * sizeof(uint32_t));
        if (tier->fetches[i].pages == NULL)
            code = base_fail(err, BASE_NOMEM, "out of memory for the disk tier");
    }
    if (code == BASE_OK)
        code = eng__ahead_open(engine, err);
    if (code != BASE_OK)
        return code;
    kv_store_options store = {
        .dir = options->disk,
        .fingerprint = engine->info.fingerprint,
        .numerics = engine->info.numerics,
        .layout = layout,
        .device = {.ctx = engine, .copy_out = copy_out, .copy_in = copy_in, .wake = wake},
        .bytes_max = options->disk_bytes,
        .write_bytes_s = options->disk_write_bytes_s,
        .write_bytes_day = options->disk_write_bytes_day,
        .records_max = (uint32_t)base_min(
            base_max(options->disk_bytes / layout->record_bytes * RECORDS_PER_PAGE, RECORDS_MIN),
            1u << 20),
        .queue_max = 2 * engine->pages_max, /* the longest turn with its side records */
        .restores_max = tier->fetch_max,
        .slots_max = engine->pages_max,
        .retry_ms = options->disk_retry_ms,
        .group_bytes = options->disk_group_bytes,
        .readers = options->disk_readers,
    };
    if (options->disk_io != NULL)
        store.io = *options->disk_io;
    if (engine->draft != NULL) {
        store.draft_fingerprint = eng_draft_fingerprint(engine->draft);
        store.draft = &tier->draft_layout;
    }
    return kv_store_open(&tier->store, engine->pool, &store, err);
}

void eng__tier_close(eng_engine *engine)
{
    eng_tier *tier = &engine->tier;
    kv_store_close(tier->store, false);
    eng__ahead_close(engine);
    for (uint32_t i = 0; i < tier->fetch_max; i++)
        free(tier->fetches[i].pages);
    free(tier->draft_planes);
}

/* ---- reading back ---- */

/* The pages that a fetch holds and nobody lists. */
uint32_t eng__tier_pages(const eng_engine *engine)
{
    uint32_t count = engine->tier.ahead.page_count;
    for (uint32_t i = 0; i < engine->tier.fetch_max; i++)
        count += engine->tier.fetches[i].page_count;
    return count;
}

static void give_back(eng_engine *engine, eng_fetch *fetch)
{
    for (uint32_t i = 0; i < fetch->page_count; i++) {
        kv_pool_release(engine->pool, fetch->pages[i], fetch->owner);
        kv_pool_unref(engine->pool, fetch->pages[i]);
    }
    fetch->page_count = 0;
}

/* The first page whose side record the drafter's window reaches, for one that stands at `end`. */
static uint32_t window_page(const eng_engine *engine, uint32_t end)
{
    uint32_t window = eng_draft_window(engine->draft);
    return window > 0 && end + 1 > window ? (end + 1 - window) / KV_PAGE_TOKENS : 0;
}

static eng_fetch *free_fetch(eng_tier *tier)
{
    for (uint32_t i = 0; i < tier->fetch_max; i++)
        if (tier->fetches[i].restore == NULL)
            return &tier->fetches[i];
    return NULL;
}

static bool pays(const eng_engine *engine, const kv_restore *restore, uint32_t from)
{
    /* Nothing was measured yet: reading is what the tier is for. */
    return engine->tier.token_s <= 0 ||
           kv_restore_pays(kv_restore_bytes(restore), kv_store_read_rate(engine->tier.store),
                           FETCH_LATENCY_S, kv_restore_tokens(restore) - from,
                           engine->tier.token_s);
}

bool eng__tier_fetch(eng_engine *engine, eng_sequence *seq, const int32_t *tokens, uint32_t count)
{
    eng_tier *tier = &engine->tier;
    eng_fetch *fetch;
    if (tier->store == NULL || seq->fetched || seq->run == count ||
        (fetch = free_fetch(tier)) == NULL)
        return false;
    kv_restore *restore = kv_store_find(tier->store, seq->request.space, tokens, count, seq->run);
    if (restore == NULL || !pays(engine, restore, seq->run)) {
        if (restore != NULL)
            kv_restore_end(restore);
        seq->fetched = true;
        return false;
    }
    uint32_t want = kv_restore_page_count(restore), end = kv_restore_tokens(restore);
    fetch->owner = seq->number;
    while (fetch->page_count < want) {
        uint32_t page = eng__alloc_page(engine, fetch->owner);
        if (page == KV_PAGE_NONE) {
            give_back(engine, fetch);
            kv_restore_end(restore);
            return false;
        }
        fetch->pages[fetch->page_count++] = page;
    }
    if (seq->run % KV_PAGE_TOKENS != 0) /* the page comes whole */
        kv_pool_unref(engine->pool, seq->pages[--seq->page_count]);
    uint32_t first = kv_restore_first_page(restore), draft_from = UINT32_MAX;
    if (engine->draft != NULL)
        draft_from = (uint32_t)base_max(window_page(engine, end), first) - first;
    *fetch = (eng_fetch){.restore = restore,
                         .seq = seq,
                         .from = seq->run,
                         .owner = seq->number,
                         .pages = fetch->pages,
                         .page_count = fetch->page_count};
    seq->fetch = fetch;
    seq->fetched = true;
    tier->waiting++;
    kv_restore_start(restore, fetch->pages, draft_from);
    eng__ahead_begin(engine, fetch);
    return true;
}

static void let_go(eng_engine *engine, eng_fetch *fetch)
{
    if (fetch->seq == NULL)
        return;
    eng__drop_pages(engine, fetch->seq);
    fetch->seq->fetch = NULL;
    fetch->seq = NULL;
    engine->tier.waiting--;
}

/* Lists what came, together with what memory had. False: nothing was listed. */
static bool list_fetched(eng_engine *engine, eng_fetch *fetch)
{
    eng_sequence *seq = fetch->seq;
    uint32_t first = kv_restore_first_page(fetch->restore), good = kv_restore_good(fetch->restore);
    uint32_t end = (uint32_t)base_min(kv_restore_tokens(fetch->restore),
                                      (size_t)(first + good) * KV_PAGE_TOKENS);
    for (uint32_t i = 0; i < good; i++) {
        uint32_t page = fetch->pages[i], base = (first + i) * KV_PAGE_TOKENS;
        kv_pool_set_filled(engine->pool, page, fetch->owner,
                           (uint32_t)base_min(end - base, KV_PAGE_TOKENS));
        engine->draft_whole[page] =
            engine->draft != NULL && kv_restore_has_draft(fetch->restore, i);
    }
    if (end <= fetch->from)
        return false;
    memcpy(seq->pages + first, fetch->pages, good * sizeof *seq->pages);
    const int32_t *tokens = eng__known_tokens(seq, end);
    pthread_mutex_lock(&engine->index_lock);
    bool listed =
        kv_index_insert(engine->index, seq->request.space, tokens, end, seq->pages, base_now_ns());
    pthread_mutex_unlock(&engine->index_lock);
    if (!listed)
        return false;
    seq->restored_from = fetch->from;
    seq->restored_to = end;
    return true;
}

void eng__tier_poll(eng_engine *engine)
{
    eng_tier *tier = &engine->tier;
    if (tier->store == NULL)
        return;
    kv_store_poll(tier->store);
    for (uint32_t i = 0; i < tier->fetch_max; i++) {
        eng_fetch *fetch = &tier->fetches[i];
        if (fetch->restore == NULL)
            continue;
        /* Asked once: what came since is for the rows that run ahead first. */
        bool done = kv_restore_done(fetch->restore);
        eng__ahead_run(engine, fetch);
        if (!done)
            continue;
        bool listed = fetch->seq != NULL && !fetch->stale && list_fetched(engine, fetch);
        eng__ahead_settle(engine, fetch,
                          listed && kv_restore_good(fetch->restore) == fetch->page_count);
        give_back(engine, fetch);
        kv_restore_end(fetch->restore);
        fetch->restore = NULL;
        let_go(engine, fetch);
    }
}

void eng__tier_abandon(eng_engine *engine, eng_sequence *seq)
{
    if (engine->tier.ahead.seq == seq)
        eng__ahead_drop(engine);
    if (seq->fetch == NULL)
        return;
    kv_restore_cancel(seq->fetch->restore);
    let_go(engine, seq->fetch);
}

void eng__tier_end_fetches(eng_engine *engine)
{
    eng_tier *tier = &engine->tier;
    for (uint32_t i = 0; i < tier->fetch_max; i++)
        if (tier->fetches[i].restore != NULL)
            kv_restore_cancel(tier->fetches[i].restore);
    while (eng__tier_pages(engine) > 0) {
        eng__tier_poll(engine);
        eng__wait(engine);
    }
}

/* ---- when memory is short ---- */

bool eng__tier_wait(eng_engine *engine)
{
    eng_tier *tier = &engine->tier;
    if (tier->store == NULL ||
        (kv_store_get_stats(tier->store).held == 0 && eng__tier_pages(engine) == 0)) {
        tier->short_ns = 0;
        return false;
    }
    uint64_t now = base_now_ns();
    if (tier->short_ns == 0)
        tier->short_ns = now;
    if (now - tier->short_ns > PATIENCE_NS) {
        kv_store_shed(tier->store);
        eng__ahead_drop(engine);
        for (uint32_t i = 0; i < tier->fetch_max; i++)
            if (tier->fetches[i].restore != NULL)
                kv_restore_cancel(tier->fetches[i].restore);
    }
    return now - tier->short_ns < PATIENCE_MAX_NS;
}

/* ---- the end of a turn ---- */

void eng__tier_write(eng_engine *engine, const eng_sequence *seq, const int32_t *tokens,
                     uint32_t count)
{
    if (engine->tier.store == NULL || seq->request.no_disk)
        return;
    uint32_t draft_from = UINT32_MAX;
    if (engine->draft != NULL) {
        draft_from = (count + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
        uint32_t low = window_page(engine, count);
        while (draft_from > low && engine->draft_whole[seq->pages[draft_from - 1]])
            draft_from--;
    }
    kv_store_write(engine->tier.store, seq->request.space, tokens, count, seq->pages, draft_from);
}

void eng__tier_observe_prefill(eng_engine *engine, uint32_t rows, uint64_t ns)
{
    eng_tier *tier = &engine->tier;
    if (rows < PREFILL_ROWS_MIN)
        return;
    double token_s = (double)ns * 1e-9 / rows;
    tier->token_s =
        tier->token_s <= 0 ? token_s : TOKEN_S_KEPT * tier->token_s + (1 - TOKEN_S_KEPT) * token_s;
}

/* ---- forgetting ---- */

/* Marks fetches of the namespace: their rows are not listed when they come. */
static void spoil_fetches(eng_tier *tier, uint64_t space)
{
    for (uint32_t i = 0; i < tier->fetch_max; i++)
        if (tier->fetches[i].seq != NULL && tier->fetches[i].seq->request.space == space)
            tier->fetches[i].stale = true;
}

void eng__tier_erase(eng_engine *engine, uint64_t space, const int32_t *tokens, uint32_t count,
                     uint32_t kept)
{
    if (engine->tier.store == NULL)
        return;
    spoil_fetches(&engine->tier, space);
    kv_store_erase(engine->tier.store, space, tokens, count, kept);
}

void eng__tier_drop(eng_engine *engine, uint64_t space)
{
    if (engine->tier.store == NULL)
        return;
    spoil_fetches(&engine->tier, space);
    kv_store_erase_space(engine->tier.store, space);
}
