/* What leaves the ledger leaves it whole: rows, bytes of files, pages; and what is bounded. */
#include <sys/wait.h>
#include <time.h>

#include "gateway/ledger_session.h"
#include "ledger_rig.h"

TestSuite(ledger_erase, .init = make_directory, .fini = remove_directory, .timeout = 60);

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

/* `size` bytes of a word; lives as long as the test. */
static const char *long_text(const char *word, size_t size)
{
    char *out = keep(calloc(1, size + 64));
    size_t at = 0;
    while (at < size)
        at += (size_t)sprintf(out + at, "%s ", word);
    return out;
}

/* One exchange under a session of its own. */
static told *exchange(gw_ledger *ledger, const char *question, const char *answer, int32_t token)
{
    eng_item items[] = {user(question)};
    return turn(ledger, items, 1, assistant(answer, NULL), RUN(token, token + 1));
}

Test(ledger_erase, no_file_holds_a_deleted_turn)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    told *gone[150];
    retention = GW_RETAIN_KEPT;
    srand(7);
    for (int i = 0; i < 150; i++) {
        char mark[32];
        snprintf(mark, sizeof(mark), "zebra-%d", i);
        echo = long_text(mark, (size_t)(rand() % 300));
        gone[i] = exchange(ledger, long_text(mark, (size_t)(rand() % 9000)),
                           long_text(mark, (size_t)(rand() % 700)), 1000 + 7 * i);
        snprintf(mark, sizeof(mark), "horse-%d", i);
        echo = "{}";
        exchange(ledger, long_text(mark, (size_t)(rand() % 9000)),
                 long_text(mark, (size_t)(rand() % 700)), 500000 + 7 * i);
    }
    cr_assert(files_hold(directory, "zebra-"));
    for (int i = 0; i < 150; i++)
        cr_assert_eq(gw_ledger_forget(ledger, tenant, "chat", gone[(i * 77) % 150]->id.text, NULL),
                     BASE_OK);
    cr_assert_not(files_hold(directory, "zebra-"));
    cr_assert(files_hold(directory, "horse-149"));
    base_err err = BASE_ERR_INIT;
    cr_assert(gw_ledger_check(ledger, &err), "%s", err.text);
    gw_ledger_close(ledger);
    cr_assert_not(files_hold(directory, "zebra-"));
    cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 150);
    cr_assert_eq(count_rows("SELECT count(*) FROM runs"), 150);
    cr_assert_eq(count_rows("SELECT count(*) FROM items"), 301, "and one root");
}

Test(ledger_erase, no_file_holds_an_expired_turn)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    for (int i = 0; i < 40; i++)
        exchange(ledger, long_text("zebra", (size_t)(i * 100)), "zebra", 1000 + 7 * i);
    ended_ms = base_wall_ms() + 3600000;
    exchange(ledger, "horse", "horse", 5);
    cr_assert(files_hold(directory, "zebra"));
    cr_assert_eq(gw_ledger_sweep(ledger, base_wall_ms() + 3600000 + 1000, NULL), BASE_OK);
    gw_ledger_purge(ledger);
    cr_assert_not(files_hold(directory, "zebra"));
    cr_assert(files_hold(directory, "horse"));
    cr_assert(gw_ledger_check(ledger, NULL));
    gw_ledger_close(ledger);
}

Test(ledger_erase, a_kill_between_a_deletion_and_the_cut_of_the_log_leaves_nothing_for_long)
{
    /* The sweeper's thread may be quicker than the kill: again, then. */
    for (int round = 0; round < 20 && !files_hold(directory, "zebra"); round++) {
        pid_t child = fork();
        if (!child) {
            gw_ledger *ledger = open_ledger();
            if (round == 0)
                make_tenants(ledger);
            exchange(ledger, long_text("zebra", 5000), "zebra", 5);
            gw_ledger_sweep(ledger, base_wall_ms() + 7200000, NULL);
            kill(getpid(), SIGKILL);
        }
        waitpid(child, NULL, 0);
    }
    cr_assert(files_hold(directory, "zebra"), "the log was to be there");
    gw_ledger *ledger = open_ledger();
    for (int i = 0; i < 100 && files_hold(directory, "zebra"); i++)
        sleep_ms(50);
    cr_assert_not(files_hold(directory, "zebra"));
    gw_ledger_close(ledger);
}

