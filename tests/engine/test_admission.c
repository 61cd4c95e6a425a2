/* Who is let in, and what is told of the wait: on queues that were made, and against a machine that
 * is played second by second. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "engine/admission.h"
#include "engine/base/rand.h"

#define MS 1000000.0
#define QUEUE 64

static eng_admission *make(uint32_t slots, double queue_ms, uint32_t percent)
{
    const eng_admission_options options = {.slots_max = slots,
                                           .queue_max = QUEUE,
                                           .queue_ns_max = queue_ms * MS,
                                           .tenant_percent = percent};
    eng_admission *a = NULL;
    cr_assert_eq(eng_admission_create(&a, &options, NULL), BASE_OK);
    return a;
}

static eng_ask ask_of(uint64_t tenant, uint64_t rank, double ms)
{
    return (eng_ask){.tenant = tenant,
                     .weight = 1,
                     .count = 1,
                     .rank = rank,
                     .cost_ns = ms * MS,
                     .work_ns = ms * MS};
}

static eng_verdict decide(eng_admission *a, uint64_t tenant, uint64_t rank, double ms)
{
    const eng_ask ask = ask_of(tenant, rank, ms);
    return eng_admission_decide(a, &ask);
}

static void wait_in(eng_admission *a, eng_waiter *w, uint64_t tenant, uint64_t rank, double ms)
{
    *w = (eng_waiter){.tenant = tenant,
                      .entry = {.rank = rank, .number = rank, .cost_ns = ms * MS, .ready = true}};
    eng_admission_enter(a, w, 1);
}

static void close_to(uint64_t ns, double ms)
{
    cr_assert(fabs((double)ns / MS - ms) < 0.01, "%.3f ms, not %.3f", (double)ns / MS, ms);
}

Test(eng_admission, a_free_slot_is_no_wait)
{
    eng_admission *a = make(4, 1000, 100);
    const double left[3] = {50 * MS, 5 * MS, 500 * MS};
    close_to(decide(a, 1, 1, 10).wait_ns, 0);
    eng_admission_running(a, left, 3, 4);
    close_to(decide(a, 1, 1, 10).wait_ns, 0);
    eng_admission_running(a, left, 3, 3); /* pages are short: nobody else fits */
    close_to(decide(a, 1, 1, 10).wait_ns, 3 * 5);
    eng_admission_destroy(a);
}

Test(eng_admission, a_wait_is_that_of_the_slots_before_it)
{
    eng_admission *a = make(2, 0, 100);
    const double left[2] = {10 * MS, 30 * MS}; /* over after 20 and 60 */
    eng_waiter w[3];
    eng_admission_running(a, left, 2, 2);
    close_to(decide(a, 1, 9, 10).wait_ns, 20);
    wait_in(a, &w[0], 1, 1, 10); /* from 20 to 40 */
    close_to(decide(a, 1, 9, 10).wait_ns, 40);
    wait_in(a, &w[1], 1, 2, 10); /* from 40 to 60 */
    close_to(decide(a, 1, 9, 10).wait_ns, 60);
    close_to(decide(a, 1, 0, 10).wait_ns, 20); /* it passes both */
    eng_admission_leave(a, &w[0]);
    close_to(decide(a, 1, 9, 10).wait_ns, 40);
    eng_admission_leave(a, &w[1]);
    eng_admission_destroy(a);
}

Test(eng_admission, another_tenants_flood_is_waited_for_by_its_share_alone)
{
    eng_admission *a = make(1, 0, 100);
    const double left[1] = {5 * MS};
    eng_waiter w[QUEUE];
    eng_admission_running(a, left, 1, 1);
    for (uint32_t i = 0; i < 20; i++)
        wait_in(a, &w[i], 1, i, 10);
    close_to(decide(a, 1, 99, 10).wait_ns, 205);
    close_to(decide(a, 2, 99, 10).wait_ns, 15); /* one of theirs, then this one */
    for (uint32_t i = 0; i < 20; i++)
        eng_admission_leave(a, &w[i]);
    eng_admission_destroy(a);
}

Test(eng_admission, refuses_by_count_time_and_part)
{
    eng_admission *a = make(1, 100, 50);
    const double left[1] = {5 * MS};
    eng_waiter w[QUEUE];
    eng_stats stats = {0};
    eng_admission_running(a, left, 1, 1);
    for (uint32_t i = 0; i < 5; i++)
        wait_in(a, &w[i], 1, i, 10); /* 50 of 100 ms: all of its part */
    cr_assert_eq(decide(a, 1, 99, 10).refusal, ENG_ADMITTED);
    wait_in(a, &w[5], 1, 5, 10);
    eng_verdict v = decide(a, 1, 99, 10);
    cr_assert_eq(v.refusal, ENG_REFUSED_TENANT);
    close_to(v.retry_ns, 10);
    cr_assert_eq(decide(a, 2, 99, 10).refusal, ENG_ADMITTED);
    for (uint32_t i = 6; i < 6 + 5; i++)
        wait_in(a, &w[i], 2, i, 10);
    v = decide(a, 3, 99, 60); /* each gets 60 before it is served, but has 60 and 50 waiting */
    cr_assert_eq(v.refusal, ENG_REFUSED_TIME);
    close_to(v.wait_ns, 115);
    close_to(v.retry_ns, 15);
    for (uint32_t i = 11; i < QUEUE; i++)
        wait_in(a, &w[i], 4 + i, i, 0.01);
    v = decide(a, 3, 0, 1);
    cr_assert_eq(v.refusal, ENG_REFUSED_COUNT);
    close_to(v.retry_ns, 5);
    eng_admission_count(a, &stats);
    cr_assert_eq(stats.refused[ENG_REFUSED_COUNT], 1);
    cr_assert_eq(stats.refused[ENG_REFUSED_TIME], 1);
    cr_assert_eq(stats.refused[ENG_REFUSED_TENANT], 1);
    cr_assert_eq(stats.refused[ENG_ADMITTED], 2);
    cr_assert_eq(stats.queued_tenants, 2 + QUEUE - 11);
    for (uint32_t i = 0; i < QUEUE; i++)
        eng_admission_leave(a, &w[i]);
    eng_admission_destroy(a);
}

