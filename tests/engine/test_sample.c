/* The sampler against a plain reference: sort everything, filter by the book, add the documented
 * noise, take the largest. */
#include "engine/sample.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/rand.h"
#include "engine/sample_internal.h"

#define VOCAB 200

typedef struct entry {
    double value;
    int32_t id;
} entry;

static int by_value(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->value != y->value)
        return x->value > y->value ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* The tokens that filters leave, best first, with renormalised probabilities in value. */
static uint32_t kept(entry *out, const float *logits, uint32_t vocab, const eng_sampling *s)
{
    double total = 0, sum = 0;
    uint32_t count = 0, end;
    for (uint32_t v = 0; v < vocab; v++)
        out[v] = (entry){(double)(logits[v] / s->temperature), (int32_t)v};
    qsort(out, vocab, sizeof *out, by_value);
    double max = out[0].value;
    while (count < vocab && out[count].value > -INFINITY &&
           (s->min_p <= 0 || out[count].value >= (double)((float)max + logf(s->min_p))))
        count++;
    if (s->top_k > 0 && s->top_k < count)
        count = s->top_k;
    for (uint32_t i = 0; i < count; i++)
        total += out[i].value = exp(out[i].value - max);
    for (end = 0; end < count && (end == 0 || sum < total * (double)s->top_p || s->top_p >= 1);
         end++)
        sum += out[end].value;
    for (uint32_t i = 0; i < end; i++)
        out[i].value /= sum;
    return end;
}

static int32_t plain_draw(const float *logits, uint32_t vocab, const eng_sampling *s,
                          uint64_t index, uint32_t choice)
{
    entry *list = malloc(vocab * sizeof *list);
    uint32_t count = kept(list, logits, vocab, s);
    double best = -INFINITY;
    int32_t id = -1;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t v = (uint32_t)list[i].id;
        double u = base_rand_unit(base_rand(s->seed, index << 8 | choice, v / 4).v[v % 4]);
        double score = (double)(logits[v] / s->temperature) - log(-log(u));
        if (score > best || (score == best && (int32_t)v < id)) {
            best = score;
            id = (int32_t)v;
        }
    }
    free(list);
    return id;
}

static int32_t sample(const float *logits, uint32_t vocab, const eng_sampling *s, uint64_t index)
{
    void *scratch = malloc(eng_sample_scratch(vocab));
    eng_sampler_input in = {
        .logits = logits, .vocab = vocab, .sampling = s, .ban = -1, .output_index = index};
    int32_t token = eng_sample(&in, NULL, scratch);
    free(scratch);
    return token;
}

static float uniform(uint32_t seed, uint32_t i)
{
    return (float)base_rand_unit(base_rand(seed, 99, i).v[0]);
}

/* Normal-like, and coarse if asked, so that ties abound. */
static void make_logits(float *logits, uint32_t vocab, uint32_t seed, bool coarse)
{
    for (uint32_t v = 0; v < vocab; v++) {
        float x =
            3 * (uniform(seed, 3 * v) + uniform(seed, 3 * v + 1) + uniform(seed, 3 * v + 2) - 1.5f);
        logits[v] = coarse ? roundf(x) : x * 2;
    }
}

static const eng_sampling DEFAULT = ENG_SAMPLING_DEFAULT;

/* ---- greedy ---- */

Test(sample, greedy_takes_the_largest_and_the_lower_of_equals)
{
    eng_sampling s = DEFAULT;
    s.temperature = 0;
    float a[] = {1, 5, 5, 2}, b[] = {NAN, -1, NAN, -1}, c[] = {-INFINITY, NAN, -INFINITY},
          d[] = {-INFINITY, INFINITY};
    cr_expect_eq(sample(a, 4, &s, 0), 1);
    cr_expect_eq(sample(b, 4, &s, 0), 1);
    cr_expect_eq(sample(c, 3, &s, 0), 1);
    cr_expect_eq(sample(d, 2, &s, 0), 1);
    s.temperature = 1e-6f; /* as good as 0; dividing by it would overflow */
    cr_expect_eq(sample(a, 4, &s, 0), 1);
}

