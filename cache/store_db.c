/* Rows of the disk tier: kv/index.db. One connection, of the writer thread (of open before it
 * runs).
 *
 * The file is locked for as long as it is open, so that a second process cannot write beside us. A
 * row is checked by a sum over all of it but its last use; a row that does not fit its sum, its
 * world or its parent is dropped. No read lasts longer than a call; the log is cut when idle and at
 * the end. */
#include "cache/store_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "engine/base/log.h"
#include "engine/base/scrub.h"

#define BUSY_MS 250
#define DAY_MS (24 * 3600 * 1000ll)

static const char SCHEMA[] =
    "CREATE TABLE worlds(id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, layout TEXT NOT NULL,"
    " numerics TEXT NOT NULL, used_ms INTEGER NOT NULL);"
    "CREATE TABLE pages(id INTEGER PRIMARY KEY, world INTEGER NOT NULL, space INTEGER NOT NULL,"
    " parent INTEGER NOT NULL, kind INTEGER NOT NULL, filled INTEGER NOT NULL,"
    " chain INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,"
    " length INTEGER NOT NULL, used_ms INTEGER NOT NULL, sum INTEGER NOT NULL, tokens BLOB);"
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL);";

int64_t kv_row__sum(const kv_row_key *row, const int32_t *tokens)
{
    uint64_t parts[2] = {XXH3_64bits(row, sizeof *row),
                         XXH3_64bits(tokens, tokens == NULL ? 0 : row->filled * sizeof *tokens)};
    return (int64_t)XXH3_64bits(parts, sizeof parts);
}

static base_code code_of(int rc)
{
    switch (rc & 0xFF) {
    case SQLITE_OK:
    case SQLITE_DONE:
    case SQLITE_ROW:
        return BASE_OK;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        return BASE_CONFLICT;
    case SQLITE_FULL:
        return BASE_FULL;
    case SQLITE_NOMEM:
        return BASE_NOMEM;
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
    case SQLITE_ERROR: /* the schema is not what was made: a table or column is missing */
    case SQLITE_MISMATCH:
    case SQLITE_CONSTRAINT:
        return BASE_FORMAT;
    default:
        return BASE_IO;
    }
}

/* An error of the database as one of ours. */
static base_code fail(kv_store *store, int rc, base_err *err)
{
    base_code code = code_of(rc);
    const char *what = sqlite3_errstr(rc);
    if (code == BASE_CONFLICT)
        what = "locked by another process";
    else if ((rc & 0xFF) == SQLITE_READONLY)
        what = "read-only";
    return base_fail(err, code, "%s/index.db: %s", store->dir, what);
}

static int exec(kv_store *store, const char *sql)
{
    return sqlite3_exec(store->db, sql, NULL, NULL, NULL);
}

/* The number that a statement gives; *value is untouched if it gives none. */
static int query(kv_store *store, const char *sql, int64_t *value)
{
    sqlite3_stmt *stmt;
    int rc = sqlite3_prepare_v2(store->db, sql, -1, &stmt, NULL);
    if (rc != SQLITE_OK)
        return rc;
    rc = sqlite3_step(stmt);
    if (rc == SQLITE_ROW) {
        *value = sqlite3_column_int64(stmt, 0);
        rc = SQLITE_OK;
    } else if (rc == SQLITE_DONE) {
        rc = SQLITE_OK;
    }
    sqlite3_finalize(stmt);
    return rc;
}

static int connect_db(kv_store *store)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/index.db", store->dir);
    int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX;
    int rc = sqlite3_open_v2(path, &store->db, flags, base_scrub_vfs());
    if (rc == SQLITE_OK && sqlite3_db_readonly(store->db, "main") == 1)
        rc = SQLITE_READONLY;
    if (rc != SQLITE_OK)
        return rc;
    sqlite3_busy_timeout(store->db, BUSY_MS);
    sqlite3_extended_result_codes(store->db, 1);
    /* Erased tokens are overwritten in the file. A row lost with the power costs speed only, so a
     * commit is not synced; what it names has been. */
    static const char *const settings[] = {
        "PRAGMA locking_mode=EXCLUSIVE", "PRAGMA journal_mode=WAL",
        "PRAGMA synchronous=NORMAL",     "PRAGMA secure_delete=ON",
        "PRAGMA temp_store=MEMORY",      "PRAGMA journal_size_limit=4194304"};
    for (size_t i = 0; rc == SQLITE_OK && i < sizeof settings / sizeof *settings; i++)
        rc = exec(store, settings[i]);
    return rc;
}

