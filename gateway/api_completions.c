#include "gateway/api_completions.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "gateway/api_chat.h"
#include "gateway/conf.h"
#include "gateway/dialect.h"
#include "gateway/ledger_completion.h"

#define PATH "/v1/chat/completions"
#define ARENA_BYTES (256u << 20)

/* ---- calls ---- */

typedef enum verb { LIST, GET, UPDATE, DELETE, MESSAGES } verb;

typedef struct call {
    gw_job job;
    gw_message back;
    gw_app *app;
    gw_exchange *exchange; /* NULL once the client left. Loop */
    gw_loop *loop;
    int64_t tenant;
    verb verb;
    char id[GW_NAME_BYTES_MAX];
    gw_id turn;
    char *body, *query;
    size_t body_length;
    json_t *json;
    base_arena *arena;
    base_buf out;
    base_err err;
} call;

static base_code find(call *c, gw_completion *out, base_err *err)
{
    if (!gw_completion_turn(&c->turn, c->id))
        return base_fail(err, BASE_NOT_FOUND, "there is no such completion");
    return gw_completion_read(c->app->ledger, out, c->tenant, c->turn.text, c->arena, err);
}

static void put_dump(base_buf *out, const json_t *value)
{
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
    base_buf_puts(out, text ? text : "null");
    free(text);
}

static void put_choice(base_buf *out, const gw_completion *choice, size_t index,
                       const json_t *tools)
{
    json_t *answer = choice->answer ? json_loads(choice->answer, JSON_ALLOW_NUL, NULL) : NULL;
    const json_t *calls = json_object_get(answer, "tool_calls");
    const json_t *reasoning = json_object_get(answer, "reasoning_content");
    eng_text content = gw_text_of_json(json_object_get(answer, "content"));
    const char *reason = choice->finish == ENG_FINISH_LENGTH ? "length"
                         : json_array_size(calls)            ? "tool_calls"
                                                             : "stop";
    base_buf_printf(out,
                    "{\"index\":%zu,\"finish_reason\":\"%s\",\"logprobs\":null,\"message\":{"
                    "\"role\":\"assistant\",\"content\":",
                    index, reason);
    if (json_array_size(calls) && !content.length)
        base_buf_puts(out, "null");
    else
        gw_put_string(out, content.data, content.length);
    base_buf_puts(out, ",\"refusal\":null,\"annotations\":[]");
    if (json_string_length(reasoning)) {
        base_buf_puts(out, ",\"reasoning_content\":");
        put_dump(out, reasoning);
    }
    for (size_t i = 0; i < json_array_size(calls); i++) {
        base_buf_puts(out, i ? "," : ",\"tool_calls\":[");
        gw_put_made_call(out, json_array_get(calls, i), tools);
    }
    base_buf_puts(out, json_array_size(calls) ? "]}}" : "}}");
    json_decref(answer);
}

/* The whole object. */
static base_code put(call *c, const gw_completion *first, base_err *err)
{
    base_buf *out = &c->out;
    json_t *echo = NULL, *value;
    GW_TRY(gw_body_parse(&echo, first->echo, strlen(first->echo), err));
    const json_t *turns = json_object_get(echo, "choices"), *tools = json_object_get(echo, "tools");
    eng_usage usage = first->usage;
    base_code code = BASE_OK;
    const char *name;
    base_buf_printf(out, "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion\",\"created\":%lld",
                    first->turn.text + strlen("turn_"), (long long)(first->created_ms / 1000));
    json_object_foreach(echo, name, value)
    {
        eng_text raw;
        if (value == turns || !gw_body_member(&raw, first->echo, strlen(first->echo), name))
            continue;
        base_buf_printf(out, ",\"%s\":", name);
        base_buf_add(out, raw.data, raw.length);
    }
    base_buf_printf(out,
                    ",\"seed\":%llu,\"service_tier\":\"default\",\"metadata\":%s,\"choices\":[",
                    (unsigned long long)first->seed, first->metadata ? first->metadata : "{}");
    for (size_t i = 0; i < json_array_size(turns) && !code; i++) {
        gw_completion other;
        const gw_completion *choice = i ? &other : first;
        if (i) {
            const char *turn = json_string_value(json_array_get(turns, i));
            code = gw_completion_read(c->app->ledger, &other, c->tenant, turn ? turn : "", c->arena,
                                      err);
            base_buf_puts(out, ",");
            usage.output_tokens += code ? 0 : other.usage.output_tokens;
            usage.reasoning_tokens += code ? 0 : other.usage.reasoning_tokens;
        }
        if (!code)
            put_choice(out, choice, i, tools);
    }
    base_buf_puts(out, "],");
    gw_chat_put_counts(out, &usage);
    base_buf_puts(out, "}}");
    json_decref(echo);
    return code;
}

