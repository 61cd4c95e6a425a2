/* Turns from body to last record, with a scripted engine: orders, ends, cuts, failures. */
#include "fake.h"

#include <sqlite3.h>

TestSuite(turn, .init = fake_start, .fini = fake_stop, .timeout = 20);

#define HELLO "{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define TOOLS                                                                                      \
    ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":"    \
    "\"object\"}}}]"

static int64_t count_rows(const char *sql)
{
    char path[128];
    sqlite3 *db;
    sqlite3_stmt *s;
    snprintf(path, sizeof(path), "%s/whimbrel.db", fake_directory);
    cr_assert_eq(sqlite3_open(path, &db), SQLITE_OK);
    cr_assert_eq(sqlite3_prepare_v2(db, sql, -1, &s, NULL), SQLITE_OK, "%s", sqlite3_errmsg(db));
    cr_assert_eq(sqlite3_step(s), SQLITE_ROW);
    int64_t value = sqlite3_column_int64(s, 0);
    sqlite3_finalize(s);
    sqlite3_close(db);
    return value;
}

/* The records of a stream, "data: " taken off; comments count as records. Borrowed from `copy`,
 * which the caller frees. */
static size_t records(gw_exchange *exchange, char **copy, char *out[], size_t max)
{
    size_t count = 0;
    *copy = strdup(exchange->out.data ? exchange->out.data : "");
    for (char *rest = *copy, *end; count < max && (end = strstr(rest, "\n\n")); rest = end + 2) {
        *end = '\0';
        out[count++] = strncmp(rest, "data: ", 6) == 0 ? rest + 6 : rest;
    }
    return count;
}

static json_t *parse(const char *text)
{
    json_error_t error;
    json_t *json = json_loads(text, 0, &error);
    cr_assert_not_null(json, "%s in %s", error.text, text);
    return json;
}

/* ---- whole answers ---- */

Test(turn, a_whole_answer_has_the_wire_shape)
{
    gw_exchange *e = send_text(HELLO ",\"seed\":7}");
    cr_assert(admit(e));
    cr_assert_eq(engine.request.sampling.seed, 7);
    engine_started(3);
    engine_part(ENG_PART_REASONING, 0, "why");
    engine_part(ENG_PART_TEXT, 0, "Hel");
    engine_part(ENG_PART_TEXT, 0, "lo\"\n");
    engine_done(ENG_FINISH_STOP, 9, -1, 10);
    pump_until_over(e);
    cr_assert_eq(e->status, 200);
    json_t *json = answer_json(e);
    cr_assert_str_eq(text_at(json, "object"), "chat.completion");
    cr_assert_eq(strncmp(text_at(json, "id"), "chatcmpl-", 9), 0);
    cr_assert_str_eq(text_at(json, "model"), "fake");
    cr_assert_eq(strncmp(text_at(json, "system_fingerprint"), "fp_", 3), 0);
    cr_assert_str_eq(text_at(json, "choices.0.message.content"), "Hello\"\n");
    cr_assert_str_eq(text_at(json, "choices.0.message.reasoning_content"), "why");
    cr_assert_null(at(json, "choices.0.message.reasoning"));
    cr_assert_null(at(json, "choices.0.message.tool_calls"), "no key without calls");
    cr_assert(json_is_null(at(json, "choices.0.message.refusal")));
    cr_assert(json_is_null(at(json, "choices.0.logprobs")));
    cr_assert_str_eq(text_at(json, "choices.0.finish_reason"), "stop");
    cr_assert_eq(json_integer_value(at(json, "usage.completion_tokens")), 9);
    cr_assert_eq(json_integer_value(at(json, "usage.total_tokens")),
                 9 + engine.request.token_count);
    cr_assert_eq(json_integer_value(at(json, "usage.prompt_tokens_details.cached_tokens")), 3);
    cr_assert_eq(json_integer_value(at(json, "usage.completion_tokens_details.reasoning_tokens")),
                 1);
    cr_assert(json_is_true(at(json, "usage.whimbrel.stored")));
    cr_assert_eq(json_integer_value(at(json, "usage.whimbrel.accepted")), 4);
    cr_assert_str_eq(text_at(json, "usage.whimbrel.backend"), "cpu-fake");
    base_arena *arena = base_arena_create(4096, 1 << 20);
    gw_turn_row row;
    cr_assert_eq(
        gw_ledger_turn(app.ledger, &row, 1, text_at(json, "usage.whimbrel.turn"), arena, NULL),
        BASE_OK);
    cr_assert_eq(row.run_count, 11, "3 + 3 + 4 bytes and the end");
    cr_assert_eq(row.seed, 7);
    cr_assert_eq(row.step_count, 4);
    base_arena_destroy(arena);
    json_decref(json);
    free_exchange(e);
}

