/* The ledger's schema and its migrations; PRAGMA user_version counts them.
 *
 * Rowid tables throughout. Digests are looked up by their first eight bytes as an integer (a short
 * index) and compared whole in the row. A turn points at the node of its answer; its items are the
 * nodes above. A turn keeps only the part of its prompt that its parent's prompt and run do not
 * already spell (prompt_base says how many tokens those are). A run begins with the last `lead`
 * tokens of its prompt.
 *
 *   tenants --< keys      sessions --< turns --> turns (parent)
 *                                        |--> nodes (answer) --> nodes (parent), items, runs
 *                                        '--> runs (generated) --< calls
 *
 * Times are Unix milliseconds, durations microseconds. NULL in expires_ms keeps a turn. */
#include "gateway/ledger_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Triggers that count a table's rows for their tenant. `when` is about a row's columns. */
/* It takes these strings for expressions: */
/* clang-format off */
#define COUNTED(table, when, new_tenant, old_tenant, bytes)                                        \
    "CREATE TRIGGER " table "_counted AFTER INSERT ON " table " WHEN NEW." when                    \
    " BEGIN UPDATE stored SET bytes=bytes+" bytes("NEW.") " WHERE tenant=" new_tenant "; END;"     \
    "CREATE TRIGGER " table "_uncounted AFTER DELETE ON " table " WHEN OLD." when                  \
    " BEGIN UPDATE stored SET bytes=bytes-" bytes("OLD.") " WHERE tenant=" old_tenant "; END;"
/* clang-format on */
#define OWNER(row) "(SELECT tenant FROM conversations WHERE id=" row ".conversation)"

