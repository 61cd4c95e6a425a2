/* Native sessions: see ledger_session.h. */
#include "gateway/ledger_session.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "engine/base/num.h"
#include "gateway/ledger_internal.h"
#include "gateway/ledger_stream.h"

#define PATH_MAX_TURNS 100000 /* against a loop in a damaged file */

/* sessions.kind */
enum { NATIVE = 1, STAGED = 3 };

static base_code no_memory(base_err *err)
{
    return base_fail(err, BASE_NOMEM, "no memory for a session");
}

static base_code no_turn(base_err *err)
{
    return base_fail(err, BASE_NOT_FOUND, "there is no such turn in this session");
}

/* ---- sessions ---- */

static const char *column_copy(sqlite3_stmt *s, int column, base_arena *arena)
{
    if (sqlite3_column_type(s, column) != SQLITE_TEXT)
        return NULL;
    const unsigned char *text = sqlite3_column_text(s, column);
    return base_arena_copy(arena, text, (size_t)sqlite3_column_bytes(s, column));
}

/* A row of NATIVE_COLUMNS. */
static void column_session(gw_session_row *out, sqlite3_stmt *s, base_arena *arena)
{
    *out = (gw_session_row){.row = sqlite3_column_int64(s, 0),
                            .model = column_copy(s, 5, arena),
                            .metadata = column_copy(s, 6, arena),
                            .config = column_copy(s, 7, arena),
                            .created_ms = sqlite3_column_int64(s, 8),
                            .used_ms = sqlite3_column_int64(s, 9),
                            .pinned_ms = sqlite3_column_int64(s, 10)};
    /* A head that expired is none. */
    if (sqlite3_column_type(s, 2) == SQLITE_TEXT)
        out->head_row = sqlite3_column_int64(s, 11);
    gw_id_set(&out->id, (const char *)sqlite3_column_text(s, 1));
    gw_id_set(&out->head, (const char *)sqlite3_column_text(s, 2));
    gw_id_set(&out->forked_session, (const char *)sqlite3_column_text(s, 3));
    gw_id_set(&out->forked_turn, (const char *)sqlite3_column_text(s, 4));
}

static bool count_turns(gw_db *c, gw_session_row *session)
{
    int64_t turns = 0;
    sqlite3_stmt *s = session->head_row ? gw_db_statement(c, GW_SQL_NATIVE_DEPTH) : NULL;
    if (!session->head_row)
        return true;
    if (s)
        sqlite3_bind_int64(s, 1, session->head_row);
    bool ok = gw_db_scalar(s, &turns);
    session->turns = (uint32_t)turns;
    return ok;
}

static base_code read_session(gw_db *c, gw_session_row *out, int64_t tenant, const char *id,
                              int kind, base_arena *arena, base_err *err)
{
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NATIVE_READ);
    if (!s)
        return gw_db_error(c, err, "cannot read a session");
    sqlite3_bind_int64(s, 1, gw_public_key(id));
    gw_bind_text(s, 2, id);
    sqlite3_bind_int64(s, 3, tenant);
    sqlite3_bind_int(s, 4, kind);
    int code = sqlite3_step(s);
    if (code == SQLITE_ROW)
        column_session(out, s, arena);
    sqlite3_reset(s);
    if (code == SQLITE_DONE)
        return base_fail(err, BASE_NOT_FOUND, "there is no such session");
    if (code != SQLITE_ROW || !count_turns(c, out))
        return gw_db_error(c, err, "cannot read a session");
    return base_arena_failed(arena) ? no_memory(err) : BASE_OK;
}

base_code gw_session_read(gw_ledger *ledger, gw_session_row *out, int64_t tenant, const char *id,
                          base_arena *arena, base_err *err)
{
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = read_session(c, out, tenant, id, NATIVE, arena, err);
    gw_reader_give(ledger, c);
    return code;
}

