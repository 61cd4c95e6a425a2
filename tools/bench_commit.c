/* g.commit: the end of a turn, from the post to the callback that lets the end be told.
 *
 * 32 streams of agent sessions: each turn brings a tool's result of 2 KB and 600 tokens behind the
 * turns before it, and an answer of 300 tokens with reasoning and a call; after 30 turns a new
 * session begins. The ledger is the real one, in a directory under TMPDIR; looking a conversation
 * up is a worker's business and not in the figure. fsync is not on the path (synchronous=NORMAL): a
 * killed process loses nothing, see gateway/ledger.h.
 *
 *   g.commit        a turn's end every 100 ms a stream, at random moments: median       us
 *   g.commit.p99    the same turns, 99 of 100 are faster                               us
 *   g.commit.burst  32 ends in one step of the engine: until the last is told           us
 *   g.commit.rate   streams that do nothing but end turns                               commits/s
 *
 * Limit: SQLite alone, one INSERT of the bytes that a turn adds, in a transaction of its own. */
#include "tools/bench.h"

#include <ftw.h>
#include <pthread.h>
#include <semaphore.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/rand.h"
#include "gateway/ledger.h"

#define STREAMS 32
#define ROUNDS 7
#define TURNS 30       /* of a session */
#define NEW_TOKENS 600 /* of a prompt, beside the turns before */
#define RUN_TOKENS 300
#define RESULT_BYTES 2000 /* of a tool's result */
#define PACE_US 100000
#define PACED_TURNS 24 /* of a stream and round */
#define RATE_TURNS 40
#define ARENA_BYTES (8u << 20)
#define CONTEXT (TURNS * (NEW_TOKENS + RUN_TOKENS))

typedef struct stream {
    gw_commit commit; /* first: the callback gets it */
    sem_t done;
    uint64_t told_ns;
    gw_ledger *ledger;
    int64_t tenant;
    uint32_t number, turns_made;
    base_arena *arena; /* of the session */
    eng_item items[2 * TURNS];
    uint32_t item_count;
    int32_t *tokens; /* the session's, prompt and run after prompt and run */
    uint32_t token_count;
    gw_match match;
    gw_root root;
    gw_id turn, session, call;
    char *result, *answer, *reasoning;
    eng_call calls[TURNS];
    uint32_t steps[RUN_TOKENS];
    /* of one phase */
    uint32_t turns, pace_us;
    double *delays;
    uint32_t delay_count;
    bool failed;
} stream;

static char directory[64];

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static void on_done(gw_commit *commit)
{
    stream *s = (stream *)commit;
    s->told_ns = base_now_ns();
    sem_post(&s->done);
}

static uint32_t draw(const stream *s, uint64_t index)
{
    return base_rand(7, s->number, index).v[0];
}

/* Words of a text that no other turn has. */
static char *make_text(stream *s, size_t bytes)
{
    char *text = base_arena_alloc(s->arena, bytes + 1);
    for (size_t i = 0; text != NULL && i < bytes; i++)
        text[i] = (char)(i % 6 == 5 ? ' ' : 'a' + draw(s, s->turns_made * 100000ull + i) % 26);
    if (text != NULL)
        text[bytes] = '\0';
    return text;
}

static bool begin_session(stream *s)
{
    base_arena_destroy(s->arena);
    s->arena = base_arena_create(64 << 10, 64 * ARENA_BYTES);
    s->item_count = s->token_count = 0;
    s->session = gw_id_mint("sess_");
    return s->arena != NULL;
}

