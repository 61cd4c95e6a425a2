/* kv_index: the longest cached prefix of a token sequence.
 *
 * A radix tree per namespace (weights fingerprint, numerics, tenant salt or sharing group: an opaque 64-bit number from the
 * caller), keyed by tokens and compared by memory, not hashed. An edge holds its tokens and the pages under them; pages may
 * be shared by edges that split inside a page. The tree holds one reference on each page it lists. Sequences hold their own
 * references, so nothing a sequence uses can be evicted under it.
 * Thread: engine. Limits: node_max nodes, byte bound by the pool. Fails: only create. */
#pragma once
#include "cache/page.h"

typedef struct kv_index kv_index;

typedef struct kv_match {
    uint32_t tokens;     /* matched, exact to the token */
    uint32_t page_count; /* pages that cover them: ceil(tokens / KV_PAGE_TOKENS) */
} kv_match;

base_code kv_index_create(kv_index **out, kv_pool *pool, uint32_t node_max, base_err *err);
void kv_index_destroy(kv_index *index); /* NULL is fine */

/* Writes the pages that cover the longest cached prefix of tokens[0..count) in `space`, takes a reference on each for the
 * caller and marks the path used at time `now`. `pages` has room for ceil(count / KV_PAGE_TOKENS). */
kv_match kv_index_match(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count, uint32_t *pages,
                        uint64_t now);
/* As match, but takes no reference, marks nothing and writes no page: for admission estimates. */
uint32_t kv_index_peek(const kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count);
/* Lists tokens[0..count) with their pages (page i covers tokens 128i …; the last one may be partly filled). What is known
 * already keeps its old pages. Takes its own references. False if node_max is reached (nothing is listed then beyond what fit). */
bool kv_index_insert(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count, const uint32_t *pages,
                     uint64_t now);
/* Drops least valuable leaves (see kv_index_set_policy) until the pool has `free_pages` free or nothing can go.
 * Pages that a sequence references are not counted as freed. Returns pages freed. */
uint32_t kv_index_evict(kv_index *index, uint32_t free_pages, uint64_t now);
/* Drops a whole namespace, or all of them with space 0. Returns pages dropped. */
uint32_t kv_index_drop(kv_index *index, uint64_t space);
/* A pin keeps a path from eviction until `until`; the longest wins. Covers the matched prefix of the tokens given. */
void kv_index_pin(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count, uint64_t until);

typedef struct kv_index_stats {
    uint32_t nodes;
    uint32_t pages;       /* distinct pages listed */
    uint64_t tokens;      /* distinct prefixes' tokens on edges */
    uint64_t evicted_pages;
} kv_index_stats;
kv_index_stats kv_index_get_stats(const kv_index *index);
bool kv_index_check(const kv_index *index, base_err *err);
