/* The prefix tree.
 *
 *   root of a namespace ── [t t t … t] ── [t t …]        an edge: tokens, and the pages that hold
 * them p7  p8  p9  └─ [t …] p9     p9 or a copy   an edge that begins inside a page lists a page
 * for that slot, too
 *
 * A node is its edge and what hangs under it. Nodes, page lists (runs of spans of pages, a cache
 * line each) and the hash table of children are allocated by create. The tokens are kept by page,
 * not by edge: a page's rows never change while it is listed, a page that two edges share needs
 * them once, and their bound is the pool's. Pages that were handed out in order are one span, and
 * their tokens are compared as one piece of memory.
 *
 * Which page covers a row: the deepest edge's on the path. Whoever wrote an edge that begins inside
 * a page either went on in that page or wrote a copy of its first rows, so that edge's page holds
 * the whole slot up to where it ends.
 *
 * Invariants (kv_index_check):
 *  1. A node's `from` is its parent's from + length; only roots have empty edges; a root has a
 * child.
 *  2. An edge lists one page for each slot of 128 positions that it touches.
 *  3. The tree holds one reference on a page for each node that lists it (page_refs), no more.
 *  4. Rows [0, known) of a listed page are below the pool's `filled`; an edge's first page knows
 * the rows before the edge, and they equal those of the parent's last page.
 *  5. Siblings differ in their first token; each node is found in the hash table by (parent, first
 * token).
 *  6. The heap holds the leaves, all of them, and no root. */
#include "cache/index_internal.h"

#include <stdlib.h>
#include <string.h>

#include "cache/table.h"
#include "engine/base/thread.h"

/* How far ahead of the comparison tokens are asked for, and how many are compared at one go. Of
 * 128K tokens that are in no cache, all ways in turn in one process on a Zen 5 core: the rows read
 * and not compared 23 us, one memcmp of them 28, these two 30, without asking 36 to 38, 2,048 ahead
 * or pieces of 1,024 no better, vectors of 64 bytes of our own 34 to 40. */
#define AHEAD_TOKENS 1024
#define PIECE_TOKENS 512
#define CACHE_LINE_BYTES 64

/* A place in the tree: `in_edge` tokens into the edge of `at`, `depth` tokens from the start. */
typedef struct cursor {
    uint32_t at, in_edge, depth;
} cursor;

static uint32_t slot_of(uint32_t token)
{
    return token / KV_PAGE_TOKENS;
}

static uint32_t row_of(uint32_t token)
{
    return token % KV_PAGE_TOKENS;
}

/* Slots that `length` tokens after the first `from` touch. */
static uint32_t slots_touched(uint32_t from, uint32_t length)
{
    return length == 0 ? 0 : slot_of(from + length - 1) - slot_of(from) + 1;
}

static int32_t *rows_of(const kv_index *index, uint32_t page)
{
    return index->tokens + (size_t)page * KV_PAGE_TOKENS;
}

/* ---- the hash table ---- */

static uint32_t *bucket_of(const kv_index *index, uint32_t parent, uint64_t key)
{
    /* The finisher of MurmurHash3 over both parts. */
    uint64_t h = key ^ ((uint64_t)parent + 1) * 0x9E3779B97F4A7C15u;
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCDu;
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53u;
    return &index->buckets[(h ^ h >> 33) & index->bucket_mask];
}

static uint64_t key_of(const kv_node *node)
{
    return node->parent == KV_NODE_NONE ? node->space : (uint32_t)node->first;
}

static uint32_t find(const kv_index *index, uint32_t parent, uint64_t key)
{
    uint32_t at = *bucket_of(index, parent, key);
    while (at != KV_NODE_NONE &&
           (index->nodes[at].parent != parent || key_of(&index->nodes[at]) != key))
        at = index->nodes[at].hash_next;
    return at;
}

/* ---- nodes and their links ---- */

static uint32_t *siblings_of(kv_index *index, const kv_node *node)
{
    return node->parent == KV_NODE_NONE ? &index->roots : &index->nodes[node->parent].child;
}

/* Puts a node whose parent and key are set under its parent. */
static void link_node(kv_index *index, uint32_t at)
{
    kv_node *node = &index->nodes[at];
    uint32_t *head = siblings_of(index, node);
    uint32_t *bucket = bucket_of(index, node->parent, key_of(node));
    node->prev = KV_NODE_NONE;
    node->next = *head;
    if (*head != KV_NODE_NONE)
        index->nodes[*head].prev = at;
    *head = at;
    node->hash_next = *bucket;
    *bucket = at;
}

static void unlink_node(kv_index *index, uint32_t at)
{
    kv_node *node = &index->nodes[at];
    uint32_t *link = bucket_of(index, node->parent, key_of(node));
    while (*link != at)
        link = &index->nodes[*link].hash_next;
    *link = node->hash_next;
    if (node->next != KV_NODE_NONE)
        index->nodes[node->next].prev = node->prev;
    if (node->prev != KV_NODE_NONE)
        index->nodes[node->prev].next = node->next;
    else
        *siblings_of(index, node) = node->next;
}

