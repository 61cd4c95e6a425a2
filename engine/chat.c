/* Conversations to tokens, in MiniMax-M3.1's format (the decoder is chat_decode.c).
 *
 * The prompt is a list of special tokens with plain text between them. Plain text is gathered into
 * a run until the next special token and encoded in one go with specials off: that gives the ids of
 * tokenizing the whole rendered text, and text of clients can never become a special token. A run
 * that this engine generated is spliced in as it is.
 *
 * Choices where the format leaves room:
 * - Arguments that are absent, blank or `null` are an empty object. Invalid JSON and anything else
 * than an object are BASE_INVALID, naming messages[I].tool_calls[J].function.arguments (I counts
 * items); a turn that is known by its tokens is never looked at. A number keeps its text, a null
 * member is left out, a null in a list is the word null.
 * - A tool result without a call before it is rendered like any other. A root item that is not the
 * first is a developer turn.
 * - continue_last leaves the last assistant item open: behind its text, or inside its reasoning if
 * it has no text at all. */
#include "engine/chat.h"

#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <xxhash.h>

#include "engine/base/json.h"
#include "engine/base/num.h"
#include "engine/chat_internal.h"

/* Changes when the rendered text of any conversation does. */
#define TEMPLATE_VERSION "minimax-m3.1/1"
/* Beyond so many windows a prompt is not counted exactly any more. */
#define COUNT_WINDOWS 16
/* Open tags that closing a cut run keeps apart; deeper ones are closed by their parents. */
#define OPEN_MAX 64

static const char *const special_text[CHAT_SPECIALS] = {
    [CHAT_BEGIN] = "]~!b[",      [CHAT_TURN] = "]~b]",
    [CHAT_END] = "[e~[",         [CHAT_SEPARATOR] = CHAT_NS,
    [CHAT_CALL] = "<tool_call>", [CHAT_CALL_CLOSE] = "</tool_call>",
    [CHAT_REASON] = CHAT_THINK,  [CHAT_REASON_CLOSE] = CHAT_THINK_END,
};

static const char *const mode_text[] = {
    [ENG_THINK_DEFAULT] = "",
    [ENG_THINK_ENABLED] =
        "Current thinking mode: enabled. You MUST think step by step before every response, "
        "including after receiving function/tool results.\n",
    [ENG_THINK_DISABLED] = "Current thinking mode: disabled. Do not output any thinking process.\n",
    [ENG_THINK_ADAPTIVE] =
        "Current thinking mode: adaptive. You are encouraged to think for complex "
        "decision-making, multi-step reasoning, or when analyzing function/tool results.\n",
};

/* ---- the codec ---- */

base_code eng_codec_create(eng_codec **out, const eng_tok *tok, const char *identity,
                           eng_thinking thinking, base_err *err)
{
    *out = NULL;
    eng_codec *codec = calloc(1, sizeof *codec);
    if (codec == NULL)
        return base_fail(err, BASE_NOMEM, "chat codec: no memory");
    codec->tok = tok;
    codec->thinking = thinking == ENG_THINK_DEFAULT ? ENG_THINK_ADAPTIVE : thinking;
    codec->identity = strdup(identity);
    if (codec->identity == NULL) {
        eng_codec_destroy(codec);
        return base_fail(err, BASE_NOMEM, "chat codec: no memory");
    }
    for (int i = 0; i < CHAT_SPECIALS; i++) {
        codec->id[i] = eng_tok_special(tok, special_text[i]);
        if (codec->id[i] < 0) {
            eng_codec_destroy(codec);
            return base_fail(err, BASE_FORMAT, "tokenizer.json: added_tokens has no %s",
                             special_text[i]);
        }
    }
    XXH3_state_t *state = XXH3_createState();
    if (state == NULL) {
        eng_codec_destroy(codec);
        return base_fail(err, BASE_NOMEM, "chat codec: no memory");
    }
    XXH3_128bits_reset(state);
    XXH3_128bits_update(state, TEMPLATE_VERSION, sizeof TEMPLATE_VERSION);
    XXH3_128bits_update(state, eng_tok_digest(tok), strlen(eng_tok_digest(tok)));
    XXH3_128bits_update(state, identity, strlen(identity));
    XXH128_canonical_t digest;
    XXH128_canonicalFromHash(&digest, XXH3_128bits_digest(state));
    XXH3_freeState(state);
    for (size_t i = 0; i < sizeof digest.digest; i++)
        snprintf(codec->digest + 2 * i, 3, "%02x", digest.digest[i]);
    *out = codec;
    return BASE_OK;
}

