/* api_conversations: see the header.
 *
 * What changes a conversation stands in line with the turns on it, without a worker: a turn's items
 * follow those that it saw.
 *
 *   worker: prepare, claim --held--> work --> loop: answer
 *                 '--waits--> granted (loop) --> worker: work
 *                        '--too long, or the client left--> loop: answer */
#include "gateway/api_conversations.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/num.h"
#include "gateway/conf.h"
#include "gateway/dialect.h"
#include "gateway/response_run.h"

#define PATH "/v1/conversations"
#define ITEMS_MAX 20 /* of one call; the vendor's bound */
#define ARENA_BYTES (256u << 20)
#define PAGE_BYTES_MAX (32u << 20) /* a page of longer items is shorter */
#define LOCKED_RETRY_MS 1000

/* A call: a worker does it, the loop answers. Freed on the loop when the worker's message came. */
typedef struct call {
    gw_job job;
    gw_message back;
    gw_exchange *exchange; /* NULL once the client left. Loop */
    gw_loop *loop;
    base_code (*work)(struct call *c, base_err *err);
    /* ---- of those that change a conversation; NULL prepare: nothing comes before the lock ---- */
    gw_port port; /* for its ticks; open if it `stands` in line */
    gw_message granted;
    gw_lock lock;
    base_code (*prepare)(struct call *c, base_err *err);
    bool stands, prepared, held; /* the worker's, while it has the call; else the loop's */
    uint64_t received_ns;
    json_t *items;
    gw_turn plan; /* what readers of bodies write to: app, arena, body, tree and tenant */
    char id[GW_NAME_BYTES_MAX], item[GW_NAME_BYTES_MAX];
    char *query;
    json_t *stored; /* trees that items point into */
    base_buf out;
    base_err err;
} call;

/* ---- what may be wrong ---- */

static base_code no_conversation(call *c, base_err *err)
{
    return gw_turn_reject(&c->plan, err, 404, "invalid_request_error", "conversation_not_found",
                          "conversation_id", "Conversation with id '%.*s' not found.",
                          gw_shown(c->id, 64), c->id);
}

static base_code no_item(call *c, base_err *err)
{
    return gw_turn_reject(&c->plan, err, 404, "invalid_request_error", "item_not_found", "item_id",
                          "Item with id '%.*s' not found in conversation '%.*s'.",
                          gw_shown(c->item, 64), c->item, gw_shown(c->id, 40), c->id);
}

/* The ledger's answer as the client's: what it does not find is the conversation, unless it names
 * the item. */
static base_code told(call *c, base_code code, const base_err *why, base_err *err)
{
    gw_error_row *row = &c->plan.error_row;
    if (code == BASE_NOT_FOUND)
        return strcmp(why->param, "item_id") == 0 ? no_item(c, err) : no_conversation(c, err);
    if (code == BASE_FULL && strcmp(why->param, "items") == 0)
        *row = (gw_error_row){400, "invalid_request_error", "conversation_full", 0, -1};
    else if (code == BASE_FULL)
        *row = (gw_error_row){429, "rate_limit_error", "conversation_limit", 0, 0};
    return code ? base_fail_param(err, code, why->param, "%s", why->text) : BASE_OK;
}

/* Kept content is refused where it fills the ledger. */
static base_code check_room(call *c, base_err *err)
{
    base_code code = gw_ledger_room(c->plan.app->ledger, c->plan.identity.tenant, err);
    if (code == BASE_FULL)
        c->plan.error_row = (gw_error_row){429, "rate_limit_error", "storage_full", 0, 0};
    return code;
}

static base_code locked(call *c, base_err *err)
{
    c->plan.error_row =
        (gw_error_row){409, "conflict_error", "conversation_locked", LOCKED_RETRY_MS, 1};
    return base_fail_param(err, BASE_CONFLICT, "conversation_id",
                           "A response on conversation '%s' is still running.", c->id);
}

/* ---- bodies ---- */

/* No body is an empty object. */
static base_code parse_body(call *c, base_err *err)
{
    gw_turn *plan = &c->plan;
    if (!plan->body_length) {
        plan->json = json_object();
        return plan->json ? BASE_OK : gw_no_memory(err);
    }
    GW_TRY(
        gw_body_mend(plan->body, plan->body_length, plan->app->conf->limits_json_depth_max, err));
    return gw_body_parse(&plan->json, plan->body, plan->body_length, err);
}

