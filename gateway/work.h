/* gw_workers: threads for what must not block a loop: parsing bodies, tokenizing, reading the
 * ledger.
 *
 * Jobs stand in three lanes by the bytes they work through, so that a request of a few KB never
 * waits for one of many MB, which takes a second. Each lane is a bounded queue, first come first
 * served, with threads of its own that help a lighter lane while their own is empty. A job belongs
 * to the workers from submit until run returns. */
#pragma once
#include <stddef.h>

#include "engine/base/err.h"
#include "gateway/app.h"

typedef struct gw_job {
    struct gw_job *next;
    void (*run)(struct gw_job *job); /* on a worker */
    size_t bytes;                    /* of the body it works through; 0 for small things */
} gw_job;

/* `threads` for each of the two lighter lanes, one and a fourth of it for the heaviest; at most
 * `queue_max` jobs wait in a lane. */
base_code gw_workers_create(gw_workers **out, uint32_t threads, uint32_t queue_max, base_err *err);
/* False if the job's lane is full; the job is the caller's again. Thread: any. */
bool gw_workers_submit(gw_workers *workers, gw_job *job);
/* Waits for running and queued jobs. NULL is fine. */
void gw_workers_destroy(gw_workers *workers);
