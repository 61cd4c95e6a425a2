/* api_responses: see the header. Top: reading a body (worker). Bottom: writing events (loop).
 *
 * Read and applied: model, input, previous_response_id, instructions, tools (functions),
 * tool_choice, parallel_tool_calls, stream, max_output_tokens, temperature, top_p and the engine's
 * own sampling fields, reasoning.effort and .summary, store, metadata, include
 * (reasoning.encrypted_content). Read for their type alone: user, safety_identifier, service_tier,
 * truncation, text.verbosity, prompt_cache_key (a session label at last), max_tool_calls. Tools of
 * other types than function are left out of the prompt: clients offer hosted ones unasked. Refused
 * by name: background, conversation, prompt, text.format other than text, logprobs, parts that are
 * not text.
 *
 * An output item is a run of parts of one kind. The item of a call is told to be done only when the
 * turn is committed, so that a client never acts on a call that the ledger does not know. */
#include "gateway/api_responses.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/json.h"
#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/dialect.h"
#include "gateway/responses_item.h"
#include "gateway/seal.h"

/* Hosted tools are left out: clients offer them unasked. */
static const gw_tool_form tool_form = {.schema = "parameters"};

#define TURN_DIGITS 5 /* where a turn's hex digits begin, behind "turn_" */

/* One output item. `offset` into the turn's text of its kind. */
typedef struct segment {
    eng_part_kind kind; /* REASONING, TEXT or CALL_BEGIN */
    uint32_t call;
    uint32_t nth; /* of its kind */
    size_t offset, length;
} segment;

typedef struct responses {
    bool summary;   /* reasoning is given as a summary, which some clients show alone */
    bool encrypted; /* a signature of the reasoning was asked for */
    bool parallel;
    char *echo; /* members of the response object that repeat the request */
    json_t *stored;
    uint32_t sequence;
    base_buf record; /* scratch */
    segment *segments;
    uint32_t count, capacity;
    bool open; /* the last one is not closed */
} responses;

static responses *state(gw_turn *turn)
{
    return turn->state_of_dialect;
}

/* ---- reading ---- */

static base_code not_offered(base_err *err, const char *param)
{
    return base_fail_param(err, BASE_UNSUPPORTED, param, "%s is not offered yet", param);
}

/* "resp_" and a turn's digits. */
static bool turn_of(gw_id *out, const char *response)
{
    if (strncmp(response, "resp_", 5) != 0 || strlen(response) != 29 ||
        strspn(response + 5, "0123456789abcdef") != 24)
        return false;
    snprintf(out->text, sizeof out->text, "turn_%.24s", response + 5);
    return true;
}

static base_code read_tool_choice(gw_turn *turn, base_err *err)
{
    responses *r = state(turn);
    r->parallel = true;
    GW_TRY(gw_read_bool(&r->parallel, NULL, turn->json, "", "parallel_tool_calls", err));
    turn->request.call_max = r->parallel ? 0 : 1;
    const json_t *choice = json_object_get(turn->json, "tool_choice");
    if (!choice || json_is_null(choice))
        return gw_read_tool_mode(turn, "auto", "tool_choice", err);
    if (json_is_string(choice))
        return gw_read_tool_mode(turn, json_string_value(choice), "tool_choice", err);
    if (!json_is_object(choice))
        return gw_wrong_type("", "tool_choice", "a string or an object", choice, err);
    const char *type = NULL, *name = NULL;
    GW_TRY(gw_read_name(&type, choice, "tool_choice", "type", GW_NAME_BYTES_MAX, err));
    if (type && strcmp(type, "allowed_tools") == 0)
        return gw_read_allowed_tools(turn, &tool_form, choice, err);
    GW_TRY(gw_read_name(&name, choice, "tool_choice", "name", GW_NAME_BYTES_MAX, err));
    if (!name) /* a hosted tool's form; none of those runs here */
        return gw_read_tool_mode(turn, "auto", "tool_choice", err);
    turn->request.tool_choice = ENG_TOOL_NAMED;
    return gw_find_tool(turn, &tool_form, name, "tool_choice", err);
}

/* Efforts none and minimal mean no thinking, the others keep the model's mode and become its effort
 * line; an unknown one is a hint that nobody understands, so that no client text lands in the
 * system turn. */
static base_code read_reasoning(gw_turn *turn, base_err *err)
{
    json_t *reasoning;
    const char *effort = NULL, *summary = NULL;
    GW_TRY(gw_read_object(&reasoning, turn->json, "", "reasoning", err));
    if (!reasoning)
        return BASE_OK;
    GW_TRY(gw_read_name(&effort, reasoning, "reasoning", "effort", GW_NAME_BYTES_MAX, err));
    GW_TRY(gw_read_name(&summary, reasoning, "reasoning", "summary", GW_NAME_BYTES_MAX, err));
    state(turn)->summary = summary && strcmp(summary, "none") != 0;
    gw_set_effort_or_none(turn, effort);
    return BASE_OK;
}

