/* Terms, and the alternatives that they are opened into. */
#include <stdlib.h>

#include "engine/grammar_schema.h"

/* ---- terms ---- */

static int lit_compare(literal a, literal b)
{
    if (a.node != b.node)
        return (uintptr_t)a.node < (uintptr_t)b.node ? -1 : 1;
    if (a.kind != b.kind)
        return a.kind < b.kind ? -1 : 1;
    return (uintptr_t)a.in < (uintptr_t)b.in ? -1 : a.in != b.in;
}

term *gr_term_of(schema *s, const literal *lits, uint32_t count)
{
    literal *own = gr_alloc(s->c, count, sizeof *own);
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = n;
        while (at > 0 && lit_compare(own[at - 1], lits[i]) > 0)
            at--;
        if (at > 0 && lit_compare(own[at - 1], lits[i]) == 0)
            continue;
        memmove(own + at + 1, own + at, (n - at) * sizeof *own);
        own[at] = lits[i];
        n++;
    }
    uint64_t hash = n;
    for (uint32_t i = 0; i < n; i++)
        hash = (hash ^ ((uint64_t)(uintptr_t)own[i].node * 4 + own[i].kind)) * 0x9E3779B97F4A7C15u,
        hash ^= hash >> 29;
    term **slot = &s->terms[hash % TERMS];
    for (term *t = *slot; t != NULL; t = t->next) {
        gr_work(s->c, 1);
        uint32_t i = 0;
        while (t->count == n && i < n && lit_compare(t->lits[i], own[i]) == 0)
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
    const scope *in = kind <= L_NOT ? gr_enter(s, s->in, node) : NULL;
    return gr_term_of(s, &(literal){node, in, kind}, 1);
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
    return gr_term_of(s, lits, a->count + b->count);
}

term *gr_term_any(schema *s, term *const *terms, uint32_t count, const dom *at)
{
    term **own = gr_alloc(s->c, count, sizeof *own);
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++) {
        bool twice = terms[i]->never;
        for (uint32_t k = 0; k < n; k++)
            twice = twice || own[k] == terms[i];
        if (terms[i] == s->always)
            return s->always;
        if (!twice)
            own[n++] = terms[i];
    }
    if (n < 2)
        return n == 0 ? s->never : own[0];
    /* Equal ones are one, so that recursion through them ends. */
    for (dom *node = s->anys; node != NULL; node = node->next_any) {
        gr_work(s->c, 1);
        if (node->any_count == n && memcmp(node->any, own, n * sizeof *own) == 0)
            return gr_term_of(s, &(literal){node, NULL, L_SCHEMA}, 1);
    }
    dom *node = gr_alloc(s->c, 1, sizeof *node);
    *node = (dom){.kind = BASE_JSON_OBJECT_BEGIN,
                  .key = at->key,
                  .index = at->index,
                  .parent = at->parent,
                  .root = at->root,
                  .any = own,
                  .any_count = n,
                  .next_any = s->anys};
    s->anys = node;
    return gr_term_of(s, &(literal){node, NULL, L_SCHEMA}, 1);
}

term *gr_term_not(schema *s, term *t, const dom *at)
{
    if (t->never || t->count == 0)
        return t->never ? s->always : s->never;
    term **each = gr_alloc(s->c, t->count, sizeof *each);
    for (uint32_t i = 0; i < t->count; i++) {
        literal l = t->lits[i];
        l.kind ^= 1;
        each[i] = gr_term_of(s, &l, 1);
    }
    return gr_term_any(s, each, t->count, at);
}

/* ---- alternatives ---- */

alts *gr_alts_new(schema *s, uint32_t capacity)
{
    alts *a = gr_alloc(s->c, 1, sizeof *a);
    a->data = gr_alloc(s->c, capacity, sizeof *a->data);
    return a;
}

bundle *gr_bundle_any(schema *s, uint8_t types)
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

member *gr_member_find(const object *o, gr_text name)
{
    for (uint32_t i = 0; i < o->count; i++)
        if (gr_same(o->members[i].name, name))
            return &o->members[i];
    return NULL;
}

