/* eng_admission: who may wait, for how long that will be, and who runs next.
 *
 * The book of all that wait for the engine, in its mailbox or its queue; what the running sequences
 * still take; and the forecast. A request is let in if the queue has room for it by count and by
 * predicted time, in all and for its tenant, and if it can meet its client's deadline; a refusal
 * says when it is worth another try. So nothing waits that cannot be served.
 *
 * The predicted wait. Ahead of a request stand those of its tenant with a smaller rank, A seconds
 * of machine time; while these and it are served, each other tenant j gets what it has waiting, at
 * most its weight's share: min(B_j, (A + own) * w_j / w), which is what deficit round robin gives,
 * but for what each has earned already. The machine's slots share its time evenly: each of the n
 * that run is over when n times what it still takes has passed, and the next in line takes its
 * slot. What waits came to in truth corrects the next predictions by their mean ratio.
 *
 * Pure: no clock, no thread; memory is taken by create alone. The owner's lock guards it. */
#pragma once
#include "engine/engine.h"
#include "engine/forecast.h"
#include "engine/sched.h"

typedef struct eng_admission eng_admission;

typedef struct eng_admission_options {
    uint32_t slots_max;      /* sequences that run at once */
    uint32_t queue_max;      /* requests that wait */
    double queue_ns_max;     /* predicted wait; 0: no bound */
    uint32_t tenant_percent; /* of both, for one tenant; 1 to 100 */
} eng_admission_options;

/* A request that wants in. */
typedef struct eng_ask {
    uint64_t tenant;
    uint32_t weight;  /* see eng_sched_share */
    uint32_t count;   /* requests that come together */
    uint64_t rank;    /* of the first */
    double cost_ns;   /* machine time of all of them */
    double work_ns;   /* of the longest, once it runs */
    uint64_t left_ns; /* until its client's deadline; 0: none */
    bool background;  /* only the count binds it */
} eng_ask;

/* One that waits; a part of the owner's sequence, which outlives its time in the book. */
typedef struct eng_waiter {
    eng_sched_entry entry; /* entry (but its share), tenant and told_ns are the owner's to set */
    uint64_t tenant;
    uint64_t told_ns; /* verdict.wait_ns; 0: it waits for the second time */
    double bias;      /* when it was told */
    uint32_t index;   /* in the book */
} eng_waiter;

base_code eng_admission_create(eng_admission **out, const eng_admission_options *options,
                               base_err *err);
void eng_admission_destroy(eng_admission *admission); /* NULL is fine */
eng_forecast *eng_admission_forecast(eng_admission *admission);

/* What the running ones still take of the machine; and how many could run now, fewer than slots_max
 * where pages are short. */
void eng_admission_running(eng_admission *admission, const double *left_ns, uint32_t count,
                           uint32_t slots);
eng_verdict eng_admission_decide(eng_admission *admission, const eng_ask *ask);

/* There is room for queue_max and once more slots_max, those that were preempted. */
void eng_admission_enter(eng_admission *admission, eng_waiter *waiter, uint32_t weight);
void eng_admission_leave(eng_admission *admission, eng_waiter *waiter);
/* The next to run of those that are ready; NULL: none. It stays in the book. */
eng_waiter *eng_admission_pick(eng_admission *admission);
/* It left the queue to run: its tenant is charged, and its wait is compared with what was told. */
void eng_admission_runs(eng_admission *admission, const eng_waiter *waiter, uint64_t waited_ns);
/* It ended, and took so much more of the machine than it was charged. */
void eng_admission_settle(eng_admission *admission, uint64_t tenant, double ns);

/* The fields of eng_stats that are admission's. */
void eng_admission_count(const eng_admission *admission, eng_stats *stats);
