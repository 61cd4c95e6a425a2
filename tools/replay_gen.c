#include "tools/replay_gen.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/rand.h"

/* The standard normal's 99th percentile. */
#define Z99 2.3263

typedef struct dice {
    uint64_t seed, stream, index;
} dice;

static double unit(dice *d)
{
    return base_rand_unit(base_rand(d->seed, d->stream, d->index++).v[0]);
}

static double normal(dice *d)
{
    double u = unit(d), v = unit(d);
    return sqrt(-2 * log(u)) * cos(2 * M_PI * v);
}

static double lognormal(dice *d, double median, double sigma)
{
    return median * exp(sigma * normal(d));
}

static uint32_t tokens(dice *d, double median, double sigma, uint32_t max)
{
    double v = lognormal(d, median, sigma);
    return v < 1 ? 1 : v > max ? max : (uint32_t)v;
}

/* One agent's prompt as it grows: runs of token numbers, block_tokens 1. */
#define RUNS_MAX 4096

typedef struct history {
    rp_run runs[RUNS_MAX];
    uint32_t count, tokens;
} history;

static void extend(history *h, uint64_t *next, uint32_t count)
{
    rp_run *last = h->count > 0 ? &h->runs[h->count - 1] : NULL;
    if (last != NULL && last->first + last->count == *next)
        last->count += count;
    else if (h->count < RUNS_MAX)
        h->runs[h->count++] = (rp_run){*next, count};
    else
        return;
    h->tokens += count;
    *next += count;
}

/* Cuts the history to its first `keep` tokens. */
static void cut(history *h, uint32_t keep)
{
    while (h->tokens > keep) {
        rp_run *last = &h->runs[h->count - 1];
        uint32_t over = h->tokens - keep, drop = over < last->count ? over : last->count;
        last->count -= drop;
        h->tokens -= drop;
        if (last->count == 0)
            h->count--;
    }
}

static base_code ask(rp_trace *trace, const history *h, double at, double took, uint32_t out,
                     uint16_t agent, bool tool, bool last, base_err *err)
{
    rp_request *request = rp_trace_add_request(trace, err);
    if (request == NULL)
        return BASE_NOMEM;
    *request = (rp_request){.at_s = at,
                            .took_s = took,
                            .in = h->tokens,
                            .out = out,
                            .run_at = trace->run_count,
                            .agent = agent,
                            .tool_result = tool,
                            .stop = last ? RP_STOP_END : RP_STOP_TOOL};
    for (uint32_t i = 0; i < h->count; i++)
        if (rp_trace_add_run(trace, h->runs[i].first, h->runs[i].count, err) != BASE_OK)
            return BASE_NOMEM;
    return BASE_OK;
}

/* An answer takes what 80 tokens a second take. */
#define TOKENS_PER_S 80.0

typedef struct player {
    const rp_gen_options *o;
    rp_trace *trace;
    dice d;
    uint64_t *next; /* token number that nobody has used */
    double gap_sigma;
    uint16_t agents;
} player;

/* Plays `turns` turns from `h` on; a sub-agent (agent > 0) neither forks nor compacts. Returns the
 * time at which it is done, negative if memory is used up. */
static double play(player *p, history *h, double at, uint32_t turns, uint32_t head, uint16_t agent,
                   base_err *err)
{
    const rp_gen_options *o = p->o;
    history *side = malloc(sizeof *side);
    if (side == NULL) {
        base_fail(err, BASE_NOMEM, "no memory for a session");
        return -1;
    }
    for (uint32_t i = 0; i < turns && at >= 0; i++) {
        if (agent == 0 && i > 0 && (unit(&p->d) < o->compact_share || h->tokens > o->context_max)) {
            /* The last half becomes a summary of a tenth of its length. */
            uint32_t body = h->tokens - head, kept = head + body / 2;
            cut(h, kept);
            extend(h, p->next, body / 20 + 1);
        }
        uint32_t out = tokens(&p->d, o->output_median, o->output_sigma, 16384);
        double took = out / TOKENS_PER_S;
        if (ask(p->trace, h, at, took, out, agent, i > 0, i + 1 == turns, err) != BASE_OK) {
            at = -1;
            break;
        }
        at += took;
        extend(h, p->next, out);
        if (agent == 0 && i + 1 < turns && unit(&p->d) < o->fork_share && p->agents < UINT16_MAX) {
            /* The parent waits for its sub-agent, which starts from the parent's context. */
            *side = *h;
            extend(side, p->next, tokens(&p->d, 300, 0.5, 4096));
            at = play(p, side, at, 2 + (uint32_t)(unit(&p->d) * 8), side->tokens, ++p->agents, err);
        } else {
            at += lognormal(&p->d, o->gap_median_s, p->gap_sigma);
        }
        extend(h, p->next, tokens(&p->d, o->result_median, o->result_sigma, o->result_max));
    }
    free(side);
    return at;
}

