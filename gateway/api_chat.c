/* api_chat: see the header. Top: reading a body (worker). Bottom: writing records (loop).
 *
 * Read and applied: model, messages, tools, tool_choice, parallel_tool_calls, stream,
 * stream_options, max_completion_tokens and max_tokens, temperature, top_p, top_k, min_p,
 * penalties, repetition_penalty, stop, stop_token_ids, ignore_eos, min_tokens, seed, logprobs,
 * top_logprobs, logit_bias, reasoning_effort, chat_template_kwargs, thinking, enable_thinking,
 * store, metadata, session_id, cache_salt, return_token_ids, add_generation_prompt,
 * continue_final_message. The engine's own fields are taken from `extra_body` too, since some
 * clients forward it literally. Read for their type alone (hints): user, safety_identifier,
 * service_tier, verbosity, prompt_cache_key (a session label at last), prediction. Not offered yet,
 * and refused by name: n above 1, response_format other than text, audio output, custom tools,
 * parts that are not text. */
#include "gateway/api_chat.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/body.h"
#include "gateway/conf.h"
#include "gateway/turn.h"

#define PATH_MAX_BYTES 96
#define STOPS_MAX 4 /* the vendor's limit */
#define STOP_BYTES_MAX 1024
#define STOP_TOKENS_MAX 256
#define BIAS_MAX 4096
#define NAME_BYTES_MAX 256
#define TOOL_NAME_MAX 128
#define METADATA_MAX 16
#define REPLACEMENT "\xEF\xBF\xBD" /* U+FFFD */

/* A token whose logprob waits for its text: lengths of its bytes and its entry's JSON in the two
 * buffers. */
typedef struct waiting {
    uint32_t byte_count, json_count;
} waiting;

typedef struct chat {
    bool include_usage, keepalive_chunk, return_token_ids, logprobs;
    bool reasoning_too; /* the client reads `reasoning` */
    uint32_t top_logprobs;
    base_buf head;    /* of every record, up to `"choices":` */
    base_buf record;  /* scratch */
    base_buf ids;     /* token ids that no record has carried yet, "1,2,3" */
    base_buf entries; /* logprob entries that no record has carried yet, or all of them if not
                         streamed */
    /* Tokens of the output that no text was given out for yet: marks and held text. */
    base_buf waiting_bytes, waiting_json, unmatched;
    waiting *waiting;
    uint32_t waiting_count, waiting_capacity;
} chat;

static chat *state(gw_turn *turn)
{
    return turn->state_of_dialect;
}

/* ---- reading ---- */

#define TRY(call)                                                                                  \
    do {                                                                                           \
        base_code code_ = (call);                                                                  \
        if (code_)                                                                                 \
            return code_;                                                                          \
    } while (0)

static base_code no_memory(base_err *err)
{
    return base_fail(err, BASE_NOMEM, "no memory for the request");
}

