#include "gateway/route.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "gateway/admin.h"
#include "gateway/admin_cache.h"
#include "gateway/admin_requests.h"
#include "gateway/admin_session.h"
#include "gateway/admin_sessions.h"
#include "gateway/admin_state.h"
#include "gateway/admin_tenants.h"
#include "gateway/admin_usage.h"
#include "gateway/api_chat.h"
#include "gateway/api_completions.h"
#include "gateway/api_conversations.h"
#include "gateway/api_error.h"
#include "gateway/api_messages.h"
#include "gateway/api_models.h"
#include "gateway/api_responses.h"
#include "gateway/api_sessions.h"
#include "gateway/api_text.h"
#include "gateway/conf.h"
#include "gateway/dashboard.h"
#include "gateway/metrics.h"
#include "gateway/openapi.h"
#include "gateway/tenant.h"

enum {
    PUBLIC = 1,         /* on the public ports */
    ADMIN = 2,          /* on the admin listener */
    PUBLIC_METRICS = 4, /* on the public ports if metrics.public */
    JSON_BODY = 8,
    TURN = 16,  /* a turn counts and logs itself */
    QUIET = 32, /* probes: not in the log unless something is wrong */
};

typedef struct route {
    const char *method; /* a GET answers HEAD too */
    /* {id} stands for one part of a path, and at its end for everything below. */
    const char *path;
    unsigned flags;
    void (*run)(gw_app *app, gw_exchange *exchange);
} route;

