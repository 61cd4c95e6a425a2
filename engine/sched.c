#include "engine/sched.h"

#include <math.h>

#include "engine/base/num.h"

#define PASS 8.0       /* a request may be passed for so many times what it takes */
#define LIVE 0.5       /* of that, where its session's pages are in memory */
#define QUANTUM 1e7    /* of a round and weight, in nanoseconds */
#define DEBT_MAX 1e10  /* more than this used in advance is forgiven: nobody starves for it */
#define CREDIT_MAX 1e9 /* what a tenant brings along that had nothing waiting */

/* ---- the queue ---- */

uint64_t eng_sched_rank(uint64_t arrival_ns, double uncached_ns, bool live, int32_t priority)
{
    double pass = PASS * fmax(uncached_ns, 0) * (live ? LIVE : 1);
    uint64_t steps = (uint64_t)(priority + ENG_SCHED_PRIORITY_MAX);
    return arrival_ns + (uint64_t)fmin(pass, (double)ENG_SCHED_PASS_NS_MAX) +
           steps * ENG_SCHED_PRIORITY_NS;
}

static eng_sched_share *share_of(const eng_sched_shares *shares, uint64_t tenant)
{
    for (uint32_t i = 0; i < shares->max && shares->shares[i].weight > 0; i++)
        if (shares->shares[i].tenant == tenant)
            return &shares->shares[i];
    return NULL;
}

uint32_t eng_sched_join(eng_sched_shares *shares, uint64_t tenant, uint32_t weight)
{
    eng_sched_share *share = share_of(shares, tenant);
    if (share == NULL) {
        /* Slots fill from the front; one that was never used forgets nobody's debt. */
        for (uint32_t i = 0; i < shares->max; i++) {
            eng_sched_share *at = &shares->shares[i];
            if (at->weight == 0 || (share == NULL && at->waiting == 0))
                share = at;
            if (at->weight == 0)
                break;
        }
        CHECK(share != NULL);
        *share = (eng_sched_share){.tenant = tenant};
    }
    if (share->waiting == 0)
        share->deficit = fmin(share->deficit, CREDIT_MAX);
    share->weight = (uint32_t)base_max(1, base_min(weight, ENG_SCHED_WEIGHT_MAX));
    share->waiting++;
    return (uint32_t)(share - shares->shares);
}

void eng_sched_leave(eng_sched_shares *shares, uint32_t share)
{
    DCHECK(shares->shares[share].waiting > 0);
    shares->shares[share].waiting--;
}

static bool is_before(const eng_sched_entry *a, const eng_sched_entry *b)
{
    return a->rank < b->rank || (a->rank == b->rank && a->number < b->number);
}

uint32_t eng_sched_pick(eng_sched_shares *shares, const eng_sched_entry *const *entries,
                        uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        shares->shares[entries[i]->share].head = UINT32_MAX;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t *head = &shares->shares[entries[i]->share].head;
        if (entries[i]->ready && (*head == UINT32_MAX || is_before(entries[i], entries[*head])))
            *head = i;
    }
    /* Rounds until a head is covered; of equal ones, the next from the cursor on. */
    uint32_t best = UINT32_MAX, best_away = 0;
    double rounds = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = entries[i]->share;
        eng_sched_share *share = &shares->shares[at];
        if (share->head != i)
            continue;
        double short_of = entries[i]->cost_ns - share->deficit;
        share->rounds = short_of > 0 ? ceil(short_of / (QUANTUM * share->weight)) : 0;
        uint32_t away =
            at >= shares->cursor ? at - shares->cursor : at + shares->max - shares->cursor;
        if (best == UINT32_MAX || share->rounds < rounds ||
            (share->rounds <= rounds && away < best_away)) {
            best = i;
            best_away = away;
            rounds = share->rounds;
        }
    }
    if (best == UINT32_MAX)
        return best;
    for (uint32_t i = 0; i < count && rounds > 0; i++) {
        eng_sched_share *share = &shares->shares[entries[i]->share];
        if (share->head == i)
            share->deficit += rounds * QUANTUM * share->weight;
    }
    shares->cursor = entries[best]->share;
    return best;
}

void eng_sched_charge(eng_sched_shares *shares, uint32_t share, double ns)
{
    double *deficit = &shares->shares[share].deficit;
    *deficit = fmax(*deficit - ns, -DEBT_MAX);
}

void eng_sched_settle(eng_sched_shares *shares, uint64_t tenant, double ns)
{
    eng_sched_share *share = share_of(shares, tenant);
    if (share != NULL)
        eng_sched_charge(shares, (uint32_t)(share - shares->shares), ns);
}

double eng_sched_balance(const eng_sched_shares *shares, uint64_t tenant)
{
    const eng_sched_share *share = share_of(shares, tenant);
    if (share == NULL)
        return 0;
    return share->waiting > 0 ? share->deficit : fmin(share->deficit, CREDIT_MAX);
}

/* ---- a step ---- */

/* Insertion sort: the list is short and almost sorted. */
static void sort_by_rank(uint32_t *order, const eng_sched_seq *seqs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = i;
        while (at > 0 && seqs[order[at - 1]].rank > seqs[i].rank) {
            order[at] = order[at - 1];
            at--;
        }
        order[at] = i;
    }
}

uint32_t eng_sched_plan(eng_sched_seq *seqs, uint32_t count, const eng_sched_limits *limits,
                        uint32_t *order)
{
    uint32_t rows = 0, picks = 0;
    sort_by_rank(order, seqs, count);
    for (uint32_t i = 0; i < count; i++) {
        eng_sched_seq *seq = &seqs[order[i]];
        seq->rows = 0;
        if (seq->need == 1 && rows < limits->rows_max && picks < limits->picks_max) {
            seq->rows = 1;
            rows++;
            picks++;
        }
    }
    bool decoding = rows > 0;
    for (uint32_t i = 0; i < count; i++) {
        eng_sched_seq *seq = &seqs[order[i]];
        if (seq->rows == 0)
            continue;
        uint32_t room = (uint32_t)base_min(limits->rows_max - rows, limits->picks_max - picks);
        uint32_t draft = (uint32_t)base_min(seq->draft, room);
        seq->rows += draft;
        rows += draft;
        picks += draft;
    }
    uint32_t budget = limits->rows_max - rows;
    if (decoding)
        budget = (uint32_t)base_min(budget, limits->prefill_chunk);
    for (uint32_t i = 0; i < count && budget > 0 && picks < limits->picks_max; i++) {
        eng_sched_seq *seq = &seqs[order[i]];
        if (seq->need == 1)
            continue;
        seq->rows = (uint32_t)base_min(seq->need, budget);
        if (seq->picks_all)
            seq->rows = (uint32_t)base_min(seq->rows, limits->picks_max - picks);
        budget -= seq->rows;
        rows += seq->rows;
        picks += seq->picks_all ? seq->rows : seq->rows == seq->need;
    }
    return rows;
}
