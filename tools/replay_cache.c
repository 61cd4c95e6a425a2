#include "tools/replay_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "cache/index.h"
#include "engine/base/clock.h"
#include "engine/base/rand.h"

#define NONE UINT32_MAX
#define NEVER UINT32_MAX

const char *const rp_policy_names[RP_POLICIES] = {"lru",      "lfuda", "belady",
                                                  "infinite", "index", "value"};

/* ---- the plan ---- */

/* Numbers for chains of page hashes: 64 bits over at most some 10^8 pages. */
typedef struct numbers {
    uint64_t *keys;
    uint32_t *values;
    size_t mask, count;
} numbers;

static bool numbers_grow(numbers *n)
{
    size_t size = n->keys == NULL ? 1u << 16 : (n->mask + 1) * 2;
    numbers more = {calloc(size, sizeof *more.keys), calloc(size, sizeof *more.values), size - 1,
                    n->count};
    if (more.keys == NULL || more.values == NULL) {
        free(more.keys);
        free(more.values);
        return false;
    }
    for (size_t i = 0; n->keys != NULL && i <= n->mask; i++) {
        if (n->keys[i] == 0)
            continue;
        size_t at = n->keys[i] & more.mask;
        while (more.keys[at] != 0)
            at = (at + 1) & more.mask;
        more.keys[at] = n->keys[i];
        more.values[at] = n->values[i];
    }
    free(n->keys);
    free(n->values);
    *n = more;
    return true;
}

static uint32_t number_of(numbers *n, uint64_t key)
{
    if ((n->keys == NULL || n->count * 2 > n->mask) && !numbers_grow(n))
        return NONE;
    key = key == 0 ? 1 : key;
    size_t at = key & n->mask;
    while (n->keys[at] != 0 && n->keys[at] != key)
        at = (at + 1) & n->mask;
    if (n->keys[at] == 0) {
        n->keys[at] = key;
        n->values[at] = (uint32_t)n->count++;
    }
    return n->values[at];
}

static int by_time(const void *a, const void *b)
{
    const rp_event *x = a, *y = b;
    if (x->at_ms != y->at_ms)
        return x->at_ms < y->at_ms ? -1 : 1;
    return x->request < y->request ? -1 : x->request > y->request;
}

/* Who plays when: fills events without pages. */
static base_code schedule(rp_plan *plan, const rp_plan_options *o, base_err *err)
{
    const rp_trace *trace = plan->trace;
    size_t n = trace->session_count;
    uint32_t *order = malloc((n + 1) * sizeof *order);
    double *free_at = calloc(o->lanes + 1, sizeof *free_at);
    plan->events = malloc((trace->request_count + 1) * sizeof *plan->events);
    if (order == NULL || free_at == NULL || plan->events == NULL) {
        free(order);
        free(free_at);
        return base_fail(err, BASE_NOMEM, "no memory for %zu events", trace->request_count);
    }
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        if (o->part == 0 || i % 2 == o->part - 1)
            order[count++] = (uint32_t)i;
    for (size_t i = count; o->seed != 0 && i > 1; i--) {
        size_t j = (size_t)(base_rand_unit(base_rand(o->seed, 77, i).v[0]) * (double)i);
        uint32_t kept = order[i - 1];
        order[i - 1] = order[j];
        order[j] = kept;
    }
    for (size_t i = 0; i < count; i++) {
        const rp_session *session = &trace->sessions[order[i]];
        uint32_t lane = 0;
        double start = session->start_s, length = 0;
        if (o->lanes > 0 && !trace->open) {
            for (uint32_t l = 1; l < o->lanes; l++)
                lane = free_at[l] < free_at[lane] ? l : lane;
            start = free_at[lane];
        }
        for (size_t j = 0; j < session->request_count; j++) {
            const rp_request *r = &trace->requests[session->request_at + j];
            double end = r->at_s + r->took_s;
            length = end > length ? end : length;
            const rp_request *next = r + 1,
                             *last = &trace->requests[session->request_at + session->request_count];
            while (next < last && next->agent != r->agent)
                next++;
            bool overlaps = next < last && next->at_s < end;
            plan->events[plan->event_count++] =
                (rp_event){.at_ms = (uint64_t)((start + r->at_s) * 1e3) + 1,
                           .end_ms = (uint64_t)((start + (overlaps ? next->at_s : end)) * 1e3) + 1,
                           .request = (uint32_t)(session->request_at + j),
                           .session = order[i]};
            plan->input_tokens += r->in;
        }
        /* A breath between two sessions, so that one lane never plays both at once. */
        free_at[lane] = start + length + 1;
    }
    qsort(plan->events, plan->event_count, sizeof *plan->events, by_time);
    free(order);
    free(free_at);
    return BASE_OK;
}

