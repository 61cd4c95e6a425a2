/* The policies that stand beside the index: against plain models of tiny caches. */
#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/page.h"
#include "engine/base/rand.h"
#include "tools/replay_cache.h"
#include "tools/replay_gen.h"

#define EVENTS 12
#define LENGTH 3
#define PAGES_MAX 14 /* two ways at each of three steps: 2 + 4 + 8 prefixes */

static rp_trace trace;
static rp_plan plan;
static base_err err;

/* Prompts of one to three pages down a binary tree of prefixes. */
static void make(uint64_t seed)
{
    trace = (rp_trace){0};
    rp_session *s = rp_trace_add_session(&trace, "tiny", &err);
    cr_assert_not_null(s);
    s->block_tokens = KV_PAGE_TOKENS;
    for (uint32_t i = 0; i < EVENTS; i++) {
        base_rand4 d = base_rand(seed, 0, i);
        uint32_t length = 1 + d.v[0] % LENGTH;
        rp_request *r = rp_trace_add_request(&trace, &err);
        r->at_s = i;
        r->in = length * KV_PAGE_TOKENS;
        for (uint32_t p = 0; p < length; p++)
            rp_trace_add_run(&trace, 2 * p + (d.v[1] >> p & 1), 1, &err);
    }
    rp_trace_close_session(&trace);
    rp_plan_options o = {0};
    cr_assert_eq(rp_plan_make(&plan, &trace, &o, &err), BASE_OK, "%s", err.text);
    cr_assert_leq(plan.distinct_pages, PAGES_MAX);
}

static void end(void)
{
    rp_plan_deinit(&plan);
    rp_trace_deinit(&trace);
}

static uint32_t hits(rp_policy policy, uint32_t capacity)
{
    rp_outcome out;
    cr_assert_eq(rp_simulate(&out, &plan, policy, capacity, &err), BASE_OK, "%s", err.text);
    return (uint32_t)(out.hit_tokens / KV_PAGE_TOKENS);
}

/* Most hits that any choice of victims can have: over all sets that a cache may hold. */
static uint32_t best_possible(uint32_t capacity)
{
    static int best[1 << PAGES_MAX], next[1 << PAGES_MAX];
    uint32_t sets = 1u << plan.distinct_pages;
    memset(best, -1, sizeof best);
    best[0] = 0;
    for (size_t i = 0; i < plan.event_count; i++) {
        const rp_event *e = &plan.events[i];
        uint32_t need = 0;
        for (uint32_t p = 0; p < e->page_count; p++)
            need |= 1u << plan.pages[e->page_at + p];
        memset(next, -1, sizeof next);
        for (uint32_t set = 0; set < sets; set++) {
            if (best[set] < 0)
                continue;
            int hit = 0;
            while (hit < (int)e->page_count && set >> plan.pages[e->page_at + (uint32_t)hit] & 1)
                hit++;
            uint32_t others = set & ~need;
            for (uint32_t kept = others;; kept = (kept - 1) & others) {
                uint32_t after = kept | need;
                if ((uint32_t)__builtin_popcount(after) <= capacity &&
                    next[after] < best[set] + hit)
                    next[after] = best[set] + hit;
                if (kept == 0)
                    break;
            }
        }
        memcpy(best, next, sizeof best);
    }
    int most = 0;
    for (uint32_t set = 0; set < sets; set++)
        most = best[set] > most ? best[set] : most;
    return (uint32_t)most;
}

/* LRU by looking at all pages each time; of one request's pages the deeper is older. */
static uint32_t plain_lru(uint32_t capacity)
{
    uint32_t used[PAGES_MAX] = {0}, hit = 0, resident = 0;
    for (size_t i = 0; i < plan.event_count; i++) {
        const rp_event *e = &plan.events[i];
        const uint32_t *pages = plan.pages + e->page_at;
        for (uint32_t p = 0; p < e->page_count && used[pages[p]] > 0; p++)
            hit++;
        for (uint32_t p = 0; p < e->page_count; p++) {
            resident += used[pages[p]] == 0;
            used[pages[p]] = (uint32_t)(i + 1) * 100 - p;
        }
        for (; resident > capacity; resident--) {
            uint32_t oldest = PAGES_MAX;
            for (uint32_t p = 0; p < plan.distinct_pages; p++)
                if (used[p] > 0 && (oldest == PAGES_MAX || used[p] < used[oldest]))
                    oldest = p;
            used[oldest] = 0;
        }
    }
    return hit;
}

Test(replay_cache, belady_is_the_best_that_is_possible)
{
    for (uint64_t seed = 1; seed <= 60; seed++) {
        make(seed);
        for (uint32_t capacity = LENGTH; capacity <= 7; capacity++)
            cr_assert_eq(hits(RP_BELADY, capacity), best_possible(capacity), "seed %d capacity %u",
                         (int)seed, capacity);
        end();
    }
}

Test(replay_cache, lru_is_exact)
{
    for (uint64_t seed = 1; seed <= 300; seed++) {
        make(seed);
        for (uint32_t capacity = LENGTH; capacity <= PAGES_MAX; capacity++)
            cr_assert_eq(hits(RP_LRU, capacity), plain_lru(capacity), "seed %d capacity %u",
                         (int)seed, capacity);
        end();
    }
}