/* There is a free one: callers have counted. */
static uint32_t take_node(kv_index *index)
{
    uint32_t at = index->node_free;
    CHECK(at != KV_NODE_NONE);
    index->node_free = index->nodes[at].next;
    index->node_free_count--;
    index->stats.nodes++;
    index->nodes[at] = (kv_node){
        .parent = KV_NODE_NONE,
        .child = KV_NODE_NONE,
        .heap_at = KV_NODE_NONE,
        .run_first = KV_NODE_NONE,
        .run_last = KV_NODE_NONE,
        .stamp = ++index->stamps,
    };
    return at;
}

static void give_node(kv_index *index, uint32_t at)
{
    index->nodes[at].parent = KV_NODE_NONE;
    index->nodes[at].stamp = 0;
    index->nodes[at].next = index->node_free;
    index->node_free = at;
    index->node_free_count++;
    index->stats.nodes--;
}

/* ---- an edge's list of pages ---- */

static uint32_t take_run(kv_index *index)
{
    uint32_t at = index->run_free;
    CHECK(at != KV_NODE_NONE);
    index->run_free = index->runs[at].next;
    index->run_free_count--;
    index->runs[at].next = KV_NODE_NONE;
    index->runs[at].used = 0;
    return at;
}

static void give_run(kv_index *index, uint32_t at)
{
    index->runs[at].next = index->run_free;
    index->run_free = at;
    index->run_free_count++;
}

static uint32_t first_page(const kv_index *index, const kv_node *node)
{
    return index->runs[node->run_first].spans[node->run_start].page;
}

static kv_span *last_span(const kv_index *index, const kv_node *node)
{
    kv_run *run = &index->runs[node->run_last];
    return &run->spans[run->used - 1];
}

uint32_t kv_index__last_page(const kv_index *index, const kv_node *node)
{
    const kv_span *span = last_span(index, node);
    return span->page + span->count - 1;
}

/* Lists a page at the end of an edge and takes the tree's reference. */
static void list_page(kv_index *index, kv_node *node, uint32_t page)
{
    if (node->page_count > 0 && kv_index__last_page(index, node) + 1 == page) {
        last_span(index, node)->count++;
    } else {
        if (node->page_count == 0 || index->runs[node->run_last].used == KV_RUN_SPANS) {
            uint32_t run = take_run(index);
            if (node->page_count == 0)
                node->run_first = run;
            else
                index->runs[node->run_last].next = run;
            index->runs[run].prev = node->run_last & (KV_RUNS_MAX - 1);
            node->run_last = run;
        }
        kv_run *run = &index->runs[node->run_last];
        run->spans[run->used++] = (kv_span){.page = page, .count = 1};
    }
    node->page_count++;
    kv_pool_ref(index->pool, page);
    if (index->page_refs[page]++ == 0)
        index->stats.pages++;
}

/* Gives the tree's reference back; returns 1 if that freed the page. */
static uint32_t unlist_page(kv_index *index, uint32_t page)
{
    CHECK(index->page_refs[page] > 0);
    if (--index->page_refs[page] == 0) {
        index->known[page] = 0;
        index->stats.pages--;
    }
    kv_pool_unref(index->pool, page);
    return kv_pool_refs(index->pool, page) == 0;
}

/* Takes the last page off an edge's list. */
static uint32_t drop_last_page(kv_index *index, kv_node *node)
{
    kv_span *span = last_span(index, node);
    uint32_t page = span->page + span->count - 1, last = node->run_last;
    node->page_count--;
    if (--span->count == 0)
        index->runs[last].used--;
    if (node->page_count == 0) {
        node->run_first = node->run_last = KV_NODE_NONE;
        node->run_start = 0;
        give_run(index, last);
    } else if (index->runs[last].used == 0) {
        node->run_last = index->runs[last].prev;
        index->runs[node->run_last].next = KV_NODE_NONE;
        give_run(index, last);
    }
    return unlist_page(index, page);
}

/* ---- walking ---- */

/* A place in an edge's list of pages: `skip` pages into a span. */
typedef struct place {
    const kv_run *run;
    uint32_t span, skip;
} place;

/* An edge's page number `at`; there is one. */
static place place_of(const kv_index *index, const kv_node *node, uint32_t at)
{
    place p = {.run = &index->runs[node->run_first], .span = node->run_start, .skip = at};
    while (p.skip >= p.run->spans[p.span].count) {
        p.skip -= p.run->spans[p.span].count;
        if (++p.span == p.run->used)
            p = (place){.run = &index->runs[p.run->next], .skip = p.skip};
    }
    return p;
}

/* To the beginning of the next span; false if there is none. */
static bool next_span(const kv_index *index, place *p)
{
    p->skip = 0;
    if (++p->span < p->run->used)
        return true;
    if (p->run->next == KV_NODE_NONE)
        return false;
    *p = (place){.run = &index->runs[p->run->next]};
    if (p->run->next != KV_NODE_NONE)
        __builtin_prefetch(&index->runs[p->run->next]);
    return true;
}

/* The rows of an edge, one behind the other: `left` tokens at `rows`, then the next span's. */
typedef struct row_walk {
    place at;
    const int32_t *rows;
    uint32_t left;
} row_walk;

static void enter_span(const kv_index *index, row_walk *w)
{
    kv_span span = w->at.run->spans[w->at.span];
    w->rows = rows_of(index, span.page + w->at.skip);
    w->left = (span.count - w->at.skip) * KV_PAGE_TOKENS;
}

