/* The index's nodes, for index.c, evict.c and their tests. */
#pragma once
#include "cache/index.h"

#define KV_NODE_NONE UINT32_MAX
#define KV_RUN_SPANS 7

/* Pages that were handed out in a row, whose tokens therefore lie in a row. */
typedef struct kv_span {
    uint32_t page, count;
} kv_span;

/* A cache line of an edge's pages; edges are lists of them. Only an edge's last run holds less
 * than it could behind where its pages begin. */
typedef struct kv_run {
    uint32_t next;
    uint32_t used : 3;  /* spans */
    uint32_t prev : 29; /* of an edge's first run: anything */
    kv_span spans[KV_RUN_SPANS];
} kv_run;

#define KV_RUNS_MAX (1u << 29)

_Static_assert(sizeof(kv_run) == 64, "a cache line");
_Static_assert(KV_RUN_SPANS < 1 << 3, "`used` counts all of them");

typedef struct kv_node {
    uint32_t parent; /* KV_NODE_NONE: the root of a namespace, whose edge is empty */
    uint32_t child;  /* any one of them */
    uint32_t next;   /* sibling; of roots: another root; of a free node: the next free one */
    uint32_t prev;
    uint32_t hash_next;
    uint32_t heap_at;    /* KV_NODE_NONE unless it is a leaf that eviction may look at */
    uint32_t aside_next; /* of leaves that one call of evict has passed over */
    int32_t first;       /* token */
    uint32_t from;       /* tokens before the edge */
    uint32_t length;     /* tokens on the edge */
    uint32_t run_first, run_last;
    uint32_t run_start; /* which span of run_first is the edge's first one */
    uint32_t page_count;
    uint32_t pin_tokens; /* how many of the edge's tokens the pin covers */
    uint64_t pin_until;
    uint64_t used;       /* last time any of the edge was matched or inserted */
    uint64_t used_whole; /* last time all of it was: what the rest of a split edge goes by */
    union {
        uint64_t space; /* of roots */
        uint64_t stamp; /* of others: no two nodes ever had the same, and one that loses tokens
                           takes another; 0: a free node */
    };
    uint64_t paused;     /* since when; 0: no pause is open */
    uint64_t pause_mark; /* hash of the last whole page before the pause; 0: there is none */
    uint16_t pause_class;
} kv_node;

/* A leaf's place in the order of eviction. The rank stands beside the number, so that finding the
 * next leaf reads the heap alone and no nodes. */
typedef struct kv_heap_entry {
    uint64_t rank;
    uint32_t at;
} kv_heap_entry;

#define KV_CLASSES 256 /* 0: unknown; the next three are evict.c's own; the others by class_key */
#define KV_AGES 44     /* KV_AGE_FIRST_S * 2^(i / 2) and on: the last begins after 8 days */
#define KV_AGE_FIRST_S 0.25

/* What pauses of one class have been like, by age when they ended or were last seen. */
typedef struct kv_pause_class {
    uint64_t key;
    float returned[KV_AGES], ended[KV_AGES]; /* those that returned; all */
    float open[KV_AGES];                     /* going on now; as of the last rebuild */
    float value[KV_AGES];                    /* returns a second, at best: see evict.c */
} kv_pause_class;

#define KV_GHOSTS 4096 /* pauses whose pages have gone: their ends are still learned from */

typedef struct kv_ghost {
    uint64_t mark, paused; /* mark 0: free */
    uint16_t pause_class;
} kv_ghost;

struct kv_index {
    kv_pool *pool;
    uint32_t page_count, node_max, run_max;
    kv_node *nodes;
    uint32_t node_free, node_free_count;
    kv_run *runs;
    uint32_t run_free, run_free_count;
    uint32_t *buckets; /* children by (parent, first token), roots by space */
    uint32_t bucket_mask;
    uint32_t roots;
    int32_t *tokens;     /* [page_count][KV_PAGE_TOKENS]: what the rows of each listed page hold */
    uint8_t *known;      /* how many of those rows are filled in */
    uint32_t *page_refs; /* nodes that list the page */
    kv_heap_entry *heap; /* of evictable leaves, least valuable first */
    uint32_t heap_count;
    kv_policy policy;
    uint64_t second, rebuild_at; /* of `now`; when ranks are next computed anew */
    uint32_t cost_doubling;
    kv_pause_class *classes; /* [KV_CLASSES] */
    kv_ghost *ghosts;        /* [KV_GHOSTS], by mark */
    uint32_t ghost_count;
    uint64_t clock;  /* the latest `now` */
    uint64_t stamps; /* handed out so far */
    kv_index_stats stats;
};

/* Drops the last page of a leaf from its edge, and the leaf itself once it is empty; returns
 * whether the leaf is gone. `*freed` counts pages that went back to the pool. */
bool kv_index__trim(kv_index *index, uint32_t at, uint32_t *freed);
uint32_t kv_index__last_page(const kv_index *index, const kv_node *node);

/* evict.c: the order in which leaves go. A leaf is put in when it becomes one, taken out when it
 * stops being one, moved when anything that its rank depends on has changed. */
uint64_t kv_index__rank(const kv_index *index, const kv_node *node);
/* A pause on a node: begins, ends by a return, passes on to the parent of a leaf that goes; what a
 * branch leaves behind. */
void kv_index__pause(kv_index *index, uint32_t at, uint64_t mark, uint64_t class_key, uint64_t now);
uint64_t kv_index__mark(uint64_t space, uint32_t slot, const int32_t *tokens);
/* Tokens [from, count) of a path are listed anew at a leaf: pauses among them whose pages had gone
 * have ended. */
void kv_index__came_back(kv_index *index, uint32_t at, uint64_t space, const int32_t *tokens,
                         uint32_t from, uint32_t count, uint64_t now);
void kv_index__returned(kv_index *index, uint32_t at, uint64_t now);
void kv_index__orphan(kv_index *index, uint32_t at, uint32_t parent);
void kv_index__left_behind(kv_index *index, uint32_t at, uint32_t front, uint64_t now);
void kv_index__heap_put(kv_index *index, uint32_t at);
void kv_index__heap_take(kv_index *index, uint32_t at);
void kv_index__heap_move(kv_index *index, uint32_t at);
