/* The tree and the pool against a naive model under random work.
 *
 * The model is a list of token arrays, each with the page of every token, plus what each page's
 * rows really hold, written down when a sequence "computes" them. A match must be the longest
 * common prefix over the list, its pages the ones that the list gives for the last matched token of
 * each slot, and their rows the prompt itself. Few distinct tokens and a small pool make splits
 * inside pages, shared tails and eviction frequent. After an eviction the model checks what must
 * still be there (used and pinned parts, everything if enough was free) and then follows the tree's
 * length of each entry.
 *
 * WHIMBREL_TEST_SEED and WHIMBREL_TEST_OPS choose another run; a failure prints its seed. */
#include <criterion/criterion.h>

#include <stdlib.h>
#include <string.h>

#include "cache/index.h"
#include "engine/base/rand.h"

#define PAGE_COUNT 200
#define SLOTS_MAX 40 /* more than two runs of an edge's page list */
#define LENGTH_MAX (SLOTS_MAX * KV_PAGE_TOKENS)
#define SPACES 3
#define SEQS 6
#define ENTRIES_MAX 512
#define PINS_MAX 64
#define OLD_MAX 48

typedef struct entry {
    uint64_t space;
    uint32_t count;
    int32_t tokens[LENGTH_MAX];
    uint32_t page_of[LENGTH_MAX];
} entry;

typedef struct pin {
    uint64_t space, until;
    uint32_t count;
    int32_t tokens[LENGTH_MAX];
} pin;

/* A path that somebody remembers, and where it stood. */
typedef struct old_path {
    uint64_t space;
    uint32_t count;
    int32_t tokens[LENGTH_MAX];
    kv_hint hint;
} old_path;

typedef struct seq {
    bool live;
    uint64_t space, owner;
    uint32_t count, page_count;
    int32_t tokens[LENGTH_MAX];
    uint32_t pages[SLOTS_MAX];
    kv_hint hint;
} seq;

static kv_pool *pool;
static kv_index *tree;
static entry *entries[ENTRIES_MAX];
static uint32_t entry_count;
static pin pins[PINS_MAX];
static uint32_t pin_count;
static seq seqs[SEQS];
static old_path olds[OLD_MAX];
static uint32_t old_count;
static int32_t held[PAGE_COUNT][KV_PAGE_TOKENS]; /* what the rows of each page really are */
static uint32_t node_max;
static uint64_t now, owner_next = 1, seed, draws;
static uint32_t done[10]; /* operations of each kind */

static uint32_t draw(uint32_t bound)
{
    base_rand4 r = base_rand(seed, 1, draws++);
    return (uint32_t)((uint64_t)r.v[0] * bound >> 32);
}

static void check(void)
{
    base_err err = BASE_ERR_INIT;
    cr_assert(kv_pool_check(pool, &err), "seed %lu, draw %lu: %s", seed, draws, err.text);
    cr_assert(kv_index_check(tree, &err), "seed %lu, draw %lu: %s", seed, draws, err.text);
}

#define MUST(cond) cr_assert(cond, "seed %lu, draw %lu", seed, draws)

static uint32_t common(const int32_t *a, uint32_t a_count, const int32_t *b, uint32_t b_count)
{
    uint32_t i = 0;
    while (i < a_count && i < b_count && a[i] == b[i])
        i++;
    return i;
}

static uint32_t model_match(uint64_t space, const int32_t *tokens, uint32_t count,
                            const entry **best)
{
    uint32_t longest = 0;
    *best = NULL;
    for (uint32_t i = 0; i < entry_count; i++) {
        if (entries[i]->space != space)
            continue;
        uint32_t n = common(entries[i]->tokens, entries[i]->count, tokens, count);
        if (n > longest) {
            longest = n;
            *best = entries[i];
        }
    }
    return longest;
}

/* Drops entries that are empty or the beginning of another. */
static void model_tidy(void)
{
    for (uint32_t i = 0; i < entry_count;) {
        bool covered = entries[i]->count == 0;
        for (uint32_t j = 0; !covered && j < entry_count; j++)
            covered = j != i && entries[j]->space == entries[i]->space &&
                      common(entries[i]->tokens, entries[i]->count, entries[j]->tokens,
                             entries[j]->count) == entries[i]->count &&
                      (entries[j]->count > entries[i]->count || j < i);
        if (covered) {
            free(entries[i]);
            entries[i] = entries[--entry_count];
        } else {
            i++;
        }
    }
}

