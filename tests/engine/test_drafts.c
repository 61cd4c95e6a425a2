/* Drafts change nothing but speed: on the bundled model, with its drafter, with an early one and
 * with scripted drafts, for every draft length and variant, greedy and seeded, filtered, penalised,
 * stopped and held to a grammar, the output is what it is without drafts, token for token. The
 * share that runs every time is small; WHIMBREL_LONG runs all. */
#include <stdio.h>
#include <unistd.h>

#include "engine/engine_internal.h"
#include "tests/engine/loop_rig.h"

#define NANO SOURCE_ROOT "/config/models/nano"
#define EARLY SOURCE_ROOT "/tests/vectors/dspark-early"
#define LENGTH 64 /* output tokens of a comparison */
#define WINDOW 16 /* requests under way at once */
#define PROMPTS_MAX 1000
#ifdef __SANITIZE_ADDRESS__ /* twenty times slower */
#define SHARE(few, all) ((few) / 8 + 1)
#define TOKENS(all) ((all) / 4)
#else
#define TOKENS(all) (all)
#define SHARE(few, all) (getenv("WHIMBREL_LONG") != NULL ? (uint32_t)(all) : (uint32_t)(few))
#endif

typedef int32_t answer[LENGTH];

static eng_options nano(int32_t draft_tokens)
{
    eng_options opts = options();
    opts.model = NANO;
    opts.draft_tokens = draft_tokens;
    opts.step_rows_max = 512;
    opts.prefill_chunk = 256;
    opts.kv_bytes = 128 << 20;
    opts.threads = 1; /* tests run side by side; bits do not depend on it */
    return opts;
}

/* Natural requests of many kinds: with tools and without, to be answered by a call or by text. */
static eng_prompt make_chat(eng_engine *engine, uint32_t i, base_arena *arena)
{
    static const char *const cities[] = {"Oslo", "Lisbon", "Porto",  "Bergen", "Quito",
                                         "Lima", "Turin",  "Madrid", "Kyoto",  "Split"};
    static const char *const asks[] = {"What's the weather in %s and in %s?",
                                       "Tell me about the harbour of %s, not of %s.",
                                       "Book a table for %u in %s near %s.",
                                       "How far is it from %s to %s?",
                                       "Say hello to %s from %s.",
                                       "Write a list of things to see in %s and %s.",
                                       "What is 12 times %u?",
                                       "Send a mail to ann@%s.example about %s."};
    static const char tool[] =
        "{\"name\":\"get_weather\",\"description\":\"Get the current weather for a city.\","
        "\"parameters\":{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\"},"
        "\"days\":{\"type\":\"integer\"}},\"required\":[\"city\"]}}";
    char text[160];
    const char *a = cities[i % 10], *b = cities[(i / 10 + i) % 10];
    const char *ask = asks[i / 3 % 8];
    if (strstr(ask, "%u") != NULL && strstr(ask, "%s") != NULL)
        snprintf(text, sizeof text, "Book a table for %u in %s near %s.", i, a, b);
    else if (strstr(ask, "%u") != NULL)
        snprintf(text, sizeof text, "What is 12 times %u?", i);
    else
        snprintf(text, sizeof text, ask, a, b);
    eng_item item = {.role = ENG_ROLE_USER, .text = {text, strlen(text)}};
    eng_text tools = {tool, sizeof tool - 1};
    eng_chat chat = {.items = &item,
                     .item_count = 1,
                     .tools = &tools,
                     .tool_count = i % 3 != 0,
                     .thinking = i % 5 == 0 ? ENG_THINK_ENABLED : ENG_THINK_DISABLED};
    eng_prompt prompt;
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(eng_render(engine, &prompt, &chat, 0, NULL, arena, &err), BASE_OK, "%s", err.text);
    return prompt;
}

/* A short text to go on with: for the reference variant, whose prefill takes long. */
static eng_prompt make_text(eng_engine *engine, uint32_t i, base_arena *arena)
{
    static const char *const begins[] = {"The weather in", "A list of", "How to",
                                         "{\"city\":", "hello"};
    char text[64];
    eng_prompt prompt;
    base_err err = BASE_ERR_INIT;
    snprintf(text, sizeof text, "%s %u", begins[i % 5], i);
    cr_assert_eq(eng_tokenize(engine, &prompt.tokens, &prompt.token_count,
                              (eng_text){text, strlen(text)}, false, 0, arena, &err),
                 BASE_OK, "%s", err.text);
    return prompt;
}

