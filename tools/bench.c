/* whimbrel-bench: figures with the limit that the same machine reached in the same call.
 *
 * Each row is measured in rounds; the value is the median, beside the best round and the spread.
 * Limits are measured first, in this process: read bandwidth, multiply-add rate, a system call. A
 * bench whose result is wrong prints no time and makes the exit status 1.
 *
 *   cal.read.tN    sequential read of a ring of 256 MiB a thread          GB/s
 *   cal.fma.tN     independent float multiply-adds from registers         GFLOP/s
 *   cal.syscall    getppid                                                ns
 *   c.model.tok    one stream, greedy, no drafts                          tok/s; limit: weight
 * bytes a token / read bandwidth c.model.draft  the same prompts with adaptive drafts; must give
 * the same tokens e.prefill      a prompt of 4,096 tokens, nothing cached               tok/s;
 * limit: multiply-adds a token / FMA rate g.req          chat request of 1 KB over HTTP/1.1, one
 * token          µs added to the engine's own time b.ready        exec to the ready line, with
 * a new data directory ms; b.ready.again: with the one that a server has left */
#include <arpa/inet.h>
#include <jansson.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/rand.h"
#include "engine/engine.h"
#include "engine/model.h"
#include "tools/bench.h"

#define ROUNDS 7
#define THREADS_MAX 64

typedef struct settings {
    bool json;
    const char *model, *backend, *peer_file, *server;
    char **names;
    int name_count;
    uint32_t threads;
} settings;

static settings opt = {.model = "config/models/nano", .backend = "cpu"};
static bool failed;
static json_t *peers;
static bench_limits limits;

bool bench_wanted(const char *name)
{
    for (int i = 0; i < opt.name_count; i++)
        if (strncmp(name, opt.names[i], strlen(opt.names[i])) == 0)
            return true;
    return opt.name_count == 0;
}

/* ---- results ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double peer_value(const char *bench, const char **version)
{
    json_t *row;
    size_t i;
    json_array_foreach(peers, i, row)
    {
        const char *name = json_string_value(json_object_get(row, "bench"));
        if (name != NULL && strcmp(name, bench) == 0) {
            *version = json_string_value(json_object_get(row, "peer_version"));
            return json_number_value(json_object_get(row, "value"));
        }
    }
    return 0;
}

void bench_report_beside(const char *bench, const char *config, const char *unit, bool higher,
                         samples *s, double limit, const char *basis, bench_peer *beside,
                         int beside_count)
{
    qsort(s->v, (size_t)s->n, sizeof *s->v, by_value);
    double median = s->v[s->n / 2], best = higher ? s->v[s->n - 1] : s->v[0];
    double spread = s->v[s->n - 1] - s->v[0];
    double fraction = limit > 0 ? (higher ? median / limit : limit / median) : 0;
    const char *version = NULL;
    double peer = peer_value(bench, &version), load[1] = {0};
    if (getloadavg(load, 1) != 1)
        load[0] = -1;
    if (!opt.json) {
        printf("%-14s %12.5g %-8s best %-10.5g spread %-9.3g", bench, median, unit, best, spread);
        if (limit > 0)
            printf(" limit %-9.5g (%s) reached %.1f %%", limit, basis, 100 * fraction);
        if (peer > 0)
            printf(" peer %.5g (%s) ratio %.2f", peer, version != NULL ? version : "?",
                   higher ? median / peer : peer / median);
    }
    json_t *row =
        json_pack("{s:s,s:s,s:s,s:s,s:f,s:f,s:f,s:i,s:f,s:f}", "bench", bench, "config", config,
                  "unit", unit, "better", higher ? "higher" : "lower", "value", median, "p50",
                  median, "min", s->v[0], "n", s->n, "spread", spread, "load_avg", load[0]);
    json_object_set_new(row, "p99", json_real(s->v[s->n - 1]));
    if (limit > 0) {
        json_object_set_new(row, "limit", json_real(limit));
        json_object_set_new(row, "limit_basis", json_string(basis));
        json_object_set_new(row, "fraction", json_real(fraction));
    }
    if (peer > 0) {
        json_object_set_new(row, "peer_value", json_real(peer));
        json_object_set_new(row, "ratio", json_real(higher ? median / peer : peer / median));
    }
    for (int i = 0; i < beside_count; i++) {
        samples *p = &beside[i].s;
        qsort(p->v, (size_t)p->n, sizeof *p->v, by_value);
        double value = p->v[p->n / 2], ratio = higher ? median / value : value / median;
        if (!opt.json)
            printf(" %s %.5g (best %.5g) ratio %.3g", beside[i].name, value,
                   higher ? p->v[p->n - 1] : p->v[0], ratio);
        json_t *peer_rows = json_object_get(row, "peers");
        if (peer_rows == NULL) {
            peer_rows = json_array();
            json_object_set_new(row, "peers", peer_rows);
        }
        json_array_append_new(peer_rows,
                              json_pack("{s:s,s:f,s:f,s:f}", "peer", beside[i].name, "peer_value",
                                        value, "min", p->v[0], "ratio", ratio));
    }
    if (opt.json) {
        char *text = json_dumps(row, JSON_COMPACT | JSON_REAL_PRECISION(6));
        puts(text);
        free(text);
    } else {
        printf("  %s\n", config);
    }
    json_decref(row);
    fflush(stdout);
}

void bench_report(const char *bench, const char *config, const char *unit, bool higher, samples *s,
                  double limit, const char *basis)
{
    bench_report_beside(bench, config, unit, higher, s, limit, basis, NULL, 0);
}

/* ---- limits ---- */

