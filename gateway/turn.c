/* gw_turn: see the header for states and owners. */
#include "gateway/turn.h"

#include <openssl/sha.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/body.h"
#include "gateway/conf.h"
#include "gateway/idempotency.h"
#include "gateway/metrics.h"
#include "gateway/structured.h"
#include "gateway/tenant.h"
#include "gateway/turn_internal.h"

#define ARENA_FIRST_BYTES (32u << 10)
/* Beside the tree: joined texts, tools and canonical forms, each at most the body; tokens of the
 * prompt. */
#define ARENA_BYTES_MIN (64u << 20)
#define ARENA_BODIES 4
/* Random seeds fit a double, so that a client in JavaScript can send one back. */
#define SEED_BITS 53
/* A prompt that is only counted may be longer than any window; its bytes are bounded as all
 * bodies'. */
#define DRY_TOKENS_MAX (1u << 26)
#define LOCKED_RETRY_MS 1000
#define PRIORITY_MAX 10 /* the engine's */

uint64_t gw_request_id(void)
{
    static atomic_uint_fast64_t ids = 1;
    return atomic_fetch_add(&ids, 1);
}

/* ---- writing, as long as there is someone to read ---- */

static void free_if_over(gw_turn *turn);
static void on_event(gw_port *port, const eng_event *event);

bool gw_turn_heard(const gw_turn *turn)
{
    return turn->first->exchange || turn->first->tape;
}

/* Whether an answer is worth keeping for a retry. */
static bool went_well(const gw_turn *first)
{
    bool well = first->status == 200;
    for (uint32_t i = 0; i < first->choice_count && well; i++) {
        const gw_turn *turn = first->choices[i];
        well = !turn->error.code && !turn->lossy &&
               (!turn->done_seen || turn->finish <= ENG_FINISH_LENGTH);
    }
    return well;
}

/* The tape is written to its end. */
static void let_go_tape(gw_turn *turn)
{
    gw_tape *tape = turn->tape;
    if (turn->stream_name[0])
        gw_tapes_drop(turn->app->tapes, turn->stream_name, tape);
    if (turn->retry_name[0] && !went_well(turn))
        gw_tapes_drop(turn->app->tapes, turn->retry_name, tape);
    turn->stream_name[0] = turn->retry_name[0] = '\0';
    turn->tape = NULL;
    gw_tape_unref(tape);
}

void gw_turn_publish(gw_turn *turn, const char *name)
{
    gw_tape *tape = turn->tape ? turn->tape : gw_tape_create(), *other = NULL;
    if (!tape || !turn->app->tapes) {
        gw_tape_unref(turn->tape ? NULL : tape);
        return;
    }
    snprintf(turn->stream_name, sizeof turn->stream_name, "%s", name);
    if (gw_tapes_find(turn->app->tapes, &other, NULL, name, tape, 0) || other) {
        turn->stream_name[0] = '\0'; /* nobody finds it; its own client reads it all the same */
        gw_tape_unref(other);
    }
    if (!turn->tape && turn->exchange)
        gw_tape_attach(tape, turn->exchange, 0, false);
    turn->exchange = NULL;
    turn->tape = tape;
}

void gw_turn_stream_begin(gw_turn *turn)
{
    turn = turn->first;
    if (!gw_turn_heard(turn))
        return;
    static const gw_header headers[] = {{"content-type", "text/event-stream; charset=utf-8"},
                                        {"cache-control", "no-cache, no-transform"},
                                        {"x-accel-buffering", "no"}};
    turn->status = 200;
    turn->written_ns = base_now_ns();
    if (turn->tape) {
        gw_tape_begin(turn->tape);
        return;
    }
    gw_stream_begin(turn->exchange, 200, headers, sizeof(headers) / sizeof(headers[0]));
}

bool gw_turn_streaming(const gw_turn *turn)
{
    return turn->stream && turn->first->status;
}

void gw_turn_write(gw_turn *turn, const void *bytes, size_t length)
{
    turn = turn->first;
    if (!gw_turn_heard(turn))
        return;
    turn->written_ns = base_now_ns();
    if (!turn->tape)
        gw_stream_write(turn->exchange, bytes, length);
    else if (!gw_tape_add(turn->tape, bytes, length))
        turn->lossy = true; /* a hole: cut at the end */
}

void gw_turn_stream_end(gw_turn *turn)
{
    turn = turn->first;
    gw_exchange *exchange = turn->exchange;
    turn->exchange = NULL;
    if (turn->tape) {
        (turn->lossy ? gw_tape_cut : gw_tape_end)(turn->tape);
        let_go_tape(turn);
    } else if (exchange) {
        gw_stream_end(exchange);
    }
}

void gw_turn_respond_json(gw_turn *turn, const base_buf *body)
{
    turn = turn->first;
    if (!gw_turn_heard(turn))
        return;
    if (body->failed) {
        gw_error_row row = gw_error_map(BASE_NOMEM);
        gw_turn_respond_error(turn, &row, NULL, "no memory for the answer");
        return;
    }
    static const gw_header headers[] = {{"content-type", "application/json"}};
    gw_exchange *exchange = turn->exchange;
    turn->exchange = NULL;
    turn->status = 200;
    if (turn->tape) {
        gw_tape_answer(turn->tape, body->data, body->length);
        let_go_tape(turn);
    } else {
        gw_respond(exchange, 200, headers, 1, body->data, body->length);
    }
}

void gw_turn_respond_error(gw_turn *turn, const gw_error_row *row, const char *param,
                           const char *message)
{
    turn = turn->first;
    if (!gw_turn_heard(turn))
        return;
    gw_exchange *exchange = turn->exchange;
    turn->exchange = NULL;
    turn->status = row->status;
    if (turn->tape) {
        gw_tape_refuse(turn->tape, row, param, message);
        let_go_tape(turn);
    } else {
        gw_error_respond_row(exchange, row, param, message);
    }
}

base_code gw_turn_reject(gw_turn *turn, base_err *err, int status, const char *type,
                         const char *code, const char *param, const char *fmt, ...)
{
    char text[sizeof(err->text)];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    turn->error_row = (gw_error_row){status, type, code, 0, -1};
    return base_fail_param(err, status == 404 ? BASE_NOT_FOUND : BASE_INVALID, param ? param : "",
                           "%s", text);
}

static void fail(gw_turn *turn, const base_err *err)
{
    gw_error_row row = turn->error_row.status ? turn->error_row : gw_error_map(err->code);
    if (gw_turn_streaming(turn))
        gw_metrics_add(turn->app->metrics, GW_STREAM_FAILED, 1);
    turn->dialect->fail(turn, &row, err->param, err->text);
}

/* ---- the answer ---- */

