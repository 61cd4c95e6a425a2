/* The transport on libh2o 2.2.5. What that library leaves open is closed here; each such place says
 * "libh2o:".
 *
 * Owns: listeners, loops, connections, exchanges. A connection is a `peer` hung on the socket's
 * on_close; an exchange is memory in the request's pool, whose destructor is the one end of every
 * request, whatever the way out (answered, reset, connection lost, drained).
 *
 * An exchange's output has two buffers: `pending` (what the handler wrote) and `flight` (what
 * libh2o holds until it calls proceed; HTTP/1.1 sends it from there without copying). flush() moves
 * bytes from the first to the second only when nothing is in flight.
 *
 *   open --respond, stream_end--> over --libh2o frees the request--> (gone from the list)
 *     \--client lost, stalled, reset, aborted: `gone` is called--> over
 *
 * Invariants:
 *  1. Everything libh2o made on a loop's thread (buffers, pools, sockets) is touched and freed on
 * that thread only.
 *  2. After h2o_send with FINAL or ERROR the exchange may already be freed: nothing follows it.
 *  3. Writes start inside libh2o's callbacks (handler, receiver, timer), never after h2o_evloop_run
 * returned: the loop would sleep before it finishes them. Every TICK_MS a loop looks at its peers
 * and exchanges: idle ones, slow uploads, stalled writers, bytes of bodies. */
#include "gateway/server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h> /* the whole of struct tcp_info; netinet/tcp.h has its first half */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <h2o.h>
#include <h2o/http1.h>
#include <h2o/http2.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/thread.h"
#include "gateway/api_error.h"
#include "gateway/conf.h"
#include "gateway/inherit.h"
#include "gateway/listen.h"
#include "gateway/tls.h"

#define MS_NS UINT64_C(1000000)
#define TICK_MS 100
#define SLICE_MS 1
#define SLICE_PEERS 256               /* some 2 us each, most of it the kernel's: tcp_info_of */
#define STREAM_HIGH_BYTES (64u << 10) /* gw_stream_paused above */
#define STREAM_LOW_BYTES (32u << 10)  /* `drained` at or below */
#define STREAM_MAX_BYTES (8u << 20)   /* a handler that does not wait loses its stream here */
#define RECORD_MAX                                                                                 \
    32 /* records that still get a DATA frame each; more wait: they are sent as one */
#define RECORD_BYTES_MAX (16u << 10)
#define BODY_SLACK_BYTES (16u << 20) /* see create_config */
#define BODY_SMALL_BYTES (64u << 10) /* bodies up to here are not refused for the sum of all */
#define UPLOAD_ALLOWANCE_BYTES (256u << 10)
#define ADMIN_PEERS_MAX 64 /* operators get in when the public port is full */
#define RESET_WINDOW_NS (10000 * MS_NS)
#define RESET_MAX 200 /* abandoned requests of one peer within the window */
#define ACCEPT_BATCH 16
#define LISTENER_MAX 3
#define ID_BYTES 12

typedef enum listener_kind { LISTEN_PUBLIC, LISTEN_TLS, LISTEN_ADMIN } listener_kind;

typedef struct peer {
    struct peer *next, **link;
    gw_loop *loop;
    h2o_socket_t *sock;
    gw_listener listener;
    SSL_CTX *tls;                  /* a reference; NULL: clear text */
    char remote[INET6_ADDRSTRLEN]; /* "" before the first request */
    struct gw_exchange *exchanges; /* HTTP/1.1 has at most one */
    uint32_t exchange_count;
    uint32_t stuck_count; /* exchanges that are over but cannot leave before the client opens its
                             window */
    int http_major;       /* 0 before the first request */
    bool watched;         /* its fd is in loop->watch_fd */
    bool half_closed;     /* the client will send no more (watched peers) */
    bool kicked;          /* shut down by us; its requests are not answered any more */
    uint64_t received;    /* bytes from the client, as of the last tick */
    uint64_t completed;   /* those that belong to complete requests, about */
    uint64_t at_boundary; /* `received` at boundary_ns, as the next tick saw it */
    bool boundary_new;    /* that tick is still to come */
    uint64_t moved_ns;    /* when `received` changed */
    uint64_t boundary_ns; /* accept, last request complete, or last exchange over */
    size_t body_bytes;    /* of its exchanges */
    size_t uploading;     /* bytes that libh2o holds of incomplete requests, about */
    size_t waiting;       /* bytes of answers that it did not take yet */
    bool head_done;       /* HTTP/1.1: the blank line of the request on its way was seen */
    uint64_t head_ns;     /* when its first bytes were; 0: there are none */
    uint64_t reset_window_ns;
    uint32_t resets;
    void *upload;       /* of options.arriving, for the request that is on its way */
    size_t upload_seen; /* bytes of it that were shown */
} peer;

struct gw_loop {
    gw_server *server;
    uint32_t index;
    pthread_t thread;
    h2o_evloop_t *evloop;
    h2o_context_t ctx;
    h2o_accept_ctx_t accept[LISTENER_MAX];
    h2o_socket_t *listen[LISTENER_MAX];
    int watch_fd; /* epoll of HTTP/1.1 sockets whose reading libh2o has stopped */
    h2o_socket_t *watch;
    h2o_timeout_t tick_timeout, slice_timeout;
    h2o_timeout_entry_t tick_entry; /* linked to one of them */
    uint64_t now_ns;
    peer *peers;
    peer *next_peer; /* where the round goes on; NULL between rounds */
    size_t round_held,
        round_waiting; /* of the round's peers so far: what `held`, `waiting` become */
    bool accept_paused, draining, goaway_sent, quit;
    uint64_t goaway_deadline_ns;
    size_t held;    /* bytes of bodies, whole or on their way, as of the last tick */
    size_t waiting; /* and of answers that wait for their clients */
    unsigned char ids[64 * ID_BYTES];
    size_t id_next;

    h2o_multithread_receiver_t receiver;
    h2o_multithread_message_t wake;
    pthread_mutex_t post_lock;
    gw_message *posts, **posts_tail; /* guarded by post_lock */
    bool wake_sent;                  /* guarded by post_lock */
};

typedef struct handler_of_h2o {
    h2o_handler_t super;
    gw_server *server;
} handler_of_h2o;

struct gw_server {
    const struct gw_conf *conf;
    gw_server_options options;
    h2o_globalconf_t config;
    SSL_CTX *tls;
    gw_listen listeners[LISTENER_MAX];
    gw_loop *loops;
    uint32_t loop_count;
    bool started;
    sem_t opened;         /* posted by each loop that has its receiver */
    pthread_mutex_t gate; /* held by start until all have */
    _Atomic uint64_t connections, requests, gone, kicked;
    _Atomic uint32_t open_connections[2]; /* by gw_listener */
    _Atomic uint32_t open_exchanges;
    _Atomic uint64_t held, waiting; /* of all loops */
    _Atomic uint32_t
        goaway_pending; /* draining loops that have not said so to their HTTP/2 clients yet */
    _Atomic uint64_t goaway_ns; /* when the last one did */
};

struct gw_exchange {
    gw_exchange *next, **link; /* of the peer */
    peer *peer;
    gw_loop *loop;
    h2o_req_t *req;
    h2o_generator_t generator;
    void *ctx;
    void (*on_gone)(void *);
    void (*on_drained)(void *);
    const char *label;
    char *method, *path, *query, *authority;
    char id[5 + 2 * ID_BYTES];
    bool over, gone, started, stream, ending, in_flight, paused, doomed, stuck;
    base_buf pending, flight;
    uint32_t record_end[RECORD_MAX]; /* ends of records within pending; record_count > RECORD_MAX:
                                        not kept */
    uint32_t record_count;
    uint64_t given_bytes; /* of the answer's body, handed to libh2o */
    void *upload;         /* the peer's while it was on its way */
    uint64_t began_ns;
    uint64_t progress, progress_ns; /* of the write in flight */
};

