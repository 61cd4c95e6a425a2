/* api_chat: see the header. Top: reading a body (worker). Bottom: writing records (loop).
 *
 * Read and applied: model, messages, tools, tool_choice, parallel_tool_calls, stream,
 * stream_options, max_completion_tokens and max_tokens, temperature, top_p, top_k, min_p,
 * penalties, repetition_penalty, stop, stop_token_ids, ignore_eos, min_tokens, seed, logprobs,
 * top_logprobs, logit_bias, reasoning_effort, chat_template_kwargs, thinking, enable_thinking,
 * store, metadata, session_id, cache_salt, return_token_ids, add_generation_prompt,
 * continue_final_message. The engine's own fields are taken from `extra_body` too, since some
 * clients forward it literally. prediction becomes drafts where the engine drafts by itself. Read
 * for their type alone (hints): user, safety_identifier, service_tier, verbosity, prompt_cache_key
 * (a session label at last). Not offered yet,
 * and refused by name: n above limits.n_max, audio output, grammars in lark, parts that are not
 * text. */
#include "gateway/api_chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "gateway/conf.h"
#include "gateway/dialect.h"
#include "gateway/structured.h"
#include "gateway/logprob.h"

const gw_tool_form gw_chat_tools = {
    .inner = "function", .schema = "parameters", .strict = true, .custom = true};

typedef struct chat {
    bool include_usage, continuous_usage, keepalive_chunk, return_token_ids, logprobs;
    bool reasoning_too; /* the client reads `reasoning` */
    eng_text echo;      /* of what is to be kept, without its end; the first choice's */
    base_buf head;      /* of every record, up to `"choices":`; the first choice's */
    base_buf record;    /* scratch */
    base_buf ids;       /* token ids that no record has carried yet, "1,2,3" */
    gw_logprobs list;   /* its entries: those that no record has carried yet, or all of them if not
                           streamed */
} chat;

static chat *state(gw_turn *turn)
{
    return turn->state_of_dialect;
}

/* ---- reading ---- */

/* reasoning_content, reasoning or reasoning_details: the first that is not empty. */
static base_code read_reasoning(gw_turn *turn, eng_text *out, const json_t *message,
                                const char *path, base_err *err)
{
    eng_text text = {0};
    GW_TRY(gw_read_text(&text, message, path, "reasoning_content", err));
    if (!text.length) {
        text = (eng_text){0};
        const json_t *reasoning = json_object_get(message, "reasoning");
        /* Some routers put an object here; it is no text of ours. */
        if (!json_is_object(reasoning))
            GW_TRY(gw_read_text(&text, message, path, "reasoning", err));
        if (text.length)
            state(turn)->reasoning_too = true;
    }
    if (!text.length) {
        json_t *details;
        GW_TRY(gw_read_array(&details, message, path, "reasoning_details", err));
        size_t total = 0, count = json_array_size(details);
        for (size_t i = 0; i < count; i++)
            total += json_string_length(json_object_get(json_array_get(details, i), "text"));
        if (total) {
            char *to = base_arena_alloc(turn->arena, total);
            if (!to)
                return gw_no_memory(err);
            text = (eng_text){to, total};
            for (size_t i = 0; i < count; i++) {
                const json_t *part = json_object_get(json_array_get(details, i), "text");
                memcpy(to, json_string_value(part) ? json_string_value(part) : "",
                       json_string_length(part));
                to += json_string_length(part);
            }
        }
    }
    if (text.length)
        *out = text;
    return BASE_OK;
}

static base_code read_call(gw_turn *turn, eng_call *out, const json_t *call, const char *path,
                           base_err *err)
{
    if (!json_is_object(call))
        return gw_wrong_type(path, "", "an object", call, err);
    const char *id = NULL, *name = NULL;
    GW_TRY(gw_read_name(&id, call, path, "id", GW_NAME_BYTES_MAX, err));
    json_t *function, *custom;
    GW_TRY(gw_read_object(&function, call, path, "function", err));
    GW_TRY(gw_read_object(&custom, call, path, "custom", err));
    if (!function && !custom)
        return gw_wrong_type(path, "function", "an object", NULL, err);
    char where[GW_PATH_BYTES];
    gw_name_path(where, "%s.%s", path, function ? "function" : "custom");
    const json_t *body = function ? function : custom;
    GW_TRY(gw_read_name(&name, body, where, "name", GW_NAME_BYTES_MAX, err));
    if (!name || !name[0])
        return gw_wrong_type(where, "name", "a string", NULL, err);
    *out = (eng_call){.id = gw_text_of(id), .name = gw_text_of(name)};
    if (function) {
        /* The bytes are kept: what the ledger knows needs no valid JSON, see `check`. */
        out->arguments = (eng_text){"", 0};
        return gw_read_text(&out->arguments, body, where, "arguments", err);
    }
    eng_text input = {"", 0};
    GW_TRY(gw_read_text(&input, body, where, "input", err));
    return gw_custom_arguments(turn, &out->arguments, input, err);
}

