/* gw_window: the last minute in numbers, for an operator who looks: rates, and quantiles of the
 * times to first output and between outputs.
 *
 * A ring of slots of GW_WINDOW_SLOT_NS each with counts and histograms of logarithmic buckets,
 * GW_WINDOW_STEP apart; what is older than GW_WINDOW_SLOTS slots is forgotten. Time comes in as an
 * argument and never falls. Thread: any; one mutex, held for a few additions. */
#pragma once
#include "engine/base/err.h"

#define GW_WINDOW_SLOTS 12
#define GW_WINDOW_SLOT_NS 5000000000ull
#define GW_WINDOW_STEP 1.06 /* of buckets' bounds */

typedef struct gw_window gw_window;

typedef enum gw_window_time { GW_WINDOW_TTFT, GW_WINDOW_ITL, GW_WINDOW_TIMES } gw_window_time;

typedef enum gw_window_count {
    GW_WINDOW_REQUESTS,      /* ended */
    GW_WINDOW_PROMPT_TOKENS, /* of those that left the queue, as the next */
    GW_WINDOW_CACHED_TOKENS,
    GW_WINDOW_OUTPUT_TOKENS,
    GW_WINDOW_PASSES, /* that gave a sequence output */
    GW_WINDOW_COUNTS,
} gw_window_count;

base_code gw_window_create(gw_window **out, uint64_t now_ns, base_err *err);
void gw_window_destroy(gw_window *window); /* NULL is fine */
void gw_window_observe(gw_window *window, gw_window_time time, double seconds, uint64_t now_ns);
void gw_window_add(gw_window *window, gw_window_count count, uint64_t n, uint64_t now_ns);

typedef struct gw_window_view {
    double seconds; /* that it covers: the last slots, the running one too */
    uint64_t counts[GW_WINDOW_COUNTS];
    struct {
        uint64_t count;
        double p50, p99; /* seconds; 0 without any */
    } times[GW_WINDOW_TIMES];
} gw_window_view;
gw_window_view gw_window_look(gw_window *window, uint64_t now_ns);
