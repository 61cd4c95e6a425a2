/* whimbrel-replay: agent sessions, recorded or generated, against the cache alone or a running
 * server. The parts are replay_trace (readers), replay_gen (generator), replay_cache (simulated
 * time) and replay_server (real turns); this file reads the command line and prints. */
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/page.h"
#include "tools/replay_cache.h"
#include "tools/replay_gen.h"
#include "tools/replay_server.h"

#define CAPACITIES_MAX 16

static const char help[] =
    "usage: whimbrel-replay stats  [option…] FILE…\n"
    "       whimbrel-replay cache  [option…] FILE…\n"
    "       whimbrel-replay server [option…] URL FILE…\n\n"
    "FILE is a Weka session (JSON), its compact form (JSON lines with hash_ranges) or a Mooncake\n"
    "trace (JSON lines), as it is or packed as .xz. In place of files, --generate makes agent\n"
    "sessions from a seed.\n\n"
    "traces\n"
    "  --generate N        N generated sessions\n"
    "  --context-max N     generated or played history stays within N tokens\n"
    "  --seed N            of the generator, and of the order of sessions in lanes; 0 keeps the\n"
    "                      file's order (default 1)\n"
    "  --part 1|2          only sessions at odd or at even places (1st, 3rd …; 2nd, 4th …)\n"
    "  --lenient           leave malformed lines out and count them\n"
    "  --json              one JSON object a line\n"
    "cache\n"
    "  --capacity LIST     tokens, as 256K,1M,4M (K = 1,000; default 250K,500K,1M,2M,4M)\n"
    "  --lanes N           sessions alive at once (default 8); 0: recorded arrivals\n"
    "  --policies LIST     of lru,lfuda,belady,infinite,index,value (default all)\n"
    "  --answers           answers stay in the cache, too, as a server keeps them\n"
    "server\n"
    "  --lanes N           sessions alive at once (default 8)\n"
    "  --sessions N        only the first N\n"
    "  --turns N           at most N requests of each\n"
    "  --model NAME        model in the request (default nano)\n"
    "  --key KEY           bearer token\n"
    "  --http 1|2          HTTP version, 2 by prior knowledge (default 1)\n"
    "  --habit NAME        keep | drop | reserialise: what the client does to answers (keep)\n"
    "  --scale F           lengths are recorded tokens * F (default 0.02)\n"
    "  --speed F           pauses are recorded seconds / F (default 60; 0: none)\n"
    "  --pause-max S       recorded pauses count S seconds at most (default 300)\n"
    "  --output-max N      tokens of an answer (default 256)\n"
    "  --warm              no marker that keeps earlier runs' text from being found\n\n"
    "Exit status: 0; 1 a turn failed or a figure is impossible; 2 bad usage or a bad file.\n";

typedef struct options {
    const char *mode;
    bool json, policies[RP_POLICIES];
    uint32_t generate, sessions;
    uint64_t capacity[CAPACITIES_MAX]; /* tokens */
    uint32_t capacity_count;
    rp_plan_options plan;
    rp_gen_options gen;
    rp_server_options server;
} options;

static int bad_usage(const char *what, const char *value)
{
    fprintf(stderr, "whimbrel-replay: %s %s\n", what, value);
    return 2;
}

static bool number(const char *text, double min, double max, double *out)
{
    char *end;
    errno = 0;
    double v = strtod(text, &end);
    if (end == text || errno != 0)
        return false;
    if (*end == 'K' || *end == 'k')
        v *= 1e3, end++;
    else if (*end == 'M' || *end == 'm')
        v *= 1e6, end++;
    if (*end != '\0' || !(v >= min && v <= max))
        return false;
    *out = v;
    return true;
}

static bool capacities(options *o, char *list)
{
    double v;
    o->capacity_count = 0;
    for (char *rest = list, *word; (word = strsep(&rest, ",")) != NULL;) {
        if (o->capacity_count == CAPACITIES_MAX || !number(word, KV_PAGE_TOKENS, 1e9, &v))
            return false;
        o->capacity[o->capacity_count++] = (uint64_t)v;
    }
    return o->capacity_count > 0;
}

static bool policies(options *o, char *list)
{
    memset(o->policies, 0, sizeof o->policies);
    for (char *rest = list, *word; (word = strsep(&rest, ",")) != NULL;) {
        int p = 0;
        while (p < RP_POLICIES && strcmp(word, rp_policy_names[p]) != 0)
            p++;
        if (p == RP_POLICIES)
            return false;
        o->policies[p] = true;
    }
    return true;
}