static const route routes[] = {
    {"GET", "/", PUBLIC | ADMIN, gw_api_root},
    {"GET", "/health", PUBLIC | ADMIN | QUIET, gw_api_health},
    {"GET", "/healthz", PUBLIC | ADMIN | QUIET, gw_api_health},
    {"GET", "/livez", PUBLIC | ADMIN | QUIET, gw_api_health},
    {"GET", "/ping", PUBLIC | ADMIN | QUIET, gw_api_health},
    {"GET", "/health/ready", PUBLIC | ADMIN | QUIET, gw_api_ready},
    {"GET", "/readyz", PUBLIC | ADMIN | QUIET, gw_api_ready},
    {"GET", "/metrics", ADMIN | PUBLIC_METRICS | QUIET, gw_admin_metrics},
    {"GET", "/dashboard", ADMIN | QUIET, gw_dashboard_get},
    {"GET", "/dashboard/{id}", ADMIN | QUIET, gw_dashboard_get},
    {"GET", "/admin/v1/keys", ADMIN, gw_admin_keys_list},
    {"POST", "/admin/v1/keys", ADMIN | JSON_BODY, gw_admin_keys_make},
    {"DELETE", "/admin/v1/keys/{id}", ADMIN, gw_admin_keys_revoke},
    {"GET", "/admin/v1/overview", ADMIN | QUIET, gw_admin_overview},
    {"GET", "/admin/v1/requests", ADMIN | QUIET, gw_admin_requests},
    {"POST", "/admin/v1/requests/{id}/cancel", ADMIN, gw_admin_request_cancel},
    {"GET", "/admin/v1/requests/{id}", ADMIN, gw_admin_request},
    {"GET", "/admin/v1/sessions", ADMIN, gw_admin_sessions},
    {"GET", "/admin/v1/sessions/{id}/turns", ADMIN, gw_admin_turns},
    {"POST", "/admin/v1/sessions/{id}/fork", ADMIN, gw_api_sessions_fork},
    {"POST", "/admin/v1/sessions/{id}/pin", ADMIN | JSON_BODY, gw_api_sessions_pin},
    {"GET", "/admin/v1/sessions/{id}/export", ADMIN, gw_api_sessions_export},
    {"GET", "/admin/v1/sessions/{id}", ADMIN, gw_admin_session},
    {"DELETE", "/admin/v1/sessions/{id}", ADMIN, gw_api_sessions_delete},
    {"GET", "/admin/v1/turns/{id}", ADMIN, gw_admin_turn},
    {"GET", "/admin/v1/events", ADMIN, gw_admin_events},
    {"POST", "/admin/v1/session", ADMIN | JSON_BODY, gw_admin_login},
    {"GET", "/admin/v1/session", ADMIN | QUIET, gw_admin_whoami},
    {"DELETE", "/admin/v1/session", ADMIN, gw_admin_logout},
    {"GET", "/admin/v1/openapi.json", ADMIN | QUIET, gw_openapi_admin_get},
    {"GET", "/admin/v1/model", ADMIN, gw_admin_model},
    {"GET", "/admin/v1/cache", ADMIN, gw_admin_cache},
    {"GET", "/admin/v1/usage", ADMIN, gw_admin_usage},
    {"GET", "/admin/v1/trace", ADMIN, gw_admin_trace},
    {"GET", "/admin/v1/cache/tree", ADMIN, gw_admin_cache_tree},
    {"POST", "/admin/v1/cache/flush", ADMIN | JSON_BODY, gw_admin_cache_flush},
    {"POST", "/admin/v1/cache/prefetch", ADMIN | JSON_BODY, gw_admin_cache_prefetch},
    {"GET", "/admin/v1/tenants", ADMIN, gw_admin_tenants},
    {"POST", "/admin/v1/tenants", ADMIN | JSON_BODY, gw_admin_tenant_make},
    {"GET", "/admin/v1/tenants/{id}", ADMIN, gw_admin_tenant},
    {"PATCH", "/admin/v1/tenants/{id}", ADMIN | JSON_BODY, gw_admin_tenant_change},
    {"GET", "/admin/v1/config", ADMIN, gw_admin_config_get},
    {"PATCH", "/admin/v1/config", ADMIN | JSON_BODY, gw_admin_config_set},
    {"POST", "/admin/v1/drain", ADMIN, gw_admin_drain},
    {"POST", "/admin/v1/resume", ADMIN, gw_admin_resume},
    {"GET", "/openapi.json", PUBLIC, gw_openapi_get},
    {"GET", "/v1/models", PUBLIC, gw_api_models_list},
    {"GET", "/v1/models/{id}", PUBLIC, gw_api_models_get},
    {"POST", "/v1/chat/completions", PUBLIC | JSON_BODY | TURN, gw_api_chat_handle},
    {"POST", "/v1/chat/completions/render", PUBLIC | JSON_BODY | TURN, gw_api_chat_render},
    {"GET", "/v1/chat/completions", PUBLIC, gw_api_completions_list},
    {"GET", "/v1/chat/completions/{id}/messages", PUBLIC, gw_api_completions_messages},
    {"GET", "/v1/chat/completions/{id}", PUBLIC, gw_api_completions_get},
    {"POST", "/v1/chat/completions/{id}", PUBLIC | JSON_BODY, gw_api_completions_update},
    {"DELETE", "/v1/chat/completions/{id}", PUBLIC, gw_api_completions_delete},
    {"POST", "/v1/completions", PUBLIC | JSON_BODY | TURN, gw_api_completions_handle},
    {"POST", "/tokenize", PUBLIC | JSON_BODY | TURN, gw_api_tokenize},
    {"POST", "/detokenize", PUBLIC | JSON_BODY | TURN, gw_api_detokenize},
    {"POST", "/v1/responses", PUBLIC | JSON_BODY | TURN, gw_api_responses_handle},
    {"POST", "/v1/responses/input_tokens", PUBLIC | JSON_BODY | TURN, gw_api_responses_count},
    {"POST", "/v1/responses/compact", PUBLIC | JSON_BODY | TURN, gw_api_responses_compact},
    {"GET", "/v1/responses/{id}/input_items", PUBLIC, gw_api_responses_items},
    {"GET", "/v1/responses/{id}", PUBLIC, gw_api_responses_get},
    {"DELETE", "/v1/responses/{id}", PUBLIC, gw_api_responses_delete},
    {"POST", "/v1/responses/{id}", PUBLIC, gw_api_responses_cancel},
    {"POST", "/v1/conversations", PUBLIC | JSON_BODY, gw_api_conversations_create},
    {"POST", "/v1/conversations/{id}/items", PUBLIC | JSON_BODY, gw_api_conversations_items_add},
    {"GET", "/v1/conversations/{id}/items", PUBLIC, gw_api_conversations_items_list},
    {"GET", "/v1/conversations/{id}/items/{id}", PUBLIC, gw_api_conversations_item_get},
    {"DELETE", "/v1/conversations/{id}/items/{id}", PUBLIC, gw_api_conversations_item_delete},
    {"GET", "/v1/conversations/{id}", PUBLIC, gw_api_conversations_get},
    {"POST", "/v1/conversations/{id}", PUBLIC | JSON_BODY, gw_api_conversations_update},
    {"DELETE", "/v1/conversations/{id}", PUBLIC, gw_api_conversations_delete},
    {"POST", "/v1/sessions", PUBLIC | JSON_BODY, gw_api_sessions_create},
    {"GET", "/v1/sessions", PUBLIC, gw_api_sessions_list},
    {"POST", "/v1/sessions/{id}/turns", PUBLIC | JSON_BODY | TURN, gw_api_sessions_turn},
    {"GET", "/v1/sessions/{id}/turns", PUBLIC, gw_api_sessions_turns},
    {"POST", "/v1/sessions/{id}/fork", PUBLIC, gw_api_sessions_fork},
    {"POST", "/v1/sessions/import", PUBLIC | JSON_BODY, gw_api_sessions_import},
    {"GET", "/v1/sessions/{id}/export", PUBLIC, gw_api_sessions_export},
    {"POST", "/v1/sessions/{id}/append", PUBLIC, gw_api_sessions_append},
    {"POST", "/v1/sessions/{id}/pin", PUBLIC | JSON_BODY, gw_api_sessions_pin},
    {"GET", "/v1/sessions/{id}", PUBLIC, gw_api_sessions_get},
    {"DELETE", "/v1/sessions/{id}", PUBLIC, gw_api_sessions_delete},
    {"POST", "/v1/messages", PUBLIC | JSON_BODY | TURN, gw_api_messages_handle},
    {"POST", "/v1/messages/count_tokens", PUBLIC | JSON_BODY | TURN, gw_api_messages_count},
};
#define ROUTE_COUNT (sizeof routes / sizeof *routes)