static base_code unsupported(base_err *err, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static base_code unsupported(base_err *err, const char *param, const char *fmt, ...)
{
    char text[160];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    return base_fail_param(err, BASE_UNSUPPORTED, param, "%s", text);
}

/* The path of a field, for errors; base_err keeps 47 bytes of it. */
static void name_path(char out[PATH_MAX_BYTES], const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
static void name_path(char out[PATH_MAX_BYTES], const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(out, PATH_MAX_BYTES, fmt, args);
    va_end(args);
}

/* Text of a content array, its parts joined without separator, as the template joins them. */
static base_code read_parts(gw_turn *turn, eng_text *out, const json_t *parts, const char *path,
                            base_err *err)
{
    size_t count = json_array_size(parts), total = 0;
    for (int copy = 0; copy < 2; copy++) {
        char *to = NULL;
        if (copy) {
            to = base_arena_alloc(turn->arena, total + 1);
            if (!to)
                return no_memory(err);
            *out = (eng_text){to, total};
        }
        for (size_t i = 0; i < count; i++) {
            const json_t *part = json_array_get(parts, i);
            char where[PATH_MAX_BYTES];
            name_path(where, "%s[%zu]", path, i);
            eng_text text = {0};
            if (json_is_string(part)) { /* a bare string in the list, which some clients send */
                text = (eng_text){json_string_value(part), json_string_length(part)};
            } else if (!json_is_object(part)) {
                return gw_wrong_type(where, "", "an object", part, err);
            } else {
                const char *type = NULL;
                TRY(gw_read_name(&type, part, where, "type", NAME_BYTES_MAX, err));
                if (!type || strcmp(type, "text") == 0 || strcmp(type, "input_text") == 0 ||
                    strcmp(type, "output_text") == 0) {
                    TRY(gw_read_text(&text, part, where, "text", err));
                    if (!text.data)
                        return gw_wrong_type(where, "text", "a string", NULL, err);
                } else if (strcmp(type, "refusal") == 0) {
                    TRY(gw_read_text(&text, part, where, "refusal", err));
                } else {
                    char param[PATH_MAX_BYTES];
                    name_path(param, "%s.type", where);
                    const char *kind = strstr(type, "image")   ? "image"
                                       : strstr(type, "audio") ? "audio"
                                       : strstr(type, "video") ? "video"
                                       : strstr(type, "file")  ? "file"
                                                               : NULL;
                    if (kind)
                        return unsupported(err, param,
                                           "%s: this model reads text only, it takes no %s parts",
                                           param, kind);
                    return base_fail_param(err, BASE_INVALID, param,
                                           "%s '%.*s' is no kind of content", param,
                                           (int)base_utf8_complete(type, strnlen(type, 32)), type);
                }
            }
            if (copy && text.length) {
                memcpy(to, text.data, text.length);
                to += text.length;
            }
            total += copy ? 0 : text.length;
        }
        if (copy)
            *to = '\0';
    }
    return BASE_OK;
}

static base_code read_content(gw_turn *turn, eng_text *out, const json_t *message, const char *path,
                              bool required, base_err *err)
{
    const json_t *content = json_object_get(message, "content");
    char where[PATH_MAX_BYTES];
    name_path(where, "%s.content", path);
    if (!content || json_is_null(content)) {
        if (required)
            return gw_wrong_type(path, "content", "a string or an array of parts", content, err);
        *out = (eng_text){"", 0};
        return BASE_OK;
    }
    if (json_is_string(content)) {
        *out = (eng_text){json_string_value(content), json_string_length(content)};
        return BASE_OK;
    }
    if (!json_is_array(content))
        return gw_wrong_type(path, "content", "a string or an array of parts", content, err);
    return read_parts(turn, out, content, where, err);
}

/* reasoning_content, reasoning or reasoning_details: the first that is not empty. */
static base_code read_reasoning(gw_turn *turn, eng_text *out, const json_t *message,
                                const char *path, base_err *err)
{
    eng_text text = {0};
    TRY(gw_read_text(&text, message, path, "reasoning_content", err));
    if (!text.length) {
        text = (eng_text){0};
        const json_t *reasoning = json_object_get(message, "reasoning");
        /* Some routers put an object here; it is no text of ours. */
        if (!json_is_object(reasoning))
            TRY(gw_read_text(&text, message, path, "reasoning", err));
        if (text.length)
            state(turn)->reasoning_too = true;
    }
    if (!text.length) {
        json_t *details;
        TRY(gw_read_array(&details, message, path, "reasoning_details", err));
        size_t total = 0, count = json_array_size(details);
        for (size_t i = 0; i < count; i++)
            total += json_string_length(json_object_get(json_array_get(details, i), "text"));
        if (total) {
            char *to = base_arena_alloc(turn->arena, total);
            if (!to)
                return no_memory(err);
            text = (eng_text){to, total};
            for (size_t i = 0; i < count; i++) {
                const json_t *part = json_object_get(json_array_get(details, i), "text");
                memcpy(to, json_string_value(part) ? json_string_value(part) : "",
                       json_string_length(part));
                to += json_string_length(part);
            }
        }
    }
    if (text.length)
        *out = text;
    return BASE_OK;
}

static base_code read_call(gw_turn *turn, eng_call *out, const json_t *call, const char *path,
                           base_err *err)
{
    if (!json_is_object(call))
        return gw_wrong_type(path, "", "an object", call, err);
    const char *id = NULL, *name = NULL;
    TRY(gw_read_name(&id, call, path, "id", NAME_BYTES_MAX, err));
    json_t *function, *custom;
    TRY(gw_read_object(&function, call, path, "function", err));
    TRY(gw_read_object(&custom, call, path, "custom", err));
    if (!function && !custom)
        return gw_wrong_type(path, "function", "an object", NULL, err);
    char where[PATH_MAX_BYTES];
    name_path(where, "%s.%s", path, function ? "function" : "custom");
    const json_t *body = function ? function : custom;
    TRY(gw_read_name(&name, body, where, "name", NAME_BYTES_MAX, err));
    if (!name || !name[0])
        return gw_wrong_type(where, "name", "a string", NULL, err);
    *out = (eng_call){.id = {id, id ? strlen(id) : 0}, .name = {name, strlen(name)}};
    if (function) {
        /* The bytes are kept: what the ledger knows needs no valid JSON, see `check`. */
        out->arguments = (eng_text){"", 0};
        return gw_read_text(&out->arguments, body, where, "arguments", err);
    }
    /* A custom tool's input is free text; in history it reads like a call with one argument. */
    eng_text input = {"", 0};
    TRY(gw_read_text(&input, body, where, "input", err));
    base_buf json;
    base_buf_init(&json, 0);
    base_buf_puts(&json, "{\"input\":");
    base_buf_json_string(&json, input.data, input.length);
    base_buf_puts(&json, "}");
    char *text = json.failed ? NULL : base_arena_copy(turn->arena, json.data, json.length);
    out->arguments = (eng_text){text, json.length};
    base_buf_deinit(&json);
    return text ? BASE_OK : no_memory(err);
}

static base_code read_message(gw_turn *turn, eng_item *out, eng_text *result_id,
                              const json_t *message, size_t index, base_err *err)
{
    char path[PATH_MAX_BYTES];
    name_path(path, "messages[%zu]", index);
    if (!json_is_object(message))
        return gw_wrong_type(path, "", "an object", message, err);
    const char *role = NULL, *name = NULL;
    TRY(gw_read_name(&role, message, path, "role", NAME_BYTES_MAX, err));
    TRY(gw_read_name(&name, message, path, "name", NAME_BYTES_MAX, err));
    if (!role)
        return gw_wrong_type(path, "role", "a string", NULL, err);
    *out = (eng_item){0};
    if (strcmp(role, "system") == 0 || strcmp(role, "developer") == 0) {
        out->role = ENG_ROLE_SYSTEM;
        return read_content(turn, &out->text, message, path, true, err);
    }
    if (strcmp(role, "user") == 0) {
        out->role = ENG_ROLE_USER;
        return read_content(turn, &out->text, message, path, true, err);
    }
    if (strcmp(role, "tool") == 0 || strcmp(role, "function") == 0) {
        out->role = ENG_ROLE_TOOL;
        const char *id = NULL;
        TRY(gw_read_name(&id, message, path, "tool_call_id", NAME_BYTES_MAX, err));
        if (!id && role[0] == 't')
            return gw_wrong_type(path, "tool_call_id", "a string", NULL, err);
        *result_id = (eng_text){id, id ? strlen(id) : 0};
        return read_content(turn, &out->text, message, path, false, err);
    }
    if (strcmp(role, "assistant") != 0) {
        char param[PATH_MAX_BYTES];
        name_path(param, "%s.role", path);
        return base_fail_param(err, BASE_INVALID, param,
                               "%s '%.*s' is not one of system, developer, user, assistant, tool",
                               param, (int)base_utf8_complete(role, strnlen(role, 32)), role);
    }
    out->role = ENG_ROLE_ASSISTANT;
    TRY(read_content(turn, &out->text, message, path, false, err));
    TRY(read_reasoning(turn, &out->reasoning, message, path, err));
    json_t *calls;
    TRY(gw_read_array(&calls, message, path, "tool_calls", err));
    size_t count = json_array_size(calls);
    if (!count)
        return BASE_OK;
    eng_call *list = base_arena_calloc(turn->arena, count, sizeof(*list));
    if (!list)
        return no_memory(err);
    for (size_t i = 0; i < count; i++) {
        char where[PATH_MAX_BYTES];
        name_path(where, "%s.tool_calls[%zu]", path, i);
        TRY(read_call(turn, &list[i], json_array_get(calls, i), where, err));
    }
    out->calls = list;
    out->call_count = (uint32_t)count;
    return BASE_OK;
}

static base_code read_messages(gw_turn *turn, base_err *err)
{
    json_t *messages;
    TRY(gw_read_array(&messages, turn->json, "", "messages", err));
    size_t count = json_array_size(messages);
    if (!count)
        return base_fail_param(err, BASE_INVALID, "messages",
                               "messages must be an array of at least one message");
    turn->items = base_arena_calloc(turn->arena, count, sizeof(*turn->items));
    eng_text *ids = base_arena_calloc(turn->arena, count, sizeof(*ids));
    if (!turn->items || !ids)
        return no_memory(err);
    for (size_t i = 0; i < count; i++)
        TRY(read_message(turn, &turn->items[i], &ids[i], json_array_get(messages, i), i, err));
    gw_order_results(turn->items, ids, count);
    turn->chat.items = turn->items;
    turn->chat.item_count = (uint32_t)count;
    return BASE_OK;
}

static bool good_tool_name(const char *name)
{
    size_t length = strlen(name);
    if (!length || length > TOOL_NAME_MAX)
        return false;
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)name[i]) && !strchr("_-.:", name[i]))
            return false;
    return true;
}

static base_code read_tool(const json_t *tool, size_t index, base_err *err)
{
    char path[PATH_MAX_BYTES], where[PATH_MAX_BYTES];
    name_path(path, "tools[%zu]", index);
    if (!json_is_object(tool))
        return gw_wrong_type(path, "", "an object", tool, err);
    const char *type = NULL, *name = NULL;
    TRY(gw_read_name(&type, tool, path, "type", NAME_BYTES_MAX, err));
    if (type && strcmp(type, "function") != 0) {
        name_path(where, "%s.type", path);
        return unsupported(err, where, "%s '%.*s' is not offered, only function tools are", where,
                           (int)base_utf8_complete(type, strnlen(type, 32)), type);
    }
    json_t *function, *parameters;
    TRY(gw_read_object(&function, tool, path, "function", err));
    if (!function)
        return gw_wrong_type(path, "function", "an object", NULL, err);
    name_path(where, "%s.function", path);
    TRY(gw_read_name(&name, function, where, "name", NAME_BYTES_MAX, err));
    if (!name)
        return gw_wrong_type(where, "name", "a string", NULL, err);
    if (!good_tool_name(name)) {
        name_path(where, "%s.function.name", path);
        return base_fail_param(err, BASE_INVALID, where,
                               "%s must have 1 to %d letters, digits, '_', '-', '.' or ':'", where,
                               TOOL_NAME_MAX);
    }
    eng_text description = {0};
    TRY(gw_read_text(&description, function, where, "description", err));
    return gw_read_object(&parameters, function, where, "parameters", err);
}

