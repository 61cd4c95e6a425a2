/* Tree, pool and disk together against a naive model under random work.
 *
 * A turn does what the engine does: takes what memory has, reads what only the disk has, computes
 * the rest, lists all of it and offers it to the disk. The model is a list of texts that were
 * offered. A match on disk is as long as the longest common prefix over that list once everything
 * is written (and never longer), and every row of every page that a turn is given is the one that
 * its tokens demand. With a bound on the disk, records go; then a match may be shorter, never
 * longer.
 *
 * WHIMBREL_TEST_SEED and WHIMBREL_TEST_OPS choose another run; WHIMBREL_LONG=1 makes 10^6
 * operations of 6 * 10^4. A failure prints its seed. */
#include <criterion/criterion.h>

#include <stdio.h>
#include <time.h>

#include "cache/index.h"
#include "engine/base/log.h"
#include "engine/base/rand.h"
#include "store_fixture.h"

#define SPACES 3
#define SLOTS 8
#define LENGTH_MAX (SLOTS * KV_PAGE_TOKENS)
#define ENTRIES_MAX 400
#define POOL_PAGES 100

typedef struct entry {
    uint64_t space;
    uint32_t count;
    int32_t tokens[LENGTH_MAX];
} entry;

static const kv_plane planes[] = {{KV_PLANE_K, 0, 0, 3}, {KV_PLANE_V, 0, 0, 2}};
static const kv_plane draft_planes[] = {{KV_PLANE_DRAFT_K, 0, 0, 2}};
static kv_layout target, draft;
static fix_device device;
static kv_pool *pool;
static kv_index *tree;
static kv_store *store;
static kv_store_options options;
static char dir[64];
static entry *entries[ENTRIES_MAX];
static uint32_t entry_count;
static uint64_t now = 1, seed, draws, owners = 1;
static bool bounded;
static uint64_t restored, computed, from_memory, restarts, erased;

static bool drafted[POOL_PAGES]; /* all rows of the page have the drafter's, too */

static uint32_t draw(uint32_t bound)
{
    base_rand4 r = base_rand(seed, 1, draws++);
    return (uint32_t)((uint64_t)r.v[0] * bound >> 32);
}

#define MUST(cond) cr_assert(cond, "seed %lu, draw %lu", seed, draws)

static int no_sync(int fd)
{
    return 0;
}

static void open_store(void)
{
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(kv_store_open(&store, pool, &options, &err), BASE_OK, "%s", err.text);
}

static void check(void)
{
    base_err err = BASE_ERR_INIT;
    cr_assert(kv_pool_check(pool, &err), "seed %lu, draw %lu: %s", seed, draws, err.text);
    cr_assert(kv_index_check(tree, &err), "seed %lu, draw %lu: %s", seed, draws, err.text);
    cr_assert(kv_store_check(store, &err), "seed %lu, draw %lu: %s", seed, draws, err.text);
}

static uint32_t common(const int32_t *a, uint32_t a_count, const int32_t *b, uint32_t b_count)
{
    uint32_t i = 0;
    while (i < a_count && i < b_count && a[i] == b[i])
        i++;
    return i;
}

static uint32_t model_match(uint64_t space, const int32_t *tokens, uint32_t count)
{
    uint32_t longest = 0;
    for (uint32_t i = 0; i < entry_count; i++) {
        uint32_t n = entries[i]->space == space
                         ? common(entries[i]->tokens, entries[i]->count, tokens, count)
                         : 0;
        longest = n > longest ? n : longest;
    }
    return longest;
}

static void model_remove(uint32_t at)
{
    free(entries[at]);
    entries[at] = entries[--entry_count];
}

static void model_add(uint64_t space, const int32_t *tokens, uint32_t count)
{
    if (model_match(space, tokens, count) == count)
        return;
    for (uint32_t i = entry_count; i-- > 0;)
        if (entries[i]->space == space &&
            common(entries[i]->tokens, entries[i]->count, tokens, count) == entries[i]->count)
            model_remove(i); /* the new one holds it */
    MUST(entry_count < ENTRIES_MAX);
    entry *e = entries[entry_count++] = malloc(sizeof *e);
    e->space = space;
    e->count = count;
    memcpy(e->tokens, tokens, count * sizeof *tokens);
}

static void flush(void)
{
    MUST(kv_store_flush(store));
    kv_store_poll(store);
}