static const char turn_label[] = "turn"; /* compared by address */
static int trace_fd = -1;

static bool offered(const gw_app *app, const route *r, gw_listener listener)
{
    if (listener == GW_LISTENER_ADMIN)
        return (r->flags & ADMIN) != 0;
    return (r->flags & PUBLIC) != 0 ||
           ((r->flags & PUBLIC_METRICS) != 0 && app->conf->metrics_public);
}

/* `length` is without a trailing slash, so that "/v1/models/" is "/v1/models". */
static bool matches(const route *r, const char *path, size_t length)
{
    const char *own = r->path, *end = path + length;
    for (;;) {
        size_t plain = strcspn(own, "{");
        if ((size_t)(end - path) < plain || memcmp(path, own, plain) != 0)
            return false;
        path += plain;
        own += plain;
        if (*own == '\0')
            return path == end;
        own = strchr(own, '}') + 1;
        const char *part = path;
        while (path < end && (*own == '\0' || *path != '/'))
            path++;
        if (path == part)
            return false;
    }
}

static bool method_fits(const route *r, const char *method)
{
    return strcmp(r->method, method) == 0 ||
           (strcmp(method, "HEAD") == 0 && strcmp(r->method, "GET") == 0);
}

static bool listed(const gw_conf_list *list, const char *name)
{
    for (uint32_t i = 0; i < list->count; i++)
        if (strcasecmp(list->items[i], name) == 0 || strcmp(list->items[i], "*") == 0)
            return true;
    return false;
}

/* A literal address, localhost, or a name of server.hosts, with or without a port: what a web page
 * of some other name, bound to our address by its owner's DNS, cannot send. */