static base_code read_text(gw_turn *turn, eng_text *out, const json_t *message, const char *path,
                           bool required, base_err *err)
{
    const json_t *content = json_object_get(message, "content");
    char where[GW_PATH_BYTES];
    if (required && (!content || json_is_null(content)))
        return gw_wrong_type(path, "content", "a string or an array of parts", content, err);
    gw_name_path(where, "%s.content", path);
    return gw_read_content(turn, out, content, where, err);
}

static base_code read_message(gw_turn *turn, eng_item *out, eng_text *result_id,
                              const json_t *message, size_t index, base_err *err)
{
    char path[GW_PATH_BYTES];
    gw_name_path(path, "messages[%zu]", index);
    if (!json_is_object(message))
        return gw_wrong_type(path, "", "an object", message, err);
    const char *role = NULL, *name = NULL;
    GW_TRY(gw_read_name(&role, message, path, "role", GW_NAME_BYTES_MAX, err));
    GW_TRY(gw_read_name(&name, message, path, "name", GW_NAME_BYTES_MAX, err));
    if (!role)
        return gw_wrong_type(path, "role", "a string", NULL, err);
    *out = (eng_item){0};
    if (strcmp(role, "system") == 0 || strcmp(role, "developer") == 0) {
        out->role = ENG_ROLE_SYSTEM;
        return read_text(turn, &out->text, message, path, true, err);
    }
    if (strcmp(role, "user") == 0) {
        out->role = ENG_ROLE_USER;
        return read_text(turn, &out->text, message, path, true, err);
    }
    if (strcmp(role, "tool") == 0 || strcmp(role, "function") == 0) {
        out->role = ENG_ROLE_TOOL;
        const char *id = NULL;
        GW_TRY(gw_read_name(&id, message, path, "tool_call_id", GW_NAME_BYTES_MAX, err));
        if (!id && role[0] == 't')
            return gw_wrong_type(path, "tool_call_id", "a string", NULL, err);
        *result_id = gw_text_of(id);
        return read_text(turn, &out->text, message, path, false, err);
    }
    if (strcmp(role, "assistant") != 0) {
        char param[GW_PATH_BYTES];
        gw_name_path(param, "%s.role", path);
        return base_fail_param(err, BASE_INVALID, param,
                               "%s '%.*s' is not one of system, developer, user, assistant, tool",
                               param, gw_shown(role, 32), role);
    }
    out->role = ENG_ROLE_ASSISTANT;
    GW_TRY(read_text(turn, &out->text, message, path, false, err));
    GW_TRY(read_reasoning(turn, &out->reasoning, message, path, err));
    json_t *calls;
    GW_TRY(gw_read_array(&calls, message, path, "tool_calls", err));
    size_t count = json_array_size(calls);
    if (!count)
        return BASE_OK;
    eng_call *list = base_arena_calloc(turn->arena, count, sizeof(*list));
    if (!list)
        return gw_no_memory(err);
    for (size_t i = 0; i < count; i++) {
        char where[GW_PATH_BYTES];
        gw_name_path(where, "%s.tool_calls[%zu]", path, i);
        GW_TRY(read_call(turn, &list[i], json_array_get(calls, i), where, err));
    }
    out->calls = list;
    out->call_count = (uint32_t)count;
    return BASE_OK;
}

