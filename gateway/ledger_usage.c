/* What was used, by day, tenant and tool: added up with each commit, read by reports. */
#include "gateway/ledger_internal.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/ledger_admin.h"

#define DAY_MS 86400000

#define SUM_COLUMNS                                                                                \
    "turns, cancelled, failed, prompt_tokens, cached_tokens, restored_tokens, output_tokens, "     \
    "reasoning_tokens, drafted, accepted, lost, queue_us, prefill_us, decode_us"
#define SUM_COUNT (sizeof(gw_sums) / sizeof(uint64_t))
_Static_assert(sizeof(gw_sums) == 14 * sizeof(uint64_t), "one column each, in this order");

/* Of turns t, whose `extra` is a gw_extra or NULL. */
#define TURN_SUMS                                                                                  \
    "sum(t.extra IS NULL), sum(t.status=1 AND t.extra IS NULL), "                                  \
    "sum(t.status=2 AND t.extra IS NULL), sum(iif(t.extra=2,0,t.prompt_tokens)), "                 \
    "sum(iif(t.extra=2,0,t.cached_tokens)), sum(iif(t.extra=2,0,t.restored_tokens)), "             \
    "sum(t.output_tokens), sum(t.reasoning_tokens), sum(t.drafted), sum(t.accepted), "             \
    "sum(iif(t.extra=2,0,t.lost)), sum(iif(t.extra=2,0,t.queue_us)), "                             \
    "sum(iif(t.extra=2,0,t.prefill_us)), sum(t.decode_us)"

_Static_assert(GW_EXTRA_SHARED == 2 && GW_EXTRA_IMPORTED == 3, "statements say so, too");

static void read_sums(sqlite3_stmt *s, int column, gw_sums *out)
{
    uint64_t values[SUM_COUNT];
    for (size_t i = 0; i < SUM_COUNT; i++)
        values[i] = (uint64_t)sqlite3_column_int64(s, column + (int)i);
    memcpy(out, values, sizeof(*out));
}

bool gw_usage_of_session(gw_db *c, struct gw_sums *out, int64_t session)
{
    sqlite3_stmt *s = gw_db_prepare(c, "SELECT " TURN_SUMS
                                       " FROM turns t WHERE t.session=?1 AND t.extra IS NOT 3");
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, session);
    bool ok = sqlite3_step(s) == SQLITE_ROW;
    if (ok)
        read_sums(s, 0, out);
    sqlite3_finalize(s);
    return ok;
}

/* ---- committing ---- */

void gw_usage_tool(char *out, const gw_commit *commit)
{
    uint32_t i = commit->item_count;
    out[0] = '\0';
    if (!i || commit->items[i - 1].role != ENG_ROLE_TOOL)
        return;
    while (i && commit->items[i - 1].role == ENG_ROLE_TOOL)
        i--;
    if (!i || !commit->items[i - 1].call_count)
        return;
    eng_text name = commit->items[i - 1].calls[0].name;
    size_t length = name.length;
    if (length > GW_USAGE_TOOL_MAX)
        length = base_utf8_complete(name.data, GW_USAGE_TOOL_MAX);
    if (length)
        memcpy(out, name.data, length);
    out[length] = '\0';
}

/* True if the day's row of this tool is there, or has room. */
static bool has_place(gw_db *c, bool *out, int64_t day, int64_t tenant, const char *tool)
{
    int64_t found;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_USAGE_PLACE);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, day);
    sqlite3_bind_int64(s, 2, tenant);
    gw_bind_text(s, 3, tool);
    sqlite3_bind_int(s, 4, GW_USAGE_TOOLS);
    bool ok = gw_db_scalar(s, &found);
    *out = found != 0;
    return ok;
}

