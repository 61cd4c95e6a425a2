/* Sets of strings as deterministic automata over code points: from lists, lengths and walks, and
 * their products. An automaton is trimmed to the states that reach an end, so what is lowered into
 * the graph has no dead ends. The states of each are bounded. */
#include "engine/grammar_set.h"

#include <stdlib.h>

#include "engine/base/utf8.h"

/* ---- building ---- */

void gr_arena_grow(gr_compile *c, void **data, uint32_t *count, uint32_t *capacity, size_t size)
{
    if (*count == *capacity) {
        uint32_t more = *capacity == 0 ? 16 : *capacity * 2;
        void *grown = gr_alloc(c, more, size);
        if (*count > 0)
            memcpy(grown, *data, *count * size);
        *data = grown;
        *capacity = more;
    }
    ++*count;
}

void gr_set_state(gr_compile *c, gr_set *b, bool accept)
{
    gr_work(c, 1);
    if (b->first.count >= GR_SET_STATES_MAX)
        gr_fail(c, BASE_TOO_LONG, NULL, "a set of strings needs more than %u states",
                GR_SET_STATES_MAX);
    *gr_add(c, &b->first) = b->ranges.count;
    *gr_add(c, &b->accept) = accept;
}

void gr_set_range(gr_compile *c, gr_set *b, uint32_t lo, uint32_t hi, uint32_t to)
{
    uint32_t n = b->ranges.count;
    gr_work(c, 1);
    if (n > b->first.data[b->first.count - 1] && b->ranges.data[n - 1].to == to &&
        b->ranges.data[n - 1].hi + 1 == lo) {
        b->ranges.data[n - 1].hi = hi;
        return;
    }
    *gr_add(c, &b->ranges) = (gr_range){lo, hi, to};
}

gr_dfa *gr_set_finish(gr_compile *c, gr_set *b)
{
    uint32_t count = b->first.count, kept = 0;
    *gr_add(c, &b->first) = b->ranges.count;
    bool *live = gr_alloc(c, count, sizeof *live);
    uint32_t *renamed = gr_alloc(c, count, sizeof *renamed);
    for (bool changed = true; changed;) {
        changed = false;
        gr_work(c, count);
        for (uint32_t s = count; s-- > 0;) {
            bool is = b->accept.data[s];
            for (uint32_t i = b->first.data[s]; !is && !live[s] && i < b->first.data[s + 1]; i++)
                is = live[b->ranges.data[i].to];
            if (is && !live[s])
                live[s] = changed = true;
        }
    }
    gr_dfa *dfa = gr_alloc(c, 1, sizeof *dfa);
    if (count == 0 || !live[0])
        return dfa;
    for (uint32_t s = 0; s < count; s++)
        renamed[s] = live[s] ? kept++ : GR_NOWHERE;
    dfa->count = kept;
    dfa->first = gr_alloc(c, kept + 1, sizeof *dfa->first);
    dfa->accept = gr_alloc(c, kept, sizeof *dfa->accept);
    dfa->ranges = gr_alloc(c, b->ranges.count, sizeof *dfa->ranges);
    uint32_t at = 0;
    for (uint32_t s = 0; s < count; s++) {
        if (!live[s])
            continue;
        dfa->first[renamed[s]] = at;
        dfa->accept[renamed[s]] = b->accept.data[s];
        for (uint32_t i = b->first.data[s]; i < b->first.data[s + 1]; i++) {
            gr_range r = b->ranges.data[i];
            if (live[r.to])
                dfa->ranges[at++] = (gr_range){r.lo, r.hi, renamed[r.to]};
        }
    }
    dfa->first[kept] = at;
    return dfa;
}

/* A table from 64-bit keys to state numbers, in the order of first use. */
typedef struct numbers {
    GR_VECTOR(uint64_t) keys;
    uint32_t *slots; /* 1 + index */
    uint32_t size;
} numbers;

