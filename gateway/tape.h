/* gw_tape: what a turn writes, kept for as many readers as come: its own client, those who resume
 * its stream, and retries of the same request.
 *
 * A tape is written by one turn: a whole answer, or the records of a stream, which never change and
 * stay until the last reference goes. A reader is an exchange; it gets the records from the one it
 * asks for, at its own pace, and then the new ones as they come. Records of one tape are bounded by
 * GW_TAPE_BYTES_MAX; past it the writer is refused. One mutex a tape, held for a few loads.
 * Thread: any, but for the exchange given to gw_tape_attach, which is on its own loop. */
#pragma once
#include "engine/base/buf.h"
#include "gateway/api_error.h"
#include "gateway/server.h"

typedef struct gw_tape gw_tape;

#define GW_TAPE_BYTES_MAX (256u << 20)

gw_tape *gw_tape_create(void); /* NULL without memory. The caller has the first reference */
gw_tape *gw_tape_ref(gw_tape *tape);
void gw_tape_unref(gw_tape *tape); /* NULL is fine */

/* ---- the writer ---- */

/* The status line of an event stream. */
void gw_tape_begin(gw_tape *tape);
/* One record, copied. False without memory: the stream has a hole and must be ended by gw_tape_cut.
 */
bool gw_tape_add(gw_tape *tape, const void *bytes, size_t length);
void gw_tape_end(gw_tape *tape);
void gw_tape_cut(gw_tape *tape); /* readers are cut short */
/* A whole answer, instead of a stream: 200 and JSON, or an error in the reader's dialect. */
void gw_tape_answer(gw_tape *tape, const void *body, size_t length);
void gw_tape_refuse(gw_tape *tape, const gw_error_row *row, const char *param, const char *message);

/* ---- readers ---- */

/* Takes the exchange, which gets the records from number `from` on and the end. Without memory it
 * is answered with 503. `again` marks the answer of a repeated request by a header. */
void gw_tape_attach(gw_tape *tape, gw_exchange *exchange, uint32_t from, bool again);
uint32_t gw_tape_readers(gw_tape *tape);
/* How long nobody reads, 0 while somebody does. `now` is base_now_ns. */
uint64_t gw_tape_idle_ns(gw_tape *tape, uint64_t now);
bool gw_tape_ended(gw_tape *tape);
uint64_t gw_tape_bytes(gw_tape *tape);

/* ---- what others know of the writer ---- */

/* Of a turn that may be cancelled by others: its engine's request. 0: none. */
void gw_tape_set_request(gw_tape *tape, uint64_t request);
uint64_t gw_tape_request(gw_tape *tape);
void gw_tape_set_started(gw_tape *tape); /* it left the queue */
bool gw_tape_started(gw_tape *tape);
void gw_tape_set_cancelled(gw_tape *tape); /* somebody asked for its end */
bool gw_tape_cancelled(gw_tape *tape);

/* Posts `message` to `loop` once the tape has ended, at once if it has. Both stay until then. */
typedef struct gw_tape_wait {
    gw_message message;
    gw_loop *loop;
    struct gw_tape_wait *next;
} gw_tape_wait;
void gw_tape_await(gw_tape *tape, gw_tape_wait *wait);

/* ---- tapes by name ---- */

/* Where tapes are found by others than their writer. A name is at most GW_TAPE_NAME_MAX bytes. */
typedef struct gw_tapes gw_tapes;
#define GW_TAPE_NAME_MAX 128

/* Ended tapes stay for `keep_ms` and while all of them hold at most `bytes_max`, the oldest going
 * first; at most `count_max` tapes in all. */
base_code gw_tapes_create(gw_tapes **out, uint32_t keep_ms, uint64_t bytes_max, uint32_t count_max,
                          base_err *err);
void gw_tapes_destroy(gw_tapes *tapes); /* NULL is fine */
/* A reference to the tape of that name, or NULL. With `fresh` and no tape of that name, `fresh`
 * gets it (and a reference goes to the table); NULL is returned then, too. `tag` goes with the
 * name: an entry is given with its own. BASE_FULL past count_max. */
base_code gw_tapes_find(gw_tapes *tapes, gw_tape **out, uint64_t *tag, const char *name,
                        gw_tape *fresh, uint64_t fresh_tag);
/* The name is given up, if `tape` still has it. */
void gw_tapes_drop(gw_tapes *tapes, const char *name, const gw_tape *tape);