void eng_codec_destroy(eng_codec *codec)
{
    if (codec == NULL)
        return;
    free(codec->identity);
    free(codec);
}

int32_t eng_codec_end_token(const eng_codec *codec)
{
    return codec->id[CHAT_END];
}

int32_t eng_codec_call_token(const eng_codec *codec)
{
    return codec->id[CHAT_CALL];
}

int32_t eng_codec_think_end_token(const eng_codec *codec)
{
    return codec->id[CHAT_REASON_CLOSE];
}

const char *eng_codec_digest(const eng_codec *codec)
{
    return codec->digest;
}

/* ---- the prompt as it grows ---- */

typedef struct render {
    const eng_codec *codec;
    const eng_chat *chat;
    base_err *err;
    base_buf *text;   /* NULL, or gets the rendered text */
    base_buf run;     /* plain text since the last special token */
    base_buf scratch; /* a decoded JSON string */
    eng_ids ids;
    size_t limit, count_max;
    size_t counted; /* ids that were counted and dropped, once past the limit */
    uint32_t *item_end;
    uint32_t mark_from, mark_to; /* items whose item_end is still a byte offset in the run */
    bool starts_in_reasoning;
    base_code code;
} render;

/* Turns the marks of the run just encoded (its ids begin at `from`) into token counts: tokens
 * wholly up to the mark. */
static void resolve_marks(render *r, size_t from)
{
    size_t at = from, bytes = 0;
    for (uint32_t i = r->mark_from; i < r->mark_to; i++) {
        size_t length = 0;
        while (at < r->ids.count) {
            eng_tok_bytes(r->codec->tok, r->ids.data[at], &length);
            if (bytes + length > r->item_end[i])
                break;
            bytes += length;
            at++;
        }
        r->item_end[i] = (uint32_t)at;
    }
    r->mark_from = r->mark_to = 0;
}

/* Past the limit the ids are of no use: they are counted and dropped. */
static void drop_counted(render *r)
{
    if (r->counted + r->ids.count <= r->limit)
        return;
    r->counted += r->ids.count;
    r->ids.count = 0;
    if (r->counted > r->count_max)
        r->code = BASE_TOO_LONG;
    else
        r->ids.max = r->count_max - r->counted + 1;
}

/* The first error stays. */
static void check_ids(render *r)
{
    if (r->code == BASE_OK && r->ids.failed)
        r->code = r->ids.max != 0 && r->ids.count >= r->ids.max ? BASE_TOO_LONG : BASE_NOMEM;
    if (r->code == BASE_OK)
        drop_counted(r);
}

static void flush(render *r)
{
    if (r->run.failed && r->code == BASE_OK)
        r->code = BASE_NOMEM;
    if (r->run.length == 0 || r->code != BASE_OK)
        return;
    size_t from = r->ids.count;
    eng_tok_encode(r->codec->tok, &r->ids, r->run.data, r->run.length, false, NULL);
    if (r->text != NULL)
        base_buf_add(r->text, r->run.data, r->run.length);
    if (r->mark_to > r->mark_from && r->code == BASE_OK)
        resolve_marks(r, from);
    base_buf_clear(&r->run);
    check_ids(r);
}

static void special(render *r, chat_special which)
{
    flush(r);
    if (r->code != BASE_OK)
        return;
    eng_ids_add(&r->ids, r->codec->id[which]);
    if (r->text != NULL)
        base_buf_puts(r->text, special_text[which]);
    check_ids(r);
}

static void plain(render *r, const char *text)
{
    base_buf_puts(&r->run, text);
}

static void plain_text(render *r, eng_text text)
{
    base_buf_add(&r->run, text.data, text.length);
}

/* The separator and a tag of ordinary text: `before`, the raw JSON string `key` decoded, `>`. */
static void key_tag(render *r, const char *before, const char *key, size_t length)
{
    special(r, CHAT_SEPARATOR);
    plain(r, before);
    base_json_unescape(&r->run, key, length);
    plain(r, ">");
}

static void begin_turn(render *r, const char *role)
{
    special(r, CHAT_TURN);
    plain(r, role);
}

/* Also ends the run, so that the ids up to here can be counted: the next token is always a special
 * one. */
static void end_turn(render *r)
{
    special(r, CHAT_END);
    plain(r, "\n");
    flush(r);
}

/* ---- tools ---- */

