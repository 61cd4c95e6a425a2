/* Anthropic's dialect with a scripted engine: what reaches the engine, the order of events,
 * refusals in its own shape, signatures. */
#include "fake.h"

#include <sys/stat.h>

#include "gateway/api_messages.h"
#include "gateway/seal.h"

static void start(void)
{
    base_err err = BASE_ERR_INIT;
    fake_start();
    cr_assert_eq(gw_seal_open(&app.seal, fake_directory, &err), BASE_OK, "%s", err.text);
}

static void stop(void)
{
    fake_stop();
    gw_seal_close(app.seal);
}

TestSuite(messages, .init = start, .fini = stop, .timeout = 60);
TestSuite(seal, .init = start, .fini = stop, .timeout = 20);

#define HEAD "{\"model\":\"fake\",\"max_tokens\":64"
#define HI "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define BODY(rest) HEAD "," HI "," rest "}"
#define SAID(content) HEAD ",\"messages\":[{\"role\":\"user\",\"content\":" content "}]}"
#define TOOL "{\"name\":\"f\",\"input_schema\":{\"type\":\"object\"}}"
#define WITH_TOOL(rest) BODY("\"tools\":[" TOOL "]," rest)

static gw_exchange *post_to(void (*handle)(gw_app *app, gw_exchange *exchange), const char *body)
{
    gw_exchange *exchange = calloc(1, sizeof *exchange);
    exchange->path = "/v1/messages";
    exchange->body = body;
    exchange->length = strlen(body);
    handle(&app, exchange);
    return exchange;
}

static gw_exchange *post(const char *body)
{
    return post_to(gw_api_messages_handle, body);
}

/* Sends it and lets the engine answer nothing. What it was asked is in `engine` then. */
static void run(const char *body)
{
    gw_exchange *e = post(body);
    cr_assert(admit(e), "%s: %s", body, e->out.data);
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e);
    cr_assert_eq(e->status, 200);
    free_exchange(e);
}

static void rendered(const char *body, const char *expected)
{
    run(body);
    cr_expect_eq(engine.rendered.length, strlen(expected), "%s", engine.rendered.data);
    cr_expect_str_eq(engine.rendered.data, expected, "%s", body);
}

/* ---- bodies ---- */

Test(messages, blocks_become_items)
{
    rendered(BODY("\"system\":\"be brief\""), "system:be brief|user:hi|");
    rendered(BODY("\"system\":[{\"type\":\"text\",\"text\":\"a\",\"cache_control\":{\"type\":"
                  "\"ephemeral\"}},{\"type\":\"text\",\"text\":\"b\"}]"),
             "system:ab|user:hi|");
    rendered(BODY("\"system\":\"\""), "user:hi|");
    rendered(SAID("[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]"),
             "user:ab|");
    rendered(SAID("[]"), "user:|");
    rendered(SAID("[{\"type\":\"document\",\"source\":{\"type\":\"text\",\"data\":\"d\"}}]"),
             "user:d|");
    rendered(HEAD ",\"messages\":[{\"role\":\"user\",\"content\":\"go\"},{\"role\":\"assistant\","
                  "\"content\":[{\"type\":\"thinking\",\"thinking\":\"hm\",\"signature\":\"x\"},"
                  "{\"type\":\"redacted_thinking\",\"data\":\"zz\"},"
                  "{\"type\":\"text\",\"text\":\"ok\"},{\"type\":\"server_tool_use\",\"id\":\"s\"},"
                  "{\"type\":\"tool_use\",\"id\":\"a\",\"name\":\"f\",\"input\":{\"n\":1.50}},"
                  "{\"type\":\"tool_use\",\"id\":\"b\",\"name\":\"g\"}]},"
                  "{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"b\","
                  "\"content\":\"B\"},{\"type\":\"tool_result\",\"tool_use_id\":\"a\",\"is_error\":"
                  "true,\"content\":[{\"type\":\"text\",\"text\":\"A1\"},{\"type\":\"text\","
                  "\"text\":\"A2\"}]},{\"type\":\"text\",\"text\":\"next\"}]}]}",
             "user:go|assistant:(hm)ok[f {\"n\":1.50}][g {}]|tool:A1A2|tool:B|user:next|");
}

