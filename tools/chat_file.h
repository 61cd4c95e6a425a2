/* chat_file: a conversation in a JSON file, {"messages": […], "tools": […], "thinking": …,
 * "effort": …}, as an eng_chat.
 *
 * Messages and tools as in OpenAI's chat completions: roles system, developer, user, assistant,
 * tool (and root); content a string, null or text parts; tool_calls with function.name and
 * function.arguments (text, or an object). Arguments and tools keep the file's own text. Everything
 * lies in the arena or in `text`. For programs: the gateway has its own reader. */
#pragma once
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/json.h"
#include "engine/engine.h"

#define CHAT_FILE_DEPTH 256

typedef struct chat_value {
    base_json_kind kind;
    const char *raw;
    size_t length;
} chat_value;

/* The value of a member of an object's text; kind END if there is none. The text is known to be
 * valid JSON. */
static inline chat_value chat_file__member(chat_value object, const char *key)
{
    base_json json;
    base_json_init(&json, object.raw, object.length, CHAT_FILE_DEPTH);
    if (object.kind != BASE_JSON_OBJECT_BEGIN || base_json_next(&json) != BASE_JSON_OBJECT_BEGIN)
        return (chat_value){.kind = BASE_JSON_END};
    while (base_json_next(&json) == BASE_JSON_KEY) {
        bool found = base_json_string_is(json.raw, json.raw_length, key);
        base_json peek = json;
        base_json_kind kind = base_json_next(&peek);
        if (!base_json_skip(&json))
            break;
        if (found)
            return (chat_value){.kind = kind, .raw = json.raw, .length = json.raw_length};
    }
    return (chat_value){.kind = BASE_JSON_END};
}

/* Element `index` of an array's text; kind END past its end. */
static inline chat_value chat_file__element(chat_value array, uint32_t index)
{
    base_json json;
    base_json_init(&json, array.raw, array.length, CHAT_FILE_DEPTH);
    if (array.kind != BASE_JSON_ARRAY_BEGIN || base_json_next(&json) != BASE_JSON_ARRAY_BEGIN)
        return (chat_value){.kind = BASE_JSON_END};
    for (uint32_t i = 0;; i++) {
        base_json_kind kind = base_json_next(&json);
        if (kind == BASE_JSON_ARRAY_END || kind == BASE_JSON_ERROR)
            return (chat_value){.kind = BASE_JSON_END};
        if ((kind == BASE_JSON_OBJECT_BEGIN || kind == BASE_JSON_ARRAY_BEGIN) &&
            !base_json_skip(&json))
            return (chat_value){.kind = BASE_JSON_END};
        if (i == index)
            return (chat_value){.kind = kind, .raw = json.raw, .length = json.raw_length};
    }
}

static inline uint32_t chat_file__count(chat_value array)
{
    uint32_t count = 0;
    while (chat_file__element(array, count).kind != BASE_JSON_END)
        count++;
    return count;
}

/* The characters of a string, or of the text parts of an array, joined; absent for anything else.
 */
static inline eng_text chat_file__text(chat_value value, base_arena *arena)
{
    base_buf buf;
    eng_text out = {0};
    base_buf_init(&buf, 0);
    if (value.kind == BASE_JSON_STRING)
        base_json_unescape(&buf, value.raw, value.length);
    for (uint32_t i = 0; value.kind == BASE_JSON_ARRAY_BEGIN; i++) {
        chat_value part = chat_file__element(value, i), text = chat_file__member(part, "text");
        if (part.kind == BASE_JSON_END)
            break;
        if (text.kind == BASE_JSON_STRING)
            base_json_unescape(&buf, text.raw, text.length);
    }
    if (value.kind == BASE_JSON_STRING || value.kind == BASE_JSON_ARRAY_BEGIN)
        out =
            (eng_text){.data = base_arena_copy(arena, buf.data != NULL ? buf.data : "", buf.length),
                       .length = buf.length};
    base_buf_deinit(&buf);
    return out;
}

static inline bool chat_file__role(chat_value value, eng_role *role)
{
    static const struct {
        const char *name;
        eng_role role;
    } ROLES[] = {{"root", ENG_ROLE_ROOT},        {"system", ENG_ROLE_SYSTEM},
                 {"developer", ENG_ROLE_SYSTEM}, {"user", ENG_ROLE_USER},
                 {"tool", ENG_ROLE_TOOL},        {"assistant", ENG_ROLE_ASSISTANT}};
    for (size_t i = 0; value.kind == BASE_JSON_STRING && i < sizeof ROLES / sizeof *ROLES; i++)
        if (base_json_string_is(value.raw, value.length, ROLES[i].name)) {
            *role = ROLES[i].role;
            return true;
        }
    return false;
}

