#include "gateway/tape.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/clock.h"

#define BUCKETS 1024

typedef struct record {
    struct record *next;
    size_t length;
    char bytes[];
} record;

/* One exchange. Its loop runs `pump`; freed there when the exchange is gone and no message is on
 * its way. */
typedef struct reader {
    gw_message message;
    struct reader *next; /* in the tape's list */
    gw_tape *tape;
    gw_exchange *exchange; /* NULL once it is over. Loop */
    gw_loop *loop;
    record *at;    /* the last one given; NULL: none yet. Loop */
    uint32_t skip; /* records that it has already. Loop */
    bool begun, again;
    bool posted; /* the tape's mutex guards it */
} reader;

typedef enum form { FORM_NONE, FORM_STREAM, FORM_ANSWER, FORM_REFUSAL } form;

struct gw_tape {
    atomic_uint refs;
    atomic_uint_fast64_t request;
    atomic_bool started, cancelled;
    pthread_mutex_t mutex; /* guards all that follows */
    form form;
    bool ended, cut;
    record *first, *last;
    uint64_t bytes;
    gw_error_row row; /* of a refusal; its param and message are the records */
    reader *readers;
    uint32_t reader_count;
    gw_tape_wait *waits;
    uint64_t left_ns; /* when the last reader went, or the tape's beginning */
};

gw_tape *gw_tape_create(void)
{
    gw_tape *tape = calloc(1, sizeof *tape);
    if (!tape)
        return NULL;
    atomic_store(&tape->refs, 1);
    pthread_mutex_init(&tape->mutex, NULL);
    tape->left_ns = base_now_ns();
    return tape;
}

gw_tape *gw_tape_ref(gw_tape *tape)
{
    atomic_fetch_add(&tape->refs, 1);
    return tape;
}

void gw_tape_unref(gw_tape *tape)
{
    if (!tape || atomic_fetch_sub(&tape->refs, 1) != 1)
        return;
    for (record *r = tape->first, *next; r; r = next) {
        next = r->next;
        free(r);
    }
    pthread_mutex_destroy(&tape->mutex);
    free(tape);
}

/* ---- the writer ---- */

/* With the mutex. Posting takes a loop's own lock, behind which nothing waits for this one. */
static void wake(gw_tape *tape)
{
    for (reader *r = tape->readers; r; r = r->next) {
        if (r->posted)
            continue;
        r->posted = true;
        gw_loop_post(r->loop, &r->message);
    }
    for (gw_tape_wait *w = tape->ended ? tape->waits : NULL, *next; w; w = next) {
        next = w->next;
        gw_loop_post(w->loop, &w->message);
    }
    if (tape->ended)
        tape->waits = NULL;
}

/* With the mutex. */
static bool append(gw_tape *tape, const void *bytes, size_t length)
{
    record *r = tape->bytes + length <= GW_TAPE_BYTES_MAX ? malloc(sizeof *r + length + 1) : NULL;
    if (!r)
        return false;
    r->next = NULL;
    r->length = length;
    if (length)
        memcpy(r->bytes, bytes, length);
    r->bytes[length] = '\0';
    if (tape->last)
        tape->last->next = r;
    else
        tape->first = r;
    tape->last = r;
    tape->bytes += length;
    return true;
}

void gw_tape_begin(gw_tape *tape)
{
    pthread_mutex_lock(&tape->mutex);
    tape->form = FORM_STREAM;
    wake(tape);
    pthread_mutex_unlock(&tape->mutex);
}

bool gw_tape_add(gw_tape *tape, const void *bytes, size_t length)
{
    pthread_mutex_lock(&tape->mutex);
    bool added = !tape->ended && append(tape, bytes, length);
    wake(tape);
    pthread_mutex_unlock(&tape->mutex);
    return added;
}

static void end(gw_tape *tape, bool cut)
{
    pthread_mutex_lock(&tape->mutex);
    tape->ended = true;
    tape->cut = cut;
    wake(tape);
    pthread_mutex_unlock(&tape->mutex);
}

void gw_tape_end(gw_tape *tape)
{
    end(tape, false);
}

