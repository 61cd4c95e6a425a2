#include "gateway/idempotency.h"

#include <openssl/sha.h>
#include <stdio.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "gateway/tape.h"

/* Keys are hashed: they are of any bytes, and no client's text stays longer than its request. */
static bool make_name(char out[GW_TAPE_NAME_MAX + 1], const gw_turn *turn, const char *key)
{
    unsigned char digest[SHA256_DIGEST_LENGTH];
    char text[GW_IDEMPOTENCY_KEY_MAX + 192];
    int length = snprintf(text, sizeof text, "%lld\n%.128s\n%s", (long long)turn->identity.tenant,
                          turn->path, key);
    if (length < 0 || (size_t)length >= sizeof text)
        return false;
    SHA256((const unsigned char *)text, (size_t)length, digest);
    int at = snprintf(out, GW_TAPE_NAME_MAX, "retry ");
    for (int i = 0; i < SHA256_DIGEST_LENGTH; i++)
        at += snprintf(out + at, (size_t)(GW_TAPE_NAME_MAX - at), "%02x", digest[i]);
    return true;
}

static bool refuse(gw_turn *turn, gw_exchange *exchange, const char *message)
{
    turn->exchange = NULL;
    turn->status = 400;
    gw_error_respond(exchange, 400, "invalid_request_error", "idempotency_error", "Idempotency-Key",
                     message);
    return true;
}

bool gw_idempotent(gw_turn *turn, gw_exchange *exchange)
{
    const char *key = gw_exchange_header(exchange, "idempotency-key");
    gw_tapes *tapes = turn->app->tapes;
    if (!key || !key[0] || !tapes)
        return false;
    if (strlen(key) > GW_IDEMPOTENCY_KEY_MAX || !make_name(turn->retry_name, turn, key))
        return refuse(turn, exchange, "Idempotency-Key has more than 255 bytes");
    uint64_t tag = XXH3_64bits(turn->body, turn->body_length), known;
    gw_tape *fresh = gw_tape_create(), *tape = NULL;
    if (!fresh || gw_tapes_find(tapes, &tape, &known, turn->retry_name, fresh, tag)) {
        turn->retry_name[0] = '\0';
        gw_tape_unref(fresh);
        return false;
    }
    if (!tape) {
        turn->tape = fresh;
        turn->exchange = NULL;
        gw_tape_attach(fresh, exchange, 0, false);
        return false;
    }
    turn->retry_name[0] = '\0'; /* the other turn's */
    gw_tape_unref(fresh);
    if (known == tag) {
        turn->exchange = NULL;
        turn->status = 200;
        gw_tape_attach(tape, exchange, 0, true);
    } else {
        refuse(turn, exchange, "this Idempotency-Key was used with another body");
    }
    gw_tape_unref(tape);
    return true;
}
