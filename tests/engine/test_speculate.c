/* What drafts are worth: times of passes, copies of earlier text, the choice of lengths, and the
 * file that keeps what was learned. All pure but the file. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "engine/base/rand.h"
#include "engine/copy.h"
#include "engine/speculate.h"

static uint32_t draw(uint64_t *index, uint32_t bound)
{
    return base_rand(7, 0, (*index)++).v[0] % bound;
}

/* ---- times ---- */

static double affine(uint32_t rows, uint32_t context)
{
    return 500000 + 60000.0 * rows + 10.0 * context;
}

Test(eng_cost, learns_times_between_and_beside_what_was_seen)
{
    eng_cost cost = {0};
    uint64_t dice = 0;
    cr_assert_eq(eng_cost_of(&cost, 1, 0), 0, "nothing is known before the first pass");
    cr_assert_eq(eng_cost_rows(&cost, 1, 0, 77), 77);
    for (int i = 0; i < 4000; i++) {
        uint32_t rows = 1 + draw(&dice, 40), context = draw(&dice, 2) ? 300 : 7000;
        eng_cost_observe(&cost, rows, context, (uint64_t)affine(rows, context));
    }
    for (uint32_t rows = 1; rows <= 40; rows++) {
        double near = eng_cost_of(&cost, rows, 100) / affine(rows, 300);
        double far = eng_cost_of(&cost, rows, 5000) / affine(rows, 7000);
        cr_assert(near > 0.97 && near < 1.03, "%u rows: %g of what it takes", rows, near);
        cr_assert(far > 0.97 && far < 1.03, "%u rows: %g of what it takes", rows, far);
        cr_assert(eng_cost_known(&cost, rows, 100));
    }
    double beyond = eng_cost_of(&cost, 80, 100) / affine(80, 300);
    cr_assert(beyond > 0.8 && beyond < 1.2, "80 rows: %g of what they take", beyond);
    cr_assert(!eng_cost_known(&cost, 200, 100));
    /* A bucket that was never seen is like its neighbour. */
    cr_assert_eq(eng_cost_of(&cost, 5, 100000), eng_cost_of(&cost, 5, 5000));
    uint32_t fit = eng_cost_rows(&cost, affine(20, 300), 100, 512);
    cr_assert(fit >= 18 && fit <= 22, "%u rows fit", fit);
    cr_assert(eng_cost_check(&cost));
}

Test(eng_cost, never_falls_by_a_row_and_forgets_a_slow_pass)
{
    eng_cost cost = {0};
    uint64_t dice = 100;
    for (int i = 0; i < 3000; i++) {
        uint32_t rows = 1 + draw(&dice, 64);
        double noise = 0.7 + draw(&dice, 600) / 1000.0;
        if (draw(&dice, 50) == 0)
            noise = 300; /* the machine was taken away */
        eng_cost_observe(&cost, rows, 10, (uint64_t)(affine(rows, 0) * noise));
    }
    for (uint32_t rows = 1; rows <= 64; rows++) {
        double of = eng_cost_of(&cost, rows, 10);
        cr_assert_geq(eng_cost_of(&cost, rows + 1, 10), of, "%u rows", rows);
        cr_assert(of > 0.6 * affine(rows, 0) && of < 2 * affine(rows, 0), "%u rows: %g", rows, of);
    }
}

/* Another load of the machine: rows that are not run any more follow those that are. */
Test(eng_cost, the_whole_bucket_follows_a_slower_machine)
{
    eng_cost cost = {0};
    for (int i = 0; i < 400; i++)
        eng_cost_observe(&cost, 1 + (uint32_t)i % 8, 0, (uint64_t)affine(1 + (uint32_t)i % 8, 0));
    for (int i = 0; i < 200; i++)
        eng_cost_observe(&cost, 5, 0, (uint64_t)(2 * affine(5, 0)));
    cr_assert_gt(eng_cost_of(&cost, 1, 0), 1.2 * affine(1, 0));
    cr_assert_gt(eng_cost_of(&cost, 5, 0), 1.9 * affine(5, 0));
}

