/* gw_appends: results of tools that arrive in pieces between two turns of a native session, and
 * running the model over them while the tool still works.
 *
 * What has arrived is in memory only, for the calls of one turn a session: a newer head's first
 * piece, the session's end or a restart drops it. The text is rendered as the next turn's prompt
 * will be, as far as more text cannot change its tokens, and prefilled: a request that generates
 * nothing and yields to those that do. It holds the session's lock, so that a turn which comes
 * meanwhile waits for it rather than computing the same again. Thread: any, unless said otherwise;
 * one mutex, held for a copy of a piece. */
#pragma once
#include "gateway/app.h"
#include "gateway/ledger.h"
#include "gateway/tenant.h"

base_code gw_appends_create(gw_appends **out, gw_app *app, base_err *err);
void gw_appends_destroy(gw_appends *appends); /* no prefill runs; NULL is fine */

/* Whose results they are. Borrowed. */
typedef struct gw_append_key {
    int64_t tenant;
    const char *session, *head; /* ids; `head` is the turn that made the calls */
} gw_append_key;

typedef struct gw_append_state {
    uint64_t received_bytes; /* of this call */
    uint64_t
        prefilled_tokens; /* of the session's next prompt, by what has arrived since its head */
    bool done;
} gw_append_state;

/* A piece of the result of `call`. BASE_TOO_LONG past sessions.append_bytes_max; BASE_CONFLICT
 * once it was said to be done; BASE_NOMEM. */
base_code gw_append_put(gw_appends *appends, gw_append_state *out, const gw_append_key *key,
                        const char *call, const char *text, size_t length, bool done,
                        base_err *err);
/* The body of a piece that is still on its way, all of it that has come: counts for prefills only,
 * and until gw_append_put for the call, or gw_append_recall. `upload` tells it from others; while
 * one is on its way, others of the call are not looked at. False: no more of it is of use. */
bool gw_append_arrive(gw_appends *appends, const gw_append_key *key, const char *call,
                      const void *upload, const char *text, size_t length);
void gw_append_recall(gw_appends *appends, const gw_append_key *key, const char *call,
                      const void *upload);
/* Whether a session takes pieces for this call now: BASE_CONFLICT while a turn runs, BASE_INVALID
 * if its last turn did not make it. Blocks on the database. */
struct gw_session_row;
base_code gw_append_check(gw_app *app, int64_t tenant, const struct gw_session_row *session,
                          const char *call, base_arena *arena, base_err *err);
/* Pieces may be cut anywhere, but what is no UTF-8 whatever follows is none. */
bool gw_append_fits(const char *text, size_t length);
/* A copy of what has arrived for a call; false if nothing was appended for it, or no memory. */
bool gw_append_get(gw_appends *appends, eng_text *out, const gw_append_key *key, const char *call,
                   base_arena *arena);
void gw_append_drop(gw_appends *appends, int64_t tenant, const char *session);
/* A prefill of this session runs or is about to. */
bool gw_append_prefills(gw_appends *appends, int64_t tenant, const char *session);

/* Prefills what has arrived of the session's next prompt, and of its fixed beginning, if enough is
 * new and nobody holds the session. `identity` is copied. Thread: `loop`'s. */
void gw_append_prefill(gw_appends *appends, const gw_identity *identity, const char *session,
                       gw_loop *loop);

typedef struct gw_append_stats {
    uint64_t bytes, prefilled_tokens; /* held now; run over since the start */
    uint32_t sessions;                /* with appended text */
} gw_append_stats;
gw_append_stats gw_append_get_stats(gw_appends *appends);
