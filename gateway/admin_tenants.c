#include "gateway/admin_tenants.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "gateway/body.h"
#include "gateway/dialect.h"
#include "gateway/ledger.h"

#define LIST_MAX 1024

static base_code put_tenant(gw_admin_call *call, const gw_tenant_info *t, base_err *err)
{
    uint64_t bytes;
    base_buf *out = &call->out;
    GW_TRY(gw_ledger_tenant_bytes(call->app->ledger, &bytes, t->identity.tenant, err));
    base_buf_puts(out, "{\"id\":");
    base_buf_json_string(out, t->identity.name, strlen(t->identity.name));
    base_buf_puts(out, ",\"object\":\"tenant\"");
    gw_put_member(out, "group", t->group);
    base_buf_printf(out, ",\"created_at\":%lld,\"keys\":%u,\"stored_bytes\":%llu,\"limits\":",
                    (long long)(t->created_ms / 1000), t->keys, (unsigned long long)bytes);
    gw_limits_put(out, &t->limits);
    base_buf_printf(out, ",\"running\":%u}", t->running);
    return BASE_OK;
}

static base_code list(gw_admin_call *call, base_err *err)
{
    int64_t limit;
    gw_tenant_info *tenants;
    GW_TRY(gw_query_int(&limit, call->query, "limit", 1, LIST_MAX, LIST_MAX, err));
    uint32_t count = gw_tenants_list(call->app->tenants, &tenants);
    base_code code = tenants ? BASE_OK : base_fail(err, BASE_NOMEM, "no memory for the list");
    base_buf_puts(&call->out, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; i < count && i < limit && !code; i++) {
        base_buf_puts(&call->out, i ? "," : "");
        code = put_tenant(call, &tenants[i], err);
    }
    base_buf_printf(&call->out, "],\"has_more\":%s}", count > limit ? "true" : "false");
    free(tenants);
    return code;
}

static base_code put_named(gw_admin_call *call, const char *name, base_err *err)
{
    gw_tenant_info *tenants;
    base_code code = BASE_NOT_FOUND;
    uint32_t count = gw_tenants_list(call->app->tenants, &tenants);
    for (uint32_t i = 0; i < count && code == BASE_NOT_FOUND; i++)
        if (strcmp(tenants[i].identity.name, name) == 0)
            code = put_tenant(call, &tenants[i], err);
    if (code == BASE_NOT_FOUND)
        base_fail(err, code, "there is no such tenant");
    free(tenants);
    return code;
}

static base_code get(gw_admin_call *call, base_err *err)
{
    return put_named(call, gw_admin_id(call), err);
}

static base_code make(gw_admin_call *call, base_err *err)
{
    const char *name = NULL, *group = NULL;
    gw_limits limits = {0};
    const json_t *change = json_object_get(call->body, "limits");
    GW_TRY(gw_read_name(&name, call->body, "", "name", GW_TENANT_NAME_MAX, err));
    GW_TRY(gw_read_name(&group, call->body, "", "group", GW_TENANT_NAME_MAX, err));
    if (!name)
        return base_fail_param(err, BASE_INVALID, "name", "name must name the tenant");
    if (change)
        GW_TRY(gw_limits_read(&limits, change, err)); /* before anything is made */
    GW_TRY(gw_tenants_make(call->app->tenants, name, group && group[0] ? group : NULL, err));
    if (change)
        GW_TRY(gw_tenants_limit(call->app->tenants, name, change, err));
    base_log(BASE_LOG_INFO, "tenant_made tenant=%s", name);
    return put_named(call, name, err);
}

static base_code change(gw_admin_call *call, base_err *err)
{
    const char *name = gw_admin_id(call);
    const json_t *limits = json_object_get(call->body, "limits");
    gw_identity there;
    if (!gw_tenants_named(call->app->tenants, &there, name))
        return base_fail(err, BASE_NOT_FOUND, "there is no such tenant");
    if (!limits)
        return base_fail_param(err, BASE_INVALID, "limits", "limits must be an object");
    GW_TRY(gw_tenants_limit(call->app->tenants, name, limits, err));
    base_log(BASE_LOG_INFO, "tenant_limited tenant=%s", name);
    return put_named(call, name, err);
}

void gw_admin_tenants(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, list);
}

void gw_admin_tenant(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, get);
}

void gw_admin_tenant_make(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, make);
}

void gw_admin_tenant_change(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, change);
}
