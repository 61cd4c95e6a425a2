/* tokenizer.json as Hugging Face writes it, read with the strict scanner of base/json (every value
 * stays raw until it is used, and a cut file never passes).
 *
 * Supported: model BPE over bytes (ByteLevel), one Split pattern (or ByteLevel's own), added tokens
 * that match exactly. Everything else that would change the ids (normalizers, dropout, prefixes,
 * stripping added tokens) is refused by name: ids that are nearly right are worse than none.
 * Padding, truncation and post-processors are ignored, since nothing is added here that the
 * template does not write. */
#include "engine/token.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine/base/json.h"
#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "engine/token_internal.h"

#define FILE_MAX ((size_t)256 << 20)
#define ID_MAX ((1u << 22) - 1)

/* ByteLevel's own pattern, used when the pre-tokenizer has no Split (GPT-2's). */
#define BYTE_LEVEL_PATTERN                                                                         \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

typedef struct raw {
    const char *text; /* NULL: absent */
    size_t length;
} raw;

typedef struct loader {
    eng_tok *tok;
    base_err *err;
    base_buf text;  /* scratch: a decoded string */
    base_buf bytes; /* scratch: the bytes it stands for */
    base_buf blob;
    bool nomem;
    int16_t byte_of[512]; /* byte of a printable stand-in (all below U+0144), -1 if it is none */
    uint32_t piece_capacity;
} loader;

static bool is(raw value, const char *text)
{
    size_t n = strlen(text);
    return value.text != NULL && value.length == n && memcmp(value.text, text, n) == 0;
}

static bool is_string(raw value, const char *text)
{
    return value.text != NULL && value.text[0] == '"' &&
           base_json_string_is(value.text, value.length, text);
}

/* Absent, null or the given raw text. */
static bool is_off(raw value, const char *text)
{
    return value.text == NULL || is(value, "null") || is(value, text);
}

/* Takes the raw values of named members of an object; what is not there stays absent. `where` names
 * the object. */
static base_code members(raw object, const char *where, const char *const *names, raw *values,
                         size_t count, base_err *err)
{
    base_json json;
    base_json_init(&json, object.text, object.length, BASE_JSON_DEPTH_MAX);
    for (size_t i = 0; i < count; i++)
        values[i] = (raw){0};
    if (base_json_next(&json) != BASE_JSON_OBJECT_BEGIN)
        return json.error != NULL
                   ? base_fail(err, BASE_FORMAT, "%s: %s at byte %zu", where, json.error, json.pos)
                   : base_fail(err, BASE_FORMAT, "%s: not an object", where);
    for (;;) {
        base_json_kind kind = base_json_next(&json);
        if (kind == BASE_JSON_OBJECT_END)
            break;
        if (kind == BASE_JSON_ERROR)
            return base_fail(err, BASE_FORMAT, "%s: %s at byte %zu", where, json.error, json.pos);
        const char *key = json.raw;
        size_t key_length = json.raw_length;
        if (!base_json_skip(&json))
            return base_fail(err, BASE_FORMAT, "%s: %s at byte %zu", where, json.error, json.pos);
        for (size_t i = 0; i < count; i++)
            if (base_json_string_is(key, key_length, names[i]))
                values[i] = (raw){json.raw, json.raw_length};
    }
    if (base_json_next(&json) != BASE_JSON_END)
        return base_fail(err, BASE_FORMAT, "%s: %s at byte %zu", where, json.error, json.pos);
    return BASE_OK;
}

/* Decimal digits only. */
static bool read_id(uint32_t *out, const char *text, size_t length)
{
    uint32_t value = 0;
    if (length == 0 || length > 8)
        return false;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        value = value * 10 + (uint32_t)(text[i] - '0');
    }
    *out = value;
    return value <= ID_MAX;
}

/* ByteLevel writes a byte as a printable character: itself where it is one, else U+0100 onwards in
 * order. */
static void init_byte_of(loader *load)
{
    uint32_t next = 256;
    for (size_t i = 0; i < 512; i++)
        load->byte_of[i] = -1;
    for (uint32_t b = 0; b < 256; b++) {
        bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        load->byte_of[printable ? b : next++] = (int16_t)b;
    }
}

