#include "gateway/session_export.h"

#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/num.h"
#include "gateway/api_chat.h"
#include "gateway/conf.h"
#include "gateway/responses_item.h"
#include "gateway/seal.h"
#include "gateway/session_turn.h"

#define FORMAT "whimbrel.session/1"
#define SEAL_USE "session export 1"
#define WHOLE_PATH 100000           /* turns */
#define TURN_ARENA_BYTES (1u << 30) /* tokens of one turn, inherited ones included */
#define TEMPLATE_BYTES 32

/* ---- numbers of the sealed content: 32 bits, the lowest byte first ---- */

static void put_number(base_buf *out, uint32_t n)
{
    uint8_t bytes[4] = {(uint8_t)n, (uint8_t)(n >> 8), (uint8_t)(n >> 16), (uint8_t)(n >> 24)};
    base_buf_add(out, bytes, sizeof bytes);
}

static void put_tokens(base_buf *out, const int32_t *tokens, uint32_t count)
{
    put_number(out, count);
    for (uint32_t i = 0; i < count; i++)
        put_number(out, (uint32_t)tokens[i]);
}

typedef struct reader {
    const uint8_t *at, *end;
    bool broken;
} reader;

static uint32_t get_number(reader *r)
{
    if (r->end - r->at < 4) {
        r->broken = true;
        return 0;
    }
    const uint8_t *b = r->at;
    r->at += 4;
    return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

/* Tokens that are not in the vocabulary break it. */
static int32_t *get_tokens(reader *r, uint32_t *count, uint32_t vocab, base_arena *arena)
{
    *count = get_number(r);
    if (r->broken || (size_t)(r->end - r->at) / 4 < *count) {
        r->broken = true;
        return NULL;
    }
    int32_t *tokens = base_arena_alloc(arena, base_max((size_t)*count * sizeof *tokens, 1));
    for (uint32_t i = 0; tokens && i < *count; i++) {
        uint32_t token = get_number(r);
        r->broken |= token >= vocab;
        tokens[i] = (int32_t)token;
    }
    r->broken |= tokens == NULL;
    return tokens;
}

/* What the tokens belong to, in a form that does not depend on how a client writes JSON. */
static base_code bound_text(eng_text *out, const json_t *document, base_err *err)
{
    static const char *const members[] = {"config", "fronts", "items", "turns"};
    json_t *bound = json_object();
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        json_object_set(bound, members[i], json_object_get(document, members[i]));
    out->data = json_dumps(bound, JSON_COMPACT | JSON_SORT_KEYS);
    out->length = out->data ? strlen(out->data) : 0;
    json_decref(bound);
    return out->data ? BASE_OK : gw_no_memory(err);
}

/* ---- export ---- */

typedef struct writer {
    gw_app *app;
    base_buf fronts, items, turns, tokens;
    uint32_t front_count;
    gw_digest *roots; /* of the fronts */
    bool exact;       /* every turn has its tokens */
    int32_t *before;  /* the last turn's prompt and run */
    uint32_t before_count;
    json_t *calls; /* of the item before */
} writer;

static void put_items(writer *w, const gw_path_turn *turn)
{
    for (uint32_t i = 0; i < turn->item_count; i++) {
        base_buf_puts(&w->items, w->items.length ? "," : "");
        gw_put_turn_item(&w->items, turn->items[i], &w->calls);
    }
}

static base_code put_front(writer *w, uint32_t *index, const gw_head *head, base_err *err)
{
    *index = 0;
    while (*index < w->front_count &&
           memcmp(&w->roots[*index], &head->root, sizeof head->root) != 0)
        ++*index;
    if (*index < w->front_count)
        return BASE_OK;
    gw_digest *more = realloc(w->roots, (w->front_count + 1) * sizeof *more);
    if (!more)
        return gw_no_memory(err);
    w->roots = more;
    w->roots[w->front_count++] = head->root;
    base_buf_puts(&w->fronts, *index ? "," : "");
    base_buf_puts(&w->fronts, head->front ? head->front : "{}");
    return BASE_OK;
}

/* Own part of the prompt behind what the turn before spells already, then the run. */
static base_code put_turn_tokens(writer *w, const gw_head *head, base_err *err)
{
    uint32_t prompt_count = head->prompt_count + head->lead, base = w->before_count;
    uint32_t total = head->prompt_count + head->run_count;
    int32_t *all = malloc(base_max((size_t)total * sizeof *all, 1));
    if (!all)
        return gw_no_memory(err);
    memcpy(all, head->prompt, head->prompt_count * sizeof *all);
    memcpy(all + head->prompt_count, head->run, head->run_count * sizeof *all);
    if (base > prompt_count || (base && memcmp(all, w->before, base * sizeof *all) != 0))
        base = 0;
    put_number(&w->tokens, base);
    put_tokens(&w->tokens, all + base, prompt_count - base);
    put_number(&w->tokens, head->lead);
    put_tokens(&w->tokens, head->run, head->run_count);
    free(w->before);
    w->before = all;
    w->before_count = total;
    return BASE_OK;
}

static base_code put_path_turn(writer *w, int64_t tenant, const gw_session_row *session,
                               const gw_path_turn *turn, base_err *err)
{
    base_arena *arena = base_arena_create(64u << 10, TURN_ARENA_BYTES);
    if (!arena)
        return gw_no_memory(err);
    gw_head head;
    uint32_t front;
    base_code code = gw_session_head(w->app->ledger, &head, tenant, session, turn->id.text,
                                     eng_get_info(w->app->engine)->template_id, arena, err);
    if (!code)
        code = put_front(w, &front, &head, err);
    w->exact &= !code && head.exact && turn->answered;
    if (!code && w->exact)
        code = put_turn_tokens(w, &head, err);
    if (!code) {
        put_items(w, turn);
        base_buf_printf(
            &w->turns, "%s{\"items\":%u,\"front\":%u,\"finish_reason\":%s,\"created_at\":%lld}",
            w->turns.length ? "," : "", turn->item_count, front,
            gw_turn_finish_json(turn->status, turn->finish), (long long)(turn->created_ms / 1000));
    }
    base_arena_destroy(arena);
    return code;
}

static base_code seal_tokens(writer *w, base_buf *out, int64_t tenant, base_err *err)
{
    eng_text bound;
    /* The document as far as it is: it must be closed to be read. */
    size_t length = out->length;
    base_buf_puts(out, "}");
    json_t *document = NULL;
    if (out->failed)
        return gw_no_memory(err);
    GW_TRY(gw_body_parse(&document, out->data, out->length, err));
    out->length = length;
    base_code code = bound_text(&bound, document, err);
    json_decref(document);
    if (code)
        return code;
    base_buf_puts(out, ",\"sealed_tokens\":\"");
    code = gw_seal_wrap(w->app->seal, out, SEAL_USE, tenant, bound, w->tokens.data,
                        w->tokens.length, err);
    base_buf_puts(out, "\"");
    free((char *)bound.data);
    return code;
}

static base_code write_document(writer *w, base_buf *out, int64_t tenant,
                                const gw_session_row *session, base_arena *arena, base_err *err)
{
    gw_path_turn *path;
    uint32_t count;
    bool more;
    const char *template_id = eng_get_info(w->app->engine)->template_id;
    base_buf_add(&w->tokens, template_id, TEMPLATE_BYTES);
    GW_TRY(gw_session_path(w->app->ledger, &path, &count, &more, tenant, session, NULL, NULL,
                           WHOLE_PATH, true, NULL, arena, err));
    w->exact = count > 0;
    for (uint32_t i = 0; i < count; i++)
        GW_TRY(put_path_turn(w, tenant, session, &path[i], err));
    base_buf_puts(out, "{\"format\":\"" FORMAT "\",\"model\":");
    base_buf_json_string(out, session->model, strlen(session->model));
    base_buf_printf(out, ",\"metadata\":");
    base_buf_puts(out, session->metadata ? session->metadata : "{}");
    base_buf_puts(out, ",\"config\":");
    base_buf_puts(out, session->config ? session->config : "{}");
    base_buf *const lists[] = {&w->fronts, &w->items, &w->turns};
    static const char *const names[] = {"fronts", "items", "turns"};
    for (int i = 0; i < 3; i++) {
        base_buf_printf(out, ",\"%s\":[", names[i]);
        base_buf_add(out, lists[i]->data ? lists[i]->data : "", lists[i]->length);
        base_buf_puts(out, "]");
        out->failed |= lists[i]->failed;
    }
    if (w->exact)
        GW_TRY(seal_tokens(w, out, tenant, err));
    else
        base_buf_puts(out, ",\"sealed_tokens\":null");
    base_buf_puts(out, "}");
    return out->failed || w->tokens.failed ? gw_no_memory(err) : BASE_OK;
}

base_code gw_session_export(gw_app *app, base_buf *out, int64_t tenant,
                            const gw_session_row *session, base_arena *arena, base_err *err)
{
    writer w = {.app = app};
    base_code code = write_document(&w, out, tenant, session, arena, err);
    base_buf_deinit(&w.fronts);
    base_buf_deinit(&w.items);
    base_buf_deinit(&w.turns);
    base_buf_deinit(&w.tokens);
    json_decref(w.calls);
    free(w.roots);
    free(w.before);
    return code;
}

/* ---- import ---- */

typedef struct importer {
    gw_app *app;
    const gw_identity *identity;
    gw_turn plan; /* for the readers of dialect.h and responses_item.h */
    json_t *stored;
    gw_item_list items;
    gw_root *fronts;
    uint32_t front_count;
    reader tokens;
    gw_import *out;
} importer;

/* Items that a turn could have brought; an assistant's may stand among them. */
static base_code read_items(importer *m, base_err *err)
{
    json_t *items;
    GW_TRY(gw_read_array(&items, m->plan.json, "", "items", err));
    size_t count = json_array_size(items);
    if (count > WHOLE_PATH)
        return base_fail_param(err, BASE_INVALID, "items", "items has %zu items, the limit is %d",
                               count, WHOLE_PATH);
    for (size_t i = 0; i < count; i++) {
        static const char *const roles[] = {"root", "system", "user", "assistant", "tool"};
        json_t *item = json_array_get(items, i);
        const char *role = json_string_value(json_object_get(item, "role"));
        const json_t *content = json_object_get(item, "content");
        bool known = false;
        for (size_t k = 0; role && k < sizeof roles / sizeof *roles; k++)
            known |= strcmp(role, roles[k]) == 0;
        if (!known || !json_is_string(content)) {
            char path[GW_PATH_BYTES];
            gw_name_path(path, "items[%zu].%s", i, known ? "content" : "role");
            return base_fail_param(err, BASE_INVALID, path, "%s is not what an export writes",
                                   path);
        }
        char *text = json_dumps(item, JSON_COMPACT);
        base_code code = text ? gw_items_add_stored(&m->items, text, err) : gw_no_memory(err);
        free(text);
        GW_TRY(code);
    }
    return BASE_OK;
}

static base_code read_front(importer *m, gw_root *out, const json_t *front, eng_text raw,
                            base_err *err)
{
    static const char *const modes[] = {"default", "enabled", "disabled", "adaptive"};
    const eng_info *info = eng_get_info(m->app->engine);
    const char *mode = json_string_value(json_object_get(front, "thinking"));
    const json_t *tools = json_object_get(front, "tools");
    eng_text list;
    *out = (gw_root){.tenant = m->identity->tenant,
                     .template_id = info->template_id,
                     .engine = m->app->engine,
                     .fingerprint = info->fingerprint,
                     .thinking = info->thinking};
    for (int i = 1; mode && i < 4; i++)
        if (strcmp(mode, modes[i]) == 0)
            out->thinking = (eng_thinking)i;
    if (json_string_length(json_object_get(front, "effort")))
        out->effort = gw_text_of_json(json_object_get(front, "effort"));
    out->tool_count = (uint32_t)json_array_size(tools);
    if (!out->tool_count || !gw_body_member(&list, raw.data, raw.length, "tools"))
        return BASE_OK;
    eng_text *texts = base_arena_calloc(m->plan.arena, out->tool_count, sizeof *texts);
    base_json array;
    if (!texts)
        return gw_no_memory(err);
    gw_raw_begin(&array, list);
    for (uint32_t i = 0; i < out->tool_count; i++)
        texts[i] = gw_raw_next(&array);
    out->tools = texts;
    return BASE_OK;
}

static base_code read_fronts(importer *m, base_err *err)
{
    json_t *fronts = json_object_get(m->plan.json, "fronts");
    eng_text raw;
    m->front_count = (uint32_t)json_array_size(fronts);
    m->fronts = base_arena_calloc(m->plan.arena, m->front_count + 1, sizeof *m->fronts);
    if (!m->fronts)
        return gw_no_memory(err);
    if (!m->front_count || !gw_body_member(&raw, m->plan.body, m->plan.body_length, "fronts"))
        return BASE_OK;
    base_json array;
    gw_raw_begin(&array, raw);
    for (uint32_t i = 0; i < m->front_count; i++)
        GW_TRY(read_front(m, &m->fronts[i], json_array_get(fronts, i), gw_raw_next(&array), err));
    return BASE_OK;
}

/* True if the document is as it was exported, to this tenant and for this template. */
static bool unseal(importer *m, base_buf *content)
{
    eng_text sealed = gw_text_of_json(json_object_get(m->plan.json, "sealed_tokens")), bound;
    const char *template_id = eng_get_info(m->app->engine)->template_id;
    if (!sealed.length || bound_text(&bound, m->plan.json, NULL))
        return false;
    base_code code =
        gw_seal_unwrap(m->app->seal, content, SEAL_USE, m->identity->tenant, bound, sealed, NULL);
    free((char *)bound.data);
    if (code || content->failed || content->length < TEMPLATE_BYTES ||
        memcmp(content->data, template_id, TEMPLATE_BYTES) != 0)
        return false;
    m->tokens = (reader){(const uint8_t *)content->data + TEMPLATE_BYTES,
                         (const uint8_t *)content->data + content->length, false};
    return true;
}

typedef struct waiting {
    gw_commit commit; /* first */
    sem_t done;
} waiting;

static void on_stored(gw_commit *commit)
{
    sem_post(&((waiting *)commit)->done);
}

/* Where the import stands: what the last turn left. */
typedef struct progress {
    uint32_t items; /* of the list */
    gw_head head;
    bool any;
} progress;

/* The ids of an answer's calls, as its turn would have told them. */
static base_code calls_told(importer *m, const char **out, uint32_t item, base_err *err)
{
    const json_t *items = json_object_get(m->plan.json, "items"),
                 *calls = json_object_get(json_array_get(items, item), "tool_calls");
    eng_text text;
    bool any = false;
    base_buf json;
    base_buf_init(&json, 0);
    if (!json_array_size(calls))
        return BASE_OK;
    for (size_t i = 0; i < json_array_size(calls); i++) {
        eng_text id = gw_text_of_json(json_object_get(json_array_get(calls, i), "id"));
        base_buf_puts(&json, i ? "," : "{\"calls\":[");
        base_buf_json_string(&json, id.data, id.length);
    }
    for (size_t i = 0; i < json_array_size(calls); i++) {
        if (!json_object_get(json_array_get(calls, i), "custom"))
            continue;
        base_buf_printf(&json, any ? ",%zu" : "],\"custom\":[%zu", i);
        any = true;
    }
    base_buf_puts(&json, "]}");
    GW_TRY(gw_keep(&m->plan, &text, &json, err));
    *out = text.data;
    return BASE_OK;
}

static base_code store_turn(importer *m, progress *at, const json_t *turn, base_err *err)
{
    const eng_info *info = eng_get_info(m->app->engine);
    uint32_t count = (uint32_t)json_integer_value(json_object_get(turn, "items"));
    uint32_t front = (uint32_t)json_integer_value(json_object_get(turn, "front"));
    const char *finish = json_string_value(json_object_get(turn, "finish_reason"));
    int64_t created = json_integer_value(json_object_get(turn, "created_at")) * 1000;
    base_arena *arena = m->plan.arena;
    uint32_t own, run_count, base = get_number(&m->tokens);
    int32_t *tokens = get_tokens(&m->tokens, &own, info->vocab, arena);
    uint32_t lead = get_number(&m->tokens);
    int32_t *run = get_tokens(&m->tokens, &run_count, info->vocab, arena);
    uint32_t before = at->head.prompt_count + at->head.run_count, prompt_count = base + own;
    if (m->tokens.broken || front >= m->front_count || !count ||
        count > m->items.count - at->items || (base && base != before) || lead > run_count ||
        lead > prompt_count)
        return base_fail(err, BASE_FORMAT, "the sealed tokens do not fit their turns");
    int32_t *prompt = base_arena_alloc(arena, base_max((size_t)prompt_count * sizeof *prompt, 1));
    if (!prompt)
        return gw_no_memory(err);
    if (base) {
        memcpy(prompt, at->head.prompt, at->head.prompt_count * sizeof *prompt);
        memcpy(prompt + at->head.prompt_count, at->head.run, at->head.run_count * sizeof *prompt);
    }
    if (own)
        memcpy(prompt + base, tokens, own * sizeof *prompt);
    uint32_t last = at->items + count - 1;
    eng_item *answer = &m->items.items[last];
    gw_match match;
    GW_TRY(gw_session_match(&match, &m->fronts[front], at->any ? &at->head : NULL, false,
                            m->items.items, last, at->items, arena, err));
    match.miss = GW_MISS_NONE;
    const char *told = NULL;
    GW_TRY(calls_told(m, &told, last, err));
    gw_id id = gw_id_mint("turn_");
    waiting w = {
        .commit = {.done = on_stored,
                   .retention = GW_RETAIN_KEPT,
                   .extra = GW_EXTRA_IMPORTED,
                   .turn = id.text,
                   .session = m->out->session.text,
                   .dialect = "sessions",
                   .model = info->name,
                   .fingerprint = info->fingerprint,
                   .numerics = info->numerics,
                   .moves_head = true,
                   .told = told,
                   .root = &m->fronts[front],
                   .match = &match,
                   .items = m->items.items,
                   .item_count = last,
                   .answer = *answer,
                   .splice = true,
                   .prompt = prompt,
                   .prompt_count = prompt_count,
                   .run = run,
                   .run_count = run_count,
                   .lead = lead,
                   .status = GW_TURN_COMPLETED,
                   .finish = !finish                             ? ENG_FINISH_STOP
                             : strcmp(finish, "tool_calls") == 0 ? ENG_FINISH_CALLS
                             : strcmp(finish, "length") == 0     ? ENG_FINISH_LENGTH
                                                                 : ENG_FINISH_STOP,
                   .usage = {.prompt_tokens = prompt_count, .output_tokens = run_count - lead},
                   .space = m->identity->salt,
                   .created_ms = created,
                   .ended_ms = base_wall_ms()}};
    sem_init(&w.done, 0, 0);
    if (!gw_ledger_commit(m->app->ledger, &w.commit)) {
        sem_destroy(&w.done);
        return base_fail(err, BASE_FULL, "the ledger's queue is full");
    }
    while (sem_wait(&w.done) != 0)
        ;
    sem_destroy(&w.done);
    if (!w.commit.stored)
        return base_fail(err, w.commit.err.code ? w.commit.err.code : BASE_IO, "%s",
                         w.commit.err.text);
    answer->tokens = run;
    answer->token_count = run_count;
    at->items += count;
    at->any = true;
    at->head = (gw_head){.turn = id,
                         .exact = true,
                         .prompt = prompt,
                         .prompt_count = prompt_count - lead,
                         .run = run,
                         .run_count = run_count,
                         .lead = lead};
    m->out->turns++;
    return BASE_OK;
}

static base_code make_session(importer *m, bool tokens, base_err *err)
{
    eng_text raw = {0}, items = {0};
    base_buf config;
    base_buf_init(&config, 0);
    if (tokens && gw_body_member(&raw, m->plan.body, m->plan.body_length, "config")) {
        base_buf_add(&config, raw.data, raw.length);
    } else {
        eng_text tools = {"[]", 2};
        if (gw_body_member(&raw, m->plan.body, m->plan.body_length, "config"))
            gw_body_member(&tools, raw.data, raw.length, "tools");
        base_buf_puts(&config, "{\"tools\":");
        base_buf_add(&config, tools.data, tools.length);
        if (gw_body_member(&items, m->plan.body, m->plan.body_length, "items")) {
            base_buf_puts(&config, ",\"items\":");
            base_buf_add(&config, items.data, items.length);
        }
        base_buf_puts(&config, "}");
    }
    eng_text text;
    GW_TRY(gw_keep(&m->plan, &text, &config, err));
    m->out->session = gw_id_mint("sess_");
    gw_session_new fresh = {.tenant = m->identity->tenant,
                            .id = m->out->session.text,
                            .model = m->plan.model,
                            .metadata = m->plan.metadata,
                            .config = text.data,
                            .created_ms = base_wall_ms(),
                            .count_max = m->app->conf->sessions_count_max,
                            .staged = true};
    return gw_session_create(m->app->ledger, &fresh, err);
}

/* The tools are checked as when a session is made. */
static base_code check_tools(importer *m, base_err *err)
{
    json_t *config;
    eng_text raw, tools = {"[]", 2};
    GW_TRY(gw_read_object(&config, m->plan.json, "", "config", err));
    if (!config || !gw_body_member(&raw, m->plan.body, m->plan.body_length, "config"))
        return BASE_OK;
    gw_body_member(&tools, raw.data, raw.length, "tools");
    json_object_set(m->plan.json, "tools", json_object_get(config, "tools"));
    base_code code = gw_read_tools(&m->plan, &gw_chat_tools, tools, err);
    json_object_del(m->plan.json, "tools");
    return code;
}

static base_code import(importer *m, base_err *err)
{
    const char *format = NULL;
    base_buf content;
    GW_TRY(gw_parse_body(&m->plan, err));
    GW_TRY(gw_read_name(&format, m->plan.json, "", "format", GW_NAME_BYTES_MAX, err));
    if (!format || strcmp(format, FORMAT) != 0)
        return base_fail_param(err, BASE_INVALID, "format", "format must be " FORMAT);
    /* A session from elsewhere goes on under what is served here. */
    if (gw_turn_check_model(&m->plan, NULL))
        m->plan.model = eng_get_info(m->app->engine)->name;
    GW_TRY(gw_read_metadata(&m->plan, err));
    GW_TRY(check_tools(m, err));
    GW_TRY(read_items(m, err));
    GW_TRY(read_fronts(m, err));
    m->out->items = m->items.count;
    base_buf_init(&content, 0);
    m->out->tokens = unseal(m, &content);
    base_code code = make_session(m, m->out->tokens, err);
    bool made = !code;
    const json_t *turns = json_object_get(m->plan.json, "turns");
    progress at = {0};
    for (size_t i = 0; !code && m->out->tokens && i < json_array_size(turns); i++)
        code = store_turn(m, &at, json_array_get(turns, i), err);
    base_buf_deinit(&content);
    gw_ledger *ledger = m->app->ledger;
    const char *id = m->out->session.text;
    if (!code)
        code = gw_session_publish(ledger, m->identity->tenant, id, m->app->conf->sessions_count_max,
                                  err);
    if (code && made)
        gw_session_discard(ledger, m->identity->tenant, id, NULL);
    return code;
}

base_code gw_session_import(gw_app *app, gw_import *out, const gw_identity *identity, char *body,
                            size_t length, base_arena *arena, base_err *err)
{
    *out = (gw_import){0};
    importer m = {.app = app,
                  .identity = identity,
                  .plan = {.app = app, .arena = arena, .body = body, .body_length = length},
                  .stored = json_array(),
                  .out = out};
    m.items = (gw_item_list){.turn = &m.plan, .stored = m.stored};
    base_code code = import(&m, err);
    json_decref(m.plan.json);
    json_decref(m.stored);
    return code;
}