/* Read as a turn would read them. */
static base_code read_items(call *c, json_t **items, base_err *err)
{
    GW_TRY(gw_read_array(items, c->plan.json, "", "items", err));
    if (json_array_size(*items) > ITEMS_MAX)
        return base_fail_param(err, BASE_INVALID, "items", "items has %zu items, the limit is %d",
                               json_array_size(*items), ITEMS_MAX);
    if (!*items)
        return BASE_OK;
    c->stored = json_array();
    gw_item_list list = {.turn = &c->plan, .stored = c->stored};
    if (!c->stored)
        return gw_no_memory(err);
    GW_TRY(gw_items_read(&list, *items, "items", err));
    return gw_runs_verify(&c->plan, &list, err);
}

/* The items that have ids which the conversation's have, too. */
static base_code find_taken(call *c, gw_conversation_page *taken, const json_t *items,
                            base_err *err)
{
    gw_conversation_item *list =
        base_arena_calloc(c->plan.arena, json_array_size(items) + 1, sizeof *list);
    *taken = (gw_conversation_page){.items = list};
    if (!list)
        return gw_no_memory(err);
    for (size_t i = 0; i < json_array_size(items); i++) {
        const char *id = json_string_value(json_object_get(json_array_get(items, i), "id"));
        char *json = NULL;
        base_err why = BASE_ERR_INIT;
        if (!id)
            continue;
        base_code code = gw_conversation_item_read(
            c->plan.app->ledger, &json, c->plan.identity.tenant, c->id, id, c->plan.arena, &why);
        if (!code)
            list[taken->count++].id = id;
        else if (code != BASE_NOT_FOUND || strcmp(why.param, "item_id") != 0)
            return told(c, code, &why, err);
    }
    return BASE_OK;
}

/* ---- objects ---- */

static base_code put_conversation(call *c, base_err *err)
{
    gw_conversation_row row;
    base_err why = BASE_ERR_INIT;
    GW_TRY(told(c,
                gw_conversation_read(c->plan.app->ledger, &row, c->plan.identity.tenant, c->id,
                                     c->plan.arena, &why),
                &why, err));
    base_buf_printf(&c->out,
                    "{\"id\":\"%s\",\"object\":\"conversation\",\"created_at\":%lld,"
                    "\"metadata\":%s}",
                    c->id, (long long)(row.created_ms / 1000), row.metadata ? row.metadata : "{}");
    return BASE_OK;
}

/* Sealed reasoning is given to who asks for it: include[]=reasoning.encrypted_content, in any
 * spelling of the brackets. */
static bool wants_sealed(const call *c)
{
    return strstr(c->query, "reasoning.encrypted_content") != NULL;
}

static base_code put_item(call *c, const char *json, base_err *err)
{
    if (wants_sealed(c) || !strstr(json, "\"encrypted_content\"")) {
        base_buf_puts(&c->out, json);
        return BASE_OK;
    }
    json_t *item = json_loads(json, JSON_ALLOW_NUL, NULL);
    const char *type = json_string_value(json_object_get(item, "type"));
    if (type && strcmp(type, "reasoning") == 0)
        json_object_del(item, "encrypted_content");
    char *text = item ? json_dumps(item, JSON_COMPACT) : NULL;
    json_decref(item);
    if (!text)
        return gw_no_memory(err);
    base_buf_puts(&c->out, text);
    free(text);
    return BASE_OK;
}

static void put_id(base_buf *out, const char *name, const char *id)
{
    base_buf_printf(out, ",\"%s\":", name);
    if (id)
        gw_put_string(out, id, strlen(id));
    else
        base_buf_puts(out, "null");
}

static base_code put_list(call *c, const gw_conversation_item *items, uint32_t count, bool more,
                          base_err *err)
{
    base_buf_puts(&c->out, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; i < count; i++) {
        base_buf_puts(&c->out, i ? "," : "");
        GW_TRY(put_item(c, items[i].json, err));
    }
    base_buf_puts(&c->out, "]");
    put_id(&c->out, "first_id", count ? items[0].id : NULL);
    put_id(&c->out, "last_id", count ? items[count - 1].id : NULL);
    base_buf_printf(&c->out, ",\"has_more\":%s}", more ? "true" : "false");
    return BASE_OK;
}