/* As json.dumps(…, ensure_ascii=False) writes a string. */
static void python_string(base_buf *out, const char *text, size_t length)
{
    base_buf_add(out, "\"", 1);
    for (size_t i = 0, from = 0; i <= length; i++) {
        unsigned char c = i < length ? (unsigned char)text[i] : '"';
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        base_buf_add(out, text + from, i - from);
        from = i + 1;
        if (i == length)
            break;
        const char *names = "\"\"\\\\\bb\ff\nn\rr\tt", *name = names;
        while (*name != '\0' && (unsigned char)*name != c)
            name += 2;
        if (*name != '\0')
            base_buf_printf(out, "\\%c", name[1]);
        else
            base_buf_printf(out, "\\u%04x", c);
    }
    base_buf_add(out, "\"", 1);
}

/* Appends JSON text in the style of Python's json.dumps: ", " and ": ", keys in their order,
 * non-ASCII as it is; numbers keep their text. False if it is not an object. */
static bool python_json(render *r, eng_text text)
{
    base_json json;
    base_json_kind before = BASE_JSON_KEY, kind;
    base_json_init(&json, text.data, text.length, BASE_JSON_DEPTH_MAX);
    while ((kind = base_json_next(&json)) != BASE_JSON_END) {
        if (kind == BASE_JSON_ERROR || (json.depth == 0 && kind != BASE_JSON_OBJECT_END))
            return false;
        bool closes = kind == BASE_JSON_OBJECT_END || kind == BASE_JSON_ARRAY_END;
        bool first = before == BASE_JSON_KEY || before == BASE_JSON_OBJECT_BEGIN ||
                     before == BASE_JSON_ARRAY_BEGIN;
        if (!closes && !first)
            plain(r, ", ");
        if (kind == BASE_JSON_STRING || kind == BASE_JSON_KEY) {
            base_buf_clear(&r->scratch);
            base_json_unescape(&r->scratch, json.raw, json.raw_length);
            r->run.failed = r->run.failed || r->scratch.failed;
            python_string(&r->run, r->scratch.data == NULL ? "" : r->scratch.data,
                          r->scratch.length);
        } else {
            base_buf_add(&r->run, json.raw, json.raw_length);
        }
        if (kind == BASE_JSON_KEY)
            plain(r, ": ");
        before = kind;
    }
    return true;
}

static bool render_arguments(render *r, eng_text text);

static void render_call(render *r, const char *name, size_t length)
{
    special(r, CHAT_SEPARATOR);
    plain(r, "<invoke name=\"");
    base_buf_add(&r->run, name, length);
    plain(r, "\">");
}

static void begin_calls(render *r)
{
    special(r, CHAT_SEPARATOR);
    special(r, CHAT_CALL);
    plain(r, "\n");
}

static void end_call(render *r)
{
    special(r, CHAT_SEPARATOR);
    plain(r, "</invoke>\n");
}

static void end_calls(render *r)
{
    special(r, CHAT_SEPARATOR);
    special(r, CHAT_CALL_CLOSE);
}

static void render_example(render *r, const char *name, const char *arguments)
{
    render_call(r, name, strlen(name));
    CHECK(render_arguments(r, (eng_text){arguments, strlen(arguments)}));
    end_call(r);
}

static void render_tools(render *r)
{
    plain(r, "\n\n# Tools\nYou may call one or more tools to assist with the user query.\nHere are "
             "the tools "
             "available in JSONSchema format:\n\n<tools>\n");
    for (uint32_t i = 0; i < r->chat->tool_count && r->code == BASE_OK; i++) {
        plain(r, "<tool>");
        if (!python_json(r, r->chat->tools[i])) {
            char name[32];
            snprintf(name, sizeof name, "tools[%u].function", i);
            r->code = base_fail_param(r->err, BASE_INVALID, name, "%s: not a JSON object", name);
        }
        plain(r, "</tool>\n");
    }
    plain(r, "</tools>\n\nTo call tools, wrap all invocations in a single ");
    special(r, CHAT_SEPARATOR);
    special(r, CHAT_CALL);
    special(r, CHAT_SEPARATOR);
    special(r, CHAT_CALL_CLOSE);
    plain(r, " block. Parameter values containing nested objects or arrays are recursively "
             "expanded into XML "
             "elements. Example:\n\n");
    begin_calls(r);
    render_example(
        r, "tool-name-1",
        "{\"param-1\":\"value-1\",\"param-2\":[{\"key-a\":\"val-a\",\"key-b\":\"val-b\"}]}");
    render_example(r, "tool-name-2", "{\"param-1\":\"value-1\"}");
    end_calls(r);
}

/* ---- calls ---- */

/* A container that is open while arguments are walked: its tag, and whether its values are list
 * items. */
typedef struct level {
    const char *key;
    size_t length;
    bool list;
} level;

#define ITEM_KEY "\"item\""

