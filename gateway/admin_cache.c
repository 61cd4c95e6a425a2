#include "gateway/admin_cache.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "gateway/body.h"
#include "gateway/bridge.h"
#include "gateway/dialect.h"
#include "gateway/ledger_admin.h"
#include "gateway/turn.h"

#define TREE_DEFAULT 200
#define TREE_MAX 1000
#define SPACES_MAX 4096 /* of one flush; more are left for another */
#define TURNS_PAGE 200  /* of a session, read at a time */

static base_code tree(gw_admin_call *call, base_err *err)
{
    int64_t limit;
    char name[GW_TENANT_NAME_MAX + 1];
    GW_TRY(gw_query_int(&limit, call->query, "limit", 1, TREE_MAX, TREE_DEFAULT, err));
    /* One more tells whether there are others. */
    eng_edge *edges = base_arena_calloc(call->arena, (size_t)limit + 1, sizeof *edges);
    if (!edges)
        return base_fail(err, BASE_NOMEM, "no memory for the list");
    uint32_t count = eng_list_index(call->app->engine, edges, (uint32_t)limit + 1);
    uint64_t now = base_now_ns();
    base_buf *out = &call->out;
    base_buf_puts(out, "{\"object\":\"cache.tree\",\"data\":[");
    for (uint32_t i = 0; i < count && i < limit; i++) {
        const eng_edge *e = &edges[i];
        base_buf_printf(out, "%s{\"id\":%u,\"parent\":", i ? "," : "", e->id);
        if (e->parent != UINT32_MAX)
            base_buf_printf(out, "%u", e->parent);
        else
            base_buf_puts(out, "null");
        bool own = gw_tenants_of_space(call->app->tenants, name, e->space);
        gw_put_member(out, "tenant", own ? name : NULL);
        base_buf_printf(out,
                        ",\"start\":%u,\"tokens\":%u,\"pages\":%u,\"children\":%u,\"in_use\":%s,"
                        "\"pinned\":%s,\"used_ms_ago\":%llu}",
                        e->start, e->tokens, e->pages, e->children, e->in_use ? "true" : "false",
                        e->pinned ? "true" : "false",
                        (unsigned long long)(now > e->used_ns ? (now - e->used_ns) / 1000000 : 0));
    }
    base_buf_printf(out, "],\"nodes\":%u,\"has_more\":%s}",
                    eng_get_stats(call->app->engine).index_nodes, count > limit ? "true" : "false");
    return BASE_OK;
}

/* ---- flushing ---- */

typedef struct flushed {
    uint32_t namespaces, paths;
} flushed;

static base_code drop(gw_admin_call *call, flushed *done, uint64_t space, base_err *err)
{
    done->namespaces++;
    return eng_drop(call->app->engine, space, err);
}

/* A tenant's own namespace, and those that its clients' salts made. A sharing group's is its
 * members', and goes as well. */
static base_code flush_tenant(gw_admin_call *call, flushed *done, const gw_identity *tenant,
                              base_err *err)
{
    uint64_t *spaces;
    uint32_t count;
    GW_TRY(gw_admin_spaces(call->app->ledger, &spaces, &count, tenant->tenant, SPACES_MAX,
                           call->arena, err));
    GW_TRY(drop(call, done, tenant->salt, err));
    for (uint32_t i = 0; i < count; i++)
        if (spaces[i] != tenant->salt)
            GW_TRY(drop(call, done, spaces[i], err));
    return BASE_OK;
}

static base_code flush_all(gw_admin_call *call, flushed *done, base_err *err)
{
    gw_tenant_info *list;
    uint32_t count = gw_tenants_list(call->app->tenants, &list);
    base_code code = list ? BASE_OK : base_fail(err, BASE_NOMEM, "no memory for the list");
    for (uint32_t i = 0; i < count && !code; i++)
        code = flush_tenant(call, done, &list[i].identity, err);
    free(list);
    return code;
}

/* Of what a session's turns share with other sessions nothing goes: its turns' own rows do. */
static base_code flush_turn(gw_admin_call *call, flushed *done, const gw_session_view *session,
                            const gw_turn_view *turn, base_err *err)
{
    gw_turn_row row;
    if (turn->retention == GW_RETAIN_USAGE)
        return BASE_OK;
    base_arena *arena = base_arena_create(4096, 64u << 20);
    base_code code =
        arena ? gw_ledger_turn(call->app->ledger, &row, session->tenant, turn->id.text, arena, err)
              : base_fail(err, BASE_NOMEM, "no memory for a turn");
    /* Prompt and output lie in one array. Rows that the cache already had are others' too. */
    if (!code)
        code = eng_erase(call->app->engine, turn->space, row.prompt,
                         row.prompt_count + row.run_count, row.usage.cached_tokens, err);
    done->paths += !code;
    base_arena_destroy(arena);
    return code;
}

static base_code flush_session(gw_admin_call *call, flushed *done, const char *id, base_err *err)
{
    gw_session_view session;
    gw_turn_view *turns;
    uint32_t count;
    int64_t next = 0;
    GW_TRY(gw_admin_session_read(call->app->ledger, &session, id, call->arena, err));
    do {
        GW_TRY(gw_admin_turn_list(call->app->ledger, &turns, &count, &next, session.row, next,
                                  TURNS_PAGE, true, call->arena, err));
        for (uint32_t i = 0; i < count; i++)
            GW_TRY(flush_turn(call, done, &session, &turns[i], err));
    } while (next);
    return BASE_OK;
}

