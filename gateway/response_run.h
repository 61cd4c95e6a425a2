/* response_run: what a response leaves for later ones: its run of tokens, sealed for clients that
 * keep their own history, and its items, for a conversation. */
#pragma once
#include "gateway/response.h"
#include "gateway/responses_item.h"

/* encrypted_content: the template and the tokens of the turn's run, sealed for its tenant and the
 * node that it follows. Appended, terminated; false if there is none. Thread: loop. */
bool gw_run_seal(base_buf *out, const gw_turn *turn);
/* Items that came with one of ours get their exact tokens back where the ledger has none and the
 * client changed nothing. What was changed or belongs to another tenant is refused (400
 * invalid_encrypted_content, naming the item); other servers' seals mean nothing here. Worker, in
 * `check`. */
base_code gw_runs_unseal(gw_turn *turn, const gw_item_list *list, base_err *err);
/* The items that a turn adds to its conversation, into turn->commit's fields. Loop, in `ending`. */
void gw_conversation_of(gw_turn *turn, gw_response *r, const gw_response_end *end,
                        const char *conversation);
/* An item as a conversation keeps it: with an id, a type and a status. In the arena. */
base_code gw_conversation_make(base_arena *arena, const json_t *item, const char **id,
                               const char **json, base_err *err);
/* Under which a running stream is found. */
void gw_stream_name(char out[GW_TAPE_NAME_MAX], int64_t tenant, const char *response);
