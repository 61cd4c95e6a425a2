/* Requests in, text in and out, start and stop. What the engine thread does is in loop.c. */
#include "engine/engine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/engine_internal.h"

#define INDEX_NODES_PER_PAGE 4 /* a node holds at least a token; in practice far more */
#define INDEX_NODES_MIN 4096
#define SECOND_NS 1000000000u
#define COST_LEAST_NS                                                                              \
    1e4                /* of a request, before any step was seen: turns are taken all the same     \
                        */
#define PICKS_EXTRA 64 /* draft rows a step may verify beyond one row a sequence */

void eng__sequence_destroy(eng_sequence *seq)
{
    if (seq == NULL)
        return;
    eng_decoder_destroy(seq->decoder);
    eng_constrain_destroy(seq->constrain);
    eng_copy_destroy(seq->copy);
    base_arena_destroy(seq->arena);
    free(seq->counts.output);
    free(seq->counts.prompt);
    free(seq->logprobs);
    free(seq->output);
    free(seq->pages);
    free(seq);
}

/* ---- submitting ---- */

static base_code check_request(const eng_engine *engine, const eng_request *request, base_err *err)
{
    if (request->token_count == 0)
        return base_fail(err, BASE_INVALID, "the prompt is empty");
    if (request->token_count >= engine->info.context_max)
        return base_fail(err, BASE_TOO_LONG,
                         "This model's maximum context length is %u tokens, however you requested "
                         "%u tokens in the prompt.",
                         engine->info.context_max, request->token_count);
    if (request->max_tokens == 0 && !request->prefill_only)
        return base_fail_param(err, BASE_INVALID, "max_tokens", "max_tokens must be at least 1");
    for (uint32_t i = 0; i < request->token_count; i++)
        if (request->tokens[i] < 0 || (uint32_t)request->tokens[i] >= engine->info.vocab)
            return base_fail(err, BASE_INVALID, "token %d at %u is outside the vocabulary of %u",
                             request->tokens[i], i, engine->info.vocab);
    if (request->prediction_count > ENG_PREDICTION_MAX)
        return base_fail_param(err, BASE_TOO_LONG, "prediction",
                               "the prediction's %u tokens exceed %u", request->prediction_count,
                               ENG_PREDICTION_MAX);
    for (uint32_t i = 0; i < request->prediction_count; i++)
        if (request->prediction[i] < 0 || (uint32_t)request->prediction[i] >= engine->info.vocab)
            return base_fail_param(err, BASE_INVALID, "prediction",
                                   "token %d at %u of the prediction is outside the vocabulary "
                                   "of %u",
                                   request->prediction[i], i, engine->info.vocab);
    return request->prefill_only ? BASE_OK
                                 : eng_sampling_check(&request->sampling, engine->info.vocab, err);
}

static bool make_counts(const eng_engine *engine, eng_sequence *seq)
{
    const eng_sampling *sampling = &seq->request.sampling;
    bool repeat = sampling->repetition_penalty != 1;
    if (repeat || sampling->presence_penalty != 0 || sampling->frequency_penalty != 0) {
        seq->counts.output = calloc(engine->config->vocab, sizeof *seq->counts.output);
        if (seq->counts.output == NULL)
            return false;
    }
    if (repeat) {
        seq->counts.prompt = calloc(engine->config->vocab, sizeof *seq->counts.prompt);
        if (seq->counts.prompt == NULL)
            return false;
        for (uint32_t i = 0; i < seq->request.token_count; i++)
            seq->counts.prompt[seq->request.tokens[i]] = 1;
    }
    return true;
}

static base_code constrain(const eng_engine *engine, eng_sequence *seq, base_err *err)
{
    const eng_request *request = &seq->request;
    bool chat = request->parse == ENG_PARSE_CHAT;
    eng_constrain_options options = {
        .codec = engine->codec,
        .tok = engine->tok,
        .vocab = engine->vocab,
        .end_tokens = engine->end_tokens,
        .end_token_count = engine->end_token_count,
        .grammar = request->grammar,
        .reasons = chat && request->starts_in_reasoning,
        .may_reason = chat && request->thinking == ENG_THINK_ADAPTIVE,
    };
    return eng_constrain_create(&seq->constrain, &options, err);
}

