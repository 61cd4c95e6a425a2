/* api_sessions: see the header. Each call is a job on a worker and an answer on the loop. */
#include "gateway/api_sessions.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "engine/base/clock.h"
#include "engine/base/num.h"
#include "gateway/admin_sessions.h"
#include "gateway/api_chat.h"
#include "gateway/append.h"
#include "gateway/conf.h"
#include "gateway/ledger_admin.h"
#include "gateway/ledger_session.h"
#include "gateway/pin.h"
#include "gateway/session_export.h"
#include "gateway/session_turn.h"

#define PREFILL_WAIT_NS 2000000000ull
#define ARENA_BYTES (256u << 20) /* of a call: a page of turns, or a whole session's export */

typedef enum verb { CREATE, LIST, GET, TURNS, DELETE, FORK, PIN, APPEND, EXPORT, IMPORT } verb;

/* A call: a worker does it, the loop answers. Freed on the loop when the worker's message came. */
typedef struct call {
    gw_job job;
    gw_message back;
    gw_app *app;
    gw_exchange *exchange; /* NULL once the client left. Loop */
    gw_loop *loop;
    gw_identity identity;
    verb verb;
    gw_id session;
    char *body, *query;
    size_t body_length;
    bool is_json; /* the body's media type */
    bool appended;
    bool operates; /* an operator's call: the session of any tenant */
    json_t *json;
    base_arena *arena;
    base_buf out;
    base_err err;
    gw_error_row row; /* status 0: by the table */
} call;

static base_code reject(call *c, base_err *err, int status, const char *code, const char *param,
                        const char *text)
{
    c->row = (gw_error_row){status, "invalid_request_error", code, 0, -1};
    return base_fail_param(err, status == 404 ? BASE_NOT_FOUND : BASE_INVALID, param, "%s", text);
}

static base_code no_session(call *c, base_err *err)
{
    char text[GW_ID_MAX + 64];
    snprintf(text, sizeof text, "Session with id '%.*s' not found.", gw_shown(c->session.text, 64),
             c->session.text);
    return reject(c, err, 404, "session_not_found", "session_id", text);
}

static void put_raw(base_buf *out, const char *name, const char *json)
{
    base_buf_printf(out, ",\"%s\":", name);
    base_buf_puts(out, json);
}

static void put_id(base_buf *out, const char *name, const char *id)
{
    base_buf_printf(out, id[0] ? ",\"%s\":\"%s\"" : ",\"%s\":null", name, id);
}

static void put_session(base_buf *out, const gw_session_row *session)
{
    base_buf_printf(out, "{\"id\":\"%s\",\"object\":\"session\",\"created_at\":%lld,\"model\":",
                    session->id.text, (long long)(session->created_ms / 1000));
    base_buf_json_string(out, session->model, strlen(session->model));
    put_raw(out, "metadata", session->metadata ? session->metadata : "{}");
    put_id(out, "head", session->head.text);
    base_buf_printf(out, ",\"turns\":%u,\"used_at\":%lld", session->turns,
                    (long long)(session->used_ms / 1000));
    if (session->forked_session.text[0]) {
        base_buf_printf(out, ",\"forked_from\":{\"session\":\"%s\"", session->forked_session.text);
        put_id(out, "turn", session->forked_turn.text);
        base_buf_puts(out, "}");
    } else {
        base_buf_puts(out, ",\"forked_from\":null");
    }
    if (session->pinned_ms > base_wall_ms())
        base_buf_printf(out, ",\"pinned_until\":%lld}", (long long)(session->pinned_ms / 1000));
    else
        base_buf_puts(out, ",\"pinned_until\":null}");
}

static void put_list_end(base_buf *out, const char *first, const char *last, bool more)
{
    base_buf_puts(out, "]");
    put_id(out, "first_id", first);
    put_id(out, "last_id", last);
    base_buf_printf(out, ",\"has_more\":%s}", more ? "true" : "false");
}