/* ---- the calls; worker ---- */

static base_code create(call *c, base_err *err)
{
    gw_turn *plan = &c->plan;
    json_t *items;
    GW_TRY(parse_body(c, err));
    GW_TRY(gw_read_metadata(plan, err));
    GW_TRY(read_items(c, &items, err));
    GW_TRY(gw_conversation_inputs(plan, items, "items", NULL, err));
    GW_TRY(check_room(c, err));
    gw_id id = gw_id_mint("conv_");
    strcpy(c->id, id.text);
    gw_conversation_new fresh = {.tenant = plan->identity.tenant,
                                 .created_ms = base_wall_ms(),
                                 .id = c->id,
                                 .metadata = plan->metadata,
                                 .items = plan->added,
                                 .count = plan->added_count,
                                 .count_max = plan->app->conf->conversations_count_max};
    base_err why = BASE_ERR_INIT;
    GW_TRY(told(c, gw_conversation_create(plan->app->ledger, &fresh, &why), &why, err));
    return put_conversation(c, err);
}

static base_code get(call *c, base_err *err)
{
    return put_conversation(c, err);
}

/* Metadata that is absent stays; null is none. */
static base_code update(call *c, base_err *err)
{
    base_err why = BASE_ERR_INIT;
    GW_TRY(parse_body(c, err));
    GW_TRY(gw_read_metadata(&c->plan, err));
    if (json_object_get(c->plan.json, "metadata"))
        GW_TRY(told(c,
                    gw_conversation_update(c->plan.app->ledger, c->plan.identity.tenant, c->id,
                                           c->plan.metadata, &why),
                    &why, err));
    return put_conversation(c, err);
}

static base_code delete_conversation(call *c, base_err *err)
{
    base_err why = BASE_ERR_INIT;
    base_code code =
        gw_conversation_delete(c->plan.app->ledger, c->plan.identity.tenant, c->id, &why);
    GW_TRY(told(c, code, &why, err));
    base_buf_printf(&c->out, "{\"id\":\"%s\",\"object\":\"conversation.deleted\",\"deleted\":true}",
                    c->id);
    return BASE_OK;
}

static base_code read_added(call *c, base_err *err)
{
    GW_TRY(parse_body(c, err));
    if (!json_is_array(json_object_get(c->plan.json, "items")))
        return gw_wrong_type("", "items", "an array", json_object_get(c->plan.json, "items"), err);
    GW_TRY(read_items(c, &c->items, err));
    return check_room(c, err);
}

static base_code add_items(call *c, base_err *err)
{
    gw_turn *plan = &c->plan;
    gw_conversation_page taken;
    base_err why = BASE_ERR_INIT;
    GW_TRY(find_taken(c, &taken, c->items, err));
    GW_TRY(gw_conversation_inputs(plan, c->items, "items", &taken, err));
    GW_TRY(
        told(c,
             gw_conversation_add(plan->app->ledger, plan->identity.tenant, c->id, plan->added,
                                 plan->added_count, plan->app->conf->conversations_items_max, &why),
             &why, err));
    return put_list(c, c->plan.added, c->plan.added_count, false, err);
}

static base_code list_items(call *c, base_err *err)
{
    gw_page page;
    gw_conversation_page found;
    base_err why = BASE_ERR_INIT;
    GW_TRY(gw_page_read(&page, c->query, err));
    gw_conversation_query query = {.after = page.after[0] ? page.after : NULL,
                                   .limit = page.limit,
                                   .bytes_max = PAGE_BYTES_MAX,
                                   .oldest_first = page.oldest_first};
    GW_TRY(told(c,
                gw_conversation_list(c->plan.app->ledger, &found, c->plan.identity.tenant, c->id,
                                     &query, c->plan.arena, &why),
                &why, err));
    return put_list(c, found.items, found.count, found.more, err);
}

