/* ledger_item: what counts as the same item. Pure functions.
 *
 *   what the client changed                          same   how
 *   blank, tab, CR, LF at the ends of a text         yes    trimmed, in every role
 *   text null, absent or ""                          yes    all are the empty text
 *   other borders of content parts                   yes    joined by the dialect
 *   call ids regenerated or absent                   yes    no part of an item
 *   arguments: order, white space, escapes           yes    canonical JSON
 *   arguments: 1.50 for 1.5, 1e2 for 100, -0 for 0   yes    equal as doubles is equal
 *   arguments "", null or {}                         yes    all are the empty object
 *   arguments that are not JSON                      no     byte for byte only, ends trimmed
 *   order, number or names of calls                  no     framed in order
 *   any other character of the text                  no     what a client edited wins
 *   reasoning absent, "" or blank                    -      gw_ledger_match decides
 *   reasoning sent, other white space at its ends    yes    trimmed
 *   reasoning sent and different                     no     part of the node
 *   system for developer                             yes    one role here
 *   tools: white space between JSON tokens           yes    skipped
 *   tools: order of members or tools, escapes        no     rendered in the order given
 *   model, sampling, max_tokens                      yes    no part of the prompt
 *
 * A client that was interrupted returns the beginning of a text: rule 6 at gw_ledger_match.
 *
 * Keys only: what is not spliced is rendered as it was sent. Numbers are compared as doubles, since
 * a client in JavaScript cannot send back more. SHA-256, because a crafted collision would give one
 * user's hidden tokens to another of the same tenant. */
#include "gateway/ledger_internal.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/json.h"
#include "engine/base/num.h"

/* ---- hashing ---- */

static EVP_MD *sha256;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Fetched once: the implicit fetch of EVP_sha256() costs as much as a short hash. Lives as long as
 * the process. */
static void fetch(void)
{
    sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
}

gw_hash gw_hash_open(void)
{
    pthread_once(&once, fetch);
    gw_hash hash = {.ctx = EVP_MD_CTX_new()};
    hash.failed = !hash.ctx || !sha256;
    return hash;
}

void gw_hash_close(gw_hash *hash)
{
    EVP_MD_CTX_free(hash->ctx);
    hash->ctx = NULL;
}

static void raw(gw_hash *hash, const void *bytes, size_t length)
{
    if (!hash->failed && length && EVP_DigestUpdate(hash->ctx, bytes, length) != 1)
        hash->failed = true;
}

void gw_hash_begin(gw_hash *hash, const char *kind)
{
    if (!hash->failed && EVP_DigestInit_ex2(hash->ctx, sha256, NULL) != 1)
        hash->failed = true;
    gw_hash_part(hash, kind, strlen(kind));
}

void gw_hash_part(gw_hash *hash, const void *bytes, size_t length)
{
    uint64_t frame = length;
    raw(hash, &frame, sizeof(frame));
    raw(hash, bytes, length);
}

void gw_hash_end(gw_hash *hash, gw_digest *out)
{
    unsigned length = sizeof(out->bytes);
    if (hash->failed || EVP_DigestFinal_ex(hash->ctx, out->bytes, &length) != 1) {
        hash->failed = true;
        memset(out, 0, sizeof(*out));
    }
}

bool gw_digest_equal(const gw_digest *a, const gw_digest *b)
{
    return memcmp(a->bytes, b->bytes, sizeof(a->bytes)) == 0;
}

/* ---- texts ---- */

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

eng_text gw_text_trim(eng_text text)
{
    if (!text.data)
        return (eng_text){"", 0};
    while (text.length && is_space(text.data[0])) {
        text.data++;
        text.length--;
    }
    while (text.length && is_space(text.data[text.length - 1]))
        text.length--;
    return text;
}

/* ---- canonical JSON ----
 *
 * A value becomes a byte string: a tag and its content. A container of more than INLINE_MAX bytes
 * is replaced by its digest when it closes, so that every byte is copied and hashed a bounded
 * number of times however deep it stands. */

#define INLINE_MAX 64

typedef struct span {
    size_t offset, length;
} span;

typedef struct level {
    bool object;
    size_t text;  /* where the container's text begins in `out` */
    size_t spans; /* where its children begin in `spans` */
} level;