Test(sample, ids_past_the_vocabulary_do_not_exist)
{
    float logits[VOCAB];
    make_logits(logits, VOCAB, 1, false);
    logits[150] = 1000;
    eng_sampling s = DEFAULT;
    for (uint64_t i = 0; i < 200; i++) {
        s.temperature = i % 2 == 0 ? 0 : 2;
        s.top_k = i % 3 == 0 ? 0 : 90;
        cr_expect_lt(sample(logits, 140, &s, i), 140);
    }
}

/* ---- the draw ---- */

static const struct {
    float temperature, top_p, min_p;
    uint32_t top_k;
} FILTERS[] = {
    {1, 1, 0, 0},        {0.7f, 1, 0, 0},
    {2, 1, 0, 0},        {1, 0.9f, 0, 0},
    {1, 0.5f, 0, 0},     {1, 1, 0, 1},
    {1, 1, 0, 7},        {1, 1, 0.1f, 0},
    {1, 0.95f, 0, 40},   {0.6f, 0.8f, 0.02f, 25},
    {1.5f, 0.99f, 0, 0}, {1, 0, 0, 0},
    {1, 1, 1, 0},        {1, 1, 0, 1000},
    {0.01f, 0.9f, 0, 5},
};

static eng_sampling with_filter(size_t i, uint64_t seed)
{
    eng_sampling s = DEFAULT;
    s.temperature = FILTERS[i].temperature;
    s.top_p = FILTERS[i].top_p;
    s.min_p = FILTERS[i].min_p;
    s.top_k = FILTERS[i].top_k;
    s.seed = seed;
    return s;
}

Test(sample, draws_what_the_plain_reference_draws, .timeout = 120)
{
    float logits[VOCAB];
    for (size_t f = 0; f < sizeof FILTERS / sizeof *FILTERS; f++)
        for (uint32_t trial = 0; trial < 400; trial++) {
            eng_sampling s = with_filter(f, trial * 77);
            make_logits(logits, VOCAB, trial, trial % 2 == 0);
            cr_assert_eq(sample(logits, VOCAB, &s, trial), plain_draw(logits, VOCAB, &s, trial, 0),
                         "filter %zu, trial %u", f, trial);
        }
}

Test(sample, large_vocabularies_too, .timeout = 120)
{
    enum { LARGE = 200064 };
    float *logits = malloc(LARGE * sizeof *logits);
    for (size_t f = 0; f < sizeof FILTERS / sizeof *FILTERS; f++) {
        eng_sampling s = with_filter(f, f);
        make_logits(logits, LARGE, (uint32_t)f, false);
        uint64_t began = base_now_ns();
        int32_t token = sample(logits, LARGE, &s, 3);
        uint64_t took = base_now_ns() - began;
        cr_expect_eq(token, plain_draw(logits, LARGE, &s, 3, 0), "filter %zu", f);
        fprintf(stderr, "vocabulary %d, temperature %g top_p %g min_p %g top_k %u: %.2f ms\n",
                LARGE, (double)s.temperature, (double)s.top_p, (double)s.min_p, s.top_k,
                (double)took * 1e-6);
    }
    free(logits);
}

/* Pearson's statistic of `draws` draws against the filtered softmax, as a deviate: (x - dof) /
 * sqrt(2 dof). */
static double chi_square(const float *logits, uint32_t vocab, const eng_sampling *s, uint32_t draws)
{
    entry list[VOCAB];
    uint32_t seen[VOCAB] = {0}, count = kept(list, logits, vocab, s), cells = 0;
    double x = 0, rest_expected = 0, rest_seen = 0;
    void *scratch = malloc(eng_sample_scratch(vocab));
    eng_sampler_input in = {.logits = logits, .vocab = vocab, .sampling = s, .ban = -1};
    for (uint32_t i = 0; i < draws; i++) {
        in.output_index = i;
        seen[eng_sample(&in, NULL, scratch)]++;
    }
    free(scratch);
    for (uint32_t i = 0; i < count; i++) {
        double expected = list[i].value * draws, got = seen[list[i].id];
        seen[list[i].id] = 0;
        if (expected < 10) { /* too rare for a cell of its own */
            rest_expected += expected;
            rest_seen += got;
            continue;
        }
        x += (got - expected) * (got - expected) / expected;
        cells++;
    }
    for (uint32_t v = 0; v < vocab; v++)
        cr_expect_eq(seen[v], 0, "token %u was filtered out and drawn", v);
    if (rest_expected > 10) {
        x += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
        cells++;
    }
    return cells > 1 ? (x - (cells - 1)) / sqrt(2.0 * (cells - 1)) : 0;
}