Test(eng_admission, what_cannot_meet_its_deadline_is_not_begun)
{
    eng_admission *a = make(1, 0, 100);
    const double left[1] = {100 * MS};
    eng_ask ask = ask_of(1, 1, 50);
    eng_admission_running(a, left, 1, 1);
    ask.left_ns = (uint64_t)(200 * MS);
    cr_assert_eq(eng_admission_decide(a, &ask).refusal, ENG_ADMITTED);
    ask.left_ns = (uint64_t)(150 * MS);
    eng_verdict v = eng_admission_decide(a, &ask);
    cr_assert_eq(v.refusal, ENG_REFUSED_DEADLINE);
    cr_assert(v.retry_ns > 0 && v.retry_ns < 100 * MS, "a shorter queue would do");
    ask.left_ns = (uint64_t)(40 * MS);
    v = eng_admission_decide(a, &ask);
    cr_assert_eq(v.refusal, ENG_REFUSED_DEADLINE);
    cr_assert_eq(v.retry_ns, 0, "no wait helps");
    ask.background = true;
    cr_assert_eq(eng_admission_decide(a, &ask).refusal, ENG_ADMITTED);
    eng_admission_destroy(a);
}

/* A machine of a few slots that share its time, offered more than it can do by three tenants, with
 * answers of drawn lengths: what was told is near what came, for nine in ten. */
Test(eng_admission, waits_come_as_they_were_told, .timeout = 60)
{
    enum { SLOTS = 4, JOBS = 4000, TENANTS = 3 };
    typedef struct job {
        eng_waiter w;
        double left, told, came;
    } job;
    eng_admission *a = make(SLOTS, 2000, 100);
    job *jobs = calloc(JOBS, sizeof *jobs), *running[SLOTS];
    double now = 0, *errors = calloc(JOBS, sizeof *errors);
    uint32_t count = 0, run = 0, measured = 0;
    uint64_t dice = 0;
    while (count < JOBS) {
        double left[SLOTS];
        for (uint32_t i = 0; i < run; i++)
            left[i] = running[i]->left;
        eng_admission_running(a, left, run, SLOTS);
        if (base_rand(5, 0, dice++).v[0] % 100 < 12) { /* about 3 times what it can do */
            job *j = &jobs[count++];
            j->left = (10 + base_rand(5, 1, dice++).v[0] % 60) * MS;
            uint64_t tenant = base_rand(5, 2, dice++).v[0] % TENANTS;
            uint64_t rank = eng_sched_rank((uint64_t)now, j->left / 4, false, 0);
            eng_ask ask = ask_of(tenant, rank, j->left / MS);
            eng_verdict v = eng_admission_decide(a, &ask);
            if (v.refusal == ENG_ADMITTED) {
                j->told = (double)v.wait_ns;
                j->came = now;
                wait_in(a, &j->w, tenant, rank, j->left / MS);
                j->w.told_ns = v.wait_ns;
            }
        }
        eng_waiter *next;
        while (run < SLOTS && (next = eng_admission_pick(a)) != NULL) {
            job *j = (job *)((char *)next - offsetof(job, w));
            double waited = now - j->came;
            eng_admission_runs(a, next, (uint64_t)waited);
            eng_admission_leave(a, next);
            if (count > JOBS / 4)
                errors[measured++] = fabs(j->told - waited) / fmax(waited, 50 * MS);
            running[run++] = j;
        }
        now += MS;
        for (uint32_t i = run, n = run; i-- > 0;) {
            running[i]->left -= MS / n;
            if (running[i]->left <= 0)
                running[i] = running[--run];
        }
    }
    for (uint32_t i = 1; i < measured; i++)
        for (uint32_t k = i; k > 0 && errors[k - 1] > errors[k]; k--) {
            double swap = errors[k];
            errors[k] = errors[k - 1];
            errors[k - 1] = swap;
        }
    cr_assert_gt(measured, 100);
    cr_log_info("error of the wait: p50 %.3f p90 %.3f of %u", errors[measured / 2],
                errors[measured * 9 / 10], measured);
    cr_assert_leq(errors[measured * 9 / 10], 0.25, "p90 %.3f", errors[measured * 9 / 10]);
    free(jobs);
    free(errors);
    eng_admission_destroy(a);
}