/* The next rows that lie in a row, `most` at most; 0 behind the edge's last page. */
static uint32_t next_rows(const kv_index *index, row_walk *w, const int32_t **rows, uint32_t most)
{
    if (w->left == 0) {
        if (!next_span(index, &w->at))
            return 0;
        enter_span(index, w);
    }
    uint32_t n = w->left < most ? w->left : most;
    *rows = w->rows;
    w->rows += n;
    w->left -= n;
    return n;
}

/* Asks for the next `tokens` tokens of a walk, and for their pages' counts, which are touched once
 * the match is known. */
static void prefetch_rows(const kv_index *index, row_walk *w, uint32_t tokens)
{
    const int32_t *rows;
    for (uint32_t n; tokens > 0 && (n = next_rows(index, w, &rows, tokens)) > 0; tokens -= n) {
        for (uint32_t i = 0; i < n; i += CACHE_LINE_BYTES / sizeof *rows)
            __builtin_prefetch(rows + i);
        kv_pool_prefetch(index->pool, (uint32_t)((rows - index->tokens) / KV_PAGE_TOKENS));
    }
}

/* How many of tokens[0..count) an edge goes on with after its first `skip`. */
static uint32_t common_length(const kv_index *index, const kv_node *node, uint32_t skip,
                              const int32_t *tokens, uint32_t count)
{
    uint32_t left = node->length - skip, limit = count < left ? count : left;
    uint32_t done = 0, from = node->from + skip, row = row_of(from);
    if (limit == 0)
        return 0;
    row_walk here = {.at = place_of(index, node, slot_of(from) - slot_of(node->from))};
    enter_span(index, &here);
    here.rows += row;
    here.left -= row;
    row_walk ahead = here;
    for (uint32_t i = 0; i < AHEAD_TOKENS && i < limit; i += PIECE_TOKENS)
        prefetch_rows(index, &ahead, PIECE_TOKENS);
    while (done < limit) {
        const int32_t *rows;
        uint32_t most = limit - done < PIECE_TOKENS ? limit - done : PIECE_TOKENS;
        uint32_t n = next_rows(index, &here, &rows, most);
        prefetch_rows(index, &ahead, n);
        if (memcmp(rows, tokens + done, n * sizeof *rows) != 0) {
            while (*rows == tokens[done]) {
                rows++;
                done++;
            }
            return done;
        }
        done += n;
    }
    return done;
}

/* Moves a cursor that stands at the end of an edge into the child that goes on with the next token.
 */
static bool descend(const kv_index *index, cursor *cur, const int32_t *tokens, uint32_t count)
{
    if (cur->at == KV_NODE_NONE || cur->depth == count ||
        cur->in_edge < index->nodes[cur->at].length)
        return false;
    uint32_t at = find(index, cur->at, (uint32_t)tokens[cur->depth]);
    if (at == KV_NODE_NONE)
        return false;
    cur->at = at;
    cur->in_edge =
        common_length(index, &index->nodes[at], 0, tokens + cur->depth, count - cur->depth);
    cur->depth += cur->in_edge;
    return true;
}

/* Whether the first `rows` rows of a page are these tokens. */
static bool holds(const kv_index *index, uint32_t page, const int32_t *tokens, uint32_t rows)
{
    return memcmp(rows_of(index, page), tokens, rows * sizeof *tokens) == 0;
}

/* Where a search begins: at the end of the hint's path and on as far as that edge goes, or, if the
 * hint does not hold, at the namespace's root. */
static cursor start(const kv_index *index, uint64_t space, const kv_hint *hint,
                    const int32_t *tokens, uint32_t count)
{
    cursor root = {.at = find(index, KV_NODE_NONE, space)};
    if (hint == NULL || hint->tokens == 0 || count == 0 || hint->node >= index->node_max)
        return root;
    const kv_node *nodes = index->nodes, *node = &nodes[hint->node];
    if (node->parent == KV_NODE_NONE || node->stamp != hint->stamp ||
        hint->tokens > node->from + node->length)
        return root;
    uint32_t at = hint->node, depth = hint->tokens < count ? hint->tokens : count;
    while (nodes[at].from >= depth) /* it has been split, or less is asked for */
        at = nodes[at].parent;
    const kv_node *top = node = &nodes[at];
    while (top->from > 0)
        top = &nodes[top->parent];
    uint32_t in_edge = depth - node->from, slot = slot_of(depth - 1);
    place last = place_of(index, node, slot - slot_of(node->from));
    uint32_t first_rows = depth < top->length ? depth : top->length;
    if (first_rows > KV_PAGE_TOKENS)
        first_rows = KV_PAGE_TOKENS;
    if (top->parent != root.at || !holds(index, first_page(index, top), tokens, first_rows) ||
        !holds(index, last.run->spans[last.span].page + last.skip, tokens + slot * KV_PAGE_TOKENS,
               depth - slot * KV_PAGE_TOKENS))
        return root;
    uint32_t more = common_length(index, node, in_edge, tokens + depth, count - depth);
    return (cursor){.at = at, .in_edge = in_edge + more, .depth = depth + more};
}

