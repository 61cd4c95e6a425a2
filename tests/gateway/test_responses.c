/* The Responses dialect with a scripted engine: what reaches the engine, the order of events, the
 * objects, refusals. */
#include "fake.h"

#include <sys/stat.h>

#include "gateway/api_conversations.h"
#include "gateway/api_responses.h"
#include "gateway/seal.h"

static void start(void)
{
    base_err err = BASE_ERR_INIT;
    fake_conf.conversations_count_max = fake_conf.conversations_items_max = 16;
    fake_conf.limits_body_bytes_max = 1u << 20;
    fake_start();
    cr_assert_eq(gw_seal_open(&app.seal, fake_directory, &err), BASE_OK, "%s", err.text);
}

static void stop(void)
{
    fake_stop();
    gw_seal_close(app.seal);
}

TestSuite(responses, .init = start, .fini = stop, .timeout = 60);

#define HEAD "{\"model\":\"fake\""
#define HI HEAD ",\"input\":\"hi\""
#define TOOL                                                                                       \
    ",\"tools\":[{\"type\":\"web_search\"},{\"type\":\"function\",\"strict\":true,\"parameters\":" \
    "{\"type\":\"object\",\"x\":1.50},\"name\":\"f\",\"description\":\"d\"}]"

const char *gw_exchange_query(const gw_exchange *exchange)
{
    (void)exchange;
    return "";
}

static gw_exchange *post(const char *body)
{
    gw_exchange *exchange = calloc(1, sizeof *exchange);
    exchange->path = "/v1/responses";
    exchange->body = body;
    exchange->length = strlen(body);
    gw_api_responses_handle(&app, exchange);
    return exchange;
}

static void rendered(const char *body, const char *expected)
{
    gw_exchange *e = post(body);
    cr_assert(admit(e), "%s: %s", body, e->out.data);
    cr_expect_eq(engine.rendered.length, strlen(expected));
    cr_expect(strncmp(engine.rendered.data, expected, engine.rendered.length) == 0, "%s: %.*s",
              body, (int)engine.rendered.length, engine.rendered.data);
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e);
    cr_assert_eq(e->status, 200);
    free_exchange(e);
}

static void refused(const char *body, int status, const char *param)
{
    gw_exchange *e = post(body);
    cr_assert(!admit(e), "%s", body);
    json_t *json = answer_json(e);
    cr_expect_eq(e->status, status, "%s: %d %s", body, e->status, e->out.data);
    cr_expect_str_eq(text_at(json, "error.param"), param, "%s: %s", body, e->out.data);
    json_decref(json);
    free_exchange(e);
}

/* The events of a stream, checked for both lines, equal types and gapless numbers. */
static size_t events(gw_exchange *e, json_t *out[], size_t max)
{
    size_t count = 0;
    char *copy = strdup(e->out.data);
    for (char *rest = copy, *end; count < max && (end = strstr(rest, "\n\n")); rest = end + 2) {
        *end = '\0';
        char *data = strstr(rest, "\ndata: ");
        cr_assert(strncmp(rest, "event: ", 7) == 0 && data, "%s", rest);
        *data = '\0';
        out[count] = json_loads(data + 7, 0, NULL);
        cr_assert_not_null(out[count], "%s", data + 7);
        cr_assert_str_eq(text_at(out[count], "type"), rest + 7);
        cr_assert_eq((size_t)json_integer_value(at(out[count], "sequence_number")), count);
        count++;
    }
    free(copy);
    return count;
}

static void free_events(json_t *list[], size_t count)
{
    for (size_t i = 0; i < count; i++)
        json_decref(list[i]);
}

