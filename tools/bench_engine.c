/* e.spec.KIND.CONTEXT: one stream, greedy, to the natural end of the turn, with drafts as many as
 * pay, beside none and every fixed draft length, interleaved. KIND: `tool` (a call answers), `chat`
 * (a sentence or two), `prose` (as long a text as the model writes). CONTEXT: 512 or 8k tokens of
 * prompt, earlier turns filling it. Each round runs every prompt on every engine; ratios are taken
 * within a round, and their 95 % interval is a bootstrap of the median over rounds. All engines
 * must give the same tokens. e.spec.predicted: the same chat with the answer itself as the
 * prediction. e.host: of a plain step of one stream, what is neither a pass nor the choice of a
 * token. e.idle: what the first pass after a pause takes longer than one in a row. e.mixed: a
 * stream's longest waits for a token while a prompt of 8k tokens is run beside it. */
#include "tools/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/buf.h"
#include "engine/base/rand.h"

#define ROUNDS 17
#define PROMPTS 8
#define FIXED 7
#define ENGINES (FIXED + 2) /* [0] no drafts, [1…7] fixed, [8] adaptive */
#define ADAPTIVE (FIXED + 1)
#define RESAMPLES 2000

typedef struct prompt {
    int32_t *tokens;
    uint32_t count;
} prompt;

typedef struct kind {
    const char *name;
    const char *asks[PROMPTS];
    bool tools;
} kind;

static const kind KINDS[] = {
    {"tool",
     {"What's the weather in Oslo?", "What is the weather in Lisbon and in Porto?",
      "Weather in Bergen for the next 3 days, please.", "Get me the weather in Buenos Aires.",
      "Is it raining in Quito and in Lima?", "How warm is Kyoto?",
      "Tell me the weather in Turin, Split and Madrid.", "Do I need an umbrella in Dublin?"},
     true},
    {"chat",
     {"hello!", "What can you do?", "Who are you?", "Thank you very much!", "Good morning",
      "How are you today?", "Can you help me with a question?", "Tell me a joke."},
     false},
    {"prose",
     {"Tell me about the harbour.", "Explain what a database index is.",
      "Describe a morning in the mountains.", "What does the git command do?", "What is a library?",
      "Explain how a list works in Python.", "What does the word river mean?",
      "Write a few sentences about the sea."},
     false},
};

static const char TOOL[] =
    "{\"name\":\"get_weather\",\"description\":\"Get the current weather for a city.\","
    "\"parameters\":{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\"},"
    "\"days\":{\"type\":\"integer\"}},\"required\":[\"city\"]}}";

/* Sentences of ordinary words, no two alike: earlier turns that give nothing to copy. */
static char *make_filler(base_arena *arena, uint32_t turn, uint32_t words)
{
    static const char *const WORDS[] = {
        "the",   "a",     "small",  "boat",   "river", "under",  "stone", "bridge", "because",
        "rain",  "north", "market", "people", "carry", "bread",  "over",  "hill",   "morning",
        "light", "every", "window", "garden", "slow",  "winter", "road",  "between"};
    base_buf text;
    base_buf_init(&text, 0);
    for (uint32_t i = 0; i < words; i++)
        base_buf_printf(&text, "%s%s", i > 0 ? (i % 12 == 0 ? ". " : " ") : "",
                        WORDS[base_rand(5, turn, i).v[0] % (sizeof WORDS / sizeof *WORDS)]);
    char *copy = base_arena_copy(arena, text.data, text.length);
    base_buf_deinit(&text);
    return copy;
}

