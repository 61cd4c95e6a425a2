/* gw_turn: the life of one generation, whatever dialect it speaks.
 *
 *   PREPARING   a worker owns it. Parsed, matched with the ledger, rendered, submitted: QUEUED.
 *               A failure: OVER. Where turns must follow each other, it may wait in line between
 *               parsing and matching, with no worker. (prepare_run, on_granted, on_prepared)
 *   QUEUED      the engine. STARTED: RUNNING. A stream has its headers from here on. (on_event)
 *   RUNNING     the engine. DONE: COMMITTING. Steps are written as they come. (on_done)
 *   COMMITTING  the ledger's writer. Committed or not: OVER. Only now is an end told.
 *               (on_committed)
 *   OVER        the loop. Freed. (free_if_over)
 *
 * Everything but `prepare` and the commit's callback runs on the exchange's loop, so the state
 * needs no lock. The turn is held by up to four: the exchange, the worker's job, the engine's
 * request, the commit; it is freed on its loop when the last of them let go. The client may leave
 * in any state: `gone` is set, the engine is told (at once if the request is there, by the worker
 * right after the submit otherwise), and what was generated is recorded as cancelled.
 *
 * A request for several answers has a turn for each, its choices, and each is a turn of the ledger.
 * The first has the client, the plan and all memory; the others are made by prepare, borrow from it
 * and are freed with it. Choices of one prompt follow the first of them in the engine, so the
 * prompt is run once.
 *
 * A dialect is a table of functions and one block of state; responses and messages fit beside chat.
 */
#pragma once
#include <jansson.h>
#include <stdatomic.h>

#include "gateway/api_error.h"
#include "gateway/bridge.h"
#include "gateway/call.h"
#include "gateway/ledger.h"
#include "gateway/live.h"
#include "gateway/lock.h"
#include "gateway/tape.h"
#include "gateway/tenant.h"
#include "gateway/traceparent.h"
#include "gateway/work.h"

typedef struct gw_turn gw_turn;

typedef struct gw_dialect {
    const char *name;  /* in the ledger and the log */
    const char *route; /* in the metrics */
    /* Worker. Body to plan, see the fields under `plan`. Fails with the field's path, or by
     * gw_turn_reject. */
    base_code (*parse)(gw_turn *turn, base_err *err);
    /* Worker, once the turn holds its lock: adds what the turns before it left. May be NULL. */
    base_code (*load)(gw_turn *turn, base_err *err);
    /* Worker, in place of the ledger's search: makes turn->match from turn->root. May be NULL. */
    base_code (*match)(gw_turn *turn, base_err *err);
    /* Worker, after the ledger gave tokens to what it knows: checks what only a rendering needs.
     * May be NULL. */
    base_code (*check)(gw_turn *turn, base_err *err);
    /* Worker, in place of the chat template: makes turn->prompt. May be NULL. */
    base_code (*render)(gw_turn *turn, base_err *err);
    /* Worker, once the first choice has its prompt: makes the state of another, whose plan and
     * prompt are the first's, and maybe a prompt of its own. NULL: one answer a request. */
    base_code (*choose)(gw_turn *choice, base_err *err);
    bool anthropic; /* what is left of a tenant's limits is told in that vendor's headers */
    /* Nothing is generated or stored: `finish` comes once the prompt is made, however long. */
    bool dry;
    /* Worker, for dry turns whose answer may be long: writes it, so that `finish` on the loop holds
     * no one up. May be NULL. */
    void (*write)(gw_turn *turn);
    /* Loop. The engine has the request. May be NULL. */
    void (*admit)(gw_turn *turn);
    /* Loop. A stream was admitted: headers and opening records. */
    void (*open)(gw_turn *turn);
    /* Loop. The engine has looked for the prompt's cached prefix: usage.prompt_tokens and
     * usage.cached_tokens hold. Not called for a turn that ends in the queue. May be NULL. */
    void (*started)(gw_turn *turn);
    /* Loop. Tokens and logprobs of a step, before its parts. May be NULL. */
    void (*step)(gw_turn *turn, const eng_event *event);
    /* Loop. One part, after it was added to the answer; for streams that wait for their client,
     * several in one. */
    void (*part)(gw_turn *turn, const eng_part *part);
    /* Loop. The answer is whole and about to be committed: what the ledger keeps of it may be set.
     * May be NULL. */
    void (*ending)(gw_turn *turn);
    /* Loop. The turn is committed: the whole answer, or the records that tell the end. With the
     * last of its choices (gw_turn_all_told) it ends the exchange. */
    void (*finish)(gw_turn *turn);
    /* Loop. As a whole answer if nothing was sent, else as an error record. Ends the exchange. */
    void (*fail)(gw_turn *turn, const gw_error_row *row, const char *param, const char *message);
    bool tells_cut; /* `finish` is for cancelled turns too; else they are told by `fail` */
    /* Loop. About once a tick while the engine has the turn. May be NULL. */
    void (*tick)(gw_turn *turn, uint64_t now);
    /* Loop. Nothing was written for server.keepalive_ms. */
    void (*ping)(gw_turn *turn);
    /* Loop. The turn is freed; only if parse made a state. May be NULL. */
    void (*deinit)(gw_turn *turn);
} gw_dialect;

