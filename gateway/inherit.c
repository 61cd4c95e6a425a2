/* inherit: see the header. */
#include "gateway/inherit.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "gateway/conf.h"

#define FIRST_FD 3 /* SD_LISTEN_FDS_START */
#define FDS_MAX 3

bool gw_socket_address(int fd, char out[GW_ADDRESS_MAX])
{
    struct sockaddr_storage bound;
    socklen_t length = sizeof bound;
    char text[INET6_ADDRSTRLEN];
    if (getsockname(fd, (struct sockaddr *)&bound, &length) != 0)
        return false;
    if (bound.ss_family == AF_INET6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)&bound;
        inet_ntop(AF_INET6, &six->sin6_addr, text, sizeof text);
        snprintf(out, GW_ADDRESS_MAX, "[%s]:%u", text, ntohs(six->sin6_port));
    } else if (bound.ss_family == AF_INET) {
        const struct sockaddr_in *four = (const struct sockaddr_in *)&bound;
        inet_ntop(AF_INET, &four->sin_addr, text, sizeof text);
        snprintf(out, GW_ADDRESS_MAX, "%s:%u", text, ntohs(four->sin_port));
    } else {
        return false;
    }
    return true;
}

static bool is_listening(int fd)
{
    int type = 0, accepts = 0;
    socklen_t length = sizeof type;
    char address[GW_ADDRESS_MAX];
    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_STREAM &&
           getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &length) == 0 && accepts &&
           gw_socket_address(fd, address);
}

static base_code take(gw_inherited *out, const gw_conf *conf, const char *name, int fd,
                      base_err *err)
{
    const struct {
        const char *name, *key, *value;
        int *fd;
    } listeners[] = {
        {"public", "server.listen", conf->server_listen, &out->listen},
        {"tls", "server.tls_listen", conf->server_tls_listen, &out->tls},
        {"admin", "admin.listen", conf->admin_listen, &out->admin},
    };
    for (size_t i = 0; i < sizeof listeners / sizeof *listeners; i++) {
        if (strcmp(listeners[i].name, name) != 0)
            continue;
        if (*listeners[i].fd >= 0)
            return base_fail_param(err, BASE_INVALID, "LISTEN_FDNAMES",
                                   "two of the passed sockets are named \"%s\"", name);
        if (listeners[i].value[0] == '\0')
            return base_fail_param(err, BASE_INVALID, listeners[i].key,
                                   "a socket named \"%s\" was passed, but %s is empty", name,
                                   listeners[i].key);
        if (!is_listening(fd) || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0 ||
            fcntl(fd, F_SETFL, O_NONBLOCK) != 0)
            return base_fail_param(err, BASE_INVALID, "LISTEN_FDS",
                                   "descriptor %d, passed as \"%s\", is not a listening TCP socket",
                                   fd, name);
        *listeners[i].fd = fd;
        return BASE_OK;
    }
    return base_fail_param(err, BASE_INVALID, "LISTEN_FDNAMES",
                           "a passed socket is named \"%.40s\"; FileDescriptorName= must be "
                           "public, tls or admin",
                           name);
}

base_code gw_inherit(gw_inherited *out, const gw_conf *conf, const char *pid, const char *count,
                     const char *names, base_err *err)
{
    base_code code = BASE_OK;
    *out = (gw_inherited){-1, -1, -1};
    if (!pid || !count || strtol(pid, NULL, 10) != (long)getpid())
        return BASE_OK;
    long given = strtol(count, NULL, 10);
    if (given < 0 || given > FDS_MAX)
        return base_fail_param(err, BASE_INVALID, "LISTEN_FDS",
                               "%.20s sockets were passed; at most %d have a use", count, FDS_MAX);
    for (long i = 0; i < given && !code; i++) {
        char name[64];
        size_t length = names ? strcspn(names, ":") : 0;
        snprintf(name, sizeof name, "%.*s", (int)(length < sizeof name ? length : sizeof name - 1),
                 names ? names : "");
        bool named =
            strcmp(name, "public") == 0 || strcmp(name, "tls") == 0 || strcmp(name, "admin") == 0;
        code = take(out, conf, given == 1 && !named ? "public" : name, FIRST_FD + (int)i, err);
        if (names)
            names += length + (names[length] == ':');
    }
    return code;
}

void gw_notify(const char *path, const char *state)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    size_t length = path ? strlen(path) : 0;
    if (length < 2 || length >= sizeof to.sun_path)
        return;
    memcpy(to.sun_path, path, length);
    if (to.sun_path[0] == '@')
        to.sun_path[0] = '\0'; /* an abstract name */
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    sendto(fd, state, strlen(state), MSG_NOSIGNAL, (struct sockaddr *)&to,
           (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length));
    close(fd);
}
