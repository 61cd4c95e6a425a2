/* Which leaf goes next: a binary heap of leaves by rank, so that a page is found in O(log leaves).
 *
 * kv_index__rank is the policy.
 *
 * LRU: the last use. A pin that still covers the leaf's last page counts as a use at the pin's end:
 * such a leaf cannot be reached before every unpinned one, and once the pin has run out its age
 * counts from there. A node that becomes a leaf keeps the use that its own path had.
 *
 * VALUE: how much a page kept now saves for the time that it takes up. A session that has ended a
 * turn pauses; what it waits for (a tool, a person) is its class. For each class the ages at which
 * pauses returned, or were last seen, are counted, which gives the part that returns at each age
 * and the time that pauses spend there. The value at age a is the best ratio over all ages b > a of
 *
 *     returns in [a, b) / time in [a, b),
 *
 * the index of Gittins: what is to be kept until b or a return is kept for the sake of the returns
 * per second that this brings. It is multiplied by what a page costs to compute again
 * (kv_index_set_cost); equal values go by last use. Pauses whose pages have gone are remembered by
 * the text before them (ghosts), so that their ends are learned from as well; those that have not
 * ended count as time without return. While an answer is still being made no pause has begun: how
 * long answers take is counted alike, and a page is worth what it will be at the pause's begin, for
 * a time that is longer by the rest of the answer. Who has just asked is therefore no favourite: it
 * will not ask again before it has its answer. The hazards of a class are drawn towards those of
 * all pauses, and these towards one that falls with age, so that before anything is learned the
 * order is that of LRU. (The length of the last pause of the same path as a second key was tried:
 * it costs more in thin tables than it tells.)
 *
 * Values fall and rise with age, so ranks are computed anew for all leaves REBUILDS_S times a
 * second at most, when a page is wanted; between, a leaf that changes takes its place by the tables
 * of then. */
#include "cache/index_internal.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "engine/base/thread.h"

#define REBUILDS_S 4
#define PREFETCH_LEAVES 8 /* a leaf's node lies anywhere */
/* The next three were chosen on every other session of the agent traces, 8 and 16 at a time. */
#define PRIOR_RETURNS 32.0f /* weight of the wider table in a narrower one, in returns */
#define PRIOR_S 30.0f       /* hazard before anything is known: 1 / (this + age) */
#define ANSWER_WORTH 1.7f   /* of what an answer leads to, against pauses on the whole */
#define PAUSES_MAX 4096.0f  /* of a class; then older ones count half */
#define CLASS_UNKNOWN 0
#define CLASS_LEFT_BEHIND 1
#define CLASS_ANSWER 2 /* no pause: while an answer is made; counts how long that takes */
#define CLASS_OVER 3   /* worth nothing, whatever the others are like; nothing is learned from it */
#define CLASS_FIRST 4  /* of those by key */

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

/* ---- pauses ---- */

static float age_start(uint32_t i)
{
    return i == 0 ? 0 : (float)KV_AGE_FIRST_S * exp2f((float)i / 2);
}

static uint32_t age_of(const kv_index *index, uint64_t since, uint64_t now)
{
    float s = now > since ? (float)((double)(now - since) / (double)index->second) : 0;
    if (s < (float)KV_AGE_FIRST_S)
        return 0;
    float i = 2 * log2f(s / (float)KV_AGE_FIRST_S);
    return i < KV_AGES - 1 ? (uint32_t)i : KV_AGES - 1;
}

static uint16_t class_of(kv_index *index, uint64_t key)
{
    if (key == 0)
        return CLASS_UNKNOWN;
    if (key == KV_CLASS_OVER)
        return CLASS_OVER;
    uint32_t at = (uint32_t)((key * 0x9E3779B97F4A7C15u) >> 40) % (KV_CLASSES - CLASS_FIRST);
    for (uint32_t i = 0; i < KV_CLASSES - CLASS_FIRST; i++) {
        kv_pause_class *c = &index->classes[CLASS_FIRST + (at + i) % (KV_CLASSES - CLASS_FIRST)];
        if (c->key == 0)
            c->key = key;
        if (c->key == key)
            return (uint16_t)(c - index->classes);
    }
    return CLASS_UNKNOWN; /* more classes than are kept apart */
}

