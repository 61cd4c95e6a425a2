/* eng_replay: see engine.h. The loop's own decoder over tokens that are known, cut where the steps
 * were cut; parts of a step are joined as loop.c joins them. */
#include <stdlib.h>
#include <string.h>

#include "engine/engine_internal.h"

/* The parts of one step; `text` holds their bytes. */
typedef struct replay {
    base_buf text;
    eng_part_slot *slots;
    eng_part *parts;
    uint32_t count, capacity;
    bool failed;
} replay;

static void add_part(void *ctx, const eng_part *part)
{
    replay *r = ctx;
    eng_part_slot *last = r->count > 0 ? &r->slots[r->count - 1] : NULL;
    bool joins = last != NULL && last->kind == part->kind && last->call == part->call &&
                 part->kind != ENG_PART_CALL_BEGIN && part->kind != ENG_PART_CALL_END;
    size_t offset = r->text.length;
    base_buf_add(&r->text, part->text, part->length);
    if (joins) {
        last->length += part->length;
        return;
    }
    if (r->count == r->capacity) {
        uint32_t capacity = r->capacity > 0 ? r->capacity * 2 : 16;
        eng_part_slot *slots = realloc(r->slots, capacity * sizeof *slots);
        if (slots != NULL)
            r->slots = slots;
        eng_part *parts = realloc(r->parts, capacity * sizeof *parts);
        if (parts != NULL)
            r->parts = parts;
        if (slots == NULL || parts == NULL) {
            r->failed = true;
            return;
        }
        r->capacity = capacity;
    }
    r->slots[r->count++] = (eng_part_slot){
        .kind = part->kind, .call = part->call, .offset = offset, .length = part->length};
}

static void give(replay *r, const eng_sink *sink, const int32_t *tokens, uint32_t token_count)
{
    if (r->failed || r->text.failed || (r->count == 0 && token_count == 0))
        return;
    for (uint32_t i = 0; i < r->count; i++) {
        const eng_part_slot *slot = &r->slots[i];
        r->parts[i] = (eng_part){.kind = slot->kind,
                                 .call = slot->call,
                                 .text = slot->length > 0 ? r->text.data + slot->offset : "",
                                 .length = slot->length};
    }
    eng_event event = {.kind = ENG_EVENT_STEP,
                       .tokens = tokens,
                       .token_count = token_count,
                       .parts = r->parts,
                       .part_count = r->count,
                       .stop_index = -1};
    sink->event(sink->ctx, &event);
    r->count = 0;
    base_buf_clear(&r->text);
}

/* End and stop tokens are no text; the decoder wants the end of turn, see loop.c. */
static bool is_shown(const eng_engine *engine, const eng_request *request, int32_t token)
{
    bool ends = eng__is_end_token(engine, token) && !request->sampling.ignore_eos;
    for (uint32_t i = 0; i < request->sampling.stop_token_count; i++)
        ends |= request->sampling.stop_tokens[i] == token;
    return !ends ||
           (request->parse == ENG_PARSE_CHAT && token == eng_codec_end_token(engine->codec));
}

base_code eng_replay(const eng_engine *engine, const eng_request *request, const int32_t *tokens,
                     uint32_t token_count, const uint32_t *steps, uint32_t step_count, bool ended,
                     const eng_sink *sink, base_err *err)
{
    replay r = {0};
    eng_decoder *decoder;
    eng_decoder_options options = {.parse = request->parse,
                                   .starts_in_reasoning = request->starts_in_reasoning,
                                   .thinking = request->thinking,
                                   .tools = request->tools,
                                   .tool_count = request->tool_count,
                                   .stops = request->stops,
                                   .stop_count = request->stop_count,
                                   .part = add_part,
                                   .ctx = &r};
    for (uint32_t i = 0; i < token_count; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= engine->info.vocab)
            return base_fail(err, BASE_INVALID, "token %d is not below %u", tokens[i],
                             engine->info.vocab);
    base_code code = eng_decoder_create(&decoder, engine->codec, &options, err);
    if (code != BASE_OK)
        return code;
    bool on = true;
    for (uint32_t step = 0, at = 0; at < token_count; step++) {
        uint32_t left = token_count - at, count = step < step_count ? steps[step] : left;
        count = count > left ? left : count;
        for (uint32_t i = at; i < at + count && on; i++) {
            size_t length = 0;
            const char *bytes = eng_tok_bytes(engine->tok, tokens[i], &length);
            if (is_shown(engine, request, tokens[i]))
                on = eng_decoder_push(decoder, tokens[i], bytes != NULL ? bytes : "",
                                      bytes != NULL ? length : 0);
        }
        give(&r, sink, tokens + at, count);
        at += count;
    }
    if (ended) {
        eng_decoder_finish(decoder);
        give(&r, sink, NULL, 0);
    }
    if (r.failed || r.text.failed || (!on && eng_decoder_stop_index(decoder) < 0))
        code = base_fail(err, BASE_NOMEM, "out of memory for output text");
    eng_decoder_destroy(decoder);
    base_buf_deinit(&r.text);
    free(r.slots);
    free(r.parts);
    return code;
}
