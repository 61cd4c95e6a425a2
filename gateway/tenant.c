/* gw_tenants: see the header. Keys are compared by digest, all of them each time: the time taken
 * tells the number of keys and nothing else. */
#include "gateway/tenant.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "gateway/api_error.h"
#include "gateway/ledger.h"

#define KEYS_MAX 65536
#define TENANTS_MAX 65536

typedef struct tenant {
    int64_t id;
    uint64_t salt; /* its own, or its group's */
    char name[GW_TENANT_NAME_MAX + 1], group[GW_TENANT_NAME_MAX + 1];
    int64_t created_ms;
    gw_limit limit;
} tenant;

typedef struct key {
    gw_key_info info;
    uint8_t hash[32];
} key;

struct gw_tenants {
    gw_ledger *ledger;
    gw_account *account;
    pthread_mutex_t change; /* one change of the keys at a time, its commit included */
    pthread_mutex_t mutex;  /* guards what follows */
    tenant *tenants;
    key *keys;
    uint32_t tenant_count, tenant_capacity;
    uint32_t key_count, key_capacity;
    gw_identity open; /* tenant `default` */
    bool open_to_all;
};

static bool grow(void **array, uint32_t *capacity, uint32_t count, size_t size, uint32_t max)
{
    if (count < *capacity)
        return true;
    uint32_t wanted = *capacity ? *capacity * 2 : 8;
    if (wanted > max)
        return false;
    void *more = realloc(*array, wanted * size);
    if (!more)
        return false;
    *array = more;
    *capacity = wanted;
    return true;
}

static tenant *tenant_by_id(gw_tenants *tenants, int64_t id)
{
    for (uint32_t i = 0; i < tenants->tenant_count; i++)
        if (tenants->tenants[i].id == id)
            return &tenants->tenants[i];
    return NULL;
}

/* A tenant that is there may have another salt by now. */
static bool add_tenant(gw_tenants *tenants, int64_t id, uint64_t salt, const char *name,
                       const char *group)
{
    tenant *there = tenant_by_id(tenants, id);
    if (there) {
        there->salt = salt;
        if (group)
            snprintf(there->group, sizeof(there->group), "%s", group);
        if (id == tenants->open.tenant)
            tenants->open.salt = salt;
        return true;
    }
    if (!grow((void **)&tenants->tenants, &tenants->tenant_capacity, tenants->tenant_count,
              sizeof(tenant), TENANTS_MAX))
        return false;
    tenant *slot = &tenants->tenants[tenants->tenant_count++];
    *slot = (tenant){.id = id, .salt = salt, .created_ms = base_wall_ms()};
    snprintf(slot->name, sizeof(slot->name), "%s", name);
    snprintf(slot->group, sizeof(slot->group), "%s", group ? group : "");
    return true;
}

static bool add_key(gw_tenants *tenants, const gw_key_row *row)
{
    tenant *owner = tenant_by_id(tenants, row->tenant);
    /* A key whose tenant is gone opens nothing. */
    if (!owner)
        return true;
    if (!grow((void **)&tenants->keys, &tenants->key_capacity, tenants->key_count, sizeof(key),
              KEYS_MAX))
        return false;
    key *slot = &tenants->keys[tenants->key_count++];
    memset(slot, 0, sizeof(*slot));
    slot->info = (gw_key_info){.key = row->id,
                               .tenant = row->tenant,
                               .scopes = row->scopes,
                               .restore = row->restore,
                               .created_ms = row->created_ms};
    snprintf(slot->info.tenant_name, sizeof(slot->info.tenant_name), "%s", owner->name);
    snprintf(slot->info.label, sizeof(slot->info.label), "%s", row->label);
    snprintf(slot->info.hint, sizeof(slot->info.hint), "%02x%02x%02x%02x", row->hash[0],
             row->hash[1], row->hash[2], row->hash[3]);
    memcpy(slot->hash, row->hash, sizeof(slot->hash));
    return true;
}

typedef struct loading {
    gw_tenants *tenants;
    bool failed;
} loading;