static base_code get_item(call *c, base_err *err)
{
    char *json = NULL;
    base_err why = BASE_ERR_INIT;
    GW_TRY(told(c,
                gw_conversation_item_read(c->plan.app->ledger, &json, c->plan.identity.tenant,
                                          c->id, c->item, c->plan.arena, &why),
                &why, err));
    return json ? put_item(c, json, err) : gw_no_memory(err);
}

static base_code delete_item(call *c, base_err *err)
{
    base_err why = BASE_ERR_INIT;
    base_code code = gw_conversation_item_delete(c->plan.app->ledger, c->plan.identity.tenant,
                                                 c->id, c->item, &why);
    GW_TRY(told(c, code, &why, err));
    return put_conversation(c, err);
}

/* ---- a call's way ---- */

/* `*waits`: it stands in line and is another thread's from here on. */
static base_code claim(call *c, bool *waits, base_err *err)
{
    if (strlen(c->id) >= GW_ID_MAX)
        return no_conversation(c, err);
    gw_claim claim = gw_lock_claim(c->plan.app->locks, &c->lock, c->plan.identity.tenant, c->id);
    *waits = claim == GW_CLAIM_WAITS;
    if (*waits)
        return BASE_OK;
    c->held = claim == GW_CLAIM_HELD;
    return c->held ? BASE_OK : locked(c, err);
}

static void run(gw_job *job)
{
    call *c = (call *)((char *)job - offsetof(call, job));
    base_code code = BASE_OK;
    bool waits = false;
    if (c->prepare && !c->prepared)
        code = c->prepare(c, &c->err);
    c->prepared = true;
    if (!code && c->stands && !c->held)
        code = claim(c, &waits, &c->err);
    if (waits)
        return;
    if (!code)
        code = c->work(c, &c->err);
    if (c->held)
        gw_lock_let_go(c->plan.app->locks, &c->lock);
    if (!code && c->out.failed)
        code = gw_no_memory(&c->err);
    if (code && !c->err.code)
        base_fail(&c->err, code, "the request could not be done");
    gw_loop_post(c->loop, &c->back);
}

static void call_free(call *c)
{
    if (c->stands)
        gw_port_close(&c->port);
    base_buf_deinit(&c->out);
    json_decref(c->plan.json);
    json_decref(c->stored);
    base_arena_destroy(c->plan.arena);
    free(c->plan.body);
    free(c->query);
    free(c);
}

static void back(gw_message *message)
{
    static const gw_header headers[] = {{"content-type", "application/json"}};
    call *c = (call *)((char *)message - offsetof(call, back));
    if (c->exchange && c->err.code && c->plan.error_row.status)
        gw_error_respond_row(c->exchange, &c->plan.error_row, c->err.param, c->err.text);
    else if (c->exchange && c->err.code)
        gw_error_respond_err(c->exchange, &c->err);
    else if (c->exchange)
        gw_respond(c->exchange, 200, headers, 1, c->out.data, c->out.length);
    call_free(c);
}

static void gone(void *ctx)
{
    call *c = ctx;
    c->exchange = NULL;
    if (c->stands && gw_lock_leave(c->plan.app->locks, &c->lock))
        call_free(c); /* no one will tell its end */
}

/* On the thread of whoever let go. */
static void lock_granted(gw_lock *lock)
{
    call *c = (call *)((char *)lock - offsetof(call, lock));
    gw_loop_post(c->loop, &c->granted);
}

static void on_granted(gw_message *message)
{
    call *c = (call *)((char *)message - offsetof(call, granted));
    c->held = true;
    if (gw_workers_submit(c->plan.app->workers, &c->job))
        return;
    gw_lock_let_go(c->plan.app->locks, &c->lock);
    base_fail(&c->err, BASE_FULL, "too many requests wait for a worker");
    back(&c->back);
}

static void on_tick(gw_port *port, uint64_t now)
{
    call *c = (call *)((char *)port - offsetof(call, port));
    gw_app *app = c->plan.app;
    uint64_t wait = (uint64_t)app->conf->sessions_queue_wait_ms * 1000000;
    if (now <= c->received_ns + wait || !gw_lock_give_up(app->locks, &c->lock))
        return;
    locked(c, &c->err);
    back(&c->back);
}