/* `raw` is the text of the tools array: the schemas' numbers and the order of their members must
 * reach the prompt as the client wrote them. */
static base_code read_tools(gw_turn *turn, eng_text raw, base_err *err)
{
    json_t *tools;
    TRY(gw_read_array(&tools, turn->json, "", "tools", err));
    size_t count = json_array_size(tools);
    if (!count)
        return BASE_OK;
    eng_text *texts = base_arena_calloc(turn->arena, count, sizeof(*texts));
    if (!texts)
        return no_memory(err);
    base_json json;
    base_json_init(&json, raw.data, raw.length, BASE_JSON_DEPTH_MAX);
    base_json_next(&json); /* the array's beginning */
    for (size_t i = 0; i < count; i++) {
        TRY(read_tool(json_array_get(tools, i), i, err));
        if (base_json_next(&json) != BASE_JSON_OBJECT_BEGIN || !base_json_skip(&json) ||
            !gw_body_member(&texts[i], json.raw, json.raw_length, "function"))
            return base_fail_param(err, BASE_INVALID, "tools", "tools[%zu] is not well formed", i);
    }
    turn->chat.tools = texts;
    turn->chat.tool_count = (uint32_t)count;
    return BASE_OK;
}

static base_code find_tool(gw_turn *turn, const char *name, const char *param, base_err *err)
{
    const json_t *tools = json_object_get(turn->json, "tools");
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *function = json_object_get(json_array_get(tools, i), "function");
        const char *have = json_string_value(json_object_get(function, "name"));
        if (have && strcmp(have, name) == 0) {
            turn->request.tool_name = (eng_text){have, strlen(have)};
            return BASE_OK;
        }
    }
    return base_fail_param(err, BASE_INVALID, param,
                           "%s names '%.*s', which is not among the tools", param,
                           (int)base_utf8_complete(name, strnlen(name, 64)), name);
}

static base_code read_mode(gw_turn *turn, const char *mode, const char *param, base_err *err)
{
    if (strcmp(mode, "none") == 0)
        turn->request.tool_choice = ENG_TOOL_NONE;
    else if (strcmp(mode, "auto") == 0)
        turn->request.tool_choice = turn->chat.tool_count ? ENG_TOOL_AUTO : ENG_TOOL_NONE;
    else if (strcmp(mode, "required") == 0 || strcmp(mode, "any") == 0)
        turn->request.tool_choice = ENG_TOOL_REQUIRED;
    else
        return base_fail_param(err, BASE_INVALID, param,
                               "%s '%.*s' is not one of none, auto, required", param,
                               (int)base_utf8_complete(mode, strnlen(mode, 32)), mode);
    if (turn->request.tool_choice == ENG_TOOL_REQUIRED && !turn->chat.tool_count)
        return base_fail_param(err, BASE_INVALID, param,
                               "%s asks for a call, but there are no tools", param);
    return BASE_OK;
}

/* allowed_tools {mode, tools}: the prompt keeps all tools, so that its cached prefix stays. One
 * allowed tool that is required becomes a named choice; of several the mode alone is applied. */
static base_code read_allowed(gw_turn *turn, const json_t *choice, base_err *err)
{
    json_t *allowed, *list;
    TRY(gw_read_object(&allowed, choice, "tool_choice", "allowed_tools", err));
    const json_t *body = allowed ? allowed : choice;
    const char *path = allowed ? "tool_choice.allowed_tools" : "tool_choice", *mode = NULL;
    TRY(gw_read_name(&mode, body, path, "mode", NAME_BYTES_MAX, err));
    TRY(gw_read_array(&list, body, path, "tools", err));
    TRY(read_mode(turn, mode ? mode : "auto", "tool_choice", err));
    const char *name = NULL;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *tool = json_array_get(list, i);
        const json_t *function = json_object_get(tool, "function");
        name = json_string_value(json_object_get(function ? function : tool, "name"));
        if (!name)
            return base_fail_param(err, BASE_INVALID, "tool_choice",
                                   "tool_choice: allowed tool %zu has no name", i);
        TRY(find_tool(turn, name, "tool_choice", err));
    }
    if (json_array_size(list) == 1 && turn->request.tool_choice == ENG_TOOL_REQUIRED)
        turn->request.tool_choice = ENG_TOOL_NAMED;
    return BASE_OK;
}

static base_code read_tool_choice(gw_turn *turn, base_err *err)
{
    const json_t *choice = json_object_get(turn->json, "tool_choice");
    bool parallel = true;
    TRY(gw_read_bool(&parallel, NULL, turn->json, "", "parallel_tool_calls", err));
    turn->request.call_max = parallel ? 0 : 1;
    if (!choice || json_is_null(choice)) {
        turn->request.tool_choice = turn->chat.tool_count ? ENG_TOOL_AUTO : ENG_TOOL_NONE;
        return BASE_OK;
    }
    if (json_is_string(choice))
        return read_mode(turn, json_string_value(choice), "tool_choice", err);
    if (!json_is_object(choice))
        return gw_wrong_type("", "tool_choice", "a string or an object", choice, err);
    const char *type = NULL, *name = NULL;
    TRY(gw_read_name(&type, choice, "tool_choice", "type", NAME_BYTES_MAX, err));
    if (type && strcmp(type, "allowed_tools") == 0)
        return read_allowed(turn, choice, err);
    if (type && strcmp(type, "function") != 0 && strcmp(type, "custom") != 0 &&
        strcmp(type, "tool") != 0)
        return read_mode(turn, type, "tool_choice.type", err);
    json_t *function;
    const char *member = type && strcmp(type, "custom") == 0 ? "custom" : "function";
    TRY(gw_read_object(&function, choice, "tool_choice", member, err));
    TRY(gw_read_name(&name, function ? function : choice,
                     function ? "tool_choice.function" : "tool_choice", "name", NAME_BYTES_MAX,
                     err));
    if (!name)
        return base_fail_param(err, BASE_INVALID, "tool_choice.function.name",
                               "tool_choice names no function");
    turn->request.tool_choice = ENG_TOOL_NAMED;
    return find_tool(turn, name, "tool_choice.function.name", err);
}

static base_code read_stops(gw_turn *turn, base_err *err)
{
    const json_t *stop = json_object_get(turn->json, "stop");
    if (!stop || json_is_null(stop))
        return BASE_OK;
    bool single = json_is_string(stop);
    if (!single && !json_is_array(stop))
        return gw_wrong_type("", "stop", "a string or an array of strings", stop, err);
    size_t count = single ? 1 : json_array_size(stop);
    if (count > STOPS_MAX)
        return base_fail_param(err, BASE_INVALID, "stop", "stop has %zu strings, the limit is %d",
                               count, STOPS_MAX);
    if (!count)
        return BASE_OK;
    eng_text *stops = base_arena_calloc(turn->arena, count, sizeof(*stops));
    if (!stops)
        return no_memory(err);
    for (size_t i = 0; i < count; i++) {
        const json_t *text = single ? stop : json_array_get(stop, i);
        char where[PATH_MAX_BYTES];
        name_path(where, single ? "stop" : "stop[%zu]", i);
        if (!json_is_string(text))
            return gw_wrong_type("", where, "a string", text, err);
        stops[i] = (eng_text){json_string_value(text), json_string_length(text)};
        if (!stops[i].length || stops[i].length > STOP_BYTES_MAX)
            return base_fail_param(err, BASE_INVALID, where, "%s must have 1 to %d bytes", where,
                                   STOP_BYTES_MAX);
    }
    turn->request.stops = stops;
    turn->request.stop_count = (uint32_t)count;
    return BASE_OK;
}

