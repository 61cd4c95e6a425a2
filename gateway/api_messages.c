/* api_messages: see the header. Top: reading a body (worker). Bottom: writing records (loop).
 *
 * A message's blocks become items: runs of text blocks a user item, each tool_result a tool item,
 * an assistant message one item with its text, thinking and calls. Blocks join without separator,
 * as the template joins parts. Not rendered, so that they neither reach the prompt nor a hash:
 * cache_control, is_error, citations, and the billing line that one client puts into its system
 * text anew with every request.
 *
 * A thinking block is signed with the turn that made it. One that comes back with its text needs no
 * signature: the ledger compares the text. One without text (display "omitted") is looked up by its
 * signature, so hidden reasoning returns even where the ledger alone would call it ambiguous.
 * Foreign, empty and missing signatures mean nothing and are fine; so is redacted_thinking.
 *
 * Read and applied: model, max_tokens, messages, system, tools, tool_choice, stream,
 * stop_sequences, temperature, top_p, top_k, thinking, output_config, metadata, and the
 * engine's seed, cache_salt and session_id. Thinking is off unless asked for, as this dialect's
 * clients expect. budget_tokens is a hint without effect. Server tools and their blocks in a
 * history are passed over. Refused by name: images, documents that are not text. */
#include "gateway/api_messages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/dialect.h"
#include "gateway/structured.h"
#include "gateway/seal.h"

#define STOPS_MAX 64
#define USER_ID_BYTES_MAX 512
#define ROUTE "/v1/messages"

/* Tools of types with a version's date are run by the vendor's servers. */
static const gw_tool_form tool_form = {.schema = "input_schema"};

typedef enum block_kind { BLOCK_THINKING, BLOCK_TEXT, BLOCK_CALL } block_kind;

/* A block of the answer; texts lie in the turn's buffers. */
typedef struct block {
    block_kind kind;
    uint32_t call;
    size_t offset, length;
} block;

typedef struct messages {
    bool omit_thinking, started;
    base_json raw;   /* worker: stands before the next element of `messages`, as it was sent */
    eng_text *links; /* [item_count], worker: the signature of a thinking block without text */
    block *blocks;   /* the last one is open */
    uint32_t block_count, block_capacity;
    base_buf record; /* scratch */
} messages;

static messages *state(gw_turn *turn)
{
    return turn->state_of_dialect;
}

/* ---- reading ---- */

/* Appends system text without its billing lines: `x-anthropic-billing-header: …` up to the end of
 * the line. Its value changes with every request and would cost the whole cached prefix. */
static void add_system(base_buf *out, eng_text text)
{
    static const char mark[] = "x-anthropic-billing-header:";
    size_t at = 0;
    while (at < text.length) {
        const char *from = text.data + at;
        const char *hit = memmem(from, text.length - at, mark, sizeof mark - 1);
        size_t before = hit ? (size_t)(hit - from) : text.length - at;
        bool whole_line = before == 0 || from[before - 1] == '\n';
        base_buf_add(out, from, before);
        at += before;
        if (!hit)
            break;
        const char *end = memchr(hit, '\n', text.length - at);
        at = end ? (size_t)(end - text.data) + whole_line : text.length;
    }
}

static base_code read_type(const char **type, const json_t *item, const char *path, base_err *err)
{
    if (!json_is_object(item))
        return gw_wrong_type(path, "", "an object", item, err);
    GW_TRY(gw_read_name(type, item, path, "type", GW_NAME_BYTES_MAX, err));
    return *type ? BASE_OK : gw_wrong_type(path, "type", "a string", NULL, err);
}

static base_code no_text_kind(const char *type, const char *path, base_err *err)
{
    char param[GW_PATH_BYTES];
    gw_name_path(param, "%s.type", path);
    if (strcmp(type, "image") == 0 || strcmp(type, "document") == 0)
        return base_fail_param(err, BASE_UNSUPPORTED, param,
                               "%s: this model reads text only, it takes no %s blocks", param,
                               type);
    return base_fail_param(err, BASE_INVALID, param, "%s '%.*s' is no kind of content here", param,
                           gw_shown(type, 32), type);
}

/* Appends what a block of a user's message or of a tool's result says. */
static base_code add_block(base_buf *out, const json_t *item, const char *path, base_err *err)
{
    const char *type = NULL;
    eng_text text = {0};
    char where[GW_PATH_BYTES];
    GW_TRY(read_type(&type, item, path, err));
    if (strcmp(type, "text") == 0) {
        GW_TRY(gw_read_text(&text, item, path, "text", err));
        if (!text.data)
            return gw_wrong_type(path, "text", "a string", NULL, err);
    } else if (strcmp(type, "document") == 0) {
        json_t *source;
        const char *kind = NULL;
        gw_name_path(where, "%s.source", path);
        GW_TRY(gw_read_object(&source, item, path, "source", err));
        GW_TRY(gw_read_name(&kind, source, where, "type", GW_NAME_BYTES_MAX, err));
        if (!kind || strcmp(kind, "text") != 0)
            return no_text_kind(type, path, err);
        GW_TRY(gw_read_text(&text, source, where, "data", err));
    } else if (strcmp(type, "search_result") == 0) {
        json_t *content;
        GW_TRY(gw_read_array(&content, item, path, "content", err));
        for (size_t i = 0; i < json_array_size(content); i++) {
            gw_name_path(where, "%s.content[%zu]", path, i);
            text = (eng_text){0};
            GW_TRY(gw_read_text(&text, json_array_get(content, i), where, "text", err));
            base_buf_add(out, text.data ? text.data : "", text.length);
        }
        return BASE_OK;
    } else if (strcmp(type, "tool_reference") == 0) {
        GW_TRY(gw_read_text(&text, item, path, "tool_name", err));
    } else {
        return no_text_kind(type, path, err);
    }
    base_buf_add(out, text.data ? text.data : "", text.length);
    return BASE_OK;
}

