/* JSON Schema (2020-12, and the drafts before it) into the graph.
 *
 * A schema means a set of values. A *term* is a conjunction of schemas (or of values, for enum and
 * const), each perhaps negated; it is opened into alternatives, and each alternative says for every
 * type what holds: an automaton for numbers' texts and for strings, terms for members and items.
 * allOf, $ref and if join terms, so an object is merged member by member, and only when it is
 * reached: recursion ends because equal terms are one term with one rule. oneOf and not need a
 * complement; where that cannot be written as alternatives the keyword is refused. Numbers under a
 * bound have no exponent.
 *
 * Refused (BASE_UNSUPPORTED): unevaluatedProperties and unevaluatedItems beside other applicators,
 * $dynamicRef, $recursiveRef, references to other documents, contains with maxContains, uniqueItems
 * unless the items are a small enum, standard formats that no automaton of ours describes, and
 * complements that need an unknown member. Unknown keywords are annotations, as the standard says.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/json.h"
#include "engine/grammar_internal.h"

#define DEPTH_MAX 128        /* of the schema's text */
#define EXPAND_MAX 64        /* applicators inside each other */
#define ALTERNATIVES_MAX 128 /* of one term */
#define MULTIPLE_MAX 20000u
#define DIGITS_MAX 400
#define UNIQUE_MAX 64u

enum {
    T_NULL = 1,
    T_TRUE = 2,
    T_FALSE = 4,
    T_NUMBER = 8,
    T_STRING = 16,
    T_OBJECT = 32,
    T_ARRAY = 64,
    T_ALL = 127
};

typedef struct dom {
    base_json_kind kind; /* OBJECT_BEGIN and ARRAY_BEGIN stand for the whole */
    gr_text key, text;   /* decoded; a number's text as it stands */
    uint32_t index;      /* in its array */
    struct dom *parent, *first, *last, *next;
    struct dom *root;     /* of the nearest resource with an $id */
    struct alts *open[4]; /* memo of each kind of literal */
    bool opening;
} dom;

/* A literal: a schema or a value, perhaps negated. */
enum { L_SCHEMA, L_NOT, L_VALUE, L_NOT_VALUE };

typedef struct literal {
    dom *node;
    uint8_t kind;
} literal;

typedef struct term {
    literal *lits;
    uint32_t count;
    bool never;
    uint32_t rule; /* 1 + it, 0 before it was asked for */
    struct alts *open;
    struct term *next; /* of the same hash */
    struct term *queued;
} term;

typedef struct member {
    gr_text name;
    term *value;
    bool required;
} member;

typedef struct names {
    gr_dfa *set; /* NULL: every name */
    term *value;
} names;

typedef struct object {
    member *members;
    uint32_t count;
    names *classes; /* of the other names, apart from each other; outside of all: forbidden */
    uint32_t class_count;
    uint32_t min, max;
} object;

typedef struct array {
    term **prefix;
    uint32_t count;
    term *rest;
    uint32_t min, max;
    bool unique;
    term *contains;
    uint32_t contains_min;
} array;

typedef struct bundle {
    uint8_t types;
    gr_dfa *number; /* NULL: any */
    gr_dfa *string; /* NULL: any */
    uint32_t length_min, length_max;
    object *object; /* NULL: any */
    array *array;
} bundle;

typedef struct alts {
    bundle **data;
    uint32_t count;
} alts;

#define TERMS 1024
typedef struct schema {
    gr_compile *c;
    const char *text;
    size_t length;
    dom *root;
    uint32_t draft;
    term *terms[TERMS], *always, *never;
    term *queue, **queue_end;
    gr_dfa *plain_number, *plain_integer, *number, *integer; /* made when asked for */
    gr_dfa *canonical_number, *canonical_integer;
    uint32_t ret;
} schema;

/* ---- the text ---- */

static void pointer_of(const dom *node, const char *keyword, char out[160])
{
    char text[400]; /* a pointer too long for a message loses its end */
    snprintf(out, 160, "%s%s", keyword == NULL ? "" : "/", keyword == NULL ? "" : keyword);
    for (; node != NULL && node->parent != NULL; node = node->parent) {
        if (node->parent->kind == BASE_JSON_ARRAY_BEGIN)
            snprintf(text, sizeof text, "/%u%s", node->index, out);
        else
            snprintf(text, sizeof text, "/%.*s%s", (int)node->key.length, node->key.data, out);
        memcpy(out, text, 159);
        out[159] = '\0';
    }
}

__attribute__((format(printf, 5, 6))) _Noreturn static void
wrong(schema *s, base_code code, const dom *node, const char *keyword, const char *fmt, ...)
{
    char text[128], pointer[160];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    pointer_of(node, keyword, pointer);
    gr_fail(s->c, code, pointer, "%s at %s: %s", keyword == NULL ? "schema" : keyword, pointer,
            text);
}

static gr_text decoded(schema *s, const char *raw, size_t length)
{
    if (memchr(raw, '\\', length) == NULL)
        return (gr_text){raw + 1, length - 2};
    base_buf buf;
    base_buf_init(&buf, 0);
    base_json_unescape(&buf, raw, length);
    char *copy = buf.failed ? NULL : base_arena_copy(s->c->arena, buf.data, buf.length);
    gr_text text = {copy, buf.length};
    base_buf_deinit(&buf);
    if (copy == NULL)
        gr_fail(s->c, BASE_NOMEM, NULL, "no memory for a grammar");
    return text;
}

static dom *parse(schema *s, const char *bytes, size_t length)
{
    base_json json;
    dom *top = NULL, *root = NULL;
    gr_text key = {0};
    base_json_init(&json, bytes, length, DEPTH_MAX);
    for (;;) {
        base_json_kind kind = base_json_next(&json);
        gr_work(s->c, 1 + json.raw_length / 64);
        if (kind == BASE_JSON_ERROR)
            gr_fail(s->c, BASE_INVALID, NULL, "the schema is no JSON: %s at byte %zu", json.error,
                    json.pos);
        if (kind == BASE_JSON_END)
            return root;
        if (kind == BASE_JSON_KEY) {
            key = decoded(s, json.raw, json.raw_length);
            continue;
        }
        if (kind == BASE_JSON_OBJECT_END || kind == BASE_JSON_ARRAY_END) {
            top = top->parent;
            continue;
        }
        dom *node = gr_alloc(s->c, 1, sizeof *node);
        node->kind = kind;
        node->parent = top;
        if (kind == BASE_JSON_STRING)
            node->text = decoded(s, json.raw, json.raw_length);
        else if (kind == BASE_JSON_NUMBER)
            node->text = (gr_text){json.raw, json.raw_length};
        if (top == NULL) {
            root = node;
        } else {
            node->key = key;
            node->index = top->last == NULL ? 0 : top->last->index + 1;
            *(top->last == NULL ? &top->first : &top->last->next) = node;
            top->last = node;
        }
        if (kind == BASE_JSON_OBJECT_BEGIN || kind == BASE_JSON_ARRAY_BEGIN)
            top = node;
    }
}

static bool is(gr_text text, const char *what)
{
    return text.length == strlen(what) && memcmp(text.data, what, text.length) == 0;
}

static bool same(gr_text a, gr_text b)
{
    return a.length == b.length && (a.length == 0 || memcmp(a.data, b.data, a.length) == 0);
}

static dom *get(const dom *node, const char *key)
{
    dom *found = NULL;
    if (node->kind == BASE_JSON_OBJECT_BEGIN)
        for (dom *child = node->first; child != NULL; child = child->next)
            if (is(child->key, key))
                found = child; /* the last of equal names counts */
    return found;
}

/* The node after `node` in the text's order below `top`. */
static dom *walk(dom *node, const dom *top)
{
    if (node->first != NULL)
        return node->first;
    while (node != top && node->next == NULL)
        node = node->parent;
    return node == top ? NULL : node->next;
}

static bool holds_values(const dom *node)
{
    return node->parent != NULL && node->parent->kind == BASE_JSON_OBJECT_BEGIN &&
           (is(node->key, "enum") || is(node->key, "const"));
}

static dom *id_of(const dom *node)
{
    dom *id = get(node, "$id");
    if (id == NULL)
        id = get(node, "id");
    return id != NULL && id->kind == BASE_JSON_STRING && id->text.length > 0 ? id : NULL;
}

static void find_resources(schema *s)
{
    for (dom *node = s->root; node != NULL; node = walk(node, s->root)) {
        dom *id = id_of(node);
        bool values = false;
        for (dom *up = node; up != NULL && !values; up = up->parent)
            values = holds_values(up) && up->kind != BASE_JSON_OBJECT_BEGIN;
        bool own = node->parent == NULL || (id != NULL && id->text.data[0] != '#' && !values);
        if (own && node->parent != NULL && s->draft <= 7 && get(node, "$ref") != NULL)
            own = false;
        node->root = own ? node : node->parent->root;
    }
}

static int hex_digit(char ch)
{
    return ch >= '0' && ch <= '9'                 ? ch - '0'
           : (ch | 32) >= 'a' && (ch | 32) <= 'f' ? (ch | 32) - 'a' + 10
                                                  : -1;
}

