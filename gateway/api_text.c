/* api_text: see the header. Top: bodies (worker). Bottom: answers (loop).
 *
 * A completion's prompt is a string, which is tokenized with the special tokens off like all text
 * of clients, or a list of token ids; ids of special tokens need the scope raw, as they could play
 * any role of a conversation. Logprobs, echo and streams in the vendor's old form. Sampling is the
 * chat dialect's. Several prompts, each with `n` answers, are choices of one turn, in that order;
 * best_of beyond n, which would be answers that nobody sees, and suffix are refused by name.
 *
 * echo with logprobs is how texts are scored (lm-evaluation-harness): the prompt's tokens have
 * entries like the answer's, the first one null, and max_tokens 0 asks for nothing else. The one
 * who runs a prompt keeps its entries for all answers to it. The token that ended an answer has its
 * entry, as at the vendor's: who scores with max_tokens 1 drops the last one unseen. */
#include "gateway/api_text.h"

#include <string.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/api_chat.h"
#include "gateway/conf.h"
#include "gateway/dialect.h"

#define LOGPROBS_MAX 5           /* the vendor's limit */
#define OUTPUT_TOKENS_DEFAULT 16 /* the vendor's default */
#define TOKENS_MAX (1u << 26)    /* of a text that is only counted; bodies are bounded */
#define CHOICES_MAX 128          /* prompts, each with all its answers */
/* Of echoed prompts with logprobs, all answers together; an entry takes about 250 bytes. */
#define SCORED_TOKENS_MAX (1u << 18)

/* Parallel lists of the wire, commas between their entries. */
typedef struct lists {
    base_buf names, values, tops, offsets;
} lists;

typedef struct text {
    eng_text prompt; /* NULL data: ids were sent */
    /* The list of prompts that were sent, NULL for a single one; answers to each. The first's. */
    const json_t *prompts;
    uint32_t each;
    int32_t *tokens;
    uint32_t token_count;
    bool echo, include_usage, logprobs, return_ids;
    bool begun;      /* the choice's first record is out */
    base_buf bytes;  /* of the prompt's ids, to echo or to give back */
    base_buf record; /* scratch */
    base_buf ids;    /* of a stream's output, commas between, that no record has carried yet */
    lists fresh;     /* entries that no record has carried yet, or all of them if not streamed */
    size_t offset;   /* characters before the next token */
    /* ---- of who runs the prompt, where it is scored ---- */
    lists scores;
    uint32_t scored;          /* its tokens that have entries */
    size_t prompt_characters; /* that those spell */
    uint64_t scored_total;    /* the first's: of all prompts, each for all its answers */
} text;

static text *state(gw_turn *turn)
{
    return turn->state_of_dialect;
}

/* ---- entries ---- */

static size_t characters(const char *bytes, size_t length)
{
    size_t count = 0;
    for (size_t i = 0; i < length; i++)
        count += ((unsigned char)bytes[i] & 0xC0) != 0x80;
    return count;
}

/* `"TOKEN":LOGPROB`; bytes that are no text in the vendor's notation. */
static void put_token(gw_turn *turn, base_buf *out, int32_t token, size_t *count)
{
    base_buf bytes;
    base_buf_init(&bytes, 0);
    eng_detokenize(turn->app->engine, &bytes, &token, 1, NULL);
    *count = characters(bytes.data, bytes.length);
    if (base_utf8_valid(bytes.data ? bytes.data : "", bytes.length)) {
        base_buf_json_string(out, bytes.data ? bytes.data : "", bytes.length);
    } else {
        base_buf_puts(out, "\"bytes:");
        for (size_t i = 0; i < bytes.length; i++)
            base_buf_printf(out, "\\\\x%02x", (unsigned char)bytes.data[i]);
        base_buf_puts(out, "\"");
    }
    out->failed |= bytes.failed;
    base_buf_deinit(&bytes);
}