static uint32_t tokens_left(const rp_plan *plan, const rp_request *r)
{
    return r->in + (plan->answers ? r->out : 0);
}

static void write_tokens(const rp_plan *plan, const rp_event *e, int32_t *tokens)
{
    const rp_request *r = &plan->trace->requests[e->request];
    const rp_session *s = &plan->trace->sessions[e->session];
    rp_tokens(plan->trace, s, r, tokens, e->page_count * KV_PAGE_TOKENS);
}

base_code rp_plan_make(rp_plan *plan, const rp_trace *trace, const rp_plan_options *o,
                       base_err *err)
{
    *plan = (rp_plan){.trace = trace, .answers = o->answers};
    if (schedule(plan, o, err) != BASE_OK)
        return BASE_NOMEM;
    for (size_t i = 0; i < plan->event_count; i++) {
        rp_event *e = &plan->events[i];
        e->page_count = tokens_left(plan, &trace->requests[e->request]) / KV_PAGE_TOKENS;
        e->page_at = plan->page_count;
        plan->page_count += e->page_count;
        if (e->page_count > plan->pages_max)
            plan->pages_max = e->page_count;
    }
    numbers n = {0};
    plan->pages = malloc((plan->page_count + 1) * sizeof *plan->pages);
    int32_t *tokens = malloc(((size_t)plan->pages_max + 1) * KV_PAGE_TOKENS * sizeof *tokens);
    base_code code = BASE_OK;
    if (plan->pages == NULL || tokens == NULL)
        code = base_fail(err, BASE_NOMEM, "no memory for %zu pages", plan->page_count);
    for (size_t i = 0; i < plan->event_count && code == BASE_OK; i++) {
        const rp_event *e = &plan->events[i];
        uint64_t hash = 0;
        write_tokens(plan, e, tokens);
        for (uint32_t p = 0; p < e->page_count && code == BASE_OK; p++) {
            hash = XXH3_64bits_withSeed(tokens + (size_t)p * KV_PAGE_TOKENS,
                                        KV_PAGE_TOKENS * sizeof *tokens, hash);
            plan->pages[e->page_at + p] = number_of(&n, hash);
            if (plan->pages[e->page_at + p] == NONE)
                code = base_fail(err, BASE_NOMEM, "no memory for %zu distinct pages", n.count);
        }
    }
    plan->distinct_pages = (uint32_t)n.count;
    free(n.keys);
    free(n.values);
    free(tokens);
    if (code != BASE_OK)
        rp_plan_deinit(plan);
    return code;
}

void rp_plan_deinit(rp_plan *plan)
{
    free(plan->events);
    free(plan->pages);
    *plan = (rp_plan){0};
}

/* ---- policies on pages ---- */

/* Pages of an event that count: the prompt's that fit. */
static uint32_t pages_held(const rp_event *e, uint32_t capacity)
{
    return e->page_count < capacity ? e->page_count : capacity;
}

static uint32_t pages_asked(const rp_plan *plan, const rp_event *e, uint32_t capacity)
{
    uint32_t in = plan->trace->requests[e->request].in / KV_PAGE_TOKENS;
    uint32_t held = pages_held(e, capacity);
    return in < held ? in : held;
}

typedef struct link {
    uint32_t up, down; /* towards the oldest, towards the newest */
} link;