static base_code read_stop_tokens(gw_turn *turn, const json_t *object, uint32_t vocab,
                                  base_err *err)
{
    json_t *list;
    TRY(gw_read_array(&list, object, "", "stop_token_ids", err));
    size_t count = json_array_size(list);
    if (!count)
        return BASE_OK;
    if (count > STOP_TOKENS_MAX)
        return base_fail_param(err, BASE_INVALID, "stop_token_ids",
                               "stop_token_ids has %zu ids, the limit is %d", count,
                               STOP_TOKENS_MAX);
    int32_t *tokens = base_arena_calloc(turn->arena, count, sizeof(*tokens));
    if (!tokens)
        return no_memory(err);
    for (size_t i = 0; i < count; i++) {
        const json_t *id = json_array_get(list, i);
        char where[PATH_MAX_BYTES];
        name_path(where, "stop_token_ids[%zu]", i);
        if (!json_is_integer(id))
            return gw_wrong_type("", where, "an integer", id, err);
        if (json_integer_value(id) < 0 || json_integer_value(id) >= vocab)
            return base_fail_param(err, BASE_INVALID, where, "%s %lld is not a token id below %u",
                                   where, (long long)json_integer_value(id), vocab);
        tokens[i] = (int32_t)json_integer_value(id);
    }
    turn->request.sampling.stop_tokens = tokens;
    turn->request.sampling.stop_token_count = (uint32_t)count;
    return BASE_OK;
}

static base_code read_bias(gw_turn *turn, uint32_t vocab, base_err *err)
{
    json_t *map;
    TRY(gw_read_object(&map, turn->json, "", "logit_bias", err));
    size_t count = json_object_size(map);
    if (!count)
        return BASE_OK;
    if (count > BIAS_MAX)
        return base_fail_param(err, BASE_INVALID, "logit_bias",
                               "logit_bias has %zu entries, the limit is %d", count, BIAS_MAX);
    eng_bias *bias = base_arena_calloc(turn->arena, count, sizeof(*bias));
    if (!bias)
        return no_memory(err);
    size_t i = 0;
    const char *name;
    json_t *value;
    json_object_foreach(map, name, value)
    {
        size_t length = strnlen(name, 11);
        bool digits = length && length < 11;
        for (size_t k = 0; k < length; k++)
            digits &= isdigit((unsigned char)name[k]) != 0;
        unsigned long id = digits ? strtoul(name, NULL, 10) : vocab;
        if (id >= vocab)
            return base_fail_param(err, BASE_INVALID, "logit_bias",
                                   "logit_bias: '%.*s' is not a token id below %u",
                                   (int)base_utf8_complete(name, strnlen(name, 24)), name, vocab);
        char where[PATH_MAX_BYTES];
        name_path(where, "logit_bias.%lu", id);
        if (!json_is_number(value))
            return gw_wrong_type("logit_bias", name, "a number", value, err);
        double number = json_number_value(value);
        if (!(number >= -100 && number <= 100))
            return base_fail_param(err, BASE_INVALID, where, "%s %g is not in -100 to 100", where,
                                   number);
        bias[i++] = (eng_bias){(int32_t)id, (float)number};
    }
    turn->request.sampling.bias = bias;
    turn->request.sampling.bias_count = (uint32_t)count;
    return BASE_OK;
}

/* The object that holds an engine's own field: the body, or the `extra_body` that a client
 * forwarded as it stood. */
static const json_t *holder(const gw_turn *turn, const char *name)
{
    if (json_object_get(turn->json, name))
        return turn->json;
    const json_t *extra = json_object_get(turn->json, "extra_body");
    return json_object_get(extra, name) ? extra : turn->json;
}

base_code gw_chat_read_sampling(gw_turn *turn, base_err *err)
{
    const json_t *json = turn->json;
    eng_sampling *sampling = &turn->request.sampling;
    uint32_t vocab = eng_get_info(turn->app->engine)->vocab;
    TRY(gw_read_number(&sampling->temperature, NULL, json, "", "temperature", 0, 2, err));
    TRY(gw_read_number(&sampling->top_p, NULL, json, "", "top_p", 0, 1, err));
    TRY(gw_read_number(&sampling->presence_penalty, NULL, json, "", "presence_penalty", -2, 2,
                       err));
    TRY(gw_read_number(&sampling->frequency_penalty, NULL, json, "", "frequency_penalty", -2, 2,
                       err));
    TRY(gw_read_number(&sampling->min_p, NULL, holder(turn, "min_p"), "", "min_p", 0, 1, err));
    TRY(gw_read_number(&sampling->repetition_penalty, NULL, holder(turn, "repetition_penalty"), "",
                       "repetition_penalty", 0.01, 100, err));
    int64_t number = 0;
    TRY(gw_read_int(&number, NULL, holder(turn, "top_k"), "", "top_k", -1, INT32_MAX, err));
    sampling->top_k = number > 0 ? (uint32_t)number : 0; /* -1 is off, as in vLLM */
    if (sampling->top_p == 0) {
        /* No mass at all: the most probable token alone. */
        sampling->top_p = 1;
        sampling->top_k = 1;
    }
    number = 0;
    TRY(gw_read_int(&number, NULL, holder(turn, "min_tokens"), "", "min_tokens", 0, INT32_MAX,
                    err));
    sampling->min_tokens = (uint32_t)number;
    TRY(gw_read_bool(&sampling->ignore_eos, NULL, holder(turn, "ignore_eos"), "", "ignore_eos",
                     err));
    TRY(gw_read_int(&number, &turn->seeded, json, "", "seed", INT64_MIN, INT64_MAX, err));
    if (turn->seeded)
        sampling->seed = (uint64_t)number;
    TRY(read_stop_tokens(turn, holder(turn, "stop_token_ids"), vocab, err));
    TRY(read_bias(turn, vocab, err));
    return read_stops(turn, err);
}

static base_code read_logprobs(gw_turn *turn, base_err *err)
{
    const json_t *json = turn->json;
    eng_sampling *sampling = &turn->request.sampling;
    int64_t number = 0;
    TRY(gw_read_bool(&sampling->logprobs, NULL, json, "", "logprobs", err));
    TRY(gw_read_int(&number, NULL, json, "", "top_logprobs", 0, ENG_TOP_LOGPROBS_MAX, err));
    sampling->top_logprobs = sampling->logprobs ? (uint32_t)number : 0;
    return BASE_OK;
}

static base_code read_lengths(gw_turn *turn, base_err *err)
{
    int64_t number = 0;
    bool seen = false;
    TRY(gw_read_int(&number, &seen, turn->json, "", "max_completion_tokens", 1, INT64_MAX, err));
    if (!seen)
        TRY(gw_read_int(&number, &seen, turn->json, "", "max_tokens", 1, INT64_MAX, err));
    turn->request.max_tokens = seen ? (uint32_t)(number < UINT32_MAX ? number : UINT32_MAX) : 0;
    number = 1;
    TRY(gw_read_int(&number, NULL, turn->json, "", "n", 1, 128, err));
    /* One answer a request for now, whatever limits.n_max allows. */
    if (number > 1)
        return unsupported(err, "n", "n %lld exceeds the limit of 1", (long long)number);
    return BASE_OK;
}

