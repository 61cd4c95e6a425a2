/* gw_workers: threads for what must not block a loop: parsing bodies, tokenizing, reading the
 * ledger.
 *
 * One bounded queue; a job belongs to the workers from submit until run returns. */
#pragma once
#include "engine/base/err.h"
#include "gateway/app.h"

typedef struct gw_job {
    struct gw_job *next;
    void (*run)(struct gw_job *job); /* on a worker */
} gw_job;

base_code gw_workers_create(gw_workers **out, uint32_t threads, uint32_t queue_max, base_err *err);
/* False if the queue is full; the job is the caller's again. Thread: any. */
bool gw_workers_submit(gw_workers *workers, gw_job *job);
/* Waits for running and queued jobs. NULL is fine. */
void gw_workers_destroy(gw_workers *workers);
