#include "engine/base/log.h"

#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"

/* At most PIPE_BUF, so that a pipe with any room (poll tells of whole pages) takes a line at once.
 */
#define LINE_MAX_BYTES 1024
#define LAST_WORDS_MS 1000

static const char *const names[] = {"debug", "info", "warn", "error"};
static _Atomic int level_min = BASE_LOG_INFO;
static _Atomic uint64_t dropped;

/* Between the look for room and the write that needs it nobody else may write. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t dropped_untold; /* since the last line that got through */
static bool torn;               /* the last write took a part of its line (a disk that is full) */

static void hold(void)
{
    pthread_mutex_lock(&lock);
}

static void let_go(void)
{
    pthread_mutex_unlock(&lock);
}

/* A child must not find the lock held by a thread that it does not have. */
static void guard_forks(void)
{
    pthread_atfork(hold, let_go, let_go);
}

void base_log_set_level(base_log_level level)
{
    atomic_store(&level_min, (int)level);
}

base_log_level base_log_get_level(void)
{
    return (base_log_level)atomic_load(&level_min);
}

const char *base_log_level_name(base_log_level level)
{
    return names[level];
}

uint64_t base_log_dropped(void)
{
    return atomic_load(&dropped);
}

static bool has_room(int wait_ms)
{
    struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
    return poll(&out, 1, wait_ms) > 0 && (out.revents & POLLOUT) != 0;
}

/* One line into `line`; its length. */
static size_t format(char line[LINE_MAX_BYTES], base_log_level level, const char *fmt, va_list args)
{
    int64_t now = base_wall_ms();
    time_t seconds = (time_t)(now / 1000);
    struct tm tm;
    gmtime_r(&seconds, &tm);
    size_t n = strftime(line, LINE_MAX_BYTES, "ts=%Y-%m-%dT%H:%M:%S", &tm);
    n += (size_t)snprintf(line + n, LINE_MAX_BYTES - n, ".%03dZ level=%s ", (int)(now % 1000),
                          names[level]);
    int more = vsnprintf(line + n, LINE_MAX_BYTES - n - 1, fmt, args);
    if (more > 0)
        n += (size_t)more < LINE_MAX_BYTES - n - 1 ? (size_t)more : LINE_MAX_BYTES - n - 2;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)line[i] < 0x20)
            line[i] = ' ';
    line[n++] = '\n';
    return n;
}

/* With the lock held. False: nothing, or not all, was written. */
static bool put(const char *line, size_t length)
{
    if (!has_room(0))
        return false;
    if (torn && write(STDERR_FILENO, "\n", 1) != 1)
        return false;
    ssize_t written = write(STDERR_FILENO, line, length);
    torn = written > 0 && (size_t)written < length;
    return written == (ssize_t)length;
}

static bool put_formatted(base_log_level level, const char *fmt, ...)
{
    char line[LINE_MAX_BYTES];
    va_list args;
    va_start(args, fmt);
    size_t length = format(line, level, fmt, args);
    va_end(args);
    return put(line, length);
}

void base_log(base_log_level level, const char *fmt, ...)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    char line[LINE_MAX_BYTES];
    if ((int)level < atomic_load_explicit(&level_min, memory_order_relaxed))
        return;
    pthread_once(&once, guard_forks);
    va_list args;
    va_start(args, fmt);
    size_t length = format(line, level, fmt, args);
    va_end(args);
    hold();
    if (dropped_untold > 0 &&
        put_formatted(BASE_LOG_WARN, "log_dropped lines=%llu", (unsigned long long)dropped_untold))
        dropped_untold = 0;
    if (dropped_untold > 0 || !put(line, length)) {
        dropped_untold++;
        atomic_fetch_add(&dropped, 1);
    }
    let_go();
}

void base_log_last_words(const char *line)
{
    if (has_room(LAST_WORDS_MS) && write(STDERR_FILENO, line, strlen(line)) < 0)
        return; /* nowhere left to report it */
}
