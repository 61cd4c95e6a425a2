/* gw_db: connections to whimbrel.db, every statement that the ledger speaks, and the form of its
 * columns. */
#include "gateway/ledger_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/scrub.h"

#define NATIVE_COLUMNS                                                                             \
    "s.id, s.public, t.public, s.forked_session, s.forked_turn, s.model, s.metadata, s.config, "   \
    "s.created_ms, s.used_ms, s.pinned_ms, s.head FROM sessions s LEFT JOIN turns t ON "           \
    "t.id=s.head"
/* From a turn to the first one; bounded against a loop in a damaged file. */
#define PATH_UP                                                                                    \
    "up(id, parent) AS (SELECT id, parent FROM turns WHERE id=?1 UNION ALL SELECT t.id, t.parent " \
    "FROM up JOIN turns t ON t.id=up.parent LIMIT 100000)"

static const char *const sql_text[GW_SQL_COUNT] = {
    [GW_SQL_BEGIN] = "BEGIN IMMEDIATE",
    [GW_SQL_COMMIT] = "COMMIT",
    [GW_SQL_ROLLBACK] = "ROLLBACK",
    [GW_SQL_SESSION_FIND] =
        "SELECT id FROM sessions WHERE public_key=?1 AND public=?2 AND tenant=?3",
    [GW_SQL_SESSION_ADD] =
        "INSERT INTO sessions(tenant, public_key, public, kind, label, model, created_ms, used_ms) "
        "VALUES(?3, ?1, ?2, 0, ?4, ?5, ?6, ?6)",
    [GW_SQL_SESSION_USE] =
        "UPDATE sessions SET head=CASE WHEN kind<>1 OR ?4 THEN ?2 ELSE head END, "
        "used_ms=?3 WHERE id=?1",
    [GW_SQL_NODE_FIND] = "SELECT id FROM nodes WHERE key=?1 AND digest=?2 AND tenant=?3",
    [GW_SQL_NODE_ADD] =
        "INSERT INTO nodes(tenant, key, digest, parent, item, run) VALUES(?3, ?1, ?2, ?4, ?5, ?6)",
    [GW_SQL_ITEM_FIND] = "SELECT id FROM items WHERE key=?1 AND digest=?2 AND tenant=?3",
    [GW_SQL_ITEM_ADD] =
        "INSERT INTO items(tenant, key, digest, kind, data, sum) VALUES(?3, ?1, ?2, ?4, ?5, ?6)",
    [GW_SQL_RUN_FIND] =
        "SELECT id FROM runs WHERE slot_key=?1 AND slot=?2 AND digest=?3 AND tenant=?4",
    [GW_SQL_RUN_OTHER] = "SELECT 1 FROM runs WHERE slot_key=?1 AND slot=?2 AND digest<>?3 LIMIT 1",
    [GW_SQL_RUN_ADD] =
        "INSERT INTO runs(tenant, template, slot_key, slot, visible, reasoning, digest, turn, "
        "session, sequence, sequence_tokens, token_count, tokens, lineage_key, lineage, under_key, "
        "under, parent, front, head, head_tokens, space, fingerprint, ended_ms) "
        "VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13,?14,?15,?16,?17,?18,?19,?20,?21,?22,?23,"
        "?24)",
    [GW_SQL_CALL_ADD] = "INSERT INTO calls(key, public, run) VALUES(?1, ?2, ?3)",
    [GW_SQL_TURN_FIND] =
        "SELECT id FROM turns WHERE public_key=?1 AND public=?2 AND tenant=?3 AND node IS NOT NULL",
    [GW_SQL_TURN_ADD] =
        "INSERT INTO turns(tenant, public_key, public, session, parent, node, run, status, finish, "
        "retention, dialect, "
        "request, response_key, response, model, template, fingerprint, numerics, metadata, "
        "reason, prompt_base, prompt, "
        "lead, steps, seed, prompt_tokens, cached_tokens, restored_tokens, output_tokens, "
        "reasoning_tokens, drafted, accepted, "
        "engine_steps, queue_us, prefill_us, ttft_us, decode_us, created_ms, ended_ms, expires_ms, "
        "echo, sum, space, lost, diff_item, diff_token, tool, extra) "
        "VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13,?14,?15,?16,?17,?18,?19,?20,?21,?22,?23,"
        "?24,?25,?26,?27,?28,?29,?30,?31,?32,?33,?34,?35,?36,?37,?38,?39,?40,?41,?42,?43,?44,?45,"
        "?46,?47,?48)",
    [GW_SQL_SLOT] =
        "SELECT " GW_RUN_COLUMNS
        " FROM runs r WHERE r.slot_key=?1 AND r.slot=?2 AND r.tenant=?3 ORDER BY r.id LIMIT ?4",
    [GW_SQL_LINEAGE] = "SELECT " GW_RUN_COLUMNS " FROM runs r WHERE r.lineage_key=?1 AND "
                       "r.lineage=?2 AND r.tenant=?3 ORDER BY r.id LIMIT ?4",
    /* The newest, since a client was interrupted just now. */
    [GW_SQL_UNDER] = "SELECT " GW_RUN_COLUMNS " FROM runs r WHERE r.under_key=?1 AND r.under=?2 "
                     "AND r.tenant=?3 ORDER BY r.id DESC LIMIT ?4",
    /* Of any tenant: the caller tells others' ids from unknown ones, and takes neither. */
    [GW_SQL_CALL] = "SELECT " GW_RUN_COLUMNS " FROM calls c JOIN runs r ON r.id=c.run "
                    "WHERE c.key=?1 AND c.public=?2 AND r.slot IS NOT NULL",
    [GW_SQL_TURN_RUN] = "SELECT " GW_RUN_COLUMNS " FROM turns t JOIN runs r ON r.id=t.run "
                        "WHERE t.public_key=?1 AND t.public=?2 AND t.tenant=?3 AND r.slot IS NOT "
                        "NULL",
    [GW_SQL_LABEL_RUN] =
        "SELECT " GW_RUN_COLUMNS " FROM sessions s JOIN turns t ON t.session=s.id JOIN runs r ON "
        "r.id=t.run WHERE s.public_key=?1 AND s.public=?2 AND s.tenant=?3 AND r.slot IS NOT NULL "
        "ORDER BY t.id DESC LIMIT 1",
    [GW_SQL_TURN_READ] =
        "SELECT t.id, t.public, s.public, p.public, t.status, t.finish, t.retention, t.steps, "
        "t.seed, "
        "t.prompt_tokens, t.cached_tokens, t.restored_tokens, t.output_tokens, t.reasoning_tokens, "
        "t.drafted, "
        "t.accepted, t.engine_steps, t.queue_us, t.prefill_us, t.ttft_us, t.decode_us, "
        "t.created_ms, t.node, t.ended_ms, t.echo, t.reason, t.lost, t.diff_item, t.diff_token, "
        "t.dialect "
        "FROM turns t LEFT JOIN sessions s ON s.id=t.session LEFT JOIN turns p ON p.id=t.parent "
        "WHERE t.public_key=?1 AND t.public=?2 AND t.tenant=?3",
    [GW_SQL_TURN_UP] =
        "SELECT t.parent, t.prompt_base, t.prompt, r.tokens, t.lead, t.steps, t.echo, t.sum, "
        "r.digest "
        "FROM turns t LEFT JOIN runs r ON r.id=t.run WHERE t.id=?1",
    [GW_SQL_ANSWER] = "SELECT i.data, i.sum FROM nodes n JOIN items i ON i.id=n.item WHERE n.id=?1",
    [GW_SQL_TURN_NODE] = "SELECT node FROM turns WHERE public_key=?1 AND public=?2 AND tenant=?3",
    [GW_SQL_ITEM_UP] =
        "SELECT n.parent, i.kind, i.data, i.sum FROM nodes n JOIN items i ON i.id=n.item WHERE "
        "n.id=?1",
    [GW_SQL_TURN_FORGET] =
        "UPDATE turns SET echo=NULL, sum=NULL, retention=1, expires_ms=0 WHERE "
        "public_key=?1 AND public=?2 AND tenant=?3 AND dialect=?4 AND echo IS NOT "
        "NULL RETURNING id",
    /* The salt is the group's where tenants share pages. */
    [GW_SQL_TENANTS] = "SELECT t.id, t.name, ifnull(g.salt, t.salt), g.name, t.limits, "
                       "t.created_ms FROM tenants t LEFT "
                       "JOIN groups g ON g.id=t.sharing ORDER BY t.id",
    [GW_SQL_TENANT_FIND] = "SELECT t.id, ifnull(g.salt, t.salt) FROM tenants t LEFT JOIN groups g "
                           "ON g.id=t.sharing WHERE t.name=?1",
    [GW_SQL_TENANT_SHARE] =
        "UPDATE tenants SET sharing=?2 WHERE id=?1 AND (sharing IS NULL OR sharing=?2)",
    [GW_SQL_GROUP_FIND] = "SELECT id, salt FROM groups WHERE name=?1",
    [GW_SQL_GROUP_ADD] = "INSERT INTO groups(name, salt, created_ms) VALUES(?1, ?2, ?3)",
    [GW_SQL_TENANT_ADD] = "INSERT INTO tenants(name, salt, created_ms) VALUES(?1, ?2, ?3)",
    [GW_SQL_KEYS] = "SELECT id, tenant, hash, scopes, label, created_ms, restore FROM keys WHERE "
                    "revoked_ms IS NULL ORDER BY id",
    [GW_SQL_KEY_FIND] = "SELECT 1 FROM keys WHERE hash=?1",
    [GW_SQL_KEY_ADD] = "INSERT INTO keys(tenant, hash, scopes, label, created_ms, restore) "
                       "VALUES(?1, ?2, ?3, ?4, ?5, ?6)",
    [GW_SQL_KEY_REVOKE] = "UPDATE keys SET revoked_ms=?2 WHERE id=?1 AND revoked_ms IS NULL",
    [GW_SQL_SWEEP_LIST] =
        "SELECT " GW_LEAVING_COLUMNS
        " FROM turns t WHERE t.expires_ms>0 AND t.expires_ms<=?1 ORDER BY t.expires_ms "
        "DESC, t.id DESC LIMIT ?2",
    /* What its children keep it for: NULL first means for good. */
    [GW_SQL_SWEEP_CHILDREN] =
        "SELECT max(expires_ms IS NULL), max(expires_ms), count(*) FROM turns WHERE parent=?1",
    [GW_SQL_SWEEP_POSTPONE] = "UPDATE turns SET expires_ms=?2 WHERE id=?1",
    /* The turn and all that build on it, the deepest first. */
    [GW_SQL_BUILT_ON] =
        "WITH RECURSIVE d(id, depth) AS (SELECT ?1, 0 UNION ALL SELECT c.id, d.depth+1 FROM d JOIN "
        "turns c ON c.parent=d.id LIMIT ?2) SELECT " GW_LEAVING_COLUMNS
        " FROM d JOIN turns t ON t.id=d.id ORDER BY d.depth DESC",
    [GW_SQL_TURN_USED] = "SELECT 1 FROM turns WHERE parent=?1 UNION ALL SELECT 1 FROM sessions "
                         "WHERE kind=1 AND head=?1 LIMIT 1",
    [GW_SQL_TURN_THERE] = "SELECT 1 FROM turns WHERE id=?1",
    /* A deleted turn that nothing builds on any more. */
    [GW_SQL_FORGOTTEN] = "SELECT " GW_LEAVING_COLUMNS
                         " FROM turns t WHERE t.id=?1 AND t.expires_ms=0 AND NOT EXISTS (SELECT 1 "
                         "FROM turns c WHERE c.parent=?1)",
    [GW_SQL_TURN_DELETE] = "DELETE FROM turns WHERE id=?1",
    [GW_SQL_NODE_USED] =
        "SELECT 1 FROM nodes WHERE parent=?1 UNION ALL SELECT 1 FROM turns WHERE node=?1 LIMIT 1",
    [GW_SQL_NODE_READ] = "SELECT parent, item, run FROM nodes WHERE id=?1",
    [GW_SQL_NODE_DELETE] = "DELETE FROM nodes WHERE id=?1",
    [GW_SQL_NODE_TURN] = "SELECT id FROM turns WHERE node=?1 AND space=?2 LIMIT 1",
    [GW_SQL_NODE_CHILD] = "SELECT id FROM nodes WHERE parent=?1 LIMIT 1",
    [GW_SQL_ITEM_USED] = "SELECT 1 FROM nodes WHERE item=?1 LIMIT 1",
    [GW_SQL_ITEM_DELETE] = "DELETE FROM items WHERE id=?1",
    [GW_SQL_RUN_USED] =
        "SELECT 1 FROM nodes WHERE run=?1 UNION ALL SELECT 1 FROM turns WHERE run=?1 LIMIT 1",
    [GW_SQL_RUN_KEYS] = "SELECT slot, lineage, under FROM runs WHERE id=?1",
    [GW_SQL_RUN_DELETE] = "DELETE FROM runs WHERE id=?1",
    [GW_SQL_CALLS_DELETE] = "DELETE FROM calls WHERE run=?1",
    [GW_SQL_NATIVE_READ] =
        "SELECT " NATIVE_COLUMNS " WHERE s.public_key=?1 AND s.public=?2 AND s.tenant=?3 AND "
        "s.kind=?4",
    [GW_SQL_NATIVE_NEWEST] = "SELECT " NATIVE_COLUMNS
                             " WHERE s.tenant=?1 AND s.kind=1 AND s.id<?2 ORDER BY s.id DESC LIMIT "
                             "?3",
    [GW_SQL_NATIVE_OLDEST] = "SELECT " NATIVE_COLUMNS
                             " WHERE s.tenant=?1 AND s.kind=1 AND s.id>?2 ORDER BY s.id LIMIT ?3",
    [GW_SQL_NATIVE_COUNT] = "SELECT count(*) FROM sessions WHERE tenant=?1 AND kind=1",
    [GW_SQL_NATIVE_ADD] =
        "INSERT INTO sessions(tenant, public_key, public, kind, model, metadata, config, head, "
        "forked_session, forked_turn, created_ms, used_ms) VALUES(?1,?2,?3,?11,?4,?5,?6,?7,?8,?9,"
        "?10,?10)",
    [GW_SQL_NATIVE_PIN] = "UPDATE sessions SET pinned_ms=?2 WHERE id=?1",
    [GW_SQL_NATIVE_DROP] = "DELETE FROM sessions WHERE id=?1",
    [GW_SQL_NATIVE_DEPTH] = "WITH RECURSIVE " PATH_UP " SELECT count(*) FROM up",
    [GW_SQL_NATIVE_PATH] = "WITH RECURSIVE " PATH_UP " SELECT id FROM up",
    [GW_SQL_NATIVE_TURN] =
        "SELECT t.public, p.public, t.status, t.finish, t.node, p.node, t.lead, t.template, "
        "n.digest, n.run IS NOT NULL, t.reason, t.parent, r.tokens, r.slot IS NOT NULL, "
        "t.prompt_tokens, t.cached_tokens, t.restored_tokens, t.output_tokens, t.reasoning_tokens, "
        "t.drafted, t.accepted, t.created_ms, t.dialect, (SELECT x.told FROM streams x WHERE "
        "x.public_key=t.public_key AND x.turn=t.public AND x.live=0) "
        "FROM turns t LEFT JOIN turns p ON p.id=t.parent LEFT JOIN nodes n ON n.id=t.node LEFT "
        "JOIN runs r ON r.id=t.run WHERE t.id=?1",
    /* Its own turns and those that a deleted session left to it, the newest first. */
    [GW_SQL_NATIVE_OWN] = "WITH RECURSIVE " PATH_UP " SELECT id FROM turns WHERE session=?2 UNION "
                          "SELECT t.id FROM up JOIN turns t ON t.id=up.id WHERE t.session IS NULL "
                          "ORDER BY 1 DESC",
    [GW_SQL_NATIVE_LET_GO] = "UPDATE turns SET session=NULL WHERE session=?1",
    [GW_SQL_NODE_ROOT] =
        "WITH RECURSIVE up(id, parent) AS (SELECT id, parent FROM nodes WHERE id=?1 UNION ALL "
        "SELECT n.id, n.parent FROM up JOIN nodes n ON n.id=up.parent LIMIT 200000) "
        "SELECT n.digest, i.data FROM up JOIN nodes n ON n.id=up.id JOIN items i ON i.id=n.item "
        "WHERE up.parent IS NULL",
    [GW_SQL_USAGE_PLACE] =
        "SELECT EXISTS(SELECT 1 FROM usage WHERE day=?1 AND tenant=?2 AND tool=?3) OR (SELECT "
        "count(*) FROM usage WHERE day=?1 AND tenant=?2)<?4",
    [GW_SQL_USAGE_ADD] =
        "INSERT INTO usage(day, tenant, tool, turns, cancelled, failed, prompt_tokens, "
        "cached_tokens, restored_tokens, output_tokens, reasoning_tokens, drafted, accepted, lost, "
        "queue_us, prefill_us, decode_us) "
        "VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13,?14,?15,?16,?17) ON CONFLICT(day, "
        "tenant, tool) DO UPDATE SET turns=turns+excluded.turns, "
        "cancelled=cancelled+excluded.cancelled, failed=failed+excluded.failed, "
        "prompt_tokens=prompt_tokens+excluded.prompt_tokens, "
        "cached_tokens=cached_tokens+excluded.cached_tokens, "
        "restored_tokens=restored_tokens+excluded.restored_tokens, "
        "output_tokens=output_tokens+excluded.output_tokens, "
        "reasoning_tokens=reasoning_tokens+excluded.reasoning_tokens, "
        "drafted=drafted+excluded.drafted, accepted=accepted+excluded.accepted, "
        "lost=lost+excluded.lost, queue_us=queue_us+excluded.queue_us, "
        "prefill_us=prefill_us+excluded.prefill_us, decode_us=decode_us+excluded.decode_us",
    [GW_SQL_SESSION_SWEEP] = "DELETE FROM sessions WHERE kind=0 AND used_ms<?1 AND NOT EXISTS "
                             "(SELECT 1 FROM turns WHERE session=sessions.id)",
    [GW_SQL_SESSION_RELEASE] = "DELETE FROM sessions WHERE id=?1 AND kind=0 AND NOT EXISTS "
                               "(SELECT 1 FROM turns WHERE session=?1)",
    [GW_SQL_BYTES_ALL] =
        "SELECT ((SELECT page_count FROM pragma_page_count)-(SELECT freelist_count FROM "
        "pragma_freelist_count))*(SELECT page_size FROM pragma_page_size)",
    [GW_SQL_BYTES_TENANT] = "SELECT bytes FROM stored WHERE tenant=?1",
    [GW_SQL_BYTES_OVER] =
        "SELECT tenant FROM stored WHERE bytes>?1 AND tenant>?2 ORDER BY tenant LIMIT 1",
    [GW_SQL_TRIM_ALL] = "SELECT " GW_LEAVING_COLUMNS
                        " FROM turns t WHERE t.expires_ms IS NOT NULL AND t.retention<>2 AND NOT "
                        "EXISTS (SELECT 1 FROM turns c WHERE c.parent=t.id) ORDER BY t.expires_ms "
                        "LIMIT ?1",
    [GW_SQL_TRIM_TENANT] = "SELECT " GW_LEAVING_COLUMNS
                           " FROM turns t WHERE t.tenant=?2 AND t.retention=1 AND NOT EXISTS "
                           "(SELECT 1 FROM turns c WHERE c.parent=t.id) ORDER BY t.created_ms "
                           "LIMIT ?1",
    [GW_SQL_ERASURE_ADD] = "INSERT INTO erasures(space, kept, tokens) VALUES(?1, ?2, ?3)",
    [GW_SQL_ERASURE_NEXT] = "SELECT id, space, kept, tokens FROM erasures ORDER BY id LIMIT 1",
    [GW_SQL_ERASURE_DONE] = "DELETE FROM erasures WHERE id=?1",
};