typedef uint64_t wide __attribute__((vector_size(64)));
typedef float lanes __attribute__((vector_size(64)));

#define RING_BYTES ((size_t)256 << 20)
#define FMA_LOOPS 20000000u

typedef struct job {
    void *ring;
    uint64_t ns;
    double sink;
    pthread_barrier_t *go;
} job;

__attribute__((target_clones("avx512f", "avx2", "default"))) uint64_t bench_read_all(const void *at,
                                                                                     size_t bytes)
{
    const wide *p = at;
    size_t count = bytes / sizeof *p;
    wide a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i < count; i += 4) {
        a ^= p[i];
        b ^= p[i + 1];
        c ^= p[i + 2];
        d ^= p[i + 3];
    }
    a ^= b ^ c ^ d;
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

/* Twelve accumulators hide the latency; each is a variable of its own, or the compiler keeps them
 * in memory. */
__attribute__((target_clones("avx512f", "arch=haswell", "default"),
               optimize("fp-contract=fast"))) static float
fma_all(uint32_t loops)
{
    lanes x, y;
    for (int i = 0; i < 16; i++) {
        x[i] = 1.0f - 1e-7f;
        y[i] = 1e-7f;
    }
    lanes a = y, b = y + y, c = b + y, d = c + y, e = d + y, f = e + y, g = f + y, h = g + y;
    lanes p = h + y, q = p + y, r = q + y, s = r + y;
    for (uint32_t n = 0; n < loops; n++) {
        a = a * x + y;
        b = b * x + y;
        c = c * x + y;
        d = d * x + y;
        e = e * x + y;
        f = f * x + y;
        g = g * x + y;
        h = h * x + y;
        p = p * x + y;
        q = q * x + y;
        r = r * x + y;
        s = s * x + y;
    }
    a += b + c + d + e + f + g + h + p + q + r + s;
    return a[0];
}

static void *read_job(void *arg)
{
    job *j = arg;
    pthread_barrier_wait(j->go);
    uint64_t before = base_now_ns();
    j->sink = (double)bench_read_all(j->ring, RING_BYTES);
    j->ns = base_now_ns() - before;
    return NULL;
}

static void *fma_job(void *arg)
{
    job *j = arg;
    pthread_barrier_wait(j->go);
    uint64_t before = base_now_ns();
    j->sink = (double)fma_all(FMA_LOOPS);
    j->ns = base_now_ns() - before;
    return NULL;
}