/* Follows what the disk has after something has been taken from it. */
static void model_follow(void)
{
    flush();
    for (uint32_t i = entry_count; i-- > 0;) {
        entry *e = entries[i];
        uint32_t left = kv_store_peek(store, e->space, e->tokens, e->count);
        MUST(left <= e->count);
        e->count = left;
        if (left == 0)
            model_remove(i);
    }
}

static uint32_t make_prompt(int32_t *tokens, uint64_t *space)
{
    uint32_t count = 0;
    *space = 1 + draw(SPACES);
    if (entry_count > 0 && draw(10) > 0) {
        const entry *e = entries[draw(entry_count)];
        *space = e->space;
        count = draw(3) == 0 ? draw(e->count + 1) : e->count;
        memcpy(tokens, e->tokens, count * sizeof *tokens);
    }
    uint32_t more = draw(4) == 0 ? draw(300) : draw(40);
    for (; more > 0 && count < LENGTH_MAX; more--)
        tokens[count++] = (int32_t)draw(3);
    return count;
}

static uint32_t get_page(uint64_t owner)
{
    if (kv_pool_free_count(pool) == 0) {
        kv_store_poll(store);
        kv_index_evict(tree, 1 + draw(4), now);
    }
    if (kv_pool_free_count(pool) == 0) {
        flush(); /* what is left is on its way to the disk */
        kv_index_evict(tree, 1, now);
    }
    uint32_t page = kv_pool_alloc(pool, owner);
    if (page != KV_PAGE_NONE)
        drafted[page] = true;
    return page;
}

/* Reads what only the disk has into pages of its own; returns how far they reach. */
static uint32_t restore_pages(uint64_t space, const int32_t *tokens, uint32_t count, uint32_t have,
                              uint32_t *pages, uint32_t *page_count, uint64_t owner)
{
    uint32_t fresh[SLOTS];
    kv_restore *restore = kv_store_find(store, space, tokens, count, have);
    if (restore == NULL)
        return have;
    uint32_t first = kv_restore_first_page(restore), n = kv_restore_page_count(restore);
    uint32_t end = kv_restore_tokens(restore), base = first * KV_PAGE_TOKENS, got = 0;
    MUST(end > have);
    MUST(first == have / KV_PAGE_TOKENS);
    MUST(end <= model_match(space, tokens, count));
    while (got < n && (fresh[got] = get_page(owner)) != KV_PAGE_NONE)
        got++;
    if (got < n) {
        while (got > 0)
            kv_pool_unref(pool, fresh[--got]);
        kv_restore_end(restore);
        return have;
    }
    kv_restore_start(restore, fresh, draw(4));
    if (draw(20) == 0)
        kv_restore_cancel(restore);
    while (!kv_restore_done(restore))
        nanosleep(&(struct timespec){.tv_nsec = 1000}, NULL);
    uint32_t good = kv_restore_good(restore);
    if (good == n) {
        MUST(fix_right(&device, 0, space, tokens, base, end, fresh, base));
        for (uint32_t i = 0; i < n; i++) {
            uint32_t from = base + i * KV_PAGE_TOKENS, to = from + KV_PAGE_TOKENS;
            if (kv_restore_has_draft(restore, i))
                MUST(fix_right(&device, 1, space, tokens, from, to < end ? to : end, fresh, base));
        }
        if (have % KV_PAGE_TOKENS != 0) /* the memory's part of that page */
            kv_pool_unref(pool, pages[first]);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t rows = end - base - i * KV_PAGE_TOKENS;
            pages[first + i] = fresh[i];
            drafted[fresh[i]] = kv_restore_has_draft(restore, i);
            kv_pool_set_filled(pool, fresh[i], owner,
                               rows < KV_PAGE_TOKENS ? rows : KV_PAGE_TOKENS);
        }
        *page_count = first + n;
        restored += end - have;
        have = end;
    } else {
        for (uint32_t i = 0; i < n; i++)
            kv_pool_unref(pool, fresh[i]);
    }
    kv_restore_end(restore);
    return have;
}