sqlite3_stmt *gw_db_statement(gw_db *c, gw_sql id)
{
    sqlite3_stmt *s = c->statements[id];
    if (s) {
        sqlite3_reset(s);
        sqlite3_clear_bindings(s);
        return s;
    }
    if (sqlite3_prepare_v3(c->db, sql_text[id], -1, SQLITE_PREPARE_PERSISTENT, &s, NULL) !=
        SQLITE_OK)
        return NULL;
    c->statements[id] = s;
    return s;
}

bool gw_db_execute(sqlite3_stmt *s)
{
    if (!s)
        return false;
    int code = sqlite3_step(s);
    sqlite3_reset(s);
    return code == SQLITE_DONE;
}

sqlite3_stmt *gw_db_prepare(gw_db *c, const char *sql)
{
    sqlite3_stmt *s = NULL;
    return sqlite3_prepare_v2(c->db, sql, -1, &s, NULL) == SQLITE_OK ? s : NULL;
}

bool gw_db_run(sqlite3_stmt *s)
{
    bool ok = s && sqlite3_step(s) == SQLITE_DONE;
    sqlite3_finalize(s);
    return ok;
}

bool gw_db_simple(gw_db *c, gw_sql id)
{
    return gw_db_execute(gw_db_statement(c, id));
}

