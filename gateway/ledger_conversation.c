/* See ledger_conversation.h. Items stand in the order of their rows. */
#include "gateway/ledger_conversation.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "gateway/ledger_internal.h"

/* A call's arguments, for the writer. */
typedef struct job {
    int64_t tenant;
    const char *id, *metadata, *item;
    const gw_conversation_item *items;
    uint32_t count, items_max;
} job;

static base_code unknown(base_err *err)
{
    return base_fail(err, BASE_NOT_FOUND, "there is no such conversation");
}

/* BASE_NOT_FOUND if it is not this tenant's. Texts are copied if there is an arena. */
static base_code find(gw_db *c, gw_conversation_row *out, int64_t tenant, const char *id,
                      base_arena *arena, base_err *err)
{
    *out = (gw_conversation_row){0};
    sqlite3_stmt *s = gw_db_prepare(c, "SELECT id, created_ms, metadata FROM conversations WHERE "
                                       "public_key=?1 AND public=?2 AND tenant=?3");
    if (!s)
        return gw_db_error(c, err, "cannot read a conversation");
    sqlite3_bind_int64(s, 1, gw_public_key(id));
    gw_bind_text(s, 2, id);
    sqlite3_bind_int64(s, 3, tenant);
    int code = sqlite3_step(s);
    if (code == SQLITE_ROW) {
        out->row = sqlite3_column_int64(s, 0);
        out->created_ms = sqlite3_column_int64(s, 1);
        if (arena && sqlite3_column_type(s, 2) == SQLITE_TEXT)
            out->metadata = base_arena_copy(arena, sqlite3_column_text(s, 2),
                                            (size_t)sqlite3_column_bytes(s, 2));
    }
    sqlite3_finalize(s);
    return code == SQLITE_ROW    ? BASE_OK
           : code == SQLITE_DONE ? unknown(err)
                                 : gw_db_error(c, err, "cannot read a conversation");
}

static bool add_items(gw_db *c, int64_t row, const gw_conversation_item *items, uint32_t count)
{
    sqlite3_stmt *s =
        gw_db_prepare(c, "INSERT INTO conversation_items(conversation, public_key, public, "
                         "data, created_ms) VALUES(?1,?2,?3,?4,?5)");
    bool ok = s != NULL;
    for (uint32_t i = 0; ok && i < count; i++) {
        sqlite3_reset(s);
        sqlite3_bind_int64(s, 1, row);
        sqlite3_bind_int64(s, 2, gw_public_key(items[i].id));
        gw_bind_text(s, 3, items[i].id);
        gw_bind_text(s, 4, items[i].json);
        sqlite3_bind_int64(s, 5, base_wall_ms());
        ok = sqlite3_step(s) == SQLITE_DONE;
    }
    sqlite3_finalize(s);
    return ok;
}

static bool with_row(gw_db *c, const char *sql, int64_t row)
{
    sqlite3_stmt *s = gw_db_prepare(c, sql);
    if (s)
        sqlite3_bind_int64(s, 1, row);
    return gw_db_run(s);
}

/* What leaves with its conversation: a turn is linked however it ended, for it holds the items
 * before it. */
static bool link_turn(gw_db *c, int64_t row, const gw_commit *commit)
{
    sqlite3_stmt *s = gw_db_prepare(c, "UPDATE turns SET conversation=?1 WHERE public_key=?2 AND "
                                       "public=?3 AND tenant=?4");
    if (s) {
        sqlite3_bind_int64(s, 1, row);
        sqlite3_bind_int64(s, 2, gw_public_key(commit->turn));
        gw_bind_text(s, 3, commit->turn);
        sqlite3_bind_int64(s, 4, commit->root->tenant);
    }
    return gw_db_run(s);
}

/* On the writer, in the turn's transaction. A conversation that is gone takes nothing, and the turn
 * is a response all the same. */
bool gw_conversation_commit(gw_db *c, const gw_commit *commit)
{
    gw_conversation_row row;
    if (!commit->conversation)
        return true;
    base_code code = find(c, &row, commit->root->tenant, commit->conversation, NULL, NULL);
    if (code)
        return code == BASE_NOT_FOUND;
    return link_turn(c, row.row, commit) &&
           (commit->status != GW_TURN_COMPLETED ||
            add_items(c, row.row, commit->added, commit->added_count));
}

