/* The dialect of native turns, over turn.h.
 *
 * A turn's new items are chat messages or Responses items. Every call of the turn that it goes on
 * from must get its result, so results stand in the order of the calls, which is how they are given
 * out again with their ids. A result without content is one that was appended before.
 *
 * A turn that ended by itself or by its length becomes the session's head; a cancelled or failed
 * one does not, but may be named as `parent`. */
#include "gateway/session_turn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/api_chat.h"
#include "gateway/api_sessions.h"
#include "gateway/append.h"
#include "gateway/conf.h"
#include "gateway/ledger_session.h"
#include "gateway/responses_item.h"

#define WHOLE_PATH 100000 /* turns */

bool gw_session_of_path(gw_id *id, const char **word, const char *path)
{
    if (strncmp(path, GW_SESSIONS_PATH "/", sizeof GW_SESSIONS_PATH) != 0)
        return false;
    const char *at = path + sizeof GW_SESSIONS_PATH;
    size_t length = strcspn(at, "/");
    *word = at[length] ? at + length + 1 : "";
    snprintf(id->text, sizeof id->text, "%.*s", (int)base_min(length, (size_t)GW_ID_MAX - 1), at);
    return length > 0;
}

/* What a session was made with. */
typedef struct config {
    json_t *json;
    eng_text tools; /* raw array, "[]" if there is none */
} config;

static base_code read_config(config *out, const gw_session_row *session, base_err *err)
{
    const char *text = session->config ? session->config : "{}";
    size_t length = strlen(text);
    out->tools = (eng_text){"[]", 2};
    base_code code = gw_body_parse(&out->json, text, length, NULL);
    if (code)
        return base_fail(err, code == BASE_NOMEM ? code : BASE_FORMAT,
                         "what session %s was made with cannot be read", session->id.text);
    eng_text raw;
    if (gw_body_member(&raw, text, length, "tools"))
        out->tools = raw;
    return BASE_OK;
}

/* ---- reading a turn ---- */

typedef struct native {
    gw_session_row session;
    config config;
    const char *parent; /* turn to go on from, NULL: the head */
    gw_item_list fresh; /* what the turn brings; with a head, that one's answer comes first */
    uint32_t fresh_from;
    json_t *stored, *converted; /* trees that items point into */
    gw_head head;
    bool goes_on;    /* there is a head */
    base_buf record; /* scratch */
} native;

static native *state(gw_turn *turn)
{
    return turn->state_of_dialect;
}

static base_code not_found(gw_turn *turn, base_err *err, const char *id)
{
    return gw_turn_reject(turn, err, 404, "invalid_request_error", "session_not_found",
                          "session_id", "Session with id '%.*s' not found.", gw_shown(id, 64), id);
}

static base_code read_session(gw_turn *turn, const char *id, base_err *err)
{
    base_err why = BASE_ERR_INIT;
    base_code code = gw_session_read(turn->app->ledger, &state(turn)->session,
                                     turn->identity.tenant, id, turn->arena, &why);
    if (code == BASE_NOT_FOUND)
        return not_found(turn, err, id);
    return code ? base_fail(err, code, "%s", why.text) : BASE_OK;
}

/* Reads `item` as one of Responses' items that this turn made of a chat message. */
static base_code read_as(gw_turn *turn, json_t *item, const char *path, base_err *err)
{
    native *n = state(turn);
    if (!item || json_array_append_new(n->converted, item))
        return gw_no_memory(err);
    return gw_items_read_one(&n->fresh, item, path, err);
}

/* A result, in either form: `id` and `text` are the members' names. */
static base_code read_result(gw_turn *turn, const json_t *item, const char *id, const char *text,
                             const char *path, base_err *err)
{
    native *n = state(turn);
    const char *call = NULL;
    const json_t *content = json_object_get(item, text);
    bool absent = !content || json_is_null(content);
    GW_TRY(gw_read_name(&call, item, path, id, GW_NAME_BYTES_MAX, err));
    if (!call)
        return gw_wrong_type(path, id, "a string", NULL, err);
    json_t *result = json_pack("{s:s,s:s}", "type", "function_call_output", "call_id", call);
    eng_text said = {0};
    char where[GW_PATH_BYTES];
    gw_name_path(where, "%s.%s", path, text);
    GW_TRY(gw_read_content(turn, &said, content, where, err));
    GW_TRY(read_as(turn, result, path, err));
    n->fresh.items[n->fresh.count - 1].text = absent ? (eng_text){0} : said;
    return BASE_OK;
}