/* The running worlds' row numbers; those used too long ago go, with their rows. */
static int enter_worlds(kv_store *store)
{
    const kv_store_options *o = &store->options;
    int64_t now = kv_store__now_ms(store);
    const char *prints[2] = {o->fingerprint, o->draft_fingerprint};
    sqlite3_stmt *stmt;
    int rc = SQLITE_OK;
    for (int kind = 0; rc == SQLITE_OK && kind < 2; kind++) {
        kv_form *form = &store->forms[kind];
        form->world = 0;
        if (form->layout == NULL)
            continue;
        rc = sqlite3_prepare_v2(store->db,
                                "SELECT id FROM worlds WHERE fingerprint=? AND layout=? AND "
                                "numerics=?",
                                -1, &stmt, NULL);
        if (rc != SQLITE_OK)
            return rc;
        sqlite3_bind_text(stmt, 1, prints[kind], -1, SQLITE_STATIC);
        sqlite3_bind_text(stmt, 2, form->layout->id, -1, SQLITE_STATIC);
        sqlite3_bind_text(stmt, 3, o->numerics, -1, SQLITE_STATIC);
        rc = sqlite3_step(stmt);
        if (rc == SQLITE_ROW)
            form->world = sqlite3_column_int64(stmt, 0);
        sqlite3_finalize(stmt);
        if (rc != SQLITE_ROW && rc != SQLITE_DONE)
            return rc;
        const char *sql = form->world != 0 ? "UPDATE worlds SET used_ms=?4 WHERE id=?5"
                                           : "INSERT INTO worlds(fingerprint,layout,numerics,"
                                             "used_ms) VALUES(?1,?2,?3,?4)";
        rc = sqlite3_prepare_v2(store->db, sql, -1, &stmt, NULL);
        if (rc != SQLITE_OK)
            return rc;
        if (form->world == 0) {
            sqlite3_bind_text(stmt, 1, prints[kind], -1, SQLITE_STATIC);
            sqlite3_bind_text(stmt, 2, form->layout->id, -1, SQLITE_STATIC);
            sqlite3_bind_text(stmt, 3, o->numerics, -1, SQLITE_STATIC);
        } else {
            sqlite3_bind_int64(stmt, 5, form->world);
        }
        sqlite3_bind_int64(stmt, 4, now);
        rc = sqlite3_step(stmt);
        sqlite3_finalize(stmt);
        rc = rc == SQLITE_DONE ? SQLITE_OK : rc;
        if (form->world == 0)
            form->world = sqlite3_last_insert_rowid(store->db);
    }
    if (rc != SQLITE_OK)
        return rc;
    char sql[256];
    int64_t before = now - (int64_t)o->other_ttl_s * 1000;
    snprintf(sql, sizeof sql,
             "DELETE FROM pages WHERE world IN (SELECT id FROM worlds WHERE used_ms<%lld);"
             "DELETE FROM worlds WHERE used_ms<%lld",
             (long long)before, (long long)before);
    rc = exec(store, sql);
    if (rc == SQLITE_OK && sqlite3_changes(store->db) > 0)
        store->scrub = true;
    return rc;
}

static int prepare(kv_store *store)
{
    const struct {
        sqlite3_stmt **stmt;
        const char *sql;
    } list[] = {
        {&store->begin, "BEGIN IMMEDIATE"},
        {&store->commit, "COMMIT"},
        {&store->rollback, "ROLLBACK"},
        {&store->insert, "INSERT INTO pages VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?)"},
        {&store->remove, "DELETE FROM pages WHERE id=?"},
        {&store->move, "UPDATE pages SET segment=?2,offset=?3,sum=?4 WHERE id=?1"},
        {&store->touch, "UPDATE pages SET used_ms=?2 WHERE id=?1"},
        {&store->set, "INSERT INTO meta VALUES(?1,?2) ON CONFLICT(key) DO UPDATE SET value=?2"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        int rc = sqlite3_prepare_v2(store->db, list[i].sql, -1, list[i].stmt, NULL);
        if (rc != SQLITE_OK)
            return rc;
    }
    return SQLITE_OK;
}

static bool may_write(const kv_store *store)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/index.db", store->dir);
    return access(path, W_OK) == 0 && access(store->dir, W_OK) == 0;
}