/* An array of `size`-byte elements with room for one more. */
static void *room(void *array, uint32_t *capacity, uint32_t count, size_t size)
{
    if (count < *capacity)
        return array;
    uint32_t wanted = *capacity ? *capacity * 2 : 64;
    void *more = realloc(array, (size_t)wanted * size);
    if (more)
        *capacity = wanted;
    return more;
}

#define ROOM(turn, array, count, capacity)                                                         \
    ({                                                                                             \
        void *more_ =                                                                              \
            room((turn)->array, &(turn)->capacity, (turn)->count, sizeof(*(turn)->array));         \
        if (more_)                                                                                 \
            (turn)->array = more_;                                                                 \
        else                                                                                       \
            (turn)->lossy = true;                                                                  \
        more_ != NULL;                                                                             \
    })

/* A prompt that asks for an answer may end with the mark of the thinking mode, behind the beginning
 * of the assistant's turn: that token is part of the item which the next prompt brings back. */
static void begin_run(gw_turn *turn)
{
    const eng_prompt *prompt = &turn->prompt;
    bool marked = prompt->thinking == ENG_THINK_ENABLED || prompt->thinking == ENG_THINK_DISABLED;
    if (!marked || turn->chat.no_generation_prompt || turn->chat.continue_last || turn->run_count ||
        !prompt->token_count)
        return;
    if (ROOM(turn, run, run_count, run_capacity)) {
        turn->run[turn->run_count++] = prompt->tokens[prompt->token_count - 1];
        turn->lead = 1;
    }
}

static void add_tokens(gw_turn *turn, const eng_event *event)
{
    begin_run(turn);
    for (uint32_t i = 0; i < event->token_count; i++)
        if (ROOM(turn, run, run_count, run_capacity))
            turn->run[turn->run_count++] = event->tokens[i];
    turn->usage.output_tokens += event->token_count; /* until the end says it */
    if (event->token_count && ROOM(turn, steps, step_count, step_capacity))
        turn->steps[turn->step_count++] = event->token_count;
}

/* The buffer that has what dialects are given of a part, NULL for none. */
static const base_buf *buffer_of(gw_turn *turn, eng_part_kind kind, uint32_t call)
{
    if (kind == ENG_PART_TEXT)
        return &turn->text;
    if (kind == ENG_PART_REASONING)
        return &turn->reasoning;
    if (call >= turn->call_count)
        return NULL;
    return kind == ENG_PART_CALL_BEGIN  ? &turn->calls[call].name
           : kind == ENG_PART_CALL_ARGS ? gw_call_shown(&turn->calls[call])
                                        : NULL;
}

static bool add_text(gw_turn *turn, base_buf *buf, const eng_part *part)
{
    base_buf_add(buf, part->text, part->length);
    turn->lossy |= buf->failed;
    return !buf->failed;
}

/* Adds a part to the answer; false if it has no place in it. Arguments of a custom tool's call
 * become what they are to the client. */
static bool add_part(gw_turn *turn, eng_part *part)
{
    if (part->kind == ENG_PART_TEXT || part->kind == ENG_PART_REASONING)
        return add_text(turn, part->kind == ENG_PART_TEXT ? &turn->text : &turn->reasoning, part);
    if (part->kind == ENG_PART_CALL_BEGIN) {
        if (part->call != turn->call_count || !ROOM(turn, calls, call_count, call_capacity))
            return false;
        gw_turn_call *call = &turn->calls[turn->call_count++];
        memset(call, 0, sizeof(*call));
        call->id = gw_id_mint("call_");
        if (!add_text(turn, &call->name, part))
            return false;
        gw_call_named(call, turn->custom_tools);
        return true;
    }
    if (part->call >= turn->call_count)
        return false;
    gw_turn_call *call = &turn->calls[part->call];
    if (part->kind == ENG_PART_CALL_END) {
        call->whole = true;
        return true;
    }
    eng_text shown = gw_call_add(call, part->text, part->length);
    part->text = shown.data;
    part->length = shown.length;
    turn->lossy |= gw_call_failed(call);
    return !gw_call_failed(call);
}

/* The client takes less than there is. */
static bool is_slow(const gw_turn *turn)
{
    gw_exchange *exchange = turn->first->exchange;
    return exchange && gw_turn_streaming(turn) && gw_stream_paused(exchange);
}

static void flush_held(gw_turn *turn, bool all)
{
    uint32_t i = 0;
    for (; i < turn->held_count && (all || !is_slow(turn)); i++) {
        const gw_held *held = &turn->held[i];
        const base_buf *buf = buffer_of(turn, held->kind, held->call);
        eng_part part = {held->kind, held->call, buf && buf->data ? buf->data + held->offset : "",
                         held->length};
        turn->dialect->part(turn, &part);
    }
    if (i == 0)
        return; /* `held` may be NULL */
    memmove(turn->held, turn->held + i, (turn->held_count - i) * sizeof(*turn->held));
    turn->held_count -= i;
}

/* A stream whose client is slow gets few, long records later instead of many short ones that wait
 * in memory. */
static void give_part(gw_turn *turn, const eng_part *made)
{
    eng_part shown = *made, *part = &shown;
    if (!add_part(turn, part))
        return;
    bool wait = turn->held_count || is_slow(turn);
    if (!wait || turn->exact_steps) {
        turn->dialect->part(turn, part);
        return;
    }
    const base_buf *buf = buffer_of(turn, part->kind, part->call);
    gw_held *last = turn->held_count ? &turn->held[turn->held_count - 1] : NULL;
    if (last && last->kind == part->kind && last->call == part->call) {
        last->length += part->length;
        return;
    }
    if (!ROOM(turn, held, held_count, held_capacity)) {
        /* Without memory for the list the order comes first: all goes out now. */
        flush_held(turn, true);
        turn->dialect->part(turn, part);
        return;
    }
    turn->held[turn->held_count++] =
        (gw_held){part->kind, part->call, buf ? buf->length - part->length : 0, part->length};
}

/* ---- the end ---- */

static void let_go_engine(gw_turn *turn)
{
    turn->engine_pending = false;
    if (turn->port_open)
        gw_port_close(&turn->port);
    turn->port_open = false;
}

/* The next turn in line may begin. */
static void let_go_lock(gw_turn *turn)
{
    gw_lock_let_go(turn->app->locks, &turn->lock);
}

static bool is_pending(const gw_turn *turn)
{
    return turn->busy || turn->worker_pending || turn->engine_pending || turn->commit_pending;
}