static void render_scalar(render *r, base_json_kind kind, const base_json *json)
{
    if (kind == BASE_JSON_STRING)
        base_json_unescape(&r->run, json->raw, json->raw_length);
    else
        base_buf_add(&r->run, json->raw, json->raw_length);
}

static bool blank(eng_text text)
{
    for (size_t i = 0; i < text.length; i++)
        if (strchr(" \t\r\n", text.data[i]) == NULL || text.data[i] == '\0')
            return false;
    return true;
}

/* Writes arguments as tags, without recursion. False if they are not an object. */
static bool render_arguments(render *r, eng_text text)
{
    level levels[BASE_JSON_DEPTH_MAX + 1];
    uint32_t depth = 0;
    base_json json;
    if (blank(text))
        return true;
    base_json_init(&json, text.data, text.length, BASE_JSON_DEPTH_MAX);
    base_json_kind kind = base_json_next(&json);
    if (kind == BASE_JSON_NULL)
        return base_json_next(&json) == BASE_JSON_END;
    if (kind != BASE_JSON_OBJECT_BEGIN)
        return false;
    levels[0] = (level){0};
    while ((kind = base_json_next(&json)) != BASE_JSON_END) {
        level at = {.key = ITEM_KEY, .length = sizeof ITEM_KEY - 1};
        if (kind == BASE_JSON_KEY) {
            at.key = json.raw;
            at.length = json.raw_length;
            kind = base_json_next(&json);
            if (kind == BASE_JSON_NULL)
                continue;
        }
        if (kind == BASE_JSON_ERROR)
            return false;
        if (kind == BASE_JSON_OBJECT_END || kind == BASE_JSON_ARRAY_END) {
            if (depth > 0)
                key_tag(r, "</", levels[depth].key, levels[depth].length);
            depth -= depth > 0;
            continue;
        }
        key_tag(r, "<", at.key, at.length);
        if (kind == BASE_JSON_OBJECT_BEGIN || kind == BASE_JSON_ARRAY_BEGIN) {
            at.list = kind == BASE_JSON_ARRAY_BEGIN;
            levels[++depth] = at;
            continue;
        }
        render_scalar(r, kind, &json);
        key_tag(r, "</", at.key, at.length);
    }
    return true;
}

static void render_calls(render *r, const eng_item *item, uint32_t index)
{
    begin_calls(r);
    for (uint32_t i = 0; i < item->call_count && r->code == BASE_OK; i++) {
        const eng_call *call = &item->calls[i];
        render_call(r, call->name.data, call->name.length);
        if (!render_arguments(r, call->arguments) && r->code == BASE_OK) {
            char name[64];
            snprintf(name, sizeof name, "messages[%u].tool_calls[%u].function.arguments", index, i);
            r->code = base_fail_param(r->err, BASE_INVALID, name, "%s: not a JSON object", name);
        }
        end_call(r);
    }
    end_calls(r);
}

/* ---- runs that this engine generated ---- */

typedef struct tag {
    const char *name; /* in the text of the block */
    size_t length;
} tag;

/* What a run that was cut leaves open. */
typedef struct open_run {
    bool reasoning;
    bool block;
    bool separator; /* the last token is a separator: the next tag needs none */
    base_buf text;  /* of the block that is open, from behind its opening */
    tag tags[OPEN_MAX];
    uint32_t tag_count;
} open_run;

#define INVOKE "invoke name=\""

/* Follows one whole tag (without its brackets). */
static void follow_tag(open_run *run, const char *text, size_t length)
{
    if (length > 0 && text[0] == '/') {
        for (uint32_t i = run->tag_count; i-- > 0;)
            if (run->tags[i].length == length - 1 &&
                memcmp(run->tags[i].name, text + 1, length - 1) == 0) {
                run->tag_count = i;
                return;
            }
        return;
    }
    if (run->tag_count == OPEN_MAX)
        return;
    bool invoke = length >= sizeof INVOKE - 1 && memcmp(text, INVOKE, sizeof INVOKE - 1) == 0;
    run->tags[run->tag_count++] = (tag){text, invoke ? strlen("invoke") : length};
}

/* Finds the tags that are open at the end of the block's text. Returns what stands behind the last
 * separator if that is not a whole tag, NULL otherwise. */
static const char *follow_block(open_run *run)
{
    const char *at = run->text.data, *end = at + run->text.length;
    while (at != NULL &&
           (at = memmem(at, (size_t)(end - at), CHAT_NS, sizeof CHAT_NS - 1)) != NULL) {
        at += sizeof CHAT_NS - 1;
        const char *next = memmem(at, (size_t)(end - at), CHAT_NS, sizeof CHAT_NS - 1);
        const char *stop = next == NULL ? end : next;
        const char *close = at < stop && *at == '<' ? memchr(at, '>', (size_t)(stop - at)) : NULL;
        if (close != NULL)
            follow_tag(run, at + 1, (size_t)(close - at - 1));
        else if (next == NULL)
            return at;
    }
    return NULL;
}

