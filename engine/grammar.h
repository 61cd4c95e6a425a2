/* eng_grammar: what a model may write next, byte by byte and token by token.
 *
 * A grammar is a compact graph: states with byte-range edges, calls of rules, and a few guarded
 * steps (object member, array item, string length) that work on the caller's frame. It is compiled
 * from a JSON Schema (grammar_schema.c), GBNF, a regular expression or a list of choices, never
 * changes afterwards, and may be shared by threads through ref/unref.
 *
 * A run is the memory that following a grammar needs: stacks are frames that are stored once
 * however many alternatives share them, a configuration is a set of (state, stack), stored once
 * too; so a state of a sequence is one number, its clone is a copy, and steps and masks are cached
 * by that number. When a pool is half full, what no state reaches is swept. All memory is taken by
 * create, from a run of the same vocabulary that has ended if there is one; nothing is allocated
 * afterwards. Thread: a run and its states belong to one thread.
 *
 * Alternatives that cannot be finished are never entered: guards look ahead (a required member
 * still missing, the room that maxItems leaves, the depth that a value needs), so a mask is empty
 * only when the text is over or a bound of eng_grammar_limits was hit. */
#pragma once
#include "engine/base/err.h"
#include "engine/token.h"

typedef struct eng_grammar eng_grammar;
typedef struct eng_vocab eng_vocab;
typedef struct eng_grammar_run eng_grammar_run;

/* ---- compiling ---- */

typedef enum eng_grammar_space {
    ENG_GRAMMAR_SPACE_SINGLE,  /* one space after every ':' and ',', or after none */
    ENG_GRAMMAR_SPACE_COMPACT, /* none */
    ENG_GRAMMAR_SPACE_LOOSE,   /* wherever JSON allows it: at most a line feed and 24 blanks */
} eng_grammar_space;

/* Zero means the default in every field. */
typedef struct eng_grammar_limits {
    uint32_t nodes_max; /* states of the graph */
    uint32_t work_max;  /* steps of compiling, a bound on its time */
    size_t memory_max;  /* bytes while compiling; the graph's own come on top */
    uint32_t depth_max; /* frames of a stack, so the nesting of a document */
} eng_grammar_limits;

typedef struct eng_grammar_options {
    eng_grammar_limits limits;
    eng_grammar_space space;
    /* Members in any order. Otherwise declared members come in the schema's order, optional ones
     * may be left out, others follow: more is forced, so more is written without asking the
     * model. */
    bool any_order;
    /* Numbers as a validator reads them (1.0 is an integer, any count of digits). Otherwise an
     * integer is written without a fraction and no number exceeds what a double holds. */
    bool any_number;
    /* Formats are annotations. Otherwise those that can be are enforced, the other standard ones
     * refused. */
    bool any_format;
    uint32_t draft; /* of a schema without $schema: 0 means 2020; 4, 6, 7, 2019, 2020 */
} eng_grammar_options;

/* BASE_UNSUPPORTED: a keyword that cannot be enforced; the text names it and err->param is the JSON
 * pointer of its schema. BASE_INVALID: no schema, or one that admits nothing. BASE_TOO_LONG: a
 * limit. `options` may be NULL. */
base_code eng_grammar_schema(eng_grammar **out, const char *text, size_t length,
                             const eng_grammar_options *options, base_err *err);
/* llama.cpp's notation; the rule `root` is the start. */
base_code eng_grammar_gbnf(eng_grammar **out, const char *text, size_t length,
                           const eng_grammar_options *options, base_err *err);
/* The whole output matches. ECMAScript's notation without back references and look-around. */
base_code eng_grammar_regex(eng_grammar **out, const char *text, size_t length,
                            const eng_grammar_options *options, base_err *err);
/* One of the texts, exactly. */
base_code eng_grammar_choice(eng_grammar **out, const char *const *texts, const size_t *lengths,
                             size_t count, const eng_grammar_options *options, base_err *err);
/* Any JSON object. */
base_code eng_grammar_json_object(eng_grammar **out, const eng_grammar_options *options,
                                  base_err *err);
eng_grammar *eng_grammar_ref(eng_grammar *grammar);
void eng_grammar_unref(eng_grammar *grammar); /* NULL is fine */
size_t eng_grammar_bytes(const eng_grammar *grammar);
uint32_t eng_grammar_nodes(const eng_grammar *grammar);

/* ---- the vocabulary ---- */

/* The bytes of token `id`, borrowed until create returns; NULL for one that is never allowed. */
typedef const char *eng_vocab_bytes(const void *context, int32_t id, size_t *length);
base_code eng_vocab_create(eng_vocab **out, eng_vocab_bytes *bytes, const void *context,
                           uint32_t count, base_err *err);
/* All ordinary tokens of a tokenizer; built once, shared by all runs and threads. */
base_code eng_vocab_create_tok(eng_vocab **out, const eng_tok *tok, base_err *err);
void eng_vocab_destroy(eng_vocab *vocab);         /* NULL is fine */
uint32_t eng_vocab_words(const eng_vocab *vocab); /* 32-bit words of a mask */

/* ---- following ---- */

/* A sequence's place; initialised by start or clone, ended by eng_grammar_end. */
typedef struct eng_grammar_state {
    eng_grammar_run *run;
    uint32_t config;                        /* 0: nothing can follow, the text was refused */
    struct eng_grammar_state *next, **link; /* the run's list of live states */
} eng_grammar_state;

/* `vocab` is borrowed and may be NULL if no mask is asked for. */
base_code eng_grammar_run_create(eng_grammar_run **out, eng_grammar *grammar,
                                 const eng_vocab *vocab, base_err *err);
void eng_grammar_run_destroy(eng_grammar_run *run); /* after its states; NULL is fine */
void eng_grammar_start(eng_grammar_state *state, eng_grammar_run *run);
void eng_grammar_clone(eng_grammar_state *out, const eng_grammar_state *state);
void eng_grammar_end(eng_grammar_state *state);
/* False, and the state unchanged, if the bytes cannot follow here. */
bool eng_grammar_advance(eng_grammar_state *state, const char *bytes, size_t length);
bool eng_grammar_accepts(const eng_grammar_state *state); /* the end may come now */
/* The bytes that must come next, as far as there is one way on: at most `max`; returns how many.
 * None where the end is allowed too. The state stays where it is. */
size_t eng_grammar_forced(eng_grammar_state *state, char *out, size_t max);
/* A bit per id, 32 a word, low bit first; bits of ids in `end_tokens` follow accepts. Borrowed
 * until the next call with this run. Never NULL; all zero if nothing may follow. */
const uint32_t *eng_grammar_mask(eng_grammar_state *state, const int32_t *end_tokens,
                                 uint32_t end_token_count);
