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
        "INSERT INTO items(tenant, key, digest, kind, data) VALUES(?3, ?1, ?2, ?4, ?5)",
    [GW_SQL_RUN_FIND] =
        "SELECT id FROM runs WHERE slot_key=?1 AND slot=?2 AND digest=?3 AND tenant=?4",
    [GW_SQL_RUN_OTHER] = "SELECT 1 FROM runs WHERE slot_key=?1 AND slot=?2 AND digest<>?3 LIMIT 1",
    [GW_SQL_RUN_ADD] =
        "INSERT INTO runs(tenant, template, slot_key, slot, visible, reasoning, digest, turn, "
        "session, sequence, "
        "sequence_tokens, token_count, tokens) VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13)",
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
        "echo) "
        "VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13,?14,?15,?16,?17,?18,?19,?20,?21,?22,?23,"
        "?24,?25,?26,?27,?28,"
        "?29,?30,?31,?32,?33,?34,?35,?36,?37,?38,?39,?40,?41)",
    [GW_SQL_SLOT] =
        "SELECT " GW_RUN_COLUMNS
        " FROM runs r WHERE r.slot_key=?1 AND r.slot=?2 AND r.tenant=?3 ORDER BY r.id LIMIT ?4",
    [GW_SQL_CALL] = "SELECT " GW_RUN_COLUMNS
                    " FROM calls c JOIN runs r ON r.id=c.run WHERE c.key=?1 AND c.public=?2 AND "
                    "r.tenant=?3 AND r.slot IS NOT NULL",
    [GW_SQL_TURN_READ] =
        "SELECT t.id, t.public, s.public, p.public, t.status, t.finish, t.retention, t.steps, "
        "t.seed, "
        "t.prompt_tokens, t.cached_tokens, t.restored_tokens, t.output_tokens, t.reasoning_tokens, "
        "t.drafted, "
        "t.accepted, t.engine_steps, t.queue_us, t.prefill_us, t.ttft_us, t.decode_us, "
        "t.created_ms, t.node, t.ended_ms, t.echo "
        "FROM turns t LEFT JOIN sessions s ON s.id=t.session LEFT JOIN turns p ON p.id=t.parent "
        "WHERE t.public_key=?1 AND t.public=?2 AND t.tenant=?3",
    [GW_SQL_TURN_UP] =
        "SELECT t.parent, t.prompt_base, t.prompt, r.tokens, t.lead FROM turns t LEFT "
        "JOIN runs r ON r.id=t.run "
        "WHERE t.id=?1",
    [GW_SQL_ANSWER] = "SELECT i.data FROM nodes n JOIN items i ON i.id=n.item WHERE n.id=?1",
    [GW_SQL_TURN_NODE] = "SELECT node FROM turns WHERE public_key=?1 AND public=?2 AND tenant=?3",
    [GW_SQL_ITEM_UP] =
        "SELECT n.parent, i.kind, i.data FROM nodes n JOIN items i ON i.id=n.item WHERE n.id=?1",
    [GW_SQL_TURN_FORGET] = "UPDATE turns SET echo=NULL, retention=1, expires_ms=?4 WHERE "
                           "public_key=?1 AND public=?2 AND tenant=?3 AND echo IS NOT NULL",
    [GW_SQL_TENANTS] = "SELECT id, name, salt FROM tenants ORDER BY id",
    [GW_SQL_TENANT_FIND] = "SELECT id, salt FROM tenants WHERE name=?1",
    [GW_SQL_TENANT_ADD] = "INSERT INTO tenants(name, salt, created_ms) VALUES(?1, ?2, ?3)",
    [GW_SQL_KEYS] =
        "SELECT id, tenant, hash, scopes, label, created_ms FROM keys WHERE revoked_ms IS "
        "NULL ORDER BY id",
    [GW_SQL_KEY_FIND] = "SELECT 1 FROM keys WHERE hash=?1",
    [GW_SQL_KEY_ADD] =
        "INSERT INTO keys(tenant, hash, scopes, label, created_ms) VALUES(?1, ?2, ?3, ?4, ?5)",
    [GW_SQL_KEY_REVOKE] = "UPDATE keys SET revoked_ms=?2 WHERE id=?1 AND revoked_ms IS NULL",
    [GW_SQL_SWEEP_LIST] =
        "SELECT id, node, run FROM turns WHERE expires_ms<=?1 ORDER BY expires_ms "
        "DESC, id DESC LIMIT ?2",
    /* What its children keep it for: NULL first means for good. */
    [GW_SQL_SWEEP_CHILDREN] =
        "SELECT max(expires_ms IS NULL), max(expires_ms), count(*) FROM turns WHERE parent=?1",
    [GW_SQL_SWEEP_POSTPONE] = "UPDATE turns SET expires_ms=?2 WHERE id=?1",
    [GW_SQL_TURN_DELETE] = "DELETE FROM turns WHERE id=?1",
    [GW_SQL_NODE_USED] =
        "SELECT 1 FROM nodes WHERE parent=?1 UNION ALL SELECT 1 FROM turns WHERE node=?1 LIMIT 1",
    [GW_SQL_NODE_READ] = "SELECT parent, item, run FROM nodes WHERE id=?1",
    [GW_SQL_NODE_DELETE] = "DELETE FROM nodes WHERE id=?1",
    [GW_SQL_ITEM_USED] = "SELECT 1 FROM nodes WHERE item=?1 LIMIT 1",
    [GW_SQL_ITEM_DELETE] = "DELETE FROM items WHERE id=?1",
    [GW_SQL_RUN_USED] =
        "SELECT 1 FROM nodes WHERE run=?1 UNION ALL SELECT 1 FROM turns WHERE run=?1 LIMIT 1",
    [GW_SQL_RUN_SLOT] = "SELECT slot FROM runs WHERE id=?1",
    [GW_SQL_RUN_DELETE] = "DELETE FROM runs WHERE id=?1",
    [GW_SQL_CALLS_DELETE] = "DELETE FROM calls WHERE run=?1",
    [GW_SQL_SESSION_SWEEP] = "DELETE FROM sessions WHERE kind=0 AND used_ms<?1 AND NOT EXISTS "
                             "(SELECT 1 FROM turns WHERE session=sessions.id)",
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
    int code = sqlite3_open_v2(file, &c->db, flags, NULL);
    if (code == SQLITE_OK) {
        sqlite3_busy_timeout(c->db, (int)busy_ms);
        /* secure_delete: what was erased must not be found in the file's free pages. */
        code = sqlite3_exec(
            c->db,
            "PRAGMA synchronous=NORMAL; PRAGMA temp_store=MEMORY; PRAGMA secure_delete=ON;"
            "PRAGMA journal_size_limit=1048576; PRAGMA wal_autocheckpoint=0;",
            NULL, NULL, NULL);
    }
    if (code == SQLITE_OK && writer) {
        if (sqlite3_db_readonly(c->db, "main") == 1) {
            gw_db_close(c);
            return base_fail_param(err, BASE_IO, "data.path", "whimbrel.db is read-only");
        }
        code = sqlite3_exec(c->db, "PRAGMA journal_mode=WAL", NULL, NULL, NULL);
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

static bool column_digest(sqlite3_stmt *s, int column, gw_digest *out)
{
    if (sqlite3_column_bytes(s, column) != (int)sizeof(out->bytes))
        return false;
    memcpy(out->bytes, sqlite3_column_blob(s, column), sizeof(out->bytes));
    return true;
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
    bool good = column_digest(s, 3, &run->slot) && column_digest(s, 4, &run->visible) &&
                (!run->has_reasoning || column_digest(s, 5, &run->reasoning)) &&
                column_digest(s, 6, &run->tokens_digest) &&
                sqlite3_column_bytes(s, 9) == (int)sizeof(run->sequence);
    if (good) {
        memcpy(run->sequence, sqlite3_column_blob(s, 9), sizeof(run->sequence));
        run->sequence_tokens = (uint32_t)sqlite3_column_int64(s, 10);
        void *tokens;
        good = gw_column_numbers(s, 12, &tokens, &run->token_count, arena) &&
               run->token_count == (uint32_t)sqlite3_column_int64(s, 11);
        run->tokens = tokens;
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
