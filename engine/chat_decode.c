/* Output tokens to reasoning, text and calls, byte by byte.
 *
 * Everything is decided on the bytes, so where tokens or deltas are cut cannot matter; ids serve
 * only to drop special tokens that are no part of the format (role markers, a thought marker out of
 * place, the end of turn). A tag is structural only behind the separator NS.
 *
 * States, and what NS + tag does there (behind any other text NS is dropped from prose):
 *
 * - PROSE, reasoning or visible text: `<tool_call>` leads to BLOCK; in a block that is open
 *   `<invoke name="…">` leads to BODY. Reasoning also ends at `</mm:think>`; at the very start of
 *   the output `<mm:think>` opens it.
 * - BLOCK, between calls, white space only: the same tags; `</tool_call>` stays, behind the block.
 *   Any other byte leads to PROSE (B004: the candidate is dead, nothing is held longer).
 * - BODY, in a call between parameters: `<name>` leads to STRING or TREE by the schema; `</name>`
 *   takes stray text as the value of a parameter whose opening tag was left out (B001).
 * - STRING, a value that can only be a string: given out as it comes, ends at its own closing tag.
 * - TREE, any other value: gathered, given out when it is closed.
 *
 * In BODY, STRING and TREE `</invoke>`, `</tool_call>`, `<tool_call>` and `<invoke …>` end the
 * call: a parameter or call that was left open is closed, so that one slip does not take what
 * follows with it (B002). In a STRING an opening tag ends the value only if the tool declares such
 * a parameter and has not got it yet; every other NS + tag is data of the string.
 *
 * What is held back: a beginning of NS or of a marker, a tag, a beginning of a stop string, a cut
 * character, white space in a BLOCK, and TREE values. */
#include "engine/chat.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "engine/chat_internal.h"

#define TAG_MAX 1024  /* longest tag, brackets included */
#define NAME_MAX 256  /* longest function name in a header */
#define SPACE_MAX 64  /* white space held in a BLOCK */
#define MARKER_MAX 16 /* longer than any marker */

#define INVOKE "<invoke name=\""

typedef enum state { PROSE, BLOCK, BODY, STRING, TREE } state;

/* Where a BLOCK's white space stands. */
typedef enum gap { GAP_OPENED, GAP_BETWEEN, GAP_CLOSED } gap;

/* A stop string and how much of it the visible text ends with (Knuth-Morris-Pratt). */
typedef struct stop {
    eng_text text;
    uint32_t *fallback;
    uint32_t matched;
} stop;

struct eng_decoder {
    const eng_codec *codec;
    eng_decoder_options options;

    state state;
    gap gap;
    bool reasoning;   /* PROSE and BLOCK: what prose is */
    bool at_start;    /* nothing but a marker may have come yet */
    bool drop_closer; /* a thought that was opened although thinking is off: its end marker is not
                         text */
    bool in_block;    /* `<tool_call>` was seen and not closed */
    bool ended;       /* the last token was the end of turn */
    bool failed;

    uint64_t at;             /* bytes seen, the current one included */
    char marker[MARKER_MAX]; /* what may become NS or a thought marker */
    uint32_t marker_length;
    bool in_tag;       /* behind NS */
    uint64_t tag_from; /* where that NS begins */
    base_buf tag;
    char space[SPACE_MAX];
    uint32_t space_length;

    stop *stops;
    base_buf held;     /* visible text that may begin a stop string */
    uint64_t *held_at; /* [longest stop + 1] where each held byte stands in the output */
    bool stopped;
    uint64_t stopped_at;
    int32_t stop_index;

    char character[4]; /* a cut character of the channel that is written */
    uint32_t character_length;
    base_buf out; /* what the next part will hold */
    eng_part_kind out_kind;

    uint32_t calls_begun, calls_ended;
    chat_schema *schema; /* of the tool `schema_tool` */
    base_buf schema_tool;
    bool any_member; /* the call's arguments have a member: `{` is out */
    bool text_begun; /* STRING: the opening quote is out */
    bool may_nest;   /* STRING: no schema, nothing came yet: a tag would make it a TREE */
    bool discard;    /* STRING: the parameter came before; one that is out cannot be changed */
    bool list_waits; /* BODY: a TREE is closed but may become a list */
    base_buf key;    /* the parameter's name */
    base_buf stray;  /* BODY: text outside of parameters */
    chat_tree *tree;
    uint64_t *seen; /* hashes of the call's parameters */
    uint32_t seen_count, seen_capacity;

    uint64_t *ends; /* where tokens end that are not wholly given out */
    uint32_t end_count, end_capacity;
    uint32_t whole_tokens, reasoning_tokens;
};

