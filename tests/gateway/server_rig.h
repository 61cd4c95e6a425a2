/* server_rig: the transport with a handler of its own, and clients for it: raw sockets, hand-made
 * HTTP/2 frames, TLS. Ports are the system's choice; a test is a process. */
#pragma once
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "gateway/conf.h"
#include "gateway/server.h"

#pragma GCC diagnostic ignored "-Wunused-function" /* not every program needs all of it */

#define MS 1000000ull

/* ---- the server under test ---- */

static gw_conf *conf;
static gw_server *server;
static _Atomic uint64_t gone_ns;
static _Atomic uint32_t gone_count, drained_count, ended_count, handled_count;
static _Atomic int last_status;

typedef struct flow {
    gw_message message;
    gw_exchange *exchange; /* NULL once it is over */
    size_t sent, total;
    bool waits; /* for `drained` */
    struct flow *older;
} flow;

static flow *flows; /* loop 0's */

static unsigned char pattern(size_t at)
{
    return (unsigned char)(at * 2654435761u >> 24);
}

static void on_gone(void *ctx)
{
    flow *f = ctx;
    f->exchange = NULL;
    gone_ns = base_now_ns();
    gone_count++;
}

static void pump(flow *f)
{
    while (f->sent < f->total && !(f->waits && gw_stream_paused(f->exchange))) {
        unsigned char block[4096];
        size_t n = f->total - f->sent < sizeof block ? f->total - f->sent : sizeof block;
        for (size_t i = 0; i < n; i++)
            block[i] = pattern(f->sent + i);
        gw_stream_write(f->exchange, block, n);
        f->sent += n;
    }
    if (f->sent == f->total && f->exchange != NULL) {
        gw_exchange *exchange = f->exchange;
        f->exchange = NULL;
        gw_stream_end(exchange);
    }
}

static void on_drained(void *ctx)
{
    drained_count++;
    pump(ctx);
}

static void answer(gw_message *message)
{
    flow *f = (flow *)message;
    if (f->exchange != NULL)
        gw_respond(f->exchange, 200, NULL, 0, "late", 4);
    f->exchange = NULL;
}

static void *answer_later(void *arg)
{
    flow *f = arg;
    nanosleep(&(struct timespec){.tv_nsec = 300 * 1000000}, NULL);
    gw_loop_post((gw_loop *)f->sent, &f->message);
    return NULL;
}

static size_t query_number(gw_exchange *exchange)
{
    return strtoul(gw_exchange_query(exchange), NULL, 10);
}

static void handle(void *ctx, gw_exchange *exchange)
{
    const char *path = gw_exchange_path(exchange);
    static const gw_header plain[] = {{"content-type", "text/plain"}};
    handled_count++;
    flow *f = calloc(1, sizeof *f); /* lives on until `stop` */
    f->older = flows;
    flows = f;
    f->exchange = exchange;
    f->total = query_number(exchange);
    if (strcmp(path, "/echo") == 0) {
        size_t length;
        const char *body = gw_exchange_body(exchange, &length);
        gw_respond(exchange, 200, plain, 1, body, length);
    } else if (strcmp(path, "/about") == 0) {
        char text[512];
        const char *twice = gw_exchange_header(exchange, "x-twice");
        size_t length;
        gw_exchange_body(exchange, &length);
        int n = snprintf(text, sizeof text, "%s %s?%s h%d %s %s %zu %s",
                         gw_exchange_method(exchange), path, gw_exchange_query(exchange),
                         gw_exchange_http_major(exchange), gw_exchange_authority(exchange),
                         gw_exchange_remote(exchange), length, twice != NULL ? twice : "-");
        gw_respond(exchange, 200, plain, 1, text, (size_t)n);
    } else if (strcmp(path, "/hold") == 0) {
        gw_exchange_set_handler(exchange, f, on_gone, NULL);
    } else if (strcmp(path, "/live") == 0) {
        gw_exchange_set_handler(exchange, f, on_gone, NULL);
        gw_stream_begin(exchange, 200, plain, 1);
        gw_stream_write(exchange, "data: 1\n\n", 9);
    } else if (strcmp(path, "/records") == 0) {
        gw_stream_begin(exchange, 200, plain, 1);
        for (size_t i = 0; i < f->total; i++)
            gw_stream_write(exchange, "data: 123456\n\n", 14);
        gw_stream_end(exchange);
    } else if (strcmp(path, "/flood") == 0 || strcmp(path, "/rude") == 0) {
        f->waits = path[1] == 'f';
        gw_exchange_set_handler(exchange, f, on_gone, on_drained);
        gw_stream_begin(exchange, 200, plain, 1);
        pump(f);
    } else if (strcmp(path, "/late") == 0) {
        pthread_t thread;
        gw_exchange_set_handler(exchange, f, on_gone, NULL);
        f->message.run = answer;
        f->sent = (size_t)gw_exchange_loop(exchange);
        pthread_create(&thread, NULL, answer_later, f);
        pthread_detach(thread);
    } else if (strcmp(path, "/abort") == 0) {
        gw_stream_begin(exchange, 200, plain, 1);
        gw_stream_write(exchange, "data: 1\n\n", 9);
        gw_stream_abort(exchange);
    } else {
        gw_respond(exchange, 404, plain, 1, "none", 4);
    }
}

