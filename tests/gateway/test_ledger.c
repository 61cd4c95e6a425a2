/* The ledger alone: schema, commits, what is found again and what is not, and what a kill leaves
 * behind. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdatomic.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "gateway/ledger_internal.h"
#include "ledger_rig.h"

TestSuite(ledger, .init = make_directory, .fini = remove_directory, .timeout = 60);

/* ---- opening ---- */

Test(ledger, a_new_database_has_the_schema_and_opens_again)
{
    for (int i = 0; i < 3; i++) {
        gw_ledger *ledger = open_ledger();
        cr_assert(gw_ledger_check(ledger, NULL));
        gw_ledger_close(ledger);
    }
    cr_assert_eq(count_rows("PRAGMA user_version"), GW_SCHEMA_VERSION);
    cr_assert_eq(count_rows("PRAGMA application_id"), GW_SCHEMA_APPLICATION);
    cr_assert_eq(count_rows("SELECT count(*) FROM sqlite_schema WHERE type='table' AND name IN "
                            "('tenants','keys','sessions','items','runs','calls','nodes','turns')"),
                 8);
}

Test(ledger, missing_directories_are_made)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/a/b", directory);
    gw_ledger *ledger = NULL;
    cr_assert_eq(gw_ledger_open(&ledger, &(gw_ledger_options){.path = path}, NULL), BASE_OK);
    gw_ledger_close(ledger);
    struct stat st;
    cr_assert_eq(stat(path, &st), 0);
    cr_assert_eq(st.st_mode & 0777, 0700);
}

Test(ledger, a_newer_schema_is_refused_by_name)
{
    gw_ledger_close(open_ledger());
    sqlite3 *db = open_raw();
    sqlite3_exec(db, "PRAGMA user_version=999", NULL, NULL, NULL);
    sqlite3_close(db);
    base_err err = open_error(&(gw_ledger_options){.path = directory});
    cr_assert_eq(err.code, BASE_UNSUPPORTED);
    cr_assert_not_null(strstr(err.text, "999"));
}

Test(ledger, what_is_no_database_is_refused_by_name)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/whimbrel.db", directory);
    FILE *file = fopen(path, "w");
    for (int i = 0; i < 1000; i++)
        fputs("this is not a database. ", file);
    fclose(file);
    base_err err = open_error(&(gw_ledger_options){.path = directory});
    cr_assert_eq(err.code, BASE_FORMAT, "%d %s", err.code, err.text);
}

Test(ledger, another_programs_database_is_refused_by_name)
{
    sqlite3 *db = open_raw();
    sqlite3_exec(db, "CREATE TABLE t(x); PRAGMA user_version=1", NULL, NULL, NULL);
    sqlite3_close(db);
    cr_assert_eq(open_error(&(gw_ledger_options){.path = directory}).code, BASE_FORMAT);
}

Test(ledger, a_second_gateway_on_one_directory_is_refused)
{
    gw_ledger *ledger = open_ledger();
    cr_assert_eq(open_error(&(gw_ledger_options){.path = directory}).code, BASE_CONFLICT);
    gw_ledger_close(ledger);
}

Test(ledger, a_database_locked_by_another_program_is_refused_by_name)
{
    gw_ledger_close(open_ledger());
    sqlite3 *db = open_raw();
    cr_assert_eq(sqlite3_exec(db, "BEGIN IMMEDIATE", NULL, NULL, NULL), SQLITE_OK);
    base_err err = open_error(&(gw_ledger_options){.path = directory, .busy_ms = 50});
    cr_assert_eq(err.code, BASE_CONFLICT, "%s", err.text);
    sqlite3_close(db);
}

Test(ledger, a_directory_that_cannot_be_written_is_refused_by_name)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/file", directory);
    fclose(fopen(path, "w"));
    cr_assert_eq(open_error(&(gw_ledger_options){.path = path}).code, BASE_IO);
}

/* ---- committing and reading ---- */

Test(ledger, a_turn_is_there_after_reopening_with_its_tokens)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item first[] = {user("question")};
    told *one =
        turn(ledger, first, 1, assistant("answer", "thoughts"), RUN(5, 300, 70000, 2000000000));
    eng_item second[] = {user("question"), assistant("answer", NULL), user("more")};
    told *two = turn(ledger, second, 3, assistant("again", NULL), RUN(8, 9));
    gw_ledger_close(ledger);

    ledger = open_ledger();
    base_arena *arena = keep(base_arena_create(4096, 1 << 20));
    gw_turn_row row;
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_ledger_turn(ledger, &row, 1, one->id.text, arena, &err), BASE_OK, "%s",
                 err.text);
    cr_assert_eq(row.run_count, 4);
    cr_assert_eq(row.run[3], 2000000000);
    cr_assert_eq(row.prompt_count, 1);
    cr_assert_eq(row.step_count, 2);
    cr_assert_eq(row.steps[1], 2);
    cr_assert_eq(row.usage.cached_tokens, 7);
    cr_assert_eq(row.seed, 0xfedcba9876543210u);
    cr_assert_eq(row.status, GW_TURN_COMPLETED);
    cr_assert_not_null(strstr(row.answer, "\"reasoning_content\":\"thoughts\""));

    cr_assert_eq(gw_ledger_turn(ledger, &row, 1, two->id.text, arena, &err), BASE_OK, "%s",
                 err.text);
    cr_assert_str_eq(row.parent.text, one->id.text);
    cr_assert_eq(row.prompt_count, two->commit.prompt_count, "the prompt is whole again");
    cr_assert_eq(memcmp(row.prompt, two->commit.prompt, row.prompt_count * sizeof(int32_t)), 0);
    cr_assert_eq(count_rows("SELECT prompt_base FROM turns ORDER BY id DESC LIMIT 1"), 5,
                 "only the new part is stored");
    cr_assert(gw_ledger_check(ledger, &err), "%s", err.text);
    gw_ledger_close(ledger);
}

