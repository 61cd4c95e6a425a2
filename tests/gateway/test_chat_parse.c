/* Bodies of /v1/chat/completions: what is refused and which field is named, what reaches the
 * engine, and the pass that mends JSON before jansson sees it. */
#include "fake.h"

#include "gateway/body.h"

TestSuite(chat_parse, .init = fake_start, .fini = fake_stop, .timeout = 60);
TestSuite(body, .timeout = 20);

#define MESSAGES "\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define BODY(rest) "{" MESSAGES "," rest "}"
#define SAID(content)                                                                              \
    "{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":" content "}]}"
#define TOOL "{\"type\":\"function\",\"function\":{\"name\":\"f\"}}"
#define WITH_TOOL(rest) BODY("\"tools\":[" TOOL "]," rest)
#define CALLED(call)                                                                               \
    "{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":"          \
    "\"assistant\",\"content\":null,"                                                              \
    "\"tool_calls\":[" call "]},{\"role\":\"tool\",\"tool_call_id\":\"c\",\"content\":\"r\"}]}"
#define ARGUMENTS(text)                                                                            \
    CALLED("{\"id\":\"c\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":" text  \
           "}}")

/* Sends it and lets the engine answer nothing. What it was asked is in `engine` then. */
static void run(const char *body)
{
    gw_exchange *e = send_text(body);
    cr_assert(admit(e), "%s: %s", body, e->out.data);
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e);
    cr_assert_eq(e->status, 200);
    free_exchange(e);
}

static void refused(const char *body, int status, const char *param, const char *code)
{
    gw_exchange *e = send_text(body);
    if (admit(e)) {
        engine_done(ENG_FINISH_STOP, 1, -1, 0);
        pump_until_over(e);
    }
    cr_expect_eq(e->status, status, "%.200s: %d", body, e->status);
    if (e->status == status) {
        json_t *json = answer_json(e);
        const char *named = json_string_value(at(json, "error.param"));
        cr_expect(param ? named && strcmp(named, param) == 0 : named == NULL, "%.200s: param %s",
                  body, named ? named : "null");
        if (code)
            cr_expect_str_eq(text_at(json, "error.code"), code, "%.200s", body);
        cr_expect_eq(json_object_size(at(json, "error")), 4, "message, type, param, code");
        json_decref(json);
    }
    free_exchange(e);
}