static base_code list_sessions(gw_db *c, gw_session_row *rows, uint32_t *count, bool *more,
                               int64_t tenant, int64_t behind, uint32_t limit, bool oldest_first,
                               base_arena *arena, base_err *err)
{
    sqlite3_stmt *s =
        gw_db_statement(c, oldest_first ? GW_SQL_NATIVE_OLDEST : GW_SQL_NATIVE_NEWEST);
    int code = SQLITE_ERROR;
    *count = 0;
    *more = false;
    if (s) {
        sqlite3_bind_int64(s, 1, tenant);
        sqlite3_bind_int64(s, 2, behind);
        sqlite3_bind_int64(s, 3, (int64_t)limit + 1);
        while ((code = sqlite3_step(s)) == SQLITE_ROW && *count < limit)
            column_session(&rows[(*count)++], s, arena);
        *more = code == SQLITE_ROW;
        sqlite3_reset(s);
    }
    bool ok = code == SQLITE_ROW || code == SQLITE_DONE;
    for (uint32_t i = 0; ok && i < *count; i++)
        ok = count_turns(c, &rows[i]);
    return ok ? BASE_OK : gw_db_error(c, err, "cannot read sessions");
}

base_code gw_session_list(gw_ledger *ledger, gw_session_row **out, uint32_t *count, bool *more,
                          int64_t tenant, const char *after, uint32_t limit, bool oldest_first,
                          base_arena *arena, base_err *err)
{
    *out = base_arena_calloc(arena, base_max(limit, 1), sizeof(**out));
    if (!*out)
        return no_memory(err);
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    int64_t behind = oldest_first ? 0 : INT64_MAX;
    gw_session_row last = {0};
    base_code code = after ? read_session(c, &last, tenant, after, NATIVE, arena, err) : BASE_OK;
    if (!code)
        code = list_sessions(c, *out, count, more, tenant, after ? last.row : behind, limit,
                             oldest_first, arena, err);
    gw_reader_give(ledger, c);
    return code;
}

/* A turn's row, 0 if this tenant has none of that id. False on an error. */
static bool find_turn(gw_db *c, int64_t *row, int64_t tenant, const char *turn)
{
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_TURN_FIND);
    if (s) {
        sqlite3_bind_int64(s, 1, gw_public_key(turn));
        gw_bind_text(s, 2, turn);
        sqlite3_bind_int64(s, 3, tenant);
    }
    return gw_db_scalar(s, row);
}

/* Whether a tenant may have one more. */
static base_code check_count(gw_db *c, int64_t tenant, uint32_t count_max, base_err *err)
{
    int64_t count = 0;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NATIVE_COUNT);
    if (s)
        sqlite3_bind_int64(s, 1, tenant);
    if (!gw_db_scalar(s, &count))
        return gw_db_error(c, err, "cannot make a session");
    return count < count_max
               ? BASE_OK
               : base_fail(err, BASE_FULL,
                           "there are %lld sessions, the limit is %u (sessions.count_max)",
                           (long long)count, count_max);
}

static base_code run_create(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    const gw_session_new *fresh = ctx;
    int64_t head = 0;
    base_code code = check_count(c, fresh->tenant, fresh->count_max, err);
    if (code)
        return code;
    if (fresh->head && !find_turn(c, &head, fresh->tenant, fresh->head))
        return gw_db_error(c, err, "cannot make a session");
    if (fresh->head && !head)
        return no_turn(err);
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NATIVE_ADD);
    if (!s)
        return gw_db_error(c, err, "cannot make a session");
    sqlite3_bind_int64(s, 1, fresh->tenant);
    sqlite3_bind_int64(s, 2, gw_public_key(fresh->id));
    gw_bind_text(s, 3, fresh->id);
    gw_bind_text(s, 4, fresh->model);
    gw_bind_text(s, 5, fresh->metadata);
    gw_bind_text(s, 6, fresh->config);
    gw_bind_id(s, 7, head);
    gw_bind_text(s, 8, fresh->forked_session);
    gw_bind_text(s, 9, fresh->forked_session ? fresh->head : NULL);
    sqlite3_bind_int64(s, 10, fresh->created_ms);
    sqlite3_bind_int(s, 11, fresh->staged ? STAGED : NATIVE);
    if (!gw_db_execute(s))
        return gw_db_error(c, err, "cannot make a session");
    atomic_fetch_add(&ledger->native_count, !fresh->staged);
    return BASE_OK;
}

base_code gw_session_create(gw_ledger *ledger, const gw_session_new *fresh, base_err *err)
{
    return gw_on_writer(ledger, run_create, (void *)fresh, err);
}

typedef struct change {
    int64_t tenant;
    const char *id;
    int64_t until_ms;
    uint32_t count_max;
    bool staged;
} change;