Test(ledger, other_tenants_turns_are_as_unknown_as_none)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item items[] = {user("q")};
    told *t = turn(ledger, items, 1, assistant("a", NULL), RUN(1, 2));
    base_arena *arena = keep(base_arena_create(4096, 1 << 20));
    gw_turn_row row;
    base_err other = BASE_ERR_INIT, none = BASE_ERR_INIT;
    cr_assert_eq(gw_ledger_turn(ledger, &row, 2, t->id.text, arena, &other), BASE_NOT_FOUND);
    cr_assert_eq(gw_ledger_turn(ledger, &row, 2, "turn_000000000000000000000000", arena, &none),
                 BASE_NOT_FOUND);
    cr_assert_str_eq(other.text, none.text);
    gw_ledger_close(ledger);
}

Test(ledger, a_shared_beginning_is_stored_once)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item items[] = {user("a"), user("b"), user("c")};
    turn(ledger, items, 3, assistant("x", NULL), RUN(1));
    turn(ledger, items, 3, assistant("y", NULL), RUN(2));
    cr_assert_eq(count_rows("SELECT count(*) FROM nodes"), 6, "root, three items, two answers");
    cr_assert_eq(count_rows("SELECT count(*) FROM items"), 6);
    gw_ledger_close(ledger);
}

Test(ledger, a_commit_that_the_database_refuses_is_told_so_and_later_ones_work)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item items[] = {user("q")};
    sqlite3 *db = open_raw();
    cr_assert_eq(sqlite3_exec(db, "BEGIN IMMEDIATE", NULL, NULL, NULL), SQLITE_OK);
    gw_root r = root();
    told *t = turn_with(ledger, &r, items, 1, assistant("a", "t"), RUN(1, 2));
    cr_assert_not(t->commit.stored);
    cr_assert_eq(t->commit.err.code, BASE_CONFLICT, "%s", t->commit.err.text);
    sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
    sqlite3_close(db);
    eng_item next[] = {user("q"), assistant("a", NULL)};
    match_of(ledger, next, 2);
    cr_assert(has_tokens(&next[1], RUN(1, 2)), "memory still knows it");
    turn(ledger, items, 1, assistant("b", NULL), RUN(3));
    gw_ledger_close(ledger);
}

Test(ledger, what_is_not_to_be_stored_leaves_counts_only)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    retention = GW_RETAIN_USAGE;
    eng_item items[] = {user("CANARY-QUESTION")};
    told *t = turn(ledger, items, 1, assistant("CANARY-ANSWER", "CANARY-THOUGHT"), RUN(1, 2));
    cr_assert_not(t->commit.stored);
    cr_assert_eq(t->commit.err.code, BASE_OK);
    eng_item next[] = {user("CANARY-QUESTION"), assistant("CANARY-ANSWER", NULL)};
    match_of(ledger, next, 2);
    cr_assert(has_tokens(&next[1], RUN(1, 2)), "memory knows it");
    gw_ledger_close(ledger);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 1);
    cr_assert_eq(count_rows("SELECT sum(output_tokens) FROM turns"), 2);
    cr_assert_eq(count_rows("SELECT (SELECT count(*) FROM nodes)+(SELECT count(*) FROM "
                            "items)+(SELECT count(*) FROM runs)"),
                 0);
    char command[256];
    snprintf(command, sizeof(command), "grep -rq CANARY %s", directory);
    cr_assert_neq(system(command), 0);
}

Test(ledger, expired_turns_leave_with_all_that_only_they_held)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item first[] = {user("CANARY-ONE")};
    turn(ledger, first, 1,
         caller("", "CANARY-TWO", "call_00000000000000000000000000000001", "f", "{}"), RUN(1, 2));
    eng_item second[] = {user("CANARY-ONE"), caller("", NULL, NULL, "f", "{}"),
                         user("CANARY-THREE")};
    turn(ledger, second, 3, assistant("CANARY-FOUR", NULL), RUN(3));
    retention = GW_RETAIN_KEPT;
    eng_item kept[] = {user("kept")};
    told *stays = turn(ledger, kept, 1, assistant("kept", NULL), RUN(4));
    int64_t later = base_wall_ms() + 3600000 * 2;
    for (int i = 0; i < 3; i++, later += 3600000 * 2) /* children first, then their parents */
        cr_assert_eq(gw_ledger_sweep(ledger, later, NULL), BASE_OK);
    cr_assert(gw_ledger_check(ledger, NULL));
    match_of(ledger, second, 3);
    cr_assert_null(second[1].tokens, "not in memory either");
    base_arena *arena = keep(base_arena_create(4096, 1 << 20));
    gw_turn_row row;
    cr_assert_eq(gw_ledger_turn(ledger, &row, 1, stays->id.text, arena, NULL), BASE_OK);
    gw_ledger_close(ledger);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 1);
    cr_assert_eq(count_rows("SELECT count(*) FROM runs"), 1);
    cr_assert_eq(count_rows("SELECT count(*) FROM calls"), 0);
    cr_assert_eq(count_rows("SELECT count(*) FROM items"), 3);
    char command[256];
    snprintf(command, sizeof(command), "grep -rq CANARY %s", directory);
    cr_assert_neq(system(command), 0);
}

/* ---- the same item, line by line ---- */

typedef struct line {
    const char *what;
    eng_item brought;
    bool same;
} line;

/* Generated: `made` after user "q" with tokens 1, 2, 3. Found in memory and, after a restart, on
 * disk. */