/* The first `count` prompts' outputs; they go on past the end of the turn, to LENGTH tokens. */
static eng_usage answer_all(const eng_options *opts, uint32_t count, float temperature,
                            answer *answers)
{
    static result results[WINDOW];
    eng_engine *engine = start(opts);
    eng_usage sum = {0};
    for (uint32_t from = 0; from < count; from += WINDOW) {
        base_arena *arena = base_arena_create(4096, (size_t)64 << 20);
        uint32_t n = count - from < WINDOW ? count - from : WINDOW;
        eng_request reqs[WINDOW];
        for (uint32_t i = 0; i < n; i++) {
            eng_prompt prompt = strcmp(opts->variant, "ref") == 0
                                    ? make_text(engine, from + i, arena)
                                    : make_chat(engine, from + i, arena);
            reqs[i] = request(prompt.tokens, prompt.token_count, LENGTH, temperature, &results[i]);
            reqs[i].sampling.seed = from + i;
            submit(engine, &reqs[i]);
        }
        wait_done(results, n);
        for (uint32_t i = 0; i < n; i++) {
            cr_assert_eq(results[i].count, LENGTH);
            memcpy(answers[from + i], results[i].tokens, sizeof(answer));
            sum.drafted += results[i].usage.drafted;
            sum.accepted += results[i].usage.accepted;
            sum.steps += results[i].usage.steps;
        }
        base_arena_destroy(arena);
    }
    check_clean(engine);
    eng_destroy(engine);
    return sum;
}

static void equal(const answer *plain, const answer *drafted, uint32_t count, const char *what)
{
    for (uint32_t i = 0; i < count; i++)
        cr_assert_eq(memcmp(plain[i], drafted[i], sizeof(answer)), 0, "%s: prompt %u", what, i);
}

static answer plain[PROMPTS_MAX], drafted[PROMPTS_MAX];

/* Adaptive and each of the lengths against none. */
static void compare(eng_options opts, const char *draft, uint32_t count, float temperature,
                    bool adaptive, uint32_t lengths)
{
    char what[80];
    opts.draft = draft;
    opts.draft_tokens = 0;
    answer_all(&opts, count, temperature, plain);
    for (int32_t length = adaptive ? -1 : 1; length <= 7; length++) {
        if (length == 0 || (length > 0 && (lengths >> length & 1) == 0))
            continue;
        opts.draft_tokens = length;
        eng_usage usage = answer_all(&opts, count, temperature, drafted);
        snprintf(what, sizeof what, "%s, %s, temperature %g, %d drafts", opts.variant,
                 draft != NULL ? "early drafter" : "drafter", (double)temperature, length);
        equal(plain, drafted, count, what);
        cr_log_info("%s: %u prompts, accepted %.2f a step", what, count,
                    1 + (double)usage.accepted / usage.steps);
        if (length > 0)
            cr_assert_gt(usage.drafted, 0);
        cr_assert_geq(usage.drafted, usage.accepted);
    }
}

#define ALL 0xfe /* lengths 1 to 7 */
#ifdef __SANITIZE_ADDRESS__
#define SOME 0x80 /* 7 */
#else
#define SOME ALL
#endif

Test(drafts, greedy_adaptive_equals_plain, .timeout = 3600)
{
    compare(nano(0), NULL, SHARE(12, 1000), 0, true, 0);
}

Test(drafts, greedy_adaptive_with_the_early_drafter, .timeout = 3600)
{
    compare(nano(0), EARLY, SHARE(6, 1000), 0, true, 0);
}

static void every_length(eng_options opts, const char *draft, uint32_t few, uint32_t lengths)
{
    kn_device_options device = {
        .variant = opts.variant, .threads = 1, .rows_max = 1, .width_max = 64, .context_max = 64};
    kn_device *here;
    if (kn_device_create(&here, &device, NULL) != BASE_OK)
        cr_skip_test("this processor has no %s", opts.variant);
    kn_device_destroy(here);
    uint32_t count = SHARE(few, 40);
    compare(opts, draft, count, 0, false, count == 40 ? ALL : lengths);
}

static eng_options nano_on(const char *variant)
{
    eng_options opts = nano(0);
    opts.variant = variant;
    return opts;
}

Test(drafts, greedy_every_length_avx512, .timeout = 3600)
{
    every_length(nano_on("avx512"), NULL, 3, SOME);
}

Test(drafts, greedy_every_length_avx512_early, .timeout = 3600)
{
    every_length(nano_on("avx512"), EARLY, 2, 0x90);
}

Test(drafts, greedy_every_length_avx2, .timeout = 3600)
{
    every_length(nano_on("avx2"), NULL, 2, 0x8a);
}