void gw_tape_cut(gw_tape *tape)
{
    end(tape, true);
}

void gw_tape_answer(gw_tape *tape, const void *body, size_t length)
{
    pthread_mutex_lock(&tape->mutex);
    tape->form = FORM_ANSWER;
    tape->cut = !append(tape, body, length);
    tape->ended = true;
    wake(tape);
    pthread_mutex_unlock(&tape->mutex);
}

void gw_tape_refuse(gw_tape *tape, const gw_error_row *row, const char *param, const char *message)
{
    pthread_mutex_lock(&tape->mutex);
    tape->form = FORM_REFUSAL;
    tape->row = *row;
    tape->cut = !append(tape, param ? param : "", param ? strlen(param) : 0) ||
                !append(tape, message, strlen(message));
    tape->ended = true;
    wake(tape);
    pthread_mutex_unlock(&tape->mutex);
}

/* ---- readers ---- */

/* The exchange is over for this reader. */
static void leave(reader *r)
{
    gw_tape *tape = r->tape;
    pthread_mutex_lock(&tape->mutex);
    reader **at = &tape->readers;
    while (*at && *at != r)
        at = &(*at)->next;
    if (*at) {
        *at = r->next;
        tape->reader_count--;
        if (!tape->reader_count)
            tape->left_ns = base_now_ns();
    }
    bool posted = r->posted;
    pthread_mutex_unlock(&tape->mutex);
    r->exchange = NULL;
    if (posted)
        return; /* its message frees it */
    gw_tape_unref(tape);
    free(r);
}

static void on_gone(void *ctx)
{
    leave(ctx);
}

static const char *answer_header(reader *r)
{
    if (r->again)
        gw_exchange_add_header(r->exchange, "idempotent-replayed", "true");
    /* Anthropic's clients read this name. */
    if (strncmp(gw_exchange_path(r->exchange), "/v1/messages", 12) == 0)
        gw_exchange_add_header(r->exchange, "request-id", gw_exchange_id(r->exchange));
    return "application/json";
}

static void respond(reader *r)
{
    gw_tape *tape = r->tape;
    gw_exchange *exchange = r->exchange;
    const gw_header headers[] = {{"content-type", answer_header(r)}};
    if (tape->cut) {
        base_err err = BASE_ERR_INIT;
        base_fail(&err, BASE_NOMEM, "no memory for the answer");
        gw_error_respond_err(exchange, &err);
    } else if (tape->form == FORM_ANSWER) {
        gw_respond(exchange, 200, headers, 1, tape->first->bytes, tape->first->length);
    } else {
        gw_error_respond_row(exchange, &tape->row, tape->first->bytes, tape->first->next->bytes);
    }
    leave(r);
}

/* The next record, NULL if none has come; `*over`: and none will. */
static record *next_record(reader *r, bool *over, bool *cut)
{
    gw_tape *tape = r->tape;
    pthread_mutex_lock(&tape->mutex);
    record *next = r->at ? r->at->next : tape->first;
    *over = !next && tape->ended;
    *cut = tape->cut;
    pthread_mutex_unlock(&tape->mutex);
    return next;
}

static form form_of(reader *r, bool *ended)
{
    pthread_mutex_lock(&r->tape->mutex);
    form now = r->tape->form;
    *ended = r->tape->ended;
    pthread_mutex_unlock(&r->tape->mutex);
    return now;
}

static const gw_header stream_headers[] = {{"content-type", "text/event-stream; charset=utf-8"},
                                           {"cache-control", "no-cache, no-transform"},
                                           {"x-accel-buffering", "no"}};