base_code kv_store__db_open(kv_store *store, base_err *err)
{
    int64_t version = 0, tables = 0;
    int rc = connect_db(store);
    if (rc == SQLITE_OK)
        rc = exec(store, "BEGIN IMMEDIATE"); /* takes the lock that is then kept */
    if (rc == SQLITE_OK)
        rc = query(store, "PRAGMA user_version", &version);
    if (rc == SQLITE_OK && version > KV_SCHEMA)
        return base_fail(err, BASE_UNSUPPORTED, "%s/index.db: schema %lld is newer than %d",
                         store->dir, (long long)version, KV_SCHEMA);
    if (rc == SQLITE_OK)
        rc = query(store, "SELECT count(*) FROM sqlite_schema", &tables);
    if (rc == SQLITE_OK && version == 0 && tables > 0)
        rc = SQLITE_CORRUPT; /* a database, but not ours */
    if (rc == SQLITE_OK && version == 0) {
        rc = exec(store, SCHEMA);
        if (rc == SQLITE_OK)
            rc = exec(store, "PRAGMA user_version=1");
    }
    if (rc == SQLITE_OK)
        rc = enter_worlds(store);
    if (rc == SQLITE_OK)
        rc = exec(store, "COMMIT");
    if (rc == SQLITE_OK)
        rc = prepare(store);
    if ((rc & 0xFF) == SQLITE_READONLY && may_write(store))
        rc = SQLITE_CORRUPT; /* a damaged head says so */
    return rc == SQLITE_OK ? BASE_OK : fail(store, rc, err);
}

/* ---- loading ---- */

typedef struct loader {
    kv_store *store;
    uint64_t *bad; /* ids of rows to remove */
    uint32_t bad_count;
    struct {
        uint64_t id;
        uint32_t rec;
    } * known; /* ascending by id */
    uint32_t known_count, known_max;
} loader;