bool gw_usage_commit(gw_db *c, const gw_commit *commit)
{
    char tool[GW_USAGE_TOOL_MAX + 1];
    const eng_usage *u = &commit->usage;
    int64_t day = commit->ended_ms / DAY_MS, tenant = commit->root->tenant;
    bool whole = commit->extra != GW_EXTRA_SHARED, place = true;
    bool counts = commit->extra == GW_EXTRA_NONE;
    if (commit->extra == GW_EXTRA_IMPORTED)
        return true;
    gw_usage_tool(tool, commit);
    if (tool[0] && !has_place(c, &place, day, tenant, tool))
        return false;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_USAGE_ADD);
    if (!s)
        return false;
    const uint64_t values[SUM_COUNT] = {counts,
                                        counts && commit->status == GW_TURN_CANCELLED,
                                        counts && commit->status == GW_TURN_FAILED,
                                        whole ? u->prompt_tokens : 0,
                                        whole ? u->cached_tokens : 0,
                                        whole ? u->restored_tokens : 0,
                                        u->output_tokens,
                                        u->reasoning_tokens,
                                        u->drafted,
                                        u->accepted,
                                        whole ? commit->cache.lost : 0,
                                        whole ? u->queue_ns / 1000 : 0,
                                        whole ? u->prefill_ns / 1000 : 0,
                                        u->decode_ns / 1000};
    sqlite3_bind_int64(s, 1, day);
    sqlite3_bind_int64(s, 2, tenant);
    gw_bind_text(s, 3, place ? tool : "other");
    for (size_t i = 0; i < SUM_COUNT; i++)
        sqlite3_bind_int64(s, 4 + (int)i, (int64_t)values[i]);
    return gw_db_execute(s);
}

bool gw_usage_sweep(gw_db *c, int64_t now_ms)
{
    sqlite3_stmt *s = gw_db_prepare(c, "DELETE FROM usage WHERE day<?1");
    if (s)
        sqlite3_bind_int64(s, 1, now_ms / DAY_MS - GW_USAGE_DAYS);
    return gw_db_run(s);
}

/* ---- reports ---- */

/* `keys`: the columns that rows are told apart by, "" for one row of all. */
static sqlite3_stmt *prepare(gw_db *c, const gw_usage_filter *filter, bool total)
{
    static const char *const names[] = {"day", "t.name", "tool"};
    char keys[64] = "", sql[1536];
    bool by_session = filter->by & GW_BY_SESSION;
    for (int i = 0; i < 3; i++)
        if (!by_session && !total && (filter->by & (1u << i)) != 0) {
            strcat(keys, keys[0] ? ", " : "");
            strcat(keys, names[i]);
        }
    const char *const group = keys[0] ? keys : "1";
    if (by_session && total)
        snprintf(sql, sizeof(sql),
                 "SELECT 0,'','',''," TURN_SUMS
                 " FROM turns t WHERE t.session IS NOT NULL AND t.extra IS NOT 3 AND "
                 "t.ended_ms>=?1*86400000 AND t.ended_ms<(?2+1)*86400000 AND (?3=0 OR "
                 "t.tenant=?3)");
    else if (by_session)
        /* The newest sessions, one after the other: no table of all of them is built. */
        snprintf(sql, sizeof(sql),
                 "SELECT 0,'','',s.public,%s FROM (SELECT id, public, tenant FROM sessions WHERE "
                 "?3=0 OR tenant=?3 ORDER BY id DESC) s JOIN turns t ON t.session=s.id WHERE "
                 "t.extra IS NOT 3 AND "
                 "t.ended_ms>=?1*86400000 AND t.ended_ms<(?2+1)*86400000 GROUP BY s.id ORDER BY "
                 "s.id DESC LIMIT ?4",
                 TURN_SUMS);
    else
        snprintf(sql, sizeof(sql),
                 "SELECT %s, %s, %s, ''%s FROM usage u JOIN tenants t ON t.id=u.tenant WHERE day "
                 "BETWEEN ?1 AND ?2 AND (?3=0 OR u.tenant=?3)%s%s%s%s LIMIT ?4",
                 keys[0] && (filter->by & GW_BY_DAY) ? "day" : "0",
                 keys[0] && (filter->by & GW_BY_TENANT) ? "t.name" : "''",
                 keys[0] && (filter->by & GW_BY_TOOL) ? "tool" : "''",
                 ", sum(turns), sum(cancelled), sum(failed), sum(prompt_tokens), "
                 "sum(cached_tokens), sum(restored_tokens), sum(output_tokens), "
                 "sum(reasoning_tokens), sum(drafted), sum(accepted), sum(lost), sum(queue_us), "
                 "sum(prefill_us), sum(decode_us)",
                 total ? "" : " GROUP BY ", total ? "" : group, total ? "" : " ORDER BY ",
                 total ? "" : group);
    sqlite3_stmt *s = gw_db_prepare(c, sql);
    if (!s)
        return NULL;
    sqlite3_bind_int64(s, 1, filter->day_min);
    sqlite3_bind_int64(s, 2, filter->day_max);
    sqlite3_bind_int64(s, 3, filter->tenant);
    sqlite3_bind_int64(s, 4, total ? 1 : (int64_t)filter->limit + 1);
    return s;
}

