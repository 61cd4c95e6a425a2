/* What reading a schema (grammar_dom.c, _number.c, _alts.c, _schema.c) and writing its graph share:
 * as JSON (grammar_lower.c) and as the arguments of a call (grammar_calls.c). */
#pragma once
#include "engine/base/json.h"
#include "engine/grammar_internal.h"

#define UNIQUE_MAX 64u
#define ALTERNATIVES_MAX 128 /* of one term */
#define DIGITS_MAX 400

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

/* The dynamic scope of an evaluation: resources with a $dynamicAnchor that it has entered. NULL: it
 * does not matter. Equal ones are one. */
typedef struct scope {
    struct dom *resource;
    const struct scope *outer;
    struct scope *next; /* of all */
} scope;

/* A literal: a schema or a value, perhaps negated. */
enum { L_SCHEMA, L_NOT, L_VALUE, L_NOT_VALUE };

/* What a node was opened into, in one scope. */
typedef struct opened {
    const scope *in;
    struct alts *alts[4]; /* of each kind of literal */
    bool opening;
    struct opened *next;
} opened;

typedef struct dom {
    base_json_kind kind; /* OBJECT_BEGIN and ARRAY_BEGIN stand for the whole */
    gr_text key, text;   /* decoded; a number's text as it stands */
    uint32_t index;      /* in its array */
    struct dom *parent, *first, *last, *next;
    struct dom *root;          /* of the nearest resource with an $id */
    gr_text uri;               /* of a resource's root */
    struct dom *next_resource; /* of a resource's root */
    opened *opened;
    struct term **any; /* a schema of ours: one of these holds */
    uint32_t any_count;
    struct dom *next_any;
} dom;

