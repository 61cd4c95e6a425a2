/* For tests of turns: a transport of one loop that the test pumps, and an engine that the test
 * plays. They stand in for server.c and engine.c at link time; workers, bridge, ledger, tenants and
 * metrics are the real ones.
 *
 * Tokens of the fake engine: 0-255 are bytes, from 256 on marks spelled "<N>". A rendered item is
 * one token (its role + 1000) and its text's bytes; a spliced one its own tokens. */
#pragma once
#ifndef cr_assert /* a fuzz target has its own */
#include <criterion/criterion.h>
#endif
#include <ftw.h>
#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "gateway/api_chat.h"
#include "gateway/bridge.h"
#include "gateway/conf.h"
#include "gateway/ledger.h"
#include "gateway/lock.h"
#include "gateway/metrics.h"
#include "gateway/tenant.h"
#include "gateway/work.h"

/* ---- transport ---- */

struct gw_loop {
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    gw_message *first, **last;
};

struct gw_exchange {
    const char *body;
    size_t length;
    const char *headers[16][2];
    const char *remote;
    const char *path; /* NULL: the chat dialect's */
    void *ctx;
    void (*gone)(void *ctx);
    void (*drained)(void *ctx);
    bool begun, ended, dead, paused;
    int status;
    char answer_headers[1024];
    base_buf out;
    uint32_t writes;
};

static gw_loop fake_loop = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL,
                            &fake_loop.first};

void gw_loop_post(gw_loop *loop, gw_message *message)
{
    pthread_mutex_lock(&loop->mutex);
    message->next = NULL;
    *loop->last = message;
    loop->last = &message->next;
    pthread_cond_signal(&loop->wake);
    pthread_mutex_unlock(&loop->mutex);
}

/* Runs one message; false if none came within the time. */
static inline bool pump(uint32_t wait_ms)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += (long)wait_ms * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&fake_loop.mutex);
    while (!fake_loop.first)
        if (pthread_cond_timedwait(&fake_loop.wake, &fake_loop.mutex, &until)) {
            pthread_mutex_unlock(&fake_loop.mutex);
            return false;
        }
    gw_message *message = fake_loop.first;
    fake_loop.first = message->next;
    if (!fake_loop.first)
        fake_loop.last = &fake_loop.first;
    pthread_mutex_unlock(&fake_loop.mutex);
    message->run(message);
    return true;
}

/* For a while: ticks never end as long as a port is open. */
static inline void pump_all(void)
{
    uint64_t until = base_now_ns() + 60000000;
    while (base_now_ns() < until)
        pump(5);
}

const char *gw_exchange_header(gw_exchange *exchange, const char *name)
{
    for (int i = 0; i < 16 && exchange->headers[i][0]; i++)
        if (strcmp(exchange->headers[i][0], name) == 0)
            return exchange->headers[i][1];
    return NULL;
}

const char *gw_exchange_body(const gw_exchange *exchange, size_t *length)
{
    *length = exchange->length;
    return exchange->body;
}

const char *gw_exchange_id(const gw_exchange *exchange)
{
    (void)exchange;
    return "req_000000000000000000000001";
}

const char *gw_exchange_path(const gw_exchange *exchange)
{
    return exchange->path ? exchange->path : "/v1/chat/completions";
}

const char *gw_exchange_method(const gw_exchange *exchange)
{
    (void)exchange;
    return "POST";
}

const char *gw_exchange_authority(const gw_exchange *exchange)
{
    (void)exchange;
    return "127.0.0.1";
}

gw_listener gw_exchange_listener(const gw_exchange *exchange)
{
    (void)exchange;
    return GW_LISTENER_PUBLIC;
}

const char *gw_exchange_remote(const gw_exchange *exchange)
{
    return exchange->remote ? exchange->remote : "127.0.0.1";
}

gw_loop *gw_exchange_loop(const gw_exchange *exchange)
{
    (void)exchange;
    return &fake_loop;
}

void gw_exchange_set_handler(gw_exchange *exchange, void *ctx, void (*gone)(void *ctx),
                             void (*drained)(void *ctx))
{
    exchange->ctx = ctx;
    exchange->gone = gone;
    exchange->drained = drained;
}

