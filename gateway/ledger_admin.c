/* Sessions and turns of every tenant, for the operator. Rare calls: statements are made for each.
 */
#include "gateway/ledger_admin.h"

#include <string.h>

#include "engine/base/num.h"
#include "gateway/ledger_internal.h"

#define SESSION_COLUMNS                                                                            \
    "s.id, s.public, s.tenant, t.name, s.kind, s.label, s.model, s.metadata, h.public, "           \
    "s.forked_session, s.forked_turn, s.created_ms, s.used_ms, s.pinned_ms"
#define SESSION_JOINS " JOIN tenants t ON t.id=s.tenant LEFT JOIN turns h ON h.id=s.head"

#define TURN_COLUMNS                                                                               \
    "t.id, t.tenant, t.public, s.public, p.public, ps.public, t.request, t.response, t.dialect, "  \
    "t.model, t.tool, t.reason, t.status, t.finish, t.retention, t.prompt_tokens, "                \
    "t.cached_tokens, t.restored_tokens, t.output_tokens, t.reasoning_tokens, t.drafted, "         \
    "t.accepted, t.engine_steps, t.queue_us, t.prefill_us, t.ttft_us, t.decode_us, t.lost, "       \
    "t.diff_item, t.diff_token, t.created_ms, t.ended_ms, t.space FROM turns t LEFT JOIN "         \
    "sessions s ON "                                                                               \
    "s.id=t.session LEFT JOIN turns p ON p.id=t.parent LEFT JOIN sessions ps ON ps.id=p.session"

/* Turns that ran here, as requests; other choices are no requests. */
#define TRACE_SELECT                                                                               \
    "SELECT s.id, s.public, t.public, t.tenant, t.space, t.created_ms, t.ended_ms, t.finish, "     \
    "t.tool IS NOT NULL, t.output_tokens FROM turns t JOIN sessions s ON s.id=t.session WHERE "    \
    "t.retention<>0 AND t.extra IS NULL AND (?1=0 OR t.tenant=?1) AND (?2 IS NULL OR "             \
    "s.public=?2) ORDER BY "

static const char *column_text(sqlite3_stmt *s, int column, base_arena *arena)
{
    const void *text = sqlite3_column_text(s, column);
    return text ? base_arena_copy(arena, text, (size_t)sqlite3_column_bytes(s, column)) : NULL;
}

static void column_id(sqlite3_stmt *s, int column, gw_id *out)
{
    gw_id_set(out, (const char *)sqlite3_column_text(s, column));
}

static base_code over(gw_db *c, int code, base_arena *arena, base_err *err)
{
    if (code != SQLITE_DONE && code != SQLITE_ROW)
        return gw_db_error(c, err, "cannot read");
    return base_arena_failed(arena) ? base_fail(err, BASE_NOMEM, "no memory for the list")
                                    : BASE_OK;
}

/* The last step of a statement, and the reader given back. */
static base_code finish(gw_ledger *ledger, gw_db *c, sqlite3_stmt *s, int step, base_arena *arena,
                        base_err *err)
{
    base_code code = over(c, step, arena, err);
    sqlite3_finalize(s);
    gw_reader_give(ledger, c);
    return code;
}

/* ---- sessions ---- */

static void read_session(sqlite3_stmt *s, gw_session_view *out, base_arena *arena)
{
    memset(out, 0, sizeof(*out));
    out->row = sqlite3_column_int64(s, 0);
    column_id(s, 1, &out->id);
    out->tenant = sqlite3_column_int64(s, 2);
    out->tenant_name = column_text(s, 3, arena);
    out->kind = sqlite3_column_int(s, 4);
    out->label = column_text(s, 5, arena);
    out->model = column_text(s, 6, arena);
    out->metadata = column_text(s, 7, arena);
    column_id(s, 8, &out->head);
    column_id(s, 9, &out->forked_session);
    column_id(s, 10, &out->forked_turn);
    out->created_ms = sqlite3_column_int64(s, 11);
    out->used_ms = sqlite3_column_int64(s, 12);
    out->pinned_ms = sqlite3_column_int64(s, 13);
}