/* The next entry; NULL `logprob`: of a prompt's first token, which nothing comes before. */
static void add_entry(gw_turn *turn, lists *to, size_t *offset, int32_t token,
                      const eng_logprob *logprob)
{
    const char *comma = to->names.length ? "," : "";
    size_t count, ignored;
    base_buf_puts(&to->names, comma);
    put_token(turn, &to->names, token, &count);
    base_buf_printf(&to->offsets, "%s%zu", comma, *offset);
    *offset += count;
    if (!logprob) {
        base_buf_puts(&to->values, "null");
        base_buf_puts(&to->tops, "null");
        return;
    }
    base_buf_printf(&to->values, "%s%.6g", comma, gw_shown_logprob(logprob->logprob));
    base_buf_printf(&to->tops, "%s{", comma);
    bool among = false;
    uint32_t top = (uint32_t)base_min(logprob->top_count, turn->request.sampling.top_logprobs);
    for (uint32_t i = 0; i < top; i++) {
        base_buf_puts(&to->tops, i ? "," : "");
        put_token(turn, &to->tops, logprob->top_token[i], &ignored);
        base_buf_printf(&to->tops, ":%.6g", gw_shown_logprob(logprob->top_logprob[i]));
        among |= logprob->top_token[i] == token;
    }
    if (!among) { /* the one that was taken is always there */
        base_buf_puts(&to->tops, top ? "," : "");
        put_token(turn, &to->tops, token, &ignored);
        base_buf_printf(&to->tops, ":%.6g", gw_shown_logprob(logprob->logprob));
    }
    base_buf_puts(&to->tops, "}");
}

static void add_scored(gw_turn *turn, int32_t token, const eng_logprob *logprob)
{
    text *t = state(turn);
    add_entry(turn, &t->scores, &t->prompt_characters, token, logprob);
    t->scored++;
}

/* All of the prompt is scored; its end is where the answer begins. */
static bool has_scores(gw_turn *turn)
{
    return state(turn->leader)->scored == turn->prompt.token_count;
}

static void clear_lists(lists *l)
{
    base_buf *bufs[] = {&l->names, &l->values, &l->tops, &l->offsets};
    for (size_t i = 0; i < sizeof bufs / sizeof *bufs; i++)
        base_buf_clear(bufs[i]);
}

static void free_lists(lists *l)
{
    base_buf *bufs[] = {&l->names, &l->values, &l->tops, &l->offsets};
    for (size_t i = 0; i < sizeof bufs / sizeof *bufs; i++)
        base_buf_deinit(bufs[i]);
}

/* ---- reading ---- */

static base_code make_state(gw_turn *turn, base_err *err)
{
    turn->state_of_dialect = base_arena_calloc(turn->arena, 1, sizeof(text));
    return turn->state_of_dialect ? BASE_OK : gw_no_memory(err);
}

/* One prompt; `name` is its place in the body. */
static base_code read_prompt(gw_turn *turn, const json_t *prompt, const char *name, base_err *err)
{
    text *t = state(turn);
    if (json_is_string(prompt)) {
        t->prompt = gw_text_of_json(prompt);
        return BASE_OK;
    }
    if (!json_is_array(prompt))
        return gw_wrong_type("", name, "a string or an array of token ids", prompt, err);
    return gw_read_tokens(turn, &t->tokens, &t->token_count, prompt, name, err);
}

static base_code read_prompts(gw_turn *turn, base_err *err)
{
    text *t = state(turn);
    const json_t *prompt = json_object_get(turn->json, "prompt"),
                 *first = json_array_get(prompt, 0);
    int64_t n = 1, best = 1;
    bool best_of = false;
    GW_TRY(gw_read_int(&n, NULL, turn->json, "", "n", 1, turn->app->conf->limits_n_max, err));
    GW_TRY(gw_read_int(&best, &best_of, turn->json, "", "best_of", 1, CHOICES_MAX, err));
    if (best_of && best != n)
        return gw_unsupported(err, "best_of", "best_of %lld is not n, which is %lld",
                              (long long)best, (long long)n);
    t->each = (uint32_t)n;
    bool many = json_is_string(first) || json_is_array(first);
    size_t count = many ? json_array_size(prompt) : 1;
    if (count > CHOICES_MAX / (size_t)n)
        return base_fail_param(err, BASE_INVALID, "prompt",
                               "prompt has %zu prompts, the limit is %lld with n %lld", count,
                               CHOICES_MAX / (long long)n, (long long)n);
    turn->answer_count = (uint32_t)(count * (size_t)n);
    t->prompts = count > 1 ? prompt : NULL;
    return read_prompt(turn, many ? first : prompt, count > 1 ? "prompt[0]" : "prompt", err);
}

