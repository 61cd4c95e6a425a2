/* The pool: four flat arrays by page number and a free list through one of them.
 *
 * Invariants (kv_pool_check): a page is on the free list exactly if it has no reference; a free
 * page has no owner; no page is filled past KV_PAGE_TOKENS; the free count is the list's length.
 * References are counted, not named: who holds them is the index's and the sequences' own business.
 * The list is last in, first out: eviction frees a run from its end, so the next run is handed out
 * in ascending order, which keeps the tokens of neighbouring pages side by side in the index. */
#include "cache/page.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "cache/table.h"
#include "engine/base/thread.h"

_Static_assert(KV_PAGE_TOKENS <= UINT8_MAX, "filled is kept in a byte");

struct kv_pool {
    uint32_t page_count;
    uint32_t free_count;
    uint32_t free_head; /* KV_PAGE_NONE: none free */
    uint32_t *refs;
    uint32_t *next_free; /* valid while refs is 0 */
    uint64_t *owners;    /* of the append right; 0: nobody */
    uint8_t *filled;
};

/* A plane as it enters the digest: fixed little-endian fields, so that the id is the same on every
 * host. */
#define PLANE_KEY_BYTES 12

static void put_le(uint8_t *out, uint32_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        out[i] = (uint8_t)(value >> (8 * i));
}

base_code kv_layout_init(kv_layout *layout, const kv_plane *planes, uint32_t plane_count,
                         base_err *err)
{
    XXH3_state_t *state = NULL;
    uint64_t bytes = 0;
    uint8_t key[PLANE_KEY_BYTES] = {0};
    if (plane_count == 0)
        return base_fail(err, BASE_INVALID, "a page layout has no plane");
    for (uint32_t i = 0; i < plane_count; i++) {
        const kv_plane *plane = &planes[i];
        if ((unsigned)plane->type > KV_PLANE_DRAFT_V)
            return base_fail(err, BASE_INVALID, "plane %u has the unknown type %u", i,
                             (unsigned)plane->type);
        if (plane->row_bytes == 0)
            return base_fail(err, BASE_INVALID, "plane %u has rows of 0 bytes", i);
        if (__builtin_add_overflow(bytes, (uint64_t)plane->row_bytes * KV_PAGE_TOKENS, &bytes))
            return base_fail(err, BASE_INVALID, "the page record overflows at plane %u", i);
    }
    if ((state = XXH3_createState()) == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for a layout digest");
    XXH3_128bits_reset(state);
    put_le(key, KV_PAGE_TOKENS, 4);
    put_le(key + 4, plane_count, 4);
    XXH3_128bits_update(state, key, sizeof key);
    for (uint32_t i = 0; i < plane_count; i++) {
        put_le(key, (uint32_t)planes[i].type, 4);
        put_le(key + 4, planes[i].layer, 2);
        put_le(key + 6, planes[i].head, 2);
        put_le(key + 8, planes[i].row_bytes, 4);
        XXH3_128bits_update(state, key, sizeof key);
    }
    XXH128_canonical_t digest;
    XXH128_canonicalFromHash(&digest, XXH3_128bits_digest(state));
    XXH3_freeState(state);
    layout->planes = planes;
    layout->plane_count = plane_count;
    layout->record_bytes = bytes;
    for (size_t i = 0; i < sizeof digest.digest; i++) {
        layout->id[2 * i] = "0123456789abcdef"[digest.digest[i] >> 4];
        layout->id[2 * i + 1] = "0123456789abcdef"[digest.digest[i] & 15];
    }
    layout->id[2 * sizeof digest.digest] = '\0';
    return BASE_OK;
}

base_code kv_pool_create(kv_pool **out, uint32_t page_count, base_err *err)
{
    *out = NULL;
    if (page_count == 0 || page_count == KV_PAGE_NONE)
        return base_fail(err, BASE_INVALID, "a pool of %u pages is not possible", page_count);
    kv_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        goto nomem;
    pool->page_count = pool->free_count = page_count;
    pool->refs = kv__table(page_count, sizeof *pool->refs);
    pool->next_free = kv__table(page_count, sizeof *pool->next_free);
    pool->owners = kv__table(page_count, sizeof *pool->owners);
    pool->filled = kv__table(page_count, sizeof *pool->filled);
    if (pool->refs == NULL || pool->next_free == NULL || pool->owners == NULL ||
        pool->filled == NULL)
        goto nomem;
    for (uint32_t i = 0; i < page_count; i++) {
        pool->refs[i] = 0;
        pool->next_free[i] = i + 1;
        pool->owners[i] = 0;
        pool->filled[i] = 0;
    }
    pool->next_free[page_count - 1] = KV_PAGE_NONE;
    *out = pool;
    return BASE_OK;
nomem:
    kv_pool_destroy(pool);
    return base_fail(err, BASE_NOMEM, "no memory for a pool of %u pages", page_count);
}

void kv_pool_destroy(kv_pool *pool)
{
    if (pool == NULL)
        return;
    free(pool->refs);
    free(pool->next_free);
    free(pool->owners);
    free(pool->filled);
    free(pool);
}

uint32_t kv_pool_free_count(const kv_pool *pool)
{
    return pool->free_count;
}

uint32_t kv_pool_page_count(const kv_pool *pool)
{
    return pool->page_count;
}

uint32_t kv_pool_alloc(kv_pool *pool, uint64_t owner)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    CHECK(owner != 0);
    uint32_t page = pool->free_head;
    if (page == KV_PAGE_NONE)
        return KV_PAGE_NONE;
    CHECK(pool->refs[page] == 0);
    pool->free_head = pool->next_free[page];
    pool->free_count--;
    pool->refs[page] = 1;
    pool->filled[page] = 0;
    pool->owners[page] = owner;
    return page;
}