static base_code read_messages(gw_turn *turn, base_err *err)
{
    json_t *messages;
    GW_TRY(gw_read_array(&messages, turn->json, "", "messages", err));
    size_t count = json_array_size(messages);
    if (!count)
        return base_fail_param(err, BASE_INVALID, "messages",
                               "messages must be an array of at least one message");
    turn->items = base_arena_calloc(turn->arena, count, sizeof(*turn->items));
    eng_text *ids = base_arena_calloc(turn->arena, count, sizeof(*ids));
    if (!turn->items || !ids)
        return gw_no_memory(err);
    for (size_t i = 0; i < count; i++)
        GW_TRY(read_message(turn, &turn->items[i], &ids[i], json_array_get(messages, i), i, err));
    gw_order_results(turn->items, ids, count);
    turn->chat.items = turn->items;
    turn->chat.item_count = (uint32_t)count;
    return BASE_OK;
}

static base_code read_logprobs(gw_turn *turn, base_err *err)
{
    const json_t *json = turn->json;
    eng_sampling *sampling = &turn->request.sampling;
    int64_t number = 0;
    GW_TRY(gw_read_bool(&sampling->logprobs, NULL, json, "", "logprobs", err));
    GW_TRY(gw_read_int(&number, NULL, json, "", "top_logprobs", 0, ENG_TOP_LOGPROBS_MAX, err));
    sampling->top_logprobs = sampling->logprobs ? (uint32_t)number : 0;
    return BASE_OK;
}

static base_code read_lengths(gw_turn *turn, base_err *err)
{
    int64_t number = 1;
    bool seen = false;
    GW_TRY(gw_read_limit(turn, "max_completion_tokens", &seen, err));
    if (!seen)
        GW_TRY(gw_read_limit(turn, "max_tokens", NULL, err));
    GW_TRY(gw_read_int(&number, NULL, turn->json, "", "n", 1, turn->app->conf->limits_n_max, err));
    turn->answer_count = (uint32_t)number;
    return BASE_OK;
}

static bool mode_of(eng_thinking *out, const char *text)
{
    if (strcmp(text, "enabled") == 0 || strcmp(text, "on") == 0)
        *out = ENG_THINK_ENABLED;
    else if (strcmp(text, "disabled") == 0 || strcmp(text, "off") == 0)
        *out = ENG_THINK_DISABLED;
    else if (strcmp(text, "adaptive") == 0 || strcmp(text, "auto") == 0)
        *out = ENG_THINK_ADAPTIVE;
    else
        return false;
    return true;
}

/* Thinking, the most explicit wish first: chat_template_kwargs.thinking_mode, its enable_thinking
 * or thinking, the body's thinking.type, enable_thinking, and at last reasoning_effort none or
 * minimal, which mean disabled. The other efforts become the model's effort line and keep its
 * default mode, unless that is not to think; an unknown effort is a hint that nobody understands
 * and is ignored, as are unknown modes, so that no client text lands in the system turn. */
base_code gw_chat_read_thinking(gw_turn *turn, base_err *err)
{
    const json_t *json = turn->json;
    const char *effort = NULL, *mode = NULL;
    json_t *kwargs, *thinking, *reasoning;
    eng_thinking *out = &turn->chat.thinking;
    bool flag = false, seen = false;
    GW_TRY(gw_read_name(&effort, json, "", "reasoning_effort", GW_NAME_BYTES_MAX, err));
    GW_TRY(gw_read_object(&reasoning, json, "", "reasoning", err));
    if (!effort && reasoning)
        GW_TRY(gw_read_name(&effort, reasoning, "reasoning", "effort", GW_NAME_BYTES_MAX, err));
    GW_TRY(gw_read_object(&kwargs, gw_holder(turn, "chat_template_kwargs"), "",
                          "chat_template_kwargs", err));
    if (!effort && kwargs)
        GW_TRY(gw_read_name(&effort, kwargs, "chat_template_kwargs", "reasoning_effort",
                            GW_NAME_BYTES_MAX, err));
    gw_set_effort_or_none(turn, effort);
    GW_TRY(
        gw_read_bool(&flag, &seen, gw_holder(turn, "enable_thinking"), "", "enable_thinking", err));
    if (seen)
        *out = flag ? ENG_THINK_ENABLED : ENG_THINK_DISABLED;
    const json_t *source = gw_holder(turn, "thinking");
    if (json_is_boolean(json_object_get(source, "thinking"))) {
        *out = json_is_true(json_object_get(source, "thinking")) ? ENG_THINK_ENABLED
                                                                 : ENG_THINK_DISABLED;
    } else {
        GW_TRY(gw_read_object(&thinking, source, "", "thinking", err));
        if (thinking)
            GW_TRY(gw_read_name(&mode, thinking, "thinking", "type", GW_NAME_BYTES_MAX, err));
        if (mode)
            mode_of(out, mode);
    }
    if (!kwargs)
        return BASE_OK;
    seen = false;
    GW_TRY(gw_read_bool(&flag, &seen, kwargs, "chat_template_kwargs", "enable_thinking", err));
    if (!seen)
        GW_TRY(gw_read_bool(&flag, &seen, kwargs, "chat_template_kwargs", "thinking", err));
    if (seen)
        *out = flag ? ENG_THINK_ENABLED : ENG_THINK_DISABLED;
    mode = NULL;
    GW_TRY(gw_read_name(&mode, kwargs, "chat_template_kwargs", "thinking_mode", GW_NAME_BYTES_MAX,
                        err));
    if (mode)
        mode_of(out, mode);
    return BASE_OK;
}

