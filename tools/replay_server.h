/* replay_server: a trace as real turns against a running server, over HTTP/1.1 or HTTP/2.
 *
 * The trace has lengths, not text, so text of about those lengths is made up; the assistant's text
 * is what the server answered. Single requests (Mooncake) are sent at their recorded arrivals, as
 * soon as a lane is free; blocks of equal ids are equal text there. Thread: one, all streams by one
 * multi handle. */
#pragma once
#include "tools/replay_trace.h"

typedef enum rp_habit {
    RP_HABIT_KEEP,        /* sends reasoning back */
    RP_HABIT_DROP,        /* sends it without reasoning */
    RP_HABIT_RESERIALISE, /* writes the arguments of its calls anew: other spacing */
} rp_habit;

typedef struct rp_server_options {
    const char *url; /* http://host:port */
    const char *model;
    const char *key; /* bearer token, NULL: none */
    uint32_t lanes;
    rp_habit habit;
    bool http2; /* by prior knowledge on http:// */
    bool json;
    bool cold;    /* a marker first in each session's text: nothing cached from earlier runs */
    double scale; /* of prompt and answer lengths, so that long traces fit a small context */
    double speed; /* pauses are recorded seconds / speed; 0: none */
    double pause_max_s;   /* recorded seconds */
    uint32_t turns_max;   /* requests of a session, 0: all */
    uint32_t context_max; /* tokens; a session that would exceed it ends there */
    uint32_t output_max;  /* tokens of an answer */
    uint64_t seed;
} rp_server_options;

/* Plays it and prints TTFT by uncached size and the cached share. BASE_IO if a turn failed. */
base_code rp_server_run(const rp_trace *trace, const rp_server_options *options, base_err *err);