static base_code find(call *c, gw_session_row *out, base_err *err)
{
    base_err why = BASE_ERR_INIT;
    base_code code =
        gw_session_read(c->app->ledger, out, c->identity.tenant, c->session.text, c->arena, &why);
    if (code == BASE_NOT_FOUND)
        return no_session(c, err);
    return code ? base_fail(err, code, "%s", why.text) : BASE_OK;
}

/* No body is an empty object. */
static base_code parse_body(call *c, base_err *err)
{
    if (!c->body_length) {
        c->json = json_object();
        return c->json ? BASE_OK : gw_no_memory(err);
    }
    GW_TRY(gw_body_mend(c->body, c->body_length, c->app->conf->limits_json_depth_max, err));
    return gw_body_parse(&c->json, c->body, c->body_length, err);
}

static base_code locked(call *c, base_err *err)
{
    c->row = (gw_error_row){409, "conflict_error", "conversation_locked", 1000, 1};
    return base_fail_param(err, BASE_CONFLICT, "session_id",
                           "A turn of this session is still running.");
}

static base_code respond_session(call *c, const char *id, base_err *err)
{
    if (c->operates)
        return gw_admin_put_session(c->app, &c->out, id, c->arena, err);
    gw_session_row session;
    GW_TRY(gw_session_read(c->app->ledger, &session, c->identity.tenant, id, c->arena, err));
    put_session(&c->out, &session);
    return BASE_OK;
}

static const gw_error_row session_limit = {429, "rate_limit_error", "session_limit", 0, 0};

static base_code add_session(call *c, gw_session_new *fresh, base_err *err)
{
    fresh->tenant = c->identity.tenant;
    fresh->created_ms = base_wall_ms();
    fresh->count_max = c->app->conf->sessions_count_max;
    base_code code = gw_session_create(c->app->ledger, fresh, err);
    if (code == BASE_FULL)
        c->row = session_limit;
    return code ? code : respond_session(c, fresh->id, err);
}

/* The tools and texts are checked as a turn would; what they are is kept as it was written. */
static base_code create(call *c, base_err *err)
{
    gw_turn plan = {
        .app = c->app, .arena = c->arena, .body = c->body, .body_length = c->body_length};
    eng_text tools;
    if (!c->body_length)
        return base_fail_param(err, BASE_INVALID, "model", "model must name the model to use");
    GW_TRY(gw_body_mend(c->body, c->body_length, c->app->conf->limits_json_depth_max, err));
    GW_TRY(gw_keep_raw(&plan, &tools, "tools", err));
    base_code code = gw_parse_body(&plan, err);
    c->json = plan.json;
    GW_TRY(code);
    code = gw_turn_check_model(&plan, err);
    c->row = plan.error_row;
    GW_TRY(code);
    GW_TRY(gw_read_metadata(&plan, err));
    GW_TRY(gw_read_tools(&plan, &gw_chat_tools, tools, err));
    eng_text system = {0};
    GW_TRY(gw_read_text(&system, c->json, "", "system", err));
    base_buf json;
    base_buf_init(&json, 0);
    base_buf_puts(&json, "{\"tools\":");
    base_buf_add(&json, tools.data, tools.length);
    if (system.data) {
        base_buf_puts(&json, ",\"system\":");
        base_buf_json_string(&json, system.data, system.length);
    }
    base_buf_puts(&json, "}");
    eng_text text;
    GW_TRY(gw_keep(&plan, &text, &json, err));
    gw_id id = gw_id_mint("sess_");
    gw_session_new fresh = {
        .id = id.text, .model = plan.model, .metadata = plan.metadata, .config = text.data};
    return add_session(c, &fresh, err);
}

static base_code list(call *c, base_err *err)
{
    gw_page page;
    gw_session_row *rows;
    uint32_t count;
    bool more;
    GW_TRY(gw_page_read(&page, c->query, err));
    base_err why = BASE_ERR_INIT;
    base_code code = gw_session_list(c->app->ledger, &rows, &count, &more, c->identity.tenant,
                                     page.after[0] ? page.after : NULL, page.limit,
                                     page.oldest_first, c->arena, &why);
    if (code == BASE_NOT_FOUND)
        return reject(c, err, 404, "session_not_found", "after", why.text);
    if (code)
        return base_fail(err, code, "%s", why.text);
    base_buf_puts(&c->out, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; i < count; i++) {
        base_buf_puts(&c->out, i ? "," : "");
        put_session(&c->out, &rows[i]);
    }
    put_list_end(&c->out, count ? rows[0].id.text : "", count ? rows[count - 1].id.text : "", more);
    return BASE_OK;
}