/* A string, or blocks joined; NULL data if absent. */
static base_code read_text_content(gw_turn *turn, eng_text *out, const json_t *content,
                                   const char *path, bool system, base_err *err)
{
    base_buf joined;
    base_code code = BASE_OK;
    *out = (eng_text){0};
    if (!content || json_is_null(content))
        return BASE_OK;
    if (!json_is_string(content) && !json_is_array(content))
        return gw_wrong_type("", path, "a string or an array of blocks", content, err);
    base_buf_init(&joined, 0);
    if (json_is_string(content)) {
        eng_text text = {json_string_value(content), json_string_length(content)};
        if (system)
            add_system(&joined, text);
        else
            base_buf_add(&joined, text.data, text.length);
    }
    for (size_t i = 0; i < json_array_size(content) && !code; i++) {
        char where[GW_PATH_BYTES];
        gw_name_path(where, "%s[%zu]", path, i);
        base_buf one;
        base_buf_init(&one, 0);
        code = add_block(&one, json_array_get(content, i), where, err);
        /* A block begins a line: each is looked through by itself. */
        if (system)
            add_system(&joined, (eng_text){one.data ? one.data : "", one.length});
        else
            base_buf_add(&joined, one.data ? one.data : "", one.length);
        joined.failed |= one.failed;
        base_buf_deinit(&one);
    }
    if (code) {
        base_buf_deinit(&joined);
        return code;
    }
    return gw_keep(turn, out, &joined, err);
}

/* Ids of calls are minted as "call_…" for all dialects and shown here as "toolu_…", which some
 * clients look for; others' ids stay as they are. */
static eng_text read_id(gw_turn *turn, const char *id)
{
    static const char own[] = "toolu_", minted[] = "call_";
    if (!id || strncmp(id, own, sizeof own - 1) != 0)
        return (eng_text){id, id ? strlen(id) : 0};
    size_t rest = strlen(id) - (sizeof own - 1), length = sizeof minted - 1 + rest;
    char *text = base_arena_alloc(turn->arena, length + 1);
    if (!text)
        return (eng_text){id, strlen(id)};
    memcpy(text, minted, sizeof minted - 1);
    memcpy(text + sizeof minted - 1, id + sizeof own - 1, rest + 1);
    return (eng_text){text, length};
}

/* ---- items ---- */

/* The items as they are found; a message gives at least one. */
typedef struct item_list {
    eng_item *items;
    eng_text *ids; /* which call a result answers */
    uint32_t count;
} item_list;

static base_code read_result(gw_turn *turn, item_list *list, const json_t *item, const char *path,
                             base_err *err)
{
    const char *id = NULL;
    bool error = false;
    char where[GW_PATH_BYTES];
    GW_TRY(gw_read_name(&id, item, path, "tool_use_id", GW_NAME_BYTES_MAX, err));
    if (!id)
        return gw_wrong_type(path, "tool_use_id", "a string", NULL, err);
    /* The result's own words say what went wrong; the template has no place for the mark. */
    GW_TRY(gw_read_bool(&error, NULL, item, path, "is_error", err));
    eng_item *out = &list->items[list->count];
    *out = (eng_item){.role = ENG_ROLE_TOOL};
    gw_name_path(where, "%s.content", path);
    GW_TRY(
        read_text_content(turn, &out->text, json_object_get(item, "content"), where, false, err));
    list->ids[list->count++] = read_id(turn, id);
    return BASE_OK;
}

/* Blocks that servers of the vendor put into a history: what their own tools were asked and said.
 * No tool of ours made them. */
static bool is_server_block(const char *type)
{
    return strstr(type, "tool_result") || strstr(type, "tool_use") || strstr(type, "mcp") ||
           strstr(type, "container") || strcmp(type, "compaction") == 0;
}

static base_code end_text(gw_turn *turn, item_list *list, base_buf *text, bool *open, base_err *err)
{
    if (!*open)
        return BASE_OK;
    *open = false;
    eng_item *out = &list->items[list->count++];
    *out = (eng_item){.role = ENG_ROLE_USER};
    return gw_keep(turn, &out->text, text, err);
}