Test(drafts, greedy_every_length_avx2_early, .timeout = 3600)
{
    every_length(nano_on("avx2"), EARLY, 1, 0x90);
}

/* The reference variant is some hundred times slower: a tiny model, and nano in the long run. */
Test(drafts, greedy_every_length_ref_tiny, .timeout = 3600)
{
    eng_options opts = nano_on("ref");
    opts.model = SOURCE_ROOT "/tests/vectors/tiny";
    opts.context_max = 1024;
    every_length(opts, NULL, 1, 0x88);
}

static void ref_nano(uint32_t lengths)
{
    if (getenv("WHIMBREL_LONG") == NULL)
        cr_skip_test("hours");
    compare(nano_on("ref"), NULL, 40, 0, false, lengths);
}

Test(drafts, greedy_every_length_ref_1, .timeout = 7200)
{
    ref_nano(1 << 1);
}

Test(drafts, greedy_every_length_ref_2, .timeout = 7200)
{
    ref_nano(1 << 2);
}

Test(drafts, greedy_every_length_ref_3_to_5, .timeout = 7200)
{
    ref_nano(0x38);
}

Test(drafts, greedy_every_length_ref_6_and_7, .timeout = 7200)
{
    ref_nano(0xc0);
}

Test(drafts, seeded_every_length_warm, .timeout = 3600)
{
    compare(nano(0), NULL, SHARE(3, 200), 0.7f, true, SOME);
}

Test(drafts, seeded_every_length_hot, .timeout = 3600)
{
    compare(nano(0), NULL, SHARE(3, 200), 1.0f, true, SOME);
}

Test(drafts, seeded_with_the_early_drafter, .timeout = 3600)
{
    uint32_t count = SHARE(2, 200), lengths = count == 200 ? ALL : 0x90;
    compare(nano(0), EARLY, count, 0.7f, true, lengths);
    compare(nano(0), EARLY, count, 1.0f, true, lengths);
}

/* ---- one request in two engines, everything that comes out compared ---- */

typedef struct seen {
    result r;
    eng_logprob logprobs[OUTPUT_MAX];
    uint32_t logprob_count;
    uint32_t step_tokens[OUTPUT_MAX];
    uint32_t steps;
} seen;

static eng_engine *watched; /* whose penalty counts are looked at, in its own thread */
static uint32_t counts_checked;

/* What the penalties are computed from is the histogram of what was committed. */
static void check_counts(const eng_event *event)
{
    const seen *s = event->user;
    for (uint32_t i = 0; i < watched->active_count; i++) {
        const eng_sequence *seq = watched->active[i];
        if (seq->request.id != event->id || seq->counts.output == NULL)
            continue;
        static uint16_t histogram[1 << 16];
        memset(histogram, 0, sizeof histogram);
        for (uint32_t t = 0; t < s->r.count; t++)
            histogram[s->r.tokens[t]]++;
        cr_assert_eq(memcmp(histogram, seq->counts.output, watched->info.vocab * sizeof *histogram),
                     0);
        counts_checked++;
    }
}

static void on_event_seen(void *ctx, const eng_event *event)
{
    seen *s = event->user;
    if (event->kind == ENG_EVENT_STEP && event->token_count > 0)
        s->step_tokens[s->steps++] = event->token_count;
    for (uint32_t i = 0; event->logprobs != NULL && i < event->token_count; i++)
        s->logprobs[s->logprob_count++] = event->logprobs[i];
    on_event(ctx, event);
    if (watched != NULL && event->kind == ENG_EVENT_STEP)
        check_counts(event);
}

static eng_engine *start_seen(eng_options opts)
{
    opts.sink.event = on_event_seen;
    return start(&opts);
}

static void run_seen(eng_engine *engine, const eng_request *what, seen *s)
{
    eng_request req = *what;
    memset(s, 0, sizeof *s);
    req.id = next_id++;
    req.user = s;
    submit(engine, &req);
    wait_done(&s->r, 1);
}

static void same_seen(const seen *a, const seen *b, const char *what)
{
    same(&a->r, &b->r, what);
    cr_assert_eq(a->r.finish, b->r.finish, "%s: finish %d and %d", what, a->r.finish, b->r.finish);
    cr_assert_eq(a->r.stop_index, b->r.stop_index, "%s", what);
    cr_assert_eq(a->r.run_tokens, b->r.run_tokens, "%s", what);
    cr_assert_eq(a->r.text_length, b->r.text_length, "%s", what);
    cr_assert_eq(memcmp(a->r.text, b->r.text, a->r.text_length), 0, "%s", what);
    cr_assert_eq(a->logprob_count, b->logprob_count, "%s", what);
    for (uint32_t i = 0; i < a->logprob_count; i++) {
        const eng_logprob *x = &a->logprobs[i], *y = &b->logprobs[i];
        cr_assert(x->token == y->token && x->logprob == y->logprob && x->top_count == y->top_count,
                  "%s: logprob %u", what, i);
        for (uint32_t t = 0; t < x->top_count; t++)
            cr_assert(x->top_token[t] == y->top_token[t] && x->top_logprob[t] == y->top_logprob[t],
                      "%s: logprob %u", what, i);
    }
    cr_assert_leq(b->r.usage.accepted, b->r.usage.drafted);
}