/* ---- on the writer ---- */

/* One transaction around a change. */
static base_code change(gw_db *c, base_code (*body)(gw_db *c, const job *j, base_err *err),
                        const job *j, base_err *err)
{
    if (!gw_db_simple(c, GW_SQL_BEGIN))
        return gw_db_error(c, err, "cannot begin");
    base_code code = body(c, j, err);
    if (!code && !gw_db_simple(c, GW_SQL_COMMIT))
        code = gw_db_error(c, err, "cannot commit");
    if (code)
        gw_db_simple(c, GW_SQL_ROLLBACK);
    return code;
}

static base_code update_body(gw_db *c, const job *j, base_err *err)
{
    gw_conversation_row row;
    base_code code = find(c, &row, j->tenant, j->id, NULL, err);
    sqlite3_stmt *s =
        code ? NULL : gw_db_prepare(c, "UPDATE conversations SET metadata=?2 WHERE id=?1");
    if (s) {
        sqlite3_bind_int64(s, 1, row.row);
        gw_bind_text(s, 2, j->metadata);
    }
    return code           ? code
           : gw_db_run(s) ? BASE_OK
                          : gw_db_error(c, err, "cannot write a conversation");
}

/* False on an error. */
static bool count_of(gw_db *c, int64_t *out, const char *sql, int64_t of)
{
    sqlite3_stmt *s = gw_db_prepare(c, sql);
    if (s)
        sqlite3_bind_int64(s, 1, of);
    bool ok = s && gw_db_scalar(s, out);
    sqlite3_finalize(s);
    return ok;
}

static base_code add_body(gw_db *c, const job *j, base_err *err)
{
    gw_conversation_row row;
    int64_t count;
    base_code code = find(c, &row, j->tenant, j->id, NULL, err);
    if (code)
        return code;
    if (!add_items(c, row.row, j->items, j->count) ||
        !count_of(c, &count, "SELECT count(*) FROM conversation_items WHERE conversation=?1",
                  row.row))
        return gw_db_error(c, err, "cannot write items");
    if (count > j->items_max)
        return base_fail_param(err, BASE_FULL, "items",
                               "the conversation would hold %lld items, the limit is %u "
                               "(conversations.items_max)",
                               (long long)count, j->items_max);
    return BASE_OK;
}

static base_code remove_body(gw_db *c, const job *j, base_err *err)
{
    gw_conversation_row row;
    base_code code = find(c, &row, j->tenant, j->id, NULL, err);
    if (code)
        return code;
    sqlite3_stmt *s =
        gw_db_prepare(c, "DELETE FROM conversation_items WHERE public_key=?2 AND public=?3 "
                         "AND conversation=?1");
    if (s) {
        sqlite3_bind_int64(s, 1, row.row);
        sqlite3_bind_int64(s, 2, gw_public_key(j->item));
        gw_bind_text(s, 3, j->item);
    }
    if (!gw_db_run(s))
        return gw_db_error(c, err, "cannot delete an item");
    return sqlite3_changes(c->db) ? BASE_OK
                                  : base_fail_param(err, BASE_NOT_FOUND, "item_id",
                                                    "there is no such item in this conversation");
}

