#include "gateway/structured.h"

#include <stdio.h>
#include <string.h>

#define PATH_DEPTH 6 /* longest path of a format, and its end */
#define CHOICES_MAX 1024

static base_code take(gw_turn *turn, eng_format format, const char *param, base_err *err)
{
    if (turn->output.format.kind != ENG_FORMAT_TEXT)
        return base_fail_param(err, BASE_INVALID, param, "%s: the output's format is set twice",
                               param);
    turn->output.format = format;
    turn->format_param = base_arena_copy(turn->arena, param, strlen(param) + 1);
    return turn->format_param ? BASE_OK : gw_no_memory(err);
}

/* The path of `keys`, joined by dots; returns how many there are. */
static size_t join(char path[GW_PATH_BYTES], const char *const *keys)
{
    size_t depth = 0;
    path[0] = '\0';
    for (; keys[depth]; depth++) {
        size_t used = strlen(path);
        snprintf(path + used, GW_PATH_BYTES - used, "%s%s", depth ? "." : "", keys[depth]);
    }
    return depth;
}

/* The raw value under a path of members, copied to the arena. */
static base_code raw_at(gw_turn *turn, eng_text *out, const char *const *keys, base_err *err)
{
    eng_text at = {turn->body, turn->body_length};
    for (; *keys; keys++)
        if (!gw_body_member(&at, at.data, at.length, *keys))
            return base_fail(err, BASE_INVALID, "%s is not well formed", *keys);
    char *copy = base_arena_copy(turn->arena, at.data, at.length);
    *out = (eng_text){copy, at.length};
    return copy ? BASE_OK : gw_no_memory(err);
}

static base_code take_schema(gw_turn *turn, const json_t *schema, const char *const *keys,
                             const char *param, base_err *err)
{
    eng_format format = {.kind = ENG_FORMAT_SCHEMA};
    if (!json_is_object(schema) && !json_is_boolean(schema))
        return gw_wrong_type(param, "", "a schema", schema, err);
    GW_TRY(raw_at(turn, &format.text, keys, err));
    return take(turn, format, param, err);
}

base_code gw_read_format(gw_turn *turn, const json_t *format, const char *const *keys,
                         const char *inner, base_err *err)
{
    const char *type = NULL, *path_keys[PATH_DEPTH] = {0};
    char path[GW_PATH_BYTES], where[GW_PATH_BYTES];
    if (!format)
        return BASE_OK;
    size_t depth = join(path, keys);
    memcpy(path_keys, keys, depth * sizeof *keys);
    GW_TRY(gw_read_name(&type, format, path, "type", GW_NAME_BYTES_MAX, err));
    if (!type || strcmp(type, "text") == 0)
        return BASE_OK;
    if (strcmp(type, "json_object") == 0)
        return take(turn, (eng_format){.kind = ENG_FORMAT_OBJECT}, path, err);
    if (strcmp(type, "json_schema") != 0) {
        gw_name_path(where, "%s.type", path);
        return gw_unsupported(err, where, "%s '%.*s' is none of text, json_object, json_schema",
                              where, gw_shown(type, 32), type);
    }
    json_t *holder = (json_t *)format;
    if (inner) {
        GW_TRY(gw_read_object(&holder, format, path, inner, err));
        if (!holder)
            return gw_wrong_type(path, inner, "an object", NULL, err);
        path_keys[depth++] = inner;
        join(path, path_keys);
    }
    const json_t *schema = json_object_get(holder, "schema");
    gw_name_path(where, "%s.schema", path);
    /* The vendor lets a schema be left out where strict is not set: any object then. */
    if (!schema && !json_is_true(json_object_get(holder, "strict")) && inner)
        return take(turn, (eng_format){.kind = ENG_FORMAT_OBJECT}, where, err);
    path_keys[depth] = "schema";
    return take_schema(turn, schema, path_keys, where, err);
}

/* ---- the engine's own fields ---- */

typedef struct own_field {
    const char *name;
    eng_format_kind kind;
} own_field;

static base_code read_choices(gw_turn *turn, eng_format *format, const json_t *list,
                              const char *param, base_err *err)
{
    size_t count = json_array_size(list);
    if (!json_is_array(list))
        return gw_wrong_type(param, "", "an array of strings", list, err);
    if (count == 0 || count > CHOICES_MAX)
        return base_fail_param(err, BASE_INVALID, param, "%s has %zu choices, 1 to %d may stand",
                               param, count, CHOICES_MAX);
    eng_text *choices = base_arena_calloc(turn->arena, count, sizeof *choices);
    if (!choices)
        return gw_no_memory(err);
    for (size_t i = 0; i < count; i++) {
        const json_t *one = json_array_get(list, i);
        if (!json_is_string(one) || json_string_length(one) == 0)
            return base_fail_param(err, BASE_INVALID, param, "%s[%zu] is no text", param, i);
        choices[i] = gw_text_of_json(one);
    }
    *format = (eng_format){
        .kind = ENG_FORMAT_CHOICE, .choices = choices, .choice_count = (uint32_t)count};
    return BASE_OK;
}

