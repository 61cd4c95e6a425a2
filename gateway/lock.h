/* gw_locks: one holder a key, the others wait in line: turns of a native session or a conversation.
 *
 * First come, first served, and at most `wait_max` wait for a key. Nobody blocks: a waiter is told
 * by its callback. Memory is one small block a key that is held. Thread: any; one mutex, held for
 * a few loads. */
#pragma once
#include "engine/base/err.h"
#include "gateway/ledger.h"

typedef struct gw_locks gw_locks;

/* One claim, part of its owner, zeroed at first. Fields above the line are the owner's. */
typedef struct gw_lock {
    /* The claim that waited holds now. On the thread of whoever let go, without the mutex: it may
     * post a message, no more. */
    void (*granted)(struct gw_lock *lock);
    /* ---- */
    struct gw_lock *next;
    struct gw_lock_key *key; /* while it holds or waits */
    bool holds, left;
} gw_lock;

typedef enum gw_claim {
    GW_CLAIM_HELD,
    GW_CLAIM_WAITS, /* `granted` will be called, unless gw_lock_leave comes first */
    GW_CLAIM_FULL,  /* wait_max wait already, or no memory */
    GW_CLAIM_LEFT,  /* gw_lock_leave was called before */
} gw_claim;

base_code gw_locks_create(gw_locks **out, uint32_t wait_max, base_err *err);
void gw_locks_destroy(gw_locks *locks); /* nobody holds or waits; NULL is fine */

/* `id` with its tenant is the key. With GW_CLAIM_WAITS another thread may own the claim's owner by
 * the time this returns. */
gw_claim gw_lock_claim(gw_locks *locks, gw_lock *lock, int64_t tenant, const char *id);
/* As claim, for who would not wait: FULL if anyone holds. */
gw_claim gw_lock_try(gw_locks *locks, gw_lock *lock, int64_t tenant, const char *id);
/* The owner lost interest. True: it waited and is out of line, `granted` will not be called.
 * False: it holds (or its `granted` is on its way) and must be let go, or it was never in line; a
 * claim that has yet to come is refused. */
bool gw_lock_leave(gw_locks *locks, gw_lock *lock);
/* As leave, for who waited too long: a claim that has yet to come may still find the key free. */
bool gw_lock_give_up(gw_locks *locks, gw_lock *lock);
/* Does nothing for a claim that does not hold. The next in line holds from now on. */
void gw_lock_let_go(gw_locks *locks, gw_lock *lock);
/* An estimate, for refusals. */
bool gw_lock_is_held(gw_locks *locks, int64_t tenant, const char *id);
uint32_t gw_locks_waiting(gw_locks *locks);
