/* wire: a client that says what it is told to, frame by frame, and the server that it says it to:
 * the program itself, as a child process on ports of its own. For programs with a main of their
 * own; what goes wrong here ends them. One thread. */
#pragma once
#include <openssl/ssl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct wire_server {
    pid_t pid;
    char clear[64], tls[64], admin[64]; /* "127.0.0.1:PORT" */
    char dir[64];                       /* its data, log and key; removed by stop */
} wire_server;

/* Starts `program` on `model` with --set for each of `sets` (NULL at the end), and waits until it
 * is ready. */
wire_server wire_serve(const char *program, const char *model, const char *const *sets);
/* SIGTERM; false if it did not end with status 0. */
bool wire_stop(wire_server *server);
long wire_resident_kib(const wire_server *server);
long wire_peak_kib(const wire_server *server); /* since it started or forget */
void wire_forget_peak(const wire_server *server);

typedef struct wire {
    int fd;
    SSL *ssl; /* NULL: clear text */
    unsigned char in[1 << 17];
    size_t length, at; /* bytes read, and of them used up */
    bool closed;       /* the server did, or the connection failed */
} wire;

typedef enum wire_event { WIRE_FRAME, WIRE_CLOSED, WIRE_SILENT } wire_event;

typedef struct wire_frame {
    uint8_t type, flags;
    uint32_t stream, length;
    const unsigned char *payload; /* valid until the next call */
} wire_frame;

enum {
    DATA,
    HEADERS,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    PUSH_PROMISE,
    PING,
    GOAWAY,
    WINDOW_UPDATE,
    CONTINUATION
};
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4, PADDED = 8, PRIORITIZED = 32 };

/* Connects; over TLS with ALPN h2 unless `alpn` says otherwise ("http/1.1"). */
void wire_open(wire *w, const char *address, bool tls, const char *alpn);
void wire_close(wire *w);
/* False once the server does not take more; waits at most `ms` for it. */
bool wire_send(wire *w, const void *bytes, size_t length, int ms);
/* More bytes into `in`; false if there were none within `ms` or the connection is over. */
bool wire_fill(wire *w, int ms);
bool wire_put(wire *w, int type, int flags, uint32_t stream, const void *payload, size_t length);
wire_event wire_get(wire *w, wire_frame *frame, int ms);
/* Preface and an empty SETTINGS. */
bool wire_greet(wire *w);

/* Header blocks: literals without indexing, names and values below 2^14 bytes. Return what was
 * added. */
size_t wire_field(unsigned char *block, const char *name, const char *value);
size_t wire_request(unsigned char *block, const char *method, const char *path, bool tls);
/* An HTTP/2 status, 0 if it is not encoded as libh2o does. */
int wire_status(const wire_frame *headers);
/* Microseconds of a monotonic clock. */
uint64_t wire_now_us(void);
