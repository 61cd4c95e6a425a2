/* gw_live: the requests that live and the latest that ended, as others may see them.
 *
 * A turn enters once it has its body, tells each change of phase and leaves with its end; what
 * others get are copies. Every change is an event for the listeners (events.h), made only while
 * there are any. Requests that ended stay in a ring of GW_LIVE_RECENT. Memory: the ring, and each
 * turn's own entry. Thread: any; one mutex, held for a copy or a list's. */
#pragma once
#include <stdatomic.h>

#include "engine/base/buf.h"
#include "gateway/events.h"
#include "gateway/ledger.h"
#include "gateway/tenant.h"

#define GW_LIVE_RECENT 512
#define GW_LIVE_TEXT_MAX 96 /* bytes of a client's texts; longer ones are cut */

typedef enum gw_phase {
    GW_PHASE_PREPARE, /* parsed, matched, rendered; in line behind its session's */
    GW_PHASE_QUEUE,
    GW_PHASE_PREFILL,
    GW_PHASE_DECODE,
    GW_PHASE_COMMIT,
    GW_PHASE_DONE,
    GW_PHASE_COUNT,
} gw_phase;
const char *gw_phase_name(gw_phase phase);
const char *gw_live_finish_name(int finish); /* of an eng_finish; "" below 0 */

typedef struct gw_live_request {
    gw_id id, turn, session; /* req_, turn_, sess_; "": not known yet */
    const char *dialect;     /* static */
    char tenant[GW_TENANT_NAME_MAX + 1];
    char model[GW_LIVE_TEXT_MAX + 1], label[GW_LIVE_TEXT_MAX + 1], tool[GW_LIVE_TEXT_MAX + 1];
    gw_phase phase;
    bool stream, background;
    bool matched; /* cached_tokens and restored_tokens hold */
    uint32_t choices;
    uint32_t prompt_tokens, cached_tokens, restored_tokens; /* prompt_tokens 0: not known yet */
    uint32_t output_tokens, passes;                         /* passes: steps that gave output */
    int64_t received_ms, queued_ms, started_ms, first_ms, ended_ms; /* Unix time, 0: not yet */
    int finish;                                                     /* eng_finish, -1: none */
    int status;                                                     /* HTTP, 0: none was sent */
} gw_live_request;

/* Part of a turn. */
typedef struct gw_live_entry {
    struct gw_live_entry *prev, *next;
    bool listed;                /* the owner's */
    gw_live_request now;        /* guarded by the registry's mutex, as the next two */
    const uint64_t *engine_ids; /* [engine_count], of its choices: what cancelling ends */
    uint32_t engine_count;
    atomic_bool cancelled; /* by the operator */
} gw_live_entry;

/* `events` is borrowed and outlives this. */
base_code gw_live_create(gw_live **out, gw_events *events, base_err *err);
void gw_live_destroy(gw_live *live); /* NULL is fine; nothing is listed any more */

/* `now` is copied, the entry borrowed until it leaves. */
void gw_live_enter(gw_live *live, gw_live_entry *entry, const gw_live_request *now);
/* An event if the phase is another one. */
void gw_live_change(gw_live *live, gw_live_entry *entry, const gw_live_request *now);
/* From now on it may be cancelled; `ids` stays until the entry leaves. */
void gw_live_submitted(gw_live *live, gw_live_entry *entry, const uint64_t *ids, uint32_t count);
/* One forward pass gave it output. */
void gw_live_step(gw_live *live, gw_live_entry *entry, uint32_t tokens);
void gw_live_leave(gw_live *live, gw_live_entry *entry, const gw_live_request *end);

/* Copies the latest `recent` that ended, oldest first, then those that live, oldest first: at most
 * `max` of them. Returns how many. */
uint32_t gw_live_list(gw_live *live, gw_live_request *out, uint32_t max, uint32_t recent);
bool gw_live_find(gw_live *live, gw_live_request *out, const char *id);
/* BASE_NOT_FOUND; BASE_CONFLICT if it is over, or not with the engine yet. It ends at the engine's
 * next step. */
base_code gw_live_cancel(gw_live *live, eng_engine *engine, const char *id, base_err *err);
/* Ends all that the engine has, as an end of the server, not as the operator's wish. */
void gw_live_hand_back(gw_live *live, eng_engine *engine);
void gw_live_phases(gw_live *live, uint32_t counts[GW_PHASE_COUNT]);

/* {"id":…}: the object of /admin/v1/requests. */
void gw_live_put(base_buf *out, const gw_live_request *request);