bool gw_db_scalar(sqlite3_stmt *s, int64_t *out)
{
    *out = 0;
    if (!s)
        return false;
    int code = sqlite3_step(s);
    if (code == SQLITE_ROW)
        *out = sqlite3_column_int64(s, 0);
    sqlite3_reset(s);
    return code == SQLITE_ROW || code == SQLITE_DONE;
}

void gw_bind_text(sqlite3_stmt *s, int at, const char *text)
{
    if (text)
        sqlite3_bind_text(s, at, text, -1, SQLITE_STATIC);
}

void gw_bind_id(sqlite3_stmt *s, int at, int64_t id)
{
    if (id)
        sqlite3_bind_int64(s, at, id);
}

void gw_bind_digest(sqlite3_stmt *s, int at, const gw_digest *digest)
{
    sqlite3_bind_blob(s, at, digest->bytes, sizeof(digest->bytes), SQLITE_STATIC);
}

int64_t gw_public_key(const char *id)
{
    return (int64_t)XXH3_64bits(id, strlen(id));
}

static base_code sqlite_code(int code)
{
    switch (code & 0xff) {
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        return BASE_CONFLICT;
    case SQLITE_NOTADB:
    case SQLITE_CORRUPT:
        return BASE_FORMAT;
    case SQLITE_NOMEM:
        return BASE_NOMEM;
    case SQLITE_TOOBIG:
        return BASE_TOO_LONG;
    case SQLITE_CONSTRAINT:
    case SQLITE_MISMATCH:
    case SQLITE_RANGE:
        return BASE_INVALID;
    default:
        return BASE_IO;
    }
}

