/* Conversations out of JSON, in the shape of chat requests, for the tests of rendering. */
#pragma once
#include "tests/engine/text_rig.h"

/* A string, or parts joined with nothing between them, or an object as JSON text; absent stays
 * absent. */
static inline eng_text text_of_json(base_arena *arena, const json_t *value)
{
    base_buf text;
    if (value == NULL || json_is_null(value))
        return (eng_text){0};
    base_buf_init(&text, 0);
    base_buf_puts(&text, "");
    size_t i;
    json_t *part;
    if (json_is_string(value)) {
        base_buf_add(&text, json_string_value(value), json_string_length(value));
    } else if (json_is_array(value)) {
        json_array_foreach(value, i, part)
            base_buf_puts(&text, json_string_value(json_object_get(part, "text")));
    } else {
        char *dump = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
        base_buf_puts(&text, dump);
        free(dump);
    }
    eng_text copy = {base_arena_copy(arena, text.data, text.length), text.length};
    base_buf_deinit(&text);
    return copy;
}

static inline eng_role role_of(const char *role)
{
    if (strcmp(role, "root") == 0)
        return ENG_ROLE_ROOT;
    if (strcmp(role, "user") == 0)
        return ENG_ROLE_USER;
    if (strcmp(role, "assistant") == 0)
        return ENG_ROLE_ASSISTANT;
    return strcmp(role, "tool") == 0 ? ENG_ROLE_TOOL : ENG_ROLE_SYSTEM;
}

static inline eng_item item_of_json(base_arena *arena, const json_t *message)
{
    eng_item item = {.role = role_of(json_string_value(json_object_get(message, "role")))};
    item.text = text_of_json(arena, json_object_get(message, "content"));
    item.reasoning = text_of_json(arena, json_object_get(message, "reasoning_content"));
    const json_t *calls = json_object_get(message, "tool_calls");
    eng_call *list = base_arena_calloc(arena, json_array_size(calls) + 1, sizeof *list);
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *function = json_object_get(json_array_get(calls, i), "function");
        list[i].name = text_of_json(arena, json_object_get(function, "name"));
        list[i].arguments = text_of_json(arena, json_object_get(function, "arguments"));
    }
    item.calls = list;
    item.call_count = (uint32_t)json_array_size(calls);
    return item;
}

static inline eng_chat chat_of_json(base_arena *arena, const json_t *json)
{
    const json_t *messages = json_object_get(json, "messages"),
                 *tools = json_object_get(json, "tools");
    eng_item *items = base_arena_calloc(arena, json_array_size(messages) + 1, sizeof *items);
    for (size_t i = 0; i < json_array_size(messages); i++)
        items[i] = item_of_json(arena, json_array_get(messages, i));
    eng_text *list = base_arena_calloc(arena, json_array_size(tools) + 1, sizeof *list);
    for (size_t i = 0; i < json_array_size(tools); i++)
        list[i] = text_of_json(arena, json_object_get(json_array_get(tools, i), "function"));
    const char *mode = json_string_value(json_object_get(json, "thinking_mode"));
    eng_thinking thinking = mode == NULL     ? ENG_THINK_DEFAULT
                            : mode[0] == 'e' ? ENG_THINK_ENABLED
                            : mode[0] == 'd' ? ENG_THINK_DISABLED
                                             : ENG_THINK_ADAPTIVE;
    return (eng_chat){.items = items,
                      .item_count = (uint32_t)json_array_size(messages),
                      .tools = list,
                      .tool_count = (uint32_t)json_array_size(tools),
                      .thinking = thinking,
                      .effort = text_of_json(arena, json_object_get(json, "effort")),
                      .no_generation_prompt =
                          json_is_false(json_object_get(json, "generation_prompt"))};
}
