/* For ledger*.c and their tests: canonical items, the map of recent runs, the database, the writer
 * and the schema. */
#pragma once
#include <openssl/evp.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>

#include "gateway/ledger.h"
#include "gateway/slice.h"

/* ---- ledger_item.c: what counts as the same item ---- */

/* One hash in the making; parts are framed by their length, so that no two lists of parts give the
 * same bytes. */
typedef struct gw_hash {
    EVP_MD_CTX *ctx;
    bool failed; /* out of memory; the digest is worthless */
} gw_hash;
gw_hash gw_hash_open(void);
void gw_hash_close(gw_hash *hash);
void gw_hash_begin(gw_hash *hash, const char *kind);
void gw_hash_part(gw_hash *hash, const void *bytes, size_t length);
void gw_hash_end(gw_hash *hash, gw_digest *out);

/* Without white space at the ends; never NULL. */
eng_text gw_text_trim(eng_text text);
/* Role, text and calls: what a client sees of an item. */
void gw_item_visible(gw_hash *hash, gw_digest *out, const eng_item *item);
/* All of it: `visible` and the reasoning that was sent. */
void gw_item_own(gw_hash *hash, gw_digest *out, const gw_digest *visible, const eng_item *item);
/* False if there is none: absent, empty and white space are the same. */
bool gw_item_reasoning(gw_hash *hash, gw_digest *out, eng_text reasoning);
void gw_item_root(gw_hash *hash, gw_digest *out, const gw_root *root);
/* The node before the first item of a body. */
void gw_item_body(gw_hash *hash, gw_digest *out, int64_t tenant);
/* Items that come before a body: the system text in front. */
uint32_t gw_item_front_count(const eng_item *items, uint32_t count);
/* `own`: of the items in front. */
void gw_item_front(gw_front *out, const gw_root *root, const eng_item *items, const gw_digest *own,
                   uint32_t count);
/* Node after an item that was rendered, and after a run. */
void gw_node_item(gw_hash *hash, gw_digest *out, const gw_digest *parent, const gw_digest *own);
void gw_node_run(gw_hash *hash, gw_digest *out, const gw_digest *parent, const gw_digest *tokens);
/* Where runs with this visible part under this node are kept, */
void gw_slot(gw_hash *hash, gw_digest *out, const gw_digest *parent, const gw_digest *visible);
/* those with this visible part after this body, */
void gw_lineage(gw_hash *hash, gw_digest *out, const gw_digest *body, const gw_digest *visible);
/* and all after this body. */
void gw_under(gw_hash *hash, gw_digest *out, const gw_digest *body);
void gw_tokens_digest(gw_hash *hash, gw_digest *out, const int32_t *tokens, uint32_t count);
void gw_root_json(base_buf *out, const gw_root *root);

static inline int64_t gw_digest_prefix(const gw_digest *digest)
{
    int64_t prefix;
    __builtin_memcpy(&prefix, digest->bytes, sizeof(prefix));
    return prefix;
}
bool gw_digest_equal(const gw_digest *a, const gw_digest *b);

/* ---- ledger_memory.c: recent runs, bounded ---- */

typedef struct gw_run {
    /* Lists that it stands in: of its slot; of its visible part after its body; of all after its
     * body. */
    gw_digest slot, lineage, under;
    gw_digest visible, reasoning, tokens_digest;
    bool has_reasoning;
    bool bodied; /* `lineage` and `under` are set */
    int64_t tenant;
    char template_id[33];
    gw_id turn, session;                   /* that generated it first, */
    gw_id parent;                          /* and the turn which that one continued, "" if none */
    uint64_t sequence[2];                  /* hash of that turn's prompt and run, */
    uint64_t head[2];                      /* and of what comes before the run; */
    uint32_t sequence_tokens, head_tokens; /* their counts */
    gw_front front;
    uint64_t space;
    char fingerprint[33];
    int64_t ended_ms; /* Unix time */
    uint32_t token_count, id_count;
    gw_id *ids; /* that name it: of its calls and turns */
    int32_t *tokens;
} gw_run;

/* What a run must be to be taken. */
typedef struct gw_want {
    const char *template_id;
    const gw_digest *reasoning; /* NULL: none was sent */
    bool other_template;        /* out: a run was passed over that another template made */
} gw_want;