base_code gw_db_error(gw_db *c, base_err *err, const char *what)
{
    return base_fail(err, sqlite_code(sqlite3_errcode(c->db)), "whimbrel.db: %s: %s", what,
                     sqlite3_errmsg(c->db));
}

void gw_db_close(gw_db *c)
{
    if (!c)
        return;
    for (int i = 0; i < GW_SQL_COUNT; i++)
        sqlite3_finalize(c->statements[i]);
    sqlite3_close(c->db);
    free(c);
}

base_code gw_db_open(gw_db **out, const char *file, uint32_t busy_ms, bool writer, base_err *err)
{
    gw_db *c = calloc(1, sizeof(*c));
    if (!c)
        return base_fail(err, BASE_NOMEM, "no memory for a database connection");
    int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX | (writer ? SQLITE_OPEN_CREATE : 0);
    int code = sqlite3_open_v2(file, &c->db, flags, base_scrub_vfs());
    if (code == SQLITE_OK) {
        sqlite3_busy_timeout(c->db, (int)busy_ms);
        /* secure_delete: what was erased must not be found in the file's free pages; what it leaves
         * beside cells that moved is base_scrub_vfs's. Under load the log keeps its blocks for the
         * next round; when idle it is cut whole. */
        code = sqlite3_exec(
            c->db,
            "PRAGMA synchronous=NORMAL; PRAGMA temp_store=MEMORY; PRAGMA secure_delete=ON;"
            "PRAGMA journal_size_limit=8388608; PRAGMA wal_autocheckpoint=0;",
            NULL, NULL, NULL);
    }
    if (code == SQLITE_OK && writer) {
        if (sqlite3_db_readonly(c->db, "main") == 1) {
            gw_db_close(c);
            return base_fail_param(err, BASE_IO, "data.path", "whimbrel.db is read-only");
        }
        /* Not for want of memory: with more, SQLite's walks over its own table of pages are among
         * the dearest lines of a turn's end, and a page that is not here is still in the system's
         * cache. g.commit, medians of one run, in us: 384 with 16 MiB, 321 with 32, 293 with 8, 267
         * with 4 and with 2; of another: 381 with 32, 300 with 4. Pages of 2 KiB gave 200 against
         * 216, but fewer commits a second; of 1 KiB, nothing. */
        code = sqlite3_exec(c->db, "PRAGMA journal_mode=WAL; PRAGMA cache_size=-4096", NULL, NULL,
                            NULL);
    }
    if (code != SQLITE_OK) {
        base_code to = sqlite_code(code);
        base_fail_param(err, to, "data.path", "whimbrel.db: cannot open: %s%s",
                        c->db ? sqlite3_errmsg(c->db) : "no memory",
                        to == BASE_CONFLICT ? " (another process uses it)" : "");
        gw_db_close(c);
        return to;
    }
    *out = c;
    return BASE_OK;
}