/* Engines that differ in their drafts alone. */
enum { PLAIN, BLOCK, ADAPTIVE, TRUTH, NONSENSE, DRAFTERS };
static const char *const NAMES[] = {"plain", "7 drafts", "adaptive", "right drafts",
                                    "wrong drafts"};
static int32_t truth[OUTPUT_MAX]; /* what TRUTH drafts: filled from PLAIN's output */

static void start_all(eng_engine *engines[DRAFTERS])
{
    static const int32_t nonsense[] = {7, 300, 12};
    for (int i = 0; i < DRAFTERS; i++) {
        eng_options opts = nano(i == PLAIN ? 0 : (i == BLOCK ? 7 : -1));
        opts.kv_bytes = 64 << 20;
        if (i == TRUTH || i == NONSENSE) {
            opts.draft_script = i == TRUTH ? truth : nonsense;
            opts.draft_script_count = i == TRUTH ? OUTPUT_MAX : 3;
        }
        engines[i] = start_seen(opts);
    }
}

static void stop_all(eng_engine *engines[DRAFTERS])
{
    for (int i = 0; i < DRAFTERS; i++) {
        check_clean(engines[i]);
        eng_destroy(engines[i]);
    }
}

/* Runs it everywhere; `first` is PLAIN's. */
static void same_everywhere(eng_engine *engines[DRAFTERS], const eng_request *req, seen *first,
                            const char *what)
{
    static seen other;
    char name[64];
    run_seen(engines[PLAIN], req, first);
    memcpy(truth, first->r.tokens, sizeof truth);
    for (int i = PLAIN + 1; i < DRAFTERS; i++) {
        run_seen(engines[i], req, &other);
        snprintf(name, sizeof name, "%s, %s", what, NAMES[i]);
        same_seen(first, &other, name);
    }
}

static uint32_t dice(uint64_t seed, uint32_t index, uint32_t bound)
{
    return base_rand(seed, 77, index).v[0] % bound;
}

/* Everything that shapes the output, drawn at random. */
Test(drafts, filters_penalties_stops_and_logprobs_as_if_tokens_came_one_by_one, .timeout = 3600)
{
    eng_engine *engines[DRAFTERS];
    static seen first;
    start_all(engines);
    base_arena *arena = base_arena_create(4096, (size_t)64 << 20);
    uint32_t rounds = SHARE(12, 600), finishes[8] = {0};
    for (uint32_t i = 0; i < rounds; i++) {
        eng_prompt prompt = make_chat(engines[0], i, arena);
        eng_request req =
            request(prompt.tokens, prompt.token_count, 40 + dice(i, 0, 60), 0, &first.r);
        eng_sampling *s = &req.sampling;
        s->seed = i;
        s->ignore_eos = dice(i, 1, 2);
        s->temperature = (float)dice(i, 2, 3) * 0.5f;
        s->top_p = dice(i, 3, 2) ? 0.9f : 1;
        s->top_k = dice(i, 4, 2) ? 1 + dice(i, 5, 60) : 0;
        s->min_p = dice(i, 6, 3) == 0 ? 0.05f : 0;
        s->presence_penalty = dice(i, 7, 3) == 0 ? 0.3f : 0;
        s->frequency_penalty = dice(i, 8, 3) == 0 ? 0.8f : 0;
        s->repetition_penalty = dice(i, 9, 3) == 0 ? 1.1f : 1;
        s->min_tokens = dice(i, 10, 3) == 0 ? 20 : 0;
        s->logprobs = dice(i, 11, 2);
        s->top_logprobs = s->logprobs ? dice(i, 12, 6) : 0;
        eng_bias bias[2] = {{(int32_t)dice(i, 13, 5000), -100}, {(int32_t)dice(i, 14, 5000), 3}};
        s->bias = bias;
        s->bias_count = dice(i, 15, 3);
        int32_t stop_token = (int32_t)dice(i, 16, 3000);
        s->stop_tokens = &stop_token;
        s->stop_token_count = dice(i, 17, 2);
        eng_text stops[2] = {{"ing", 3}, {". ", 2}};
        req.stops = stops;
        req.stop_count = dice(i, 18, 3);
        req.parse = dice(i, 19, 2) ? ENG_PARSE_CHAT : ENG_PARSE_RAW;
        req.starts_in_reasoning = prompt.starts_in_reasoning;
        req.thinking = prompt.thinking;
        char what[32];
        snprintf(what, sizeof what, "round %u", i);
        same_everywhere(engines, &req, &first, what);
        finishes[first.r.finish]++;
    }
    if (rounds >= 12)
        cr_assert(finishes[ENG_FINISH_STOP] > 0 && finishes[ENG_FINISH_LENGTH] > 0);
    base_arena_destroy(arena);
    stop_all(engines);
}