static inline void note_headers(gw_exchange *exchange, const gw_header *headers, size_t count)
{
    size_t at = strlen(exchange->answer_headers);
    for (size_t i = 0; i < count; i++)
        at += (size_t)snprintf(exchange->answer_headers + at, sizeof(exchange->answer_headers) - at,
                               "%s: %s\n", headers[i].name, headers[i].value);
}

void gw_exchange_add_header(gw_exchange *exchange, const char *name, const char *value)
{
    note_headers(exchange, &(gw_header){name, value}, 1);
}

void gw_respond(gw_exchange *exchange, int status, const gw_header *headers, size_t count,
                const void *body, size_t length)
{
    cr_assert(!exchange->ended && !exchange->begun && !exchange->dead);
    exchange->status = status;
    note_headers(exchange, headers, count);
    base_buf_add(&exchange->out, body, length);
    exchange->ended = true;
}

void gw_stream_begin(gw_exchange *exchange, int status, const gw_header *headers, size_t count)
{
    cr_assert(!exchange->ended && !exchange->begun && !exchange->dead);
    exchange->status = status;
    exchange->begun = true;
    note_headers(exchange, headers, count);
}

void gw_stream_write(gw_exchange *exchange, const void *bytes, size_t length)
{
    cr_assert(exchange->begun && !exchange->ended && !exchange->dead);
    base_buf_add(&exchange->out, bytes, length);
    exchange->writes++;
}

bool gw_stream_paused(const gw_exchange *exchange)
{
    return exchange->paused;
}

void gw_stream_end(gw_exchange *exchange)
{
    cr_assert(exchange->begun && !exchange->ended && !exchange->dead);
    exchange->ended = true;
}

void gw_stream_abort(gw_exchange *exchange)
{
    exchange->dead = true;
}

gw_server_stats gw_server_get_stats(const gw_server *server)
{
    (void)server;
    return (gw_server_stats){0};
}

/* The client leaves. */
static inline void leave(gw_exchange *exchange)
{
    cr_assert(!exchange->ended);
    exchange->dead = true;
    exchange->gone(exchange->ctx);
}

/* ---- engine ---- */

#define FAKE_WINDOW 5000

static eng_info fake_info = {.name = "fake",
                             .backend = "cpu-fake",
                             .kv = "nvfp4",
                             .fingerprint = "0123456789abcdef0123456789abcdef",
                             .numerics = "numerics",
                             .template_id = "template",
                             .context_max = FAKE_WINDOW,
                             .page_tokens = 128,
                             .vocab = 2000,
                             .thinking = ENG_THINK_ADAPTIVE};
static eng_sink fake_sink;

/* The last request that the engine took. */
static struct {
    eng_request request, all[64];
    atomic_int submitted, cancelled;
    atomic_int waiting; /* submitted, and `admit` did not see it yet */
    int refuse;         /* a base_code for the next submit */
    base_buf rendered;  /* what the last conversation said */
    eng_thinking thinking;
    char effort[16];
    uint32_t tool_count, spliced;
    bool continue_last, no_generation_prompt;
    char tools[4096];
} engine;

const eng_info *eng_get_info(const eng_engine *e)
{
    (void)e;
    return &fake_info;
}