/* An assistant's chat message becomes reasoning, message and calls. */
static base_code read_assistant(gw_turn *turn, const json_t *item, const char *path, base_err *err)
{
    json_t *calls, *reasoning = json_object_get(item, "reasoning_content"),
                   *content = json_object_get(item, "content");
    GW_TRY(gw_read_array(&calls, item, path, "tool_calls", err));
    state(turn)->fresh.open = false;
    if (json_is_string(reasoning))
        GW_TRY(read_as(turn, json_pack("{s:s,s:O}", "type", "reasoning", "content", reasoning),
                       path, err));
    if (content && !json_is_null(content))
        GW_TRY(read_as(
            turn,
            json_pack("{s:s,s:s,s:O}", "type", "message", "role", "assistant", "content", content),
            path, err));
    for (size_t i = 0; i < json_array_size(calls); i++) {
        json_t *call = json_array_get(calls, i), *function = json_object_get(call, "function"),
               *custom = json_object_get(call, "custom");
        const json_t *made = json_is_object(custom) ? custom : function;
        const char *member = made == custom ? "input" : "arguments";
        char where[GW_PATH_BYTES];
        gw_name_path(where, "%s.tool_calls[%zu]", path, i);
        if (!json_is_object(made))
            return gw_wrong_type(where, "function", "an object", function, err);
        json_t *one =
            json_pack("{s:s}", "type", made == custom ? "custom_tool_call" : "function_call");
        json_object_set(one, "call_id", json_object_get(call, "id"));
        json_object_set(one, "name", json_object_get(made, "name"));
        json_object_set(one, member, json_object_get(made, member));
        GW_TRY(read_as(turn, one, where, err));
    }
    state(turn)->fresh.open = false;
    return BASE_OK;
}

static base_code read_item(gw_turn *turn, const json_t *item, const char *path, base_err *err)
{
    if (!json_is_object(item))
        return gw_wrong_type(path, "", "an object", item, err);
    const char *type = NULL, *role = NULL;
    GW_TRY(gw_read_name(&type, item, path, "type", GW_NAME_BYTES_MAX, err));
    GW_TRY(gw_read_name(&role, item, path, "role", GW_NAME_BYTES_MAX, err));
    if (!type && !role)
        return gw_wrong_type(path, "role", "a string", NULL, err);
    if (!type && strcmp(role, "tool") == 0)
        return read_result(turn, item, "tool_call_id", "content", path, err);
    if (!type && strcmp(role, "assistant") == 0)
        return read_assistant(turn, item, path, err);
    if (type &&
        (strcmp(type, "function_call_output") == 0 || strcmp(type, "custom_tool_call_output") == 0))
        return read_result(turn, item, "call_id", "output", path, err);
    return gw_items_read_one(&state(turn)->fresh, item, path, err);
}

static base_code read_items(gw_turn *turn, const json_t *items, const char *name, base_err *err)
{
    size_t max = turn->app->conf->sessions_items_max, count = json_array_size(items);
    if (!json_is_array(items))
        return gw_wrong_type("", name, "an array of items", items, err);
    if (count > max)
        return base_fail_param(err, BASE_INVALID, name,
                               "%s has %zu items, the limit is %zu (sessions.items_max)", name,
                               count, max);
    for (size_t i = 0; i < count; i++) {
        char path[GW_PATH_BYTES];
        gw_name_path(path, "%s[%zu]", name, i);
        GW_TRY(read_item(turn, json_array_get(items, i), path, err));
    }
    return BASE_OK;
}

/* The body's tools, else the session's. */
static base_code read_tools(gw_turn *turn, eng_text raw, base_err *err)
{
    native *n = state(turn);
    json_t *own = json_object_get(turn->json, "tools");
    if (own && !json_is_null(own))
        return gw_read_tools(turn, &gw_chat_tools, raw, err);
    json_t *tools = json_object_get(n->config.json, "tools");
    if (tools && json_object_set(turn->json, "tools", tools))
        return gw_no_memory(err);
    return gw_read_tools(turn, &gw_chat_tools, n->config.tools, err);
}

