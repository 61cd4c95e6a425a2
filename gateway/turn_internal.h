/* turn inside: what turn.c and turn_choice.c share. */
#pragma once
#include "gateway/turn.h"

/* Worker. Once the first choice has its plan and prompt: makes the others, each with an open port.
 * Those that are made are counted even where this fails. */
base_code gw_turn__make_choices(gw_turn *first, base_err *err);
/* Worker. Notes what the cache should hold of the prompt, and where the prompt departs from its
 * parent. */
void gw_turn__expect(gw_turn *turn);
/* turn_limit.c */
/* Worker: the engine refused the turn for load: the row of its error. */
void gw_turn__refused(gw_turn *turn, const eng_verdict *verdict);
/* Loop: the client's own time limits, x-request-timeout-ms and those of SDKs. False, with the
 * turn's error set, if the first is no number. */
bool gw_turn__read_timeouts(gw_turn *turn);
/* Worker: the nearer of the client's limit, which binds, and the operator's. */
void gw_turn__set_deadline(const gw_turn *first, eng_request *request);
