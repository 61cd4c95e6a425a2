/* ledger_completion: stored chat completions. One is a kept turn of the chat dialect with an echo:
 * "chatcmpl-" and the 24 hex digits of its turn. Other choices of its request are turns without a
 * response of their own, which the first one's echo names. Thread: any that may block. */
#pragma once
#include <jansson.h>

#include "gateway/ledger.h"

/* Texts in the arena. */
typedef struct gw_completion {
    gw_id turn;
    int64_t created_ms;
    gw_turn_status status;
    eng_finish finish;
    eng_usage usage; /* prompt, cached, output and reasoning tokens */
    uint64_t seed;
    const char *echo;     /* JSON */
    const char *metadata; /* JSON, NULL: none */
    const char *answer;   /* JSON of the assistant's item, NULL: nothing was said */
} gw_completion;

/* The turn of a completion's id; false for any other text. */
bool gw_completion_turn(gw_id *out, const char *id);
/* BASE_NOT_FOUND for unknown, deleted and other tenants' ones alike; BASE_FORMAT: damaged. */
base_code gw_completion_read(gw_ledger *ledger, gw_completion *out, int64_t tenant,
                             const char *turn, base_arena *arena, base_err *err);

typedef struct gw_completion_query {
    const char *after; /* turn of the last one seen, "": from the beginning */
    uint32_t limit;
    bool oldest_first;
    const char *model;      /* as the request named it, NULL: any */
    const json_t *metadata; /* pairs that it has, NULL: any */
} gw_completion_query;

/* First choices only; `*out` in the arena. BASE_NOT_FOUND: `after` is none. */
base_code gw_completion_list(gw_ledger *ledger, gw_completion **out, uint32_t *count, bool *more,
                             int64_t tenant, const gw_completion_query *query, base_arena *arena,
                             base_err *err);
/* Replaces the metadata (JSON). BASE_NOT_FOUND as above. */
base_code gw_completion_update(gw_ledger *ledger, int64_t tenant, const char *turn,
                               const char *metadata, base_err *err);