/* ---- the wire, seen from outside libh2o ---- */

static void shut(peer *p, int how)
{
    shutdown(h2o_socket_get_fd(p->sock), how);
}

static void kick(peer *p, const char *reason)
{
    if (p->kicked)
        return;
    p->kicked = true;
    atomic_fetch_add_explicit(&p->loop->server->kicked, 1, memory_order_relaxed);
    base_log(BASE_LOG_INFO, "peer_closed reason=%s exchanges=%u uploading=%zu", reason,
             p->exchange_count, p->uploading);
    shut(p, SHUT_RDWR);
}

/* All zeros for a Unix socket. */
static struct tcp_info tcp_info_of(peer *p)
{
    struct tcp_info info;
    socklen_t length = sizeof info;
    memset(&info, 0, sizeof info);
    getsockopt(h2o_socket_get_fd(p->sock), IPPROTO_TCP, TCP_INFO, &info, &length);
    return info;
}

/* Bytes that came, as far as can be told: the kernel counts none for a Unix socket, where what
 * libh2o has not used up yet moves too, except for parts of an HTTP/2 body. */
static uint64_t received_of(peer *p)
{
    uint64_t received = tcp_info_of(p).tcpi_bytes_received;
    return received != 0 ? received : p->sock->input->size;
}

/* Bytes of the write in flight that the client took, or anything else that changes with them. */
static uint64_t taken_of(peer *p)
{
    uint64_t acked = tcp_info_of(p).tcpi_bytes_acked;
    int queued = 0;
    if (acked == 0)
        ioctl(h2o_socket_get_fd(p->sock), TIOCOUTQ, &queued);
    return acked != 0 ? acked : (uint64_t)queued;
}

/* ---- exchanges ---- */

static bool is_http2(const gw_exchange *exchange)
{
    return exchange->req->version >= 0x200;
}

static void report_gone(gw_exchange *exchange)
{
    if (exchange->over)
        return;
    exchange->over = true;
    exchange->gone = true;
    atomic_fetch_add_explicit(&exchange->loop->server->gone, 1, memory_order_relaxed);
    if (exchange->on_gone != NULL)
        exchange->on_gone(exchange->ctx);
}

static void count_reset(peer *p)
{
    uint64_t now = p->loop->now_ns;
    if (now - p->reset_window_ns > RESET_WINDOW_NS) {
        p->reset_window_ns = now;
        p->resets = 0;
    }
    /* libh2o: CVE-2023-44487 is not fixed in it. A stream may be opened and reset for ever; each
     * one costs a whole request. */
    if (++p->resets > RESET_MAX)
        kick(p, "resets");
}

static void mark_boundary(peer *p)
{
    p->boundary_ns = p->loop->now_ns;
    p->boundary_new = true;
    p->head_done = false;
    p->head_ns = 0;
}

static void end_upload(const gw_server *server, void *upload)
{
    if (upload != NULL)
        server->options.arrived(server->options.ctx, upload);
}

static void on_exchange_dispose(void *data)
{
    gw_exchange *exchange = data;
    gw_server *server = exchange->loop->server;
    peer *p = exchange->peer;
    /* bytes_sent counts what was framed for the wire, so an answer that was given at once and
     * thrown away by a reset in the same read is seen too. */
    bool cut = !exchange->over || exchange->req->bytes_sent < exchange->given_bytes;
    report_gone(exchange);
    if (server->options.ended != NULL) {
        gw_exchange_end end = {
            .status = exchange->started ? exchange->req->res.status : 0,
            .gone = exchange->gone,
            .body_bytes = exchange->req->entity.len,
            .sent_bytes = exchange->req->bytes_sent,
            .duration_ns = base_now_ns() - exchange->began_ns,
        };
        server->options.ended(server->options.ctx, exchange, &end);
    }
    end_upload(server, exchange->upload);
    if ((*exchange->link = exchange->next) != NULL)
        exchange->next->link = exchange->link;
    p->exchange_count--;
    p->stuck_count -= exchange->stuck;
    p->body_bytes -= exchange->req->entity.len;
    mark_boundary(p);
    atomic_fetch_sub_explicit(&server->open_exchanges, 1, memory_order_release);
    base_buf_deinit(&exchange->pending);
    base_buf_deinit(&exchange->flight);
    if (cut && is_http2(exchange))
        count_reset(p);
}

static void send_flight(gw_exchange *exchange, bool last)
{
    h2o_iovec_t buf = h2o_iovec_init(exchange->flight.data, exchange->flight.length);
    exchange->given_bytes += buf.len;
    exchange->in_flight = true;
    exchange->progress = UINT64_MAX;
    exchange->progress_ns = exchange->loop->now_ns;
    if (last)
        exchange->over = true;
    h2o_send(exchange->req, &buf, buf.len != 0,
             last ? H2O_SEND_STATE_FINAL : H2O_SEND_STATE_IN_PROGRESS);
}

static void flush(gw_exchange *exchange)
{
    base_buf *pending = &exchange->pending;
    if (exchange->in_flight || exchange->over || (pending->length == 0 && !exchange->ending))
        return;
    base_buf_clear(&exchange->flight);
    if (exchange->record_count > 1 && exchange->record_count <= RECORD_MAX &&
        pending->length <= RECORD_BYTES_MAX) {
        /* One record a DATA frame, as long as the client keeps up. */
        uint32_t first = exchange->record_end[0];
        base_buf_add(&exchange->flight, pending->data, first);
        if (!exchange->flight.failed) {
            base_buf_drop(pending, first);
            exchange->record_count--;
            for (uint32_t i = 0; i < exchange->record_count; i++)
                exchange->record_end[i] = exchange->record_end[i + 1] - first;
            send_flight(exchange, false);
            return;
        }
        base_buf_clear(&exchange->flight);
    }
    base_buf swap = exchange->flight;
    exchange->flight = *pending;
    *pending = swap;
    exchange->record_count = 0;
    send_flight(exchange, exchange->ending);
}

static void on_proceed(h2o_generator_t *generator, h2o_req_t *req)
{
    gw_exchange *exchange = H2O_STRUCT_FROM_MEMBER(gw_exchange, generator, generator);
    exchange->in_flight = false;
    if (exchange->over) {
        /* cut() found a write in flight, and it went through after all. */
        exchange->in_flight = true;
        h2o_send(req, NULL, 0, H2O_SEND_STATE_ERROR);
        return;
    }
    flush(exchange);
    if (!exchange->over && exchange->paused && exchange->pending.length <= STREAM_LOW_BYTES) {
        exchange->paused = false;
        if (exchange->on_drained != NULL)
            exchange->on_drained(exchange->ctx); /* may end the exchange: nothing follows */
    }
}

/* Ends an exchange whose client left or whose answer cannot end well, so that libh2o lets go of it.
 * The exchange may be freed when this returns. */
static void cut(gw_exchange *exchange)
{
    h2o_req_t *req = exchange->req;
    report_gone(exchange);
    base_buf_deinit(&exchange->pending);
    /* libh2o: while an HTTP/1.1 request runs it neither reads nor polls, so it must be made to
     * write: on a socket that is shut down the write fails and it closes the connection by itself.
     */
    if (!is_http2(exchange)) {
        req->http1_is_persistent = 0;
        shut(exchange->peer, SHUT_RDWR);
    }
    if (exchange->in_flight) {
        /* HTTP/1.1: that write fails. HTTP/2: a stream cannot be reset while libh2o holds bytes of
         * it; on_proceed does so if the client ever opens its window, and check_peer closes a
         * connection on which nothing else is left. */
        if (is_http2(exchange) && !exchange->stuck) {
            exchange->stuck = true;
            exchange->peer->stuck_count++;
        }
        return;
    }
    exchange->in_flight = true;
    if (exchange->started) {
        h2o_send(req, NULL, 0, H2O_SEND_STATE_ERROR);
        return;
    }
    req->res.status = 499;
    req->res.reason = "Client Closed Request";
    req->res.content_length = 0;
    h2o_start_response(req, &exchange->generator);
    h2o_send(req, NULL, 0, is_http2(exchange) ? H2O_SEND_STATE_ERROR : H2O_SEND_STATE_FINAL);
}