static void leave_hint(const kv_index *index, kv_hint *hint, cursor cur)
{
    if (hint != NULL)
        *hint = cur.depth == 0 ? (kv_hint){0}
                               : (kv_hint){.stamp = index->nodes[cur.at].stamp,
                                           .node = cur.at,
                                           .tokens = cur.depth};
}

static void touch(kv_index *index, cursor cur, uint64_t now)
{
    kv_node *node = &index->nodes[cur.at];
    if (now > index->clock)
        index->clock = now;
    if (now > node->used)
        node->used = now;
    if (cur.in_edge == node->length) {
        if (now > node->used_whole)
            node->used_whole = now;
        kv_index__returned(index, cur.at, now);
    }
    kv_index__heap_move(index, cur.at);
}

/* Writes the pages under the first `length` tokens of an edge to their slots, without those from
 * slot `end` on, which a deeper edge holds, too. */
static void copy_pages(const kv_index *index, const kv_node *node, uint32_t length, uint32_t end,
                       uint32_t *pages)
{
    uint32_t first = slot_of(node->from), last = first + slots_touched(node->from, length);
    uint32_t left = (last < end ? last : end) - first;
    place at = {.run = &index->runs[node->run_first], .span = node->run_start};
    for (pages += first; left > 0; next_span(index, &at)) {
        kv_span span = at.run->spans[at.span];
        uint32_t n = span.count < left ? span.count : left;
        for (uint32_t i = 0; i < n; i++)
            pages[i] = span.page + i;
        pages += n;
        left -= n;
    }
}

/* Marks the path that a search began with used and writes its pages, if any are wanted. */
static void take_path(kv_index *index, cursor cur, uint32_t *pages, uint64_t now)
{
    for (uint32_t end = UINT32_MAX; cur.depth > 0;) {
        const kv_node *node = &index->nodes[cur.at];
        if (pages != NULL)
            copy_pages(index, node, cur.in_edge, end, pages);
        touch(index, cur, now);
        end = slot_of(node->from);
        cur = (cursor){
            .at = node->parent, .in_edge = index->nodes[node->parent].length, .depth = node->from};
    }
}

/* ---- changing the shape ---- */

/* Divides an edge after its first `length` tokens: a new node takes the front and the place under
 * the parent, the old one keeps the rest and its children (there may be thousands). Needs a free
 * node and a free run; returns the new node. */
static uint32_t split(kv_index *index, uint32_t at, uint32_t length)
{
    uint32_t front_at = take_node(index);
    kv_node *node = &index->nodes[at], *front = &index->nodes[front_at];
    CHECK(length > 0 && length < node->length);
    bool shared = row_of(node->from + length) != 0; /* the page at the cut belongs to both */

    front->page_count = slots_touched(node->from, length);
    front->run_first = node->run_first;
    front->run_start = node->run_start;
    uint32_t taken = shared ? front->page_count - 1 : front->page_count; /* off the rest's list */
    /* The run with the first page of the rest, and the span in it; both ends need that run, unless
     * the cut is where it begins. */
    uint32_t run = node->run_first, previous = KV_NODE_NONE, span = node->run_start, left = taken;
    while (left >= index->runs[run].spans[span].count) {
        left -= index->runs[run].spans[span].count;
        if (++span == index->runs[run].used) {
            previous = run;
            run = index->runs[run].next;
            span = 0;
        }
    }
    if (shared || left > 0 || span > 0) {
        uint32_t copy = take_run(index);
        kv_run *end = &index->runs[copy];
        *end = index->runs[run];
        end->next = KV_NODE_NONE;
        uint32_t kept = left + shared; /* of the span that is cut */
        end->used = span + (kept > 0);
        if (kept > 0)
            end->spans[span].count = kept;
        if (previous == KV_NODE_NONE)
            front->run_first = copy;
        else
            index->runs[previous].next = copy;
        front->run_last = copy;
    } else {
        index->runs[previous].next = KV_NODE_NONE;
        front->run_last = previous;
    }
    node->run_first = run;
    node->run_start = span;
    node->page_count -= taken;
    index->runs[run].spans[span].page += left;
    index->runs[run].spans[span].count -= left;
    if (shared) {
        uint32_t page = first_page(index, node);
        kv_pool_ref(index->pool, page);
        index->page_refs[page]++;
    }

    unlink_node(index, at);
    front->parent = node->parent;
    front->first = node->first;
    front->from = node->from;
    front->length = length;
    front->used = front->used_whole = node->used;
    front->pin_until = node->pin_until;
    front->pin_tokens = node->pin_tokens < length ? node->pin_tokens : length;
    link_node(index, front_at);
    node->parent = front_at;
    node->from += length;
    node->length -= length;
    node->first = rows_of(index, first_page(index, node))[row_of(node->from)];
    node->used = node->used_whole;
    node->pin_tokens -= front->pin_tokens;
    link_node(index, at);
    kv_index__heap_move(index, at);
    return front_at;
}

/* Notes what a page's first rows hold. Rows that are known already cannot have changed. */
static void record_rows(kv_index *index, uint32_t page, const int32_t *tokens, uint32_t rows)
{
    uint32_t known = index->known[page];
    int32_t *have = rows_of(index, page);
    CHECK(kv_pool_filled(index->pool, page) >= rows); /* nothing is listed before it is written */
    CHECK(memcmp(have, tokens, (known < rows ? known : rows) * sizeof *have) == 0);
    if (rows <= known)
        return;
    memcpy(have + known, tokens + known, (rows - known) * sizeof *have);
    index->known[page] = (uint8_t)rows;
}

