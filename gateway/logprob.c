/* logprob: see the header. */
#include "gateway/logprob.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "gateway/dialect.h"

/* `"token":…,"logprob":…,"bytes":[…]` */
static void put_token(base_buf *out, const char *bytes, size_t count, float logprob)
{
    base_buf_puts(out, "\"token\":");
    if (base_utf8_valid(bytes, count)) {
        base_buf_json_string(out, bytes, count);
    } else {
        /* Part of a character: `bytes` has the truth. */
        base_buf_puts(out, "\"" GW_REPLACEMENT "\"");
    }
    base_buf_printf(out, ",\"logprob\":%.6g,\"bytes\":[", gw_shown_logprob(logprob));
    for (size_t i = 0; i < count; i++)
        base_buf_printf(out, "%s%u", i ? "," : "", (unsigned char)bytes[i]);
    base_buf_puts(out, "]");
}

bool gw_logprobs_feed(gw_logprobs *list, const char *bytes, size_t length, eng_text json)
{
    if (list->count == list->capacity) {
        uint32_t capacity = list->capacity ? list->capacity * 2 : 64;
        gw_waiting *more = realloc(list->waiting, capacity * sizeof(*more));
        if (!more)
            return false;
        list->waiting = more;
        list->capacity = capacity;
    }
    base_buf_add(&list->bytes, bytes, length);
    base_buf_add(&list->json, json.data, json.length);
    if (list->keep) {
        base_buf_puts(&list->log, list->log.length ? "," : "");
        base_buf_add(&list->log, json.data, json.length);
    }
    list->waiting[list->count++] = (gw_waiting){(uint32_t)length, (uint32_t)json.length};
    return !list->bytes.failed && !list->json.failed && !list->log.failed;
}

static void wait_for_text(gw_logprobs *list, gw_turn *turn, const eng_logprob *logprob)
{
    const eng_engine *engine = turn->app->engine;
    base_buf json, bytes;
    base_buf_init(&json, 0);
    base_buf_init(&bytes, 0);
    bool good = !eng_detokenize(engine, &bytes, &logprob->token, 1, NULL);
    base_buf_puts(&json, "{");
    put_token(&json, bytes.data ? bytes.data : "", bytes.length, logprob->logprob);
    base_buf_puts(&json, ",\"top_logprobs\":[");
    uint32_t count = (uint32_t)base_min(logprob->top_count, list->top);
    for (uint32_t i = 0; i < count; i++) {
        base_buf top;
        base_buf_init(&top, 0);
        eng_detokenize(engine, &top, &logprob->top_token[i], 1, NULL);
        base_buf_puts(&json, i ? ",{" : "{");
        put_token(&json, top.data ? top.data : "", top.length, logprob->top_logprob[i]);
        base_buf_puts(&json, "}");
        base_buf_deinit(&top);
    }
    base_buf_puts(&json, "]}");
    if (!good || json.failed || bytes.failed ||
        !gw_logprobs_feed(list, bytes.data ? bytes.data : "", bytes.length,
                          (eng_text){json.data, json.length}))
        turn->lossy = true;
    base_buf_deinit(&json);
    base_buf_deinit(&bytes);
}

void gw_logprobs_step(gw_logprobs *list, gw_turn *turn, const eng_event *event)
{
    for (uint32_t i = 0; event->logprobs && i < event->token_count; i++)
        wait_for_text(list, turn, &event->logprobs[i]);
}

/* Bytes of replacement characters at the front of `text` that stand for the `count` bytes of a
 * token which is not UTF-8. */
static size_t replaced(const char *text, size_t length, const char *bytes, size_t count)
{
    size_t used = 0;
    if (base_utf8_valid(bytes, count))
        return 0;
    for (size_t i = 0;
         i < count && used + 3 <= length && memcmp(text + used, GW_REPLACEMENT, 3) == 0; i++)
        used += 3;
    return used;
}

/* Matches tokens with text; those of visible text become entries. */
static void match_tokens(gw_logprobs *list, const char *text, size_t length, bool visible)
{
    base_buf_add(&list->unmatched, text, length);
    size_t bytes = 0, json = 0, used = 0;
    uint32_t taken = 0;
    while (taken < list->count && used < list->unmatched.length) {
        const gw_waiting *front = &list->waiting[taken];
        size_t both = base_min(front->byte_count, list->unmatched.length - used);
        bool spells = front->byte_count &&
                      memcmp(list->bytes.data + bytes, list->unmatched.data + used, both) == 0;
        if (spells && both < front->byte_count)
            break; /* the rest of its text has not come yet */
        size_t taken_text =
            spells ? front->byte_count
                   : replaced(list->unmatched.data + used, list->unmatched.length - used,
                              list->bytes.data + bytes, front->byte_count);
        if (taken_text) {
            used += taken_text;
            if (visible) {
                base_buf_puts(&list->entries, list->entries.length ? "," : "");
                base_buf_add(&list->entries, list->json.data + json, front->json_count);
            }
        }
        bytes += front->byte_count;
        json += front->json_count;
        taken++;
    }
    /* Text never comes before its tokens: what no token spells now, none ever will. */
    base_buf_drop(&list->unmatched, taken == list->count ? list->unmatched.length : used);
    base_buf_drop(&list->bytes, bytes);
    base_buf_drop(&list->json, json);
    if (taken)
        memmove(list->waiting, list->waiting + taken,
                (list->count - taken) * sizeof(*list->waiting));
    list->count -= taken;
}

void gw_logprobs_part(gw_logprobs *list, const eng_part *part)
{
    if (part->kind == ENG_PART_TEXT || part->kind == ENG_PART_REASONING) {
        match_tokens(list, part->text, part->length, part->kind == ENG_PART_TEXT);
        return;
    }
    base_buf_clear(&list->unmatched);
    base_buf_clear(&list->bytes);
    base_buf_clear(&list->json);
    list->count = 0;
}

void gw_logprobs_deinit(gw_logprobs *list)
{
    base_buf *bufs[] = {&list->entries, &list->bytes, &list->json, &list->unmatched, &list->log};
    for (size_t i = 0; i < sizeof(bufs) / sizeof(bufs[0]); i++)
        base_buf_deinit(bufs[i]);
    free(list->waiting);
}
