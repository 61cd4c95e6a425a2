/* Looking a database over: SQLite's own checks, then that every row still says what was written.
 * What can be derived is derived again: digests of nodes, index keys, token counts, sums. Slow, and
 * read-only. */
#include "gateway/ledger_internal.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define FAULTS_MAX 20 /* of one check; the rest is counted */
#define ARENA_BYTES (256u << 20)

typedef struct checker {
    gw_db *c;
    const gw_check *check;
    gw_hash hash;
    const char *what; /* the check that runs */
    uint64_t rows, faults, faults_of_this;
} checker;

static void fault(checker *k, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void fault(checker *k, const char *fmt, ...)
{
    char text[160];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    k->faults++;
    if (k->faults_of_this++ < FAULTS_MAX)
        k->check->report(k->check->ctx, k->what, 0, text);
}

static sqlite3_stmt *begin(checker *k, const char *what, const char *sql)
{
    sqlite3_stmt *s = NULL;
    k->what = what;
    k->rows = k->faults_of_this = 0;
    if (sqlite3_prepare_v2(k->c->db, sql, -1, &s, NULL) != SQLITE_OK)
        fault(k, "%s", sqlite3_errmsg(k->c->db));
    return s;
}

static bool next(checker *k, sqlite3_stmt *s)
{
    int code = s ? sqlite3_step(s) : SQLITE_DONE;
    if (code == SQLITE_ROW) {
        k->rows++;
        return true;
    }
    if (code != SQLITE_DONE)
        fault(k, "%s", sqlite3_errmsg(k->c->db));
    return false;
}

static void end(checker *k, sqlite3_stmt *s)
{
    sqlite3_finalize(s);
    if (k->faults_of_this > FAULTS_MAX) {
        char text[48];
        snprintf(text, sizeof(text), "%llu more",
                 (unsigned long long)(k->faults_of_this - FAULTS_MAX));
        k->check->report(k->check->ctx, k->what, 0, text);
    }
    if (!k->faults_of_this)
        k->check->report(k->check->ctx, k->what, k->rows, NULL);
}

static long long id_of(sqlite3_stmt *s)
{
    return (long long)sqlite3_column_int64(s, 0);
}

static void check_file(checker *k)
{
    sqlite3_stmt *s = begin(k, "pages", "PRAGMA page_count");
    int64_t pages = next(k, s) ? sqlite3_column_int64(s, 0) : 0;
    sqlite3_finalize(s);
    s = begin(k, "pages", "PRAGMA integrity_check(20)");
    while (next(k, s)) {
        const char *text = (const char *)sqlite3_column_text(s, 0);
        if (!text || strcmp(text, "ok") != 0)
            fault(k, "%s", text ? text : "no answer");
    }
    k->rows = (uint64_t)pages;
    end(k, s);
    s = begin(k, "references", "PRAGMA foreign_key_check");
    while (next(k, s))
        fault(k, "%s row %lld refers to no row of %s", sqlite3_column_text(s, 0),
              (long long)sqlite3_column_int64(s, 1), sqlite3_column_text(s, 2));
    end(k, s);
}

/* A digest column and the index over its first bytes. */
static bool keyed(sqlite3_stmt *s, int key, int column, gw_digest *out)
{
    return gw_column_digest(s, column, out) &&
           sqlite3_column_int64(s, key) == gw_digest_prefix(out);
}

static void check_items(checker *k)
{
    sqlite3_stmt *s = begin(k, "items", "SELECT id, key, digest, data, sum FROM items");
    while (next(k, s)) {
        gw_digest digest;
        const char *data = (const char *)sqlite3_column_text(s, 3);
        size_t length = (size_t)sqlite3_column_bytes(s, 3);
        json_t *json =
            data ? json_loadb(data, length, JSON_ALLOW_NUL | JSON_DECODE_ANY, NULL) : NULL;
        if (!keyed(s, 1, 2, &digest))
            fault(k, "item %lld: its key is not its digest's", id_of(s));
        else if (!json)
            fault(k, "item %lld: not JSON", id_of(s));
        else if (!gw_column_sum_fits(s, 4, gw_item_sum(data, length)))
            fault(k, "item %lld: it does not fit its sum", id_of(s));
        json_decref(json);
    }
    end(k, s);
}

static void check_runs(checker *k)
{
    /* A run that is no item has no slot, and its tokens are looked at alone. */
    sqlite3_stmt *s = begin(k, "runs", "SELECT " GW_RUN_COLUMNS " FROM runs r");
    while (next(k, s)) {
        base_arena *arena = base_arena_create(4096, ARENA_BYTES);
        bool good = arena != NULL;
        if (good && sqlite3_column_type(s, 3) == SQLITE_NULL) {
            gw_digest digest, wanted;
            void *tokens;
            uint32_t count;
            good =
                gw_column_digest(s, 6, &digest) && gw_column_numbers(s, 12, &tokens, &count, arena);
            if (good)
                gw_tokens_digest(&k->hash, &wanted, tokens, count);
            good = good && gw_digest_equal(&digest, &wanted);
        } else if (good) {
            good = gw_column_run(s, arena) != NULL;
        }
        if (!good)
            fault(k, "run %lld: it does not fit its digest", id_of(s));
        base_arena_destroy(arena);
    }
    end(k, s);
    s = begin(k, "calls", "SELECT id, key, public FROM calls");
    while (next(k, s)) {
        const char *public = (const char *)sqlite3_column_text(s, 2);
        if (!public || sqlite3_column_int64(s, 1) != gw_public_key(public))
            fault(k, "call %lld: its key is not its id's", id_of(s));
    }
    end(k, s);
}

/* Each node follows from its parent and its item or run. */
static void check_nodes(checker *k)
{
    sqlite3_stmt *s = begin(
        k, "nodes",
        "SELECT n.id, n.key, n.digest, n.parent, n.run, p.digest, i.digest, i.kind, r.digest, "
        "n.tenant<>i.tenant OR n.tenant<>ifnull(p.tenant,n.tenant) OR "
        "n.tenant<>ifnull(r.tenant,n.tenant) "
        "FROM nodes n LEFT JOIN items i ON i.id=n.item LEFT JOIN nodes p ON p.id=n.parent "
        "LEFT JOIN runs r ON r.id=n.run");
    while (next(k, s)) {
        gw_digest digest, parent, item, run, wanted;
        bool root = sqlite3_column_type(s, 3) == SQLITE_NULL;
        bool ran = sqlite3_column_type(s, 4) != SQLITE_NULL;
        if (!keyed(s, 1, 2, &digest) || !gw_column_digest(s, 6, &item) ||
            (!root && !gw_column_digest(s, 5, &parent)) || (ran && !gw_column_digest(s, 8, &run))) {
            fault(k, "node %lld: a digest is damaged", id_of(s));
            continue;
        }
        if (root)
            wanted = item;
        else if (ran)
            gw_node_run(&k->hash, &wanted, &parent, &run);
        else
            gw_node_item(&k->hash, &wanted, &parent, &item);
        if (!gw_digest_equal(&digest, &wanted) || root != (sqlite3_column_int(s, 7) < 0))
            fault(k, "node %lld: it does not follow from its parent and its item", id_of(s));
        else if (sqlite3_column_int(s, 9))
            fault(k, "node %lld: it is made of another tenant's rows", id_of(s));
    }
    end(k, s);
}

/* What a turn's prompt leaves out is what its parent's prompt and run spell. */
static void check_turns(checker *k)
{
    sqlite3_stmt *s = begin(
        k, "turns",
        "SELECT t.id, t.public_key, t.public, t.prompt_base, t.prompt, t.steps, t.sum, t.echo, "
        "p.prompt_base, p.prompt, p.lead, r.token_count, t.tenant<>ifnull(p.tenant,t.tenant), "
        "t.retention "
        "FROM turns t LEFT JOIN turns p ON p.id=t.parent LEFT JOIN runs r ON r.id=p.run");
    while (next(k, s)) {
        base_arena *arena = base_arena_create(4096, ARENA_BYTES);
        void *list;
        uint32_t own, steps, above;
        const char *public = (const char *)sqlite3_column_text(s, 2);
        int64_t base = sqlite3_column_int64(s, 3);
        if (!public || sqlite3_column_int64(s, 1) != gw_public_key(public))
            fault(k, "turn %lld: its key is not its id's", id_of(s));
        else if (!arena || !gw_column_numbers(s, 4, &list, &own, arena) ||
                 !gw_column_numbers(s, 5, &list, &steps, arena))
            fault(k, "turn %lld: its tokens are damaged", id_of(s));
        else if (!gw_column_turn_fits(s, 4, 5, 7, 6))
            fault(k, "turn %lld: it does not fit its sum", id_of(s));
        else if (base && (!gw_column_numbers(s, 9, &list, &above, arena) ||
                          base != sqlite3_column_int64(s, 8) + above + sqlite3_column_int64(s, 11) -
                                      sqlite3_column_int64(s, 10)))
            fault(k, "turn %lld: its prompt does not follow its parent's", id_of(s));
        else if (sqlite3_column_int(s, 12))
            fault(k, "turn %lld: its parent is another tenant's", id_of(s));
        base_arena_destroy(arena);
    }
    end(k, s);
}

/* What its clients were told, and items of conversations: ids, and that what they hang on is
 * there. */
static void check_streams(checker *k)
{
    sqlite3_stmt *s = begin(
        k, "streams",
        "SELECT x.id, x.public_key, x.turn, x.live, t.id, x.tenant<>ifnull(t.tenant,x.tenant) "
        "FROM streams x LEFT JOIN turns t ON t.public_key=x.public_key AND t.public=x.turn");
    while (next(k, s)) {
        const char *turn = (const char *)sqlite3_column_text(s, 2);
        bool live = sqlite3_column_int(s, 3) != 0;
        if (!turn || sqlite3_column_int64(s, 1) != gw_public_key(turn))
            fault(k, "stream %lld: its key is not its turn's", id_of(s));
        else if (!live && sqlite3_column_type(s, 4) == SQLITE_NULL)
            fault(k, "stream %lld: its turn is not there", id_of(s));
        else if (sqlite3_column_int(s, 5))
            fault(k, "stream %lld: its turn is another tenant's", id_of(s));
    }
    end(k, s);
}

static void check_conversations(checker *k)
{
    static const char *const tables[][2] = {
        {"conversations",
         "SELECT id, public_key, public, ifnull(metadata,'{}'), 1 FROM conversations"},
        {"conversation items",
         "SELECT i.id, i.public_key, i.public, i.data, c.id NOTNULL FROM conversation_items i "
         "LEFT JOIN conversations c ON c.id=i.conversation"}};
    for (size_t t = 0; t < sizeof(tables) / sizeof(tables[0]); t++) {
        sqlite3_stmt *s = begin(k, tables[t][0], tables[t][1]);
        while (next(k, s)) {
            const char *public = (const char *)sqlite3_column_text(s, 2);
            const char *data = (const char *)sqlite3_column_text(s, 3);
            size_t length = (size_t)sqlite3_column_bytes(s, 3);
            json_t *json = data ? json_loadb(data, length, JSON_ALLOW_NUL, NULL) : NULL;
            if (!public || sqlite3_column_int64(s, 1) != gw_public_key(public))
                fault(k, "%s row %lld: its key is not its id's", k->what, id_of(s));
            else if (!sqlite3_column_int(s, 4))
                fault(k, "%s row %lld: its conversation is not there", k->what, id_of(s));
            else if (!json)
                fault(k, "%s row %lld: not JSON", k->what, id_of(s));
            json_decref(json);
        }
        end(k, s);
    }
}

/* As the triggers of schemas 4 and 8 count. */
static void check_bytes(checker *k)
{
    /* clang-format off */
    sqlite3_stmt *s = begin(
        k, "bytes",
        "SELECT tenant, bytes, "
        "(SELECT ifnull(sum(length(CAST(data AS BLOB))+128),0) FROM items WHERE tenant=s.tenant)+"
        "(SELECT ifnull(sum(length(tokens)+384),0) FROM runs WHERE tenant=s.tenant)+"
        "(SELECT ifnull(sum(ifnull(length(prompt),0)+ifnull(length(steps),0)+"
        "ifnull(length(CAST(echo AS BLOB)),0)+512),0) FROM turns WHERE tenant=s.tenant)+"
        "(SELECT ifnull(sum" GW_BYTES_STREAM("") ",0) FROM streams WHERE tenant=s.tenant)+"
        "(SELECT ifnull(sum" GW_BYTES_CONVERSATION("") ",0) FROM conversations WHERE "
        "tenant=s.tenant)+"
        "(SELECT ifnull(sum" GW_BYTES_MEMBER("i.") ",0) FROM conversation_items i JOIN "
        "conversations c ON c.id=i.conversation WHERE c.tenant=s.tenant)+"
        "(SELECT ifnull(sum" GW_BYTES_NATIVE("") ",0) FROM sessions WHERE kind<>0 AND "
        "tenant=s.tenant) FROM stored s");
    /* clang-format on */
    while (next(k, s))
        if (sqlite3_column_int64(s, 1) != sqlite3_column_int64(s, 2))
            fault(k, "tenant %lld: %lld bytes are counted, %lld are there", id_of(s),
                  (long long)sqlite3_column_int64(s, 1), (long long)sqlite3_column_int64(s, 2));
    end(k, s);
}

bool gw_db_check(gw_db *c, const gw_check *check)
{
    checker k = {.c = c, .check = check, .hash = gw_hash_open()};
    check_file(&k);
    check_items(&k);
    check_runs(&k);
    check_nodes(&k);
    check_turns(&k);
    check_streams(&k);
    check_conversations(&k);
    check_bytes(&k);
    if (k.hash.failed) {
        k.what = "nodes";
        fault(&k, "no memory for digests");
    }
    gw_hash_close(&k.hash);
    return !k.faults;
}

static void keep_first(void *ctx, const char *what, uint64_t rows, const char *wrong)
{
    (void)rows;
    if (wrong)
        base_fail(ctx, BASE_FORMAT, "whimbrel.db: %s: %s", what, wrong);
}

bool gw_ledger_check(gw_ledger *ledger, base_err *err)
{
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return false;
    bool right = gw_db_check(c, &(gw_check){keep_first, err});
    gw_reader_give(ledger, c);
    return right;
}