/* ---- parts ---- */

static void flush_part(eng_decoder *d)
{
    if (d->out.failed)
        d->failed = true;
    if (d->out.length > 0 && !d->failed) {
        eng_part part = {.kind = d->out_kind, .text = d->out.data, .length = d->out.length};
        part.call = d->calls_begun == 0 ? 0 : d->calls_begun - 1;
        d->options.part(d->options.ctx, &part);
    }
    base_buf_clear(&d->out);
}

/* The buffer for more of a kind; what is there of another kind goes out first. */
static base_buf *out(eng_decoder *d, eng_part_kind kind)
{
    if (d->out_kind != kind)
        flush_part(d);
    d->out_kind = kind;
    return &d->out;
}

static void mark(eng_decoder *d, eng_part_kind kind, const char *text, size_t length)
{
    flush_part(d);
    if (d->failed)
        return;
    eng_part part = {.kind = kind, .call = d->calls_begun - 1, .text = text, .length = length};
    d->options.part(d->options.ctx, &part);
}

/* ---- characters ---- */

static eng_part_kind channel(const eng_decoder *d)
{
    if (d->state == STRING)
        return ENG_PART_CALL_ARGS;
    return d->reasoning ? ENG_PART_REASONING : ENG_PART_TEXT;
}

static void put_character(eng_decoder *d, const char *bytes, size_t length)
{
    eng_part_kind kind = channel(d);
    base_buf *to = out(d, kind);
    if (kind != ENG_PART_CALL_ARGS) {
        base_buf_add(to, bytes, length);
        return;
    }
    unsigned char c = (unsigned char)bytes[0];
    if (c >= 0x20 && c != '"' && c != '\\') {
        base_buf_add(to, bytes, length);
        return;
    }
    const char *names = "\"\"\\\\\nn\rr\tt", *name = names;
    while (*name != '\0' && (unsigned char)*name != c)
        name += 2;
    if (*name != '\0')
        base_buf_printf(to, "\\%c", name[1]);
    else
        base_buf_printf(to, "\\u%04x", c);
}

#define REPLACEMENT "\xEF\xBF\xBD"

/* Bytes that are no character become one U+FFFD for each longest beginning of one. */
static void put_byte(eng_decoder *d, char c)
{
    d->character[d->character_length++] = c;
    if (base_utf8_char(d->character, d->character_length, NULL) > 0) {
        put_character(d, d->character, d->character_length);
        d->character_length = 0;
        return;
    }
    if (base_utf8_complete(d->character, d->character_length) == 0)
        return;
    bool again =
        d->character_length > 1; /* the last byte ends what came before, and may begin another */
    d->character_length = 0;
    put_character(d, REPLACEMENT, 3);
    if (again)
        put_byte(d, c);
}

static void end_character(eng_decoder *d)
{
    if (d->character_length > 0)
        put_character(d, REPLACEMENT, 3);
    d->character_length = 0;
}

/* ---- visible text and stop strings ---- */

static void release_held(eng_decoder *d, size_t count)
{
    for (size_t i = 0; i < count; i++)
        put_byte(d, d->held.data[i]);
    base_buf_drop(&d->held, count);
    memmove(d->held_at, d->held_at + count, d->held.length * sizeof *d->held_at);
}

static uint32_t advance_stop(stop *s, char c)
{
    while (s->matched > 0 && s->text.data[s->matched] != c)
        s->matched = s->fallback[s->matched - 1];
    if (s->text.length > 0 && s->text.data[s->matched] == c)
        s->matched++;
    return s->matched;
}

/* A byte of visible text that stands at `at` in the output. */
static void visible_byte(eng_decoder *d, char c, uint64_t at)
{
    if (d->options.stop_count == 0) {
        put_byte(d, c);
        return;
    }
    base_buf_add(&d->held, &c, 1);
    if (d->held.failed) {
        d->failed = true;
        return;
    }
    d->held_at[d->held.length - 1] = at;
    size_t keep = 0, longest = 0;
    for (uint32_t i = 0; i < d->options.stop_count; i++) {
        stop *s = &d->stops[i];
        uint32_t matched = advance_stop(s, c);
        if (matched > 0 && matched == s->text.length && matched > longest) {
            longest = matched;
            d->stop_index = (int32_t)i;
        }
        keep = base_max(keep, matched);
    }
    if (longest == 0) {
        release_held(d, d->held.length - keep);
        return;
    }
    d->stopped = true;
    d->stopped_at = d->held_at[d->held.length - longest];
    release_held(d, d->held.length - longest);
    base_buf_clear(&d->held);
    end_character(d);
}

