#include "gateway/limit.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#define MINUTE_NS 60e9
#define RETRY_MS 1000      /* where nobody can say when a request will be over */
#define RETRY_MS_MAX 59999 /* clients that are told more do not wait at all */
#define BOUND_MAX 1000000000000
#define WEIGHT_MAX 1000 /* the engine's */

static const struct {
    const char *name;
    size_t offset;
    int64_t max;
} members[] = {
    {"requests_max", offsetof(gw_limits, requests_max), BOUND_MAX},
    {"requests_per_minute", offsetof(gw_limits, requests_per_minute), BOUND_MAX},
    {"tokens_per_minute", offsetof(gw_limits, tokens_per_minute), BOUND_MAX},
    {"weight", offsetof(gw_limits, weight), WEIGHT_MAX},
};
#define MEMBERS (sizeof members / sizeof *members)

static int64_t *member(gw_limits *limits, size_t index)
{
    return (int64_t *)((char *)limits + members[index].offset);
}

void gw_limit_set(gw_limit *limit, const gw_limits *max, uint64_t now_ns)
{
    limit->max = *max;
    limit->requests = (double)max->requests_per_minute;
    limit->tokens = (double)max->tokens_per_minute;
    limit->at_ns = now_ns;
}

static void fill(gw_limit *limit, uint64_t now_ns)
{
    double minutes = now_ns > limit->at_ns ? (double)(now_ns - limit->at_ns) / MINUTE_NS : 0;
    double requests = (double)limit->max.requests_per_minute;
    double tokens = (double)limit->max.tokens_per_minute;
    limit->requests = fmin(limit->requests + minutes * requests, requests);
    limit->tokens = fmin(limit->tokens + minutes * tokens, tokens);
    limit->at_ns = now_ns;
}

/* Milliseconds until `missing` more are there. */
static uint32_t wait_ms(double missing, int64_t per_minute)
{
    double ms = missing * 60000 / (double)per_minute + 1;
    return ms < RETRY_MS_MAX ? (uint32_t)ms : RETRY_MS_MAX;
}

bool gw_limit_enter(gw_limit *limit, const char **what, uint32_t *retry_ms, uint64_t now_ns)
{
    const gw_limits *max = &limit->max;
    fill(limit, now_ns);
    if (max->requests_max && limit->running >= max->requests_max) {
        *what = members[0].name;
        *retry_ms = RETRY_MS;
    } else if (max->requests_per_minute && limit->requests < 1) {
        *what = members[1].name;
        *retry_ms = wait_ms(1 - limit->requests, max->requests_per_minute);
    } else if (max->tokens_per_minute && limit->tokens <= 0) {
        *what = members[2].name;
        *retry_ms = wait_ms(-limit->tokens, max->tokens_per_minute);
    } else {
        limit->running++;
        limit->requests -= max->requests_per_minute ? 1 : 0;
        return true;
    }
    return false;
}

void gw_limit_leave(gw_limit *limit, uint64_t tokens, uint64_t now_ns)
{
    fill(limit, now_ns);
    limit->running -= limit->running > 0;
    limit->tokens -= limit->max.tokens_per_minute ? (double)tokens : 0;
}

static gw_limit_rate rate_of(double level, int64_t per_minute)
{
    if (!per_minute)
        return (gw_limit_rate){0};
    return (gw_limit_rate){
        .limit = per_minute,
        .left = level > 0 ? (int64_t)level : 0,
        .full_ms = (uint64_t)ceil(((double)per_minute - level) * 60000 / (double)per_minute)};
}

gw_limit_view gw_limit_look(gw_limit *limit, uint64_t now_ns)
{
    fill(limit, now_ns);
    return (gw_limit_view){
        .weight = limit->max.weight > 0 ? (uint32_t)limit->max.weight : 1,
        .requests = rate_of(limit->requests, limit->max.requests_per_minute),
        .tokens = rate_of(limit->tokens, limit->max.tokens_per_minute),
    };
}

base_code gw_limits_read(gw_limits *limits, const json_t *object, base_err *err)
{
    const char *name;
    json_t *value;
    if (!json_is_object(object))
        return base_fail_param(err, BASE_INVALID, "limits", "limits must be an object");
    json_object_foreach((json_t *)object, name, value)
    {
        size_t i = 0;
        while (i < MEMBERS && strcmp(members[i].name, name) != 0)
            i++;
        if (i == MEMBERS)
            return base_fail_param(err, BASE_INVALID, "limits", "limits has no member \"%.40s\"",
                                   name);
        json_int_t n = json_is_null(value) ? 0 : json_integer_value(value);
        if (!json_is_null(value) && (!json_is_integer(value) || n < 1 || n > members[i].max))
            return base_fail_param(err, BASE_INVALID, members[i].name,
                                   "%s must be null or 1 to %lld", members[i].name,
                                   (long long)members[i].max);
        *member(limits, i) = n;
    }
    return BASE_OK;
}

void gw_limits_put(base_buf *out, const gw_limits *limits)
{
    for (size_t i = 0; i < MEMBERS; i++) {
        int64_t n = *member((gw_limits *)limits, i);
        base_buf_printf(out, "%s\"%s\":", i ? "," : "{", members[i].name);
        if (n)
            base_buf_printf(out, "%lld", (long long)n);
        else
            base_buf_puts(out, "null");
    }
    base_buf_puts(out, "}");
}
