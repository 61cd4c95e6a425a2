/* GBNF, llama.cpp's grammar notation, into the graph.
 *
 * name ::= alternatives, with "text", [sets], ., names, (groups) and * + ? {n} {n,} {n,m}; a line
 * feed ends a rule except inside a group or behind `|` and `::=`; # begins a comment. Each part is
 * built from its end to its start, so a part is read first into a list of its pieces. Left
 * recursion (a rule that can reach itself before it reads a byte) is refused: its stack would never
 * end. */
#include <stdlib.h>

#include "engine/base/utf8.h"
#include "engine/grammar_internal.h"

#define GROUPS_MAX 64 /* nested */
#define COPIES_MAX 2000u
#define RULES_MAX 4096u

typedef struct rule {
    gr_text name;
    uint32_t id;
    bool defined;
} rule;

typedef struct gbnf {
    gr_compile *c;
    const char *text;
    size_t length, at;
    uint32_t depth, count;
    rule *rules; /* [RULES_MAX] */
    uint32_t ret;
} gbnf;

_Noreturn static void wrong(gbnf *p, const char *what)
{
    uint32_t line = 1;
    for (size_t i = 0; i < p->at && i < p->length; i++)
        line += p->text[i] == '\n';
    gr_fail(p->c, BASE_INVALID, "grammar", "grammar: %s in line %u", what, line);
}

static bool more(const gbnf *p)
{
    return p->at < p->length;
}

static char here(const gbnf *p)
{
    return more(p) ? p->text[p->at] : '\0';
}

static void space(gbnf *p, bool lines)
{
    for (; more(p); p->at++) {
        char ch = here(p);
        if (ch == '#') {
            while (more(p) && here(p) != '\n' && here(p) != '\r')
                p->at++;
            if (!lines || !more(p))
                return;
        } else if (ch != ' ' && ch != '\t' && !(lines && (ch == '\n' || ch == '\r'))) {
            return;
        }
    }
}

static bool name_char(char ch)
{
    return gr_class_has(GR_CLASS_WORD, (uint8_t)ch) || ch == '-' || ch == '_';
}

static gr_text name(gbnf *p)
{
    size_t begin = p->at;
    while (more(p) && name_char(here(p)))
        p->at++;
    if (p->at == begin)
        wrong(p, "a rule's name is missing");
    return (gr_text){p->text + begin, p->at - begin};
}

static rule *rule_named(gbnf *p, gr_text text)
{
    gr_work(p->c, p->count / 8 + 1);
    for (uint32_t i = 0; i < p->count; i++)
        if (p->rules[i].name.length == text.length &&
            memcmp(p->rules[i].name.data, text.data, text.length) == 0)
            return &p->rules[i];
    if (p->count == RULES_MAX)
        wrong(p, "too many rules");
    p->rules[p->count] = (rule){.name = text, .id = gr_rule_add(p->c)};
    return &p->rules[p->count++];
}

/* One character, escapes read. */
static uint32_t character(gbnf *p)
{
    uint32_t code;
    size_t n = base_utf8_char(p->text + p->at, p->length - p->at, &code);
    if (n == 0)
        wrong(p, "no valid UTF-8");
    p->at += n;
    if (code != '\\')
        return code;
    char kind = here(p);
    uint32_t digits = kind == 'x' ? 2 : kind == 'u' ? 4 : kind == 'U' ? 8 : 0;
    p->at++;
    if (digits == 0) {
        switch (kind) {
        case 't':
            return '\t';
        case 'n':
            return '\n';
        case 'r':
            return '\r';
        case '\\':
        case '"':
        case '[':
        case ']':
        case '-':
        case '^':
            return (uint8_t)kind;
        default:
            wrong(p, "an unknown escape");
        }
    }
    code = 0;
    for (uint32_t i = 0; i < digits; i++, p->at++) {
        char ch = here(p);
        uint32_t low = (uint32_t)(ch | 32);
        if (ch >= '0' && ch <= '9')
            code = code << 4 | (uint32_t)(ch - '0');
        else if (low >= 'a' && low <= 'f')
            code = code << 4 | (low - 'a' + 10);
        else
            wrong(p, "an escape needs hex digits");
    }
    if (code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF))
        wrong(p, "an escape names no character");
    return code;
}