typedef struct canon {
    base_buf out; /* finished values, stacked */
    base_buf scratch;
    span *spans; /* children of open containers, stacked */
    size_t span_count, span_capacity;
    level levels[BASE_JSON_DEPTH_MAX + 1];
    uint32_t depth;
    size_t key; /* begin of a member's name in `out` */
    bool failed;
} canon;

static void put_framed(base_buf *out, const void *bytes, size_t length)
{
    uint64_t frame = length;
    base_buf_add(out, &frame, sizeof(frame));
    base_buf_add(out, bytes, length);
}

/* Appends tag and content, or tag, '#' and the content's digest. */
static void put_value(canon *c, gw_hash *hash, char tag, const char *bytes, size_t length)
{
    base_buf_add(&c->out, &tag, 1);
    if (length <= INLINE_MAX) {
        base_buf_add(&c->out, "=", 1);
        base_buf_add(&c->out, bytes, length);
        return;
    }
    gw_digest digest;
    gw_hash_begin(hash, "value");
    gw_hash_part(hash, bytes, length);
    gw_hash_end(hash, &digest);
    base_buf_add(&c->out, "#", 1);
    base_buf_add(&c->out, digest.bytes, sizeof(digest.bytes));
}

static void put_number(canon *c, gw_hash *hash, const char *text, size_t length)
{
    char copy[400], canonical[40];
    if (length < sizeof(copy)) {
        memcpy(copy, text, length);
        copy[length] = '\0';
        double value = strtod(copy, NULL);
        if (isfinite(value)) {
            int count = snprintf(canonical, sizeof(canonical), "%.17g", value == 0 ? 0.0 : value);
            put_value(c, hash, 'n', canonical, (size_t)count);
            return;
        }
    }
    put_value(c, hash, 'N', text, length);
}

/* A value of the level below is complete; it began at `begin` (a member's name included). */
static void add_span(canon *c, size_t begin)
{
    if (c->span_count == c->span_capacity) {
        size_t capacity = c->span_capacity ? c->span_capacity * 2 : 32;
        span *more = realloc(c->spans, capacity * sizeof(*more));
        if (!more) {
            c->failed = true;
            return;
        }
        c->spans = more;
        c->span_capacity = capacity;
    }
    c->spans[c->span_count++] = (span){begin, c->out.length - begin};
}

static int compare_spans(const void *a, const void *b, void *bytes)
{
    const span *x = a, *y = b;
    const char *text = bytes;
    int order = memcmp(text + x->offset, text + y->offset, base_min(x->length, y->length));
    return order ? order : (x->length > y->length) - (x->length < y->length);
}

static void close_level(canon *c, gw_hash *hash)
{
    level *top = &c->levels[--c->depth];
    span *children = c->spans + top->spans;
    size_t count = c->span_count - top->spans;
    if (top->object && count > 1)
        qsort_r(children, count, sizeof(*children), compare_spans, c->out.data);
    base_buf_clear(&c->scratch);
    for (size_t i = 0; i < count; i++)
        put_framed(&c->scratch, c->out.data + children[i].offset, children[i].length);
    c->span_count = top->spans;
    c->out.length = top->text;
    put_value(c, hash, top->object ? 'o' : 'a', c->scratch.data ? c->scratch.data : "",
              c->scratch.length);
}

