#include "gateway/response_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/dialect.h"
#include "gateway/ledger_conversation.h"
#include "gateway/seal.h"

#define USE "whimbrel run 1"
#define PARENT_BYTES 16 /* of the node's digest, in hex behind the sealed text */
#define TEMPLATE_BYTES 32

void gw_stream_name(char out[GW_TAPE_NAME_MAX], int64_t tenant, const char *response)
{
    snprintf(out, GW_TAPE_NAME_MAX, "stream %lld %.40s", (long long)tenant, response);
}

/* ---- sealing ---- */

/* Sealed text, a dot, the parent. */
bool gw_run_seal(base_buf *out, const gw_turn *turn)
{
    uint32_t count = turn->lead + turn->run_tokens;
    char parent[2 * PARENT_BYTES + 1];
    base_buf content;
    if (!turn->run_tokens || turn->chat.continue_last || !turn->match.chain)
        return false;
    const gw_digest *node = &turn->match.chain[turn->chat.item_count];
    for (int i = 0; i < PARENT_BYTES; i++)
        snprintf(parent + 2 * i, 3, "%02x", node->bytes[i]);
    base_buf_init(&content, 0);
    base_buf_add(&content, eng_get_info(turn->app->engine)->template_id, TEMPLATE_BYTES);
    base_buf_add(&content, turn->run, count * sizeof *turn->run);
    bool good = !content.failed && !gw_seal_wrap(turn->app->seal, out, USE, turn->identity.tenant,
                                                 (eng_text){parent, 2 * PARENT_BYTES}, content.data,
                                                 content.length, NULL);
    base_buf_deinit(&content);
    base_buf_printf(out, ".%s", parent);
    base_buf_add(out, "", 1);
    return good && !out->failed;
}

/* What a run says. */
typedef struct decoded {
    base_buf text, names[64], arguments[64];
    uint32_t calls;
    bool failed;
} decoded;

static void on_event(void *ctx, const eng_event *event)
{
    decoded *d = ctx;
    for (uint32_t i = 0; i < event->part_count; i++) {
        const eng_part *p = &event->parts[i];
        base_buf *to = NULL;
        if (p->kind == ENG_PART_TEXT) {
            to = &d->text;
        } else if (p->kind == ENG_PART_CALL_BEGIN || p->kind == ENG_PART_CALL_ARGS) {
            d->failed |= p->call >= 64;
            if (!d->failed)
                to = p->kind == ENG_PART_CALL_BEGIN ? &d->names[p->call] : &d->arguments[p->call];
            d->calls = p->call + 1 > d->calls ? p->call + 1 : d->calls;
        }
        if (to) {
            base_buf_add(to, p->text, p->length);
            d->failed |= to->failed;
        }
    }
}

static eng_text trimmed(const char *data, size_t length)
{
    while (length && strchr(" \t\r\n", data[length - 1]))
        length--;
    while (length && strchr(" \t\r\n", *data)) {
        data++;
        length--;
    }
    return (eng_text){data, length};
}

static bool same_text(eng_text a, const base_buf *b)
{
    eng_text x = trimmed(a.data ? a.data : "", a.length),
             y = trimmed(b->data ? b->data : "", b->length);
    return x.length == y.length && memcmp(x.data, y.data, x.length) == 0;
}

/* Equal as JSON, or as they stand. */
static bool same_arguments(eng_text a, const base_buf *b)
{
    if (same_text(a, b))
        return true;
    json_t *x = json_loadb(a.data ? a.data : "", a.length, JSON_ALLOW_NUL, NULL);
    json_t *y = json_loadb(b->data ? b->data : "", b->length, JSON_ALLOW_NUL, NULL);
    bool same = x && y && json_equal(x, y);
    json_decref(x);
    json_decref(y);
    return same;
}

/* Whether the client sends back what the run said. What it edited wins. */
static bool says(const gw_turn *turn, const eng_item *item, const int32_t *run, uint32_t count)
{
    decoded *d = calloc(1, sizeof *d);
    if (!d)
        return false;
    /* The run begins with the mark of the thinking mode where there is one. */
    eng_thinking thinking = turn->root.thinking;
    bool marked = thinking == ENG_THINK_ENABLED || thinking == ENG_THINK_DISABLED;
    uint32_t lead = marked && count ? 1 : 0;
    eng_request request = {.parse = ENG_PARSE_CHAT,
                           .starts_in_reasoning = thinking == ENG_THINK_ENABLED,
                           .thinking = thinking,
                           .tools = turn->chat.tools,
                           .tool_count = turn->chat.tool_count};
    eng_sink sink = {.event = on_event, .ctx = d};
    bool same = !eng_replay(turn->app->engine, &request, run + lead, count - lead, NULL, 0, true,
                            &sink, NULL) &&
                !d->failed && same_text(item->text, &d->text) && item->call_count == d->calls;
    for (uint32_t i = 0; same && i < d->calls; i++)
        same = same_text(item->calls[i].name, &d->names[i]) &&
               same_arguments(item->calls[i].arguments, &d->arguments[i]);
    base_buf_deinit(&d->text);
    for (uint32_t i = 0; i < 64; i++) {
        base_buf_deinit(&d->names[i]);
        base_buf_deinit(&d->arguments[i]);
    }
    free(d);
    return same;
}

