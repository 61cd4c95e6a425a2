/* See the header. What a place in the output is: a phase, and in phase ON a state of the grammar.
 *
 *   THINK --`</mm:think>`--> ON     FIRST --`<mm:think>`--> THINK     FIRST --anything else--> ON
 *
 * A model that has a token for a marker never spells it out; should one do so inside reasoning, the
 * decoder says that reasoning is over, and the grammar begins with the next token. */
#include "engine/constrain.h"

#include <stdlib.h>
#include <string.h>

#include "engine/chat_internal.h"

#define FORCED_MAX 1024 /* bytes looked ahead at once */

typedef enum phase { THINK, FIRST, ON } phase;

typedef struct place {
    phase phase;
    bool ended; /* an end token came */
    eng_grammar_state state;
} place;

struct eng_constrain {
    eng_constrain_options options;
    eng_grammar_run *run;
    place output, draft;
    bool drafting;
    uint32_t words;
    uint32_t *think; /* [words] what may come inside reasoning */
    uint32_t *first; /* [words] scratch: the grammar's mask with the marks of reasoning */
    eng_ids ids;
    char *ahead; /* [FORCED_MAX] */
};

/* ---- bytes and tokens ---- */

typedef struct bytes_source {
    const eng_codec *codec;
    const eng_tok *tok;
} bytes_source;

static const char *bytes_of(const eng_codec *codec, const eng_tok *tok, int32_t id, size_t *length)
{
    static const char separator = (char)ENG_CONSTRAIN_SEPARATOR, call = (char)ENG_CONSTRAIN_CALL,
                      close = (char)ENG_CONSTRAIN_CALL_CLOSE;
    *length = 1;
    if (id == codec->id[CHAT_SEPARATOR])
        return &separator;
    if (id == codec->id[CHAT_CALL])
        return &call;
    if (id == codec->id[CHAT_CALL_CLOSE])
        return &close;
    const char *bytes = eng_tok_is_special(tok, id) ? NULL : eng_tok_bytes(tok, id, length);
    /* A vocabulary of bytes has tokens that would pass for marks. */
    for (size_t i = 0; bytes != NULL && i < *length; i++)
        if ((uint8_t)bytes[i] >= ENG_CONSTRAIN_CALL_CLOSE)
            return NULL;
    return bytes;
}

static const char *vocab_bytes(const void *context, int32_t id, size_t *length)
{
    const bytes_source *source = context;
    return bytes_of(source->codec, source->tok, id, length);
}

base_code eng_constrain_vocab(eng_vocab **out, const eng_codec *codec, const eng_tok *tok,
                              base_err *err)
{
    bytes_source source = {codec, tok};
    return eng_vocab_create(out, vocab_bytes, &source, eng_tok_vocab(tok), err);
}

/* ---- life ---- */

static void allow(uint32_t *mask, int32_t id, bool allowed)
{
    uint32_t bit = 1u << (uint32_t)id % 32;
    if (allowed)
        mask[id / 32] |= bit;
    else
        mask[id / 32] &= ~bit;
}

static void begin(eng_constrain *c, place *at)
{
    at->phase = ON;
    eng_grammar_start(&at->state, c->run);
}

