/* api_text: the calls that deal in plain text and tokens: completions without a chat template,
 * tokenize, detokenize, and what a chat body renders to. Thread: the exchange's loop. */
#pragma once
#include "gateway/app.h"

void gw_api_completions_handle(gw_app *app, gw_exchange *exchange); /* POST /v1/completions */
/* These generate, store and cache nothing. */
void gw_api_tokenize(gw_app *app, gw_exchange *exchange);    /* POST /tokenize */
void gw_api_detokenize(gw_app *app, gw_exchange *exchange);  /* POST /detokenize */
void gw_api_chat_render(gw_app *app, gw_exchange *exchange); /* POST /v1/chat/completions/render */