/* Decodes a raw string into load->text. */
static void decode_text(loader *load, const char *text, size_t length)
{
    base_buf_clear(&load->text);
    base_json_unescape(&load->text, text, length);
    load->nomem = load->nomem || load->text.failed;
}

/* Decodes a raw string into load->text, and the bytes that it stands for into load->bytes. A string
 * with a character that is no stand-in is kept as it is, as ByteLevel's decoder does; returns false
 * then. */
static bool decode_word(loader *load, const char *text, size_t length)
{
    base_buf_clear(&load->bytes);
    decode_text(load, text, length);
    for (size_t i = 0; i < load->text.length;) {
        uint32_t c = 0;
        size_t n = base_utf8_char(load->text.data + i, load->text.length - i, &c);
        if (n == 0 || c >= 512 || load->byte_of[c] < 0) {
            base_buf_clear(&load->bytes);
            base_buf_add(&load->bytes, load->text.data, load->text.length);
            load->nomem = load->nomem || load->bytes.failed;
            return false;
        }
        char byte = (char)load->byte_of[c];
        base_buf_add(&load->bytes, &byte, 1);
        i += n;
    }
    load->nomem = load->nomem || load->bytes.failed;
    return true;
}

/* Room for ids up to `id`. */
static base_code grow(loader *load, uint32_t id)
{
    eng_tok *tok = load->tok;
    if (id >= load->piece_capacity) {
        uint32_t capacity = id + id / 2 + 1024;
        tok_piece *pieces = realloc(tok->pieces, capacity * sizeof *pieces);
        if (pieces == NULL)
            return base_fail(load->err, BASE_NOMEM, "vocabulary: no memory for %u tokens",
                             capacity);
        memset(pieces + load->piece_capacity, 0,
               (capacity - load->piece_capacity) * sizeof *pieces);
        tok->pieces = pieces;
        load->piece_capacity = capacity;
    }
    if (id >= tok->vocab)
        tok->vocab = id + 1;
    return BASE_OK;
}

static void put_piece(loader *load, uint32_t id, const base_buf *bytes, uint8_t flags)
{
    load->tok->pieces[id] = (tok_piece){
        .at = (uint32_t)load->blob.length, .length = (uint32_t)bytes->length, .flags = flags};
    base_buf_add(&load->blob, bytes->data, bytes->length);
}

static base_code read_vocab(loader *load, raw vocab)
{
    base_json json;
    base_json_init(&json, vocab.text, vocab.length, 4);
    if (vocab.text == NULL || base_json_next(&json) != BASE_JSON_OBJECT_BEGIN)
        return base_fail(load->err, BASE_FORMAT, "model.vocab: not an object");
    while (base_json_next(&json) == BASE_JSON_KEY) {
        const char *key = json.raw;
        size_t key_length = json.raw_length;
        uint32_t id;
        if (base_json_next(&json) != BASE_JSON_NUMBER || !read_id(&id, json.raw, json.raw_length))
            return base_fail(load->err, BASE_FORMAT, "model.vocab: %.*s: not an id (0 to %u)",
                             (int)base_min(key_length, 60), key, ID_MAX);
        if (grow(load, id) != BASE_OK)
            return BASE_NOMEM;
        if (load->tok->pieces[id].flags != 0)
            return base_fail(load->err, BASE_FORMAT, "model.vocab: id %u twice", id);
        bool word = decode_word(load, key, key_length);
        if (load->bytes.length == 0)
            return base_fail(load->err, BASE_FORMAT, "model.vocab: id %u is empty", id);
        put_piece(load, id, &load->bytes, (uint8_t)(TOK_EXISTS | (word ? TOK_WORD : 0)));
    }
    return BASE_OK;
}

/* One element of added_tokens. Its text is taken as it stands; flags that would let it eat
 * neighbours are refused. */
