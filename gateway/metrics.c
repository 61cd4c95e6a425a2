#include "gateway/metrics.h"

#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "gateway/account.h"
#include "gateway/append.h"
#include "gateway/conf.h"
#include "gateway/lock.h"
#include "gateway/ledger.h"
#include "gateway/live.h"
#include "gateway/otlp.h"
#include "gateway/pin.h"
#include "gateway/process.h"
#include "gateway/tenant.h"

#define BUCKET_MAX 16
#define FORECAST_NS_MIN 10000000

/* From a decode step of a small model to a long prefill; a token bucket is a power of four. */
static const double second_bounds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                                       0.5,   1,      2.5,   5,    10,    30,   120};
static const double token_bounds[] = {1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576};

static const double ratio_bounds[] = {0.05, 0.1, 0.15, 0.2, 0.25, 0.5, 1, 2, 5};
static const double length_bounds[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16};

#define SECONDS second_bounds, sizeof second_bounds / sizeof *second_bounds, 1e9
#define TOKENS token_bounds, sizeof token_bounds / sizeof *token_bounds, 1

/* A sum is kept as a whole number of 1 / scale, so that it is one atomic add. */
static const struct {
    const char *name, *help;
    const double *bounds;
    size_t bound_count;
    double scale;
} histograms[GW_HISTOGRAM_COUNT] = {
    [GW_TTFT] = {"ttft_seconds", "Request complete to first output event.", SECONDS},
    [GW_ITL] = {"itl_seconds", "Between output events of a stream.", SECONDS},
    [GW_QUEUE] = {"queue_seconds", "Waiting for the engine.", SECONDS},
    [GW_PREFILL] = {"prefill_seconds", "Prefill of a request.", SECONDS},
    [GW_E2E] = {"e2e_seconds", "Request complete to its end.", SECONDS},
    [GW_COMMIT] = {"commit_seconds", "End of generation to committed.", SECONDS},
    [GW_PROMPT_TOKENS] = {"prompt_tokens", "Prompt tokens of a request.", TOKENS},
    [GW_UNCACHED_TOKENS] = {"uncached_tokens", "Prompt tokens of a request that were not cached.",
                            TOKENS},
    [GW_OUTPUT_TOKENS] = {"output_tokens", "Output tokens of a request.", TOKENS},
    [GW_FORECAST] = {"admission_forecast_seconds",
                     "Wait for the engine, as admission predicted it.", SECONDS},
    [GW_FORECAST_ERROR] =
        {"admission_forecast_error_ratio",
         "By what share of it the wait was predicted wrong; of waits of 10 ms and more.",
         ratio_bounds, sizeof ratio_bounds / sizeof *ratio_bounds, 1e6},
    [GW_ACCEPTED_LENGTH] =
        {"accepted_length_tokens",
         "Output tokens that a forward pass gave a sequence; 1: no draft was kept.", length_bounds,
         sizeof length_bounds / sizeof *length_bounds, 1},
};
_Static_assert(sizeof second_bounds / sizeof *second_bounds < BUCKET_MAX, "buckets");
_Static_assert(sizeof token_bounds / sizeof *token_bounds < BUCKET_MAX, "buckets");

static const struct {
    const char *name, *help;
} counters[GW_COUNTER_COUNT] = {
    [GW_CLIENT_GONE] = {"client_gone_total", "Turns whose client left before the end."},
    [GW_STREAM_FAILED] = {"streams_failed_total",
                          "Streams that ended in an error, behind the status 200."},
    [GW_COMMIT_FAILED] = {"commit_failed_total", "Turns that could not be stored."},
    [GW_TURNS_STORED] = {"turns_stored_total", "Turns committed to the ledger."},
    [GW_SPLICED_ITEMS] = {"spliced_items_total",
                          "Assistant items taken from the ledger as exact tokens."},
    [GW_LIMITED] = {"limited_total", "Requests refused for their tenant's limits."},
    [GW_RENDERED_ITEMS] = {"rendered_items_total", "Assistant items rendered from JSON."},
};

static const int statuses[] = {200, 204, 400, 401, 403, 404, 405, 408, 409,
                               413, 415, 421, 429, 431, 499, 500, 503};