typedef enum gw_turn_state {
    GW_TURN_PREPARING,
    GW_TURN_QUEUED,
    GW_TURN_RUNNING,
    GW_TURN_COMMITTING,
    GW_TURN_OVER,
} gw_turn_state;

/* A part that waits for its client; `offset` into the accumulated text of its kind. */
typedef struct gw_held {
    eng_part_kind kind;
    uint32_t call;
    size_t offset, length;
} gw_held;

struct gw_turn {
    gw_port port; /* first member: the bridge hands it back */
    gw_app *app;
    const gw_dialect *dialect;
    /* ---- choices ---- */
    gw_turn *first;        /* which has the client; itself, mostly */
    gw_turn **choices;     /* [choice_count], all of them, the first too; first's alone */
    uint32_t choice;       /* its index */
    uint32_t choice_count; /* those that are there: 1 until prepare has made the others; first's */
    uint32_t told_count;   /* choices whose end is known and committed; first's. Loop */
    bool is_told;          /* it is one of them */
    gw_turn *leader;       /* runs the prompt for this one; itself if this one does */
    gw_exchange *exchange; /* NULL once it is over, or given to the tape. Loop */
    /* Where all that is written goes, for readers that may leave and come back; the turn goes on
     * without any for server.resume_ms, one in the background for ever. NULL: to the exchange, or
     * it is ended. Loop */
    gw_tape *tape;
    char stream_name[GW_TAPE_NAME_MAX + 1]; /* under which others find the tape, "" if not */
    char retry_name[GW_TAPE_NAME_MAX + 1];
    bool background;
    gw_loop *loop;
    gw_identity identity;
    gw_turn_state state;
    char request_id[GW_ID_MAX];
    gw_trace trace;              /* of the client's traceparent */
    const char *path;            /* of the exchange; in the arena */
    gw_id id, session, response; /* turn_, sess_ and the dialect's own */
    uint64_t received_ns;
    uint64_t timeout_ns, sdk_timeout_ns; /* the client's: asked for, and told by its SDK; 0: none */
    int64_t created_ms;
    base_arena *arena;
    char *body; /* a copy: the exchange may end while a worker reads; terminated */
    size_t body_length;
    json_t *json; /* the tree that texts point into */