/* The run of a seal that is one of ours; empty for others. */
static base_code open_seal(gw_turn *turn, base_buf *content, const gw_sealed *sealed, base_err *err)
{
    eng_text text = sealed->text;
    const char *dot = text.length ? memrchr(text.data, '.', text.length) : NULL;
    if (!gw_seal_is_ours(text))
        return BASE_OK;
    size_t length = (size_t)(dot - text.data);
    base_code code = gw_seal_unwrap(turn->app->seal, content, USE, turn->identity.tenant,
                                    (eng_text){dot + 1, text.length - length - 1},
                                    (eng_text){text.data, length}, NULL);
    if (!code || (sealed->kept && code != BASE_NOMEM))
        return BASE_OK;
    char path[GW_PATH_BYTES];
    gw_name_path(path, "%s[%u].encrypted_content", sealed->field, sealed->at);
    return code == BASE_NOMEM
               ? gw_no_memory(err)
               : gw_turn_reject(turn, err, 400, "invalid_request_error",
                                "invalid_encrypted_content", path,
                                "%s could not be verified: it was changed or is another's", path);
}

static base_code unseal(gw_turn *turn, eng_item *item, const gw_sealed *sealed, base_err *err)
{
    const eng_info *info = eng_get_info(turn->app->engine);
    base_buf content;
    base_buf_init(&content, 0);
    base_code code = open_seal(turn, &content, sealed, err);
    size_t bytes = content.length > TEMPLATE_BYTES ? content.length - TEMPLATE_BYTES : 0;
    if (!code && !item->tokens && bytes &&
        memcmp(content.data, info->template_id, TEMPLATE_BYTES) == 0) {
        int32_t *run = base_arena_alloc(turn->arena, bytes);
        uint32_t count = (uint32_t)(bytes / sizeof *run);
        if (run)
            memcpy(run, content.data + TEMPLATE_BYTES, bytes);
        if (run && says(turn, item, run, count)) {
            item->tokens = run;
            item->token_count = count;
            turn->match.spliced++;
            turn->match.rendered -= turn->match.rendered > 0;
        }
    }
    base_buf_deinit(&content);
    return code;
}

base_code gw_runs_unseal(gw_turn *turn, const gw_item_list *list, base_err *err)
{
    for (uint32_t i = 0; i < turn->chat.item_count; i++)
        if (list->sealed[i].text.length)
            GW_TRY(unseal(turn, &turn->items[i], &list->sealed[i], err));
    return BASE_OK;
}

base_code gw_runs_verify(gw_turn *turn, const gw_item_list *list, base_err *err)
{
    base_code code = BASE_OK;
    for (uint32_t i = 0; !code && i < list->count; i++) {
        base_buf content;
        base_buf_init(&content, 0);
        if (list->sealed[i].text.length)
            code = open_seal(turn, &content, &list->sealed[i], err);
        base_buf_deinit(&content);
    }
    return code;
}

/* ---- conversations ---- */

#define ITEM_ID_MAX 100 /* a page's `after` holds it */

static const char *prefix_of(const char *type)
{
    return strcmp(type, "message") == 0            ? "msg_"
           : strcmp(type, "reasoning") == 0        ? "rs_"
           : strcmp(type, "compaction") == 0       ? "cmp_"
           : strcmp(type, "function_call") == 0    ? "fc_"
           : strcmp(type, "custom_tool_call") == 0 ? "ctc_"
           : strstr(type, "output") != NULL        ? "fco_"
                                                   : "item_";
}

/* An id that can stand in a path, and that no item of the list has. */
static bool good_id(const json_t *id, const gw_conversation_item *others, size_t count)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                  "_-.:";
    const char *text = json_string_value(id);
    size_t length = json_string_length(id);
    bool good = length && length <= ITEM_ID_MAX && strspn(text, letters) == length;
    for (size_t i = 0; good && i < count; i++)
        good = strcmp(others[i].id, text) != 0;
    return good;
}