static bool is_scored(gw_turn *turn)
{
    return state(turn)->echo && state(turn)->logprobs;
}

static base_code read_completion(gw_turn *turn, base_err *err)
{
    text *t = state(turn);
    const json_t *json = turn->json;
    int64_t number = 0, limit = OUTPUT_TOKENS_DEFAULT;
    json_t *options;
    eng_text suffix = {0};
    GW_TRY(gw_read_int(&limit, NULL, json, "", "max_tokens", 0, INT64_MAX, err));
    turn->request.max_tokens = (uint32_t)base_min(limit, (int64_t)UINT32_MAX);
    turn->request.prefill_only = limit == 0;
    GW_TRY(gw_read_text(&suffix, json, "", "suffix", err));
    if (suffix.length)
        return base_fail_param(err, BASE_UNSUPPORTED, "suffix",
                               "suffix: this model writes on, it does not fill in");
    GW_TRY(gw_read_bool(&t->echo, NULL, json, "", "echo", err));
    GW_TRY(gw_read_int(&number, &t->logprobs, json, "", "logprobs", 0, LOGPROBS_MAX, err));
    turn->request.prompt_logprobs = is_scored(turn);
    turn->request.sampling.logprobs = t->logprobs;
    turn->request.sampling.top_logprobs = (uint32_t)number;
    GW_TRY(gw_read_bool(&t->return_ids, NULL, gw_holder(turn, "return_token_ids"), "",
                        "return_token_ids", err));
    turn->exact_steps = t->logprobs || t->return_ids;
    GW_TRY(gw_read_bool(&turn->stream, NULL, json, "", "stream", err));
    GW_TRY(gw_read_object(&options, json, "", "stream_options", err));
    if (options)
        GW_TRY(
            gw_read_bool(&t->include_usage, NULL, options, "stream_options", "include_usage", err));
    return gw_read_label(turn, err);
}

static base_code parse_completion(gw_turn *turn, base_err *err)
{
    GW_TRY(make_state(turn, err));
    turn->response = gw_id_mint("cmpl-");
    GW_TRY(gw_parse_body(turn, err));
    GW_TRY(read_prompts(turn, err));
    GW_TRY(read_completion(turn, err));
    GW_TRY(gw_read_sampling(turn, err));
    turn->request.parse = ENG_PARSE_RAW;
    turn->chat.no_generation_prompt =
        true; /* so the ledger keeps it, but as no one's turn to say */
    return BASE_OK;
}

static void name_prompt(const gw_turn *turn, char name[GW_PATH_BYTES])
{
    const text *first = state((gw_turn *)turn->first);
    gw_name_path(name, first->prompts ? "prompt[%u]" : "prompt", turn->choice / first->each);
}

static bool same_tokens(const int32_t *a, uint32_t a_count, const int32_t *b, uint32_t b_count)
{
    return a_count == b_count && memcmp(a, b, a_count * sizeof *a) == 0;
}

/* An id is special if only the tokenizer with specials on gives it for its text. If both ways agree
 * on the whole text there is none, which one look settles for nearly every prompt. */