static void check_lines(eng_item made, const line *lines, size_t count)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item q[] = {user("q")};
    turn(ledger, q, 1, made, RUN(1, 2, 3));
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < count; i++) {
            eng_item items[] = {user("q"), lines[i].brought, user("next")};
            gw_match match = match_of(ledger, items, 3);
            cr_expect_eq(has_tokens(&items[1], RUN(1, 2, 3)), lines[i].same, "%s (pass %d)",
                         lines[i].what, pass);
            cr_expect_eq(match.last, lines[i].same ? 1 : -1, "%s", lines[i].what);
        }
        gw_ledger_close(ledger);
        ledger = open_ledger();
    }
    gw_ledger_close(ledger);
}

Test(ledger, texts_that_are_the_same_item)
{
    const line lines[] = {
        {"as it was", assistant("Hello.", "why"), true},
        {"reasoning absent", assistant("Hello.", NULL), true},
        {"reasoning empty", assistant("Hello.", ""), true},
        {"reasoning blank", assistant("Hello.", " \n"), true},
        {"reasoning trimmed", assistant("Hello.", "\n why "), true},
        {"reasoning differs", assistant("Hello.", "why not"), false},
        {"white space at the ends", assistant(" \r\n\tHello.\n", NULL), true},
        {"white space inside", assistant("Hel lo.", NULL), false},
        {"one character more", assistant("Hello..", NULL), false},
        {"empty", assistant("", NULL), false},
        {"a call that was not made", caller("Hello.", NULL, "x", "f", "{}"), false},
    };
    check_lines(assistant("Hello.", "why"), lines, sizeof(lines) / sizeof(lines[0]));
}

Test(ledger, calls_that_are_the_same_item)
{
    const line lines[] = {
        {"as it was",
         caller(NULL, NULL, "call_1", "f",
                "{\"a\":1.50,\"b\":[1,2],\"c\":{\"x\":\"\\u00e9\",\"y\":null}}"),
         true},
        {"content empty",
         caller("", NULL, "call_1", "f",
                "{\"a\":1.50,\"b\":[1,2],\"c\":{\"x\":\"\\u00e9\",\"y\":null}}"),
         true},
        {"id regenerated",
         caller(NULL, NULL, "other", "f",
                "{\"a\":1.50,\"b\":[1,2],\"c\":{\"x\":\"\\u00e9\",\"y\":null}}"),
         true},
        {"id absent",
         caller(NULL, NULL, NULL, "f",
                "{\"a\":1.50,\"b\":[1,2],\"c\":{\"x\":\"\\u00e9\",\"y\":null}}"),
         true},
        {"members reordered, spaced, unescaped",
         caller(NULL, NULL, "x", "f",
                " { \"c\" : {\"y\":null, \"x\":\"\xc3\xa9\"}, \"b\":[ 1, 2 ], \"a\":1.5 }\n"),
         true},
        {"number spelled otherwise",
         caller(NULL, NULL, "x", "f",
                "{\"a\":15e-1,\"b\":[1.0,2],\"c\":{\"x\":\"\\u00E9\",\"y\":null}}"),
         true},
        {"number differs",
         caller(NULL, NULL, "x", "f",
                "{\"a\":1.51,\"b\":[1,2],\"c\":{\"x\":\"\\u00e9\",\"y\":null}}"),
         false},
        {"array reordered",
         caller(NULL, NULL, "x", "f",
                "{\"a\":1.50,\"b\":[2,1],\"c\":{\"x\":\"\\u00e9\",\"y\":null}}"),
         false},
        {"null member dropped",
         caller(NULL, NULL, "x", "f", "{\"a\":1.50,\"b\":[1,2],\"c\":{\"x\":\"\\u00e9\"}}"), false},
        {"string for number",
         caller(NULL, NULL, "x", "f",
                "{\"a\":\"1.50\",\"b\":[1,2],\"c\":{\"x\":\"\\u00e9\",\"y\":null}}"),
         false},
        {"borders moved",
         caller(NULL, NULL, "x", "f",
                "{\"a\":1.50,\"b\":[12],\"c\":{\"x\":\"\\u00e9\",\"y\":null}}"),
         false},
        {"name differs",
         caller(NULL, NULL, "x", "g",
                "{\"a\":1.50,\"b\":[1,2],\"c\":{\"x\":\"\\u00e9\",\"y\":null}}"),
         false},
        {"not JSON", caller(NULL, NULL, "x", "f", "{\"a\":1.50"), false},
        {"text added",
         caller("hm", NULL, "x", "f",
                "{\"a\":1.50,\"b\":[1,2],\"c\":{\"x\":\"\\u00e9\",\"y\":null}}"),
         false},
    };
    check_lines(caller("", NULL, "call_1", "f",
                       "{\"a\":1.50,\"b\":[1,2],\"c\":{\"x\":\"\xc3\xa9\",\"y\":null}}"),
                lines, sizeof(lines) / sizeof(lines[0]));
}

Test(ledger, empty_and_broken_arguments)
{
    const line empty[] = {
        {"empty object", caller("", NULL, "x", "f", "{ }"), true},
        {"empty string", caller("", NULL, "x", "f", ""), true},
        {"null", caller("", NULL, "x", "f", "null"), true},
        {"absent", caller("", NULL, "x", "f", NULL), true},
        {"array", caller("", NULL, "x", "f", "[]"), false},
    };
    check_lines(caller("", NULL, "call_1", "f", "{}"), empty, sizeof(empty) / sizeof(empty[0]));
}

Test(ledger, arguments_cut_off_are_the_same_byte_for_byte)
{
    const line cut[] = {
        {"as it was", caller("", NULL, "x", "f", "{\"a\":\"b"), true},
        {"trimmed", caller("", NULL, "x", "f", " {\"a\":\"b\n"), true},
        {"completed by the client", caller("", NULL, "x", "f", "{\"a\":\"b\"}"), false},
    };
    check_lines(caller("", NULL, "call_1", "f", "{\"a\":\"b"), cut, sizeof(cut) / sizeof(cut[0]));
}

