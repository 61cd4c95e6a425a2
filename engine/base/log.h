/* base/log: one event a line on stderr, `level=info event key=value …`.
 *
 * error: someone must act; warn: we coped; info: start, stop, one line a request; debug: the rest.
 * Never prompts, completions or keys. One write(2) a line, at most 1 KiB, longer ones are cut;
 * lines of several threads never mix.
 *
 * Nobody waits for who reads the log: where stderr is a pipe, socket or terminal that takes no more
 * for now, the line is dropped and counted, and the next one that fits is preceded by
 * `log_dropped lines=N`. A file takes every line. Thread: any. */
#pragma once
#include <stdint.h>

typedef enum base_log_level {
    BASE_LOG_DEBUG,
    BASE_LOG_INFO,
    BASE_LOG_WARN,
    BASE_LOG_ERROR
} base_log_level;

void base_log_set_level(base_log_level level); /* default BASE_LOG_INFO */
base_log_level base_log_get_level(void);
const char *base_log_level_name(base_log_level level);
/* `fmt` begins with the event's name: base_log(BASE_LOG_INFO, "seq_finished req=%s tokens=%u", id,
 * n). */
void base_log(base_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Lines dropped since the start. */
uint64_t base_log_dropped(void);
/* A last line, as it stands, of who is about to abort: takes no lock, and waits for room a second
 * at most. */
void base_log_last_words(const char *line);
