#include "engine/speculate.h"

#include <math.h>

#include "engine/base/num.h"

#define GAIN_MIN 1.02      /* below it the draft pass is not worth its noise */
#define PROBE_EVERY 100    /* rounds at least between two probes */
#define PROBE_SHARE 0.005  /* of the time of rounds, for what probes are expected to lose */
#define PRIOR 4.0f         /* observations that a first guess counts for */
#define RATE_MIN 0.01f     /* weight of the newest outcome, once there are many */
#define HISTORY_RATE 0.08f /* of the newest round */
#define HISTORY_PROBE 0.5f /* of one that was run to find out */
#define HISTORY_ALL 0.03f  /* the same for all sequences together */

void eng_spec_init(eng_spec *spec, uint32_t fixed)
{
    /* A confidence is what it says, a copy is right the more often the longer its match is. */
    static const float COPIES[ENG_SPEC_BINS] = {0,     0,     0,     0.5f,  0.6f,  0.65f,
                                                0.7f,  0.75f, 0.8f,  0.85f, 0.88f, 0.9f,
                                                0.92f, 0.93f, 0.94f, 0.95f};
    *spec = (eng_spec){.fixed = fixed};
    for (int sampled = 0; sampled < 2; sampled++)
        for (uint32_t bin = 0; bin < ENG_SPEC_BINS; bin++) {
            float(*accept)[ENG_SPEC_BINS] = spec->learned.accept[sampled];
            accept[ENG_SPEC_BLOCK][bin] = ((float)bin + 0.5f) / ENG_SPEC_BINS;
            accept[ENG_SPEC_COPY][bin] = COPIES[bin];
            accept[ENG_SPEC_PREDICTION][bin] = fmaxf(COPIES[bin], 0.8f);
        }
}

bool eng_spec_check(const eng_spec_learned *learned)
{
    bool good = eng_cost_check(&learned->verify) && eng_cost_check(&learned->prefill) &&
                eng_cost_check(&learned->draft);
    for (int sampled = 0; sampled < 2; sampled++) {
        const eng_spec_history *history = &learned->history[sampled];
        good = good && history->tokens >= 0 && history->tokens <= ENG_SPEC_BLOCK_MAX + 1 &&
               history->rows >= 0 && history->rows <= ENG_SPEC_BLOCK_MAX;
        for (uint32_t i = 0; i < ENG_SPEC_KINDS * ENG_SPEC_BINS; i++) {
            float accept = learned->accept[sampled][i / ENG_SPEC_BINS][i % ENG_SPEC_BINS];
            float seen = learned->seen[sampled][i / ENG_SPEC_BINS][i % ENG_SPEC_BINS];
            good = good && accept >= 0 && accept <= 1 && seen >= 0 && seen <= 1e6f;
        }
    }
    return good;
}

uint32_t eng_spec_bin_confidence(float confidence)
{
    if (!(confidence > 0))
        return 0;
    return (uint32_t)fminf(confidence * ENG_SPEC_BINS, ENG_SPEC_BINS - 1);
}

/* Each length up to 8, then wider ones. */
uint32_t eng_spec_bin_match(uint32_t match)
{
    if (match <= 8)
        return match;
    return (uint32_t)base_min(8 + (match - 8 + 3) / 4, ENG_SPEC_BINS - 1);
}

void eng_spec_fill(const eng_spec *spec, eng_spec_offer *offer)
{
    for (uint32_t i = 0; i < offer->count; i++)
        offer->accept[i] = spec->learned.accept[offer->sampled][offer->kind][offer->bin[i]];
}

static void reset(eng_spec_offer *offers, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        offers[i].length = 0;
        offers[i].product = offers[i].tokens = 1;
    }
}

/* Takes the likeliest next token of all offers; returns its chance, 0 if none is left. Products
 * only fall along an offer, so what was left out is never likelier than what was taken. */
static double take_next(eng_spec_offer *offers, uint32_t count)
{
    float top = 0;
    uint32_t pick = 0;
    for (uint32_t i = 0; i < count; i++) {
        const eng_spec_offer *offer = &offers[i];
        float product =
            offer->length < offer->count ? offer->product * offer->accept[offer->length] : 0;
        if (product > top) {
            top = product;
            pick = i;
        }
    }
    if (top <= 0)
        return 0;
    offers[pick].length++;
    offers[pick].product = top;
    offers[pick].tokens += top;
    return (double)top;
}