static base_code read_added_one(loader *load, raw token, uint32_t index)
{
    static const char *const names[] = {"id", "content", "lstrip", "rstrip", "single_word"};
    raw v[5];
    char where[48];
    snprintf(where, sizeof where, "added_tokens[%u]", index);
    base_code code = members(token, where, names, v, 5, load->err);
    if (code != BASE_OK)
        return code;
    uint32_t id;
    if (v[0].text == NULL || !read_id(&id, v[0].text, v[0].length))
        return base_fail(load->err, BASE_FORMAT, "%s.id: not an id (0 to %u)", where, ID_MAX);
    if (v[1].text == NULL || v[1].text[0] != '"')
        return base_fail(load->err, BASE_FORMAT, "%s.content: not a string", where);
    for (size_t i = 2; i < 5; i++)
        if (!is_off(v[i], "false"))
            return base_fail(load->err, BASE_UNSUPPORTED, "%s.%s: only false is supported", where,
                             names[i]);
    if (grow(load, id) != BASE_OK)
        return BASE_NOMEM;
    decode_text(load, v[1].text, v[1].length);
    if (load->text.length == 0)
        return base_fail(load->err, BASE_FORMAT, "%s.content: empty", where);
    const tok_piece *old = &load->tok->pieces[id];
    if (old->flags != 0 && (old->length != load->text.length ||
                            memcmp(load->blob.data + old->at, load->text.data, old->length) != 0))
        return base_fail(load->err, BASE_FORMAT, "%s.id: %u is another token in model.vocab", where,
                         id);
    /* Else plain text could become the added token by merging. */
    if ((old->flags & TOK_MADE) != 0 || ((old->flags & TOK_WORD) != 0 && old->length == 1))
        return base_fail(load->err, BASE_FORMAT, "%s.id: %u is a byte or a merge of model.merges",
                         where, id);
    put_piece(load, id, &load->text, TOK_EXISTS | TOK_ADDED);
    load->tok->added_count++;
    return BASE_OK;
}

static base_code read_added(loader *load, raw list)
{
    base_json json;
    if (list.text == NULL || is(list, "null"))
        return BASE_OK;
    base_json_init(&json, list.text, list.length, BASE_JSON_DEPTH_MAX);
    if (base_json_next(&json) != BASE_JSON_ARRAY_BEGIN)
        return base_fail(load->err, BASE_FORMAT, "added_tokens: not a list");
    for (uint32_t i = 0; base_json_next(&json) == BASE_JSON_OBJECT_BEGIN; i++) {
        base_json_skip(&json);
        base_code code = read_added_one(load, (raw){json.raw, json.raw_length}, i);
        if (code != BASE_OK)
            return code;
    }
    return json.depth != 0
               ? base_fail(load->err, BASE_FORMAT, "added_tokens: an element is not an object")
               : BASE_OK;
}

static int compare_added(const void *a, const void *b, void *ctx)
{
    const eng_tok *tok = ctx;
    int32_t left = *(const int32_t *)a, right = *(const int32_t *)b;
    const tok_piece *x = &tok->pieces[left], *y = &tok->pieces[right];
    int by_first = (unsigned char)tok->blob[x->at] - (unsigned char)tok->blob[y->at];
    if (by_first != 0)
        return by_first;
    return x->length != y->length ? (x->length < y->length ? 1 : -1) : left - right;
}

/* Added tokens by first byte, the longest first: the order in which they are tried. */
static base_code index_added(loader *load)
{
    eng_tok *tok = load->tok;
    uint32_t count = 0;
    tok->added = calloc(tok->added_count + 1, sizeof *tok->added);
    if (tok->added == NULL)
        return base_fail(load->err, BASE_NOMEM, "added_tokens: no memory");
    for (uint32_t id = 0; id < tok->vocab; id++)
        if ((tok->pieces[id].flags & TOK_ADDED) != 0)
            tok->added[count++] = (int32_t)id;
    tok->added_count = count; /* an id listed twice with one text counts once */
    qsort_r(tok->added, count, sizeof *tok->added, compare_added, tok);
    for (uint32_t i = 0, b = 0; b <= 256; b++) {
        while (i < count && (unsigned char)tok->blob[tok->pieces[tok->added[i]].at] < b)
            i++;
        tok->added_first[b] = i;
    }
    return BASE_OK;
}

static uint32_t table_size(size_t count)
{
    uint32_t size = 16;
    while (size < 2 * count)
        size *= 2;
    return size;
}