static void load_tenant(void *ctx, const gw_tenant_row *row)
{
    loading *l = ctx;
    if (!add_tenant(l->tenants, row->id, row->salt, row->name, row->group)) {
        l->failed = true;
        return;
    }
    tenant *t = tenant_by_id(l->tenants, row->id);
    gw_limits limits = {0};
    json_t *json = row->limits ? json_loads(row->limits, 0, NULL) : NULL;
    if (json && gw_limits_read(&limits, json, NULL))
        base_log(BASE_LOG_WARN, "limits_ignored tenant=%s", t->name);
    json_decref(json);
    t->created_ms = row->created_ms;
    gw_limit_set(&t->limit, &limits, base_now_ns());
}

static void load_key(void *ctx, const gw_key_row *row)
{
    loading *l = ctx;
    if (!add_key(l->tenants, row))
        l->failed = true;
}

base_code gw_tenants_create(gw_tenants **out, gw_ledger *ledger, base_err *err)
{
    gw_tenants *tenants = calloc(1, sizeof(*tenants));
    if (!tenants)
        return base_fail(err, BASE_NOMEM, "no memory for the tenants");
    pthread_mutex_init(&tenants->change, NULL);
    pthread_mutex_init(&tenants->mutex, NULL);
    tenants->ledger = ledger;
    base_code code = gw_account_create(&tenants->account, err);
    if (code)
        goto fail;
    int64_t id;
    uint64_t salt;
    code = gw_ledger_tenant_put(ledger, &id, &salt, "default", err);
    if (code)
        goto fail;
    tenants->open = (gw_identity){
        .tenant = id, .salt = salt, .scopes = GW_SCOPE_ALL, .restore = -1, .name = "default"};
    loading l = {tenants, false};
    code = gw_ledger_tenants(ledger, load_tenant, &l, err);
    if (!code)
        code = gw_ledger_keys(ledger, load_key, &l, err);
    if (!code && l.failed)
        code = base_fail(err, BASE_NOMEM, "more than %d tenants or keys, or no memory for them",
                         KEYS_MAX);
    if (code)
        goto fail;
    *out = tenants;
    return BASE_OK;
fail:
    gw_tenants_destroy(tenants);
    return code;
}

void gw_tenants_destroy(gw_tenants *tenants)
{
    if (!tenants)
        return;
    gw_account_destroy(tenants->account);
    pthread_mutex_destroy(&tenants->change);
    pthread_mutex_destroy(&tenants->mutex);
    free(tenants->tenants);
    free(tenants->keys);
    free(tenants);
}

gw_account *gw_tenants_account(gw_tenants *tenants)
{
    return tenants->account;
}

bool gw_tenants_keyed(const gw_tenants *tenants)
{
    gw_tenants *t = (gw_tenants *)tenants;
    pthread_mutex_lock(&t->mutex);
    bool keyed = t->key_count > 0;
    pthread_mutex_unlock(&t->mutex);
    return keyed;
}

/* "Bearer KEY": the scheme in any case, one or more blanks. NULL if it is another scheme. */
static const char *bearer(const char *authorization)
{
    if (strncasecmp(authorization, "bearer", 6) != 0 ||
        (authorization[6] != ' ' && authorization[6] != '\0'))
        return NULL;
    const char *text = authorization + 6;
    while (*text == ' ')
        text++;
    return text;
}

static bool hash_key(uint8_t out[32], const char *text)
{
    size_t length = strnlen(text, GW_KEY_TEXT_MAX + 1);
    /* Blanks at the end come from copied keys and are not part of any. */
    while (length && text[length - 1] == ' ')
        length--;
    if (!length || length > GW_KEY_TEXT_MAX)
        return false;
    SHA256((const unsigned char *)text, length, out);
    return true;
}

static bool is_loopback(const char *remote)
{
    struct in_addr v4;
    struct in6_addr v6;
    if (strcmp(remote, GW_REMOTE_UNIX) == 0)
        return true;
    if (inet_pton(AF_INET, remote, &v4) == 1)
        return (ntohl(v4.s_addr) >> 24) == 127;
    if (inet_pton(AF_INET6, remote, &v6) != 1)
        return false;
    if (IN6_IS_ADDR_V4MAPPED(&v6))
        return v6.s6_addr[12] == 127;
    return IN6_IS_ADDR_LOOPBACK(&v6);
}

void gw_tenants_open_to_all(gw_tenants *tenants)
{
    tenants->open_to_all = true;
}

static void identify(gw_identity *out, const tenant *owner, const key *k)
{
    *out = (gw_identity){.tenant = owner->id, .salt = owner->salt, .restore = -1};
    if (k) {
        out->key = k->info.key;
        out->scopes = k->info.scopes;
        out->restore = k->info.restore;
    }
    memcpy(out->name, owner->name, sizeof(out->name));
}