static base_code read_limit(gw_turn *turn, base_err *err)
{
    static const char *const names[] = {"max_output_tokens", "max_completion_tokens", "max_tokens"};
    bool seen = false;
    for (size_t i = 0; i < sizeof names / sizeof *names && !seen; i++)
        GW_TRY(gw_read_limit(turn, names[i], &seen, err));
    return BASE_OK;
}

static base_code parse(gw_turn *turn, base_err *err)
{
    native *n = base_arena_calloc(turn->arena, 1, sizeof *n);
    if (!n)
        return gw_no_memory(err);
    turn->state_of_dialect = n;
    n->stored = json_array();
    n->converted = json_array();
    n->fresh = (gw_item_list){.turn = turn, .stored = n->stored};
    const char *verb;
    gw_id id;
    if (!gw_session_of_path(&id, &verb, turn->path))
        return not_found(turn, err, turn->path);
    GW_TRY(read_session(turn, id.text, err));
    GW_TRY(read_config(&n->config, &n->session, err));
    turn->session = n->session.id;
    turn->lock_id = n->session.id.text;
    turn->lock_param = "session_id";
    /* Whatever it was made with: a session goes on under the model that serves now. */
    turn->model = eng_get_info(turn->app->engine)->name;
    turn->retention = GW_RETAIN_KEPT;
    turn->moves_head = true;
    turn->label = NULL;
    eng_text tools;
    GW_TRY(gw_keep_raw(turn, &tools, "tools", err));
    GW_TRY(gw_body_parse(&turn->json, turn->body, turn->body_length, err));
    GW_TRY(gw_read_bool(&turn->stream, NULL, turn->json, "", "stream", err));
    GW_TRY(gw_read_name(&n->parent, turn->json, "", "parent", GW_NAME_BYTES_MAX, err));
    GW_TRY(read_tools(turn, tools, err));
    GW_TRY(gw_read_tool_choice(turn, &gw_chat_tools, err));
    GW_TRY(read_limit(turn, err));
    GW_TRY(gw_read_sampling(turn, err));
    GW_TRY(gw_chat_read_thinking(turn, err));
    GW_TRY(gw_read_metadata(turn, err));
    const json_t *items = json_object_get(turn->json, "items");
    if (!items)
        return base_fail_param(err, BASE_INVALID, "items", "items must be an array of items");
    return read_items(turn, items, "items", err);
}

/* ---- going on from the head ---- */

static bool same_text(eng_text a, eng_text b)
{
    return a.length == b.length && (!a.length || memcmp(a.data, b.data, a.length) == 0);
}

static bool calls_it(const eng_item *item, eng_text id)
{
    bool found = false;
    for (uint32_t i = 0; i < item->call_count; i++)
        found |= same_text(item->calls[i].id, id);
    return found;
}

/* Each call of the turn before gets one result; results are for those or for calls among the items
 * that the turn brings itself. */
static base_code check_results(gw_turn *turn, const eng_item *asked, base_err *err)
{
    native *n = state(turn);
    for (uint32_t k = n->fresh_from; k < n->fresh.count; k++) {
        eng_item *item = &n->fresh.items[k];
        eng_text id = n->fresh.ids[k];
        if (item->role != ENG_ROLE_TOOL)
            continue;
        bool known = asked && calls_it(asked, id);
        for (uint32_t i = n->fresh_from; i < k; i++)
            known |= calls_it(&n->fresh.items[i], id);
        if (!known)
            return base_fail_param(err, BASE_INVALID, "items",
                                   "items: the turn before made no call with id '%.*s'",
                                   gw_shown(id.data ? id.data : "", 64), id.data ? id.data : "");
        for (uint32_t i = n->fresh_from; i < k; i++)
            if (n->fresh.items[i].role == ENG_ROLE_TOOL && same_text(n->fresh.ids[i], id))
                return base_fail_param(err, BASE_INVALID, "items",
                                       "items: call '%.*s' has two results", gw_shown(id.data, 64),
                                       id.data);
    }
    for (uint32_t i = 0; asked && i < asked->call_count; i++) {
        eng_text id = asked->calls[i].id;
        bool found = false;
        for (uint32_t k = n->fresh_from; k < n->fresh.count; k++)
            found |= n->fresh.items[k].role == ENG_ROLE_TOOL && same_text(n->fresh.ids[k], id);
        if (!found)
            return base_fail_param(err, BASE_INVALID, "items",
                                   "No tool output found for function call %.*s.",
                                   gw_shown(id.data, 64), id.data);
    }
    return BASE_OK;
}