static base_code read_user(gw_turn *turn, item_list *list, const json_t *content, const char *path,
                           base_err *err)
{
    uint32_t first = list->count;
    bool open = false;
    base_buf text;
    base_code code = BASE_OK;
    base_buf_init(&text, 0);
    for (size_t i = 0; i < json_array_size(content) && !code; i++) {
        const json_t *item = json_array_get(content, i);
        const char *type = NULL;
        char where[GW_PATH_BYTES];
        gw_name_path(where, "%s.content[%zu]", path, i);
        code = read_type(&type, item, where, err);
        if (code)
            break;
        if (strcmp(type, "tool_result") == 0) {
            code = end_text(turn, list, &text, &open, err);
            if (!code)
                code = read_result(turn, list, item, where, err);
        } else if (!is_server_block(type)) {
            open = true;
            code = add_block(&text, item, where, err);
        }
    }
    if (!code && list->count == first)
        open = true; /* nobody's word is an empty word */
    if (!code)
        code = end_text(turn, list, &text, &open, err);
    base_buf_deinit(&text);
    return code;
}

static base_code read_call(gw_turn *turn, eng_call *out, const json_t *item, eng_text raw,
                           const char *path, base_err *err)
{
    const char *id = NULL, *name = NULL;
    json_t *input;
    GW_TRY(gw_read_name(&id, item, path, "id", GW_NAME_BYTES_MAX, err));
    GW_TRY(gw_read_name(&name, item, path, "name", GW_NAME_BYTES_MAX, err));
    if (!name || !name[0])
        return gw_wrong_type(path, "name", "a string", NULL, err);
    GW_TRY(gw_read_object(&input, item, path, "input", err));
    /* The client's own text: its numbers keep every digit. */
    eng_text arguments = {"{}", 2};
    if (input && !gw_body_member(&arguments, raw.data, raw.length, "input"))
        return gw_wrong_type(path, "input", "an object", input, err);
    *out = (eng_call){.id = read_id(turn, id), .name = {name, strlen(name)}};
    out->arguments = arguments;
    return BASE_OK;
}

/* Where an assistant message's blocks go. */
typedef struct said {
    base_buf text, reasoning;
    eng_call *calls;
    uint32_t call_count;
    eng_text link;
} said;

static base_code read_said(gw_turn *turn, said *out, const json_t *item, eng_text raw,
                           const char *path, base_err *err)
{
    const char *type = NULL;
    eng_text text = {0}, signature = {0};
    GW_TRY(read_type(&type, item, path, err));
    if (strcmp(type, "text") == 0) {
        GW_TRY(gw_read_text(&text, item, path, "text", err));
        if (!text.data)
            return gw_wrong_type(path, "text", "a string", NULL, err);
        base_buf_add(&out->text, text.data, text.length);
    } else if (strcmp(type, "thinking") == 0) {
        GW_TRY(gw_read_text(&text, item, path, "thinking", err));
        GW_TRY(gw_read_text(&signature, item, path, "signature", err));
        base_buf_add(&out->reasoning, text.data ? text.data : "", text.length);
        if (!text.length)
            out->link = signature;
    } else if (strcmp(type, "tool_use") == 0) {
        GW_TRY(read_call(turn, &out->calls[out->call_count], item, raw, path, err));
        out->call_count++;
    }
    /* All else was said by a server of the vendor, or is redacted. */
    return BASE_OK;
}

static base_code read_assistant(gw_turn *turn, item_list *list, const json_t *content, eng_text raw,
                                const char *path, base_err *err)
{
    size_t count = json_array_size(content);
    said s = {.calls = base_arena_calloc(turn->arena, base_max(count, 1), sizeof *s.calls)};
    base_json array;
    base_code code = s.calls ? BASE_OK : gw_no_memory(err);
    eng_text raw_content = {"[]", 2};
    gw_body_member(&raw_content, raw.data, raw.length, "content");
    gw_raw_begin(&array, raw_content);
    for (size_t i = 0; i < count && !code; i++) {
        char where[GW_PATH_BYTES];
        gw_name_path(where, "%s.content[%zu]", path, i);
        code = read_said(turn, &s, json_array_get(content, i), gw_raw_next(&array), where, err);
    }
    eng_item *out = &list->items[list->count];
    *out = (eng_item){.role = ENG_ROLE_ASSISTANT, .calls = s.calls, .call_count = s.call_count};
    bool thought = s.reasoning.length > 0;
    if (!code)
        code = gw_keep(turn, &out->text, &s.text, err);
    if (!code && thought)
        code = gw_keep(turn, &out->reasoning, &s.reasoning, err);
    if (!thought)
        state(turn)->links[list->count] = s.link;
    list->count++;
    base_buf_deinit(&s.text);
    base_buf_deinit(&s.reasoning);
    return code;
}