Test(chat_parse, errors_name_the_field)
{
    static const struct {
        const char *body, *param;
    } rows[] = {
        {"{", NULL},
        {"", NULL},
        {"[]", NULL},
        {"\"x\"", NULL},
        {"{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]} x", NULL},
        {"{" MESSAGES ",\"a\\u0000b\":1}", NULL},
        {"{" MESSAGES ",\"a\":1-2-3-4-5-6-7-8-9-10-11-12-13-14}", NULL},
        {SAID("\"\xff\""), NULL},
        {"{\"messages\":[]}", "model"},
        {"{\"model\":null,\"messages\":[]}", "model"},
        {"{\"model\":[],\"messages\":[]}", "model"},
        {"{\"model\":\"a\\u0000b\",\"messages\":[]}", "model"},
        {"{\"model\":\"fake\"}", "messages"},
        {"{\"model\":\"fake\",\"messages\":[]}", "messages"},
        {"{\"model\":\"fake\",\"messages\":{}}", "messages"},
        {"{\"model\":\"fake\",\"messages\":[3]}", "messages[0]"},
        {"{\"model\":\"fake\",\"messages\":[{\"role\":\"wizard\",\"content\":\"x\"}]}",
         "messages[0].role"},
        {"{\"model\":\"fake\",\"messages\":[{\"content\":\"x\"}]}", "messages[0].role"},
        {"{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"name\":1}]}",
         "messages[0].name"},
        {SAID("3"), "messages[0].content"},
        {SAID("null"), "messages[0].content"},
        {SAID("[3]"), "messages[0].content[0]"},
        {SAID("[{\"type\":\"text\"}]"), "messages[0].content[0].text"},
        {SAID("[{\"type\":\"text\",\"text\":\"x\"},{\"type\":\"input_blob\"}]"),
         "messages[0].content[1].type"},
        {SAID("[{\"type\":\"image_url\",\"image_url\":{\"url\":\"x\"}}]"),
         "messages[0].content[0].type"},
        {SAID("[{\"type\":\"input_audio\"}]"), "messages[0].content[0].type"},
        {SAID("[{\"type\":\"file\"}]"), "messages[0].content[0].type"},
        {"{\"model\":\"fake\",\"messages\":[{\"role\":\"tool\",\"content\":\"x\"}]}",
         "messages[0].tool_call_id"},
        {"{\"model\":\"fake\",\"messages\":[{\"role\":\"assistant\",\"reasoning_content\":1}]}",
         "messages[0].reasoning_content"},
        {"{\"model\":\"fake\",\"messages\":[{\"role\":\"assistant\",\"tool_calls\":{}}]}",
         "messages[0].tool_calls"},
        {CALLED("3"), "messages[1].tool_calls[0]"},
        {CALLED("{\"id\":\"c\"}"), "messages[1].tool_calls[0].function"},
        {CALLED("{\"id\":\"c\",\"function\":{}}"), "messages[1].tool_calls[0].function.name"},
        {CALLED("{\"id\":1,\"function\":{\"name\":\"f\"}}"), "messages[1].tool_calls[0].id"},
        {ARGUMENTS("{}"), "messages[1].tool_calls[0].function.arguments"},
        {ARGUMENTS("\"{\\\"a\\\":\""), "messages[1].tool_calls[0].function.arguments"},
        {ARGUMENTS("\"[1]\""), "messages[1].tool_calls[0].function.arguments"},
        {ARGUMENTS("\"3\""), "messages[1].tool_calls[0].function.arguments"},
        {BODY("\"tools\":{}"), "tools"},
        {BODY("\"tools\":[3]"), "tools[0]"},
        {BODY("\"tools\":[" TOOL ",{\"type\":\"function\"}]"), "tools[1].function"},
        {BODY("\"tools\":[{\"type\":\"function\",\"function\":{}}]"), "tools[0].function.name"},
        {BODY("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a b\"}}]"),
         "tools[0].function.name"},
        {BODY(
             "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":[]}}]"),
         "tools[0].function.parameters"},
        {BODY(
             "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":1}}]"),
         "tools[0].function.description"},
        {BODY("\"tools\":[{\"type\":\"web_search\"}]"), "tools[0].type"},
        {BODY("\"tools\":[{\"type\":\"custom\"}]"), "tools[0].custom"},
        {BODY("\"tools\":[{\"type\":\"custom\",\"custom\":{\"name\":\"a b\"}}]"),
         "tools[0].custom.name"},
        {BODY("\"tools\":[{\"type\":\"custom\",\"custom\":{\"name\":\"f\",\"format\":{\"type\":"
              "\"xml\"}}}]"),
         "tools[0].custom.format.type"},
        {BODY("\"tools\":[{\"type\":\"custom\",\"custom\":{\"name\":\"f\",\"format\":{\"type\":"
              "\"grammar\",\"grammar\":{\"syntax\":\"regex\"}}}}]"),
         "tools[0].custom.format.grammar.definition"},
        {BODY("\"tools\":[{\"type\":\"custom\",\"custom\":{\"name\":\"f\",\"format\":{\"type\":"
              "\"grammar\",\"grammar\":{\"syntax\":\"lark\",\"definition\":\"start: A\"}}}}]"),
         "tools[0].custom.format.grammar.syntax"},
        {WITH_TOOL("\"tool_choice\":3"), "tool_choice"},
        {WITH_TOOL("\"tool_choice\":\"maybe\""), "tool_choice"},
        {WITH_TOOL("\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"g\"}}"),
         "tool_choice.function.name"},
        {WITH_TOOL("\"tool_choice\":{\"type\":\"function\"}"), "tool_choice.function.name"},
        {WITH_TOOL("\"parallel_tool_calls\":1"), "parallel_tool_calls"},
        {BODY("\"prediction\":3"), "prediction"},
        {BODY("\"prediction\":{\"type\":\"static\"}"), "prediction.type"},
        {BODY("\"prediction\":{\"type\":\"content\",\"content\":3}"), "prediction.content"},
        {BODY("\"include_stop_str_in_output\":3"), "include_stop_str_in_output"},
        {BODY("\"tool_choice\":\"required\""), "tool_choice"},
        {BODY("\"temperature\":-0.1"), "temperature"},
        {BODY("\"temperature\":2.1"), "temperature"},
        {BODY("\"temperature\":\"1\""), "temperature"},
        {BODY("\"temperature\":1e999"), "temperature"},
        {BODY("\"top_p\":1.01"), "top_p"},
        {BODY("\"presence_penalty\":3"), "presence_penalty"},
        {BODY("\"frequency_penalty\":-3"), "frequency_penalty"},
        {BODY("\"repetition_penalty\":0"), "repetition_penalty"},
        {BODY("\"min_p\":2"), "min_p"},
        {BODY("\"top_k\":-2"), "top_k"},
        {BODY("\"extra_body\":{\"top_k\":\"x\"}"), "top_k"},
        {BODY("\"min_tokens\":-1"), "min_tokens"},
        {BODY("\"ignore_eos\":1"), "ignore_eos"},
        {BODY("\"max_tokens\":0"), "max_tokens"},
        {BODY("\"max_tokens\":1.5"), "max_tokens"},
        {BODY("\"max_completion_tokens\":\"5\""), "max_completion_tokens"},
        {BODY("\"n\":0"), "n"},
        {BODY("\"n\":2"), "n"},
        {BODY("\"n\":1000000"), "n"},
        {BODY("\"seed\":\"x\""), "seed"},
        {BODY("\"stop\":\"\""), "stop"},
        {BODY("\"stop\":[\"\",\"x\"]"), "stop[0]"},
        {BODY("\"stop\":[\"x\",1]"), "stop[1]"},
        {BODY("\"stop\":[\"a\",\"b\",\"c\",\"d\",\"e\"]"), "stop"},
        {BODY("\"stop\":3"), "stop"},
        {BODY("\"stop_token_ids\":[2000]"), "stop_token_ids[0]"},
        {BODY("\"stop_token_ids\":[1,-1]"), "stop_token_ids[1]"},
        {BODY("\"logit_bias\":{\"AI\":1}"), "logit_bias"},
        {BODY("\"logit_bias\":{\"99999999\":1}"), "logit_bias"},
        {BODY("\"logit_bias\":{\"5\":101}"), "logit_bias.5"},
        {BODY("\"logit_bias\":[]"), "logit_bias"},
        {BODY("\"logprobs\":1"), "logprobs"},
        {BODY("\"top_logprobs\":21"), "top_logprobs"},
        {BODY("\"stream\":\"yes\""), "stream"},
        {BODY("\"stream_options\":1"), "stream_options"},
        {BODY("\"stream_options\":{\"include_usage\":1}"), "stream_options.include_usage"},
        {BODY("\"response_format\":1"), "response_format"},
        {BODY("\"response_format\":{\"type\":\"xml\"}"), "response_format.type"},
        {BODY("\"response_format\":{\"type\":\"json_schema\"}"), "response_format.json_schema"},
        {BODY("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"strict\":true}}"),
         "response_format.json_schema.schema"},
        {BODY("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":1}}"),
         "response_format.json_schema.schema"},
        {BODY("\"guided_choice\":[]"), "guided_choice"},
        {BODY("\"guided_regex\":1"), "guided_regex"},
        {BODY("\"structured_outputs\":{\"choice\":[1]}"), "structured_outputs.choice"},
        {BODY("\"grammar\":\"root ::= (\""), "grammar"},
        {BODY("\"reasoning_effort\":1"), "reasoning_effort"},
        {BODY("\"chat_template_kwargs\":1"), "chat_template_kwargs"},
        {BODY("\"thinking\":1"), "thinking"},
        {BODY("\"enable_thinking\":1"), "enable_thinking"},
        {BODY("\"modalities\":[\"text\",\"audio\"]"), "modalities"},
        {BODY("\"store\":\"x\""), "store"},
        {BODY("\"metadata\":{\"a\":1}"), "metadata"},
        {BODY("\"user\":1"), "user"},
        {BODY("\"session_id\":1"), "session_id"},
        {BODY("\"cache_salt\":1"), "cache_salt"},
        {BODY("\"continue_final_message\":true"), "continue_final_message"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        refused(rows[i].body, 400, rows[i].param, NULL);
}

