/* What leaves the ledger: turns past their time, deleted ones, and the oldest cached ones where
 * bytes are short; with each of them the nodes, items and runs that only it held, and an order to
 * erase its pages. On the writer, in short transactions. */
#include "gateway/ledger_internal.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "engine/base/num.h"

#define SWEEP_TURNS 64           /* a transaction */
#define BUILD_MAX 4096           /* turns that one deletion takes along */
#define DEPTH_MAX 100000         /* nodes of one chain, against a loop in a damaged file */
#define PATHS_BYTES (512u << 20) /* tokens of the turns of one transaction */
#define TRIM_PERCENT 95          /* of a bound, so that the next turn does not trim again */
#define ASK_AGAIN_MS 3600000
#define CUT_TTL_MS                                                                                 \
    (30ll * 86400 * 1000) /* a stream that a crash cut waits for its client so long */
#define SWEEP_MEMBERS 512 /* items of conversations, a transaction; its statement says so, too */

/* A row of GW_LEAVING_COLUMNS. */
typedef struct leaving {
    int64_t id, node, run, parent, session, space, base;
    bool kept, spaced;
} leaving;

/* The tokens of a branch whose end has left. */
typedef struct path {
    int64_t parent; /* of the topmost turn that left: row, 0 if it has none */
    int64_t node;   /* the deepest one above that stayed, 0: none */
    uint64_t space;
    int32_t *tokens;
    uint32_t count, kept;
} path;

struct gw_deletion {
    gw_ledger *ledger;
    gw_db *c;
    base_arena *arena;
    path *paths;
    uint32_t path_count, path_max;
    uint32_t turns; /* that left */
};

static leaving column_leaving(sqlite3_stmt *s)
{
    return (leaving){.id = sqlite3_column_int64(s, 0),
                     .node = sqlite3_column_int64(s, 1),
                     .run = sqlite3_column_int64(s, 2),
                     .parent = sqlite3_column_int64(s, 3),
                     .session = sqlite3_column_int64(s, 4),
                     .space = sqlite3_column_int64(s, 5),
                     .base = sqlite3_column_int64(s, 6),
                     .kept = sqlite3_column_int(s, 7) == GW_RETAIN_KEPT,
                     .spaced = sqlite3_column_type(s, 5) != SQLITE_NULL};
}

static bool used(gw_db *c, gw_sql id, int64_t row, bool *out)
{
    int64_t found;
    sqlite3_stmt *s = gw_db_statement(c, id);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, row);
    if (!gw_db_scalar(s, &found))
        return false;
    *out = found != 0;
    return true;
}

static bool run_row(gw_db *c, gw_sql id, int64_t row)
{
    sqlite3_stmt *s = gw_db_statement(c, id);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, row);
    return gw_db_execute(s);
}

static bool release_run(gw_ledger *ledger, gw_db *c, int64_t run)
{
    bool needed;
    if (!run)
        return true;
    if (!used(c, GW_SQL_RUN_USED, run, &needed))
        return false;
    if (needed)
        return true;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_RUN_KEYS);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, run);
    gw_digest keys[3];
    uint32_t count = 0;
    bool there = sqlite3_step(s) == SQLITE_ROW;
    for (int i = 0; there && i < 3; i++)
        count += gw_column_digest(s, i, &keys[count]);
    sqlite3_reset(s);
    if (!run_row(c, GW_SQL_CALLS_DELETE, run) || !run_row(c, GW_SQL_RUN_DELETE, run))
        return false;
    gw_memory_forget(ledger->memory, keys, count);
    return true;
}

/* Deletes a node that nobody needs, then its parents as far as that is true of them. *node becomes
 * the first that stays. */
