/* admin_sessions: sessions and turns of every tenant, as config/openapi/admin.json says. Thread:
 * the exchange's loop; workers read. */
#pragma once
#include "gateway/admin_call.h"

void gw_admin_sessions(gw_app *app, gw_exchange *exchange);
void gw_admin_session(gw_app *app, gw_exchange *exchange);
void gw_admin_turns(gw_app *app, gw_exchange *exchange);
void gw_admin_turn(gw_app *app, gw_exchange *exchange);

/* Worker. The session's object. BASE_NOT_FOUND. */
base_code gw_admin_put_session(gw_app *app, base_buf *out, const char *id, base_arena *arena,
                               base_err *err);