void kv_pool_ref(kv_pool *pool, uint32_t page)
{
    CHECK(page < pool->page_count);
    CHECK(pool->refs[page] > 0);
    CHECK(pool->refs[page] < UINT32_MAX);
    pool->refs[page]++;
}

void kv_pool_ref_all(kv_pool *pool, const uint32_t *pages, uint32_t count)
{
    uint32_t *refs = pool->refs, page_count = pool->page_count;
    for (uint32_t i = 0; i < count; i++) {
        CHECK(pages[i] < page_count);
        CHECK(refs[pages[i]] - 1 < UINT32_MAX - 1); /* neither free nor full */
        refs[pages[i]]++;
    }
}

void kv_pool_prefetch(const kv_pool *pool, uint32_t page)
{
    CHECK(page < pool->page_count);
    __builtin_prefetch(&pool->refs[page], 1);
}

void kv_pool_unref(kv_pool *pool, uint32_t page)
{
    CHECK(page < pool->page_count);
    CHECK(pool->refs[page] > 0);
    if (--pool->refs[page] > 0)
        return;
    pool->owners[page] = 0;
    pool->next_free[page] = pool->free_head;
    pool->free_head = page;
    pool->free_count++;
}

uint32_t kv_pool_refs(const kv_pool *pool, uint32_t page)
{
    CHECK(page < pool->page_count);
    return pool->refs[page];
}

uint32_t kv_pool_filled(const kv_pool *pool, uint32_t page)
{
    CHECK(page < pool->page_count);
    return pool->filled[page];
}

void kv_pool_set_filled(kv_pool *pool, uint32_t page, uint64_t owner, uint32_t filled)
{
    CHECK(page < pool->page_count);
    CHECK(pool->refs[page] > 0);
    CHECK(owner != 0 && pool->owners[page] == owner);
    CHECK(filled >= pool->filled[page]);
    CHECK(filled <= KV_PAGE_TOKENS);
    pool->filled[page] = (uint8_t)filled;
}

bool kv_pool_claim(kv_pool *pool, uint32_t page, uint64_t owner, uint32_t filled)
{
    CHECK(page < pool->page_count);
    CHECK(pool->refs[page] > 0);
    CHECK(owner != 0);
    if (pool->owners[page] != 0 || pool->filled[page] != filled || filled >= KV_PAGE_TOKENS)
        return false;
    pool->owners[page] = owner;
    return true;
}

void kv_pool_release(kv_pool *pool, uint32_t page, uint64_t owner)
{
    CHECK(page < pool->page_count);
    if (pool->owners[page] == owner)
        pool->owners[page] = 0;
}

bool kv_pool_check(const kv_pool *pool, base_err *err)
{
    uint32_t unused = 0, listed = 0;
    for (uint32_t i = 0; i < pool->page_count; i++) {
        if (pool->filled[i] > KV_PAGE_TOKENS) {
            base_fail(err, BASE_INVALID, "page %u is filled to %u", i, pool->filled[i]);
            return false;
        }
        if (pool->refs[i] > 0)
            continue;
        unused++;
        if (pool->owners[i] != 0) {
            base_fail(err, BASE_INVALID, "free page %u has an owner", i);
            return false;
        }
    }
    /* A page that stands twice on the list would make it longer than the pages without a reference,
     * or endless. */
    for (uint32_t i = pool->free_head; i != KV_PAGE_NONE && listed <= unused;
         i = pool->next_free[i]) {
        if (i >= pool->page_count || pool->refs[i] != 0) {
            base_fail(err, BASE_INVALID, "page %u is on the free list and in use", i);
            return false;
        }
        listed++;
    }
    if (listed != unused || unused != pool->free_count) {
        base_fail(err, BASE_INVALID, "%u pages without reference, %u on the free list, %u counted",
                  unused, listed, pool->free_count);
        return false;
    }
    return true;
}