/* How far one page of a search looks: the row of the last session among the next GW_SEARCH_MAX, 0
 * if those are all. */
static base_code search_end(gw_db *c, int64_t *out, int64_t before, base_err *err)
{
    sqlite3_stmt *s = gw_db_prepare(
        c, "SELECT iif(count(*)<?2, 0, min(id)) FROM (SELECT id FROM sessions WHERE id<?1 ORDER BY "
           "id DESC LIMIT ?2)");
    if (s) {
        sqlite3_bind_int64(s, 1, before);
        sqlite3_bind_int(s, 2, GW_SEARCH_MAX);
    }
    bool ok = gw_db_scalar(s, out);
    base_code code = ok ? BASE_OK : gw_db_error(c, err, "cannot read");
    sqlite3_finalize(s);
    return code;
}

static base_code list_sessions(gw_db *c, gw_session_view *rows, uint32_t *count, int64_t *next,
                               const gw_session_filter *f, base_arena *arena, base_err *err)
{
    int64_t before = f->before ? f->before : INT64_MAX, end;
    base_code code = search_end(c, &end, before, err);
    if (code)
        return code;
    sqlite3_stmt *s = gw_db_prepare(
        c, "SELECT " SESSION_COLUMNS " FROM sessions s" SESSION_JOINS
           " WHERE s.id<?1 AND s.id>=?2 AND s.kind IN (0,1,2) AND (?3=0 OR s.tenant=?3) AND (?4<0 "
           "OR s.kind=?4) AND (?5 IS NULL OR instr(lower(s.public||' '||ifnull(s.label,'')||' '||"
           "ifnull(s.metadata,'')), lower(?5))>0) ORDER BY s.id DESC LIMIT ?6");
    if (!s)
        return gw_db_error(c, err, "cannot read");
    sqlite3_bind_int64(s, 1, before);
    sqlite3_bind_int64(s, 2, end);
    sqlite3_bind_int64(s, 3, f->tenant);
    sqlite3_bind_int(s, 4, f->kind);
    gw_bind_text(s, 5, f->text);
    sqlite3_bind_int64(s, 6, (int64_t)f->limit + 1);
    int step;
    while ((step = sqlite3_step(s)) == SQLITE_ROW && *count < f->limit)
        read_session(s, &rows[(*count)++], arena);
    *next = step == SQLITE_ROW ? rows[*count - 1].row : end;
    code = over(c, step, arena, err);
    sqlite3_finalize(s);
    for (uint32_t i = 0; i < *count && !code; i++)
        if (!gw_usage_of_session(c, &rows[i].sums, rows[i].row))
            code = gw_db_error(c, err, "cannot read");
    return code;
}

base_code gw_admin_session_list(gw_ledger *ledger, gw_session_view **out, uint32_t *count,
                                int64_t *next, const gw_session_filter *filter, base_arena *arena,
                                base_err *err)
{
    gw_session_view *rows = base_arena_calloc(arena, filter->limit, sizeof(*rows));
    *out = rows;
    *count = 0;
    *next = 0;
    if (!rows)
        return base_fail(err, BASE_NOMEM, "no memory for the list");
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = list_sessions(c, rows, count, next, filter, arena, err);
    gw_reader_give(ledger, c);
    return code;
}

