/* dialect: see the header. */
#include "gateway/dialect.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/slice.h"

#define STOPS_MAX 4 /* the vendor's limit */
#define STOP_BYTES_MAX 1024
#define STOP_TOKENS_MAX 256
#define BIAS_MAX 4096
#define METADATA_MAX 16
#define METADATA_NAME_BYTES (4 * 64) /* the vendor counts characters */
#define METADATA_VALUE_BYTES (4 * 512)

/* ---- errors and texts ---- */

base_code gw_no_memory(base_err *err)
{
    return base_fail(err, BASE_NOMEM, "no memory for the request");
}

base_code gw_unsupported(base_err *err, const char *param, const char *fmt, ...)
{
    char text[160];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    return base_fail_param(err, BASE_UNSUPPORTED, param, "%s", text);
}

void gw_name_path(char out[GW_PATH_BYTES], const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(out, GW_PATH_BYTES, fmt, args);
    va_end(args);
}

int gw_shown(const char *text, size_t max)
{
    return (int)base_utf8_complete(text, strnlen(text, max));
}

eng_text gw_text_of(const char *text)
{
    return (eng_text){text, text ? strlen(text) : 0};
}

eng_text gw_text_of_json(const json_t *text)
{
    return (eng_text){json_is_string(text) ? json_string_value(text) : "",
                      json_string_length(text)};
}

base_code gw_keep(gw_turn *turn, eng_text *out, base_buf *buf, base_err *err)
{
    char *text =
        buf->failed ? NULL : base_arena_copy(turn->arena, buf->data ? buf->data : "", buf->length);
    *out = (eng_text){text, buf->length};
    base_buf_deinit(buf);
    return text ? BASE_OK : gw_no_memory(err);
}

/* ---- the body ---- */

base_code gw_keep_raw(gw_turn *turn, eng_text *out, const char *name, base_err *err)
{
    eng_text raw;
    *out = (eng_text){"[]", 2};
    if (!gw_body_member(&raw, turn->body, turn->body_length, name) || !raw.length ||
        raw.data[0] != '[')
        return BASE_OK;
    *out = (eng_text){base_arena_copy(turn->arena, raw.data, raw.length), raw.length};
    return out->data ? BASE_OK : gw_no_memory(err);
}

base_code gw_parse_body(gw_turn *turn, base_err *err)
{
    GW_TRY(gw_slices_parse(gw_ledger_slices(turn->app->ledger), &turn->json, turn->body,
                           turn->body_length, turn->identity.tenant, err));
    GW_TRY(gw_read_name(&turn->model, turn->json, "", "model", GW_NAME_BYTES_MAX, err));
    if (!turn->model)
        return base_fail_param(err, BASE_INVALID, "model", "model must name the model to use");
    return BASE_OK;
}

void gw_raw_begin(base_json *array, eng_text raw)
{
    base_json_init(array, raw.data, raw.length, BASE_JSON_DEPTH_MAX);
    base_json_next(array);
}

eng_text gw_raw_next(base_json *array)
{
    base_json_kind kind = base_json_next(array);
    if (kind == BASE_JSON_OBJECT_BEGIN || kind == BASE_JSON_ARRAY_BEGIN)
        base_json_skip(array);
    return (eng_text){array->raw, array->raw_length};
}

const json_t *gw_holder(const gw_turn *turn, const char *name)
{
    if (json_object_get(turn->json, name))
        return turn->json;
    const json_t *extra = json_object_get(turn->json, "extra_body");
    return json_object_get(extra, name) ? extra : turn->json;
}

/* ---- items ---- */

static base_code read_part(eng_text *out, const json_t *part, const char *path, base_err *err)
{
    *out = (eng_text){0};
    if (json_is_string(part)) { /* a bare string in the list, which some clients send */
        *out = gw_text_of_json(part);
        return BASE_OK;
    }
    if (!json_is_object(part))
        return gw_wrong_type(path, "", "an object", part, err);
    const char *type = NULL;
    GW_TRY(gw_read_name(&type, part, path, "type", GW_NAME_BYTES_MAX, err));
    if (type && strcmp(type, "refusal") == 0)
        return gw_read_text(out, part, path, "refusal", err);
    if (!type || strstr(type, "text")) {
        GW_TRY(gw_read_text(out, part, path, "text", err));
        return out->data ? BASE_OK : gw_wrong_type(path, "text", "a string", NULL, err);
    }
    char param[GW_PATH_BYTES];
    gw_name_path(param, "%s.type", path);
    const char *kind = strstr(type, "image")   ? "image"
                       : strstr(type, "audio") ? "audio"
                       : strstr(type, "video") ? "video"
                       : strstr(type, "file")  ? "file"
                                               : NULL;
    if (kind)
        return gw_unsupported(err, param, "%s: this model reads text only, it takes no %s parts",
                              param, kind);
    return base_fail_param(err, BASE_INVALID, param, "%s '%.*s' is no kind of content", param,
                           gw_shown(type, 32), type);
}