static base_code read_message(gw_turn *turn, item_list *list, const json_t *message, size_t index,
                              base_err *err)
{
    char path[GW_PATH_BYTES], where[GW_PATH_BYTES];
    const char *role = NULL;
    eng_text raw = gw_raw_next(&state(turn)->raw);
    gw_name_path(path, "messages[%zu]", index);
    if (!json_is_object(message))
        return gw_wrong_type(path, "", "an object", message, err);
    GW_TRY(gw_read_name(&role, message, path, "role", GW_NAME_BYTES_MAX, err));
    if (!role)
        return gw_wrong_type(path, "role", "a string", NULL, err);
    const json_t *content = json_object_get(message, "content");
    if (!json_is_string(content) && !json_is_array(content))
        return gw_wrong_type(path, "content", "a string or an array of blocks", content, err);
    eng_text text = {json_string_value(content), json_string_length(content)};
    eng_item *out = &list->items[list->count];
    if (strcmp(role, "system") == 0 || strcmp(role, "developer") == 0) {
        /* In its own place: moved to the front it would change the prefix of all that was said. */
        gw_name_path(where, "%s.content", path);
        *out = (eng_item){.role = ENG_ROLE_SYSTEM};
        GW_TRY(read_text_content(turn, &out->text, content, where, true, err));
        list->count += out->text.length > 0;
        return BASE_OK;
    }
    bool user = strcmp(role, "user") == 0;
    if (!user && strcmp(role, "assistant") != 0) {
        gw_name_path(where, "%s.role", path);
        return base_fail_param(err, BASE_INVALID, where,
                               "%s '%.*s' is not one of user, assistant, system", where,
                               gw_shown(role, 32), role);
    }
    if (json_is_array(content))
        return user ? read_user(turn, list, content, path, err)
                    : read_assistant(turn, list, content, raw, path, err);
    *out = (eng_item){.role = user ? ENG_ROLE_USER : ENG_ROLE_ASSISTANT, .text = text};
    list->count++;
    return BASE_OK;
}

static base_code read_messages(gw_turn *turn, eng_text raw, base_err *err)
{
    json_t *array;
    GW_TRY(gw_read_array(&array, turn->json, "", "messages", err));
    size_t count = json_array_size(array), room = count + 1;
    if (!count)
        return base_fail_param(err, BASE_INVALID, "messages",
                               "messages must be an array of at least one message");
    for (size_t i = 0; i < count; i++)
        room += json_array_size(json_object_get(json_array_get(array, i), "content"));
    item_list list = {.items = base_arena_calloc(turn->arena, room, sizeof *list.items),
                      .ids = base_arena_calloc(turn->arena, room, sizeof *list.ids)};
    state(turn)->links = base_arena_calloc(turn->arena, room, sizeof *state(turn)->links);
    if (!list.items || !list.ids || !state(turn)->links)
        return gw_no_memory(err);
    gw_raw_begin(&state(turn)->raw, raw);
    eng_item *system = &list.items[0];
    system->role = ENG_ROLE_SYSTEM;
    GW_TRY(read_text_content(turn, &system->text, json_object_get(turn->json, "system"), "system",
                             true, err));
    list.count = system->text.length > 0;
    for (size_t i = 0; i < count; i++)
        GW_TRY(read_message(turn, &list, json_array_get(array, i), i, err));
    if (!list.count)
        return base_fail_param(err, BASE_INVALID, "messages", "messages hold no text at all");
    gw_order_results(list.items, list.ids, list.count);
    turn->items = list.items;
    turn->chat.items = list.items;
    turn->chat.item_count = list.count;
    /* An answer that was begun for the model is gone on with. */
    const eng_item *last = &list.items[list.count - 1];
    turn->chat.continue_last = last->role == ENG_ROLE_ASSISTANT && !last->call_count;
    return BASE_OK;
}

/* ---- tools ---- */

static base_code read_named(gw_turn *turn, const json_t *choice, base_err *err)
{
    const char *name = NULL;
    GW_TRY(gw_read_name(&name, choice, "tool_choice", "name", GW_NAME_BYTES_MAX, err));
    if (!name)
        return gw_wrong_type("tool_choice", "name", "a string", NULL, err);
    turn->request.tool_choice = ENG_TOOL_NAMED;
    return gw_find_tool(turn, &tool_form, name, "tool_choice.name", err);
}

static base_code read_tool_choice(gw_turn *turn, base_err *err)
{
    json_t *choice;
    const char *type = NULL;
    bool single = false;
    turn->request.tool_choice = turn->chat.tool_count ? ENG_TOOL_AUTO : ENG_TOOL_NONE;
    GW_TRY(gw_read_object(&choice, turn->json, "", "tool_choice", err));
    if (!choice)
        return BASE_OK;
    GW_TRY(read_type(&type, choice, "tool_choice", err));
    GW_TRY(gw_read_bool(&single, NULL, choice, "tool_choice", "disable_parallel_tool_use", err));
    turn->request.call_max = single ? 1 : 0;
    if (strcmp(type, "auto") == 0 || strcmp(type, "none") == 0 || strcmp(type, "any") == 0)
        return gw_read_tool_mode(turn, type, "tool_choice", err);
    if (strcmp(type, "tool") == 0)
        return read_named(turn, choice, err);
    return base_fail_param(err, BASE_INVALID, "tool_choice.type",
                           "tool_choice.type '%.*s' is not one of auto, any, tool, none",
                           gw_shown(type, 32), type);
}

/* ---- the other fields ---- */