static void log_over(const gw_turn *turn)
{
    base_log(BASE_LOG_INFO,
             "turn_over req=%s turn=%s dialect=%s tenant=%lld status=%d finish=%d prompt=%u "
             "cached=%u output=%u stored=%d "
             "ms=%llu%s%s%s%s",
             turn->request_id, turn->id.text, turn->dialect->name, (long long)turn->identity.tenant,
             turn->first->status, turn->done_seen ? (int)turn->finish : -1,
             turn->usage.prompt_tokens, turn->usage.cached_tokens, turn->usage.output_tokens,
             turn->stored, (unsigned long long)((base_now_ns() - turn->received_ns) / 1000000),
             turn->error.code ? " error=" : "",
             turn->error.code ? base_code_name(turn->error.code) : "",
             turn->first->trace.id[0] ? " trace=" : "", turn->first->trace.id);
}

/* What a choice has for itself. */
static void deinit_choice(gw_turn *turn)
{
    let_go_engine(turn);
    log_over(turn);
    if (turn->state_of_dialect && turn->dialect->deinit)
        turn->dialect->deinit(turn);
    for (uint32_t i = 0; i < turn->call_count; i++)
        gw_call_deinit(&turn->calls[i]);
    base_buf_deinit(&turn->text);
    base_buf_deinit(&turn->reasoning);
    free(turn->calls);
    free(turn->run);
    free(turn->steps);
    free(turn->held);
}

static void leave_limits(gw_turn *first)
{
    eng_usage used = gw_turn_usage(first);
    if (first->entered)
        gw_tenants_leave(first->app->tenants, first->identity.tenant,
                         (uint64_t)used.prompt_tokens - used.cached_tokens + used.output_tokens);
    first->entered = false;
}

static void free_if_over(gw_turn *turn)
{
    turn = turn->first;
    if (gw_turn_heard(turn) || is_pending(turn)) /* until then the worker may make choices */
        return;
    for (uint32_t i = 1; i < turn->choice_count; i++)
        if (is_pending(turn->choices[i]))
            return;
    turn->state = GW_TURN_OVER;
    let_go_lock(turn);
    if (atomic_load(&turn->gone)) {
        turn->status = 499;
        gw_metrics_add(turn->app->metrics, GW_CLIENT_GONE, 1);
    }
    gw_metrics_request(turn->app->metrics, turn->dialect->route, turn->status);
    gw_turn_show_end(turn);
    leave_limits(turn);
    for (uint32_t i = turn->choice_count; i-- > 0;)
        deinit_choice(turn->choices[i]);
    eng_grammar_unref(turn->request.grammar);
    json_decref(turn->json);
    base_arena_destroy(turn->arena);
    free(turn->body);
    free(turn);
}

/* All that still run end. */
static void cancel_choices(gw_turn *first)
{
    if (!atomic_load(&first->submitted))
        return;
    for (uint32_t i = 0; i < first->choice_count; i++)
        if (!first->choices[i]->done_seen)
            eng_cancel(first->app->engine, first->choices[i]->request.id);
}

/* Nobody wants the answer any more. */
static void cancel(gw_turn *turn)
{
    atomic_store(&turn->gone, true);
    /* The worker looks at `gone` after it set `submitted`: one of the two always sees the other. */
    cancel_choices(turn);
    if (!gw_lock_leave(turn->app->locks, &turn->lock))
        return;
    /* It stood in line: no one will tell its end. */
    turn->worker_pending = false;
    if (turn->tape) {
        gw_tape_cut(turn->tape);
        let_go_tape(turn);
    }
}

static void on_gone(void *ctx)
{
    gw_turn *turn = ctx;
    turn->exchange = NULL;
    cancel(turn);
    free_if_over(turn);
}

static void on_drained(void *ctx)
{
    gw_turn *turn = ctx;
    turn->busy++;
    for (uint32_t i = 0; i < turn->choice_count; i++)
        flush_held(turn->choices[i], false);
    turn->busy--;
    free_if_over(turn);
}

/* Why the answer is none; BASE_OK if it is one. */
static base_code failure(gw_turn *turn, base_err *err)
{
    switch (turn->finish) {
    case ENG_FINISH_ERROR:
        *err = turn->error;
        return err->code;
    case ENG_FINISH_DEADLINE:
        return base_fail(err, BASE_TIMEOUT, "the request did not end within its time limit");
    case ENG_FINISH_CANCELLED:
        if (!turn->dialect->tells_cut && atomic_load(&turn->first->live.cancelled)) {
            turn->error_row = (gw_error_row){503, "server_error", "cancelled", 0, 0};
            return base_fail(err, BASE_CANCELLED, "the operator cancelled the request");
        }
        if (!turn->dialect->tells_cut)
            return base_fail(err, BASE_CLOSED, "the server is shutting down");
        break;
    case ENG_FINISH_STOP:
    case ENG_FINISH_CALLS:
    case ENG_FINISH_LENGTH:
        break;
    }
    if (turn->retention == GW_RETAIN_KEPT && !turn->stored) {
        /* The client asked for a stored turn. Made but not stored, it must not be made again by a
         * retry. */
        turn->error_row = (gw_error_row){500, "server_error", "not_stored", 0, 0};
        return base_fail(err, BASE_IO, "the turn could not be stored");
    }
    return turn->lossy ? base_fail(err, BASE_NOMEM, "no memory to carry the answer") : BASE_OK;
}

/* Of the whole request, as the client was told. */
static void account(gw_turn *first)
{
    gw_outcome outcome = GW_OUTCOME_DONE;
    bool stored = true;
    for (uint32_t i = 0; i < first->choice_count; i++) {
        const gw_turn *turn = first->choices[i];
        if (turn->finish == ENG_FINISH_ERROR)
            outcome = GW_OUTCOME_FAILED;
        else if ((turn->finish == ENG_FINISH_CANCELLED || turn->finish == ENG_FINISH_DEADLINE) &&
                 outcome == GW_OUTCOME_DONE)
            outcome = GW_OUTCOME_CANCELLED;
        stored &= turn->stored;
    }
    eng_usage usage = gw_turn_usage(first);
    gw_account_add(gw_tenants_account(first->app->tenants), first->identity.tenant,
                   first->identity.name, &usage, outcome, stored);
    gw_metrics_finish(first->app->metrics, first->finish);
    gw_metrics_observe(first->app->metrics, GW_E2E,
                       (double)(base_now_ns() - first->received_ns) * 1e-9);
}

/* The end is known and, where it could be, committed: now it may be told. */
static void tell_end(gw_turn *turn)
{
    gw_turn *first = turn->first;
    first->busy++;
    turn->is_told = true;
    first->told_count++;
    if (gw_turn_all_told(first)) {
        /* Before anyone is told: who then asks for totals, or again, finds it there. */
        account(first);
        leave_limits(first);
        let_go_lock(first);
    }
    if (gw_turn_heard(turn)) {
        base_err err = BASE_ERR_INIT;
        bool failed = failure(turn, &err) != BASE_OK;
        flush_held(turn, true);
        if (failed) {
            turn->error = err;
            fail(turn, &err);
            cancel_choices(first);
        } else {
            turn->dialect->finish(turn);
        }
    }
    first->busy--;
    free_if_over(first);
}

