/* What the operator's calls stand on: the last minute's numbers, tenants' limits, the list of
 * requests, and what was used by day. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gateway/ledger_admin.h"
#include "gateway/limit.h"
#include "gateway/live.h"
#include "gateway/process.h"
#include "gateway/traceparent.h"
#include "gateway/window.h"
#include "tests/gateway/ledger_rig.h"

#define SECOND 1000000000ull

/* ---- window ---- */

Test(window, quantiles_are_within_a_bucket_and_counts_are_exact)
{
    gw_window *window;
    uint64_t now = 1000 * SECOND;
    cr_assert_eq(gw_window_create(&window, now, NULL), BASE_OK);
    cr_expect_eq(gw_window_look(window, now).times[GW_WINDOW_TTFT].count, 0);
    for (int i = 1; i <= 1000; i++)
        gw_window_observe(window, GW_WINDOW_TTFT, i * 1e-3, now);
    gw_window_add(window, GW_WINDOW_OUTPUT_TOKENS, 7, now);
    gw_window_add(window, GW_WINDOW_OUTPUT_TOKENS, 5, now + 3 * SECOND);
    gw_window_view view = gw_window_look(window, now + 4 * SECOND);
    cr_expect_eq(view.times[GW_WINDOW_TTFT].count, 1000);
    cr_expect_lt(fabs(view.times[GW_WINDOW_TTFT].p50 / 0.5 - 1), GW_WINDOW_STEP - 1);
    cr_expect_lt(fabs(view.times[GW_WINDOW_TTFT].p99 / 0.99 - 1), GW_WINDOW_STEP - 1);
    cr_expect_eq(view.counts[GW_WINDOW_OUTPUT_TOKENS], 12);
    cr_expect_lt(fabs(view.seconds - 4), 1e-6);
    gw_window_destroy(window);
}

Test(window, what_is_old_is_forgotten_and_extremes_have_a_place)
{
    gw_window *window;
    uint64_t now = 77 * GW_WINDOW_SLOT_NS;
    cr_assert_eq(gw_window_create(&window, now, NULL), BASE_OK);
    for (double v = 0; v < 1e9; v = v * 10 + 1e-9)
        gw_window_observe(window, GW_WINDOW_ITL, v, now);
    gw_window_observe(window, GW_WINDOW_ITL, INFINITY, now);
    gw_window_observe(window, GW_WINDOW_ITL, NAN, now);
    cr_expect_gt(gw_window_look(window, now).times[GW_WINDOW_ITL].p99, 100);
    now += (GW_WINDOW_SLOTS - 1) * GW_WINDOW_SLOT_NS;
    cr_expect_gt(gw_window_look(window, now).times[GW_WINDOW_ITL].count, 0);
    now += GW_WINDOW_SLOT_NS;
    cr_expect_eq(gw_window_look(window, now).times[GW_WINDOW_ITL].count, 0);
    gw_window_destroy(window);
}

/* ---- limits ---- */

static bool enter(gw_limit *limit, uint64_t now, uint32_t *retry_ms)
{
    const char *what;
    return gw_limit_enter(limit, &what, retry_ms, now);
}

Test(limit, requests_at_once)
{
    gw_limit limit = {0};
    uint32_t retry;
    gw_limit_set(&limit, &(gw_limits){.requests_max = 2}, SECOND);
    cr_expect(enter(&limit, SECOND, &retry) && enter(&limit, SECOND, &retry));
    cr_expect_not(enter(&limit, SECOND, &retry));
    gw_limit_leave(&limit, 10, SECOND);
    cr_expect(enter(&limit, SECOND, &retry));
}