/* Completes a tag that was cut: `rest` is what stands behind the last separator. */
static void complete_tag(render *r, open_run *run, const char *rest)
{
    size_t length = (size_t)(run->text.data + run->text.length - rest);
    if (length == 0) {
        run->separator = true;
        return;
    }
    if (rest[0] != '<')
        return; /* a value without a tag: closed with its call */
    if (length >= 2 && rest[1] == '/') {
        const tag *top = run->tag_count > 0 ? &run->tags[run->tag_count - 1] : NULL;
        size_t have = length - 2;
        if (top != NULL && have <= top->length && memcmp(top->name, rest + 2, have) == 0) {
            base_buf_add(&r->run, top->name + have, top->length - have);
            run->tag_count--;
        }
        plain(r, ">");
        return;
    }
    size_t have = length - 1, whole = sizeof INVOKE - 1;
    bool invoke = memcmp(rest + 1, INVOKE, base_min(have, whole)) == 0 &&
                  (have >= whole || run->tag_count == 0);
    if (invoke) {
        plain(r, have < whole ? INVOKE + have : "");
        plain(r, have > whole && rest[length - 1] == '"' ? ">" : "\">");
        follow_tag(run, INVOKE, whole);
    } else {
        plain(r, ">");
        follow_tag(run, rest + 1, have);
    }
}

static void closing_separator(render *r, open_run *run)
{
    if (!run->separator)
        special(r, CHAT_SEPARATOR);
    run->separator = false;
}

static void close_block(render *r, open_run *run)
{
    const char *rest = follow_block(run);
    if (rest != NULL)
        complete_tag(r, run, rest);
    if (run->tag_count == 0 && !run->separator &&
        (run->text.length == 0 || run->text.data[run->text.length - 1] != '\n'))
        plain(r, "\n");
    while (run->tag_count > 0) {
        const tag *top = &run->tags[--run->tag_count];
        closing_separator(r, run);
        plain(r, "</");
        base_buf_add(&r->run, top->name, top->length);
        plain(r, run->tag_count == 0 ? ">\n" : ">");
    }
    closing_separator(r, run);
    special(r, CHAT_CALL_CLOSE);
}

/* Reads a run: what is open at its end. */
static void follow_run(render *r, open_run *run, const int32_t *tokens, uint32_t count)
{
    const int32_t *id = r->codec->id;
    for (uint32_t i = 0; i < count; i++) {
        int32_t next = i + 1 < count ? tokens[i + 1] : -1;
        if (i == 0 && tokens[i] == id[CHAT_REASON])
            run->reasoning = true;
        else if (tokens[i] == id[CHAT_REASON_CLOSE])
            run->reasoning = false;
        else if (tokens[i] == id[CHAT_SEPARATOR] && next == id[CHAT_CALL]) {
            run->reasoning = false;
            run->block = true;
            run->text.length = 0;
            i++;
            continue;
        } else if (tokens[i] == id[CHAT_SEPARATOR] && next == id[CHAT_CALL_CLOSE]) {
            run->block = false;
            i++;
            continue;
        }
        if (!run->block)
            continue;
        size_t length;
        const char *bytes = eng_tok_bytes(r->codec->tok, tokens[i], &length);
        base_buf_add(&run->text, bytes == NULL ? "" : bytes, length);
    }
    run->separator = !run->block && count > 0 && tokens[count - 1] == id[CHAT_SEPARATOR];
}

static void splice_tokens(render *r, const int32_t *tokens, uint32_t count)
{
    flush(r);
    for (uint32_t i = 0; i < count && r->code == BASE_OK; i++) {
        size_t length;
        const char *bytes = eng_tok_bytes(r->codec->tok, tokens[i], &length);
        if (bytes == NULL) {
            r->code = base_fail(r->err, BASE_INVALID,
                                "token %d of a stored run is not in the vocabulary", tokens[i]);
            return;
        }
        eng_ids_add(&r->ids, tokens[i]);
        if (r->text != NULL)
            base_buf_add(r->text, bytes, length);
        check_ids(r);
    }
}

