/* gw_bridge: see the header.
 *
 * A batch is one block list of copied events for one lane. The engine thread fills it between two
 * flushes and gives it away; the loop reads it once and frees it. Running out of memory while
 * copying loses texts, but never a DONE: every open port holds one small batch in reserve, which
 * then carries DONE with ENG_FINISH_ERROR. */
#include "gateway/bridge.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/thread.h"

#define BATCH_FIRST_BYTES 4096
/* A step's events of all sequences of one loop, logprobs included: a token with 20 alternatives is
 * 172 bytes. */
#define BATCH_BYTES_MAX (64u << 20)

typedef struct entry {
    struct entry *next;
    eng_event event;
} entry;

typedef struct gw_batch {
    gw_message message;
    base_arena *arena; /* NULL: a reserve batch, `reserve` is its only entry */
    entry *first, **last;
    entry reserve;
} gw_batch;

typedef struct tick {
    gw_message message;
    gw_lane *lane;
    atomic_bool posted; /* at most one is under way */
} tick;

struct gw_lane {
    gw_loop *loop;
    gw_bridge *bridge;
    gw_batch *batch; /* engine thread */
    gw_port *ports;  /* loop */
    tick tick;
    atomic_uint open;
};

struct gw_bridge {
    uint32_t tick_ms;
    atomic_uint open;       /* ports, all lanes */
    atomic_uint lane_count; /* lanes[i] is constant once i < lane_count */
    gw_lane *lanes[GW_LANES_MAX];
    pthread_t ticker;
    bool ticker_runs;
    pthread_mutex_t mutex; /* guards adding lanes and `stop` */
    pthread_cond_t wake;
    bool stop;
};

/* ---- engine to loop ---- */

static void batch_free(gw_batch *batch)
{
    if (batch->arena)
        base_arena_destroy(batch->arena);
    free(batch);
}

/* On the loop. */
static void batch_run(gw_message *message)
{
    gw_batch *batch = (gw_batch *)message;
    for (entry *e = batch->first; e; e = e->next) {
        gw_port *port = e->event.user;
        /* DONE frees the port with its owner. */
        port->event(port, &e->event);
    }
    batch_free(batch);
}

static gw_batch *batch_new(void)
{
    gw_batch *batch = calloc(1, sizeof(*batch));
    if (!batch)
        return NULL;
    batch->message.run = batch_run;
    batch->last = &batch->first;
    return batch;
}

static void *copy(base_arena *arena, const void *bytes, size_t count, size_t size)
{
    if (!bytes || !count)
        return NULL;
    void *to = base_arena_alloc(arena, count * size);
    if (to)
        memcpy(to, bytes, count * size);
    return to;
}

/* False if memory is used up; nothing was added then. */
static bool batch_add(gw_batch *batch, const eng_event *event)
{
    base_arena *arena = batch->arena;
    entry *e = base_arena_alloc(arena, sizeof(*e));
    if (!e)
        return false;
    e->next = NULL;
    e->event = *event;
    e->event.tokens = copy(arena, event->tokens, event->token_count, sizeof(*event->tokens));
    e->event.logprobs = copy(arena, event->logprobs, event->logprobs ? event->token_count : 0,
                             sizeof(*event->logprobs));
    e->event.prompt_logprobs = copy(arena, event->prompt_logprobs, event->prompt_logprob_count,
                                    sizeof(*event->prompt_logprobs));
    eng_part *parts = copy(arena, event->parts, event->part_count, sizeof(*event->parts));
    e->event.parts = parts;
    for (uint32_t i = 0; parts && i < event->part_count; i++)
        if (parts[i].length)
            parts[i].text = base_arena_copy(arena, event->parts[i].text, event->parts[i].length);
    if (base_arena_failed(arena))
        return false;
    *batch->last = e;
    batch->last = &e->next;
    return true;
}

/* DONE in spite of everything: its own message, after what the lane's batch holds already. */
static void post_reserve(gw_lane *lane, gw_port *port, const eng_event *event)
{
    if (lane->batch) {
        gw_loop_post(lane->loop, &lane->batch->message);
        lane->batch = NULL;
    }
    gw_batch *batch = port->last_resort;
    port->last_resort = NULL;
    batch->first = &batch->reserve;
    batch->reserve = (entry){.event = {.kind = ENG_EVENT_DONE,
                                       .id = event->id,
                                       .user = port,
                                       .usage = event->usage,
                                       .finish = ENG_FINISH_ERROR,
                                       .stop_index = -1}};
    base_fail(&batch->reserve.event.err, BASE_NOMEM, "no memory to carry the answer");
    gw_loop_post(lane->loop, &batch->message);
}