base_code eng_render(const eng_engine *e, eng_prompt *out, const eng_chat *chat, uint32_t token_max,
                     base_buf *text, base_arena *arena, base_err *err)
{
    (void)e;
    (void)token_max;
    (void)text;
    size_t room = 16 + chat->prefix_count;
    for (uint32_t i = 0; i < chat->item_count; i++)
        room += 1 + chat->items[i].text.length + chat->items[i].token_count;
    memset(out, 0, sizeof(*out));
    if (room > 10 * FAKE_WINDOW)
        return base_fail(err, BASE_TOO_LONG, "maximum context length is %d tokens", FAKE_WINDOW);
    out->tokens = base_arena_alloc(arena, room * sizeof(*out->tokens));
    out->item_end = base_arena_alloc(arena, chat->item_count * sizeof(*out->item_end));
    base_buf_clear(&engine.rendered);
    engine.spliced = 0;
    if (chat->prefix)
        memcpy(out->tokens, chat->prefix, chat->prefix_count * sizeof(int32_t));
    out->token_count = chat->prefix_count;
    static const char *const roles[] = {"root", "system", "user", "assistant", "tool"};
    for (uint32_t i = 0; i < chat->item_count; i++) {
        const eng_item *item = &chat->items[i];
        base_buf_printf(&engine.rendered, "%s:", roles[item->role]);
        if (item->tokens) {
            engine.spliced++;
            base_buf_puts(&engine.rendered, "SPLICED");
            memcpy(out->tokens + out->token_count, item->tokens,
                   item->token_count * sizeof(int32_t));
            out->token_count += item->token_count;
        } else {
            if (item->reasoning.length)
                base_buf_printf(&engine.rendered, "(%.*s)", (int)item->reasoning.length,
                                item->reasoning.data);
            base_buf_add(&engine.rendered, item->text.data, item->text.length);
            for (uint32_t k = 0; k < item->call_count; k++)
                base_buf_printf(&engine.rendered, "[%.*s %.*s]", (int)item->calls[k].name.length,
                                item->calls[k].name.data, (int)item->calls[k].arguments.length,
                                item->calls[k].arguments.data);
            out->tokens[out->token_count++] = 1000 + (int32_t)item->role;
            for (size_t k = 0; k < item->text.length; k++)
                out->tokens[out->token_count++] = (unsigned char)item->text.data[k];
        }
        base_buf_puts(&engine.rendered, "|");
        out->item_end[i] = out->token_count;
    }
    out->thinking = chat->thinking == ENG_THINK_DEFAULT ? fake_info.thinking : chat->thinking;
    out->tokens[out->token_count++] = 999;
    if (out->thinking != ENG_THINK_ADAPTIVE)
        out->tokens[out->token_count++] = 990 + (int32_t)out->thinking;
    out->starts_in_reasoning = out->thinking == ENG_THINK_ENABLED;
    engine.thinking = chat->thinking;
    snprintf(engine.effort, sizeof(engine.effort), "%.*s", (int)chat->effort.length,
             chat->effort.data ? chat->effort.data : "");
    engine.tool_count = chat->tool_count;
    engine.tools[0] = '\0';
    size_t at = 0;
    for (uint32_t i = 0; i < chat->tool_count && at < sizeof(engine.tools); i++)
        at += (size_t)snprintf(engine.tools + at, sizeof(engine.tools) - at, "%.*s;",
                               (int)chat->tools[i].length, chat->tools[i].data);
    engine.continue_last = chat->continue_last;
    engine.no_generation_prompt = chat->no_generation_prompt;
    return BASE_OK;
}

/* Of runs of bytes, without reasoning. */
bool eng_run_seen(const eng_engine *e, uint32_t *seen, eng_text *rest, const int32_t *tokens,
                  uint32_t token_count, eng_text reasoning, eng_text text)
{
    (void)e;
    (void)reasoning;
    for (size_t i = 0; i < text.length; i++)
        if (i >= token_count || tokens[i] != (unsigned char)text.data[i])
            return false;
    *seen = (uint32_t)text.length;
    *rest = (eng_text){"", 0};
    return text.length > 0;
}

base_code eng_detokenize(const eng_engine *e, base_buf *out, const int32_t *tokens, uint32_t count,
                         base_err *err)
{
    (void)e;
    (void)err;
    for (uint32_t i = 0; i < count; i++) {
        char byte = (char)tokens[i];
        if (tokens[i] < 256)
            base_buf_add(out, &byte, 1);
        else
            base_buf_printf(out, "<%d>", tokens[i]);
    }
    return BASE_OK;
}

base_code eng_tokenize(const eng_engine *e, int32_t **tokens, uint32_t *token_count, eng_text text,
                       bool specials, uint32_t token_max, base_arena *arena, base_err *err)
{
    (void)e;
    (void)specials;
    if (text.length > token_max)
        return base_fail(err, BASE_TOO_LONG, "maximum context length is %u tokens", token_max);
    *tokens = base_arena_alloc(arena, (text.length + 1) * sizeof(**tokens));
    for (size_t i = 0; i < text.length; i++)
        (*tokens)[i] = (unsigned char)text.data[i];
    *token_count = (uint32_t)text.length;
    return BASE_OK;
}

