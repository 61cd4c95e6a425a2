/* admin_state: see the header. Numbers are read where they are counted, so they agree with /metrics
 * and the usage objects. */
#include "gateway/admin_state.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "gateway/account.h"
#include "gateway/admin_call.h"
#include "gateway/admin_usage.h"
#include "gateway/api_error.h"
#include "gateway/api_models.h"
#include "gateway/conf.h"
#include "gateway/events.h"
#include "gateway/ledger.h"
#include "gateway/live.h"
#include "gateway/metrics.h"
#include "gateway/process.h"
#include "gateway/tenant.h"

#define BODY_BYTES_MAX 4096 /* parsed on the loop */

static bool admit(gw_app *app, gw_exchange *exchange)
{
    gw_identity identity;
    return gw_admin_admit(app, exchange, &identity);
}

/* Takes `body`; NULL: there was no memory for it. */
static void answer(gw_exchange *exchange, json_t *body)
{
    static const gw_header headers[] = {{"content-type", "application/json"},
                                        {"cache-control", "no-store"}};
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    if (text)
        gw_respond(exchange, 200, headers, 2, text, strlen(text));
    else
        gw_error_respond(exchange, 503, "server_error", "internal_error", NULL,
                         "no memory for the answer");
    free(text);
    json_decref(body);
}

/* An event about one thing: {"name":value}. */
static void post(gw_app *app, const char *event, const char *name, const char *value)
{
    base_buf data;
    base_buf_init(&data, 0);
    base_buf_printf(&data, "{\"%s\":%s}", name, value);
    gw_events_post(app->events, event, &data);
    base_buf_deinit(&data);
}

static json_int_t n(uint64_t value)
{
    return (json_int_t)value;
}

/* A tenant's totals, in the order of the report. */
static const struct {
    const char *name;
    size_t offset;
} columns[] = {
    {"turns", offsetof(gw_usage_totals, turns)},
    {"cancelled", offsetof(gw_usage_totals, cancelled)},
    {"failed", offsetof(gw_usage_totals, failed)},
    {"unstored", offsetof(gw_usage_totals, unstored)},
    {"prompt_tokens", offsetof(gw_usage_totals, prompt_tokens)},
    {"cached_tokens", offsetof(gw_usage_totals, cached_tokens)},
    {"restored_tokens", offsetof(gw_usage_totals, restored_tokens)},
    {"output_tokens", offsetof(gw_usage_totals, output_tokens)},
    {"reasoning_tokens", offsetof(gw_usage_totals, reasoning_tokens)},
    {"drafted_tokens", offsetof(gw_usage_totals, drafted)},
    {"accepted_tokens", offsetof(gw_usage_totals, accepted)},
    {"queue_ns", offsetof(gw_usage_totals, queue_ns)},
    {"prefill_ns", offsetof(gw_usage_totals, prefill_ns)},
    {"decode_ns", offsetof(gw_usage_totals, decode_ns)},
};

#define COLUMN_COUNT (sizeof columns / sizeof *columns)

static uint64_t column(const gw_usage_totals *totals, size_t index)
{
    uint64_t value;
    memcpy(&value, (const char *)totals + columns[index].offset, sizeof value);
    return value;
}

static json_t *totals_json(const gw_usage_totals *totals)
{
    json_t *out = json_object();
    for (size_t i = 0; i < COLUMN_COUNT; i++)
        json_object_set_new(out, columns[i].name, json_integer(n(column(totals, i))));
    return out;
}

static json_t *memory_json(const eng_stats *s, const eng_info *info)
{
    return json_pack("{si si sI si si sI}", "pages", (int)s->pages_total, "pages_free",
                     (int)s->pages_free, "page_bytes", n(info->page_bytes), "index_nodes",
                     (int)s->index_nodes, "index_pages", (int)s->index_pages, "evicted_pages",
                     n(s->evicted_pages));
}

static json_t *disk_json(const eng_stats *s)
{
    return json_pack("{sb sb sb sI sI sI sI sI sI sI sI sI}", "open", s->disk_open, "paused",
                     s->disk_paused, "full", s->disk_full, "records", n(s->disk_records), "bytes",
                     n(s->disk_bytes), "queued", n(s->disk_queued), "written_bytes",
                     n(s->disk_written_bytes), "read_bytes", n(s->disk_read_bytes), "refused",
                     n(s->disk_refused), "dropped", n(s->disk_dropped), "corrupt",
                     n(s->disk_corrupt), "errors", n(s->disk_errors));
}