static void on_committed(gw_message *message)
{
    gw_turn *turn = (gw_turn *)((char *)message - offsetof(gw_turn, committed));
    turn->commit_pending = false;
    turn->stored = turn->commit.stored;
    gw_metrics_observe(turn->app->metrics, GW_COMMIT,
                       (double)(base_now_ns() - turn->done_ns) * 1e-9);
    if (turn->stored) {
        gw_metrics_add(turn->app->metrics, GW_TURNS_STORED, 1);
    } else if (turn->commit.err.code) {
        gw_metrics_add(turn->app->metrics, GW_COMMIT_FAILED, 1);
        base_log(BASE_LOG_ERROR, "commit_failed turn=%s reason=\"%s\"", turn->id.text,
                 turn->commit.err.text);
    }
    tell_end(turn);
}

/* On the writer. */
static void commit_done(gw_commit *commit)
{
    gw_turn *turn = (gw_turn *)((char *)commit - offsetof(gw_turn, commit));
    gw_loop_post(turn->loop, &turn->committed);
}

/* True if the run's tokens spell the whole visible answer. A stop string may end inside a token:
 * the text before it was given out, the token is not part of the run, and splicing the run would
 * lose that text. */
static bool run_covers_text(gw_turn *turn, uint32_t run_tokens)
{
    if (turn->stop_index < 0)
        return true;
    base_buf bytes;
    base_buf_init(&bytes, 0);
    base_code code =
        eng_detokenize(turn->app->engine, &bytes, turn->run + turn->lead, run_tokens, NULL);
    size_t tail = base_min(turn->text.length, 64);
    bool covers = !code && !bytes.failed && tail && bytes.length >= tail &&
                  memcmp(bytes.data + bytes.length - tail,
                         turn->text.data + turn->text.length - tail, tail) == 0;
    base_buf_deinit(&bytes);
    return covers;
}

static bool begin_commit(gw_turn *turn, uint32_t run_tokens)
{
    const eng_info *info = eng_get_info(turn->app->engine);
    eng_call *calls = NULL;
    if (turn->call_count) {
        calls = base_arena_calloc(turn->arena, turn->call_count, sizeof(*calls));
        if (!calls) {
            base_fail(&turn->commit.err, BASE_NOMEM, "no memory for the record");
            return false;
        }
    }
    for (uint32_t i = 0; i < turn->call_count; i++) {
        const gw_turn_call *call = &turn->calls[i];
        calls[i] = (eng_call){{call->id.text, strlen(call->id.text)},
                              {call->name.data, call->name.length},
                              {call->arguments.data, call->arguments.length}};
    }
    turn->commit = (gw_commit){
        .done = commit_done,
        .retention = turn->retention,
        .extra = !turn->choice          ? GW_EXTRA_NONE
                 : turn->leader == turn ? GW_EXTRA_CHOICE
                                        : GW_EXTRA_SHARED,
        .turn = turn->id.text,
        .session = turn->session.text,
        .label = turn->label,
        .request = turn->request_id,
        .response = turn->choice ? NULL : turn->response.text, /* names the first alone */
        .dialect = turn->dialect->name,
        .model = info->name,
        .fingerprint = info->fingerprint,
        .numerics = info->numerics,
        .metadata = turn->metadata,
        .echo = turn->echo,
        .told = turn->told,
        .conversation = turn->conversation,
        .added = turn->added,
        .added_count = turn->added_count,
        .moves_head = turn->moves_head,
        .root = &turn->root,
        .match = &turn->match,
        .cache = turn->cache,
        .items = turn->items,
        .item_count = turn->chat.item_count,
        .answer = {.role = ENG_ROLE_ASSISTANT,
                   .text = {turn->text.data, turn->text.length},
                   .reasoning = {turn->reasoning.data, turn->reasoning.length},
                   .calls = calls,
                   .call_count = turn->call_count},
        /* Without the beginning of an assistant's turn in front of it, or as the end of one, a run
           is no item. */
        .splice = !turn->lossy && !turn->chat.continue_last && !turn->chat.no_generation_prompt &&
                  run_tokens && turn->finish != ENG_FINISH_ERROR &&
                  run_covers_text(turn, run_tokens),
        .prompt = turn->prompt.tokens,
        .prompt_count = turn->prompt.token_count,
        .run = turn->run,
        .run_count = turn->lead + run_tokens,
        .lead = turn->lead,
        .steps = turn->steps,
        .step_count = turn->step_count,
        .status = turn->finish == ENG_FINISH_ERROR ? GW_TURN_FAILED
                  : turn->finish == ENG_FINISH_CANCELLED || turn->finish == ENG_FINISH_DEADLINE
                      ? GW_TURN_CANCELLED
                      : GW_TURN_COMPLETED,
        .finish = turn->finish,
        .usage = turn->usage,
        .seed = turn->request.sampling.seed,
        .space = turn->request.space,
        .created_ms = turn->created_ms,
        .ended_ms = base_wall_ms(),
    };
    if (!gw_ledger_commit(turn->app->ledger, &turn->commit)) {
        base_fail(&turn->commit.err, BASE_FULL, "the ledger's queue is full");
        return false;
    }
    return true;
}

/* Once the engine has said how much it had. At most the last token of a turn has no page yet when
 * that turn ends. */
static void attribute(gw_turn *turn)
{
    const gw_match *match = &turn->match;
    uint32_t cached = turn->usage.cached_tokens;
    turn->cache.lost = turn->expected_tokens > cached + 1 ? turn->expected_tokens - cached : 0;
    if (!turn->continues || !turn->cache.lost)
        return;
    turn->cache.miss = match->parent_space && match->parent_space != turn->request.space
                           ? GW_MISS_TENANT
                       : match->parent_model                                  ? GW_MISS_MODEL
                       : match->parent_earlier && !turn->usage.evicted_tokens ? GW_MISS_UNWRITTEN
                                                                              : GW_MISS_EVICTED;
}

