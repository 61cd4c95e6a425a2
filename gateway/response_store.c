#include "gateway/response_store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/dialect.h"
#include "gateway/ledger_stream.h"

/* ---- keeping ---- */

static void put_member(base_buf *out, const char *name, const char *text)
{
    if (!text)
        return;
    base_buf_printf(out, ",\"%s\":", name);
    gw_put_string(out, text, strlen(text));
}

void gw_response_tell(base_buf *out, const gw_turn *turn, const gw_response *r,
                      const gw_response_end *end)
{
    const eng_sampling *sampling = &turn->request.sampling;
    base_buf_printf(out, "{\"template\":\"%s\",\"thinking\":%d,\"starts\":%s,\"encrypted\":%s",
                    eng_get_info(turn->app->engine)->template_id, (int)turn->prompt.thinking,
                    turn->prompt.starts_in_reasoning ? "true" : "false",
                    r->encrypted ? "true" : "false");
    if (r->background)
        base_buf_puts(out, ",\"background\":true");
    if (sampling->ignore_eos)
        base_buf_puts(out, ",\"ignore_eos\":true");
    for (uint32_t i = 0; i < turn->call_count; i++)
        base_buf_printf(out, "%s\"%s\"", i ? "," : ",\"calls\":[", turn->calls[i].id.text);
    base_buf_puts(out, turn->call_count ? "]" : "");
    for (uint32_t i = 0; i < r->ping_count; i++)
        base_buf_printf(out, "%s%u", i ? "," : ",\"pings\":[", r->pings[i]);
    base_buf_puts(out, r->ping_count ? "]" : "");
    for (uint32_t i = 0; i < turn->request.stop_count; i++) {
        base_buf_puts(out, i ? "," : ",\"stops\":[");
        gw_put_string(out, turn->request.stops[i].data, turn->request.stops[i].length);
    }
    base_buf_puts(out, turn->request.stop_count ? "]" : "");
    if (sampling->stop_token_count) {
        base_buf_puts(out, ",\"stop_tokens\":");
        gw_put_ids(out, sampling->stop_tokens, sampling->stop_token_count);
    }
    uint32_t kept = turn->lead + turn->run_tokens;
    if (end && turn->run_count > kept) {
        base_buf_puts(out, ",\"extra\":");
        gw_put_ids(out, turn->run + kept, turn->run_count - kept);
    }
    if (r->list) {
        base_buf_puts(out, ",\"logprobs\":[");
        base_buf_add(out, r->list->log.data ? r->list->log.data : "", r->list->log.length);
        base_buf_puts(out, "]");
    }
    if (end) {
        put_member(out, "status", end->status);
        put_member(out, "reason", end->reason);
        put_member(out, "code", end->code);
        put_member(out, "message", end->message);
        put_member(out, "sealed", end->sealed);
        base_buf_printf(out, ",\"cut\":%s,\"usage\":%s", end->cut ? "true" : "false",
                        end->usage ? end->usage : "null");
    }
    base_buf_puts(out, "}");
}

bool gw_response_turn(gw_id *out, const char *response)
{
    if (strncmp(response, "resp_", 5) != 0 || strlen(response) != 29 ||
        strspn(response + 5, "0123456789abcdef") != 24)
        return false;
    snprintf(out->text, sizeof out->text, "turn_%.24s", response + 5);
    return true;
}

base_code gw_response_read(gw_turn_row *out, gw_ledger *ledger, int64_t tenant,
                           const char *response, base_arena *arena, base_err *err)
{
    gw_id turn;
    base_err why = BASE_ERR_INIT;
    base_code code = gw_response_turn(&turn, response) ? BASE_OK : BASE_NOT_FOUND;
    if (!code)
        code = gw_ledger_turn(ledger, out, tenant, turn.text, arena, &why);
    /* Turns of other dialects are nobody's response, though an id may spell one. */
    if (code == BASE_NOT_FOUND ||
        (!code && (!out->echo || !out->dialect || strcmp(out->dialect, GW_RESPONSES) != 0)))
        return base_fail(err, BASE_NOT_FOUND, "there is no such response");
    return code ? base_fail(err, code, "%s", why.text) : BASE_OK;
}

uint32_t gw_response_first_item(const gw_turn_row *row)
{
    json_t *echo = NULL;
    gw_body_parse(&echo, row->echo, strlen(row->echo), NULL);
    uint32_t first = json_string_length(json_object_get(echo, "instructions")) ? 1 : 0;
    json_decref(echo);
    return first;
}

/* ---- playing ---- */

static bool add_call(gw_stored *s, const char *id)
{
    gw_turn_call *more = realloc(s->calls, (s->call_count + 1) * sizeof *more);
    if (!more)
        return false;
    s->calls = more;
    gw_turn_call *call = &s->calls[s->call_count++];
    memset(call, 0, sizeof *call);
    snprintf(call->id.text, sizeof call->id.text, "%s", id ? id : "");
    return true;
}