static void model_insert(const seq *s, uint32_t count)
{
    const entry *old;
    uint32_t known = model_match(s->space, s->tokens, count, &old);
    if (known == count)
        return;
    MUST(entry_count < ENTRIES_MAX);
    entry *e = calloc(1, sizeof *e);
    e->space = s->space;
    e->count = count;
    memcpy(e->tokens, s->tokens, count * sizeof *e->tokens);
    for (uint32_t i = 0; i < count; i++)
        e->page_of[i] = i < known ? old->page_of[i] : s->pages[i / KV_PAGE_TOKENS];
    entries[entry_count++] = e;
}

static uint32_t pinned(uint64_t space, const int32_t *tokens, uint32_t count)
{
    uint32_t longest = 0;
    for (uint32_t i = 0; i < pin_count; i++)
        if (pins[i].space == space && pins[i].until > now) {
            uint32_t n = common(pins[i].tokens, pins[i].count, tokens, count);
            longest = n > longest ? n : longest;
        }
    return longest;
}

static bool any_pin(void)
{
    for (uint32_t i = 0; i < pin_count; i++)
        if (pins[i].until > now)
            return true;
    return false;
}

static bool in_use(uint32_t page)
{
    for (uint32_t i = 0; i < SEQS; i++)
        for (uint32_t j = 0; seqs[i].live && j < seqs[i].page_count; j++)
            if (seqs[i].pages[j] == page)
                return true;
    return false;
}

/* How much of an entry may not go: up to its last used page and its pins. */
static uint32_t protected_length(const entry *e)
{
    uint32_t used = e->count, pin_end = pinned(e->space, e->tokens, e->count);
    while (used > 0 && !in_use(e->page_of[used - 1]))
        used--;
    return used > pin_end ? used : pin_end;
}

static void evict(uint32_t want)
{
    uint32_t before = kv_pool_free_count(pool);
    uint32_t protects[ENTRIES_MAX];
    for (uint32_t i = 0; i < entry_count; i++)
        protects[i] = protected_length(entries[i]);
    uint32_t freed = kv_index_evict(tree, want, now);
    uint32_t after = kv_pool_free_count(pool);
    MUST(after - before == freed);
    MUST(after <= (before > want ? before : want));
    for (uint32_t i = 0; i < entry_count; i++) {
        uint32_t left =
            kv_index_peek(tree, entries[i]->space, entries[i]->tokens, entries[i]->count);
        MUST(left >= protects[i]);
        MUST(before < want || left == entries[i]->count);
    }
    for (uint32_t i = 0; i < entry_count; i++)
        entries[i]->count =
            kv_index_peek(tree, entries[i]->space, entries[i]->tokens, entries[i]->count);
    model_tidy();
    /* If too little could go, every end that is left is in use. (Two pins on one edge may keep more
     * than each alone.) */
    if (after < want && !any_pin())
        for (uint32_t i = 0; i < entry_count; i++)
            MUST(in_use(entries[i]->page_of[entries[i]->count - 1]));
}

/* Pages for a sequence, by eviction if need be. */
static uint32_t get_page(uint64_t owner)
{
    uint32_t page = kv_pool_alloc(pool, owner);
    if (page == KV_PAGE_NONE) {
        evict(1 + draw(6));
        page = kv_pool_alloc(pool, owner);
    }
    if (page != KV_PAGE_NONE) {
        MUST(kv_pool_refs(pool, page) == 1);
        MUST(kv_pool_filled(pool, page) == 0);
        memset(held[page], 0xAA, sizeof held[page]);
    }
    return page;
}

static void seq_end(seq *s)
{
    for (uint32_t i = 0; i < s->page_count; i++) {
        kv_pool_release(pool, s->pages[i], s->owner);
        kv_pool_unref(pool, s->pages[i]);
    }
    s->live = false;
}

static void remember(uint64_t space, const int32_t *tokens, uint32_t count, kv_hint hint)
{
    old_path *o = &olds[old_count < OLD_MAX ? old_count++ : draw(OLD_MAX)];
    o->space = space;
    o->count = count;
    o->hint = hint;
    MUST(hint.tokens <= count);
    memcpy(o->tokens, tokens, count * sizeof *tokens);
}

/* A prompt: mostly a cached text, cut and continued, sometimes a new one; or a remembered path,
 * continued or cut, with its hint. */
static uint32_t make_prompt(int32_t *tokens, uint64_t *space, kv_hint *hint)
{
    uint32_t count = 0;
    *hint = (kv_hint){0};
    *space = 1 + draw(SPACES);
    if (old_count > 0 && draw(3) == 0) {
        const old_path *o = &olds[draw(old_count)];
        *hint = o->hint;
        count = o->count;
        if (draw(4) != 0)
            *space = o->space;
        if (draw(3) == 0)
            count = draw(2) == 0 ? draw(count + 1) : hint->tokens;
        memcpy(tokens, o->tokens, count * sizeof *tokens);
        if (count < hint->tokens) /* what follows may be something else */
            hint->tokens = count;
    } else if (entry_count > 0 && draw(8) != 0) {
        const entry *e = entries[draw(entry_count)];
        count = draw(3) == 0 ? e->count : draw(e->count + 1);
        if (draw(3) == 0)
            count = count / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
        memcpy(tokens, e->tokens, count * sizeof *tokens);
        if (draw(16) != 0)
            *space = e->space;
    }
    uint32_t more = draw(4) == 0 ? draw(400) : draw(4);
    for (; more > 0 && count < LENGTH_MAX; more--)
        tokens[count++] = (int32_t)draw(3);
    return count;
}

