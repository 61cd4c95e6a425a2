/* dashboard: the operator's pages, compiled into the program. Thread: the exchange's loop. */
#pragma once
#include "gateway/app.h"

/* GET /dashboard/FILE: a file of gateway/dashboard/, index.html for the folder itself. The pages
 * hold no data and need no key; what they show comes from /admin/v1. Answers 304 where
 * If-None-Match names the file's entity tag, 404 for any other name. */
void gw_dashboard_get(gw_app *app, gw_exchange *exchange);
