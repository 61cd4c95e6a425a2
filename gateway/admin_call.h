/* gw_admin_call: what calls of the admin listener share: who may call, the path's and the query's
 * parts, and a job on a worker for those that read or write the database.
 *
 * Thread: begin on the exchange's loop; `work` on a worker; the answer goes out on the loop. A call
 * that waits for the engine sets `then`, which goes on at the loop and ends with gw_admin_finish.
 */
#pragma once
#include <jansson.h>

#include "engine/base/arena.h"
#include "engine/base/buf.h"
#include "gateway/api_error.h"
#include "gateway/app.h"
#include "gateway/tenant.h"
#include "gateway/work.h"

typedef struct gw_admin_call gw_admin_call;
/* Fills `out`. On an error `row`, if its status is set, else the table says how it is answered. */
typedef base_code gw_admin_work(gw_admin_call *call, base_err *err);

struct gw_admin_call {
    gw_app *app;
    gw_identity identity; /* who calls */
    const char *path, *query;
    json_t *body;      /* an object; NULL if there was none */
    base_arena *arena; /* of the call */
    base_buf out;
    const char *type; /* of `out`; NULL: JSON */
    gw_error_row row;
    void (*then)(gw_admin_call *call); /* set by `work`; NULL: `out` is the answer */
    void *state;                       /* for `then` */
    gw_loop *loop;
    base_err err;
    /* ---- admin_call.c's ---- */
    gw_job job;
    gw_message back;
    gw_exchange *exchange; /* NULL once the client left. Loop */
    gw_admin_work *work;
    char *text; /* of the body */
    size_t length;
};

#define GW_ADMIN_BODY_MAX 4096 /* bytes; longer ones are 413 */

/* A key with scope admin, a browser's session, or loopback while there are no keys; otherwise
 * answers and returns false. */
bool gw_admin_admit(gw_app *app, gw_exchange *exchange, gw_identity *out);
/* Admits, copies what is needed and runs `work` on a worker. */
void gw_admin_begin(gw_app *app, gw_exchange *exchange, gw_admin_work *work);
/* Answers with `err` or `out`, if the client is still there, and frees the call. Thread: loop. */
void gw_admin_finish(gw_admin_call *call);
/* For calls that need no worker. 200, JSON; 503 if the buffer failed. */
void gw_admin_respond(gw_exchange *exchange, const base_buf *body);

/* The part of the path behind "/admin/v1/WORD/", up to the next slash, in the arena; percent signs
 * decoded. "" if there is none, or it is no text. */
const char *gw_admin_id(gw_admin_call *call);
/* A query's value by name, percent signs and plus decoded, in `arena`; NULL if it is absent.
 * BASE_INVALID if it is no UTF-8, or holds NUL. */
base_code gw_query_text(const char **out, const char *query, const char *name, base_arena *arena,
                        base_err *err);
/* `fallback` if it is absent. */
base_code gw_query_int(int64_t *out, const char *query, const char *name, int64_t min, int64_t max,
                       int64_t fallback, base_err *err);
/* ,"name":"text" or ,"name":null for NULL and "". */
void gw_put_member(base_buf *out, const char *name, const char *text);
