/* A tenant's limits, as a turn meets them and as its client is told of them.
 *
 * x-ratelimit-{limit,remaining,reset}-{requests,tokens}, a reset as a Go duration, until the whole
 * of it is there again: https://developers.openai.com/api/docs/guides/rate-limits. On the Messages
 * API anthropic-ratelimit-{requests,tokens}-{limit,remaining,reset}, a reset as RFC 3339:
 * https://docs.anthropic.com/en/api/rate-limits. A rate without a bound has no headers. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "engine/base/clock.h"
#include "gateway/metrics.h"
#include "gateway/turn.h"

static void put(gw_exchange *exchange, const char *name, int64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    gw_exchange_add_header(exchange, name, text);
}

static void tell_openai(gw_exchange *exchange, const char *what, const gw_limit_rate *rate)
{
    char name[48], text[48];
    snprintf(name, sizeof name, "x-ratelimit-limit-%s", what);
    put(exchange, name, rate->limit);
    snprintf(name, sizeof name, "x-ratelimit-remaining-%s", what);
    put(exchange, name, rate->left);
    snprintf(name, sizeof name, "x-ratelimit-reset-%s", what);
    snprintf(text, sizeof text, "%llu.%03llus", (unsigned long long)rate->full_ms / 1000,
             (unsigned long long)rate->full_ms % 1000);
    gw_exchange_add_header(exchange, name, text);
}

static void tell_anthropic(gw_exchange *exchange, const char *what, const gw_limit_rate *rate)
{
    char name[48], text[32];
    struct tm tm;
    time_t at = (time_t)((base_wall_ms() + (int64_t)rate->full_ms + 999) / 1000);
    snprintf(name, sizeof name, "anthropic-ratelimit-%s-limit", what);
    put(exchange, name, rate->limit);
    snprintf(name, sizeof name, "anthropic-ratelimit-%s-remaining", what);
    put(exchange, name, rate->left);
    snprintf(name, sizeof name, "anthropic-ratelimit-%s-reset", what);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&at, &tm));
    gw_exchange_add_header(exchange, name, text);
}

bool gw_turn_enter(gw_turn *turn)
{
    const char *what;
    uint32_t retry_ms;
    gw_limit_view view;
    if (turn->dialect->dry)
        return true;
    turn->entered =
        gw_tenants_enter(turn->app->tenants, turn->identity.tenant, &what, &retry_ms, &view);
    void (*tell)(gw_exchange *, const char *, const gw_limit_rate *) =
        turn->dialect->anthropic ? tell_anthropic : tell_openai;
    if (view.requests.limit)
        tell(turn->exchange, "requests", &view.requests);
    if (view.tokens.limit)
        tell(turn->exchange, "tokens", &view.tokens);
    if (turn->entered)
        return true;
    turn->error_row = (gw_error_row){429, "rate_limit_error", "rate_limit_exceeded", retry_ms, 1};
    /* Codex takes the wait from the words. */
    base_fail(&turn->error, BASE_FULL,
              "the limit %s of tenant %s is reached: try again in %u.%03us", what,
              turn->identity.name, retry_ms / 1000, retry_ms % 1000);
    gw_metrics_add(turn->app->metrics, GW_LIMITED, 1);
    return false;
}