Test(responses, items_become_turns)
{
    rendered(HI "}", "user:hi|");
    rendered(HI ",\"instructions\":\"be\"}", "system:be|user:hi|");
    rendered(HEAD ",\"input\":[{\"role\":\"developer\",\"content\":\"d\"},"
                  "{\"role\":\"user\",\"content\":[{\"type\":\"input_text\",\"text\":\"a\"},"
                  "{\"type\":\"input_text\",\"text\":\"b\"}]}]}",
             "system:d|user:ab|");
    /* Reasoning, a message and calls are one turn of the assistant; unknown kinds are left out. */
    rendered(HEAD ",\"input\":[{\"role\":\"user\",\"content\":\"q\"},"
                  "{\"type\":\"reasoning\",\"id\":\"rs_1\",\"summary\":[{\"type\":\"summary_text\","
                  "\"text\":\"s\"}],\"content\":[{\"type\":\"reasoning_text\",\"text\":\"why\"}]},"
                  "{\"type\":\"message\",\"role\":\"assistant\",\"content\":[{\"type\":"
                  "\"output_text\",\"text\":\"t\",\"annotations\":[]}]},"
                  "{\"type\":\"function_call\",\"call_id\":\"a\",\"name\":\"f\",\"arguments\":"
                  "\"{\\\"x\\\":1}\"},"
                  "{\"type\":\"custom_tool_call\",\"call_id\":\"b\",\"name\":\"g\",\"input\":\"i\"}"
                  ",{\"type\":\"web_search_call\",\"id\":\"ws_1\"},"
                  "{\"type\":\"function_call_output\",\"call_id\":\"b\",\"output\":\"two\"},"
                  "{\"type\":\"function_call_output\",\"call_id\":\"a\",\"output\":[{\"type\":"
                  "\"input_text\",\"text\":\"one\"}]}]}",
             "user:q|assistant:(why)t[f {\"x\":1}][g {\"input\":\"i\"}]|tool:one|tool:two|");
    rendered(HEAD ",\"input\":[{\"role\":\"assistant\",\"content\":\"a\"},"
                  "{\"role\":\"assistant\",\"content\":\"b\"},{\"role\":\"user\",\"content\":\"c\"}"
                  "]}",
             "assistant:a|assistant:b|user:c|");
}

Test(responses, settings_reach_the_engine)
{
    gw_exchange *e = post(HI TOOL ",\"tool_choice\":{\"type\":\"function\",\"name\":\"f\"},"
                                  "\"parallel_tool_calls\":false,\"max_output_tokens\":77,"
                                  "\"temperature\":0.5,\"reasoning\":{\"effort\":\"high\"}}");
    cr_assert(admit(e), "%s", e->out.data);
    cr_expect_str_eq(
        engine.tools,
        "{\"name\":\"f\",\"description\":\"d\",\"parameters\":{\"type\":\"object\",\"x\":1.50}};");
    cr_expect_eq(engine.request.tool_choice, ENG_TOOL_NAMED);
    cr_expect_eq(engine.request.call_max, 1);
    cr_expect_eq(engine.request.max_tokens, 77);
    cr_expect_eq(engine.request.sampling.temperature, 0.5f);
    cr_expect_str_eq(engine.effort, "high");
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e);
    free_exchange(e);
    e = post(HI TOOL ",\"tool_choice\":{\"type\":\"allowed_tools\",\"mode\":\"required\",\"tools\":"
                     "[{\"type\":\"function\",\"name\":\"f\"}]},\"reasoning\":{\"effort\":"
                     "\"none\"}}");
    cr_assert(admit(e), "%s", e->out.data);
    cr_expect_eq(engine.request.tool_choice, ENG_TOOL_NAMED);
    cr_expect_eq(engine.thinking, ENG_THINK_DISABLED);
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e);
    free_exchange(e);
}

