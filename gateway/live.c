/* gw_live: see the header. */
#include "gateway/live.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"

struct gw_live {
    gw_events *events;
    pthread_mutex_t mutex; /* guards what follows, and `now` of every entry */
    gw_live_entry *first, *last;
    uint32_t phases[GW_PHASE_COUNT];
    uint32_t recent_at, recent_count; /* the next place; how many there are */
    gw_live_request recent[GW_LIVE_RECENT];
};

const char *gw_phase_name(gw_phase phase)
{
    static const char *const names[GW_PHASE_COUNT] = {
        [GW_PHASE_PREPARE] = "prepare", [GW_PHASE_QUEUE] = "queue",
        [GW_PHASE_PREFILL] = "prefill", [GW_PHASE_DECODE] = "decode",
        [GW_PHASE_COMMIT] = "commit",   [GW_PHASE_DONE] = "done",
    };
    return names[phase];
}

base_code gw_live_create(gw_live **out, gw_events *events, base_err *err)
{
    gw_live *live = calloc(1, sizeof *live);
    if (!live)
        return base_fail(err, BASE_NOMEM, "no memory for the list of requests");
    live->events = events;
    pthread_mutex_init(&live->mutex, NULL);
    *out = live;
    return BASE_OK;
}

void gw_live_destroy(gw_live *live)
{
    if (!live)
        return;
    pthread_mutex_destroy(&live->mutex);
    free(live);
}

/* With the mutex, so that a request's events come in order. */
static void tell(gw_live *live, const char *event, const gw_live_request *request)
{
    if (!gw_events_heard(live->events))
        return;
    base_buf data;
    base_buf_init(&data, 0);
    gw_live_put(&data, request);
    gw_events_post(live->events, event, &data);
    base_buf_deinit(&data);
}

void gw_live_enter(gw_live *live, gw_live_entry *entry, const gw_live_request *now)
{
    pthread_mutex_lock(&live->mutex);
    entry->now = *now;
    entry->listed = true;
    entry->next = NULL;
    entry->prev = live->last;
    *(live->last ? &live->last->next : &live->first) = entry;
    live->last = entry;
    live->phases[now->phase]++;
    tell(live, "request.started", now);
    pthread_mutex_unlock(&live->mutex);
}

void gw_live_change(gw_live *live, gw_live_entry *entry, const gw_live_request *now)
{
    pthread_mutex_lock(&live->mutex);
    gw_phase before = entry->now.phase;
    entry->now = *now;
    live->phases[before]--;
    live->phases[now->phase]++;
    if (before != now->phase)
        tell(live, "request.phase", now);
    pthread_mutex_unlock(&live->mutex);
}

void gw_live_submitted(gw_live *live, gw_live_entry *entry, const uint64_t *ids, uint32_t count)
{
    pthread_mutex_lock(&live->mutex);
    entry->engine_ids = ids;
    entry->engine_count = count;
    pthread_mutex_unlock(&live->mutex);
}

void gw_live_step(gw_live *live, gw_live_entry *entry, uint32_t tokens)
{
    pthread_mutex_lock(&live->mutex);
    entry->now.output_tokens += tokens;
    entry->now.passes++;
    pthread_mutex_unlock(&live->mutex);
}

void gw_live_leave(gw_live *live, gw_live_entry *entry, const gw_live_request *end)
{
    pthread_mutex_lock(&live->mutex);
    *(entry->prev ? &entry->prev->next : &live->first) = entry->next;
    *(entry->next ? &entry->next->prev : &live->last) = entry->prev;
    entry->listed = false;
    live->phases[entry->now.phase]--;
    live->recent[live->recent_at] = *end;
    live->recent_at = (live->recent_at + 1) % GW_LIVE_RECENT;
    live->recent_count = (uint32_t)base_min(live->recent_count + 1, GW_LIVE_RECENT);
    tell(live, "request.ended", end);
    pthread_mutex_unlock(&live->mutex);
}

uint32_t gw_live_list(gw_live *live, gw_live_request *out, uint32_t max, uint32_t recent)
{
    uint32_t count = 0;
    pthread_mutex_lock(&live->mutex);
    recent = (uint32_t)base_min(recent, live->recent_count);
    uint32_t at = (live->recent_at + GW_LIVE_RECENT - recent) % GW_LIVE_RECENT;
    for (; recent && count < max; recent--, at = (at + 1) % GW_LIVE_RECENT)
        out[count++] = live->recent[at];
    for (gw_live_entry *e = live->first; e && count < max; e = e->next)
        out[count++] = e->now;
    pthread_mutex_unlock(&live->mutex);
    return count;
}

/* With the mutex. */
static const gw_live_request *ended(const gw_live *live, const char *id)
{
    for (uint32_t i = 1; i <= live->recent_count; i++) {
        uint32_t at = (live->recent_at + GW_LIVE_RECENT - i) % GW_LIVE_RECENT;
        if (strcmp(live->recent[at].id.text, id) == 0)
            return &live->recent[at];
    }
    return NULL;
}