/* Prose is over: nothing that was held can become a stop string or a character any more. */
static void end_prose(eng_decoder *d)
{
    release_held(d, d->held.length);
    end_character(d);
    for (uint32_t i = 0; i < d->options.stop_count; i++)
        d->stops[i].matched = 0;
}

static void prose_byte(eng_decoder *d, char c, uint64_t at)
{
    d->at_start = false;
    if (d->reasoning)
        put_byte(d, c);
    else
        visible_byte(d, c, at);
}

/* ---- calls ---- */

/* Finds the called tool among the declared ones and makes its parameters' schema the current one.
 */
static void choose_schema(eng_decoder *d, eng_text name)
{
    if (d->schema != NULL && d->schema_tool.length == name.length &&
        (name.length == 0 || memcmp(d->schema_tool.data, name.data, name.length) == 0))
        return;
    chat_schema_destroy(d->schema);
    d->schema = NULL;
    base_buf_clear(&d->schema_tool);
    for (uint32_t i = 0; i < d->options.tool_count; i++) {
        eng_text raw = chat_json_member(d->options.tools[i], "name", 4);
        if (raw.length < 2 || raw.data[0] != '"' ||
            !chat_json_is(raw.data, raw.length, name.data, name.length))
            continue;
        eng_text parameters =
            chat_json_member(d->options.tools[i], "parameters", strlen("parameters"));
        if (parameters.data == NULL)
            parameters = (eng_text){"{}", 2};
        d->schema = chat_schema_create(parameters);
        base_buf_add(&d->schema_tool, name.data, name.length);
        d->failed = d->failed || d->schema == NULL || d->schema_tool.failed;
        return;
    }
}

static void begin_call(eng_decoder *d, eng_text name)
{
    end_prose(d);
    flush_part(d);
    d->reasoning = false;
    choose_schema(d, name);
    d->calls_begun++;
    d->any_member = false;
    d->seen_count = 0;
    d->list_waits = false;
    base_buf_clear(&d->stray);
    /* The name is data of the model: what is no UTF-8 in it is replaced. */
    base_buf clean;
    base_buf_init(&clean, 0);
    for (size_t i = 0; i < name.length;) {
        size_t n = base_utf8_char(name.data + i, name.length - i, NULL);
        base_buf_add(&clean, n > 0 ? name.data + i : REPLACEMENT, n > 0 ? n : 3);
        i += n > 0 ? n : 1;
    }
    d->failed = d->failed || clean.failed;
    mark(d, ENG_PART_CALL_BEGIN, clean.data == NULL ? "" : clean.data, clean.length);
    base_buf_deinit(&clean);
    d->state = BODY;
}

/* A member's key, with what stands before it. */
static base_buf *begin_member(eng_decoder *d)
{
    base_buf *to = out(d, ENG_PART_CALL_ARGS);
    base_buf_add(to, d->any_member ? "," : "{", 1);
    chat_json_string(to, d->key.data == NULL ? "" : d->key.data, d->key.length);
    base_buf_add(to, ":", 1);
    d->any_member = true;
    return to;
}

static uint64_t hash_name(const char *name, size_t length)
{
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)name[i]) * 1099511628211u;
    return hash;
}

static bool seen(const eng_decoder *d, const char *name, size_t length)
{
    uint64_t hash = hash_name(name, length);
    for (uint32_t i = 0; i < d->seen_count; i++)
        if (d->seen[i] == hash)
            return true;
    return false;
}

static void see(eng_decoder *d, const char *name, size_t length)
{
    if (d->seen_count == d->seen_capacity) {
        uint32_t capacity = 2 * d->seen_capacity + 16;
        uint64_t *grown = realloc(d->seen, capacity * sizeof *grown);
        if (grown == NULL) {
            d->failed = true;
            return;
        }
        d->seen = grown;
        d->seen_capacity = capacity;
    }
    d->seen[d->seen_count++] = hash_name(name, length);
}

static void write_tree(eng_decoder *d)
{
    d->list_waits = false;
    chat_tree_write(d->tree, begin_member(d));
    d->failed = d->failed || chat_tree_failed(d->tree) || chat_schema_failed(d->schema);
}

/* The value is complete, be it by its closing tag or by what ends it too. */
static void close_value(eng_decoder *d)
{
    if (d->state == STRING && !d->discard) {
        end_character(d);
        if (!d->text_begun)
            base_buf_add(begin_member(d), "\"", 1);
        base_buf_add(out(d, ENG_PART_CALL_ARGS), "\"", 1);
    } else if (d->state == TREE) {
        d->list_waits = chat_tree_may_repeat(d->tree);
        if (!d->list_waits)
            write_tree(d);
    }
    d->state = BODY;
    base_buf_clear(&d->stray);
}

