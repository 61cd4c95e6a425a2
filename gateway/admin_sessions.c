#include "gateway/admin_sessions.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/body.h"
#include "gateway/ledger_admin.h"
#include "gateway/session_turn.h"

#define LIST_DEFAULT 50
#define LIST_MAX 200
#define TOKENS_DEFAULT 4096
#define TOKENS_MAX 65536
#define ITEMS_DEFAULT 50
#define ITEMS_MAX 500

static base_code not_found(gw_admin_call *call, const char *what, base_err *err)
{
    call->row = (gw_error_row){404, "invalid_request_error", NULL, 0, -1};
    return base_fail(err, BASE_NOT_FOUND, "there is no such %s", what);
}

static double ms(uint64_t us)
{
    return (double)us * 1e-3;
}

static void put_sums(base_buf *out, const gw_sums *u)
{
    base_buf_printf(out,
                    "{\"turns\":%" PRIu64 ",\"prompt_tokens\":%" PRIu64
                    ",\"cached_tokens\":%" PRIu64 ",\"restored_tokens\":%" PRIu64
                    ",\"output_tokens\":%" PRIu64 ",\"reasoning_tokens\":%" PRIu64
                    ",\"drafted_tokens\":%" PRIu64 ",\"accepted_tokens\":%" PRIu64
                    ",\"lost_tokens\":%" PRIu64
                    ",\"queue_ms\":%.3f,\"prefill_ms\":%.3f,\"decode_ms\":%.3f}",
                    u->turns, u->prompt_tokens, u->cached_tokens, u->restored_tokens,
                    u->output_tokens, u->reasoning_tokens, u->drafted, u->accepted, u->lost_tokens,
                    ms(u->queue_us), ms(u->prefill_us), ms(u->decode_us));
}

static void put_session(base_buf *out, const gw_session_view *s)
{
    static const char *const kinds[] = {"label", "native", "conversation"};
    base_buf_printf(out, "{\"id\":\"%s\",\"object\":\"session\"", s->id.text);
    gw_put_member(out, "tenant", s->tenant_name);
    base_buf_printf(out, ",\"kind\":\"%s\"", kinds[s->kind >= 0 && s->kind < 3 ? s->kind : 0]);
    gw_put_member(out, "label", s->label);
    gw_put_member(out, "model", s->model);
    base_buf_puts(out, ",\"metadata\":");
    base_buf_puts(out, s->metadata ? s->metadata : "{}");
    gw_put_member(out, "head", s->kind == 1 ? s->head.text : "");
    base_buf_printf(out, ",\"created_at\":%lld,\"used_at\":%lld", (long long)(s->created_ms / 1000),
                    (long long)(s->used_ms / 1000));
    if (s->forked_session.text[0]) {
        base_buf_printf(out, ",\"forked_from\":{\"session\":\"%s\"", s->forked_session.text);
        gw_put_member(out, "turn", s->forked_turn.text);
        base_buf_puts(out, "}");
    } else {
        base_buf_puts(out, ",\"forked_from\":null");
    }
    if (s->pinned_ms > base_wall_ms())
        base_buf_printf(out, ",\"pinned_until\":%lld", (long long)(s->pinned_ms / 1000));
    else
        base_buf_puts(out, ",\"pinned_until\":null");
    base_buf_puts(out, ",\"usage\":");
    put_sums(out, &s->sums);
    base_buf_puts(out, "}");
}

base_code gw_admin_put_session(gw_app *app, base_buf *out, const char *id, base_arena *arena,
                               base_err *err)
{
    gw_session_view session;
    base_code code = gw_admin_session_read(app->ledger, &session, id, arena, err);
    if (!code)
        put_session(out, &session);
    return code;
}

static void put_end(base_buf *out, const char *first, const char *last, int64_t next)
{
    base_buf_puts(out, "]");
    gw_put_member(out, "first_id", first);
    gw_put_member(out, "last_id", last);
    if (next)
        base_buf_printf(out, ",\"has_more\":true,\"next\":\"%lld\"}", (long long)next);
    else
        base_buf_puts(out, ",\"has_more\":false,\"next\":null}");
}

