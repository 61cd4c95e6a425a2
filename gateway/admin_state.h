/* admin_state: what the server is and does, for its operator. Thread: the exchange's loop. */
#pragma once
#include "gateway/app.h"

/* GET /admin/v1/overview: what is served, since when, what runs and waits, all totals. */
void gw_admin_overview(gw_app *app, gw_exchange *exchange);
/* GET /admin/v1/model: the model's card, its fingerprints, sizes and backend. */
void gw_admin_model(gw_app *app, gw_exchange *exchange);
/* GET /admin/v1/cache: what memory and disk hold, and why turns were not cached. */
void gw_admin_cache(gw_app *app, gw_exchange *exchange);
/* GET /admin/v1/usage: totals of every tenant since the start, as JSON, or as CSV with
 * ?format=csv. */
void gw_admin_usage(gw_app *app, gw_exchange *exchange);
/* GET /admin/v1/config: the effective configuration and which of its keys are live; PATCH
 * {"log.level":"debug"}: sets live keys, all of them or none. */
void gw_admin_config_get(gw_app *app, gw_exchange *exchange);
void gw_admin_config_set(gw_app *app, gw_exchange *exchange);
/* POST /admin/v1/drain: new work is refused with 503 `draining`, /health/ready says so, what runs
 * goes on. POST /admin/v1/resume takes it back. */
void gw_admin_drain(gw_app *app, gw_exchange *exchange);
void gw_admin_resume(gw_app *app, gw_exchange *exchange);