/* What the vendor gives back for a message whose content was a string. */
static void put_parts(json_t *message)
{
    const char *role = json_string_value(json_object_get(message, "role"));
    bool said = role && strcmp(role, "assistant") == 0;
    json_t *part = json_object(), *parts = json_array();
    json_object_set_new(part, "type", json_string(said ? "output_text" : "input_text"));
    json_object_set(part, "text", json_object_get(message, "content"));
    if (said)
        json_object_set_new(part, "annotations", json_array());
    json_array_append_new(parts, part);
    json_object_set_new(message, "content", parts);
}

/* With an id, a type and a status, in the arena. */
static base_code make_item(base_arena *arena, gw_conversation_item *out, const json_t *item,
                           bool keep_id, base_err *err)
{
    json_t *copy = json_copy((json_t *)item);
    if (!copy)
        return gw_no_memory(err);
    const char *type = json_string_value(json_object_get(copy, "type"));
    if (!type) {
        json_object_set_new(copy, "type", json_string("message"));
        type = "message";
    }
    if (strcmp(type, "message") == 0 && json_is_string(json_object_get(copy, "content")))
        put_parts(copy);
    if (!keep_id)
        json_object_set_new(copy, "id", json_string(gw_id_mint(prefix_of(type)).text));
    if (!json_object_get(copy, "status") && strcmp(type, "reasoning") != 0 &&
        strcmp(type, "compaction") != 0)
        json_object_set_new(copy, "status", json_string("completed"));
    char *text = json_dumps(copy, JSON_COMPACT);
    const char *id = json_string_value(json_object_get(copy, "id"));
    *out = (gw_conversation_item){id ? base_arena_copy(arena, id, strlen(id)) : NULL,
                                  text ? base_arena_copy(arena, text, strlen(text)) : NULL};
    free(text);
    json_decref(copy);
    return out->id && out->json ? BASE_OK : gw_no_memory(err);
}

base_code gw_conversation_inputs(gw_turn *turn, const json_t *input, const char *field,
                                 const gw_conversation_page *before, base_err *err)
{
    bool text = json_is_string(input);
    size_t count = text ? 1 : json_array_size(input);
    gw_conversation_item *items = base_arena_calloc(turn->arena, count + 1, sizeof *items);
    turn->added = items;
    turn->added_count = 0;
    base_code code = items ? BASE_OK : gw_no_memory(err);
    for (size_t i = 0; !code && i < count; i++) {
        json_t *one =
            text ? json_pack("{s:s,s:s,s:O}", "type", "message", "role", "user", "content", input)
                 : json_incref(json_array_get(input, i));
        const json_t *id = json_object_get(one, "id");
        const char *type = json_string_value(json_object_get(one, "type"));
        bool named = type ? strcmp(type, "item_reference") == 0
                          : id && !json_object_get(one, "role"); /* a bare reference */
        if (named) {
            char path[GW_PATH_BYTES];
            json_t *found = NULL;
            gw_name_path(path, "%s[%zu]", field, i);
            code = gw_items_resolve(turn, &found, json_string_value(id), path, err);
            json_decref(one);
            one = found;
            id = json_object_get(one, "id");
        }
        bool keep = good_id(id, before ? before->items : NULL, before ? before->count : 0) &&
                    good_id(id, items, turn->added_count);
        if (!code && !one)
            code = gw_no_memory(err);
        if (!code)
            code = make_item(turn->arena, &items[turn->added_count], one, keep, err);
        turn->added_count += !code;
        json_decref(one);
    }
    return code;
}

void gw_conversation_outputs(gw_turn *turn, gw_response *r, const gw_response_end *end)
{
    gw_conversation_item *items =
        base_arena_calloc(turn->arena, turn->added_count + r->count + 1, sizeof *items);
    if (!items) {
        turn->lossy = true;
        return;
    }
    memcpy(items, turn->added, turn->added_count * sizeof *items);
    for (uint32_t i = 0; i < r->count; i++) {
        base_buf out;
        eng_text id = {0};
        base_buf_init(&out, 0);
        gw_response_put_item(r, &out, i, end);
        bool good = !out.failed && gw_body_member(&id, out.data, out.length, "id");
        /* Without the quotes: our ids need no escapes. */
        items[turn->added_count + i] = (gw_conversation_item){
            good ? base_arena_copy(turn->arena, id.data + 1, id.length - 2) : NULL,
            good ? base_arena_copy(turn->arena, out.data, out.length) : NULL};
        turn->lossy |= !items[turn->added_count + i].id || !items[turn->added_count + i].json;
        base_buf_deinit(&out);
    }
    turn->added = items;
    turn->added_count = turn->lossy ? 0 : turn->added_count + r->count;
}
