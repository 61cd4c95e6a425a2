/* base/json: a strict pull scanner over JSON text that keeps every value's raw bytes (RFC 8259).
 *
 * jansson parses the bodies; this scanner is for what jansson cannot keep: the exact text of a
 * number, the raw byte range of an array's element, the spacing-free walk that the chat codec
 * needs. Nothing is allocated; `depth_max` bounds nesting (no recursion). Strings must be valid
 * UTF-8. Thread: any. */
#pragma once
#include "engine/base/buf.h"
#include "engine/base/err.h"

typedef enum base_json_kind {
    BASE_JSON_END, /* the whole text was one value, and it is over */
    BASE_JSON_ERROR,
    BASE_JSON_NULL,
    BASE_JSON_TRUE,
    BASE_JSON_FALSE,
    BASE_JSON_NUMBER,
    BASE_JSON_STRING,
    BASE_JSON_KEY, /* a member's name; its value is the next event */
    BASE_JSON_OBJECT_BEGIN,
    BASE_JSON_OBJECT_END,
    BASE_JSON_ARRAY_BEGIN,
    BASE_JSON_ARRAY_END,
} base_json_kind;

#define BASE_JSON_DEPTH_MAX 512

typedef struct base_json {
    const char *text;
    size_t length;
    size_t pos;
    uint32_t depth, depth_max;
    uint8_t state;                          /* what may come next; see json.c */
    uint8_t stack[BASE_JSON_DEPTH_MAX / 8]; /* a bit a level: 1 object, 0 array */
    const char *raw; /* of the last event: its bytes, strings with their quotes */
    size_t raw_length;
    const char *error; /* set with BASE_JSON_ERROR; static text */
} base_json;

/* `depth_max` at most BASE_JSON_DEPTH_MAX. `text` is borrowed. */
void base_json_init(base_json *json, const char *text, size_t length, uint32_t depth_max);
base_json_kind base_json_next(base_json *json);
/* After a *_BEGIN or KEY event: passes over the rest of that value, raw/raw_length then cover it
 * whole. Returns false on an error (see base_json.error). */
bool base_json_skip(base_json *json);
/* Appends the decoded characters of a raw string (quotes included in `raw`): \uXXXX pairs joined, a
 * lone surrogate becomes U+FFFD. */
void base_json_unescape(base_buf *out, const char *raw, size_t raw_length);
/* Compares a raw string's decoded text with a C string. */
bool base_json_string_is(const char *raw, size_t raw_length, const char *text);