static void on_done(gw_turn *turn, const eng_event *event)
{
    turn->done_seen = true;
    turn->done_ns = base_now_ns();
    turn->state = GW_TURN_COMMITTING;
    turn->finish = event->finish;
    turn->stop_index = event->stop_index;
    turn->usage = event->usage;
    attribute(turn);
    gw_turn_show(turn);
    gw_metrics_miss(turn->app->metrics, turn->cache.miss, turn->cache.lost);
    if (event->finish == ENG_FINISH_ERROR) {
        turn->error = event->err;
        if (!turn->error.code)
            base_fail(&turn->error, BASE_DEVICE, "the engine failed");
    }
    gw_metrics *metrics = turn->app->metrics;
    gw_metrics_observe(metrics, GW_QUEUE, (double)event->usage.queue_ns * 1e-9);
    gw_metrics_observe(metrics, GW_PREFILL, (double)event->usage.prefill_ns * 1e-9);
    gw_metrics_observe(metrics, GW_PROMPT_TOKENS, event->usage.prompt_tokens);
    gw_metrics_observe(metrics, GW_UNCACHED_TOKENS,
                       (double)event->usage.prompt_tokens - (double)event->usage.cached_tokens);
    gw_metrics_observe(metrics, GW_OUTPUT_TOKENS, event->usage.output_tokens);
    if (turn->shows_stop && event->stop_index >= 0) {
        eng_text stop = turn->request.stops[event->stop_index];
        give_part(turn, &(eng_part){ENG_PART_TEXT, 0, stop.data, stop.length});
    }
    let_go_engine(turn);
    turn->run_tokens = (uint32_t)base_min(event->run_tokens, turn->run_count - turn->lead);
    if (turn->dialect->ending)
        turn->dialect->ending(turn);
    turn->commit_pending = true;
    if (begin_commit(turn, turn->run_tokens))
        return;
    turn->commit_pending = false;
    gw_metrics_add(metrics, GW_COMMIT_FAILED, 1);
    base_log(BASE_LOG_ERROR, "commit_failed turn=%s reason=\"%s\"", turn->id.text,
             turn->commit.err.text);
    tell_end(turn);
}

/* ---- while it runs ---- */

/* The engine has the request: a stream gets its status line now. The worker's message and the
 * engine's first event may arrive in either order. */
static void admitted(gw_turn *turn)
{
    turn = turn->first;
    if (turn->state != GW_TURN_PREPARING)
        return;
    turn->state = GW_TURN_QUEUED;
    turn->queued_ms = base_wall_ms();
    if (turn->live.listed)
        gw_live_submitted(turn->app->live, &turn->live, turn->engine_ids, turn->choice_count);
    gw_turn_show(turn);
    if (turn->dialect->admit)
        turn->dialect->admit(turn);
    if (turn->stream && gw_turn_heard(turn))
        turn->dialect->open(turn);
}

static void observe(gw_turn *turn, const eng_event *event)
{
    if (!event->token_count)
        return;
    gw_metrics *metrics = turn->app->metrics;
    uint64_t now = base_now_ns();
    if (!turn->first_ns) {
        turn->first_ns = now;
        gw_metrics_observe(metrics, GW_TTFT, (double)(now - turn->received_ns) * 1e-9);
    } else {
        gw_metrics_observe(metrics, GW_ITL, (double)(now - turn->last_ns) * 1e-9);
    }
    gw_metrics_observe(metrics, GW_ACCEPTED_LENGTH, event->token_count);
    turn->last_ns = now;
}

static void on_event(gw_port *port, const eng_event *event)
{
    gw_turn *turn = (gw_turn *)port;
    turn->first->busy++;
    turn->engine_pending = true; /* the worker's message may not have come yet */
    admitted(turn);
    if (event->kind == ENG_EVENT_STARTED) {
        turn->state = GW_TURN_RUNNING;
        turn->usage.prompt_tokens = event->usage.prompt_tokens;
        turn->usage.cached_tokens = event->usage.cached_tokens;
        turn->usage.restored_tokens = event->usage.restored_tokens;
        turn->usage.evicted_tokens = event->usage.evicted_tokens;
        turn->usage.queue_ns = event->usage.queue_ns;
        turn->usage.forecast_ns = event->usage.forecast_ns;
        gw_metrics_forecast(turn->app->metrics, event->usage.forecast_ns, event->usage.queue_ns);
        attribute(turn);
        if (!turn->first->started_ms)
            turn->first->started_ms = base_wall_ms();
        gw_metrics_started(turn->app->metrics, event->usage.prompt_tokens,
                           event->usage.cached_tokens);
        gw_turn_show(turn);
        if (turn->dialect->started)
            turn->dialect->started(turn);
    } else {
        bool begins = !turn->first_ns;
        observe(turn, event);
        add_tokens(turn, event);
        if (event->token_count && begins)
            gw_turn_show(turn);
        else if (event->token_count && turn->first->live.listed)
            gw_live_step(turn->app->live, &turn->first->live, event->token_count);
        if (turn->dialect->step)
            turn->dialect->step(turn, event);
        for (uint32_t i = 0; i < event->part_count; i++)
            give_part(turn, &event->parts[i]);
    }
    if (event->kind == ENG_EVENT_DONE)
        on_done(turn, event);
    turn->first->busy--;
    free_if_over(turn);
}

static base_code locked(gw_turn *turn, base_err *err)
{
    base_code code =
        gw_turn_reject(turn, err, 409, "conflict_error", "conversation_locked", turn->lock_param,
                       "Another turn of '%s' is still running.", turn->lock_id);
    turn->error_row.retry_after_ms = LOCKED_RETRY_MS;
    turn->error_row.should_retry = 1;
    return code;
}

/* True if the turn stood in line for too long, or will not be let in any more. */
static bool give_up_waiting(gw_turn *turn, uint64_t now)
{
    uint64_t wait = (uint64_t)turn->app->conf->sessions_queue_wait_ms * 1000000;
    return turn->state == GW_TURN_PREPARING && now > turn->received_ns + wait &&
           gw_lock_give_up(turn->app->locks, &turn->lock);
}

/* A tape that nobody has read for a while; at a shutdown nobody will come. */
static bool is_abandoned(gw_turn *turn, uint64_t now)
{
    if (atomic_load(&turn->app->draining))
        return gw_tape_readers(turn->tape) == 0;
    uint64_t wait = (uint64_t)turn->app->conf->server_resume_ms * 1000000;
    uint64_t idle = gw_tape_idle_ns(turn->tape, now);
    return !turn->background && idle && idle >= wait;
}

static void on_tick(gw_port *port, uint64_t now)
{
    gw_turn *turn = (gw_turn *)port;
    if (give_up_waiting(turn, now)) {
        turn->busy++;
        turn->worker_pending = false;
        locked(turn, &turn->error);
        fail(turn, &turn->error);
        turn->busy--;
        free_if_over(turn);
        return;
    }
    if (turn->tape && !atomic_load(&turn->gone) && is_abandoned(turn, now)) {
        cancel(turn);
        free_if_over(turn);
        return;
    }
    if (turn->dialect->tick && turn->state == GW_TURN_RUNNING)
        turn->dialect->tick(turn, now);
    bool held = turn->held_count > 0;
    for (uint32_t i = 1; i < turn->choice_count && turn->state != GW_TURN_PREPARING; i++)
        held |= turn->choices[i]->held_count > 0;
    uint64_t silence = (uint64_t)turn->app->conf->server_keepalive_ms * 1000000;
    bool reads = turn->tape ? gw_tape_readers(turn->tape) > 0
                            : turn->exchange && !gw_stream_paused(turn->exchange);
    if (!silence || !reads || !gw_turn_streaming(turn) || held)
        return;
    if (now < turn->written_ns + silence)
        return;
    turn->busy++;
    turn->dialect->ping(turn);
    turn->busy--;
    /* The port is open, so the engine holds the turn: nothing is freed here. */
}