#define ON_WRITER(name)                                                                            \
    static base_code run_##name(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)             \
    {                                                                                              \
        (void)ledger;                                                                              \
        return change(c, name##_body, ctx, err);                                                   \
    }
ON_WRITER(update)
ON_WRITER(add)
ON_WRITER(remove)

static base_code create_body(gw_db *c, const gw_conversation_new *fresh, base_err *err)
{
    int64_t count;
    if (!count_of(c, &count, "SELECT count(*) FROM conversations WHERE tenant=?1", fresh->tenant))
        return gw_db_error(c, err, "cannot count conversations");
    if (count >= fresh->count_max)
        return base_fail(err, BASE_FULL,
                         "there are %lld conversations, the limit is %u (conversations.count_max)",
                         (long long)count, fresh->count_max);
    sqlite3_stmt *s =
        gw_db_prepare(c, "INSERT INTO conversations(tenant, public_key, public, metadata, "
                         "created_ms) VALUES(?1,?2,?3,?4,?5)");
    if (s) {
        sqlite3_bind_int64(s, 1, fresh->tenant);
        sqlite3_bind_int64(s, 2, gw_public_key(fresh->id));
        gw_bind_text(s, 3, fresh->id);
        gw_bind_text(s, 4, fresh->metadata);
        sqlite3_bind_int64(s, 5, fresh->created_ms);
    }
    bool ok =
        gw_db_run(s) && add_items(c, sqlite3_last_insert_rowid(c->db), fresh->items, fresh->count);
    return ok ? BASE_OK : gw_db_error(c, err, "cannot write a conversation");
}

static base_code run_create(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    if (!gw_db_simple(c, GW_SQL_BEGIN))
        return gw_db_error(c, err, "cannot begin");
    base_code code = create_body(c, ctx, err);
    if (!code && !gw_db_simple(c, GW_SQL_COMMIT))
        code = gw_db_error(c, err, "cannot commit");
    if (code)
        gw_db_simple(c, GW_SQL_ROLLBACK);
    else
        atomic_fetch_add(&ledger->conversation_count, 1);
    return code;
}

base_code gw_conversation_create(gw_ledger *ledger, const gw_conversation_new *fresh, base_err *err)
{
    return gw_on_writer(ledger, run_create, (void *)fresh, err);
}

base_code gw_conversation_count(gw_ledger *ledger, base_err *err)
{
    int64_t count = 0;
    bool ok = count_of(ledger->writer, &count, "SELECT count(*) FROM conversations", 0);
    atomic_store(&ledger->conversation_count, (uint64_t)count);
    return ok ? BASE_OK : gw_db_error(ledger->writer, err, "cannot count conversations");
}

/* Rows of the turns that ran on it, the newest first: none is asked about before those that build
 * on it. */
static bool list_turns(gw_db *c, int64_t **out, uint32_t *count, int64_t row)
{
    uint32_t capacity = 0;
    int code = SQLITE_ERROR;
    *out = NULL;
    *count = 0;
    sqlite3_stmt *s =
        gw_db_prepare(c, "SELECT id FROM turns WHERE conversation=?1 ORDER BY id DESC");
    if (s)
        sqlite3_bind_int64(s, 1, row);
    while (s && (code = sqlite3_step(s)) == SQLITE_ROW) {
        if (*count == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            int64_t *more = realloc(*out, capacity * sizeof(*more));
            if (!more)
                break;
            *out = more;
        }
        (*out)[(*count)++] = sqlite3_column_int64(s, 0);
    }
    sqlite3_finalize(s);
    return code == SQLITE_DONE;
}

/* Streams that a crash cut have no turn, but name their conversation. */
static bool drop_cut_streams(gw_db *c, const job *j)
{
    sqlite3_stmt *s = gw_db_prepare(c, "DELETE FROM streams WHERE live=1 AND tenant=?1 AND "
                                       "instr(echo, '\"conversation\":{\"id\":\"' || ?2 || '\"}')");
    if (s) {
        sqlite3_bind_int64(s, 1, j->tenant);
        gw_bind_text(s, 2, j->id);
    }
    return gw_db_run(s);
}

/* As a turn that is forgotten alone: out of reach at once, gone when nothing builds on it. */
static bool drop_rows(gw_db *c, int64_t row)
{
    return with_row(c,
                    "UPDATE turns SET conversation=NULL, echo=NULL, sum=NULL, retention=1, "
                    "expires_ms=0 WHERE conversation=?1",
                    row) &&
           with_row(c, "DELETE FROM conversation_items WHERE conversation=?1", row) &&
           with_row(c, "DELETE FROM conversations WHERE id=?1", row);
}

static base_code run_delete(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    const job *j = ctx;
    gw_conversation_row row;
    base_code code = find(c, &row, j->tenant, j->id, NULL, err);
    if (code)
        return code;
    int64_t *turns;
    uint32_t count;
    bool ok = list_turns(c, &turns, &count, row.row);
    gw_deletion *d = ok ? gw_deletion_begin(ledger, c) : NULL;
    bool begun = d && gw_db_simple(c, GW_SQL_BEGIN);
    ok = begun && drop_rows(c, row.row) && drop_cut_streams(c, j);
    for (uint32_t i = 0; ok && i < count; i++)
        ok = gw_deletion_turn(d, turns[i]);
    if (d)
        ok = gw_deletion_end(d, ok) && ok;
    free(turns);
    if (ok && gw_db_simple(c, GW_SQL_COMMIT)) {
        atomic_fetch_sub(&ledger->conversation_count, 1);
        return BASE_OK;
    }
    code = gw_db_error(c, err, "cannot delete a conversation");
    if (begun)
        gw_db_simple(c, GW_SQL_ROLLBACK);
    return code ? code : base_fail(err, BASE_NOMEM, "no memory to delete a conversation");
}

base_code gw_conversation_update(gw_ledger *ledger, int64_t tenant, const char *id,
                                 const char *metadata, base_err *err)
{
    job j = {.tenant = tenant, .id = id, .metadata = metadata};
    return gw_on_writer(ledger, run_update, &j, err);
}

base_code gw_conversation_delete(gw_ledger *ledger, int64_t tenant, const char *id, base_err *err)
{
    job j = {.tenant = tenant, .id = id};
    base_code code = gw_on_writer(ledger, run_delete, &j, err);
    if (!code)
        gw_ledger_purge(ledger);
    return code;
}

base_code gw_conversation_add(gw_ledger *ledger, int64_t tenant, const char *id,
                              const gw_conversation_item *items, uint32_t count, uint32_t items_max,
                              base_err *err)
{
    job j = {.tenant = tenant, .id = id, .items = items, .count = count, .items_max = items_max};
    return gw_on_writer(ledger, run_add, &j, err);
}

base_code gw_conversation_item_delete(gw_ledger *ledger, int64_t tenant, const char *id,
                                      const char *item, base_err *err)
{
    job j = {.tenant = tenant, .id = id, .item = item};
    base_code code = gw_on_writer(ledger, run_remove, &j, err);
    if (!code)
        gw_ledger_purge(ledger);
    return code;
}

/* ---- reading ---- */

base_code gw_conversation_read(gw_ledger *ledger, gw_conversation_row *out, int64_t tenant,
                               const char *id, base_arena *arena, base_err *err)
{
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = find(c, out, tenant, id, arena, err);
    gw_reader_give(ledger, c);
    return code;
}

/* The row of an item, 0 if this conversation has none of that id. */
static bool find_item(gw_db *c, int64_t *row, char **json, int64_t conversation, const char *item,
                      base_arena *arena)
{
    sqlite3_stmt *s =
        gw_db_prepare(c, "SELECT id, data FROM conversation_items WHERE public_key=?2 AND "
                         "public=?3 AND conversation=?1");
    *row = 0;
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, conversation);
    sqlite3_bind_int64(s, 2, gw_public_key(item));
    gw_bind_text(s, 3, item);
    int code = sqlite3_step(s);
    if (code == SQLITE_ROW) {
        *row = sqlite3_column_int64(s, 0);
        if (json)
            *json = base_arena_copy(arena, sqlite3_column_text(s, 1),
                                    (size_t)sqlite3_column_bytes(s, 1));
    }
    sqlite3_finalize(s);
    return code == SQLITE_ROW || code == SQLITE_DONE;
}