/* Runs `fn` on `threads` threads at once; the slowest thread's time. */
static uint64_t together(void *(*fn)(void *), job *jobs, uint32_t threads)
{
    pthread_barrier_t go;
    pthread_t ids[THREADS_MAX];
    pthread_barrier_init(&go, NULL, threads);
    uint64_t slowest = 0;
    for (uint32_t i = 0; i < threads; i++) {
        jobs[i].go = &go;
        pthread_create(&ids[i], NULL, fn, &jobs[i]);
    }
    for (uint32_t i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
        slowest = jobs[i].ns > slowest ? jobs[i].ns : slowest;
    }
    pthread_barrier_destroy(&go);
    return slowest;
}

static void calibrate(void)
{
    job jobs[THREADS_MAX] = {0};
    for (uint32_t i = 0; i < opt.threads; i++) {
        jobs[i].ring =
            mmap(NULL, RING_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (jobs[i].ring == MAP_FAILED) {
            fprintf(stderr, "whimbrel-bench: no memory for a ring of %zu MiB\n", RING_BYTES >> 20);
            exit(1);
        }
        madvise(jobs[i].ring, RING_BYTES, MADV_HUGEPAGE);
        memset(jobs[i].ring, (int)i + 1, RING_BYTES);
    }
    for (int all = 0; all < 2; all++) {
        uint32_t threads = all ? opt.threads : 1;
        samples read = {0}, fma = {0};
        char name[32], config[64];
        for (int r = 0; r < ROUNDS; r++) {
            read.v[read.n++] =
                (double)(RING_BYTES * threads) / (double)together(read_job, jobs, threads);
            fma.v[fma.n++] =
                12.0 * 16 * 2 * FMA_LOOPS * threads / (double)together(fma_job, jobs, threads);
        }
        snprintf(config, sizeof config, "threads=%u", threads);
        snprintf(name, sizeof name, "cal.read.t%u", threads);
        bench_report(name, config, "GB/s", true, &read, 0, "");
        snprintf(name, sizeof name, "cal.fma.t%u", threads);
        bench_report(name, config, "GFLOP/s", true, &fma, 0, "");
        /* A limit is what was reached at best. */
        limits.read_gbs[all] = read.v[read.n - 1];
        limits.fma_gflops[all] = fma.v[fma.n - 1];
    }
    for (uint32_t i = 0; i < opt.threads; i++)
        munmap(jobs[i].ring, RING_BYTES);
    samples call = {0};
    for (int r = 0; r < ROUNDS; r++) {
        uint64_t before = base_now_ns();
        for (int i = 0; i < 100000; i++)
            syscall(SYS_getppid);
        call.v[call.n++] = (double)(base_now_ns() - before) / 100000;
    }
    bench_report("cal.syscall", "", "ns", false, &call, 0, "");
}

/* ---- the engine ---- */

#define OUTPUT_MAX BENCH_OUTPUT_MAX

static void on_event(void *ctx, const eng_event *event)
{
    bench_run *r = event->user;
    for (uint32_t i = 0; i < event->token_count && r->count < OUTPUT_MAX; i++) {
        r->at_ns[r->count] = base_now_ns();
        r->tokens[r->count++] = event->tokens[i];
    }
    if (event->kind != ENG_EVENT_DONE)
        return;
    pthread_mutex_lock(&r->lock);
    r->usage = event->usage;
    r->done = true;
    pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static void on_flush(void *ctx)
{
}

eng_options bench_engine_options(void)
{
    return (eng_options){.model = opt.model,
                         .backend = opt.backend,
                         .modules = getenv("WHIMBREL_MODULES"),
                         .variant = "auto",
                         .kv = "nvfp4",
                         .threads = opt.threads,
                         .kv_bytes = (uint64_t)1 << 30,
                         .sequences_max = 4,
                         .queue_max = 4,
                         .step_rows_max = 512,
                         .prefill_chunk = 512,
                         .sink = {.event = on_event, .flush = on_flush}};
}

eng_engine *bench_engine_start(const eng_options *options)
{
    eng_engine *engine = NULL;
    base_err err = BASE_ERR_INIT;
    if (eng_create(&engine, options, &err) != BASE_OK) {
        fprintf(stderr, "whimbrel-bench: %s\n", err.text);
        exit(2);
    }
    return engine;
}

static eng_engine *start(int32_t draft_tokens)
{
    eng_options options = bench_engine_options();
    options.draft_tokens = draft_tokens;
    return bench_engine_start(&options);
}

void bench_submit(eng_engine *engine, bench_run *r, eng_request request)
{
    base_err err = BASE_ERR_INIT;
    r->count = 0;
    r->done = false;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, NULL);
    request.user = r;
    if (eng_submit(engine, &request, &err) != BASE_OK) {
        fprintf(stderr, "whimbrel-bench: %s\n", err.text);
        exit(1);
    }
}

void bench_wait(bench_run *r)
{
    pthread_mutex_lock(&r->lock);
    while (!r->done)
        pthread_cond_wait(&r->changed, &r->lock);
    pthread_mutex_unlock(&r->lock);
}

static void generate(eng_engine *engine, bench_run *r, const int32_t *tokens, uint32_t count,
                     uint32_t output, uint64_t space)
{
    eng_request request = {.id = space,
                           .tokens = tokens,
                           .token_count = count,
                           .space = space,
                           .max_tokens = output,
                           .sampling = ENG_SAMPLING_DEFAULT};
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = true;
    bench_submit(engine, r, request);
    bench_wait(r);
}

/* A natural prompt: drafts on random tokens would say nothing. */
static uint32_t chat_prompt(eng_engine *engine, int32_t **tokens, base_arena *arena,
                            const char *text)
{
    static const char tool[] =
        "{\"name\":\"get_weather\",\"description\":\"Get the current weather for a city.\","
        "\"parameters\":{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\"}},"
        "\"required\":[\"city\"]}}";
    eng_item item = {.role = ENG_ROLE_USER, .text = {text, strlen(text)}};
    eng_text tools = {tool, sizeof tool - 1};
    eng_chat chat = {.items = &item,
                     .item_count = 1,
                     .tools = &tools,
                     .tool_count = 1,
                     .thinking = ENG_THINK_DISABLED};
    eng_prompt prompt;
    base_err err = BASE_ERR_INIT;
    if (eng_render(engine, &prompt, &chat, 0, NULL, arena, &err) != BASE_OK) {
        fprintf(stderr, "whimbrel-bench: %s\n", err.text);
        exit(1);
    }
    *tokens = prompt.tokens;
    return prompt.token_count;
}

double bench_token_bytes(const struct eng_model_config *c, double *macs)
{
    double h = c->hidden, mxfp8 = 33.0 / 32, nvfp4 = 0.5625, m = 0, b = 0;
    for (uint32_t i = 0; i < c->layers; i++) {
        double attention = h * c->head_dim * (2.0 * c->q_heads + 2.0 * c->kv_heads);
        if (c->sparse[i])
            attention += h * c->index_dim * (c->index_heads + 1.0);
        double inner = c->moe[i] ? c->shared_inner : c->dense_inner;
        double shared = 3 * h * inner,
               routed = c->moe[i] ? 3 * h * c->expert_inner * c->experts_topk : 0;
        double router = c->moe[i] ? h * c->experts : 0;
        m += attention + shared + routed + router;
        b += (attention + shared) * mxfp8 + routed * nvfp4 + router * 4;
    }
    *macs = m + h * c->vocab;
    return b + h * c->vocab * 2;
}

/* The same of the command line's model. */
static double token_cost(double *macs)
{
    base_err err = BASE_ERR_INIT;
    eng_model *model = NULL;
    eng_model_options options = {.variant = "auto", .kv = "nvfp4", .threads = 1, .rows_max = 8};
    if (eng_model_load(&model, opt.model, &options, &err) != BASE_OK) {
        fprintf(stderr, "whimbrel-bench: %s\n", err.text);
        exit(2);
    }
    double bytes = bench_token_bytes(eng_model_get_config(model), macs);
    eng_model_destroy(model);
    return bytes;
}

static void bench_decode(void)
{
    static const char *const prompts[] = {"What's the weather in Oslo?", "hello!",
                                          "Tell me about the harbour.",
                                          "What is the weather in Lisbon and in Porto?"};
    double macs, bytes = token_cost(&macs);
    eng_engine *plain = start(0), *drafted = start(-1);
    base_arena *arena = base_arena_create(4096, (size_t)64 << 20);
    samples tok = {0}, draft = {0};
    double accepted = 0, verified = 0, rounds = 0;
    static bench_run a, b;
    bool equal = true;
    for (uint32_t r = 0; r < ROUNDS + 1; r++) {
        double plain_s = 0, drafted_s = 0;
        for (uint32_t i = 0; i < 4; i++) {
            int32_t *tokens;
            uint32_t count = chat_prompt(plain, &tokens, arena, prompts[i]);
            generate(plain, &a, tokens, count, 128, 100 + r * 4 + i);
            generate(drafted, &b, tokens, count, 128, 100 + r * 4 + i);
            plain_s += (double)a.usage.decode_ns / 1e9;
            drafted_s += (double)b.usage.decode_ns / 1e9;
            accepted += b.usage.accepted;
            verified += b.usage.drafted;
            rounds += b.usage.steps;
            equal &=
                a.count == b.count && memcmp(a.tokens, b.tokens, a.count * sizeof *a.tokens) == 0;
        }
        if (r == 0)
            continue; /* the first round warms caches and the cost table */
        tok.v[tok.n++] = 4 * 127 / plain_s;
        draft.v[draft.n++] = 4 * 127 / drafted_s;
    }
    const eng_info *info = eng_get_info(plain);
    char config[160];
    snprintf(config, sizeof config, "%s %s threads=%u context<=400 bytes/token=%.3g", info->name,
             info->backend, opt.threads, bytes);
    bench_report("c.model.tok", config, "tok/s", true, &tok, limits.read_gbs[1] * 1e9 / bytes,
                 "read bandwidth");
    if (!equal) {
        fprintf(stderr, "whimbrel-bench: c.model.draft: drafted and plain tokens differ\n");
        failed = true;
    } else if (info->draft_block != 0 || eng_get_info(drafted)->draft_block != 0) {
        snprintf(config, sizeof config, "accepted length %.2f, %.2f draft rows a step",
                 1 + accepted / rounds, verified / rounds);
        bench_report("c.model.draft", config, "tok/s", true, &draft, 0, "");
    }
    base_arena_destroy(arena);
    eng_destroy(drafted);
    eng_destroy(plain);
}

static void bench_prefill(void)
{
    double macs;
    token_cost(&macs);
    eng_engine *engine = start(0);
    const eng_info *info = eng_get_info(engine);
    uint32_t count = info->context_max > 4096 ? 4096 : info->context_max - 2;
    int32_t *tokens = malloc(count * sizeof *tokens);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = (int32_t)(base_rand(1, 2, i).v[0] % info->vocab);
    samples s = {0};
    static bench_run r;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        generate(engine, &r, tokens, count, 1, 1000 + round);
        s.v[s.n++] = count / ((double)r.usage.prefill_ns / 1e9);
    }
    char config[128];
    snprintf(config, sizeof config, "%s %s threads=%u prompt=%u MMAC/token=%.3g", info->name,
             info->backend, opt.threads, count, macs / 1e6);
    bench_report("e.prefill", config, "tok/s", true, &s, limits.fma_gflops[1] * 1e9 / (2 * macs),
                 "multiply-add rate");
    free(tokens);
    eng_destroy(engine);
}