/* What is not run any more keeps its place beside what is: a wobble of that does not add up. */
Test(eng_cost, rows_that_are_not_run_do_not_drift)
{
    eng_cost cost = {0};
    uint64_t dice = 0;
    for (int i = 0; i < 400; i++)
        eng_cost_observe(&cost, 1 + (uint32_t)i % 8, 0, (uint64_t)affine(1 + (uint32_t)i % 8, 0));
    for (int i = 0; i < 200000; i++)
        eng_cost_observe(&cost, 1, 0, (uint64_t)(affine(1, 0) * (0.7 + draw(&dice, 601) / 1000.0)));
    double eight = eng_cost_of(&cost, 8, 0) / affine(8, 0);
    cr_assert(eight > 0.85 && eight < 1.15, "%g of what 8 rows take", eight);
}

/* One unlucky pass does not rule a number of rows out. */
Test(eng_cost, hopes_for_what_was_seen_rarely)
{
    eng_cost cost = {0};
    for (int i = 0; i < 100; i++)
        eng_cost_observe(&cost, 1, 0, 1000000);
    eng_cost_observe(&cost, 8, 0, 2000000);
    cr_assert_lt(eng_cost_hope(&cost, 8, 0), 1600000);
    cr_assert_eq(eng_cost_of(&cost, 8, 0), 2000000);
    for (int i = 0; i < 20; i++)
        eng_cost_observe(&cost, 8, 0, 2000000);
    cr_assert_eq(eng_cost_hope(&cost, 8, 0), eng_cost_of(&cost, 8, 0));
    cr_assert_eq(eng_cost_hope(&cost, 1, 0), eng_cost_of(&cost, 1, 0));
}

/* ---- copies ---- */

static eng_copy_draft copy_of(const int32_t *prompt, uint32_t prompt_count,
                              const int32_t *prediction, uint32_t prediction_count,
                              const int32_t *output, uint32_t output_count, int32_t *tokens,
                              uint32_t max)
{
    eng_copy *copy =
        eng_copy_create(prompt, prompt_count, prediction, prediction_count, output, 64);
    cr_assert_not_null(copy);
    eng_copy_draft draft = {0};
    for (uint32_t n = output_count > 3 ? output_count - 3 : 0; n <= output_count; n++)
        draft = eng_copy_propose(copy, n, tokens, max);
    eng_copy_destroy(copy);
    return draft;
}

Test(eng_copy, goes_on_where_the_longest_match_went_on)
{
    /* 1 2 3 is followed by 9 behind 7, by 4 behind 5 6. */
    static const int32_t prompt[] = {5, 6, 1, 2, 3, 4, 40, 41, 7, 1, 2, 3, 9, 90, 5, 6};
    static const int32_t output[64] = {1, 2, 3};
    int32_t tokens[8];
    eng_copy_draft draft = copy_of(prompt, 16, NULL, 0, output, 3, tokens, 3);
    cr_assert_eq(draft.count, 3);
    cr_assert_eq(draft.match, 5);
    cr_assert(!draft.predicted);
    cr_assert_eq(memcmp(tokens, (int32_t[]){4, 40, 41}, sizeof(int32_t[3])), 0);
    /* Of matches as long as one another the newest counts. */
    static const int32_t twice[] = {8, 1, 2, 3, 4, 8, 1, 2, 3, 5, 0};
    draft = copy_of(twice, 11, NULL, 0, output, 3, tokens, 1);
    cr_assert_eq(tokens[0], 5);
    /* No match, no draft. */
    static const int32_t other[] = {1, 2, 4, 3, 2, 1};
    cr_assert_eq(copy_of(other, 6, NULL, 0, output, 3, tokens, 8).count, 0);
    cr_assert_eq(copy_of(other, 1, NULL, 0, output, 1, tokens, 8).count, 0, "too short");
}

Test(eng_copy, a_text_that_repeats_itself_goes_on_so)
{
    static const int32_t prompt[] = {1, 2, 3, 1, 2, 3};
    static const int32_t output[64] = {0};
    int32_t tokens[8];
    eng_copy_draft draft = copy_of(prompt, 6, NULL, 0, output, 0, tokens, 8);
    cr_assert_eq(draft.count, 8);
    cr_assert_eq(memcmp(tokens, (int32_t[]){1, 2, 3, 1, 2, 3, 1, 2}, sizeof tokens), 0);
}