static base_code read_refused(gw_turn *turn, base_err *err)
{
    const json_t *json = turn->json;
    bool background = false;
    GW_TRY(gw_read_bool(&background, NULL, json, "", "background", err));
    if (background)
        return not_offered(err, "background");
    static const char *const members[] = {"conversation", "prompt"};
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        const json_t *value = json_object_get(json, members[i]);
        if (value && !json_is_null(value))
            return not_offered(err, members[i]);
    }
    json_t *text, *format;
    const char *type = NULL, *verbosity = NULL;
    GW_TRY(gw_read_object(&text, json, "", "text", err));
    if (text) {
        GW_TRY(gw_read_name(&verbosity, text, "text", "verbosity", GW_NAME_BYTES_MAX, err));
        GW_TRY(gw_read_object(&format, text, "text", "format", err));
        if (format)
            GW_TRY(gw_read_name(&type, format, "text.format", "type", GW_NAME_BYTES_MAX, err));
        if (type && strcmp(type, "text") != 0)
            return base_fail_param(err, BASE_UNSUPPORTED, "text.format.type",
                                   "text.format.type '%.*s' is not offered yet, only text is",
                                   gw_shown(type, 64), type);
    }
    int64_t number = 0;
    GW_TRY(gw_read_int(&number, NULL, json, "", "top_logprobs", 0, ENG_TOP_LOGPROBS_MAX, err));
    if (number)
        return not_offered(err, "top_logprobs");
    return BASE_OK;
}

static base_code read_rest(gw_turn *turn, base_err *err)
{
    static const char *const strings[] = {"user",         "safety_identifier",      "truncation",
                                          "service_tier", "prompt_cache_retention", "instructions"};
    const json_t *json = turn->json;
    int64_t number = 0;
    GW_TRY(gw_read_hints(turn, strings, sizeof strings / sizeof *strings, err));
    GW_TRY(gw_read_int(&number, NULL, json, "", "max_tool_calls", 0, INT64_MAX, err));
    GW_TRY(gw_read_limit(turn, "max_output_tokens", NULL, err));
    json_t *include;
    GW_TRY(gw_read_array(&include, json, "", "include", err));
    for (size_t i = 0; i < json_array_size(include); i++) {
        const char *name = json_string_value(json_array_get(include, i));
        if (!name)
            return gw_wrong_type("", "include", "an array of strings", include, err);
        state(turn)->encrypted |= strcmp(name, "reasoning.encrypted_content") == 0;
        if (strcmp(name, "message.output_text.logprobs") == 0)
            return not_offered(err, "include");
    }
    bool store = true;
    GW_TRY(gw_read_bool(&store, NULL, json, "", "store", err));
    turn->retention = store ? GW_RETAIN_KEPT : GW_RETAIN_USAGE;
    GW_TRY(gw_read_bool(&turn->stream, NULL, json, "", "stream", err));
    return gw_read_label(turn, err);
}

/* The items of a stored response and all before it, without its instructions, which hold for one
 * response only. */
static base_code read_previous(gw_turn *turn, gw_item_list *list, base_err *err)
{
    const char *id = NULL;
    char **items;
    uint32_t count;
    GW_TRY(gw_read_name(&id, turn->json, "", "previous_response_id", GW_NAME_BYTES_MAX, err));
    if (!id)
        return BASE_OK;
    gw_id name;
    gw_turn_row row;
    base_err why = BASE_ERR_INIT;
    base_code code = turn_of(&name, id) ? BASE_OK : BASE_NOT_FOUND;
    if (!code)
        code = gw_ledger_turn(turn->app->ledger, &row, turn->identity.tenant, name.text,
                              turn->arena, &why);
    if (!code && row.echo)
        code = gw_ledger_items(turn->app->ledger, &items, &count, turn->identity.tenant, name.text,
                               turn->arena, &why);
    if (code == BASE_NOT_FOUND || (!code && !row.echo)) {
        return gw_turn_reject(turn, err, 400, "invalid_request_error",
                              "previous_response_not_found", "previous_response_id",
                              "Previous response with id '%.*s' not found.", gw_shown(id, 64), id);
    }
    if (code)
        return base_fail(err, code, "%s", why.text);
    json_t *echo = json_loads(row.echo, JSON_ALLOW_NUL, NULL);
    uint32_t first = json_string_length(json_object_get(echo, "instructions")) ? 1 : 0;
    json_decref(echo);
    for (uint32_t i = first; i < count; i++)
        GW_TRY(gw_items_add_stored(list, items[i], err));
    return BASE_OK;
}

/* A call without its output breaks the model: what the stored part asked for must come with the
 * new input, which begins at `before`. */
static base_code check_answered(const gw_item_list *list, uint32_t before, base_err *err)
{
    const eng_item *asked = before ? &list->items[before - 1] : NULL;
    for (uint32_t i = 0; asked && i < asked->call_count; i++) {
        eng_text id = asked->calls[i].id;
        bool found = false;
        for (uint32_t k = before; k < list->count; k++)
            found |= list->ids[k].length == id.length &&
                     memcmp(list->ids[k].data ? list->ids[k].data : "", id.data, id.length) == 0;
        if (!found)
            return base_fail_param(err, BASE_INVALID, "input",
                                   "No tool output found for function call %.*s.",
                                   gw_shown(id.data, 64), id.data);
    }
    return BASE_OK;
}