Test(ledger_erase, a_deleted_turn_takes_the_cached_ones_along_and_not_the_kept)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    retention = GW_RETAIN_KEPT;
    echo = "{}";
    eng_item items[] = {user("zebra"), assistant("two", NULL), user("three"),
                        assistant("four", NULL), user("five")};
    told *first = turn(ledger, items, 1, items[1], RUN(10, 11));
    retention = GW_RETAIN_CACHED;
    echo = NULL;
    turn(ledger, items, 3, items[3], RUN(20, 21));
    turn(ledger, items, 5, assistant("six", NULL), RUN(30, 31));
    cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 3);
    cr_assert_eq(gw_ledger_forget(ledger, 2, "chat", first->id.text, NULL), BASE_NOT_FOUND);
    cr_assert_eq(gw_ledger_forget(ledger, tenant, "chat", first->id.text, NULL), BASE_OK);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 0);
    cr_assert_eq(count_rows("SELECT count(*) FROM nodes"), 0);
    cr_assert_eq(count_rows("SELECT sum(bytes) FROM stored"), 0);
    cr_assert_not(files_hold(directory, "zebra"));
    cr_assert_eq(gw_ledger_forget(ledger, tenant, "chat", first->id.text, NULL), BASE_NOT_FOUND);

    retention = GW_RETAIN_KEPT;
    echo = "{}";
    first = turn(ledger, items, 1, items[1], RUN(10, 11));
    told *second = turn(ledger, items, 3, items[3], RUN(20, 21));
    cr_assert_eq(gw_ledger_forget(ledger, tenant, "chat", first->id.text, NULL), BASE_OK);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 2,
                 "the second spells its prompt with it");
    cr_assert_eq(gw_ledger_forget(ledger, tenant, "chat", first->id.text, NULL), BASE_NOT_FOUND);
    gw_ledger_sweep(ledger, base_wall_ms() + 7200000, NULL);
    cr_assert(files_hold(directory, "zebra"));
    cr_assert_eq(gw_ledger_forget(ledger, tenant, "chat", second->id.text, NULL), BASE_OK);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 0);
    cr_assert_not(files_hold(directory, "zebra"));
    cr_assert(gw_ledger_check(ledger, NULL));
    gw_ledger_close(ledger);
}

/* ---- pages ---- */

typedef struct eraser {
    base_code answer;
    uint32_t calls, kept, count;
    uint64_t space;
    int32_t last;
} eraser;

static base_code erase(void *ctx, uint64_t space, const int32_t *tokens, uint32_t count,
                       uint32_t kept, base_err *err)
{
    eraser *e = ctx;
    *e = (eraser){e->answer, e->calls + 1, kept, count, space, tokens[count - 1]};
    return e->answer ? base_fail(err, e->answer, "refused") : BASE_OK;
}

static gw_ledger *open_erasing(void)
{
    gw_ledger *ledger = NULL;
    gw_ledger_options options = {.path = directory, .cached_ttl_s = 3600, .erases = true};
    cr_assert_eq(gw_ledger_open(&ledger, &options, NULL), BASE_OK);
    return ledger;
}