/* The session that a change is about; a copy of its texts is not needed. */
static base_code find_session(gw_db *c, gw_session_row *out, const change *job, base_err *err)
{
    base_arena *arena = base_arena_create(1024, 64u << 20);
    if (!arena)
        return no_memory(err);
    base_code code =
        read_session(c, out, job->tenant, job->id, job->staged ? STAGED : NATIVE, arena, err);
    base_arena_destroy(arena);
    return code;
}

static base_code run_pin(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    (void)ledger;
    const change *job = ctx;
    gw_session_row session;
    base_code code = find_session(c, &session, job, err);
    if (code)
        return code;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NATIVE_PIN);
    if (!s)
        return gw_db_error(c, err, "cannot pin a session");
    sqlite3_bind_int64(s, 1, session.row);
    sqlite3_bind_int64(s, 2, job->until_ms);
    return gw_db_execute(s) ? BASE_OK : gw_db_error(c, err, "cannot pin a session");
}

base_code gw_session_pin(gw_ledger *ledger, int64_t tenant, const char *id, int64_t until_ms,
                         base_err *err)
{
    change job = {.tenant = tenant, .id = id, .until_ms = until_ms};
    return gw_on_writer(ledger, run_pin, &job, err);
}

static base_code run_publish(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    const change *job = ctx;
    gw_session_row session;
    base_code code = find_session(c, &session, job, err);
    if (!code)
        code = check_count(c, job->tenant, job->count_max, err);
    if (code)
        return code;
    sqlite3_stmt *s = gw_db_prepare(c, "UPDATE sessions SET kind=1 WHERE id=?1");
    if (s)
        sqlite3_bind_int64(s, 1, session.row);
    if (!gw_db_run(s))
        return gw_db_error(c, err, "cannot make a session");
    atomic_fetch_add(&ledger->native_count, 1);
    return BASE_OK;
}

base_code gw_session_publish(gw_ledger *ledger, int64_t tenant, const char *id, uint32_t count_max,
                             base_err *err)
{
    change job = {.tenant = tenant, .id = id, .count_max = count_max, .staged = true};
    return gw_on_writer(ledger, run_publish, &job, err);
}

/* ---- deleting ---- */

static bool with_row(gw_db *c, gw_sql id, int64_t row)
{
    sqlite3_stmt *s = gw_db_statement(c, id);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, row);
    return gw_db_execute(s);
}

/* Rows of the turns that are the session's, the newest first, so that none is asked about before
 * those that build on it. */
static bool list_own(gw_db *c, int64_t **out, uint32_t *count, const gw_session_row *session)
{
    uint32_t capacity = 0;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NATIVE_OWN);
    *out = NULL;
    *count = 0;
    if (!s)
        return false;
    gw_bind_id(s, 1, session->head_row);
    sqlite3_bind_int64(s, 2, session->row);
    int code;
    while ((code = sqlite3_step(s)) == SQLITE_ROW) {
        if (*count == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            int64_t *more = realloc(*out, capacity * sizeof(*more));
            if (!more)
                break;
            *out = more;
        }
        (*out)[(*count)++] = sqlite3_column_int64(s, 0);
    }
    sqlite3_reset(s);
    return code == SQLITE_DONE;
}

/* In a transaction of its own. */
static base_code drop_session(gw_ledger *ledger, gw_db *c, const gw_session_row *session,
                              base_err *err)
{
    int64_t *turns;
    uint32_t count;
    bool ok = list_own(c, &turns, &count, session);
    gw_deletion *d = ok ? gw_deletion_begin(ledger, c) : NULL;
    bool begun = d && gw_db_simple(c, GW_SQL_BEGIN);
    /* The row goes first: a turn that is some session's head is one that is needed. */
    ok = begun && with_row(c, GW_SQL_NATIVE_LET_GO, session->row) &&
         with_row(c, GW_SQL_NATIVE_DROP, session->row);
    for (uint32_t i = 0; ok && i < count; i++)
        ok = gw_deletion_turn(d, turns[i]);
    if (d)
        ok = gw_deletion_end(d, ok) && ok;
    free(turns);
    if (ok && gw_db_simple(c, GW_SQL_COMMIT))
        return BASE_OK;
    base_code code = gw_db_error(c, err, "cannot delete a session");
    if (begun)
        gw_db_simple(c, GW_SQL_ROLLBACK);
    return code ? code : no_memory(err);
}

