#include "gateway/admin.h"

#include <inttypes.h>
#include <jansson.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/buf.h"
#include "engine/base/log.h"
#include "gateway/admin_call.h"
#include "gateway/api_error.h"
#include "gateway/ledger.h"
#include "gateway/metrics.h"
#include "gateway/tenant.h"
#include "gateway/work.h"

#define METRICS_BYTES_MAX (1u << 20)
#define BODY_BYTES_MAX 4096 /* parsed on the loop */
#define KEYS_MAX 1024       /* of one list */
#define SCOPES_TEXT_MAX 64

static const gw_header json_headers[] = {{"content-type", "application/json"},
                                         {"cache-control", "no-store"}};

static bool is_local(const gw_exchange *exchange)
{
    const char *remote = gw_exchange_remote(exchange);
    return strncmp(remote, "127.", 4) == 0 || strcmp(remote, "::1") == 0 ||
           strcmp(remote, GW_REMOTE_UNIX) == 0;
}

void gw_admin_metrics(gw_app *app, gw_exchange *exchange)
{
    static const gw_header type[] = {{"content-type", "text/plain; version=0.0.4; charset=utf-8"}};
    gw_identity identity;
    if (gw_exchange_listener(exchange) == GW_LISTENER_ADMIN && !is_local(exchange) &&
        !gw_admin_admit(app, exchange, &identity))
        return;
    base_buf out;
    base_buf_init(&out, METRICS_BYTES_MAX);
    gw_metrics_render(app->metrics, app, &out);
    if (out.failed)
        gw_error_respond(exchange, 500, "server_error", "internal_error", NULL,
                         "no memory for the metrics");
    else
        gw_respond(exchange, 200, type, 1, out.data, out.length);
    base_buf_deinit(&out);
}

/* ---- keys ---- */

/* Making and revoking wait for a commit, so a worker does them. Freed on the loop, when both have
 * let go of it: the job runs exactly once, and `exchange` is NULL from the moment the client left.
 */
typedef struct change {
    gw_job job;
    gw_message done;
    gw_app *app;
    gw_loop *loop;
    gw_exchange *exchange;
    bool make;  /* else revoke, */
    bool force; /* the last key with scope admin, too */
    char tenant[GW_TENANT_NAME_MAX + 1], label[GW_TENANT_NAME_MAX + 1];
    char group[GW_TENANT_NAME_MAX + 1]; /* "": as it is */
    char text[GW_KEY_TEXT_MAX + 1];
    char restore[GW_TENANT_NAME_MAX + 1]; /* "": as configured */
    uint32_t scopes;
    int64_t key;
    base_err err;
} change;

static void respond(gw_exchange *exchange, base_buf *body)
{
    if (body->failed)
        gw_error_respond(exchange, 500, "server_error", "internal_error", NULL,
                         "no memory for the answer");
    else
        gw_respond(exchange, 200, json_headers, 2, body->data, body->length);
    base_buf_deinit(body);
}

static void add_row(base_buf *out, const gw_key_info *info)
{
    static const struct {
        uint32_t bit;
        const char *name;
    } scopes[] = {{GW_SCOPE_INFER, "inference"}, {GW_SCOPE_RAW, "raw"}, {GW_SCOPE_ADMIN, "admin"}};
    const char *comma = "";
    base_buf_printf(out, "\"id\":\"%" PRId64 "\",\"object\":\"key\",\"tenant\":", info->key);
    base_buf_json_string(out, info->tenant_name, strlen(info->tenant_name));
    if (info->group[0] != '\0') {
        base_buf_puts(out, ",\"group\":");
        base_buf_json_string(out, info->group, strlen(info->group));
    }
    base_buf_puts(out, ",\"label\":");
    base_buf_json_string(out, info->label, strlen(info->label));
    base_buf_puts(out, ",\"scopes\":[");
    for (size_t i = 0; i < sizeof scopes / sizeof *scopes; i++)
        if ((info->scopes & scopes[i].bit) != 0) {
            base_buf_printf(out, "%s\"%s\"", comma, scopes[i].name);
            comma = ",";
        }
    base_buf_puts(out, "]");
    if (info->restore >= 0)
        base_buf_printf(out, ",\"restore\":\"%s\"", gw_restore_name((gw_restore)info->restore));
    base_buf_printf(out, ",\"hint\":\"%s\",\"created_at\":%" PRId64, info->hint,
                    info->created_ms / 1000);
}

void gw_admin_keys_list(gw_app *app, gw_exchange *exchange)
{
    gw_identity identity;
    if (!gw_admin_admit(app, exchange, &identity))
        return;
    base_buf out;
    base_buf_init(&out, 0);
    gw_key_info *rows = calloc(KEYS_MAX, sizeof *rows);
    uint32_t count = rows != NULL ? gw_tenants_keys(app->tenants, rows, KEYS_MAX) : 0;
    out.failed = rows == NULL;
    base_buf_puts(&out, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; i < count && i < KEYS_MAX; i++) {
        base_buf_puts(&out, i > 0 ? ",{" : "{");
        add_row(&out, &rows[i]);
        base_buf_puts(&out, "}");
    }
    base_buf_printf(&out, "],\"has_more\":%s}", count > KEYS_MAX ? "true" : "false");
    free(rows);
    respond(exchange, &out);
}

static void on_gone(void *ctx)
{
    ((change *)ctx)->exchange = NULL;
}