/* ---- the whole server ---- */

typedef struct server {
    pid_t pid;
    int port;
    double ready_ms;
    char data[64];
} server;

/* With the data directory of a server that was stopped, or a new one. */
static server launch(const server *before_it)
{
    server s = {.data = "/tmp/whimbrel-bench.XXXXXX"};
    int out[2];
    if (before_it != NULL)
        memcpy(s.data, before_it->data, sizeof s.data);
    else if (mkdtemp(s.data) == NULL)
        s.data[0] = '\0';
    if (s.data[0] == '\0' || pipe(out) != 0) {
        perror("whimbrel-bench");
        exit(1);
    }
    uint64_t before = base_now_ns();
    s.pid = fork();
    if (s.pid == 0) {
        dup2(out[1], STDOUT_FILENO);
        close(out[0]);
        if (freopen("/dev/null", "w", stderr) == NULL)
            _exit(127);
        execl(opt.server, "whimbrel", "--model", opt.model, "--listen", "127.0.0.1:0", "--data",
              s.data, "--set", "admin.listen=127.0.0.1:0", (char *)NULL);
        _exit(127);
    }
    close(out[1]);
    FILE *lines = fdopen(out[0], "r");
    char line[512];
    while (fgets(line, sizeof line, lines) != NULL)
        if (sscanf(line, "ready http://127.0.0.1:%d", &s.port) == 1)
            break;
    s.ready_ms = (double)(base_now_ns() - before) / 1e6;
    fclose(lines);
    if (s.port == 0) {
        fprintf(stderr, "whimbrel-bench: %s did not start\n", opt.server);
        exit(1);
    }
    return s;
}