static base_code read_own(gw_turn *turn, const json_t *object, const char *const *above,
                          const own_field *field, base_err *err)
{
    const json_t *value = json_object_get(object, field->name);
    const char *keys[PATH_DEPTH] = {0};
    char param[GW_PATH_BYTES];
    if (!value || json_is_null(value) || json_is_false(value))
        return BASE_OK;
    size_t depth = join(param, above);
    memcpy(keys, above, depth * sizeof *above);
    keys[depth] = field->name;
    join(param, keys);
    eng_format format = {.kind = field->kind};
    switch (field->kind) {
    case ENG_FORMAT_SCHEMA:
        if (!json_is_string(value))
            return take_schema(turn, value, keys, param, err);
        format.text = gw_text_of_json(value); /* a schema as text, which vLLM takes too */
        break;
    case ENG_FORMAT_CHOICE:
        GW_TRY(read_choices(turn, &format, value, param, err));
        break;
    case ENG_FORMAT_OBJECT:
        if (!json_is_true(value))
            return gw_wrong_type(param, "", "a boolean", value, err);
        break;
    default:
        if (!json_is_string(value))
            return gw_wrong_type(param, "", "a string", value, err);
        format.text = gw_text_of_json(value);
        break;
    }
    return take(turn, format, param, err);
}

base_code gw_read_engine_formats(gw_turn *turn, base_err *err)
{
    static const own_field top[] = {
        {"guided_json", ENG_FORMAT_SCHEMA},   {"guided_regex", ENG_FORMAT_REGEX},
        {"guided_choice", ENG_FORMAT_CHOICE}, {"guided_grammar", ENG_FORMAT_GBNF},
        {"grammar", ENG_FORMAT_GBNF},         {"json_schema", ENG_FORMAT_SCHEMA}};
    static const own_field inside[] = {{"json", ENG_FORMAT_SCHEMA},
                                       {"regex", ENG_FORMAT_REGEX},
                                       {"choice", ENG_FORMAT_CHOICE},
                                       {"grammar", ENG_FORMAT_GBNF},
                                       {"json_object", ENG_FORMAT_OBJECT}};
    for (size_t i = 0; i < sizeof top / sizeof *top; i++) {
        const json_t *holder = gw_holder(turn, top[i].name);
        const char *above[] = {holder == turn->json ? NULL : "extra_body", NULL};
        GW_TRY(read_own(turn, holder, above, &top[i], err));
    }
    const json_t *holder = gw_holder(turn, "structured_outputs");
    const char *outer[] = {"structured_outputs", NULL, NULL};
    if (holder != turn->json) {
        outer[0] = "extra_body";
        outer[1] = "structured_outputs";
    }
    json_t *object = NULL;
    GW_TRY(gw_read_object(&object, holder, "", "structured_outputs", err));
    for (size_t i = 0; object && i < sizeof inside / sizeof *inside; i++)
        GW_TRY(read_own(turn, object, outer, &inside[i], err));
    return BASE_OK;
}

/* ---- the grammar ---- */

base_code gw_hold_output(gw_turn *turn, base_err *err)
{
    eng_output *output = &turn->output;
    eng_request *request = &turn->request;
    base_err found = BASE_ERR_INIT;
    uint32_t tool;
    output->tools = turn->chat.tools;
    output->tool_count = turn->chat.tool_count;
    output->tool_choice = request->tool_choice;
    output->tool_name = request->tool_name;
    output->call_max = request->call_max;
    base_code code = eng_output_compile(&request->grammar, output, &tool, &found);
    if (!code)
        return BASE_OK;
    if (code == BASE_NOMEM)
        return gw_no_memory(err);
    if (tool == UINT32_MAX)
        return base_fail_param(err, code, turn->format_param ? turn->format_param : "tools",
                               "%s: %s", turn->format_param ? turn->format_param : "tools",
                               found.text);
    char param[GW_PATH_BYTES];
    gw_name_path(param, "tools[%u]", tool);
    return base_fail_param(err, code, param, "%s: %s", param, found.text);
}