#define STATUS_COUNT (sizeof statuses / sizeof *statuses + 1) /* the last one: any other */

static const char *const finishes[] = {
    [ENG_FINISH_STOP] = "stop",         [ENG_FINISH_CALLS] = "tool_calls",
    [ENG_FINISH_LENGTH] = "length",     [ENG_FINISH_CANCELLED] = "abort",
    [ENG_FINISH_DEADLINE] = "deadline", [ENG_FINISH_ERROR] = "error",
};
#define FINISH_COUNT (sizeof finishes / sizeof *finishes)

struct gw_metrics {
    gw_window *window;
    _Atomic uint64_t finished[FINISH_COUNT];
    _Atomic uint64_t counters[GW_COUNTER_COUNT];
    _Atomic uint64_t misses[GW_MISS_COUNT], lost_tokens[GW_MISS_COUNT];
    struct {
        _Atomic uint64_t buckets[BUCKET_MAX]; /* the last one used: beyond all bounds */
        _Atomic uint64_t sum;
    } histograms[GW_HISTOGRAM_COUNT];
    _Atomic(const char *) routes[GW_ROUTES_MAX]; /* filled from the front, never changed */
    _Atomic uint64_t requests[GW_ROUTES_MAX + 1][STATUS_COUNT];
};

base_code gw_metrics_create(gw_metrics **out, base_err *err)
{
    gw_metrics *metrics = calloc(1, sizeof *metrics);
    if (metrics == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for the metrics");
    base_code code = gw_window_create(&metrics->window, base_now_ns(), err);
    if (code != BASE_OK) {
        free(metrics);
        return code;
    }
    *out = metrics;
    return BASE_OK;
}

void gw_metrics_destroy(gw_metrics *metrics)
{
    if (metrics != NULL)
        gw_window_destroy(metrics->window);
    free(metrics);
}

gw_window *gw_metrics_window(gw_metrics *metrics)
{
    return metrics->window;
}

void gw_metrics_started(gw_metrics *metrics, uint32_t prompt_tokens, uint32_t cached_tokens)
{
    uint64_t now = base_now_ns();
    gw_window_add(metrics->window, GW_WINDOW_PROMPT_TOKENS, prompt_tokens, now);
    gw_window_add(metrics->window, GW_WINDOW_CACHED_TOKENS, cached_tokens, now);
}

void gw_metrics_forecast(gw_metrics *metrics, uint64_t forecast_ns, uint64_t queue_ns)
{
    gw_metrics_observe(metrics, GW_FORECAST, (double)forecast_ns * 1e-9);
    if (queue_ns >= FORECAST_NS_MIN)
        gw_metrics_observe(metrics, GW_FORECAST_ERROR,
                           fabs((double)forecast_ns - (double)queue_ns) / (double)queue_ns);
}

void gw_metrics_finish(gw_metrics *metrics, eng_finish finish)
{
    atomic_fetch_add_explicit(&metrics->finished[finish], 1, memory_order_relaxed);
    gw_window_add(metrics->window, GW_WINDOW_REQUESTS, 1, base_now_ns());
}

void gw_metrics_add(gw_metrics *metrics, gw_counter counter, uint64_t n)
{
    atomic_fetch_add_explicit(&metrics->counters[counter], n, memory_order_relaxed);
}

void gw_metrics_miss(gw_metrics *metrics, uint32_t reason, uint64_t lost_tokens)
{
    atomic_fetch_add_explicit(&metrics->misses[reason], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&metrics->lost_tokens[reason], lost_tokens, memory_order_relaxed);
}

void gw_metrics_misses(const gw_metrics *metrics, uint32_t reason, uint64_t *turns,
                       uint64_t *lost_tokens)
{
    *turns = atomic_load_explicit(&metrics->misses[reason], memory_order_relaxed);
    *lost_tokens = atomic_load_explicit(&metrics->lost_tokens[reason], memory_order_relaxed);
}

static void observe_window(gw_metrics *metrics, gw_histogram histogram, double value)
{
    if (histogram == GW_TTFT || histogram == GW_ITL) {
        gw_window_observe(metrics->window, histogram == GW_TTFT ? GW_WINDOW_TTFT : GW_WINDOW_ITL,
                          value, base_now_ns());
    } else if (histogram == GW_ACCEPTED_LENGTH) {
        uint64_t now = base_now_ns();
        gw_window_add(metrics->window, GW_WINDOW_OUTPUT_TOKENS, (uint64_t)value, now);
        gw_window_add(metrics->window, GW_WINDOW_PASSES, 1, now);
    }
}

void gw_metrics_observe(gw_metrics *metrics, gw_histogram histogram, double value)
{
    size_t bucket = 0;
    while (bucket < histograms[histogram].bound_count &&
           value > histograms[histogram].bounds[bucket])
        bucket++;
    atomic_fetch_add_explicit(&metrics->histograms[histogram].buckets[bucket], 1,
                              memory_order_relaxed);
    if (value > 0)
        atomic_fetch_add_explicit(&metrics->histograms[histogram].sum,
                                  (uint64_t)(value * histograms[histogram].scale + 0.5),
                                  memory_order_relaxed);
    observe_window(metrics, histogram, value);
}

static size_t route_index(gw_metrics *metrics, const char *route)
{
    for (size_t i = 0; i < GW_ROUTES_MAX; i++) {
        const char *known = atomic_load_explicit(&metrics->routes[i], memory_order_acquire);
        if (known == NULL && atomic_compare_exchange_strong(&metrics->routes[i], &known, route))
            return i;
        if (strcmp(known, route) == 0)
            return i;
    }
    return GW_ROUTES_MAX;
}

void gw_metrics_request(gw_metrics *metrics, const char *route, int status)
{
    size_t at = 0;
    while (at < STATUS_COUNT - 1 && statuses[at] != status)
        at++;
    atomic_fetch_add_explicit(&metrics->requests[route_index(metrics, route)][at], 1,
                              memory_order_relaxed);
}

/* ---- text ---- */

static void family(base_buf *out, const char *name, const char *type, const char *help)
{
    base_buf_printf(out, "# HELP whimbrel_%s %s\n# TYPE whimbrel_%s %s\n", name, help, name, type);
}

static void count(base_buf *out, const char *name, const char *help, uint64_t value)
{
    family(out, name, "counter", help);
    base_buf_printf(out, "whimbrel_%s %" PRIu64 "\n", name, value);
}

static void gauge(base_buf *out, const char *name, const char *help, double value)
{
    family(out, name, "gauge", help);
    base_buf_printf(out, "whimbrel_%s %.15g\n", name, value);
}

/* A label's value in quotes: \, " and line feeds are escaped (text format 0.0.4). */
static void label(base_buf *out, const char *name, const char *value)
{
    base_buf_printf(out, "%s=\"", name);
    for (; *value != '\0'; value++) {
        if (*value == '\n')
            base_buf_puts(out, "\\n");
        else if (*value == '"' || *value == '\\')
            base_buf_printf(out, "\\%c", *value);
        else
            base_buf_add(out, value, 1);
    }
    base_buf_puts(out, "\"");
}

/* `name` is whole; `labels` are those that every series has, with a comma behind, or "". */
static void render_histogram(gw_metrics *metrics, size_t which, const char *name,
                             const char *labels, base_buf *out)
{
    base_buf_printf(out, "# HELP %s %s\n# TYPE %s histogram\n", name, histograms[which].help, name);
    uint64_t sum = 0;
    for (size_t i = 0; i <= histograms[which].bound_count; i++) {
        sum += atomic_load_explicit(&metrics->histograms[which].buckets[i], memory_order_relaxed);
        if (i < histograms[which].bound_count)
            base_buf_printf(out, "%s_bucket{%sle=\"%.15g\"} %" PRIu64 "\n", name, labels,
                            histograms[which].bounds[i], sum);
        else
            base_buf_printf(out, "%s_bucket{%sle=\"+Inf\"} %" PRIu64 "\n", name, labels, sum);
    }
    double total =
        (double)atomic_load_explicit(&metrics->histograms[which].sum, memory_order_relaxed);
    int width = labels[0] != '\0' ? (int)strlen(labels) - 1 : 0;
    const char *open = width > 0 ? "{" : "", *close = width > 0 ? "}" : "";
    base_buf_printf(out, "%s_sum%s%.*s%s %.15g\n%s_count%s%.*s%s %" PRIu64 "\n", name, open, width,
                    labels, close, total / histograms[which].scale, name, open, width, labels,
                    close, sum);
}

static void render_requests(gw_metrics *metrics, base_buf *out)
{
    family(out, "requests_total", "counter", "Finished HTTP requests; 499: the client left first.");
    for (size_t i = 0; i <= GW_ROUTES_MAX; i++) {
        const char *route = i < GW_ROUTES_MAX
                                ? atomic_load_explicit(&metrics->routes[i], memory_order_acquire)
                                : "other";
        if (route == NULL)
            continue;
        for (size_t j = 0; j < STATUS_COUNT; j++) {
            uint64_t n = atomic_load_explicit(&metrics->requests[i][j], memory_order_relaxed);
            if (n == 0)
                continue;
            base_buf_puts(out, "whimbrel_requests_total{");
            label(out, "route", route);
            if (j < STATUS_COUNT - 1)
                base_buf_printf(out, ",status=\"%d\"} %" PRIu64 "\n", statuses[j], n);
            else
                base_buf_printf(out, ",status=\"other\"} %" PRIu64 "\n", n);
        }
    }
}

/* Every reason from the start, so that rates begin at 0. */
static void render_misses(base_buf *out, const char *name, const char *help,
                          const _Atomic uint64_t *values)
{
    family(out, name, "counter", help);
    for (gw_miss miss = GW_MISS_NEW; miss < GW_MISS_COUNT; miss++) {
        base_buf_printf(out, "whimbrel_%s{", name);
        label(out, "reason", gw_miss_name(miss));
        base_buf_printf(out, "} %" PRIu64 "\n",
                        atomic_load_explicit(&values[miss], memory_order_relaxed));
    }
}

/* What clients were told, once a request: the sums of usage objects, and of the admin report. */
static void render_usage(gw_metrics *metrics, const gw_app *app, base_buf *out)
{
    family(out, "turns_total", "counter", "Requests that the engine had, by how they ended.");
    for (size_t i = 0; i < FINISH_COUNT; i++)
        base_buf_printf(out, "whimbrel_turns_total{finish=\"%s\"} %" PRIu64 "\n", finishes[i],
                        atomic_load_explicit(&metrics->finished[i], memory_order_relaxed));
    if (app->tenants == NULL)
        return;
    gw_usage_totals t = gw_account_total(gw_tenants_account(app->tenants));
    count(out, "prompt_tokens_total", "Prompt tokens, cached ones included.", t.prompt_tokens);
    count(out, "cached_tokens_total", "Prompt tokens taken from the prefix cache.",
          t.cached_tokens);
    count(out, "restored_tokens_total", "Those of them that were read back from disk.",
          t.restored_tokens);
    count(out, "output_tokens_total", "Tokens generated.", t.output_tokens);
    count(out, "reasoning_tokens_total", "Those of them that are reasoning.", t.reasoning_tokens);
    count(out, "drafted_tokens_total", "Draft tokens verified.", t.drafted);
    count(out, "accepted_tokens_total", "Draft tokens kept.", t.accepted);
}

static void render_engine(const gw_app *app, base_buf *out)
{
    eng_stats s = eng_get_stats(app->engine);
    const eng_info *info = eng_get_info(app->engine);
    family(out, "info", "gauge", "What is served.");
    base_buf_puts(out, "whimbrel_info{");
    label(out, "version", WHIMBREL_VERSION);
    base_buf_puts(out, ",");
    label(out, "model", info->name);
    base_buf_puts(out, ",");
    label(out, "backend", info->backend);
    base_buf_puts(out, ",");
    label(out, "kv", info->kv);
    base_buf_puts(out, "} 1\n");
    count(out, "engine_requests_total", "Requests that the engine took.", s.requests);
    count(out, "engine_finished_total", "Requests that ended by themselves.", s.finished);
    count(out, "engine_cancelled_total", "Requests that were cancelled.", s.cancelled);
    count(out, "engine_failed_total", "Requests that ended in an error.", s.failed);
    count(out, "engine_prompt_tokens_total",
          "Prompt tokens that the engine was given: of every choice, and of work ahead of a turn.",
          s.prompt_tokens);
    count(out, "engine_cached_tokens_total", "Those of them taken from the prefix cache.",
          s.cached_tokens);
    count(out, "engine_output_tokens_total", "Tokens that the engine generated.", s.output_tokens);
    count(out, "forced_tokens_total",
          "Output tokens that a grammar left one way for, written without the model.",
          s.forced_tokens);
    count(out, "ahead_tokens_total",
          "Prompt tokens that were run while the pages before them were read back.",
          s.ahead_tokens);
    count(out, "copied_tokens_total", "Draft tokens verified that were copies of earlier text.",
          s.copied);
    count(out, "copied_accepted_tokens_total", "Those of them that were kept.", s.copied_accepted);
    count(out, "predicted_tokens_total", "Those verified that a prediction held.", s.predicted);
    count(out, "predicted_accepted_tokens_total", "Those of them that were kept.",
          s.predicted_accepted);
    count(out, "steps_total", "Forward passes.", s.steps);
    count(out, "step_rows_total", "Token rows of forward passes.", s.step_rows);
    family(out, "busy_seconds_total", "counter", "Time in forward passes.");
    base_buf_printf(out, "whimbrel_busy_seconds_total %.9f\n", (double)s.busy_ns / 1e9);
    family(out, "busy_part_seconds_total", "counter",
           "Parts of it: the target's passes, the drafter's, and the choice of tokens.");
    base_buf_printf(out,
                    "whimbrel_busy_part_seconds_total{part=\"forward\"} %.9f\n"
                    "whimbrel_busy_part_seconds_total{part=\"draft\"} %.9f\n"
                    "whimbrel_busy_part_seconds_total{part=\"sample\"} %.9f\n",
                    (double)s.forward_ns / 1e9, (double)s.draft_ns / 1e9,
                    (double)s.sample_ns / 1e9);
    count(out, "admission_admitted_total", "Requests that admission let in.",
          s.refused[ENG_ADMITTED]);
    family(out, "admission_refused_total", "counter", "Requests that it refused, by reason.");
    base_buf_printf(out,
                    "whimbrel_admission_refused_total{reason=\"queue_count\"} %" PRIu64 "\n"
                    "whimbrel_admission_refused_total{reason=\"queue_time\"} %" PRIu64 "\n"
                    "whimbrel_admission_refused_total{reason=\"tenant_share\"} %" PRIu64 "\n"
                    "whimbrel_admission_refused_total{reason=\"deadline\"} %" PRIu64 "\n",
                    s.refused[ENG_REFUSED_COUNT], s.refused[ENG_REFUSED_TIME],
                    s.refused[ENG_REFUSED_TENANT], s.refused[ENG_REFUSED_DEADLINE]);
    gauge(out, "admission_queued_seconds", "Machine time that is predicted for those that wait.",
          (double)s.queued_ns / 1e9);
    gauge(out, "admission_queued_tenants", "Tenants with a request that waits.", s.queued_tenants);
    gauge(out, "admission_forecast_level",
          "How many times longer steps take now than was learned of them.",
          (double)s.forecast_level / 1000);
    gauge(out, "queued", "Requests that wait.", s.queued);
    gauge(out, "running", "Sequences that run.", s.running);
    gauge(out, "prefilling", "Those of them in prefill.", s.prefilling);
    gauge(out, "pages_free", "Free pages.", s.pages_free);
    gauge(out, "pages", "All pages.", s.pages_total);
    gauge(out, "index_nodes", "Nodes of the prefix tree.", s.index_nodes);
    gauge(out, "index_pages", "Pages that the prefix tree holds.", s.index_pages);
    count(out, "evicted_pages_total", "Pages evicted from the prefix tree.", s.evicted_pages);
    gauge(out, "disk_tier", "1 if pages are kept on disk.", s.disk_open);
    gauge(out, "disk_records", "Pages and side records on disk.", (double)s.disk_records);
    gauge(out, "disk_bytes", "What they take.", (double)s.disk_bytes);
    gauge(out, "disk_queued", "Records on their way to disk.", (double)s.disk_queued);
    gauge(out, "disk_paused", "1 while nothing is written, after an error.", s.disk_paused);
    gauge(out, "disk_full", "1 if the last write found the disk full.", s.disk_full);
    count(out, "disk_written_bytes_total", "Bytes of records written.", s.disk_written_bytes);
    count(out, "disk_read_bytes_total", "Bytes of records read back.", s.disk_read_bytes);
    count(out, "disk_refused_total",
          "Records not written: no room in the queue, the budget or the bound, or paused.",
          s.disk_refused);
    count(out, "disk_dropped_total", "Records dropped for room or because they were damaged.",
          s.disk_dropped);
    count(out, "disk_corrupt_total", "Records found damaged.", s.disk_corrupt);
    count(out, "disk_errors_total", "Reads and writes that failed.", s.disk_errors);
    gauge(out, "weight_bytes", "Bytes of weights.", (double)info->weight_bytes);
    gauge(out, "page_bytes", "Bytes of a page.", (double)info->page_bytes);
}

static void render_ledger(const gw_app *app, base_buf *out)
{
    gw_ledger_stats s = gw_ledger_get_stats(app->ledger);
    count(out, "ledger_commits_total", "Turns that the ledger was given.", s.commits);
    count(out, "ledger_transactions_total", "Transactions that they took.", s.transactions);
    count(out, "ledger_failures_total", "Turns that it could not write.", s.failures);
    count(out, "ledger_trimmed_total", "Cached turns that left for room.", s.trimmed);
    gauge(out, "ledger_queued", "Turns that wait for the writer.", s.queued);
    gauge(out, "native_sessions", "Native sessions that are kept.", (double)s.native_sessions);
    gauge(out, "conversations", "Conversations that are kept.", (double)s.conversations);
    gauge(out, "ledger_bytes", "Bytes of whimbrel.db.", (double)s.database_bytes);
    gauge(out, "ledger_log_bytes", "Bytes of its write-ahead log.", (double)s.wal_bytes);
    gauge(out, "ledger_memory_bytes", "Bytes of recent runs in memory.", (double)s.memory_bytes);
    count(out, "slices_known_total",
          "Elements of bodies that an earlier body had, not parsed again.", s.slices_known);
    count(out, "slices_parsed_total", "Elements of long bodies that were parsed.", s.slices_parsed);
    gauge(out, "slice_bytes", "Bytes of the elements that are kept parsed.", (double)s.slice_bytes);
}

static void render_sessions(const gw_app *app, base_buf *out)
{
    gw_append_stats s = gw_append_get_stats(app->appends);
    gauge(out, "turns_waiting", "Turns in line behind another of their session or conversation.",
          gw_locks_waiting(app->locks));
    gauge(out, "appended_bytes", "Tool results that wait for a session's next turn.",
          (double)s.bytes);
    count(out, "appended_tokens_total",
          "Tokens of next turns that were run over before the turn came.", s.prefilled_tokens);
    if (app->pins == NULL)
        return;
    gw_pins_stats p = gw_pins_get_stats(app->pins, base_now_ns());
    gauge(out, "pinned_sessions", "Sessions whose pages are pinned.", p.sessions);
    gauge(out, "pinned_pages", "Pages that they pin; shared ones count for each.", p.pages);
    count(out, "pins_refused_total", "Pins beyond the bounds.", p.refused);
}

static void render_otlp(const gw_app *app, base_buf *out)
{
    if (app->otlp == NULL)
        return;
    gw_otlp_stats o = gw_otlp_get_stats(app->otlp);
    gauge(out, "otlp_queued", "Requests whose spans wait to be sent.", o.queued);
    count(out, "otlp_sent_total", "Requests whose spans the collector took.", o.sent);
    count(out, "otlp_failed_total", "Requests whose spans it refused, or that did not reach it.",
          o.failed);
    count(out, "otlp_dropped_total", "Requests whose spans found the queue full.", o.dropped);
}

static void render_server(const gw_app *app, base_buf *out)
{
    gw_server_stats s = gw_server_get_stats(app->server);
    count(out, "connections_total", "Connections accepted.", s.connections);
    count(out, "exchanges_total", "Requests that were read whole.", s.requests);
    count(out, "exchanges_gone_total",
          "Requests whose client left before the answer was handed over.", s.gone);
    count(out, "kicked_total",
          "Connections and streams closed for idling, stalling, flooding or for room.", s.kicked);
    gauge(out, "open_connections", "Connections that are open.", s.open_connections);
    gauge(out, "open_exchanges", "Requests that are being answered.", s.open_exchanges);
}

static void render_live(const gw_app *app, base_buf *out)
{
    uint32_t counts[GW_PHASE_COUNT];
    gw_live_phases(app->live, counts);
    family(out, "requests_live", "gauge", "Requests that live, by phase.");
    for (gw_phase phase = 0; phase < GW_PHASE_DONE; phase++)
        base_buf_printf(out, "whimbrel_requests_live{phase=\"%s\"} %u\n", gw_phase_name(phase),
                        counts[phase]);
    gw_events_stats events = gw_events_get_stats(app->events);
    gauge(out, "event_listeners", "Listeners of live changes.", events.listeners);
    count(out, "events_lost_total", "Events that listeners lost, being too slow.", events.lost);
}

/* Under the names that every exporter has for them. */
static void render_process(const gw_app *app, base_buf *out)
{
    gw_process p = gw_process_look();
    base_buf_printf(
        out,
        "# HELP process_cpu_seconds_total User and system time.\n"
        "# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total %.6f\n"
        "# HELP process_resident_memory_bytes Resident memory.\n"
        "# TYPE process_resident_memory_bytes gauge\nprocess_resident_memory_bytes %" PRIu64 "\n"
        "# HELP process_virtual_memory_bytes Virtual memory.\n"
        "# TYPE process_virtual_memory_bytes gauge\nprocess_virtual_memory_bytes %" PRIu64 "\n"
        "# HELP process_open_fds Open descriptors.\n"
        "# TYPE process_open_fds gauge\nprocess_open_fds %u\n"
        "# HELP process_max_fds Their bound.\n"
        "# TYPE process_max_fds gauge\nprocess_max_fds %u\n"
        "# HELP process_start_time_seconds Unix time of the start.\n"
        "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds %.15g\n",
        p.cpu_seconds, p.memory_bytes, p.virtual_bytes, p.descriptors, p.descriptors_max,
        (double)app->started_ms / 1000);
}

/* ---- vLLM's names, as of its V1 engine ---- */

static void vllm(base_buf *out, const char *name, const char *type, const char *help,
                 const char *labels, double value)
{
    base_buf_printf(out, "# HELP vllm:%s %s\n# TYPE vllm:%s %s\nvllm:%s{%s} %.15g\n", name, help,
                    name, type, name, labels, value);
}

static void render_vllm(gw_metrics *metrics, const gw_app *app, base_buf *out)
{
    static const struct {
        gw_histogram which;
        const char *name;
    } same[] = {
        {GW_TTFT, "vllm:time_to_first_token_seconds"},
        {GW_ITL, "vllm:inter_token_latency_seconds"},
        {GW_E2E, "vllm:e2e_request_latency_seconds"},
        {GW_QUEUE, "vllm:request_queue_time_seconds"},
        {GW_PREFILL, "vllm:request_prefill_time_seconds"},
        {GW_PROMPT_TOKENS, "vllm:request_prompt_tokens"},
        {GW_OUTPUT_TOKENS, "vllm:request_generation_tokens"},
    };
    eng_stats s = eng_get_stats(app->engine);
    gw_usage_totals t = gw_account_total(gw_tenants_account(app->tenants));
    base_buf model;
    base_buf_init(&model, 0);
    label(&model, "model_name", eng_get_info(app->engine)->name);
    base_buf_puts(&model, ",engine=\"0\"");
    base_buf_add(&model, "", 1);
    const char *labels = model.failed ? "" : model.data;
    vllm(out, "num_requests_running", "gauge", "Sequences that run.", labels, s.running);
    vllm(out, "num_requests_waiting", "gauge", "Requests that wait.", labels, s.queued);
    vllm(out, "kv_cache_usage_perc", "gauge", "Pages in use, 1 is all.", labels,
         s.pages_total != 0 ? 1 - (double)s.pages_free / s.pages_total : 0);
    vllm(out, "prompt_tokens_total", "counter", "Prompt tokens.", labels, (double)t.prompt_tokens);
    vllm(out, "generation_tokens_total", "counter", "Tokens generated.", labels,
         (double)t.output_tokens);
    vllm(out, "prefix_cache_queries_total", "counter", "Prompt tokens looked for in the cache.",
         labels, (double)t.prompt_tokens);
    vllm(out, "prefix_cache_hits_total", "counter", "Those found there.", labels,
         (double)t.cached_tokens);
    vllm(out, "spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified.", labels,
         (double)t.drafted);
    vllm(out, "spec_decode_num_accepted_tokens_total", "counter", "Draft tokens kept.", labels,
         (double)t.accepted);
    base_buf_puts(out, "# HELP vllm:request_success_total Requests that ended, by how.\n"
                       "# TYPE vllm:request_success_total counter\n");
    /* vLLM has no reason of its own for calls of tools and for time limits. */
    uint64_t reasons[4] = {0};
    static const char *const names[4] = {"stop", "length", "abort", "error"};
    static const uint8_t reason_of[FINISH_COUNT] = {
        [ENG_FINISH_STOP] = 0,      [ENG_FINISH_CALLS] = 0,    [ENG_FINISH_LENGTH] = 1,
        [ENG_FINISH_CANCELLED] = 2, [ENG_FINISH_DEADLINE] = 2, [ENG_FINISH_ERROR] = 3};
    for (size_t i = 0; i < FINISH_COUNT; i++)
        reasons[reason_of[i]] += atomic_load_explicit(&metrics->finished[i], memory_order_relaxed);
    for (size_t i = 0; i < 4; i++)
        base_buf_printf(out, "vllm:request_success_total{%s,finished_reason=\"%s\"} %" PRIu64 "\n",
                        labels, names[i], reasons[i]);
    if (!model.failed) /* with the comma that a histogram wants behind its labels */
        memcpy(model.data + model.length - 1, ",", 1);
    base_buf_add(&model, "", 1);
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        render_histogram(metrics, same[i].which, same[i].name, model.failed ? "" : model.data, out);
    out->failed |= model.failed;
    base_buf_deinit(&model);
}

void gw_metrics_render(gw_metrics *metrics, const gw_app *app, base_buf *out)
{
    render_requests(metrics, out);
    render_misses(out, "cache_reasons_total", "Turns by what their cache has to tell.",
                  metrics->misses);
    render_misses(out, "cache_lost_tokens_total",
                  "Prompt tokens that the ledger knew and that were computed again.",
                  metrics->lost_tokens);
    for (size_t i = 0; i < GW_COUNTER_COUNT; i++)
        count(out, counters[i].name, counters[i].help,
              atomic_load_explicit(&metrics->counters[i], memory_order_relaxed));
    for (size_t i = 0; i < GW_HISTOGRAM_COUNT; i++) {
        char name[64];
        snprintf(name, sizeof name, "whimbrel_%s", histograms[i].name);
        render_histogram(metrics, i, name, "", out);
    }
    render_usage(metrics, app, out);
    if (app->live != NULL)
        render_live(app, out);
    render_process(app, out);
    if (app->engine != NULL && app->tenants != NULL && app->conf->metrics_vllm_names)
        render_vllm(metrics, app, out);
    if (app->engine != NULL)
        render_engine(app, out);
    if (app->ledger != NULL)
        render_ledger(app, out);
    if (app->appends != NULL)
        render_sessions(app, out);
    if (app->server != NULL)
        render_server(app, out);
    render_otlp(app, out);
    count(out, "log_dropped_total", "Log lines dropped: nobody read stderr fast enough.",
          base_log_dropped());
    gauge(out, "start_time_seconds", "Unix time of the start.", (double)app->started_ms / 1000);
    gauge(out, "draining", "1 while no new work is taken.",
          atomic_load(&app->draining) || atomic_load(&app->paused));
}
