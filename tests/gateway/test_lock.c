/* Locks of sessions: order, bounds, leaving in line, and many threads. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "gateway/lock.h"

TestSuite(lock, .timeout = 30);

typedef struct claimant {
    gw_lock lock; /* first */
    atomic_int granted;
} claimant;

static void on_granted(gw_lock *lock)
{
    atomic_fetch_add(&((claimant *)lock)->granted, 1);
}

static gw_locks *make(uint32_t wait_max)
{
    gw_locks *locks;
    cr_assert_eq(gw_locks_create(&locks, wait_max, NULL), BASE_OK);
    return locks;
}

static gw_claim claim(gw_locks *locks, claimant *c, const char *id)
{
    c->lock.granted = on_granted;
    return gw_lock_claim(locks, &c->lock, 1, id);
}

Test(lock, the_line_is_served_in_its_order_and_bounded)
{
    gw_locks *locks = make(2);
    claimant c[5] = {0};
    cr_assert_eq(claim(locks, &c[0], "sess_a"), GW_CLAIM_HELD);
    cr_assert_eq(claim(locks, &c[1], "sess_a"), GW_CLAIM_WAITS);
    cr_assert_eq(claim(locks, &c[2], "sess_a"), GW_CLAIM_WAITS);
    cr_assert_eq(claim(locks, &c[3], "sess_a"), GW_CLAIM_FULL);
    cr_assert_eq(gw_locks_waiting(locks), 2);
    gw_lock_let_go(locks, &c[0].lock);
    cr_assert_eq(c[1].granted, 1);
    cr_assert_eq(c[2].granted, 0);
    cr_assert_eq(claim(locks, &c[4], "sess_a"), GW_CLAIM_WAITS);
    gw_lock_let_go(locks, &c[1].lock);
    cr_assert_eq(c[2].granted, 1);
    gw_lock_let_go(locks, &c[2].lock);
    cr_assert_eq(c[4].granted, 1);
    gw_lock_let_go(locks, &c[4].lock);
    cr_assert_not(gw_lock_is_held(locks, 1, "sess_a"));
    gw_locks_destroy(locks);
}

Test(lock, keys_and_tenants_are_apart)
{
    gw_locks *locks = make(1);
    claimant c[3] = {0};
    cr_assert_eq(claim(locks, &c[0], "sess_a"), GW_CLAIM_HELD);
    cr_assert_eq(claim(locks, &c[1], "sess_b"), GW_CLAIM_HELD);
    cr_assert_eq(gw_lock_claim(locks, &c[2].lock, 2, "sess_a"), GW_CLAIM_HELD);
    for (int i = 0; i < 3; i++)
        gw_lock_let_go(locks, &c[i].lock);
    gw_locks_destroy(locks);
}

Test(lock, who_leaves_is_out_of_line)
{
    gw_locks *locks = make(3);
    claimant c[4] = {0};
    for (int i = 0; i < 4; i++)
        claim(locks, &c[i], "sess_a");
    cr_assert(gw_lock_leave(locks, &c[3].lock), "the last one of the line");
    cr_assert(gw_lock_leave(locks, &c[1].lock), "the first one");
    cr_assert_not(gw_lock_leave(locks, &c[0].lock), "the holder must let go");
    gw_lock_let_go(locks, &c[0].lock);
    cr_assert_eq(c[1].granted + c[3].granted, 0);
    cr_assert_eq(c[2].granted, 1);
    cr_assert_eq(claim(locks, &c[3], "sess_a"), GW_CLAIM_LEFT, "no claim after leaving");
    gw_lock_let_go(locks, &c[2].lock);
    gw_lock_let_go(locks, &c[2].lock); /* does nothing */
    gw_locks_destroy(locks);
}

Test(lock, who_gives_up_may_still_claim)
{
    gw_locks *locks = make(3);
    claimant c[2] = {0};
    cr_assert_not(gw_lock_give_up(locks, &c[0].lock), "it is not in line yet");
    cr_assert_eq(claim(locks, &c[0], "sess_a"), GW_CLAIM_HELD);
    cr_assert_not(gw_lock_give_up(locks, &c[0].lock), "the holder must let go");
    cr_assert_eq(claim(locks, &c[1], "sess_a"), GW_CLAIM_WAITS);
    cr_assert(gw_lock_give_up(locks, &c[1].lock));
    gw_lock_let_go(locks, &c[0].lock);
    cr_assert_eq(c[1].granted, 0);
    gw_locks_destroy(locks);
}

Test(lock, to_try_is_not_to_wait)
{
    gw_locks *locks = make(3);
    claimant c[2] = {0};
    cr_assert_eq(gw_lock_try(locks, &c[0].lock, 1, "sess_a"), GW_CLAIM_HELD);
    cr_assert_eq(gw_lock_try(locks, &c[1].lock, 1, "sess_a"), GW_CLAIM_FULL);
    gw_lock_let_go(locks, &c[0].lock);
    cr_assert_eq(gw_lock_try(locks, &c[1].lock, 1, "sess_a"), GW_CLAIM_HELD);
    gw_lock_let_go(locks, &c[1].lock);
    gw_locks_destroy(locks);
}

#define THREADS 8
#define ROUNDS 3000

static gw_locks *shared;
static atomic_int inside, worst, done, refused;

/* Some claims leave at once: either they are out of line, or they hold and let go. */
static void *contend(void *seed)
{
    unsigned state = (unsigned)(size_t)seed;
    for (int i = 0; i < ROUNDS; i++) {
        claimant c = {0};
        gw_claim result = claim(shared, &c, "sess_a");
        if (result == GW_CLAIM_FULL) {
            atomic_fetch_add(&refused, 1);
            continue;
        }
        if (result == GW_CLAIM_WAITS && rand_r(&state) % 3 == 0 && gw_lock_leave(shared, &c.lock)) {
            cr_assert_eq(c.granted, 0);
            continue;
        }
        while (result == GW_CLAIM_WAITS && !atomic_load(&c.granted))
            sched_yield();
        int now = atomic_fetch_add(&inside, 1) + 1;
        if (now > atomic_load(&worst))
            atomic_store(&worst, now);
        atomic_fetch_sub(&inside, 1);
        atomic_fetch_add(&done, 1);
        gw_lock_let_go(shared, &c.lock);
    }
    return NULL;
}

Test(lock, of_many_threads_one_holds)
{
    pthread_t threads[THREADS];
    shared = make(4);
    for (size_t i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, contend, (void *)(i + 1)), 0);
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    cr_assert_eq(worst, 1);
    cr_assert_gt(done, 0);
    cr_assert_eq(gw_locks_waiting(shared), 0);
    cr_assert_not(gw_lock_is_held(shared, 1, "sess_a"));
    gw_locks_destroy(shared);
}