static base_code check_scope(gw_turn *turn, base_err *err)
{
    const eng_engine *engine = turn->app->engine;
    text *t = state(turn);
    if (turn->identity.scopes & GW_SCOPE_RAW)
        return BASE_OK;
    int32_t *plain, *special;
    uint32_t plain_count, special_count;
    eng_text all = {t->bytes.data ? t->bytes.data : "", t->bytes.length};
    GW_TRY(eng_tokenize(engine, &plain, &plain_count, all, false, TOKENS_MAX, turn->arena, err));
    GW_TRY(eng_tokenize(engine, &special, &special_count, all, true, TOKENS_MAX, turn->arena, err));
    if (same_tokens(plain, plain_count, special, special_count))
        return BASE_OK;
    base_code code = BASE_OK;
    char name[GW_PATH_BYTES];
    name_prompt(turn, name);
    base_buf one;
    base_buf_init(&one, 0);
    for (uint32_t i = 0; i < t->token_count && !code; i++) {
        base_buf_clear(&one);
        code = eng_detokenize(engine, &one, &t->tokens[i], 1, err);
        eng_text bytes = {one.data ? one.data : "", one.length};
        if (!code)
            code = eng_tokenize(engine, &special, &special_count, bytes, true, TOKENS_MAX,
                                turn->arena, err);
        if (code || !same_tokens(special, special_count, &t->tokens[i], 1))
            continue;
        code =
            eng_tokenize(engine, &plain, &plain_count, bytes, false, TOKENS_MAX, turn->arena, err);
        if (!code && !same_tokens(plain, plain_count, &t->tokens[i], 1))
            code = base_fail_param(err, BASE_DENIED, name,
                                   "%s[%u] is the special token %d, which needs a key with the "
                                   "scope raw",
                                   name, i, t->tokens[i]);
    }
    base_buf_deinit(&one);
    return code;
}

/* The ids of text or of a list, and what a list spells. */
static base_code make_prompt(gw_turn *turn, base_err *err)
{
    text *t = state(turn);
    eng_prompt *prompt = &turn->prompt;
    if (t->prompt.data)
        return eng_tokenize(turn->app->engine, &prompt->tokens, &prompt->token_count, t->prompt,
                            false, TOKENS_MAX, turn->arena, err);
    prompt->tokens = t->tokens;
    prompt->token_count = t->token_count;
    return eng_detokenize(turn->app->engine, &t->bytes, t->tokens, t->token_count, err);
}

/* Of the prompt that this turn runs; what is told of it is bounded. */
static base_code begin_scores(gw_turn *turn, base_err *err)
{
    text *first = state(turn->first);
    first->scored_total += (uint64_t)turn->prompt.token_count * first->each;
    if (first->scored_total > SCORED_TOKENS_MAX)
        return base_fail_param(err, BASE_INVALID, "prompt",
                               "prompt has more than %u tokens, all answers together, which is "
                               "the limit for echo with logprobs",
                               SCORED_TOKENS_MAX);
    add_scored(turn, turn->prompt.tokens[0], NULL);
    return BASE_OK;
}

static base_code render_completion(gw_turn *turn, base_err *err)
{
    uint32_t window = eng_get_info(turn->app->engine)->context_max;
    char name[GW_PATH_BYTES];
    name_prompt(turn, name);
    GW_TRY(make_prompt(turn, err));
    if (!turn->prompt.token_count)
        return base_fail_param(err, BASE_INVALID, name, "%s must not be empty", name);
    if (turn->prompt.token_count >= window)
        return base_fail_param(err, BASE_TOO_LONG, name,
                               "This model's maximum context length is %u tokens. However, you "
                               "requested %u tokens in the prompt. Please reduce its length.",
                               window, turn->prompt.token_count);
    if (!state(turn)->prompt.data)
        GW_TRY(check_scope(turn, err));
    return is_scored(turn) ? begin_scores(turn, err) : BASE_OK;
}

static base_code choose(gw_turn *turn, base_err *err)
{
    const text *first = state(turn->first);
    GW_TRY(make_state(turn, err));
    text *t = state(turn);
    t->echo = first->echo;
    t->include_usage = first->include_usage;
    t->logprobs = first->logprobs;
    t->return_ids = first->return_ids;
    uint32_t prompt = turn->choice / first->each;
    if (turn->choice % first->each) {
        turn->leader = turn->first->choices[prompt * first->each];
        turn->prompt = turn->leader->prompt;
        turn->request.prompt_logprobs = false;
        return BASE_OK;
    }
    turn->leader = turn;
    char name[GW_PATH_BYTES];
    name_prompt(turn, name);
    GW_TRY(read_prompt(turn, json_array_get(first->prompts, prompt), name, err));
    return render_completion(turn, err);
}

