/* Lanes by size: who waits for whom, and what a full lane does. */
#include "gateway/work.h"

#include <criterion/criterion.h>
#include <semaphore.h>
#include <stdatomic.h>

#define HEAVY (2u << 20)
#define MIDDLE (200u << 10)

typedef struct task {
    gw_job job;
    sem_t *gate;        /* waited for first, if there is one */
    sem_t *done;        /* posted when it ran */
    _Atomic int *order; /* counts those that ran */
    int place;          /* of it among them */
} task;

static void run(gw_job *job)
{
    task *t = (task *)job;
    if (t->gate)
        sem_wait(t->gate);
    t->place = atomic_fetch_add(t->order, 1);
    sem_post(t->done);
}

static task make(size_t bytes, sem_t *gate, sem_t *done, _Atomic int *order)
{
    return (task){.job = {.run = run, .bytes = bytes}, .gate = gate, .done = done, .order = order};
}

Test(work, a_small_job_passes_large_ones)
{
    gw_workers *workers;
    sem_t gate, done;
    _Atomic int order = 0;
    sem_init(&gate, 0, 0);
    sem_init(&done, 0, 0);
    cr_assert_eq(gw_workers_create(&workers, 1, 8, NULL), BASE_OK);
    task heavy[3], middle = make(MIDDLE, NULL, &done, &order), light = make(9, NULL, &done, &order);
    for (int i = 0; i < 3; i++) {
        heavy[i] = make(HEAVY, &gate, &done, &order);
        cr_assert(gw_workers_submit(workers, &heavy[i].job));
    }
    cr_assert(gw_workers_submit(workers, &middle.job));
    sem_wait(&done);
    cr_assert(gw_workers_submit(workers, &light.job));
    sem_wait(&done);
    cr_assert_eq(middle.place, 0);
    cr_assert_eq(light.place, 1);
    for (int i = 0; i < 3; i++)
        sem_post(&gate);
    gw_workers_destroy(workers); /* runs what waits */
    for (int i = 0; i < 3; i++)
        cr_assert_eq(heavy[i].place, 2 + i, "large ones in their order");
}

Test(work, idle_threads_help_lighter_lanes)
{
    gw_workers *workers;
    sem_t gate, done;
    _Atomic int order = 0;
    task tasks[3];
    sem_init(&gate, 0, 0);
    sem_init(&done, 0, 0);
    cr_assert_eq(gw_workers_create(&workers, 1, 8, NULL), BASE_OK);
    /* One thread a lane: two light jobs that wait for the third need all of them. */
    for (int i = 0; i < 3; i++) {
        tasks[i] = make(0, i < 2 ? &gate : NULL, &done, &order);
        cr_assert(gw_workers_submit(workers, &tasks[i].job));
    }
    sem_wait(&done);
    cr_assert_eq(tasks[2].place, 0);
    sem_post(&gate);
    sem_post(&gate);
    gw_workers_destroy(workers);
    cr_assert_eq(order, 3);
}

Test(work, a_full_lane_refuses_and_others_do_not)
{
    gw_workers *workers;
    sem_t gate, done;
    _Atomic int order = 0;
    uint32_t taken = 0;
    task heavy[4], light = make(0, NULL, &done, &order);
    sem_init(&gate, 0, 0);
    sem_init(&done, 0, 0);
    cr_assert_eq(gw_workers_create(&workers, 1, 2, NULL), BASE_OK);
    for (int i = 0; i < 4; i++) {
        heavy[i] = make(HEAVY, &gate, &done, &order);
        taken += gw_workers_submit(workers, &heavy[i].job);
    }
    cr_assert(taken == 2 || taken == 3, "two wait, one may run: %u", taken);
    cr_assert(gw_workers_submit(workers, &light.job));
    sem_wait(&done);
    cr_assert_eq(light.place, 0);
    for (uint32_t i = 0; i < taken; i++)
        sem_post(&gate);
    gw_workers_destroy(workers);
    cr_assert_eq((uint32_t)order, taken + 1);
}
