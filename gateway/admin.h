/* admin: what the admin listener answers. Thread: the exchange's loop. */
#pragma once
#include "gateway/app.h"

/* GET /metrics. On the admin listener loopback needs no key, others need one with scope admin. On
 * the public ports (metrics.public) it is open. */
void gw_admin_metrics(gw_app *app, gw_exchange *exchange);

/* The keys of tenants. While there are none, loopback may call these; from then on a key with scope
 * admin is needed, so the first key must have it. GET  /admin/v1/keys
 * {"object":"list","data":[{"id","tenant","label","scopes":[…],"hint","created_at"}]} POST
 * /admin/v1/keys      {"tenant"?,"label"?,"scopes"?:[…]} -> {"key","tenant","label"}; the key is
 * told this once DELETE /admin/v1/keys/ID {"id","deleted":true} */
void gw_admin_keys_list(gw_app *app, gw_exchange *exchange);
void gw_admin_keys_make(gw_app *app, gw_exchange *exchange);
void gw_admin_keys_revoke(gw_app *app, gw_exchange *exchange);