base_code gw_read_content(gw_turn *turn, eng_text *out, const json_t *content, const char *path,
                          base_err *err)
{
    size_t count = json_array_size(content), total = 0;
    *out = (eng_text){"", 0};
    if (!content || json_is_null(content))
        return BASE_OK;
    if (json_is_string(content)) {
        *out = gw_text_of_json(content);
        return BASE_OK;
    }
    if (!json_is_array(content))
        return gw_wrong_type("", path, "a string or an array of parts", content, err);
    if (count == 1) { /* as it stands: what is known of it is known by its place */
        char where[GW_PATH_BYTES];
        gw_name_path(where, "%s[0]", path);
        GW_TRY(read_part(out, json_array_get(content, 0), where, err));
        if (!out->data)
            *out = (eng_text){"", 0};
        return BASE_OK;
    }
    for (int copy = 0; copy < 2; copy++) {
        char *to = copy ? base_arena_alloc(turn->arena, total + 1) : NULL;
        if (copy && !to)
            return gw_no_memory(err);
        if (copy)
            *out = (eng_text){to, total};
        for (size_t i = 0; i < count; i++) {
            char where[GW_PATH_BYTES];
            eng_text text;
            gw_name_path(where, "%s[%zu]", path, i);
            GW_TRY(read_part(&text, json_array_get(content, i), where, err));
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

base_code gw_custom_arguments(gw_turn *turn, eng_text *out, eng_text input, base_err *err)
{
    base_buf json;
    base_buf_init(&json, 0);
    base_buf_puts(&json, "{\"input\":");
    gw_put_string(&json, input.data, input.length);
    base_buf_puts(&json, "}");
    return gw_keep(turn, out, &json, err);
}

bool gw_bad_arguments(gw_turn *turn, uint32_t *item_index, uint32_t *call_index)
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
            *item_index = i;
            *call_index = k;
            return true;
        }
    }
    return false;
}

/* ---- tools ---- */

static bool good_tool_name(const char *name)
{
    size_t length = strlen(name);
    bool good = length > 0 && length <= GW_TOOL_NAME_MAX;
    for (size_t i = 0; good && i < length; i++)
        good = isalnum((unsigned char)name[i]) || strchr("_-.:", name[i]);
    return good;
}

/* Type "custom" is a function's kind where tools have no `inner`: there it says "not a server's".
 */
static bool is_function(const gw_tool_form *form, const json_t *tool)
{
    const char *type = json_string_value(json_object_get(tool, "type"));
    bool custom_too = strcmp(form->schema, "input_schema") == 0;
    return !type || strcmp(type, "function") == 0 || (custom_too && strcmp(type, "custom") == 0);
}

static bool is_custom(const gw_tool_form *form, const json_t *tool)
{
    const char *type = json_string_value(json_object_get(tool, "type"));
    return form->custom && type && strcmp(type, "custom") == 0;
}

static base_code check_name(const char *name, const char *where, base_err *err)
{
    char param[GW_PATH_BYTES + 8];
    if (!name)
        return gw_wrong_type(where, "name", "a string", NULL, err);
    if (good_tool_name(name))
        return BASE_OK;
    snprintf(param, sizeof param, "%s.name", where);
    return base_fail_param(err, BASE_INVALID, param,
                           "%s must have 1 to %d letters, digits, '_', '-', '.' or ':'", param,
                           GW_TOOL_NAME_MAX);
}

/* What a custom tool's input must look like: text, or a grammar of a regular expression or in
 * GBNF. One in lark, which cannot be held to, is refused or, where tools may be left out, told to
 * the model (`*told`). */
static base_code read_input_format(eng_format *out, const char **told, const gw_tool_form *form,
                                   const json_t *tool, const char *path, base_err *err)
{
    json_t *format, *inner;
    const char *type = NULL, *syntax = NULL;
    char where[GW_PATH_BYTES], at[GW_PATH_BYTES];
    *out = (eng_format){.kind = ENG_FORMAT_TEXT};
    GW_TRY(gw_read_object(&format, tool, path, "format", err));
    if (!format)
        return BASE_OK;
    gw_name_path(where, "%s.format", path);
    GW_TRY(gw_read_name(&type, format, where, "type", GW_NAME_BYTES_MAX, err));
    if (!type || strcmp(type, "text") == 0)
        return BASE_OK;
    if (strcmp(type, "grammar") != 0) {
        gw_name_path(at, "%s.type", where);
        return gw_unsupported(err, at, "%s '%.*s' is none of text, grammar", at, gw_shown(type, 32),
                              type);
    }
    GW_TRY(gw_read_object(&inner, format, where, "grammar", err));
    if (inner)
        gw_name_path(where, "%s.format.grammar", path);
    const json_t *grammar = inner ? inner : format;
    GW_TRY(gw_read_name(&syntax, grammar, where, "syntax", GW_NAME_BYTES_MAX, err));
    GW_TRY(gw_read_text(&out->text, grammar, where, "definition", err));
    if (!out->text.length)
        return gw_wrong_type(where, "definition", "a string", NULL, err);
    if (syntax && strcmp(syntax, "regex") == 0)
        out->kind = ENG_FORMAT_REGEX;
    else if (syntax && strcmp(syntax, "gbnf") == 0)
        out->kind = ENG_FORMAT_GBNF;
    else if (syntax && strcmp(syntax, "lark") == 0 && !form->strict)
        *told = "lark";
    else {
        gw_name_path(at, "%s.syntax", where);
        return gw_unsupported(err, at, "%s '%.*s' is none of regex, gbnf", at,
                              gw_shown(syntax ? syntax : "", 32), syntax ? syntax : "");
    }
    return BASE_OK;
}

