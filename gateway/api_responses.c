/* api_responses: see the header. Top: reading a body (worker). Bottom: answering (loop).
 *
 * Read and applied: model, input, previous_response_id or conversation, instructions, tools
 * (functions), tool_choice, parallel_tool_calls, stream, background, max_output_tokens,
 * temperature, top_p and the engine's own fields of sampling and thinking, top_logprobs,
 * reasoning.effort and .summary, truncation, text.format (structured.h), store, metadata, include
 * (reasoning.encrypted_content, message.output_text.logprobs). prompt_cache_key is a session label
 * at last. Hints, read for their type alone: user, safety_identifier, service_tier, text.verbosity,
 * prompt_cache_options and _retention, context_management (a client may compact by itself),
 * stream_options, moderation, max_tool_calls (bounds tools that run on the server, and none does).
 * Tools of other types are left out of the prompt: clients offer hosted ones unasked. Refused by
 * name: prompt, parts that are not text. */
#include "gateway/api_responses_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/json.h"
#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/api_chat.h"
#include "gateway/conf.h"
#include "gateway/dialect.h"
#include "gateway/structured.h"
#include "gateway/ledger_conversation.h"
#include "gateway/ledger_stream.h"
#include "gateway/response_run.h"
#include "gateway/response_store.h"
#include "gateway/responses_item.h"

#define FLUSH_MS                                                                                   \
    250 /* a running stream is written to the ledger so often, long ones less often                \
         */

/* Hosted tools are left out: clients offer them unasked. */
static const gw_tool_form tool_form = {.schema = "parameters", .custom = true};

typedef struct flush flush;
typedef gw_responses responses;

static responses *state(gw_turn *turn)
{
    return turn->state_of_dialect;
}

/* ---- reading ---- */

static base_code not_offered(base_err *err, const char *param)
{
    return base_fail_param(err, BASE_UNSUPPORTED, param, "%s is not offered yet", param);
}

static base_code read_tool_choice(gw_turn *turn, base_err *err)
{
    responses *r = state(turn);
    GW_TRY(gw_read_tool_choice(turn, &tool_form, err));
    r->parallel = turn->request.call_max == 0;
    return BASE_OK;
}

/* Efforts and the engine's own switches of thinking are the chat dialect's. */
static base_code read_reasoning(gw_turn *turn, base_err *err)
{
    json_t *reasoning;
    const char *summary = NULL;
    GW_TRY(gw_read_object(&reasoning, turn->json, "", "reasoning", err));
    if (reasoning)
        GW_TRY(gw_read_name(&summary, reasoning, "reasoning", "summary", GW_NAME_BYTES_MAX, err));
    state(turn)->view.summary = summary && strcmp(summary, "none") != 0;
    return gw_chat_read_thinking(turn, err);
}

static base_code read_refused(gw_turn *turn, base_err *err)
{
    const json_t *json = turn->json;
    if (json_object_get(json, "prompt") && !json_is_null(json_object_get(json, "prompt")))
        return not_offered(err, "prompt");
    static const char *const keys[] = {"text", "format", NULL};
    json_t *text, *format;
    const char *verbosity = NULL;
    GW_TRY(gw_read_object(&text, json, "", "text", err));
    if (text) {
        GW_TRY(gw_read_name(&verbosity, text, "text", "verbosity", GW_NAME_BYTES_MAX, err));
        GW_TRY(gw_read_object(&format, text, "text", "format", err));
        GW_TRY(gw_read_format(turn, format, keys, NULL, err));
    }
    return gw_read_engine_formats(turn, err);
}

static base_code read_logprobs(gw_turn *turn, base_err *err)
{
    eng_sampling *sampling = &turn->request.sampling;
    int64_t number = 0;
    GW_TRY(
        gw_read_int(&number, NULL, turn->json, "", "top_logprobs", 0, ENG_TOP_LOGPROBS_MAX, err));
    sampling->logprobs |= number > 0;
    sampling->top_logprobs = (uint32_t)number;
    if (!sampling->logprobs)
        return BASE_OK;
    responses *r = state(turn);
    r->view.list = &r->logprobs;
    r->logprobs.top = (uint32_t)number;
    r->logprobs.keep = true;
    turn->exact_steps = true;
    return BASE_OK;
}

