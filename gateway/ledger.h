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

/* Elements of bodies that earlier turns brought; the ledger's. */
struct gw_slices *gw_ledger_slices(gw_ledger *ledger);

/* ---- what is known of a request ---- */

typedef struct gw_digest {
    uint8_t bytes[32];
} gw_digest;

/* Whether hidden reasoning is given back to a request that did not send it. */
typedef enum gw_restore {
    GW_RESTORE_AUTO,   /* by a minted id, or if it is the only one that fits */
    GW_RESTORE_LINKED, /* by a minted id only */
    GW_RESTORE_OFF,    /* never */
} gw_restore;
/* False if it is none of auto, linked, off. */
bool gw_restore_parse(gw_restore *out, const char *text);
const char *gw_restore_name(gw_restore restore);

/* What stands before the first item, and how to look. Borrowed. */
typedef struct gw_root {
    int64_t tenant;
    const char *template_id;
    const eng_text *tools;
    uint32_t tool_count;
    eng_thinking thinking; /* with the model's default filled in */
    eng_text effort;
    gw_restore restore;
    bool volatile_lines;      /* look for lines of the system text that change every turn */
    const eng_engine *engine; /* NULL: texts that begin a run are not looked for */
    const char *fingerprint;  /* of the weights, NULL if there are none */
    const char *session;      /* of the client's label: where to look for what changed, if nothing
                                 of the request is known. NULL: none */
} gw_root;

/* Why a prompt was not cached as far as its conversation is known. */
typedef enum gw_miss {
    GW_MISS_NONE,
    GW_MISS_NEW,       /* nothing of the conversation is known */
    GW_MISS_VOLATILE,  /* lines of the system text that change every turn */
    GW_MISS_TOOLS,     /* other tools */
    GW_MISS_MODE,      /* other effort or thinking mode */
    GW_MISS_RESTORED,  /* the client dropped reasoning; it was given back */
    GW_MISS_AMBIGUOUS, /* several runs fit and nothing links: none was taken */
    GW_MISS_EDITED,    /* an earlier item, or the system text, is not what it was */
    GW_MISS_EVICTED,   /* the pages were here and went */
    GW_MISS_TENANT,    /* another tenant, or another cache_salt */
    GW_MISS_MODEL,     /* other weights, tokenizer or template */
    GW_MISS_UNWRITTEN, /* the pages were in memory of an earlier process, not on disk yet */
    GW_MISS_COUNT,
} gw_miss;
const char *gw_miss_name(gw_miss miss); /* "new session"; NULL for none */

/* What a conversation stands behind, to tell what of it changed. 0: not known. */
typedef struct gw_front {
    uint64_t tools, mode; /* mode: thinking and effort */
    uint64_t system;      /* the system text that comes first */
    uint64_t stable;      /* the same without what changes by itself: dates, times, counters, ids */
} gw_front;

typedef struct gw_match {
    gw_digest
        *chain; /* [item_count + 1]: the node before item i; the last one is the whole request's */
    gw_digest *own; /* [item_count]: the canonical item alone */
    gw_digest body; /* the node after the last item in the chain of what was said alone: without
                       tools, mode, effort and the system text in front */
    gw_front front;
    uint32_t spliced;  /* assistant items that got their tokens */
    uint32_t restored; /* of those, with reasoning that the client did not send */
    uint32_t rendered; /* assistant items without */
    int32_t last; /* the last item that was found under its own chain, -1: none. All before it is
                     as it was then */
    gw_miss miss; /* as far as the items tell; the engine's number may say more */
    /* The turn that generated the last item found, "" if none was; if nothing at all is known, the
     * newest turn of the client's label: to tell what changed, not to build on. */
    gw_id parent;
    gw_id session;               /* its session */
    uint64_t parent_sequence[2]; /* hash of that turn's prompt and run tokens, */
    uint32_t parent_tokens;      /* and their count */
    uint64_t parent_head[2];     /* the same up to its run, */
    uint32_t parent_head_tokens;
    uint32_t parent_seen;  /* and how many tokens of its run were taken, if not all; 0: all */
    bool parent_guessed;   /* by the label alone */
    uint64_t parent_space; /* 0: not known */
    bool parent_earlier;   /* it ended before this process began */
    bool parent_model;     /* it had other weights than those that serve now */
} gw_match;

/* For each assistant item that this gateway generated for this tenant and template, sets
 * items[i].tokens (in the arena).
 *
 * The rules, in order, for an assistant item under node P with visible part V and reasoning R as
 * sent:
 *  1. R was sent: only a run whose reasoning equals R. None: what the client edited wins; R is part
 *     of the node.
 *  2. The item carries a call id that we minted: the run that minted it, if its visible part is V.
 *  3. All runs in slot (P, V) that fit have one and the same reasoning (or none): the oldest.
 *  4. A later item carries a call id that we minted, so the client holds that turn: the run of V
 *     among the turns that it continued.
 *  5. All runs of V after the same body (what was said, without tools, mode, effort and the system
 *     text in front) have one and the same reasoning: the oldest.
 *  6. V is text alone and begins what a run after the same body said (the client was interrupted):
 *     the tokens wholly inside it, of the run that gives most; items[i].rest is what they lack.
 *     Hidden reasoning comes with them if all such runs have the same and V has at least
 *     GW_PREFIX_BYTES_MIN bytes, as much to guess as a short answer is.
 *  7. Several runs differ in reasoning and nothing links: none, GW_MISS_AMBIGUOUS.
 * Rules 2 and 4 to 6 hold under a changed prefix. With `restore` linked, hidden reasoning comes
 * back by rules 2 and 4 only; with off, by none. A run made under reasoning that a client supplied
 * hangs below a node that holds that reasoning, in both chains, so a request which did not send it
 * never reaches its slot. Ids are checked against the tenant: others' are unknown.
 *
 * A database error costs the splice, never the request: it is logged, and the item counts as
 * unknown. BASE_NOMEM if the arena is full. Thread: any but the writer; blocks on reads. */