/* Lengthens an edge up to tokens[0..count). */
static void extend(kv_index *index, uint32_t at, const int32_t *tokens, uint32_t count,
                   const uint32_t *pages)
{
    kv_node *node = &index->nodes[at];
    uint32_t end = node->from + node->length;
    for (uint32_t slot = slot_of(end); slot <= slot_of(count - 1); slot++) {
        uint32_t base = slot * KV_PAGE_TOKENS, rows = count - base;
        if (rows > KV_PAGE_TOKENS)
            rows = KV_PAGE_TOKENS;
        bool listed = node->length > 0 && base < end; /* the page that the edge ended in */
        if (!listed)
            list_page(index, node, pages[slot]);
        record_rows(index, pages[slot], tokens + base, rows);
    }
    index->stats.tokens += count - end;
    node->length = count - node->from;
}

bool kv_index__trim(kv_index *index, uint32_t at, uint32_t *freed)
{
    kv_node *node = &index->nodes[at];
    uint32_t base = slot_of(node->from + node->length - 1) * KV_PAGE_TOKENS;
    uint32_t length = base > node->from ? base - node->from : 0;
    CHECK(node->child == KV_NODE_NONE);
    *freed += drop_last_page(index, node);
    index->stats.tokens -= node->length - length;
    node->length = length;
    node->stamp = ++index->stamps; /* what comes in their place is something else */
    if (node->pin_tokens > length)
        node->pin_tokens = length;
    if (length > 0)
        return false;
    uint32_t parent = node->parent;
    kv_index__heap_take(index, at);
    unlink_node(index, at);
    kv_index__orphan(index, at, parent);
    give_node(index, at);
    if (index->nodes[parent].child != KV_NODE_NONE)
        return true;
    if (index->nodes[parent].parent != KV_NODE_NONE) {
        kv_index__heap_put(index, parent);
    } else {
        unlink_node(index, parent);
        give_node(index, parent);
    }
    return true;
}

/* Drops what hangs under a node, leaf by leaf; a root goes with the last of it. */
static void drop_under(kv_index *index, uint32_t top)
{
    uint32_t at = top, freed = 0;
    while (index->nodes[top].child != KV_NODE_NONE) {
        while (index->nodes[at].child != KV_NODE_NONE)
            at = index->nodes[at].child;
        uint32_t parent = index->nodes[at].parent;
        bool last = parent == top && index->nodes[at].next == KV_NODE_NONE &&
                    index->nodes[at].prev == KV_NODE_NONE;
        while (!kv_index__trim(index, at, &freed))
            ;
        if (last) /* a root went with it */
            return;
        at = parent;
    }
}

/* ---- the header's functions ---- */

base_code kv_index_create(kv_index **out, kv_pool *pool, uint32_t node_max, base_err *err)
{
    uint32_t page_count = kv_pool_page_count(pool), bucket_count = 1;
    *out = NULL;
    if (node_max < 2 || node_max > UINT32_MAX / 4)
        return base_fail(err, BASE_INVALID, "an index of %u nodes is not possible", node_max);
    kv_index *index = calloc(1, sizeof *index);
    if (index == NULL)
        goto nomem;
    /* Every listing of a page but its first is the first of some edge, and an edge wastes less than
     * two runs. */
    size_t run_max = page_count / KV_RUN_SPANS + 2 * (size_t)node_max + 4;
    if (run_max > KV_RUNS_MAX)
        goto nomem;
    while (bucket_count < node_max)
        bucket_count *= 2;
    index->pool = pool;
    index->page_count = page_count;
    index->node_max = index->node_free_count = node_max;
    index->run_max = index->run_free_count = (uint32_t)run_max;
    index->bucket_mask = bucket_count - 1;
    index->roots = KV_NODE_NONE;
    index->second = 1;
    index->nodes = kv__table(node_max, sizeof *index->nodes);
    index->runs = kv__table(run_max, sizeof *index->runs);
    index->buckets = kv__table(bucket_count, sizeof *index->buckets);
    index->tokens = kv__table(page_count, KV_PAGE_TOKENS * sizeof *index->tokens);
    index->known = kv__table(page_count, sizeof *index->known);
    index->page_refs = kv__table(page_count, sizeof *index->page_refs);
    index->heap = kv__table(node_max, sizeof *index->heap);
    index->classes = calloc(KV_CLASSES, sizeof *index->classes);
    index->ghosts = calloc(KV_GHOSTS, sizeof *index->ghosts);
    if (index->nodes == NULL || index->runs == NULL || index->buckets == NULL ||
        index->tokens == NULL || index->known == NULL || index->page_refs == NULL ||
        index->heap == NULL || index->classes == NULL || index->ghosts == NULL)
        goto nomem;
    memset(index->buckets, 0xFF, bucket_count * sizeof *index->buckets); /* KV_NODE_NONE */
    memset(index->known, 0, page_count * sizeof *index->known);
    memset(index->page_refs, 0, page_count * sizeof *index->page_refs);
    for (uint32_t i = 0; i < node_max; i++)
        index->nodes[i] =
            (kv_node){.parent = KV_NODE_NONE, .next = i + 1 < node_max ? i + 1 : KV_NODE_NONE};
    for (uint32_t i = 0; i < index->run_max; i++)
        index->runs[i].next = i + 1 < index->run_max ? i + 1 : KV_NODE_NONE;
    *out = index;
    return BASE_OK;
nomem:
    if (index != NULL)
        index->roots = KV_NODE_NONE;
    kv_index_destroy(index);
    return base_fail(err, BASE_NOMEM, "no memory for an index of %u pages and %u nodes", page_count,
                     node_max);
}