gw_auth gw_tenants_of_key(gw_tenants *tenants, gw_identity *out, int64_t id, uint32_t scopes)
{
    gw_auth auth = GW_AUTH_WRONG;
    pthread_mutex_lock(&tenants->mutex);
    for (uint32_t i = 0; i < tenants->key_count && auth == GW_AUTH_WRONG; i++) {
        const key *k = &tenants->keys[i];
        const tenant *owner = k->info.key == id ? tenant_by_id(tenants, k->info.tenant) : NULL;
        if (!owner)
            continue;
        identify(out, owner, k);
        auth = (k->info.scopes & scopes) == scopes ? GW_AUTH_OK : GW_AUTH_SCOPE;
    }
    pthread_mutex_unlock(&tenants->mutex);
    return auth;
}

bool gw_tenants_identity(gw_tenants *tenants, gw_identity *out, int64_t id)
{
    pthread_mutex_lock(&tenants->mutex);
    const tenant *owner = tenant_by_id(tenants, id);
    if (owner)
        identify(out, owner, NULL);
    pthread_mutex_unlock(&tenants->mutex);
    return owner != NULL;
}

bool gw_tenants_of_space(gw_tenants *tenants, char name[GW_TENANT_NAME_MAX + 1], uint64_t space)
{
    bool found = false;
    pthread_mutex_lock(&tenants->mutex);
    for (uint32_t i = 0; i < tenants->tenant_count && !found; i++) {
        const tenant *t = &tenants->tenants[i];
        found = t->salt == space && !t->group[0];
        if (found)
            memcpy(name, t->name, sizeof(t->name));
    }
    pthread_mutex_unlock(&tenants->mutex);
    return found;
}

bool gw_tenants_named(gw_tenants *tenants, gw_identity *out, const char *name)
{
    bool found = false;
    pthread_mutex_lock(&tenants->mutex);
    for (uint32_t i = 0; i < tenants->tenant_count && !found; i++) {
        found = strcmp(tenants->tenants[i].name, name) == 0;
        if (found)
            identify(out, &tenants->tenants[i], NULL);
    }
    pthread_mutex_unlock(&tenants->mutex);
    return found;
}

gw_auth gw_tenants_authenticate(gw_tenants *tenants, gw_identity *out, const char *authorization,
                                const char *api_key, const char *remote, uint32_t scopes)
{
    gw_auth auth = GW_AUTH_WRONG;
    pthread_mutex_lock(&tenants->mutex);
    if (!tenants->key_count) {
        /* Clients send made-up keys to local servers; without keys none is asked for, so none is
         * wrong. */
        *out = tenants->open;
        auth = tenants->open_to_all || is_loopback(remote) ? GW_AUTH_OK : GW_AUTH_NOT_LOCAL;
        goto out;
    }
    if (!authorization && !api_key) {
        auth = GW_AUTH_MISSING;
        goto out;
    }
    uint8_t digest[32];
    const char *text = authorization ? bearer(authorization) : api_key;
    if (!text || !hash_key(digest, text))
        goto out;
    if (authorization && api_key) {
        uint8_t second[32];
        if (!hash_key(second, api_key) || CRYPTO_memcmp(digest, second, sizeof(digest)) != 0)
            goto out;
    }
    /* No early exit, and the choice is made by arithmetic: every key costs the same. */
    uint32_t found = 0;
    for (uint32_t i = 0; i < tenants->key_count; i++) {
        uint32_t equal = CRYPTO_memcmp(digest, tenants->keys[i].hash, sizeof(digest)) == 0;
        found |= (0u - equal) & (i + 1);
    }
    if (!found)
        goto out;
    const key *k = &tenants->keys[found - 1];
    const tenant *owner = tenant_by_id(tenants, k->info.tenant);
    if (!owner)
        goto out;
    identify(out, owner, k);
    auth = (k->info.scopes & scopes) == scopes ? GW_AUTH_OK : GW_AUTH_SCOPE;
out:
    pthread_mutex_unlock(&tenants->mutex);
    return auth;
}

