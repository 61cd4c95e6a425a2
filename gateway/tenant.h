/* gw_tenants: who is asking, and what they may do.
 *
 * Tenants and keys are rows of the ledger's database, read at create and held in memory; a key is
 * stored as the SHA-256 of its text and compared in constant time over all keys without an early
 * exit. A tenant's salt is 64 random bits, stored, the namespace of its cached pages; tenants of
 * one sharing group have the group's instead, and share pages, nothing else. While the database has
 * no key, everyone on loopback is the tenant `default` with every scope and nobody else is
 * admitted. Thread: any, unless said otherwise; one mutex, held for the compare. */
#pragma once
#include "engine/base/err.h"
#include "gateway/account.h"
#include "gateway/app.h"
#include "gateway/limit.h"

#define GW_TENANT_NAME_MAX 64
#define GW_KEY_TEXT_MAX 128 /* longer ones are refused unread */

typedef enum gw_scope {
    GW_SCOPE_INFER = 1, /* the public routes */
    GW_SCOPE_RAW = 2,   /* special token ids in a raw prompt */
    GW_SCOPE_ADMIN = 4, /* the admin routes */
    GW_SCOPE_ALL = 7,
} gw_scope;

typedef struct gw_identity {
    int64_t tenant; /* row id */
    int64_t key;    /* row id, 0 without keys */
    uint64_t salt;  /* eng_request.space; one for all tenants of a group */
    uint32_t scopes;
    int32_t restore; /* gw_restore of the key, -1: as configured */
    char name[GW_TENANT_NAME_MAX + 1];
} gw_identity;

typedef enum gw_auth {
    GW_AUTH_OK,
    GW_AUTH_MISSING,   /* 401: keys exist and none was sent */
    GW_AUTH_WRONG,     /* 401 */
    GW_AUTH_SCOPE,     /* 403: right key, scope missing */
    GW_AUTH_NOT_LOCAL, /* 403: no keys, and the client is not on loopback */
    GW_AUTH_FOREIGN,   /* 403: a browser's session, asked for by another site's page */
} gw_auth;

/* Makes the tenant `default` if there is none. The ledger is borrowed and outlives this. */
base_code gw_tenants_create(gw_tenants **out, gw_ledger *ledger, base_err *err);
void gw_tenants_destroy(gw_tenants *tenants); /* NULL is fine */
/* server.insecure: without keys clients beyond loopback are the tenant `default` too. Before the
 * first request. */
void gw_tenants_open_to_all(gw_tenants *tenants);
gw_account *gw_tenants_account(gw_tenants *tenants); /* the usage totals, borrowed */
bool gw_tenants_keyed(const gw_tenants *tenants); /* at least one key is valid: other addresses than
                                                     loopback may be served */

/* `authorization`: the whole header value ("Bearer KEY", scheme in any case) or NULL; `api_key`:
 * x-api-key or NULL; if both are sent both must name the same key. `remote`: address text.
 * `scopes`: all of these are needed. */
gw_auth gw_tenants_authenticate(gw_tenants *tenants, gw_identity *out, const char *authorization,
                                const char *api_key, const char *remote, uint32_t scopes);
/* Who a key's row is, for those who showed that key before; GW_AUTH_WRONG once it is revoked. */
gw_auth gw_tenants_of_key(gw_tenants *tenants, gw_identity *out, int64_t key, uint32_t scopes);
/* The tenant itself, without a key. False if there is none of that row. */
bool gw_tenants_identity(gw_tenants *tenants, gw_identity *out, int64_t tenant);
/* The name of the tenant whose own salt this is: neither a group's nor a cache_salt's. */
bool gw_tenants_of_space(gw_tenants *tenants, char name[GW_TENANT_NAME_MAX + 1], uint64_t space);
bool gw_tenants_named(gw_tenants *tenants, gw_identity *out, const char *name); /* the same */
/* The same for an exchange. Thread: the exchange's loop, as for the next two. */
gw_auth gw_tenants_check(gw_tenants *tenants, gw_identity *out, gw_exchange *exchange,
                         uint32_t scopes);