/* The node that `ref` names, which stands in `at`. */
static dom *resolve(schema *s, const dom *at, const dom *ref)
{
    gr_text text = ref->text;
    dom *root = at->root;
    size_t hash = 0;
    while (hash < text.length && text.data[hash] != '#')
        hash++;
    if (hash > 0) {
        /* Another resource of this document, by the exact text of its $id. */
        gr_text id = {text.data, hash};
        root = NULL;
        for (dom *node = s->root; node != NULL && root == NULL; node = walk(node, s->root)) {
            gr_work(s->c, 1);
            dom *own = node->root == node ? id_of(node) : NULL;
            if (own != NULL) {
                gr_text name = own->text;
                if (name.length > 0 && name.data[name.length - 1] == '#')
                    name.length--;
                if (same(name, id))
                    root = node;
            }
        }
        if (root == NULL)
            wrong(s, BASE_UNSUPPORTED, at, "$ref", "%.*s is not in this document", (int)text.length,
                  text.data);
    }
    char *part = gr_alloc(s->c, text.length + 1, 1);
    size_t length = 0;
    for (size_t i = hash + 1; i < text.length; i++) {
        if (text.data[i] == '%' && i + 2 < text.length && hex_digit(text.data[i + 1]) >= 0 &&
            hex_digit(text.data[i + 2]) >= 0) {
            part[length++] = (char)(hex_digit(text.data[i + 1]) * 16 + hex_digit(text.data[i + 2]));
            i += 2;
        } else {
            part[length++] = text.data[i];
        }
    }
    if (length == 0)
        return root;
    if (part[0] != '/') {
        gr_text name = {part, length};
        for (dom *node = root; node != NULL; node = walk(node, root)) {
            gr_work(s->c, 1);
            dom *anchor = get(node, "$anchor"), *id = id_of(node);
            if (anchor == NULL)
                anchor = get(node, "$dynamicAnchor");
            if (node->root == root && anchor != NULL && anchor->kind == BASE_JSON_STRING &&
                same(anchor->text, name))
                return node;
            if (id != NULL && id->text.data[0] == '#' && node->root == root &&
                same((gr_text){id->text.data + 1, id->text.length - 1}, name))
                return node;
        }
        wrong(s, BASE_INVALID, at, "$ref", "nothing is named %.*s", (int)length, part);
    }
    dom *node = root;
    for (size_t i = 1; node != NULL;) {
        char *name = gr_alloc(s->c, length + 1, 1);
        size_t n = 0;
        for (; i < length && part[i] != '/'; i++) {
            if (part[i] == '~' && i + 1 < length && (part[i + 1] == '0' || part[i + 1] == '1'))
                name[n++] = part[++i] == '0' ? '~' : '/';
            else
                name[n++] = part[i];
        }
        dom *child = NULL;
        for (dom *k = node->first; k != NULL; k = k->next) {
            char place[16];
            snprintf(place, sizeof place, "%u", k->index);
            if (node->kind == BASE_JSON_OBJECT_BEGIN ? same(k->key, (gr_text){name, n})
                                                     : is((gr_text){name, n}, place))
                child = k;
        }
        node = child;
        if (i >= length)
            break;
        i++;
    }
    if (node == NULL)
        wrong(s, BASE_INVALID, at, "$ref", "%.*s leads nowhere", (int)text.length, text.data);
    return node;
}

/* ---- terms ---- */

static uint64_t lit_order(literal l)
{
    return (uint64_t)(uintptr_t)l.node * 4 + l.kind;
}

static term *term_of(schema *s, const literal *lits, uint32_t count)
{
    literal *own = gr_alloc(s->c, count, sizeof *own);
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = n;
        while (at > 0 && lit_order(own[at - 1]) > lit_order(lits[i]))
            at--;
        if (at > 0 && lit_order(own[at - 1]) == lit_order(lits[i]))
            continue;
        memmove(own + at + 1, own + at, (n - at) * sizeof *own);
        own[at] = lits[i];
        n++;
    }
    uint64_t hash = n;
    for (uint32_t i = 0; i < n; i++)
        hash = (hash ^ lit_order(own[i])) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    term **slot = &s->terms[hash % TERMS];
    for (term *t = *slot; t != NULL; t = t->next) {
        gr_work(s->c, 1);
        uint32_t i = 0;
        while (t->count == n && i < n && lit_order(t->lits[i]) == lit_order(own[i]))
            i++;
        if (t->count == n && i == n)
            return t;
    }
    term *t = gr_alloc(s->c, 1, sizeof *t);
    *t = (term){.lits = own, .count = n, .next = *slot};
    *slot = t;
    return t;
}

static term *term_lit(schema *s, dom *node, uint8_t kind)
{
    if (node->kind == BASE_JSON_TRUE && kind <= L_NOT)
        return kind == L_SCHEMA ? s->always : s->never;
    if (node->kind == BASE_JSON_FALSE && kind <= L_NOT)
        return kind == L_SCHEMA ? s->never : s->always;
    return term_of(s, &(literal){node, kind}, 1);
}

static term *term_and(schema *s, term *a, term *b)
{
    if (a->never || b->never)
        return s->never;
    if (a == b || b->count == 0)
        return a;
    if (a->count == 0)
        return b;
    literal *lits = gr_alloc(s->c, a->count + b->count, sizeof *lits);
    memcpy(lits, a->lits, a->count * sizeof *lits);
    memcpy(lits + a->count, b->lits, b->count * sizeof *lits);
    return term_of(s, lits, a->count + b->count);
}

/* ---- numbers ---- */

typedef struct decimal {
    bool negative;
    char whole[DIGITS_MAX + 1], part[DIGITS_MAX + 1]; /* without needless zeros; "0" and "" */
    uint32_t whole_count, part_count;
} decimal;

static decimal *decimal_of(schema *s, const dom *node, const char *keyword)
{
    decimal *d = gr_alloc(s->c, 1, sizeof *d);
    char digits[DIGITS_MAX];
    int32_t n = 0, point = -1, exponent = 0;
    if (node->kind != BASE_JSON_NUMBER)
        wrong(s, BASE_INVALID, node->parent, keyword, "is no number");
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
            wrong(s, BASE_UNSUPPORTED, node->parent, keyword, "has too many digits");
        }
    }
    point = point < 0 ? n : point;
    if (exponent > DIGITS_MAX / 2 || exponent < -DIGITS_MAX / 2)
        wrong(s, BASE_UNSUPPORTED, node->parent, keyword, "has too many digits");
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

/* Numbers x without an exponent for which x op d; op is one of = < > <= >=. */
static gr_dfa *number_bound(schema *s, const decimal *d, const char *op)
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

static gr_dfa *number_multiple(schema *s, const dom *node)
{
    decimal *d = decimal_of(s, node, "multipleOf");
    multiple *m = gr_alloc(s->c, 1, sizeof *m);
    for (uint32_t i = 0; i < d->whole_count + d->part_count && m->of <= MULTIPLE_MAX; i++)
        m->of = m->of * 10 +
                (uint64_t)((i < d->whole_count ? d->whole[i] : d->part[i - d->whole_count]) - '0');
    m->places = d->part_count;
    if (d->negative || m->of == 0)
        wrong(s, BASE_INVALID, node->parent, "multipleOf", "must be above 0");
    if (m->of > MULTIPLE_MAX || m->places > 20 || m->of * (m->places + 2) > MULTIPLE_MAX)
        wrong(s, BASE_UNSUPPORTED, node->parent, "multipleOf", "%.*s needs too many states",
              (int)node->text.length, node->text.data);
    return gr_dfa_walk(s->c, &(gr_walk){multiple_step, multiple_accept, m, "-.0123456789"},
                       AT_START);
}

static gr_dfa *regex(schema *s, gr_dfa **kept, const char *text)
{
    if (*kept == NULL)
        *kept = gr_dfa_regex(s->c, text, strlen(text), true, "number", NULL);
    return *kept;
}

static gr_dfa *all_numbers(schema *s)
{
    return regex(s, &s->number, "-?(0|[1-9][0-9]*)(\\.[0-9]+)?");
}

static gr_dfa *integers(schema *s)
{
    return regex(s, &s->integer, "-?(0|[1-9][0-9]*)(\\.0+)?");
}

/* ---- alternatives ---- */

static alts *alts_new(schema *s, uint32_t capacity)
{
    alts *a = gr_alloc(s->c, 1, sizeof *a);
    a->data = gr_alloc(s->c, capacity, sizeof *a->data);
    return a;
}

static bundle *bundle_any(schema *s, uint8_t types)
{
    bundle *b = gr_alloc(s->c, 1, sizeof *b);
    b->types = types;
    b->length_max = GR_INFINITE;
    return b;
}

static object *object_any(schema *s)
{
    object *o = gr_alloc(s->c, 1, sizeof *o);
    o->max = GR_INFINITE;
    o->classes = gr_alloc(s->c, 1, sizeof *o->classes);
    o->classes[0] = (names){NULL, s->always};
    o->class_count = 1;
    return o;
}

static array *array_any(schema *s)
{
    array *a = gr_alloc(s->c, 1, sizeof *a);
    a->max = GR_INFINITE;
    a->rest = s->always;
    return a;
}

static gr_dfa *dfa_and(schema *s, gr_dfa *a, gr_dfa *b)
{
    return a == NULL ? b : b == NULL || a == b ? a : gr_dfa_op(s->c, a, b, GR_AND);
}

static member *member_find(const object *o, gr_text name)
{
    for (uint32_t i = 0; i < o->count; i++)
        if (same(o->members[i].name, name))
            return &o->members[i];
    return NULL;
}

