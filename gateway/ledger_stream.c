/* See ledger_stream.h. Statements are made for each call: one or two in a response's life. */
#include "gateway/ledger_stream.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/ledger_internal.h"

static void bind_turn(sqlite3_stmt *s, int64_t tenant, const char *turn)
{
    sqlite3_bind_int64(s, 1, gw_public_key(turn));
    gw_bind_text(s, 2, turn);
    sqlite3_bind_int64(s, 3, tenant);
}

static bool remove_row(gw_db *c, int64_t tenant, const char *turn)
{
    sqlite3_stmt *s =
        gw_db_prepare(c, "DELETE FROM streams WHERE public_key=?1 AND turn=?2 AND tenant=?3");
    if (s)
        bind_turn(s, tenant, turn);
    return gw_db_run(s);
}

/* On the writer, in the turn's transaction: its stream is over. */
bool gw_stream_commit(gw_db *c, const gw_commit *commit)
{
    if (!commit->told || commit->retention != GW_RETAIN_KEPT)
        return true;
    if (!remove_row(c, commit->root->tenant, commit->turn))
        return false;
    sqlite3_stmt *s =
        gw_db_prepare(c, "INSERT INTO streams(public_key, turn, tenant, live, created_ms, "
                         "told) VALUES(?1,?2,?3,0,?4,?5)");
    if (s) {
        bind_turn(s, commit->root->tenant, commit->turn);
        sqlite3_bind_int64(s, 4, commit->created_ms);
        gw_bind_text(s, 5, commit->told);
    }
    return gw_db_run(s);
}

static base_code run_put(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    (void)ledger;
    const gw_stream_row *row = ctx;
    base_buf tokens, steps;
    base_buf_init(&tokens, 0);
    base_buf_init(&steps, 0);
    gw_put_numbers(&tokens, row->run, row->run_count);
    gw_put_numbers(&steps, row->steps, row->step_count);
    bool ok = !tokens.failed && !steps.failed && gw_db_simple(c, GW_SQL_BEGIN);
    bool begun = ok;
    sqlite3_stmt *s = NULL;
    if (ok) {
        s = gw_db_prepare(c,
                          "DELETE FROM streams WHERE public_key=?1 AND turn=?2 AND tenant=?3 AND "
                          "live=1");
        if (s)
            bind_turn(s, row->tenant, row->turn);
        ok = gw_db_run(s);
    }
    if (ok) {
        s = gw_db_prepare(c,
                          "INSERT INTO streams(public_key, turn, tenant, live, created_ms, echo, "
                          "told, run, steps) SELECT ?1,?2,?3,1,?4,?5,?6,?7,?8 WHERE NOT EXISTS("
                          "SELECT 1 FROM turns WHERE public_key=?1 AND public=?2)");
        if (s) {
            bind_turn(s, row->tenant, row->turn);
            sqlite3_bind_int64(s, 4, row->created_ms);
            gw_bind_text(s, 5, row->echo);
            gw_bind_text(s, 6, row->told);
            sqlite3_bind_blob64(s, 7, tokens.data ? tokens.data : "", tokens.length, SQLITE_STATIC);
            sqlite3_bind_blob64(s, 8, steps.data ? steps.data : "", steps.length, SQLITE_STATIC);
        }
        ok = gw_db_run(s);
    }
    if (ok)
        ok = gw_db_simple(c, GW_SQL_COMMIT);
    base_code code = ok ? BASE_OK : gw_db_error(c, err, "cannot write a stream");
    if (!ok && begun)
        gw_db_simple(c, GW_SQL_ROLLBACK);
    base_buf_deinit(&tokens);
    base_buf_deinit(&steps);
    return code;
}

base_code gw_stream_put(gw_ledger *ledger, const gw_stream_row *row, base_err *err)
{
    return gw_on_writer(ledger, run_put, (void *)row, err);
}

