#include "gateway/work.h"

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/thread.h"

/* Nothing on a worker recurses deeper than a bounded JSON depth. */
#define STACK_BYTES (1u << 20)

/* A body takes some 10 ms a MB, up to 100 where it is all short values or tokens. */
#define LANES 3
static const size_t lane_bytes_max[LANES] = {64u << 10, 1u << 20, SIZE_MAX};

typedef struct lane {
    gw_job *first, **last; /* guarded by gw_workers.lock, as is `waiting` */
    uint32_t waiting;
    pthread_cond_t wake;  /* its threads sleep here */
    uint32_t idle, woken; /* how many do, and of them were signalled; guarded by lock */
    struct gw_workers *workers;
} lane;

struct gw_workers {
    pthread_mutex_t lock;
    bool ending; /* guarded by lock */
    lane lanes[LANES];
    uint32_t waiting_max; /* in a lane */
    uint32_t thread_count;
    pthread_t threads[];
};

static gw_job *take(lane *from)
{
    gw_job *job = from->first;
    if (job != NULL && (from->first = job->next) == NULL)
        from->last = &from->first;
    from->waiting -= job != NULL;
    return job;
}

/* The next job of `own` or else of a lighter lane, NULL if there is none. */
static gw_job *take_any(lane *own)
{
    gw_job *job = NULL;
    for (lane *from = own; job == NULL && from >= own->workers->lanes; from--)
        job = take(from);
    return job;
}

static void *worker_main(void *arg)
{
    lane *own = arg;
    gw_workers *workers = own->workers;
    base_thread_enter(BASE_THREAD_WORKER, "worker");
    pthread_mutex_lock(&workers->lock);
    for (;;) {
        gw_job *job = take_any(own);
        if (job == NULL && workers->ending)
            break;
        if (job == NULL) {
            own->idle++;
            pthread_cond_wait(&own->wake, &workers->lock);
            own->idle--;
            own->woken -= own->woken != 0;
            continue;
        }
        pthread_mutex_unlock(&workers->lock);
        job->run(job);
        pthread_mutex_lock(&workers->lock);
    }
    pthread_mutex_unlock(&workers->lock);
    return NULL;
}

static uint32_t threads_of(uint32_t lane_index, uint32_t threads)
{
    return lane_index + 1 < LANES ? threads : 1 + threads / 4;
}

base_code gw_workers_create(gw_workers **out, uint32_t threads, uint32_t queue_max, base_err *err)
{
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < LANES; i++)
        wanted += threads_of(i, threads);
    gw_workers *workers = calloc(1, sizeof *workers + wanted * sizeof *workers->threads);
    if (workers == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for %u workers", wanted);
    pthread_mutex_init(&workers->lock, NULL);
    workers->waiting_max = queue_max;
    for (lane *l = workers->lanes; l < workers->lanes + LANES; l++) {
        l->last = &l->first;
        l->workers = workers;
        pthread_cond_init(&l->wake, NULL);
    }
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* inherited: signals are main's */
    int rc = 0;
    for (uint32_t i = 0; i < LANES; i++)
        for (uint32_t n = 0; n < threads_of(i, threads) && rc == 0; n++) {
            rc = pthread_create(&workers->threads[workers->thread_count], &attributes, worker_main,
                                &workers->lanes[i]);
            workers->thread_count += rc == 0;
        }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (rc != 0) {
        uint32_t made = workers->thread_count;
        gw_workers_destroy(workers);
        return base_fail(err, BASE_IO, "worker %u of %u: %s", made + 1, wanted, strerror(rc));
    }
    *out = workers;
    return BASE_OK;
}

bool gw_workers_submit(gw_workers *workers, gw_job *job)
{
    lane *to = workers->lanes;
    while (job->bytes > lane_bytes_max[to - workers->lanes])
        to++;
    pthread_mutex_lock(&workers->lock);
    bool room = to->waiting < workers->waiting_max;
    if (room) {
        job->next = NULL;
        *to->last = job;
        to->last = &job->next;
        to->waiting++;
        lane *helper = to; /* one of its own threads if any sleeps; one that works looks again */
        while (helper < workers->lanes + LANES && helper->idle == helper->woken)
            helper++;
        if (helper < workers->lanes + LANES) {
            helper->woken++;
            pthread_cond_signal(&helper->wake);
        }
    }
    pthread_mutex_unlock(&workers->lock);
    return room;
}

void gw_workers_destroy(gw_workers *workers)
{
    if (workers == NULL)
        return;
    pthread_mutex_lock(&workers->lock);
    workers->ending = true;
    for (uint32_t i = 0; i < LANES; i++)
        pthread_cond_broadcast(&workers->lanes[i].wake);
    pthread_mutex_unlock(&workers->lock);
    for (uint32_t i = 0; i < workers->thread_count; i++)
        pthread_join(workers->threads[i], NULL);
    for (uint32_t i = 0; i < LANES; i++)
        pthread_cond_destroy(&workers->lanes[i].wake);
    pthread_mutex_destroy(&workers->lock);
    free(workers);
}