static void sink_event(void *ctx, const eng_event *event)
{
    (void)ctx;
    gw_port *port = event->user;
    gw_lane *lane = port->lane;
    if (!port->starved) {
        if (!lane->batch) {
            lane->batch = batch_new();
            if (lane->batch) {
                lane->batch->arena = base_arena_create(BATCH_FIRST_BYTES, BATCH_BYTES_MAX);
                if (!lane->batch->arena) {
                    free(lane->batch);
                    lane->batch = NULL;
                }
            }
        }
        if (lane->batch && batch_add(lane->batch, event))
            return;
        port->starved = true;
        /* The failed arena takes nothing more; others of this step start a new batch. */
        if (lane->batch) {
            gw_loop_post(lane->loop, &lane->batch->message);
            lane->batch = NULL;
        }
    }
    if (event->kind == ENG_EVENT_DONE)
        post_reserve(lane, port, event);
}

static void sink_flush(void *ctx)
{
    gw_bridge *bridge = ctx;
    uint32_t count = atomic_load_explicit(&bridge->lane_count, memory_order_acquire);
    for (uint32_t i = 0; i < count; i++) {
        gw_lane *lane = bridge->lanes[i];
        if (!lane->batch)
            continue;
        gw_batch *batch = lane->batch;
        lane->batch = NULL;
        gw_loop_post(lane->loop, &batch->message);
    }
}

eng_sink gw_bridge_sink(gw_bridge *bridge)
{
    return (eng_sink){sink_event, sink_flush, bridge};
}

/* ---- the ticker ---- */

/* On the loop. */
static void tick_run(gw_message *message)
{
    tick *t = (tick *)message;
    gw_lane *lane = t->lane;
    uint64_t now = base_now_ns();
    for (gw_port *port = lane->ports, *next; port; port = next) {
        next = port->next; /* the owner may close this port, no other */
        if (port->tick)
            port->tick(port, now);
    }
    /* Last: from here on the ticker may post again, and the bridge may go. */
    atomic_store_explicit(&t->posted, false, memory_order_release);
}

static void *ticker_main(void *ctx)
{
    gw_bridge *bridge = ctx;
    base_thread_enter(BASE_THREAD_OTHER, "gw-ticker");
    pthread_mutex_lock(&bridge->mutex);
    while (!bridge->stop) {
        if (!atomic_load(&bridge->open)) {
            pthread_cond_wait(&bridge->wake, &bridge->mutex);
            continue;
        }
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += (long)(bridge->tick_ms % 1000) * 1000000;
        until.tv_sec += bridge->tick_ms / 1000 + until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&bridge->wake, &bridge->mutex, &until);
        uint32_t count = bridge->stop ? 0 : atomic_load(&bridge->lane_count);
        for (uint32_t i = 0; i < count; i++) {
            gw_lane *lane = bridge->lanes[i];
            if (atomic_load(&lane->open) && !atomic_exchange(&lane->tick.posted, true))
                gw_loop_post(lane->loop, &lane->tick.message);
        }
    }
    pthread_mutex_unlock(&bridge->mutex);
    return NULL;
}

/* ---- ports ---- */

static base_code join_lane(gw_port *port, gw_lane *lane, base_err *err)
{
    gw_bridge *bridge = lane->bridge;
    gw_batch *reserve = batch_new();
    if (!reserve)
        return base_fail(err, BASE_NOMEM, "no memory for a request");
    port->lane = lane;
    port->starved = false;
    port->last_resort = reserve;
    atomic_fetch_add(&lane->open, 1);
    if (atomic_fetch_add(&bridge->open, 1) == 0 && bridge->ticker_runs) {
        pthread_mutex_lock(&bridge->mutex);
        pthread_cond_signal(&bridge->wake);
        pthread_mutex_unlock(&bridge->mutex);
    }
    return BASE_OK;
}