void kv_index_destroy(kv_index *index)
{
    if (index == NULL)
        return;
    kv_index_drop(index, 0);
    free(index->nodes);
    free(index->runs);
    free(index->buckets);
    free(index->tokens);
    free(index->known);
    free(index->page_refs);
    free(index->heap);
    free(index->classes);
    free(index->ghosts);
    free(index);
}

kv_match kv_index_match_from(kv_index *index, uint64_t space, kv_hint *hint, const int32_t *tokens,
                             uint32_t count, uint32_t *pages, uint64_t now)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    cursor cur = start(index, space, hint, tokens, count);
    take_path(index, cur, pages, now);
    while (descend(index, &cur, tokens, count)) {
        copy_pages(index, &index->nodes[cur.at], cur.in_edge, UINT32_MAX, pages);
        touch(index, cur, now);
    }
    kv_match match = {.tokens = cur.depth, .page_count = slots_touched(0, cur.depth)};
    kv_pool_ref_all(index->pool, pages, match.page_count);
    leave_hint(index, hint, cur);
    return match;
}

kv_match kv_index_match(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count,
                        uint32_t *pages, uint64_t now)
{
    return kv_index_match_from(index, space, NULL, tokens, count, pages, now);
}

uint32_t kv_index_peek(const kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count)
{
    cursor cur = start(index, space, NULL, tokens, count);
    while (descend(index, &cur, tokens, count))
        ;
    return cur.depth;
}

bool kv_index_insert_from(kv_index *index, uint64_t space, kv_hint *hint, const int32_t *tokens,
                          uint32_t count, const uint32_t *pages, uint64_t now)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    cursor cur = start(index, space, hint, tokens, count);
    take_path(index, cur, NULL, now);
    while (descend(index, &cur, tokens, count))
        touch(index, cur, now);
    leave_hint(index, hint, cur);
    if (cur.depth == count)
        return true;

    const kv_node *node = cur.at == KV_NODE_NONE ? NULL : &index->nodes[cur.at];
    bool cut = node != NULL && cur.in_edge < node->length;
    /* A leaf is lengthened if the sequence went on in the leaf's own last page or in a new one. */
    bool grow =
        node != NULL && !cut && node->heap_at != KV_NODE_NONE &&
        (row_of(cur.depth) == 0 || kv_index__last_page(index, node) == pages[slot_of(cur.depth)]);
    uint32_t nodes = (node == NULL) + cut + !grow;
    uint32_t runs = cut + slots_touched(cur.depth, count - cur.depth) / KV_RUN_SPANS + 1;
    if (index->node_free_count < nodes || index->run_free_count < runs)
        return false;

    if (node == NULL) {
        cur.at = take_node(index);
        index->nodes[cur.at].space = space;
        link_node(index, cur.at);
    }
    if (cut) {
        uint32_t rest = cur.at;
        cur.at = split(index, rest, cur.in_edge);
        kv_index__left_behind(index, rest, index->nodes[cur.at].length, now);
    }
    if (!grow) {
        uint32_t child = take_node(index);
        kv_index__heap_take(index, cur.at);
        index->nodes[child].parent = cur.at;
        index->nodes[child].from = cur.depth;
        index->nodes[child].first = tokens[cur.depth];
        link_node(index, child);
        cur.at = child;
    }
    extend(index, cur.at, tokens, count, pages);
    kv_index__came_back(index, cur.at, space, tokens, cur.depth, count, now);
    index->nodes[cur.at].used = index->nodes[cur.at].used_whole = now;
    if (grow)
        kv_index__heap_move(index, cur.at);
    else
        kv_index__heap_put(index, cur.at);
    cur.depth = count;
    leave_hint(index, hint, cur);
    return true;
}

bool kv_index_insert(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count,
                     const uint32_t *pages, uint64_t now)
{
    return kv_index_insert_from(index, space, NULL, tokens, count, pages, now);
}

uint32_t kv_index_drop(kv_index *index, uint64_t space)
{
    uint32_t before = index->stats.pages;
    if (space == 0) {
        while (index->roots != KV_NODE_NONE)
            drop_under(index, index->roots);
    } else {
        uint32_t root = find(index, KV_NODE_NONE, space);
        if (root != KV_NODE_NONE)
            drop_under(index, root);
    }
    return before - index->stats.pages;
}