base_code gw_conversation_item_read(gw_ledger *ledger, char **json, int64_t tenant, const char *id,
                                    const char *item, base_arena *arena, base_err *err)
{
    gw_conversation_row row;
    int64_t at = 0;
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = find(c, &row, tenant, id, arena, err);
    if (!code && !find_item(c, &at, json, row.row, item, arena))
        code = gw_db_error(c, err, "cannot read an item");
    gw_reader_give(ledger, c);
    if (code || at)
        return code;
    return base_fail_param(err, BASE_NOT_FOUND, "item_id",
                           "there is no such item in this conversation");
}

base_code gw_conversation_item_find(gw_ledger *ledger, char **json, int64_t tenant,
                                    const char *item, base_arena *arena, base_err *err)
{
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    int code = SQLITE_ERROR;
    sqlite3_stmt *s = gw_db_prepare(
        c, "SELECT i.data FROM conversation_items i JOIN conversations v ON v.id=i.conversation "
           "WHERE i.public_key=?1 AND i.public=?2 AND v.tenant=?3 ORDER BY i.id DESC LIMIT 1");
    if (s) {
        sqlite3_bind_int64(s, 1, gw_public_key(item));
        gw_bind_text(s, 2, item);
        sqlite3_bind_int64(s, 3, tenant);
        code = sqlite3_step(s);
    }
    if (code == SQLITE_ROW)
        *json =
            base_arena_copy(arena, sqlite3_column_text(s, 0), (size_t)sqlite3_column_bytes(s, 0));
    sqlite3_finalize(s);
    base_code result = code == SQLITE_ROW && *json ? BASE_OK
                       : code == SQLITE_ROW ? base_fail(err, BASE_NOMEM, "no memory for an item")
                       : code == SQLITE_DONE
                           ? base_fail(err, BASE_NOT_FOUND, "there is no such item")
                           : gw_db_error(c, err, "cannot read an item");
    gw_reader_give(ledger, c);
    return result;
}

