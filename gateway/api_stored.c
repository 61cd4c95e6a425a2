/* Stored responses: retrieve, resume, delete, cancel, input items. See api_responses.h.
 *
 * A running stream is found on its tape, all else is made again from the ledger by a worker. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "gateway/api_responses.h"
#include "gateway/dialect.h"
#include "gateway/ledger_stream.h"
#include "gateway/response_run.h"
#include "gateway/response_store.h"

#define FETCH_ARENA_BYTES (256u << 20)

typedef enum fetch_kind {
    FETCH_GET,
    FETCH_STREAM,
    FETCH_DELETE,
    FETCH_CANCEL,
    FETCH_ITEMS
} fetch_kind;

/* One call. Freed on the loop when the worker's message has come. */
typedef struct fetch {
    gw_tape_wait wait; /* a cancelled turn's end */
    gw_job job;
    gw_message back;
    gw_app *app;
    gw_exchange *exchange; /* NULL once the client left. Loop */
    gw_loop *loop;
    int64_t tenant;
    fetch_kind kind;
    char response[GW_ID_MAX];
    int64_t after; /* starting_after */
    gw_page page;
    bool running, started;     /* it has a tape */
    const gw_response *played; /* of FETCH_STREAM, while it is written */
    gw_tape *tape;             /* of FETCH_STREAM */
    base_buf out;
    base_err err;
    base_arena *arena;
} fetch;

static void record(void *ctx, const base_buf *bytes)
{
    fetch *f = ctx;
    if ((int64_t)f->played->sequence - 1 <= f->after)
        return; /* the client has it */
    if (bytes->failed || !gw_tape_add(f->tape, bytes->data, bytes->length))
        base_fail(&f->err, BASE_NOMEM, "no memory for the stream");
}

static base_code play(fetch *f, base_err *err)
{
    gw_stored s;
    bool stream = f->kind == FETCH_STREAM;
    uint32_t from = (uint32_t)(f->after + 1);
    f->played = &s.r;
    /* Where a crash cut the stream before the client's last event, numbers jump; see `play` there.
     */
    base_code code = gw_stored_play(&s, f->app, f->tenant, f->response, stream ? record : NULL, f,
                                    stream ? from : 0, f->arena, err);
    if (!code && !stream) {
        const char *status = !f->running ? s.end.status : f->started ? "in_progress" : "queued";
        gw_response_put(&s.r, &f->out, status, f->running ? NULL : &s.end);
    }
    gw_stored_deinit(&s);
    return code ? code : f->out.failed ? gw_no_memory(err) : f->err.code;
}

static base_code check_background(fetch *f, base_err *err)
{
    gw_stored s;
    base_code code =
        gw_stored_play(&s, f->app, f->tenant, f->response, NULL, NULL, 0, f->arena, err);
    bool background = !code && s.r.background;
    gw_stored_deinit(&s);
    if (code || background)
        return code;
    return base_fail_param(err, BASE_INVALID, "background",
                           "only responses in the background can be cancelled");
}

static base_code forget(fetch *f, const char *turn, base_err *err)
{
    base_err why = BASE_ERR_INIT;
    base_code code = gw_ledger_forget(f->app->ledger, f->tenant, GW_RESPONSES, turn, &why);
    if (code == BASE_NOT_FOUND)
        code = gw_stream_forget(f->app->ledger, f->tenant, turn, err);
    else if (code)
        base_fail(err, code, "%s", why.text);
    base_buf_printf(&f->out, "{\"id\":\"%s\",\"object\":\"response\",\"deleted\":true}",
                    f->response);
    return code;
}

/* A call as the item that it was; its id is added to `open` with the type of its result. `tools`:
 * those of the request, among which are the custom ones. */