base_code gw_port_open(gw_bridge *bridge, gw_port *port, gw_loop *loop, base_err *err)
{
    uint32_t count = atomic_load_explicit(&bridge->lane_count, memory_order_acquire);
    gw_lane *lane = NULL;
    for (uint32_t i = 0; i < count && !lane; i++)
        if (bridge->lanes[i]->loop == loop)
            lane = bridge->lanes[i];
    if (!lane) {
        /* Only this loop's thread makes this loop's lane, so it cannot appear twice. */
        lane = calloc(1, sizeof(*lane));
        if (!lane)
            return base_fail(err, BASE_NOMEM, "no memory for a lane");
        lane->loop = loop;
        lane->bridge = bridge;
        lane->tick.message.run = tick_run;
        lane->tick.lane = lane;
        pthread_mutex_lock(&bridge->mutex);
        count = atomic_load(&bridge->lane_count);
        if (count < GW_LANES_MAX) {
            bridge->lanes[count] = lane;
            atomic_store_explicit(&bridge->lane_count, count + 1, memory_order_release);
        }
        pthread_mutex_unlock(&bridge->mutex);
        if (count >= GW_LANES_MAX) {
            free(lane);
            return base_fail(err, BASE_FULL, "more than %d loops", GW_LANES_MAX);
        }
    }
    base_code code = join_lane(port, lane, err);
    if (code)
        return code;
    port->ticks = true;
    port->prev = NULL;
    port->next = lane->ports;
    if (port->next)
        port->next->prev = port;
    lane->ports = port;
    return BASE_OK;
}

base_code gw_port_join(gw_port *port, gw_port *open, base_err *err)
{
    port->ticks = false;
    return join_lane(port, open->lane, err);
}

void gw_port_close(gw_port *port)
{
    gw_lane *lane = port->lane;
    if (port->prev)
        port->prev->next = port->next;
    else if (port->ticks)
        lane->ports = port->next;
    if (port->next)
        port->next->prev = port->prev;
    if (port->last_resort)
        batch_free(port->last_resort);
    port->last_resort = NULL;
    port->lane = NULL;
    atomic_fetch_sub(&lane->open, 1);
    atomic_fetch_sub(&lane->bridge->open, 1);
}

uint32_t gw_bridge_open_ports(const gw_bridge *bridge)
{
    return atomic_load(&((gw_bridge *)bridge)->open);
}

/* ---- the whole ---- */

base_code gw_bridge_create(gw_bridge **out, uint32_t tick_ms, base_err *err)
{
    gw_bridge *bridge = calloc(1, sizeof(*bridge));
    if (!bridge)
        return base_fail(err, BASE_NOMEM, "no memory for the bridge");
    bridge->tick_ms = tick_ms;
    pthread_mutex_init(&bridge->mutex, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&bridge->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    if (tick_ms) {
        if (pthread_create(&bridge->ticker, NULL, ticker_main, bridge) != 0) {
            gw_bridge_destroy(bridge);
            return base_fail(err, BASE_IO, "the system gives no thread for the ticker");
        }
        bridge->ticker_runs = true;
    }
    *out = bridge;
    return BASE_OK;
}

static void stop_ticker(gw_bridge *bridge)
{
    if (!bridge->ticker_runs)
        return;
    pthread_mutex_lock(&bridge->mutex);
    bridge->stop = true;
    pthread_cond_signal(&bridge->wake);
    pthread_mutex_unlock(&bridge->mutex);
    pthread_join(bridge->ticker, NULL);
    bridge->ticker_runs = false;
}

/* Polls: this happens once a process. */
static bool wait_for(gw_bridge *bridge, bool (*quiet)(gw_bridge *bridge), uint64_t until)
{
    while (!quiet(bridge)) {
        if (base_now_ns() >= until)
            return false;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return true;
}

static bool no_ports(gw_bridge *bridge)
{
    return !atomic_load(&bridge->open);
}

static bool no_ticks(gw_bridge *bridge)
{
    uint32_t count = atomic_load(&bridge->lane_count);
    for (uint32_t i = 0; i < count; i++)
        if (atomic_load_explicit(&bridge->lanes[i]->tick.posted, memory_order_acquire))
            return false;
    return true;
}

bool gw_bridge_drain(gw_bridge *bridge, uint32_t timeout_ms)
{
    uint64_t until = base_now_ns() + (uint64_t)timeout_ms * 1000000;
    bool drained = wait_for(bridge, no_ports, until);
    stop_ticker(bridge);
    return drained && wait_for(bridge, no_ticks, until + 1000000000);
}

void gw_bridge_destroy(gw_bridge *bridge)
{
    if (!bridge)
        return;
    stop_ticker(bridge);
    uint32_t count = atomic_load(&bridge->lane_count);
    for (uint32_t i = 0; i < count; i++) {
        if (bridge->lanes[i]->batch)
            batch_free(bridge->lanes[i]->batch);
        free(bridge->lanes[i]);
    }
    pthread_cond_destroy(&bridge->wake);
    pthread_mutex_destroy(&bridge->mutex);
    free(bridge);
}