/* store: absent keeps the turn on disk for a while, as a cache; true keeps it; false keeps what was
 * said off the disk. */
static base_code read_retention(gw_turn *turn, base_err *err)
{
    bool store = false, seen = false;
    GW_TRY(gw_read_bool(&store, &seen, turn->json, "", "store", err));
    if (seen)
        turn->retention = store ? GW_RETAIN_KEPT : GW_RETAIN_USAGE;
    return gw_read_metadata(turn, err);
}

static base_code read_hints(gw_turn *turn, base_err *err)
{
    static const char *const strings[] = {
        "user",      "safety_identifier",      "service_tier",
        "verbosity", "prompt_cache_retention", "prompt_cache_key"};
    const json_t *json = turn->json;
    GW_TRY(gw_read_hints(turn, strings, sizeof(strings) / sizeof(strings[0]), err));
    json_t *object;
    GW_TRY(gw_read_prediction(turn, err));
    GW_TRY(gw_read_object(&object, json, "", "prompt_cache_options", err));
    json_t *modalities;
    GW_TRY(gw_read_array(&modalities, json, "", "modalities", err));
    for (size_t i = 0; i < json_array_size(modalities); i++) {
        const char *name = json_string_value(json_array_get(modalities, i));
        if (!name || strcmp(name, "text") != 0)
            return gw_unsupported(err, "modalities", "modalities: this model writes text only");
    }
    static const char *const keys[] = {"response_format", NULL};
    json_t *format;
    GW_TRY(gw_read_object(&format, json, "", "response_format", err));
    GW_TRY(gw_read_format(turn, format, keys, "json_schema", err));
    GW_TRY(gw_read_engine_formats(turn, err));
    return gw_read_label(turn, err);
}

static base_code read_output(gw_turn *turn, base_err *err)
{
    chat *c = state(turn);
    const json_t *json = turn->json;
    GW_TRY(gw_read_bool(&turn->stream, NULL, json, "", "stream", err));
    json_t *options;
    GW_TRY(gw_read_object(&options, json, "", "stream_options", err));
    if (options) {
        GW_TRY(
            gw_read_bool(&c->include_usage, NULL, options, "stream_options", "include_usage", err));
        GW_TRY(gw_read_bool(&c->continuous_usage, NULL, options, "stream_options",
                            "continuous_usage_stats", err));
        GW_TRY(gw_read_bool(&c->keepalive_chunk, NULL, options, "stream_options", "keepalive_chunk",
                            err));
        c->continuous_usage &= c->include_usage;
    }
    GW_TRY(gw_read_bool(&c->reasoning_too, NULL, gw_holder(turn, "include_reasoning"), "",
                        "include_reasoning", err));
    GW_TRY(gw_read_bool(&c->return_token_ids, NULL, gw_holder(turn, "return_token_ids"), "",
                        "return_token_ids", err));
    c->logprobs = turn->request.sampling.logprobs;
    c->list.top = turn->request.sampling.top_logprobs;
    turn->exact_steps = c->logprobs || c->return_token_ids;
    bool generation = true;
    GW_TRY(gw_read_bool(&generation, NULL, gw_holder(turn, "add_generation_prompt"), "",
                        "add_generation_prompt", err));
    bool resume = false;
    GW_TRY(gw_read_bool(&resume, NULL, gw_holder(turn, "continue_final_message"), "",
                        "continue_final_message", err));
    if (resume && turn->items[turn->chat.item_count - 1].role != ENG_ROLE_ASSISTANT)
        return base_fail_param(err, BASE_INVALID, "continue_final_message",
                               "continue_final_message needs a last message of role assistant");
    turn->chat.continue_last = resume;
    turn->chat.no_generation_prompt = !generation && !resume;
    return BASE_OK;
}