base_code eng_constrain_create(eng_constrain **out, const eng_constrain_options *options,
                               base_err *err)
{
    *out = NULL;
    eng_constrain *c = calloc(1, sizeof *c);
    if (c == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for a constraint");
    c->options = *options;
    c->words = eng_vocab_words(options->vocab);
    c->think = malloc(c->words * sizeof *c->think);
    c->first = malloc(c->words * sizeof *c->first);
    c->ahead = malloc(FORCED_MAX);
    eng_ids_init(&c->ids, FORCED_MAX);
    base_code code = c->think == NULL || c->first == NULL || c->ahead == NULL
                         ? base_fail(err, BASE_NOMEM, "no memory for a constraint")
                         : eng_grammar_run_create(&c->run, options->grammar, options->vocab, err);
    c->options.grammar = NULL; /* the run holds it */
    if (code != BASE_OK) {
        eng_constrain_destroy(c);
        return code;
    }
    memset(c->think, 0xFF, c->words * sizeof *c->think);
    static const chat_special barred[] = {CHAT_SEPARATOR, CHAT_CALL, CHAT_CALL_CLOSE, CHAT_REASON};
    for (size_t i = 0; i < sizeof barred / sizeof *barred; i++)
        allow(c->think, options->codec->id[barred[i]], false);
    for (uint32_t i = 0; i < options->end_token_count; i++)
        allow(c->think, options->end_tokens[i], false);
    begin(c, &c->output);
    c->output.phase = options->reasons ? THINK : options->may_reason ? FIRST : ON;
    *out = c;
    return BASE_OK;
}

static void end_draft(eng_constrain *c)
{
    if (c->drafting)
        eng_grammar_end(&c->draft.state);
    c->drafting = false;
}

void eng_constrain_destroy(eng_constrain *c)
{
    if (c == NULL)
        return;
    if (c->run != NULL) {
        end_draft(c);
        if (c->output.state.run != NULL)
            eng_grammar_end(&c->output.state);
    }
    eng_grammar_run_destroy(c->run);
    eng_ids_deinit(&c->ids);
    free(c->think);
    free(c->first);
    free(c->ahead);
    free(c);
}

/* ---- following ---- */

static bool is_end(const eng_constrain *c, int32_t token)
{
    for (uint32_t i = 0; i < c->options.end_token_count; i++)
        if (c->options.end_tokens[i] == token)
            return true;
    return false;
}

static bool move(eng_constrain *c, place *at, int32_t token)
{
    const eng_codec *codec = c->options.codec;
    if (at->phase == THINK) {
        if (token == codec->id[CHAT_REASON_CLOSE])
            at->phase = ON;
        return true;
    }
    if (at->phase == FIRST) {
        at->phase = token == codec->id[CHAT_REASON] ? THINK : ON;
        if (token == codec->id[CHAT_REASON] || token == codec->id[CHAT_REASON_CLOSE])
            return true;
    }
    if (is_end(c, token)) {
        at->ended = true;
        return eng_grammar_accepts(&at->state);
    }
    size_t length = 0;
    const char *bytes = bytes_of(codec, c->options.tok, token, &length);
    return bytes != NULL && eng_grammar_advance(&at->state, bytes, length);
}

static const uint32_t *mask_at(eng_constrain *c, place *at)
{
    if (at->phase == THINK)
        return c->think;
    const uint32_t *mask =
        eng_grammar_mask(&at->state, c->options.end_tokens, c->options.end_token_count);
    if (at->phase == ON)
        return mask;
    memcpy(c->first, mask, c->words * sizeof *mask);
    allow(c->first, c->options.codec->id[CHAT_REASON], true);
    allow(c->first, c->options.codec->id[CHAT_REASON_CLOSE], true);
    return c->first;
}

const uint32_t *eng_constrain_mask(eng_constrain *c)
{
    return mask_at(c, &c->output);
}

bool eng_constrain_take(eng_constrain *c, int32_t token, bool in_reasoning)
{
    end_draft(c);
    bool good = move(c, &c->output, token);
    if (c->output.phase == THINK && !in_reasoning)
        c->output.phase = ON;
    return good;
}

/* No token but the end. */
static bool nothing_follows(eng_constrain *c)
{
    const uint32_t *mask = eng_grammar_mask(&c->output.state, NULL, 0);
    for (uint32_t i = 0; i < c->words; i++)
        if (mask[i] != 0)
            return false;
    return true;
}

bool eng_constrain_stuck(eng_constrain *c)
{
    return c->output.phase == ON && !c->output.ended && !eng_grammar_accepts(&c->output.state) &&
           nothing_follows(c);
}

/* The ids of forced bytes: the marks by themselves, what stands between them as text. */
static bool encode(eng_constrain *c, size_t length)
{
    const eng_codec *codec = c->options.codec;
    size_t from = 0;
    base_err err = BASE_ERR_INIT;
    c->ids.count = 0;
    for (size_t at = 0; at <= length; at++) {
        uint8_t byte = at < length ? (uint8_t)c->ahead[at] : 0;
        if (at < length && byte < ENG_CONSTRAIN_CALL_CLOSE)
            continue;
        if (at > from && eng_tok_encode(c->options.tok, &c->ids, c->ahead + from, at - from, false,
                                        &err) != BASE_OK)
            return false;
        if (at < length)
            eng_ids_add(&c->ids, codec->id[byte == ENG_CONSTRAIN_SEPARATOR ? CHAT_SEPARATOR
                                           : byte == ENG_CONSTRAIN_CALL    ? CHAT_CALL
                                                                           : CHAT_CALL_CLOSE]);
        from = at + 1;
    }
    return true;
}

/* Whether the last of the forced tokens is as sure as those before it: no longer token may stand in
 * its place. (Shorter ones may, but nobody writes a text in more tokens than it needs.) */
static bool last_is_sure(eng_constrain *c, size_t length)
{
    size_t last, other;
    bool sure = true;
    eng_grammar_state before;
    if ((uint8_t)c->ahead[length - 1] >= ENG_CONSTRAIN_CALL_CLOSE) /* a mark */
        return true;
    (void)eng_tok_bytes(c->options.tok, c->ids.data[c->ids.count - 1], &last);
    eng_grammar_clone(&before, &c->output.state);
    sure = eng_grammar_advance(&before, c->ahead, length - last);
    const uint32_t *mask = eng_grammar_mask(&before, NULL, 0);
    for (uint32_t i = 0; sure && i < c->words; i++)
        for (uint32_t bits = mask[i]; sure && bits != 0; bits &= bits - 1) {
            int32_t id = (int32_t)(32 * i + (uint32_t)__builtin_ctz(bits));
            sure = bytes_of(c->options.codec, c->options.tok, id, &other) != NULL && other <= last;
        }
    eng_grammar_end(&before);
    return sure;
}

uint32_t eng_constrain_forced(eng_constrain *c, int32_t *tokens, uint32_t max)
{
    if (c->output.phase != ON || c->output.ended || max == 0)
        return 0;
    size_t length = eng_grammar_forced(&c->output.state, c->ahead, FORCED_MAX);
    uint32_t count = 0;
    if (length == 0) {
        if (c->options.end_token_count == 0 || !eng_grammar_accepts(&c->output.state) ||
            !nothing_follows(c))
            return 0;
        tokens[count++] = c->options.end_tokens[0];
        return count;
    }
    if (!encode(c, length) || c->ids.count == 0)
        return 0;
    eng_grammar_state behind;
    eng_grammar_clone(&behind, &c->output.state);
    bool ends = eng_grammar_advance(&behind, c->ahead, length) && eng_grammar_accepts(&behind);
    eng_grammar_end(&behind);
    count = (uint32_t)c->ids.count - (ends || last_is_sure(c, length) ? 0 : 1);
    if (count > max)
        count = max;
    memcpy(tokens, c->ids.data, count * sizeof *tokens);
    return count;
}

/* ---- drafts ---- */

void eng_constrain_draft(eng_constrain *c)
{
    end_draft(c);
    c->draft.phase = c->output.phase;
    c->draft.ended = c->output.ended;
    eng_grammar_clone(&c->draft.state, &c->output.state);
    c->drafting = true;
}

const uint32_t *eng_constrain_draft_mask(void *constrain, int32_t previous)
{
    eng_constrain *c = constrain;
    /* A draft that the grammar refuses is not verified any further; its mask does not matter. */
    if (previous >= 0 && !c->draft.ended)
        (void)move(c, &c->draft, previous);
    return mask_at(c, &c->draft);
}