/* Memory's tier by what the prefix tree holds. */
static json_t *tiers_json(const gw_app *app, const eng_stats *s, const eng_info *info)
{
    json_t *list = json_array();
    json_array_append_new(list, json_pack("{ss sI sI}", "name", "memory", "bytes",
                                          n(s->index_pages * info->page_bytes), "bytes_max",
                                          n(s->pages_total * info->page_bytes)));
    if (s->disk_open)
        json_array_append_new(list,
                              json_pack("{ss sI sI}", "name", "disk", "bytes", n(s->disk_bytes),
                                        "bytes_max", n(app->conf->cache_disk_bytes)));
    return list;
}

static json_t *quantiles_json(const gw_window_view *view, gw_window_time time)
{
    uint64_t count = view->times[time].count;
    if (!count)
        return json_pack("{sI sn sn}", "count", n(0), "p50", "p99");
    return json_pack("{sI sf sf}", "count", n(count), "p50", view->times[time].p50 * 1e3, "p99",
                     view->times[time].p99 * 1e3);
}

static json_t *window_json(gw_app *app)
{
    gw_window_view v = gw_window_look(gw_metrics_window(app->metrics), base_now_ns());
    const uint64_t *c = v.counts;
    json_t *out =
        json_pack("{sI sI sI sI sI sf so so}", "seconds", n((uint64_t)(v.seconds + 0.5)),
                  "requests", n(c[GW_WINDOW_REQUESTS]), "output_tokens",
                  n(c[GW_WINDOW_OUTPUT_TOKENS]), "prompt_tokens", n(c[GW_WINDOW_PROMPT_TOKENS]),
                  "cached_tokens", n(c[GW_WINDOW_CACHED_TOKENS]), "output_tokens_per_second",
                  v.seconds > 0 ? (double)c[GW_WINDOW_OUTPUT_TOKENS] / v.seconds : 0.0, "ttft_ms",
                  quantiles_json(&v, GW_WINDOW_TTFT), "itl_ms", quantiles_json(&v, GW_WINDOW_ITL));
    json_object_set_new(out, "accepted_length",
                        c[GW_WINDOW_PASSES] ? json_real((double)c[GW_WINDOW_OUTPUT_TOKENS] /
                                                        (double)c[GW_WINDOW_PASSES])
                                            : json_null());
    return out;
}

static json_t *phases_json(const gw_app *app)
{
    uint32_t counts[GW_PHASE_COUNT];
    json_t *out = json_object();
    gw_live_phases(app->live, counts);
    for (gw_phase phase = 0; phase < GW_PHASE_DONE; phase++)
        json_object_set_new(out, gw_phase_name(phase), json_integer(n(counts[phase])));
    return out;
}

static json_t *process_json(void)
{
    gw_process p = gw_process_look();
    return json_pack("{sf sI sI sI sI sI}", "cpu_seconds", p.cpu_seconds, "memory_bytes",
                     n(p.memory_bytes), "memory_peak_bytes", n(p.memory_peak_bytes), "threads",
                     n(p.threads), "cores", n(p.cores), "pid", (json_int_t)getpid());
}

/* An estimate: cached tokens times what an uncached one took on average. */
static double saved_seconds(const gw_usage_totals *t)
{
    uint64_t uncached = t->prompt_tokens - t->cached_tokens;
    return uncached ? (double)t->cached_tokens * (double)t->prefill_ns * 1e-9 / (double)uncached
                    : 0;
}

void gw_admin_overview(gw_app *app, gw_exchange *exchange)
{
    if (!admit(app, exchange))
        return;
    eng_stats e = eng_get_stats(app->engine);
    const eng_info *info = eng_get_info(app->engine);
    gw_ledger_stats l = gw_ledger_get_stats(app->ledger);
    gw_server_stats s = gw_server_get_stats(app->server);
    gw_events_stats events = gw_events_get_stats(app->events);
    gw_usage_totals totals = gw_account_total(gw_tenants_account(app->tenants));
    const char *status = atomic_load(&app->draining) || atomic_load(&app->paused) ? "draining"
                         : gw_api_stalled(app)                                    ? "stalled"
                                                                                  : "ready";
    int64_t now_ms = base_wall_ms();
    json_t *out = json_pack(
        "{ss ss ss sI sI sI ss ss s{si si si} s{si si sI} s{sI sI sI si sI}}", "object", "overview",
        "version", WHIMBREL_VERSION, "status", status, "started_at",
        (json_int_t)(app->started_ms / 1000), "uptime_seconds",
        (json_int_t)((now_ms - app->started_ms) / 1000), "now_ms", (json_int_t)now_ms, "model",
        info->name, "backend", info->backend, "engine", "queued", (int)e.queued, "running",
        (int)e.running, "prefilling", (int)e.prefilling, "server", "open_connections",
        (int)s.open_connections, "open_exchanges", (int)s.open_exchanges, "connections",
        n(s.connections), "ledger", "bytes", n(l.database_bytes), "log_bytes", n(l.wal_bytes),
        "commits", n(l.commits), "queued", (int)l.queued, "sessions", n(l.native_sessions));
    json_object_set_new(out, "process", process_json());
    json_object_set_new(out, "phases", phases_json(app));
    json_object_set_new(out, "window", window_json(app));
    json_object_set_new(out, "tiers", tiers_json(app, &e, info));
    json_object_set_new(out, "memory", memory_json(&e, info));
    json_object_set_new(out, "disk", disk_json(&e));
    json_object_set_new(out, "totals", totals_json(&totals));
    json_object_set_new(out, "saved_seconds", json_real(saved_seconds(&totals)));
    json_object_set_new(
        out, "events",
        json_pack("{si sI}", "listeners", (int)events.listeners, "lost", n(events.lost)));
    answer(exchange, out);
}

