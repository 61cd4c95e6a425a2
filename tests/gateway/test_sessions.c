/* Native sessions with a scripted engine: what a turn stands on, what moves the head, lines,
 * appended results and their prefills, exports. */
#include "fake.h"

#include "gateway/api_sessions.h"
#include "gateway/append.h"
#include "gateway/ledger_session.h"
#include "gateway/openapi.h"
#include "gateway/pin.h"
#include "gateway/seal.h"

#define TOOLS                                                                                      \
    ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":"    \
    "\"object\"}}}]"

static const char *query = "";

const char *gw_exchange_query(const gw_exchange *exchange)
{
    (void)exchange;
    return query;
}

static uint64_t pinned_seconds;
static uint32_t pinned_tokens;

void eng_pin(eng_engine *e, uint64_t space, const int32_t *tokens, uint32_t count, uint64_t seconds)
{
    (void)e;
    (void)space;
    (void)tokens;
    pinned_tokens = count;
    pinned_seconds = seconds;
}

static void start(void)
{
    base_err err = BASE_ERR_INIT;
    fake_start();
    fake_conf.sessions_count_max = 20;
    fake_conf.sessions_items_max = 10;
    fake_conf.sessions_queue_wait_ms = 60000;
    fake_conf.sessions_append_bytes_max = 3000;
    fake_conf.sessions_append_bytes_total_max = 5000;
    fake_conf.sessions_pin_seconds_max = 100;
    const gw_pins_options pins = {.page_count = 40, .percent_max = 50, .tenant_percent_max = 25};
    cr_assert_eq(gw_pins_create(&app.pins, &pins, &err), BASE_OK);
    cr_assert_eq(gw_appends_create(&app.appends, &app, &err), BASE_OK);
    cr_assert_eq(gw_seal_open(&app.seal, fake_directory, &err), BASE_OK, "%s", err.text);
}

static void stop(void)
{
    fake_stop();
    gw_pins_destroy(app.pins);
    gw_appends_destroy(app.appends);
    gw_seal_close(app.seal);
}

TestSuite(sessions, .init = start, .fini = stop, .timeout = 30);

typedef void (*handler)(gw_app *app, gw_exchange *exchange);

static gw_exchange *send_to(handler handle, const char *path, const char *body)
{
    gw_exchange *e = calloc(1, sizeof *e);
    e->body = body;
    e->length = strlen(body);
    e->path = path;
    e->headers[0][0] = "content-type";
    e->headers[0][1] = "application/json";
    handle(&app, e);
    return e;
}

/* A call that needs no engine. */
static json_t *call(handler handle, const char *path, const char *body, int status)
{
    gw_exchange *e = send_to(handle, path, body);
    pump_until_over(e);
    cr_assert_eq(e->status, status, "%d: %s", e->status, e->out.data);
    json_t *json = answer_json(e);
    free_exchange(e);
    return json;
}

/* Paths of one session. */
typedef struct session {
    char id[GW_ID_MAX], path[96], turns[96], append[96], fork[96], export[96], pin[96];
} session;

static session of_id(const char *id)
{
    session s;
    snprintf(s.id, sizeof s.id, "%s", id);
    snprintf(s.path, sizeof s.path, "/v1/sessions/%s", id);
    snprintf(s.turns, sizeof s.turns, "/v1/sessions/%s/turns", id);
    snprintf(s.append, sizeof s.append, "/v1/sessions/%s/append", id);
    snprintf(s.fork, sizeof s.fork, "/v1/sessions/%s/fork", id);
    snprintf(s.export, sizeof s.export, "/v1/sessions/%s/export", id);
    snprintf(s.pin, sizeof s.pin, "/v1/sessions/%s/pin", id);
    return s;
}

static session make(void)
{
    json_t *json =
        call(gw_api_sessions_create, "/v1/sessions", "{\"model\":\"fake\"" TOOLS "}", 200);
    session s = of_id(text_at(json, "id"));
    json_decref(json);
    return s;
}