typedef enum gw_found {
    GW_FOUND_UNKNOWN, /* not in memory, or not all of them: ask the database */
    GW_FOUND_NONE,    /* there is none */
    GW_FOUND_RUN,
    GW_FOUND_AMBIGUOUS, /* several with different reasoning */
} gw_found;
/* The run to take of a list, oldest first; by rules 1 and 3. Never UNKNOWN. */
gw_found gw_run_choose(const gw_run **out, gw_run *const *runs, uint32_t count, gw_want *want);
/* A copy without its ids, in the arena, or NULL without memory. */
gw_run *gw_run_copy(const gw_run *run, base_arena *arena);

typedef struct gw_memory gw_memory;
#define GW_LIST_RUNS_MAX 32 /* more alternatives under one key are looked up on disk */

gw_memory *gw_memory_create(uint64_t bytes_max);
void gw_memory_destroy(gw_memory *memory);
/* All functions lock by themselves. */

/* Of the list under `key`, by gw_run_choose. The run is copied to the arena; without memory there
 * it is UNKNOWN. `generation` is for gw_memory_fill. */
gw_found gw_memory_choose(gw_memory *memory, gw_run **out, uint64_t *generation,
                          const gw_digest *key, gw_want *want, base_arena *arena);
/* Copies of the list's runs, at most GW_LIST_RUNS_MAX; returns how many. `complete`: there are no
 * others on disk. */
uint32_t gw_memory_list(gw_memory *memory, gw_run **out, bool *complete, uint64_t *generation,
                        const gw_digest *key, base_arena *arena);
/* By the id of a call or a turn; NULL only says that memory does not know it. */
gw_run *gw_memory_named(gw_memory *memory, const char *id, base_arena *arena);
/* All runs of a list, read from the database (count 0: none there), unless something was added
 * since `generation` was taken: the reader may then have missed it. */
void gw_memory_fill(gw_memory *memory, const gw_digest *key, gw_run *const *runs, uint32_t count,
                    uint64_t generation);
/* A new run. `alone`: the database has no other run in this slot. */
void gw_memory_add(gw_memory *memory, const gw_run *run, bool alone);
/* The lists under these keys. */
void gw_memory_forget(gw_memory *memory, const gw_digest *keys, uint32_t count);
void gw_memory_stats(gw_memory *memory, gw_ledger_stats *out);

/* ---- ledger_db.c: connections, statements, columns ---- */

#define GW_RUN_COLUMNS                                                                             \
    "r.id, r.tenant, r.template, r.slot, r.visible, r.reasoning, r.digest, r.turn, r.session, "    \
    "r.sequence, r.sequence_tokens, r.token_count, r.tokens, r.lineage, r.under, r.parent, "       \
    "r.front, r.head, r.head_tokens, r.space, r.fingerprint, r.ended_ms"

/* Of turns t, for what leaves. */
#define GW_LEAVING_COLUMNS                                                                         \
    "t.id, t.node, t.run, t.parent, t.session, t.space, t.prompt_base, t.retention"