void gw_admin_model(gw_app *app, gw_exchange *exchange)
{
    if (!admit(app, exchange))
        return;
    const eng_info *i = eng_get_info(app->engine);
    static const char *const thinking[] = {
        [ENG_THINK_DEFAULT] = "default",
        [ENG_THINK_ENABLED] = "enabled",
        [ENG_THINK_DISABLED] = "disabled",
        [ENG_THINK_ADAPTIVE] = "adaptive",
    };
    answer(exchange,
           json_pack("{ss ss ss ss ss ss ss ss ss si si si si si sI sI si si}", "object", "model",
                     "name", i->name, "path", app->conf->model_path, "backend", i->backend, "kv",
                     i->kv, "fingerprint", i->fingerprint, "numerics", i->numerics, "template",
                     i->template_id, "thinking", thinking[i->thinking], "context_max",
                     (int)i->context_max, "vocabulary", (int)i->vocab, "layers", (int)i->layers,
                     "hidden", (int)i->hidden, "draft_block", (int)i->draft_block, "weight_bytes",
                     n(i->weight_bytes), "page_bytes", n(i->page_bytes), "page_tokens",
                     (int)i->page_tokens, "pages", (int)i->page_count));
}

/* ---- cache ---- */

void gw_admin_cache(gw_app *app, gw_exchange *exchange)
{
    if (!admit(app, exchange))
        return;
    eng_stats s = eng_get_stats(app->engine);
    const eng_info *info = eng_get_info(app->engine);
    gw_usage_totals totals = gw_account_total(gw_tenants_account(app->tenants));
    json_t *reasons = json_object();
    for (gw_miss miss = GW_MISS_NONE; miss < GW_MISS_COUNT; miss++) {
        uint64_t turns, lost;
        const char *name = gw_miss_name(miss);
        gw_metrics_misses(app->metrics, miss, &turns, &lost);
        json_object_set_new(reasons, name ? name : "none",
                            json_pack("{sI sI}", "turns", n(turns), "lost_tokens", n(lost)));
    }
    answer(exchange, json_pack("{ss ss sI sI sI sf so so so so}", "object", "cache", "policy",
                               app->conf->cache_policy, "prompt_tokens", n(totals.prompt_tokens),
                               "cached_tokens", n(totals.cached_tokens), "restored_tokens",
                               n(totals.restored_tokens), "saved_seconds", saved_seconds(&totals),
                               "tiers", tiers_json(app, &s, info), "memory", memory_json(&s, info),
                               "disk", disk_json(&s), "reasons", reasons));
}

/* ---- usage ---- */

static void add_json(void *ctx, const char *name, const gw_usage_totals *totals)
{
    json_t *row = totals_json(totals);
    json_object_set_new(row, "tenant", json_string(name));
    json_object_set_new(row, "saved_seconds", json_real(saved_seconds(totals)));
    json_array_append_new(ctx, row);
}

/* RFC 4180; names are quoted. */
static void add_csv(void *ctx, const char *name, const gw_usage_totals *totals)
{
    base_buf *out = ctx;
    base_buf_puts(out, "\"");
    for (; *name; name++)
        base_buf_printf(out, *name == '"' ? "\"\"" : "%c", *name);
    base_buf_puts(out, "\"");
    for (size_t i = 0; i < COLUMN_COUNT; i++)
        base_buf_printf(out, ",%" PRIu64, column(totals, i));
    base_buf_puts(out, "\r\n");
}