/* A run as it was generated; one that was cut gets what it lacks to be well formed. */
static void render_run(render *r, const eng_item *item, bool open)
{
    const int32_t end = r->codec->id[CHAT_END];
    uint32_t count = item->token_count;
    bool whole = count > 0 && item->tokens[count - 1] == end;
    splice_tokens(r, item->tokens, whole && open ? count - 1 : count);
    if (r->code != BASE_OK)
        return;
    if (whole && !open) {
        plain(r, "\n");
        flush(r);
        return;
    }
    open_run run = {0};
    follow_run(r, &run, item->tokens, count);
    plain_text(r, item->rest);
    if (open) {
        r->starts_in_reasoning = run.reasoning;
        base_buf_deinit(&run.text);
        return;
    }
    if (run.separator) { /* cut between a separator and its tag: the block opens and closes */
        special(r, CHAT_CALL);
        plain(r, "\n");
        end_calls(r);
    } else if (run.block) {
        close_block(r, &run);
    } else if (run.reasoning) {
        special(r, CHAT_REASON_CLOSE);
    }
    if (run.text.failed && r->code == BASE_OK)
        r->code = BASE_NOMEM;
    base_buf_deinit(&run.text);
    end_turn(r);
}

bool eng_codec_run_seen(const eng_codec *codec, uint32_t *seen, eng_text *rest,
                        const int32_t *tokens, uint32_t token_count, eng_text reasoning,
                        eng_text text)
{
    const int32_t *id = codec->id;
    eng_text want = text.length > 0 ? text : reasoning;
    bool reasons = token_count > 0 && tokens[0] == id[CHAT_REASON];
    uint32_t at = reasons || (token_count > 0 && tokens[0] == id[CHAT_REASON_CLOSE]);
    if (text.length > 0 && reasons) {
        while (at < token_count && tokens[at] != id[CHAT_REASON_CLOSE])
            at++;
        at++;
    }
    if (at > token_count || (text.length == 0 && !reasons))
        return false;
    size_t same = 0;
    for (; at < token_count && same < want.length; at++) {
        size_t length, skip = 0;
        const char *bytes = eng_tok_bytes(codec->tok, tokens[at], &length);
        if (tokens[at] == id[CHAT_REASON_CLOSE] || tokens[at] == id[CHAT_SEPARATOR] ||
            tokens[at] == id[CHAT_END] || bytes == NULL)
            return false; /* the run says less */
        while (same == 0 && skip < length && memchr(" \t\r\n", bytes[skip], 4) != NULL)
            skip++;
        size_t common = base_min(length - skip, want.length - same);
        if (memcmp(bytes + skip, want.data + same, common) != 0)
            return false;
        if (common < length - skip)
            break; /* the text ends inside this token */
        same += common;
    }
    if (at == token_count && same < want.length)
        return false;
    *seen = at;
    *rest = (eng_text){want.data + same, want.length - same};
    return want.length > 0;
}

/* ---- turns ---- */

static eng_text strip_newlines(eng_text text)
{
    while (text.length > 0 && text.data[0] == '\n') {
        text.data++;
        text.length--;
    }
    while (text.length > 0 && text.data[text.length - 1] == '\n')
        text.length--;
    return text;
}

static const char *find(eng_text text, const char *what)
{
    return text.length == 0 ? NULL : memmem(text.data, text.length, what, strlen(what));
}

/* Reasoning that a client left inside the text, as the template takes it apart. */
static void split_reasoning(eng_text *reasoning, eng_text *text)
{
    const char *close = find(*text, CHAT_THINK_END), *open;
    if (close == NULL)
        return;
    eng_text before = {text->data, (size_t)(close - text->data)};
    close += sizeof CHAT_THINK_END - 1;
    eng_text after = {close, text->length - (size_t)(close - text->data)};
    while ((open = find(before, CHAT_THINK)) != NULL) {
        open += sizeof CHAT_THINK - 1;
        before = (eng_text){open, before.length - (size_t)(open - before.data)};
    }
    *reasoning = strip_newlines(before);
    *text = strip_newlines(after);
}

static void render_assistant(render *r, uint32_t index, bool open)
{
    const eng_item *item = &r->chat->items[index];
    begin_turn(r, "ai\n");
    if (item->tokens != NULL) {
        render_run(r, item, open);
        return;
    }
    eng_text reasoning = item->reasoning, text = item->text;
    if (reasoning.data == NULL)
        split_reasoning(&reasoning, &text);
    if (reasoning.length > 0) {
        special(r, CHAT_REASON);
        plain_text(r, reasoning);
        if (open && text.data == NULL && item->call_count == 0) {
            r->starts_in_reasoning = true;
            return;
        }
    }
    special(r, CHAT_REASON_CLOSE);
    plain_text(r, text);
    if (item->call_count > 0)
        render_calls(r, item, index);
    if (!open)
        end_turn(r);
}

