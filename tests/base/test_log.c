#include <criterion/criterion.h>

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"
#include "engine/base/log.h"

/* What one call writes to stderr. */
static size_t capture(char *out, size_t size, base_log_level level, const char *text)
{
    int ends[2], saved = dup(STDERR_FILENO);
    cr_assert_eq(pipe(ends), 0);
    dup2(ends[1], STDERR_FILENO);
    base_log(level, "%s", text);
    dup2(saved, STDERR_FILENO);
    close(ends[1]);
    ssize_t n = read(ends[0], out, size - 1);
    close(ends[0]);
    close(saved);
    cr_assert_geq(n, 0);
    out[n] = '\0';
    return (size_t)n;
}

Test(base_log, a_line_has_time_level_and_event)
{
    char line[4096];
    size_t n = capture(line, sizeof line, BASE_LOG_WARN, "pool_full free=0");
    cr_assert_eq(line[n - 1], '\n');
    cr_assert_eq(strncmp(line, "ts=20", 5), 0);
    cr_assert_not_null(strstr(line, "Z level=warn pool_full free=0\n"));
}

Test(base_log, levels_below_the_set_one_are_silent)
{
    char line[4096];
    cr_assert_eq(capture(line, sizeof line, BASE_LOG_DEBUG, "x"), 0);
    base_log_set_level(BASE_LOG_DEBUG);
    cr_assert_eq(base_log_get_level(), BASE_LOG_DEBUG);
    cr_assert_gt(capture(line, sizeof line, BASE_LOG_DEBUG, "x"), 0);
}

Test(base_log, long_texts_are_cut_and_controls_cannot_forge_a_line)
{
    char line[4096], text[3000];
    memset(text, 'a', sizeof text);
    text[sizeof text - 1] = '\0';
    text[10] = '\n';
    text[20] = '\x1b';
    size_t n = capture(line, sizeof line, BASE_LOG_ERROR, text);
    cr_assert_leq(n, 1024);
    cr_assert_geq(n, 1000);
    cr_assert_eq(strchr(line, '\n'), line + n - 1);
    cr_assert_null(strchr(line, '\x1b'));
}

/* ---- who reads slowly, or not at all ---- */

/* Makes `write_end` stderr and fills it to the last byte. */
static void fill(int write_end)
{
    char block[4096];
    memset(block, '.', sizeof block);
    dup2(write_end, STDERR_FILENO);
    fcntl(STDERR_FILENO, F_SETFL, O_NONBLOCK);
    for (size_t size = sizeof block; size > 0; size /= 2)
        while (write(STDERR_FILENO, block, size) > 0)
            ;
    fcntl(STDERR_FILENO, F_SETFL, 0);
}

/* What is there now; the dots of fill are left out. */
static void drain(base_buf *out, int read_end)
{
    char bytes[4096];
    ssize_t n;
    fcntl(read_end, F_SETFL, O_NONBLOCK);
    while ((n = read(read_end, bytes, sizeof bytes)) > 0)
        for (ssize_t i = 0; i < n; i++)
            if (out->length > 0 || bytes[i] != '.')
                base_buf_add(out, &bytes[i], 1);
}

static void expect_drops(int read_end, int write_end)
{
    int saved = dup(STDERR_FILENO);
    base_buf text;
    base_buf_init(&text, 0);
    fill(write_end);
    for (int i = 0; i < 300; i++)
        base_log(BASE_LOG_INFO, "lost n=%d", i); /* must not wait: the test would time out */
    uint64_t lost = base_log_dropped();
    drain(&text, read_end);
    base_log(BASE_LOG_INFO, "kept n=1");
    base_log(BASE_LOG_INFO, "kept n=2");
    drain(&text, read_end);
    dup2(saved, STDERR_FILENO);
    close(saved);
    cr_assert_eq(lost, 300);
    cr_assert_eq(base_log_dropped(), 300);
    const char *told = strstr(text.data, "level=warn log_dropped lines=300\n");
    cr_assert_eq(strncmp(text.data, "ts=", 3), 0, "%s", text.data);
    cr_assert_not_null(told, "%s", text.data);
    cr_assert_null(strstr(text.data, "lost"));
    const char *first = strstr(told, "level=info kept n=1\n");
    cr_assert_not_null(first);
    cr_assert_not_null(strstr(first, "level=info kept n=2\n"));
    cr_assert_null(strstr(strchr(told, '\n'), "log_dropped"), "told once");
    base_buf_deinit(&text);
    close(read_end);
    close(write_end);
}

Test(base_log, a_full_pipe_costs_lines_and_no_time, .timeout = 20)
{
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    expect_drops(ends[0], ends[1]);
}

Test(base_log, a_full_socket_too, .timeout = 20)
{
    int ends[2];
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    expect_drops(ends[0], ends[1]);
}

Test(base_log, a_pipe_without_a_reader_costs_lines_only, .timeout = 20)
{
    int ends[2], saved = dup(STDERR_FILENO);
    signal(SIGPIPE, SIG_IGN);
    cr_assert_eq(pipe(ends), 0);
    close(ends[0]);
    dup2(ends[1], STDERR_FILENO);
    base_log(BASE_LOG_INFO, "x");
    dup2(saved, STDERR_FILENO);
    cr_assert_eq(base_log_dropped(), 1);
}