/* The path behind PATH: nothing, "/ID", "/ID/items" or "/ID/items/ITEM"; how many parts it has,
 * -1 for others. */
static int read_path(call *c, const char *path)
{
    const char *at = path + strlen(PATH);
    char *parts[] = {c->id, NULL, c->item};
    int count = 0;
    at += strspn(at, "/");
    for (; *at && count < 3; count++) {
        size_t length = strcspn(at, "/");
        if (count == 1 && (length != strlen("items") || memcmp(at, "items", length) != 0))
            return -1;
        if (parts[count])
            snprintf(parts[count], GW_NAME_BYTES_MAX, "%.*s",
                     (int)base_min(length, (size_t)GW_NAME_BYTES_MAX), at);
        at += length;
        at += *at == '/';
    }
    return *at ? -1 : count;
}

/* NULL: the exchange was answered. */
static call *make(gw_app *app, gw_exchange *exchange, int parts)
{
    gw_identity identity;
    if (!gw_tenants_admit(app->tenants, &identity, exchange, GW_SCOPE_INFER))
        return NULL;
    size_t length;
    const char *body = gw_exchange_body(exchange, &length);
    call *c = calloc(1, sizeof *c);
    base_err err = BASE_ERR_INIT;
    if (c) {
        c->plan.arena = base_arena_create(4096, ARENA_BYTES);
        c->query = strdup(gw_exchange_query(exchange));
        c->plan.body = malloc(length + 1);
    }
    if (!c || !c->plan.arena || !c->query || !c->plan.body) {
        if (c)
            call_free(c);
        gw_no_memory(&err);
        gw_error_respond_err(exchange, &err);
        return NULL;
    }
    if (read_path(c, gw_exchange_path(exchange)) != parts) {
        call_free(c);
        gw_error_not_found(exchange);
        return NULL;
    }
    if (length)
        memcpy(c->plan.body, body, length);
    c->plan.body[length] = '\0';
    c->plan.body_length = length;
    c->plan.app = app;
    c->plan.identity = identity;
    c->job.run = run;
    c->job.bytes = length;
    c->back.run = back;
    c->exchange = exchange;
    c->loop = gw_exchange_loop(exchange);
    gw_exchange_set_handler(exchange, c, gone, NULL);
    return c;
}

static void submit(call *c)
{
    if (!c->err.code && gw_workers_submit(c->plan.app->workers, &c->job))
        return; /* it is the worker's */
    if (!c->err.code)
        base_fail(&c->err, BASE_FULL, "too many requests wait for a worker");
    back(&c->back);
}

static void begin(gw_app *app, gw_exchange *exchange, int parts,
                  base_code (*work)(call *c, base_err *err))
{
    call *c = make(app, exchange, parts);
    if (!c)
        return;
    c->work = work;
    submit(c);
}

/* One that changes the conversation. */
static void begin_change(gw_app *app, gw_exchange *exchange, int parts,
                         base_code (*prepare)(call *c, base_err *err),
                         base_code (*work)(call *c, base_err *err))
{
    call *c = make(app, exchange, parts);
    if (!c)
        return;
    c->prepare = prepare;
    c->work = work;
    c->received_ns = base_now_ns();
    c->port.tick = on_tick;
    c->granted.run = on_granted;
    c->lock.granted = lock_granted;
    c->stands = !gw_port_open(app->bridge, &c->port, c->loop, &c->err);
    submit(c);
}

void gw_api_conversations_create(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, 0, create);
}

void gw_api_conversations_get(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, 1, get);
}

void gw_api_conversations_update(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, 1, update);
}

void gw_api_conversations_delete(gw_app *app, gw_exchange *exchange)
{
    begin_change(app, exchange, 1, NULL, delete_conversation);
}

void gw_api_conversations_items_add(gw_app *app, gw_exchange *exchange)
{
    begin_change(app, exchange, 2, read_added, add_items);
}

void gw_api_conversations_items_list(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, 2, list_items);
}

void gw_api_conversations_item_get(gw_app *app, gw_exchange *exchange)
{
    begin(app, exchange, 3, get_item);
}

void gw_api_conversations_item_delete(gw_app *app, gw_exchange *exchange)
{
    begin_change(app, exchange, 3, NULL, delete_item);
}
