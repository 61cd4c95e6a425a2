/* See the header. */
#include "engine/grammar_vocab.h"

#include <stdlib.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "engine/grammar_run.h"

typedef struct token_text {
    const char *bytes;
    uint32_t length, chars;
    uint32_t cut; /* bytes of text that a token of REST begins with */
    int32_t id;
    uint8_t class_index, first_class; /* of the text before the cut */
} token_text;

bool gr_class_has(uint32_t class_index, uint8_t b)
{
    switch (class_index) {
    case GR_CLASS_LOWER:
        return b >= 'a' && b <= 'z';
    case GR_CLASS_DIGIT:
        return b >= '0' && b <= '9';
    case GR_CLASS_WORD:
        return (b >= 'a' && b <= 'z') || (b >= 'A' && b <= 'Z') || (b >= '0' && b <= '9');
    case GR_CLASS_NAME:
        return gr_class_has(GR_CLASS_WORD, b) || (b != 0 && strchr("_-./:", b) != NULL);
    default:
        return b >= 0x20 && b < 0x7F && b != '"' && b != '\\';
    }
}

/* The class of so many bytes of text. */
static uint8_t text_class(const char *bytes, uint32_t length)
{
    for (uint8_t k = 0; k <= GR_CLASS_ASCII; k++) {
        uint32_t i = 0;
        while (i < length && gr_class_has(k, (uint8_t)bytes[i]))
            i++;
        if (i == length)
            return k;
    }
    return GR_CLASS_TEXT;
}

static void classify(token_text *token)
{
    uint32_t at = 0;
    while (at < token->length) {
        uint8_t b = (uint8_t)token->bytes[at];
        size_t n = base_utf8_char(token->bytes + at, token->length - at, NULL);
        if (b < 0x20 || b == '"' || b == '\\' || n == 0)
            break;
        at += (uint32_t)n;
        token->chars++;
    }
    /* The last character may be cut. */
    size_t left = token->length - at;
    if (left > 0 && left < 4 && (uint8_t)token->bytes[at] >= 0x80 &&
        base_utf8_complete(token->bytes + at, left) == 0) {
        token->chars++;
        at = token->length;
    }
    token->cut = at;
    token->class_index = token->first_class = text_class(token->bytes, at);
    if (at == token->length)
        return;
    token->class_index = GR_CLASS_REST;
    if (at == 0)
        token->first_class = GR_CLASS_REST;
    for (uint32_t i = 0; i < token->length; i++)
        if ((uint8_t)token->bytes[i] >= GR_MARK_FIRST)
            token->class_index = token->first_class = GR_CLASS_MARK;
}

/* ---- orders ---- */

