/* A sequence's page table: matched, grown, owned, listed and given back. Thread: engine. */
#include <string.h>
#include <xxhash.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/engine_internal.h"

#define PREFILL_CLASS "prefill" /* a pause that goes on behind a prefill: no call's name */

const int32_t *eng__known_tokens(const eng_sequence *seq, uint32_t count)
{
    const eng_request *request = &seq->request;
    if (count <= request->token_count)
        return request->tokens;
    int32_t *joined = seq->engine->scratch;
    memcpy(joined, request->tokens, request->token_count * sizeof *joined);
    memcpy(joined + request->token_count, seq->output,
           (count - request->token_count) * sizeof *joined);
    return joined;
}

bool eng__make_room(eng_engine *engine, uint32_t count)
{
    if (kv_pool_free_count(engine->pool) >= count)
        return true;
    pthread_mutex_lock(&engine->index_lock);
    uint32_t freed = kv_index_evict(engine->index, count, base_now_ns());
    pthread_mutex_unlock(&engine->index_lock);
    ENG_COUNT(engine, evicted_pages, freed);
    return kv_pool_free_count(engine->pool) >= count;
}

bool eng__force_room(eng_engine *engine, uint32_t count)
{
    if (eng__make_room(engine, count))
        return true;
    pthread_mutex_lock(&engine->index_lock);
    uint32_t dropped = kv_index_drop(engine->index, 0);
    pthread_mutex_unlock(&engine->index_lock);
    if (dropped > 0)
        base_log(BASE_LOG_WARN, "pins_dropped pages=%u wanted=%u", dropped, count);
    return kv_pool_free_count(engine->pool) >= count;
}

uint32_t eng__alloc_page(eng_engine *engine, uint64_t owner)
{
    if (!eng__make_room(engine, 1))
        return KV_PAGE_NONE;
    uint32_t page = kv_pool_alloc(engine->pool, owner);
    CHECK(page != KV_PAGE_NONE);
    engine->draft_whole[page] = true; /* as long as every row is run */
    engine->tier.short_ns = 0;
    return page;
}

void eng__match_pages(eng_engine *engine, eng_sequence *seq, const int32_t *tokens, uint32_t count)
{
    pthread_mutex_lock(&engine->index_lock);
    kv_match match = kv_index_match_from(engine->index, seq->request.space, &seq->hint, tokens,
                                         count, seq->pages, base_now_ns());
    pthread_mutex_unlock(&engine->index_lock);
    seq->page_count = match.page_count;
    seq->run = match.tokens;
    seq->draft_from = 0;
    for (uint32_t i = seq->page_count; i-- > 0 && seq->draft_from == 0;)
        if (!engine->draft_whole[seq->pages[i]])
            seq->draft_from = (uint32_t)base_min((i + 1) * KV_PAGE_TOKENS, seq->run);
}

void eng__drop_pages(eng_engine *engine, eng_sequence *seq)
{
    DCHECK(engine->kept_count == 0 || engine->kept_seq != seq);
    for (uint32_t i = 0; i < seq->page_count; i++) {
        kv_pool_release(engine->pool, seq->pages[i], seq->number);
        kv_pool_unref(engine->pool, seq->pages[i]);
    }
    seq->page_count = 0;
    seq->run = 0;
}

uint32_t eng__list_pages(eng_engine *engine, eng_sequence *seq)
{
    /* Rows behind a stop string were run, but are nobody's text. */
    uint32_t count = seq->run;
    if (engine->kept_seq == seq)
        eng__settle_rows(engine);
    if (seq->stop_index >= 0)
        count = (uint32_t)base_min(count, seq->request.token_count + seq->run_tokens);
    if (count == 0)
        return 0;
    const int32_t *tokens = eng__known_tokens(seq, count);
    pthread_mutex_lock(&engine->index_lock);
    kv_index_insert_from(engine->index, seq->request.space, &seq->hint, tokens, count, seq->pages,
                         base_now_ns());
    pthread_mutex_unlock(&engine->index_lock);
    return count;
}

uint64_t eng__call_class(const eng_sequence *seq, const char *name, size_t length)
{
    return XXH3_64bits_withSeed(name, length, seq->request.space);
}

static uint64_t pause_class(const eng_sequence *seq)
{
    if (seq->request.session_over)
        return KV_CLASS_OVER;
    if (seq->request.prefill_only)
        return eng__call_class(seq, PREFILL_CLASS, sizeof PREFILL_CLASS);
    return seq->finish == ENG_FINISH_STOP && eng_decoder_calls(seq->decoder) > 0 ? seq->call_class
                                                                                 : 0;
}

void eng__leave_pages(eng_engine *engine, eng_sequence *seq)
{
    uint32_t count = eng__list_pages(engine, seq);
    if (count == 0)
        return;
    const int32_t *tokens = eng__known_tokens(seq, count);
    eng__tier_write(engine, seq, tokens, count);
    eng_past_note(&engine->past, seq->request.space, tokens, count);
    pthread_mutex_lock(&engine->index_lock);
    kv_index_note_pause_from(engine->index, seq->request.space, &seq->hint, tokens, count,
                             pause_class(seq), base_now_ns());
    pthread_mutex_unlock(&engine->index_lock);
}

bool eng__own_last_page(eng_engine *engine, eng_sequence *seq, uint32_t tokens)
{
    uint32_t last = seq->page_count - 1, from = seq->pages[last];
    if (kv_pool_claim(engine->pool, from, seq->number, tokens))
        return true;
    uint32_t to = eng__alloc_page(engine, seq->number);
    if (to == KV_PAGE_NONE)
        return false;
    kn_kv_copy_page(engine->kv, to, from, tokens);
    if (engine->draft_kv != NULL)
        kn_kv_copy_page(engine->draft_kv, to, from, tokens);
    engine->draft_whole[to] = engine->draft_whole[from];
    kv_pool_set_filled(engine->pool, to, seq->number, tokens);
    kv_pool_unref(engine->pool, from);
    seq->pages[last] = to;
    return true;
}

bool eng__grow_pages(eng_engine *engine, eng_sequence *seq, uint32_t end)
{
    uint32_t want = (end + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    while (seq->page_count < want) {
        uint32_t page = eng__alloc_page(engine, seq->number);
        if (page == KV_PAGE_NONE)
            return false;
        seq->pages[seq->page_count++] = page;
    }
    return true;
}

void eng__raise_filled(eng_engine *engine, eng_sequence *seq, uint32_t run)
{
    uint32_t first = seq->run / KV_PAGE_TOKENS, last = (run - 1) / KV_PAGE_TOKENS;
    for (uint32_t i = first; i <= last; i++)
        kv_pool_set_filled(engine->pool, seq->pages[i], seq->number,
                           (uint32_t)base_min(run - i * KV_PAGE_TOKENS, KV_PAGE_TOKENS));
    seq->run = run;
}