/* ---- list ---- */

static base_code read_metadata(call *c, json_t **out, base_err *err)
{
    static const char begin[] = "metadata";
    *out = json_object();
    for (const char *at = c->query; *at; at += strcspn(at, "&"), at += *at == '&') {
        char pair[1024], value[GW_NAME_BYTES_MAX * 8], *name = pair;
        size_t size = strcspn(at, "&="), length = 0;
        if (strncmp(at, begin, strlen(begin)) != 0 || at[size] != '=' || size >= sizeof pair)
            continue;
        memcpy(pair, at, size);
        pair[size] = '\0';
        /* metadata[key], its brackets mostly percent-encoded. */
        gw_query_value(at, pair, value, sizeof value);
        gw_percent_decode(pair);
        name += strlen(begin);
        length = strlen(name);
        if (length < 3 || name[0] != '[' || name[length - 1] != ']')
            return base_fail_param(err, BASE_INVALID, "metadata",
                                   "metadata must be given as metadata[key]=value");
        name[length - 1] = '\0';
        if (json_object_set_new(*out, name + 1, json_string(value)))
            return base_fail_param(err, BASE_INVALID, "metadata", "metadata is not UTF-8");
    }
    return BASE_OK;
}

static base_code list(call *c, base_err *err)
{
    gw_page page;
    gw_id after = {""};
    char model[GW_NAME_BYTES_MAX];
    json_t *metadata = NULL;
    GW_TRY(gw_page_read(&page, c->query, err));
    gw_completion_query query = {.limit = page.limit, .oldest_first = page.oldest_first};
    if (page.after[0] && !gw_completion_turn(&after, page.after))
        return base_fail_param(err, BASE_INVALID, "after", "after names no stored completion");
    query.after = after.text;
    if (gw_query_value(c->query, "model", model, sizeof model))
        query.model = model;
    base_code code = read_metadata(c, &metadata, err);
    query.metadata = metadata;
    gw_completion *rows = NULL;
    uint32_t count = 0;
    bool more = false;
    base_err why = BASE_ERR_INIT;
    if (!code) {
        code = gw_completion_list(c->app->ledger, &rows, &count, &more, c->tenant, &query, c->arena,
                                  &why);
        if (code == BASE_NOT_FOUND)
            code = base_fail_param(err, BASE_INVALID, "after", "after names no stored completion");
        else if (code)
            base_fail(err, code, "%s", why.text);
    }
    base_buf_puts(&c->out, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; i < count && !code; i++) {
        base_buf_puts(&c->out, i ? "," : "");
        code = put(c, &rows[i], err);
    }
    base_buf_puts(&c->out, "],\"first_id\":");
    base_buf_printf(&c->out, count ? "\"chatcmpl-%s\"" : "null",
                    count ? rows[0].turn.text + strlen("turn_") : "");
    base_buf_printf(&c->out, count ? ",\"last_id\":\"chatcmpl-%s\"" : ",\"last_id\":null",
                    count ? rows[count - 1].turn.text + strlen("turn_") : "");
    base_buf_printf(&c->out, ",\"has_more\":%s}", more ? "true" : "false");
    json_decref(metadata);
    return code;
}