static base_code read_custom(gw_turn *turn, eng_text *out, eng_format *input,
                             const gw_tool_form *form, const json_t *tool, const char *path,
                             base_err *err)
{
    const char *name = NULL, *told = NULL;
    eng_text description = {0};
    char where[GW_PATH_BYTES];
    json_t *inner = NULL;
    if (form->inner)
        GW_TRY(gw_read_object(&inner, tool, path, "custom", err));
    if (form->inner && !inner)
        return gw_wrong_type(path, "custom", "an object", NULL, err);
    gw_name_path(where, inner ? "%s.custom" : "%s", path);
    tool = inner ? inner : tool;
    GW_TRY(gw_read_name(&name, tool, where, "name", GW_NAME_BYTES_MAX, err));
    GW_TRY(check_name(name, where, err));
    GW_TRY(gw_read_text(&description, tool, where, "description", err));
    GW_TRY(read_input_format(input, &told, form, tool, where, err));
    base_buf json;
    base_buf_init(&json, 0);
    gw_put_custom(&json, gw_text_of(name), description, told, input->text);
    return gw_keep(turn, out, &json, err);
}

static base_code read_tool(gw_turn *turn, eng_text *out, const gw_tool_form *form,
                           const json_t *tool, eng_text raw, const char *path, base_err *err)
{
    const char *const parts[][2] = {
        {"name", "name"}, {"description", "description"}, {form->schema, "parameters"}};
    const char *name = NULL;
    eng_text description = {0};
    json_t *schema, *inner;
    char where[GW_PATH_BYTES];
    gw_name_path(where, "%s", path);
    if (form->inner) {
        GW_TRY(gw_read_object(&inner, tool, path, form->inner, err));
        if (!inner)
            return gw_wrong_type(path, form->inner, "an object", NULL, err);
        tool = inner;
        gw_name_path(where, "%s.%s", path, form->inner);
    }
    GW_TRY(gw_read_name(&name, tool, where, "name", GW_NAME_BYTES_MAX, err));
    GW_TRY(check_name(name, where, err));
    GW_TRY(gw_read_text(&description, tool, where, "description", err));
    GW_TRY(gw_read_object(&schema, tool, where, form->schema, err));
    if (form->inner)
        return gw_body_member(out, raw.data, raw.length, form->inner)
                   ? BASE_OK
                   : base_fail_param(err, BASE_INVALID, path, "%s is not well formed", path);
    base_buf json;
    base_buf_init(&json, 0);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        eng_text part;
        if (!gw_body_member(&part, raw.data, raw.length, parts[i][0]) ||
            (part.length == 4 && memcmp(part.data, "null", 4) == 0))
            continue;
        base_buf_printf(&json, "%s\"%s\":", json.length ? "," : "{", parts[i][1]);
        base_buf_add(&json, part.data, part.length);
    }
    base_buf_puts(&json, "}");
    return gw_keep(turn, out, &json, err);
}

base_code gw_read_tools(gw_turn *turn, const gw_tool_form *form, eng_text raw, base_err *err)
{
    json_t *tools;
    GW_TRY(gw_read_array(&tools, turn->json, "", "tools", err));
    size_t count = json_array_size(tools);
    if (!count)
        return BASE_OK;
    eng_text *texts = base_arena_calloc(turn->arena, count, sizeof(*texts));
    bool *strict = base_arena_calloc(turn->arena, count, sizeof(*strict));
    eng_format *inputs = base_arena_calloc(turn->arena, count, sizeof(*inputs));
    if (!texts || !strict || !inputs)
        return gw_no_memory(err);
    turn->output.strict = strict;
    base_json array;
    gw_raw_begin(&array, raw);
    for (size_t i = 0; i < count; i++) {
        const json_t *tool = json_array_get(tools, i);
        eng_text one = gw_raw_next(&array);
        const char *type = NULL;
        char path[GW_PATH_BYTES], where[GW_PATH_BYTES];
        gw_name_path(path, "tools[%zu]", i);
        if (!json_is_object(tool))
            return gw_wrong_type(path, "", "an object", tool, err);
        GW_TRY(gw_read_name(&type, tool, path, "type", GW_NAME_BYTES_MAX, err));
        if (is_custom(form, tool)) {
            uint32_t nth = turn->chat.tool_count++;
            GW_TRY(read_custom(turn, &texts[nth], &inputs[nth], form, tool, path, err));
            turn->custom_tools = tools;
            turn->output.inputs = inputs;
            continue;
        }
        if (!is_function(form, tool)) {
            if (!form->strict)
                continue; /* run by the vendor's servers; clients offer them unasked */
            gw_name_path(where, "%s.type", path);
            return gw_unsupported(err, where, "%s '%.*s' is not offered, only function tools are",
                                  where, gw_shown(type, 32), type);
        }
        GW_TRY(read_tool(turn, &texts[turn->chat.tool_count], form, tool, one, path, err));
        const json_t *function = form->inner ? json_object_get(tool, form->inner) : tool;
        strict[turn->chat.tool_count++] = json_is_true(json_object_get(function, "strict"));
    }
    turn->chat.tools = texts;
    return BASE_OK;
}

