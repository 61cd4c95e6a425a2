#include "gateway/upload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "engine/base/num.h"
#include "gateway/append.h"
#include "gateway/ledger_session.h"
#include "gateway/session_turn.h"
#include "gateway/tenant.h"
#include "gateway/work.h"

#define METHOD "POST "
#define WORD "append"
#define HEADER_MAX 512 /* of the values that are looked at */
#define ARENA_BYTES (64u << 20)

typedef struct upload {
    gw_job job;
    gw_message asked;
    gw_app *app;
    gw_loop *loop;
    gw_identity identity;
    gw_id session, call, head;
    size_t body;     /* where it begins */
    size_t checked;  /* of the body, that it is text */
    bool asking;     /* a worker has it */
    bool takes;      /* the session takes this result */
    bool over, dead; /* the request is no longer on its way; nothing more of it is of use */
} upload;

/* ---- the head ---- */

/* A header's value, cut at its size; false if it is absent or too long. `head` ends with an empty
 * line. */
static bool header(char out[HEADER_MAX], const char *head, size_t length, const char *name)
{
    size_t size = strlen(name);
    for (const char *at = head, *end; at < head + length; at = end + 2) {
        end = memmem(at, (size_t)(head + length - at), "\r\n", 2);
        if (!end)
            return false;
        if ((size_t)(end - at) <= size || at[size] != ':' || strncasecmp(at, name, size) != 0)
            continue;
        at += size + 1;
        while (at < end && (*at == ' ' || *at == '\t'))
            at++;
        if (end - at >= HEADER_MAX)
            return false;
        memcpy(out, at, (size_t)(end - at));
        out[end - at] = '\0';
        return true;
    }
    return false;
}

/* The value of a query's member. */
static bool member(gw_id *out, const char *query, const char *name)
{
    size_t size = strlen(name);
    for (const char *at = query; *at; at += strcspn(at, "&") + (at[strcspn(at, "&")] == '&')) {
        if (strncmp(at, name, size) != 0 || at[size] != '=')
            continue;
        size_t length = strcspn(at + size + 1, "&");
        if (!length || length >= sizeof out->text)
            return false;
        memcpy(out->text, at + size + 1, length);
        out->text[length] = '\0';
        return true;
    }
    return false;
}

/* An upload if these bytes are the head of a request that appends plain text; NULL if not, or if
 * the head is not there yet. */
static upload *recognise(gw_app *app, const gw_arrival *a)
{
    const size_t method = sizeof METHOD - 1;
    if (a->length < sizeof METHOD GW_SESSIONS_PATH ||
        memcmp(a->bytes, METHOD GW_SESSIONS_PATH "/", sizeof METHOD GW_SESSIONS_PATH) != 0)
        return NULL;
    const char *end = memmem(a->bytes, a->length, "\r\n\r\n", 4);
    const char *line = end ? memmem(a->bytes, a->length, "\r\n", 2) : NULL;
    const char *space =
        line ? memchr(a->bytes + method, ' ', (size_t)(line - a->bytes) - method) : NULL;
    char target[HEADER_MAX], authorization[HEADER_MAX], api_key[HEADER_MAX], type[HEADER_MAX];
    if (!space || (size_t)(space - a->bytes) - method >= sizeof target)
        return NULL;
    snprintf(target, sizeof target, "%.*s", (int)(space - a->bytes - (ptrdiff_t)method),
             a->bytes + method);
    char *query = strchr(target, '?');
    if (!query)
        return NULL;
    *query++ = '\0';
    upload found = {.app = app, .body = (size_t)(end + 4 - a->bytes)};
    const char *word, *head = line + 2;
    size_t head_length = (size_t)(end + 4 - head);
    if (!gw_session_of_path(&found.session, &word, target) || strcmp(word, WORD) != 0 ||
        !member(&found.call, query, "call_id"))
        return NULL;
    if (header(type, head, head_length, "content-type") &&
        strncasecmp(type, "application/json", 16) == 0)
        return NULL;
    const char *bearer =
        header(authorization, head, head_length, "authorization") ? authorization : NULL;
    const char *key = header(api_key, head, head_length, "x-api-key") ? api_key : NULL;
    if (gw_tenants_authenticate(app->tenants, &found.identity, bearer, key, a->remote,
                                GW_SCOPE_INFER) != GW_AUTH_OK)
        return NULL;
    upload *u = malloc(sizeof *u);
    if (u)
        *u = found;
    return u;
}

/* ---- whether it is of use ---- */

/* Worker. */
static void run_ask(gw_job *job)
{
    upload *u = (upload *)((char *)job - offsetof(upload, job));
    base_arena *arena = base_arena_create(4096, ARENA_BYTES);
    gw_session_row session;
    u->takes = arena &&
               !gw_session_read(u->app->ledger, &session, u->identity.tenant, u->session.text,
                                arena, NULL) &&
               !gw_append_check(u->app, u->identity.tenant, &session, u->call.text, arena, NULL);
    if (u->takes)
        u->head = session.head;
    base_arena_destroy(arena);
    gw_loop_post(u->loop, &u->asked);
}

static void on_asked(gw_message *message)
{
    upload *u = (upload *)((char *)message - offsetof(upload, asked));
    u->asking = false;
    u->dead |= !u->takes;
    if (u->over)
        free(u);
}

static void ask(upload *u, gw_loop *loop)
{
    u->loop = loop;
    u->job.run = run_ask;
    u->asked.run = on_asked;
    u->asking = gw_workers_submit(u->app->workers, &u->job);
    u->dead = !u->asking;
}

/* ---- what comes ---- */

static void take(upload *u, const gw_arrival *a)
{
    const char *text = a->bytes + u->body;
    size_t length = a->length - u->body;
    const gw_append_key key = {u->identity.tenant, u->session.text, u->head.text};
    u->dead = !gw_append_fits(text + u->checked, length - u->checked) ||
              !gw_append_arrive(u->app->appends, &key, u->call.text, u, text, length);
    u->checked = length;
    if (!u->dead)
        gw_append_prefill(u->app->appends, &u->identity, u->session.text, a->loop);
}

void *gw_upload_arriving(void *ctx, const gw_arrival *arrival, void *upload_of)
{
    upload *u = upload_of;
    if (!u) {
        u = recognise(ctx, arrival);
        if (u)
            ask(u, arrival->loop);
    } else if (!u->asking && !u->dead && arrival->length > u->body + u->checked) {
        take(u, arrival);
    }
    return u;
}

void gw_upload_arrived(void *ctx, void *upload_of)
{
    upload *u = upload_of;
    const gw_append_key key = {u->identity.tenant, u->session.text, u->head.text};
    (void)ctx;
    u->over = true;
    if (u->asking)
        return; /* freed when the worker's answer comes */
    if (u->takes)
        gw_append_recall(u->app->appends, &key, u->call.text, u);
    free(u);
}