static base_code read_thinking(gw_turn *turn, base_err *err)
{
    json_t *thinking;
    const char *type = NULL, *display = NULL;
    int64_t budget = 0;
    turn->chat.thinking = ENG_THINK_DISABLED;
    GW_TRY(gw_read_object(&thinking, turn->json, "", "thinking", err));
    if (!thinking)
        return BASE_OK;
    GW_TRY(read_type(&type, thinking, "thinking", err));
    GW_TRY(gw_read_int(&budget, NULL, thinking, "thinking", "budget_tokens", 0, INT64_MAX, err));
    GW_TRY(gw_read_name(&display, thinking, "thinking", "display", GW_NAME_BYTES_MAX, err));
    state(turn)->omit_thinking = display && strcmp(display, "omitted") == 0;
    if (strcmp(type, "enabled") == 0)
        turn->chat.thinking = ENG_THINK_ENABLED;
    else if (strcmp(type, "adaptive") == 0)
        turn->chat.thinking = ENG_THINK_ADAPTIVE;
    else if (strcmp(type, "disabled") != 0)
        return base_fail_param(err, BASE_INVALID, "thinking.type",
                               "thinking.type '%.*s' is not one of enabled, adaptive, disabled",
                               gw_shown(type, 32), type);
    return BASE_OK;
}

static base_code read_output(gw_turn *turn, base_err *err)
{
    static const char *const keys[] = {"output_config", "format", NULL};
    static const char *const old_keys[] = {"output_format", NULL};
    json_t *config, *format = NULL, *old_format;
    const char *effort = NULL;
    GW_TRY(gw_read_object(&config, turn->json, "", "output_config", err));
    GW_TRY(gw_read_object(&old_format, turn->json, "", "output_format", err));
    if (config) {
        GW_TRY(gw_read_name(&effort, config, "output_config", "effort", GW_NAME_BYTES_MAX, err));
        GW_TRY(gw_read_object(&format, config, "output_config", "format", err));
    }
    GW_TRY(gw_read_format(turn, format, keys, NULL, err));
    GW_TRY(gw_read_format(turn, old_format, old_keys, NULL, err));
    GW_TRY(gw_read_engine_formats(turn, err));
    gw_set_effort(turn, effort);
    return gw_read_bool(&turn->stream, NULL, turn->json, "", "stream", err);
}

static base_code read_rest(gw_turn *turn, base_err *err)
{
    json_t *metadata;
    const char *user = NULL;
    eng_text tier = {0};
    GW_TRY(gw_read_text(&tier, turn->json, "", "service_tier", err));
    GW_TRY(gw_read_label(turn, err));
    GW_TRY(gw_read_object(&metadata, turn->json, "", "metadata", err));
    if (!metadata)
        return BASE_OK;
    GW_TRY(gw_read_name(&user, metadata, "metadata", "user_id", USER_ID_BYTES_MAX, err));
    if (!user)
        return BASE_OK;
    base_buf json;
    eng_text text;
    base_buf_init(&json, 0);
    base_buf_puts(&json, "{\"user_id\":");
    base_buf_json_string(&json, user, strlen(user));
    base_buf_puts(&json, "}");
    GW_TRY(gw_keep(turn, &text, &json, err));
    turn->metadata = text.data;
    return BASE_OK;
}

static base_code parse(gw_turn *turn, base_err *err)
{
    eng_text tools, list;
    json_t *thread;
    bool seen = false;
    turn->state_of_dialect = base_arena_calloc(turn->arena, 1, sizeof(messages));
    if (!turn->state_of_dialect)
        return gw_no_memory(err);
    turn->response = gw_id_mint("msg_");
    GW_TRY(gw_keep_raw(turn, &tools, "tools", err));
    GW_TRY(gw_keep_raw(turn, &list, "messages", err));
    GW_TRY(gw_parse_body(turn, err));
    GW_TRY(gw_read_object(&thread, turn->json, "", "thread", err));
    /* The client would send the new messages alone from then on. Told by this code it goes on with
     * whole histories, which the ledger knows all the same. */
    if (thread)
        return gw_turn_reject(turn, err, 400, "invalid_request_error", GW_ERROR_NO_THREADS,
                              "thread", "thread is not offered; send the whole history");
    GW_TRY(gw_read_limit(turn, "max_tokens", &seen, err));
    if (!seen && !turn->dialect->dry)
        return base_fail_param(err, BASE_INVALID, "max_tokens", "max_tokens must be given");
    GW_TRY(read_messages(turn, list, err));
    GW_TRY(gw_read_tools(turn, &tool_form, tools, err));
    GW_TRY(read_tool_choice(turn, err));
    GW_TRY(gw_read_sampling_basic(turn, err));
    json_t *stops;
    GW_TRY(gw_read_array(&stops, turn->json, "", "stop_sequences", err));
    GW_TRY(gw_read_stops(turn, "stop_sequences", STOPS_MAX, err));
    GW_TRY(read_thinking(turn, err));
    GW_TRY(read_output(turn, err));
    return read_rest(turn, err);
}

/* ---- reasoning by its signature ---- */

/* The reasoning of the turn that a signature of ours names. */
static void restore(gw_turn *turn, eng_item *item, eng_text signature)
{
    gw_id id;
    gw_turn_row row;
    if (!gw_seal_read(turn->app->seal, &id, turn->identity.tenant, signature) ||
        gw_ledger_turn(turn->app->ledger, &row, turn->identity.tenant, id.text, turn->arena,
                       NULL) ||
        !row.answer)
        return;
    json_t *answer = json_loads(row.answer, JSON_ALLOW_NUL, NULL);
    const json_t *reasoning = json_object_get(answer, "reasoning_content");
    if (json_string_length(reasoning)) {
        size_t length = json_string_length(reasoning);
        char *text = base_arena_copy(turn->arena, json_string_value(reasoning), length);
        item->reasoning = (eng_text){text, text ? length : 0};
    }
    json_decref(answer);
}

