#include "gateway/call.h"

#include <string.h>

#include "gateway/body.h"

/* ---- taking apart ---- */

void gw_call_named(gw_turn_call *call, const json_t *tools)
{
    for (size_t i = 0; i < json_array_size(tools) && !call->custom; i++) {
        const json_t *tool = json_array_get(tools, i);
        const char *type = json_string_value(json_object_get(tool, "type"));
        const json_t *inner = json_object_get(tool, "custom");
        const json_t *name = json_object_get(inner ? inner : tool, "name");
        call->custom = type && strcmp(type, "custom") == 0 &&
                       json_string_length(name) == call->name.length && call->name.length &&
                       memcmp(json_string_value(name), call->name.data, call->name.length) == 0;
    }
}

/* Passes over `{"input":"`; 1: it is there, 0: more is needed, -1: it is something else. */
static int pass_head(gw_turn_call *call)
{
    static const char *const words[] = {"{", "\"input\"", ":", "\""};
    const char *text = call->arguments.data;
    size_t at = 0, length = call->arguments.length;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        size_t width = strlen(words[i]);
        while (at < length && strchr(" \t\r\n", text[at]))
            at++;
        size_t have = length - at < width ? length - at : width;
        if (memcmp(text + at, words[i], have) != 0) {
            bool empty = i == 1 && text[at] == '}'; /* called without its input: an empty one */
            call->state = empty ? GW_INPUT_OVER : GW_INPUT_RAW;
            return -1;
        }
        if (have < width)
            return 0;
        at += width;
    }
    call->taken = at;
    call->state = GW_INPUT_TEXT;
    return 1;
}

static void add_character(base_buf *out, uint32_t c)
{
    char bytes[4];
    size_t width = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = width; i-- > 1; c >>= 6)
        bytes[i] = (char)(0x80 | (c & 0x3F));
    static const unsigned char leads[] = {0, 0x00, 0xC0, 0xE0, 0xF0};
    bytes[0] = (char)(leads[width] | c);
    base_buf_add(out, bytes, width);
}

/* One escape at `text`; returns its bytes, 0 if more are needed. */
static size_t take_escape(base_buf *out, const char *text, size_t length)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (length < 2)
        return 0;
    const char *known = text[1] ? strchr(from, text[1]) : NULL;
    if (known) {
        base_buf_add(out, to + (known - from), 1);
        return 2;
    }
    if (text[1] != 'u') { /* none that JSON knows */
        base_buf_add(out, text, 1);
        return 1;
    }
    if (length < 6)
        return 0;
    int high = gw_hex4(text + 2), low = -1;
    if (high < 0) {
        base_buf_add(out, text, 1);
        return 1;
    }
    if (high < 0xD800 || high > 0xDFFF) {
        add_character(out, (uint32_t)high);
        return 6;
    }
    if (high < 0xDC00 && length < 12 &&
        memcmp(text + 6, "\\u", length - 6 < 2 ? length - 6 : 2) == 0)
        return 0;
    if (high < 0xDC00 && length >= 12 && text[6] == '\\' && text[7] == 'u')
        low = gw_hex4(text + 8);
    bool pair = low >= 0xDC00 && low <= 0xDFFF;
    add_character(out,
                  pair ? 0x10000 + (uint32_t)((high - 0xD800) << 10 | (low - 0xDC00)) : 0xFFFD);
    return pair ? 12 : 6;
}

static void take_text(gw_turn_call *call)
{
    const base_buf *arguments = &call->arguments;
    while (call->taken < arguments->length && call->state == GW_INPUT_TEXT) {
        const char *text = arguments->data + call->taken;
        size_t left = arguments->length - call->taken, plain = 0;
        while (plain < left && text[plain] != '"' && text[plain] != '\\')
            plain++;
        base_buf_add(&call->input, text, plain);
        call->taken += plain;
        if (plain == left)
            return;
        if (text[plain] == '"') {
            call->state = GW_INPUT_OVER;
            return;
        }
        size_t width = take_escape(&call->input, text + plain, left - plain);
        if (!width)
            return;
        call->taken += width;
    }
}

eng_text gw_call_add(gw_turn_call *call, const char *text, size_t length)
{
    base_buf_add(&call->arguments, text, length);
    if (!call->custom)
        return (eng_text){text, length};
    size_t before = call->input.length;
    if (call->arguments.failed)
        return (eng_text){"", 0};
    if (call->state == GW_INPUT_HEAD)
        pass_head(call);
    if (call->state == GW_INPUT_TEXT)
        take_text(call);
    if (call->state == GW_INPUT_RAW) {
        base_buf_add(&call->input, call->arguments.data + call->taken,
                     call->arguments.length - call->taken);
        call->taken = call->arguments.length;
    }
    return (eng_text){call->input.data ? call->input.data + before : "",
                      call->input.length - before};
}

const base_buf *gw_call_shown(const gw_turn_call *call)
{
    return call->custom ? &call->input : &call->arguments;
}

bool gw_call_failed(const gw_turn_call *call)
{
    return call->name.failed || call->arguments.failed || call->input.failed;
}

void gw_call_deinit(gw_turn_call *call)
{
    base_buf_deinit(&call->name);
    base_buf_deinit(&call->arguments);
    base_buf_deinit(&call->input);
}

/* ---- in the prompt ---- */

void gw_put_custom(base_buf *out, eng_text name, eng_text description, const char *syntax,
                   eng_text grammar)
{
    base_buf text;
    base_buf_init(&text, 0);
    base_buf_add(&text, description.data ? description.data : "", description.length);
    if (syntax) {
        base_buf_printf(&text, "%sThe input follows this %s grammar:\n", text.length ? "\n" : "",
                        syntax);
        base_buf_add(&text, grammar.data ? grammar.data : "", grammar.length);
    }
    base_buf_puts(out, "{\"name\":");
    base_buf_json_string(out, name.data, name.length);
    if (text.length) {
        base_buf_puts(out, ",\"description\":");
        base_buf_json_string(out, text.data, text.length);
    }
    base_buf_puts(out, ",\"parameters\":{\"type\":\"object\",\"properties\":{\"input\":{\"type\":"
                       "\"string\"}},\"required\":[\"input\"]}}");
    out->failed |= text.failed;
    base_buf_deinit(&text);
}