bool gw_db_checkpoint(gw_db *c, int mode)
{
    int code = sqlite3_wal_checkpoint_v2(c->db, NULL, mode, NULL, NULL);
    if (code != SQLITE_OK && code != SQLITE_BUSY && code != SQLITE_LOCKED)
        base_log(BASE_LOG_WARN, "checkpoint_failed reason=\"%s\"", sqlite3_errmsg(c->db));
    return code == SQLITE_OK;
}

/* ---- sums: what a row says of its own content ---- */

int64_t gw_item_sum(const void *data, size_t length)
{
    return (int64_t)XXH3_64bits(data, length);
}

int64_t gw_turn_sum(const void *prompt, size_t prompt_length, const void *steps,
                    size_t steps_length, const char *echo)
{
    uint64_t parts[3] = {XXH3_64bits(prompt, prompt_length), XXH3_64bits(steps, steps_length),
                         XXH3_64bits(echo, echo ? strlen(echo) : 0)};
    return (int64_t)XXH3_64bits(parts, sizeof(parts));
}

bool gw_column_sum_fits(sqlite3_stmt *s, int column, int64_t sum)
{
    return sqlite3_column_type(s, column) == SQLITE_NULL || sqlite3_column_int64(s, column) == sum;
}

bool gw_column_turn_fits(sqlite3_stmt *s, int prompt, int steps, int echo, int sum)
{
    return gw_column_sum_fits(
        s, sum,
        gw_turn_sum(sqlite3_column_blob(s, prompt), (size_t)sqlite3_column_bytes(s, prompt),
                    sqlite3_column_blob(s, steps), (size_t)sqlite3_column_bytes(s, steps),
                    (const char *)sqlite3_column_text(s, echo)));
}