Test(eng_copy, a_prediction_is_followed_from_its_beginning_and_behind_an_edit)
{
    static const int32_t prompt[] = {100, 101, 102};
    static const int32_t prediction[] = {1, 2, 3, 4, 5, 6, 7, 8};
    static const int32_t output[64] = {1, 2, 50, 51, 4, 5, 6};
    int32_t tokens[8];
    eng_copy_draft draft = copy_of(prompt, 3, prediction, 8, output, 0, tokens, 8);
    cr_assert(draft.predicted && draft.count == 8 && tokens[0] == 1);
    draft = copy_of(prompt, 3, prediction, 8, output, 2, tokens, 2);
    cr_assert(draft.predicted && draft.count == 2 && tokens[0] == 3 && tokens[1] == 4);
    cr_assert_eq(copy_of(prompt, 3, prediction, 8, output, 4, tokens, 8).count, 0);
    draft = copy_of(prompt, 3, prediction, 8, output, 7, tokens, 8);
    cr_assert(draft.predicted && draft.count == 2, "%u tokens", draft.count);
    cr_assert(tokens[0] == 7 && tokens[1] == 8);
    /* Its last tokens have nothing behind them. */
    static const int32_t end[64] = {6, 7, 8};
    cr_assert_eq(copy_of(prompt, 3, prediction, 8, end, 3, tokens, 8).count, 0);
}

/* Whatever is proposed stands in the text behind an equal run; memory is bounded. */
Test(eng_copy, what_it_proposes_did_follow)
{
    enum { PROMPT = 300000, OUTPUT = 400, PREDICTION = 500 };
    /* Prompt and output side by side, as one text to search in. */
    int32_t *known = malloc((PROMPT + OUTPUT) * sizeof *known), tokens[16];
    int32_t *output = known + PROMPT;
    static int32_t prediction[PREDICTION];
    for (uint32_t i = 0; i < PROMPT; i++)
        known[i] = (int32_t)(base_rand(3, 0, i).v[0] % (i < PROMPT - 1000 ? 5000 : 6));
    for (uint32_t i = 0; i < PREDICTION; i++)
        prediction[i] = (int32_t)(base_rand(3, 1, i).v[0] % 6);
    for (uint32_t i = 0; i < OUTPUT; i++)
        output[i] = (int32_t)(base_rand(3, 2, i).v[0] % 6);
    eng_copy *copy = eng_copy_create(known, PROMPT, prediction, PREDICTION, output, OUTPUT);
    cr_assert_not_null(copy);
    uint32_t found = 0;
    for (uint32_t n = 0; n < OUTPUT; n++) {
        eng_copy_draft draft = eng_copy_propose(copy, n, tokens, 16);
        cr_assert_leq(draft.count, 16);
        cr_assert_leq(draft.match, ENG_COPY_MATCH_MAX);
        if (draft.count == 0 || n < 40)
            continue;
        found++;
        /* The run behind which it was found, and its first token, as one string of the text. */
        int32_t run[ENG_COPY_MATCH_MAX + 1];
        for (uint32_t i = 0; i < draft.match; i++)
            run[i] = output[n - draft.match + i];
        run[draft.match] = tokens[0];
        size_t bytes = (draft.match + 1) * sizeof *run;
        const void *at = draft.predicted ? memmem(prediction, sizeof prediction, run, bytes)
                                         : memmem(known, (PROMPT + n) * sizeof *known, run, bytes);
        cr_assert_not_null(at, "after %u tokens", n);
    }
    cr_assert_gt(found, OUTPUT / 2);
    eng_copy_destroy(copy);
    free(known);
}

/* ---- the choice ---- */

static void teach(eng_spec *spec, double base, double row, double draft)
{
    for (uint32_t i = 0; i < 400; i++) {
        uint32_t rows = 1 + i % 9;
        eng_spec_observe_step(spec, rows, false, 0, (uint64_t)(base + row * rows));
    }
    for (uint32_t i = 0; i < 20; i++)
        eng_spec_observe_draft(spec, 1, 0, (uint64_t)draft);
}

