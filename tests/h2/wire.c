#include "tests/h2/wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define READY_MS 60000
#define SET_MAX 32

static _Noreturn void die(const char *what, const char *detail)
{
    fprintf(stderr, "%s: %s (%s)\n", what, detail, strerror(errno));
    exit(2);
}

uint64_t wire_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* ---- the server ---- */

static void make_cert(const char *cert_path, const char *key_path)
{
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *cert = X509_new();
    X509_set_version(cert, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(cert), 1);
    X509_gmtime_adj(X509_getm_notBefore(cert), -60);
    X509_gmtime_adj(X509_getm_notAfter(cert), 86400);
    X509_set_pubkey(cert, key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(cert), "CN", MBSTRING_ASC,
                               (const unsigned char *)"localhost", -1, -1, 0);
    X509_set_issuer_name(cert, X509_get_subject_name(cert));
    X509_sign(cert, key, EVP_sha256());
    FILE *file = fopen(cert_path, "w");
    if (file == NULL || PEM_write_X509(file, cert) != 1 || fclose(file) != 0)
        die("certificate", cert_path);
    file = fopen(key_path, "w");
    if (file == NULL || PEM_write_PrivateKey(file, key, NULL, NULL, 0, NULL, NULL) != 1 ||
        fclose(file) != 0)
        die("key", key_path);
    X509_free(cert);
    EVP_PKEY_free(key);
}

/* The text after `mark` up to a blank, from a file; false if it is not there yet. */
static bool find_word(const char *path, const char *mark, char *out, size_t size)
{
    char line[1024];
    bool found = false;
    FILE *file = fopen(path, "r");
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        const char *at = strstr(line, mark);
        if (at != NULL && strchr(at, '\n') != NULL) {
            at += strlen(mark);
            snprintf(out, size, "%.*s", (int)strcspn(at, " \n"), at);
            found = true;
        }
    }
    if (file != NULL)
        fclose(file);
    return found;
}

