/* api_error: one table from what went wrong to status, type and code (the wire's error contract),
 * and the body that OpenAI's dialects share: {"error":{"message","type","param","code"}}, all four
 * keys always there.
 *
 * SDKs retry 408, 409, 429 and 5xx unless `x-should-retry` says otherwise, and prefer
 * `retry-after-ms`. So a refusal for load carries retry-after-ms (below their cap of 60 s), and an
 * answer that must not be replayed carries x-should-retry: false. Thread: gw_error_respond* the
 * exchange's loop; the rest any. */
#pragma once
#include "engine/base/buf.h"
#include "engine/base/err.h"
#include "gateway/server.h"

typedef struct gw_error_row {
    int status;
    const char *type;
    const char *code;        /* NULL: null on the wire */
    uint32_t retry_after_ms; /* 0: no such header */
    int should_retry;        /* -1: no header, 0: "false", 1: "true" */
} gw_error_row;

/* The one function that turns a code into an HTTP status, type and code. BASE_DENIED is a key
 * without the right scope (403); a missing or wrong key is gw_error_unauthorized. BASE_TOO_LONG is
 * a prompt that does not fit the window (400); a body past its bound is 413, see
 * gw_error_too_large. */
gw_error_row gw_error_map(base_code code);

/* Appends {"error":{…}}. `code` and `param`: NULL or "" give null. Client text in `message` is
 * escaped. */
void gw_error_json(base_buf *out, const char *type, const char *code, const char *param,
                   const char *message);

/* Answers and ends the exchange. Retry headers by status: 429 and 503 get retry-after-ms 1000 and
 * retry-after 1; 409 gets x-should-retry: false; 401 gets www-authenticate: Bearer. Log lines are
 * the caller's. */
void gw_error_respond(gw_exchange *exchange, int status, const char *type, const char *code,
                      const char *param, const char *message);
/* The same by the table, with err's text and param. */
void gw_error_respond_err(gw_exchange *exchange, const base_err *err);
/* With every header chosen by the row. */
void gw_error_respond_row(gw_exchange *exchange, const gw_error_row *row, const char *param,
                          const char *message);
/* Anthropic's dialect has words and statuses of its own (529 for 503, 504 for 408). Every refusal
 * of a path below /v1/messages, or of a request with the header anthropic-version, is given in
 * them, with the header request-id; these are for a dialect's own records. */
gw_error_row gw_error_messages_row(const gw_error_row *row);
void gw_error_messages_json(base_buf *out, const gw_error_row *row, const char *message,
                            const char *request_id);
/* The code of a row by which that dialect's client learns to do without server-held threads. */
#define GW_ERROR_NO_THREADS "thread_unsupported_request"
/* Rows that have no base_code of their own. */
void gw_error_not_found(gw_exchange *exchange);                         /* 404, unknown path */
void gw_error_method(gw_exchange *exchange, const char *allow);         /* 405 with `allow` */
void gw_error_media_type(gw_exchange *exchange);                        /* 415 */
void gw_error_too_large(gw_exchange *exchange, uint64_t bytes_max);     /* 413 request_too_large */
void gw_error_unauthorized(gw_exchange *exchange, const char *message); /* 401 invalid_api_key */
void gw_error_model_not_found(gw_exchange *exchange,
                              const char *model); /* 404 model_not_found, cut and escaped */
void gw_error_draining(gw_exchange *exchange);    /* 503 draining */