enum {
    GENERATE = 256,
    CONTEXT_MAX,
    SEED,
    PART,
    LENIENT,
    JSON,
    CAPACITY,
    LANES,
    POLICIES,
    ANSWERS,
    SESSIONS,
    TURNS,
    MODEL,
    KEY,
    HTTP,
    HABIT,
    SCALE,
    SPEED,
    PAUSE_MAX,
    OUTPUT_MAX,
    WARM,
};

static const struct option flags[] = {{"generate", 1, 0, GENERATE},
                                      {"context-max", 1, 0, CONTEXT_MAX},
                                      {"seed", 1, 0, SEED},
                                      {"part", 1, 0, PART},
                                      {"lenient", 0, 0, LENIENT},
                                      {"json", 0, 0, JSON},
                                      {"capacity", 1, 0, CAPACITY},
                                      {"lanes", 1, 0, LANES},
                                      {"policies", 1, 0, POLICIES},
                                      {"answers", 0, 0, ANSWERS},
                                      {"sessions", 1, 0, SESSIONS},
                                      {"turns", 1, 0, TURNS},
                                      {"model", 1, 0, MODEL},
                                      {"key", 1, 0, KEY},
                                      {"http", 1, 0, HTTP},
                                      {"habit", 1, 0, HABIT},
                                      {"scale", 1, 0, SCALE},
                                      {"speed", 1, 0, SPEED},
                                      {"pause-max", 1, 0, PAUSE_MAX},
                                      {"output-max", 1, 0, OUTPUT_MAX},
                                      {"warm", 0, 0, WARM},
                                      {"help", 0, 0, 'h'},
                                      {0}};

static bool habit(const char *name, rp_habit *out)
{
    static const char *const names[] = {"keep", "drop", "reserialise"};
    for (int i = 0; i < 3; i++)
        if (strcmp(name, names[i]) == 0) {
            *out = (rp_habit)i;
            return true;
        }
    return false;
}

/* 0, or the exit status + 1. */
static int parse(options *o, int argc, char **argv, rp_trace *trace)
{
    int c;
    double v = 0;
    bool ok = true;
    while (ok && (c = getopt_long(argc, argv, "h", flags, NULL)) != -1) {
        switch (c) {
        case GENERATE:
            ok = number(optarg, 1, 1e5, &v);
            o->generate = o->gen.sessions = (uint32_t)v;
            break;
        case CONTEXT_MAX:
            ok = number(optarg, 256, RP_TOKENS_MAX / 2, &v);
            o->gen.context_max = o->server.context_max = (uint32_t)v;
            break;
        case SEED:
            ok = number(optarg, 0, 1e15, &v);
            o->plan.seed = o->gen.seed = o->server.seed = (uint64_t)v;
            break;
        case PART:
            ok = number(optarg, 1, 2, &v);
            o->plan.part = (uint32_t)v;
            break;
        case LENIENT:
            trace->lenient = true;
            break;
        case JSON:
            o->json = o->server.json = true;
            break;
        case CAPACITY:
            ok = capacities(o, optarg);
            break;
        case LANES:
            ok = number(optarg, 0, 4096, &v);
            o->plan.lanes = o->server.lanes = (uint32_t)v;
            break;
        case POLICIES:
            ok = policies(o, optarg);
            break;
        case ANSWERS:
            o->plan.answers = true;
            break;
        case SESSIONS:
            ok = number(optarg, 1, 1e6, &v);
            o->sessions = (uint32_t)v;
            break;
        case TURNS:
            ok = number(optarg, 1, 1e6, &v);
            o->server.turns_max = (uint32_t)v;
            break;
        case MODEL:
            o->server.model = optarg;
            break;
        case KEY:
            o->server.key = optarg;
            break;
        case HTTP:
            ok = number(optarg, 1, 2, &v);
            o->server.http2 = v == 2;
            break;
        case HABIT:
            ok = habit(optarg, &o->server.habit);
            break;
        case SCALE:
            ok = number(optarg, 1e-4, 1, &o->server.scale);
            break;
        case SPEED:
            ok = number(optarg, 0, 1e6, &o->server.speed);
            break;
        case PAUSE_MAX:
            ok = number(optarg, 0, 1e6, &o->server.pause_max_s);
            break;
        case OUTPUT_MAX:
            ok = number(optarg, 1, 65536, &v);
            o->server.output_max = (uint32_t)v;
            break;
        case WARM:
            o->server.cold = false;
            break;
        case 'h':
            fputs(help, stdout);
            return 1;
        default:
            fputs("whimbrel-replay: try --help\n", stderr);
            return 3;
        }
    }
    if (!ok)
        return bad_usage("not within bounds:", optarg) + 1;
    return 0;
}

