/* gw_cookies: a browser's session with the admin listener.
 *
 * POST /admin/v1/session with a key of scope admin sets a cookie of 256 random bits: HttpOnly,
 * SameSite=Strict, Path=/, Secure over TLS. What is kept is its hash, the key's row and its end; no
 * cookie outlives its key, GW_COOKIE_SECONDS or the process. A call with the cookie that changes
 * something must come from a page of this origin. At most GW_COOKIES_MAX; the oldest makes room.
 * Thread: the exchange's loop; one mutex. */
#pragma once
#include "gateway/app.h"
#include "gateway/tenant.h"

#define GW_COOKIES_MAX 256
#define GW_COOKIE_SECONDS (12 * 3600)
#define GW_COOKIE_NAME "whimbrel_admin"

base_code gw_cookies_create(gw_cookies **out, base_err *err);
void gw_cookies_destroy(gw_cookies *cookies); /* NULL is fine */

/* An Origin header names this authority. */
bool gw_same_origin(const char *origin, const char *authority);
/* Scope admin by a key, a cookie, or, without keys, from loopback. */
gw_auth gw_admin_check(gw_app *app, gw_exchange *exchange, gw_identity *out);

void gw_admin_login(gw_app *app, gw_exchange *exchange);
void gw_admin_whoami(gw_app *app, gw_exchange *exchange);
void gw_admin_logout(gw_app *app, gw_exchange *exchange);