/* Everything of the next turn but its commit. */
static bool prepare(stream *s)
{
    if ((s->item_count == 0 || s->item_count >= 2 * TURNS) && !begin_session(s))
        return false;
    uint32_t turn = s->item_count / 2;
    char *result = make_text(s, RESULT_BYTES), *answer = make_text(s, 120),
         *reasoning = make_text(s, 600);
    if (result == NULL || answer == NULL || reasoning == NULL)
        return false;
    s->items[s->item_count++] = (eng_item){.role = turn == 0 ? ENG_ROLE_USER : ENG_ROLE_TOOL,
                                           .text = {result, RESULT_BYTES}};
    for (uint32_t i = 0; i < s->item_count; i++)
        s->items[i].tokens = NULL;
    if (gw_ledger_match(s->ledger, &s->match, &s->root, s->items, s->item_count, s->arena, NULL) !=
        BASE_OK)
        return false;
    for (uint32_t i = 0; i < NEW_TOKENS; i++)
        s->tokens[s->token_count++] = (int32_t)(draw(s, s->turns_made * 1000ull + i) % 100000);
    int32_t *run = s->tokens + s->token_count;
    for (uint32_t i = 0; i < RUN_TOKENS; i++)
        run[i] = (int32_t)(draw(s, (1ull << 40) + s->turns_made * 1000ull + i) % 100000);
    s->turn = gw_id_mint("turn_");
    s->call = gw_id_mint("call_");
    char *call_id = base_arena_copy(s->arena, s->call.text, strlen(s->call.text));
    static const char arguments[] = "{\"path\": \"src/main.c\", \"line\": 120}";
    s->calls[turn] = (eng_call){
        {call_id, strlen(s->call.text)}, {"read_file", 9}, {arguments, sizeof arguments - 1}};
    eng_item item = {.role = ENG_ROLE_ASSISTANT,
                     .text = {answer, 120},
                     .reasoning = {reasoning, 600},
                     .calls = &s->calls[turn],
                     .call_count = 1};
    int64_t now = base_wall_ms();
    s->commit = (gw_commit){.done = on_done,
                            .retention = GW_RETAIN_CACHED,
                            .turn = s->turn.text,
                            .session = s->session.text,
                            .request = "req_0123456789abcdef01234567",
                            .response = s->turn.text,
                            .dialect = "chat",
                            .model = "bench",
                            .root = &s->root,
                            .match = &s->match,
                            .items = s->items,
                            .item_count = s->item_count,
                            .answer = item,
                            .splice = true,
                            .prompt = s->tokens,
                            .prompt_count = s->token_count,
                            .run = run,
                            .run_count = RUN_TOKENS,
                            .steps = s->steps,
                            .step_count = RUN_TOKENS / 2,
                            .finish = ENG_FINISH_CALLS,
                            .usage = {.prompt_tokens = s->token_count, .output_tokens = RUN_TOKENS},
                            .created_ms = now,
                            .ended_ms = now};
    return true;
}

static void after(stream *s, uint64_t posted_ns)
{
    s->failed |= !s->commit.stored;
    s->delays[s->delay_count++] = (double)(s->told_ns - posted_ns) / 1e3;
    s->items[s->item_count++] = s->commit.answer;
    s->token_count += RUN_TOKENS;
    s->turns_made++;
}

static void *run_stream(void *ctx)
{
    stream *s = ctx;
    for (uint32_t i = 0; i < s->turns && !s->failed; i++) {
        if (!prepare(s)) {
            s->failed = true;
            break;
        }
        if (s->pace_us > 0) {
            uint64_t wait = draw(s, (1ull << 50) + s->turns_made) % (2ull * s->pace_us);
            nanosleep(&(struct timespec){.tv_nsec = (long)(wait * 1000)}, NULL);
        }
        uint64_t posted = base_now_ns();
        if (!gw_ledger_commit(s->ledger, &s->commit)) {
            s->failed = true;
            break;
        }
        while (sem_wait(&s->done) != 0)
            ;
        after(s, posted);
    }
    return NULL;
}