static base_code run_delete(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    const change *job = ctx;
    gw_session_row session;
    base_code code = find_session(c, &session, job, err);
    if (!code)
        code = drop_session(ledger, c, &session, err);
    if (!code)
        atomic_fetch_sub(&ledger->native_count, !job->staged);
    return code;
}

base_code gw_session_delete(gw_ledger *ledger, int64_t tenant, const char *id, base_err *err)
{
    change job = {.tenant = tenant, .id = id};
    return gw_on_writer(ledger, run_delete, &job, err);
}

base_code gw_session_discard(gw_ledger *ledger, int64_t tenant, const char *id, base_err *err)
{
    change job = {.tenant = tenant, .id = id, .staged = true};
    return gw_on_writer(ledger, run_delete, &job, err);
}

/* The next session that an import left halfway; row 0: none. */
static bool next_staged(gw_db *c, gw_session_row *out)
{
    *out = (gw_session_row){0};
    sqlite3_stmt *s = gw_db_prepare(c, "SELECT id, head FROM sessions WHERE kind=3 LIMIT 1");
    int code = s ? sqlite3_step(s) : SQLITE_ERROR;
    if (code == SQLITE_ROW) {
        out->row = sqlite3_column_int64(s, 0);
        out->head_row = sqlite3_column_int64(s, 1);
    }
    sqlite3_finalize(s);
    return code == SQLITE_ROW || code == SQLITE_DONE;
}

base_code gw_native_open(gw_ledger *ledger, base_err *err)
{
    gw_db *c = ledger->writer;
    gw_session_row staged;
    base_code code = BASE_OK;
    uint32_t dropped = 0;
    bool ok;
    while ((ok = next_staged(c, &staged)) && staged.row && !code) {
        code = drop_session(ledger, c, &staged, err);
        dropped++;
    }
    if (code)
        return code;
    if (dropped)
        base_log(BASE_LOG_INFO, "imports_cut sessions=%u", dropped);
    int64_t count = 0;
    sqlite3_stmt *s = ok ? gw_db_prepare(c, "SELECT count(*) FROM sessions WHERE kind=1") : NULL;
    ok = gw_db_scalar(s, &count);
    sqlite3_finalize(s);
    atomic_store(&ledger->native_count, (uint64_t)count);
    return ok ? BASE_OK : gw_db_error(c, err, "cannot count sessions");
}

/* ---- paths ---- */

/* Rows of the turns from `from` up, the newest first. */
static base_code list_path(gw_db *c, int64_t **out, uint32_t *count, int64_t from,
                           base_arena *arena, base_err *err)
{
    uint32_t capacity = 0;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NATIVE_PATH);
    *out = NULL;
    *count = 0;
    if (!s)
        return gw_db_error(c, err, "cannot read a session's turns");
    sqlite3_bind_int64(s, 1, from);
    int code;
    while ((code = sqlite3_step(s)) == SQLITE_ROW) {
        if (*count == capacity) {
            uint32_t wanted = capacity ? 2 * capacity : 64;
            int64_t *more = base_arena_alloc(arena, wanted * sizeof(*more));
            if (!more)
                break;
            if (capacity)
                memcpy(more, *out, *count * sizeof(*more));
            *out = more;
            capacity = wanted;
        }
        (*out)[(*count)++] = sqlite3_column_int64(s, 0);
    }
    sqlite3_reset(s);
    if (code == SQLITE_ROW)
        return no_memory(err);
    return code == SQLITE_DONE ? BASE_OK : gw_db_error(c, err, "cannot read a session's turns");
}

/* The items between two nodes, the lower one included. Where the upper one is not above the lower
 * (what stands before all items changed), as many as there are more of. */