Test(responses, refusals_name_the_field)
{
    refused("{\"input\":\"hi\"}", 400, "model");
    refused(HEAD "}", 400, "input");
    refused(HEAD ",\"input\":[]}", 400, "input");
    refused(HEAD ",\"input\":7}", 400, "input");
    refused(HEAD ",\"input\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_image\"}]}]}", 400,
            "input[0].content[0].type");
    refused(HEAD ",\"input\":[{\"role\":\"wizard\",\"content\":\"x\"}]}", 400, "input[0].role");
    refused(HEAD ",\"input\":[{\"type\":\"function_call_output\",\"output\":\"x\"}]}", 400,
            "input[0].call_id");
    refused(HEAD ",\"input\":[{\"type\":\"item_reference\",\"id\":\"msg_1\"}]}", 404, "input[0]");
    refused(HI ",\"background\":true,\"store\":false}", 400, "background");
    refused(HI ",\"text\":{\"format\":5}}", 400, "text.format");
    refused(HI ",\"top_logprobs\":21}", 400, "top_logprobs");
    refused(HI ",\"tool_choice\":\"required\"}", 400, "tool_choice");
    refused(HI TOOL ",\"tool_choice\":{\"type\":\"function\",\"name\":\"g\"}}", 400, "tool_choice");
    refused(HI ",\"max_output_tokens\":\"many\"}", 400, "max_output_tokens");
    refused(HI ",\"metadata\":{\"a\":1}}", 400, "metadata");
    refused("{\"model\":\"other\",\"input\":\"hi\"}", 404, "model");
}

Test(responses, a_whole_answer_has_the_wire_shape)
{
    gw_exchange *e =
        post(HI TOOL ",\"metadata\":{\"k\":\"v\"},\"include\":[\"reasoning.encrypted_content\"]}");
    cr_assert(admit(e));
    engine_started(3);
    engine_part(ENG_PART_REASONING, 0, "wh");
    engine_part(ENG_PART_REASONING, 0, "y");
    engine_part(ENG_PART_TEXT, 0, "Hello\"");
    engine_part(ENG_PART_CALL_BEGIN, 0, "f");
    engine_part(ENG_PART_CALL_ARGS, 0, "{}");
    engine_part(ENG_PART_CALL_END, 0, "");
    engine_done(ENG_FINISH_CALLS, 9, -1, 12);
    pump_until_over(e);
    cr_assert_eq(e->status, 200);
    json_t *json = answer_json(e);
    cr_assert_eq(strncmp(text_at(json, "id"), "resp_", 5), 0);
    cr_assert_str_eq(text_at(json, "object"), "response");
    cr_assert_str_eq(text_at(json, "status"), "completed");
    cr_assert(json_is_integer(at(json, "completed_at")));
    static const char *const nulls[] = {"error", "incomplete_details", "instructions",
                                        "conversation", "previous_response_id"};
    for (size_t i = 0; i < sizeof nulls / sizeof *nulls; i++)
        cr_assert(json_is_null(at(json, nulls[i])), "%s", nulls[i]);
    cr_assert_str_eq(text_at(json, "metadata.k"), "v");
    cr_assert_str_eq(text_at(json, "tool_choice"), "auto");
    cr_assert_eq(json_array_size(at(json, "tools")), 2, "as they were sent");
    cr_assert(json_is_true(at(json, "store")));
    cr_assert_eq(json_array_size(at(json, "output")), 3);
    cr_assert_str_eq(text_at(json, "output.0.type"), "reasoning");
    cr_assert_str_eq(text_at(json, "output.0.content.0.text"), "why");
    cr_assert_gt(strlen(text_at(json, "output.0.encrypted_content")), 40);
    cr_assert_str_eq(text_at(json, "output.1.content.0.text"), "Hello\"");
    cr_assert_str_eq(text_at(json, "output.1.role"), "assistant");
    cr_assert_str_eq(text_at(json, "output.2.type"), "function_call");
    cr_assert_str_eq(text_at(json, "output.2.arguments"), "{}");
    cr_assert_eq(strlen(text_at(json, "output.2.call_id")), 37);
    cr_assert_eq(json_integer_value(at(json, "usage.output_tokens")), 9);
    cr_assert_eq(json_integer_value(at(json, "usage.input_tokens_details.cached_tokens")), 3);
    cr_assert(json_is_true(at(json, "usage.whimbrel.stored")));
    json_decref(json);
    free_exchange(e);
}