/* Answers 401 invalid_api_key or 403 permission_error and returns that status; 0, and no answer,
 * for GW_AUTH_OK. */
int gw_tenants_refuse(gw_exchange *exchange, gw_auth auth);
/* The same for an exchange; if it is refused, answers 401 invalid_api_key or 403 permission_error
 * and returns false: the exchange is over then. Thread: the exchange's loop. */
bool gw_tenants_admit(gw_tenants *tenants, gw_identity *out, gw_exchange *exchange,
                      uint32_t scopes);

/* Mints a key ("wb_" and 48 hex digits of 192 random bits) for a tenant, which is made if it is
 * new. `group`: the sharing group that it enters for good, NULL: as it is; BASE_CONFLICT if it is
 * in another. `restore`: auto, linked or off, whether hidden reasoning comes back to those who drop
 * it; NULL: as configured. The text is given out here and never again. Blocks until the row is
 * committed. */
base_code gw_tenants_mint(gw_tenants *tenants, char key[GW_KEY_TEXT_MAX + 1], const char *tenant,
                          const char *group, const char *restore, const char *label,
                          uint32_t scopes, base_err *err);
/* Adds a key whose text the operator chose (at least 16 characters); BASE_CONFLICT if it is there
 * already. Blocks. */
base_code gw_tenants_add(gw_tenants *tenants, const char *key, const char *tenant,
                         const char *group, const char *restore, const char *label, uint32_t scopes,
                         base_err *err);
/* By its row id. BASE_NOT_FOUND; without `force` BASE_CONFLICT for the last key with scope admin
 * while there are others. Blocks. Without the last key, loopback is open again. */
base_code gw_tenants_revoke(gw_tenants *tenants, int64_t key, bool force, base_err *err);

typedef struct gw_tenant_info {
    gw_identity identity;               /* without a key */
    char group[GW_TENANT_NAME_MAX + 1]; /* "": none */
    int64_t created_ms;
    uint32_t keys, running; /* valid ones; requests at once, now */
    gw_limits limits;
} gw_tenant_info;
/* All of them, the caller's to free; NULL without memory. */
uint32_t gw_tenants_list(gw_tenants *tenants, gw_tenant_info **out);
/* Makes a tenant. BASE_CONFLICT if there is one of that name; BASE_INVALID names a wrong field;
 * `group` as in gw_tenants_mint. Blocks, as the next. */
base_code gw_tenants_make(gw_tenants *tenants, const char *name, const char *group, base_err *err);
/* BASE_NOT_FOUND. `change` as in gw_limits_read; all of it holds from now on, or nothing. */
base_code gw_tenants_limit(gw_tenants *tenants, const char *name, const json_t *change,
                           base_err *err);
/* One request more, see gw_limit_enter, and what is left then; and its end. */
bool gw_tenants_enter(gw_tenants *tenants, int64_t tenant, const char **what, uint32_t *retry_ms,
                      gw_limit_view *view);
void gw_tenants_leave(gw_tenants *tenants, int64_t tenant, uint64_t tokens);

typedef struct gw_key_info {
    int64_t key, tenant;
    uint32_t scopes;
    int32_t restore; /* gw_restore, -1: as configured */
    int64_t created_ms;
    char tenant_name[GW_TENANT_NAME_MAX + 1], label[GW_TENANT_NAME_MAX + 1];
    char group[GW_TENANT_NAME_MAX + 1]; /* "": none */
    char hint[9];                       /* first 8 hex digits of the hash, to tell keys apart */
} gw_key_info;
/* Copies up to `max` rows; returns how many there are. */
uint32_t gw_tenants_keys(gw_tenants *tenants, gw_key_info *out, uint32_t max);
/* "inference,raw,admin" to bits; BASE_INVALID names an unknown word. */
base_code gw_scopes_parse(uint32_t *out, const char *text, base_err *err);
