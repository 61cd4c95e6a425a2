/* Rendering: text against the oracle's conversations, ids against tokenizing that text, spliced
 * runs, bounds and errors. */
#include "tests/engine/chat_rig.h"

/* ---- a codec and what it rendered ---- */

typedef struct rig {
    eng_tok *tok;
    eng_codec *codec;
    base_arena *arena;
    base_buf text;
    eng_prompt prompt;
    base_err err;
} rig;

static rig make_rig(const char *tokenizer, const char *identity)
{
    rig r = {.tok = load_tok(tokenizer)};
    r.codec = make_codec(r.tok, identity, ENG_THINK_DEFAULT);
    r.arena = base_arena_create(4096, (size_t)1 << 30);
    base_buf_init(&r.text, 0);
    return r;
}

static void end_rig(rig *r)
{
    base_buf_deinit(&r->text);
    base_arena_destroy(r->arena);
    eng_codec_destroy(r->codec);
    eng_tok_destroy(r->tok);
}

static base_code render_within(rig *r, eng_chat chat, uint32_t token_max, uint32_t window)
{
    base_buf_clear(&r->text);
    r->err = (base_err)BASE_ERR_INIT;
    return eng_codec_render(r->codec, &r->prompt, &chat, token_max, window, &r->text, r->arena,
                            &r->err);
}

static const char *render(rig *r, eng_chat chat)
{
    base_code code = render_within(r, chat, 0, 1 << 20);
    cr_assert_eq(code, BASE_OK, "%s", r->err.text);
    return r->text.data;
}

static void expect_text(const char *got, const char *want)
{
    size_t at = 0;
    while (got[at] != '\0' && got[at] == want[at])
        at++;
    cr_assert_str_eq(got, want, "differs at %zu: got %.60s, not %.60s", at, got + at, want + at);
}

static void expect_tail(const rig *r, const char *tail)
{
    size_t length = strlen(tail);
    cr_assert_geq(r->text.length, length);
    expect_text(r->text.data + r->text.length - length, tail);
}

static void expect_ids_of_text(const rig *r)
{
    eng_ids ids;
    eng_ids_init(&ids, 0);
    cr_assert_eq(eng_tok_encode(r->tok, &ids, r->text.data, r->text.length, true, NULL), BASE_OK);
    cr_assert_eq(ids.count, r->prompt.token_count);
    for (size_t i = 0; i < ids.count; i++)
        cr_assert_eq(ids.data[i], r->prompt.tokens[i], "id %zu", i);
    eng_ids_deinit(&ids);
}

static eng_item user(const char *text)
{
    return (eng_item){.role = ENG_ROLE_USER, .text = text_of(text)};
}

static eng_item assistant(const char *reasoning, const char *text)
{
    return (eng_item){
        .role = ENG_ROLE_ASSISTANT, .reasoning = text_of(reasoning), .text = text_of(text)};
}

static eng_item result(const char *text)
{
    return (eng_item){.role = ENG_ROLE_TOOL, .text = text_of(text)};
}

/* ---- the oracle's conversations ---- */

/* The engine's interface has no model id and no other modes; date and place are part of the root
 * item's text. */
static bool is_offered(const char *name)
{
    return strcmp(name, "a mode without a sentence") != 0 &&
           strcmp(name, "effort of another name, model id") != 0;
}

/* What the gateway does with a root message's date and place. */
static void join_place(json_t *messages)
{
    json_t *first = json_array_get(messages, 0), *date = json_object_get(first, "current_date");
    if (date == NULL)
        return;
    json_t *joined =
        json_sprintf("%s\nCurrent date: %s\nCurrent location: %s",
                     json_string_value(json_object_get(first, "content")), json_string_value(date),
                     json_string_value(json_object_get(first, "current_location")));
    json_object_set_new(first, "content", joined);
}

static bool spells_specials(const char *name)
{
    return strstr(name, "spells special") != NULL || strstr(name, "reasoning inside") != NULL;
}

static void expect_conversations(const char *tokenizer)
{
    json_t *json = load_json(SOURCE_ROOT "/tests/vectors/chat.json"), *one;
    rig r = make_rig(tokenizer, json_string_value(json_object_get(json, "identity")));
    size_t i, checked = 0;
    json_array_foreach(json_object_get(json, "cases"), i, one)
    {
        const char *name = json_string_value(json_object_get(one, "name"));
        if (!is_offered(name))
            continue;
        join_place(json_object_get(one, "messages"));
        eng_chat chat = chat_of_json(r.arena, one);
        expect_text(render(&r, chat), json_string_value(json_object_get(one, "text")));
        if (!spells_specials(name))
            expect_ids_of_text(&r);
        for (uint32_t k = 0; k < chat.item_count; k++) {
            cr_assert_leq(r.prompt.item_end[k], r.prompt.token_count);
            cr_assert(k == 0 || r.prompt.item_end[k] > r.prompt.item_end[k - 1], "%s: item %u",
                      name, k);
        }
        cr_assert_eq(r.prompt.starts_in_reasoning,
                     chat.thinking == ENG_THINK_ENABLED && !chat.no_generation_prompt);
        checked++;
    }
    cr_assert_geq(checked, 20);
    end_rig(&r);
    json_decref(json);
}

