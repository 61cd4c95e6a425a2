/* gw_admin: the ledger as its operator sees it: sessions and turns of every tenant, and what was
 * used.
 *
 * What was used is added up by UTC day, tenant and tool in the transaction that commits a turn, so
 * the sums outlive the turns. A turn's tool is the one whose result it was given, the first if
 * there are several; a tenant's day has GW_USAGE_TOOLS of them at most, later ones are "other".
 * Days are kept for GW_USAGE_DAYS. Thread: any but the writer; all block on the database. Texts are
 * in the arena. Lists are bounded by `limit`. */
#pragma once
#include "gateway/ledger.h"

#define GW_USAGE_TOOLS 256
#define GW_USAGE_TOOL_MAX 64 /* bytes of a name; longer ones are cut */
#define GW_USAGE_DAYS 400
#define GW_SEARCH_MAX 20000 /* sessions that one page of a search looks at */

typedef struct gw_sums {
    uint64_t turns, cancelled, failed;
    uint64_t prompt_tokens, cached_tokens, restored_tokens, output_tokens, reasoning_tokens;
    uint64_t drafted, accepted, lost_tokens;
    uint64_t queue_us, prefill_us, decode_us;
} gw_sums;

typedef struct gw_session_view {
    int64_t row, tenant;
    gw_id id, head, forked_session, forked_turn;        /* "": none */
    int kind;                                           /* 0 label, 1 native, 2 conversation */
    const char *tenant_name, *label, *model, *metadata; /* NULL: none */
    int64_t created_ms, used_ms, pinned_ms;
    gw_sums sums; /* of its own turns that are kept */
} gw_session_view;

typedef struct gw_session_filter {
    int64_t tenant;   /* 0: any */
    int kind;         /* -1: any */
    const char *text; /* within label, id or metadata; NULL: any */
    int64_t before;   /* row; 0: from the newest on */
    uint32_t limit;
} gw_session_filter;

/* Newest first. `*next`: what `before` is for the page behind, 0 at the end. */
base_code gw_admin_session_list(gw_ledger *ledger, gw_session_view **out, uint32_t *count,
                                int64_t *next, const gw_session_filter *filter, base_arena *arena,
                                base_err *err);
base_code gw_admin_session_read(gw_ledger *ledger, gw_session_view *out, const char *id,
                                base_arena *arena, base_err *err);

typedef struct gw_turn_view {
    int64_t row, tenant;
    gw_id id, session, parent, parent_session, request, response; /* "": none */
    const char *dialect, *model, *tool, *reason;                  /* NULL: none */
    gw_turn_status status;
    eng_finish finish;
    gw_retention retention;
    eng_usage usage;
    gw_cache_note cache; /* without its miss */
    uint64_t space;      /* of its pages, 0: none */
    int64_t created_ms, ended_ms;
} gw_turn_view;

/* Turns of a session by its row, behind `after` (a row, 0: from the end). */
base_code gw_admin_turn_list(gw_ledger *ledger, gw_turn_view **out, uint32_t *count, int64_t *next,
                             int64_t session, int64_t after, uint32_t limit, bool oldest_first,
                             base_arena *arena, base_err *err);
base_code gw_admin_turn_read(gw_ledger *ledger, gw_turn_view *out, const char *id,
                             base_arena *arena, base_err *err);
/* The cache namespaces of a tenant's turns, each once, at most `max`. */
base_code gw_admin_spaces(gw_ledger *ledger, uint64_t **out, uint32_t *count, int64_t tenant,
                          uint32_t max, base_arena *arena, base_err *err);

/* A request of a trace. */
typedef struct gw_trace_turn {
    int64_t session_row, tenant;
    gw_id session, turn;
    uint64_t space;
    int64_t created_ms, ended_ms;
    eng_finish finish;
    bool gives_result; /* of a tool */
    uint32_t output_tokens;
} gw_trace_turn;
/* At most `limit` turns with their tokens, by time or session after session, oldest first.
 * `session` NULL, `tenant` 0: of all. */
base_code gw_admin_trace_list(gw_ledger *ledger, gw_trace_turn **out, uint32_t *count,
                              int64_t tenant, const char *session, bool by_time, uint32_t limit,
                              base_arena *arena, base_err *err);

/* What the rows of a report are told apart by. */
typedef enum gw_usage_by {
    GW_BY_DAY = 1,
    GW_BY_TENANT = 2,
    GW_BY_TOOL = 4,
    GW_BY_SESSION = 8, /* alone; of turns that are kept */
} gw_usage_by;

typedef struct gw_usage_filter {
    uint32_t by;              /* of gw_usage_by */
    int64_t tenant;           /* 0: any */
    int64_t day_min, day_max; /* since 1970 */
    uint32_t limit;
} gw_usage_filter;

typedef struct gw_usage_row {
    int64_t day;
    const char *tenant, *tool, *session; /* as `by` says; tool "": none */
    gw_sums sums;
} gw_usage_row;

/* `total`: of all rows, those past `limit` too. */
base_code gw_admin_usage_list(gw_ledger *ledger, gw_usage_row **out, uint32_t *count, bool *more,
                              gw_sums *total, const gw_usage_filter *filter, base_arena *arena,
                              base_err *err);