/* False if the text is not one JSON value (or memory is used up). */
static bool canonicalise(canon *c, gw_hash *hash, eng_text text)
{
    base_json json;
    base_json_init(&json, text.data, text.length, BASE_JSON_DEPTH_MAX);
    for (;;) {
        /* Where this value began: at its name if it has one. */
        size_t begin = c->out.length;
        bool member = c->depth && c->levels[c->depth - 1].object;
        base_json_kind kind = base_json_next(&json);
        switch (kind) {
        case BASE_JSON_END:
            return !c->out.failed && !c->scratch.failed && !c->failed && !hash->failed;
        case BASE_JSON_ERROR:
            return false;
        case BASE_JSON_KEY:
            c->key = begin;
            base_buf_clear(&c->scratch);
            base_json_unescape(&c->scratch, json.raw, json.raw_length);
            put_framed(&c->out, c->scratch.data ? c->scratch.data : "", c->scratch.length);
            continue;
        case BASE_JSON_OBJECT_BEGIN:
        case BASE_JSON_ARRAY_BEGIN:
            /* The name of this member is part of the parent's span; it is found again at `text` of
             * this level, whose bytes begin behind it. */
            c->levels[c->depth++] =
                (level){kind == BASE_JSON_OBJECT_BEGIN, c->out.length, c->span_count};
            /* The begin of the span is kept as a span of its own until the level closes. */
            add_span(c, member ? c->key : begin);
            c->levels[c->depth - 1].spans = c->span_count;
            if (c->failed)
                return false;
            continue;
        case BASE_JSON_OBJECT_END:
        case BASE_JSON_ARRAY_END:
            close_level(c, hash);
            begin = c->spans[--c->span_count].offset;
            break;
        case BASE_JSON_NULL:
            put_value(c, hash, 'z', "", 0);
            break;
        case BASE_JSON_TRUE:
            put_value(c, hash, 't', "", 0);
            break;
        case BASE_JSON_FALSE:
            put_value(c, hash, 'f', "", 0);
            break;
        case BASE_JSON_NUMBER:
            put_number(c, hash, json.raw, json.raw_length);
            break;
        case BASE_JSON_STRING:
            base_buf_clear(&c->scratch);
            base_json_unescape(&c->scratch, json.raw, json.raw_length);
            put_value(c, hash, 's', c->scratch.data ? c->scratch.data : "", c->scratch.length);
            break;
        }
        if (kind != BASE_JSON_OBJECT_END && kind != BASE_JSON_ARRAY_END && member)
            begin = c->key;
        if (c->out.failed || c->scratch.failed)
            return false;
        if (c->depth)
            add_span(c, begin);
        if (c->failed)
            return false;
    }
}

/* Arguments to a digest of their own. */
static void hash_arguments(gw_hash *hash, gw_digest *out, eng_text arguments)
{
    eng_text text = gw_text_trim(arguments);
    if (!text.length || (text.length == 4 && memcmp(text.data, "null", 4) == 0))
        text = (eng_text){"{}", 2};
    canon c = {0};
    bool json = canonicalise(&c, hash, text);
    gw_hash_begin(hash, json ? "arguments" : "raw arguments");
    if (json)
        gw_hash_part(hash, c.out.data, c.out.length);
    else
        gw_hash_part(hash, text.data, text.length);
    gw_hash_end(hash, out);
    base_buf_deinit(&c.out);
    base_buf_deinit(&c.scratch);
    free(c.spans);
}

/* ---- items ---- */

void gw_item_visible(gw_hash *hash, gw_digest *out, const eng_item *item)
{
    /* The arguments first: one context serves one hash at a time. */
    gw_digest calls = {0};
    for (uint32_t i = 0; i < item->call_count; i++) {
        gw_digest arguments;
        hash_arguments(hash, &arguments, item->calls[i].arguments);
        gw_hash_begin(hash, "call");
        gw_hash_part(hash, calls.bytes, sizeof(calls.bytes));
        gw_hash_part(hash, item->calls[i].name.data, item->calls[i].name.length);
        gw_hash_part(hash, arguments.bytes, sizeof(arguments.bytes));
        gw_hash_end(hash, &calls);
    }
    eng_text text = gw_text_trim(item->text);
    uint8_t role = (uint8_t)item->role;
    gw_hash_begin(hash, "visible");
    gw_hash_part(hash, &role, 1);
    gw_hash_part(hash, text.data, text.length);
    gw_hash_part(hash, calls.bytes, sizeof(calls.bytes));
    gw_hash_end(hash, out);
}

bool gw_item_reasoning(gw_hash *hash, gw_digest *out, eng_text reasoning)
{
    eng_text text = gw_text_trim(reasoning);
    memset(out, 0, sizeof(*out));
    if (!text.length)
        return false;
    gw_hash_begin(hash, "reasoning");
    gw_hash_part(hash, text.data, text.length);
    gw_hash_end(hash, out);
    return true;
}