static char *pool_text(h2o_req_t *req, const char *bytes, size_t length)
{
    char *text = h2o_mem_alloc_pool(&req->pool, length + 1);
    memcpy(text, bytes, length);
    text[length] = '\0';
    return text;
}

static void make_id(gw_loop *loop, char out[5 + 2 * ID_BYTES])
{
    static const char digits[] = "0123456789abcdef";
    if (loop->id_next + ID_BYTES > sizeof loop->ids) {
        size_t filled = 0;
        while (filled < sizeof loop->ids) {
            ssize_t n = getrandom(loop->ids + filled, sizeof loop->ids - filled, 0);
            if (n > 0)
                filled += (size_t)n;
        }
        loop->id_next = 0;
    }
    memcpy(out, "req_", 4);
    for (size_t i = 0; i < ID_BYTES; i++) {
        unsigned char byte = loop->ids[loop->id_next + i];
        out[4 + 2 * i] = digits[byte >> 4];
        out[5 + 2 * i] = digits[byte & 15];
    }
    out[4 + 2 * ID_BYTES] = '\0';
    loop->id_next += ID_BYTES;
}

static void remote_text(peer *p)
{
    struct sockaddr_storage address;
    const struct sockaddr_in *four = (struct sockaddr_in *)&address;
    const struct sockaddr_in6 *six = (struct sockaddr_in6 *)&address;
    if (h2o_socket_getpeername(p->sock, (struct sockaddr *)&address) == 0)
        return;
    if (address.ss_family == AF_UNIX)
        snprintf(p->remote, sizeof p->remote, GW_REMOTE_UNIX);
    else if (address.ss_family == AF_INET)
        inet_ntop(AF_INET, &four->sin_addr, p->remote, sizeof p->remote);
    else if (IN6_IS_ADDR_V4MAPPED(&six->sin6_addr))
        inet_ntop(AF_INET, six->sin6_addr.s6_addr + 12, p->remote, sizeof p->remote);
    else
        inet_ntop(AF_INET6, &six->sin6_addr, p->remote, sizeof p->remote);
}

static gw_exchange *exchange_create(peer *p, h2o_req_t *req)
{
    gw_loop *loop = p->loop;
    gw_exchange *exchange = h2o_mem_alloc_shared(&req->pool, sizeof *exchange, on_exchange_dispose);
    *exchange =
        (gw_exchange){.peer = p, .loop = loop, .req = req, .label = "", .began_ns = base_now_ns()};
    exchange->generator.proceed = on_proceed;
    exchange->upload = p->upload;
    p->upload = NULL;
    p->upload_seen = 0;
    base_buf_init(&exchange->pending, STREAM_MAX_BYTES);
    base_buf_init(&exchange->flight, 0);
    exchange->method = pool_text(req, req->input.method.base, req->input.method.len);
    exchange->path = pool_text(req, req->path_normalized.base, req->path_normalized.len);
    exchange->query = req->query_at == SIZE_MAX ? pool_text(req, "", 0)
                                                : pool_text(req, req->path.base + req->query_at + 1,
                                                            req->path.len - req->query_at - 1);
    exchange->authority = pool_text(req, req->input.authority.base, req->input.authority.len);
    make_id(loop, exchange->id);
    if (p->remote[0] == '\0')
        remote_text(p);
    if ((exchange->next = p->exchanges) != NULL)
        exchange->next->link = &exchange->next;
    exchange->link = &p->exchanges;
    p->exchanges = exchange;
    p->exchange_count++;
    p->http_major = req->version >> 8;
    p->body_bytes += req->entity.len;
    p->completed += req->entity.len;
    mark_boundary(p);
    atomic_fetch_add_explicit(&loop->server->open_exchanges, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&loop->server->requests, 1, memory_order_relaxed);
    return exchange;
}

static bool has_control(h2o_iovec_t text)
{
    for (size_t i = 0; i < text.len; i++)
        if (((unsigned char)text.base[i] < 0x20 && text.base[i] != '\t') || text.base[i] == 0x7f)
            return true;
    return false;
}

/* Answers what no handler needs to see; false if that was done. */
static bool acceptable(gw_exchange *exchange)
{
    const struct gw_conf *conf = exchange->loop->server->conf;
    h2o_req_t *req = exchange->req;
    size_t bytes = req->path.len + req->input.authority.len;
    /* Texts are handed out terminated; a NUL inside would be read as their end. */
    bool broken = has_control(req->path_normalized) || has_control(req->path) ||
                  has_control(req->input.authority) || has_control(req->input.method);
    for (size_t i = 0; i < req->headers.size; i++) {
        bytes += req->headers.entries[i].name->len + req->headers.entries[i].value.len;
        broken = broken || has_control(req->headers.entries[i].value);
    }
#if WHIMBREL_H2O_PATCHED
    if (req->refuse.status == 413) {
        gw_error_too_large(exchange, conf->limits_body_bytes_max);
        return false;
    }
    if (req->refuse.status != 0) {
        gw_error_respond(exchange, req->refuse.status, "invalid_request_error", "invalid_request",
                         NULL, req->refuse.reason);
        return false;
    }
#endif
    if (broken) {
        gw_error_respond(exchange, 400, "invalid_request_error", "invalid_request", NULL,
                         "control characters in the path or a header");
        return false;
    }
    if (bytes > conf->server_header_bytes_max) {
        char text[96];
        snprintf(text, sizeof text, "request headers of %zu bytes exceed %u", bytes,
                 conf->server_header_bytes_max);
        gw_error_respond(exchange, 431, "invalid_request_error", "headers_too_large", NULL, text);
        return false;
    }
    if (req->entity.len > conf->limits_body_bytes_max) {
        gw_error_too_large(exchange, conf->limits_body_bytes_max);
        return false;
    }
    if (req->entity.len > BODY_SMALL_BYTES &&
        atomic_load_explicit(&exchange->loop->server->held, memory_order_relaxed) >
            conf->limits_body_bytes_total_max) {
        gw_error_respond(exchange, 503, "server_error", "overloaded", NULL,
                         "too many large requests at once");
        return false;
    }
    return true;
}

/* libh2o: a vanished HTTP/1.1 client is not noticed while its request runs, because reading has
 * stopped. A second epoll, itself a socket of the loop, watches for its FIN. Added once a
 * connection; edges without an exchange are remembered. */
static void watch(peer *p)
{
    if (p->watched)
        return;
    struct epoll_event event = {.events = EPOLLRDHUP | EPOLLET, .data.ptr = p};
    if (epoll_ctl(p->loop->watch_fd, EPOLL_CTL_ADD, h2o_socket_get_fd(p->sock), &event) == 0)
        p->watched = true;
}

static void on_watch(h2o_socket_t *sock, const char *err)
{
    gw_loop *loop = sock->data;
    struct epoll_event events[64];
    int count = epoll_wait(loop->watch_fd, events, 64, 0);
    for (int i = 0; i < count; i++) {
        peer *p = events[i].data.ptr;
        p->half_closed = true;
        if (p->exchanges != NULL && !p->exchanges->over)
            cut(p->exchanges); /* frees only this peer and its exchange, which no later event names
                                */
    }
}