/* ---- token blobs: LEB128 ---- */

void gw_put_numbers(base_buf *out, const void *numbers, uint32_t count)
{
    const uint32_t *list = numbers;
    if (!base_buf_reserve(out, (size_t)count * 5))
        return;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t n = list[i];
        uint8_t bytes[5];
        size_t length = 0;
        do {
            bytes[length] = (uint8_t)(n & 0x7f) | (n > 0x7f ? 0x80 : 0);
            length++;
            n >>= 7;
        } while (n);
        base_buf_add(out, bytes, length);
    }
}

/* Counts, or with `out` writes, the numbers of a blob; UINT32_MAX if it is damaged. */
static uint32_t get_numbers(uint32_t *out, const uint8_t *blob, size_t length)
{
    uint32_t count = 0;
    for (size_t at = 0; at < length; count++) {
        uint64_t n = 0;
        for (unsigned shift = 0;; shift += 7) {
            if (at == length || shift > 28)
                return UINT32_MAX;
            n |= (uint64_t)(blob[at] & 0x7f) << shift;
            if (!(blob[at++] & 0x80))
                break;
        }
        if (n > UINT32_MAX)
            return UINT32_MAX;
        if (out)
            out[count] = (uint32_t)n;
    }
    return count;
}

bool gw_column_numbers(sqlite3_stmt *s, int column, void **out, uint32_t *count, base_arena *arena)
{
    const uint8_t *blob = sqlite3_column_blob(s, column);
    size_t length = (size_t)sqlite3_column_bytes(s, column);
    *count = get_numbers(NULL, blob, length);
    if (*count == UINT32_MAX)
        return false;
    *out = base_arena_alloc(arena, base_max((size_t)*count * sizeof(uint32_t), 1));
    return *out && get_numbers(*out, blob, length) == *count;
}

