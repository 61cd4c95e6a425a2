/* gw_seal: what this gateway hands to a client and must know again: authenticated by a key that
 * never leaves the data directory.
 *
 * The key is 32 random bytes in DATA/key (0600), made at the first start. Without it, what was
 * sealed before is a stranger's: accepted and of no use, never an error. Thread: any, once open. */
#pragma once
#include "engine/base/buf.h"
#include "gateway/ledger.h"

#define GW_SEAL_TEXT_BYTES 60 /* base64 of version, 12 bytes of a turn's id, 32 of its HMAC */

/* Reads DATA/key or makes it. BASE_IO; BASE_DENIED if others may read it; BASE_FORMAT if it is too
 * short. err->param is "data.path". */
base_code gw_seal_open(gw_seal **out, const char *directory, base_err *err);
void gw_seal_close(gw_seal *seal); /* NULL is fine */

/* The signature of a turn's reasoning: names the turn and holds for its tenant alone. Empty if the
 * system's cryptography fails, which clients and gw_seal_read take as "none". */
void gw_seal_turn(const gw_seal *seal, char out[GW_SEAL_TEXT_BYTES + 1], int64_t tenant,
                  const gw_id *turn);
/* The turn that a signature names. False for "", foreign and forged ones. */
bool gw_seal_read(const gw_seal *seal, gw_id *turn, int64_t tenant, eng_text text);

/* Sealed texts: AES-256-GCM under a key derived for `use` alone, with the tenant and `bound` as
 * associated data; base64 with a mark in front that says it is one of ours. The nonce is a MAC of
 * all that goes in, so the same content seals to the same text, which a replayed stream needs, and
 * no nonce serves two contents. Appends to `out`; BASE_NOMEM, BASE_IO. */
base_code gw_seal_wrap(const gw_seal *seal, base_buf *out, const char *use, int64_t tenant,
                       eng_text bound, const void *content, size_t length, base_err *err);
/* True for texts that begin like gw_seal_wrap's. */
bool gw_seal_is_ours(eng_text text);
/* Appends the content. BASE_FORMAT: not one of ours. BASE_DENIED: it was changed, or belongs to
 * another use, tenant, bound or key. */
base_code gw_seal_unwrap(const gw_seal *seal, base_buf *out, const char *use, int64_t tenant,
                         eng_text bound, eng_text text, base_err *err);