static base_code read_input(gw_turn *turn, base_err *err)
{
    responses *r = state(turn);
    gw_item_list list = {.turn = turn, .stored = r->stored};
    uint32_t before = 0;
    const json_t *input = json_object_get(turn->json, "input");
    const json_t *instructions = json_object_get(turn->json, "instructions");
    if (json_string_length(instructions))
        GW_TRY(gw_items_add_system(
            &list, (eng_text){json_string_value(instructions), json_string_length(instructions)},
            err));
    GW_TRY(read_previous(turn, &list, err));
    before = list.count;
    if (input && !json_is_null(input))
        GW_TRY(gw_items_read(&list, input, "input", err));
    if (!list.count)
        return base_fail_param(err, BASE_INVALID, "input",
                               "input must be a string or an array of at least one item");
    GW_TRY(check_answered(&list, before, err));
    gw_order_results(list.items, list.ids, list.count);
    turn->items = list.items;
    turn->chat.items = list.items;
    turn->chat.item_count = list.count;
    return BASE_OK;
}

/* ---- what the response repeats of the request ---- */

/* The client's own value, or what stands for its absence. */
static void put_member(base_buf *out, const gw_turn *turn, const char *name, const char *absent)
{
    const json_t *value = json_object_get(turn->json, name);
    char *text =
        value && !json_is_null(value) ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    base_buf_printf(out, ",\"%s\":", name);
    base_buf_puts(out, text ? text : absent);
    free(text);
}

static base_code make_echo(gw_turn *turn, base_err *err)
{
    static const char *const members[][2] = {{"instructions", "null"},
                                             {"max_output_tokens", "null"},
                                             {"max_tool_calls", "null"},
                                             {"metadata", "{}"},
                                             {"previous_response_id", "null"},
                                             {"prompt_cache_key", "null"},
                                             {"safety_identifier", "null"},
                                             {"tool_choice", "\"auto\""},
                                             {"tools", "[]"},
                                             {"truncation", "\"disabled\""},
                                             {"user", "null"}};
    responses *r = state(turn);
    base_buf out;
    base_buf_init(&out, 0);
    base_buf_puts(&out, "\"model\":");
    base_buf_json_string(&out, turn->model, strlen(turn->model));
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        put_member(&out, turn, members[i][0], members[i][1]);
    base_buf_printf(&out,
                    ",\"background\":false,\"conversation\":null,\"service_tier\":\"default\","
                    "\"store\":%s,\"parallel_tool_calls\":%s,\"temperature\":%g,\"top_p\":%g,"
                    "\"top_logprobs\":0",
                    turn->retention == GW_RETAIN_KEPT ? "true" : "false",
                    r->parallel ? "true" : "false", (double)turn->request.sampling.temperature,
                    (double)turn->request.sampling.top_p);
    put_member(&out, turn, "reasoning", "{\"effort\":null,\"summary\":null}");
    put_member(&out, turn, "text", "{\"format\":{\"type\":\"text\"}}");
    base_buf_add(&out, "", 1);
    r->echo = out.failed ? NULL : base_arena_copy(turn->arena, out.data, out.length);
    base_buf_clear(&out);
    base_buf_printf(&out, "{%s}", r->echo ? r->echo : "");
    base_buf_add(&out, "", 1);
    turn->echo = out.failed ? NULL : base_arena_copy(turn->arena, out.data, out.length);
    base_buf_deinit(&out);
    return r->echo && turn->echo ? BASE_OK : gw_no_memory(err);
}

static base_code parse(gw_turn *turn, base_err *err)
{
    responses *r = base_arena_calloc(turn->arena, 1, sizeof *r);
    if (!r)
        return gw_no_memory(err);
    turn->state_of_dialect = r;
    r->stored = json_array();
    snprintf(turn->response.text, sizeof turn->response.text, "resp_%.24s",
             turn->id.text + TURN_DIGITS);
    eng_text tools;
    GW_TRY(gw_keep_raw(turn, &tools, "tools", err));
    GW_TRY(gw_parse_body(turn, err));
    GW_TRY(read_refused(turn, err));
    GW_TRY(gw_read_tools(turn, &tool_form, tools, err));
    GW_TRY(read_tool_choice(turn, err));
    GW_TRY(gw_read_sampling(turn, err));
    turn->request.sampling.logprobs = false;
    turn->request.sampling.top_logprobs = 0;
    GW_TRY(read_reasoning(turn, err));
    GW_TRY(gw_read_metadata(turn, err));
    GW_TRY(read_rest(turn, err));
    GW_TRY(read_input(turn, err));
    return make_echo(turn, err);
}

