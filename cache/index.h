/* kv_index: the longest cached prefix of a token sequence.
 *
 * A radix tree per namespace (weights fingerprint, numerics, tenant salt or sharing group: an
 * opaque 64-bit number from the caller), keyed by tokens and compared by memory, not hashed. An
 * edge holds its tokens and the pages under them; pages may be shared by edges that split inside a
 * page. References: the tree holds exactly one on a page for each edge that lists it (one page, two
 * edges: two references). Sequences hold their own, so nothing a sequence uses can be evicted under
 * it: a page whose references are more than the tree's is in use. Pages: a row that two edges'
 * pages hold (an edge that begins inside a page lists a page for that slot, too) is answered with
 * the deeper edge's page, which holds the slot's earlier rows as well. Thread: engine. Times are
 * any unit that never falls. Limits: node_max nodes, byte bound by the pool. Fails: only create. */
#pragma once
#include "cache/page.h"

typedef struct kv_index kv_index;

typedef struct kv_match {
    uint32_t tokens;     /* matched, exact to the token */
    uint32_t page_count; /* pages that cover them: ceil(tokens / KV_PAGE_TOKENS) */
} kv_match;

/* Where a path stood when it was last matched or listed, for whoever goes on with the same text:
 * the search begins there and compares what follows only. Zeros: none. The holder vouches that the
 * first `tokens` tokens are those of then; all else is looked at before a hint is used (the node
 * and its edge are what they were, in this namespace; the path's first and last page hold these
 * tokens), and one that does not hold is the same as none. It takes no reference; it may be
 * kept for as long as one likes, and `tokens` lowered by who has cut the text. */
typedef struct kv_hint {
    uint64_t stamp;
    uint32_t node, tokens;
} kv_hint;

/* `pool` is borrowed and outlives the index. Three nodes a page (and one a namespace) are never
 * reached without an eviction in between; far fewer serve long sequences. */
base_code kv_index_create(kv_index **out, kv_pool *pool, uint32_t node_max, base_err *err);
void kv_index_destroy(kv_index *index); /* gives its references back; NULL is fine */

/* Writes the pages that cover the longest cached prefix of tokens[0..count) in `space`, takes a
 * reference on each for the caller and marks the path used at time `now`. `pages` has room for
 * ceil(count / KV_PAGE_TOKENS). */
kv_match kv_index_match(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count,
                        uint32_t *pages, uint64_t now);
/* As match, beginning at `hint`, which is then where the match ended. */
kv_match kv_index_match_from(kv_index *index, uint64_t space, kv_hint *hint, const int32_t *tokens,
                             uint32_t count, uint32_t *pages, uint64_t now);
/* As match, but takes no reference, marks nothing and writes no page: for admission estimates. */
uint32_t kv_index_peek(const kv_index *index, uint64_t space, const int32_t *tokens,
                       uint32_t count);
/* Lists tokens[0..count) with their pages (page i covers tokens 128i …; the last one may be partly
 * filled). What is known already keeps its old pages. Takes its own references. False if node_max
 * is reached (nothing new is listed then). Every row must be written: listing one at or past the
 * page's `filled` stops the process, and so does a page whose rows are listed already with other
 * tokens. */
bool kv_index_insert(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count,
                     const uint32_t *pages, uint64_t now);
/* As insert, beginning at `hint`, which is then where the listed path ends. */
bool kv_index_insert_from(kv_index *index, uint64_t space, kv_hint *hint, const int32_t *tokens,
                          uint32_t count, const uint32_t *pages, uint64_t now);
/* Drops the least valuable leaves (used longest ago; a pin counts as a use at its end) until the
 * pool has `free_pages` free or nothing can go. A leaf goes page by page from its end. What a
 * sequence references and what an unexpired pin covers stays. Returns pages freed. */
uint32_t kv_index_evict(kv_index *index, uint32_t free_pages, uint64_t now);
/* Drops a whole namespace, or all of them with space 0. Returns pages dropped. */
uint32_t kv_index_drop(kv_index *index, uint64_t space);
/* Drops the rows at and past `kept` on the path of tokens[0..count) with all that follows its end;
 * branches that leave the path earlier stay, and so does what sequences use, unlisted. `kept`: what
 * living sessions share. Needs a free node to cut inside an edge; without one the edge goes whole.
 * Returns pages dropped. */
uint32_t kv_index_erase(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count,
                        uint32_t kept);
/* A pin keeps a path from eviction until `until`; the longest wins, and 0 ends them all. Covers the
 * matched prefix of the tokens given (and, on an edge pinned before, as much as the longer of the
 * two pins). */
void kv_index_pin(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count,
                  uint64_t until);

/* ---- who goes first ---- */

typedef enum kv_policy {
    KV_POLICY_LRU,   /* what was used longest ago */
    KV_POLICY_VALUE, /* what is least likely to be wanted soon, by what pauses of its class have
                        been like */
} kv_policy;

/* `second`: of `now`, in its unit. KV_POLICY_VALUE allocates nothing and learns from then on; its
 * statistics are kept when the policy changes. A new index has KV_POLICY_LRU. */
void kv_index_set_policy(kv_index *index, kv_policy policy, uint64_t second);
/* A turn has ended: tokens[0..count) is listed, and whoever made it pauses. `class_key` says what
 * it waits for (a hash of tenant and tool name, 0: unknown, KV_CLASS_OVER); the pause ends when a
 * match covers the path again. Under any policy this only learns. */
#define KV_CLASS_OVER                                                                              \
    UINT64_MAX /* for nothing: it said that it is done. KV_POLICY_VALUE takes it at its word */
void kv_index_note_pause(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count,
                         uint64_t class_key, uint64_t now);
void kv_index_note_pause_from(kv_index *index, uint64_t space, const kv_hint *hint,
                              const int32_t *tokens, uint32_t count, uint64_t class_key,
                              uint64_t now);
/* How dear a token is to compute again at a position, against one at position 0: 1 + position /
 * `doubling`. 0: alike (what a bounded attention window makes of it). */
void kv_index_set_cost(kv_index *index, uint32_t doubling);

typedef struct kv_index_stats {
    uint32_t nodes;  /* roots of namespaces among them */
    uint32_t pages;  /* distinct pages listed */
    uint64_t tokens; /* distinct prefixes' tokens on edges */
    uint64_t evicted_pages;
} kv_index_stats;
kv_index_stats kv_index_get_stats(const kv_index *index);
bool kv_index_check(const kv_index *index, base_err *err);

/* An edge, as an operator may see it. Ids are of this moment. */
typedef struct kv_edge {
    uint32_t id, parent; /* parent UINT32_MAX: it begins at the first token */
    uint64_t space;
    uint32_t start, tokens; /* before it; on it */
    uint32_t pages, children;
    bool in_use, pinned; /* a sequence holds its first page; a pin covers some of it at `now` */
    uint64_t used;       /* when */
} kv_edge;
/* At most `max` edges, those nearest to the first token first; returns how many. Looks at each
 * child of what it lists. */
uint32_t kv_index_list(const kv_index *index, kv_edge *out, uint32_t max, uint64_t now);