static uint32_t slot_of(const numbers *n, uint64_t key)
{
    uint32_t at = (uint32_t)((key * 0x9E3779B97F4A7C15u) >> 33) & (n->size - 1);
    while (n->slots[at] != 0 && n->keys.data[n->slots[at] - 1] != key)
        at = (at + 1) & (n->size - 1);
    return at;
}

static uint32_t number_of(gr_compile *c, numbers *n, uint64_t key)
{
    if (n->keys.count * 2 >= n->size) {
        n->size = n->size == 0 ? 32 : n->size * 2;
        n->slots = gr_alloc(c, n->size, sizeof *n->slots);
        for (uint32_t i = 0; i < n->keys.count; i++)
            n->slots[slot_of(n, n->keys.data[i])] = i + 1;
    }
    uint32_t at = slot_of(n, key);
    if (n->slots[at] == 0) {
        if (n->keys.count > GR_SET_STATES_MAX)
            gr_fail(c, BASE_TOO_LONG, NULL, "a set of strings needs more than %u states",
                    GR_SET_STATES_MAX);
        *gr_add(c, &n->keys) = key;
        n->slots[at] = n->keys.count;
    }
    return n->slots[at] - 1;
}

/* ---- sets ---- */

gr_dfa *gr_dfa_all(gr_compile *c)
{
    return gr_dfa_length(c, 0, GR_INFINITE);
}

gr_dfa *gr_dfa_length(gr_compile *c, uint32_t min, uint32_t max)
{
    gr_set b = {0};
    uint32_t last = max == GR_INFINITE ? min : max;
    if (last >= GR_SET_STATES_MAX)
        gr_fail(c, BASE_TOO_LONG, NULL, "a length of %u is too long to combine", last);
    for (uint32_t s = 0; s <= last; s++) {
        gr_set_state(c, &b, s >= min);
        if (s < last || max == GR_INFINITE)
            gr_set_range(c, &b, 0, GR_CODE_MAX, s < last ? s + 1 : s);
    }
    return gr_set_finish(c, &b);
}

gr_dfa *gr_dfa_op(gr_compile *c, const gr_dfa *x, const gr_dfa *y, gr_op op)
{
    gr_set b = {0};
    numbers n = {0};
    if (x->count == 0 && (y->count == 0 || op != GR_OR))
        return gr_set_finish(c, &b);
    number_of(c, &n,
              (uint64_t)(x->count > 0 ? 0 : GR_NOWHERE) << 32 | (y->count > 0 ? 0 : GR_NOWHERE));
    for (uint32_t s = 0; s < n.keys.count; s++) {
        uint32_t sx = (uint32_t)(n.keys.data[s] >> 32), sy = (uint32_t)n.keys.data[s];
        bool ax = sx != GR_NOWHERE && x->accept[sx], ay = sy != GR_NOWHERE && y->accept[sy];
        gr_set_state(c, &b, op == GR_AND ? ax && ay : op == GR_OR ? ax || ay : ax && !ay);
        uint32_t i = sx == GR_NOWHERE ? 0 : x->first[sx],
                 i_end = sx == GR_NOWHERE ? 0 : x->first[sx + 1];
        uint32_t k = sy == GR_NOWHERE ? 0 : y->first[sy],
                 k_end = sy == GR_NOWHERE ? 0 : y->first[sy + 1];
        for (uint32_t lo = 0; lo <= GR_CODE_MAX;) {
            while (i < i_end && x->ranges[i].hi < lo)
                i++;
            while (k < k_end && y->ranges[k].hi < lo)
                k++;
            if (i == i_end && (k == k_end || op != GR_OR))
                break;
            uint32_t hi = GR_CODE_MAX, tx = GR_NOWHERE, ty = GR_NOWHERE;
            if (i < i_end && x->ranges[i].lo <= lo) {
                tx = x->ranges[i].to;
                hi = x->ranges[i].hi;
            } else if (i < i_end) {
                hi = x->ranges[i].lo - 1;
            }
            if (k < k_end && y->ranges[k].lo <= lo) {
                ty = y->ranges[k].to;
                hi = y->ranges[k].hi < hi ? y->ranges[k].hi : hi;
            } else if (k < k_end && y->ranges[k].lo - 1 < hi) {
                hi = y->ranges[k].lo - 1;
            }
            bool on = op == GR_AND  ? tx != GR_NOWHERE && ty != GR_NOWHERE
                      : op == GR_OR ? tx != GR_NOWHERE || ty != GR_NOWHERE
                                    : tx != GR_NOWHERE;
            if (on)
                gr_set_range(c, &b, lo, hi, number_of(c, &n, (uint64_t)tx << 32 | ty));
            gr_work(c, 1);
            lo = hi + 1;
        }
    }
    return gr_set_finish(c, &b);
}