int gw_tenants_refuse(gw_exchange *exchange, gw_auth auth)
{
    switch (auth) {
    case GW_AUTH_OK:
        return 0;
    case GW_AUTH_MISSING:
        gw_error_unauthorized(exchange,
                              "no API key: send Authorization: Bearer KEY or x-api-key: KEY");
        return 401;
    case GW_AUTH_WRONG:
        gw_error_unauthorized(exchange, "the API key is not valid");
        return 401;
    case GW_AUTH_SCOPE:
        gw_error_respond(exchange, 403, "permission_error", "insufficient_scope", NULL,
                         "this API key may not use this path");
        return 403;
    case GW_AUTH_FOREIGN:
        gw_error_respond(exchange, 403, "permission_error", "cross_site", NULL,
                         "with a browser's session only its own pages may change something");
        return 403;
    case GW_AUTH_NOT_LOCAL:
        break;
    }
    gw_error_respond(exchange, 403, "permission_error", "keys_required", NULL,
                     "without API keys only loopback clients are served");
    return 403;
}

gw_auth gw_tenants_check(gw_tenants *tenants, gw_identity *out, gw_exchange *exchange,
                         uint32_t scopes)
{
    return gw_tenants_authenticate(tenants, out, gw_exchange_header(exchange, "authorization"),
                                   gw_exchange_header(exchange, "x-api-key"),
                                   gw_exchange_remote(exchange), scopes);
}

bool gw_tenants_admit(gw_tenants *tenants, gw_identity *out, gw_exchange *exchange, uint32_t scopes)
{
    return !gw_tenants_refuse(exchange, gw_tenants_check(tenants, out, exchange, scopes));
}

static base_code check_name(const char *what, const char *text, base_err *err)
{
    size_t length = strlen(text);
    if (!length || length > GW_TENANT_NAME_MAX)
        return base_fail_param(err, BASE_INVALID, what, "%s must have 1 to %d characters", what,
                               GW_TENANT_NAME_MAX);
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)text[i]) && !strchr("._-", text[i]))
            return base_fail_param(err, BASE_INVALID, what,
                                   "%s may hold letters, digits, '.', '_' and '-' only", what);
    return BASE_OK;
}

base_code gw_tenants_add(gw_tenants *tenants, const char *text, const char *name, const char *group,
                         const char *restore, const char *label, uint32_t scopes, base_err *err)
{
    base_code code = check_name("tenant", name, err);
    if (!code && group)
        code = check_name("group", group, err);
    if (code)
        return code;
    if (strlen(label) > GW_TENANT_NAME_MAX)
        return base_fail_param(err, BASE_INVALID, "label", "label exceeds %d characters",
                               GW_TENANT_NAME_MAX);
    if (!scopes || (scopes & ~(uint32_t)GW_SCOPE_ALL))
        return base_fail_param(err, BASE_INVALID, "scopes",
                               "scopes must name at least one of inference, raw, admin");
    size_t length = strlen(text);
    if (length < 16 || length > GW_KEY_TEXT_MAX)
        return base_fail_param(err, BASE_INVALID, "key", "a key must have 16 to %d characters",
                               GW_KEY_TEXT_MAX);
    for (size_t i = 0; i < length; i++)
        if (text[i] <= ' ' || text[i] > '~')
            return base_fail_param(err, BASE_INVALID, "key",
                                   "a key may hold printable ASCII without blanks only");
    gw_key_row row = {.scopes = scopes, .label = label, .restore = -1};
    gw_restore rule;
    if (restore) {
        if (!gw_restore_parse(&rule, restore))
            return base_fail_param(err, BASE_INVALID, "restore",
                                   "restore must be one of auto, linked, off");
        row.restore = (int32_t)rule;
    }
    if (!hash_key(row.hash, text))
        return base_fail_param(err, BASE_INVALID, "key", "this is not a key");
    uint64_t salt;
    code = gw_ledger_tenant_put(tenants->ledger, &row.tenant, &salt, name, err);
    if (!code && group)
        code = gw_ledger_tenant_share(tenants->ledger, row.tenant, group, &salt, err);
    if (!code)
        code = gw_ledger_key_put(tenants->ledger, &row.id, row.tenant, row.hash, scopes,
                                 row.restore, label, err);
    if (code)
        return code;
    row.created_ms = base_wall_ms();
    pthread_mutex_lock(&tenants->mutex);
    bool added = add_tenant(tenants, row.tenant, salt, name, group) && add_key(tenants, &row);
    pthread_mutex_unlock(&tenants->mutex);
    return added ? BASE_OK
                 : base_fail(err, BASE_NOMEM,
                             "the key is stored; no memory to use it before the next start");
}

