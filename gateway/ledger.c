/* gw_ledger: see the header. Here: connections and statements, the writer, look-ups, reading,
 * sweeping.
 *
 * Writer: takes all that waits (at most BATCH_MAX), one BEGIN IMMEDIATE … COMMIT, then the
 * callbacks. If one turn's statements or the commit fail, the batch is rolled back and each turn
 * tried in a transaction of its own, so that one bad turn costs itself only. Runs enter memory
 * right before the callback, stored or not.
 *
 * Log: no automatic checkpoint, which would stall a commit. A thread of its own copies the log
 * back: PASSIVE (it waits for nobody) when CHECKPOINT_PAGES have gathered, TRUNCATE after a second
 * without commits and at close. A reader that pinned the log could make it grow, so no statement
 * outlives the call that stepped it, and past RESTART_PAGES the checkpoint waits for readers
 * (busy_ms at most). */
#include "gateway/ledger_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/thread.h"

#define MEMORY_BYTES (64u << 20)
#define QUEUE_MAX 4096
#define BUSY_MS 3000
#define BATCH_MAX 256
#define READERS_MAX 16
#define CHECKPOINT_PAGES 1000 /* 4 MiB of 4 KiB pages */
#define RESTART_PAGES 8000    /* 32 MiB */
#define SWEEP_TURNS 64        /* a transaction */
#define SWEEP_MS 30000
#define USAGE_TTL_MS_MIN 3600000 /* counts of turns that keep nothing else */
#define CHAIN_MAX 100000         /* turns of one prompt, against a loop in a damaged file */

/* ---- statements ---- */

#define RUN_COLUMNS                                                                                \
    "r.id, r.tenant, r.template, r.slot, r.visible, r.reasoning, r.digest, r.turn, r.session, "    \
    "r.sequence, "                                                                                 \
    "r.sequence_tokens, r.token_count, r.tokens"

typedef enum sql_id {
    SQL_BEGIN,
    SQL_COMMIT,
    SQL_ROLLBACK,
    SQL_SESSION_FIND,
    SQL_SESSION_ADD,
    SQL_SESSION_USE,
    SQL_NODE_FIND,
    SQL_NODE_ADD,
    SQL_ITEM_FIND,
    SQL_ITEM_ADD,
    SQL_RUN_FIND,
    SQL_RUN_OTHER,
    SQL_RUN_ADD,
    SQL_CALL_ADD,
    SQL_TURN_FIND,
    SQL_TURN_ADD,
    SQL_SLOT,
    SQL_CALL,
    SQL_TURN_READ,
    SQL_TURN_UP,
    SQL_ANSWER,
    SQL_TURN_NODE,
    SQL_ITEM_UP,
    SQL_TURN_FORGET,
    SQL_TENANTS,
    SQL_TENANT_FIND,
    SQL_TENANT_ADD,
    SQL_KEYS,
    SQL_KEY_FIND,
    SQL_KEY_ADD,
    SQL_KEY_REVOKE,
    SQL_SWEEP_LIST,
    SQL_SWEEP_CHILDREN,
    SQL_SWEEP_POSTPONE,
    SQL_TURN_DELETE,
    SQL_NODE_USED,
    SQL_NODE_READ,
    SQL_NODE_DELETE,
    SQL_ITEM_USED,
    SQL_ITEM_DELETE,
    SQL_RUN_USED,
    SQL_RUN_SLOT,
    SQL_RUN_DELETE,
    SQL_CALLS_DELETE,
    SQL_SESSION_SWEEP,
    SQL_COUNT,
} sql_id;

static const char *const sql_text[SQL_COUNT] = {
    [SQL_BEGIN] = "BEGIN IMMEDIATE",
    [SQL_COMMIT] = "COMMIT",
    [SQL_ROLLBACK] = "ROLLBACK",
    [SQL_SESSION_FIND] = "SELECT id FROM sessions WHERE public_key=?1 AND public=?2 AND tenant=?3",
    [SQL_SESSION_ADD] =
        "INSERT INTO sessions(tenant, public_key, public, kind, label, model, created_ms, used_ms) "
        "VALUES(?3, ?1, ?2, 0, ?4, ?5, ?6, ?6)",
    [SQL_SESSION_USE] = "UPDATE sessions SET head=?2, used_ms=?3 WHERE id=?1",
    [SQL_NODE_FIND] = "SELECT id FROM nodes WHERE key=?1 AND digest=?2 AND tenant=?3",
    [SQL_NODE_ADD] =
        "INSERT INTO nodes(tenant, key, digest, parent, item, run) VALUES(?3, ?1, ?2, ?4, ?5, ?6)",
    [SQL_ITEM_FIND] = "SELECT id FROM items WHERE key=?1 AND digest=?2 AND tenant=?3",
    [SQL_ITEM_ADD] =
        "INSERT INTO items(tenant, key, digest, kind, data) VALUES(?3, ?1, ?2, ?4, ?5)",
    [SQL_RUN_FIND] =
        "SELECT id FROM runs WHERE slot_key=?1 AND slot=?2 AND digest=?3 AND tenant=?4",
    [SQL_RUN_OTHER] = "SELECT 1 FROM runs WHERE slot_key=?1 AND slot=?2 AND digest<>?3 LIMIT 1",
    [SQL_RUN_ADD] =
        "INSERT INTO runs(tenant, template, slot_key, slot, visible, reasoning, digest, turn, "
        "session, sequence, "
        "sequence_tokens, token_count, tokens) VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13)",
    [SQL_CALL_ADD] = "INSERT INTO calls(key, public, run) VALUES(?1, ?2, ?3)",
    [SQL_TURN_FIND] =
        "SELECT id FROM turns WHERE public_key=?1 AND public=?2 AND tenant=?3 AND node IS NOT NULL",
    [SQL_TURN_ADD] =
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
    [SQL_SLOT] =
        "SELECT " RUN_COLUMNS
        " FROM runs r WHERE r.slot_key=?1 AND r.slot=?2 AND r.tenant=?3 ORDER BY r.id LIMIT ?4",
    [SQL_CALL] = "SELECT " RUN_COLUMNS
                 " FROM calls c JOIN runs r ON r.id=c.run WHERE c.key=?1 AND c.public=?2 AND "
                 "r.tenant=?3 AND r.slot IS NOT NULL",
    [SQL_TURN_READ] =
        "SELECT t.id, t.public, s.public, p.public, t.status, t.finish, t.retention, t.steps, "
        "t.seed, "
        "t.prompt_tokens, t.cached_tokens, t.restored_tokens, t.output_tokens, t.reasoning_tokens, "
        "t.drafted, "
        "t.accepted, t.engine_steps, t.queue_us, t.prefill_us, t.ttft_us, t.decode_us, "
        "t.created_ms, t.node, t.ended_ms, t.echo "
        "FROM turns t LEFT JOIN sessions s ON s.id=t.session LEFT JOIN turns p ON p.id=t.parent "
        "WHERE t.public_key=?1 AND t.public=?2 AND t.tenant=?3",
    [SQL_TURN_UP] = "SELECT t.parent, t.prompt_base, t.prompt, r.tokens, t.lead FROM turns t LEFT "
                    "JOIN runs r ON r.id=t.run "
                    "WHERE t.id=?1",
    [SQL_ANSWER] = "SELECT i.data FROM nodes n JOIN items i ON i.id=n.item WHERE n.id=?1",
    [SQL_TURN_NODE] = "SELECT node FROM turns WHERE public_key=?1 AND public=?2 AND tenant=?3",
    [SQL_ITEM_UP] =
        "SELECT n.parent, i.kind, i.data FROM nodes n JOIN items i ON i.id=n.item WHERE n.id=?1",
    [SQL_TURN_FORGET] = "UPDATE turns SET echo=NULL, retention=1, expires_ms=?4 WHERE "
                        "public_key=?1 AND public=?2 AND tenant=?3 AND echo IS NOT NULL",
    [SQL_TENANTS] = "SELECT id, name, salt FROM tenants ORDER BY id",
    [SQL_TENANT_FIND] = "SELECT id, salt FROM tenants WHERE name=?1",
    [SQL_TENANT_ADD] = "INSERT INTO tenants(name, salt, created_ms) VALUES(?1, ?2, ?3)",
    [SQL_KEYS] = "SELECT id, tenant, hash, scopes, label, created_ms FROM keys WHERE revoked_ms IS "
                 "NULL ORDER BY id",
    [SQL_KEY_FIND] = "SELECT 1 FROM keys WHERE hash=?1",
    [SQL_KEY_ADD] =
        "INSERT INTO keys(tenant, hash, scopes, label, created_ms) VALUES(?1, ?2, ?3, ?4, ?5)",
    [SQL_KEY_REVOKE] = "UPDATE keys SET revoked_ms=?2 WHERE id=?1 AND revoked_ms IS NULL",
    [SQL_SWEEP_LIST] = "SELECT id, node, run FROM turns WHERE expires_ms<=?1 ORDER BY expires_ms "
                       "DESC, id DESC LIMIT ?2",
    /* What its children keep it for: NULL first means for good. */
    [SQL_SWEEP_CHILDREN] =
        "SELECT max(expires_ms IS NULL), max(expires_ms), count(*) FROM turns WHERE parent=?1",
    [SQL_SWEEP_POSTPONE] = "UPDATE turns SET expires_ms=?2 WHERE id=?1",
    [SQL_TURN_DELETE] = "DELETE FROM turns WHERE id=?1",
    [SQL_NODE_USED] =
        "SELECT 1 FROM nodes WHERE parent=?1 UNION ALL SELECT 1 FROM turns WHERE node=?1 LIMIT 1",
    [SQL_NODE_READ] = "SELECT parent, item, run FROM nodes WHERE id=?1",
    [SQL_NODE_DELETE] = "DELETE FROM nodes WHERE id=?1",
    [SQL_ITEM_USED] = "SELECT 1 FROM nodes WHERE item=?1 LIMIT 1",
    [SQL_ITEM_DELETE] = "DELETE FROM items WHERE id=?1",
    [SQL_RUN_USED] =
        "SELECT 1 FROM nodes WHERE run=?1 UNION ALL SELECT 1 FROM turns WHERE run=?1 LIMIT 1",
    [SQL_RUN_SLOT] = "SELECT slot FROM runs WHERE id=?1",
    [SQL_RUN_DELETE] = "DELETE FROM runs WHERE id=?1",
    [SQL_CALLS_DELETE] = "DELETE FROM calls WHERE run=?1",
    [SQL_SESSION_SWEEP] = "DELETE FROM sessions WHERE kind=0 AND used_ms<?1 AND NOT EXISTS "
                          "(SELECT 1 FROM turns WHERE session=sessions.id)",
};