static void on_done(gw_message *message)
{
    change *c = (change *)((char *)message - offsetof(change, done));
    if (c->err.code == BASE_OK && c->make)
        base_log(BASE_LOG_INFO, "key_made tenant=%s", c->tenant);
    else if (c->err.code == BASE_OK)
        base_log(BASE_LOG_INFO, "key_revoked id=%" PRId64, c->key);
    if (c->exchange == NULL) {
        free(c);
        return;
    }
    base_buf out;
    base_buf_init(&out, 0);
    if (c->err.code != BASE_OK) {
        gw_error_respond_err(c->exchange, &c->err);
    } else if (c->make) {
        base_buf_puts(&out, "{\"object\":\"key\",\"key\":");
        base_buf_json_string(&out, c->text, strlen(c->text));
        base_buf_puts(&out, ",\"tenant\":");
        base_buf_json_string(&out, c->tenant, strlen(c->tenant));
        base_buf_puts(&out, ",\"label\":");
        base_buf_json_string(&out, c->label, strlen(c->label));
        base_buf_puts(&out, "}");
        respond(c->exchange, &out);
    } else {
        base_buf_printf(
            &out, "{\"id\":\"%" PRId64 "\",\"object\":\"key.deleted\",\"deleted\":true}", c->key);
        respond(c->exchange, &out);
    }
    explicit_bzero(c->text, sizeof c->text);
    free(c);
}

static void run_change(gw_job *job)
{
    change *c = (change *)job;
    if (c->make)
        gw_tenants_mint(c->app->tenants, c->text, c->tenant, c->group[0] ? c->group : NULL,
                        c->restore[0] ? c->restore : NULL, c->label, c->scopes, &c->err);
    else
        gw_tenants_revoke(c->app->tenants, c->key, c->force, &c->err);
    c->done.run = on_done;
    gw_loop_post(c->loop, &c->done);
}

/* Takes `c`. */
static void submit(change *c, gw_app *app, gw_exchange *exchange)
{
    c->app = app;
    c->loop = gw_exchange_loop(exchange);
    c->exchange = exchange;
    c->job.run = run_change;
    if (!gw_workers_submit(app->workers, &c->job)) {
        free(c);
        gw_error_respond(exchange, 503, "server_error", "overloaded", NULL,
                         "too many requests wait");
        return;
    }
    gw_exchange_set_handler(exchange, c, on_gone, NULL);
}

static bool copy_text(char *out, const json_t *body, const char *name, const char *fallback,
                      base_err *err)
{
    const json_t *value = json_object_get(body, name);
    const char *text = value == NULL ? fallback : json_string_value(value);
    if (text == NULL || strlen(text) > GW_TENANT_NAME_MAX) {
        base_fail_param(err, BASE_INVALID, name, "%s must be a string of at most %d bytes", name,
                        GW_TENANT_NAME_MAX);
        return false;
    }
    strcpy(out, text);
    return true;
}

static bool read_scopes(uint32_t *out, const json_t *body, base_err *err)
{
    const json_t *list = json_object_get(body, "scopes");
    char text[SCOPES_TEXT_MAX] = "";
    if (list == NULL) {
        *out = GW_SCOPE_INFER;
        return true;
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *word = json_string_value(json_array_get(list, i));
        size_t used = strlen(text);
        if (word == NULL || used + strlen(word) + 2 > sizeof text)
            break;
        snprintf(text + used, sizeof text - used, "%s%s", used > 0 ? "," : "", word);
    }
    if (text[0] == '\0') {
        base_fail_param(err, BASE_INVALID, "scopes",
                        "scopes must be an array of inference, raw and admin");
        return false;
    }
    return gw_scopes_parse(out, text, err) == BASE_OK;
}

void gw_admin_keys_make(gw_app *app, gw_exchange *exchange)
{
    gw_identity identity;
    base_err err = BASE_ERR_INIT;
    size_t length;
    if (!gw_admin_admit(app, exchange, &identity))
        return;
    const char *text = gw_exchange_body(exchange, &length);
    if (length > BODY_BYTES_MAX) {
        gw_error_too_large(exchange, BODY_BYTES_MAX);
        return;
    }
    change *c = calloc(1, sizeof *c);
    json_t *body = json_loadb(text, length, JSON_REJECT_DUPLICATES, NULL);
    if (c == NULL)
        base_fail(&err, BASE_NOMEM, "no memory for the request");
    else if (!json_is_object(body))
        base_fail(&err, BASE_INVALID, "the body must be a JSON object");
    else if (copy_text(c->tenant, body, "tenant", "default", &err) &&
             copy_text(c->label, body, "label", "", &err) &&
             copy_text(c->group, body, "group", "", &err) &&
             copy_text(c->restore, body, "restore", "", &err) &&
             read_scopes(&c->scopes, body, &err) && !gw_tenants_keyed(app->tenants) &&
             (c->scopes & GW_SCOPE_ADMIN) == 0)
        base_fail_param(&err, BASE_INVALID, "scopes",
                        "the first key needs scope admin: from then on these paths ask for it");
    json_decref(body);
    if (err.code != BASE_OK) {
        free(c);
        gw_error_respond_err(exchange, &err);
        return;
    }
    c->make = true;
    submit(c, app, exchange);
}

void gw_admin_keys_revoke(gw_app *app, gw_exchange *exchange)
{
    gw_identity identity;
    if (!gw_admin_admit(app, exchange, &identity))
        return;
    const char *text = gw_exchange_path(exchange) + strlen("/admin/v1/keys/");
    char *end;
    long long key = strtoll(text, &end, 10);
    change *c = *text != '\0' && (*end == '\0' || strcmp(end, "/") == 0) && key > 0
                    ? calloc(1, sizeof *c)
                    : NULL;
    if (c == NULL) {
        gw_error_not_found(exchange);
        return;
    }
    c->key = key;
    c->force = strcmp(gw_exchange_query(exchange), "force=true") == 0;
    submit(c, app, exchange);
}