static base_code read_kind(int *out, gw_admin_call *call, base_err *err)
{
    static const char *const kinds[] = {"label", "native", "conversation"};
    const char *text;
    *out = -1;
    GW_TRY(gw_query_text(&text, call->query, "kind", call->arena, err));
    for (int i = 0; text && i < 3; i++)
        if (strcmp(text, kinds[i]) == 0)
            *out = i;
    return text && *out < 0 ? base_fail_param(err, BASE_INVALID, "kind",
                                              "kind must be label, native or conversation")
                            : BASE_OK;
}

/* 0 if no tenant is named; 404 if there is none of that name. */
static base_code read_tenant(int64_t *out, gw_admin_call *call, base_err *err)
{
    const char *name;
    *out = 0;
    GW_TRY(gw_query_text(&name, call->query, "tenant", call->arena, err));
    if (!name)
        return BASE_OK;
    gw_identity identity;
    if (!gw_tenants_named(call->app->tenants, &identity, name))
        return not_found(call, "tenant", err);
    *out = identity.tenant;
    return BASE_OK;
}

static base_code list_sessions(gw_admin_call *call, base_err *err)
{
    gw_session_filter filter = {0};
    gw_session_view *rows;
    uint32_t count;
    int64_t next, limit;
    GW_TRY(gw_query_int(&limit, call->query, "limit", 1, LIST_MAX, LIST_DEFAULT, err));
    GW_TRY(gw_query_int(&filter.before, call->query, "after", 1, INT64_MAX, 0, err));
    GW_TRY(gw_query_text(&filter.text, call->query, "q", call->arena, err));
    GW_TRY(read_kind(&filter.kind, call, err));
    GW_TRY(read_tenant(&filter.tenant, call, err));
    filter.limit = (uint32_t)limit;
    if (filter.text && !filter.text[0])
        filter.text = NULL;
    GW_TRY(
        gw_admin_session_list(call->app->ledger, &rows, &count, &next, &filter, call->arena, err));
    base_buf_puts(&call->out, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; i < count; i++) {
        base_buf_puts(&call->out, i ? "," : "");
        put_session(&call->out, &rows[i]);
    }
    put_end(&call->out, count ? rows[0].id.text : "", count ? rows[count - 1].id.text : "", next);
    return BASE_OK;
}

static base_code get_session(gw_admin_call *call, base_err *err)
{
    return gw_admin_put_session(call->app, &call->out, gw_admin_id(call), call->arena, err);
}

/* ---- turns ---- */

/* Without the closing brace. */
static void put_turn(base_buf *out, const gw_turn_view *t)
{
    static const char *const retentions[] = {"usage", "cached", "kept"};
    const eng_usage *u = &t->usage;
    bool away = strcmp(t->parent_session.text, t->session.text) != 0;
    base_buf_printf(out, "{\"id\":\"%s\",\"object\":\"session.turn\"", t->id.text);
    gw_put_member(out, "session", t->session.text);
    gw_put_member(out, "parent", t->parent.text);
    gw_put_member(out, "parent_session", away ? t->parent_session.text : "");
    base_buf_printf(out, ",\"status\":\"%s\",\"finish_reason\":%s",
                    gw_turn_status_word(t->status, t->finish),
                    gw_turn_finish_json(t->status, t->finish));
    gw_put_member(out, "dialect", t->dialect);
    gw_put_member(out, "model", t->model);
    gw_put_member(out, "request", t->request.text);
    gw_put_member(out, "response", t->response.text);
    base_buf_printf(out, ",\"retention\":\"%s\",\"created_ms\":%lld,\"ended_ms\":%lld",
                    retentions[t->retention], (long long)t->created_ms, (long long)t->ended_ms);
    gw_put_member(out, "tool", t->tool);
    base_buf_printf(out,
                    ",\"usage\":{\"prompt_tokens\":%u,\"cached_tokens\":%u,\"restored_tokens\":%u,"
                    "\"output_tokens\":%u,\"reasoning_tokens\":%u,\"drafted_tokens\":%u,"
                    "\"accepted_tokens\":%u,\"passes\":%u,\"queue_ms\":%.3f,\"prefill_ms\":%.3f,"
                    "\"ttft_ms\":%.3f,\"decode_ms\":%.3f},\"cache\":{\"hit\":%u,\"lost\":%u",
                    u->prompt_tokens, u->cached_tokens, u->restored_tokens, u->output_tokens,
                    u->reasoning_tokens, u->drafted, u->accepted, u->steps,
                    (double)u->queue_ns * 1e-6, (double)u->prefill_ns * 1e-6,
                    (double)u->ttft_ns * 1e-6, (double)u->decode_ns * 1e-6, u->cached_tokens,
                    t->cache.lost);
    gw_put_member(out, "reason", t->reason);
    if (t->cache.diff_item >= 0)
        base_buf_printf(out, ",\"first_diff\":{\"item\":%d,\"token\":%u}}", (int)t->cache.diff_item,
                        t->cache.diff_token);
    else
        base_buf_puts(out, ",\"first_diff\":null}");
}