static void end_call(eng_decoder *d)
{
    if (d->state != BODY)
        close_value(d);
    if (d->list_waits)
        write_tree(d);
    base_buf_puts(out(d, ENG_PART_CALL_ARGS), d->any_member ? "}" : "{}");
    mark(d, ENG_PART_CALL_END, "", 0);
    d->calls_ended++;
    d->state = BLOCK;
    d->gap = GAP_BETWEEN;
}

static void begin_tree(eng_decoder *d, int32_t node)
{
    if (d->tree == NULL && (d->tree = chat_tree_create()) == NULL) {
        d->failed = true;
        return;
    }
    chat_tree_begin(d->tree, d->schema, node, d->key.data == NULL ? "" : d->key.data,
                    d->key.length);
    d->state = TREE;
}

static void open_value(eng_decoder *d, const char *name, size_t length)
{
    bool same = d->key.length == length && (length == 0 || memcmp(d->key.data, name, length) == 0);
    if (d->list_waits && same) {
        d->list_waits = false;
        chat_tree_again(d->tree);
        d->state = TREE;
        return;
    }
    if (d->list_waits)
        write_tree(d);
    base_buf_clear(&d->key);
    base_buf_add(&d->key, name, length);
    base_buf_clear(&d->stray);
    int32_t node = d->schema == NULL ? -1 : chat_schema_member(d->schema, 0, name, length, NULL);
    uint8_t kinds = chat_schema_kinds(d->schema, node);
    d->discard = seen(d, name, length);
    d->text_begun = false;
    d->may_nest = kinds == 0 && !d->discard;
    see(d, name, length);
    d->failed = d->failed || d->key.failed || chat_schema_failed(d->schema);
    if (d->discard || kinds == 0 || kinds == CHAT_STRING)
        d->state = STRING;
    else
        begin_tree(d, node);
}

/* A value whose opening tag was left out: its closing tag names it. */
static void unopened_value(eng_decoder *d, const char *name, size_t length)
{
    base_buf text = d->stray;
    bool blank = true;
    for (size_t i = 0; i < text.length && blank; i++)
        blank = memchr(" \t\r\n", text.data[i], 4) != NULL;
    if (blank || seen(d, name, length))
        return;
    d->stray = (base_buf){0};
    open_value(d, name, length);
    if (d->state == TREE) {
        chat_tree_text(d->tree, text.data, text.length);
    } else {
        base_buf_add(begin_member(d), "\"", 1);
        d->text_begun = true;
        for (size_t i = 0; i < text.length; i++)
            put_byte(d, text.data[i]);
    }
    close_value(d);
    base_buf_deinit(&text);
}

/* Text of a STRING. */
static void string_bytes(eng_decoder *d, const char *bytes, size_t length)
{
    if (d->discard || length == 0)
        return;
    if (!d->text_begun)
        base_buf_add(begin_member(d), "\"", 1);
    d->text_begun = true;
    for (size_t i = 0; i < length; i++)
        put_byte(d, bytes[i]);
}

/* ---- bytes that are no marker ---- */

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* In a BLOCK: white space is held; anything else shows that prose goes on. White space behind a
 * call is layout. */
static void block_byte(eng_decoder *d, char c, uint64_t at)
{
    if (is_space(c) && d->space_length < SPACE_MAX) {
        d->space[d->space_length++] = c;
        return;
    }
    uint32_t count = d->space_length;
    d->state = PROSE;
    d->space_length = 0;
    for (uint32_t i = 0; i < count && d->gap != GAP_BETWEEN && !d->stopped; i++)
        prose_byte(d, d->space[i], at - count + i);
    if (!d->stopped)
        prose_byte(d, c, at);
}

static void data_byte(eng_decoder *d, char c, uint64_t at)
{
    switch (d->state) {
    case PROSE:
        prose_byte(d, c, at);
        break;
    case BLOCK:
        block_byte(d, c, at);
        break;
    case BODY:
        base_buf_add(&d->stray, &c, 1);
        d->failed = d->failed || d->stray.failed;
        break;
    case STRING:
        string_bytes(d, &c, 1);
        break;
    case TREE:
        chat_tree_text(d->tree, &c, 1);
        break;
    }
}

/* ---- tags ---- */

typedef enum tag_kind {
    TAG_OPEN,
    TAG_CLOSE,
    TAG_INVOKE,
    TAG_INVOKE_CLOSE,
    TAG_BLOCK,
    TAG_BLOCK_CLOSE
} tag_kind;