Test(ledger_erase, pages_are_erased_past_what_living_turns_share)
{
    gw_ledger *ledger = open_erasing();
    make_tenants(ledger);
    eraser e = {0};
    gw_ledger_set_erase(ledger, erase, &e);
    retention = GW_RETAIN_KEPT;
    echo = "{}";
    /* The rig spells an item that is no run as one token, 1000 + its length. */
    eng_item a[] = {user("shared"), user("mine")}, b[] = {user("shared"), user("theirs")};
    told *mine = turn(ledger, a, 2, assistant("x", NULL), RUN(10, 11, 12));
    turn(ledger, b, 2, assistant("y", NULL), RUN(20, 21));
    cr_assert_eq(gw_ledger_forget(ledger, tenant, "chat", mine->id.text, NULL), BASE_OK);
    cr_assert_eq(e.calls, 1);
    cr_assert_eq(e.space, 7);
    cr_assert_eq(e.count, 5);
    cr_assert_eq(e.last, 12);
    cr_assert_eq(e.kept, 1, "the first item's token");
    cr_assert_eq(count_rows("SELECT count(*) FROM erasures"), 0);

    /* A chain is one order: from its end up to what stays. */
    eng_item chain[] = {user("begin"), assistant("b", NULL), user("go on")};
    mine = turn(ledger, chain, 1, chain[1], RUN(40, 41));
    retention = GW_RETAIN_CACHED;
    echo = NULL;
    turn(ledger, chain, 3, assistant("end", NULL), RUN(50, 51));
    cr_assert_eq(gw_ledger_forget(ledger, tenant, "chat", mine->id.text, NULL), BASE_OK);
    cr_assert_eq(e.calls, 2);
    cr_assert_eq(e.count, 6);
    cr_assert_eq(e.last, 51);
    cr_assert_eq(e.kept, 0);

    /* The same turn twice: nothing of it may go. */
    retention = GW_RETAIN_KEPT;
    echo = "{}";
    mine = turn(ledger, chain, 1, chain[1], RUN(40, 41));
    turn(ledger, chain, 1, chain[1], RUN(40, 41));
    cr_assert_eq(gw_ledger_forget(ledger, tenant, "chat", mine->id.text, NULL), BASE_OK);
    cr_assert_eq(e.calls, 2);
    gw_ledger_close(ledger);
}

Test(ledger_erase, an_erasure_that_failed_is_tried_again_after_a_restart_too)
{
    gw_ledger *ledger = open_erasing();
    make_tenants(ledger);
    eraser e = {.answer = BASE_IO};
    gw_ledger_set_erase(ledger, erase, &e);
    retention = GW_RETAIN_KEPT;
    echo = "{}";
    told *t = exchange(ledger, "question", "answer", 10);
    cr_assert_eq(gw_ledger_forget(ledger, tenant, "chat", t->id.text, NULL), BASE_OK);
    cr_assert_geq(e.calls, 1);
    gw_ledger_set_erase(ledger, NULL, NULL);
    cr_assert_eq(count_rows("SELECT count(*) FROM erasures"), 1);
    gw_ledger_close(ledger);
    ledger = open_erasing();
    e = (eraser){0};
    gw_ledger_set_erase(ledger, erase, &e);
    gw_ledger_purge(ledger);
    cr_assert_eq(e.calls, 1);
    cr_assert_eq(e.last, 11);
    gw_ledger_close(ledger);
    cr_assert_eq(count_rows("SELECT count(*) FROM erasures"), 0);
}

/* ---- bounds ---- */

Test(ledger_erase, bytes_are_counted_by_tenant)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    exchange(ledger, long_text("mine", 10000), "answer", 10);
    int64_t mine = count_rows("SELECT bytes FROM stored WHERE tenant=1");
    cr_assert_gt(mine, 10000);
    cr_assert_lt(mine, 13000);
    cr_assert_eq(count_rows("SELECT bytes FROM stored WHERE tenant=2"), 0);
    tenant = 2;
    exchange(ledger, "short", "answer", 10);
    cr_assert_lt(count_rows("SELECT bytes FROM stored WHERE tenant=2"), 3000);
    cr_assert_eq(count_rows("SELECT bytes FROM stored WHERE tenant=1"), mine);
    gw_ledger_sweep(ledger, base_wall_ms() + 7200000, NULL);
    cr_assert_eq(count_rows("SELECT sum(bytes) FROM stored"), 0);
    gw_ledger_close(ledger);
}

static void change_rows(const char *sql)
{
    char *why = NULL;
    sqlite3 *db = open_raw();
    cr_assert_eq(sqlite3_exec(db, sql, NULL, NULL, &why), SQLITE_OK, "%s", why ? why : "");
    sqlite3_close(db);
}

/* Rows that hang on no turn, with their keys; made `ms` ago. */
static void add_stream(const char *id, int live, int64_t ms)
{
    char sql[512];
    snprintf(sql, sizeof(sql),
             "INSERT INTO streams(tenant, public_key, turn, live, created_ms, echo, told, run, "
             "steps) VALUES(1,%lld,'%s',%d,%lld,'{}','{\"mark\":\"zebra\"}',x'05',x'01')",
             (long long)gw_public_key(id), id, live, (long long)(base_wall_ms() - ms));
    change_rows(sql);
}