base_code gw_tenants_make(gw_tenants *tenants, const char *name, const char *group, base_err *err)
{
    gw_identity there;
    int64_t id;
    uint64_t salt;
    base_code code = check_name("name", name, err);
    if (!code && group)
        code = check_name("group", group, err);
    pthread_mutex_lock(&tenants->change);
    if (!code && gw_tenants_named(tenants, &there, name))
        code = base_fail_param(err, BASE_CONFLICT, "name", "there is a tenant of this name");
    if (!code)
        code = gw_ledger_tenant_put(tenants->ledger, &id, &salt, name, err);
    if (!code && group)
        code = gw_ledger_tenant_share(tenants->ledger, id, group, &salt, err);
    pthread_mutex_lock(&tenants->mutex);
    if (!code && !add_tenant(tenants, id, salt, name, group))
        code = base_fail(err, BASE_NOMEM, "more than %d tenants, or no memory", TENANTS_MAX);
    pthread_mutex_unlock(&tenants->mutex);
    pthread_mutex_unlock(&tenants->change);
    return code;
}

static base_code change_limits(gw_tenants *tenants, const char *name, const json_t *change,
                               base_err *err)
{
    gw_identity who;
    gw_limits limits;
    if (!gw_tenants_named(tenants, &who, name))
        return base_fail(err, BASE_NOT_FOUND, "there is no such tenant");
    pthread_mutex_lock(&tenants->mutex);
    limits = tenant_by_id(tenants, who.tenant)->limit.max;
    pthread_mutex_unlock(&tenants->mutex);
    base_code code = gw_limits_read(&limits, change, err);
    base_buf text;
    base_buf_init(&text, 0);
    gw_limits_put(&text, &limits);
    base_buf_add(&text, "", 1);
    if (!code && text.failed)
        code = base_fail(err, BASE_NOMEM, "no memory for the limits");
    if (!code)
        code = gw_ledger_tenant_limit(tenants->ledger, who.tenant, text.data, err);
    base_buf_deinit(&text);
    if (code)
        return code;
    pthread_mutex_lock(&tenants->mutex);
    gw_limit_set(&tenant_by_id(tenants, who.tenant)->limit, &limits, base_now_ns());
    pthread_mutex_unlock(&tenants->mutex);
    return BASE_OK;
}

base_code gw_tenants_limit(gw_tenants *tenants, const char *name, const json_t *change,
                           base_err *err)
{
    pthread_mutex_lock(&tenants->change);
    base_code code = change_limits(tenants, name, change, err);
    pthread_mutex_unlock(&tenants->change);
    return code;
}

bool gw_tenants_enter(gw_tenants *tenants, int64_t id, const char **what, uint32_t *retry_ms,
                      gw_limit_view *view)
{
    uint64_t now = base_now_ns();
    pthread_mutex_lock(&tenants->mutex);
    tenant *t = tenant_by_id(tenants, id);
    bool in = !t || gw_limit_enter(&t->limit, what, retry_ms, now);
    *view = t ? gw_limit_look(&t->limit, now) : (gw_limit_view){0};
    pthread_mutex_unlock(&tenants->mutex);
    return in;
}

void gw_tenants_leave(gw_tenants *tenants, int64_t id, uint64_t tokens)
{
    uint64_t now = base_now_ns();
    pthread_mutex_lock(&tenants->mutex);
    tenant *t = tenant_by_id(tenants, id);
    if (t)
        gw_limit_leave(&t->limit, tokens, now);
    pthread_mutex_unlock(&tenants->mutex);
}

uint32_t gw_tenants_list(gw_tenants *tenants, gw_tenant_info **out)
{
    pthread_mutex_lock(&tenants->mutex);
    uint32_t count = tenants->tenant_count;
    gw_tenant_info *list = calloc(count ? count : 1, sizeof(*list));
    for (uint32_t i = 0; list && i < count; i++) {
        const tenant *t = &tenants->tenants[i];
        list[i] = (gw_tenant_info){
            .created_ms = t->created_ms, .running = t->limit.running, .limits = t->limit.max};
        identify(&list[i].identity, t, NULL);
        memcpy(list[i].group, t->group, sizeof(list[i].group));
        for (uint32_t k = 0; k < tenants->key_count; k++)
            list[i].keys += tenants->keys[k].info.tenant == t->id;
    }
    pthread_mutex_unlock(&tenants->mutex);
    *out = list;
    return list ? count : 0;
}