/* What a whole tag (brackets included) is; `name` is what it names. */
static tag_kind read_tag(const base_buf *tag, eng_text *name)
{
    const char *text = tag->data;
    size_t length = tag->length, invoke = sizeof INVOKE - 1;
    *name = (eng_text){text + 1, length - 2};
    if (length >= invoke + 2 && memcmp(text, INVOKE, invoke) == 0) {
        *name = (eng_text){text + invoke, length - invoke - 2};
        return TAG_INVOKE;
    }
    if (strcmp(text, "</invoke>") == 0)
        return TAG_INVOKE_CLOSE;
    if (strcmp(text, "<tool_call>") == 0)
        return TAG_BLOCK;
    if (strcmp(text, "</tool_call>") == 0)
        return TAG_BLOCK_CLOSE;
    if (text[1] != '/')
        return TAG_OPEN;
    *name = (eng_text){text + 2, length - 3};
    return TAG_CLOSE;
}

static void begin_gap(eng_decoder *d, gap where)
{
    d->state = BLOCK;
    d->gap = where;
    d->space_length = 0;
}

/* A tag in PROSE or BLOCK; it is one of the four that mean something there. */
static void on_prose_tag(eng_decoder *d, tag_kind kind, eng_text name)
{
    d->at_start = false;
    switch (kind) {
    case TAG_BLOCK:
        d->in_block = true;
        begin_gap(d, GAP_OPENED);
        break;
    case TAG_BLOCK_CLOSE:
        if (d->state == BLOCK) {
            if (d->reasoning) /* a block without a call ends a thought too */
                end_prose(d);
            d->reasoning = false;
            begin_gap(d, d->gap == GAP_BETWEEN ? GAP_CLOSED : d->gap);
        }
        d->in_block = false;
        break;
    case TAG_INVOKE:
        d->space_length = 0;
        begin_call(d, name);
        break;
    default:
        break; /* a stray `</invoke>` */
    }
}

/* Tags that end the call from wherever it stands. Returns false for the others. */
static bool on_call_end(eng_decoder *d, tag_kind kind, eng_text name)
{
    if (kind == TAG_OPEN || kind == TAG_CLOSE)
        return false;
    end_call(d);
    begin_gap(d, kind == TAG_BLOCK_CLOSE ? GAP_CLOSED : GAP_BETWEEN);
    d->in_block = kind != TAG_BLOCK_CLOSE;
    if (kind == TAG_INVOKE)
        begin_call(d, name);
    return true;
}

static bool wanted(eng_decoder *d, eng_text name)
{
    bool declared = false;
    if (d->schema != NULL)
        chat_schema_member(d->schema, 0, name.data, name.length, &declared);
    return declared && !seen(d, name.data, name.length);
}

static void on_string_tag(eng_decoder *d, tag_kind kind, eng_text name)
{
    if (kind == TAG_CLOSE && name.length == d->key.length &&
        memcmp(name.data, d->key.data, name.length) == 0) {
        close_value(d);
    } else if (kind == TAG_OPEN && d->may_nest && !d->text_begun) {
        begin_tree(d, -1);
        if (d->state == TREE)
            chat_tree_open(d->tree, name.data, name.length);
    } else if (kind == TAG_OPEN && wanted(d, name)) {
        close_value(d);
        open_value(d, name.data, name.length);
    } else {
        string_bytes(d, CHAT_NS, sizeof CHAT_NS - 1);
        string_bytes(d, d->tag.data, d->tag.length);
    }
}

static void on_tree_tag(eng_decoder *d, tag_kind kind, eng_text name)
{
    chat_tree_result result = kind == TAG_CLOSE ? chat_tree_close(d->tree, name.data, name.length)
                                                : chat_tree_open(d->tree, name.data, name.length);
    d->failed = d->failed || chat_tree_failed(d->tree);
    if (result == CHAT_TREE_CLOSED) {
        close_value(d);
    } else if (result == CHAT_TREE_ABOVE) {
        int32_t node = chat_schema_member(d->schema, 0, d->key.data, d->key.length, NULL);
        if ((chat_schema_kinds(d->schema, node) & CHAT_STRING) == 0 || wanted(d, name)) {
            close_value(d);
            open_value(d, name.data, name.length);
        } else {
            chat_tree_text(d->tree, CHAT_NS, sizeof CHAT_NS - 1);
            chat_tree_text(d->tree, d->tag.data, d->tag.length);
        }
    }
}