static void add_conversation(int row, int64_t ms)
{
    char sql[1024], id[32], item[32];
    snprintf(id, sizeof(id), "conv_%d", row);
    snprintf(item, sizeof(item), "msg_%d", row);
    long long made = (long long)(base_wall_ms() - ms);
    snprintf(sql, sizeof(sql),
             "INSERT INTO conversations(id, tenant, public_key, public, metadata, created_ms) "
             "VALUES(%d,1,%lld,'%s','{}',%lld); INSERT INTO conversation_items(conversation, "
             "public_key, public, data, created_ms) VALUES(%d,%lld,'%s','{\"text\":\"horse%d\"}',"
             "%lld)",
             row, (long long)gw_public_key(id), id, made, row, (long long)gw_public_key(item), item,
             row, made);
    change_rows(sql);
}

#define BYTES "SELECT bytes FROM stored WHERE tenant=1"

Test(ledger_erase, streams_conversations_and_sessions_count_for_their_tenant)
{
    gw_ledger *ledger = open_ledger();
    base_err err = BASE_ERR_INIT;
    make_tenants(ledger);
    const char *const steps[] = {
        "UPDATE conversations SET metadata='{\"more\":\"much more\"}'",
        "DELETE FROM conversation_items",
        "DELETE FROM conversations",
        "DELETE FROM streams",
    };
    add_stream("resp_1", 1, 0);
    add_conversation(1, 0);
    const gw_session_new fresh = {.tenant = 1,
                                  .id = "sess_1",
                                  .model = "nano",
                                  .config = "{\"tools\":[]}",
                                  .created_ms = base_wall_ms(),
                                  .count_max = 1};
    cr_assert_eq(gw_session_create(ledger, &fresh, &err), BASE_OK, "%s", err.text);
    int64_t before = count_rows(BYTES);
    cr_assert_gt(before, 500);
    for (size_t i = 0; i < sizeof(steps) / sizeof(*steps); i++) {
        change_rows(steps[i]);
        int64_t now = count_rows(BYTES);
        cr_assert(i == 0 ? now > before : now < before, "%s: %lld", steps[i], (long long)now);
        before = now;
        cr_assert(gw_ledger_check(ledger, &err), "%s", err.text);
    }
    cr_assert_eq(gw_session_delete(ledger, 1, "sess_1", &err), BASE_OK);
    cr_assert_eq(count_rows(BYTES), 0);
    gw_ledger_close(ledger);
}

Test(ledger_erase, streams_and_conversations_have_an_age)
{
    gw_ledger *ledger = NULL;
    const int64_t day = 86400 * 1000;
    gw_ledger_options options = {.path = directory, .cached_ttl_s = 3600, .kept_ttl_s = 7200};
    cr_assert_eq(gw_ledger_open(&ledger, &options, NULL), BASE_OK);
    make_tenants(ledger);
    add_stream("resp_old", 1, 7300 * 1000);
    add_stream("resp_new", 1, 7000 * 1000);
    for (int i = 0; i < 700; i++) /* more than a transaction's */
        add_conversation(1 + i, i < 600 ? 7300 * 1000 : 7000 * 1000);
    cr_assert(files_hold(directory, "horse300"));
    gw_ledger_sweep(ledger, base_wall_ms(), NULL);
    gw_ledger_purge(ledger);
    cr_assert_eq(count_rows("SELECT count(*) FROM streams"), 1);
    cr_assert_eq(count_rows("SELECT count(*) FROM conversation_items"), 100);
    cr_assert_eq(count_rows("SELECT count(*) FROM conversations"), 100);
    cr_assert_not(files_hold(directory, "horse300"));
    cr_assert(gw_ledger_check(ledger, NULL));
    gw_ledger_close(ledger);
    /* Without an age of what is kept, a cut stream still has one. */
    options.kept_ttl_s = 0;
    cr_assert_eq(gw_ledger_open(&ledger, &options, NULL), BASE_OK);
    gw_ledger_sweep(ledger, base_wall_ms() + 29 * day, NULL);
    cr_assert_eq(count_rows("SELECT count(*) FROM streams"), 1);
    gw_ledger_sweep(ledger, base_wall_ms() + 31 * day, NULL);
    cr_assert_eq(count_rows("SELECT count(*) FROM streams"), 0);
    cr_assert_eq(count_rows("SELECT count(*) FROM conversations"), 100);
    gw_ledger_close(ledger);
}