/* Writes what the client takes. May free the reader. */
static void pump(reader *r)
{
    bool over = false, cut = false;
    form now = form_of(r, &over);
    if (now == FORM_NONE && !over)
        return;
    if (now == FORM_NONE) { /* ended without a word: its writer had no memory for any */
        gw_stream_abort(r->exchange);
        leave(r);
        return;
    }
    if (now != FORM_STREAM) {
        if (over)
            respond(r);
        return;
    }
    if (!r->begun) {
        answer_header(r);
        r->begun = true;
        gw_stream_begin(r->exchange, 200, stream_headers, 3);
    }
    while (r->exchange && !gw_stream_paused(r->exchange)) {
        record *next = next_record(r, &over, &cut);
        if (!next)
            break;
        r->at = next;
        if (r->skip)
            r->skip--;
        else
            gw_stream_write(r->exchange, next->bytes, next->length);
    }
    if (!r->exchange || !over)
        return;
    gw_exchange *exchange = r->exchange;
    gw_exchange_set_handler(exchange, NULL, NULL, NULL);
    if (cut)
        gw_stream_abort(exchange);
    else
        gw_stream_end(exchange);
    leave(r);
}

static void on_drained(void *ctx)
{
    pump(ctx);
}

static void run(gw_message *message)
{
    reader *r = (reader *)message;
    pthread_mutex_lock(&r->tape->mutex);
    r->posted = false;
    pthread_mutex_unlock(&r->tape->mutex);
    if (r->exchange) {
        pump(r);
        return;
    }
    gw_tape_unref(r->tape);
    free(r);
}

void gw_tape_attach(gw_tape *tape, gw_exchange *exchange, uint32_t from, bool again)
{
    reader *r = calloc(1, sizeof *r);
    if (!r) {
        base_err err = BASE_ERR_INIT;
        base_fail(&err, BASE_NOMEM, "no memory for a reader");
        gw_error_respond_err(exchange, &err);
        return;
    }
    r->message.run = run;
    r->tape = gw_tape_ref(tape);
    r->exchange = exchange;
    r->loop = gw_exchange_loop(exchange);
    r->skip = from;
    r->again = again;
    gw_exchange_set_handler(exchange, r, on_gone, on_drained);
    pthread_mutex_lock(&tape->mutex);
    r->next = tape->readers;
    tape->readers = r;
    tape->reader_count++;
    pthread_mutex_unlock(&tape->mutex);
    pump(r);
}

uint32_t gw_tape_readers(gw_tape *tape)
{
    pthread_mutex_lock(&tape->mutex);
    uint32_t count = tape->reader_count;
    pthread_mutex_unlock(&tape->mutex);
    return count;
}

uint64_t gw_tape_idle_ns(gw_tape *tape, uint64_t now)
{
    pthread_mutex_lock(&tape->mutex);
    uint64_t idle = tape->reader_count || now < tape->left_ns ? 0 : now - tape->left_ns;
    pthread_mutex_unlock(&tape->mutex);
    return idle;
}

bool gw_tape_ended(gw_tape *tape)
{
    pthread_mutex_lock(&tape->mutex);
    bool ended = tape->ended;
    pthread_mutex_unlock(&tape->mutex);
    return ended;
}

uint64_t gw_tape_bytes(gw_tape *tape)
{
    pthread_mutex_lock(&tape->mutex);
    uint64_t bytes = tape->bytes;
    pthread_mutex_unlock(&tape->mutex);
    return bytes;
}

void gw_tape_await(gw_tape *tape, gw_tape_wait *wait)
{
    pthread_mutex_lock(&tape->mutex);
    wait->next = tape->waits;
    tape->waits = wait;
    if (tape->ended)
        wake(tape);
    pthread_mutex_unlock(&tape->mutex);
}

void gw_tape_set_request(gw_tape *tape, uint64_t request)
{
    atomic_store(&tape->request, request);
}

uint64_t gw_tape_request(gw_tape *tape)
{
    return atomic_load(&tape->request);
}

void gw_tape_set_started(gw_tape *tape)
{
    atomic_store(&tape->started, true);
}

bool gw_tape_started(gw_tape *tape)
{
    return atomic_load(&tape->started);
}

void gw_tape_set_cancelled(gw_tape *tape)
{
    atomic_store(&tape->cancelled, true);
}

bool gw_tape_cancelled(gw_tape *tape)
{
    return atomic_load(&tape->cancelled);
}

/* ---- tapes by name ---- */

