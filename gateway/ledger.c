/* gw_ledger: see the header. Here: the writer, the keeper, the readers, figures, open and close.
 * Beside it: ledger_db.c connections and statements, ledger_commit.c writing a turn, ledger_match.c
 * look-ups, ledger_read.c reading, ledger_sweep.c what leaves, ledger_tenant.c tenants and keys.
 *
 * Writer: takes all that waits (at most GW_BATCH_MAX), one BEGIN IMMEDIATE … COMMIT, then the
 * callbacks. If one turn's statements or the commit fail, the batch is rolled back and each turn
 * tried in a transaction of its own, so that one bad turn costs itself only. Runs enter memory
 * right before the callback, stored or not.
 *
 * Log: no automatic checkpoint, which would stall a commit. A thread of its own copies the log
 * back: PASSIVE (it waits for nobody) when CHECKPOINT_PAGES have gathered, TRUNCATE after a second
 * without commits and at close. A reader that pinned the log could make it grow, so no statement
 * outlives the call that stepped it, and past RESTART_PAGES the checkpoint waits for readers
 * (busy_ms at most). What was deleted still stands in the log, so a deletion is followed by a
 * TRUNCATE however busy it is (gw_ledger_purge). */
#include "gateway/ledger_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/thread.h"

#define MEMORY_BYTES (64u << 20)
#define QUEUE_MAX 4096
#define BUSY_MS 3000
#define READERS_MAX 16
#define CHECKPOINT_PAGES 1000 /* 4 MiB of 4 KiB pages */
#define RESTART_PAGES 8000    /* 32 MiB */
#define SWEEP_NS 30000000000u
#define TIDY_NS 1000000000u /* between looks at the bounds of bytes */
#define IDLE_NS 1000000000u

gw_id gw_id_mint(const char *prefix)
{
    gw_id id;
    uint8_t random[16];
    /* 96 bits for names; 128 for what lets a client name hidden tokens. */
    size_t bytes = strcmp(prefix, "call_") == 0 ? 16 : 12;
    /* Cannot fail for so few bytes once the system has started. */
    CHECK(getrandom(random, bytes, 0) == (ssize_t)bytes);
    size_t at = (size_t)snprintf(id.text, sizeof(id.text), "%s", prefix);
    for (size_t i = 0; i < bytes; i++)
        at += (size_t)snprintf(id.text + at, sizeof(id.text) - at, "%02x", random[i]);
    return id;
}

void gw_id_set(gw_id *id, const char *text)
{
    snprintf(id->text, sizeof(id->text), "%s", text ? text : "");
}

/* ---- the writer ---- */

/* Called by SQLite on the writer after a commit. */
static int on_wal(void *ctx, sqlite3 *db, const char *name, int pages)
{
    (void)db;
    (void)name;
    gw_ledger *ledger = ctx;
    pthread_mutex_lock(&ledger->keeper_mutex);
    bool first = !ledger->written_ns;
    ledger->wal_pages = (uint32_t)pages;
    ledger->written_ns = base_now_ns();
    if (first || pages >= CHECKPOINT_PAGES)
        pthread_cond_signal(&ledger->keeper_wake);
    pthread_mutex_unlock(&ledger->keeper_mutex);
    return SQLITE_OK;
}

static void *writer_main(void *ctx)
{
    gw_ledger *ledger = ctx;
    base_thread_enter(BASE_THREAD_WRITER, "gw-writer");
    pthread_mutex_lock(&ledger->mutex);
    for (;;) {
        while (!ledger->commits && !ledger->tasks && !ledger->closing)
            pthread_cond_wait(&ledger->wake, &ledger->mutex);
        if (!ledger->commits && !ledger->tasks)
            break;
        gw_commit *batch = ledger->commits, **end = &ledger->commits;
        uint32_t count = 0;
        for (; *end && count < GW_BATCH_MAX; count++)
            end = &(*end)->next;
        gw_commit *rest = *end;
        *end = NULL;
        ledger->commits = rest;
        if (!rest)
            ledger->commits_last = &ledger->commits;
        ledger->queued -= count;
        gw_task *t = ledger->tasks;
        if (t) {
            ledger->tasks = t->next;
            if (!t->next)
                ledger->tasks_last = &ledger->tasks;
        }
        pthread_mutex_unlock(&ledger->mutex);
        if (count)
            gw_write_batch(ledger, batch);
        if (t)
            t->code = t->run(ledger, ledger->writer, t->ctx, &t->err);
        pthread_mutex_lock(&ledger->mutex);
        if (t) {
            t->done = true;
            pthread_cond_broadcast(&ledger->task_done);
        }
    }
    pthread_mutex_unlock(&ledger->mutex);
    return NULL;
}