Test(ledger_erase, what_hangs_on_nothing_is_found)
{
    const char *const damage[][2] = {
        {"UPDATE streams SET live=0", "its turn is not there"},
        {"UPDATE streams SET public_key=5", "its key is not its turn's"},
        {"UPDATE conversation_items SET conversation=77", "refers to no row"},
        {"UPDATE conversation_items SET public='msg_other'", "its key is not its id's"},
        {"UPDATE conversation_items SET data='{'", "not JSON"},
        {"UPDATE conversations SET public_key=5", "its key is not its id's"},
    };
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    for (size_t i = 0; i < sizeof(damage) / sizeof(*damage); i++) {
        base_err err = BASE_ERR_INIT;
        add_stream("resp_1", 1, 0);
        add_conversation(1, 0);
        cr_assert(gw_ledger_check(ledger, &err), "%s", err.text);
        change_rows(damage[i][0]);
        cr_assert_not(gw_ledger_check(ledger, &err), "%s", damage[i][0]);
        cr_assert_not_null(strstr(err.text, damage[i][1]), "%s: %s", damage[i][0], err.text);
        change_rows("DELETE FROM streams; UPDATE conversation_items SET conversation=1, data='{}'; "
                    "DELETE FROM conversation_items; DELETE FROM conversations; "
                    "UPDATE stored SET bytes=0");
    }
    gw_ledger_close(ledger);
}

/* A crash in the middle of an import: what it had stored is gone with the next start. */
Test(ledger_erase, an_import_that_was_cut_leaves_nothing)
{
    gw_ledger *ledger = open_ledger();
    base_err err = BASE_ERR_INIT;
    gw_session_row row;
    base_arena *arena = keep(base_arena_create(4096, 16 << 20));
    const char *staged = "sess_0123456789abcdef01234567"; /* the rig's turns are this one's */
    make_tenants(ledger);
    gw_session_new fresh = {.tenant = 1,
                            .id = staged,
                            .model = "nano",
                            .config = "{\"system\":\"zebra\"}",
                            .created_ms = base_wall_ms(),
                            .count_max = 1,
                            .staged = true};
    retention = GW_RETAIN_KEPT;
    for (int round = 0; round < 3; round++) {
        cr_assert_eq(gw_session_create(ledger, &fresh, &err), BASE_OK, "%s", err.text);
        exchange(ledger, long_text("zebra", 5000), "zebra", 10);
        exchange(ledger, long_text("zebras", 500), "zebra", 30);
        cr_assert_eq(gw_session_read(ledger, &row, 1, staged, arena, NULL), BASE_NOT_FOUND);
        cr_assert_eq(gw_session_delete(ledger, 1, staged, NULL), BASE_NOT_FOUND);
        cr_assert_eq(gw_ledger_get_stats(ledger).native_sessions, 0);
        if (round == 0) { /* the crash */
            gw_ledger_close(ledger);
            ledger = open_ledger();
        } else if (round == 1) {
            cr_assert_eq(gw_session_discard(ledger, 1, staged, &err), BASE_OK, "%s", err.text);
        } else {
            cr_assert_eq(gw_session_publish(ledger, 1, staged, 0, &err), BASE_FULL);
            cr_assert_eq(gw_session_publish(ledger, 1, staged, 1, NULL), BASE_OK);
            cr_assert_eq(gw_session_read(ledger, &row, 1, staged, arena, NULL), BASE_OK);
            cr_assert_neq(row.head_row, 0);
            cr_assert_eq(gw_session_delete(ledger, 1, staged, NULL), BASE_OK);
        }
        gw_ledger_purge(ledger);
        cr_assert_eq(count_rows("SELECT count(*) FROM sessions"), 0);
        cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 0);
        cr_assert_eq(count_rows("SELECT count(*) FROM items"), 0);
        cr_assert_eq(count_rows("SELECT count(*) FROM runs"), 0);
        cr_assert_eq(gw_ledger_get_stats(ledger).native_sessions, 0);
        cr_assert_not(files_hold(directory, "zebra"));
        cr_assert(gw_ledger_check(ledger, &err), "%s", err.text);
    }
    gw_ledger_close(ledger);
}