static const char *const migrations[] = {
    /* 1 */
    "CREATE TABLE tenants("
    " id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, salt INTEGER NOT NULL, limits TEXT, "
    "created_ms INTEGER NOT NULL);"
    "CREATE TABLE keys("
    " id INTEGER PRIMARY KEY, tenant INTEGER NOT NULL REFERENCES tenants(id), hash BLOB NOT NULL "
    "UNIQUE,"
    " scopes INTEGER NOT NULL, label TEXT NOT NULL, limits TEXT, created_ms INTEGER NOT NULL, "
    "revoked_ms INTEGER);"
    /* kind 0: a label or found by content; 1: native; 2: conversation. */
    "CREATE TABLE sessions("
    " id INTEGER PRIMARY KEY, tenant INTEGER NOT NULL REFERENCES tenants(id), public_key INTEGER "
    "NOT NULL,"
    " public TEXT NOT NULL, kind INTEGER NOT NULL, label TEXT, model TEXT, metadata TEXT, head "
    "INTEGER,"
    " created_ms INTEGER NOT NULL, used_ms INTEGER NOT NULL);"
    "CREATE INDEX sessions_public ON sessions(public_key);"
    "CREATE INDEX sessions_used ON sessions(tenant, used_ms);"
    /* kind: eng_role, or -1 for a root (tools, mode, effort). */
    "CREATE TABLE items("
    " id INTEGER PRIMARY KEY, tenant INTEGER NOT NULL REFERENCES tenants(id), key INTEGER NOT "
    "NULL, digest BLOB NOT NULL,"
    " kind INTEGER NOT NULL, data TEXT NOT NULL);"
    "CREATE INDEX items_key ON items(key);"
    /* tokens: LEB128. slot NULL: never spliced. */
    "CREATE TABLE runs("
    " id INTEGER PRIMARY KEY, tenant INTEGER NOT NULL REFERENCES tenants(id), template TEXT NOT "
    "NULL, slot_key INTEGER,"
    " slot BLOB, visible BLOB, reasoning BLOB, digest BLOB NOT NULL, turn TEXT NOT NULL, session "
    "TEXT NOT NULL,"
    " sequence BLOB NOT NULL, sequence_tokens INTEGER NOT NULL, token_count INTEGER NOT NULL, "
    "tokens BLOB NOT NULL);"
    "CREATE INDEX runs_slot ON runs(slot_key) WHERE slot_key IS NOT NULL;"
    "CREATE TABLE calls("
    " id INTEGER PRIMARY KEY, key INTEGER NOT NULL, public TEXT NOT NULL, run INTEGER NOT NULL "
    "REFERENCES runs(id));"
    "CREATE INDEX calls_key ON calls(key);"
    "CREATE INDEX calls_run ON calls(run);"
    "CREATE TABLE nodes("
    " id INTEGER PRIMARY KEY, tenant INTEGER NOT NULL REFERENCES tenants(id), key INTEGER NOT "
    "NULL, digest BLOB NOT NULL,"
    " parent INTEGER REFERENCES nodes(id), item INTEGER NOT NULL REFERENCES items(id), run INTEGER "
    "REFERENCES runs(id));"
    "CREATE INDEX nodes_key ON nodes(key);"
    "CREATE INDEX nodes_parent ON nodes(parent);"
    "CREATE INDEX nodes_item ON nodes(item);"
    "CREATE INDEX nodes_run ON nodes(run) WHERE run IS NOT NULL;"
    "CREATE TABLE turns("
    " id INTEGER PRIMARY KEY, tenant INTEGER NOT NULL REFERENCES tenants(id), public_key INTEGER "
    "NOT NULL,"
    " public TEXT NOT NULL, session INTEGER REFERENCES sessions(id), parent INTEGER REFERENCES "
    "turns(id),"
    " node INTEGER REFERENCES nodes(id), run INTEGER REFERENCES runs(id), status INTEGER NOT NULL,"
    " finish INTEGER NOT NULL, retention INTEGER NOT NULL, dialect TEXT, request TEXT, "
    "response_key INTEGER,"
    " response TEXT, model TEXT, template TEXT, fingerprint TEXT, numerics TEXT, metadata TEXT, "
    "reason TEXT,"
    " prompt_base INTEGER NOT NULL, prompt BLOB, lead INTEGER NOT NULL, steps BLOB, seed INTEGER "
    "NOT NULL,"
    " prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, restored_tokens INTEGER NOT "
    "NULL,"
    " output_tokens INTEGER NOT NULL, reasoning_tokens INTEGER NOT NULL, drafted INTEGER NOT NULL,"
    " accepted INTEGER NOT NULL, engine_steps INTEGER NOT NULL, queue_us INTEGER NOT NULL, "
    "prefill_us INTEGER NOT NULL,"
    " ttft_us INTEGER NOT NULL, decode_us INTEGER NOT NULL, created_ms INTEGER NOT NULL, ended_ms "
    "INTEGER NOT NULL,"
    " expires_ms INTEGER);"
    "CREATE INDEX turns_public ON turns(public_key);"
    "CREATE INDEX turns_response ON turns(response_key) WHERE response_key IS NOT NULL;"
    "CREATE INDEX turns_created ON turns(tenant, created_ms);"
    "CREATE INDEX turns_session ON turns(session);"
    "CREATE INDEX turns_parent ON turns(parent) WHERE parent IS NOT NULL;"
    "CREATE INDEX turns_node ON turns(node) WHERE node IS NOT NULL;"
    "CREATE INDEX turns_run ON turns(run) WHERE run IS NOT NULL;"
    "CREATE INDEX turns_expires ON turns(expires_ms) WHERE expires_ms IS NOT NULL;",
    /* 2: what a dialect's object repeats of its request. */
    "ALTER TABLE turns ADD COLUMN echo TEXT;",
    /* 3: what a native session was made with, where it comes from, how long its pages are pinned.
     */
    "ALTER TABLE sessions ADD COLUMN config TEXT;"
    "ALTER TABLE sessions ADD COLUMN forked_session TEXT;"
    "ALTER TABLE sessions ADD COLUMN forked_turn TEXT;"
    "ALTER TABLE sessions ADD COLUMN pinned_ms INTEGER;"
    "CREATE INDEX sessions_native ON sessions(tenant, id) WHERE kind=1;"
    "CREATE INDEX sessions_head ON sessions(head) WHERE kind=1;",
    /* 4: sums of content; bytes by tenant, kept by triggers so that no statement can forget them;
     * sharing groups; pages that are to be erased because their turns were. */
    "ALTER TABLE items ADD COLUMN sum INTEGER;"
    "ALTER TABLE turns ADD COLUMN sum INTEGER;"
    "ALTER TABLE turns ADD COLUMN space INTEGER;"
    "CREATE INDEX turns_cached ON turns(tenant, created_ms) WHERE retention=1;"
    "CREATE TABLE groups(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, salt INTEGER NOT NULL, "
    "created_ms INTEGER NOT NULL);"
    "ALTER TABLE tenants ADD COLUMN sharing INTEGER REFERENCES groups(id);"
    "CREATE TABLE erasures(id INTEGER PRIMARY KEY, space INTEGER NOT NULL, kept INTEGER NOT NULL, "
    "tokens BLOB NOT NULL);"
    "CREATE TABLE stored(tenant INTEGER PRIMARY KEY REFERENCES tenants(id), bytes INTEGER NOT "
    "NULL);"
    /* Content, and about what a row and its indexes take; ledger_check.c counts the same. */
    "INSERT INTO stored SELECT id, (SELECT ifnull(sum(length(CAST(data AS BLOB))+128),0) FROM "
    "items WHERE tenant=tenants.id)+ (SELECT ifnull(sum(length(tokens)+384),0) FROM runs "
    "WHERE tenant=tenants.id)+ (SELECT "
    "ifnull(sum(ifnull(length(prompt),0)+ifnull(length(steps),0)+ ifnull(length(CAST(echo AS "
    "BLOB)),0)+512),0) FROM turns WHERE tenant=tenants.id) FROM tenants;"
    "CREATE TRIGGER stored_tenant AFTER INSERT ON tenants BEGIN INSERT INTO stored "
    "VALUES(NEW.id, 0); END;"
    "CREATE TRIGGER items_added AFTER INSERT ON items BEGIN UPDATE stored SET bytes=bytes+ "
    "(length(CAST(NEW.data AS BLOB))+128) WHERE tenant=NEW.tenant; END;"
    "CREATE TRIGGER items_left AFTER DELETE ON items BEGIN UPDATE stored SET bytes=bytes- "
    "(length(CAST(OLD.data AS BLOB))+128) WHERE tenant=OLD.tenant; END;"
    "CREATE TRIGGER runs_added AFTER INSERT ON runs BEGIN UPDATE stored SET bytes=bytes+ "
    "(length(NEW.tokens)+384) WHERE tenant=NEW.tenant; END;"
    "CREATE TRIGGER runs_left AFTER DELETE ON runs BEGIN UPDATE stored SET bytes=bytes- "
    "(length(OLD.tokens)+384) WHERE tenant=OLD.tenant; END;"
    "CREATE TRIGGER turns_added AFTER INSERT ON turns BEGIN UPDATE stored SET bytes=bytes+ "
    "(ifnull(length(NEW.prompt),0)+ifnull(length(NEW.steps),0)+ ifnull(length(CAST(NEW.echo "
    "AS BLOB)),0)+512) WHERE tenant=NEW.tenant; END;"
    "CREATE TRIGGER turns_left AFTER DELETE ON turns BEGIN UPDATE stored SET bytes=bytes- "
    "(ifnull(length(OLD.prompt),0)+ifnull(length(OLD.steps),0)+ ifnull(length(CAST(OLD.echo "
    "AS BLOB)),0)+512) WHERE tenant=OLD.tenant; END;"
    "CREATE TRIGGER turns_echo AFTER UPDATE OF echo ON turns BEGIN UPDATE stored SET "
    "bytes=bytes- (ifnull(length(OLD.prompt),0)+ifnull(length(OLD.steps),0)+ "
    "ifnull(length(CAST(OLD.echo AS BLOB)),0)+512)+ "
    "(ifnull(length(NEW.prompt),0)+ifnull(length(NEW.steps),0)+ ifnull(length(CAST(NEW.echo "
    "AS BLOB)),0)+512) WHERE tenant=NEW.tenant; END;",
    /* 5: streams that may be resumed; conversations. */
    "CREATE TABLE streams("
    " id INTEGER PRIMARY KEY, tenant INTEGER NOT NULL REFERENCES tenants(id), public_key INTEGER "
    "NOT NULL, turn TEXT NOT NULL, live INTEGER NOT NULL, created_ms INTEGER NOT NULL, echo TEXT, "
    "told TEXT NOT NULL, run BLOB, steps BLOB);"
    "CREATE INDEX streams_public ON streams(public_key);"
    "CREATE TRIGGER streams_left AFTER DELETE ON turns BEGIN DELETE FROM streams WHERE "
    "public_key=OLD.public_key AND turn=OLD.public; END;"
    "CREATE TRIGGER streams_forgotten AFTER UPDATE OF echo ON turns WHEN NEW.echo IS NULL BEGIN "
    "DELETE FROM streams WHERE public_key=NEW.public_key AND turn=NEW.public; END;"
    "CREATE TABLE conversations("
    " id INTEGER PRIMARY KEY, tenant INTEGER NOT NULL REFERENCES tenants(id), public_key INTEGER "
    "NOT NULL, public TEXT NOT NULL, metadata TEXT, created_ms INTEGER NOT NULL);"
    "CREATE INDEX conversations_public ON conversations(public_key);"
    "CREATE TABLE conversation_items("
    " id INTEGER PRIMARY KEY, conversation INTEGER NOT NULL REFERENCES conversations(id), "
    "public_key INTEGER NOT NULL, public TEXT NOT NULL, data TEXT NOT NULL);"
    "CREATE INDEX conversation_items_of ON conversation_items(conversation, id);"
    "CREATE INDEX conversation_items_public ON conversation_items(public_key);",
    /* 6: runs by what was said before them alone, and what came in front; what a turn's cache did;
     * a key's own rule for restoring (NULL: the configured one). */
    "ALTER TABLE runs ADD COLUMN lineage_key INTEGER; ALTER TABLE runs ADD COLUMN lineage BLOB;"
    "ALTER TABLE runs ADD COLUMN under_key INTEGER; ALTER TABLE runs ADD COLUMN under BLOB;"
    "ALTER TABLE runs ADD COLUMN parent TEXT; ALTER TABLE runs ADD COLUMN front BLOB;"
    "ALTER TABLE runs ADD COLUMN head BLOB; ALTER TABLE runs ADD COLUMN head_tokens INTEGER;"
    "ALTER TABLE runs ADD COLUMN space INTEGER; ALTER TABLE runs ADD COLUMN fingerprint TEXT;"
    "ALTER TABLE runs ADD COLUMN ended_ms INTEGER;"
    "CREATE INDEX runs_lineage ON runs(lineage_key) WHERE lineage_key IS NOT NULL;"
    "CREATE INDEX runs_under ON runs(under_key) WHERE under_key IS NOT NULL;"
    "ALTER TABLE turns ADD COLUMN lost INTEGER; ALTER TABLE turns ADD COLUMN diff_item INTEGER;"
    "ALTER TABLE turns ADD COLUMN diff_token INTEGER;"
    "ALTER TABLE keys ADD COLUMN restore INTEGER;",
    /* 7: indexes that nothing asks, a page each in every commit. */
    "DROP INDEX turns_response; DROP INDEX turns_created; DROP INDEX sessions_used;",
    /* 8: what streams, conversations and native sessions hold is their tenant's, too; items of
     * conversations have an age. Kind 3 of a session: one that is being imported, unknown until all
     * of it is there. */
    /* clang-format off */
    "ALTER TABLE conversation_items ADD COLUMN created_ms INTEGER;"
    "UPDATE conversation_items SET created_ms=(SELECT created_ms FROM conversations c WHERE "
    "c.id=conversation);"
    "CREATE INDEX streams_live ON streams(created_ms) WHERE live=1;"
    "CREATE INDEX sessions_staged ON sessions(id) WHERE kind=3;"
    "UPDATE stored SET bytes=bytes+"
    "(SELECT ifnull(sum" GW_BYTES_STREAM("") ",0) FROM streams WHERE tenant=stored.tenant)+"
    "(SELECT ifnull(sum" GW_BYTES_CONVERSATION("") ",0) FROM conversations WHERE "
    "tenant=stored.tenant)+"
    "(SELECT ifnull(sum" GW_BYTES_MEMBER("i.") ",0) FROM conversation_items i JOIN conversations c "
    "ON c.id=i.conversation WHERE c.tenant=stored.tenant)+"
    "(SELECT ifnull(sum" GW_BYTES_NATIVE("") ",0) FROM sessions WHERE kind<>0 AND "
    "tenant=stored.tenant);"
    COUNTED("streams", "id NOTNULL", "NEW.tenant", "OLD.tenant", GW_BYTES_STREAM)
    COUNTED("conversations", "id NOTNULL", "NEW.tenant", "OLD.tenant", GW_BYTES_CONVERSATION)
    COUNTED("conversation_items", "id NOTNULL", OWNER("NEW"), OWNER("OLD"), GW_BYTES_MEMBER)
    COUNTED("sessions", "kind<>0", "NEW.tenant", "OLD.tenant", GW_BYTES_NATIVE)
    "CREATE TRIGGER conversations_changed AFTER UPDATE OF metadata ON conversations BEGIN UPDATE "
    "stored SET bytes=bytes-" GW_BYTES_CONVERSATION("OLD.") "+" GW_BYTES_CONVERSATION("NEW.")
    " WHERE tenant=NEW.tenant; END;",
    /* clang-format on */
    /* 9: a turn on a conversation leaves with it. */
    "ALTER TABLE turns ADD COLUMN conversation INTEGER REFERENCES conversations(id);"
    "CREATE INDEX turns_conversation ON turns(conversation) WHERE conversation IS NOT NULL;"
    "CREATE INDEX conversations_tenant ON conversations(tenant);",
    /* 10: lists of stored chat completions. */
    "CREATE INDEX turns_completions ON turns(tenant, created_ms) WHERE dialect='chat' AND echo IS "
    "NOT NULL AND response_key IS NOT NULL;",
    /* 11: what was used, by UTC day, tenant and tool, in sums that outlive the turns (one page a
     * commit, so no rowid); the tool whose result a turn was given; gw_extra of a turn, NULL: none.
     * Of earlier turns neither is known. */
    "ALTER TABLE turns ADD COLUMN tool TEXT; ALTER TABLE turns ADD COLUMN extra INTEGER;"
    "CREATE TABLE usage("
    " day INTEGER NOT NULL, tenant INTEGER NOT NULL REFERENCES tenants(id), tool TEXT NOT NULL,"
    " turns INTEGER NOT NULL, cancelled INTEGER NOT NULL, failed INTEGER NOT NULL, prompt_tokens "
    "INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, restored_tokens INTEGER NOT NULL, "
    "output_tokens INTEGER NOT NULL, reasoning_tokens INTEGER NOT NULL, drafted INTEGER NOT NULL, "
    "accepted INTEGER NOT NULL, lost INTEGER NOT NULL, queue_us INTEGER NOT NULL, prefill_us "
    "INTEGER NOT NULL, decode_us INTEGER NOT NULL, PRIMARY KEY(day, tenant, tool)) WITHOUT ROWID;"
    "INSERT INTO usage SELECT ended_ms/86400000, tenant, '', count(*), sum(status=1), "
    "sum(status=2), sum(prompt_tokens), sum(cached_tokens), sum(restored_tokens), "
    "sum(output_tokens), sum(reasoning_tokens), sum(drafted), sum(accepted), sum(ifnull(lost,0)), "
    "sum(queue_us), sum(prefill_us), sum(decode_us) FROM turns GROUP BY 1, 2;",
};