/* With the mutex. */
static gw_live_entry *living(const gw_live *live, const char *id)
{
    gw_live_entry *e = live->first;
    while (e && strcmp(e->now.id.text, id) != 0)
        e = e->next;
    return e;
}

bool gw_live_find(gw_live *live, gw_live_request *out, const char *id)
{
    pthread_mutex_lock(&live->mutex);
    const gw_live_entry *e = living(live, id);
    const gw_live_request *found = e ? &e->now : ended(live, id);
    if (found)
        *out = *found;
    pthread_mutex_unlock(&live->mutex);
    return found != NULL;
}

base_code gw_live_cancel(gw_live *live, eng_engine *engine, const char *id, base_err *err)
{
    base_code code = BASE_OK;
    pthread_mutex_lock(&live->mutex);
    gw_live_entry *e = living(live, id);
    if (!e)
        code = ended(live, id) ? base_fail(err, BASE_CONFLICT, "this request is over")
                               : base_fail(err, BASE_NOT_FOUND, "there is no such request");
    else if (!e->engine_count || e->now.phase >= GW_PHASE_COMMIT)
        code = base_fail(err, BASE_CONFLICT, "this request is in phase %s: try again",
                         gw_phase_name(e->now.phase));
    if (!code)
        atomic_store(&e->cancelled, true);
    for (uint32_t i = 0; !code && i < e->engine_count; i++)
        eng_cancel(engine, e->engine_ids[i]);
    pthread_mutex_unlock(&live->mutex);
    return code;
}

void gw_live_hand_back(gw_live *live, eng_engine *engine)
{
    pthread_mutex_lock(&live->mutex);
    for (const gw_live_entry *e = live->first; e; e = e->next)
        for (uint32_t i = 0; i < e->engine_count; i++)
            eng_cancel(engine, e->engine_ids[i]);
    pthread_mutex_unlock(&live->mutex);
}

void gw_live_phases(gw_live *live, uint32_t counts[GW_PHASE_COUNT])
{
    pthread_mutex_lock(&live->mutex);
    memcpy(counts, live->phases, sizeof live->phases);
    pthread_mutex_unlock(&live->mutex);
}

/* ---- JSON ---- */

static void put_text(base_buf *out, const char *name, const char *text)
{
    base_buf_printf(out, ",\"%s\":", name);
    if (text[0])
        base_buf_json_text(out, text, strlen(text));
    else
        base_buf_puts(out, "null");
}

static void put_number(base_buf *out, const char *name, bool known, int64_t value)
{
    if (known)
        base_buf_printf(out, ",\"%s\":%lld", name, (long long)value);
    else
        base_buf_printf(out, ",\"%s\":null", name);
}

const char *gw_live_finish_name(int finish)
{
    static const char *const finishes[] = {
        [ENG_FINISH_STOP] = "stop",         [ENG_FINISH_CALLS] = "tool_calls",
        [ENG_FINISH_LENGTH] = "length",     [ENG_FINISH_CANCELLED] = "cancelled",
        [ENG_FINISH_DEADLINE] = "deadline", [ENG_FINISH_ERROR] = "error",
    };
    return finish >= 0 ? finishes[finish] : "";
}

void gw_live_put(base_buf *out, const gw_live_request *r)
{
    base_buf_puts(out, "{\"id\":");
    base_buf_json_text(out, r->id.text, strlen(r->id.text));
    base_buf_printf(out, ",\"object\":\"request\",\"tenant\":");
    base_buf_json_text(out, r->tenant, strlen(r->tenant));
    base_buf_printf(out, ",\"dialect\":\"%s\"", r->dialect);
    put_text(out, "model", r->model);
    put_text(out, "session", r->session.text);
    put_text(out, "label", r->label);
    put_text(out, "turn", r->turn.text);
    base_buf_printf(out, ",\"phase\":\"%s\",\"stream\":%s,\"background\":%s,\"choices\":%u",
                    gw_phase_name(r->phase), r->stream ? "true" : "false",
                    r->background ? "true" : "false", r->choices);
    put_number(out, "prompt_tokens", r->prompt_tokens != 0, r->prompt_tokens);
    put_number(out, "cached_tokens", r->matched, r->cached_tokens);
    put_number(out, "restored_tokens", r->matched, r->restored_tokens);
    base_buf_printf(out, ",\"output_tokens\":%u,\"passes\":%u", r->output_tokens, r->passes);
    if (r->passes)
        base_buf_printf(out, ",\"accepted_length\":%.3f",
                        (double)r->output_tokens / (double)r->passes);
    else
        base_buf_puts(out, ",\"accepted_length\":null");
    put_number(out, "received_ms", true, r->received_ms);
    put_number(out, "queued_ms", r->queued_ms != 0, r->queued_ms);
    put_number(out, "started_ms", r->started_ms != 0, r->started_ms);
    put_number(out, "first_ms", r->first_ms != 0, r->first_ms);
    put_number(out, "ended_ms", r->ended_ms != 0, r->ended_ms);
    put_text(out, "finish", gw_live_finish_name(r->finish));
    put_number(out, "status", r->status != 0, r->status);
    put_text(out, "tool", r->tool);
    base_buf_puts(out, "}");
}
