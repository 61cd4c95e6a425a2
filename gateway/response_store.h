/* response_store: what of a response's stream is kept beside its tokens, and a stored response made
 * again from both. Thread: worker, unless it says otherwise. */
#pragma once
#include "gateway/response.h"

/* JSON for gw_commit.told and the rows of running streams. `end` NULL: it runs. Thread: the turn's
 * loop. */
void gw_response_tell(base_buf *out, const gw_turn *turn, const gw_response *r,
                      const gw_response_end *end);
#define GW_RESPONSES "responses" /* the dialect's name in the ledger */

/* The turn of "resp_" and 24 hex digits; false for any other text. Thread: any. */
bool gw_response_turn(gw_id *out, const char *response);
/* A stored response's turn, with its echo. BASE_NOT_FOUND: never stored, deleted, another tenant's,
 * or not of this dialect. */
base_code gw_response_read(gw_turn_row *out, gw_ledger *ledger, int64_t tenant,
                           const char *response, base_arena *arena, base_err *err);
/* Its first item behind the instructions, which belong to that response alone. */
uint32_t gw_response_first_item(const gw_turn_row *row);

typedef struct gw_stored {
    gw_response r;
    gw_response_end end;
    bool live;        /* never committed: it runs, or a crash cut it */
    const char *echo; /* JSON object */
    /* ---- its own ---- */
    base_buf text, reasoning;
    gw_turn_call *calls;
    uint32_t call_count;
    gw_logprobs list;
    json_t *told, *answer;
    const json_t *tools; /* of the request, while it is played */
    bool failed;
} gw_stored;

/* Reads a response and plays its answer. `record` NULL: no events. `from` is the number behind the
 * client's last event: where a crash cut the stream, the last event's number is at least that. The
 * texts live in the arena. BASE_NOT_FOUND: there is none, or it was deleted. */
base_code gw_stored_play(gw_stored *out, gw_app *app, int64_t tenant, const char *response,
                         void (*record)(void *ctx, const base_buf *record), void *ctx,
                         uint32_t from, base_arena *arena, base_err *err);
void gw_stored_deinit(gw_stored *stored);
