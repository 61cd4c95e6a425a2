#include "engine/base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"

#define LINE_MAX_BYTES 1024

static _Atomic int level_min = BASE_LOG_INFO;

void base_log_set_level(base_log_level level)
{
    atomic_store(&level_min, (int)level);
}

base_log_level base_log_get_level(void)
{
    return (base_log_level)atomic_load(&level_min);
}

void base_log(base_log_level level, const char *fmt, ...)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    if ((int)level < atomic_load_explicit(&level_min, memory_order_relaxed))
        return;
    char line[LINE_MAX_BYTES];
    int64_t now = base_wall_ms();
    time_t seconds = (time_t)(now / 1000);
    struct tm tm;
    gmtime_r(&seconds, &tm);
    size_t n = strftime(line, sizeof line, "ts=%Y-%m-%dT%H:%M:%S", &tm);
    n += (size_t)snprintf(line + n, sizeof line - n, ".%03dZ level=%s ", (int)(now % 1000),
                          names[level]);
    va_list args;
    va_start(args, fmt);
    int more = vsnprintf(line + n, sizeof line - n - 1, fmt, args);
    va_end(args);
    if (more > 0)
        n += (size_t)more < sizeof line - n - 1 ? (size_t)more : sizeof line - n - 2;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)line[i] < 0x20)
            line[i] = ' ';
    line[n++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, n);
    (void)written; /* nowhere left to report it */
}
