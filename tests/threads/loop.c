/* The engine under ThreadSanitizer: its own thread, the kernels' pool, the disk tier's threads, and
 * clients that submit, cancel, pin, erase and ask at once. The vector kernels are compiled without
 * it, so what is watched is everything around them. A plain program, since Criterion does not run
 * under that sanitizer. Exit status 0: every request ended once, equal prompts had equal answers,
 * every page is accounted for, and no race was seen. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/rand.h"
#include "engine/engine.h"

#define MODEL SOURCE_ROOT "/tests/vectors/tiny"
#define CLIENTS 3
#define REQUESTS 10 /* of one client */
#define PROMPT 150
#define PROMPTS 3 /* different ones */
#define OUTPUT 24

typedef struct result {
    int32_t tokens[OUTPUT];
    uint32_t count;
    eng_finish finish;
    uint32_t done;
} result;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static result results[CLIENTS][REQUESTS]; /* guarded by lock */
static int32_t prompts[PROMPTS][PROMPT];
static eng_engine *engine;
static atomic_bool over;
static atomic_int wrong;

static void expect(bool holds, const char *what)
{
    if (!holds && atomic_fetch_add(&wrong, 1) < 10)
        printf("not so: %s\n", what);
}

static void on_event(void *ctx, const eng_event *event)
{
    result *r = event->user;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < event->token_count && r->count < OUTPUT; i++)
        r->tokens[r->count++] = event->tokens[i];
    if (event->kind == ENG_EVENT_DONE) {
        r->finish = event->finish;
        r->done++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
}

static void on_flush(void *ctx)
{
}

/* Every fourth request is cancelled at once, wherever it stands then. */
static bool is_cancelled(uint32_t n)
{
    return n % 4 == 3;
}

static void *client(void *arg)
{
    const uint32_t c = (uint32_t)(uintptr_t)arg;
    for (uint32_t n = 0; n < REQUESTS; n++) {
        base_err err = BASE_ERR_INIT;
        eng_request request = {
            .id = c * REQUESTS + n + 1,
            .user = &results[c][n],
            .tokens = prompts[n % PROMPTS],
            .token_count = PROMPT,
            .space = 1,
            .max_tokens = OUTPUT,
            .sampling = {.top_p = 1, .repetition_penalty = 1, .ignore_eos = true}};
        expect(eng_submit(engine, &request, &err) == BASE_OK, "a request is taken");
        if (is_cancelled(n))
            eng_cancel(engine, request.id);
        if (n % 2 == 0)
            continue; /* two at a time */
        pthread_mutex_lock(&lock);
        while (results[c][n].done == 0 || results[c][n - 1].done == 0)
            pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

/* What the gateway's other threads do meanwhile. */
static void *meddler(void *arg)
{
    for (uint32_t n = 0; !atomic_load(&over); n++) {
        const int32_t *tokens = prompts[n % PROMPTS];
        base_err err = BASE_ERR_INIT;
        eng_stats stats = eng_get_stats(engine);
        expect(stats.cached_tokens <= stats.prompt_tokens || stats.requests == 0,
               "counters are sane");
        eng_peek_cached(engine, 1, tokens, PROMPT);
        eng_pin(engine, 1, tokens, PROMPT, n % 2 ? 1 : 0);
        if (n % 5 == 0)
            expect(eng_erase(engine, 1, tokens, PROMPT, 0, &err) == BASE_OK, "a path is erased");
        usleep(3000);
    }
    return NULL;
}

int main(void)
{
    char disk[] = "/tmp/whimbrel-threads-XXXXXX", command[64];
    base_err err = BASE_ERR_INIT;
    pthread_t clients[CLIENTS], other;
    if (mkdtemp(disk) == NULL)
        return 1;
    for (uint32_t p = 0; p < PROMPTS; p++)
        for (uint32_t i = 0; i < PROMPT;
             i++) /* they part at the third token from the end of a page */
            prompts[p][i] = (int32_t)(base_rand(i < 125 ? 0 : p, 7, i).v[0] % 200);
    eng_options options = {.model = MODEL,
                           .backend = "cpu",
                           .variant = "auto",
                           .kv = "nvfp4",
                           .threads = 2,
                           .kv_bytes = 16 << 20,
                           .context_max = 1024,
                           .sequences_max = 4,
                           .queue_max = 64,
                           .step_rows_max = 64,
                           .prefill_chunk = 64,
                           .draft_tokens = 3,
                           .disk = disk,
                           .disk_bytes = 64 << 20,
                           .sink = {.event = on_event, .flush = on_flush}};
    if (eng_create(&engine, &options, &err) != BASE_OK) {
        printf("%s\n", err.text);
        return 1;
    }
    pthread_create(&other, NULL, meddler, NULL);
    for (uintptr_t c = 0; c < CLIENTS; c++)
        pthread_create(&clients[c], NULL, client, (void *)c);
    for (uint32_t c = 0; c < CLIENTS; c++)
        pthread_join(clients[c], NULL);
    atomic_store(&over, true);
    pthread_join(other, NULL);
    expect(eng_check(engine, &err), "every page is accounted for");
    eng_destroy(engine);
    for (uint32_t c = 0; c < CLIENTS; c++)
        for (uint32_t n = 0; n < REQUESTS; n++) {
            const result *r = &results[c][n], *first = &results[0][n % PROMPTS];
            expect(r->done == 1, "a request ends once");
            expect(r->finish == ENG_FINISH_LENGTH ||
                       (is_cancelled(n) && r->finish == ENG_FINISH_CANCELLED),
                   "it ends as asked");
            expect(memcmp(r->tokens, first->tokens, r->count * sizeof *r->tokens) == 0,
                   "equal prompts have equal answers");
        }
    snprintf(command, sizeof command, "rm -rf %s", disk);
    return system(command) != 0 || atomic_load(&wrong) != 0;
}