base_code gw_admin_session_read(gw_ledger *ledger, gw_session_view *out, const char *id,
                                base_arena *arena, base_err *err)
{
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    sqlite3_stmt *s = gw_db_prepare(c, "SELECT " SESSION_COLUMNS " FROM sessions s" SESSION_JOINS
                                       " WHERE s.public_key=?1 AND s.public=?2 AND s.kind<>3");
    int step = SQLITE_ERROR;
    if (s) {
        sqlite3_bind_int64(s, 1, gw_public_key(id));
        gw_bind_text(s, 2, id);
        step = sqlite3_step(s);
    }
    if (step == SQLITE_ROW)
        read_session(s, out, arena);
    base_code code = over(c, step, arena, err);
    sqlite3_finalize(s);
    if (!code && step == SQLITE_DONE)
        code = base_fail(err, BASE_NOT_FOUND, "there is no such session");
    if (!code && !gw_usage_of_session(c, &out->sums, out->row))
        code = gw_db_error(c, err, "cannot read");
    gw_reader_give(ledger, c);
    return code;
}

/* ---- turns ---- */

static void read_turn(sqlite3_stmt *s, gw_turn_view *out, base_arena *arena)
{
    memset(out, 0, sizeof(*out));
    out->row = sqlite3_column_int64(s, 0);
    out->tenant = sqlite3_column_int64(s, 1);
    gw_id *const ids[] = {&out->id,      &out->session, &out->parent, &out->parent_session,
                          &out->request, &out->response};
    for (int i = 0; i < 6; i++)
        column_id(s, 2 + i, ids[i]);
    const char **const texts[] = {&out->dialect, &out->model, &out->tool, &out->reason};
    for (int i = 0; i < 4; i++)
        *texts[i] = column_text(s, 8 + i, arena);
    out->status = (gw_turn_status)sqlite3_column_int(s, 12);
    out->finish = (eng_finish)sqlite3_column_int(s, 13);
    out->retention = (gw_retention)sqlite3_column_int(s, 14);
    eng_usage *u = &out->usage;
    uint32_t *const counts[] = {
        &u->prompt_tokens,    &u->cached_tokens, &u->restored_tokens, &u->output_tokens,
        &u->reasoning_tokens, &u->drafted,       &u->accepted,        &u->steps};
    for (int i = 0; i < 8; i++)
        *counts[i] = (uint32_t)sqlite3_column_int64(s, 15 + i);
    uint64_t *const times[] = {&u->queue_ns, &u->prefill_ns, &u->ttft_ns, &u->decode_ns};
    for (int i = 0; i < 4; i++)
        *times[i] = (uint64_t)sqlite3_column_int64(s, 23 + i) * 1000;
    out->cache.lost = (uint32_t)sqlite3_column_int64(s, 27);
    out->cache.diff_item =
        sqlite3_column_type(s, 28) == SQLITE_NULL ? -1 : sqlite3_column_int(s, 28);
    out->cache.diff_token = (uint32_t)sqlite3_column_int64(s, 29);
    out->created_ms = sqlite3_column_int64(s, 30);
    out->ended_ms = sqlite3_column_int64(s, 31);
    out->space = (uint64_t)sqlite3_column_int64(s, 32);
}

base_code gw_admin_turn_list(gw_ledger *ledger, gw_turn_view **out, uint32_t *count, int64_t *next,
                             int64_t session, int64_t after, uint32_t limit, bool oldest_first,
                             base_arena *arena, base_err *err)
{
    gw_turn_view *rows = base_arena_calloc(arena, limit, sizeof(*rows));
    *out = rows;
    *count = 0;
    *next = 0;
    if (!rows)
        return base_fail(err, BASE_NOMEM, "no memory for the list");
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    sqlite3_stmt *s = gw_db_prepare(
        c, oldest_first ? "SELECT " TURN_COLUMNS
                          " WHERE t.session=?1 AND t.id>?2 ORDER BY t.id LIMIT ?3"
                        : "SELECT " TURN_COLUMNS
                          " WHERE t.session=?1 AND t.id<?2 ORDER BY t.id DESC LIMIT ?3");
    int step = SQLITE_ERROR;
    if (s) {
        sqlite3_bind_int64(s, 1, session);
        sqlite3_bind_int64(s, 2, after || oldest_first ? after : INT64_MAX);
        sqlite3_bind_int64(s, 3, (int64_t)limit + 1);
        while ((step = sqlite3_step(s)) == SQLITE_ROW && *count < limit)
            read_turn(s, &rows[(*count)++], arena);
    }
    if (step == SQLITE_ROW)
        *next = rows[*count - 1].row;
    return finish(ledger, c, s, step, arena, err);
}

