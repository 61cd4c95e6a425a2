/* What the grammar compilers and the automaton share: the graph, and sets of strings as automata
 * over code points.
 *
 * Compiling fails through gr_compile.err: every function returns GR_NONE or NULL then, and the
 * callers only have to stop. Memory of a compilation is one arena. */
#pragma once
#include <setjmp.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/grammar.h"

#define GR_NONE 0u /* node 0: nothing matches */
#define GR_INFINITE UINT32_MAX

/* ---- the graph ---- */

typedef enum gr_kind {
    GR_DEAD,
    GR_BYTES,  /* a: first edge, b: edges, c: 1 + the length guard whose characters it begins */
    GR_BLANK,  /* GR_BYTES with the one edge of the blank that a GR_SPACE may have */
    GR_SPACE,  /* a: its GR_BLANK, c: next; a blank or none, all through the text as at first */
    GR_FORK,   /* a: first target, b: targets */
    GR_CALL,   /* a: rule, b: node after it */
    GR_RETURN, /* on with the frame's node */
    GR_ACCEPT,
    GR_KEY,        /* a: object, b: member, c: next */
    GR_EXTRA,      /* a: object, c: next; a member that is not declared */
    GR_MORE,       /* a: object, c: next; another member can follow */
    GR_OBJECT_END, /* a: object, c: next */
    GR_ITEM,       /* a: array, b: at this index, or past the prefix; c: next; rest in gr_item */
    GR_MORE_ITEMS, /* a: array, c: next */
    GR_ARRAY_END,  /* a: array, c: next */
    GR_CHAR,       /* a: length guard, c: next; one character more */
    GR_STRING_END, /* a: length guard, c: next */
} gr_kind;

typedef struct gr_node {
    uint8_t kind;
    uint8_t loops;   /* GR_BYTES: vocabulary classes whose bytes lead back here; GR_UNIFORM */
    uint16_t runs;   /* GR_BYTES: 1 + how many characters of each class may follow, 0: no bound */
    uint16_t height; /* least frames above its own until its rule returns */
    uint32_t a, b, c;
} gr_node;

/* A state from which any `limit` characters of a class can be read, and never one more. */
typedef struct gr_runs {
    uint16_t limit[8];
} gr_runs;

typedef struct gr_edge {
    uint8_t lo, hi;
    uint32_t to;
} gr_edge;

typedef struct gr_rule {
    uint32_t start;
    uint32_t words;  /* 64-bit words of memory in its frame */
    uint32_t height; /* least frames to finish it, GR_INFINITE if it never can be */
} gr_rule;

typedef struct gr_object {
    uint32_t members, min, max;
    uint32_t words;    /* of a bit set of members, one bit more for "extras began" */
    uint32_t required; /* first word in `bits` */
    uint32_t rules;    /* first of `members` in `lists`: each value's rule */
    uint32_t extra_rules, extra_count; /* in `lists`: of members that are not declared */
    uint32_t extra_height;             /* the least of theirs, GR_INFINITE if none can be written */
    bool ordered, counted;
} gr_object;

#define GR_WANTS_MAX 4u

typedef struct gr_array {
    uint32_t min, max, prefix;
    uint32_t saturate;          /* counts beyond are kept as this */
    uint32_t items, item_count; /* the ways to write one, in `items` */
    uint32_t want_count;        /* the frame's first words count what matches each */
    struct {
        uint32_t min, max;
    } want[GR_WANTS_MAX];
} gr_array;

/* One way to write an item: GR_ITEM's b. */
typedef struct gr_item {
    uint32_t index;   /* the place, or GR_INFINITE: any at or past the prefix */
    uint32_t value;   /* uniqueItems: which of the values, else GR_INFINITE */
    uint32_t rule;    /* of the value */
    uint32_t matches; /* a bit for each want of the array that it counts for */
} gr_item;

typedef struct gr_length {
    uint32_t min, max; /* characters */
} gr_length;

#define GR_VECTOR(type)                                                                            \
    struct {                                                                                       \
        type *data;                                                                                \
        uint32_t count, capacity;                                                                  \
    }

struct eng_grammar {
    uint32_t refs; /* atomic */
    uint32_t root; /* a rule */
    uint32_t depth_max, nodes_max;
    GR_VECTOR(gr_node) nodes;
    GR_VECTOR(gr_edge) edges;
    GR_VECTOR(uint32_t) lists; /* targets of forks, rules of members */
    GR_VECTOR(gr_rule) rules;
    GR_VECTOR(gr_object) objects;
    GR_VECTOR(gr_array) arrays;
    GR_VECTOR(gr_item) items;
    GR_VECTOR(gr_length) lengths;
    GR_VECTOR(gr_runs) runs;
    GR_VECTOR(uint64_t) bits;
};

/* ---- compiling ---- */

typedef struct gr_compile {
    eng_grammar *g;
    base_arena *arena;
    eng_grammar_options options;
    uint32_t work;        /* left */
    const struct dom *at; /* the schema that is read or written, for errors; NULL: none */
    base_err *err;
    jmp_buf fail; /* a limit, memory or a refusal: straight out to the entry point */
} gr_compile;

typedef struct gr_dfa gr_dfa;

/* Runs `body` with a fresh compilation; its rule becomes the root. */
typedef uint32_t gr_body(gr_compile *c, void *context);
base_code gr_compile_run(eng_grammar **out, gr_body *body, void *context,
                         const eng_grammar_options *options, base_err *err);