static void put_items(base_buf *out, const gw_path_turn *turn, json_t **calls)
{
    for (uint32_t i = 0; i < turn->item_count; i++) {
        base_buf_puts(out, i ? "," : "");
        gw_put_turn_item(out, turn->items[i], calls);
    }
}

static void put_stored_turn(base_buf *out, const gw_path_turn *turn, const char *session,
                            json_t **calls)
{
    gw_put_turn_head(out, turn->id.text, session, turn->parent.text,
                     gw_turn_status_word(turn->status, turn->finish), turn->created_ms);
    base_buf_printf(out, "\"finish_reason\":%s,\"items\":[",
                    gw_turn_finish_json(turn->status, turn->finish));
    put_items(out, turn, calls);
    base_buf_puts(out, "],");
    gw_chat_put_counts(out, &turn->usage);
    base_buf_puts(out, "}");
    gw_put_turn_cache(out, &turn->usage, turn->reason);
}

/* The calls that the first turn of a page answers. */
static base_code calls_before(call *c, json_t **calls, const gw_session_row *session,
                              const gw_path_turn *first, base_err *err)
{
    gw_path_turn *before;
    uint32_t count;
    bool more;
    if (!first->parent.text[0])
        return BASE_OK;
    GW_TRY(gw_session_path(c->app->ledger, &before, &count, &more, c->identity.tenant, session,
                           first->parent.text, NULL, 1, true, NULL, c->arena, err));
    if (count && before->item_count)
        *calls = gw_calls_of(before->items[before->item_count - 1]);
    return BASE_OK;
}

static base_code put_tokens(call *c, const gw_path_turn *turn, base_err *err)
{
    gw_turn_row row;
    GW_TRY(gw_ledger_turn(c->app->ledger, &row, c->identity.tenant, turn->id.text, c->arena, err));
    base_buf_puts(&c->out, ",\"tokens\":{\"prompt\":");
    gw_put_ids(&c->out, row.prompt, row.prompt_count);
    base_buf_puts(&c->out, ",\"output\":");
    gw_put_ids(&c->out, row.run, row.run_count);
    base_buf_puts(&c->out, "}");
    return BASE_OK;
}

static base_code turns(call *c, base_err *err)
{
    gw_session_row session;
    gw_page page;
    gw_path_turn *path;
    uint32_t count;
    bool more;
    char value[8];
    bool tokens =
        gw_query_value(c->query, "tokens", value, sizeof value) && strcmp(value, "true") == 0;
    GW_TRY(gw_page_read(&page, c->query, err));
    GW_TRY(find(c, &session, err));
    base_err why = BASE_ERR_INIT;
    base_code code = gw_session_path(c->app->ledger, &path, &count, &more, c->identity.tenant,
                                     &session, NULL, page.after[0] ? page.after : NULL, page.limit,
                                     !page.oldest_first, NULL, c->arena, &why);
    if (code == BASE_NOT_FOUND)
        return reject(c, err, 404, "turn_not_found", "after", why.text);
    if (code)
        return base_fail(err, code, "%s", why.text);
    json_t *calls = NULL;
    if (count)
        code = calls_before(c, &calls, &session, &path[0], err);
    /* Results are named by the calls before them, so the oldest is written first in any order. */
    base_buf *texts = base_arena_calloc(c->arena, base_max(count, 1), sizeof *texts);
    if (!code && !texts)
        code = gw_no_memory(err);
    base_buf whole = c->out;
    for (uint32_t i = 0; !code && i < count; i++) {
        c->out = texts[i];
        put_stored_turn(&c->out, &path[i], session.id.text, &calls);
        if (tokens)
            code = put_tokens(c, &path[i], err);
        base_buf_puts(&c->out, "}");
        texts[i] = c->out;
    }
    c->out = whole;
    json_decref(calls);
    base_buf_puts(&c->out, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; texts && i < count; i++) {
        base_buf *text = &texts[page.oldest_first ? i : count - 1 - i];
        base_buf_puts(&c->out, i ? "," : "");
        base_buf_add(&c->out, text->data ? text->data : "", text->length);
        c->out.failed |= text->failed;
    }
    for (uint32_t i = 0; texts && i < count; i++)
        base_buf_deinit(&texts[i]);
    const char *first = count ? path[page.oldest_first ? 0 : count - 1].id.text : "";
    const char *last = count ? path[page.oldest_first ? count - 1 : 0].id.text : "";
    put_list_end(&c->out, first, last, more);
    return code;
}

