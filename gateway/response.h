/* response: one response of the Responses API as it grows: its events and its object, from the
 * parts of an answer. The same code writes a live stream and one that is replayed from the ledger,
 * so the two cannot differ.
 *
 * An output item is a run of parts of one kind. The item of a call is told to be done only at the
 * end, when the turn is committed, so that a client never acts on a call that the ledger does not
 * know; where reasoning carries its sealed run, which is whole only then, so are all items, in
 * their order. Thread: one at a time. */
#pragma once
#include "gateway/logprob.h"

/* One output item. */
typedef struct gw_segment {
    eng_part_kind kind; /* REASONING, TEXT or CALL_BEGIN */
    uint32_t call;
    uint32_t nth;                   /* of its kind */
    size_t offset, length;          /* in the answer's text of its kind */
    size_t entries, entries_length; /* in `entries` */
} gw_segment;

typedef struct gw_response {
    /* ---- the owner's ---- */
    gw_id id, turn;
    int64_t created_ms;
    const char *echo; /* members of the object that repeat the request */
    bool summary;     /* reasoning is given as a summary, which some clients show alone */
    bool encrypted;   /* the run was asked for */
    bool background;
    const base_buf *text, *reasoning; /* grown by the owner before a part is given */
    gw_turn_call *const *calls;
    gw_logprobs *list;                                 /* NULL: not asked for */
    void (*record)(void *ctx, const base_buf *record); /* NULL: no stream */
    void *ctx;
    /* ---- its own ---- */
    uint32_t sequence;
    uint32_t *pings; /* numbers of keep-alive events; replayed where they are set beforehand */
    uint32_t ping_count, ping_at;
    base_buf scratch, entries;
    gw_segment *segments;
    uint32_t count, capacity;
    bool open;   /* the last one is not closed */
    bool failed; /* memory ran out */
} gw_response;

/* How it ended. */
typedef struct gw_response_end {
    const char *status;         /* "completed", "incomplete", "failed", "cancelled" */
    const char *reason;         /* of an incomplete one */
    const char *code, *message; /* of a failed one */
    const char *usage;          /* JSON, NULL: null */
    const char *sealed;         /* run, NULL: none */
    int64_t ended_ms;
    bool cut; /* the last item is not whole */
} gw_response_end;

/* response.created and, unless it waits in the background, response.in_progress. */
void gw_response_open(gw_response *r);
void gw_response_started(gw_response *r); /* response.in_progress of a background one */
void gw_response_part(gw_response *r, const eng_part *part);
void gw_response_ping(gw_response *r);
/* Closes the items; the last event. */
void gw_response_finish(gw_response *r, const gw_response_end *end);
/* The object; `end` NULL: `status` without output. */
void gw_response_put(gw_response *r, base_buf *out, const char *status, const gw_response_end *end);
/* One output item of a finished one. */
void gw_response_put_item(gw_response *r, base_buf *out, uint32_t index,
                          const gw_response_end *end);
void gw_response_deinit(gw_response *r);
