/* Clients that mean harm, one kind at a time, against the program itself on loopback, while an
 * honest one streams one-token chats.
 *
 *   attack PROGRAM MODEL [NAME…]   a name selects the attacks that hold it
 *
 * Of each attack it prints the honest client's time to first token (p50 and p99; the quiet values
 * come first) and the peak of the server's memory. Asserted: the honest client gets every answer;
 * memory stays within what the attack's row says, above where the server began; in the end nothing
 * runs, and the server ends well. With WHIMBREL_LONG an attack lasts 20 s instead of 1.5. Times are
 * only printed: attackers and server share the machine. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "tests/h2/wire.h"

#define SAMPLES_MAX 20000
#define MANY_MAX 10000 /* connections of one attack */

static wire_server server;
static uint64_t attack_us;
static uint32_t many; /* connections that the descriptor limit allows, at most MANY_MAX */
static wire *conns;   /* MANY_MAX */

/* ---- the honest client ---- */

static _Atomic bool watching;
static _Atomic uint32_t refused;
static uint32_t samples[SAMPLES_MAX]; /* microseconds */
static _Atomic uint32_t sample_count;

/* One streamed chat over a connection of its own: microseconds to the first record, 0 if there was
 * none. */
static uint32_t ask(void)
{
    static const char body[] =
        "{\"model\":\"nano\",\"stream\":true,\"max_tokens\":1,\"temperature\":0,"
        "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";
    static wire w; /* of one thread */
    char request[512];
    uint32_t us = 0;
    int n = snprintf(request, sizeof request,
                     "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: "
                     "application/json\r\n"
                     "Connection: close\r\nContent-Length: %zu\r\n\r\n%s",
                     sizeof body - 1, body);
    uint64_t begin = wire_now_us();
    wire_open(&w, server.clear, false, NULL);
    if (wire_send(&w, request, (size_t)n, 20000))
        while (us == 0 && wire_fill(&w, 20000))
            if (memmem(w.in, w.length, "data: {", 7) != NULL)
                us = (uint32_t)(wire_now_us() - begin);
    wire_close(&w);
    return us;
}

