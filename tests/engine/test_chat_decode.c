/* The streaming decoder: states, types, tolerance, stop strings, counts; and the property that no
 * cut changes the result. */
#include "engine/base/rand.h"
#include "tests/engine/text_rig.h"

#define BLOCK_OPEN NS "<tool_call>\n"
#define BLOCK_CLOSE NS "</tool_call>"
#define CALL(name, body) NS "<invoke name=\"" name "\">" body NS "</invoke>\n"
#define PARAM(name, value) NS "<" name ">" value NS "</" name ">"

/* One tool of every type that the conversions know. */
static const eng_text tools[] = {
    {.data = "{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":{"
             "\"s\":{\"type\":\"string\"},\"i\":{\"type\":\"integer\"},\"n\":{\"type\":\"number\"},"
             "\"b\":{\"type\":\"boolean\"},"
             "\"z\":{\"type\":\"null\"},\"o\":{\"type\":\"object\",\"properties\":{\"x\":{\"type\":"
             "\"integer\"},\"y\":{\"type\":"
             "\"string\"},\"l\":{\"type\":\"array\",\"items\":{\"type\":\"integer\"}}}},"
             "\"a\":{\"type\":\"array\",\"items\":{\"type\":\"string\"}},\"ai\":{\"type\":"
             "\"array\",\"items\":{\"type\":\"integer\"}},"
             "\"sn\":{\"type\":[\"string\",\"null\"]},\"in\":{\"anyOf\":[{\"type\":\"integer\"},{"
             "\"type\":\"null\"}]},"
             "\"e\":{\"enum\":[\"a\",\"b\"]},\"en\":{\"enum\":[1,\"1\",null,\"none\"]},\"es\":{"
             "\"type\":[\"integer\",\"string\"],"
             "\"enum\":[\"1\",\"2\"]},\"c\":{\"const\":5},\"r\":{\"$ref\":\"#/$defs/"
             "R\"},\"any\":{},\"t\":true,"
             "\"m\":{\"type\":\"object\",\"additionalProperties\":{\"type\":\"integer\"}},"
             "\"os\":{\"oneOf\":[{\"type\":\"string\"},{\"type\":\"object\",\"properties\":{\"x\":{"
             "\"type\":\"integer\"}}}]},"
             "\"nb\":{\"type\":\"boolean\",\"nullable\":true},\"item\":{\"type\":\"integer\"}},"
             "\"$defs\":{\"R\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},"
             "\"r\":{\"$ref\":\"#/$defs/R\"}}}}}}"},
    {.data = "{\"description\":\"no parameters\",\"name\":\"g\\u0031\"}"},
};

typedef struct rig {
    eng_tok *tok;
    eng_codec *codec;
    rig_result got;
    eng_decoder_options options;
    eng_text tools[2];
} rig;

static rig *make_rig(void)
{
    rig *r = calloc(1, sizeof *r);
    r->tok = load_tok(SMALL_TOKENIZER);
    r->codec = make_codec(r->tok, "I", ENG_THINK_ADAPTIVE);
    for (int i = 0; i < 2; i++)
        r->tools[i] = text_of(tools[i].data);
    r->options = (eng_decoder_options){.parse = ENG_PARSE_CHAT,
                                       .thinking = ENG_THINK_ADAPTIVE,
                                       .tools = r->tools,
                                       .tool_count = 2};
    r->got.check_prefixes = true;
    return r;
}

static void end_rig(rig *r)
{
    rig_clear(&r->got);
    eng_codec_destroy(r->codec);
    eng_tok_destroy(r->tok);
    free(r);
}

static rig_result *run_with(rig *r, const char *text, bool ends)
{
    rig_clear(&r->got);
    r->got.check_prefixes = true;
    decode_cut(r->codec, &r->got, r->options, text, strlen(text), NULL, 0, ends);
    return &r->got;
}

static rig_result *run(rig *r, const char *text)
{
    return run_with(r, text, true);
}

static void expect(const rig_result *got, const char *reasoning, const char *text)
{
    cr_assert_str_eq(buf_text(&got->reasoning), reasoning);
    cr_assert_str_eq(buf_text(&got->text), text);
}

static void expect_call(const rig_result *got, uint32_t index, const char *name,
                        const char *arguments)
{
    cr_assert_lt(index, got->call_count, "there are %u calls", got->call_count);
    cr_assert_str_eq(buf_text(&got->calls[index].name), name);
    cr_assert_str_eq(buf_text(&got->calls[index].arguments), arguments);
    cr_assert(got->calls[index].whole);
}

/* ---- reasoning ---- */

Test(eng_decoder, reasoning_starts_where_the_prompt_left_it)
{
    rig *r = make_rig();
    expect(run(r, "plain"), "", "plain");
    expect(run(r, "<mm:think>why</mm:think>text"), "why", "text");
    expect(run(r, "</mm:think>text"), "", "text");
    expect(run(r, " <mm:think>why</mm:think>text"), "", " <mm:think>why</mm:think>text");
    expect(run(r, "text</mm:think>more<mm:think>"), "", "text</mm:think>more<mm:think>");
    expect(run(r, "<mm:think>a<mm:think>b</mm:think>c</mm:think>d"), "a<mm:think>b",
           "c</mm:think>d");
    expect(run(r, "<mm:think>never closed"), "never closed", "");
    expect(run(r, "<mm:thin"), "", "<mm:thin");
    expect(run(r, "<mm:think>x</mm:thin"), "x</mm:thin", "");
    r->options.starts_in_reasoning = true;
    r->options.thinking = ENG_THINK_ENABLED;
    expect(run(r, "why</mm:think>\n\ntext"), "why", "\n\ntext");
    expect(run(r, "<mm:think>why</mm:think>text"), "why", "text");
    expect(run(r, "</mm:think>text"), "", "text");
    r->options.starts_in_reasoning = false;
    r->options.thinking = ENG_THINK_DISABLED;
    expect(run(r, "text"), "", "text");
    expect(run(r, "</mm:think>text"), "", "text");
    expect(run(r, "<mm:think>why</mm:think>text</mm:think>"), "", "whytext</mm:think>");
    end_rig(r);
}

Test(eng_decoder, raw_output_is_all_text)
{
    rig *r = make_rig();
    r->options.parse = ENG_PARSE_RAW;
    r->options.starts_in_reasoning = true;
    expect(run(r, "<mm:think>x</mm:think>" BLOCK_OPEN), "", "<mm:think>x</mm:think>" BLOCK_OPEN);
    cr_assert_eq(r->got.call_count, 0);
    end_rig(r);
}

Test(eng_decoder, a_block_ends_a_thought_and_a_quote_of_one_does_not)
{
    rig *r = make_rig();
    rig_result *got = run(r, "<mm:think>hm" BLOCK_OPEN CALL("g1", "") BLOCK_CLOSE);
    expect(got, "hm", "");
    expect_call(got, 0, "g1", "{}");
    got = run(r, "<mm:think>I could write " NS "<tool_call> now</mm:think>but no");
    expect(got, "I could write  now", "but no");
    got = run(r, "<mm:think>stray " NS "x" NS NS "</invoke>y</mm:think>z");
    expect(got, "stray x</invoke>y",
           "z"); /* outside of a block the tag is text, the separator never */
    end_rig(r);
}

/* ---- prose ---- */

Test(eng_decoder, separators_in_prose_are_dropped_and_nothing_else)
{
    rig *r = make_rig();
    expect(run(r, "a" NS "b"), "", "ab");
    expect(run(r, "a" NS NS NS "b" NS), "", "ab");
    expect(run(r, "]<]mini" NS "]<]"), "", "]<]mini]<]");
    expect(run(r, "]<]<" NS "a]"), "", "]<]<a]");
    expect(run(r, "]<" NS), "", "]<");
    expect(run(r, NS "<tool_cal> and " NS "</tool_call>."), "", "<tool_cal> and .");
    expect(run(r, NS "<invoke name=\"f\">"), "", "<invoke name=\"f\">"); /* no block is open */
    cr_assert_eq(r->got.call_count, 0);
    expect(run(r, "<tool_call><invoke name=\"f\"></invoke></tool_call>"), "",
           "<tool_call><invoke name=\"f\"></invoke></tool_call>");
    cr_assert_eq(r->got.call_count, 0);
    end_rig(r);
}

Test(eng_decoder, prose_after_an_opening_goes_on_at_once)
{
    rig *r = make_rig();
    expect(run(r, "so: " NS "<tool_call> \n is how"), "", "so:  \n is how");
    expect(run(r, NS "<tool_call>" NS "<invoke name=x>"), "", "<invoke name=x>");
    rig_result *got = run(r, BLOCK_OPEN "Wait. " CALL("g1", "") BLOCK_CLOSE "\n bye \n");
    expect(got, "", "\nWait. \n bye \n");
    expect_call(got, 0, "g1", "{}");
    got = run(r, BLOCK_OPEN CALL("g1", "") BLOCK_CLOSE "\n \n");
    expect(got, "", ""); /* layout behind the block is no text */
    got = run(r, BLOCK_OPEN CALL("g1", "") "and so on");
    expect(got, "", "and so on");
    got = run(r, BLOCK_OPEN CALL("g1", "") BLOCK_CLOSE BLOCK_OPEN CALL("f", "") BLOCK_CLOSE);
    cr_assert_eq(got->call_count, 2);
    got = run(r, BLOCK_OPEN NS "<invoke name=\"a\nb\">" CALL("g1", "") BLOCK_CLOSE);
    expect_call(got, 0, "g1", "{}");
    cr_assert_null(strstr(buf_text(&got->text), "<invoke"));
    end_rig(r);
}

/* ---- types ---- */

static void expect_value(rig *r, const char *name, const char *value, const char *want)
{
    char text[8192], arguments[8192];
    snprintf(text, sizeof text,
             BLOCK_OPEN NS "<invoke name=\"f\">" NS "<%s>%s" NS "</%s>" NS
                           "</invoke>\n" BLOCK_CLOSE,
             name, value, name);
    snprintf(arguments, sizeof arguments, "{\"%s\":%s}", name, want);
    expect_call(run(r, text), 0, "f", arguments);
}

Test(eng_decoder, leaves_take_the_declared_type)
{
    rig *r = make_rig();
    static const char *const rows[][3] = {
        {"s", "12", "\"12\""},
        {"s", "", "\"\""},
        {"s", " x\r\n", "\" x\\r\\n\""},
        {"i", "3", "3"},
        {"i", " 3\n", "3"},
        {"i", "-0", "-0"},
        {"i", "123456789012345678901234567890", "123456789012345678901234567890"},
        {"i", "3.0", "3.0"},
        {"i", "3.5", "\"3.5\""},
        {"i", "007", "\"007\""},
        {"i", "+3", "\"+3\""},
        {"i", "three", "\"three\""},
        {"i", "", "\"\""},
        {"n", "2.50", "2.50"},
        {"n", "1e400", "1e400"},
        {"n", "0.1", "0.1"},
        {"n", "7", "7"},
        {"n", ".5", "\".5\""},
        {"n", "NaN", "\"NaN\""},
        {"n", "1 2", "\"1 2\""},
        {"b", "true", "true"},
        {"b", "false", "false"},
        {"b", "True", "\"True\""},
        {"z", "null", "null"},
        {"z", "", "null"},
        {"sn", "null", "null"},
        {"sn", "none", "\"none\""},
        {"sn", "", "\"\""},
        {"sn", " null ", "null"},
        {"in", "4", "4"},
        {"in", "null", "null"},
        {"in", "", "null"},
        {"in", "x", "\"x\""},
        {"e", "a", "\"a\""},
        {"e", "other", "\"other\""},
        {"en", "1", "1"},
        {"en", "null", "null"},
        {"en", "none", "\"none\""},
        {"es", "1", "\"1\""},
        {"es", "3", "3"},
        {"c", "5", "5"},
        {"any", "5", "\"5\""},
        {"t", "true", "\"true\""},
        {"undeclared", "5", "\"5\""},
        {"nb", "null", "null"},
        {"nb", "true", "true"},
        {"o", "", "{}"},
        {"o", "\n", "{}"},
        {"o", " {\"x\": 1.0, \"k\": [true]} ", "{\"x\": 1.0, \"k\": [true]}"},
        {"o", "{\"x\":", "\"{\\\"x\\\":\""},
        {"a", "", "[]"},
        {"a", "[\"p\", 2]", "[\"p\", 2]"},
        {"a", "one", "[\"one\"]"},
        {"ai", "7", "[7]"},
        {"os", "plain", "\"plain\""},
        {"os", "{\"x\":1}", "{\"x\":1}"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        expect_value(r, rows[i][0], rows[i][1], rows[i][2]);
    end_rig(r);
}

Test(eng_decoder, tags_nest_to_objects_and_lists)
{
    rig *r = make_rig();
    expect_value(r, "o",
                 PARAM("x", "5") PARAM("y", "6") PARAM("l", PARAM("item", "1") PARAM("item", "2")),
                 "{\"x\":5,\"y\":\"6\",\"l\":[1,2]}");
    expect_value(r, "a", PARAM("item", "x") PARAM("item", "1"), "[\"x\",\"1\"]");
    expect_value(r, "ai", PARAM("item", "1") "\n" PARAM("item", "2"), "[1,2]");
    expect_value(r, "o", PARAM("l", "1") PARAM("l", "2"),
                 "{\"l\":[1,2]}"); /* a repeated tag is a list */
    expect_value(r, "o", PARAM("k", "1") PARAM("x", "2") PARAM("k", "3"),
                 "{\"k\":[\"1\",\"3\"],\"x\":2}");
    expect_value(r, "m", PARAM("p", "1") PARAM("q", "2"), "{\"p\":1,\"q\":2}");
    expect_value(r, "r", PARAM("v", "1") PARAM("r", PARAM("v", "2") PARAM("r", PARAM("v", "3"))),
                 "{\"v\":1,\"r\":{\"v\":2,\"r\":{\"v\":3}}}");
    expect_value(r, "os", PARAM("x", "1"), "{\"x\":1}");
    expect_value(r, "undeclared", PARAM("k", PARAM("item", "1")), "{\"k\":[\"1\"]}");
    expect_value(r, "undeclared", PARAM("item", PARAM("k", "1")) PARAM("item", "2"),
                 "[{\"k\":\"1\"},\"2\"]");
    expect_value(r, "o", "words " PARAM("x", "1"), "{\"$text\":\"words \",\"x\":1}");
    expect_value(r, "o", PARAM("o", PARAM("o", "1")),
                 "{\"o\":{\"o\":\"1\"}}"); /* the parameter's own name inside */
    expect_value(r, "item", "4", "4");
    expect_value(r, "a", PARAM("item", "q\"\n") PARAM("item", ""), "[\"q\\\"\\n\",\"\"]");
    end_rig(r);
}

Test(eng_decoder, a_repeated_list_parameter_is_one_list)
{
    rig *r = make_rig();
    expect_call(
        run(r, BLOCK_OPEN CALL("f", PARAM("ai", "1") PARAM("ai", "2") PARAM("s", "x")) BLOCK_CLOSE),
        0, "f", "{\"ai\":[1,2],\"s\":\"x\"}");
    expect_call(
        run(r, BLOCK_OPEN CALL("f", PARAM("s", "x") PARAM("a", "1") PARAM("a", "2")) BLOCK_CLOSE),
        0, "f", "{\"s\":\"x\",\"a\":[\"1\",\"2\"]}");
    /* What is already out cannot be changed: the first value stays. */
    expect_call(run(r, BLOCK_OPEN CALL("f", PARAM("s", "x") PARAM("i", "1") PARAM("s", "y")
                                                PARAM("i", "2")) BLOCK_CLOSE),
                0, "f", "{\"s\":\"x\",\"i\":1}");
    end_rig(r);
}

Test(eng_decoder, nesting_is_bounded)
{
    rig *r = make_rig();
    base_buf text;
    base_buf_init(&text, 0);
    base_buf_puts(&text, BLOCK_OPEN NS "<invoke name=\"f\">" NS "<o>");
    for (int i = 0; i < 5000; i++)
        base_buf_puts(&text, NS "<d>");
    base_buf_puts(&text, "x");
    for (int i = 0; i < 5000; i++)
        base_buf_puts(&text, NS "</d>");
    base_buf_puts(&text, NS "</o>" NS "</invoke>\n" BLOCK_CLOSE);
    rig_result *got = run(r, text.data);
    cr_assert_eq(got->call_count, 1);
    cr_assert(got->calls[0].whole);
    json_t *json = json_loads(buf_text(&got->calls[0].arguments), 0, NULL);
    cr_assert_not_null(json);
    json_decref(json);
    base_buf_deinit(&text);
    end_rig(r);
}

/* Linear in the number of tags, whatever their names. */
Test(eng_decoder, many_members_cost_linear_time)
{
    rig *r = make_rig();
    base_buf text;
    base_buf_init(&text, 0);
    base_buf_puts(&text, BLOCK_OPEN NS "<invoke name=\"f\">" NS "<m>");
    for (int i = 0; i < 100000; i++)
        base_buf_printf(&text, PARAM("k%d", "%d"), i, i, i);
    base_buf_puts(&text, NS "</m>" NS "</invoke>\n" BLOCK_CLOSE);
    r->got.check_prefixes = false;
    decode(r->codec, &r->got, r->options, text.data);
    json_t *json = json_loads(buf_text(&r->got.calls[0].arguments), 0, NULL);
    cr_assert_eq(json_object_size(json_object_get(json, "m")), 100000);
    cr_assert_eq(json_integer_value(json_object_get(json_object_get(json, "m"), "k99999")), 99999);
    json_decref(json);
    base_buf_deinit(&text);
    end_rig(r);
}

/* ---- tolerance ---- */

Test(eng_decoder, strings_hold_markup_and_end_at_their_own_tag)
{
    rig *r = make_rig();
    expect_value(r, "s", "<a>" NS "<bb>" NS "</c> ]<]min" NS,
                 "\"<a>]<]minimax[>[<bb>]<]minimax[>[</c> ]<]min]<]minimax[>[\"");
    expect_value(r, "s", "</mm:think><mm:think>[e~[", "\"</mm:think><mm:think>[e~[\"");
    expect_value(r, "s", NS, "\"]<]minimax[>[\"");
    expect_value(r, "sn", "a " NS "<bb>c", "\"a ]<]minimax[>[<bb>c\"");
    end_rig(r);
}

Test(eng_decoder, parameters_left_open_are_closed)
{
    rig *r = make_rig();
    const char *both = "{\"s\":\"x\",\"i\":2}";
    expect_call(run(r, BLOCK_OPEN CALL("f", NS "<s>x" PARAM("i", "2")) BLOCK_CLOSE), 0, "f", both);
    expect_call(run(r, BLOCK_OPEN CALL("f", PARAM("s", "x") NS "<i>2") BLOCK_CLOSE), 0, "f", both);
    expect_call(run(r, BLOCK_OPEN CALL("f", NS "<i>2" PARAM("s", "x")) BLOCK_CLOSE), 0, "f",
                "{\"i\":2,\"s\":\"x\"}");
    expect_call(run(r, BLOCK_OPEN CALL("f", NS "<o>" NS "<x>1" NS "<y>2" NS "</y>" NS
                                               "</o>" PARAM("i", "2")) BLOCK_CLOSE),
                0, "f", "{\"o\":{\"x\":1,\"y\":\"2\"},\"i\":2}");
    rig_result *got = run(r, BLOCK_OPEN NS "<invoke name=\"f\">" PARAM("i", "1") NS
                          "<invoke name=\"g1\">" BLOCK_CLOSE "done");
    expect_call(got, 0, "f", "{\"i\":1}");
    expect_call(got, 1, "g1", "{}");
    expect(got, "", "done");
    end_rig(r);
}

Test(eng_decoder, a_closing_tag_names_a_value_without_opening)
{
    rig *r = make_rig();
    expect_call(run(r, BLOCK_OPEN CALL("f", NS "note" NS "</s>" PARAM("i", "2")) BLOCK_CLOSE), 0,
                "f", "{\"s\":\"note\",\"i\":2}");
    expect_call(run(r, BLOCK_OPEN CALL("f", "4" NS "</i>") BLOCK_CLOSE), 0, "f", "{\"i\":4}");
    expect_call(run(r, BLOCK_OPEN CALL("f", "stray" PARAM("i", "2") "more" NS "</k>\n" NS "</k>")
                           BLOCK_CLOSE),
                0, "f", "{\"i\":2,\"k\":\"more\"}");
    expect_call(run(r, BLOCK_OPEN CALL("f", PARAM("o", "7" NS "</x>" PARAM("y", "8"))) BLOCK_CLOSE),
                0, "f", "{\"o\":{\"x\":7,\"y\":\"8\"}}");
    end_rig(r);
}

Test(eng_decoder, unknown_tools_are_forwarded)
{
    rig *r = make_rig();
    expect_call(run(r, BLOCK_OPEN CALL("nope", PARAM("i", "1")) BLOCK_CLOSE), 0, "nope",
                "{\"i\":\"1\"}");
    expect_call(run(r, BLOCK_OPEN CALL("g1", PARAM("i", "1")) BLOCK_CLOSE), 0, "g1",
                "{\"i\":\"1\"}");
    end_rig(r);
}

Test(eng_decoder, an_output_that_is_cut_leaves_its_call_open)
{
    rig *r = make_rig();
    static const char text[] =
        "ok" BLOCK_OPEN CALL("f", PARAM("s", "xy") PARAM("o", PARAM("x", "1"))) BLOCK_CLOSE;
    size_t header = strstr(text, "\">") + 2 - text, end = strstr(text, "</invoke>") + 9 - text;
    for (size_t cut = 0; cut < sizeof text; cut++) {
        rig_clear(&r->got);
        r->got.check_prefixes = true;
        decode_cut(r->codec, &r->got, r->options, text, cut, NULL, 0, false);
        cr_assert_eq(r->got.call_count, cut >= header, "cut at %zu", cut);
        cr_assert_eq(r->got.call_count == 1 && r->got.calls[0].whole, cut >= end, "cut at %zu",
                     cut);
        if (cut > 40)
            cr_assert_null(strstr(buf_text(&r->got.text), NS));
    }
    /* With the end of turn behind it, what is there is taken. */
    expect_call(run(r, BLOCK_OPEN NS "<invoke name=\"f\">" NS "<s>half"), 0, "f",
                "{\"s\":\"half\"}");
    expect_call(run(r, BLOCK_OPEN NS "<invoke name=\"f\">" NS "<o>" NS "<x>1"), 0, "f",
                "{\"o\":{\"x\":1}}");
    end_rig(r);
}

Test(eng_decoder, half_characters_become_one_replacement)
{
    rig *r = make_rig();
    expect(run(r, "abc\xF0\x9F"), "", "abc\xEF\xBF\xBD");
    expect(run(r, "\xF0\x9F" NS "x\xFF\xC3"), "", "\xEF\xBF\xBDx\xEF\xBF\xBD\xEF\xBF\xBD");
    expect(run(r, "<mm:think>\xE5\xAD</mm:think>\xAD"), "\xEF\xBF\xBD", "\xEF\xBF\xBD");
    expect_value(r, "s", "a\xE5\xAD", "\"a\xEF\xBF\xBD\"");
    expect_value(r, "o", "a\xE5\xAD", "\"a\xEF\xBF\xBD\"");
    expect_value(r, "undeclared", "\xC3\x28", "\"\xEF\xBF\xBD(\"");
    rig_result *got = run(r, BLOCK_OPEN CALL("f\xFF", PARAM("\xFF", "1")) BLOCK_CLOSE);
    expect_call(got, 0, "f\xEF\xBF\xBD", "{\"\xEF\xBF\xBD\":\"1\"}");
    end_rig(r);
}

/* ---- stop strings ---- */

static void expect_stop(rig *r, const char *text, const char *want, int32_t index)
{
    size_t length = strlen(text);
    for (size_t step = 1; step <= length; step++) {
        rig_clear(&r->got);
        eng_decoder *decoder = make_decoder(r->codec, &r->got, r->options);
        uint32_t pushed = 0;
        bool more = true;
        for (size_t at = 0; at < length && more; at += step, pushed++)
            more =
                eng_decoder_push(decoder, -1, text + at, at + step < length ? step : length - at);
        cr_assert_eq(more, index < 0);
        eng_decoder_finish(decoder);
        cr_assert_str_eq(buf_text(&r->got.text), want, "step %zu: %s", step,
                         buf_text(&r->got.text));
        cr_assert_eq(eng_decoder_stop_index(decoder), index);
        if (index < 0)
            cr_assert_eq(eng_decoder_whole_tokens(decoder), pushed);
        else if (buf_text(&r->got.reasoning)[0] == '\0') /* tokens wholly before the stop string */
            cr_assert_eq(eng_decoder_whole_tokens(decoder), strlen(want) / step);
        eng_decoder_destroy(decoder);
    }
}

Test(eng_decoder, stop_strings_end_visible_text)
{
    rig *r = make_rig();
    eng_text stops[] = {TEXT("ber 7"), TEXT("END"), TEXT("aab"), TEXT("x ber 7 y")};
    r->options.stops = stops;
    r->options.stop_count = 4;
    expect_stop(r, "Order number 7 is ready", "Order num", 0);
    expect_stop(r, "The value is EN", "The value is EN", -1);
    expect_stop(r, "The ENEND", "The EN", 1);
    expect_stop(r, "aaaaab", "aaa", 2);
    expect_stop(r, "x ber 7 y", "x ", 0); /* the first to be complete */
    expect_stop(r, "END", "", 1);
    expect_stop(r, "<mm:think>END</mm:think>a END", "a ", 1); /* reasoning is not visible text */
    r->options.parse = ENG_PARSE_RAW;
    expect_stop(r, "a<END", "a<", 1);
    end_rig(r);
}

Test(eng_decoder, stop_strings_see_text_without_separators_and_no_arguments)
{
    rig *r = make_rig();
    eng_text stops[] = {TEXT("END"), TEXT("long END")};
    r->options.stops = stops;
    r->options.stop_count = 2;
    expect(run(r, "a EN" NS "D b"), "", "a ");
    expect(run(r, "a long END b"), "", "a "); /* both complete at once: the longer */
    rig_result *got = run(r, "EN" BLOCK_OPEN CALL("f", PARAM("s", "END")) BLOCK_CLOSE "D END!");
    expect(got, "", "END ");
    expect_call(got, 0, "f", "{\"s\":\"END\"}");
    end_rig(r);
}

/* ---- counts ---- */

Test(eng_decoder, counts_tokens_reasoning_and_calls)
{
    rig *r = make_rig();
    eng_decoder *decoder = make_decoder(r->codec, &r->got, r->options);
    static const struct {
        int32_t id;
        const char *text;
        bool reasoning; /* behind it */
    } tokens[] = {{327, "<mm:think>", true},   {-1, "hm", true},  {-1, " so", true},
                  {328, "</mm:think>", false}, {-1, "x", false},  {326, NS, false},
                  {323, "<tool_call>", false}, {-1, "\n", false}, {326, NS, false}};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        eng_decoder_push(decoder, tokens[i].id, tokens[i].text, strlen(tokens[i].text));
        cr_assert_eq(eng_decoder_in_reasoning(decoder), tokens[i].reasoning, "token %zu", i);
    }
    cr_assert_eq(eng_decoder_reasoning_tokens(decoder), 4);
    cr_assert_eq(eng_decoder_calls(decoder), 0);
    eng_decoder_push(decoder, -1, "<invoke name=\"g1\">", strlen("<invoke name=\"g1\">"));
    cr_assert_eq(eng_decoder_calls(decoder), 0);
    eng_decoder_push(decoder, 326, NS, strlen(NS));
    eng_decoder_push(decoder, -1, "</invoke>", strlen("</invoke>"));
    cr_assert_eq(eng_decoder_calls(decoder), 1);
    eng_decoder_push(decoder, 322, "[e~[", 4);
    eng_decoder_finish(decoder);
    cr_assert_eq(eng_decoder_whole_tokens(decoder), 13);
    eng_decoder_destroy(decoder);
    end_rig(r);
}

Test(eng_decoder, special_tokens_out_of_place_are_dropped_by_id)
{
    rig *r = make_rig();
    eng_decoder *decoder = make_decoder(r->codec, &r->got, r->options);
    static const struct {
        int32_t id;
        const char *text;
    } tokens[] = {{-1, "a]<"},   {321, "]~b]"},        {-1, "b"}, {327, "<mm:think>"},
                  {-1, "c"},     {328, "</mm:think>"}, {-1, "d"}, {323, "<tool_call>"},
                  {322, "[e~["}, {-1, "e[e~["}};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        eng_decoder_push(decoder, tokens[i].id, tokens[i].text, strlen(tokens[i].text));
    eng_decoder_finish(decoder);
    expect(&r->got, "", "a]<bcd<tool_call>e[e~["); /* a call's token without the separator is text,
                                                      as its spelling is */
    eng_decoder_destroy(decoder);
    end_rig(r);
}

/* A string argument is given out as it comes. */
Test(eng_decoder, strings_stream_and_numbers_wait)
{
    rig *r = make_rig();
    eng_decoder *decoder = make_decoder(r->codec, &r->got, r->options);
    const char *head = BLOCK_OPEN NS "<invoke name=\"f\">" NS "<s>";
    eng_decoder_push(decoder, -1, head, strlen(head));
    cr_assert_eq(r->got.call_count, 1);
    for (int i = 0; i < 50; i++) {
        eng_decoder_push(decoder, -1, "word ", 5);
        cr_assert_eq(r->got.calls[0].fragments, (uint32_t)i + 1);
    }
    eng_decoder_push(decoder, -1, NS "</s>" NS "<i>1", strlen(NS "</s>" NS "<i>1"));
    cr_assert_eq(r->got.calls[0].fragments, 51);
    eng_decoder_push(decoder, -1, "2", 1);
    cr_assert_eq(r->got.calls[0].fragments, 51);
    eng_decoder_push(decoder, -1, NS "</i>", strlen(NS "</i>"));
    cr_assert_eq(r->got.calls[0].fragments, 52);
    eng_decoder_finish(decoder);
    eng_decoder_destroy(decoder);
    end_rig(r);
}

/* ---- any cut ---- */

typedef struct dice {
    uint64_t seed, index;
} dice;

static uint32_t draw(dice *d, uint32_t bound)
{
    return base_rand(d->seed, 0, d->index++).v[0] % bound;
}

static void add_value(base_buf *out, dice *d, int depth)
{
    static const char *const texts[] = {
        "Oslo",        "12",       "-3.50",   "true",         "null",      "",           " x ",
        "a\"b\\c\n\t", "字 🙂", "]<]mini", "<b>&amp;</b>", "</invoke>", "{\"x\": 1}", "[1,2]",
        "]<",          "\xF0\x9F", "]",       "none",         NS,          NS "<zz>"};
    static const char *const names[] = {"s", "i", "n", "b", "o", "a",    "ai",  "sn", "e",
                                        "r", "v", "x", "y", "l", "item", "año", "-A"};
    if (depth < 4 && draw(d, 3) == 0) {
        for (uint32_t n = draw(d, 4); n > 0; n--) {
            const char *name = draw(d, 3) == 0 ? "item" : names[draw(d, 17)];
            base_buf_printf(out, NS "<%s>", name);
            add_value(out, d, depth + 1);
            if (draw(d, 12) != 0)
                base_buf_printf(out, NS "</%s>", name);
        }
        return;
    }
    for (uint32_t n = 1 + draw(d, 3); n > 0; n--)
        base_buf_puts(out, texts[draw(d, 20)]);
}

static void add_call(base_buf *out, dice *d)
{
    static const char *const names[] = {"s",  "i", "n",  "b", "z",   "o", "a",  "ai", "sn",
                                        "in", "e", "en", "r", "any", "m", "os", "foo"};
    if (draw(d, 16) != 0)
        base_buf_printf(out, NS "<invoke name=\"%s\">", draw(d, 6) == 0 ? "g1" : "f");
    for (uint32_t n = draw(d, 5); n > 0; n--) {
        const char *name = names[draw(d, 17)];
        if (draw(d, 12) != 0)
            base_buf_printf(out, NS "<%s>", name);
        add_value(out, d, 0);
        if (draw(d, 12) != 0)
            base_buf_printf(out, NS "</%s>", name);
    }
    if (draw(d, 12) != 0)
        base_buf_puts(out, NS "</invoke>\n");
}

/* An output in the format with slips of every kind in it. */
static void make_output(base_buf *out, dice *d)
{
    static const char *const prose[] = {"Hello there. ",
                                        "]",
                                        "<",
                                        "]<]minimax[>",
                                        "<mm:think>",
                                        "</mm:think>",
                                        "END",
                                        "EN",
                                        "字🙂",
                                        "\xE5\xAD",
                                        "\n",
                                        "<tool_call>",
                                        NS,
                                        NS "<tool_call>",
                                        NS "</tool_call>",
                                        NS "</invoke>",
                                        "]<]<]minimax[>["};
    base_buf_clear(out);
    if (draw(d, 2) == 0)
        base_buf_puts(out, "<mm:think>");
    for (uint32_t part = 1 + draw(d, 4); part > 0; part--) {
        for (uint32_t n = draw(d, 5); n > 0; n--)
            base_buf_puts(out, prose[draw(d, 17)]);
        if (draw(d, 3) == 0)
            base_buf_puts(out, "</mm:think>");
        if (draw(d, 2) == 0)
            continue;
        base_buf_puts(out, BLOCK_OPEN);
        for (uint32_t n = 1 + draw(d, 2); n > 0; n--)
            add_call(out, d);
        if (draw(d, 8) != 0)
            base_buf_puts(out, BLOCK_CLOSE);
    }
    if (draw(d, 8) == 0) /* cut off */
        out->length = out->length == 0 ? 0 : draw(d, (uint32_t)out->length);
}

static int compare_sizes(const void *a, const void *b)
{
    size_t x = *(const size_t *)a, y = *(const size_t *)b;
    return x < y ? -1 : x > y;
}

/* The tokens of the output where the format's own are ids, in a random mix with bare pieces of
 * text. */
static void decode_tokens(rig *r, rig_result *got, const base_buf *text, dice *d, bool ends)
{
    eng_ids ids;
    eng_ids_init(&ids, 0);
    eng_tok_encode(r->tok, &ids, text->data, text->length, true, NULL);
    eng_decoder *decoder = make_decoder(r->codec, got, r->options);
    bool more = true;
    for (size_t i = 0; i < ids.count && more; i++) {
        size_t length;
        const char *bytes = eng_tok_bytes(r->tok, ids.data[i], &length);
        /* Out of place by id they are no text, so only their spelling gives what the whole text
         * gives. */
        bool marker =
            ids.data[i] == 327 || ids.data[i] == 328 || ids.data[i] == 322 || ids.data[i] == 321;
        size_t cut = draw(d, (uint32_t)length + 1);
        if (!marker && draw(d, 2) == 0) {
            more = eng_decoder_push(decoder, ids.data[i], bytes, length);
            continue;
        }
        more = eng_decoder_push(decoder, -1, bytes, cut) &&
               eng_decoder_push(decoder, -1, bytes + cut, length - cut);
    }
    if (ends && more)
        eng_decoder_push(decoder, 322, "[e~[", 4);
    eng_decoder_finish(decoder);
    eng_decoder_destroy(decoder);
    eng_ids_deinit(&ids);
}

static void expect_no_markers(const rig_result *got, const char *text)
{
    cr_assert(got->text.length == 0 ||
                  memmem(got->text.data, got->text.length, NS, strlen(NS)) == NULL,
              "%s", text);
    cr_assert(got->reasoning.length == 0 ||
                  memmem(got->reasoning.data, got->reasoning.length, NS, strlen(NS)) == NULL,
              "%s", text);
    for (uint32_t i = 0; i < got->call_count; i++) {
        if (!got->calls[i].whole)
            continue;
        cr_assert(is_json_object(&got->calls[i].arguments), "%s: %s", text,
                  buf_text(&got->calls[i].arguments));
    }
}

#define CUTS_EACH 21

/* Each of the four makes a quarter; WHIMBREL_LONG=1 makes a million cuts of them. */
static void run_cuts(uint32_t part)
{
    uint32_t outputs = getenv("WHIMBREL_LONG") != NULL ? 12500 : 1250;
    uint32_t first = 1000 + part * outputs;
    rig *r = make_rig();
    eng_text stops[] = {TEXT("END"), TEXT("there. ]")};
    base_buf text;
    base_buf_init(&text, 0);
    for (uint32_t i = 0; i < outputs; i++) {
        dice d = {.seed = first + i};
        make_output(&text, &d);
        r->options.stops = stops;
        r->options.stop_count = draw(&d, 3);
        r->options.starts_in_reasoning = draw(&d, 4) == 0;
        r->options.thinking = r->options.starts_in_reasoning ? ENG_THINK_ENABLED
                              : draw(&d, 4) == 0             ? ENG_THINK_DISABLED
                                                             : ENG_THINK_ADAPTIVE;
        bool ends = draw(&d, 2) == 0;
        rig_result whole = {.check_prefixes = true};
        decode_cut(r->codec, &whole, r->options, text.data == NULL ? "" : text.data, text.length,
                   NULL, 0, ends);
        expect_no_markers(&whole, buf_text(&text));
        for (uint32_t k = 0; k < CUTS_EACH; k++) {
            rig_result got = {0};
            size_t cuts[64];
            size_t count = k == 0 ? 0 : draw(&d, k < 4 ? 3 : 64);
            for (size_t c = 0; c < count; c++)
                cuts[c] = draw(&d, (uint32_t)text.length + 1);
            qsort(cuts, count, sizeof *cuts, compare_sizes);
            if (k == 0)
                decode_tokens(r, &got, &text, &d, ends);
            else
                decode_cut(r->codec, &got, r->options, text.data == NULL ? "" : text.data,
                           text.length, cuts, count, ends);
            cr_assert(rig_same(&whole, &got), "seed %u, cut %u: %s", first + i, k, buf_text(&text));
            rig_clear(&got);
        }
        rig_clear(&whole);
    }
    printf("decoder: %u cuts of %u outputs, seeds %u to %u: no result changed\n",
           outputs * CUTS_EACH, outputs, first, first + outputs - 1);
    base_buf_deinit(&text);
    end_rig(r);
}

#define CUTS(part)                                                                                 \
    Test(eng_decoder, no_cut_changes_the_result_##part, .timeout = 900)                            \
    {                                                                                              \
        run_cuts(part);                                                                            \
    }
CUTS(0) CUTS(1) CUTS(2) CUTS(3)