static void on_tag(eng_decoder *d)
{
    eng_text name;
    tag_kind kind = read_tag(&d->tag, &name);
    d->in_tag = false;
    if (d->state == PROSE || d->state == BLOCK)
        on_prose_tag(d, kind, name);
    else if (on_call_end(d, kind, name))
        return;
    else if (d->state == STRING)
        on_string_tag(d, kind, name);
    else if (d->state == TREE)
        on_tree_tag(d, kind, name);
    else if (kind == TAG_OPEN)
        open_value(d, name.data, name.length);
    else
        unopened_value(d, name.data, name.length);
}

static bool begins(const base_buf *tag, const char *whole)
{
    size_t length = strlen(whole);
    return tag->length <= length && memcmp(tag->data, whole, tag->length) == 0;
}

/* Whether what stands behind NS in prose can still become a tag that means something there. */
static bool prose_tag_lives(const eng_decoder *d)
{
    const base_buf *tag = &d->tag;
    size_t invoke = sizeof INVOKE - 1;
    if (begins(tag, "<tool_call>") || begins(tag, "</tool_call>"))
        return true;
    if (!d->in_block)
        return false;
    if (begins(tag, "</invoke>") || begins(tag, INVOKE))
        return true;
    if (tag->length <= invoke || memcmp(tag->data, INVOKE, invoke) != 0)
        return false;
    /* A name has no line end and no quote but the one before the bracket. */
    char last = tag->data[tag->length - 1];
    const char *quote = memchr(tag->data + invoke, '"', tag->length - invoke);
    bool in_name = quote == NULL && last != '\n' && tag->length < invoke + NAME_MAX;
    return in_name || (quote != NULL && tag->data + tag->length - quote == 1) ||
           (quote != NULL && tag->data + tag->length - quote == 2 && last == '>');
}

static bool tag_is_whole(const base_buf *tag)
{
    size_t invoke = sizeof INVOKE - 1;
    if (tag->data[tag->length - 1] != '>')
        return false;
    bool header = tag->length > invoke && memcmp(tag->data, INVOKE, invoke) == 0;
    return !header || (tag->length >= invoke + 2 && tag->data[tag->length - 2] == '"');
}

static void feed(eng_decoder *d, char c);

/* NS was no separator of a tag. In a string it is data; elsewhere it is dropped. What followed it
 * is looked at again; the opening of a header whose name cannot be one is dropped too. */
static void on_dead_tag(eng_decoder *d)
{
    base_buf tag = d->tag;
    size_t from = 0, invoke = sizeof INVOKE - 1;
    d->tag = (base_buf){0};
    d->in_tag = false;
    if (d->state == STRING)
        string_bytes(d, CHAT_NS, sizeof CHAT_NS - 1);
    else if (d->state == BODY)
        base_buf_clear(&d->stray);
    else if (d->state != TREE && tag.length > invoke && memcmp(tag.data, INVOKE, invoke) == 0)
        from = invoke;
    d->at -= tag.length - from;
    for (size_t i = from; i < tag.length && !d->stopped; i++) {
        d->at++;
        feed(d, tag.data[i]);
    }
    base_buf_deinit(&tag);
}

/* A byte behind NS. */
static void tag_byte(eng_decoder *d, char c)
{
    size_t ns = sizeof CHAT_NS - 1;
    base_buf_add(&d->tag, &c, 1);
    if (d->tag.failed) {
        d->failed = true;
        return;
    }
    bool prose = d->state == PROSE || d->state == BLOCK;
    bool lives = prose ? prose_tag_lives(d) : d->tag.data[0] == '<' && d->tag.length <= TAG_MAX;
    /* An NS inside: the tag before it is none. */
    if (lives && c == '[' && d->tag.length > ns &&
        memcmp(d->tag.data + d->tag.length - ns, CHAT_NS, ns) == 0)
        lives = false;
    if (!prose && (strcmp(d->tag.data, "<>") == 0 || strcmp(d->tag.data, "</>") == 0)) /* no name */
        lives = false;
    if (!lives)
        on_dead_tag(d);
    else if (tag_is_whole(&d->tag))
        on_tag(d);
}

/* ---- markers ---- */

typedef enum marker { MARKER_NONE, MARKER_PART, MARKER_NS, MARKER_THINK, MARKER_THINK_END } marker;

static bool takes_think(const eng_decoder *d)
{
    return d->at_start && d->state == PROSE;
}

static bool takes_think_end(const eng_decoder *d)
{
    return (d->state == PROSE || d->state == BLOCK) &&
           (d->reasoning || d->at_start || d->drop_closer);
}

