/* Against a decoder written from the definition: lead bits give the length, bits are gathered, then
 * ranges are tested. */
#include <criterion/criterion.h>

#include <string.h>

#include "engine/base/rand.h"
#include "engine/base/utf8.h"

/* Length of the character at s, 0 if there is none; *value its number. */
static size_t naive(const unsigned char *s, size_t length, uint32_t *value)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t ones = 0;
    if (length == 0)
        return 0;
    while (ones < 8 && s[0] >> (7 - ones) & 1)
        ones++;
    if (ones == 0) {
        *value = s[0];
        return 1;
    }
    if (ones == 1 || ones > 4 || ones > length)
        return 0;
    uint32_t v = s[0] & ((1u << (7 - ones)) - 1);
    for (size_t i = 1; i < ones; i++) {
        if (s[i] >> 6 != 2)
            return 0;
        v = v * 64 + s[i] % 64;
    }
    if (v < least[ones] || v > 0x10FFFF || (v >= 0xD800 && v < 0xE000))
        return 0;
    *value = v;
    return ones;
}

/* Whether some further bytes would make s a character. */
static bool naive_begins(const unsigned char *s, size_t length)
{
    static const unsigned char tails[] = {0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF};
    unsigned char whole[4];
    uint32_t value;
    memcpy(whole, s, length);
    for (int a = 0; a < 6; a++)
        for (int b = 0; b < 6; b++)
            for (int c = 0; c < 6; c++) {
                unsigned char more[3] = {tails[a], tails[b], tails[c]};
                memcpy(whole + length, more, 4 - length);
                if (naive(whole, 4, &value) > length)
                    return true;
            }
    return false;
}

static void compare(const unsigned char *s, size_t length)
{
    uint32_t want = 0, got = 0;
    size_t n = naive(s, length, &want);
    size_t m = base_utf8_char((const char *)s, length, &got);
    if (n != m || (n > 0 && want != got))
        cr_assert_fail("%02x %02x %02x (of %zu): %zu U+%X, not %zu U+%X", s[0],
                       length > 1 ? s[1] : 0, length > 2 ? s[2] : 0, length, m, got, n, want);
}

Test(base_utf8, every_three_bytes_decode_as_defined)
{
    unsigned char s[3];
    for (uint32_t v = 0; v < 1u << 24; v++) {
        s[0] = (unsigned char)(v >> 16);
        s[1] = (unsigned char)(v >> 8);
        s[2] = (unsigned char)v;
        compare(s, 3);
        if (s[2] == 0)
            compare(s, 2);
        if (s[1] == 0 && s[2] == 0)
            compare(s, 1);
    }
    cr_assert_eq(base_utf8_char("a", 0, NULL), 0);
}

Test(base_utf8, every_scalar_value_round_trips)
{
    for (uint32_t c = 0; c <= 0x110010; c++) {
        char s[4];
        uint32_t got = 0;
        size_t n = base_utf8_encode(s, c);
        bool scalar = c <= 0x10FFFF && (c < 0xD800 || c > 0xDFFF);
        if (base_utf8_char(s, n, &got) != n || got != (scalar ? c : 0xFFFD))
            cr_assert_fail("U+%X", c);
        for (size_t k = 1; k < n; k++)
            if (base_utf8_char(s, k, NULL) != 0)
                cr_assert_fail("U+%X cut after %zu", c, k);
    }
}

Test(base_utf8, four_bytes_at_the_edges)
{
    static const unsigned char edge[] = {0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF,
                                         0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE,
                                         0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xF8, 0xFF};
    enum { EDGES = sizeof edge };
    for (uint32_t v = 0; v < EDGES * EDGES * EDGES * EDGES; v++) {
        unsigned char s[4] = {edge[v % EDGES], edge[v / EDGES % EDGES],
                              edge[v / EDGES / EDGES % EDGES], edge[v / EDGES / EDGES / EDGES]};
        compare(s, 4);
        for (size_t length = 0; length <= 4; length++) {
            size_t want = length;
            for (size_t k = 1; k <= 3 && k <= length; k++)
                if (naive_begins(s + length - k, k))
                    want = length - k;
            size_t got = base_utf8_complete((const char *)s, length);
            if (got != want)
                cr_assert_fail("%02x %02x %02x %02x, first %zu: %zu, not %zu", s[0], s[1], s[2],
                               s[3], length, got, want);
        }
    }
}

Test(base_utf8, a_text_is_valid_if_each_character_is)
{
    for (uint64_t round = 0; round < 20000; round++) {
        unsigned char s[64];
        size_t length = 0;
        while (length < 56) {
            base_rand4 r = base_rand(3, round, length);
            static const uint32_t spans[] = {0x80, 0x800, 0x10000, 0x110000};
            length += base_utf8_encode((char *)s + length, r.v[0] % spans[r.v[1] % 4]);
        }
        if (!base_utf8_valid((const char *)s, length))
            cr_assert_fail("round %lu", round);
        base_rand4 r = base_rand(4, round, 0);
        s[r.v[0] % length] = (unsigned char)r.v[1];
        bool want = true;
        for (size_t i = 0; want && i < length;) {
            uint32_t value;
            size_t n = naive(s + i, length - i, &value);
            want = n > 0;
            i += n;
        }
        if (base_utf8_valid((const char *)s, length) != want)
            cr_assert_fail("round %lu", round);
    }
    cr_assert(base_utf8_valid("", 0));
}

/* Wherever it stands, beside the eight bytes that are looked at together. */
Test(base_utf8, one_wrong_byte_anywhere_is_found)
{
    char text[33];
    for (size_t length = 1; length <= 32; length++)
        for (size_t at = 0; at < length; at++) {
            memset(text, 'a', sizeof text);
            cr_assert(base_utf8_valid(text, length));
            text[at] = (char)0xC3; /* begins a character of two */
            cr_assert_not(base_utf8_valid(text, length), "byte %zu of %zu", at, length);
            text[at + 1] = (char)0xA9;
            cr_assert_eq(base_utf8_valid(text, length), at + 1 < length, "byte %zu of %zu", at,
                         length);
        }
}