static prompt render(eng_engine *engine, base_arena *arena, const char *ask, bool tools,
                     uint32_t context)
{
    enum { TURNS_MAX = 256, WORDS = 60 };
    static eng_item items[TURNS_MAX + 1];
    eng_text tool = {TOOL, sizeof TOOL - 1};
    eng_prompt out = {0}, longer;
    for (uint32_t turns = 0; turns + 2 <= TURNS_MAX; turns += 2) {
        base_err err = BASE_ERR_INIT;
        if (turns > 0)
            for (uint32_t i = turns - 2; i < turns; i++) {
                char *text = make_filler(arena, i, WORDS);
                items[i] = (eng_item){.role = i % 2 ? ENG_ROLE_ASSISTANT : ENG_ROLE_USER,
                                      .text = {text, strlen(text)}};
            }
        items[turns] = (eng_item){.role = ENG_ROLE_USER, .text = {ask, strlen(ask)}};
        eng_chat chat = {.items = items,
                         .item_count = turns + 1,
                         .tools = &tool,
                         .tool_count = tools,
                         .thinking = ENG_THINK_DISABLED};
        if (eng_render(engine, &longer, &chat, 0, NULL, arena, &err) != BASE_OK) {
            fprintf(stderr, "whimbrel-bench: %s\n", err.text);
            exit(1);
        }
        if (turns > 0 && longer.token_count > context)
            break;
        out = longer;
    }
    return (prompt){out.tokens, out.token_count};
}