Test(sample, frequencies_are_the_softmax, .timeout = 240)
{
    float logits[VOCAB];
    make_logits(logits, 60, 5, false);
    for (size_t f = 0; f < sizeof FILTERS / sizeof *FILTERS; f++) {
        eng_sampling s = with_filter(f, 2026);
        double z = chi_square(logits, 60, &s, 100000);
        cr_expect(fabs(z) < 4, "filter %zu: %.2f standard deviations off", f, z);
    }
}

/* Draws at neighbouring output indexes, seeds and choices must not be alike. */
Test(sample, draws_are_independent, .timeout = 120)
{
    enum { N = 100000, V = 8 };
    float logits[V] = {0};
    eng_sampling s = DEFAULT;
    for (int kind = 0; kind < 3; kind++) {
        uint32_t pairs[V][V] = {0};
        int32_t last = -1;
        void *scratch = malloc(eng_sample_scratch(V));
        for (uint64_t i = 0; i < N; i++) {
            s.seed = kind == 1 ? i : 7;
            eng_sampler_input in = {.logits = logits,
                                    .vocab = V,
                                    .sampling = &s,
                                    .ban = -1,
                                    .output_index = kind == 0 ? i : (kind == 2 ? i / 256 : 3),
                                    .choice = kind == 2 ? (uint32_t)(i % 256) : 0};
            int32_t token = eng_sample(&in, NULL, scratch);
            if (last >= 0)
                pairs[last][token]++;
            last = token;
        }
        free(scratch);
        double x = 0, expected = (double)(N - 1) / (V * V);
        for (int a = 0; a < V; a++)
            for (int b = 0; b < V; b++)
                x += (pairs[a][b] - expected) * (pairs[a][b] - expected) / expected;
        cr_expect(fabs((x - 63) / sqrt(2 * 63.0)) < 4, "kind %d: chi square %.1f of 63", kind, x);
    }
}

Test(sample, nothing_but_the_arguments_matters)
{
    float logits[VOCAB];
    int32_t first[64];
    make_logits(logits, VOCAB, 8, false);
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < 64; i++) {
            int at = round == 1 ? 63 - i : i;
            eng_sampling s =
                with_filter((size_t)at % (sizeof FILTERS / sizeof *FILTERS), (uint64_t)at * 3);
            int32_t token = sample(logits, VOCAB, &s, (uint64_t)at);
            if (round == 0)
                first[at] = token;
            cr_expect_eq(token, first[at]);
        }
}

Test(sample, the_drafter_draws_what_the_sampler_draws)
{
    float logits[VOCAB];
    for (uint32_t trial = 0; trial < 300; trial++) {
        eng_sampling s = DEFAULT;
        s.temperature = 0.3f + 0.01f * (float)trial;
        s.seed = trial;
        make_logits(logits, VOCAB, trial, trial % 2 == 0);
        cr_expect_eq(eng_sample__draw(logits, VOCAB, s.temperature, s.seed, trial, 0),
                     sample(logits, VOCAB, &s, trial));
    }
}

Test(sample, odd_logits_do_no_harm)
{
    float logits[VOCAB];
    for (size_t f = 0; f < sizeof FILTERS / sizeof *FILTERS; f++)
        for (int kind = 0; kind < 6; kind++) {
            eng_sampling s = with_filter(f, 1);
            make_logits(logits, VOCAB, 3, false);
            for (int v = 0; v < VOCAB; v++)
                logits[v] = kind == 0   ? NAN
                            : kind == 1 ? -INFINITY
                            : kind == 2 ? INFINITY
                            : kind == 3 ? 0
                                        : logits[v];
            if (kind == 4)
                logits[17] = NAN;
            if (kind == 5)
                logits[17] = INFINITY;
            int32_t token = sample(logits, VOCAB, &s, 0);
            cr_expect(token >= 0 && token < VOCAB);
            cr_expect(kind != 4 || token != 17);
            cr_expect(kind != 5 || token == 17);
        }
}

/* ---- bias, bans, penalties ---- */

