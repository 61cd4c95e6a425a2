/* base/utf8: validation and cutting of UTF-8 (RFC 3629: no surrogates, nothing past U+10FFFF,
 * shortest form). Thread: any. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* True if all `length` bytes are valid UTF-8. */
bool base_utf8_valid(const char *text, size_t length);
/* How many bytes at the front are whole, and either valid characters or certainly invalid; what is
 * left (0 to 3 bytes) may be the beginning of a character whose end has not come yet. */
size_t base_utf8_complete(const char *text, size_t length);
/* Length (1-4) of the valid character at `text`, 0 if it is invalid or cut. */
size_t base_utf8_char(const char *text, size_t length, uint32_t *codepoint);
/* Writes 1 to 4 bytes for a scalar value; returns how many. Surrogates and values past U+10FFFF
 * give U+FFFD. */
size_t base_utf8_encode(char out[4], uint32_t codepoint);