Test(chat_parse, an_unknown_model_is_404_and_its_name_is_escaped)
{
    refused(
        "{\"model\":\"x\\n\\u001b[31m\\\"\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
        404, "model", "model_not_found");
    char *aliases[] = {"gpt-4o"};
    fake_conf.model_aliases = (gw_conf_list){aliases, 1};
    run("{\"model\":\"gpt-4o\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}");
    refused("{\"model\":\"gpt-5\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}", 404,
            "model", "model_not_found");
    aliases[0] = "*";
    run("{\"model\":\"gpt-5\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}");
}

Test(chat_parse, a_prompt_that_fills_the_window_is_refused_with_both_numbers)
{
    char *body = malloc(3 * FAKE_WINDOW), *text = malloc(FAKE_WINDOW + 1);
    memset(text, 'a', FAKE_WINDOW);
    for (int spare = 0; spare < 2; spare++) {
        text[FAKE_WINDOW - 2 - spare] =
            '\0'; /* one token for the role, one for the answer's beginning */
        sprintf(body, SAID("\"%s\""), text);
        if (spare) {
            run(body);
            cr_assert_eq(engine.request.max_tokens, 1, "clamped to what the window leaves");
        } else {
            refused(body, 400, "messages", "context_length_exceeded");
            gw_exchange *e = send_text(body);
            pump_until_over(e);
            cr_assert_not_null(strstr(e->out.data, "maximum context length is 5000 tokens"));
            cr_assert_not_null(strstr(e->out.data, "you requested 5000 tokens"));
            free_exchange(e);
        }
    }
    free(body);
    free(text);
}