/* One connection and its statements; one thread at a time. */
typedef struct conn {
    struct conn *next;
    sqlite3 *db;
    sqlite3_stmt *statements[SQL_COUNT];
} conn;

/* A prepared statement, reset and without bindings; NULL on an error of SQLite. */
static sqlite3_stmt *statement(conn *c, sql_id id)
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

/* Steps a statement that gives no rows, and resets it. */
static bool execute(sqlite3_stmt *s)
{
    if (!s)
        return false;
    int code = sqlite3_step(s);
    sqlite3_reset(s);
    return code == SQLITE_DONE;
}

static bool simple(conn *c, sql_id id)
{
    return execute(statement(c, id));
}

/* First column of the first row, 0 if there is no row. The statement is reset. False on an error.
 */
static bool scalar(sqlite3_stmt *s, int64_t *out)
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

static void bind_text(sqlite3_stmt *s, int at, const char *text)
{
    if (text)
        sqlite3_bind_text(s, at, text, -1, SQLITE_STATIC);
}

static void bind_id(sqlite3_stmt *s, int at, int64_t id)
{
    if (id)
        sqlite3_bind_int64(s, at, id);
}

static void bind_digest(sqlite3_stmt *s, int at, const gw_digest *digest)
{
    sqlite3_bind_blob(s, at, digest->bytes, sizeof(digest->bytes), SQLITE_STATIC);
}

static int64_t public_key(const char *id)
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

static base_code database_error(conn *c, base_err *err, const char *what)
{
    return base_fail(err, sqlite_code(sqlite3_errcode(c->db)), "whimbrel.db: %s: %s", what,
                     sqlite3_errmsg(c->db));
}

static void conn_close(conn *c)
{
    if (!c)
        return;
    for (int i = 0; i < SQL_COUNT; i++)
        sqlite3_finalize(c->statements[i]);
    sqlite3_close(c->db);
    free(c);
}

static base_code conn_open(conn **out, const char *file, uint32_t busy_ms, bool writer,
                           base_err *err)
{
    conn *c = calloc(1, sizeof(*c));
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
            conn_close(c);
            return base_fail_param(err, BASE_IO, "data.path", "whimbrel.db is read-only");
        }
        code = sqlite3_exec(c->db, "PRAGMA journal_mode=WAL", NULL, NULL, NULL);
    }
    if (code != SQLITE_OK) {
        base_code to = sqlite_code(code);
        base_fail_param(err, to, "data.path", "whimbrel.db: cannot open: %s%s",
                        c->db ? sqlite3_errmsg(c->db) : "no memory",
                        to == BASE_CONFLICT ? " (another process uses it)" : "");
        conn_close(c);
        return to;
    }
    *out = c;
    return BASE_OK;
}

/* ---- the ledger ---- */

/* A job of the writer that its caller waits for. */
typedef struct task {
    struct task *next;
    base_code (*run)(gw_ledger *ledger, conn *c, void *ctx, base_err *err);
    void *ctx;
    base_code code;
    base_err err;
    bool done;
} task;

/* What one commit needs beside its fields, made outside the transaction. */
typedef struct work {
    gw_commit *commit;
    gw_run run; /* tokens borrowed from the commit */
    gw_digest own, node;
    bool alone;
} work;

struct gw_ledger {
    gw_ledger_options options;
    gw_memory *memory;
    char *file;
    int lock_fd;
    conn *writer; /* writer thread */
    gw_hash hash; /* writer thread */
    work works[BATCH_MAX];
    pthread_t thread, keeper;
    bool thread_runs, keeper_runs;

    pthread_mutex_t mutex; /* guards the queues and `closing` */
    pthread_cond_t wake, task_done;
    gw_commit *commits, **commits_last;
    task *tasks, **tasks_last;
    uint32_t queued;
    bool closing;

    pthread_mutex_t reader_mutex; /* guards the readers that are free */
    pthread_cond_t reader_free;
    conn *readers;
    uint32_t reader_count;

    pthread_mutex_t keeper_mutex; /* guards what follows */
    pthread_cond_t keeper_wake;
    uint32_t wal_pages;
    uint64_t written_ns; /* last commit; 0: the log is empty */
    bool keeper_stop;

    atomic_uint_fast64_t commit_count, transaction_count, failure_count;
};

gw_id gw_id_mint(const char *prefix)
{
    gw_id id;
    uint8_t random[16];
    /* 96 bits for names; 128 for what lets a client name hidden tokens. */
    size_t bytes = strcmp(prefix, "call_") == 0 ? 16 : 12;
    /* Cannot fail for so few bytes once the system has started. */
    CHECK(getrandom(random, bytes, 0) == (ssize_t)bytes);
    size_t at = (size_t)snprintf(id.text, sizeof(id.text), "%s", prefix);
    for (size_t i = 0; i < bytes; i++)
        at += (size_t)snprintf(id.text + at, sizeof(id.text) - at, "%02x", random[i]);
    return id;
}

static void set_id(gw_id *id, const char *text)
{
    snprintf(id->text, sizeof(id->text), "%s", text ? text : "");
}

/* ---- token blobs: LEB128 ---- */

static void put_numbers(base_buf *out, const void *numbers, uint32_t count)
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

/* A blob column to an array in the arena. */
static bool column_numbers(sqlite3_stmt *s, int column, void **out, uint32_t *count,
                           base_arena *arena)
{
    const uint8_t *blob = sqlite3_column_blob(s, column);
    size_t length = (size_t)sqlite3_column_bytes(s, column);
    *count = get_numbers(NULL, blob, length);
    if (*count == UINT32_MAX)
        return false;
    *out = base_arena_alloc(arena, base_max((size_t)*count * sizeof(uint32_t), 1));
    return *out && get_numbers(*out, blob, length) == *count;
}

static void sequence_hash(uint64_t out[2], const int32_t *a, uint32_t a_count, const int32_t *b,
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

bool gw_match_continues(const gw_match *match, const int32_t *prompt, uint32_t prompt_count)
{
    uint64_t sequence[2];
    if (match->last < 0 || match->parent_tokens > prompt_count)
        return false;
    sequence_hash(sequence, prompt, match->parent_tokens, NULL, 0);
    return memcmp(sequence, match->parent_sequence, sizeof(sequence)) == 0;
}

/* ---- writing a turn ---- */

/* Digests and the run, before the transaction begins. */
static void prepare_work(gw_ledger *ledger, work *w, gw_commit *commit)
{
    gw_hash *hash = &ledger->hash;
    const gw_digest *parent = &commit->match->chain[commit->item_count];
    *w = (work){.commit = commit, .alone = true};
    gw_run *run = &w->run;
    run->tenant = commit->root->tenant;
    snprintf(run->template_id, sizeof(run->template_id), "%s", commit->root->template_id);
    gw_item_visible(hash, &run->visible, &commit->answer);
    run->has_reasoning = gw_item_reasoning(hash, &run->reasoning, commit->answer.reasoning);
    gw_tokens_digest(hash, &run->tokens_digest, commit->run, commit->run_count);
    gw_slot(hash, &run->slot, parent, &run->visible);
    gw_item_own(hash, &w->own, &run->visible, &commit->answer);
    if (commit->splice)
        gw_node_run(hash, &w->node, parent, &run->tokens_digest);
    else
        gw_node_item(hash, &w->node, parent, &w->own);
    set_id(&run->turn, commit->turn);
    set_id(&run->session, commit->session);
    sequence_hash(run->sequence, commit->prompt, commit->prompt_count, commit->run + commit->lead,
                  commit->run_count - commit->lead);
    run->sequence_tokens = commit->prompt_count + commit->run_count - commit->lead;
    run->tokens = (int32_t *)commit->run;
    run->token_count = commit->run_count;
}

static bool find_or_add_item(conn *c, int64_t *id, int64_t tenant, const gw_digest *digest,
                             int kind, const eng_item *item, const gw_root *root)
{
    sqlite3_stmt *s = statement(c, SQL_ITEM_FIND);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, gw_digest_prefix(digest));
    bind_digest(s, 2, digest);
    sqlite3_bind_int64(s, 3, tenant);
    if (!scalar(s, id))
        return false;
    if (*id)
        return true;
    base_buf json;
    base_buf_init(&json, 0);
    if (item)
        gw_item_json(&json, item);
    else
        gw_root_json(&json, root);
    s = json.failed ? NULL : statement(c, SQL_ITEM_ADD);
    bool ok = s != NULL;
    if (ok) {
        sqlite3_bind_int64(s, 1, gw_digest_prefix(digest));
        bind_digest(s, 2, digest);
        sqlite3_bind_int64(s, 3, tenant);
        sqlite3_bind_int(s, 4, kind);
        sqlite3_bind_text64(s, 5, json.data, json.length, SQLITE_STATIC, SQLITE_UTF8);
        ok = execute(s);
        *id = sqlite3_last_insert_rowid(c->db);
    }
    base_buf_deinit(&json);
    return ok;
}

static bool find_node(conn *c, int64_t *id, int64_t tenant, const gw_digest *digest)
{
    sqlite3_stmt *s = statement(c, SQL_NODE_FIND);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, gw_digest_prefix(digest));
    bind_digest(s, 2, digest);
    sqlite3_bind_int64(s, 3, tenant);
    return scalar(s, id);
}

static bool add_node(conn *c, int64_t *id, int64_t tenant, const gw_digest *digest, int64_t parent,
                     int64_t item, int64_t run)
{
    sqlite3_stmt *s = statement(c, SQL_NODE_ADD);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, gw_digest_prefix(digest));
    bind_digest(s, 2, digest);
    sqlite3_bind_int64(s, 3, tenant);
    bind_id(s, 4, parent);
    sqlite3_bind_int64(s, 5, item);
    bind_id(s, 6, run);
    if (!execute(s))
        return false;
    *id = sqlite3_last_insert_rowid(c->db);
    return true;
}

