/* gw_pins: how much of the page memory native sessions hold by pins, so that no tenant, and not all
 * of them, can pin others out of it.
 *
 * A pin counts the pages of its session's path, those that it shares with others too: what two
 * sessions pin together counts twice. Kept in memory only, as the engine's pins are. Thread: any;
 * one mutex, held for a walk over the pins. Limits: each pin has a page at least, so there are as
 * many as pages that may be pinned. */
#pragma once
#include "engine/base/err.h"

typedef struct gw_pins gw_pins;

typedef struct gw_pins_options {
    uint32_t page_count; /* of the memory */
    uint32_t percent_max, tenant_percent_max;
} gw_pins_options;

base_code gw_pins_create(gw_pins **out, const gw_pins_options *options, base_err *err);
void gw_pins_destroy(gw_pins *pins); /* NULL is fine */

/* Notes that a session's `pages` are pinned until `until_ns`, in place of what it had pinned
 * before. BASE_FULL names the bound that is passed; the earlier pin then stays. `now_ns`: pins up
 * to then have run out. */
base_code gw_pin_put(gw_pins *pins, int64_t tenant, const char *session, uint32_t pages,
                     uint64_t until_ns, uint64_t now_ns, base_err *err);
void gw_pin_drop(gw_pins *pins, int64_t tenant, const char *session);

typedef struct gw_pins_stats {
    uint32_t sessions, pages; /* whose pins have not run out */
    uint64_t refused;
} gw_pins_stats;
gw_pins_stats gw_pins_get_stats(gw_pins *pins, uint64_t now_ns);