static void offer(uint64_t space, const int32_t *tokens, uint32_t count, const uint32_t *pages)
{
    uint32_t draft_from = (count + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    while (draft_from > 0 && drafted[pages[draft_from - 1]] && draw(8) > 0)
        draft_from--;
    for (;;) {
        kv_store_stats before = kv_store_get_stats(store);
        kv_store_write(store, space, tokens, count, pages, draft_from);
        kv_store_stats after = kv_store_get_stats(store);
        if (before.refused_queue == after.refused_queue &&
            before.refused_records == after.refused_records)
            break;
        kv_store_flush(store);
        kv_store_poll(store);
        if (bounded)
            break;
    }
    model_add(space, tokens, count);
}

static void turn(void)
{
    int32_t tokens[LENGTH_MAX];
    uint32_t pages[SLOTS], page_count;
    uint64_t space, owner = owners++;
    uint32_t count = make_prompt(tokens, &space);
    kv_match m = kv_index_match(tree, space, tokens, count, pages, now);
    page_count = m.page_count;
    from_memory += m.tokens;
    uint32_t have = restore_pages(space, tokens, count, m.tokens, pages, &page_count, owner);
    MUST(fix_right(&device, 0, space, tokens, 0, have, pages, 0));
    uint32_t tail = have % KV_PAGE_TOKENS, run = have;
    if (have < count && tail != 0 && have == m.tokens &&
        !kv_pool_claim(pool, pages[page_count - 1], owner, tail)) {
        uint32_t copy = get_page(owner);
        if (copy == KV_PAGE_NONE)
            goto out;
        for (int k = 0; k < 2; k++)
            memcpy(fix_plane(&device, k, copy, 0), fix_plane(&device, k, pages[page_count - 1], 0),
                   device.layouts[k]->record_bytes);
        drafted[copy] = drafted[pages[page_count - 1]];
        kv_pool_set_filled(pool, copy, owner, tail);
        kv_pool_unref(pool, pages[page_count - 1]);
        pages[page_count - 1] = copy;
    }
    while (run < count) {
        if (run % KV_PAGE_TOKENS == 0) {
            uint32_t page = get_page(owner);
            if (page == KV_PAGE_NONE)
                break;
            pages[page_count++] = page;
        }
        uint32_t end = page_count * KV_PAGE_TOKENS < count ? page_count * KV_PAGE_TOKENS : count;
        fix_compute(&device, space, tokens, run, end, pages);
        kv_pool_set_filled(pool, pages[page_count - 1], owner, (end - 1) % KV_PAGE_TOKENS + 1);
        computed += end - run;
        run = end;
    }
    if (run > 0 && kv_index_insert(tree, space, tokens, run, pages, now)) {
        if (draw(2) == 0)
            kv_index_note_pause(tree, space, tokens, run, draw(4), now);
    }
    if (run > 0)
        offer(space, tokens, run, pages);
out:
    for (uint32_t i = 0; i < page_count; i++) {
        kv_pool_release(pool, pages[i], owner);
        kv_pool_unref(pool, pages[i]);
    }
    kv_store_poll(store);
}

static void erase(void)
{
    int32_t tokens[LENGTH_MAX];
    uint64_t space;
    uint32_t count = make_prompt(tokens, &space), kept = draw(count + 1);
    if (draw(20) == 0) {
        kv_store_erase_space(store, space);
        kv_index_drop(tree, space);
        for (uint32_t i = entry_count; i-- > 0;)
            if (entries[i]->space == space)
                model_remove(i);
        MUST(kv_store_peek(store, space, tokens, count) == 0);
    } else if (kept < count) {
        uint32_t before[ENTRIES_MAX];
        flush();
        for (uint32_t i = 0; i < entry_count; i++)
            before[i] =
                kv_store_peek(store, entries[i]->space, entries[i]->tokens, entries[i]->count);
        kv_store_erase(store, space, tokens, count, kept);
        uint32_t listed = kv_index_peek(tree, space, tokens, kept);
        kv_index_erase(tree, space, tokens, count, kept);
        MUST(kv_index_peek(tree, space, tokens, kept) == listed);
        uint32_t whole = kept / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
        for (uint32_t i = 0; i < entry_count; i++) {
            const entry *e = entries[i];
            uint32_t left = kv_store_peek(store, e->space, e->tokens, e->count);
            uint32_t floor =
                e->space == space && common(e->tokens, e->count, tokens, count) >= whole
                    ? whole
                    : before[i];
            MUST(left >= (floor < before[i] ? floor : before[i]));
            /* A text that is the erased one and nothing else is gone past `kept`, unless a branch
             * shares some of that page. */
            if (e->space == space && e->count == count && before[i] == count &&
                common(e->tokens, count, tokens, count) == count)
                MUST(left < whole + KV_PAGE_TOKENS || left < count);
        }
        model_follow();
    }
    erased++;
}

static void step(void)
{
    uint32_t kind = draw(1000);
    now += draw(3);
    if (kind < 250) {
        turn();
    } else if (kind < 960) {
        int32_t tokens[LENGTH_MAX];
        uint64_t space;
        uint32_t count = make_prompt(tokens, &space);
        uint32_t disk = kv_store_peek(store, space, tokens, count);
        MUST(disk <= model_match(space, tokens, count));
        MUST(kv_index_peek(tree, space, tokens, count) <= count);
    } else if (kind < 975) {
        kv_index_evict(tree, kv_pool_free_count(pool) + draw(20), now);
    } else if (kind < 990) {
        int32_t tokens[LENGTH_MAX];
        uint64_t space;
        uint32_t count = make_prompt(tokens, &space);
        flush();
        uint32_t disk = kv_store_peek(store, space, tokens, count);
        uint32_t want = model_match(space, tokens, count);
        MUST(disk == want || (bounded && disk < want));
    } else if (kind < 994) {
        erase();
    } else if (kind < 995) {
        kv_store_close(store, false);
        open_store();
        restarts++;
    } else if (kind < 996) {
        kv_index_set_policy(tree, draw(2) ? KV_POLICY_VALUE : KV_POLICY_LRU, 100);
    }
    if (entry_count > ENTRIES_MAX - 8) { /* make the list short again */
        kv_store_erase_space(store, 1 + draw(SPACES));
        model_follow();
    }
}

static void run(uint64_t bytes_max)
{
    const char *seed_text = getenv("WHIMBREL_TEST_SEED"), *ops_text = getenv("WHIMBREL_TEST_OPS");
    const char *lasting = getenv("WHIMBREL_LONG");
    uint64_t ops = lasting != NULL && *lasting == '1' ? 1000000 : 60000;
    seed = seed_text != NULL ? strtoull(seed_text, NULL, 10) : 20260103;
    ops = ops_text != NULL ? strtoull(ops_text, NULL, 10) : ops;
    base_log_set_level(BASE_LOG_ERROR);
    cr_assert_eq(kv_layout_init(&target, planes, 2, NULL), BASE_OK);
    cr_assert_eq(kv_layout_init(&draft, draft_planes, 1, NULL), BASE_OK);
    fix_device_init(&device, &target, &draft);
    cr_assert_eq(kv_pool_create(&pool, POOL_PAGES, NULL), BASE_OK);
    cr_assert_eq(kv_index_create(&tree, pool, 3 * POOL_PAGES + 8, NULL), BASE_OK);
    snprintf(dir, sizeof dir, "/tmp/whimbrel-tier-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    strcat(dir, "/kv");
    bounded = bytes_max < 1 << 30;
    options = (kv_store_options){
        .dir = dir,
        .fingerprint = "weights",
        .numerics = "cpu/1",
        .layout = &target,
        .draft_fingerprint = "drafter",
        .draft = &draft,
        .device = {.ctx = &device, .copy_out = fix_copy_out, .copy_in = fix_copy_in},
        .io = {.fdatasync = no_sync},
        .bytes_max = bytes_max,
        .records_max = 16384,
        .segment_bytes = 1 << 20,
        .slots_max = SLOTS,
    };
    open_store();
    for (uint64_t i = 0; i < ops; i++) {
        step();
        if (i % 256 == 0)
            check();
    }
    check();
    cr_log_info(
        "seed %lu: %lu operations; tokens from memory %lu, from disk %lu, computed %lu; %lu "
        "restarts, %lu erasures",
        seed, ops, from_memory, restored, computed, restarts, erased);
    cr_assert_gt(restored, ops / 4);
    kv_store_stats s = kv_store_get_stats(store);
    cr_assert_eq(s.corrupt + s.read_errors + s.write_errors, 0);
    kv_store_close(store, false);
    kv_index_destroy(tree);
    cr_assert_eq(kv_pool_free_count(pool), POOL_PAGES, "a page has leaked");
    kv_pool_destroy(pool);
    while (entry_count > 0)
        model_remove(0);
    fix_device_deinit(&device);
    *strrchr(dir, '/') = '\0';
    fix_remove_dir(dir);
}

Test(kv_tier_model, random_work_agrees_with_a_list_of_texts, .timeout = 1500)
{
    run(1ull << 30);
}

Test(kv_tier_model, random_work_on_a_disk_that_is_too_small, .timeout = 1500)
{
    run(2 << 20);
}
