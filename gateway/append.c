#include "gateway/append.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/bridge.h"
#include "gateway/conf.h"
#include "gateway/ledger_session.h"
#include "gateway/session_turn.h"
#include "gateway/turn.h"

#define BUCKETS 1024
/* A prefill begins when this much is new, or an eighth of what there is: all of them together
 * tokenize a text a few times over, however small its pieces are. */
#define STEP_BYTES 256
#define STEP_SHARE 8
/* Bytes at the end whose tokens more text may change: a word, a number, a run of spaces. */
#define MARGIN_BYTES 48
#define RESULT_END "</response>[e~[\n"

typedef struct result {
    struct result *next;
    gw_id call;
    base_buf text;
    size_t settled;     /* of it in pieces that are whole; the rest is the upload's */
    const void *upload; /* NULL: none is on its way */
    bool put, done;     /* a piece is whole; it was the last one */
} result;

/* What one session holds. */
typedef struct entry {
    struct entry *chain, *newer, *older; /* by the last piece */
    int64_t tenant;
    gw_id session, head;
    result *results;
    size_t bytes;
    uint64_t prefilled_tokens;
    size_t prefilled_bytes;  /* `bytes` at the last prefill, */
    uint32_t prefilled_done; /* and how many results were done */
    bool prefills, begun;    /* one runs; one was made for this head */
} entry;

struct gw_appends {
    gw_app *app;
    pthread_mutex_t mutex; /* guards all below */
    entry *buckets[BUCKETS];
    entry *newest, *oldest;
    size_t bytes;
    uint32_t sessions;
    uint64_t prefilled_tokens;
};

base_code gw_appends_create(gw_appends **out, gw_app *app, base_err *err)
{
    gw_appends *appends = calloc(1, sizeof *appends);
    if (!appends)
        return base_fail(err, BASE_NOMEM, "no memory for appended results");
    pthread_mutex_init(&appends->mutex, NULL);
    appends->app = app;
    *out = appends;
    return BASE_OK;
}

/* ---- entries; the mutex is held ---- */

static entry **place(gw_appends *appends, int64_t tenant, const char *session)
{
    uint64_t hash = XXH3_64bits_withSeed(session, strlen(session), (uint64_t)tenant);
    entry **at = &appends->buckets[hash % BUCKETS];
    while (*at && ((*at)->tenant != tenant || strcmp((*at)->session.text, session) != 0))
        at = &(*at)->chain;
    return at;
}

static void unlink_use(gw_appends *appends, entry *e)
{
    *(e->newer ? &e->newer->older : &appends->newest) = e->older;
    *(e->older ? &e->older->newer : &appends->oldest) = e->newer;
    e->newer = e->older = NULL;
}

static void link_use(gw_appends *appends, entry *e)
{
    e->older = appends->newest;
    *(appends->newest ? &appends->newest->newer : &appends->oldest) = e;
    appends->newest = e;
}

static void drop_results(gw_appends *appends, entry *e)
{
    for (result *r = e->results, *next; r; r = next) {
        next = r->next;
        base_buf_deinit(&r->text);
        free(r);
    }
    appends->bytes -= e->bytes;
    e->results = NULL;
    e->bytes = e->prefilled_bytes = 0;
    e->prefilled_done = 0;
    e->prefilled_tokens = 0;
    e->begun = false;
}

/* One whose prefill runs stays, empty, until that ends. */
static void drop_entry(gw_appends *appends, entry *e)
{
    drop_results(appends, e);
    e->head.text[0] = '\0';
    unlink_use(appends, e);
    if (e->prefills) {
        link_use(appends, e);
        return;
    }
    *place(appends, e->tenant, e->session.text) = e->chain;
    appends->sessions--;
    free(e);
}

static entry *get_entry(gw_appends *appends, int64_t tenant, const char *session, const char *head)
{
    entry **at = place(appends, tenant, session), *e = *at;
    if (!e) {
        e = calloc(1, sizeof *e);
        if (!e)
            return NULL;
        e->tenant = tenant;
        snprintf(e->session.text, sizeof e->session.text, "%s", session);
        *at = e;
        link_use(appends, e);
        appends->sessions++;
    }
    if (strcmp(e->head.text, head) != 0) {
        drop_results(appends, e);
        snprintf(e->head.text, sizeof e->head.text, "%s", head);
    }
    return e;
}

