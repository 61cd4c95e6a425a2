/* api_models: which model is served, and whether the server lives and is ready. Thread: the
 * exchange's loop. */
#pragma once
#include "gateway/app.h"

/* GET /v1/models and /v1/models/{id}; Anthropic's shape when the client sends `anthropic-version`.
 */
void gw_api_models_list(gw_app *app, gw_exchange *exchange);
void gw_api_models_get(gw_app *app, gw_exchange *exchange);

/* 200 as long as the process answers. */
void gw_api_health(gw_app *app, gw_exchange *exchange);
/* Whether the engine has work but made no step for health.stalled_ms. */
bool gw_api_stalled(const gw_app *app);
/* 200, or 503 while draining or stalled. */
void gw_api_ready(gw_app *app, gw_exchange *exchange);
/* GET / */
void gw_api_root(gw_app *app, gw_exchange *exchange);