static base_code no_conversation(gw_turn *turn, base_err *err)
{
    const char *id = state(turn)->conversation;
    return gw_turn_reject(turn, err, 404, "invalid_request_error", "conversation_not_found",
                          "conversation", "Conversation with id '%.*s' not found.",
                          gw_shown(id, 64), id);
}

/* Turns on one conversation follow each other: its items are read when it is this one's turn. */
static base_code read_conversation(gw_turn *turn, base_err *err)
{
    responses *r = state(turn);
    const json_t *value = json_object_get(turn->json, "conversation");
    bool object = json_is_object(value);
    GW_TRY(gw_read_name(&r->conversation, object ? value : turn->json, object ? "conversation" : "",
                        object ? "id" : "conversation", GW_NAME_BYTES_MAX, err));
    if (!r->conversation)
        return object ? gw_wrong_type("conversation", "id", "a string", NULL, err) : BASE_OK;
    const json_t *previous = json_object_get(turn->json, "previous_response_id");
    if (previous && !json_is_null(previous))
        return base_fail_param(err, BASE_INVALID, "conversation",
                               "conversation and previous_response_id exclude each other");
    if (strlen(r->conversation) >= GW_ID_MAX)
        return no_conversation(turn, err);
    turn->lock_id = r->conversation;
    turn->lock_param = "conversation";
    turn->retention = GW_RETAIN_KEPT;
    return BASE_OK;
}

/* Fields that change nothing here, but whose types are the wire's. */
static base_code read_typed_hints(gw_turn *turn, base_err *err)
{
    static const char *const strings[] = {"user",         "safety_identifier",      "truncation",
                                          "service_tier", "prompt_cache_retention", "instructions"};
    static const char *const objects[] = {"prompt_cache_options", "stream_options", "moderation"};
    int64_t number = 0;
    json_t *value;
    bool flag;
    GW_TRY(gw_read_hints(turn, strings, sizeof strings / sizeof *strings, err));
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++)
        GW_TRY(gw_read_object(&value, turn->json, "", objects[i], err));
    GW_TRY(gw_read_object(&value, turn->json, "", "stream_options", err));
    if (value)
        GW_TRY(gw_read_bool(&flag, NULL, value, "stream_options", "include_obfuscation", err));
    GW_TRY(gw_read_array(&value, turn->json, "", "context_management", err));
    return gw_read_int(&number, NULL, turn->json, "", "max_tool_calls", 0, INT64_MAX, err);
}

static base_code read_rest(gw_turn *turn, base_err *err)
{
    const json_t *json = turn->json;
    responses *r = state(turn);
    GW_TRY(read_typed_hints(turn, err));
    const char *truncation = json_string_value(json_object_get(json, "truncation"));
    r->truncate = truncation && strcmp(truncation, "auto") == 0;
    GW_TRY(gw_read_limit(turn, "max_output_tokens", NULL, err));
    json_t *include;
    GW_TRY(gw_read_array(&include, json, "", "include", err));
    for (size_t i = 0; i < json_array_size(include); i++) {
        const char *name = json_string_value(json_array_get(include, i));
        if (!name)
            return gw_wrong_type("", "include", "an array of strings", include, err);
        r->view.encrypted |= strcmp(name, "reasoning.encrypted_content") == 0;
        turn->request.sampling.logprobs |= strcmp(name, "message.output_text.logprobs") == 0;
    }
    r->store = true;
    GW_TRY(gw_read_bool(&r->store, NULL, json, "", "store", err));
    turn->retention = r->store ? GW_RETAIN_KEPT : GW_RETAIN_USAGE;
    GW_TRY(gw_read_bool(&turn->stream, NULL, json, "", "stream", err));
    GW_TRY(gw_read_bool(&r->view.background, NULL, json, "", "background", err));
    if (r->view.background && !r->store)
        return base_fail_param(err, BASE_INVALID, "background",
                               "background needs store: its answer is fetched later");
    GW_TRY(read_logprobs(turn, err));
    GW_TRY(read_conversation(turn, err));
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
    gw_turn_row row;
    base_err why = BASE_ERR_INIT;
    base_code code =
        gw_response_read(&row, turn->app->ledger, turn->identity.tenant, id, turn->arena, &why);
    if (!code)
        code = gw_ledger_items(turn->app->ledger, &items, &count, turn->identity.tenant,
                               row.turn.text, turn->arena, &why);
    if (code == BASE_NOT_FOUND) {
        return gw_turn_reject(turn, err, 400, "invalid_request_error",
                              "previous_response_not_found", "previous_response_id",
                              "Previous response with id '%.*s' not found.", gw_shown(id, 64), id);
    }
    if (code)
        return base_fail(err, code, "%s", why.text);
    for (uint32_t i = gw_response_first_item(&row); i < count; i++)
        GW_TRY(gw_items_add_stored(list, items[i], err));
    return BASE_OK;
}