static uint32_t loaded(const loader *load, uint64_t id)
{
    uint32_t low = 0, high = load->known_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (load->known[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < load->known_count && load->known[low].id == id ? load->known[low].rec
                                                                : KV_REC_NONE;
}

/* A row of a running world: its place in the tree. NULL if it fits, else what does not. */
static const char *check_place(kv_store *store, kv_rec *rec, const int32_t *tokens, uint32_t parent)
{
    const kv_form *form = &store->forms[rec->kind];
    uint64_t length = kv_form__group_offset(form, form->group_count, rec->rows);
    if (parent == KV_REC_NONE)
        return "parent";
    const kv_rec *before = &store->recs[parent];
    if (before->foreign || before->kind == KV_STORE_DRAFT || before->space != rec->space)
        return "parent";
    if (rec->kind == KV_STORE_DRAFT) {
        if (before->state == KV_REC_ROOT || before->side != KV_REC_NONE ||
            before->rows != rec->rows)
            return "parent";
        if (rec->chain != kv_form__side_chain(form, before->chain, rec->rows))
            return "chain";
    } else {
        if (before->rows != KV_PAGE_TOKENS)
            return "parent";
        if (rec->chain != kv_form__page_chain(before->chain, rec->rows, tokens))
            return "chain";
        if (rec->rows == KV_PAGE_TOKENS &&
            kv_store__find_page(store, parent, tokens) != KV_REC_NONE)
            return "twice";
    }
    return length == rec->length ? NULL : "length";
}

/* NULL once the row is in memory. */
static const char *take_row(loader *load, sqlite3_stmt *stmt)
{
    kv_store *store = load->store;
    kv_row_key row = {
        .id = (uint64_t)sqlite3_column_int64(stmt, 0),
        .world = (uint64_t)sqlite3_column_int64(stmt, 1),
        .space = (uint64_t)sqlite3_column_int64(stmt, 2),
        .parent = (uint64_t)sqlite3_column_int64(stmt, 3),
        .kind = (uint64_t)sqlite3_column_int64(stmt, 4),
        .filled = (uint64_t)sqlite3_column_int64(stmt, 5),
        .chain = (uint64_t)sqlite3_column_int64(stmt, 6),
        .segment = (uint64_t)sqlite3_column_int64(stmt, 7),
        .offset = (uint64_t)sqlite3_column_int64(stmt, 8),
        .length = (uint64_t)sqlite3_column_int64(stmt, 9),
    };
    const int32_t *tokens = sqlite3_column_blob(stmt, 12);
    uint64_t token_bytes = (uint64_t)sqlite3_column_bytes(stmt, 12);
    if (row.kind > KV_STORE_DRAFT || row.filled == 0 || row.filled > KV_PAGE_TOKENS ||
        token_bytes != (row.kind == KV_STORE_TARGET ? row.filled * sizeof *tokens : 0))
        return "values";
    if (kv_row__sum(&row, token_bytes == 0 ? NULL : tokens) != sqlite3_column_int64(stmt, 11))
        return "sum";
    uint32_t segment = row.segment < UINT32_MAX
                           ? kv_store__segment_by_number(store, (uint32_t)row.segment)
                           : KV_SEGMENT_NONE;
    if (segment == KV_SEGMENT_NONE)
        return "segment";
    if (row.offset < KV_BLOCK || row.offset % KV_BLOCK != 0 || row.length == 0 ||
        row.length % KV_BLOCK != 0 || row.length > UINT32_MAX ||
        row.offset > store->segments[segment].end ||
        row.length > store->segments[segment].end - row.offset)
        return "range";
    const kv_form *form = &store->forms[row.kind];
    bool foreign = form->layout == NULL || (int64_t)row.world != form->world;
    uint32_t at = kv_store__rec_take(store);
    if (at == KV_REC_NONE)
        return "room";
    kv_rec *rec = &store->recs[at];
    rec->id = row.id;
    rec->chain = row.chain;
    rec->space = row.space;
    rec->used_ms = sqlite3_column_int64(stmt, 10);
    rec->length = (uint32_t)row.length;
    rec->kind = (uint8_t)row.kind;
    rec->rows = (uint8_t)row.filled;
    rec->foreign = foreign;
    if (!foreign) {
        uint32_t parent =
            row.parent == 0 ? kv_store__root(store, row.space, true) : loaded(load, row.parent);
        const char *wrong = check_place(store, rec, tokens, parent);
        if (wrong != NULL) {
            if (parent != KV_REC_NONE)
                kv_store__root_tidy(store, parent);
            kv_store__rec_give(store, at);
            return wrong;
        }
        if (rec->kind == KV_STORE_TARGET)
            memcpy(store->tokens + (size_t)at * KV_PAGE_TOKENS, tokens, token_bytes);
        rec->parent = parent;
        kv_store__link(store, at);
    }
    rec->state = KV_REC_STORED;
    store->stats.records++;
    kv_store__place(store, at, segment, row.offset);
    load->known[load->known_count].id = row.id;
    load->known[load->known_count++].rec = at;
    return NULL;
}

typedef struct use {
    int64_t used_ms;
    uint32_t rec, order;
} use;

static int by_use(const void *a, const void *b)
{
    const use *x = a, *y = b;
    if (x->used_ms != y->used_ms)
        return x->used_ms < y->used_ms ? -1 : 1;
    return x->order > y->order ? -1 : 1; /* of one path, the end first */
}

/* Puts what was loaded into the order of use; other worlds come first. */
static bool list_loaded(loader *load)
{
    kv_store *store = load->store;
    use *uses = malloc((load->known_count + 1) * sizeof *uses);
    uint32_t count = 0;
    if (uses == NULL)
        return false;
    for (uint32_t i = load->known_count; i-- > 0;) {
        kv_rec *rec = &store->recs[load->known[i].rec];
        if (!rec->foreign && rec->parent != KV_REC_NONE &&
            store->recs[rec->parent].used_ms < rec->used_ms)
            store->recs[rec->parent].used_ms = rec->used_ms;
        if (rec->foreign || rec->kind == KV_STORE_TARGET)
            uses[count++] = (use){.used_ms = rec->foreign ? INT64_MIN : rec->used_ms,
                                  .rec = load->known[i].rec,
                                  .order = i};
    }
    qsort(uses, count, sizeof *uses, by_use);
    for (uint32_t i = 0; i < count; i++) {
        kv_rec *rec = &store->recs[uses[i].rec];
        bool foreign = rec->foreign;
        rec->foreign = true; /* to the newest end, whatever it hangs under */
        kv_store__list(store, uses[i].rec);
        rec->foreign = foreign;
    }
    free(uses);
    return true;
}

static int remove_bad(loader *load)
{
    kv_store *store = load->store;
    int rc = load->bad_count == 0 ? SQLITE_OK : exec(store, "BEGIN IMMEDIATE");
    for (uint32_t i = 0; rc == SQLITE_OK && i < load->bad_count; i++) {
        sqlite3_bind_int64(store->remove, 1, (int64_t)load->bad[i]);
        rc = sqlite3_step(store->remove);
        sqlite3_reset(store->remove);
        rc = rc == SQLITE_DONE ? SQLITE_OK : rc;
    }
    return rc == SQLITE_OK && load->bad_count > 0 ? exec(store, "COMMIT") : rc;
}

base_code kv_store__db_load(kv_store *store, base_err *err)
{
    loader load = {.store = store};
    sqlite3_stmt *stmt = NULL;
    int64_t rows = 0, next = 0;
    base_code code = BASE_OK;
    int rc = query(store, "SELECT count(*) FROM pages", &rows);
    if (rc == SQLITE_OK)
        rc = query(store, "SELECT value FROM meta WHERE key='day'", &store->day);
    int64_t day_bytes = 0;
    if (rc == SQLITE_OK)
        rc = query(store, "SELECT value FROM meta WHERE key='day_bytes'", &day_bytes);
    if (rc == SQLITE_OK)
        rc = query(store, "SELECT value FROM meta WHERE key='next_id'", &next);
    if (rc != SQLITE_OK)
        return fail(store, rc, err);
    store->day_bytes = day_bytes > 0 ? (uint64_t)day_bytes : 0;
    store->next_id = next > 1 ? (uint64_t)next : 1;
    load.known_max = (uint32_t)rows + 1;
    load.known = malloc(load.known_max * sizeof *load.known);
    load.bad = malloc(load.known_max * sizeof *load.bad);
    if (load.known == NULL || load.bad == NULL) {
        code = base_fail(err, BASE_NOMEM, "no memory for %lld rows", (long long)rows);
        goto out;
    }
    rc = sqlite3_prepare_v2(store->db,
                            "SELECT id,world,space,parent,kind,filled,chain,segment,offset,length,"
                            "used_ms,sum,tokens FROM pages ORDER BY id",
                            -1, &stmt, NULL);
    while (rc == SQLITE_OK && (rc = sqlite3_step(stmt)) == SQLITE_ROW) {
        uint64_t id = (uint64_t)sqlite3_column_int64(stmt, 0);
        if (load.known_count + load.bad_count >= load.known_max - 1) {
            rc = SQLITE_CORRUPT; /* more rows than were counted */
            break;
        }
        const char *wrong = take_row(&load, stmt);
        if (wrong != NULL) {
            base_log(BASE_LOG_WARN, "kv_row_dropped id=%llu wrong=%s", (unsigned long long)id,
                     wrong);
            load.bad[load.bad_count++] = id;
        }
        if (id >= store->next_id)
            store->next_id = id + 1;
        rc = SQLITE_OK;
    }
    sqlite3_finalize(stmt);
    if (rc == SQLITE_DONE)
        rc = remove_bad(&load);
    if (rc != SQLITE_OK) {
        code = fail(store, rc, err);
        goto out;
    }
    store->stats.swept_records = load.bad_count;
    if (!list_loaded(&load))
        code = base_fail(err, BASE_NOMEM, "no memory for %lld rows", (long long)rows);
out:
    free(load.known);
    free(load.bad);
    return code;
}

void kv_store__db_close(kv_store *store)
{
    sqlite3_stmt **list[] = {&store->begin,  &store->commit, &store->rollback, &store->insert,
                             &store->remove, &store->move,   &store->touch,    &store->set};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        sqlite3_finalize(*list[i]);
        *list[i] = NULL;
    }
    sqlite3_close(store->db);
    store->db = NULL;
}

base_code kv_store__db_reset(kv_store *store, base_err *err)
{
    char from[4096], to[4096];
    kv_store__db_close(store);
    static const char *const ends[] = {"", "-wal", "-shm", "-journal"};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        snprintf(from, sizeof from, "%s/index.db%s", store->dir, ends[i]);
        snprintf(to, sizeof to, "%s/index.db.corrupt%s", store->dir, ends[i]);
        if (rename(from, to) != 0 && errno != ENOENT)
            return base_fail(err, BASE_IO, "%s cannot be moved aside: %s", from, strerror(errno));
    }
    return kv_store__db_open(store, err);
}