/* Adds a part to the answer as turn.c does, then gives it to the response. */
static void play_part(gw_stored *s, const eng_part *made)
{
    eng_part shown = *made, *part = &shown;
    base_buf *buf = part->kind == ENG_PART_TEXT        ? &s->text
                    : part->kind == ENG_PART_REASONING ? &s->reasoning
                                                       : NULL;
    if (part->kind == ENG_PART_CALL_BEGIN) {
        const json_t *ids = json_object_get(s->told, "calls");
        if (part->call != s->call_count ||
            !add_call(s, json_string_value(json_array_get(ids, part->call)))) {
            s->failed = true;
            return;
        }
    }
    if (!buf && part->call >= s->call_count)
        return;
    gw_turn_call *call = buf ? NULL : &s->calls[part->call];
    if (part->kind == ENG_PART_CALL_BEGIN)
        buf = &call->name;
    if (buf) {
        base_buf_add(buf, part->text, part->length);
        s->failed |= buf->failed;
    }
    if (part->kind == ENG_PART_CALL_BEGIN && !s->failed) {
        gw_call_named(call, s->tools);
    } else if (part->kind == ENG_PART_CALL_END) {
        call->whole = true;
    } else if (part->kind == ENG_PART_CALL_ARGS) {
        eng_text more = gw_call_add(call, part->text, part->length);
        part->text = more.data;
        part->length = more.length;
        s->failed |= gw_call_failed(call);
    }
    if (!s->failed)
        gw_response_part(&s->r, part);
}

typedef struct player {
    gw_stored *stored;
    const eng_engine *engine;
    base_json logprobs; /* stands before the next token's entry */
} player;

static void on_event(void *ctx, const eng_event *event)
{
    player *p = ctx;
    for (uint32_t i = 0; p->stored->r.list && i < event->token_count; i++) {
        base_buf bytes;
        base_buf_init(&bytes, 0);
        eng_text entry = gw_raw_next(&p->logprobs);
        p->stored->failed |=
            eng_detokenize(p->engine, &bytes, &event->tokens[i], 1, NULL) ||
            !gw_logprobs_feed(&p->stored->list, bytes.data ? bytes.data : "", bytes.length, entry);
        base_buf_deinit(&bytes);
    }
    for (uint32_t i = 0; i < event->part_count && !p->stored->failed; i++)
        play_part(p->stored, &event->parts[i]);
}

/* The answer as the ledger keeps it, each kind in one piece: for turns of another template, whose
 * tokens mean nothing here. */
static void play_answer(gw_stored *s)
{
    const json_t *calls = json_object_get(s->answer, "tool_calls");
    eng_text reasoning = gw_text_of_json(json_object_get(s->answer, "reasoning_content"));
    eng_text text = gw_text_of_json(json_object_get(s->answer, "content"));
    play_part(s, &(eng_part){ENG_PART_REASONING, 0, reasoning.data, reasoning.length});
    play_part(s, &(eng_part){ENG_PART_TEXT, 0, text.data, text.length});
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *f = json_object_get(json_array_get(calls, i), "function");
        eng_text name = gw_text_of_json(json_object_get(f, "name"));
        eng_text arguments = gw_text_of_json(json_object_get(f, "arguments"));
        play_part(s, &(eng_part){ENG_PART_CALL_BEGIN, (uint32_t)i, name.data, name.length});
        if (i < s->call_count) {
            const char *id = json_string_value(json_object_get(json_array_get(calls, i), "id"));
            snprintf(s->calls[i].id.text, sizeof s->calls[i].id.text, "%s", id ? id : "");
        }
        play_part(s,
                  &(eng_part){ENG_PART_CALL_ARGS, (uint32_t)i, arguments.data, arguments.length});
        play_part(s, &(eng_part){ENG_PART_CALL_END, (uint32_t)i, "", 0});
    }
}

/* Function objects of the request's tools: the types of their parameters decide how arguments read.
 */
static base_code read_tools(eng_request *request, const gw_stored *s, base_arena *arena,
                            base_err *err)
{
    size_t count = json_array_size(s->tools);
    eng_text *texts = base_arena_calloc(arena, count ? count : 1, sizeof *texts), raw = {"[]", 2};
    base_json array;
    if (!texts)
        return gw_no_memory(err);
    gw_body_member(&raw, s->echo, strlen(s->echo), "tools");
    gw_raw_begin(&array, raw);
    for (size_t i = 0; i < count; i++) {
        const json_t *tool = json_array_get(s->tools, i), *name = json_object_get(tool, "name");
        const char *type = json_string_value(json_object_get(tool, "type"));
        eng_text text = gw_raw_next(&array); /* of the echo, which stays */
        base_buf custom;
        if (!name)
            continue;
        base_buf_init(&custom, 0);
        if (type && strcmp(type, "custom") == 0) {
            gw_put_custom(&custom, gw_text_of_json(name), (eng_text){0}, NULL, (eng_text){0});
            text = (eng_text){base_arena_copy(arena, custom.data, custom.length), custom.length};
        }
        base_buf_deinit(&custom);
        texts[request->tool_count++] = text;
    }
    request->tools = texts;
    return base_arena_failed(arena) ? gw_no_memory(err) : BASE_OK;
}

