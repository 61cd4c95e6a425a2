#include "gateway/response.h"

#include <stdlib.h>
#include <string.h>

#include "gateway/dialect.h"

#define TURN_DIGITS 5 /* where a turn's hex digits begin, behind "turn_" */

/* ---- objects ---- */

static void put_slice(base_buf *out, const base_buf *text, size_t offset, size_t length)
{
    gw_put_string(out, length ? text->data + offset : "", length);
}

static void put_item_id(base_buf *out, const gw_response *r, const gw_segment *s)
{
    const char *digits = r->turn.text + TURN_DIGITS;
    if (s->kind == ENG_PART_CALL_BEGIN)
        base_buf_printf(out, "\"%s_%s_%u\"", (*r->calls)[s->call].custom ? "ctc" : "fc", digits,
                        s->call);
    else if (s->nth)
        base_buf_printf(out, "\"%s%s_%u\"", s->kind == ENG_PART_TEXT ? "msg_" : "rs_", digits,
                        s->nth);
    else
        base_buf_printf(out, "\"%s%s\"", s->kind == ENG_PART_TEXT ? "msg_" : "rs_", digits);
}

/* `,"logprobs":[…]` */
static void put_entries(base_buf *out, const gw_response *r, size_t offset, size_t length)
{
    base_buf_puts(out, ",\"logprobs\":[");
    base_buf_add(out, length ? r->entries.data + offset : "", length);
    base_buf_puts(out, "]");
}

static void put_part(base_buf *out, const gw_response *r, const gw_segment *s, bool whole)
{
    bool said = s->kind == ENG_PART_TEXT;
    base_buf_printf(out, "{\"type\":\"%s\",\"text\":",
                    said         ? "output_text"
                    : r->summary ? "summary_text"
                                 : "reasoning_text");
    put_slice(out, said ? r->text : r->reasoning, s->offset, whole ? s->length : 0);
    if (said) {
        base_buf_puts(out, ",\"annotations\":[]");
        put_entries(out, r, s->entries, whole ? s->entries_length : 0);
    }
    base_buf_puts(out, "}");
}

/* `status`: "in_progress" is the item as it is added, without content. */
static void put_item(base_buf *out, const gw_response *r, const gw_segment *s, const char *status,
                     const char *sealed)
{
    bool whole = strcmp(status, "in_progress") != 0;
    base_buf_puts(out, "{\"id\":");
    put_item_id(out, r, s);
    if (s->kind == ENG_PART_CALL_BEGIN) {
        const gw_turn_call *call = &(*r->calls)[s->call];
        const base_buf *shown = gw_call_shown(call);
        base_buf_printf(out, ",\"type\":\"%s\",\"status\":\"%s\",\"call_id\":\"%s\",\"name\":",
                        call->custom ? "custom_tool_call" : "function_call", status, call->id.text);
        put_slice(out, &call->name, 0, call->name.length);
        base_buf_puts(out, call->custom ? ",\"input\":" : ",\"arguments\":");
        put_slice(out, shown, 0, whole ? shown->length : 0);
        base_buf_puts(out, "}");
        return;
    }
    bool said = s->kind == ENG_PART_TEXT;
    base_buf_printf(out, ",\"type\":\"%s\",\"status\":\"%s\"", said ? "message" : "reasoning",
                    status);
    base_buf_puts(out, said         ? ",\"role\":\"assistant\",\"content\":["
                       : r->summary ? ",\"summary\":["
                                    : ",\"summary\":[],\"content\":[");
    if (whole)
        put_part(out, r, s, true);
    base_buf_puts(out, "]");
    if (!said && r->encrypted)
        base_buf_printf(out, sealed ? ",\"encrypted_content\":\"%s\"" : ",\"encrypted_content\":%s",
                        sealed ? sealed : "null");
    base_buf_puts(out, "}");
}

