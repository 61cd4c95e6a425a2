#include "engine/speculate.h"

#include "engine/base/num.h"

#define FORGET 0.98   /* a step's weight after one more step; about the last 50 count */
#define AVERAGE 0.05  /* weight of the newest observation in the running means */
#define GAIN_MIN 1.02 /* below it the draft pass is not worth its noise */
#define PROBE_EVERY 100
#define OBSERVATIONS_MIN 8.0 /* weight of the fit before it is believed */

void eng_spec_init(eng_spec *spec, uint32_t fixed)
{
    *spec = (eng_spec){.fixed = fixed};
}

void eng_spec_observe_step(eng_spec *spec, uint32_t rows, uint64_t ns)
{
    double r = rows, t = (double)ns;
    spec->weight = spec->weight * FORGET + 1;
    spec->rows = spec->rows * FORGET + r;
    spec->rows2 = spec->rows2 * FORGET + r * r;
    spec->time = spec->time * FORGET + t;
    spec->rows_time = spec->rows_time * FORGET + r * t;
}

static void average(double *mean, double value)
{
    *mean = *mean == 0 ? value : *mean + AVERAGE * (value - *mean);
}

void eng_spec_observe_draft(eng_spec *spec, uint64_t ns)
{
    average(&spec->draft_ns, (double)ns);
}

void eng_spec_observe_round(eng_spec *spec, uint32_t drafted, uint32_t tokens)
{
    average(&spec->gain, tokens);
    average(&spec->verified, drafted);
}

/* The fitted time of a pass; a step never gets cheaper by a row, and costs something. */
static double cost(const eng_spec *spec, double rows)
{
    double spread = spec->weight * spec->rows2 - spec->rows * spec->rows;
    double slope = 0;
    if (spread > 1e-9 * spec->rows2 * spec->weight)
        slope = (spec->weight * spec->rows_time - spec->rows * spec->time) / spread;
    if (slope < 0)
        slope = 0;
    double base = (spec->time - slope * spec->rows) / spec->weight;
    double value = base + slope * rows;
    return value > 1 ? value : 1;
}

bool eng_spec_worthwhile(eng_spec *spec, uint32_t sequences)
{
    spec->rounds++;
    if (spec->fixed > 0 || spec->weight < OBSERVATIONS_MIN || spec->gain == 0 ||
        spec->rounds % PROBE_EVERY == 0)
        return true;
    double plain = 1 / cost(spec, sequences);
    double drafted = spec->gain / (cost(spec, sequences * (1 + spec->verified)) + spec->draft_ns);
    return drafted >= GAIN_MIN * plain;
}

void eng_spec_choose(const eng_spec *spec, uint32_t *lengths, const float *confidence,
                     uint32_t sequences, uint32_t block)
{
    if (spec->fixed > 0 || spec->weight < OBSERVATIONS_MIN) {
        for (uint32_t i = 0; i < sequences; i++)
            lengths[i] = (uint32_t)base_min(spec->fixed > 0 ? spec->fixed : block, block);
        return;
    }
    for (uint32_t i = 0; i < sequences; i++)
        lengths[i] = 0;
    double tokens = sequences, rows = sequences;
    double best = tokens / (cost(spec, rows) + spec->draft_ns);
    for (;;) {
        /* The candidate of each sequence is its next position; products only fall along a prefix.
         */
        double top = 0;
        uint32_t pick = 0;
        for (uint32_t i = 0; i < sequences; i++) {
            if (lengths[i] >= block)
                continue;
            double product = 1;
            for (uint32_t j = 0; j <= lengths[i]; j++)
                product *= (double)confidence[(size_t)i * block + j];
            if (product > top) {
                top = product;
                pick = i;
            }
        }
        if (top <= 0)
            return;
        double rate = (tokens + top) / (cost(spec, rows + 1) + spec->draft_ns);
        if (rate <= best)
            return;
        best = rate;
        tokens += top;
        rows++;
        lengths[pick]++;
    }
}
