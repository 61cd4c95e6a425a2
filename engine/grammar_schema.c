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

#include "engine/grammar_schema.h"

#define DEPTH_MAX 128        /* of the schema's text */
#define EXPAND_MAX 64        /* applicators inside each other */
#define ALTERNATIVES_MAX 128 /* of one term */
#define MULTIPLE_MAX 20000u
#define DIGITS_MAX 400

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

void gr_wrong(schema *s, base_code code, const dom *node, const char *keyword, const char *fmt, ...)
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

bool gr_same(gr_text a, gr_text b)
{
    return a.length == b.length && (a.length == 0 || memcmp(a.data, b.data, a.length) == 0);
}

dom *gr_get(const dom *node, const char *key)
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
    dom *id = gr_get(node, "$id");
    if (id == NULL)
        id = gr_get(node, "id");
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
        if (own && node->parent != NULL && s->draft <= 7 && gr_get(node, "$ref") != NULL)
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
dom *gr_resolve(schema *s, const dom *at, const dom *ref)
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
                if (gr_same(name, id))
                    root = node;
            }
        }
        if (root == NULL)
            gr_wrong(s, BASE_UNSUPPORTED, at, "$ref", "%.*s is not in this document",
                     (int)text.length, text.data);
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
            dom *anchor = gr_get(node, "$anchor"), *id = id_of(node);
            if (anchor == NULL)
                anchor = gr_get(node, "$dynamicAnchor");
            if (node->root == root && anchor != NULL && anchor->kind == BASE_JSON_STRING &&
                gr_same(anchor->text, name))
                return node;
            if (id != NULL && id->text.data[0] == '#' && node->root == root &&
                gr_same((gr_text){id->text.data + 1, id->text.length - 1}, name))
                return node;
        }
        gr_wrong(s, BASE_INVALID, at, "$ref", "nothing is named %.*s", (int)length, part);
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
            if (node->kind == BASE_JSON_OBJECT_BEGIN ? gr_same(k->key, (gr_text){name, n})
                                                     : is((gr_text){name, n}, place))
                child = k;
        }
        node = child;
        if (i >= length)
            break;
        i++;
    }
    if (node == NULL)
        gr_wrong(s, BASE_INVALID, at, "$ref", "%.*s leads nowhere", (int)text.length, text.data);
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

term *gr_term_lit(schema *s, dom *node, uint8_t kind)
{
    if (node->kind == BASE_JSON_TRUE && kind <= L_NOT)
        return kind == L_SCHEMA ? s->always : s->never;
    if (node->kind == BASE_JSON_FALSE && kind <= L_NOT)
        return kind == L_SCHEMA ? s->never : s->always;
    return term_of(s, &(literal){node, kind}, 1);
}

term *gr_term_and(schema *s, term *a, term *b)
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

static gr_dfa *all_numbers(schema *s)
{
    return gr_pattern(s, &s->number, "-?(0|[1-9][0-9]*)(\\.[0-9]+)?");
}

static gr_dfa *integers(schema *s)
{
    return gr_pattern(s, &s->integer, "-?(0|[1-9][0-9]*)(\\.0+)?");
}

/* ---- alternatives ---- */

alts *gr_alts_new(schema *s, uint32_t capacity)
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

object *gr_object_any(schema *s)
{
    object *o = gr_alloc(s->c, 1, sizeof *o);
    o->max = GR_INFINITE;
    o->classes = gr_alloc(s->c, 1, sizeof *o->classes);
    o->classes[0] = (names){NULL, s->always};
    o->class_count = 1;
    return o;
}

array *gr_array_any(schema *s)
{
    array *a = gr_alloc(s->c, 1, sizeof *a);
    a->max = GR_INFINITE;
    a->rest = s->always;
    return a;
}

gr_dfa *gr_dfa_and(schema *s, gr_dfa *a, gr_dfa *b)
{
    return a == NULL ? b : b == NULL || a == b ? a : gr_dfa_op(s->c, a, b, GR_AND);
}