/* ---- writing ---- */

/* Bytes that tokens spell may end inside a character, or be none. */
static void put_bytes(base_buf *out, const char *bytes, size_t length)
{
    base_buf whole;
    base_buf_init(&whole, 0);
    for (size_t at = 0; at < length;) {
        size_t width = base_utf8_char(bytes + at, length - at, NULL);
        base_buf_add(&whole, width ? bytes + at : GW_REPLACEMENT, width ? width : 3);
        at += width ? width : 1;
    }
    base_buf_json_string(out, whole.data ? whole.data : "", whole.length);
    out->failed |= whole.failed;
    base_buf_deinit(&whole);
}

static void put_echo(gw_turn *turn, base_buf *out)
{
    const text *t = state(turn->leader);
    if (t->prompt.data)
        base_buf_json_string(out, t->prompt.data, t->prompt.length);
    else
        put_bytes(out, t->bytes.data, t->bytes.length);
}

/* The prompt's entries and the answer's; `prompt` NULL: the answer's alone. */
static void put_logprobs(base_buf *out, const lists *prompt, const lists *fresh)
{
    static const char *const names[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    static const lists none = {0};
    const lists *from = prompt ? prompt : &none;
    const base_buf *const all[][2] = {{&from->names, &fresh->names},
                                      {&from->values, &fresh->values},
                                      {&from->tops, &fresh->tops},
                                      {&from->offsets, &fresh->offsets}};
    for (size_t i = 0; i < 4; i++) {
        const base_buf *before = all[i][0], *after = all[i][1];
        base_buf_printf(out, "%s\"%s\":[", i ? "]," : "{", names[i]);
        base_buf_add(out, before->data ? before->data : "", before->length);
        base_buf_puts(out, before->length && after->length ? "," : "");
        base_buf_add(out, after->data ? after->data : "", after->length);
        out->failed |= before->failed || after->failed;
    }
    base_buf_puts(out, "]}");
}

/* `data: {HEAD,"choices":[{"index":N,"text":` */
static base_buf *begin_record(gw_turn *turn)
{
    base_buf *out = &state(turn)->record;
    base_buf_clear(out);
    base_buf_puts(out, "data: {");
    gw_put_head(turn, out, "text_completion");
    base_buf_printf(out, ",\"choices\":[{\"index\":%u,\"text\":", turn->choice);
    return out;
}

static void put_prompt_ids(const gw_turn *turn, base_buf *out)
{
    base_buf_puts(out, ",\"prompt_token_ids\":");
    gw_put_ids(out, turn->prompt.tokens, turn->prompt.token_count);
}

/* `prompt`: the record brings it, with these entries, if any. */
static void end_record(gw_turn *turn, const lists *prompt, const char *finish)
{
    text *t = state(turn);
    base_buf_puts(&t->record, ",\"logprobs\":");
    if (t->fresh.names.length || prompt)
        put_logprobs(&t->record, prompt, &t->fresh);
    else
        base_buf_puts(&t->record, "null");
    clear_lists(&t->fresh);
    if (t->return_ids && !t->begun)
        put_prompt_ids(turn, &t->record);
    t->begun = true;
    if (t->ids.length) {
        base_buf_puts(&t->record, ",\"token_ids\":[");
        base_buf_add(&t->record, t->ids.data, t->ids.length);
        base_buf_puts(&t->record, "]");
        base_buf_clear(&t->ids);
    }
    if (finish)
        base_buf_printf(&t->record, ",\"finish_reason\":\"%s\"}]", finish);
    else
        base_buf_puts(&t->record, ",\"finish_reason\":null}]");
    base_buf_puts(&t->record, t->include_usage ? ",\"usage\":null}\n\n" : "}\n\n");
    gw_write_record(turn, &state(turn)->record);
}

/* Of a stream that scores its prompt. */
static void tell_echo(gw_turn *turn)
{
    state(turn)->offset = state(turn->leader)->prompt_characters;
    if (!turn->stream || !gw_turn_heard(turn))
        return;
    put_echo(turn, begin_record(turn));
    end_record(turn, &state(turn->leader)->scores, NULL);
}

static void open_stream(gw_turn *turn)
{
    gw_turn_stream_begin(turn);
    for (uint32_t i = 0; i < turn->choice_count && state(turn)->echo && !is_scored(turn); i++) {
        put_echo(turn->choices[i], begin_record(turn->choices[i]));
        end_record(turn->choices[i], NULL, NULL);
    }
}

/* Who runs a prompt has its scores later, those who follow, and who has one of one token, now. */
static void started(gw_turn *turn)
{
    if (is_scored(turn) && has_scores(turn))
        tell_echo(turn);
}

static void step(gw_turn *turn, const eng_event *event)
{
    text *t = state(turn);
    for (uint32_t i = 0; t->return_ids && turn->stream && i < event->token_count; i++)
        base_buf_printf(&t->ids, "%s%d", t->ids.length ? "," : "", event->tokens[i]);
    if (!t->logprobs)
        return;
    for (uint32_t i = 0; i < event->prompt_logprob_count; i++)
        add_scored(turn, event->prompt_logprobs[i].token, &event->prompt_logprobs[i]);
    if (event->prompt_logprob_count && has_scores(turn))
        tell_echo(turn);
    for (uint32_t i = 0; event->logprobs && i < event->token_count; i++)
        add_entry(turn, &t->fresh, &t->offset, event->logprobs[i].token, &event->logprobs[i]);
}

static void part(gw_turn *turn, const eng_part *p)
{
    if (!turn->stream || !gw_turn_heard(turn) || p->kind != ENG_PART_TEXT || !p->length)
        return;
    base_buf_json_string(begin_record(turn), p->text, p->length);
    end_record(turn, NULL, NULL);
}

static const char *finish_reason(const gw_turn *turn)
{
    /* Nothing was asked for with max_tokens 0, so that was reached. */
    return turn->finish == ENG_FINISH_LENGTH || turn->request.prefill_only ? "length" : "stop";
}

static void finish_stream(gw_turn *turn)
{
    base_buf_puts(begin_record(turn), "\"\"");
    end_record(turn, NULL, finish_reason(turn));
    if (!gw_turn_all_told(turn))
        return;
    if (state(turn)->include_usage) {
        base_buf *out = &state(turn)->record;
        base_buf_clear(out);
        base_buf_puts(out, "data: {");
        gw_put_head(turn, out, "text_completion");
        base_buf_puts(out, ",\"choices\":[],");
        gw_chat_put_usage(turn, out);
        base_buf_puts(out, "}\n\n");
        gw_write_record(turn, &state(turn)->record);
    }
    gw_write_done(turn);
    gw_turn_stream_end(turn);
}

/* Echo and answer are one string, each escaped by itself: the quotes between them go. */
static void put_text(gw_turn *turn, base_buf *out)
{
    size_t seam = 0;
    if (state(turn)->echo) {
        put_echo(turn, out);
        seam = out->length;
    }
    base_buf_json_string(out, turn->text.data ? turn->text.data : "", turn->text.length);
    if (seam && !out->failed) {
        memmove(out->data + seam - 1, out->data + seam + 1, out->length - seam - 1);
        out->length -= 2;
    }
}

static void finish_completion(gw_turn *turn)
{
    if (turn->stream) {
        finish_stream(turn);
        return;
    }
    if (!gw_turn_all_told(turn))
        return;
    turn = turn->first;
    base_buf *out = &state(turn)->record;
    base_buf_clear(out);
    base_buf_puts(out, "{");
    gw_put_head(turn, out, "text_completion");
    base_buf_puts(out, ",\"choices\":[");
    for (uint32_t i = 0; i < turn->choice_count; i++) {
        gw_turn *choice = turn->choices[i];
        base_buf_printf(out, "%s{\"index\":%u,\"text\":", i ? "," : "", i);
        put_text(choice, out);
        base_buf_puts(out, ",\"logprobs\":");
        if (state(choice)->logprobs)
            put_logprobs(out, is_scored(choice) ? &state(choice->leader)->scores : NULL,
                         &state(choice)->fresh);
        else
            base_buf_puts(out, "null");
        base_buf_printf(out, ",\"finish_reason\":\"%s\"", finish_reason(choice));
        if (state(choice)->return_ids) {
            put_prompt_ids(choice, out);
            base_buf_puts(out, ",\"token_ids\":");
            gw_put_ids(out, choice->run + choice->lead, choice->run_count - choice->lead);
        }
        base_buf_puts(out, "}");
    }
    base_buf_puts(out, "],");
    gw_chat_put_usage(turn, out);
    base_buf_puts(out, "}");
    gw_turn_respond_json(turn, out);
}

static void fail(gw_turn *turn, const gw_error_row *row, const char *param, const char *message)
{
    /* Refused before it was read, it has no state, and no stream that needs one. */
    base_buf *record = state(turn) ? &state(turn)->record : NULL;
    gw_fail_plain(turn, record, row, param, message);
}

static void deinit(gw_turn *turn)
{
    text *t = state(turn);
    base_buf_deinit(&t->bytes);
    base_buf_deinit(&t->record);
    base_buf_deinit(&t->ids);
    free_lists(&t->fresh);
    free_lists(&t->scores);
}

static const gw_dialect completions = {
    .name = "completions",
    .route = "/v1/completions",
    .parse = parse_completion,
    .render = render_completion,
    .choose = choose,
    .open = open_stream,
    .started = started,
    .step = step,
    .part = part,
    .finish = finish_completion,
    .fail = fail,
    .ping = gw_write_comment,
    .deinit = deinit,
};

void gw_api_completions_handle(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &completions);
}

