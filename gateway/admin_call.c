/* gw_admin_call: see the header. A call is freed on its loop, once the worker's message has come.
 */
#include "gateway/admin_call.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/admin_session.h"

#define ARENA_BYTES (256u << 20)
#define QUERY_VALUE_MAX 256

bool gw_admin_admit(gw_app *app, gw_exchange *exchange, gw_identity *out)
{
    int refused = gw_tenants_refuse(exchange, gw_admin_check(app, exchange, out));
    return !refused;
}

void gw_admin_respond(gw_exchange *exchange, const base_buf *body)
{
    static const gw_header headers[] = {{"content-type", "application/json"},
                                        {"cache-control", "no-store"}};
    if (body->failed)
        gw_error_respond(exchange, 503, "server_error", "internal_error", NULL,
                         "no memory for the answer");
    else
        gw_respond(exchange, 200, headers, 2, body->data, body->length);
}

static void on_gone(void *ctx)
{
    ((gw_admin_call *)ctx)->exchange = NULL;
}

static void free_call(gw_admin_call *call)
{
    base_buf_deinit(&call->out);
    json_decref(call->body);
    base_arena_destroy(call->arena);
    if (call->text)
        explicit_bzero(call->text, call->length); /* it may hold a key */
    free(call->text);
    free(call);
}

static void answer(gw_admin_call *call)
{
    if (!call->err.code && call->out.failed)
        base_fail(&call->err, BASE_NOMEM, "no memory for the answer");
    const gw_header headers[] = {{"content-type", call->type ? call->type : "application/json"},
                                 {"cache-control", "no-store"}};
    if (call->err.code && call->row.status)
        gw_error_respond_row(call->exchange, &call->row, call->err.param, call->err.text);
    else if (call->err.code)
        gw_error_respond_err(call->exchange, &call->err);
    else
        gw_respond(call->exchange, 200, headers, 2, call->out.data, call->out.length);
}

void gw_admin_finish(gw_admin_call *call)
{
    if (call->exchange)
        answer(call);
    free_call(call);
}

static void on_back(gw_message *message)
{
    gw_admin_call *call = (gw_admin_call *)((char *)message - offsetof(gw_admin_call, back));
    if (call->then && !call->err.code)
        call->then(call);
    else
        gw_admin_finish(call);
}

static base_code parse(gw_admin_call *call, base_err *err)
{
    if (!call->length)
        return BASE_OK;
    call->body = json_loadb(call->text, call->length, JSON_REJECT_DUPLICATES, NULL);
    return json_is_object(call->body)
               ? BASE_OK
               : base_fail(err, BASE_INVALID, "the body must be a JSON object");
}

static void run(gw_job *job)
{
    gw_admin_call *call = (gw_admin_call *)((char *)job - offsetof(gw_admin_call, job));
    base_code code = parse(call, &call->err);
    if (!code)
        code = call->work(call, &call->err);
    if (code && !call->err.code)
        base_fail(&call->err, code, "the call could not be done");
    gw_loop_post(call->loop, &call->back);
}

void gw_admin_begin(gw_app *app, gw_exchange *exchange, gw_admin_work *work)
{
    gw_identity identity;
    size_t length;
    if (!gw_admin_admit(app, exchange, &identity))
        return;
    const char *text = gw_exchange_body(exchange, &length);
    if (length > GW_ADMIN_BODY_MAX) {
        gw_error_too_large(exchange, GW_ADMIN_BODY_MAX);
        return;
    }
    gw_admin_call *call = calloc(1, sizeof *call);
    const char *path = gw_exchange_path(exchange), *query = gw_exchange_query(exchange);
    if (call) {
        call->arena = base_arena_create(4096, ARENA_BYTES);
        call->text = malloc(length + 1);
    }
    if (call && call->arena) {
        call->path = base_arena_copy(call->arena, path, strlen(path));
        call->query = base_arena_copy(call->arena, query, strlen(query));
    }
    if (!call || !call->text || !call->path || !call->query) {
        base_err err = BASE_ERR_INIT;
        base_fail(&err, BASE_NOMEM, "no memory for the call");
        gw_error_respond_err(exchange, &err);
        if (call)
            free_call(call);
        return;
    }
    if (length)
        memcpy(call->text, text, length);
    call->length = length;
    call->app = app;
    call->identity = identity;
    call->exchange = exchange;
    call->loop = gw_exchange_loop(exchange);
    call->work = work;
    call->job.run = run;
    call->back.run = on_back;
    gw_exchange_set_handler(exchange, call, on_gone, NULL);
    if (!gw_workers_submit(app->workers, &call->job)) {
        base_fail(&call->err, BASE_FULL, "too many requests wait for a worker");
        on_back(&call->back);
    }
}