#define HI "{\"items\":[{\"role\":\"user\",\"content\":\"hi\"}]}"

/* A turn that says `text`, and calls f if asked to; the answer. */
static json_t *run_turn(const session *s, const char *body, const char *text, bool calls)
{
    gw_exchange *e = send_to(gw_api_sessions_turn, s->turns, body);
    cr_assert(admit(e), "%s", e->out.data);
    engine_started(0);
    engine_part(ENG_PART_TEXT, 0, text);
    if (calls) {
        engine_part(ENG_PART_CALL_BEGIN, 0, "f");
        engine_part(ENG_PART_CALL_ARGS, 0, "{}");
        engine_part(ENG_PART_CALL_END, 0, "");
    }
    uint32_t count = (uint32_t)strlen(text) + (calls ? 3 : 0);
    engine_done(calls ? ENG_FINISH_CALLS : ENG_FINISH_STOP, count + 1, -1, count);
    pump_until_over(e);
    cr_assert_eq(e->status, 200, "%s", e->out.data);
    json_t *json = answer_json(e);
    free_exchange(e);
    return json;
}

/* The prefill that follows a turn with calls, or a piece: its tokens, the last one apart. */
static uint32_t end_prefill(int32_t *last)
{
    uint64_t until = base_now_ns() + 2000000000;
    while (!atomic_load(&engine.waiting) && base_now_ns() < until)
        pump(5);
    cr_assert(atomic_load(&engine.waiting), "a prefill was submitted");
    atomic_store(&engine.waiting, 0);
    cr_assert(engine.request.prefill_only);
    uint32_t count = engine.request.token_count;
    if (last)
        *last = engine.request.tokens[count - 1];
    engine_event((eng_event){.kind = ENG_EVENT_DONE,
                             .finish = ENG_FINISH_STOP,
                             .usage = {.prompt_tokens = count, .cached_tokens = 1},
                             .stop_index = -1});
    pump_all();
    return count;
}

static char *head_of(const session *s)
{
    json_t *json = call(gw_api_sessions_get, s->path, "", 200);
    char *head = strdup(text_at(json, "head"));
    json_decref(json);
    return head;
}

Test(sessions, a_turn_stands_on_the_tokens_of_the_one_before)
{
    session s = make();
    json_t *one = run_turn(&s, HI, "Hello", false);
    uint32_t count = engine.request.token_count;
    /* "Hello" and the end. */
    gw_exchange *e = send_to(gw_api_sessions_turn, s.turns, HI);
    cr_assert(admit(e));
    cr_assert_eq(engine.spliced, 1);
    cr_assert_str_eq(engine.rendered.data, "assistant:SPLICED|user:hi|",
                     "nothing else is rendered");
    cr_assert_gt(engine.request.token_count, count + 6);
    cr_assert_eq(engine.request.tokens[count], 'H');
    cr_assert_eq(engine.request.tokens[count + 5], 500);
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e);
    json_t *two = answer_json(e);
    cr_assert_str_eq(text_at(two, "parent"), text_at(one, "id"));
    cr_assert_str_eq(text_at(two, "items.0.content"), "hi");
    char *head = head_of(&s);
    cr_assert_str_eq(head, text_at(two, "id"));
    free(head);
    json_decref(one);
    json_decref(two);
    free_exchange(e);
}

Test(sessions, what_failed_or_was_left_does_not_move_the_head)
{
    session s = make();
    json_t *one = run_turn(&s, HI, "Hello", false);
    gw_exchange *e = send_to(gw_api_sessions_turn, s.turns, HI);
    cr_assert(admit(e));
    engine_done(ENG_FINISH_ERROR, 0, -1, 0);
    pump_until_over(e);
    cr_assert_eq(e->status, 500);
    free_exchange(e);
    e = send_to(gw_api_sessions_turn, s.turns, HI);
    cr_assert(admit(e));
    engine_part(ENG_PART_TEXT, 0, "Hel");
    pump_all();
    leave(e);
    engine_done(ENG_FINISH_CANCELLED, 3, -1, 3);
    pump_all();
    free_exchange(e);
    char *head = head_of(&s);
    cr_assert_str_eq(head, text_at(one, "id"));
    free(head);
    json_decref(one);
    json_decref(run_turn(&s, HI, "again", false)); /* and the session is free */
}

