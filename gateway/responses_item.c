#include "gateway/responses_item.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/dialect.h"
#include "gateway/ledger_conversation.h"
#include "gateway/response_compact.h"
#include "gateway/response_store.h"

/* ---- the list ---- */

static eng_item *add(gw_item_list *list, eng_role role)
{
    base_arena *arena = list->turn->arena;
    if (list->count == list->capacity) {
        uint32_t capacity = list->capacity ? list->capacity * 2 : 16;
        eng_item *items = base_arena_calloc(arena, capacity, sizeof *items);
        eng_text *ids = base_arena_calloc(arena, capacity, sizeof *ids);
        gw_sealed *sealed = base_arena_calloc(arena, capacity, sizeof *sealed);
        if (!items || !ids || !sealed)
            return NULL;
        if (list->count) {
            memcpy(items, list->items, list->count * sizeof *items);
            memcpy(ids, list->ids, list->count * sizeof *ids);
            memcpy(sealed, list->sealed, list->count * sizeof *sealed);
        }
        list->items = items;
        list->ids = ids;
        list->sealed = sealed;
        list->capacity = capacity;
    }
    eng_item *item = &list->items[list->count++];
    *item = (eng_item){.role = role, .text = {"", 0}};
    list->open = role == ENG_ROLE_ASSISTANT;
    return item;
}

/* The assistant's item that goes on, or a new one. */
static eng_item *assistant(gw_item_list *list, bool fresh)
{
    return list->open && !fresh ? &list->items[list->count - 1] : add(list, ENG_ROLE_ASSISTANT);
}

static base_code append(gw_item_list *list, eng_text *to, eng_text more, base_err *err)
{
    if (!to->length) {
        *to = more;
        return BASE_OK;
    }
    char *text = base_arena_alloc(list->turn->arena, to->length + more.length);
    if (!text)
        return gw_no_memory(err);
    memcpy(text, to->data, to->length);
    if (more.length)
        memcpy(text + to->length, more.data, more.length);
    *to = (eng_text){text, to->length + more.length};
    return BASE_OK;
}

static base_code add_reasoning(gw_item_list *list, eng_text text, base_err *err)
{
    const eng_item *last = list->open ? &list->items[list->count - 1] : NULL;
    eng_item *item = assistant(list, last && (last->text.length || last->call_count));
    return item ? append(list, &item->reasoning, text, err) : gw_no_memory(err);
}

static base_code add_said(gw_item_list *list, eng_text text, base_err *err)
{
    /* Two messages in a row are two turns; a message behind a call is the same one's. */
    const eng_item *last = list->open ? &list->items[list->count - 1] : NULL;
    eng_item *item = assistant(list, last && last->text.length && !last->call_count);
    return item ? append(list, &item->text, text, err) : gw_no_memory(err);
}

static base_code add_call(gw_item_list *list, eng_call call, base_err *err)
{
    eng_item *item = assistant(list, false);
    if (!item)
        return gw_no_memory(err);
    uint32_t count = item->call_count;
    eng_call *calls = (eng_call *)item->calls; /* this list's own array */
    if ((count & (count - 1)) == 0) {          /* full: room is a power of two */
        calls = base_arena_calloc(list->turn->arena, count ? count * 2 : 1, sizeof *calls);
        if (!calls)
            return gw_no_memory(err);
        if (count)
            memcpy(calls, item->calls, count * sizeof *calls);
    }
    calls[count] = call;
    item->calls = calls;
    item->call_count++;
    return BASE_OK;
}

base_code gw_items_add(gw_item_list *list, eng_role role, eng_text text, base_err *err)
{
    eng_item *item = add(list, role);
    if (!item)
        return gw_no_memory(err);
    item->text = text;
    return BASE_OK;
}

/* ---- contents ---- */

static base_code read_content(gw_item_list *list, eng_text *out, const json_t *object,
                              const char *path, const char *name, base_err *err)
{
    char where[GW_PATH_BYTES];
    gw_name_path(where, "%s.%s", path, name);
    return gw_read_content(list->turn, out, json_object_get(object, name), where, err);
}

static base_code read_message(gw_item_list *list, const json_t *item, const char *path,
                              base_err *err)
{
    const char *role = NULL;
    eng_text text;
    GW_TRY(gw_read_name(&role, item, path, "role", GW_NAME_BYTES_MAX, err));
    if (!role)
        return gw_wrong_type(path, "role", "a string", NULL, err);
    GW_TRY(read_content(list, &text, item, path, "content", err));
    if (strcmp(role, "assistant") == 0)
        return add_said(list, text, err);
    bool system = strcmp(role, "system") == 0 || strcmp(role, "developer") == 0;
    if (!system && strcmp(role, "user") != 0) {
        char param[GW_PATH_BYTES + 8];
        snprintf(param, sizeof param, "%s.role", path);
        return base_fail_param(err, BASE_INVALID, param,
                               "%s '%.*s' is not one of system, developer, user, assistant", param,
                               gw_shown(role, 32), role);
    }
    return gw_items_add(list, system ? ENG_ROLE_SYSTEM : ENG_ROLE_USER, text, err);
}