/* Only what the ledger could not place by itself is looked up; with its reasoning back, an item is
 * found like one that its client sent whole. What a client edited is still not found: its text
 * differs. */
static base_code check(gw_turn *turn, base_err *err)
{
    messages *m = state(turn);
    bool restored = false;
    for (uint32_t i = 0; i < turn->chat.item_count; i++) {
        eng_item *item = &turn->items[i];
        if (item->role != ENG_ROLE_ASSISTANT || item->tokens || !m->links[i].length)
            continue;
        restore(turn, item, m->links[i]);
        restored |= item->reasoning.length > 0;
    }
    if (!restored)
        return BASE_OK;
    return gw_ledger_match(turn->app->ledger, &turn->match, &turn->root, turn->items,
                           turn->chat.item_count, turn->arena, err);
}

/* ---- writing ---- */

static base_buf *begin_record(gw_turn *turn, const char *event)
{
    base_buf *out = &state(turn)->record;
    base_buf_clear(out);
    base_buf_printf(out, "event: %s\ndata: {\"type\":\"%s\"", event, event);
    return out;
}

/* `"usage":{…`, left open. The three input counts add up to the prompt. What is new in it is
 * written to the cache, all but its last token, which every request runs for itself. */
static void put_usage(const gw_turn *turn, base_buf *out, uint32_t output_tokens)
{
    const eng_usage *usage = &turn->usage;
    uint32_t cached = (uint32_t)base_min(usage->cached_tokens, usage->prompt_tokens);
    uint32_t fresh = usage->prompt_tokens - cached, written = fresh ? fresh - 1 : 0;
    base_buf_printf(out,
                    "\"usage\":{\"input_tokens\":%u,\"cache_creation_input_tokens\":%u,"
                    "\"cache_read_input_tokens\":%u,\"cache_creation\":{"
                    "\"ephemeral_5m_input_tokens\":%u,\"ephemeral_1h_input_tokens\":0},"
                    "\"output_tokens\":%u,\"service_tier\":\"standard\",\"server_tool_use\":null",
                    fresh - written, written, cached, written, output_tokens);
}

static void put_final_usage(const gw_turn *turn, base_buf *out)
{
    put_usage(turn, out, turn->usage.output_tokens);
    base_buf_printf(out, ",\"output_tokens_details\":{\"thinking_tokens\":%u},",
                    turn->usage.reasoning_tokens);
    gw_turn_extension(turn, out);
    base_buf_puts(out, "}");
}

/* `"id":…,"type":"message","role":"assistant","model":…,"content":[` */
static void put_head(const gw_turn *turn, base_buf *out)
{
    base_buf_printf(out, "\"id\":\"%s\",\"type\":\"message\",\"role\":\"assistant\",\"model\":",
                    turn->response.text);
    gw_put_string(out, turn->model, strlen(turn->model));
    base_buf_puts(out, ",\"content\":[");
}

static void put_call_id(base_buf *out, const gw_turn_call *call)
{
    base_buf_printf(out, "\"toolu_%s\"", call->id.text + strlen("call_"));
}

static void put_signature(const gw_turn *turn, base_buf *out)
{
    char signature[GW_SEAL_TEXT_BYTES + 1];
    gw_seal_turn(turn->app->seal, signature, turn->identity.tenant, &turn->id);
    base_buf_printf(out, "\"signature\":\"%s\"", signature);
}

static void end_record(gw_turn *turn)
{
    base_buf *out = &state(turn)->record;
    base_buf_puts(out, "}\n\n");
    gw_write_record(turn, out);
}

static void open_stream(gw_turn *turn)
{
    if (turn->exchange)
        gw_exchange_add_header(turn->exchange, "request-id", turn->request_id);
    gw_turn_stream_begin(turn);
}

/* Its usage is all that some clients ever read of the cache, so it waits for the engine's match. */
static void started(gw_turn *turn)
{
    if (!turn->stream || state(turn)->started)
        return;
    state(turn)->started = true;
    base_buf *out = begin_record(turn, "message_start");
    base_buf_puts(out, ",\"message\":{");
    put_head(turn, out);
    base_buf_puts(out, "],\"stop_reason\":null,\"stop_sequence\":null,\"stop_details\":null,");
    put_usage(turn, out, 1);
    base_buf_puts(out, "}}");
    end_record(turn);
}

static void begin_delta(gw_turn *turn, const char *type, const char *field)
{
    base_buf *out = begin_record(turn, "content_block_delta");
    base_buf_printf(out, ",\"index\":%u,\"delta\":{\"type\":\"%s\",%s",
                    state(turn)->block_count - 1, type, field);
}

static void end_delta(gw_turn *turn)
{
    base_buf_puts(&state(turn)->record, "}");
    end_record(turn);
}