Test(eng_codec, renders_the_conversations_byte_for_byte)
{
    expect_conversations(SMALL_TOKENIZER);
}

Test(eng_codec, renders_them_with_the_models_tokenizer_too)
{
    expect_conversations(NANO_TOKENIZER);
}

/* ---- placement ---- */

Test(eng_codec, fills_in_the_default_mode_and_the_identity)
{
    rig r = make_rig(SMALL_TOKENIZER, "I am a test.");
    eng_item items[] = {user("hi")};
    expect_text(render(&r, (eng_chat){.items = items, .item_count = 1}) +
                    strlen("]~!b[]~b]system\n"),
                "I am a test.\n\n<thinking_instructions>\nYou have a thinking capability that "
                "allows you to reason step by "
                "step before responding. When thinking is enabled, wrap your reasoning in "
                "<mm:think></mm:think> tags before "
                "your response. When thinking is disabled, begin your response directly after the "
                "</mm:think> prefix. When "
                "thinking is adaptive, decide on your own whether to think for the current "
                "turn.\nCurrent thinking mode: "
                "adaptive. You are encouraged to think for complex decision-making, multi-step "
                "reasoning, or when analyzing "
                "function/tool results.\n</thinking_instructions>[e~[\n]~b]developer\nYou are a "
                "helpful assistant.[e~[\n"
                "]~b]user\nhi[e~[\n]~b]ai\n");
    cr_assert_eq(r.prompt.thinking, ENG_THINK_ADAPTIVE);
    cr_assert_not(r.prompt.starts_in_reasoning);
    eng_codec *enabled = make_codec(r.tok, "I am a test.", ENG_THINK_ENABLED);
    eng_chat chat = {.items = items, .item_count = 1};
    cr_assert_eq(eng_codec_render(enabled, &r.prompt, &chat, 0, 10000, NULL, r.arena, NULL),
                 BASE_OK);
    cr_assert_eq(r.prompt.thinking, ENG_THINK_ENABLED);
    cr_assert(r.prompt.starts_in_reasoning);
    cr_assert_str_eq(eng_codec_digest(enabled), eng_codec_digest(r.codec));
    eng_codec *other = make_codec(r.tok, "I am another.", ENG_THINK_ENABLED);
    cr_assert_str_neq(eng_codec_digest(other), eng_codec_digest(r.codec));
    eng_codec_destroy(other);
    eng_codec_destroy(enabled);
    end_rig(&r);
}

Test(eng_codec, needs_its_special_tokens)
{
    eng_tok *tok = load_tok(SMALL_TOKENIZER);
    base_err err = BASE_ERR_INIT;
    eng_codec *codec = make_codec(tok, "", ENG_THINK_DEFAULT);
    cr_assert_eq(eng_codec_end_token(codec), 322);
    cr_assert_eq(eng_codec_call_token(codec), 323);
    cr_assert_eq(eng_codec_think_end_token(codec), 328);
    eng_codec_destroy(codec);
    eng_tok_destroy(tok);
    base_buf file;
    base_buf_init(&file, 0);
    FILE *in = fopen(SMALL_TOKENIZER, "rb");
    char block[8192];
    base_buf_add(&file, block, fread(block, 1, sizeof block, in));
    fclose(in);
    memcpy(strstr(file.data, "]<]minimax[>["), "]<]maximin[>[", 13);
    FILE *out = fopen("tokenizer_without_separator.json", "wb");
    fwrite(file.data, 1, file.length, out);
    fclose(out);
    tok = load_tok("tokenizer_without_separator.json");
    remove("tokenizer_without_separator.json");
    cr_assert_eq(eng_codec_create(&codec, tok, "", ENG_THINK_DEFAULT, &err), BASE_FORMAT);
    cr_assert_not_null(strstr(err.text, "]<]minimax[>["), "%s", err.text);
    eng_tok_destroy(tok);
    base_buf_deinit(&file);
}