/* Whether an item is whole: the end may have cut the last one. */
static const char *item_status(const gw_response *r, const gw_segment *s, bool cut)
{
    bool open_call = s->kind == ENG_PART_CALL_BEGIN && !(*r->calls)[s->call].whole;
    bool cut_last = cut && s == &r->segments[r->count - 1] && s->kind != ENG_PART_CALL_BEGIN;
    return open_call || cut_last ? "incomplete" : "completed";
}

void gw_response_put_item(gw_response *r, base_buf *out, uint32_t index, const gw_response_end *end)
{
    const gw_segment *s = &r->segments[index];
    put_item(out, r, s, item_status(r, s, end->cut), end->sealed);
}

void gw_response_put(gw_response *r, base_buf *out, const char *status, const gw_response_end *end)
{
    base_buf_printf(out,
                    "{\"id\":\"%s\",\"object\":\"response\",\"created_at\":%lld,\"status\":\"%s\","
                    "\"completed_at\":",
                    r->id.text, (long long)(r->created_ms / 1000), status);
    if (end && strcmp(status, "completed") == 0)
        base_buf_printf(out, "%lld", (long long)(end->ended_ms / 1000));
    else
        base_buf_puts(out, "null");
    base_buf_puts(out, ",\"error\":");
    if (end && end->code) {
        base_buf_puts(out, "{\"code\":");
        gw_put_string(out, end->code, strlen(end->code));
        base_buf_puts(out, ",\"message\":");
        gw_put_string(out, end->message, strlen(end->message));
        base_buf_puts(out, "}");
    } else {
        base_buf_puts(out, "null");
    }
    base_buf_puts(out, ",\"incomplete_details\":");
    if (end && end->reason)
        base_buf_printf(out, "{\"reason\":\"%s\"}", end->reason);
    else
        base_buf_puts(out, "null");
    base_buf_printf(out, ",%s,\"output\":[", r->echo);
    for (uint32_t i = 0; end && i < r->count; i++) {
        base_buf_puts(out, i ? "," : "");
        gw_response_put_item(r, out, i, end);
    }
    base_buf_printf(out, "],\"usage\":%s}", end && end->usage ? end->usage : "null");
}

/* ---- events ---- */

static void give(gw_response *r)
{
    base_buf_puts(&r->scratch, "}\n\n");
    r->failed |= r->scratch.failed;
    r->record(r->ctx, &r->scratch);
}

static void begin_numbered(gw_response *r, const char *type)
{
    base_buf_clear(&r->scratch);
    base_buf_printf(&r->scratch, "event: %s\ndata: {\"type\":\"%s\",\"sequence_number\":%u", type,
                    type, r->sequence++);
}

static base_buf *begin_event(gw_response *r, const char *type)
{
    /* Keep-alives of the first time are events like all others. */
    while (r->ping_at < r->ping_count && r->pings[r->ping_at] == r->sequence) {
        r->ping_at++;
        begin_numbered(r, "keepalive");
        give(r);
    }
    begin_numbered(r, type);
    return &r->scratch;
}

static void response_event(gw_response *r, const char *type, const char *status,
                           const gw_response_end *end)
{
    base_buf *out = begin_event(r, type);
    base_buf_puts(out, ",\"response\":");
    gw_response_put(r, out, status, end);
    give(r);
}

static void item_event(gw_response *r, const char *type, uint32_t index, const char *status,
                       const char *sealed)
{
    base_buf *out = begin_event(r, type);
    base_buf_printf(out, ",\"output_index\":%u,\"item\":", index);
    put_item(out, r, &r->segments[index], status, sealed);
    give(r);
}