Test(ledger, deep_and_large_arguments_are_compared_too)
{
    size_t deep = 500, length = 0;
    char *nested = keep(malloc(4 * deep + 4096)), *wide = keep(malloc(4 << 20));
    for (size_t i = 0; i < deep; i++)
        length += (size_t)sprintf(nested + length, "[");
    for (size_t i = 0; i < deep; i++)
        length += (size_t)sprintf(nested + length, "]");
    size_t at = (size_t)sprintf(wide, "{");
    for (int i = 0; i < 20000; i++)
        at += (size_t)sprintf(wide + at, "%s\"key%d\":\"a value of some length that is hashed %d\"",
                              i ? "," : "", i, i);
    sprintf(wide + at, "}");
    gw_hash hash = gw_hash_open();
    gw_digest a, b, c;
    eng_item one = caller("", NULL, "x", "f", nested), two = caller("", NULL, "x", "f", wide);
    gw_item_visible(&hash, &a, &one);
    gw_item_visible(&hash, &b, &two);
    strstr(wide, "key19999")[3] = '2';
    gw_item_visible(&hash, &c, &two);
    cr_assert_not(gw_digest_equal(&a, &b));
    cr_assert_not(gw_digest_equal(&b, &c));
    gw_hash_close(&hash);
}

Test(ledger, what_was_said_is_found_behind_other_tools_mode_effort_and_system_text)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item q[] = {{.role = ENG_ROLE_SYSTEM, .text = text("On 2026-12-01 you help. Turn 7.")},
                    user("q")};
    gw_root first = root();
    first.volatile_lines = true;
    cr_assert(turn_with(ledger, &first, q, 2, assistant("a", "why"), RUN(1, 2))->commit.stored);
    const eng_text spaced = {"{ \"name\" : \"f\" }", 16}, other = {"{\"name\":\"g\"}", 12};
    static const struct {
        const char *system;
        bool found;
        gw_miss miss;
    } rows[] = {{NULL, true, GW_MISS_RESTORED},
                {NULL, true, GW_MISS_RESTORED},
                {NULL, true, GW_MISS_TOOLS},
                {NULL, true, GW_MISS_MODE},
                {NULL, true, GW_MISS_MODE},
                {"On 2026-12-02 you help. Turn 8.", true, GW_MISS_VOLATILE},
                {"On 2026-12-01 you help a lot. Turn 7.", true, GW_MISS_EDITED},
                {NULL, false, GW_MISS_MODEL},
                {NULL, false, GW_MISS_NEW}};
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
            gw_root r = first;
            if (i == 1)
                r.tools = &spaced;
            if (i == 2)
                r.tools = &other;
            if (i == 3)
                r.thinking = ENG_THINK_DISABLED;
            if (i == 4)
                r.effort = text("low");
            if (i == 7)
                r.template_id = "template-two";
            if (i == 8)
                r.tenant = 2;
            eng_item items[] = {q[0], user("q"), assistant("a", NULL)};
            if (rows[i].system)
                items[0].text = text(rows[i].system);
            gw_match match = match_under(ledger, &r, items, 3);
            cr_expect_eq(has_tokens(&items[2], RUN(1, 2)), rows[i].found, "row %zu", i);
            cr_expect_eq(match.miss, rows[i].miss, "row %zu: %s", i, gw_miss_name(match.miss));
            cr_expect_eq(match.last, i < 2 ? 2 : -1, "row %zu", i);
        }
        gw_ledger_close(ledger);
        ledger = open_ledger();
    }
    gw_ledger_close(ledger);
}

Test(ledger, a_change_in_front_is_told_once)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    gw_root before = root(), after = root();
    after.tool_count = 0;
    eng_item items[] = {user("q"), assistant("a", NULL), user("r"), assistant("b", NULL),
                        user("s")};
    turn_with(ledger, &before, items, 1, assistant("a", "why"), RUN(1, 2));
    turn_with(ledger, &after, items, 3, assistant("b", "so"), RUN(3, 4));
    gw_match match = match_under(ledger, &after, items, 5);
    cr_assert(has_tokens(&items[1], RUN(1, 2)));
    cr_assert(has_tokens(&items[3], RUN(3, 4)));
    cr_assert_eq(match.last, 3);
    cr_assert_eq(match.miss, GW_MISS_RESTORED, "%s", gw_miss_name(match.miss));
    gw_ledger_close(ledger);
}

/* The same words behind two system texts: each has its own thoughts back, a third has none. */
Test(ledger, lineages_that_hide_different_reasoning_are_ambiguous)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    for (int pass = 0; pass < 2; pass++) {
        gw_root roots[] = {root(), root(), root()};
        roots[1].effort = text("low");
        roots[2].effort = text("max");
        eng_item q[] = {user("q")};
        if (!pass) {
            turn_with(ledger, &roots[0], q, 1, assistant("a", "one"), RUN(1, 2));
            turn_with(ledger, &roots[1], q, 1, assistant("a", "two"), RUN(3, 4));
        }
        for (int i = 0; i < 3; i++) {
            eng_item items[] = {user("q"), assistant("a", NULL)};
            gw_match match = match_under(ledger, &roots[i], items, 2);
            cr_expect_eq(has_tokens(&items[1], RUN(1, 2)), i == 0, "root %d", i);
            cr_expect_eq(has_tokens(&items[1], RUN(3, 4)), i == 1, "root %d", i);
            cr_expect_eq(match.miss, i == 2 ? GW_MISS_AMBIGUOUS : GW_MISS_RESTORED);
        }
        gw_ledger_close(ledger);
        ledger = open_ledger();
    }
    gw_ledger_close(ledger);
}

