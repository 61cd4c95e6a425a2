/* p.restart, p.itl: what the disk tier costs a session that comes back, and those that run.
 *
 * p.restart: a turn of 4,096 prompt tokens and 32 output tokens; its next turn brings 64 tokens. It
 * is timed once in the same process (warm); when the pages are written, the process is killed with
 * SIGKILL, and another one runs the same next turn first, its weights already touched by another
 * request, the segments out of the system's page cache. Both must give the same tokens, and the
 * second everything from disk. Limit: 1.2 warm + a plain read of the segments, also out of the page
 * cache.
 * p.itl: two streams decode while pages of a third session are read back and each read takes 200 ms
 * more: the 99th percentile of their inter-token time in that window against the same length just
 * before it. Limit: 1.1. */
#include "tools/bench.h"

#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/store.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/rand.h"
#include "engine/engine.h"

#define ROUNDS 5
#define PROMPT 4096
#define OUTPUT 32
#define FRESH 64
#define ANSWER 8
#define STREAM_TOKENS 4000
#define CONTEXT (PROMPT + OUTPUT + FRESH)
#define DISK_BYTES ((uint64_t)1 << 30)
#define READ_DELAY_MS 200

typedef struct answer {
    int32_t tokens[STREAM_TOKENS];
    uint64_t at_ns[STREAM_TOKENS];
    uint32_t count;
    eng_usage usage;
    bool done;
} answer;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char dir[64], kv_dir[72];
static int32_t prompt[CONTEXT];
static _Atomic uint32_t delay_ms;

