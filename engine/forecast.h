/* eng_forecast: how long work will take, learned from the steps that run. Pure.
 *
 * Two tables of whole steps (engine/cost.h), sampling and drafts included: steps in which sequences
 * only decode, by how many do, and steps with prefill rows, by those and the sequences beside them.
 * The tables keep the shape; one level beside them, of all steps, follows a machine that became
 * slower or faster within a few steps, and goes back to 1 as the tables learn. How much a request
 * will say is not known before it has said it: learned by its max_tokens, to a power of two.
 *
 * Machine time is what a request takes of the device: its prefill, and of each step that it decodes
 * in its share among those that decode with it. Times are in nanoseconds of doubles; 0 before any
 * step was seen. */
#pragma once
#include "engine/cost.h"

#define ENG_FORECAST_LENGTHS 25 /* powers of two of max_tokens */

typedef struct eng_forecast {
    eng_cost decode, mixed;
    float level;    /* by which the next step is slower than the tables say */
    float per_step; /* output tokens that a step gives a sequence */
    /* Mean output of the requests that ended by themselves, by max_tokens; and how many did. */
    float output[ENG_FORECAST_LENGTHS], seen[ENG_FORECAST_LENGTHS];
} eng_forecast;

/* What an earlier run has learned of passes that only decode, and of those with prefill rows: a
 * beginning. Tables without an observation are none. */
void eng_forecast_init(eng_forecast *forecast, const eng_cost *decode, const eng_cost *prefill);

/* A step in which `sequences` decoded and `prefill` rows of others ran took `ns`. `context`: the
 * furthest position. */
void eng_forecast_observe_step(eng_forecast *forecast, uint32_t sequences, uint32_t prefill,
                               uint32_t context, uint64_t ns);
/* Such a step gave its sequences so many tokens together. */
void eng_forecast_observe_tokens(eng_forecast *forecast, uint32_t sequences, uint32_t tokens);
/* A request ended by itself, not because it was cancelled or failed. */
void eng_forecast_observe_end(eng_forecast *forecast, uint32_t max_tokens, uint32_t output);

double eng_forecast_step(const eng_forecast *forecast, uint32_t sequences, uint32_t prefill,
                         uint32_t context);
/* The most prefill rows, at most `rows_max`, beside which such a step takes at most `ns`; rows_max
 * before anything is known. */
uint32_t eng_forecast_rows(const eng_forecast *forecast, uint32_t sequences, double ns,
                           uint32_t context, uint32_t rows_max);
/* Prompt tokens behind `cached` ones, in steps of `chunk` rows: what they add to the steps of
 * `sequences` that decode. */
double eng_forecast_prefill(const eng_forecast *forecast, uint32_t cached, uint32_t tokens,
                            uint32_t chunk, uint32_t sequences);
/* Until one of `sequences` sequences, which decode together, has `tokens` more. */
double eng_forecast_decode(const eng_forecast *forecast, uint32_t sequences, uint32_t tokens,
                           uint32_t context);
/* How many tokens a request will have made at its end: at least 1, at most max_tokens. */
uint32_t eng_forecast_output(const eng_forecast *forecast, uint32_t max_tokens);