void gw_item_own(gw_hash *hash, gw_digest *out, const gw_digest *visible, const eng_item *item)
{
    gw_digest reasoning;
    if (!gw_item_reasoning(hash, &reasoning, item->reasoning)) {
        *out = *visible;
        return;
    }
    gw_hash_begin(hash, "own");
    gw_hash_part(hash, visible->bytes, sizeof(visible->bytes));
    gw_hash_part(hash, reasoning.bytes, sizeof(reasoning.bytes));
    gw_hash_end(hash, out);
}

/* JSON text without the white space between its tokens. */
static void part_minified(gw_hash *hash, eng_text text, base_buf *scratch)
{
    base_buf_clear(scratch);
    if (!base_buf_reserve(scratch, text.length)) {
        hash->failed = true;
        return;
    }
    bool string = false;
    char *to = scratch->data;
    for (size_t i = 0; i < text.length; i++) {
        char c = text.data[i];
        if (!string && is_space(c))
            continue;
        *to++ = c;
        if (string && c == '\\' && i + 1 < text.length)
            *to++ = text.data[++i];
        else if (c == '"')
            string = !string;
    }
    gw_hash_part(hash, scratch->data, (size_t)(to - scratch->data));
}

void gw_item_root(gw_hash *hash, gw_digest *out, const gw_root *root)
{
    base_buf scratch;
    base_buf_init(&scratch, 0);
    uint8_t mode = (uint8_t)root->thinking;
    gw_hash_begin(hash, "root");
    gw_hash_part(hash, &root->tenant, sizeof(root->tenant));
    gw_hash_part(hash, root->template_id, strlen(root->template_id));
    gw_hash_part(hash, &mode, 1);
    gw_hash_part(hash, root->effort.data, root->effort.length);
    for (uint32_t i = 0; i < root->tool_count; i++)
        part_minified(hash, root->tools[i], &scratch);
    gw_hash_end(hash, out);
    base_buf_deinit(&scratch);
}

void gw_item_body(gw_hash *hash, gw_digest *out, int64_t tenant)
{
    gw_hash_begin(hash, "body");
    gw_hash_part(hash, &tenant, sizeof(tenant));
    gw_hash_end(hash, out);
}

/* ---- what a conversation stands behind ---- */

uint32_t gw_item_front_count(const eng_item *items, uint32_t count)
{
    uint32_t front = 0;
    while (front < count &&
           (items[front].role == ENG_ROLE_ROOT || items[front].role == ENG_ROLE_SYSTEM))
        front++;
    return front;
}

static bool is_word(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c != '\0' && strchr("-_:./+%@", c) != NULL) || (unsigned char)c >= 0x80;
}

/* Words that change by themselves: with a digit in them (dates, times, counters, hashes), or names
 * of days and months. */
static bool changes_by_itself(const char *word, size_t length)
{
    static const char names[] = "monday tuesday wednesday thursday friday saturday sunday january "
                                "february march april may june july august september october "
                                "november december mon tue wed thu fri sat sun jan feb mar apr jun "
                                "jul aug sep sept oct nov dec am pm ";
    for (size_t i = 0; i < length; i++)
        if (word[i] >= '0' && word[i] <= '9')
            return true;
    while (length && strchr(".:", word[length - 1]))
        length--;
    for (const char *at = names; *at;) {
        size_t name = (size_t)(strchr(at, ' ') - at);
        if (name == length && strncasecmp(at, word, length) == 0)
            return true;
        at += name + 1;
    }
    return false;
}

/* The text, with every word that changes by itself the same. */
static void hash_stable(XXH3_state_t *state, eng_text text)
{
    for (size_t at = 0; at < text.length;) {
        size_t begin = at;
        while (at < text.length && !is_word(text.data[at]))
            at++;
        XXH3_64bits_update(state, text.data + begin, at - begin);
        begin = at;
        while (at < text.length && is_word(text.data[at]))
            at++;
        if (at > begin && changes_by_itself(text.data + begin, at - begin))
            XXH3_64bits_update(state, "#", 1);
        else
            XXH3_64bits_update(state, text.data + begin, at - begin);
    }
}

