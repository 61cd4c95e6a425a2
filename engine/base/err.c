#include "engine/base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "engine/base/utf8.h"

/* A text may quote what a client sent and travels in JSON: it is not cut inside a character. */
static void cut(char *text)
{
    text[base_utf8_complete(text, strlen(text))] = '\0';
}

static void set(base_err *err, base_code code, const char *param, const char *fmt, va_list args)
{
    if (err == NULL || err->code != BASE_OK)
        return;
    err->code = code;
    vsnprintf(err->text, sizeof err->text, fmt, args);
    snprintf(err->param, sizeof err->param, "%s", param);
    cut(err->text);
    cut(err->param);
}

base_code base_fail(base_err *err, base_code code, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    set(err, code, "", fmt, args);
    va_end(args);
    return code;
}

base_code base_fail_param(base_err *err, base_code code, const char *param, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    set(err, code, param, fmt, args);
    va_end(args);
    return code;
}

void base_wrap(base_err *err, const char *fmt, ...)
{
    if (err == NULL || err->code == BASE_OK)
        return;
    char context[sizeof err->text], joined[2 * sizeof err->text + 2];
    va_list args;
    va_start(args, fmt);
    vsnprintf(context, sizeof context, fmt, args);
    va_end(args);
    snprintf(joined, sizeof joined, "%s: %s", context, err->text);
    joined[sizeof err->text - 1] = '\0';
    memcpy(err->text, joined, sizeof err->text);
    cut(err->text);
}

const char *base_code_name(base_code code)
{
    static const char *const names[] = {
        [BASE_OK] = "ok",
        [BASE_INVALID] = "invalid",
        [BASE_TOO_LONG] = "long",
        [BASE_NOMEM] = "nomem",
        [BASE_FULL] = "full",
        [BASE_IO] = "io",
        [BASE_FORMAT] = "format",
        [BASE_UNSUPPORTED] = "unsupported",
        [BASE_NOT_FOUND] = "missing",
        [BASE_CONFLICT] = "conflict",
        [BASE_DENIED] = "denied",
        [BASE_CANCELLED] = "cancelled",
        [BASE_TIMEOUT] = "timeout",
        [BASE_DEVICE] = "device",
        [BASE_CLOSED] = "closed",
    };
    return (size_t)code < sizeof names / sizeof *names ? names[code] : "unknown";
}

_Noreturn void base_panic(const char *file, int line, const char *what)
{
    char text[512];
    snprintf(text, sizeof text, "panic %.160s:%d: %.300s\n", file, line, what);
    base_log_last_words(text);
    abort();
}
