/* States: VALUE (a value must come), FIRST_KEY (a key or `}`), KEY (a key must come), COLON is
 * consumed with the key, FIRST_ITEM (a value or `]`), AFTER (`,` or a closing bracket, or the end
 * of the text at depth 0). */
#include "engine/base/json.h"

#include <string.h>

#include "engine/base/utf8.h"

enum { VALUE, FIRST_KEY, KEY, FIRST_ITEM, AFTER, BROKEN };

void base_json_init(base_json *json, const char *text, size_t length, uint32_t depth_max)
{
    *json = (base_json){.text = text, .length = length};
    json->depth_max = depth_max < BASE_JSON_DEPTH_MAX ? depth_max : BASE_JSON_DEPTH_MAX;
}

static base_json_kind broken(base_json *json, const char *why)
{
    json->state = BROKEN;
    json->error = why;
    return BASE_JSON_ERROR;
}

static void skip_space(base_json *json)
{
    while (json->pos < json->length) {
        char c = json->text[json->pos];
        if (c != ' ' && c != '\t' && c != '\n' && c != '\r')
            return;
        json->pos++;
    }
}

static bool in_object(const base_json *json)
{
    uint32_t level = json->depth - 1;
    return json->stack[level / 8] >> (level % 8) & 1;
}

static bool hex4(const char *s)
{
    for (int i = 0; i < 4; i++)
        if (!((s[i] >= '0' && s[i] <= '9') || (s[i] >= 'a' && s[i] <= 'f') ||
              (s[i] >= 'A' && s[i] <= 'F')))
            return false;
    return true;
}

/* Sets raw to the string at pos and moves past it. */
static bool scan_string(base_json *json)
{
    size_t i = json->pos + 1;
    while (i < json->length) {
        unsigned char c = (unsigned char)json->text[i];
        if (c == '"') {
            json->raw = json->text + json->pos;
            json->raw_length = i + 1 - json->pos;
            json->pos = i + 1;
            return true;
        }
        if (c < 0x20) {
            json->error = "control character in a string";
            return false;
        }
        if (c == '\\') {
            if (i + 1 >= json->length)
                break;
            char e = json->text[i + 1];
            if (e == 'u') {
                if (json->length - i < 6 || !hex4(json->text + i + 2)) {
                    json->error = "bad \\u escape";
                    return false;
                }
                i += 6;
            } else if (e != '\0' && strchr("\"\\/bfnrt", e) != NULL) {
                i += 2;
            } else {
                json->error = "bad escape";
                return false;
            }
        } else if (c < 0x80) {
            i++;
        } else {
            size_t n = base_utf8_char(json->text + i, json->length - i, NULL);
            if (n == 0) {
                json->error = "invalid UTF-8";
                return false;
            }
            i += n;
        }
    }
    json->error = "unterminated string";
    return false;
}

static bool digits(base_json *json)
{
    size_t from = json->pos;
    while (json->pos < json->length && json->text[json->pos] >= '0' && json->text[json->pos] <= '9')
        json->pos++;
    return json->pos > from;
}

static bool accept(base_json *json, const char *any)
{
    if (json->pos < json->length && json->text[json->pos] != '\0' &&
        strchr(any, json->text[json->pos]) != NULL) {
        json->pos++;
        return true;
    }
    return false;
}

static bool scan_number(base_json *json)
{
    size_t from = json->pos;
    accept(json, "-");
    if (!accept(json, "0") && !digits(json))
        return false;
    if (accept(json, ".") && !digits(json))
        return false;
    if (accept(json, "eE")) {
        accept(json, "+-");
        if (!digits(json))
            return false;
    }
    json->raw = json->text + from;
    json->raw_length = json->pos - from;
    return true;
}

static base_json_kind scan_word(base_json *json, const char *word, base_json_kind kind)
{
    size_t n = strlen(word);
    if (json->length - json->pos < n || memcmp(json->text + json->pos, word, n) != 0)
        return broken(json, "unknown word");
    json->raw = json->text + json->pos;
    json->raw_length = n;
    json->pos += n;
    json->state = AFTER;
    return kind;
}

static base_json_kind open_level(base_json *json, bool object)
{
    if (json->depth >= json->depth_max)
        return broken(json, "nested too deeply");
    uint32_t level = json->depth++;
    uint8_t bit = (uint8_t)(1u << (level % 8));
    json->stack[level / 8] =
        object ? json->stack[level / 8] | bit : json->stack[level / 8] & (uint8_t)~bit;
    json->raw = json->text + json->pos++;
    json->raw_length = 1;
    json->state = object ? FIRST_KEY : FIRST_ITEM;
    return object ? BASE_JSON_OBJECT_BEGIN : BASE_JSON_ARRAY_BEGIN;
}

static base_json_kind close_level(base_json *json)
{
    bool object = in_object(json);
    json->raw = json->text + json->pos++;
    json->raw_length = 1;
    json->depth--;
    json->state = AFTER;
    return object ? BASE_JSON_OBJECT_END : BASE_JSON_ARRAY_END;
}