static void render_system(render *r, eng_text identity, eng_thinking thinking)
{
    special(r, CHAT_BEGIN);
    begin_turn(r, "system\n");
    plain_text(r, identity);
    plain(r, "\n\n<thinking_instructions>\nYou have a thinking capability that allows you to "
             "reason step by step "
             "before responding. When thinking is enabled, wrap your reasoning in ");
    special(r, CHAT_REASON);
    special(r, CHAT_REASON_CLOSE);
    plain(r, " tags before your response. When thinking is disabled, begin your response directly "
             "after the ");
    special(r, CHAT_REASON_CLOSE);
    plain(r, " prefix. When thinking is adaptive, decide on your own whether to think for the "
             "current turn.\n");
    plain(r, mode_text[thinking]);
    plain(r, "</thinking_instructions>");
    if (r->chat->effort.data != NULL) {
        plain(r, "\n\n<effort>");
        plain_text(r, r->chat->effort);
        plain(r, "</effort>");
    }
    end_turn(r);
}

static uint32_t token_count(const render *r)
{
    return (uint32_t)r->ids.count;
}

static void render_turn(render *r, const char *role, eng_text text)
{
    begin_turn(r, role);
    plain_text(r, text);
    end_turn(r);
}

/* Neighbouring tool results share a turn; returns the index behind the last. Those before the last
 * end inside a run, so their ends are known when it is encoded. */
static uint32_t render_results(render *r, uint32_t index)
{
    begin_turn(r, "tool");
    r->mark_from = r->mark_to = index;
    while (index < r->chat->item_count && r->chat->items[index].role == ENG_ROLE_TOOL) {
        plain(r, "\n<response>");
        plain_text(r, r->chat->items[index].text);
        plain(r, "</response>");
        r->item_end[index] = (uint32_t)base_min(r->run.length, UINT32_MAX);
        r->mark_to = ++index;
    }
    end_turn(r);
    r->item_end[index - 1] = token_count(r);
    return index;
}

/* The two turns that open every prompt; returns the index of the first item that is not part of
 * them. */
static uint32_t render_head(render *r, eng_thinking thinking)
{
    const eng_chat *chat = r->chat;
    uint32_t at = 0;
    eng_text identity = {r->codec->identity, strlen(r->codec->identity)};
    eng_text developer = {"You are a helpful assistant.", strlen("You are a helpful assistant.")};
    if (at < chat->item_count && chat->items[at].role == ENG_ROLE_ROOT)
        identity = chat->items[at++].text;
    render_system(r, identity, thinking);
    if (at > 0)
        r->item_end[0] = token_count(r);
    bool named = at < chat->item_count && chat->items[at].role == ENG_ROLE_SYSTEM;
    begin_turn(r, "developer\n");
    plain_text(r, named ? chat->items[at].text : developer);
    if (chat->tool_count > 0)
        render_tools(r);
    end_turn(r);
    if (named)
        r->item_end[at++] = token_count(r);
    return at;
}

static void render_items(render *r, uint32_t at)
{
    const eng_chat *chat = r->chat;
    while (at < chat->item_count && r->code == BASE_OK) {
        const eng_item *item = &chat->items[at];
        if (item->role == ENG_ROLE_TOOL) {
            at = render_results(r, at);
            continue;
        }
        if (item->role == ENG_ROLE_ASSISTANT)
            render_assistant(r, at, chat->continue_last && at + 1 == chat->item_count);
        else
            render_turn(r, item->role == ENG_ROLE_USER ? "user\n" : "developer\n", item->text);
        flush(r);
        r->item_end[at++] = token_count(r);
    }
}

/* In place of the head: what is known by its tokens, up to and including the first item's run. */
static uint32_t render_prefix(render *r)
{
    const eng_chat *chat = r->chat;
    splice_tokens(r, chat->prefix, chat->prefix_count);
    if (r->code == BASE_OK)
        render_run(r, &chat->items[0], chat->continue_last && chat->item_count == 1);
    r->item_end[0] = token_count(r);
    return 1;
}

static void render_prompt(render *r, eng_thinking thinking)
{
    render_items(r, r->chat->prefix != NULL ? render_prefix(r) : render_head(r, thinking));
    if (r->chat->continue_last || r->chat->no_generation_prompt)
        return;
    begin_turn(r, "ai\n");
    if (thinking == ENG_THINK_ENABLED)
        special(r, CHAT_REASON);
    else if (thinking == ENG_THINK_DISABLED)
        special(r, CHAT_REASON_CLOSE);
    r->starts_in_reasoning = thinking == ENG_THINK_ENABLED;
    flush(r);
}

