#include "engine/sched.h"

#include "engine/base/num.h"

/* Insertion sort by arrival: the list is short and almost sorted. */
static void sort_by_arrival(uint32_t *order, const eng_sched_seq *seqs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = i;
        while (at > 0 && seqs[order[at - 1]].arrival > seqs[i].arrival) {
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
    sort_by_arrival(order, seqs, count);
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