static base_code flush(gw_admin_call *call, base_err *err)
{
    const char *tenant = NULL, *session = NULL;
    bool all = false;
    flushed done = {0};
    GW_TRY(gw_read_name(&tenant, call->body, "", "tenant", GW_TENANT_NAME_MAX, err));
    GW_TRY(gw_read_name(&session, call->body, "", "session", GW_ID_MAX, err));
    GW_TRY(gw_read_bool(&all, NULL, call->body, "", "all", err));
    if (!!tenant + !!session + all != 1)
        return base_fail(err, BASE_INVALID, "exactly one of tenant, session and all is needed");
    gw_identity identity;
    base_code code;
    if (tenant && !gw_tenants_named(call->app->tenants, &identity, tenant))
        return base_fail_param(err, BASE_NOT_FOUND, "tenant", "there is no such tenant");
    code = tenant    ? flush_tenant(call, &done, &identity, err)
           : session ? flush_session(call, &done, session, err)
                     : flush_all(call, &done, err);
    if (code)
        return code;
    base_log(BASE_LOG_INFO, "cache_flushed namespaces=%u paths=%u by=admin", done.namespaces,
             done.paths);
    base_buf_printf(&call->out, "{\"object\":\"cache.flushed\",\"namespaces\":%u,\"paths\":%u}",
                    done.namespaces, done.paths);
    return BASE_OK;
}

/* ---- prefetching ---- */

typedef struct prefetch {
    gw_port port; /* first member: the bridge hands it back */
    gw_admin_call *call;
    gw_id session, turn;
    const int32_t *tokens;
    uint32_t count;
    uint64_t space, id;
} prefetch;

static void on_event(gw_port *port, const eng_event *event)
{
    prefetch *p = (prefetch *)port;
    gw_admin_call *call = p->call;
    const eng_usage *u = &event->usage;
    if (event->kind != ENG_EVENT_DONE)
        return;
    gw_port_close(port);
    if (event->finish == ENG_FINISH_STOP)
        base_buf_printf(&call->out,
                        "{\"object\":\"cache.prefetched\",\"session\":\"%s\",\"turn\":\"%s\","
                        "\"tokens\":%u,\"cached_tokens\":%u,\"restored_tokens\":%u,"
                        "\"queue_ms\":%.3f,\"prefill_ms\":%.3f}",
                        p->session.text, p->turn.text, u->prompt_tokens, u->cached_tokens,
                        u->restored_tokens, (double)u->queue_ns / 1e6, (double)u->prefill_ns / 1e6);
    else if (event->finish == ENG_FINISH_ERROR)
        call->err = event->err;
    else
        base_fail(&call->err, BASE_CLOSED, "the server stops");
    gw_admin_finish(call); /* `p` lies in its arena */
}

/* A shutdown does not wait for it. */
static void on_tick(gw_port *port, uint64_t now)
{
    prefetch *p = (prefetch *)port;
    (void)now;
    if (atomic_load(&p->call->app->draining))
        eng_cancel(p->call->app->engine, p->id);
}

static void submit(gw_admin_call *call)
{
    prefetch *p = call->state;
    eng_request request = {.id = p->id = gw_request_id(),
                           .user = &p->port,
                           .tokens = p->tokens,
                           .token_count = p->count,
                           .space = p->space,
                           .prefill_only = true,
                           .no_disk = true}; /* what is there is there; the next turn writes */
    p->port.event = on_event;
    p->port.tick = on_tick;
    base_code code = gw_port_open(call->app->bridge, &p->port, call->loop, &call->err);
    if (!code && !eng_submit(call->app->engine, &request, &call->err))
        return;
    if (!code)
        gw_port_close(&p->port);
    gw_admin_finish(call);
}

/* The session's latest tokens come into memory, from disk where that is quicker: as a request that
 * says nothing. */
static base_code prefetch_session(gw_admin_call *call, base_err *err)
{
    const char *id = NULL;
    gw_session_view session;
    gw_turn_view turn;
    gw_turn_row row;
    GW_TRY(gw_read_name(&id, call->body, "", "session", GW_ID_MAX, err));
    if (!id)
        return base_fail_param(err, BASE_INVALID, "session", "session is needed");
    GW_TRY(gw_admin_session_read(call->app->ledger, &session, id, call->arena, err));
    if (!session.head.text[0])
        return base_fail_param(err, BASE_NOT_FOUND, "session", "the session has no turn");
    GW_TRY(gw_admin_turn_read(call->app->ledger, &turn, session.head.text, call->arena, err));
    if (turn.retention == GW_RETAIN_USAGE || !turn.space)
        return base_fail_param(err, BASE_NOT_FOUND, "session",
                               "the session's last turn keeps no tokens");
    GW_TRY(gw_ledger_turn(call->app->ledger, &row, session.tenant, turn.id.text, call->arena, err));
    prefetch *p = base_arena_calloc(call->arena, 1, sizeof *p);
    if (!p)
        return base_fail(err, BASE_NOMEM, "no memory for the call");
    /* Prompt and output lie in one array. */
    *p = (prefetch){.call = call,
                    .session = session.id,
                    .turn = turn.id,
                    .tokens = row.prompt,
                    .count = row.prompt_count + row.run_count,
                    .space = turn.space};
    call->state = p;
    call->then = submit;
    return BASE_OK;
}

void gw_admin_cache_prefetch(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, prefetch_session);
}

void gw_admin_cache_tree(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, tree);
}

void gw_admin_cache_flush(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, flush);
}