static bool mode_of(eng_thinking *out, const char *text)
{
    if (strcmp(text, "enabled") == 0 || strcmp(text, "on") == 0)
        *out = ENG_THINK_ENABLED;
    else if (strcmp(text, "disabled") == 0 || strcmp(text, "off") == 0)
        *out = ENG_THINK_DISABLED;
    else if (strcmp(text, "adaptive") == 0 || strcmp(text, "auto") == 0)
        *out = ENG_THINK_ADAPTIVE;
    else
        return false;
    return true;
}

/* Thinking, the most explicit wish first: chat_template_kwargs.thinking_mode, its enable_thinking
 * or thinking, the body's thinking.type, enable_thinking, and at last reasoning_effort none or
 * minimal, which mean disabled. The other efforts keep the model's default mode and become its
 * effort line; an unknown effort is a hint that nobody understands and is ignored, as are unknown
 * modes, so that no client text lands in the system turn. */
static base_code read_thinking(gw_turn *turn, base_err *err)
{
    static const char *const levels[] = {"low", "medium", "high", "xhigh", "max"};
    const json_t *json = turn->json;
    const char *effort = NULL, *mode = NULL;
    json_t *kwargs, *thinking, *reasoning;
    eng_thinking *out = &turn->chat.thinking;
    bool flag = false, seen = false;
    TRY(gw_read_name(&effort, json, "", "reasoning_effort", NAME_BYTES_MAX, err));
    TRY(gw_read_object(&reasoning, json, "", "reasoning", err));
    if (!effort && reasoning)
        TRY(gw_read_name(&effort, reasoning, "reasoning", "effort", NAME_BYTES_MAX, err));
    TRY(gw_read_object(&kwargs, holder(turn, "chat_template_kwargs"), "", "chat_template_kwargs",
                       err));
    if (!effort && kwargs)
        TRY(gw_read_name(&effort, kwargs, "chat_template_kwargs", "reasoning_effort",
                         NAME_BYTES_MAX, err));
    if (effort) {
        if (strcmp(effort, "none") == 0 || strcmp(effort, "minimal") == 0)
            *out = ENG_THINK_DISABLED;
        for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++)
            if (strcmp(effort, levels[i]) == 0)
                turn->chat.effort = (eng_text){levels[i], strlen(levels[i])};
    }
    TRY(gw_read_bool(&flag, &seen, holder(turn, "enable_thinking"), "", "enable_thinking", err));
    if (seen)
        *out = flag ? ENG_THINK_ENABLED : ENG_THINK_DISABLED;
    const json_t *source = holder(turn, "thinking");
    if (json_is_boolean(json_object_get(source, "thinking"))) {
        *out = json_is_true(json_object_get(source, "thinking")) ? ENG_THINK_ENABLED
                                                                 : ENG_THINK_DISABLED;
    } else {
        TRY(gw_read_object(&thinking, source, "", "thinking", err));
        if (thinking)
            TRY(gw_read_name(&mode, thinking, "thinking", "type", NAME_BYTES_MAX, err));
        if (mode)
            mode_of(out, mode);
    }
    if (!kwargs)
        return BASE_OK;
    seen = false;
    TRY(gw_read_bool(&flag, &seen, kwargs, "chat_template_kwargs", "enable_thinking", err));
    if (!seen)
        TRY(gw_read_bool(&flag, &seen, kwargs, "chat_template_kwargs", "thinking", err));
    if (seen)
        *out = flag ? ENG_THINK_ENABLED : ENG_THINK_DISABLED;
    mode = NULL;
    TRY(gw_read_name(&mode, kwargs, "chat_template_kwargs", "thinking_mode", NAME_BYTES_MAX, err));
    if (mode)
        mode_of(out, mode);
    return BASE_OK;
}

static base_code read_metadata(gw_turn *turn, base_err *err)
{
    json_t *metadata;
    TRY(gw_read_object(&metadata, turn->json, "", "metadata", err));
    if (!metadata)
        return BASE_OK;
    if (json_object_size(metadata) > METADATA_MAX)
        return base_fail_param(err, BASE_INVALID, "metadata",
                               "metadata has %zu pairs, the limit is %d",
                               json_object_size(metadata), METADATA_MAX);
    const char *name;
    json_t *value;
    json_object_foreach(metadata, name, value)
    {
        if (strlen(name) > 4 * 64)
            return base_fail_param(err, BASE_INVALID, "metadata",
                                   "a name in metadata exceeds 64 characters");
        if (!json_is_string(value))
            return gw_wrong_type("", "metadata", "a map of strings", value, err);
        if (json_string_length(value) > 4 * 512)
            return base_fail_param(err, BASE_INVALID, "metadata",
                                   "a value in metadata exceeds 512 characters");
    }
    char *text = json_dumps(metadata, JSON_COMPACT);
    if (!text)
        return no_memory(err);
    turn->metadata = base_arena_copy(turn->arena, text, strlen(text));
    free(text);
    return turn->metadata ? BASE_OK : no_memory(err);
}

/* store: absent keeps the turn on disk for a while, as a cache; true keeps it; false keeps what was
 * said off the disk. */
static base_code read_retention(gw_turn *turn, base_err *err)
{
    bool store = false, seen = false;
    TRY(gw_read_bool(&store, &seen, turn->json, "", "store", err));
    if (seen)
        turn->retention = store ? GW_RETAIN_KEPT : GW_RETAIN_USAGE;
    return read_metadata(turn, err);
}

static base_code read_hints(gw_turn *turn, base_err *err)
{
    static const char *const strings[] = {
        "user",      "safety_identifier",      "service_tier",
        "verbosity", "prompt_cache_retention", "prompt_cache_key"};
    const json_t *json = turn->json;
    for (size_t i = 0; i < sizeof(strings) / sizeof(strings[0]); i++) {
        eng_text text = {0};
        TRY(gw_read_text(&text, json, "", strings[i], err));
    }
    json_t *object;
    TRY(gw_read_object(&object, json, "", "prediction", err));
    TRY(gw_read_object(&object, json, "", "prompt_cache_options", err));
    json_t *modalities;
    TRY(gw_read_array(&modalities, json, "", "modalities", err));
    for (size_t i = 0; i < json_array_size(modalities); i++) {
        const char *name = json_string_value(json_array_get(modalities, i));
        if (!name || strcmp(name, "text") != 0)
            return unsupported(err, "modalities", "modalities: this model writes text only");
    }
    json_t *format;
    TRY(gw_read_object(&format, json, "", "response_format", err));
    const char *type = NULL;
    if (format)
        TRY(gw_read_name(&type, format, "response_format", "type", NAME_BYTES_MAX, err));
    if (type && strcmp(type, "text") != 0)
        return unsupported(err, "response_format.type",
                           "response_format.type '%.*s' is not offered yet, only text is",
                           (int)base_utf8_complete(type, strnlen(type, 32)), type);
    const char *label = NULL;
    TRY(gw_read_name(&label, holder(turn, "session_id"), "", "session_id", NAME_BYTES_MAX, err));
    /* The body's name first, then the headers' (there already), then the cache key, which is as
     * good a guess. */
    if (label && label[0])
        turn->label = label;
    if (!turn->label) {
        TRY(gw_read_name(&label, json, "", "prompt_cache_key", NAME_BYTES_MAX, err));
        turn->label = label && label[0] ? label : NULL;
    }
    return gw_read_text(&turn->cache_salt, holder(turn, "cache_salt"), "", "cache_salt", err);
}