static term *member_term(schema *s, const object *o, gr_text name)
{
    const member *m = member_find(o, name);
    if (m != NULL)
        return m->value;
    for (uint32_t i = 0; i < o->class_count; i++)
        if (o->classes[i].set == NULL || gr_dfa_has(o->classes[i].set, name.data, name.length))
            return o->classes[i].value;
    return s->never;
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t most(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static void classes_join(schema *s, object *out, const object *a, const object *b)
{
    out->classes = gr_alloc(s->c, (size_t)a->class_count * b->class_count, sizeof *out->classes);
    for (uint32_t i = 0; i < a->class_count; i++)
        for (uint32_t k = 0; k < b->class_count; k++) {
            gr_dfa *set = dfa_and(s, a->classes[i].set, b->classes[k].set);
            if (set == NULL || set->count > 0)
                out->classes[out->class_count++] =
                    (names){set, term_and(s, a->classes[i].value, b->classes[k].value)};
        }
}

static object *object_and(schema *s, object *a, object *b)
{
    if (a == NULL || b == NULL)
        return a == NULL ? b : a;
    object *o = gr_alloc(s->c, 1, sizeof *o);
    o->members = gr_alloc(s->c, a->count + b->count, sizeof *o->members);
    gr_work(s->c, (size_t)a->count * b->count / 4 + 1);
    for (uint32_t i = 0; i < a->count; i++) {
        member m = a->members[i];
        const member *other = member_find(b, m.name);
        m.value = term_and(s, m.value, member_term(s, b, m.name));
        m.required = m.required || (other != NULL && other->required);
        o->members[o->count++] = m;
    }
    for (uint32_t i = 0; i < b->count; i++) {
        member m = b->members[i];
        if (member_find(a, m.name) != NULL)
            continue;
        m.value = term_and(s, m.value, member_term(s, a, m.name));
        o->members[o->count++] = m;
    }
    classes_join(s, o, a, b);
    o->min = most(a->min, b->min);
    o->max = least(a->max, b->max);
    return o;
}

static array *array_and(schema *s, array *a, array *b, const dom *at)
{
    if (a == NULL || b == NULL)
        return a == NULL ? b : a;
    array *o = gr_alloc(s->c, 1, sizeof *o);
    o->count = most(a->count, b->count);
    o->prefix = gr_alloc(s->c, o->count, sizeof *o->prefix);
    for (uint32_t i = 0; i < o->count; i++)
        o->prefix[i] = term_and(s, i < a->count ? a->prefix[i] : a->rest,
                                i < b->count ? b->prefix[i] : b->rest);
    o->rest = term_and(s, a->rest, b->rest);
    o->min = most(a->min, b->min);
    o->max = least(a->max, b->max);
    o->unique = a->unique || b->unique;
    o->contains = a->contains != NULL ? a->contains : b->contains;
    o->contains_min = most(a->contains_min, b->contains_min);
    if (a->contains != NULL && b->contains != NULL && a->contains != b->contains)
        wrong(s, BASE_UNSUPPORTED, at, "contains", "two of them for one array");
    return o;
}

/* NULL if nothing satisfies both. */
static bundle *bundle_and(schema *s, const bundle *a, const bundle *b, const dom *at)
{
    bundle *o = bundle_any(s, a->types & b->types);
    if (o->types & T_NUMBER) {
        o->number = dfa_and(s, a->number, b->number);
        if (o->number != NULL && o->number->count == 0)
            o->types &= (uint8_t)~T_NUMBER;
    }
    if (o->types & T_STRING) {
        o->string = dfa_and(s, a->string, b->string);
        o->length_min = most(a->length_min, b->length_min);
        o->length_max = least(a->length_max, b->length_max);
        if ((o->string != NULL && o->string->count == 0) || o->length_min > o->length_max)
            o->types &= (uint8_t)~T_STRING;
    }
    if (o->types & T_OBJECT) {
        o->object = object_and(s, a->object, b->object);
        for (uint32_t i = 0; o->object != NULL && i < o->object->count; i++)
            if (o->object->members[i].required && o->object->members[i].value->never)
                o->types &= (uint8_t)~T_OBJECT;
        if (o->object != NULL && o->object->min > o->object->max)
            o->types &= (uint8_t)~T_OBJECT;
    }
    if (o->types & T_ARRAY) {
        o->array = array_and(s, a->array, b->array, at);
        if (o->array != NULL && o->array->min > o->array->max)
            o->types &= (uint8_t)~T_ARRAY;
    }
    return o->types == 0 ? NULL : o;
}

static alts *alts_and(schema *s, const alts *a, const alts *b, const dom *at)
{
    if ((size_t)a->count * b->count > (size_t)ALTERNATIVES_MAX * 32)
        wrong(s, BASE_UNSUPPORTED, at, "allOf", "more than %u alternatives", ALTERNATIVES_MAX);
    alts *o = alts_new(s, a->count * b->count);
    for (uint32_t i = 0; i < a->count; i++)
        for (uint32_t k = 0; k < b->count; k++) {
            bundle *both = bundle_and(s, a->data[i], b->data[k], at);
            if (both != NULL)
                o->data[o->count++] = both;
        }
    if (o->count > ALTERNATIVES_MAX)
        wrong(s, BASE_UNSUPPORTED, at, "allOf", "more than %u alternatives", ALTERNATIVES_MAX);
    return o;
}

static alts *alts_or(schema *s, const alts *a, const alts *b)
{
    alts *o = alts_new(s, a->count + b->count);
    memcpy(o->data, a->data, a->count * sizeof *o->data);
    memcpy(o->data + a->count, b->data, b->count * sizeof *o->data);
    o->count = a->count + b->count;
    return o;
}

static void alt_add(schema *s, alts *a, bundle *b, const dom *at, const char *keyword)
{
    if (a->count >= ALTERNATIVES_MAX)
        wrong(s, BASE_UNSUPPORTED, at, keyword, "more than %u alternatives", ALTERNATIVES_MAX);
    a->data[a->count++] = b;
}

static alts *term_open(schema *s, term *t, uint32_t depth);

/* The opposites of a term, one term for each; NULL if there is none. */
static term *lit_not(schema *s, literal l)
{
    return term_lit(s, l.node, l.kind ^ 1);
}

static bundle *with_member(schema *s, gr_text name, term *value, bool required)
{
    bundle *b = bundle_any(s, T_OBJECT);
    b->object = object_any(s);
    b->object->members = gr_alloc(s->c, 1, sizeof(member));
    b->object->members[0] = (member){name, value, required};
    b->object->count = 1;
    return b;
}

static bundle *with_array(schema *s)
{
    bundle *b = bundle_any(s, T_ARRAY);
    b->array = array_any(s);
    return b;
}

static bundle *with_item(schema *s, uint32_t place, term *value)
{
    bundle *b = with_array(s);
    b->array->prefix = gr_alloc(s->c, place + 1, sizeof *b->array->prefix);
    for (uint32_t i = 0; i < place; i++)
        b->array->prefix[i] = s->always;
    b->array->prefix[place] = value;
    b->array->count = b->array->min = place + 1;
    return b;
}

/* False where the complement of the object cannot be written. */
static bool object_not(schema *s, alts *out, const object *o, const dom *at, const char *keyword)
{
    bool open = o->class_count == 1 && o->classes[0].set == NULL &&
                o->classes[0].value->count == 0 && !o->classes[0].value->never;
    bool closed = true, all = true;
    for (uint32_t i = 0; i < o->class_count; i++)
        closed = closed && o->classes[i].value->never;
    for (uint32_t i = 0; i < o->count; i++)
        all = all && (o->members[i].required || o->members[i].value->never);
    if (!open && !(closed && all))
        return false;
    uint32_t may = 0;
    for (uint32_t i = 0; i < o->count; i++) {
        const member *m = &o->members[i];
        may += !m->value->never;
        if (m->required)
            alt_add(s, out, with_member(s, m->name, s->never, false), at, keyword);
        if (m->value->never)
            alt_add(s, out, with_member(s, m->name, s->always, true), at, keyword);
        for (uint32_t k = 0; !m->value->never && k < m->value->count; k++)
            alt_add(s, out, with_member(s, m->name, lit_not(s, m->value->lits[k]), true), at,
                    keyword);
    }
    uint32_t max = open ? o->max : least(o->max, may);
    if (max != GR_INFINITE) {
        bundle *b = bundle_any(s, T_OBJECT);
        b->object = object_any(s);
        b->object->min = max + 1;
        alt_add(s, out, b, at, keyword);
    }
    if (o->min > 0) {
        bundle *b = bundle_any(s, T_OBJECT);
        b->object = object_any(s);
        b->object->max = o->min - 1;
        alt_add(s, out, b, at, keyword);
    }
    return true;
}

static bool array_not(schema *s, alts *out, const array *a, const dom *at, const char *keyword)
{
    if (a->unique || (a->contains != NULL && a->contains_min > 1))
        return false;
    if (a->count > 0 && a->rest->count > 0)
        return false;
    if (a->count > 256)
        return false;
    for (uint32_t i = 0; i < a->count; i++) {
        if (a->prefix[i]->never)
            alt_add(s, out, with_item(s, i, s->always), at, keyword);
        for (uint32_t k = 0; !a->prefix[i]->never && k < a->prefix[i]->count; k++)
            alt_add(s, out, with_item(s, i, lit_not(s, a->prefix[i]->lits[k])), at, keyword);
    }
    uint32_t max = a->rest->never ? least(a->max, a->count) : a->max;
    for (uint32_t k = 0; !a->rest->never && k < a->rest->count; k++) {
        bundle *b = with_array(s);
        b->array->contains = lit_not(s, a->rest->lits[k]);
        b->array->contains_min = 1;
        alt_add(s, out, b, at, keyword);
    }
    if (max != GR_INFINITE) {
        bundle *b = with_array(s);
        b->array->min = max + 1;
        alt_add(s, out, b, at, keyword);
    }
    if (a->min > 0) {
        bundle *b = with_array(s);
        b->array->max = a->min - 1;
        alt_add(s, out, b, at, keyword);
    }
    if (a->contains != NULL && a->contains_min == 1) {
        if (a->contains->count != 1)
            return a->contains->never;
        bundle *b = with_array(s);
        b->array->rest = lit_not(s, a->contains->lits[0]);
        alt_add(s, out, b, at, keyword);
    }
    return true;
}

static alts *bundle_not(schema *s, const bundle *b, const dom *at, const char *keyword)
{
    alts *out = alts_new(s, ALTERNATIVES_MAX);
    if (b->types != T_ALL)
        alt_add(s, out, bundle_any(s, T_ALL & ~b->types), at, keyword);
    if ((b->types & T_NUMBER) && b->number != NULL) {
        bundle *n = bundle_any(s, T_NUMBER);
        n->number = gr_dfa_op(s->c, all_numbers(s), b->number, GR_MINUS);
        if (n->number->count > 0)
            alt_add(s, out, n, at, keyword);
    }
    if (b->types & T_STRING) {
        if (b->string != NULL) {
            bundle *n = bundle_any(s, T_STRING);
            n->string = gr_dfa_op(s->c, gr_dfa_all(s->c), b->string, GR_MINUS);
            if (n->string->count > 0)
                alt_add(s, out, n, at, keyword);
        }
        if (b->length_min > 0) {
            bundle *n = bundle_any(s, T_STRING);
            n->length_max = b->length_min - 1;
            alt_add(s, out, n, at, keyword);
        }
        if (b->length_max != GR_INFINITE) {
            bundle *n = bundle_any(s, T_STRING);
            n->length_min = b->length_max + 1;
            alt_add(s, out, n, at, keyword);
        }
    }
    if ((b->types & T_OBJECT) && b->object != NULL && !object_not(s, out, b->object, at, keyword))
        wrong(s, BASE_UNSUPPORTED, at, keyword, "the opposite of an object cannot be enforced");
    if ((b->types & T_ARRAY) && b->array != NULL && !array_not(s, out, b->array, at, keyword))
        wrong(s, BASE_UNSUPPORTED, at, keyword, "the opposite of an array cannot be enforced");
    return out;
}

static alts *alts_not(schema *s, const alts *a, const dom *at, const char *keyword)
{
    alts *o = alts_new(s, 1);
    o->data[o->count++] = bundle_any(s, T_ALL);
    for (uint32_t i = 0; i < a->count; i++)
        o = alts_and(s, o, bundle_not(s, a->data[i], at, keyword), at);
    return o;
}

/* Surely empty: a required member or item that nothing satisfies, a few levels down. */
static bool bundle_empty(schema *s, const bundle *b, uint32_t depth)
{
    uint8_t types = b->types;
    if (depth > 8)
        return false;
    if ((types & T_OBJECT) && b->object != NULL)
        for (uint32_t i = 0; i < b->object->count && (types & T_OBJECT); i++) {
            const member *m = &b->object->members[i];
            if (!m->required)
                continue;
            bool empty = true;
            const alts *a = m->value->never ? NULL : term_open(s, m->value, depth);
            for (uint32_t k = 0; a != NULL && empty && k < a->count; k++)
                empty = bundle_empty(s, a->data[k], depth + 1);
            if (empty)
                types &= (uint8_t)~T_OBJECT;
        }
    if ((types & T_ARRAY) && b->array != NULL)
        for (uint32_t i = 0; i < b->array->min && i <= b->array->count; i++) {
            term *t = i < b->array->count ? b->array->prefix[i] : b->array->rest;
            bool empty = true;
            const alts *a = t->never ? NULL : term_open(s, t, depth);
            for (uint32_t k = 0; a != NULL && empty && k < a->count; k++)
                empty = bundle_empty(s, a->data[k], depth + 1);
            if (empty)
                types &= (uint8_t)~T_ARRAY;
        }
    if ((types & T_STRING) && b->string != NULL &&
        (b->length_min > 0 || b->length_max != GR_INFINITE) &&
        most(b->length_min, b->length_max == GR_INFINITE ? 0 : b->length_max) < 4096 &&
        dfa_and(s, b->string, gr_dfa_length(s->c, b->length_min, b->length_max))->count == 0)
        types &= (uint8_t)~T_STRING;
    return types == 0;
}

static bool alts_apart(schema *s, const alts *a, const alts *b, const dom *at)
{
    for (uint32_t i = 0; i < a->count; i++)
        for (uint32_t k = 0; k < b->count; k++) {
            bundle *both = bundle_and(s, a->data[i], b->data[k], at);
            if (both != NULL && !bundle_empty(s, both, 0))
                return false;
        }
    return true;
}

/* ---- keywords ---- */

static uint32_t count_of(schema *s, const dom *node, const char *keyword)
{
    decimal *d = decimal_of(s, node, keyword);
    uint64_t n = 0;
    if (d->negative || d->part_count > 0)
        wrong(s, BASE_INVALID, node->parent, keyword, "must be a whole number from 0 on");
    for (uint32_t i = 0; i < d->whole_count && n < GR_INFINITE; i++)
        n = n * 10 + (uint64_t)(d->whole[i] - '0');
    return n >= GR_INFINITE ? GR_INFINITE - 1 : (uint32_t)n;
}

static void expect_kind(schema *s, const dom *node, base_json_kind kind, const char *keyword)
{
    if (node->kind != kind)
        wrong(s, BASE_INVALID, node->parent, keyword, "must be %s",
              kind == BASE_JSON_ARRAY_BEGIN    ? "an array"
              : kind == BASE_JSON_OBJECT_BEGIN ? "an object"
                                               : "a string");
}

static void number_and(schema *s, bundle *b, gr_dfa *dfa)
{
    b->number = dfa_and(s, b->number, dfa);
    if (b->number->count == 0)
        b->types &= (uint8_t)~T_NUMBER;
}

static void string_and(schema *s, bundle *b, gr_dfa *dfa)
{
    b->string = dfa_and(s, b->string, dfa);
    if (b->string->count == 0)
        b->types &= (uint8_t)~T_STRING;
}

static void read_type(schema *s, const dom *node, bundle *b, const dom *type)
{
    static const struct {
        const char *name;
        uint8_t types;
    } kinds[] = {{"null", T_NULL},      {"boolean", T_TRUE | T_FALSE}, {"number", T_NUMBER},
                 {"integer", T_NUMBER}, {"string", T_STRING},          {"object", T_OBJECT},
                 {"array", T_ARRAY}};
    bool number = false, integer = false;
    uint8_t types = 0;
    const dom *one = type->kind == BASE_JSON_ARRAY_BEGIN ? type->first : type;
    for (; one != NULL; one = one == type ? NULL : one->next) {
        size_t i = 0;
        if (one->kind != BASE_JSON_STRING)
            wrong(s, BASE_INVALID, node, "type", "must be a string or a list of strings");
        while (i < 7 && !is(one->text, kinds[i].name))
            i++;
        if (i == 7)
            wrong(s, BASE_INVALID, node, "type", "%.*s is no type", (int)one->text.length,
                  one->text.data);
        types |= kinds[i].types;
        number = number || i == 2;
        integer = integer || i == 3;
    }
    b->types &= types;
    if (integer && !number)
        number_and(s, b, integers(s));
}

static void read_numbers(schema *s, const dom *node, bundle *b)
{
    static const struct {
        const char *name, *exclusive, *op, *exclusive_op;
    } bounds[] = {{"minimum", "exclusiveMinimum", ">=", ">"},
                  {"maximum", "exclusiveMaximum", "<=", "<"}};
    for (size_t i = 0; i < 2; i++) {
        const dom *at = get(node, bounds[i].name), *exclusive = get(node, bounds[i].exclusive);
        bool flag = exclusive != NULL && exclusive->kind == BASE_JSON_TRUE; /* draft 4 */
        if (at != NULL)
            number_and(s, b,
                       number_bound(s, decimal_of(s, at, bounds[i].name),
                                    flag ? bounds[i].exclusive_op : bounds[i].op));
        if (exclusive != NULL && exclusive->kind != BASE_JSON_TRUE &&
            exclusive->kind != BASE_JSON_FALSE)
            number_and(s, b,
                       number_bound(s, decimal_of(s, exclusive, bounds[i].exclusive),
                                    bounds[i].exclusive_op));
    }
    const dom *of = get(node, "multipleOf");
    if (of != NULL)
        number_and(s, b, number_multiple(s, of));
}

#define OCTET "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
#define DATE                                                                                       \
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|"      \
    "02-(0[1-9]|1[0-9]|2[0-8]))|([0-9]{2}(0[48]|[2468][048]|[13579][26])|"                         \
    "([02468][048]|[13579][26])00)-02-29)"
