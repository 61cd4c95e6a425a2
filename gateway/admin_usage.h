/* admin_usage: what was used, from the ledger, and turns as a trace. Thread: the exchange's loop;
 * workers read. */
#pragma once
#include "gateway/admin_call.h"

/* GET /admin/v1/usage?by=… */
void gw_admin_usage_report(gw_app *app, gw_exchange *exchange);
/* GET /admin/v1/trace?format=weka|mooncake */
void gw_admin_trace(gw_app *app, gw_exchange *exchange);