static int on_request(h2o_handler_t *self, h2o_req_t *req)
{
    gw_server *server = ((handler_of_h2o *)self)->server;
    peer *p = req->conn->callbacks->get_socket(req->conn)->on_close.data;
    if (p->kicked)
        return 0; /* frames that were read before the shutdown took effect; the request ends with
                     the connection */
    gw_exchange *exchange = exchange_create(p, req);
    bool http1 = !is_http2(exchange);
    if (http1)
        watch(p);
    if (acceptable(exchange))
        server->options.handler(server->options.ctx, exchange);
    /* A client that closed its side with the request gets what could be answered at once.
     * `exchange` may be freed here. */
    if (http1 && p->half_closed && p->exchanges != NULL && !p->exchanges->over)
        cut(p->exchanges);
    return 0;
}

/* ---- peers ---- */

static void on_peer_close(void *data)
{
    peer *p = data;
    CHECK(p->exchanges == NULL);
    end_upload(p->loop->server, p->upload);
    SSL_CTX_free(p->tls);
    if (p->loop->next_peer == p)
        p->loop->next_peer = p->next;
    if ((*p->link = p->next) != NULL)
        p->next->link = p->link;
    atomic_fetch_sub_explicit(&p->loop->server->open_connections[p->listener], 1,
                              memory_order_relaxed);
    free(p);
}

static bool room(gw_server *server, gw_listener kind)
{
    uint32_t open = atomic_load_explicit(&server->open_connections[kind], memory_order_relaxed);
    return open <
           (kind == GW_LISTENER_ADMIN ? ADMIN_PEERS_MAX : server->conf->limits_connections_max);
}

static bool elapsed(const gw_loop *loop, uint64_t since_ns, uint32_t limit_ms)
{
    return loop->now_ns > since_ns && loop->now_ns - since_ns > limit_ms * MS_NS;
}

/* The peer that waits longest without a request makes room; a part of a head is none yet. */
static void evict_idle(gw_loop *loop)
{
    peer *oldest = NULL;
    for (peer *p = loop->peers; p != NULL; p = p->next)
        if (p->listener == GW_LISTENER_PUBLIC && p->exchange_count == 0 &&
            (p->uploading == 0 || (p->http_major != 2 && !p->head_done)) && !p->kicked &&
            (oldest == NULL || p->boundary_ns < oldest->boundary_ns))
            oldest = p;
    if (oldest != NULL && elapsed(loop, oldest->boundary_ns, 1000))
        kick(oldest, "room");
}

static void pause_accept(gw_loop *loop)
{
    loop->accept_paused = true;
    for (size_t i = 0; i < LISTENER_MAX; i++)
        if (loop->listen[i] != NULL && i != LISTEN_ADMIN)
            h2o_socket_read_stop(loop->listen[i]);
}

static void on_accept(h2o_socket_t *sock, const char *err)
{
    gw_loop *loop = sock->data;
    gw_server *server = loop->server;
    listener_kind from = LISTEN_PUBLIC;
    while (loop->listen[from] != sock)
        from++;
    gw_listener kind = from == LISTEN_ADMIN ? GW_LISTENER_ADMIN : GW_LISTENER_PUBLIC;
    for (uint32_t i = 0; i < ACCEPT_BATCH; i++) {
        if (!room(server, kind)) {
            /* What is not accepted waits in the kernel until the next tick finds room. */
            if (kind == GW_LISTENER_PUBLIC) {
                evict_idle(loop);
                pause_accept(loop);
            }
            return;
        }
        h2o_socket_t *accepted = h2o_evloop_socket_accept(sock);
        if (accepted == NULL) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                /* The listener stays readable: without a pause the loop would spin. */
                evict_idle(loop);
                pause_accept(loop);
            }
            return;
        }
        peer *p = calloc(1, sizeof *p);
        if (p == NULL) {
            h2o_socket_close(accepted);
            return;
        }
        *p = (peer){.loop = loop,
                    .sock = accepted,
                    .listener = kind,
                    .tls = loop->accept[from].ssl_ctx,
                    .next = loop->peers,
                    .link = &loop->peers};
        /* libh2o: it borrows the context until the handshake's first bytes have come. */
        if (p->tls != NULL)
            SSL_CTX_up_ref(p->tls);
        p->moved_ns = p->boundary_ns = base_now_ns();
        if (p->next != NULL)
            p->next->link = &p->next;
        loop->peers = p;
        atomic_fetch_add_explicit(&server->connections, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&server->open_connections[kind], 1, memory_order_relaxed);
        accepted->on_close.cb = on_peer_close;
        accepted->on_close.data = p;
        h2o_accept(&loop->accept[from], accepted);
    }
}

static void check_peer(peer *p)
{
    const struct gw_conf *conf = p->loop->server->conf;
    if (p->kicked || p->exchange_count != p->stuck_count)
        return;
    /* libh2o: its one HTTP/1.1 timeout spans headers and body and is never renewed, so a slow but
     * steady upload is cut without an answer. It is set to the outermost bound; silence and
     * slowness are told apart here. */
    if (elapsed(p->loop, p->moved_ns > p->boundary_ns ? p->moved_ns : p->boundary_ns,
                conf->limits_idle_connection_ms))
        kick(p, "idle");
    else if (p->head_ns != 0 && !p->head_done && elapsed(p->loop, p->head_ns, conf->limits_head_ms))
        kick(p, "slow_head");
    else if (p->received != p->at_boundary &&
             elapsed(p->loop, p->boundary_ns, conf->limits_upload_ms))
        kick(p, "slow_upload");
}

/* libh2o: it has no write timeout; a reader that stops holds its stream for ever. */
static void check_exchange(gw_exchange *exchange)
{
    gw_loop *loop = exchange->loop;
    if (exchange->doomed) {
        cut(exchange);
        return;
    }
    if (!exchange->in_flight || exchange->stuck)
        return;
    /* HTTP/1.1 counts bytes_sent when they are handed over, HTTP/2 when the stream's window lets
     * them go. */
    uint64_t progress = is_http2(exchange) ? exchange->req->bytes_sent : taken_of(exchange->peer);
    if (progress != exchange->progress) {
        exchange->progress = progress;
        exchange->progress_ns = loop->now_ns;
    } else if (elapsed(loop, exchange->progress_ns, loop->server->conf->limits_write_stall_ms)) {
        base_log(BASE_LOG_INFO, "write_stalled req=%s sent=%llu", exchange->id,
                 (unsigned long long)progress);
        atomic_fetch_add_explicit(&loop->server->kicked, 1, memory_order_relaxed);
        cut(exchange);
    }
}

/* libh2o: a body is collected in memory before the handler hears of it and nothing counts the sum,
 * nor is there a hook. HTTP/1.1 keeps it in the socket's input. For HTTP/2 the bytes that came are
 * known, and those of complete requests; the rest is taken for bodies on their way (headers and
 * control frames are too, hence the allowance). */
static void measure_head(peer *p)
{
    const h2o_buffer_t *input = p->sock->input;
    if (p->http_major == 2 || p->exchange_count != 0 || p->head_done)
        return;
    if (input->size == 0)
        p->head_ns = 0;
    else if (p->head_ns == 0)
        p->head_ns = p->loop->now_ns;
    p->head_done = input->size != 0 && memmem(input->bytes, input->size, "\r\n\r\n", 4) != NULL;
}