/* Items that stand anywhere in any order never crash and are never lost. */
Test(eng_codec, renders_odd_orders_in_place)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    eng_item items[] = {result("orphan"),
                        {.role = ENG_ROLE_ROOT, .text = TEXT("late root")},
                        {.role = ENG_ROLE_SYSTEM, .text = TEXT("late system")},
                        assistant(NULL, NULL),
                        {.role = ENG_ROLE_USER}};
    render(&r, (eng_chat){.items = items, .item_count = 5, .thinking = ENG_THINK_DISABLED});
    expect_tail(&r, "]~b]tool\n<response>orphan</response>[e~[\n]~b]developer\nlate "
                    "root[e~[\n]~b]developer\nlate system[e~[\n"
                    "]~b]ai\n</mm:think>[e~[\n]~b]user\n[e~[\n]~b]ai\n</mm:think>");
    end_rig(&r);
}

/* The end of each result in a turn that results share: the tokens wholly up to it. */
Test(eng_codec, item_ends_inside_a_shared_turn_count_whole_tokens)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    eng_item items[] = {user("q"), result("one"), result("two"), result("three"), user("z")};
    render(&r, (eng_chat){.items = items, .item_count = 5});
    for (uint32_t i = 0; i < 5; i++) {
        base_buf text;
        base_buf_init(&text, 0);
        for (uint32_t k = 0; k < r.prompt.item_end[i]; k++) {
            size_t length;
            const char *bytes = eng_tok_bytes(r.tok, r.prompt.tokens[k], &length);
            base_buf_add(&text, bytes, length);
        }
        static const char *const ends[] = {"]~b]user\nq[e~[\n", "one</response>", "two</response>",
                                           "three</response>[e~[\n", "]~b]user\nz[e~[\n"};
        expect_text(text.data + text.length - strlen(ends[i]), ends[i]);
        base_buf_deinit(&text);
    }
    end_rig(&r);
}

/* ---- tools and arguments ---- */

Test(eng_codec, writes_tools_as_python_does_and_keeps_numbers)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    eng_item items[] = {user("q")};
    eng_text tools[] = {TEXT("{\"b\":1.0,\"a\":[1,{\"x\":[]},{}],  \"n\" : "
                             "12345678901234567890123,\"s\":\"\\u00e9\\n\\u0001\\\"\\/"
                             "\\ud83d\\ude00\\b\\f\",\"t\":true,\"z\":null,\"e\":1E+2}")};
    render(&r, (eng_chat){.items = items, .item_count = 1, .tools = tools, .tool_count = 1});
    cr_assert_not_null(
        strstr(
            r.text.data,
            "<tool>{\"b\": 1.0, \"a\": [1, {\"x\": []}, {}], \"n\": 12345678901234567890123, "
            "\"s\": \"é\\n\\u0001\\\"/😀\\b\\f\", \"t\": true, \"z\": null, \"e\": 1E+2}</tool>\n"),
        "%s", r.text.data);
    end_rig(&r);
}

Test(eng_codec, refuses_tools_that_are_no_objects)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    static const char *const bad[] = {"", "[]", "7", "{\"a\":", "{} {}", "\"x\"", "{\"a\":01}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        eng_text tools[] = {TEXT("{}"), text_of(bad[i])};
        cr_assert_eq(render_within(&r, (eng_chat){.tools = tools, .tool_count = 2}, 0, 10000),
                     BASE_INVALID, "%s", bad[i]);
        cr_assert_str_eq(r.err.param, "tools[1].function");
    }
    end_rig(&r);
}

static const char *rendered_call(rig *r, const char *arguments)
{
    eng_call call = {.name = TEXT("f"), .arguments = text_of(arguments)};
    eng_item items[] = {{.role = ENG_ROLE_ASSISTANT, .calls = &call, .call_count = 1}};
    render(r, (eng_chat){.items = items, .item_count = 1, .no_generation_prompt = true});
    const char *at = strstr(r->text.data, "<invoke name=\"f\">");
    r->text.data[r->text.length - strlen("\n" NS "</tool_call>[e~[\n")] = '\0';
    return at + strlen("<invoke name=\"f\">");
}

Test(eng_codec, writes_arguments_as_tags)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    expect_text(
        rendered_call(
            &r,
            "{\"a\":1.50,\"b\":[true,null,\"x\"],\"c\":{\"d\":{},\"e\":null,\"f\":[]},\"g\":null}"),
        NS "<a>1.50" NS "</a>" NS "<b>" NS "<item>true" NS "</item>" NS "<item>null" NS "</item>" NS
           "<item>x" NS "</item>" NS "</b>" NS "<c>" NS "<d>" NS "</d>" NS "<f>" NS "</f>" NS
           "</c>" NS "</invoke>");
    expect_text(
        rendered_call(&r, "{\"k\\u00e9\\\"y\":\"\\ud83d\\ude00 \\ud800 <b>&amp;\\u0000\"}") +
            strlen(NS "<ké\"y>😀 "),
        "\xEF\xBF\xBD <b>&amp;");
    expect_text(rendered_call(&r, "{\"big\":123456789012345678901234567890,\"s\":-0.0}"),
                NS "<big>123456789012345678901234567890" NS "</big>" NS "<s>-0.0" NS "</s>" NS
                   "</invoke>");
    end_rig(&r);
}