static base_code lru(rp_outcome *out, const rp_plan *plan, uint32_t capacity, base_err *err)
{
    /* Entry distinct_pages is the ring's head: its `down` is the oldest, its `up` the newest. */
    uint32_t head = plan->distinct_pages, resident = 0;
    link *ring = malloc(((size_t)head + 1) * sizeof *ring);
    if (ring == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for %u pages", head);
    for (uint32_t i = 0; i < head; i++)
        ring[i] = (link){NONE, NONE};
    ring[head] = (link){head, head};
    for (size_t i = 0; i < plan->event_count; i++) {
        const rp_event *e = &plan->events[i];
        const uint32_t *pages = plan->pages + e->page_at;
        uint32_t held = pages_held(e, capacity), asked = pages_asked(plan, e, capacity), hit = 0;
        while (hit < asked && ring[pages[hit]].up != NONE)
            hit++;
        out->hit_tokens += (uint64_t)hit * KV_PAGE_TOKENS;
        for (uint32_t p = held; p-- > 0;) {
            link *l = &ring[pages[p]];
            if (l->up != NONE) {
                ring[l->up].down = l->down;
                ring[l->down].up = l->up;
            } else {
                resident++;
            }
            *l = (link){ring[head].up, head};
            ring[l->up].down = pages[p];
            ring[head].up = pages[p];
        }
        for (; resident > capacity; resident--) {
            uint32_t oldest = ring[head].down;
            ring[head].down = ring[oldest].down;
            ring[ring[oldest].down].up = head;
            ring[oldest] = (link){NONE, NONE};
            out->evicted_pages++;
        }
    }
    free(ring);
    return BASE_OK;
}

/* A heap of (rank, page), the least rank first; entries go stale when the page's rank moves on. */
typedef struct entry {
    uint64_t rank;
    uint32_t page;
} entry;

typedef struct heap {
    entry *v;
    size_t count, room;
} heap;

static bool heap_push(heap *h, entry e)
{
    if (h->count == h->room) {
        size_t room = h->room < 1024 ? 1024 : h->room * 2;
        entry *v = realloc(h->v, room * sizeof *v);
        if (v == NULL)
            return false;
        h->v = v;
        h->room = room;
    }
    size_t at = h->count++;
    for (; at > 0 && e.rank < h->v[(at - 1) / 2].rank; at = (at - 1) / 2)
        h->v[at] = h->v[(at - 1) / 2];
    h->v[at] = e;
    return true;
}

static entry heap_pop(heap *h)
{
    entry top = h->v[0], last = h->v[--h->count];
    size_t at = 0;
    for (;;) {
        size_t down = 2 * at + 1;
        if (down >= h->count)
            break;
        if (down + 1 < h->count && h->v[down + 1].rank < h->v[down].rank)
            down++;
        if (last.rank <= h->v[down].rank)
            break;
        h->v[at] = h->v[down];
        at = down;
    }
    if (h->count > 0)
        h->v[at] = last;
    return top;
}

typedef struct ranked {
    uint64_t *rank; /* of each page; UINT64_MAX: not resident */
    uint32_t *uses;
    uint32_t *event; /* 1 + the last event that held the page */
    uint32_t *next;  /* of each place in plan.pages: the next event with that page, or NEVER */
    entry *aside;
    heap heap;
    uint64_t age;
} ranked;

static base_code run_ranked(rp_outcome *out, const rp_plan *plan, uint32_t capacity,
                            bool clairvoyant, ranked *s, base_err *err)
{
    uint32_t resident = 0;
    for (size_t i = 0; i < plan->event_count; i++) {
        const rp_event *e = &plan->events[i];
        const uint32_t *pages = plan->pages + e->page_at;
        uint32_t held = pages_held(e, capacity), asked = pages_asked(plan, e, capacity), hit = 0;
        while (hit < asked && s->rank[pages[hit]] != UINT64_MAX)
            hit++;
        out->hit_tokens += (uint64_t)hit * KV_PAGE_TOKENS;
        for (uint32_t p = 0; p < held; p++) {
            uint32_t page = pages[p];
            resident += s->rank[page] == UINT64_MAX;
            s->event[page] = (uint32_t)i + 1;
            s->uses[page]++;
            /* Of equal ranks the deeper page goes first. */
            uint32_t first =
                clairvoyant ? NEVER - s->next[e->page_at + p] : (uint32_t)(s->age + s->uses[page]);
            s->rank[page] = (uint64_t)first << 32 | (UINT32_MAX - p);
            if (!heap_push(&s->heap, (entry){s->rank[page], page}))
                return base_fail(err, BASE_NOMEM, "no memory for %zu ranks", s->heap.count);
        }
        size_t aside = 0;
        while (resident > capacity) {
            entry least = heap_pop(&s->heap);
            if (s->rank[least.page] != least.rank)
                continue;
            if (s->event[least.page] == i + 1) {
                s->aside[aside++] = least;
                continue;
            }
            s->age = least.rank >> 32;
            s->rank[least.page] = UINT64_MAX;
            s->uses[least.page] = 0;
            resident--;
            out->evicted_pages++;
        }
        while (aside > 0)
            if (!heap_push(&s->heap, s->aside[--aside]))
                return base_fail(err, BASE_NOMEM, "no memory for %zu ranks", s->heap.count);
    }
    return BASE_OK;
}

static base_code by_rank(rp_outcome *out, const rp_plan *plan, uint32_t capacity, bool clairvoyant,
                         base_err *err)
{
    size_t n = (size_t)plan->distinct_pages + 1;
    ranked s = {.rank = malloc(n * sizeof *s.rank),
                .uses = calloc(n, sizeof *s.uses),
                .event = calloc(n, sizeof *s.event),
                .next = malloc((plan->page_count + 1) * sizeof *s.next),
                .aside = malloc(n * sizeof *s.aside)};
    base_code code = BASE_OK;
    if (s.rank == NULL || s.uses == NULL || s.event == NULL || s.next == NULL || s.aside == NULL) {
        code = base_fail(err, BASE_NOMEM, "no memory for %zu pages", plan->page_count);
    } else {
        memset(s.rank, 0xFF, n * sizeof *s.rank);
        for (size_t i = plan->event_count; i-- > 0;) {
            const rp_event *e = &plan->events[i];
            for (uint32_t p = 0; p < e->page_count; p++) {
                uint32_t *last = &s.event[plan->pages[e->page_at + p]];
                s.next[e->page_at + p] = *last == 0 ? NEVER : *last - 1;
                *last = (uint32_t)i + 1;
            }
        }
        memset(s.event, 0, n * sizeof *s.event);
        code = run_ranked(out, plan, capacity, clairvoyant, &s, err);
    }
    free(s.rank);
    free(s.uses);
    free(s.event);
    free(s.next);
    free(s.aside);
    free(s.heap.v);
    return code;
}

/* ---- the cache itself ---- */

#define SPACE 1

static int by_end(const void *a, const void *b, void *events)
{
    const rp_event *of = events;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    uint64_t s = of[x].end_ms, t = of[y].end_ms;
    return s != t ? (s < t ? -1 : 1) : (x > y) - (x < y);
}

/* The events in the order of their ends. */
static uint32_t *order_of_ends(const rp_plan *plan)
{
    uint32_t *order = malloc((plan->event_count + 1) * sizeof *order);
    for (size_t i = 0; order != NULL && i < plan->event_count; i++)
        order[i] = (uint32_t)i;
    if (order != NULL && plan->event_count > 0)
        qsort_r(order, plan->event_count, sizeof *order, by_end, plan->events);
    return order;
}

static base_code with_index(rp_outcome *out, const rp_plan *plan, uint32_t capacity,
                            kv_policy policy, base_err *err)
{
    kv_pool *pool = NULL;
    kv_index *index = NULL;
    int32_t *tokens = malloc(((size_t)plan->pages_max + 1) * KV_PAGE_TOKENS * sizeof *tokens);
    uint32_t *pages = malloc(((size_t)plan->pages_max + 1) * sizeof *pages);
    uint32_t *ends = order_of_ends(plan);
    size_t ended = 0;
    base_code code = BASE_OK;
    if (tokens == NULL || pages == NULL || ends == NULL)
        code = base_fail(err, BASE_NOMEM, "no memory for a prompt");
    if (code == BASE_OK)
        code = kv_pool_create(&pool, capacity, err);
    if (code == BASE_OK)
        code = kv_index_create(&index, pool, 3 * capacity + 8, err);
    if (code == BASE_OK)
        kv_index_set_policy(index, policy, 1000); /* times are milliseconds */
    for (size_t i = 0; i < plan->event_count && code == BASE_OK; i++) {
        const rp_event *e = &plan->events[i];
        uint32_t held = pages_held(e, capacity), asked = pages_asked(plan, e, capacity);
        for (; plan->events[ends[ended]].end_ms < e->at_ms; ended++) {
            const rp_event *done = &plan->events[ends[ended]];
            write_tokens(plan, done, tokens);
            kv_index_note_pause(index, SPACE, tokens, pages_held(done, capacity) * KV_PAGE_TOKENS,
                                1 + plan->trace->requests[done->request].stop, done->end_ms);
        }
        if (held == 0)
            continue;
        write_tokens(plan, e, tokens);
        kv_match m = kv_index_match(index, SPACE, tokens, held * KV_PAGE_TOKENS, pages, e->at_ms);
        uint32_t kept = m.tokens / KV_PAGE_TOKENS, in = asked * KV_PAGE_TOKENS;
        out->hit_tokens += (uint64_t)(kept < asked ? kept : asked) * KV_PAGE_TOKENS;
        out->exact_tokens += m.tokens < in ? m.tokens : in;
        if (kept < m.page_count) /* a page that goes on otherwise: its rows are copied */
            kv_pool_unref(pool, pages[kept]);
        if (kv_pool_free_count(pool) < held - kept)
            kv_index_evict(index, held - kept, e->at_ms);
        for (uint32_t p = kept; p < held; p++) {
            pages[p] = kv_pool_alloc(pool, i + 1);
            if (pages[p] == KV_PAGE_NONE) { /* a prompt as long as the pool: the rest is not kept */
                held = p;
                break;
            }
            kv_pool_set_filled(pool, pages[p], i + 1, KV_PAGE_TOKENS);
        }
        if (!kv_index_insert(index, SPACE, tokens, held * KV_PAGE_TOKENS, pages, e->at_ms))
            code = base_fail(err, BASE_FULL, "kv_index_insert is out of nodes");
        for (uint32_t p = 0; p < held; p++) {
            if (p >= kept)
                kv_pool_release(pool, pages[p], i + 1);
            kv_pool_unref(pool, pages[p]);
        }
    }
    if (index != NULL)
        out->evicted_pages = kv_index_get_stats(index).evicted_pages;
    kv_index_destroy(index);
    kv_pool_destroy(pool);
    free(ends);
    free(tokens);
    free(pages);
    return code;
}

base_code rp_simulate(rp_outcome *out, const rp_plan *plan, rp_policy policy, uint32_t capacity,
                      base_err *err)
{
    *out = (rp_outcome){0};
    if (capacity == 0)
        return base_fail(err, BASE_INVALID, "capacity is less than a page of %d tokens",
                         KV_PAGE_TOKENS);
    uint64_t before = base_now_ns();
    base_code code = policy == RP_INDEX      ? with_index(out, plan, capacity, KV_POLICY_LRU, err)
                     : policy == RP_VALUE    ? with_index(out, plan, capacity, KV_POLICY_VALUE, err)
                     : policy == RP_INFINITE ? lru(out, plan, UINT32_MAX, err)
                     : policy == RP_LRU      ? lru(out, plan, capacity, err)
                                        : by_rank(out, plan, capacity, policy == RP_BELADY, err);
    if (policy != RP_INDEX && policy != RP_VALUE)
        out->exact_tokens = out->hit_tokens;
    out->seconds = (double)(base_now_ns() - before) / 1e9;
    return code;
}
