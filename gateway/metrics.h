/* gw_metrics: counters, gauges and histograms with bounded labels, in Prometheus text (version
 * 0.0.4).
 *
 * Every name begins with whimbrel_. Label values come from this source only: routes, statuses,
 * never a client's text. Counting is a relaxed atomic add or three. Thread: any. */
#pragma once
#include "engine/base/buf.h"
#include "gateway/app.h"
#include "gateway/window.h"

typedef enum gw_counter {
    GW_CLIENT_GONE,
    GW_STREAM_FAILED,
    GW_COMMIT_FAILED, /* turns completed with "stored": false, or ended in an error */
    GW_TURNS_STORED,
    GW_SPLICED_ITEMS,  /* assistant items taken from the ledger as exact tokens */
    GW_RENDERED_ITEMS, /* assistant items rendered from JSON */
    GW_LIMITED,        /* requests past their tenant's limits */
    GW_COUNTER_COUNT,
} gw_counter;

typedef enum gw_histogram {
    GW_TTFT,    /* seconds, request complete to first output event */
    GW_ITL,     /* seconds between output events of a stream */
    GW_QUEUE,   /* seconds */
    GW_PREFILL, /* seconds */
    GW_E2E,     /* seconds */
    GW_COMMIT,  /* seconds, end of generation to committed */
    GW_PROMPT_TOKENS,
    GW_UNCACHED_TOKENS,
    GW_OUTPUT_TOKENS,
    GW_FORECAST,        /* seconds, predicted of GW_QUEUE */
    GW_FORECAST_ERROR,  /* share of the wait by which that was wrong, for waits of 10 ms and more */
    GW_ACCEPTED_LENGTH, /* output tokens of a forward pass; 1: no draft was kept */
    GW_HISTOGRAM_COUNT,
} gw_histogram;

base_code gw_metrics_create(gw_metrics **out, base_err *err);
void gw_metrics_destroy(gw_metrics *metrics); /* NULL is fine */
void gw_metrics_add(gw_metrics *metrics, gw_counter counter, uint64_t n);
/* One turn's cache: `reason` is a gw_miss. */
void gw_metrics_miss(gw_metrics *metrics, uint32_t reason, uint64_t lost_tokens);
/* What gw_metrics_miss counted so far. */
void gw_metrics_misses(const gw_metrics *metrics, uint32_t reason, uint64_t *turns,
                       uint64_t *lost_tokens);
void gw_metrics_observe(gw_metrics *metrics, gw_histogram histogram, double value);
/* A request left the queue. */
void gw_metrics_started(gw_metrics *metrics, uint32_t prompt_tokens, uint32_t cached_tokens);
/* How long it was to wait for the engine, and did. */
void gw_metrics_forecast(gw_metrics *metrics, uint64_t forecast_ns, uint64_t queue_ns);
/* A request that the engine had is over. */
void gw_metrics_finish(gw_metrics *metrics, eng_finish finish);
gw_window *gw_metrics_window(gw_metrics *metrics); /* the last minute; borrowed */
/* One finished HTTP request. `route` is a static string, one of at most GW_ROUTES_MAX (the rest
 * count as "other"). */
#define GW_ROUTES_MAX 128
void gw_metrics_request(gw_metrics *metrics, const char *route, int status);
/* The whole text: own metrics, then the engine's and the server's. */
void gw_metrics_render(gw_metrics *metrics, const gw_app *app, base_buf *out);
