/* What the world does to the ledger: locks, full and failing disks, damaged and torn files. A turn
 * is told to be stored only if it is; a damaged row is never served; and it goes on. */
#include <time.h>

#include "engine/base/scrub.h"
#include "ledger_rig.h"

/* ---- a file system that fails on order ---- */

static sqlite3_vfs *real_vfs, failing_vfs;
static atomic_int fail_code;  /* of writes; SQLITE_OK: none fails */
static atomic_int bytes_left; /* that are written before one fails; negative: all fail */
static atomic_bool read_only;

/* Stands behind what the real file system keeps of an open file. */
typedef struct failing_file {
    const sqlite3_io_methods *real;
    sqlite3_io_methods failing;
} failing_file;

static failing_file *failing_of(sqlite3_file *file)
{
    return (failing_file *)((char *)file + (real_vfs->szOsFile + 15) / 16 * 16);
}

/* The write that fails is torn: it has written what was left. */
static int failing_write(sqlite3_file *file, const void *bytes, int length, sqlite3_int64 offset)
{
    const sqlite3_io_methods *real = failing_of(file)->real;
    int code = atomic_load(&fail_code);
    if (code == SQLITE_OK)
        return real->xWrite(file, bytes, length, offset);
    int left = atomic_load(&bytes_left);
    if (left < 0)
        return code;
    atomic_store(&bytes_left, left - length);
    if (left >= length)
        return real->xWrite(file, bytes, length, offset);
    if (left > 0)
        real->xWrite(file, bytes, left, offset);
    atomic_store(&fail_code, SQLITE_OK);
    return code;
}

static int failing_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *file, int flags, int *out)
{
    (void)vfs;
    if (atomic_load(&read_only) && (flags & SQLITE_OPEN_MAIN_DB))
        flags = (flags & ~(SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE)) | SQLITE_OPEN_READONLY;
    int code = real_vfs->xOpen(real_vfs, name, file, flags, out);
    if (code != SQLITE_OK || !file->pMethods)
        return code;
    failing_file *f = failing_of(file);
    f->real = file->pMethods;
    f->failing = *file->pMethods;
    f->failing.xWrite = failing_write;
    file->pMethods = &f->failing;
    return code;
}

static void begin(void)
{
    make_directory();
    sqlite3_initialize();
    real_vfs = sqlite3_vfs_find(NULL);
    failing_vfs = *real_vfs;
    failing_vfs.szOsFile = (real_vfs->szOsFile + 15) / 16 * 16 + (int)sizeof(failing_file);
    failing_vfs.pNext = NULL;
    failing_vfs.zName = "failing";
    failing_vfs.xOpen = failing_open;
    sqlite3_vfs_register(&failing_vfs, 1);
}

TestSuite(ledger_faults, .init = begin, .fini = remove_directory, .timeout = 120);

/* The one that begins or ends past so many bytes. */
static void fail_writes(int code, int after)
{
    atomic_store(&bytes_left, after);
    atomic_store(&fail_code, code);
}

/* One exchange, stored or not. */
static told *ask(gw_ledger *ledger, int number)
{
    char question[32];
    snprintf(question, sizeof(question), "question %d", number);
    eng_item items[] = {user(keep(strdup(question)))};
    int32_t *run = keep(calloc(2, sizeof(*run)));
    run[0] = 100 + number;
    run[1] = 7;
    gw_root r = root();
    return turn_with(ledger, &r, items, 1, assistant("answer", NULL), run, 2);
}

/* Whether the turn can be read; if it can, it must be what was said. */
static bool reads(gw_ledger *ledger, const told *t)
{
    gw_turn_row row;
    char **items;
    uint32_t count;
    base_arena *arena = base_arena_create(4096, 16 << 20);
    base_code code = gw_ledger_turn(ledger, &row, tenant, t->id.text, arena, NULL);
    if (!code) {
        cr_assert_eq(row.run_count, t->commit.run_count);
        cr_assert_arr_eq(row.run, t->commit.run, row.run_count * sizeof(*row.run));
        cr_assert_eq(row.prompt_count, t->commit.prompt_count);
        cr_assert_arr_eq(row.prompt, t->commit.prompt, row.prompt_count * sizeof(*row.prompt));
        if (row.answer)
            cr_assert_str_eq(row.answer, "{\"role\":\"assistant\",\"content\":\"answer\"}");
    }
    if (!gw_ledger_items(ledger, &items, &count, tenant, t->id.text, arena, NULL)) {
        char expected[96];
        cr_assert_eq(count, 2);
        snprintf(expected, sizeof(expected), "{\"role\":\"user\",\"content\":\"%s\"}",
                 t->commit.items[0].text.data);
        cr_assert_str_eq(items[0], expected);
    } else {
        code = BASE_FORMAT;
    }
    base_arena_destroy(arena);
    return !code;
}

