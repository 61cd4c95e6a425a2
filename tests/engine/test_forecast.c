/* What is foreseen, against machines whose steps are known. */
#include <criterion/criterion.h>
#include <math.h>

#include "engine/base/rand.h"
#include "engine/forecast.h"

#define CHUNK 128

typedef struct machine {
    eng_forecast forecast;
    double slower;
    uint64_t dice;
} machine;

static double noise(machine *m)
{
    return 0.9 + 0.2 * (base_rand(11, 0, m->dice++).v[0] % 1000) / 1000;
}

/* Nanoseconds of a step: weights once, a little for each row, attention by its context. */
static double truth(const machine *m, uint32_t sequences, uint32_t prefill, uint32_t context)
{
    uint32_t rows = sequences + prefill;
    return m->slower * (8e5 + 3e4 * rows + 2.0 * rows * context);
}

static double step(machine *m, uint32_t sequences, uint32_t prefill, uint32_t context)
{
    double ns = truth(m, sequences, prefill, context) * noise(m);
    eng_forecast_observe_step(&m->forecast, sequences, prefill, context, (uint64_t)ns);
    return ns;
}

/* A request of so many tokens, alone; what it took. */
static double request(machine *m, uint32_t prompt, uint32_t output)
{
    double ns = 0;
    for (uint32_t at = 0; at < prompt; at += CHUNK) {
        uint32_t rows = prompt - at < CHUNK ? prompt - at : CHUNK;
        ns += step(m, 0, rows, at + rows);
    }
    for (uint32_t i = 0; i < output; i++)
        ns += step(m, 1, 0, prompt + i);
    eng_forecast_observe_end(&m->forecast, output, output);
    return ns;
}

static double foreseen(const machine *m, uint32_t prompt, uint32_t output)
{
    return eng_forecast_prefill(&m->forecast, 0, prompt, CHUNK, 0) +
           eng_forecast_decode(&m->forecast, 1, output, prompt);
}

static uint32_t draw(machine *m, uint32_t bound)
{
    return base_rand(12, 0, m->dice++).v[0] % bound;
}

static void start(machine *m)
{
    static const eng_cost none;
    *m = (machine){.slower = 1};
    eng_forecast_init(&m->forecast, &none, &none);
}

#define REQUESTS_MAX 100

/* The error of the next `count` predictions, as a share of what each took; nine in ten are below.
 */
static double error_p90(machine *m, uint32_t count)
{
    double errors[REQUESTS_MAX];
    cr_assert(count > 0 && count <= REQUESTS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t prompt = 50 + draw(m, 2000), output = 1 + draw(m, 40), at = i;
        double told = foreseen(m, prompt, output), took = request(m, prompt, output);
        double error = fabs(told - took) / took;
        for (; at > 0 && errors[at - 1] > error; at--)
            errors[at] = errors[at - 1];
        errors[at] = error;
    }
    return errors[count * 9 / 10];
}

Test(eng_forecast, nothing_is_foreseen_before_anything_ran)
{
    machine m;
    start(&m);
    cr_assert_float_eq(eng_forecast_prefill(&m.forecast, 0, 1000, CHUNK, 2), 0, 0);
    cr_assert_float_eq(eng_forecast_decode(&m.forecast, 3, 50, 1000), 0, 0);
    cr_assert_eq(eng_forecast_output(&m.forecast, 20), 20);
    cr_assert_gt(eng_forecast_output(&m.forecast, 1u << 31), 1);
    cr_assert_float_eq(eng_forecast_prefill(&m.forecast, 5, 0, CHUNK, 0), 0, 0);
}

Test(eng_forecast, learns_a_machine_within_a_few_requests)
{
    machine m;
    start(&m);
    error_p90(&m, 30);
    double error = error_p90(&m, 100);
    cr_assert_leq(error, 0.15, "error %.3f", error);
}

/* The acceptance of admission: the engine slowed three times, and fast again. */
Test(eng_forecast, follows_a_machine_three_times_slower_within_20_requests)
{
    machine m;
    start(&m);
    error_p90(&m, 100);
    for (uint32_t round = 0; round < 6; round++) {
        m.slower = round % 2 == 0 ? 3 : 1;
        error_p90(&m, 20);
        double error = error_p90(&m, 60);
        cr_assert_leq(error, 0.25, "round %u: error %.3f", round, error);
    }
}