typedef struct literal {
    dom *node;
    const scope *in;
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

#define WANTS_MAX GR_WANTS_MAX

typedef struct object {
    member *members;
    uint32_t count;
    names *classes; /* of the other names, apart from each other; outside of all: forbidden */
    uint32_t class_count;
    names wants[WANTS_MAX]; /* for each, some member of these names has such a value */
    uint32_t want_count;
    uint32_t min, max;
    gr_dfa *seen; /* names that a keyword has evaluated, for unevaluatedProperties; NULL: none */
    bool seen_all;
} object;

/* From min to max items at or past `from` match. */
typedef struct some {
    term *value;
    uint32_t from, min, max;
} some;

typedef struct array {
    term **prefix;
    uint32_t count;
    term *rest;
    uint32_t min, max;
    bool unique;
    some wants[WANTS_MAX];
    uint32_t want_count;
    /* Items that a keyword has evaluated, for unevaluatedItems: so many first ones, and those that
     * match one of these. */
    uint32_t seen_count;
    term *seen[WANTS_MAX];
    uint32_t seen_terms;
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

typedef struct decimal {
    bool negative;
    char whole[DIGITS_MAX + 1], part[DIGITS_MAX + 1]; /* without needless zeros; "0" and "" */
    uint32_t whole_count, part_count;
} decimal;

#define TERMS 1024
typedef struct schema {
    gr_compile *c;
    const char *text;
    size_t length;
    dom *root; /* with its resources behind it, by next_resource */
    uint32_t draft;
    bool evaluates; /* some unevaluated… stands in the text, so what was evaluated matters */
    bool dynamic;   /* some $dynamicRef does */
    const scope *in;
    scope *scopes;
    dom *anys;
    term *terms[TERMS], *always, *never;
    term *queue, **queue_end;
    gr_dfa *plain_number, *plain_integer, *number, *integer; /* made when asked for */
    gr_dfa *canonical_number, *long_number, *canonical_integer;
    uint32_t ret;
    gr_dfa *barred; /* texts that strings are held to beside their schema; NULL: all */
} schema;

/* ---- the text ---- */

/* Reads the text; its terms are lowered by whoever began it. */
schema *gr_schema_begin(gr_compile *c, const char *text, size_t length);
dom *gr_dom_parse(schema *s, const char *bytes, size_t length);
/* The node after `node` in the text's order below `top`. */
dom *gr_dom_walk(dom *node, const dom *top);
/* Cuts the tree into resources: nodes with an $id. */
void gr_dom_resources(schema *s);
/* Refuses: the text names keyword and place. */
_Noreturn void gr_wrong(schema *s, base_code code, const dom *node, const char *keyword,
                        const char *fmt, ...) __attribute__((format(printf, 5, 6)));
bool gr_is(gr_text text, const char *what);
bool gr_same(gr_text a, gr_text b);
dom *gr_get(const dom *node, const char *key); /* a member, NULL if there is none */
/* The node that the reference `ref`, under the name `keyword` in `at`, leads to. */
dom *gr_resolve(schema *s, const dom *at, const dom *ref, const char *keyword);
/* The same for a $dynamicRef, in the scope s->in. */
dom *gr_resolve_dynamic(schema *s, const dom *at, const dom *ref);
/* The scope after entering the resource of `node`. */
const scope *gr_enter(schema *s, const scope *in, const dom *node);

/* ---- numbers ---- */

decimal *gr_decimal_of(schema *s, const dom *node, const char *keyword);
/* Numbers x without an exponent for which x op d; op is one of = < > <= >=. */
gr_dfa *gr_number_bound(schema *s, const decimal *d, const char *op);
gr_dfa *gr_number_multiple(schema *s, const dom *node);
gr_dfa *gr_numbers(schema *s);
gr_dfa *gr_integers(schema *s);
/* Whole matches of a pattern, kept for the next time. */
gr_dfa *gr_pattern(schema *s, gr_dfa **kept, const char *text);

/* ---- terms and alternatives ---- */

term *gr_term_of(schema *s, const literal *lits, uint32_t count);
term *gr_term_lit(schema *s, dom *node, uint8_t kind); /* in the scope s->in */
term *gr_term_and(schema *s, term *a, term *b);
/* One of them holds; `at` is the place to name in errors. */
term *gr_term_any(schema *s, term *const *terms, uint32_t count, const dom *at);
term *gr_term_not(schema *s, term *t, const dom *at);
alts *gr_term_open(schema *s, term *t, uint32_t depth);
alts *gr_alts_new(schema *s, uint32_t capacity);
alts *gr_alts_one(schema *s, bundle *b);
alts *gr_alts_and(schema *s, const alts *a, const alts *b, const dom *at);
alts *gr_alts_or(schema *s, const alts *a, const alts *b);
alts *gr_alts_not(schema *s, const alts *a, const dom *at, const char *keyword);
bool gr_alts_apart(schema *s, const alts *a, const alts *b, const dom *at);
void gr_alt_add(schema *s, alts *a, bundle *b, const dom *at, const char *keyword);
bundle *gr_bundle_any(schema *s, uint8_t types);
alts *gr_bundle_not(schema *s, const bundle *b, const dom *at, const char *keyword);
bundle *gr_with_member(schema *s, gr_text name, term *value, bool required);
object *gr_object_any(schema *s);
object *gr_object_and(schema *s, object *a, object *b, const dom *at);
array *gr_array_any(schema *s);
array *gr_array_and(schema *s, array *a, array *b, const dom *at);
member *gr_member_find(const object *o, gr_text name);
term *gr_member_term(schema *s, const object *o, gr_text name);
gr_dfa *gr_dfa_and(schema *s, gr_dfa *a, gr_dfa *b); /* NULL: everything */

/* ---- as JSON ---- */

uint32_t gr_rule_of(schema *s, term *t); /* its rule, lowered later */
void gr_lower_queue(schema *s);          /* lowers what was asked for */
/* One alternative, up to s->ret. */
uint32_t gr_lower_bundle(schema *s, const bundle *b, const dom *at);
uint32_t gr_lower_number(schema *s, const bundle *b);

/* ---- objects and arrays in either notation ---- */

/* The same object as alternatives where each want is met by its own member that is not declared, or
 * by a declared one that then has to be there. */
object **gr_object_settle(schema *s, const object *o, uint32_t *count, const dom *at);
typedef struct gr_shape {
    uint32_t count;              /* members, wants behind them */
    uint32_t *rules;             /* [count] of their values */
    const bool *required;        /* [count] */
    uint32_t min, max;           /* members */
    const uint32_t *extra_rules; /* [extra_count] of the values of those that are not declared */
    uint32_t extra_count;
    bool ordered;
} gr_shape;
/* Fills in the object `index` of the graph; its nodes name it already. */
void gr_object_fill(gr_compile *c, uint32_t index, const gr_shape *shape);
/* A rule of its own for what begins at `start`, with the frame's memory; the node that calls it. */
uint32_t gr_framed(gr_compile *c, uint32_t start, uint32_t words, uint32_t next);

static inline uint32_t gr_least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static inline uint32_t gr_most(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}
