/* gw_app: what every handler needs, made by main.c in order and taken down in reverse. Nothing in
 * it changes after start except inside the modules themselves. */
#pragma once
#include "engine/engine.h"
#include "gateway/server.h"

struct gw_conf;
typedef struct gw_ledger gw_ledger;
typedef struct gw_tenants gw_tenants;
typedef struct gw_metrics gw_metrics;
typedef struct gw_workers gw_workers;
typedef struct gw_bridge gw_bridge;
typedef struct gw_seal gw_seal;
typedef struct gw_locks gw_locks;
typedef struct gw_tapes gw_tapes;
typedef struct gw_appends gw_appends;
typedef struct gw_pins gw_pins;
typedef struct gw_live gw_live;
typedef struct gw_events gw_events;
typedef struct gw_cookies gw_cookies;
typedef struct gw_otlp gw_otlp;

typedef struct gw_app {
    const struct gw_conf *conf;
    eng_engine *engine;
    gw_ledger *ledger;
    gw_seal *seal;
    gw_tenants *tenants;
    gw_metrics *metrics;
    gw_workers *workers;
    gw_bridge *bridge;
    gw_locks *locks;
    gw_tapes *tapes; /* streams that others may read, answers kept for retries */
    gw_appends *appends;
    gw_pins *pins;
    gw_events *events; /* for the operator, as the next two */
    gw_live *live;
    gw_cookies *cookies;
    gw_otlp *otlp; /* NULL: no endpoint is set */
    gw_server *server;
    int64_t started_ms;   /* Unix time */
    _Atomic int draining; /* the server stops */
    _Atomic int paused;   /* by the operator: no new work for now */
} gw_app;
