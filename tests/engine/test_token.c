/* The tokenizer: loading, merging, and ids that another implementation made. */
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/rand.h"
#include "tests/engine/text_rig.h"

static eng_ids encode(const eng_tok *tok, const char *text, size_t length, bool specials)
{
    base_err err = BASE_ERR_INIT;
    eng_ids ids;
    eng_ids_init(&ids, 0);
    cr_assert_eq(eng_tok_encode(tok, &ids, text, length, specials, &err), BASE_OK, "%s", err.text);
    return ids;
}

static void expect_ids(const eng_tok *tok, const char *text, size_t length, bool specials,
                       const int32_t *want, size_t count)
{
    eng_ids ids = encode(tok, text, length, specials);
    cr_assert_eq(ids.count, count, "%s: %zu ids, not %zu", text, ids.count, count);
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(ids.data[i], want[i], "%s: id %zu is %d, not %d", text, i, ids.data[i],
                     want[i]);
    eng_ids_deinit(&ids);
}

#define EXPECT(tok, text, specials, ...)                                                           \
    do {                                                                                           \
        const int32_t want[] = {__VA_ARGS__};                                                      \
        expect_ids(tok, text, sizeof(text) - 1, specials, want, sizeof want / sizeof *want);       \
    } while (0)

static void expect_round_trip(const eng_tok *tok, const char *text, size_t length)
{
    eng_ids ids = encode(tok, text, length, false);
    size_t at = 0;
    for (size_t i = 0; i < ids.count; i++) {
        size_t n;
        const char *bytes = eng_tok_bytes(tok, ids.data[i], &n);
        cr_assert_not_null(bytes);
        cr_assert(at + n <= length && memcmp(bytes, text + at, n) == 0, "differs at byte %zu", at);
        at += n;
    }
    cr_assert_eq(at, length);
    eng_ids_deinit(&ids);
}

Test(eng_tok, merges_the_lowest_rank_first)
{
    eng_tok *tok = load_tok(SMALL_TOKENIZER);
    EXPECT(tok, "hello", false, 259);
    EXPECT(tok, "hell hello", false, 258, 32, 259);
    EXPECT(tok, " the", false, 262);
    EXPECT(tok, "aaaaaaa", false, 264, 263, 'a');
    EXPECT(tok, "abc", false, 270); /* (b c) comes before (a b) */
    EXPECT(tok, "abcd", false, 271);
    EXPECT(tok, "xyz", false, 278);
    EXPECT(tok, "zq", false, 'z', 'q'); /* in the vocabulary, but no merge makes it */
    EXPECT(tok, "123", false, 280);
    EXPECT(tok, "1234", false, 280, '4');
    EXPECT(tok, "", false);
    eng_tok_destroy(tok);
}

Test(eng_tok, added_tokens_are_ids_only_when_asked)
{
    eng_tok *tok = load_tok(SMALL_TOKENIZER);
    cr_assert_eq(eng_tok_special(tok, "]~b]"), 321);
    cr_assert_eq(eng_tok_special(tok, "<mm:think>"), 327);
    cr_assert_eq(eng_tok_special(tok, "<mm:thinking>"), 329);
    cr_assert_eq(eng_tok_special(tok, "<mm:th"), -1);
    cr_assert_eq(eng_tok_special(tok, ""), -1);
    cr_assert_eq(eng_tok_special(tok, "hello"), -1);
    cr_assert_eq(eng_tok_vocab(tok), 330);
    cr_assert(eng_tok_is_special(tok, 323));
    cr_assert_not(eng_tok_is_special(tok, 259));
    cr_assert_not(eng_tok_is_special(tok, -1));
    cr_assert_not(eng_tok_is_special(tok, 300)); /* a hole */
    cr_assert_not(eng_tok_is_special(tok, 330));
    EXPECT(tok, "a]~b]hello", true, 'a', 321, 259);
    EXPECT(tok, "]~b]", false, ']', '~', 'b', ']');
    EXPECT(tok, "<mm:think><mm:thinking></mm:think>", true, 327, 329, 328); /* the longest wins */
    EXPECT(tok, "<mm:thin", true, '<', 'm', 'm', ':', 261, 267);
    eng_tok_destroy(tok);
}