/* ---- writing ---- */

static base_code run(sqlite3_stmt *stmt)
{
    int rc = sqlite3_step(stmt);
    sqlite3_reset(stmt);
    return code_of(rc);
}

base_code kv_store__db_begin(kv_store *store)
{
    return run(store->begin);
}

base_code kv_store__db_commit(kv_store *store)
{
    return run(store->commit);
}

void kv_store__db_rollback(kv_store *store)
{
    if (sqlite3_get_autocommit(store->db) == 0)
        run(store->rollback);
}

static kv_row_key row_of(const kv_store *store, const kv_rec *rec, uint64_t parent_id,
                         uint32_t segment_number)
{
    return (kv_row_key){
        .id = rec->id,
        .world = (uint64_t)store->forms[rec->kind].world,
        .space = rec->space,
        .parent = parent_id,
        .kind = rec->kind,
        .filled = rec->rows,
        .chain = rec->chain,
        .segment = segment_number,
        .offset = rec->offset,
        .length = rec->length,
    };
}

base_code kv_store__db_insert(kv_store *store, const kv_rec *rec, const int32_t *tokens,
                              uint64_t parent_id, uint32_t segment_number)
{
    kv_row_key row = row_of(store, rec, parent_id, segment_number);
    const int32_t *blob = rec->kind == KV_STORE_TARGET ? tokens : NULL;
    const uint64_t fields[] = {row.id,     row.world, row.space,   row.parent, row.kind,
                               row.filled, row.chain, row.segment, row.offset, row.length};
    int at = 0;
    for (; at < 10; at++)
        sqlite3_bind_int64(store->insert, at + 1, (int64_t)fields[at]);
    sqlite3_bind_int64(store->insert, 11, rec->used_ms);
    sqlite3_bind_int64(store->insert, 12, kv_row__sum(&row, blob));
    if (blob != NULL)
        sqlite3_bind_blob(store->insert, 13, blob, (int)(rec->rows * sizeof *blob), SQLITE_STATIC);
    else
        sqlite3_bind_null(store->insert, 13);
    base_code code = run(store->insert);
    sqlite3_clear_bindings(store->insert);
    return code;
}

