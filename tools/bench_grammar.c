/* s.*: structured output. What a mask costs at a vocabulary of 200,064 tokens, what compiling
 * costs, and what both do to a model that decodes.
 *
 *   s.mask.all     a mask, p50 over all of a walk's                        us; limit 10
 *   s.mask.p99     a mask of a place that was not seen before, p99         us; limit 300
 *   s.compile      a schema, p50 over the cases                            us; limit 2000
 *   s.overhead     one stream under a grammar that allows everything       ms a token, beside free
 *   s.jump         decoding a fixed schema, beside free text of the same   tok/s, beside free
 *                  length: all but the free one's time to its first token
 *   s.jump.drafts  the same with drafts                                    tok/s, beside free
 *   s.answer       the same answers, without drafts, from request to end   tok/s, beside free
 *   s.accepted     tokens a step with drafts under a grammar               beside free
 *
 * The vocabulary is generated: words, most behind a blank, two scripts, 4 in 100 with the odd ends
 * that JSON brings. */
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/rand.h"
#include "engine/engine.h"
#include "engine/grammar.h"
#include "tools/bench.h"

#define ROUNDS 5
#define VOCAB 200064u
#define STEPS_MAX 4096u
#define OUTPUT 96u

static const char *const schemas[] = {
    "{\"type\":\"object\",\"properties\":{\"id\":{\"type\":\"integer\",\"minimum\":3,\"maximum\":"
    "120},"
    "\"name\":{\"type\":\"string\",\"maxLength\":12},\"tags\":{\"type\":\"array\",\"items\":{"
    "\"enum\":"
    "[\"a\",\"b "
    "c\",\"\\u00e9\"]},\"maxItems\":4,\"uniqueItems\":true}},\"required\":[\"id\",\"tags\"],"
    "\"additionalProperties\":false}",
    "{\"$ref\":\"#/$defs/"
    "n\",\"$defs\":{\"n\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":["
    "\"number\",\"null\"]},\"kids\":{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/"
    "n\"},\"maxItems\":2}},"
    "\"required\":[\"kids\"],\"additionalProperties\":false}}}",
    "{\"type\":\"string\",\"pattern\":\"^[A-Z][a-z]+( [A-Z][a-z]+)?$\",\"maxLength\":24}",
    "{\"anyOf\":[{\"type\":\"string\"},{\"type\":\"object\"},{\"const\":[1,{\"k\":false}]}]}",
};

static void fail(const base_err *err)
{
    fprintf(stderr, "whimbrel-bench: %s\n", err->text);
    exit(1);
}

static int by_value(const void *pa, const void *pb)
{
    double a = *(const double *)pa, b = *(const double *)pb;
    return (a > b) - (a < b);
}

/* ---- masks ---- */

typedef char token_text[24];

static const char *text_of(const void *context, int32_t id, size_t *length)
{
    const token_text *texts = context;
    *length = strlen(texts[id]);
    return *length == 0 ? NULL : texts[id];
}

static void make_texts(token_text *texts)
{
    static const char *const odd[] = {"\"",  "\",", "\":", "\": \"", "\"}",
                                      "{\"", "\\n", "\\",  "],",     "\n"};
    for (uint32_t id = 0; id < VOCAB; id++) {
        base_rand4 r = base_rand(5, 1, id), q = base_rand(5, 2, id);
        size_t n = 1 + r.v[0] % 7, at = 0;
        if (id < 256) {
            texts[id][0] = (char)id;
            continue;
        }
        if (r.v[1] % 100 < 55)
            texts[id][at++] = ' ';
        for (size_t i = 0; i < n; i++) {
            uint32_t ch = (i % 2 == 0 ? q.v[i / 2] : q.v[i / 2] >> 16) & 0xFFFF;
            if (r.v[2] % 100 < 75)
                texts[id][at++] = (char)('a' + ch % 26);
            else if (r.v[2] % 100 < 90)
                at += (size_t)snprintf(texts[id] + at, 4, "%c%c", 0xD0, (int)(0x80 + ch % 48));
            else
                texts[id][at++] = (char)(33 + ch % 94);
        }
        if (r.v[3] % 100 < 4)
            strcpy(texts[id] + at, odd[r.v[3] / 100 % 10]);
    }
}

static bool bit(const uint32_t *mask, uint32_t id)
{
    return mask[id / 32] >> id % 32 & 1;
}

typedef struct walk_times {
    double all[STEPS_MAX], fresh[STEPS_MAX];
    uint32_t count, fresh_count;
} walk_times;

static void walk(const token_text *texts, const eng_vocab *vocab, const char *schema,
                 walk_times *times)
{
    base_err err = BASE_ERR_INIT;
    eng_grammar *g;
    eng_grammar_run *run;
    if (eng_grammar_schema(&g, schema, strlen(schema), NULL, &err) != BASE_OK ||
        eng_grammar_run_create(&run, g, vocab, &err) != BASE_OK)
        fail(&err);
    for (uint32_t seed = 0; seed < 8; seed++) {
        eng_grammar_state state;
        eng_grammar_start(&state, run);
        for (uint32_t step = 0; step < 60 && times->count < STEPS_MAX; step++) {
            uint64_t begin = base_now_ns();
            const uint32_t *mask = eng_grammar_mask(&state, NULL, 0);
            double us = (double)(base_now_ns() - begin) / 1e3;
            times->all[times->count++] = us;
            if (us > 1) /* less is a place that was seen before */
                times->fresh[times->fresh_count++] = us;
            uint32_t id = base_rand(seed, step, 9).v[0] % VOCAB, tries = 0;
            while (tries++ < VOCAB && !bit(mask, id))
                id = (id + 1) % VOCAB;
            size_t length;
            const char *bytes = bit(mask, id) ? text_of(texts, (int32_t)id, &length) : NULL;
            if (bytes == NULL || !eng_grammar_advance(&state, bytes, length))
                break;
        }
        eng_grammar_end(&state);
    }
    eng_grammar_run_destroy(run);
    eng_grammar_unref(g);
}

static void bench_masks(void)
{
    base_err err = BASE_ERR_INIT;
    eng_vocab *vocab;
    token_text *texts = calloc(VOCAB, sizeof *texts);
    walk_times *times = malloc(sizeof *times);
    samples all = {0}, p99 = {0};
    char config[96] = "";
    if (texts == NULL || times == NULL)
        exit(1);
    make_texts(texts);
    if (eng_vocab_create(&vocab, text_of, texts, VOCAB, &err) != BASE_OK)
        fail(&err);
    for (uint32_t r = 0; r <= ROUNDS; r++) {
        times->count = times->fresh_count = 0;
        for (size_t i = 0; i < sizeof schemas / sizeof *schemas; i++)
            walk(texts, vocab, schemas[i], times);
        qsort(times->all, times->count, sizeof *times->all, by_value);
        qsort(times->fresh, times->fresh_count, sizeof *times->fresh, by_value);
        if (r == 0)
            continue;
        all.v[all.n++] = times->all[times->count / 2];
        p99.v[p99.n++] = times->fresh[times->fresh_count * 99 / 100];
        snprintf(config, sizeof config, "%u tokens, %u masks, %u first, their p50 %.0f us", VOCAB,
                 times->count, times->fresh_count, times->fresh[times->fresh_count / 2]);
    }
    bench_report("s.mask.all", config, "us", false, &all, 10, "the goal");
    bench_report("s.mask.p99", config, "us", false, &p99, 300, "the goal");
    eng_vocab_destroy(vocab);
    free(texts);
    free(times);
}

static void bench_compile(void)
{
    samples s = {0};
    for (uint32_t r = 0; r < ROUNDS; r++) {
        double us[sizeof schemas / sizeof *schemas];
        for (size_t i = 0; i < sizeof schemas / sizeof *schemas; i++) {
            base_err err = BASE_ERR_INIT;
            eng_grammar *g;
            uint64_t begin = base_now_ns();
            if (eng_grammar_schema(&g, schemas[i], strlen(schemas[i]), NULL, &err) != BASE_OK)
                fail(&err);
            us[i] = (double)(base_now_ns() - begin) / 1e3;
            eng_grammar_unref(g);
        }
        qsort(us, sizeof us / sizeof *us, sizeof *us, by_value);
        s.v[s.n++] = us[sizeof us / sizeof *us / 2];
    }
    bench_report("s.compile", "the four schemas of the masks", "us", false, &s, 2000, "the goal");
}

/* ---- a model that decodes ---- */

typedef struct answer {
    int32_t tokens[1024];
    uint32_t count;
    eng_usage usage;
    eng_finish finish;
    bool done;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} answer;

static void on_event(void *ctx, const eng_event *event)
{
    answer *a = event->user;
    for (uint32_t i = 0; i < event->token_count && a->count < 1024; i++)
        a->tokens[a->count++] = event->tokens[i];
    if (event->kind != ENG_EVENT_DONE)
        return;
    pthread_mutex_lock(&a->lock);
    a->usage = event->usage;
    a->finish = event->finish;
    a->done = true;
    pthread_cond_signal(&a->changed);
    pthread_mutex_unlock(&a->lock);
}

static void on_flush(void *ctx)
{
}

static eng_engine *start(const char *model, uint32_t threads, int32_t draft_tokens)
{
    eng_options options = {.model = model,
                           .backend = "auto",
                           .variant = "auto",
                           .kv = "nvfp4",
                           .threads = threads,
                           .kv_bytes = (uint64_t)256 << 20,
                           .sequences_max = 2,
                           .queue_max = 2,
                           .step_rows_max = 512,
                           .prefill_chunk = 512,
                           .draft_tokens = draft_tokens,
                           .sink = {.event = on_event, .flush = on_flush}};
    eng_engine *engine = NULL;
    base_err err = BASE_ERR_INIT;
    if (eng_create(&engine, &options, &err) != BASE_OK)
        fail(&err);
    return engine;
}

/* `to_the_end`: of what the grammar admits; otherwise `max_tokens`, whatever comes. */
static void ask(eng_engine *engine, const char *text, eng_grammar *grammar, uint32_t max_tokens,
                bool to_the_end, answer *a)
{
    static uint64_t id;
    base_err err = BASE_ERR_INIT;
    base_arena *arena = base_arena_create(4096, (size_t)16 << 20);
    eng_item item = {.role = ENG_ROLE_USER, .text = {text, strlen(text)}};
    eng_chat chat = {.items = &item, .item_count = 1, .thinking = ENG_THINK_DISABLED};
    eng_prompt prompt;
    if (arena == NULL || eng_render(engine, &prompt, &chat, 0, NULL, arena, &err) != BASE_OK)
        fail(&err);
    *a = (answer){.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    eng_request request = {.id = ++id,
                           .user = a,
                           .tokens = prompt.tokens,
                           .token_count = prompt.token_count,
                           .space = id, /* nothing is cached */
                           .max_tokens = max_tokens,
                           .parse = ENG_PARSE_CHAT,
                           .thinking = prompt.thinking,
                           .grammar = grammar,
                           .sampling = ENG_SAMPLING_DEFAULT};
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = !to_the_end;
    if (eng_submit(engine, &request, &err) != BASE_OK)
        fail(&err);
    pthread_mutex_lock(&a->lock);
    while (!a->done)
        pthread_cond_wait(&a->changed, &a->lock);
    pthread_mutex_unlock(&a->lock);
    base_arena_destroy(arena);
}

static eng_grammar *output_grammar(eng_format_kind kind, const char *text)
{
    base_err err = BASE_ERR_INIT;
    eng_grammar *grammar = NULL;
    eng_output output = {.format = {.kind = kind, .text = {text, strlen(text)}}};
    if (eng_output_compile(&grammar, &output, NULL, &err) != BASE_OK)
        fail(&err);
    return grammar;
}

static const char *const prompts[] = {"Tell me about the harbour.", "hello!",
                                      "Write a few words about Oslo.", "What is the weather like?"};
#define PROMPTS (sizeof prompts / sizeof *prompts)

static const char FIXED[] =
    "{\"type\":\"object\",\"additionalProperties\":false,\"required\":[\"temperature_celsius\","
    "\"wind_direction\",\"is_raining\",\"station_identifier\"],\"properties\":{"
    "\"temperature_celsius\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":40},"
    "\"wind_direction\":{\"enum\":[\"north\",\"south\",\"east\",\"west\"]},"
    "\"is_raining\":{\"type\":\"boolean\"},\"station_identifier\":{\"type\":\"integer\","
    "\"minimum\":100,\"maximum\":999}}}";

static double token_ms(const answer *a)
{
    return (double)a->usage.decode_ns / 1e6 / (a->count - 1);
}

/* Tokens and times of answers to a schema, and of free ones of the same lengths. */
typedef struct pace {
    double tokens, answers, held_ns, free_ns, first_ns;
} pace;

static void note(pace *p, const answer *held, const answer *open)
{
    p->tokens += held->count;
    p->answers++;
    p->held_ns += (double)(held->usage.ttft_ns + held->usage.decode_ns);
    p->free_ns += (double)(open->usage.ttft_ns + open->usage.decode_ns);
    p->first_ns += (double)open->usage.ttft_ns;
}

static bool bench_held(const char *model, uint32_t threads)
{
    eng_engine *engines[] = {start(model, threads, 0), start(model, threads, -1)};
    eng_grammar *any = output_grammar(ENG_FORMAT_REGEX, "[\\s\\S]*");
    eng_grammar *fixed = output_grammar(ENG_FORMAT_SCHEMA, FIXED);
    samples overhead = {0}, jump[2] = {0}, whole = {0}, accepted = {0};
    bench_peer free_ms = {.name = "free"}, free_rate[2] = {{.name = "free"}, {.name = "free"}},
               free_whole = {.name = "free"}, free_steps = {.name = "free"};
    static answer a, b;
    bool good = true;
    for (uint32_t r = 0; r <= ROUNDS; r++) {
        double held_ms = 0, open_ms = 0;
        double steps[2] = {0}, kept[2] = {0};
        pace paces[2] = {0};
        for (size_t i = 0; i < PROMPTS; i++) {
            ask(engines[0], prompts[i], NULL, OUTPUT, false, &a);
            open_ms += token_ms(&a);
            ask(engines[0], prompts[i], any, OUTPUT, false, &b);
            held_ms += token_ms(&b);
            good = good && b.count > OUTPUT / 2;
            for (int drafts = 0; drafts < 2; drafts++) {
                ask(engines[drafts], prompts[i], fixed, OUTPUT, true, &b);
                good = good && b.finish == ENG_FINISH_STOP;
                ask(engines[drafts], prompts[i], NULL, b.count, false, &a);
                note(&paces[drafts], &b, &a);
            }
            ask(engines[1], prompts[i], NULL, OUTPUT, false, &a);
            ask(engines[1], prompts[i], any, OUTPUT, false, &b);
            steps[0] += a.usage.steps;
            kept[0] += a.usage.accepted;
            steps[1] += b.usage.steps;
            kept[1] += b.usage.accepted;
        }
        if (r == 0)
            continue;
        overhead.v[overhead.n++] = held_ms / PROMPTS;
        free_ms.s.v[free_ms.s.n++] = open_ms / PROMPTS;
        for (int drafts = 0; drafts < 2; drafts++) {
            const pace *p = &paces[drafts];
            double tokens = 1e9 * (p->tokens - p->answers);
            jump[drafts].v[jump[drafts].n++] = tokens / (p->held_ns - p->first_ns);
            free_rate[drafts].s.v[free_rate[drafts].s.n++] = tokens / (p->free_ns - p->first_ns);
        }
        whole.v[whole.n++] = 1e9 * paces[0].tokens / paces[0].held_ns;
        free_whole.s.v[free_whole.s.n++] = 1e9 * paces[0].tokens / paces[0].free_ns;
        accepted.v[accepted.n++] = 1 + kept[1] / steps[1];
        free_steps.s.v[free_steps.s.n++] = 1 + kept[0] / steps[0];
    }
    bench_report_beside("s.overhead", "any text, no drafts; in turn", "ms/token", false, &overhead,
                        0, "", &free_ms, 1);
    bench_report_beside("s.jump", "four named values, no drafts", "tok/s", true, &jump[0], 0, "",
                        &free_rate[0], 1);
    bench_report_beside("s.jump.drafts", "four named values, adaptive drafts", "tok/s", true,
                        &jump[1], 0, "", &free_rate[1], 1);
    bench_report_beside("s.answer", "the same, from request to end", "tok/s", true, &whole, 0, "",
                        &free_whole, 1);
    bench_report_beside("s.accepted", "any text, adaptive drafts", "tok/step", true, &accepted, 0,
                        "", &free_steps, 1);
    if (!good)
        fprintf(stderr, "whimbrel-bench: an answer under a grammar is not whole\n");
    eng_grammar_unref(any);
    eng_grammar_unref(fixed);
    eng_destroy(engines[0]);
    eng_destroy(engines[1]);
    return good;
}

bool bench_grammar(const char *model, uint32_t threads)
{
    if (bench_wanted("s.mask"))
        bench_masks();
    if (bench_wanted("s.compile"))
        bench_compile();
    return !bench_wanted("s.overhead") || bench_held(model, threads);
}