Test(eng_tok, gives_the_bytes_of_tokens)
{
    eng_tok *tok = load_tok(SMALL_TOKENIZER);
    size_t length;
    cr_assert_eq(memcmp(eng_tok_bytes(tok, 259, &length), "hello", 5), 0);
    cr_assert_eq(length, 5);
    cr_assert_eq(eng_tok_bytes(tok, 0xE9, &length)[0], '\xE9');
    cr_assert_eq(length, 1);
    cr_assert_eq(memcmp(eng_tok_bytes(tok, 322, &length), "[e~[", 4), 0);
    cr_assert_null(eng_tok_bytes(tok, 300, &length));
    cr_assert_null(eng_tok_bytes(tok, -1, &length));
    cr_assert_null(eng_tok_bytes(tok, 1000000, &length));
    cr_assert_eq(strlen(eng_tok_digest(tok)), 32);
    eng_tok_destroy(tok);
}

Test(eng_tok, encodes_invalid_utf8_byte_by_byte)
{
    eng_tok *tok = load_tok(SMALL_TOKENIZER);
    EXPECT(tok, "hello\xFFhello", false, 259, 0xFF, 259);
    EXPECT(tok, "\xC3", false, 0xC3);
    EXPECT(tok, "\xED\xA0\x80", false, 0xED, 0xA0, 0x80);
    EXPECT(tok, "\0", false, 0);
    for (uint32_t i = 0; i < 200; i++) {
        char text[64];
        for (uint32_t j = 0; j < 16; j++)
            memcpy(text + 4 * j, &base_rand(3, i, j).v[0], 4);
        expect_round_trip(tok, text, sizeof text);
    }
    eng_tok_destroy(tok);
}

Test(eng_tok, stops_early_at_the_bound)
{
    eng_tok *tok = load_tok(SMALL_TOKENIZER);
    base_err err = BASE_ERR_INIT;
    char *text = malloc(1 << 20);
    memset(text, 'q', 1 << 20);
    eng_ids ids;
    eng_ids_init(&ids, 100);
    cr_assert_eq(eng_tok_encode(tok, &ids, text, 1 << 20, false, &err), BASE_TOO_LONG);
    cr_assert_eq(ids.count, 100);
    cr_assert(ids.failed);
    eng_ids_deinit(&ids);
    eng_ids_init(&ids, 5);
    cr_assert_eq(eng_tok_encode(tok, &ids, "qqqqq", 5, false, NULL), BASE_OK);
    eng_ids_deinit(&ids);
    free(text);
    eng_tok_destroy(tok);
}

/* The plain method: the lowest rank anywhere, leftmost first. Ranks and results are asked of the
 * tokenizer itself by encoding pairs, so this checks the long path against the short one. */
Test(eng_tok, long_words_merge_like_short_ones)
{
    eng_tok *tok = load_tok(NANO_TOKENIZER);
    /* A letter of no merge between two words makes one long pre-token of them without touching
     * either. */
    base_buf text;
    base_buf_init(&text, 0);
    eng_ids want;
    eng_ids_init(&want, 0);
    for (uint32_t i = 0; i < 400; i++) {
        char word[24];
        uint32_t length = 1 + base_rand(5, i, 99).v[0] % 20;
        for (uint32_t j = 0; j < length; j++)
            word[j] = "etaoinshrdlucm"[base_rand(5, i, j).v[0] % 14];
        eng_tok_encode(tok, &want, word, length, false, NULL);
        eng_tok_encode(tok, &want, "\xE0\xBC\x80", 3, false,
                       NULL); /* U+0F00, a letter that nano never met */
        base_buf_add(&text, word, length);
        base_buf_puts(&text, "\xE0\xBC\x80");
    }
    expect_ids(tok, text.data, text.length, false, want.data, want.count);
    eng_ids_deinit(&want);
    base_buf_deinit(&text);
    eng_tok_destroy(tok);
}

