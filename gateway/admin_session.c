#include "gateway/admin_session.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#include "engine/base/clock.h"
#include "gateway/admin_call.h"
#include "gateway/body.h"

#define TOKEN_BYTES 32
#define TOKEN_TEXT (2 * TOKEN_BYTES)

typedef struct cookie {
    uint8_t hash[32];
    int64_t key;     /* row id; 0: the place is free */
    int64_t ends_ms; /* Unix time */
} cookie;

struct gw_cookies {
    pthread_mutex_t mutex; /* guards what follows */
    cookie list[GW_COOKIES_MAX];
};

base_code gw_cookies_create(gw_cookies **out, base_err *err)
{
    gw_cookies *cookies = calloc(1, sizeof *cookies);
    if (!cookies)
        return base_fail(err, BASE_NOMEM, "no memory for the browsers' sessions");
    pthread_mutex_init(&cookies->mutex, NULL);
    *out = cookies;
    return BASE_OK;
}

void gw_cookies_destroy(gw_cookies *cookies)
{
    if (!cookies)
        return;
    pthread_mutex_destroy(&cookies->mutex);
    free(cookies);
}

/* ---- the table ---- */

static bool hash_of(uint8_t out[32], const char *token)
{
    if (!token)
        return false;
    SHA256((const unsigned char *)token, TOKEN_TEXT, out);
    return true;
}

/* The key that a token stands for, and the token's end; 0: for none. All are compared, each in
 * constant time. */
static int64_t key_of(gw_cookies *cookies, const char *token, int64_t *ends_ms)
{
    uint8_t hash[32];
    int64_t key = 0, now = base_wall_ms();
    if (!hash_of(hash, token))
        return 0;
    pthread_mutex_lock(&cookies->mutex);
    for (size_t i = 0; i < GW_COOKIES_MAX; i++) {
        const cookie *c = &cookies->list[i];
        if (CRYPTO_memcmp(c->hash, hash, sizeof hash) != 0 || c->ends_ms <= now)
            continue;
        key = c->key;
        *ends_ms = c->ends_ms;
    }
    pthread_mutex_unlock(&cookies->mutex);
    return key;
}

/* Takes a free place, or that of what ends first. */
static void add(gw_cookies *cookies, const char *token, int64_t key, int64_t ends_ms)
{
    cookie fresh = {.key = key, .ends_ms = ends_ms};
    hash_of(fresh.hash, token);
    pthread_mutex_lock(&cookies->mutex);
    cookie *place = &cookies->list[0];
    for (size_t i = 1; i < GW_COOKIES_MAX; i++)
        if (cookies->list[i].ends_ms < place->ends_ms)
            place = &cookies->list[i];
    *place = fresh;
    pthread_mutex_unlock(&cookies->mutex);
}

static void drop(gw_cookies *cookies, const char *token)
{
    uint8_t hash[32];
    if (!hash_of(hash, token))
        return;
    pthread_mutex_lock(&cookies->mutex);
    for (size_t i = 0; i < GW_COOKIES_MAX; i++)
        if (CRYPTO_memcmp(cookies->list[i].hash, hash, sizeof hash) == 0)
            cookies->list[i] = (cookie){0};
    pthread_mutex_unlock(&cookies->mutex);
}

/* ---- exchanges ---- */

/* The token of the request's cookie, at least TOKEN_TEXT bytes; NULL if there is none. */
static const char *token_of(gw_exchange *exchange)
{
    static const char name[] = GW_COOKIE_NAME "=";
    const char *at = gw_exchange_header(exchange, "cookie");
    while (at && *at) {
        at += strspn(at, " ;,"); /* fields that were sent twice come with a comma */
        if (strncmp(at, name, sizeof name - 1) == 0)
            return strcspn(at + sizeof name - 1, "; ,") == TOKEN_TEXT ? at + sizeof name - 1 : NULL;
        at += strcspn(at, ";,");
    }
    return NULL;
}

bool gw_same_origin(const char *origin, const char *authority)
{
    const char *slashes = strstr(origin, "://");
    return slashes != NULL && authority[0] != '\0' && strcasecmp(slashes + 3, authority) == 0;
}

/* A browser says where a request comes from; what says nothing is no page of ours. */
static bool from_here(gw_exchange *exchange)
{
    const char *site = gw_exchange_header(exchange, "sec-fetch-site");
    const char *origin = gw_exchange_header(exchange, "origin");
    if (site && strcmp(site, "same-origin") != 0)
        return false;
    if (origin && !gw_same_origin(origin, gw_exchange_authority(exchange)))
        return false;
    return site || origin;
}

static bool changes(const gw_exchange *exchange)
{
    const char *method = gw_exchange_method(exchange);
    return strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0;
}

static bool sends_key(gw_exchange *exchange)
{
    return gw_exchange_header(exchange, "authorization") ||
           gw_exchange_header(exchange, "x-api-key");
}

/* `*ends_ms` 0: it was no cookie. */
static gw_auth check(gw_app *app, gw_exchange *exchange, gw_identity *out, int64_t *ends_ms)
{
    *ends_ms = 0;
    if (app->cookies && !sends_key(exchange)) {
        int64_t key = key_of(app->cookies, token_of(exchange), ends_ms);
        gw_auth auth =
            key ? gw_tenants_of_key(app->tenants, out, key, GW_SCOPE_ADMIN) : GW_AUTH_MISSING;
        if (auth == GW_AUTH_OK)
            return changes(exchange) && !from_here(exchange) ? GW_AUTH_FOREIGN : GW_AUTH_OK;
        *ends_ms = 0;
    }
    return gw_tenants_check(app->tenants, out, exchange, GW_SCOPE_ADMIN);
}

