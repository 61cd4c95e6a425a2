#include "gateway/listen.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define BACKLOG 1024
#define UNIX_PREFIX "unix:"

/* True if `path` was a socket without a listener and is gone now. */
static bool remove_stale(const struct sockaddr_un *at)
{
    struct stat info;
    if (lstat(at->sun_path, &info) != 0 || !S_ISSOCK(info.st_mode))
        return false;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    bool stale = connect(fd, (const struct sockaddr *)at, sizeof *at) != 0 && errno == ECONNREFUSED;
    close(fd);
    return stale && unlink(at->sun_path) == 0;
}

static base_code open_unix(gw_listen *out, const char *key, const char *path, uint32_t mode,
                           base_err *err)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    const struct sockaddr *address = (const struct sockaddr *)&at;
    if (path[0] != '/' || strlen(path) >= sizeof at.sun_path)
        return base_fail_param(err, BASE_INVALID, key,
                               "%s \"" UNIX_PREFIX
                               "%.120s\": an absolute path of at most %zu bytes is wanted",
                               key, path, sizeof at.sun_path - 1);
    memcpy(at.sun_path, path, strlen(path));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool bound = fd >= 0 && bind(fd, address, sizeof at) == 0;
    if (fd >= 0 && !bound && errno == EADDRINUSE) {
        bound = remove_stale(&at) && bind(fd, address, sizeof at) == 0;
        if (!bound)
            errno = EADDRINUSE;
    }
    /* Nobody can connect before listen(), so the permissions hold from the first moment. */
    if (!bound || chmod(path, mode) != 0 || listen(fd, BACKLOG) != 0) {
        base_code code = base_fail_param(err, BASE_IO, key, "%s " UNIX_PREFIX "%s: %s", key, path,
                                         strerror(errno));
        if (bound)
            unlink(path);
        if (fd >= 0)
            close(fd);
        return code;
    }
    *out = (gw_listen){.fd = fd, .owns_path = true};
    snprintf(out->address, sizeof out->address, UNIX_PREFIX "%s", path);
    return BASE_OK;
}

static base_code open_tcp(gw_listen *out, const char *key, const char *where, base_err *err)
{
    char host[256], port[8];
    const char *colon = strrchr(where, ':');
    size_t host_length = colon != NULL ? (size_t)(colon - where) : 0;
    const char *host_from = where;
    if (host_length >= 2 && where[0] == '[' && where[host_length - 1] == ']') {
        host_from++;
        host_length -= 2;
    }
    if (colon == NULL || host_length >= sizeof host || strlen(colon + 1) >= sizeof port)
        return base_fail_param(err, BASE_INVALID, key,
                               "%s \"%s\" is neither ADDR:PORT nor unix:/PATH", key, where);
    memcpy(host, host_from, host_length);
    host[host_length] = '\0';
    snprintf(port, sizeof port, "%s", colon + 1);

    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV},
                    *found = NULL;
    int rc = getaddrinfo(host_length != 0 ? host : NULL, port, &hints, &found);
    if (rc != 0)
        return base_fail_param(err, BASE_INVALID, key, "%s \"%s\": %s", key, where,
                               gai_strerror(rc));
    base_code code = BASE_OK;
    int on = 1, fd = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0 ||
        !gw_socket_address(fd, out->address))
        code = base_fail_param(err, BASE_IO, key, "%s %s: %s", key, where, strerror(errno));
    freeaddrinfo(found);
    if (code == BASE_OK)
        out->fd = fd;
    else if (fd >= 0)
        close(fd);
    return code;
}

base_code gw_listen_open(gw_listen *out, const char *key, const char *where, uint32_t mode,
                         int inherited, base_err *err)
{
    *out = (gw_listen){.fd = inherited};
    if (inherited >= 0) {
        CHECK(gw_socket_address(inherited, out->address));
        return BASE_OK;
    }
    if (strncmp(where, UNIX_PREFIX, strlen(UNIX_PREFIX)) == 0)
        return open_unix(out, key, where + strlen(UNIX_PREFIX), mode, err);
    return open_tcp(out, key, where, err);
}

void gw_listen_close(gw_listen *l)
{
    if (l->fd < 0)
        return;
    if (l->owns_path)
        unlink(l->address + strlen(UNIX_PREFIX));
    close(l->fd);
    l->fd = -1;
}