static uint64_t now_ms(void)
{
    return base_now_ns() / 1000000;
}

/* ---- at run time ---- */

static void many_commits_while(gw_ledger *ledger, int code, const char *word)
{
    ask(ledger, 1);
    gw_ledger_stats before = gw_ledger_get_stats(ledger);
    fail_writes(code, -1);
    told *t = ask(ledger, 2);
    cr_assert_not(t->commit.stored);
    cr_assert_eq(t->commit.err.code, BASE_IO);
    cr_assert_not_null(strstr(t->commit.err.text, word), "%s", t->commit.err.text);
    cr_assert_eq(gw_ledger_get_stats(ledger).failures, before.failures + 1);
    /* What memory knows of it still works. */
    eng_item items[] = {t->commit.items[0], assistant("answer", NULL), user("go on")};
    cr_assert_eq(match_of(ledger, items, 3).spliced, 1);
    for (int i = 3; i < 30; i++)
        cr_assert_not(ask(ledger, i)->commit.stored);
    fail_writes(SQLITE_OK, 0);
    t = ask(ledger, 30);
    cr_assert(t->commit.stored, "%s", t->commit.err.text);
    cr_assert(reads(ledger, t));
    base_err err = BASE_ERR_INIT;
    cr_assert(gw_ledger_check(ledger, &err), "%s", err.text);
}

Test(ledger_faults, a_full_disk_costs_what_it_cannot_hold_and_nothing_else)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    many_commits_while(ledger, SQLITE_FULL, "full");
    gw_ledger_close(ledger);
}

Test(ledger_faults, a_failing_disk_too)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    many_commits_while(ledger, SQLITE_IOERR_WRITE, "I/O");
    gw_ledger_close(ledger);
}

Test(ledger_faults, each_failing_write_costs_a_turn_at_most)
{
    int failed = 0;
    for (int n = 0; n < 60; n++) {
        gw_ledger *ledger = open_ledger();
        make_tenants(ledger);
        /* Four turns write some 300 KB. */
        fail_writes(n % 2 ? SQLITE_FULL : SQLITE_IOERR_WRITE, n * 5003);
        told *turns[4];
        for (int i = 0; i < 4; i++)
            turns[i] = ask(ledger, 10 * n + i);
        fail_writes(SQLITE_OK, 0);
        for (int i = 0; i < 4; i++) {
            cr_assert_eq(reads(ledger, turns[i]), turns[i]->commit.stored, "write %d, turn %d", n,
                         i);
            failed += !turns[i]->commit.stored;
        }
        base_err err = BASE_ERR_INIT;
        cr_assert(gw_ledger_check(ledger, &err), "write %d: %s", n, err.text);
        gw_ledger_close(ledger);
        ledger = open_ledger();
        for (int i = 0; i < 4; i++)
            cr_assert_eq(reads(ledger, turns[i]), turns[i]->commit.stored);
        gw_ledger_close(ledger);
        remove_directory();
        make_directory();
    }
    cr_assert_gt(failed, 20);
}

Test(ledger_faults, a_lock_of_another_process_holds_turns_up_once)
{
    gw_ledger *ledger = NULL;
    gw_ledger_options options = {.path = directory, .cached_ttl_s = 3600, .busy_ms = 1000};
    cr_assert_eq(gw_ledger_open(&ledger, &options, NULL), BASE_OK);
    make_tenants(ledger);
    sqlite3 *other = open_raw();
    cr_assert_eq(sqlite3_exec(other, "BEGIN IMMEDIATE", NULL, NULL, NULL), SQLITE_OK);
    uint64_t begin_ms = now_ms();
    told *t = ask(ledger, 0);
    cr_assert_not(t->commit.stored);
    cr_assert_eq(t->commit.err.code, BASE_CONFLICT);
    cr_assert_geq(now_ms() - begin_ms, 990);
    begin_ms = now_ms();
    for (int i = 1; i < 4; i++)
        cr_assert_not(ask(ledger, i)->commit.stored);
    cr_assert_lt(now_ms() - begin_ms, 3 * 990, "each waited for the lock");
    sqlite3_exec(other, "ROLLBACK", NULL, NULL, NULL);
    sqlite3_close(other);
    cr_assert(ask(ledger, 9)->commit.stored);
    gw_ledger_close(ledger);
}