/* Takes rows until the page is full. */
static base_code take_items(gw_db *c, sqlite3_stmt *s, gw_conversation_page *out,
                            const gw_conversation_query *query, base_arena *arena, base_err *err)
{
    uint32_t capacity = 0, limit = query->limit;
    uint64_t bytes = 0;
    int code;
    while ((code = sqlite3_step(s)) == SQLITE_ROW && (!limit || out->count < limit)) {
        size_t size = (size_t)sqlite3_column_bytes(s, 1);
        if (bytes + size > query->bytes_max && (!limit || out->count)) {
            if (limit)
                break;
            return base_fail(err, BASE_TOO_LONG,
                             "the conversation's items have more than %llu bytes, which is beyond "
                             "the maximum context length",
                             (unsigned long long)query->bytes_max);
        }
        bytes += size;
        if (out->count == capacity) {
            capacity = capacity ? capacity * 2 : 32;
            gw_conversation_item *list = base_arena_alloc(arena, capacity * sizeof *list);
            if (!list)
                break;
            if (out->count)
                memcpy(list, out->items, out->count * sizeof *list);
            out->items = list;
        }
        out->items[out->count++] = (gw_conversation_item){
            base_arena_copy(arena, sqlite3_column_text(s, 0), (size_t)sqlite3_column_bytes(s, 0)),
            base_arena_copy(arena, sqlite3_column_text(s, 1), size)};
    }
    out->more = code == SQLITE_ROW;
    if (base_arena_failed(arena))
        return base_fail(err, BASE_NOMEM, "no memory for the items of a conversation");
    return code == SQLITE_ROW || code == SQLITE_DONE ? BASE_OK
                                                     : gw_db_error(c, err, "cannot read items");
}

base_code gw_conversation_list(gw_ledger *ledger, gw_conversation_page *out, int64_t tenant,
                               const char *id, const gw_conversation_query *query,
                               base_arena *arena, base_err *err)
{
    gw_conversation_row row;
    int64_t behind = query->oldest_first ? 0 : INT64_MAX;
    *out = (gw_conversation_page){0};
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = find(c, &row, tenant, id, arena, err);
    if (!code && query->after) {
        if (!find_item(c, &behind, NULL, row.row, query->after, arena))
            code = gw_db_error(c, err, "cannot read items");
        else if (!behind)
            code = base_fail_param(err, BASE_INVALID, "after",
                                   "after names no item of this conversation");
    }
    sqlite3_stmt *s =
        code ? NULL
             : gw_db_prepare(c, query->oldest_first
                                    ? "SELECT public, data FROM conversation_items WHERE "
                                      "conversation=?1 AND id>?2 ORDER BY id"
                                    : "SELECT public, data FROM conversation_items WHERE "
                                      "conversation=?1 AND id<?2 ORDER BY id DESC");
    if (s) {
        sqlite3_bind_int64(s, 1, row.row);
        sqlite3_bind_int64(s, 2, behind);
        code = take_items(c, s, out, query, arena, err);
    } else if (!code) {
        code = gw_db_error(c, err, "cannot read items");
    }
    sqlite3_finalize(s);
    gw_reader_give(ledger, c);
    return code;
}