Test(eng_codec, takes_no_arguments_in_all_their_forms)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    static const char *const none[] = {NULL, "", "  \n", "null", " null ", "{}", "{ }"};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        expect_text(rendered_call(&r, none[i]), NS "</invoke>");
    end_rig(&r);
}

/* Arguments that cannot be rendered as parameters are refused by name; a turn known by its tokens
 * is not looked at. */
Test(eng_codec, refuses_arguments_that_are_no_object)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    static const char *const bad[] = {
        "{\"a\":", "[1]", "7", "\"x\"", "{} x", "nul", "{\"a\":1,}", "{\"a\":\"\xFF\"}", "true"};
    int32_t tokens[] = {328, 'x', 322};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        eng_call calls[] = {{.name = TEXT("f"), .arguments = TEXT("{}")},
                            {.name = TEXT("f"), .arguments = text_of(bad[i])}};
        eng_item items[] = {user("q"),
                            {.role = ENG_ROLE_ASSISTANT, .calls = calls, .call_count = 2}};
        cr_assert_eq(render_within(&r, (eng_chat){.items = items, .item_count = 2}, 0, 10000),
                     BASE_INVALID, "%s", bad[i]);
        cr_assert_str_eq(r.err.param, "messages[1].tool_calls[1].function.arguments");
        items[1].tokens = tokens;
        items[1].token_count = 3;
        cr_assert_eq(render_within(&r, (eng_chat){.items = items, .item_count = 2}, 0, 10000),
                     BASE_OK);
    }
    end_rig(&r);
}

Test(eng_codec, nests_as_deep_as_json_may_without_recursion)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    for (uint32_t depth = 500; depth <= 10000; depth += 9500) {
        base_buf arguments;
        base_buf_init(&arguments, 0);
        for (uint32_t i = 0; i < depth; i++)
            base_buf_puts(&arguments, i % 2 == 0 ? "{\"a\":" : "[");
        base_buf_puts(&arguments, "1");
        for (uint32_t i = depth; i-- > 0;)
            base_buf_puts(&arguments, i % 2 == 0 ? "}" : "]");
        eng_call call = {.name = TEXT("f"), .arguments = {arguments.data, arguments.length}};
        eng_item items[] = {{.role = ENG_ROLE_ASSISTANT, .calls = &call, .call_count = 1}};
        cr_assert_eq(render_within(&r, (eng_chat){.items = items, .item_count = 1}, 0, 1 << 20),
                     depth == 500 ? BASE_OK : BASE_INVALID);
        base_buf_deinit(&arguments);
    }
    end_rig(&r);
}

/* ---- bounds ---- */

Test(eng_codec, too_long_names_both_numbers)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    char *long_text = malloc(400001);
    memset(long_text, 'q', 400000);
    long_text[400000] = '\0';
    eng_item items[] = {user(long_text)};
    eng_chat chat = {.items = items, .item_count = 1};
    render(&r, chat);
    uint32_t count = r.prompt.token_count;
    char want[160];
    cr_assert_eq(render_within(&r, chat, 0, 100000), BASE_TOO_LONG);
    snprintf(want, sizeof want,
             "maximum context length is 100000 tokens. However, you requested %u tokens", count);
    cr_assert_not_null(strstr(r.err.text, want), "%s", r.err.text);
    cr_assert_eq(render_within(&r, chat, 1000, 100000), BASE_TOO_LONG);
    snprintf(want, sizeof want,
             "maximum context length is 1000 tokens. However, you requested %u tokens", count);
    cr_assert_not_null(strstr(r.err.text, want), "%s", r.err.text);
    cr_assert_eq(render_within(&r, chat, 0, 10000), BASE_TOO_LONG);
    cr_assert_not_null(strstr(r.err.text, "requested more than 160000 tokens"), "%s", r.err.text);
    cr_assert_eq(render_within(&r, chat, count, 100), BASE_OK);
    cr_assert_eq(render_within(&r, chat, count - 1, 100), BASE_TOO_LONG);
    /* Counted over many items too. */
    eng_item many[300];
    for (int i = 0; i < 300; i++)
        many[i] =
            user("qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq");
    eng_chat turns = {.items = many, .item_count = 300};
    render(&r, turns);
    count = r.prompt.token_count;
    cr_assert_eq(render_within(&r, turns, 0, count / 15), BASE_TOO_LONG);
    snprintf(want, sizeof want, "requested %u tokens", count);
    cr_assert_not_null(strstr(r.err.text, want), "%s", r.err.text);
    cr_assert_eq(render_within(&r, turns, 0, count / 17), BASE_TOO_LONG);
    cr_assert_not_null(strstr(r.err.text, "more than"), "%s", r.err.text);
    free(long_text);
    end_rig(&r);
}