/* What a stored completion's object repeats of its request, as it was written. */
static base_code begin_echo(gw_turn *turn, base_err *err)
{
    static const char *const names[] = {
        "model",       "tools", "tool_choice",      "response_format",
        "temperature", "top_p", "presence_penalty", "frequency_penalty",
        "user"};
    base_buf out;
    eng_text raw;
    base_buf_init(&out, 0);
    base_buf_printf(&out, "{\"request_id\":\"%s\"", turn->request_id);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (!gw_body_member(&raw, turn->body, turn->body_length, names[i]))
            continue;
        base_buf_printf(&out, ",\"%s\":", names[i]);
        gw_put_raw(&out, raw);
    }
    return gw_keep(turn, &state(turn)->echo, &out, err);
}

/* And which turns its choices are, once they are all there. */
static base_code end_echo(gw_turn *first, base_err *err)
{
    eng_text whole = state(first)->echo;
    base_buf out;
    if (first->retention != GW_RETAIN_KEPT)
        return BASE_OK;
    base_buf_init(&out, 0);
    base_buf_add(&out, whole.data, whole.length);
    for (uint32_t i = 0; i < first->answer_count; i++)
        base_buf_printf(&out, "%s\"%s\"", i ? "," : ",\"choices\":[", first->choices[i]->id.text);
    base_buf_puts(&out, "]}");
    GW_TRY(gw_keep(first, &whole, &out, err));
    first->echo = whole.data;
    return BASE_OK;
}

base_code gw_chat_parse(gw_turn *turn, base_err *err)
{
    chat *c = base_arena_calloc(turn->arena, 1, sizeof(*c));
    if (!c)
        return gw_no_memory(err);
    turn->state_of_dialect = c;
    snprintf(turn->response.text, sizeof turn->response.text, "chatcmpl-%.24s",
             turn->id.text + strlen("turn_"));
    eng_text tools;
    GW_TRY(gw_keep_raw(turn, &tools, "tools", err));
    GW_TRY(gw_parse_body(turn, err));
    GW_TRY(read_messages(turn, err));
    GW_TRY(gw_read_tools(turn, &gw_chat_tools, tools, err));
    GW_TRY(gw_read_tool_choice(turn, &gw_chat_tools, err));
    GW_TRY(read_lengths(turn, err));
    GW_TRY(gw_read_sampling(turn, err));
    GW_TRY(read_logprobs(turn, err));
    GW_TRY(gw_chat_read_thinking(turn, err));
    GW_TRY(read_retention(turn, err));
    GW_TRY(read_hints(turn, err));
    GW_TRY(read_output(turn, err));
    if (turn->retention == GW_RETAIN_KEPT)
        GW_TRY(begin_echo(turn, err));
    return turn->answer_count == 1 ? end_echo(turn, err) : BASE_OK;
}

static base_code choose(gw_turn *turn, base_err *err)
{
    const chat *first = state(turn->first);
    chat *c = base_arena_calloc(turn->arena, 1, sizeof(*c));
    if (!c)
        return gw_no_memory(err);
    *c = (chat){.include_usage = first->include_usage,
                .continuous_usage = first->continuous_usage,
                .return_token_ids = first->return_token_ids,
                .logprobs = first->logprobs,
                .reasoning_too = first->reasoning_too,
                .list = {.top = first->list.top}};
    turn->state_of_dialect = c;
    if (turn->retention == GW_RETAIN_KEPT)
        turn->echo = "{}"; /* the first one's tells all, once all are there */
    return turn->choice + 1 == turn->first->answer_count ? end_echo(turn->first, err) : BASE_OK;
}