/* A call without its output breaks the model: what the stored part asked for and has no output of
 * must come with the new input, which begins at `before`. */
static base_code check_answered(const gw_item_list *list, uint32_t before, base_err *err)
{
    uint32_t at = before;
    while (at && list->items[at - 1].role == ENG_ROLE_TOOL)
        at--;
    const eng_item *asked = at ? &list->items[at - 1] : NULL;
    for (uint32_t i = 0; asked && i < asked->call_count; i++) {
        eng_text id = asked->calls[i].id;
        bool found = false;
        for (uint32_t k = at; k < list->count; k++)
            found |= list->ids[k].length == id.length &&
                     memcmp(list->ids[k].data ? list->ids[k].data : "", id.data, id.length) == 0;
        if (!found)
            return base_fail_param(err, BASE_INVALID, "input",
                                   "No tool output found for function call %.*s.",
                                   gw_shown(id.data, 64), id.data);
    }
    return BASE_OK;
}

/* The items of the conversation, as a client would send them; and what this turn adds to it. */
static base_code read_items_of(gw_turn *turn, gw_item_list *list, gw_conversation_page *page,
                               base_err *err)
{
    responses *r = state(turn);
    const gw_conf *conf = turn->app->conf;
    gw_conversation_query all = {.oldest_first = true, .bytes_max = conf->limits_body_bytes_max};
    base_err why = BASE_ERR_INIT;
    base_code code = gw_conversation_list(turn->app->ledger, page, turn->identity.tenant,
                                          r->conversation, &all, turn->arena, &why);
    if (code == BASE_NOT_FOUND)
        return no_conversation(turn, err);
    if (code)
        return base_fail_param(err, code, "conversation", "%s", why.text);
    list->kept = true;
    for (uint32_t i = 0; i < page->count; i++) {
        json_t *item = json_loads(page->items[i].json, JSON_ALLOW_NUL, NULL);
        if (!item || json_array_append_new(r->stored, item))
            return gw_no_memory(err);
        GW_TRY(gw_items_read_one(list, item, "conversation", err));
    }
    list->kept = false;
    return BASE_OK;
}

static base_code add_to_conversation(gw_turn *turn, const gw_conversation_page *page,
                                     const json_t *input, base_err *err)
{
    uint32_t max = turn->app->conf->conversations_items_max;
    if (!turn->lock_id)
        return BASE_OK;
    turn->conversation = state(turn)->conversation;
    GW_TRY(gw_conversation_inputs(turn, input, "input", page, err));
    if (page->count + turn->added_count >= max)
        return gw_turn_reject(turn, err, 400, "invalid_request_error", "conversation_full",
                              "conversation",
                              "the conversation holds %u items, with the input it would hold "
                              "%u, and the limit is %u (conversations.items_max)",
                              page->count, page->count + turn->added_count, max);
    return BASE_OK;
}

