/* gw_route: method and path to handler, and what every request must pass before one: Host and
 * Origin while there are no keys, media type, and the answers to OPTIONS, unknown paths and wrong
 * methods. */
#pragma once
#include "gateway/app.h"

/* For gw_server_options; `ctx` is the gw_app. Thread: the exchange's loop. */
void gw_route_handle(void *ctx, gw_exchange *exchange);
/* Counts and logs what no turn counts and logs by itself. */
void gw_route_ended(void *ctx, gw_exchange *exchange, const gw_exchange_end *end);
/* Opens log.trace_path, if it is set; closed at exit. BASE_IO names it. */
base_code gw_route_open_trace(const struct gw_conf *conf, base_err *err);