/* `param` NULL: the place that is compiled, which the text then names, too. */
_Noreturn void gr_fail(gr_compile *c, base_code code, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* The JSON pointer of a place in a schema, or of its member `keyword`. */
#define GR_POINTER_SIZE 160
void gr_pointer(const struct dom *node, const char *keyword, char out[GR_POINTER_SIZE]);
void *gr_alloc(gr_compile *c, size_t count, size_t size); /* zeroed, in the arena */
void gr_work(gr_compile *c, size_t steps);

#define gr_push(c, vector)                                                                         \
    (gr_grow((c), (void **)&(vector)->data, &(vector)->count, &(vector)->capacity,                 \
             sizeof *(vector)->data),                                                              \
     &(vector)->data[(vector)->count - 1])
void gr_grow(gr_compile *c, void **data, uint32_t *count, uint32_t *capacity, size_t size);

uint32_t gr_node_add(gr_compile *c, gr_kind kind, uint32_t a, uint32_t b, uint32_t next);
uint32_t gr_bytes_add(gr_compile *c, const gr_edge *edges, uint32_t count);
void gr_bytes_set(gr_compile *c, uint32_t node, const gr_edge *edges, uint32_t count);
uint32_t gr_fork_add(gr_compile *c, const uint32_t *targets, uint32_t count);
void gr_fork_set(gr_compile *c, uint32_t node, const uint32_t *targets, uint32_t count);
uint32_t gr_literal(gr_compile *c, const char *bytes, size_t length, uint32_t next);
uint32_t gr_rule_add(gr_compile *c);
static inline uint32_t gr_rule_height(const eng_grammar *g, uint32_t rule)
{
    return g->rules.data[rule].height;
}
/* Least frames of an item at a place that counts for all `matches` and for none of `avoid`. */
uint32_t gr_place_height(const eng_grammar *g, const gr_array *array, uint32_t place,
                         uint32_t matches, uint32_t avoid);
/* Least frames of every rule and behind every node; drops ways that never end. */
void gr_heights(gr_compile *c);

/* ---- sets of strings ---- */

typedef struct gr_range {
    uint32_t lo, hi, to;
} gr_range;

/* Deterministic, over code points; state 0 is the start; every state reaches an accepting one, so
 * no state means the empty set. */
struct gr_dfa {
    uint32_t count;
    uint32_t *first; /* [count + 1] in ranges, sorted and apart */
    gr_range *ranges;
    bool *accept;
};

typedef enum gr_op {
    GR_AND,
    GR_OR,
    GR_MINUS,
} gr_op;

typedef struct gr_text {
    const char *data;
    size_t length;
} gr_text;

/* Texts that contain a match, or (`whole`) match. A refusal names `keyword`, and `param`. */
gr_dfa *gr_dfa_regex(gr_compile *c, const char *text, size_t length, bool whole,
                     const char *keyword, const char *param);
gr_dfa *gr_dfa_op(gr_compile *c, const gr_dfa *a, const gr_dfa *b, gr_op op);
gr_dfa *gr_dfa_all(gr_compile *c);
gr_dfa *gr_dfa_texts(gr_compile *c, const gr_text *texts, size_t count);
gr_dfa *gr_dfa_length(gr_compile *c, uint32_t min, uint32_t max);
bool gr_dfa_has(const gr_dfa *dfa, const char *text, size_t length);
/* A set given by a walk: `step` returns the next key or UINT64_MAX, for each of `alphabet`. */
typedef struct gr_walk {
    uint64_t (*step)(const void *context, uint64_t key, char ch);
    bool (*accept)(const void *context, uint64_t key);
    const void *context;
    const char *alphabet; /* ascending */
} gr_walk;
gr_dfa *gr_dfa_walk(gr_compile *c, const gr_walk *walk, uint64_t start);
/* Nodes that read a member of the set as UTF-8, or as the inside of a JSON string (what must be
 * escaped is escaped, in its short form or as \u00xx), then go on at `next`. */
uint32_t gr_dfa_lower(gr_compile *c, const gr_dfa *dfa, bool json, uint32_t next);

/* As UTF-8, while a length guard of the rule's frame counts the characters. All states accept. */
uint32_t gr_dfa_lower_counted(gr_compile *c, const gr_dfa *dfa, uint32_t guard, uint32_t next);

/* The rule of a source: what the compilers of grammar.h compile by themselves. */
uint32_t gr_schema_rule(gr_compile *c, gr_text text);
uint32_t gr_gbnf_rule(gr_compile *c, gr_text text);
uint32_t gr_set_rule(gr_compile *c, const gr_dfa *dfa);

/* Makes `node` read one character as a JSON string may spell it, to `to`. */
void gr_string_char(gr_compile *c, uint32_t node, uint32_t to, uint32_t quote_to);

/* Classes of the vocabulary: a token belongs to the first that holds all its bytes. */
enum {
    GR_CLASS_LOWER, /* a-z */
    GR_CLASS_DIGIT,
    GR_CLASS_WORD,  /* letters and digits */
    GR_CLASS_NAME,  /* and _ - . / : */
    GR_CLASS_ASCII, /* printable, without " and \ */
    GR_CLASS_TEXT,  /* whole characters without " \ and controls; the last may be cut */
    GR_CLASS_REST,  /* any bytes but marks */
    GR_CLASS_MARK,  /* GR_MARK_FIRST and above, which no text holds */
    GR_CLASSES,
};
#define GR_MARK_FIRST 0xFD
#define GR_CLASS_ALL_TEXT ((1u << GR_CLASS_REST) - 1)
#define GR_UNIFORM                                                                                 \
    0x80 /* in gr_node.loops: the state after some characters is known by their count */
bool gr_class_has(uint32_t class_index, uint8_t byte); /* not for TEXT and above */