Test(limit, a_bucket_of_requests_fills_evenly_and_says_when)
{
    gw_limit limit = {0};
    uint32_t retry = 0;
    uint64_t now = 5 * SECOND;
    gw_limit_set(&limit, &(gw_limits){.requests_per_minute = 6}, now);
    for (int i = 0; i < 6; i++)
        cr_assert(enter(&limit, now, &retry));
    cr_assert_not(enter(&limit, now, &retry));
    cr_expect(retry >= 10000 && retry <= 10001, "%u", retry);
    cr_expect_not(enter(&limit, now + 9 * SECOND, &retry));
    cr_expect(enter(&limit, now + 10 * SECOND + 1000000, &retry));
    cr_expect_not(enter(&limit, now + 10 * SECOND + 1000000, &retry));
    now += 3600 * SECOND; /* never more than a minute's worth */
    for (int i = 0; i < 6; i++)
        cr_assert(enter(&limit, now, &retry));
    cr_assert_not(enter(&limit, now, &retry));
}

Test(limit, tokens_are_taken_when_they_are_known)
{
    gw_limit limit = {0};
    uint32_t retry = 0;
    uint64_t now = SECOND;
    gw_limit_set(&limit, &(gw_limits){.tokens_per_minute = 60}, now);
    cr_assert(enter(&limit, now, &retry));
    gw_limit_leave(&limit, 90, now);
    cr_assert_not(enter(&limit, now, &retry));
    cr_expect(retry >= 30000 && retry <= 30001, "%u", retry);
    cr_expect(enter(&limit, now + 31 * SECOND, &retry));
    gw_limit_leave(&limit, UINT64_MAX, now + 31 * SECOND);
    cr_assert_not(enter(&limit, now + 32 * SECOND, &retry));
    cr_expect_eq(retry, 59999, "no client waits longer");
}

Test(limit, what_is_left_is_told)
{
    gw_limit limit = {0};
    uint32_t retry = 0;
    uint64_t now = SECOND;
    gw_limit_set(&limit, &(gw_limits){.requests_per_minute = 6, .tokens_per_minute = 600}, now);
    cr_assert(enter(&limit, now, &retry));
    gw_limit_leave(&limit, 700, now);
    gw_limit_view view = gw_limit_look(&limit, now);
    cr_expect(view.requests.limit == 6 && view.requests.left == 5);
    cr_expect_eq(view.requests.full_ms, 10000);
    cr_expect(view.tokens.limit == 600 && view.tokens.left == 0);
    cr_expect_eq(view.tokens.full_ms, 70000);
    view = gw_limit_look(&limit, now + 20 * SECOND);
    cr_expect(view.requests.left == 6 && view.requests.full_ms == 0);
    cr_expect(view.tokens.left == 100 && view.tokens.full_ms == 50000);
    gw_limit_set(&limit, &(gw_limits){0}, now);
    view = gw_limit_look(&limit, now);
    cr_expect(view.requests.limit == 0 && view.tokens.limit == 0);
}

Test(limit, members_are_read_by_name)
{
    static const struct {
        const char *json;
        bool good;
    } rows[] = {{"{}", true},
                {"{\"requests_max\":5}", true},
                {"{\"requests_max\":null,\"tokens_per_minute\":1}", true},
                {"{\"requests_max\":0}", false},
                {"{\"requests_max\":-1}", false},
                {"{\"requests_max\":1.5}", false},
                {"{\"requests_max\":\"5\"}", false},
                {"{\"requests_max\":1000000000001}", false},
                {"{\"speed\":1}", false},
                {"[]", false}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        gw_limits limits = {.requests_max = 9};
        base_err err = BASE_ERR_INIT;
        json_t *json = json_loads(rows[i].json, 0, NULL);
        cr_expect_eq(gw_limits_read(&limits, json, &err) == BASE_OK, rows[i].good, "%s",
                     rows[i].json);
        json_decref(json);
    }
    gw_limits limits = {.requests_max = 9};
    json_t *json = json_loads("{\"requests_max\":null,\"tokens_per_minute\":1}", 0, NULL);
    base_buf out;
    base_buf_init(&out, 0);
    gw_limits_read(&limits, json, NULL);
    gw_limits_put(&out, &limits);
    base_buf_add(&out, "", 1);
    cr_expect_str_eq(out.data, "{\"requests_max\":null,\"requests_per_minute\":null,\"tokens_per_"
                               "minute\":1,\"weight\":null}");
    base_buf_deinit(&out);
    json_decref(json);
}

/* ---- requests ---- */