static int32_t *read_numbers(const json_t *list, uint32_t *count, base_arena *arena)
{
    size_t size = json_array_size(list);
    int32_t *out = base_arena_calloc(arena, size ? size : 1, sizeof *out);
    for (size_t i = 0; out && i < size; i++)
        out[i] = (int32_t)json_integer_value(json_array_get(list, i));
    *count = out ? (uint32_t)size : 0;
    return out;
}

static base_code play_tokens(gw_stored *s, gw_app *app, const gw_stream_row *stream,
                             const int32_t *run, uint32_t run_count, const uint32_t *steps,
                             uint32_t step_count, base_arena *arena, base_err *err)
{
    const json_t *told = s->told, *stops = json_object_get(told, "stops");
    uint32_t extra_count, stop_count = (uint32_t)json_array_size(stops);
    const int32_t *extra = read_numbers(json_object_get(told, "extra"), &extra_count, arena);
    eng_text *texts = base_arena_calloc(arena, stop_count ? stop_count : 1, sizeof *texts);
    int32_t *tokens = base_arena_calloc(arena, run_count + extra_count + 1, sizeof *tokens);
    eng_request request = {
        .parse = ENG_PARSE_CHAT,
        .starts_in_reasoning = json_is_true(json_object_get(told, "starts")),
        .thinking = (eng_thinking)json_integer_value(json_object_get(told, "thinking")),
        .sampling = {.ignore_eos = json_is_true(json_object_get(told, "ignore_eos"))},
        .stops = texts,
        .stop_count = stop_count};
    request.sampling.stop_tokens = read_numbers(json_object_get(told, "stop_tokens"),
                                                &request.sampling.stop_token_count, arena);
    if (!texts || !tokens || !extra || base_arena_failed(arena))
        return gw_no_memory(err);
    for (uint32_t i = 0; i < stop_count; i++)
        texts[i] = gw_text_of_json(json_array_get(stops, i));
    if (run_count)
        memcpy(tokens, run, run_count * sizeof *tokens);
    if (extra_count)
        memcpy(tokens + run_count, extra, extra_count * sizeof *tokens);
    GW_TRY(read_tools(&request, s, arena, err));
    player p = {.stored = s, .engine = app->engine};
    eng_text raw;
    if (gw_body_member(&raw, stream->told, strlen(stream->told), "logprobs")) {
        s->r.list = &s->list;
        gw_raw_begin(&p.logprobs, raw);
    }
    eng_sink sink = {.event = on_event, .ctx = &p};
    return eng_replay(app->engine, &request, tokens, run_count + extra_count, steps, step_count,
                      !stream->live, &sink, err);
}

static const char *text_member(const json_t *object, const char *name)
{
    return json_string_value(json_object_get(object, name));
}

static base_code read_end(gw_stored *s, const gw_stream_row *stream, const gw_turn_row *row,
                          base_arena *arena, base_err *err)
{
    gw_response_end *end = &s->end;
    *end = (gw_response_end){.status = "incomplete", .reason = "server_restart", .cut = true};
    if (s->live)
        return BASE_OK;
    bool cut = row->finish == ENG_FINISH_LENGTH;
    *end = (gw_response_end){.status = row->status == GW_TURN_FAILED      ? "failed"
                                       : row->status == GW_TURN_CANCELLED ? "cancelled"
                                       : cut                              ? "incomplete"
                                                                          : "completed",
                             .reason = cut ? "max_output_tokens" : NULL,
                             .ended_ms = row->ended_ms,
                             .cut = cut};
    if (!s->told)
        return BASE_OK;
    end->status = text_member(s->told, "status") ? text_member(s->told, "status") : end->status;
    end->reason = text_member(s->told, "reason");
    end->code = text_member(s->told, "code");
    end->message = text_member(s->told, "message");
    end->sealed = text_member(s->told, "sealed");
    end->cut = json_is_true(json_object_get(s->told, "cut"));
    /* As it was written: numbers keep their digits. */
    eng_text raw;
    if (gw_body_member(&raw, stream->told, strlen(stream->told), "usage"))
        end->usage = base_arena_copy(arena, raw.data, raw.length);
    return base_arena_failed(arena) ? gw_no_memory(err) : BASE_OK;
}