Test(sessions, turns_that_say_the_same_make_calls_of_their_own)
{
    session a = make(), b = make();
    json_t *one = run_turn(&a, HI, "x", true);
    end_prefill(NULL);
    json_t *two = run_turn(&b, HI, "x", true);
    end_prefill(NULL);
    cr_assert_str_neq(text_at(one, "items.1.tool_calls.0.id"),
                      text_at(two, "items.1.tool_calls.0.id"));
    char body[256];
    snprintf(body, sizeof body,
             "{\"items\":[{\"role\":\"tool\",\"tool_call_id\":\"%s\",\"content\":\"7\"}]}",
             text_at(two, "items.1.tool_calls.0.id"));
    json_decref(call(gw_api_sessions_turn, a.turns, body, 400));
    json_decref(run_turn(&b, body, "seven", false));
    query = "order=asc";
    json_t *list = call(gw_api_sessions_turns, b.turns, "", 200);
    cr_assert_str_eq(text_at(list, "data.0.items.1.tool_calls.0.id"),
                     text_at(two, "items.1.tool_calls.0.id"));
    cr_assert_str_eq(text_at(list, "data.1.items.0.tool_call_id"),
                     text_at(two, "items.1.tool_calls.0.id"));
    json_decref(list);
    json_decref(one);
    json_decref(two);
}

Test(sessions, a_second_turn_waits_and_a_third_is_refused_where_two_wait)
{
    session s = make();
    gw_exchange *e[4];
    e[0] = send_to(gw_api_sessions_turn, s.turns, HI);
    cr_assert(admit(e[0]));
    for (int i = 1; i < 4; i++) {
        e[i] = send_to(gw_api_sessions_turn, s.turns, HI);
        pump_all();
    }
    cr_assert_eq(engine.submitted, 1);
    cr_assert(e[3]->ended);
    cr_assert_eq(e[3]->status, 409);
    cr_assert_not_null(strstr(e[3]->answer_headers, "x-should-retry: true"));
    cr_assert_not_null(strstr(e[3]->answer_headers, "retry-after-ms: "));
    json_t *refused = answer_json(e[3]);
    cr_assert_str_eq(text_at(refused, "error.code"), "conversation_locked");
    json_decref(refused);
    cr_assert_eq(gw_locks_waiting(app.locks), 2);
    leave(e[1]);
    cr_assert_eq(gw_locks_waiting(app.locks), 1, "out of line at once");
    json_decref(call(gw_api_sessions_delete, s.path, "", 409));
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e[0]);
    cr_assert(admit(e[2]));
    cr_assert_eq(engine.submitted, 2);
    cr_assert_eq(engine.spliced, 1, "it stands on the first");
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e[2]);
    cr_assert_eq(e[2]->status, 200);
    for (int i = 0; i < 4; i++)
        free_exchange(e[i]);
}

Test(sessions, who_waits_too_long_is_told_to_come_again)
{
    session s = make();
    fake_conf.sessions_queue_wait_ms = 50;
    gw_exchange *first = send_to(gw_api_sessions_turn, s.turns, HI);
    cr_assert(admit(first));
    gw_exchange *second = send_to(gw_api_sessions_turn, s.turns, HI);
    pump_until_over(second);
    cr_assert_eq(second->status, 409);
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(first);
    cr_assert_eq(first->status, 200);
    free_exchange(first);
    free_exchange(second);
}