static bool release_nodes(gw_ledger *ledger, gw_db *c, int64_t *node)
{
    while (*node) {
        bool needed;
        if (!used(c, GW_SQL_NODE_USED, *node, &needed))
            return false;
        if (needed)
            return true;
        sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NODE_READ);
        if (!s)
            return false;
        sqlite3_bind_int64(s, 1, *node);
        int64_t parent = 0, item = 0, run = 0;
        if (sqlite3_step(s) == SQLITE_ROW) {
            parent = sqlite3_column_int64(s, 0);
            item = sqlite3_column_int64(s, 1);
            run = sqlite3_column_int64(s, 2);
        }
        sqlite3_reset(s);
        if (!run_row(c, GW_SQL_NODE_DELETE, *node) || !used(c, GW_SQL_ITEM_USED, item, &needed) ||
            (!needed && !run_row(c, GW_SQL_ITEM_DELETE, item)) || !release_run(ledger, c, run))
            return false;
        *node = parent;
    }
    return true;
}

/* ---- the pages of what left ---- */

/* Notes the turn's tokens while its row and its parents' still spell them. A turn whose child has
 * left before it only makes the child's branch longer. NULL: nothing to erase, or no memory. */
static path *note_path(gw_deletion *d, const leaving *turn)
{
    for (uint32_t i = 0; i < d->path_count; i++) {
        path *p = &d->paths[i];
        if (p->parent != turn->id || !p->kept)
            continue;
        p->parent = turn->parent;
        p->kept = (uint32_t)turn->base;
        return p;
    }
    if (!turn->spaced)
        return NULL;
    if (d->path_count == d->path_max) {
        uint32_t wanted = d->path_max ? 2 * d->path_max : SWEEP_TURNS;
        path *more = realloc(d->paths, wanted * sizeof(*more));
        if (!more)
            return NULL;
        d->paths = more;
        d->path_max = wanted;
    }
    gw_turn_row row = {0};
    base_err err = BASE_ERR_INIT;
    if (gw_turn_tokens(d->c, &row, turn->id, d->arena, &err)) {
        base_log(BASE_LOG_ERROR, "pages_not_erased turn_row=%lld reason=\"%s\"",
                 (long long)turn->id, err.text);
        return NULL;
    }
    /* gw_turn_tokens puts the run behind the prompt. */
    path *p = &d->paths[d->path_count++];
    *p = (path){.parent = turn->parent,
                .space = (uint64_t)turn->space,
                .tokens = row.prompt,
                .count = row.prompt_count + row.run_count,
                .kept = (uint32_t)turn->base};
    return p;
}

/* Some turn that stays and hangs below a node; 0 if there is none. */
static bool turn_below(gw_db *c, int64_t node, uint64_t space, int64_t *out)
{
    *out = 0;
    for (uint32_t depth = 0; node && depth < DEPTH_MAX; depth++) {
        sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NODE_TURN);
        if (!s)
            return false;
        sqlite3_bind_int64(s, 1, node);
        sqlite3_bind_int64(s, 2, (int64_t)space);
        if (!gw_db_scalar(s, out))
            return false;
        if (*out)
            return true;
        s = gw_db_statement(c, GW_SQL_NODE_CHILD);
        if (!s)
            return false;
        sqlite3_bind_int64(s, 1, node);
        if (!gw_db_scalar(s, &node))
            return false;
    }
    return true;
}

/* What a session that stays has in common with the path keeps its pages: at least the items above
 * the node where they part. */
static bool write_order(gw_deletion *d, path *p)
{
    int64_t other;
    if (!turn_below(d->c, p->node, p->space, &other))
        return false;
    gw_turn_row row = {0};
    if (other && !gw_turn_tokens(d->c, &row, other, d->arena, NULL)) {
        uint32_t common = 0, count = row.prompt_count + row.run_count;
        while (common < count && common < p->count && row.prompt[common] == p->tokens[common])
            common++;
        p->kept = (uint32_t)base_max(p->kept, common);
    }
    if (p->kept >= p->count)
        return true;
    base_buf tokens;
    base_buf_init(&tokens, 0);
    gw_put_numbers(&tokens, p->tokens, p->count);
    sqlite3_stmt *s = tokens.failed ? NULL : gw_db_statement(d->c, GW_SQL_ERASURE_ADD);
    bool ok = s != NULL;
    if (ok) {
        sqlite3_bind_int64(s, 1, (int64_t)p->space);
        sqlite3_bind_int64(s, 2, p->kept);
        sqlite3_bind_blob64(s, 3, tokens.data, tokens.length, SQLITE_STATIC);
        ok = gw_db_execute(s);
    }
    base_buf_deinit(&tokens);
    return ok;
}