static int by_text(const void *pa, const void *pb)
{
    const gr_text *a = pa, *b = pb;
    size_t n = a->length < b->length ? a->length : b->length;
    int d = n > 0 ? memcmp(a->data, b->data, n) : 0;
    return d != 0 ? d : a->length < b->length ? -1 : a->length > b->length;
}

gr_dfa *gr_dfa_texts(gr_compile *c, const gr_text *texts, size_t count)
{
    /* A state is a run of the sorted texts that share their first `depth` bytes. */
    typedef struct run {
        uint32_t first, end;
        size_t depth;
    } run;
    struct {
        run *data;
        uint32_t count, capacity;
    } runs = {0};
    gr_set b = {0};
    if (count == 0)
        return gr_set_finish(c, &b);
    gr_text *sorted = gr_alloc(c, count, sizeof *sorted);
    memcpy(sorted, texts, count * sizeof *sorted);
    gr_work(c, count);
    qsort(sorted, count, sizeof *sorted, by_text);
    *gr_add(c, &runs) = (run){0, (uint32_t)count, 0};
    for (uint32_t s = 0; s < runs.count; s++) {
        run r = runs.data[s];
        uint32_t i = r.first;
        while (i < r.end && sorted[i].length == r.depth)
            i++;
        gr_set_state(c, &b, i > r.first);
        while (i < r.end) {
            uint32_t code, first = i;
            size_t n = base_utf8_char(sorted[i].data + r.depth, sorted[i].length - r.depth, &code);
            if (n == 0)
                gr_fail(c, BASE_INVALID, NULL, "a text is not valid UTF-8");
            while (i < r.end && sorted[i].length >= r.depth + n &&
                   memcmp(sorted[i].data + r.depth, sorted[first].data + r.depth, n) == 0)
                i++;
            gr_set_range(c, &b, code, code, runs.count);
            *gr_add(c, &runs) = (run){first, i, r.depth + n};
        }
    }
    return gr_set_finish(c, &b);
}

bool gr_dfa_has(const gr_dfa *dfa, const char *text, size_t length)
{
    uint32_t s = 0, code;
    if (dfa->count == 0)
        return false;
    for (size_t at = 0, n; at < length; at += n) {
        n = base_utf8_char(text + at, length - at, &code);
        uint32_t i = dfa->first[s];
        while (i < dfa->first[s + 1] && dfa->ranges[i].hi < code)
            i++;
        if (n == 0 || i == dfa->first[s + 1] || dfa->ranges[i].lo > code)
            return false;
        s = dfa->ranges[i].to;
    }
    return dfa->accept[s];
}

gr_dfa *gr_dfa_walk(gr_compile *c, const gr_walk *walk, uint64_t start)
{
    gr_set b = {0};
    numbers n = {0};
    number_of(c, &n, start);
    for (uint32_t s = 0; s < n.keys.count; s++) {
        gr_set_state(c, &b, walk->accept(walk->context, n.keys.data[s]));
        for (const char *ch = walk->alphabet; *ch != '\0'; ch++) {
            uint64_t key = walk->step(walk->context, n.keys.data[s], *ch);
            gr_work(c, 1);
            if (key != UINT64_MAX)
                gr_set_range(c, &b, (uint8_t)*ch, (uint8_t)*ch, number_of(c, &n, key));
        }
    }
    return gr_set_finish(c, &b);
}