static void count_pause(kv_index *index, uint16_t class, uint64_t since, uint64_t now,
                        bool returned)
{
    kv_pause_class *c = &index->classes[class];
    uint32_t age = age_of(index, since, now);
    float total = 0;
    c->ended[age] += 1;
    c->returned[age] += returned;
    for (uint32_t i = 0; i < KV_AGES; i++)
        total += c->ended[i];
    for (uint32_t i = 0; total > PAUSES_MAX && i < KV_AGES; i++) {
        c->ended[i] /= 2;
        c->returned[i] /= 2;
    }
}

uint64_t kv_index__mark(uint64_t space, uint32_t slot, const int32_t *tokens)
{
    uint64_t mark = XXH3_64bits_withSeed(tokens, KV_PAGE_TOKENS * sizeof *tokens, space + slot);
    return mark != 0 ? mark : 1;
}

/* The place of a mark, or the one it would take; other marks that stood there are displaced. */
static kv_ghost *ghost_of(kv_index *index, uint64_t mark)
{
    kv_ghost *first = &index->ghosts[mark % (KV_GHOSTS - 3)], *oldest = first;
    for (uint32_t i = 0; i < 4; i++) {
        if (first[i].mark == mark)
            return &first[i];
        if (first[i].mark == 0 || (oldest->mark != 0 && first[i].paused < oldest->paused))
            oldest = &first[i];
    }
    return oldest;
}

void kv_index__came_back(kv_index *index, uint32_t at, uint64_t space, const int32_t *tokens,
                         uint32_t from, uint32_t count, uint64_t now)
{
    for (uint32_t slot = from / KV_PAGE_TOKENS;
         index->ghost_count > 0 && (slot + 1) * KV_PAGE_TOKENS <= count; slot++) {
        uint64_t mark = kv_index__mark(space, slot, tokens + slot * KV_PAGE_TOKENS);
        kv_ghost *ghost = ghost_of(index, mark);
        if (ghost->mark != mark)
            continue;
        count_pause(index, ghost->pause_class, ghost->paused, now, true);
        ghost->mark = 0;
        index->ghost_count--;
    }
}

void kv_index__pause(kv_index *index, uint32_t at, uint64_t mark, uint64_t class_key, uint64_t now)
{
    kv_node *node = &index->nodes[at];
    if (node->paused == 0)
        count_pause(index, CLASS_ANSWER, node->used_whole, now, true);
    node->pause_class = class_of(index, class_key);
    node->paused = now > 0 ? now : 1;
    node->pause_mark = mark;
    kv_index__heap_move(index, at);
}

void kv_index__returned(kv_index *index, uint32_t at, uint64_t now)
{
    kv_node *node = &index->nodes[at];
    if (node->paused == 0)
        return;
    count_pause(index, node->pause_class, node->paused, now, true);
    node->paused = 0;
}

void kv_index__orphan(kv_index *index, uint32_t at, uint32_t parent)
{
    const kv_node *node = &index->nodes[at];
    kv_node *stem = &index->nodes[parent];
    if (node->paused == 0 || node->pause_class == CLASS_OVER)
        return; /* no one will ask for the stem on its behalf, and others may */
    if (stem->paused == 0 && stem->parent != KV_NODE_NONE) {
        stem->paused = node->paused; /* whoever returns will ask for the stem first */
        stem->pause_class = node->pause_class;
        stem->pause_mark = node->pause_mark;
    } else if (node->pause_mark != 0) {
        kv_ghost *ghost = ghost_of(index, node->pause_mark);
        if (ghost->mark != 0)
            count_pause(index, ghost->pause_class, ghost->paused, index->clock, false);
        else
            index->ghost_count++;
        *ghost = (kv_ghost){
            .mark = node->pause_mark, .paused = node->paused, .pause_class = node->pause_class};
    }
}

