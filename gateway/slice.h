/* gw_slices: the elements of a conversation that an earlier turn brought already.
 *
 * A client sends its whole history with every turn. One linear scan finds the raw bytes of each
 * element of `messages` or `input`; an element that is known byte for byte keeps the tree that it
 * was parsed to, and jansson sees only the others. Trees are shared between requests and never
 * changed: jansson counts references atomically, and the dialects only read. Tenants share none.
 * Bounded in bytes; what was used longest ago goes. Thread: any; one mutex, held for the compare.
 *
 * Whoever derives something from a long text of such a tree can leave a note of it, for the next
 * turn that brings the same element. A note is found by the text's place, which is the text: it
 * stands in a tree that is kept and never changes, and goes when the tree does. */
#pragma once
#include <jansson.h>

#include "engine/base/err.h"

typedef struct gw_slices gw_slices;

/* `bytes_max` 0: 32 MiB. NULL without memory. */
gw_slices *gw_slices_create(uint64_t bytes_max);
void gw_slices_destroy(gw_slices *slices); /* NULL is fine */

/* As gw_body_parse, for a body that gw_body_mend passed. The tree is the caller's to read and to
 * drop; its elements are not to be changed. `slices` NULL: all is parsed. */
base_code gw_slices_parse(gw_slices *slices, json_t **out, char *text, size_t length,
                          int64_t tenant, base_err *err);
#define GW_SLICE_DIGEST_BYTES 32
/* What was noted of `text`, which the caller got from gw_slices_parse and still holds; false: not
 * noted, not kept, or short. `kind`: what the digest is of besides the text. */
bool gw_slices_recall(gw_slices *slices, uint8_t *digest, const char *text, size_t length,
                      uint8_t kind);
/* Notes it if the text stands in a tree that is kept; the last kind stays. */
void gw_slices_note(gw_slices *slices, const uint8_t *digest, const char *text, size_t length,
                    uint8_t kind);
/* Forgets all: something was deleted. */
void gw_slices_clear(gw_slices *slices);

typedef struct gw_slice_stats {
    uint64_t known, parsed; /* elements since the start */
    uint64_t bytes;
} gw_slice_stats;
gw_slice_stats gw_slices_get_stats(gw_slices *slices);

typedef struct gw_slice {
    size_t begin, length;
} gw_slice;
/* The elements of the body's `messages` or `input`, the last one of that name, which `*name` then
 * points to: up to `max` of them; returns how many there are. UINT32_MAX: the text is not an object
 * with one such array, as far as a scan that looks at no scalar can tell. Pure. */
uint32_t gw_slice_scan(gw_slice *out, uint32_t max, const char **name, const char *text,
                       size_t length);
