/* For ledger*.c and their tests: canonical items, the schema, and the map of recent runs. */
#pragma once
#include <openssl/evp.h>
#include <sqlite3.h>

#include "gateway/ledger.h"

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

/* Role, text and calls: what a client sees of an item. */
void gw_item_visible(gw_hash *hash, gw_digest *out, const eng_item *item);
/* All of it: `visible` and the reasoning that was sent. */
void gw_item_own(gw_hash *hash, gw_digest *out, const gw_digest *visible, const eng_item *item);
/* False if there is none: absent, empty and white space are the same. */
bool gw_item_reasoning(gw_hash *hash, gw_digest *out, eng_text reasoning);
void gw_item_root(gw_hash *hash, gw_digest *out, const gw_root *root);
/* Node after an item that was rendered, and after a run. */
void gw_node_item(gw_hash *hash, gw_digest *out, const gw_digest *parent, const gw_digest *own);
void gw_node_run(gw_hash *hash, gw_digest *out, const gw_digest *parent, const gw_digest *tokens);
/* Where runs with this visible part under this node are kept. */
void gw_slot(gw_hash *hash, gw_digest *out, const gw_digest *parent, const gw_digest *visible);
void gw_tokens_digest(gw_hash *hash, gw_digest *out, const int32_t *tokens, uint32_t count);
/* The item as JSON, in the chat dialect's shape. */
void gw_item_json(base_buf *out, const eng_item *item);
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
    struct gw_run *next; /* in its slot, oldest first */
    gw_digest slot, visible, reasoning, tokens_digest;
    bool has_reasoning;
    int64_t tenant;
    char template_id[33];
    gw_id turn, session;      /* that generated it first */
    uint64_t sequence[2];     /* hash of that turn's prompt and run, */
    uint32_t sequence_tokens; /* and their count */
    uint32_t token_count, call_count;
    gw_id *calls; /* ids that name it */
    int32_t *tokens;
} gw_run;

typedef struct gw_memory gw_memory;
#define GW_SLOT_RUNS_MAX 32 /* more alternatives under one slot are looked up on disk */

gw_memory *gw_memory_create(uint64_t bytes_max);
void gw_memory_destroy(gw_memory *memory);
/* All functions lock by themselves. A copy of a run, in the arena, or NULL without memory. */
gw_run *gw_run_copy(const gw_run *run, base_arena *arena);

typedef enum gw_found {
    GW_FOUND_UNKNOWN, /* not in memory, or not all of them: ask the database */
    GW_FOUND_NONE,    /* there is none */
    GW_FOUND_RUN,
    GW_FOUND_AMBIGUOUS, /* several with different reasoning */
} gw_found;
/* By slot; `reasoning` NULL: none was sent. The run is copied to the arena; without memory there it
 * is UNKNOWN. `generation` is for gw_memory_fill. */
gw_found gw_memory_slot(gw_memory *memory, gw_run **out, uint64_t *generation,
                        const gw_digest *slot, const gw_digest *reasoning, base_arena *arena);
/* By a call id. NONE only says that memory does not know it. */
gw_found gw_memory_call(gw_memory *memory, gw_run **out, const char *call, base_arena *arena);
/* All runs of a slot, read from the database (count 0: none there), unless something was added
 * since `generation` was taken: the reader may then have missed it. */
void gw_memory_fill(gw_memory *memory, const gw_digest *slot, gw_run *const *runs, uint32_t count,
                    uint64_t generation);
/* A new run. `alone`: the database has no other run in this slot. */
void gw_memory_add(gw_memory *memory, const gw_run *run, bool alone);
void gw_memory_forget(gw_memory *memory, const gw_digest *slot);
void gw_memory_stats(gw_memory *memory, gw_ledger_stats *out);

/* ---- ledger_schema.c ---- */

#define GW_SCHEMA_APPLICATION 0x5748494d /* "WHIM" */
#define GW_SCHEMA_VERSION 2
/* Creates or migrates. BASE_UNSUPPORTED for a newer one, BASE_FORMAT for a database of something
 * else. */
base_code gw_schema_migrate(sqlite3 *db, base_err *err);