static result *find_result(const entry *e, const char *call)
{
    result *r = e ? e->results : NULL;
    while (r && strcmp(r->call.text, call) != 0)
        r = r->next;
    return r;
}

/* ---- pieces ---- */

static result *get_result(entry *e, const char *call)
{
    result *r = find_result(e, call);
    if (r || !(r = calloc(1, sizeof *r)))
        return r;
    snprintf(r->call.text, sizeof r->call.text, "%s", call);
    r->next = e->results;
    e->results = r;
    return r;
}

/* What an upload has brought leaves. */
static void unsettle(gw_appends *appends, entry *e, result *r)
{
    size_t length = r->text.length - r->settled;
    r->upload = NULL;
    if (!length)
        return;
    r->text.length = r->settled;
    e->bytes -= length;
    e->prefilled_bytes = base_min(e->prefilled_bytes, e->bytes);
    appends->bytes -= length;
}

static bool add_text(gw_appends *appends, entry *e, result *r, const char *text, size_t length)
{
    base_buf_add(&r->text, text, length);
    if (r->text.failed) {
        r->text.failed = false;
        return false;
    }
    e->bytes += length;
    appends->bytes += length;
    unlink_use(appends, e);
    link_use(appends, e);
    while (appends->bytes > appends->app->conf->sessions_append_bytes_total_max &&
           appends->oldest != e)
        drop_entry(appends, appends->oldest);
    return true;
}

static base_code put(gw_appends *appends, gw_append_state *out, entry *e, const char *call,
                     const char *text, size_t length, bool done, base_err *err)
{
    const gw_conf *conf = appends->app->conf;
    result *r = find_result(e, call);
    if (r && r->done)
        return base_fail_param(err, BASE_CONFLICT, "call_id",
                               "the result of call %s was said to be done", call);
    if (r)
        unsettle(appends, e, r);
    if (e->bytes + length > conf->sessions_append_bytes_max)
        return base_fail_param(err, BASE_TOO_LONG, "text",
                               "the appended results have %zu bytes, the limit is %llu "
                               "(sessions.append_bytes_max)",
                               e->bytes + length,
                               (unsigned long long)conf->sessions_append_bytes_max);
    r = get_result(e, call);
    if (!r || !add_text(appends, e, r, text, length))
        return base_fail(err, BASE_NOMEM, "no memory for an appended result");
    r->settled = r->text.length;
    r->put = true;
    r->done = done;
    *out = (gw_append_state){r->text.length, e->prefilled_tokens, r->done};
    return BASE_OK;
}

base_code gw_append_put(gw_appends *appends, gw_append_state *out, const gw_append_key *key,
                        const char *call, const char *text, size_t length, bool done, base_err *err)
{
    pthread_mutex_lock(&appends->mutex);
    entry *e = get_entry(appends, key->tenant, key->session, key->head);
    base_code code = e ? put(appends, out, e, call, text, length, done, err)
                       : base_fail(err, BASE_NOMEM, "no memory for an appended result");
    pthread_mutex_unlock(&appends->mutex);
    return code;
}

static bool arrive(gw_appends *appends, entry *e, const char *call, const void *upload,
                   const char *text, size_t length)
{
    result *r = get_result(e, call);
    if (!r || r->done || (r->upload && r->upload != upload))
        return false;
    r->upload = upload;
    size_t have = r->text.length - r->settled;
    if (have >= length)
        return have == length;
    return e->bytes + length - have <= appends->app->conf->sessions_append_bytes_max &&
           add_text(appends, e, r, text + have, length - have);
}

bool gw_append_arrive(gw_appends *appends, const gw_append_key *key, const char *call,
                      const void *upload, const char *text, size_t length)
{
    pthread_mutex_lock(&appends->mutex);
    /* A newer head's begins with a piece that is whole, or its prefill: not with what was on its
     * way when it came. */
    entry *e = *place(appends, key->tenant, key->session);
    if (!e || strcmp(e->head.text, key->head) != 0)
        e = e && e->head.text[0] ? NULL : get_entry(appends, key->tenant, key->session, key->head);
    bool of_use = e && arrive(appends, e, call, upload, text, length);
    pthread_mutex_unlock(&appends->mutex);
    return of_use;
}

void gw_append_recall(gw_appends *appends, const gw_append_key *key, const char *call,
                      const void *upload)
{
    pthread_mutex_lock(&appends->mutex);
    entry *e = *place(appends, key->tenant, key->session);
    result *r = e && strcmp(e->head.text, key->head) == 0 ? find_result(e, call) : NULL;
    if (r && r->upload == upload)
        unsettle(appends, e, r);
    pthread_mutex_unlock(&appends->mutex);
}