base_code gw_responses_load(gw_turn *turn, base_err *err)
{
    responses *r = state(turn);
    gw_item_list list = {.turn = turn, .stored = r->stored};
    uint32_t before = 0;
    gw_conversation_page page = {0};
    const json_t *input = json_object_get(turn->json, "input");
    const json_t *instructions = json_object_get(turn->json, "instructions");
    if (json_string_length(instructions))
        GW_TRY(gw_items_add(&list, ENG_ROLE_SYSTEM, gw_text_of_json(instructions), err));
    GW_TRY(read_previous(turn, &list, err));
    if (r->conversation)
        GW_TRY(read_items_of(turn, &list, &page, err));
    before = list.count;
    if (input && !json_is_null(input))
        GW_TRY(gw_items_read(&list, input, "input", err));
    if (!list.count)
        return base_fail_param(err, BASE_INVALID, "input",
                               "input must be a string or an array of at least one item");
    GW_TRY(check_answered(&list, before, err));
    if (r->conversation)
        GW_TRY(add_to_conversation(turn, &page, input, err));
    gw_order_results(list.items, list.ids, list.count);
    turn->items = list.items;
    turn->chat.items = list.items;
    turn->chat.item_count = list.count;
    r->list = list;
    return BASE_OK;
}

/* ---- what the response repeats of the request ---- */

/* The client's own value as it was written, or what stands for its absence. */
static void put_member(base_buf *out, const gw_turn *turn, const char *name, const char *absent)
{
    const json_t *value = json_object_get(turn->json, name);
    eng_text raw;
    base_buf_printf(out, ",\"%s\":", name);
    if (value && !json_is_null(value) && gw_body_member(&raw, turn->body, turn->body_length, name))
        gw_put_raw(out, raw);
    else
        base_buf_puts(out, absent);
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
                    ",\"background\":%s,\"service_tier\":\"default\","
                    "\"store\":%s,\"parallel_tool_calls\":%s,\"temperature\":%g,\"top_p\":%g,"
                    "\"top_logprobs\":%u",
                    r->view.background ? "true" : "false", r->store ? "true" : "false",
                    r->parallel ? "true" : "false", (double)turn->request.sampling.temperature,
                    (double)turn->request.sampling.top_p, turn->request.sampling.top_logprobs);
    base_buf_puts(&out, ",\"conversation\":");
    if (r->conversation) {
        base_buf_puts(&out, "{\"id\":");
        gw_put_string(&out, r->conversation, strlen(r->conversation));
        base_buf_puts(&out, "}");
    } else {
        base_buf_puts(&out, "null");
    }
    put_member(&out, turn, "reasoning", "{\"effort\":null,\"summary\":null}");
    put_member(&out, turn, "text", "{\"format\":{\"type\":\"text\"}}");
    base_buf_add(&out, "", 1);
    r->echo = out.failed ? NULL : base_arena_copy(turn->arena, out.data, out.length);
    base_buf_clear(&out);
    base_buf_printf(&out, "{%s}", r->echo ? r->echo : "");
    base_buf_add(&out, "", 1);
    if (r->store)
        turn->echo = out.failed ? NULL : base_arena_copy(turn->arena, out.data, out.length);
    base_buf_deinit(&out);
    return r->echo && (turn->echo || !r->store) ? BASE_OK : gw_no_memory(err);
}

base_code gw_responses_parse(gw_turn *turn, base_err *err)
{
    responses *r = base_arena_calloc(turn->arena, 1, sizeof *r);
    if (!r)
        return gw_no_memory(err);
    turn->state_of_dialect = r;
    r->stored = json_array();
    snprintf(turn->response.text, sizeof turn->response.text, "resp_%.24s",
             turn->id.text + strlen("turn_"));
    eng_text tools;
    GW_TRY(gw_keep_raw(turn, &tools, "tools", err));
    GW_TRY(gw_parse_body(turn, err));
    GW_TRY(read_refused(turn, err));
    GW_TRY(gw_read_tools(turn, &tool_form, tools, err));
    GW_TRY(read_tool_choice(turn, err));
    GW_TRY(gw_read_sampling(turn, err));
    GW_TRY(read_reasoning(turn, err));
    GW_TRY(gw_read_metadata(turn, err));
    GW_TRY(read_rest(turn, err));
    GW_TRY(make_echo(turn, err));
    r->view.id = turn->response;
    r->view.turn = turn->id;
    r->view.created_ms = turn->created_ms;
    r->view.echo = r->echo;
    r->view.text = &turn->text;
    r->view.reasoning = &turn->reasoning;
    r->view.calls = &turn->calls;
    return BASE_OK;
}