void kv_index__left_behind(kv_index *index, uint32_t at, uint32_t front, uint64_t now)
{
    kv_node *node = &index->nodes[at];
    if (node->paused == 0 || front < node->length)
        return; /* somebody else's branch off an early part: the pause goes on */
    count_pause(index, node->pause_class, node->paused, now, true);
    node->pause_class = CLASS_LEFT_BEHIND;
    node->paused = now > 0 ? now : 1;
    node->pause_mark = 0;
    kv_index__heap_move(index, at);
}

/* Returns a second at each age: what was counted, drawn with the weight of PRIOR_RETURNS returns
 * towards `prior`, which is first scaled to as many returns as there were in all: where hardly
 * anything returns the shape stays. `hazard` may be `prior`. */
static void find_hazard(float *hazard, const float *returned, const float *ended,
                        const float *prior)
{
    float time[KV_AGES], later = 0, seen = PRIOR_RETURNS, expected = PRIOR_RETURNS;
    for (uint32_t i = KV_AGES; i-- > 0;) {
        time[i] = (age_start(i + 1) - age_start(i)) * (later + ended[i] / 2);
        later += ended[i];
        seen += returned[i];
        expected += time[i] * prior[i];
    }
    for (uint32_t i = 0; i < KV_AGES; i++)
        hazard[i] = (returned[i] + PRIOR_RETURNS) /
                    (time[i] + PRIOR_RETURNS * expected / (seen * prior[i]));
}

/* The value at each age. */
static void find_values(float *value, const float *hazard)
{
    float stay[KV_AGES];
    for (uint32_t i = 0; i < KV_AGES; i++)
        stay[i] = expf(-hazard[i] * (age_start(i + 1) - age_start(i)));
    for (uint32_t i = 0; i < KV_AGES; i++) {
        float here = 1, returns = 0, time = 0, best = 0;
        for (uint32_t j = i; j < KV_AGES && here > 1e-3f; j++) {
            float gone = here * (1 - stay[j]);
            returns += gone;
            time += gone / hazard[j]; /* the mean time in this age of those that enter it */
            here -= gone;
            if (returns > best * time)
                best = returns / time;
        }
        value[i] = best;
    }
}

/* The value of what an answer is being made for, at each age of the answer: as at the begin of a
 * pause of any class, but the rest of the answer takes its time as well. As a pause where nobody
 * tells when answers end, and no more than one of the same age. */
static void find_values_of_answers(const kv_index *index, float *value, const float *ends,
                                   const float *hazard)
{
    const float *unknown = index->classes[CLASS_UNKNOWN].value,
                *told = index->classes[CLASS_ANSWER].returned;
    float told_count = 0;
    float returns[KV_AGES], time[KV_AGES], here = 1, r = 0, t = 0;
    for (uint32_t j = 0; j < KV_AGES; j++) {
        float gone = here * (1 - expf(-hazard[j] * (age_start(j + 1) - age_start(j))));
        told_count += told[j];
        returns[j] = r += gone;
        time[j] = t += gone / hazard[j];
        here -= gone;
    }
    for (uint32_t i = 0; i < KV_AGES; i++) {
        float left = 1, rest = 0, best = 0;
        for (uint32_t j = i; j < KV_AGES && left > 1e-3f; j++) {
            float gone = left * (1 - expf(-ends[j] * (age_start(j + 1) - age_start(j))));
            rest += gone / ends[j];
            left -= gone;
        }
        for (uint32_t j = 0; j < KV_AGES; j++)
            if (returns[j] > best * (rest + time[j]))
                best = returns[j] / (rest + time[j]);
        value[i] = ANSWER_WORTH * best;
        if (told_count < PRIOR_RETURNS || best > unknown[i])
            value[i] = unknown[i];
    }
}