base_code eng_submit(eng_engine *e, const eng_request *request, base_err *err)
{
    (void)e;
    if (engine.refuse) {
        base_code code = (base_code)engine.refuse;
        engine.refuse = 0;
        return base_fail(err, code, "refused for the test");
    }
    engine.request = *request;
    engine.all[atomic_fetch_add(&engine.submitted, 1) % 64] = *request;
    atomic_store(&engine.waiting, 1);
    return BASE_OK;
}

base_code eng_submit_all(eng_engine *e, const eng_request *requests, uint32_t count,
                         eng_verdict *verdict, base_err *err)
{
    base_code code = BASE_OK;
    for (uint32_t i = 0; i < count && !code; i++)
        code = eng_submit(e, &requests[i], err);
    return code;
}

void eng_cancel(eng_engine *e, uint64_t id)
{
    (void)e;
    for (uint32_t i = 0; i < 64; i++)
        if (id == engine.all[i].id)
            atomic_fetch_add(&engine.cancelled, 1);
}

/* What comes next is about the nth of all requests. */
static inline void engine_turn_to(int nth)
{
    engine.request = engine.all[nth];
}

/* What engine_part gave out, once more, whatever the tokens are. */
static struct {
    eng_part_kind kind;
    uint32_t call;
    char text[64];
} fake_parts[256];
static uint32_t fake_part_count;

base_code eng_replay(const eng_engine *e, const eng_request *request, const int32_t *tokens,
                     uint32_t token_count, const uint32_t *steps, uint32_t step_count, bool ended,
                     const eng_sink *sink, base_err *err)
{
    for (uint32_t i = 0; i < fake_part_count; i++) {
        eng_part part = {fake_parts[i].kind, fake_parts[i].call, fake_parts[i].text,
                         strlen(fake_parts[i].text)};
        eng_event event = {.kind = ENG_EVENT_STEP, .parts = &part, .part_count = 1};
        sink->event(sink->ctx, &event);
    }
    return BASE_OK;
}

eng_stats eng_get_stats(const eng_engine *e)
{
    (void)e;
    return (eng_stats){0};
}

static inline void engine_event(eng_event event)
{
    event.id = engine.request.id;
    event.user = engine.request.user;
    fake_sink.event(fake_sink.ctx, &event);
    fake_sink.flush(fake_sink.ctx);
}

static inline void engine_started(uint32_t cached)
{
    engine_event((eng_event){
        .kind = ENG_EVENT_STARTED,
        .usage = {.prompt_tokens = engine.request.token_count, .cached_tokens = cached}});
}

/* One step whose tokens are the text's bytes. */
static inline void engine_part(eng_part_kind kind, uint32_t call, const char *text)
{
    if (fake_part_count < 256) {
        fake_parts[fake_part_count].kind = kind;
        fake_parts[fake_part_count].call = call;
        snprintf(fake_parts[fake_part_count++].text, sizeof fake_parts[0].text, "%s", text);
    }
    int32_t tokens[512];
    uint32_t count = (uint32_t)strlen(text);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = (unsigned char)text[i];
    eng_part part = {kind, call, text, count};
    engine_event((eng_event){.kind = ENG_EVENT_STEP,
                             .tokens = tokens,
                             .token_count = count,
                             .parts = &part,
                             .part_count = 1});
}

static inline void engine_done(eng_finish finish, uint32_t output, int32_t stop_index,
                               uint32_t run_tokens)
{
    static const int32_t end = 500;
    bool whole = finish == ENG_FINISH_STOP || finish == ENG_FINISH_CALLS;
    engine_event((eng_event){.kind = ENG_EVENT_DONE,
                             .usage = {.prompt_tokens = engine.request.token_count,
                                       .cached_tokens = 3,
                                       .output_tokens = output,
                                       .reasoning_tokens = 1,
                                       .drafted = 5,
                                       .accepted = 4,
                                       .queue_ns = 1500000},
                             .tokens = whole && stop_index < 0 ? &end : NULL,
                             .token_count = whole && stop_index < 0 ? 1 : 0,
                             .finish = finish,
                             .stop_index = stop_index,
                             .run_tokens = run_tokens + (whole && stop_index < 0)});
}

/* ---- a gateway without sockets ---- */