Test(ledger, template_and_tenant_keep_runs_apart)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    const char *id = "call_0123456789abcdef0123456789abcdef";
    eng_item q[] = {user("q")};
    turn(ledger, q, 1, caller("a", NULL, id, "f", "{}"), RUN(1, 2));
    gw_root roots[] = {root(), root()};
    roots[0].template_id = "template-two";
    roots[1].tenant = 2;
    static const gw_miss misses[] = {GW_MISS_MODEL, GW_MISS_TENANT};
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < 2; i++) {
            eng_item items[] = {user("q"), caller("a", NULL, id, "f", "{}")};
            gw_match match = match_under(ledger, &roots[i], items, 2);
            cr_expect_null(items[1].tokens, "root %d", i);
            cr_expect_eq(match.miss, misses[i], "root %d: %s", i, gw_miss_name(match.miss));
            cr_expect_str_empty(match.parent.text);
        }
        gw_ledger_close(ledger);
        ledger = open_ledger();
    }
    gw_ledger_close(ledger);
}

/* An early item was edited (an old result was cut down, say): a call id further down names a turn,
 * and what that turn continued belongs to who has the id. */
Test(ledger, a_minted_id_further_down_brings_the_turns_before_it)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    for (int keep = 0; keep < 2; keep++) {
        char id[40], first[16];
        snprintf(id, sizeof(id), "call_%032d", keep);
        snprintf(first, sizeof(first), "first %d", keep);
        retention = keep ? GW_RETAIN_CACHED : GW_RETAIN_USAGE;
        eng_item items[] = {user(first), assistant("same", NULL), user("r"),
                            assistant("same", NULL), user("s")};
        turn(ledger, items, 1, assistant("same", "one"), RUN(1, 2));
        turn(ledger, items, 3, assistant("same", "two"), RUN(3, 4));
        turn(ledger, items, 5, caller("x", "three", id, "f", "{}"), RUN(5, 6));
        for (int pass = 0; pass <= keep; pass++) {
            eng_item edited[] = {
                user("cut"), assistant("same", NULL),          user("r"), assistant("same", NULL),
                user("s"),   caller("x", NULL, id, "f", "{}"), user("t")};
            gw_match match = match_of(ledger, edited, 7);
            cr_expect(has_tokens(&edited[1], RUN(1, 2)), "the older of two that look the same");
            cr_expect(has_tokens(&edited[3], RUN(3, 4)));
            cr_expect(has_tokens(&edited[5], RUN(5, 6)));
            cr_expect_eq(match.miss, GW_MISS_EDITED, "%s", gw_miss_name(match.miss));
            /* Without the id nothing links; the session's label is worth nothing. */
            gw_root r = root();
            r.session = "sess_0123456789abcdef01234567";
            match = match_under(ledger, &r, edited, 5);
            cr_expect_null(edited[1].tokens);
            cr_expect_null(edited[3].tokens);
            cr_expect_eq(match.miss, keep ? GW_MISS_EDITED : GW_MISS_NEW, "%s",
                         gw_miss_name(match.miss));
            cr_expect_eq(match.parent_guessed, keep == 1);
            if (pass == keep)
                break;
            gw_ledger_close(ledger);
            ledger = open_ledger();
        }
    }
    gw_ledger_close(ledger);
}

/* ---- restoring ---- */

Test(ledger, restoring_is_as_far_as_the_request_wants)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    const char *id = "call_0123456789abcdef0123456789abcdef";
    eng_item items[] = {user("q"), assistant("a", NULL),           user("r"), assistant("b", NULL),
                        user("s"), caller("", NULL, id, "f", "{}")};
    turn(ledger, items, 1, assistant("a", "one"), RUN(1, 2));
    turn(ledger, items, 3, assistant("b", NULL), RUN(3, 4));
    turn(ledger, items, 5, caller("", "two", id, "f", "{}"), RUN(5, 6));
    static const struct {
        gw_restore restore;
        uint32_t count; /* of items sent */
        bool hidden, open, called;
    } rows[] = {
        {GW_RESTORE_AUTO, 4, true, true, false},     {GW_RESTORE_AUTO, 6, true, true, true},
        {GW_RESTORE_LINKED, 4, false, false, false}, {GW_RESTORE_LINKED, 6, true, true, true},
        {GW_RESTORE_OFF, 4, false, false, false},    {GW_RESTORE_OFF, 6, false, true, false},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        gw_root r = root();
        r.restore = rows[i].restore;
        match_under(ledger, &r, items, rows[i].count);
        cr_expect_eq(items[1].tokens != NULL, rows[i].hidden, "row %zu", i);
        /* What hides nothing is taken; behind an item that is not as it was, it needs a link. */
        cr_expect_eq(items[3].tokens != NULL, rows[i].open, "row %zu", i);
        if (rows[i].count > 5)
            cr_expect_eq(items[5].tokens != NULL, rows[i].called, "row %zu", i);
    }
    eng_item sent[] = {user("q"), assistant("a", "one")};
    gw_root r = root();
    r.restore = GW_RESTORE_OFF;
    match_under(ledger, &r, sent, 2);
    cr_assert(has_tokens(&sent[1], RUN(1, 2)), "what was sent is not hidden");
    gw_restore parsed;
    cr_assert(gw_restore_parse(&parsed, "linked"));
    cr_assert_eq(parsed, GW_RESTORE_LINKED);
    cr_assert_not(gw_restore_parse(&parsed, "on"));
    gw_ledger_close(ledger);
}

Test(ledger, hidden_reasoning_comes_back_when_only_one_run_fits)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item q[] = {user("q")};
    turn(ledger, q, 1, assistant("a", "secret"), RUN(1, 2));
    eng_item items[] = {user("q"), assistant("a", NULL)};
    gw_match match = match_of(ledger, items, 2);
    cr_assert(has_tokens(&items[1], RUN(1, 2)));
    cr_assert_eq(match.restored, 1);
    cr_assert_eq(match.miss, GW_MISS_RESTORED);
    gw_ledger_close(ledger);
}