static base_code check(gw_turn *turn, base_err *err)
{
    uint32_t item, call;
    if (!gw_bad_arguments(turn, &item, &call))
        return BASE_OK;
    eng_text name = turn->items[item].calls[call].name;
    return base_fail_param(err, BASE_INVALID, "input",
                           "input: the arguments of a call of '%.*s' must be the JSON text of an "
                           "object",
                           gw_shown(name.data, 64), name.data);
}

/* ---- objects ---- */

static void put_slice(base_buf *out, const base_buf *text, size_t offset, size_t length)
{
    base_buf_json_string(out, length ? text->data + offset : "", length);
}

static void put_item_id(base_buf *out, const gw_turn *turn, const segment *s)
{
    const char *digits = turn->id.text + TURN_DIGITS;
    if (s->kind == ENG_PART_CALL_BEGIN)
        base_buf_printf(out, "\"fc_%s_%u\"", digits, s->call);
    else
        base_buf_printf(out, "\"%s%s", s->kind == ENG_PART_TEXT ? "msg_" : "rs_", digits);
    if (s->kind != ENG_PART_CALL_BEGIN && s->nth)
        base_buf_printf(out, "_%u", s->nth);
    if (s->kind != ENG_PART_CALL_BEGIN)
        base_buf_puts(out, "\"");
}

static void put_part(base_buf *out, gw_turn *turn, const segment *s, bool with_text)
{
    bool said = s->kind == ENG_PART_TEXT;
    base_buf_printf(out, "{\"type\":\"%s\",\"text\":",
                    said                   ? "output_text"
                    : state(turn)->summary ? "summary_text"
                                           : "reasoning_text");
    put_slice(out, said ? &turn->text : &turn->reasoning, s->offset, with_text ? s->length : 0);
    base_buf_puts(out, said ? ",\"annotations\":[],\"logprobs\":[]}" : "}");
}