static base_code index_words(loader *load)
{
    eng_tok *tok = load->tok;
    uint32_t size = table_size(tok->vocab);
    tok->word_mask = size - 1;
    tok->words = malloc(size * sizeof *tok->words);
    if (tok->words == NULL)
        return base_fail(load->err, BASE_NOMEM, "model.vocab: no memory");
    memset(tok->words, 0xFF, size * sizeof *tok->words);
    for (uint32_t id = 0; id < tok->vocab; id++) {
        const tok_piece *piece = &tok->pieces[id];
        if ((piece->flags & TOK_WORD) == 0)
            continue;
        const char *bytes = tok->blob + piece->at;
        if (tok_word(tok, bytes, piece->length) >= 0)
            return base_fail(load->err, BASE_FORMAT, "model.vocab: id %u has the bytes of another",
                             id);
        uint32_t i = (uint32_t)XXH3_64bits(bytes, piece->length) & tok->word_mask;
        while (tok->words[i] >= 0)
            i = (i + 1) & tok->word_mask;
        tok->words[i] = (int32_t)id;
        tok->word_max = piece->length > tok->word_max ? piece->length : tok->word_max;
    }
    for (uint32_t b = 0; b < 256; b++) {
        char byte = (char)b;
        tok->byte_id[b] = tok_word(tok, &byte, 1);
        if (tok->byte_id[b] < 0)
            return base_fail(load->err, BASE_FORMAT, "model.vocab: no token for byte 0x%02x", b);
    }
    return BASE_OK;
}

/* The id of one side of a merge, given as a raw string. */
static int32_t merge_side(loader *load, const char *text, size_t length)
{
    return decode_word(load, text, length)
               ? tok_word(load->tok, load->bytes.data, load->bytes.length)
               : -1;
}

/* "a b": the sides have no blank in them, since ByteLevel writes a blank as another character. */
static void merge_sides_of_text(loader *load, const char *text, size_t length, int32_t sides[2])
{
    sides[0] = sides[1] = -1;
    const char *blank = memchr(text, ' ', length);
    if (blank == NULL || (size_t)(blank - text) + 1 >= length - 1)
        return;
    char quoted[2 * 1024];
    for (int i = 0; i < 2; i++) {
        const char *from = i == 0 ? text + 1 : blank + 1;
        size_t n = (size_t)((i == 0 ? blank : text + length - 1) - from);
        if (n + 2 > sizeof quoted)
            return;
        quoted[0] = quoted[n + 1] = '"';
        memcpy(quoted + 1, from, n);
        sides[i] = merge_side(load, quoted, n + 2);
    }
}

static base_code add_merge(loader *load, int32_t sides[2], uint32_t rank)
{
    eng_tok *tok = load->tok;
    if (sides[0] < 0 || sides[1] < 0)
        return base_fail(load->err, BASE_FORMAT,
                         "model.merges[%u]: not two tokens of the vocabulary", rank);
    base_buf_clear(&load->bytes);
    for (int i = 0; i < 2; i++)
        base_buf_add(&load->bytes, tok->blob + tok->pieces[sides[i]].at,
                     tok->pieces[sides[i]].length);
    int32_t id = load->bytes.failed ? -1 : tok_word(tok, load->bytes.data, load->bytes.length);
    if (id < 0)
        return base_fail(load->err, BASE_FORMAT,
                         "model.merges[%u]: what it makes is not in the vocabulary", rank);
    if (tok_pair_find(tok, sides[0], sides[1]) != NULL)
        return BASE_OK; /* listed twice: the first counts */
    uint64_t key = (uint64_t)(uint32_t)sides[0] << 32 | (uint32_t)sides[1];
    uint32_t i = tok_pair_hash(key) & tok->pair_mask;
    while (tok->pairs[i].key != TOK_NO_PAIR)
        i = (i + 1) & tok->pair_mask;
    tok->pairs[i] = (tok_pair){.key = key, .rank = rank, .id = id};
    tok->pieces[id].flags |= TOK_MADE;
    return BASE_OK;
}