/* It stands in the prompt. */
static bool is_offered(const gw_tool_form *form, const json_t *tool)
{
    return is_function(form, tool) || is_custom(form, tool);
}

static const char *tool_name(const gw_tool_form *form, const json_t *tool)
{
    const char *member = is_custom(form, tool) ? "custom" : form->inner;
    const json_t *inner = form->inner ? json_object_get(tool, member) : NULL;
    return json_string_value(json_object_get(inner ? inner : tool, "name"));
}

base_code gw_find_tool(gw_turn *turn, const gw_tool_form *form, const char *name, const char *param,
                       base_err *err)
{
    const json_t *tools = json_object_get(turn->json, "tools");
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i);
        const char *have = is_offered(form, tool) ? tool_name(form, tool) : NULL;
        if (have && strcmp(have, name) == 0) {
            turn->request.tool_name = gw_text_of(have);
            return BASE_OK;
        }
    }
    return base_fail_param(err, BASE_INVALID, param,
                           "%s names '%.*s', which is not among the tools", param,
                           gw_shown(name, 64), name);
}

base_code gw_read_tool_mode(gw_turn *turn, const char *mode, const char *param, base_err *err)
{
    eng_tool_choice *choice = &turn->request.tool_choice;
    if (strcmp(mode, "none") == 0)
        *choice = ENG_TOOL_NONE;
    else if (strcmp(mode, "auto") == 0)
        *choice = turn->chat.tool_count ? ENG_TOOL_AUTO : ENG_TOOL_NONE;
    else if (strcmp(mode, "required") == 0 || strcmp(mode, "any") == 0)
        *choice = ENG_TOOL_REQUIRED;
    else
        return base_fail_param(err, BASE_INVALID, param,
                               "%s '%.*s' is not one of none, auto, required", param,
                               gw_shown(mode, 32), mode);
    if (*choice == ENG_TOOL_REQUIRED && !turn->chat.tool_count)
        return base_fail_param(err, BASE_INVALID, param,
                               "%s asks for a call, but there are no tools", param);
    return BASE_OK;
}

/* The tools of that name may be called. */
static void allow_tool(gw_turn *turn, const gw_tool_form *form, bool *allowed, const char *name)
{
    const json_t *tools = json_object_get(turn->json, "tools");
    uint32_t at = 0;
    for (size_t i = 0; i < json_array_size(tools) && at < turn->chat.tool_count; i++) {
        const json_t *tool = json_array_get(tools, i);
        if (!is_offered(form, tool))
            continue;
        const char *have = tool_name(form, tool);
        allowed[at] = allowed[at] || (have && strcmp(have, name) == 0);
        at++;
    }
}

base_code gw_read_allowed_tools(gw_turn *turn, const gw_tool_form *form, const json_t *choice,
                                base_err *err)
{
    json_t *allowed, *list;
    GW_TRY(gw_read_object(&allowed, choice, "tool_choice", "allowed_tools", err));
    const json_t *body = allowed ? allowed : choice;
    const char *path = allowed ? "tool_choice.allowed_tools" : "tool_choice", *mode = NULL;
    GW_TRY(gw_read_name(&mode, body, path, "mode", GW_NAME_BYTES_MAX, err));
    GW_TRY(gw_read_array(&list, body, path, "tools", err));
    GW_TRY(gw_read_tool_mode(turn, mode ? mode : "auto", "tool_choice", err));
    bool single = json_array_size(list) == 1 && turn->request.tool_choice == ENG_TOOL_REQUIRED;
    bool *marks = base_arena_calloc(turn->arena, turn->chat.tool_count + 1, sizeof(*marks));
    if (!marks)
        return gw_no_memory(err);
    turn->output.allowed = marks;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = tool_name(form, json_array_get(list, i));
        if (!name && form->strict)
            return base_fail_param(err, BASE_INVALID, "tool_choice",
                                   "tool_choice: allowed tool %zu has no name", i);
        /* Where hosted tools may be named, a list of several may hold some. */
        if (name && (form->strict || single))
            GW_TRY(gw_find_tool(turn, form, name, "tool_choice", err));
        if (name)
            allow_tool(turn, form, marks, name);
    }
    if (single && turn->request.tool_name.data)
        turn->request.tool_choice = ENG_TOOL_NAMED;
    return BASE_OK;
}