#define TIME                                                                                       \
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
#define H16 "[0-9A-Fa-f]{1,4}"
#define LABEL "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define URI_CHARS "(?:[!#-;=?-Z_a-z~\\[\\]]|%[0-9A-Fa-f]{2})"

static const struct {
    const char *name, *pattern; /* NULL: a standard format that is refused */
} formats[] = {
    {"date", DATE},
    {"time", TIME},
    {"date-time", DATE "[Tt]" TIME},
    {"duration", "P(([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
                 "(T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))?|"
                 "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)|[0-9]+W)"},
    {"email", "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*@" LABEL
              "(\\." LABEL ")*"},
    {"hostname", LABEL "(\\." LABEL ")*"},
    {"ipv4", OCTET "(\\." OCTET "){3}"},
    {"ipv6", "(" H16 ":){7}" H16 "|(" H16 ":){1,7}:|(" H16 ":){1,6}:" H16 "|(" H16 ":){1,5}(:" H16
             "){1,2}|(" H16 ":){1,4}(:" H16 "){1,3}|(" H16 ":){1,3}(:" H16 "){1,4}|(" H16
             ":){1,2}(:" H16 "){1,5}|" H16 ":(:" H16 "){1,6}|:(:" H16 "){1,7}|::|"
             "(" H16 ":){6}" OCTET "(\\." OCTET "){3}|::(" H16 ":){0,5}" OCTET "(\\." OCTET
             "){3}|" H16 "::(" H16 ":){0,4}" OCTET "(\\." OCTET "){3}"},
    {"uuid", "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"},
    {"uri", "[A-Za-z][A-Za-z0-9+.-]*:(?:[!$-;=?-Z_a-z~]|%[0-9A-Fa-f]{2}|\\[[0-9A-Fa-f:.]+\\])*"
            "(#(?:[!$-;=?-Z_a-z~]|%[0-9A-Fa-f]{2})*)?"},
    {"json-pointer", "(/([^/~]|~[01])*)*"},
    {"uri-reference", NULL},
    {"uri-template", NULL},
    {"iri", NULL},
    {"iri-reference", NULL},
    {"idn-email", NULL},
    {"idn-hostname", NULL},
    {"relative-json-pointer", NULL},
    {"regex", NULL},
};