Test(responses, a_stream_has_every_event_in_order)
{
    static const char *const expected[] = {"response.created",
                                           "response.in_progress",
                                           "response.output_item.added",
                                           "response.content_part.added",
                                           "response.reasoning_text.delta",
                                           "response.reasoning_text.done",
                                           "response.content_part.done",
                                           "response.output_item.done",
                                           "response.output_item.added",
                                           "response.content_part.added",
                                           "response.output_text.delta",
                                           "response.output_text.delta",
                                           "response.output_text.done",
                                           "response.content_part.done",
                                           "response.output_item.done",
                                           "response.output_item.added",
                                           "response.function_call_arguments.delta",
                                           "response.function_call_arguments.done",
                                           "response.output_item.added",
                                           "response.function_call_arguments.delta",
                                           "response.function_call_arguments.done",
                                           "response.output_item.done",
                                           "response.output_item.done",
                                           "response.completed"};
    enum { COUNT = sizeof expected / sizeof *expected };
    gw_exchange *e = post(HI TOOL ",\"stream\":true}");
    cr_assert(admit(e));
    cr_assert(e->begun, "headers go out with the admission");
    engine_started(3);
    engine_part(ENG_PART_REASONING, 0, "why");
    engine_part(ENG_PART_TEXT, 0, "Hi");
    engine_part(ENG_PART_TEXT, 0, "!");
    for (uint32_t i = 0; i < 2; i++) {
        engine_part(ENG_PART_CALL_BEGIN, i, "f");
        engine_part(ENG_PART_CALL_ARGS, i, "{\"a\":1}");
        engine_part(ENG_PART_CALL_END, i, "");
    }
    pump_all();
    cr_assert_null(strstr(e->out.data, "function_call\",\"status\":\"completed"),
                   "no call is done before the commit");
    engine_done(ENG_FINISH_CALLS, 9, -1, 20);
    pump_until_over(e);
    json_t *list[64];
    size_t count = events(e, list, 64);
    for (size_t i = 0; i < count && i < COUNT; i++)
        cr_assert_str_eq(text_at(list[i], "type"), expected[i], "event %zu", i);
    cr_assert_eq(count, (size_t)COUNT);
    cr_assert_str_eq(text_at(list[0], "response.status"), "in_progress");
    cr_assert(json_is_null(at(list[0], "response.usage")));
    cr_assert_eq(json_array_size(at(list[0], "response.output")), 0);
    cr_assert_str_eq(text_at(list[10], "delta"), "Hi");
    cr_assert(json_is_array(at(list[10], "logprobs")));
    cr_assert_str_eq(text_at(list[12], "text"), "Hi!");
    cr_assert_str_eq(text_at(list[10], "item_id"), text_at(list[8], "item.id"));
    cr_assert_str_eq(text_at(list[15], "item.arguments"), "");
    cr_assert_str_eq(text_at(list[17], "arguments"), "{\"a\":1}");
    cr_assert_str_eq(text_at(list[17], "name"), "f");
    /* The items told one by one are the items of the whole. */
    static const int done[] = {7, 14, 21, 22};
    for (size_t i = 0; i < 4; i++) {
        cr_assert_eq((size_t)json_integer_value(at(list[done[i]], "output_index")), i);
        cr_assert(json_equal(at(list[done[i]], "item"),
                             json_array_get(at(list[COUNT - 1], "response.output"), i)));
    }
    cr_assert_eq(json_integer_value(at(list[COUNT - 1], "response.usage.output_tokens")), 9);
    free_events(list, count);
    free_exchange(e);
}

Test(responses, a_summary_has_events_of_its_own)
{
    gw_exchange *e = post(HI ",\"stream\":true,\"reasoning\":{\"summary\":\"auto\"}}");
    cr_assert(admit(e));
    engine_part(ENG_PART_REASONING, 0, "why");
    engine_done(ENG_FINISH_STOP, 3, -1, 3);
    pump_until_over(e);
    json_t *list[32];
    size_t count = events(e, list, 32);
    cr_assert_eq(count, 9);
    cr_assert_str_eq(text_at(list[3], "type"), "response.reasoning_summary_part.added");
    cr_assert_str_eq(text_at(list[4], "type"), "response.reasoning_summary_text.delta");
    cr_assert_str_eq(text_at(list[5], "text"), "why");
    cr_assert_str_eq(text_at(list[7], "item.summary.0.text"), "why");
    free_events(list, count);
    free_exchange(e);
}