static void answer_csv(gw_app *app, gw_exchange *exchange)
{
    static const gw_header headers[] = {{"content-type", "text/csv; charset=utf-8; header=present"},
                                        {"cache-control", "no-store"}};
    base_buf out;
    base_buf_init(&out, 0);
    base_buf_puts(&out, "tenant");
    for (size_t i = 0; i < COLUMN_COUNT; i++)
        base_buf_printf(&out, ",%s", columns[i].name);
    base_buf_puts(&out, "\r\n");
    gw_account_each(gw_tenants_account(app->tenants), add_csv, &out);
    if (out.failed)
        answer(exchange, NULL);
    else
        gw_respond(exchange, 200, headers, 2, out.data, out.length);
    base_buf_deinit(&out);
}

void gw_admin_usage(gw_app *app, gw_exchange *exchange)
{
    const char *query = gw_exchange_query(exchange);
    if (strncmp(query, "by=", 3) == 0 || strstr(query, "&by=")) {
        gw_admin_usage_report(app, exchange);
        return;
    }
    if (!admit(app, exchange))
        return;
    if (strcmp(query, "format=csv") == 0) {
        answer_csv(app, exchange);
        return;
    }
    if (*query && strcmp(query, "format=json") != 0) {
        gw_error_respond(exchange, 400, "invalid_request_error", NULL, "format",
                         "format must be json or csv");
        return;
    }
    json_t *rows = json_array();
    gw_usage_totals totals = gw_account_total(gw_tenants_account(app->tenants));
    gw_account_each(gw_tenants_account(app->tenants), add_json, rows);
    answer(exchange, json_pack("{ss sI so so}", "object", "usage", "since",
                               (json_int_t)(app->started_ms / 1000), "totals", totals_json(&totals),
                               "data", rows));
}

/* ---- configuration ---- */

void gw_admin_config_get(gw_app *app, gw_exchange *exchange)
{
    char *text = NULL;
    size_t length = 0;
    if (!admit(app, exchange))
        return;
    FILE *file = open_memstream(&text, &length);
    if (file) {
        gw_conf_print(app->conf, file);
        fclose(file);
    }
    json_t *keys = text ? json_loadb(text, length, 0, NULL) : NULL;
    free(text);
    json_object_set_new(json_object_get(keys, "log"), "level",
                        json_string(base_log_level_name(base_log_get_level())));
    answer(exchange,
           keys ? json_pack("{ss s[s] so}", "object", "config", "live", "log.level", "config", keys)
                : NULL);
}

void gw_admin_config_set(gw_app *app, gw_exchange *exchange)
{
    size_t length;
    base_err err = BASE_ERR_INIT;
    base_log_level level = base_log_get_level();
    if (!admit(app, exchange))
        return;
    const char *text = gw_exchange_body(exchange, &length);
    if (length > BODY_BYTES_MAX) {
        gw_error_too_large(exchange, BODY_BYTES_MAX);
        return;
    }
    json_t *body = json_loadb(text, length, JSON_REJECT_DUPLICATES, NULL);
    base_code code = json_is_object(body)
                         ? gw_conf_change(&level, body, &err)
                         : base_fail(&err, BASE_INVALID, "the body must be a JSON object of keys");
    json_decref(body);
    if (code) {
        gw_error_respond_err(exchange, &err);
        return;
    }
    base_log(BASE_LOG_INFO, "config_changed log.level=%s", base_log_level_name(level));
    base_log_set_level(level);
    char quoted[32];
    snprintf(quoted, sizeof quoted, "\"%s\"", base_log_level_name(level));
    post(app, "config.changed", "log.level", quoted);
    gw_admin_config_get(app, exchange);
}

/* ---- draining ---- */

static void set_paused(gw_app *app, gw_exchange *exchange, int paused)
{
    if (!admit(app, exchange))
        return;
    if (atomic_exchange(&app->paused, paused) != paused) {
        base_log(BASE_LOG_INFO, paused ? "draining by=admin" : "resumed by=admin");
        post(app, "drain.changed", "draining", paused ? "true" : "false");
    }
    eng_stats s = eng_get_stats(app->engine);
    answer(exchange, json_pack("{ss sb si si}", "object", "drain", "draining",
                               atomic_load(&app->paused) || atomic_load(&app->draining), "running",
                               (int)(s.running + s.prefilling), "queued", (int)s.queued));
}

void gw_admin_drain(gw_app *app, gw_exchange *exchange)
{
    set_paused(app, exchange, 1);
}

void gw_admin_resume(gw_app *app, gw_exchange *exchange)
{
    set_paused(app, exchange, 0);
}