Test(replay_cache, nobody_is_above_belady_nor_belady_above_infinite)
{
    for (uint64_t seed = 1; seed <= 300; seed++) {
        make(seed);
        for (uint32_t capacity = LENGTH; capacity <= PAGES_MAX; capacity++) {
            uint32_t most = hits(RP_BELADY, capacity), all = hits(RP_INFINITE, 1);
            cr_assert_leq(hits(RP_LRU, capacity), most, "seed %d", (int)seed);
            cr_assert_leq(hits(RP_LFUDA, capacity), most, "seed %d", (int)seed);
            cr_assert_leq(hits(RP_INDEX, capacity), most, "seed %d", (int)seed);
            cr_assert_leq(hits(RP_VALUE, capacity), most, "seed %d", (int)seed);
            cr_assert_leq(most, all);
            if (capacity >= plan.distinct_pages) {
                cr_assert_eq(most, all);
                cr_assert_eq(hits(RP_INDEX, capacity), all);
                cr_assert_eq(hits(RP_LRU, capacity), all);
            }
        }
        end();
    }
}

Test(replay_cache, a_prompt_longer_than_the_cache_counts_what_fits)
{
    make(3);
    for (rp_policy p = 0; p < RP_POLICIES; p++)
        for (uint32_t capacity = 1; capacity < LENGTH; capacity++)
            cr_assert_leq(hits(p, capacity), hits(RP_INFINITE, 1));
    rp_outcome out;
    cr_assert_eq(rp_simulate(&out, &plan, RP_LRU, 0, &err), BASE_INVALID);
    end();
}

Test(replay_cache, the_index_finds_all_that_there_is_when_nothing_need_go)
{
    rp_gen_options o = RP_GEN_DEFAULT;
    o.sessions = 6;
    trace = (rp_trace){0};
    cr_assert_eq(rp_generate(&trace, &o, &err), BASE_OK);
    for (int answers = 0; answers < 2; answers++) {
        rp_plan_options p = {.lanes = 3, .seed = 1, .answers = answers};
        cr_assert_eq(rp_plan_make(&plan, &trace, &p, &err), BASE_OK);
        /* Room for one more page at each place where prompts part inside a page. */
        uint32_t room = plan.distinct_pages + (uint32_t)plan.event_count;
        cr_assert_eq(hits(RP_INDEX, room), hits(RP_INFINITE, 1));
        rp_plan_deinit(&plan);
    }
    rp_trace_deinit(&trace);
}

Test(replay_cache, lanes_bound_how_many_sessions_are_alive)
{
    rp_gen_options o = RP_GEN_DEFAULT;
    o.sessions = 12;
    trace = (rp_trace){0};
    cr_assert_eq(rp_generate(&trace, &o, &err), BASE_OK);
    rp_plan_options p = {.lanes = 3, .seed = 9};
    cr_assert_eq(rp_plan_make(&plan, &trace, &p, &err), BASE_OK);
    cr_assert_eq(plan.event_count, trace.request_count);
    size_t first[12], last[12];
    for (size_t i = plan.event_count; i-- > 0;)
        first[plan.events[i].session] = i;
    for (size_t i = 0; i < plan.event_count; i++)
        last[plan.events[i].session] = i;
    for (size_t i = 0; i < plan.event_count; i++) {
        int alive = 0;
        for (int s = 0; s < 12; s++)
            alive += first[s] <= i && i <= last[s];
        cr_assert_leq(alive, 3);
        cr_assert(i == 0 || plan.events[i].at_ms >= plan.events[i - 1].at_ms);
    }
    end();
}

/* With published figures: 37.4 % and 65.1 % of the Mooncake files' tokens are repeated prefixes. */
Test(replay_cache, ideal_hits_of_the_recorded_traces)
{
    static const struct {
        const char *file;
        double least, most;
    } files[] = {{"mooncake-traces/conversation_trace.jsonl.xz", 0.372, 0.376},
                 {"mooncake-traces/synthetic_trace.jsonl.xz", 0.649, 0.653},
                 {"agentic-coding-traces/traces_subset.jsonl.xz", 0.94, 0.97}};
    const char *data = getenv("WHIMBREL_TEST_DATA");
    if (data == NULL)
        cr_skip_test("WHIMBREL_TEST_DATA names no data folder");
    for (int i = 0; i < 3; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", data, files[i].file);
        trace = (rp_trace){0};
        err = (base_err)BASE_ERR_INIT;
        cr_assert_eq(rp_trace_read(&trace, path, &err), BASE_OK, "%s", err.text);
        rp_plan_options p = {.lanes = 8};
        cr_assert_eq(rp_plan_make(&plan, &trace, &p, &err), BASE_OK, "%s", err.text);
        rp_outcome out;
        cr_assert_eq(rp_simulate(&out, &plan, RP_INFINITE, 1, &err), BASE_OK);
        double hit = (double)out.hit_tokens / (double)plan.input_tokens;
        cr_assert(hit > files[i].least && hit < files[i].most, "%s: %g", files[i].file, hit);
        end();
    }
}