static inline base_code chat_file__item(eng_item *item, chat_value message, uint32_t index,
                                        base_arena *arena, base_err *err)
{
    chat_value calls = chat_file__member(message, "tool_calls");
    *item = (eng_item){0};
    if (!chat_file__role(chat_file__member(message, "role"), &item->role))
        return base_fail(
            err, BASE_INVALID,
            "messages[%u].role is none of root, system, developer, user, assistant, tool", index);
    item->text = chat_file__text(chat_file__member(message, "content"), arena);
    item->reasoning = chat_file__text(chat_file__member(message, "reasoning_content"), arena);
    uint32_t count = chat_file__count(calls);
    eng_call *list = base_arena_calloc(arena, count, sizeof *list);
    for (uint32_t i = 0; i < count && list != NULL; i++) {
        chat_value call = chat_file__element(calls, i),
                   function = chat_file__member(call, "function");
        chat_value arguments = chat_file__member(function, "arguments");
        list[i].id = chat_file__text(chat_file__member(call, "id"), arena);
        list[i].name = chat_file__text(chat_file__member(function, "name"), arena);
        if (list[i].name.data == NULL)
            return base_fail(err, BASE_INVALID,
                             "messages[%u].tool_calls[%u].function.name is missing", index, i);
        list[i].arguments = arguments.kind == BASE_JSON_OBJECT_BEGIN
                                ? (eng_text){.data = arguments.raw, .length = arguments.length}
                                : chat_file__text(arguments, arena);
    }
    item->calls = list;
    item->call_count = count;
    return BASE_OK;
}

/* `text` outlives the chat. */
static inline base_code chat_file_parse(eng_chat *out, const char *text, size_t length,
                                        base_arena *arena, base_err *err)
{
    static const char *const MODES[] = {[ENG_THINK_ENABLED] = "enabled",
                                        [ENG_THINK_DISABLED] = "disabled",
                                        [ENG_THINK_ADAPTIVE] = "adaptive"};
    base_json json;
    base_json_kind kind;
    *out = (eng_chat){0};
    base_json_init(&json, text, length, CHAT_FILE_DEPTH);
    while ((kind = base_json_next(&json)) != BASE_JSON_END)
        if (kind == BASE_JSON_ERROR)
            return base_fail(err, BASE_INVALID, "byte %zu: %s", json.pos, json.error);
    const char *start = text + strspn(text, " \t\r\n");
    chat_value root = {.kind = *start == '{' ? BASE_JSON_OBJECT_BEGIN : BASE_JSON_END,
                       .raw = start,
                       .length = length - (size_t)(start - text)};
    chat_value messages = chat_file__member(root, "messages"),
               tools = chat_file__member(root, "tools");
    chat_value thinking = chat_file__member(root, "thinking");
    if (messages.kind != BASE_JSON_ARRAY_BEGIN)
        return base_fail(err, BASE_INVALID, "messages is not an array");
    uint32_t item_count = chat_file__count(messages), tool_count = chat_file__count(tools);
    eng_item *items = base_arena_calloc(arena, item_count, sizeof *items);
    eng_text *functions = base_arena_calloc(arena, tool_count, sizeof *functions);
    for (uint32_t i = 0; i < item_count && items != NULL; i++) {
        base_code code = chat_file__item(&items[i], chat_file__element(messages, i), i, arena, err);
        if (code != BASE_OK)
            return code;
    }
    for (uint32_t i = 0; i < tool_count && functions != NULL; i++) {
        chat_value tool = chat_file__element(tools, i),
                   function = chat_file__member(tool, "function");
        if (function.kind != BASE_JSON_OBJECT_BEGIN)
            function = tool; /* a bare function object */
        if (function.kind != BASE_JSON_OBJECT_BEGIN)
            return base_fail(err, BASE_INVALID, "tools[%u] is not an object", i);
        functions[i] = (eng_text){.data = function.raw, .length = function.length};
    }
    for (size_t i = ENG_THINK_ENABLED; i < sizeof MODES / sizeof *MODES; i++)
        if (thinking.kind == BASE_JSON_STRING &&
            base_json_string_is(thinking.raw, thinking.length, MODES[i]))
            out->thinking = (eng_thinking)i;
    if (thinking.kind != BASE_JSON_END && out->thinking == ENG_THINK_DEFAULT)
        return base_fail(err, BASE_INVALID,
                         "thinking is none of \"enabled\", \"disabled\", \"adaptive\"");
    out->effort = chat_file__text(chat_file__member(root, "effort"), arena);
    out->items = items;
    out->item_count = item_count;
    out->tools = functions;
    out->tool_count = tool_count;
    return base_arena_failed(arena) ? base_fail(err, BASE_NOMEM, "the conversation is too large")
                                    : BASE_OK;
}