double eng_spec_choose(const eng_spec *spec, eng_spec_offer *offers, uint32_t count,
                       uint32_t context, double extra_ns, uint32_t rows_max)
{
    const eng_cost *cost = &spec->learned.verify;
    double plain = eng_cost_of(cost, count, context), tokens = count, chance;
    uint32_t best_taken = 0;
    reset(offers, count);
    if (plain <= 0)
        return 0;
    double best = tokens / (plain + extra_ns);
    for (uint32_t taken = 1; taken <= rows_max; taken++) {
        if ((chance = take_next(offers, count)) <= 0)
            break;
        tokens += chance;
        double rate = tokens / (eng_cost_hope(cost, count + taken, context) + extra_ns);
        if (rate > best) {
            best = rate;
            best_taken = taken;
        }
    }
    reset(offers, count);
    for (uint32_t taken = 0; taken < best_taken; taken++)
        take_next(offers, count);
    return best;
}

/* Of a number of rows that is an average. */
static double cost_between(const eng_cost *cost, double rows, uint32_t context)
{
    double below = eng_cost_of(cost, (uint32_t)rows, context);
    double above = eng_cost_of(cost, (uint32_t)rows + 1, context);
    return below + (rows - floor(rows)) * (above - below);
}

/* Whether the other way is tried in this round. What it loses is how much longer it takes for its
 * tokens than the better way would; a probe waits until the rounds since have earned that, so that
 * all probes together lose at most PROBE_SHARE of the time (as far as what was learned is right),
 * and the more a probe costs the rarer it is. */
static bool probe_due(eng_spec *spec, bool drafts, double tokens, double round_ns, uint32_t count,
                      double rate)
{
    double plain_ns = count / rate; /* with as many copies as pay, for one token of each */
    double loss = drafts ? plain_ns - count * round_ns / tokens : round_ns - tokens / rate;
    spec->earned_ns += PROBE_SHARE * (drafts ? round_ns : plain_ns);
    if (spec->rounds < spec->probed + PROBE_EVERY || spec->earned_ns < loss)
        return false;
    spec->probed = spec->rounds;
    spec->earned_ns = 0;
    return true;
}

bool eng_spec_worthwhile(eng_spec *spec, const eng_spec_history *const *histories, uint32_t count,
                         uint32_t context, double rate)
{
    const eng_spec_learned *learned = &spec->learned;
    double tokens = 0, rows = count, draft = eng_cost_of(&learned->draft, count, context);
    spec->rounds++;
    spec->probe = false;
    if (rate <= 0) /* a pass without drafts comes first: what all else is compared with */
        return false;
    for (uint32_t i = 0; i < count; i++) {
        if (histories[i]->tokens <= 0)
            return true; /* to find out */
        tokens += (double)histories[i]->tokens;
        rows += (double)histories[i]->rows;
    }
    if (draft <= 0)
        return true;
    double round_ns = cost_between(&learned->verify, rows, context) + draft;
    bool drafts = tokens >= GAIN_MIN * rate * round_ns;
    spec->probe = probe_due(spec, drafts, tokens, round_ns, count, rate);
    return drafts != spec->probe;
}

void eng_spec_observe_step(eng_spec *spec, uint32_t rows, bool prefill, uint32_t context,
                           uint64_t ns)
{
    eng_cost_observe(prefill ? &spec->learned.prefill : &spec->learned.verify, rows, context, ns);
}

void eng_spec_observe_draft(eng_spec *spec, uint32_t sequences, uint32_t context, uint64_t ns)
{
    eng_cost_observe(&spec->learned.draft, sequences, context, ns);
}

static void average(eng_spec_history *history, const eng_spec_offer *offer, float rate)
{
    if (history->tokens <= 0)
        rate = 1;
    history->tokens += rate * (offer->tokens - history->tokens);
    history->rows += rate * ((float)offer->length - history->rows);
}

void eng_spec_observe_offer(eng_spec *spec, eng_spec_history *history, const eng_spec_offer *offer)
{
    average(history, offer, spec->probe ? HISTORY_PROBE : HISTORY_RATE);
    average(&spec->learned.history[offer->sampled], offer, HISTORY_ALL);
}

void eng_spec_observe_round(eng_spec *spec, const eng_spec_offer *offer, uint32_t judged,
                            uint32_t accepted)
{
    for (uint32_t i = 0; i < judged; i++) {
        float *accept = &spec->learned.accept[offer->sampled][offer->kind][offer->bin[i]];
        float *seen = &spec->learned.seen[offer->sampled][offer->kind][offer->bin[i]];
        *seen = fminf(*seen + 1, 1e6f);
        *accept += fmaxf(1 / (*seen + PRIOR), RATE_MIN) * ((i < accepted ? 1.0f : 0.0f) - *accept);
    }
}
