/* idempotency: a request that arrives again under the same Idempotency-Key gets the answer of the
 * first one: what it has written so far and then the rest while it runs, the whole of it within
 * server.idempotency_ms of its beginning.
 *
 * A key belongs to its tenant and path. Only answers with status 200 are kept once they are over;
 * after any other the key is free again. The same key with another body is refused (400). Where too
 * many keys are known, a request runs as if it had none. Thread: the exchange's loop. */
#pragma once
#include "gateway/turn.h"

#define GW_IDEMPOTENCY_KEY_MAX 255 /* bytes; longer ones are refused */

/* True if the exchange was answered or attached to another turn's tape: this one must not run.
 * Else it runs, on a tape if the request had a key. The turn's body is there. */
bool gw_idempotent(gw_turn *turn, gw_exchange *exchange);
