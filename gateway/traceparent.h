/* traceparent: the id of a distributed trace that a request is part of (W3C Trace Context, level
 * 1).
 */
#pragma once
#include <stdbool.h>

#define GW_TRACE_ID_MAX 32 /* hex digits */

/* The trace id of a header's value, terminated; "" and false if there is none or it is malformed,
 * which is to be ignored. */
bool gw_traceparent_read(char out[GW_TRACE_ID_MAX + 1], const char *header);