/* What the bytes of `marker` are in this state. */
static marker read_marker(const eng_decoder *d)
{
    static const struct {
        const char *text;
        uint32_t length;
        marker is;
    } markers[] = {{CHAT_NS, sizeof CHAT_NS - 1, MARKER_NS},
                   {CHAT_THINK, sizeof CHAT_THINK - 1, MARKER_THINK},
                   {CHAT_THINK_END, sizeof CHAT_THINK_END - 1, MARKER_THINK_END}};
    marker found = MARKER_NONE;
    for (int i = 0; i < 3; i++) {
        if ((markers[i].is == MARKER_THINK && !takes_think(d)) ||
            (markers[i].is == MARKER_THINK_END && !takes_think_end(d)))
            continue;
        if (d->marker_length > markers[i].length ||
            memcmp(d->marker, markers[i].text, d->marker_length) != 0)
            continue;
        if (d->marker_length == markers[i].length)
            return markers[i].is;
        found = MARKER_PART;
    }
    return found;
}

static void on_think(eng_decoder *d)
{
    d->at_start = false;
    if (d->options.thinking == ENG_THINK_DISABLED)
        d->drop_closer = true; /* thinking is off: what follows is text, its marker is not */
    else
        d->reasoning = true;
}

static void on_think_end(eng_decoder *d)
{
    if (d->reasoning)
        end_prose(d);
    d->at_start = false;
    d->drop_closer = false;
    d->reasoning = false;
    d->state = PROSE;
    d->space_length = 0;
}

static void on_marker(eng_decoder *d, marker which)
{
    d->marker_length = 0;
    if (which == MARKER_THINK) {
        on_think(d);
    } else if (which == MARKER_THINK_END) {
        on_think_end(d);
    } else {
        d->in_tag = true;
        d->tag_from = d->at - (sizeof CHAT_NS - 1);
        base_buf_clear(&d->tag);
    }
}

static void pop_marker(eng_decoder *d)
{
    char first = d->marker[0];
    uint64_t at = d->at - d->marker_length;
    d->marker_length--;
    memmove(d->marker, d->marker + 1, d->marker_length);
    data_byte(d, first, at);
}

static void feed(eng_decoder *d, char c)
{
    if (d->in_tag) {
        tag_byte(d, c);
        return;
    }
    if (d->marker_length == 0 && c != ']' && c != '<') {
        data_byte(d, c, d->at - 1);
        return;
    }
    d->marker[d->marker_length++] = c;
    while (d->marker_length > 0 && !d->stopped) {
        marker which = read_marker(d);
        if (which == MARKER_PART)
            return;
        if (which != MARKER_NONE) {
            on_marker(d, which);
            return;
        }
        pop_marker(d);
    }
}

/* ---- tokens ---- */

/* The first byte of the output that is still held. */
static uint64_t held_from(const eng_decoder *d)
{
    if (d->stopped)
        return d->stopped_at;
    if (d->held.length > 0)
        return d->held_at[0];
    if (d->in_tag)
        return d->tag_from;
    return d->at - d->marker_length;
}

static void count_token(eng_decoder *d)
{
    if (d->end_count == d->end_capacity) {
        uint32_t capacity = 2 * d->end_capacity + 16;
        uint64_t *grown = realloc(d->ends, capacity * sizeof *grown);
        if (grown == NULL) {
            d->failed = true;
            return;
        }
        d->ends = grown;
        d->end_capacity = capacity;
    }
    d->ends[d->end_count++] = d->at;
}

static void count_whole(eng_decoder *d)
{
    uint64_t whole = held_from(d);
    uint32_t count = 0;
    while (count < d->end_count && d->ends[count] <= whole)
        count++;
    if (count == 0)
        return;
    d->whole_tokens += count;
    d->end_count -= count;
    memmove(d->ends, d->ends + count, d->end_count * sizeof *d->ends);
}

/* A special token by its id: part of the format, or not given out at all. */
static bool is_dropped(eng_decoder *d, int32_t id)
{
    const int32_t *of = d->codec->id;
    if (id < 0 || !eng_tok_is_special(d->codec->tok, id))
        return false;
    if (id == of[CHAT_END]) {
        d->ended = true;
        return true;
    }
    if (d->options.parse == ENG_PARSE_RAW)
        return false;
    /* It cannot go on what ordinary tokens began to spell. */
    while (d->marker_length > 0 && !d->stopped)
        pop_marker(d);
    if (id == of[CHAT_REASON])
        return !takes_think(d);
    if (id == of[CHAT_REASON_CLOSE])
        return !takes_think_end(d);
    return id != of[CHAT_SEPARATOR] && id != of[CHAT_CALL] && id != of[CHAT_CALL_CLOSE];
}