bool gw_ledger_commit(gw_ledger *ledger, gw_commit *commit)
{
    commit->next = NULL;
    pthread_mutex_lock(&ledger->mutex);
    bool taken = !ledger->closing && ledger->queued < ledger->options.queue_max;
    if (taken) {
        *ledger->commits_last = commit;
        ledger->commits_last = &commit->next;
        ledger->queued++;
        pthread_cond_signal(&ledger->wake);
    }
    pthread_mutex_unlock(&ledger->mutex);
    return taken;
}

base_code gw_on_writer(gw_ledger *ledger,
                       base_code (*run)(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err),
                       void *ctx, base_err *err)
{
    gw_task t = {.run = run, .ctx = ctx, .err = BASE_ERR_INIT};
    pthread_mutex_lock(&ledger->mutex);
    if (ledger->closing) {
        pthread_mutex_unlock(&ledger->mutex);
        return base_fail(err, BASE_CLOSED, "the ledger is closing");
    }
    *ledger->tasks_last = &t;
    ledger->tasks_last = &t.next;
    pthread_cond_signal(&ledger->wake);
    while (!t.done)
        pthread_cond_wait(&ledger->task_done, &ledger->mutex);
    pthread_mutex_unlock(&ledger->mutex);
    if (t.code && err && !err->code)
        *err = t.err;
    return t.code;
}

/* ---- the keeper: the log and what expired ---- */

static void wait_until(gw_ledger *ledger, uint64_t ns)
{
    struct timespec at = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    pthread_cond_timedwait(&ledger->keeper_wake, &ledger->keeper_mutex, &at);
}

static void *keeper_main(void *ctx)
{
    gw_ledger *ledger = ctx;
    base_thread_enter(BASE_THREAD_OTHER, "gw-keeper");
    gw_db *c = NULL;
    base_err err = BASE_ERR_INIT;
    if (gw_db_open(&c, ledger->file, ledger->options.busy_ms, false, &err))
        base_log(BASE_LOG_ERROR, "keeper_failed reason=\"%s\"", err.text);
    uint64_t swept = 0, kept_small = 0;
    pthread_mutex_lock(&ledger->keeper_mutex);
    while (c && !ledger->keeper_stop) {
        uint64_t now = base_now_ns(), written = ledger->written_ns;
        uint32_t pages = ledger->wal_pages;
        bool sweep = now >= swept + SWEEP_NS;
        bool tidy =
            now >= kept_small + TIDY_NS && (written > kept_small || atomic_load(&ledger->unclean));
        bool idle = written && now >= written + IDLE_NS;
        if (sweep || tidy || idle || pages >= CHECKPOINT_PAGES) {
            ledger->wal_pages = 0;
            pthread_mutex_unlock(&ledger->keeper_mutex);
            if (sweep) {
                swept = now;
                gw_ledger_sweep(ledger, base_wall_ms(), NULL);
            }
            if (sweep || tidy) {
                kept_small = now;
                gw_ledger_trim(ledger, NULL);
                gw_purge(ledger);
            }
            /* SQLite refuses two at a time, and a deletion must not find this one at work. */
            pthread_mutex_lock(&ledger->purge_mutex);
            bool cut = idle && gw_db_checkpoint(c, SQLITE_CHECKPOINT_TRUNCATE);
            if (!idle && pages >= CHECKPOINT_PAGES)
                gw_db_checkpoint(c, pages >= RESTART_PAGES ? SQLITE_CHECKPOINT_RESTART
                                                           : SQLITE_CHECKPOINT_PASSIVE);
            pthread_mutex_unlock(&ledger->purge_mutex);
            pthread_mutex_lock(&ledger->keeper_mutex);
            /* A cut that failed is tried again after another idle second. */
            if (ledger->written_ns == written && idle)
                ledger->written_ns = cut ? 0 : now;
            continue;
        }
        uint64_t next = swept + SWEEP_NS;
        if (written)
            next = base_min(next, written + IDLE_NS);
        if (written > kept_small || atomic_load(&ledger->unclean))
            next = base_min(next, kept_small + TIDY_NS);
        wait_until(ledger, next);
    }
    pthread_mutex_unlock(&ledger->keeper_mutex);
    gw_db_close(c);
    return NULL;
}

/* ---- readers ---- */

