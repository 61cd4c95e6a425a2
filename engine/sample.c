/* The sampler: one pass for greedy requests, and no sorting for the others.
 *
 * What a request asks for beyond temperature is applied on a copy of the logits. Filters work on a
 * list of candidates (value = logit / temperature, id) in the order "value high, id low", which is
 * total, so that every result is unique:
 * - min_p: value >= max + log(min_p), the same as probability >= min_p * largest probability
 * - top_k: the k first
 * - top_p: the shortest prefix whose probability, renormalised over what is left, reaches top_p
 *
 * A prefix by count or by mass is found by partitioning (quickselect), O(candidates) on average;
 * pivots come from a fixed generator, so that no shape of logits makes it quadratic. A small k is
 * found by insertion while scanning.
 *
 * The draw takes the largest of value + noise. Noise costs two logarithms; most tokens are ruled
 * out by an upper bound that needs none: -log(-log u) <= -log(1 - u) <= ln 2 * (leading ones of the
 * random word + 1). */
#include "engine/sample.h"
#include "engine/sample_internal.h"

#include <math.h>
#include <string.h>

#include "engine/base/rand.h"
#include "engine/base/thread.h"

/* What OpenAI's API shows for a token of probability 0; JSON has no -infinity. */
#define PROBABILITY_ZERO_LOG (-9999.0f)
#define LN2 0.6931471805599453
#define FEW 128 /* a top_k up to here is found by insertion */

typedef struct candidate {
    float value;
    int32_t id;
} candidate;

static uint64_t stream_of(uint64_t output_index, uint32_t choice)
{
    return output_index << 8 | choice;
}

static double noise_of(uint32_t word)
{
    return -log(-log(base_rand_unit(word)));
}

double eng_sample__noise(uint64_t seed, uint64_t output_index, uint32_t choice, uint32_t v)
{
    return noise_of(base_rand(seed, stream_of(output_index, choice), v / 4).v[v % 4]);
}

int32_t eng_sample__greedy(const float *logits, uint32_t vocab)
{
    int32_t best_id = -1;
    float best = -INFINITY;
    for (uint32_t v = 0; v < vocab; v++)
        if (logits[v] > best) {
            best = logits[v];
            best_id = (int32_t)v;
        }
    if (best_id >= 0)
        return best_id;
    /* Nothing but -infinity and NaN: a broken model or everything banned. Any answer is wrong; do
     * not make it a banned one. */
    for (uint32_t v = 0; v < vocab; v++)
        if (isnan(logits[v]))
            return (int32_t)v;
    return 0;
}

typedef struct draw_best {
    double score;
    int32_t id;
} draw_best;

static bool above(double score, int32_t id, const draw_best *best)
{
    return score > best->score || (score == best->score && id < best->id);
}

static void consider(draw_best *best, float value, int32_t id, uint32_t word)
{
    uint32_t ones = word == UINT32_MAX ? 32 : (uint32_t)__builtin_clz(~word);
    /* Rounding is monotonic, so the computed bound is never below the computed score. NaN falls out
     * here. */
    if (!((double)value + LN2 * (ones + 1) >= best->score))
        return;
    double score = (double)value + noise_of(word);
    if (above(score, id, best))
        *best = (draw_best){score, id};
}

int32_t eng_sample__draw(const float *logits, uint32_t vocab, float temperature, uint64_t seed,
                         uint64_t output_index, uint32_t choice)
{
    int32_t top = eng_sample__greedy(logits, vocab);
    uint64_t stream = stream_of(output_index, choice);
    float top_value = logits[top] / temperature;
    /* The likeliest token first: it makes the bound bite from the start. */
    draw_best best = {
        (double)top_value + eng_sample__noise(seed, output_index, choice, (uint32_t)top), top};
    if (!isfinite(best.score))
        return top;
    for (uint32_t v = 0; v < vocab; v += 4) {
        base_rand4 r = base_rand(seed, stream, v / 4);
        for (uint32_t j = 0; j < 4 && v + j < vocab; j++)
            consider(&best, logits[v + j] / temperature, (int32_t)(v + j), r.v[j]);
    }
    return best.id;
}

/* ---- filters ---- */