static void measure(peer *p)
{
    p->waiting = 0;
    for (const gw_exchange *e = p->exchanges; e != NULL; e = e->next)
        p->waiting += e->pending.length + e->flight.length;
    measure_head(p);
    uint64_t received = received_of(p);
    if (received != p->received) {
        p->received = received;
        p->moved_ns = p->loop->now_ns;
    }
    if (p->boundary_new)
        p->at_boundary = received;
    p->boundary_new = false;
    if (p->http_major == 1)
        p->uploading = p->exchange_count == 0 ? p->sock->input->size : 0;
    else
        p->uploading = received > p->completed + UPLOAD_ALLOWANCE_BYTES
                           ? (size_t)(received - p->completed - UPLOAD_ALLOWANCE_BYTES)
                           : 0;
}

/* libh2o: what it has of an HTTP/1.1 request lies in the socket's input, from the request line on,
 * and of a chunked body the chunks alone, one after the other. Between two reads that is all
 * there is to know; a body over HTTP/2 is out of sight until it is whole. */
static void show_upload(peer *p)
{
    const gw_server_options *o = &p->loop->server->options;
    const h2o_buffer_t *input = p->sock->input;
    if (o->arriving == NULL || p->exchange_count != 0 || p->kicked || p->http_major == 2 ||
        (input->size <= p->upload_seen && p->upload == NULL))
        return;
    p->upload_seen = input->size;
    if (p->remote[0] == '\0')
        remote_text(p);
    const gw_arrival arrival = {
        .loop = p->loop, .bytes = input->bytes, .remote = p->remote, .length = input->size};
    p->upload = o->arriving(o->ctx, &arrival, p->upload);
}

static size_t uploading_of(const peer *p)
{
    return p->uploading;
}

static size_t waiting_of(const peer *p)
{
    return p->waiting;
}

/* `sum` is this loop's part of `total`, `own` what it was at the last tick. Above `max` the peers
 * go that hold most. */
static void bound(gw_loop *loop, _Atomic uint64_t *total, size_t *own, size_t sum, uint64_t max,
                  size_t (*of)(const peer *))
{
    uint64_t all = atomic_fetch_add(total, sum - *own) + (sum - *own);
    *own = sum;
    while (all > max) {
        peer *largest = NULL;
        for (peer *p = loop->peers; p != NULL; p = p->next)
            if (!p->kicked && of(p) != 0 && (largest == NULL || of(p) > of(largest)))
                largest = p;
        if (largest == NULL)
            break;
        kick(largest, "memory");
        all -= of(largest);
    }
}

static void check_memory(gw_loop *loop)
{
    gw_server *server = loop->server;
    const struct gw_conf *conf = server->conf;
    bound(loop, &server->held, &loop->held, loop->round_held, conf->limits_body_bytes_total_max,
          uploading_of);
    /* libh2o: 100 streams a connection, each with an answer that its window holds back. */
    bound(loop, &server->waiting, &loop->waiting, loop->round_waiting,
          conf->limits_answer_bytes_total_max, waiting_of);
}

static void drain_step(gw_loop *loop)
{
    bool uploads = false;
    for (peer *p = loop->peers; p != NULL; p = p->next)
        uploads =
            uploads || (p->received > p->at_boundary + 512 && !elapsed(loop, p->moved_ns, 500));
    /* libh2o: one second after the first GOAWAY it drops uploads that are still arriving, without
     * an answer; so the GOAWAY waits for them. */
    if (!loop->goaway_sent && (!uploads || loop->now_ns > loop->goaway_deadline_ns)) {
        h2o_context_request_shutdown(&loop->ctx);
        loop->goaway_sent = true;
        atomic_store(&loop->server->goaway_ns, base_now_ns());
        atomic_fetch_sub(&loop->server->goaway_pending, 1);
    }
    /* libh2o: idle HTTP/1.1 connections are not told. With its reading side shut it sees an end of
     * file and closes. */
    for (peer *p = loop->peers; p != NULL; p = p->next)
        if (p->exchange_count == 0 &&
            (p->http_major == 1 ? p->sock->input->size == 0 : p->received == 0))
            shut(p, SHUT_RD);
}

/* Somebody waited when it paused. */
static void resume_accept(gw_loop *loop)
{
    if (!room(loop->server, GW_LISTENER_PUBLIC)) {
        evict_idle(loop);
        return;
    }
    loop->accept_paused = false;
    for (size_t i = 0; i < LISTENER_MAX; i++)
        if (loop->listen[i] != NULL && i != LISTEN_ADMIN)
            h2o_socket_read_start(loop->listen[i], on_accept);
}

/* The peer may be freed when this returns. */
static void look_at(peer *p)
{
    measure(p);
    p->loop->round_held += p->body_bytes + p->uploading;
    p->loop->round_waiting += p->waiting;
    show_upload(p);
    check_peer(p);
    for (gw_exchange *exchange = p->exchanges, *after; exchange != NULL; exchange = after) {
        after = exchange->next;
        bool lone = after == NULL;
        check_exchange(exchange); /* may free the exchange and, if it was alone, the peer */
        if (lone)
            break;
    }
}

static void begin_round(gw_loop *loop)
{
    loop->next_peer = loop->peers;
    loop->round_held = loop->round_waiting = 0;
}

static void end_round(gw_loop *loop)
{
    check_memory(loop);
    if (loop->draining)
        drain_step(loop);
    else if (loop->accept_paused)
        resume_accept(loop);
}

static void on_tick(h2o_timeout_entry_t *entry)
{
    gw_loop *loop = H2O_STRUCT_FROM_MEMBER(gw_loop, tick_entry, entry);
    if (loop->next_peer == NULL)
        begin_round(loop);
    for (uint32_t n = 0; n < SLICE_PEERS && loop->next_peer != NULL; n++) {
        peer *p = loop->next_peer;
        loop->next_peer = p->next;
        look_at(p);
    }
    if (loop->next_peer == NULL)
        end_round(loop);
    h2o_timeout_link(loop->evloop,
                     loop->next_peer != NULL ? &loop->slice_timeout : &loop->tick_timeout,
                     &loop->tick_entry);
}

/* ---- loops ---- */

static void run_posts(gw_loop *loop)
{
    pthread_mutex_lock(&loop->post_lock);
    gw_message *message = loop->posts;
    loop->posts = NULL;
    loop->posts_tail = &loop->posts;
    loop->wake_sent = false;
    pthread_mutex_unlock(&loop->post_lock);
    while (message != NULL) {
        gw_message *next = message->next; /* `run` gives the message back */
        message->run(message);
        message = next;
    }
}

static void on_wake(h2o_multithread_receiver_t *receiver, h2o_linklist_t *messages)
{
    gw_loop *loop = H2O_STRUCT_FROM_MEMBER(gw_loop, receiver, receiver);
    while (!h2o_linklist_is_empty(messages))
        h2o_linklist_unlink(messages->next);
    run_posts(loop); /* clears wake_sent after the message is unlinked, so it may be sent again */
}

void gw_loop_post(gw_loop *loop, gw_message *message)
{
    message->next = NULL;
    pthread_mutex_lock(&loop->post_lock);
    *loop->posts_tail = message;
    loop->posts_tail = &message->next;
    bool wake = !loop->wake_sent;
    loop->wake_sent = true;
    pthread_mutex_unlock(&loop->post_lock);
    if (wake)
        h2o_multithread_send_message(&loop->receiver, &loop->wake);
}

static void close_listeners(gw_loop *loop)
{
    for (size_t i = 0; i < LISTENER_MAX; i++)
        if (loop->listen[i] != NULL) {
            h2o_socket_read_stop(loop->listen[i]);
            h2o_socket_close(loop->listen[i]);
            loop->listen[i] = NULL;
        }
}