static void expect_vectors(const eng_tok *tok, const json_t *list, bool specials)
{
    size_t i, j;
    json_t *vector, *id;
    cr_assert_gt(json_array_size(list), 0);
    json_array_foreach(list, i, vector)
    {
        const json_t *text = json_object_get(vector, "text"), *ids = json_object_get(vector, "ids");
        int32_t *want = calloc(json_array_size(ids) + 1, sizeof *want);
        json_array_foreach(ids, j, id) want[j] = (int32_t)json_integer_value(id);
        expect_ids(tok, json_string_value(text), json_string_length(text), specials, want,
                   json_array_size(ids));
        free(want);
    }
}

/* If config/models/nano/tokenizer.json changed: make_tokenizer_vectors.mjs says how to make these
 * again. */
Test(eng_tok, agrees_with_another_implementation)
{
    eng_tok *tok = load_tok(NANO_TOKENIZER);
    json_t *json = load_json(CASES "tokenizer_vectors.json");
    expect_vectors(tok, json_object_get(json, "vectors"), false);
    expect_vectors(tok, json_object_get(json, "specials"), true);
    json_decref(json);
    eng_tok_destroy(tok);
}

/* B067: long runs of one kind neither crash nor take long. */
Test(eng_tok, is_linear_in_runs_of_one_kind)
{
    static const char *const units[] = {
        "a",  "Z",         ".",    " ", "_",  "\n",       "\t",
        "字", "e\xCC\x81", "é",    "=", "ab", "aZ",       " a",
        "- ", "\r\n",      "\xFF", "7", "'s", "\xCC\x81", "QUJDREVGR0hJSktM+/"};
    eng_tok *tok = load_tok(NANO_TOKENIZER);
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        base_buf text;
        base_buf_init(&text, 0);
        while (text.length < 2000000)
            base_buf_puts(&text, units[i]);
        uint64_t from = base_now_ns();
        expect_round_trip(tok, text.data, text.length);
        double seconds = (double)(base_now_ns() - from) / 1e9;
        cr_assert_lt(seconds, 20.0, "%s: %.2f s for 2 MB", units[i],
                     seconds); /* 0.4 s unsanitized and alone */
        base_buf_deinit(&text);
    }
    eng_tok_destroy(tok);
}

/* Prints the speed on English prose and on one letter; asserts nothing of it. */
Test(eng_tok, speed_is_printed)
{
    static const char *const words[] = {
        "The",    "weather",  "in",         "this",      "town", "is",   "usually",
        "mild,",  "and",      "people",     "walk",      "to",   "work", "along",
        "the",    "harbour.", "Nobody",     "remembers", "when", "it",   "last",
        "snowed", "before",   "Christmas;", "some",      "say",  "1987."};
    eng_tok *tok = load_tok(NANO_TOKENIZER);
    base_buf text;
    base_buf_init(&text, 0);
    for (uint32_t i = 0; text.length < 4000000; i++) {
        base_buf_puts(&text, words[base_rand(1, 2, i).v[0] % (sizeof words / sizeof *words)]);
        base_buf_puts(&text, " ");
    }
    for (int letter = 0; letter < 2; letter++) {
        if (letter == 1)
            memset(text.data, 'x', text.length);
        uint64_t from = base_now_ns();
        eng_ids ids = encode(tok, text.data, text.length, false);
        double seconds = (double)(base_now_ns() - from) / 1e9;
        printf("tokenizer: %s %.1f MB/s (%zu tokens)\n", letter == 0 ? "English" : "one letter",
               (double)text.length / seconds / 1e6, ids.count);
        eng_ids_deinit(&ids);
    }
    base_buf_deinit(&text);
    eng_tok_destroy(tok);
}

