/* api_sessions: native sessions, /v1/sessions and what is below.
 *
 * A session keeps the conversation; a turn sends only what is new. Turns of one session follow each
 * other (gateway/lock.h), and each goes on from the exact tokens of the one before. Thread of all:
 * the exchange's loop. */
#pragma once
#include "gateway/app.h"
#include "gateway/server.h"

void gw_api_sessions_create(gw_app *app, gw_exchange *exchange);
void gw_api_sessions_list(gw_app *app, gw_exchange *exchange);
/* Of one: /v1/sessions/{id} */
void gw_api_sessions_get(gw_app *app, gw_exchange *exchange);
void gw_api_sessions_delete(gw_app *app, gw_exchange *exchange);
void gw_api_sessions_turns(gw_app *app, gw_exchange *exchange); /* the list */
void gw_api_sessions_fork(gw_app *app, gw_exchange *exchange);
void gw_api_sessions_pin(gw_app *app, gw_exchange *exchange);
void gw_api_sessions_append(gw_app *app, gw_exchange *exchange);
void gw_api_sessions_export(gw_app *app, gw_exchange *exchange);
/* POST /v1/sessions/import */
void gw_api_sessions_import(gw_app *app, gw_exchange *exchange);
/* POST /v1/sessions/{id}/turns */
void gw_api_sessions_turn(gw_app *app, gw_exchange *exchange);
