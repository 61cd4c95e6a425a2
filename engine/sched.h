/* eng_sched: who leaves the queue next, and which rows one step runs. Pure: no clock, no device, no
 * heap; times are nanoseconds that come in.
 *
 * The queue. Tenants share the machine's time by deficit round robin (Shreedhar and Varghese,
 * 1995): in each round a tenant with someone waiting earns a quantum times its weight, and its next
 * request leaves once what it earned covers what that will take. What a request took in truth is
 * settled when it ends. Within a tenant the smallest rank goes first:
 *
 *   rank = arrival + PASS times what its uncached tokens take (half of it where the session's pages
 *          are in memory), at most ENG_SCHED_PASS_NS_MAX, + its priority's steps
 *
 * so short work passes long work, by less the longer that has waited. The bound: no request is
 * passed by one of its tenant and priority that came ENG_SCHED_PASS_NS_MAX or more after it; of a
 * priority p steps better, p * ENG_SCHED_PRIORITY_NS later. Between tenants a head waits at most
 * until each other tenant, by weight, got as much time as it takes, plus one request.
 *
 * A step. Decode rows first: every sequence that only waits for its next token gets its one row;
 * then draft rows while they fit; then prefill rows in order of rank, bounded by prefill_chunk
 * while anyone decodes, so that a long prompt stretches the others' inter-token time by one chunk
 * at most.
 */
#pragma once
#include "engine/base/err.h"

#define ENG_SCHED_PASS_NS_MAX 20000000000ull
#define ENG_SCHED_PRIORITY_NS 10000000000ull /* a step of priority */
#define ENG_SCHED_PRIORITY_MAX 10            /* from minus this to this; smaller goes first */
#define ENG_SCHED_WEIGHT_MAX 1000

/* ---- the queue ---- */

/* One tenant's part. */
typedef struct eng_sched_share {
    uint64_t tenant;
    uint32_t weight;  /* 1 to ENG_SCHED_WEIGHT_MAX */
    uint32_t waiting; /* requests in the queue; 0: the slot may be another tenant's */
    double deficit;   /* machine time earned and not used; below 0: used in advance */
    double rounds;    /* scratch of one pick */
    uint32_t head;
} eng_sched_share;

typedef struct eng_sched_shares {
    eng_sched_share *shares; /* [max], the caller's; all zero at first */
    uint32_t max;            /* at least as many as requests can wait */
    uint32_t cursor;         /* whose turn it is */
} eng_sched_shares;

/* What waits. */
typedef struct eng_sched_entry {
    uint32_t share;  /* from eng_sched_join */
    uint64_t rank;   /* from eng_sched_rank */
    uint64_t number; /* order of arrival, for equal ranks */
    double cost_ns;  /* machine time that it is expected to take */
    bool ready;      /* it may leave */
} eng_sched_entry;

uint64_t eng_sched_rank(uint64_t arrival_ns, double uncached_ns, bool live, int32_t priority);
/* A request of this tenant begins to wait: its share, which is kept until it has left. */
uint32_t eng_sched_join(eng_sched_shares *shares, uint64_t tenant, uint32_t weight);
void eng_sched_leave(eng_sched_shares *shares, uint32_t share);
/* The next of the ready ones, UINT32_MAX if there is none. Asked again it says the same, until
 * something came or was charged. */
uint32_t eng_sched_pick(eng_sched_shares *shares, const eng_sched_entry *const *entries,
                        uint32_t count);
/* It leaves the queue to run, and takes so much of its tenant's time; or, when its tenant is known
 * to have used so much more (less, if negative) than it was charged. */
void eng_sched_charge(eng_sched_shares *shares, uint32_t share, double ns);
void eng_sched_settle(eng_sched_shares *shares, uint64_t tenant, double ns);
/* What the tenant has earned and not used, below 0 if it owes. */
double eng_sched_balance(const eng_sched_shares *shares, uint64_t tenant);

/* ---- a step ---- */

typedef struct eng_sched_seq {
    uint32_t need; /* known tokens whose K/V are not in pages yet, at least 1; 1 means it decodes */
    uint32_t draft; /* draft tokens offered for verification; 0 unless need == 1 */
    uint64_t rank;  /* smaller goes first among prefills */
    bool picks_all; /* a prefill that takes the logits of every row, not of the last one alone */
    uint32_t rows;  /* out: rows of this step, 0 if it waits; > need by the draft rows granted */
} eng_sched_seq;

typedef struct eng_sched_limits {
    uint32_t rows_max;
    uint32_t prefill_chunk; /* prefill rows of a step in which others decode */
    uint32_t picks_max;     /* rows whose logits are taken: decode, draft, the last row of a
                               finished prefill, and those of prefills that take all */
} eng_sched_limits;

/* Returns the sum of rows. `order` is scratch of `count` entries. */
uint32_t eng_sched_plan(eng_sched_seq *seqs, uint32_t count, const eng_sched_limits *limits,
                        uint32_t *order);