base_code gw_admin_turn_read(gw_ledger *ledger, gw_turn_view *out, const char *id,
                             base_arena *arena, base_err *err)
{
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    sqlite3_stmt *s =
        gw_db_prepare(c, "SELECT " TURN_COLUMNS " WHERE t.public_key=?1 AND t.public=?2");
    int step = SQLITE_ERROR;
    if (s) {
        sqlite3_bind_int64(s, 1, gw_public_key(id));
        gw_bind_text(s, 2, id);
        step = sqlite3_step(s);
    }
    if (step == SQLITE_ROW)
        read_turn(s, out, arena);
    base_code code = finish(ledger, c, s, step, arena, err);
    return !code && step == SQLITE_DONE ? base_fail(err, BASE_NOT_FOUND, "there is no such turn")
                                        : code;
}

base_code gw_admin_spaces(gw_ledger *ledger, uint64_t **out, uint32_t *count, int64_t tenant,
                          uint32_t max, base_arena *arena, base_err *err)
{
    uint64_t *spaces = base_arena_calloc(arena, max, sizeof(*spaces));
    *out = spaces;
    *count = 0;
    if (!spaces)
        return base_fail(err, BASE_NOMEM, "no memory for the list");
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    sqlite3_stmt *s = gw_db_prepare(
        c, "SELECT DISTINCT space FROM turns WHERE space IS NOT NULL AND tenant=?1 LIMIT ?2");
    int step = SQLITE_ERROR;
    if (s) {
        sqlite3_bind_int64(s, 1, tenant);
        sqlite3_bind_int64(s, 2, max);
        while ((step = sqlite3_step(s)) == SQLITE_ROW)
            spaces[(*count)++] = (uint64_t)sqlite3_column_int64(s, 0);
    }
    return finish(ledger, c, s, step, arena, err);
}

/* ---- traces ---- */

base_code gw_admin_trace_list(gw_ledger *ledger, gw_trace_turn **out, uint32_t *count,
                              int64_t tenant, const char *session, bool by_time, uint32_t limit,
                              base_arena *arena, base_err *err)
{
    gw_trace_turn *rows = base_arena_calloc(arena, limit, sizeof(*rows));
    *out = rows;
    *count = 0;
    if (!rows)
        return base_fail(err, BASE_NOMEM, "no memory for the list");
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    sqlite3_stmt *s = gw_db_prepare(c, by_time ? TRACE_SELECT "t.created_ms, t.id LIMIT ?3"
                                               : TRACE_SELECT "s.id, t.id LIMIT ?3");
    int step = SQLITE_ERROR;
    if (s) {
        sqlite3_bind_int64(s, 1, tenant);
        gw_bind_text(s, 2, session);
        sqlite3_bind_int64(s, 3, limit);
        while ((step = sqlite3_step(s)) == SQLITE_ROW) {
            gw_trace_turn *t = &rows[(*count)++];
            t->session_row = sqlite3_column_int64(s, 0);
            column_id(s, 1, &t->session);
            column_id(s, 2, &t->turn);
            t->tenant = sqlite3_column_int64(s, 3);
            t->space = (uint64_t)sqlite3_column_int64(s, 4);
            t->created_ms = sqlite3_column_int64(s, 5);
            t->ended_ms = sqlite3_column_int64(s, 6);
            t->finish = (eng_finish)sqlite3_column_int(s, 7);
            t->gives_result = sqlite3_column_int(s, 8) != 0;
            t->output_tokens = (uint32_t)sqlite3_column_int64(s, 9);
        }
    }
    return finish(ledger, c, s, step, arena, err);
}
