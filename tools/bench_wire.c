/* The transport, with clients of its own: h2load (nghttp2-client), whose rows are left out where
 * it is not installed, and raw frames.
 *
 *   g.h2.raw   requests a second of our transport under a handler that answers at once, beside the
 *              same handler on libh2o alone; both in this process, the client on another core
 *   g.sse.tok  processor time of the whole server for one streamed token of the null engine
 *   g.flood    an honest client's first token, p99, while others ask for all that they can get;
 *              the peer is the same client alone
 *   g.mem      resident bytes of a live stream, less what libh2o alone holds of one */
#include <arpa/inet.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <h2o.h>
#include <h2o/http1.h>
#include <h2o/http2.h>

#include "engine/base/clock.h"
#include "gateway/conf.h"
#include "gateway/server.h"
#include "tests/h2/wire.h"
#include "tools/bench.h"

#define ROUNDS 5
#define LARGE_BYTES 4096
#define CONNS 10
#define STREAMS 100 /* a connection */
#define ASKS_MAX 4000

static char large[LARGE_BYTES];

/* ---- libh2o alone ---- */

typedef struct bare {
    pthread_t thread;
    int fd;
    char address[32];
    h2o_globalconf_t config;
    h2o_context_t ctx;
    h2o_accept_ctx_t accept;
    _Atomic bool ready, quit;
} bare;

static void hold(h2o_generator_t *generator, h2o_req_t *req)
{
}

static int answer_bare(h2o_handler_t *self, h2o_req_t *req)
{
    static h2o_generator_t held = {hold, NULL};
    req->res.status = 200;
    req->res.reason = "OK";
    h2o_add_header(&req->pool, &req->res.headers, H2O_TOKEN_CONTENT_TYPE, NULL,
                   H2O_STRLIT("text/plain"));
    if (h2o_memis(req->path.base, req->path.len, H2O_STRLIT("/large"))) {
        h2o_send_inline(req, large, sizeof large);
    } else if (h2o_memis(req->path.base, req->path.len, H2O_STRLIT("/small"))) {
        h2o_send_inline(req, H2O_STRLIT("small\n"));
    } else {
        h2o_iovec_t record = {H2O_STRLIT(":\n\n")};
        h2o_start_response(req, &held);
        h2o_send(req, &record, 1, H2O_SEND_STATE_IN_PROGRESS);
    }
    return 0;
}

static void accept_bare(h2o_socket_t *listener, const char *err)
{
    bare *b = listener->data;
    h2o_socket_t *sock;
    while (err == NULL && (sock = h2o_evloop_socket_accept(listener)) != NULL)
        h2o_accept(&b->accept, sock);
}

static void *run_bare(void *arg)
{
    bare *b = arg;
    h2o_evloop_t *loop = h2o_evloop_create();
    h2o_context_init(&b->ctx, loop, &b->config);
    b->accept = (h2o_accept_ctx_t){.ctx = &b->ctx, .hosts = b->config.hosts};
    h2o_socket_t *listener = h2o_evloop_socket_create(loop, b->fd, H2O_SOCKET_FLAG_DONT_READ);
    listener->data = b;
    h2o_socket_read_start(listener, accept_bare);
    b->ready = true;
    while (!b->quit)
        h2o_evloop_run(loop, 10);
    h2o_socket_read_stop(listener);
    h2o_socket_close(listener);
    h2o_evloop_run(loop, 0); /* its connections end with the program */
    return NULL;
}

static bool start_bare(bare *b)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    memset(b, 0, sizeof *b);
    h2o_config_init(&b->config);
    h2o_hostconf_t *host =
        h2o_config_register_host(&b->config, h2o_iovec_init(H2O_STRLIT("default")), 65535);
    h2o_create_handler(h2o_config_register_path(host, "/", 0), sizeof(h2o_handler_t))->on_req =
        answer_bare;
    b->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (b->fd < 0 || bind(b->fd, (struct sockaddr *)&at, sizeof at) != 0 ||
        listen(b->fd, 1024) != 0 || getsockname(b->fd, (struct sockaddr *)&at, &length) != 0 ||
        pthread_create(&b->thread, NULL, run_bare, b) != 0)
        return false;
    snprintf(b->address, sizeof b->address, "127.0.0.1:%u", ntohs(at.sin_port));
    while (!b->ready)
        usleep(1000);
    return true;
}

static void stop_bare(bare *b)
{
    b->quit = true;
    pthread_join(b->thread, NULL);
}

/* ---- g.h2.raw ---- */