static void *watch(void *arg)
{
    while (watching) {
        uint32_t us = ask();
        if (us == 0)
            refused++;
        else if (sample_count < SAMPLES_MAX)
            samples[sample_count++] = us;
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    return NULL;
}

static int by_value(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* ---- attacks: each works until `end`, and leaves its connections to be closed ---- */

typedef struct attack {
    const char *name;
    void (*run)(uint64_t end);
    uint32_t connections; /* of `conns`, greeted before it begins; UINT32_MAX: as many as may be,
                             not greeted */
    long memory_mib_max;  /* above where the server was before */
} attack;

/* Another connection in place of one that was closed. */
static void renew(wire *w, bool greet)
{
    wire_close(w);
    wire_open(w, server.clear, false, NULL);
    if (greet)
        wire_greet(w);
}

static void drain(wire *w)
{
    while (wire_fill(w, 0))
        w->at = w->length;
}

static size_t block_of(unsigned char *block, const char *method, const char *path)
{
    return wire_request(block, method, path, false);
}

static void flood_resets(uint64_t end)
{
    unsigned char block[256];
    size_t n = block_of(block, "GET", "/v1/models");
    for (uint32_t stream = 1; wire_now_us() < end; stream += 2) {
        if (!wire_put(conns, HEADERS, END_STREAM | END_HEADERS, stream, block, n) ||
            !wire_put(conns, RST_STREAM, 0, stream, "\0\0\0\x08", 4)) {
            renew(conns, true);
            stream = (uint32_t)-1;
        }
        drain(conns);
    }
}

static void flood_made_resets(uint64_t end)
{
    unsigned char block[256];
    size_t n = block_of(block, "GET", "/v1/models");
    for (uint32_t stream = 1; wire_now_us() < end; stream += 2) {
        if (!wire_put(conns, HEADERS, END_STREAM | END_HEADERS, stream, block, n) ||
            !wire_put(conns, WINDOW_UPDATE, 0, stream, "\0\0\0\0", 4)) {
            renew(conns, true);
            stream = (uint32_t)-1;
        }
        drain(conns);
    }
}

/* Frames of one kind, thousands a write, answers unread until the server closes. */
static void flood_frames(uint64_t end, int type, const char *payload, size_t length)
{
    static char frames[65536];
    size_t at = 0;
    while (at + 9 + length < sizeof frames) {
        memcpy(frames + at, (char[]){0, 0, (char)length, (char)type, 0, 0, 0, 0, 0}, 9);
        memcpy(frames + at + 9, payload, length);
        at += 9 + length;
    }
    while (wire_now_us() < end)
        if (!wire_send(conns, frames, at, 100))
            renew(conns, true);
}

static void flood_pings(uint64_t end)
{
    flood_frames(end, PING, "12345678", 8);
}

static void flood_settings(uint64_t end)
{
    flood_frames(end, SETTINGS, "\0\4\0\0\xff\xff", 6);
}

static void send_slow_heads(uint64_t end)
{
    while (wire_now_us() < end) {
        for (uint32_t i = 0; i < 900 && i < many; i++)
            if (!wire_send(&conns[i],
                           conns[i].length == 0 ? "GET /v1/models HTTP/1.1\r\nHost: a\r\nX: " : "x",
                           conns[i].length == 0 ? 37 : 1, 0))
                renew(&conns[i], false);
            else
                conns[i].length = 1; /* its head has begun */
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
}

static void send_slow_bodies(uint64_t end)
{
    static const char head[] = "POST /v1/chat/completions HTTP/1.1\r\nHost: "
                               "127.0.0.1\r\nContent-Type: application/json\r\n"
                               "Content-Length: 30000000\r\n\r\n{\"model\":\"";
    static char some[16384];
    memset(some, 'x', sizeof some);
    for (bool first = true; wire_now_us() < end; first = false) {
        for (uint32_t i = 0; i < 200 && i < many; i++)
            if (!wire_send(&conns[i], first ? head : some, first ? sizeof head - 1 : sizeof some,
                           0))
                renew(&conns[i], false);
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
}

/* Asks for the largest document on every stream that there may be, and opens no window. */
static void read_nothing(uint64_t end)
{
    unsigned char block[256];
    size_t n = block_of(block, "GET", "/openapi.json");
    for (uint32_t c = 0; c < 20 && wire_now_us() < end; c++) {
        wire_put(&conns[c], SETTINGS, 0, 0, "\0\4\0\0\0\0", 6);
        for (uint32_t i = 0; i < 100; i++)
            wire_put(&conns[c], HEADERS, END_STREAM | END_HEADERS, 2 * i + 1, block, n);
    }
    while (wire_now_us() < end)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
}

/* A table entry of 4000 bytes, and 12,000 references to it in each request. */
static void send_header_bombs(uint64_t end)
{
    static unsigned char block[16384];
    for (uint32_t stream = 1; wire_now_us() < end; stream += 2) {
        size_t n = block_of(block, "GET", "/v1/models");
        if (stream == 1) {
            memcpy(block + n, "\x40\1x\x7f\xa1\x1e", 6);
            memset(block + n + 6, 'y', 4000);
            n += 4006;
        }
        memset(block + n, 0xbe, 12000);
        if (!wire_put(conns, HEADERS, END_STREAM | END_HEADERS, stream, block, n + 12000)) {
            renew(conns, true);
            stream = (uint32_t)-1;
        }
        drain(conns);
    }
}

static void send_endless_heads(uint64_t end)
{
    static unsigned char block[16384];
    while (wire_now_us() < end) {
        size_t n = block_of(block, "GET", "/");
        bool taken = wire_put(conns, HEADERS, END_STREAM, 1, block, n);
        while (taken && wire_now_us() < end)
            taken =
                wire_put(conns, CONTINUATION, 0, 1, block, wire_field(block, "x-more", "and more"));
        renew(conns, true);
    }
}

static void hold_many(uint64_t end)
{
    for (uint32_t i = 0; i < many; i++)
        if (i % 2 == 0)
            wire_greet(&conns[i]);
    while (wire_now_us() < end)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
}

static void post_again_and_again(uint64_t end, const char *body, size_t length)
{
    char head[256];
    int n = snprintf(head, sizeof head,
                     "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: "
                     "application/json\r\n"
                     "Content-Length: %zu\r\n\r\n",
                     length);
    while (wire_now_us() < end) {
        bool answered = wire_send(conns, head, (size_t)n, 1000) &&
                        wire_send(conns, body, length, 5000) && wire_fill(conns, 20000);
        drain(conns);
        if (!answered || conns->closed)
            renew(conns, false);
    }
}

static void post_deep(uint64_t end)
{
    static char body[200000];
    memset(body, '[', sizeof body);
    memcpy(body, "{\"model\":\"nano\",\"messages\":", 27);
    post_again_and_again(end, body, sizeof body);
}

static void post_huge(uint64_t end)
{
    static char body[8 << 20];
    size_t n = (size_t)sprintf(body, "{\"model\":\"nano\",\"messages\":[{\"role\":\"user\","
                                     "\"content\":\"hi\"}],\"metadata\":{\"n\":[1");
    while (n + 16 < sizeof body) {
        memcpy(body + n, ",1", 2);
        n += 2;
    }
    n += (size_t)sprintf(body + n, "]}}");
    post_again_and_again(end, body, n);
}

static void post_tools(uint64_t end)
{
    static char body[2 << 20];
    size_t n = (size_t)sprintf(body, "{\"model\":\"nano\",\"max_tokens\":1,\"messages\":[{\"role\":"
                                     "\"user\",\"content\":\"hi\"}],\"tools\":[");
    for (int i = 0; i < 10000; i++)
        n += (size_t)sprintf(body + n,
                             "%s{\"type\":\"function\",\"function\":{\"name\":\"tool_%d\","
                             "\"parameters\":{\"type\":\"object\","
                             "\"properties\":{\"a\":{\"type\":\"string\"}}}}}",
                             i ? "," : "", i);
    n += (size_t)sprintf(body + n, "]}");
    post_again_and_again(end, body, n);
}

/* Bounds: what libh2o keeps of a connection is a few KiB, of a stream about 5; a body is held
 * whole, 256 MiB of all at most (limits.body_bytes_total_max), answers that wait as many
 * (limits.answer_bytes_total_max); a tree of JSON takes some 30 times its text. */
static const attack attacks[] = {
    {"a flood of resets", flood_resets, 1, 32},
    {"a flood of streams that the server must reset", flood_made_resets, 1, 32},
    {"a flood of pings", flood_pings, 1, 32},
    {"a flood of settings", flood_settings, 1, 32},
    {"heads that drip", send_slow_heads, UINT32_MAX, 64},
    {"bodies that drip", send_slow_bodies, UINT32_MAX, 300},
    {"readers that stop", read_nothing, 20, 320},
    {"header bombs", send_header_bombs, 1, 64},
    {"heads without end", send_endless_heads, 1, 32},
    {"ten thousand connections", hold_many, UINT32_MAX, 300},
    {"deep JSON", post_deep, 1, 64},
    {"huge JSON", post_huge, 1, 512},
    {"ten thousand tools", post_tools, 1, 256},
};

/* ---- */

static uint32_t percentile(double p)
{
    uint32_t n = sample_count;
    return n == 0 ? 0 : samples[(uint32_t)(p * (n - 1))];
}

/* The honest client while `a` runs, or alone. */
static void measure(const attack *a, uint64_t us, long *memory_kib)
{
    pthread_t thread;
    sample_count = 0;
    watching = true;
    pthread_create(&thread, NULL, watch, NULL);
    uint64_t end = wire_now_us() + us;
    if (a != NULL)
        a->run(end);
    while (wire_now_us() < end)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    *memory_kib = wire_peak_kib(&server);
    watching = false;
    pthread_join(thread, NULL);
    qsort(samples, sample_count, sizeof *samples, by_value);
}

static bool none_left(void)
{
    char command[256];
    snprintf(command, sizeof command,
             "curl -s http://%s/metrics | awk '/^whimbrel_(running|queued)[ {]/ { sum += $NF; n++ "
             "} END { exit !(n >= 2 && sum == 0) }'",
             server.admin);
    for (int i = 0; i < 500; i++) {
        if (system(command) == 0)
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    return false;
}

static bool wanted(const char *name, char *const *parts)
{
    for (char *const *part = parts; *part != NULL; part++)
        if (strstr(name, *part) != NULL)
            return true;
    return *parts == NULL;
}

int main(int argc, char **argv)
{
    uint32_t tested = 0, failed = 0;
    if (argc < 3) {
        fprintf(stderr, "usage: attack PROGRAM MODEL [NAME...]\n");
        return 2;
    }
    attack_us = getenv("WHIMBREL_LONG") != NULL ? 20000000 : 1500000;
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    many = limit.rlim_cur < MANY_MAX + 100 ? (uint32_t)limit.rlim_cur - 100 : MANY_MAX;
    conns = calloc(MANY_MAX, sizeof *conns); /* untouched pages cost nothing */
    server =
        wire_serve(argv[1], argv[2],
                   (const char *const[]){"log.access=false", "limits.connections_max=12000", NULL});
    long memory, first = 0, before;
    for (int i = 0; i < 20; i++)
        ask(); /* all is warm */
    measure(NULL, attack_us, &first);
    uint32_t quiet = percentile(0.99);
    printf("quiet: %u answers, first token p50 %u us, p99 %u us, %ld MiB\n", sample_count,
           percentile(0.5), quiet, first >> 10);
    for (size_t i = 0; i < sizeof attacks / sizeof *attacks; i++) {
        const attack *a = &attacks[i];
        if (!wanted(a->name, argv + 3))
            continue;
        uint32_t count = a->connections == UINT32_MAX ? many : a->connections;
        refused = 0;
        before = wire_resident_kib(&server);
        wire_forget_peak(&server);
        for (uint32_t c = 0; c < count; c++) {
            wire_open(&conns[c], server.clear, false, NULL);
            if (a->connections != UINT32_MAX && a->run != post_deep && a->run != post_huge &&
                a->run != post_tools)
                wire_greet(&conns[c]);
        }
        measure(a, attack_us, &memory);
        for (uint32_t c = 0; c < count; c++)
            wire_close(&conns[c]);
        bool small = memory - before <= a->memory_mib_max << 10,
             served = refused == 0 && sample_count > 0;
        tested++;
        failed += !(small && served);
        printf("%s %s: %u answers, p50 %u us, p99 %u us (%.1f times), %+ld MiB of %ld%s%s\n",
               small && served ? "[PASS]" : "[FAIL]", a->name, sample_count, percentile(0.5),
               percentile(0.99), (double)percentile(0.99) / quiet, (memory - before) >> 10,
               a->memory_mib_max, small ? "" : ": too much memory",
               served ? "" : ": the honest client was not served");
        fflush(stdout);
    }
    tested += 2;
    if (!none_left()) {
        failed++;
        puts("[FAIL] something still runs");
    }
    if (!wire_stop(&server)) {
        failed++;
        puts("[FAIL] the server does not end well");
    }
    printf("[====] Synthesis: Tested: %u | Passing: %u | Failing: %u | Crashing: 0\n", tested,
           tested - failed, failed);
    free(conns);
    return failed != 0;
}