static void read_strings(schema *s, const dom *node, bundle *b)
{
    const dom *at;
    char pointer[160];
    if ((at = get(node, "minLength")) != NULL)
        b->length_min = count_of(s, at, "minLength");
    if ((at = get(node, "maxLength")) != NULL)
        b->length_max = count_of(s, at, "maxLength");
    if (b->length_min > b->length_max)
        b->types &= (uint8_t)~T_STRING;
    if ((at = get(node, "pattern")) != NULL) {
        expect_kind(s, at, BASE_JSON_STRING, "pattern");
        pointer_of(node, "pattern", pointer);
        string_and(s, b,
                   gr_dfa_regex(s->c, at->text.data, at->text.length, false, "pattern", pointer));
    }
    if ((at = get(node, "format")) == NULL || at->kind != BASE_JSON_STRING ||
        s->c->options.any_format)
        return;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (!is(at->text, formats[i].name))
            continue;
        if (formats[i].pattern == NULL)
            wrong(s, BASE_UNSUPPORTED, node, "format", "%s cannot be enforced", formats[i].name);
        string_and(s, b,
                   gr_dfa_regex(s->c, formats[i].pattern, strlen(formats[i].pattern), true,
                                "format", NULL));
    }
}

/* The strings that satisfy a schema: what propertyNames asks. */
static gr_dfa *names_of(schema *s, dom *node, uint32_t depth)
{
    term *t = term_lit(s, node, L_SCHEMA);
    gr_dfa *all = NULL;
    if (t->count == 0 && !t->never)
        return NULL;
    const alts *a = t->never ? alts_new(s, 1) : term_open(s, t, depth);
    all = gr_dfa_texts(s->c, NULL, 0);
    for (uint32_t i = 0; i < a->count; i++) {
        const bundle *b = a->data[i];
        if (!(b->types & T_STRING))
            continue;
        gr_dfa *one = b->string;
        if (b->length_min > 0 || b->length_max != GR_INFINITE)
            one = dfa_and(s, one, gr_dfa_length(s->c, b->length_min, b->length_max));
        if (one == NULL)
            return NULL;
        all = gr_dfa_op(s->c, all, one, GR_OR);
    }
    return all;
}

