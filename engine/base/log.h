/* base/log: one event a line on stderr, `level=info event key=value …`.
 *
 * error: someone must act; warn: we coped; info: start, stop, one line a request; debug: the rest.
 * Never prompts, completions or keys. One write(2) a line, at most 1 KiB, longer ones are cut.
 * Thread: any. */
#pragma once

typedef enum base_log_level {
    BASE_LOG_DEBUG,
    BASE_LOG_INFO,
    BASE_LOG_WARN,
    BASE_LOG_ERROR
} base_log_level;

void base_log_set_level(base_log_level level); /* default BASE_LOG_INFO */
base_log_level base_log_get_level(void);
/* `fmt` begins with the event's name: base_log(BASE_LOG_INFO, "seq_finished req=%s tokens=%u", id,
 * n). */
void base_log(base_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
