/* api_conversations: OpenAI's Conversations, each call a job on a worker and an answer on the loop.
 *
 * Items are checked as POST /v1/responses checks its input, so that no item can be added which a
 * turn on the conversation would be refused for. Who adds, deletes or removes while a turn runs on
 * the conversation is told to come again (409 conversation_locked); turns wait in line. */
#pragma once
#include "gateway/app.h"
#include "gateway/server.h"

/* Takes the exchange. Thread: its loop, as for all of these. */
void gw_api_conversations_create(gw_app *app, gw_exchange *exchange);
void gw_api_conversations_get(gw_app *app, gw_exchange *exchange);
void gw_api_conversations_update(gw_app *app, gw_exchange *exchange);
void gw_api_conversations_delete(gw_app *app, gw_exchange *exchange);
void gw_api_conversations_items_add(gw_app *app, gw_exchange *exchange);
void gw_api_conversations_items_list(gw_app *app, gw_exchange *exchange);
void gw_api_conversations_item_get(gw_app *app, gw_exchange *exchange);
void gw_api_conversations_item_delete(gw_app *app, gw_exchange *exchange);
