#include "gateway/window.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_SECONDS 1e-5 /* upper bound of bucket 0 */
#define BUCKETS 320        /* the last one's is beyond 1,000 s */

typedef struct slot {
    uint64_t number; /* of slots since time 0 */
    uint64_t counts[GW_WINDOW_COUNTS];
    uint32_t buckets[GW_WINDOW_TIMES][BUCKETS];
} slot;

struct gw_window {
    uint64_t start_ns;
    pthread_mutex_t mutex;       /* guards what follows */
    slot slots[GW_WINDOW_SLOTS]; /* number N stands at N % GW_WINDOW_SLOTS */
};

base_code gw_window_create(gw_window **out, uint64_t now_ns, base_err *err)
{
    gw_window *window = calloc(1, sizeof *window);
    if (!window)
        return base_fail(err, BASE_NOMEM, "no memory for the last minute's numbers");
    window->start_ns = now_ns;
    pthread_mutex_init(&window->mutex, NULL);
    *out = window;
    return BASE_OK;
}

void gw_window_destroy(gw_window *window)
{
    if (!window)
        return;
    pthread_mutex_destroy(&window->mutex);
    free(window);
}

/* With the mutex. */
static slot *slot_at(gw_window *window, uint64_t now_ns)
{
    uint64_t number = now_ns / GW_WINDOW_SLOT_NS;
    slot *s = &window->slots[number % GW_WINDOW_SLOTS];
    if (s->number != number) {
        memset(s, 0, sizeof *s);
        s->number = number;
    }
    return s;
}

static size_t bucket_of(double seconds)
{
    if (!(seconds > FIRST_SECONDS))
        return 0;
    double at = ceil(log(seconds / FIRST_SECONDS) / log(GW_WINDOW_STEP));
    return at < BUCKETS - 1 ? (size_t)at : BUCKETS - 1;
}

void gw_window_observe(gw_window *window, gw_window_time time, double seconds, uint64_t now_ns)
{
    size_t bucket = bucket_of(seconds);
    pthread_mutex_lock(&window->mutex);
    slot_at(window, now_ns)->buckets[time][bucket]++;
    pthread_mutex_unlock(&window->mutex);
}

void gw_window_add(gw_window *window, gw_window_count count, uint64_t n, uint64_t now_ns)
{
    pthread_mutex_lock(&window->mutex);
    slot_at(window, now_ns)->counts[count] += n;
    pthread_mutex_unlock(&window->mutex);
}

/* The middle of the bucket that holds the value of rank `rank` (from 1). */
static double value_at(const uint64_t *buckets, uint64_t rank)
{
    size_t i = 0;
    for (uint64_t seen = buckets[0]; seen < rank && i + 1 < BUCKETS;)
        seen += buckets[++i];
    return FIRST_SECONDS * pow(GW_WINDOW_STEP, (double)i - 0.5);
}

gw_window_view gw_window_look(gw_window *window, uint64_t now_ns)
{
    gw_window_view view = {0};
    uint64_t all[GW_WINDOW_TIMES][BUCKETS] = {0};
    uint64_t number = now_ns / GW_WINDOW_SLOT_NS;
    uint64_t oldest = number >= GW_WINDOW_SLOTS - 1 ? number - (GW_WINDOW_SLOTS - 1) : 0;
    pthread_mutex_lock(&window->mutex);
    for (size_t i = 0; i < GW_WINDOW_SLOTS; i++) {
        const slot *s = &window->slots[i];
        if (s->number < oldest || s->number > number)
            continue;
        for (size_t j = 0; j < GW_WINDOW_COUNTS; j++)
            view.counts[j] += s->counts[j];
        for (size_t t = 0; t < GW_WINDOW_TIMES; t++)
            for (size_t j = 0; j < BUCKETS; j++)
                all[t][j] += s->buckets[t][j];
    }
    pthread_mutex_unlock(&window->mutex);
    uint64_t begin = oldest * GW_WINDOW_SLOT_NS;
    if (begin < window->start_ns)
        begin = window->start_ns;
    view.seconds = now_ns > begin ? (double)(now_ns - begin) * 1e-9 : 0;
    for (size_t t = 0; t < GW_WINDOW_TIMES; t++) {
        uint64_t count = 0;
        for (size_t j = 0; j < BUCKETS; j++)
            count += all[t][j];
        view.times[t].count = count;
        if (!count)
            continue;
        view.times[t].p50 = value_at(all[t], (count + 1) / 2);
        view.times[t].p99 = value_at(all[t], count - count / 100);
    }
    return view;
}
