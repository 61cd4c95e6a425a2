/* ledger_stream: what the stream of a stored response told beside its tokens, and, while its turn
 * runs, the tokens so far.
 *
 * A turn's row begins to be live and is written again at a bounded rate as the answer grows; the
 * turn's commit makes it a finished one, which holds no tokens (the turn does) and leaves with its
 * turn. A live row without a running turn is one that a crash cut. Thread: any that may block. */
#pragma once
#include "gateway/ledger.h"

typedef struct gw_stream_row {
    int64_t tenant;
    const char *turn; /* its public id */
    int64_t created_ms;
    const char *echo; /* as the turn's; NULL in a finished row */
    const char *told; /* JSON of the dialect */
    /* Of live rows: the generated tokens and how many each step gave. */
    const int32_t *run;
    const uint32_t *steps;
    uint32_t run_count, step_count;
    bool live; /* read only */
} gw_stream_row;

/* Writes a live row or replaces it; nothing happens once its turn is committed. */
base_code gw_stream_put(gw_ledger *ledger, const gw_stream_row *row, base_err *err);
/* Texts and arrays in the arena. BASE_NOT_FOUND; BASE_FORMAT for a damaged row. */
base_code gw_stream_read(gw_ledger *ledger, gw_stream_row *out, int64_t tenant, const char *turn,
                         base_arena *arena, base_err *err);
/* Deletes a live row. BASE_NOT_FOUND if there is none. */
base_code gw_stream_forget(gw_ledger *ledger, int64_t tenant, const char *turn, base_err *err);
/* Turns that said the same in the same place share the item, but each made calls of its own: their
 * ids are the member `calls` of what the turn told (NULL is fine), and `custom` lists the indexes
 * of those whose type is that. The item's JSON with them, in the arena; the item as it is where
 * there is nothing to change. */
char *gw_item_with_calls(char *item, const char *told, base_arena *arena);