Test(turn, seeds_are_drawn_when_none_is_given)
{
    uint64_t seeds[2];
    for (int i = 0; i < 2; i++) {
        gw_exchange *e = send_text(HELLO "}");
        cr_assert(admit(e));
        seeds[i] = engine.request.sampling.seed;
        engine_done(ENG_FINISH_STOP, 1, -1, 0);
        pump_until_over(e);
        free_exchange(e);
    }
    cr_assert_neq(seeds[0], seeds[1]);
    cr_assert_lt(seeds[0], 1ull << 53);
}

Test(turn, calls_have_minted_ids_and_the_reason_tool_calls)
{
    gw_exchange *e = send_text(HELLO TOOLS "}");
    cr_assert(admit(e));
    engine_part(ENG_PART_CALL_BEGIN, 0, "f");
    engine_part(ENG_PART_CALL_ARGS, 0, "{\"a\":");
    engine_part(ENG_PART_CALL_ARGS, 0, "1}");
    engine_part(ENG_PART_CALL_END, 0, "");
    engine_part(ENG_PART_CALL_BEGIN, 1, "f");
    engine_part(ENG_PART_CALL_ARGS, 1, "{}");
    engine_part(ENG_PART_CALL_END, 1, "");
    engine_done(ENG_FINISH_CALLS, 9, -1, 12);
    pump_until_over(e);
    json_t *json = answer_json(e);
    cr_assert_str_eq(text_at(json, "choices.0.finish_reason"), "tool_calls");
    cr_assert(json_is_null(at(json, "choices.0.message.content")));
    cr_assert_eq(json_array_size(at(json, "choices.0.message.tool_calls")), 2);
    cr_assert_str_eq(text_at(json, "choices.0.message.tool_calls.0.function.arguments"),
                     "{\"a\":1}");
    const char *one = text_at(json, "choices.0.message.tool_calls.0.id"),
               *two = text_at(json, "choices.0.message.tool_calls.1.id");
    cr_assert_eq(strlen(one), 5 + 32);
    cr_assert_str_neq(one, two);
    json_decref(json);
    free_exchange(e);
}

/* ---- streams ---- */