base_code gw_append_check(gw_app *app, int64_t tenant, const gw_session_row *session,
                          const char *call, base_arena *arena, base_err *err)
{
    gw_path_turn *path;
    uint32_t count;
    bool more, found = false;
    if (gw_lock_is_held(app->locks, tenant, session->id.text) &&
        !gw_append_prefills(app->appends, tenant, session->id.text))
        return base_fail(err, BASE_CONFLICT, "a turn of this session is still running");
    base_code code = gw_session_path(app->ledger, &path, &count, &more, tenant, session, NULL, NULL,
                                     1, true, NULL, arena, err);
    if (code)
        return code;
    json_t *calls =
        count && path->item_count ? gw_calls_of(path->items[path->item_count - 1]) : NULL;
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const char *have = json_string_value(json_object_get(json_array_get(calls, i), "id"));
        found |= have && strcmp(have, call) == 0;
    }
    json_decref(calls);
    return found ? BASE_OK
                 : base_fail_param(err, BASE_INVALID, "call_id",
                                   "the session's last turn made no call with id '%.*s'",
                                   gw_shown(call, 64), call);
}

bool gw_append_fits(const char *text, size_t length)
{
    size_t from = 0;
    while (from < length && from < 3 && ((unsigned char)text[from] & 0xc0) == 0x80)
        from++; /* the end of the character before */
    return base_utf8_valid(text + from, base_utf8_complete(text + from, length - from));
}

/* For a prefill, what is on its way too; a turn takes whole pieces. `*done` may be NULL. */
static bool copy_result(gw_appends *appends, eng_text *out, bool *done, bool prefill,
                        const gw_append_key *key, const char *call, base_arena *arena)
{
    pthread_mutex_lock(&appends->mutex);
    const entry *e = *place(appends, key->tenant, key->session);
    const result *r = e && strcmp(e->head.text, key->head) == 0 ? find_result(e, call) : NULL;
    *out = (eng_text){0};
    if (r && (prefill || r->put)) {
        out->length = prefill ? r->text.length : r->settled;
        out->data = base_arena_copy(arena, r->text.data ? r->text.data : "", out->length);
        if (done)
            *done = r->done;
    }
    pthread_mutex_unlock(&appends->mutex);
    return out->data != NULL;
}

bool gw_append_get(gw_appends *appends, eng_text *out, const gw_append_key *key, const char *call,
                   base_arena *arena)
{
    return copy_result(appends, out, NULL, false, key, call, arena);
}

void gw_append_drop(gw_appends *appends, int64_t tenant, const char *session)
{
    pthread_mutex_lock(&appends->mutex);
    entry *e = *place(appends, tenant, session);
    if (e)
        drop_entry(appends, e);
    pthread_mutex_unlock(&appends->mutex);
}

bool gw_append_prefills(gw_appends *appends, int64_t tenant, const char *session)
{
    pthread_mutex_lock(&appends->mutex);
    const entry *e = *place(appends, tenant, session);
    bool prefills = e && e->prefills;
    pthread_mutex_unlock(&appends->mutex);
    return prefills;
}

gw_append_stats gw_append_get_stats(gw_appends *appends)
{
    pthread_mutex_lock(&appends->mutex);
    gw_append_stats stats = {appends->bytes, appends->prefilled_tokens, appends->sessions};
    pthread_mutex_unlock(&appends->mutex);
    return stats;
}

void gw_appends_destroy(gw_appends *appends)
{
    if (!appends)
        return;
    while (appends->oldest)
        drop_entry(appends, appends->oldest);
    pthread_mutex_destroy(&appends->mutex);
    free(appends);
}

/* ---- prefills ---- */

/* One prefill: a worker renders, the loop submits and hears of the end. */
typedef struct prefill {
    gw_port port; /* first member: the bridge hands it back */
    gw_job job;
    gw_message rendered;
    gw_lock lock;
    gw_appends *appends;
    gw_identity identity;
    gw_loop *loop;
    gw_id session, head;
    base_arena *arena;
    eng_prompt prompt;
    size_t bytes; /* of results that the prompt stands on */
    uint64_t id;
} prefill;

