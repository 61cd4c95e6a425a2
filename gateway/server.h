/* gw_server: sockets in, exchanges out. With server.c the only file that knows libh2o.
 *
 * One loop (h2o evloop) a thread, up to conf->server_loops; each has the public listener, and the
 * admin listener lives on loop 0. HTTP/1.1, h2c by prior knowledge and h2 over TLS 1.3 (ALPN) give
 * the same exchange. An exchange belongs to its loop's thread from accept to end; other threads
 * reach it only through gw_loop_post. libh2o frees its request whenever the client leaves, so
 * nothing here hands out an h2o pointer. */
#pragma once
#include <netinet/in.h>

#include "engine/base/err.h"

typedef struct gw_server gw_server;
typedef struct gw_loop gw_loop;
typedef struct gw_exchange gw_exchange;
struct gw_conf;

/* A message to a loop: intrusive, owned by the poster until `run` is called on the loop's thread,
 * exactly once. */
typedef struct gw_message {
    struct gw_message *next;
    void (*run)(struct gw_message *message);
} gw_message;
/* Thread: any. Messages of one poster arrive in order. */
void gw_loop_post(gw_loop *loop, gw_message *message);

typedef enum gw_listener { GW_LISTENER_PUBLIC, GW_LISTENER_ADMIN } gw_listener;

/* Reading the request: valid until the exchange ends (body until then too). Thread: the loop's. */
const char *gw_exchange_method(const gw_exchange *exchange);
const char *gw_exchange_path(const gw_exchange *exchange);  /* normalised, without the query */
const char *gw_exchange_query(const gw_exchange *exchange); /* without '?', "" if none */
/* Value of a header by lower-case name, NULL if absent; terminated. */
const char *gw_exchange_header(gw_exchange *exchange, const char *name);
const char *gw_exchange_body(const gw_exchange *exchange, size_t *length);
const char *gw_exchange_authority(const gw_exchange *exchange); /* Host or :authority, "" if none */
const char *gw_exchange_id(
    const gw_exchange *exchange); /* "req_" and 24 hex digits: x-request-id of the answer */
const char *gw_exchange_remote(const gw_exchange *exchange); /* address text, or: */
#define GW_REMOTE_UNIX "unix"
gw_listener
gw_exchange_listener(const gw_exchange *exchange); /* the TLS port is GW_LISTENER_PUBLIC too */
/* A static text that the exchange carries to `ended`: the route, for the log and the metrics. "" at
 * first. */
void gw_exchange_set_label(gw_exchange *exchange, const char *label);
const char *gw_exchange_label(const gw_exchange *exchange);
int gw_exchange_http_major(const gw_exchange *exchange); /* 1 or 2 */
gw_loop *gw_exchange_loop(const gw_exchange *exchange);

/* Context of a handler. `gone` is called once, on the loop's thread, when the exchange is over
 * before gw_respond or gw_stream_end was called (client left: RST, connection lost, half-closed
 * HTTP/1.1, write stall); the exchange is dead after it returns. `drained` is called when a paused
 * stream may be written again. Either may be NULL. */
void gw_exchange_set_handler(gw_exchange *exchange, void *ctx, void (*gone)(void *ctx),
                             void (*drained)(void *ctx));

typedef struct gw_header {
    const char *name, *value; /* lower-case name; copied */
} gw_header;

/* Goes out with the answer, besides what gw_respond or gw_stream_begin are given; copied. */
void gw_exchange_add_header(gw_exchange *exchange, const char *name, const char *value);

/* Whole answers. Adds x-request-id; `body` is copied. Ends the exchange. Thread: the loop's. */
void gw_respond(gw_exchange *exchange, int status, const gw_header *headers, size_t header_count,
                const void *body, size_t length);
/* Streams: the status line and headers go out at once. Bytes are copied; each write is flushed as
 * its own DATA frame where the protocol has them. gw_stream_paused: more than the high-water mark
 * is waiting for the client. */
