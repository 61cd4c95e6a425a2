/* Calls of custom tools: the text inside the arguments, however they come. */
#include <criterion/criterion.h>
#include <string.h>

#include "gateway/call.h"

#define TOOLS                                                                                      \
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\"}},{\"type\":\"custom\",\"custom\":{"     \
    "\"name\":\"c\"}},{\"type\":\"custom\",\"name\":\"flat\"}]"

static gw_turn_call named(const char *name)
{
    json_t *tools = json_loads(TOOLS, 0, NULL);
    gw_turn_call call = {0};
    base_buf_puts(&call.name, name);
    gw_call_named(&call, tools);
    json_decref(tools);
    return call;
}

/* What a client sees of arguments that come in pieces of `size` bytes; the pieces joined are it. */
static void check(const char *arguments, const char *input, size_t size)
{
    gw_turn_call call = named("c");
    base_buf joined;
    base_buf_init(&joined, 0);
    for (size_t at = 0, length = strlen(arguments); at < length; at += size) {
        eng_text more = gw_call_add(&call, arguments + at, length - at < size ? length - at : size);
        base_buf_add(&joined, more.data, more.length);
    }
    base_buf_add(&joined, "", 1);
    const base_buf *shown = gw_call_shown(&call);
    cr_expect_eq(shown->length, strlen(input), "%s by %zu", arguments, size);
    cr_expect(shown->length == 0 || memcmp(shown->data, input, shown->length) == 0,
              "%s by %zu: %.*s", arguments, size, (int)shown->length,
              shown->data ? shown->data : "");
    cr_expect_str_eq(joined.data, input);
    cr_expect_eq(call.arguments.length, strlen(arguments));
    base_buf_deinit(&joined);
    gw_call_deinit(&call);
}

Test(call, a_custom_tools_text_is_the_same_for_every_cut)
{
    static const char *const rows[][2] = {
        {"{\"input\":\"\"}", ""},
        {"{\"input\": \"a b\"}", "a b"},
        {" { \"input\" : \"x\" } ", "x"},
        {"{\"input\":\"\\\"q\\\\ \\/ \\b\\f\\n\\r\\t\"}", "\"q\\ / \b\f\n\r\t"},
        {"{\"input\":\"\\u0041\\u00e9\\u6771\\ud83c\\udf0d\"}", "A\u00e9\u6771\U0001F30D"},
        {"{\"input\":\"\\ud83c\"}", "\uFFFD"},
        {"{\"input\":\"\\ud83c\\n\"}", "\uFFFD\n"},
        {"{\"input\":\"\\udf0dx\"}", "\uFFFDx"},
        {"{\"input\":\"\\ud83c\\u0041\"}", "\uFFFDA"},
        {"{\"input\":\"{\\\"input\\\":\\\"y\\\"}\"}", "{\"input\":\"y\"}"},
        {"{\"input\":\"a\",\"more\":\"b\"}", "a"},
        {"{}", ""},
        {"{\"other\":\"a\"}", "{\"other\":\"a\"}"},
        {"{\"input\":3}", "{\"input\":3}"},
        {"{\"inputs\":\"a\"}", "{\"inputs\":\"a\"}"},
        {"", ""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (size_t size = 1; size < 32; size++)
            check(rows[i][0], rows[i][1], size);
}

Test(call, functions_keep_their_arguments)
{
    static const char arguments[] = "{\"input\":\"a\"}";
    gw_turn_call call = named("f");
    cr_assert_not(call.custom);
    eng_text more = gw_call_add(&call, arguments, strlen(arguments));
    cr_assert_eq(more.length, strlen(arguments));
    cr_assert_eq(gw_call_shown(&call), &call.arguments);
    gw_call_deinit(&call);
    call = named("flat");
    cr_assert(call.custom);
    gw_call_deinit(&call);
    call = named("unknown");
    cr_assert_not(call.custom);
    gw_call_deinit(&call);
}
