/* What the tree promises, one claim a test. The randomized comparison with a naive model is
 * test_index_model.c. */
#include <criterion/criterion.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "cache/index.h"

#define SPACE 7u
#define TOKENS_MAX 8192
#define PAGES_MAX (TOKENS_MAX / KV_PAGE_TOKENS)

static kv_pool *pool;
static kv_index *tree;
static uint64_t next_owner = 1;

static void make(uint32_t pages, uint32_t nodes)
{
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(kv_pool_create(&pool, pages, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(kv_index_create(&tree, pool, nodes, &err), BASE_OK, "%s", err.text);
}

static void check(void)
{
    base_err err = BASE_ERR_INIT;
    cr_assert(kv_pool_check(pool, &err), "%s", err.text);
    cr_assert(kv_index_check(tree, &err), "%s", err.text);
}

static void end(void)
{
    check();
    kv_index_destroy(tree);
    cr_assert_eq(kv_pool_free_count(pool), kv_pool_page_count(pool), "a page has leaked");
    kv_pool_destroy(pool);
}

/* A sequence as the engine would hold it. */
typedef struct seq {
    int32_t tokens[TOKENS_MAX];
    uint32_t count;
    uint32_t pages[PAGES_MAX];
    uint32_t page_count;
    uint64_t owner;
} seq;

static seq *seq_make(void)
{
    seq *s = calloc(1, sizeof *s);
    s->owner = next_owner++;
    return s;
}

/* Continues a cached prefix of another sequence's tokens: takes the last page over, or a copy of
 * its rows. */
static uint32_t seq_reuse(seq *s, const int32_t *tokens, uint32_t count, uint64_t now)
{
    kv_match m = kv_index_match(tree, SPACE, tokens, count, s->pages, now);
    cr_assert_eq(m.page_count, (m.tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS);
    memcpy(s->tokens, tokens, m.tokens * sizeof *tokens);
    s->count = m.tokens;
    s->page_count = m.page_count;
    uint32_t rows = m.tokens % KV_PAGE_TOKENS;
    if (rows != 0 && !kv_pool_claim(pool, s->pages[m.page_count - 1], s->owner, rows)) {
        uint32_t copy = kv_pool_alloc(pool, s->owner);
        cr_assert_neq(copy, KV_PAGE_NONE);
        kv_pool_set_filled(pool, copy, s->owner, rows);
        kv_pool_unref(pool, s->pages[m.page_count - 1]);
        s->pages[m.page_count - 1] = copy;
    }
    return m.tokens;
}

static void seq_add(seq *s, int32_t token)
{
    if (s->count % KV_PAGE_TOKENS == 0) {
        uint32_t page = kv_pool_alloc(pool, s->owner);
        cr_assert_neq(page, KV_PAGE_NONE);
        s->pages[s->page_count++] = page;
    }
    s->tokens[s->count++] = token;
    kv_pool_set_filled(pool, s->pages[s->page_count - 1], s->owner,
                       (s->count - 1) % KV_PAGE_TOKENS + 1);
}

/* `count` tokens that differ from those of any other `from`. */
static void seq_add_range(seq *s, int32_t from, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        seq_add(s, from + (int32_t)i);
}

static bool seq_insert(const seq *s, uint64_t now)
{
    return kv_index_insert(tree, SPACE, s->tokens, s->count, s->pages, now);
}

static void seq_end(seq *s)
{
    for (uint32_t i = 0; i < s->page_count; i++) {
        kv_pool_release(pool, s->pages[i], s->owner);
        kv_pool_unref(pool, s->pages[i]);
    }
    free(s);
}

static uint32_t peek(const seq *s, uint32_t count)
{
    return kv_index_peek(tree, SPACE, s->tokens, count);
}

/* Runs a sequence of its own tokens, lists it and ends it; returns its tokens' owner for peeks. */
static seq *run(int32_t from, uint32_t count, uint64_t now)
{
    seq *s = seq_make(), *kept = seq_make();
    seq_add_range(s, from, count);
    cr_assert(seq_insert(s, now));
    memcpy(kept->tokens, s->tokens, sizeof s->tokens);
    memcpy(kept->pages, s->pages, sizeof s->pages);
    kept->count = s->count;
    seq_end(s);
    return kept; /* holds no page: page_count is 0 */
}

static void expect_pages(const seq *s, uint32_t count, const uint32_t *want)
{
    uint32_t got[PAGES_MAX];
    kv_match m = kv_index_match(tree, SPACE, s->tokens, count, got, 1);
    cr_assert_eq(m.tokens, count);
    for (uint32_t i = 0; i < m.page_count; i++) {
        cr_assert_eq(got[i], want[i], "page %u is %u, not %u", i, got[i], want[i]);
        kv_pool_unref(pool, got[i]);
    }
}

Test(kv_index, match_is_exact_down_to_one_token)
{
    make(64, 32);
    seq *a = run(1000, 700, 1);
    uint32_t got[PAGES_MAX];
    for (uint32_t keep = 0; keep <= 700; keep++) {
        seq *b = seq_make();
        memcpy(b->tokens, a->tokens, sizeof a->tokens);
        b->tokens[keep] = -5;
        cr_assert_eq(peek(b, 701), keep);
        kv_match m = kv_index_match(tree, SPACE, b->tokens, 701, got, 2);
        cr_assert_eq(m.tokens, keep);
        cr_assert_eq(m.page_count, (keep + 127) / 128);
        for (uint32_t i = 0; i < m.page_count; i++) {
            cr_assert_eq(got[i], a->pages[i]);
            cr_assert_eq(kv_pool_refs(pool, got[i]), 2);
            kv_pool_unref(pool, got[i]);
        }
        free(b);
    }
    cr_assert_eq(kv_index_get_stats(tree).nodes, 2, "looking does not split");
    free(a);
    end();
}

Test(kv_index, match_ends_inside_a_page_that_is_split)
{
    make(64, 32);
    seq *a = run(1000, 300, 1), *b = seq_make();
    cr_assert_eq(seq_reuse(b, a->tokens, 200, 2), 200);
    cr_assert_neq(b->pages[1], a->pages[1], "row 200 is written: b copies");
    seq_add_range(b, 5000, 150);
    cr_assert(seq_insert(b, 3));
    check();
    expect_pages(a, 300, a->pages);
    expect_pages(b, 350, b->pages); /* its own page 1, shared rows too */
    expect_pages(a, 200, a->pages); /* the common part keeps the old page */
    expect_pages(a, 201, a->pages);
    expect_pages(b, 201, b->pages);
    expect_pages(b, 128, a->pages);
    kv_index_stats stats = kv_index_get_stats(tree);
    cr_assert_eq(stats.nodes, 4);
    cr_assert_eq(stats.pages, 5); /* a: 3, b: 2 of its own */
    cr_assert_eq(stats.tokens, 450);
    cr_assert_eq(kv_pool_refs(pool, a->pages[1]), 2, "listed by the front and by a's rest");
    seq_end(b);
    free(a);
    end();
}

Test(kv_index, a_partly_filled_page_goes_on_under_another_owner)
{
    make(64, 32);
    seq *a = run(1000, 200, 1), *b = seq_make();
    cr_assert_eq(seq_reuse(b, a->tokens, 200, 2), 200);
    cr_assert_eq(b->pages[1], a->pages[1], "nobody has written row 200: b appends there");
    seq_add_range(b, 5000, 100);
    cr_assert(seq_insert(b, 3));
    cr_assert_eq(kv_index_get_stats(tree).nodes, 2, "the edge is longer, not divided");
    cr_assert_eq(kv_index_get_stats(tree).pages, 3);
    cr_assert_eq(kv_pool_refs(pool, a->pages[1]), 2);
    expect_pages(b, 300, b->pages);
    seq_end(b);
    free(a);
    end();
}

Test(kv_index, a_page_that_goes_on_below_a_branch_is_listed_by_both)
{
    make(64, 32);
    seq *a = run(1000, 50, 1), *b = seq_make(), *c = seq_make();
    cr_assert_eq(seq_reuse(c, a->tokens, 50, 2), 50); /* appends in a's page, tells nobody yet */
    seq_add_range(c, 3000, 20);
    cr_assert_eq(seq_reuse(b, a->tokens, 50, 2), 50); /* copies */
    seq_add_range(b, 5000, 20);
    cr_assert(seq_insert(b, 3));
    cr_assert(seq_insert(c, 4));
    check();
    cr_assert_eq(kv_index_get_stats(tree).nodes, 4);
    cr_assert_eq(kv_pool_refs(pool, a->pages[0]), 3, "front, c's child, c");
    expect_pages(b, 70, b->pages);
    expect_pages(c, 70, a->pages);
    seq_end(b);
    seq_end(c);
    check();
    cr_assert_eq(kv_index_evict(tree, 64, 9), 2);
    cr_assert_eq(kv_index_get_stats(tree).nodes, 0);
    free(a);
    end();
}

Test(kv_index, insert_twice_changes_nothing)
{
    make(64, 32);
    seq *a = seq_make(), *b = seq_make();
    seq_add_range(a, 1000, 300);
    seq_add_range(b, 1000, 300); /* the same tokens, computed again */
    cr_assert(seq_insert(a, 1));
    kv_index_stats before = kv_index_get_stats(tree);
    cr_assert(seq_insert(a, 2));
    cr_assert(seq_insert(b, 3));
    kv_index_stats after = kv_index_get_stats(tree);
    cr_assert_eq(memcmp(&before, &after, sizeof before), 0);
    expect_pages(b, 300, a->pages);
    seq_end(a);
    seq_end(b);
    cr_assert_eq(kv_pool_free_count(pool), 61, "b's own pages are free, a's are cached");
    end();
}

Test(kv_index, nothing_is_listed_before_it_is_written, .signal = SIGABRT)
{
    make(64, 32);
    seq *a = seq_make();
    seq_add_range(a, 1000, 100);
    a->tokens[a->count++] = 1100;
    seq_insert(a, 1);
}

Test(kv_index, a_page_cannot_hold_two_texts, .signal = SIGABRT)
{
    make(64, 32);
    seq *a = seq_make();
    seq_add_range(a, 1000, 100);
    cr_assert(seq_insert(a, 1));
    a->tokens[0] = 3;
    seq_insert(a, 2);
}

Test(kv_index, namespaces_share_nothing)
{
    make(64, 32);
    seq *a = run(1000, 300, 1);
    uint64_t others[] = {0, 1, SPACE + 1, SPACE | 1ull << 32, SPACE | 1ull << 63};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        cr_assert_eq(kv_index_peek(tree, others[i], a->tokens, 300), 0);
    cr_assert_eq(peek(a, 300), 300);
    seq *b = seq_make();
    seq_add_range(b, 1000, 300);
    cr_assert(kv_index_insert(tree, SPACE + 1, b->tokens, 300, b->pages, 2));
    cr_assert_eq(kv_index_get_stats(tree).pages, 6);
    cr_assert_eq(kv_index_drop(tree, SPACE), 3);
    cr_assert_eq(peek(a, 300), 0);
    cr_assert_eq(kv_index_peek(tree, SPACE + 1, a->tokens, 300), 300);
    cr_assert_eq(kv_index_drop(tree, 12345), 0);
    cr_assert_eq(kv_index_drop(tree, 0), 3);
    cr_assert_eq(kv_index_get_stats(tree).nodes, 0);
    seq_end(b);
    free(a);
    end();
}

Test(kv_index, drop_leaves_running_sequences_their_pages)
{
    make(64, 32);
    seq *a = seq_make();
    seq_add_range(a, 1000, 300);
    cr_assert(seq_insert(a, 1));
    cr_assert_eq(kv_index_drop(tree, SPACE), 3);
    cr_assert_eq(kv_pool_free_count(pool), 61);
    seq_add_range(a, 2000, 300);
    cr_assert(seq_insert(a, 2));
    cr_assert_eq(peek(a, 600), 600);
    seq_end(a);
    end();
}

Test(kv_index, the_leaf_used_longest_ago_goes_first_from_its_end)
{
    make(12, 32);
    seq *a = run(1000, 500, 10), *b = run(2000, 500, 20), *c = run(3000, 500, 30);
    uint32_t got[PAGES_MAX];
    kv_match m = kv_index_match(tree, SPACE, a->tokens, 500, got, 40);
    for (uint32_t i = 0; i < m.page_count; i++)
        kv_pool_unref(pool, got[i]);
    cr_assert_eq(kv_pool_free_count(pool), 0);
    cr_assert_eq(kv_index_evict(tree, 1, 50), 1);
    cr_assert_eq(peek(b, 500), 384);
    cr_assert_eq(kv_index_evict(tree, 3, 50), 2);
    cr_assert_eq(peek(b, 500), 128);
    cr_assert_eq(peek(a, 500) + peek(c, 500), 1000);
    cr_assert_eq(kv_index_evict(tree, 5, 50), 2);
    cr_assert_eq(peek(b, 500), 0);
    cr_assert_eq(peek(c, 500), 384);
    cr_assert_eq(peek(a, 500), 500);
    cr_assert_eq(kv_index_evict(tree, 5, 50), 0, "enough is free already");
    cr_assert_eq(kv_index_get_stats(tree).evicted_pages, 5);
    free(a), free(b), free(c);
    end();
}

/* Pages that were never handed out in a row: each is a span of its own, nine runs an edge. */
Test(kv_index, an_edge_of_scattered_pages_goes_from_its_end_page_by_page)
{
    make(130, 32);
    seq *a = seq_make(), *b = seq_make(), *c = seq_make();
    for (uint32_t page = 0; page < 60; page++) {
        seq_add_range(a, 10000 + 128 * (int32_t)page, 128);
        seq_add_range(b, 30000 + 128 * (int32_t)page, 128);
    }
    cr_assert(seq_insert(a, 10));
    cr_assert(seq_insert(b, 100));
    cr_assert_eq(seq_reuse(c, a->tokens, 31 * 128 + 5, 11), 31 * 128 + 5);
    seq_add_range(c, 50000, 10);
    cr_assert(seq_insert(c, 50)); /* cuts a's edge inside a page */
    uint32_t pages[PAGES_MAX], used = a->page_count;
    memcpy(pages, a->pages, sizeof pages);
    int32_t tokens[TOKENS_MAX];
    memcpy(tokens, a->tokens, sizeof tokens);
    seq_end(a), seq_end(b), seq_end(c);
    check();
    for (uint32_t left = used; left-- > 32;) {
        cr_assert_eq(kv_index_evict(tree, kv_pool_free_count(pool) + 1, 200), 1);
        cr_assert_eq(kv_index_peek(tree, SPACE, tokens, 60 * 128), left * 128);
        cr_assert_eq(kv_pool_refs(pool, pages[left]), 0);
        check();
    }
    while (kv_index_evict(tree, kv_pool_free_count(pool) + 1, 200) > 0)
        check();
    cr_assert_eq(kv_index_get_stats(tree).pages, 0);
    end();
}

Test(kv_index, an_abandoned_branch_is_older_than_its_stem)
{
    make(64, 32);
    seq *a = run(1000, 600, 10), *other = run(9000, 100, 20), *b = seq_make();
    cr_assert_eq(seq_reuse(b, a->tokens, 300, 30), 300);
    seq_add_range(b, 5000, 100);
    cr_assert(seq_insert(b, 31));
    seq_end(b);
    uint32_t free_now = kv_pool_free_count(pool);
    cr_assert_eq(kv_index_evict(tree, free_now + 2, 40), 2);
    cr_assert_eq(peek(a, 600), 384, "a's rest was last used at 10, though its stem was at 30");
    cr_assert_eq(peek(other, 100), 100);
    free(a), free(other);
    end();
}

Test(kv_index, eviction_passes_over_what_a_sequence_uses)
{
    make(12, 32);
    seq *a = run(1000, 500, 10), *b = run(2000, 500, 20), *user = seq_make();
    kv_match m = kv_index_match(tree, SPACE, a->tokens, 256, user->pages, 5);
    user->page_count = m.page_count;
    cr_assert_eq(kv_index_evict(tree, 12, 50), 6, "two of a's, all of b's");
    cr_assert_eq(peek(a, 500), 256);
    cr_assert_eq(peek(b, 500), 0);
    cr_assert_eq(kv_pool_free_count(pool), 10);
    check();
    seq_end(user);
    cr_assert_eq(kv_index_evict(tree, 12, 60), 2);
    cr_assert_eq(kv_index_get_stats(tree).nodes, 0);
    free(a), free(b);
    end();
}

Test(kv_index, a_pin_holds_until_it_ends)
{
    make(12, 32);
    seq *a = run(1000, 500, 10), *b = run(2000, 500, 20);
    kv_index_pin(tree, SPACE, a->tokens, 200, 100);
    kv_index_pin(tree, SPACE, a->tokens, 200, 90); /* the longer one wins */
    check();
    cr_assert_eq(kv_index_evict(tree, 12, 99), 6);
    cr_assert_eq(peek(a, 500), 256, "the pages under 200 tokens stay");
    cr_assert_eq(peek(b, 500), 0);
    cr_assert_eq(kv_index_evict(tree, 12, 100), 2);
    free(a), free(b);
    end();
}

Test(kv_index, a_pin_may_be_ended_before_its_time)
{
    make(12, 32);
    seq *a = run(1000, 500, 10);
    kv_index_pin(tree, SPACE, a->tokens, 500, 100);
    cr_assert_eq(kv_index_evict(tree, 12, 50), 0);
    kv_index_pin(tree, SPACE, a->tokens, 500, 0);
    check();
    cr_assert_eq(kv_index_evict(tree, 12, 50), 4);
    free(a);
    end();
}

Test(kv_index, a_pin_is_divided_with_its_edge)
{
    make(64, 32);
    seq *a = run(1000, 600, 10), *b = seq_make();
    kv_index_pin(tree, SPACE, a->tokens, 400, 100);
    cr_assert_eq(seq_reuse(b, a->tokens, 200, 20), 200);
    seq_add_range(b, 5000, 10);
    cr_assert(seq_insert(b, 21));
    seq_end(b);
    check();
    kv_index_evict(tree, 64, 50);
    cr_assert_eq(peek(a, 600), 512);
    check();
    kv_index_evict(tree, 64, 100);
    cr_assert_eq(peek(a, 600), 0);
    free(a);
    end();
}

Test(kv_index, node_max_refuses_and_harms_nothing)
{
    make(64, 4);
    seq *a = run(1000, 300, 1), *b = run(2000, 300, 2), *c = seq_make(), *d = seq_make();
    cr_assert_eq(seq_reuse(c, a->tokens, 200, 3), 200);
    seq_add_range(c, 3000, 10);
    kv_index_stats before = kv_index_get_stats(tree);
    cr_assert_not(seq_insert(c, 4), "a division needs two nodes, one is left");
    kv_index_stats after = kv_index_get_stats(tree);
    cr_assert_eq(memcmp(&before, &after, sizeof before), 0);
    check();
    seq_add_range(d, 4000, 10);
    cr_assert(seq_insert(d, 5));
    seq *e = seq_make();
    seq_add_range(e, 6000, 10);
    cr_assert_not(seq_insert(e, 6));
    cr_assert_not(kv_index_insert(tree, SPACE + 1, e->tokens, 10, e->pages, 6));
    seq_end(c), seq_end(d), seq_end(e);
    check();
    kv_index_evict(tree, 64, 9);
    cr_assert_eq(kv_index_get_stats(tree).nodes, 0);
    free(a), free(b);
    end();
}

Test(kv_index, thousands_of_children_and_a_deep_chain)
{
    make(6000, 20000);
    seq *stem = run(1, 64, 1);
    for (int32_t i = 0; i < 5000; i++) {
        seq *s = seq_make();
        cr_assert_eq(seq_reuse(s, stem->tokens, 64, 2), 64);
        seq_add(s, 100000 + i);
        seq_add(s, i);
        cr_assert(seq_insert(s, 3 + (uint64_t)i));
        seq_end(s);
    }
    check();
    stem->tokens[64] = 100000 + 4321;
    stem->tokens[65] = 4321;
    cr_assert_eq(peek(stem, 66), 66);
    stem->tokens[65] = 1;
    cr_assert_eq(peek(stem, 66), 65);
    stem->tokens[64] = 5;
    cr_assert_eq(peek(stem, 66), 64);
    cr_assert_eq(kv_index_evict(tree, 5000, 9000), 4000);
    check();
    free(stem);

    kv_index_drop(tree, 0); /* now a branch after every token of one path, front to back */
    seq *a = run(1, 2000, 1);
    for (uint32_t keep = 1; keep < 2000; keep++) {
        seq *b = seq_make();
        seq_reuse(b, a->tokens, keep, 2);
        seq_add(b, -1);
        cr_assert(seq_insert(b, 3));
        seq_end(b);
    }
    check();
    cr_assert_eq(peek(a, 2000), 2000);
    expect_pages(a, 2000, a->pages);
    free(a);
    end();
}

Test(kv_index, sizes_that_cannot_be_are_refused)
{
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(kv_pool_create(&pool, 4, NULL), BASE_OK);
    cr_assert_eq(kv_index_create(&tree, pool, 1, &err), BASE_INVALID);
    cr_assert_null(tree);
    cr_assert_str_eq(err.text, "an index of 1 nodes is not possible");
    kv_index_destroy(NULL);
    kv_pool_destroy(pool);
}

/* The cases of known prefix-cache defects that pages and tree alone can show. */

Test(kv_index_cases, B090_a_hit_is_justified_by_equal_tokens)
{
    make(256, 256);
    seq *prompts[32];
    for (int32_t i = 0; i < 32; i++)
        prompts[i] = run(i * 1000, 420, (uint64_t)i);
    for (int32_t i = 0; i < 32; i++)
        for (int32_t j = 0; j < 32; j++) {
            uint32_t got[PAGES_MAX];
            kv_match m = kv_index_match(tree, SPACE, prompts[i]->tokens, 420, got, 50);
            for (uint32_t k = 0; k < m.page_count; k++) {
                cr_assert(i == j || got[k] != prompts[j]->pages[k]);
                kv_pool_unref(pool, got[k]);
            }
        }
    for (int32_t i = 0; i < 32; i++)
        free(prompts[i]);
    end();
}

Test(kv_index_cases, B091_rows_written_past_the_stop_are_not_matched)
{
    make(64, 64);
    seq *a = seq_make(), *b = seq_make();
    seq_add_range(a, 0, 3904);
    seq_add_range(a, 7000, 3); /* accepted behind the stop: written, never listed */
    cr_assert(kv_index_insert(tree, SPACE, a->tokens, 3904, a->pages, 1));
    cr_assert_eq(peek(a, 3907), 3904);
    kv_pool_release(pool, a->pages[30], a->owner);
    cr_assert_eq(seq_reuse(b, a->tokens, 3904, 2), 3904);
    cr_assert_neq(b->pages[30], a->pages[30], "b may not write where a's rows are");
    seq_end(a), seq_end(b);
    end();
}

Test(kv_index_cases, B095_duplicate_pages_stay_while_they_are_mapped)
{
    make(16, 64);
    seq *a = seq_make(), *b = seq_make();
    seq_add_range(a, 0, 300);
    seq_add_range(b, 0, 300);
    cr_assert(seq_insert(a, 1));
    cr_assert(seq_insert(b, 1));
    for (uint32_t i = 0; i < 3; i++)
        cr_assert_eq(kv_pool_refs(pool, b->pages[i]), 1);
    uint32_t page;
    while ((page = kv_pool_alloc(pool, 999)) != KV_PAGE_NONE) {
        for (uint32_t i = 0; i < 3; i++)
            cr_assert(page != a->pages[i] && page != b->pages[i]);
        kv_pool_release(pool, page, 999);
    }
    cr_assert_eq(kv_index_evict(tree, 1, 9), 0, "all is in use");
    check();
    for (uint32_t i = 0; i < 16; i++)
        if (kv_pool_refs(pool, i) == 1 && i != b->pages[0] && i != b->pages[1] && i != b->pages[2])
            kv_pool_unref(pool, i);
    seq_end(a), seq_end(b);
    end();
}

Test(kv_index_cases, B098_a_recycled_page_has_no_old_key)
{
    make(4, 64);
    seq *a = run(0, 500, 1);
    cr_assert_eq(kv_index_evict(tree, 2, 2), 2);
    seq *b = seq_make();
    seq_add_range(b, 5000, 200);
    cr_assert_eq(kv_pool_refs(pool, b->pages[0]), 1);
    cr_assert(seq_insert(b, 3));
    cr_assert_eq(peek(a, 500), 256, "the two pages that were not reused");
    expect_pages(a, 256, a->pages);
    seq_end(b);
    cr_assert_eq(kv_index_evict(tree, 4, 4), 4);
    cr_assert_eq(peek(a, 500), 0);
    free(a);
    end();
}

Test(kv_index_cases, B100_lengths_around_a_page)
{
    make(64, 64);
    uint32_t lengths[] = {127, 128, 129, 255, 256, 257};
    for (size_t i = 0; i < 6; i++) {
        seq *a = run((int32_t)i * 1000, lengths[i], 1);
        /* The engine always leaves one token to compute. */
        cr_assert_eq(peek(a, lengths[i] - 1), lengths[i] - 1);
        cr_assert_eq(peek(a, lengths[i]), lengths[i]);
        free(a);
    }
    end();
}

Test(kv_index_cases, B104_branch_from_a_long_shared_prefix)
{
    make(64, 64);
    seq *a = seq_make(), *b = seq_make();
    seq_add_range(a, 0, 1000);
    seq_add_range(a, 5000, 300);
    cr_assert(seq_insert(a, 1));
    uint32_t used = kv_pool_free_count(pool);
    cr_assert_eq(seq_reuse(b, a->tokens, 1000, 2), 1000);
    seq_add_range(b, 6000, 300);
    cr_assert(seq_insert(b, 3));
    cr_assert_eq(used - kv_pool_free_count(pool), 4,
                 "the copy of the page at the branch and three more");
    seq_add_range(a, 7000, 10);
    cr_assert_eq(peek(a, 1310), 1300);
    cr_assert_eq(peek(b, 1300), 1300);
    seq_end(a), seq_end(b);
    end();
}

/* ---- hints ---- */

/* A match with a hint is the match without it. */
static void expect_same(uint64_t space, kv_hint hint, const int32_t *tokens, uint32_t count)
{
    uint32_t got[PAGES_MAX], want[PAGES_MAX];
    kv_match with = kv_index_match_from(tree, space, &hint, tokens, count, got, 1);
    kv_match plain = kv_index_match(tree, space, tokens, count, want, 1);
    cr_assert_eq(with.tokens, plain.tokens);
    cr_assert_eq(with.page_count, plain.page_count);
    cr_assert_eq(hint.tokens, plain.tokens);
    cr_assert_eq(memcmp(got, want, plain.page_count * sizeof *got), 0);
    for (uint32_t i = 0; i < plain.page_count; i++) {
        kv_pool_unref(pool, got[i]);
        kv_pool_unref(pool, want[i]);
    }
}

Test(kv_index, a_hint_holds_while_its_path_does)
{
    make(64, 32);
    seq *a = seq_make(), *b = seq_make();
    kv_hint hint = {0}, early;
    seq_add_range(a, 1000, 300);
    cr_assert(kv_index_insert_from(tree, SPACE, &hint, a->tokens, 300, a->pages, 1));
    cr_assert_eq(hint.tokens, 300);
    early = hint;
    expect_same(SPACE, hint, a->tokens, 300);
    expect_same(SPACE, hint, a->tokens, 299);
    expect_same(SPACE, hint, a->tokens, 1);
    expect_same(SPACE, hint, a->tokens, 0);
    seq_add_range(a, 2000, 1000); /* the leaf grows */
    cr_assert(kv_index_insert_from(tree, SPACE, &hint, a->tokens, 1300, a->pages, 2));
    expect_same(SPACE, early, a->tokens, 1300);
    expect_same(SPACE, early, a->tokens, 310);
    cr_assert_eq(seq_reuse(b, a->tokens, 140, 3), 140); /* the edge is split before the hint */
    seq_add_range(b, 5000, 200);
    cr_assert(seq_insert(b, 4));
    expect_same(SPACE, early, a->tokens, 1300);
    expect_same(SPACE, hint, a->tokens, 130);
    kv_index_note_pause_from(tree, SPACE, &early, a->tokens, 200, 1, 5); /* and once more */
    for (uint32_t count = 1; count <= 1300; count += 3) {
        expect_same(SPACE, early, a->tokens, count);
        expect_same(SPACE, hint, a->tokens, count);
    }
    a->tokens[700] = 1; /* past the early hint */
    expect_same(SPACE, early, a->tokens, 1300);
    a->tokens[300] = 1;
    expect_same(SPACE, early, a->tokens, 1300);
    seq_end(a), seq_end(b);
    end();
}

Test(kv_index, a_hint_that_does_not_hold_is_none)
{
    make(64, 32);
    seq *a = run(1000, 600, 1), *b = run(9000, 600, 9);
    uint32_t pages[PAGES_MAX];
    kv_hint hint = {0};
    kv_match m = kv_index_match_from(tree, SPACE, &hint, a->tokens, 600, pages, 2);
    for (uint32_t i = 0; i < m.page_count; i++)
        kv_pool_unref(pool, pages[i]);
    expect_same(SPACE + 1, hint, a->tokens, 600);
    expect_same(SPACE, hint, b->tokens, 600); /* another text: its first page says so */
    kv_hint broken[] = {{hint.stamp, hint.node, 601},
                        {hint.stamp, hint.node, UINT32_MAX},
                        {hint.stamp, hint.node + 1, 600},
                        {hint.stamp, UINT32_MAX, 600},
                        {hint.stamp + 1, hint.node, 600},
                        {0, hint.node, 600},
                        {SPACE, 0, 1},
                        {0, 31, 600}};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++)
        expect_same(SPACE, broken[i], a->tokens, 600);
    a->tokens[599]++; /* or its last */
    expect_same(SPACE, hint, a->tokens, 600);
    a->tokens[599]--;

    /* The end goes and other tokens take its place, in the same node. */
    cr_assert_eq(kv_index_evict(tree, kv_pool_free_count(pool) + 1, 10), 1);
    expect_same(SPACE, hint, a->tokens, 600);
    seq *c = seq_make();
    cr_assert_eq(seq_reuse(c, a->tokens, 512, 11), 512);
    seq_add_range(c, 7000, 200);
    cr_assert(seq_insert(c, 11));
    expect_same(SPACE, hint, a->tokens, 600);
    expect_same(SPACE, hint, c->tokens, 712);
    seq_end(c);

    /* The node is another text's, and then nobody's. */
    kv_index_drop(tree, SPACE);
    expect_same(SPACE, hint, a->tokens, 600);
    seq *d = run(1000, 600, 12);
    expect_same(SPACE, hint, a->tokens, 600);
    expect_same(SPACE, hint, d->tokens, 600);
    free(a), free(b), free(d);
    end();
}

/* ---- erasing ---- */

Test(kv_index, erasing_a_path_leaves_what_others_share)
{
    make(64, 32);
    seq *a = run(1000, 600, 1), *b = seq_make();
    cr_assert_eq(seq_reuse(b, a->tokens, 300, 2), 300);
    seq_add_range(b, 5000, 200);
    cr_assert(seq_insert(b, 3));
    int32_t tokens[TOKENS_MAX];
    memcpy(tokens, b->tokens, sizeof tokens);
    seq_end(b);
    cr_assert_eq(kv_index_erase(tree, SPACE, a->tokens, 600, 600), 0, "all of it is kept");
    cr_assert_eq(kv_index_erase(tree, SPACE + 1, a->tokens, 600, 0), 0);
    cr_assert_gt(kv_index_erase(tree, SPACE, a->tokens, 600, 300), 0);
    check();
    cr_assert_eq(peek(a, 600), 300);
    cr_assert_eq(kv_index_peek(tree, SPACE, tokens, 500), 500);
    cr_assert_gt(kv_index_erase(tree, SPACE, tokens, 500, 140), 0);
    check();
    cr_assert_eq(kv_index_peek(tree, SPACE, tokens, 500), 140);
    cr_assert_gt(kv_index_erase(tree, SPACE, tokens, 140, 0), 0);
    cr_assert_eq(kv_index_get_stats(tree).nodes, 0);
    free(a);
    end();
}

Test(kv_index, erasing_unlists_what_a_sequence_uses)
{
    make(64, 32);
    seq *a = seq_make();
    seq_add_range(a, 1000, 400);
    cr_assert(seq_insert(a, 1));
    cr_assert_eq(kv_index_erase(tree, SPACE, a->tokens, 400, 0), 4);
    cr_assert_eq(peek(a, 400), 0);
    cr_assert_eq(kv_pool_free_count(pool), 60);
    seq_end(a);
    end();
}

/* ---- by value ---- */

#define SECOND 1000u

/* Sessions of two tools, half of them each: one answers in 2 s, one in 60 s, and there is memory
 * for half of the sessions. Returns the short tool's part of cached tokens in the ten minutes after
 * the 50th pause has ended, of either tool. */
static double two_tools(kv_policy policy)
{
    enum { EACH = 8, LENGTH = 512, PAGES = LENGTH / KV_PAGE_TOKENS, LEARNT = 50 };
    struct {
        seq *s;
        uint64_t next, pause;
        bool begun;
    } sessions[2 * EACH];
    make(EACH * PAGES, 128);
    kv_index_set_policy(tree, policy, SECOND);
    double hit = 0, asked = 0;
    for (uint32_t i = 0; i < 2 * EACH; i++) {
        sessions[i].s = seq_make();
        for (int t = 0; t < LENGTH; t++)
            sessions[i].s->tokens[t] = (int32_t)(i * 10000) + t;
        sessions[i].begun = false;
        sessions[i].pause = i < EACH ? 2 * SECOND : 60 * SECOND;
        sessions[i].next = 1 + i * sessions[i].pause / (2 * EACH);
    }
    uint32_t ended = 0; /* pauses */
    uint64_t until = UINT64_MAX;
    for (uint64_t now = 1; now < until; now++)
        for (uint32_t i = 0; i < 2 * EACH; i++) {
            if (sessions[i].next != now)
                continue;
            seq *s = sessions[i].s;
            uint32_t pages[PAGES], have;
            kv_match m = kv_index_match(tree, SPACE, s->tokens, LENGTH, pages, now);
            have = m.page_count;
            if (i < EACH && ended >= LEARNT) {
                hit += m.tokens;
                asked += LENGTH;
            }
            ended += sessions[i].begun;
            sessions[i].begun = true;
            if (ended == LEARNT && until == UINT64_MAX)
                until = now + 600 * SECOND;
            kv_index_evict(tree, PAGES - have, now);
            for (uint32_t p = have; p < PAGES; p++) {
                pages[p] = kv_pool_alloc(pool, s->owner);
                cr_assert_neq(pages[p], KV_PAGE_NONE);
                kv_pool_set_filled(pool, pages[p], s->owner, KV_PAGE_TOKENS);
                kv_pool_release(pool, pages[p], s->owner);
            }
            cr_assert(kv_index_insert(tree, SPACE, s->tokens, LENGTH, pages, now));
            kv_index_note_pause(tree, SPACE, s->tokens, LENGTH, i < EACH ? 11 : 12, now);
            for (uint32_t p = 0; p < PAGES; p++)
                kv_pool_unref(pool, pages[p]);
            sessions[i].next = now + sessions[i].pause;
        }
    for (uint32_t i = 0; i < 2 * EACH; i++)
        free(sessions[i].s);
    end();
    return hit / asked;
}

Test(kv_index, the_short_tool_keeps_its_pages)
{
    double lru = two_tools(KV_POLICY_LRU), value = two_tools(KV_POLICY_VALUE);
    cr_log_info("after 50 pauses: short tool %.1f %% cached by value, %.1f %% by last use",
                100 * value, 100 * lru);
    cr_assert_geq(value, 0.95);
    cr_assert_gt(value, lru);
}

Test(kv_index, without_notes_value_is_last_use)
{
    make(12, 32);
    kv_index_set_policy(tree, KV_POLICY_VALUE, SECOND);
    seq *a = run(1000, 500, 10 * SECOND), *b = run(2000, 500, 40 * SECOND),
        *c = run(3000, 500, 90 * SECOND);
    cr_assert_eq(kv_index_evict(tree, 4, 100 * SECOND), 4);
    cr_assert_eq(peek(a, 500), 0);
    cr_assert_eq(kv_index_evict(tree, 8, 100 * SECOND), 4);
    cr_assert_eq(peek(b, 500), 0);
    cr_assert_eq(peek(c, 500), 500);
    free(a), free(b), free(c);
    end();
}

Test(kv_index, with_pauses_that_nobody_notes_value_is_last_use)
{
    enum { N = 2000 };
    make(N, 3 * N);
    kv_index_set_policy(tree, KV_POLICY_VALUE, SECOND);
    for (int32_t i = 0; i < N; i++)
        free(run(i * 1000, KV_PAGE_TOKENS, 1 + (uint64_t)i * SECOND));
    cr_assert_eq(kv_index_evict(tree, N / 2, (N + 1) * SECOND), N / 2);
    seq *s = seq_make();
    for (int32_t i = 0; i < N; i++) {
        for (int32_t t = 0; t < KV_PAGE_TOKENS; t++)
            s->tokens[t] = i * 1000 + t;
        cr_assert_eq(peek(s, KV_PAGE_TOKENS), i < N / 2 ? 0 : KV_PAGE_TOKENS, "session %d", i);
    }
    seq_end(s);
    end();
}

Test(kv_index, a_pin_holds_under_value_too)
{
    make(12, 32);
    kv_index_set_policy(tree, KV_POLICY_VALUE, SECOND);
    seq *a = run(1000, 500, 10), *b = run(2000, 500, 20), *c = run(3000, 500, 30);
    kv_index_pin(tree, SPACE, a->tokens, 500, 100 * SECOND);
    cr_assert_eq(kv_index_evict(tree, 12, 50 * SECOND), 8);
    cr_assert_eq(peek(a, 500), 500);
    cr_assert_eq(kv_index_evict(tree, 12, 101 * SECOND), 4);
    free(a), free(b), free(c);
    end();
}

Test(kv_index, a_dearer_page_stays_longer)
{
    make(8, 32);
    kv_index_set_policy(tree, KV_POLICY_VALUE, SECOND);
    kv_index_set_cost(tree, 128);
    seq *deep = run(1000, 768, 10), *flat = run(9000, 256, 10);
    cr_assert_eq(kv_index_evict(tree, 2, 20), 2);
    cr_assert_eq(peek(flat, 256), 0);
    cr_assert_eq(peek(deep, 768), 768);
    free(deep), free(flat);
    end();
}

Test(kv_index, who_said_that_it_is_over_goes_first_and_takes_no_one_along)
{
    make(16, 32);
    kv_index_set_policy(tree, KV_POLICY_VALUE, SECOND);
    seq *other = run(9000, 500, 10 * SECOND), *open_one = run(1000, 500, 20 * SECOND);
    /* It begins as the one before, and was used last. */
    seq *s = seq_make(), *over = seq_make();
    cr_assert_eq(seq_reuse(s, open_one->tokens, 256, 30 * SECOND), 256);
    seq_add_range(s, 5000, 244);
    cr_assert(seq_insert(s, 30 * SECOND));
    memcpy(over->tokens, s->tokens, sizeof s->tokens);
    seq_end(s);
    kv_index_note_pause(tree, SPACE, other->tokens, 500, 7, 11 * SECOND);
    kv_index_note_pause(tree, SPACE, open_one->tokens, 500, 7, 21 * SECOND);
    kv_index_note_pause(tree, SPACE, over->tokens, 500, KV_CLASS_OVER, 31 * SECOND);
    cr_assert_eq(kv_index_evict(tree, kv_pool_free_count(pool) + 2, 40 * SECOND), 2);
    cr_assert_eq(peek(over, 500), 256);
    cr_assert_eq(peek(open_one, 500), 500);
    cr_assert_eq(peek(other, 500), 500);
    free(other), free(open_one), free(over);
    end();
}

Test(kv_index, edges_are_listed_from_the_first_token_on)
{
    make(16, 64);
    kv_edge edges[8];
    cr_expect_eq(kv_index_list(tree, edges, 8, 0), 0);
    seq *a = seq_make();
    for (int32_t i = 0; i < 200; i++)
        seq_add(a, i);
    seq_insert(a, 1);
    seq *b = seq_make();
    seq_reuse(b, a->tokens, 100, 2);
    for (int32_t i = 0; i < 30; i++)
        seq_add(b, 1000 + i);
    seq_insert(b, 3);
    cr_assert_eq(kv_index_list(tree, edges, 8, 4), 3);
    cr_expect(edges[0].start == 0 && edges[0].tokens == 100 && edges[0].children == 2);
    cr_expect(edges[0].parent == UINT32_MAX && edges[0].in_use && edges[0].space == SPACE);
    uint32_t tails = edges[1].tokens + edges[2].tokens;
    cr_expect(edges[1].start == 100 && edges[2].parent == edges[0].id && tails == 130);
    cr_expect_eq(kv_index_list(tree, edges, 2, 4), 2, "bounded");
    kv_index_pin(tree, SPACE, a->tokens, 200, 100);
    kv_index_list(tree, edges, 8, 99);
    cr_expect(edges[0].pinned);
    kv_index_list(tree, edges, 8, 100);
    cr_expect_not(edges[0].pinned);
    seq_end(a);
    seq_end(b);
    kv_index_list(tree, edges, 8, 100);
    cr_expect_not(edges[0].in_use);
    end();
}