/* Not while a turn runs, which would put back what was deleted. */
static base_code delete_session(call *c, base_err *err)
{
    gw_lock lock = {0};
    uint64_t until = base_now_ns() + PREFILL_WAIT_NS;
    while (gw_lock_try(c->app->locks, &lock, c->identity.tenant, c->session.text) !=
           GW_CLAIM_HELD) {
        /* A prefill is short, and nobody asked for it. */
        if (base_now_ns() > until ||
            !gw_append_prefills(c->app->appends, c->identity.tenant, c->session.text))
            return locked(c, err);
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    base_err why = BASE_ERR_INIT;
    base_code code = gw_session_delete(c->app->ledger, c->identity.tenant, c->session.text, &why);
    gw_lock_let_go(c->app->locks, &lock);
    if (code == BASE_NOT_FOUND)
        return no_session(c, err);
    if (code)
        return base_fail(err, code, "%s", why.text);
    gw_append_drop(c->app->appends, c->identity.tenant, c->session.text);
    gw_pin_drop(c->app->pins, c->identity.tenant, c->session.text);
    /* The answer says that nothing is left: pages and the log, too. */
    gw_ledger_purge(c->app->ledger);
    base_buf_printf(&c->out, "{\"id\":\"%s\",\"object\":\"session.deleted\",\"deleted\":true}",
                    c->session.text);
    return BASE_OK;
}

static base_code fork_session(call *c, base_err *err)
{
    gw_session_row session;
    const char *turn = NULL;
    gw_path_turn *path;
    uint32_t count;
    bool more;
    gw_turn plan = {.app = c->app, .arena = c->arena, .json = c->json};
    GW_TRY(find(c, &session, err));
    GW_TRY(gw_read_name(&turn, c->json, "", "turn", GW_NAME_BYTES_MAX, err));
    GW_TRY(gw_read_metadata(&plan, err));
    base_err why = BASE_ERR_INIT;
    base_code code = turn
                         ? gw_session_path(c->app->ledger, &path, &count, &more, c->identity.tenant,
                                           &session, turn, NULL, 1, true, NULL, c->arena, &why)
                         : BASE_OK;
    if (code == BASE_NOT_FOUND)
        return reject(c, err, 404, "turn_not_found", "turn", why.text);
    if (code)
        return base_fail(err, code, "%s", why.text);
    gw_id id = gw_id_mint("sess_");
    gw_session_new fresh = {.id = id.text,
                            .model = session.model,
                            .metadata = plan.metadata ? plan.metadata : session.metadata,
                            .config = session.config,
                            .head = turn                   ? turn
                                    : session.head.text[0] ? session.head.text
                                                           : NULL,
                            .forked_session = session.id.text};
    return add_session(c, &fresh, err);
}

/* Within the bounds of what pins may hold. */
static base_code hold(call *c, const char *session, uint32_t tokens, uint64_t seconds,
                      base_err *err)
{
    uint32_t page_tokens = eng_get_info(c->app->engine)->page_tokens;
    uint32_t pages = (tokens + page_tokens - 1) / page_tokens;
    uint64_t now = base_now_ns();
    base_code code = gw_pin_put(c->app->pins, c->identity.tenant, session, pages,
                                now + seconds * 1000000000, now, err);
    if (code == BASE_FULL)
        c->row = (gw_error_row){429, "rate_limit_error", "pin_limit", 0, 0};
    return code;
}

/* Longer than what is there would cost memory that others need; 0 ends it. */
static base_code pin(call *c, base_err *err)
{
    gw_session_row session;
    gw_head head;
    int64_t seconds = 0;
    bool seen = false;
    uint32_t max = c->app->conf->sessions_pin_seconds_max;
    GW_TRY(find(c, &session, err));
    GW_TRY(gw_read_int(&seconds, &seen, c->json, "", "seconds", 0, max, err));
    if (!seen)
        return base_fail_param(err, BASE_INVALID, "seconds", "seconds must be 0 to %u", max);
    if (!seconds)
        gw_pin_drop(c->app->pins, c->identity.tenant, session.id.text);
    if (session.head_row) {
        GW_TRY(gw_session_head(c->app->ledger, &head, c->identity.tenant, &session, NULL, "",
                               c->arena, err));
        uint32_t count = head.prompt_count + head.run_count;
        int32_t *tokens = base_arena_alloc(c->arena, base_max(count, 1) * sizeof *tokens);
        if (!tokens)
            return gw_no_memory(err);
        memcpy(tokens, head.prompt, head.prompt_count * sizeof *tokens);
        memcpy(tokens + head.prompt_count, head.run, head.run_count * sizeof *tokens);
        if (seconds)
            GW_TRY(hold(c, session.id.text, count, (uint64_t)seconds, err));
        eng_pin(c->app->engine, c->identity.salt, tokens, count, (uint64_t)seconds);
    }
    int64_t until = seconds ? base_wall_ms() + seconds * 1000 : 0;
    GW_TRY(gw_session_pin(c->app->ledger, c->identity.tenant, session.id.text, until, err));
    if (until)
        base_buf_printf(&c->out, "{\"pinned_until\":%lld}", (long long)(until / 1000));
    else
        base_buf_puts(&c->out, "{\"pinned_until\":null}");
    return BASE_OK;
}

/* {call_id, text, done?}, or the text itself with call_id and done in the query. */
static base_code read_piece(call *c, const char **id, eng_text *text, bool *done, base_err *err)
{
    if (!c->is_json) {
        char flag[8], name[GW_NAME_BYTES_MAX];
        *done = gw_query_value(c->query, "done", flag, sizeof flag) && strcmp(flag, "true") == 0;
        if (gw_query_value(c->query, "call_id", name, sizeof name)) {
            *id = base_arena_copy(c->arena, name, strlen(name));
            if (!*id)
                return gw_no_memory(err);
        }
        *text = (eng_text){c->body, c->body_length};
    } else {
        GW_TRY(parse_body(c, err));
        GW_TRY(gw_read_name(id, c->json, "", "call_id", GW_NAME_BYTES_MAX, err));
        GW_TRY(gw_read_text(text, c->json, "", "text", err));
        GW_TRY(gw_read_bool(done, NULL, c->json, "", "done", err));
    }
    if (!*id)
        return base_fail_param(err, BASE_INVALID, "call_id",
                               "call_id must name the call whose result this is");
    return BASE_OK;
}

static base_code append(call *c, base_err *err)
{
    gw_session_row session;
    bool done = false;
    const char *id = NULL;
    eng_text text = {"", 0};
    GW_TRY(find(c, &session, err));
    GW_TRY(read_piece(c, &id, &text, &done, err));
    if (!gw_append_fits(text.data ? text.data : "", text.length))
        return base_fail_param(err, BASE_INVALID, "text", "the piece is not UTF-8");
    gw_appends *appends = c->app->appends;
    base_err why = BASE_ERR_INIT;
    base_code code = gw_append_check(c->app, c->identity.tenant, &session, id, c->arena, &why);
    if (code == BASE_CONFLICT)
        return locked(c, err);
    if (code)
        return base_fail_param(err, code, why.param, "%s", why.text);
    const gw_append_key key = {c->identity.tenant, session.id.text, session.head.text};
    gw_append_state now;
    code = gw_append_put(appends, &now, &key, id, text.data, text.length, done, err);
    if (code == BASE_TOO_LONG)
        c->row = (gw_error_row){413, "request_too_large", "request_too_large", 0, -1};
    if (code)
        return code;
    c->appended = true;
    base_buf_puts(&c->out, "{\"call_id\":");
    base_buf_json_string(&c->out, id, strlen(id));
    base_buf_printf(&c->out, ",\"received_bytes\":%llu,\"prefilled_tokens\":%llu,\"done\":%s}",
                    (unsigned long long)now.received_bytes,
                    (unsigned long long)now.prefilled_tokens, now.done ? "true" : "false");
    return BASE_OK;
}

static base_code export(call *c, base_err *err)
{
    gw_session_row session;
    GW_TRY(find(c, &session, err));
    return gw_session_export(c->app, &c->out, c->identity.tenant, &session, c->arena, err);
}

static base_code import(call *c, base_err *err)
{
    gw_import done;
    GW_TRY(gw_body_mend(c->body, c->body_length, c->app->conf->limits_json_depth_max, err));
    base_code code =
        gw_session_import(c->app, &done, &c->identity, c->body, c->body_length, c->arena, err);
    if (code == BASE_FULL)
        c->row = session_limit;
    GW_TRY(code);
    GW_TRY(respond_session(c, done.session.text, err));
    c->out.length--; /* one more member */
    base_buf_printf(&c->out, ",\"imported\":{\"items\":%u,\"turns\":%u,\"tokens\":%s}}", done.items,
                    done.turns, done.tokens ? "true" : "false");
    return BASE_OK;
}

static base_code get(call *c, base_err *err)
{
    gw_session_row session;
    GW_TRY(find(c, &session, err));
    put_session(&c->out, &session);
    return BASE_OK;
}

/* Whose session it is: the call goes on as that tenant's. */
static base_code become_owner(call *c, base_err *err)
{
    gw_session_view session;
    base_err why = BASE_ERR_INIT;
    base_code code =
        gw_admin_session_read(c->app->ledger, &session, c->session.text, c->arena, &why);
    if (code == BASE_NOT_FOUND ||
        (!code && !gw_tenants_identity(c->app->tenants, &c->identity, session.tenant)))
        return no_session(c, err);
    if (code)
        return base_fail(err, code, "%s", why.text);
    if (session.kind == 1)
        return BASE_OK;
    c->row = (gw_error_row){409, "conflict_error", "not_native", 0, 0};
    return base_fail(err, BASE_CONFLICT, "only native sessions can be changed and exported");
}

static base_code work(call *c, base_err *err)
{
    if (c->operates)
        GW_TRY(become_owner(c, err));
    if (c->verb == FORK || c->verb == PIN)
        GW_TRY(parse_body(c, err));
    switch (c->verb) {
    case CREATE:
        return create(c, err);
    case LIST:
        return list(c, err);
    case GET:
        return get(c, err);
    case TURNS:
        return turns(c, err);
    case DELETE:
        return delete_session(c, err);
    case FORK:
        return fork_session(c, err);
    case PIN:
        return pin(c, err);
    case APPEND:
        return append(c, err);
    case EXPORT:
        return export(c, err);
    case IMPORT:
        return import(c, err);
    }
    return BASE_OK;
}

static void run(gw_job *job)
{
    call *c = (call *)((char *)job - offsetof(call, job));
    base_code code = work(c, &c->err);
    if (!code && c->out.failed)
        code = gw_no_memory(&c->err);
    if (code && !c->err.code)
        base_fail(&c->err, code, "the request could not be done");
    gw_loop_post(c->loop, &c->back);
}

static void back(gw_message *message)
{
    static const gw_header headers[] = {{"content-type", "application/json"}};
    call *c = (call *)((char *)message - offsetof(call, back));
    if (c->exchange && c->err.code && c->row.status)
        gw_error_respond_row(c->exchange, &c->row, c->err.param, c->err.text);
    else if (c->exchange && c->err.code)
        gw_error_respond_err(c->exchange, &c->err);
    else if (c->exchange)
        gw_respond(c->exchange, 200, headers, 1, c->out.data, c->out.length);
    if (c->appended)
        gw_append_prefill(c->app->appends, &c->identity, c->session.text, c->loop);
    base_buf_deinit(&c->out);
    json_decref(c->json);
    base_arena_destroy(c->arena);
    free(c->body);
    free(c->query);
    free(c);
}

static void gone(void *ctx)
{
    ((call *)ctx)->exchange = NULL;
}

static void begin(gw_app *app, gw_exchange *exchange, verb what, const gw_id *session)
{
    gw_identity identity;
    bool operates = gw_exchange_listener(exchange) == GW_LISTENER_ADMIN;
    if (operates ? !gw_admin_admit(app, exchange, &identity)
                 : !gw_tenants_admit(app->tenants, &identity, exchange, GW_SCOPE_INFER))
        return;
    size_t length;
    const char *body = gw_exchange_body(exchange, &length);
    call *c = calloc(1, sizeof *c);
    base_err err = BASE_ERR_INIT;
    if (c) {
        c->arena = base_arena_create(4096, ARENA_BYTES);
        c->query = strdup(gw_exchange_query(exchange));
        c->body = malloc(length + 1);
    }
    if (!c || !c->arena || !c->query || !c->body) {
        if (c) {
            base_arena_destroy(c->arena);
            free(c->query);
            free(c->body);
        }
        free(c);
        gw_no_memory(&err);
        gw_error_respond_err(exchange, &err);
        return;
    }
    if (length)
        memcpy(c->body, body, length);
    c->body[length] = '\0';
    c->body_length = length;
    c->job.run = run;
    c->job.bytes = length;
    c->back.run = back;
    c->app = app;
    c->exchange = exchange;
    c->loop = gw_exchange_loop(exchange);
    c->identity = identity;
    c->operates = operates;
    c->verb = what;
    const char *type = gw_exchange_header(exchange, "content-type");
    c->is_json = type && strncasecmp(type, "application/json", 16) == 0;
    if (session)
        c->session = *session;
    gw_exchange_set_handler(exchange, c, gone, NULL);
    if (!gw_workers_submit(app->workers, &c->job)) {
        base_fail(&c->err, BASE_FULL, "too many requests wait for a worker");
        back(&c->back);
    }
}

void gw_api_sessions_create(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, CREATE, NULL);
}