static void close_block(gw_turn *turn)
{
    messages *m = state(turn);
    if (!m->block_count || !turn->stream)
        return;
    if (m->blocks[m->block_count - 1].kind == BLOCK_THINKING) {
        begin_delta(turn, "signature_delta", "");
        put_signature(turn, &m->record);
        end_delta(turn);
    }
    base_buf_printf(begin_record(turn, "content_block_stop"), ",\"index\":%u", m->block_count - 1);
    end_record(turn);
}

static block *open_block(gw_turn *turn, block_kind kind, const eng_part *p)
{
    messages *m = state(turn);
    if (m->block_count == m->block_capacity) {
        uint32_t capacity = m->block_capacity ? m->block_capacity * 2 : 8;
        block *more = realloc(m->blocks, capacity * sizeof *more);
        if (!more) {
            turn->lossy = true;
            return NULL;
        }
        m->blocks = more;
        m->block_capacity = capacity;
    }
    const base_buf *text = kind == BLOCK_THINKING ? &turn->reasoning : &turn->text;
    block *b = &m->blocks[m->block_count++];
    bool call = kind == BLOCK_CALL;
    *b = (block){kind, call ? p->call : 0, call ? 0 : text->length - p->length, 0};
    if (!turn->stream)
        return b;
    base_buf *out = begin_record(turn, "content_block_start");
    base_buf_printf(out, ",\"index\":%u,\"content_block\":{", m->block_count - 1);
    if (kind == BLOCK_THINKING) {
        base_buf_puts(out, "\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}");
    } else if (kind == BLOCK_TEXT) {
        base_buf_puts(out, "\"type\":\"text\",\"text\":\"\"}");
    } else {
        base_buf_puts(out, "\"type\":\"tool_use\",\"id\":");
        put_call_id(out, &turn->calls[p->call]);
        base_buf_puts(out, ",\"name\":");
        gw_put_string(out, p->text, p->length);
        base_buf_puts(out, ",\"input\":{}}");
    }
    end_record(turn);
    return b;
}

/* A block stays open until the next one begins or the turn is committed: a client may run a tool as
 * soon as its block has ended. */
static void part(gw_turn *turn, const eng_part *p)
{
    messages *m = state(turn);
    block_kind kind = p->kind == ENG_PART_REASONING ? BLOCK_THINKING
                      : p->kind == ENG_PART_TEXT    ? BLOCK_TEXT
                                                    : BLOCK_CALL;
    if (p->kind == ENG_PART_CALL_END || (p->kind != ENG_PART_CALL_BEGIN && !p->length))
        return;
    started(turn);
    block *b = m->block_count ? &m->blocks[m->block_count - 1] : NULL;
    if (!b || b->kind != kind || b->call != (kind == BLOCK_CALL ? p->call : 0)) {
        close_block(turn);
        b = open_block(turn, kind, p);
        if (!b)
            return;
    }
    if (kind != BLOCK_CALL)
        b->length += p->length;
    if (!turn->stream || p->kind == ENG_PART_CALL_BEGIN ||
        (kind == BLOCK_THINKING && m->omit_thinking))
        return;
    if (kind == BLOCK_THINKING)
        begin_delta(turn, "thinking_delta", "\"thinking\":");
    else if (kind == BLOCK_TEXT)
        begin_delta(turn, "text_delta", "\"text\":");
    else
        begin_delta(turn, "input_json_delta", "\"partial_json\":");
    gw_put_string(&m->record, p->text, p->length);
    end_delta(turn);
}

/* `"stop_reason":…,"stop_sequence":…,"stop_details":null` */
static void put_stop(const gw_turn *turn, base_buf *out)
{
    const eng_usage *usage = &turn->usage;
    bool window = (uint64_t)usage->prompt_tokens + usage->output_tokens >=
                  eng_get_info(turn->app->engine)->context_max;
    bool sequence = turn->finish == ENG_FINISH_STOP && turn->stop_index >= 0 &&
                    (uint32_t)turn->stop_index < turn->request.stop_count;
    const char *reason = turn->finish == ENG_FINISH_LENGTH && window
                             ? "model_context_window_exceeded"
                         : turn->finish == ENG_FINISH_LENGTH ? "max_tokens"
                         : sequence                          ? "stop_sequence"
                         : gw_turn_called(turn)              ? "tool_use"
                                                             : "end_turn";
    base_buf_printf(out, "\"stop_reason\":\"%s\",\"stop_sequence\":", reason);
    if (sequence)
        gw_put_string(out, turn->request.stops[turn->stop_index].data,
                      turn->request.stops[turn->stop_index].length);
    else
        base_buf_puts(out, "null");
    base_buf_puts(out, ",\"stop_details\":null");
}

static void finish_stream(gw_turn *turn)
{
    started(turn);
    close_block(turn);
    base_buf *out = begin_record(turn, "message_delta");
    base_buf_puts(out, ",\"delta\":{");
    put_stop(turn, out);
    base_buf_puts(out, "},");
    put_final_usage(turn, out);
    end_record(turn);
    begin_record(turn, "message_stop");
    end_record(turn);
    gw_turn_stream_end(turn);
}

/* A call that was cut off has no whole object; the client gets an empty one, as its input must be
 * an object. */
