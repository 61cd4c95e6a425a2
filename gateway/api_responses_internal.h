/* For api_responses.c and what reads the same body: a request as it was read.
 *
 * The functions are a gw_dialect's, with its threads. */
#pragma once
#include "gateway/api_responses.h"
#include "gateway/response.h"
#include "gateway/responses_item.h"

typedef struct gw_responses {
    gw_response view;
    bool parallel;
    bool store;               /* it is found again; a turn on a conversation is kept without, too */
    bool truncate;            /* the oldest items go where all of them do not fit */
    const char *conversation; /* NULL: none */
    char *echo;               /* members of the response object that repeat the request */
    gw_item_list list;        /* the items, and which of them came with a sealed run */
    json_t *stored;           /* trees that the items' texts point into */
    gw_logprobs logprobs;
    base_buf retained; /* of a compaction: items that stay as they are */
    /* ---- the end; loop ---- */
    gw_response_end end;
    base_buf usage, sealed, told; /* texts that `end` and the commit point into */
    gw_error_row row;
    struct flush *flush; /* one at a time */
    uint64_t flushed_ns;
    uint32_t flushed_tokens;
} gw_responses;

base_code gw_responses_parse(gw_turn *turn, base_err *err);
/* Reads only: no turn on the conversation waits for this one, or gets it. Behind parse. */
void gw_responses_look_on(gw_turn *turn);
base_code gw_responses_load(gw_turn *turn, base_err *err);
base_code gw_responses_check(gw_turn *turn, base_err *err);
void gw_responses_fail(gw_turn *turn, const gw_error_row *row, const char *param,
                       const char *message);
void gw_responses_deinit(gw_turn *turn);
void gw_responses_put_usage(base_buf *out, const gw_turn *turn);