/* The nodes of the request, from the deepest that is there already; then the answer's. */
static bool add_nodes(conn *c, int64_t *last, const work *w, int64_t run)
{
    const gw_commit *commit = w->commit;
    int64_t tenant = commit->root->tenant, node = 0;
    uint32_t next = commit->item_count + 1;
    while (next > 0) {
        if (!find_node(c, &node, tenant, &commit->match->chain[next - 1]))
            return false;
        if (node)
            break;
        next--;
    }
    for (; next <= commit->item_count; next++) {
        int64_t item;
        const eng_item *source = next ? &commit->items[next - 1] : NULL;
        const gw_digest *own = next ? &commit->match->own[next - 1] : &commit->match->chain[0];
        if (!find_or_add_item(c, &item, tenant, own, source ? (int)source->role : -1, source,
                              commit->root) ||
            !add_node(c, &node, tenant, &commit->match->chain[next], node, item, 0))
            return false;
    }
    if (commit->run_count == commit->lead) {
        *last = node;
        return true;
    }
    if (!find_node(c, last, tenant, &w->node))
        return false;
    int64_t item;
    return *last || (find_or_add_item(c, &item, tenant, &w->own, ENG_ROLE_ASSISTANT,
                                      &commit->answer, NULL) &&
                     add_node(c, last, tenant, &w->node, node, item, run));
}

static bool add_calls(conn *c, const gw_commit *commit, int64_t run)
{
    for (uint32_t i = 0; i < commit->answer.call_count; i++) {
        sqlite3_stmt *s = statement(c, SQL_CALL_ADD);
        if (!s)
            return false;
        const char *id = commit->answer.calls[i].id.data;
        sqlite3_bind_int64(s, 1, public_key(id));
        bind_text(s, 2, id);
        sqlite3_bind_int64(s, 3, run);
        if (!execute(s))
            return false;
    }
    return true;
}

static bool add_run(conn *c, int64_t *id, work *w)
{
    const gw_commit *commit = w->commit;
    const gw_run *run = &w->run;
    *id = 0;
    if (commit->run_count == commit->lead)
        return true;
    sqlite3_stmt *s;
    if (commit->splice) {
        s = statement(c, SQL_RUN_FIND);
        if (!s)
            return false;
        sqlite3_bind_int64(s, 1, gw_digest_prefix(&run->slot));
        bind_digest(s, 2, &run->slot);
        bind_digest(s, 3, &run->tokens_digest);
        sqlite3_bind_int64(s, 4, run->tenant);
        if (!scalar(s, id))
            return false;
        if (*id)
            return add_calls(c, commit, *id);
    }
    base_buf tokens;
    base_buf_init(&tokens, 0);
    put_numbers(&tokens, commit->run, commit->run_count);
    s = tokens.failed ? NULL : statement(c, SQL_RUN_ADD);
    bool ok = s != NULL;
    if (ok) {
        sqlite3_bind_int64(s, 1, run->tenant);
        bind_text(s, 2, run->template_id);
        if (commit->splice) {
            sqlite3_bind_int64(s, 3, gw_digest_prefix(&run->slot));
            bind_digest(s, 4, &run->slot);
        }
        bind_digest(s, 5, &run->visible);
        if (run->has_reasoning)
            bind_digest(s, 6, &run->reasoning);
        bind_digest(s, 7, &run->tokens_digest);
        bind_text(s, 8, run->turn.text);
        bind_text(s, 9, run->session.text);
        sqlite3_bind_blob(s, 10, run->sequence, sizeof(run->sequence), SQLITE_STATIC);
        sqlite3_bind_int64(s, 11, run->sequence_tokens);
        sqlite3_bind_int64(s, 12, run->token_count);
        sqlite3_bind_blob64(s, 13, tokens.data, tokens.length, SQLITE_STATIC);
        ok = execute(s);
        *id = sqlite3_last_insert_rowid(c->db);
    }
    base_buf_deinit(&tokens);
    return ok && (!commit->splice || add_calls(c, commit, *id));
}

static bool find_or_add_session(conn *c, int64_t *id, const gw_commit *commit)
{
    sqlite3_stmt *s = statement(c, SQL_SESSION_FIND);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, public_key(commit->session));
    bind_text(s, 2, commit->session);
    sqlite3_bind_int64(s, 3, commit->root->tenant);
    if (!scalar(s, id))
        return false;
    if (*id)
        return true;
    s = statement(c, SQL_SESSION_ADD);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, public_key(commit->session));
    bind_text(s, 2, commit->session);
    sqlite3_bind_int64(s, 3, commit->root->tenant);
    bind_text(s, 4, commit->label);
    bind_text(s, 5, commit->model);
    sqlite3_bind_int64(s, 6, commit->created_ms);
    if (!execute(s))
        return false;
    *id = sqlite3_last_insert_rowid(c->db);
    return true;
}

/* The parent turn, if its prompt and run are on disk and are how this prompt begins. */
static bool find_parent(conn *c, int64_t *id, uint32_t *base, const gw_commit *commit)
{
    const gw_match *match = commit->match;
    *id = 0;
    *base = 0;
    if (match->last < 0 || !match->parent.text[0])
        return true;
    sqlite3_stmt *s = statement(c, SQL_TURN_FIND);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, public_key(match->parent.text));
    bind_text(s, 2, match->parent.text);
    sqlite3_bind_int64(s, 3, commit->root->tenant);
    if (!scalar(s, id))
        return false;
    if (*id && gw_match_continues(match, commit->prompt, commit->prompt_count))
        *base = match->parent_tokens;
    return true;
}

typedef struct turn_links {
    int64_t session, parent, node, run;
    uint32_t base;
} turn_links;

static bool add_turn(gw_ledger *ledger, conn *c, const work *w, gw_retention retention,
                     const turn_links *links)
{
    const gw_commit *commit = w->commit;
    const eng_usage *usage = &commit->usage;
    bool content = retention != GW_RETAIN_USAGE;
    int64_t ttl = (int64_t)ledger->options.cached_ttl_s * 1000;
    if (!content && ttl < USAGE_TTL_MS_MIN)
        ttl = USAGE_TTL_MS_MIN;
    base_buf prompt, steps;
    base_buf_init(&prompt, 0);
    base_buf_init(&steps, 0);
    if (content) {
        put_numbers(&prompt, commit->prompt + links->base, commit->prompt_count - links->base);
        put_numbers(&steps, commit->steps, commit->step_count);
    }
    sqlite3_stmt *s = prompt.failed || steps.failed ? NULL : statement(c, SQL_TURN_ADD);
    bool ok = s != NULL;
    if (ok) {
        sqlite3_bind_int64(s, 1, commit->root->tenant);
        sqlite3_bind_int64(s, 2, public_key(commit->turn));
        bind_text(s, 3, commit->turn);
        bind_id(s, 4, links->session);
        bind_id(s, 5, links->parent);
        bind_id(s, 6, links->node);
        bind_id(s, 7, links->run);
        sqlite3_bind_int(s, 8, commit->status);
        sqlite3_bind_int(s, 9, commit->finish);
        sqlite3_bind_int(s, 10, retention);
        bind_text(s, 11, commit->dialect);
        bind_text(s, 12, commit->request);
        if (commit->response && commit->response[0]) {
            sqlite3_bind_int64(s, 13, public_key(commit->response));
            bind_text(s, 14, commit->response);
        }
        bind_text(s, 15, commit->model);
        bind_text(s, 16, commit->root->template_id);
        bind_text(s, 17, commit->fingerprint);
        bind_text(s, 18, commit->numerics);
        bind_text(s, 19, content ? commit->metadata : NULL);
        bind_text(s, 20, commit->match->reason);
        sqlite3_bind_int64(s, 21, links->base);
        if (content) {
            sqlite3_bind_blob64(s, 22, prompt.data ? prompt.data : "", prompt.length,
                                SQLITE_STATIC);
            sqlite3_bind_blob64(s, 24, steps.data ? steps.data : "", steps.length, SQLITE_STATIC);
        }
        sqlite3_bind_int64(s, 23, commit->lead);
        sqlite3_bind_int64(s, 25, (int64_t)commit->seed);
        const uint64_t columns[] = {usage->prompt_tokens,
                                    usage->cached_tokens,
                                    usage->restored_tokens,
                                    usage->output_tokens,
                                    usage->reasoning_tokens,
                                    usage->drafted,
                                    usage->accepted,
                                    usage->steps,
                                    usage->queue_ns / 1000,
                                    usage->prefill_ns / 1000,
                                    usage->ttft_ns / 1000,
                                    usage->decode_ns / 1000,
                                    (uint64_t)commit->created_ms,
                                    (uint64_t)commit->ended_ms};
        for (int i = 0; i < 14; i++)
            sqlite3_bind_int64(s, 26 + i, (int64_t)columns[i]);
        if (retention != GW_RETAIN_KEPT)
            sqlite3_bind_int64(s, 40, commit->ended_ms + ttl);
        bind_text(s, 41, retention == GW_RETAIN_KEPT ? commit->echo : NULL);
        ok = execute(s);
    }
    base_buf_deinit(&prompt);
    base_buf_deinit(&steps);
    return ok;
}