/* ---- the worker ---- */

base_code gw_turn_check_model(gw_turn *turn, base_err *err)
{
    const eng_info *info = eng_get_info(turn->app->engine);
    if (strcmp(turn->model, info->name) == 0)
        return BASE_OK;
    const gw_conf_list *aliases = &turn->app->conf->model_aliases;
    for (uint32_t i = 0; i < aliases->count; i++)
        if (strcmp(aliases->items[i], "*") == 0 || strcmp(aliases->items[i], turn->model) == 0)
            return BASE_OK;
    size_t width = base_utf8_complete(turn->model, strnlen(turn->model, 64));
    return gw_turn_reject(turn, err, 404, "invalid_request_error", "model_not_found", "model",
                          "the model '%.*s' does not exist here", (int)width, turn->model);
}

/* The text that agents look for when they decide to compact. */
static base_code too_long(base_err *err, uint32_t window, uint32_t tokens)
{
    return base_fail_param(
        err, BASE_TOO_LONG, "messages",
        "This model's maximum context length is %u tokens. However, you requested %u tokens in the "
        "messages. Please reduce their length.",
        window, tokens);
}

/* The tenant's salt, or one of its own for each cache_salt. The kinds of key parts are kept apart:
 * a salt's text is hashed under a prefix that no other part uses. */
static uint64_t space_of(const gw_turn *turn)
{
    if (!turn->cache_salt.length)
        return turn->identity.salt;
    XXH64_hash_t kind = XXH3_64bits_withSeed("cache_salt", 10, turn->identity.salt);
    return XXH3_64bits_withSeed(turn->cache_salt.data, turn->cache_salt.length, kind);
}

/* The same label of the same tenant is the same session, without a look-up; a label gives no access
 * to anything. */
static gw_id session_of_label(const gw_turn *turn)
{
    unsigned char digest[SHA256_DIGEST_LENGTH];
    char head[64];
    /* Tenants of a group have one salt, and sessions of their own. */
    int length =
        snprintf(head, sizeof(head), "session %016llx %lld ",
                 (unsigned long long)turn->identity.salt, (long long)turn->identity.tenant);
    size_t label = strlen(turn->label);
    char *text = malloc((size_t)length + label);
    if (!text)
        return gw_id_mint("sess_");
    memcpy(text, head, (size_t)length);
    memcpy(text + length, turn->label, label);
    SHA256((const unsigned char *)text, (size_t)length + label, digest);
    free(text);
    gw_id id;
    int at = snprintf(id.text, sizeof(id.text), "sess_");
    for (int i = 0; i < 12; i++)
        at += snprintf(id.text + at, sizeof(id.text) - (size_t)at, "%02x", digest[i]);
    return id;
}

/* The key's rule or the configured one; a request may ask for less than that, never for more. */
static base_code read_restore(gw_turn *turn, base_err *err)
{
    gw_restore *out = &turn->root.restore, asked = GW_RESTORE_AUTO;
    const char *text = NULL;
    json_t *own = NULL;
    CHECK(gw_restore_parse(out, turn->app->conf->ledger_restore));
    if (turn->identity.restore >= 0)
        *out = (gw_restore)turn->identity.restore;
    base_code code = gw_read_name(&text, turn->json, "", "restore", 16, err);
    if (!code)
        code = gw_read_object(&own, turn->json, "", "whimbrel", err);
    if (!code && own)
        code = gw_read_name(&text, own, "whimbrel", "restore", 16, err);
    if (!code && text && !gw_restore_parse(&asked, text))
        code = base_fail_param(err, BASE_INVALID, "restore",
                               "restore must be one of auto, linked, off");
    *out = base_max(*out, asked);
    return code;
}

void gw_turn__expect(gw_turn *turn)
{
    const gw_match *match = &turn->match;
    const eng_prompt *prompt = &turn->prompt;
    uint32_t same;
    turn->cache = (gw_cache_note){.miss = match->miss, .diff_item = -1};
    turn->expected_tokens = gw_match_continues(match, prompt->tokens, prompt->token_count);
    turn->continues = turn->expected_tokens > 0;
    if (turn->continues || !match->parent.text[0])
        return;
    turn->expected_tokens = (uint32_t)base_min(match->parent_tokens, prompt->token_count - 1);
    if (!prompt->item_end ||
        !gw_ledger_departs(turn->app->ledger, &same, turn->identity.tenant, match, prompt->tokens,
                           prompt->token_count, turn->arena) ||
        same >= match->parent_tokens)
        return;
    int32_t item = 0;
    while ((uint32_t)item + 1 < turn->chat.item_count && prompt->item_end[item] <= same)
        item++;
    turn->cache.diff_item = item;
    turn->cache.diff_token = same;
    /* An item that counts as the same is still rendered as it was sent. */
    if (match->miss == GW_MISS_NONE || match->miss == GW_MISS_RESTORED)
        turn->cache.miss = GW_MISS_EDITED;
}

/* vLLM's name and order: smaller goes first, among the requests of one tenant. */
static base_code read_priority(gw_turn *turn, base_err *err)
{
    int64_t priority = 0;
    base_code code =
        gw_read_int(&priority, NULL, turn->json, "", "priority", -PRIORITY_MAX, PRIORITY_MAX, err);
    turn->request.priority = (int32_t)priority;
    return code;
}

