/* Sets of numbers' texts as automata: bounds and multiples. */
#include <stdlib.h>

#include "engine/grammar_schema.h"

#define MULTIPLE_MAX 20000u

decimal *gr_decimal_of(schema *s, const dom *node, const char *keyword)
{
    decimal *d = gr_alloc(s->c, 1, sizeof *d);
    char digits[DIGITS_MAX];
    int32_t n = 0, point = -1, exponent = 0;
    if (node->kind != BASE_JSON_NUMBER)
        gr_wrong(s, BASE_INVALID, node->parent, keyword, "is no number");
    for (size_t i = 0; i < node->text.length; i++) {
        char ch = node->text.data[i];
        if (ch == '-') {
            d->negative = true;
        } else if (ch == '.') {
            point = n;
        } else if (ch == 'e' || ch == 'E') {
            exponent = (int32_t)strtol(node->text.data + i + 1, NULL, 10);
            break;
        } else if (n < DIGITS_MAX / 2) {
            digits[n++] = ch;
        } else {
            gr_wrong(s, BASE_UNSUPPORTED, node->parent, keyword, "has too many digits");
        }
    }
    point = point < 0 ? n : point;
    if (exponent > DIGITS_MAX / 2 || exponent < -DIGITS_MAX / 2)
        gr_wrong(s, BASE_UNSUPPORTED, node->parent, keyword, "has too many digits");
    point += exponent;
    for (int32_t i = point < 0 ? point : 0; i < n || i < point; i++) {
        char ch = i >= 0 && i < n ? digits[i] : '0';
        if (i >= point)
            d->part[d->part_count++] = ch;
        else if (ch != '0' || d->whole_count > 0)
            d->whole[d->whole_count++] = ch;
    }
    while (d->part_count > 0 && d->part[d->part_count - 1] == '0')
        d->part_count--;
    if (d->whole_count == 0)
        d->whole[d->whole_count++] = '0';
    if (d->part_count == 0 && d->whole_count == 1 && d->whole[0] == '0')
        d->negative = false;
    return d;
}

/* A number's text as it is read: where we are, how it compares so far, how many digits. */
enum { AT_START, AT_MINUS, AT_ZERO, AT_WHOLE, AT_POINT, AT_PART };
enum { EQUAL, LESS, GREATER };

typedef struct bound {
    const decimal *d;
    const char *op;
} bound;

static uint64_t number_key(uint32_t at, bool negative, uint32_t compared, uint32_t count)
{
    return (uint64_t)count << 8 | compared << 4 | (uint32_t)negative << 3 | at;
}

static uint32_t whole_compared(const decimal *d, uint32_t compared, uint32_t count)
{
    return count < d->whole_count ? LESS : count > d->whole_count ? GREATER : compared;
}

static uint64_t bound_step(const void *context, uint64_t key, char ch)
{
    const decimal *d = ((const bound *)context)->d;
    uint32_t at = key & 7, compared = key >> 4 & 3, count = (uint32_t)(key >> 8);
    bool negative = key >> 3 & 1;
    if (ch == '-')
        return at == AT_START ? number_key(AT_MINUS, true, EQUAL, 0) : UINT64_MAX;
    if (ch == '.') {
        if (at != AT_ZERO && at != AT_WHOLE)
            return UINT64_MAX;
        return number_key(AT_POINT, negative, whole_compared(d, compared, count), 0);
    }
    if (at == AT_ZERO)
        return UINT64_MAX;
    if (at <= AT_WHOLE) {
        if (compared == EQUAL && count < d->whole_count && ch != d->whole[count])
            compared = ch < d->whole[count] ? LESS : GREATER;
        bool zero = at != AT_WHOLE && ch == '0';
        if (count <= d->whole_count)
            count++;
        if (count > d->whole_count)
            compared = GREATER;
        return number_key(zero ? AT_ZERO : AT_WHOLE, negative, compared, count);
    }
    if (compared == EQUAL) {
        char want = count < d->part_count ? d->part[count] : '0';
        if (ch != want)
            compared = ch < want ? LESS : GREATER;
        count += count < d->part_count;
    }
    return number_key(AT_PART, negative, compared, compared == EQUAL ? count : 0);
}