Test(turn, a_stream_has_the_records_in_order)
{
    gw_exchange *e =
        send_text(HELLO TOOLS ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    cr_assert(admit(e));
    cr_assert(e->begun, "headers go out with the admission");
    cr_assert_not_null(
        strstr(e->answer_headers, "content-type: text/event-stream; charset=utf-8\n"));
    cr_assert_not_null(strstr(e->answer_headers, "cache-control: no-cache, no-transform\n"));
    engine_started(3);
    engine_part(ENG_PART_REASONING, 0, "why");
    engine_part(ENG_PART_TEXT, 0, "Hi");
    engine_part(ENG_PART_CALL_BEGIN, 0, "f");
    engine_part(ENG_PART_CALL_ARGS, 0, "{\"a\":");
    engine_part(ENG_PART_CALL_ARGS, 0, "1}");
    engine_part(ENG_PART_CALL_END, 0, "");
    engine_done(ENG_FINISH_CALLS, 9, -1, 14);
    pump_until_over(e);
    char *copy, *list[32];
    size_t count = records(e, &copy, list, 32);
    cr_assert_eq(count, 9, "%s", e->out.data);
    cr_assert_eq(e->writes, 9, "one write a record");
    json_t *json[8];
    for (int i = 0; i < 8; i++) {
        json[i] = parse(list[i]);
        cr_assert_str_eq(text_at(json[i], "id"), text_at(json[0], "id"));
        cr_assert_str_eq(text_at(json[i], "object"), "chat.completion.chunk");
        cr_assert(json_equal(at(json[i], "created"), at(json[0], "created")));
        cr_assert_str_eq(text_at(json[i], "model"), "fake");
        if (i < 7)
            cr_assert(json_is_null(at(json[i], "usage")), "record %d", i);
    }
    cr_assert_str_eq(text_at(json[0], "choices.0.delta.role"), "assistant");
    cr_assert(json_is_string(at(json[0], "choices.0.delta.content")));
    cr_assert_str_eq(text_at(json[1], "choices.0.delta.reasoning_content"), "why");
    cr_assert_str_eq(text_at(json[2], "choices.0.delta.content"), "Hi");
    cr_assert_str_eq(text_at(json[3], "choices.0.delta.tool_calls.0.function.name"), "f");
    cr_assert_str_eq(text_at(json[3], "choices.0.delta.tool_calls.0.type"), "function");
    cr_assert_eq(strlen(text_at(json[3], "choices.0.delta.tool_calls.0.id")), 37);
    cr_assert_str_eq(text_at(json[4], "choices.0.delta.tool_calls.0.function.arguments"),
                     "{\"a\":");
    cr_assert_null(at(json[4], "choices.0.delta.tool_calls.0.id"));
    cr_assert_null(at(json[4], "choices.0.delta.tool_calls.0.function.name"));
    cr_assert_str_eq(text_at(json[6], "choices.0.finish_reason"), "tool_calls");
    cr_assert_eq(json_object_size(at(json[6], "choices.0.delta")), 0);
    cr_assert_eq(json_array_size(at(json[7], "choices")), 0);
    cr_assert_eq(json_integer_value(at(json[7], "usage.completion_tokens")), 9);
    cr_assert_str_eq(list[8], "[DONE]");
    for (int i = 0; i < 8; i++)
        json_decref(json[i]);
    free(copy);
    free_exchange(e);
}

Test(turn, no_usage_record_unless_asked_for)
{
    gw_exchange *e = send_text(HELLO ",\"stream\":true}");
    cr_assert(admit(e));
    engine_part(ENG_PART_TEXT, 0, "Hi");
    engine_done(ENG_FINISH_LENGTH, 2, -1, 2);
    pump_until_over(e);
    cr_assert_null(strstr(e->out.data, "usage"));
    cr_assert_not_null(strstr(e->out.data, "\"finish_reason\":\"length\""));
    free_exchange(e);
}

Test(turn, the_end_is_told_after_the_commit)
{
    gw_exchange *e = send_text(HELLO ",\"stream\":true}");
    cr_assert(admit(e));
    engine_part(ENG_PART_TEXT, 0, "Hi");
    /* A lock of another program holds the writer up: nothing that tells an end may come meanwhile.
     */
    char path[128];
    sqlite3 *db;
    snprintf(path, sizeof(path), "%s/whimbrel.db", fake_directory);
    sqlite3_open(path, &db);
    cr_assert_eq(sqlite3_exec(db, "BEGIN IMMEDIATE", NULL, NULL, NULL), SQLITE_OK);
    engine_done(ENG_FINISH_STOP, 2, -1, 2);
    for (int i = 0; i < 3; i++)
        pump(10);
    cr_assert(!e->ended);
    cr_assert_null(strstr(e->out.data, "\"finish_reason\":\"stop\""));
    sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
    sqlite3_close(db);
    pump_until_over(e);
    cr_assert_not_null(strstr(e->out.data, "\"finish_reason\":\"stop\""));
    cr_assert_eq(count_rows("SELECT count(*) FROM turns WHERE status=0"), 1);
    free_exchange(e);
}

Test(turn, a_failed_commit_completes_as_not_stored_or_fails_a_stored_turn)
{
    char path[128];
    sqlite3 *db;
    snprintf(path, sizeof(path), "%s/whimbrel.db", fake_directory);
    sqlite3_open(path, &db);
    for (int stored = 0; stored < 2; stored++) {
        gw_exchange *e = send_text(stored ? HELLO ",\"store\":true}" : HELLO "}");
        cr_assert(admit(e));
        cr_assert_eq(sqlite3_exec(db, "BEGIN IMMEDIATE", NULL, NULL, NULL), SQLITE_OK);
        base_log_set_level(BASE_LOG_ERROR + 1);
        engine_part(ENG_PART_TEXT, 0, "Hi");
        engine_done(ENG_FINISH_STOP, 2, -1, 2);
        pump_until_over(e);
        sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
        json_t *json = answer_json(e);
        cr_assert_eq(e->status, stored ? 500 : 200);
        if (stored) {
            cr_assert_str_eq(text_at(json, "error.code"), "not_stored");
            cr_assert_not_null(strstr(e->answer_headers, "x-should-retry: false"));
        } else {
            cr_assert(json_is_false(at(json, "usage.whimbrel.stored")));
        }
        json_decref(json);
        free_exchange(e);
    }
    sqlite3_close(db);
}

Test(turn, silence_is_broken_by_comments_or_by_empty_deltas)
{
    fake_conf.server_keepalive_ms = 40;
    for (int chunk = 0; chunk < 2; chunk++) {
        gw_exchange *e = send_text(
            chunk ? HELLO ",\"stream\":true,\"stream_options\":{\"keepalive_chunk\":true}}"
                  : HELLO ",\"stream\":true}");
        cr_assert(admit(e));
        uint64_t until = base_now_ns() + 150000000;
        while (base_now_ns() < until)
            pump(10);
        char *copy, *list[64];
        size_t count = records(e, &copy, list, 64);
        cr_assert_geq(count, 3);
        cr_assert_leq(count, 6, "not more often than asked");
        if (chunk) {
            json_t *json = parse(list[1]);
            cr_assert_eq(json_object_size(at(json, "choices.0.delta")), 0);
            json_decref(json);
        } else {
            cr_assert_str_eq(list[1], ": ping");
        }
        engine_done(ENG_FINISH_STOP, 0, -1, 0);
        pump_until_over(e);
        free(copy);
        free_exchange(e);
    }
}

Test(turn, a_slow_client_gets_few_long_records_and_nothing_is_lost)
{
    gw_exchange *e = send_text(HELLO TOOLS ",\"stream\":true}");
    cr_assert(admit(e));
    engine_part(ENG_PART_TEXT, 0, "a");
    pump_all();
    e->paused = true;
    for (int i = 0; i < 100; i++)
        engine_part(ENG_PART_TEXT, 0, "b");
    engine_part(ENG_PART_CALL_BEGIN, 0, "f");
    for (int i = 0; i < 50; i++)
        engine_part(ENG_PART_CALL_ARGS, 0, i ? "," : "[");
    pump_all();
    cr_assert_eq(e->writes, 2, "role and the first text");
    e->paused = false;
    e->drained(e->ctx);
    cr_assert_eq(e->writes, 5);
    engine_part(ENG_PART_CALL_ARGS, 0, "]");
    engine_part(ENG_PART_CALL_END, 0, "");
    engine_done(ENG_FINISH_CALLS, 153, -1, 153);
    pump_until_over(e);
    char *copy, *list[32];
    cr_assert_eq(records(e, &copy, list, 32), 8);
    json_t *json = parse(list[2]);
    cr_assert_eq(strlen(text_at(json, "choices.0.delta.content")), 100);
    json_decref(json);
    json = parse(list[4]);
    cr_assert_eq(strlen(text_at(json, "choices.0.delta.tool_calls.0.function.arguments")), 50);
    json_decref(json);
    free(copy);
    free_exchange(e);
}

Test(turn, a_paused_stream_still_ends)
{
    gw_exchange *e = send_text(HELLO ",\"stream\":true}");
    cr_assert(admit(e));
    e->paused = true;
    engine_part(ENG_PART_TEXT, 0, "abc");
    engine_done(ENG_FINISH_STOP, 3, -1, 3);
    pump_until_over(e);
    cr_assert_not_null(strstr(e->out.data, "abc"));
    cr_assert_not_null(strstr(e->out.data, "[DONE]"));
    free_exchange(e);
}

/* ---- failures ---- */

Test(turn, an_engine_failure_is_an_error_answer_or_an_error_record)
{
    for (int stream = 0; stream < 2; stream++) {
        gw_exchange *e = send_text(stream ? HELLO ",\"stream\":true}" : HELLO "}");
        cr_assert(admit(e));
        engine_part(ENG_PART_TEXT, 0, "Hal");
        eng_event event = {.kind = ENG_EVENT_DONE, .finish = ENG_FINISH_ERROR, .stop_index = -1};
        base_fail(&event.err, BASE_DEVICE, "it broke");
        engine_event(event);
        pump_until_over(e);
        cr_assert_not_null(strstr(
            e->out.data,
            "{\"error\":{\"message\":\"it broke\",\"type\":\"server_error\",\"param\":null,"));
        if (stream) {
            cr_assert_not_null(strstr(e->out.data, "Hal"), "what was sent is kept");
            cr_assert_null(strstr(e->out.data, "\"finish_reason\":\""));
            cr_assert_null(strstr(e->out.data, "[DONE]"));
        } else {
            cr_assert_eq(e->status, 500);
        }
        free_exchange(e);
    }
    cr_assert_eq(count_rows("SELECT count(*) FROM turns WHERE status=2"), 2);
    gw_usage_totals total = gw_account_total(gw_tenants_account(app.tenants));
    cr_assert_eq(total.failed, 2);
}

Test(turn, refusals_of_the_engine_have_their_status)
{
    static const struct {
        base_code code;
        int status;
        const char *header;
    } rows[] = {{BASE_FULL, 503, "retry-after-ms: 1000"},
                {BASE_TOO_LONG, 400, ""},
                {BASE_INVALID, 400, ""},
                {BASE_CLOSED, 503, "retry-after"},
                {BASE_NOMEM, 503, "retry-after"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        engine.refuse = (int)rows[i].code;
        gw_exchange *e = send_text(HELLO ",\"stream\":true}");
        pump_until_over(e);
        cr_expect_eq(e->status, rows[i].status, "%d", rows[i].code);
        cr_expect_not_null(strstr(e->answer_headers, rows[i].header));
        cr_expect(!e->begun, "before the status line");
        free_exchange(e);
    }
}

Test(turn, a_deadline_is_408_and_a_shutdown_503)
{
    static const struct {
        eng_finish finish;
        int status;
    } rows[] = {{ENG_FINISH_DEADLINE, 408}, {ENG_FINISH_CANCELLED, 503}};
    for (int i = 0; i < 2; i++) {
        gw_exchange *e = send_text(HELLO "}");
        cr_assert(admit(e));
        engine_part(ENG_PART_TEXT, 0, "Hal");
        engine_done(rows[i].finish, 3, -1, 3);
        pump_until_over(e);
        cr_assert_eq(e->status, rows[i].status);
        free_exchange(e);
    }
    cr_assert_eq(count_rows("SELECT count(*) FROM turns WHERE status=1"), 2);
}

Test(turn, draining_refuses_new_turns)
{
    atomic_store(&app.draining, 1);
    gw_exchange *e = send_text(HELLO "}");
    cr_assert_eq(e->status, 503);
    cr_assert_not_null(strstr(e->out.data, "draining"));
    atomic_store(&app.draining, 0);
    free_exchange(e);
}

Test(turn, keys_are_asked_for_once_there_are_any)
{
    char key[GW_KEY_TEXT_MAX + 1], header[256];
    cr_assert_eq(
        gw_tenants_mint(app.tenants, key, "acme", NULL, NULL, "test", GW_SCOPE_INFER, NULL),
        BASE_OK);
    gw_exchange *e = send_text(HELLO "}");
    cr_assert_eq(e->status, 401);
    cr_assert_not_null(strstr(e->out.data, "invalid_api_key"));
    free_exchange(e);
    e = calloc(1, sizeof(*e));
    e->body = HELLO "}";
    e->length = strlen(e->body);
    snprintf(header, sizeof(header), "Bearer %s", key);
    e->headers[0][0] = "authorization";
    e->headers[0][1] = header;
    gw_api_chat_handle(&app, e);
    cr_assert(admit(e));
    engine_done(ENG_FINISH_STOP, 0, -1, 0);
    pump_until_over(e);
    cr_assert_eq(e->status, 200);
    cr_assert_eq(count_rows("SELECT tenant FROM turns"), 2);
    free_exchange(e);
}

/* ---- clients that leave ---- */

Test(turn, leaving_before_the_worker_ran_starts_nothing)
{
    gw_exchange *e = send_text(HELLO ",\"stream\":true}");
    leave(e);
    pump_all();
    free_exchange(e);
    /* Either the worker saw it in time, or the engine was told right after the submit. */
    cr_assert_eq(atomic_load(&engine.cancelled) > 0, atomic_load(&engine.submitted) > 0);
    if (atomic_load(&engine.submitted))
        engine_done(ENG_FINISH_CANCELLED, 0, -1, 0);
    pump_all();
}

Test(turn, leaving_cancels_in_every_phase_and_is_recorded)
{
    for (int phase = 0; phase < 3; phase++) {
        for (int stream = 0; stream < 2; stream++) {
            gw_exchange *e = send_text(stream ? HELLO ",\"stream\":true}" : HELLO "}");
            cr_assert(admit(e));
            if (phase > 0)
                engine_started(0);
            if (phase > 1)
                engine_part(ENG_PART_TEXT, 0, "par");
            pump_all();
            int before = atomic_load(&engine.cancelled);
            leave(e);
            cr_assert_eq(atomic_load(&engine.cancelled), before + 1);
            if (phase > 1)
                engine_part(ENG_PART_TEXT, 0, "t"); /* one more step before the engine sees it */
            engine_done(ENG_FINISH_CANCELLED, phase > 1 ? 4 : 0, -1, phase > 1 ? 4 : 0);
            pump_all();
            free_exchange(e);
        }
    }
    cr_assert_eq(count_rows("SELECT count(*) FROM turns WHERE status=1"), 6);
    cr_assert_eq(count_rows("SELECT count(*) FROM turns WHERE run IS NOT NULL"), 2);
    cr_assert_eq(gw_account_total(gw_tenants_account(app.tenants)).cancelled, 6);
}

Test(turn, leaving_while_the_turn_is_committed)
{
    gw_exchange *e = send_text(HELLO ",\"stream\":true}");
    cr_assert(admit(e));
    engine_part(ENG_PART_TEXT, 0, "Hi");
    engine_done(ENG_FINISH_STOP, 2, -1, 2);
    pump(10); /* the step */
    pump(10); /* DONE: the writer has it */
    if (!e->ended)
        leave(e);
    pump_all();
    cr_assert_eq(count_rows("SELECT count(*) FROM turns WHERE status=0"), 1, "it did complete");
    free_exchange(e);
}

/* ---- the ledger behind it ---- */

static const char *content_of(json_t *json)
{
    return text_at(json, "choices.0.message.content");
}

Test(turn, the_next_turn_goes_on_from_its_own_tokens)
{
    for (int thinking = 0; thinking < 2; thinking++) {
        fake_info.thinking = thinking ? ENG_THINK_ENABLED : ENG_THINK_ADAPTIVE;
        gw_exchange *e = send_text(HELLO "}");
        cr_assert(admit(e));
        uint32_t prompt = engine.request.token_count;
        engine_part(ENG_PART_REASONING, 0, "hidden");
        engine_part(ENG_PART_TEXT, 0, "Hello ");
        engine_done(ENG_FINISH_STOP, 13, -1, 12);
        pump_until_over(e);
        json_t *json = answer_json(e);
        cr_assert_str_eq(content_of(json), "Hello ");
        free_exchange(e);
        /* The client drops the reasoning and trims the text. */
        e = send_text("{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":"
                      "\"text\",\"text\":\"hi\"}]},"
                      "{\"role\":\"assistant\",\"content\":\"Hello\"},{\"role\":\"user\","
                      "\"content\":\"go on\"}]}");
        cr_assert(admit(e));
        cr_assert_eq(engine.spliced, 1);
        /* Everything the first turn had, less the begin-of-answer that is not part of a rendered
         * item here. */
        const int32_t *tokens = engine.request.tokens + 3;
        if (thinking)
            cr_assert_eq(*tokens++, 990 + ENG_THINK_ENABLED, "the mark belongs to the item");
        cr_assert_eq(tokens[0], 'h');
        cr_assert_eq(tokens[12], 500, "the end of turn is the model's own");
        engine_done(ENG_FINISH_STOP, 1, -1, 0);
        pump_until_over(e);
        json_t *second = answer_json(e);
        cr_assert_str_eq(text_at(second, "usage.whimbrel.session"),
                         text_at(json, "usage.whimbrel.session"));
        cr_assert_gt(prompt, 0);
        json_decref(json);
        json_decref(second);
        free_exchange(e);
    }
}

Test(turn, a_stop_string_that_ends_inside_a_token_is_not_spliced)
{
    /* The text "Order num" was given out; the token behind it was cut by the stop string and is not
     * part of the run. */
    for (int whole = 0; whole < 2; whole++) {
        gw_exchange *e = send_text(HELLO ",\"stop\":[\"ber 7\"]}");
        cr_assert(admit(e));
        engine_part(ENG_PART_TEXT, 0, whole ? "Order" : "Order num");
        engine_done(ENG_FINISH_STOP, 9, 0, 5);
        pump_until_over(e);
        free_exchange(e);
        e = send_text(
            whole ? "{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},"
                    "{\"role\":\"assistant\",\"content\":\"Order\"},{\"role\":\"user\",\"content\":"
                    "\"x\"}]}"
                  : "{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},"
                    "{\"role\":\"assistant\",\"content\":\"Order "
                    "num\"},{\"role\":\"user\",\"content\":\"x\"}]}");
        cr_assert(admit(e));
        cr_assert_eq(engine.spliced, (uint32_t)whole);
        engine_done(ENG_FINISH_STOP, 1, -1, 0);
        pump_until_over(e);
        free_exchange(e);
    }
}

Test(turn, a_known_turn_may_hold_broken_arguments_and_any_other_may_not)
{
    gw_exchange *e = send_text(HELLO TOOLS "}");
    cr_assert(admit(e));
    engine_part(ENG_PART_CALL_BEGIN, 0, "f");
    engine_part(ENG_PART_CALL_ARGS, 0, "{\"a\":\"b");
    engine_done(ENG_FINISH_LENGTH, 8, -1, 8);
    pump_until_over(e);
    free_exchange(e);
    for (int known = 1; known >= 0; known--) {
        char body[1024];
        snprintf(body, sizeof(body),
                 "{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{"
                 "\"role\":\"assistant\",\"content\":null,"
                 "\"tool_calls\":[{\"id\":\"x\",\"type\":\"function\",\"function\":{\"name\":\"f\","
                 "\"arguments\":\"{\\\"a\\\":\\\"%s\"}}]},"
                 "{\"role\":\"tool\",\"tool_call_id\":\"x\",\"content\":\"r\"}]" TOOLS "}",
                 known ? "b" : "c");
        e = send_text(body);
        bool admitted = admit(e);
        cr_assert_eq(admitted, known);
        if (known) {
            cr_assert_eq(engine.spliced, 1);
            engine_done(ENG_FINISH_STOP, 1, -1, 0);
            pump_until_over(e);
        } else {
            cr_assert_eq(e->status, 400);
            cr_assert_not_null(
                strstr(e->out.data, "\"param\":\"messages[1].tool_calls[0].function.arguments\""));
        }
        free_exchange(e);
    }
}

Test(turn, store_false_keeps_what_was_said_off_the_disk)
{
    gw_exchange *e = send_text("{\"model\":\"fake\",\"store\":false,\"messages\":[{\"role\":"
                               "\"user\",\"content\":\"CANARY\"}]}");
    cr_assert(admit(e));
    engine_part(ENG_PART_TEXT, 0, "CANARY");
    engine_done(ENG_FINISH_STOP, 7, -1, 6);
    pump_until_over(e);
    json_t *json = answer_json(e);
    cr_assert(json_is_false(at(json, "usage.whimbrel.stored")));
    json_decref(json);
    free_exchange(e);
    char command[128];
    snprintf(command, sizeof(command), "grep -rq CANARY %s", fake_directory);
    cr_assert_neq(system(command), 0);
    cr_assert_eq(count_rows("SELECT sum(output_tokens) FROM turns"), 7);
}

/* ---- logprobs and token ids ---- */

static void logprob_step(const char *bytes, const int32_t *tokens, uint32_t count,
                         eng_part_kind kind)
{
    eng_logprob list[16];
    memset(list, 0, sizeof(list));
    for (uint32_t i = 0; i < count; i++)
        list[i] = (eng_logprob){.token = tokens[i],
                                .logprob = -0.5f - (float)i,
                                .top_count = 2,
                                .top_token = {tokens[i], 'z'},
                                .top_logprob = {-0.5f - (float)i, -9}};
    eng_part part = {kind, 0, bytes, strlen(bytes)};
    engine_event((eng_event){.kind = ENG_EVENT_STEP,
                             .tokens = tokens,
                             .token_count = count,
                             .logprobs = list,
                             .parts = bytes[0] ? &part : NULL,
                             .part_count = bytes[0] != 0});
}

Test(turn, logprobs_are_one_for_every_token_of_the_content)
{
    for (int stream = 0; stream < 2; stream++) {
        gw_exchange *e =
            send_text(stream ? HELLO ",\"stream\":true,\"logprobs\":true,\"top_logprobs\":1}"
                             : HELLO ",\"logprobs\":true,\"top_logprobs\":1}");
        cr_assert(admit(e));
        cr_assert_eq(engine.request.sampling.top_logprobs, 1);
        logprob_step("rr", (const int32_t[]){'r', 'r', 700}, 3,
                     ENG_PART_REASONING); /* 700: a mark without text */
        logprob_step("", (const int32_t[]){'a', 0xC3}, 2,
                     ENG_PART_TEXT); /* held: half a character */
        logprob_step("a\xc3\xa9"
                     "b",
                     (const int32_t[]){0xA9, 'b'}, 2, ENG_PART_TEXT);
        logprob_step("\xef\xbf\xbd"
                     "c",
                     (const int32_t[]){0xFF, 'c', 500}, 3, ENG_PART_TEXT); /* no character at all */
        engine_done(ENG_FINISH_LENGTH, 10, -1, 10);
        pump_until_over(e);
        char bytes[32] = "";
        size_t entries = 0;
        if (stream) {
            char *copy, *list[32];
            size_t count = records(e, &copy, list, 32);
            for (size_t i = 0; i + 1 < count; i++) {
                json_t *json = parse(list[i]), *content = at(json, "choices.0.logprobs.content");
                for (size_t k = 0; k < json_array_size(content); k++) {
                    json_t *entry = json_array_get(content, k);
                    cr_assert_eq(json_array_size(json_object_get(entry, "top_logprobs")), 1);
                    bytes[entries++] = (char)json_integer_value(at(entry, "bytes.0"));
                }
                json_decref(json);
            }
            free(copy);
        } else {
            json_t *json = answer_json(e), *content = at(json, "choices.0.logprobs.content");
            for (size_t k = 0; k < json_array_size(content); k++)
                bytes[entries++] =
                    (char)json_integer_value(at(json_array_get(content, k), "bytes.0"));
            cr_assert_eq(json_object_size(at(json, "choices.0.logprobs")), 2,
                         "content and refusal");
            json_decref(json);
        }
        cr_assert_eq(entries, 6);
        cr_assert_str_eq(bytes, "a\xc3\xa9"
                                "b\xff"
                                "c");
        free_exchange(e);
    }
}

Test(turn, token_ids_come_with_the_records)
{
    gw_exchange *e = send_text(HELLO ",\"stream\":true,\"return_token_ids\":true}");
    cr_assert(admit(e));
    engine_part(ENG_PART_TEXT, 0, "ab");
    engine_event(
        (eng_event){.kind = ENG_EVENT_STEP, .tokens = (const int32_t[]){700}, .token_count = 1});
    engine_part(ENG_PART_TEXT, 0, "c");
    engine_done(ENG_FINISH_STOP, 5, -1, 4);
    pump_until_over(e);
    cr_assert_not_null(strstr(e->out.data, "\"prompt_token_ids\":[1002,104,105,999]"));
    cr_assert_not_null(strstr(e->out.data, "\"token_ids\":[97,98]"));
    cr_assert_not_null(strstr(e->out.data, "\"token_ids\":[700,99]"));
    cr_assert_not_null(strstr(e->out.data, "\"token_ids\":[500]"));
    free_exchange(e);
}

/* ---- many at once ---- */

Test(turn, the_queue_of_the_workers_is_bounded_and_nobody_hangs)
{
    gw_exchange *list[40];
    int refused = 0;
    for (int i = 0; i < 40; i++)
        list[i] = send_text(HELLO "}");
    pump_all();
    int submitted = atomic_load(&engine.submitted);
    for (int i = 0; i < 40; i++) {
        refused += list[i]->ended;
        cr_assert(!list[i]->ended || list[i]->status == 503);
    }
    cr_assert_eq(refused + submitted, 40);
    for (int i = 0; i < submitted; i++) {
        engine.request = engine.all[i];
        engine_done(ENG_FINISH_STOP, 1, -1, 0);
    }
    for (int i = 0; i < 40; i++) {
        pump_until_over(list[i]);
        free_exchange(list[i]);
    }
}