Test(ledger, several_runs_without_a_link_restore_none)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    for (int pass = 0; pass < 2; pass++) {
        if (!pass) {
            eng_item q[] = {user("q")};
            turn(ledger, q, 1, assistant("a", "one"), RUN(1, 2));
            turn(ledger, q, 1, assistant("a", "two"), RUN(3, 4));
        }
        eng_item items[] = {user("q"), assistant("a", NULL)};
        gw_match match = match_of(ledger, items, 2);
        cr_assert_null(items[1].tokens);
        cr_assert_eq(match.miss, GW_MISS_AMBIGUOUS);
        eng_item sent[] = {user("q"), assistant("a", "two")};
        match_of(ledger, sent, 2);
        cr_assert(has_tokens(&sent[1], RUN(3, 4)),
                  "reasoning that was sent and is equal names one");
        gw_ledger_close(ledger);
        ledger = open_ledger();
    }
    gw_ledger_close(ledger);
}

Test(ledger, runs_that_hide_nothing_different_are_no_ambiguity)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item q[] = {user("q")};
    turn(ledger, q, 1, assistant("a", NULL), RUN(1, 2));
    turn(ledger, q, 1, assistant("a", NULL), RUN(3, 4)); /* spelled with other tokens */
    turn(ledger, q, 1, assistant("a", NULL), RUN(1, 2)); /* the same again */
    eng_item items[] = {user("q"), assistant("a", NULL)};
    match_of(ledger, items, 2);
    cr_assert(has_tokens(&items[1], RUN(1, 2)), "the oldest");
    cr_assert_eq(count_rows("SELECT count(*) FROM runs"), 2);
    gw_ledger_close(ledger);
}

Test(ledger, a_minted_call_id_names_its_run)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    const char *one = "call_0123456789abcdef0123456789abcdef",
               *two = "call_fedcba9876543210fedcba9876543210";
    eng_item q[] = {user("q")};
    turn(ledger, q, 1, caller("", "one", one, "f", "{\"x\":1}"), RUN(1, 2));
    turn(ledger, q, 1, caller("", "two", two, "f", "{\"x\":1}"), RUN(3, 4));
    for (int pass = 0; pass < 2; pass++) {
        eng_item a[] = {user("q"), caller(NULL, NULL, one, "f", "{\"x\":1}")};
        eng_item b[] = {user("q"), caller(NULL, NULL, two, "f", "{ \"x\": 1 }")};
        eng_item edited[] = {user("q"), caller(NULL, NULL, two, "f", "{\"x\":2}")};
        eng_item unknown[] = {user("q"), caller(NULL, NULL, "call_00000000000000000000000000000000",
                                                "f", "{\"x\":1}")};
        match_of(ledger, a, 2);
        match_of(ledger, b, 2);
        match_of(ledger, edited, 2);
        gw_match match = match_of(ledger, unknown, 2);
        cr_expect(has_tokens(&a[1], RUN(1, 2)));
        cr_expect(has_tokens(&b[1], RUN(3, 4)));
        cr_expect_null(edited[1].tokens, "what the client edited wins");
        cr_expect_null(unknown[1].tokens);
        cr_expect_eq(match.miss, GW_MISS_AMBIGUOUS);
        /* Another tenant's knowledge of the id is worth nothing. */
        gw_root r = root();
        r.tenant = 2;
        eng_item stolen[] = {user("q"), caller(NULL, NULL, one, "f", "{\"x\":1}")};
        match_under(ledger, &r, stolen, 2);
        cr_expect_null(stolen[1].tokens);
        gw_ledger_close(ledger);
        ledger = open_ledger();
    }
    gw_ledger_close(ledger);
}

Test(ledger, a_minted_call_id_holds_when_the_tools_changed)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    const char *id = "call_0123456789abcdef0123456789abcdef";
    eng_item q[] = {user("q")};
    turn(ledger, q, 1, caller("", "why", id, "f", "{}"), RUN(1, 2));
    gw_root r = root();
    r.tool_count = 0;
    eng_item items[] = {user("q"), caller(NULL, NULL, id, "f", "{}"), user("r")};
    gw_match match = match_under(ledger, &r, items, 3);
    cr_assert(has_tokens(&items[1], RUN(1, 2)));
    cr_assert_eq(match.miss, GW_MISS_TOOLS);
    cr_assert_eq(match.last, -1);
    gw_ledger_close(ledger);
}

Test(ledger, planted_reasoning_stays_with_who_planted_it)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    /* The planter brings an assistant item of its own making and gets an answer under it. */
    eng_item planted[] = {user("q"), assistant("a", "PLANTED"), user("next")};
    turn(ledger, planted, 3, assistant("b", "made under it"), RUN(7, 8));
    /* Another brings the same visible items without reasoning: neither gets the plant nor what was
     * made under it. */
    eng_item plain[] = {user("q"), assistant("a", NULL), user("next"), assistant("b", NULL),
                        user("r")};
    gw_match match = match_of(ledger, plain, 5);
    cr_assert_null(plain[1].tokens);
    cr_assert_null(plain[3].tokens);
    cr_assert_eq(match.restored, 0);
    /* The planter itself goes on. */
    eng_item again[] = {user("q"), assistant("a", "PLANTED"), user("next"), assistant("b", NULL),
                        user("r")};
    match_of(ledger, again, 5);
    cr_assert(has_tokens(&again[3], RUN(7, 8)));
    gw_ledger_close(ledger);
}

