/* eng_codec: the chat format of MiniMax-M3.1 (shared by M3 but for the identity sentence and two
 * optional lines).
 *
 * Render: conversation to tokens. Decode: output tokens to reasoning, text and calls, streaming;
 * the result does not depend on how the text was cut. Thread: the codec is immutable; a decoder
 * belongs to one thread at a time. */
#pragma once
#include "engine/engine.h"
#include "engine/token.h"

typedef struct eng_codec eng_codec;

/* `identity` is the sentence that opens the system turn (data of the model directory); `thinking`
 * its default mode. Both borrowed arguments are copied; tok is borrowed and outlives the codec.
 * BASE_FORMAT if a special token that the format needs is missing: named. */
base_code eng_codec_create(eng_codec **out, const eng_tok *tok, const char *identity,
                           eng_thinking thinking, base_err *err);
void eng_codec_destroy(eng_codec *codec);
int32_t eng_codec_end_token(const eng_codec *codec); /* `[e~[` */
int32_t
eng_codec_call_token(const eng_codec *codec); /* `<tool_call>`, banned for tool_choice none */
int32_t eng_codec_think_end_token(const eng_codec *codec); /* `</mm:think>` */
const char *
eng_codec_digest(const eng_codec *codec); /* of tokenizer and template: keys stored token runs */

/* As eng_render in engine.h. */
base_code eng_codec_render(const eng_codec *codec, eng_prompt *out, const eng_chat *chat,
                           uint32_t token_max, uint32_t window, base_buf *text, base_arena *arena,
                           base_err *err);
/* As eng_run_seen in engine.h. */
bool eng_codec_run_seen(const eng_codec *codec, uint32_t *seen, eng_text *rest,
                        const int32_t *tokens, uint32_t token_count, eng_text reasoning,
                        eng_text text);
/* Tokens that force a call once visible text may begin: separator, `<tool_call>`, newline,
 * separator, `<invoke name="` and, if `name` is not empty, NAME`">`. Written to the arena. */
base_code eng_codec_force(const eng_codec *codec, int32_t **tokens, uint32_t *token_count,
                          eng_text name, base_arena *arena, base_err *err);
/* Tokens that close a call block after a whole invoke: newline, separator, `</tool_call>`, end of
 * turn. */
base_code eng_codec_force_close(const eng_codec *codec, int32_t **tokens, uint32_t *token_count,
                                base_arena *arena, base_err *err);

typedef struct eng_decoder eng_decoder;

typedef struct eng_decoder_options {
    eng_parse parse;
    bool starts_in_reasoning;
    eng_thinking thinking;
    const eng_text *tools; /* JSON of function objects; borrowed until destroy */
    uint32_t tool_count;
    const eng_text *stops; /* borrowed until destroy */
    uint32_t stop_count;
    /* Called in order, text borrowed for the call. */
    void (*part)(void *ctx, const eng_part *part);
    void *ctx;
} eng_decoder_options;

base_code eng_decoder_create(eng_decoder **out, const eng_codec *codec,
                             const eng_decoder_options *options, base_err *err);
void eng_decoder_destroy(eng_decoder *decoder);
/* One output token. `id` may be -1 for bare bytes (tests). Returns false once a stop string has
 * matched (or, with eng_decoder_stop_index -1, memory ran out): nothing more may be pushed. Memory
 * is bounded by what is held back: a non-string argument, at most the output. */
bool eng_decoder_push(eng_decoder *decoder, int32_t id, const char *bytes, size_t length);
/* End of output: gives out what was held back. A call that is still open is closed only if the
 * last token pushed was the end of turn (so push that one too). */
void eng_decoder_finish(eng_decoder *decoder);
int32_t eng_decoder_stop_index(const eng_decoder *decoder); /* -1: none matched */
uint32_t eng_decoder_whole_tokens(
    const eng_decoder *decoder); /* tokens pushed that are wholly given out or structural */
uint32_t eng_decoder_reasoning_tokens(const eng_decoder *decoder);
uint32_t eng_decoder_calls(const eng_decoder *decoder); /* whole calls so far */
bool eng_decoder_in_reasoning(const eng_decoder *decoder);