void gw_responses_look_on(gw_turn *turn)
{
    turn->stream = false;
    turn->lock_id = NULL;
    turn->echo = NULL;
    turn->retention = GW_RETAIN_USAGE;
}

base_code gw_responses_check(gw_turn *turn, base_err *err)
{
    uint32_t item, call;
    GW_TRY(gw_runs_unseal(turn, &state(turn)->list, err));
    if (!gw_bad_arguments(turn, &item, &call))
        return BASE_OK;
    eng_text name = turn->items[item].calls[call].name;
    return base_fail_param(err, BASE_INVALID, "input",
                           "input: the arguments of a call of '%.*s' must be the JSON text of an "
                           "object",
                           gw_shown(name.data, 64), name.data);
}

/* ---- truncation ---- */

#define TRUNCATIONS_MAX 8

/* Whole exchanges go, the oldest first and none of the system text in front, as many as it takes
 * for the rest and the answer to fit. False if only one is left. */
static bool drop_oldest(gw_turn *turn)
{
    responses *r = state(turn);
    const uint32_t window = eng_get_info(turn->app->engine)->context_max;
    const uint32_t *ends = turn->prompt.item_end;
    uint32_t answer = window / 8, count = turn->chat.item_count, front = 0, cut = 0;
    if (turn->request.max_tokens && turn->request.max_tokens < answer)
        answer = turn->request.max_tokens;
    while (front < count && turn->items[front].role == ENG_ROLE_SYSTEM)
        front++;
    uint32_t from = front ? ends[front - 1] : 0;
    for (uint32_t i = front + 1; i < count; i++) {
        if (turn->items[i].role != ENG_ROLE_USER)
            continue;
        cut = i;
        if (turn->prompt.token_count - base_min(ends[i - 1] - from, turn->prompt.token_count) +
                answer <
            window)
            break;
    }
    if (!cut)
        return false;
    memmove(turn->items + front, turn->items + cut, (count - cut) * sizeof *turn->items);
    memmove(r->list.sealed + front, r->list.sealed + cut, (count - cut) * sizeof *r->list.sealed);
    turn->chat.item_count = r->list.count = count - (cut - front);
    return true;
}

static base_code render(gw_turn *turn, base_err *err)
{
    responses *r = state(turn);
    gw_app *app = turn->app;
    for (int round = 0;; round++) {
        base_err why = BASE_ERR_INIT;
        base_code code =
            eng_render(app->engine, &turn->prompt, &turn->chat, 0, NULL, turn->arena, &why);
        bool full = code == BASE_TOO_LONG ||
                    turn->prompt.token_count >= eng_get_info(app->engine)->context_max;
        if (!full || !r->truncate || round == TRUNCATIONS_MAX || !drop_oldest(turn))
            return code ? base_fail_param(err, code, why.param, "%s", why.text) : BASE_OK;
        for (uint32_t i = 0; i < turn->chat.item_count; i++) {
            turn->items[i].tokens = NULL;
            turn->items[i].token_count = 0;
            turn->items[i].rest = (eng_text){0};
        }
        turn->match = (gw_match){0};
        GW_TRY(gw_ledger_match(app->ledger, &turn->match, &turn->root, turn->items,
                               turn->chat.item_count, turn->arena, err));
        GW_TRY(gw_responses_check(turn, err));
    }
}

/* ---- running streams in the ledger ---- */

/* What there is of an answer, on its way to the ledger. */
struct flush {
    gw_job job;
    gw_message back;
    gw_turn *turn; /* NULL once it is over. Loop */
    gw_app *app;
    gw_loop *loop;
    gw_id id;
    gw_stream_row row;
    base_arena *arena;
    /* The request of a response in the background, answered when its row is written. Loop */
    gw_exchange *asker;
    base_buf answer;
};

#define FLUSH_ARENA_BYTES (64u << 20)