/* ---- deleting turns ---- */

gw_deletion *gw_deletion_begin(gw_ledger *ledger, gw_db *c)
{
    gw_deletion *d = calloc(1, sizeof(*d));
    base_arena *arena = base_arena_create(64u << 10, PATHS_BYTES);
    if (d && arena) {
        *d = (gw_deletion){.ledger = ledger, .c = c, .arena = arena};
        return d;
    }
    free(d);
    base_arena_destroy(arena);
    return NULL;
}

static bool delete_one(gw_deletion *d, const leaving *turn)
{
    path *p = d->ledger->options.erases ? note_path(d, turn) : NULL;
    int64_t node = turn->node;
    if (!run_row(d->c, GW_SQL_TURN_DELETE, turn->id) || !release_nodes(d->ledger, d->c, &node) ||
        !release_run(d->ledger, d->c, turn->run) ||
        (turn->session && !run_row(d->c, GW_SQL_SESSION_RELEASE, turn->session)))
        return false;
    if (p)
        p->node = node;
    d->turns++;
    return true;
}

/* And the deleted ones above it that it alone kept. One that has left already is left alone. */
static bool delete_turn(gw_deletion *d, const leaving *turn)
{
    leaving at = *turn;
    bool there;
    if (!used(d->c, GW_SQL_TURN_THERE, turn->id, &there))
        return false;
    while (there) {
        if (!delete_one(d, &at))
            return false;
        sqlite3_stmt *s = gw_db_statement(d->c, GW_SQL_FORGOTTEN);
        if (!s)
            return false;
        sqlite3_bind_int64(s, 1, at.parent);
        int code = sqlite3_step(s);
        there = code == SQLITE_ROW;
        if (there)
            at = column_leaving(s);
        sqlite3_reset(s);
        if (!there && code != SQLITE_DONE)
            return false;
    }
    return true;
}

bool gw_deletion_turn(gw_deletion *d, int64_t turn)
{
    sqlite3_stmt *s = gw_db_statement(d->c, GW_SQL_BUILT_ON);
    leaving *rows = malloc(BUILD_MAX * sizeof(*rows));
    uint32_t count = 0;
    bool ok = s && rows;
    if (ok) {
        sqlite3_bind_int64(s, 1, turn);
        sqlite3_bind_int(s, 2, BUILD_MAX);
        while (count < BUILD_MAX && sqlite3_step(s) == SQLITE_ROW)
            rows[count++] = column_leaving(s);
        ok = sqlite3_reset(s) == SQLITE_OK;
    }
    /* The deepest first: a turn that is still built on then is needed by a kept one. */
    for (uint32_t i = 0; ok && i < count; i++) {
        bool needed = rows[i].kept && rows[i].id != turn;
        if (!needed)
            ok = used(d->c, GW_SQL_TURN_USED, rows[i].id, &needed);
        if (ok && !needed)
            ok = delete_turn(d, &rows[i]);
    }
    free(rows);
    return ok;
}

bool gw_deletion_end(gw_deletion *d, bool ok)
{
    for (uint32_t i = 0; ok && i < d->path_count; i++)
        ok = write_order(d, &d->paths[i]);
    /* The log still holds what was deleted. */
    if (ok && d->turns) {
        atomic_store(&d->ledger->unclean, true);
        gw_slices_clear(d->ledger->slices);
    }
    base_arena_destroy(d->arena);
    free(d->paths);
    free(d);
    return ok;
}

/* ---- in transactions of the writer ---- */