static void loop_open(gw_loop *loop)
{
    gw_server *server = loop->server;
    loop->evloop = h2o_evloop_create();
    h2o_context_init(&loop->ctx, loop->evloop, &server->config);
    h2o_multithread_register_receiver(loop->ctx.queue, &loop->receiver, on_wake);
    loop->watch = h2o_evloop_socket_create(loop->evloop, loop->watch_fd, H2O_SOCKET_FLAG_DONT_READ);
    loop->watch->data = loop;
    h2o_socket_read_start(loop->watch, on_watch);
    for (size_t i = 0; i < LISTENER_MAX; i++) {
        loop->accept[i] = (h2o_accept_ctx_t){.ctx = &loop->ctx,
                                             .hosts = server->config.hosts,
                                             .ssl_ctx = i == LISTEN_TLS ? server->tls : NULL};
        if (server->listeners[i].fd < 0 || (i == LISTEN_ADMIN && loop->index != 0))
            continue;
        /* One socket for all loops, not SO_REUSEPORT: a second server on the same address must fail
         * to start, not share. */
        int fd = fcntl(server->listeners[i].fd, F_DUPFD_CLOEXEC, 0);
        CHECK(fd >= 0);
        loop->listen[i] = h2o_evloop_socket_create(loop->evloop, fd, H2O_SOCKET_FLAG_DONT_READ);
        loop->listen[i]->data = loop;
        h2o_socket_read_start(loop->listen[i], on_accept);
    }
    h2o_timeout_init(loop->evloop, &loop->tick_timeout, TICK_MS);
    h2o_timeout_init(loop->evloop, &loop->slice_timeout, SLICE_MS);
    loop->tick_entry.cb = on_tick;
    h2o_timeout_link(loop->evloop, &loop->tick_timeout, &loop->tick_entry);
}

static void loop_close(gw_loop *loop)
{
    close_listeners(loop);
    for (peer *p = loop->peers; p != NULL; p = p->next)
        shut(p, SHUT_RDWR);
    for (peer *p = loop->peers, *next; p != NULL; p = next) {
        next = p->next;
        for (gw_exchange *exchange = p->exchanges, *after; exchange != NULL; exchange = after) {
            after = exchange->next;
            cut(exchange);
            if (after == NULL)
                break;
        }
    }
    for (uint32_t i = 0; i < 50 && loop->peers != NULL; i++)
        h2o_evloop_run(loop->evloop, 10);
    h2o_timeout_unlink(&loop->tick_entry);
    if (loop->peers != NULL)
        return; /* libh2o still holds connections: its context cannot be taken down under them; the
                   process ends soon */
    h2o_timeout_dispose(loop->evloop, &loop->tick_timeout);
    h2o_timeout_dispose(loop->evloop, &loop->slice_timeout);
    h2o_socket_read_stop(loop->watch);
    h2o_socket_close(loop->watch);
    h2o_timeout_unlink(&loop->ctx.http2._graceful_shutdown_timeout);
    h2o_multithread_unregister_receiver(loop->ctx.queue, &loop->receiver);
    h2o_context_dispose(&loop->ctx);
    h2o_evloop_run(loop->evloop, 0); /* frees sockets that were closed above */
    h2o_evloop_destroy(loop->evloop);
}

static void *loop_main(void *arg)
{
    gw_loop *loop = arg;
    char name[16];
    snprintf(name, sizeof name, "loop-%u", loop->index);
    base_thread_enter(BASE_THREAD_LOOP, name);
    loop->now_ns = base_now_ns();
    loop_open(loop);
    sem_post(&loop->server->opened);
    pthread_mutex_lock(&loop->server->gate);
    pthread_mutex_unlock(&loop->server->gate);
    while (!loop->quit) {
        /* libh2o: -1 on EINTR too, though signals are blocked here (a debugger's stop, for one). */
        h2o_evloop_run(loop->evloop, 1000);
        loop->now_ns = base_now_ns();
    }
    run_posts(loop);
    loop_close(loop);
    return NULL;
}

/* ---- what handlers call ---- */

const char *gw_exchange_method(const gw_exchange *exchange)
{
    return exchange->method;
}

const char *gw_exchange_path(const gw_exchange *exchange)
{
    return exchange->path;
}

const char *gw_exchange_query(const gw_exchange *exchange)
{
    return exchange->query;
}

const char *gw_exchange_header(gw_exchange *exchange, const char *name)
{
    h2o_req_t *req = exchange->req;
    size_t name_length = strlen(name), total = 0, count = 0;
    for (size_t i = 0; i < req->headers.size; i++) {
        const h2o_header_t *header = &req->headers.entries[i];
        if (h2o_memis(header->name->base, header->name->len, name, name_length)) {
            total += header->value.len + 2;
            count++;
        }
    }
    if (count == 0)
        return NULL;
    /* A field that was sent twice is one list (RFC 9110, 5.3): two keys are then no key. */
    char *text = h2o_mem_alloc_pool(&req->pool, total + 1), *end = text;
    for (size_t i = 0; i < req->headers.size; i++) {
        const h2o_header_t *header = &req->headers.entries[i];
        if (!h2o_memis(header->name->base, header->name->len, name, name_length))
            continue;
        if (end != text) {
            memcpy(end, ", ", 2);
            end += 2;
        }
        memcpy(end, header->value.base, header->value.len);
        end += header->value.len;
    }
    *end = '\0';
    return text;
}

const char *gw_exchange_body(const gw_exchange *exchange, size_t *length)
{
    *length = exchange->req->entity.len;
    return *length != 0 ? exchange->req->entity.base : "";
}

const char *gw_exchange_authority(const gw_exchange *exchange)
{
    return exchange->authority;
}

const char *gw_exchange_id(const gw_exchange *exchange)
{
    return exchange->id;
}

const char *gw_exchange_remote(const gw_exchange *exchange)
{
    return exchange->peer->remote;
}

gw_listener gw_exchange_listener(const gw_exchange *exchange)
{
    return exchange->peer->listener;
}

void gw_exchange_set_label(gw_exchange *exchange, const char *label)
{
    exchange->label = label;
}

const char *gw_exchange_label(const gw_exchange *exchange)
{
    return exchange->label;
}

int gw_exchange_http_major(const gw_exchange *exchange)
{
    return is_http2(exchange) ? 2 : 1;
}

gw_loop *gw_exchange_loop(const gw_exchange *exchange)
{
    return exchange->loop;
}

void gw_exchange_set_handler(gw_exchange *exchange, void *ctx, void (*gone)(void *ctx),
                             void (*drained)(void *ctx))
{
    exchange->ctx = ctx;
    exchange->on_gone = gone;
    exchange->on_drained = drained;
}

