/* The planner and the draft-length rule: both pure, so every claim is checked on drawn inputs. */
#include <criterion/criterion.h>

#include "engine/base/rand.h"
#include "engine/sched.h"
#include "engine/speculate.h"

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
                picks += seq->rows == seq->need;
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

Test(eng_spec, takes_what_raises_the_rate_and_nothing_more)
{
    eng_spec spec;
    eng_spec_init(&spec, 0);
    for (uint32_t i = 0; i < 200; i++)
        eng_spec_observe_step(&spec, 1 + i % 8,
                              1000000 + (1 + i % 8) * 100000); /* 1 ms and 0.1 ms a row */
    eng_spec_observe_draft(&spec, 200000);
    const float sure[7] = {0.99f, 0.99f, 0.99f, 0.99f, 0.99f, 0.99f, 0.99f};
    const float falling[7] = {0.9f, 0.5f, 0.05f, 0.9f, 0.9f, 0.9f, 0.9f};
    const float hopeless[7] = {0.01f, 0.9f, 0.9f, 0.9f, 0.9f, 0.9f, 0.9f};
    uint32_t length;
    eng_spec_choose(&spec, &length, sure, 1, 7);
    cr_assert_eq(length, 7);
    eng_spec_choose(&spec, &length, falling, 1, 7);
    cr_assert_eq(length, 2, "length %u: what lies behind an unlikely token is not worth a row",
                 length);
    eng_spec_choose(&spec, &length, hopeless, 1, 7);
    cr_assert_eq(length, 0);
}

Test(eng_spec, stops_drafting_where_it_does_not_pay_and_probes)
{
    eng_spec spec;
    eng_spec_init(&spec, 0);
    for (uint32_t i = 0; i < 200; i++)
        eng_spec_observe_step(&spec, 1 + i % 8,
                              100000 + (1 + i % 8) * 1000000); /* rows are all it costs */
    eng_spec_observe_draft(&spec, 300000);
    for (int i = 0; i < 100; i++)
        eng_spec_observe_round(&spec, 3, 1);
    uint32_t runs = 0;
    for (int i = 0; i < 1000; i++)
        runs += eng_spec_worthwhile(&spec, 1);
    cr_assert_eq(runs, 10, "%u of 1000", runs);
    eng_spec_init(&spec, 5);
    uint32_t length;
    eng_spec_choose(&spec, &length, (const float[7]){0}, 1, 7);
    cr_assert_eq(length, 5, "a fixed length is kept whatever the confidence");
    cr_assert(eng_spec_worthwhile(&spec, 1));
}
