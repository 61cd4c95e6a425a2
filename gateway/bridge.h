/* gw_bridge: the crossing between the engine thread and the loops; nothing else crosses.
 *
 * Engine to loop: the sink copies every event (the engine's memory is borrowed) into one batch a
 * loop, and the flush after a step posts each batch once: one wakeup a loop a step. Loop to engine:
 * eng_submit and eng_cancel, which any thread may call. A ticker thread posts a tick to the loops
 * that have open ports, so that silent streams can be kept alive.
 *
 * Lifetime: a port is opened and closed on its loop and must stay until its DONE was delivered.
 * Shutdown: gw_server_drain, gw_server_cut, gw_bridge_drain (nothing is posted to a loop
 * afterwards), gw_server_destroy, engine, gw_bridge_destroy. */
#pragma once
#include "engine/base/clock.h"
#include "gateway/app.h"

typedef struct gw_lane gw_lane; /* what the bridge keeps for one loop */

/* One request's end of the bridge: part of its owner, eng_request.user. Fields above the line are
 * the owner's. */
typedef struct gw_port {
    /* On the loop, in order; the event and all it points to live until it returns. */
    void (*event)(struct gw_port *port, const eng_event *event);
    /* On the loop, about every tick_ms while the port is open; `now` is base_now_ns. May be NULL.
     * May close the port. */
    void (*tick)(struct gw_port *port, uint64_t now);
    /* ---- */
    gw_lane *lane;
    struct gw_port *prev, *next; /* the lane's list; loop */
    bool ticks;                  /* it stands in that list */
    bool starved;                /* engine thread: an event could not be copied, DONE will say so */
    struct gw_batch *last_resort; /* for a DONE without memory; owned until used */
} gw_port;

/* `tick_ms` 0: no ticker. */
base_code gw_bridge_create(gw_bridge **out, uint32_t tick_ms, base_err *err);
void gw_bridge_destroy(gw_bridge *bridge); /* NULL is fine; all ports are closed */
/* For eng_options.sink; the bridge outlives the engine. */
eng_sink gw_bridge_sink(gw_bridge *bridge);
/* Waits until every port is closed, then stops the ticker. False if that did not happen within
 * `timeout_ms`: the engine hangs, and no loop may be freed. Thread: main, loops still running. */
bool gw_bridge_drain(gw_bridge *bridge, uint32_t timeout_ms);

/* BASE_NOMEM; BASE_FULL past GW_LANES_MAX loops. Thread: `loop`'s, as for close. */
#define GW_LANES_MAX 256
base_code gw_port_open(gw_bridge *bridge, gw_port *port, gw_loop *loop, base_err *err);
/* One more end without ticks, at the loop of an open port. Thread: any, as long as that one stays
 * open. */
base_code gw_port_join(gw_port *port, gw_port *open, base_err *err);
void gw_port_close(gw_port *port);
uint32_t gw_bridge_open_ports(const gw_bridge *bridge); /* thread: any */