Test(eng_codec, memory_that_runs_out_is_an_error)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    base_arena *tiny = base_arena_create(64, 512);
    eng_item items[] = {user("hello hello hello hello")};
    eng_chat chat = {.items = items, .item_count = 1};
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(eng_codec_render(r.codec, &r.prompt, &chat, 0, 10000, NULL, tiny, &err),
                 BASE_NOMEM);
    base_arena_destroy(tiny);
    end_rig(&r);
}

/* ---- runs of tokens ---- */

static const char *spliced(rig *r, const char *run, bool specials, bool open)
{
    eng_ids ids;
    eng_ids_init(&ids, 0);
    eng_tok_encode(r->tok, &ids, run, strlen(run), specials, NULL);
    static const int32_t none; /* a run of no tokens is a run */
    eng_item items[] = {user("q"),
                        {.role = ENG_ROLE_ASSISTANT,
                         .tokens = ids.count == 0 ? &none : ids.data,
                         .token_count = (uint32_t)ids.count},
                        user("z")};
    render(r, (eng_chat){.items = items,
                         .item_count = open ? 2 : 3,
                         .no_generation_prompt = !open,
                         .continue_last = open});
    for (size_t i = 0; i < ids.count && !open; i++)
        cr_assert_eq(r->prompt.tokens[r->prompt.item_end[0] + 2 + i + 2], ids.data[i],
                     "the run is not spliced as it is");
    eng_ids_deinit(&ids);
    if (!open)
        r->text.data[r->text.length - strlen("]~b]user\nz[e~[\n")] = '\0';
    return strstr(r->text.data, "]~b]user\nq[e~[\n]~b]ai\n") + strlen("]~b]user\nq[e~[\n]~b]ai\n");
}

/* What a client that was interrupted returns: the tokens it saw whole, and what it saw beyond. */
Test(eng_codec, a_text_that_begins_a_run_takes_the_tokens_inside_it)
{
    static const struct {
        const char *run, *reasoning, *text;
        const char *seen, *rest; /* NULL: not the beginning */
    } rows[] = {
        {"<mm:think>why</mm:think>because[e~[", "", "beca", "<mm:think>why</mm:think>beca", ""},
        {"<mm:think>why</mm:think>because[e~[", "", "because", "<mm:think>why</mm:think>because",
         ""},
        {"<mm:think>why</mm:think>\n\nbecause[e~[", "", "be", "<mm:think>why</mm:think>\n\nbe", ""},
        {"</mm:think>because", "", "bec", "</mm:think>bec", ""},
        {"because", "", "bec", "bec", ""},
        {"<mm:think>why</mm:think>because[e~[", "wh", "", "<mm:think>wh", ""},
        {"<mm:think>why</mm:think>because[e~[", "", "because of", NULL, NULL},
        {"<mm:think>why</mm:think>because[e~[", "", "bet", NULL, NULL},
        {"<mm:think>why</mm:think>because[e~[", "who", "", NULL, NULL},
        {"<mm:think>why", "", "why", NULL, NULL},
        {"<mm:think>why", "", "", NULL, NULL},
        {"because", "beca", "", NULL, NULL},
        {"", "", "a", NULL, NULL},
    };
    rig r = make_rig(SMALL_TOKENIZER, "I");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        eng_ids ids;
        eng_ids_init(&ids, 0);
        eng_tok_encode(r.tok, &ids, rows[i].run, strlen(rows[i].run), true, NULL);
        eng_text reasoning = {rows[i].reasoning, strlen(rows[i].reasoning)};
        eng_text text = {rows[i].text, strlen(rows[i].text)}, rest = {0};
        uint32_t seen = 0;
        bool begins = eng_codec_run_seen(r.codec, &seen, &rest, ids.data, (uint32_t)ids.count,
                                         reasoning, text);
        cr_assert_eq(begins, rows[i].seen != NULL, "row %zu", i);
        if (begins) {
            base_buf said;
            base_buf_init(&said, 0);
            for (uint32_t k = 0; k < seen; k++) {
                size_t length;
                const char *bytes = eng_tok_bytes(r.tok, ids.data[k], &length);
                base_buf_add(&said, bytes, length);
            }
            cr_assert_eq(said.length, strlen(rows[i].seen), "row %zu", i);
            cr_assert_eq(memcmp(said.data, rows[i].seen, said.length), 0, "row %zu", i);
            cr_assert_eq(rest.length, strlen(rows[i].rest), "row %zu", i);
            base_buf_deinit(&said);
        }
        eng_ids_deinit(&ids);
    }
    /* A text that ends inside a token leaves that part to be rendered, behind the tokens. */
    int32_t hello = -1;
    for (int32_t id = 0; hello < 0 && id < 2000; id++) {
        size_t length;
        const char *bytes = eng_tok_bytes(r.tok, id, &length);
        if (bytes != NULL && length == 2)
            hello = id;
    }
    cr_assert_geq(hello, 0, "the tokenizer has a token of two bytes");
    size_t length;
    const char *bytes = eng_tok_bytes(r.tok, hello, &length);
    int32_t run[] = {'x', hello};
    eng_ids ids;
    eng_ids_init(&ids, 0);
    eng_tok_encode(r.tok, &ids, "x", 1, false, NULL);
    run[0] = ids.data[0];
    eng_ids_deinit(&ids);
    char part[2] = {'x', bytes[0]};
    uint32_t seen;
    eng_text rest;
    cr_assert(
        eng_codec_run_seen(r.codec, &seen, &rest, run, 2, (eng_text){"", 0}, (eng_text){part, 2}));
    cr_assert_eq(seen, 1);
    cr_assert_eq(rest.length, 1);
    eng_item items[] = {
        {.role = ENG_ROLE_ASSISTANT, .tokens = run, .token_count = seen, .rest = rest}};
    render(&r, (eng_chat){.items = items, .item_count = 1, .no_generation_prompt = true});
    cr_assert_eq(r.text.data[r.text.length - strlen("[e~[\n") - 1], bytes[0]);
    end_rig(&r);
}