/* Begins an event of the last item's only part. */
static base_buf *begin_part_event(gw_response *r, const char *type)
{
    const gw_segment *s = &r->segments[r->count - 1];
    base_buf *out = begin_event(r, type);
    base_buf_puts(out, ",\"item_id\":");
    put_item_id(out, r, s);
    base_buf_printf(out, ",\"output_index\":%u", r->count - 1);
    if (s->kind == ENG_PART_TEXT || (s->kind == ENG_PART_REASONING && !r->summary))
        base_buf_puts(out, ",\"content_index\":0");
    else if (s->kind == ENG_PART_REASONING)
        base_buf_puts(out, ",\"summary_index\":0");
    return out;
}

/* Events of parts by kind: text, reasoning, reasoning as a summary, calls of both kinds. */
typedef struct names {
    const char *added, *delta, *done, *part_done;
} names;

static const names *names_of(const gw_response *r, const gw_segment *s)
{
    static const names text = {"response.content_part.added", "response.output_text.delta",
                               "response.output_text.done", "response.content_part.done"},
                       reasoning = {"response.content_part.added", "response.reasoning_text.delta",
                                    "response.reasoning_text.done", "response.content_part.done"},
                       summary = {"response.reasoning_summary_part.added",
                                  "response.reasoning_summary_text.delta",
                                  "response.reasoning_summary_text.done",
                                  "response.reasoning_summary_part.done"},
                       call = {NULL, "response.function_call_arguments.delta",
                               "response.function_call_arguments.done", NULL},
                       custom = {NULL, "response.custom_tool_call_input.delta",
                                 "response.custom_tool_call_input.done", NULL};
    return s->kind == ENG_PART_TEXT        ? &text
           : s->kind == ENG_PART_REASONING ? r->summary ? &summary : &reasoning
           : (*r->calls)[s->call].custom   ? &custom
                                           : &call;
}

static void part_event(gw_response *r, const char *type, bool whole)
{
    base_buf *out = begin_part_event(r, type);
    base_buf_puts(out, ",\"part\":");
    put_part(out, r, &r->segments[r->count - 1], whole);
    give(r);
}

/* Told to be done at the end, see the header. */
static bool is_late(const gw_response *r, const gw_segment *s)
{
    return r->encrypted || s->kind == ENG_PART_CALL_BEGIN;
}

/* Ends the last item. */
static void close_last(gw_response *r, bool cut)
{
    if (!r->open)
        return;
    r->open = false;
    if (!r->record)
        return;
    const gw_segment *s = &r->segments[r->count - 1];
    const names *n = names_of(r, s);
    base_buf *out = begin_part_event(r, n->done);
    if (s->kind == ENG_PART_CALL_BEGIN) {
        const gw_turn_call *call = &(*r->calls)[s->call];
        const base_buf *shown = gw_call_shown(call);
        if (!call->custom) {
            base_buf_puts(out, ",\"name\":");
            put_slice(out, &call->name, 0, call->name.length);
        }
        base_buf_puts(out, call->custom ? ",\"input\":" : ",\"arguments\":");
        put_slice(out, shown, 0, shown->length);
        give(r);
        return;
    }
    bool said = s->kind == ENG_PART_TEXT;
    base_buf_puts(out, ",\"text\":");
    put_slice(out, said ? r->text : r->reasoning, s->offset, s->length);
    if (said)
        put_entries(out, r, s->entries, s->entries_length);
    give(r);
    part_event(r, n->part_done, true);
    if (!is_late(r, s))
        item_event(r, "response.output_item.done", r->count - 1, item_status(r, s, cut), NULL);
}

static gw_segment *open_segment(gw_response *r, eng_part_kind kind, uint32_t call)
{
    close_last(r, false);
    if (r->count == r->capacity) {
        uint32_t capacity = r->capacity ? r->capacity * 2 : 8;
        gw_segment *more = realloc(r->segments, capacity * sizeof *more);
        if (!more) {
            r->failed = true;
            return NULL;
        }
        r->segments = more;
        r->capacity = capacity;
    }
    gw_segment s = {.kind = kind, .call = call, .entries = r->entries.length};
    for (uint32_t i = 0; i < r->count; i++)
        if (r->segments[i].kind == kind) {
            s.nth++;
            s.offset = r->segments[i].offset + r->segments[i].length;
        }
    r->segments[r->count++] = s;
    r->open = true;
    if (r->record) {
        const char *added = names_of(r, &r->segments[r->count - 1])->added;
        item_event(r, "response.output_item.added", r->count - 1, "in_progress", NULL);
        if (added)
            part_event(r, added, false);
    }
    return &r->segments[r->count - 1];
}