/* ---- tokenize, detokenize, render ---- */

static void fail_whole(gw_turn *turn, const gw_error_row *row, const char *param,
                       const char *message)
{
    gw_turn_respond_error(turn, row, param, message);
}

static void finish_dry(gw_turn *turn)
{
    gw_turn_respond_json(turn, &turn->text);
}

static void write_tokens(gw_turn *turn)
{
    const eng_prompt *prompt = &turn->prompt;
    const eng_engine *engine = turn->app->engine;
    base_buf *out = &turn->text, one;
    base_buf_init(&one, 0);
    base_buf_printf(out, "{\"count\":%u,\"max_model_len\":%u,\"tokens\":", prompt->token_count,
                    eng_get_info(engine)->context_max);
    gw_put_ids(out, prompt->tokens, prompt->token_count);
    bool strings = json_is_true(json_object_get(turn->json, "return_token_strs"));
    base_buf_puts(out, strings ? ",\"token_strs\":[" : ",\"token_strs\":null}");
    for (uint32_t i = 0; strings && i < prompt->token_count; i++) {
        base_buf_clear(&one);
        eng_detokenize(engine, &one, &prompt->tokens[i], 1, NULL);
        base_buf_puts(out, i ? "," : "");
        put_bytes(out, one.data, one.length);
    }
    if (strings)
        base_buf_puts(out, "]}");
    base_buf_deinit(&one);
}