Test(sessions, pieces_of_a_result_are_prefilled_and_become_its_content)
{
    session s = make();
    json_t *one = run_turn(&s, HI, "x", true);
    const char *id = text_at(one, "items.1.tool_calls.0.id");
    uint32_t known = engine.request.token_count + 5; /* x, f, {}, end */
    cr_assert_geq(end_prefill(NULL), known, "all of the turn before");
    char text[1001], body[1200];
    memset(text, 'w', 1000);
    text[1000] = '\0';
    snprintf(body, sizeof body, "{\"call_id\":\"%s\",\"text\":\"%s\"}", id, text);
    json_t *now = call(gw_api_sessions_append, s.append, body, 200);
    cr_assert_eq(json_integer_value(at(now, "received_bytes")), 1000);
    json_decref(now);
    int32_t last;
    uint32_t some = end_prefill(&last);
    cr_assert_gt(some, known + 800);
    cr_assert_lt(some, known + 1000, "not up to the end, which may change");
    cr_assert_eq(last, 'w');
    /* A turn that comes during a prefill waits for it. */
    snprintf(body, sizeof body, "{\"call_id\":\"%s\",\"text\":\"%s\",\"done\":true}", id, text);
    now = call(gw_api_sessions_append, s.append, body, 200);
    cr_assert_eq(json_integer_value(at(now, "prefilled_tokens")), some);
    json_decref(now);
    for (int i = 0; i < 200 && !atomic_load(&engine.waiting); i++)
        pump(5);
    cr_assert(engine.request.prefill_only);
    uint32_t whole = engine.request.token_count;
    snprintf(body, sizeof body, "{\"items\":[{\"role\":\"tool\",\"tool_call_id\":\"%s\"}]}", id);
    int submitted = engine.submitted;
    gw_exchange *e = send_to(gw_api_sessions_turn, s.turns, body);
    pump_all();
    cr_assert_eq(engine.submitted, submitted);
    end_prefill(NULL);
    cr_assert(admit(e));
    cr_assert_eq(engine.submitted, submitted + 1);
    cr_assert_eq(engine.request.token_count, whole, "the prefill ran over the very prompt");
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e);
    json_t *two = answer_json(e);
    cr_assert_eq(strlen(text_at(two, "items.0.content")), 2000);
    json_decref(two);
    free_exchange(e);
    json_decref(one);
    gw_append_stats stats = gw_append_get_stats(app.appends);
    cr_assert_eq(stats.bytes, 0, "taken");
    cr_assert_gt(stats.prefilled_tokens, 0);
}

Test(sessions, appended_results_are_bounded_and_the_oldest_give_way)
{
    gw_append_state now;
    base_err err = BASE_ERR_INIT;
    char text[2000];
    memset(text, 'x', sizeof text);
    base_arena *arena = base_arena_create(4096, 1 << 20);
    const gw_append_key a = {1, "sess_a", "turn_1"}, b = {1, "sess_b", "turn_1"},
                        c = {1, "sess_c", "turn_1"}, newer = {1, "sess_a", "turn_2"},
                        foreign = {2, "sess_b", "turn_1"};
    eng_text got;
    cr_assert_eq(gw_append_put(app.appends, &now, &a, "call_1", text, 2000, false, &err), BASE_OK);
    cr_assert_eq(gw_append_put(app.appends, &now, &a, "call_1", text, 1001, false, &err),
                 BASE_TOO_LONG);
    cr_assert_str_eq(err.param, "text");
    cr_assert_eq(gw_append_put(app.appends, &now, &b, "call_1", text, 2000, true, NULL), BASE_OK);
    cr_assert_eq(gw_append_put(app.appends, &now, &b, "call_1", "y", 1, true, NULL), BASE_CONFLICT);
    cr_assert_not(gw_append_get(app.appends, &got, &foreign, "call_1", arena));
    cr_assert(gw_append_get(app.appends, &got, &a, "call_1", arena));
    cr_assert_eq(gw_append_put(app.appends, &now, &c, "call_1", text, 2000, false, NULL), BASE_OK);
    cr_assert_not(gw_append_get(app.appends, &got, &a, "call_1", arena), "it was the oldest");
    cr_assert(gw_append_get(app.appends, &got, &b, "call_1", arena));
    cr_assert_eq(got.length, 2000);
    cr_assert_eq(gw_append_put(app.appends, &now, &a, "call_1", "old", 3, false, NULL), BASE_OK);
    cr_assert_eq(gw_append_put(app.appends, &now, &newer, "call_2", "new", 3, false, NULL),
                 BASE_OK);
    cr_assert_not(gw_append_get(app.appends, &got, &a, "call_1", arena), "another head's");
    gw_append_drop(app.appends, 1, "sess_a");
    gw_append_drop(app.appends, 1, "sess_b");
    gw_append_drop(app.appends, 1, "sess_c");
    cr_assert_eq(gw_append_get_stats(app.appends).bytes, 0);
    cr_assert_eq(gw_append_get_stats(app.appends).sessions, 0);
    base_arena_destroy(arena);
}