static base_code list_turns(gw_admin_call *call, base_err *err)
{
    gw_session_view session;
    gw_turn_view *rows;
    uint32_t count;
    int64_t next, limit, after;
    const char *order;
    GW_TRY(gw_query_int(&limit, call->query, "limit", 1, LIST_MAX, LIST_DEFAULT, err));
    GW_TRY(gw_query_int(&after, call->query, "after", 1, INT64_MAX, 0, err));
    GW_TRY(gw_query_text(&order, call->query, "order", call->arena, err));
    if (order && strcmp(order, "asc") != 0 && strcmp(order, "desc") != 0)
        return base_fail_param(err, BASE_INVALID, "order", "order must be asc or desc");
    GW_TRY(gw_admin_session_read(call->app->ledger, &session, gw_admin_id(call), call->arena, err));
    GW_TRY(gw_admin_turn_list(call->app->ledger, &rows, &count, &next, session.row, after,
                              (uint32_t)limit, !order || order[0] == 'a', call->arena, err));
    base_buf_puts(&call->out, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; i < count; i++) {
        base_buf_puts(&call->out, i ? "," : "");
        put_turn(&call->out, &rows[i]);
        base_buf_puts(&call->out, "}");
    }
    put_end(&call->out, count ? rows[0].id.text : "", count ? rows[count - 1].id.text : "", next);
    return BASE_OK;
}

/* What `include` asks for. */
typedef struct wanted {
    bool items, tokens, text;
    uint32_t from, limit, items_limit;
} wanted;

static base_code read_wanted(wanted *out, gw_admin_call *call, base_err *err)
{
    const char *text;
    int64_t from, limit, items_limit;
    GW_TRY(gw_query_int(&from, call->query, "from", 0, UINT32_MAX, 0, err));
    GW_TRY(gw_query_int(&limit, call->query, "limit", 1, TOKENS_MAX, TOKENS_DEFAULT, err));
    GW_TRY(
        gw_query_int(&items_limit, call->query, "items_limit", 1, ITEMS_MAX, ITEMS_DEFAULT, err));
    GW_TRY(gw_query_text(&text, call->query, "include", call->arena, err));
    *out = (wanted){
        .from = (uint32_t)from, .limit = (uint32_t)limit, .items_limit = (uint32_t)items_limit};
    while (text && *text) {
        size_t length = strcspn(text, ",");
        bool *const flag = strncmp(text, "items", length) == 0 && length == 5    ? &out->items
                           : strncmp(text, "tokens", length) == 0 && length == 6 ? &out->tokens
                           : strncmp(text, "text", length) == 0 && length == 4   ? &out->text
                                                                                 : NULL;
        if (!flag)
            return base_fail_param(err, BASE_INVALID, "include",
                                   "include must be a list of items, tokens and text");
        *flag = true;
        text += length + (text[length] == ',');
    }
    return BASE_OK;
}

/* How many of its items the parent turn had: where the turn's own begin. */
static base_code count_before(gw_admin_call *call, uint32_t *out, const gw_turn_view *t,
                              char **items, uint32_t total, base_err *err)
{
    char **before = NULL;
    uint32_t count = 0;
    *out = 0;
    if (!t->parent.text[0])
        return BASE_OK;
    base_code code = gw_ledger_items(call->app->ledger, &before, &count, t->tenant, t->parent.text,
                                     call->arena, err);
    if (code)
        return code;
    while (*out < count && *out < total && strcmp(before[*out], items[*out]) == 0)
        ++*out;
    return BASE_OK;
}