Test(chat_parse, messages_reach_the_engine_as_they_are_meant)
{
    static const struct {
        const char *messages, *rendered;
    } rows[] = {
        {"{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"developer\",\"content\":\"d\"},{"
         "\"role\":\"user\",\"content\":\"u\"}",
         "system:s|system:d|user:u|"},
        {"{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"AAA "
         "\"},{\"type\":\"text\",\"text\":\"BBB\"}]}",
         "user:AAA BBB|"},
        {"{\"role\":\"user\",\"content\":[]}", "user:|"},
        {"{\"role\":\"user\",\"content\":[\"a\",{\"type\":\"refusal\",\"refusal\":\"b\"}]}",
         "user:ab|"},
        {"{\"role\":\"user\",\"content\":\"cut \\ud83d\"}", "user:cut \xef\xbf\xbd|"},
        {"{\"role\":\"user\",\"content\":\"\\udc00\\ud83d\\ude00\"}",
         "user:\xef\xbf\xbd\xf0\x9f\x98\x80|"},
        {"{\"role\":\"assistant\",\"content\":\"a\",\"reasoning_content\":\"r\"}",
         "assistant:(r)a|"},
        {"{\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"r\"}", "assistant:(r)a|"},
        {"{\"role\":\"assistant\",\"content\":\"a\",\"reasoning_content\":\"\",\"reasoning\":"
         "\"r\"}",
         "assistant:(r)a|"},
        {"{\"role\":\"assistant\",\"content\":\"a\",\"reasoning_details\":[{\"type\":\"reasoning."
         "text\",\"text\":\"r\"},"
         "{\"type\":\"x\"},{\"text\":\"s\"}]}",
         "assistant:(rs)a|"},
        {"{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"c\",\"function\":{\"name\":\"f\","
         "\"arguments\":\"{\\\"b\\\":1.0, "
         "\\\"a\\\":2}\"}}]}",
         "assistant:[f {\"b\":1.0, \"a\":2}]|"},
        {"{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"c\",\"function\":{"
         "\"name\":\"f\",\"arguments\":\"\"}}]}",
         "assistant:[f {}]|"},
        {"{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":\"c\",\"function\":{"
         "\"name\":\"f\",\"arguments\":\"null\"}}]}",
         "assistant:[f {}]|"},
        {"{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"c\",\"type\":\"custom\",\"custom\":{"
         "\"name\":\"f\",\"input\":\"a\\\"b\"}}]}",
         "assistant:[f {\"input\":\"a\\\"b\"}]|"},
        {"{\"role\":\"tool\",\"tool_call_id\":\"nobody\",\"content\":\"r\"}", "tool:r|"},
        {"{\"role\":\"tool\",\"tool_call_id\":\"x\",\"content\":null}", "tool:|"},
        {"{\"role\":\"tool\",\"tool_call_id\":\"x\",\"content\":[{\"type\":\"text\",\"text\":\"p\"}"
         "]}",
         "tool:p|"},
        {"{\"role\":\"function\",\"name\":\"f\",\"content\":\"r\"}", "tool:r|"},
        /* Results come in the order of the calls that they answer. */
        {"{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"a\",\"function\":{\"name\":\"f\"}},{"
         "\"id\":\"b\",\"function\":{\"name\":"
         "\"f\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"b\",\"content\":\"B\"},{\"role\":"
         "\"tool\",\"tool_call_id\":\"x\",\"content\":"
         "\"X\"},{\"role\":\"tool\",\"tool_call_id\":\"a\",\"content\":\"A\"}",
         "assistant:[f {}][f {}]|tool:A|tool:B|tool:X|"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char body[2048];
        snprintf(body, sizeof(body), "{\"model\":\"fake\",\"messages\":[%s]}", rows[i].messages);
        run(body);
        cr_expect_str_eq(engine.rendered.data, rows[i].rendered);
    }
}

Test(chat_parse, a_nul_in_a_text_reaches_the_tokenizer)
{
    gw_exchange *e = send_text(SAID("\"abc\\u0000SECRET\""));
    cr_assert(admit(e));
    cr_assert_eq(engine.request.token_count, 1 + 10 + 1);
    cr_assert_eq(engine.request.tokens[4], 0);
    engine_done(ENG_FINISH_STOP, 1, -1, 0);
    pump_until_over(e);
    free_exchange(e);
}

Test(chat_parse, tools_keep_their_text)
{
    run(BODY("\"max_tokens\":1,\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\","
             "\"parameters\":{\"type\":\"object\",\"properties\":"
             "{\"z\":{\"maximum\":18446744073709551615},\"a\":{\"multipleOf\":0.1,\"default\":"
             "1e400,\"pattern\":\"\\u00e9\"}}}}}]"));
    cr_assert_str_eq(
        engine.tools,
        "{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":{\"z\":{\"maximum\":"
        "18446744073709551615},\"a\":{\"multipleOf\":0.1,\"default\":1e400,\"pattern\":\"\\u00e9\"}"
        "}}};");
    run(BODY(
        "\"tools\":[{\"type\":\"custom\",\"custom\":{\"name\":\"g\",\"description\":\"d\"}}]"));
    cr_assert_str_eq(
        engine.tools,
        "{\"name\":\"g\",\"description\":\"d\",\"parameters\":{\"type\":\"object\","
        "\"properties\":{\"input\":{\"type\":\"string\"}},\"required\":[\"input\"]}};");
    run(BODY("\"tools\":[]"));
    cr_assert_eq(engine.tool_count, 0);
    run(BODY("\"tools\":null"));
    cr_assert_eq(engine.tool_count, 0);
}

Test(chat_parse, tool_choice_in_all_its_forms)
{
    static const struct {
        const char *body;
        eng_tool_choice choice;
    } rows[] = {
        {BODY("\"store\":false"), ENG_TOOL_NONE},
        {WITH_TOOL("\"store\":false"), ENG_TOOL_AUTO},
        {WITH_TOOL("\"tool_choice\":null"), ENG_TOOL_AUTO},
        {WITH_TOOL("\"tool_choice\":\"none\""), ENG_TOOL_NONE},
        {WITH_TOOL("\"tool_choice\":\"auto\""), ENG_TOOL_AUTO},
        {WITH_TOOL("\"tool_choice\":\"required\""), ENG_TOOL_REQUIRED},
        {WITH_TOOL("\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"f\"}}"),
         ENG_TOOL_NAMED},
        {WITH_TOOL("\"tool_choice\":{\"type\":\"function\",\"name\":\"f\"}"), ENG_TOOL_NAMED},
        {WITH_TOOL("\"tool_choice\":{\"type\":\"allowed_tools\",\"allowed_tools\":{\"mode\":"
                   "\"auto\",\"tools\":[" TOOL "]}}"),
         ENG_TOOL_AUTO},
        {WITH_TOOL("\"tool_choice\":{\"type\":\"allowed_tools\",\"allowed_tools\":{\"mode\":"
                   "\"required\",\"tools\":[" TOOL "]}}"),
         ENG_TOOL_NAMED},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        run(rows[i].body);
        cr_expect_eq(engine.request.tool_choice, rows[i].choice, "%s", rows[i].body);
    }
    run(WITH_TOOL("\"parallel_tool_calls\":false"));
    cr_assert_eq(engine.request.call_max, 1);
}

Test(chat_parse, sampling_reaches_the_engine)
{
    run(BODY("\"temperature\":0.5,\"top_p\":0.25,\"presence_penalty\":1,\"frequency_penalty\":-1,"
             "\"seed\":-5,\"max_tokens\":7,"
             "\"max_completion_tokens\":9,\"logit_bias\":{\"5\":-100},\"extra_body\":{\"top_k\":3,"
             "\"min_p\":0.5,"
             "\"repetition_penalty\":1.5,\"ignore_eos\":true,\"min_tokens\":4,\"stop_token_ids\":["
             "9]},\"logprobs\":true,"
             "\"top_logprobs\":20"));
    const eng_sampling *s = &engine.request.sampling;
    cr_assert_float_eq(s->temperature, 0.5, 1e-6);
    cr_assert_float_eq(s->top_p, 0.25, 1e-6);
    cr_assert_float_eq(s->min_p, 0.5, 1e-6);
    cr_assert_float_eq(s->repetition_penalty, 1.5, 1e-6);
    cr_assert_eq(s->top_k, 3);
    cr_assert_eq(s->seed, (uint64_t)-5);
    cr_assert_eq(s->min_tokens, 4);
    cr_assert(s->ignore_eos && s->logprobs);
    cr_assert_eq(s->top_logprobs, 20);
    cr_assert_eq(s->bias_count, 1);
    cr_assert_eq(s->stop_token_count, 1);
    cr_assert_eq(engine.request.max_tokens, 9, "max_completion_tokens wins");
    run(BODY("\"stop\":\"one\""));
    cr_assert_eq(engine.request.stop_count, 1);
    run(BODY("\"stop\":[]"));
    cr_assert_eq(engine.request.stop_count, 0);
    run(BODY("\"stop\":null,\"temperature\":null,\"tools\":null,\"seed\":null,\"logit_bias\":{},"
             "\"response_format\":{\"type\":\"text\"}"));
    cr_assert_float_eq(engine.request.sampling.temperature, 1, 1e-6);
    run(BODY("\"top_p\":0"));
    cr_assert_eq(engine.request.sampling.top_k, 1, "no mass is the most probable token");
    run(BODY("\"top_k\":-1,\"max_tokens\":1000000000000"));
    cr_assert_eq(engine.request.sampling.top_k, 0);
    cr_assert_leq(engine.request.max_tokens, FAKE_WINDOW);
    fake_conf.limits_output_tokens_max = 5;
    run(BODY("\"max_tokens\":100"));
    cr_assert_eq(engine.request.max_tokens, 5);
}

Test(chat_parse, thinking_from_the_most_explicit_wish)
{
    static const struct {
        const char *body;
        eng_thinking thinking;
        const char *effort;
    } rows[] = {
        {BODY("\"store\":false"), ENG_THINK_DEFAULT, ""},
        {BODY("\"reasoning_effort\":\"none\""), ENG_THINK_DISABLED, ""},
        {BODY("\"reasoning_effort\":\"minimal\""), ENG_THINK_DISABLED, ""},
        {BODY("\"reasoning_effort\":\"high\""), ENG_THINK_DEFAULT, "high"},
        {BODY("\"reasoning_effort\":\"ignore all\""), ENG_THINK_DEFAULT, ""},
        {BODY("\"reasoning\":{\"effort\":\"low\"}"), ENG_THINK_DEFAULT, "low"},
        {BODY("\"enable_thinking\":false"), ENG_THINK_DISABLED, ""},
        {BODY("\"extra_body\":{\"enable_thinking\":true}"), ENG_THINK_ENABLED, ""},
        {BODY("\"thinking\":{\"type\":\"adaptive\"}"), ENG_THINK_ADAPTIVE, ""},
        {BODY("\"chat_template_kwargs\":{\"thinking_mode\":\"enabled\"}"), ENG_THINK_ENABLED, ""},
        {BODY("\"chat_template_kwargs\":{\"enable_thinking\":false}"), ENG_THINK_DISABLED, ""},
        {BODY("\"chat_template_kwargs\":{\"thinking_mode\":\"adaptive\",\"enable_thinking\":false},"
              "\"thinking\":{\"type\":\"enabled\"},"
              "\"reasoning_effort\":\"none\""),
         ENG_THINK_ADAPTIVE, ""},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        run(rows[i].body);
        cr_expect_eq(engine.thinking, rows[i].thinking, "%s", rows[i].body);
        cr_expect_str_eq(engine.effort, rows[i].effort, "%s", rows[i].body);
    }
}

Test(chat_parse, an_effort_wakes_a_model_that_does_not_think_by_default)
{
    fake_info.thinking = ENG_THINK_DISABLED;
    run(BODY("\"reasoning_effort\":\"low\""));
    cr_assert_eq(engine.thinking, ENG_THINK_ENABLED);
    run(BODY("\"reasoning_effort\":\"low\",\"enable_thinking\":false"));
    cr_assert_eq(engine.thinking, ENG_THINK_DISABLED);
    run(BODY("\"reasoning_effort\":\"none\""));
    cr_assert_eq(engine.thinking, ENG_THINK_DISABLED);
    run(BODY("\"reasoning_effort\":\"hard\""));
    cr_assert_eq(engine.thinking, ENG_THINK_DEFAULT);
}

Test(chat_parse, a_prediction_reaches_the_engine_as_tokens)
{
    run(BODY(
        "\"prediction\":{\"type\":\"content\",\"content\":[{\"type\":\"text\",\"text\":\"ab\"},{"
        "\"type\":\"text\",\"text\":\"c\"}]}"));
    cr_assert_eq(engine.request.prediction_count, 3);
    run(BODY("\"prediction\":{\"type\":\"content\",\"content\":\"\"}"));
    cr_assert_eq(engine.request.prediction_count, 0);
    run(BODY("\"prediction\":null"));
    cr_assert_eq(engine.request.prediction_count, 0);
}

Test(chat_parse, hints_and_strangers_are_ignored)
{
    run(BODY("\"service_tier\":\"weird\",\"verbosity\":\"weird\",\"user\":\"u\",\"unknown\":{\"a\":"
             "[1]},\"prediction\":{\"type\":"
             "\"content\",\"content\":\"x\"},\"prompt_cache_options\":{\"mode\":\"implicit\"},"
             "\"web_search_options\":{},\"functions\":[],"
             "\"audio\":null,\"modalities\":[\"text\"],\"stream_options\":{\"include_usage\":true,"
             "\"include_obfuscation\":true},"
             "\"metadata\":{\"a\":\"b\"},\"priority\":3,\"store\":true"));
}

Test(chat_parse, a_cache_salt_has_a_space_of_its_own)
{
    run(BODY("\"store\":false"));
    uint64_t plain = engine.request.space;
    run(BODY("\"cache_salt\":\"a\""));
    uint64_t salted = engine.request.space;
    run(BODY("\"cache_salt\":\"a\",\"temperature\":0"));
    cr_assert_eq(engine.request.space, salted);
    cr_assert_neq(salted, plain);
    run(BODY("\"cache_salt\":\"b\""));
    cr_assert_neq(engine.request.space, salted);
}

Test(chat_parse, a_label_names_the_same_session_each_time)
{
    gw_id first;
    for (int i = 0; i < 3; i++) {
        gw_exchange *e = send_text(i < 2 ? BODY("\"session_id\":\"mine\"")
                                         : BODY("\"prompt_cache_key\":\"other\""));
        cr_assert(admit(e));
        engine_done(ENG_FINISH_STOP, 1, -1, 0);
        pump_until_over(e);
        json_t *json = answer_json(e);
        const char *session = text_at(json, "usage.whimbrel.session");
        if (!i)
            snprintf(first.text, sizeof(first.text), "%s", session);
        cr_assert_eq(strcmp(first.text, session) == 0, i < 2);
        json_decref(json);
        free_exchange(e);
    }
}

Test(chat_parse, hostile_bodies_are_answered_at_once)
{
    size_t size = 10 << 20;
    char *body = malloc(size + 256);
    uint64_t begin = base_now_ns();
    memset(body, '[', size);
    body[size] = '\0';
    refused(body, 400, NULL, NULL);
    int length = sprintf(body, "{" MESSAGES ",\"x\":[");
    for (size_t i = (size_t)length; i < size; i += 2)
        memcpy(body + i, "0,", 2);
    refused(body, 400, NULL, NULL);
    length = sprintf(body, "{" MESSAGES ",\"tools\":[" TOOL "],\"x\":\"");
    memset(body + length, 'a', size - (size_t)length);
    body[size] = '\0';
    refused(body, 400, NULL, NULL);
    length = sprintf(body, "{" MESSAGES ",\"x\":");
    memset(body + length, '7', size - (size_t)length);
    refused(body, 400, NULL, NULL);
    length = sprintf(body, "{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":\"");
    memset(body + length, 'a', size - (size_t)length);
    sprintf(body + size - 8, "\"}]}");
    refused(body, 400, NULL, "context_length_exceeded");
    cr_assert_lt(base_now_ns() - begin, 20000000000ull);
    free(body);
}

/* ---- the pass before jansson ---- */

static base_code mend(char *out, const char *text)
{
    strcpy(out, text);
    return gw_body_mend(out, strlen(out), 8, NULL);
}

Test(body, lone_surrogates_become_replacement_characters)
{
    static const char *const rows[][2] = {
        {"\"\\ud83d\"", "\"\\ufffd\""},
        {"\"\\uDE00\"", "\"\\ufffd\""},
        {"\"\\ud83d\\ude00\"", "\"\\ud83d\\ude00\""},
        {"\"\\uD83D\\uDE00x\"", "\"\\uD83D\\uDE00x\""},
        {"\"\\ud83d\\ud83d\\ude00\"", "\"\\ufffd\\ud83d\\ude00\""},
        {"\"\\ude00\\ud83d\"", "\"\\ufffd\\ufffd\""},
        {"\"\\\\ud83d\"", "\"\\\\ud83d\""},
        {"\"\\\\\\ud83d\"", "\"\\\\\\ufffd\""},
        {"\"\\ud83d", "\"\\ufffd"},
        {"\"\\ud8", "\"\\ud8"},
        {"\"\\", "\"\\"},
        {"\"\\u0000\\ud7ff\\ue000\"", "\"\\u0000\\ud7ff\\ue000\""},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char text[64];
        cr_expect_eq(mend(text, rows[i][0]), BASE_OK);
        cr_expect_str_eq(text, rows[i][1]);
    }
}

Test(body, depth_is_counted_outside_of_strings)
{
    char text[64];
    cr_assert_eq(mend(text, "[[[[[[[[\"[[[[[\"]]]]]]]]"), BASE_OK);
    cr_assert_eq(mend(text, "[[[[[[[[[1]]]]]]]]]"), BASE_INVALID);
    cr_assert_eq(mend(text, "{\"a\":[{\"b\":[{\"c\":[{\"d\":[{}]}]}]}]}"), BASE_INVALID);
    cr_assert_eq(mend(text, "[\"\\\"[[[[[[[[[[\"]"), BASE_OK);
    cr_assert_eq(mend(text, "]]]]]][1]"), BASE_OK, "jansson's business");
}

Test(body, a_numbers_text_is_bounded)
{
    char text[GW_BODY_NUMBER_MAX + 64];
    base_err err = BASE_ERR_INIT;
    int length = snprintf(text, sizeof(text), "{\"a\": %.*d}", GW_BODY_NUMBER_MAX, 0);
    cr_assert_eq(gw_body_mend(text, (size_t)length, 8, NULL), BASE_OK);
    length = snprintf(text, sizeof(text), "{\"a\": -%.*d}", GW_BODY_NUMBER_MAX, 0);
    cr_assert_eq(gw_body_mend(text, (size_t)length, 8, &err), BASE_INVALID);
    cr_assert_not_null(strstr(err.text, "byte 6 "), "%s", err.text);
    cr_assert_not_null(strstr(err.text, "1025 characters, 1024 are allowed"), "%s", err.text);
    /* Digits of a string are none. */
    length = snprintf(text, sizeof(text), "{\"a\": \"%.*d\"}", GW_BODY_NUMBER_MAX + 1, 0);
    cr_assert_eq(gw_body_mend(text, (size_t)length, 8, NULL), BASE_OK);
}

Test(body, numbers_that_jansson_refuses_are_kept_near)
{
    static const struct {
        const char *text;
        double value; /* NAN: refused */
    } rows[] = {
        {"[123456789012345678]", 123456789012345678.0},
        {"[1234567890123456789012]", 1e21},
        {"[-9999999999999999999999]", -9e21},
        {"[18446744073709551615]", 1e19},
        {"[1e400]", 1e308},
        {"[-1e400]", -1e308},
        {"[2e308]", 1e308},
        {"[1.7e308]", 1.7e308},
        {"[1E+000000400]", 1e308},
        {"[1e-400]", 0},
        {"[0.1]", 0.1},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char text[128], before[128];
        json_t *json = NULL;
        int length = snprintf(text, sizeof(text), "{\"a\":%s}", rows[i].text);
        strcpy(before, text);
        cr_assert_eq(gw_body_parse(&json, text, (size_t)length, NULL), BASE_OK, "%s", rows[i].text);
        cr_expect_str_eq(text, before, "the text keeps its digits");
        double value = json_number_value(json_array_get(json_object_get(json, "a"), 0));
        cr_expect(value == rows[i].value ||
                      (value / rows[i].value > 0.999999 && value / rows[i].value < 1.000001),
                  "%s: %g", rows[i].text, value);
        json_decref(json);
    }
    static const char *const wrong[] = {"{\"a\":01234567890123456789012}",
                                        "{\"a\":1-2-3-4-5-6-7-8-9-1-2-3-4}",
                                        "{\"a\":1e999+1}",
                                        "{\"a\":--1e999}",
                                        "{\"a\":1.e9999}",
                                        "{\"a\":.5e9999}"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        char text[128];
        json_t *json;
        strcpy(text, wrong[i]);
        cr_expect_eq(gw_body_parse(&json, text, strlen(text), NULL), BASE_INVALID, "%s", wrong[i]);
    }
}

Test(body, raw_text_loses_the_space_between_tokens_alone)
{
    static const struct {
        const char *from, *to;
    } rows[] = {
        {" { \"a b\" :\t[ 1e400 ,\r\n \"\\\" \\\\\" ] } ", "{\"a b\":[1e400,\"\\\" \\\\\"]}"},
        {"\" \"", "\" \""},
        {"", ""},
        {"1", "1"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        base_buf out;
        base_buf_init(&out, 0);
        gw_put_raw(&out, (eng_text){rows[i].from, strlen(rows[i].from)});
        cr_expect_str_eq(out.data ? out.data : "", rows[i].to);
        base_buf_deinit(&out);
    }
}

Test(body, members_are_found_raw_and_the_last_one_wins)
{
    static const char text[] =
        "{\"x\":{\"tools\":[1]},\"tools\":[2],\"to\\u006fls\": [ 3.10 ] ,\"y\":\"tools\"}";
    eng_text raw;
    cr_assert(gw_body_member(&raw, text, strlen(text), "tools"));
    cr_assert_eq(raw.length, 8);
    cr_assert_eq(memcmp(raw.data, "[ 3.10 ]", 8), 0);
    cr_assert_not(gw_body_member(&raw, text, strlen(text), "z"));
    cr_assert_not(gw_body_member(&raw, "[1]", 3, "z"));
    cr_assert_not(gw_body_member(&raw, "{\"z\":", 5, "z"));
}