typedef enum gw_sql {
    GW_SQL_BEGIN,
    GW_SQL_COMMIT,
    GW_SQL_ROLLBACK,
    GW_SQL_SESSION_FIND,
    GW_SQL_SESSION_ADD,
    GW_SQL_SESSION_USE,
    GW_SQL_NODE_FIND,
    GW_SQL_NODE_ADD,
    GW_SQL_ITEM_FIND,
    GW_SQL_ITEM_ADD,
    GW_SQL_RUN_FIND,
    GW_SQL_RUN_OTHER,
    GW_SQL_RUN_ADD,
    GW_SQL_CALL_ADD,
    GW_SQL_TURN_FIND,
    GW_SQL_TURN_ADD,
    GW_SQL_SLOT,
    GW_SQL_LINEAGE,
    GW_SQL_UNDER,
    GW_SQL_CALL,
    GW_SQL_TURN_RUN,
    GW_SQL_LABEL_RUN,
    GW_SQL_TURN_READ,
    GW_SQL_TURN_UP,
    GW_SQL_ANSWER,
    GW_SQL_TURN_NODE,
    GW_SQL_ITEM_UP,
    GW_SQL_TURN_FORGET,
    GW_SQL_TENANTS,
    GW_SQL_TENANT_FIND,
    GW_SQL_TENANT_SHARE,
    GW_SQL_GROUP_FIND,
    GW_SQL_GROUP_ADD,
    GW_SQL_TENANT_ADD,
    GW_SQL_KEYS,
    GW_SQL_KEY_FIND,
    GW_SQL_KEY_ADD,
    GW_SQL_KEY_REVOKE,
    GW_SQL_SWEEP_LIST,
    GW_SQL_SWEEP_CHILDREN,
    GW_SQL_SWEEP_POSTPONE,
    GW_SQL_BUILT_ON,
    GW_SQL_TURN_USED,
    GW_SQL_TURN_THERE,
    GW_SQL_FORGOTTEN,
    GW_SQL_TURN_DELETE,
    GW_SQL_NODE_USED,
    GW_SQL_NODE_READ,
    GW_SQL_NODE_DELETE,
    GW_SQL_NODE_TURN,
    GW_SQL_NODE_CHILD,
    GW_SQL_ITEM_USED,
    GW_SQL_ITEM_DELETE,
    GW_SQL_RUN_USED,
    GW_SQL_RUN_KEYS,
    GW_SQL_RUN_DELETE,
    GW_SQL_CALLS_DELETE,
    GW_SQL_SESSION_SWEEP,
    GW_SQL_SESSION_RELEASE,
    GW_SQL_BYTES_ALL,
    GW_SQL_BYTES_TENANT,
    GW_SQL_BYTES_OVER,
    GW_SQL_TRIM_ALL,
    GW_SQL_TRIM_TENANT,
    GW_SQL_ERASURE_ADD,
    GW_SQL_ERASURE_NEXT,
    GW_SQL_ERASURE_DONE,
    /* ledger_session.c */
    GW_SQL_NATIVE_READ,
    GW_SQL_NATIVE_NEWEST,
    GW_SQL_NATIVE_OLDEST,
    GW_SQL_NATIVE_COUNT,
    GW_SQL_NATIVE_ADD,
    GW_SQL_NATIVE_PIN,
    GW_SQL_NATIVE_DROP,
    GW_SQL_NATIVE_DEPTH,
    GW_SQL_NATIVE_PATH,
    GW_SQL_NATIVE_TURN,
    GW_SQL_NATIVE_OWN,
    GW_SQL_NATIVE_LET_GO,
    GW_SQL_NODE_ROOT,
    /* ledger_usage.c */
    GW_SQL_USAGE_PLACE,
    GW_SQL_USAGE_ADD,
    GW_SQL_COUNT,
} gw_sql;

/* One connection and its statements; one thread at a time. */
typedef struct gw_db {
    struct gw_db *next;
    sqlite3 *db;
    sqlite3_stmt *statements[GW_SQL_COUNT];
} gw_db;

base_code gw_db_open(gw_db **out, const char *file, uint32_t busy_ms, bool writer, base_err *err);
void gw_db_close(gw_db *c); /* NULL is fine */
base_code gw_db_error(gw_db *c, base_err *err, const char *what);
/* A prepared statement, reset and without bindings; NULL on an error of SQLite. */
sqlite3_stmt *gw_db_statement(gw_db *c, gw_sql id);
/* Steps a statement that gives no rows, and resets it. */
bool gw_db_execute(sqlite3_stmt *s);
bool gw_db_simple(gw_db *c, gw_sql id);
/* A statement of its own, for what is rare; NULL on an error. */
sqlite3_stmt *gw_db_prepare(gw_db *c, const char *sql);
/* Steps such a statement that gives no rows, and frees it; false for NULL. */
bool gw_db_run(sqlite3_stmt *s);
/* First column of the first row, 0 if there is no row. The statement is reset. False on an error.
 */
bool gw_db_scalar(sqlite3_stmt *s, int64_t *out);

/* True if all of the log was dealt with as `mode` says; what is more than busy is logged. */
bool gw_db_checkpoint(gw_db *c, int mode);