Test(messages, a_system_message_stays_in_its_place)
{
    rendered(HEAD ",\"system\":\"s\",\"messages\":[{\"role\":\"user\",\"content\":\"a\"},"
                  "{\"role\":\"system\",\"content\":\"note\"},{\"role\":\"user\",\"content\":"
                  "\"b\"}]}",
             "system:s|user:a|system:note|user:b|");
}

Test(messages, billing_lines_leave_system_text_alone_and_only_that)
{
#define BILL "x-anthropic-billing-header: cc_version=1; cch=0a1b;"
    rendered(BODY("\"system\":[{\"type\":\"text\",\"text\":\"" BILL "\"},{\"type\":\"text\","
                  "\"text\":\"you are\"}]"),
             "system:you are|user:hi|");
    rendered(BODY("\"system\":\"" BILL "\\nline\\n" BILL "\\nend\""), "system:line\nend|user:hi|");
    rendered(BODY("\"system\":\"begin " BILL "\\nend\""), "system:begin \nend|user:hi|");
    rendered(BODY("\"system\":\"" BILL "\""), "user:hi|");
    rendered(SAID("\"" BILL "\""), "user:" BILL "|");
    rendered(HEAD ",\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"system\","
                  "\"content\":\"" BILL "\\nn\"},{\"role\":\"user\",\"content\":\"b\"}]}",
             "user:a|system:n|user:b|");
}

Test(messages, an_answer_that_was_begun_is_gone_on_with)
{
    run(HEAD ",\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\","
             "\"content\":\"Once\"}]}");
    cr_expect(engine.continue_last);
    run(BODY("\"x\":1"));
    cr_expect(!engine.continue_last);
}

Test(messages, tools_are_function_objects_in_the_clients_words)
{
    run(BODY("\"tools\":[{\"input_schema\":{\"z\":1.0,\"a\":[ ]},\"name\":\"f\",\"cache_control\":"
             "{\"type\":\"ephemeral\"},\"description\":\"d\\u00e9\"},{\"type\":"
             "\"web_search_20250305\",\"name\":\"web_search\"},{\"type\":\"custom\",\"name\":"
             "\"g\"}]"));
    cr_expect_str_eq(engine.tools, "{\"name\":\"f\",\"description\":\"d\\u00e9\",\"parameters\":"
                                   "{\"z\":1.0,\"a\":[ ]}};{\"name\":\"g\"};");
    cr_expect_eq(engine.request.tool_choice, ENG_TOOL_AUTO);
}

Test(messages, fields_reach_the_engine)
{
    run(WITH_TOOL("\"tool_choice\":{\"type\":\"any\",\"disable_parallel_tool_use\":true}"));
    cr_expect_eq(engine.request.tool_choice, ENG_TOOL_REQUIRED);
    cr_expect_eq(engine.request.call_max, 1);
    run(WITH_TOOL("\"tool_choice\":{\"type\":\"tool\",\"name\":\"f\"}"));
    cr_expect_eq(engine.request.tool_choice, ENG_TOOL_NAMED);
    run(WITH_TOOL("\"tool_choice\":{\"type\":\"none\"}"));
    cr_expect_eq(engine.request.tool_choice, ENG_TOOL_NONE);
    run(BODY("\"temperature\":0.5,\"top_p\":0.25,\"top_k\":7,\"stop_sequences\":[\"a\",\"b\"]"));
    cr_expect_eq(engine.request.max_tokens, 64);
    cr_expect_eq(engine.request.sampling.top_k, 7);
    cr_expect_eq(engine.request.sampling.top_p, 0.25f);
    cr_expect_eq(engine.request.stop_count, 2);
    cr_expect_eq(engine.thinking, ENG_THINK_DISABLED, "off unless asked for");
    static const struct {
        const char *body;
        eng_thinking thinking;
    } rows[] = {
        {BODY("\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1024}"), ENG_THINK_ENABLED},
        {BODY("\"thinking\":{\"type\":\"adaptive\"}"), ENG_THINK_ADAPTIVE},
        {BODY("\"thinking\":{\"type\":\"disabled\"}"), ENG_THINK_DISABLED}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        run(rows[i].body);
        cr_expect_eq(engine.thinking, rows[i].thinking);
    }
    run(BODY("\"output_config\":{\"effort\":\"high\"}"));
    cr_expect_str_eq(engine.effort, "high");
    run(BODY("\"output_config\":{\"effort\":\"]~b]\"},\"container\":3,\"anything\":[]"));
    cr_expect_str_eq(engine.effort, "");
}