static void flush_run(gw_job *job)
{
    flush *f = (flush *)((char *)job - offsetof(flush, job));
    base_err err = BASE_ERR_INIT;
    if (gw_stream_put(f->app->ledger, &f->row, &err))
        base_log(BASE_LOG_WARN, "stream_not_kept turn=%s reason=\"%s\"", f->id.text, err.text);
    gw_loop_post(f->loop, &f->back);
}

static void flush_back(gw_message *message)
{
    static const gw_header headers[] = {{"content-type", "application/json"}};
    flush *f = (flush *)((char *)message - offsetof(flush, back));
    if (f->turn)
        state(f->turn)->flush = NULL;
    if (f->asker && f->answer.failed)
        gw_stream_abort(f->asker);
    else if (f->asker)
        gw_respond(f->asker, 200, headers, 1, f->answer.data, f->answer.length);
    base_buf_deinit(&f->answer);
    base_arena_destroy(f->arena);
    free(f);
}

static void asker_gone(void *ctx)
{
    ((flush *)ctx)->asker = NULL;
}

static void *copy(base_arena *arena, const void *bytes, size_t size)
{
    void *to = base_arena_alloc(arena, size ? size : 1);
    if (to && size)
        memcpy(to, bytes, size);
    return to;
}

/* NULL without memory: the stream is not kept for now. */
static flush *flush_make(gw_turn *turn)
{
    responses *r = state(turn);
    flush *f = calloc(1, sizeof *f);
    base_arena *arena = f ? base_arena_create(4096, FLUSH_ARENA_BYTES) : NULL;
    base_buf told;
    base_buf_init(&told, 0);
    gw_response_tell(&told, turn, &r->view, NULL);
    base_buf_add(&told, "", 1);
    uint32_t count = turn->run_count - turn->lead;
    if (arena)
        f->row = (gw_stream_row){
            .tenant = turn->identity.tenant,
            .turn = f->id.text,
            .created_ms = turn->created_ms,
            .echo = base_arena_copy(arena, turn->echo, strlen(turn->echo)),
            .told = told.failed ? NULL : base_arena_copy(arena, told.data, told.length),
            .run = copy(arena, turn->run + turn->lead, count * sizeof *turn->run),
            .steps = copy(arena, turn->steps, turn->step_count * sizeof *turn->steps),
            .run_count = count,
            .step_count = turn->step_count};
    bool good = arena && !told.failed && !base_arena_failed(arena);
    base_buf_deinit(&told);
    if (!good) {
        base_arena_destroy(arena);
        free(f);
        return NULL;
    }
    f->job.run = flush_run;
    f->back.run = flush_back;
    f->turn = turn;
    f->app = turn->app;
    f->loop = turn->loop;
    f->id = turn->id;
    f->arena = arena;
    r->flushed_ns = base_now_ns();
    r->flushed_tokens = count;
    return f;
}

static void flush_send(gw_turn *turn, flush *f)
{
    state(turn)->flush = f;
    if (!gw_workers_submit(turn->app->workers, &f->job))
        flush_back(&f->back); /* the next one will do */
}

static void tick(gw_turn *turn, uint64_t now)
{
    responses *r = state(turn);
    uint32_t count = turn->run_count - turn->lead;
    /* A row is written whole each time, so long answers are written less often. */
    uint64_t wait = base_max((uint64_t)FLUSH_MS, count / 100) * 1000000;
    if (!turn->tape || !r->store || !r->view.record || r->flush || count == r->flushed_tokens ||
        now < r->flushed_ns + wait)
        return;
    flush *f = flush_make(turn);
    if (f)
        flush_send(turn, f);
}

/* ---- answering ---- */

static void record(void *ctx, const base_buf *bytes)
{
    gw_write_record(ctx, bytes);
}