/* Runs a prompt to its end; returns its decode seconds. */
static double play(eng_engine *engine, const prompt *p, uint64_t space, const bench_run *predicted,
                   bench_run *r)
{
    eng_request request = {.id = 1,
                           .tokens = p->tokens,
                           .token_count = p->count,
                           .space = space,
                           .max_tokens = 256,
                           .sampling = ENG_SAMPLING_DEFAULT};
    request.sampling.temperature = 0;
    if (predicted != NULL) {
        request.prediction = predicted->tokens;
        request.prediction_count = predicted->count;
    }
    bench_submit(engine, r, request);
    bench_wait(r);
    return (double)r->usage.decode_ns / 1e9;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

/* The median ratio of two series of the same rounds and the ends of its interval. */
static void ratio_of(const samples *ours, const samples *other, double out[3])
{
    double ratio[BENCH_SAMPLES_MAX], drawn[BENCH_SAMPLES_MAX];
    static double medians[RESAMPLES];
    for (int i = 0; i < ours->n; i++)
        ratio[i] = ours->v[i] / other->v[i];
    for (uint32_t r = 0; r < RESAMPLES; r++) {
        for (int i = 0; i < ours->n; i++)
            drawn[i] = ratio[base_rand(11, r, (uint64_t)i).v[0] % (uint32_t)ours->n];
        medians[r] = median_of(drawn, ours->n);
    }
    qsort(medians, RESAMPLES, sizeof *medians, by_value);
    out[0] = median_of(ratio, ours->n);
    out[1] = medians[RESAMPLES / 40];
    out[2] = medians[RESAMPLES - 1 - RESAMPLES / 40];
}

static bool same_tokens(const char *row, const bench_run *a, const bench_run *b)
{
    if (a->count == b->count && memcmp(a->tokens, b->tokens, a->count * sizeof *a->tokens) == 0)
        return true;
    fprintf(stderr, "whimbrel-bench: %s: drafted and plain tokens differ\n", row);
    return false;
}

static bool spec_row(eng_engine *engines[ENGINES], base_arena *arena, const kind *k,
                     uint32_t context, const char *row)
{
    prompt prompts[PROMPTS];
    static bench_run plain[PROMPTS], other;
    samples speed[ENGINES] = {0};
    double accepted = 0, steps = 0, tokens = 0, verified = 0;
    eng_stats before = {0}, after;
    uint64_t space = context * 10 + (uint64_t)(k - KINDS);
    for (int i = 0; i < PROMPTS; i++)
        prompts[i] = render(engines[0], arena, k->asks[i], k->tools, context);
    for (int round = -2; round < ROUNDS; round++) { /* the first two fill caches and cost tables */
        double seconds[ENGINES] = {0}, made = 0;
        if (round == 0)
            before = eng_get_stats(engines[ADAPTIVE]);
        for (int i = 0; i < PROMPTS; i++)
            for (int n = 0; n < ENGINES; n++) {
                int e = (n + round + 2) % ENGINES; /* nobody is always behind the same one */
                bench_run *r = e == 0 ? &plain[i] : &other;
                seconds[e] += play(engines[e], &prompts[i], space, NULL, r);
                if (round > -2 && e != 0 && !same_tokens(row, &plain[i], &other))
                    return false;
                made += e == 0 ? r->count - 1 : 0;
                if (e == ADAPTIVE && round >= 0) {
                    accepted += r->usage.accepted;
                    verified += r->usage.drafted;
                    steps += r->usage.steps;
                    tokens += r->count;
                }
            }
        for (int e = 0; e < ENGINES && round >= 0; e++)
            speed[e].v[speed[e].n++] = made / seconds[e];
    }
    after = eng_get_stats(engines[ADAPTIVE]);
    int best = 1, at = 0;
    char each[96] = "";
    double best_speed = 0, to_plain[3], to_best[3];
    for (int e = 1; e <= FIXED; e++) {
        samples copy = speed[e];
        double median = median_of(copy.v, copy.n);
        at += snprintf(each + at, sizeof each - (size_t)at, " %.0f", median);
        if (median > best_speed) {
            best_speed = median;
            best = e;
        }
    }
    ratio_of(&speed[ADAPTIVE], &speed[0], to_plain);
    ratio_of(&speed[ADAPTIVE], &speed[best], to_best);
    char config[512], name[24];
    snprintf(
        config, sizeof config,
        "%s context=%u tokens/answer=%.0f accepted length %.2f, %.2f drafts a step, copies kept "
        "%.2f; pass %.0f us, draft %.0f us a step; 1 to 7 drafts%s; to plain %.3f [%.3f, %.3f], to "
        "best fixed "
        "(%d) %.3f [%.3f, %.3f]",
        eng_get_info(engines[0])->name, prompts[0].count, tokens / (ROUNDS * PROMPTS),
        1 + accepted / steps, verified / steps,
        (double)(after.copied_accepted - before.copied_accepted) / steps,
        (double)(after.forward_ns - before.forward_ns) / steps / 1e3,
        (double)(after.draft_ns - before.draft_ns) / steps / 1e3, each, to_plain[0], to_plain[1],
        to_plain[2], best, to_best[0], to_best[1], to_best[2]);
    snprintf(name, sizeof name, "%d drafts", best);
    bench_peer peers[2] = {{.name = "plain", .s = speed[0]}, {.name = name, .s = speed[best]}};
    bench_report_beside(row, config, "tok/s", true, &speed[ADAPTIVE], 0, "", peers, 2);
    return true;
}

static bool predicted_row(eng_engine *plain, eng_engine *adaptive, base_arena *arena)
{
    static bench_run answer, r;
    samples speed[3] = {0};
    double accepted = 0, rejected = 0;
    prompt p = render(plain, arena, KINDS[2].asks[1], false, 512);
    for (int round = -2; round < ROUNDS; round++) {
        double seconds[3] = {play(plain, &p, 77, NULL, &answer)};
        for (int i = 1; i < 3; i++) {
            seconds[i] = play(adaptive, &p, 77, i == 2 ? &answer : NULL, &r);
            if (!same_tokens("e.spec.predicted", &answer, &r))
                return false;
        }
        accepted += r.usage.predicted_accepted;
        rejected += r.usage.predicted_rejected;
        for (int i = 0; i < 3 && round >= 0; i++)
            speed[i].v[speed[i].n++] = (answer.count - 1) / seconds[i];
    }
    char config[128];
    snprintf(config, sizeof config, "%u tokens, of the prediction %.0f %% kept, %.0f %% refused",
             answer.count, 100 * accepted / (answer.count * (ROUNDS + 2.0)),
             100 * rejected / (answer.count * (ROUNDS + 2.0)));
    bench_peer peers[2] = {{.name = "plain", .s = speed[0]}, {.name = "adaptive", .s = speed[1]}};
    bench_report_beside("e.spec.predicted", config, "tok/s", true, &speed[2], 0, "", peers, 2);
    return true;
}

static bool bench_spec(void)
{
    static const struct {
        uint32_t tokens;
        const char *name;
    } CONTEXTS[] = {{512, "512"}, {7800, "8k"}};
    bool good = true, wanted = bench_wanted("e.spec.predicted");
    char row[32];
    for (size_t k = 0; k < 3; k++)
        for (size_t c = 0; c < 2; c++) {
            snprintf(row, sizeof row, "e.spec.%s.%s", KINDS[k].name, CONTEXTS[c].name);
            wanted |= bench_wanted(row);
        }
    if (!wanted)
        return true;
    eng_engine *engines[ENGINES];
    for (int e = 0; e < ENGINES; e++) {
        eng_options options = bench_engine_options();
        options.kv_bytes = (uint64_t)256 << 20;
        options.draft_tokens = e == ADAPTIVE ? -1 : e;
        engines[e] = bench_engine_start(&options);
    }
    base_arena *arena = base_arena_create(1 << 16, (size_t)256 << 20);
    if (eng_get_info(engines[ADAPTIVE])->draft_block >= FIXED) {
        for (size_t k = 0; k < 3 && good; k++)
            for (size_t c = 0; c < 2 && good; c++) {
                snprintf(row, sizeof row, "e.spec.%s.%s", KINDS[k].name, CONTEXTS[c].name);
                if (bench_wanted(row))
                    good = spec_row(engines, arena, &KINDS[k], CONTEXTS[c].tokens, row);
            }
        if (good && bench_wanted("e.spec.predicted"))
            good = predicted_row(engines[0], engines[ADAPTIVE], arena);
    }
    base_arena_destroy(arena);
    for (int e = 0; e < ENGINES; e++)
        eng_destroy(engines[e]);
    return good;
}

static void bench_host(void)
{
    static bench_run r;
    eng_options options = bench_engine_options();
    eng_engine *engine = bench_engine_start(&options);
    base_arena *arena = base_arena_create(1 << 16, (size_t)64 << 20);
    prompt p = render(engine, arena, KINDS[0].asks[0], true, 512);
    samples share = {0};
    double us = 0;
    for (int round = -1; round < ROUNDS; round++) {
        eng_request request = {.id = 1,
                               .tokens = p.tokens,
                               .token_count = p.count,
                               .space = 1,
                               .max_tokens = 512,
                               .sampling = ENG_SAMPLING_DEFAULT};
        request.sampling.temperature = 0;
        request.sampling.ignore_eos = true;
        eng_stats before = eng_get_stats(engine);
        bench_submit(engine, &r, request);
        bench_wait(&r);
        eng_stats after = eng_get_stats(engine);
        /* From the first token to the last; the first step, which made the first token, is not of
         * the decode time, so its share of the passes is taken out. */
        double steps = r.usage.steps;
        double device =
            (double)(after.forward_ns - before.forward_ns + after.sample_ns - before.sample_ns) *
            (steps - 1) / steps;
        double host = (double)r.usage.decode_ns - device;
        if (round < 0)
            continue;
        us += host / (steps - 1) / 1e3 / ROUNDS;
        share.v[share.n++] = 100 * host / (double)r.usage.decode_ns;
    }
    char config[128];
    snprintf(config, sizeof config, "%s, one stream without drafts, %.1f us a step",
             eng_get_info(engine)->name, us);
    bench_report("e.host", config, "%", false, &share, 3, "3 % of a step");
    base_arena_destroy(arena);
    eng_destroy(engine);
}

/* What a pass of one row takes longer when the engine was idle before: threads that are still
 * asleep, caches that are not. */
static void bench_idle(void)
{
    enum { ROUND = 60 };
    static bench_run r;
    eng_options options = bench_engine_options();
    options.draft_tokens = 0;
    eng_engine *engine = bench_engine_start(&options);
    base_arena *arena = base_arena_create(1 << 16, (size_t)64 << 20);
    prompt p = render(engine, arena, KINDS[1].asks[0], false, 256);
    samples added = {0};
    double warm_us = 0;
    for (int round = -1; round < 7; round++) {
        double us[2][ROUND];
        for (int i = 0; i < 2 * ROUND; i++) {
            const int idle = i % 2; /* every other request comes right behind one */
            eng_request request = {.id = 1,
                                   .tokens = p.tokens,
                                   .token_count = p.count,
                                   .space = 5,
                                   .max_tokens = 1,
                                   .sampling = ENG_SAMPLING_DEFAULT};
            if (idle)
                usleep(3000);
            uint64_t before = eng_get_stats(engine).forward_ns;
            bench_submit(engine, &r, request);
            bench_wait(&r);
            us[idle][i / 2] = (double)(eng_get_stats(engine).forward_ns - before) / 1e3;
        }
        if (round < 0)
            continue;
        const double warm = median_of(us[0], ROUND);
        added.v[added.n++] = median_of(us[1], ROUND) - warm;
        warm_us += warm / 7;
    }
    char config[128];
    snprintf(config, sizeof config, "%s, a pass of one row after 3 ms without work, else %.0f us",
             eng_get_info(engine)->name, warm_us);
    bench_report("e.idle", config, "us", false, &added, 20, "20 us");
    base_arena_destroy(arena);
    eng_destroy(engine);
}

static void bench_mixed(void)
{
    static bench_run stream, other;
    static const uint32_t targets[] = {5, 20, 50};
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++) {
        eng_options options = bench_engine_options();
        options.step_ms_target = targets[t];
        eng_engine *engine = bench_engine_start(&options);
        base_arena *arena = base_arena_create(1 << 16, (size_t)64 << 20);
        prompt p = render(engine, arena, KINDS[0].asks[0], true, 512);
        prompt big = render(engine, arena, KINDS[2].asks[0], false, 7800);
        samples wait = {0};
        double prefill = 0;
        for (int round = -1; round < 5; round++) {
            eng_request request = {.id = 1,
                                   .tokens = p.tokens,
                                   .token_count = p.count,
                                   .space = 1,
                                   .max_tokens = BENCH_OUTPUT_MAX,
                                   .sampling = ENG_SAMPLING_DEFAULT};
            request.sampling.temperature = 0;
            request.sampling.ignore_eos = true;
            bench_submit(engine, &stream, request);
            request = (eng_request){.id = 2,
                                    .tokens = big.tokens,
                                    .token_count = big.count,
                                    .space = 100 + (uint64_t)(round + 1),
                                    .max_tokens = 1,
                                    .sampling = ENG_SAMPLING_DEFAULT};
            bench_submit(engine, &other, request);
            bench_wait(&other);
            eng_cancel(engine, 1);
            bench_wait(&stream);
            double gaps[BENCH_OUTPUT_MAX];
            int n = 0;
            for (uint32_t i = 1; i < stream.count; i++)
                gaps[n++] = (double)(stream.at_ns[i] - stream.at_ns[i - 1]) / 1e6;
            if (round < 0 || n < 2)
                continue;
            qsort(gaps, (size_t)n, sizeof *gaps, by_value);
            wait.v[wait.n++] = gaps[n * 99 / 100];
            prefill += big.count / ((double)other.usage.prefill_ns / 1e9) / 5;
        }
        char config[128], row[32];
        snprintf(row, sizeof row, "e.mixed.%ums", targets[t]);
        snprintf(config, sizeof config, "p99 wait for a token; prefill beside it %.0f tok/s",
                 prefill);
        if (wait.n > 0)
            bench_report(row, config, "ms", false, &wait, targets[t], "step_ms_target");
        base_arena_destroy(arena);
        eng_destroy(engine);
    }
}

bool bench_engine(void)
{
    bool good = bench_spec();
    if (bench_wanted("e.host"))
        bench_host();
    if (bench_wanted("e.idle"))
        bench_idle();
    if (bench_wanted("e.mixed"))
        bench_mixed();
    return good;
}