base_code gw_chat_check(gw_turn *turn, base_err *err)
{
    uint32_t item, call;
    if (!gw_bad_arguments(turn, &item, &call))
        return BASE_OK;
    char param[GW_PATH_BYTES];
    gw_name_path(param, "messages[%u].tool_calls[%u].function.arguments", item, call);
    return base_fail_param(err, BASE_INVALID, param, "%s must be the JSON text of an object",
                           param);
}

/* ---- writing ---- */

/* The record's members before `choices`. */
static void put_head(const gw_turn *turn, base_buf *out, const char *object)
{
    gw_put_head(turn, out, object);
    base_buf_puts(out, ",\"service_tier\":\"default\"");
}

/* Begins a record's choice after its delta, which the caller wrote last. Logprob entries and token
 * ids that no record has carried yet go with it, unless it is a call's or reasoning's record
 * (`with_entries` false). */
static void end_record(gw_turn *turn, bool with_entries, const char *finish)
{
    chat *c = state(turn);
    base_buf *out = &c->record;
    if (with_entries && c->list.entries.length) {
        base_buf_puts(out, ",\"logprobs\":{\"content\":[");
        base_buf_add(out, c->list.entries.data, c->list.entries.length);
        base_buf_puts(out, "],\"refusal\":null}");
        base_buf_clear(&c->list.entries);
    } else {
        base_buf_puts(out, ",\"logprobs\":null");
    }
    if (finish)
        base_buf_printf(out, ",\"finish_reason\":\"%s\"", finish);
    else
        base_buf_puts(out, ",\"finish_reason\":null");
    if (c->ids.length) {
        base_buf_puts(out, ",\"token_ids\":[");
        base_buf_add(out, c->ids.data, c->ids.length);
        base_buf_puts(out, "]");
        base_buf_clear(&c->ids);
    }
    base_buf_puts(out, "}]");
    if (c->continuous_usage) {
        const eng_usage usage = gw_turn_usage(turn);
        base_buf_puts(out, ",");
        gw_chat_put_counts(out, &usage);
        base_buf_puts(out, "}");
    } else if (c->include_usage) {
        base_buf_puts(out, ",\"usage\":null");
    }
    base_buf_puts(out, "}\n\n");
    gw_write_record(turn, out);
}

/* `data: {HEAD,"choices":[{"index":N,"delta":` and whatever stands before choices. */
static base_buf *begin_record(gw_turn *turn)
{
    chat *c = state(turn);
    const base_buf *head = &state(turn->first)->head;
    base_buf_clear(&c->record);
    base_buf_puts(&c->record, "data: {");
    base_buf_add(&c->record, head->data, head->length);
    return &c->record;
}

static base_buf *begin_delta(gw_turn *turn)
{
    base_buf *out = begin_record(turn);
    base_buf_printf(out, ",\"choices\":[{\"index\":%u,\"delta\":", turn->choice);
    return out;
}

static void open_stream(gw_turn *turn)
{
    chat *c = state(turn);
    gw_turn_stream_begin(turn);
    put_head(turn, &c->head, "chat.completion.chunk");
    for (uint32_t i = 0; i < turn->choice_count; i++) {
        base_buf *out = begin_record(turn->choices[i]);
        if (c->return_token_ids && i == 0) {
            base_buf_puts(out, ",\"prompt_token_ids\":");
            gw_put_ids(out, turn->prompt.tokens, turn->prompt.token_count);
        }
        base_buf_printf(out,
                        ",\"choices\":[{\"index\":%u,\"delta\":{\"role\":\"assistant\","
                        "\"content\":\"\"}",
                        i);
        end_record(turn->choices[i], false, NULL);
    }
}

static void step(gw_turn *turn, const eng_event *event)
{
    chat *c = state(turn);
    if (c->return_token_ids && turn->stream)
        for (uint32_t i = 0; i < event->token_count; i++)
            base_buf_printf(&c->ids, "%s%d", c->ids.length ? "," : "", event->tokens[i]);
    if (c->logprobs)
        gw_logprobs_step(&c->list, turn, event);
}

/* The names of a call's members. */
static const char *kind_of(const gw_turn *turn, uint32_t call)
{
    return turn->calls[call].custom ? "custom" : "function";
}

static const char *body_of(const gw_turn *turn, uint32_t call)
{
    return turn->calls[call].custom ? "input" : "arguments";
}