typedef struct entry {
    struct entry *chain, *older, *newer;
    gw_tape *tape;
    uint64_t tag, added_ns;
    char name[GW_TAPE_NAME_MAX + 1];
} entry;

struct gw_tapes {
    uint64_t keep_ns, bytes_max;
    uint32_t count_max;
    pthread_mutex_t mutex; /* guards what follows; taken before a tape's own */
    uint32_t count;
    entry *oldest, *newest;
    entry *buckets[BUCKETS];
};

base_code gw_tapes_create(gw_tapes **out, uint32_t keep_ms, uint64_t bytes_max, uint32_t count_max,
                          base_err *err)
{
    gw_tapes *tapes = calloc(1, sizeof *tapes);
    if (!tapes)
        return base_fail(err, BASE_NOMEM, "no memory for the table of streams");
    tapes->keep_ns = (uint64_t)keep_ms * 1000000;
    tapes->bytes_max = bytes_max;
    tapes->count_max = count_max;
    pthread_mutex_init(&tapes->mutex, NULL);
    *out = tapes;
    return BASE_OK;
}

static entry **place(gw_tapes *tapes, const char *name)
{
    entry **at = &tapes->buckets[XXH3_64bits(name, strlen(name)) % BUCKETS];
    while (*at && strcmp((*at)->name, name) != 0)
        at = &(*at)->chain;
    return at;
}

static void drop(gw_tapes *tapes, entry **at)
{
    entry *e = *at;
    *at = e->chain;
    *(e->older ? &e->older->newer : &tapes->oldest) = e->newer;
    *(e->newer ? &e->newer->older : &tapes->newest) = e->older;
    tapes->count--;
    gw_tape_unref(e->tape);
    free(e);
}

/* Lets ended tapes go that are past their time or the bound; those that run stay. */
static void trim(gw_tapes *tapes)
{
    uint64_t now = base_now_ns(), bytes = 0;
    for (entry *e = tapes->newest, *older; e; e = older) {
        older = e->older;
        if (!gw_tape_ended(e->tape))
            continue;
        bytes += gw_tape_bytes(e->tape) + sizeof *e;
        if (now - e->added_ns > tapes->keep_ns || bytes > tapes->bytes_max)
            drop(tapes, place(tapes, e->name));
    }
}

void gw_tapes_destroy(gw_tapes *tapes)
{
    if (!tapes)
        return;
    while (tapes->oldest)
        drop(tapes, place(tapes, tapes->oldest->name));
    pthread_mutex_destroy(&tapes->mutex);
    free(tapes);
}

base_code gw_tapes_find(gw_tapes *tapes, gw_tape **out, uint64_t *tag, const char *name,
                        gw_tape *fresh, uint64_t fresh_tag)
{
    base_code code = BASE_OK;
    *out = NULL;
    if (strlen(name) > GW_TAPE_NAME_MAX)
        return BASE_TOO_LONG;
    pthread_mutex_lock(&tapes->mutex);
    trim(tapes);
    entry **at = place(tapes, name), *e = *at;
    if (e) {
        *out = gw_tape_ref(e->tape);
        if (tag)
            *tag = e->tag;
    } else if (fresh) {
        e = tapes->count < tapes->count_max ? calloc(1, sizeof *e) : NULL;
        if (e) {
            strcpy(e->name, name);
            e->tape = gw_tape_ref(fresh);
            e->tag = fresh_tag;
            e->added_ns = base_now_ns();
            e->older = tapes->newest;
            *(e->older ? &e->older->newer : &tapes->oldest) = e;
            tapes->newest = e;
            *at = e;
            tapes->count++;
        } else {
            code = BASE_FULL;
        }
    }
    pthread_mutex_unlock(&tapes->mutex);
    return code;
}

void gw_tapes_drop(gw_tapes *tapes, const char *name, const gw_tape *tape)
{
    pthread_mutex_lock(&tapes->mutex);
    entry **at = place(tapes, name);
    if (*at && (*at)->tape == tape)
        drop(tapes, at);
    pthread_mutex_unlock(&tapes->mutex);
}