typedef struct span {
    uint32_t lo, hi;
} span;

static int by_lo(const void *pa, const void *pb)
{
    const span *a = pa, *b = pb;
    return a->lo < b->lo ? -1 : a->lo > b->lo;
}

/* Nodes for one character of the spans, or outside of them. */
static uint32_t set_node(gbnf *p, span *spans, uint32_t count, bool negate, uint32_t next)
{
    gr_compile *c = p->c;
    gr_dfa dfa = {.count = 2};
    dfa.first = gr_alloc(c, 3, sizeof *dfa.first);
    dfa.accept = gr_alloc(c, 2, sizeof *dfa.accept);
    dfa.ranges = gr_alloc(c, count + 1, sizeof *dfa.ranges);
    dfa.accept[1] = true;
    qsort(spans, count, sizeof *spans, by_lo);
    uint32_t n = 0, lo = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t from = spans[i].lo > lo ? spans[i].lo : lo;
        if (negate && spans[i].lo > lo)
            dfa.ranges[n++] = (gr_range){lo, spans[i].lo - 1, 1};
        else if (!negate && from <= spans[i].hi)
            dfa.ranges[n++] = (gr_range){from, spans[i].hi, 1};
        lo = spans[i].hi + 1 > lo ? spans[i].hi + 1 : lo;
    }
    if (negate && lo <= 0x10FFFF)
        dfa.ranges[n++] = (gr_range){lo, 0x10FFFF, 1};
    dfa.first[1] = dfa.first[2] = n;
    return n == 0 ? GR_NONE : gr_dfa_lower(c, &dfa, false, next);
}

static uint32_t alternatives(gbnf *p, bool inside, uint32_t next);

/* One piece before `next`; reads the same text each time it is asked to. */
static uint32_t piece(gbnf *p, uint32_t next)
{
    char ch = here(p);
    if (ch == '"') {
        char *bytes = gr_alloc(p->c, p->length - p->at + 1, 1);
        size_t n = 0;
        for (p->at++; more(p) && here(p) != '"';)
            n += base_utf8_encode(bytes + n, character(p));
        if (!more(p))
            wrong(p, "a text without its end");
        p->at++;
        return gr_literal(p->c, bytes, n, next);
    }
    if (ch == '[' /* ] */) {
        struct {
            span *data;
            uint32_t count;
        } set = {gr_alloc(p->c, p->length - p->at + 1, sizeof(span)), 0};
        p->at++;
        bool negate = here(p) == '^';
        p->at += negate;
        while (more(p) && here(p) != ']') {
            uint32_t lo = character(p), hi = lo;
            if (here(p) == '-' && p->at + 1 < p->length && p->text[p->at + 1] != ']') {
                p->at++;
                hi = character(p);
            }
            if (hi < lo)
                wrong(p, "a range out of order");
            set.data[set.count++] = (span){lo, hi};
        }
        if (!more(p))
            wrong(p, "a set without its end");
        p->at++;
        return set_node(p, set.data, set.count, negate, next);
    }
    if (ch == '.') {
        p->at++;
        return set_node(p, &(span){0, 0x10FFFF}, 1, false, next);
    }
    if (ch == '(') {
        p->at++;
        if (++p->depth > GROUPS_MAX)
            wrong(p, "groups nested too deep");
        uint32_t node = alternatives(p, true, next);
        p->depth--;
        if (here(p) != ')')
            wrong(p, "a group without its end");
        p->at++;
        return node;
    }
    if (!name_char(ch))
        wrong(p, "an unexpected character");
    return gr_node_add(p->c, GR_CALL, rule_named(p, name(p))->id, next, 0);
}

/* Passes over one piece without building it. */
static void piece_skip(gbnf *p)
{
    char ch = here(p);
    uint32_t depth = 0;
    if (name_char(ch)) {
        name(p);
        return;
    }
    do {
        ch = here(p);
        if (ch == '"' || ch == '[' /* ] */) {
            char end = ch == '"' ? '"' : ']';
            for (p->at++; more(p) && here(p) != end; p->at++)
                p->at += here(p) == '\\';
            if (!more(p))
                wrong(p, "a text or set without its end");
            p->at++;
        } else if (ch == '#') {
            space(p, false);
        } else {
            depth += ch == '(';
            depth -= ch == ')';
            p->at++;
        }
    } while (more(p) && depth > 0);
}