static eng_grammar *compile(eng_format_kind kind, const char *text)
{
    base_err err = BASE_ERR_INIT;
    eng_grammar *grammar = NULL;
    eng_output output = {.format = {.kind = kind, .text = {text, strlen(text)}}};
    cr_assert_eq(eng_output_compile(&grammar, &output, NULL, &err), BASE_OK, "%s", err.text);
    return grammar;
}

Test(drafts, grammars_mask_every_position, .timeout = 3600)
{
    static const char schema[] =
        "{\"type\":\"object\",\"additionalProperties\":false,\"required\":[\"name\",\"age\"],"
        "\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":30},"
        "\"age\":{\"type\":\"integer\",\"minimum\":3,\"maximum\":400}}}";
    eng_engine *engines[DRAFTERS];
    static seen first;
    start_all(engines);
    base_arena *arena = base_arena_create(4096, (size_t)64 << 20);
    for (uint32_t i = 0; i < SHARE(6, 300); i++) {
        static const eng_format_kind kinds[] = {ENG_FORMAT_SCHEMA, ENG_FORMAT_REGEX,
                                                ENG_FORMAT_OBJECT};
        static const char *const texts[] = {schema, "([a-z]{2,9} ){3,12}[0-9]+\\.", ""};
        eng_prompt prompt = make_chat(engines[0], i, arena);
        eng_request req =
            request(prompt.tokens, prompt.token_count, 100, i % 2 ? 1.0f : 0, &first.r);
        req.sampling.ignore_eos = false;
        req.sampling.seed = i;
        req.grammar = compile(kinds[i % 3], texts[i % 3]);
        char what[32];
        snprintf(what, sizeof what, "grammar %u", i);
        same_everywhere(engines, &req, &first, what);
        cr_assert_neq(first.r.finish, ENG_FINISH_ERROR);
        eng_grammar_unref(req.grammar);
    }
    base_arena_destroy(arena);
    stop_all(engines);
}

/* A prediction that is right, one with an edit in its middle, one of another text, and one that
 * begins too late: the output is the same, and what was taken from it is counted. */
Test(drafts, predictions_change_nothing_and_are_counted, .timeout = 600)
{
    static seen without, with;
    eng_options opts = nano(-1);
    opts.draft = ""; /* no drafter: copies and predictions alone */
    eng_engine *engine = start_seen(opts);
    cr_assert_eq(eng_get_info(engine)->draft_block, 0);
    base_arena *arena = base_arena_create(4096, (size_t)64 << 20);
    eng_prompt prompt = make_chat(engine, 1, arena);
    for (int t = 0; t < 2; t++) {
        eng_request req = request(prompt.tokens, prompt.token_count, 300, t ? 0.8f : 0, &without.r);
        run_seen(engine, &req, &without);
        cr_assert_eq(without.r.usage.predicted_accepted + without.r.usage.predicted_rejected, 0);
        for (int kind = 0; kind < 4; kind++) {
            int32_t prediction[300];
            memcpy(prediction, without.r.tokens, sizeof prediction);
            for (uint32_t i = 0; kind > 0 && i < 300; i++)
                if ((kind == 1 && i / 8 == 15) || kind == 2)
                    prediction[i] = (int32_t)(base_rand(1, 1, i).v[0] % 3000);
            req.prediction = prediction + (kind == 3 ? 100 : 0);
            req.prediction_count = kind == 3 ? 200 : 300;
            run_seen(engine, &req, &with);
            same_seen(&without, &with, "predicted");
            const eng_usage *usage = &with.r.usage;
            cr_assert_leq(usage->predicted_accepted + usage->predicted_rejected, usage->drafted);
            cr_assert_leq(usage->predicted_accepted, usage->accepted);
            /* Whether a draft pays is a matter of measured times; that a right one is kept is not.
             */
            if (kind == 0)
                cr_assert_eq(usage->predicted_rejected, 0);
            if (kind == 0 && usage->predicted_accepted > 0)
                cr_assert_lt(with.steps, 300);
        }
    }
    eng_stats stats = eng_get_stats(engine);
    if (stats.predicted == 0)
        printf("  no prediction paid on this machine\n");
    cr_assert_leq(stats.predicted_accepted, stats.predicted);
    cr_assert_leq(stats.copied + stats.predicted, stats.drafted);
    /* What no prediction can be. */
    int32_t outside = 1 << 20;
    eng_request req = request(prompt.tokens, prompt.token_count, 5, 0, &without.r);
    base_err err = BASE_ERR_INIT;
    req.prediction = &outside;
    req.prediction_count = 1;
    cr_assert_eq(eng_submit(engine, &req, &err), BASE_INVALID);
    cr_assert_str_eq(err.param, "prediction");
    err = (base_err)BASE_ERR_INIT;
    req.prediction_count = ENG_PREDICTION_MAX + 1;
    cr_assert_eq(eng_submit(engine, &req, &err), BASE_TOO_LONG);
    base_arena_destroy(arena);
    check_clean(engine);
    eng_destroy(engine);
}