static void part(gw_turn *turn, const eng_part *p)
{
    chat *c = state(turn);
    if (c->logprobs)
        gw_logprobs_part(&c->list, p);
    if (!turn->stream || !gw_turn_heard(turn))
        return;
    base_buf *out;
    switch (p->kind) {
    case ENG_PART_REASONING:
        if (!p->length)
            return;
        out = begin_delta(turn);
        base_buf_puts(out, "{\"reasoning_content\":");
        base_buf_json_string(out, p->text, p->length);
        if (c->reasoning_too) {
            base_buf_puts(out, ",\"reasoning\":");
            base_buf_json_string(out, p->text, p->length);
        }
        base_buf_puts(out, "}");
        end_record(turn, false, NULL);
        return;
    case ENG_PART_TEXT:
        if (!p->length)
            return;
        out = begin_delta(turn);
        base_buf_puts(out, "{\"content\":");
        base_buf_json_string(out, p->text, p->length);
        base_buf_puts(out, "}");
        end_record(turn, true, NULL);
        return;
    case ENG_PART_CALL_BEGIN:
        out = begin_delta(turn);
        base_buf_printf(out,
                        "{\"tool_calls\":[{\"index\":%u,\"id\":\"%s\",\"type\":\"%s\","
                        "\"%s\":{\"name\":",
                        p->call, turn->calls[p->call].id.text, kind_of(turn, p->call),
                        kind_of(turn, p->call));
        base_buf_json_string(out, p->text, p->length);
        base_buf_printf(out, ",\"%s\":\"\"}}]}", body_of(turn, p->call));
        end_record(turn, false, NULL);
        return;
    case ENG_PART_CALL_ARGS:
        if (!p->length)
            return;
        out = begin_delta(turn);
        base_buf_printf(out, "{\"tool_calls\":[{\"index\":%u,\"%s\":{\"%s\":", p->call,
                        kind_of(turn, p->call), body_of(turn, p->call));
        base_buf_json_string(out, p->text, p->length);
        base_buf_puts(out, "}}]}");
        end_record(turn, false, NULL);
        return;
    case ENG_PART_CALL_END:
        return;
    }
}

static void ending(gw_turn *turn)
{
    if (turn->retention == GW_RETAIN_KEPT)
        gw_tell_calls(turn);
}

static const char *finish_reason(const gw_turn *turn)
{
    /* With a whole call the reason is tool_calls even if a stop token or a forced choice ended the
     * turn: agents loop on it. */
    return turn->finish == ENG_FINISH_LENGTH ? "length"
           : gw_turn_called(turn)            ? "tool_calls"
                                             : "stop";
}

void gw_chat_put_counts(base_buf *out, const eng_usage *usage)
{
    base_buf_printf(
        out,
        "\"usage\":{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"total_tokens\":%llu,"
        "\"prompt_tokens_details\":{\"cached_tokens\":%u,\"cache_write_tokens\":%u,\"audio_"
        "tokens\":0},"
        "\"completion_tokens_details\":{\"reasoning_tokens\":%u,\"accepted_prediction_tokens\":%u,"
        "\"rejected_prediction_tokens\":%u,\"audio_tokens\":0}",
        usage->prompt_tokens, usage->output_tokens,
        (unsigned long long)usage->prompt_tokens + usage->output_tokens, usage->cached_tokens,
        usage->prompt_tokens - (uint32_t)base_min(usage->cached_tokens, usage->prompt_tokens),
        usage->reasoning_tokens, usage->predicted_accepted, usage->predicted_rejected);
}

void gw_chat_put_usage(const gw_turn *turn, base_buf *out)
{
    const eng_usage usage = gw_turn_usage(turn);
    gw_chat_put_counts(out, &usage);
    base_buf_puts(out, ",");
    gw_turn_extension(turn, out);
    base_buf_puts(out, "}");
}

static void finish_stream(gw_turn *turn)
{
    chat *c = state(turn);
    base_buf *out = begin_delta(turn);
    base_buf_puts(out, "{}");
    end_record(turn, true, finish_reason(turn));
    if (!gw_turn_all_told(turn))
        return;
    if (c->include_usage) {
        out = begin_record(turn);
        base_buf_puts(out, ",\"choices\":[],");
        gw_chat_put_usage(turn, out);
        base_buf_puts(out, "}\n\n");
        gw_write_record(turn, out);
    }
    gw_write_done(turn);
    gw_turn_stream_end(turn);
}