term *gr_member_term(schema *s, const object *o, gr_text name)
{
    const member *m = gr_member_find(o, name);
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

/* Whether a member that a want asks for may exist at all, as far as it is easily seen. */
static bool want_possible(const object *o, const names *want)
{
    if (want->value->never || (want->set != NULL && want->set->count == 0))
        return false;
    for (uint32_t i = 0; i < o->class_count; i++)
        if (!o->classes[i].value->never)
            return true;
    for (uint32_t i = 0; i < o->count; i++)
        if (!o->members[i].value->never &&
            (want->set == NULL ||
             gr_dfa_has(want->set, o->members[i].name.data, o->members[i].name.length)))
            return true;
    return false;
}

static bool object_possible(const object *o)
{
    for (uint32_t i = 0; i < o->count; i++)
        if (o->members[i].required && o->members[i].value->never)
            return false;
    for (uint32_t i = 0; i < o->want_count; i++)
        if (!want_possible(o, &o->wants[i]))
            return false;
    return o->min <= o->max;
}

object *gr_object_and(schema *s, object *a, object *b, const dom *at)
{
    if (a == NULL || b == NULL)
        return a == NULL ? b : a;
    object *o = gr_alloc(s->c, 1, sizeof *o);
    o->members = gr_alloc(s->c, a->count + b->count, sizeof *o->members);
    gr_work(s->c, (size_t)a->count * b->count / 4 + 1);
    for (uint32_t i = 0; i < a->count; i++) {
        member m = a->members[i];
        const member *other = gr_member_find(b, m.name);
        m.value = gr_term_and(s, m.value, gr_member_term(s, b, m.name));
        m.required = m.required || (other != NULL && other->required);
        o->members[o->count++] = m;
    }
    for (uint32_t i = 0; i < b->count; i++) {
        member m = b->members[i];
        if (gr_member_find(a, m.name) != NULL)
            continue;
        m.value = gr_term_and(s, m.value, gr_member_term(s, a, m.name));
        o->members[o->count++] = m;
    }
    classes_join(s, o, a, b);
    memcpy(o->wants, a->wants, sizeof o->wants);
    o->want_count = a->want_count;
    for (uint32_t i = 0; i < b->want_count; i++) {
        bool twice = false;
        for (uint32_t k = 0; k < a->want_count; k++)
            twice = twice ||
                    (a->wants[k].set == b->wants[i].set && a->wants[k].value == b->wants[i].value);
        if (twice)
            continue;
        if (o->want_count == WANTS_MAX)
            gr_wrong(s, BASE_UNSUPPORTED, at, "not", "more than %u members that have to be wrong",
                     WANTS_MAX);
        o->wants[o->want_count++] = b->wants[i];
    }
    o->min = gr_most(a->min, b->min);
    o->max = gr_least(a->max, b->max);
    o->seen_all = a->seen_all || b->seen_all;
    o->seen = a->seen == NULL   ? b->seen
              : b->seen == NULL ? a->seen
                                : gr_dfa_op(s->c, a->seen, b->seen, GR_OR);
    return o;
}

array *gr_array_and(schema *s, array *a, array *b, const dom *at)
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
    memcpy(o->wants, a->wants, sizeof o->wants);
    o->want_count = a->want_count;
    for (uint32_t i = 0; i < b->want_count; i++) {
        const some *w = &b->wants[i];
        uint32_t k = 0;
        while (k < o->want_count && (o->wants[k].value != w->value || o->wants[k].from != w->from))
            k++;
        if (k == WANTS_MAX)
            gr_wrong(s, BASE_UNSUPPORTED, at, "contains", "more than %u of them for one array",
                     WANTS_MAX);
        if (k == o->want_count)
            o->wants[o->want_count++] = *w;
        o->wants[k].min = gr_most(o->wants[k].min, w->min);
        o->wants[k].max = gr_least(o->wants[k].max, w->max);
    }
    o->seen_count = gr_most(a->seen_count, b->seen_count);
    memcpy(o->seen, a->seen, sizeof o->seen);
    o->seen_terms = a->seen_terms;
    for (uint32_t i = 0; i < b->seen_terms; i++) {
        if (o->seen_terms == WANTS_MAX)
            gr_wrong(s, BASE_UNSUPPORTED, at, "unevaluatedItems", "beside more than %u contains",
                     WANTS_MAX);
        o->seen[o->seen_terms++] = b->seen[i];
    }
    return o;
}

static bool array_possible(const array *a)
{
    for (uint32_t i = 0; i < a->want_count; i++)
        if (a->wants[i].min > a->wants[i].max ||
            (a->wants[i].min > 0 && a->wants[i].value->never) || a->wants[i].min > a->max)
            return false;
    return a->min <= a->max;
}

/* NULL if nothing satisfies both. */
static bundle *bundle_and(schema *s, const bundle *a, const bundle *b, const dom *at)
{
    bundle *o = gr_bundle_any(s, a->types & b->types);
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
        o->object = gr_object_and(s, a->object, b->object, at);
        if (o->object != NULL && !object_possible(o->object))
            o->types &= (uint8_t)~T_OBJECT;
    }
    if (o->types & T_ARRAY) {
        o->array = gr_array_and(s, a->array, b->array, at);
        if (o->array != NULL && !array_possible(o->array))
            o->types &= (uint8_t)~T_ARRAY;
    }
    return o->types == 0 ? NULL : o;
}