void gw_bind_text(sqlite3_stmt *s, int at, const char *text); /* NULL: SQL's NULL */
void gw_bind_id(sqlite3_stmt *s, int at, int64_t id);         /* 0: SQL's NULL */
void gw_bind_digest(sqlite3_stmt *s, int at, const gw_digest *digest);
int64_t gw_public_key(const char *id); /* what public ids are indexed by */
void gw_id_set(gw_id *id, const char *text);

bool gw_column_digest(sqlite3_stmt *s, int column, gw_digest *out);
/* Sums that rows carry, so that a damaged one is seen; NULL in a row of an older schema fits. */
int64_t gw_item_sum(const void *data, size_t length);
int64_t gw_turn_sum(const void *prompt, size_t prompt_length, const void *steps,
                    size_t steps_length, const char *echo);
bool gw_column_sum_fits(sqlite3_stmt *s, int column, int64_t sum);
bool gw_column_turn_fits(sqlite3_stmt *s, int prompt, int steps, int echo, int sum);

/* Token blobs are LEB128. */
void gw_put_numbers(base_buf *out, const void *numbers, uint32_t count);
/* A blob column to an array in the arena; false if it is damaged or memory is used up. */
bool gw_column_numbers(sqlite3_stmt *s, int column, void **out, uint32_t *count, base_arena *arena);
/* A row of GW_RUN_COLUMNS; NULL if it is damaged (dropped, logged) or memory is used up. */
gw_run *gw_column_run(sqlite3_stmt *s, base_arena *arena);
void gw_sequence_hash(uint64_t out[2], const int32_t *a, uint32_t a_count, const int32_t *b,
                      uint32_t b_count);

/* ---- ledger.c: the writer and the readers ---- */

#define GW_BATCH_MAX 256 /* commits of one transaction */

/* A job of the writer that its caller waits for. */
typedef struct gw_task {
    struct gw_task *next;
    base_code (*run)(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err);
    void *ctx;
    base_code code;
    base_err err;
    bool done;
} gw_task;

/* What one commit needs beside its fields, made outside the transaction. */
typedef struct gw_work {
    gw_commit *commit;
    gw_run run; /* tokens borrowed from the commit */
    gw_digest own, node;
    bool alone;
} gw_work;

struct gw_ledger {
    gw_ledger_options options;
    gw_memory *memory;
    gw_slices *slices;
    char *file;
    int lock_fd;
    int64_t opened_ms; /* Unix time */
    gw_db *writer;     /* writer thread */
    gw_hash hash;      /* writer thread */
    uint32_t waits_ms; /* writer thread; how long for another process's lock */
    gw_work works[GW_BATCH_MAX];
    pthread_t thread, keeper;
    bool thread_runs, keeper_runs;

    pthread_mutex_t mutex; /* guards the queues and `closing` */
    pthread_cond_t wake, task_done;
    gw_commit *commits, **commits_last;
    gw_task *tasks, **tasks_last;
    uint32_t queued;
    bool closing;

    pthread_mutex_t reader_mutex; /* guards the readers that are free */
    pthread_cond_t reader_free;
    gw_db *readers;
    uint32_t reader_count;

    pthread_mutex_t purge_mutex; /* one purge or checkpoint at a time; guards `erase` */
    gw_erase_fn *erase;
    void *erase_ctx;
    atomic_bool unclean; /* the log may hold what was deleted */

    pthread_mutex_t keeper_mutex; /* guards what follows */
    pthread_cond_t keeper_wake;
    uint32_t wal_pages;
    uint64_t written_ns; /* last commit; 0: the log is empty */
    bool keeper_stop;

    atomic_uint_fast64_t commit_count, transaction_count, failure_count, trim_count;
    atomic_uint_fast64_t native_count;       /* native sessions; written by the writer */
    atomic_uint_fast64_t conversation_count; /* the same */
};

/* One process a data directory; the lock goes with the descriptor, which is set (-1: none) in any
 * case. BASE_CONFLICT if another has it. */
base_code gw_data_lock(int *fd, const char *directory, base_err *err);
/* Runs a task on the writer and waits for it. */
base_code gw_on_writer(gw_ledger *ledger,
                       base_code (*run)(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err),
                       void *ctx, base_err *err);
/* A connection for reading, NULL with `err`; blocks while all are taken. */
gw_db *gw_reader_take(gw_ledger *ledger, base_err *err);
void gw_reader_give(gw_ledger *ledger, gw_db *c);