    /* ---- plan: filled by parse on the worker, constant from then on ---- */
    void *state_of_dialect;      /* in the arena; NULL until parse made it */
    const char *response_prefix; /* "chatcmpl-" */
    bool stream;
    uint32_t answer_count; /* choices wanted, at least 1; past 1 the dialect has `choose` */
    bool exact_steps;      /* token ids or logprobs are wanted: parts are never merged */
    const char *model;     /* as asked for */
    const char *label;     /* session name from the client, NULL if none */
    const char
        *lock_id; /* turns of one such id follow each other, NULL: none; and the field that */
    const char *lock_param;   /* named it */
    bool moves_head;          /* see gw_commit */
    const char *metadata;     /* JSON, NULL if none */
    const char *echo;         /* JSON for the ledger, NULL if none; see gw_commit */
    const char *told;         /* the same */
    const char *conversation; /* the same, with the items that it gets */
    const struct gw_conversation_item *added;
    uint32_t added_count;
    eng_text cache_salt;
    gw_retention retention;
    eng_item *items; /* chat.items, still writable */
    eng_chat chat;
    eng_request request; /* sampling, tools, tool choice, stops, max_tokens (0: as much as fits) */
    bool seeded;
    bool shows_stop;            /* the stop string that ended the answer is part of it */
    const json_t *custom_tools; /* the body's tools, if there are custom ones, see call.h */
    eng_output output;          /* format, strict and allowed tools; see structured.h */
    const char *format_param;   /* the field that gave the format */
    /* ---- made by prepare ---- */
    gw_root root;
    gw_match match;
    eng_prompt prompt;
    /* Of the prompt: what a perfect cache would hold, had nothing in front of it changed. */
    uint32_t expected_tokens;
    bool continues; /* nothing did: the prompt begins with its parent, token for token */
    gw_cache_note cache;
    base_err error;
    gw_error_row error_row; /* status 0: by the table */
    /* ---- the answer; loop ---- */
    base_buf text, reasoning;
    gw_turn_call *calls;
    uint32_t call_count, call_capacity;
    int32_t *run; /* the last `lead` tokens of the prompt, then the generated ones */
    uint32_t run_count, run_capacity, lead;
    uint32_t *steps;
    uint32_t step_count, step_capacity;
    bool lossy; /* memory ran out: the record is not whole and never spliced */
    eng_usage usage;
    eng_finish finish;
    int32_t stop_index;
    uint32_t run_tokens; /* generated ones that belong to the turn; see eng_event */
    bool stored;
    gw_held *held;
    uint32_t held_count, held_capacity;
    uint64_t first_ns, last_ns, written_ns, done_ns;
    int status;                    /* HTTP status that the client got, 0: none yet */
    bool entered;                  /* it counts for its tenant's limits */
    int64_t queued_ms, started_ms; /* Unix time, 0: not yet; first's, for `live` */
    gw_live_entry live;            /* what others see of the request; first's */
    uint64_t *engine_ids;          /* [choice_count]; first's, in the arena */
    /* ---- who holds it ---- */
    gw_lock lock;
    atomic_bool gone, submitted;
    bool parsed; /* the worker's first half is done */
    bool worker_pending, engine_pending, commit_pending, done_seen, port_open;
    uint32_t busy; /* functions of the turn on the loop's stack */
    gw_job job;
    gw_message prepared, granted, committed;
    gw_commit commit;
};

/* An id for eng_request.id that no other request has. Thread: any. */
uint64_t gw_request_id(void);

/* turn_limit.c: counts it for its tenant's limits, and tells the client what is left of those: on
 * an answer and on a refusal, which is false with the turn's error set. Loop; before anything of
 * the answer is sent. */
bool gw_turn_enter(gw_turn *turn);

/* turn_live.c: what others see of the request. Loop, as the turn itself; dry turns are not shown.
 */
void gw_turn_show_begin(gw_turn *turn);
void gw_turn_show(gw_turn *turn); /* its phase is another one */
void gw_turn_show_end(gw_turn *turn);

/* Takes the exchange: authenticates it and begins a turn. Thread: the exchange's loop. */
void gw_turn_begin(gw_app *app, gw_exchange *exchange, const gw_dialect *dialect);

/* Worker, in parse and check: the failure's row is chosen here, not by the table. Returns a code
 * that is not BASE_OK. */
base_code gw_turn_reject(gw_turn *turn, base_err *err, int status, const char *type,
                         const char *code, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 7, 8)));

/* turn->model is served here: its own name or an alias; 404 model_not_found by gw_turn_reject. */
base_code gw_turn_check_model(gw_turn *turn, base_err *err);

/* Loop, for dialects. These do nothing once the client left. */
void gw_turn_stream_begin(gw_turn *turn); /* 200 and the headers of event streams */
void gw_turn_write(gw_turn *turn, const void *bytes, size_t length); /* one record, one write */
void gw_turn_stream_end(gw_turn *turn);
void gw_turn_respond_json(gw_turn *turn,
                          const base_buf *body); /* 200, whole; 503 if the buffer failed */
void gw_turn_respond_error(gw_turn *turn, const gw_error_row *row, const char *param,
                           const char *message);
bool gw_turn_streaming(const gw_turn *turn); /* headers are out */
bool gw_turn_heard(const gw_turn *turn);     /* there is an exchange or a tape to write to */
/* From now on on a tape, which others find by `name` (cut to GW_TAPE_NAME_MAX) until it ends. The
 * exchange is its first reader. Without memory nothing changes. */
void gw_turn_publish(gw_turn *turn, const char *name);
/* Of the first's choices. */
bool gw_turn_all_told(const gw_turn *turn);
/* Of all choices: their prompts once each, what was made for all of them. */
eng_usage gw_turn_usage(const gw_turn *turn);
/* Appends `"whimbrel":{…}`, of all choices. */
void gw_turn_extension(const gw_turn *turn, base_buf *out);