static const char *column(sqlite3_stmt *s, int at, base_arena *arena)
{
    return sqlite3_column_type(s, at) == SQLITE_NULL
               ? NULL
               : base_arena_copy(arena, sqlite3_column_text(s, at),
                                 (size_t)sqlite3_column_bytes(s, at));
}

static base_code read_row(gw_db *c, gw_stream_row *out, int64_t tenant, const char *turn,
                          base_arena *arena, base_err *err)
{
    sqlite3_stmt *s =
        gw_db_prepare(c, "SELECT live, created_ms, echo, told, run, steps FROM streams "
                         "WHERE public_key=?1 AND turn=?2 AND tenant=?3");
    if (!s)
        return gw_db_error(c, err, "cannot read a stream");
    bind_turn(s, tenant, turn);
    int code = sqlite3_step(s);
    bool good = true;
    if (code == SQLITE_ROW) {
        void *tokens = NULL, *steps = NULL;
        out->live = sqlite3_column_int(s, 0) != 0;
        out->created_ms = sqlite3_column_int64(s, 1);
        out->echo = column(s, 2, arena);
        out->told = column(s, 3, arena);
        good = !out->live || (gw_column_numbers(s, 4, &tokens, &out->run_count, arena) &&
                              gw_column_numbers(s, 5, &steps, &out->step_count, arena));
        good = good && out->told && (!out->live || out->echo);
        out->run = tokens;
        out->steps = steps;
    }
    sqlite3_finalize(s);
    if (code == SQLITE_DONE)
        return base_fail(err, BASE_NOT_FOUND, "there is no such stream");
    if (code != SQLITE_ROW)
        return gw_db_error(c, err, "cannot read a stream");
    return good ? BASE_OK : base_fail(err, BASE_FORMAT, "the stream of %s is damaged", turn);
}

base_code gw_stream_read(gw_ledger *ledger, gw_stream_row *out, int64_t tenant, const char *turn,
                         base_arena *arena, base_err *err)
{
    *out = (gw_stream_row){.tenant = tenant, .turn = turn};
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = read_row(c, out, tenant, turn, arena, err);
    gw_reader_give(ledger, c);
    return code;
}

static base_code run_forget(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    (void)ledger;
    const gw_stream_row *row = ctx;
    if (!remove_row(c, row->tenant, row->turn))
        return gw_db_error(c, err, "cannot forget a stream");
    return sqlite3_changes(c->db) ? BASE_OK
                                  : base_fail(err, BASE_NOT_FOUND, "there is no such stream");
}

base_code gw_stream_forget(gw_ledger *ledger, int64_t tenant, const char *turn, base_err *err)
{
    gw_stream_row row = {.tenant = tenant, .turn = turn};
    base_code code = gw_on_writer(ledger, run_forget, &row, err);
    if (!code)
        gw_ledger_purge(ledger);
    return code;
}

char *gw_item_with_calls(char *item, const char *text_told, base_arena *arena)
{
    json_t *told = text_told ? json_loads(text_told, 0, NULL) : NULL;
    json_t *ids = json_object_get(told, "calls");
    json_t *tree = json_array_size(ids) ? json_loads(item, JSON_ALLOW_NUL, NULL) : NULL;
    json_t *calls = json_object_get(tree, "tool_calls");
    for (size_t i = 0; i < json_array_size(calls) && i < json_array_size(ids); i++)
        json_object_set(json_array_get(calls, i), "id", json_array_get(ids, i));
    const json_t *custom = json_object_get(told, "custom");
    for (size_t i = 0; i < json_array_size(custom); i++) {
        json_int_t which = json_integer_value(json_array_get(custom, i));
        json_object_set_new(json_array_get(calls, which < 0 ? 0 : (size_t)which), "type",
                            json_string("custom"));
    }
    char *text = tree ? json_dumps(tree, JSON_COMPACT) : NULL;
    if (text)
        item = base_arena_copy(arena, text, strlen(text));
    free(text);
    json_decref(tree);
    json_decref(told);
    return item;
}