static base_code read_merges(loader *load, raw merges)
{
    eng_tok *tok = load->tok;
    base_json json;
    if (merges.text == NULL || merges.text[0] != '[')
        return base_fail(load->err, BASE_FORMAT, "model.merges: not a list");
    /* A merge takes at least four bytes of the file, which bounds the table without counting first.
     */
    size_t most = base_min(merges.length / 4 + 1, (size_t)ID_MAX);
    uint32_t count = 0, size = table_size(base_min(most, 2 * (size_t)tok->vocab));
    tok->pairs = malloc(size * sizeof *tok->pairs);
    if (tok->pairs == NULL)
        return base_fail(load->err, BASE_NOMEM, "model.merges: no memory");
    memset(tok->pairs, 0xFF, size * sizeof *tok->pairs);
    tok->pair_mask = size - 1;
    base_json_init(&json, merges.text, merges.length, 4);
    base_json_next(&json);
    for (;; count++) {
        int32_t sides[2] = {-1, -1};
        base_json_kind kind = base_json_next(&json);
        if (kind == BASE_JSON_ARRAY_END)
            break;
        if (count >= size - size / 4)
            return base_fail(load->err, BASE_UNSUPPORTED, "model.merges: more than %u", count);
        if (kind == BASE_JSON_STRING)
            merge_sides_of_text(load, json.raw, json.raw_length, sides);
        else if (kind == BASE_JSON_ARRAY_BEGIN) {
            for (int i = 0; i < 2 && base_json_next(&json) == BASE_JSON_STRING; i++)
                sides[i] = merge_side(load, json.raw, json.raw_length);
            if (base_json_next(&json) != BASE_JSON_ARRAY_END)
                return base_fail(load->err, BASE_FORMAT, "model.merges[%u]: not two strings",
                                 count);
        }
        base_code code = add_merge(load, sides, count);
        if (code != BASE_OK)
            return code;
    }
    return BASE_OK;
}

/* Marks the tokens that their own bytes merge to. */
static base_code mark_whole(loader *load)
{
    eng_tok *tok = load->tok;
    eng_ids ids;
    eng_ids_init(&ids, 2);
    tok_encoder encoder = {.tok = tok, .out = &ids};
    for (uint32_t id = 0; id < tok->vocab; id++) {
        tok_piece *piece = &tok->pieces[id];
        if ((piece->flags & TOK_WORD) == 0)
            continue;
        ids.count = 0;
        ids.failed = false;
        tok_merge(&encoder, tok->blob + piece->at, piece->length);
        load->nomem = load->nomem || (ids.failed && ids.count < ids.max);
        if (ids.count == 1 && !ids.failed && ids.data[0] == (int32_t)id)
            piece->flags |= TOK_WHOLE;
    }
    free(encoder.work);
    eng_ids_deinit(&ids);
    return load->nomem ? BASE_NOMEM : BASE_OK;
}

static base_code read_model(loader *load, raw model)
{
    static const char *const names[] = {"type",
                                        "dropout",
                                        "continuing_subword_prefix",
                                        "end_of_word_suffix",
                                        "byte_fallback",
                                        "vocab",
                                        "merges",
                                        "ignore_merges"};
    raw v[8];
    if (model.text == NULL)
        return base_fail(load->err, BASE_FORMAT, "model: absent");
    base_code code = members(model, "model", names, v, 8, load->err);
    if (code != BASE_OK)
        return code;
    if (v[0].text != NULL && !is_string(v[0], "BPE"))
        return base_fail(load->err, BASE_UNSUPPORTED, "model.type: %.*s, only \"BPE\" is supported",
                         (int)base_min(v[0].length, 60), v[0].text);
    for (size_t i = 1; i < 5; i++) {
        bool off = is_off(v[i], i == 4 ? "false" : i == 1 ? "0.0" : "\"\"") || is(v[i], "0");
        if (!off)
            return base_fail(load->err, BASE_UNSUPPORTED, "model.%s: %.*s is not supported",
                             names[i], (int)base_min(v[i].length, 60), v[i].text);
    }
    load->tok->ignore_merges = is(v[7], "true");
    if ((code = read_vocab(load, v[5])) != BASE_OK)
        return code;
    load->tok->blob = load->blob.data; /* for the look-ups while loading; set again at the end */
    if (load->blob.failed || load->tok->vocab == 0)
        return base_fail(load->err, load->blob.failed ? BASE_NOMEM : BASE_FORMAT,
                         "model.vocab: empty");
    if ((code = index_words(load)) != BASE_OK || (code = read_merges(load, v[6])) != BASE_OK)
        return code;
    return mark_whole(load);
}