static gw_live_request request(int number, gw_phase phase)
{
    gw_live_request r = {.dialect = "chat", .phase = phase, .choices = 1, .finish = -1};
    snprintf(r.id.text, sizeof r.id.text, "req_%d", number);
    snprintf(r.tenant, sizeof r.tenant, "t%d", number % 2);
    return r;
}

Test(live, entries_come_change_and_go_and_the_last_ones_stay_listed)
{
    gw_events *events;
    gw_live *live;
    static gw_live_entry entries[3];
    static gw_live_request list[GW_LIVE_RECENT + 3];
    uint32_t counts[GW_PHASE_COUNT];
    uint64_t engine_ids[] = {4};
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_events_create(&events, NULL), BASE_OK);
    cr_assert_eq(gw_live_create(&live, events, NULL), BASE_OK);
    for (int i = 0; i < 3; i++) {
        gw_live_request fresh = request(i, GW_PHASE_PREPARE);
        gw_live_enter(live, &entries[i], &fresh);
    }
    gw_live_request now = request(1, GW_PHASE_DECODE);
    gw_live_change(live, &entries[1], &now);
    gw_live_step(live, &entries[1], 3);
    gw_live_phases(live, counts);
    cr_expect(counts[GW_PHASE_PREPARE] == 2 && counts[GW_PHASE_DECODE] == 1);
    cr_assert_eq(gw_live_list(live, list, 10, 10), 3);
    cr_expect(list[1].output_tokens == 3 && list[1].passes == 1);
    cr_expect_eq(gw_live_cancel(live, NULL, "req_1", &err), BASE_CONFLICT, "no engine yet");
    gw_live_submitted(live, &entries[1], engine_ids, 0);
    cr_expect_eq(gw_live_cancel(live, NULL, "req_9", &err), BASE_NOT_FOUND);
    now = request(1, GW_PHASE_DONE);
    gw_live_leave(live, &entries[1], &now);
    cr_expect_eq(gw_live_cancel(live, NULL, "req_1", &err), BASE_CONFLICT, "over");
    cr_assert_eq(gw_live_list(live, list, 10, 10), 3);
    cr_expect_str_eq(list[0].id.text, "req_1", "what ended comes first");
    cr_expect(gw_live_find(live, &now, "req_1") && now.phase == GW_PHASE_DONE);
    for (int i = 10; i < 10 + GW_LIVE_RECENT; i++) {
        gw_live_request more = request(i, GW_PHASE_QUEUE);
        gw_live_enter(live, &entries[1], &more);
        more.phase = GW_PHASE_DONE;
        gw_live_leave(live, &entries[1], &more);
    }
    cr_expect_not(gw_live_find(live, &now, "req_1"), "the ring is bounded");
    cr_assert_eq(gw_live_list(live, list, GW_LIVE_RECENT + 3, UINT32_MAX), GW_LIVE_RECENT + 2);
    cr_expect_str_eq(list[0].id.text, "req_10");
    cr_expect_str_eq(list[GW_LIVE_RECENT].id.text, "req_0");
    for (int i = 0; i < 3; i += 2) {
        now = request(i, GW_PHASE_DONE);
        gw_live_leave(live, &entries[i], &now);
    }
    cr_expect_eq(gw_live_list(live, list, 10, 0), 0);
    gw_live_destroy(live);
    gw_events_destroy(events);
}

Test(live, texts_of_clients_are_escaped)
{
    gw_live_request r = request(1, GW_PHASE_DONE);
    strcpy(r.label, "a\"b\\\n<img>");
    strcpy(r.tool, "\xff\x01");
    r.finish = ENG_FINISH_CALLS;
    base_buf out;
    base_buf_init(&out, 0);
    gw_live_put(&out, &r);
    json_t *json = json_loadb(out.data, out.length, 0, NULL);
    cr_assert_not_null(json, "%.*s", (int)out.length, out.data);
    cr_expect_str_eq(json_string_value(json_object_get(json, "label")), "a\"b\\\n<img>");
    cr_expect_str_eq(json_string_value(json_object_get(json, "finish")), "tool_calls");
    cr_expect(json_is_null(json_object_get(json, "cached_tokens")));
    json_decref(json);
    base_buf_deinit(&out);
}