Test(eng_codec, splices_a_whole_run_as_it_is)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    expect_text(spliced(&r, "<mm:think>why</mm:think>because[e~[", true, false),
                "<mm:think>why</mm:think>because[e~[\n");
    /* Tokens that another cut of the text would not give stay as they are. */
    int32_t odd[] = {328, 'h', 'e', 'l', 'l', 'o', 322};
    eng_item items[] = {{.role = ENG_ROLE_ASSISTANT, .tokens = odd, .token_count = 7}};
    render(&r, (eng_chat){.items = items, .item_count = 1, .no_generation_prompt = true});
    cr_assert_eq(memcmp(r.prompt.tokens + r.prompt.token_count - 8, odd, sizeof odd), 0);
    int32_t unknown[] = {300};
    items[0].tokens = unknown;
    items[0].token_count = 1;
    cr_assert_eq(render_within(&r, (eng_chat){.items = items, .item_count = 1}, 0, 1000),
                 BASE_INVALID);
    end_rig(&r);
}

Test(eng_codec, closes_a_run_that_was_cut)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    static const char *const cut[][2] = {
        {"", ""},
        {"plain", ""},
        {"</mm:think>Hel", ""},
        {"<mm:think>I wond", "</mm:think>"},
        {"<mm:think>", "</mm:think>"},
        {"<mm:think>why" NS, "<tool_call>\n" NS "</tool_call>"},
        {"</mm:think>" NS "<tool_call>", "\n" NS "</tool_call>"},
        {"<mm:think>x" NS "<tool_call>\n", NS "</tool_call>"},
        {"</mm:think>" NS "<tool_call>\n" NS, "</tool_call>"},
        {"</mm:think>" NS "<tool_call>\n" NS "<inv",
         "oke name=\"\">" NS "</invoke>\n" NS "</tool_call>"},
        {"</mm:think>" NS "<tool_call>\n" NS "<invoke name=\"get",
         "\">" NS "</invoke>\n" NS "</tool_call>"},
        {"</mm:think>" NS "<tool_call>\n" NS "<invoke name=\"get\"",
         ">" NS "</invoke>\n" NS "</tool_call>"},
        {"</mm:think>" NS "<tool_call>\n" NS "<invoke name=\"get\">",
         NS "</invoke>\n" NS "</tool_call>"},
        {"</mm:think>" NS "<tool_call>\n" NS "<invoke name=\"get\">" NS "<ci",
         ">" NS "</ci>" NS "</invoke>\n" NS "</tool_call>"},
        {"</mm:think>" NS "<tool_call>\n" NS "<invoke name=\"get\">" NS "<city>Os",
         NS "</city>" NS "</invoke>\n" NS "</tool_call>"},
        {"</mm:think>" NS "<tool_call>\n" NS "<invoke name=\"get\">" NS "<a>" NS "<b>1" NS "</b>" NS
         "<c>2",
         NS "</c>" NS "</a>" NS "</invoke>\n" NS "</tool_call>"},
        {"</mm:think>" NS "<tool_call>\n" NS "<invoke name=\"get\">" NS "<city>Oslo" NS "</ci",
         "ty>" NS "</invoke>\n" NS "</tool_call>"},
        {"</mm:think>" NS "<tool_call>\n" NS "<invoke name=\"get\">" NS "<city>Oslo" NS "</city>" NS
         "</invoke>",
         "\n" NS "</tool_call>"},
        {"</mm:think>" NS "<tool_call>\n" NS "<invoke name=\"get\">" NS "</invoke>\n" NS
         "</tool_call>",
         ""},
        {"</mm:think>" NS "<tool_call>\n" NS "</tool_call> and then", ""},
    };
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
        char want[512];
        snprintf(want, sizeof want, "%s%s[e~[\n", cut[i][0], cut[i][1]);
        expect_text(spliced(&r, cut[i][0], true, false), want);
    }
    end_rig(&r);
}