Test(responses, a_cut_answer_is_incomplete)
{
    gw_exchange *e = post(HI TOOL ",\"stream\":true}");
    cr_assert(admit(e));
    engine_part(ENG_PART_CALL_BEGIN, 0, "f");
    engine_part(ENG_PART_CALL_ARGS, 0, "{\"a\":");
    engine_done(ENG_FINISH_LENGTH, 6, -1, 6);
    pump_until_over(e);
    json_t *list[32];
    size_t count = events(e, list, 32);
    cr_assert_eq(count, 7);
    cr_assert_str_eq(text_at(list[5], "item.status"), "incomplete");
    cr_assert_str_eq(text_at(list[6], "type"), "response.incomplete");
    cr_assert_str_eq(text_at(list[6], "response.incomplete_details.reason"), "max_output_tokens");
    free_events(list, count);
    free_exchange(e);
}

Test(responses, a_failure_is_an_event_of_a_stream)
{
    gw_exchange *e = post(HI ",\"stream\":true}");
    cr_assert(admit(e));
    engine_part(ENG_PART_TEXT, 0, "Hi");
    engine_done(ENG_FINISH_DEADLINE, 2, -1, 2);
    pump_until_over(e);
    json_t *list[32];
    size_t count = events(e, list, 32);
    cr_assert_str_eq(text_at(list[count - 1], "type"), "response.failed");
    cr_assert_str_eq(text_at(list[count - 1], "response.status"), "failed");
    cr_assert_gt(strlen(text_at(list[count - 1], "response.error.code")), 0);
    cr_assert_gt(strlen(text_at(list[count - 1], "response.error.message")), 0);
    free_events(list, count);
    free_exchange(e);
}

/* A turn begun on chat goes on here, with the hidden reasoning that chat's client dropped. */
Test(responses, a_session_of_the_chat_dialect_goes_on)
{
    gw_exchange *e = send_text("{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":"
                               "\"hi\"}],\"tools\":[{\"type\":\"function\",\"function\":{\"name\":"
                               "\"f\",\"description\":\"d\",\"parameters\":{\"type\":\"object\","
                               "\"x\":1.50}}}]}");
    cr_assert(admit(e));
    engine_part(ENG_PART_REASONING, 0, "why");
    engine_part(ENG_PART_TEXT, 0, "Hello");
    engine_done(ENG_FINISH_STOP, 9, -1, 8);
    pump_until_over(e);
    free_exchange(e);
    e = post(HEAD TOOL ",\"input\":[{\"role\":\"user\",\"content\":\"hi\"},{\"type\":\"message\","
                       "\"role\":\"assistant\",\"content\":[{\"type\":\"output_text\",\"text\":"
                       "\"Hello\"}]},{\"role\":\"user\",\"content\":\"more\"}]}");
    cr_assert(admit(e));
    cr_assert_eq(engine.spliced, 1);
    /* And the item's own reference does as well; what it names is played again. */
    fake_part_count = 0;
    engine_part(ENG_PART_TEXT, 0, "Bye");
    engine_done(ENG_FINISH_STOP, 4, -1, 3);
    pump_until_over(e);
    json_t *json = answer_json(e);
    char body[1024];
    snprintf(body, sizeof body,
             HEAD TOOL ",\"input\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\","
                       "\"content\":\"Hello\"},{\"role\":\"user\",\"content\":\"more\"},{\"type\":"
                       "\"item_reference\",\"id\":\"%s\"},{\"role\":\"user\",\"content\":\"x\"}]}",
             text_at(json, "output.0.id"));
    json_decref(json);
    free_exchange(e);
    e = post(body);
    cr_assert(admit(e), "%s", e->out.data);
    cr_assert_eq(engine.spliced, 2);
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e);
    free_exchange(e);
}