static base_json_kind scan_value(base_json *json)
{
    char c = json->text[json->pos];
    switch (c) {
    case '{':
        return open_level(json, true);
    case '[':
        return open_level(json, false);
    case '"':
        if (!scan_string(json))
            return broken(json, json->error);
        json->state = AFTER;
        return BASE_JSON_STRING;
    case 't':
        return scan_word(json, "true", BASE_JSON_TRUE);
    case 'f':
        return scan_word(json, "false", BASE_JSON_FALSE);
    case 'n':
        return scan_word(json, "null", BASE_JSON_NULL);
    default:
        if (c != '-' && (c < '0' || c > '9'))
            return broken(json, "unexpected character");
        if (!scan_number(json))
            return broken(json, "bad number");
        json->state = AFTER;
        return BASE_JSON_NUMBER;
    }
}

static base_json_kind scan_key(base_json *json)
{
    if (json->text[json->pos] != '"')
        return broken(json, "expected a member name");
    if (!scan_string(json))
        return broken(json, json->error);
    const char *raw = json->raw;
    size_t raw_length = json->raw_length;
    skip_space(json);
    if (!accept(json, ":"))
        return broken(json, "expected ':'");
    json->raw = raw;
    json->raw_length = raw_length;
    json->state = VALUE;
    return BASE_JSON_KEY;
}

base_json_kind base_json_next(base_json *json)
{
    if (json->state == BROKEN)
        return BASE_JSON_ERROR;
    skip_space(json);
    if (json->state == AFTER && json->depth == 0)
        return json->pos == json->length ? BASE_JSON_END : broken(json, "text after the value");
    if (json->pos >= json->length)
        return broken(json, "unexpected end");
    if (json->state == AFTER) {
        char c = json->text[json->pos];
        if (c == (in_object(json) ? '}' : ']'))
            return close_level(json);
        if (c != ',')
            return broken(json, "expected ',' or a closing bracket");
        json->pos++;
        json->state = in_object(json) ? KEY : VALUE;
        skip_space(json);
        if (json->pos >= json->length)
            return broken(json, "unexpected end");
    }
    switch (json->state) {
    case FIRST_KEY:
        if (json->text[json->pos] == '}')
            return close_level(json);
        return scan_key(json);
    case KEY:
        return scan_key(json);
    case FIRST_ITEM:
        if (json->text[json->pos] == ']')
            return close_level(json);
        return scan_value(json);
    default:
        return scan_value(json);
    }
}

bool base_json_skip(base_json *json)
{
    const char *from;
    uint32_t depth;
    if (json->state == VALUE) { /* after a key */
        base_json_kind kind = base_json_next(json);
        if (kind == BASE_JSON_ERROR)
            return false;
        if (kind != BASE_JSON_OBJECT_BEGIN && kind != BASE_JSON_ARRAY_BEGIN)
            return true;
    }
    from = json->raw;
    depth = json->depth - 1;
    while (json->depth > depth)
        if (base_json_next(json) == BASE_JSON_ERROR)
            return false;
    json->raw = from;
    json->raw_length = (size_t)(json->text + json->pos - from);
    return true;
}

static uint32_t read_hex4(const char *s)
{
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) {
        char c = s[i];
        value = value << 4 | (uint32_t)(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    return value;
}

/* Decodes one character of a string's inside; returns the raw bytes it took. */
static size_t decode_one(char out[4], size_t *out_length, const char *s, size_t length)
{
    if (s[0] != '\\') {
        out[0] = s[0];
        *out_length = 1;
        return 1;
    }
    *out_length = 1;
    switch (s[1]) {
    case 'b':
        out[0] = '\b';
        return 2;
    case 'f':
        out[0] = '\f';
        return 2;
    case 'n':
        out[0] = '\n';
        return 2;
    case 'r':
        out[0] = '\r';
        return 2;
    case 't':
        out[0] = '\t';
        return 2;
    case 'u':
        break;
    default:
        out[0] = s[1];
        return 2;
    }
    uint32_t c = read_hex4(s + 2);
    size_t took = 6;
    if (c >= 0xD800 && c <= 0xDBFF && length >= 12 && s[6] == '\\' && s[7] == 'u') {
        uint32_t low = read_hex4(s + 8);
        if (low >= 0xDC00 && low <= 0xDFFF) {
            c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
            took = 12;
        }
    }
    *out_length = base_utf8_encode(out, c);
    return took;
}

void base_json_unescape(base_buf *out, const char *raw, size_t raw_length)
{
    size_t end = raw_length - 1;
    for (size_t i = 1; i < end;) {
        const char *plain = memchr(raw + i, '\\', end - i);
        size_t run = plain == NULL ? end - i : (size_t)(plain - (raw + i));
        base_buf_add(out, raw + i, run);
        i += run;
        if (i < end) {
            char c[4];
            size_t n;
            i += decode_one(c, &n, raw + i, end - i);
            base_buf_add(out, c, n);
        }
    }
}

bool base_json_string_is(const char *raw, size_t raw_length, const char *text)
{
    size_t end = raw_length - 1, want = strlen(text), at = 0;
    for (size_t i = 1; i < end;) {
        char c[4];
        size_t n;
        i += decode_one(c, &n, raw + i, end - i);
        if (at + n > want || memcmp(text + at, c, n) != 0)
            return false;
        at += n;
    }
    return at == want;
}
