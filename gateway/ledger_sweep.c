/* Sweeping: turns past their time, and what only they held. On the writer, in short transactions.
 */
#include "gateway/ledger_internal.h"

#include <string.h>

#define SWEEP_TURNS 64 /* a transaction */

static bool used(gw_db *c, gw_sql id, int64_t row, bool *out)
{
    int64_t found;
    sqlite3_stmt *s = gw_db_statement(c, id);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, row);
    if (!gw_db_scalar(s, &found))
        return false;
    *out = found != 0;
    return true;
}

static bool delete_row(gw_db *c, gw_sql id, int64_t row)
{
    sqlite3_stmt *s = gw_db_statement(c, id);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, row);
    return gw_db_execute(s);
}

static bool release_run(gw_ledger *ledger, gw_db *c, int64_t run)
{
    bool needed;
    if (!run)
        return true;
    if (!used(c, GW_SQL_RUN_USED, run, &needed))
        return false;
    if (needed)
        return true;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_RUN_SLOT);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, run);
    gw_digest slot;
    bool slotted =
        sqlite3_step(s) == SQLITE_ROW && sqlite3_column_bytes(s, 0) == (int)sizeof(slot.bytes);
    if (slotted)
        memcpy(slot.bytes, sqlite3_column_blob(s, 0), sizeof(slot.bytes));
    sqlite3_reset(s);
    if (!delete_row(c, GW_SQL_CALLS_DELETE, run) || !delete_row(c, GW_SQL_RUN_DELETE, run))
        return false;
    if (slotted)
        gw_memory_forget(ledger->memory, &slot);
    return true;
}

/* Deletes a node that nobody needs, then its parents as far as that is true of them. */
static bool release_nodes(gw_ledger *ledger, gw_db *c, int64_t node)
{
    while (node) {
        bool needed;
        if (!used(c, GW_SQL_NODE_USED, node, &needed))
            return false;
        if (needed)
            return true;
        sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NODE_READ);
        if (!s)
            return false;
        sqlite3_bind_int64(s, 1, node);
        int64_t parent = 0, item = 0, run = 0;
        if (sqlite3_step(s) == SQLITE_ROW) {
            parent = sqlite3_column_int64(s, 0);
            item = sqlite3_column_int64(s, 1);
            run = sqlite3_column_int64(s, 2);
        }
        sqlite3_reset(s);
        if (!delete_row(c, GW_SQL_NODE_DELETE, node) || !used(c, GW_SQL_ITEM_USED, item, &needed) ||
            (!needed && !delete_row(c, GW_SQL_ITEM_DELETE, item)) || !release_run(ledger, c, run))
            return false;
        node = parent;
    }
    return true;
}

/* A turn whose children still spell their prompts with its tokens stays as long as they do. */
static bool sweep_turn(gw_ledger *ledger, gw_db *c, int64_t turn, int64_t node, int64_t run,
                       int64_t now_ms)
{
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_SWEEP_CHILDREN);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, turn);
    int64_t for_good = 0, until = 0, children = 0;
    if (sqlite3_step(s) == SQLITE_ROW) {
        for_good = sqlite3_column_int64(s, 0);
        until = sqlite3_column_int64(s, 1);
        children = sqlite3_column_int64(s, 2);
    }
    sqlite3_reset(s);
    if (children) {
        s = gw_db_statement(c, GW_SQL_SWEEP_POSTPONE);
        if (!s)
            return false;
        sqlite3_bind_int64(s, 1, turn);
        /* Kept children: asked again in an hour, since they may be deleted. */
        sqlite3_bind_int64(s, 2,
                           for_good ? now_ms + 3600000 : (until > now_ms ? until : now_ms) + 1000);
        return gw_db_execute(s);
    }
    return delete_row(c, GW_SQL_TURN_DELETE, turn) && release_nodes(ledger, c, node) &&
           release_run(ledger, c, run);
}

typedef struct sweep {
    int64_t now_ms;
    uint32_t count;
} sweep;

static base_code run_sweep(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    sweep *job = ctx;
    int64_t rows[SWEEP_TURNS][3];
    job->count = 0;
    if (!gw_db_simple(c, GW_SQL_BEGIN))
        return gw_db_error(c, err, "cannot sweep");
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_SWEEP_LIST);
    bool ok = s != NULL;
    if (ok) {
        sqlite3_bind_int64(s, 1, job->now_ms);
        sqlite3_bind_int(s, 2, SWEEP_TURNS);
        while (job->count < SWEEP_TURNS && sqlite3_step(s) == SQLITE_ROW) {
            for (int i = 0; i < 3; i++)
                rows[job->count][i] = sqlite3_column_int64(s, i);
            job->count++;
        }
        sqlite3_reset(s);
    }
    for (uint32_t i = 0; ok && i < job->count; i++)
        ok = sweep_turn(ledger, c, rows[i][0], rows[i][1], rows[i][2], job->now_ms);
    if (ok && job->count && job->count < SWEEP_TURNS) {
        s = gw_db_statement(c, GW_SQL_SESSION_SWEEP);
        ok = s != NULL;
        if (ok) {
            sqlite3_bind_int64(s, 1, job->now_ms - 1000);
            ok = gw_db_execute(s);
        }
    }
    if (ok && gw_db_simple(c, GW_SQL_COMMIT))
        return BASE_OK;
    base_code code = gw_db_error(c, err, "cannot sweep");
    gw_db_simple(c, GW_SQL_ROLLBACK);
    return code;
}

base_code gw_ledger_sweep(gw_ledger *ledger, int64_t now_ms, base_err *err)
{
    sweep job = {.now_ms = now_ms};
    base_code code;
    /* In steps, so that commits get between. */
    do
        code = gw_on_writer(ledger, run_sweep, &job, err);
    while (!code && job.count == SWEEP_TURNS);
    return code;
}
