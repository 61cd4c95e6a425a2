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
 * What unevaluated… asks is known per alternative, because each says which keywords held.
 *
 * Refused (BASE_UNSUPPORTED): $recursiveRef, references to other documents, uniqueItems unless the
 * items are a small enum, and its opposite, standard formats that no automaton of ours describes,
 * and whatever needs more alternatives than ALTERNATIVES_MAX. Unknown keywords are annotations, as
 * the standard says. GRAMMAR.md has the whole table. */
#include <stdlib.h>

#include "engine/grammar_schema.h"

#define EXPAND_MAX 64 /* applicators inside each other */

/* ---- keywords ---- */

static uint32_t count_of(schema *s, const dom *node, const char *keyword)
{
    decimal *d = gr_decimal_of(s, node, keyword);
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
        while (i < 7 && !gr_is(one->text, kinds[i].name))
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
        number_and(s, b, gr_integers(s));
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
                       gr_number_bound(s, gr_decimal_of(s, at, bounds[i].name),
                                       flag ? bounds[i].exclusive_op : bounds[i].op));
        if (exclusive != NULL && exclusive->kind != BASE_JSON_TRUE &&
            exclusive->kind != BASE_JSON_FALSE)
            number_and(s, b,
                       gr_number_bound(s, gr_decimal_of(s, exclusive, bounds[i].exclusive),
                                       bounds[i].exclusive_op));
    }
    const dom *of = gr_get(node, "multipleOf");
    if (of != NULL)
        number_and(s, b, gr_number_multiple(s, of));
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
              "(\\." LABEL ")+"},
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
    char pointer[GR_POINTER_SIZE];
    if ((at = gr_get(node, "minLength")) != NULL)
        b->length_min = count_of(s, at, "minLength");
    if ((at = gr_get(node, "maxLength")) != NULL)
        b->length_max = count_of(s, at, "maxLength");
    if (b->length_min > b->length_max)
        b->types &= (uint8_t)~T_STRING;
    if ((at = gr_get(node, "pattern")) != NULL) {
        expect_kind(s, at, BASE_JSON_STRING, "pattern");
        gr_pointer(node, "pattern", pointer);
        string_and(s, b,
                   gr_dfa_regex(s->c, at->text.data, at->text.length, false, "pattern", pointer));
    }
    if ((at = gr_get(node, "format")) == NULL || at->kind != BASE_JSON_STRING ||
        s->c->options.any_format)
        return;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (!gr_is(at->text, formats[i].name))
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
    o->seen_all = extra != NULL;
    o->seen = s->evaluates ? gr_dfa_texts(s->c, NULL, 0) : NULL;
    for (dom *p = patterns == NULL ? NULL : patterns->first; p != NULL; p = p->next) {
        char pointer[GR_POINTER_SIZE];
        gr_pointer(node, "patternProperties", pointer);
        gr_dfa *set =
            gr_dfa_regex(s->c, p->key.data, p->key.length, false, "patternProperties", pointer);
        term *value = gr_term_lit(s, p, L_SCHEMA);
        if (s->evaluates)
            o->seen = gr_dfa_op(s->c, o->seen, set, GR_OR);
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
        member *old = gr_member_find(o, p->key);
        if (old != NULL)
            old->value = value;
        else
            o->members[o->count++] = (member){p->key, value, false};
    }
    if (s->evaluates && o->count > 0) {
        gr_text *declared = gr_alloc(s->c, o->count, sizeof *declared);
        for (uint32_t i = 0; i < o->count; i++)
            declared[i] = o->members[i].name;
        o->seen = gr_dfa_op(s->c, o->seen, gr_dfa_texts(s->c, declared, o->count), GR_OR);
    }
    for (dom *r = list ? required->first : NULL; r != NULL; r = r->next) {
        if (r->kind != BASE_JSON_STRING)
            gr_wrong(s, BASE_INVALID, node, "required", "must list strings");
        member *m = gr_member_find(o, r->text);
        if (m == NULL) {
            term *value = gr_member_term(s, o, r->text);
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
    dom *unique = gr_get(node, "uniqueItems");
    dom *contains_min = gr_get(node, "minContains"), *contains_max = gr_get(node, "maxContains");
    array *a = gr_array_any(s);
    if (prefix == NULL && items != NULL && items->kind == BASE_JSON_ARRAY_BEGIN) {
        prefix = items;
        items = extra;
    }
    if (prefix != NULL) {
        expect_kind(s, prefix, BASE_JSON_ARRAY_BEGIN, "prefixItems");
        a->prefix =
            gr_alloc(s->c, prefix->last == NULL ? 0 : prefix->last->index + 1, sizeof *a->prefix);
        for (dom *p = prefix->first; p != NULL; p = p->next)
            a->prefix[a->count++] = gr_term_lit(s, p, L_SCHEMA);
    }
    a->seen_count = items != NULL ? GR_INFINITE : a->count;
    if (items != NULL)
        a->rest = gr_term_lit(s, items, L_SCHEMA);
    a->min = min == NULL ? 0 : count_of(s, min, "minItems");
    a->max = max == NULL ? GR_INFINITE : count_of(s, max, "maxItems");
    a->unique = unique != NULL && unique->kind == BASE_JSON_TRUE;
    if (contains != NULL) {
        some *w = &a->wants[a->want_count];
        *w = (some){gr_term_lit(s, contains, L_SCHEMA), 0, 1, GR_INFINITE};
        if (contains_min != NULL && s->draft >= 2019)
            w->min = count_of(s, contains_min, "minContains");
        if (contains_max != NULL && s->draft >= 2019)
            w->max = count_of(s, contains_max, "maxContains");
        if (w->min > w->max || (w->min > 0 && w->value->never))
            b->types &= (uint8_t)~T_ARRAY;
        if (s->draft >= 2020)
            a->seen[a->seen_terms++] = w->value;
        a->want_count = w->min > 0 || w->max != GR_INFINITE;
    }
    if (a->min > a->max)
        b->types &= (uint8_t)~T_ARRAY;
    b->array = a;
}

/* One value, as an enum or a const has it. */
static bundle *value_bundle(schema *s, dom *node)
{
    bundle *b = gr_bundle_any(s, 0);
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
        b->number = gr_number_bound(s, gr_decimal_of(s, node, "enum"), "=");
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
            member *old = gr_member_find(b->object, k->key);
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
    bundle *plain = gr_bundle_any(s, 0);
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

static opened *opened_in(schema *s, dom *node, const scope *in)
{
    opened *o = node->opened;
    while (o != NULL && o->in != in)
        o = o->next;
    if (o == NULL) {
        o = gr_alloc(s->c, 1, sizeof *o);
        *o = (opened){.in = in, .next = node->opened};
        node->opened = o;
    }
    return o;
}

static alts *schema_open(schema *s, dom *node, uint32_t depth);

static bool annotated(const alts *a)
{
    for (uint32_t i = 0; i < a->count; i++) {
        const object *o = a->data[i]->object;
        const array *list = a->data[i]->array;
        if (((a->data[i]->types & T_OBJECT) && o != NULL &&
             (o->seen_all || (o->seen != NULL && o->seen->count > 0))) ||
            ((a->data[i]->types & T_ARRAY) && list != NULL &&
             (list->seen_count > 0 || list->seen_terms > 0)))
            return true;
    }
    return false;
}

#define ANNOTATED_MAX 5u /* branches, each set of which is an alternative */

/* What was evaluated is what all branches that hold have evaluated together, so beside each branch
 * stand those of them that hold at once. A branch that says less is no harm: the more was
 * evaluated, the less unevaluated… asks. */
static alts *any_of(schema *s, dom *node, dom *list, const char *keyword, uint32_t depth)
{
    alts *a = gr_alts_new(s, ALTERNATIVES_MAX), *each[ANNOTATED_MAX];
    uint32_t told = 0;
    expect_kind(s, list, BASE_JSON_ARRAY_BEGIN, keyword);
    for (dom *k = list->first; k != NULL; k = k->next) {
        alts *one = schema_open(s, k, depth + 1);
        for (uint32_t i = 0; i < one->count; i++)
            gr_alt_add(s, a, one->data[i], node, keyword);
        if (!s->evaluates || !annotated(one))
            continue;
        if (told == ANNOTATED_MAX)
            gr_wrong(s, BASE_UNSUPPORTED, node, keyword,
                     "more than %u branches with an unevaluated… around them", ANNOTATED_MAX);
        each[told++] = one;
    }
    for (uint32_t set = 1; set < 1u << told; set++) {
        alts *all = NULL;
        if ((set & (set - 1)) == 0)
            continue;
        for (uint32_t i = 0; i < told; i++)
            if (set >> i & 1)
                all = all == NULL ? each[i] : gr_alts_and(s, all, each[i], node);
        for (uint32_t i = 0; i < all->count; i++)
            gr_alt_add(s, a, all->data[i], node, keyword);
    }
    return a;
}

static alts *one_of(schema *s, dom *node, dom *list, const alts *outer, uint32_t depth)
{
    expect_kind(s, list, BASE_JSON_ARRAY_BEGIN, "oneOf");
    uint32_t n = list->last == NULL ? 0 : list->last->index + 1;
    alts **each = gr_alloc(s->c, n, sizeof *each), **alone = gr_alloc(s->c, n, sizeof *alone);
    alts *all = gr_alts_new(s, ALTERNATIVES_MAX);
    for (dom *k = list->first; k != NULL; k = k->next) {
        alone[k->index] = schema_open(s, k, depth + 1);
        each[k->index] = gr_alts_and(s, outer, alone[k->index], node);
    }
    for (uint32_t i = 0; i < n; i++) {
        alts *only = each[i];
        for (uint32_t k = 0; k < n; k++)
            if (k != i && !gr_alts_apart(s, each[i], each[k], node))
                only = gr_alts_and(s, only, gr_alts_not(s, alone[k], node, "oneOf"), node);
        for (uint32_t j = 0; j < only->count; j++)
            gr_alt_add(s, all, only->data[j], node, "oneOf");
    }
    return all;
}

/* What no keyword so far has evaluated follows the schemas under unevaluated…: the last thing that
 * is read of a schema. */
static alts *unevaluated(schema *s, dom *node, alts *all)
{
    dom *members = gr_get(node, "unevaluatedProperties"), *items = gr_get(node, "unevaluatedItems");
    if (members == NULL && items == NULL)
        return all;
    alts *out = gr_alts_new(s, all->count);
    for (uint32_t i = 0; i < all->count; i++) {
        bundle *b = gr_bundle_any(s, all->data[i]->types), *also = gr_bundle_any(s, T_ALL);
        *b = *all->data[i];
        if (members != NULL && (b->types & T_OBJECT)) {
            const object *o = b->object;
            also->object = gr_object_any(s);
            also->object->seen_all = true;
            term *value = gr_term_lit(s, members, L_SCHEMA);
            if (o == NULL || (!o->seen_all && (o->seen == NULL || o->seen->count == 0))) {
                also->object->classes[0].value = value;
            } else if (!o->seen_all) {
                also->object->classes = gr_alloc(s->c, 2, sizeof(names));
                also->object->classes[0] = (names){o->seen, s->always};
                also->object->classes[1] =
                    (names){gr_dfa_op(s->c, gr_dfa_all(s->c), o->seen, GR_MINUS), value};
                also->object->class_count = 2;
            }
        }
        if (items != NULL && (b->types & T_ARRAY)) {
            array *a = also->array = gr_array_any(s);
            uint32_t count = b->array == NULL ? 0 : b->array->seen_count;
            term *any[WANTS_MAX + 1] = {gr_term_lit(s, items, L_SCHEMA)};
            a->seen_count = GR_INFINITE;
            for (uint32_t k = 0; b->array != NULL && k < b->array->seen_terms; k++)
                any[k + 1] = b->array->seen[k];
            if (count != GR_INFINITE) {
                a->count = count;
                a->prefix = gr_alloc(s->c, count, sizeof *a->prefix);
                for (uint32_t k = 0; k < count; k++)
                    a->prefix[k] = s->always;
                a->rest =
                    gr_term_any(s, any, b->array == NULL ? 1 : b->array->seen_terms + 1, items);
            }
        }
        const alts *both = gr_alts_and(s, gr_alts_one(s, b), gr_alts_one(s, also), node);
        if (both->count > 0)
            out->data[out->count++] = both->data[0];
    }
    return out;
}

/* Either `name` is not there, or what it asks for holds. */
static alts *dependent(schema *s, dom *node, dom *d, uint32_t depth)
{
    alts *with, *without = gr_alts_one(s, gr_with_member(s, d->key, s->never, false));
    gr_alt_add(s, without = gr_alts_or(s, without, gr_alts_new(s, 0)),
               gr_bundle_any(s, T_ALL & ~T_OBJECT), node, "dependentRequired");
    if (d->kind == BASE_JSON_ARRAY_BEGIN || d->kind == BASE_JSON_STRING) {
        dom *one = d->kind == BASE_JSON_STRING ? d : d->first;
        with = gr_alts_one(s, gr_with_member(s, d->key, s->always, true));
        for (; one != NULL; one = one == d ? NULL : one->next) {
            if (one->kind != BASE_JSON_STRING)
                gr_wrong(s, BASE_INVALID, node, "dependentRequired", "must list strings");
            with = gr_alts_and(s, with,
                               gr_alts_one(s, gr_with_member(s, one->text, s->always, true)), node);
        }
    } else {
        with = gr_alts_and(s, gr_alts_one(s, gr_with_member(s, d->key, s->always, true)),
                           schema_open(s, d, depth + 1), node);
    }
    return gr_alts_or(s, without, with);
}

/* What a reference leads to. */
static alts *follow(schema *s, const dom *node, const dom *ref, dom *to, const char *keyword,
                    uint32_t depth)
{
    if (opened_in(s, to, gr_enter(s, s->in, to))->opening)
        gr_wrong(s, BASE_INVALID, node, keyword, "%.*s leads back here without a value between",
                 (int)ref->text.length, ref->text.data);
    return schema_open(s, to, depth + 1);
}

static alts *schema_read(schema *s, dom *node, uint32_t depth)
{
    static const char *const refused[] = {"$recursiveRef", "extends", "disallow", "divisibleBy"};
    dom *at;
    if (node->kind == BASE_JSON_TRUE)
        return gr_alts_one(s, gr_bundle_any(s, T_ALL));
    if (node->kind == BASE_JSON_FALSE)
        return gr_alts_new(s, 1);
    if (node->kind != BASE_JSON_OBJECT_BEGIN)
        gr_wrong(s, BASE_INVALID, node, NULL, "is neither an object nor a boolean");
    alts *all = gr_alts_one(s, gr_bundle_any(s, T_ALL));
    if (node->any_count > 0) {
        alts *any = gr_alts_new(s, ALTERNATIVES_MAX);
        for (uint32_t i = 0; i < node->any_count; i++) {
            const alts *one = gr_term_open(s, node->any[i], depth + 1);
            for (uint32_t k = 0; k < one->count; k++)
                gr_alt_add(s, any, one->data[k], node, "not");
        }
        return any;
    }
    if ((at = gr_get(node, "$ref")) != NULL && at->kind == BASE_JSON_STRING) {
        all = follow(s, node, at, gr_resolve(s, node, at, "$ref"), "$ref", depth);
        if (s->draft <= 7)
            return all;
    }
    if (s->draft >= 2020 && (at = gr_get(node, "$dynamicRef")) != NULL &&
        at->kind == BASE_JSON_STRING)
        all = gr_alts_and(
            s, all, follow(s, node, at, gr_resolve_dynamic(s, node, at), "$dynamicRef", depth),
            node);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (gr_get(node, refused[i]) != NULL && (i < 1 || s->draft < 4))
            gr_wrong(s, BASE_UNSUPPORTED, node, refused[i], "cannot be enforced");
    bundle *b = gr_bundle_any(s, T_ALL);
    if ((at = gr_get(node, "type")) != NULL)
        read_type(s, node, b, at);
    read_numbers(s, node, b);
    read_strings(s, node, b);
    read_object(s, node, b, depth);
    static const char *const array_words[] = {"prefixItems", "items",    "contains",
                                              "minItems",    "maxItems", "uniqueItems"};
    for (size_t i = 0; i < sizeof array_words / sizeof *array_words && b->array == NULL; i++)
        if (gr_get(node, array_words[i]) != NULL)
            read_array(s, node, b);
    all = gr_alts_and(s, all, gr_alts_one(s, b), node);
    if ((at = gr_get(node, "enum")) != NULL) {
        expect_kind(s, at, BASE_JSON_ARRAY_BEGIN, "enum");
        all = gr_alts_and(s, all, values_open(s, at), node);
    }
    if ((at = gr_get(node, "const")) != NULL)
        all = gr_alts_and(s, all, gr_alts_one(s, value_bundle(s, at)), node);
    if ((at = gr_get(node, "allOf")) != NULL) {
        expect_kind(s, at, BASE_JSON_ARRAY_BEGIN, "allOf");
        for (dom *k = at->first; k != NULL; k = k->next)
            all = gr_alts_and(s, all, schema_open(s, k, depth + 1), node);
    }
    if ((at = gr_get(node, "anyOf")) != NULL)
        all = gr_alts_and(s, all, any_of(s, node, at, "anyOf", depth), node);
    static const char *const dependencies[] = {"dependentRequired", "dependentSchemas",
                                               "dependencies"};
    for (size_t i = 0; i < 3; i++)
        if ((at = gr_get(node, dependencies[i])) != NULL && at->kind == BASE_JSON_OBJECT_BEGIN)
            for (dom *k = at->first; k != NULL; k = k->next)
                all = gr_alts_and(s, all, dependent(s, node, k, depth), node);
    if ((at = gr_get(node, "if")) != NULL) {
        dom *then = gr_get(node, "then"), *otherwise = gr_get(node, "else");
        /* Alone it only evaluates. */
        if (s->evaluates && then == NULL && otherwise == NULL)
            all = gr_alts_and(s, all,
                              gr_alts_or(s, schema_open(s, at, depth + 1),
                                         gr_alts_one(s, gr_bundle_any(s, T_ALL))),
                              node);
        if (then != NULL || otherwise != NULL) {
            alts *condition = schema_open(s, at, depth + 1);
            alts *yes = then == NULL
                            ? condition
                            : gr_alts_and(s, condition, schema_open(s, then, depth + 1), node);
            alts *no = gr_alts_not(s, condition, node, "if");
            if (otherwise != NULL)
                no = gr_alts_and(s, no, schema_open(s, otherwise, depth + 1), node);
            all = gr_alts_and(s, all, gr_alts_or(s, yes, no), node);
        }
    }
    if ((at = gr_get(node, "not")) != NULL)
        all = gr_alts_and(s, all, gr_alts_not(s, schema_open(s, at, depth + 1), node, "not"), node);
    if ((at = gr_get(node, "oneOf")) != NULL)
        all = one_of(s, node, at, all, depth);
    return unevaluated(s, node, all);
}

static alts *schema_open(schema *s, dom *node, uint32_t depth)
{
    const scope *outer = s->in;
    const dom *around = s->c->at;
    s->in = gr_enter(s, outer, node);
    opened *o = opened_in(s, node, s->in);
    if (o->alts[L_SCHEMA] == NULL) {
        if (o->opening)
            gr_wrong(s, BASE_INVALID, node, "$ref",
                     "the schema contains itself without a value between");
        if (depth > EXPAND_MAX)
            gr_wrong(s, BASE_TOO_LONG, node, NULL, "more than %u applicators inside each other",
                     EXPAND_MAX);
        o->opening = true;
        s->c->at = node;
        o->alts[L_SCHEMA] = schema_read(s, node, depth);
        s->c->at = around;
        o->opening = false;
    }
    s->in = outer;
    return o->alts[L_SCHEMA];
}

static alts *literal_open(schema *s, literal l, uint32_t depth)
{
    switch (l.kind) {
    case L_VALUE:
        return gr_alts_one(s, value_bundle(s, l.node));
    case L_NOT_VALUE:
        return gr_bundle_not(s, value_bundle(s, l.node), l.node, "not");
    case L_NOT:
        return gr_alts_not(s, schema_open(s, l.node, depth), l.node, "not");
    default:
        return schema_open(s, l.node, depth);
    }
}

alts *gr_term_open(schema *s, term *t, uint32_t depth)
{
    if (t->open != NULL)
        return t->open;
    const scope *outer = s->in;
    alts *all = gr_alts_one(s, gr_bundle_any(s, T_ALL));
    for (uint32_t i = 0; i < t->count; i++) {
        literal l = t->lits[i];
        s->in = l.in;
        opened *o = opened_in(s, l.node, l.in);
        if (o->alts[l.kind] == NULL)
            o->alts[l.kind] = literal_open(s, l, depth);
        all = gr_alts_and(s, all, o->alts[l.kind], l.node);
    }
    s->in = outer;
    return t->open = all;
}

/* ---- into the graph ---- */

schema *gr_schema_begin(gr_compile *c, const char *text, size_t length)
{
    schema *s = gr_alloc(c, 1, sizeof *s);
    s->c = c;
    s->queue_end = &s->queue;
    s->root = gr_dom_parse(s, text, length);
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
    gr_dom_resources(s);
    s->never = gr_alloc(c, 1, sizeof *s->never);
    s->never->never = true;
    s->always = gr_term_of(s, NULL, 0);
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