static bool host_fits(const gw_app *app, const char *authority)
{
    char host[256];
    unsigned char address[sizeof(struct in6_addr)];
    size_t length = strlen(authority);
    if (length == 0)
        return true; /* HTTP/1.0; no browser */
    const char *colon = strrchr(authority, ':');
    if (colon != NULL && strspn(colon + 1, "0123456789") == strlen(colon + 1) &&
        strchr(colon, ']') == NULL)
        length = (size_t)(colon - authority);
    if (length >= sizeof host)
        return false;
    memcpy(host, authority, length);
    host[length] = '\0';
    if (host[0] == '[' && host[length - 1] == ']') {
        host[length - 1] = '\0';
        return inet_pton(AF_INET6, host + 1, address) == 1;
    }
    return inet_pton(AF_INET, host, address) == 1 || strcasecmp(host, "localhost") == 0 ||
           listed(&app->conf->server_hosts, host);
}

/* Host and Origin. With keys a foreign page has none to send; without them every request must show
 * that it is not one. */
static bool admissible(gw_app *app, gw_exchange *exchange)
{
    const char *origin = gw_exchange_header(exchange, "origin");
    bool origin_listed = origin != NULL && listed(&app->conf->server_cors_origins, origin);
    if (origin != NULL)
        gw_exchange_add_header(exchange, "vary", "origin");
    if (origin_listed) {
        gw_exchange_add_header(exchange, "access-control-allow-origin", origin);
        gw_exchange_add_header(
            exchange, "access-control-expose-headers",
            "x-request-id, request-id, retry-after, retry-after-ms, x-should-retry, "
            "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
            "x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, "
            "x-ratelimit-reset-tokens, anthropic-ratelimit-requests-limit, "
            "anthropic-ratelimit-requests-remaining, anthropic-ratelimit-requests-reset, "
            "anthropic-ratelimit-tokens-limit, anthropic-ratelimit-tokens-remaining, "
            "anthropic-ratelimit-tokens-reset");
    }
    if (gw_tenants_keyed(app->tenants) && gw_exchange_listener(exchange) != GW_LISTENER_ADMIN)
        return true;
    if (!host_fits(app, gw_exchange_authority(exchange))) {
        gw_error_respond(exchange, 421, "invalid_request_error", "misdirected_request", NULL,
                         "Host must be an address, localhost or listed in server.hosts");
        return false;
    }
    if (origin != NULL && !origin_listed &&
        !gw_same_origin(origin, gw_exchange_authority(exchange))) {
        gw_error_respond(exchange, 403, "permission_error", "origin_not_allowed", NULL,
                         "this Origin is not listed in server.cors_origins");
        return false;
    }
    return true;
}

static void answer_options(const gw_app *app, gw_exchange *exchange, const char *allow)
{
    const char *origin = gw_exchange_header(exchange, "origin");
    gw_header headers[] = {
        {"allow", allow},
        {"access-control-allow-methods", allow},
        {"access-control-allow-headers",
         gw_exchange_header(exchange, "access-control-request-headers")},
        {"access-control-max-age", "600"},
    };
    bool cors = origin != NULL && listed(&app->conf->server_cors_origins, origin);
    if (headers[2].value == NULL)
        headers[2].value = "content-type";
    gw_respond(exchange, 204, headers, cors ? 4 : 1, "", 0);
}

/* application/json with or without parameters. Compressed bodies are not unpacked: a small one may
 * stand for gigabytes. */
static bool is_json(gw_exchange *exchange)
{
    static const char json[] = "application/json";
    const char *type = gw_exchange_header(exchange, "content-type");
    const char *encoding = gw_exchange_header(exchange, "content-encoding");
    if (encoding != NULL && strcasecmp(encoding, "identity") != 0)
        return false;
    if (type == NULL || strncasecmp(type, json, sizeof json - 1) != 0)
        return false;
    const char *rest = type + sizeof json - 1;
    rest += strspn(rest, " \t");
    return *rest == '\0' || *rest == ';';
}