Test(messages, refusals_name_the_field_in_their_own_shape)
{
    static const struct {
        const char *body, *words;
    } rows[] = {
        {"{", "not JSON"},
        {"{\"max_tokens\":1," HI "}", "model"},
        {"{\"model\":\"fake\"," HI "}", "max_tokens"},
        {"{\"model\":\"fake\",\"max_tokens\":0," HI "}", "max_tokens"},
        {"{\"model\":\"fake\",\"max_tokens\":\"9\"," HI "}", "max_tokens"},
        {HEAD "}", "messages"},
        {HEAD ",\"messages\":[]}", "messages"},
        {HEAD ",\"messages\":[3]}", "messages[0]"},
        {HEAD ",\"messages\":[{\"role\":\"tool\",\"content\":\"\"}]}", "messages[0].role"},
        {HEAD ",\"messages\":[{\"role\":\"user\"}]}", "messages[0].content"},
        {SAID("[3]"), "messages[0].content[0]"},
        {SAID("[{}]"), "messages[0].content[0].type"},
        {SAID("[{\"type\":\"text\"}]"), "messages[0].content[0].text"},
        {SAID("[{\"type\":\"image\",\"source\":{}}]"), "no image blocks"},
        {SAID("[{\"type\":\"document\",\"source\":{\"type\":\"base64\"}}]"), "no document blocks"},
        {SAID("[{\"type\":\"tool_result\"}]"), "messages[0].content[0].tool_use_id"},
        {SAID("[{\"type\":\"tool_result\",\"tool_use_id\":\"a\",\"is_error\":1}]"), "is_error"},
        {SAID("[{\"type\":\"tool_result\",\"tool_use_id\":\"a\",\"content\":[{\"type\":\"image\"}"
              "]}]"),
         "no image blocks"},
        {HEAD ",\"messages\":[{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\","
              "\"name\":\"f\",\"input\":\"x\"}]}]}",
         "messages[0].content[0].input"},
        {BODY("\"system\":3"), "system"},
        {BODY("\"system\":[{\"type\":\"image\"}]"), "no image blocks"},
        {BODY("\"tools\":{}"), "tools"},
        {BODY("\"tools\":[{\"name\":\"a b\"}]"), "tools[0].name"},
        {BODY("\"tools\":[{\"name\":\"f\",\"input_schema\":[]}]"), "tools[0].input_schema"},
        {WITH_TOOL("\"tool_choice\":\"auto\""), "tool_choice"},
        {WITH_TOOL("\"tool_choice\":{\"type\":\"maybe\"}"), "tool_choice.type"},
        {WITH_TOOL("\"tool_choice\":{\"type\":\"tool\",\"name\":\"g\"}"), "tool_choice.name"},
        {BODY("\"tool_choice\":{\"type\":\"any\"}"), "no tools"},
        {BODY("\"thinking\":{\"type\":\"loud\"}"), "thinking.type"},
        {BODY("\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":\"x\"}"), "budget_tokens"},
        {BODY("\"thinking\":true"), "thinking"},
        {BODY("\"output_config\":{\"format\":{\"type\":\"json_schema\"}}"), "output_config.format"},
        {BODY("\"stop_sequences\":\"x\""), "stop_sequences"},
        {BODY("\"stop_sequences\":[\"\"]"), "stop_sequences[0]"},
        {BODY("\"temperature\":\"x\""), "temperature"},
        {BODY("\"top_k\":1.5"), "top_k"},
        {BODY("\"stream\":1"), "stream"},
        {BODY("\"thread\":1"), "thread"},
        {BODY("\"metadata\":{\"user_id\":3}"), "metadata.user_id"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        gw_exchange *e = post(rows[i].body);
        cr_expect(!admit(e), "%s", rows[i].body);
        cr_expect_eq(e->status, 400, "%s: %d", rows[i].body, e->status);
        json_t *json = answer_json(e);
        cr_expect_str_eq(text_at(json, "type"), "error");
        cr_expect_str_eq(text_at(json, "error.type"), "invalid_request_error");
        cr_expect_not_null(strstr(text_at(json, "error.message"), rows[i].words), "%s: %s",
                           rows[i].body, text_at(json, "error.message"));
        cr_expect_str_eq(text_at(json, "request_id"), "req_000000000000000000000001");
        cr_expect_not_null(strstr(e->answer_headers, "request-id: req_0"));
        json_decref(json);
        free_exchange(e);
    }
}

/* A client that finds no threads held here sends whole histories instead, if it is told so. */
Test(messages, threads_are_refused_by_the_code_that_their_client_knows)
{
    gw_exchange *e = post(BODY("\"thread\":{\"type\":\"create\"}"));
    cr_assert(!admit(e));
    cr_expect_eq(e->status, 400);
    json_t *json = answer_json(e);
    cr_expect_str_eq(text_at(json, "error.type"), "invalid_request_error");
    cr_expect_str_eq(text_at(json, "error.details.error_code"), "thread_unsupported_request");
    cr_expect_str_eq(text_at(json, "error.details.unsupported.0"), "thread");
    json_decref(json);
    free_exchange(e);
    run(BODY("\"thread\":null"));
}

Test(messages, statuses_are_the_dialects_own)
{
    static const struct {
        base_code code;
        int status;
        const char *type, *header;
    } rows[] = {{BASE_FULL, 529, "overloaded_error", "retry-after-ms: 1000"},
                {BASE_NOMEM, 529, "overloaded_error", "retry-after-ms: 1000"},
                {BASE_CLOSED, 529, "overloaded_error", "retry-after"},
                {BASE_TIMEOUT, 504, "timeout_error", ""},
                {BASE_DENIED, 403, "permission_error", ""},
                {BASE_DEVICE, 500, "api_error", ""},
                {BASE_NOT_FOUND, 404, "not_found_error", ""}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        engine.refuse = rows[i].code;
        gw_exchange *e = post(BODY("\"stream\":true"));
        cr_expect(!admit(e));
        json_t *json = answer_json(e);
        cr_expect_eq(e->status, rows[i].status);
        cr_expect_str_eq(text_at(json, "error.type"), rows[i].type);
        cr_expect_not_null(strstr(e->answer_headers, rows[i].header));
        json_decref(json);
        free_exchange(e);
    }
    gw_exchange *e = post("{\"model\":\"other\",\"max_tokens\":1," HI "}");
    cr_expect(!admit(e));
    cr_expect_eq(e->status, 404);
    cr_expect_not_null(strstr(e->out.data, "not_found_error"));
    free_exchange(e);
}

Test(messages, an_overlong_prompt_says_both_numbers_as_clients_expect)
{
    size_t length = FAKE_WINDOW + 100;
    char *body = malloc(length + 256);
    int at = sprintf(body, HEAD ",\"messages\":[{\"role\":\"user\",\"content\":\"");
    memset(body + at, 'a', length);
    strcpy(body + at + length, "\"}]}");
    gw_exchange *e = post(body);
    cr_expect(!admit(e));
    cr_expect_eq(e->status, 400);
    cr_expect_not_null(strstr(e->out.data, "prompt is too long: 5103 tokens > 5000 maximum"), "%s",
                       e->out.data);
    free_exchange(e);
    e = post_to(gw_api_messages_count, body);
    pump_until_over(e);
    cr_expect_str_eq(e->out.data, "{\"input_tokens\":5103}", "counted all the same: %s",
                     e->out.data);
    free_exchange(e);
    free(body);
}

/* ---- answers ---- */

/* "event data" of each record. */
static size_t records(gw_exchange *exchange, char **copy, char *events[], json_t *data[],
                      size_t max)
{
    size_t count = 0;
    *copy = strdup(exchange->out.data ? exchange->out.data : "");
    for (char *rest = *copy, *end; count < max && (end = strstr(rest, "\n\n")); rest = end + 2) {
        *end = '\0';
        cr_assert_eq(strncmp(rest, "event: ", 7), 0, "%s", rest);
        events[count] = rest + 7;
        char *line = strstr(rest, "\ndata: ");
        cr_assert_not_null(line);
        *line = '\0';
        data[count] = json_loads(line + 7, 0, NULL);
        cr_assert_not_null(data[count], "%s", line + 7);
        cr_expect_str_eq(text_at(data[count], "type"),
                         strcmp(events[count], "error") ? events[count] : "error");
        count++;
    }
    return count;
}

static void forget(char *copy, json_t *data[], size_t count)
{
    for (size_t i = 0; i < count; i++)
        json_decref(data[i]);
    free(copy);
}

Test(messages, a_stream_has_the_events_in_order)
{
    static const char *const expected[] = {
        "message_start",       "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_delta", "content_block_stop",  "content_block_start", "content_block_delta",
        "content_block_stop",  "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop",  "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta",       "message_stop"};
    gw_exchange *e = post(WITH_TOOL("\"stream\":true"));
    cr_assert(admit(e));
    cr_expect(e->begun, "headers go out with the admission");
    cr_expect_eq(e->out.length, 0, "but no record before the cache is known");
    cr_expect_not_null(strstr(e->answer_headers, "request-id: req_0"));
    engine_started(3);
    engine_part(ENG_PART_REASONING, 0, "wh");
    engine_part(ENG_PART_REASONING, 0, "y");
    engine_part(ENG_PART_TEXT, 0, "Hi");
    engine_part(ENG_PART_CALL_BEGIN, 0, "f");
    engine_part(ENG_PART_CALL_ARGS, 0, "{\"a\":");
    engine_part(ENG_PART_CALL_ARGS, 0, "1}");
    engine_part(ENG_PART_CALL_END, 0, "");
    engine_part(ENG_PART_CALL_BEGIN, 1, "f");
    engine_part(ENG_PART_CALL_ARGS, 1, "{}");
    engine_part(ENG_PART_CALL_END, 1, "");
    pump_all();
    char *copy, *events[32];
    json_t *data[32];
    size_t count = records(e, &copy, events, data, 32);
    cr_expect_eq(count, 15, "the last call's block is open until the commit");
    forget(copy, data, count);
    engine_done(ENG_FINISH_CALLS, 9, -1, 16);
    pump_until_over(e);
    count = records(e, &copy, events, data, 32);
    cr_assert_eq(count, 18, "%s", e->out.data);
    cr_expect_eq(e->writes, 18, "one write a record");
    for (size_t i = 0; i < count; i++)
        cr_expect_str_eq(events[i], expected[i], "record %zu", i);
    json_t *start_usage = at(data[0], "message.usage");
    cr_expect_eq(json_integer_value(at(start_usage, "cache_read_input_tokens")), 3);
    cr_expect_eq(json_integer_value(at(start_usage, "input_tokens")), 1, "the last one");
    cr_expect_eq(json_integer_value(at(start_usage, "cache_creation_input_tokens")),
                 engine.request.token_count - 4);
    cr_expect_eq(strncmp(text_at(data[0], "message.id"), "msg_", 4), 0);
    cr_expect_eq(json_array_size(at(data[0], "message.content")), 0);
    cr_expect(json_is_null(at(data[0], "message.stop_reason")));
    cr_expect_str_eq(text_at(data[1], "content_block.type"), "thinking");
    cr_expect_str_eq(text_at(data[1], "content_block.signature"), "");
    cr_expect_str_eq(text_at(data[2], "delta.thinking"), "wh");
    cr_expect_str_eq(text_at(data[4], "delta.type"), "signature_delta");
    cr_expect_eq(strlen(text_at(data[4], "delta.signature")), GW_SEAL_TEXT_BYTES);
    cr_expect_str_eq(text_at(data[7], "delta.text"), "Hi");
    cr_expect_str_eq(text_at(data[9], "content_block.name"), "f");
    cr_expect_eq(strncmp(text_at(data[9], "content_block.id"), "toolu_", 6), 0);
    cr_expect_eq(json_object_size(at(data[9], "content_block.input")), 0);
    cr_expect_str_eq(text_at(data[11], "delta.partial_json"), "1}");
    for (size_t i = 1; i < 16; i++)
        cr_expect_eq(json_integer_value(at(data[i], "index")), i < 6    ? 0
                                                               : i < 9  ? 1
                                                               : i < 13 ? 2
                                                                        : 3);
    cr_expect_str_eq(text_at(data[16], "delta.stop_reason"), "tool_use");
    cr_expect_eq(json_integer_value(at(data[16], "usage.output_tokens")), 9);
    cr_expect_eq(json_integer_value(at(data[16], "usage.output_tokens_details.thinking_tokens")),
                 1);
    cr_expect(json_is_true(at(data[16], "usage.whimbrel.stored")));
    forget(copy, data, count);
    free_exchange(e);
}

Test(messages, a_whole_answer_has_the_same_blocks)
{
    gw_exchange *e = post(WITH_TOOL("\"top_k\":1"));
    cr_assert(admit(e));
    engine_started(3);
    engine_part(ENG_PART_REASONING, 0, "why");
    engine_part(ENG_PART_TEXT, 0, "Hi");
    engine_part(ENG_PART_CALL_BEGIN, 0, "f");
    engine_part(ENG_PART_CALL_ARGS, 0, "{\"a\":1}");
    engine_part(ENG_PART_CALL_END, 0, "");
    engine_part(ENG_PART_CALL_BEGIN, 1, "f");
    engine_part(ENG_PART_CALL_ARGS, 1, "{\"a\":");
    engine_done(ENG_FINISH_LENGTH, 9, -1, 12);
    pump_until_over(e);
    json_t *json = answer_json(e);
    cr_expect_eq(json_array_size(at(json, "content")), 4);
    cr_expect_str_eq(text_at(json, "content.0.thinking"), "why");
    cr_expect_eq(strlen(text_at(json, "content.0.signature")), GW_SEAL_TEXT_BYTES);
    cr_expect_str_eq(text_at(json, "content.1.text"), "Hi");
    cr_expect_eq(json_integer_value(at(json, "content.2.input.a")), 1);
    cr_expect_eq(json_object_size(at(json, "content.3.input")), 0, "cut off: empty, but an object");
    cr_expect_str_eq(text_at(json, "stop_reason"), "max_tokens");
    cr_expect(json_is_null(at(json, "stop_sequence")));
    cr_expect_not_null(strstr(e->answer_headers, "request-id: req_0"));
    json_decref(json);
    free_exchange(e);
}

Test(messages, stop_reasons)
{
    static const struct {
        eng_finish finish;
        int32_t stop;
        const char *reason, *sequence;
    } rows[] = {{ENG_FINISH_STOP, -1, "end_turn", ""},
                {ENG_FINISH_STOP, 1, "stop_sequence", "bb"},
                {ENG_FINISH_LENGTH, -1, "max_tokens", ""}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        gw_exchange *e = post(BODY("\"stop_sequences\":[\"a\",\"bb\"]"));
        cr_assert(admit(e));
        engine_part(ENG_PART_TEXT, 0, "x");
        engine_done(rows[i].finish, 1, rows[i].stop, 1);
        pump_until_over(e);
        json_t *json = answer_json(e);
        cr_expect_str_eq(text_at(json, "stop_reason"), rows[i].reason);
        cr_expect_str_eq(text_at(json, "stop_sequence"), rows[i].sequence);
        json_decref(json);
        free_exchange(e);
    }
    gw_exchange *e = post(BODY("\"top_k\":1"));
    cr_assert(admit(e));
    engine_done(ENG_FINISH_LENGTH, FAKE_WINDOW - engine.request.token_count, -1, 0);
    pump_until_over(e);
    cr_expect_not_null(strstr(e->out.data, "model_context_window_exceeded"));
    free_exchange(e);
}

Test(messages, failures_while_it_runs_are_error_events)
{
    gw_exchange *e = post(BODY("\"stream\":true"));
    cr_assert(admit(e));
    engine_started(0);
    engine_part(ENG_PART_TEXT, 0, "Ha");
    eng_event event = {.kind = ENG_EVENT_DONE, .finish = ENG_FINISH_ERROR, .stop_index = -1};
    base_fail(&event.err, BASE_NOMEM, "no pages");
    engine_event(event);
    pump_until_over(e);
    cr_expect_not_null(strstr(e->out.data,
                              "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":"
                              "\"overloaded_error\",\"message\":\"no pages\"}"));
    cr_expect_null(strstr(e->out.data, "message_delta"));
    free_exchange(e);
}

Test(messages, silence_is_broken_by_pings)
{
    fake_conf.server_keepalive_ms = 40;
    gw_exchange *e = post(BODY("\"stream\":true"));
    cr_assert(admit(e));
    uint64_t until = base_now_ns() + 150000000;
    while (base_now_ns() < until)
        pump(10);
    static const char ping[] = "event: ping\ndata: {\"type\":\"ping\"}\n\n";
    cr_expect_eq(strncmp(e->out.data, ping, sizeof ping - 1), 0);
    engine_done(ENG_FINISH_STOP, 0, -1, 0);
    pump_until_over(e);
    cr_expect_not_null(strstr(e->out.data, "event: message_start"), "even if it never started");
    free_exchange(e);
}

Test(messages, counting_asks_no_engine)
{
    gw_exchange *e = post_to(gw_api_messages_count, "{\"model\":\"fake\"," HI ",\"stream\":true}");
    pump_until_over(e);
    cr_expect_eq(e->status, 200);
    cr_expect_eq(strncmp(e->out.data, "{\"input_tokens\":", 16), 0);
    cr_expect_not_null(strstr(e->answer_headers, "request-id: req_0"));
    cr_expect_eq(atomic_load(&engine.submitted), 0);
    free_exchange(e);
}

/* ---- what comes back ---- */

#define BACK(thinking)                                                                             \
    HEAD ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":9,\"display\":\"omitted\"},"       \
         "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\","           \
         "\"content\":[" thinking "{\"type\":\"text\",\"text\":\"yes\"}]},{\"role\":\"user\","     \
         "\"content\":\"and\"}]}"

/* One turn with hidden reasoning; its signature. */
static void think(const char *reasoning, char signature[GW_SEAL_TEXT_BYTES + 1])
{
    gw_exchange *e = post(BODY("\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":9,"
                               "\"display\":\"omitted\"}"));
    cr_assert(admit(e));
    engine_started(0);
    engine_part(ENG_PART_REASONING, 0, reasoning);
    engine_part(ENG_PART_TEXT, 0, "yes");
    engine_done(ENG_FINISH_STOP, 9, -1, (uint32_t)strlen(reasoning) + 3);
    pump_until_over(e);
    json_t *json = answer_json(e);
    cr_expect_str_eq(text_at(json, "content.0.thinking"), "", "omitted");
    snprintf(signature, GW_SEAL_TEXT_BYTES + 1, "%s", text_at(json, "content.0.signature"));
    json_decref(json);
    free_exchange(e);
}

Test(messages, a_signature_brings_hidden_reasoning_back)
{
    char first[GW_SEAL_TEXT_BYTES + 1], second[GW_SEAL_TEXT_BYTES + 1], body[1024];
    think("one", first);
    run(BACK(""));
    cr_expect_eq(engine.spliced, 1, "the only run of its kind needs no link");
    think("two", second);
    run(BACK(""));
    cr_expect_eq(engine.spliced, 0, "of two kinds neither");
    const char *const signatures[] = {first, second};
    for (int i = 0; i < 2; i++) {
        snprintf(body, sizeof body,
                 BACK("{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"%s\"},"),
                 signatures[i]);
        gw_exchange *e = post(body);
        cr_assert(admit(e));
        cr_expect_eq(engine.spliced, 1);
        /* The run's tokens are bytes here, behind the mark of the mode. */
        bool found = false;
        for (uint32_t k = 0; k + 3 <= engine.request.token_count; k++)
            found |= engine.request.tokens[k] == (i ? 't' : 'o') &&
                     engine.request.tokens[k + 1] == (i ? 'w' : 'n');
        cr_expect(found, "the reasoning of turn %d", i);
        engine_done(ENG_FINISH_STOP, 1, -1, 0);
        pump_until_over(e);
        free_exchange(e);
    }
    second[20] = second[20] == 'A' ? 'B' : 'A';
    snprintf(body, sizeof body,
             BACK("{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"%s\"},"), second);
    run(body);
    cr_expect_eq(engine.spliced, 0, "a forged one is a stranger's, and no error");
    run(BACK("{\"type\":\"thinking\",\"thinking\":\"two\"},"));
    cr_expect_eq(engine.spliced, 1, "its text needs no signature");
    run(BACK("{\"type\":\"thinking\",\"thinking\":\"edited\",\"signature\":\"EuYBCkQ=\"},"));
    cr_expect_eq(engine.spliced, 0, "what a client edited wins");
    cr_expect_not_null(strstr(engine.rendered.data, "(edited)"));
}

Test(seal, holds_for_its_turn_and_tenant)
{
    gw_id turn = gw_id_mint("turn_"), back;
    char text[GW_SEAL_TEXT_BYTES + 1];
    gw_seal_turn(app.seal, text, 7, &turn);
    cr_assert_eq(strlen(text), GW_SEAL_TEXT_BYTES);
    eng_text signature = {text, GW_SEAL_TEXT_BYTES};
    cr_expect(gw_seal_read(app.seal, &back, 7, signature));
    cr_expect_str_eq(back.text, turn.text);
    cr_expect(!gw_seal_read(app.seal, &back, 8, signature));
    cr_expect(!gw_seal_read(app.seal, &back, 7, (eng_text){text, 59}));
    cr_expect(!gw_seal_read(app.seal, &back, 7, (eng_text){NULL, 0}));
    for (size_t i = 0; i < GW_SEAL_TEXT_BYTES; i++) {
        char kept = text[i];
        text[i] = kept == 'x' ? 'y' : 'x';
        cr_expect(!gw_seal_read(app.seal, &back, 7, signature), "byte %zu", i);
        text[i] = kept;
    }
}

Test(seal, the_key_stays_and_must_be_ours_alone)
{
    char path[128], text[GW_SEAL_TEXT_BYTES + 1];
    struct stat st;
    gw_seal *again;
    gw_id turn = gw_id_mint("turn_"), back;
    base_err err = BASE_ERR_INIT;
    snprintf(path, sizeof path, "%s/key", fake_directory);
    cr_assert_eq(stat(path, &st), 0);
    cr_expect_eq(st.st_mode & 0777, 0600);
    gw_seal_turn(app.seal, text, 1, &turn);
    cr_assert_eq(gw_seal_open(&again, fake_directory, &err), BASE_OK);
    cr_expect(gw_seal_read(again, &back, 1, (eng_text){text, GW_SEAL_TEXT_BYTES}));
    gw_seal_close(again);
    chmod(path, 0640);
    cr_expect_eq(gw_seal_open(&again, fake_directory, &err), BASE_DENIED);
    cr_expect_str_eq(err.param, "data.path");
    chmod(path, 0600);
    cr_assert_eq(truncate(path, 5), 0);
    err = (base_err)BASE_ERR_INIT;
    cr_expect_eq(gw_seal_open(&again, fake_directory, &err), BASE_FORMAT);
    cr_expect_not_null(strstr(err.text, path));
}