static base_code read_output(gw_turn *turn, base_err *err)
{
    chat *c = state(turn);
    const json_t *json = turn->json;
    TRY(gw_read_bool(&turn->stream, NULL, json, "", "stream", err));
    json_t *options;
    TRY(gw_read_object(&options, json, "", "stream_options", err));
    if (options) {
        TRY(gw_read_bool(&c->include_usage, NULL, options, "stream_options", "include_usage", err));
        TRY(gw_read_bool(&c->keepalive_chunk, NULL, options, "stream_options", "keepalive_chunk",
                         err));
    }
    TRY(gw_read_bool(&c->reasoning_too, NULL, holder(turn, "include_reasoning"), "",
                     "include_reasoning", err));
    TRY(gw_read_bool(&c->return_token_ids, NULL, holder(turn, "return_token_ids"), "",
                     "return_token_ids", err));
    c->logprobs = turn->request.sampling.logprobs;
    c->top_logprobs = turn->request.sampling.top_logprobs;
    turn->exact_steps = c->logprobs || c->return_token_ids;
    bool generation = true;
    TRY(gw_read_bool(&generation, NULL, holder(turn, "add_generation_prompt"), "",
                     "add_generation_prompt", err));
    bool resume = false;
    TRY(gw_read_bool(&resume, NULL, holder(turn, "continue_final_message"), "",
                     "continue_final_message", err));
    if (resume && turn->items[turn->chat.item_count - 1].role != ENG_ROLE_ASSISTANT)
        return base_fail_param(err, BASE_INVALID, "continue_final_message",
                               "continue_final_message needs a last message of role assistant");
    turn->chat.continue_last = resume;
    turn->chat.no_generation_prompt = !generation && !resume;
    return BASE_OK;
}

base_code gw_chat_parse(gw_turn *turn, base_err *err)
{
    chat *c = base_arena_calloc(turn->arena, 1, sizeof(*c));
    if (!c)
        return no_memory(err);
    turn->state_of_dialect = c;
    turn->response = gw_id_mint("chatcmpl-");
    /* Before gw_body_parse, which may rewrite numbers. */
    eng_text tools = {0}, raw;
    if (gw_body_member(&raw, turn->body, turn->body_length, "tools") && raw.length &&
        raw.data[0] == '[') {
        tools = (eng_text){base_arena_copy(turn->arena, raw.data, raw.length), raw.length};
        if (!tools.data)
            return no_memory(err);
    }
    TRY(gw_body_parse(&turn->json, turn->body, turn->body_length, err));
    TRY(gw_read_name(&turn->model, turn->json, "", "model", NAME_BYTES_MAX, err));
    if (!turn->model)
        return base_fail_param(err, BASE_INVALID, "model", "model must name the model to use");
    TRY(read_messages(turn, err));
    TRY(read_tools(turn, tools, err));
    TRY(read_tool_choice(turn, err));
    TRY(read_lengths(turn, err));
    TRY(gw_chat_read_sampling(turn, err));
    TRY(read_logprobs(turn, err));
    TRY(read_thinking(turn, err));
    TRY(read_retention(turn, err));
    TRY(read_hints(turn, err));
    return read_output(turn, err);
}

/* Arguments are rendered as parameters, so they must be an object; "" and null are the empty one. A
 * turn that the ledger gave tokens for is not rendered and may hold what it likes. */
base_code gw_chat_check(gw_turn *turn, base_err *err)
{
    for (uint32_t i = 0; i < turn->chat.item_count; i++) {
        const eng_item *item = &turn->items[i];
        for (uint32_t k = 0; !item->tokens && k < item->call_count; k++) {
            /* calls are const for the engine, but they are this turn's own array. */
            eng_text *arguments = &((eng_call *)item->calls)[k].arguments;
            base_json json;
            base_json_init(&json, arguments->data, arguments->length, BASE_JSON_DEPTH_MAX);
            base_json_kind first = base_json_next(&json), kind = first;
            if (arguments->length == 0 || strspn(arguments->data, " \t\r\n") >= arguments->length ||
                first == BASE_JSON_NULL) {
                *arguments = (eng_text){"{}", 2};
                continue;
            }
            while (kind != BASE_JSON_END && kind != BASE_JSON_ERROR)
                kind = base_json_next(&json);
            if (kind == BASE_JSON_END && first == BASE_JSON_OBJECT_BEGIN)
                continue;
            char param[PATH_MAX_BYTES];
            name_path(param, "messages[%u].tool_calls[%u].function.arguments", i, k);
            return base_fail_param(err, BASE_INVALID, param,
                                   "%s must be the JSON text of an object", param);
        }
    }
    return BASE_OK;
}

/* ---- writing ---- */

static void put_text(base_buf *out, const base_buf *text)
{
    base_buf_json_string(out, text->data ? text->data : "", text->length);
}

/* `"id":…,"object":…,"created":…,"model":…,"system_fingerprint":…` */
static void put_head(const gw_turn *turn, base_buf *out, const char *object)
{
    base_buf_printf(out, "\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":",
                    turn->response.text, object, (long long)(turn->created_ms / 1000));
    base_buf_json_string(out, turn->model, strlen(turn->model));
    base_buf_printf(out, ",\"service_tier\":\"default\",\"system_fingerprint\":\"fp_%.12s\"",
                    eng_get_info(turn->app->engine)->fingerprint);
}

static void put_ids(base_buf *out, const int32_t *tokens, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        base_buf_printf(out, "%s%d", i ? "," : "", tokens[i]);
}

/* Begins a record's choice after its delta, which the caller wrote last. Logprob entries and token
 * ids that no record has carried yet go with it, unless it is a call's or reasoning's record
 * (`with_entries` false). */
static void end_record(gw_turn *turn, bool with_entries, const char *finish)
{
    chat *c = state(turn);
    base_buf *out = &c->record;
    if (with_entries && c->entries.length) {
        base_buf_puts(out, ",\"logprobs\":{\"content\":[");
        base_buf_add(out, c->entries.data, c->entries.length);
        base_buf_puts(out, "],\"refusal\":null}");
        base_buf_clear(&c->entries);
    } else {
        base_buf_puts(out, ",\"logprobs\":null");
    }
    if (finish)
        base_buf_printf(out, ",\"finish_reason\":\"%s\"", finish);
    else
        base_buf_puts(out, ",\"finish_reason\":null");
    if (c->ids.length) {
        base_buf_puts(out, ",\"token_ids\":[");
        base_buf_add(out, c->ids.data, c->ids.length);
        base_buf_puts(out, "]");
        base_buf_clear(&c->ids);
    }
    base_buf_puts(out, "}]");
    if (c->include_usage)
        base_buf_puts(out, ",\"usage\":null");
    base_buf_puts(out, "}\n\n");
    turn->lossy |= out->failed;
    if (!out->failed)
        gw_turn_write(turn, out->data, out->length);
}

/* `data: {HEAD,"choices":[{"index":0,"delta":` and whatever stands before choices. */
static base_buf *begin_record(gw_turn *turn)
{
    chat *c = state(turn);
    base_buf_clear(&c->record);
    base_buf_puts(&c->record, "data: {");
    base_buf_add(&c->record, c->head.data, c->head.length);
    return &c->record;
}

static base_buf *begin_delta(gw_turn *turn)
{
    base_buf *out = begin_record(turn);
    base_buf_puts(out, ",\"choices\":[{\"index\":0,\"delta\":");
    return out;
}