gw_db *gw_reader_take(gw_ledger *ledger, base_err *err)
{
    pthread_mutex_lock(&ledger->reader_mutex);
    while (!ledger->readers && ledger->reader_count >= READERS_MAX)
        pthread_cond_wait(&ledger->reader_free, &ledger->reader_mutex);
    gw_db *c = ledger->readers;
    if (c)
        ledger->readers = c->next;
    else
        ledger->reader_count++;
    pthread_mutex_unlock(&ledger->reader_mutex);
    if (c || !gw_db_open(&c, ledger->file, ledger->options.busy_ms, false, err))
        return c;
    pthread_mutex_lock(&ledger->reader_mutex);
    ledger->reader_count--;
    pthread_cond_signal(&ledger->reader_free);
    pthread_mutex_unlock(&ledger->reader_mutex);
    return NULL;
}

void gw_reader_give(gw_ledger *ledger, gw_db *c)
{
    /* One that is not reset would pin the log for as long as nobody uses it again. */
    for (sqlite3_stmt *s = NULL; (s = sqlite3_next_stmt(c->db, s));)
        if (sqlite3_stmt_busy(s)) {
            base_log(BASE_LOG_ERROR, "statement_left_open sql=\"%.60s\"", sqlite3_sql(s));
            sqlite3_reset(s);
        }
    pthread_mutex_lock(&ledger->reader_mutex);
    c->next = ledger->readers;
    ledger->readers = c;
    pthread_cond_signal(&ledger->reader_free);
    pthread_mutex_unlock(&ledger->reader_mutex);
}

/* ---- figures and checks ---- */

static uint64_t file_bytes(const char *file, const char *suffix)
{
    char path[4096];
    struct stat st;
    snprintf(path, sizeof(path), "%s%s", file, suffix);
    return stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
}

gw_ledger_stats gw_ledger_get_stats(gw_ledger *ledger)
{
    gw_ledger_stats stats = {.commits = atomic_load(&ledger->commit_count),
                             .transactions = atomic_load(&ledger->transaction_count),
                             .failures = atomic_load(&ledger->failure_count),
                             .native_sessions = atomic_load(&ledger->native_count),
                             .conversations = atomic_load(&ledger->conversation_count),
                             .trimmed = atomic_load(&ledger->trim_count),
                             .database_bytes = file_bytes(ledger->file, ""),
                             .wal_bytes = file_bytes(ledger->file, "-wal")};
    pthread_mutex_lock(&ledger->mutex);
    stats.queued = ledger->queued;
    pthread_mutex_unlock(&ledger->mutex);
    gw_memory_stats(ledger->memory, &stats);
    gw_slice_stats slices = gw_slices_get_stats(ledger->slices);
    stats.slices_known = slices.known;
    stats.slices_parsed = slices.parsed;
    stats.slice_bytes = slices.bytes;
    return stats;
}

gw_slices *gw_ledger_slices(gw_ledger *ledger)
{
    return ledger->slices;
}

/* ---- open and close ---- */

static base_code make_directory(const char *path, base_err *err)
{
    char part[4096];
    if (strlen(path) >= sizeof(part) - 32 || !path[0])
        return base_fail_param(err, BASE_INVALID, "data.path",
                               "data.path has %zu bytes, 1 to %zu are allowed", strlen(path),
                               sizeof(part) - 33);
    snprintf(part, sizeof(part), "%s", path);
    for (char *at = part + 1;; at++) {
        if (*at != '/' && *at != '\0')
            continue;
        char end = *at;
        *at = '\0';
        if (mkdir(part, 0700) != 0 && errno != EEXIST)
            return base_fail_param(err, BASE_IO, "data.path", "cannot make %s: %s", part,
                                   strerror(errno));
        *at = end;
        if (!end)
            return BASE_OK;
    }
}

/* What is in memory would not see another gateway's turns. */
base_code gw_data_lock(int *fd, const char *directory, base_err *err)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/whimbrel.lock", directory);
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (*fd < 0)
        return base_fail_param(err, BASE_IO, "data.path", "cannot write to %s: %s", directory,
                               strerror(errno));
    if (flock(*fd, LOCK_EX | LOCK_NB) == 0)
        return BASE_OK;
    return base_fail_param(err, BASE_CONFLICT, "data.path", "%s is in use by another process",
                           directory);
}