/* Thread: the loop's. */
static void answer_ours(void *ctx, gw_exchange *exchange)
{
    static const gw_header headers[] = {{"content-type", "text/plain"}};
    if (strcmp(gw_exchange_path(exchange), "/large") == 0)
        gw_respond(exchange, 200, headers, 1, large, sizeof large);
    else
        gw_respond(exchange, 200, headers, 1, "small\n", 6);
}

/* What h2load's last lines say; false if it is not there or an answer was none. */
static bool load(double *per_second, const char *arguments, uint32_t requests, const char *address,
                 const char *path)
{
    char command[512], line[256];
    unsigned succeeded = 0, total = 0;
    snprintf(command, sizeof command, "h2load -t1 -n %u %s http://%s%s 2>&1", requests, arguments,
             address, path);
    FILE *out = popen(command, "r");
    while (out != NULL && fgets(line, sizeof line, out) != NULL) {
        sscanf(line, "finished in %*[^,], %lf req/s", per_second);
        sscanf(line, "requests: %u total, %*u started, %*u done, %u succeeded", &total, &succeeded);
    }
    return out != NULL && pclose(out) == 0 && total == requests && succeeded == requests;
}

static bool bench_raw(void)
{
    static const struct {
        const char *config, *arguments, *path;
        uint32_t requests;
    } loads[] = {{"1 connection, 1 stream, 6 B", "-c1 -m1", "/small", 20000},
                 {"10 connections, 32 streams, 6 B", "-c10 -m32", "/small", 200000},
                 {"100 connections, 100 streams, 4 KB", "-c100 -m100", "/large", 100000}};
    char *argv[] = {"whimbrel-bench", "--listen", "127.0.0.1:0",   "--set",
                    "admin.listen=",  "--set",    "server.loops=1"};
    gw_conf *conf = NULL;
    gw_server *server = NULL;
    base_err err = BASE_ERR_INIT;
    static bare other; /* its connections outlive this */
    if (gw_conf_create(&conf, NULL, (int)(sizeof argv / sizeof *argv), argv, &err) != BASE_OK ||
        gw_server_create(&server, &(gw_server_options){.conf = conf, .handler = answer_ours},
                         &err) != BASE_OK ||
        gw_server_start(server, &err) != BASE_OK || !start_bare(&other)) {
        fprintf(stderr, "g.h2.raw: %s\n", err.text);
        return false;
    }
    bool ok = true;
    for (size_t i = 0; ok && i < sizeof loads / sizeof *loads; i++) {
        samples ours = {0};
        bench_peer peer = {.name = "libh2o alone"};
        for (int r = 0; ok && r < ROUNDS; r++) {
            double a = 0, b = 0;
            ok = load(&a, loads[i].arguments, loads[i].requests,
                      gw_server_address(server, GW_LISTENER_PUBLIC), loads[i].path) &&
                 load(&b, loads[i].arguments, loads[i].requests, other.address, loads[i].path);
            ours.v[ours.n++] = a;
            peer.s.v[peer.s.n++] = b;
        }
        if (ok)
            bench_report_beside("g.h2.raw", loads[i].config, "req/s", true, &ours, 0, "", &peer, 1);
    }
    if (!ok)
        fprintf(stderr, "g.h2.raw: an answer is missing\n");
    gw_server_drain(server, 0);
    gw_server_cut(server, 0);
    gw_server_destroy(server);
    gw_conf_destroy(conf);
    stop_bare(&other);
    return ok;
}

/* ---- the program with the null engine ---- */

static const char *const sets[] = {"engine.null=true",
                                   "log.access=false",
                                   "engine.sequences_max=1024",
                                   "engine.step_rows_max=4096",
                                   "engine.queue_max=4096",
                                   "limits.connections_max=2000",
                                   "admission.tenant_percent_max=100",
                                   "workers.queue_max=2048",
                                   NULL};

/* Seconds of processor time of a process. */
static double cpu_s(pid_t pid)
{
    char path[64];
    unsigned long user = 0, system = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    bool read = file != NULL &&
                fscanf(file, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu",
                       &user, &system) == 2;
    if (file != NULL)
        fclose(file);
    return read ? (double)(user + system) / (double)sysconf(_SC_CLK_TCK) : 0;
}

