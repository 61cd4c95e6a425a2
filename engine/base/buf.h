/* base/buf: a growing byte buffer with a bound.
 *
 * The caller owns the struct; base_buf_deinit frees the bytes. An append that does not fit `max` or
 * memory sets `failed` and changes nothing else; later appends do nothing, so that one test at the
 * end is enough. Thread: one at a time. */
#pragma once
#include "engine/base/err.h"

typedef struct base_buf {
    char *data; /* `length` bytes, then a terminating zero once anything was appended */
    size_t length;
    size_t capacity;
    size_t max; /* 0: no bound */
    bool failed;
} base_buf;

void base_buf_init(base_buf *buf, size_t max);
void base_buf_deinit(base_buf *buf);
void base_buf_clear(base_buf *buf); /* keeps the memory, clears `failed` */
bool base_buf_reserve(base_buf *buf, size_t more);
void base_buf_add(base_buf *buf, const void *bytes, size_t length);
void base_buf_puts(base_buf *buf, const char *text);
void base_buf_printf(base_buf *buf, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Appends `text` as a JSON string with its quotes: ", \ and controls escaped, all else as it stands
 * (UTF-8 is kept). */
void base_buf_json_string(base_buf *buf, const char *text, size_t length);
/* The same of bytes that may be anything: what is no UTF-8 becomes U+FFFD. */
void base_buf_json_text(base_buf *buf, const char *text, size_t length);
/* Drops the first `count` bytes. */
void base_buf_drop(base_buf *buf, size_t count);