static void ended(void *ctx, gw_exchange *exchange, const gw_exchange_end *end)
{
    ended_count++;
    last_status = end->status;
}

/* Of a request to /slow: its bytes as they were last shown. */
static pthread_mutex_t shown_mutex = PTHREAD_MUTEX_INITIALIZER;
static char shown[1024];
static _Atomic uint32_t arrived_count;

static void *arriving(void *ctx, const gw_arrival *arrival, void *upload)
{
    if (upload == NULL && (arrival->length < 10 || memcmp(arrival->bytes, "POST /slow", 10) != 0))
        return NULL;
    pthread_mutex_lock(&shown_mutex);
    snprintf(shown, sizeof shown, "%.*s", (int)arrival->length, arrival->bytes);
    pthread_mutex_unlock(&shown_mutex);
    cr_assert_str_eq(arrival->remote, "127.0.0.1");
    return shown;
}

static void arrived(void *ctx, void *upload)
{
    cr_assert_eq(upload, (void *)shown);
    arrived_count++;
}

static void start(const char *const *sets)
{
    char *argv[24] = {"test", "--listen=127.0.0.1:0", "--set=admin.listen=127.0.0.1:0",
                      "--set=log.level=error"};
    int argc = 4;
    for (; sets != NULL && *sets != NULL; sets++)
        argv[argc++] = (char *)*sets;
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_conf_create(&conf, NULL, argc, argv, &err), BASE_OK, "%s", err.text);
    base_log_set_level(conf->log_level);
    gw_server_options options = {
        .conf = conf, .handler = handle, .arriving = arriving, .arrived = arrived, .ended = ended};
    cr_assert_eq(gw_server_create(&server, &options, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(gw_server_start(server, NULL), BASE_OK);
}

static void stop(void)
{
    gw_server_drain(server, 200);
    gw_server_cut(server, 0);
    gw_server_destroy(server);
    gw_conf_destroy(conf);
    cr_expect_leq(handled_count, ended_count, "an exchange did not end");
    for (flow *f = flows, *older; f != NULL; f = older) {
        older = f->older;
        free(f);
    }
}

static bool within(uint64_t ms, bool (*holds)(void))
{
    for (uint64_t begin = base_now_ns(); base_now_ns() - begin < ms * MS;) {
        if (holds())
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 2 * 1000000}, NULL);
    }
    return holds();
}

static bool one_gone(void)
{
    return gone_count == 1;
}

static bool one_handled(void)
{
    return handled_count >= 1;
}

static bool none_open(void)
{
    gw_server_stats stats = gw_server_get_stats(server);
    return stats.open_connections == 0 && stats.open_exchanges == 0;
}

static long resident_kib(void)
{
    long pages = 0, skip;
    FILE *file = fopen("/proc/self/statm", "r");
    cr_assert_eq(fscanf(file, "%ld %ld", &skip, &pages), 2);
    fclose(file);
    return pages * 4;
}

/* ---- a client ---- */

typedef struct client {
    int fd;
    SSL *ssl;
} client;