static void admit(gw_turn *turn)
{
    responses *r = state(turn);
    bool whole = !turn->stream;
    r->view.record = whole ? NULL : record;
    r->view.ctx = turn;
    if (!r->store || (whole && !r->view.background))
        return;
    flush *f = flush_make(turn);
    if (r->view.background && whole) {
        base_buf answer;
        base_buf_init(&answer, 0);
        gw_response_put(&r->view, &answer, "queued", NULL);
        if (!f || turn->tape || !turn->exchange) {
            gw_turn_respond_json(turn, &answer);
            base_buf_deinit(&answer);
        } else {
            f->asker = turn->exchange;
            f->answer = answer;
            turn->exchange = NULL;
            turn->status = 200;
            gw_exchange_set_handler(f->asker, f, asker_gone, NULL);
        }
        turn->stream = true;
        r->view.record = record;
    }
    char name[GW_TAPE_NAME_MAX];
    gw_stream_name(name, turn->identity.tenant, turn->response.text);
    gw_turn_publish(turn, name);
    turn->background = r->view.background;
    if (turn->tape && turn->background)
        gw_tape_set_request(turn->tape, turn->request.id);
    if (f)
        flush_send(turn, f);
}

static void open_stream(gw_turn *turn)
{
    gw_turn_stream_begin(turn);
    gw_response_open(&state(turn)->view);
}

static void started(gw_turn *turn)
{
    responses *r = state(turn);
    if (turn->tape)
        gw_tape_set_started(turn->tape);
    if (r->view.record && gw_turn_streaming(turn))
        gw_response_started(&r->view);
}

static void step(gw_turn *turn, const eng_event *event)
{
    responses *r = state(turn);
    if (r->view.list)
        gw_logprobs_step(r->view.list, turn, event);
}

static void part(gw_turn *turn, const eng_part *p)
{
    responses *r = state(turn);
    gw_response_part(&r->view, p);
    turn->lossy |= r->view.failed;
}

void gw_responses_put_usage(base_buf *out, const gw_turn *turn)
{
    const eng_usage *usage = &turn->usage;
    base_buf_clear(out);
    base_buf_printf(out,
                    "{\"input_tokens\":%u,\"input_tokens_details\":{\"cached_tokens\":%u,"
                    "\"cache_write_tokens\":%u},\"output_tokens\":%u,\"output_tokens_details\":"
                    "{\"reasoning_tokens\":%u},\"total_tokens\":%llu,",
                    usage->prompt_tokens, usage->cached_tokens,
                    usage->prompt_tokens -
                        (uint32_t)base_min(usage->cached_tokens, usage->prompt_tokens),
                    usage->output_tokens, usage->reasoning_tokens,
                    (unsigned long long)usage->prompt_tokens + usage->output_tokens);
    gw_turn_extension(turn, out);
    base_buf_puts(out, "}");
    base_buf_add(out, "", 1);
}

/* The end as the client will be told it. */
static void make_end(gw_turn *turn)
{
    responses *r = state(turn);
    gw_response_end *end = &r->end;
    bool cut = turn->finish == ENG_FINISH_LENGTH;
    *end = (gw_response_end){.status = cut ? "incomplete" : "completed",
                             .reason = cut ? "max_output_tokens" : NULL,
                             .ended_ms = base_wall_ms(),
                             .cut = cut};
    if (turn->finish == ENG_FINISH_CANCELLED) {
        bool asked =
            !atomic_load(&turn->app->draining) || (turn->tape && gw_tape_cancelled(turn->tape));
        end->status = asked ? "cancelled" : "incomplete";
        end->reason = asked ? NULL : "server_restart";
        end->cut = true;
    } else if (turn->finish == ENG_FINISH_ERROR || turn->finish == ENG_FINISH_DEADLINE) {
        bool late = turn->finish == ENG_FINISH_DEADLINE;
        r->row = late                     ? gw_error_map(BASE_TIMEOUT)
                 : turn->error_row.status ? turn->error_row
                                          : gw_error_map(turn->error.code);
        end->status = "failed";
        end->code = r->row.code ? r->row.code : r->row.type;
        end->message = late ? "the request did not end within its time limit" : turn->error.text;
        end->cut = true;
    }
    if (r->view.encrypted && !turn->lossy && gw_run_seal(&r->sealed, turn))
        end->sealed = r->sealed.data;
    bool stored = turn->stored;
    turn->stored = turn->retention == GW_RETAIN_KEPT; /* else no one will be told this */
    gw_responses_put_usage(&r->usage, turn);
    turn->stored = stored;
    end->usage = r->usage.failed ? NULL : r->usage.data;
}