void gw_route_handle(void *ctx, gw_exchange *exchange)
{
    gw_app *app = ctx;
    const char *path = gw_exchange_path(exchange), *method = gw_exchange_method(exchange);
    size_t length = strlen(path);
    if (length > 1 && path[length - 1] == '/')
        length--;
    if (!admissible(app, exchange))
        return;
    const route *found = NULL;
    char allow[64] = "OPTIONS";
    bool known = false;
    for (size_t i = 0; i < ROUTE_COUNT && found == NULL; i++) {
        const route *r = &routes[i];
        if (!offered(app, r, gw_exchange_listener(exchange)) || !matches(r, path, length))
            continue;
        known = true;
        if (method_fits(r, method))
            found = r;
        size_t used = strlen(allow);
        snprintf(allow + used, sizeof allow - used, ", %s%s", r->method,
                 strcmp(r->method, "GET") == 0 ? ", HEAD" : "");
    }
    if (!known) {
        gw_error_not_found(exchange);
        return;
    }
    if (found == NULL) {
        if (strcmp(method, "OPTIONS") == 0)
            answer_options(app, exchange, allow);
        else
            gw_error_method(exchange, allow);
        return;
    }
    gw_exchange_set_label(exchange, (found->flags & TURN) != 0 ? turn_label : found->path);
    if ((found->flags & JSON_BODY) != 0 && !is_json(exchange)) {
        gw_exchange_set_label(exchange, found->path);
        gw_error_media_type(exchange);
        return;
    }
    found->run(app, exchange);
}

base_code gw_route_open_trace(const struct gw_conf *conf, base_err *err)
{
    if (conf->log_trace_path[0] == '\0')
        return BASE_OK;
    trace_fd = open(conf->log_trace_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (trace_fd < 0)
        return base_fail_param(err, BASE_IO, "log.trace_path", "log.trace_path %.120s: %s",
                               conf->log_trace_path, strerror(errno));
    return BASE_OK;
}

/* One line a request, one write(2) a line. Sizes and times only, as in the log. */
static void trace(const gw_exchange *exchange, const gw_exchange_end *end, int status)
{
    base_buf line;
    base_buf_init(&line, 0);
    const char *path = gw_exchange_path(exchange), *method = gw_exchange_method(exchange);
    base_buf_printf(&line, "{\"t_ms\":%" PRId64 ",\"id\":\"%s\",\"method\":", base_wall_ms(),
                    gw_exchange_id(exchange));
    base_buf_json_string(&line, method, strlen(method));
    base_buf_puts(&line, ",\"path\":");
    base_buf_json_string(&line, path, strlen(path));
    base_buf_printf(&line,
                    ",\"http\":%d,\"status\":%d,\"body_bytes\":%" PRIu64 ",\"sent_bytes\":%" PRIu64
                    ",\"ms\":%.3f}\n",
                    gw_exchange_http_major(exchange), status, end->body_bytes, end->sent_bytes,
                    (double)end->duration_ns / 1e6);
    if (!line.failed && write(trace_fd, line.data, line.length) < 0)
        base_log(BASE_LOG_WARN, "trace_failed reason=\"%s\"", strerror(errno));
    base_buf_deinit(&line);
}

static bool is_quiet(const char *label)
{
    for (size_t i = 0; i < ROUTE_COUNT; i++)
        if (routes[i].path == label)
            return (routes[i].flags & QUIET) != 0;
    return false;
}

void gw_route_ended(void *ctx, gw_exchange *exchange, const gw_exchange_end *end)
{
    gw_app *app = ctx;
    const char *label = gw_exchange_label(exchange);
    int status = end->gone ? 499 : end->status;
    if (trace_fd >= 0)
        trace(exchange, end, status);
    /* A turn logs and counts itself, but one that was refused for its key never began. */
    bool turn = label == turn_label;
    if (!turn)
        gw_metrics_request(app->metrics, label[0] != '\0' ? label : "other", status);
    bool quiet = status == 200 && is_quiet(label);
    if (app->conf->log_access && (!turn || status == 401 || status == 403))
        base_log(
            quiet ? BASE_LOG_DEBUG : BASE_LOG_INFO,
            "request_over req=%s http=%d method=%.16s path=%.128s status=%d remote=%s us=%" PRIu64,
            gw_exchange_id(exchange), gw_exchange_http_major(exchange),
            gw_exchange_method(exchange), gw_exchange_path(exchange), status,
            gw_exchange_remote(exchange), end->duration_ns / 1000);
}