/* One transaction around `body`; the error of the first statement that failed. */
static base_code deletion(gw_ledger *ledger, gw_db *c, base_code (*body)(gw_deletion *d, void *ctx),
                          void *ctx, const char *what, base_err *err)
{
    gw_deletion *d = gw_deletion_begin(ledger, c);
    if (!d)
        return base_fail(err, BASE_NOMEM, "no memory to delete turns");
    bool begun = gw_db_simple(c, GW_SQL_BEGIN);
    base_code code = begun ? body(d, ctx) : BASE_IO;
    if (!gw_deletion_end(d, !code) && !code)
        code = BASE_IO;
    if (!code && gw_db_simple(c, GW_SQL_COMMIT))
        return BASE_OK;
    if (code == BASE_NOT_FOUND)
        base_fail(err, BASE_NOT_FOUND, "there is no such turn");
    else
        code = gw_db_error(c, err, what);
    if (begun)
        gw_db_simple(c, GW_SQL_ROLLBACK);
    return code ? code : BASE_IO;
}

typedef struct sweep {
    int64_t now_ms;
    int64_t tenant, bound; /* of a trim: one tenant's, 0: all; bytes that may stay */
    leaving rows[SWEEP_TURNS];
    uint32_t count;
} sweep;

static bool list(sweep *job, sqlite3_stmt *s)
{
    job->count = 0;
    while (s && job->count < SWEEP_TURNS && sqlite3_step(s) == SQLITE_ROW)
        job->rows[job->count++] = column_leaving(s);
    return s && sqlite3_reset(s) == SQLITE_OK;
}

/* A turn whose children still spell their prompts with its tokens stays as long as they do. */
static bool sweep_turn(gw_deletion *d, const leaving *turn, int64_t now_ms)
{
    sqlite3_stmt *s = gw_db_statement(d->c, GW_SQL_SWEEP_CHILDREN);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, turn->id);
    int64_t for_good = 0, until = 0, children = 0;
    if (sqlite3_step(s) == SQLITE_ROW) {
        for_good = sqlite3_column_int64(s, 0);
        until = sqlite3_column_int64(s, 1);
        children = sqlite3_column_int64(s, 2);
    }
    sqlite3_reset(s);
    if (!children)
        return delete_turn(d, turn);
    s = gw_db_statement(d->c, GW_SQL_SWEEP_POSTPONE);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, turn->id);
    /* Kept children: asked again, since they may have left by then. */
    sqlite3_bind_int64(s, 2,
                       for_good ? now_ms + ASK_AGAIN_MS : (until > now_ms ? until : now_ms) + 1000);
    return gw_db_execute(s);
}

static base_code sweep_body(gw_deletion *d, void *ctx)
{
    sweep *job = ctx;
    sqlite3_stmt *s = gw_db_statement(d->c, GW_SQL_SWEEP_LIST);
    if (s) {
        sqlite3_bind_int64(s, 1, job->now_ms);
        sqlite3_bind_int(s, 2, SWEEP_TURNS);
    }
    bool ok = list(job, s);
    for (uint32_t i = 0; ok && i < job->count; i++)
        ok = sweep_turn(d, &job->rows[i], job->now_ms);
    return ok ? BASE_OK : BASE_IO;
}

static base_code run_sweep(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    return deletion(ledger, c, sweep_body, ctx, "cannot sweep", err);
}

/* Runs a statement with one number; its changes are added to *count. */
static bool change(gw_db *c, const char *sql, int64_t number, uint32_t *count)
{
    sqlite3_stmt *s = gw_db_prepare(c, sql);
    if (s)
        sqlite3_bind_int64(s, 1, number);
    bool ok = gw_db_run(s);
    *count += ok ? (uint32_t)sqlite3_changes(c->db) : 0;
    return ok;
}

/* What hangs on no turn: cut streams, and conversations where what is kept has an age. Items are
 * looked at in the order of their rows, which is that of their age. */