static const char *reason_of(int status)
{
    static const struct {
        int status;
        const char *reason;
    } reasons[] = {
        {200, "OK"},
        {204, "No Content"},
        {302, "Found"},
        {304, "Not Modified"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {408, "Request Timeout"},
        {409, "Conflict"},
        {413, "Content Too Large"},
        {415, "Unsupported Media Type"},
        {421, "Misdirected Request"},
        {429, "Too Many Requests"},
        {431, "Request Header Fields Too Large"},
        {500, "Internal Server Error"},
        {503, "Service Unavailable"},
        {504, "Gateway Timeout"},
        {529, "Overloaded"},
    };
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if (reasons[i].status == status)
            return reasons[i].reason;
    return "Status";
}

void gw_exchange_add_header(gw_exchange *exchange, const char *name, const char *value)
{
    h2o_req_t *req = exchange->req;
    h2o_iovec_t name_copy = h2o_strdup(&req->pool, name, SIZE_MAX);
    h2o_iovec_t value_copy = h2o_strdup(&req->pool, value, SIZE_MAX);
    h2o_add_header_by_str(&req->pool, &req->res.headers, name_copy.base, name_copy.len, 1, NULL,
                          value_copy.base, value_copy.len);
}

static void start_response(gw_exchange *exchange, int status, const gw_header *headers,
                           size_t header_count, size_t length)
{
    h2o_req_t *req = exchange->req;
    DCHECK(base_thread_is(BASE_THREAD_LOOP));
    CHECK(!exchange->started && !exchange->over);
    req->res.status = status;
    req->res.reason = reason_of(status);
    req->res.content_length = status == 204 || status == 304 ? SIZE_MAX : length;
    for (size_t i = 0; i < header_count; i++)
        gw_exchange_add_header(exchange, headers[i].name, headers[i].value);
    h2o_add_header_by_str(&req->pool, &req->res.headers, H2O_STRLIT("x-request-id"), 1, NULL,
                          exchange->id, strlen(exchange->id));
    exchange->started = true;
    h2o_start_response(req, &exchange->generator);
}

void gw_respond(gw_exchange *exchange, int status, const gw_header *headers, size_t header_count,
                const void *body, size_t length)
{
    bool head = strcmp(exchange->method, "HEAD") == 0;
    start_response(exchange, status, headers, header_count, length);
    if (!head)
        base_buf_add(&exchange->flight, body, length);
    if (exchange->flight.failed) {
        /* No memory for the copy, and the length is promised: the client must see a broken answer.
         */
        cut(exchange);
        return;
    }
    send_flight(exchange, true);
}

void gw_stream_begin(gw_exchange *exchange, int status, const gw_header *headers,
                     size_t header_count)
{
    exchange->stream = true;
    start_response(exchange, status, headers, header_count, SIZE_MAX);
    send_flight(exchange, false);
}

void gw_stream_write(gw_exchange *exchange, const void *bytes, size_t length)
{
    DCHECK(base_thread_is(BASE_THREAD_LOOP));
    CHECK(exchange->stream && !exchange->over && !exchange->ending);
    if (length == 0)
        return;
    base_buf_add(&exchange->pending, bytes, length);
    if (exchange->pending.failed) {
        exchange->doomed = true; /* cut by the tick: the handler is in the middle of its own work */
        return;
    }
    if (exchange->record_count < RECORD_MAX)
        exchange->record_end[exchange->record_count] = (uint32_t)exchange->pending.length;
    if (exchange->record_count <= RECORD_MAX)
        exchange->record_count++;
    exchange->paused = exchange->paused || exchange->pending.length > STREAM_HIGH_BYTES;
    flush(exchange);
}

bool gw_stream_paused(const gw_exchange *exchange)
{
    return exchange->paused;
}

void gw_stream_end(gw_exchange *exchange)
{
    DCHECK(base_thread_is(BASE_THREAD_LOOP));
    CHECK(exchange->stream && !exchange->over && !exchange->ending);
    exchange->ending = true;
    /* From here on the handler hears nothing more. */
    exchange->on_gone = NULL;
    exchange->on_drained = NULL;
    flush(exchange);
}

void gw_stream_abort(gw_exchange *exchange)
{
    DCHECK(base_thread_is(BASE_THREAD_LOOP));
    CHECK(!exchange->over);
    exchange->on_gone = NULL;
    exchange->on_drained = NULL;
    cut(exchange);
}

/* ---- the server ---- */

static base_code open_listener(gw_server *server, listener_kind kind, const char *key,
                               const char *where, int inherited, base_err *err)
{
    if (!WHIMBREL_H2O_PATCHED && !gw_conf_is_loopback(where))
        base_log(BASE_LOG_WARN,
                 "transport_unpatched %s=%s text=\"the system's libh2o has known faults that a "
                 "client can use; build with -Dh2o=patched before strangers connect\"",
                 key, where);
    return gw_listen_open(&server->listeners[kind], key, where,
                          (uint32_t)strtoul(server->conf->server_unix_mode, NULL, 8), inherited,
                          err);
}

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static void create_config(gw_server *server)
{
    const struct gw_conf *conf = server->conf;
    h2o_globalconf_t *config = &server->config;
    h2o_config_init(config);
    config->server_name = h2o_iovec_init(H2O_STRLIT("whimbrel"));
    /* libh2o: the patched one gives a request over its limit to us to answer. Else it answers
     * text/plain and closes (HTTP/1.1), or REFUSED_STREAM, which tells clients to send the body
     * again (HTTP/2); so its limit lies above ours then, and what is between gets our 413. */
    config->max_request_entity_size =
        (size_t)conf->limits_body_bytes_max + (WHIMBREL_H2O_PATCHED ? 0 : BODY_SLACK_BYTES);
    /* The tick is exact to 100 ms and comes first; libh2o's own timeouts are the net below it. For
     * HTTP/2 its idle timeout is the polite one, with a GOAWAY. */
    config->http1.req_timeout =
        (uint64_t)max_u32(conf->limits_upload_ms, conf->limits_idle_connection_ms) + 2000;
    config->http2.idle_timeout = conf->limits_idle_connection_ms;
    h2o_hostconf_t *host =
        h2o_config_register_host(config, h2o_iovec_init(H2O_STRLIT("default")), 65535);
    h2o_pathconf_t *path = h2o_config_register_path(host, "/", 0);
    handler_of_h2o *handler = (handler_of_h2o *)h2o_create_handler(path, sizeof *handler);
    handler->super.on_req = on_request;
    handler->server = server;
    /* libh2o: large bodies would be spilled to a file in /tmp; prompts do not belong there. */
    h2o_socket_buffer_mmap_settings.threshold = SIZE_MAX;
}

static base_code create_tls(SSL_CTX **out, const struct gw_conf *conf, base_err *err)
{
    return gw_tls_create(out, conf->server_tls_cert, conf->server_tls_key,
                         conf->server_tls_client_ca, err);
}

base_code gw_server_create(gw_server **out, const gw_server_options *options, base_err *err)
{
    const struct gw_conf *conf = options->conf;
    const gw_inherited inherited =
        options->inherited ? *options->inherited : (gw_inherited){-1, -1, -1};
    base_code code = BASE_OK;
    gw_server *server = calloc(1, sizeof *server);
    if (server == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for the server");
    server->conf = conf;
    server->options = *options;
    for (size_t i = 0; i < LISTENER_MAX; i++)
        server->listeners[i].fd = -1;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    server->loop_count =
        conf->server_loops != 0 ? conf->server_loops : max_u32(1, (uint32_t)((cores + 3) / 4));
    create_config(server);
    server->loops = calloc(server->loop_count, sizeof *server->loops);
    if (server->loops == NULL) {
        server->loop_count = 0;
        code = base_fail(err, BASE_NOMEM, "no memory for the loops");
        goto out;
    }
    for (uint32_t i = 0; i < server->loop_count; i++)
        server->loops[i].watch_fd = -1;
    for (uint32_t i = 0; i < server->loop_count; i++) {
        gw_loop *loop = &server->loops[i];
        loop->server = server;
        loop->index = i;
        loop->id_next = sizeof loop->ids;
        loop->posts_tail = &loop->posts;
        pthread_mutex_init(&loop->post_lock, NULL);
        if ((loop->watch_fd = epoll_create1(EPOLL_CLOEXEC)) < 0) {
            code = base_fail(err, BASE_IO, "epoll: %s", strerror(errno));
            goto out;
        }
    }
    if (conf->server_tls_listen[0] != '\0' &&
        (code = create_tls(&server->tls, conf, err)) != BASE_OK)
        goto out;
    if ((code = open_listener(server, LISTEN_PUBLIC, "server.listen", conf->server_listen,
                              inherited.listen, err)) != BASE_OK)
        goto out;
    if (conf->server_tls_listen[0] != '\0' &&
        (code = open_listener(server, LISTEN_TLS, "server.tls_listen", conf->server_tls_listen,
                              inherited.tls, err)) != BASE_OK)
        goto out;
    if (conf->admin_listen[0] != '\0' &&
        (code = open_listener(server, LISTEN_ADMIN, "admin.listen", conf->admin_listen,
                              inherited.admin, err)) != BASE_OK)
        goto out;
    *out = server;
    return BASE_OK;
out:
    gw_server_destroy(server);
    return code;
}

base_code gw_server_start(gw_server *server, base_err *err)
{
    sigset_t all, before;
    uint32_t count = 0;
    int error = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all,
                    &before); /* inherited: signals are main's, and SIGPIPE nobody's */
    /* Nobody may post before a loop has its receiver, hence the gate. */
    sem_init(&server->opened, 0, 0);
    pthread_mutex_init(&server->gate, NULL);
    pthread_mutex_lock(&server->gate);
    for (; count < server->loop_count && error == 0; count += error == 0)
        error =
            pthread_create(&server->loops[count].thread, NULL, loop_main, &server->loops[count]);
    for (uint32_t i = 0; i < count; i++) {
        while (sem_wait(&server->opened) != 0)
            ;
        server->loops[i].quit = error != 0;
    }
    pthread_mutex_unlock(&server->gate);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    server->started = error == 0;
    if (server->started)
        return BASE_OK;
    for (uint32_t i = 0; i < count; i++) {
        pthread_join(server->loops[i].thread, NULL);
        server->loops[i].watch_fd = -1; /* libh2o closed it with its socket */
    }
    pthread_mutex_destroy(&server->gate);
    sem_destroy(&server->opened);
    return base_fail(err, BASE_NOMEM, "no thread for loop %u: %s", count, strerror(error));
}

const char *gw_server_address(const gw_server *server, gw_listener kind)
{
    const gw_listen *l =
        &server->listeners[kind == GW_LISTENER_ADMIN ? LISTEN_ADMIN : LISTEN_PUBLIC];
    return l->address[0] != '\0' ? l->address : NULL;
}

const char *gw_server_tls_address(const gw_server *server)
{
    return server->listeners[LISTEN_TLS].address[0] != '\0' ? server->listeners[LISTEN_TLS].address
                                                            : NULL;
}

uint32_t gw_server_loop_count(const gw_server *server)
{
    return server->loop_count;
}

/* A message to a loop that main waits for. */
typedef struct order {
    gw_message message;
    gw_loop *loop;
    uint64_t deadline_ns;
    _Atomic bool done;
} order;

static void run_drain(gw_message *message)
{
    order *o = (order *)message;
    gw_loop *loop = o->loop;
    loop->draining = true;
    loop->goaway_deadline_ns = o->deadline_ns;
    close_listeners(loop);
    for (peer *p = loop->peers; p != NULL; p = p->next)
        measure(p);
    drain_step(loop);
    atomic_store(&o->done, true);
}

static void run_cut_all(gw_message *message)
{
    order *o = (order *)message;
    for (peer *p = o->loop->peers, *next; p != NULL; p = next) {
        next = p->next;
        p->kicked = true;
        shut(p, SHUT_RDWR);
        for (gw_exchange *exchange = p->exchanges, *after; exchange != NULL; exchange = after) {
            after = exchange->next;
            cut(exchange);
            if (after == NULL)
                break;
        }
    }
    atomic_store(&o->done, true);
}

static void run_renew_tls(gw_message *message)
{
    order *o = (order *)message;
    o->loop->accept[LISTEN_TLS].ssl_ctx = o->loop->server->tls;
    atomic_store(&o->done, true);
}

static void run_quit(gw_message *message)
{
    order *o = (order *)message;
    o->loop->quit = true;
    atomic_store(&o->done, true);
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * (long)MS_NS}, NULL);
}