/* Before the commit: all that a replay needs, and the items of the conversation. */
static void ending(gw_turn *turn)
{
    responses *r = state(turn);
    make_end(turn);
    if (turn->conversation)
        gw_conversation_outputs(turn, &r->view, &r->end);
    if (!r->store)
        return;
    gw_response_tell(&r->told, turn, &r->view, &r->end);
    base_buf_add(&r->told, "", 1);
    turn->told = r->told.failed ? NULL : r->told.data;
}

static void finish(gw_turn *turn)
{
    responses *r = state(turn);
    if (turn->finish == ENG_FINISH_CANCELLED && !gw_turn_streaming(turn)) {
        gw_error_row row = gw_error_map(BASE_CLOSED);
        gw_turn_respond_error(turn, &row, NULL, "the server is shutting down");
        return;
    }
    if (turn->retention != GW_RETAIN_KEPT) {
        gw_responses_put_usage(&r->usage, turn);
        r->end.usage = r->usage.failed ? NULL : r->usage.data;
    }
    r->end.ended_ms = turn->commit.ended_ms;
    gw_response_finish(&r->view, &r->end);
    if (turn->stream) {
        gw_turn_stream_end(turn);
        return;
    }
    base_buf_clear(&r->view.scratch);
    gw_response_put(&r->view, &r->view.scratch, r->end.status, &r->end);
    gw_turn_respond_json(turn, &r->view.scratch);
}

void gw_responses_fail(gw_turn *turn, const gw_error_row *row, const char *param,
                       const char *message)
{
    responses *r = state(turn);
    if (!gw_turn_streaming(turn)) {
        gw_turn_respond_error(turn, row, param, message);
        return;
    }
    r->end.status = "failed";
    r->end.reason = NULL;
    r->end.code = row->code ? row->code : row->type;
    r->end.message = message;
    r->end.cut = true;
    gw_response_finish(&r->view, &r->end);
    gw_turn_stream_end(turn);
}

/* Clients of this dialect count events, not comments, as a sign of life. */
static void ping(gw_turn *turn)
{
    gw_response_ping(&state(turn)->view);
}

void gw_responses_deinit(gw_turn *turn)
{
    responses *r = state(turn);
    if (r->flush)
        r->flush->turn = NULL;
    gw_response_deinit(&r->view);
    gw_logprobs_deinit(&r->logprobs);
    base_buf *bufs[] = {&r->usage, &r->sealed, &r->told, &r->retained};
    for (size_t i = 0; i < sizeof bufs / sizeof *bufs; i++)
        base_buf_deinit(bufs[i]);
    json_decref(r->stored);
}

static const gw_dialect dialect = {
    .name = GW_RESPONSES,
    .route = "/v1/responses",
    .parse = gw_responses_parse,
    .load = gw_responses_load,
    .check = gw_responses_check,
    .render = render,
    .admit = admit,
    .open = open_stream,
    .started = started,
    .step = step,
    .part = part,
    .ending = ending,
    .finish = finish,
    .tells_cut = true,
    .fail = gw_responses_fail,
    .tick = tick,
    .ping = ping,
    .deinit = gw_responses_deinit,
};

void gw_api_responses_handle(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &dialect);
}

/* ---- input_tokens ---- */

static base_code parse_count(gw_turn *turn, base_err *err)
{
    GW_TRY(gw_responses_parse(turn, err));
    gw_responses_look_on(turn);
    return BASE_OK;
}

static void finish_count(gw_turn *turn)
{
    base_buf *out = &state(turn)->view.scratch;
    base_buf_clear(out);
    base_buf_printf(out, "{\"object\":\"response.input_tokens\",\"input_tokens\":%u}",
                    turn->prompt.token_count);
    gw_turn_respond_json(turn, out);
}

static const gw_dialect counting = {
    .name = GW_RESPONSES,
    .route = "/v1/responses/input_tokens",
    .parse = parse_count,
    .load = gw_responses_load,
    .check = gw_responses_check,
    .dry = true,
    .finish = finish_count,
    .fail = gw_responses_fail,
    .deinit = gw_responses_deinit,
};

void gw_api_responses_count(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &counting);
}