static base_code run_sweep_rest(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    sweep *job = ctx;
    int64_t kept_ms = (int64_t)ledger->options.kept_ttl_s * 1000;
    int64_t cut_ms = kept_ms && kept_ms < CUT_TTL_MS ? kept_ms : CUT_TTL_MS;
    uint32_t left = 0, conversations = 0;
    job->count = 0;
    bool ok = change(c, "DELETE FROM streams WHERE live=1 AND created_ms<=?1", job->now_ms - cut_ms,
                     &left);
    if (ok && kept_ms)
        ok = change(c,
                    "DELETE FROM conversation_items WHERE id IN (SELECT id FROM (SELECT id, "
                    "created_ms FROM conversation_items ORDER BY id LIMIT 512) WHERE "
                    "created_ms<=?1)",
                    job->now_ms - kept_ms, &job->count);
    if (ok && kept_ms && job->count < SWEEP_MEMBERS)
        ok = change(c,
                    "DELETE FROM conversations WHERE created_ms<=?1 AND NOT EXISTS (SELECT 1 FROM "
                    "conversation_items i WHERE i.conversation=conversations.id) AND NOT EXISTS "
                    "(SELECT 1 FROM turns t WHERE t.conversation=conversations.id)",
                    job->now_ms - kept_ms, &conversations);
    atomic_fetch_sub(&ledger->conversation_count, conversations);
    if (ok)
        ok = gw_usage_sweep(c, job->now_ms);
    if (left || conversations || job->count)
        atomic_store(&ledger->unclean, true);
    return ok ? BASE_OK : gw_db_error(c, err, "cannot sweep");
}

base_code gw_ledger_sweep(gw_ledger *ledger, int64_t now_ms, base_err *err)
{
    sweep job = {.now_ms = now_ms};
    base_code code;
    /* In steps, so that commits get between. */
    do
        code = gw_on_writer(ledger, run_sweep, &job, err);
    while (!code && job.count == SWEEP_TURNS);
    do
        code = code ? code : gw_on_writer(ledger, run_sweep_rest, &job, err);
    while (!code && job.count == SWEEP_MEMBERS);
    return code;
}

/* ---- bounds ---- */

/* Bytes of one tenant's content, or with tenant 0 of the pages in use. */
static base_code count_bytes(gw_db *c, int64_t tenant, int64_t *out, base_err *err)
{
    sqlite3_stmt *s = gw_db_statement(c, tenant ? GW_SQL_BYTES_TENANT : GW_SQL_BYTES_ALL);
    if (s && tenant)
        sqlite3_bind_int64(s, 1, tenant);
    return gw_db_scalar(s, out) ? BASE_OK : gw_db_error(c, err, "cannot count its bytes");
}

/* The oldest cached turns that nothing builds on. */
static sqlite3_stmt *trim_list(gw_db *c, int64_t tenant, int max)
{
    sqlite3_stmt *s = gw_db_statement(c, tenant ? GW_SQL_TRIM_TENANT : GW_SQL_TRIM_ALL);
    if (s)
        sqlite3_bind_int(s, 1, max);
    if (s && tenant)
        sqlite3_bind_int64(s, 2, tenant);
    return s;
}

static base_code trim_body(gw_deletion *d, void *ctx)
{
    sweep *job = ctx;
    int64_t bytes = INT64_MAX;
    bool ok = list(job, trim_list(d->c, job->tenant, SWEEP_TURNS));
    uint32_t count = job->count;
    for (job->count = 0; ok && job->count < count && bytes > job->bound; job->count++)
        ok =
            delete_turn(d, &job->rows[job->count]) && !count_bytes(d->c, job->tenant, &bytes, NULL);
    return ok ? BASE_OK : BASE_IO;
}

static base_code run_trim(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    return deletion(ledger, c, trim_body, ctx, "cannot trim", err);
}

