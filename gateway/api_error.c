/* api_error: see the header. The table is spec'd by what the SDKs do with each status; nothing here
 * allocates past the body. */
#include "gateway/api_error.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/utf8.h"

/* SDKs ignore waits of 60 s and more; a second is about a turn's queueing time on a loaded machine.
 */
#define RETRY_MS 1000
#define BODY_BYTES_MAX 8192

gw_error_row gw_error_map(base_code code)
{
    switch (code) {
    case BASE_OK:
    case BASE_INVALID:
        return (gw_error_row){400, "invalid_request_error", "invalid_value", 0, -1};
    case BASE_TOO_LONG:
        return (gw_error_row){400, "invalid_request_error", "context_length_exceeded", 0, -1};
    case BASE_UNSUPPORTED:
        return (gw_error_row){400, "invalid_request_error", "unsupported_value", 0, -1};
    case BASE_NOT_FOUND:
        return (gw_error_row){404, "invalid_request_error", "not_found", 0, -1};
    case BASE_CONFLICT:
        return (gw_error_row){409, "conflict_error", "conflict", 0, 0};
    case BASE_DENIED:
        return (gw_error_row){403, "permission_error", NULL, 0, -1};
    case BASE_CANCELLED: /* 499 goes to the log; nobody is left to read it */
        return (gw_error_row){499, "invalid_request_error", "client_closed_request", 0, -1};
    case BASE_TIMEOUT:
        return (gw_error_row){408, "timeout", "timeout", 0, -1};
    case BASE_NOMEM:
    case BASE_FULL:
        return (gw_error_row){503, "server_error", "overloaded", RETRY_MS, -1};
    case BASE_CLOSED:
        return (gw_error_row){503, "server_error", "draining", RETRY_MS, -1};
    case BASE_IO:
    case BASE_FORMAT:
    case BASE_DEVICE:
        break;
    }
    return (gw_error_row){500, "server_error", "internal_error", 0, -1};
}

static void json_or_null(base_buf *out, const char *text)
{
    if (text && text[0])
        base_buf_json_string(out, text, strlen(text));
    else
        base_buf_puts(out, "null");
}

void gw_error_json(base_buf *out, const char *type, const char *code, const char *param,
                   const char *message)
{
    base_buf_puts(out, "{\"error\":{\"message\":");
    base_buf_json_string(out, message, strlen(message));
    base_buf_puts(out, ",\"type\":");
    json_or_null(out, type);
    base_buf_puts(out, ",\"param\":");
    json_or_null(out, param);
    base_buf_puts(out, ",\"code\":");
    json_or_null(out, code);
    base_buf_puts(out, "}}");
}

static const char *messages_type(int status)
{
    static const struct {
        int status;
        const char *type;
    } types[] = {
        {401, "authentication_error"}, {402, "billing_error"},     {403, "permission_error"},
        {404, "not_found_error"},      {413, "request_too_large"}, {429, "rate_limit_error"},
        {504, "timeout_error"},        {529, "overloaded_error"},
    };
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (types[i].status == status)
            return types[i].type;
    return status >= 500 ? "api_error" : "invalid_request_error";
}

gw_error_row gw_error_messages_row(const gw_error_row *row)
{
    gw_error_row own = *row;
    own.status = row->status == 503 ? 529 : row->status == 408 ? 504 : row->status;
    own.type = messages_type(own.status);
    return own;
}

void gw_error_messages_json(base_buf *out, const gw_error_row *row, const char *message,
                            const char *request_id)
{
    base_buf_printf(out, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":", row->type);
    base_buf_json_string(out, message, strlen(message));
    if (row->code && strcmp(row->code, GW_ERROR_NO_THREADS) == 0)
        base_buf_printf(out, ",\"details\":{\"error_code\":\"%s\",\"unsupported\":[\"thread\"]}",
                        row->code);
    base_buf_printf(out, "},\"request_id\":\"%s\"}", request_id);
}

static bool speaks_messages(gw_exchange *exchange)
{
    static const char path[] = "/v1/messages";
    return strncmp(gw_exchange_path(exchange), path, sizeof(path) - 1) == 0 ||
           gw_exchange_header(exchange, "anthropic-version");
}

