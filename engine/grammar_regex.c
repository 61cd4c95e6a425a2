/* Regular expressions (ECMAScript's notation) as sets of strings.
 *
 * A pattern becomes an automaton with empty steps (Thompson), then a deterministic one by sets of
 * states. `^` is passed in the first closure only, `$` when acceptance is asked for. No text is
 * ever matched with backtracking. */
#include <stdlib.h>

#include "engine/base/utf8.h"
#include "engine/grammar_set.h"

#define NFA_MAX 60000u
#define GROUPS_MAX 64               /* nested */
#define COUNT_MAX GR_SET_STATES_MAX /* in braces; more have too many states anyway */

/* ---- patterns ---- */

typedef enum nfa_kind { EMPTY, CHARS, BEGIN, END, MATCH } nfa_kind;

typedef struct nfa_node {
    uint8_t kind;
    uint32_t a, b;         /* next ones; 0 is none */
    uint32_t first, count; /* CHARS: in sets */
} nfa_node;

typedef struct span {
    uint32_t lo, hi;
} span;

typedef struct spans {
    span *data;
    uint32_t count, capacity;
} spans;

typedef struct pattern {
    gr_compile *c;
    const char *text;
    size_t length, at;
    const char *keyword, *param;
    uint32_t depth;
    GR_VECTOR(nfa_node) nodes;
    spans sets;
} pattern;

typedef struct fragment {
    uint32_t start, end; /* `end` is an EMPTY node without a way on yet */
} fragment;

_Noreturn static void malformed(pattern *p, const char *what)
{
    gr_fail(p->c, BASE_INVALID, p->param, "%s: %s at byte %zu of the expression", p->keyword, what,
            p->at);
}

_Noreturn static void refused(pattern *p, const char *what)
{
    gr_fail(p->c, BASE_UNSUPPORTED, p->param, "%s cannot be enforced: %s at byte %zu", p->keyword,
            what, p->at);
}

static uint32_t node_add(pattern *p, nfa_kind kind)
{
    if (p->nodes.count >= NFA_MAX)
        gr_fail(p->c, BASE_TOO_LONG, p->param, "%s needs more than %u states", p->keyword, NFA_MAX);
    gr_work(p->c, 1);
    *gr_add(p->c, &p->nodes) = (nfa_node){.kind = (uint8_t)kind};
    return p->nodes.count - 1;
}

static fragment single(pattern *p, nfa_kind kind)
{
    fragment f = {node_add(p, kind), node_add(p, EMPTY)};
    p->nodes.data[f.start].a = f.end;
    return f;
}

static int by_lo(const void *pa, const void *pb)
{
    const span *a = pa, *b = pb;
    return a->lo < b->lo ? -1 : a->lo > b->lo;
}

static void normalise(gr_compile *c, spans *set, bool negate)
{
    uint32_t n = 0;
    if (set->count > 0)
        qsort(set->data, set->count, sizeof *set->data, by_lo);
    for (uint32_t i = 0; i < set->count; i++) {
        if (n > 0 && set->data[i].lo <= set->data[n - 1].hi + 1) {
            if (set->data[i].hi > set->data[n - 1].hi)
                set->data[n - 1].hi = set->data[i].hi;
        } else {
            set->data[n++] = set->data[i];
        }
    }
    set->count = n;
    if (!negate)
        return;
    spans rest = {0};
    uint32_t lo = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (set->data[i].lo > lo)
            *gr_add(c, &rest) = (span){lo, set->data[i].lo - 1};
        lo = set->data[i].hi + 1;
    }
    if (lo <= GR_CODE_MAX)
        *gr_add(c, &rest) = (span){lo, GR_CODE_MAX};
    *set = rest;
}

static fragment chars(pattern *p, spans *set)
{
    fragment f = single(p, CHARS);
    p->nodes.data[f.start].first = p->sets.count;
    p->nodes.data[f.start].count = set->count;
    for (uint32_t i = 0; i < set->count; i++)
        *gr_add(p->c, &p->sets) = set->data[i];
    return f;
}

static bool more(const pattern *p)
{
    return p->at < p->length;
}

static bool eat(pattern *p, const char *what)
{
    size_t n = strlen(what);
    if (p->length - p->at < n || memcmp(p->text + p->at, what, n) != 0)
        return false;
    p->at += n;
    return true;
}

static uint32_t next_char(pattern *p)
{
    uint32_t code;
    size_t n = base_utf8_char(p->text + p->at, p->length - p->at, &code);
    if (n == 0)
        malformed(p, "no valid UTF-8");
    p->at += n;
    return code;
}