/* ---- the query and the path ---- */

static int hex(char c)
{
    return c >= '0' && c <= '9'                 ? c - '0'
           : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                : -1;
}

/* Decodes in place; false if the result is no text. */
static bool decode(char *text, bool plus)
{
    char *out = text;
    for (const char *in = text; *in; in++) {
        bool coded = *in == '%';
        int high = coded ? hex(in[1]) : -1, low = high >= 0 ? hex(in[2]) : -1;
        if (coded && (low < 0 || (high == 0 && low == 0)))
            return false;
        char byte = coded ? (char)(high * 16 + low) : plus && *in == '+' ? ' ' : *in;
        in += coded ? 2 : 0;
        *out++ = byte; /* at or before what was read */
    }
    *out = '\0';
    return base_utf8_valid(text, (size_t)(out - text));
}

base_code gw_query_text(const char **out, const char *query, const char *name, base_arena *arena,
                        base_err *err)
{
    size_t length = strlen(name);
    *out = NULL;
    for (const char *at = query; *at; at += strcspn(at, "&") + (at[strcspn(at, "&")] == '&')) {
        if (strncmp(at, name, length) != 0 || at[length] != '=')
            continue;
        size_t size = strcspn(at + length + 1, "&");
        char *text = base_arena_copy(arena, at + length + 1, size);
        if (!text)
            return base_fail(err, BASE_NOMEM, "no memory for the call");
        if (size > 3 * QUERY_VALUE_MAX || !decode(text, true) || strlen(text) > QUERY_VALUE_MAX)
            return base_fail_param(err, BASE_INVALID, name, "%s must be text of at most %d bytes",
                                   name, QUERY_VALUE_MAX);
        *out = text;
        return BASE_OK;
    }
    return BASE_OK;
}

base_code gw_query_int(int64_t *out, const char *query, const char *name, int64_t min, int64_t max,
                       int64_t fallback, base_err *err)
{
    size_t length = strlen(name);
    *out = fallback;
    for (const char *at = query; *at; at += strcspn(at, "&") + (at[strcspn(at, "&")] == '&')) {
        if (strncmp(at, name, length) != 0 || at[length] != '=')
            continue;
        const char *digits = at + length + 1;
        size_t count = strspn(digits, "0123456789");
        long long value = count && count < 19 ? strtoll(digits, NULL, 10) : -1;
        if ((digits[count] && digits[count] != '&') || value < min || value > max)
            return base_fail_param(err, BASE_INVALID, name, "%s must be %" PRId64 " to %" PRId64,
                                   name, min, max);
        *out = value;
        return BASE_OK;
    }
    return BASE_OK;
}

const char *gw_admin_id(gw_admin_call *call)
{
    const char *at = call->path + strlen("/admin/v1/");
    at += strcspn(at, "/");
    at += *at == '/';
    char *text = base_arena_copy(call->arena, at, strcspn(at, "/"));
    return text && decode(text, false) ? text : "";
}

void gw_put_member(base_buf *out, const char *name, const char *text)
{
    base_buf_printf(out, ",\"%s\":", name);
    if (text && text[0])
        base_buf_json_text(out, text, strlen(text));
    else
        base_buf_puts(out, "null");
}