Test(ledger_erase, the_oldest_cached_turns_go_when_a_tenant_has_too_much)
{
    gw_ledger *ledger = NULL;
    gw_ledger_options options = {
        .path = directory, .cached_ttl_s = 3600, .tenant_bytes_max = 100000};
    cr_assert_eq(gw_ledger_open(&ledger, &options, NULL), BASE_OK);
    make_tenants(ledger);
    retention = GW_RETAIN_KEPT;
    exchange(ledger, long_text("kept", 9000), "kept", 10);
    retention = GW_RETAIN_CACHED;
    told *turns[20];
    for (int i = 0; i < 20; i++) {
        char mark[16];
        snprintf(mark, sizeof(mark), "turn-%02d", i);
        ended_ms = base_wall_ms() + i;
        turns[i] = exchange(ledger, long_text(mark, 9000), "answer", 100 + 3 * i);
    }
    tenant = 2;
    exchange(ledger, long_text("other", 9000), "answer", 10);
    tenant = 1;
    cr_assert_eq(gw_ledger_trim(ledger, NULL), BASE_OK);
    int64_t left = count_rows("SELECT bytes FROM stored WHERE tenant=1");
    cr_assert_leq(left, 100000);
    cr_assert_gt(left, 80000);
    gw_turn_row row;
    base_arena *arena = keep(base_arena_create(4096, 16 << 20));
    cr_assert_eq(gw_ledger_turn(ledger, &row, 1, turns[0]->id.text, arena, NULL), BASE_NOT_FOUND);
    cr_assert_eq(gw_ledger_turn(ledger, &row, 1, turns[19]->id.text, arena, NULL), BASE_OK);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns WHERE tenant=2"), 1);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns WHERE retention=2"), 1);
    cr_assert_gt(gw_ledger_get_stats(ledger).trimmed, 5);
    cr_assert_eq(gw_ledger_room(ledger, 1, NULL), BASE_OK);
    gw_ledger_close(ledger);
}

Test(ledger_erase, kept_turns_that_fill_a_bound_are_refused_by_its_key)
{
    gw_ledger *ledger = NULL;
    gw_ledger_options options = {
        .path = directory, .cached_ttl_s = 3600, .tenant_bytes_max = 50000, .bytes_max = 400000};
    cr_assert_eq(gw_ledger_open(&ledger, &options, NULL), BASE_OK);
    make_tenants(ledger);
    cr_assert_eq(gw_ledger_room(ledger, 1, NULL), BASE_OK);
    exchange(ledger, long_text("cached", 60000), "answer", 900);
    cr_assert_eq(gw_ledger_room(ledger, 1, NULL), BASE_OK, "cached ones will make room");
    retention = GW_RETAIN_KEPT;
    for (int i = 0; i < 6; i++) {
        char mark[16];
        snprintf(mark, sizeof(mark), "turn-%02d", i);
        exchange(ledger, long_text(mark, 9000), "answer", 100 + 3 * i);
    }
    cr_assert_eq(gw_ledger_trim(ledger, NULL), BASE_OK);
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_ledger_room(ledger, 1, &err), BASE_FULL);
    cr_assert_not_null(strstr(err.text, "ledger.tenant_bytes_max"), "%s", err.text);
    cr_assert_eq(gw_ledger_room(ledger, 2, NULL), BASE_OK);
    tenant = 2;
    exchange(ledger, long_text("much", 300000), "answer", 10);
    err = (base_err)BASE_ERR_INIT;
    gw_ledger_trim(ledger, NULL);
    cr_assert_eq(gw_ledger_room(ledger, 3, &err), BASE_FULL);
    cr_assert_not_null(strstr(err.text, "ledger.bytes_max"), "%s", err.text);
    gw_ledger_close(ledger);
}

Test(ledger_erase, kept_turns_may_have_an_age)
{
    gw_ledger *ledger = NULL;
    gw_ledger_options options = {.path = directory, .cached_ttl_s = 3600, .kept_ttl_s = 7200};
    cr_assert_eq(gw_ledger_open(&ledger, &options, NULL), BASE_OK);
    make_tenants(ledger);
    retention = GW_RETAIN_KEPT;
    exchange(ledger, "question", "answer", 10);
    gw_ledger_sweep(ledger, base_wall_ms() + 7100000, NULL);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 1);
    gw_ledger_sweep(ledger, base_wall_ms() + 7300000, NULL);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 0);
    gw_ledger_close(ledger);
}
