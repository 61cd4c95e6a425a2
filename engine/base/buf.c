#include "engine/base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"

void base_buf_init(base_buf *buf, size_t max)
{
    *buf = (base_buf){.max = max};
}

void base_buf_deinit(base_buf *buf)
{
    free(buf->data);
    *buf = (base_buf){.max = buf->max};
}

void base_buf_clear(base_buf *buf)
{
    buf->length = 0;
    buf->failed = false;
    if (buf->data != NULL)
        buf->data[0] = '\0';
}

bool base_buf_reserve(base_buf *buf, size_t more)
{
    size_t need;
    if (buf->failed)
        return false;
    if (!base_add(&need, buf->length, more) || need == SIZE_MAX ||
        (buf->max != 0 && need > buf->max)) {
        buf->failed = true;
        return false;
    }
    if (need + 1 <= buf->capacity)
        return true;
    size_t capacity = base_max(need + 1, buf->capacity + buf->capacity / 2 + 64);
    char *data = realloc(buf->data, capacity);
    if (data == NULL) {
        buf->failed = true;
        return false;
    }
    buf->data = data;
    buf->capacity = capacity;
    return true;
}

void base_buf_add(base_buf *buf, const void *bytes, size_t length)
{
    if (!base_buf_reserve(buf, length))
        return;
    if (length > 0)
        memcpy(buf->data + buf->length, bytes, length);
    buf->length += length;
    buf->data[buf->length] = '\0';
}

void base_buf_puts(base_buf *buf, const char *text)
{
    base_buf_add(buf, text, strlen(text));
}

void base_buf_printf(base_buf *buf, const char *fmt, ...)
{
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int need = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (need < 0)
        buf->failed = true;
    else if (base_buf_reserve(buf, (size_t)need)) {
        vsnprintf(buf->data + buf->length, (size_t)need + 1, fmt, again);
        buf->length += (size_t)need;
    }
    va_end(again);
}

/* What stands between the quotes. */
static void add_escaped(base_buf *buf, const char *text, size_t length)
{
    size_t from = 0;
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        base_buf_add(buf, text + from, i - from);
        from = i + 1;
        switch (c) {
        case '"':
            base_buf_add(buf, "\\\"", 2);
            break;
        case '\\':
            base_buf_add(buf, "\\\\", 2);
            break;
        case '\n':
            base_buf_add(buf, "\\n", 2);
            break;
        case '\r':
            base_buf_add(buf, "\\r", 2);
            break;
        case '\t':
            base_buf_add(buf, "\\t", 2);
            break;
        default:
            base_buf_printf(buf, "\\u%04x", c);
        }
    }
    base_buf_add(buf, text + from, length - from);
}

void base_buf_json_string(base_buf *buf, const char *text, size_t length)
{
    base_buf_add(buf, "\"", 1);
    add_escaped(buf, text, length);
    base_buf_add(buf, "\"", 1);
}

void base_buf_json_text(base_buf *buf, const char *text, size_t length)
{
    size_t from = 0;
    base_buf_add(buf, "\"", 1);
    for (size_t i = 0; i < length;) {
        size_t size = base_utf8_char(text + i, length - i, NULL);
        if (!size) {
            add_escaped(buf, text + from, i - from);
            base_buf_add(buf, "\xEF\xBF\xBD", 3);
            from = i + 1;
        }
        i += size ? size : 1;
    }
    add_escaped(buf, text + from, length - from);
    base_buf_add(buf, "\"", 1);
}

void base_buf_drop(base_buf *buf, size_t count)
{
    count = base_min(count, buf->length);
    if (count == 0)
        return;
    memmove(buf->data, buf->data + count, buf->length - count);
    buf->length -= count;
    buf->data[buf->length] = '\0';
}