/* By the book, on every token. */
static void plain_adjust(float *out, const float *logits, const eng_sampler_input *in)
{
    const eng_sampling *s = in->sampling;
    for (uint32_t v = 0; v < in->vocab; v++) {
        float x = logits[v];
        uint16_t n = in->counts->output[v];
        for (uint32_t i = 0; i < s->bias_count; i++)
            if (s->bias[i].token == (int32_t)v)
                x = s->bias[i].value <= -100 ? -INFINITY : x + s->bias[i].value;
        for (uint32_t i = 0; i < in->end_token_count; i++)
            if (in->end_tokens[i] == (int32_t)v &&
                (s->ignore_eos || in->output_index < s->min_tokens))
                x = -INFINITY;
        if (in->ban == (int32_t)v)
            x = -INFINITY;
        if (n > 0 || in->counts->prompt[v])
            x = x > 0 ? x / s->repetition_penalty : x * s->repetition_penalty;
        if (n > 0)
            x -= s->presence_penalty + s->frequency_penalty * (float)n;
        out[v] = x;
    }
}

Test(sample, penalties_match_a_plain_reference, .timeout = 120)
{
    float logits[VOCAB], adjusted[VOCAB];
    uint16_t output[VOCAB];
    uint8_t prompt[VOCAB];
    void *scratch = malloc(eng_sample_scratch(VOCAB));
    for (uint32_t trial = 0; trial < 2000; trial++) {
        base_rand4 r = base_rand(trial, 5, 0);
        eng_bias bias[3] = {{(int32_t)(r.v[0] % VOCAB), 3.5f},
                            {(int32_t)(r.v[1] % VOCAB), -100},
                            {(int32_t)(r.v[2] % VOCAB), -7}};
        int32_t ends[2] = {(int32_t)(r.v[3] % VOCAB), (int32_t)(r.v[3] / 256 % VOCAB)};
        eng_counts counts = {.output = output, .prompt = prompt};
        eng_sampling s = DEFAULT;
        make_logits(logits, VOCAB, trial, trial % 2 == 1);
        for (uint32_t v = 0; v < VOCAB; v++) {
            uint32_t word = base_rand(trial, 6, v).v[0];
            output[v] = word % 5 == 0 ? (uint16_t)(word / 8 % 7) : 0;
            prompt[v] = word / 4096 % 6 == 0;
        }
        s.temperature = trial % 3 == 0 ? 0 : 0.9f;
        s.repetition_penalty = trial % 4 == 0 ? 1 : 1.3f;
        s.presence_penalty = trial % 5 == 0 ? 0 : 0.8f;
        s.frequency_penalty = trial % 7 == 0 ? 0 : -0.25f;
        s.bias = bias;
        s.bias_count = trial % 2 == 0 ? 3 : 0;
        s.min_tokens = trial % 8;
        s.ignore_eos = trial % 9 == 0;
        s.seed = trial;
        s.logprobs = true;
        s.top_logprobs = 20;
        eng_sampler_input in = {.logits = logits,
                                .vocab = VOCAB,
                                .sampling = &s,
                                .counts = &counts,
                                .end_tokens = ends,
                                .end_token_count = 2,
                                .ban = trial % 10 == 0 ? (int32_t)(trial % VOCAB) : -1,
                                .output_index = 4};
        eng_logprob logprob;
        plain_adjust(adjusted, logits, &in);
        int32_t token = eng_sample(&in, &logprob, scratch);
        int32_t want = s.temperature == 0 ? eng_sample__greedy(adjusted, VOCAB)
                                          : plain_draw(adjusted, VOCAB, &s, 4, 0);
        cr_assert_eq(token, want, "trial %u", trial);

        double sum = 0;
        for (uint32_t v = 0; v < VOCAB; v++)
            sum += exp((double)adjusted[v]);
        cr_assert_eq(logprob.token, token);
        cr_assert_float_eq(logprob.logprob, (float)((double)adjusted[token] - log(sum)), 1e-4f);
        cr_assert_eq(logprob.top_count, 20);
        entry list[VOCAB];
        for (uint32_t v = 0; v < VOCAB; v++)
            list[v] = (entry){(double)adjusted[v], (int32_t)v};
        qsort(list, VOCAB, sizeof *list, by_value);
        for (int i = 0; i < 20; i++) {
            cr_assert_eq(logprob.top_token[i], list[i].id, "trial %u rank %d", trial, i);
            cr_assert_float_eq(logprob.top_logprob[i], (float)(list[i].value - log(sum)), 1e-4f);
        }
    }
    free(scratch);
}