static void read_object(schema *s, dom *node, bundle *b, uint32_t depth)
{
    dom *properties = get(node, "properties"), *patterns = get(node, "patternProperties");
    dom *extra = get(node, "additionalProperties"), *required = get(node, "required");
    dom *property_names = get(node, "propertyNames"), *min = get(node, "minProperties");
    dom *max = get(node, "maxProperties");
    dom *unevaluated = get(node, "unevaluatedProperties");
    if (unevaluated != NULL && unevaluated->kind != BASE_JSON_TRUE) {
        static const char *const others[] = {
            "allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "dependencies"};
        for (size_t i = 0; i < sizeof others / sizeof *others; i++)
            if (get(node, others[i]) != NULL)
                wrong(s, BASE_UNSUPPORTED, node, "unevaluatedProperties", "beside %s", others[i]);
        if (extra == NULL)
            extra = unevaluated;
    }
    if (properties == NULL && patterns == NULL && extra == NULL && required == NULL &&
        property_names == NULL && min == NULL && max == NULL)
        return;
    object *o = object_any(s);
    uint32_t capacity = 0;
    if (properties != NULL) {
        expect_kind(s, properties, BASE_JSON_OBJECT_BEGIN, "properties");
        capacity += properties->last == NULL ? 0 : properties->last->index + 1;
    }
    bool list = required != NULL && required->kind == BASE_JSON_ARRAY_BEGIN;
    if (list)
        capacity += required->last == NULL ? 0 : required->last->index + 1;
    else if (required != NULL && required->kind != BASE_JSON_TRUE &&
             required->kind != BASE_JSON_FALSE) /* a flag in draft 3, which says nothing here */
        wrong(s, BASE_INVALID, node, "required", "must be an array");
    o->members = gr_alloc(s->c, capacity, sizeof *o->members);

    /* Names are cut into classes by the patterns; no pattern: additionalProperties. */
    term *rest = extra == NULL ? s->always : term_lit(s, extra, L_SCHEMA);
    if (patterns != NULL)
        expect_kind(s, patterns, BASE_JSON_OBJECT_BEGIN, "patternProperties");
    typedef struct cut {
        gr_dfa *set;
        term *value; /* NULL: no pattern yet */
    } cut;
    uint32_t cuts = 1;
    cut *all = gr_alloc(s->c, 64, sizeof *all);
    for (dom *p = patterns == NULL ? NULL : patterns->first; p != NULL; p = p->next) {
        char pointer[160];
        pointer_of(node, "patternProperties", pointer);
        gr_dfa *set =
            gr_dfa_regex(s->c, p->key.data, p->key.length, false, "patternProperties", pointer);
        term *value = term_lit(s, p, L_SCHEMA);
        for (uint32_t i = 0, n = cuts; i < n; i++) {
            gr_dfa *in = dfa_and(s, all[i].set, set);
            gr_dfa *out =
                gr_dfa_op(s->c, all[i].set == NULL ? gr_dfa_all(s->c) : all[i].set, set, GR_MINUS);
            term *both = all[i].value == NULL ? value : term_and(s, all[i].value, value);
            if (in->count == 0)
                continue;
            if (out->count > 0) {
                if (cuts == 64)
                    wrong(s, BASE_UNSUPPORTED, node, "patternProperties", "too many overlap");
                all[cuts++] = (cut){out, all[i].value};
            }
            all[i] = (cut){in, both};
        }
    }
    gr_dfa *allowed = property_names == NULL ? NULL : names_of(s, property_names, depth);
    o->classes = gr_alloc(s->c, cuts, sizeof *o->classes);
    o->class_count = 0;
    for (uint32_t i = 0; i < cuts; i++) {
        gr_dfa *set = dfa_and(s, all[i].set, allowed);
        if (set == NULL || set->count > 0)
            o->classes[o->class_count++] = (names){set, all[i].value == NULL ? rest : all[i].value};
    }
    for (dom *p = properties == NULL ? NULL : properties->first; p != NULL; p = p->next) {
        term *value = term_lit(s, p, L_SCHEMA);
        for (uint32_t i = 0; i < cuts; i++)
            if (all[i].value != NULL && gr_dfa_has(all[i].set, p->key.data, p->key.length))
                value = term_and(s, value, all[i].value);
        if (allowed != NULL && !gr_dfa_has(allowed, p->key.data, p->key.length))
            value = s->never;
        member *old = member_find(o, p->key);
        if (old != NULL)
            old->value = value;
        else
            o->members[o->count++] = (member){p->key, value, false};
    }
    for (dom *r = list ? required->first : NULL; r != NULL; r = r->next) {
        expect_kind(s, r, BASE_JSON_STRING, "required");
        member *m = member_find(o, r->text);
        if (m == NULL) {
            term *value = member_term(s, o, r->text);
            m = &o->members[o->count++];
            *m = (member){r->text, value, false};
        }
        m->required = true;
    }
    o->min = min == NULL ? 0 : count_of(s, min, "minProperties");
    o->max = max == NULL ? GR_INFINITE : count_of(s, max, "maxProperties");
    b->object = o;
    for (uint32_t i = 0; i < o->count; i++)
        if (o->members[i].required && o->members[i].value->never)
            b->types &= (uint8_t)~T_OBJECT;
    if (o->min > o->max)
        b->types &= (uint8_t)~T_OBJECT;
}

static void read_array(schema *s, dom *node, bundle *b)
{
    dom *prefix = get(node, "prefixItems"), *items = get(node, "items");
    dom *extra = get(node, "additionalItems"), *contains = get(node, "contains");
    dom *min = get(node, "minItems"), *max = get(node, "maxItems");
    dom *unique = get(node, "uniqueItems"), *unevaluated = get(node, "unevaluatedItems");
    dom *contains_min = get(node, "minContains"), *contains_max = get(node, "maxContains");
    array *a = array_any(s);
    if (prefix == NULL && items != NULL && items->kind == BASE_JSON_ARRAY_BEGIN) {
        prefix = items;
        items = extra;
    }
    if (unevaluated != NULL && unevaluated->kind != BASE_JSON_TRUE) {
        static const char *const others[] = {"allOf", "anyOf", "oneOf",   "not",
                                             "if",    "$ref",  "contains"};
        for (size_t i = 0; i < sizeof others / sizeof *others; i++)
            if (get(node, others[i]) != NULL)
                wrong(s, BASE_UNSUPPORTED, node, "unevaluatedItems", "beside %s", others[i]);
        if (items == NULL)
            items = unevaluated;
    }
    if (prefix != NULL) {
        expect_kind(s, prefix, BASE_JSON_ARRAY_BEGIN, "prefixItems");
        a->prefix =
            gr_alloc(s->c, prefix->last == NULL ? 0 : prefix->last->index + 1, sizeof *a->prefix);
        for (dom *p = prefix->first; p != NULL; p = p->next)
            a->prefix[a->count++] = term_lit(s, p, L_SCHEMA);
    }
    if (items != NULL)
        a->rest = term_lit(s, items, L_SCHEMA);
    a->min = min == NULL ? 0 : count_of(s, min, "minItems");
    a->max = max == NULL ? GR_INFINITE : count_of(s, max, "maxItems");
    a->unique = unique != NULL && unique->kind == BASE_JSON_TRUE;
    if (contains != NULL) {
        a->contains_min = contains_min == NULL ? 1 : count_of(s, contains_min, "minContains");
        if (contains_max != NULL)
            wrong(s, BASE_UNSUPPORTED, node, "maxContains", "cannot be enforced");
        if (a->contains_min > 0)
            a->contains = term_lit(s, contains, L_SCHEMA);
    }
    if (a->min > a->max)
        b->types &= (uint8_t)~T_ARRAY;
    b->array = a;
}

/* One value, as an enum or a const has it. */
static bundle *value_bundle(schema *s, dom *node)
{
    bundle *b = bundle_any(s, 0);
    switch (node->kind) {
    case BASE_JSON_NULL:
        b->types = T_NULL;
        break;
    case BASE_JSON_TRUE:
        b->types = T_TRUE;
        break;
    case BASE_JSON_FALSE:
        b->types = T_FALSE;
        break;
    case BASE_JSON_NUMBER:
        b->types = T_NUMBER;
        b->number = number_bound(s, decimal_of(s, node, "enum"), "=");
        break;
    case BASE_JSON_STRING:
        b->types = T_STRING;
        b->string = gr_dfa_texts(s->c, &node->text, 1);
        break;
    case BASE_JSON_ARRAY_BEGIN:
        b->types = T_ARRAY;
        b->array = array_any(s);
        b->array->rest = s->never;
        b->array->count = node->last == NULL ? 0 : node->last->index + 1;
        b->array->min = b->array->max = b->array->count;
        b->array->prefix = gr_alloc(s->c, b->array->count, sizeof *b->array->prefix);
        for (dom *k = node->first; k != NULL; k = k->next)
            b->array->prefix[k->index] = term_lit(s, k, L_VALUE);
        break;
    default:
        b->types = T_OBJECT;
        b->object = object_any(s);
        b->object->classes[0].value = s->never;
        b->object->members =
            gr_alloc(s->c, node->last == NULL ? 0 : node->last->index + 1, sizeof(member));
        for (dom *k = node->first; k != NULL; k = k->next) {
            member *old = member_find(b->object, k->key);
            if (old != NULL)
                old->value = term_lit(s, k, L_VALUE);
            else
                b->object->members[b->object->count++] =
                    (member){k->key, term_lit(s, k, L_VALUE), true};
        }
        break;
    }
    return b;
}

static alts *values_open(schema *s, dom *list)
{
    uint32_t count = list->last == NULL ? 0 : list->last->index + 1, texts = 0;
    alts *a = alts_new(s, count + 1);
    bundle *plain = bundle_any(s, 0);
    gr_text *strings = gr_alloc(s->c, count, sizeof *strings);
    for (dom *k = list->first; k != NULL; k = k->next) {
        if (k->kind == BASE_JSON_STRING) {
            strings[texts++] = k->text;
            plain->types |= T_STRING;
            continue;
        }
        bundle *one = value_bundle(s, k);
        if (one->types & (T_OBJECT | T_ARRAY)) {
            a->data[a->count++] = one;
            continue;
        }
        plain->types |= one->types;
        if (one->types == T_NUMBER)
            plain->number = plain->number == NULL
                                ? one->number
                                : gr_dfa_op(s->c, plain->number, one->number, GR_OR);
    }
    if (texts > 0)
        plain->string = gr_dfa_texts(s->c, strings, texts);
    if (plain->types != 0)
        a->data[a->count++] = plain;
    return a;
}

static alts *schema_open(schema *s, dom *node, uint32_t depth);

static alts *any_of(schema *s, dom *node, dom *list, const char *keyword, uint32_t depth)
{
    alts *a = alts_new(s, ALTERNATIVES_MAX);
    expect_kind(s, list, BASE_JSON_ARRAY_BEGIN, keyword);
    for (dom *k = list->first; k != NULL; k = k->next) {
        alts *one = schema_open(s, k, depth + 1);
        for (uint32_t i = 0; i < one->count; i++)
            alt_add(s, a, one->data[i], node, keyword);
    }
    return a;
}

static alts *one_of(schema *s, dom *node, dom *list, const alts *outer, uint32_t depth)
{
    expect_kind(s, list, BASE_JSON_ARRAY_BEGIN, "oneOf");
    uint32_t n = list->last == NULL ? 0 : list->last->index + 1;
    alts **each = gr_alloc(s->c, n, sizeof *each);
    alts *all = alts_new(s, ALTERNATIVES_MAX);
    for (dom *k = list->first; k != NULL; k = k->next)
        each[k->index] = alts_and(s, outer, schema_open(s, k, depth + 1), node);
    for (uint32_t i = 0; i < n; i++) {
        alts *only = each[i];
        for (uint32_t k = 0; k < n; k++)
            if (k != i && !alts_apart(s, each[i], each[k], node))
                only = alts_and(s, only, alts_not(s, each[k], node, "oneOf"), node);
        for (uint32_t j = 0; j < only->count; j++)
            alt_add(s, all, only->data[j], node, "oneOf");
    }
    return all;
}

static alts *alts_one(schema *s, bundle *b)
{
    alts *a = alts_new(s, 1);
    if (b->types != 0)
        a->data[a->count++] = b;
    return a;
}

/* Either `name` is not there, or what it asks for holds. */
static alts *dependent(schema *s, dom *node, dom *d, uint32_t depth)
{
    alts *with, *without = alts_one(s, with_member(s, d->key, s->never, false));
    alt_add(s, without = alts_or(s, without, alts_new(s, 0)), bundle_any(s, T_ALL & ~T_OBJECT),
            node, "dependentRequired");
    if (d->kind == BASE_JSON_ARRAY_BEGIN || d->kind == BASE_JSON_STRING) {
        dom *one = d->kind == BASE_JSON_STRING ? d : d->first;
        with = alts_one(s, with_member(s, d->key, s->always, true));
        for (; one != NULL; one = one == d ? NULL : one->next)
            with = alts_and(s, with, alts_one(s, with_member(s, one->text, s->always, true)), node);
    } else {
        with = alts_and(s, alts_one(s, with_member(s, d->key, s->always, true)),
                        schema_open(s, d, depth + 1), node);
    }
    return alts_or(s, without, with);
}

static alts *schema_read(schema *s, dom *node, uint32_t depth)
{
    static const char *const refused[] = {"$dynamicRef", "$recursiveRef", "extends", "disallow",
                                          "divisibleBy"};
    dom *at;
    if (node->kind == BASE_JSON_TRUE)
        return alts_one(s, bundle_any(s, T_ALL));
    if (node->kind == BASE_JSON_FALSE)
        return alts_new(s, 1);
    if (node->kind != BASE_JSON_OBJECT_BEGIN)
        wrong(s, BASE_INVALID, node, NULL, "is neither an object nor a boolean");
    alts *all = alts_one(s, bundle_any(s, T_ALL));
    if ((at = get(node, "$ref")) != NULL && at->kind == BASE_JSON_STRING) {
        dom *to = resolve(s, node, at);
        if (to->opening)
            wrong(s, BASE_INVALID, node, "$ref", "%.*s leads back here without a value between",
                  (int)at->text.length, at->text.data);
        all = schema_open(s, to, depth + 1);
        if (s->draft <= 7)
            return all;
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (get(node, refused[i]) != NULL && (i < 2 || s->draft < 4))
            wrong(s, BASE_UNSUPPORTED, node, refused[i], "cannot be enforced");
    bundle *b = bundle_any(s, T_ALL);
    if ((at = get(node, "type")) != NULL)
        read_type(s, node, b, at);
    read_numbers(s, node, b);
    read_strings(s, node, b);
    read_object(s, node, b, depth);
    static const char *const array_words[] = {"prefixItems",     "items",    "contains",
                                              "minItems",        "maxItems", "uniqueItems",
                                              "unevaluatedItems"};
    for (size_t i = 0; i < sizeof array_words / sizeof *array_words && b->array == NULL; i++)
        if (get(node, array_words[i]) != NULL)
            read_array(s, node, b);
    all = alts_and(s, all, alts_one(s, b), node);
    if ((at = get(node, "enum")) != NULL) {
        expect_kind(s, at, BASE_JSON_ARRAY_BEGIN, "enum");
        all = alts_and(s, all, values_open(s, at), node);
    }
    if ((at = get(node, "const")) != NULL)
        all = alts_and(s, all, alts_one(s, value_bundle(s, at)), node);
    if ((at = get(node, "allOf")) != NULL) {
        expect_kind(s, at, BASE_JSON_ARRAY_BEGIN, "allOf");
        for (dom *k = at->first; k != NULL; k = k->next)
            all = alts_and(s, all, schema_open(s, k, depth + 1), node);
    }
    if ((at = get(node, "anyOf")) != NULL)
        all = alts_and(s, all, any_of(s, node, at, "anyOf", depth), node);
    static const char *const dependencies[] = {"dependentRequired", "dependentSchemas",
                                               "dependencies"};
    for (size_t i = 0; i < 3; i++)
        if ((at = get(node, dependencies[i])) != NULL && at->kind == BASE_JSON_OBJECT_BEGIN)
            for (dom *k = at->first; k != NULL; k = k->next)
                all = alts_and(s, all, dependent(s, node, k, depth), node);
    if ((at = get(node, "if")) != NULL) {
        dom *then = get(node, "then"), *otherwise = get(node, "else");
        if (then != NULL || otherwise != NULL) {
            alts *condition = schema_open(s, at, depth + 1);
            alts *yes = then == NULL
                            ? condition
                            : alts_and(s, condition, schema_open(s, then, depth + 1), node);
            alts *no = alts_not(s, condition, node, "if");
            if (otherwise != NULL)
                no = alts_and(s, no, schema_open(s, otherwise, depth + 1), node);
            all = alts_and(s, all, alts_or(s, yes, no), node);
        }
    }
    if ((at = get(node, "not")) != NULL)
        all = alts_and(s, all, alts_not(s, schema_open(s, at, depth + 1), node, "not"), node);
    if ((at = get(node, "oneOf")) != NULL)
        all = one_of(s, node, at, all, depth);
    return all;
}

static alts *schema_open(schema *s, dom *node, uint32_t depth)
{
    if (node->open[L_SCHEMA] != NULL)
        return node->open[L_SCHEMA];
    if (node->opening)
        wrong(s, BASE_INVALID, node, "$ref", "the schema contains itself without a value between");
    if (depth > EXPAND_MAX)
        wrong(s, BASE_TOO_LONG, node, NULL, "more than %u applicators inside each other",
              EXPAND_MAX);
    node->opening = true;
    alts *a = schema_read(s, node, depth);
    node->opening = false;
    node->open[L_SCHEMA] = a;
    return a;
}

static alts *term_open(schema *s, term *t, uint32_t depth)
{
    if (t->open != NULL)
        return t->open;
    alts *all = alts_one(s, bundle_any(s, T_ALL));
    for (uint32_t i = 0; i < t->count; i++) {
        literal l = t->lits[i];
        alts *one = l.node->open[l.kind];
        if (one == NULL && l.kind == L_VALUE)
            one = alts_one(s, value_bundle(s, l.node));
        else if (one == NULL && l.kind == L_NOT_VALUE)
            one = bundle_not(s, value_bundle(s, l.node), l.node, "not");
        else if (one == NULL && l.kind == L_NOT)
            one = alts_not(s, schema_open(s, l.node, depth), l.node, "not");
        else if (one == NULL)
            one = schema_open(s, l.node, depth);
        l.node->open[l.kind] = one;
        all = alts_and(s, all, one, l.node);
    }
    t->open = all;
    return all;
}

/* ---- into the graph ---- */

static uint32_t rule_of(schema *s, term *t)
{
    if (t->rule == 0) {
        t->rule = gr_rule_add(s->c) + 1;
        s->c->g->rules.data[t->rule - 1].start = GR_NONE;
        *s->queue_end = t;
        s->queue_end = &t->queued;
    }
    return t->rule - 1;
}

/* An optional blank, or what the options say, before `next`. `separator`: behind ':' or ','. */
static uint32_t space(schema *s, bool separator, uint32_t next)
{
    gr_compile *c = s->c;
    if (c->options.space == ENG_GRAMMAR_SPACE_COMPACT ||
        (c->options.space == ENG_GRAMMAR_SPACE_SINGLE && !separator))
        return next;
    uint32_t blanks = c->options.space == ENG_GRAMMAR_SPACE_SINGLE ? 1 : 24, at = next;
    for (uint32_t i = 0; i < blanks; i++) {
        uint32_t byte = gr_bytes_add(c, &(gr_edge){' ', ' ', at}, 1);
        at = gr_fork_add(c, (uint32_t[]){byte, next}, 2);
    }
    if (blanks == 1)
        return at;
    uint32_t line = gr_bytes_add(c, &(gr_edge){'\n', '\n', at}, 1);
    return gr_fork_add(c, (uint32_t[]){line, at}, 2);
}

static uint32_t lower_number(schema *s, const bundle *b)
{
    gr_compile *c = s->c;
    gr_dfa *set = b->number;
    if (c->options.any_number) {
        if (set == NULL)
            set = regex(s, &s->plain_number, "-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?");
        return gr_dfa_lower(c, set, false, s->ret);
    }
    if (set == NULL)
        return gr_dfa_lower(c,
                            regex(s, &s->plain_number,
                                  "-?(0|[1-9][0-9]{0,14})(\\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?"),
                            false, s->ret);
    /* One way to write each number: an integer has no fraction. */
    gr_dfa *once = regex(s, &s->canonical_number,
                         "0|-?[1-9][0-9]{0,17}|-?(0|[1-9][0-9]{0,14})\\.[0-9]{0,14}[1-9]");
    gr_dfa *kept = gr_dfa_op(c, set, once, GR_AND);
    return gr_dfa_lower(c, kept->count > 0 ? kept : set, false, s->ret);
}

static uint32_t lower_string(schema *s, const bundle *b)
{
    gr_compile *c = s->c;
    uint32_t end;
    if (b->string != NULL) {
        gr_dfa *set = b->string;
        if (b->length_min > 0 || b->length_max != GR_INFINITE)
            set = dfa_and(s, set, gr_dfa_length(c, b->length_min, b->length_max));
        end = gr_literal(c, "\"", 1, s->ret);
        return gr_literal(c, "\"", 1, gr_dfa_lower(c, set, true, end));
    }
    uint32_t chars = gr_node_add(c, GR_BYTES, 0, 0, 0);
    if (b->length_min == 0 && b->length_max == GR_INFINITE) {
        gr_string_char(c, chars, chars, s->ret);
        return gr_literal(c, "\"", 1, chars);
    }
    *gr_push(c, &c->g->lengths) = (gr_length){b->length_min, b->length_max};
    uint32_t guard = c->g->lengths.count - 1;
    uint32_t fork = gr_node_add(c, GR_FORK, 0, 0, 0);
    end = gr_node_add(c, GR_STRING_END, guard, 0, gr_literal(c, "\"", 1, s->ret));
    uint32_t one = gr_node_add(c, GR_CHAR, guard, 0, chars);
    gr_fork_set(c, fork, (uint32_t[]){one, end}, 2);
    gr_string_char(c, chars, fork, GR_NONE);
    c->g->nodes.data[chars].c = guard + 1;
    uint32_t rule = gr_rule_add(c), start = gr_literal(c, "\"", 1, fork);
    c->g->rules.data[rule].start = start;
    return gr_node_add(c, GR_CALL, rule, s->ret, 0);
}

static uint32_t lower_object(schema *s, const object *o)
{
    gr_compile *c = s->c;
    uint32_t count = 0, index = c->g->objects.count;
    uint32_t *rules = gr_alloc(c, o->count, sizeof *rules);
    member **kept = gr_alloc(c, o->count, sizeof *kept);
    gr_text *declared = gr_alloc(c, o->count, sizeof *declared);
    uint32_t class_count = 0;
    for (uint32_t i = 0; i < o->count; i++) {
        declared[i] = o->members[i].name;
        if (o->members[i].value->never)
            continue;
        kept[count] = &o->members[i];
        rules[count++] = rule_of(s, o->members[i].value);
    }
    *gr_push(c, &c->g->objects) = (gr_object){0};
    uint32_t node_end = gr_literal(c, "}", 1, s->ret);
    uint32_t end = gr_node_add(c, GR_OBJECT_END, index, 0, space(s, false, node_end));
    uint32_t choose = gr_node_add(c, GR_FORK, 0, 0, 0);
    uint32_t comma = gr_literal(c, ",", 1, space(s, true, choose));
    comma = gr_node_add(c, GR_MORE, index, 0, space(s, false, comma));
    uint32_t after = gr_fork_add(c, (uint32_t[]){comma, end}, 2);
    uint32_t *ways = gr_alloc(c, count + o->class_count, sizeof *ways);
    base_buf name;
    base_buf_init(&name, 0);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = gr_node_add(c, GR_CALL, rules[i], after, 0);
        at = gr_literal(c, ":", 1, space(s, true, at));
        at = space(s, false, at);
        base_buf_clear(&name);
        base_buf_json_string(&name, kept[i]->name.data, kept[i]->name.length);
        /* The buffer must not outlive a longjmp, so its bytes move to the arena first. */
        char *copy = name.failed ? NULL : base_arena_copy(c->arena, name.data, name.length);
        size_t length = name.length;
        base_buf_deinit(&name);
        base_buf_init(&name, 0);
        if (copy == NULL)
            gr_fail(c, BASE_NOMEM, NULL, "no memory for a grammar");
        bool plain = true;
        for (size_t k = 0; k < kept[i]->name.length; k++)
            plain = plain && (uint8_t)kept[i]->name.data[k] >= 0x20;
        if (plain)
            at = gr_literal(c, copy, length, at);
        else /* a control has two spellings */
            at = gr_literal(c, "\"", 1,
                            gr_dfa_lower(c, gr_dfa_texts(c, &kept[i]->name, 1), true,
                                         gr_literal(c, "\"", 1, at)));
        ways[i] = gr_node_add(c, GR_KEY, index, i, at);
    }
    uint32_t way_count = count;
    gr_dfa *others = o->count == 0 ? NULL : gr_dfa_texts(c, declared, o->count);
    for (uint32_t i = 0; i < o->class_count; i++) {
        if (o->classes[i].value->never)
            continue;
        gr_dfa *set = o->classes[i].set;
        if (others != NULL)
            set = gr_dfa_op(c, set == NULL ? gr_dfa_all(c) : set, others, GR_MINUS);
        if (set != NULL && set->count == 0)
            continue;
        uint32_t at = gr_node_add(c, GR_CALL, rule_of(s, o->classes[i].value), after, 0);
        at = gr_literal(c, ":", 1, space(s, true, at));
        at = space(s, false, at);
        if (set == NULL) {
            uint32_t chars = gr_node_add(c, GR_BYTES, 0, 0, 0);
            gr_string_char(c, chars, chars, at);
            at = gr_literal(c, "\"", 1, chars);
        } else {
            at = gr_literal(c, "\"", 1, gr_dfa_lower(c, set, true, gr_literal(c, "\"", 1, at)));
        }
        ways[way_count++] = gr_node_add(c, GR_EXTRA, index, 0, at);
        class_count++;
    }
    gr_fork_set(c, choose, ways, way_count);
    uint32_t begin = gr_fork_add(c, (uint32_t[]){choose, end}, 2);
    begin = gr_literal(c, "{", 1, space(s, false, begin));
    gr_object out = {.members = count, .min = o->min, .max = o->max};
    out.extras = class_count > 0;
    out.ordered = !c->options.any_order && count > 0;
    out.counted = o->min > 0 || o->max != GR_INFINITE;
    out.words = count == 0 ? 0 : (count + 64) / 64;
    out.required = c->g->bits.count;
    for (uint32_t i = 0; i < out.words; i++)
        *gr_push(c, &c->g->bits) = 0;
    for (uint32_t i = 0; i < count; i++)
        if (kept[i]->required)
            c->g->bits.data[out.required + i / 64] |= (uint64_t)1 << i % 64;
    out.rules = c->g->lists.count;
    for (uint32_t i = 0; i < count; i++)
        *gr_push(c, &c->g->lists) = rules[i];
    if (!out.extras && o->min > count)
        return GR_NONE;
    c->g->objects.data[index] = out;
    uint32_t rule = gr_rule_add(c);
    c->g->rules.data[rule].start = begin;
    c->g->rules.data[rule].words = out.words;
    return gr_node_add(c, GR_CALL, rule, s->ret, 0);
}

/* The values of a term that has few; false if it may have more. */
static bool few_values(schema *s, term *t, dom **out, uint32_t *count)
{
    *count = 0;
    if (t->count != 1 || t->lits[0].kind != L_SCHEMA)
        return false;
    dom *node = t->lits[0].node, *list;
    for (uint32_t i = 0; (list = get(node, "$ref")) != NULL && list->kind == BASE_JSON_STRING;
         i++) {
        if (i == 16)
            return false;
        node = resolve(s, node, list);
    }
    list = get(node, "enum");
    if (list == NULL || list->kind != BASE_JSON_ARRAY_BEGIN)
        return false;
    for (dom *k = list->first; k != NULL; k = k->next) {
        if (*count == UNIQUE_MAX || (k->kind != BASE_JSON_STRING && k->kind != BASE_JSON_NULL &&
                                     k->kind != BASE_JSON_TRUE && k->kind != BASE_JSON_FALSE))
            return false;
        bool twice = false;
        for (uint32_t i = 0; i < *count; i++)
            twice = twice || (out[i]->kind == k->kind && same(out[i]->text, k->text));
        if (!twice)
            out[(*count)++] = k;
    }
    return true;
}

static uint32_t lower_array(schema *s, const array *a, const dom *at)
{
    gr_compile *c = s->c;
    uint32_t index = c->g->arrays.count, min = a->min, max = a->max, count = a->count;
    if (a->rest->never)
        max = least(max, count);
    for (uint32_t i = 0; i < count; i++)
        if (a->prefix[i]->never)
            max = least(max, i);
    bool unique = a->unique && max > 1;
    dom *values[UNIQUE_MAX];
    uint32_t value_count = 0;
    if (unique &&
        (count > 0 || a->contains != NULL || !few_values(s, a->rest, values, &value_count)))
        wrong(s, BASE_UNSUPPORTED, at, "uniqueItems", "the items are no small enum");
    if (unique)
        max = least(max, value_count);
    if (min > max)
        return GR_NONE;
    *gr_push(c, &c->g->arrays) = (gr_array){0};
    gr_array out = {.min = min, .max = max, .prefix = count, .contains = a->contains_min};
    if (a->contains == NULL)
        out.contains = 0;
    out.saturate = max == GR_INFINITE ? most(min, count) : max;
    uint32_t *rules = gr_alloc(c, count + 1, sizeof *rules);
    for (uint32_t i = 0; i <= count; i++)
        rules[i] = rule_of(s, i < count ? a->prefix[i] : a->rest);
    uint32_t end = gr_literal(c, "]", 1, s->ret);
    end = gr_node_add(c, GR_ARRAY_END, index, 0, space(s, false, end));
    uint32_t choose = gr_node_add(c, GR_FORK, 0, 0, 0);
    uint32_t comma = gr_literal(c, ",", 1, space(s, true, choose));
    comma = gr_node_add(c, GR_MORE_ITEMS, index, 0, space(s, false, comma));
    uint32_t after = gr_fork_add(c, (uint32_t[]){comma, end}, 2);
    uint32_t way_count = 0;
    uint32_t *ways = gr_alloc(c, 2 * (size_t)count + 2 + value_count, sizeof *ways);
    for (uint32_t i = 0; i <= count; i++)
        for (uint32_t k = 0; k < (out.contains > 0 ? 2 : unique ? value_count : 1); k++) {
            term *t = i < count ? a->prefix[i] : a->rest;
            if (t->never)
                continue;
            if (unique)
                t = term_and(s, t, term_lit(s, values[k], L_VALUE));
            else if (k == 1)
                t = term_and(s, t, a->contains);
            uint32_t rule = rule_of(s, t);
            if (out.contains > 0 && k == 1)
                out.contains_rule = rule;
            *gr_push(c, &c->g->items) =
                (gr_item){i < count ? i : GR_INFINITE, unique ? k : GR_INFINITE, !unique && k == 1};
            uint32_t next = gr_node_add(c, GR_CALL, rule, after, 0);
            ways[way_count++] = gr_node_add(c, GR_ITEM, index, c->g->items.count - 1, next);
        }
    gr_fork_set(c, choose, ways, way_count);
    uint32_t begin = gr_fork_add(c, (uint32_t[]){choose, end}, 2);
    begin = gr_literal(c, "[" /* ] */, 1, space(s, false, begin));
    out.rules = c->g->lists.count;
    for (uint32_t i = 0; i <= count; i++)
        *gr_push(c, &c->g->lists) = rules[i];
    c->g->arrays.data[index] = out;
    uint32_t rule = gr_rule_add(c);
    c->g->rules.data[rule].start = begin;
    c->g->rules.data[rule].words = unique || out.contains > 0;
    return gr_node_add(c, GR_CALL, rule, s->ret, 0);
}

static void lower_term(schema *s, term *t)
{
    gr_compile *c = s->c;
    const alts *a = t->never ? alts_new(s, 1) : term_open(s, t, 0);
    const dom *at = t->count > 0 ? t->lits[0].node : s->root;
    uint32_t *ways = gr_alloc(c, 7 * (size_t)a->count, sizeof *ways), count = 0;
    /* Scalars of all alternatives are joined, so that they cost one thread. */
    uint8_t types = 0;
    bundle number = {0}, string = {0};
    bool any_number = false, any_string = false;
    for (uint32_t i = 0; i < a->count; i++) {
        const bundle *b = a->data[i];
        bool lengths = b->length_min > 0 || b->length_max != GR_INFINITE;
        types |= b->types & (T_NULL | T_TRUE | T_FALSE);
        any_number = any_number || ((b->types & T_NUMBER) && b->number == NULL);
        any_string = any_string || ((b->types & T_STRING) && b->string == NULL && !lengths);
    }
    for (uint32_t i = 0; i < a->count; i++) {
        const bundle *b = a->data[i];
        if ((b->types & T_NUMBER) && !any_number)
            number.number =
                number.number == NULL ? b->number : gr_dfa_op(c, number.number, b->number, GR_OR);
        if ((b->types & T_STRING) && !any_string)
            ways[count++] = lower_string(s, b);
        if (b->types & T_OBJECT)
            ways[count++] = lower_object(s, b->object == NULL ? object_any(s) : b->object);
        if (b->types & T_ARRAY)
            ways[count++] = lower_array(s, b->array == NULL ? array_any(s) : b->array, at);
    }
    uint32_t *more = gr_alloc(c, count + 5, sizeof *more);
    memcpy(more, ways, count * sizeof *more);
    string.length_max = GR_INFINITE;
    if (any_string)
        more[count++] = lower_string(s, &string);
    if (any_number || number.number != NULL)
        more[count++] = lower_number(s, &number);
    if (types & T_NULL)
        more[count++] = gr_literal(c, "null", 4, s->ret);
    if (types & T_TRUE)
        more[count++] = gr_literal(c, "true", 4, s->ret);
    if (types & T_FALSE)
        more[count++] = gr_literal(c, "false", 5, s->ret);
    uint32_t start = gr_fork_add(c, more, count);
    c->g->rules.data[t->rule - 1].start = start;
}

static uint32_t schema_body(gr_compile *c, void *context)
{
    const gr_text *text = context;
    schema *s = gr_alloc(c, 1, sizeof *s);
    s->c = c;
    s->queue_end = &s->queue;
    s->root = parse(s, text->data, text->length);
    s->draft = c->options.draft == 0 ? 2020 : c->options.draft;
    dom *draft = get(s->root, "$schema");
    if (draft != NULL && draft->kind == BASE_JSON_STRING) {
        static const struct {
            const char *part;
            uint32_t draft;
        } drafts[] = {{"draft-03", 3}, {"draft-04", 4},   {"draft-06", 6},
                      {"draft-07", 7}, {"2019-09", 2019}, {"2020-12", 2020}};
        for (size_t i = 0; i < sizeof drafts / sizeof *drafts; i++)
            if (memmem(draft->text.data, draft->text.length, drafts[i].part,
                       strlen(drafts[i].part)) != NULL)
                s->draft = drafts[i].draft;
    }
    /* A dialect of its own may mean anything by its words. */
    if (draft != NULL && draft->kind == BASE_JSON_STRING &&
        memmem(draft->text.data, draft->text.length, "json-schema.org", 15) == NULL &&
        memmem(draft->text.data, draft->text.length, "http", 4) == draft->text.data)
        wrong(s, BASE_UNSUPPORTED, s->root, "$schema", "%.*s is not known", (int)draft->text.length,
              draft->text.data);
    find_resources(s);
    s->never = gr_alloc(c, 1, sizeof *s->never);
    s->never->never = true;
    s->always = term_of(s, NULL, 0);
    s->ret = gr_node_add(c, GR_RETURN, 0, 0, 0);
    uint32_t root = rule_of(s, term_lit(s, s->root, L_SCHEMA));
    for (term *t = s->queue; t != NULL; t = t->queued)
        lower_term(s, t);
    return root;
}

base_code eng_grammar_schema(eng_grammar **out, const char *text, size_t length,
                             const eng_grammar_options *options, base_err *err)
{
    gr_text source = {text, length};
    return gr_compile_run(out, schema_body, &source, options, err);
}

base_code eng_grammar_json_object(eng_grammar **out, const eng_grammar_options *options,
                                  base_err *err)
{
    static const char any[] = "{\"type\":\"object\"}";
    return eng_grammar_schema(out, any, sizeof any - 1, options, err);
}
