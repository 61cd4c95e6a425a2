/* replay_cache: a trace against the cache alone, in simulated time.
 *
 * Sessions are played by lanes: a lane takes the next session when its own has ended, so `lanes`
 * sessions are alive at any time; requests happen at their recorded times and hold their pages for
 * none, but a pause begins when the answer was complete. An open trace (recorded arrivals) has no
 * lanes. All policies see the same requests, cut to whole pages of KV_PAGE_TOKENS; a request's
 * pages must all be resident while it runs (what exceeds the capacity is never cached), and a hit
 * is the run of resident pages from the prompt's start.
 *
 * RP_LRU: pages by last use; within a request the deeper page is older.
 *
 * RP_LFUDA: least (uses + age at the last use), which is GDSF with equal cost and size.
 *
 * RP_BELADY: the page used furthest in the future goes, deeper first; no policy that must hold a
 * running request's pages does better.
 *
 * RP_INFINITE: nothing goes.
 *
 * RP_INDEX, RP_VALUE: kv_pool and kv_index, evicting by kv_index_evict under KV_POLICY_LRU or
 * KV_POLICY_VALUE. What an answer ended with (tool call, end of turn, neither) is the pause's
 * class.
 *
 * Thread: one. */
#pragma once
#include "tools/replay_trace.h"

typedef enum rp_policy {
    RP_LRU,
    RP_LFUDA,
    RP_BELADY,
    RP_INFINITE,
    RP_INDEX,
    RP_VALUE,
    RP_POLICIES
} rp_policy;
extern const char *const rp_policy_names[RP_POLICIES];

typedef struct rp_event {
    uint64_t at_ms;
    uint64_t end_ms;  /* the answer is complete and its client pauses; before the next request */
    uint32_t request; /* into rp_trace.requests */
    uint32_t session;
    size_t page_at; /* into rp_plan.pages */
    uint32_t page_count;
} rp_event;

/* The requests of a trace in the order of simulated time, with the pages of each: equal numbers
 * mean equal prefixes. */
typedef struct rp_plan {
    const rp_trace *trace;
    rp_event *events;
    uint32_t *pages;
    size_t event_count, page_count;
    uint32_t distinct_pages;
    uint32_t pages_max; /* of one event */
    uint64_t input_tokens;
    bool answers;
} rp_plan;

typedef struct rp_plan_options {
    uint32_t lanes; /* 0: sessions start at their own start_s */
    uint64_t seed;  /* order in which lanes take sessions; 0: as they stand */
    uint32_t part;  /* 1 or 2: only sessions at even or odd places; 0: all */
    bool answers;   /* what a request leaves in the cache includes its answer */
} rp_plan_options;

base_code rp_plan_make(rp_plan *plan, const rp_trace *trace, const rp_plan_options *options,
                       base_err *err);
void rp_plan_deinit(rp_plan *plan);

typedef struct rp_outcome {
    uint64_t hit_tokens;   /* whole pages */
    uint64_t exact_tokens; /* of the tree: as it matched, to the token; else hit_tokens */
    uint64_t evicted_pages;
    double seconds; /* that the run took */
} rp_outcome;

/* `capacity` in pages. */
base_code rp_simulate(rp_outcome *out, const rp_plan *plan, rp_policy policy, uint32_t capacity,
                      base_err *err);