Test(sessions, a_fork_keeps_what_it_stands_on)
{
    session s = make();
    json_t *one = run_turn(&s, HI, "Hello", false);
    json_decref(run_turn(&s, HI, "more", false));
    char body[128];
    snprintf(body, sizeof body, "{\"turn\":\"%s\"}", text_at(one, "id"));
    json_t *fork = call(gw_api_sessions_fork, s.fork, body, 200);
    session f = of_id(text_at(fork, "id"));
    cr_assert_str_eq(text_at(fork, "forked_from.session"), s.id);
    json_decref(fork);
    json_decref(call(gw_api_sessions_delete, s.path, "", 200));
    json_decref(call(gw_api_sessions_get, s.path, "", 404));
    json_decref(run_turn(&f, HI, "on", false));
    base_err err = BASE_ERR_INIT;
    cr_assert(gw_ledger_check(app.ledger, &err), "%s", err.text);
    json_t *list = call(gw_api_sessions_turns, f.turns, "", 200);
    cr_assert_eq(json_array_size(at(list, "data")), 2);
    json_decref(list);
    json_decref(call(gw_api_sessions_delete, f.path, "", 200));
    base_arena *arena = base_arena_create(4096, 1 << 20);
    gw_turn_row row;
    cr_assert_eq(gw_ledger_turn(app.ledger, &row, 1, text_at(one, "id"), arena, NULL),
                 BASE_NOT_FOUND, "it went with its last session");
    cr_assert(gw_ledger_check(app.ledger, &err), "%s", err.text);
    base_arena_destroy(arena);
    json_decref(one);
}

Test(sessions, an_export_brings_tokens_back_only_as_it_was)
{
    session s = make();
    json_decref(run_turn(&s, HI, "one", false));
    json_decref(run_turn(&s, HI, "two", false));
    json_t *copy = call(gw_api_sessions_export, s.export, "", 200);
    char *text = json_dumps(copy, JSON_INDENT(2));
    json_t *back = call(gw_api_sessions_import, "/v1/sessions/import", text, 200);
    cr_assert(json_is_true(at(back, "imported.tokens")));
    cr_assert_eq(json_integer_value(at(back, "turns")), 2);
    session again = of_id(text_at(back, "id"));
    json_decref(back);
    json_decref(run_turn(&again, HI, "three", false));
    cr_assert_str_eq(engine.rendered.data, "assistant:SPLICED|user:hi|");
    free(text);
    json_object_set_new(json_array_get(at(copy, "items"), 0), "content", json_string("ho"));
    text = json_dumps(copy, 0);
    back = call(gw_api_sessions_import, "/v1/sessions/import", text, 200);
    cr_assert(json_is_false(at(back, "imported.tokens")));
    cr_assert_eq(json_integer_value(at(back, "turns")), 0);
    again = of_id(text_at(back, "id"));
    json_decref(back);
    json_decref(run_turn(&again, HI, "three", false));
    cr_assert_str_eq(engine.rendered.data, "user:ho|assistant:one|user:hi|assistant:two|user:hi|");
    base_err err = BASE_ERR_INIT;
    cr_assert(gw_ledger_check(app.ledger, &err), "%s", err.text);
    free(text);
    json_decref(copy);
}

