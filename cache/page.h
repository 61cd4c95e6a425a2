/* kv_pool: the pages of KV as bookkeeping: who holds which, how far each is filled, who may append.
 * Never a device call.
 *
 * A page is 128 positions of one token sequence (KV_PAGE_TOKENS). Rows below `filled` never change
 * while anyone holds a reference; at most one sequence holds a page's append right and writes at
 * `filled`. A page with no reference is free. Thread: engine. Fails: only create and alloc.
 * Invariants are checked by kv_pool_check. */
#pragma once
#include "engine/base/err.h"

#define KV_PAGE_TOKENS 128
#define KV_PAGE_NONE UINT32_MAX

typedef enum kv_plane_type {
    KV_PLANE_K,
    KV_PLANE_V,
    KV_PLANE_INDEX,
    KV_PLANE_DRAFT_K,
    KV_PLANE_DRAFT_V
} kv_plane_type;

typedef struct kv_plane {
    kv_plane_type type;
    uint16_t layer, head;
    uint32_t row_bytes; /* of one position */
} kv_plane;

/* What a page record holds: its planes in record order, each KV_PAGE_TOKENS rows. cache/ knows
 * planes as sizes only. */
typedef struct kv_layout {
    const kv_plane *planes; /* borrowed, lives as long as the engine */
    uint32_t plane_count;
    uint64_t record_bytes; /* sum of row_bytes * KV_PAGE_TOKENS */
    char id[33];           /* hex digest over the planes; part of every stored page's key */
} kv_layout;

/* Fills record_bytes and id from planes; no plane, an empty row or an overflow is BASE_INVALID. */
base_code kv_layout_init(kv_layout *layout, const kv_plane *planes, uint32_t plane_count,
                         base_err *err);

typedef struct kv_pool kv_pool;

base_code kv_pool_create(kv_pool **out, uint32_t page_count, base_err *err);
void kv_pool_destroy(kv_pool *pool); /* NULL is fine */
uint32_t kv_pool_free_count(const kv_pool *pool);
uint32_t kv_pool_page_count(const kv_pool *pool);

/* A page with one reference, filled 0, its append right held by `owner` (a sequence number, not 0).
 * KV_PAGE_NONE if none is free (evict, then try again). */
uint32_t kv_pool_alloc(kv_pool *pool, uint64_t owner);
void kv_pool_ref(kv_pool *pool, uint32_t page);
void kv_pool_ref_all(kv_pool *pool, const uint32_t *pages, uint32_t count);
/* Fetches the page's count, and those of its neighbours, for a kv_pool_ref to come. */
void kv_pool_prefetch(const kv_pool *pool, uint32_t page);
void kv_pool_unref(kv_pool *pool, uint32_t page); /* the last one frees it */
uint32_t kv_pool_refs(const kv_pool *pool, uint32_t page);
uint32_t kv_pool_filled(const kv_pool *pool, uint32_t page);
/* The owner of the append right raises filled; KV_PAGE_TOKENS at most. Speculative rows are not
 * counted until accepted. */
void kv_pool_set_filled(kv_pool *pool, uint32_t page, uint64_t owner, uint32_t filled);
/* Takes the append right if nobody has it and the page is filled exactly to `filled` (<
 * KV_PAGE_TOKENS). */
bool kv_pool_claim(kv_pool *pool, uint32_t page, uint64_t owner, uint32_t filled);
void kv_pool_release(kv_pool *pool, uint32_t page,
                     uint64_t owner); /* gives the append right up; no-op if not held */
/* False and a text if an invariant is broken. */
bool kv_pool_check(const kv_pool *pool, base_err *err);