static const gw_dialect tokenize_chat = {
    .name = "tokenize",
    .route = "/tokenize",
    .dry = true,
    .write = write_tokens,
    .parse = gw_chat_parse,
    .check = gw_chat_check,
    .finish = finish_dry,
    .fail = fail_whole,
    .deinit = gw_chat_deinit,
};

static base_code read_model(gw_turn *turn, base_err *err)
{
    GW_TRY(gw_body_parse(&turn->json, turn->body, turn->body_length, err));
    return gw_read_name(&turn->model, turn->json, "", "model", GW_NAME_BYTES_MAX, err);
}

static base_code parse_tokenize(gw_turn *turn, base_err *err)
{
    eng_text raw;
    bool flag;
    turn->model = eng_get_info(turn->app->engine)->name;
    if (gw_body_member(&raw, turn->body, turn->body_length, "messages")) {
        /* The loop does not look at the dialect while the turn is the worker's. */
        turn->dialect = &tokenize_chat;
        GW_TRY(gw_chat_parse(turn, err));
        return gw_read_bool(&flag, NULL, turn->json, "", "return_token_strs", err);
    }
    GW_TRY(make_state(turn, err));
    GW_TRY(read_model(turn, err));
    GW_TRY(gw_read_bool(&flag, NULL, turn->json, "", "add_special_tokens", err));
    GW_TRY(gw_read_bool(&flag, NULL, turn->json, "", "return_token_strs", err));
    GW_TRY(gw_read_text(&state(turn)->prompt, turn->json, "", "prompt", err));
    if (!state(turn)->prompt.data)
        return gw_wrong_type("", "prompt", "a string", NULL, err);
    return BASE_OK;
}

