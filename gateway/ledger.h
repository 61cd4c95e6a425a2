/* gw_ledger: what was said and the exact tokens that said it; the one file of the gateway that
 * speaks SQL.
 *
 * A conversation is a chain of nodes, node = SHA-256(parent node, canonical item), rooted in
 * tenant, template, tools, mode and effort. An assistant item that this gateway generated is a run:
 * its tokens, kept under the slot SHA-256(parent node, its visible part), so that a request which
 * brings the item back, changed only in ways that ledger_item.c's table calls the same, gets the
 * tokens instead of a rendering. Hidden reasoning comes back only by the rules at gw_ledger_match.
 *
 * Durability: SQLite in WAL mode with synchronous=NORMAL. A commit is in the kernel's page cache
 * when its callback runs, so kill -9 at any instant loses nothing that was told; a power cut may
 * lose the last transactions since the last checkpoint (about 4 MiB of log), never the database's
 * consistency. FULL would put one fsync, 1 to 20 ms, into the end of every turn.
 *
 * Threads: one writer owns the writing connection and takes all that waits in one transaction,
 * without a timer; readers use a small pool of connections, each statement reset before it returns;
 * one thread checkpoints the log. */
#pragma once
#include "engine/engine.h"
#include "gateway/app.h"

#define GW_ID_MAX 40 /* "turn_", "sess_", "chatcmpl-" and 24 hex digits; "call_" and 32 */
typedef struct gw_id {
    char text[GW_ID_MAX];
} gw_id;
/* prefix + hex of getrandom: 128 bits for "call_", 96 for the rest. */
gw_id gw_id_mint(const char *prefix);

typedef struct gw_ledger_options {
    const char *path;      /* data directory, made (0700) if it is missing; holds whimbrel.db */
    uint32_t cached_ttl_s; /* turns without store:true leave the disk after this; 0: they are never
                              written */
    uint64_t memory_bytes; /* of recent runs; 0: 64 MiB */
    uint32_t kept_ttl_s;   /* turns with store:true leave after this; 0: never */
    uint64_t bytes_max; /* of the database's pages in use; past it the oldest cached turns go, and
                           where only kept ones are left gw_ledger_room refuses; 0: no bound */
    uint64_t tenant_bytes_max; /* the same of one tenant's content */
    bool erases;               /* gw_ledger_set_erase will follow: pages leave with their turns */
    uint32_t queue_max;        /* waiting commits; 0: 4096. Full: the turn is not stored */
    uint32_t busy_ms;          /* wait for another process's lock; 0: 3000 */
} gw_ledger_options;

/* Fails by name: BASE_IO (cannot open, read-only), BASE_CONFLICT (locked by another process),
 * BASE_UNSUPPORTED (written by a newer version), BASE_FORMAT (not a database, or corrupt).
 * err->param is "data.path". */
base_code gw_ledger_open(gw_ledger **out, const gw_ledger_options *options, base_err *err);
/* Commits what waits, checkpoints, closes. NULL is fine. */
void gw_ledger_close(gw_ledger *ledger);

/* Erases the cached pages of tokens[kept, count), with what follows them, in a namespace; may
 * block. Not BASE_OK: it is tried again later. */
typedef base_code gw_erase_fn(void *ctx, uint64_t space, const int32_t *tokens, uint32_t count,
                              uint32_t kept, base_err *err);
/* What options.erases promised; NULL before what it calls goes away. Orders of earlier times are
 * carried out soon. */
void gw_ledger_set_erase(gw_ledger *ledger, gw_erase_fn *erase, void *ctx);

/* ---- what is known of a request ---- */

typedef struct gw_digest {
    uint8_t bytes[32];
} gw_digest;

/* What stands before the first item. Borrowed. */
typedef struct gw_root {
    int64_t tenant;
    const char *template_id;
    const eng_text *tools;
    uint32_t tool_count;
    eng_thinking thinking; /* with the model's default filled in */
    eng_text effort;
} gw_root;