static bool store(gw_ledger *ledger, conn *c, work *w)
{
    const gw_commit *commit = w->commit;
    turn_links links = {0};
    gw_retention retention = commit->retention;
    if (retention == GW_RETAIN_CACHED && !ledger->options.cached_ttl_s)
        retention = GW_RETAIN_USAGE;
    if (commit->splice) {
        int64_t other;
        sqlite3_stmt *s = statement(c, SQL_RUN_OTHER);
        if (!s)
            return false;
        sqlite3_bind_int64(s, 1, gw_digest_prefix(&w->run.slot));
        bind_digest(s, 2, &w->run.slot);
        bind_digest(s, 3, &w->run.tokens_digest);
        if (!scalar(s, &other))
            return false;
        w->alone = !other;
    }
    if (retention == GW_RETAIN_USAGE)
        return add_turn(ledger, c, w, retention, &links);
    if (!find_or_add_session(c, &links.session, commit) ||
        !find_parent(c, &links.parent, &links.base, commit) || !add_run(c, &links.run, w) ||
        !add_nodes(c, &links.node, w, commit->splice ? links.run : 0) ||
        !add_turn(ledger, c, w, retention, &links))
        return false;
    sqlite3_stmt *s = statement(c, SQL_SESSION_USE);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, links.session);
    sqlite3_bind_int64(s, 2, sqlite3_last_insert_rowid(c->db));
    sqlite3_bind_int64(s, 3, commit->ended_ms);
    return execute(s);
}

/* One transaction for works[0, count). The error of the first statement that failed. */
static base_code transact(gw_ledger *ledger, work *works, uint32_t count, base_err *err)
{
    conn *c = ledger->writer;
    atomic_fetch_add(&ledger->transaction_count, 1);
    if (!simple(c, SQL_BEGIN))
        return database_error(c, err, "cannot begin");
    for (uint32_t i = 0; i < count; i++) {
        if (ledger->hash.failed || !store(ledger, c, &works[i])) {
            base_code code = ledger->hash.failed
                                 ? base_fail(err, BASE_NOMEM, "no memory to hash a turn")
                                 : database_error(c, err, "cannot write a turn");
            simple(c, SQL_ROLLBACK);
            return code ? code : base_fail(err, BASE_NOMEM, "no memory to write a turn");
        }
    }
    if (simple(c, SQL_COMMIT))
        return BASE_OK;
    base_code code = database_error(c, err, "cannot commit");
    simple(c, SQL_ROLLBACK);
    return code;
}

static void remember(gw_ledger *ledger, work *w)
{
    gw_commit *commit = w->commit;
    if (!commit->splice || commit->run_count == commit->lead || ledger->hash.failed)
        return;
    gw_id *ids = commit->answer.call_count ? calloc(commit->answer.call_count, sizeof(*ids)) : NULL;
    for (uint32_t i = 0; ids && i < commit->answer.call_count; i++)
        set_id(&ids[i], commit->answer.calls[i].id.data);
    w->run.calls = ids;
    w->run.call_count = ids ? commit->answer.call_count : 0;
    gw_memory_add(ledger->memory, &w->run, w->alone);
    free(ids);
}

static void write_batch(gw_ledger *ledger, gw_commit *commits)
{
    uint32_t count = 0;
    for (gw_commit *commit = commits; commit; commit = commit->next)
        prepare_work(ledger, &ledger->works[count++], commit);
    base_err err = BASE_ERR_INIT;
    base_code code = transact(ledger, ledger->works, count, &err);
    for (uint32_t i = 0; i < count; i++) {
        work *w = &ledger->works[i];
        gw_commit *commit = w->commit;
        commit->err = err;
        if (code && count > 1) {
            commit->err = (base_err)BASE_ERR_INIT;
            commit->stored = transact(ledger, w, 1, &commit->err) == BASE_OK;
        } else {
            commit->stored = !code;
        }
        /* What is on disk of a turn that keeps nothing is its count; nobody may take that for a
         * stored turn. */
        if (commit->retention == GW_RETAIN_USAGE ||
            (commit->retention == GW_RETAIN_CACHED && !ledger->options.cached_ttl_s))
            commit->stored = false;
        atomic_fetch_add(&ledger->commit_count, 1);
        if (commit->err.code)
            atomic_fetch_add(&ledger->failure_count, 1);
        remember(ledger, w);
    }
    ledger->hash.failed = false;
    for (gw_commit *commit = commits, *next; commit; commit = next) {
        next = commit->next; /* `done` gives the memory back */
        commit->done(commit);
    }
}

/* Called by SQLite on the writer after a commit. */
static int on_wal(void *ctx, sqlite3 *db, const char *name, int pages)
{
    (void)db;
    (void)name;
    gw_ledger *ledger = ctx;
    pthread_mutex_lock(&ledger->keeper_mutex);
    bool first = !ledger->written_ns;
    ledger->wal_pages = (uint32_t)pages;
    ledger->written_ns = base_now_ns();
    if (first || pages >= CHECKPOINT_PAGES)
        pthread_cond_signal(&ledger->keeper_wake);
    pthread_mutex_unlock(&ledger->keeper_mutex);
    return SQLITE_OK;
}

static void *writer_main(void *ctx)
{
    gw_ledger *ledger = ctx;
    base_thread_enter(BASE_THREAD_WRITER, "gw-writer");
    pthread_mutex_lock(&ledger->mutex);
    for (;;) {
        while (!ledger->commits && !ledger->tasks && !ledger->closing)
            pthread_cond_wait(&ledger->wake, &ledger->mutex);
        if (!ledger->commits && !ledger->tasks)
            break;
        gw_commit *batch = ledger->commits, **end = &ledger->commits;
        uint32_t count = 0;
        for (; *end && count < BATCH_MAX; count++)
            end = &(*end)->next;
        gw_commit *rest = *end;
        *end = NULL;
        ledger->commits = rest;
        if (!rest)
            ledger->commits_last = &ledger->commits;
        ledger->queued -= count;
        task *t = ledger->tasks;
        if (t) {
            ledger->tasks = t->next;
            if (!t->next)
                ledger->tasks_last = &ledger->tasks;
        }
        pthread_mutex_unlock(&ledger->mutex);
        if (count)
            write_batch(ledger, batch);
        if (t)
            t->code = t->run(ledger, ledger->writer, t->ctx, &t->err);
        pthread_mutex_lock(&ledger->mutex);
        if (t) {
            t->done = true;
            pthread_cond_broadcast(&ledger->task_done);
        }
    }
    pthread_mutex_unlock(&ledger->mutex);
    return NULL;
}

bool gw_ledger_commit(gw_ledger *ledger, gw_commit *commit)
{
    commit->next = NULL;
    pthread_mutex_lock(&ledger->mutex);
    bool taken = !ledger->closing && ledger->queued < ledger->options.queue_max;
    if (taken) {
        *ledger->commits_last = commit;
        ledger->commits_last = &commit->next;
        ledger->queued++;
        pthread_cond_signal(&ledger->wake);
    }
    pthread_mutex_unlock(&ledger->mutex);
    return taken;
}

/* Runs a task on the writer and waits for it. */
static base_code on_writer(gw_ledger *ledger,
                           base_code (*run)(gw_ledger *ledger, conn *c, void *ctx, base_err *err),
                           void *ctx, base_err *err)
{
    task t = {.run = run, .ctx = ctx, .err = BASE_ERR_INIT};
    pthread_mutex_lock(&ledger->mutex);
    if (ledger->closing) {
        pthread_mutex_unlock(&ledger->mutex);
        return base_fail(err, BASE_CLOSED, "the ledger is closing");
    }
    *ledger->tasks_last = &t;
    ledger->tasks_last = &t.next;
    pthread_cond_signal(&ledger->wake);
    while (!t.done)
        pthread_cond_wait(&ledger->task_done, &ledger->mutex);
    pthread_mutex_unlock(&ledger->mutex);
    if (t.code && err && !err->code)
        *err = t.err;
    return t.code;
}

/* ---- the keeper: the log and what expired ---- */

static void checkpoint(conn *c, int mode)
{
    int log = 0, copied = 0;
    int code = sqlite3_wal_checkpoint_v2(c->db, NULL, mode, &log, &copied);
    if (code != SQLITE_OK && code != SQLITE_BUSY && code != SQLITE_LOCKED)
        base_log(BASE_LOG_WARN, "checkpoint_failed reason=\"%s\"", sqlite3_errmsg(c->db));
}

static void wait_until(gw_ledger *ledger, uint64_t ns)
{
    struct timespec at = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    pthread_cond_timedwait(&ledger->keeper_wake, &ledger->keeper_mutex, &at);
}

static void *keeper_main(void *ctx)
{
    gw_ledger *ledger = ctx;
    base_thread_enter(BASE_THREAD_OTHER, "gw-keeper");
    conn *c = NULL;
    base_err err = BASE_ERR_INIT;
    if (conn_open(&c, ledger->file, ledger->options.busy_ms, false, &err))
        base_log(BASE_LOG_ERROR, "keeper_failed reason=\"%s\"", err.text);
    uint64_t swept = 0;
    pthread_mutex_lock(&ledger->keeper_mutex);
    while (c && !ledger->keeper_stop) {
        uint64_t now = base_now_ns();
        uint32_t pages = ledger->wal_pages;
        if (now >= swept + (uint64_t)SWEEP_MS * 1000000) {
            swept = now;
            pthread_mutex_unlock(&ledger->keeper_mutex);
            gw_ledger_sweep(ledger, base_wall_ms(), NULL);
            pthread_mutex_lock(&ledger->keeper_mutex);
            continue;
        }
        if (ledger->written_ns && now >= ledger->written_ns + 1000000000) {
            ledger->written_ns = 0;
            ledger->wal_pages = 0;
            pthread_mutex_unlock(&ledger->keeper_mutex);
            checkpoint(c, SQLITE_CHECKPOINT_TRUNCATE);
            pthread_mutex_lock(&ledger->keeper_mutex);
            continue;
        }
        if (pages >= CHECKPOINT_PAGES) {
            ledger->wal_pages = 0;
            pthread_mutex_unlock(&ledger->keeper_mutex);
            checkpoint(c, pages >= RESTART_PAGES ? SQLITE_CHECKPOINT_RESTART
                                                 : SQLITE_CHECKPOINT_PASSIVE);
            pthread_mutex_lock(&ledger->keeper_mutex);
            continue;
        }
        uint64_t next = swept + (uint64_t)SWEEP_MS * 1000000;
        if (ledger->written_ns && ledger->written_ns + 1000000000 < next)
            next = ledger->written_ns + 1000000000;
        wait_until(ledger, next);
    }
    pthread_mutex_unlock(&ledger->keeper_mutex);
    conn_close(c);
    return NULL;
}

/* ---- sweeping ---- */