/* ---- faults that comparable servers had ---- */

/* ggml-org/llama.cpp 25173, antirez/ds4 658: long outputs diverge, since a verify pass computes
 * with other numerics than a plain one. */
Test(speculative, B106_greedy_output_with_and_without_drafts, .timeout = 3600)
{
    static result one[WINDOW], two[WINDOW];
    uint32_t count = SHARE(2, 100), block_step = count == 100 ? 1 : 3;
    eng_options opts = nano(0);
    eng_engine *plain_engine = start(&opts);
    for (int32_t block = -1; block <= 7; block += block == -1 ? 2 : (int32_t)block_step) {
        opts.draft_tokens = block;
        eng_engine *engine = start(&opts);
        for (uint32_t from = 0; from < count; from += WINDOW) {
            base_arena *arena = base_arena_create(4096, (size_t)64 << 20);
            uint32_t n = count - from < WINDOW ? count - from : WINDOW;
            eng_request a[WINDOW], b[WINDOW];
            for (uint32_t i = 0; i < n; i++) {
                eng_prompt prompt = make_chat(engine, from + i, arena);
                a[i] = request(prompt.tokens, prompt.token_count, TOKENS(512), 0, &one[i]);
                b[i] = request(prompt.tokens, prompt.token_count, TOKENS(512), 0, &two[i]);
                submit(plain_engine, &a[i]);
            }
            wait_done(one, n);
            for (uint32_t i = 0; i < n; i++)
                submit(engine, &b[i]);
            wait_done(two, n);
            for (uint32_t i = 0; i < n; i++) {
                cr_assert_eq(two[i].count, TOKENS(512));
                same(&one[i], &two[i], "many tokens");
            }
            base_arena_destroy(arena);
        }
        eng_destroy(engine);
    }
    eng_destroy(plain_engine);
}

/* ohdearquant/lattice 243: the verify loop compares draft i + 1 but commits draft 0 as it is. */
Test(speculative, B108_first_draft_token_is_checked_too, .timeout = 600)
{
    static result without, with;
    static const int32_t prompt[] = {7, 7, 7}, script[] = {7};
    eng_options opts = nano(0);
    eng_engine *engine = start(&opts);
    run(engine, prompt, 3, 64, 0, &without);
    eng_destroy(engine);
    for (int32_t length = 1; length <= 7; length += 3) {
        opts.draft_tokens = length;
        opts.draft_script = script;
        opts.draft_script_count = 1;
        engine = start(&opts);
        run(engine, prompt, 3, 64, 0, &with);
        same(&without, &with, "always 7 drafted");
        cr_assert_gt(with.usage.drafted, 0);
        check_clean(engine);
        eng_destroy(engine);
    }
}

/* FujitsuPolycom/sparkring 161: at temperature 1 the filters never reach the sampler. */
Test(speculative, B109_top_k_and_top_p_hold_with_drafts, .timeout = 600)
{
    static result greedy, other;
    eng_options opts = nano(-1);
    eng_engine *engine = start(&opts);
    base_arena *arena = base_arena_create(4096, (size_t)64 << 20);
    eng_prompt prompt = make_chat(engine, 4, arena);
    run(engine, prompt.tokens, prompt.token_count, 64, 0, &greedy);
    for (uint32_t i = 0; i < 20; i++) {
        eng_request req = request(prompt.tokens, prompt.token_count, 64, 1, &other);
        req.sampling.seed = 1000 + i;
        if (i < 10)
            req.sampling.top_k = 1;
        else
            req.sampling.top_p = 0.0001f;
        submit(engine, &req);
        wait_done(&other, 1);
        same(&greedy, &other, i < 10 ? "top_k 1" : "top_p 0.0001");
    }
    base_arena_destroy(arena);
    check_clean(engine);
    eng_destroy(engine);
}