static base_code trim_to(gw_ledger *ledger, int64_t tenant, uint64_t bytes_max, base_err *err)
{
    int64_t bytes, bound = (int64_t)bytes_max;
    uint64_t turns = 0;
    sweep job = {.tenant = tenant, .bound = (int64_t)(bytes_max / 100 * TRIM_PERCENT)};
    base_code code;
    do {
        gw_db *c = gw_reader_take(ledger, err);
        if (!c)
            return BASE_IO;
        code = count_bytes(c, tenant, &bytes, err);
        gw_reader_give(ledger, c);
        job.count = 0;
        if (!code && bytes > bound) {
            bound = job.bound;
            code = gw_on_writer(ledger, run_trim, &job, err);
            turns += job.count;
            atomic_fetch_add(&ledger->trim_count, job.count);
        }
    } while (!code && job.count);
    if (turns)
        base_log(BASE_LOG_INFO, "ledger_trimmed tenant=%lld turns=%llu bytes=%lld",
                 (long long)tenant, (unsigned long long)turns, (long long)bytes);
    return code;
}

base_code gw_ledger_trim(gw_ledger *ledger, base_err *err)
{
    const gw_ledger_options *o = &ledger->options;
    base_code code = o->bytes_max ? trim_to(ledger, 0, o->bytes_max, err) : BASE_OK;
    for (int64_t tenant = 0; !code && o->tenant_bytes_max;) {
        gw_db *c = gw_reader_take(ledger, err);
        if (!c)
            return BASE_IO;
        sqlite3_stmt *s = gw_db_statement(c, GW_SQL_BYTES_OVER);
        if (s) {
            sqlite3_bind_int64(s, 1, (int64_t)o->tenant_bytes_max);
            sqlite3_bind_int64(s, 2, tenant);
        }
        if (!gw_db_scalar(s, &tenant))
            code = gw_db_error(c, err, "cannot count its bytes");
        gw_reader_give(ledger, c);
        if (!tenant)
            break;
        if (!code)
            code = trim_to(ledger, tenant, o->tenant_bytes_max, err);
    }
    return code;
}

base_code gw_ledger_room(gw_ledger *ledger, int64_t tenant, base_err *err)
{
    const struct {
        const char *key;
        uint64_t max;
        int64_t tenant;
    } bounds[] = {{"ledger.tenant_bytes_max", ledger->options.tenant_bytes_max, tenant},
                  {"ledger.bytes_max", ledger->options.bytes_max, 0}};
    base_code code = BASE_OK;
    for (size_t i = 0; !code && i < sizeof(bounds) / sizeof(bounds[0]); i++) {
        if (!bounds[i].max)
            continue;
        gw_db *c = gw_reader_take(ledger, err);
        if (!c)
            return BASE_IO;
        int64_t bytes, cached;
        code = count_bytes(c, bounds[i].tenant, &bytes, err);
        /* What is cached makes room, if a little later. */
        if (!code && (uint64_t)bytes >= bounds[i].max) {
            if (!gw_db_scalar(trim_list(c, bounds[i].tenant, 1), &cached))
                code = gw_db_error(c, err, "cannot count its bytes");
            else if (!cached)
                code = base_fail(err, BASE_FULL,
                                 "kept turns fill the %llu bytes of %s: delete some, or send "
                                 "store=false",
                                 (unsigned long long)bounds[i].max, bounds[i].key);
        }
        gw_reader_give(ledger, c);
    }
    return code;
}

/* ---- forgetting ---- */

typedef struct forget {
    int64_t tenant;
    const char *dialect, *turn;
} forget;

static base_code forget_body(gw_deletion *d, void *ctx)
{
    const forget *f = ctx;
    sqlite3_stmt *s = gw_db_statement(d->c, GW_SQL_TURN_FORGET);
    if (!s)
        return BASE_IO;
    sqlite3_bind_int64(s, 1, gw_public_key(f->turn));
    gw_bind_text(s, 2, f->turn);
    sqlite3_bind_int64(s, 3, f->tenant);
    gw_bind_text(s, 4, f->dialect);
    int64_t turn;
    if (!gw_db_scalar(s, &turn))
        return BASE_IO;
    if (!turn)
        return BASE_NOT_FOUND;
    return gw_deletion_turn(d, turn) ? BASE_OK : BASE_IO;
}

static base_code run_forget(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    return deletion(ledger, c, forget_body, ctx, "cannot delete a turn", err);
}