static member *member_find(const object *o, gr_text name)
{
    for (uint32_t i = 0; i < o->count; i++)
        if (gr_same(o->members[i].name, name))
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

static void classes_join(schema *s, object *out, const object *a, const object *b)
{
    out->classes = gr_alloc(s->c, (size_t)a->class_count * b->class_count, sizeof *out->classes);
    for (uint32_t i = 0; i < a->class_count; i++)
        for (uint32_t k = 0; k < b->class_count; k++) {
            gr_dfa *set = gr_dfa_and(s, a->classes[i].set, b->classes[k].set);
            if (set == NULL || set->count > 0)
                out->classes[out->class_count++] =
                    (names){set, gr_term_and(s, a->classes[i].value, b->classes[k].value)};
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
        m.value = gr_term_and(s, m.value, member_term(s, b, m.name));
        m.required = m.required || (other != NULL && other->required);
        o->members[o->count++] = m;
    }
    for (uint32_t i = 0; i < b->count; i++) {
        member m = b->members[i];
        if (member_find(a, m.name) != NULL)
            continue;
        m.value = gr_term_and(s, m.value, member_term(s, a, m.name));
        o->members[o->count++] = m;
    }
    classes_join(s, o, a, b);
    o->min = gr_most(a->min, b->min);
    o->max = gr_least(a->max, b->max);
    return o;
}

static array *array_and(schema *s, array *a, array *b, const dom *at)
{
    if (a == NULL || b == NULL)
        return a == NULL ? b : a;
    array *o = gr_alloc(s->c, 1, sizeof *o);
    o->count = gr_most(a->count, b->count);
    o->prefix = gr_alloc(s->c, o->count, sizeof *o->prefix);
    for (uint32_t i = 0; i < o->count; i++)
        o->prefix[i] = gr_term_and(s, i < a->count ? a->prefix[i] : a->rest,
                                   i < b->count ? b->prefix[i] : b->rest);
    o->rest = gr_term_and(s, a->rest, b->rest);
    o->min = gr_most(a->min, b->min);
    o->max = gr_least(a->max, b->max);
    o->unique = a->unique || b->unique;
    o->contains = a->contains != NULL ? a->contains : b->contains;
    o->contains_min = gr_most(a->contains_min, b->contains_min);
    if (a->contains != NULL && b->contains != NULL && a->contains != b->contains)
        gr_wrong(s, BASE_UNSUPPORTED, at, "contains", "two of them for one array");
    return o;
}

/* NULL if nothing satisfies both. */
static bundle *bundle_and(schema *s, const bundle *a, const bundle *b, const dom *at)
{
    bundle *o = bundle_any(s, a->types & b->types);
    if (o->types & T_NUMBER) {
        o->number = gr_dfa_and(s, a->number, b->number);
        if (o->number != NULL && o->number->count == 0)
            o->types &= (uint8_t)~T_NUMBER;
    }
    if (o->types & T_STRING) {
        o->string = gr_dfa_and(s, a->string, b->string);
        o->length_min = gr_most(a->length_min, b->length_min);
        o->length_max = gr_least(a->length_max, b->length_max);
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
        gr_wrong(s, BASE_UNSUPPORTED, at, "allOf", "more than %u alternatives", ALTERNATIVES_MAX);
    alts *o = gr_alts_new(s, a->count * b->count);
    for (uint32_t i = 0; i < a->count; i++)
        for (uint32_t k = 0; k < b->count; k++) {
            bundle *both = bundle_and(s, a->data[i], b->data[k], at);
            if (both != NULL)
                o->data[o->count++] = both;
        }
    if (o->count > ALTERNATIVES_MAX)
        gr_wrong(s, BASE_UNSUPPORTED, at, "allOf", "more than %u alternatives", ALTERNATIVES_MAX);
    return o;
}

static alts *alts_or(schema *s, const alts *a, const alts *b)
{
    alts *o = gr_alts_new(s, a->count + b->count);
    memcpy(o->data, a->data, a->count * sizeof *o->data);
    memcpy(o->data + a->count, b->data, b->count * sizeof *o->data);
    o->count = a->count + b->count;
    return o;
}

static void alt_add(schema *s, alts *a, bundle *b, const dom *at, const char *keyword)
{
    if (a->count >= ALTERNATIVES_MAX)
        gr_wrong(s, BASE_UNSUPPORTED, at, keyword, "more than %u alternatives", ALTERNATIVES_MAX);
    a->data[a->count++] = b;
}

/* The opposites of a term, one term for each; NULL if there is none. */
static term *lit_not(schema *s, literal l)
{
    return gr_term_lit(s, l.node, l.kind ^ 1);
}

static bundle *with_member(schema *s, gr_text name, term *value, bool required)
{
    bundle *b = bundle_any(s, T_OBJECT);
    b->object = gr_object_any(s);
    b->object->members = gr_alloc(s->c, 1, sizeof(member));
    b->object->members[0] = (member){name, value, required};
    b->object->count = 1;
    return b;
}

static bundle *with_array(schema *s)
{
    bundle *b = bundle_any(s, T_ARRAY);
    b->array = gr_array_any(s);
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
    uint32_t max = open ? o->max : gr_least(o->max, may);
    if (max != GR_INFINITE) {
        bundle *b = bundle_any(s, T_OBJECT);
        b->object = gr_object_any(s);
        b->object->min = max + 1;
        alt_add(s, out, b, at, keyword);
    }
    if (o->min > 0) {
        bundle *b = bundle_any(s, T_OBJECT);
        b->object = gr_object_any(s);
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
    uint32_t max = a->rest->never ? gr_least(a->max, a->count) : a->max;
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
    alts *out = gr_alts_new(s, ALTERNATIVES_MAX);
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
        gr_wrong(s, BASE_UNSUPPORTED, at, keyword, "the opposite of an object cannot be enforced");
    if ((b->types & T_ARRAY) && b->array != NULL && !array_not(s, out, b->array, at, keyword))
        gr_wrong(s, BASE_UNSUPPORTED, at, keyword, "the opposite of an array cannot be enforced");
    return out;
}

static alts *alts_not(schema *s, const alts *a, const dom *at, const char *keyword)
{
    alts *o = gr_alts_new(s, 1);
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
            const alts *a = m->value->never ? NULL : gr_term_open(s, m->value, depth);
            for (uint32_t k = 0; a != NULL && empty && k < a->count; k++)
                empty = bundle_empty(s, a->data[k], depth + 1);
            if (empty)
                types &= (uint8_t)~T_OBJECT;
        }
    if ((types & T_ARRAY) && b->array != NULL)
        for (uint32_t i = 0; i < b->array->min && i <= b->array->count; i++) {
            term *t = i < b->array->count ? b->array->prefix[i] : b->array->rest;
            bool empty = true;
            const alts *a = t->never ? NULL : gr_term_open(s, t, depth);
            for (uint32_t k = 0; a != NULL && empty && k < a->count; k++)
                empty = bundle_empty(s, a->data[k], depth + 1);
            if (empty)
                types &= (uint8_t)~T_ARRAY;
        }
    if ((types & T_STRING) && b->string != NULL &&
        (b->length_min > 0 || b->length_max != GR_INFINITE) &&
        gr_most(b->length_min, b->length_max == GR_INFINITE ? 0 : b->length_max) < 4096 &&
        gr_dfa_and(s, b->string, gr_dfa_length(s->c, b->length_min, b->length_max))->count == 0)
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
        gr_wrong(s, BASE_INVALID, node->parent, keyword, "must be a whole number from 0 on");
    for (uint32_t i = 0; i < d->whole_count && n < GR_INFINITE; i++)
        n = n * 10 + (uint64_t)(d->whole[i] - '0');
    return n >= GR_INFINITE ? GR_INFINITE - 1 : (uint32_t)n;
}

static void expect_kind(schema *s, const dom *node, base_json_kind kind, const char *keyword)
{
    if (node->kind != kind)
        gr_wrong(s, BASE_INVALID, node->parent, keyword, "must be %s",
                 kind == BASE_JSON_ARRAY_BEGIN    ? "an array"
                 : kind == BASE_JSON_OBJECT_BEGIN ? "an object"
                                                  : "a string");
}

static void number_and(schema *s, bundle *b, gr_dfa *dfa)
{
    b->number = gr_dfa_and(s, b->number, dfa);
    if (b->number->count == 0)
        b->types &= (uint8_t)~T_NUMBER;
}

static void string_and(schema *s, bundle *b, gr_dfa *dfa)
{
    b->string = gr_dfa_and(s, b->string, dfa);
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
            gr_wrong(s, BASE_INVALID, node, "type", "must be a string or a list of strings");
        while (i < 7 && !is(one->text, kinds[i].name))
            i++;
        if (i == 7)
            gr_wrong(s, BASE_INVALID, node, "type", "%.*s is no type", (int)one->text.length,
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
        const dom *at = gr_get(node, bounds[i].name),
                  *exclusive = gr_get(node, bounds[i].exclusive);
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
    const dom *of = gr_get(node, "multipleOf");
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
    if ((at = gr_get(node, "minLength")) != NULL)
        b->length_min = count_of(s, at, "minLength");
    if ((at = gr_get(node, "maxLength")) != NULL)
        b->length_max = count_of(s, at, "maxLength");
    if (b->length_min > b->length_max)
        b->types &= (uint8_t)~T_STRING;
    if ((at = gr_get(node, "pattern")) != NULL) {
        expect_kind(s, at, BASE_JSON_STRING, "pattern");
        pointer_of(node, "pattern", pointer);
        string_and(s, b,
                   gr_dfa_regex(s->c, at->text.data, at->text.length, false, "pattern", pointer));
    }
    if ((at = gr_get(node, "format")) == NULL || at->kind != BASE_JSON_STRING ||
        s->c->options.any_format)
        return;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (!is(at->text, formats[i].name))
            continue;
        if (formats[i].pattern == NULL)
            gr_wrong(s, BASE_UNSUPPORTED, node, "format", "%s cannot be enforced", formats[i].name);
        string_and(s, b,
                   gr_dfa_regex(s->c, formats[i].pattern, strlen(formats[i].pattern), true,
                                "format", NULL));
    }
}

/* The strings that satisfy a schema: what propertyNames asks. */
static gr_dfa *names_of(schema *s, dom *node, uint32_t depth)
{
    term *t = gr_term_lit(s, node, L_SCHEMA);
    gr_dfa *all = NULL;
    if (t->count == 0 && !t->never)
        return NULL;
    const alts *a = t->never ? gr_alts_new(s, 1) : gr_term_open(s, t, depth);
    all = gr_dfa_texts(s->c, NULL, 0);
    for (uint32_t i = 0; i < a->count; i++) {
        const bundle *b = a->data[i];
        if (!(b->types & T_STRING))
            continue;
        gr_dfa *one = b->string;
        if (b->length_min > 0 || b->length_max != GR_INFINITE)
            one = gr_dfa_and(s, one, gr_dfa_length(s->c, b->length_min, b->length_max));
        if (one == NULL)
            return NULL;
        all = gr_dfa_op(s->c, all, one, GR_OR);
    }
    return all;
}

static void read_object(schema *s, dom *node, bundle *b, uint32_t depth)
{
    dom *properties = gr_get(node, "properties"), *patterns = gr_get(node, "patternProperties");
    dom *extra = gr_get(node, "additionalProperties"), *required = gr_get(node, "required");
    dom *property_names = gr_get(node, "propertyNames"), *min = gr_get(node, "minProperties");
    dom *max = gr_get(node, "maxProperties");
    dom *unevaluated = gr_get(node, "unevaluatedProperties");
    if (unevaluated != NULL && unevaluated->kind != BASE_JSON_TRUE) {
        static const char *const others[] = {
            "allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "dependencies"};
        for (size_t i = 0; i < sizeof others / sizeof *others; i++)
            if (gr_get(node, others[i]) != NULL)
                gr_wrong(s, BASE_UNSUPPORTED, node, "unevaluatedProperties", "beside %s",
                         others[i]);
        if (extra == NULL)
            extra = unevaluated;
    }
    if (properties == NULL && patterns == NULL && extra == NULL && required == NULL &&
        property_names == NULL && min == NULL && max == NULL)
        return;
    object *o = gr_object_any(s);
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
        gr_wrong(s, BASE_INVALID, node, "required", "must be an array");
    o->members = gr_alloc(s->c, capacity, sizeof *o->members);

    /* Names are cut into classes by the patterns; no pattern: additionalProperties. */
    term *rest = extra == NULL ? s->always : gr_term_lit(s, extra, L_SCHEMA);
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
        term *value = gr_term_lit(s, p, L_SCHEMA);
        for (uint32_t i = 0, n = cuts; i < n; i++) {
            gr_dfa *in = gr_dfa_and(s, all[i].set, set);
            gr_dfa *out =
                gr_dfa_op(s->c, all[i].set == NULL ? gr_dfa_all(s->c) : all[i].set, set, GR_MINUS);
            term *both = all[i].value == NULL ? value : gr_term_and(s, all[i].value, value);
            if (in->count == 0)
                continue;
            if (out->count > 0) {
                if (cuts == 64)
                    gr_wrong(s, BASE_UNSUPPORTED, node, "patternProperties", "too many overlap");
                all[cuts++] = (cut){out, all[i].value};
            }
            all[i] = (cut){in, both};
        }
    }
    gr_dfa *allowed = property_names == NULL ? NULL : names_of(s, property_names, depth);
    o->classes = gr_alloc(s->c, cuts, sizeof *o->classes);
    o->class_count = 0;
    for (uint32_t i = 0; i < cuts; i++) {
        gr_dfa *set = gr_dfa_and(s, all[i].set, allowed);
        if (set == NULL || set->count > 0)
            o->classes[o->class_count++] = (names){set, all[i].value == NULL ? rest : all[i].value};
    }
    for (dom *p = properties == NULL ? NULL : properties->first; p != NULL; p = p->next) {
        term *value = gr_term_lit(s, p, L_SCHEMA);
        for (uint32_t i = 0; i < cuts; i++)
            if (all[i].value != NULL && gr_dfa_has(all[i].set, p->key.data, p->key.length))
                value = gr_term_and(s, value, all[i].value);
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
    dom *prefix = gr_get(node, "prefixItems"), *items = gr_get(node, "items");
    dom *extra = gr_get(node, "additionalItems"), *contains = gr_get(node, "contains");
    dom *min = gr_get(node, "minItems"), *max = gr_get(node, "maxItems");
    dom *unique = gr_get(node, "uniqueItems"), *unevaluated = gr_get(node, "unevaluatedItems");
    dom *contains_min = gr_get(node, "minContains"), *contains_max = gr_get(node, "maxContains");
    array *a = gr_array_any(s);
    if (prefix == NULL && items != NULL && items->kind == BASE_JSON_ARRAY_BEGIN) {
        prefix = items;
        items = extra;
    }
    if (unevaluated != NULL && unevaluated->kind != BASE_JSON_TRUE) {
        static const char *const others[] = {"allOf", "anyOf", "oneOf",   "not",
                                             "if",    "$ref",  "contains"};
        for (size_t i = 0; i < sizeof others / sizeof *others; i++)
            if (gr_get(node, others[i]) != NULL)
                gr_wrong(s, BASE_UNSUPPORTED, node, "unevaluatedItems", "beside %s", others[i]);
        if (items == NULL)
            items = unevaluated;
    }
    if (prefix != NULL) {
        expect_kind(s, prefix, BASE_JSON_ARRAY_BEGIN, "prefixItems");
        a->prefix =
            gr_alloc(s->c, prefix->last == NULL ? 0 : prefix->last->index + 1, sizeof *a->prefix);
        for (dom *p = prefix->first; p != NULL; p = p->next)
            a->prefix[a->count++] = gr_term_lit(s, p, L_SCHEMA);
    }
    if (items != NULL)
        a->rest = gr_term_lit(s, items, L_SCHEMA);
    a->min = min == NULL ? 0 : count_of(s, min, "minItems");
    a->max = max == NULL ? GR_INFINITE : count_of(s, max, "maxItems");
    a->unique = unique != NULL && unique->kind == BASE_JSON_TRUE;
    if (contains != NULL) {
        a->contains_min = contains_min == NULL ? 1 : count_of(s, contains_min, "minContains");
        if (contains_max != NULL)
            gr_wrong(s, BASE_UNSUPPORTED, node, "maxContains", "cannot be enforced");
        if (a->contains_min > 0)
            a->contains = gr_term_lit(s, contains, L_SCHEMA);
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
        b->array = gr_array_any(s);
        b->array->rest = s->never;
        b->array->count = node->last == NULL ? 0 : node->last->index + 1;
        b->array->min = b->array->max = b->array->count;
        b->array->prefix = gr_alloc(s->c, b->array->count, sizeof *b->array->prefix);
        for (dom *k = node->first; k != NULL; k = k->next)
            b->array->prefix[k->index] = gr_term_lit(s, k, L_VALUE);
        break;
    default:
        b->types = T_OBJECT;
        b->object = gr_object_any(s);
        b->object->classes[0].value = s->never;
        b->object->members =
            gr_alloc(s->c, node->last == NULL ? 0 : node->last->index + 1, sizeof(member));
        for (dom *k = node->first; k != NULL; k = k->next) {
            member *old = member_find(b->object, k->key);
            if (old != NULL)
                old->value = gr_term_lit(s, k, L_VALUE);
            else
                b->object->members[b->object->count++] =
                    (member){k->key, gr_term_lit(s, k, L_VALUE), true};
        }
        break;
    }
    return b;
}

static alts *values_open(schema *s, dom *list)
{
    uint32_t count = list->last == NULL ? 0 : list->last->index + 1, texts = 0;
    alts *a = gr_alts_new(s, count + 1);
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
    alts *a = gr_alts_new(s, ALTERNATIVES_MAX);
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
    alts *all = gr_alts_new(s, ALTERNATIVES_MAX);
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
    alts *a = gr_alts_new(s, 1);
    if (b->types != 0)
        a->data[a->count++] = b;
    return a;
}

/* Either `name` is not there, or what it asks for holds. */
static alts *dependent(schema *s, dom *node, dom *d, uint32_t depth)
{
    alts *with, *without = alts_one(s, with_member(s, d->key, s->never, false));
    alt_add(s, without = alts_or(s, without, gr_alts_new(s, 0)), bundle_any(s, T_ALL & ~T_OBJECT),
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
        return gr_alts_new(s, 1);
    if (node->kind != BASE_JSON_OBJECT_BEGIN)
        gr_wrong(s, BASE_INVALID, node, NULL, "is neither an object nor a boolean");
    alts *all = alts_one(s, bundle_any(s, T_ALL));
    if ((at = gr_get(node, "$ref")) != NULL && at->kind == BASE_JSON_STRING) {
        dom *to = gr_resolve(s, node, at);
        if (to->opening)
            gr_wrong(s, BASE_INVALID, node, "$ref", "%.*s leads back here without a value between",
                     (int)at->text.length, at->text.data);
        all = schema_open(s, to, depth + 1);
        if (s->draft <= 7)
            return all;
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (gr_get(node, refused[i]) != NULL && (i < 2 || s->draft < 4))
            gr_wrong(s, BASE_UNSUPPORTED, node, refused[i], "cannot be enforced");
    bundle *b = bundle_any(s, T_ALL);
    if ((at = gr_get(node, "type")) != NULL)
        read_type(s, node, b, at);
    read_numbers(s, node, b);
    read_strings(s, node, b);
    read_object(s, node, b, depth);
    static const char *const array_words[] = {"prefixItems",     "items",    "contains",
                                              "minItems",        "maxItems", "uniqueItems",
                                              "unevaluatedItems"};
    for (size_t i = 0; i < sizeof array_words / sizeof *array_words && b->array == NULL; i++)
        if (gr_get(node, array_words[i]) != NULL)
            read_array(s, node, b);
    all = alts_and(s, all, alts_one(s, b), node);
    if ((at = gr_get(node, "enum")) != NULL) {
        expect_kind(s, at, BASE_JSON_ARRAY_BEGIN, "enum");
        all = alts_and(s, all, values_open(s, at), node);
    }
    if ((at = gr_get(node, "const")) != NULL)
        all = alts_and(s, all, alts_one(s, value_bundle(s, at)), node);
    if ((at = gr_get(node, "allOf")) != NULL) {
        expect_kind(s, at, BASE_JSON_ARRAY_BEGIN, "allOf");
        for (dom *k = at->first; k != NULL; k = k->next)
            all = alts_and(s, all, schema_open(s, k, depth + 1), node);
    }
    if ((at = gr_get(node, "anyOf")) != NULL)
        all = alts_and(s, all, any_of(s, node, at, "anyOf", depth), node);
    static const char *const dependencies[] = {"dependentRequired", "dependentSchemas",
                                               "dependencies"};
    for (size_t i = 0; i < 3; i++)
        if ((at = gr_get(node, dependencies[i])) != NULL && at->kind == BASE_JSON_OBJECT_BEGIN)
            for (dom *k = at->first; k != NULL; k = k->next)
                all = alts_and(s, all, dependent(s, node, k, depth), node);
    if ((at = gr_get(node, "if")) != NULL) {
        dom *then = gr_get(node, "then"), *otherwise = gr_get(node, "else");
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
    if ((at = gr_get(node, "not")) != NULL)
        all = alts_and(s, all, alts_not(s, schema_open(s, at, depth + 1), node, "not"), node);
    if ((at = gr_get(node, "oneOf")) != NULL)
        all = one_of(s, node, at, all, depth);
    return all;
}

static alts *schema_open(schema *s, dom *node, uint32_t depth)
{
    if (node->open[L_SCHEMA] != NULL)
        return node->open[L_SCHEMA];
    if (node->opening)
        gr_wrong(s, BASE_INVALID, node, "$ref",
                 "the schema contains itself without a value between");
    if (depth > EXPAND_MAX)
        gr_wrong(s, BASE_TOO_LONG, node, NULL, "more than %u applicators inside each other",
                 EXPAND_MAX);
    node->opening = true;
    alts *a = schema_read(s, node, depth);
    node->opening = false;
    node->open[L_SCHEMA] = a;
    return a;
}

alts *gr_term_open(schema *s, term *t, uint32_t depth)
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

schema *gr_schema_begin(gr_compile *c, const char *text, size_t length)
{
    schema *s = gr_alloc(c, 1, sizeof *s);
    s->c = c;
    s->queue_end = &s->queue;
    s->root = parse(s, text, length);
    s->draft = c->options.draft == 0 ? 2020 : c->options.draft;
    dom *draft = gr_get(s->root, "$schema");
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
        gr_wrong(s, BASE_UNSUPPORTED, s->root, "$schema", "%.*s is not known",
                 (int)draft->text.length, draft->text.data);
    find_resources(s);
    s->never = gr_alloc(c, 1, sizeof *s->never);
    s->never->never = true;
    s->always = term_of(s, NULL, 0);
    s->ret = gr_node_add(c, GR_RETURN, 0, 0, 0);
    return s;
}

uint32_t gr_schema_rule(gr_compile *c, gr_text text)
{
    schema *s = gr_schema_begin(c, text.data, text.length);
    uint32_t root = gr_rule_of(s, gr_term_lit(s, s->root, L_SCHEMA));
    gr_lower_queue(s);
    return root;
}

static uint32_t schema_body(gr_compile *c, void *context)
{
    return gr_schema_rule(c, *(const gr_text *)context);
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