/* ---- ledger_commit.c ---- */

/* Commits a list of at most GW_BATCH_MAX and calls back. On the writer. */
void gw_write_batch(gw_ledger *ledger, gw_commit *commits);

/* ---- ledger_read.c ---- */

/* A turn's prompt, its parents' tokens put before its own, and behind it in the same array its run.
 * BASE_FORMAT if a row on the way is damaged. */
base_code gw_turn_tokens(gw_db *c, gw_turn_row *out, int64_t row, base_arena *arena, base_err *err);

/* ---- ledger_sweep.c ---- */

/* Deleting turns on the writer, in the caller's transaction; then, on another thread,
 * gw_ledger_purge. */
typedef struct gw_deletion gw_deletion;
gw_deletion *gw_deletion_begin(gw_ledger *ledger, gw_db *c); /* NULL without memory */
/* A turn by its row, with the cached ones that build on it; what a kept one needs stays. False on
 * an error of the database. */
bool gw_deletion_turn(gw_deletion *d, int64_t turn);
/* Orders the erasure of the pages if `ok`, frees. False on an error of the database. */
bool gw_deletion_end(gw_deletion *d, bool ok);
/* gw_ledger_purge if anything was deleted since the last one. */
void gw_purge(gw_ledger *ledger);

/* ---- ledger_stream.c, ledger_conversation.c ---- */

/* On the writer, in the transaction of a turn that was just added. False on an error. */
bool gw_stream_commit(gw_db *c, const gw_commit *commit);
bool gw_conversation_commit(gw_db *c, const gw_commit *commit);
/* Counts conversations, at open. */
base_code gw_conversation_count(gw_ledger *ledger, base_err *err);

/* ---- ledger_usage.c ---- */

struct gw_sums;
/* The tool whose result the turn was given, cut to GW_USAGE_TOOL_MAX; "" for none. */
void gw_usage_tool(char *out, const gw_commit *commit);
/* On the writer, in the turn's transaction. False on an error, as the next two. */
bool gw_usage_commit(gw_db *c, const gw_commit *commit);
bool gw_usage_sweep(gw_db *c, int64_t now_ms); /* days that are past keeping */
/* Of its own turns that are kept. */
bool gw_usage_of_session(gw_db *c, struct gw_sums *out, int64_t session);

/* ---- ledger_session.c ---- */

/* At open, before the writer runs: deletes what imports left that a crash cut, and counts native
 * sessions. */
base_code gw_native_open(gw_ledger *ledger, base_err *err);

/* ---- ledger_check.c ---- */

typedef struct gw_check {
    /* Once for each table that is right, with its rows and `wrong` NULL; else once a fault. */
    void (*report)(void *ctx, const char *what, uint64_t rows, const char *wrong);
    void *ctx;
} gw_check;
/* The whole database; true if all is right. */
bool gw_db_check(gw_db *c, const gw_check *check);

/* ---- ledger_schema.c ---- */

#define GW_SCHEMA_APPLICATION 0x5748494d /* "WHIM" */
#define GW_SCHEMA_VERSION 11
/* What rows of schema 8 count for their tenants; its triggers and ledger_check.c say the same, so
 * they never change. `row`: "", "OLD." or "NEW.". */
#define GW_BYTES_STREAM(row)                                                                       \
    "(ifnull(length(CAST(" row "echo AS BLOB)),0)+length(CAST(" row "told AS BLOB))+"              \
    "ifnull(length(" row "run),0)+ifnull(length(" row "steps),0)+192)"
#define GW_BYTES_CONVERSATION(row) "(ifnull(length(CAST(" row "metadata AS BLOB)),0)+192)"
#define GW_BYTES_MEMBER(row) "(length(CAST(" row "data AS BLOB))+128)"
#define GW_BYTES_NATIVE(row)                                                                       \
    "(ifnull(length(CAST(" row "config AS BLOB)),0)+"                                              \
    "ifnull(length(CAST(" row "metadata AS BLOB)),0)+256)"
/* Creates or migrates. BASE_UNSUPPORTED for a newer one, BASE_FORMAT for a database of something
 * else. */
base_code gw_schema_migrate(sqlite3 *db, base_err *err);