static int by_bytes_from(const token_text *a, const token_text *b, uint32_t from_a, uint32_t from_b)
{
    uint32_t length_a = a->length - from_a, length_b = b->length - from_b;
    int d = memcmp(a->bytes + from_a, b->bytes + from_b, base_min(length_a, length_b));
    if (d != 0)
        return d;
    if (length_a != length_b)
        return length_a < length_b ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

static int by_bytes(const void *pa, const void *pb)
{
    const token_text *a = pa, *b = pb;
    if (a->class_index != b->class_index)
        return a->class_index < b->class_index ? -1 : 1;
    if (a->class_index == GR_CLASS_REST && a->first_class != b->first_class)
        return a->first_class < b->first_class ? -1 : 1;
    return by_bytes_from(a, b, 0, 0);
}

static int by_tail(const void *pa, const void *pb)
{
    const token_text *a = pa, *b = pb;
    return by_bytes_from(a, b, a->cut, b->cut);
}

static int by_count_and_tail(const void *pa, const void *pb)
{
    const token_text *a = pa, *b = pb;
    return a->chars != b->chars ? (a->chars < b->chars ? -1 : 1) : by_tail(pa, pb);
}

static int by_chars(const void *pa, const void *pb)
{
    const token_text *a = pa, *b = pb;
    if (a->chars != b->chars)
        return a->chars < b->chars ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

/* ---- tries ---- */

static uint32_t shared_prefix(const token_text *a, const token_text *b, bool tails)
{
    uint32_t n = 0, i = tails ? a->cut : 0, k = tails ? b->cut : 0;
    while (i + n < a->length && k + n < b->length && a->bytes[i + n] == b->bytes[k + n])
        n++;
    return n;
}

/* Of sorted tokens, or of their tails. */
static bool trie_build(gr_trie *trie, const token_text *tokens, uint32_t count, bool tails,
                       int32_t *same)
{
    uint32_t nodes = 0;
    for (uint32_t i = 0; i < count; i++)
        nodes += tokens[i].length - (tails ? tokens[i].cut : 0) -
                 (i > 0 ? shared_prefix(&tokens[i - 1], &tokens[i], tails) : 0);
    trie->nodes = calloc((size_t)nodes + 1, sizeof *trie->nodes);
    if (trie->nodes == NULL)
        return false;
    uint32_t open[GR_TOKEN_BYTES_MAX], depth = 0, at = 0;
    for (uint32_t i = 0; i < count; i++) {
        const token_text *t = &tokens[i];
        uint32_t from = tails ? t->cut : 0;
        uint32_t keep = i > 0 ? shared_prefix(&tokens[i - 1], t, tails) : 0;
        for (; depth > keep; depth--)
            trie->nodes[open[depth - 1]].end = at;
        for (; depth < t->length - from; depth++) {
            trie->nodes[at] = (gr_trie_node){
                .byte = (uint8_t)t->bytes[from + depth], .depth = (uint16_t)depth, .token = -1};
            open[depth] = at++;
        }
        int32_t *ends = &trie->nodes[open[depth - 1]].token;
        same[t->id] = *ends;
        *ends = t->id;
    }
    for (; depth > 0; depth--)
        trie->nodes[open[depth - 1]].end = at;
    trie->count = at;
    return true;
}

static bool class_build(eng_vocab *vocab, gr_token_class *class, token_text *tokens, uint32_t count)
{
    if (!trie_build(&class->trie, tokens, count, false, vocab->same[GR_SAME_TOKEN]))
        return false;
    class->count = count;
    class->ids = calloc((size_t)count + 1, sizeof *class->ids);
    class->chars = calloc((size_t)count + 1, sizeof *class->chars);
    class->mask = calloc((size_t)vocab->words + 1, sizeof *class->mask);
    if (class->ids == NULL || class->chars == NULL || class->mask == NULL)
        return false;
    qsort(tokens, count, sizeof *tokens, by_chars);
    for (uint32_t i = 0; i < count; i++) {
        class->ids[i] = tokens[i].id;
        class->chars[i] = (uint16_t)tokens[i].chars;
        class->mask[tokens[i].id / 32] |= 1u << tokens[i].id % 32;
    }
    for (uint32_t n = 0, i = 0; n < GR_SUMMED; n++) {
        class->upto[n] = calloc((size_t)vocab->words + 1, sizeof *class->mask);
        if (class->upto[n] == NULL)
            return false;
        if (n > 0)
            memcpy(class->upto[n], class->upto[n - 1], vocab->words * sizeof *class->mask);
        for (; i < count && class->chars[i] <= n + 1; i++)
            class->upto[n][class->ids[i] / 32] |= 1u << class->ids[i] % 32;
        class->upto_count[n] = i;
    }
    return true;
}

static bool rest_build(eng_vocab *vocab, gr_token_rest *rest, token_text *tokens, uint32_t count)
{
    if (!trie_build(&rest->trie, tokens, count, false, vocab->same[GR_SAME_TOKEN]))
        return false;
    qsort(tokens, count, sizeof *tokens, by_tail);
    if (!trie_build(&rest->tails, tokens, count, true, vocab->same[GR_SAME_TAIL]))
        return false;
    qsort(tokens, count, sizeof *tokens, by_count_and_tail);
    rest->chars_max = count == 0 ? 0 : tokens[count - 1].chars;
    rest->tails_of = calloc((size_t)rest->chars_max + 1, sizeof *rest->tails_of);
    if (rest->tails_of == NULL)
        return false;
    for (uint32_t n = 1, i = 0; n <= rest->chars_max; n++) {
        uint32_t first = i;
        while (i < count && tokens[i].chars == n)
            i++;
        if (!trie_build(&rest->tails_of[n - 1], tokens + first, i - first, true,
                        vocab->same[GR_SAME_COUNTED]))
            return false;
    }
    return true;
}

/* ---- the vocabulary ---- */

base_code eng_vocab_create(eng_vocab **out, eng_vocab_bytes *bytes, const void *context,
                           uint32_t count, base_err *err)
{
    *out = NULL;
    eng_vocab *vocab = calloc(1, sizeof *vocab);
    token_text *tokens = calloc((size_t)count + 1, sizeof *tokens);
    uint32_t used = 0;
    bool whole = vocab != NULL && tokens != NULL;
    if (whole)
        whole = (vocab->spares = calloc(1, sizeof *vocab->spares)) != NULL;
    if (whole) {
        pthread_mutex_init(&vocab->spares->lock, NULL);
        vocab->count = count;
        vocab->words = (count + 31) / 32;
        for (uint32_t i = 0; i < GR_SAMES; i++) {
            vocab->same[i] = malloc(((size_t)count + 1) * sizeof **vocab->same);
            whole = whole && vocab->same[i] != NULL;
        }
    }
    for (uint32_t id = 0; whole && id < count; id++) {
        size_t length = 0;
        const char *text = bytes(context, (int32_t)id, &length);
        for (uint32_t i = 0; i < GR_SAMES; i++)
            vocab->same[i][id] = -1;
        if (text == NULL || length == 0 || length > GR_TOKEN_BYTES_MAX)
            continue;
        vocab->chars_max = (uint32_t)base_max(vocab->chars_max, length);
        tokens[used] = (token_text){.bytes = text, .length = (uint32_t)length, .id = (int32_t)id};
        classify(&tokens[used++]);
    }
    if (whole)
        qsort(tokens, used, sizeof *tokens, by_bytes);
    for (uint32_t first = 0, n; whole && first < used; first += n) {
        const token_text *t = &tokens[first];
        uint32_t first_class = t->first_class;
        bool cut = t->class_index == GR_CLASS_REST && first_class != GR_CLASS_REST;
        n = 0;
        while (first + n < used && tokens[first + n].class_index == t->class_index &&
               (t->class_index != GR_CLASS_REST || tokens[first + n].first_class == first_class))
            n++;
        whole = cut ? rest_build(vocab, &vocab->rests[first_class], tokens + first, n)
                    : class_build(vocab, &vocab->classes[t->class_index], tokens + first, n);
    }
    free(tokens);
    if (!whole) {
        eng_vocab_destroy(vocab);
        return base_fail(err, BASE_NOMEM, "no memory for the tries of %u tokens", count);
    }
    *out = vocab;
    return BASE_OK;
}

static const char *ordinary_bytes(const void *context, int32_t id, size_t *length)
{
    return eng_tok_is_special(context, id) ? NULL : eng_tok_bytes(context, id, length);
}

base_code eng_vocab_create_tok(eng_vocab **out, const eng_tok *tok, base_err *err)
{
    return eng_vocab_create(out, ordinary_bytes, tok, eng_tok_vocab(tok), err);
}

void eng_vocab_destroy(eng_vocab *vocab)
{
    if (vocab == NULL)
        return;
    for (uint32_t k = 0; k < GR_CLASSES; k++) {
        free(vocab->classes[k].trie.nodes);
        free(vocab->classes[k].ids);
        free(vocab->classes[k].chars);
        free(vocab->classes[k].mask);
        for (uint32_t n = 0; n < GR_SUMMED; n++)
            free(vocab->classes[k].upto[n]);
    }
    for (uint32_t k = 0; k < GR_CLASS_REST; k++) {
        gr_token_rest *rest = &vocab->rests[k];
        free(rest->trie.nodes);
        free(rest->tails.nodes);
        for (uint32_t n = 0; rest->tails_of != NULL && n < rest->chars_max; n++)
            free(rest->tails_of[n].nodes);
        free(rest->tails_of);
    }
    for (uint32_t i = 0; i < GR_SAMES; i++)
        free(vocab->same[i]);
    if (vocab->spares != NULL) {
        for (eng_grammar_run *run = vocab->spares->first, *next; run != NULL; run = next) {
            next = run->next_spare;
            gr_run_free(run);
        }
        pthread_mutex_destroy(&vocab->spares->lock);
        free(vocab->spares);
    }
    free(vocab);
}

uint32_t eng_vocab_words(const eng_vocab *vocab)
{
    return vocab->words;
}