Test(responses, input_tokens_are_counted_without_a_run)
{
    gw_exchange *e = calloc(1, sizeof *e);
    e->path = "/v1/responses/input_tokens";
    e->body = HI "}";
    e->length = strlen(e->body);
    gw_api_responses_count(&app, e);
    pump_until_over(e);
    json_t *json = answer_json(e);
    cr_assert_str_eq(text_at(json, "object"), "response.input_tokens");
    cr_assert_eq(json_integer_value(at(json, "input_tokens")), 4, "a mark, two bytes, the opening");
    cr_assert_eq(atomic_load(&engine.submitted), 0);
    json_decref(json);
    free_exchange(e);
}

/* A call about a stored response; its answer, which the caller frees. */
static json_t *about(void (*handle)(gw_app *app, gw_exchange *exchange), const char *id,
                     const char *rest, int status)
{
    char path[96];
    snprintf(path, sizeof path, "/v1/responses/%s%s", id, rest);
    gw_exchange *e = calloc(1, sizeof *e);
    e->path = path;
    handle(&app, e);
    pump_until_over(e);
    cr_expect_eq(e->status, status, "%s: %d %s", path, e->status, e->out.data);
    json_t *json = answer_json(e);
    free_exchange(e);
    return json;
}

static gw_exchange *post_after(char body[512], const char *id, const char *rest)
{
    snprintf(body, 512, HEAD TOOL ",\"previous_response_id\":\"%s\",%s}", id, rest);
    return post(body);
}

Test(responses, a_stored_response_is_had_again_continued_and_deleted)
{
    char body[512];
    gw_exchange *e = post(HI TOOL ",\"instructions\":\"be\",\"metadata\":{\"k\":\"v\"}}");
    cr_assert(admit(e));
    engine_part(ENG_PART_REASONING, 0, "why");
    engine_part(ENG_PART_TEXT, 0, "Hello");
    engine_part(ENG_PART_CALL_BEGIN, 0, "f");
    engine_part(ENG_PART_CALL_ARGS, 0, "{}");
    engine_part(ENG_PART_CALL_END, 0, "");
    engine_done(ENG_FINISH_CALLS, 9, -1, 11);
    pump_until_over(e);
    json_t *first = answer_json(e);
    free_exchange(e);
    const char *id = text_at(first, "id");

    json_t *again = about(gw_api_responses_get, id, "", 200);
    cr_assert(json_equal(first, again), "%s\n%s", json_dumps(first, 0), json_dumps(again, 0));
    json_decref(again);
    json_decref(about(gw_api_responses_cancel, id, "/cancel", 400));

    /* The call must be answered; then all of it is there but the instructions. */
    e = post_after(body, id, "\"input\":\"more\"");
    cr_assert(!admit(e));
    cr_assert_not_null(strstr(e->out.data, "No tool output found for function call call_"));
    free_exchange(e);
    char output[256];
    snprintf(output, sizeof output,
             "\"instructions\":\"be\",\"input\":[{\"type\":\"function_call_output\",\"call_id\":"
             "\"%s\",\"output\":\"sun\"}]",
             text_at(first, "output.2.call_id"));
    for (int fork = 0; fork < 2; fork++) {
        e = post_after(body, id, output);
        cr_assert(admit(e), "%s", e->out.data);
        cr_assert_eq(engine.spliced, 1);
        cr_assert(strncmp(engine.rendered.data, "system:be|user:hi|assistant:SPLICED|tool:sun|",
                          engine.rendered.length) == 0,
                  "%.*s", (int)engine.rendered.length, engine.rendered.data);
        engine_part(ENG_PART_TEXT, 0, "Sunny");
        engine_done(ENG_FINISH_STOP, 6, -1, 5);
        pump_until_over(e);
        json_t *second = answer_json(e);
        cr_assert_str_eq(text_at(second, "previous_response_id"), id);
        json_decref(second);
        free_exchange(e);
    }

    json_t *gone = about(gw_api_responses_delete, id, "", 200);
    cr_assert(json_is_true(at(gone, "deleted")));
    json_decref(gone);
    gone = about(gw_api_responses_get, id, "", 404);
    cr_assert_str_eq(text_at(gone, "error.code"), "response_not_found");
    json_decref(gone);
    json_decref(about(gw_api_responses_delete, id, "", 404));
    e = post_after(body, id, output);
    cr_assert(!admit(e));
    cr_assert_eq(e->status, 400);
    cr_assert_not_null(strstr(e->out.data, "previous_response_not_found"));
    free_exchange(e);
    json_decref(first);
}

