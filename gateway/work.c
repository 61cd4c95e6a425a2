#include "gateway/work.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/thread.h"

/* Nothing on a worker recurses deeper than a bounded JSON depth. */
#define STACK_BYTES (1u << 20)

struct gw_workers {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    gw_job *first, **last; /* guarded by lock, as are the next three */
    uint32_t waiting, waiting_max;
    bool ending;
    uint32_t thread_count;
    pthread_t threads[];
};

static void *worker_main(void *arg)
{
    gw_workers *workers = arg;
    base_thread_enter(BASE_THREAD_WORKER, "worker");
    pthread_mutex_lock(&workers->lock);
    for (;;) {
        while (workers->first == NULL && !workers->ending)
            pthread_cond_wait(&workers->wake, &workers->lock);
        gw_job *job = workers->first;
        if (job == NULL)
            break;
        if ((workers->first = job->next) == NULL)
            workers->last = &workers->first;
        workers->waiting--;
        pthread_mutex_unlock(&workers->lock);
        job->run(job);
        pthread_mutex_lock(&workers->lock);
    }
    pthread_mutex_unlock(&workers->lock);
    return NULL;
}

base_code gw_workers_create(gw_workers **out, uint32_t threads, uint32_t queue_max, base_err *err)
{
    gw_workers *workers = calloc(1, sizeof *workers + threads * sizeof *workers->threads);
    if (workers == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for %u workers", threads);
    pthread_mutex_init(&workers->lock, NULL);
    pthread_cond_init(&workers->wake, NULL);
    workers->last = &workers->first;
    workers->waiting_max = queue_max;
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* inherited: signals are main's */
    int rc = 0;
    while (workers->thread_count < threads && rc == 0) {
        rc = pthread_create(&workers->threads[workers->thread_count], &attributes, worker_main,
                            workers);
        workers->thread_count += rc == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (rc != 0) {
        uint32_t made = workers->thread_count;
        gw_workers_destroy(workers);
        return base_fail(err, BASE_IO, "worker %u of %u: %s", made + 1, threads, strerror(rc));
    }
    *out = workers;
    return BASE_OK;
}

bool gw_workers_submit(gw_workers *workers, gw_job *job)
{
    pthread_mutex_lock(&workers->lock);
    bool room = workers->waiting < workers->waiting_max;
    if (room) {
        job->next = NULL;
        *workers->last = job;
        workers->last = &job->next;
        workers->waiting++;
        pthread_cond_signal(&workers->wake);
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
    pthread_cond_broadcast(&workers->wake);
    pthread_mutex_unlock(&workers->lock);
    for (uint32_t i = 0; i < workers->thread_count; i++)
        pthread_join(workers->threads[i], NULL);
    pthread_cond_destroy(&workers->wake);
    pthread_mutex_destroy(&workers->lock);
    free(workers);
}
