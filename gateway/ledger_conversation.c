/* See ledger_conversation.h. Items stand in the order of their rows. */
#include "gateway/ledger_conversation.h"

#include <string.h>

#include "gateway/ledger_internal.h"

/* A call's arguments, for the writer. */
typedef struct job {
    int64_t tenant, created_ms;
    const char *id, *metadata, *item;
    const gw_conversation_item *items;
    uint32_t count;
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
                         "data) VALUES(?1,?2,?3,?4)");
    bool ok = s != NULL;
    for (uint32_t i = 0; ok && i < count; i++) {
        sqlite3_reset(s);
        sqlite3_bind_int64(s, 1, row);
        sqlite3_bind_int64(s, 2, gw_public_key(items[i].id));
        gw_bind_text(s, 3, items[i].id);
        gw_bind_text(s, 4, items[i].json);
        ok = sqlite3_step(s) == SQLITE_DONE;
    }
    sqlite3_finalize(s);
    return ok;
}

/* On the writer, in the turn's transaction. A conversation that was deleted meanwhile takes
 * nothing, and the turn is a response all the same. */
bool gw_conversation_commit(gw_db *c, const gw_commit *commit)
{
    gw_conversation_row row;
    if (!commit->conversation || commit->status != GW_TURN_COMPLETED)
        return true;
    base_code code = find(c, &row, commit->root->tenant, commit->conversation, NULL, NULL);
    return code == BASE_NOT_FOUND ||
           (!code && add_items(c, row.row, commit->added, commit->added_count));
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

static base_code create_body(gw_db *c, const job *j, base_err *err)
{
    sqlite3_stmt *s =
        gw_db_prepare(c, "INSERT INTO conversations(tenant, public_key, public, metadata, "
                         "created_ms) VALUES(?1,?2,?3,?4,?5)");
    if (s) {
        sqlite3_bind_int64(s, 1, j->tenant);
        sqlite3_bind_int64(s, 2, gw_public_key(j->id));
        gw_bind_text(s, 3, j->id);
        gw_bind_text(s, 4, j->metadata);
        sqlite3_bind_int64(s, 5, j->created_ms);
    }
    bool ok = gw_db_run(s) && add_items(c, sqlite3_last_insert_rowid(c->db), j->items, j->count);
    return ok ? BASE_OK : gw_db_error(c, err, "cannot write a conversation");
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

static base_code delete_body(gw_db *c, const job *j, base_err *err)
{
    gw_conversation_row row;
    base_code code = find(c, &row, j->tenant, j->id, NULL, err);
    if (code)
        return code;
    static const char *const statements[] = {"DELETE FROM conversation_items WHERE conversation=?1",
                                             "DELETE FROM conversations WHERE id=?1"};
    for (size_t i = 0; i < 2; i++) {
        sqlite3_stmt *s = gw_db_prepare(c, statements[i]);
        if (s)
            sqlite3_bind_int64(s, 1, row.row);
        if (!gw_db_run(s))
            return gw_db_error(c, err, "cannot delete a conversation");
    }
    return BASE_OK;
}

static base_code add_body(gw_db *c, const job *j, base_err *err)
{
    gw_conversation_row row;
    base_code code = find(c, &row, j->tenant, j->id, NULL, err);
    if (!code && !add_items(c, row.row, j->items, j->count))
        code = gw_db_error(c, err, "cannot write items");
    return code;
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
ON_WRITER(create)
ON_WRITER(update)
ON_WRITER(delete)
ON_WRITER(add)
ON_WRITER(remove)

base_code gw_conversation_create(gw_ledger *ledger, int64_t tenant, const char *id,
                                 const char *metadata, int64_t created_ms,
                                 const gw_conversation_item *items, uint32_t count, base_err *err)
{
    job j = {.tenant = tenant,
             .id = id,
             .metadata = metadata,
             .created_ms = created_ms,
             .items = items,
             .count = count};
    return gw_on_writer(ledger, run_create, &j, err);
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
                              const gw_conversation_item *items, uint32_t count, base_err *err)
{
    job j = {.tenant = tenant, .id = id, .items = items, .count = count};
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

/* Takes rows as long as there is room in the arena. */
static base_code take_items(gw_db *c, sqlite3_stmt *s, gw_conversation_item **out, uint32_t *count,
                            bool *more, uint32_t limit, base_arena *arena, base_err *err)
{
    uint32_t capacity = 0;
    int code;
    while ((code = sqlite3_step(s)) == SQLITE_ROW && (!limit || *count < limit)) {
        if (*count == capacity) {
            uint32_t wanted = capacity ? capacity * 2 : 32;
            gw_conversation_item *list = base_arena_alloc(arena, wanted * sizeof *list);
            if (!list)
                break;
            if (*count)
                memcpy(list, *out, *count * sizeof *list);
            *out = list;
            capacity = wanted;
        }
        (*out)[(*count)++] = (gw_conversation_item){
            base_arena_copy(arena, sqlite3_column_text(s, 0), (size_t)sqlite3_column_bytes(s, 0)),
            base_arena_copy(arena, sqlite3_column_text(s, 1), (size_t)sqlite3_column_bytes(s, 1))};
    }
    *more = code == SQLITE_ROW;
    if (base_arena_failed(arena))
        return base_fail(err, BASE_NOMEM, "no memory for the items of a conversation");
    return code == SQLITE_ROW || code == SQLITE_DONE ? BASE_OK
                                                     : gw_db_error(c, err, "cannot read items");
}

base_code gw_conversation_list(gw_ledger *ledger, gw_conversation_item **out, uint32_t *count,
                               bool *more, int64_t tenant, const char *id, const char *after,
                               uint32_t limit, bool oldest_first, base_arena *arena, base_err *err)
{
    gw_conversation_row row;
    int64_t behind = oldest_first ? 0 : INT64_MAX;
    *out = NULL;
    *count = 0;
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = find(c, &row, tenant, id, arena, err);
    if (!code && after) {
        if (!find_item(c, &behind, NULL, row.row, after, arena))
            code = gw_db_error(c, err, "cannot read items");
        else if (!behind)
            code = base_fail_param(err, BASE_INVALID, "after",
                                   "after names no item of this conversation");
    }
    sqlite3_stmt *s =
        code ? NULL
             : gw_db_prepare(c, oldest_first ? "SELECT public, data FROM conversation_items WHERE "
                                               "conversation=?1 AND id>?2 ORDER BY id"
                                             : "SELECT public, data FROM conversation_items WHERE "
                                               "conversation=?1 AND id<?2 ORDER BY id DESC");
    if (s) {
        sqlite3_bind_int64(s, 1, row.row);
        sqlite3_bind_int64(s, 2, behind);
        code = take_items(c, s, out, count, more, limit, arena, err);
    } else if (!code) {
        code = gw_db_error(c, err, "cannot read items");
    }
    sqlite3_finalize(s);
    gw_reader_give(ledger, c);
    return code;
}
