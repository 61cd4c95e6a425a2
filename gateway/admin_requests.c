#include "gateway/admin_requests.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "gateway/admin_call.h"
#include "gateway/live.h"

#define LIST_MAX 4096 /* of one answer: 3 MB at most */

void gw_admin_requests(gw_app *app, gw_exchange *exchange)
{
    gw_identity identity;
    base_err err = BASE_ERR_INIT;
    int64_t recent;
    if (!gw_admin_admit(app, exchange, &identity))
        return;
    if (gw_query_int(&recent, gw_exchange_query(exchange), "recent", 0, GW_LIVE_RECENT, 0, &err)) {
        gw_error_respond_err(exchange, &err);
        return;
    }
    base_buf out;
    base_buf_init(&out, 0);
    gw_live_request *list = malloc(LIST_MAX * sizeof *list);
    uint32_t count = list ? gw_live_list(app->live, list, LIST_MAX, (uint32_t)recent) : 0;
    base_buf_printf(&out, "{\"object\":\"list\",\"now_ms\":%lld,\"data\":[",
                    (long long)base_wall_ms());
    for (uint32_t i = 0; i < count; i++) {
        base_buf_puts(&out, i ? "," : "");
        gw_live_put(&out, &list[i]);
    }
    base_buf_puts(&out, "]}");
    out.failed |= !list;
    free(list);
    gw_admin_respond(exchange, &out);
    base_buf_deinit(&out);
}

/* Of a path "/admin/v1/requests/ID…". */
static void id_of(gw_id *out, const gw_exchange *exchange)
{
    const char *at = gw_exchange_path(exchange) + strlen("/admin/v1/requests/");
    snprintf(out->text, sizeof out->text, "%.*s", (int)strcspn(at, "/"), at);
}

void gw_admin_request(gw_app *app, gw_exchange *exchange)
{
    gw_identity identity;
    gw_live_request request;
    gw_id id;
    if (!gw_admin_admit(app, exchange, &identity))
        return;
    id_of(&id, exchange);
    if (!gw_live_find(app->live, &request, id.text)) {
        gw_error_respond(exchange, 404, "invalid_request_error", "request_not_found", NULL,
                         "there is no such request");
        return;
    }
    base_buf out;
    base_buf_init(&out, 0);
    gw_live_put(&out, &request);
    gw_admin_respond(exchange, &out);
    base_buf_deinit(&out);
}

void gw_admin_request_cancel(gw_app *app, gw_exchange *exchange)
{
    gw_identity identity;
    gw_id id;
    base_err err = BASE_ERR_INIT;
    if (!gw_admin_admit(app, exchange, &identity))
        return;
    id_of(&id, exchange);
    if (gw_live_cancel(app->live, app->engine, id.text, &err)) {
        gw_error_respond_err(exchange, &err);
        return;
    }
    base_log(BASE_LOG_INFO, "request_cancelled req=%s by=admin", id.text);
    base_buf out;
    base_buf_init(&out, 0);
    base_buf_printf(&out, "{\"id\":\"%s\",\"object\":\"request.cancelled\",\"cancelled\":true}",
                    id.text);
    gw_admin_respond(exchange, &out);
    base_buf_deinit(&out);
}

void gw_admin_events(gw_app *app, gw_exchange *exchange)
{
    gw_identity identity;
    if (gw_admin_admit(app, exchange, &identity))
        gw_events_listen(app, exchange);
}
