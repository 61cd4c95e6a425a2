/* gw_session: native sessions in the ledger: what they were made with, where their head is, and the
 * turns on the way to it.
 *
 * A session is a path of turns, from the first to its head. A fork shares its source's turns and
 * owns only what comes behind them; a turn that a deleted session leaves behind, because a fork
 * stands on it, goes with the last such fork. Thread: any but the writer; all of these block on the
 * database. Ids of other tenants are unknown ones: BASE_NOT_FOUND. */
#pragma once
#include "gateway/ledger.h"

typedef struct gw_session_row {
    int64_t row, head_row; /* head_row 0: no turn yet */
    gw_id id, head;
    gw_id forked_session, forked_turn;      /* "" if it was not forked */
    const char *model, *metadata, *config;  /* JSON but for the model; in the arena */
    uint32_t turns;                         /* on the path */
    int64_t created_ms, used_ms, pinned_ms; /* Unix time; pinned_ms 0: not pinned */
} gw_session_row;

typedef struct gw_session_new {
    int64_t tenant;
    const char *id, *model;
    const char *metadata, *config; /* JSON, NULL: none */
    const char *head;              /* turn of this tenant, NULL: none yet */
    const char *forked_session;    /* NULL: it was not */
    int64_t created_ms;
    uint32_t count_max; /* sessions of a tenant */
    /* It takes turns, but nobody else knows of it before gw_session_publish; the next start deletes
     * what was not published. */
    bool staged;
} gw_session_new;

/* BASE_FULL past count_max; BASE_NOT_FOUND if there is no such head. Blocks until committed. */
base_code gw_session_create(gw_ledger *ledger, const gw_session_new *fresh, base_err *err);
/* A staged session becomes one like others, or goes with all its turns. */
base_code gw_session_publish(gw_ledger *ledger, int64_t tenant, const char *id, uint32_t count_max,
                             base_err *err);
base_code gw_session_discard(gw_ledger *ledger, int64_t tenant, const char *id, base_err *err);
base_code gw_session_read(gw_ledger *ledger, gw_session_row *out, int64_t tenant, const char *id,
                          base_arena *arena, base_err *err);
/* At most `limit` rows behind `after` (NULL: from the end), newest first or oldest first; `*more`:
 * there are others. The rows are in the arena. */
base_code gw_session_list(gw_ledger *ledger, gw_session_row **out, uint32_t *count, bool *more,
                          int64_t tenant, const char *after, uint32_t limit, bool oldest_first,
                          base_arena *arena, base_err *err);
base_code gw_session_pin(gw_ledger *ledger, int64_t tenant, const char *id, int64_t until_ms,
                         base_err *err);
/* The session, and all turns that no other session stands on. */
base_code gw_session_delete(gw_ledger *ledger, int64_t tenant, const char *id, base_err *err);

/* One turn of a session's path. All pointers are into the arena. */
typedef struct gw_path_turn {
    int64_t row;
    gw_id id, parent;
    gw_turn_status status;
    eng_finish finish;
    eng_usage usage; /* counts, no times */
    const char *reason;
    int64_t created_ms;
    char **items; /* JSON of what it added, its answer last */
    uint32_t item_count;
    bool answered; /* the last item is its answer */
    /* The answer's exact tokens, from behind the beginning of the assistant's turn; NULL if they do
     * not spell it or another template made them. */
    int32_t *run;
    uint32_t run_count;
} gw_path_turn;

/* Turns of the path that ends at `turn` (NULL: the session's head), oldest first: at most `limit`
 * of them, the ones before (in time) `after` if `newest` is set, else those behind it. `*more`:
 * there are others beyond. BASE_NOT_FOUND if `turn` or `after` is not of this session. */
base_code gw_session_path(gw_ledger *ledger, gw_path_turn **out, uint32_t *count, bool *more,
                          int64_t tenant, const gw_session_row *session, const char *turn,
                          const char *after, uint32_t limit, bool newest, const char *template_id,
                          base_arena *arena, base_err *err);

/* What the next turn stands on. */
typedef struct gw_head {
    gw_id turn;
    gw_digest node, root; /* after its answer; before its first item */
    bool exact;           /* the tokens spell the conversation, and `template_id` made them */
    eng_finish finish;
    const char *answer; /* JSON of the assistant's item, NULL: none */
    const char *front;  /* JSON of its root: tools, mode and effort */
    int32_t *prompt;    /* up to and including the beginning of the assistant's turn, */
    uint32_t prompt_count;
    int32_t *run; /* and what followed it, `lead` of which the prompt ended with */
    uint32_t run_count, lead;
} gw_head;
/* `turn` NULL: the session's head, which must be there. */
base_code gw_session_head(gw_ledger *ledger, gw_head *out, int64_t tenant,
                          const gw_session_row *session, const char *turn, const char *template_id,
                          base_arena *arena, base_err *err);

/* A match without a search: the request goes on behind `head`. If the head is exact and `root` is
 * its root, items[0] is its answer with its tokens and all before it is left out; otherwise items
 * begin with the conversation's first. `known`: items up to and including the head's answer. */
base_code gw_session_match(gw_match *out, const gw_root *root, const gw_head *head, bool behind,
                           const eng_item *items, uint32_t item_count, uint32_t known,
                           base_arena *arena, base_err *err);
/* The root that a request would have. */
base_code gw_session_root(gw_digest *out, const gw_root *root, base_err *err);
