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

static base_code unseal(gw_turn *turn, eng_item *item, eng_text sealed, uint32_t at, base_err *err)
{
    const eng_info *info = eng_get_info(turn->app->engine);
    const char *dot = sealed.length ? memrchr(sealed.data, '.', sealed.length) : NULL;
    base_buf content;
    if (!gw_seal_is_ours(sealed))
        return BASE_OK;
    size_t length = (size_t)(dot - sealed.data);
    base_buf_init(&content, 0);
    base_code code = gw_seal_unwrap(turn->app->seal, &content, USE, turn->identity.tenant,
                                    (eng_text){dot + 1, sealed.length - length - 1},
                                    (eng_text){sealed.data, length}, NULL);
    if (code) {
        char path[GW_PATH_BYTES];
        gw_name_path(path, "input[%u].encrypted_content", at);
        base_buf_deinit(&content);
        return code == BASE_NOMEM
                   ? gw_no_memory(err)
                   : gw_turn_reject(
                         turn, err, 400, "invalid_request_error", "invalid_encrypted_content", path,
                         "%s could not be verified: it was changed or is another's", path);
    }
    size_t bytes = content.length > TEMPLATE_BYTES ? content.length - TEMPLATE_BYTES : 0;
    if (!item->tokens && bytes && memcmp(content.data, info->template_id, TEMPLATE_BYTES) == 0) {
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
    return BASE_OK;
}

base_code gw_runs_unseal(gw_turn *turn, const gw_item_list *list, base_err *err)
{
    for (uint32_t i = 0; i < turn->chat.item_count; i++)
        if (list->sealed[i].text.length)
            GW_TRY(unseal(turn, &turn->items[i], list->sealed[i].text, list->sealed[i].at, err));
    return BASE_OK;
}

/* ---- conversations ---- */

static const char *prefix_of(const char *type)
{
    return strcmp(type, "message") == 0            ? "msg_"
           : strcmp(type, "reasoning") == 0        ? "rs_"
           : strcmp(type, "function_call") == 0    ? "fc_"
           : strcmp(type, "custom_tool_call") == 0 ? "ctc_"
           : strstr(type, "output") != NULL        ? "fco_"
                                                   : "item_";
}

base_code gw_conversation_make(base_arena *arena, const json_t *item, const char **id,
                               const char **json, base_err *err)
{
    json_t *copy = json_copy((json_t *)item);
    const char *type = json_string_value(json_object_get(copy, "type"));
    const char *have = json_string_value(json_object_get(copy, "id"));
    const json_t *content = json_object_get(copy, "content");
    if (!copy)
        return gw_no_memory(err);
    if (!type) {
        json_object_set_new(copy, "type", json_string("message"));
        type = "message";
    }
    if (strcmp(type, "message") == 0 && json_is_string(content)) {
        const char *role = json_string_value(json_object_get(copy, "role"));
        bool said = role && strcmp(role, "assistant") == 0;
        json_t *part = json_object(), *parts = json_array();
        json_object_set_new(part, "type", json_string(said ? "output_text" : "input_text"));
        json_object_set(part, "text", (json_t *)content);
        if (said)
            json_object_set_new(part, "annotations", json_array());
        json_array_append_new(parts, part);
        json_object_set_new(copy, "content", parts);
    }
    if (!have || !have[0]) {
        gw_id fresh = gw_id_mint(prefix_of(type));
        json_object_set_new(copy, "id", json_string(fresh.text));
        have = json_string_value(json_object_get(copy, "id"));
    }
    if (!json_object_get(copy, "status") && strcmp(type, "reasoning") != 0)
        json_object_set_new(copy, "status", json_string("completed"));
    char *text = json_dumps(copy, JSON_COMPACT);
    *id = have ? base_arena_copy(arena, have, strlen(have)) : NULL;
    *json = text ? base_arena_copy(arena, text, strlen(text)) : NULL;
    free(text);
    json_decref(copy);
    return *id && *json ? BASE_OK : gw_no_memory(err);
}

void gw_conversation_of(gw_turn *turn, gw_response *r, const gw_response_end *end,
                        const char *conversation)
{
    const json_t *input = json_object_get(turn->json, "input");
    size_t inputs = json_is_string(input) ? 1 : json_array_size(input);
    gw_conversation_item *items =
        base_arena_calloc(turn->arena, inputs + r->count + 1, sizeof *items);
    uint32_t count = 0;
    bool good = items != NULL;
    for (size_t i = 0; good && i < inputs; i++) {
        json_t *one = json_is_string(input) ? json_pack("{s:s,s:s,s:O}", "type", "message", "role",
                                                        "user", "content", input)
                                            : json_incref(json_array_get(input, i));
        const char *type = json_string_value(json_object_get(one, "type"));
        if (!type || strcmp(type, "item_reference") != 0) { /* what is named is there already */
            good = one && !gw_conversation_make(turn->arena, one, &items[count].id,
                                                &items[count].json, NULL);
            count += good;
        }
        json_decref(one);
    }
    for (uint32_t i = 0; good && i < r->count; i++) {
        base_buf out;
        base_buf_init(&out, 0);
        gw_response_put_item(r, &out, i, end);
        json_t *one = out.failed ? NULL : json_loadb(out.data, out.length, JSON_ALLOW_NUL, NULL);
        good = one &&
               !gw_conversation_make(turn->arena, one, &items[count].id, &items[count].json, NULL);
        count += good;
        json_decref(one);
        base_buf_deinit(&out);
    }
    turn->lossy |= !good;
    turn->conversation = conversation;
    turn->added = items;
    turn->added_count = count;
}