Test(process, says_something_of_itself)
{
    gw_process p = gw_process_look();
    cr_expect(p.memory_bytes > 100000 && p.memory_bytes <= p.virtual_bytes);
    cr_expect(p.threads >= 1 && p.cores >= 1 && p.descriptors >= 3 && p.descriptors_max >= 3);
}

/* ---- traces ---- */

Test(traceparent, is_taken_or_ignored)
{
#define T "0af7651916cd43dd8448eb211c80319c"
#define P "b7ad6b7169203331"
    static const struct {
        const char *header;
        bool good;
    } rows[] = {{"00-" T "-" P "-01", true},
                {"00-" T "-" P "-00", true},
                {"01-" T "-" P "-01-more", true},
                {"cc-" T "-" P "-01", true},
                {"00-" T "-" P "-01-more", false},
                {"ff-" T "-" P "-01", false},
                {"00-00000000000000000000000000000000-" P "-01", false},
                {"00-" T "-0000000000000000-01", false},
                {"00-0AF7651916CD43DD8448EB211C80319C-" P "-01", false},
                {"00-" T "-" P "-0", false},
                {"00-" T "-" P "-zz", false},
                {"01-" T "-" P "-01x", false},
                {"", false},
                {NULL, false}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        gw_trace out;
        cr_expect_eq(gw_traceparent_read(&out, rows[i].header), rows[i].good, "row %zu", i);
        cr_expect_str_eq(out.id, rows[i].good ? T : "");
        cr_expect_str_eq(out.parent, rows[i].good ? P : "");
        cr_expect_eq(out.sampled, rows[i].good && i != 1, "row %zu", i);
    }
}

/* ---- what was used ---- */

static gw_ledger *book;
static base_arena *arena;

static void open_book(void)
{
    make_directory();
    book = open_ledger();
    make_tenants(book);
    arena = base_arena_create(4096, 16 << 20);
}

static void close_book(void)
{
    gw_ledger_close(book);
    base_arena_destroy(arena);
    remove_directory();
}

TestSuite(usage, .init = open_book, .fini = close_book);

static gw_sums total_of(const gw_usage_filter *filter, gw_usage_row **rows, uint32_t *count)
{
    gw_sums total;
    bool more;
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_admin_usage_list(book, rows, count, &more, &total, filter, arena, &err),
                 BASE_OK, "%s", err.text);
    return total;
}

static const gw_usage_filter every = {
    .by = GW_BY_DAY | GW_BY_TENANT | GW_BY_TOOL, .day_max = 3000000, .limit = 1000};

/* A turn that was given the result of a tool of this name. */
static void use_tool(const char *name, const char *words)
{
    eng_item items[] = {user(words),
                        caller("", NULL, "call_x", name, "{}"),
                        {.role = ENG_ROLE_TOOL, .text = text("done")}};
    turn(book, items, 3, assistant("good", NULL), RUN(5, 6, 7));
}

Test(usage, is_added_up_by_day_tenant_and_tool_and_outlives_the_turns)
{
    gw_usage_row *rows;
    uint32_t count;
    const int64_t day_ms = 86400000, day = base_wall_ms() / day_ms;
    eng_item items[] = {user("one")};
    turn(book, items, 1, assistant("hello", NULL), RUN(5, 6));
    use_tool("f", "two");
    use_tool("f", "three");
    use_tool("g", "four");
    tenant = 2;
    retention = GW_RETAIN_USAGE;
    turn(book, items, 1, assistant("hello", NULL), RUN(5));
    ended_ms = (day - 1) * day_ms;
    turn(book, items, 1, assistant("hello", NULL), RUN(5));
    gw_sums total = total_of(&every, &rows, &count);
    cr_assert_eq(count, 5);
    cr_expect(total.turns == 6 && total.output_tokens == 2 + 3 * 3 + 2 &&
              total.cached_tokens == 42);
    cr_expect(rows[0].day == day - 1 && strcmp(rows[0].tenant, "other") == 0);
    cr_expect_str_eq(rows[2].tool, "f");
    cr_expect_eq(rows[2].sums.turns, 2);
    cr_expect_eq(total_of(
                     &(gw_usage_filter){
                         .by = GW_BY_DAY, .day_min = day, .day_max = day, .tenant = 1, .limit = 1},
                     &rows, &count)
                     .turns,
                 4);
    cr_assert_eq(gw_ledger_sweep(book, base_wall_ms() + 8 * day_ms, NULL), BASE_OK);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns"), 0);
    cr_expect_eq(total_of(&every, &rows, &count).turns, 6);
    cr_assert_eq(gw_ledger_sweep(book, base_wall_ms() + (GW_USAGE_DAYS + 3) * day_ms, NULL),
                 BASE_OK);
    cr_expect_eq(total_of(&every, &rows, &count).turns, 0, "days have an end, too");
}

