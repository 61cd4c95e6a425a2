/* Sets of strings as deterministic automata over code points: from regular expressions, lists and
 * walks; their product, and their way into the graph.
 *
 * A pattern becomes an automaton with empty steps (Thompson), then a deterministic one by sets of
 * states. `^` is passed in the first closure only, `$` when acceptance is asked for. An automaton
 * is trimmed to the states that reach an end, so what is lowered into the graph has no dead ends.
 * The states of each are bounded; no text is ever matched with backtracking. */
#include <stdlib.h>

#include "engine/base/utf8.h"
#include "engine/grammar_internal.h"

#define CODE_MAX 0x10FFFFu
#define STATES_MAX 40000u
#define NFA_MAX 60000u
#define GROUPS_MAX 64 /* nested */
#define NOWHERE UINT32_MAX

/* As gr_push, in the arena. */
#define add(c, vector)                                                                             \
    (grow((c), (void **)&(vector)->data, &(vector)->count, &(vector)->capacity,                    \
          sizeof *(vector)->data),                                                                 \
     &(vector)->data[(vector)->count - 1])

static void grow(gr_compile *c, void **data, uint32_t *count, uint32_t *capacity, size_t size)
{
    if (*count == *capacity) {
        uint32_t more = *capacity == 0 ? 16 : *capacity * 2;
        void *grown = gr_alloc(c, more, size);
        if (*count > 0)
            memcpy(grown, *data, *count * size);
        *data = grown;
        *capacity = more;
    }
    ++*count;
}

/* ---- building ---- */

typedef struct builder {
    GR_VECTOR(uint32_t) first;
    GR_VECTOR(gr_range) ranges;
    GR_VECTOR(bool) accept;
} builder;

/* States are built in the order of their numbers. */
static void state_begin(gr_compile *c, builder *b, bool accept)
{
    gr_work(c, 1);
    if (b->first.count >= STATES_MAX)
        gr_fail(c, BASE_TOO_LONG, NULL, "a set of strings needs more than %u states", STATES_MAX);
    *add(c, &b->first) = b->ranges.count;
    *add(c, &b->accept) = accept;
}

static void range_add(gr_compile *c, builder *b, uint32_t lo, uint32_t hi, uint32_t to)
{
    uint32_t n = b->ranges.count;
    gr_work(c, 1);
    if (n > b->first.data[b->first.count - 1] && b->ranges.data[n - 1].to == to &&
        b->ranges.data[n - 1].hi + 1 == lo) {
        b->ranges.data[n - 1].hi = hi;
        return;
    }
    *add(c, &b->ranges) = (gr_range){lo, hi, to};
}

static gr_dfa *finish(gr_compile *c, builder *b)
{
    uint32_t count = b->first.count, kept = 0;
    *add(c, &b->first) = b->ranges.count;
    bool *live = gr_alloc(c, count, sizeof *live);
    uint32_t *renamed = gr_alloc(c, count, sizeof *renamed);
    for (bool changed = true; changed;) {
        changed = false;
        gr_work(c, count);
        for (uint32_t s = count; s-- > 0;) {
            bool is = b->accept.data[s];
            for (uint32_t i = b->first.data[s]; !is && !live[s] && i < b->first.data[s + 1]; i++)
                is = live[b->ranges.data[i].to];
            if (is && !live[s])
                live[s] = changed = true;
        }
    }
    gr_dfa *dfa = gr_alloc(c, 1, sizeof *dfa);
    if (count == 0 || !live[0])
        return dfa;
    for (uint32_t s = 0; s < count; s++)
        renamed[s] = live[s] ? kept++ : NOWHERE;
    dfa->count = kept;
    dfa->first = gr_alloc(c, kept + 1, sizeof *dfa->first);
    dfa->accept = gr_alloc(c, kept, sizeof *dfa->accept);
    dfa->ranges = gr_alloc(c, b->ranges.count, sizeof *dfa->ranges);
    uint32_t at = 0;
    for (uint32_t s = 0; s < count; s++) {
        if (!live[s])
            continue;
        dfa->first[renamed[s]] = at;
        dfa->accept[renamed[s]] = b->accept.data[s];
        for (uint32_t i = b->first.data[s]; i < b->first.data[s + 1]; i++) {
            gr_range r = b->ranges.data[i];
            if (live[r.to])
                dfa->ranges[at++] = (gr_range){r.lo, r.hi, renamed[r.to]};
        }
    }
    dfa->first[kept] = at;
    return dfa;
}