/* `status`: "in_progress" is the item as it is added, without content. */
static void put_item(base_buf *out, gw_turn *turn, const segment *s, const char *status)
{
    responses *r = state(turn);
    bool whole = strcmp(status, "in_progress") != 0;
    base_buf_puts(out, "{\"id\":");
    put_item_id(out, turn, s);
    if (s->kind == ENG_PART_CALL_BEGIN) {
        const gw_turn_call *call = &turn->calls[s->call];
        base_buf_printf(
            out,
            ",\"type\":\"function_call\",\"status\":\"%s\",\"call_id\":\"%s\",\"name\":", status,
            call->id.text);
        put_slice(out, &call->name, 0, call->name.length);
        base_buf_puts(out, ",\"arguments\":");
        put_slice(out, &call->arguments, 0, whole ? call->arguments.length : 0);
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
        put_part(out, turn, s, true);
    base_buf_puts(out, "]");
    if (!said && r->encrypted) {
        char seal[GW_SEAL_TEXT_BYTES + 1] = "";
        gw_seal_turn(turn->app->seal, seal, turn->identity.tenant, &turn->id);
        base_buf_printf(out, ",\"encrypted_content\":\"%s\"", seal);
    }
    base_buf_puts(out, "}");
}

/* Whether the last item, which the end of the turn cut, is whole. */
static const char *item_status(const gw_turn *turn, const responses *r, const segment *s)
{
    bool cut = turn->finish == ENG_FINISH_LENGTH && s == &r->segments[r->count - 1];
    bool open_call = s->kind == ENG_PART_CALL_BEGIN && !turn->calls[s->call].whole;
    return open_call || (cut && s->kind != ENG_PART_CALL_BEGIN) ? "incomplete" : "completed";
}

static void put_counts(base_buf *out, const eng_usage *usage)
{
    base_buf_printf(out,
                    "{\"input_tokens\":%u,\"input_tokens_details\":{\"cached_tokens\":%u,"
                    "\"cache_write_tokens\":%u},\"output_tokens\":%u,\"output_tokens_details\":"
                    "{\"reasoning_tokens\":%u},\"total_tokens\":%llu",
                    usage->prompt_tokens, usage->cached_tokens,
                    usage->prompt_tokens -
                        (uint32_t)base_min(usage->cached_tokens, usage->prompt_tokens),
                    usage->output_tokens, usage->reasoning_tokens,
                    (unsigned long long)usage->prompt_tokens + usage->output_tokens);
}

static void put_usage(base_buf *out, const gw_turn *turn)
{
    put_counts(out, &turn->usage);
    base_buf_puts(out, ",");
    gw_turn_extension(turn, out);
    base_buf_puts(out, "}");
}

/* `row` NULL unless it failed. */
static void put_response(base_buf *out, gw_turn *turn, const char *status, const gw_error_row *row,
                         const char *message)
{
    responses *r = state(turn);
    bool whole = strcmp(status, "in_progress") != 0;
    base_buf_printf(out, "{\"id\":\"%s\",\"object\":\"response\",\"created_at\":%lld,",
                    turn->response.text, (long long)(turn->created_ms / 1000));
    base_buf_printf(out, "\"status\":\"%s\",\"completed_at\":", status);
    if (strcmp(status, "completed") == 0)
        base_buf_printf(out, "%lld", (long long)(turn->commit.ended_ms / 1000));
    else
        base_buf_puts(out, "null");
    base_buf_puts(out, ",\"error\":");
    if (row) {
        base_buf_puts(out, "{\"code\":");
        const char *code = row->code ? row->code : row->type;
        base_buf_json_string(out, code, strlen(code));
        base_buf_puts(out, ",\"message\":");
        base_buf_json_string(out, message, strlen(message));
        base_buf_puts(out, "}");
    } else {
        base_buf_puts(out, "null");
    }
    base_buf_printf(
        out, ",\"incomplete_details\":%s,%s,\"output\":[",
        strcmp(status, "incomplete") == 0 ? "{\"reason\":\"max_output_tokens\"}" : "null", r->echo);
    for (uint32_t i = 0; whole && i < r->count; i++) {
        base_buf_puts(out, i ? "," : "");
        put_item(out, turn, &r->segments[i],
                 row ? "incomplete" : item_status(turn, r, &r->segments[i]));
    }
    base_buf_puts(out, "],\"usage\":");
    if (whole && turn->done_seen)
        put_usage(out, turn);
    else
        base_buf_puts(out, "null");
    base_buf_puts(out, "}");
}

/* ---- events ---- */

static base_buf *begin_event(gw_turn *turn, const char *type)
{
    responses *r = state(turn);
    base_buf_clear(&r->record);
    base_buf_printf(&r->record, "event: %s\ndata: {\"type\":\"%s\",\"sequence_number\":%u", type,
                    type, r->sequence++);
    return &r->record;
}

static void end_event(gw_turn *turn)
{
    base_buf *out = &state(turn)->record;
    base_buf_puts(out, "}\n\n");
    gw_write_record(turn, out);
}

static void response_event(gw_turn *turn, const char *type, const char *status)
{
    base_buf *out = begin_event(turn, type);
    base_buf_puts(out, ",\"response\":");
    put_response(out, turn, status, NULL, NULL);
    end_event(turn);
}

static void item_event(gw_turn *turn, const char *type, uint32_t index, const char *status)
{
    base_buf *out = begin_event(turn, type);
    base_buf_printf(out, ",\"output_index\":%u,\"item\":", index);
    put_item(out, turn, &state(turn)->segments[index], status);
    end_event(turn);
}

/* Begins an event of the last item's only part. */
static base_buf *begin_part_event(gw_turn *turn, const char *type)
{
    responses *r = state(turn);
    const segment *s = &r->segments[r->count - 1];
    base_buf *out = begin_event(turn, type);
    base_buf_puts(out, ",\"item_id\":");
    put_item_id(out, turn, s);
    base_buf_printf(out, ",\"output_index\":%u", r->count - 1);
    if (s->kind == ENG_PART_TEXT || (s->kind == ENG_PART_REASONING && !r->summary))
        base_buf_puts(out, ",\"content_index\":0");
    else if (s->kind == ENG_PART_REASONING)
        base_buf_puts(out, ",\"summary_index\":0");
    return out;
}

/* Events of parts by kind: text, reasoning, reasoning as a summary, calls. */
typedef struct names {
    const char *added, *delta, *done, *part_done;
} names;

static const names *names_of(const responses *r, eng_part_kind kind)
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
                               "response.function_call_arguments.done", NULL};
    return kind == ENG_PART_TEXT        ? &text
           : kind == ENG_PART_REASONING ? r->summary ? &summary : &reasoning
                                        : &call;
}

static void part_event(gw_turn *turn, const char *type, bool with_text)
{
    responses *r = state(turn);
    base_buf *out = begin_part_event(turn, type);
    base_buf_puts(out, ",\"part\":");
    put_part(out, turn, &r->segments[r->count - 1], with_text);
    end_event(turn);
}

/* Ends the last item. Calls are said to be done at the commit, see `finish_stream`. */
static void close_last(gw_turn *turn)
{
    responses *r = state(turn);
    if (!r->open)
        return;
    r->open = false;
    if (!gw_turn_streaming(turn))
        return;
    const segment *s = &r->segments[r->count - 1];
    const names *n = names_of(r, s->kind);
    base_buf *out = begin_part_event(turn, n->done);
    if (s->kind == ENG_PART_CALL_BEGIN) {
        const gw_turn_call *call = &turn->calls[s->call];
        base_buf_puts(out, ",\"name\":");
        put_slice(out, &call->name, 0, call->name.length);
        base_buf_puts(out, ",\"arguments\":");
        put_slice(out, &call->arguments, 0, call->arguments.length);
        end_event(turn);
        return;
    }
    bool said = s->kind == ENG_PART_TEXT;
    base_buf_puts(out, ",\"text\":");
    put_slice(out, said ? &turn->text : &turn->reasoning, s->offset, s->length);
    base_buf_puts(out, said ? ",\"logprobs\":[]" : "");
    end_event(turn);
    part_event(turn, n->part_done, true);
    item_event(turn, "response.output_item.done", r->count - 1, item_status(turn, r, s));
}