/* ---- the log ---- */

static sqlite3 *open_scrubbed(void)
{
    char path[128];
    sqlite3 *db;
    snprintf(path, sizeof(path), "%s/log.db", directory);
    cr_assert_eq(
        sqlite3_open_v2(path, &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, base_scrub_vfs()),
        SQLITE_OK);
    return db;
}

static void execute(sqlite3 *db, const char *sql)
{
    cr_assert_eq(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK, "%s: %s", sql,
                 sqlite3_errmsg(db));
}

static int64_t scalar(sqlite3 *db, const char *sql)
{
    sqlite3_stmt *s;
    cr_assert_eq(sqlite3_prepare_v2(db, sql, -1, &s, NULL), SQLITE_OK, "%s", sqlite3_errmsg(db));
    cr_assert_eq(sqlite3_step(s), SQLITE_ROW);
    int64_t value = sqlite3_column_int64(s, 0);
    sqlite3_finalize(s);
    return value;
}

/* Frames are held until the transaction's last one. */
Test(ledger_faults, frames_of_what_was_rolled_back_never_reach_the_log_of_another)
{
    sqlite3 *one = open_scrubbed(), *two = open_scrubbed();
    execute(one, "PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint=0; PRAGMA cache_size=10;"
                 "CREATE TABLE t(id INTEGER PRIMARY KEY, who INTEGER, data BLOB);");
    execute(two, "PRAGMA wal_autocheckpoint=0");
    for (int round = 0; round < 20; round++) {
        char sql[256];
        /* More pages than the cache: they are written before the end, which then does not come. */
        snprintf(sql, sizeof(sql),
                 "BEGIN IMMEDIATE; WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n "
                 "LIMIT %d) INSERT INTO t(who, data) SELECT 9, randomblob(3000) FROM n; ROLLBACK",
                 20 + 7 * round);
        execute(one, sql);
        execute(two, "INSERT INTO t(who, data) VALUES(2, randomblob(3000)),(2, randomblob(9000))");
        cr_assert_eq(scalar(one, "SELECT count(*) FROM t WHERE who=2"), 2 * (round + 1));
        /* One that is larger than what is held at most, and is read back before it ends. */
        execute(one, "BEGIN IMMEDIATE; WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM "
                     "n LIMIT 150) INSERT INTO t(who, data) SELECT 1, randomblob(3000) FROM n");
        cr_assert_eq(scalar(one, "SELECT count(*) FROM t WHERE who=1 AND length(data)=3000"),
                     150 * (round + 1));
        execute(one, "UPDATE t SET data=zeroblob(100) WHERE who=2; COMMIT");
        cr_assert_eq(scalar(two, "SELECT count(*) FROM t WHERE who=1"), 150 * (round + 1));
        cr_assert_eq(scalar(two, "SELECT count(*) FROM t WHERE who=9"), 0);
        if (round % 5 == 4)
            execute(two, "PRAGMA wal_checkpoint(TRUNCATE)");
    }
    for (int last = 0; last < 2; last++) {
        sqlite3 *db = last ? open_scrubbed() : two;
        sqlite3_stmt *s;
        cr_assert_eq(sqlite3_prepare_v2(db, "PRAGMA integrity_check", -1, &s, NULL), SQLITE_OK);
        cr_assert_eq(sqlite3_step(s), SQLITE_ROW);
        cr_assert_str_eq((const char *)sqlite3_column_text(s, 0), "ok");
        sqlite3_finalize(s);
        sqlite3_close(db);
        if (!last)
            sqlite3_close(one);
    }
}

/* ---- at start ---- */