/* ---- files that do not fit ---- */

static void read_small(base_buf *out)
{
    FILE *file = fopen(SMALL_TOKENIZER, "rb");
    cr_assert_not_null(file);
    char block[4096];
    for (size_t n; (n = fread(block, 1, sizeof block, file)) > 0;)
        base_buf_add(out, block, n);
    fclose(file);
}

static base_code load_bytes(const char *bytes, size_t length, base_err *err)
{
    char path[] = "/tmp/whimbrel-tokenizer-XXXXXX";
    int fd = mkstemp(path);
    cr_assert_geq(fd, 0);
    cr_assert_eq(write(fd, bytes, length), (ssize_t)length);
    close(fd);
    eng_tok *tok;
    base_code code = eng_tok_load(&tok, path, err);
    cr_assert_eq(code == BASE_OK, tok != NULL);
    eng_tok_destroy(tok);
    unlink(path);
    return code;
}

/* The small file with one text replaced must fail with this code, naming this key. */
static void expect_refusal(const char *from, const char *to, base_code code, const char *named)
{
    base_buf file, changed;
    base_buf_init(&file, 0);
    base_buf_init(&changed, 0);
    read_small(&file);
    const char *at = strstr(file.data, from);
    cr_assert_not_null(at, "%s is not in the file", from);
    base_buf_add(&changed, file.data, (size_t)(at - file.data));
    base_buf_puts(&changed, to);
    base_buf_puts(&changed, at + strlen(from));
    base_err err = BASE_ERR_INIT;
    base_code got = load_bytes(changed.data, changed.length, &err);
    cr_assert_eq(got, code, "%s -> %s: %s %s", from, to, base_code_name(got), err.text);
    cr_assert(code == BASE_OK || strstr(err.text, named) != NULL, "%s is not named: %s", named,
              err.text);
    base_buf_deinit(&file);
    base_buf_deinit(&changed);
}

Test(eng_tok, refuses_what_it_does_not_support_by_name)
{
    expect_refusal("\"type\": \"BPE\"", "\"type\": \"Unigram\"", BASE_UNSUPPORTED, "model.type");
    expect_refusal("\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}", BASE_UNSUPPORTED,
                   "normalizer: \"NFC\"");
    expect_refusal("\"normalizer\": null",
                   "\"normalizer\": {\"type\": \"Sequence\", \"normalizers\": []}", BASE_OK, "");
    expect_refusal("\"dropout\": null", "\"dropout\": 0.1", BASE_UNSUPPORTED, "model.dropout");
    expect_refusal("\"byte_fallback\": false", "\"byte_fallback\": true", BASE_UNSUPPORTED,
                   "model.byte_fallback");
    expect_refusal("\"end_of_word_suffix\": null", "\"end_of_word_suffix\": \"</w>\"",
                   BASE_UNSUPPORTED, "model.end_of_word_suffix");
    expect_refusal("\"Isolated\"", "\"Removed\"", BASE_UNSUPPORTED, "Split");
    expect_refusal("\"invert\": false", "\"invert\": true", BASE_UNSUPPORTED, "Split");
    expect_refusal("\"type\": \"Split\"", "\"type\": \"Digits\"", BASE_UNSUPPORTED, "Digits");
    expect_refusal("\"add_prefix_space\": false", "\"add_prefix_space\": true", BASE_UNSUPPORTED,
                   "add_prefix_space");
    expect_refusal("\"use_regex\": false", "\"use_regex\": true", BASE_UNSUPPORTED, "use_regex");
    expect_refusal("\"lstrip\": false", "\"lstrip\": true", BASE_UNSUPPORTED,
                   "added_tokens[0].lstrip");
    expect_refusal("\"decoder\": {\"type\": \"ByteLevel\"", "\"decoder\": {\"type\": \"Metaspace\"",
                   BASE_UNSUPPORTED, "decoder.type");
}

