/* gw_otlp: what a collector of traces gets of each request: OTLP over HTTP, as JSON (OpenTelemetry
 * protocol 1.x, "JSON Protobuf Encoding": ids in hex, 64-bit numbers as strings).
 *
 * A request is a span of kind SERVER below the client's (W3C traceparent), or the root of a trace
 * of its own; queue, prefill, decode and commit are its children. Attributes are counts, ids and
 * names by OpenTelemetry's conventions for generative AI; never a text of client or model. A client
 * that does not record its trace (flag "sampled" off) is not recorded here either.
 *
 * A ring of GW_OTLP_QUEUE requests; one that finds it full is counted as dropped. One thread sends
 * what waits, at most one batch a second; a collector that is away is tried again, later each time.
 * Thread: create and destroy on main; gw_otlp_request any, without waiting. */
#pragma once
#include "engine/base/err.h"
#include "gateway/live.h"
#include "gateway/traceparent.h"

#define GW_OTLP_QUEUE 1024

typedef struct gw_otlp gw_otlp;

/* `endpoint`: a whole URL, http or https. Loads libcurl, which nothing else here needs.
 * BASE_INVALID: no such URL; BASE_UNSUPPORTED: no libcurl. */
base_code gw_otlp_create(gw_otlp **out, const char *endpoint, base_err *err);
/* Sends what waits, for GW_OTLP_LAST_MS at most. NULL is fine. */
#define GW_OTLP_LAST_MS 2000
void gw_otlp_destroy(gw_otlp *otlp);

/* A request that is over. `trace`: what its client sent. NULL `otlp`: nothing. */
void gw_otlp_request(gw_otlp *otlp, const gw_live_request *request, const gw_trace *trace);

typedef struct gw_otlp_stats {
    uint64_t sent, failed, dropped; /* requests */
    uint32_t queued;
} gw_otlp_stats;
gw_otlp_stats gw_otlp_get_stats(gw_otlp *otlp);
