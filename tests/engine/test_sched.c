/* The planner: pure, so every claim is checked on drawn inputs. */
#include <criterion/criterion.h>

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
                                      .arrival = draw(&dice, 1000)};
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

Test(eng_sched, prefills_in_order_of_arrival)
{
    eng_sched_seq seqs[] = {
        {.need = 100, .arrival = 9}, {.need = 100, .arrival = 3}, {.need = 100, .arrival = 5}};
    uint32_t order[3];
    eng_sched_limits limits = {.rows_max = 150, .prefill_chunk = 64, .picks_max = 8};
    cr_assert_eq(eng_sched_plan(seqs, 3, &limits, order), 150);
    cr_assert_eq(seqs[1].rows, 100);
    cr_assert_eq(seqs[2].rows, 50);
    cr_assert_eq(seqs[0].rows, 0);
}
