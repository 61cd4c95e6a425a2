/* The null engine: what a model would say is a script, so that all that stands around one can be
 * tested and measured alone.
 *
 * An answer is the script once; longer, where ignore_eos asks for it, it begins again. Reasoning
 * ends after a few tokens. Under a grammar, the first token that it allows is taken where the
 * script's own is not. */
#include "engine/engine_internal.h"

#define REASONING 4 /* tokens */

static const char SCRIPT[] =
    "This answer is a script: no model was run for it. It says the same to "
    "everyone, whatever the question, and then it ends.";

base_code eng__null_open(eng_engine *engine, base_err *err)
{
    eng_ids_init(&engine->script, sizeof SCRIPT);
    return eng_tok_encode(engine->tok, &engine->script, SCRIPT, sizeof SCRIPT - 1, false, err);
}

static bool allows(const uint32_t *mask, int32_t token)
{
    return mask == NULL || (mask[token / 32] >> (token % 32) & 1) != 0;
}

int32_t eng__null_token(const eng_engine *engine, const eng_sequence *seq)
{
    const uint32_t *mask = seq->constrain != NULL ? eng_constrain_mask(seq->constrain) : NULL;
    size_t at = seq->output_count;
    bool over = at >= engine->script.count && !seq->request.sampling.ignore_eos;
    int32_t token = over ? engine->end_tokens[0] : engine->script.data[at % engine->script.count];
    if (eng_decoder_in_reasoning(seq->decoder) && at >= REASONING)
        token = eng_codec_think_end_token(engine->codec);
    for (uint32_t i = 0; !allows(mask, token) && i < engine->info.vocab; i++)
        if (allows(mask, (int32_t)i))
            token = (int32_t)i;
    return token;
}