static base_code read_call(gw_item_list *list, const json_t *item, const char *path, bool custom,
                           base_err *err)
{
    const char *id = NULL, *name = NULL;
    eng_text arguments = {"", 0};
    GW_TRY(gw_read_name(&id, item, path, "call_id", GW_NAME_BYTES_MAX, err));
    GW_TRY(gw_read_name(&name, item, path, "name", GW_NAME_BYTES_MAX, err));
    if (!name || !name[0])
        return gw_wrong_type(path, "name", "a string", NULL, err);
    GW_TRY(gw_read_text(&arguments, item, path, custom ? "input" : "arguments", err));
    if (custom)
        GW_TRY(gw_custom_arguments(list->turn, &arguments, arguments, err));
    return add_call(list, (eng_call){gw_text_of(id), gw_text_of(name), arguments}, err);
}

static base_code read_result(gw_item_list *list, const json_t *item, const char *path,
                             base_err *err)
{
    const char *id = NULL;
    eng_text text;
    GW_TRY(gw_read_name(&id, item, path, "call_id", GW_NAME_BYTES_MAX, err));
    if (!id)
        return gw_wrong_type(path, "call_id", "a string", NULL, err);
    GW_TRY(read_content(list, &text, item, path, "output", err));
    GW_TRY(gw_items_add(list, ENG_ROLE_TOOL, text, err));
    list->ids[list->count - 1] = gw_text_of(id);
    return BASE_OK;
}

/* The content if it is there, else the summary. Sealed reasoning names what the ledger finds by
 * the visible part and the calls' ids anyway. */
static base_code read_reasoning(gw_item_list *list, const json_t *item, const char *path,
                                base_err *err)
{
    eng_text text, summary;
    GW_TRY(read_content(list, &text, item, path, "content", err));
    GW_TRY(read_content(list, &summary, item, path, "summary", err));
    eng_text sealed = {0};
    GW_TRY(gw_read_text(&sealed, item, path, "encrypted_content", err));
    GW_TRY(add_reasoning(list, text.length ? text : summary, err));
    if (sealed.length)
        list->sealed[list->count - 1] =
            (gw_sealed){.text = sealed, .field = list->field, .at = list->at, .kept = list->kept};
    return BASE_OK;
}

/* ---- references ---- */

/* Of a stored response: an output item's id holds the response's 24 digits. */
static base_code find_output(gw_turn *turn, json_t **out, const char *id, base_err *err)
{
    const char *bar = strchr(id, '_');
    char response[GW_ID_MAX];
    if (!bar || strspn(bar + 1, "0123456789abcdef") != 24)
        return BASE_NOT_FOUND;
    snprintf(response, sizeof response, "resp_%.24s", bar + 1);
    gw_stored s;
    base_code code = gw_stored_play(&s, turn->app, turn->identity.tenant, response, NULL, NULL, 0,
                                    turn->arena, err);
    for (uint32_t i = 0; !code && !*out && i < s.r.count; i++) {
        base_buf text;
        base_buf_init(&text, 0);
        gw_response_put_item(&s.r, &text, i, &s.end);
        json_t *item =
            text.failed ? NULL : json_loadb(text.data, text.length, JSON_ALLOW_NUL, NULL);
        const char *have = json_string_value(json_object_get(item, "id"));
        if (have && strcmp(have, id) == 0)
            *out = json_incref(item);
        json_decref(item);
        base_buf_deinit(&text);
    }
    gw_stored_deinit(&s);
    return code ? code : *out ? BASE_OK : BASE_NOT_FOUND;
}

base_code gw_items_resolve(gw_turn *turn, json_t **out, const char *id, const char *path,
                           base_err *err)
{
    base_err why = BASE_ERR_INIT;
    char *json = NULL;
    *out = NULL;
    base_code code = find_output(turn, out, id, &why);
    if (code == BASE_NOT_FOUND) {
        why = (base_err)BASE_ERR_INIT;
        code = gw_conversation_item_find(turn->app->ledger, &json, turn->identity.tenant, id,
                                         turn->arena, &why);
        *out = code ? NULL : json_loads(json, JSON_ALLOW_NUL, NULL);
    }
    if (*out)
        return BASE_OK;
    if (code && code != BASE_NOT_FOUND)
        return base_fail(err, code, "%s", why.text);
    return gw_turn_reject(turn, err, 404, "invalid_request_error", "item_not_found", path,
                          "there is no item '%.*s'", gw_shown(id, 64), id);
}