Test(eng_tok, refuses_odd_files_by_key)
{
    expect_refusal("\"h\": 104", "\"h\": -1", BASE_FORMAT, "model.vocab");
    expect_refusal("\"h\": 104", "\"h\": 99999999", BASE_FORMAT, "model.vocab");
    expect_refusal("\"h\": 104", "\"h\": 105", BASE_FORMAT, "model.vocab: id 105");
    expect_refusal("\"h\": 104", "\"h\": \"104\"", BASE_FORMAT, "model.vocab");
    expect_refusal("\"h\": 104, ", "", BASE_FORMAT, "0x68");
    expect_refusal("\"h\": 104", "\"\": 104", BASE_FORMAT, "model.vocab: id 104 is empty");
    expect_refusal("\"h e\"", "\"h\"", BASE_FORMAT, "model.merges[0]");
    expect_refusal("\"h e\"", "\"h \"", BASE_FORMAT, "model.merges[0]");
    expect_refusal("\"h e\"", "7", BASE_FORMAT, "model.merges[0]");
    expect_refusal("\"h e\"", "[\"h\", \"e\", \"l\"]", BASE_FORMAT, "model.merges[0]");
    expect_refusal("\"h e\"", "\"e h\"", BASE_FORMAT, "model.merges[0]");
    expect_refusal("\"vocab\": {", "\"vocap\": {", BASE_FORMAT, "model.vocab");
    expect_refusal("\"merges\": [", "\"mergers\": [", BASE_FORMAT, "model.merges");
    expect_refusal("\"model\": {", "\"modal\": {", BASE_FORMAT, "model");
    expect_refusal("\"id\": 320", "\"id\": 259", BASE_FORMAT, "added_tokens[0].id");
    expect_refusal("\"id\": 320", "\"id\": 97", BASE_FORMAT, "added_tokens[0].id");
    expect_refusal("\"content\": \"]!p~[\"", "\"content\": \"\"", BASE_FORMAT,
                   "added_tokens[0].content");
    expect_refusal("\\\\p{N}{1,3}", "\\\\p{N}{1,3", BASE_OK, "");
    expect_refusal("\\\\p{N}{1,3}", "(", BASE_FORMAT, "pattern");
    base_err err = BASE_ERR_INIT;
    eng_tok *tok;
    cr_assert_eq(eng_tok_load(&tok, "/nowhere/tokenizer.json", &err), BASE_NOT_FOUND);
    cr_assert_not_null(strstr(err.text, "/nowhere/tokenizer.json"));
}

/* An added token that plain text could merge into must not load: client text would become it. */
Test(eng_tok, plain_text_never_becomes_an_added_token)
{
    expect_refusal("\"id\": 320, \"content\": \"]!p~[\"", "\"id\": 259, \"content\": \"hello\"",
                   BASE_FORMAT, "merge");
    expect_refusal("\"id\": 320, \"content\": \"]!p~[\"", "\"id\": 97, \"content\": \"a\"",
                   BASE_FORMAT, "byte");
    /* One that no merge makes may stand in the vocabulary too. */
    expect_refusal("\"id\": 320, \"content\": \"]!p~[\"", "\"id\": 285, \"content\": \"zq\"",
                   BASE_OK, "");
}

Test(eng_tok, refuses_a_file_cut_anywhere)
{
    base_buf file;
    base_buf_init(&file, 0);
    read_small(&file);
    size_t length = file.length - 1; /* the last line's end may go */
    for (size_t cut = 0; cut < length; cut += cut < 200 || length - cut < 200 ? 1 : 37) {
        base_err err = BASE_ERR_INIT;
        cr_assert_eq(load_bytes(file.data, cut, &err), BASE_FORMAT, "cut at %zu: %s", cut,
                     err.text);
    }
    base_buf_deinit(&file);
}