Test(ledger, planted_reasoning_stays_behind_another_front_too)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    gw_root one = root(), two = root();
    two.tool_count = 0;
    eng_item planted[] = {user("q"), assistant("a", "planted"), user("r")};
    turn_with(ledger, &one, planted, 3, assistant("b", "from the planted"), RUN(1, 2));
    for (int i = 0; i < 2; i++) {
        eng_item items[] = {user("q"), assistant("a", NULL), user("r"), assistant("b", NULL)};
        match_under(ledger, i ? &two : &one, items, 4);
        cr_assert_null(items[1].tokens);
        cr_assert_null(items[3].tokens);
        eng_item own[] = {user("q"), assistant("a", "planted"), user("r"), assistant("b", NULL)};
        match_under(ledger, i ? &two : &one, own, 4);
        cr_assert_null(own[1].tokens);
        cr_assert(has_tokens(&own[3], RUN(1, 2)), "who planted it goes on from it");
    }
    gw_ledger_close(ledger);
}

Test(ledger, planted_reasoning_beside_a_generated_run)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item q[] = {user("q")};
    turn(ledger, q, 1, assistant("a", "own"), RUN(1, 2));
    eng_item planted[] = {user("q"), assistant("a", "PLANTED"), user("next")};
    gw_match match = match_of(ledger, planted, 3);
    cr_assert_null(planted[1].tokens, "what the client edited wins");
    turn(ledger, planted, 3, assistant("b", "under the plant"), RUN(7, 8));
    eng_item plain[] = {user("q"), assistant("a", NULL), user("next"), assistant("b", NULL)};
    match = match_of(ledger, plain, 4);
    cr_assert(has_tokens(&plain[1], RUN(1, 2)), "the generated one, not the plant");
    cr_assert_null(plain[3].tokens);
    cr_assert_eq(match.miss, GW_MISS_EDITED);
    gw_ledger_close(ledger);
}

Test(ledger, dropping_and_keeping_reasoning_continue_one_chain)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item q[] = {user("q")};
    turn(ledger, q, 1, assistant("a", "why"), RUN(1, 2));
    eng_item keeps[] = {user("q"), assistant("a", "why"), user("n")},
             drops[] = {user("q"), assistant(" a ", NULL), user("n")};
    gw_match one = match_of(ledger, keeps, 3), two = match_of(ledger, drops, 3);
    cr_assert(gw_digest_equal(&one.chain[3], &two.chain[3]));
    gw_ledger_close(ledger);
}

Test(ledger, a_cancelled_turn_is_recorded_with_its_tokens)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item q[] = {user("q")};
    told *t = keep(calloc(1, sizeof(*t)));
    gw_root r = root();
    told *done = turn_with(ledger, &r, q, 1, assistant("par", NULL), RUN(1));
    t->commit = done->commit;
    t->match = done->match;
    t->id = gw_id_mint("turn_");
    sem_init(&t->done, 0, 0);
    t->commit.turn = t->id.text;
    t->commit.match = &t->match;
    t->commit.status = GW_TURN_CANCELLED;
    t->commit.finish = ENG_FINISH_CANCELLED;
    t->commit.run = (const int32_t[]){5, 6, 7};
    t->commit.run_count = 3;
    cr_assert(gw_ledger_commit(ledger, &t->commit));
    sem_wait(&t->done);
    base_arena *arena = keep(base_arena_create(4096, 1 << 20));
    gw_turn_row row;
    cr_assert_eq(gw_ledger_turn(ledger, &row, 1, t->id.text, arena, NULL), BASE_OK);
    cr_assert_eq(row.status, GW_TURN_CANCELLED);
    cr_assert_eq(row.run_count, 3);
    gw_ledger_close(ledger);
}

Test(ledger, a_turn_without_output_is_recorded)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item q[] = {user("q")};
    gw_root r = root();
    told *t = turn_with(ledger, &r, q, 1, assistant(NULL, NULL), NULL, 0);
    cr_assert(t->commit.stored, "%s", t->commit.err.text);
    base_arena *arena = keep(base_arena_create(4096, 1 << 20));
    gw_turn_row row;
    cr_assert_eq(gw_ledger_turn(ledger, &row, 1, t->id.text, arena, NULL), BASE_OK);
    cr_assert_eq(row.run_count, 0);
    cr_assert_null(row.answer);
    cr_assert(gw_ledger_check(ledger, NULL));
    gw_ledger_close(ledger);
}

Test(ledger, a_damaged_run_is_never_spliced)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    eng_item q[] = {user("q")};
    turn(ledger, q, 1, assistant("a", NULL), RUN(1, 2));
    gw_ledger_close(ledger);
    sqlite3 *db = open_raw();
    sqlite3_exec(db, "UPDATE runs SET tokens=x'0105'", NULL, NULL, NULL);
    sqlite3_close(db);
    ledger = open_ledger();
    eng_item items[] = {user("q"), assistant("a", NULL)};
    match_of(ledger, items, 2);
    cr_assert_null(items[1].tokens);
    base_err err = BASE_ERR_INIT;
    cr_assert_not(gw_ledger_check(ledger, &err));
    gw_ledger_close(ledger);
}

Test(ledger, memory_is_bounded_and_the_disk_answers_for_what_left)
{
    gw_ledger *ledger = NULL;
    gw_ledger_options options = {.path = directory, .cached_ttl_s = 3600, .memory_bytes = 20000};
    cr_assert_eq(gw_ledger_open(&ledger, &options, NULL), BASE_OK);
    make_tenants(ledger);
    char names[200][16];
    for (int i = 0; i < 200; i++) {
        snprintf(names[i], sizeof(names[i]), "q%d", i);
        eng_item q[] = {user(names[i])};
        turn(ledger, q, 1, assistant("a", "r"), (const int32_t[]){i, 7}, 2);
    }
    gw_ledger_stats stats = gw_ledger_get_stats(ledger);
    cr_assert_leq(stats.memory_bytes, 20000);
    cr_assert_gt(stats.spilled, 0);
    cr_assert_eq(stats.commits, 200);
    for (int i = 0; i < 200; i++) {
        eng_item items[] = {user(names[i]), assistant("a", NULL)};
        match_of(ledger, items, 2);
        cr_assert(items[1].tokens && items[1].tokens[0] == i, "%d", i);
    }
    gw_ledger_close(ledger);
}

