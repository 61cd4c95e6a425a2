/* Tenants and keys in the database; tenant.c keeps them in memory. */
#include "gateway/ledger_internal.h"

#include <string.h>
#include <sys/random.h>

#include "engine/base/clock.h"

base_code gw_ledger_tenants(gw_ledger *ledger, void (*row)(void *ctx, const gw_tenant_row *row),
                            void *ctx, base_err *err)
{
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_TENANTS);
    int code = SQLITE_ERROR;
    while (s && (code = sqlite3_step(s)) == SQLITE_ROW)
        row(ctx, &(gw_tenant_row){.id = sqlite3_column_int64(s, 0),
                                  .name = (const char *)sqlite3_column_text(s, 1),
                                  .group = (const char *)sqlite3_column_text(s, 3),
                                  .limits = (const char *)sqlite3_column_text(s, 4),
                                  .created_ms = sqlite3_column_int64(s, 5),
                                  .salt = (uint64_t)sqlite3_column_int64(s, 2)});
    sqlite3_reset(s);
    base_code result = code == SQLITE_DONE ? BASE_OK : gw_db_error(c, err, "cannot read tenants");
    gw_reader_give(ledger, c);
    return result;
}

base_code gw_ledger_keys(gw_ledger *ledger, void (*row)(void *ctx, const gw_key_row *row),
                         void *ctx, base_err *err)
{
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_KEYS);
    int code = SQLITE_ERROR;
    while (s && (code = sqlite3_step(s)) == SQLITE_ROW) {
        gw_key_row key = {
            .id = sqlite3_column_int64(s, 0),
            .tenant = sqlite3_column_int64(s, 1),
            .scopes = (uint32_t)sqlite3_column_int64(s, 3),
            .label = (const char *)sqlite3_column_text(s, 4),
            .created_ms = sqlite3_column_int64(s, 5),
            .restore = sqlite3_column_type(s, 6) == SQLITE_NULL ? -1 : sqlite3_column_int(s, 6)};
        if (sqlite3_column_bytes(s, 2) != (int)sizeof(key.hash))
            continue; /* no key has this hash */
        memcpy(key.hash, sqlite3_column_blob(s, 2), sizeof(key.hash));
        row(ctx, &key);
    }
    sqlite3_reset(s);
    base_code result = code == SQLITE_DONE ? BASE_OK : gw_db_error(c, err, "cannot read keys");
    gw_reader_give(ledger, c);
    return result;
}

typedef struct named {
    const char *name;
    int64_t id, tenant;
    uint64_t salt;
} named;

/* A tenant or group by its name, made with a random salt if there is none. */
static base_code find_or_make(gw_db *c, named *job, gw_sql find, gw_sql add, base_err *err)
{
    sqlite3_stmt *s = gw_db_statement(c, find);
    if (!s)
        return gw_db_error(c, err, "cannot read tenants");
    gw_bind_text(s, 1, job->name);
    int code = sqlite3_step(s);
    if (code == SQLITE_ROW) {
        job->id = sqlite3_column_int64(s, 0);
        job->salt = (uint64_t)sqlite3_column_int64(s, 1);
    }
    sqlite3_reset(s);
    if (code == SQLITE_ROW)
        return BASE_OK;
    if (code != SQLITE_DONE)
        return gw_db_error(c, err, "cannot read tenants");
    if (getrandom(&job->salt, sizeof(job->salt), 0) != (ssize_t)sizeof(job->salt))
        return base_fail(err, BASE_IO, "the system gives no random bytes");
    s = gw_db_statement(c, add);
    if (!s)
        return gw_db_error(c, err, "cannot make a tenant");
    gw_bind_text(s, 1, job->name);
    sqlite3_bind_int64(s, 2, (int64_t)job->salt);
    sqlite3_bind_int64(s, 3, base_wall_ms());
    if (!gw_db_execute(s))
        return gw_db_error(c, err, "cannot make a tenant");
    job->id = sqlite3_last_insert_rowid(c->db);
    return BASE_OK;
}

static base_code run_tenant_put(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    (void)ledger;
    return find_or_make(c, ctx, GW_SQL_TENANT_FIND, GW_SQL_TENANT_ADD, err);
}

base_code gw_ledger_tenant_put(gw_ledger *ledger, int64_t *id, uint64_t *salt, const char *name,
                               base_err *err)
{
    named put = {.name = name};
    base_code code = gw_on_writer(ledger, run_tenant_put, &put, err);
    *id = put.id;
    *salt = put.salt;
    return code;
}