Test(ledger_faults, a_read_only_database_is_named_at_start)
{
    gw_ledger_close(open_ledger());
    atomic_store(&read_only, true);
    base_err err = open_error(&(gw_ledger_options){.path = directory});
    cr_assert_eq(err.code, BASE_IO);
    cr_assert_not_null(strstr(err.text, "read-only"), "%s", err.text);
}

Test(ledger_faults, a_full_disk_is_named_at_start)
{
    fail_writes(SQLITE_FULL, -1);
    base_err err = open_error(&(gw_ledger_options){.path = directory});
    cr_assert_eq(err.code, BASE_IO);
    cr_assert_not_null(strstr(err.text, "full"), "%s", err.text);
}

/* ---- damaged files ---- */

static size_t load_file(uint8_t **out, const char *name)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/%s", directory, name);
    FILE *file = fopen(path, "rb");
    cr_assert_not_null(file, "%s", path);
    fseek(file, 0, SEEK_END);
    size_t length = (size_t)ftell(file);
    rewind(file);
    *out = keep(malloc(length + 1));
    cr_assert_eq(fread(*out, 1, length, file), length);
    fclose(file);
    return length;
}

static void save_file(const char *name, const uint8_t *bytes, size_t length)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/%s", directory, name);
    FILE *file = fopen(path, "wb");
    cr_assert_not_null(file);
    cr_assert_eq(fwrite(bytes, 1, length, file), length);
    fclose(file);
}

static void forget_log(void)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/whimbrel.db-wal", directory);
    remove(path);
    snprintf(path, sizeof(path), "%s/whimbrel.db-shm", directory);
    remove(path);
}

/* Opens a damaged database, or is refused by name; what it reads is right or an error. */
static bool survives(told *const *turns, int count, int *lost)
{
    gw_ledger *ledger = NULL;
    base_err err = BASE_ERR_INIT;
    gw_ledger_options options = {.path = directory, .cached_ttl_s = 3600, .busy_ms = 200};
    if (gw_ledger_open(&ledger, &options, &err)) {
        cr_assert_str_eq(err.param, "data.path");
        cr_assert(err.code == BASE_FORMAT || err.code == BASE_IO || err.code == BASE_UNSUPPORTED,
                  "%d %s", err.code, err.text);
        return false;
    }
    for (int i = 0; i < count; i++)
        *lost += !reads(ledger, turns[i]);
    told *t = ask(ledger, 5000);
    if (t->commit.stored)
        reads(ledger, t);
    gw_ledger_close(ledger);
    return true;
}

Test(ledger_faults, a_damaged_page_is_told_and_never_served)
{
    enum { TURNS = 12 };
    told *turns[TURNS];
    uint8_t *image;
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    for (int i = 0; i < TURNS; i++)
        turns[i] = ask(ledger, i);
    gw_ledger_close(ledger);
    size_t length = load_file(&image, "whimbrel.db");
    int lost = 0, refused = 0, rounds = 0;
    uint8_t *damaged = keep(malloc(length));
    /* Every page once as a whole, then single bits. */
    for (size_t page = 0; page < length / 4096; page++, rounds++) {
        memcpy(damaged, image, length);
        for (int i = 0; i < 4096; i++)
            damaged[page * 4096 + (size_t)i] ^= (uint8_t)(i * 31 + 85);
        save_file("whimbrel.db", damaged, length);
        forget_log();
        refused += !survives(turns, TURNS, &lost);
    }
    cr_assert_gt(lost, 0);
    cr_assert_gt(refused, 0);
    srand(11);
    for (int i = 0; i < 150; i++, rounds++) {
        memcpy(damaged, image, length);
        /* Content gathers at the ends of pages. */
        size_t at = (size_t)rand() % (length / 4096) * 4096 + 4096 - 1 - (size_t)(rand() % 1500);
        damaged[at] ^= (uint8_t)(1 << (rand() % 8));
        save_file("whimbrel.db", damaged, length);
        forget_log();
        survives(turns, TURNS, &lost);
    }
    fprintf(stderr, "%d rounds, %d refused at start, %d reads refused\n", rounds, refused, lost);
}