static base_code put_call(json_t *list, const json_t *made, const json_t *tools, const char *id,
                          json_t *open, base_err *err)
{
    const json_t *function = json_object_get(made, "function");
    eng_text call_id = gw_text_of_json(json_object_get(made, "id"));
    eng_text name = gw_text_of_json(json_object_get(function, "name"));
    eng_text arguments = gw_text_of_json(json_object_get(function, "arguments"));
    gw_turn_call call = {0};
    base_buf_add(&call.name, name.data, name.length);
    gw_call_named(&call, tools);
    gw_call_add(&call, arguments.data, arguments.length);
    const base_buf *shown = gw_call_shown(&call);
    char own[128];
    snprintf(own, sizeof own, "%s_%s", call.custom ? "ctc" : "fc", id);
    json_t *item =
        json_pack("{s:s,s:s,s:s,s:s%,s:s%,s:s%}", "id", own, "type",
                  call.custom ? "custom_tool_call" : "function_call", "status", "completed",
                  "call_id", call_id.length ? call_id.data : "", call_id.length, "name",
                  name.length ? name.data : "", name.length, call.custom ? "input" : "arguments",
                  shown->length ? shown->data : "", shown->length);
    json_t *waits = json_pack("{s:s%,s:b}", "id", call_id.length ? call_id.data : "",
                              call_id.length, "custom", call.custom);
    bool failed = gw_call_failed(&call) || !item || !waits;
    gw_call_deinit(&call);
    failed |= json_array_append_new(list, item) != 0;
    failed |= json_array_append_new(open, waits) != 0;
    return failed ? gw_no_memory(err) : BASE_OK;
}

/* One of the ledger's items as the Responses items that it was. Results come in the order of the
 * calls, which are `open` until theirs has come. */
static base_code put_items(json_t *list, const json_t *item, const json_t *tools,
                           const char *digits, size_t at, json_t *open, base_err *err)
{
    const char *role = json_string_value(json_object_get(item, "role"));
    const json_t *text = json_object_get(item, "content");
    const json_t *calls = json_object_get(item, "tool_calls");
    const char *said_text = json_is_string(text) ? json_string_value(text) : ""; /* NUL is text */
    char id[96];
    bool tool = role && strcmp(role, "tool") == 0, said = role && strcmp(role, "assistant") == 0;
    if (tool) {
        const json_t *call = json_array_get(open, 0);
        eng_text call_id = gw_text_of_json(json_object_get(call, "id"));
        bool custom = json_is_true(json_object_get(call, "custom"));
        snprintf(id, sizeof id, "%s_%.24s_%zu", custom ? "ctco" : "fco", digits, at);
        json_t *result =
            json_pack("{s:s,s:s,s:s,s:s%,s:s%}", "id", id, "type",
                      custom ? "custom_tool_call_output" : "function_call_output", "status",
                      "completed", "call_id", call_id.length ? call_id.data : "", call_id.length,
                      "output", said_text, json_string_length(text));
        json_array_remove(open, 0);
        return json_array_append_new(list, result) ? gw_no_memory(err) : BASE_OK;
    }
    if (!said || json_string_length(text)) {
        snprintf(id, sizeof id, "msg_%.24s_in%zu", digits, at);
        json_t *message = json_pack("{s:s,s:s,s:s,s:s,s:[{s:s,s:s%}]}", "id", id, "type", "message",
                                    "status", "completed", "role", role ? role : "user", "content",
                                    "type", said ? "output_text" : "input_text", "text", said_text,
                                    json_string_length(text));
        if (json_array_append_new(list, message))
            return gw_no_memory(err);
    }
    json_array_clear(open);
    for (size_t i = 0; i < json_array_size(calls); i++) {
        snprintf(id, sizeof id, "%.24s_in%zu_%zu", digits, at, i);
        GW_TRY(put_call(list, json_array_get(calls, i), tools, id, open, err));
    }
    return BASE_OK;
}

