/* admin_cache: the prefix tree as a list, flushing and prefetching. Thread: the exchange's loop; a
 * worker waits for the engine's border when flushing. */
#pragma once
#include "gateway/admin_call.h"

/* GET /admin/v1/cache/tree?limit= */
void gw_admin_cache_tree(gw_app *app, gw_exchange *exchange);
/* POST /admin/v1/cache/flush {"tenant":NAME} | {"session":ID} | {"all":true} */
void gw_admin_cache_flush(gw_app *app, gw_exchange *exchange);
/* POST /admin/v1/cache/prefetch {"session":ID} */
void gw_admin_cache_prefetch(gw_app *app, gw_exchange *exchange);