/* What was appended takes the place of contents that were left out. */
static base_code take_appended(gw_turn *turn, base_err *err)
{
    native *n = state(turn);
    for (uint32_t k = n->fresh_from; k < n->fresh.count; k++) {
        eng_item *item = &n->fresh.items[k];
        eng_text id = n->fresh.ids[k];
        if (item->role != ENG_ROLE_TOOL || item->text.data)
            continue;
        char call[GW_NAME_BYTES_MAX + 1];
        snprintf(call, sizeof call, "%.*s", (int)id.length, id.data);
        const gw_append_key key = {turn->identity.tenant, turn->session.text, n->head.turn.text};
        if (!gw_append_get(turn->app->appends, &item->text, &key, call, turn->arena))
            return base_fail_param(err, BASE_INVALID, "items",
                                   "items: nothing was appended for call '%.*s', or it is not "
                                   "there any more; send its content",
                                   gw_shown(call, 64), call);
        if (!base_utf8_valid(item->text.data, item->text.length))
            return base_fail_param(err, BASE_INVALID, "items",
                                   "items: what was appended for call '%.*s' ends inside a "
                                   "character",
                                   gw_shown(call, 64), call);
    }
    return BASE_OK;
}

/* The system text and, of an imported session without tokens, its items. */
static base_code begin_conversation(gw_turn *turn, gw_item_list *list, base_err *err)
{
    native *n = state(turn);
    const json_t *system = json_object_get(n->config.json, "system"),
                 *items = json_object_get(n->config.json, "items");
    if (json_string_length(system) && !items)
        GW_TRY(gw_items_add(list, ENG_ROLE_SYSTEM, gw_text_of_json(system), err));
    for (size_t i = 0; i < json_array_size(items); i++) {
        char *text = json_dumps(json_array_get(items, i), JSON_COMPACT);
        base_code code = text ? gw_items_add_stored(list, text, err) : gw_no_memory(err);
        free(text);
        if (code)
            return code;
    }
    return BASE_OK;
}

/* Reads the head and puts its answer before the turn's items. */
static base_code load(gw_turn *turn, base_err *err)
{
    native *n = state(turn);
    /* It may have moved on, or be gone, while this turn stood in line. */
    GW_TRY(read_session(turn, turn->session.text, err));
    const eng_info *info = eng_get_info(turn->app->engine);
    gw_item_list fresh = n->fresh, list = {.turn = turn, .stored = n->stored};
    n->goes_on = n->session.head_row || n->parent;
    if (n->goes_on) {
        base_err why = BASE_ERR_INIT;
        base_code code =
            gw_session_head(turn->app->ledger, &n->head, turn->identity.tenant, &n->session,
                            n->parent, info->template_id, turn->arena, &why);
        if (code == BASE_NOT_FOUND)
            return gw_turn_reject(turn, err, 404, "invalid_request_error", "turn_not_found",
                                  "parent", "Turn with id '%.*s' not found in this session.",
                                  gw_shown(n->parent ? n->parent : "", 64),
                                  n->parent ? n->parent : "");
        if (code)
            return base_fail(err, code, "%s", why.text);
        if (n->head.answer)
            GW_TRY(gw_items_add_stored(&list, n->head.answer, err));
    } else {
        GW_TRY(begin_conversation(turn, &list, err));
    }
    n->fresh_from = list.count;
    const eng_item *asked = list.count ? &list.items[list.count - 1] : NULL;
    uint32_t total = list.count + fresh.count;
    eng_item *items = base_arena_calloc(turn->arena, base_max(total, 1), sizeof *items);
    eng_text *ids = base_arena_calloc(turn->arena, base_max(total, 1), sizeof *ids);
    if (!items || !ids)
        return gw_no_memory(err);
    for (uint32_t i = 0; i < list.count; i++) {
        items[i] = list.items[i];
        ids[i] = list.ids[i];
    }
    for (uint32_t i = 0; i < fresh.count; i++) {
        items[list.count + i] = fresh.items[i];
        ids[list.count + i] = fresh.ids[i];
    }
    if (!fresh.count)
        return base_fail_param(err, BASE_INVALID, "items", "items must hold at least one item");
    n->fresh.items = items;
    n->fresh.ids = ids;
    n->fresh.count = total;
    GW_TRY(check_results(turn, asked, err));
    GW_TRY(take_appended(turn, err));
    /* Results behind the calls they answer, in their order, before everything else. */
    gw_order_results(items, ids, total);
    turn->items = items;
    turn->chat.items = items;
    turn->chat.item_count = total;
    return BASE_OK;
}