static bool used(conn *c, sql_id id, int64_t row, bool *out)
{
    int64_t found;
    sqlite3_stmt *s = statement(c, id);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, row);
    if (!scalar(s, &found))
        return false;
    *out = found != 0;
    return true;
}

static bool delete_row(conn *c, sql_id id, int64_t row)
{
    sqlite3_stmt *s = statement(c, id);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, row);
    return execute(s);
}

static bool release_run(gw_ledger *ledger, conn *c, int64_t run)
{
    bool needed;
    if (!run)
        return true;
    if (!used(c, SQL_RUN_USED, run, &needed))
        return false;
    if (needed)
        return true;
    sqlite3_stmt *s = statement(c, SQL_RUN_SLOT);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, run);
    gw_digest slot;
    bool slotted =
        sqlite3_step(s) == SQLITE_ROW && sqlite3_column_bytes(s, 0) == (int)sizeof(slot.bytes);
    if (slotted)
        memcpy(slot.bytes, sqlite3_column_blob(s, 0), sizeof(slot.bytes));
    sqlite3_reset(s);
    if (!delete_row(c, SQL_CALLS_DELETE, run) || !delete_row(c, SQL_RUN_DELETE, run))
        return false;
    if (slotted)
        gw_memory_forget(ledger->memory, &slot);
    return true;
}

/* Deletes a node that nobody needs, then its parents as far as that is true of them. */
static bool release_nodes(gw_ledger *ledger, conn *c, int64_t node)
{
    while (node) {
        bool needed;
        if (!used(c, SQL_NODE_USED, node, &needed))
            return false;
        if (needed)
            return true;
        sqlite3_stmt *s = statement(c, SQL_NODE_READ);
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
        if (!delete_row(c, SQL_NODE_DELETE, node) || !used(c, SQL_ITEM_USED, item, &needed) ||
            (!needed && !delete_row(c, SQL_ITEM_DELETE, item)) || !release_run(ledger, c, run))
            return false;
        node = parent;
    }
    return true;
}

/* A turn whose children still spell their prompts with its tokens stays as long as they do. */
static bool sweep_turn(gw_ledger *ledger, conn *c, int64_t turn, int64_t node, int64_t run,
                       int64_t now_ms)
{
    sqlite3_stmt *s = statement(c, SQL_SWEEP_CHILDREN);
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
        s = statement(c, SQL_SWEEP_POSTPONE);
        if (!s)
            return false;
        sqlite3_bind_int64(s, 1, turn);
        /* Kept children: asked again in an hour, since they may be deleted. */
        sqlite3_bind_int64(s, 2,
                           for_good ? now_ms + 3600000 : (until > now_ms ? until : now_ms) + 1000);
        return execute(s);
    }
    return delete_row(c, SQL_TURN_DELETE, turn) && release_nodes(ledger, c, node) &&
           release_run(ledger, c, run);
}

typedef struct sweep {
    int64_t now_ms;
    uint32_t count;
} sweep;

static base_code run_sweep(gw_ledger *ledger, conn *c, void *ctx, base_err *err)
{
    sweep *job = ctx;
    int64_t rows[SWEEP_TURNS][3];
    job->count = 0;
    if (!simple(c, SQL_BEGIN))
        return database_error(c, err, "cannot sweep");
    sqlite3_stmt *s = statement(c, SQL_SWEEP_LIST);
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
        s = statement(c, SQL_SESSION_SWEEP);
        ok = s != NULL;
        if (ok) {
            sqlite3_bind_int64(s, 1, job->now_ms - 1000);
            ok = execute(s);
        }
    }
    if (ok && simple(c, SQL_COMMIT))
        return BASE_OK;
    base_code code = database_error(c, err, "cannot sweep");
    simple(c, SQL_ROLLBACK);
    return code;
}

base_code gw_ledger_sweep(gw_ledger *ledger, int64_t now_ms, base_err *err)
{
    sweep job = {.now_ms = now_ms};
    base_code code;
    /* In steps, so that commits get between. */
    do
        code = on_writer(ledger, run_sweep, &job, err);
    while (!code && job.count == SWEEP_TURNS);
    return code;
}

/* ---- look-ups ---- */

static conn *reader_take(gw_ledger *ledger, base_err *err)
{
    pthread_mutex_lock(&ledger->reader_mutex);
    while (!ledger->readers && ledger->reader_count >= READERS_MAX)
        pthread_cond_wait(&ledger->reader_free, &ledger->reader_mutex);
    conn *c = ledger->readers;
    if (c)
        ledger->readers = c->next;
    else
        ledger->reader_count++;
    pthread_mutex_unlock(&ledger->reader_mutex);
    if (c || !conn_open(&c, ledger->file, ledger->options.busy_ms, false, err))
        return c;
    pthread_mutex_lock(&ledger->reader_mutex);
    ledger->reader_count--;
    pthread_cond_signal(&ledger->reader_free);
    pthread_mutex_unlock(&ledger->reader_mutex);
    return NULL;
}

static void reader_give(gw_ledger *ledger, conn *c)
{
    pthread_mutex_lock(&ledger->reader_mutex);
    c->next = ledger->readers;
    ledger->readers = c;
    pthread_cond_signal(&ledger->reader_free);
    pthread_mutex_unlock(&ledger->reader_mutex);
}

static bool column_digest(sqlite3_stmt *s, int column, gw_digest *out)
{
    if (sqlite3_column_bytes(s, column) != (int)sizeof(out->bytes))
        return false;
    memcpy(out->bytes, sqlite3_column_blob(s, column), sizeof(out->bytes));
    return true;
}

