/* replay_gen: agent sessions like those of the published traces, from a seed.
 *
 * Lengths and gaps are log-normal with the medians and tails that the options hold; a session
 * begins with the tools and system prompt of its group, grows by the answer and the tool's result,
 * now and then forks a sub-agent from where it stands, and now and then has its history compacted
 * (the prompt's suffix rewritten). Every token is known, so the answers' are too. Thread: one. */
#pragma once
#include "tools/replay_trace.h"

typedef struct rp_gen_options {
    uint64_t seed;
    uint32_t sessions;
    uint32_t groups; /* that share tools and system prompt */
    double turns_median, turns_sigma;
    uint32_t turns_max;
    double start_tokens;                /* tools and system prompt, median over groups */
    double result_median, result_sigma; /* tokens that a tool's result adds */
    uint32_t result_max;
    double output_median, output_sigma;
    double gap_median_s, gap_p99_s;
    double fork_share;     /* of turns that start a sub-agent */
    double compact_share;  /* of turns before which history is rewritten */
    double arrivals_per_s; /* Poisson */
    uint32_t context_max;  /* longer history is compacted at once */
} rp_gen_options;

#define RP_GEN_DEFAULT                                                                             \
    {                                                                                              \
        .seed = 1, .sessions = 64, .groups = 4, .turns_median = 33, .turns_sigma = 0.63,           \
        .turns_max = 200, .start_tokens = 12000, .result_median = 1500, .result_sigma = 0.95,      \
        .result_max = 20000, .output_median = 500, .output_sigma = 0.5, .gap_median_s = 5.2,       \
        .gap_p99_s = 81, .fork_share = 0.08, .compact_share = 0.03, .arrivals_per_s = 0.02,        \
        .context_max = 200000                                                                      \
    }

base_code rp_generate(rp_trace *trace, const rp_gen_options *options, base_err *err);

/* What a trace turned out to be. Sub-agents' requests count as requests, not as turns. */
typedef struct rp_stats {
    size_t sessions, requests, forks, compactions;
    double turns_median, start_median, appended_median, appended_p90, output_median, gap_median_s,
        gap_p99_s;
    double input_tokens, output_tokens, ratio; /* in:out */
    double in_median, in_p90;
} rp_stats;
base_code rp_trace_stats(rp_stats *stats, const rp_trace *trace, base_err *err);