base_code rp_generate(rp_trace *trace, const rp_gen_options *o, base_err *err)
{
    uint64_t next = 1;
    uint32_t group_tokens[256];
    uint64_t group_first[256];
    if (o->groups == 0 || o->groups > 256 || o->sessions == 0 || o->sessions > 1000000)
        return base_fail(err, BASE_INVALID, "sessions %u or groups %u out of bounds", o->sessions,
                         o->groups);
    dice d = {.seed = o->seed, .stream = 0};
    for (uint32_t g = 0; g < o->groups; g++) {
        group_tokens[g] = tokens(&d, o->start_tokens, 0.1, RP_TOKENS_MAX / 8);
        group_first[g] = next;
        next += group_tokens[g];
        next++; /* neighbours never look like one run */
    }
    history *h = malloc(sizeof *h);
    if (h == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for a session");
    double arrival = 0;
    base_code code = BASE_OK;
    for (uint32_t s = 0; s < o->sessions && code == BASE_OK; s++) {
        char name[32];
        snprintf(name, sizeof name, "gen_%04u", s);
        player p = {.o = o,
                    .trace = trace,
                    .d = {.seed = o->seed, .stream = s + 1},
                    .next = &next,
                    .gap_sigma = log(o->gap_p99_s / o->gap_median_s) / Z99};
        rp_session *session = rp_trace_add_session(trace, name, err);
        if (session == NULL) {
            code = BASE_NOMEM;
            break;
        }
        uint32_t g = (uint32_t)(unit(&p.d) * o->groups);
        session->scope = 0;
        session->start_s = arrival;
        session->shared = group_tokens[g];
        arrival += -log(unit(&p.d)) / o->arrivals_per_s;
        h->count = 1;
        h->runs[0] = (rp_run){group_first[g], group_tokens[g]};
        h->tokens = group_tokens[g];
        next++;
        extend(h, &next, tokens(&p.d, 300, 0.8, 8192));
        uint32_t turns = tokens(&p.d, o->turns_median, o->turns_sigma, o->turns_max);
        if (play(&p, h, 0, turns, group_tokens[g], 0, err) < 0)
            code = BASE_NOMEM;
        rp_trace_close_session(trace);
    }
    free(h);
    return code;
}

/* ---- statistics ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(double *v, size_t n, double q)
{
    if (n == 0)
        return 0;
    qsort(v, n, sizeof *v, by_value);
    size_t i = (size_t)(q * (double)n);
    return v[i < n ? i : n - 1];
}

base_code rp_trace_stats(rp_stats *s, const rp_trace *trace, base_err *err)
{
    *s = (rp_stats){.sessions = trace->session_count, .requests = trace->request_count};
    size_t n = trace->request_count + trace->session_count + 1, appended = 0, gaps = 0, starts = 0;
    double *v = malloc(6 * n * sizeof *v);
    if (v == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for statistics");
    double *turns = v, *start = v + n, *grown = v + 2 * n, *out = v + 3 * n, *gap = v + 4 * n,
           *in = v + 5 * n;
    for (size_t i = 0; i < trace->session_count; i++) {
        const rp_session *session = &trace->sessions[i];
        const rp_request *last = NULL;
        uint32_t main = 0, agents = 0;
        bool waited = false;
        for (size_t j = 0; j < session->request_count; j++) {
            const rp_request *r = &trace->requests[session->request_at + j];
            in[session->request_at + j] = r->in;
            out[session->request_at + j] = r->out;
            s->input_tokens += r->in;
            s->output_tokens += r->out;
            agents = r->agent > agents ? r->agent : agents;
            waited |= r->agent != 0;
            if (r->agent != 0)
                continue;
            main++;
            if (last == NULL) {
                start[starts++] = r->in;
            } else {
                if (r->in >= last->in)
                    grown[appended++] = (double)r->in - last->in;
                else
                    s->compactions++;
                double wait = r->at_s - last->at_s - last->took_s;
                if (!waited) /* for a sub-agent is no pause */
                    gap[gaps++] = wait > 0 ? wait : 0;
            }
            waited = false;
            last = r;
        }
        turns[i] = main;
        s->forks += agents;
    }
    s->turns_median = quantile(turns, trace->session_count, 0.5);
    s->start_median = quantile(start, starts, 0.5);
    s->appended_median = quantile(grown, appended, 0.5);
    s->appended_p90 = quantile(grown, appended, 0.9);
    s->output_median = quantile(out, trace->request_count, 0.5);
    s->in_median = quantile(in, trace->request_count, 0.5);
    s->in_p90 = quantile(in, trace->request_count, 0.9);
    s->gap_median_s = quantile(gap, gaps, 0.5);
    s->gap_p99_s = quantile(gap, gaps, 0.99);
    s->ratio = s->output_tokens > 0 ? s->input_tokens / s->output_tokens : 0;
    free(v);
    return BASE_OK;
}
