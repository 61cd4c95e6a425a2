/* turn inside: what turn.c and turn_choice.c share. */
#pragma once
#include "gateway/turn.h"

/* Worker. Once the first choice has its plan and prompt: makes the others, each with an open port.
 * Those that are made are counted even where this fails. */
base_code gw_turn__make_choices(gw_turn *first, base_err *err);
/* Worker. Notes what the cache should hold of the prompt, and where the prompt departs from its
 * parent. */
void gw_turn__expect(gw_turn *turn);
