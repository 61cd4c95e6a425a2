/* response_compact: see the header. Top: the items. Bottom: POST /v1/responses/compact.
 *
 * The call is a turn like others: the input as it is, so that its cached prefix counts, then a
 * request for a summary. Users' and systems' messages stay as they are, as the vendor has it; what
 * the assistant said, did and found becomes the summary. Read: what POST /v1/responses reads; tools
 * are for the prompt alone, none is called. Nothing of it is stored. */
#include "gateway/response_compact.h"

#include <string.h>

#include "engine/base/num.h"
#include "gateway/api_responses_internal.h"
#include "gateway/dialect.h"
#include "gateway/response_store.h"
#include "gateway/seal.h"

#define USE "whimbrel compaction 1"
#define SUMMARY_TOKENS 2048 /* at most, unless max_output_tokens says otherwise */
#define SUMMARY_TOKENS_MIN 8

static const char intro[] =
    "The conversation before this point was replaced by this summary of it, "
    "written by the assistant:\n\n";
static const char missing[] = "The conversation before this point was compacted by another server "
                              "and cannot be read here.";

static const char request_text[] =
    "Write a summary of this conversation that will take its place, so that you can go on from it "
    "alone. Say what the user wants, what was decided, done and found, with the exact names, "
    "paths, "
    "values and errors that matter, and what is still open. Write the summary and nothing else.";

/* One message; `text` in the arena. */
static base_code add(gw_item_list *list, eng_text text, base_err *err)
{
    GW_TRY(gw_items_add(list, ENG_ROLE_USER, text, err));
    list->sealed[list->count - 1].compacted = true;
    return BASE_OK;
}

base_code gw_compaction_read(gw_item_list *list, const json_t *item, const char *path,
                             base_err *err)
{
    gw_turn *turn = list->turn;
    eng_text sealed = {0}, text;
    GW_TRY(gw_read_text(&sealed, item, path, "encrypted_content", err));
    if (!sealed.length || !gw_seal_is_ours(sealed))
        return add(list, (eng_text){missing, sizeof missing - 1}, err);
    base_buf out;
    base_buf_init(&out, 0);
    base_buf_puts(&out, intro);
    base_code code = gw_seal_unwrap(turn->app->seal, &out, USE, turn->identity.tenant,
                                    (eng_text){"", 0}, sealed, NULL);
    if (code) {
        char param[GW_PATH_BYTES];
        gw_name_path(param, "%s.encrypted_content", path);
        base_buf_deinit(&out);
        return code == BASE_NOMEM
                   ? gw_no_memory(err)
                   : gw_turn_reject(
                         turn, err, 400, "invalid_request_error", "invalid_encrypted_content",
                         param, "%s could not be verified: it was changed or is another's", param);
    }
    GW_TRY(gw_keep(turn, &text, &out, err));
    return add(list, text, err);
}

bool gw_compaction_wrote(eng_text text)
{
    const size_t length = sizeof intro - 1;
    return text.length >= length && memcmp(text.data, intro, length) == 0;
}

static bool put_compaction(base_buf *out, const gw_app *app, int64_t tenant, const char *id,
                           eng_text summary)
{
    base_buf_printf(out, "{\"id\":\"%s\",\"type\":\"compaction\",\"encrypted_content\":\"", id);
    bool good = !gw_seal_wrap(app->seal, out, USE, tenant, (eng_text){"", 0}, summary.data,
                              summary.length, NULL);
    base_buf_puts(out, "\"}");
    return good && !out->failed;
}

/* ---- making one ---- */

static gw_responses *state(gw_turn *turn)
{
    return turn->state_of_dialect;
}

static base_code parse(gw_turn *turn, base_err *err)
{
    GW_TRY(gw_responses_parse(turn, err));
    gw_responses_look_on(turn);
    eng_request *request = &turn->request;
    request->tool_choice = ENG_TOOL_NONE;
    request->sampling.min_tokens =
        base_max(request->sampling.min_tokens, (uint32_t)SUMMARY_TOKENS_MIN);
    if (!request->max_tokens)
        request->max_tokens = SUMMARY_TOKENS;
    return BASE_OK;
}

/* Behind each a comma. */
static void put_retained(base_buf *out, const gw_item_list *list, uint32_t from)
{
    for (uint32_t i = from; i < list->count; i++) {
        const eng_item *item = &list->items[i];
        bool user = item->role == ENG_ROLE_USER;
        if ((!user && item->role != ENG_ROLE_SYSTEM) || list->sealed[i].compacted)
            continue;
        base_buf_printf(
            out,
            "{\"id\":\"%s\",\"type\":\"message\",\"status\":\"completed\",\"role\":\"%s\","
            "\"content\":[{\"type\":\"input_text\",\"text\":",
            gw_id_mint("msg_").text, user ? "user" : "system");
        gw_put_string(out, item->text.data, item->text.length);
        base_buf_puts(out, "}]},");
    }
}

static base_code load(gw_turn *turn, base_err *err)
{
    gw_responses *r = state(turn);
    GW_TRY(gw_responses_load(turn, err));
    bool instructed = json_string_length(json_object_get(turn->json, "instructions")) > 0;
    put_retained(&r->retained, &r->list, instructed ? 1 : 0);
    GW_TRY(gw_items_add(&r->list, ENG_ROLE_USER, (eng_text){request_text, sizeof request_text - 1},
                        err));
    turn->items = r->list.items;
    turn->chat.items = r->list.items;
    turn->chat.item_count = r->list.count;
    return r->retained.failed ? gw_no_memory(err) : BASE_OK;
}

static void ignore(gw_turn *turn, const eng_part *part)
{
    (void)turn;
    (void)part;
}

static bool is_blank(const base_buf *text)
{
    size_t at = 0;
    while (at < text->length && strchr(" \t\r\n", text->data[at]))
        at++;
    return at == text->length;
}

static void finish(gw_turn *turn)
{
    gw_responses *r = state(turn);
    base_buf *out = &r->view.scratch;
    if (is_blank(&turn->text)) {
        static const gw_error_row row = {500, "server_error", "compaction_failed", 0, -1};
        gw_turn_respond_error(turn, &row, NULL,
                              "the model wrote no summary; nothing was compacted");
        return;
    }
    base_buf_clear(out);
    base_buf_printf(out,
                    "{\"id\":\"%s\",\"object\":\"response.compaction\",\"created_at\":%lld,"
                    "\"output\":[",
                    turn->response.text, (long long)(turn->created_ms / 1000));
    base_buf_add(out, r->retained.data ? r->retained.data : "", r->retained.length);
    if (!put_compaction(out, turn->app, turn->identity.tenant, gw_id_mint("cmp_").text,
                        (eng_text){turn->text.data, turn->text.length})) {
        gw_error_row row = gw_error_map(BASE_NOMEM);
        gw_turn_respond_error(turn, &row, NULL, "no memory to seal the summary");
        return;
    }
    gw_responses_put_usage(&r->usage, turn);
    base_buf_printf(out, "],\"usage\":%s}", r->usage.failed ? "null" : r->usage.data);
    gw_turn_respond_json(turn, out);
}

static const gw_dialect dialect = {
    .name = GW_RESPONSES,
    .route = "/v1/responses/compact",
    .parse = parse,
    .load = load,
    .check = gw_responses_check,
    .part = ignore,
    .finish = finish,
    .fail = gw_responses_fail,
    .deinit = gw_responses_deinit,
};

void gw_api_responses_compact(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &dialect);
}