/* Requests of one step each: 20 steps are all there is to learn from. */
Test(eng_forecast, follows_when_requests_are_single_steps)
{
    machine m;
    start(&m);
    for (uint32_t i = 0; i < 200; i++)
        step(&m, 1, 0, 100);
    m.slower = 3;
    for (uint32_t i = 0; i < 20; i++)
        step(&m, 1, 0, 100);
    for (uint32_t i = 0; i < 100; i++) {
        double told = eng_forecast_step(&m.forecast, 1, 0, 100), is = truth(&m, 1, 0, 100);
        cr_assert(fabs(told - is) <= 0.25 * is, "step %u: %.0f of %.0f", i, told, is);
        step(&m, 1, 0, 100);
    }
}

Test(eng_forecast, one_step_that_hangs_is_no_trend)
{
    machine m;
    start(&m);
    error_p90(&m, 50);
    double before = foreseen(&m, 500, 20);
    eng_forecast_observe_step(&m.forecast, 1, 0, 500, 60000000000ull);
    double after = foreseen(&m, 500, 20);
    cr_assert_leq(after, 1.6 * before);
    error_p90(&m, 5);
    double error = error_p90(&m, 50);
    cr_assert_leq(error, 0.15, "error %.3f", error);
}

Test(eng_forecast, answers_are_as_long_as_those_before)
{
    machine m;
    start(&m);
    for (uint32_t i = 0; i < 200; i++) {
        eng_forecast_observe_end(&m.forecast, 4096, 80 + draw(&m, 41));
        eng_forecast_observe_end(&m.forecast, 16, 16);
    }
    uint32_t told = eng_forecast_output(&m.forecast, 4096);
    cr_assert(told >= 90 && told <= 110, "%u", told);
    cr_assert_eq(eng_forecast_output(&m.forecast, 16), 16);
    cr_assert_eq(eng_forecast_output(&m.forecast, 1), 1);
    told = eng_forecast_output(&m.forecast, 8192); /* the nearest that was seen */
    cr_assert(told >= 90 && told <= 110, "%u", told);
    told = eng_forecast_output(&m.forecast, 32); /* those of 16 were cut */
    cr_assert(told > 16 && told <= 32, "%u", told);
}

Test(eng_forecast, drafts_give_more_tokens_a_step)
{
    machine m;
    start(&m);
    error_p90(&m, 30);
    double plain = eng_forecast_decode(&m.forecast, 2, 100, 500);
    for (uint32_t i = 0; i < 200; i++)
        eng_forecast_observe_tokens(&m.forecast, 2, 5);
    double drafted = eng_forecast_decode(&m.forecast, 2, 100, 500);
    cr_assert(fabs(plain / drafted - 2.5) < 0.1, "%.3f", plain / drafted);
    eng_forecast_observe_tokens(&m.forecast, 0, 0);
}

/* The weights are read for those that decode in any case: rows beside them cost less than alone. */
Test(eng_forecast, prompts_beside_others_cost_what_they_add)
{
    machine m;
    start(&m);
    for (uint32_t i = 0; i < 300; i++) {
        step(&m, 4, 0, 400);
        step(&m, 4, 32, 400);
        step(&m, 0, 32, 400);
    }
    double told = eng_forecast_prefill(&m.forecast, 0, 400, 32, 4);
    double is = (truth(&m, 4, 32, 400) - truth(&m, 4, 0, 400)) * 400 / 32;
    cr_assert(fabs(told - is) <= 0.25 * is, "%.0f of %.0f", told, is);
}

/* What the planner cuts prefills by: a step with them takes at most twice one without. */
Test(eng_forecast, rows_fit_the_time_that_is_given)
{
    machine m;
    start(&m);
    cr_assert_eq(eng_forecast_rows(&m.forecast, 4, 1e6, 400, 256), 256, "nothing is known");
    for (uint32_t i = 0; i < 400; i++) {
        step(&m, 4, 0, 400);
        step(&m, 4, 8 << (i % 5), 400);
    }
    double twice = 2 * eng_forecast_step(&m.forecast, 4, 0, 400);
    uint32_t rows = eng_forecast_rows(&m.forecast, 4, twice, 400, 256);
    double is = truth(&m, 4, rows, 400) / truth(&m, 4, 0, 400);
    cr_assert(is > 1.5 && is < 2.4, "%u rows: %.2f times as long", rows, is);
}