/* Every item of the path, each answer with its tokens: what stands before the first item changed,
 * or another template made the tokens. */
static base_code load_path(gw_turn *turn, uint32_t *known, base_err *err)
{
    native *n = state(turn);
    gw_path_turn *path;
    uint32_t count;
    bool more;
    gw_item_list list = {.turn = turn, .stored = n->stored};
    GW_TRY(gw_session_path(turn->app->ledger, &path, &count, &more, turn->identity.tenant,
                           &n->session, n->head.turn.text, NULL, WHOLE_PATH, true,
                           eng_get_info(turn->app->engine)->template_id, turn->arena, err));
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t k = 0; k < path[i].item_count; k++)
            GW_TRY(gw_items_add_stored(&list, path[i].items[k], err));
        if (path[i].answered && path[i].item_count && path[i].run) {
            list.items[list.count - 1].tokens = path[i].run;
            list.items[list.count - 1].token_count = path[i].run_count;
        }
    }
    *known = list.count;
    uint32_t fresh = n->fresh.count - n->fresh_from;
    eng_item *items = base_arena_calloc(turn->arena, list.count + fresh, sizeof *items);
    if (!items)
        return gw_no_memory(err);
    if (list.count)
        memcpy(items, list.items, list.count * sizeof *items);
    memcpy(items + list.count, n->fresh.items + n->fresh_from, fresh * sizeof *items);
    turn->items = items;
    turn->chat.items = items;
    turn->chat.item_count = list.count + fresh;
    return BASE_OK;
}

static base_code match(gw_turn *turn, base_err *err)
{
    native *n = state(turn);
    uint32_t known = 0;
    bool behind = false;
    if (n->goes_on) {
        gw_digest root;
        GW_TRY(gw_session_root(&root, &turn->root, err));
        behind = n->head.exact && memcmp(&root, &n->head.root, sizeof root) == 0;
        if (behind) {
            turn->items[0].tokens = n->head.run;
            turn->items[0].token_count = n->head.run_count;
            turn->chat.prefix = n->head.prompt;
            turn->chat.prefix_count = n->head.prompt_count;
            known = 1;
        } else {
            GW_TRY(load_path(turn, &known, err));
        }
    }
    return gw_session_match(&turn->match, &turn->root, n->goes_on ? &n->head : NULL, behind,
                            turn->items, turn->chat.item_count, known, turn->arena, err);
}

static base_code check(gw_turn *turn, base_err *err)
{
    uint32_t item, call;
    if (!gw_bad_arguments(turn, &item, &call))
        return BASE_OK;
    return base_fail_param(err, BASE_INVALID, "items",
                           "items: the arguments of a call of '%.*s' must be the JSON text of an "
                           "object",
                           gw_shown(turn->items[item].calls[call].name.data, 64),
                           turn->items[item].calls[call].name.data);
}

/* ---- writing a turn ---- */

void gw_put_session_item(base_buf *out, const char *json, const char *call)
{
    if (!call) {
        base_buf_puts(out, json);
        return;
    }
    base_buf_puts(out, "{\"tool_call_id\":");
    base_buf_json_string(out, call, strlen(call));
    base_buf_puts(out, ",");
    base_buf_puts(out, json + 1);
}

json_t *gw_calls_of(const char *json)
{
    json_t *tree = json_loads(json, JSON_ALLOW_NUL, NULL);
    json_t *calls = json_incref(json_object_get(tree, "tool_calls"));
    json_decref(tree);
    return calls;
}

static bool is_custom(const json_t *calls)
{
    bool custom = false;
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const char *type = json_string_value(json_object_get(json_array_get(calls, i), "type"));
        custom |= type && strcmp(type, "custom") == 0;
    }
    return custom;
}

/* An item that calls custom tools, as the client got it. */
static void put_custom_item(base_buf *out, const char *json, const json_t *calls)
{
    json_t *item = json_loads(json, JSON_ALLOW_NUL, NULL);
    json_object_del(item, "tool_calls");
    char *rest = json_dumps(item, JSON_COMPACT);
    base_buf_add(out, rest ? rest : "", rest ? strlen(rest) - 1 : 0); /* it goes on */
    for (size_t i = 0; i < json_array_size(calls); i++) {
        base_buf_puts(out, i ? "," : ",\"tool_calls\":[");
        gw_put_made_call(out, json_array_get(calls, i), NULL);
    }
    base_buf_puts(out, "]}");
    out->failed |= !rest;
    free(rest);
    json_decref(item);
}

