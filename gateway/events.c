/* gw_events: see the header. A listener belongs to its loop but for its ring, which the mutex
 * guards; a posted message keeps it alive until the loop has run it. */
#include "gateway/events.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/api_error.h"
#include "gateway/bridge.h"

#define KEEPALIVE_NS 15000000000ull

typedef struct event {
    atomic_uint refs;
    size_t length;
    char bytes[];
} event;

typedef struct listener {
    gw_port port; /* first member: for its ticks */
    gw_message message;
    struct listener *prev, *next;
    gw_app *app;
    gw_exchange *exchange; /* NULL once it is over. Loop */
    gw_loop *loop;
    uint64_t written_ns; /* loop */
    /* The mutex of gw_events guards what follows. */
    event *ring[GW_EVENTS_WAITING];
    uint32_t head, count;
    uint64_t lost; /* and not told yet */
    bool posted;
} listener;

struct gw_events {
    pthread_mutex_t mutex; /* guards what follows */
    listener *first;
    uint32_t listeners;
    uint64_t posted, lost;
    atomic_bool heard;
};

base_code gw_events_create(gw_events **out, base_err *err)
{
    gw_events *events = calloc(1, sizeof *events);
    if (!events)
        return base_fail(err, BASE_NOMEM, "no memory for the events");
    pthread_mutex_init(&events->mutex, NULL);
    *out = events;
    return BASE_OK;
}

void gw_events_destroy(gw_events *events)
{
    if (!events)
        return;
    pthread_mutex_destroy(&events->mutex);
    free(events);
}

bool gw_events_heard(gw_events *events)
{
    return atomic_load_explicit(&events->heard, memory_order_relaxed);
}

static void unref(event *e)
{
    if (e && atomic_fetch_sub(&e->refs, 1) == 1)
        free(e);
}

static event *make(const char *name, uint64_t id, const base_buf *data)
{
    char head[96];
    int length =
        snprintf(head, sizeof head, "id: %llu\nevent: %s\ndata: ", (unsigned long long)id, name);
    event *e = data->failed ? NULL : malloc(sizeof *e + (size_t)length + data->length + 2);
    if (!e)
        return NULL;
    e->length = (size_t)length + data->length + 2;
    memcpy(e->bytes, head, (size_t)length);
    memcpy(e->bytes + length, data->data, data->length);
    memcpy(e->bytes + length + data->length, "\n\n", 2);
    atomic_store(&e->refs, 1);
    return e;
}

/* With the mutex. */
static void push(gw_events *events, listener *l, event *e)
{
    if (!e || l->count == GW_EVENTS_WAITING) {
        l->lost++;
        events->lost++;
    }
    if (e && l->count == GW_EVENTS_WAITING) {
        unref(l->ring[l->head]);
        l->head = (l->head + 1) % GW_EVENTS_WAITING;
        l->count--;
    }
    if (e) {
        atomic_fetch_add(&e->refs, 1);
        l->ring[(l->head + l->count++) % GW_EVENTS_WAITING] = e;
    }
    if (l->posted)
        return;
    l->posted = true;
    gw_loop_post(l->loop, &l->message);
}

void gw_events_post(gw_events *events, const char *name, const base_buf *data)
{
    pthread_mutex_lock(&events->mutex);
    events->posted++;
    event *e = events->first ? make(name, events->posted, data) : NULL;
    for (listener *l = events->first; l; l = l->next)
        push(events, l, e);
    pthread_mutex_unlock(&events->mutex);
    unref(e);
}

gw_events_stats gw_events_get_stats(gw_events *events)
{
    pthread_mutex_lock(&events->mutex);
    gw_events_stats stats = {events->listeners, events->posted, events->lost};
    pthread_mutex_unlock(&events->mutex);
    return stats;
}

/* ---- listeners, on their loop ---- */

/* Its exchange is over. */
static void leave(listener *l)
{
    gw_events *events = l->app->events;
    l->exchange = NULL;
    gw_port_close(&l->port);
    pthread_mutex_lock(&events->mutex);
    *(l->prev ? &l->prev->next : &events->first) = l->next;
    if (l->next)
        l->next->prev = l->prev;
    atomic_store(&events->heard, --events->listeners > 0);
    while (l->count) {
        unref(l->ring[l->head]);
        l->head = (l->head + 1) % GW_EVENTS_WAITING;
        l->count--;
    }
    bool posted = l->posted;
    pthread_mutex_unlock(&events->mutex);
    if (!posted)
        free(l); /* else its message does */
}