static base_code read_reference(gw_item_list *list, const json_t *item, const char *path,
                                base_err *err)
{
    const char *id = NULL;
    json_t *found;
    GW_TRY(gw_read_name(&id, item, path, "id", GW_NAME_BYTES_MAX, err));
    if (!id)
        return gw_wrong_type(path, "id", "a string", NULL, err);
    GW_TRY(gw_items_resolve(list->turn, &found, id, path, err));
    if (json_array_append_new(list->stored, found))
        return gw_no_memory(err);
    /* What is stored is no reference, but a client may have chosen its kind. */
    const char *type = json_string_value(json_object_get(found, "type"));
    return type && strcmp(type, "item_reference") != 0 ? gw_items_read_one(list, found, path, err)
                                                       : BASE_OK;
}

/* ---- the ledger's items ---- */

base_code gw_items_add_stored(gw_item_list *list, const char *json, base_err *err)
{
    static const char *const roles[] = {"root", "system", "user", "assistant", "tool"};
    json_t *tree = json_loads(json, JSON_ALLOW_NUL, NULL);
    if (!tree || json_array_append_new(list->stored, tree))
        return base_fail(err, tree ? BASE_NOMEM : BASE_FORMAT, "a stored item cannot be read");
    const char *role = json_string_value(json_object_get(tree, "role"));
    eng_role kind = ENG_ROLE_ROOT;
    while (role && kind < ENG_ROLE_TOOL && strcmp(roles[kind], role) != 0)
        kind++;
    eng_item *item = add(list, kind);
    if (!item)
        return gw_no_memory(err);
    item->text = gw_text_of_json(json_object_get(tree, "content"));
    item->reasoning = gw_text_of_json(json_object_get(tree, "reasoning_content"));
    const json_t *calls = json_object_get(tree, "tool_calls");
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *call = json_array_get(calls, i), *f = json_object_get(call, "function"),
                     *custom = json_object_get(call, "custom");
        eng_text arguments = gw_text_of_json(json_object_get(f, "arguments"));
        if (custom) /* an export's */
            GW_TRY(gw_custom_arguments(list->turn, &arguments,
                                       gw_text_of_json(json_object_get(custom, "input")), err));
        GW_TRY(add_call(list,
                        (eng_call){gw_text_of_json(json_object_get(call, "id")),
                                   gw_text_of_json(json_object_get(custom ? custom : f, "name")),
                                   arguments},
                        err));
    }
    list->sealed[list->count - 1].compacted =
        kind == ENG_ROLE_USER && gw_compaction_wrote(item->text);
    list->open = false; /* it was a whole turn */
    return BASE_OK;
}

/* ---- all of it ---- */

base_code gw_items_read_one(gw_item_list *list, const json_t *item, const char *path, base_err *err)
{
    if (!json_is_object(item))
        return gw_wrong_type(path, "", "an object", item, err);
    const char *type = NULL;
    GW_TRY(gw_read_name(&type, item, path, "type", GW_NAME_BYTES_MAX, err));
    if (!type) {
        /* Either an easy message or a bare reference. */
        type = json_object_get(item, "role") || !json_object_get(item, "id") ? "message"
                                                                             : "item_reference";
    }
    if (strcmp(type, "message") == 0)
        return read_message(list, item, path, err);
    if (strcmp(type, "function_call") == 0)
        return read_call(list, item, path, false, err);
    if (strcmp(type, "custom_tool_call") == 0)
        return read_call(list, item, path, true, err);
    if (strcmp(type, "function_call_output") == 0 || strcmp(type, "custom_tool_call_output") == 0)
        return read_result(list, item, path, err);
    if (strcmp(type, "reasoning") == 0)
        return read_reasoning(list, item, path, err);
    if (strcmp(type, "item_reference") == 0)
        return read_reference(list, item, path, err);
    if (strcmp(type, "compaction") == 0)
        return gw_compaction_read(list, item, path, err);
    return BASE_OK;
}

base_code gw_items_read(gw_item_list *list, const json_t *input, const char *path, base_err *err)
{
    if (json_is_string(input))
        return gw_items_add(list, ENG_ROLE_USER, gw_text_of_json(input), err);
    list->field = path;
    if (!json_is_array(input))
        return gw_wrong_type("", path, "a string or an array of items", input, err);
    for (size_t i = 0; i < json_array_size(input); i++) {
        char where[GW_PATH_BYTES];
        gw_name_path(where, "%s[%zu]", path, i);
        list->at = (uint32_t)i;
        GW_TRY(gw_items_read_one(list, json_array_get(input, i), where, err));
    }
    return BASE_OK;
}