static const gw_dialect tokenize_text = {
    .name = "tokenize",
    .route = "/tokenize",
    .dry = true,
    .write = write_tokens,
    .parse = parse_tokenize,
    .render = make_prompt,
    .finish = finish_dry,
    .fail = fail_whole,
    .deinit = deinit,
};

void gw_api_tokenize(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &tokenize_text);
}

static base_code parse_detokenize(gw_turn *turn, base_err *err)
{
    json_t *tokens;
    turn->model = eng_get_info(turn->app->engine)->name;
    GW_TRY(make_state(turn, err));
    GW_TRY(read_model(turn, err));
    GW_TRY(gw_read_array(&tokens, turn->json, "", "tokens", err));
    if (!tokens)
        return gw_wrong_type("", "tokens", "an array of token ids", NULL, err);
    return gw_read_tokens(turn, &state(turn)->tokens, &state(turn)->token_count, tokens, "tokens",
                          err);
}

static void write_text(gw_turn *turn)
{
    base_buf_puts(&turn->text, "{\"prompt\":");
    put_bytes(&turn->text, state(turn)->bytes.data, state(turn)->bytes.length);
    base_buf_puts(&turn->text, "}");
}

static const gw_dialect detokenize = {
    .name = "detokenize",
    .route = "/detokenize",
    .dry = true,
    .write = write_text,
    .parse = parse_detokenize,
    .render = make_prompt,
    .finish = finish_dry,
    .fail = fail_whole,
    .deinit = deinit,
};

void gw_api_detokenize(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &detokenize);
}

static void write_prompt(gw_turn *turn)
{
    const eng_prompt *prompt = &turn->prompt;
    base_buf *out = &turn->text, bytes;
    base_buf_init(&bytes, 0);
    eng_detokenize(turn->app->engine, &bytes, prompt->tokens, prompt->token_count, NULL);
    base_buf_puts(out, "{\"prompt\":");
    put_bytes(out, bytes.data, bytes.length);
    out->failed |= bytes.failed;
    base_buf_deinit(&bytes);
    base_buf_puts(out, ",\"tokens\":");
    gw_put_ids(out, prompt->tokens, prompt->token_count);
    base_buf_printf(out, ",\"known_items\":%u,\"cached_tokens\":%u}", turn->match.spliced,
                    eng_peek_cached(turn->app->engine, turn->request.space, prompt->tokens,
                                    prompt->token_count));
}

static const gw_dialect rendering = {
    .name = "render",
    .route = "/v1/chat/completions/render",
    .dry = true,
    .write = write_prompt,
    .parse = gw_chat_parse,
    .check = gw_chat_check,
    .finish = finish_dry,
    .fail = fail_whole,
    .deinit = gw_chat_deinit,
};

void gw_api_chat_render(gw_app *app, gw_exchange *exchange)
{
    gw_turn_begin(app, exchange, &rendering);
}