typedef struct gw_match {
    gw_digest
        *chain; /* [item_count + 1]: the node before item i; the last one is the whole request's */
    gw_digest *own;    /* [item_count]: the canonical item alone */
    uint32_t spliced;  /* assistant items that got their tokens */
    uint32_t restored; /* of those, with reasoning that the client did not send */
    uint32_t rendered; /* assistant items without */
    int32_t last; /* the last item that was found under its own chain, -1: none. All before it is as
                     it was then */
    const char *reason; /* of the first assistant item that got no tokens or whose chain had
                           changed: "ambiguous", "unknown history", "edited history", "prefix
                           changed"; NULL: all were found */
    gw_id parent;       /* the turn that generated item `last`, "" if none */
    gw_id session;      /* and its session */
    uint64_t parent_sequence[2]; /* hash of that turn's prompt and run tokens, */
    uint32_t parent_tokens;      /* and their count */
} gw_match;

/* For each assistant item that this gateway generated for this tenant and template, sets
 * items[i].tokens (in the arena).
 *
 * The rules, in order, for an assistant item under node P with visible part V and reasoning R as
 * sent:
 *  1. R was sent: a run in slot (P, V) whose reasoning equals R. None: what the client edited wins;
 * R is part of the node.
 *  2. R was not sent, the item carries a call id that we minted: the run that minted it, if its
 * visible part is V. This holds under a changed prefix too.
 *  3. R was not sent, and all runs in slot (P, V) have one and the same reasoning (or none): the
 * oldest of them.
 *  4. Several runs differ in reasoning and nothing links: none, reason "ambiguous".
 * A run made under reasoning that a client supplied hangs below a node that holds that reasoning,
 * so a request which did not send it never reaches that slot. Ids are checked against the tenant:
 * others' are unknown.
 *
 * A database error costs the splice, never the request: it is logged, and the item counts as
 * unknown. BASE_NOMEM if the arena is full. Thread: any but the writer; blocks on reads. */
base_code gw_ledger_match(gw_ledger *ledger, gw_match *out, const gw_root *root, eng_item *items,
                          uint32_t item_count, base_arena *arena, base_err *err);

/* True if the prompt begins with the parent turn's prompt and run, token for token. Pure. */
bool gw_match_continues(const gw_match *match, const int32_t *prompt, uint32_t prompt_count);

/* ---- committing a turn ---- */

typedef enum gw_retention {
    GW_RETAIN_USAGE,  /* store:false: counts on disk; items and tokens in memory only */
    GW_RETAIN_CACHED, /* on disk until cached_ttl_s */
    GW_RETAIN_KEPT,   /* store:true */
} gw_retention;

typedef enum gw_turn_status { GW_TURN_COMPLETED, GW_TURN_CANCELLED, GW_TURN_FAILED } gw_turn_status;

/* One turn, by the poster's memory, which stays untouched until `done`. Strings may be NULL where
 * they have no value. */
typedef struct gw_commit {
    struct gw_commit *next;
    void (*done)(struct gw_commit *commit); /* on the writer thread, exactly once; stored, found and
                                               err are set */
    bool stored;
    base_err err;

    gw_retention retention;
    const char *turn, *session; /* public ids, minted by the poster */
    const char *label;          /* session name from the client: a label only */
    const char *request, *response, *dialect, *model, *fingerprint, *numerics;
    const char *metadata; /* JSON */
    /* A native turn: once it completed, its session's head is here. Other dialects' turns never
     * move that. */
    bool moves_head;
    const char *echo; /* JSON: what the dialect's object repeats of the request */
    const char *told; /* JSON: what its stream told beside the tokens; see ledger_stream.h */
    /* Of a completed turn on a conversation: the items that it gets. See ledger_conversation.h. */
    const char *conversation;
    const struct gw_conversation_item *added;
    uint32_t added_count;
    const gw_root *root;
    const gw_match *match;
    const eng_item *items;
    uint32_t item_count;
    eng_item answer; /* text, reasoning and calls as the client got them */
    bool splice;     /* the run's tokens are exactly the answer */
    const int32_t *prompt;
    uint32_t prompt_count;
    /* What followed the beginning of the assistant's turn: the last `lead` tokens of the prompt
     * (the mark of the thinking mode) and the generated ones. */
    const int32_t *run;
    uint32_t run_count, lead;
    const uint32_t *steps; /* output tokens of each step: streams resume from tokens and these */
    uint32_t step_count;
    gw_turn_status status;
    eng_finish finish;
    eng_usage usage;
    uint64_t seed, space;         /* space: the namespace of its pages */
    int64_t created_ms, ended_ms; /* Unix time */
} gw_commit;

/* False if the queue is full or the ledger closes: `done` will not be called. Thread: any. */
bool gw_ledger_commit(gw_ledger *ledger, gw_commit *commit);