static base_code read_items(gw_db *c, gw_path_turn *out, int64_t node, int64_t above,
                            base_arena *arena, base_err *err)
{
    uint32_t capacity = 0, total = 0, before = 0;
    char **list = NULL;
    for (int64_t at = node; at && at != above;) {
        sqlite3_stmt *s = gw_db_statement(c, GW_SQL_ITEM_UP);
        if (!s)
            return gw_db_error(c, err, "cannot read items");
        sqlite3_bind_int64(s, 1, at);
        bool found = sqlite3_step(s) == SQLITE_ROW && total < PATH_MAX_TURNS;
        bool item = found && sqlite3_column_int(s, 1) >= 0; /* the root is none */
        char *data = item ? (char *)column_copy(s, 2, arena) : NULL;
        int64_t parent = found ? sqlite3_column_int64(s, 0) : 0;
        sqlite3_reset(s);
        if (!found)
            return base_fail(err, BASE_FORMAT, "the items of node row %lld are damaged",
                             (long long)node);
        if (item && total == capacity) {
            uint32_t wanted = capacity ? 2 * capacity : 16;
            char **more = base_arena_alloc(arena, wanted * sizeof(*more));
            if (more && capacity)
                memcpy(more, list, total * sizeof(*more));
            list = more;
            capacity = wanted;
        }
        if (item && (!list || !data))
            return no_memory(err);
        if (item)
            list[total++] = data;
        at = parent;
        if (!at && above) { /* not on this chain: count the other one */
            gw_path_turn other = {0};
            base_code code = read_items(c, &other, above, 0, arena, err);
            if (code)
                return code;
            before = other.item_count;
        }
    }
    uint32_t count = total > before ? total - before : 0;
    for (uint32_t i = 0; i < count / 2; i++) {
        char *data = list[i];
        list[i] = list[count - 1 - i];
        list[count - 1 - i] = data;
    }
    out->items = list;
    out->item_count = count;
    return BASE_OK;
}

/* A row of GW_SQL_NATIVE_TURN. */
static base_code read_path_turn(gw_db *c, gw_path_turn *out, int64_t row, const char *template_id,
                                base_arena *arena, base_err *err)
{
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NATIVE_TURN);
    if (!s)
        return gw_db_error(c, err, "cannot read a turn");
    sqlite3_bind_int64(s, 1, row);
    if (sqlite3_step(s) != SQLITE_ROW) {
        sqlite3_reset(s);
        return base_fail(err, BASE_FORMAT, "turn row %lld is missing", (long long)row);
    }
    *out = (gw_path_turn){.row = row,
                          .status = (gw_turn_status)sqlite3_column_int(s, 2),
                          .finish = (eng_finish)sqlite3_column_int(s, 3),
                          .reason = column_copy(s, 10, arena),
                          .created_ms = sqlite3_column_int64(s, 21)};
    gw_id_set(&out->id, (const char *)sqlite3_column_text(s, 0));
    gw_id_set(&out->parent, (const char *)sqlite3_column_text(s, 1));
    int64_t node = sqlite3_column_int64(s, 4), above = sqlite3_column_int64(s, 5);
    uint32_t *counts[] = {&out->usage.prompt_tokens,    &out->usage.cached_tokens,
                          &out->usage.restored_tokens,  &out->usage.output_tokens,
                          &out->usage.reasoning_tokens, &out->usage.drafted,
                          &out->usage.accepted};
    for (int i = 0; i < 7; i++)
        *counts[i] = (uint32_t)sqlite3_column_int64(s, 14 + i);
    out->answered = out->usage.output_tokens != 0;
    const char *made_by = (const char *)sqlite3_column_text(s, 7);
    bool good = true;
    if (sqlite3_column_int(s, 13) && made_by && template_id && strcmp(made_by, template_id) == 0) {
        void *run;
        good = gw_column_numbers(s, 12, &run, &out->run_count, arena);
        out->run = good ? run : NULL;
    }
    const char *told = column_copy(s, 23, arena);
    sqlite3_reset(s);
    if (!good)
        return base_fail(err, BASE_FORMAT, "the tokens of turn row %lld are damaged",
                         (long long)row);
    base_code code = read_items(c, out, node, above, arena, err);
    char **last = !code && out->item_count ? &out->items[out->item_count - 1] : NULL;
    if (last && out->answered)
        *last = gw_item_with_calls(*last, told, arena);
    return code ? code : !last || *last ? BASE_OK : no_memory(err);
}

