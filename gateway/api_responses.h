/* api_responses: the dialect of POST /v1/responses, JSON and server-sent events.
 *
 * Reads a body into the turn's own form (turn.h) on a worker and writes events on the loop. Every
 * id of a response and of its output items is made from its turn's: resp_, msg_ and rs_ with the
 * same 24 hex digits, fc_ with the call's index behind them. */
#pragma once
#include "gateway/app.h"
#include "gateway/server.h"

/* Takes the exchange: authenticates, answers now or later, counts the request in the metrics.
 * Thread: the exchange's loop, as for all of these. */
void gw_api_responses_handle(gw_app *app, gw_exchange *exchange);
/* POST /v1/responses/input_tokens: runs nothing. */
void gw_api_responses_count(gw_app *app, gw_exchange *exchange);
/* POST /v1/responses/compact: the input again, with a sealed summary in place of what the assistant
 * said and did. */
void gw_api_responses_compact(gw_app *app, gw_exchange *exchange);
/* Of responses that were stored and not deleted; others' are unknown (404 response_not_found). GET
 * with stream=true plays the events behind starting_after again, then goes on live. After a crash a
 * stream ends where its row ended (at most about a second before) with response.incomplete, reason
 * server_restart. A cancel is for the background alone. A deleted response stays in the ledger, out
 * of reach, as long as a stored one builds on it. */
void gw_api_responses_get(gw_app *app, gw_exchange *exchange);
void gw_api_responses_delete(gw_app *app, gw_exchange *exchange);
void gw_api_responses_cancel(gw_app *app, gw_exchange *exchange);
void gw_api_responses_items(gw_app *app, gw_exchange *exchange);