base_code gw_ledger_forget(gw_ledger *ledger, int64_t tenant, const char *dialect, const char *turn,
                           base_err *err)
{
    forget f = {tenant, dialect, turn};
    base_code code = gw_on_writer(ledger, run_forget, &f, err);
    if (!code)
        gw_ledger_purge(ledger);
    return code;
}

/* ---- what a deletion leaves behind: pages and the log ---- */

typedef struct order {
    int64_t id;
    uint64_t space;
    void *tokens;
    uint32_t count, kept;
} order;

/* The next order; id 0: none. */
static bool next_order(gw_ledger *ledger, order *out, base_arena *arena)
{
    *out = (order){0};
    gw_db *c = gw_reader_take(ledger, NULL);
    sqlite3_stmt *s = c ? gw_db_statement(c, GW_SQL_ERASURE_NEXT) : NULL;
    int code = s ? sqlite3_step(s) : SQLITE_ERROR;
    if (code == SQLITE_ROW) {
        out->id = sqlite3_column_int64(s, 0);
        out->space = (uint64_t)sqlite3_column_int64(s, 1);
        out->kept = (uint32_t)sqlite3_column_int64(s, 2);
        if (!gw_column_numbers(s, 3, &out->tokens, &out->count, arena)) {
            base_log(BASE_LOG_ERROR, "erasure_damaged row=%lld", (long long)out->id);
            out->count = 0;
        }
    }
    if (s)
        sqlite3_reset(s);
    if (c)
        gw_reader_give(ledger, c);
    return code == SQLITE_ROW || code == SQLITE_DONE;
}

static base_code run_order_done(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    atomic_store(&ledger->unclean, true); /* the tokens stand in the log */
    return run_row(c, GW_SQL_ERASURE_DONE, *(int64_t *)ctx)
               ? BASE_OK
               : gw_db_error(c, err, "cannot end an erasure");
}

static void erase_pages(gw_ledger *ledger)
{
    for (bool more = true; more && ledger->erase;) {
        base_arena *arena = base_arena_create(4096, PATHS_BYTES);
        order o;
        base_err err = BASE_ERR_INIT;
        more = arena && next_order(ledger, &o, arena) && o.id;
        base_code code = more && o.count ? ledger->erase(ledger->erase_ctx, o.space, o.tokens,
                                                         o.count, o.kept, &err)
                                         : BASE_OK;
        if (code) {
            more = false; /* tried again by the keeper */
            if (code != BASE_CLOSED)
                base_log(BASE_LOG_WARN, "pages_not_erased reason=\"%s\"", err.text);
        } else if (more) {
            more = !gw_on_writer(ledger, run_order_done, &o.id, NULL);
        }
        base_arena_destroy(arena);
    }
}

void gw_ledger_purge(gw_ledger *ledger)
{
    /* Set before the deletion was committed, it may have been taken back too early. */
    atomic_store(&ledger->unclean, true);
    gw_purge(ledger);
}

void gw_purge(gw_ledger *ledger)
{
    pthread_mutex_lock(&ledger->purge_mutex);
    erase_pages(ledger);
    if (atomic_exchange(&ledger->unclean, false)) {
        gw_db *c = gw_reader_take(ledger, NULL);
        /* Most of it is copied while commits go on; the cut then holds them up for little. */
        if (c)
            gw_db_checkpoint(c, SQLITE_CHECKPOINT_PASSIVE);
        if (!c || !gw_db_checkpoint(c, SQLITE_CHECKPOINT_TRUNCATE))
            atomic_store(&ledger->unclean, true);
        if (c)
            gw_reader_give(ledger, c);
    }
    pthread_mutex_unlock(&ledger->purge_mutex);
}

void gw_ledger_set_erase(gw_ledger *ledger, gw_erase_fn *erase, void *ctx)
{
    pthread_mutex_lock(&ledger->purge_mutex);
    ledger->erase = erase;
    ledger->erase_ctx = ctx;
    pthread_mutex_unlock(&ledger->purge_mutex);
}