static void learn(kv_index *index, uint64_t now)
{
    float all_returned[KV_AGES], all_ended[KV_AGES];
    for (uint32_t c = 0; c < KV_CLASSES; c++)
        memset(index->classes[c].open, 0, sizeof index->classes[c].open);
    for (uint32_t i = 0; i < index->heap_count; i++) {
        const kv_node *node = &index->nodes[index->heap[i].at];
        if (i + PREFETCH_LEAVES < index->heap_count)
            __builtin_prefetch(&index->nodes[index->heap[i + PREFETCH_LEAVES].at]);
        uint32_t class = node->paused != 0 ? node->pause_class : CLASS_ANSWER;
        uint64_t since = node->paused != 0 ? node->paused : node->used_whole;
        index->classes[class].open[age_of(index, since, now)] += 1;
    }
    for (uint32_t i = 0; i < KV_GHOSTS; i++) {
        const kv_ghost *ghost = &index->ghosts[i];
        if (ghost->mark != 0)
            index->classes[ghost->pause_class].open[age_of(index, ghost->paused, now)] += 1;
    }
    float prior[KV_AGES], all[KV_AGES];
    memset(all_returned, 0, sizeof all_returned);
    memset(all_ended, 0, sizeof all_ended);
    for (uint32_t i = 0; i < KV_AGES; i++) {
        prior[i] = 1 / (PRIOR_S + age_start(i));
        for (uint32_t c = 0; c < KV_CLASSES; c++) {
            if (c == CLASS_ANSWER || c == CLASS_LEFT_BEHIND || c == CLASS_OVER)
                continue;
            all_returned[i] += index->classes[c].returned[i];
            all_ended[i] += index->classes[c].ended[i] + index->classes[c].open[i];
        }
    }
    find_hazard(all, all_returned, all_ended, prior);
    for (uint32_t k = 0; k < KV_CLASSES; k++) {
        kv_pause_class *c = &index->classes[k];
        float hazard[KV_AGES], ended[KV_AGES];
        if (k == CLASS_OVER || (k >= CLASS_FIRST && c->key == 0))
            continue;
        for (uint32_t i = 0; i < KV_AGES; i++)
            ended[i] = c->ended[i] + c->open[i];
        find_hazard(hazard, c->returned, ended, all);
        if (k == CLASS_ANSWER)
            find_values_of_answers(index, c->value, hazard, all);
        else
            find_values(c->value, hazard);
    }
}

/* ---- rank ---- */

#define RANK_PINNED (1ull << 63) /* a value's sign bit */

static uint64_t value_rank(const kv_index *index, const kv_node *node, uint64_t now)
{
    if (pin_holds_last(node) && node->pin_until > now)
        return RANK_PINNED | node->pin_until >> 1;
    uint64_t since = node->paused > node->used ? node->paused : node->used;
    uint16_t class = node->paused != 0 ? node->pause_class : CLASS_ANSWER;
    float value = index->classes[class].value[age_of(index, since, now)];
    if (index->cost_doubling > 0)
        value *= 1 + (float)(node->from + node->length) / (float)index->cost_doubling;
    uint32_t bits; /* of a positive float, which are in its order */
    memcpy(&bits, &value, sizeof bits);
    return (uint64_t)bits << 32 | (uint32_t)(node->used / (index->second / 16 + 1));
}

uint64_t kv_index__rank(const kv_index *index, const kv_node *node)
{
    if (index->policy == KV_POLICY_VALUE)
        return value_rank(index, node, index->clock);
    return pin_holds_last(node) && node->pin_until > node->used ? node->pin_until : node->used;
}