/* A table from 64-bit keys to state numbers, in the order of first use. */
typedef struct numbers {
    GR_VECTOR(uint64_t) keys;
    uint32_t *slots; /* 1 + index */
    uint32_t size;
} numbers;

static uint32_t slot_of(const numbers *n, uint64_t key)
{
    uint32_t at = (uint32_t)((key * 0x9E3779B97F4A7C15u) >> 33) & (n->size - 1);
    while (n->slots[at] != 0 && n->keys.data[n->slots[at] - 1] != key)
        at = (at + 1) & (n->size - 1);
    return at;
}

static uint32_t number_of(gr_compile *c, numbers *n, uint64_t key)
{
    if (n->keys.count * 2 >= n->size) {
        n->size = n->size == 0 ? 32 : n->size * 2;
        n->slots = gr_alloc(c, n->size, sizeof *n->slots);
        for (uint32_t i = 0; i < n->keys.count; i++)
            n->slots[slot_of(n, n->keys.data[i])] = i + 1;
    }
    uint32_t at = slot_of(n, key);
    if (n->slots[at] == 0) {
        if (n->keys.count > STATES_MAX)
            gr_fail(c, BASE_TOO_LONG, NULL, "a set of strings needs more than %u states",
                    STATES_MAX);
        *add(c, &n->keys) = key;
        n->slots[at] = n->keys.count;
    }
    return n->slots[at] - 1;
}

/* ---- sets ---- */

gr_dfa *gr_dfa_all(gr_compile *c)
{
    return gr_dfa_length(c, 0, GR_INFINITE);
}

gr_dfa *gr_dfa_length(gr_compile *c, uint32_t min, uint32_t max)
{
    builder b = {0};
    uint32_t last = max == GR_INFINITE ? min : max;
    if (last >= STATES_MAX)
        gr_fail(c, BASE_TOO_LONG, NULL, "a length of %u is too long to combine", last);
    for (uint32_t s = 0; s <= last; s++) {
        state_begin(c, &b, s >= min);
        if (s < last || max == GR_INFINITE)
            range_add(c, &b, 0, CODE_MAX, s < last ? s + 1 : s);
    }
    return finish(c, &b);
}

gr_dfa *gr_dfa_op(gr_compile *c, const gr_dfa *x, const gr_dfa *y, gr_op op)
{
    builder b = {0};
    numbers n = {0};
    if (x->count == 0 && (y->count == 0 || op != GR_OR))
        return finish(c, &b);
    number_of(c, &n, (uint64_t)(x->count > 0 ? 0 : NOWHERE) << 32 | (y->count > 0 ? 0 : NOWHERE));
    for (uint32_t s = 0; s < n.keys.count; s++) {
        uint32_t sx = (uint32_t)(n.keys.data[s] >> 32), sy = (uint32_t)n.keys.data[s];
        bool ax = sx != NOWHERE && x->accept[sx], ay = sy != NOWHERE && y->accept[sy];
        state_begin(c, &b, op == GR_AND ? ax && ay : op == GR_OR ? ax || ay : ax && !ay);
        uint32_t i = sx == NOWHERE ? 0 : x->first[sx], i_end = sx == NOWHERE ? 0 : x->first[sx + 1];
        uint32_t k = sy == NOWHERE ? 0 : y->first[sy], k_end = sy == NOWHERE ? 0 : y->first[sy + 1];
        for (uint32_t lo = 0; lo <= CODE_MAX;) {
            while (i < i_end && x->ranges[i].hi < lo)
                i++;
            while (k < k_end && y->ranges[k].hi < lo)
                k++;
            if (i == i_end && (k == k_end || op != GR_OR))
                break;
            uint32_t hi = CODE_MAX, tx = NOWHERE, ty = NOWHERE;
            if (i < i_end && x->ranges[i].lo <= lo) {
                tx = x->ranges[i].to;
                hi = x->ranges[i].hi;
            } else if (i < i_end) {
                hi = x->ranges[i].lo - 1;
            }
            if (k < k_end && y->ranges[k].lo <= lo) {
                ty = y->ranges[k].to;
                hi = y->ranges[k].hi < hi ? y->ranges[k].hi : hi;
            } else if (k < k_end && y->ranges[k].lo - 1 < hi) {
                hi = y->ranges[k].lo - 1;
            }
            bool on = op == GR_AND  ? tx != NOWHERE && ty != NOWHERE
                      : op == GR_OR ? tx != NOWHERE || ty != NOWHERE
                                    : tx != NOWHERE;
            if (on)
                range_add(c, &b, lo, hi, number_of(c, &n, (uint64_t)tx << 32 | ty));
            gr_work(c, 1);
            lo = hi + 1;
        }
    }
    return finish(c, &b);
}

