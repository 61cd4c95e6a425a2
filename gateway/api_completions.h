/* api_completions: the calls on stored chat completions (store: true). Others' and deleted ones are
 * unknown: 404 completion_not_found. Log probabilities are told once and not kept. Thread: the
 * exchange's loop. */
#pragma once
#include "gateway/app.h"

/* GET /v1/chat/completions: after, limit, order, model, metadata[key]. */
void gw_api_completions_list(gw_app *app, gw_exchange *exchange);
void gw_api_completions_get(gw_app *app, gw_exchange *exchange);
/* POST …/{id}: {metadata}. */
void gw_api_completions_update(gw_app *app, gw_exchange *exchange);
/* With all its choices: items, tokens and pages leave every tier. */
void gw_api_completions_delete(gw_app *app, gw_exchange *exchange);
/* GET …/{id}/messages: those of the request. */
void gw_api_completions_messages(gw_app *app, gw_exchange *exchange);