Test(sample, end_and_stop_tokens_wait_for_min_tokens)
{
    float logits[4] = {9, 8, 7, 6};
    int32_t ends[1] = {0}, stops[1] = {1};
    char scratch[256];
    eng_sampling s = DEFAULT;
    s.temperature = 0;
    s.min_tokens = 3;
    s.stop_tokens = stops;
    s.stop_token_count = 1;
    eng_sampler_input in = {.logits = logits,
                            .vocab = 4,
                            .sampling = &s,
                            .end_tokens = ends,
                            .end_token_count = 1,
                            .ban = -1};
    cr_assert_leq(eng_sample_scratch(4), sizeof scratch);
    in.output_index = 2;
    cr_expect_eq(eng_sample(&in, NULL, scratch), 2);
    in.ban = 2;
    cr_expect_eq(eng_sample(&in, NULL, scratch), 3);
    in.output_index = 3;
    cr_expect_eq(eng_sample(&in, NULL, scratch), 0);
    s.ignore_eos = true; /* bans the model's own end tokens, not the client's stops */
    cr_expect_eq(eng_sample(&in, NULL, scratch), 1);
}

Test(sample, banned_tokens_show_a_finite_logprob)
{
    float logits[2] = {1, 2};
    char scratch[128];
    eng_bias bias[1] = {{1, -100}};
    eng_logprob logprob;
    eng_sampling s = DEFAULT;
    s.bias = bias;
    s.bias_count = 1;
    s.top_logprobs = 2;
    eng_sampler_input in = {.logits = logits, .vocab = 2, .sampling = &s, .ban = -1};
    cr_expect_eq(eng_sample(&in, &logprob, scratch), 0);
    cr_expect_float_eq(logprob.logprob, 0, 1e-6f);
    cr_expect_eq(logprob.top_token[1], 1);
    cr_expect_eq(logprob.top_logprob[1], -9999);
}

/* ---- ranges ---- */

Test(sample, ranges_are_checked_and_named)
{
    static const eng_bias FAR[1] = {{320, 1}}, STRONG[1] = {{3, 101}},
                          FINE[2] = {{0, -100}, {319, 100}};
    static const int32_t STOPS[2] = {5, -1};
    const eng_sampling good = {.temperature = 2,
                               .top_p = 0,
                               .min_p = 1,
                               .presence_penalty = -2,
                               .frequency_penalty = 2,
                               .repetition_penalty = 1.1f,
                               .bias = FINE,
                               .bias_count = 2,
                               .stop_tokens = STOPS,
                               .stop_token_count = 1,
                               .top_logprobs = 20};
    struct {
        const char *param;
        eng_sampling s;
    } cases[] = {
        {"temperature", good},
        {"temperature", good},
        {"top_p", good},
        {"min_p", good},
        {"presence_penalty", good},
        {"frequency_penalty", good},
        {"repetition_penalty", good},
        {"top_logprobs", good},
        {"logit_bias", good},
        {"logit_bias", good},
        {"stop_token_ids", good},
        {"top_p", good},
    };
    base_err err = BASE_ERR_INIT;
    cases[0].s.temperature = 2.1f;
    cases[1].s.temperature = NAN;
    cases[2].s.top_p = 1.01f;
    cases[3].s.min_p = -0.1f;
    cases[4].s.presence_penalty = 2.5f;
    cases[5].s.frequency_penalty = -INFINITY;
    cases[6].s.repetition_penalty = 0;
    cases[7].s.top_logprobs = 21;
    cases[8].s.bias = FAR;
    cases[8].s.bias_count = 1;
    cases[9].s.bias = STRONG;
    cases[9].s.bias_count = 1;
    cases[10].s.stop_token_count = 2;
    cases[11].s.top_p = NAN;
    cr_expect_eq(eng_sampling_check(&good, 320, &err), BASE_OK, "%s", err.text);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err = (base_err)BASE_ERR_INIT;
        cr_expect_eq(eng_sampling_check(&cases[i].s, 320, &err), BASE_INVALID, "case %zu", i);
        cr_expect_str_eq(err.param, cases[i].param);
    }
}