/* A row of RUN_COLUMNS; NULL if it is damaged (dropped, logged) or memory is used up. */
static gw_run *column_run(sqlite3_stmt *s, base_arena *arena)
{
    gw_run *run = base_arena_calloc(arena, 1, sizeof(*run));
    if (!run)
        return NULL;
    run->tenant = sqlite3_column_int64(s, 1);
    const char *template_id = (const char *)sqlite3_column_text(s, 2);
    snprintf(run->template_id, sizeof(run->template_id), "%s", template_id ? template_id : "");
    run->has_reasoning = sqlite3_column_type(s, 5) != SQLITE_NULL;
    set_id(&run->turn, (const char *)sqlite3_column_text(s, 7));
    set_id(&run->session, (const char *)sqlite3_column_text(s, 8));
    bool good = column_digest(s, 3, &run->slot) && column_digest(s, 4, &run->visible) &&
                (!run->has_reasoning || column_digest(s, 5, &run->reasoning)) &&
                column_digest(s, 6, &run->tokens_digest) &&
                sqlite3_column_bytes(s, 9) == (int)sizeof(run->sequence);
    if (good) {
        memcpy(run->sequence, sqlite3_column_blob(s, 9), sizeof(run->sequence));
        run->sequence_tokens = (uint32_t)sqlite3_column_int64(s, 10);
        void *tokens;
        good = column_numbers(s, 12, &tokens, &run->token_count, arena) &&
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

/* Everything one match needs. */
typedef struct lookup {
    gw_ledger *ledger;
    const gw_root *root;
    base_arena *arena;
    conn *reader; /* taken at the first miss in memory */
    bool broken;  /* the database failed: what is not in memory is unknown */
    gw_hash hash;
} lookup;

static conn *reader_of(lookup *l)
{
    if (l->reader || l->broken)
        return l->reader;
    base_err err = BASE_ERR_INIT;
    l->reader = reader_take(l->ledger, &err);
    if (!l->reader) {
        l->broken = true;
        base_log(BASE_LOG_ERROR, "lookup_failed reason=\"%s\"", err.text);
    }
    return l->reader;
}

static void lookup_failed(lookup *l)
{
    l->broken = true;
    base_log(BASE_LOG_ERROR, "lookup_failed reason=\"%s\"", sqlite3_errmsg(l->reader->db));
}

/* All runs of a slot on disk, at most GW_SLOT_RUNS_MAX + 1. */
static uint32_t read_slot(lookup *l, gw_run **runs, const gw_digest *slot)
{
    sqlite3_stmt *s = statement(l->reader, SQL_SLOT);
    if (!s) {
        lookup_failed(l);
        return 0;
    }
    sqlite3_bind_int64(s, 1, gw_digest_prefix(slot));
    bind_digest(s, 2, slot);
    sqlite3_bind_int64(s, 3, l->root->tenant);
    sqlite3_bind_int(s, 4, GW_SLOT_RUNS_MAX + 1);
    uint32_t count = 0;
    int code;
    while (count <= GW_SLOT_RUNS_MAX && (code = sqlite3_step(s)) == SQLITE_ROW) {
        gw_run *run = column_run(s, l->arena);
        if (run)
            runs[count++] = run;
    }
    bool failed = count <= GW_SLOT_RUNS_MAX && code != SQLITE_DONE;
    sqlite3_reset(s);
    if (failed)
        lookup_failed(l);
    return count;
}

static gw_found choose(gw_run **out, gw_run *const *runs, uint32_t count,
                       const gw_digest *reasoning)
{
    *out = NULL;
    for (uint32_t i = 0; i < count; i++) {
        if (reasoning) {
            if (!*out && runs[i]->has_reasoning && gw_digest_equal(&runs[i]->reasoning, reasoning))
                *out = runs[i];
        } else if (!*out) {
            *out = runs[i];
        } else if ((*out)->has_reasoning != runs[i]->has_reasoning ||
                   !gw_digest_equal(&(*out)->reasoning, &runs[i]->reasoning)) {
            *out = NULL;
            return GW_FOUND_AMBIGUOUS;
        }
    }
    return *out ? GW_FOUND_RUN : GW_FOUND_NONE;
}

static gw_found find_slot(lookup *l, gw_run **out, const gw_digest *slot,
                          const gw_digest *reasoning)
{
    gw_memory *memory = l->ledger->memory;
    uint64_t generation;
    gw_found found = gw_memory_slot(memory, out, &generation, slot, reasoning, l->arena);
    if (found != GW_FOUND_UNKNOWN || !reader_of(l))
        return found == GW_FOUND_UNKNOWN ? GW_FOUND_NONE : found;
    gw_run *runs[GW_SLOT_RUNS_MAX + 1];
    uint32_t count = read_slot(l, runs, slot);
    if (l->broken)
        return GW_FOUND_NONE;
    gw_memory_fill(memory, slot, runs, count, generation);
    /* Memory may know runs that never went to disk, so it is asked again before the rows alone
     * decide. */
    found = gw_memory_slot(memory, out, &generation, slot, reasoning, l->arena);
    return found == GW_FOUND_UNKNOWN ? choose(out, runs, count, reasoning) : found;
}

/* "call_" and 32 hex digits: ours, as far as the form goes. */
static bool looks_minted(eng_text id)
{
    if (id.length != 5 + 32 || memcmp(id.data, "call_", 5) != 0)
        return false;
    for (size_t i = 5; i < id.length; i++)
        if (!((id.data[i] >= '0' && id.data[i] <= '9') || (id.data[i] >= 'a' && id.data[i] <= 'f')))
            return false;
    return true;
}

static gw_run *find_call(lookup *l, const eng_item *item, const gw_digest *visible,
                         const gw_digest *reasoning)
{
    for (uint32_t i = 0; i < item->call_count; i++) {
        if (!looks_minted(item->calls[i].id))
            continue;
        char id[GW_ID_MAX];
        memcpy(id, item->calls[i].id.data, 37);
        id[37] = '\0';
        gw_run *run;
        if (gw_memory_call(l->ledger->memory, &run, id, l->arena) == GW_FOUND_NONE &&
            reader_of(l)) {
            sqlite3_stmt *s = statement(l->reader, SQL_CALL);
            if (!s) {
                lookup_failed(l);
                return NULL;
            }
            sqlite3_bind_int64(s, 1, public_key(id));
            bind_text(s, 2, id);
            sqlite3_bind_int64(s, 3, l->root->tenant);
            if (sqlite3_step(s) == SQLITE_ROW)
                run = column_run(s, l->arena);
            sqlite3_reset(s);
        }
        if (run && run->tenant == l->root->tenant &&
            strcmp(run->template_id, l->root->template_id) == 0 &&
            gw_digest_equal(&run->visible, visible) &&
            (!reasoning || (run->has_reasoning && gw_digest_equal(&run->reasoning, reasoning))))
            return run;
    }
    return NULL;
}

static void note_reason(gw_match *match, const char *reason)
{
    if (!match->reason)
        match->reason = reason;
}

/* The assistant item at `index`; sets its tokens and the node after it. */
static void match_item(lookup *l, gw_match *match, eng_item *item, uint32_t index)
{
    const gw_digest *parent = &match->chain[index];
    gw_digest visible, slot, reasoning, *sent = NULL;
    gw_item_visible(&l->hash, &visible, item);
    if (gw_item_reasoning(&l->hash, &reasoning, item->reasoning))
        sent = &reasoning;
    gw_item_own(&l->hash, &match->own[index], &visible, item);
    gw_slot(&l->hash, &slot, parent, &visible);
    /* A call id that we minted names one run and comes first; the slot decides where there is none.
     */
    gw_run *run = find_call(l, item, &visible, sent);
    gw_found found = run ? GW_FOUND_RUN : find_slot(l, &run, &slot, sent);
    if (found != GW_FOUND_RUN || strcmp(run->template_id, l->root->template_id) != 0) {
        match->rendered++;
        note_reason(match, found == GW_FOUND_AMBIGUOUS ? "ambiguous"
                           : match->spliced            ? "edited history"
                                                       : "unknown history");
        gw_node_item(&l->hash, &match->chain[index + 1], parent, &match->own[index]);
        return;
    }
    item->tokens = run->tokens;
    item->token_count = run->token_count;
    match->spliced++;
    match->restored += !sent && run->has_reasoning;
    gw_node_run(&l->hash, &match->chain[index + 1], parent, &run->tokens_digest);
    if (!gw_digest_equal(&run->slot, &slot)) {
        note_reason(match, "prefix changed");
    } else {
        match->last = (int32_t)index;
        match->parent = run->turn;
        memcpy(match->parent_sequence, run->sequence, sizeof(run->sequence));
        match->parent_tokens = run->sequence_tokens;
    }
    match->session = run->session;
}

base_code gw_ledger_match(gw_ledger *ledger, gw_match *out, const gw_root *root, eng_item *items,
                          uint32_t item_count, base_arena *arena, base_err *err)
{
    *out = (gw_match){.last = -1};
    out->chain = base_arena_calloc(arena, (size_t)item_count + 1, sizeof(*out->chain));
    out->own = base_arena_calloc(arena, base_max(item_count, 1), sizeof(*out->own));
    lookup l = {.ledger = ledger, .root = root, .arena = arena, .hash = gw_hash_open()};
    if (out->chain && out->own) {
        gw_item_root(&l.hash, &out->chain[0], root);
        for (uint32_t i = 0; i < item_count; i++) {
            if (items[i].role == ENG_ROLE_ASSISTANT) {
                match_item(&l, out, &items[i], i);
                continue;
            }
            gw_item_visible(&l.hash, &out->own[i], &items[i]);
            gw_node_item(&l.hash, &out->chain[i + 1], &out->chain[i], &out->own[i]);
        }
    }
    bool failed = l.hash.failed || base_arena_failed(arena);
    gw_hash_close(&l.hash);
    if (l.reader)
        reader_give(ledger, l.reader);
    return failed ? base_fail(err, BASE_NOMEM, "no memory to look the conversation up") : BASE_OK;
}

/* ---- reading turns ---- */

/* One turn's own part of a prompt, on the way up. */
typedef struct piece {
    struct piece *below;
    int32_t *prompt, *run;
    uint32_t prompt_count, run_count, base;
} piece;

static base_code read_tokens(conn *c, gw_turn_row *out, int64_t row, base_arena *arena,
                             base_err *err)
{
    piece *top = NULL;
    size_t total = 0;
    uint32_t depth = 0;
    for (int64_t at = row; at;) {
        sqlite3_stmt *s = statement(c, SQL_TURN_UP);
        piece *p = base_arena_calloc(arena, 1, sizeof(*p));
        if (!p)
            return base_fail(err, BASE_NOMEM, "no memory for a turn");
        if (!s)
            return database_error(c, err, "cannot read a turn");
        sqlite3_bind_int64(s, 1, at);
        int code = sqlite3_step(s);
        bool good = code == SQLITE_ROW && ++depth < CHAIN_MAX;
        int64_t parent = 0;
        if (good) {
            void *prompt, *run;
            parent = sqlite3_column_int64(s, 0);
            p->base = (uint32_t)sqlite3_column_int64(s, 1);
            good = column_numbers(s, 2, &prompt, &p->prompt_count, arena) &&
                   column_numbers(s, 3, &run, &p->run_count, arena);
            p->prompt = good ? prompt : NULL;
            p->run = good ? run : NULL;
            /* The run begins with tokens that the prompt ends with. */
            uint32_t lead =
                (uint32_t)base_min((size_t)sqlite3_column_int64(s, 4), good ? p->run_count : 0);
            p->run += lead;
            p->run_count -= good ? lead : p->run_count;
        }
        sqlite3_reset(s);
        if (!good)
            return base_fail(err, BASE_FORMAT, "the tokens of turn row %lld are damaged",
                             (long long)at);
        p->below = top;
        top = p;
        total += (size_t)p->prompt_count + p->run_count;
        at = p->base ? parent : 0;
    }
    out->prompt = base_arena_alloc(arena, base_max(total * sizeof(*out->prompt), 1));
    if (!out->prompt)
        return base_fail(err, BASE_NOMEM, "no memory for a turn");
    for (piece *p = top; p; p = p->below) {
        if (p->base != out->prompt_count)
            return base_fail(err, BASE_FORMAT,
                             "the tokens of turn row %lld do not follow their parent's",
                             (long long)row);
        memcpy(out->prompt + out->prompt_count, p->prompt, p->prompt_count * sizeof(*p->prompt));
        out->prompt_count += p->prompt_count;
        if (!p->below) {
            out->run = p->run;
            out->run_count = p->run_count;
            break;
        }
        memcpy(out->prompt + out->prompt_count, p->run, p->run_count * sizeof(*p->run));
        out->prompt_count += p->run_count;
    }
    return BASE_OK;
}

static base_code read_turn(conn *c, gw_turn_row *out, int64_t tenant, const char *turn,
                           base_arena *arena, base_err *err)
{
    sqlite3_stmt *s = statement(c, SQL_TURN_READ);
    if (!s)
        return database_error(c, err, "cannot read a turn");
    sqlite3_bind_int64(s, 1, public_key(turn));
    bind_text(s, 2, turn);
    sqlite3_bind_int64(s, 3, tenant);
    int code = sqlite3_step(s);
    if (code != SQLITE_ROW) {
        sqlite3_reset(s);
        return code == SQLITE_DONE ? base_fail(err, BASE_NOT_FOUND, "there is no such turn")
                                   : database_error(c, err, "cannot read a turn");
    }
    int64_t row = sqlite3_column_int64(s, 0), node = sqlite3_column_int64(s, 22);
    set_id(&out->turn, (const char *)sqlite3_column_text(s, 1));
    set_id(&out->session, (const char *)sqlite3_column_text(s, 2));
    set_id(&out->parent, (const char *)sqlite3_column_text(s, 3));
    out->status = (gw_turn_status)sqlite3_column_int(s, 4);
    out->finish = (eng_finish)sqlite3_column_int(s, 5);
    out->retention = (gw_retention)sqlite3_column_int(s, 6);
    void *steps = NULL;
    bool good = column_numbers(s, 7, &steps, &out->step_count, arena);
    out->steps = steps;
    out->seed = (uint64_t)sqlite3_column_int64(s, 8);
    uint32_t *counts[] = {&out->usage.prompt_tokens,    &out->usage.cached_tokens,
                          &out->usage.restored_tokens,  &out->usage.output_tokens,
                          &out->usage.reasoning_tokens, &out->usage.drafted,
                          &out->usage.accepted,         &out->usage.steps};
    for (int i = 0; i < 8; i++)
        *counts[i] = (uint32_t)sqlite3_column_int64(s, 9 + i);
    out->usage.queue_ns = (uint64_t)sqlite3_column_int64(s, 17) * 1000;
    out->usage.prefill_ns = (uint64_t)sqlite3_column_int64(s, 18) * 1000;
    out->usage.ttft_ns = (uint64_t)sqlite3_column_int64(s, 19) * 1000;
    out->usage.decode_ns = (uint64_t)sqlite3_column_int64(s, 20) * 1000;
    out->created_ms = sqlite3_column_int64(s, 21);
    out->ended_ms = sqlite3_column_int64(s, 23);
    if (sqlite3_column_type(s, 24) == SQLITE_TEXT)
        out->echo =
            base_arena_copy(arena, sqlite3_column_text(s, 24), (size_t)sqlite3_column_bytes(s, 24));
    sqlite3_reset(s);
    if (!good)
        return base_fail(err, BASE_FORMAT, "the steps of turn row %lld are damaged",
                         (long long)row);
    if (out->retention == GW_RETAIN_USAGE)
        return BASE_OK;
    if (node && out->usage.output_tokens) {
        s = statement(c, SQL_ANSWER);
        if (!s)
            return database_error(c, err, "cannot read an answer");
        sqlite3_bind_int64(s, 1, node);
        if (sqlite3_step(s) == SQLITE_ROW)
            out->answer = base_arena_copy(arena, sqlite3_column_text(s, 0),
                                          (size_t)sqlite3_column_bytes(s, 0));
        sqlite3_reset(s);
    }
    return read_tokens(c, out, row, arena, err);
}

base_code gw_ledger_turn(gw_ledger *ledger, gw_turn_row *out, int64_t tenant, const char *turn,
                         base_arena *arena, base_err *err)
{
    memset(out, 0, sizeof(*out));
    conn *c = reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = read_turn(c, out, tenant, turn, arena, err);
    reader_give(ledger, c);
    return code;
}

static base_code read_items(conn *c, char ***out, uint32_t *count, int64_t node, base_arena *arena,
                            base_err *err)
{
    char **list = NULL;
    uint32_t capacity = 0;
    for (int64_t at = node; at;) {
        sqlite3_stmt *s = statement(c, SQL_ITEM_UP);
        if (!s)
            return database_error(c, err, "cannot read items");
        sqlite3_bind_int64(s, 1, at);
        if (sqlite3_step(s) != SQLITE_ROW || *count >= CHAIN_MAX) {
            sqlite3_reset(s);
            return base_fail(err, BASE_FORMAT, "the items of node row %lld are damaged",
                             (long long)node);
        }
        at = sqlite3_column_int64(s, 0);
        char *data = NULL;
        bool item = sqlite3_column_int(s, 1) >= 0; /* the root is none */
        if (item)
            data = base_arena_copy(arena, sqlite3_column_text(s, 2),
                                   (size_t)sqlite3_column_bytes(s, 2));
        sqlite3_reset(s);
        if (item && *count == capacity) {
            uint32_t wanted = capacity ? capacity * 2 : 64;
            char **more = base_arena_alloc(arena, wanted * sizeof(*more));
            if (more && *count)
                memcpy(more, list, *count * sizeof(*more));
            list = more;
            capacity = wanted;
        }
        if (item && (!list || !data))
            return base_fail(err, BASE_NOMEM, "no memory for the items of a turn");
        if (item)
            list[(*count)++] = data;
    }
    for (uint32_t i = 0; i < *count / 2; i++) {
        char *data = list[i];
        list[i] = list[*count - 1 - i];
        list[*count - 1 - i] = data;
    }
    *out = list;
    return BASE_OK;
}

base_code gw_ledger_items(gw_ledger *ledger, char ***out, uint32_t *count, int64_t tenant,
                          const char *turn, base_arena *arena, base_err *err)
{
    *out = NULL;
    *count = 0;
    conn *c = reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    int64_t node = 0;
    sqlite3_stmt *s = statement(c, SQL_TURN_NODE);
    if (s) {
        sqlite3_bind_int64(s, 1, public_key(turn));
        bind_text(s, 2, turn);
        sqlite3_bind_int64(s, 3, tenant);
    }
    base_code code = !scalar(s, &node) ? database_error(c, err, "cannot read a turn")
                     : !node           ? base_fail(err, BASE_NOT_FOUND, "there is no such turn")
                                       : read_items(c, out, count, node, arena, err);
    reader_give(ledger, c);
    return code;
}

typedef struct forget {
    int64_t tenant;
    const char *turn;
} forget;

static base_code run_forget(gw_ledger *ledger, conn *c, void *ctx, base_err *err)
{
    (void)ledger;
    const forget *f = ctx;
    sqlite3_stmt *s = statement(c, SQL_TURN_FORGET);
    if (!s)
        return database_error(c, err, "cannot forget a turn");
    sqlite3_bind_int64(s, 1, public_key(f->turn));
    bind_text(s, 2, f->turn);
    sqlite3_bind_int64(s, 3, f->tenant);
    sqlite3_bind_int64(s, 4, base_wall_ms());
    if (!execute(s))
        return database_error(c, err, "cannot forget a turn");
    return sqlite3_changes(c->db) ? BASE_OK
                                  : base_fail(err, BASE_NOT_FOUND, "there is no such turn");
}

base_code gw_ledger_forget(gw_ledger *ledger, int64_t tenant, const char *turn, base_err *err)
{
    forget f = {tenant, turn};
    return on_writer(ledger, run_forget, &f, err);
}

/* ---- tenants and keys ---- */

base_code gw_ledger_tenants(gw_ledger *ledger, void (*row)(void *ctx, const gw_tenant_row *row),
                            void *ctx, base_err *err)
{
    conn *c = reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    sqlite3_stmt *s = statement(c, SQL_TENANTS);
    int code = SQLITE_ERROR;
    while (s && (code = sqlite3_step(s)) == SQLITE_ROW)
        row(ctx, &(gw_tenant_row){.id = sqlite3_column_int64(s, 0),
                                  .name = (const char *)sqlite3_column_text(s, 1),
                                  .salt = (uint64_t)sqlite3_column_int64(s, 2)});
    sqlite3_reset(s);
    base_code result =
        code == SQLITE_DONE ? BASE_OK : database_error(c, err, "cannot read tenants");
    reader_give(ledger, c);
    return result;
}

base_code gw_ledger_keys(gw_ledger *ledger, void (*row)(void *ctx, const gw_key_row *row),
                         void *ctx, base_err *err)
{
    conn *c = reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    sqlite3_stmt *s = statement(c, SQL_KEYS);
    int code = SQLITE_ERROR;
    while (s && (code = sqlite3_step(s)) == SQLITE_ROW) {
        gw_key_row key = {.id = sqlite3_column_int64(s, 0),
                          .tenant = sqlite3_column_int64(s, 1),
                          .scopes = (uint32_t)sqlite3_column_int64(s, 3),
                          .label = (const char *)sqlite3_column_text(s, 4),
                          .created_ms = sqlite3_column_int64(s, 5)};
        if (sqlite3_column_bytes(s, 2) != (int)sizeof(key.hash))
            continue; /* no key has this hash */
        memcpy(key.hash, sqlite3_column_blob(s, 2), sizeof(key.hash));
        row(ctx, &key);
    }
    sqlite3_reset(s);
    base_code result = code == SQLITE_DONE ? BASE_OK : database_error(c, err, "cannot read keys");
    reader_give(ledger, c);
    return result;
}

typedef struct tenant_put {
    const char *name;
    int64_t id;
    uint64_t salt;
} tenant_put;

static base_code run_tenant_put(gw_ledger *ledger, conn *c, void *ctx, base_err *err)
{
    (void)ledger;
    tenant_put *put = ctx;
    sqlite3_stmt *s = statement(c, SQL_TENANT_FIND);
    if (!s)
        return database_error(c, err, "cannot read a tenant");
    bind_text(s, 1, put->name);
    int code = sqlite3_step(s);
    if (code == SQLITE_ROW) {
        put->id = sqlite3_column_int64(s, 0);
        put->salt = (uint64_t)sqlite3_column_int64(s, 1);
    }
    sqlite3_reset(s);
    if (code == SQLITE_ROW)
        return BASE_OK;
    if (code != SQLITE_DONE ||
        getrandom(&put->salt, sizeof(put->salt), 0) != (ssize_t)sizeof(put->salt))
        return database_error(c, err, "cannot make a tenant");
    s = statement(c, SQL_TENANT_ADD);
    if (!s)
        return database_error(c, err, "cannot make a tenant");
    bind_text(s, 1, put->name);
    sqlite3_bind_int64(s, 2, (int64_t)put->salt);
    sqlite3_bind_int64(s, 3, base_wall_ms());
    if (!execute(s))
        return database_error(c, err, "cannot make a tenant");
    put->id = sqlite3_last_insert_rowid(c->db);
    return BASE_OK;
}

base_code gw_ledger_tenant_put(gw_ledger *ledger, int64_t *id, uint64_t *salt, const char *name,
                               base_err *err)
{
    tenant_put put = {.name = name};
    base_code code = on_writer(ledger, run_tenant_put, &put, err);
    *id = put.id;
    *salt = put.salt;
    return code;
}

typedef struct key_put {
    int64_t id, tenant;
    const uint8_t *hash;
    const char *label;
    uint32_t scopes;
} key_put;

static base_code run_key_put(gw_ledger *ledger, conn *c, void *ctx, base_err *err)
{
    (void)ledger;
    key_put *put = ctx;
    int64_t found;
    sqlite3_stmt *s = statement(c, SQL_KEY_FIND);
    if (s)
        sqlite3_bind_blob(s, 1, put->hash, 32, SQLITE_STATIC);
    if (!scalar(s, &found))
        return database_error(c, err, "cannot read keys");
    if (found)
        return base_fail(err, BASE_CONFLICT, "this key exists already, or did and was revoked");
    s = statement(c, SQL_KEY_ADD);
    if (!s)
        return database_error(c, err, "cannot add a key");
    sqlite3_bind_int64(s, 1, put->tenant);
    sqlite3_bind_blob(s, 2, put->hash, 32, SQLITE_STATIC);
    sqlite3_bind_int64(s, 3, put->scopes);
    bind_text(s, 4, put->label);
    sqlite3_bind_int64(s, 5, base_wall_ms());
    if (!execute(s))
        return database_error(c, err, "cannot add a key");
    put->id = sqlite3_last_insert_rowid(c->db);
    return BASE_OK;
}

base_code gw_ledger_key_put(gw_ledger *ledger, int64_t *id, int64_t tenant, const uint8_t hash[32],
                            uint32_t scopes, const char *label, base_err *err)
{
    key_put put = {.tenant = tenant, .hash = hash, .scopes = scopes, .label = label};
    base_code code = on_writer(ledger, run_key_put, &put, err);
    *id = put.id;
    return code;
}

static base_code run_key_revoke(gw_ledger *ledger, conn *c, void *ctx, base_err *err)
{
    (void)ledger;
    sqlite3_stmt *s = statement(c, SQL_KEY_REVOKE);
    if (!s)
        return database_error(c, err, "cannot revoke a key");
    sqlite3_bind_int64(s, 1, *(int64_t *)ctx);
    sqlite3_bind_int64(s, 2, base_wall_ms());
    if (!execute(s))
        return database_error(c, err, "cannot revoke a key");
    return sqlite3_changes(c->db) ? BASE_OK
                                  : base_fail(err, BASE_NOT_FOUND, "there is no such key");
}

base_code gw_ledger_key_revoke(gw_ledger *ledger, int64_t id, base_err *err)
{
    return on_writer(ledger, run_key_revoke, &id, err);
}

/* ---- figures and checks ---- */

static uint64_t file_bytes(const char *file, const char *suffix)
{
    char path[4096];
    struct stat st;
    snprintf(path, sizeof(path), "%s%s", file, suffix);
    return stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
}

gw_ledger_stats gw_ledger_get_stats(gw_ledger *ledger)
{
    gw_ledger_stats stats = {.commits = atomic_load(&ledger->commit_count),
                             .transactions = atomic_load(&ledger->transaction_count),
                             .failures = atomic_load(&ledger->failure_count),
                             .database_bytes = file_bytes(ledger->file, ""),
                             .wal_bytes = file_bytes(ledger->file, "-wal")};
    pthread_mutex_lock(&ledger->mutex);
    stats.queued = ledger->queued;
    pthread_mutex_unlock(&ledger->mutex);
    gw_memory_stats(ledger->memory, &stats);
    return stats;
}

static base_code check_text(conn *c, const char *sql, const char *wanted, base_err *err)
{
    sqlite3_stmt *s;
    if (sqlite3_prepare_v2(c->db, sql, -1, &s, NULL) != SQLITE_OK)
        return database_error(c, err, sql);
    base_code code = BASE_OK;
    int step = sqlite3_step(s);
    const char *text = step == SQLITE_ROW ? (const char *)sqlite3_column_text(s, 0) : NULL;
    if (step != SQLITE_ROW && step != SQLITE_DONE)
        code = database_error(c, err, sql);
    else if (wanted ? !text || strcmp(text, wanted) != 0 : text != NULL)
        code = base_fail(err, BASE_FORMAT, "whimbrel.db: %s: %s", sql, text ? text : "nothing");
    sqlite3_finalize(s);
    return code;
}

static base_code check_runs(conn *c, base_err *err)
{
    sqlite3_stmt *s;
    if (sqlite3_prepare_v2(c->db, "SELECT " RUN_COLUMNS " FROM runs r WHERE r.slot IS NOT NULL", -1,
                           &s, NULL) != SQLITE_OK)
        return database_error(c, err, "cannot read runs");
    base_code code = BASE_OK;
    while (!code && sqlite3_step(s) == SQLITE_ROW) {
        base_arena *arena = base_arena_create(4096, 64u << 20);
        if (!arena || !column_run(s, arena))
            code = base_fail(err, BASE_FORMAT, "whimbrel.db: run %lld is damaged",
                             (long long)sqlite3_column_int64(s, 0));
        base_arena_destroy(arena);
    }
    sqlite3_finalize(s);
    return code;
}

bool gw_ledger_check(gw_ledger *ledger, base_err *err)
{
    conn *c = reader_take(ledger, err);
    if (!c)
        return false;
    base_code code = check_text(c, "PRAGMA integrity_check(1)", "ok", err);
    if (!code)
        code = check_text(c, "PRAGMA foreign_key_check", NULL, err);
    if (!code)
        code = check_runs(c, err);
    reader_give(ledger, c);
    return !code;
}

/* ---- open and close ---- */

static base_code make_directory(const char *path, base_err *err)
{
    char part[4096];
    if (strlen(path) >= sizeof(part) - 32 || !path[0])
        return base_fail_param(err, BASE_INVALID, "data.path",
                               "data.path has %zu bytes, 1 to %zu are allowed", strlen(path),
                               sizeof(part) - 33);
    snprintf(part, sizeof(part), "%s", path);
    for (char *at = part + 1;; at++) {
        if (*at != '/' && *at != '\0')
            continue;
        char end = *at;
        *at = '\0';
        if (mkdir(part, 0700) != 0 && errno != EEXIST)
            return base_fail_param(err, BASE_IO, "data.path", "cannot make %s: %s", part,
                                   strerror(errno));
        *at = end;
        if (!end)
            return BASE_OK;
    }
}

/* One gateway a data directory: what is in memory would not see another's turns. The lock goes with
 * the process. */
static base_code take_lock(gw_ledger *ledger, base_err *err)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/whimbrel.lock", ledger->options.path);
    ledger->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (ledger->lock_fd < 0)
        return base_fail_param(err, BASE_IO, "data.path", "cannot write to %s: %s",
                               ledger->options.path, strerror(errno));
    if (flock(ledger->lock_fd, LOCK_EX | LOCK_NB) == 0)
        return BASE_OK;
    return base_fail_param(err, BASE_CONFLICT, "data.path", "%s is in use by another process",
                           ledger->options.path);
}

base_code gw_ledger_open(gw_ledger **out, const gw_ledger_options *options, base_err *err)
{
    gw_ledger *ledger = calloc(1, sizeof(*ledger));
    if (!ledger)
        return base_fail(err, BASE_NOMEM, "no memory for the ledger");
    ledger->lock_fd = -1;
    ledger->options = *options;
    ledger->options.path = strdup(options->path);
    ledger->options.memory_bytes = options->memory_bytes ? options->memory_bytes : MEMORY_BYTES;
    ledger->options.queue_max = options->queue_max ? options->queue_max : QUEUE_MAX;
    ledger->options.busy_ms = options->busy_ms ? options->busy_ms : BUSY_MS;
    ledger->commits_last = &ledger->commits;
    ledger->tasks_last = &ledger->tasks;
    ledger->hash = gw_hash_open();
    ledger->memory = gw_memory_create(ledger->options.memory_bytes);
    pthread_mutex_init(&ledger->mutex, NULL);
    pthread_cond_init(&ledger->wake, NULL);
    pthread_cond_init(&ledger->task_done, NULL);
    pthread_mutex_init(&ledger->reader_mutex, NULL);
    pthread_cond_init(&ledger->reader_free, NULL);
    pthread_mutex_init(&ledger->keeper_mutex, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&ledger->keeper_wake, &attributes);
    pthread_condattr_destroy(&attributes);
    base_code code = BASE_OK;
    if (!ledger->options.path || !ledger->memory || ledger->hash.failed ||
        asprintf(&ledger->file, "%s/whimbrel.db", options->path) < 0) {
        ledger->file = NULL;
        code = base_fail(err, BASE_NOMEM, "no memory for the ledger");
    }
    if (!code)
        code = make_directory(ledger->options.path, err);
    if (!code)
        code = take_lock(ledger, err);
    if (!code)
        code = conn_open(&ledger->writer, ledger->file, ledger->options.busy_ms, true, err);
    if (!code)
        code = gw_schema_migrate(ledger->writer->db, err);
    if (!code) {
        sqlite3_wal_hook(ledger->writer->db, on_wal, ledger);
        ledger->thread_runs = pthread_create(&ledger->thread, NULL, writer_main, ledger) == 0;
        ledger->keeper_runs =
            ledger->thread_runs && pthread_create(&ledger->keeper, NULL, keeper_main, ledger) == 0;
        if (!ledger->keeper_runs)
            code = base_fail(err, BASE_IO, "the system gives no thread for the ledger");
    }
    if (code) {
        gw_ledger_close(ledger);
        return code;
    }
    *out = ledger;
    return BASE_OK;
}

void gw_ledger_close(gw_ledger *ledger)
{
    if (!ledger)
        return;
    if (ledger->keeper_runs) {
        pthread_mutex_lock(&ledger->keeper_mutex);
        ledger->keeper_stop = true;
        pthread_cond_signal(&ledger->keeper_wake);
        pthread_mutex_unlock(&ledger->keeper_mutex);
        pthread_join(ledger->keeper, NULL);
    }
    if (ledger->thread_runs) {
        pthread_mutex_lock(&ledger->mutex);
        ledger->closing = true;
        pthread_cond_signal(&ledger->wake);
        pthread_mutex_unlock(&ledger->mutex);
        pthread_join(ledger->thread, NULL);
    }
    for (conn *c = ledger->readers, *next; c; c = next) {
        next = c->next;
        conn_close(c);
    }
    if (ledger->writer && ledger->thread_runs)
        checkpoint(ledger->writer, SQLITE_CHECKPOINT_TRUNCATE);
    conn_close(ledger->writer);
    if (ledger->lock_fd >= 0)
        close(ledger->lock_fd);
    gw_memory_destroy(ledger->memory);
    gw_hash_close(&ledger->hash);
    pthread_mutex_destroy(&ledger->mutex);
    pthread_cond_destroy(&ledger->wake);
    pthread_cond_destroy(&ledger->task_done);
    pthread_mutex_destroy(&ledger->reader_mutex);
    pthread_cond_destroy(&ledger->reader_free);
    pthread_mutex_destroy(&ledger->keeper_mutex);
    pthread_cond_destroy(&ledger->keeper_wake);
    free((char *)ledger->options.path);
    free(ledger->file);
    free(ledger);
}