wire_server wire_serve(const char *program, const char *model, const char *const *sets)
{
    wire_server server = {0};
    char out[96], log[96], data[96], texts[SET_MAX][128];
    const char *argv[SET_MAX + 16];
    size_t argc = 0, count = 0;
    signal(SIGPIPE, SIG_IGN);
    strcpy(server.dir, "/tmp/whimbrel-wire-XXXXXX");
    if (mkdtemp(server.dir) == NULL)
        die("directory", server.dir);
    char cert[96], key[96];
    snprintf(cert, sizeof cert, "%s/cert.pem", server.dir);
    snprintf(key, sizeof key, "%s/key.pem", server.dir);
    make_cert(cert, key);
    snprintf(out, sizeof out, "%s/out", server.dir);
    snprintf(log, sizeof log, "%s/log", server.dir);
    snprintf(data, sizeof data, "%s/data", server.dir);
    const char *fixed[] = {program, "--model", model, "--listen", "127.0.0.1:0", "--data", data};
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        argv[argc++] = fixed[i];
    snprintf(texts[count++], sizeof *texts, "--set=admin.listen=127.0.0.1:0");
    snprintf(texts[count++], sizeof *texts, "--set=server.tls_listen=127.0.0.1:0");
    snprintf(texts[count++], sizeof *texts, "--set=server.tls_cert=%s", cert);
    snprintf(texts[count++], sizeof *texts, "--set=server.tls_key=%s", key);
    for (; sets != NULL && *sets != NULL && count < SET_MAX; sets++)
        snprintf(texts[count++], sizeof *texts, "--set=%s", *sets);
    for (size_t i = 0; i < count; i++)
        argv[argc++] = texts[i];
    argv[argc] = NULL;
    if ((server.pid = fork()) == 0) {
        int out_fd = open(out, O_WRONLY | O_CREAT, 0600),
            log_fd = open(log, O_WRONLY | O_CREAT, 0600);
        dup2(out_fd, 1);
        dup2(log_fd, 2);
        execv(program, (char *const *)argv);
        _exit(127);
    }
    for (uint64_t begin = wire_now_us();
         !find_word(out, "ready http://", server.clear, sizeof server.clear);) {
        if (wire_now_us() - begin > READY_MS * 1000 || waitpid(server.pid, NULL, WNOHANG) != 0) {
            char command[128];
            snprintf(command, sizeof command, "tail -5 %s >&2", log);
            if (system(command) != 0)
                perror(log);
            die("the server is not ready", program);
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    while (!find_word(log, " tls=", server.tls, sizeof server.tls) ||
           !find_word(log, " admin=", server.admin, sizeof server.admin))
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    return server;
}

bool wire_stop(wire_server *server)
{
    int status = -1;
    char command[128];
    kill(server->pid, SIGTERM);
    for (int i = 0; i < 3000 && waitpid(server->pid, &status, WNOHANG) == 0; i++) {
        if (i == 2900)
            kill(server->pid, SIGKILL);
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    snprintf(command, sizeof command, "rm -rf %s", server->dir);
    return system(command) == 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static long status_kib(const wire_server *server, const char *format)
{
    char path[64], line[128];
    long kib = -1;
    snprintf(path, sizeof path, "/proc/%d/status", (int)server->pid);
    FILE *file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, format, &kib) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return kib;
}

long wire_resident_kib(const wire_server *server)
{
    return status_kib(server, "VmRSS: %ld");
}

long wire_peak_kib(const wire_server *server)
{
    return status_kib(server, "VmHWM: %ld");
}

void wire_forget_peak(const wire_server *server)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/clear_refs", (int)server->pid);
    FILE *file = fopen(path, "w");
    if (file == NULL || fputs("5", file) < 0 || fclose(file) != 0)
        die("the peak of its memory", path);
}

/* ---- bytes ---- */

void wire_open(wire *w, const char *address, bool tls, const char *alpn)
{
    w->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    w->ssl = NULL;
    w->length = w->at = 0;
    w->closed = false;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    to.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
    int on = 1;
    if (w->fd < 0 || connect(w->fd, (struct sockaddr *)&to, sizeof to) != 0)
        die("connect", address);
    setsockopt(w->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (tls) {
        unsigned char protocols[16];
        alpn = alpn != NULL ? alpn : "h2";
        protocols[0] = (unsigned char)strlen(alpn);
        memcpy(protocols + 1, alpn, strlen(alpn));
        SSL_CTX *ctx = SSL_CTX_new(TLS_client_method());
        w->ssl = SSL_new(ctx);
        SSL_CTX_free(ctx);
        SSL_set_alpn_protos(w->ssl, protocols, protocols[0] + 1u);
        SSL_set_fd(w->ssl, w->fd);
        if (SSL_connect(w->ssl) != 1)
            die("TLS", address);
    }
    fcntl(w->fd, F_SETFL, fcntl(w->fd, F_GETFL) | O_NONBLOCK);
}

void wire_close(wire *w)
{
    SSL_free(w->ssl);
    close(w->fd);
    w->ssl = NULL;
    w->fd = -1;
}

static bool await(wire *w, short events, int ms)
{
    struct pollfd poll_fd = {.fd = w->fd, .events = events};
    return poll(&poll_fd, 1, ms) > 0;
}

/* Reads what is there; false if that was nothing. */
static bool read_some(wire *w)
{
    if (w->at == w->length)
        w->at = w->length = 0;
    if (w->length == sizeof w->in) {
        memmove(w->in, w->in + w->at, w->length - w->at);
        w->length -= w->at;
        w->at = 0;
    }
    size_t room = sizeof w->in - w->length;
    ssize_t n;
    if (w->ssl != NULL) {
        n = SSL_read(w->ssl, w->in + w->length, (int)room);
        if (n <= 0) {
            int error = SSL_get_error(w->ssl, (int)n);
            w->closed =
                w->closed || (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE);
        }
    } else {
        n = recv(w->fd, w->in + w->length, room, 0);
        w->closed = w->closed || n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
    }
    if (n > 0)
        w->length += (size_t)n;
    return n > 0;
}

bool wire_fill(wire *w, int ms)
{
    for (uint64_t end = wire_now_us() + (uint64_t)ms * 1000; !w->closed;) {
        if (read_some(w))
            return true;
        uint64_t now = wire_now_us();
        if (w->closed || now >= end)
            return false;
        await(w, POLLIN, (int)((end - now) / 1000) + 1);
    }
    return false;
}

bool wire_send(wire *w, const void *bytes, size_t length, int ms)
{
    for (const char *at = bytes; length > 0;) {
        ssize_t n = w->ssl != NULL ? SSL_write(w->ssl, at, (int)length)
                                   : send(w->fd, at, length, MSG_NOSIGNAL);
        if (n > 0) {
            at += n;
            length -= (size_t)n;
            continue;
        }
        int error = w->ssl != NULL ? SSL_get_error(w->ssl, (int)n) : 0;
        if (w->ssl != NULL ? error != SSL_ERROR_WANT_WRITE && error != SSL_ERROR_WANT_READ
                           : errno != EAGAIN && errno != EINTR)
            return false;
        if (!await(w, POLLOUT, ms))
            return false;
    }
    return true;
}

/* ---- frames ---- */

bool wire_put(wire *w, int type, int flags, uint32_t stream, const void *payload, size_t length)
{
    unsigned char whole[9 + 32768] = {
        (unsigned char)(length >> 16), (unsigned char)(length >> 8), (unsigned char)length,
        (unsigned char)type,           (unsigned char)flags,         (unsigned char)(stream >> 24),
        (unsigned char)(stream >> 16), (unsigned char)(stream >> 8), (unsigned char)stream};
    if (length > sizeof whole - 9)
        die("frame", "too long");
    if (length > 0)
        memcpy(whole + 9, payload, length);
    return wire_send(w, whole, 9 + length, 10000);
}

wire_event wire_get(wire *w, wire_frame *frame, int ms)
{
    for (uint64_t end = wire_now_us() + (uint64_t)ms * 1000;;) {
        const unsigned char *p = w->in + w->at;
        size_t have = w->length - w->at;
        if (have >= 9) {
            frame->length = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 8 | p[2];
            if (have >= 9 + frame->length) {
                frame->type = p[3];
                frame->flags = p[4];
                frame->stream =
                    ((uint32_t)p[5] << 24 | (uint32_t)p[6] << 16 | (uint32_t)p[7] << 8 | p[8]) &
                    0x7fffffff;
                frame->payload = p + 9;
                w->at += 9 + frame->length;
                return WIRE_FRAME;
            }
        }
        uint64_t now = wire_now_us();
        if (!wire_fill(w, now < end ? (int)((end - now) / 1000) : 0))
            return w->closed ? WIRE_CLOSED : WIRE_SILENT;
    }
}

bool wire_greet(wire *w)
{
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    return wire_send(w, preface, sizeof preface - 1, 10000) && wire_put(w, SETTINGS, 0, 0, NULL, 0);
}

static size_t put_text(unsigned char *out, const char *text)
{
    size_t length = strlen(text), n = 0;
    if (length < 127) {
        out[n++] = (unsigned char)length;
    } else {
        out[n++] = 127;
        out[n++] = (unsigned char)((length - 127) % 128 + 128);
        out[n++] = (unsigned char)((length - 127) / 128);
    }
    memcpy(out + n, text, length);
    return n + length;
}

size_t wire_field(unsigned char *block, const char *name, const char *value)
{
    block[0] = 0;
    size_t n = 1 + put_text(block + 1, name);
    return n + put_text(block + n, value);
}

size_t wire_request(unsigned char *block, const char *method, const char *path, bool tls)
{
    size_t n = wire_field(block, ":method", method);
    n += wire_field(block + n, ":scheme", tls ? "https" : "http");
    n += wire_field(block + n, ":path", path);
    return n + wire_field(block + n, ":authority", "127.0.0.1");
}

int wire_status(const wire_frame *headers)
{
    static const int indexed[] = {200, 204, 206, 304, 400, 404, 500};
    const unsigned char *p = headers->payload;
    if (headers->length == 0)
        return 0;
    if (p[0] >= 0x88 && p[0] <= 0x8e)
        return indexed[p[0] - 0x88];
    return p[0] == 8 && headers->length > 4 && p[1] == 3
               ? (p[2] - '0') * 100 + (p[3] - '0') * 10 + (p[4] - '0')
               : 0;
}
