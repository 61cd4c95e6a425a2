/* A prompt's rows that run ahead of their pages.
 *
 * While a sequence's cached pages are read back, layer by layer, the rows behind them run through
 * the layers that are in place already, so that what remains when the last page comes is little.
 * No step waits for it: between two steps the rows go on by the layers that came, and where others
 * run by one of them at a time, which costs those no more than a layer of a prefill chunk. One
 * sequence at a time, and one chunk of it: the next chunk stands on this one's rows in every layer.
 *
 *   none --begin: the restore begins--> running --run: all layers--> run
 *   running, run --settle: all of it was read and listed--> waiting for admission --adopt--> none
 *        `-------- drop: something is damaged, erased, cancelled, or memory is short --------> none
 *
 * Rows past a sequence's `run` are nobody's (loop.c, 2), so dropping them costs their time only; a
 * row's bits depend on its own inputs alone, so adopting them changes no token. The last known row
 * is left to the ordinary step, which samples it. Thread: engine. */
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/num.h"
#include "engine/engine_internal.h"

#define ROWS_MIN 16 /* fewer are run as quickly at the end */

base_code eng__ahead_open(eng_engine *engine, base_err *err)
{
    eng_ahead *a = &engine->tier.ahead;
    size_t rows = engine->options.step_rows_max, hidden = engine->config->hidden;
    const uint32_t *layers = NULL;
    uint32_t taps = engine->draft != NULL ? eng_draft_features(engine->draft, &layers) : 0;
    a->token = malloc(rows * sizeof *a->token);
    a->pos = malloc(rows * sizeof *a->pos);
    a->zeros = calloc(rows, sizeof *a->zeros);
    a->pages = malloc((rows / KV_PAGE_TOKENS + 2) * sizeof *a->pages);
    if (a->token == NULL || a->pos == NULL || a->zeros == NULL || a->pages == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory for rows that run ahead");
    const eng_piece pieces[] = {{&a->x, rows * hidden, sizeof *a->x},
                                {&a->features, rows * hidden * taps, sizeof *a->features}};
    return eng_memory_take(&a->memory, eng_model_device(engine->model), pieces, 2, err);
}

void eng__ahead_close(eng_engine *engine)
{
    eng_ahead *a = &engine->tier.ahead;
    free(a->token);
    free(a->pos);
    free(a->zeros);
    free(a->pages);
    eng_memory_free(&a->memory);
}

void eng__ahead_drop(eng_engine *engine)
{
    eng_ahead *a = &engine->tier.ahead;
    for (uint32_t i = 0; i < a->page_count; i++) {
        kv_pool_release(engine->pool, a->pages[i], a->seq->number);
        kv_pool_unref(engine->pool, a->pages[i]);
    }
    a->page_count = 0;
    a->seq = NULL;
    a->fetch = NULL;
}

static uint32_t pages_for(uint32_t tokens)
{
    return (tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
}

void eng__ahead_begin(eng_engine *engine, eng_fetch *fetch)
{
    eng_ahead *a = &engine->tier.ahead;
    eng_sequence *seq = fetch->seq;
    uint32_t from = kv_restore_tokens(fetch->restore), known = eng__known(seq);
    if (a->seq != NULL || known < from + 1 + ROWS_MIN)
        return;
    uint32_t rows = (uint32_t)base_min(known - 1 - from, engine->options.step_rows_max);
    if (engine->active_count > 0)
        rows = (uint32_t)base_min(rows, engine->options.prefill_chunk);
    uint32_t first = pages_for(from), want = pages_for(from + rows) - first;
    a->seq = seq;
    while (a->page_count < want) {
        uint32_t page = eng__alloc_page(engine, seq->number);
        if (page == KV_PAGE_NONE) {
            eng__ahead_drop(engine);
            return;
        }
        a->pages[a->page_count++] = page;
    }
    a->fetch = fetch;
    a->from = from;
    a->rows = rows;
    a->layer = 0;
    a->last_page = from % KV_PAGE_TOKENS != 0 ? fetch->pages[fetch->page_count - 1] : KV_PAGE_NONE;
    memcpy(a->token, eng__known_tokens(seq, from + rows) + from, rows * sizeof *a->token);
    for (uint32_t r = 0; r < rows; r++)
        a->pos[r] = (int32_t)(from + r);
    /* The sequence's table: behind what memory has, what is read, and what is to be run. */
    memcpy(seq->pages + kv_restore_first_page(fetch->restore), fetch->pages,
           fetch->page_count * sizeof *seq->pages);
    memcpy(seq->pages + first, a->pages, want * sizeof *seq->pages);
    a->table[0] = seq->pages;
    a->batch = (kn_rows){
        .rows = rows, .token = a->token, .pos = a->pos, .seq = a->zeros, .pages = a->table};
}

void eng__ahead_run(eng_engine *engine, const eng_fetch *fetch)
{
    eng_ahead *a = &engine->tier.ahead;
    const kv_layout *layout = eng_model_layout(engine->model);
    if (a->seq == NULL || a->fetch != fetch)
        return;
    bool done = kv_restore_done(fetch->restore);
    uint32_t planes = kv_restore_planes(fetch->restore);
    /* A damaged page is known before its planes count as dealt with. Where all came at once, the
     * step to come runs these rows together with others'. */
    if (fetch->stale || kv_restore_good(fetch->restore) < fetch->page_count ||
        (done && a->layer == 0)) {
        eng__ahead_drop(engine);
        return;
    }
    uint32_t end =
        planes == layout->plane_count ? engine->config->layers : layout->planes[planes].layer;
    if (engine->active_count > 0 && !done)
        end = (uint32_t)base_min(end, a->layer + 1);
    if (end <= a->layer)
        return;
    const uint32_t *taps = NULL;
    uint32_t tap_count = engine->draft != NULL ? eng_draft_features(engine->draft, &taps) : 0;
    uint64_t before = base_now_ns();
    eng_model_forward_layers(engine->model, engine->kv, &a->batch, a->x, a->layer, end, taps,
                             tap_count, a->features);
    ENG_COUNT(engine, busy_ns, base_now_ns() - before);
    if (!done)
        ENG_COUNT(engine, ahead_layers, end - a->layer);
    a->layer = end;
    engine->moved = true;
}

void eng__ahead_settle(eng_engine *engine, const eng_fetch *fetch, bool whole)
{
    eng_ahead *a = &engine->tier.ahead;
    if (a->seq == NULL || a->fetch != fetch)
        return;
    a->fetch = NULL;
    if (!whole || a->layer < engine->config->layers)
        eng__ahead_drop(engine);
}

void eng__ahead_adopt(eng_engine *engine, eng_sequence *seq)
{
    eng_ahead *a = &engine->tier.ahead;
    if (a->seq != seq)
        return;
    bool same_page =
        a->last_page == KV_PAGE_NONE || seq->pages[seq->page_count - 1] == a->last_page;
    if (seq->run == a->from && same_page) {
        memcpy(seq->pages + seq->page_count, a->pages, a->page_count * sizeof *a->pages);
        seq->page_count += a->page_count;
        a->page_count = 0;
        if (engine->draft != NULL)
            eng_draft_append(engine->draft, engine->draft_kv, &a->batch, a->features);
        eng__raise_filled(engine, seq, a->from + a->rows);
        ENG_COUNT(engine, steps, 1);
        ENG_COUNT(engine, step_rows, a->rows);
        ENG_COUNT(engine, ahead_tokens, a->rows);
    }
    eng__ahead_drop(engine);
}