static void print_json(json_t *row)
{
    char *text = json_dumps(row, JSON_COMPACT | JSON_REAL_PRECISION(6));
    if (text != NULL)
        puts(text);
    free(text);
    json_decref(row);
    fflush(stdout);
}

static int run_stats(const options *o, const rp_trace *trace)
{
    rp_stats s;
    rp_plan plan;
    rp_outcome ideal;
    base_err err = BASE_ERR_INIT;
    rp_plan_options whole = {
        .lanes = o->plan.lanes, .part = o->plan.part, .answers = o->plan.answers};
    if (rp_trace_stats(&s, trace, &err) != BASE_OK ||
        rp_plan_make(&plan, trace, &whole, &err) != BASE_OK) {
        fprintf(stderr, "whimbrel-replay: %s\n", err.text);
        return 1;
    }
    rp_simulate(&ideal, &plan, RP_INFINITE, 1, &err);
    double hit = 100.0 * (double)ideal.hit_tokens / (double)plan.input_tokens;
    if (o->json) {
        print_json(json_pack(
            "{s:I,s:I,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:I,s:I,s:f,s:f,s:I}", "sessions",
            (json_int_t)s.sessions, "requests", (json_int_t)s.requests, "turns_median",
            s.turns_median, "start_median", s.start_median, "appended_median", s.appended_median,
            "appended_p90", s.appended_p90, "output_median", s.output_median, "gap_median_s",
            s.gap_median_s, "gap_p99_s", s.gap_p99_s, "in_median", s.in_median, "in_p90", s.in_p90,
            "forks", (json_int_t)s.forks, "compactions", (json_int_t)s.compactions, "in_out",
            s.ratio, "ideal_hit_pct", hit, "distinct_pages", (json_int_t)plan.distinct_pages));
    } else {
        printf("sessions %zu, requests %zu, sub-agents %zu, shrunk histories %zu\n", s.sessions,
               s.requests, s.forks, s.compactions);
        printf(
            "turns median %.0f; first prompt median %.0f tokens; appended median %.0f, p90 %.0f\n",
            s.turns_median, s.start_median, s.appended_median, s.appended_p90);
        printf("prompt median %.0f, p90 %.0f; output median %.0f; in:out %.0f:1\n", s.in_median,
               s.in_p90, s.output_median, s.ratio);
        printf("pause median %.1f s, p99 %.1f s\n", s.gap_median_s, s.gap_p99_s);
        printf("ideal hit %.2f %% (pages of %d tokens, nothing evicted); %u distinct pages = %.2f "
               "M tokens\n",
               hit, KV_PAGE_TOKENS, plan.distinct_pages,
               (double)plan.distinct_pages * KV_PAGE_TOKENS / 1e6);
    }
    if (trace->skipped > 0)
        fprintf(stderr, "whimbrel-replay: %llu malformed lines left out\n",
                (unsigned long long)trace->skipped);
    rp_plan_deinit(&plan);
    return 0;
}