base_code gw_ledger_open(gw_ledger **out, const gw_ledger_options *options, base_err *err)
{
    gw_ledger *ledger = calloc(1, sizeof(*ledger));
    if (!ledger)
        return base_fail(err, BASE_NOMEM, "no memory for the ledger");
    ledger->lock_fd = -1;
    ledger->opened_ms = base_wall_ms();
    ledger->options = *options;
    ledger->options.path = strdup(options->path);
    ledger->options.memory_bytes = options->memory_bytes ? options->memory_bytes : MEMORY_BYTES;
    ledger->options.queue_max = options->queue_max ? options->queue_max : QUEUE_MAX;
    ledger->options.busy_ms = options->busy_ms ? options->busy_ms : BUSY_MS;
    ledger->waits_ms = ledger->options.busy_ms;
    ledger->commits_last = &ledger->commits;
    ledger->tasks_last = &ledger->tasks;
    ledger->hash = gw_hash_open();
    ledger->memory = gw_memory_create(ledger->options.memory_bytes);
    ledger->slices = gw_slices_create(0);
    pthread_mutex_init(&ledger->mutex, NULL);
    pthread_cond_init(&ledger->wake, NULL);
    pthread_cond_init(&ledger->task_done, NULL);
    pthread_mutex_init(&ledger->reader_mutex, NULL);
    pthread_cond_init(&ledger->reader_free, NULL);
    pthread_mutex_init(&ledger->purge_mutex, NULL);
    /* A kill may have come between a deletion and the cut of the log. */
    atomic_store(&ledger->unclean, true);
    pthread_mutex_init(&ledger->keeper_mutex, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&ledger->keeper_wake, &attributes);
    pthread_condattr_destroy(&attributes);
    base_code code = BASE_OK;
    if (!ledger->options.path || !ledger->memory || !ledger->slices || ledger->hash.failed ||
        asprintf(&ledger->file, "%s/whimbrel.db", options->path) < 0) {
        ledger->file = NULL;
        code = base_fail(err, BASE_NOMEM, "no memory for the ledger");
    }
    if (!code)
        code = make_directory(ledger->options.path, err);
    if (!code)
        code = gw_data_lock(&ledger->lock_fd, ledger->options.path, err);
    if (!code)
        code = gw_db_open(&ledger->writer, ledger->file, ledger->options.busy_ms, true, err);
    if (!code)
        code = gw_schema_migrate(ledger->writer->db, err);
    if (!code)
        code = gw_native_open(ledger, err);
    if (!code)
        code = gw_conversation_count(ledger, err);
    if (!code) {
        sqlite3_wal_hook(ledger->writer->db, on_wal, ledger);
        ledger->thread_runs = pthread_create(&ledger->thread, NULL, writer_main, ledger) == 0;
        ledger->keeper_runs =
            ledger->thread_runs && pthread_create(&ledger->keeper, NULL, keeper_main, ledger) == 0;
        if (!ledger->keeper_runs)
            code = base_fail(err, BASE_IO, "the system gives no thread for the ledger");
    }
    if (code) {
        gw_ledger_close(ledger);
        if (err && !err->param[0])
            snprintf(err->param, sizeof(err->param), "data.path");
        return code;
    }
    *out = ledger;
    return BASE_OK;
}

void gw_ledger_close(gw_ledger *ledger)
{
    if (!ledger)
        return;
    if (ledger->keeper_runs) {
        pthread_mutex_lock(&ledger->keeper_mutex);
        ledger->keeper_stop = true;
        pthread_cond_signal(&ledger->keeper_wake);
        pthread_mutex_unlock(&ledger->keeper_mutex);
        pthread_join(ledger->keeper, NULL);
    }
    if (ledger->thread_runs) {
        pthread_mutex_lock(&ledger->mutex);
        ledger->closing = true;
        pthread_cond_signal(&ledger->wake);
        pthread_mutex_unlock(&ledger->mutex);
        pthread_join(ledger->thread, NULL);
    }
    for (gw_db *c = ledger->readers, *next; c; c = next) {
        next = c->next;
        gw_db_close(c);
    }
    if (ledger->writer && ledger->thread_runs)
        gw_db_checkpoint(ledger->writer, SQLITE_CHECKPOINT_TRUNCATE);
    gw_db_close(ledger->writer);
    if (ledger->lock_fd >= 0)
        close(ledger->lock_fd);
    gw_memory_destroy(ledger->memory);
    gw_slices_destroy(ledger->slices);
    gw_hash_close(&ledger->hash);
    pthread_mutex_destroy(&ledger->mutex);
    pthread_cond_destroy(&ledger->wake);
    pthread_cond_destroy(&ledger->task_done);
    pthread_mutex_destroy(&ledger->reader_mutex);
    pthread_cond_destroy(&ledger->reader_free);
    pthread_mutex_destroy(&ledger->purge_mutex);
    pthread_mutex_destroy(&ledger->keeper_mutex);
    pthread_cond_destroy(&ledger->keeper_wake);
    free((char *)ledger->options.path);
    free(ledger->file);
    free(ledger);
}
