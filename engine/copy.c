/* Positions are those of known tokens, prompt then output; a run "ends at" p if its last token
 * stands at p - 1. The newest known token's own run is inserted only when there is a token behind
 * it, so a look-up never finds itself. */
#include "engine/copy.h"

#include <stdlib.h>

#include "engine/base/num.h"

#define WAYS 2
#define BUCKETS_MIN 64
#define BUCKETS_MAX (ENG_COPY_BYTES_MAX / WAYS / sizeof(uint32_t))

typedef struct grams {
    uint32_t *slots; /* [buckets, WAYS] where a run ends, the newest first; 0: free */
    uint32_t mask;
} grams;

struct eng_copy {
    const int32_t *prompt, *prediction, *output;
    uint32_t prompt_count, prediction_count;
    grams seen, predicted;
    uint32_t indexed; /* runs of known tokens that end at or before it are in `seen` */
    /* The prediction's next token and what of the output it goes on from: the beginning at first,
     * then wherever a look-up found the place again. A text that repeats itself has many equal
     * runs; what has been right so far is the right one. */
    uint32_t next, followed, matched;
};

static bool grams_init(grams *g, uint32_t tokens)
{
    size_t buckets = BUCKETS_MIN;
    while (buckets < tokens && buckets < BUCKETS_MAX)
        buckets *= 2;
    g->mask = (uint32_t)buckets - 1;
    g->slots = calloc(buckets * WAYS, sizeof *g->slots);
    return g->slots != NULL;
}

static uint32_t *bucket_of(const grams *g, const int32_t *gram)
{
    uint64_t hash = 0;
    for (uint32_t i = 0; i < ENG_COPY_GRAM; i++)
        hash = (hash ^ (uint32_t)gram[i]) * 0x9e3779b97f4a7c15u;
    return g->slots + (size_t)(hash >> 40 & g->mask) * WAYS;
}

static void insert(grams *g, const int32_t *gram, uint32_t end)
{
    uint32_t *bucket = bucket_of(g, gram);
    bucket[1] = bucket[0];
    bucket[0] = end;
}

static int32_t known(const eng_copy *copy, uint32_t at)
{
    return at < copy->prompt_count ? copy->prompt[at] : copy->output[at - copy->prompt_count];
}

static void index_known(eng_copy *copy, uint32_t end)
{
    int32_t gram[ENG_COPY_GRAM];
    uint32_t at = (uint32_t)base_max(copy->indexed + 1, ENG_COPY_GRAM);
    for (; at <= end; at++) {
        for (uint32_t i = 0; i < ENG_COPY_GRAM; i++)
            gram[i] = known(copy, at - ENG_COPY_GRAM + i);
        insert(&copy->seen, gram, at);
        copy->indexed = at;
    }
}

eng_copy *eng_copy_create(const int32_t *prompt, uint32_t prompt_count, const int32_t *prediction,
                          uint32_t prediction_count, const int32_t *output, uint32_t output_max)
{
    eng_copy *copy = calloc(1, sizeof *copy);
    if (copy == NULL)
        return NULL;
    copy->prompt = prompt;
    copy->prompt_count = prompt_count;
    copy->prediction = prediction;
    copy->prediction_count = prediction_count;
    copy->output = output;
    size_t tokens = base_min((size_t)prompt_count + output_max, UINT32_MAX);
    if (!grams_init(&copy->seen, (uint32_t)tokens) ||
        (prediction_count > 0 && !grams_init(&copy->predicted, prediction_count))) {
        eng_copy_destroy(copy);
        return NULL;
    }
    /* The last run has no token behind it yet. */
    index_known(copy, prompt_count - 1);
    for (uint32_t end = ENG_COPY_GRAM; end < prediction_count; end++)
        insert(&copy->predicted, prediction + end - ENG_COPY_GRAM, end);
    return copy;
}

void eng_copy_destroy(eng_copy *copy)
{
    if (copy == NULL)
        return;
    free(copy->seen.slots);
    free(copy->predicted.slots);
    free(copy);
}

/* Tokens before `end` in the prediction, or among the known ones, that equal those before `now`. */
static uint32_t match_length(const eng_copy *copy, bool predicted, uint32_t end, uint32_t now)
{
    uint32_t n = 0, most = (uint32_t)base_min(base_min(end, now), ENG_COPY_MATCH_MAX);
    while (n < most && (predicted ? copy->prediction[end - 1 - n] : known(copy, end - 1 - n)) ==
                           known(copy, now - 1 - n))
        n++;
    return n;
}

/* The best of a bucket: the longest match, the newest of equals. */
static uint32_t look_up(const eng_copy *copy, bool predicted, uint32_t now, uint32_t *match)
{
    int32_t gram[ENG_COPY_GRAM];
    uint32_t best = 0;
    for (uint32_t i = 0; i < ENG_COPY_GRAM; i++)
        gram[i] = known(copy, now - ENG_COPY_GRAM + i);
    const uint32_t *bucket = bucket_of(predicted ? &copy->predicted : &copy->seen, gram);
    *match = ENG_COPY_GRAM - 1;
    for (uint32_t i = 0; i < WAYS; i++) {
        uint32_t n = bucket[i] > 0 ? match_length(copy, predicted, bucket[i], now) : 0;
        if (n > *match) {
            *match = n;
            best = bucket[i];
        }
    }
    return best;
}

/* Goes along the prediction as far as the output does; true if that is to its end. */
static bool follow(eng_copy *copy, uint32_t output_count)
{
    while (copy->followed < output_count && copy->next < copy->prediction_count &&
           copy->output[copy->followed] == copy->prediction[copy->next]) {
        copy->followed++;
        copy->next++;
        copy->matched++;
    }
    return copy->followed == output_count && copy->next < copy->prediction_count;
}

/* Where the prediction goes on; 0 with `match` 0: nowhere. */
static uint32_t predict(eng_copy *copy, uint32_t output_count, uint32_t *match)
{
    uint32_t now = copy->prompt_count + output_count, at;
    *match = 0;
    if (copy->prediction_count == 0)
        return 0;
    if (!follow(copy, output_count)) {
        if (now < ENG_COPY_GRAM || (at = look_up(copy, true, now, match)) == 0) {
            *match = 0;
            return 0;
        }
        copy->next = at;
        copy->followed = output_count;
        copy->matched = *match;
    }
    *match = (uint32_t)base_min(base_max(copy->matched, ENG_COPY_GRAM), ENG_COPY_MATCH_MAX);
    return copy->next;
}

eng_copy_draft eng_copy_propose(eng_copy *copy, uint32_t output_count, int32_t *tokens,
                                uint32_t max)
{
    uint32_t now = copy->prompt_count + output_count, match = 0, predicted = 0;
    eng_copy_draft draft = {0};
    index_known(copy, now - 1);
    uint32_t from = now >= ENG_COPY_GRAM ? look_up(copy, false, now, &match) : 0;
    uint32_t at = predict(copy, output_count, &predicted);
    if (predicted > 0 && (from == 0 || predicted >= match)) {
        draft.predicted = true;
        draft.match = predicted;
        draft.count = (uint32_t)base_min(max, copy->prediction_count - at);
        for (uint32_t i = 0; i < draft.count; i++)
            tokens[i] = copy->prediction[at + i];
        return draft;
    }
    if (from == 0)
        return draft;
    draft.match = match;
    /* Past the newest token a text that repeats itself goes on with its own draft. */
    draft.count = max;
    for (uint32_t i = 0; i < max; i++)
        tokens[i] = from + i < now ? known(copy, from + i) : tokens[from + i - now];
    return draft;
}
