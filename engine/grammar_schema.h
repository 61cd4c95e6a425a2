/* What reading a schema (grammar_schema.c) and writing its graph share: as JSON (grammar_lower.c)
 * and as the arguments of a call (grammar_calls.c). */
#pragma once
#include "engine/base/json.h"
#include "engine/grammar_internal.h"

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
    gr_dfa *barred; /* texts that strings are held to beside their schema; NULL: all */
} schema;

/* Reads the text; its terms are lowered by whoever began it. */
schema *gr_schema_begin(gr_compile *c, const char *text, size_t length);
/* Refuses: the text names keyword and place. */
_Noreturn void gr_wrong(schema *s, base_code code, const dom *node, const char *keyword,
                        const char *fmt, ...) __attribute__((format(printf, 5, 6)));
bool gr_same(gr_text a, gr_text b);
dom *gr_get(const dom *node, const char *key); /* a member, NULL if there is none */
dom *gr_resolve(schema *s, const dom *at, const dom *ref);
term *gr_term_lit(schema *s, dom *node, uint8_t kind);
term *gr_term_and(schema *s, term *a, term *b);
alts *gr_term_open(schema *s, term *t, uint32_t depth);
alts *gr_alts_new(schema *s, uint32_t capacity);
object *gr_object_any(schema *s);
array *gr_array_any(schema *s);
gr_dfa *gr_dfa_and(schema *s, gr_dfa *a, gr_dfa *b); /* NULL: everything */
/* Whole matches of a pattern, kept for the next time. */
gr_dfa *gr_pattern(schema *s, gr_dfa **kept, const char *text);

/* ---- as JSON ---- */

uint32_t gr_rule_of(schema *s, term *t); /* its rule, lowered later */
void gr_lower_queue(schema *s);          /* lowers what was asked for */
/* One alternative, up to s->ret. */
uint32_t gr_lower_bundle(schema *s, const bundle *b, const dom *at);
uint32_t gr_lower_number(schema *s, const bundle *b);

static inline uint32_t gr_least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static inline uint32_t gr_most(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}