static base_code run_tenant_share(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    (void)ledger;
    named *job = ctx;
    base_code code = find_or_make(c, job, GW_SQL_GROUP_FIND, GW_SQL_GROUP_ADD, err);
    if (code)
        return code;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_TENANT_SHARE);
    if (!s)
        return gw_db_error(c, err, "cannot share pages");
    sqlite3_bind_int64(s, 1, job->tenant);
    sqlite3_bind_int64(s, 2, job->id);
    if (!gw_db_execute(s))
        return gw_db_error(c, err, "cannot share pages");
    return sqlite3_changes(c->db) ? BASE_OK
                                  : base_fail_param(err, BASE_CONFLICT, "group",
                                                    "this tenant is in another sharing group");
}

base_code gw_ledger_tenant_share(gw_ledger *ledger, int64_t tenant, const char *group,
                                 uint64_t *salt, base_err *err)
{
    named share = {.name = group, .tenant = tenant};
    base_code code = gw_on_writer(ledger, run_tenant_share, &share, err);
    *salt = share.salt;
    return code;
}

typedef struct key_put {
    int64_t id, tenant;
    const uint8_t *hash;
    const char *label;
    uint32_t scopes;
    int32_t restore;
} key_put;

static base_code run_key_put(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    (void)ledger;
    key_put *put = ctx;
    int64_t found;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_KEY_FIND);
    if (s)
        sqlite3_bind_blob(s, 1, put->hash, 32, SQLITE_STATIC);
    if (!gw_db_scalar(s, &found))
        return gw_db_error(c, err, "cannot read keys");
    if (found)
        return base_fail(err, BASE_CONFLICT, "this key exists already, or did and was revoked");
    s = gw_db_statement(c, GW_SQL_KEY_ADD);
    if (!s)
        return gw_db_error(c, err, "cannot add a key");
    sqlite3_bind_int64(s, 1, put->tenant);
    sqlite3_bind_blob(s, 2, put->hash, 32, SQLITE_STATIC);
    sqlite3_bind_int64(s, 3, put->scopes);
    gw_bind_text(s, 4, put->label);
    sqlite3_bind_int64(s, 5, base_wall_ms());
    if (put->restore >= 0)
        sqlite3_bind_int(s, 6, put->restore);
    if (!gw_db_execute(s))
        return gw_db_error(c, err, "cannot add a key");
    put->id = sqlite3_last_insert_rowid(c->db);
    return BASE_OK;
}

base_code gw_ledger_key_put(gw_ledger *ledger, int64_t *id, int64_t tenant, const uint8_t hash[32],
                            uint32_t scopes, int32_t restore, const char *label, base_err *err)
{
    key_put put = {
        .tenant = tenant, .hash = hash, .scopes = scopes, .restore = restore, .label = label};
    base_code code = gw_on_writer(ledger, run_key_put, &put, err);
    *id = put.id;
    return code;
}

static base_code run_key_revoke(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    (void)ledger;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_KEY_REVOKE);
    if (!s)
        return gw_db_error(c, err, "cannot revoke a key");
    sqlite3_bind_int64(s, 1, *(int64_t *)ctx);
    sqlite3_bind_int64(s, 2, base_wall_ms());
    if (!gw_db_execute(s))
        return gw_db_error(c, err, "cannot revoke a key");
    return sqlite3_changes(c->db) ? BASE_OK
                                  : base_fail(err, BASE_NOT_FOUND, "there is no such key");
}

base_code gw_ledger_key_revoke(gw_ledger *ledger, int64_t id, base_err *err)
{
    return gw_on_writer(ledger, run_key_revoke, &id, err);
}

typedef struct limit_put {
    int64_t tenant;
    const char *limits;
} limit_put;

static base_code run_tenant_limit(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    (void)ledger;
    const limit_put *put = ctx;
    sqlite3_stmt *s = gw_db_prepare(c, "UPDATE tenants SET limits=?2 WHERE id=?1");
    if (s) {
        sqlite3_bind_int64(s, 1, put->tenant);
        gw_bind_text(s, 2, put->limits);
    }
    if (!gw_db_run(s))
        return gw_db_error(c, err, "cannot change a tenant");
    return sqlite3_changes(c->db) ? BASE_OK
                                  : base_fail(err, BASE_NOT_FOUND, "there is no such tenant");
}

base_code gw_ledger_tenant_limit(gw_ledger *ledger, int64_t tenant, const char *limits,
                                 base_err *err)
{
    limit_put put = {tenant, limits};
    return gw_on_writer(ledger, run_tenant_limit, &put, err);
}

base_code gw_ledger_tenant_bytes(gw_ledger *ledger, uint64_t *out, int64_t tenant, base_err *err)
{
    int64_t bytes = 0;
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_BYTES_TENANT);
    if (s)
        sqlite3_bind_int64(s, 1, tenant);
    bool ok = gw_db_scalar(s, &bytes);
    base_code code = ok ? BASE_OK : gw_db_error(c, err, "cannot count a tenant's bytes");
    gw_reader_give(ledger, c);
    *out = bytes > 0 ? (uint64_t)bytes : 0;
    return code;
}