_Static_assert(sizeof(migrations) / sizeof(migrations[0]) == GW_SCHEMA_VERSION,
               "one migration a version");

static base_code refuse(sqlite3 *db, base_err *err, const char *what)
{
    int code = sqlite3_errcode(db);
    base_code to = code == SQLITE_BUSY || code == SQLITE_LOCKED      ? BASE_CONFLICT
                   : code == SQLITE_NOTADB || code == SQLITE_CORRUPT ? BASE_FORMAT
                   : code == SQLITE_NOMEM                            ? BASE_NOMEM
                                                                     : BASE_IO;
    return base_fail_param(err, to, "data.path", "whimbrel.db: %s: %s%s", what, sqlite3_errmsg(db),
                           to == BASE_CONFLICT ? " (another process uses it)" : "");
}

static int read_pragma(void *out, int count, char **values, char **names)
{
    (void)names;
    *(long long *)out = count && values[0] ? strtoll(values[0], NULL, 10) : 0;
    return 0;
}

static bool pragma(sqlite3 *db, const char *sql, long long *out)
{
    return sqlite3_exec(db, sql, read_pragma, out, NULL) == SQLITE_OK;
}

base_code gw_schema_migrate(sqlite3 *db, base_err *err)
{
    long long version = 0, application = 0, tables = 0;
    /* The write lock first: nobody migrates at the same time, and a locked or read-only file shows
     * here, by name. */
    if (sqlite3_exec(db, "BEGIN IMMEDIATE", NULL, NULL, NULL) != SQLITE_OK)
        return refuse(db, err, "cannot write");
    base_code code = BASE_OK;
    if (!pragma(db, "PRAGMA user_version", &version) ||
        !pragma(db, "PRAGMA application_id", &application) ||
        !pragma(db, "SELECT count(*) FROM sqlite_schema", &tables))
        code = refuse(db, err, "cannot read");
    else if (tables && application != GW_SCHEMA_APPLICATION)
        code = base_fail_param(err, BASE_FORMAT, "data.path",
                               "whimbrel.db: this is a database of another program");
    else if (version > GW_SCHEMA_VERSION)
        code = base_fail_param(
            err, BASE_UNSUPPORTED, "data.path",
            "whimbrel.db: schema version %lld is newer than %d, the newest that this program knows",
            version, GW_SCHEMA_VERSION);
    else if (version < 0 || (tables && !version))
        code = base_fail_param(err, BASE_FORMAT, "data.path",
                               "whimbrel.db: schema version %lld makes no sense", version);
    for (long long v = version; !code && v < GW_SCHEMA_VERSION; v++)
        if (sqlite3_exec(db, migrations[v], NULL, NULL, NULL) != SQLITE_OK)
            code = refuse(db, err, "cannot migrate");
    if (!code && version < GW_SCHEMA_VERSION) {
        char sql[96];
        snprintf(sql, sizeof(sql), "PRAGMA application_id=%d; PRAGMA user_version=%d",
                 GW_SCHEMA_APPLICATION, GW_SCHEMA_VERSION);
        if (sqlite3_exec(db, sql, NULL, NULL, NULL) != SQLITE_OK)
            code = refuse(db, err, "cannot migrate");
    }
    if (!code && sqlite3_exec(db, "COMMIT", NULL, NULL, NULL) != SQLITE_OK)
        code = refuse(db, err, "cannot migrate");
    if (code)
        sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
    return code;
}