static bool hex(pattern *p, uint32_t digits, uint32_t *out)
{
    uint32_t value = 0;
    if (p->length - p->at < digits)
        return false;
    for (uint32_t i = 0; i < digits; i++) {
        char ch = p->text[p->at + i];
        uint32_t d = ch >= '0' && ch <= '9'   ? (uint32_t)(ch - '0')
                     : ch >= 'a' && ch <= 'f' ? (uint32_t)(ch - 'a' + 10)
                     : ch >= 'A' && ch <= 'F' ? (uint32_t)(ch - 'A' + 10)
                                              : 16;
        if (d == 16)
            return false;
        value = value * 16 + d;
    }
    p->at += digits;
    *out = value;
    return true;
}

static void set_add(pattern *p, spans *set, uint32_t lo, uint32_t hi)
{
    *gr_add(p->c, set) = (span){lo, hi};
}

/* After a backslash: true for a class (added to `set`), false for one character in *code. */
static bool escape(pattern *p, spans *set, uint32_t *code, bool in_class)
{
    static const span spaces[] = {
        {9, 13},          {32, 32},         {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
        {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
    if (!more(p))
        malformed(p, "an escape without a character");
    uint32_t ch = next_char(p);
    spans class = {0};
    switch (ch) {
    case 'd':
    case 'D':
        set_add(p, &class, '0', '9');
        break;
    case 'w':
    case 'W':
        set_add(p, &class, '0', '9');
        set_add(p, &class, 'A', 'Z');
        set_add(p, &class, '_', '_');
        set_add(p, &class, 'a', 'z');
        break;
    case 's':
    case 'S':
        for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++)
            set_add(p, &class, spaces[i].lo, spaces[i].hi);
        break;
    case 'n':
        *code = '\n';
        return false;
    case 't':
        *code = '\t';
        return false;
    case 'r':
        *code = '\r';
        return false;
    case 'f':
        *code = '\f';
        return false;
    case 'v':
        *code = '\v';
        return false;
    case 'b':
    case 'B':
        if (ch == 'B' || !in_class)
            refused(p, "word boundaries");
        *code = '\b';
        return false;
    case 'c':
        if (!more(p) || !gr_class_has(GR_CLASS_WORD, (uint8_t)p->text[p->at]))
            malformed(p, "\\c without a letter");
        *code = next_char(p) % 32;
        return false;
    case 'x':
        if (!hex(p, 2, code))
            malformed(p, "\\x without two hex digits");
        return false;
    case 'u':
        if (eat(p, "{")) {
            *code = 0;
            uint32_t digit;
            while (*code <= GR_CODE_MAX && hex(p, 1, &digit))
                *code = *code * 16 + digit;
            if (!eat(p, "}") || *code > GR_CODE_MAX)
                malformed(p, "\\u{ without a code point");
        } else if (!hex(p, 4, code)) {
            malformed(p, "\\u without four hex digits");
        }
        if (*code >= 0xD800 && *code <= 0xDBFF) {
            uint32_t low;
            if (!eat(p, "\\u") || !hex(p, 4, &low) || low < 0xDC00 || low > 0xDFFF)
                refused(p, "half a surrogate pair");
            *code = 0x10000 + ((*code - 0xD800) << 10) + (low - 0xDC00);
        }
        return false;
    case 'p':
    case 'P':
        refused(p, "Unicode properties");
    case '0':
        *code = 0;
        return false;
    case 'k':
        refused(p, "back references");
    default:
        if (ch >= '1' && ch <= '9')
            refused(p, "back references");
        if (ch >= 'A' && ch < 0x80 && gr_class_has(GR_CLASS_WORD, (uint8_t)ch))
            malformed(p, "an unknown escape");
        *code = ch;
        return false;
    }
    normalise(p->c, &class, ch < 'a');
    for (uint32_t i = 0; i < class.count; i++)
        set_add(p, set, class.data[i].lo, class.data[i].hi);
    return true;
}

static fragment bracket(pattern *p)
{
    spans set = {0};
    bool negate = eat(p, "^");
    while (!eat(p, "]")) {
        uint32_t lo, hi;
        if (!more(p))
            malformed(p, "a class without its end");
        bool class = eat(p, "\\") ? escape(p, &set, &lo, true) : (lo = next_char(p), false);
        if (p->at + 1 < p->length && p->text[p->at] == '-' && p->text[p->at + 1] != ']') {
            size_t dash = p->at++;
            bool second = eat(p, "\\") ? escape(p, &set, &hi, true) : (hi = next_char(p), false);
            if (!class && !second) {
                if (hi < lo) {
                    p->at = dash;
                    malformed(p, "a range out of order");
                }
                set_add(p, &set, lo, hi);
                continue;
            }
            set_add(p, &set, '-', '-');
            if (!second)
                set_add(p, &set, hi, hi);
        }
        if (!class)
            set_add(p, &set, lo, lo);
    }
    normalise(p->c, &set, negate);
    return chars(p, &set);
}

static fragment alternatives(pattern *p);

static fragment atom(pattern *p)
{
    spans set = {0};
    uint32_t code;
    if (eat(p, "^"))
        return single(p, BEGIN);
    if (eat(p, "$"))
        return single(p, END);
    if (eat(p, "[" /* ] */))
        return bracket(p);
    if (eat(p, ".")) {
        set_add(p, &set, '\n', '\n');
        set_add(p, &set, '\r', '\r');
        set_add(p, &set, 0x2028, 0x2029);
        normalise(p->c, &set, true);
        return chars(p, &set);
    }
    if (eat(p, "(")) {
        if (eat(p, "?")) {
            if (eat(p, "=") || eat(p, "!") || eat(p, "<=") || eat(p, "<!"))
                refused(p, "look-around");
            if (eat(p, "<")) {
                while (more(p) && p->text[p->at] != '>')
                    p->at++;
                if (!eat(p, ">"))
                    malformed(p, "a group's name without its end");
            } else if (!eat(p, ":")) {
                refused(p, "flags of a group");
            }
        }
        if (++p->depth > GROUPS_MAX)
            malformed(p, "groups nested too deep");
        fragment f = alternatives(p);
        p->depth--;
        if (!eat(p, ")"))
            malformed(p, "a group without its end");
        return f;
    }
    if (eat(p, "\\")) {
        if (!escape(p, &set, &code, false))
            set_add(p, &set, code, code);
        return chars(p, &set);
    }
    if (strchr("*+?)", p->text[p->at]) != NULL)
        malformed(p, "nothing to repeat, or a lone )");
    code = next_char(p);
    set_add(p, &set, code, code);
    return chars(p, &set);
}

/* {n}, {n,} or {n,m}; anything else is text. */
static bool counts(pattern *p, uint32_t *min, uint32_t *max)
{
    size_t at = p->at;
    uint64_t n[2] = {0, 0};
    bool digits[2] = {false, false}, comma = false;
    if (!more(p) || p->text[at] != '{')
        return false;
    for (at++; at < p->length && p->text[at] != '}'; at++) {
        if (p->text[at] == ',' && !comma && digits[0]) {
            comma = true;
        } else if (p->text[at] >= '0' && p->text[at] <= '9') {
            digits[comma] = true;
            n[comma] = n[comma] * 10 + (uint64_t)(p->text[at] - '0');
            if (n[comma] > COUNT_MAX)
                n[comma] = COUNT_MAX;
        } else {
            return false;
        }
    }
    if (at == p->length || !digits[0])
        return false;
    p->at = at + 1;
    *min = (uint32_t)n[0];
    *max = !comma ? *min : digits[1] ? (uint32_t)n[1] : GR_INFINITE;
    if (*max < *min)
        malformed(p, "a count out of order");
    return true;
}

static void join(pattern *p, fragment *whole, fragment next)
{
    p->nodes.data[whole->end].a = next.start;
    whole->end = next.end;
}

static void optional(pattern *p, fragment *f)
{
    uint32_t start = node_add(p, EMPTY);
    p->nodes.data[start].a = f->start;
    p->nodes.data[start].b = f->end;
    f->start = start;
}

static fragment repeated(pattern *p)
{
    size_t begin = p->at;
    fragment f = atom(p);
    uint32_t min = 1, max = 1;
    if (eat(p, "*")) {
        min = 0;
        max = GR_INFINITE;
    } else if (eat(p, "+")) {
        max = GR_INFINITE;
    } else if (eat(p, "?")) {
        min = 0;
    } else if (!counts(p, &min, &max)) {
        return f;
    }
    eat(p, "?"); /* lazy: the same texts */
    size_t after = p->at;
    if (max == 0)
        return single(p, EMPTY);
    /* Each copy is read anew from the text; the first one is there. */
    fragment whole = single(p, EMPTY);
    uint32_t copies = max == GR_INFINITE ? (min > 0 ? min : 1) : max;
    uint32_t skip = node_add(p, EMPTY); /* where the optional ones leave */
    for (uint32_t i = 0; i < copies; i++) {
        if (i > 0) {
            p->at = begin;
            f = atom(p);
        }
        if (max == GR_INFINITE && i == copies - 1) {
            uint32_t again = node_add(p, EMPTY);
            p->nodes.data[f.end].a = again;
            p->nodes.data[again].a = f.start;
            uint32_t out = node_add(p, EMPTY);
            p->nodes.data[again].b = out;
            f.end = out;
            if (min == 0)
                optional(p, &f);
        } else if (i >= min) {
            uint32_t start = node_add(p, EMPTY);
            p->nodes.data[start].a = f.start;
            p->nodes.data[start].b = skip;
            f.start = start;
        }
        join(p, &whole, f);
    }
    p->nodes.data[whole.end].a = skip;
    whole.end = skip;
    p->at = after;
    return whole;
}

static fragment alternatives(pattern *p)
{
    fragment all = {0, 0};
    do {
        fragment one = single(p, EMPTY);
        while (more(p) && p->text[p->at] != '|' && p->text[p->at] != ')')
            join(p, &one, repeated(p));
        if (all.start == 0) {
            all = one;
        } else {
            uint32_t start = node_add(p, EMPTY), end = node_add(p, EMPTY);
            p->nodes.data[start].a = all.start;
            p->nodes.data[start].b = one.start;
            p->nodes.data[all.end].a = end;
            p->nodes.data[one.end].a = end;
            all = (fragment){start, end};
        }
    } while (eat(p, "|"));
    return all;
}

/* ---- from sets of states ---- */

typedef struct subsets {
    pattern *p;
    uint32_t *mark; /* [nodes] */
    uint32_t round;
    uint32_t *todo;
    GR_VECTOR(uint32_t) members; /* of all sets, one after the other */
    GR_VECTOR(uint32_t) first;
    uint32_t *slots, size;
    bool whole;
} subsets;

static int by_number(const void *pa, const void *pb)
{
    uint32_t a = *(const uint32_t *)pa, b = *(const uint32_t *)pb;
    return a < b ? -1 : a > b;
}

/* Follows empty steps from `todo[..count]`; appends what reads, ends or matches to `members`.
 * True if the match is reached. */
static bool closure(subsets *s, uint32_t count, bool begin, bool end, bool keep)
{
    pattern *p = s->p;
    bool match = false;
    s->round++;
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++)
        if (s->mark[s->todo[i]] != s->round) {
            s->mark[s->todo[i]] = s->round;
            s->todo[n++] = s->todo[i];
        }
    while (n > 0) {
        uint32_t at = s->todo[--n];
        nfa_node *node = &p->nodes.data[at];
        gr_work(p->c, 1);
        match = match || node->kind == MATCH;
        bool through =
            node->kind == EMPTY || (node->kind == BEGIN && begin) || (node->kind == END && end);
        if (keep && (node->kind == CHARS || node->kind == MATCH || node->kind == END))
            *gr_add(p->c, &s->members) = at;
        uint32_t ways[2] = {node->a, node->b};
        for (uint32_t k = 0; through && k < 2; k++)
            if (ways[k] != 0 && s->mark[ways[k]] != s->round) {
                s->mark[ways[k]] = s->round;
                s->todo[n++] = ways[k];
            }
    }
    return match;
}

/* The number of the set that was appended to `members` last; GR_NOWHERE if it is empty. */
static uint32_t subset(subsets *s, uint32_t from)
{
    gr_compile *c = s->p->c;
    uint32_t *set = s->members.data + from, n = s->members.count - from;
    if (n == 0)
        return GR_NOWHERE;
    qsort(set, n, sizeof *set, by_number);
    /* Behind a match that need not be the end everything is accepted, whatever else is open. */
    for (uint32_t i = 0; !s->whole && i < n; i++)
        if (s->p->nodes.data[set[i]].kind == MATCH) {
            set[0] = set[i];
            s->members.count = from + 1;
            n = 1;
        }
    gr_work(c, n);
    if (s->first.count * 2 >= s->size) {
        uint32_t *old = s->slots, old_size = s->size;
        s->size = old_size == 0 ? 64 : old_size * 2;
        s->slots = gr_alloc(c, 2 * s->size, sizeof *s->slots); /* pairs: 1 + number, hash */
        for (uint32_t i = 0; i < old_size; i++)
            if (old[2 * i] != 0) {
                uint32_t at = old[2 * i + 1] & (s->size - 1);
                while (s->slots[2 * at] != 0)
                    at = (at + 1) & (s->size - 1);
                s->slots[2 * at] = old[2 * i];
                s->slots[2 * at + 1] = old[2 * i + 1];
            }
    }
    uint32_t hash = n;
    for (uint32_t i = 0; i < n; i++)
        hash = (hash ^ set[i]) * 0x9E3779B1u, hash ^= hash >> 15;
    uint32_t at = hash & (s->size - 1);
    for (; s->slots[2 * at] != 0; at = (at + 1) & (s->size - 1)) {
        uint32_t old = s->slots[2 * at] - 1;
        uint32_t end = old + 1 < s->first.count ? s->first.data[old + 1] : from;
        if (s->slots[2 * at + 1] == hash && end - s->first.data[old] == n &&
            memcmp(s->members.data + s->first.data[old], set, n * sizeof *set) == 0) {
            s->members.count = from;
            return old;
        }
    }
    s->slots[2 * at] = s->first.count + 1;
    s->slots[2 * at + 1] = hash;
    *gr_add(c, &s->first) = from;
    return s->first.count - 1;
}

static gr_dfa *determinise(pattern *p, uint32_t start, bool whole)
{
    gr_compile *c = p->c;
    subsets s = {.p = p, .whole = whole};
    gr_set b = {0};
    s.mark = gr_alloc(c, p->nodes.count, sizeof *s.mark);
    s.todo = gr_alloc(c, p->nodes.count + 1, sizeof *s.todo);
    s.todo[0] = start;
    closure(&s, 1, true, false, true);
    if (subset(&s, 0) == GR_NOWHERE)
        return gr_set_finish(c, &b);
    spans cuts = {0};
    for (uint32_t state = 0; state < s.first.count; state++) {
        uint32_t from = s.first.data[state];
        uint32_t end = state + 1 < s.first.count ? s.first.data[state + 1] : s.members.count;
        memcpy(s.todo, s.members.data + from, (end - from) * sizeof *s.todo);
        bool match = closure(&s, end - from, state == 0, true, false);
        gr_set_state(c, &b, match);
        if (!whole && p->nodes.data[s.members.data[from]].kind == MATCH) {
            gr_set_range(c, &b, 0, GR_CODE_MAX, state);
            continue;
        }
        /* Every place where some member's set begins or ends cuts the line of code points. */
        cuts.count = 0;
        for (uint32_t i = from; i < end; i++) {
            const nfa_node *node = &p->nodes.data[s.members.data[i]];
            for (uint32_t k = 0; node->kind == CHARS && k < node->count; k++) {
                span r = p->sets.data[node->first + k];
                *gr_add(c, &cuts) = (span){r.lo, 0};
                *gr_add(c, &cuts) = (span){r.hi + 1, 0};
            }
        }
        gr_work(c, cuts.count);
        if (cuts.count > 0)
            qsort(cuts.data, cuts.count, sizeof *cuts.data, by_lo);
        for (uint32_t k = 0; k + 1 < cuts.count; k++) {
            uint32_t lo = cuts.data[k].lo, hi = cuts.data[k + 1].lo, n = 0;
            if (lo == hi)
                continue;
            for (uint32_t i = from; i < end; i++) {
                const nfa_node *node = &p->nodes.data[s.members.data[i]];
                for (uint32_t q = 0; node->kind == CHARS && q < node->count; q++)
                    if (p->sets.data[node->first + q].lo <= lo &&
                        p->sets.data[node->first + q].hi >= lo) {
                        s.todo[n++] = node->a;
                        break;
                    }
                gr_work(c, 1);
            }
            uint32_t at = s.members.count;
            closure(&s, n, false, false, true);
            uint32_t to = subset(&s, at);
            if (to != GR_NOWHERE)
                gr_set_range(c, &b, lo, hi - 1, to);
        }
    }
    return gr_set_finish(c, &b);
}

/* The end of the group that starts at `at`, 0 if there is none. */
static size_t group_end(const char *text, size_t length, size_t at)
{
    uint32_t depth = 0;
    bool class = false;
    for (; at < length; at++) {
        if (text[at] == '\\')
            at++;
        else if (class)
            class = text[at] != ']';
        else if (text[at] == '[')
            class = true;
        else if (text[at] == '(')
            depth++;
        else if (text[at] == ')' && --depth == 0)
            return at + 1;
    }
    return 0;
}

static bool has_bar(const char *text, size_t length)
{
    for (size_t at = 0; at < length; at++) {
        if (text[at] == '|')
            return true;
        if (text[at] == '(') {
            size_t end = group_end(text, length, at);
            if (end == 0)
                return false;
            at = end - 1;
        } else if (text[at] == '\\') {
            at++;
        } else if (text[at] == '[') {
            for (at++; at < length && text[at] != ']'; at++)
                at += text[at] == '\\';
        }
    }
    return false;
}

static gr_dfa *plain_regex(gr_compile *c, const char *text, size_t length, bool anchored,
                           bool whole, const char *keyword, const char *param)
{
    pattern *p = gr_alloc(c, 1, sizeof *p);
    *p = (pattern){.c = c, .text = text, .length = length, .keyword = keyword, .param = param};
    node_add(p, EMPTY); /* 0 is none */
    fragment f = alternatives(p);
    if (more(p))
        malformed(p, "a lone )");
    uint32_t match = node_add(p, MATCH), start = f.start;
    p->nodes.data[f.end].a = match;
    if (!whole && !anchored) {
        spans set = {0};
        set_add(p, &set, 0, GR_CODE_MAX);
        fragment skip = chars(p, &set);
        start = node_add(p, EMPTY);
        p->nodes.data[start].a = f.start;
        p->nodes.data[start].b = skip.start;
        p->nodes.data[skip.end].a = start;
    }
    return determinise(p, start, whole);
}

gr_dfa *gr_dfa_regex(gr_compile *c, const char *text, size_t length, bool whole,
                     const char *keyword, const char *param)
{
    /* Look-ahead right behind `^` is a set of its own: the text is in it, or it is not. */
    size_t at = length > 0 && text[0] == '^';
    gr_dfa *rest = NULL, *ahead[16];
    bool negative[16];
    uint32_t count = 0;
    if (at == 1 || whole)
        while (count < 16 && length - at > 3 && text[at] == '(' && text[at + 1] == '?' &&
               (text[at + 2] == '=' || text[at + 2] == '!')) {
            size_t end = group_end(text, length, at);
            if (end == 0 || has_bar(text + at, length - at))
                break;
            negative[count] = text[at + 2] == '!';
            ahead[count++] =
                plain_regex(c, text + at + 3, end - at - 4, true, false, keyword, param);
            at = end;
        }
    if (count == 0)
        return plain_regex(c, text, length, false, whole, keyword, param);
    rest = plain_regex(c, text + at, length - at, true, whole, keyword, param);
    for (uint32_t i = 0; i < count; i++)
        rest = gr_dfa_op(c, rest, ahead[i], negative[i] ? GR_MINUS : GR_AND);
    return rest;
}

/* ---- entry points ---- */

uint32_t gr_set_rule(gr_compile *c, const gr_dfa *dfa)
{
    uint32_t rule = gr_rule_add(c), end = gr_node_add(c, GR_RETURN, 0, 0, 0);
    uint32_t start = gr_dfa_lower(c, dfa, false, end);
    c->g->rules.data[rule].start = start;
    return rule;
}

static uint32_t regex_body(gr_compile *c, void *context)
{
    const gr_text *text = context;
    return gr_set_rule(c, gr_dfa_regex(c, text->data, text->length, true, "regex", "regex"));
}

typedef struct choices {
    const char *const *texts;
    const size_t *lengths;
    size_t count;
} choices;

static uint32_t choice_body(gr_compile *c, void *context)
{
    const choices *from = context;
    gr_text *texts = gr_alloc(c, from->count, sizeof *texts);
    for (size_t i = 0; i < from->count; i++)
        texts[i] = (gr_text){from->texts[i], from->lengths[i]};
    return gr_set_rule(c, gr_dfa_texts(c, texts, from->count));
}

base_code eng_grammar_regex(eng_grammar **out, const char *text, size_t length,
                            const eng_grammar_options *options, base_err *err)
{
    gr_text source = {text, length};
    return gr_compile_run(out, regex_body, &source, options, err);
}

base_code eng_grammar_choice(eng_grammar **out, const char *const *texts, const size_t *lengths,
                             size_t count, const eng_grammar_options *options, base_err *err)
{
    choices from = {texts, lengths, count};
    return gr_compile_run(out, choice_body, &from, options, err);
}
