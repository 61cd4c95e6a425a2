/* body: see the header. Three linear passes: mend (one byte at a time), the scanner for raw
 * members, the numbers. */
#include "gateway/body.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/num.h"
#include "engine/base/utf8.h"

/* Eight bytes at a time, since a tool result is one string of megabytes. */
size_t gw_next_mark(const char *text, size_t at, size_t length)
{
    const uint64_t ones = 0x0101010101010101u, highs = 0x8080808080808080u;
    for (; at + 8 <= length; at += 8) {
        uint64_t word;
        memcpy(&word, text + at, sizeof(word));
        uint64_t quotes = word ^ (ones * '"'), slashes = word ^ (ones * '\\');
        /* A zero byte in one of the two; a false alarm costs one round of the loop below. */
        if ((((quotes - ones) & ~quotes) | ((slashes - ones) & ~slashes)) & highs)
            break;
    }
    while (at < length && text[at] != '"' && text[at] != '\\')
        at++;
    return at;
}

int gw_hex4(const char *text)
{
    int value = 0;
    for (int i = 0; i < 4; i++) {
        char c = text[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* The end of a number's text from `at` on. */
static size_t number_end(const char *text, size_t at, size_t length)
{
    while (at < length &&
           ((text[at] >= '0' && text[at] <= '9') || text[at] == '.' || text[at] == 'e' ||
            text[at] == 'E' || text[at] == '+' || text[at] == '-'))
        at++;
    return at;
}

/* `at` is the backslash of an escape inside a string; returns the bytes passed, at least 1. */
static size_t mend_escape(char *text, size_t at, size_t length)
{
    if (at + 6 > length || text[at + 1] != 'u')
        return 2;
    int high = gw_hex4(text + at + 2);
    if (high < 0xD800 || high > 0xDFFF)
        return 6;
    if (high < 0xDC00 && at + 12 <= length && text[at + 6] == '\\' && text[at + 7] == 'u') {
        int low = gw_hex4(text + at + 8);
        if (low >= 0xDC00 && low <= 0xDFFF)
            return 12;
    }
    memcpy(text + at + 2, "fffd", 4);
    return 6;
}

base_code gw_body_mend(char *text, size_t length, uint32_t depth_max, base_err *err)
{
    if (!base_utf8_valid(text, length))
        return base_fail(err, BASE_INVALID, "the body is not valid UTF-8");
    uint32_t depth = 0, values = 0;
    for (size_t at = 0; at < length;) {
        switch (text[at]) {
        case '"':
            at++;
            while ((at = gw_next_mark(text, at, length)) < length && text[at] == '\\')
                at += mend_escape(text, at, length);
            at++;
            break;
        case '{':
        case '[':
            if (++depth > depth_max)
                return base_fail(err, BASE_INVALID,
                                 "the body nests deeper than %u levels at byte %zu", depth_max, at);
            values++;
            at++;
            break;
        case '}':
        case ']':
            depth -= depth > 0;
            at++;
            break;
        case ',':
            values++;
            at++;
            break;
        case '\0':
            return base_fail(err, BASE_INVALID, "the body is not JSON: a zero byte at %zu", at);
        default: {
            size_t end = number_end(text, at, length);
            if (end - at > GW_BODY_NUMBER_MAX)
                return base_fail(err, BASE_INVALID,
                                 "the number at byte %zu of the body has %zu characters, %d are "
                                 "allowed",
                                 at, end - at, GW_BODY_NUMBER_MAX);
            at = end > at ? end : at + 1;
        }
        }
        if (values > GW_BODY_VALUES_MAX)
            return base_fail(err, BASE_INVALID, "the body holds more than %d values",
                             GW_BODY_VALUES_MAX);
    }
    return BASE_OK;
}

bool gw_body_member(eng_text *out, const char *text, size_t length, const char *name)
{
    base_json json;
    base_json_init(&json, text, length, BASE_JSON_DEPTH_MAX);
    if (base_json_next(&json) != BASE_JSON_OBJECT_BEGIN)
        return false;
    bool found = false;
    for (base_json_kind kind; (kind = base_json_next(&json)) == BASE_JSON_KEY;) {
        bool wanted = base_json_string_is(json.raw, json.raw_length, name);
        if (!base_json_skip(&json))
            return false;
        if (wanted) {
            *out = (eng_text){json.raw, json.raw_length};
            found = true;
        }
    }
    return found;
}

void gw_put_raw(base_buf *out, eng_text json)
{
    const char *text = json.data;
    for (size_t at = 0, end; at < json.length; at = end) {
        end = at + 1;
        if (text[at] == '"') {
            while ((end = gw_next_mark(text, end, json.length)) < json.length && text[end] == '\\')
                end += 2;
            end = base_min(end + 1, json.length);
        } else if (strchr(" \t\r\n", text[at])) {
            continue;
        }
        base_buf_add(out, text + at, end - at);
    }
}

static size_t digits_at(const char *text, size_t at, size_t length)
{
    while (at < length && text[at] >= '0' && text[at] <= '9')
        at++;
    return at;
}

/* RFC 8259's number, whole; what is not one is left for jansson to refuse. */
static bool is_number(const char *text, size_t length, bool *integer)
{
    size_t at = text[0] == '-', begin = at;
    at = digits_at(text, at, length);
    if (at == begin || (text[begin] == '0' && at - begin > 1))
        return false;
    *integer = at == length;
    if (at < length && text[at] == '.') {
        begin = ++at;
        at = digits_at(text, at, length);
        if (at == begin)
            return false;
    }
    if (at < length && (text[at] == 'e' || text[at] == 'E')) {
        at++;
        at += at < length && (text[at] == '+' || text[at] == '-');
        begin = at;
        at = digits_at(text, at, length);
        if (at == begin)
            return false;
    }
    return at == length;
}

/* Whether jansson would refuse a number for its size: an integer of more than 18 digits, or one
 * that no double holds. `exponent` is what it has as a double. */
static bool is_too_large(const char *text, size_t length, unsigned *exponent)
{
    bool integer;
    size_t digits = length - (text[0] == '-');
    if (digits < 5 || !is_number(text, length, &integer))
        return false;
    *exponent = 308;
    if (integer) {
        *exponent = (unsigned)base_min(digits - 1, 308);
        return digits > 18;
    }
    /* The next byte is a delimiter of the JSON text, which strtod stops at, or the text's end. */
    return !isfinite(strtod(text, NULL));
}

/* The next such number from `at` on: its length, 0 if there is none. */
static size_t next_too_large(const char *text, size_t *at, size_t length, unsigned *exponent)
{
    while (*at < length) {
        char c = text[*at];
        if (c == '"') {
            ++*at;
            while ((*at = gw_next_mark(text, *at, length)) < length && text[*at] == '\\')
                *at += 2;
            ++*at;
        } else if (c == '-' || (c >= '0' && c <= '9')) {
            size_t size = 0;
            while (*at + size < length && text[*at + size] != '\0' &&
                   strchr("+-.eE0123456789", text[*at + size]))
                size++;
            if (is_too_large(text + *at, size, exponent))
                return size;
            *at += size;
        } else {
            ++*at;
        }
    }
    return 0;
}

/* The text with such numbers as nearby doubles of the same width; to be freed. */
static char *mend_numbers(const char *text, size_t length, size_t at, size_t size,
                          unsigned exponent)
{
    char *out = malloc(length + 1), tail[16];
    if (!out)
        return NULL;
    memcpy(out, text, length);
    out[length] = '\0';
    for (; size; at += size, size = next_too_large(text, &at, length, &exponent)) {
        /* "d" "e" and the exponent padded with zeros to the same width; the leading digit keeps the
         * magnitude unless that would overflow. */
        char *to = out + at + (text[at] == '-');
        size_t digits = size - (text[at] == '-');
        to[0] = exponent == 308 || to[0] == '0' ? '1' : to[0];
        to[1] = 'e';
        snprintf(tail, sizeof(tail), "%03u", exponent);
        memset(to + 2, '0', digits - 2);
        memcpy(to + digits - 3, tail, 3);
    }
    return out;
}

base_code gw_body_parse(json_t **out, const char *text, size_t length, base_err *err)
{
    size_t at = 0;
    unsigned exponent;
    size_t size = next_too_large(text, &at, length, &exponent);
    char *mended = size ? mend_numbers(text, length, at, size, exponent) : NULL;
    if (size && !mended)
        return base_fail(err, BASE_NOMEM, "no memory to parse the body");
    json_error_t error;
    json_t *root = json_loadb(mended ? mended : text, length, JSON_ALLOW_NUL, &error);
    free(mended);
    if (!root) {
        if (json_error_code(&error) == json_error_out_of_memory)
            return base_fail(err, BASE_NOMEM, "no memory to parse the body");
        /* jansson quotes the text near the error; the position is enough, and echoes nothing. */
        return base_fail(err, BASE_INVALID, "the body is not JSON: error at byte %d",
                         error.position);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return base_fail(err, BASE_INVALID, "the body must be a JSON object");
    }
    *out = root;
    return BASE_OK;
}

/* ---- readers ---- */

static const char *type_name(const json_t *value)
{
    if (!value)
        return "absent";
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    case JSON_NULL:
        break;
    }
    return "null";
}

static void join(char out[48], const char *path, const char *name)
{
    /* A path that does not fit keeps its end, which says more than its beginning. */
    char whole[128];
    int length = snprintf(whole, sizeof(whole), "%s%s%s", path,
                          path[0] && name[0] && name[0] != '[' ? "." : "", name);
    size_t skip = length > 47 ? (size_t)base_min((size_t)length, sizeof(whole) - 1) - 47 : 0;
    memcpy(out, whole + skip, strlen(whole + skip) + 1);
}

base_code gw_wrong_type(const char *path, const char *name, const char *expected, const json_t *got,
                        base_err *err)
{
    char full[48];
    join(full, path, name);
    return base_fail_param(err, BASE_INVALID, full, "%s must be %s, not %s", full, expected,
                           type_name(got));
}

/* The member, or NULL for absent and null. */
static json_t *member(const json_t *object, const char *name)
{
    json_t *value = json_object_get(object, name);
    return json_is_null(value) ? NULL : value;
}

base_code gw_read_bool(bool *out, bool *seen, const json_t *object, const char *path,
                       const char *name, base_err *err)
{
    const json_t *value = member(object, name);
    if (!value)
        return BASE_OK;
    if (!json_is_boolean(value))
        return gw_wrong_type(path, name, "a boolean", value, err);
    *out = json_is_true(value);
    if (seen)
        *seen = true;
    return BASE_OK;
}

base_code gw_read_int(int64_t *out, bool *seen, const json_t *object, const char *path,
                      const char *name, int64_t min, int64_t max, base_err *err)
{
    const json_t *value = member(object, name);
    if (!value)
        return BASE_OK;
    int64_t number;
    if (json_is_integer(value)) {
        number = json_integer_value(value);
    } else if (json_is_real(value) && json_real_value(value) == floor(json_real_value(value))) {
        /* 16.0 from a language without integers. What is past 2^62 is out of every bound here. */
        double real = json_real_value(value);
        number = real > 0x1p62 ? INT64_MAX : real < -0x1p62 ? INT64_MIN : (int64_t)real;
    } else {
        return gw_wrong_type(path, name, "an integer", value, err);
    }
    if (number < min || number > max) {
        char full[48];
        join(full, path, name);
        return base_fail_param(err, BASE_INVALID, full, "%s %lld is not in %lld to %lld", full,
                               (long long)number, (long long)min, (long long)max);
    }
    *out = number;
    if (seen)
        *seen = true;
    return BASE_OK;
}

base_code gw_read_number(float *out, bool *seen, const json_t *object, const char *path,
                         const char *name, double min, double max, base_err *err)
{
    const json_t *value = member(object, name);
    if (!value)
        return BASE_OK;
    if (!json_is_number(value))
        return gw_wrong_type(path, name, "a number", value, err);
    double number = json_number_value(value);
    if (!(number >= min && number <= max)) {
        char full[48];
        join(full, path, name);
        return base_fail_param(err, BASE_INVALID, full, "%s %g is not in %g to %g", full, number,
                               min, max);
    }
    *out = (float)number;
    if (seen)
        *seen = true;
    return BASE_OK;
}

base_code gw_read_text(eng_text *out, const json_t *object, const char *path, const char *name,
                       base_err *err)
{
    const json_t *value = member(object, name);
    if (!value)
        return BASE_OK;
    if (!json_is_string(value))
        return gw_wrong_type(path, name, "a string", value, err);
    *out = (eng_text){json_string_value(value), json_string_length(value)};
    return BASE_OK;
}

base_code gw_read_name(const char **out, const json_t *object, const char *path, const char *name,
                       size_t max, base_err *err)
{
    eng_text text = {0};
    base_code code = gw_read_text(&text, object, path, name, err);
    if (code || !text.data)
        return code;
    char full[48];
    join(full, path, name);
    if (memchr(text.data, '\0', text.length))
        return base_fail_param(err, BASE_INVALID, full, "%s must not hold U+0000", full);
    if (text.length > max)
        return base_fail_param(err, BASE_INVALID, full, "%s has %zu bytes, the limit is %zu", full,
                               text.length, max);
    *out = text.data;
    return BASE_OK;
}

base_code gw_read_object(json_t **out, const json_t *object, const char *path, const char *name,
                         base_err *err)
{
    json_t *value = member(object, name);
    if (value && !json_is_object(value))
        return gw_wrong_type(path, name, "an object", value, err);
    *out = value;
    return BASE_OK;
}

base_code gw_read_array(json_t **out, const json_t *object, const char *path, const char *name,
                        base_err *err)
{
    json_t *value = member(object, name);
    if (value && !json_is_array(value))
        return gw_wrong_type(path, name, "an array", value, err);
    *out = value;
    return BASE_OK;
}

/* ---- items ---- */

#define REORDER_MAX 256 /* calls of a turn; past it the client's order stays */

/* Which call of `item` a result answers; call_count if none. */
static uint32_t call_index(const eng_item *item, eng_text id)
{
    for (uint32_t i = 0; i < item->call_count; i++)
        if (id.length && item->calls[i].id.length == id.length &&
            memcmp(item->calls[i].id.data, id.data, id.length) == 0)
            return i;
    return item->call_count;
}

void gw_order_results(eng_item *items, eng_text *ids, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        const eng_item *asked = &items[at];
        size_t end = at + 1;
        while (end < count && items[end].role == ENG_ROLE_TOOL)
            end++;
        if (asked->role != ENG_ROLE_ASSISTANT || end - at < 3 || end - at > REORDER_MAX ||
            asked->call_count > REORDER_MAX)
            continue;
        for (size_t i = at + 2; i < end; i++) /* insertion: nearly always in order already */
            for (size_t j = i;
                 j > at + 1 && call_index(asked, ids[j - 1]) > call_index(asked, ids[j]); j--) {
                eng_item item = items[j];
                eng_text id = ids[j];
                items[j] = items[j - 1];
                ids[j] = ids[j - 1];
                items[j - 1] = item;
                ids[j - 1] = id;
            }
    }
}
