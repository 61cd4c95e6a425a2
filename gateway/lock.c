#include "gateway/lock.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define BUCKETS 1024 /* keys held at once are about as many as requests */

/* A key that is held. Its line begins behind the holder. */
typedef struct gw_lock_key {
    struct gw_lock_key *chain;
    int64_t tenant;
    gw_id id;
    gw_lock *first, **last;
    uint32_t waiting;
} gw_lock_key;

struct gw_locks {
    pthread_mutex_t mutex; /* guards all of it, and every claim's lower fields */
    uint32_t wait_max, waiting;
    gw_lock_key *buckets[BUCKETS];
};

base_code gw_locks_create(gw_locks **out, uint32_t wait_max, base_err *err)
{
    gw_locks *locks = calloc(1, sizeof *locks);
    if (!locks)
        return base_fail(err, BASE_NOMEM, "no memory for the locks of sessions");
    pthread_mutex_init(&locks->mutex, NULL);
    locks->wait_max = wait_max;
    *out = locks;
    return BASE_OK;
}

void gw_locks_destroy(gw_locks *locks)
{
    if (!locks)
        return;
    for (size_t i = 0; i < BUCKETS; i++)
        CHECK(!locks->buckets[i]);
    pthread_mutex_destroy(&locks->mutex);
    free(locks);
}

static gw_lock_key **place(gw_locks *locks, int64_t tenant, const char *id)
{
    uint64_t hash = XXH3_64bits_withSeed(id, strlen(id), (uint64_t)tenant);
    gw_lock_key **at = &locks->buckets[hash % BUCKETS];
    while (*at && ((*at)->tenant != tenant || strcmp((*at)->id.text, id) != 0))
        at = &(*at)->chain;
    return at;
}

static gw_claim claim(gw_locks *locks, gw_lock *lock, int64_t tenant, const char *id,
                      uint32_t wait_max)
{
    if (lock->left)
        return GW_CLAIM_LEFT;
    if (strlen(id) >= GW_ID_MAX)
        return GW_CLAIM_FULL;
    gw_lock_key **at = place(locks, tenant, id), *key = *at;
    lock->next = NULL;
    if (!key) {
        key = calloc(1, sizeof *key);
        if (!key)
            return GW_CLAIM_FULL;
        key->tenant = tenant;
        strcpy(key->id.text, id);
        key->last = &key->first;
        *at = key;
        lock->key = key;
        lock->holds = true;
        return GW_CLAIM_HELD;
    }
    if (key->waiting >= wait_max)
        return GW_CLAIM_FULL;
    lock->key = key;
    *key->last = lock;
    key->last = &lock->next;
    key->waiting++;
    locks->waiting++;
    return GW_CLAIM_WAITS;
}

gw_claim gw_lock_claim(gw_locks *locks, gw_lock *lock, int64_t tenant, const char *id)
{
    pthread_mutex_lock(&locks->mutex);
    gw_claim result = claim(locks, lock, tenant, id, locks->wait_max);
    pthread_mutex_unlock(&locks->mutex);
    return result;
}

gw_claim gw_lock_try(gw_locks *locks, gw_lock *lock, int64_t tenant, const char *id)
{
    pthread_mutex_lock(&locks->mutex);
    gw_claim result = claim(locks, lock, tenant, id, 0);
    pthread_mutex_unlock(&locks->mutex);
    return result;
}

static bool leave(gw_locks *locks, gw_lock *lock, bool for_good)
{
    pthread_mutex_lock(&locks->mutex);
    gw_lock_key *key = lock->key;
    bool waits = key && !lock->holds;
    lock->left |= for_good;
    if (waits) {
        gw_lock **at = &key->first;
        while (*at != lock)
            at = &(*at)->next;
        *at = lock->next;
        if (!lock->next)
            key->last = at;
        key->waiting--;
        locks->waiting--;
        lock->key = NULL;
    }
    pthread_mutex_unlock(&locks->mutex);
    return waits;
}

bool gw_lock_leave(gw_locks *locks, gw_lock *lock)
{
    return leave(locks, lock, true);
}

bool gw_lock_give_up(gw_locks *locks, gw_lock *lock)
{
    return leave(locks, lock, false);
}

void gw_lock_let_go(gw_locks *locks, gw_lock *lock)
{
    pthread_mutex_lock(&locks->mutex);
    gw_lock_key *key = lock->key;
    gw_lock *next = NULL;
    if (key && lock->holds) {
        lock->key = NULL;
        lock->holds = false;
        next = key->first;
        if (next) {
            key->first = next->next;
            if (!key->first)
                key->last = &key->first;
            key->waiting--;
            locks->waiting--;
            next->holds = true;
        } else {
            *place(locks, key->tenant, key->id.text) = key->chain;
            free(key);
        }
    }
    pthread_mutex_unlock(&locks->mutex);
    if (next)
        next->granted(next);
}

bool gw_lock_is_held(gw_locks *locks, int64_t tenant, const char *id)
{
    pthread_mutex_lock(&locks->mutex);
    bool held = *place(locks, tenant, id) != NULL;
    pthread_mutex_unlock(&locks->mutex);
    return held;
}

uint32_t gw_locks_waiting(gw_locks *locks)
{
    pthread_mutex_lock(&locks->mutex);
    uint32_t waiting = locks->waiting;
    pthread_mutex_unlock(&locks->mutex);
    return waiting;
}