static uint32_t number(gbnf *p)
{
    uint32_t n = 0;
    size_t begin = p->at;
    for (; here(p) >= '0' && here(p) <= '9'; p->at++)
        n = n < COPIES_MAX + 1 ? n * 10 + (uint32_t)(here(p) - '0') : n;
    if (p->at == begin)
        wrong(p, "a count is missing");
    if (n > COPIES_MAX)
        wrong(p, "a count is too large");
    return n;
}

typedef struct part {
    size_t at;
    uint32_t min, max;
} part;

static uint32_t part_node(gbnf *p, part q, uint32_t next)
{
    uint32_t at = next, copies = q.max == GR_INFINITE ? q.min : q.max;
    if (q.max == GR_INFINITE) {
        uint32_t loop = gr_node_add(p->c, GR_FORK, 0, 0, 0);
        p->at = q.at;
        uint32_t again = piece(p, loop);
        gr_fork_set(p->c, loop, (uint32_t[]){again, next}, 2);
        at = loop;
    }
    for (uint32_t i = copies; i-- > 0;) {
        p->at = q.at;
        uint32_t one = piece(p, at);
        at = i >= q.min ? gr_fork_add(p->c, (uint32_t[]){one, next}, 2) : one;
    }
    return at;
}

static uint32_t sequence(gbnf *p, bool inside, uint32_t next)
{
    size_t capacity = 8, count = 0;
    part *parts = gr_alloc(p->c, capacity, sizeof *parts);
    for (;;) {
        space(p, inside);
        char ch = here(p);
        if (ch == '\0' || ch == '|' || ch == ')' || ch == '\n' || ch == '\r')
            break;
        part q = {p->at, 1, 1};
        piece_skip(p);
        space(p, false);
        ch = here(p);
        if (ch == '*' || ch == '+' || ch == '?') {
            p->at++;
            q.min = ch == '+';
            q.max = ch == '?' ? 1 : GR_INFINITE;
        } else if (ch == '{') {
            p->at++;
            space(p, inside);
            q.min = q.max = here(p) == ',' ? 0 : number(p);
            space(p, inside);
            if (here(p) == ',') {
                p->at++;
                space(p, inside);
                q.max = here(p) == '}' ? GR_INFINITE : number(p);
                space(p, inside);
            }
            if (here(p) != '}' || q.max < q.min)
                wrong(p, "a count without its end, or out of order");
            p->at++;
        }
        if (count == capacity) {
            part *grown = gr_alloc(p->c, 2 * capacity, sizeof *grown);
            memcpy(grown, parts, count * sizeof *parts);
            parts = grown;
            capacity *= 2;
        }
        parts[count++] = q;
    }
    size_t end = p->at;
    while (count > 0)
        next = part_node(p, parts[--count], next);
    p->at = end;
    return next;
}

static uint32_t alternatives(gbnf *p, bool inside, uint32_t next)
{
    uint32_t node = sequence(p, inside, next);
    for (space(p, inside); here(p) == '|'; space(p, inside)) {
        p->at++;
        space(p, true);
        uint32_t other = sequence(p, inside, next);
        node = gr_fork_add(p->c, (uint32_t[]){node, other}, 2);
    }
    return node;
}

/* ---- left recursion ---- */

