/* Formats to grammars: which compiler takes what. */
#include "engine/engine.h"
#include "engine/grammar.h"

#include <stdlib.h>

static base_code compile_choice(eng_grammar **out, const eng_format *format, base_err *err)
{
    const char **texts = malloc((format->choice_count + 1) * sizeof *texts);
    size_t *lengths = malloc((format->choice_count + 1) * sizeof *lengths);
    base_code code = BASE_OK;
    if (texts == NULL || lengths == NULL)
        code = base_fail(err, BASE_NOMEM, "no memory for a grammar");
    for (uint32_t i = 0; code == BASE_OK && i < format->choice_count; i++) {
        texts[i] = format->choices[i].data;
        lengths[i] = format->choices[i].length;
    }
    if (code == BASE_OK)
        code = eng_grammar_choice(out, texts, lengths, format->choice_count, NULL, err);
    free(texts);
    free(lengths);
    return code;
}

base_code eng_format_compile(eng_grammar **out, const eng_format *format, base_err *err)
{
    const char *text = format->text.data;
    size_t length = format->text.length;
    *out = NULL;
    switch (format->kind) {
    case ENG_FORMAT_TEXT:
        return BASE_OK;
    case ENG_FORMAT_OBJECT:
        return eng_grammar_json_object(out, NULL, err);
    case ENG_FORMAT_SCHEMA:
        return eng_grammar_schema(out, text, length, NULL, err);
    case ENG_FORMAT_REGEX:
        return eng_grammar_regex(out, text, length, NULL, err);
    case ENG_FORMAT_GBNF:
        return eng_grammar_gbnf(out, text, length, NULL, err);
    case ENG_FORMAT_CHOICE:
        return compile_choice(out, format, err);
    }
    return base_fail(err, BASE_INVALID, "unknown format");
}