static int run_cache(const options *o, const rp_trace *trace)
{
    rp_plan plan;
    base_err err = BASE_ERR_INIT;
    if (rp_plan_make(&plan, trace, &o->plan, &err) != BASE_OK) {
        fprintf(stderr, "whimbrel-replay: %s\n", err.text);
        return 1;
    }
    int status = 0;
    if (!o->json) {
        printf("%zu requests, %.1f M tokens, %u distinct pages (%.2f M tokens), %s, hit in %% of "
               "prompt tokens\n",
               plan.event_count, (double)plan.input_tokens / 1e6, plan.distinct_pages,
               (double)plan.distinct_pages * KV_PAGE_TOKENS / 1e6,
               trace->open || o->plan.lanes == 0 ? "recorded arrivals" : "lanes");
        printf("%10s", "capacity");
        for (int p = 0; p < RP_POLICIES; p++)
            if (o->policies[p])
                printf(" %9s", rp_policy_names[p]);
        printf(" %9s %9s %9s\n", "exact", "lru/bel", "closed");
    }
    for (uint32_t c = 0; c < o->capacity_count && status == 0; c++) {
        uint32_t pages = (uint32_t)(o->capacity[c] / KV_PAGE_TOKENS);
        double hit[RP_POLICIES], exact = NAN;
        rp_outcome r;
        for (int p = 0; p < RP_POLICIES; p++) {
            hit[p] = NAN;
            if (!o->policies[p])
                continue;
            if (rp_simulate(&r, &plan, (rp_policy)p, pages, &err) != BASE_OK) {
                fprintf(stderr, "whimbrel-replay: %s at capacity %llu: %s\n", rp_policy_names[p],
                        (unsigned long long)o->capacity[c], err.text);
                status = 1;
                break;
            }
            hit[p] = 100.0 * (double)r.hit_tokens / (double)plan.input_tokens;
            if (p == RP_INDEX || p == RP_VALUE)
                exact = 100.0 * (double)r.exact_tokens / (double)plan.input_tokens;
            if (o->json)
                print_json(json_pack(
                    "{s:s,s:s,s:I,s:i,s:i,s:f,s:f,s:I,s:f}", "bench", "p.trace", "policy",
                    rp_policy_names[p], "capacity", (json_int_t)o->capacity[c], "lanes",
                    trace->open ? 0 : (int)o->plan.lanes, "part", (int)o->plan.part, "hit_pct",
                    hit[p], "exact_pct", 100.0 * (double)r.exact_tokens / (double)plan.input_tokens,
                    "evicted_pages", (json_int_t)r.evicted_pages, "seconds", r.seconds));
        }
        for (int p = 0; p < RP_POLICIES; p++)
            if (p != RP_INFINITE && hit[p] > hit[RP_BELADY]) {
                fprintf(stderr, "whimbrel-replay: %s is above belady at %llu\n", rp_policy_names[p],
                        (unsigned long long)o->capacity[c]);
                status = 1;
            }
        if (o->json)
            continue;
        printf("%9.2fM", (double)o->capacity[c] / 1e6);
        for (int p = 0; p < RP_POLICIES; p++)
            if (o->policies[p])
                printf(" %9.2f", hit[p]);
        double gap = hit[RP_BELADY] - hit[RP_LRU];
        printf(" %9.2f %8.1f%%", exact, 100 * hit[RP_LRU] / hit[RP_BELADY]);
        if (gap > 0.05)
            printf(" %8.1f%%", 100 * (hit[RP_VALUE] - hit[RP_LRU]) / gap);
        putchar('\n');
        fflush(stdout);
    }
    rp_plan_deinit(&plan);
    return status;
}

int main(int argc, char **argv)
{
    options o = {.policies = {true, true, true, true, true, true},
                 .capacity = {250000, 500000, 1000000, 2000000, 4000000},
                 .capacity_count = 5,
                 .plan = {.lanes = 8, .seed = 1},
                 .gen = RP_GEN_DEFAULT,
                 .server = {.model = "nano",
                            .lanes = 8,
                            .scale = 0.02,
                            .speed = 60,
                            .pause_max_s = 300,
                            .context_max = 0,
                            .output_max = 256,
                            .cold = true,
                            .seed = 1}};
    rp_trace trace = {0};
    base_err err = BASE_ERR_INIT;
    int status = parse(&o, argc, argv, &trace);
    if (status != 0)
        return status - 1;
    if (optind == argc) {
        fputs(help, stderr);
        return 2;
    }
    o.mode = argv[optind++];
    bool server = strcmp(o.mode, "server") == 0;
    if (!server && strcmp(o.mode, "cache") != 0 && strcmp(o.mode, "stats") != 0)
        return bad_usage("no such mode:", o.mode);
    if (server) {
        if (optind == argc)
            return bad_usage("server needs a", "URL");
        o.server.url = argv[optind++];
        if (o.server.lanes == 0)
            return bad_usage("server needs --lanes of at least", "1");
    }
    if ((optind < argc) == (o.generate > 0))
        return bad_usage("give either files or", "--generate N");
    if (o.generate > 0 && rp_generate(&trace, &o.gen, &err) != BASE_OK)
        status = 2;
    for (int i = optind; i < argc && status == 0; i++)
        if (rp_trace_read(&trace, argv[i], &err) != BASE_OK)
            status = 2;
    if (status != 0)
        fprintf(stderr, "whimbrel-replay: %s\n", err.text);
    else if (server) {
        if (o.sessions > 0 && o.sessions < trace.session_count)
            trace.session_count = o.sessions;
        status = rp_server_run(&trace, &o.server, &err) == BASE_OK ? 0 : 1;
        if (status != 0)
            fprintf(stderr, "whimbrel-replay: %s\n", err.text);
    } else
        status = strcmp(o.mode, "cache") == 0 ? run_cache(&o, &trace) : run_stats(&o, &trace);
    rp_trace_deinit(&trace);
    return status;
}