/* ---- reading ---- */

typedef struct gw_turn_row {
    gw_id turn, session, parent; /* "" if none */
    gw_turn_status status;
    eng_finish finish;
    gw_retention retention;
    int32_t *prompt, *run; /* in the arena; the prompt whole, its parents' tokens put before its
                              own; generated tokens */
    uint32_t prompt_count, run_count;
    uint32_t *steps;
    uint32_t step_count;
    eng_usage usage;
    uint64_t seed;
    int64_t created_ms, ended_ms;
    char *answer; /* JSON of the assistant item, NULL if not kept */
    char *echo;   /* NULL if not kept, or forgotten */
} gw_turn_row;
/* BASE_NOT_FOUND for unknown ids and other tenants' alike. */
base_code gw_ledger_turn(gw_ledger *ledger, gw_turn_row *out, int64_t tenant, const char *turn,
                         base_arena *arena, base_err *err);

/* The item as the ledger keeps it: JSON in the chat dialect's shape. Thread: any. */
void gw_item_json(base_buf *out, const eng_item *item);
/* JSON of a turn's items, oldest first, its answer last if it has one: in the arena. BASE_NOT_FOUND
 * as above, and for turns that keep no items. */
base_code gw_ledger_items(gw_ledger *ledger, char ***out, uint32_t *count, int64_t tenant,
                          const char *turn, base_arena *arena, base_err *err);
/* The turn leaves the disk with all that only it held, the cached turns that build on it and its
 * pages; no byte of it is left in any file then. What a kept turn builds on stays until that one
 * leaves, but is no longer found. BASE_NOT_FOUND if there is no such turn with an echo. Blocks. */
base_code gw_ledger_forget(gw_ledger *ledger, int64_t tenant, const char *turn, base_err *err);

typedef struct gw_ledger_stats {
    uint64_t commits, transactions, failures;
    uint64_t trimmed; /* cached turns that left for a bound of bytes */
    uint64_t spilled; /* runs that left memory */
    uint64_t memory_bytes, memory_runs, database_bytes, wal_bytes;
    uint32_t queued;
} gw_ledger_stats;
gw_ledger_stats gw_ledger_get_stats(gw_ledger *ledger); /* thread: any */
/* SQLite's own checks, and that every row says what was written. For tests and tools; slow. */
bool gw_ledger_check(gw_ledger *ledger, base_err *err);
/* Removes turns past their time, and what only they held. The writer does so by itself when it has
 * nothing else to do. */
base_code gw_ledger_sweep(gw_ledger *ledger, int64_t now_ms, base_err *err);
/* Removes the oldest cached turns past the bounds of bytes. By itself once a second. */
base_code gw_ledger_trim(gw_ledger *ledger, base_err *err);
/* Erases the pages of what was deleted and cuts the log that still holds it. By itself, too; where
 * a reader or the disk is in the way, again later. Thread: any that may block. */
void gw_ledger_purge(gw_ledger *ledger);
/* BASE_FULL, naming the key, if kept turns alone fill a bound of bytes. Thread: any; reads. */
base_code gw_ledger_room(gw_ledger *ledger, int64_t tenant, base_err *err);

/* ---- tenants and keys (tenant.c) ---- */

typedef struct gw_tenant_row {
    int64_t id;
    uint64_t salt;
    const char *name; /* borrowed for the call */
} gw_tenant_row;
typedef struct gw_key_row {
    int64_t id, tenant, created_ms;
    uint32_t scopes;
    uint8_t hash[32];
    const char *label;
} gw_key_row;
base_code gw_ledger_tenants(gw_ledger *ledger, void (*row)(void *ctx, const gw_tenant_row *row),
                            void *ctx, base_err *err);
base_code gw_ledger_keys(gw_ledger *ledger, void (*row)(void *ctx, const gw_key_row *row),
                         void *ctx, base_err *err);
/* These run on the writer and block until they are committed. */
base_code gw_ledger_tenant_put(gw_ledger *ledger, int64_t *id, uint64_t *salt, const char *name,
                               base_err *err);
base_code gw_ledger_key_put(gw_ledger *ledger, int64_t *id, int64_t tenant, const uint8_t hash[32],
                            uint32_t scopes, const char *label, base_err *err);
base_code gw_ledger_key_revoke(gw_ledger *ledger, int64_t id, base_err *err);