static base_code match_and_render(gw_turn *turn, base_err *err)
{
    gw_app *app = turn->app;
    const eng_info *info = eng_get_info(app->engine);
    turn->chat.items = turn->items;
    if (!turn->session.text[0] && turn->label)
        turn->session = session_of_label(turn);
    turn->root = (gw_root){
        .tenant = turn->identity.tenant,
        .template_id = info->template_id,
        .tools = turn->chat.tools,
        .tool_count = turn->chat.tool_count,
        .thinking = turn->chat.thinking == ENG_THINK_DEFAULT ? info->thinking : turn->chat.thinking,
        .effort = turn->chat.effort,
        .volatile_lines = app->conf->ledger_volatile_lines,
        .engine = app->engine,
        .fingerprint = info->fingerprint,
        .session = turn->label ? turn->session.text : NULL};
    base_code code = read_restore(turn, err);
    if (!code)
        code = read_priority(turn, err);
    if (code)
        return code;
    code = turn->dialect->match
               ? turn->dialect->match(turn, err)
               : gw_ledger_match(app->ledger, &turn->match, &turn->root, turn->items,
                                 turn->chat.item_count, turn->arena, err);
    if (!code && turn->dialect->check)
        code = turn->dialect->check(turn, err);
    if (code)
        return code;
    if (!turn->session.text[0])
        turn->session = turn->match.session.text[0] ? turn->match.session : gw_id_mint("sess_");
    turn->request.space = space_of(turn);
    code = turn->dialect->render
               ? turn->dialect->render(turn, err)
               : eng_render(app->engine, &turn->prompt, &turn->chat,
                            turn->dialect->dry ? DRY_TOKENS_MAX : 0, NULL, turn->arena, err);
    if (!code && turn->dialect->write)
        turn->dialect->write(turn);
    if (code || turn->dialect->dry)
        return code;
    /* A prompt that fills the window leaves no room for an answer. */
    if (turn->prompt.token_count >= info->context_max)
        return too_long(err, info->context_max, turn->prompt.token_count);
    gw_turn__expect(turn);
    gw_metrics_add(app->metrics, GW_SPLICED_ITEMS, turn->match.spliced);
    gw_metrics_add(app->metrics, GW_RENDERED_ITEMS, turn->match.rendered);
    return BASE_OK;
}

/* Choices of one prompt differ by their seeds, each of which gives its answer alone, too. */
static uint64_t choice_seed(uint64_t seed, uint32_t nth)
{
    return nth ? XXH3_64bits_withSeed(&nth, sizeof(nth), seed) >> (64 - SEED_BITS) : seed;
}

static void fill_request(gw_turn *turn, uint64_t seed)
{
    const gw_conf *conf = turn->app->conf;
    eng_request *request = &turn->request;
    request->sampling.seed = choice_seed(seed, turn->choice - turn->leader->choice);
    uint32_t bound = conf->limits_output_tokens_max ? conf->limits_output_tokens_max : UINT32_MAX;
    if (!request->max_tokens || request->max_tokens > bound)
        request->max_tokens = bound;
    request->max_tokens =
        (uint32_t)base_min(request->max_tokens,
                           eng_get_info(turn->app->engine)->context_max - turn->prompt.token_count);
    request->user = &turn->port;
    request->tokens = turn->prompt.tokens;
    request->token_count = turn->prompt.token_count;
    request->starts_in_reasoning = turn->prompt.starts_in_reasoning;
    request->thinking = turn->prompt.thinking;
    request->tools = turn->chat.tools;
    request->tool_count = turn->chat.tool_count;
    request->no_disk = turn->retention == GW_RETAIN_USAGE ||
                       (turn->retention == GW_RETAIN_CACHED && !conf->ledger_cached_ttl_s);
    request->follows = turn->leader == turn ? 0 : turn->leader->request.id;
    request->tenant = (uint64_t)turn->identity.tenant;
    gw_turn__set_deadline(turn->first, request);
}

static base_code submit(gw_turn *turn, base_err *err)
{
    uint32_t count = turn->choice_count;
    uint64_t seed = turn->request.sampling.seed;
    if (!turn->seeded) {
        if (getrandom(&seed, sizeof(seed), 0) != (ssize_t)sizeof(seed))
            return base_fail(err, BASE_IO, "the system gives no random bytes");
        seed >>= 64 - SEED_BITS;
    }
    eng_request *requests = base_arena_calloc(turn->arena, count, sizeof(*requests));
    turn->engine_ids = base_arena_calloc(turn->arena, count, sizeof(*turn->engine_ids));
    if (!requests || !turn->engine_ids)
        return base_fail(err, BASE_NOMEM, "no memory for choices");
    base_code code = gw_hold_output(turn, err);
    if (code)
        return code;
    for (uint32_t i = 0; i < count; i++) {
        gw_turn *choice = turn->choices[i];
        choice->request.grammar = turn->request.grammar;
        fill_request(choice, seed);
        requests[i] = choice->request;
        turn->engine_ids[i] = choice->request.id;
    }
    eng_verdict verdict = {0};
    code = eng_submit_all(turn->app->engine, requests, count, &verdict, err);
    if (code) {
        gw_turn__refused(turn, &verdict);
        return code;
    }
    atomic_store(&turn->submitted, true);
    if (atomic_load(&turn->gone))
        cancel_choices(turn);
    return BASE_OK;
}

static base_code client_left(base_err *err)
{
    return base_fail(err, BASE_CANCELLED, "the client left");
}

static base_code parse_body(gw_turn *turn, base_err *err)
{
    base_code code =
        gw_body_mend(turn->body, turn->body_length, turn->app->conf->limits_json_depth_max, err);
    if (!code)
        code = turn->dialect->parse(turn, err);
    if (!code)
        code = gw_turn_check_model(turn, err);
    /* Texts live in the tree and the arena. */
    free(turn->body);
    turn->body = NULL;
    turn->parsed = true;
    return code;
}

/* A turn that is to be kept is refused before it costs anything where kept ones fill the ledger. A
 * retry would find the same. */
static base_code check_room(gw_turn *turn, base_err *err)
{
    if (turn->dialect->dry || turn->retention != GW_RETAIN_KEPT)
        return BASE_OK;
    base_code code = gw_ledger_room(turn->app->ledger, turn->identity.tenant, err);
    if (code == BASE_FULL)
        turn->error_row = (gw_error_row){429, "rate_limit_error", "storage_full", 0, 0};
    return code == BASE_FULL ? code : BASE_OK; /* the commit will say what else is wrong */
}

static base_code plan_and_submit(gw_turn *turn, base_err *err)
{
    base_code code = check_room(turn, err);
    if (!code && turn->dialect->load)
        code = turn->dialect->load(turn, err);
    if (!code)
        code = match_and_render(turn, err);
    if (!code && atomic_load(&turn->gone))
        code = client_left(err);
    if (code || turn->dialect->dry)
        return code;
    code = gw_turn__make_choices(turn, err);
    return code ? code : submit(turn, err);
}

/* `*waits`: the turn stands in line and is another thread's from here on. */
static base_code prepare(gw_turn *turn, bool *waits, base_err *err)
{
    *waits = false;
    if (atomic_load(&turn->gone))
        return client_left(err);
    if (!turn->parsed) {
        base_code code = parse_body(turn, err);
        if (code)
            return code;
        if (turn->lock_id) {
            gw_claim claim =
                gw_lock_claim(turn->app->locks, &turn->lock, turn->identity.tenant, turn->lock_id);
            *waits = claim == GW_CLAIM_WAITS;
            if (*waits)
                return BASE_OK;
            if (claim != GW_CLAIM_HELD)
                return atomic_load(&turn->gone) ? client_left(err) : locked(turn, err);
        }
    }
    return plan_and_submit(turn, err);
}

