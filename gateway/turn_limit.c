/* A tenant's limits and the engine's admission, as a turn meets them and as its client is told of
 * them; and how long the client says that it will wait.
 *
 * x-ratelimit-{limit,remaining,reset}-{requests,tokens}, a reset as a Go duration, until the whole
 * of it is there again: https://developers.openai.com/api/docs/guides/rate-limits. On the Messages
 * API anthropic-ratelimit-{requests,tokens}-{limit,remaining,reset}, a reset as RFC 3339:
 * https://docs.anthropic.com/en/api/rate-limits. A rate without a bound has no headers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/clock.h"
#include "engine/base/num.h"
#include "gateway/conf.h"
#include "gateway/metrics.h"
#include "gateway/turn_internal.h"

#define RETRY_MS_LEAST 100
#define RETRY_MS_MAX 59999
#define TIMEOUT_MS_MAX 86400000ull
#define SDK_SECONDS_MAX 86400.0

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

/* The wait that a client is told to keep to. SDKs do not wait at all if it is a minute or more, and
 * have few tries: one that comes a moment before its turn should not spend them in milliseconds. */
static uint32_t retry_ms_of(const eng_verdict *verdict)
{
    uint64_t ms = (verdict->retry_ns + 999999) / 1000000;
    return ms ? (uint32_t)base_min(base_max(ms, RETRY_MS_LEAST), RETRY_MS_MAX) : 0;
}

void gw_turn__refused(gw_turn *turn, const eng_verdict *verdict)
{
    uint32_t retry_ms = retry_ms_of(verdict);
    switch (verdict->refusal) {
    case ENG_ADMITTED:
    case ENG_REFUSALS:
        return;
    case ENG_REFUSED_COUNT:
    case ENG_REFUSED_TIME:
        turn->error_row = (gw_error_row){503, "server_error", "overloaded", retry_ms, 1};
        return;
    case ENG_REFUSED_TENANT:
        turn->error_row = (gw_error_row){429, "rate_limit_error", "queue_share_full", retry_ms, 1};
        return;
    case ENG_REFUSED_DEADLINE:
        turn->error_row =
            (gw_error_row){408, "timeout", "deadline_unreachable", retry_ms, retry_ms > 0};
        return;
    }
}

/* Seconds of an SDK's header, 0 if there is none to be read. */
static double seconds_of(const char *text)
{
    char *end;
    double seconds = text ? strtod(text, &end) : 0;
    return text && end != text && *end == '\0' && seconds > 0 && seconds <= SDK_SECONDS_MAX
               ? seconds
               : 0;
}

bool gw_turn__read_timeouts(gw_turn *turn)
{
    const char *own = gw_exchange_header(turn->exchange, "x-request-timeout-ms");
    double seconds = seconds_of(gw_exchange_header(turn->exchange, "x-stainless-timeout"));
    if (seconds <= 0) /* for httpx, the longest pause between bytes: a whole answer is one */
        seconds = seconds_of(gw_exchange_header(turn->exchange, "x-stainless-read-timeout"));
    turn->sdk_timeout_ns = (uint64_t)(seconds * 1e9);
    if (!own)
        return true;
    char *end;
    unsigned long long ms = strtoull(own, &end, 10);
    if (own[0] < '0' || own[0] > '9' || *end || ms < 1 || ms > TIMEOUT_MS_MAX) {
        base_fail_param(&turn->error, BASE_INVALID, "x-request-timeout-ms",
                        "x-request-timeout-ms must be 1 to %llu", TIMEOUT_MS_MAX);
        return false;
    }
    turn->timeout_ns = ms * 1000000;
    return true;
}

void gw_turn__set_deadline(const gw_turn *first, eng_request *request)
{
    uint64_t own = (uint64_t)first->app->conf->limits_request_timeout_ms * 1000000;
    uint64_t client = first->background ? 0 : first->timeout_ns;
    /* A stream begins at once, and is never silent for long. */
    if (!client && !first->stream && !first->background)
        client = first->sdk_timeout_ns;
    request->deadline_binds = client && (!own || client < own);
    if (request->deadline_binds || own)
        request->deadline_ns = first->received_ns + (request->deadline_binds ? client : own);
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
    turn->request.weight = view.weight;
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