static base_code play(gw_stored *s, gw_app *app, gw_stream_row *stream, gw_turn_row *row,
                      uint32_t from, base_arena *arena, base_err *err)
{
    json_t *echo = NULL;
    gw_body_parse(&echo, s->echo, strlen(s->echo), NULL);
    s->told = stream->told ? json_loads(stream->told, JSON_ALLOW_NUL, NULL) : NULL;
    s->answer = row->answer ? json_loads(row->answer, JSON_ALLOW_NUL, NULL) : NULL;
    const char *summary = text_member(json_object_get(echo, "reasoning"), "summary");
    size_t length = strlen(s->echo);
    s->tools = json_object_get(echo, "tools");
    s->r.summary = summary && strcmp(summary, "none") != 0;
    s->r.encrypted = json_is_true(json_object_get(s->told, "encrypted"));
    s->r.background = json_is_true(json_object_get(s->told, "background"));
    s->r.echo = length >= 2 ? base_arena_copy(arena, s->echo + 1, length - 2) : NULL;
    const char *template_id = text_member(s->told, "template");
    bool same = template_id && strcmp(template_id, eng_get_info(app->engine)->template_id) == 0;
    base_code code =
        echo && s->r.echo ? BASE_OK : base_fail(err, BASE_FORMAT, "a stored response is damaged");
    uint32_t ping_count;
    int32_t *pings = read_numbers(json_object_get(s->told, "pings"), &ping_count, arena);
    if (!code && ping_count) {
        s->r.pings = malloc(ping_count * sizeof *s->r.pings);
        code = s->r.pings ? BASE_OK : gw_no_memory(err);
        for (uint32_t i = 0; !code && i < ping_count; i++)
            s->r.pings[i] = (uint32_t)pings[i];
        s->r.ping_count = code ? 0 : ping_count;
    }
    if (!code) {
        gw_response_open(&s->r);
        gw_response_started(&s->r);
    }
    if (!code && same)
        code = play_tokens(s, app, stream, s->live ? stream->run : row->run,
                           s->live ? stream->run_count : row->run_count,
                           s->live ? stream->steps : row->steps,
                           s->live ? stream->step_count : row->step_count, arena, err);
    else if (!code && s->answer)
        play_answer(s);
    if (!code)
        code = read_end(s, stream, row, arena, err);
    if (!code && s->live && from > s->r.sequence)
        s->r.sequence = from;
    if (!code)
        gw_response_finish(&s->r, &s->end);
    s->tools = NULL;
    json_decref(echo);
    return !code && (s->failed || s->r.failed) ? gw_no_memory(err) : code;
}

base_code gw_stored_play(gw_stored *s, gw_app *app, int64_t tenant, const char *response,
                         void (*record)(void *ctx, const base_buf *record), void *ctx,
                         uint32_t from, base_arena *arena, base_err *err)
{
    gw_id turn;
    gw_turn_row row = {0};
    gw_stream_row stream = {0};
    *s = (gw_stored){0};
    if (!gw_response_turn(&turn, response))
        return base_fail(err, BASE_NOT_FOUND, "there is no such response");
    base_err why = BASE_ERR_INIT, ignored = BASE_ERR_INIT;
    base_code code = gw_response_read(&row, app->ledger, tenant, response, arena, &why);
    if (code && code != BASE_NOT_FOUND)
        return base_fail(err, code, "%s", why.text);
    base_code other = gw_stream_read(app->ledger, &stream, tenant, turn.text, arena, &ignored);
    if (other && other != BASE_NOT_FOUND)
        return base_fail(err, other, "%s", ignored.text);
    s->live = code == BASE_NOT_FOUND && !other && stream.live;
    s->echo = s->live ? stream.echo : code ? NULL : row.echo;
    if (!s->echo)
        return base_fail(err, BASE_NOT_FOUND, "there is no such response");
    s->r.turn = turn;
    snprintf(s->r.id.text, sizeof s->r.id.text, "%s", response);
    s->r.created_ms = s->live ? stream.created_ms : row.created_ms;
    s->r.text = &s->text;
    s->r.reasoning = &s->reasoning;
    s->r.calls = &s->calls;
    s->r.record = record;
    s->r.ctx = ctx;
    return play(s, app, &stream, &row, from, arena, err);
}

void gw_stored_deinit(gw_stored *s)
{
    gw_response_deinit(&s->r);
    gw_logprobs_deinit(&s->list);
    base_buf_deinit(&s->text);
    base_buf_deinit(&s->reasoning);
    for (uint32_t i = 0; i < s->call_count; i++)
        gw_call_deinit(&s->calls[i]);
    free(s->calls);
    json_decref(s->told);
    json_decref(s->answer);
}