static void on_event(void *ctx, const eng_event *event)
{
    answer *a = event->user;
    uint64_t now = base_now_ns();
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < event->token_count && a->count < STREAM_TOKENS; i++) {
        a->at_ns[a->count] = now;
        a->tokens[a->count++] = event->tokens[i];
    }
    if (event->kind == ENG_EVENT_DONE) {
        a->usage = event->usage;
        a->done = true;
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void on_flush(void *ctx)
{
}

static ssize_t slow_pread(int fd, void *bytes, size_t length, off_t offset)
{
    usleep(atomic_load(&delay_ms) * 1000);
    return pread(fd, bytes, length, offset);
}

static const kv_store_io slow_disk = {.pread = slow_pread};

static eng_engine *start(const char *model, uint32_t threads)
{
    eng_options options = {.model = model,
                           .backend = "auto",
                           .variant = "auto",
                           .kv = "nvfp4",
                           .threads = threads,
                           .kv_bytes = (uint64_t)1 << 30,
                           .sequences_max = 4,
                           .queue_max = 8,
                           .step_rows_max = 512,
                           .prefill_chunk = 512,
                           .disk = kv_dir,
                           .disk_bytes = DISK_BYTES,
                           .disk_io = &slow_disk,
                           .sink = {.event = on_event, .flush = on_flush}};
    eng_engine *engine = NULL;
    base_err err = BASE_ERR_INIT;
    if (eng_create(&engine, &options, &err) != BASE_OK) {
        fprintf(stderr, "whimbrel-bench: %s\n", err.text);
        exit(2);
    }
    return engine;
}

/* Returns its id. */
static uint64_t submit(eng_engine *engine, answer *a, const int32_t *tokens, uint32_t count,
                       uint32_t output, bool no_disk)
{
    static uint64_t id;
    base_err err = BASE_ERR_INIT;
    eng_request request = {.id = ++id,
                           .user = a,
                           .tokens = tokens,
                           .token_count = count,
                           .space = 1,
                           .max_tokens = output,
                           .sampling = ENG_SAMPLING_DEFAULT,
                           .no_disk = no_disk};
    memset(a, 0, sizeof *a);
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = true;
    if (eng_submit(engine, &request, &err) != BASE_OK) {
        fprintf(stderr, "whimbrel-bench: %s\n", err.text);
        exit(2);
    }
    return id;
}

static void wait_for(const answer *a)
{
    pthread_mutex_lock(&lock);
    while (!a->done)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void run(eng_engine *engine, answer *a, const int32_t *tokens, uint32_t count,
                uint32_t output, bool no_disk)
{
    submit(engine, a, tokens, count, output, no_disk);
    wait_for(a);
}

/* Bytes, which every vocabulary begins with. */
static void fill(int32_t *tokens, uint32_t count, uint64_t seed)
{
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = (int32_t)(base_rand(seed, 7, i).v[0] % 200);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    return remove(path);
}

static bool make_dir(void)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%.30s/whimbrel-bench-XXXXXX", tmp != NULL ? tmp : "/tmp");
    if (mkdtemp(dir) == NULL) {
        perror("whimbrel-bench: mkdtemp");
        return false;
    }
    snprintf(kv_dir, sizeof kv_dir, "%s/kv", dir);
    return true;
}

static void remove_dir(void)
{
    nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* The segments go out of the page cache; with `time` they are read first. Returns seconds. */
static double read_segments(bool time)
{
    static uint8_t bytes[1 << 20];
    char pattern[96];
    glob_t found;
    double s = 0;
    snprintf(pattern, sizeof pattern, "%s/seg-*", kv_dir);
    if (glob(pattern, 0, NULL, &found) != 0)
        return 0;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        int fd = open(found.gl_pathv[i], O_RDONLY);
        uint64_t before = base_now_ns();
        for (off_t at = 0; time; at += (off_t)sizeof bytes)
            if (pread(fd, bytes, sizeof bytes, at) <= 0)
                break;
        s += (double)(base_now_ns() - before) * 1e-9;
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    globfree(&found);
    return s;
}

typedef struct told {
    int32_t output[OUTPUT], again[ANSWER];
    double warm_s;
} told;

/* Runs the two turns, tells, and waits to be killed. */
static void live(const char *model, uint32_t threads, int pipe_fd)
{
    static answer a;
    told t;
    base_err err = BASE_ERR_INIT;
    eng_engine *engine = start(model, threads);
    run(engine, &a, prompt, PROMPT, OUTPUT, false);
    memcpy(t.output, a.tokens, sizeof t.output);
    memcpy(prompt + PROMPT, a.tokens, sizeof t.output);
    run(engine, &a, prompt, CONTEXT, ANSWER, true);
    memcpy(t.again, a.tokens, sizeof t.again);
    t.warm_s = (double)a.usage.ttft_ns * 1e-9;
    if (!eng_check(engine, &err) || write(pipe_fd, &t, sizeof t) != sizeof t)
        _exit(1);
    for (;;)
        pause();
}

typedef struct times {
    double value_ms, warm_ms, plain_ms;
} times;

static bool one_restart(const char *model, uint32_t threads, uint64_t seed, times *out)
{
    static answer a;
    static int32_t other[200];
    told t;
    int fds[2];
    if (!make_dir() || pipe(fds) != 0)
        return false;
    fill(prompt, CONTEXT, seed);
    fill(other, 200, seed + 100);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        live(model, threads, fds[1]);
    close(fds[1]);
    bool good = read(fds[0], &t, sizeof t) == sizeof t;
    close(fds[0]);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    if (good) {
        memcpy(prompt + PROMPT, t.output, sizeof t.output);
        read_segments(false);
        out->plain_ms = read_segments(true) * 1e3;
        eng_engine *engine = start(model, threads);
        run(engine, &a, other, 200, ANSWER, true);
        run(engine, &a, prompt, CONTEXT, ANSWER, true);
        out->value_ms = (double)a.usage.ttft_ns * 1e-6;
        out->warm_ms = t.warm_s * 1e3;
        good = a.usage.restored_tokens == PROMPT + OUTPUT - 1 &&
               memcmp(a.tokens, t.again, sizeof t.again) == 0;
        if (!good)
            fprintf(stderr, "whimbrel-bench: p.restart: %u tokens restored, or another answer\n",
                    a.usage.restored_tokens);
        eng_destroy(engine);
    }
    remove_dir();
    return good;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bool restarts(const char *model, uint32_t threads)
{
    samples s = {.n = 0};
    double warm[ROUNDS], plain[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        times t;
        if (!one_restart(model, threads, 1000 + (uint64_t)i, &t))
            return false;
        s.v[s.n++] = t.value_ms;
        warm[i] = t.warm_ms;
        plain[i] = t.plain_ms;
    }
    qsort(warm, ROUNDS, sizeof *warm, by_value);
    qsort(plain, ROUNDS, sizeof *plain, by_value);
    char basis[128];
    snprintf(basis, sizeof basis, "1.2 x %.1f ms warm + %.1f ms plain read", warm[ROUNDS / 2],
             plain[ROUNDS / 2]);
    bench_report("p.restart", "4,127 tokens back, 65 new, after SIGKILL", "ms", false, &s,
                 1.2 * warm[ROUNDS / 2] + plain[ROUNDS / 2], basis);
    return true;
}

/* The 99th percentile of both streams' inter-token times within [from, to), in ms. */
static double p99_ms(const answer *streams, uint64_t from, uint64_t to)
{
    static double gaps[2 * STREAM_TOKENS];
    size_t count = 0;
    for (int k = 0; k < 2; k++)
        for (uint32_t i = 1; i < streams[k].count; i++)
            if (streams[k].at_ns[i - 1] >= from && streams[k].at_ns[i] < to)
                gaps[count++] = (double)(streams[k].at_ns[i] - streams[k].at_ns[i - 1]) * 1e-6;
    qsort(gaps, count, sizeof *gaps, by_value);
    return count == 0 ? 0 : gaps[(size_t)(0.99 * (double)(count - 1))];
}

static bool gaps_while_reading(const char *model, uint32_t threads)
{
    static answer streams[2], back;
    static int32_t old[ROUNDS][PROMPT], busy[2][20];
    samples s = {.n = 0};
    bool good = make_dir();
    if (!good)
        return false;
    eng_engine *engine = start(model, threads);
    for (uint64_t i = 0; i < ROUNDS; i++) {
        fill(old[i], PROMPT, 2000 + i);
        run(engine, &back, old[i], PROMPT, 1, false);
    }
    eng_destroy(engine);
    for (int i = 0; i < ROUNDS && good; i++) {
        /* A new one each time: it has not measured yet how slow the disk has become. */
        engine = start(model, threads);
        uint64_t ids[2];
        for (uint64_t k = 0; k < 2; k++) {
            fill(busy[k], 20, 3000 + k);
            ids[k] = submit(engine, &streams[k], busy[k], 20, STREAM_TOKENS, true);
        }
        usleep(1000000);
        atomic_store(&delay_ms, READ_DELAY_MS);
        uint64_t begin = base_now_ns();
        run(engine, &back, old[i], PROMPT, 1, true);
        atomic_store(&delay_ms, 0);
        for (int k = 0; k < 2; k++) {
            eng_cancel(engine, ids[k]);
            wait_for(&streams[k]);
        }
        uint64_t window = back.usage.queue_ns;
        double before = p99_ms(streams, begin - window, begin);
        good = back.usage.restored_tokens == PROMPT - 1 && window >= READ_DELAY_MS * 1000000ull &&
               before > 0;
        if (good)
            s.v[s.n++] = p99_ms(streams, begin, begin + window) / before;
        else
            fprintf(stderr, "whimbrel-bench: p.itl: %u tokens restored in %.0f ms\n",
                    back.usage.restored_tokens, (double)window * 1e-6);
        eng_destroy(engine);
    }
    remove_dir();
    if (good)
        bench_report("p.itl", "two streams; 200 ms more a read", "x", false, &s, 1.1,
                     "p99 of the window before, + 10 %");
    return good;
}

bool bench_restart(const char *model, uint32_t threads)
{
    bool good = true;
    base_log_set_level(BASE_LOG_ERROR);
    if (bench_wanted("p.restart"))
        good = restarts(model, threads);
    if (bench_wanted("p.itl"))
        good &= gaps_while_reading(model, threads);
    return good;
}