/* ---- many writers ---- */

#define WRITERS 8
#define LINES 500

static void *writer(void *arg)
{
    char padding[400];
    int id = *(int *)arg;
    memset(padding, 'x', sizeof padding);
    for (int i = 0; i < LINES; i++)
        base_log(BASE_LOG_INFO, "line w=%d n=%d %.*s end", id, i, (i * 37) % 400, padding);
    return NULL;
}

static void run_writers(void)
{
    pthread_t threads[WRITERS];
    int ids[WRITERS];
    for (int i = 0; i < WRITERS; i++) {
        ids[i] = i;
        pthread_create(&threads[i], NULL, writer, &ids[i]);
    }
    for (int i = 0; i < WRITERS; i++)
        pthread_join(threads[i], NULL);
}

/* Every line is whole and each writer's are in its order; what is missing is told. */
static void expect_lines(char *text, int total)
{
    int last[WRITERS], lines = 0;
    unsigned long long told = 0, n;
    memset(last, -1, sizeof last);
    for (char *save, *line = strtok_r(text, "\n", &save); line;
         line = strtok_r(NULL, "\n", &save)) {
        const char *event = strstr(line, "level=");
        int id, at;
        cr_assert(strncmp(line, "ts=", 3) == 0 && event != NULL, "%s", line);
        if (sscanf(event, "level=warn log_dropped lines=%llu", &n) == 1) {
            told += n;
            continue;
        }
        cr_assert_eq(sscanf(event, "level=info line w=%d n=%d", &id, &at), 2, "%s", line);
        cr_assert_str_eq(line + strlen(line) - 4, " end");
        cr_assert_gt(at, last[id], "in order");
        last[id] = at;
        lines++;
    }
    cr_assert_eq(lines + (int)told, total, "%d lines, %llu told", lines, told);
    cr_assert_eq(told, base_log_dropped());
}

Test(base_log, a_file_gets_every_line_whole_and_in_order, .timeout = 60)
{
    char path[] = "/tmp/whimbrel-log-XXXXXX";
    int file = mkstemp(path), saved = dup(STDERR_FILENO);
    dup2(file, STDERR_FILENO);
    run_writers();
    dup2(saved, STDERR_FILENO);
    off_t size = lseek(file, 0, SEEK_END);
    char *text = calloc(1, (size_t)size + 1);
    cr_assert_eq(pread(file, text, (size_t)size, 0), size);
    cr_assert_eq(base_log_dropped(), 0);
    expect_lines(text, WRITERS * LINES);
    free(text);
    close(file);
    unlink(path);
}

typedef struct slow_reader {
    int fd;
    base_buf text;
} slow_reader;

static void *read_slowly(void *arg)
{
    slow_reader *r = arg;
    char bytes[700];
    ssize_t n;
    while ((n = read(r->fd, bytes, sizeof bytes)) > 0) {
        base_buf_add(&r->text, bytes, (size_t)n);
        usleep(50);
    }
    return NULL;
}

Test(base_log, a_slow_reader_gets_whole_lines_and_is_told_of_the_others, .timeout = 60)
{
    int ends[2], saved = dup(STDERR_FILENO);
    slow_reader r;
    pthread_t thread;
    base_buf_init(&r.text, 0);
    cr_assert_eq(pipe(ends), 0);
    r.fd = ends[0];
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    pthread_create(&thread, NULL, read_slowly, &r);
    run_writers();
    /* The count of the last dropped lines comes with the next one that fits. */
    int more = 0;
    for (uint64_t before = base_log_dropped() + 1; base_log_dropped() != before; more++) {
        usleep(1000);
        before = base_log_dropped();
        base_log(BASE_LOG_INFO, "line w=0 n=%d end", LINES + more);
    }
    dup2(saved, STDERR_FILENO);
    pthread_join(thread, NULL);
    expect_lines(r.text.data, WRITERS * LINES + more);
    base_buf_deinit(&r.text);
    close(ends[0]);
}

/* ---- the end ---- */

static int end_of_child(void (*run)(void))
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        run();
        _exit(0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    return status;
}

static void break_a_promise(void)
{
    signal(SIGABRT, SIG_DFL);
    CHECK(1 == 2);
}

Test(base_log, a_panic_is_told_and_a_full_pipe_does_not_hold_it_up, .timeout = 20)
{
    int ends[2], saved = dup(STDERR_FILENO);
    base_buf text;
    base_buf_init(&text, 0);
    cr_assert_eq(pipe(ends), 0);
    dup2(ends[1], STDERR_FILENO);
    int status = end_of_child(break_a_promise);
    drain(&text, ends[0]);
    cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    cr_assert_not_null(strstr(text.data, "test_log.c:"));
    cr_assert_not_null(strstr(text.data, ": 1 == 2\n"));
    fill(ends[1]);
    status = end_of_child(break_a_promise);
    dup2(saved, STDERR_FILENO);
    cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    base_buf_deinit(&text);
}