/* The pattern of a Split step, decoded into load->text. */
static base_code read_split(loader *load, raw step)
{
    static const char *const names[] = {"pattern", "behavior", "invert"};
    static const char *const pattern_names[] = {"Regex"};
    raw v[3], regex;
    base_code code = members(step, "pre_tokenizer", names, v, 3, load->err);
    if (code != BASE_OK)
        return code;
    if (!is_string(v[1], "Isolated") || !is_off(v[2], "false"))
        return base_fail(load->err, BASE_UNSUPPORTED,
                         "pre_tokenizer: Split with another behavior than \"Isolated\"");
    if (v[0].text == NULL || v[0].text[0] != '{')
        return base_fail(load->err, BASE_FORMAT, "pre_tokenizer: Split.pattern: not an object");
    if ((code = members(v[0], "pre_tokenizer", pattern_names, &regex, 1, load->err)) != BASE_OK)
        return code;
    if (regex.text == NULL || regex.text[0] != '"')
        return base_fail(load->err, BASE_UNSUPPORTED,
                         "pre_tokenizer: Split.pattern: only Regex is supported");
    decode_text(load, regex.text, regex.length);
    return BASE_OK;
}

typedef struct split_steps {
    bool split, byte_level;
} split_steps;

/* One step: the Split, or the ByteLevel behind it. */
static base_code read_step(loader *load, raw step, split_steps *seen)
{
    static const char *const names[] = {"type", "add_prefix_space", "use_regex"};
    raw v[3];
    base_code code = members(step, "pre_tokenizer", names, v, 3, load->err);
    if (code != BASE_OK)
        return code;
    if (is_string(v[0], "Split") && !seen->split && !seen->byte_level) {
        seen->split = true;
        return read_split(load, step);
    }
    if (is_string(v[0], "ByteLevel") && !seen->byte_level) {
        bool own = v[2].text == NULL || is(v[2], "true");
        seen->byte_level = true;
        if (is(v[1], "true"))
            return base_fail(load->err, BASE_UNSUPPORTED,
                             "pre_tokenizer: ByteLevel.add_prefix_space is not supported");
        if (own && seen->split)
            return base_fail(load->err, BASE_UNSUPPORTED,
                             "pre_tokenizer: ByteLevel.use_regex behind a Split");
        if (own) {
            base_buf_clear(&load->text);
            base_buf_puts(&load->text, BYTE_LEVEL_PATTERN);
            load->nomem = load->nomem || load->text.failed;
        } else if (!seen->split) {
            return base_fail(load->err, BASE_UNSUPPORTED,
                             "pre_tokenizer: ByteLevel without a pattern");
        }
        return BASE_OK;
    }
    return base_fail(load->err, BASE_UNSUPPORTED, "pre_tokenizer: step %.*s is not supported here",
                     (int)base_min(v[0].length, 60), v[0].text == NULL ? "" : v[0].text);
}

static base_code read_pre_tokenizer(loader *load, raw value)
{
    static const char *const names[] = {"type", "pretokenizers"};
    raw v[2];
    split_steps seen = {0};
    if (value.text == NULL || value.text[0] != '{')
        return base_fail(load->err, BASE_UNSUPPORTED, "pre_tokenizer: absent");
    base_code code = members(value, "pre_tokenizer", names, v, 2, load->err);
    if (code != BASE_OK)
        return code;
    if (!is_string(v[0], "Sequence")) {
        code = read_step(load, value, &seen);
    } else {
        base_json json;
        if (v[1].text == NULL || v[1].text[0] != '[')
            return base_fail(load->err, BASE_FORMAT, "pre_tokenizer.pretokenizers: not a list");
        base_json_init(&json, v[1].text, v[1].length, BASE_JSON_DEPTH_MAX);
        base_json_next(&json);
        while (code == BASE_OK && base_json_next(&json) == BASE_JSON_OBJECT_BEGIN) {
            base_json_skip(&json);
            code = read_step(load, (raw){json.raw, json.raw_length}, &seen);
        }
    }
    if (code != BASE_OK)
        return code;
    if (!seen.byte_level)
        return base_fail(load->err, BASE_UNSUPPORTED, "pre_tokenizer: no ByteLevel step");
    return tok_split_create(&load->tok->split, load->text.data, load->text.length, load->err);
}

