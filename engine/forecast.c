#include "engine/forecast.h"

#include <math.h>

#include "engine/base/num.h"

#define LEVEL_RATE 0.1 /* of the newest step, in the logarithm */
#define LEVEL_STEP 3.0 /* a step counts as at most so many times what was expected */
#define LEVEL_MAX 16.0f
#define TOKENS_RATE 0.05f
#define OUTPUT_RATE 0.05f /* of the newest answer, once there are many */
#define OUTPUT_FIRST                                                                               \
    128 /* tokens of an answer, before any was seen; the median turn of agents is                  \
           a tool call of about so many */
#define BESIDE_LEAST                                                                               \
    0.25         /* of what rows take alone; the tables' difference is a difference of noise */
#define PIECES 8 /* of a prompt: a row costs more, the further back it looks */

void eng_forecast_init(eng_forecast *forecast, const eng_cost *decode, const eng_cost *prefill)
{
    *forecast = (eng_forecast){.decode = *decode, .mixed = *prefill, .level = 1, .per_step = 1};
}

void eng_forecast_observe_step(eng_forecast *forecast, uint32_t sequences, uint32_t prefill,
                               uint32_t context, uint64_t ns)
{
    eng_cost *table = prefill > 0 ? &forecast->mixed : &forecast->decode;
    double told = eng_cost_of(table, sequences + prefill, context);
    if (told > 0) {
        double ratio = (double)ns / (told * (double)forecast->level);
        ratio = fmin(fmax(ratio, 1 / LEVEL_STEP), LEVEL_STEP);
        forecast->level *= (float)pow(ratio, LEVEL_RATE);
        forecast->level = fminf(fmaxf(forecast->level, 1 / LEVEL_MAX), LEVEL_MAX);
    }
    eng_cost_observe(table, sequences + prefill, context, ns);
}

void eng_forecast_observe_tokens(eng_forecast *forecast, uint32_t sequences, uint32_t tokens)
{
    if (sequences == 0)
        return;
    float each = fmaxf((float)tokens / (float)sequences, 1);
    forecast->per_step += TOKENS_RATE * (each - forecast->per_step);
}

static uint32_t length_of(uint32_t max_tokens)
{
    uint32_t length = 0;
    while (length + 1 < ENG_FORECAST_LENGTHS && max_tokens >> (length + 1) > 0)
        length++;
    return length;
}

void eng_forecast_observe_end(eng_forecast *forecast, uint32_t max_tokens, uint32_t output)
{
    uint32_t length = length_of(max_tokens);
    float *mean = &forecast->output[length], *seen = &forecast->seen[length];
    *seen = fminf(*seen + 1, 1e6f);
    *mean += fmaxf(1 / *seen, OUTPUT_RATE) * ((float)output - *mean);
}

double eng_forecast_step(const eng_forecast *forecast, uint32_t sequences, uint32_t prefill,
                         uint32_t context)
{
    const eng_cost *table = prefill > 0 ? &forecast->mixed : &forecast->decode;
    const eng_cost *other = prefill > 0 ? &forecast->decode : &forecast->mixed;
    double ns = eng_cost_of(table, sequences + prefill, context);
    if (ns <= 0)
        ns = eng_cost_of(other, sequences + prefill, context);
    return ns * (double)forecast->level;
}

uint32_t eng_forecast_rows(const eng_forecast *forecast, uint32_t sequences, double ns,
                           uint32_t context, uint32_t rows_max)
{
    uint32_t rows = eng_cost_rows(&forecast->mixed, ns / (double)forecast->level, context,
                                  sequences + rows_max);
    return rows > sequences ? rows - sequences : 0;
}

double eng_forecast_prefill(const eng_forecast *forecast, uint32_t cached, uint32_t tokens,
                            uint32_t chunk, uint32_t sequences)
{
    double ns = 0;
    if (tokens == 0)
        return 0;
    /* As many steps as it takes, of even rows. */
    uint32_t steps = tokens / chunk + (tokens % chunk != 0), piece = tokens / PIECES + 1;
    uint32_t rows = tokens / steps + (tokens % steps != 0);
    for (uint32_t done = 0; done < tokens; done += piece) {
        uint32_t count = (uint32_t)base_min(piece, tokens - done), context = cached + done + count;
        double alone = eng_forecast_step(forecast, 0, rows, context), step = alone;
        if (sequences > 0)
            step = eng_forecast_step(forecast, sequences, rows, context) -
                   eng_forecast_step(forecast, sequences, 0, context);
        ns += fmax(step, BESIDE_LEAST * alone) * count / rows;
    }
    return ns;
}

double eng_forecast_decode(const eng_forecast *forecast, uint32_t sequences, uint32_t tokens,
                           uint32_t context)
{
    return eng_forecast_step(forecast, sequences, 0, context) * tokens / (double)forecast->per_step;
}

uint32_t eng_forecast_output(const eng_forecast *forecast, uint32_t max_tokens)
{
    uint32_t length = length_of(max_tokens), nearest = UINT32_MAX;
    for (uint32_t away = 0; away < ENG_FORECAST_LENGTHS && nearest == UINT32_MAX; away++) {
        if (length >= away && forecast->seen[length - away] > 0)
            nearest = length - away;
        else if (length + away < ENG_FORECAST_LENGTHS && forecast->seen[length + away] > 0)
            nearest = length + away;
    }
    float mean = nearest == UINT32_MAX ? OUTPUT_FIRST : forecast->output[nearest];
    /* Longer answers than were ever allowed: as many times longer. */
    if (nearest < length && mean > 0.9f * (float)(1u << nearest))
        mean *= (float)(1u << (length - nearest));
    return (uint32_t)base_max(1, base_min((uint32_t)lroundf(fminf(mean, 1e9f)), max_tokens));
}