static int by_text(const void *pa, const void *pb)
{
    const gr_text *a = pa, *b = pb;
    size_t n = a->length < b->length ? a->length : b->length;
    int d = n > 0 ? memcmp(a->data, b->data, n) : 0;
    return d != 0 ? d : a->length < b->length ? -1 : a->length > b->length;
}

gr_dfa *gr_dfa_texts(gr_compile *c, const gr_text *texts, size_t count)
{
    /* A state is a run of the sorted texts that share their first `depth` bytes. */
    typedef struct run {
        uint32_t first, end;
        size_t depth;
    } run;
    struct {
        run *data;
        uint32_t count, capacity;
    } runs = {0};
    builder b = {0};
    if (count == 0)
        return finish(c, &b);
    gr_text *sorted = gr_alloc(c, count, sizeof *sorted);
    memcpy(sorted, texts, count * sizeof *sorted);
    gr_work(c, count);
    qsort(sorted, count, sizeof *sorted, by_text);
    *add(c, &runs) = (run){0, (uint32_t)count, 0};
    for (uint32_t s = 0; s < runs.count; s++) {
        run r = runs.data[s];
        uint32_t i = r.first;
        while (i < r.end && sorted[i].length == r.depth)
            i++;
        state_begin(c, &b, i > r.first);
        while (i < r.end) {
            uint32_t code, first = i;
            size_t n = base_utf8_char(sorted[i].data + r.depth, sorted[i].length - r.depth, &code);
            if (n == 0)
                gr_fail(c, BASE_INVALID, NULL, "a text is not valid UTF-8");
            while (i < r.end && sorted[i].length >= r.depth + n &&
                   memcmp(sorted[i].data + r.depth, sorted[first].data + r.depth, n) == 0)
                i++;
            range_add(c, &b, code, code, runs.count);
            *add(c, &runs) = (run){first, i, r.depth + n};
        }
    }
    return finish(c, &b);
}

bool gr_dfa_has(const gr_dfa *dfa, const char *text, size_t length)
{
    uint32_t s = 0, code;
    if (dfa->count == 0)
        return false;
    for (size_t at = 0, n; at < length; at += n) {
        n = base_utf8_char(text + at, length - at, &code);
        uint32_t i = dfa->first[s];
        while (i < dfa->first[s + 1] && dfa->ranges[i].hi < code)
            i++;
        if (n == 0 || i == dfa->first[s + 1] || dfa->ranges[i].lo > code)
            return false;
        s = dfa->ranges[i].to;
    }
    return dfa->accept[s];
}

gr_dfa *gr_dfa_walk(gr_compile *c, const gr_walk *walk, uint64_t start)
{
    builder b = {0};
    numbers n = {0};
    number_of(c, &n, start);
    for (uint32_t s = 0; s < n.keys.count; s++) {
        state_begin(c, &b, walk->accept(walk->context, n.keys.data[s]));
        for (const char *ch = walk->alphabet; *ch != '\0'; ch++) {
            uint64_t key = walk->step(walk->context, n.keys.data[s], *ch);
            gr_work(c, 1);
            if (key != UINT64_MAX)
                range_add(c, &b, (uint8_t)*ch, (uint8_t)*ch, number_of(c, &n, key));
        }
    }
    return finish(c, &b);
}

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
    *add(p->c, &p->nodes) = (nfa_node){.kind = (uint8_t)kind};
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
            *add(c, &rest) = (span){lo, set->data[i].lo - 1};
        lo = set->data[i].hi + 1;
    }
    if (lo <= CODE_MAX)
        *add(c, &rest) = (span){lo, CODE_MAX};
    *set = rest;
}