/* ---- the others ---- */

static base_code update(call *c, base_err *err)
{
    gw_completion row;
    gw_turn plan = {.app = c->app, .arena = c->arena};
    GW_TRY(gw_body_mend(c->body, c->body_length, c->app->conf->limits_json_depth_max, err));
    GW_TRY(gw_body_parse(&c->json, c->body, c->body_length, err));
    plan.json = c->json;
    GW_TRY(gw_read_metadata(&plan, err));
    if (!plan.metadata && !json_is_null(json_object_get(c->json, "metadata")))
        return gw_wrong_type("", "metadata", "a map of strings",
                             json_object_get(c->json, "metadata"), err);
    GW_TRY(find(c, &row, err));
    GW_TRY(gw_completion_update(c->app->ledger, c->tenant, c->turn.text, plan.metadata, err));
    GW_TRY(find(c, &row, err));
    return put(c, &row, err);
}

static base_code erase(call *c, base_err *err)
{
    gw_completion row;
    GW_TRY(find(c, &row, err));
    json_t *echo = NULL;
    GW_TRY(gw_body_parse(&echo, row.echo, strlen(row.echo), err));
    const json_t *turns = json_object_get(echo, "choices");
    base_code code = gw_completion_update(c->app->ledger, c->tenant, c->turn.text, NULL, err);
    /* The first one last: as long as it is there, a delete that was cut can be done again. */
    for (size_t i = json_array_size(turns); i-- > 0 && !code;) {
        const char *turn = json_string_value(json_array_get(turns, i));
        base_err why = BASE_ERR_INIT;
        code = gw_ledger_forget(c->app->ledger, c->tenant, "chat", turn ? turn : "", &why);
        if (code == BASE_NOT_FOUND && i > 0)
            code = BASE_OK;
        else if (code)
            base_fail(err, code, "%s", why.text);
    }
    json_decref(echo);
    base_buf_printf(
        &c->out, "{\"id\":\"%s\",\"object\":\"chat.completion.deleted\",\"deleted\":true}", c->id);
    return code;
}

/* One of the ledger's items as a message with an id; call ids of results by their order. */
static void add_message(json_t *messages, const char *item, const char *id, size_t at, json_t *open)
{
    char own[GW_NAME_BYTES_MAX + 32];
    json_t *message = json_loads(item, JSON_ALLOW_NUL, NULL), *calls;
    const char *role = json_string_value(json_object_get(message, "role"));
    snprintf(own, sizeof own, "%s-%zu", id, at);
    json_object_set_new(message, "id", json_string(own));
    json_object_set_new(message, "name", json_null());
    json_object_set_new(message, "content_parts", json_null());
    if (role && strcmp(role, "tool") == 0) {
        json_object_set(message, "tool_call_id", json_array_get(open, 0));
        json_array_remove(open, 0);
    } else {
        json_array_clear(open);
    }
    calls = json_object_get(message, "tool_calls");
    for (size_t i = 0; i < json_array_size(calls); i++)
        json_array_append(open, json_object_get(json_array_get(calls, i), "id"));
    if (message)
        json_array_append_new(messages, message);
}

static base_code messages(call *c, base_err *err)
{
    gw_completion row;
    gw_page page;
    char **items;
    uint32_t count;
    GW_TRY(gw_page_read(&page, c->query, err));
    GW_TRY(find(c, &row, err));
    GW_TRY(gw_ledger_items(c->app->ledger, &items, &count, c->tenant, c->turn.text, c->arena, err));
    json_t *list = json_array(), *open = json_array();
    for (uint32_t i = 0; i + (row.answer ? 1 : 0) < count; i++)
        add_message(list, items[i], c->id, i, open);
    base_code code = gw_page_put(&page, &c->out, list, err);
    json_decref(list);
    json_decref(open);
    return code;
}