static segment *open_segment(gw_turn *turn, eng_part_kind kind, uint32_t call)
{
    responses *r = state(turn);
    close_last(turn);
    if (r->count == r->capacity) {
        uint32_t capacity = r->capacity ? r->capacity * 2 : 8;
        segment *more = realloc(r->segments, capacity * sizeof *more);
        if (!more) {
            turn->lossy = true;
            return NULL;
        }
        r->segments = more;
        r->capacity = capacity;
    }
    segment s = {.kind = kind, .call = call};
    for (uint32_t i = 0; i < r->count; i++)
        if (r->segments[i].kind == kind) {
            s.nth++;
            s.offset = r->segments[i].offset + r->segments[i].length;
        }
    r->segments[r->count++] = s;
    r->open = true;
    if (gw_turn_streaming(turn)) {
        const char *added = names_of(r, kind)->added;
        item_event(turn, "response.output_item.added", r->count - 1, "in_progress");
        if (added)
            part_event(turn, added, false);
    }
    return &r->segments[r->count - 1];
}

static void part(gw_turn *turn, const eng_part *p)
{
    responses *r = state(turn);
    if (p->kind == ENG_PART_CALL_END) {
        close_last(turn);
        return;
    }
    if (p->kind == ENG_PART_CALL_BEGIN) {
        open_segment(turn, ENG_PART_CALL_BEGIN, p->call);
        return;
    }
    if (!p->length)
        return;
    eng_part_kind kind = p->kind == ENG_PART_CALL_ARGS ? ENG_PART_CALL_BEGIN : p->kind;
    segment *s = r->open ? &r->segments[r->count - 1] : NULL;
    if (!s || s->kind != kind) {
        if (kind == ENG_PART_CALL_BEGIN)
            return; /* arguments of no call */
        s = open_segment(turn, kind, 0);
    }
    if (!s)
        return;
    s->length += p->length;
    if (!gw_turn_streaming(turn))
        return;
    base_buf *out = begin_part_event(turn, names_of(r, kind)->delta);
    base_buf_puts(out, ",\"delta\":");
    base_buf_json_string(out, p->text, p->length);
    base_buf_puts(out, kind == ENG_PART_TEXT ? ",\"logprobs\":[]" : "");
    end_event(turn);
}

static void open_stream(gw_turn *turn)
{
    gw_turn_stream_begin(turn);
    response_event(turn, "response.created", "in_progress");
    response_event(turn, "response.in_progress", "in_progress");
}

static void finish(gw_turn *turn)
{
    responses *r = state(turn);
    const char *status = turn->finish == ENG_FINISH_LENGTH ? "incomplete" : "completed";
    close_last(turn);
    if (!turn->stream) {
        base_buf_clear(&r->record);
        put_response(&r->record, turn, status, NULL, NULL);
        gw_turn_respond_json(turn, &r->record);
        return;
    }
    for (uint32_t i = 0; i < r->count; i++)
        if (r->segments[i].kind == ENG_PART_CALL_BEGIN)
            item_event(turn, "response.output_item.done", i, item_status(turn, r, &r->segments[i]));
    response_event(turn,
                   turn->finish == ENG_FINISH_LENGTH ? "response.incomplete" : "response.completed",
                   status);
    gw_turn_stream_end(turn);
}

static void fail(gw_turn *turn, const gw_error_row *row, const char *param, const char *message)
{
    if (!gw_turn_streaming(turn)) {
        gw_turn_respond_error(turn, row, param, message);
        return;
    }
    base_buf *out = begin_event(turn, "response.failed");
    base_buf_puts(out, ",\"response\":");
    put_response(out, turn, "failed", row, message);
    end_event(turn);
    gw_turn_stream_end(turn);
}

/* Clients of this dialect count events, not comments, as a sign of life. */
static void ping(gw_turn *turn)
{
    begin_event(turn, "keepalive");
    end_event(turn);
}

static void deinit(gw_turn *turn)
{
    responses *r = state(turn);
    base_buf_deinit(&r->record);
    free(r->segments);
    json_decref(r->stored);
}

static const gw_dialect dialect = {
    .name = "responses",
    .route = "/v1/responses",
    .parse = parse,
    .check = check,
    .open = open_stream,
    .part = part,
    .finish = finish,
    .fail = fail,
    .ping = ping,
    .deinit = deinit,
};

void gw_api_responses_handle(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &dialect);
}

/* ---- input_tokens ---- */

static base_code parse_count(gw_turn *turn, base_err *err)
{
    GW_TRY(parse(turn, err));
    turn->stream = false;
    return BASE_OK;
}

static void finish_count(gw_turn *turn)
{
    base_buf *out = &state(turn)->record;
    base_buf_clear(out);
    base_buf_printf(out, "{\"object\":\"response.input_tokens\",\"input_tokens\":%u}",
                    turn->prompt.token_count);
    gw_turn_respond_json(turn, out);
}

