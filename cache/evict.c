/* Which leaf goes next: a binary heap of leaves by rank, so that a page is found in O(log leaves).
 *
 * kv_index__rank is the policy: today the last use. A pin that still covers the leaf's last page
 * counts as a use at the pin's end: such a leaf cannot be reached before every unpinned one, and
 * once the pin has run out its age counts from there. A node that becomes a leaf keeps the use that
 * its own path had. */
#include "cache/index_internal.h"

#include "engine/base/thread.h"

/* Tokens of a leaf that stay when its last page goes. */
static uint32_t kept_without_last(const kv_node *node)
{
    uint32_t last_slot = (node->from + node->length - 1) / KV_PAGE_TOKENS;
    uint32_t start = last_slot * KV_PAGE_TOKENS;
    return start > node->from ? start - node->from : 0;
}

static bool pin_holds_last(const kv_node *node)
{
    return node->pin_tokens > kept_without_last(node);
}

uint64_t kv_index__rank(const kv_node *node)
{
    return pin_holds_last(node) && node->pin_until > node->used ? node->pin_until : node->used;
}

static bool before(const kv_index *index, uint32_t a, uint32_t b)
{
    return kv_index__rank(&index->nodes[a]) < kv_index__rank(&index->nodes[b]);
}

static void place(kv_index *index, uint32_t slot, uint32_t at)
{
    index->heap[slot] = at;
    index->nodes[at].heap_at = slot;
}

static void sift(kv_index *index, uint32_t slot)
{
    uint32_t at = index->heap[slot];
    while (slot > 0) {
        uint32_t up = (slot - 1) / 2;
        if (!before(index, at, index->heap[up]))
            break;
        place(index, slot, index->heap[up]);
        slot = up;
    }
    for (;;) {
        uint32_t down = 2 * slot + 1;
        if (down >= index->heap_count)
            break;
        if (down + 1 < index->heap_count && before(index, index->heap[down + 1], index->heap[down]))
            down++;
        if (!before(index, index->heap[down], at))
            break;
        place(index, slot, index->heap[down]);
        slot = down;
    }
    place(index, slot, at);
}

void kv_index__heap_put(kv_index *index, uint32_t at)
{
    CHECK(index->nodes[at].heap_at == KV_NODE_NONE);
    place(index, index->heap_count++, at);
    sift(index, index->nodes[at].heap_at);
}

void kv_index__heap_take(kv_index *index, uint32_t at)
{
    uint32_t slot = index->nodes[at].heap_at;
    if (slot == KV_NODE_NONE)
        return;
    index->nodes[at].heap_at = KV_NODE_NONE;
    uint32_t last = index->heap[--index->heap_count];
    if (last == at)
        return;
    place(index, slot, last);
    sift(index, slot);
}

void kv_index__heap_move(kv_index *index, uint32_t at)
{
    if (index->nodes[at].heap_at != KV_NODE_NONE)
        sift(index, index->nodes[at].heap_at);
}

uint32_t kv_index_evict(kv_index *index, uint32_t free_pages, uint64_t now)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    uint32_t freed = 0, aside = KV_NODE_NONE;
    while (kv_pool_free_count(index->pool) < free_pages && index->heap_count > 0) {
        uint32_t at = index->heap[0];
        kv_node *leaf = &index->nodes[at];
        uint32_t page = kv_index__last_page(index, leaf);
        if (pin_holds_last(leaf) && leaf->pin_until > now)
            break; /* its rank is past `now`, so all that follow are pinned, too */
        if (kv_pool_refs(index->pool, page) > index->page_refs[page]) {
            kv_index__heap_take(index, at);
            leaf->aside_next =
                aside; /* a sequence is using it; there are no more of those than sequences */
            aside = at;
        } else if (!kv_index__trim(index, at, &freed)) {
            kv_index__heap_move(index, at);
        }
    }
    while (aside != KV_NODE_NONE) {
        kv_index__heap_put(index, aside);
        aside = index->nodes[aside].aside_next;
    }
    index->stats.evicted_pages += freed;
    return freed;
}