static void stop(server *s)
{
    kill(s->pid, SIGTERM);
    waitpid(s->pid, NULL, 0);
}

static void end(server *s)
{
    stop(s);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", s->data);
    if (system(command) != 0)
        fprintf(stderr, "whimbrel-bench: %s is left behind\n", s->data);
}

static int dial(int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) != 0) {
        perror("whimbrel-bench: connect");
        exit(1);
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

/* Sends and reads one answer with a content-length; returns its body in `buffer`, or NULL. */
static char *exchange(int fd, const char *request, size_t length, char *buffer, size_t size)
{
    if (send(fd, request, length, MSG_NOSIGNAL) != (ssize_t)length)
        return NULL;
    size_t have = 0;
    for (;;) {
        ssize_t n = recv(fd, buffer + have, size - 1 - have, 0);
        if (n <= 0)
            return NULL;
        have += (size_t)n;
        buffer[have] = '\0';
        char *body = strstr(buffer, "\r\n\r\n"), *field = strcasestr(buffer, "content-length:");
        if (body != NULL && field != NULL &&
            have >= (size_t)(body + 4 - buffer) + strtoul(field + 15, NULL, 10))
            return body + 4;
    }
}

static size_t make_request(char *out, size_t size, const char *filler, int serial)
{
    char body[4096];
    const char *slash = strrchr(opt.model, '/'), *name = slash != NULL ? slash + 1 : opt.model;
    int n = snprintf(
        body, sizeof body,
        "{\"model\":\"%s\",\"max_tokens\":1,\"temperature\":0,\"messages\":[{\"role\":\"system\","
        "\"content\":\"%s\"},{\"role\":\"user\",\"content\":\"Number %d.\"}]}",
        name, filler, serial);
    return (size_t)snprintf(
        out, size,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: "
        "application/json\r\ncontent-length: %d\r\n\r\n%s",
        n, body);
}

static void bench_server(void)
{
    char filler[801], request[8192], answer[65536];
    for (int i = 0; i < 800; i++)
        filler[i] = "lorem ipsum dolor sit amet "[i % 27];
    filler[800] = '\0';
    samples ready = {0}, again = {0}, added = {0};
    for (int r = 0; r < 5; r++) {
        server s = launch(NULL);
        ready.v[ready.n++] = s.ready_ms;
        usleep(300000); /* what it keeps for the next start is written behind the ready line */
        stop(&s);
        s = launch(&s);
        again.v[again.n++] = s.ready_ms;
        if (r == 4 && bench_wanted("g.req")) {
            int fd = dial(s.port);
            for (int i = 0; i < 260; i++) {
                size_t length = make_request(request, sizeof request, filler, i);
                uint64_t before = base_now_ns();
                char *body = exchange(fd, request, length, answer, sizeof answer);
                double us = (double)(base_now_ns() - before) / 1e3;
                json_t *object = body != NULL ? json_loads(body, 0, NULL) : NULL;
                json_t *own = json_object_get(json_object_get(object, "usage"), "whimbrel");
                if (own == NULL) {
                    fprintf(stderr, "whimbrel-bench: g.req: unexpected answer: %.200s\n",
                            body != NULL ? body : "");
                    failed = true;
                    json_decref(object);
                    break;
                }
                /* What the engine says it took, queue to last token, is not the gateway's. */
                double engine = 1000 * (json_number_value(json_object_get(own, "ttft_ms")) +
                                        json_number_value(json_object_get(own, "decode_ms")));
                json_decref(object);
                if (i >= 200)
                    added.v[added.n++] = us - engine;
            }
            close(fd);
        }
        end(&s);
    }
    if (bench_wanted("b.ready"))
        bench_report("b.ready", opt.model, "ms", false, &ready, 0, "");
    if (bench_wanted("b.ready.again"))
        bench_report("b.ready.again", "the same data directory", "ms", false, &again, 0, "");
    if (added.n > 0)
        bench_report("g.req", "1 KB chat request, HTTP/1.1 keep-alive, ledger on, one token", "us",
                     false, &added, 0, "");
}

static int usage(FILE *out)
{
    fprintf(out,
            "usage: whimbrel-bench [--json] [--model DIR] [--backend NAME] [--threads N] "
            "[--peer-json FILE] [NAME…]\n\n"
            "A name selects by prefix: cal, c.gemv, c.gemm, c.pool, c.model, e.prefill, e.spec, "
            "e.host, e.idle, e.mixed, p.match, "
            "p.insert, p.branch, p.evict, "
            "s.mask, s.compile, s.overhead, g.commit, g.h2.raw, g.sse.tok, g.flood, g.mem, "
            "g.req, b.ready. Without names: all.\n"
            "--peer-json FILE: an array of {bench, value, peer_version}; ratios are printed beside "
            "ours.\n"
            "Exit status 1 if a result is wrong.\n");
    return out == stderr ? 2 : 0;
}

int main(int argc, char **argv)
{
    static char server_path[4096];
    opt.threads = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    if (opt.threads > THREADS_MAX)
        opt.threads = THREADS_MAX;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0)
            return usage(stdout);
        if (strcmp(argv[i], "--json") == 0)
            opt.json = true;
        else if (argv[i][0] == '-' && i + 1 == argc)
            return usage(stderr);
        else if (strcmp(argv[i], "--model") == 0)
            opt.model = argv[++i];
        else if (strcmp(argv[i], "--backend") == 0)
            opt.backend = argv[++i]; /* of the engine's rows */
        else if (strcmp(argv[i], "--threads") == 0)
            opt.threads = (uint32_t)strtoul(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--peer-json") == 0)
            opt.peer_file = argv[++i];
        else if (argv[i][0] == '-')
            return usage(stderr);
        else {
            opt.names = argv + i;
            opt.name_count = argc - i;
            break;
        }
    }
    if (opt.threads == 0 || opt.threads > THREADS_MAX)
        return usage(stderr);
    if (opt.peer_file != NULL && (peers = json_load_file(opt.peer_file, 0, NULL)) == NULL) {
        fprintf(stderr, "whimbrel-bench: %s is not a JSON array\n", opt.peer_file);
        return 2;
    }
    /* The server stands beside this program. */
    ssize_t n = readlink("/proc/self/exe", server_path, sizeof server_path - 16);
    char *slash = n > 0 ? strrchr(server_path, '/') : NULL;
    if (slash != NULL)
        strcpy(slash, "/whimbrel");
    opt.server = server_path;
    limits.threads = opt.threads;
    calibrate();
    failed |= !bench_kernels(&limits);
    if (bench_wanted("c.model.tok") || bench_wanted("c.model.draft"))
        bench_decode();
    if (bench_wanted("e.prefill"))
        bench_prefill();
    failed |= !bench_engine();
    failed |= !bench_cache(limits.read_gbs[0]);
    failed |= !bench_store();
    failed |= !bench_restart(opt.model, opt.threads);
    failed |= !bench_grammar(opt.model, opt.threads);
    failed |= !bench_gateway();
    failed |= !bench_commit();
    failed |= !bench_wire(opt.server, opt.model);
    if (bench_wanted("g.req") || bench_wanted("b.ready") || bench_wanted("b.ready.again"))
        bench_server();
    json_decref(peers);
    return failed;
}
