#include "gateway/api_models.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "engine/base/buf.h"
#include "engine/base/clock.h"
#include "gateway/api_error.h"
#include "gateway/conf.h"
#include "gateway/tenant.h"

#define NAME_BYTES_MAX 512

static const gw_header as_json[] = {{"content-type", "application/json"}};

static void respond(gw_exchange *exchange, int status, base_buf *body)
{
    if (body->failed)
        gw_error_respond(exchange, 500, "server_error", "internal_error", NULL,
                         "no memory for the answer");
    else
        gw_respond(exchange, status, as_json, 1, body->data, body->length);
    base_buf_deinit(body);
}

static void add_model(const gw_app *app, gw_exchange *exchange, base_buf *out, const char *name)
{
    const eng_info *info = eng_get_info(app->engine);
    uint32_t output_max = app->conf->limits_output_tokens_max;
    if (output_max == 0 || output_max > info->context_max)
        output_max = info->context_max;
    base_buf_puts(out, "{\"id\":");
    base_buf_json_string(out, name, strlen(name));
    if (gw_exchange_header(exchange, "anthropic-version") != NULL) {
        char text[32];
        time_t seconds = (time_t)(app->started_ms / 1000);
        struct tm tm;
        strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&seconds, &tm));
        base_buf_puts(out, ",\"type\":\"model\",\"display_name\":");
        base_buf_json_string(out, name, strlen(name));
        base_buf_printf(out,
                        ",\"created_at\":\"%s\",\"max_input_tokens\":%" PRIu32
                        ",\"max_tokens\":%" PRIu32 "}",
                        text, info->context_max, output_max);
        return;
    }
    base_buf_printf(out,
                    ",\"object\":\"model\",\"created\":%" PRId64
                    ",\"owned_by\":\"whimbrel\",\"max_model_len\":%" PRIu32
                    ",\"context_window\":%" PRIu32 ",\"max_output_tokens\":%" PRIu32
                    ",\"capabilities\":{\"tools\":true,\"reasoning\":true,\"streaming\":true,"
                    "\"vision\":false}}",
                    app->started_ms / 1000, info->context_max, info->context_max, output_max);
}

static bool known(const gw_app *app, const char *name)
{
    if (strcmp(name, eng_get_info(app->engine)->name) == 0)
        return true;
    for (uint32_t i = 0; i < app->conf->model_aliases.count; i++)
        if (strcmp(app->conf->model_aliases.items[i], name) == 0 ||
            strcmp(app->conf->model_aliases.items[i], "*") == 0)
            return true;
    return false;
}

void gw_api_models_list(gw_app *app, gw_exchange *exchange)
{
    gw_identity identity;
    if (!gw_tenants_admit(app->tenants, &identity, exchange, GW_SCOPE_INFER))
        return;
    const char *own = eng_get_info(app->engine)->name, *last = own;
    bool anthropic = gw_exchange_header(exchange, "anthropic-version") != NULL;
    base_buf out;
    base_buf_init(&out, 0);
    base_buf_puts(&out, anthropic ? "{\"data\":[" : "{\"object\":\"list\",\"data\":[");
    add_model(app, exchange, &out, own);
    for (uint32_t i = 0; i < app->conf->model_aliases.count; i++) {
        const char *alias = app->conf->model_aliases.items[i];
        if (strcmp(alias, "*") == 0 || strcmp(alias, own) == 0)
            continue; /* "any name" is no name */
        base_buf_puts(&out, ",");
        add_model(app, exchange, &out, alias);
        last = alias;
    }
    base_buf_puts(&out, "]");
    if (anthropic) {
        base_buf_puts(&out, ",\"has_more\":false,\"first_id\":");
        base_buf_json_string(&out, own, strlen(own));
        base_buf_puts(&out, ",\"last_id\":");
        base_buf_json_string(&out, last, strlen(last));
    }
    base_buf_puts(&out, "}");
    respond(exchange, 200, &out);
}

void gw_api_models_get(gw_app *app, gw_exchange *exchange)
{
    gw_identity identity;
    if (!gw_tenants_admit(app->tenants, &identity, exchange, GW_SCOPE_INFER))
        return;
    char name[NAME_BYTES_MAX];
    snprintf(name, sizeof name, "%s", gw_exchange_path(exchange) + strlen("/v1/models/"));
    name[strcspn(name, "/")] = '\0'; /* a trailing slash is no part of it; no name has one inside */
    if (!known(app, name)) {
        gw_error_model_not_found(exchange, name);
        return;
    }
    base_buf out;
    base_buf_init(&out, 0);
    add_model(app, exchange, &out, name);
    respond(exchange, 200, &out);
}

static void respond_text(gw_exchange *exchange, int status, const char *text)
{
    gw_respond(exchange, status, as_json, 1, text, strlen(text));
}

void gw_api_health(gw_app *app, gw_exchange *exchange)
{
    respond_text(exchange, 200, "{\"status\":\"ok\"}");
}

/* Whether the engine stands still with work before it, judged from when a step was last seen by any
 * of these calls. */
bool gw_api_stalled(const gw_app *app)
{
    static _Atomic uint64_t steps_seen, seen_ns;
    static atomic_bool busy_seen;
    eng_stats stats = eng_get_stats(app->engine);
    uint64_t now = base_now_ns();
    bool busy = stats.queued + stats.running + stats.prefilling > 0;
    /* Work that came after a quiet time has not waited since then. */
    bool was_busy = atomic_exchange(&busy_seen, busy);
    if (!busy || !was_busy || stats.steps != atomic_load(&steps_seen)) {
        atomic_store(&steps_seen, stats.steps);
        atomic_store(&seen_ns, now);
        return false;
    }
    uint64_t since = atomic_load(&seen_ns);
    return now > since && now - since > (uint64_t)app->conf->health_stalled_ms * 1000000;
}

void gw_api_ready(gw_app *app, gw_exchange *exchange)
{
    if (atomic_load(&app->draining) || atomic_load(&app->paused))
        gw_error_draining(exchange);
    else if (gw_api_stalled(app))
        gw_error_respond(exchange, 503, "server_error", "stalled", NULL,
                         "the engine has work and makes no step");
    else
        respond_text(exchange, 200, "{\"status\":\"ready\"}");
}

void gw_api_root(gw_app *app, gw_exchange *exchange)
{
    respond_text(exchange, 200, "{\"name\":\"whimbrel\",\"version\":\"" WHIMBREL_VERSION "\"}");
}