static fragment chars(pattern *p, spans *set)
{
    fragment f = single(p, CHARS);
    p->nodes.data[f.start].first = p->sets.count;
    p->nodes.data[f.start].count = set->count;
    for (uint32_t i = 0; i < set->count; i++)
        *add(p->c, &p->sets) = set->data[i];
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
    *add(p->c, set) = (span){lo, hi};
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
            while (*code <= CODE_MAX && hex(p, 1, &digit))
                *code = *code * 16 + digit;
            if (!eat(p, "}") || *code > CODE_MAX)
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
            if (n[comma] > STATES_MAX)
                n[comma] = STATES_MAX;
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
            *add(p->c, &s->members) = at;
        uint32_t ways[2] = {node->a, node->b};
        for (uint32_t k = 0; through && k < 2; k++)
            if (ways[k] != 0 && s->mark[ways[k]] != s->round) {
                s->mark[ways[k]] = s->round;
                s->todo[n++] = ways[k];
            }
    }
    return match;
}

/* The number of the set that was appended to `members` last; NOWHERE if it is empty. */
static uint32_t subset(subsets *s, uint32_t from)
{
    gr_compile *c = s->p->c;
    uint32_t *set = s->members.data + from, n = s->members.count - from;
    if (n == 0)
        return NOWHERE;
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
    *add(c, &s->first) = from;
    return s->first.count - 1;
}