static eng_spec_offer offer_of(const float *accept, uint32_t count)
{
    eng_spec_offer offer = {.count = count};
    memcpy(offer.accept, accept, count * sizeof *accept);
    return offer;
}

Test(eng_spec, takes_what_raises_the_rate_and_nothing_more)
{
    eng_spec spec;
    eng_spec_init(&spec, 0);
    static const float sure[7] = {0.99f, 0.99f, 0.99f, 0.99f, 0.99f, 0.99f, 0.99f};
    static const float falling[7] = {0.9f, 0.5f, 0.05f, 0.9f, 0.9f, 0.9f, 0.9f};
    static const float hopeless[7] = {0.01f, 0.9f, 0.9f, 0.9f, 0.9f, 0.9f, 0.9f};
    eng_spec_offer offer = offer_of(sure, 7);
    cr_assert_eq(eng_spec_choose(&spec, &offer, 1, 0, 0, 64), 0, "no pass was timed yet");
    cr_assert_eq(offer.length, 0);
    teach(&spec, 1e6, 1e5, 2e5);
    cr_assert_gt(eng_spec_choose(&spec, &offer, 1, 0, 0, 64), 0);
    cr_assert_eq(offer.length, 7);
    cr_assert(offer.tokens > 7.6f && offer.tokens < 8);
    offer = offer_of(falling, 7);
    eng_spec_choose(&spec, &offer, 1, 0, 0, 64);
    cr_assert_eq(offer.length, 2, "length %u: what lies behind an unlikely token is not worth it",
                 offer.length);
    offer = offer_of(hopeless, 7);
    eng_spec_choose(&spec, &offer, 1, 0, 0, 64);
    cr_assert_eq(offer.length, 0);
    eng_spec_offer three[3] = {offer_of(sure, 7), offer_of(falling, 7), offer_of(sure, 7)};
    eng_spec_choose(&spec, three, 3, 0, 0, 5);
    cr_assert_eq(three[0].length + three[1].length + three[2].length, 5, "the bound of rows");
    cr_assert_eq(three[1].length, 0);
}

/* A pass of 8 rows takes as long as one of 5: no single row from 2 to 5 pays, all of them do. */
Test(eng_spec, sees_past_a_step_in_the_time_of_a_pass)
{
    eng_spec spec;
    eng_spec_init(&spec, 0);
    for (uint32_t i = 0; i < 900; i++) {
        uint32_t rows = 1 + i % 9;
        eng_spec_observe_step(&spec, rows, false, 0, rows == 1 ? 1000000 : 2500000);
    }
    static const float good[7] = {0.95f, 0.95f, 0.95f, 0.95f, 0.95f, 0.95f, 0.95f};
    eng_spec_offer offer = offer_of(good, 7);
    eng_spec_choose(&spec, &offer, 1, 0, 0, 64);
    cr_assert_eq(offer.length, 7);
    static const float poor[7] = {0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f};
    offer = offer_of(poor, 7);
    eng_spec_choose(&spec, &offer, 1, 0, 0, 64);
    cr_assert_eq(offer.length, 0);
}

Test(eng_spec, is_the_best_of_all_lengths)
{
    uint64_t dice = 0;
    for (int round = 0; round < 500; round++) {
        eng_spec spec;
        eng_spec_init(&spec, 0);
        teach(&spec, 1e5 + draw(&dice, 1000000), 1e4 + draw(&dice, 300000), 2e5);
        float accept[ENG_SPEC_BLOCK_MAX];
        for (uint32_t i = 0; i < ENG_SPEC_BLOCK_MAX; i++)
            accept[i] = (float)draw(&dice, 1001) / 1000;
        double extra = draw(&dice, 400000);
        eng_spec_offer offer = offer_of(accept, ENG_SPEC_BLOCK_MAX);
        double rate = eng_spec_choose(&spec, &offer, 1, 0, extra, 64), best = 0, product = 1,
               tokens = 1;
        for (uint32_t n = 0; n <= ENG_SPEC_BLOCK_MAX; n++) {
            double r = tokens / (eng_cost_hope(&spec.learned.verify, 1 + n, 0) + extra);
            best = r > best ? r : best;
            if (n < ENG_SPEC_BLOCK_MAX)
                tokens += product *= (double)accept[n];
        }
        cr_assert(rate > best * 0.9999 && rate < best * 1.0001, "round %d: %g of %g", round, rate,
                  best);
    }
}

