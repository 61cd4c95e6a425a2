/* admin_tenants: tenants and their limits. Thread: the exchange's loop; workers write. */
#pragma once
#include "gateway/admin_call.h"

void gw_admin_tenants(gw_app *app, gw_exchange *exchange);
void gw_admin_tenant(gw_app *app, gw_exchange *exchange);
void gw_admin_tenant_make(gw_app *app, gw_exchange *exchange);
void gw_admin_tenant_change(gw_app *app, gw_exchange *exchange);
