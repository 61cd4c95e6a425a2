/* session_export: a native session as one JSON document, and back.
 *
 * {"format":"whimbrel.session/1","model","metadata","config":{tools,system},"fronts":[…],
 *  "items":[…],"turns":[{"items":N,"front":N,"finish_reason","created_at"}…],"sealed_tokens"}
 *
 * Everything but the tokens can be read and edited. The tokens of all turns are sealed by the data
 * directory's key with the tenant and everything that they belong to (config, fronts, items, turns)
 * as associated data: they come back only with exactly that, to the same tenant, and under the same
 * tokenizer and template. Otherwise an import brings items. Thread: worker; both block. */
#pragma once
#include "gateway/app.h"
#include "gateway/ledger_session.h"
#include "gateway/tenant.h"

base_code gw_session_export(gw_app *app, base_buf *out, int64_t tenant,
                            const gw_session_row *session, base_arena *arena, base_err *err);

typedef struct gw_import {
    gw_id session; /* the new one */
    uint32_t items, turns;
    bool tokens;
} gw_import;
/* `body` was mended; it may be changed. */
base_code gw_session_import(gw_app *app, gw_import *out, const gw_identity *identity, char *body,
                            size_t length, base_arena *arena, base_err *err);