static void open_stream(gw_turn *turn)
{
    chat *c = state(turn);
    gw_turn_stream_begin(turn);
    put_head(turn, &c->head, "chat.completion.chunk");
    base_buf *out = begin_record(turn);
    if (c->return_token_ids) {
        base_buf_puts(out, ",\"prompt_token_ids\":[");
        put_ids(out, turn->prompt.tokens, turn->prompt.token_count);
        base_buf_puts(out, "]");
    }
    base_buf_puts(out,
                  ",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}");
    end_record(turn, false, NULL);
}

/* ---- logprobs: which token stands for which text ----
 *
 * The list of the wire has one entry for every token of the content, so that its bytes joined are
 * the content. Tokens that are marks (end of thinking, end of turn, a call's block) or reasoning
 * have no place there. The engine tells tokens and texts apart, so they are put together here by
 * their bytes: a text takes the tokens at the front that spell it, and what it passes over were
 * marks. */

static void put_logprob(base_buf *out, float logprob)
{
    /* JSON has no infinity; the vendor writes -9999.0 for what is out of reach. */
    base_buf_printf(out, "%.6g", isfinite(logprob) ? (double)logprob : -9999.0);
}

/* `"token":…,"logprob":…,"bytes":[…]` */
static void put_token(base_buf *out, const char *bytes, size_t count, float logprob)
{
    base_buf_puts(out, "\"token\":");
    if (base_utf8_valid(bytes, count)) {
        base_buf_json_string(out, bytes, count);
    } else {
        /* Part of a character: `bytes` has the truth. */
        base_buf_puts(out, "\"" REPLACEMENT "\"");
    }
    base_buf_puts(out, ",\"logprob\":");
    put_logprob(out, logprob);
    base_buf_puts(out, ",\"bytes\":[");
    for (size_t i = 0; i < count; i++)
        base_buf_printf(out, "%s%u", i ? "," : "", (unsigned char)bytes[i]);
    base_buf_puts(out, "]");
}

static void wait_for_text(gw_turn *turn, const eng_logprob *logprob)
{
    chat *c = state(turn);
    const eng_engine *engine = turn->app->engine;
    if (c->waiting_count == c->waiting_capacity) {
        uint32_t capacity = c->waiting_capacity ? c->waiting_capacity * 2 : 64;
        waiting *more = realloc(c->waiting, capacity * sizeof(*more));
        if (!more) {
            turn->lossy = true;
            return;
        }
        c->waiting = more;
        c->waiting_capacity = capacity;
    }
    size_t bytes_before = c->waiting_bytes.length, json_before = c->waiting_json.length;
    if (eng_detokenize(engine, &c->waiting_bytes, &logprob->token, 1, NULL))
        return;
    base_buf *out = &c->waiting_json;
    base_buf_puts(out, "{");
    put_token(out, c->waiting_bytes.data ? c->waiting_bytes.data + bytes_before : "",
              c->waiting_bytes.length - bytes_before, logprob->logprob);
    base_buf_puts(out, ",\"top_logprobs\":[");
    uint32_t count = (uint32_t)base_min(logprob->top_count, c->top_logprobs);
    for (uint32_t i = 0; i < count; i++) {
        base_buf top;
        base_buf_init(&top, 0);
        eng_detokenize(engine, &top, &logprob->top_token[i], 1, NULL);
        base_buf_puts(out, i ? ",{" : "{");
        put_token(out, top.data ? top.data : "", top.length, logprob->top_logprob[i]);
        base_buf_puts(out, "}");
        base_buf_deinit(&top);
    }
    base_buf_puts(out, "]}");
    turn->lossy |= out->failed || c->waiting_bytes.failed;
    c->waiting[c->waiting_count++] = (waiting){(uint32_t)(c->waiting_bytes.length - bytes_before),
                                               (uint32_t)(out->length - json_before)};
}

/* Bytes of replacement characters at the front of `text` that stand for the `count` bytes of a
 * token which is not UTF-8. */
static size_t replaced(const char *text, size_t length, const char *bytes, size_t count)
{
    size_t used = 0;
    if (base_utf8_valid(bytes, count))
        return 0;
    for (size_t i = 0; i < count && used + 3 <= length && memcmp(text + used, REPLACEMENT, 3) == 0;
         i++)
        used += 3;
    return used;
}

/* Matches tokens with text; those of visible text become entries. */
static void match_tokens(chat *c, const char *text, size_t length, bool visible)
{
    base_buf_add(&c->unmatched, text, length);
    size_t bytes = 0, json = 0, used = 0;
    uint32_t taken = 0;
    while (taken < c->waiting_count && used < c->unmatched.length) {
        const waiting *front = &c->waiting[taken];
        size_t both = base_min(front->byte_count, c->unmatched.length - used);
        bool spells = front->byte_count &&
                      memcmp(c->waiting_bytes.data + bytes, c->unmatched.data + used, both) == 0;
        if (spells && both < front->byte_count)
            break; /* the rest of its text has not come yet */
        size_t taken_text = spells ? front->byte_count
                                   : replaced(c->unmatched.data + used, c->unmatched.length - used,
                                              c->waiting_bytes.data + bytes, front->byte_count);
        if (taken_text) {
            used += taken_text;
            if (visible) {
                base_buf_puts(&c->entries, c->entries.length ? "," : "");
                base_buf_add(&c->entries, c->waiting_json.data + json, front->json_count);
            }
        }
        bytes += front->byte_count;
        json += front->json_count;
        taken++;
    }
    /* Text never comes before its tokens: what no token spells now, none ever will. */
    base_buf_drop(&c->unmatched, taken == c->waiting_count ? c->unmatched.length : used);
    base_buf_drop(&c->waiting_bytes, bytes);
    base_buf_drop(&c->waiting_json, json);
    memmove(c->waiting, c->waiting + taken, (c->waiting_count - taken) * sizeof(*c->waiting));
    c->waiting_count -= taken;
}

static void forget_tokens(chat *c)
{
    base_buf_clear(&c->unmatched);
    base_buf_clear(&c->waiting_bytes);
    base_buf_clear(&c->waiting_json);
    c->waiting_count = 0;
}

static void step(gw_turn *turn, const eng_event *event)
{
    chat *c = state(turn);
    if (c->return_token_ids && turn->stream)
        for (uint32_t i = 0; i < event->token_count; i++)
            base_buf_printf(&c->ids, "%s%d", c->ids.length ? "," : "", event->tokens[i]);
    if (c->logprobs && event->logprobs)
        for (uint32_t i = 0; i < event->token_count; i++)
            wait_for_text(turn, &event->logprobs[i]);
}

static void part(gw_turn *turn, const eng_part *p)
{
    chat *c = state(turn);
    if (c->logprobs) {
        if (p->kind == ENG_PART_TEXT || p->kind == ENG_PART_REASONING)
            match_tokens(c, p->text, p->length, p->kind == ENG_PART_TEXT);
        else
            forget_tokens(c);
    }
    if (!turn->stream || !turn->exchange)
        return;
    base_buf *out;
    switch (p->kind) {
    case ENG_PART_REASONING:
        if (!p->length)
            return;
        out = begin_delta(turn);
        base_buf_puts(out, "{\"reasoning_content\":");
        base_buf_json_string(out, p->text, p->length);
        if (c->reasoning_too) {
            base_buf_puts(out, ",\"reasoning\":");
            base_buf_json_string(out, p->text, p->length);
        }
        base_buf_puts(out, "}");
        end_record(turn, false, NULL);
        return;
    case ENG_PART_TEXT:
        if (!p->length)
            return;
        out = begin_delta(turn);
        base_buf_puts(out, "{\"content\":");
        base_buf_json_string(out, p->text, p->length);
        base_buf_puts(out, "}");
        end_record(turn, true, NULL);
        return;
    case ENG_PART_CALL_BEGIN:
        out = begin_delta(turn);
        base_buf_printf(out,
                        "{\"tool_calls\":[{\"index\":%u,\"id\":\"%s\",\"type\":\"function\","
                        "\"function\":{\"name\":",
                        p->call, turn->calls[p->call].id.text);
        base_buf_json_string(out, p->text, p->length);
        base_buf_puts(out, ",\"arguments\":\"\"}}]}");
        end_record(turn, false, NULL);
        return;
    case ENG_PART_CALL_ARGS:
        if (!p->length)
            return;
        out = begin_delta(turn);
        base_buf_printf(out,
                        "{\"tool_calls\":[{\"index\":%u,\"function\":{\"arguments\":", p->call);
        base_buf_json_string(out, p->text, p->length);
        base_buf_puts(out, "}}]}");
        end_record(turn, false, NULL);
        return;
    case ENG_PART_CALL_END:
        return;
    }
}

