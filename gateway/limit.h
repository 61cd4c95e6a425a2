/* gw_limit: how much one tenant may ask for: requests at once, requests a minute, tokens a minute.
 *
 * The two rates are buckets that hold a minute's worth and fill evenly. A request takes one of the
 * first when it comes; of the second it takes what it used once that is known, so the level may be
 * below zero for a while and nothing new is let in before it is above. Pure: time comes in as an
 * argument, and the owner's lock guards the state. */
#pragma once
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"

typedef struct gw_limits {
    int64_t requests_max, requests_per_minute, tokens_per_minute; /* 0: no bound */
    int64_t weight; /* of the machine's time, beside other tenants; 0: one of weight 1 */
} gw_limits;

typedef struct gw_limit {
    gw_limits max;
    uint32_t running;
    double requests, tokens; /* levels as of at_ns */
    uint64_t at_ns;
} gw_limit;

/* New bounds; the buckets are full. */
void gw_limit_set(gw_limit *limit, const gw_limits *max, uint64_t now_ns);
/* True if another request may come, which is counted then. Else `*what` is the bound's name and
 * `*retry_ms` when it may be tried again. */
bool gw_limit_enter(gw_limit *limit, const char **what, uint32_t *retry_ms, uint64_t now_ns);
/* It is over, and used so many tokens: uncached ones of its prompt and those of its output. */
void gw_limit_leave(gw_limit *limit, uint64_t tokens, uint64_t now_ns);

/* What is left of a minute's worth; limit 0: no such bound. */
typedef struct gw_limit_rate {
    int64_t limit, left;
    uint64_t full_ms; /* until all of it is there again */
} gw_limit_rate;

typedef struct gw_limit_view {
    uint32_t weight; /* at least 1 */
    gw_limit_rate requests, tokens;
} gw_limit_view;
gw_limit_view gw_limit_look(gw_limit *limit, uint64_t now_ns);

/* Members of a JSON object change `limits`, null takes a bound away, and makes the weight 1;
 * BASE_INVALID names what is wrong, and members that there are not. */
base_code gw_limits_read(gw_limits *limits, const json_t *object, base_err *err);
void gw_limits_put(base_buf *out, const gw_limits *limits); /* the object, all members */