static base_code put_items(gw_admin_call *call, const gw_turn_view *t, uint32_t limit,
                           base_err *err)
{
    char **items;
    uint32_t total, fresh;
    GW_TRY(gw_ledger_items(call->app->ledger, &items, &total, t->tenant, t->id.text, call->arena,
                           err));
    base_err ignored = BASE_ERR_INIT; /* a parent that is gone: all of them are the turn's own */
    if (count_before(call, &fresh, t, items, total, &ignored))
        fresh = 0;
    uint32_t from = total > limit ? total - limit : 0;
    base_buf_printf(&call->out, ",\"items\":{\"total\":%u,\"from\":%u,\"fresh_from\":%u,\"data\":[",
                    total, from, fresh);
    for (uint32_t i = from; i < total; i++) {
        base_buf_puts(&call->out, i > from ? "," : "");
        base_buf_puts(&call->out, items[i]);
    }
    base_buf_puts(&call->out, "]}");
    return BASE_OK;
}

static base_code put_pieces(gw_admin_call *call, const int32_t *tokens, uint32_t count,
                            base_err *err)
{
    base_buf piece;
    base_buf_init(&piece, 0);
    base_code code = BASE_OK;
    for (uint32_t i = 0; i < count && !code; i++) {
        base_buf_clear(&piece);
        code = eng_detokenize(call->app->engine, &piece, &tokens[i], 1, err);
        base_buf_puts(&call->out, i ? "," : "");
        base_buf_json_text(&call->out, piece.data ? piece.data : "", piece.length);
        call->out.failed |= piece.failed;
    }
    base_buf_deinit(&piece);
    return code;
}

/* Prompt and output lie in one array, see gw_turn_tokens; another template's tokens spell nothing
 * here. */
static base_code put_tokens(gw_admin_call *call, const gw_turn_view *t, const wanted *w,
                            base_err *err)
{
    gw_turn_row row;
    GW_TRY(gw_ledger_turn(call->app->ledger, &row, t->tenant, t->id.text, call->arena, err));
    uint32_t total = row.prompt_count + row.run_count;
    uint32_t from = (uint32_t)base_min(w->from, total);
    uint32_t count = (uint32_t)base_min(w->limit, total - from);
    int32_t *tokens = base_arena_alloc(call->arena, base_max(count, 1) * sizeof *tokens);
    if (!tokens)
        return base_fail(err, BASE_NOMEM, "no memory for the tokens");
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = from + i < row.prompt_count ? row.prompt[from + i]
                                                : row.run[from + i - row.prompt_count];
    if (w->tokens) {
        base_buf_printf(&call->out,
                        ",\"tokens\":{\"total\":%u,\"prompt_tokens\":%u,\"cached_tokens\":%u,"
                        "\"from\":%u,\"ids\":",
                        total, row.prompt_count, t->usage.cached_tokens, from);
        gw_put_ids(&call->out, tokens, count);
        base_buf_puts(&call->out, ",\"pieces\":[");
        GW_TRY(put_pieces(call, tokens, count, err));
        base_buf_puts(&call->out, "]}");
    }
    if (!w->text)
        return BASE_OK;
    base_buf text;
    base_buf_init(&text, 0);
    base_code code = eng_detokenize(call->app->engine, &text, tokens, count, err);
    base_buf_printf(&call->out, ",\"text\":{\"from\":%u,\"count\":%u,\"value\":", from, count);
    base_buf_json_text(&call->out, text.data ? text.data : "", text.length);
    base_buf_puts(&call->out, "}");
    call->out.failed |= text.failed;
    base_buf_deinit(&text);
    return code;
}

static base_code get_turn(gw_admin_call *call, base_err *err)
{
    gw_turn_view turn;
    wanted w;
    GW_TRY(read_wanted(&w, call, err));
    GW_TRY(gw_admin_turn_read(call->app->ledger, &turn, gw_admin_id(call), call->arena, err));
    bool bare = turn.retention == GW_RETAIN_USAGE;
    put_turn(&call->out, &turn);
    if (w.items && !bare)
        GW_TRY(put_items(call, &turn, w.items_limit, err));
    else
        base_buf_puts(&call->out, ",\"items\":null");
    if ((w.tokens || w.text) && !bare)
        GW_TRY(put_tokens(call, &turn, &w, err));
    if (!w.tokens || bare)
        base_buf_puts(&call->out, ",\"tokens\":null");
    if (!w.text || bare)
        base_buf_puts(&call->out, ",\"text\":null");
    base_buf_puts(&call->out, "}");
    return BASE_OK;
}

void gw_admin_sessions(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, list_sessions);
}

void gw_admin_session(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, get_session);
}

void gw_admin_turns(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, list_turns);
}

void gw_admin_turn(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, get_turn);
}