/* sgl-project/sglang 33643, vllm-project/vllm 33251: only the last accepted token of a step is
 * counted, or it is counted twice. */
Test(speculative, B110_penalties_count_tokens_not_steps, .timeout = 600)
{
    eng_engine *engines[DRAFTERS];
    static seen first, other;
    start_all(engines);
    base_arena *arena = base_arena_create(4096, (size_t)64 << 20);
    eng_prompt prompt = make_chat(engines[0], 6, arena);
    for (int i = 0; i < 3; i++) {
        eng_request req = request(prompt.tokens, prompt.token_count, TOKENS(128), 0, &first.r);
        req.sampling.frequency_penalty = i == 0 ? 0.8f : 0;
        req.sampling.presence_penalty = i == 1 ? 0.3f : 0;
        req.sampling.repetition_penalty = i == 2 ? 1.1f : 1;
        same_everywhere(engines, &req, &first, "penalties");
        for (int e = PLAIN; e < DRAFTERS; e++) {
            watched = engines[e];
            counts_checked = 0;
            run_seen(engines[e], &req, &other);
            watched = NULL;
            cr_assert_geq(counts_checked, other.steps - 1, "%u of %u", counts_checked, other.steps);
        }
    }
    base_arena_destroy(arena);
    stop_all(engines);
}

/* ggml-org/llama.cpp 27972: every accepted token reports logprob 0. */
Test(speculative, B112_logprobs_are_the_targets_own, .timeout = 600)
{
    eng_engine *engines[DRAFTERS];
    static seen first, other;
    start_all(engines);
    base_arena *arena = base_arena_create(4096, (size_t)64 << 20);
    eng_prompt prompt = make_chat(engines[0], 9, arena);
    eng_request req = request(prompt.tokens, prompt.token_count, 32, 0, &first.r);
    req.sampling.logprobs = true;
    req.sampling.top_logprobs = 3;
    same_everywhere(engines, &req, &first, "logprobs");
    run_seen(engines[TRUTH], &req, &other);
    cr_assert_gt(other.r.usage.accepted, 16, "right drafts are kept");
    cr_assert_eq(other.logprob_count, 32, "one a token, the one behind the drafts included");
    uint32_t zeros = 0;
    for (uint32_t i = 0; i < 32; i++) {
        zeros += other.logprobs[i].logprob == 0;
        cr_assert_eq(other.logprobs[i].token, other.r.tokens[i]);
        cr_assert_eq(other.logprobs[i].top_count, 3);
    }
    cr_assert_lt(zeros, 32);
    base_arena_destroy(arena);
    stop_all(engines);
}

/* vllm-project/vllm 47616, osaurus-ai/vmlx-swift 109: the text is cut at the stop, but tokens,
 * logprobs, usage or text behind it remain. The case's own words, as two accepted blocks. */
typedef struct words {
    char text[128];
    size_t length;
} words;

static void add_words(void *ctx, const eng_part *part)
{
    words *w = ctx;
    cr_assert_lt(w->length + part->length, sizeof w->text);
    memcpy(w->text + w->length, part->text, part->length);
    w->length += part->length;
}

