/* Tokenizer files, and texts: f a tokenizer.json, which is then tried on a text; t a text for the
 * tokenizer of the tests, whose tokens must be the text again. */
#include "tests/fuzz/fuzz.h"

#include "engine/token.h"

static void encode(const eng_tok *tok, const char *text, size_t length, bool specials, bool same)
{
    base_err err = BASE_ERR_INIT;
    eng_ids ids;
    base_buf back;
    eng_ids_init(&ids, 1u << 16);
    base_buf_init(&back, 0);
    base_code code = eng_tok_encode(tok, &ids, text, length, specials, &err);
    MUST(code == err.code);
    for (size_t i = 0; code == BASE_OK && i < ids.count; i++) {
        size_t n;
        const char *bytes = eng_tok_bytes(tok, ids.data[i], &n);
        MUST(bytes != NULL && ids.data[i] >= 0 && (uint32_t)ids.data[i] < eng_tok_vocab(tok));
        MUST(!same || specials || !eng_tok_is_special(tok, ids.data[i]));
        base_buf_add(&back, bytes, n);
    }
    if (same && code == BASE_OK)
        MUST(back.length == length && (length == 0 || memcmp(back.data, text, length) == 0));
    base_buf_deinit(&back);
    eng_ids_deinit(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static eng_tok *small;
    static const char sample[] =
        "The quick  brown\n\n fox's 12345 \xC3\xA9\xF0\x9F\x98\x82<a>]<b>[";
    base_err err = BASE_ERR_INIT;
    if (small == NULL)
        MUST(eng_tok_load(&small, SMALL_TOKENIZER, &err) == BASE_OK);
    if (size < 1)
        return 0;
    if (data[0] == 'f') {
        eng_tok *tok;
        base_code code = eng_tok_load(&tok, fuzz_file(&fd, data + 1, size - 1), &err);
        MUST(code == err.code && (tok == NULL) == (code != BASE_OK));
        if (tok != NULL) {
            encode(tok, sample, sizeof sample - 1, true, false);
            encode(tok, sample, sizeof sample - 1, false, false);
            for (uint32_t id = 0; id < eng_tok_vocab(tok) && id < 4096; id++) {
                size_t n;
                (void)eng_tok_bytes(tok, (int32_t)id, &n);
            }
            (void)eng_tok_special(tok, "<s>");
        }
        eng_tok_destroy(tok);
    } else if (data[0] == 't') {
        char *text = fuzz_copy(data + 1, size - 1);
        encode(small, text, size - 1, false, true);
        encode(small, text, size - 1, true, true);
        free(text);
    }
    return 0;
}