static const gw_dialect counting = {
    .name = "responses",
    .route = "/v1/responses/input_tokens",
    .parse = parse_count,
    .check = check,
    .dry = true,
    .part = part,
    .finish = finish_count,
    .fail = fail,
    .deinit = deinit,
};

void gw_api_responses_count(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &counting);
}

/* ---- stored responses ---- */

typedef enum fetch_kind { FETCH_GET, FETCH_DELETE, FETCH_CANCEL } fetch_kind;

/* A call about a stored response: a worker reads the ledger, the loop answers. Freed on the loop
 * when the worker's message has come. */
typedef struct fetch {
    gw_job job;
    gw_message back;
    gw_app *app;
    gw_exchange *exchange; /* NULL once the client left. Loop */
    gw_loop *loop;
    int64_t tenant;
    fetch_kind kind;
    char response[GW_ID_MAX];
    base_buf out;
    base_err err;
    base_arena *arena;
} fetch;

#define FETCH_ARENA_BYTES (256u << 20)

/* An answer of the ledger as output items, with the ids that it was given out with. */
static void put_stored_output(base_buf *out, const gw_turn_row *row, bool summary)
{
    json_t *answer = row->answer ? json_loads(row->answer, JSON_ALLOW_NUL, NULL) : NULL;
    const char *digits = row->turn.text + TURN_DIGITS;
    const char *status = row->finish == ENG_FINISH_LENGTH ? "incomplete" : "completed";
    const json_t *reasoning = json_object_get(answer, "reasoning_content");
    const json_t *text = json_object_get(answer, "content");
    const json_t *calls = json_object_get(answer, "tool_calls");
    bool any = false;
    if (json_string_length(reasoning)) {
        base_buf_printf(
            out, "{\"id\":\"rs_%s\",\"type\":\"reasoning\",\"status\":\"%s\",%s", digits,
            json_string_length(text) || json_array_size(calls) ? "completed" : status,
            summary ? "\"summary\":[{\"type\":\"summary_text\",\"text\":"
                    : "\"summary\":[],\"content\":[{\"type\":\"reasoning_text\",\"text\":");
        base_buf_json_string(out, json_string_value(reasoning), json_string_length(reasoning));
        base_buf_puts(out, "}]}");
        any = true;
    }
    if (json_string_length(text)) {
        base_buf_printf(out,
                        "%s{\"id\":\"msg_%s\",\"type\":\"message\",\"status\":\"%s\",\"role\":"
                        "\"assistant\",\"content\":[{\"type\":\"output_text\",\"text\":",
                        any ? "," : "", digits, json_array_size(calls) ? "completed" : status);
        base_buf_json_string(out, json_string_value(text), json_string_length(text));
        base_buf_puts(out, ",\"annotations\":[],\"logprobs\":[]}]}");
        any = true;
    }
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *call = json_array_get(calls, i), *f = json_object_get(call, "function");
        const json_t *values[] = {json_object_get(call, "id"), json_object_get(f, "name"),
                                  json_object_get(f, "arguments")};
        static const char *const members[] = {"call_id", "name", "arguments"};
        bool last = i + 1 == json_array_size(calls);
        base_buf_printf(out, "%s{\"id\":\"fc_%s_%zu\",\"type\":\"function_call\",\"status\":\"%s\"",
                        any ? "," : "", digits, i, last ? status : "completed");
        for (int k = 0; k < 3; k++) {
            base_buf_printf(out, ",\"%s\":", members[k]);
            base_buf_json_string(out, json_is_string(values[k]) ? json_string_value(values[k]) : "",
                                 json_string_length(values[k]));
        }
        base_buf_puts(out, "}");
        any = true;
    }
    json_decref(answer);
}

static void put_stored(base_buf *out, const fetch *f, const gw_turn_row *row)
{
    bool cut = row->finish == ENG_FINISH_LENGTH;
    const char *status = row->status == GW_TURN_FAILED      ? "failed"
                         : row->status == GW_TURN_CANCELLED ? "cancelled"
                         : cut                              ? "incomplete"
                                                            : "completed";
    json_t *echo = json_loads(row->echo, JSON_ALLOW_NUL, NULL);
    const char *summary =
        json_string_value(json_object_get(json_object_get(echo, "reasoning"), "summary"));
    base_buf_printf(out, "{\"id\":\"%s\",\"object\":\"response\",\"created_at\":%lld,", f->response,
                    (long long)(row->created_ms / 1000));
    base_buf_printf(out, "\"status\":\"%s\",\"completed_at\":", status);
    if (strcmp(status, "completed") == 0)
        base_buf_printf(out, "%lld", (long long)(row->ended_ms / 1000));
    else
        base_buf_puts(out, "null");
    base_buf_printf(out, ",\"error\":%s,\"incomplete_details\":%s,",
                    row->status == GW_TURN_FAILED
                        ? "{\"code\":\"server_error\",\"message\":\"the response failed\"}"
                        : "null",
                    cut ? "{\"reason\":\"max_output_tokens\"}" : "null");
    /* The echo is an object; its members go on here. */
    base_buf_add(out, row->echo + 1, strlen(row->echo) - 2);
    base_buf_puts(out, ",\"output\":[");
    put_stored_output(out, row, summary && strcmp(summary, "none") != 0);
    base_buf_puts(out, "],\"usage\":");
    put_counts(out, &row->usage);
    base_buf_puts(out, "}}");
    json_decref(echo);
}