static base_code list_items(fetch *f, base_err *err)
{
    gw_turn_row row;
    char **items;
    uint32_t count;
    GW_TRY(gw_response_read(&row, f->app->ledger, f->tenant, f->response, f->arena, err));
    GW_TRY(
        gw_ledger_items(f->app->ledger, &items, &count, f->tenant, row.turn.text, f->arena, err));
    json_t *echo = NULL;
    GW_TRY(gw_body_parse(&echo, row.echo, strlen(row.echo), err));
    json_t *list = json_array(), *open = json_array();
    const json_t *tools = json_object_get(echo, "tools");
    uint32_t last = count - (row.answer && count ? 1 : 0);
    base_code code = list && open ? BASE_OK : gw_no_memory(err);
    for (uint32_t i = gw_response_first_item(&row); i < last && !code; i++) {
        json_t *item = json_loads(items[i], JSON_ALLOW_NUL, NULL);
        code = put_items(list, item, tools, row.turn.text + strlen("turn_"), i, open, err);
        json_decref(item);
    }
    if (!code)
        code = gw_page_put(&f->page, &f->out, list, err);
    json_decref(echo);
    json_decref(list);
    json_decref(open);
    return code;
}

static base_code fetch_work(fetch *f, base_err *err)
{
    gw_id turn;
    if (!gw_response_turn(&turn, f->response))
        return base_fail(err, BASE_NOT_FOUND, "there is no such response");
    if (f->kind == FETCH_DELETE)
        return forget(f, turn.text, err);
    if (f->kind == FETCH_ITEMS)
        return list_items(f, err);
    if (f->kind == FETCH_CANCEL)
        GW_TRY(check_background(f, err));
    return play(f, err);
}

static void fetch_run(gw_job *job)
{
    fetch *f = (fetch *)((char *)job - offsetof(fetch, job));
    base_code code = fetch_work(f, &f->err);
    if (code && !f->err.code)
        base_fail(&f->err, code, "the response could not be read");
    gw_loop_post(f->loop, &f->back);
}

static void fetch_respond(fetch *f)
{
    static const gw_header headers[] = {{"content-type", "application/json"}};
    if (!f->exchange)
        return;
    if (f->err.code == BASE_NOT_FOUND) {
        char text[GW_ID_MAX + 64];
        snprintf(text, sizeof text, "Response with id '%.*s' not found.", gw_shown(f->response, 40),
                 f->response);
        gw_error_respond(f->exchange, 404, "invalid_request_error", "response_not_found",
                         "response_id", text);
    } else if (f->err.code) {
        gw_error_respond_err(f->exchange, &f->err);
    } else if (f->kind == FETCH_STREAM) {
        gw_tape_begin(f->tape);
        gw_tape_end(f->tape);
        gw_tape_attach(f->tape, f->exchange, 0, false);
    } else {
        gw_respond(f->exchange, 200, headers, 1, f->out.data, f->out.length);
    }
}

static void fetch_back(gw_message *message)
{
    fetch *f = (fetch *)((char *)message - offsetof(fetch, back));
    fetch_respond(f);
    gw_tape_unref(f->tape);
    base_buf_deinit(&f->out);
    base_arena_destroy(f->arena);
    free(f);
}

static void fetch_gone(void *ctx)
{
    ((fetch *)ctx)->exchange = NULL;
}

static void fetch_submit(fetch *f)
{
    if (gw_workers_submit(f->app->workers, &f->job))
        return;
    base_fail(&f->err, BASE_FULL, "too many requests wait for a worker");
    fetch_back(&f->back);
}

/* On the loop: the turn that was cancelled is committed. */
static void fetch_ended(gw_message *message)
{
    fetch *f = (fetch *)message;
    f->running = false;
    fetch_submit(f);
}