base_code gw_read_tool_choice(gw_turn *turn, const gw_tool_form *form, base_err *err)
{
    const json_t *choice = json_object_get(turn->json, "tool_choice");
    bool parallel = true;
    GW_TRY(gw_read_bool(&parallel, NULL, turn->json, "", "parallel_tool_calls", err));
    turn->request.call_max = parallel ? 0 : 1;
    if (!choice || json_is_null(choice))
        return gw_read_tool_mode(turn, "auto", "tool_choice", err);
    if (json_is_string(choice))
        return gw_read_tool_mode(turn, json_string_value(choice), "tool_choice", err);
    if (!json_is_object(choice))
        return gw_wrong_type("", "tool_choice", "a string or an object", choice, err);
    const char *type = NULL, *name = NULL;
    GW_TRY(gw_read_name(&type, choice, "tool_choice", "type", GW_NAME_BYTES_MAX, err));
    if (type && strcmp(type, "allowed_tools") == 0)
        return gw_read_allowed_tools(turn, form, choice, err);
    bool names = !type || strcmp(type, "function") == 0 || strcmp(type, "custom") == 0 ||
                 strcmp(type, "tool") == 0;
    if (!names && form->strict)
        return gw_read_tool_mode(turn, type, "tool_choice.type", err);
    const char *member = type && strcmp(type, "custom") == 0 ? "custom" : "function";
    char path[GW_PATH_BYTES], param[GW_PATH_BYTES];
    json_t *inner = NULL;
    if (form->inner)
        GW_TRY(gw_read_object(&inner, choice, "tool_choice", member, err));
    gw_name_path(path, inner ? "tool_choice.%s" : "tool_choice", member);
    GW_TRY(gw_read_name(&name, inner ? inner : choice, path, "name", GW_NAME_BYTES_MAX, err));
    if (!name && !form->strict)
        return gw_read_tool_mode(turn, "auto", "tool_choice", err);
    gw_name_path(param, form->inner ? "tool_choice.%s.name" : "tool_choice", member);
    if (!name)
        return base_fail_param(err, BASE_INVALID, param, "tool_choice names no %s", member);
    turn->request.tool_choice = ENG_TOOL_NAMED;
    return gw_find_tool(turn, form, name, param, err);
}

/* ---- the other fields ---- */

base_code gw_read_stops(gw_turn *turn, const char *name, uint32_t max, base_err *err)
{
    const json_t *stop = json_object_get(turn->json, name);
    if (!stop || json_is_null(stop))
        return BASE_OK;
    bool single = json_is_string(stop);
    if (!single && !json_is_array(stop))
        return gw_wrong_type("", name, "a string or an array of strings", stop, err);
    size_t count = single ? 1 : json_array_size(stop);
    if (count > max)
        return base_fail_param(err, BASE_INVALID, name, "%s has %zu strings, the limit is %u", name,
                               count, max);
    if (!count)
        return BASE_OK;
    eng_text *stops = base_arena_calloc(turn->arena, count, sizeof(*stops));
    if (!stops)
        return gw_no_memory(err);
    for (size_t i = 0; i < count; i++) {
        const json_t *text = single ? stop : json_array_get(stop, i);
        char where[GW_PATH_BYTES];
        gw_name_path(where, single ? "%s" : "%s[%zu]", name, i);
        if (!json_is_string(text))
            return gw_wrong_type("", where, "a string", text, err);
        stops[i] = gw_text_of_json(text);
        if (!stops[i].length || stops[i].length > STOP_BYTES_MAX)
            return base_fail_param(err, BASE_INVALID, where, "%s must have 1 to %d bytes", where,
                                   STOP_BYTES_MAX);
    }
    turn->request.stops = stops;
    turn->request.stop_count = (uint32_t)count;
    return BASE_OK;
}

base_code gw_read_tokens(gw_turn *turn, int32_t **out, uint32_t *count, const json_t *list,
                         const char *name, base_err *err)
{
    uint32_t vocab = eng_get_info(turn->app->engine)->vocab;
    size_t size = json_array_size(list);
    int32_t *tokens = base_arena_calloc(turn->arena, base_max(size, 1), sizeof(*tokens));
    if (!tokens)
        return gw_no_memory(err);
    for (size_t i = 0; i < size; i++) {
        const json_t *id = json_array_get(list, i);
        char where[GW_PATH_BYTES];
        gw_name_path(where, "%s[%zu]", name, i);
        if (!json_is_integer(id))
            return gw_wrong_type("", where, "an integer", id, err);
        if (json_integer_value(id) < 0 || json_integer_value(id) >= vocab)
            return base_fail_param(err, BASE_INVALID, where, "%s %lld is not a token id below %u",
                                   where, (long long)json_integer_value(id), vocab);
        tokens[i] = (int32_t)json_integer_value(id);
    }
    *out = tokens;
    *count = (uint32_t)size;
    return BASE_OK;
}

static base_code read_stop_tokens(gw_turn *turn, base_err *err)
{
    static const char name[] = "stop_token_ids";
    json_t *list;
    int32_t *tokens;
    GW_TRY(gw_read_array(&list, gw_holder(turn, name), "", name, err));
    size_t count = json_array_size(list);
    if (!count)
        return BASE_OK;
    if (count > STOP_TOKENS_MAX)
        return base_fail_param(err, BASE_INVALID, name, "%s has %zu ids, the limit is %d", name,
                               count, STOP_TOKENS_MAX);
    GW_TRY(
        gw_read_tokens(turn, &tokens, &turn->request.sampling.stop_token_count, list, name, err));
    turn->request.sampling.stop_tokens = tokens;
    return BASE_OK;
}

static base_code read_bias(gw_turn *turn, base_err *err)
{
    uint32_t vocab = eng_get_info(turn->app->engine)->vocab;
    json_t *map;
    GW_TRY(gw_read_object(&map, turn->json, "", "logit_bias", err));
    size_t count = json_object_size(map);
    if (!count)
        return BASE_OK;
    if (count > BIAS_MAX)
        return base_fail_param(err, BASE_INVALID, "logit_bias",
                               "logit_bias has %zu entries, the limit is %d", count, BIAS_MAX);
    eng_bias *bias = base_arena_calloc(turn->arena, count, sizeof(*bias));
    if (!bias)
        return gw_no_memory(err);
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
                                   gw_shown(name, 24), name, vocab);
        char where[GW_PATH_BYTES];
        gw_name_path(where, "logit_bias.%lu", id);
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