/* The row where a path begins. */
static base_code path_end(gw_db *c, int64_t *out, int64_t tenant, const gw_session_row *session,
                          const char *turn, base_arena *arena, base_err *err)
{
    *out = session->head_row;
    if (!turn)
        return *out ? BASE_OK : no_turn(err);
    if (!find_turn(c, out, tenant, turn))
        return gw_db_error(c, err, "cannot read a turn");
    if (!*out)
        return no_turn(err);
    int64_t *rows;
    uint32_t count;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NATIVE_OWN);
    if (!s)
        return gw_db_error(c, err, "cannot read a session's turns");
    gw_bind_id(s, 1, session->head_row);
    sqlite3_bind_int64(s, 2, session->row);
    bool own = false;
    while (!own && sqlite3_step(s) == SQLITE_ROW)
        own = sqlite3_column_int64(s, 0) == *out;
    sqlite3_reset(s);
    base_code code = own ? BASE_OK : list_path(c, &rows, &count, session->head_row, arena, err);
    for (uint32_t i = 0; !own && !code && i < count; i++)
        own = rows[i] == *out;
    return code ? code : own ? BASE_OK : no_turn(err);
}

static base_code read_path(gw_db *c, gw_path_turn **out, uint32_t *count, bool *more,
                           int64_t tenant, const gw_session_row *session, const char *turn,
                           const char *after, uint32_t limit, bool newest, const char *template_id,
                           base_arena *arena, base_err *err)
{
    int64_t *rows, end, mark = 0;
    uint32_t total;
    base_code code = path_end(c, &end, tenant, session, turn, arena, err);
    if (!code)
        code = list_path(c, &rows, &total, end, arena, err);
    if (!code && after && !find_turn(c, &mark, tenant, after))
        code = gw_db_error(c, err, "cannot read a turn");
    if (code)
        return code;
    /* rows: the newest first. [from, to) of them are asked for. */
    uint32_t from = 0, to = total;
    if (after) {
        uint32_t at = 0;
        while (at < total && rows[at] != mark)
            at++;
        if (at == total)
            return no_turn(err);
        if (newest)
            from = at + 1;
        else
            to = at;
    }
    *more = to - from > limit;
    if (*more && newest)
        to = from + limit;
    else if (*more)
        from = to - limit;
    *count = to - from;
    *out = base_arena_calloc(arena, base_max(*count, 1), sizeof(**out));
    if (!*out)
        return no_memory(err);
    for (uint32_t i = 0; !code && i < *count; i++)
        code = read_path_turn(c, &(*out)[i], rows[to - 1 - i], template_id, arena, err);
    return code;
}

base_code gw_session_path(gw_ledger *ledger, gw_path_turn **out, uint32_t *count, bool *more,
                          int64_t tenant, const gw_session_row *session, const char *turn,
                          const char *after, uint32_t limit, bool newest, const char *template_id,
                          base_arena *arena, base_err *err)
{
    *out = NULL;
    *count = 0;
    *more = false;
    if (!session->head_row && !turn && !after)
        return BASE_OK;
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = read_path(c, out, count, more, tenant, session, turn, after, limit, newest,
                               template_id, arena, err);
    gw_reader_give(ledger, c);
    return code;
}

/* ---- going on ---- */