/* Moves the logprobs that have no record yet to the item's; returns where they begin. */
static size_t take_entries(gw_response *r, gw_segment *s)
{
    size_t from = r->entries.length;
    if (!r->list || !r->list->entries.length)
        return from;
    if (s->entries_length) {
        base_buf_puts(&r->entries, ",");
        from++;
    }
    base_buf_add(&r->entries, r->list->entries.data, r->list->entries.length);
    base_buf_clear(&r->list->entries);
    s->entries_length = r->entries.length - s->entries;
    r->failed |= r->entries.failed;
    return from;
}

void gw_response_part(gw_response *r, const eng_part *p)
{
    if (r->list)
        gw_logprobs_part(r->list, p);
    if (p->kind == ENG_PART_CALL_END) {
        close_last(r, false);
        return;
    }
    if (p->kind == ENG_PART_CALL_BEGIN) {
        open_segment(r, ENG_PART_CALL_BEGIN, p->call);
        return;
    }
    if (!p->length)
        return;
    eng_part_kind kind = p->kind == ENG_PART_CALL_ARGS ? ENG_PART_CALL_BEGIN : p->kind;
    gw_segment *s = r->open ? &r->segments[r->count - 1] : NULL;
    if (!s || s->kind != kind) {
        if (kind == ENG_PART_CALL_BEGIN)
            return; /* arguments of no call */
        s = open_segment(r, kind, 0);
    }
    if (!s)
        return;
    s->length += p->length;
    size_t from = kind == ENG_PART_TEXT ? take_entries(r, s) : 0;
    if (!r->record)
        return;
    base_buf *out = begin_part_event(r, names_of(r, s)->delta);
    base_buf_puts(out, ",\"delta\":");
    base_buf_json_string(out, p->text, p->length);
    if (kind == ENG_PART_TEXT)
        put_entries(out, r, from, r->entries.length - from);
    give(r);
}

void gw_response_open(gw_response *r)
{
    if (!r->record)
        return;
    const char *status = r->background ? "queued" : "in_progress";
    response_event(r, "response.created", status, NULL);
    response_event(r, r->background ? "response.queued" : "response.in_progress", status, NULL);
}

void gw_response_started(gw_response *r)
{
    if (r->record && r->background)
        response_event(r, "response.in_progress", "in_progress", NULL);
}

void gw_response_ping(gw_response *r)
{
    uint32_t *more = realloc(r->pings, (r->ping_count + 1) * sizeof *more);
    if (!more)
        return;
    r->pings = more;
    r->pings[r->ping_count++] = r->sequence;
    r->ping_at = r->ping_count;
    begin_numbered(r, "keepalive");
    give(r);
}

void gw_response_finish(gw_response *r, const gw_response_end *end)
{
    close_last(r, end->cut);
    if (!r->record)
        return;
    for (uint32_t i = 0; i < r->count; i++)
        if (is_late(r, &r->segments[i]))
            item_event(r, "response.output_item.done", i, item_status(r, &r->segments[i], end->cut),
                       end->sealed);
    response_event(r,
                   strcmp(end->status, "completed") == 0 ? "response.completed"
                   : strcmp(end->status, "failed") == 0  ? "response.failed"
                                                         : "response.incomplete",
                   end->status, end);
}

void gw_response_deinit(gw_response *r)
{
    base_buf_deinit(&r->scratch);
    base_buf_deinit(&r->entries);
    free(r->segments);
    free(r->pings);
}
