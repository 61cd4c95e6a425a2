/* session_turn: what a native session's turns look like on the wire; shared by the dialect that
 * runs them and the calls that read them. Thread: any. */
#pragma once
#include "gateway/dialect.h"

#define GW_SESSIONS_PATH "/v1/sessions"

/* "/v1/sessions/ID/WORD": false if it is something else. `*word` is "" without one. */
bool gw_session_of_path(gw_id *id, const char **word, const char *path);

/* An item as the ledger writes it; a result with the id of its call, NULL for others. */
void gw_put_session_item(base_buf *out, const char *json, const char *call);
/* The calls that a stored item makes, NULL: none; the caller's (json_decref). */
json_t *gw_calls_of(const char *json);
/* Stored items one after the other: `*calls` are the calls of the last one that made any and that
 * are not answered yet, NULL at first; the caller's in the end. */
void gw_put_turn_item(base_buf *out, const char *json, json_t **calls);
const char *gw_turn_status_word(gw_turn_status status, eng_finish finish);
const char *gw_turn_finish_json(gw_turn_status status, eng_finish finish);
/* `{"id":…,"object":…,"session":…,"parent":…,"status":…,"created_at":…,`; parent "": null. */
void gw_put_turn_head(base_buf *out, const char *id, const char *session, const char *parent,
                      const char *status, int64_t created_ms);
/* `,"cache":{…}` */
void gw_put_turn_cache(base_buf *out, const eng_usage *usage, const char *reason);