static client dial_to(const char *address)
{
    client c = {.fd = socket(AF_INET, SOCK_STREAM, 0)};
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    to.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
    struct timeval limit = {.tv_sec = 10};
    setsockopt(c.fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(c.fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    cr_assert_eq(connect(c.fd, (struct sockaddr *)&to, sizeof to), 0, "%s: %s", address,
                 strerror(errno));
    return c;
}

static client dial(void)
{
    return dial_to(gw_server_address(server, GW_LISTENER_PUBLIC));
}

static client dial_tls(const unsigned char *alpn, unsigned alpn_length)
{
    client c = dial_to(gw_server_tls_address(server));
    SSL_CTX *ctx = SSL_CTX_new(TLS_client_method());
    c.ssl = SSL_new(ctx);
    SSL_CTX_free(ctx);
    SSL_set_alpn_protos(c.ssl, alpn, alpn_length);
    SSL_set_fd(c.ssl, c.fd);
    cr_assert_eq(SSL_connect(c.ssl), 1);
    return c;
}

static bool put(client *c, const void *bytes, size_t length)
{
    for (const char *at = bytes; length > 0;) {
        ssize_t n = c->ssl != NULL ? SSL_write(c->ssl, at, (int)length)
                                   : send(c->fd, at, length, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        at += n;
        length -= (size_t)n;
    }
    return true;
}

static bool puts_to(client *c, const char *text)
{
    return put(c, text, strlen(text));
}

static ssize_t get(client *c, void *bytes, size_t length)
{
    return c->ssl != NULL ? SSL_read(c->ssl, bytes, (int)length) : recv(c->fd, bytes, length, 0);
}

static void hang_up(client *c)
{
    SSL_free(c->ssl);
    close(c->fd);
}

/* Everything until the server closes, terminated; the caller frees it. */
static char *slurp(client *c, size_t *length)
{
    base_buf all;
    base_buf_init(&all, 0);
    base_buf_reserve(&all, 1);
    char block[65536];
    for (ssize_t n; (n = get(c, block, sizeof block)) > 0;)
        base_buf_add(&all, block, (size_t)n);
    if (length != NULL)
        *length = all.length;
    all.data[all.length] = '\0';
    return all.data;
}

static char *talk(const char *request)
{
    client c = dial();
    puts_to(&c, request);
    char *answer_text = slurp(&c, NULL);
    hang_up(&c);
    return answer_text;
}

/* ---- HTTP/2 by hand ---- */

typedef struct frame {
    uint32_t length, stream;
    uint8_t type, flags;
    unsigned char payload[65536];
} frame;

enum { DATA = 0, HEADERS = 1, RST = 3, SETTINGS = 4, GOAWAY = 7, WINDOW = 8 };

static bool put_frame(client *c, int type, int flags, uint32_t stream, const void *payload,
                      size_t length)
{
    unsigned char head[9] = {
        (unsigned char)(length >> 16), (unsigned char)(length >> 8), (unsigned char)length,
        (unsigned char)type,           (unsigned char)flags,         (unsigned char)(stream >> 24),
        (unsigned char)(stream >> 16), (unsigned char)(stream >> 8), (unsigned char)stream};
    char whole[9 + 20000];
    memcpy(whole, head, 9);
    if (length > 0)
        memcpy(whole + 9, payload, length);
    return put(c, whole, 9 + length);
}

static size_t hpack(unsigned char *out, const char *name, const char *value)
{
    size_t n = 0, name_length = strlen(name), value_length = strlen(value);
    out[n++] = 0; /* literal, not indexed, new name */
    out[n++] = (unsigned char)name_length;
    memcpy(out + n, name, name_length);
    n += name_length;
    out[n++] = (unsigned char)value_length;
    memcpy(out + n, value, value_length);
    return n + value_length;
}

static bool put_request(client *c, uint32_t stream, const char *method, const char *path, bool body)
{
    unsigned char block[1024];
    size_t n = hpack(block, ":method", method);
    n += hpack(block + n, ":scheme", "http");
    n += hpack(block + n, ":authority", "127.0.0.1");
    n += hpack(block + n, ":path", path);
    return put_frame(c, HEADERS, 4 | (body ? 0 : 1), stream, block, n);
}

static void greet(client *c, uint32_t window)
{
    unsigned char settings[6] = {0,
                                 4,
                                 (unsigned char)(window >> 24),
                                 (unsigned char)(window >> 16),
                                 (unsigned char)(window >> 8),
                                 (unsigned char)window};
    puts_to(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    put_frame(c, SETTINGS, 0, 0, settings, sizeof settings);
}

static void open_window(client *c, uint32_t stream, uint32_t by)
{
    unsigned char delta[4] = {(unsigned char)(by >> 24), (unsigned char)(by >> 16),
                              (unsigned char)(by >> 8), (unsigned char)by};
    put_frame(c, WINDOW, 0, stream, delta, 4);
}

static bool get_exactly(client *c, void *bytes, size_t length)
{
    for (size_t got = 0; got < length;) {
        ssize_t n = get(c, (char *)bytes + got, length - got);
        if (n <= 0)
            return false;
        got += (size_t)n;
    }
    return true;
}

static bool get_frame(client *c, frame *f)
{
    unsigned char head[9];
    if (!get_exactly(c, head, 9))
        return false;
    f->length = (uint32_t)head[0] << 16 | (uint32_t)head[1] << 8 | head[2];
    f->type = head[3];
    f->flags = head[4];
    f->stream =
        ((uint32_t)head[5] << 24 | (uint32_t)head[6] << 16 | (uint32_t)head[7] << 8 | head[8]) &
        0x7fffffff;
    return f->length <= sizeof f->payload && get_exactly(c, f->payload, f->length);
}

/* Reads to the end of a stream; the body goes to `body` if that is not NULL. Returns the type that
 * ended it, or -1. */
static int finish_stream(client *c, uint32_t stream, base_buf *body, uint32_t *data_frames)
{
    static frame f;
    while (get_frame(c, &f)) {
        if (f.stream != stream)
            continue;
        if (f.type == RST)
            return RST;
        if (f.type == DATA) {
            if (f.length != 0 && data_frames != NULL)
                ++*data_frames;
            if (body != NULL)
                base_buf_add(body, f.payload, f.length);
            if (f.length != 0) {
                open_window(c, 0, f.length);
                if ((f.flags & 1) == 0)
                    open_window(c, stream, f.length);
            }
        }
        if ((f.type == DATA || f.type == HEADERS) && (f.flags & 1) != 0)
            return f.type;
    }
    return -1;
}

/* ---- TLS material ---- */

static char cert_path[64], key_path[64];

static void make_cert(void)
{
    snprintf(cert_path, sizeof cert_path, "/tmp/whimbrel-test-%d.pem", (int)getpid());
    snprintf(key_path, sizeof key_path, "/tmp/whimbrel-test-%d.key", (int)getpid());
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *cert = X509_new();
    X509_set_version(cert, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(cert), 1);
    X509_gmtime_adj(X509_getm_notBefore(cert), -60);
    X509_gmtime_adj(X509_getm_notAfter(cert), 3600);
    X509_set_pubkey(cert, key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(cert), "CN", MBSTRING_ASC,
                               (const unsigned char *)"localhost", -1, -1, 0);
    X509_set_issuer_name(cert, X509_get_subject_name(cert));
    X509_sign(cert, key, EVP_sha256());
    FILE *file = fopen(cert_path, "w");
    PEM_write_X509(file, cert);
    fclose(file);
    file = fopen(key_path, "w");
    PEM_write_PrivateKey(file, key, NULL, NULL, 0, NULL, NULL);
    fclose(file);
    X509_free(cert);
    EVP_PKEY_free(key);
}

static void start_tls(const char *const *more)
{
    static char cert_set[128], key_set[128];
    const char *sets[16] = {"--set=server.tls_listen=127.0.0.1:0", cert_set, key_set};
    make_cert();
    snprintf(cert_set, sizeof cert_set, "--set=server.tls_cert=%s", cert_path);
    snprintf(key_set, sizeof key_set, "--set=server.tls_key=%s", key_path);
    for (size_t n = 3; more != NULL && *more != NULL; more++)
        sets[n++] = *more;
    start(sets);
    unlink(cert_path);
    unlink(key_path);
}

static const unsigned char alpn_h2[] = {2, 'h', '2'},
                           alpn_http1[] = {8, 'h', 't', 't', 'p', '/', '1', '.', '1'};

#define SETS(...) ((const char *const[]){__VA_ARGS__, NULL})
