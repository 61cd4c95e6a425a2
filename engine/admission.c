#include "engine/admission.h"

#include <math.h>
#include <stdlib.h>

#include "engine/base/num.h"

#define BIAS_RATE 0.03 /* slow: a queue that fills is passed more than one that is full */
#define BIAS_MAX 1.5
#define BIAS_LEAST_NS 1e7 /* a shorter wait says nothing about the others */
/* A deadline is met if it is met though the wait takes so much longer than told: predictions are
 * off by a quarter at times. */
#define WAIT_MARGIN 1.25
#define WORK_MARGIN 1.1
#define RETRY_LEAST_NS 1e6

struct eng_admission {
    eng_admission_options options;
    eng_forecast forecast;
    eng_sched_shares shares;
    eng_waiter **book; /* [book_max], the first `waiting` of them */
    const eng_sched_entry **entries;
    uint32_t waiting, book_max;
    double *left; /* [slots_max] ascending: when each running one is over, if nothing changes */
    uint32_t running, slots;
    double *ends; /* [slots_max + book_max], scratch */
    double bias;  /* what waits take for each nanosecond that is told */
    uint64_t refused[ENG_REFUSALS];
};

base_code eng_admission_create(eng_admission **out, const eng_admission_options *options,
                               base_err *err)
{
    eng_admission *a = calloc(1, sizeof *a);
    if (a == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory for the queue");
    static const eng_cost none;
    a->options = *options;
    a->slots = options->slots_max;
    a->bias = 1;
    a->book_max = options->queue_max + options->slots_max;
    a->shares.max = a->book_max;
    eng_forecast_init(&a->forecast, &none, &none);
    if ((a->shares.shares = calloc(a->book_max, sizeof *a->shares.shares)) == NULL ||
        (a->book = calloc(a->book_max, sizeof *a->book)) == NULL ||
        (a->entries = calloc(a->book_max, sizeof *a->entries)) == NULL ||
        (a->left = calloc(options->slots_max, sizeof *a->left)) == NULL ||
        (a->ends = calloc((size_t)a->book_max, sizeof *a->ends)) == NULL) {
        eng_admission_destroy(a);
        return base_fail(err, BASE_NOMEM, "out of memory for a queue of %u", options->queue_max);
    }
    *out = a;
    return BASE_OK;
}

void eng_admission_destroy(eng_admission *a)
{
    if (a == NULL)
        return;
    free(a->shares.shares);
    free(a->book);
    free((void *)a->entries);
    free(a->left);
    free(a->ends);
    free(a);
}

eng_forecast *eng_admission_forecast(eng_admission *a)
{
    return &a->forecast;
}

static int compare(const void *x, const void *y)
{
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

void eng_admission_running(eng_admission *a, const double *left_ns, uint32_t count, uint32_t slots)
{
    CHECK(count <= a->options.slots_max);
    for (uint32_t i = 0; i < count; i++)
        a->left[i] = left_ns[i] * count;
    qsort(a->left, count, sizeof *a->left, compare);
    a->running = count;
    a->slots = (uint32_t)base_max(1, base_min(base_max(slots, count), a->options.slots_max));
}

/* ---- the wait ---- */

typedef struct ahead {
    double ns;
    uint32_t count;
    double own_ns; /* of the tenant's own, all of them */
    uint32_t own_count;
} ahead;

/* What is served before this one. */
static ahead look_ahead(eng_admission *a, const eng_ask *ask)
{
    ahead out = {0};
    double own = 0;
    for (uint32_t i = 0; i < a->waiting; i++)
        a->shares.shares[a->book[i]->entry.share].rounds = 0;
    for (uint32_t i = 0; i < a->waiting; i++) {
        const eng_waiter *w = a->book[i];
        if (w->tenant != ask->tenant) {
            a->shares.shares[w->entry.share].rounds += w->entry.cost_ns;
            continue;
        }
        out.own_ns += w->entry.cost_ns;
        out.own_count++;
        if (w->entry.rank <= ask->rank) {
            own += w->entry.cost_ns;
            out.count++;
        }
    }
    out.ns = own;
    double earned = eng_sched_balance(&a->shares, ask->tenant), others = 0;
    double served = fmax(own + ask->cost_ns - earned, 0) / ask->weight; /* of a weight */
    uint32_t other_count = 0;
    for (uint32_t i = 0; i < a->waiting; i++) {
        const eng_waiter *w = a->book[i];
        eng_sched_share *share = &a->shares.shares[w->entry.share];
        if (w->tenant == ask->tenant)
            continue;
        other_count++;
        if (share->rounds > 0)
            others += fmin(share->rounds, fmax(served * share->weight + share->deficit, 0));
        share->rounds = 0; /* counted */
    }
    double all = 0;
    for (uint32_t i = 0; i < a->waiting; i++)
        all += a->book[i]->tenant != ask->tenant ? a->book[i]->entry.cost_ns : 0;
    out.ns += others;
    if (all > 0)
        out.count += (uint32_t)lround(other_count * others / all);
    return out;
}

/* When the slot for the one behind `count` others, which take `ns` together, is free. Slots that
 * are free now are ends at 0; each of those before takes the first end and makes one later. */
static double wait_behind(eng_admission *a, uint32_t count, double ns)
{
    uint32_t free_slots = a->slots - a->running;
    if (count < free_slots)
        return 0;
    double each = count > 0 ? ns / count * a->slots : 0, end = 0;
    uint32_t left_at = 0, ends_at = 0, ends = 0;
    for (uint32_t i = 0; i <= count; i++) {
        if (i < free_slots) {
            end = 0;
        } else if (left_at < a->running &&
                   (ends_at == ends || a->left[left_at] <= a->ends[ends_at])) {
            end = a->left[left_at++];
        } else {
            end = a->ends[ends_at++];
        }
        if (i < count)
            a->ends[ends++] = end + each;
    }
    return end;
}

static uint64_t whole(double ns)
{
    return (uint64_t)fmin(fmax(ns, 0), 1e18);
}

static eng_verdict refuse(eng_admission *a, eng_verdict verdict, const eng_ask *ask,
                          eng_refusal why, double retry)
{
    a->refused[why] += ask->count;
    verdict.refusal = why;
    verdict.retry_ns = retry > 0 ? whole(fmax(retry, RETRY_LEAST_NS)) : 0;
    return verdict;
}

eng_verdict eng_admission_decide(eng_admission *a, const eng_ask *ask)
{
    const eng_admission_options *options = &a->options;
    ahead before = look_ahead(a, ask);
    double wait = wait_behind(a, before.count, before.ns) * a->bias;
    eng_verdict verdict = {.wait_ns = whole(wait), .work_ns = whole(ask->work_ns)};
    double next = fmax(wait_behind(a, 0, 0), RETRY_LEAST_NS); /* until one leaves the queue */
    if (a->waiting + ask->count > options->queue_max)
        return refuse(a, verdict, ask, ENG_REFUSED_COUNT, next);
    double part = options->tenant_percent / 100.0;
    if (!ask->background) {
        double ns_max = options->queue_ns_max;
        if (before.own_count > 0 &&
            before.own_count + ask->count > (uint32_t)ceil(options->queue_max * part))
            return refuse(a, verdict, ask, ENG_REFUSED_TENANT, next);
        if (before.own_count > 0 && part < 1 && ns_max > 0 && before.own_ns > ns_max * part)
            return refuse(a, verdict, ask, ENG_REFUSED_TENANT, before.own_ns - ns_max * part);
        if (ns_max > 0 && wait > ns_max)
            return refuse(a, verdict, ask, ENG_REFUSED_TIME, wait - ns_max);
        double work = ask->work_ns * WORK_MARGIN, left = (double)ask->left_ns;
        if (left > 0 && wait * WAIT_MARGIN + work > left)
            return refuse(a, verdict, ask, ENG_REFUSED_DEADLINE,
                          work > left ? 0 : wait - (left - work) / WAIT_MARGIN);
    }
    a->refused[ENG_ADMITTED] += ask->count;
    return verdict;
}

/* ---- the book ---- */

void eng_admission_enter(eng_admission *a, eng_waiter *waiter, uint32_t weight)
{
    CHECK(a->waiting < a->book_max);
    waiter->entry.share = eng_sched_join(&a->shares, waiter->tenant, weight);
    waiter->bias = a->bias;
    waiter->index = a->waiting;
    a->book[a->waiting++] = waiter;
}

void eng_admission_leave(eng_admission *a, eng_waiter *waiter)
{
    CHECK(waiter->index < a->waiting && a->book[waiter->index] == waiter);
    eng_sched_leave(&a->shares, waiter->entry.share);
    eng_waiter *last = a->book[--a->waiting];
    a->book[waiter->index] = last;
    last->index = waiter->index;
}

eng_waiter *eng_admission_pick(eng_admission *a)
{
    for (uint32_t i = 0; i < a->waiting; i++)
        a->entries[i] = &a->book[i]->entry;
    uint32_t at = eng_sched_pick(&a->shares, a->entries, a->waiting);
    return at == UINT32_MAX ? NULL : a->book[at];
}

void eng_admission_runs(eng_admission *a, const eng_waiter *waiter, uint64_t waited_ns)
{
    eng_sched_charge(&a->shares, waiter->entry.share, waiter->entry.cost_ns);
    if (waiter->told_ns < BIAS_LEAST_NS || waited_ns < BIAS_LEAST_NS)
        return;
    double ratio = (double)waited_ns / (double)waiter->told_ns * waiter->bias;
    a->bias += BIAS_RATE * (fmin(fmax(ratio, 1 / BIAS_MAX), BIAS_MAX) - a->bias);
}

void eng_admission_settle(eng_admission *a, uint64_t tenant, double ns)
{
    eng_sched_settle(&a->shares, tenant, ns);
}

void eng_admission_count(const eng_admission *a, eng_stats *stats)
{
    double ns = 0;
    for (uint32_t i = 0; i < a->waiting; i++)
        ns += a->book[i]->entry.cost_ns;
    stats->queued_ns = whole(ns);
    stats->queued_tenants = 0;
    for (uint32_t i = 0; i < a->shares.max; i++)
        stats->queued_tenants += a->shares.shares[i].waiting > 0;
    for (uint32_t i = 0; i < ENG_REFUSALS; i++)
        stats->refused[i] = a->refused[i];
    stats->forecast_level = (uint64_t)lroundf(a->forecast.level * 1000);
}