void gw_stream_begin(gw_exchange *exchange, int status, const gw_header *headers,
                     size_t header_count);
void gw_stream_write(gw_exchange *exchange, const void *bytes, size_t length);
bool gw_stream_paused(const gw_exchange *exchange);
void gw_stream_end(gw_exchange *exchange);
/* Cuts the connection's stream short (RST_STREAM or close): for streams that cannot end well. */
void gw_stream_abort(gw_exchange *exchange);

/* Called for every complete request, on the loop's thread; must answer now or keep the exchange and
 * answer later. */
typedef void (*gw_handler)(void *ctx, gw_exchange *exchange);

/* How an exchange went, for the log and the metrics. */
typedef struct gw_exchange_end {
    int status; /* 0: none was sent */
    bool gone;  /* the client left before the answer was handed over */
    uint64_t body_bytes, sent_bytes;
    uint64_t duration_ns; /* request complete to the end */
} gw_exchange_end;

/* A request over HTTP/1.1 that is not whole yet: its head and its body, or as much of them as there
 * is; a chunked body without its frames. Valid during the call. */
typedef struct gw_arrival {
    gw_loop *loop;
    const char *bytes, *remote; /* address text */
    size_t length;
} gw_arrival;

typedef struct gw_server_options {
    const struct gw_conf *conf;
    const struct gw_inherited *inherited; /* sockets to take over; NULL: none. Read by create */
    gw_handler handler;
    /* What is on its way, when more of it came, and for as long as this returns something a few
     * times a second; on the loop's thread. What it returns it is given the next time, NULL at
     * first; `arrived` is called with it, if it is not NULL, once the exchange that the request
     * became is over, or the client left before. Nothing of this is for HTTP/2, and it may be that
     * a request is whole before it was seen. Both may be NULL. */
    void *(*arriving)(void *ctx, const gw_arrival *arrival, void *upload);
    void (*arrived)(void *ctx, void *upload);
    /* Called once for every exchange, on the loop's thread, as the last thing; may only read it.
     * May be NULL. */
    void (*ended)(void *ctx, gw_exchange *exchange, const gw_exchange_end *end);
    void *ctx;
} gw_server_options;

/* Binds and listens (BASE_IO names address and reason); gw_server_start begins to accept. */
base_code gw_server_create(gw_server **out, const gw_server_options *options, base_err *err);
/* BASE_NOMEM: the system gives no thread; nothing was accepted, and destroy is all that is left. */
base_code gw_server_start(gw_server *server, base_err *err);
/* The address that was bound, "127.0.0.1:8080"; port 0 is replaced by what the system chose. NULL
 * if that listener is off. */
const char *gw_server_address(const gw_server *server, gw_listener listener);
const char *gw_server_tls_address(const gw_server *server); /* as above, of the TLS port */
uint32_t gw_server_loop_count(const gw_server *server);
/* Reads certificate, key and client CA again: connections from now on have the new ones, those that
 * are open keep theirs. If they do not fit all stays as it is, and `err` names the file. Nothing
 * without TLS. */
base_code gw_server_renew_tls(gw_server *server, base_err *err);
/* Stops accepting, tells clients (GOAWAY, idle HTTP/1.1 connections closed) and waits for running
 * exchanges until `deadline_ms`; false if some still run. Blocks. */
bool gw_server_drain(gw_server *server, uint32_t deadline_ms);
/* After drain: gives what still runs `grace_ms` to end, then closes all. Blocks. */
void gw_server_cut(gw_server *server, uint32_t grace_ms);
/* Runs the messages that still wait, then ends the loops; nobody may post from here on. NULL is
 * fine. */
void gw_server_destroy(gw_server *server);

typedef struct gw_server_stats {
    uint64_t connections, requests, gone, kicked;
    uint32_t open_connections, open_exchanges;
} gw_server_stats;
gw_server_stats gw_server_get_stats(const gw_server *server); /* thread: any */