base_code kv_store__db_remove(kv_store *store, uint64_t id)
{
    sqlite3_bind_int64(store->remove, 1, (int64_t)id);
    return run(store->remove);
}

base_code kv_store__db_move(kv_store *store, const kv_rec *rec, const int32_t *tokens,
                            uint64_t parent_id, uint32_t segment_number)
{
    kv_row_key row = row_of(store, rec, parent_id, segment_number);
    sqlite3_bind_int64(store->move, 1, (int64_t)rec->id);
    sqlite3_bind_int64(store->move, 2, segment_number);
    sqlite3_bind_int64(store->move, 3, (int64_t)rec->offset);
    sqlite3_bind_int64(store->move, 4,
                       kv_row__sum(&row, rec->kind == KV_STORE_TARGET ? tokens : NULL));
    return run(store->move);
}

base_code kv_store__db_touch(kv_store *store, uint64_t id, int64_t used_ms)
{
    sqlite3_bind_int64(store->touch, 1, (int64_t)id);
    sqlite3_bind_int64(store->touch, 2, used_ms);
    return run(store->touch);
}

base_code kv_store__db_set(kv_store *store, const char *key, int64_t value)
{
    sqlite3_bind_text(store->set, 1, key, -1, SQLITE_STATIC);
    sqlite3_bind_int64(store->set, 2, value);
    return run(store->set);
}

base_code kv_store__db_checkpoint(kv_store *store, bool erased)
{
    int rc = sqlite3_wal_checkpoint_v2(store->db, NULL, SQLITE_CHECKPOINT_TRUNCATE, NULL, NULL);
    if (rc == SQLITE_OK && erased) {
        char path[4096];
        static const char *const ends[] = {"", "-wal", "-shm", "-journal"};
        for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
            snprintf(path, sizeof path, "%s/index.db.corrupt%s", store->dir, ends[i]);
            unlink(path);
        }
    }
    return code_of(rc);
}