gw_auth gw_admin_check(gw_app *app, gw_exchange *exchange, gw_identity *out)
{
    int64_t ends_ms;
    return check(app, exchange, out, &ends_ms);
}

static void put_who(base_buf *out, const char *via, const gw_identity *who, int64_t ends_ms)
{
    base_buf_printf(out, "{\"object\":\"admin.session\",\"via\":\"%s\"", via);
    gw_put_member(out, "tenant", who->name);
    if (ends_ms)
        base_buf_printf(out, ",\"expires_at\":%lld}", (long long)(ends_ms / 1000));
    else
        base_buf_puts(out, ",\"expires_at\":null}");
}

static void respond_who(gw_exchange *exchange, const char *via, const gw_identity *who,
                        int64_t ends_ms)
{
    base_buf out;
    base_buf_init(&out, 0);
    put_who(&out, via, who, ends_ms);
    gw_admin_respond(exchange, &out);
    base_buf_deinit(&out);
}

/* An empty token ends it. TLS is a proxy's, in front of this listener. */
static void set_cookie(gw_exchange *exchange, const char *token)
{
    char text[256];
    const char *proto = gw_exchange_header(exchange, "x-forwarded-proto");
    snprintf(text, sizeof text,
             GW_COOKIE_NAME "=%s; Path=/; Max-Age=%d; HttpOnly; SameSite=Strict%s", token,
             token[0] ? GW_COOKIE_SECONDS : 0,
             proto && strcasecmp(proto, "https") == 0 ? "; Secure" : "");
    gw_exchange_add_header(exchange, "set-cookie", text);
    explicit_bzero(text, sizeof text);
}

static base_code read_key(char out[GW_KEY_TEXT_MAX + 1], gw_exchange *exchange, base_err *err)
{
    size_t length;
    const char *text = gw_exchange_body(exchange, &length), *key = NULL;
    json_t *body = json_loadb(text, length, JSON_REJECT_DUPLICATES, NULL);
    base_code code = json_is_object(body)
                         ? gw_read_name(&key, body, "", "key", GW_KEY_TEXT_MAX, err)
                         : base_fail(err, BASE_INVALID, "the body must be a JSON object");
    if (!code && (!key || !key[0]))
        code = base_fail_param(err, BASE_INVALID, "key", "key must be a key with scope admin");
    if (!code)
        snprintf(out, GW_KEY_TEXT_MAX + 1, "%s", key);
    json_decref(body);
    return code;
}

static void login(gw_app *app, gw_exchange *exchange, const gw_identity *who)
{
    uint8_t random[TOKEN_BYTES];
    char token[TOKEN_TEXT + 1];
    base_err err = BASE_ERR_INIT;
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) {
        base_fail(&err, BASE_IO, "the system gives no random bytes");
        gw_error_respond_err(exchange, &err);
        return;
    }
    for (size_t i = 0; i < TOKEN_BYTES; i++)
        snprintf(token + 2 * i, 3, "%02x", random[i]);
    int64_t ends_ms = base_wall_ms() + (int64_t)GW_COOKIE_SECONDS * 1000;
    add(app->cookies, token, who->key, ends_ms);
    set_cookie(exchange, token);
    explicit_bzero(token, sizeof token);
    respond_who(exchange, "cookie", who, ends_ms);
}

void gw_admin_login(gw_app *app, gw_exchange *exchange)
{
    size_t length;
    char key[GW_KEY_TEXT_MAX + 1];
    gw_identity who;
    base_err err = BASE_ERR_INIT;
    gw_exchange_body(exchange, &length);
    if (length > GW_ADMIN_BODY_MAX) {
        gw_error_too_large(exchange, GW_ADMIN_BODY_MAX);
        return;
    }
    if (read_key(key, exchange, &err)) {
        gw_error_respond_err(exchange, &err);
        return;
    }
    gw_auth auth = gw_tenants_authenticate(app->tenants, &who, NULL, key,
                                           gw_exchange_remote(exchange), GW_SCOPE_ADMIN);
    explicit_bzero(key, sizeof key);
    if (gw_tenants_refuse(exchange, auth))
        return;
    if (who.key)
        login(app, exchange, &who);
    else
        respond_who(exchange, "open", &who, 0);
}

void gw_admin_whoami(gw_app *app, gw_exchange *exchange)
{
    gw_identity who;
    int64_t ends_ms;
    if (gw_tenants_refuse(exchange, check(app, exchange, &who, &ends_ms)))
        return;
    respond_who(exchange, ends_ms ? "cookie" : who.key ? "key" : "open", &who, ends_ms);
}

void gw_admin_logout(gw_app *app, gw_exchange *exchange)
{
    static const char text[] = "{\"object\":\"admin.session.deleted\",\"deleted\":true}";
    gw_identity who;
    base_buf out;
    if (!gw_admin_admit(app, exchange, &who))
        return;
    drop(app->cookies, token_of(exchange));
    set_cookie(exchange, "");
    base_buf_init(&out, 0);
    base_buf_add(&out, text, sizeof text - 1);
    gw_admin_respond(exchange, &out);
    base_buf_deinit(&out);
}