static void prepare_run(gw_job *job)
{
    gw_turn *turn = (gw_turn *)((char *)job - offsetof(gw_turn, job));
    bool waits;
    base_code code = prepare(turn, &waits, &turn->error);
    if (waits)
        return;
    /* A code without text would be answered as a success. */
    if (code && !turn->error.code)
        base_fail(&turn->error, code, "the request could not be prepared");
    gw_loop_post(turn->loop, &turn->prepared);
}

/* On the loop. */
static void on_prepared(gw_message *message)
{
    gw_turn *turn = (gw_turn *)((char *)message - offsetof(gw_turn, prepared));
    turn->worker_pending = false;
    turn->busy++;
    if (atomic_load(&turn->submitted)) {
        for (uint32_t i = 0; i < turn->choice_count; i++)
            turn->choices[i]->engine_pending = !turn->choices[i]->done_seen;
        admitted(turn);
    } else if (gw_turn_heard(turn) && turn->dialect->dry && !turn->error.code) {
        turn->dialect->finish(turn);
    } else if (gw_turn_heard(turn)) {
        fail(turn, &turn->error);
    }
    turn->busy--;
    free_if_over(turn);
}

/* On the thread of the turn that let go. */
static void lock_granted(gw_lock *lock)
{
    gw_turn *turn = (gw_turn *)((char *)lock - offsetof(gw_turn, lock));
    gw_loop_post(turn->loop, &turn->granted);
}

static void on_granted(gw_message *message)
{
    gw_turn *turn = (gw_turn *)((char *)message - offsetof(gw_turn, granted));
    if (gw_workers_submit(turn->app->workers, &turn->job))
        return;
    turn->busy++;
    turn->worker_pending = false;
    base_fail(&turn->error, BASE_FULL, "too many requests wait for a worker");
    if (gw_turn_heard(turn))
        fail(turn, &turn->error);
    turn->busy--;
    free_if_over(turn);
}

/* ---- the beginning ---- */

static bool take_body(gw_turn *turn)
{
    size_t length;
    const char *body = gw_exchange_body(turn->exchange, &length);
    turn->body = malloc(length + 1);
    if (!turn->body)
        return false;
    memcpy(turn->body, body, length);
    turn->body[length] = '\0';
    turn->body_length = length;
    turn->job.bytes = length;
    return true;
}

/* Names that agents give their sessions, the most specific first. They label, nothing more. */
static const char *label_of(gw_exchange *exchange)
{
    static const char *const names[] = {
        "x-session-id", "x-claude-code-session-id", "thread-id",        "session-id",
        "session_id",   "x-dynamo-session-id",      "x-smg-routing-key"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const char *value = gw_exchange_header(exchange, names[i]);
        if (value && value[0])
            return value;
    }
    return NULL;
}

/* A load client or an agent that ends a session says so with its last request. */
static bool session_over(gw_exchange *exchange)
{
    const char *value = gw_exchange_header(exchange, "x-dynamo-session-final");
    return value && (strcasecmp(value, "true") == 0 || strcmp(value, "1") == 0);
}

void gw_turn_begin(gw_app *app, gw_exchange *exchange, const gw_dialect *dialect)
{
    gw_identity identity;
    if (atomic_load(&app->draining) || atomic_load(&app->paused)) {
        gw_error_draining(exchange);
        gw_metrics_request(app->metrics, dialect->route, 503);
        return;
    }
    int refused = gw_tenants_refuse(
        exchange, gw_tenants_check(app->tenants, &identity, exchange, GW_SCOPE_INFER));
    if (refused) {
        gw_metrics_request(app->metrics, dialect->route, refused);
        return;
    }
    base_err err = BASE_ERR_INIT;
    gw_turn *turn = calloc(1, sizeof(*turn));
    if (!turn) {
        base_fail(&err, BASE_NOMEM, "no memory for a turn");
        gw_error_respond_err(exchange, &err);
        gw_metrics_request(app->metrics, dialect->route, 503);
        return;
    }
    turn->app = app;
    turn->dialect = dialect;
    turn->first = turn->leader = turn;
    turn->choices = &turn->first;
    turn->choice_count = turn->answer_count = 1;
    turn->exchange = exchange;
    turn->loop = gw_exchange_loop(exchange);
    turn->identity = identity;
    turn->received_ns = base_now_ns();
    turn->created_ms = base_wall_ms();
    turn->id = gw_id_mint("turn_");
    turn->stop_index = -1;
    turn->retention = GW_RETAIN_CACHED;
    turn->request = (eng_request){.id = gw_request_id(),
                                  .sampling = ENG_SAMPLING_DEFAULT,
                                  .parse = ENG_PARSE_CHAT,
                                  .tool_choice = ENG_TOOL_AUTO,
                                  .session_over = session_over(exchange)};
    turn->port.event = on_event;
    turn->port.tick = on_tick;
    turn->job.run = prepare_run;
    turn->lock.granted = lock_granted;
    turn->prepared.run = on_prepared;
    turn->granted.run = on_granted;
    turn->committed.run = on_committed;
    snprintf(turn->request_id, sizeof(turn->request_id), "%s", gw_exchange_id(exchange));
    gw_traceparent_read(&turn->trace, gw_exchange_header(exchange, "traceparent"));
    gw_exchange_set_handler(exchange, turn, on_gone, on_drained);
    turn->busy++;
    bool ready = take_body(turn);
    if (ready) {
        turn->arena = base_arena_create(ARENA_FIRST_BYTES,
                                        ARENA_BYTES_MIN + ARENA_BODIES * turn->body_length);
        ready = turn->arena != NULL;
    }
    const char *label = label_of(exchange), *path = gw_exchange_path(exchange);
    if (ready)
        turn->path = base_arena_copy(turn->arena, path, strlen(path));
    if (ready && label)
        turn->label = base_arena_copy(turn->arena, label, strnlen(label, 256));
    if (!ready || base_arena_failed(turn->arena)) {
        base_fail(&turn->error, BASE_NOMEM, "no memory for a turn");
    } else if (!gw_turn__read_timeouts(turn)) {
        /* it asks for no time that there is */
    } else if (gw_idempotent(turn, exchange)) {
        /* answered, or by another turn */
    } else if (!gw_turn_enter(turn)) {
        /* its tenant has enough */
    } else if (!gw_port_open(app->bridge, &turn->port, turn->loop, &turn->error)) {
        turn->port_open = true;
        gw_turn_show_begin(turn);
        turn->worker_pending = gw_workers_submit(app->workers, &turn->job);
        if (!turn->worker_pending)
            base_fail(&turn->error, BASE_FULL, "too many requests wait for a worker");
    }
    if (!turn->worker_pending && gw_turn_heard(turn))
        fail(turn, &turn->error);
    turn->busy--;
    free_if_over(turn);
}
