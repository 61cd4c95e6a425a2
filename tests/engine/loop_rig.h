/* An engine on a small random model, requests for it and what came back; for tests of the whole
 * loop. */
#pragma once
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/rand.h"
#include "engine/engine.h"

#define MODEL "random:tiny?seed=3"
#define OUTPUT_MAX 512

typedef struct result {
    int32_t tokens[OUTPUT_MAX];
    uint64_t at_ns[OUTPUT_MAX]; /* when each came */
    uint32_t count;
    char text[16384];
    size_t text_length;
    eng_usage usage;
    eng_finish finish;
    int32_t stop_index;
    uint32_t run_tokens;
    uint32_t started, done, parts_after_done;
    /* Set by those who want them: of the output, and of the prompt in the order they came. */
    eng_logprob *logprobs, *scores;
    uint32_t score_count;
} result;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static inline void on_event(void *ctx, const eng_event *event)
{
    result *r = event->user;
    pthread_mutex_lock(&lock);
    if (event->kind == ENG_EVENT_STARTED)
        r->started++;
    for (uint32_t i = 0; i < event->token_count && r->count < OUTPUT_MAX; i++) {
        r->at_ns[r->count] = base_now_ns();
        if (r->logprobs != NULL)
            r->logprobs[r->count] = event->logprobs[i];
        r->tokens[r->count++] = event->tokens[i];
    }
    for (uint32_t i = 0; i < event->prompt_logprob_count && r->scores != NULL; i++) {
        cr_assert_eq(r->count, 0, "a score of the prompt behind output");
        r->scores[r->score_count++] = event->prompt_logprobs[i];
    }
    for (uint32_t i = 0; i < event->part_count; i++) {
        const eng_part *part = &event->parts[i];
        cr_assert_lt(r->text_length + part->length, sizeof r->text);
        memcpy(r->text + r->text_length, part->text, part->length);
        r->text_length += part->length;
        r->parts_after_done += r->done;
    }
    if (event->kind == ENG_EVENT_DONE) {
        r->usage = event->usage;
        r->finish = event->finish;
        r->stop_index = event->stop_index;
        r->run_tokens = event->run_tokens;
        r->done++;
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static inline void on_flush(void *ctx)
{
}

static inline eng_options options(void)
{
    return (eng_options){.model = MODEL,
                         .backend = "cpu",
                         .variant = "auto",
                         .kv = "nvfp4",
                         .threads = 2,
                         .kv_bytes = 64 << 20,
                         .context_max = 2048,
                         .sequences_max = 8,
                         .queue_max = 64,
                         .step_rows_max = 256,
                         .prefill_chunk = 64,
                         .draft_tokens = 0,
                         .sink = {.event = on_event, .flush = on_flush}};
}

static inline eng_engine *start(const eng_options *opts)
{
    base_err err = BASE_ERR_INIT;
    eng_engine *engine = NULL;
    cr_assert_eq(eng_create(&engine, opts, &err), BASE_OK, "%s", err.text);
    return engine;
}

/* Ordinary tokens only: the random model's vocabulary begins with its bytes. */
static inline void make_prompt(int32_t *tokens, uint32_t count, uint64_t seed)
{
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = (int32_t)(base_rand(seed, 1, i).v[0] % 200);
}

static inline void wait_done(result *r, uint32_t count)
{
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < count; i++)
        while (r[i].done == 0)
            pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static uint64_t next_id = 1;

static inline eng_request request(const int32_t *tokens, uint32_t count, uint32_t max_tokens,
                                  float temperature, result *r)
{
    memset(r, 0, sizeof *r);
    eng_request req = {.id = next_id++,
                       .user = r,
                       .tokens = tokens,
                       .token_count = count,
                       .space = 1,
                       .max_tokens = max_tokens,
                       .sampling = ENG_SAMPLING_DEFAULT};
    req.sampling.temperature = temperature;
    req.sampling.seed = 99;
    req.sampling.ignore_eos = true;
    return req;
}

static inline void submit(eng_engine *engine, const eng_request *req)
{
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(eng_submit(engine, req, &err), BASE_OK, "%s", err.text);
}

static inline void run(eng_engine *engine, const int32_t *tokens, uint32_t count,
                       uint32_t max_tokens, float temperature, result *r)
{
    eng_request req = request(tokens, count, max_tokens, temperature, r);
    submit(engine, &req);
    wait_done(r, 1);
}

static inline void check_clean(eng_engine *engine)
{
    base_err err = BASE_ERR_INIT;
    cr_assert(eng_check(engine, &err), "%s", err.text);
}

static inline void same(const result *a, const result *b, const char *what)
{
    cr_assert_eq(a->count, b->count, "%s: %u and %u tokens", what, a->count, b->count);
    cr_assert_eq(memcmp(a->tokens, b->tokens, a->count * sizeof *a->tokens), 0, "%s: tokens differ",
                 what);
}