static void expect_match(uint64_t space, const int32_t *tokens, uint32_t count, kv_match m,
                         const uint32_t *pages)
{
    const entry *best;
    MUST(m.tokens == model_match(space, tokens, count, &best));
    MUST(m.page_count == (m.tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS);
    for (uint32_t i = 0; i < m.page_count; i++) {
        uint32_t end = (i + 1) * KV_PAGE_TOKENS < m.tokens ? (i + 1) * KV_PAGE_TOKENS : m.tokens;
        MUST(pages[i] == best->page_of[end - 1]);
        MUST(memcmp(held[pages[i]], tokens + i * KV_PAGE_TOKENS,
                    (end - i * KV_PAGE_TOKENS) * sizeof *tokens) == 0);
    }
}

static void seq_start(seq *s)
{
    int32_t prompt[LENGTH_MAX];
    uint64_t space;
    kv_hint hint;
    uint32_t count = make_prompt(prompt, &space, &hint);
    uint32_t estimate = kv_index_peek(tree, space, prompt, count);
    *s = (seq){.live = true, .space = space, .owner = owner_next++, .hint = hint};
    kv_match m = kv_index_match_from(tree, space, &s->hint, prompt, count, s->pages, now);
    MUST(s->hint.tokens == m.tokens);
    MUST(m.tokens == estimate);
    expect_match(space, prompt, count, m, s->pages);
    s->count = m.tokens;
    s->page_count = m.page_count;
    memcpy(s->tokens, prompt, m.tokens * sizeof *prompt);
    uint32_t rows = m.tokens % KV_PAGE_TOKENS;
    if (rows == 0)
        return;
    uint32_t *last = &s->pages[s->page_count - 1];
    if (kv_pool_claim(pool, *last, s->owner, rows)) {
        done[6]++;
        return;
    }
    uint32_t copy = get_page(s->owner);
    if (copy == KV_PAGE_NONE) { /* the pool is full: give the request up */
        seq_end(s);
        return;
    }
    memcpy(held[copy], held[*last], rows * sizeof(int32_t));
    kv_pool_set_filled(pool, copy, s->owner, rows);
    kv_pool_unref(pool, *last);
    *last = copy;
}

static void seq_append(seq *s)
{
    uint32_t more = draw(3) == 0 ? draw(700) : 1 + draw(5);
    for (; more > 0 && s->count < LENGTH_MAX; more--) {
        uint32_t row = s->count % KV_PAGE_TOKENS;
        if (row == 0) {
            uint32_t page = get_page(s->owner);
            if (page == KV_PAGE_NONE)
                return;
            s->pages[s->page_count++] = page;
        }
        uint32_t page = s->pages[s->page_count - 1];
        MUST(kv_pool_filled(pool, page) == row);
        s->tokens[s->count++] = held[page][row] = (int32_t)draw(3);
        kv_pool_set_filled(pool, page, s->owner, row + 1);
    }
}

static void seq_insert(seq *s)
{
    uint32_t count = draw(3) == 0 ? draw(s->count + 1) : s->count;
    kv_index_stats before = kv_index_get_stats(tree);
    if (kv_index_insert_from(tree, s->space, &s->hint, s->tokens, count, s->pages, now)) {
        model_insert(s, count);
        MUST(s->hint.tokens == count);
        if (draw(2) == 0)
            remember(s->space, s->tokens, s->count, s->hint);
        MUST(kv_index_peek(tree, s->space, s->tokens, count) == count);
        kv_index_stats once = kv_index_get_stats(tree);
        MUST(kv_index_insert(tree, s->space, s->tokens, count, s->pages, now));
        kv_index_stats twice = kv_index_get_stats(tree);
        MUST(memcmp(&once, &twice, sizeof once) == 0);
        model_tidy();
        return;
    }
    done[7]++;
    kv_index_stats after = kv_index_get_stats(tree);
    MUST(memcmp(&before, &after, sizeof before) == 0);
    MUST(before.nodes + 3 > node_max);
    evict(PAGE_COUNT / 2);
}

static void look(void)
{
    int32_t prompt[LENGTH_MAX];
    uint32_t pages[SLOTS_MAX];
    uint64_t space;
    kv_hint hint;
    uint32_t count = make_prompt(prompt, &space, &hint);
    done[8] += hint.tokens > 0;
    kv_match m = kv_index_match_from(tree, space, &hint, prompt, count, pages, now);
    expect_match(space, prompt, count, m, pages);
    MUST(hint.tokens == m.tokens);
    if (draw(4) == 0)
        remember(space, prompt, count, hint);
    if (draw(4) == 0 && m.tokens == count) {
        done[9]++;
        kv_index_note_pause_from(tree, space, &hint, prompt, count, draw(3), now);
    }
    for (uint32_t i = 0; i < m.page_count; i++)
        kv_pool_unref(pool, pages[i]);
}

static void set_pin(void)
{
    if (pin_count == PINS_MAX) { /* forget those that ran out */
        uint32_t kept = 0;
        for (uint32_t i = 0; i < pin_count; i++)
            if (pins[i].until > now)
                pins[kept++] = pins[i];
        pin_count = kept;
        if (pin_count == PINS_MAX)
            return;
    }
    pin *p = &pins[pin_count];
    kv_hint hint;
    uint32_t count = make_prompt(p->tokens, &p->space, &hint);
    p->count = kv_index_peek(tree, p->space, p->tokens, count);
    p->until = now + draw(400);
    kv_index_pin(tree, p->space, p->tokens, count, p->until);
    pin_count++;
}

static void drop(void)
{
    uint64_t space = draw(4) == 0 ? 0 : 1 + draw(SPACES);
    uint32_t before = kv_index_get_stats(tree).pages;
    uint32_t dropped = kv_index_drop(tree, space);
    MUST(before - kv_index_get_stats(tree).pages == dropped);
    for (uint32_t i = 0; i < entry_count; i++)
        if (space == 0 || entries[i]->space == space)
            entries[i]->count = 0;
    model_tidy();
    for (uint32_t i = 0; i < pin_count; i++)
        if (space == 0 || pins[i].space == space)
            pins[i].until = 0;
}

static void step(void)
{
    seq *s = &seqs[draw(SEQS)];
    uint32_t kind = draw(100);
    now += draw(3);
    if (!s->live && kind < 70) {
        done[0]++;
        seq_start(s);
    } else if (kind < 35) {
        done[1]++;
        seq_append(s);
    } else if (kind < 60) {
        done[2]++;
        if (s->live && s->count > 0)
            seq_insert(s);
        if (s->live && draw(2) == 0)
            seq_end(s);
    } else if (kind < 90) {
        done[3]++;
        look();
    } else if (kind < 95) {
        if (now / 1000 % 2 == 0) { /* there are times without any */
            done[4]++;
            set_pin();
        }
    } else if (kind < 99) {
        done[5]++;
        evict(kv_pool_free_count(pool) + draw(5));
    } else if (draw(5) == 0) {
        drop();
    }
}

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtoull(text, NULL, 10) : otherwise;
}

