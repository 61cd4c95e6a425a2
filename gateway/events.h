/* gw_events: what changes, told live to whoever listens: GET /admin/v1/events.
 *
 * An event is rendered once and shared by all listeners; each of these has a ring of
 * GW_EVENTS_WAITING. A listener that takes them more slowly than they come loses its oldest waiting
 * ones and is told how many, in their place. Thread: any, but for gw_events_listen: the exchange's
 * loop. One mutex, held for a few loads. */
#pragma once
#include "engine/base/buf.h"
#include "gateway/app.h"

#define GW_EVENTS_LISTENERS 32 /* at once; more are refused with 429 */
#define GW_EVENTS_WAITING 256  /* of one listener */

base_code gw_events_create(gw_events **out, base_err *err);
void gw_events_destroy(gw_events *events); /* NULL is fine; no listener is left */
/* Somebody listens: without, an event need not be rendered. */
bool gw_events_heard(gw_events *events);
/* `name` is one of the API's, `data` one JSON text, copied; without memory all listeners lose it.
 */
void gw_events_post(gw_events *events, const char *name, const base_buf *data);
/* Takes the exchange until its client leaves or the server drains. */
void gw_events_listen(gw_app *app, gw_exchange *exchange);

typedef struct gw_events_stats {
    uint32_t listeners;
    uint64_t posted, lost;
} gw_events_stats;
gw_events_stats gw_events_get_stats(gw_events *events);