/* Loop. */
static void end_prefill(prefill *p, bool ran, const eng_usage *usage)
{
    gw_appends *appends = p->appends;
    bool again = false;
    gw_lock_let_go(appends->app->locks, &p->lock);
    pthread_mutex_lock(&appends->mutex);
    entry *e = *place(appends, p->identity.tenant, p->session.text);
    if (ran)
        appends->prefilled_tokens +=
            usage->prompt_tokens - base_min(usage->cached_tokens, usage->prompt_tokens);
    if (e && strcmp(e->head.text, p->head.text) == 0 && ran) {
        e->prefilled_tokens = usage->prompt_tokens;
        again = e->bytes > p->bytes;
    }
    if (e) {
        e->prefills = false;
        if (!e->head.text[0])
            drop_entry(appends, e);
    }
    pthread_mutex_unlock(&appends->mutex);
    base_arena_destroy(p->arena);
    gw_loop *loop = p->loop;
    gw_identity identity = p->identity;
    gw_id session = p->session;
    free(p);
    if (again)
        gw_append_prefill(appends, &identity, session.text, loop);
}

static void on_event(gw_port *port, const eng_event *event)
{
    prefill *p = (prefill *)port;
    if (event->kind != ENG_EVENT_DONE)
        return;
    gw_port_close(port);
    end_prefill(p, event->finish == ENG_FINISH_STOP, &event->usage);
}

/* A shutdown does not wait for it. */
static void on_tick(gw_port *port, uint64_t now)
{
    prefill *p = (prefill *)port;
    (void)now;
    if (atomic_load(&p->appends->app->draining))
        eng_cancel(p->appends->app->engine, p->id);
}

static void on_rendered(gw_message *message)
{
    prefill *p = (prefill *)((char *)message - offsetof(prefill, rendered));
    gw_app *app = p->appends->app;
    base_err err = BASE_ERR_INIT;
    p->port.event = on_event;
    p->port.tick = on_tick;
    p->id = gw_request_id();
    eng_request request = {.id = p->id,
                           .user = &p->port,
                           .tokens = p->prompt.tokens,
                           .token_count = p->prompt.token_count,
                           .space = p->identity.salt,
                           .prefill_only = true,
                           .no_disk = true}; /* the turn that takes it will write it */
    bool open = p->prompt.token_count && !atomic_load(&app->draining) &&
                !gw_port_open(app->bridge, &p->port, p->loop, &err);
    if (open && !eng_submit(app->engine, &request, &err))
        return;
    if (open)
        gw_port_close(&p->port);
    if (err.code)
        base_log(BASE_LOG_DEBUG, "prefill_refused session=%s reason=\"%s\"", p->session.text,
                 err.text);
    end_prefill(p, false, NULL);
}

/* How many tokens from the front stay what they are if text is added before the result's end. */
static uint32_t stable(gw_app *app, const eng_prompt *prompt, uint32_t least)
{
    base_buf bytes;
    uint32_t count = prompt->token_count;
    base_buf_init(&bytes, 0);
    while (count > least && bytes.length < sizeof RESULT_END - 1 + MARGIN_BYTES && !bytes.failed) {
        count--;
        eng_detokenize(app->engine, &bytes, &prompt->tokens[count], 1, NULL);
    }
    base_buf_deinit(&bytes);
    return count;
}

static uint32_t common(const eng_prompt *a, const eng_prompt *b)
{
    uint32_t count = 0, max = (uint32_t)base_min(a->token_count, b->token_count);
    while (count < max && a->tokens[count] == b->tokens[count])
        count++;
    return count;
}