static void run(uint32_t nodes)
{
    seed = setting("WHIMBREL_TEST_SEED", 20260101);
    uint64_t ops = setting("WHIMBREL_TEST_OPS", 200000);
    node_max = nodes;
    cr_assert_eq(kv_pool_create(&pool, PAGE_COUNT, NULL), BASE_OK);
    cr_assert_eq(kv_index_create(&tree, pool, node_max, NULL), BASE_OK);
    for (uint64_t i = 0; i < ops; i++) {
        step();
        if (i % 64 == 0)
            check();
    }
    cr_log_info("seed %lu: %lu operations: %u starts, %u appends, %u inserts, %u looks, %u pins, "
                "%u evictions, "
                "%u claims, %u full trees, %u hints, %u pauses, %lu pages evicted",
                seed, ops, done[0], done[1], done[2], done[3], done[4], done[5], done[6], done[7],
                done[8], done[9], kv_index_get_stats(tree).evicted_pages);
    for (uint32_t i = 0; i < SEQS; i++)
        if (seqs[i].live)
            seq_end(&seqs[i]);
    now += 1000;
    evict(PAGE_COUNT);
    cr_assert_eq(entry_count, 0);
    cr_assert_eq(kv_index_get_stats(tree).nodes, 0);
    cr_assert_eq(kv_pool_free_count(pool), PAGE_COUNT);
    check();
    kv_index_destroy(tree);
    kv_pool_destroy(pool);
}

Test(kv_index_model, random_work_agrees_with_a_naive_list, .timeout = 280)
{
    run(200);
    cr_assert_gt(done[6], 1000, "shared tails were rare");
}

Test(kv_index_model, random_work_with_too_few_nodes, .timeout = 280)
{
    run(24);
    cr_assert_gt(done[7], 100, "the tree was never full");
}