Test(responses, what_is_not_stored_is_not_found)
{
    char body[512];
    gw_exchange *e = post(HI ",\"store\":false}");
    cr_assert(admit(e));
    engine_part(ENG_PART_TEXT, 0, "Hello");
    engine_done(ENG_FINISH_STOP, 6, -1, 5);
    pump_until_over(e);
    json_t *json = answer_json(e);
    free_exchange(e);
    json_decref(about(gw_api_responses_get, text_at(json, "id"), "", 404));
    json_decref(about(gw_api_responses_get, "resp_1", "", 404));
    e = post_after(body, text_at(json, "id"), "\"input\":\"x\"");
    cr_assert(!admit(e));
    cr_assert_eq(e->status, 400);
    free_exchange(e);
    json_decref(json);
    /* A turn of another dialect is no response, though its items are the ledger's too. */
    e = send_text("{\"model\":\"fake\",\"store\":true,\"messages\":[{\"role\":\"user\",\"content\":"
                  "\"hi\"}]}");
    cr_assert(admit(e));
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e);
    json = answer_json(e);
    char id[64];
    snprintf(id, sizeof id, "resp_%s", text_at(json, "usage.whimbrel.turn") + 5);
    json_decref(about(gw_api_responses_get, id, "", 404));
    json_decref(json);
    free_exchange(e);
}

/* ---- conversations and compactions ---- */

static json_t *conversation(void (*handle)(gw_app *app, gw_exchange *exchange), const char *path,
                            const char *body, int status)
{
    gw_exchange *e = calloc(1, sizeof *e);
    e->path = path;
    e->body = body;
    e->length = strlen(body);
    handle(&app, e);
    pump_until_over(e);
    cr_expect_eq(e->status, status, "%s %s: %d %s", path, body, e->status, e->out.data);
    json_t *json = answer_json(e);
    free_exchange(e);
    return json;
}

Test(responses, a_conversation_gets_what_was_asked_and_answered_and_takes_it_along)
{
    char path[96], items[112], body[256];
    json_t *made = conversation(gw_api_conversations_create, "/v1/conversations",
                                "{\"items\":[{\"role\":\"developer\",\"content\":\"be\"}]}", 200);
    const char *id = text_at(made, "id");
    snprintf(path, sizeof path, "/v1/conversations/%s", id);
    snprintf(items, sizeof items, "%s/items", path);
    snprintf(body, sizeof body, HI ",\"conversation\":\"%s\"}", id);
    json_t *first = NULL;
    for (int turn = 0; turn < 2; turn++) {
        gw_exchange *e = post(body);
        cr_assert(admit(e), "%s", e->out.data);
        cr_expect_eq(engine.spliced, (uint32_t)turn, "exact tokens of the turn before");
        /* Who would change it while a turn runs is told to come again. */
        json_decref(conversation(gw_api_conversations_delete, path, "", 409));
        json_decref(conversation(gw_api_conversations_items_add, items, "{\"items\":[]}", 409));
        engine_part(ENG_PART_REASONING, 0, "why");
        engine_part(ENG_PART_TEXT, 0, "Hello");
        engine_done(ENG_FINISH_STOP, 9, -1, 8);
        pump_until_over(e);
        json_t *answer = answer_json(e);
        cr_expect_str_eq(text_at(answer, "conversation.id"), id);
        first = first ? first : json_incref(answer);
        json_decref(answer);
        free_exchange(e);
    }
    json_t *list = conversation(gw_api_conversations_items_list, items, "", 200);
    cr_assert_eq(json_array_size(at(list, "data")), 7, "one, and two of three");
    cr_expect_str_eq(text_at(list, "data.6.role"), "developer");
    cr_expect_str_eq(text_at(list, "data.5.content.0.text"), "hi");
    cr_expect(json_equal(at(list, "data.4"), at(first, "output.0")));
    cr_expect(json_equal(at(list, "data.3"), at(first, "output.1")));
    json_decref(list);
    json_decref(about(gw_api_responses_get, text_at(first, "id"), "", 200));
    json_decref(conversation(gw_api_conversations_delete, path, "", 200));
    json_decref(about(gw_api_responses_get, text_at(first, "id"), "", 404));
    json_decref(conversation(gw_api_conversations_items_list, items, "", 404));
    refused(body, 404, "conversation");
    gw_ledger_stats stats = gw_ledger_get_stats(app.ledger);
    cr_expect_eq(stats.conversations, 0);
    base_err err = BASE_ERR_INIT;
    cr_expect(gw_ledger_check(app.ledger, &err), "%s", err.text);
    json_decref(first);
    json_decref(made);
}

