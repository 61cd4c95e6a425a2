/* traceparent: the distributed trace that a request is part of (W3C Trace Context, level 1).
 */
#pragma once
#include <stdbool.h>

#define GW_TRACE_ID_MAX 32 /* hex digits */
#define GW_SPAN_ID_MAX 16

typedef struct gw_trace {
    char id[GW_TRACE_ID_MAX + 1];    /* "": none */
    char parent[GW_SPAN_ID_MAX + 1]; /* the client's span */
    bool sampled;                    /* the client records it */
} gw_trace;

/* Of a header's value; all empty and false if there is none or it is malformed, which is to be
 * ignored. */
bool gw_traceparent_read(gw_trace *out, const char *header);