static base_code fetch_work(fetch *f, base_err *err)
{
    gw_id name;
    gw_turn_row row = {0};
    if (!turn_of(&name, f->response))
        return base_fail(err, BASE_NOT_FOUND, "there is no such response");
    if (f->kind == FETCH_DELETE) {
        GW_TRY(gw_ledger_forget(f->app->ledger, f->tenant, name.text, err));
        base_buf_printf(&f->out, "{\"id\":\"%s\",\"object\":\"response\",\"deleted\":true}",
                        f->response);
        return BASE_OK;
    }
    GW_TRY(gw_ledger_turn(f->app->ledger, &row, f->tenant, name.text, f->arena, err));
    if (!row.echo)
        return base_fail(err, BASE_NOT_FOUND, "there is no such response");
    if (f->kind == FETCH_CANCEL)
        return base_fail_param(err, BASE_INVALID, "background",
                               "only responses in the background can be cancelled");
    put_stored(&f->out, f, &row);
    return f->out.failed ? gw_no_memory(err) : BASE_OK;
}

static void fetch_run(gw_job *job)
{
    fetch *f = (fetch *)((char *)job - offsetof(fetch, job));
    fetch_work(f, &f->err);
    gw_loop_post(f->loop, &f->back);
}

static void fetch_respond(fetch *f)
{
    static const gw_header headers[] = {{"content-type", "application/json"}};
    if (!f->exchange)
        return;
    if (f->err.code == BASE_NOT_FOUND) {
        char text[GW_ID_MAX + 64];
        snprintf(text, sizeof text, "Response with id '%.*s' not found.",
                 (int)base_utf8_complete(f->response, strlen(f->response)), f->response);
        gw_error_respond(f->exchange, 404, "invalid_request_error", "response_not_found",
                         "response_id", text);
    } else if (f->err.code) {
        gw_error_respond_err(f->exchange, &f->err);
    } else {
        gw_respond(f->exchange, 200, headers, 1, f->out.data, f->out.length);
    }
}

static void fetch_back(gw_message *message)
{
    fetch *f = (fetch *)((char *)message - offsetof(fetch, back));
    fetch_respond(f);
    base_buf_deinit(&f->out);
    base_arena_destroy(f->arena);
    free(f);
}

static void fetch_gone(void *ctx)
{
    ((fetch *)ctx)->exchange = NULL;
}

/* The path is "/v1/responses/ID" and, for a cancel, "/cancel". */
static void fetch_begin(gw_app *app, gw_exchange *exchange, fetch_kind kind)
{
    gw_identity identity;
    if (!gw_tenants_admit(app->tenants, &identity, exchange, GW_SCOPE_INFER))
        return;
    const char *id = gw_exchange_path(exchange) + strlen("/v1/responses/");
    size_t length = strcspn(id, "/");
    const char *rest = id + length + (id[length] == '/');
    if (strcmp(rest, kind == FETCH_CANCEL ? "cancel" : "") != 0) {
        gw_error_not_found(exchange);
        return;
    }
    fetch *f = calloc(1, sizeof *f);
    base_err err = BASE_ERR_INIT;
    if (f)
        f->arena = base_arena_create(4096, FETCH_ARENA_BYTES);
    if (!f || !f->arena) {
        free(f);
        base_fail(&err, BASE_NOMEM, "no memory for the request");
        gw_error_respond_err(exchange, &err);
        return;
    }
    f->job.run = fetch_run;
    f->back.run = fetch_back;
    f->app = app;
    f->exchange = exchange;
    f->loop = gw_exchange_loop(exchange);
    f->tenant = identity.tenant;
    f->kind = kind;
    snprintf(f->response, sizeof f->response, "%.*s", (int)base_min(length, (size_t)GW_ID_MAX), id);
    gw_exchange_set_handler(exchange, f, fetch_gone, NULL);
    if (!gw_workers_submit(app->workers, &f->job)) {
        base_fail(&f->err, BASE_FULL, "too many requests wait for a worker");
        fetch_back(&f->back);
    }
}

void gw_api_responses_get(gw_app *app, gw_exchange *exchange)
{
    if (strstr(gw_exchange_query(exchange), "stream=true")) {
        gw_error_respond(exchange, 400, "invalid_request_error", "unsupported_parameter", "stream",
                         "stream is not offered yet for stored responses");
        return;
    }
    fetch_begin(app, exchange, FETCH_GET);
}

void gw_api_responses_delete(gw_app *app, gw_exchange *exchange)
{
    fetch_begin(app, exchange, FETCH_DELETE);
}

void gw_api_responses_cancel(gw_app *app, gw_exchange *exchange)
{
    fetch_begin(app, exchange, FETCH_CANCEL);
}