/* What comes behind a known prefix is rendered as it is behind the items themselves, wherever the
 * run between them was cut. */
Test(eng_codec, goes_on_behind_a_known_prefix)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    static const char run[] = "<mm:think>hello" NS "<tool_call>\n" NS "<invoke name=\"f\">" NS
                              "</invoke>\n" NS "</tool_call>[e~[";
    eng_ids ids;
    eng_ids_init(&ids, 0);
    eng_tok_encode(r.tok, &ids, run, sizeof run - 1, true, NULL);
    for (uint32_t count = 1; count <= ids.count; count++) {
        eng_item items[] = {user("q"),
                            {.role = ENG_ROLE_ASSISTANT, .tokens = ids.data, .token_count = count},
                            {.role = ENG_ROLE_TOOL, .text = {"12", 2}},
                            user("z")};
        int32_t whole[2048], first[2048];
        render(&r, (eng_chat){.items = items, .item_count = 4});
        uint32_t whole_count = r.prompt.token_count, end = r.prompt.item_end[3];
        cr_assert_leq(whole_count, 2048);
        memcpy(whole, r.prompt.tokens, whole_count * sizeof *whole);
        /* Everything but the run and what follows. */
        render(&r, (eng_chat){.items = items, .item_count = 1});
        uint32_t first_count = r.prompt.token_count;
        memcpy(first, r.prompt.tokens, first_count * sizeof *first);
        render(&r, (eng_chat){.items = items + 1,
                              .item_count = 3,
                              .prefix = first,
                              .prefix_count = first_count});
        cr_assert_eq(r.prompt.token_count, whole_count);
        cr_assert_eq(memcmp(r.prompt.tokens, whole, whole_count * sizeof *whole), 0);
        cr_assert_eq(r.prompt.item_end[2], end);
    }
    eng_item no_run = user("q");
    cr_assert_eq(
        render_within(
            &r,
            (eng_chat){.items = &no_run, .item_count = 1, .prefix = ids.data, .prefix_count = 1}, 0,
            1000),
        BASE_INVALID);
    eng_ids_deinit(&ids);
    end_rig(&r);
}

/* Wherever a run is cut, what it is closed with decodes to nothing but an end: no call, text or
 * thought is made up. */
Test(eng_codec, a_run_closed_anywhere_is_well_formed)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    static const char run[] =
        "<mm:think>hello" NS "<tool_call>\n" NS "<invoke name=\"f\">" NS "<a>" NS "<b>x" NS
        "</b>" NS "</a>" NS "</invoke>\n" NS "<invoke name=\"g\">" NS "<c>y" NS "</c>" NS
        "</invoke>\n" NS "</tool_call>[e~[";
    eng_ids ids;
    eng_ids_init(&ids, 0);
    eng_tok_encode(r.tok, &ids, run, sizeof run - 1, true, NULL);
    for (uint32_t count = 0; count <= ids.count; count++) {
        eng_item items[] = {{.role = ENG_ROLE_ASSISTANT, .tokens = ids.data, .token_count = count}};
        cr_assert_not_null(ids.data);
        render(&r, (eng_chat){.items = items, .item_count = 1, .no_generation_prompt = true});
        const char *text = strstr(r.text.data, "]~b]ai\n") + strlen("]~b]ai\n");
        uint32_t opened = 0, closed = 0;
        for (const char *at = text; (at = strstr(at, "<tool_call>")) != NULL; at++)
            opened++;
        for (const char *at = text; (at = strstr(at, "</tool_call>")) != NULL; at++)
            closed++;
        cr_assert_eq(opened, closed, "%u tokens: %s", count, text);
        rig_result got = {.check_prefixes = true};
        eng_decoder *decoder =
            make_decoder(r.codec, &got, (eng_decoder_options){.parse = ENG_PARSE_CHAT});
        for (uint32_t i = r.prompt.item_end[0] - 1; i < r.prompt.item_end[0]; i++)
            cr_assert_eq(r.prompt.tokens[i], '\n');
        eng_decoder_push(decoder, -1, text, strlen(text) - strlen("[e~[\n"));
        eng_decoder_push(decoder, eng_codec_end_token(r.codec), "[e~[", 4);
        eng_decoder_finish(decoder);
        for (uint32_t i = 0; i < got.call_count; i++)
            cr_assert(got.calls[i].whole);
        cr_assert_not(eng_decoder_in_reasoning(decoder) && closed > 0);
        eng_decoder_destroy(decoder);
        rig_clear(&got);
    }
    eng_ids_deinit(&ids);
    end_rig(&r);
}

