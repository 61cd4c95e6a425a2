#include "gateway/admin.h"

#include <string.h>

#include "engine/base/buf.h"
#include "gateway/api_error.h"
#include "gateway/metrics.h"
#include "gateway/tenant.h"

#define METRICS_BYTES_MAX (1u << 20)

static bool is_local(const gw_exchange *exchange)
{
    const char *remote = gw_exchange_remote(exchange);
    return strncmp(remote, "127.", 4) == 0 || strcmp(remote, "::1") == 0;
}

void gw_admin_metrics(gw_app *app, gw_exchange *exchange)
{
    static const gw_header type[] = {{"content-type", "text/plain; version=0.0.4; charset=utf-8"}};
    gw_identity identity;
    if (gw_exchange_listener(exchange) == GW_LISTENER_ADMIN && !is_local(exchange) &&
        !gw_tenants_admit(app->tenants, &identity, exchange, GW_SCOPE_ADMIN))
        return;
    base_buf out;
    base_buf_init(&out, METRICS_BYTES_MAX);
    gw_metrics_render(app->metrics, app, &out);
    if (out.failed)
        gw_error_respond(exchange, 500, "server_error", "internal_error", NULL,
                         "no memory for the metrics");
    else
        gw_respond(exchange, 200, type, 1, out.data, out.length);
    base_buf_deinit(&out);
}