static void on_gone(void *ctx)
{
    leave(ctx);
}

/* The next event, which is the caller's; `*lost`: how many went before it. NULL: none waits. */
static event *pop(listener *l, uint64_t *lost)
{
    gw_events *events = l->app->events;
    event *e = NULL;
    pthread_mutex_lock(&events->mutex);
    *lost = l->lost;
    l->lost = 0;
    if (l->count) {
        e = l->ring[l->head];
        l->head = (l->head + 1) % GW_EVENTS_WAITING;
        l->count--;
    }
    pthread_mutex_unlock(&events->mutex);
    return e;
}

static void pump(listener *l)
{
    while (!gw_stream_paused(l->exchange)) {
        uint64_t lost;
        char text[64];
        event *e = pop(l, &lost);
        if (lost) {
            int length = snprintf(text, sizeof text, "event: lost\ndata: {\"count\":%llu}\n\n",
                                  (unsigned long long)lost);
            gw_stream_write(l->exchange, text, (size_t)length);
        }
        if (e)
            gw_stream_write(l->exchange, e->bytes, e->length);
        if (e || lost)
            l->written_ns = base_now_ns();
        unref(e);
        if (!e)
            return;
    }
}

static void on_message(gw_message *message)
{
    listener *l = (listener *)((char *)message - offsetof(listener, message));
    pthread_mutex_lock(&l->app->events->mutex);
    l->posted = false;
    pthread_mutex_unlock(&l->app->events->mutex);
    if (l->exchange)
        pump(l);
    else
        free(l);
}

static void on_drained(void *ctx)
{
    pump(ctx);
}

static void on_tick(gw_port *port, uint64_t now)
{
    static const char comment[] = ": still here\n\n";
    listener *l = (listener *)port;
    if (atomic_load(&l->app->draining)) {
        gw_exchange *exchange = l->exchange;
        leave(l);
        gw_stream_end(exchange);
        return;
    }
    if (now < l->written_ns + KEEPALIVE_NS || gw_stream_paused(l->exchange))
        return;
    l->written_ns = now;
    gw_stream_write(l->exchange, comment, sizeof comment - 1);
}

static bool join(gw_events *events, listener *l)
{
    pthread_mutex_lock(&events->mutex);
    bool room = events->listeners < GW_EVENTS_LISTENERS;
    if (room) {
        l->next = events->first;
        if (l->next)
            l->next->prev = l;
        events->first = l;
        events->listeners++;
        atomic_store(&events->heard, true);
    }
    pthread_mutex_unlock(&events->mutex);
    return room;
}

void gw_events_listen(gw_app *app, gw_exchange *exchange)
{
    static const gw_header headers[] = {{"content-type", "text/event-stream; charset=utf-8"},
                                        {"cache-control", "no-cache, no-transform"},
                                        {"x-accel-buffering", "no"}};
    base_err err = BASE_ERR_INIT;
    listener *l = calloc(1, sizeof *l);
    if (!l) {
        base_fail(&err, BASE_NOMEM, "no memory for a listener");
        gw_error_respond_err(exchange, &err);
        return;
    }
    l->port.tick = on_tick;
    l->message.run = on_message;
    l->app = app;
    l->exchange = exchange;
    l->loop = gw_exchange_loop(exchange);
    l->written_ns = base_now_ns();
    if (gw_port_open(app->bridge, &l->port, l->loop, &err)) {
        free(l);
        gw_error_respond_err(exchange, &err);
        return;
    }
    /* Before it joins: whatever is posted from then on is behind the status line. */
    if (!join(app->events, l)) {
        gw_port_close(&l->port);
        free(l);
        gw_error_respond(exchange, 429, "rate_limit_error", "too_many_listeners", NULL,
                         "too many listen to the events already");
        return;
    }
    gw_exchange_set_handler(exchange, l, on_gone, on_drained);
    gw_stream_begin(exchange, 200, headers, sizeof headers / sizeof *headers);
    gw_stream_write(exchange, ": events\n\n", 10);
}