/* The keyword of a schema that makes its alternatives many. */
static const char *branching(const dom *node)
{
    static const char *const words[] = {"oneOf", "anyOf", "not", "if", "dependentSchemas", "allOf"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (gr_get(node, words[i]) != NULL)
            return words[i];
    return NULL;
}

alts *gr_alts_and(schema *s, const alts *a, const alts *b, const dom *at)
{
    if ((size_t)a->count * b->count > (size_t)ALTERNATIVES_MAX * 32)
        gr_wrong(s, BASE_UNSUPPORTED, at, branching(at), "more than %u alternatives",
                 ALTERNATIVES_MAX);
    alts *o = gr_alts_new(s, a->count * b->count);
    for (uint32_t i = 0; i < a->count; i++)
        for (uint32_t k = 0; k < b->count; k++) {
            bundle *both = bundle_and(s, a->data[i], b->data[k], at);
            if (both != NULL)
                o->data[o->count++] = both;
        }
    if (o->count > ALTERNATIVES_MAX)
        gr_wrong(s, BASE_UNSUPPORTED, at, branching(at), "more than %u alternatives",
                 ALTERNATIVES_MAX);
    return o;
}

alts *gr_alts_or(schema *s, const alts *a, const alts *b)
{
    alts *o = gr_alts_new(s, a->count + b->count);
    memcpy(o->data, a->data, a->count * sizeof *o->data);
    memcpy(o->data + a->count, b->data, b->count * sizeof *o->data);
    o->count = a->count + b->count;
    return o;
}

void gr_alt_add(schema *s, alts *a, bundle *b, const dom *at, const char *keyword)
{
    if (a->count >= ALTERNATIVES_MAX)
        gr_wrong(s, BASE_UNSUPPORTED, at, keyword, "more than %u alternatives", ALTERNATIVES_MAX);
    a->data[a->count++] = b;
}

bundle *gr_with_member(schema *s, gr_text name, term *value, bool required)
{
    bundle *b = gr_bundle_any(s, T_OBJECT);
    b->object = gr_object_any(s);
    b->object->members = gr_alloc(s->c, 1, sizeof(member));
    b->object->members[0] = (member){name, value, required};
    b->object->count = 1;
    return b;
}

static bundle *with_array(schema *s)
{
    bundle *b = gr_bundle_any(s, T_ARRAY);
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

static void add_object(schema *s, alts *out, object *o, const dom *at, const char *keyword)
{
    bundle *b = gr_bundle_any(s, T_OBJECT);
    b->object = o;
    gr_alt_add(s, out, b, at, keyword);
}

/* Some member of `set` has such a value; `declared` are not of the set. */
static void add_want(schema *s, alts *out, gr_dfa *set, const gr_dfa *declared, term *value,
                     const dom *at, const char *keyword)
{
    if (declared->count > 0)
        set = gr_dfa_op(s->c, set == NULL ? gr_dfa_all(s->c) : set, declared, GR_MINUS);
    if (set != NULL && set->count == 0)
        return;
    object *o = gr_object_any(s);
    o->wants[o->want_count++] = (names){set, value};
    add_object(s, out, o, at, keyword);
}

static void object_not(schema *s, alts *out, const object *o, const dom *at, const char *keyword)
{
    gr_text *texts = gr_alloc(s->c, o->count, sizeof *texts);
    for (uint32_t i = 0; i < o->count; i++) {
        const member *m = &o->members[i];
        texts[i] = m->name;
        if (m->required)
            gr_alt_add(s, out, gr_with_member(s, m->name, s->never, false), at, keyword);
        if (m->value != s->always)
            gr_alt_add(s, out, gr_with_member(s, m->name, gr_term_not(s, m->value, at), true), at,
                       keyword);
    }
    gr_dfa *declared = gr_dfa_texts(s->c, texts, o->count);
    gr_dfa *outside = gr_dfa_all(s->c);
    for (uint32_t i = 0; i < o->class_count; i++) {
        const names *class = &o->classes[i];
        if (class->value != s->always)
            add_want(s, out, class->set, declared, gr_term_not(s, class->value, at), at, keyword);
        if (class->set == NULL)
            outside = gr_dfa_texts(s->c, NULL, 0);
        else if (outside->count > 0)
            outside = gr_dfa_op(s->c, outside, class->set, GR_MINUS);
    }
    if (outside->count > 0)
        add_want(s, out, outside, declared, s->always, at, keyword);
    for (uint32_t i = 0; i < o->want_count; i++) {
        object *none = gr_object_any(s);
        const names *want = &o->wants[i];
        none->classes = gr_alloc(s->c, 2, sizeof *none->classes);
        none->classes[0] = (names){want->set, gr_term_not(s, want->value, at)};
        none->class_count = 1;
        if (want->set != NULL)
            none->classes[none->class_count++] =
                (names){gr_dfa_op(s->c, gr_dfa_all(s->c), want->set, GR_MINUS), s->always};
        add_object(s, out, none, at, keyword);
    }
    if (o->max != GR_INFINITE) {
        object *more = gr_object_any(s);
        more->min = o->max + 1;
        add_object(s, out, more, at, keyword);
    }
    if (o->min > 0) {
        object *fewer = gr_object_any(s);
        fewer->max = o->min - 1;
        add_object(s, out, fewer, at, keyword);
    }
}

static void add_some(schema *s, alts *out, some want, const dom *at, const char *keyword)
{
    bundle *b = with_array(s);
    b->array->wants[b->array->want_count++] = want;
    gr_alt_add(s, out, b, at, keyword);
}

/* False where the complement of the array cannot be written. */
static bool array_not(schema *s, alts *out, const array *a, const dom *at, const char *keyword)
{
    if ((a->unique && a->max > 1) || a->count > 256)
        return false;
    for (uint32_t i = 0; i < a->count; i++)
        if (a->prefix[i] != s->always)
            gr_alt_add(s, out, with_item(s, i, gr_term_not(s, a->prefix[i], at)), at, keyword);
    uint32_t max = a->rest->never ? gr_least(a->max, a->count) : a->max;
    if (!a->rest->never && a->rest != s->always)
        add_some(s, out, (some){gr_term_not(s, a->rest, at), a->count, 1, GR_INFINITE}, at,
                 keyword);
    for (uint32_t i = 0; i < a->want_count; i++) {
        some w = a->wants[i];
        if (w.min > 0)
            add_some(s, out, (some){w.value, w.from, 0, w.min - 1}, at, keyword);
        if (w.max != GR_INFINITE)
            add_some(s, out, (some){w.value, w.from, w.max + 1, GR_INFINITE}, at, keyword);
    }
    if (max != GR_INFINITE) {
        bundle *b = with_array(s);
        b->array->min = max + 1;
        gr_alt_add(s, out, b, at, keyword);
    }
    if (a->min > 0) {
        bundle *b = with_array(s);
        b->array->max = a->min - 1;
        gr_alt_add(s, out, b, at, keyword);
    }
    return true;
}

alts *gr_bundle_not(schema *s, const bundle *b, const dom *at, const char *keyword)
{
    alts *out = gr_alts_new(s, ALTERNATIVES_MAX);
    if (b->types != T_ALL)
        gr_alt_add(s, out, gr_bundle_any(s, T_ALL & ~b->types), at, keyword);
    if ((b->types & T_NUMBER) && b->number != NULL) {
        bundle *n = gr_bundle_any(s, T_NUMBER);
        n->number = gr_dfa_op(s->c, gr_numbers(s), b->number, GR_MINUS);
        if (n->number->count > 0)
            gr_alt_add(s, out, n, at, keyword);
    }
    if (b->types & T_STRING) {
        if (b->string != NULL) {
            bundle *n = gr_bundle_any(s, T_STRING);
            n->string = gr_dfa_op(s->c, gr_dfa_all(s->c), b->string, GR_MINUS);
            if (n->string->count > 0)
                gr_alt_add(s, out, n, at, keyword);
        }
        if (b->length_min > 0) {
            bundle *n = gr_bundle_any(s, T_STRING);
            n->length_max = b->length_min - 1;
            gr_alt_add(s, out, n, at, keyword);
        }
        if (b->length_max != GR_INFINITE) {
            bundle *n = gr_bundle_any(s, T_STRING);
            n->length_min = b->length_max + 1;
            gr_alt_add(s, out, n, at, keyword);
        }
    }
    if ((b->types & T_OBJECT) && b->object != NULL)
        object_not(s, out, b->object, at, keyword);
    if ((b->types & T_ARRAY) && b->array != NULL && !array_not(s, out, b->array, at, keyword))
        gr_wrong(s, BASE_UNSUPPORTED, at, keyword, "the opposite of uniqueItems");
    return out;
}

alts *gr_alts_not(schema *s, const alts *a, const dom *at, const char *keyword)
{
    alts *o = gr_alts_new(s, 1);
    o->data[o->count++] = gr_bundle_any(s, T_ALL);
    for (uint32_t i = 0; i < a->count; i++)
        o = gr_alts_and(s, o, gr_bundle_not(s, a->data[i], at, keyword), at);
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

bool gr_alts_apart(schema *s, const alts *a, const alts *b, const dom *at)
{
    for (uint32_t i = 0; i < a->count; i++)
        for (uint32_t k = 0; k < b->count; k++) {
            bundle *both = bundle_and(s, a->data[i], b->data[k], at);
            if (both != NULL && !bundle_empty(s, both, 0))
                return false;
        }
    return true;
}

alts *gr_alts_one(schema *s, bundle *b)
{
    alts *a = gr_alts_new(s, 1);
    if (b->types != 0)
        a->data[a->count++] = b;
    return a;
}
