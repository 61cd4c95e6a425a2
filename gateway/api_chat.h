/* api_chat: the dialect of POST /v1/chat/completions, JSON and server-sent events.
 *
 * Reads a body into the turn's own form (turn.h) on a worker and writes records from events on the
 * loop. */
#pragma once
#include "gateway/app.h"
#include "gateway/server.h"

/* Takes the exchange: authenticates, answers now or later, counts the request in the metrics.
 * Method, media type and Host were checked by the router. Thread: the exchange's loop. */
void gw_api_chat_handle(gw_app *app, gw_exchange *exchange);
