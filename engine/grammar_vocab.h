/* A vocabulary as masks are made from it.
 *
 * A token belongs to the first class that holds all its bytes. Those of TEXT and the classes within
 * it are allowed all at once where a state reads the class and stays. A token of REST is cut behind
 * its first characters of text: a state that stays on those cares for the tail alone, and equal
 * tails are followed once. */
#pragma once
#include <pthread.h>

#include "engine/grammar_internal.h"

/* Longer tokens are never allowed: none of a real vocabulary is. */
#define GR_TOKEN_BYTES_MAX 256
#define GR_SUMMED 16u

typedef struct gr_trie_node {
    uint8_t byte;
    uint16_t depth; /* of this byte, from 0 */
    uint32_t end;   /* the node after this one's subtree */
    int32_t token;  /* that ends here, -1 if none; others with the same bytes follow in `same` */
} gr_trie_node;

typedef struct gr_trie {
    gr_trie_node *nodes;
    uint32_t count;
} gr_trie;

typedef struct gr_token_class {
    gr_trie trie;
    int32_t *ids; /* by characters, fewest first */
    uint16_t *chars;
    uint32_t count;
    uint32_t *mask;                 /* of all ids */
    uint32_t *upto[GR_SUMMED];      /* of those with at most 1 + index characters */
    uint32_t upto_count[GR_SUMMED]; /* how many those are */
} gr_token_class;

/* Tokens of REST whose first characters, at least one, are of one class. */
typedef struct gr_token_rest {
    gr_trie trie;      /* whole */
    gr_trie tails;     /* what follows those characters */
    gr_trie *tails_of; /* [chars_max] of those with 1 + index such characters */
    uint32_t chars_max;
} gr_token_rest;

enum { GR_SAME_TOKEN, GR_SAME_TAIL, GR_SAME_COUNTED, GR_SAMES };

/* Runs that have ended, whose memory the next ones take over: fresh memory costs a fault a page. */
typedef struct gr_spares {
    pthread_mutex_t lock;
    struct eng_grammar_run *first;
    uint32_t count;
} gr_spares;

struct eng_vocab {
    uint32_t count, words;
    gr_spares *spares;
    uint32_t chars_max;      /* bytes of the longest token, which no count of characters exceeds */
    int32_t *same[GR_SAMES]; /* [count] another token with the same bytes or tail, -1 if none */
    gr_token_class classes[GR_CLASSES]; /* REST: those that begin with no text; no ids of marks */
    gr_token_rest rests[GR_CLASS_REST];
};