/* All streams, each `turns` turns; the seconds it took. */
static double run_phase(stream *streams, uint32_t turns, uint32_t pace_us)
{
    pthread_t threads[STREAMS];
    uint64_t begin = base_now_ns();
    int started = 0;
    for (int i = 0; i < STREAMS; i++) {
        streams[i].turns = turns;
        streams[i].pace_us = pace_us;
        streams[i].delay_count = 0;
        if (pthread_create(&threads[i], NULL, run_stream, &streams[i]) != 0)
            break;
        started++;
    }
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    streams[0].failed |= started < STREAMS;
    return (double)(base_now_ns() - begin) / 1e9;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Quantile over all delays of the phase. */
static double quantile(stream *streams, double q)
{
    static double all[STREAMS * (PACED_TURNS + RATE_TURNS)];
    size_t count = 0;
    for (int i = 0; i < STREAMS; i++)
        for (uint32_t k = 0; k < streams[i].delay_count; k++)
            all[count++] = streams[i].delays[k];
    if (count == 0)
        return 0;
    qsort(all, count, sizeof *all, by_value);
    return all[(size_t)(q * (double)(count - 1))];
}

/* 32 posts one after the other; until the last is told. */
static double run_burst(stream *streams)
{
    uint64_t begin = 0, end = 0;
    for (int i = 0; i < STREAMS; i++) {
        streams[i].delay_count = 0;
        streams[i].failed |= !prepare(&streams[i]);
    }
    begin = base_now_ns();
    for (int i = 0; i < STREAMS; i++)
        streams[i].failed |= !gw_ledger_commit(streams[i].ledger, &streams[i].commit);
    for (int i = 0; i < STREAMS; i++) {
        while (sem_wait(&streams[i].done) != 0)
            ;
        end = streams[i].told_ns > end ? streams[i].told_ns : end;
        after(&streams[i], begin);
    }
    return (double)(end - begin) / 1e3;
}

/* Median of one INSERT of so many bytes in its own transaction, in us; 0 if SQLite refuses. */
static double bare_insert(size_t bytes)
{
    char path[128];
    sqlite3 *db = NULL;
    sqlite3_stmt *s = NULL;
    double times[400];
    int count = 0;
    snprintf(path, sizeof path, "%s/bare.db", directory);
    char *blob = calloc(1, bytes);
    if (blob != NULL && sqlite3_open(path, &db) == SQLITE_OK &&
        sqlite3_exec(db,
                     "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA "
                     "wal_autocheckpoint=0; CREATE TABLE t(id INTEGER PRIMARY KEY, data BLOB)",
                     NULL, NULL, NULL) == SQLITE_OK &&
        sqlite3_prepare_v2(db, "INSERT INTO t(data) VALUES(?1)", -1, &s, NULL) == SQLITE_OK)
        for (; count < 400; count++) {
            sqlite3_bind_blob64(s, 1, blob, bytes, SQLITE_STATIC);
            uint64_t begin = base_now_ns();
            if (sqlite3_step(s) != SQLITE_DONE)
                break;
            sqlite3_reset(s);
            times[count] = (double)(base_now_ns() - begin) / 1e3;
        }
    sqlite3_finalize(s);
    sqlite3_close(db);
    free(blob);
    if (count < 400)
        return 0;
    qsort(times, 400, sizeof *times, by_value);
    return times[200];
}

static bool measure(stream *streams)
{
    samples p50 = {0}, p99 = {0}, burst = {0}, rate = {0};
    run_phase(streams, 4, 0); /* statements, pages, memory */
    for (int r = 0; r < ROUNDS; r++) {
        run_phase(streams, PACED_TURNS, PACE_US);
        p50.v[p50.n++] = quantile(streams, 0.5);
        p99.v[p99.n++] = quantile(streams, 0.99);
        burst.v[burst.n++] = run_burst(streams);
        double seconds = run_phase(streams, RATE_TURNS, 0);
        rate.v[rate.n++] = STREAMS * RATE_TURNS / seconds;
    }
    for (int i = 0; i < STREAMS; i++)
        if (streams[i].failed)
            return false;
    base_err err = BASE_ERR_INIT;
    gw_ledger_stats stats = gw_ledger_get_stats(streams[0].ledger);
    if (!gw_ledger_check(streams[0].ledger, &err)) {
        fprintf(stderr, "whimbrel-bench: g.commit: %s\n", err.text);
        return false;
    }
    double bare = bare_insert((size_t)(stats.database_bytes / stats.commits));
    char config[160];
    snprintf(config, sizeof config,
             "32 streams, 3.1 turns' ends a 10 ms, %llu bytes a turn, prompts to %d tokens",
             (unsigned long long)(stats.database_bytes / stats.commits), CONTEXT);
    bench_report("g.commit", config, "us", false, &p50, bare, "one bare INSERT of its bytes");
    bench_report("g.commit.p99", config, "us", false, &p99, 0, "");
    bench_report("g.commit.burst", "32 ends at once, until the last is told", "us", false, &burst,
                 STREAMS * bare, "32 bare INSERTs");
    bench_report("g.commit.rate", "32 streams that only end turns", "1/s", true, &rate,
                 bare > 0 ? 1e6 / bare : 0, "bare INSERTs");
    return true;
}

bool bench_commit(void)
{
    if (!bench_wanted("g.commit"))
        return true;
    const char *base = getenv("TMPDIR");
    snprintf(directory, sizeof directory, "%.40s/whimbrel-bench-XXXXXX", base ? base : "/tmp");
    if (mkdtemp(directory) == NULL) {
        perror("whimbrel-bench: g.commit");
        return false;
    }
    base_err err = BASE_ERR_INIT;
    gw_ledger *ledger = NULL;
    const gw_ledger_options options = {.path = directory, .cached_ttl_s = 86400};
    int64_t tenant;
    uint64_t salt;
    stream *streams = calloc(STREAMS, sizeof *streams);
    bool right = streams != NULL && gw_ledger_open(&ledger, &options, &err) == BASE_OK &&
                 gw_ledger_tenant_put(ledger, &tenant, &salt, "bench", &err) == BASE_OK;
    for (uint32_t i = 0; right && i < STREAMS; i++) {
        stream *s = &streams[i];
        sem_init(&s->done, 0, 0);
        s->ledger = ledger;
        s->number = i;
        s->root = (gw_root){.tenant = tenant,
                            .template_id = "bench",
                            .thinking = ENG_THINK_ENABLED,
                            .effort = {"high", 4}};
        s->tokens = malloc((CONTEXT + NEW_TOKENS + RUN_TOKENS) * sizeof *s->tokens);
        s->delays = malloc((PACED_TURNS + RATE_TURNS) * sizeof *s->delays);
        for (uint32_t k = 0; k < RUN_TOKENS; k++)
            s->steps[k] = 2;
        right = s->tokens != NULL && s->delays != NULL;
    }
    right = right && measure(streams);
    if (err.code != BASE_OK)
        fprintf(stderr, "whimbrel-bench: g.commit: %s\n", err.text);
    gw_ledger_close(ledger);
    for (uint32_t i = 0; streams != NULL && i < STREAMS; i++) {
        base_arena_destroy(streams[i].arena);
        free(streams[i].tokens);
        free(streams[i].delays);
    }
    free(streams);
    nftw(directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return right;
}
