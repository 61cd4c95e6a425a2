/* inherit: what a service manager gives the process and is told by it: listening sockets
 * (sd_listen_fds(3)) and the word that it serves (sd_notify(3)). Both protocols are a few lines,
 * so libsystemd is not needed. Thread: main. */
#pragma once
#include <stdbool.h>

#include "engine/base/err.h"

struct gw_conf;

#define GW_ADDRESS_MAX 128 /* "[addr]:port" or "unix:/path" and its end */

/* One descriptor a listener, -1: the server binds the configured address itself. */
typedef struct gw_inherited {
    int listen, tls, admin;
} gw_inherited;

/* From the values of LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES, each NULL if unset. The names are
 * public, tls and admin; a lone socket without one of them is public. Sockets for another process
 * are left alone. BASE_INVALID: a name that is none of these or comes twice, a descriptor that is
 * no listening TCP socket, or a listener that the configuration has turned off. */
base_code gw_inherit(gw_inherited *out, const struct gw_conf *conf, const char *pid,
                     const char *count, const char *names, base_err *err);

/* "127.0.0.1:8080" of a bound TCP socket; false for any other descriptor. Thread: any. */
bool gw_socket_address(int fd, char out[GW_ADDRESS_MAX]);

/* Sends `state` ("READY=1") to the socket that NOTIFY_SOCKET names; nothing if `path` is NULL or
 * nobody listens there. */
void gw_notify(const char *path, const char *state);