void gw_put_turn_item(base_buf *out, const char *json, json_t **calls)
{
    bool result = strncmp(json, "{\"role\":\"tool\"", 14) == 0;
    if (result) {
        const json_t *made = json_array_get(*calls, 0);
        gw_put_session_item(out, json, json_string_value(json_object_get(made, "id")));
        json_array_remove(*calls, 0);
        return;
    }
    json_decref(*calls);
    *calls = gw_calls_of(json);
    if (is_custom(*calls))
        put_custom_item(out, json, *calls);
    else
        gw_put_session_item(out, json, NULL);
}

const char *gw_turn_status_word(gw_turn_status status, eng_finish finish)
{
    return status == GW_TURN_FAILED      ? "failed"
           : status == GW_TURN_CANCELLED ? "cancelled"
           : finish == ENG_FINISH_LENGTH ? "incomplete"
                                         : "completed";
}

const char *gw_turn_finish_json(gw_turn_status status, eng_finish finish)
{
    return status != GW_TURN_COMPLETED   ? "null"
           : finish == ENG_FINISH_CALLS  ? "\"tool_calls\""
           : finish == ENG_FINISH_LENGTH ? "\"length\""
                                         : "\"stop\"";
}

void gw_put_turn_head(base_buf *out, const char *id, const char *session, const char *parent,
                      const char *status, int64_t created_ms)
{
    base_buf_printf(out, "{\"id\":\"%s\",\"object\":\"session.turn\",\"session\":\"%s\",", id,
                    session);
    if (parent[0])
        base_buf_printf(out, "\"parent\":\"%s\",", parent);
    else
        base_buf_puts(out, "\"parent\":null,");
    base_buf_printf(out, "\"status\":\"%s\",\"created_at\":%lld,", status,
                    (long long)(created_ms / 1000));
}

void gw_put_turn_cache(base_buf *out, const eng_usage *usage, const char *reason)
{
    base_buf_printf(out, ",\"cache\":{\"hit\":%u,\"reason\":", usage->cached_tokens);
    if (reason)
        base_buf_json_string(out, reason, strlen(reason));
    else
        base_buf_puts(out, "null");
    base_buf_puts(out, "}");
}

static void put_answer(base_buf *out, const gw_turn *turn)
{
    base_buf_puts(out, "{\"role\":\"assistant\",\"content\":");
    gw_put_text(out, &turn->text);
    if (turn->reasoning.length) {
        base_buf_puts(out, ",\"reasoning_content\":");
        gw_put_text(out, &turn->reasoning);
    }
    gw_put_calls(out, turn);
    base_buf_puts(out, "}");
}

/* What the turn brought. */
static void put_fresh(base_buf *out, gw_turn *turn)
{
    native *n = state(turn);
    base_buf json;
    base_buf_init(&json, 0);
    for (uint32_t i = n->goes_on ? n->fresh_from : 0; i < n->fresh.count; i++) {
        eng_text id = n->fresh.ids[i];
        char call[GW_NAME_BYTES_MAX + 1];
        snprintf(call, sizeof call, "%.*s", (int)id.length, id.data ? id.data : "");
        base_buf_clear(&json);
        gw_item_json(&json, &n->fresh.items[i]);
        gw_put_session_item(out, json.failed ? "{}" : json.data, id.length ? call : NULL);
        base_buf_puts(out, ",");
        out->failed |= json.failed;
    }
    base_buf_deinit(&json);
}

static void put_turn(base_buf *out, gw_turn *turn)
{
    gw_put_turn_head(out, turn->id.text, turn->session.text, turn->match.parent.text,
                     gw_turn_status_word(GW_TURN_COMPLETED, turn->finish), turn->created_ms);
    base_buf_printf(out, "\"finish_reason\":%s,\"items\":[",
                    gw_turn_finish_json(GW_TURN_COMPLETED, turn->finish));
    put_fresh(out, turn);
    put_answer(out, turn);
    base_buf_puts(out, "],");
    gw_chat_put_usage(turn, out);
    gw_put_turn_cache(out, &turn->usage, gw_miss_name(turn->cache.miss));
    base_buf_puts(out, "}");
}