static void put_input(base_buf *out, const base_buf *arguments)
{
    base_json json;
    base_json_init(&json, arguments->data ? arguments->data : "", arguments->length,
                   BASE_JSON_DEPTH_MAX);
    base_json_kind first = base_json_next(&json), kind = first;
    while (kind != BASE_JSON_END && kind != BASE_JSON_ERROR)
        kind = base_json_next(&json);
    if (kind == BASE_JSON_END && first == BASE_JSON_OBJECT_BEGIN)
        base_buf_add(out, arguments->data, arguments->length);
    else
        base_buf_puts(out, "{}");
}

static void put_block(const gw_turn *turn, base_buf *out, const block *b, bool omit_thinking)
{
    if (b->kind == BLOCK_THINKING) {
        base_buf_puts(out, "{\"type\":\"thinking\",\"thinking\":");
        gw_put_string(out, omit_thinking ? "" : turn->reasoning.data + b->offset,
                      omit_thinking ? 0 : b->length);
        base_buf_puts(out, ",");
        put_signature(turn, out);
    } else if (b->kind == BLOCK_TEXT) {
        base_buf_puts(out, "{\"type\":\"text\",\"text\":");
        gw_put_string(out, turn->text.data + b->offset, b->length);
        base_buf_puts(out, ",\"citations\":null");
    } else {
        const gw_turn_call *call = &turn->calls[b->call];
        base_buf_puts(out, "{\"type\":\"tool_use\",\"id\":");
        put_call_id(out, call);
        base_buf_puts(out, ",\"name\":");
        gw_put_string(out, call->name.data, call->name.length);
        base_buf_puts(out, ",\"input\":");
        put_input(out, &call->arguments);
    }
    base_buf_puts(out, "}");
}

static void finish_whole(gw_turn *turn)
{
    messages *m = state(turn);
    base_buf *out = &m->record;
    base_buf_clear(out);
    base_buf_puts(out, "{");
    put_head(turn, out);
    for (uint32_t i = 0; i < m->block_count; i++) {
        base_buf_puts(out, i ? "," : "");
        put_block(turn, out, &m->blocks[i], m->omit_thinking);
    }
    base_buf_puts(out, "],");
    put_stop(turn, out);
    base_buf_puts(out, ",\"container\":null,");
    put_final_usage(turn, out);
    base_buf_puts(out, "}");
    if (turn->exchange && !out->failed)
        gw_exchange_add_header(turn->exchange, "request-id", turn->request_id);
    gw_turn_respond_json(turn, out);
}

static void finish(gw_turn *turn)
{
    if (turn->stream)
        finish_stream(turn);
    else
        finish_whole(turn);
}

/* What clients of this dialect look for when they decide to compact. */
static const char *own_words(char out[192], const gw_error_row *row, const char *message)
{
    static const char digits[] = "0123456789";
    const char *window = strpbrk(message, digits);
    const char *wanted = window ? strpbrk(window + strspn(window, digits), digits) : NULL;
    if (!row->code || strcmp(row->code, "context_length_exceeded") != 0 || !wanted)
        return message;
    snprintf(out, 192, "prompt is too long: %.*s tokens > %.*s maximum",
             (int)strspn(wanted, digits), wanted, (int)strspn(window, digits), window);
    return out;
}

static void fail(gw_turn *turn, const gw_error_row *row, const char *param, const char *message)
{
    char words[192];
    gw_error_row own = gw_error_messages_row(row);
    message = own_words(words, row, message);
    if (!gw_turn_streaming(turn)) {
        gw_turn_respond_error(turn, &own, param, message);
        return;
    }
    base_buf *out = &state(turn)->record;
    base_buf_clear(out);
    base_buf_puts(out, "event: error\ndata: ");
    gw_error_messages_json(out, &own, message, turn->request_id);
    base_buf_puts(out, "\n\n");
    gw_write_record(turn, out);
    gw_turn_stream_end(turn);
}

static void ping(gw_turn *turn)
{
    static const char record[] = "event: ping\ndata: {\"type\":\"ping\"}\n\n";
    gw_turn_write(turn, record, sizeof record - 1);
}

static void deinit(gw_turn *turn)
{
    base_buf_deinit(&state(turn)->record);
    free(state(turn)->blocks);
}

static const gw_dialect dialect = {
    .name = "messages",
    .route = ROUTE,
    .anthropic = true,
    .parse = parse,
    .check = check,
    .open = open_stream,
    .started = started,
    .part = part,
    .finish = finish,
    .fail = fail,
    .ping = ping,
    .deinit = deinit,
};

void gw_api_messages_handle(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &dialect);
}

/* ---- counting ---- */

static void finish_count(gw_turn *turn)
{
    base_buf_printf(&turn->text, "{\"input_tokens\":%u}", turn->prompt.token_count);
    if (turn->exchange && !turn->text.failed)
        gw_exchange_add_header(turn->exchange, "request-id", turn->request_id);
    gw_turn_respond_json(turn, &turn->text);
}

static const gw_dialect count_dialect = {
    .name = "count_tokens",
    .route = ROUTE "/count_tokens",
    .dry = true,
    .parse = parse,
    .check = check,
    .finish = finish_count,
    .fail = fail,
    .deinit = deinit,
};

void gw_api_messages_count(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &count_dialect);
}