void gw_api_sessions_list(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, LIST, NULL);
}

/* Of a path "/v1/sessions/ID/WORD", on the admin listener below "/admin". */
static void begin_below(gw_app *app, gw_exchange *exchange, verb what, const char *word)
{
    gw_id id;
    const char *have;
    const char *path = gw_exchange_path(exchange);
    path += strncmp(path, "/admin/", 7) == 0 ? strlen("/admin") : 0;
    if (gw_session_of_path(&id, &have, path) && strncmp(have, word, strlen(word)) == 0 &&
        strspn(have + strlen(word), "/") == strlen(have + strlen(word)))
        begin(app, exchange, what, &id);
    else
        gw_error_not_found(exchange);
}

void gw_api_sessions_get(gw_app *app, gw_exchange *exchange)
{
    begin_below(app, exchange, GET, "");
}

void gw_api_sessions_turns(gw_app *app, gw_exchange *exchange)
{
    begin_below(app, exchange, TURNS, "turns");
}

void gw_api_sessions_delete(gw_app *app, gw_exchange *exchange)
{
    begin_below(app, exchange, DELETE, "");
}

void gw_api_sessions_fork(gw_app *app, gw_exchange *exchange)
{
    begin_below(app, exchange, FORK, "fork");
}

void gw_api_sessions_pin(gw_app *app, gw_exchange *exchange)
{
    begin_below(app, exchange, PIN, "pin");
}

void gw_api_sessions_append(gw_app *app, gw_exchange *exchange)
{
    begin_below(app, exchange, APPEND, "append");
}

void gw_api_sessions_export(gw_app *app, gw_exchange *exchange)
{
    begin_below(app, exchange, EXPORT, "export");
}

void gw_api_sessions_import(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, IMPORT, NULL);
}
