/* admin: what the admin listener answers. Thread: the exchange's loop. */
#pragma once
#include "gateway/app.h"

/* GET /metrics. On the admin listener loopback needs no key, others need one with scope admin. On the public ports
 * (metrics.public) it is open. */
void gw_admin_metrics(gw_app *app, gw_exchange *exchange);
