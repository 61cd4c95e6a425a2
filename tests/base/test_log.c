#include <criterion/criterion.h>

#include <string.h>
#include <unistd.h>

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