static base_code sequence_create(eng_sequence **out, eng_engine *engine, const eng_request *request,
                                 base_err *err)
{
    eng_sequence *seq = calloc(1, sizeof *seq);
    if (seq == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory for a request");
    seq->engine = engine;
    seq->request = *request;
    seq->stop_index = -1;
    seq->submitted_ns = base_now_ns();
    if (request->prefill_only) {
        seq->closing = true;
        seq->request.max_tokens = 1;
        seq->request.sampling = (eng_sampling)ENG_SAMPLING_DEFAULT;
        seq->request.sampling.top_logprobs = request->sampling.top_logprobs;
        seq->request.tool_choice = ENG_TOOL_AUTO;
        seq->request.call_max = 0;
        request = &seq->request;
    }
    seq->output_max =
        (uint32_t)base_min(request->max_tokens, engine->info.context_max - request->token_count);
    seq->request.max_tokens = seq->output_max;
    /* A call's closing tokens may pass output_max by a few: append_forced stops at the bound. */
    seq->output = malloc(seq->output_max * sizeof *seq->output);
    seq->pages = malloc(engine->pages_max * sizeof *seq->pages);
    if (request->sampling.logprobs)
        seq->logprobs = malloc(seq->output_max * sizeof *seq->logprobs);
    bool memory = seq->output != NULL && seq->pages != NULL &&
                  (seq->logprobs != NULL || !request->sampling.logprobs) &&
                  make_counts(engine, seq);
    if (memory && engine->options.draft_tokens < 0 && !request->prefill_only)
        memory = (seq->copy = eng_copy_create(request->tokens, request->token_count,
                                              request->prediction, request->prediction_count,
                                              seq->output, seq->output_max)) != NULL;
    /* A grammar opens and closes calls by itself. */
    bool held = request->grammar != NULL;
    bool forces = !held && (request->tool_choice == ENG_TOOL_REQUIRED ||
                            request->tool_choice == ENG_TOOL_NAMED);
    bool closes = !held && request->call_max > 0;
    if (memory && (forces || closes))
        memory = (seq->arena = base_arena_create(1024, (size_t)1 << 20)) != NULL;
    if (!memory) {
        eng__sequence_destroy(seq);
        return base_fail(err, BASE_NOMEM, "out of memory for a request");
    }
    eng_decoder_options decoder = {
        .parse = request->parse,
        .starts_in_reasoning = request->starts_in_reasoning,
        .thinking = request->thinking,
        .tools = request->tools,
        .tool_count = request->tool_count,
        .stops = request->stops,
        .stop_count = request->stop_count,
        .part = eng__add_part,
        .ctx = seq,
    };
    eng_text name = request->tool_choice == ENG_TOOL_NAMED ? request->tool_name : (eng_text){0};
    base_code code = BASE_OK;
    if (!request->prefill_only)
        code = eng_decoder_create(&seq->decoder, engine->codec, &decoder, err);
    if (code == BASE_OK && request->grammar != NULL && !request->prefill_only)
        code = constrain(engine, seq, err);
    if (code == BASE_OK && forces)
        code =
            eng_codec_force(engine->codec, &seq->force, &seq->force_count, name, seq->arena, err);
    if (code == BASE_OK && closes)
        code =
            eng_codec_force_close(engine->codec, &seq->close, &seq->close_count, seq->arena, err);
    if (code != BASE_OK) {
        eng__sequence_destroy(seq);
        return code;
    }
    *out = seq;
    return BASE_OK;
}

base_code eng_submit(eng_engine *engine, const eng_request *request, base_err *err)
{
    return eng_submit_all(engine, request, 1, NULL, err);
}

/* Under lock: what the request will take, if `cached` of its prompt is found. */
static void weigh(eng_engine *engine, eng_sequence *seq, uint32_t cached)
{
    const eng_forecast *forecast = engine->forecast;
    const eng_request *request = &seq->request;
    uint32_t running = engine->stats.running, slots = engine->options.sequences_max;
    uint32_t beside = request->prefill_only ? running : (uint32_t)base_min(running, slots - 1);
    uint32_t chunk = beside > 0 ? atomic_load_explicit(&engine->chunk, memory_order_relaxed)
                                : engine->options.step_rows_max;
    /* Others of its prompt wait for the one that runs it. */
    uint32_t uncached = request->follows != 0 ? 1 : request->token_count - cached;
    seq->expected = request->prefill_only          ? 0
                    : request->sampling.ignore_eos ? seq->output_max
                                                   : eng_forecast_output(forecast, seq->output_max);
    seq->uncached = uncached;
    seq->prefill_ns = eng_forecast_prefill(forecast, cached, uncached, chunk, beside);
    seq->work_ns = seq->prefill_ns * (beside > 0 ? 2 : 1) +
                   eng_forecast_decode(forecast, beside + 1, seq->expected, request->token_count);
    double each = eng_forecast_decode(forecast, slots, seq->expected, request->token_count) / slots;
    bool live = cached > request->token_count / 2;
    seq->waiter.tenant = request->tenant;
    seq->waiter.entry = (eng_sched_entry){
        .rank = eng_sched_rank(seq->submitted_ns, seq->prefill_ns, live, request->priority),
        .cost_ns = fmax(seq->prefill_ns + each, COST_LEAST_NS)};
}

static base_code tell(const eng_engine *engine, const eng_verdict *verdict, const eng_ask *ask,
                      base_err *err)
{
    const eng_options *options = &engine->options;
    double wait = (double)verdict->wait_ns / 1e9, work = (double)verdict->work_ns / 1e9;
    switch (verdict->refusal) {
    case ENG_ADMITTED:
    case ENG_REFUSALS:
        break;
    case ENG_REFUSED_COUNT:
        return base_fail(err, BASE_FULL, "%u requests are waiting, %u may", engine->waiting,
                         options->queue_max);
    case ENG_REFUSED_TIME:
        return base_fail(err, BASE_FULL,
                         "the wait would be about %.1f s, admission.queue_ms_max allows %.1f s",
                         wait, (double)options->queue_ns_max / 1e9);
    case ENG_REFUSED_TENANT:
        return base_fail(err, BASE_FULL,
                         "this tenant's requests fill its part of the queue, %u %% of %u",
                         options->tenant_percent, options->queue_max);
    case ENG_REFUSED_DEADLINE:
        return base_fail(err, BASE_TIMEOUT,
                         "the answer would take about %.1f s, %.1f s of them waiting; the client's "
                         "deadline leaves %.1f s, so it is not begun",
                         wait + work, wait, (double)ask->left_ns / 1e9);
    }
    return BASE_OK;
}

/* Under lock: whether the list may come in. `cached` of the first one's prompt is there. */
static base_code decide(eng_engine *engine, eng_sequence *first, uint32_t count, uint32_t cached,
                        eng_verdict *verdict, base_err *err)
{
    const eng_request *request = &first->request;
    eng_ask ask = {.tenant = request->tenant,
                   .weight = (uint32_t)base_max(1, request->weight),
                   .count = count,
                   .background = request->prefill_only};
    for (eng_sequence *seq = first; seq != NULL; seq = seq->next) {
        weigh(engine, seq, seq == first ? cached : 0);
        ask.cost_ns += seq->waiter.entry.cost_ns;
        ask.work_ns = fmax(ask.work_ns, seq->work_ns);
    }
    ask.rank = first->waiter.entry.rank;
    if (request->deadline_binds && request->deadline_ns != 0) {
        uint64_t now = base_now_ns();
        ask.left_ns = request->deadline_ns > now ? request->deadline_ns - now : 1;
    }
    *verdict = eng_admission_decide(engine->admission, &ask);
    for (eng_sequence *seq = first; seq != NULL; seq = seq->next)
        seq->usage.forecast_ns = seq->waiter.told_ns = verdict->wait_ns;
    return tell(engine, verdict, &ask, err);
}

/* Under lock: takes the list, `last` its end. */
static base_code post(eng_engine *engine, eng_sequence *first, eng_sequence *last, uint32_t count,
                      uint32_t cached, eng_verdict *verdict, base_err *err)
{
    if (engine->stop)
        return base_fail(err, BASE_CLOSED, "the engine is stopping");
    if (engine->lost.code != BASE_OK)
        return base_fail(err, BASE_CLOSED, "the device has failed: %.160s", engine->lost.text);
    base_code code = decide(engine, first, count, cached, verdict, err);
    if (code != BASE_OK)
        return code;
    engine->waiting += count;
    for (eng_sequence *seq = first; seq != NULL; seq = seq->next) {
        seq->number = seq->waiter.entry.number = ++engine->numbers;
        eng_admission_enter(engine->admission, &seq->waiter, seq->request.weight);
    }
    if (engine->inbox_tail != NULL)
        engine->inbox_tail->next = first;
    else
        engine->inbox_head = first;
    engine->inbox_tail = last;
    ENG_COUNT(engine, requests, count);
    ENG_GAUGE(engine, queued, engine->waiting);
    pthread_cond_signal(&engine->wake);
    return BASE_OK;
}

base_code eng_submit_all(eng_engine *engine, const eng_request *requests, uint32_t count,
                         eng_verdict *verdict, base_err *err)
{
    eng_verdict found = {0};
    eng_sequence *first = NULL, *last = NULL;
    base_code code = BASE_OK;
    for (uint32_t i = 0; i < count && code == BASE_OK; i++) {
        eng_sequence *seq = NULL;
        code = check_request(engine, &requests[i], err);
        if (code == BASE_OK)
            code = sequence_create(&seq, engine, &requests[i], err);
        if (code != BASE_OK)
            break;
        *(last != NULL ? &last->next : &first) = seq;
        last = seq;
    }
    if (code == BASE_OK && count > 0) {
        uint32_t cached = first->request.prompt_logprobs
                              ? 0
                              : eng_peek_cached(engine, first->request.space, first->request.tokens,
                                                first->request.token_count - 1);
        pthread_mutex_lock(&engine->lock);
        code = post(engine, first, last, count, cached, &found, err);
        pthread_mutex_unlock(&engine->lock);
        if (verdict != NULL)
            *verdict = found;
        /* By the time that the engine has found its way to the first pass, they are awake, too. */
        kn_device_wake(eng_model_device(engine->model));
    }
    while (code != BASE_OK && first != NULL) {
        eng_sequence *next = first->next;
        eng__sequence_destroy(first);
        first = next;
    }
    return code;
}

void eng_cancel(eng_engine *engine, uint64_t id)
{
    pthread_mutex_lock(&engine->lock);
    if (engine->cancels.count == engine->cancels.max) {
        uint64_t *more = realloc(engine->cancels.ids, 2 * engine->cancels.max * sizeof *more);
        if (more != NULL) {
            engine->cancels.ids = more;
            engine->cancels.max *= 2;
        }
    }
    if (engine->cancels.count < engine->cancels.max) /* else the request runs to its own end */
        engine->cancels.ids[engine->cancels.count++] = id;
    pthread_cond_signal(&engine->wake);
    pthread_mutex_unlock(&engine->lock);
}

uint32_t eng_peek_cached(eng_engine *engine, uint64_t space, const int32_t *tokens,
                         uint32_t token_count)
{
    pthread_mutex_lock(&engine->index_lock);
    uint32_t cached = kv_index_peek(engine->index, space, tokens, token_count);
    pthread_mutex_unlock(&engine->index_lock);
    if (engine->tier.store != NULL)
        cached = (uint32_t)base_max(cached,
                                    kv_store_peek(engine->tier.store, space, tokens, token_count));
    return cached;
}

uint32_t eng_list_index(eng_engine *engine, eng_edge *out, uint32_t max)
{
    kv_edge *edges = calloc(max, sizeof *edges);
    if (edges == NULL)
        return 0;
    pthread_mutex_lock(&engine->index_lock);
    uint32_t count = kv_index_list(engine->index, edges, max, base_now_ns());
    pthread_mutex_unlock(&engine->index_lock);
    for (uint32_t i = 0; i < count; i++) {
        const kv_edge *e = &edges[i];
        out[i] = (eng_edge){e->id,    e->parent,   e->space,  e->start,  e->tokens,
                            e->pages, e->children, e->in_use, e->pinned, e->used};
    }
    free(edges);
    return count;
}

/* ---- orders ---- */

/* Hands an order to the engine thread and waits for it. */
static base_code give_order(eng_engine *engine, eng_order *order, base_err *err)
{
    pthread_mutex_lock(&engine->lock);
    if (engine->stopped) {
        base_fail(&order->err, BASE_CLOSED, "the engine is stopping");
    } else {
        order->next = engine->orders;
        engine->orders = order;
        pthread_cond_signal(&engine->wake);
        while (!order->done)
            pthread_cond_wait(&engine->ordered, &engine->lock);
    }
    pthread_mutex_unlock(&engine->lock);
    return order->err.code == BASE_OK ? BASE_OK
                                      : base_fail(err, order->err.code, "%s", order->err.text);
}

void eng_pin(eng_engine *engine, uint64_t space, const int32_t *tokens, uint32_t count,
             uint64_t seconds)
{
    uint64_t now = base_now_ns(), length = base_min(seconds, UINT64_MAX / 4 / SECOND_NS);
    eng_order order = {.kind = ENG_ORDER_PIN,
                       .space = space,
                       .tokens = tokens,
                       .count = count,
                       .until_ns = length > 0 ? now + length * SECOND_NS : 0,
                       .err = BASE_ERR_INIT};
    give_order(engine, &order, NULL);
}

/* Waits until what was erased is gone from the files. */
static base_code flush_disk(eng_engine *engine, base_err *err)
{
    if (engine->tier.store == NULL || kv_store_flush(engine->tier.store))
        return BASE_OK;
    return base_fail(err, BASE_IO, "erased pages may still be on disk: it refuses writing");
}

base_code eng_erase(eng_engine *engine, uint64_t space, const int32_t *tokens, uint32_t count,
                    uint32_t kept, base_err *err)
{
    eng_order order = {.kind = ENG_ORDER_ERASE,
                       .space = space,
                       .tokens = tokens,
                       .count = count,
                       .kept = kept,
                       .err = BASE_ERR_INIT};
    base_code code = give_order(engine, &order, err);
    return code == BASE_OK ? flush_disk(engine, err) : code;
}

base_code eng_drop(eng_engine *engine, uint64_t space, base_err *err)
{
    eng_order order = {.kind = ENG_ORDER_DROP, .space = space, .err = BASE_ERR_INIT};
    base_code code = give_order(engine, &order, err);
    return code == BASE_OK ? flush_disk(engine, err) : code;
}

bool eng_check(eng_engine *engine, base_err *err)
{
    eng_order order = {.kind = ENG_ORDER_CHECK, .err = BASE_ERR_INIT};
    flush_disk(engine, NULL); /* what waits to be written is held; after an error nothing waits */
    return give_order(engine, &order, err) == BASE_OK;
}

/* ---- text, for any thread ---- */

base_code eng_render(const eng_engine *engine, eng_prompt *out, const eng_chat *chat,
                     uint32_t token_max, base_buf *text, base_arena *arena, base_err *err)
{
    return eng_codec_render(engine->codec, out, chat,
                            token_max > 0 ? token_max : engine->info.context_max,
                            engine->info.context_max, text, arena, err);
}

base_code eng_tokenize(const eng_engine *engine, int32_t **tokens, uint32_t *token_count,
                       eng_text text, bool specials, uint32_t token_max, base_arena *arena,
                       base_err *err)
{
    eng_ids ids;
    eng_ids_init(&ids, token_max);
    base_code code = eng_tok_encode(engine->tok, &ids, text.data, text.length, specials, err);
    if (code == BASE_OK) {
        *tokens = base_arena_alloc(arena, base_max(ids.count, 1) * sizeof **tokens);
        if (*tokens == NULL)
            code = base_fail(err, BASE_NOMEM, "out of memory for %zu tokens", ids.count);
        else if (ids.count > 0)
            memcpy(*tokens, ids.data, ids.count * sizeof **tokens);
        *token_count = (uint32_t)ids.count;
    }
    eng_ids_deinit(&ids);
    return code;
}

base_code eng_detokenize(const eng_engine *engine, base_buf *out, const int32_t *tokens,
                         uint32_t token_count, base_err *err)
{
    for (uint32_t i = 0; i < token_count; i++) {
        size_t length;
        const char *bytes = eng_tok_bytes(engine->tok, tokens[i], &length);
        if (bytes == NULL)
            return base_fail_param(err, BASE_INVALID, "tokens",
                                   "token %d at %u is not in the vocabulary", tokens[i], i);
        base_buf_add(out, bytes, length);
    }
    return out->failed ? base_fail(err, BASE_NOMEM, "out of memory for text") : BASE_OK;
}

bool eng_run_seen(const eng_engine *engine, uint32_t *seen, eng_text *rest, const int32_t *tokens,
                  uint32_t token_count, eng_text reasoning, eng_text text)
{
    return eng_codec_run_seen(engine->codec, seen, rest, tokens, token_count, reasoning, text);
}

/* ---- start and stop ---- */

static base_code load_text(eng_engine *engine, base_err *err)
{
    base_code code = eng_tok_load(&engine->tok, eng_model_tokenizer_path(engine->model), err);
    if (code == BASE_OK && eng_tok_vocab(engine->tok) > engine->config->vocab)
        code = base_fail(err, BASE_FORMAT,
                         "tokenizer.json: id %u is outside vocab_size %u of config.json",
                         eng_tok_vocab(engine->tok) - 1, engine->config->vocab);
    if (code == BASE_OK)
        code = eng_codec_create(&engine->codec, engine->tok, engine->config->identity,
                                engine->config->thinking, err);
    if (code == BASE_OK)
        code = eng_constrain_vocab(&engine->vocab, engine->codec, engine->tok, err);
    if (code != BASE_OK)
        return code;
    uint32_t count;
    const int32_t *ends = eng_model_end_tokens(engine->model, &count);
    engine->end_tokens[engine->end_token_count++] = eng_codec_end_token(engine->codec);
    for (uint32_t i = 0; i < count && engine->end_token_count < 8; i++)
        if (!eng__is_end_token(engine, ends[i]))
            engine->end_tokens[engine->end_token_count++] = ends[i];
    return BASE_OK;
}

static base_code load_draft(eng_engine *engine, base_err *err)
{
    char path[4096];
    const char *dir = engine->options.draft;
    if (engine->options.draft_tokens == 0 || (dir != NULL && dir[0] == '\0'))
        return BASE_OK;
    if (dir == NULL) {
        if (eng_model_dir(engine->model) == NULL)
            return BASE_OK;
        snprintf(path, sizeof path, "%s/dspark/config.json", eng_model_dir(engine->model));
        if (access(path, R_OK) != 0)
            return BASE_OK;
        snprintf(path, sizeof path, "%s/dspark", eng_model_dir(engine->model));
        dir = path;
    }
    base_code code =
        eng_draft_load(&engine->draft, engine->model, dir, engine->options.step_rows_max,
                       engine->options.sequences_max, err);
    if (code == BASE_OK && eng_draft_block(engine->draft) > ENG_SPEC_BLOCK_MAX)
        code = base_fail(err, BASE_UNSUPPORTED, "%s: dspark_block_size %u exceeds %u", dir,
                         eng_draft_block(engine->draft), ENG_SPEC_BLOCK_MAX);
    return code;
}

static base_code make_pages(eng_engine *engine, base_err *err)
{
    kn_kv_shape shape = eng_model_kv_shape(engine->model, 1), draft_shape = {0};
    engine->info.page_bytes = kn_kv_page_bytes(&shape);
    engine->info.page_tokens = KV_PAGE_TOKENS;
    size_t each = engine->info.page_bytes;
    if (engine->draft != NULL) {
        draft_shape = eng_draft_kv_shape(engine->draft, 1);
        each += kn_kv_page_bytes(&draft_shape);
    }
    kn_device *on = eng_model_device(engine->model);
    uint64_t bytes = engine->options.kv_bytes;
    size_t available = 0, total = 0;
    if (!engine->options.null)
        on->backend->memory(on, &available, &total);
    if (total > 0) /* the steps' features are still to come, and others use the device, too */
        bytes = base_min(bytes, available / 10 * 9);
    uint64_t count = bytes / each;
    engine->pages_max = (engine->info.context_max + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS + 1;
    if (count < engine->pages_max + 1)
        return base_fail_param(
            err, BASE_INVALID, "engine.kv_bytes_max",
            "engine.kv_bytes_max %llu is too small for one context of %u tokens, which takes %llu",
            (unsigned long long)engine->options.kv_bytes, engine->info.context_max,
            (unsigned long long)((engine->pages_max + 1) * each));
    engine->info.page_count = shape.page_count = draft_shape.page_count =
        (uint32_t)base_min(count, UINT32_MAX / 2);
    kn_device *device = eng_model_device(engine->model);
    base_code code = kn_kv_create(&engine->kv, device, &shape, err);
    if (code == BASE_OK && engine->draft != NULL)
        code = kn_kv_create(&engine->draft_kv, device, &draft_shape, err);
    if (code == BASE_OK)
        code = kv_pool_create(&engine->pool, shape.page_count, err);
    if (code == BASE_OK)
        code = kv_index_create(
            &engine->index, engine->pool,
            (uint32_t)base_max((size_t)shape.page_count * INDEX_NODES_PER_PAGE, INDEX_NODES_MIN),
            err);
    if (code != BASE_OK)
        return code;
    kv_index_set_policy(engine->index, engine->options.evict_lru ? KV_POLICY_LRU : KV_POLICY_VALUE,
                        SECOND_NS);
    engine->draft_whole = calloc(shape.page_count, sizeof *engine->draft_whole);
    if (engine->draft_whole == NULL || !eng_past_init(&engine->past, shape.page_count))
        return base_fail(err, BASE_NOMEM, "out of memory for %u pages", shape.page_count);
    return BASE_OK;
}

static base_code make_step_memory(eng_engine *engine, base_err *err)
{
    const eng_options *options = &engine->options;
    uint32_t seqs = options->sequences_max, rows = options->step_rows_max;
    engine->picks_max = (uint32_t)base_min(rows, seqs + PICKS_EXTRA);
    const uint32_t *layers;
    size_t features = engine->draft != NULL ? eng_draft_features(engine->draft, &layers) : 0;
    size_t block = engine->draft != NULL ? eng_draft_block(engine->draft) : 0;
    size_t scratch = base_max(eng_sample_scratch(engine->config->vocab),
                              ((size_t)engine->info.context_max + 1) * sizeof(int32_t));
    engine->slot_max = 256;
    engine->cancels.max = engine->cancels_taken.max = 64;
    const eng_admission_options admission = {
        .slots_max = seqs,
        .queue_max = options->queue_max,
        .queue_ns_max = (double)options->queue_ns_max,
        .tenant_percent = options->tenant_percent,
    };
    base_code code = eng_admission_create(&engine->admission, &admission, err);
    if (code != BASE_OK)
        return code;
    engine->forecast = eng_admission_forecast(engine->admission);
    engine->chunk = options->prefill_chunk;
    bool good = (engine->active = calloc(seqs, sizeof *engine->active)) != NULL &&
                (engine->left = calloc(seqs, sizeof *engine->left)) != NULL &&
                (engine->plan = calloc(seqs, sizeof *engine->plan)) != NULL &&
                (engine->order = calloc(seqs, sizeof *engine->order)) != NULL &&
                (engine->row_token = calloc(rows, sizeof *engine->row_token)) != NULL &&
                (engine->row_pos = calloc(rows, sizeof *engine->row_pos)) != NULL &&
                (engine->row_seq = calloc(rows, sizeof *engine->row_seq)) != NULL &&
                (engine->pick = calloc(rows, sizeof *engine->pick)) != NULL &&
                (engine->pick_start = calloc(seqs, sizeof *engine->pick_start)) != NULL &&
                (engine->row_pages = calloc(seqs, sizeof *engine->row_pages)) != NULL &&
                (engine->logits = calloc((size_t)engine->picks_max * engine->config->vocab,
                                         sizeof(float))) != NULL &&
                (engine->scores = calloc(engine->picks_max, sizeof *engine->scores)) != NULL &&
                (engine->scratch = malloc(scratch)) != NULL &&
                (engine->slots = calloc(engine->slot_max, sizeof *engine->slots)) != NULL &&
                (engine->parts = calloc(engine->slot_max, sizeof *engine->parts)) != NULL &&
                (engine->offers = calloc(seqs, sizeof *engine->offers)) != NULL &&
                (engine->histories = calloc(seqs, sizeof *engine->histories)) != NULL &&
                (engine->cancels.ids = calloc(64, sizeof(uint64_t))) != NULL &&
                (engine->cancels_taken.ids = calloc(64, sizeof(uint64_t))) != NULL;
    if (good && features > 0)
        good =
            (engine->kept_token = calloc(ENG_KEPT_MAX, sizeof *engine->kept_token)) != NULL &&
            (engine->kept_pos = calloc(ENG_KEPT_MAX, sizeof *engine->kept_pos)) != NULL &&
            (engine->kept_zeros = calloc(ENG_KEPT_MAX, sizeof *engine->kept_zeros)) != NULL &&
            (engine->draft_inputs = calloc(seqs, sizeof *engine->draft_inputs)) != NULL &&
            (engine->draft_tokens = calloc(seqs * block, sizeof *engine->draft_tokens)) != NULL &&
            (engine->draft_confidence = calloc(seqs * block, sizeof *engine->draft_confidence)) !=
                NULL;
    base_buf_init(&engine->part_text, 0);
    if (!good)
        return base_fail(err, BASE_NOMEM, "out of memory for a step of %u rows", rows);
    const eng_piece piece = {&engine->features,
                             (rows + ENG_KEPT_MAX) * features * engine->config->hidden,
                             sizeof *engine->features};
    return eng_memory_take(&engine->feature_memory, eng_model_device(engine->model), &piece, 1,
                           err);
}

static void fill_info(eng_engine *engine)
{
    eng_info *info = &engine->info;
    info->name = engine->config->name;
    info->backend = eng_model_device(engine->model)->ops->name;
    info->kv = engine->options.kv;
    snprintf(info->fingerprint, sizeof info->fingerprint, "%s",
             eng_model_fingerprint(engine->model));
    /* The plain formula adds up in another order than what the cpu's version names. */
    snprintf(info->numerics, sizeof info->numerics, "%s",
             strcmp(info->backend, "cpu-ref") == 0
                 ? "cpu-ref"
                 : eng_model_device(engine->model)->backend->numerics);
    snprintf(info->template_id, sizeof info->template_id, "%s", eng_codec_digest(engine->codec));
    if (engine->options.null) {
        info->backend = "null";
        snprintf(info->fingerprint, sizeof info->fingerprint, "null");
        snprintf(info->numerics, sizeof info->numerics, "null");
    }
    info->vocab = eng_tok_vocab(engine->tok);
    info->layers = engine->config->layers;
    info->hidden = engine->config->hidden;
    info->weight_bytes = eng_model_weight_bytes(engine->model);
    const kn_device *device = eng_model_device(engine->model);
    const double gib = 1 << 30;
    if (!eng_memory_is_shared(device))
        base_log(BASE_LOG_INFO,
                 "device backend=%s device=\"%s\" weights_gib=%.2f pages=%u pages_gib=%.2f",
                 device->backend->name, device->backend->describe(device),
                 (double)info->weight_bytes / gib, info->page_count,
                 (double)info->page_count * (double)info->page_bytes / gib);
    info->draft_block = engine->draft != NULL ? eng_draft_block(engine->draft) : 0;
    info->thinking = engine->config->thinking;
}

static base_code check_options(const eng_options *options, base_err *err)
{
    if (options->sequences_max == 0 || options->step_rows_max < options->sequences_max ||
        options->prefill_chunk == 0)
        return base_fail_param(
            err, BASE_INVALID, "engine.step_rows_max",
            "engine.step_rows_max %u must be at least engine.sequences_max %u, both at least 1",
            options->step_rows_max, options->sequences_max);
    return BASE_OK;
}

base_code eng_create(eng_engine **out, const eng_options *options, base_err *err)
{
    base_code code = check_options(options, err);
    if (code != BASE_OK)
        return code;
    eng_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory for the engine");
    engine->options = *options;
    if (engine->options.tenant_percent == 0)
        engine->options.tenant_percent = 100;
    if (options->null) {
        engine->options.draft_tokens = 0;
        engine->options.disk = NULL;
        engine->options.costs = NULL;
    }
    options = &engine->options;
    engine->options.costs = engine->costs_path = options->costs ? strdup(options->costs) : NULL;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_mutex_init(&engine->index_lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_cond_init(&engine->ordered, NULL);
    eng_spec_init(&engine->spec, options->draft_tokens > 0 ? (uint32_t)options->draft_tokens : 0);
    eng_model_options model = {.backend = options->null ? "cpu" : options->backend,
                               .modules = options->modules,
                               .kernels = options->kernels,
                               .variant = options->variant,
                               .kv = options->kv,
                               .threads = options->threads,
                               .rows_max = options->step_rows_max,
                               .context_max = options->context_max,
                               .packed = options->packed,
                               .packed_bytes_max = options->packed_bytes_max};
    code = eng_model_load(&engine->model, options->model, &model, err);
    if (code == BASE_OK) {
        engine->config = eng_model_get_config(engine->model);
        engine->info.context_max = engine->config->context_max;
        if (options->context_max > 0 && options->context_max < engine->info.context_max)
            engine->info.context_max = options->context_max;
        code = load_text(engine, err);
    }
    if (code == BASE_OK)
        code = load_draft(engine, err);
    if (code == BASE_OK)
        code = make_pages(engine, err);
    if (code == BASE_OK)
        code = make_step_memory(engine, err);
    if (code == BASE_OK) {
        fill_info(engine);
        if (options->null)
            code = eng__null_open(engine, err);
    }
    if (code == BASE_OK) {
        eng__load_costs(engine);
        eng_forecast_init(engine->forecast, &engine->spec.learned.verify,
                          &engine->spec.learned.prefill);
        code = eng__tier_open(engine, err);
    }
    if (code == BASE_OK) {
        eng__update_gauges(engine);
        if (pthread_create(&engine->thread, NULL, eng__run, engine) != 0)
            code = base_fail(err, BASE_IO, "the engine thread cannot be started");
        else
            engine->thread_running = true;
    }
    if (code != BASE_OK) {
        eng_destroy(engine);
        return code;
    }
    *out = engine;
    return BASE_OK;
}

void eng_destroy(eng_engine *engine)
{
    if (engine == NULL)
        return;
    if (engine->thread_running) {
        pthread_mutex_lock(&engine->lock);
        engine->stop = true;
        pthread_cond_signal(&engine->wake);
        pthread_mutex_unlock(&engine->lock);
        pthread_join(engine->thread, NULL);
    }
    eng__tier_close(engine);
    kv_index_destroy(engine->index);
    kv_pool_destroy(engine->pool);
    kn_kv_destroy(engine->draft_kv);
    kn_kv_destroy(engine->kv);
    eng_memory_free(&engine->feature_memory);
    eng_draft_destroy(engine->draft);
    eng_vocab_destroy(engine->vocab);
    eng_codec_destroy(engine->codec);
    eng_tok_destroy(engine->tok);
    eng_model_destroy(engine->model);
    base_buf_deinit(&engine->part_text);
    eng_past_deinit(&engine->past);
    free(engine->costs_path);
    free(engine->draft_whole);
    eng_admission_destroy(engine->admission);
    eng_ids_deinit(&engine->script);
    free(engine->left);
    free(engine->active);
    free(engine->plan);
    free(engine->order);
    free(engine->row_token);
    free(engine->row_pos);
    free(engine->row_seq);
    free(engine->pick);
    free(engine->pick_start);
    free(engine->row_pages);
    free(engine->logits);
    free(engine->kept_token);
    free(engine->kept_pos);
    free(engine->kept_zeros);
    free(engine->scores);
    free(engine->scratch);
    free(engine->draft_inputs);
    free(engine->offers);
    free(engine->histories);
    free(engine->draft_tokens);
    free(engine->draft_confidence);
    free(engine->slots);
    free(engine->parts);
    free(engine->cancels.ids);
    free(engine->cancels_taken.ids);
    pthread_cond_destroy(&engine->ordered);
    pthread_cond_destroy(&engine->wake);
    pthread_mutex_destroy(&engine->index_lock);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

const eng_info *eng_get_info(const eng_engine *engine)
{
    return &engine->info;
}

eng_stats eng_get_stats(const eng_engine *engine)
{
#define READ(field) .field = atomic_load_explicit(&engine->stats.field, memory_order_relaxed)
    eng_stats stats = {READ(requests),         READ(finished),
                       READ(cancelled),        READ(failed),
                       READ(prompt_tokens),    READ(cached_tokens),
                       READ(restored_tokens),  READ(output_tokens),
                       READ(reasoning_tokens), READ(drafted),
                       READ(accepted),         READ(steps),
                       READ(step_rows),        READ(busy_ns),
                       READ(evicted_pages),    READ(forced_tokens),
                       READ(copied),           READ(copied_accepted),
                       READ(predicted),        READ(predicted_accepted),
                       READ(forward_ns),       READ(draft_ns),
                       READ(sample_ns),        READ(ahead_layers),
                       READ(ahead_tokens),     READ(queued),
                       READ(running),          READ(prefilling),
                       READ(pages_free),       READ(index_nodes),
                       READ(index_pages),      .pages_total = engine->info.page_count};
#undef READ
    pthread_mutex_lock((pthread_mutex_t *)&engine->lock);
    eng_admission_count(engine->admission, &stats);
    pthread_mutex_unlock((pthread_mutex_t *)&engine->lock);
    if (engine->tier.store == NULL)
        return stats;
    kv_store_stats disk = kv_store_get_stats(engine->tier.store);
    stats.disk_open = true;
    stats.disk_records = disk.records;
    stats.disk_bytes = disk.bytes;
    stats.disk_queued = disk.queued;
    stats.disk_written_bytes = disk.written_bytes;
    stats.disk_read_bytes = disk.read_bytes;
    stats.disk_refused =
        disk.refused_queue + disk.refused_budget + disk.refused_stopped + disk.refused_records;
    stats.disk_dropped = disk.evicted + disk.corrupt;
    stats.disk_corrupt = disk.corrupt;
    stats.disk_errors = disk.disk_full + disk.write_errors + disk.read_errors;
    stats.disk_paused = !disk.writing;
    stats.disk_full = disk.full;
    return stats;
}