static base_code work(call *c, base_err *err)
{
    gw_completion row;
    switch (c->verb) {
    case LIST:
        return list(c, err);
    case UPDATE:
        return update(c, err);
    case DELETE:
        return erase(c, err);
    case MESSAGES:
        return messages(c, err);
    case GET:
        break;
    }
    GW_TRY(find(c, &row, err));
    return put(c, &row, err);
}

static void run(gw_job *job)
{
    call *c = (call *)((char *)job - offsetof(call, job));
    base_code code = work(c, &c->err);
    if (!code && c->out.failed)
        code = gw_no_memory(&c->err);
    if (code && !c->err.code)
        base_fail(&c->err, code, "the request could not be done");
    gw_loop_post(c->loop, &c->back);
}

static void respond(call *c)
{
    static const gw_header headers[] = {{"content-type", "application/json"}};
    if (c->err.code == BASE_NOT_FOUND) {
        char text[128];
        snprintf(text, sizeof text, "Completion with id '%.*s' not found.", gw_shown(c->id, 64),
                 c->id);
        gw_error_respond(c->exchange, 404, "invalid_request_error", "completion_not_found",
                         "completion_id", text);
    } else if (c->err.code) {
        gw_error_respond_err(c->exchange, &c->err);
    } else {
        gw_respond(c->exchange, 200, headers, 1, c->out.data, c->out.length);
    }
}

static void back(gw_message *message)
{
    call *c = (call *)((char *)message - offsetof(call, back));
    if (c->exchange)
        respond(c);
    base_buf_deinit(&c->out);
    json_decref(c->json);
    base_arena_destroy(c->arena);
    free(c->body);
    free(c->query);
    free(c);
}

static void gone(void *ctx)
{
    ((call *)ctx)->exchange = NULL;
}

static bool take(call *c, gw_exchange *exchange)
{
    size_t length;
    const char *body = gw_exchange_body(exchange, &length);
    c->arena = base_arena_create(4096, ARENA_BYTES);
    c->query = strdup(gw_exchange_query(exchange));
    c->body = malloc(length + 1);
    if (!c->arena || !c->query || !c->body)
        return false;
    if (length)
        memcpy(c->body, body, length);
    c->body[length] = '\0';
    c->body_length = length;
    return true;
}

static void begin(gw_app *app, gw_exchange *exchange, verb what)
{
    gw_identity identity;
    if (!gw_tenants_admit(app->tenants, &identity, exchange, GW_SCOPE_INFER))
        return;
    call *c = calloc(1, sizeof *c);
    if (!c) {
        base_err err = BASE_ERR_INIT;
        gw_no_memory(&err);
        gw_error_respond_err(exchange, &err);
        return;
    }
    c->job.run = run;
    c->back.run = back;
    c->app = app;
    c->exchange = exchange;
    c->loop = gw_exchange_loop(exchange);
    c->tenant = identity.tenant;
    c->verb = what;
    const char *path = gw_exchange_path(exchange);
    if (what != LIST) /* the router has seen the rest of the path */
        snprintf(c->id, sizeof c->id, "%.*s", (int)strcspn(path + sizeof PATH, "/"),
                 path + sizeof PATH);
    gw_exchange_set_handler(exchange, c, gone, NULL);
    if (!take(c, exchange)) {
        gw_no_memory(&c->err);
        back(&c->back);
    } else if (!gw_workers_submit(app->workers, &c->job)) {
        base_fail(&c->err, BASE_FULL, "too many requests wait for a worker");
        back(&c->back);
    }
}

void gw_api_completions_list(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, LIST);
}

void gw_api_completions_get(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, GET);
}

void gw_api_completions_update(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, UPDATE);
}

void gw_api_completions_delete(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, DELETE);
}

void gw_api_completions_messages(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, MESSAGES);
}
