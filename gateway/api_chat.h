/* api_chat: the dialect of POST /v1/chat/completions, JSON and server-sent events.
 *
 * Reads a body into the turn's own form (turn.h) on a worker and writes records from events on the
 * loop. */
#pragma once
#include "gateway/app.h"
#include "gateway/server.h"
#include "gateway/dialect.h"

/* Takes the exchange: authenticates, answers now or later, counts the request in the metrics.
 * Method, media type and Host were checked by the router. Thread: the exchange's loop. */
void gw_api_chat_handle(gw_app *app, gw_exchange *exchange);

/* How tools are written here and by those that take the same form. */
extern const gw_tool_form gw_chat_tools;

/* For dialects that take the same bodies, or some of their fields. Parse and check: worker. */
base_code gw_chat_parse(gw_turn *turn, base_err *err);
base_code gw_chat_check(gw_turn *turn, base_err *err);
void gw_chat_deinit(gw_turn *turn);
/* The thinking mode and the effort in all their forms. */
base_code gw_chat_read_thinking(gw_turn *turn, base_err *err);
/* Appends `"usage":{…` without its end. */
void gw_chat_put_counts(base_buf *out, const eng_usage *usage);
/* Appends `"usage":{…}`. */
void gw_chat_put_usage(const gw_turn *turn, base_buf *out);