base_code gw_read_sampling_basic(gw_turn *turn, base_err *err)
{
    const json_t *json = turn->json;
    eng_sampling *sampling = &turn->request.sampling;
    int64_t number = 0;
    GW_TRY(gw_read_number(&sampling->temperature, NULL, json, "", "temperature", 0, 2, err));
    GW_TRY(gw_read_number(&sampling->top_p, NULL, json, "", "top_p", 0, 1, err));
    GW_TRY(gw_read_int(&number, NULL, gw_holder(turn, "top_k"), "", "top_k", -1, INT32_MAX, err));
    sampling->top_k = number > 0 ? (uint32_t)number : 0; /* -1 is off, as in vLLM */
    if (sampling->top_p == 0) {
        /* No mass at all: the most probable token alone. */
        sampling->top_p = 1;
        sampling->top_k = 1;
    }
    GW_TRY(gw_read_int(&number, &turn->seeded, json, "", "seed", INT64_MIN, INT64_MAX, err));
    if (turn->seeded)
        sampling->seed = (uint64_t)number;
    return BASE_OK;
}

base_code gw_read_sampling(gw_turn *turn, base_err *err)
{
    const json_t *json = turn->json;
    eng_sampling *sampling = &turn->request.sampling;
    int64_t number = 0;
    GW_TRY(gw_read_sampling_basic(turn, err));
    GW_TRY(gw_read_number(&sampling->presence_penalty, NULL, json, "", "presence_penalty", -2, 2,
                          err));
    GW_TRY(gw_read_number(&sampling->frequency_penalty, NULL, json, "", "frequency_penalty", -2, 2,
                          err));
    GW_TRY(
        gw_read_number(&sampling->min_p, NULL, gw_holder(turn, "min_p"), "", "min_p", 0, 1, err));
    GW_TRY(gw_read_number(&sampling->repetition_penalty, NULL,
                          gw_holder(turn, "repetition_penalty"), "", "repetition_penalty", 0.01,
                          100, err));
    GW_TRY(gw_read_int(&number, NULL, gw_holder(turn, "min_tokens"), "", "min_tokens", 0, INT32_MAX,
                       err));
    sampling->min_tokens = (uint32_t)number;
    GW_TRY(gw_read_bool(&sampling->ignore_eos, NULL, gw_holder(turn, "ignore_eos"), "",
                        "ignore_eos", err));
    GW_TRY(gw_read_bool(&turn->shows_stop, NULL, gw_holder(turn, "include_stop_str_in_output"), "",
                        "include_stop_str_in_output", err));
    GW_TRY(read_stop_tokens(turn, err));
    GW_TRY(read_bias(turn, err));
    return gw_read_stops(turn, "stop", STOPS_MAX, err);
}

base_code gw_read_limit(gw_turn *turn, const char *name, bool *seen, base_err *err)
{
    int64_t number = turn->request.max_tokens;
    GW_TRY(gw_read_int(&number, seen, turn->json, "", name, 1, INT64_MAX, err));
    turn->request.max_tokens = (uint32_t)base_min(number, (int64_t)UINT32_MAX);
    return BASE_OK;
}

void gw_set_effort(gw_turn *turn, const char *effort)
{
    static const char *const levels[] = {"low", "medium", "high", "xhigh", "max"};
    for (size_t i = 0; effort && i < sizeof(levels) / sizeof(levels[0]); i++)
        if (strcmp(effort, levels[i]) == 0)
            turn->chat.effort = gw_text_of(levels[i]);
}

void gw_set_effort_or_none(gw_turn *turn, const char *effort)
{
    bool none = effort && (strcmp(effort, "none") == 0 || strcmp(effort, "minimal") == 0);
    gw_set_effort(turn, effort);
    if (none)
        turn->chat.thinking = ENG_THINK_DISABLED;
    else if (turn->chat.effort.length &&
             eng_get_info(turn->app->engine)->thinking == ENG_THINK_DISABLED)
        turn->chat.thinking = ENG_THINK_ENABLED;
}

base_code gw_read_metadata(gw_turn *turn, base_err *err)
{
    json_t *metadata;
    GW_TRY(gw_read_object(&metadata, turn->json, "", "metadata", err));
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
        if (strlen(name) > METADATA_NAME_BYTES)
            return base_fail_param(err, BASE_INVALID, "metadata",
                                   "a name in metadata exceeds 64 characters");
        if (!json_is_string(value))
            return gw_wrong_type("", "metadata", "a map of strings", value, err);
        if (json_string_length(value) > METADATA_VALUE_BYTES)
            return base_fail_param(err, BASE_INVALID, "metadata",
                                   "a value in metadata exceeds 512 characters");
    }
    char *text = json_dumps(metadata, JSON_COMPACT);
    if (text)
        turn->metadata = base_arena_copy(turn->arena, text, strlen(text));
    free(text);
    return turn->metadata ? BASE_OK : gw_no_memory(err);
}

