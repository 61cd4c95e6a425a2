/* response_run: what a response leaves for later ones: its run of tokens, sealed for clients that
 * keep their own history, and its items, for a conversation. */
#pragma once
#include "gateway/ledger_conversation.h"
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
/* Only refuses what gw_runs_unseal would refuse. */
base_code gw_runs_verify(gw_turn *turn, const gw_item_list *list, base_err *err);
/* turn->added from items as a client sends them, each with an id, a type and a status. Ids of the
 * client's stay unless they cannot stand in a path or an item has them: of `before` (NULL: nothing)
 * or of the list itself. References become what they name; `field` is for their 404. The items were
 * read before. Worker. */
base_code gw_conversation_inputs(gw_turn *turn, const json_t *input, const char *field,
                                 const gw_conversation_page *before, base_err *err);
/* The response's items behind them. Loop, in `ending`. */
void gw_conversation_outputs(gw_turn *turn, gw_response *r, const gw_response_end *end);
/* Under which a running stream is found. */
void gw_stream_name(char out[GW_TAPE_NAME_MAX], int64_t tenant, const char *response);
