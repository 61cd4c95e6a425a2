/* The split of text into pre-tokens, by the pattern of tokenizer.json.
 *
 * The pattern runs in PCRE2 with UTF and Unicode properties, compiled to machine code where PCRE2
 * can. A match that PCRE2 gives up on (its limits) is not an error of the text: a bounded piece is
 * taken as a pre-token and the split goes on. What lies between two matches is a pre-token too
 * (behaviour "Isolated"), so no byte is ever lost. */
#include <string.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "engine/token_internal.h"

/* Bytes taken as they are where the pattern gave up. */
#define GIVE_UP_PIECE 256
/* White space as Unicode defines it. PCRE2's own \s has U+180E too, which split patterns of other
 * engines do not mean. */
#define SPACE "\\p{Z}\\t-\\r\\x{85}"

/* Rewrites \s and \S (outside a class) so that they mean the same characters as in the engines that
 * the pattern was made with. */
static void rewrite(base_buf *out, const char *pattern, size_t length)
{
    bool in_class = false;
    for (size_t i = 0; i < length; i++) {
        char c = pattern[i], e = c == '\\' && i + 1 < length ? pattern[i + 1] : '\0';
        if (e == 's')
            base_buf_puts(out, in_class ? SPACE : "[" SPACE "]");
        else if (e == 'S' && !in_class)
            base_buf_puts(out, "[^" SPACE "]");
        else if (e != '\0')
            base_buf_add(out, pattern + i, 2);
        else
            base_buf_add(out, &c, 1);
        if (c == '[' && !in_class) {
            in_class = true;
            /* A `]` first in a class is a member of it. */
            if (i + 1 < length && pattern[i + 1] == '^')
                base_buf_add(out, pattern + ++i, 1);
            if (i + 1 < length && pattern[i + 1] == ']')
                base_buf_add(out, pattern + ++i, 1);
        } else if (c == ']') {
            in_class = false;
        }
        if (e != '\0')
            i++;
    }
}

base_code tok_split_create(pcre2_code **out, const char *pattern, size_t length, base_err *err)
{
    base_buf text;
    base_buf_init(&text, 0);
    rewrite(&text, pattern, length);
    if (text.failed) {
        base_buf_deinit(&text);
        return base_fail(err, BASE_NOMEM, "pre_tokenizer: no memory");
    }
    int code;
    PCRE2_SIZE at;
    *out = pcre2_compile((PCRE2_SPTR)(text.data == NULL ? "" : text.data), text.length,
                         PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &at, NULL);
    base_buf_deinit(&text);
    if (*out == NULL) {
        char why[96];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        return base_fail(err, BASE_FORMAT, "pre_tokenizer: pattern: %s at %zu", why, (size_t)at);
    }
    pcre2_jit_compile(
        *out, PCRE2_JIT_COMPLETE); /* without it the interpreter runs: slower, the same splits */
    return BASE_OK;
}

static size_t give_up_piece(const char *text, size_t length)
{
    if (length <= GIVE_UP_PIECE)
        return length;
    size_t cut = GIVE_UP_PIECE;
    while (((unsigned char)text[cut] & 0xC0) == 0x80)
        cut--;
    return cut;
}

void tok_split_encode(tok_encoder *encoder, const char *text, size_t length)
{
    size_t at = 0;
    while (at < length && !encoder->out->failed) {
        int rc = pcre2_match(encoder->tok->split, (PCRE2_SPTR)text, length, at,
                             PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, encoder->match, NULL);
        size_t from = length, to = length;
        if (rc >= 0) {
            const PCRE2_SIZE *range = pcre2_get_ovector_pointer(encoder->match);
            from = range[0];
            to = range[1];
        } else if (rc != PCRE2_ERROR_NOMATCH) {
            from = at;
            to = at + give_up_piece(text + at, length - at);
        }
        if (from < at || to <= at || from > to) /* \K or a look-behind in an odd pattern */
            from = to = length;
        if (from > at)
            tok_merge(encoder, text + at, from - at);
        if (to > from)
            tok_merge(encoder, text + from, to - from);
        at = to;
    }
}