Test(speculative, B113_stop_inside_an_accepted_block, .timeout = 600)
{
    static const char *const pieces[] = {"alpha,", " beta,", " gamma,", " delta", ",", " epsilon,"};
    static seen whole, cut;
    eng_options opts = nano(-1);
    opts.draft_script = truth;
    opts.draft_script_count = OUTPUT_MAX;
    eng_engine *engine = start_seen(opts);
    words said = {0};
    eng_text stop = {"delta", 5};
    eng_decoder_options decoder = {
        .parse = ENG_PARSE_RAW, .stops = &stop, .stop_count = 1, .part = add_words, .ctx = &said};
    eng_decoder *d;
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(eng_decoder_create(&d, engine->codec, &decoder, &err), BASE_OK, "%s", err.text);
    uint32_t pushed = 0;
    bool on = true;
    while (on && pushed < 6) {
        on = eng_decoder_push(d, 100, pieces[pushed], strlen(pieces[pushed]));
        pushed++;
    }
    eng_decoder_finish(d);
    cr_assert_eq(pushed, 4, "tokens up to the one that completed the stop");
    cr_assert_eq(eng_decoder_stop_index(d), 0);
    said.text[said.length] = '\0';
    cr_assert_str_eq(said.text, "alpha, beta, gamma, ");
    eng_decoder_destroy(d);
    /* The same through the loop: a stop from the middle of what is accepted as one block. */
    base_arena *arena = base_arena_create(4096, (size_t)64 << 20);
    eng_prompt prompt = make_chat(engine, 1, arena);
    eng_request req = request(prompt.tokens, prompt.token_count, 100, 0, &whole.r);
    req.sampling.logprobs = true;
    req.space = 20;
    run_seen(engine, &req, &whole);
    memcpy(truth, whole.r.tokens, sizeof truth);
    size_t at = 0, length = 0;
    for (uint32_t t = 0; t < 21; t++) { /* the text that 20 tokens make, and the next one's */
        const char *bytes = eng_tok_bytes(engine->tok, whole.r.tokens[t], &length);
        cr_assert_not_null(bytes);
        at += t < 20 ? length : 0;
    }
    char word[64];
    cr_assert(length > 0 && length < sizeof word && at + length <= whole.r.text_length);
    memcpy(word, whole.r.text + at, length);
    stop = (eng_text){word, length};
    const char *first = memmem(whole.r.text, whole.r.text_length, word, length);
    req.stops = &stop;
    req.stop_count = 1;
    req.space = 21;
    run_seen(engine, &req, &cut);
    cr_assert_eq(cut.r.finish, ENG_FINISH_STOP);
    cr_assert_eq(cut.r.text_length, (size_t)(first - whole.r.text));
    cr_assert_leq(cut.r.count, 21, "no token behind the one that completed the stop");
    cr_assert_eq(cut.r.usage.output_tokens, cut.r.count);
    cr_assert_eq(cut.logprob_count, cut.r.count);
    cr_assert_eq(memcmp(cut.r.tokens, whole.r.tokens, cut.r.count * sizeof(int32_t)), 0);
    cr_assert_gt(cut.r.usage.accepted, 0);
    /* What was verified behind the stop is not in the cache. */
    int32_t known[4096];
    memcpy(known, prompt.tokens, prompt.token_count * sizeof *known);
    memcpy(known + prompt.token_count, whole.r.tokens, 100 * sizeof *known);
    cr_assert_leq(eng_peek_cached(engine, 21, known, prompt.token_count + 100),
                  prompt.token_count + cut.r.run_tokens);
    base_arena_destroy(arena);
    check_clean(engine);
    eng_destroy(engine);
}

/* vllm-project/vllm 53777 and 51660, sgl-project/sglang 28943: drafts that the grammar forbids
 * corrupt its state. */
Test(speculative, B114_a_grammar_with_forbidden_drafts, .timeout = 600)
{
    static seen without, with;
    int32_t script[8];
    uint32_t script_count = 0;
    eng_options opts = nano(0);
    eng_engine *engine = start_seen(opts);
    base_arena *arena = base_arena_create(4096, (size_t)64 << 20);
    static const char *const drafts[] = {"\n", "```"};
    for (int i = 0; i < 2; i++) {
        int32_t *tokens;
        uint32_t count;
        base_err err = BASE_ERR_INIT;
        eng_text text = {drafts[i], strlen(drafts[i])};
        cr_assert_eq(eng_tokenize(engine, &tokens, &count, text, false, 0, arena, &err), BASE_OK);
        for (uint32_t t = 0; t < count && script_count < 8; t++)
            script[script_count++] = tokens[t];
    }
    eng_grammar *grammar = compile(ENG_FORMAT_OBJECT, "");
    eng_prompt prompt = make_chat(engine, 2, arena);
    eng_request req = request(prompt.tokens, prompt.token_count, 100, 0, &without.r);
    req.grammar = grammar;
    req.sampling.ignore_eos = false;
    run_seen(engine, &req, &without);
    eng_destroy(engine);
    cr_assert_neq(without.r.finish, ENG_FINISH_ERROR);
    cr_assert_gt(without.r.text_length, 1);
    cr_assert_eq(without.r.text[0], '{');
    opts.draft_tokens = -1;
    opts.draft_script = script;
    opts.draft_script_count = script_count;
    engine = start_seen(opts);
    run_seen(engine, &req, &with);
    same_seen(&without, &with, "newlines and fences drafted");
    cr_assert_gt(with.r.usage.drafted, 0);
    check_clean(engine);
    eng_destroy(engine);
    eng_grammar_unref(grammar);
    base_arena_destroy(arena);
}
