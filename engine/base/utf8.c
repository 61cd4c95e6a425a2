#include "engine/base/utf8.h"

#include <string.h>

static size_t expected(unsigned char lead)
{
    if (lead < 0x80)
        return 1;
    if (lead >= 0xC2 && lead <= 0xDF)
        return 2;
    if (lead >= 0xE0 && lead <= 0xEF)
        return 3;
    if (lead >= 0xF0 && lead <= 0xF4)
        return 4;
    return 0;
}

/* Whether the second byte may follow the first: shuts out overlong forms, surrogates and values
 * past U+10FFFF. */
static bool second_fits(unsigned char lead, unsigned char second)
{
    if ((second & 0xC0) != 0x80)
        return false;
    switch (lead) {
    case 0xE0:
        return second >= 0xA0;
    case 0xED:
        return second <= 0x9F;
    case 0xF0:
        return second >= 0x90;
    case 0xF4:
        return second <= 0x8F;
    default:
        return true;
    }
}

size_t base_utf8_char(const char *text, size_t length, uint32_t *codepoint)
{
    const unsigned char *s = (const unsigned char *)text;
    if (length == 0)
        return 0;
    size_t n = expected(s[0]);
    if (n == 0 || n > length || (n > 1 && !second_fits(s[0], s[1])))
        return 0;
    uint32_t value = n == 1 ? s[0] : s[0] & (0x7Fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xC0) != 0x80)
            return 0;
        value = value << 6 | (s[i] & 0x3Fu);
    }
    if (codepoint != NULL)
        *codepoint = value;
    return n;
}

bool base_utf8_valid(const char *text, size_t length)
{
    for (size_t i = 0; i < length;) {
        uint64_t word;
        /* Bodies are ASCII for the most part: eight bytes at a time. */
        if (i + sizeof word <= length) {
            memcpy(&word, text + i, sizeof word);
            if ((word & 0x8080808080808080u) == 0) {
                i += sizeof word;
                continue;
            }
        }
        size_t n = base_utf8_char(text + i, length - i, NULL);
        if (n == 0)
            return false;
        i += n;
    }
    return true;
}

size_t base_utf8_complete(const char *text, size_t length)
{
    const unsigned char *s = (const unsigned char *)text;
    for (size_t back = 1; back <= 3 && back <= length; back++) {
        unsigned char c = s[length - back];
        if ((c & 0xC0) == 0x80)
            continue;
        size_t n = expected(c);
        if (n <= back || (back >= 2 && !second_fits(c, s[length - back + 1])))
            return length;
        return length - back;
    }
    return length;
}

size_t base_utf8_encode(char out[4], uint32_t c)
{
    if (c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF))
        c = 0xFFFD;
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xC0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3F));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xE0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 0x3F));
        out[2] = (char)(0x80 | (c & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 0x3F));
    out[2] = (char)(0x80 | (c >> 6 & 0x3F));
    out[3] = (char)(0x80 | (c & 0x3F));
    return 4;
}