static base_code render_error(render *r)
{
    size_t count = r->counted + r->ids.count;
    if (r->code == BASE_OK && count > r->limit)
        r->code = BASE_TOO_LONG;
    if (r->code == BASE_TOO_LONG)
        return base_fail_param(r->err, BASE_TOO_LONG, "messages",
                               "This model's maximum context length is %zu tokens. However, you "
                               "requested %s%zu tokens.",
                               r->limit, count > r->count_max ? "more than " : "",
                               base_min(count, r->count_max));
    if (r->code == BASE_OK && (r->run.failed || (r->text != NULL && r->text->failed)))
        r->code = BASE_NOMEM;
    if (r->code == BASE_NOMEM)
        base_fail(r->err, BASE_NOMEM, "prompt: no memory");
    return r->code;
}

base_code eng_codec_render(const eng_codec *codec, eng_prompt *out, const eng_chat *chat,
                           uint32_t token_max, uint32_t window, base_buf *text, base_arena *arena,
                           base_err *err)
{
    render r = {.codec = codec, .chat = chat, .err = err, .text = text};
    eng_thinking thinking = chat->thinking == ENG_THINK_DEFAULT ? codec->thinking : chat->thinking;
    *out = (eng_prompt){.thinking = thinking};
    if (chat->continue_last &&
        (chat->item_count == 0 || chat->items[chat->item_count - 1].role != ENG_ROLE_ASSISTANT))
        return base_fail_param(err, BASE_INVALID, "continue_final_message",
                               "continue_final_message: the last message is not the assistant's");
    if (chat->prefix != NULL && (chat->item_count == 0 || chat->items[0].tokens == NULL))
        return base_fail(err, BASE_INVALID, "a known prefix ends with an item of known tokens");
    r.limit = token_max == 0 ? window : token_max;
    r.count_max = COUNT_WINDOWS * base_max(window, r.limit);
    eng_ids_init(&r.ids, r.count_max + 1);
    r.item_end = base_arena_calloc(arena, (size_t)chat->item_count + 1, sizeof *r.item_end);
    if (r.item_end == NULL)
        r.code = BASE_NOMEM;
    else
        render_prompt(&r, thinking);
    base_code code = render_error(&r);
    if (code == BASE_OK) {
        out->tokens = base_arena_alloc(arena, r.ids.count * sizeof *out->tokens);
        if (out->tokens == NULL)
            code = base_fail(err, BASE_NOMEM, "prompt: no memory for %zu tokens", r.ids.count);
        else
            memcpy(out->tokens, r.ids.data, r.ids.count * sizeof *out->tokens);
    }
    out->token_count = (uint32_t)r.ids.count;
    out->item_end = r.item_end;
    out->starts_in_reasoning = r.starts_in_reasoning;
    eng_ids_deinit(&r.ids);
    base_buf_deinit(&r.run);
    base_buf_deinit(&r.scratch);
    return code;
}

/* ---- forced tokens ---- */

static base_code take_ids(render *r, int32_t **tokens, uint32_t *count, base_arena *arena)
{
    flush(r);
    base_code code = render_error(r);
    *tokens = NULL;
    *count = 0;
    if (code == BASE_OK &&
        (*tokens = base_arena_alloc(arena, r->ids.count * sizeof **tokens)) == NULL)
        code = base_fail(r->err, BASE_NOMEM, "forced tokens: no memory");
    if (code == BASE_OK) {
        memcpy(*tokens, r->ids.data, r->ids.count * sizeof **tokens);
        *count = (uint32_t)r->ids.count;
    }
    eng_ids_deinit(&r->ids);
    base_buf_deinit(&r->run);
    return code;
}

base_code eng_codec_force(const eng_codec *codec, int32_t **tokens, uint32_t *token_count_out,
                          eng_text name, base_arena *arena, base_err *err)
{
    render r = {.codec = codec, .err = err, .limit = SIZE_MAX, .count_max = SIZE_MAX};
    begin_calls(&r);
    special(&r, CHAT_SEPARATOR);
    plain(&r, "<invoke name=\"");
    if (name.length > 0) {
        plain_text(&r, name);
        plain(&r, "\">");
    }
    return take_ids(&r, tokens, token_count_out, arena);
}

base_code eng_codec_force_close(const eng_codec *codec, int32_t **tokens, uint32_t *token_count_out,
                                base_arena *arena, base_err *err)
{
    render r = {.codec = codec, .err = err, .limit = SIZE_MAX, .count_max = SIZE_MAX};
    plain(&r, "\n");
    end_calls(&r);
    special(&r, CHAT_END);
    return take_ids(&r, tokens, token_count_out, arena);
}