static base_code read_decoder(loader *load, raw value)
{
    static const char *const names[] = {"type"};
    raw type;
    if (value.text == NULL || is(value, "null"))
        return BASE_OK;
    base_code code = members(value, "decoder", names, &type, 1, load->err);
    if (code == BASE_OK && !is_string(type, "ByteLevel"))
        code = base_fail(load->err, BASE_UNSUPPORTED,
                         "decoder.type: %.*s, only \"ByteLevel\" is supported",
                         (int)base_min(type.length, 60), type.text == NULL ? "" : type.text);
    return code;
}

/* A normalizer that changes nothing: none, or an empty sequence. */
static base_code read_normalizer(loader *load, raw value)
{
    static const char *const names[] = {"type", "normalizers"};
    raw v[2];
    if (value.text == NULL || is(value, "null"))
        return BASE_OK;
    base_code code = members(value, "normalizer", names, v, 2, load->err);
    if (code == BASE_OK && !(is_string(v[0], "Sequence") && is(v[1], "[]")))
        code = base_fail(load->err, BASE_UNSUPPORTED, "normalizer: %.*s is not supported",
                         (int)base_min(v[0].length, 60), v[0].text == NULL ? "" : v[0].text);
    return code;
}

static base_code load_all(loader *load, raw file)
{
    static const char *const names[] = {"model", "added_tokens", "pre_tokenizer", "normalizer",
                                        "decoder"};
    raw v[5];
    base_code code = members(file, "the file", names, v, 5, load->err);
    if (code != BASE_OK || (code = read_normalizer(load, v[3])) != BASE_OK ||
        (code = read_decoder(load, v[4])) != BASE_OK ||
        (code = read_pre_tokenizer(load, v[2])) != BASE_OK ||
        (code = read_model(load, v[0])) != BASE_OK || (code = read_added(load, v[1])) != BASE_OK)
        return code;
    eng_tok *tok = load->tok;
    if (load->nomem || load->blob.failed)
        return BASE_NOMEM;
    tok->blob = load->blob.data;
    load->blob = (base_buf){0};
    if ((code = index_added(load)) != BASE_OK)
        return code;
    XXH128_canonical_t digest;
    XXH128_canonicalFromHash(&digest, XXH3_128bits(file.text, file.length));
    for (size_t i = 0; i < sizeof digest.digest; i++)
        snprintf(tok->digest + 2 * i, 3, "%02x", digest.digest[i]);
    return BASE_OK;
}

static base_code read_file(base_buf *out, const char *path, base_err *err)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return base_fail(err, errno == ENOENT ? BASE_NOT_FOUND : BASE_IO, "%s", strerror(errno));
    while (base_buf_reserve(out, 1 << 16)) {
        size_t n = fread(out->data + out->length, 1, 1 << 16, file);
        out->length += n;
        if (n == 0)
            break;
    }
    bool broken = ferror(file) != 0;
    fclose(file);
    if (broken)
        return base_fail(err, BASE_IO, "cannot be read");
    if (out->failed)
        return base_fail(err, BASE_NOMEM, "larger than %zu bytes, or no memory", FILE_MAX);
    return BASE_OK;
}

base_code eng_tok_load(eng_tok **out, const char *path, base_err *err)
{
    base_err own = BASE_ERR_INIT;
    base_buf file;
    loader load = {.err = &own};
    *out = NULL;
    base_buf_init(&file, FILE_MAX);
    base_code code = read_file(&file, path, &own);
    if (code == BASE_OK && (load.tok = calloc(1, sizeof *load.tok)) == NULL)
        code = base_fail(&own, BASE_NOMEM, "no memory");
    if (code == BASE_OK) {
        init_byte_of(&load);
        code = load_all(&load, (raw){file.data == NULL ? "" : file.data, file.length});
        if (load.nomem || load.blob.failed) { /* whatever else it looked like */
            own = (base_err)BASE_ERR_INIT;
            code = base_fail(&own, BASE_NOMEM, "no memory");
        }
    }
    if (load.blob.data != NULL && load.tok != NULL)
        load.tok->blob = NULL; /* still the loader's */
    base_buf_deinit(&load.text);
    base_buf_deinit(&load.bytes);
    base_buf_deinit(&load.blob);
    base_buf_deinit(&file);
    if (code != BASE_OK) {
        eng_tok_destroy(load.tok);
        return base_fail(err, code, "%s: %s", path, own.text);
    }
    *out = load.tok;
    return BASE_OK;
}