static char fake_directory[64];
static gw_app app;
static gw_conf fake_conf = {.ledger_restore = "auto",
                            .limits_json_depth_max = 128,
                            .limits_n_max = 1,
                            .server_keepalive_ms = 60000};

static inline int fake_remove(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static inline void fake_start(void)
{
    base_err err = BASE_ERR_INIT;
    base_log_set_level(BASE_LOG_ERROR);
    strcpy(fake_directory, "/tmp/whimbrel-turn-XXXXXX");
    cr_assert_not_null(mkdtemp(fake_directory));
    app.conf = &fake_conf;
    gw_ledger_options options = {.path = fake_directory, .cached_ttl_s = 3600, .busy_ms = 1000};
    cr_assert_eq(gw_metrics_create(&app.metrics, &err), BASE_OK);
    cr_assert_eq(gw_ledger_open(&app.ledger, &options, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(gw_tenants_create(&app.tenants, app.ledger, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(gw_bridge_create(&app.bridge, 10, &err), BASE_OK);
    fake_sink = gw_bridge_sink(app.bridge);
    cr_assert_eq(gw_workers_create(&app.workers, 1, 8, &err), BASE_OK);
    cr_assert_eq(gw_locks_create(&app.locks, 2, &err), BASE_OK);
}

static inline void *fake_pump_main(void *stop)
{
    while (!atomic_load((atomic_bool *)stop))
        pump(5);
    return NULL;
}

static inline void fake_stop(void)
{
    pump_all();
    atomic_bool stop = false;
    pthread_t thread;
    pthread_create(&thread, NULL, fake_pump_main, &stop);
    bool drained = gw_bridge_drain(app.bridge, 2000);
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    cr_assert(drained, "every port is closed in the end");
    gw_workers_destroy(app.workers);
    gw_locks_destroy(app.locks);
    gw_bridge_destroy(app.bridge);
    gw_tenants_destroy(app.tenants);
    gw_ledger_close(app.ledger);
    gw_metrics_destroy(app.metrics);
    base_buf_deinit(&engine.rendered);
    nftw(fake_directory, fake_remove, 16, FTW_DEPTH | FTW_PHYS);
}

/* An exchange that brought this body. Freed with free_exchange. */
static inline gw_exchange *send_body(const char *body, size_t length)
{
    gw_exchange *exchange = calloc(1, sizeof(*exchange));
    exchange->body = body;
    exchange->length = length;
    gw_api_chat_handle(&app, exchange);
    return exchange;
}

static inline gw_exchange *send_text(const char *body)
{
    return send_body(body, strlen(body));
}

static inline void free_exchange(gw_exchange *exchange)
{
    base_buf_deinit(&exchange->out);
    free(exchange);
}

/* Until the engine has the request or the exchange is answered. */
static inline bool admit(gw_exchange *exchange)
{
    uint64_t until = base_now_ns() + 60000000000; /* a busy machine is slow, and a fault is seen */
    while (!exchange->ended && !exchange->dead && base_now_ns() < until &&
           !atomic_load(&engine.waiting))
        pump(5);
    if (!exchange->ended)
        pump_all();
    atomic_store(&engine.waiting, 0);
    return !exchange->ended;
}

static inline void pump_until_over(gw_exchange *exchange)
{
    for (int i = 0; i < 6000 && !exchange->ended; i++)
        pump(10);
    cr_assert(exchange->ended, "the exchange is answered");
}

static inline json_t *answer_json(gw_exchange *exchange)
{
    json_error_t error;
    json_t *json = json_loadb(exchange->out.data, exchange->out.length, JSON_ALLOW_NUL, &error);
    cr_assert_not_null(json, "%s in %s", error.text, exchange->out.data);
    return json;
}

/* "choices.0.message.content" and the like. */
static inline json_t *at(json_t *json, const char *path)
{
    char part[64];
    while (json && *path) {
        size_t length = strcspn(path, ".");
        snprintf(part, sizeof(part), "%.*s", (int)length, path);
        json = json_is_array(json) ? json_array_get(json, (size_t)atoi(part))
                                   : json_object_get(json, part);
        path += length + (path[length] == '.');
    }
    return json;
}

static inline const char *text_at(json_t *json, const char *path)
{
    const char *text = json_string_value(at(json, path));
    return text ? text : "";
}