static void give_order(gw_server *server, void (*run)(gw_message *), uint64_t deadline_ns)
{
    for (uint32_t i = 0; i < server->loop_count; i++) {
        order o = {.message.run = run, .loop = &server->loops[i], .deadline_ns = deadline_ns};
        gw_loop_post(o.loop, &o.message);
        while (!atomic_load(&o.done))
            sleep_ms(1);
    }
}

base_code gw_server_renew_tls(gw_server *server, base_err *err)
{
    SSL_CTX *fresh, *before = server->tls;
    if (before == NULL)
        return BASE_OK;
    base_code code = create_tls(&fresh, server->conf, err);
    if (code != BASE_OK)
        return code;
    server->tls = fresh;
    give_order(server, run_renew_tls, 0);
    SSL_CTX_free(before); /* connections hold theirs */
    return BASE_OK;
}

static bool quiet(gw_server *server)
{
    if (atomic_load_explicit(&server->open_exchanges, memory_order_acquire) != 0 ||
        atomic_load(&server->goaway_pending) != 0)
        return false;
    /* Idle HTTP/2 clients get one second between two GOAWAYs, in which a request of theirs may
     * still arrive. */
    return base_now_ns() - atomic_load(&server->goaway_ns) > 1200 * MS_NS ||
           atomic_load(&server->open_connections[0]) + atomic_load(&server->open_connections[1]) ==
               0;
}

/* True once it is. */
static bool wait_quiet(gw_server *server, uint64_t span_ns)
{
    uint64_t begin = base_now_ns();
    while (!quiet(server)) {
        if (base_now_ns() - begin >= span_ns)
            return false;
        sleep_ms(5);
    }
    return true;
}

bool gw_server_drain(gw_server *server, uint32_t deadline_ms)
{
    if (!server->started)
        return true;
    uint64_t span = deadline_ms * MS_NS;
    for (size_t i = 0; i < LISTENER_MAX; i++)
        gw_listen_close(&server->listeners[i]);
    atomic_store(&server->goaway_pending, server->loop_count);
    give_order(server, run_drain, base_now_ns() + span / 2);
    return wait_quiet(server, span);
}

void gw_server_cut(gw_server *server, uint32_t grace_ms)
{
    if (!server->started)
        return;
    wait_quiet(server, grace_ms * MS_NS);
    give_order(server, run_cut_all, 0);
    for (uint32_t i = 0; i < 100 && atomic_load(&server->open_connections[0]) != 0; i++)
        sleep_ms(5);
}

void gw_server_destroy(gw_server *server)
{
    if (server == NULL)
        return;
    if (server->started) {
        give_order(server, run_quit, 0);
        for (uint32_t i = 0; i < server->loop_count; i++)
            pthread_join(server->loops[i].thread, NULL);
        pthread_mutex_destroy(&server->gate);
        sem_destroy(&server->opened);
    }
    for (uint32_t i = 0; i < server->loop_count; i++) {
        if (!server->started && server->loops[i].watch_fd >= 0)
            close(server->loops[i].watch_fd); /* else libh2o closed it with its socket */
        pthread_mutex_destroy(&server->loops[i].post_lock);
    }
    for (size_t i = 0; i < LISTENER_MAX; i++)
        gw_listen_close(&server->listeners[i]);
    h2o_config_dispose(&server->config);
    SSL_CTX_free(server->tls);
    free(server->loops);
    free(server);
}

gw_server_stats gw_server_get_stats(const gw_server *server)
{
    return (gw_server_stats){
        .connections = atomic_load_explicit(&server->connections, memory_order_relaxed),
        .requests = atomic_load_explicit(&server->requests, memory_order_relaxed),
        .gone = atomic_load_explicit(&server->gone, memory_order_relaxed),
        .kicked = atomic_load_explicit(&server->kicked, memory_order_relaxed),
        .open_connections =
            atomic_load_explicit(&server->open_connections[0], memory_order_relaxed) +
            atomic_load_explicit(&server->open_connections[1], memory_order_relaxed),
        .open_exchanges = atomic_load_explicit(&server->open_exchanges, memory_order_relaxed),
    };
}