void gw_item_front(gw_front *out, const gw_root *root, const eng_item *items, const gw_digest *own,
                   uint32_t count)
{
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (uint32_t i = 0; i < root->tool_count; i++) {
        XXH3_64bits_update(&state, &root->tools[i].length, sizeof(root->tools[i].length));
        XXH3_64bits_update(&state, root->tools[i].data, root->tools[i].length);
    }
    out->tools = XXH3_64bits_digest(&state);
    out->mode = XXH3_64bits_withSeed(root->effort.data ? root->effort.data : "",
                                     root->effort.length, (uint64_t)root->thinking + 1);
    out->mode += out->mode == 0; /* 0 is: not known */
    out->system = XXH3_64bits(own, count * sizeof(*own));
    out->stable = 0;
    if (!root->volatile_lines)
        return;
    XXH3_64bits_reset(&state);
    for (uint32_t i = 0; i < count; i++)
        hash_stable(&state, gw_text_trim(items[i].text));
    out->stable = XXH3_64bits_digest(&state);
}

static void combine(gw_hash *hash, gw_digest *out, const char *kind, const gw_digest *a,
                    const gw_digest *b)
{
    gw_digest result;
    gw_hash_begin(hash, kind);
    gw_hash_part(hash, a->bytes, sizeof(a->bytes));
    gw_hash_part(hash, b->bytes, sizeof(b->bytes));
    gw_hash_end(hash, &result);
    *out = result;
}

void gw_node_item(gw_hash *hash, gw_digest *out, const gw_digest *parent, const gw_digest *own)
{
    combine(hash, out, "node item", parent, own);
}

void gw_node_run(gw_hash *hash, gw_digest *out, const gw_digest *parent, const gw_digest *tokens)
{
    combine(hash, out, "node run", parent, tokens);
}

void gw_slot(gw_hash *hash, gw_digest *out, const gw_digest *parent, const gw_digest *visible)
{
    combine(hash, out, "slot", parent, visible);
}

void gw_lineage(gw_hash *hash, gw_digest *out, const gw_digest *body, const gw_digest *visible)
{
    combine(hash, out, "lineage", body, visible);
}

void gw_under(gw_hash *hash, gw_digest *out, const gw_digest *body)
{
    combine(hash, out, "under", body, body);
}

void gw_tokens_digest(gw_hash *hash, gw_digest *out, const int32_t *tokens, uint32_t count)
{
    gw_hash_begin(hash, "tokens");
    gw_hash_part(hash, tokens, (size_t)count * sizeof(*tokens));
    gw_hash_end(hash, out);
}

/* ---- JSON ---- */

static void put_text(base_buf *out, const char *name, eng_text text)
{
    base_buf_printf(out, ",\"%s\":", name);
    base_buf_json_string(out, text.data ? text.data : "", text.length);
}

void gw_item_json(base_buf *out, const eng_item *item)
{
    static const char *const roles[] = {"root", "system", "user", "assistant", "tool"};
    base_buf_printf(out, "{\"role\":\"%s\"", roles[item->role]);
    put_text(out, "content", item->text);
    if (item->reasoning.length)
        put_text(out, "reasoning_content", item->reasoning);
    for (uint32_t i = 0; i < item->call_count; i++) {
        const eng_call *call = &item->calls[i];
        base_buf_puts(out,
                      i ? ",{\"type\":\"function\"" : ",\"tool_calls\":[{\"type\":\"function\"");
        put_text(out, "id", call->id);
        base_buf_puts(out, ",\"function\":{\"name\":");
        base_buf_json_string(out, call->name.data ? call->name.data : "", call->name.length);
        put_text(out, "arguments", call->arguments);
        base_buf_puts(out, "}}");
    }
    base_buf_puts(out, item->call_count ? "]}" : "}");
}

void gw_root_json(base_buf *out, const gw_root *root)
{
    static const char *const modes[] = {"default", "enabled", "disabled", "adaptive"};
    base_buf_printf(out, "{\"thinking\":\"%s\"", modes[root->thinking]);
    if (root->effort.length)
        put_text(out, "effort", root->effort);
    base_buf_puts(out, ",\"tools\":[");
    for (uint32_t i = 0; i < root->tool_count; i++) {
        base_buf_puts(out, i ? "," : "");
        base_buf_add(out, root->tools[i].data, root->tools[i].length);
    }
    base_buf_puts(out, "]}");
}