Test(responses, a_cancelled_turn_adds_nothing_to_its_conversation)
{
    char items[112], body[256];
    json_t *made = conversation(gw_api_conversations_create, "/v1/conversations", "{}", 200);
    snprintf(items, sizeof items, "/v1/conversations/%s/items", text_at(made, "id"));
    snprintf(body, sizeof body, HI ",\"conversation\":{\"id\":\"%s\"}}", text_at(made, "id"));
    gw_exchange *e = post(body);
    cr_assert(admit(e), "%s", e->out.data);
    engine_part(ENG_PART_TEXT, 0, "Hel");
    leave(e);
    engine_done(ENG_FINISH_CANCELLED, 3, -1, 3);
    pump_all();
    free_exchange(e);
    json_t *list = conversation(gw_api_conversations_items_list, items, "", 200);
    cr_expect_eq(json_array_size(at(list, "data")), 0);
    json_decref(list);
    json_decref(made);
}

Test(responses, a_compaction_is_a_summary_that_nobody_reads)
{
    char body[1024];
    gw_exchange *e = calloc(1, sizeof *e);
    e->path = "/v1/responses/compact";
    e->body =
        HEAD ",\"instructions\":\"be\",\"input\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":"
             "\"assistant\",\"content\":\"b\"},{\"role\":\"user\",\"content\":\"c\"}]}";
    e->length = strlen(e->body);
    gw_api_responses_compact(&app, e);
    cr_assert(admit(e), "%s", e->out.data);
    cr_expect_eq(engine.request.tool_choice, ENG_TOOL_NONE);
    cr_expect(strncmp(engine.rendered.data, "system:be|user:a|assistant:b|user:c|user:Write", 46) ==
                  0,
              "%s", engine.rendered.data);
    engine_part(ENG_PART_TEXT, 0, "The sum");
    engine_done(ENG_FINISH_STOP, 8, -1, 7);
    pump_until_over(e);
    json_t *json = answer_json(e);
    cr_assert_eq(e->status, 200);
    cr_assert_str_eq(text_at(json, "object"), "response.compaction");
    cr_assert_eq(json_array_size(at(json, "output")), 3, "what the user said, and the summary");
    cr_assert_null(strstr(e->out.data, "The sum"));
    char *output = json_dumps(at(json, "output"), 0);
    snprintf(body, sizeof body, HEAD ",\"input\":%s}", output);
    free_exchange(e);
    e = post(body);
    cr_assert(admit(e), "%s", e->out.data);
    cr_expect_not_null(strstr(engine.rendered.data, "user:a|user:c|user:The conversation before"));
    cr_expect_not_null(strstr(engine.rendered.data, "by the assistant:\n\nThe sum|"));
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e);
    free_exchange(e);
    /* Changed by a letter. */
    char *seal = strstr(body, "whim1.");
    cr_assert_not_null(seal);
    seal[20] = seal[20] == 'A' ? 'B' : 'A';
    refused(body, 400, "input[2].encrypted_content");
    free(output);
    json_decref(json);
}