static base_buf *begin_event(gw_turn *turn, const char *event)
{
    base_buf *out = &state(turn)->record;
    base_buf_clear(out);
    base_buf_printf(out, "event: %s\ndata: {", event);
    return out;
}

static void end_event(gw_turn *turn)
{
    base_buf_puts(&state(turn)->record, "}\n\n");
    gw_write_record(turn, &state(turn)->record);
}

static void open_stream(gw_turn *turn)
{
    gw_turn_stream_begin(turn);
    base_buf *out = begin_event(turn, "turn.created");
    base_buf_puts(out, "\"type\":\"turn.created\",\"turn\":");
    gw_put_turn_head(out, turn->id.text, turn->session.text, turn->match.parent.text, "in_progress",
                     turn->created_ms);
    base_buf_puts(out, "\"finish_reason\":null,\"items\":[],\"usage\":null,\"cache\":null}");
    end_event(turn);
}

static void part(gw_turn *turn, const eng_part *p)
{
    if (!gw_turn_streaming(turn) || p->kind == ENG_PART_CALL_END)
        return;
    bool call = p->kind == ENG_PART_CALL_BEGIN || p->kind == ENG_PART_CALL_ARGS;
    if (!p->length && p->kind != ENG_PART_CALL_BEGIN)
        return;
    base_buf *out = begin_event(turn, "turn.delta");
    base_buf_printf(out, "\"type\":\"%s\",",
                    call                            ? "tool_call"
                    : p->kind == ENG_PART_REASONING ? "reasoning"
                                                    : "text");
    if (call)
        base_buf_printf(out, "\"index\":%u,", p->call);
    if (p->kind == ENG_PART_CALL_BEGIN)
        base_buf_printf(out, "\"id\":\"%s\",", turn->calls[p->call].id.text);
    bool custom = call && turn->calls[p->call].custom;
    base_buf_puts(out, p->kind == ENG_PART_CALL_BEGIN ? "\"name\":"
                       : !call                        ? "\"text\":"
                       : custom                       ? "\"input\":"
                                                      : "\"arguments\":");
    base_buf_json_string(out, p->text, p->length);
    end_event(turn);
}

/* The results that were appended are part of a turn now; those of its own calls are to come. */
static void turn_page(gw_turn *turn)
{
    gw_appends *appends = turn->app->appends;
    gw_append_drop(appends, turn->identity.tenant, turn->session.text);
    if (turn->finish == ENG_FINISH_CALLS)
        gw_append_prefill(appends, &turn->identity, turn->session.text, turn->loop);
}

static void finish(gw_turn *turn)
{
    turn_page(turn);
    base_buf *out = &state(turn)->record;
    base_buf_clear(out);
    if (!turn->stream) {
        put_turn(out, turn);
        gw_turn_respond_json(turn, out);
        return;
    }
    begin_event(turn, "turn.completed");
    base_buf_puts(out, "\"type\":\"turn.completed\",\"turn\":");
    put_turn(out, turn);
    end_event(turn);
    gw_turn_stream_end(turn);
}

static void fail(gw_turn *turn, const gw_error_row *row, const char *param, const char *message)
{
    if (!gw_turn_streaming(turn)) {
        gw_turn_respond_error(turn, row, param, message);
        return;
    }
    base_buf *out = &state(turn)->record;
    base_buf_clear(out);
    base_buf_puts(out, "event: error\ndata: ");
    gw_error_json(out, row->type, row->code, param, message);
    base_buf_puts(out, "\n\n");
    gw_write_record(turn, out);
    gw_turn_stream_end(turn);
}

static void deinit(gw_turn *turn)
{
    native *n = state(turn);
    base_buf_deinit(&n->record);
    json_decref(n->config.json);
    json_decref(n->stored);
    json_decref(n->converted);
}

static const gw_dialect dialect = {
    .name = "sessions",
    .route = GW_SESSIONS_PATH "/{id}/turns",
    .parse = parse,
    .load = load,
    .match = match,
    .check = check,
    .open = open_stream,
    .part = part,
    .ending = gw_tell_calls,
    .finish = finish,
    .fail = fail,
    .ping = gw_write_comment,
    .deinit = deinit,
};

void gw_api_sessions_turn(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &dialect);
}