void gw_sequence_hash(uint64_t out[2], const int32_t *a, uint32_t a_count, const int32_t *b,
                      uint32_t b_count)
{
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    if (a_count)
        XXH3_128bits_update(&state, a, (size_t)a_count * sizeof(*a));
    if (b_count)
        XXH3_128bits_update(&state, b, (size_t)b_count * sizeof(*b));
    XXH128_hash_t hash = XXH3_128bits_digest(&state);
    out[0] = hash.low64;
    out[1] = hash.high64;
}

static bool column_bytes(sqlite3_stmt *s, int column, void *out, size_t length)
{
    if (sqlite3_column_bytes(s, column) != (int)length)
        return false;
    memcpy(out, sqlite3_column_blob(s, column), length);
    return true;
}

bool gw_column_digest(sqlite3_stmt *s, int column, gw_digest *out)
{
    return column_bytes(s, column, out->bytes, sizeof(out->bytes));
}

gw_run *gw_column_run(sqlite3_stmt *s, base_arena *arena)
{
    gw_run *run = base_arena_calloc(arena, 1, sizeof(*run));
    if (!run)
        return NULL;
    run->tenant = sqlite3_column_int64(s, 1);
    const char *template_id = (const char *)sqlite3_column_text(s, 2);
    snprintf(run->template_id, sizeof(run->template_id), "%s", template_id ? template_id : "");
    run->has_reasoning = sqlite3_column_type(s, 5) != SQLITE_NULL;
    gw_id_set(&run->turn, (const char *)sqlite3_column_text(s, 7));
    gw_id_set(&run->session, (const char *)sqlite3_column_text(s, 8));
    bool good = gw_column_digest(s, 3, &run->slot) && gw_column_digest(s, 4, &run->visible) &&
                (!run->has_reasoning || gw_column_digest(s, 5, &run->reasoning)) &&
                gw_column_digest(s, 6, &run->tokens_digest) &&
                column_bytes(s, 9, run->sequence, sizeof(run->sequence));
    if (good) {
        run->sequence_tokens = (uint32_t)sqlite3_column_int64(s, 10);
        void *tokens;
        good = gw_column_numbers(s, 12, &tokens, &run->token_count, arena) &&
               run->token_count == (uint32_t)sqlite3_column_int64(s, 11);
        run->tokens = tokens;
    }
    run->bodied = sqlite3_column_type(s, 13) != SQLITE_NULL;
    if (good && run->bodied)
        good = gw_column_digest(s, 13, &run->lineage) && gw_column_digest(s, 14, &run->under);
    /* Rows of earlier versions have none of this. */
    if (good && sqlite3_column_type(s, 16) != SQLITE_NULL) {
        good = column_bytes(s, 16, &run->front, sizeof(run->front)) &&
               column_bytes(s, 17, run->head, sizeof(run->head));
        gw_id_set(&run->parent, (const char *)sqlite3_column_text(s, 15));
        run->head_tokens = (uint32_t)sqlite3_column_int64(s, 18);
        run->space = (uint64_t)sqlite3_column_int64(s, 19);
        const char *fingerprint = (const char *)sqlite3_column_text(s, 20);
        snprintf(run->fingerprint, sizeof(run->fingerprint), "%s", fingerprint ? fingerprint : "");
        run->ended_ms = sqlite3_column_int64(s, 21);
    }
    /* The stored digest covers the tokens: a row that was damaged is never spliced. */
    gw_digest check;
    if (good) {
        gw_hash hash = gw_hash_open();
        gw_tokens_digest(&hash, &check, run->tokens, run->token_count);
        good = !hash.failed && gw_digest_equal(&check, &run->tokens_digest);
        gw_hash_close(&hash);
    }
    if (good)
        return run;
    base_log(BASE_LOG_ERROR, "run_damaged row=%lld", (long long)sqlite3_column_int64(s, 0));
    return NULL;
}