bool eng_decoder_push(eng_decoder *d, int32_t id, const char *bytes, size_t length)
{
    if (d->stopped || d->failed)
        return false;
    bool reasoning = d->reasoning;
    d->ended = false;
    if (!is_dropped(d, id))
        for (size_t i = 0; i < length && !d->stopped; i++) {
            d->at++;
            if (d->options.parse == ENG_PARSE_RAW)
                visible_byte(d, bytes[i], d->at - 1);
            else
                feed(d, bytes[i]);
        }
    count_token(d);
    count_whole(d);
    d->reasoning_tokens += reasoning || d->reasoning;
    flush_part(d);
    return !d->stopped && !d->failed;
}

void eng_decoder_finish(eng_decoder *d)
{
    if (!d->stopped) {
        bool in_call = d->state == BODY || d->state == STRING || d->state == TREE;
        if (!d->in_tag && (!in_call || d->ended))
            while (d->marker_length > 0 && !d->stopped &&
                   (d->state == PROSE || in_call || d->gap == GAP_CLOSED))
                pop_marker(d);
        /* A call that the end of turn found open is taken as it stands; one that was cut off is not
         * finished here. */
        if (in_call && d->ended)
            end_call(d);
        else if (!in_call && !d->stopped)
            end_prose(d);
        d->in_tag = false;
        d->marker_length = 0;
        count_whole(d);
    }
    flush_part(d);
}

/* ---- the decoder ---- */

static base_code prepare_stops(eng_decoder *d, base_err *err)
{
    size_t longest = 0;
    d->stops = calloc(d->options.stop_count + 1, sizeof *d->stops);
    if (d->stops == NULL)
        return base_fail(err, BASE_NOMEM, "decoder: no memory");
    for (uint32_t i = 0; i < d->options.stop_count; i++) {
        stop *s = &d->stops[i];
        s->text = d->options.stops[i];
        longest = base_max(longest, s->text.length);
        s->fallback = calloc(s->text.length + 1, sizeof *s->fallback);
        if (s->fallback == NULL)
            return base_fail(err, BASE_NOMEM, "decoder: no memory");
        for (uint32_t at = 1, k = 0; at < s->text.length; at++) {
            while (k > 0 && s->text.data[at] != s->text.data[k])
                k = s->fallback[k - 1];
            k += s->text.data[at] == s->text.data[k];
            s->fallback[at] = k;
        }
    }
    d->held_at = calloc(longest + 2, sizeof *d->held_at);
    return d->held_at == NULL ? base_fail(err, BASE_NOMEM, "decoder: no memory") : BASE_OK;
}

base_code eng_decoder_create(eng_decoder **out_decoder, const eng_codec *codec,
                             const eng_decoder_options *options, base_err *err)
{
    *out_decoder = NULL;
    eng_decoder *d = calloc(1, sizeof *d);
    if (d == NULL)
        return base_fail(err, BASE_NOMEM, "decoder: no memory");
    d->codec = codec;
    d->options = *options;
    d->state = PROSE;
    d->reasoning = options->parse == ENG_PARSE_CHAT && options->starts_in_reasoning;
    d->at_start = true;
    d->stop_index = -1;
    base_code code = prepare_stops(d, err);
    if (code != BASE_OK) {
        eng_decoder_destroy(d);
        return code;
    }
    *out_decoder = d;
    return BASE_OK;
}

void eng_decoder_destroy(eng_decoder *d)
{
    if (d == NULL)
        return;
    for (uint32_t i = 0; d->stops != NULL && i < d->options.stop_count; i++)
        free(d->stops[i].fallback);
    free(d->stops);
    free(d->held_at);
    free(d->seen);
    free(d->ends);
    chat_schema_destroy(d->schema);
    chat_tree_destroy(d->tree);
    base_buf *bufs[] = {&d->tag, &d->held, &d->out, &d->schema_tool, &d->key, &d->stray};
    for (size_t i = 0; i < sizeof bufs / sizeof *bufs; i++)
        base_buf_deinit(bufs[i]);
    free(d);
}

int32_t eng_decoder_stop_index(const eng_decoder *d)
{
    return d->stopped ? d->stop_index : -1;
}

uint32_t eng_decoder_whole_tokens(const eng_decoder *d)
{
    return d->whole_tokens;
}

uint32_t eng_decoder_reasoning_tokens(const eng_decoder *d)
{
    return d->reasoning_tokens;
}

uint32_t eng_decoder_calls(const eng_decoder *d)
{
    return d->calls_ended;
}

bool eng_decoder_in_reasoning(const eng_decoder *d)
{
    return d->reasoning;
}