Test(eng_spec, leaves_the_draft_pass_out_where_it_does_not_pay_and_probes)
{
    eng_spec spec;
    eng_spec_history history = {0};
    const eng_spec_history *histories[1] = {&history};
    eng_spec_init(&spec, 0);
    cr_assert(!eng_spec_worthwhile(&spec, histories, 1, 0, 0), "a plain pass is timed first");
    teach(&spec, 1e5, 1e6, 3e5); /* rows are all it costs */
    double plain = 1 / eng_cost_of(&spec.learned.verify, 1, 0);
    cr_assert(eng_spec_worthwhile(&spec, histories, 1, 0, plain), "its worth is not known yet");
    eng_spec_offer offer = {.length = 3, .tokens = 1.5f};
    for (int i = 0; i < 100; i++)
        eng_spec_observe_offer(&spec, &history, &offer);
    /* A probe loses 2.75 ms for its 1.5 tokens, half a percent of 500 plain passes. */
    uint32_t runs = 0;
    for (int i = 0; i < 10000; i++)
        runs += eng_spec_worthwhile(&spec, histories, 1, 0, plain);
    cr_assert(runs >= 18 && runs <= 20, "%u of 10000", runs);
    /* Where it pays, trying without loses little: once in a hundred. */
    eng_spec_init(&spec, 0);
    teach(&spec, 1e6, 1e4, 1e5);
    plain = 1 / eng_cost_of(&spec.learned.verify, 1, 0);
    runs = 0;
    for (int i = 0; i < 1000; i++)
        runs += eng_spec_worthwhile(&spec, histories, 1, 0, plain);
    cr_assert_eq(runs, 990, "%u of 1000", runs);
}

/* ---- never slower ---- */

/* A stream on a machine whose passes take `base` + `row` a row, a fifth more or less, and whose
 * drafter is right as often as its confidence says, which lies in [low, high]. */
typedef struct stream {
    double base, row, draft, low, high;
    uint64_t dice;
} stream;

static double noisy(stream *s, double ns)
{
    return ns * (0.8 + draw(&s->dice, 401) / 1000.0);
}

/* Confidences of a block and how many of its tokens turn out right. */
static uint32_t next_block(stream *s, float confidence[7])
{
    uint32_t right = 7;
    for (uint32_t i = 7; i-- > 0;) {
        confidence[i] = (float)(s->low + (s->high - s->low) * draw(&s->dice, 1001) / 1000);
        if (draw(&s->dice, 1000) >= 1000 * (double)confidence[i])
            right = i;
    }
    return right;
}

/* Tokens a second of so many rounds, drafts as eng_spec has them. */
static double adaptive(eng_spec *spec, eng_spec_history *history, stream *s, uint32_t rounds)
{
    double tokens = 0, ns = 0;
    for (uint32_t i = 0; i < rounds; i++) {
        eng_spec_offer offer = {.kind = ENG_SPEC_BLOCK};
        const eng_spec_history *histories[1] = {history->tokens > 0 ? history
                                                                    : &spec->learned.history[0]};
        double draft_ns = 0, rate = eng_spec_choose(spec, &offer, 1, 0, 0, 64);
        uint32_t right = 0;
        if (eng_spec_worthwhile(spec, histories, 1, 0, rate)) {
            float confidence[7];
            right = next_block(s, confidence);
            offer.count = 7;
            for (uint32_t j = 0; j < 7; j++)
                offer.bin[j] = (uint8_t)eng_spec_bin_confidence(confidence[j]);
            eng_spec_fill(spec, &offer);
            draft_ns = noisy(s, s->draft);
            eng_spec_observe_draft(spec, 1, 0, (uint64_t)draft_ns);
            eng_spec_choose(spec, &offer, 1, 0, eng_cost_of(&spec->learned.draft, 1, 0), 64);
            eng_spec_observe_offer(spec, history, &offer);
        }
        double pass = noisy(s, s->base + s->row * (1 + offer.length));
        eng_spec_observe_step(spec, 1 + offer.length, false, 0, (uint64_t)pass);
        uint32_t accepted = right < offer.length ? right : offer.length;
        if (offer.length > 0)
            eng_spec_observe_round(spec, &offer, accepted + (accepted < offer.length), accepted);
        tokens += 1 + accepted;
        ns += pass + draft_ns;
    }
    return tokens / ns;
}