static void place(kv_index *index, uint32_t slot, kv_heap_entry entry)
{
    index->heap[slot] = entry;
    index->nodes[entry.at].heap_at = slot;
}

static void sift_down(kv_index *index, uint32_t slot)
{
    const kv_heap_entry *heap = index->heap;
    kv_heap_entry entry = heap[slot];
    for (;;) {
        uint32_t down = 2 * slot + 1;
        if (down >= index->heap_count)
            break;
        if (down + 1 < index->heap_count && heap[down + 1].rank < heap[down].rank)
            down++;
        if (heap[down].rank >= entry.rank)
            break;
        place(index, slot, heap[down]);
        slot = down;
    }
    place(index, slot, entry);
}

static void sift(kv_index *index, uint32_t slot)
{
    kv_heap_entry entry = index->heap[slot];
    while (slot > 0 && entry.rank < index->heap[(slot - 1) / 2].rank) {
        place(index, slot, index->heap[(slot - 1) / 2]);
        slot = (slot - 1) / 2;
    }
    place(index, slot, entry);
    sift_down(index, slot);
}

/* All anew. */
static void rank_all(kv_index *index)
{
    for (uint32_t i = 0; i < index->heap_count; i++) {
        if (i + PREFETCH_LEAVES < index->heap_count)
            __builtin_prefetch(&index->nodes[index->heap[i + PREFETCH_LEAVES].at]);
        index->heap[i].rank = kv_index__rank(index, &index->nodes[index->heap[i].at]);
    }
    for (uint32_t i = index->heap_count / 2; i-- > 0;)
        sift_down(index, i);
}

void kv_index__heap_put(kv_index *index, uint32_t at)
{
    CHECK(index->nodes[at].heap_at == KV_NODE_NONE);
    uint64_t rank = kv_index__rank(index, &index->nodes[at]);
    place(index, index->heap_count++, (kv_heap_entry){.rank = rank, .at = at});
    sift(index, index->nodes[at].heap_at);
}

void kv_index__heap_take(kv_index *index, uint32_t at)
{
    uint32_t slot = index->nodes[at].heap_at;
    if (slot == KV_NODE_NONE)
        return;
    index->nodes[at].heap_at = KV_NODE_NONE;
    kv_heap_entry last = index->heap[--index->heap_count];
    if (last.at == at)
        return;
    place(index, slot, last);
    sift(index, slot);
}

void kv_index__heap_move(kv_index *index, uint32_t at)
{
    uint32_t slot = index->nodes[at].heap_at;
    if (slot == KV_NODE_NONE)
        return;
    uint64_t rank = kv_index__rank(index, &index->nodes[at]);
    if (rank == index->heap[slot].rank)
        return;
    index->heap[slot].rank = rank;
    sift(index, slot);
}

/* Ranks as of now, which is index->clock. */
static void rebuild(kv_index *index)
{
    learn(index, index->clock);
    rank_all(index);
    index->rebuild_at = index->clock + index->second / REBUILDS_S + 1;
}

void kv_index_set_policy(kv_index *index, kv_policy policy, uint64_t second)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    CHECK(second > 0);
    index->policy = policy;
    index->second = second;
    index->rebuild_at = 0;
    rank_all(index);
}

void kv_index_set_cost(kv_index *index, uint32_t doubling)
{
    index->cost_doubling = doubling;
    index->rebuild_at = 0;
}

uint32_t kv_index_evict(kv_index *index, uint32_t free_pages, uint64_t now)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    uint32_t freed = 0, aside = KV_NODE_NONE;
    index->clock = now > index->clock ? now : index->clock;
    bool by_value = index->policy == KV_POLICY_VALUE;
    if (by_value && now >= index->rebuild_at && kv_pool_free_count(index->pool) < free_pages)
        rebuild(index);
    while (kv_pool_free_count(index->pool) < free_pages && index->heap_count > 0) {
        uint32_t at = index->heap[0].at;
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