Test(sessions, pins_and_their_bounds)
{
    session s = make();
    json_decref(run_turn(&s, HI, "Hello", false));
    uint32_t count = engine.request.token_count;
    json_decref(call(gw_api_sessions_pin, s.pin, "{\"seconds\":7}", 200));
    cr_assert_eq(pinned_seconds, 7);
    cr_assert_eq(pinned_tokens, count + 6);
    json_t *refused = call(gw_api_sessions_pin, s.pin, "{\"seconds\":101}", 400);
    cr_assert_str_eq(text_at(refused, "error.param"), "seconds");
    json_decref(refused);
}

/* 40 pages, of which pins may hold 20 and one tenant's 10; a session has 1. */
Test(sessions, pins_crowd_nobody_out)
{
    session s[12];
    for (int i = 0; i < 11; i++) {
        s[i] = make();
        json_decref(run_turn(&s[i], HI, "Hello", false));
    }
    for (int i = 0; i < 10; i++) {
        json_decref(call(gw_api_sessions_pin, s[i].pin, "{\"seconds\":50}", 200));
        json_decref(call(gw_api_sessions_pin, s[i].pin, "{\"seconds\":60}", 200)); /* one pin */
    }
    gw_pins_stats stats = gw_pins_get_stats(app.pins, base_now_ns());
    cr_assert_eq(stats.sessions, 10);
    cr_assert_eq(stats.pages, 10);
    pinned_seconds = 99;
    json_t *refused = call(gw_api_sessions_pin, s[10].pin, "{\"seconds\":5}", 429);
    cr_assert_str_eq(text_at(refused, "error.code"), "pin_limit");
    cr_assert_not_null(strstr(text_at(refused, "error.message"), "pin_tenant_percent_max"));
    json_decref(refused);
    cr_assert_eq(pinned_seconds, 99, "the engine was told of it");
    json_t *row = call(gw_api_sessions_get, s[10].path, "", 200);
    cr_assert(json_is_null(at(row, "pinned_until")));
    json_decref(row);
    /* What is unpinned or deleted makes room, */
    json_decref(call(gw_api_sessions_pin, s[0].pin, "{\"seconds\":0}", 200));
    json_decref(call(gw_api_sessions_pin, s[10].pin, "{\"seconds\":5}", 200));
    json_decref(call(gw_api_sessions_pin, s[0].pin, "{\"seconds\":5}", 429));
    json_decref(call(gw_api_sessions_delete, s[1].path, "", 200));
    json_decref(call(gw_api_sessions_pin, s[0].pin, "{\"seconds\":5}", 200));
    /* and so does what has run out. */
    stats = gw_pins_get_stats(app.pins, base_now_ns() + 55000000000);
    cr_assert_eq(stats.sessions, 8);
    cr_assert_eq(stats.refused, 2);
    /* All tenants have a bound, too. */
    uint64_t now = base_now_ns();
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_pin_put(app.pins, 2, "a", 10, now + 1000, now, &err), BASE_OK);
    cr_assert_eq(gw_pin_put(app.pins, 3, "a", 3, now + 1000, now, &err), BASE_FULL);
    cr_assert_not_null(strstr(err.text, "sessions.pin_percent_max"), "%s", err.text);
    cr_assert_eq(gw_pin_put(app.pins, 3, "a", 2, now + 1000, now, NULL), BASE_OK);
    cr_assert_eq(gw_pin_put(app.pins, 3, "b", 3, now + 3000, now + 2000, NULL), BASE_OK);
}

Test(sessions, a_tenant_has_so_many)
{
    for (int i = 0; i < 20; i++)
        make();
    json_t *refused = call(gw_api_sessions_create, "/v1/sessions", "{\"model\":\"fake\"}", 429);
    cr_assert_str_eq(text_at(refused, "error.code"), "session_limit");
    json_decref(refused);
    cr_assert_eq(gw_ledger_get_stats(app.ledger).native_sessions, 20);
}

Test(sessions, the_documents_are_one)
{
    cr_assert_not_null(gw_openapi_text(), "no two of them describe the same path or schema");
}