static const char *finish_reason(const gw_turn *turn)
{
    /* With a whole call the reason is tool_calls even if a stop token or a forced choice ended the
     * turn: agents loop on it. */
    return turn->finish == ENG_FINISH_LENGTH ? "length"
           : turn->finish == ENG_FINISH_CALLS || (turn->call_count && turn->calls[0].whole)
               ? "tool_calls"
               : "stop";
}

void gw_chat_put_usage(const gw_turn *turn, base_buf *out)
{
    const eng_usage *usage = &turn->usage;
    base_buf_printf(
        out,
        "\"usage\":{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"total_tokens\":%llu,"
        "\"prompt_tokens_details\":{\"cached_tokens\":%u,\"cache_write_tokens\":%u,\"audio_"
        "tokens\":0},"
        "\"completion_tokens_details\":{\"reasoning_tokens\":%u,\"accepted_prediction_tokens\":0,"
        "\"rejected_prediction_tokens\":0,\"audio_tokens\":0},",
        usage->prompt_tokens, usage->output_tokens,
        (unsigned long long)usage->prompt_tokens + usage->output_tokens, usage->cached_tokens,
        usage->prompt_tokens - (uint32_t)base_min(usage->cached_tokens, usage->prompt_tokens),
        usage->reasoning_tokens);
    gw_turn_extension(turn, out);
    base_buf_puts(out, "}");
}

static void finish_stream(gw_turn *turn)
{
    chat *c = state(turn);
    base_buf *out = begin_delta(turn);
    base_buf_puts(out, "{}");
    end_record(turn, true, finish_reason(turn));
    if (c->include_usage) {
        out = begin_record(turn);
        base_buf_puts(out, ",\"choices\":[],");
        gw_chat_put_usage(turn, out);
        base_buf_puts(out, "}\n\n");
        if (!out->failed)
            gw_turn_write(turn, out->data, out->length);
    }
    static const char done[] = "data: [DONE]\n\n";
    gw_turn_write(turn, done, sizeof(done) - 1);
    gw_turn_stream_end(turn);
}

static void put_message(gw_turn *turn, base_buf *out)
{
    chat *c = state(turn);
    base_buf_puts(out, "\"message\":{\"role\":\"assistant\",\"content\":");
    if (turn->call_count && !turn->text.length)
        base_buf_puts(out, "null");
    else
        put_text(out, &turn->text);
    base_buf_puts(out, ",\"refusal\":null,\"annotations\":[]");
    if (turn->reasoning.length) {
        base_buf_puts(out, ",\"reasoning_content\":");
        put_text(out, &turn->reasoning);
        if (c->reasoning_too) {
            base_buf_puts(out, ",\"reasoning\":");
            put_text(out, &turn->reasoning);
        }
    }
    /* No key without calls: several clients test for its presence. */
    for (uint32_t i = 0; i < turn->call_count; i++) {
        const gw_turn_call *call = &turn->calls[i];
        base_buf_printf(out, "%s{\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":",
                        i ? "," : ",\"tool_calls\":[", call->id.text);
        put_text(out, &call->name);
        base_buf_puts(out, ",\"arguments\":");
        put_text(out, &call->arguments);
        base_buf_puts(out, "}}");
    }
    base_buf_puts(out, turn->call_count ? "]}" : "}");
}

static void finish_whole(gw_turn *turn)
{
    chat *c = state(turn);
    base_buf *out = &c->record;
    base_buf_clear(out);
    base_buf_puts(out, "{");
    put_head(turn, out, "chat.completion");
    if (c->return_token_ids) {
        base_buf_puts(out, ",\"prompt_token_ids\":[");
        put_ids(out, turn->prompt.tokens, turn->prompt.token_count);
        base_buf_puts(out, "]");
    }
    base_buf_printf(out, ",\"choices\":[{\"index\":0,\"finish_reason\":\"%s\",\"logprobs\":",
                    finish_reason(turn));
    if (c->logprobs) {
        base_buf_puts(out, "{\"content\":[");
        base_buf_add(out, c->entries.data ? c->entries.data : "", c->entries.length);
        base_buf_puts(out, "],\"refusal\":null},");
    } else {
        base_buf_puts(out, "null,");
    }
    put_message(turn, out);
    if (c->return_token_ids) {
        base_buf_puts(out, ",\"token_ids\":[");
        put_ids(out, turn->run + turn->lead, turn->run_count - turn->lead);
        base_buf_puts(out, "]");
    }
    base_buf_puts(out, "}],");
    gw_chat_put_usage(turn, out);
    base_buf_puts(out, "}");
    gw_turn_respond_json(turn, out);
}

static void finish(gw_turn *turn)
{
    if (turn->stream)
        finish_stream(turn);
    else
        finish_whole(turn);
}

static void fail(gw_turn *turn, const gw_error_row *row, const char *param, const char *message)
{
    if (!gw_turn_streaming(turn)) {
        gw_turn_respond_error(turn, row, param, message);
        return;
    }
    /* An error record and no finish_reason: half an answer must not look whole. */
    base_buf *out = &state(turn)->record;
    base_buf_clear(out);
    base_buf_puts(out, "data: ");
    gw_error_json(out, row->type, row->code, param, message);
    base_buf_puts(out, "\n\n");
    if (!out->failed)
        gw_turn_write(turn, out->data, out->length);
    gw_turn_stream_end(turn);
}

static void ping(gw_turn *turn)
{
    /* Comments reset the idle timers of sockets; some clients count parsed events only and may ask
     * for an empty delta. */
    if (state(turn)->keepalive_chunk) {
        base_buf *out = begin_delta(turn);
        base_buf_puts(out, "{}");
        end_record(turn, false, NULL);
        return;
    }
    static const char comment[] = ": ping\n\n";
    gw_turn_write(turn, comment, sizeof(comment) - 1);
}

void gw_chat_deinit(gw_turn *turn)
{
    chat *c = state(turn);
    base_buf *bufs[] = {&c->head,          &c->record,       &c->ids,      &c->entries,
                        &c->waiting_bytes, &c->waiting_json, &c->unmatched};
    for (size_t i = 0; i < sizeof(bufs) / sizeof(bufs[0]); i++)
        base_buf_deinit(bufs[i]);
    free(c->waiting);
}

static const gw_dialect dialect = {
    .name = "chat",
    .route = "/v1/chat/completions",
    .parse = gw_chat_parse,
    .check = gw_chat_check,
    .open = open_stream,
    .step = step,
    .part = part,
    .finish = finish,
    .fail = fail,
    .ping = ping,
    .deinit = gw_chat_deinit,
};

void gw_api_chat_handle(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &dialect);
}