static base_code read_head(gw_db *c, gw_head *out, int64_t tenant, const gw_session_row *session,
                           const char *turn, const char *template_id, base_arena *arena,
                           base_err *err)
{
    int64_t row;
    base_code code = path_end(c, &row, tenant, session, turn, arena, err);
    if (code)
        return code;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NATIVE_TURN);
    if (!s)
        return gw_db_error(c, err, "cannot read a turn");
    sqlite3_bind_int64(s, 1, row);
    bool found = sqlite3_step(s) == SQLITE_ROW;
    int64_t node = found ? sqlite3_column_int64(s, 4) : 0;
    uint32_t lead = 0;
    const char *told = NULL;
    if (found) {
        const char *made_by = (const char *)sqlite3_column_text(s, 7);
        gw_id_set(&out->turn, (const char *)sqlite3_column_text(s, 0));
        out->finish = (eng_finish)sqlite3_column_int(s, 3);
        lead = (uint32_t)sqlite3_column_int64(s, 6);
        out->exact =
            sqlite3_column_int(s, 9) && made_by != NULL && strcmp(made_by, template_id) == 0;
        found = gw_column_digest(s, 8, &out->node);
        told = column_copy(s, 23, arena);
    }
    sqlite3_reset(s);
    s = found ? gw_db_statement(c, GW_SQL_NODE_ROOT) : NULL;
    if (s) {
        sqlite3_bind_int64(s, 1, node);
        found = sqlite3_step(s) == SQLITE_ROW && gw_column_digest(s, 0, &out->root);
        out->front = found ? column_copy(s, 1, arena) : NULL;
        sqlite3_reset(s);
    }
    if (!found)
        return base_fail(err, BASE_FORMAT, "turn row %lld is damaged", (long long)row);
    s = gw_db_statement(c, GW_SQL_ANSWER);
    if (!s)
        return gw_db_error(c, err, "cannot read an answer");
    sqlite3_bind_int64(s, 1, node);
    if (sqlite3_step(s) == SQLITE_ROW)
        out->answer = gw_item_with_calls((char *)column_copy(s, 0, arena), told, arena);
    sqlite3_reset(s);
    gw_turn_row tokens = {0};
    code = gw_turn_tokens(c, &tokens, row, arena, err);
    if (code)
        return code;
    if (lead > tokens.prompt_count)
        return base_fail(err, BASE_FORMAT, "turn row %lld is damaged", (long long)row);
    out->prompt = tokens.prompt;
    out->prompt_count = tokens.prompt_count - lead;
    out->run_count = lead + tokens.run_count;
    out->lead = lead;
    out->run = base_arena_alloc(arena, base_max(out->run_count * sizeof(*out->run), 1));
    if (!out->run)
        return no_memory(err);
    memcpy(out->run, tokens.prompt + out->prompt_count, lead * sizeof(*out->run));
    if (tokens.run_count)
        memcpy(out->run + lead, tokens.run, tokens.run_count * sizeof(*out->run));
    return BASE_OK;
}

base_code gw_session_head(gw_ledger *ledger, gw_head *out, int64_t tenant,
                          const gw_session_row *session, const char *turn, const char *template_id,
                          base_arena *arena, base_err *err)
{
    *out = (gw_head){0};
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = read_head(c, out, tenant, session, turn, template_id, arena, err);
    gw_reader_give(ledger, c);
    return code;
}

base_code gw_session_root(gw_digest *out, const gw_root *root, base_err *err)
{
    gw_hash hash = gw_hash_open();
    gw_item_root(&hash, out, root);
    bool failed = hash.failed;
    gw_hash_close(&hash);
    return failed ? no_memory(err) : BASE_OK;
}

base_code gw_session_match(gw_match *out, const gw_root *root, const gw_head *head, bool behind,
                           const eng_item *items, uint32_t item_count, uint32_t known,
                           base_arena *arena, base_err *err)
{
    *out = (gw_match){.last = -1};
    out->chain = base_arena_calloc(arena, (size_t)item_count + 1, sizeof(*out->chain));
    out->own = base_arena_calloc(arena, base_max(item_count, 1), sizeof(*out->own));
    if (!out->chain || !out->own)
        return no_memory(err);
    gw_hash hash = gw_hash_open();
    if (!behind)
        gw_item_root(&hash, &out->chain[0], root);
    for (uint32_t i = 0; i < item_count; i++) {
        gw_digest visible, tokens;
        const eng_item *item = &items[i];
        bool said = item->role == ENG_ROLE_ASSISTANT;
        gw_item_visible(&hash, said ? &visible : &out->own[i], item);
        if (said)
            gw_item_own(&hash, &out->own[i], &visible, item);
        out->spliced += said && item->tokens;
        out->rendered += said && !item->tokens;
        if (behind && i == 0) { /* all before it, and itself */
            out->chain[1] = head->node;
        } else if (item->tokens) {
            gw_tokens_digest(&hash, &tokens, item->tokens, item->token_count);
            gw_node_run(&hash, &out->chain[i + 1], &out->chain[i], &tokens);
        } else {
            gw_node_item(&hash, &out->chain[i + 1], &out->chain[i], &out->own[i]);
        }
    }
    bool failed = hash.failed;
    gw_hash_close(&hash);
    if (failed)
        return no_memory(err);
    if (!head)
        return BASE_OK;
    out->last = known ? (int32_t)known - 1 : 0;
    out->parent = head->turn;
    if (!behind)
        out->miss = head->exact ? GW_MISS_MODE : GW_MISS_MODEL; /* its tools are the session's */
    gw_sequence_hash(out->parent_sequence, head->prompt, head->prompt_count, head->run,
                     head->run_count);
    out->parent_tokens = head->prompt_count + head->run_count;
    return BASE_OK;
}