Test(ledger, more_alternatives_than_memory_lists)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    char thoughts[50][24];
    for (int i = 0; i < 50; i++) {
        snprintf(thoughts[i], sizeof(thoughts[i]), "thought %d", i);
        eng_item q[] = {user("q")};
        turn(ledger, q, 1, assistant("a", thoughts[i]), (const int32_t[]){i, 1}, 2);
    }
    eng_item none[] = {user("q"), assistant("a", NULL)};
    gw_match match = match_of(ledger, none, 2);
    cr_assert_null(none[1].tokens);
    cr_assert_eq(match.miss, GW_MISS_AMBIGUOUS);
    eng_item early[] = {user("q"), assistant("a", thoughts[3])};
    match_of(ledger, early, 2);
    cr_assert(early[1].tokens && early[1].tokens[0] == 3);
    gw_ledger_close(ledger);
}

/* ---- threads and kills ---- */

static void *commit_many(void *ctx)
{
    gw_ledger *ledger = ctx;
    char name[64];
    for (int i = 0; i < 100; i++) {
        snprintf(name, sizeof(name), "%lx %d", (unsigned long)pthread_self(), i);
        char *kept = keep(strdup(name));
        eng_item q[] = {user(kept)};
        turn(ledger, q, 1, assistant(kept, "r"), (const int32_t[]){i, 2, 3}, 3);
        eng_item items[] = {user(kept), assistant(kept, NULL)};
        match_of(ledger, items, 2);
        cr_assert_not_null(items[1].tokens, "found at once");
    }
    return NULL;
}

Test(ledger, many_threads_commit_and_look_up)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    pthread_t threads[8];
    for (int i = 0; i < 8; i++)
        pthread_create(&threads[i], NULL, commit_many, ledger);
    for (int i = 0; i < 8; i++)
        pthread_join(threads[i], NULL);
    gw_ledger_stats stats = gw_ledger_get_stats(ledger);
    cr_assert_eq(stats.commits, 800);
    cr_assert_eq(stats.failures, 0);
    cr_assert(gw_ledger_check(ledger, NULL));
    gw_ledger_close(ledger);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 800);
}

/* The child commits and tells each turn that was stored through the pipe, until it is killed. */
static void child(int told_fd)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    for (int i = 0;; i++) {
        char name[32];
        snprintf(name, sizeof(name), "q%d", i % 7);
        eng_item items[] = {user("start"), assistant("a", NULL), user(name)};
        told *t = turn(ledger, items, 3, assistant("a", "r"), (const int32_t[]){i, 2, 3}, 3);
        if (write(told_fd, t->id.text, sizeof(t->id.text)) < 0)
            _exit(1);
    }
}

Test(ledger, a_kill_at_any_moment_loses_nothing_that_was_told, .timeout = 120)
{
    base_arena *arena = keep(base_arena_create(4096, 64 << 20));
    for (int round = 0; round < 10; round++) {
        int fds[2];
        cr_assert_eq(pipe(fds), 0);
        pid_t pid = fork();
        if (!pid) {
            close(fds[0]);
            child(fds[1]);
        }
        close(fds[1]);
        gw_id told_id[4096];
        size_t count = 0;
        /* Let some through, then kill in the middle of whatever it does. */
        while (count < (size_t)(20 + 13 * round) &&
               read(fds[0], &told_id[count], sizeof(gw_id)) == sizeof(gw_id))
            count++;
        usleep((useconds_t)(137 * round));
        kill(pid, SIGKILL);
        while (count < 4096 && read(fds[0], &told_id[count], sizeof(gw_id)) == sizeof(gw_id))
            count++;
        waitpid(pid, NULL, 0);
        close(fds[0]);
        cr_assert_gt(count, 0);
        gw_ledger *ledger = open_ledger();
        base_err err = BASE_ERR_INIT;
        cr_assert(gw_ledger_check(ledger, &err), "%s", err.text);
        for (size_t i = 0; i < count; i++) {
            gw_turn_row row;
            cr_assert_eq(gw_ledger_turn(ledger, &row, 1, told_id[i].text, arena, &err), BASE_OK,
                         "%s", err.text);
            cr_assert_eq(row.run_count, 3);
        }
        gw_ledger_close(ledger);
    }
}

Test(ledger, the_log_stays_small)
{
    gw_ledger *ledger = open_ledger();
    make_tenants(ledger);
    static int32_t run[20000];
    for (int i = 0; i < 20000; i++)
        run[i] = 100000 + i;
    char names[300][16];
    uint64_t most = 0;
    for (int i = 0; i < 300; i++) {
        run[0] = i;
        snprintf(names[i], sizeof(names[i]), "q%d", i);
        eng_item q[] = {user(names[i])};
        turn(ledger, q, 1, assistant(names[i], NULL), run, 20000);
        gw_ledger_stats stats = gw_ledger_get_stats(ledger);
        most = stats.wal_bytes > most ? stats.wal_bytes : most;
    }
    cr_assert_lt(most, 64u << 20);
    for (int i = 0; i < 300 && gw_ledger_get_stats(ledger).wal_bytes > 1u << 20; i++)
        usleep(100000);
    cr_assert_leq(gw_ledger_get_stats(ledger).wal_bytes, 1u << 20, "cut short when idle");
    gw_ledger_close(ledger);
}