static bool before(candidate a, candidate b)
{
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

static double weight_of(candidate c, float max, bool by_mass)
{
    return by_mass ? exp((double)c.value - (double)max) : 1;
}

/* Moves the shortest prefix of the order whose weight reaches `target` to the front; returns its
 * length (at least 1). */
static uint32_t take_prefix(candidate *c, uint32_t count, double target, float max, bool by_mass)
{
    uint32_t lo = 0, hi = count; /* the end of the prefix lies in (lo, hi] */
    uint32_t random = 2463534242u;
    while (hi - lo > 1) {
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        candidate pivot = c[lo + random % (hi - lo)];
        /* [lo, i) stand before or are the pivot; Lomuto with the weight of the front part summed on
         * the way. */
        uint32_t i = lo;
        double front = 0;
        uint32_t pivot_at = lo;
        for (uint32_t j = lo; j < hi; j++) {
            if (before(pivot, c[j]))
                continue;
            candidate moved = c[j];
            c[j] = c[i];
            c[i] = moved;
            if (moved.id == pivot.id)
                pivot_at = i;
            else
                front += weight_of(moved, max, by_mass);
            i++;
        }
        c[pivot_at] = c[i - 1];
        c[i - 1] = pivot;
        if (front >= target && i - 1 > lo) {
            hi = i - 1; /* reached without the pivot */
            continue;
        }
        front += weight_of(pivot, max, by_mass);
        if (front >= target)
            return i;
        if (i == hi)
            return hi; /* rounding: the whole mass falls short of the target by an ulp */
        target -= front;
        lo = i;
    }
    return hi;
}

/* The k first, by insertion into a sorted list: k is small, and after a while hardly any token
 * still gets in. */
static uint32_t take_first(candidate *out, const float *logits, uint32_t vocab, float temperature,
                           float floor, uint32_t k)
{
    uint32_t count = 0;
    for (uint32_t v = 0; v < vocab; v++) {
        candidate c = {logits[v] / temperature, (int32_t)v};
        /* Ids ascend, so one that only equals the last stands behind it. NaN and banned tokens fail
         * both tests. */
        if (!(c.value >= floor && c.value > -INFINITY) ||
            (count == k && !(c.value > out[k - 1].value)))
            continue;
        uint32_t at = count < k ? count++ : k - 1;
        for (; at > 0 && before(c, out[at - 1]); at--)
            out[at] = out[at - 1];
        out[at] = c;
    }
    return count;
}

static uint32_t take_all(candidate *out, const float *logits, uint32_t vocab, float temperature,
                         float floor)
{
    uint32_t count = 0;
    for (uint32_t v = 0; v < vocab; v++) {
        float value = logits[v] / temperature;
        if (value >= floor && value > -INFINITY)
            out[count++] = (candidate){value, (int32_t)v};
    }
    return count;
}

/* Tokens of at most (1 - top_p) / count of the mass make up at most 1 - top_p together, so the
 * prefix ends before them; what a trained model leaves is short. */
static uint32_t take_mass(candidate *c, uint32_t count, float max, float top_p)
{
    double total = 0;
    uint32_t left = 0;
    for (uint32_t i = 0; i < count; i++)
        total += weight_of(c[i], max, true);
    double least = (1 - (double)top_p) * total / count * 0.999; /* 0.999: above any rounding */
    double floor = (double)max + log(least);
    for (uint32_t i = 0; i < count; i++)
        if ((double)c[i].value >= floor)
            c[left++] = c[i];
    return take_prefix(c, left, total * (double)top_p, max, true);
}

static int32_t filtered_draw(const eng_sampler_input *in, const float *logits, candidate *c)
{
    const eng_sampling *s = in->sampling;
    int32_t top = eng_sample__greedy(logits, in->vocab);
    float max = logits[top] / s->temperature;
    if (!isfinite(max)) /* leaves nothing to weigh */
        return top;
    float floor = s->min_p > 0 ? max + logf(s->min_p) : -INFINITY;
    uint32_t count;
    if (s->top_k > 0 && s->top_k <= FEW) {
        count = take_first(c, logits, in->vocab, s->temperature, floor, s->top_k);
    } else {
        count = take_all(c, logits, in->vocab, s->temperature, floor);
        if (s->top_k > 0 && s->top_k < count)
            count = take_prefix(c, count, s->top_k, max, false);
    }
    if (s->top_p < 1)
        count = take_mass(c, count, max, s->top_p);
    draw_best best = {-INFINITY, top};
    for (uint32_t i = 0; i < count; i++) {
        uint32_t v = (uint32_t)c[i].id;
        base_rand4 r = base_rand(s->seed, stream_of(in->output_index, in->choice), v / 4);
        consider(&best, c[i].value, c[i].id, r.v[v % 4]);
    }
    return best.id;
}

/* ---- bias, bans, penalties ---- */

static void ban(float *logits, uint32_t vocab, int32_t token)
{
    if (token >= 0 && (uint32_t)token < vocab)
        logits[token] = -INFINITY;
}

static bool allowed(const uint32_t *mask, uint32_t v)
{
    return mask[v / 32] >> v % 32 & 1;
}

void eng_sample__mask(float *logits, uint32_t vocab, const uint32_t *mask)
{
    for (uint32_t v = 0; v < vocab; v++)
        if (!allowed(mask, v))
            logits[v] = -INFINITY;
}

static bool has_penalty(const eng_sampling *s)
{
    return s->repetition_penalty != 1 || s->presence_penalty != 0 || s->frequency_penalty != 0;
}

static void penalise(float *logits, const eng_sampler_input *in)
{
    const eng_sampling *s = in->sampling;
    const uint16_t *output = in->counts->output;
    const uint8_t *prompt = in->counts->prompt;
    for (uint32_t v = 0; v < in->vocab; v++) {
        uint16_t n = output != NULL ? output[v] : 0;
        if (s->repetition_penalty != 1 && (n > 0 || (prompt != NULL && prompt[v])))
            logits[v] = logits[v] > 0 ? logits[v] / s->repetition_penalty
                                      : logits[v] * s->repetition_penalty;
        if (n > 0)
            logits[v] -= s->presence_penalty + s->frequency_penalty * (float)n;
    }
}

/* The logits the choice is made from: the caller's, or an adjusted copy. */
static const float *adjust(const eng_sampler_input *in, float *copy)
{
    const eng_sampling *s = in->sampling;
    bool min_tokens = in->output_index < s->min_tokens;
    bool bans_ends = (min_tokens || s->ignore_eos) && in->end_token_count > 0;
    bool bans_stops = min_tokens && s->stop_token_count > 0;
    bool penalties = in->counts != NULL && has_penalty(s);
    if (s->bias_count == 0 && in->ban < 0 && !bans_ends && !bans_stops && !penalties &&
        in->mask == NULL)
        return in->logits;
    memcpy(copy, in->logits, in->vocab * sizeof *copy);
    for (uint32_t i = 0; i < s->bias_count; i++) {
        int32_t token = s->bias[i].token;
        if (token < 0 || (uint32_t)token >= in->vocab)
            continue;
        if (s->bias[i].value <= -100)
            copy[token] = -INFINITY;
        else
            copy[token] += s->bias[i].value;
    }
    for (uint32_t i = 0; bans_ends && i < in->end_token_count; i++)
        ban(copy, in->vocab, in->end_tokens[i]);
    /* A stop token ends the output like an end token, so it has to wait for min_tokens too. */
    for (uint32_t i = 0; bans_stops && i < s->stop_token_count; i++)
        ban(copy, in->vocab, s->stop_tokens[i]);
    ban(copy, in->vocab, in->ban);
    if (penalties)
        penalise(copy, in);
    if (in->mask != NULL)
        eng_sample__mask(copy, in->vocab, in->mask);
    return copy;
}

/* Everything that the mask allows is banned, or the logits are broken: the likeliest of what it
 * allows. */
static int32_t masked_greedy(const eng_sampler_input *in)
{
    int32_t best = -1;
    for (uint32_t v = 0; v < in->vocab; v++)
        if (allowed(in->mask, v) && (best < 0 || in->logits[v] > in->logits[best]))
            best = (int32_t)v;
    return best < 0 ? 0 : best;
}

/* ---- logprobs ---- */

static float shown(double logprob)
{
    return logprob >= (double)PROBABILITY_ZERO_LOG ? (float)logprob : PROBABILITY_ZERO_LOG;
}

void eng_sample_logprob(eng_logprob *out, const float *logits, uint32_t vocab, int32_t token,
                        uint32_t top)
{
    uint32_t want = top < ENG_TOP_LOGPROBS_MAX ? top : ENG_TOP_LOGPROBS_MAX;
    double max = (double)logits[eng_sample__greedy(logits, vocab)];
    double sum = 0;
    uint32_t count = 0;
    *out = (eng_logprob){.token = token};
    for (uint32_t v = 0; v < vocab; v++) {
        float l = logits[v];
        if (isnan(l))
            continue;
        sum += exp((double)l - max);
        if (want == 0 || (count == want && !(l > out->top_logprob[count - 1])))
            continue;
        uint32_t at = count < want ? count++ : count - 1;
        for (; at > 0 && l > out->top_logprob[at - 1]; at--) {
            out->top_token[at] = out->top_token[at - 1];
            out->top_logprob[at] = out->top_logprob[at - 1];
        }
        out->top_token[at] = (int32_t)v;
        out->top_logprob[at] = l;
    }
    double norm = max + log(sum);
    out->top_count = count;
    for (uint32_t i = 0; i < count; i++)
        out->top_logprob[i] = shown((double)out->top_logprob[i] - norm);
    out->logprob = shown((double)logits[token] - norm);
}

/* ---- the header's functions ---- */

size_t eng_sample_scratch(uint32_t vocab)
{
    return (size_t)vocab * (sizeof(float) + sizeof(candidate)) + sizeof(candidate);
}

int32_t eng_sample(const eng_sampler_input *input, eng_logprob *logprob, void *scratch)
{
    const eng_sampling *s = input->sampling;
    candidate *candidates = scratch;
    const float *logits = adjust(input, (float *)(candidates + input->vocab));
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    DCHECK(input->vocab > 0);
    DCHECK(input->choice < 256);
    int32_t token;
    if (s->temperature < ENG_SAMPLE__TEMPERATURE_MIN)
        token = eng_sample__greedy(logits, input->vocab);
    else if (s->top_k == 0 && s->top_p >= 1 && s->min_p <= 0)
        token = eng_sample__draw(logits, input->vocab, s->temperature, s->seed, input->output_index,
                                 input->choice);
    else
        token = filtered_draw(input, logits, candidates);
    if (input->mask != NULL && !allowed(input->mask, (uint32_t)token))
        token = masked_greedy(input);
    if (logprob != NULL)
        eng_sample_logprob(logprob, logits, input->vocab, token, s->top_logprobs);
    return token;
}

static base_code check_range(const char *name, float value, float lo, float hi, base_err *err)
{
    if (value >= lo && value <= hi)
        return BASE_OK;
    return base_fail_param(err, BASE_INVALID, name, "%s %g is outside %g to %g", name,
                           (double)value, (double)lo, (double)hi);
}

base_code eng_sampling_check(const eng_sampling *sampling, uint32_t vocab, base_err *err)
{
    const eng_sampling *s = sampling;
    base_code code;
    if ((code = check_range("temperature", s->temperature, 0, 2, err)) != BASE_OK ||
        (code = check_range("top_p", s->top_p, 0, 1, err)) != BASE_OK ||
        (code = check_range("min_p", s->min_p, 0, 1, err)) != BASE_OK ||
        (code = check_range("presence_penalty", s->presence_penalty, -2, 2, err)) != BASE_OK ||
        (code = check_range("frequency_penalty", s->frequency_penalty, -2, 2, err)) != BASE_OK ||
        (code = check_range("repetition_penalty", s->repetition_penalty, 0.01f, 100, err)) !=
            BASE_OK)
        return code;
    if (s->top_logprobs > ENG_TOP_LOGPROBS_MAX)
        return base_fail_param(err, BASE_INVALID, "top_logprobs", "top_logprobs %u exceeds %d",
                               s->top_logprobs, ENG_TOP_LOGPROBS_MAX);
    for (uint32_t i = 0; i < s->bias_count; i++) {
        int32_t token = s->bias[i].token;
        if (token < 0 || (uint32_t)token >= vocab)
            return base_fail_param(err, BASE_INVALID, "logit_bias",
                                   "logit_bias names token %d, the vocabulary has %u", token,
                                   vocab);
        if ((code = check_range("logit_bias", s->bias[i].value, -100, 100, err)) != BASE_OK)
            return code;
    }
    for (uint32_t i = 0; i < s->stop_token_count; i++)
        if (s->stop_tokens[i] < 0 || (uint32_t)s->stop_tokens[i] >= vocab)
            return base_fail_param(err, BASE_INVALID, "stop_token_ids",
                                   "stop_token_ids names token %d, the vocabulary has %u",
                                   s->stop_tokens[i], vocab);
    return BASE_OK;
}
