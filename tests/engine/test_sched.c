/* The planner: pure, so every claim is checked on drawn inputs. */
#include <criterion/criterion.h>

#include <math.h>
#include <string.h>

#include "engine/base/rand.h"
#include "engine/sched.h"

static uint32_t draw(uint64_t *index, uint32_t bound)
{
    return base_rand(7, 0, (*index)++).v[0] % bound;
}

Test(eng_sched, plans_within_limits_and_decodes_first)
{
    uint64_t dice = 0;
    for (int round = 0; round < 20000; round++) {
        eng_sched_seq seqs[32];
        uint32_t order[32], count = 1 + draw(&dice, 32);
        eng_sched_limits limits = {.rows_max = 32 + draw(&dice, 300),
                                   .prefill_chunk = 1 + draw(&dice, 128),
                                   .picks_max = 32 + draw(&dice, 64)};
        bool decoding = false;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t need = draw(&dice, 2) == 0 ? 1 : 1 + draw(&dice, 500);
            seqs[i] = (eng_sched_seq){.need = need,
                                      .draft = need == 1 ? draw(&dice, 8) : 0,
                                      .picks_all = draw(&dice, 4) == 0,
                                      .rank = draw(&dice, 1000)};
            decoding |= need == 1;
        }
        uint32_t rows = eng_sched_plan(seqs, count, &limits, order), sum = 0, picks = 0,
                 prefill = 0;
        for (uint32_t i = 0; i < count; i++) {
            const eng_sched_seq *seq = &seqs[i];
            sum += seq->rows;
            if (seq->need == 1) {
                cr_assert_geq(seq->rows, 1, "round %d: a decoding sequence got no row", round);
                cr_assert_leq(seq->rows, 1 + seq->draft);
                picks += seq->rows;
            } else {
                cr_assert_leq(seq->rows, seq->need);
                picks += seq->picks_all ? seq->rows : seq->rows == seq->need;
                prefill += seq->rows;
            }
        }
        cr_assert_eq(sum, rows);
        cr_assert_leq(rows, limits.rows_max);
        cr_assert_leq(picks, limits.picks_max);
        if (decoding)
            cr_assert_leq(prefill, limits.prefill_chunk);
        cr_assert_gt(rows, 0);
    }
}

Test(eng_sched, prefills_in_order_of_rank)
{
    eng_sched_seq seqs[] = {
        {.need = 100, .rank = 9}, {.need = 100, .rank = 3}, {.need = 100, .rank = 5}};
    uint32_t order[3];
    eng_sched_limits limits = {.rows_max = 150, .prefill_chunk = 64, .picks_max = 8};
    cr_assert_eq(eng_sched_plan(seqs, 3, &limits, order), 150);
    cr_assert_eq(seqs[1].rows, 100);
    cr_assert_eq(seqs[2].rows, 50);
    cr_assert_eq(seqs[0].rows, 0);
}

/* ---- the queue: a machine of a few slots under drawn loads ---- */

#define TENANTS 8
#define JOBS_MAX 60000
#define WAITING_MAX 400
#define SECOND 1000000000ull

typedef struct job {
    eng_sched_entry entry;
    uint32_t tenant;
    int32_t priority;
    uint64_t arrival, left; /* left: 0 while it waits */
    double takes;           /* in truth */
} job;

typedef struct world {
    eng_sched_share slots[WAITING_MAX];
    eng_sched_shares shares;
    job *jobs;
    uint32_t job_count;
    uint32_t waiting[WAITING_MAX], waiting_count;
    double served[TENANTS]; /* machine time */
    uint64_t now, dice;
} world;

static void begin(world *w)
{
    memset(w, 0, sizeof *w);
    w->shares = (eng_sched_shares){.shares = w->slots, .max = WAITING_MAX};
    w->jobs = calloc(JOBS_MAX, sizeof *w->jobs);
}

static void arrive(world *w, uint32_t tenant, uint32_t weight, double cost, double takes,
                   int32_t priority)
{
    cr_assert(w->job_count < JOBS_MAX && w->waiting_count < WAITING_MAX);
    job *j = &w->jobs[w->job_count];
    *j = (job){.tenant = tenant, .priority = priority, .arrival = w->now, .takes = takes};
    j->entry = (eng_sched_entry){.share = eng_sched_join(&w->shares, 100 + tenant, weight),
                                 .rank = eng_sched_rank(w->now, cost, draw(&w->dice, 2), priority),
                                 .number = w->job_count,
                                 .cost_ns = cost,
                                 .ready = true};
    w->waiting[w->waiting_count++] = w->job_count++;
}

/* The next job, which has left the queue and is charged; NULL if none is ready. */
static job *serve(world *w)
{
    const eng_sched_entry *entries[WAITING_MAX];
    for (uint32_t i = 0; i < w->waiting_count; i++)
        entries[i] = &w->jobs[w->waiting[i]].entry;
    uint32_t at = eng_sched_pick(&w->shares, entries, w->waiting_count);
    cr_assert_eq(at, eng_sched_pick(&w->shares, entries, w->waiting_count), "asked again");
    if (at == UINT32_MAX)
        return NULL;
    job *j = &w->jobs[w->waiting[at]];
    cr_assert(j->entry.ready);
    w->waiting[at] = w->waiting[--w->waiting_count];
    eng_sched_charge(&w->shares, j->entry.share, j->entry.cost_ns);
    eng_sched_leave(&w->shares, j->entry.share);
    j->left = w->now + 1;
    w->served[j->tenant] += j->takes;
    w->now += (uint64_t)j->takes;
    eng_sched_settle(&w->shares, 100 + j->tenant, j->takes - j->entry.cost_ns);
    return j;
}