base_code gw_read_label(gw_turn *turn, base_err *err)
{
    const char *label = NULL;
    GW_TRY(gw_read_name(&label, gw_holder(turn, "session_id"), "", "session_id", GW_NAME_BYTES_MAX,
                        err));
    if (label && label[0])
        turn->label = label;
    if (!turn->label) {
        GW_TRY(gw_read_name(&label, turn->json, "", "prompt_cache_key", GW_NAME_BYTES_MAX, err));
        turn->label = label && label[0] ? label : NULL;
    }
    return gw_read_text(&turn->cache_salt, gw_holder(turn, "cache_salt"), "", "cache_salt", err);
}

base_code gw_read_prediction(gw_turn *turn, base_err *err)
{
    json_t *prediction;
    const char *type = NULL;
    eng_text text;
    int32_t *tokens;
    GW_TRY(gw_read_object(&prediction, turn->json, "", "prediction", err));
    if (!prediction)
        return BASE_OK;
    GW_TRY(gw_read_name(&type, prediction, "prediction", "type", GW_NAME_BYTES_MAX, err));
    if (type && strcmp(type, "content") != 0)
        return gw_unsupported(err, "prediction.type", "prediction.type '%.*s' is not content",
                              gw_shown(type, 32), type);
    GW_TRY(gw_read_content(turn, &text, json_object_get(prediction, "content"),
                           "prediction.content", err));
    if (turn->dialect->dry || !text.length)
        return BASE_OK;
    base_code code = eng_tokenize(turn->app->engine, &tokens, &turn->request.prediction_count, text,
                                  false, ENG_PREDICTION_MAX, turn->arena, err);
    if (code == BASE_TOO_LONG)
        return base_fail_param(err, BASE_INVALID, "prediction.content",
                               "prediction.content has more than %u tokens", ENG_PREDICTION_MAX);
    turn->request.prediction = tokens;
    return code;
}

base_code gw_read_hints(gw_turn *turn, const char *const *names, size_t count, base_err *err)
{
    for (size_t i = 0; i < count; i++) {
        eng_text text = {0};
        GW_TRY(gw_read_text(&text, turn->json, "", names[i], err));
    }
    return BASE_OK;
}

/* ---- writing ---- */

void gw_put_string(base_buf *out, const char *data, size_t length)
{
    base_buf_json_string(out, data ? data : "", length);
}

void gw_put_text(base_buf *out, const base_buf *text)
{
    gw_put_string(out, text->data, text->length);
}

void gw_put_ids(base_buf *out, const int32_t *tokens, uint32_t count)
{
    base_buf_puts(out, "[");
    for (uint32_t i = 0; i < count; i++)
        base_buf_printf(out, "%s%d", i ? "," : "", tokens[i]);
    base_buf_puts(out, "]");
}

void gw_put_head(const gw_turn *turn, base_buf *out, const char *object)
{
    base_buf_printf(out, "\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":",
                    turn->response.text, object, (long long)(turn->created_ms / 1000));
    gw_put_string(out, turn->model, strlen(turn->model));
    base_buf_printf(out, ",\"system_fingerprint\":\"fp_%.12s\"",
                    eng_get_info(turn->app->engine)->fingerprint);
}

double gw_shown_logprob(float logprob)
{
    return isfinite(logprob) ? (double)logprob : -9999.0;
}

void gw_put_call_body(base_buf *out, const gw_turn_call *call)
{
    const char *kind = call->custom ? "custom" : "function";
    base_buf_printf(out, ",\"type\":\"%s\",\"%s\":{\"name\":", kind, kind);
    gw_put_text(out, &call->name);
    base_buf_puts(out, call->custom ? ",\"input\":" : ",\"arguments\":");
    gw_put_text(out, gw_call_shown(call));
    base_buf_puts(out, "}");
}

void gw_put_calls(base_buf *out, const gw_turn *turn)
{
    for (uint32_t i = 0; i < turn->call_count; i++) {
        base_buf_printf(out, "%s{\"id\":\"%s\"", i ? "," : ",\"tool_calls\":[",
                        turn->calls[i].id.text);
        gw_put_call_body(out, &turn->calls[i]);
        base_buf_puts(out, "}");
    }
    base_buf_puts(out, turn->call_count ? "]" : "");
}

void gw_put_made_call(base_buf *out, const json_t *made, const json_t *tools)
{
    const json_t *function = json_object_get(made, "function");
    eng_text id = gw_text_of_json(json_object_get(made, "id"));
    eng_text name = gw_text_of_json(json_object_get(function, "name"));
    eng_text arguments = gw_text_of_json(json_object_get(function, "arguments"));
    gw_turn_call one = {0};
    const char *type = json_string_value(json_object_get(made, "type"));
    base_buf_add(&one.name, name.data, name.length);
    one.custom = type && strcmp(type, "custom") == 0;
    gw_call_named(&one, tools);
    gw_call_add(&one, arguments.data, arguments.length);
    base_buf_puts(out, "{\"id\":");
    gw_put_string(out, id.data, id.length);
    gw_put_call_body(out, &one);
    base_buf_puts(out, "}");
    out->failed |= gw_call_failed(&one);
    gw_call_deinit(&one);
}