/* The next prompt up to the first result that is not whole. */
static base_code render(prefill *p, base_err *err)
{
    gw_app *app = p->appends->app;
    const eng_info *info = eng_get_info(app->engine);
    gw_session_row session;
    gw_head head;
    base_code code =
        gw_session_read(app->ledger, &session, p->identity.tenant, p->session.text, p->arena, err);
    if (!code && !session.head_row)
        return base_fail(err, BASE_NOT_FOUND, "no head");
    if (!code)
        code = gw_session_head(app->ledger, &head, p->identity.tenant, &session, NULL,
                               info->template_id, p->arena, err);
    if (code)
        return code;
    if (!head.exact || !head.answer || head.finish != ENG_FINISH_CALLS)
        return base_fail(err, BASE_UNSUPPORTED, "nothing to go on from");
    p->head = head.turn;
    json_t *answer = json_loads(head.answer, JSON_ALLOW_NUL, NULL);
    json_t *calls = json_object_get(answer, "tool_calls");
    uint32_t call_count = (uint32_t)json_array_size(calls), whole = 0;
    eng_item *items = base_arena_calloc(p->arena, call_count + 1, sizeof *items);
    const gw_append_key key = {p->identity.tenant, p->session.text, p->head.text};
    bool done = true;
    for (uint32_t i = 0; items && i < call_count && done; i++) {
        const char *id = json_string_value(json_object_get(json_array_get(calls, i), "id"));
        eng_item *item = &items[1 + i];
        done = false;
        *item = (eng_item){.role = ENG_ROLE_TOOL};
        if (!id || !copy_result(p->appends, &item->text, &done, true, &key, id, p->arena))
            item->text = (eng_text){"", 0};
        /* A character whose end has not come. */
        if (!done)
            item->text.length = base_utf8_complete(item->text.data, item->text.length);
        p->bytes += item->text.length;
        whole++;
    }
    json_decref(answer);
    if (!items)
        return base_fail(err, BASE_NOMEM, "no memory to prefill");
    items[0] =
        (eng_item){.role = ENG_ROLE_ASSISTANT, .tokens = head.run, .token_count = head.run_count};
    eng_chat chat = {.items = items,
                     .item_count = 1 + whole,
                     .no_generation_prompt = !done,
                     .prefix = head.prompt,
                     .prefix_count = head.prompt_count};
    code = eng_render(app->engine, &p->prompt, &chat, 0, NULL, p->arena, err);
    if (code || done)
        return code;
    /* The fixed beginning, whatever the result will be. */
    eng_prompt other;
    eng_item *last = &items[whole];
    eng_text text = last->text;
    last->text = text.length ? (eng_text){"", 0} : (eng_text){"x", 1};
    code = eng_render(app->engine, &other, &chat, 0, NULL, p->arena, err);
    p->prompt.token_count = stable(app, &p->prompt, code ? 0 : common(&p->prompt, &other));
    return code;
}

static void run(gw_job *job)
{
    prefill *p = (prefill *)((char *)job - offsetof(prefill, job));
    base_err err = BASE_ERR_INIT;
    gw_claim claim =
        gw_lock_try(p->appends->app->locks, &p->lock, p->identity.tenant, p->session.text);
    if (claim != GW_CLAIM_HELD || render(p, &err))
        p->prompt.token_count = 0;
    gw_loop_post(p->loop, &p->rendered);
}

/* True if a prefill of `bytes` may begin; notes it. */
static bool begin(gw_appends *appends, size_t *bytes, int64_t tenant, const char *session)
{
    pthread_mutex_lock(&appends->mutex);
    entry *e = *place(appends, tenant, session);
    if (!e)
        e = get_entry(appends, tenant, session, "");
    bool due = false;
    if (e && !e->prefills) {
        uint32_t done = 0;
        for (const result *r = e->results; r; r = r->next)
            done += r->done;
        size_t fresh = e->bytes - e->prefilled_bytes;
        due = !e->begun || done > e->prefilled_done ||
              fresh >= base_max(STEP_BYTES, e->bytes / STEP_SHARE);
        if (due) {
            e->prefills = e->begun = true;
            *bytes = e->prefilled_bytes = e->bytes;
            e->prefilled_done = done;
        }
    }
    pthread_mutex_unlock(&appends->mutex);
    return due;
}

void gw_append_prefill(gw_appends *appends, const gw_identity *identity, const char *session,
                       gw_loop *loop)
{
    size_t bytes;
    if (atomic_load(&appends->app->draining) || !begin(appends, &bytes, identity->tenant, session))
        return;
    prefill *p = calloc(1, sizeof *p);
    base_arena *arena = base_arena_create(64u << 10, 1u << 30);
    if (!p || !arena) {
        free(p);
        base_arena_destroy(arena);
        pthread_mutex_lock(&appends->mutex);
        (*place(appends, identity->tenant, session))->prefills = false;
        pthread_mutex_unlock(&appends->mutex);
        return;
    }
    *p = (prefill){.job = {.run = run, .bytes = bytes},
                   .rendered.run = on_rendered,
                   .appends = appends,
                   .identity = *identity,
                   .loop = loop,
                   .arena = arena};
    snprintf(p->session.text, sizeof p->session.text, "%s", session);
    if (!gw_workers_submit(appends->app->workers, &p->job))
        end_prefill(p, false, NULL);
}