Test(eng_codec, continues_the_last_item)
{
    rig r = make_rig(SMALL_TOKENIZER, "I");
    eng_item items[] = {user("q"), assistant("why", "Because")};
    eng_chat chat = {
        .items = items, .item_count = 2, .continue_last = true, .thinking = ENG_THINK_ENABLED};
    render(&r, chat);
    expect_tail(&r, "]~b]ai\n<mm:think>why</mm:think>Because");
    cr_assert_not(r.prompt.starts_in_reasoning);
    cr_assert_eq(r.prompt.item_end[1], r.prompt.token_count);
    items[1] = assistant("why", NULL);
    render(&r, chat);
    expect_tail(&r, "]~b]ai\n<mm:think>why");
    cr_assert(r.prompt.starts_in_reasoning);
    items[1] = assistant(NULL, "Because");
    render(&r, chat);
    expect_tail(&r, "]~b]ai\n</mm:think>Because");
    chat.item_count = 1;
    cr_assert_eq(render_within(&r, chat, 0, 1000), BASE_INVALID);
    cr_assert_str_eq(r.err.param, "continue_final_message");
    expect_text(spliced(&r, "<mm:think>why", true, true), "<mm:think>why");
    cr_assert(r.prompt.starts_in_reasoning);
    expect_text(spliced(&r, "<mm:think>why</mm:think>be[e~[", true, true),
                "<mm:think>why</mm:think>be");
    cr_assert_not(r.prompt.starts_in_reasoning);
    end_rig(&r);
}

/* ---- forced tokens ---- */

static const char *text_of_ids(rig *r, const int32_t *tokens, uint32_t count)
{
    base_buf_clear(&r->text);
    for (uint32_t i = 0; i < count; i++) {
        size_t length;
        const char *bytes = eng_tok_bytes(r->tok, tokens[i], &length);
        base_buf_add(&r->text, bytes, length);
    }
    return r->text.data;
}

Test(eng_codec, forces_the_tokens_that_rendering_gives)
{
    rig r = make_rig(NANO_TOKENIZER, "I");
    int32_t *tokens;
    uint32_t count;
    cr_assert_eq(eng_codec_force(r.codec, &tokens, &count, (eng_text){0}, r.arena, NULL), BASE_OK);
    expect_text(text_of_ids(&r, tokens, count), NS "<tool_call>\n" NS "<invoke name=\"");
    cr_assert_eq(tokens[1], eng_codec_call_token(r.codec));
    cr_assert_eq(eng_codec_force_close(r.codec, &tokens, &count, r.arena, NULL), BASE_OK);
    expect_text(text_of_ids(&r, tokens, count), "\n" NS "</tool_call>[e~[");
    cr_assert_eq(tokens[count - 1], eng_codec_end_token(r.codec));
    cr_assert_eq(eng_codec_force(r.codec, &tokens, &count, TEXT("get_weather"), r.arena, NULL),
                 BASE_OK);
    expect_text(text_of_ids(&r, tokens, count),
                NS "<tool_call>\n" NS "<invoke name=\"get_weather\">");
    eng_call call = {.name = TEXT("get_weather"), .arguments = TEXT("{\"city\":\"Oslo\"}")};
    eng_item items[] = {{.role = ENG_ROLE_ASSISTANT, .calls = &call, .call_count = 1}};
    render(&r, (eng_chat){.items = items,
                          .item_count = 1,
                          .no_generation_prompt = true,
                          .thinking = ENG_THINK_DISABLED});
    uint32_t at = 0;
    while (r.prompt.tokens[at] != tokens[1] && at + count < r.prompt.token_count)
        at++;
    cr_assert_eq(memcmp(r.prompt.tokens + at - 1, tokens, count * sizeof *tokens), 0);
    end_rig(&r);
}
