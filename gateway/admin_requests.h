/* admin_requests: what runs, and its end by the operator. Thread: the exchange's loop. */
#pragma once
#include "gateway/app.h"

/* GET /admin/v1/requests?recent=N, …/{id}; POST …/{id}/cancel. config/openapi/admin.json says what
 * they answer. */
void gw_admin_requests(gw_app *app, gw_exchange *exchange);
void gw_admin_request(gw_app *app, gw_exchange *exchange);
void gw_admin_request_cancel(gw_app *app, gw_exchange *exchange);
/* GET /admin/v1/events: live changes as server-sent events. */
void gw_admin_events(gw_app *app, gw_exchange *exchange);