static bool bench_tokens(const char *program, const char *model)
{
    static const struct {
        const char *config, *arguments;
        uint32_t requests, tokens;
    } loads[] = {{"1 stream", "-c1 -m1", 20, 2000},
                 {"64 streams", "-c4 -m16", 256, 1000},
                 {"1,000 streams", "-c10 -m100", 2000, 200}};
    const char *slash = strrchr(model, '/');
    wire_server server = wire_serve(program, model, sets);
    bool ok = true;
    for (size_t i = 0; ok && i < sizeof loads / sizeof *loads; i++) {
        char body[96], arguments[256];
        snprintf(body, sizeof body, "%s/bench-body", server.dir);
        FILE *file = fopen(body, "w");
        ok = file != NULL &&
             fprintf(file,
                     "{\"model\":\"%s\",\"stream\":true,\"ignore_eos\":true,\"max_tokens\":%u,"
                     "\"messages\":[{\"role\":\"user\",\"content\":\"Go on.\"}]}",
                     slash != NULL ? slash + 1 : model, loads[i].tokens) > 0;
        ok = file != NULL && fclose(file) == 0 && ok;
        snprintf(arguments, sizeof arguments, "%s -d %s -H 'content-type: application/json'",
                 loads[i].arguments, body);
        samples cpu = {0}, rate = {0};
        double tokens = (double)loads[i].requests * loads[i].tokens;
        for (int r = 0; ok && r < 3; r++) {
            double per_second = 0, before = cpu_s(server.pid);
            ok = load(&per_second, arguments, loads[i].requests, server.clear,
                      "/v1/chat/completions");
            cpu.v[cpu.n++] = (cpu_s(server.pid) - before) * 1e6 / tokens;
            rate.v[rate.n++] = per_second * loads[i].tokens;
        }
        if (ok) {
            bench_report("g.sse.tok.cpu", loads[i].config, "us", false, &cpu, 0, "");
            bench_report("g.sse.tok.rate", loads[i].config, "tok/s", true, &rate, 0, "");
        }
    }
    if (!ok)
        fprintf(stderr, "g.sse.tok: an answer is missing\n");
    return wire_stop(&server) && ok;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of one-token chats over connections of their own, for `seconds`: p99 of the first record in
 * microseconds; 0 if one was not answered. */
static double first_token(const wire_server *server, const char *model, double seconds)
{
    static double us[ASKS_MAX];
    static wire w;
    char body[256], request[512];
    size_t n = 0;
    int length = snprintf(body, sizeof body,
                          "{\"model\":\"%s\",\"stream\":true,\"max_tokens\":1,"
                          "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
                          model);
    length = snprintf(request, sizeof request,
                      "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: "
                      "application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s",
                      length, body);
    for (uint64_t end = wire_now_us() + (uint64_t)(seconds * 1e6);
         wire_now_us() < end && n < ASKS_MAX; n++) {
        uint64_t begin = wire_now_us();
        bool came = false;
        wire_open(&w, server->clear, false, NULL);
        if (wire_send(&w, request, (size_t)length, 10000))
            while (!came && wire_fill(&w, 10000))
                came = memmem(w.in, w.length, "data: {", 7) != NULL;
        us[n] = (double)(wire_now_us() - begin);
        wire_close(&w);
        if (!came)
            return 0;
        usleep(2000);
    }
    qsort(us, n, sizeof *us, by_value);
    return n != 0 ? us[(size_t)(0.99 * (double)(n - 1))] : 0;
}

static bool bench_flood(const char *program, const char *model)
{
    const char *slash = strrchr(model, '/'), *name = slash != NULL ? slash + 1 : model;
    wire_server server = wire_serve(program, model, sets);
    samples under = {0};
    bench_peer alone = {.name = "alone"};
    char command[256];
    snprintf(command, sizeof command,
             "h2load -t1 -D 4 -c20 -m32 http://%s/v1/models >/dev/null 2>&1", server.clear);
    bool ok = first_token(&server, name, 0.5) > 0;
    for (int r = 0; ok && r < 3; r++) {
        alone.s.v[alone.s.n++] = first_token(&server, name, 2);
        FILE *flood = popen(command, "r");
        usleep(500000);
        under.v[under.n++] = first_token(&server, name, 2.5);
        ok = flood != NULL && pclose(flood) == 0 && under.v[r] > 0 && alone.s.v[r] > 0;
    }
    if (ok)
        bench_report_beside("g.flood", "640 requests at a time for a list of models", "us", false,
                            &under, 0, "", &alone, 1);
    else
        fprintf(stderr, "g.flood: an answer is missing\n");
    return wire_stop(&server) && ok;
}

/* ---- g.mem ---- */

static wire conns[CONNS];

static void read_all(void)
{
    for (int c = 0; c < CONNS; c++)
        while (wire_fill(&conns[c], 0))
            conns[c].at = conns[c].length;
}

/* STREAMS requests on each connection, which all answer and none ends; false if one did not. */
static bool open_streams(const char *address, const char *path, const char *body)
{
    unsigned char block[512];
    size_t length = wire_request(block, "POST", path, false);
    length += wire_field(block + length, "content-type", "application/json");
    for (int c = 0; c < CONNS; c++) {
        memset(&conns[c], 1, sizeof conns[c]); /* resident before it is measured */
        wire_open(&conns[c], address, false, NULL);
        if (!wire_greet(&conns[c]))
            return false;
        for (uint32_t s = 0; s < STREAMS; s++)
            if (!wire_put(&conns[c], HEADERS, END_HEADERS, 2 * s + 1, block, length) ||
                !wire_put(&conns[c], DATA, END_STREAM, 2 * s + 1, body, strlen(body)))
                return false;
    }
    for (uint64_t end = wire_now_us() + 4000000; wire_now_us() < end; usleep(20000))
        read_all();
    for (int c = 0; c < CONNS; c++)
        if (conns[c].closed)
            return false;
    return true;
}

static void close_streams(void)
{
    for (int c = 0; c < CONNS; c++)
        wire_close(&conns[c]);
}

static bool bench_memory(const char *program, const char *model)
{
    const char *slash = strrchr(model, '/');
    const char *slow[16];
    size_t count = 0;
    for (; sets[count] != NULL; count++)
        slow[count] = sets[count];
    slow[count++] = "engine.slow_step_us=500000"; /* few tokens, for as long as it takes */
    slow[count] = NULL;
    static bare other;
    const wire_server self = {.pid = getpid()};
    char body[192], command[256];
    unsigned running = 0;
    snprintf(body, sizeof body,
             "{\"model\":\"%s\",\"stream\":true,\"ignore_eos\":true,\"max_tokens\":2000,"
             "\"messages\":[{\"role\":\"user\",\"content\":\"Go on.\"}]}",
             slash != NULL ? slash + 1 : model);
    memset(conns, 1, sizeof conns);
    if (!start_bare(&other))
        return false;
    long before = wire_resident_kib(&self);
    bool ok = open_streams(other.address, "/hold", body);
    double bare_kib = (double)(wire_resident_kib(&self) - before) / (CONNS * STREAMS);
    close_streams();
    stop_bare(&other);

    wire_server server = wire_serve(program, model, slow);
    first_token(&server, slash != NULL ? slash + 1 : model, 3);
    before = wire_resident_kib(&server);
    ok = ok && open_streams(server.clear, "/v1/chat/completions", body);
    double ours_kib = (double)(wire_resident_kib(&server) - before) / (CONNS * STREAMS);
    snprintf(command, sizeof command,
             "curl -s http://%s/metrics | awk '/^whimbrel_running[ {]/ { print $NF }'",
             server.admin);
    FILE *out = popen(command, "r");
    ok = out != NULL && fscanf(out, "%u", &running) == 1 && running == CONNS * STREAMS && ok;
    if (out != NULL)
        pclose(out);
    close_streams();
    if (ok) {
        samples s = {.v = {ours_kib - bare_kib}, .n = 1};
        char config[96];
        snprintf(config, sizeof config, "1,000 live streams; libh2o alone %.1f", bare_kib);
        bench_report("g.mem", config, "KiB", false, &s, 24, "the aim, not a limit of the machine");
    } else {
        fprintf(stderr, "g.mem: %u of %d streams live\n", running, CONNS * STREAMS);
    }
    return wire_stop(&server) && ok;
}

bool bench_wire(const char *program, const char *model)
{
    bool h2load = access("/usr/bin/h2load", X_OK) == 0, ok = true;
    memset(large, 'x', sizeof large);
    if (!h2load &&
        (bench_wanted("g.h2.raw") || bench_wanted("g.sse.tok") || bench_wanted("g.flood")))
        fprintf(stderr, "g.h2.raw, g.sse.tok, g.flood: left out, they want h2load\n");
    if (bench_wanted("g.mem"))
        ok = bench_memory(program, model); /* first: the heap is small */
    if (h2load && bench_wanted("g.h2.raw"))
        ok = bench_raw() && ok;
    if (h2load && bench_wanted("g.sse.tok"))
        ok = bench_tokens(program, model) && ok;
    if (h2load && bench_wanted("g.flood"))
        ok = bench_flood(program, model) && ok;
    return ok;
}