Test(usage, names_of_tools_are_bounded)
{
    gw_usage_row *rows;
    uint32_t count;
    char name[GW_USAGE_TOOL_MAX * 2];
    for (int i = 0; i < GW_USAGE_TOOLS + 20; i++) {
        snprintf(name, sizeof name, "tool%d", i);
        use_tool(name, name);
    }
    use_tool("tool3", "again");
    gw_sums total = total_of(&every, &rows, &count);
    cr_expect_eq(count, GW_USAGE_TOOLS + 1);
    cr_expect_eq(total.turns, GW_USAGE_TOOLS + 21);
    cr_expect_str_eq(rows[0].tool, "other");
    cr_expect_eq(rows[0].sums.turns, 20);
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = '\0';
    ended_ms = base_wall_ms() + 86400000;
    use_tool(name, "long");
    total_of(&every, &rows, &count);
    cr_expect_eq(strlen(rows[count - 1].tool), GW_USAGE_TOOL_MAX);
}

Test(usage, sessions_are_found_by_text_page_by_page_and_their_turns_in_order)
{
    eng_item items[] = {user("one")};
    told *first = turn(book, items, 1, assistant("hello", NULL), RUN(5, 6));
    eng_item more[] = {user("one"), assistant("hello", NULL), user("two")};
    told *second = turn(book, more, 3, assistant("yes", NULL), RUN(8));
    gw_session_view *rows;
    gw_turn_view *turns;
    uint32_t count;
    int64_t next;
    gw_session_filter filter = {.kind = -1, .text = "LABEL", .limit = 10};
    cr_assert_eq(gw_admin_session_list(book, &rows, &count, &next, &filter, arena, NULL), BASE_OK);
    cr_assert(count == 1 && next == 0);
    cr_expect(rows[0].sums.turns == 2 && rows[0].sums.output_tokens == 3 && rows[0].tenant == 1);
    filter.text = "nowhere";
    cr_assert_eq(gw_admin_session_list(book, &rows, &count, &next, &filter, arena, NULL), BASE_OK);
    cr_expect_eq(count, 0);
    gw_session_view session;
    cr_assert_eq(
        gw_admin_session_read(book, &session, "sess_0123456789abcdef01234567", arena, NULL),
        BASE_OK);
    cr_expect_eq(gw_admin_session_read(book, &session, "sess_no", arena, NULL), BASE_NOT_FOUND);
    cr_assert_eq(
        gw_admin_turn_list(book, &turns, &count, &next, session.row, 0, 1, true, arena, NULL),
        BASE_OK);
    cr_assert(count == 1 && next == turns[0].row);
    cr_expect_str_eq(turns[0].id.text, first->id.text);
    cr_assert_eq(
        gw_admin_turn_list(book, &turns, &count, &next, session.row, next, 1, true, arena, NULL),
        BASE_OK);
    cr_assert(count == 1 && next == 0);
    cr_expect_str_eq(turns[0].id.text, second->id.text);
    cr_expect_str_eq(turns[0].parent.text, first->id.text);
    gw_turn_view view;
    cr_expect_eq(gw_admin_turn_read(book, &view, "turn_no", arena, NULL), BASE_NOT_FOUND);
}