/* NULL: the exchange was answered. The path is "/v1/responses/ID" and `rest`. */
static fetch *fetch_make(gw_app *app, gw_exchange *exchange, fetch_kind kind, const char *rest)
{
    gw_identity identity;
    base_err err = BASE_ERR_INIT;
    if (!gw_tenants_admit(app->tenants, &identity, exchange, GW_SCOPE_INFER))
        return NULL;
    const char *id = gw_exchange_path(exchange) + strlen("/v1/responses/");
    size_t length = strcspn(id, "/");
    if (strcmp(id + length, rest) != 0) {
        gw_error_not_found(exchange);
        return NULL;
    }
    fetch *f = calloc(1, sizeof *f);
    if (f)
        f->arena = base_arena_create(4096, FETCH_ARENA_BYTES);
    if (f && f->arena && kind == FETCH_STREAM)
        f->tape = gw_tape_create();
    if (!f || !f->arena || (kind == FETCH_STREAM && !f->tape)) {
        if (f)
            base_arena_destroy(f->arena);
        free(f);
        base_fail(&err, BASE_NOMEM, "no memory for the request");
        gw_error_respond_err(exchange, &err);
        return NULL;
    }
    f->job.run = fetch_run;
    f->back.run = fetch_back;
    f->wait.message.run = fetch_ended;
    f->app = app;
    f->exchange = exchange;
    f->wait.loop = f->loop = gw_exchange_loop(exchange);
    f->tenant = identity.tenant;
    f->kind = kind;
    f->after = -1;
    snprintf(f->response, sizeof f->response, "%.*s", (int)base_min(length, (size_t)GW_ID_MAX), id);
    gw_exchange_set_handler(exchange, f, fetch_gone, NULL);
    return f;
}

static gw_tape *find_tape(fetch *f)
{
    char name[GW_TAPE_NAME_MAX];
    gw_tape *tape = NULL;
    if (!f->app->tapes)
        return NULL;
    gw_stream_name(name, f->tenant, f->response);
    gw_tapes_find(f->app->tapes, &tape, NULL, name, NULL, 0);
    return tape;
}

void gw_api_responses_get(gw_app *app, gw_exchange *exchange)
{
    char value[32];
    const char *query = gw_exchange_query(exchange);
    bool stream =
        gw_query_value(query, "stream", value, sizeof value) && strcmp(value, "true") == 0;
    fetch *f = fetch_make(app, exchange, stream ? FETCH_STREAM : FETCH_GET, "");
    if (!f)
        return;
    if (stream && gw_query_value(query, "starting_after", value, sizeof value)) {
        if (!value[0] || strspn(value, "0123456789") != strlen(value) || strlen(value) > 9) {
            base_fail_param(&f->err, BASE_INVALID, "starting_after",
                            "starting_after must be the number of an event");
            fetch_back(&f->back);
            return;
        }
        f->after = strtol(value, NULL, 10);
    }
    gw_tape *tape = find_tape(f);
    if (tape && stream) {
        f->exchange = NULL;
        gw_tape_attach(tape, exchange, (uint32_t)(f->after + 1), false);
        gw_tape_unref(tape);
        fetch_back(&f->back);
        return;
    }
    f->running = tape != NULL;
    f->started = tape && gw_tape_started(tape);
    gw_tape_unref(tape);
    fetch_submit(f);
}

void gw_api_responses_delete(gw_app *app, gw_exchange *exchange)
{
    fetch *f = fetch_make(app, exchange, FETCH_DELETE, "");
    gw_tape *tape = f ? find_tape(f) : NULL;
    if (!f)
        return;
    if (tape) {
        base_fail(&f->err, BASE_CONFLICT, "the response still runs: cancel it first");
        gw_tape_unref(tape);
        fetch_back(&f->back);
        return;
    }
    fetch_submit(f);
}

void gw_api_responses_cancel(gw_app *app, gw_exchange *exchange)
{
    fetch *f = fetch_make(app, exchange, FETCH_CANCEL, "/cancel");
    gw_tape *tape = f ? find_tape(f) : NULL;
    if (!f)
        return;
    uint64_t request = tape ? gw_tape_request(tape) : 0;
    if (!request) { /* over, or not in the background */
        f->running = tape != NULL;
        f->started = true;
        gw_tape_unref(tape);
        fetch_submit(f);
        return;
    }
    gw_tape_set_cancelled(tape);
    eng_cancel(app->engine, request);
    gw_tape_await(tape, &f->wait);
    gw_tape_unref(tape);
}

void gw_api_responses_items(gw_app *app, gw_exchange *exchange)
{
    fetch *f = fetch_make(app, exchange, FETCH_ITEMS, "/input_items");
    if (!f)
        return;
    if (gw_page_read(&f->page, gw_exchange_query(exchange), &f->err))
        fetch_back(&f->back);
    else
        fetch_submit(f);
}