/* The best of no drafts and of all fixed lengths, on average. */
static double best_fixed(const stream *s)
{
    double best = 1 / (s->base + s->row), tokens = 1, chance = 1;
    for (uint32_t length = 1; length <= 7; length++) {
        chance *= (s->low + s->high) / 2;
        tokens += chance;
        best = fmax(best, tokens / (s->base + s->row * (1 + length) + s->draft));
    }
    return best;
}

/* Whatever a row and the draft pass cost and however good the drafter is: no slower than plain, and
 * next to the best fixed length; also when the drafter becomes better or worse, once that was
 * found out. */
Test(eng_spec, is_never_slower_than_plain_and_near_the_best_length)
{
    static const double rows[] = {1e3, 1e5, 3e5, 9e5}, drafts[] = {1e5, 5e5, 1.5e6};
    static const double ranges[][2] = {{0, 0.1}, {0.2, 0.6}, {0.5, 1}, {0.7, 0.9}, {0.95, 1}};
    for (uint32_t r = 0; r < 4; r++)
        for (uint32_t d = 0; d < 3; d++) {
            eng_spec spec;
            eng_spec_init(&spec, 0);
            eng_spec_history history = {0};
            for (uint32_t i = 0; i < 10; i++) { /* on from what the last one has taught */
                uint32_t range = base_rand(8, r * 3 + d, i).v[0] % 5;
                stream s = {1e6, rows[r], drafts[d], ranges[range][0], ranges[range][1], i};
                adaptive(&spec, &history, &s, 3000);
                double speed = adaptive(&spec, &history, &s, 10000);
                double plain = 1 / (s.base + s.row), best = best_fixed(&s);
                cr_expect_geq(speed, 0.99 * plain, "row %g, draft %g, range %u: %.3f of plain",
                              s.row, s.draft, range, speed / plain);
                cr_expect_geq(speed, 0.97 * best, "row %g, draft %g, range %u: %.3f of the best",
                              s.row, s.draft, range, speed / best);
            }
        }
}

Test(eng_spec, learns_how_often_drafts_are_right)
{
    eng_spec spec;
    uint64_t dice = 0;
    eng_spec_init(&spec, 0);
    eng_spec_offer offer = {.kind = ENG_SPEC_COPY, .sampled = true, .count = 1};
    offer.bin[0] = (uint8_t)eng_spec_bin_match(5);
    for (int i = 0; i < 3000; i++)
        eng_spec_observe_round(&spec, &offer, 1, draw(&dice, 10) < 3);
    eng_spec_fill(&spec, &offer);
    cr_assert(offer.accept[0] > 0.2f && offer.accept[0] < 0.4f, "%g", (double)offer.accept[0]);
    offer.sampled = false;
    eng_spec_fill(&spec, &offer);
    cr_assert_eq(offer.accept[0], 0.65f, "greedy ones are counted apart");
    cr_assert(eng_spec_check(&spec.learned));
    cr_assert_eq(eng_spec_bin_confidence(0), 0);
    cr_assert_eq(eng_spec_bin_confidence(1), ENG_SPEC_BINS - 1);
    cr_assert_eq(eng_spec_bin_confidence(__builtin_nanf("")), 0);
    cr_assert_eq(eng_spec_bin_match(1000), ENG_SPEC_BINS - 1);
}

/* ---- the file ---- */

static char dir[64], path[80];

static void enter(void)
{
    strcpy(dir, "/tmp/test-costs-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/costs", dir);
}

