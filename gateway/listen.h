/* gw_listen: a listening socket and its address: "ADDR:PORT", "[::1]:8080" or "unix:/path".
 * Thread: one at a time. */
#pragma once
#include "engine/base/err.h"
#include "gateway/inherit.h"

typedef struct gw_listen {
    int fd; /* -1: off */
    char address[GW_ADDRESS_MAX];
    bool owns_path; /* the file of a Unix socket goes with it */
} gw_listen;

/* Binds and listens, or takes `inherited` (-1: none) in place of the address `where`, which `key`
 * configures. Port 0 is replaced by what the system chose. A Unix socket gets the permissions
 * `mode`; a file of one that nobody listens on any more is replaced. BASE_IO and BASE_INVALID name
 * key, address and reason. */
base_code gw_listen_open(gw_listen *out, const char *key, const char *where, uint32_t mode,
                         int inherited, base_err *err);
void gw_listen_close(gw_listen *l); /* once more is fine */