base_code gw_tenants_mint(gw_tenants *tenants, char text[GW_KEY_TEXT_MAX + 1], const char *name,
                          const char *group, const char *restore, const char *label,
                          uint32_t scopes, base_err *err)
{
    uint8_t random[24];
    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random))
        return base_fail(err, BASE_IO, "the system gives no random bytes");
    size_t at = (size_t)snprintf(text, GW_KEY_TEXT_MAX + 1, "wb_");
    for (size_t i = 0; i < sizeof(random); i++)
        at += (size_t)snprintf(text + at, GW_KEY_TEXT_MAX + 1 - at, "%02x", random[i]);
    return gw_tenants_add(tenants, text, name, group, restore, label, scopes, err);
}

/* True if `id` is the one key with scope admin, and others stay that nobody could manage then. */
static bool locks_out(gw_tenants *tenants, int64_t id)
{
    uint32_t admins = 0;
    bool one_of_them = false;
    pthread_mutex_lock(&tenants->mutex);
    for (uint32_t i = 0; i < tenants->key_count; i++) {
        const gw_key_info *info = &tenants->keys[i].info;
        if (!(info->scopes & GW_SCOPE_ADMIN))
            continue;
        admins++;
        one_of_them |= info->key == id;
    }
    bool others = tenants->key_count > 1;
    pthread_mutex_unlock(&tenants->mutex);
    return one_of_them && admins == 1 && others;
}

static base_code revoke(gw_tenants *tenants, int64_t id, bool force, base_err *err)
{
    if (!force && locks_out(tenants, id))
        return base_fail(err, BASE_CONFLICT,
                         "this is the last key with scope admin; without it the other keys could "
                         "not be managed any more: revoke them first, or send force=true");
    base_code code = gw_ledger_key_revoke(tenants->ledger, id, err);
    if (code)
        return code;
    pthread_mutex_lock(&tenants->mutex);
    for (uint32_t i = 0; i < tenants->key_count; i++) {
        if (tenants->keys[i].info.key != id)
            continue;
        tenants->keys[i] = tenants->keys[--tenants->key_count];
        break;
    }
    pthread_mutex_unlock(&tenants->mutex);
    return BASE_OK;
}

base_code gw_tenants_revoke(gw_tenants *tenants, int64_t id, bool force, base_err *err)
{
    pthread_mutex_lock(&tenants->change);
    base_code code = revoke(tenants, id, force, err);
    pthread_mutex_unlock(&tenants->change);
    return code;
}

uint32_t gw_tenants_keys(gw_tenants *tenants, gw_key_info *out, uint32_t max)
{
    pthread_mutex_lock(&tenants->mutex);
    uint32_t count = tenants->key_count;
    for (uint32_t i = 0; i < count && i < max; i++) {
        out[i] = tenants->keys[i].info;
        const tenant *owner = tenant_by_id(tenants, out[i].tenant);
        snprintf(out[i].group, sizeof(out[i].group), "%s", owner ? owner->group : "");
    }
    pthread_mutex_unlock(&tenants->mutex);
    return count;
}

base_code gw_scopes_parse(uint32_t *out, const char *text, base_err *err)
{
    static const struct {
        const char *name;
        uint32_t bit;
    } words[] = {{"inference", GW_SCOPE_INFER},
                 {"raw", GW_SCOPE_RAW},
                 {"admin", GW_SCOPE_ADMIN},
                 {"all", GW_SCOPE_ALL}};
    uint32_t bits = 0;
    while (*text) {
        size_t length = strcspn(text, ",");
        uint32_t bit = 0;
        for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
            if (length == strlen(words[i].name) && strncmp(text, words[i].name, length) == 0)
                bit = words[i].bit;
        if (!bit)
            return base_fail_param(err, BASE_INVALID, "scopes",
                                   "'%.*s' is no scope; there are inference, raw, admin, all",
                                   (int)base_min(length, 32), text);
        bits |= bit;
        text += length;
        text += *text == ',';
    }
    if (!bits)
        return base_fail_param(err, BASE_INVALID, "scopes",
                               "scopes must name at least one of inference, raw, admin");
    *out = bits;
    return BASE_OK;
}