Test(ledger_faults, a_changed_word_of_an_item_or_an_answer_is_not_served)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    retention = GW_RETAIN_KEPT;
    echo = "{\"instructions\":\"be brief\"}";
    told *t = ask(ledger, 1);
    gw_turn_row row;
    base_arena *arena = keep(base_arena_create(4096, 16 << 20));
    static const char *const changes[] = {
        "UPDATE items SET data=replace(data,'question','quession')",
        "UPDATE items SET data=replace(data,'answer','ansver')",
        "UPDATE turns SET echo=replace(echo,'brief','long!')",
        "UPDATE turns SET steps=x'0201'",
        "UPDATE runs SET tokens=x'6608', token_count=2",
    };
    cr_assert_eq(gw_ledger_turn(ledger, &row, tenant, t->id.text, arena, NULL), BASE_OK);
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        sqlite3 *db = open_raw();
        char **items;
        uint32_t count;
        cr_assert_eq(sqlite3_exec(db, changes[i], NULL, NULL, NULL), SQLITE_OK, "%s",
                     sqlite3_errmsg(db));
        bool turn_read = gw_ledger_turn(ledger, &row, tenant, t->id.text, arena, NULL) == BASE_OK;
        bool items_read =
            gw_ledger_items(ledger, &items, &count, tenant, t->id.text, arena, NULL) == BASE_OK;
        cr_expect_not(turn_read && items_read, "%s", changes[i]);
        cr_expect_not(gw_ledger_check(ledger, NULL), "%s", changes[i]);
        sqlite3_close(db);
        /* A new turn for the next change. */
        cr_assert_eq(gw_ledger_forget(ledger, tenant, "chat", t->id.text, NULL), BASE_OK);
        t = ask(ledger, 2 + (int)i);
        cr_assert(reads(ledger, t));
    }
    gw_ledger_close(ledger);
}

Test(ledger_faults, a_torn_log_gives_the_turns_before_the_tear)
{
    enum { TURNS = 30 };
    told *turns[TURNS];
    uint8_t *database, *log;
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    /* Checkpoints are not what is looked at: one that came meanwhile would cut the log. A reader
     * that began with an empty one holds them all back. */
    while (gw_ledger_get_stats(ledger).wal_bytes > 0)
        usleep(10000);
    sqlite3 *reader = open_raw();
    cr_assert_eq(sqlite3_exec(reader, "BEGIN; SELECT count(*) FROM turns", NULL, NULL, NULL),
                 SQLITE_OK);
    for (int i = 0; i < TURNS; i++)
        turns[i] = ask(ledger, i);
    /* As a power cut would leave it. */
    size_t database_length = load_file(&database, "whimbrel.db");
    size_t log_length = load_file(&log, "whimbrel.db-wal");
    cr_assert_gt(log_length, 30 * 4096);
    sqlite3_close(reader);
    gw_ledger_close(ledger);
    srand(5);
    int seen[TURNS + 1] = {0};
    for (int round = 0; round < 60; round++) {
        size_t at = (size_t)rand() % log_length;
        uint8_t *torn = keep(malloc(log_length));
        memcpy(torn, log, log_length);
        if (round % 2)
            torn[at] ^= 0x40;
        save_file("whimbrel.db", database, database_length);
        forget_log();
        save_file("whimbrel.db-wal", torn, round % 2 ? log_length : at);
        base_err err = BASE_ERR_INIT;
        gw_ledger_options options = {.path = directory, .cached_ttl_s = 3600};
        cr_assert_eq(gw_ledger_open(&ledger, &options, &err), BASE_OK, "at %zu: %s", at, err.text);
        cr_assert(gw_ledger_check(ledger, &err), "at %zu: %s", at, err.text);
        int there = 0;
        while (there < TURNS && reads(ledger, turns[there]))
            there++;
        for (int i = there; i < TURNS; i++)
            cr_assert_not(reads(ledger, turns[i]), "turn %d without turn %d", i, there);
        seen[there]++;
        /* It may be too early for the tenants. */
        if (there) {
            cr_assert(ask(ledger, 900 + round)->commit.stored);
            cr_assert(gw_ledger_check(ledger, NULL));
        }
        gw_ledger_close(ledger);
    }
    int lengths = 0;
    for (int i = 0; i <= TURNS; i++)
        lengths += seen[i] > 0;
    cr_assert_gt(lengths, 8, "tears in different places leave different beginnings");
}