base_code gw_ledger_match(gw_ledger *ledger, gw_match *out, const gw_root *root, eng_item *items,
                          uint32_t item_count, base_arena *arena, base_err *err);

#define GW_PREFIX_BYTES_MIN 16

/* How many tokens of the prompt are the parent turn's, if the prompt begins with that turn's prompt
 * and run (or the part of it that was taken), token for token; 0 if it does not. Pure. */
uint32_t gw_match_continues(const gw_match *match, const int32_t *prompt, uint32_t prompt_count);
/* Where the prompt departs from the parent turn's prompt and run: the count of tokens that are the
 * same. False if the parent is not on disk. Thread: any but the writer; blocks on reads. */
bool gw_ledger_departs(gw_ledger *ledger, uint32_t *same, int64_t tenant, const gw_match *match,
                       const int32_t *prompt, uint32_t prompt_count, base_arena *arena);

/* ---- committing a turn ---- */

typedef enum gw_retention {
    GW_RETAIN_USAGE,  /* store:false: counts on disk; items and tokens in memory only */
    GW_RETAIN_CACHED, /* on disk until cached_ttl_s */
    GW_RETAIN_KEPT,   /* store:true */
} gw_retention;

typedef enum gw_turn_status { GW_TURN_COMPLETED, GW_TURN_CANCELLED, GW_TURN_FAILED } gw_turn_status;

/* What a turn's cache did. */
typedef struct gw_cache_note {
    gw_miss miss;
    uint32_t lost;     /* tokens that the ledger knew, and that had to be computed */
    int32_t diff_item; /* the item and the prompt's token where it departs from its parent's; -1: */
    uint32_t diff_token; /* it does not, or that is not known */
} gw_cache_note;

/* One turn, by the poster's memory, which stays untouched until `done`. Strings may be NULL where
 * they have no value. */
/* A turn that is not a request of its own: */
typedef enum gw_extra {
    GW_EXTRA_NONE,
    GW_EXTRA_CHOICE,   /* another answer to one, with a prompt of its own */
    GW_EXTRA_SHARED,   /* the same with the prompt of the turn before: it is counted there */
    GW_EXTRA_IMPORTED, /* it ran elsewhere: not counted */
} gw_extra;

typedef struct gw_commit {
    struct gw_commit *next;
    void (*done)(struct gw_commit *commit); /* on the writer thread, exactly once; stored, found and
                                               err are set */
    bool stored;
    base_err err;

    gw_retention retention;
    gw_extra extra;
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
    gw_cache_note cache;
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
    gw_cache_note cache;
    uint64_t seed;
    int64_t created_ms, ended_ms;
    const char *dialect; /* in the arena */
    char *answer;        /* JSON of the assistant item, NULL if not kept */
    char *echo;          /* NULL if not kept, or forgotten */
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
 * leaves, but is no longer found. BASE_NOT_FOUND if there is no such turn of `dialect` with an
 * echo. Blocks. */
base_code gw_ledger_forget(gw_ledger *ledger, int64_t tenant, const char *dialect, const char *turn,
                           base_err *err);

typedef struct gw_ledger_stats {
    uint64_t commits, transactions, failures;
    uint64_t trimmed; /* cached turns that left for a bound of bytes */
    uint64_t spilled; /* runs that left memory */
    uint64_t memory_bytes, memory_runs, database_bytes, wal_bytes;
    uint64_t slices_known, slices_parsed, slice_bytes; /* elements of bodies; see slice.h */
    uint32_t queued;
    uint64_t native_sessions, conversations;
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
    uint64_t salt;            /* its own, or its group's */
    const char *name, *group; /* borrowed for the call; NULL: in none */
    const char *limits;       /* JSON, borrowed; NULL: none */
    int64_t created_ms;
} gw_tenant_row;
typedef struct gw_key_row {
    int64_t id, tenant, created_ms;
    uint32_t scopes;
    int32_t restore; /* gw_restore, -1: as configured */
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
/* Puts a tenant into a sharing group, which is made if it is new. BASE_CONFLICT if it is in another
 * one. */
base_code gw_ledger_tenant_share(gw_ledger *ledger, int64_t tenant, const char *group,
                                 uint64_t *salt, base_err *err);
/* BASE_NOT_FOUND if there is no such tenant. */
base_code gw_ledger_tenant_limit(gw_ledger *ledger, int64_t tenant, const char *limits,
                                 base_err *err);
/* Bytes that the ledger keeps of a tenant. Reads. */
base_code gw_ledger_tenant_bytes(gw_ledger *ledger, uint64_t *out, int64_t tenant, base_err *err);
base_code gw_ledger_key_put(gw_ledger *ledger, int64_t *id, int64_t tenant, const uint8_t hash[32],
                            uint32_t scopes, int32_t restore, const char *label, base_err *err);
base_code gw_ledger_key_revoke(gw_ledger *ledger, int64_t id, base_err *err);