static void respond(gw_exchange *exchange, const gw_error_row *row, const char *param,
                    const char *message, const gw_header *extra)
{
    bool messages = speaks_messages(exchange);
    gw_error_row own = messages ? gw_error_messages_row(row) : *row;
    row = &own;
    static const char fallback[] =
        "{\"error\":{\"message\":\"out of memory\",\"type\":\"server_error\",\"param\":null,"
        "\"code\":\"overloaded\"}}";
    gw_header headers[7];
    size_t count = 0;
    char ms[16], seconds[16];
    headers[count++] = (gw_header){"content-type", "application/json"};
    if (row->retry_after_ms) {
        snprintf(ms, sizeof(ms), "%u", row->retry_after_ms);
        snprintf(seconds, sizeof(seconds), "%u", (row->retry_after_ms + 999) / 1000);
        headers[count++] = (gw_header){"retry-after-ms", ms};
        headers[count++] = (gw_header){"retry-after", seconds};
    }
    if (row->should_retry >= 0)
        headers[count++] = (gw_header){"x-should-retry", row->should_retry ? "true" : "false"};
    if (row->status == 401)
        headers[count++] = (gw_header){"www-authenticate", "Bearer"};
    if (messages)
        headers[count++] = (gw_header){"request-id", gw_exchange_id(exchange)};
    if (extra)
        headers[count++] = *extra;
    base_buf body;
    base_buf_init(&body, BODY_BYTES_MAX);
    if (messages)
        gw_error_messages_json(&body, row, message, gw_exchange_id(exchange));
    else
        gw_error_json(&body, row->type, row->code, param, message);
    if (body.failed)
        gw_respond(exchange, row->status, headers, count, fallback, sizeof(fallback) - 1);
    else
        gw_respond(exchange, row->status, headers, count, body.data, body.length);
    base_buf_deinit(&body);
}

void gw_error_respond(gw_exchange *exchange, int status, const char *type, const char *code,
                      const char *param, const char *message)
{
    gw_error_row row = {status, type, code, 0, -1};
    if (status == 429 || status == 503)
        row.retry_after_ms = RETRY_MS;
    if (status == 409)
        row.should_retry = 0;
    respond(exchange, &row, param, message, NULL);
}

void gw_error_respond_err(gw_exchange *exchange, const base_err *err)
{
    gw_error_row row = gw_error_map(err->code);
    respond(exchange, &row, err->param, err->text, NULL);
}

void gw_error_respond_row(gw_exchange *exchange, const gw_error_row *row, const char *param,
                          const char *message)
{
    respond(exchange, row, param, message, NULL);
}

void gw_error_not_found(gw_exchange *exchange)
{
    gw_error_row row = {404, "invalid_request_error", "not_found", 0, -1};
    respond(exchange, &row, NULL, "there is nothing at this path", NULL);
}

void gw_error_method(gw_exchange *exchange, const char *allow)
{
    gw_error_row row = {405, "invalid_request_error", "method_not_allowed", 0, -1};
    respond(exchange, &row, NULL, "this path does not take that method",
            &(gw_header){"allow", allow});
}

void gw_error_media_type(gw_exchange *exchange)
{
    gw_error_row row = {415, "invalid_request_error", "unsupported_media_type", 0, -1};
    respond(exchange, &row, NULL, "the body must be application/json", NULL);
}

void gw_error_too_large(gw_exchange *exchange, uint64_t bytes_max)
{
    gw_error_row row = {413, "request_too_large", "request_too_large", 0, -1};
    char message[96];
    snprintf(message, sizeof(message), "the body exceeds the limit of %llu bytes",
             (unsigned long long)bytes_max);
    respond(exchange, &row, NULL, message, NULL);
}

void gw_error_unauthorized(gw_exchange *exchange, const char *message)
{
    gw_error_row row = {401, "authentication_error", "invalid_api_key", 0, -1};
    respond(exchange, &row, NULL, message, NULL);
}

void gw_error_model_not_found(gw_exchange *exchange, const char *model)
{
    gw_error_row row = {404, "invalid_request_error", "model_not_found", 0, -1};
    char message[192];
    /* A client's text is cut, but not inside a character; the JSON writer escapes what it holds. */
    size_t width = base_utf8_complete(model, strnlen(model, 64));
    snprintf(message, sizeof(message), "the model '%.*s' does not exist here", (int)width, model);
    respond(exchange, &row, "model", message, NULL);
}

void gw_error_draining(gw_exchange *exchange)
{
    gw_error_row row = gw_error_map(BASE_CLOSED);
    respond(exchange, &row, NULL, "the server is shutting down", NULL);
}
