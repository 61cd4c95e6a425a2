/* The Nth thread, fsync, write or read fails, for every N from the start through one turn to the
 * end: test-fault-start PROGRAM MODEL NTH, NTH the module that makes them fail.
 *
 * Whatever fails, the program is ready and ends with 0, or says why not and ends with 2; it is
 * never killed by a signal and never hangs. A stored answer that was told is there after a restart,
 * which has to be ready. */
#include <arpa/inet.h>
#include <errno.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define READY_MS 60000
#define END_MS 60000

static const char *program, *model, *module;
static char folder[64];
static int faults;

typedef struct run {
    pid_t pid;
    int out, err, fault;
    int port; /* 0: never ready */
    char said[4096];
} run;

static long now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void wrong(const run *r, const char *fault, const char *what)
{
    printf("%s: %s\n%s\n", fault[0] != '\0' ? fault : "no fault", what, r->said);
    faults++;
}

/* Begins the program and waits until it is ready or over. */
static run begin(const char *fault)
{
    run r = {0};
    int out[2], err[2], told[2];
    char fd[16];
    if (pipe(out) != 0 || pipe(err) != 0 || pipe(told) != 0)
        die("pipe");
    if ((r.pid = fork()) < 0)
        die("fork");
    if (r.pid == 0) {
        dup2(out[1], 1);
        dup2(err[1], 2);
        close(out[0]);
        close(err[0]);
        close(told[0]);
        if (fault[0] != '\0') {
            snprintf(fd, sizeof fd, "%d", told[1]);
            setenv("WHIMBREL_FAULT", fault, 1);
            setenv("WHIMBREL_FAULT_FD", fd, 1);
            setenv("LD_PRELOAD", module, 1);
        }
        execl(program, program, "--model", model, "--data", folder, "--listen", "127.0.0.1:0",
              "--set", "admin.listen=", "--set", "engine.threads=2", "--set", "workers.threads=2",
              (char *)NULL);
        _exit(127);
    }
    close(out[1]);
    close(err[1]);
    close(told[1]);
    r.out = out[0];
    r.err = err[0];
    r.fault = told[0];
    size_t used = 0;
    for (long until = now_ms() + READY_MS; r.port == 0 && now_ms() < until;) {
        char text[1024];
        struct pollfd fds[] = {{r.out, POLLIN, 0}, {r.err, POLLIN, 0}};
        poll(fds, 2, 200);
        ssize_t n = 0;
        if (fds[1].revents != 0 && (n = read(r.err, text, sizeof text)) > 0 &&
            used + (size_t)n < sizeof r.said) {
            memcpy(r.said + used, text, (size_t)n);
            used += (size_t)n;
        }
        if (fds[0].revents == 0)
            continue;
        ssize_t m = read(r.out, text, sizeof text - 1);
        if (m <= 0 && n <= 0)
            break;
        text[m > 0 ? m : 0] = '\0';
        const char *at = strstr(text, "127.0.0.1:");
        if (strncmp(text, "ready ", 6) == 0 && at != NULL)
            r.port = atoi(at + 10);
    }
    return r;
}

/* One request; its answer, "" if the connection ended without. */
static void ask(int port, const char *request, char *answer, size_t size)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct timeval wait = {.tv_sec = 30};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    size_t used = 0;
    answer[0] = '\0';
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) == 0 &&
        send(fd, request, strlen(request), MSG_NOSIGNAL) > 0)
        for (ssize_t n; used + 1 < size && (n = recv(fd, answer + used, size - 1 - used, 0)) > 0;
             answer[used] = '\0')
            used += (size_t)n;
    close(fd);
}

/* Ends it as an operator does; what it ended with, -1 for a signal or none. */
static int end(run *r)
{
    int status;
    if (r->port != 0)
        kill(r->pid, SIGTERM);
    for (long until = now_ms() + END_MS; waitpid(r->pid, &status, WNOHANG) == 0;) {
        char text[1024];
        struct pollfd fds[] = {{r->err, POLLIN, 0}};
        if (poll(fds, 1, 20) > 0 && read(r->err, text, sizeof text) == 0)
            usleep(5000);
        if (now_ms() > until) {
            kill(r->pid, SIGKILL);
            waitpid(r->pid, &status, 0);
            break;
        }
    }
    close(r->out);
    close(r->err);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

/* False if the call did not come any more. */
static bool try(const char *function, int n)
{
    char fault[64], request[512], answer[16384], id[128] = "", byte;
    strcpy(folder, "/tmp/fault-start-XXXXXX");
    if (mkdtemp(folder) == NULL)
        die(folder);
    snprintf(fault, sizeof fault, "%s:%d", function, n);
    run r = begin(fault);
    bool ready = r.port != 0;
    if (ready) {
        const char *name = strrchr(model, '/') + 1;
        char body[256];
        snprintf(body, sizeof body,
                 "{\"model\":\"%s\",\"store\":true,\"max_output_tokens\":16,\"input\":\"hi\"}",
                 name);
        snprintf(request, sizeof request,
                 "POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
                 "content-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                 strlen(body), body);
        ask(r.port, request, answer, sizeof answer);
        const char *at = strstr(answer, "\"id\":\"resp_");
        if (strncmp(answer, "HTTP/1.1 200", 12) == 0 && at != NULL &&
            strstr(answer, "\"stored\":false") == NULL)
            snprintf(id, sizeof id, "%.*s", (int)strcspn(at + 6, "\""), at + 6);
        else if (strncmp(answer, "HTTP/1.1 ", 9) != 0)
            wrong(&r, fault, "the request got no answer");
    }
    int status = end(&r);
    bool came = read(r.fault, &byte, 1) == 1;
    close(r.fault);
    if (ready ? status != 0 : status != 2)
        wrong(&r, fault, ready ? "did not end with 0" : "not ready, and did not end with 2");
    else if (!ready && strstr(r.said, "whimbrel: ") == NULL)
        wrong(&r, fault, "not ready, and does not say why");
    if (came) {
        run again = begin("");
        if (again.port == 0)
            wrong(&again, fault, "not ready after a restart");
        else if (id[0] != '\0') {
            snprintf(
                request, sizeof request,
                "GET /v1/responses/%s HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n",
                id);
            ask(again.port, request, answer, sizeof answer);
            if (strncmp(answer, "HTTP/1.1 200", 12) != 0)
                wrong(&again, fault, "a stored answer is not there after a restart");
        }
        if (end(&again) != 0 && again.port != 0)
            wrong(&again, fault, "the restart did not end with 0");
        close(again.fault);
    }
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return came;
}

int main(int argc, char **argv)
{
    static const char *const functions[] = {"pthread_create", "fsync", "pwrite", "pread"};
    if (argc != 4) {
        fprintf(stderr, "usage: %s PROGRAM MODEL NTH\n", argv[0]);
        return 2;
    }
    program = argv[1];
    model = argv[2];
    module = argv[3];
    signal(SIGPIPE, SIG_IGN);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        int n = 1, tried = 0;
        /* Each of the first twenty, then one of four: the same few places write again and again. */
        for (; n < 400 && try(functions[i], n); n += n < 20 ? 1 : 4)
            tried++;
        printf("%s: %d failed calls of %d tried\n", functions[i], tried, n);
        if (tried == 0)
            faults++;
        fflush(stdout);
    }
    return faults > 0;
}