uint32_t kv_index_erase(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count,
                        uint32_t kept)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    uint32_t before = index->stats.pages, freed = 0;
    cursor cur = start(index, space, NULL, tokens, count);
    while (descend(index, &cur, tokens, count))
        ;
    if (cur.at == KV_NODE_NONE || cur.depth <= kept || index->nodes[cur.at].length == 0)
        return 0;
    if (cur.depth < count && cur.in_edge < index->nodes[cur.at].length)
        return 0; /* the path leaves inside an edge: what goes on there is another's */
    uint32_t at = cur.at;
    drop_under(index, at);
    /* Up to the node that `kept` lies in, as long as nobody else hangs there. */
    while (index->nodes[at].parent != KV_NODE_NONE && index->nodes[at].child == KV_NODE_NONE &&
           index->nodes[at].from + index->nodes[at].length > kept) {
        const kv_node *node = &index->nodes[at];
        uint32_t parent = node->parent;
        bool alone = node->next == KV_NODE_NONE && node->prev == KV_NODE_NONE;
        if (node->from < kept && index->node_free_count > 0 && index->run_free_count > 0)
            split(index, at, kept - node->from); /* `at` is the rest */
        bool cut = index->nodes[at].parent != parent;
        while (!kv_index__trim(index, at, &freed))
            ;
        if (cut || (alone && index->nodes[parent].parent == KV_NODE_NONE))
            break; /* `kept` is reached, or the root went with it */
        at = parent;
    }
    return before - index->stats.pages;
}

void kv_index_pin(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count,
                  uint64_t until)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    cursor cur = start(index, space, NULL, tokens, count);
    while (descend(index, &cur, tokens, count)) {
        kv_node *node = &index->nodes[cur.at];
        if (until == 0 || until > node->pin_until)
            node->pin_until = until;
        if (until == 0)
            node->pin_tokens = 0;
        else if (cur.in_edge > node->pin_tokens)
            node->pin_tokens = cur.in_edge;
        kv_index__heap_move(index, cur.at);
    }
}

void kv_index_note_pause_from(kv_index *index, uint64_t space, const kv_hint *hint,
                              const int32_t *tokens, uint32_t count, uint64_t class_key,
                              uint64_t now)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    cursor cur = start(index, space, hint, tokens, count);
    while (descend(index, &cur, tokens, count))
        ;
    if (now > index->clock)
        index->clock = now;
    if (cur.depth == 0)
        return;
    if (cur.in_edge < index->nodes[cur.at]
                          .length) { /* somebody else's text goes on, or an older one of its own */
        if (index->node_free_count == 0 || index->run_free_count == 0)
            return;
        uint32_t rest = cur.at;
        cur.at = split(index, rest, cur.in_edge);
        kv_index__left_behind(index, rest, index->nodes[cur.at].length, now);
    }
    uint32_t slot = count / KV_PAGE_TOKENS;
    uint64_t mark =
        slot == 0 ? 0 : kv_index__mark(space, slot - 1, tokens + (slot - 1) * KV_PAGE_TOKENS);
    kv_index__pause(index, cur.at, mark, class_key, now);
}

void kv_index_note_pause(kv_index *index, uint64_t space, const int32_t *tokens, uint32_t count,
                         uint64_t class_key, uint64_t now)
{
    kv_index_note_pause_from(index, space, NULL, tokens, count, class_key, now);
}

kv_index_stats kv_index_get_stats(const kv_index *index)
{
    return index->stats;
}

/* ---- check ---- */

#define HOLDS(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            base_fail(err, BASE_INVALID, "node %u: %s", at, #cond);                                \
            return false;                                                                          \
        }                                                                                          \
    } while (0)

/* One node; its pages are added to `refs`, its runs to `*runs`. */
static bool check_node(const kv_index *index, uint32_t at, uint32_t *refs, uint32_t *runs,
                       base_err *err)
{
    const kv_node *node = &index->nodes[at];
    HOLDS(find(index, node->parent, key_of(node)) == at);
    if (node->parent == KV_NODE_NONE) {
        HOLDS(node->length == 0 && node->page_count == 0 && node->from == 0);
        HOLDS(node->child != KV_NODE_NONE);
        HOLDS(node->heap_at == KV_NODE_NONE);
        return true;
    }
    const kv_node *parent = &index->nodes[node->parent];
    HOLDS(node->length > 0);
    HOLDS(node->from == parent->from + parent->length);
    HOLDS(node->page_count == slots_touched(node->from, node->length));
    HOLDS(node->pin_tokens <= node->length);
    HOLDS(node->used_whole <= node->used);
    HOLDS((node->heap_at != KV_NODE_NONE) == (node->child == KV_NODE_NONE));
    if (node->heap_at != KV_NODE_NONE) {
        const kv_heap_entry *entry = &index->heap[node->heap_at];
        HOLDS(node->heap_at < index->heap_count && entry->at == at);
        HOLDS(index->heap[(node->heap_at - (node->heap_at > 0)) / 2].rank <= entry->rank);
        HOLDS(index->policy != KV_POLICY_LRU || entry->rank == kv_index__rank(index, node));
    }
    uint32_t first = first_page(index, node), row = row_of(node->from);
    HOLDS(rows_of(index, first)[row] == node->first);
    HOLDS(row == 0 ||
          memcmp(rows_of(index, first), rows_of(index, kv_index__last_page(index, parent)),
                 row * sizeof(int32_t)) == 0);
    uint32_t run = node->run_first, slot = 0;
    for (uint32_t span = node->run_start;; span++) {
        const kv_run *r = &index->runs[run];
        HOLDS(r->used <= KV_RUN_SPANS);
        if (span == r->used) {
            *runs += 1;
            if (r->next == KV_NODE_NONE)
                break;
            HOLDS(r->used == KV_RUN_SPANS);
            HOLDS(index->runs[r->next].prev == run);
            run = r->next;
            span = 0;
            r = &index->runs[run];
        }
        HOLDS(span < r->used && r->spans[span].count > 0);
        for (uint32_t i = 0; i < r->spans[span].count; i++, slot++) {
            uint32_t page = r->spans[span].page + i;
            uint32_t base = (slot_of(node->from) + slot) * KV_PAGE_TOKENS;
            HOLDS(slot < node->page_count);
            uint32_t rows = node->from + node->length - base;
            HOLDS(page < index->page_count);
            HOLDS(index->known[page] >= (rows < KV_PAGE_TOKENS ? rows : KV_PAGE_TOKENS));
            HOLDS(kv_pool_filled(index->pool, page) >= index->known[page]);
            refs[page]++;
        }
    }
    HOLDS(slot == node->page_count);
    HOLDS(run == node->run_last);
    return true;
}