static bool bound_accept(const void *context, uint64_t key)
{
    const bound *b = context;
    uint32_t at = key & 7, compared = key >> 4 & 3, count = (uint32_t)(key >> 8);
    bool negative = key >> 3 & 1;
    if (at != AT_ZERO && at != AT_WHOLE && at != AT_PART)
        return false;
    bool whole = at != AT_PART;
    if (whole)
        compared = whole_compared(b->d, compared, count);
    if (compared == EQUAL && (whole ? 0 : count) < b->d->part_count)
        compared = LESS;
    bool zero = b->d->part_count == 0 && b->d->whole_count == 1 && b->d->whole[0] == '0';
    if (negative && !b->d->negative)
        compared = zero && compared == EQUAL ? EQUAL : LESS;
    else if (!negative && b->d->negative)
        compared = GREATER;
    else if (negative && compared != EQUAL)
        compared = compared == LESS ? GREATER : LESS;
    return compared == EQUAL  ? strchr(b->op, '=') != NULL
           : compared == LESS ? b->op[0] == '<'
                              : b->op[0] == '>';
}

gr_dfa *gr_number_bound(schema *s, const decimal *d, const char *op)
{
    bound *b = gr_alloc(s->c, 1, sizeof *b);
    *b = (bound){d, op};
    return gr_dfa_walk(s->c, &(gr_walk){bound_step, bound_accept, b, "-.0123456789"},
                       number_key(AT_START, false, EQUAL, 0));
}

typedef struct multiple {
    uint64_t of;
    uint32_t places;
} multiple;

static uint64_t multiple_step(const void *context, uint64_t key, char ch)
{
    const multiple *m = context;
    uint32_t at = key & 7, count = key >> 3 & 31;
    uint64_t rest = key >> 8;
    if (ch == '-')
        return at == AT_START ? AT_MINUS : UINT64_MAX;
    if (ch == '.')
        return at == AT_ZERO || at == AT_WHOLE ? rest << 8 | AT_POINT : UINT64_MAX;
    if (at == AT_ZERO)
        return UINT64_MAX;
    if (at <= AT_WHOLE && at != AT_WHOLE && ch == '0')
        return AT_ZERO;
    if (at >= AT_POINT && count == m->places)
        return ch == '0' ? (rest << 8 | count << 3 | AT_PART) : UINT64_MAX;
    rest = (rest * 10 + (uint64_t)(ch - '0')) % m->of;
    return rest << 8 | (at >= AT_POINT ? (count + 1) << 3 | AT_PART : AT_WHOLE);
}

static bool multiple_accept(const void *context, uint64_t key)
{
    const multiple *m = context;
    uint32_t at = key & 7, count = key >> 3 & 31;
    uint64_t rest = key >> 8;
    for (uint32_t i = count; i < m->places; i++)
        rest = rest * 10 % m->of;
    return rest == 0 && (at == AT_ZERO || at == AT_WHOLE || at == AT_PART);
}

gr_dfa *gr_number_multiple(schema *s, const dom *node)
{
    decimal *d = gr_decimal_of(s, node, "multipleOf");
    multiple *m = gr_alloc(s->c, 1, sizeof *m);
    for (uint32_t i = 0; i < d->whole_count + d->part_count && m->of <= MULTIPLE_MAX; i++)
        m->of = m->of * 10 +
                (uint64_t)((i < d->whole_count ? d->whole[i] : d->part[i - d->whole_count]) - '0');
    m->places = d->part_count;
    if (d->negative || m->of == 0)
        gr_wrong(s, BASE_INVALID, node->parent, "multipleOf", "must be above 0");
    if (m->of > MULTIPLE_MAX || m->places > 20 || m->of * (m->places + 2) > MULTIPLE_MAX)
        gr_wrong(s, BASE_UNSUPPORTED, node->parent, "multipleOf", "%.*s needs too many states",
                 (int)node->text.length, node->text.data);
    return gr_dfa_walk(s->c, &(gr_walk){multiple_step, multiple_accept, m, "-.0123456789"},
                       AT_START);
}

gr_dfa *gr_pattern(schema *s, gr_dfa **kept, const char *text)
{
    if (*kept == NULL)
        *kept = gr_dfa_regex(s->c, text, strlen(text), true, "number", NULL);
    return *kept;
}

gr_dfa *gr_numbers(schema *s)
{
    return gr_pattern(s, &s->number, "-?(0|[1-9][0-9]*)(\\.[0-9]+)?");
}

gr_dfa *gr_integers(schema *s)
{
    return gr_pattern(s, &s->integer, "-?(0|[1-9][0-9]*)(\\.0+)?");
}