static void put_message(gw_turn *turn, base_buf *out)
{
    chat *c = state(turn);
    base_buf_puts(out, "\"message\":{\"role\":\"assistant\",\"content\":");
    if (turn->call_count && !turn->text.length)
        base_buf_puts(out, "null");
    else
        gw_put_text(out, &turn->text);
    base_buf_puts(out, ",\"refusal\":null,\"annotations\":[]");
    if (turn->reasoning.length) {
        base_buf_puts(out, ",\"reasoning_content\":");
        gw_put_text(out, &turn->reasoning);
        if (c->reasoning_too) {
            base_buf_puts(out, ",\"reasoning\":");
            gw_put_text(out, &turn->reasoning);
        }
    }
    gw_put_calls(out, turn);
    base_buf_puts(out, "}");
}

static void put_choice(gw_turn *turn, base_buf *out)
{
    chat *c = state(turn);
    base_buf_printf(out, "{\"index\":%u,\"finish_reason\":\"%s\",\"logprobs\":", turn->choice,
                    finish_reason(turn));
    if (c->logprobs) {
        base_buf_puts(out, "{\"content\":[");
        base_buf_add(out, c->list.entries.data ? c->list.entries.data : "", c->list.entries.length);
        base_buf_puts(out, "],\"refusal\":null},");
    } else {
        base_buf_puts(out, "null,");
    }
    put_message(turn, out);
    if (c->return_token_ids) {
        base_buf_puts(out, ",\"token_ids\":");
        gw_put_ids(out, turn->run + turn->lead, turn->run_count - turn->lead);
    }
    base_buf_puts(out, "}");
}

/* With the last of the choices. */
static void finish_whole(gw_turn *turn)
{
    if (!gw_turn_all_told(turn))
        return;
    turn = turn->first;
    chat *c = state(turn);
    base_buf *out = &c->record;
    base_buf_clear(out);
    base_buf_puts(out, "{");
    put_head(turn, out, "chat.completion");
    if (c->return_token_ids) {
        base_buf_puts(out, ",\"prompt_token_ids\":");
        gw_put_ids(out, turn->prompt.tokens, turn->prompt.token_count);
    }
    base_buf_puts(out, ",\"choices\":[");
    for (uint32_t i = 0; i < turn->choice_count; i++) {
        base_buf_puts(out, i ? "," : "");
        put_choice(turn->choices[i], out);
    }
    base_buf_puts(out, "],");
    gw_chat_put_usage(turn, out);
    base_buf_puts(out, "}");
    gw_turn_respond_json(turn, out);
}

static void finish(gw_turn *turn)
{
    if (turn->stream)
        finish_stream(turn);
    else
        finish_whole(turn);
}

static void fail(gw_turn *turn, const gw_error_row *row, const char *param, const char *message)
{
    /* Refused before it was read, it has no state, and no stream that needs one. */
    base_buf *record = state(turn) ? &state(turn)->record : NULL;
    gw_fail_plain(turn, record, row, param, message);
}

static void ping(gw_turn *turn)
{
    /* Comments reset the idle timers of sockets; some clients count parsed events only and may ask
     * for an empty delta. */
    if (state(turn)->keepalive_chunk) {
        uint32_t open = 0; /* a choice that has ended says nothing more */
        while (open + 1 < turn->choice_count && turn->choices[open]->is_told)
            open++;
        turn = turn->choices[open];
        base_buf *out = begin_delta(turn);
        base_buf_puts(out, "{}");
        end_record(turn, false, NULL);
        return;
    }
    gw_write_comment(turn);
}

void gw_chat_deinit(gw_turn *turn)
{
    chat *c = state(turn);
    base_buf_deinit(&c->head);
    base_buf_deinit(&c->record);
    base_buf_deinit(&c->ids);
    gw_logprobs_deinit(&c->list);
}

static const gw_dialect dialect = {
    .name = "chat",
    .route = "/v1/chat/completions",
    .parse = gw_chat_parse,
    .check = gw_chat_check,
    .choose = choose,
    .open = open_stream,
    .step = step,
    .part = part,
    .ending = ending,
    .finish = finish,
    .fail = fail,
    .ping = ping,
    .deinit = gw_chat_deinit,
};

void gw_api_chat_handle(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &dialect);
}