static const char *column_text(sqlite3_stmt *s, int column, base_arena *arena)
{
    const void *text = sqlite3_column_text(s, column);
    return base_arena_copy(arena, text ? text : "", (size_t)sqlite3_column_bytes(s, column));
}

static base_code read_rows(gw_db *c, gw_usage_row *rows, uint32_t *count, bool *more,
                           const gw_usage_filter *filter, base_arena *arena, base_err *err)
{
    sqlite3_stmt *s = prepare(c, filter, false);
    int code = SQLITE_ERROR;
    while (s && (code = sqlite3_step(s)) == SQLITE_ROW && *count < filter->limit) {
        gw_usage_row *row = &rows[(*count)++];
        row->day = sqlite3_column_int64(s, 0);
        row->tenant = column_text(s, 1, arena);
        row->tool = column_text(s, 2, arena);
        row->session = column_text(s, 3, arena);
        read_sums(s, 4, &row->sums);
    }
    *more = code == SQLITE_ROW;
    base_code result =
        code == SQLITE_DONE || *more ? BASE_OK : gw_db_error(c, err, "cannot read the usage");
    sqlite3_finalize(s);
    if (!result && base_arena_failed(arena))
        return base_fail(err, BASE_NOMEM, "no memory for the report");
    return result;
}

static base_code read_total(gw_db *c, gw_sums *total, const gw_usage_filter *filter, base_err *err)
{
    sqlite3_stmt *s = prepare(c, filter, true);
    bool ok = s && sqlite3_step(s) == SQLITE_ROW;
    if (ok)
        read_sums(s, 4, total);
    base_code code = ok ? BASE_OK : gw_db_error(c, err, "cannot read the usage");
    sqlite3_finalize(s);
    return code;
}

base_code gw_admin_usage_list(gw_ledger *ledger, gw_usage_row **out, uint32_t *count, bool *more,
                              gw_sums *total, const gw_usage_filter *filter, base_arena *arena,
                              base_err *err)
{
    gw_usage_row *rows = base_arena_calloc(arena, filter->limit, sizeof(*rows));
    *out = rows;
    *count = 0;
    memset(total, 0, sizeof(*total));
    if (!rows)
        return base_fail(err, BASE_NOMEM, "no memory for the report");
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    /* One transaction: rows and their total are of one moment. */
    bool open = gw_db_run(gw_db_prepare(c, "BEGIN"));
    base_code code = read_rows(c, rows, count, more, filter, arena, err);
    if (!code)
        code = read_total(c, total, filter, err);
    if (open)
        gw_db_run(gw_db_prepare(c, "COMMIT"));
    gw_reader_give(ledger, c);
    return code;
}