static gr_dfa *determinise(pattern *p, uint32_t start, bool whole)
{
    gr_compile *c = p->c;
    subsets s = {.p = p, .whole = whole};
    builder b = {0};
    s.mark = gr_alloc(c, p->nodes.count, sizeof *s.mark);
    s.todo = gr_alloc(c, p->nodes.count + 1, sizeof *s.todo);
    s.todo[0] = start;
    closure(&s, 1, true, false, true);
    if (subset(&s, 0) == NOWHERE)
        return finish(c, &b);
    spans cuts = {0};
    for (uint32_t state = 0; state < s.first.count; state++) {
        uint32_t from = s.first.data[state];
        uint32_t end = state + 1 < s.first.count ? s.first.data[state + 1] : s.members.count;
        memcpy(s.todo, s.members.data + from, (end - from) * sizeof *s.todo);
        bool match = closure(&s, end - from, state == 0, true, false);
        state_begin(c, &b, match);
        if (!whole && p->nodes.data[s.members.data[from]].kind == MATCH) {
            range_add(c, &b, 0, CODE_MAX, state);
            continue;
        }
        /* Every place where some member's set begins or ends cuts the line of code points. */
        cuts.count = 0;
        for (uint32_t i = from; i < end; i++) {
            const nfa_node *node = &p->nodes.data[s.members.data[i]];
            for (uint32_t k = 0; node->kind == CHARS && k < node->count; k++) {
                span r = p->sets.data[node->first + k];
                *add(c, &cuts) = (span){r.lo, 0};
                *add(c, &cuts) = (span){r.hi + 1, 0};
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
            if (to != NOWHERE)
                range_add(c, &b, lo, hi - 1, to);
        }
    }
    return finish(c, &b);
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
        set_add(p, &set, 0, CODE_MAX);
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

/* ---- into the graph ---- */

typedef struct lowering {
    gr_compile *c;
    const gr_dfa *dfa;
    uint32_t *entry;      /* [states] */
    uint32_t (*tails)[3]; /* [states]: nodes that read 1 to 3 continuation bytes of any kind */
    GR_VECTOR(gr_edge) edges;
} lowering;

static uint32_t tail(gr_compile *c, uint32_t (*tails)[3], uint32_t to, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i++) {
        if ((*tails)[i] == 0)
            (*tails)[i] = gr_bytes_add(c, &(gr_edge){0x80, 0xBF, to}, 1);
        to = (*tails)[i];
    }
    return to;
}

/* Edges of the byte with `rest` continuation bytes behind it, for the values lo..hi of them all;
 * `mark` is added to the byte's own value. */
static uint32_t byte_edges(gr_compile *c, gr_edge out[3], uint32_t lo, uint32_t hi, uint32_t rest,
                           uint32_t mark, uint32_t (*tails)[3], uint32_t to)
{
    uint32_t shift = 6 * rest, unit = (1u << shift) - 1;
    uint32_t first = lo >> shift, last = hi >> shift, n = 0;
    gr_edge inner[3];
    if (rest > 0 && first <= last && ((lo & unit) != 0 || (first == last && (hi & unit) != unit))) {
        uint32_t top = first == last ? hi & unit : unit;
        uint32_t k = byte_edges(c, inner, lo & unit, top, rest - 1, 0x80, tails, to);
        out[n++] =
            (gr_edge){(uint8_t)(mark + first), (uint8_t)(mark + first), gr_bytes_add(c, inner, k)};
        first++;
    }
    if (rest > 0 && first <= last && (hi & unit) != unit) {
        uint32_t k = byte_edges(c, inner, 0, hi & unit, rest - 1, 0x80, tails, to);
        out[n++] =
            (gr_edge){(uint8_t)(mark + last), (uint8_t)(mark + last), gr_bytes_add(c, inner, k)};
        if (last == 0)
            return n;
        last--;
    }
    if (first <= last)
        out[n++] =
            (gr_edge){(uint8_t)(mark + first), (uint8_t)(mark + last), tail(c, tails, to, rest)};
    return n;
}

/* The edges of the code points lo..hi from 0x80 on, surrogates left out. */
static uint32_t utf8_edges(gr_compile *c, gr_edge out[16], uint32_t lo, uint32_t hi,
                           uint32_t (*tails)[3], uint32_t to)
{
    static const struct {
        uint32_t lo, hi, rest, mark;
    } parts[] = {{0x80, 0x7FF, 1, 0xC0},
                 {0x800, 0xD7FF, 2, 0xE0},
                 {0xE000, 0xFFFF, 2, 0xE0},
                 {0x10000, CODE_MAX, 3, 0xF0}};
    uint32_t n = 0;
    for (size_t i = 0; i < 4; i++) {
        uint32_t from = lo > parts[i].lo ? lo : parts[i].lo;
        uint32_t until = hi < parts[i].hi ? hi : parts[i].hi;
        if (from <= until)
            n += byte_edges(c, out + n, from, until, parts[i].rest, parts[i].mark, tails, to);
    }
    return n;
}

static uint32_t hex_edges(gr_edge out[3], uint32_t lo, uint32_t hi, uint32_t to)
{
    uint32_t n = 0;
    if (lo <= 9)
        out[n++] = (gr_edge){(uint8_t)('0' + lo), (uint8_t)('0' + (hi < 9 ? hi : 9)), to};
    if (hi >= 10) {
        uint32_t from = lo > 10 ? lo - 10 : 0;
        out[n++] = (gr_edge){(uint8_t)('A' + from), (uint8_t)('A' + hi - 10), to};
        out[n++] = (gr_edge){(uint8_t)('a' + from), (uint8_t)('a' + hi - 10), to};
    }
    return n;
}

/* \u00hh for the controls lo..hi. */
static uint32_t control_escape(gr_compile *c, uint32_t lo, uint32_t hi, uint32_t to)
{
    gr_edge first[2], second[3];
    uint32_t n = 0;
    for (uint32_t high = 0; high < 2; high++) {
        uint32_t from = lo > high * 16 ? lo : high * 16,
                 until = hi < high * 16 + 15 ? hi : high * 16 + 15;
        if (from > until)
            continue;
        uint32_t k = hex_edges(second, from & 15, until & 15, to);
        first[n++] =
            (gr_edge){(uint8_t)('0' + high), (uint8_t)('0' + high), gr_bytes_add(c, second, k)};
    }
    return gr_literal(c, "00", 2, gr_bytes_add(c, first, n));
}

static void lower_state(lowering *l, uint32_t state, uint32_t node, bool json)
{
    static const char shorts[] = "\bb\ff\nn\rr\tt";
    gr_compile *c = l->c;
    const gr_dfa *dfa = l->dfa;
    GR_VECTOR(gr_edge) escapes = {0};
    l->edges.count = 0;
    uint8_t ascii[128];
    memset(ascii, 0, sizeof ascii);
    bool wide = false;
    for (uint32_t i = dfa->first[state]; i < dfa->first[state + 1]; i++) {
        gr_range r = dfa->ranges[i];
        uint32_t to = l->entry[r.to];
        for (uint32_t ch = r.lo; ch < 0x80 && ch <= r.hi;) {
            if (json && ch < 0x20) {
                uint32_t hi = r.hi < 0x1F ? r.hi : 0x1F;
                *add(c, &escapes) = (gr_edge){'u', 'u', control_escape(c, ch, hi, to)};
                for (size_t k = 0; k < sizeof shorts - 1; k += 2)
                    if ((uint32_t)shorts[k] >= ch && (uint32_t)shorts[k] <= hi)
                        *add(c, &escapes) =
                            (gr_edge){(uint8_t)shorts[k + 1], (uint8_t)shorts[k + 1], to};
                ch = hi + 1;
            } else if (json && (ch == '"' || ch == '\\')) {
                *add(c, &escapes) = (gr_edge){(uint8_t)ch, (uint8_t)ch, to};
                ch++;
            } else {
                uint32_t hi = ch;
                while (hi < r.hi && hi < 0x7F && !(json && (hi + 1 == '"' || hi + 1 == '\\')))
                    hi++;
                *add(c, &l->edges) = (gr_edge){(uint8_t)ch, (uint8_t)hi, to};
                for (uint32_t k = ch; r.to == state && k <= hi; k++)
                    ascii[k] = 1;
                ch = hi + 1;
            }
        }
        if (r.hi >= 0x80) {
            gr_edge out[16];
            uint32_t n = utf8_edges(c, out, r.lo, r.hi, &l->tails[r.to], to);
            for (uint32_t k = 0; k < n; k++)
                *add(c, &l->edges) = out[k];
            wide = wide || (r.to == state && r.lo <= 0x80 && r.hi == CODE_MAX);
        }
    }
    if (escapes.count > 0)
        *add(c, &l->edges) = (gr_edge){'\\', '\\', gr_bytes_add(c, escapes.data, escapes.count)};
    gr_bytes_set(c, node, l->edges.data, l->edges.count);
    uint32_t loops = 0;
    for (uint32_t k = 0; k <= GR_CLASS_ASCII; k++) {
        uint8_t ch = 0;
        while (ch < 0x80 && (ascii[ch] || !gr_class_has(k, ch)))
            ch++;
        loops |= (uint32_t)(ch == 0x80) << k;
    }
    if (wide && (loops >> GR_CLASS_ASCII & 1) && ascii[0x7F])
        loops |= 1u << GR_CLASS_TEXT;
    c->g->nodes.data[node].loops = (uint8_t)loops | GR_UNIFORM;
}

/* Longest run that is counted; no token has more characters. */
#define RUN_MAX 300u

/* How many code points of lo..hi a class has. */
static uint32_t class_share(uint32_t class_index, uint32_t lo, uint32_t hi)
{
    uint32_t n = 0;
    for (uint32_t ch = lo; ch < 0x80 && ch <= hi; ch++)
        n += gr_class_has(class_index, (uint8_t)ch) || (ch == 0x7F && class_index == GR_CLASS_TEXT);
    if (class_index == GR_CLASS_TEXT && hi >= 0x80)
        n += hi - (lo > 0x80 ? lo : 0x80) + 1;
    return n;
}

/* Where a state reads whole classes, though not for ever, as under a maxLength: if the shortest and
 * the longest run of a class are equal, its tokens up to that many characters may follow and no
 * others, as only a quote can lead out of a string. */
static void find_runs(lowering *l, const uint32_t *nodes)
{
    gr_compile *c = l->c;
    const gr_dfa *dfa = l->dfa;
    uint16_t *least = gr_alloc(c, dfa->count, sizeof *least);
    uint16_t *most = gr_alloc(c, dfa->count, sizeof *most);
    gr_runs *all = gr_alloc(c, dfa->count, sizeof *all);
    uint32_t range_count = dfa->first[dfa->count];
    uint32_t *share = gr_alloc(c, range_count, sizeof *share);
    bool *uniform = gr_alloc(c, dfa->count, sizeof *uniform);
    uint8_t *mixed = gr_alloc(c, dfa->count, sizeof *mixed);
    for (uint32_t k = 0; k < GR_CLASS_REST; k++) {
        uint32_t whole = class_share(k, 0, CODE_MAX);
        for (uint32_t i = 0; i < range_count; i++)
            share[i] = class_share(k, dfa->ranges[i].lo, dfa->ranges[i].hi);
        for (uint32_t s = 0; s < dfa->count; s++) {
            uint32_t covered = 0;
            for (uint32_t i = dfa->first[s]; i < dfa->first[s + 1]; i++)
                covered += share[i];
            least[s] = covered == whole ? RUN_MAX : 0;
            most[s] = 0;
        }
        gr_work(c, range_count);
        for (bool changed = true; changed;) {
            changed = false;
            gr_work(c, range_count);
            for (uint32_t s = dfa->count; s-- > 0;) {
                uint32_t low = RUN_MAX, high = 0;
                for (uint32_t i = dfa->first[s]; i < dfa->first[s + 1]; i++) {
                    uint32_t to = dfa->ranges[i].to;
                    if (share[i] == 0)
                        continue;
                    uint32_t run = to == s ? RUN_MAX : most[to] + 1u;
                    high = run > high ? run : high;
                    low = least[to] + 1u < low ? least[to] + 1u : low;
                }
                high = high > RUN_MAX ? RUN_MAX : high;
                low = least[s] == 0 ? 0 : low;
                changed = changed || high != most[s] || low != least[s];
                most[s] = (uint16_t)high;
                least[s] = (uint16_t)low;
            }
        }
        for (uint32_t s = 0; s < dfa->count; s++) {
            all[s].limit[k] = least[s] == most[s] ? least[s] : 0;
            uniform[s] = all[s].limit[k] > 0;
        }
        /* Whether the state after some characters is the same whichever they were. */
        for (bool changed = true; changed;) {
            changed = false;
            gr_work(c, range_count);
            for (uint32_t s = dfa->count; s-- > 0;) {
                uint32_t only = NOWHERE;
                bool is = uniform[s];
                for (uint32_t i = dfa->first[s]; is && i < dfa->first[s + 1]; i++) {
                    uint32_t to = dfa->ranges[i].to;
                    if (share[i] == 0)
                        continue;
                    is = (only == NOWHERE || only == to) && (uniform[to] || all[to].limit[k] == 0);
                    only = to;
                }
                changed = changed || is != uniform[s];
                uniform[s] = is;
            }
        }
        for (uint32_t s = 0; s < dfa->count; s++)
            if (all[s].limit[k] > 0 && !uniform[s])
                mixed[s] = 1;
    }
    for (uint32_t s = 0; s < dfa->count; s++) {
        uint8_t loops = 0;
        for (uint32_t k = 0; k < GR_CLASS_REST; k++)
            loops |= (uint8_t)((all[s].limit[k] > 0) << k);
        if (loops == 0 || nodes[s] == GR_NONE || c->g->runs.count == UINT16_MAX)
            continue;
        *gr_push(c, &c->g->runs) = all[s];
        c->g->nodes.data[nodes[s]].runs = (uint16_t)c->g->runs.count;
        c->g->nodes.data[nodes[s]].loops = loops | (mixed[s] ? 0 : GR_UNIFORM);
    }
}

uint32_t gr_dfa_lower(gr_compile *c, const gr_dfa *dfa, bool json, uint32_t next)
{
    lowering l = {.c = c, .dfa = dfa};
    if (dfa->count == 0)
        return GR_NONE;
    l.entry = gr_alloc(c, dfa->count, sizeof *l.entry);
    l.tails = gr_alloc(c, dfa->count, sizeof *l.tails);
    uint32_t *nodes = gr_alloc(c, dfa->count, sizeof *nodes);
    /* Ends first, so that heights settle in one pass. */
    for (uint32_t s = dfa->count; s-- > 0;) {
        bool reads = dfa->first[s] < dfa->first[s + 1];
        nodes[s] = reads ? gr_node_add(c, GR_BYTES, 0, 0, 0) : GR_NONE;
        if (dfa->accept[s] && reads)
            l.entry[s] = gr_fork_add(c, (uint32_t[]){nodes[s], next}, 2);
        else
            l.entry[s] = dfa->accept[s] ? next : nodes[s];
    }
    for (uint32_t s = dfa->count; s-- > 0;)
        if (nodes[s] != GR_NONE)
            lower_state(&l, s, nodes[s], json);
    if (json)
        find_runs(&l, nodes);
    return l.entry[0];
}

uint32_t gr_dfa_lower_counted(gr_compile *c, const gr_dfa *dfa, uint32_t guard, uint32_t next)
{
    lowering l = {.c = c, .dfa = dfa};
    if (dfa->count == 0)
        return GR_NONE;
    l.entry = gr_alloc(c, dfa->count, sizeof *l.entry);
    l.tails = gr_alloc(c, dfa->count, sizeof *l.tails);
    uint32_t *nodes = gr_alloc(c, dfa->count, sizeof *nodes);
    uint32_t end = gr_node_add(c, GR_STRING_END, guard, 0, next);
    for (uint32_t s = dfa->count; s-- > 0;) {
        nodes[s] = gr_node_add(c, GR_BYTES, 0, 0, 0);
        uint32_t more = gr_node_add(c, GR_CHAR, guard, 0, nodes[s]);
        l.entry[s] = dfa->accept[s] ? gr_fork_add(c, (uint32_t[]){more, end}, 2) : more;
    }
    for (uint32_t s = dfa->count; s-- > 0;) {
        lower_state(&l, s, nodes[s], false);
        c->g->nodes.data[nodes[s]].c = guard + 1;
    }
    return l.entry[0];
}

void gr_string_char(gr_compile *c, uint32_t node, uint32_t to, uint32_t quote_to)
{
    gr_edge edges[32], hexes[3], parts[8];
    uint32_t tails[1][3] = {{0, 0, 0}}, n = 0;
    uint32_t h1 = gr_bytes_add(c, hexes, hex_edges(hexes, 0, 15, to));
    uint32_t h2 = gr_bytes_add(c, hexes, hex_edges(hexes, 0, 15, h1));
    uint32_t h3 = gr_bytes_add(c, hexes, hex_edges(hexes, 0, 15, h2));
    /* A high surrogate needs its low one: alone it is no character. */
    uint32_t k = hex_edges(parts, 12, 15, h2);
    uint32_t low = gr_bytes_add(c, parts, k);
    low = gr_bytes_add(c, (gr_edge[]){{'D', 'D', low}, {'d', 'd', low}}, 2);
    low = gr_literal(c, "\\u", 2, low);
    low = gr_bytes_add(c, hexes, hex_edges(hexes, 0, 15, low));
    low = gr_bytes_add(c, hexes, hex_edges(hexes, 0, 15, low));
    k = hex_edges(parts, 0, 7, h2);
    k += hex_edges(parts + k, 8, 11, low);
    uint32_t d = gr_bytes_add(c, parts, k);
    k = hex_edges(parts, 0, 12, h3);
    parts[k++] = (gr_edge){'D', 'D', d};
    parts[k++] = (gr_edge){'d', 'd', d};
    k += hex_edges(parts + k, 14, 15, h3);
    uint32_t u = gr_bytes_add(c, parts, k);
    gr_edge escapes[9];
    for (k = 0; k < 8; k++)
        escapes[k] = (gr_edge){(uint8_t) "\"\\/bfnrt"[k], (uint8_t) "\"\\/bfnrt"[k], to};
    escapes[8] = (gr_edge){'u', 'u', u};
    uint32_t escape_node = gr_bytes_add(c, escapes, 9);
    edges[n++] = (gr_edge){0x20, 0x21, to};
    if (quote_to != GR_NONE)
        edges[n++] = (gr_edge){'"', '"', quote_to};
    edges[n++] = (gr_edge){0x23, 0x5B, to};
    edges[n++] = (gr_edge){'\\', '\\', escape_node};
    edges[n++] = (gr_edge){0x5D, 0x7F, to};
    n += utf8_edges(c, edges + n, 0x80, CODE_MAX, &tails[0], to);
    gr_bytes_set(c, node, edges, n);
    c->g->nodes.data[node].loops = GR_CLASS_ALL_TEXT | GR_UNIFORM;
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