/* Which rules can pass without a byte; then whether a rule reaches itself before one. */
static void check_left(gbnf *p)
{
    eng_grammar *g = p->c->g;
    uint32_t nodes = g->nodes.count, rules = g->rules.count;
    bool *empty = gr_alloc(p->c, nodes, 1), *rule_empty = gr_alloc(p->c, rules, 1);
    for (bool changed = true; changed;) {
        changed = false;
        gr_work(p->c, nodes);
        for (uint32_t i = 1; i < nodes; i++) {
            const gr_node *node = &g->nodes.data[i];
            bool is = node->kind == GR_RETURN;
            if (node->kind == GR_CALL)
                is = rule_empty[node->a] && empty[node->b];
            for (uint32_t k = 0; node->kind == GR_FORK && k < node->b; k++)
                is = is || empty[g->lists.data[node->a + k]];
            changed = changed || (is && !empty[i]);
            empty[i] = is || empty[i];
        }
        for (uint32_t r = 0; r < rules; r++) {
            bool is = empty[g->rules.data[r].start];
            changed = changed || is != rule_empty[r];
            rule_empty[r] = is;
        }
    }
    /* What each rule may call first, as rows of bits closed by Warshall's way. */
    uint32_t words = (rules + 31) / 32;
    uint32_t *first = gr_alloc(p->c, (size_t)rules * words, sizeof *first);
    uint32_t *todo = gr_alloc(p->c, nodes + 1, sizeof *todo), *mark = gr_alloc(p->c, nodes, 4);
    for (uint32_t r = 0; r < rules; r++) {
        uint32_t count = 0;
        todo[count++] = g->rules.data[r].start;
        mark[todo[0]] = r + 1;
        while (count > 0) {
            const gr_node *node = &g->nodes.data[todo[--count]];
            uint32_t n = 0;
            const uint32_t *ways = NULL;
            gr_work(p->c, 1);
            if (node->kind == GR_FORK) {
                ways = &g->lists.data[node->a];
                n = node->b;
            } else if (node->kind == GR_CALL) {
                first[r * words + node->a / 32] |= 1u << node->a % 32;
                ways = &node->b;
                n = rule_empty[node->a];
            }
            for (uint32_t k = 0; k < n; k++)
                if (mark[ways[k]] != r + 1) {
                    mark[ways[k]] = r + 1;
                    todo[count++] = ways[k];
                }
        }
    }
    for (uint32_t k = 0; k < rules; k++)
        for (uint32_t r = 0; r < rules; r++) {
            gr_work(p->c, 1);
            if (!(first[r * words + k / 32] >> k % 32 & 1))
                continue;
            gr_work(p->c, words / 4 + 1);
            for (uint32_t w = 0; w < words; w++)
                first[r * words + w] |= first[k * words + w];
        }
    for (uint32_t i = 0; i < p->count; i++)
        if (first[p->rules[i].id * words + p->rules[i].id / 32] >> p->rules[i].id % 32 & 1)
            gr_fail(p->c, BASE_UNSUPPORTED, "grammar",
                    "grammar: the rule %.*s begins with itself (left recursion)",
                    (int)p->rules[i].name.length, p->rules[i].name.data);
}

uint32_t gr_gbnf_rule(gr_compile *c, gr_text text)
{
    gbnf *p = gr_alloc(c, 1, sizeof *p);
    *p = (gbnf){.c = c, .text = text.data, .length = text.length};
    if (memchr(p->text, '\0', p->length) != NULL)
        wrong(p, "a NUL byte");
    p->rules = gr_alloc(c, RULES_MAX, sizeof *p->rules);
    p->ret = gr_node_add(c, GR_RETURN, 0, 0, 0);
    for (space(p, true); more(p); space(p, true)) {
        rule *r = rule_named(p, name(p));
        space(p, false);
        if (p->length - p->at < 3 || memcmp(p->text + p->at, "::=", 3) != 0)
            wrong(p, "::= is missing");
        if (r->defined)
            wrong(p, "a rule is defined twice");
        r->defined = true;
        p->at += 3;
        space(p, true);
        uint32_t id = r->id, start = alternatives(p, false, p->ret);
        c->g->rules.data[id].start = start;
        if (more(p) && here(p) != '\n' && here(p) != '\r')
            wrong(p, "a lone )");
    }
    rule *root = rule_named(p, (gr_text){"root", 4});
    for (uint32_t i = 0; i < p->count; i++)
        if (!p->rules[i].defined)
            gr_fail(c, BASE_INVALID, "grammar", "grammar: the rule %.*s is not defined",
                    (int)p->rules[i].name.length, p->rules[i].name.data);
    check_left(p);
    return root->id;
}

static uint32_t gbnf_body(gr_compile *c, void *context)
{
    return gr_gbnf_rule(c, *(const gr_text *)context);
}

base_code eng_grammar_gbnf(eng_grammar **out, const char *text, size_t length,
                           const eng_grammar_options *options, base_err *err)
{
    gr_text source = {text, length};
    return gr_compile_run(out, gbnf_body, &source, options, err);
}