/* The node after `at` in an order that visits parents before children. */
static uint32_t next_node(const kv_index *index, uint32_t at)
{
    if (index->nodes[at].child != KV_NODE_NONE)
        return index->nodes[at].child;
    while (at != KV_NODE_NONE && index->nodes[at].next == KV_NODE_NONE)
        at = index->nodes[at].parent;
    return at == KV_NODE_NONE ? at : index->nodes[at].next;
}

static bool check_totals(const kv_index *index, const uint32_t *refs, kv_index_stats seen,
                         uint32_t leaves, uint32_t runs, base_err *err)
{
    const kv_index_stats *told = &index->stats;
    for (uint32_t page = 0; page < index->page_count; page++) {
        seen.pages += refs[page] > 0;
        if (refs[page] != index->page_refs[page] || refs[page] > kv_pool_refs(index->pool, page)) {
            base_fail(err, BASE_INVALID, "page %u: listed %u times, counted %u, pool says %u", page,
                      refs[page], index->page_refs[page], kv_pool_refs(index->pool, page));
            return false;
        }
    }
    if (seen.nodes == told->nodes && seen.nodes + index->node_free_count == index->node_max &&
        seen.pages == told->pages && seen.tokens == told->tokens && leaves == index->heap_count &&
        runs + index->run_free_count == index->run_max)
        return true;
    base_fail(
        err, BASE_INVALID,
        "nodes %u of %u, free %u; pages %u of %u; tokens %llu of %llu; leaves %u of %u; runs %u, "
        "free %u",
        seen.nodes, told->nodes, index->node_free_count, seen.pages, told->pages,
        (unsigned long long)seen.tokens, (unsigned long long)told->tokens, leaves,
        index->heap_count, runs, index->run_free_count);
    return false;
}

bool kv_index_check(const kv_index *index, base_err *err)
{
    kv_index_stats seen = {0};
    uint32_t leaves = 0, runs = 0;
    bool ok = true;
    uint32_t *refs = calloc(index->page_count, sizeof *refs);
    if (refs == NULL) {
        base_fail(err, BASE_NOMEM, "no memory to check %u pages", index->page_count);
        return false;
    }
    for (uint32_t at = index->roots; ok && at != KV_NODE_NONE; at = next_node(index, at)) {
        ok = check_node(index, at, refs, &runs, err);
        seen.nodes++;
        seen.tokens += index->nodes[at].length;
        leaves += index->nodes[at].child == KV_NODE_NONE;
    }
    ok = ok && check_totals(index, refs, seen, leaves, runs, err);
    free(refs);
    return ok;
}

/* ---- for an operator ---- */

/* Adds the children of `parent` (KV_NODE_NONE: the roots'), as far as there is room; returns how
 * many it has. */
static uint32_t list_children(const kv_index *index, uint32_t first, uint64_t space, kv_edge *out,
                              uint32_t *count, uint32_t max)
{
    uint32_t children = 0;
    for (uint32_t at = first; at != KV_NODE_NONE; at = index->nodes[at].next, children++)
        if (*count < max)
            out[(*count)++] = (kv_edge){.id = at, .space = space};
    return children;
}

uint32_t kv_index_list(const kv_index *index, kv_edge *out, uint32_t max, uint64_t now)
{
    uint32_t count = 0;
    for (uint32_t at = index->roots; at != KV_NODE_NONE; at = index->nodes[at].next)
        list_children(index, index->nodes[at].child, index->nodes[at].space, out, &count, max);
    for (uint32_t i = 0; i < count; i++) {
        kv_edge *edge = &out[i];
        const kv_node *node = &index->nodes[edge->id];
        const kv_node *parent = &index->nodes[node->parent];
        uint32_t page = index->runs[node->run_first].spans[node->run_start].page;
        edge->parent = parent->parent == KV_NODE_NONE ? UINT32_MAX : node->parent;
        edge->start = node->from;
        edge->tokens = node->length;
        edge->pages = node->page_count;
        edge->in_use = kv_pool_refs(index->pool, page) > index->page_refs[page];
        edge->pinned = node->pin_tokens > 0 && node->pin_until > now;
        edge->used = node->used;
        edge->children = list_children(index, node->child, edge->space, out, &count, max);
    }
    return count;
}