static void leave(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", dir);
    cr_assert_eq(system(command), 0);
}

static base_code read_back(eng_spec *spec, const char *key)
{
    base_err err = BASE_ERR_INIT;
    eng_spec_init(spec, 0);
    base_code code = eng_spec_load(&spec->learned, path, key, &err);
    cr_assert_eq(code != BASE_OK, err.text[0] != '\0');
    return code;
}

/* Changes one byte at `at`, or cuts the file there (with `cut`). */
static void damage(long at, bool cut)
{
    int fd = open(path, O_RDWR);
    char byte;
    cr_assert_geq(fd, 0);
    if (cut) {
        cr_assert_eq(ftruncate(fd, at), 0);
    } else {
        cr_assert_eq(pread(fd, &byte, 1, at), 1);
        byte ^= 1;
        cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
    }
    close(fd);
}

Test(eng_spec_file, keeps_what_was_learned_and_refuses_what_is_wrong, .init = enter, .fini = leave)
{
    eng_spec spec, back;
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(read_back(&back, "a"), BASE_NOT_FOUND);
    eng_spec_init(&spec, 0);
    teach(&spec, 1e6, 1e5, 2e5);
    cr_assert_eq(eng_spec_save(&spec.learned, path, "a", &err), BASE_OK, "%s", err.text);
    cr_assert_eq(read_back(&back, "a"), BASE_OK);
    cr_assert_eq(memcmp(&back.learned, &spec.learned, sizeof spec.learned), 0);
    cr_assert_eq(read_back(&back, "b"), BASE_CONFLICT);
    cr_assert_eq(eng_cost_of(&back.learned.verify, 1, 0), 0, "what was refused changes nothing");
    for (long at = 0; at < (long)sizeof spec.learned; at += 97) {
        damage(at, false);
        cr_assert_neq(read_back(&back, "a"), BASE_OK, "byte %ld", at);
        damage(at, false);
    }
    cr_assert_eq(read_back(&back, "a"), BASE_OK);
    damage(100, true);
    cr_assert_eq(read_back(&back, "a"), BASE_FORMAT);
    damage(0, true);
    cr_assert_eq(read_back(&back, "a"), BASE_FORMAT);
    /* Values that only another program would write, under a right sum. */
    spec.learned.verify.ns[0][0] = -1;
    cr_assert_eq(eng_spec_save(&spec.learned, path, "a", &err), BASE_OK);
    cr_assert_eq(read_back(&back, "a"), BASE_FORMAT);
    spec.learned.verify.ns[0][0] = __builtin_nanf("");
    cr_assert_eq(eng_spec_save(&spec.learned, path, "a", &err), BASE_OK);
    cr_assert_eq(read_back(&back, "a"), BASE_FORMAT);
}

/* A file may grow to 100 bytes only, as if the disk were full. */
Test(eng_spec_file, a_disk_that_refuses_leaves_the_old_file, .init = enter, .fini = leave)
{
    eng_spec spec, back;
    base_err err = BASE_ERR_INIT;
    eng_spec_init(&spec, 0);
    teach(&spec, 1e6, 1e5, 2e5);
    cr_assert_eq(eng_spec_save(&spec.learned, path, "a", &err), BASE_OK);
    struct rlimit before, full;
    cr_assert_eq(getrlimit(RLIMIT_FSIZE, &before), 0);
    full = before;
    full.rlim_cur = 100;
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &full), 0);
    base_code code = eng_spec_save(&spec.learned, path, "b", &err);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &before), 0);
    cr_assert_eq(code, BASE_IO);
    cr_assert_eq(err.code, BASE_IO);
    cr_assert_eq(read_back(&back, "a"), BASE_OK);
    char beside[96];
    snprintf(beside, sizeof beside, "%s.new", path);
    cr_assert_neq(access(beside, F_OK), 0, "nothing is left beside it");
    err = (base_err)BASE_ERR_INIT;
    cr_assert_eq(eng_spec_save(&spec.learned, "/nowhere/costs", "a", &err), BASE_IO);
    cr_assert_not_null(strstr(err.text, "/nowhere/costs"), "%s", err.text);
}