static double jain(const double *x, uint32_t count)
{
    double sum = 0, squares = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += x[i];
        squares += x[i] * x[i];
    }
    return sum * sum / (count * squares);
}

static uint32_t waiting_of(const world *w, uint32_t tenant)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < w->waiting_count; i++)
        count += w->jobs[w->waiting[i]].tenant == tenant;
    return count;
}

Test(eng_sched, equal_tenants_get_equal_time_whatever_they_ask_for, .timeout = 60)
{
    for (uint32_t round = 0; round < 20; round++) {
        world w;
        begin(&w);
        w.dice = round * 1000003u;
        uint32_t tenants = 2 + draw(&w.dice, TENANTS - 1);
        double size[TENANTS], lie[TENANTS];
        for (uint32_t t = 0; t < tenants; t++) {
            size[t] = 1e6 * (1 + draw(&w.dice, 300)); /* one sends large requests, one small */
            lie[t] = 0.25 + 0.25 * draw(&w.dice, 12); /* and what they take is told wrong */
        }
        while (w.now < 300 * SECOND && w.job_count + 64 < JOBS_MAX) {
            for (uint32_t t = 0; t < tenants; t++) /* one floods, one has just enough waiting */
                while (waiting_of(&w, t) < 1 + 5 * t) {
                    double takes = size[t] * (0.5 + draw(&w.dice, 1000) / 1000.0);
                    arrive(&w, t, 1, takes * lie[t], takes, 0);
                }
            serve(&w);
        }
        double index = jain(w.served, tenants);
        cr_assert_geq(index, 0.95, "round %u: %u tenants, Jain %.3f", round, tenants, index);
        free(w.jobs);
    }
}

Test(eng_sched, time_goes_by_weight, .timeout = 60)
{
    world w;
    begin(&w);
    const uint32_t weights[3] = {1, 3, 6};
    while (w.job_count + 64 < JOBS_MAX / 2) {
        for (uint32_t t = 0; t < 3; t++)
            while (waiting_of(&w, t) < 4) {
                double takes = 1e6 * (1 + draw(&w.dice, 100));
                arrive(&w, t, weights[t], takes, takes, 0);
            }
        serve(&w);
    }
    for (uint32_t t = 0; t < 3; t++) {
        double share = w.served[t] / (w.served[0] + w.served[1] + w.served[2]);
        cr_assert(fabs(share - weights[t] / 10.0) < 0.02, "weight %u got %.3f", weights[t], share);
    }
    free(w.jobs);
}

/* Every pair of one tenant and priority, and of priorities apart; and nobody waits for ever while a
 * flood of small ones goes on. */
Test(eng_sched, nobody_is_passed_by_who_came_later_than_the_bound, .timeout = 120)
{
    for (uint32_t round = 0; round < 6; round++) {
        world w;
        begin(&w);
        w.dice = round * 7919u;
        double longest = 0;
        while (w.now < 200 * SECOND && w.job_count < 8000) {
            /* A little more comes than can be served: the queue is never empty, mostly short. */
            for (uint32_t i = draw(&w.dice, 3); i > 0 && w.waiting_count + 2 < WAITING_MAX; i--) {
                double cost = draw(&w.dice, 20) == 0 ? 2e8 * (1 + draw(&w.dice, 50)) : 1e7;
                double takes = fmin(cost, 5e7);
                arrive(&w, draw(&w.dice, 2), 1, cost, takes, (int32_t)draw(&w.dice, 3) - 1);
            }
            if (serve(&w) == NULL)
                w.now += SECOND / 100;
        }
        for (uint32_t i = 0; i < w.job_count; i++) {
            const job *early = &w.jobs[i];
            for (uint32_t k = i + 1; k < w.job_count; k++) {
                const job *late = &w.jobs[k];
                if (late->tenant != early->tenant || late->left == 0)
                    continue;
                int32_t better = early->priority - late->priority;
                int64_t bound =
                    (int64_t)ENG_SCHED_PASS_NS_MAX + better * (int64_t)ENG_SCHED_PRIORITY_NS;
                if ((int64_t)(late->arrival - early->arrival) <= bound)
                    continue;
                cr_assert(early->left != 0 && early->left <= late->left,
                          "round %u: %u was passed by %u", round, i, k);
            }
            if (early->left != 0)
                longest = fmax(longest, (double)(early->left - early->arrival));
        }
        cr_assert_gt(longest, 0);
        free(w.jobs);
    }
}

Test(eng_sched, short_live_and_urgent_work_goes_first)
{
    eng_sched_share slots[4] = {0};
    eng_sched_shares shares = {.shares = slots, .max = 4};
    uint32_t share = eng_sched_join(&shares, 1, 1);
    for (uint32_t i = 1; i < 4; i++)
        cr_assert_eq(eng_sched_join(&shares, 1, 1), share, "one tenant, one share");
    eng_sched_entry e[4] = {
        {.rank = eng_sched_rank(0, 1e9, false, 0)},           /* long, came first */
        {.rank = eng_sched_rank(SECOND, 1e9, true, 0)},       /* as long, its pages are there */
        {.rank = eng_sched_rank(2 * SECOND, 1e7, false, 0)},  /* short */
        {.rank = eng_sched_rank(3 * SECOND, 1e9, false, -1)}, /* long and urgent */
    };
    const eng_sched_entry *all[4];
    for (uint32_t i = 0; i < 4; i++) {
        e[i].ready = true;
        e[i].number = i;
        all[i] = &e[i];
    }
    const uint32_t wanted[4] = {3, 2, 1, 0};
    for (uint32_t i = 0; i < 4; i++) {
        cr_assert_eq(eng_sched_pick(&shares, all, 4), wanted[i], "pick %u", i);
        e[wanted[i]].ready = false;
    }
    cr_assert_eq(eng_sched_pick(&shares, all, 4), UINT32_MAX);
}