void gw_tell_calls(gw_turn *turn)
{
    if (!turn->call_count)
        return;
    base_buf out;
    base_buf_init(&out, 0);
    for (uint32_t i = 0; i < turn->call_count; i++)
        base_buf_printf(&out, "%s\"%s\"", i ? "," : "{\"calls\":[", turn->calls[i].id.text);
    bool any = false;
    for (uint32_t i = 0; i < turn->call_count; i++) {
        if (!turn->calls[i].custom)
            continue;
        base_buf_printf(&out, any ? ",%u" : "],\"custom\":[%u", i);
        any = true;
    }
    base_buf_puts(&out, "]}");
    turn->told = out.failed ? NULL : base_arena_copy(turn->arena, out.data, out.length);
    turn->lossy |= !turn->told;
    base_buf_deinit(&out);
}

bool gw_turn_called(const gw_turn *turn)
{
    return turn->finish == ENG_FINISH_CALLS || (turn->call_count && turn->calls[0].whole);
}

void gw_write_record(gw_turn *turn, const base_buf *record)
{
    turn->lossy |= record->failed;
    if (!record->failed)
        gw_turn_write(turn, record->data, record->length);
}

void gw_write_done(gw_turn *turn)
{
    static const char done[] = "data: [DONE]\n\n";
    gw_turn_write(turn, done, sizeof(done) - 1);
}

void gw_write_comment(gw_turn *turn)
{
    static const char comment[] = ": ping\n\n";
    gw_turn_write(turn, comment, sizeof(comment) - 1);
}

void gw_fail_plain(gw_turn *turn, base_buf *record, const gw_error_row *row, const char *param,
                   const char *message)
{
    if (!gw_turn_streaming(turn)) {
        gw_turn_respond_error(turn, row, param, message);
        return;
    }
    base_buf_clear(record);
    base_buf_puts(record, "data: ");
    gw_error_json(record, row->type, row->code, param, message);
    base_buf_puts(record, "\n\n");
    gw_write_record(turn, record);
    gw_turn_stream_end(turn);
}

/* ---- lists ---- */

void gw_percent_decode(char *text)
{
    char *to = text;
    for (const char *p = text; *p; p++) {
        unsigned byte = 0;
        if (*p == '%' && isxdigit((unsigned char)p[1]) && isxdigit((unsigned char)p[2])) {
            sscanf(p + 1, "%2x", &byte);
            p += 2;
        }
        *to++ = byte ? (char)byte : *p;
    }
    *to = '\0';
}

bool gw_query_value(const char *query, const char *name, char *out, size_t size)
{
    size_t length = strlen(name);
    for (const char *p = query; *p; p += strcspn(p, "&"), p += *p == '&') {
        if (strncmp(p, name, length) != 0 || p[length] != '=')
            continue;
        p += length + 1;
        snprintf(out, size, "%.*s", (int)strcspn(p, "&"), p);
        gw_percent_decode(out);
        return true;
    }
    return false;
}

base_code gw_page_read(gw_page *out, const char *query, base_err *err)
{
    char value[16] = "";
    *out = (gw_page){.limit = 20};
    gw_query_value(query, "after", out->after, sizeof out->after);
    if (gw_query_value(query, "limit", value, sizeof value)) {
        long limit = strspn(value, "0123456789") == strlen(value) ? strtol(value, NULL, 10) : 0;
        if (limit < 1 || limit > 100)
            return base_fail_param(err, BASE_INVALID, "limit", "limit must be 1 to 100");
        out->limit = (uint32_t)limit;
    }
    if (gw_query_value(query, "order", value, sizeof value)) {
        out->oldest_first = strcmp(value, "asc") == 0;
        if (!out->oldest_first && strcmp(value, "desc") != 0)
            return base_fail_param(err, BASE_INVALID, "order", "order must be asc or desc");
    }
    return BASE_OK;
}

static const char *id_of(const json_t *item)
{
    const char *id = json_string_value(json_object_get(item, "id"));
    return id ? id : "";
}

base_code gw_page_put(const gw_page *page, base_buf *out, const json_t *list, base_err *err)
{
    size_t size = json_array_size(list), from = 0, given = 0;
    const char *first = NULL, *last = NULL;
    bool found = !page->after[0];
    for (size_t i = 0; !found && i < size; i++) {
        const json_t *item = json_array_get(list, page->oldest_first ? i : size - 1 - i);
        found = strcmp(id_of(item), page->after) == 0;
        from = i + 1;
    }
    if (!found)
        return base_fail_param(err, BASE_INVALID, "after", "after names no item of this list");
    base_buf_puts(out, "{\"object\":\"list\",\"data\":[");
    for (size_t i = from; i < size && given < page->limit; i++, given++) {
        const json_t *item = json_array_get(list, page->oldest_first ? i : size - 1 - i);
        char *text = json_dumps(item, JSON_COMPACT);
        if (!text)
            return gw_no_memory(err);
        base_buf_puts(out, given ? "," : "");
        base_buf_puts(out, text);
        free(text);
        first = given ? first : id_of(item);
        last = id_of(item);
    }
    base_buf_puts(out, "],\"first_id\":");
    if (first)
        gw_put_string(out, first, strlen(first));
    else
        base_buf_puts(out, "null");
    base_buf_puts(out, ",\"last_id\":");
    if (last)
        gw_put_string(out, last, strlen(last));
    else
        base_buf_puts(out, "null");
    base_buf_printf(out, ",\"has_more\":%s}", from + given < size ? "true" : "false");
    return out->failed ? gw_no_memory(err) : BASE_OK;
}
