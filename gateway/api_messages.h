/* api_messages: Anthropic's POST /v1/messages and /v1/messages/count_tokens, over the same items,
 * ledger and turns as every other dialect. Thread: the exchange's loop. */
#pragma once
#include "gateway/app.h"

void gw_api_messages_handle(gw_app *app, gw_exchange *exchange);
/* Renders and counts; runs nothing, stores nothing, touches no cached page. */
void gw_api_messages_count(gw_app *app, gw_exchange *exchange);
