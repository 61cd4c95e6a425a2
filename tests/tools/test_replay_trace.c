/* Readers and generator of traces. The samples are written for these tests in the formats' shape.
 */
#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/rand.h"
#include "tools/replay_cache.h"
#include "tools/replay_gen.h"

static rp_trace trace;
static base_err err;

static void read_sample(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", SAMPLES, name);
    cr_assert_eq(rp_trace_read(&trace, path, &err), BASE_OK, "%s", err.text);
}

static base_code read_text(const char *text)
{
    err = (base_err)BASE_ERR_INIT;
    return rp_trace_read_line(&trace, text, strlen(text), "name", 7, &err);
}

static const int32_t *prompt(size_t session, size_t request, uint32_t count)
{
    static int32_t tokens[4][4096];
    static int turn;
    int32_t *out = tokens[turn++ % 4];
    const rp_session *s = &trace.sessions[session];
    rp_tokens(&trace, s, &trace.requests[s->request_at + request], out, count);
    return out;
}

static uint32_t common(const int32_t *a, const int32_t *b, uint32_t count)
{
    uint32_t n = 0;
    while (n < count && a[n] == b[n])
        n++;
    return n;
}

Test(replay_trace, reads_a_session_over_many_lines_with_agents_inside_agents)
{
    read_sample("session.json");
    cr_assert_eq(trace.session_count, 1);
    const rp_session *s = trace.sessions;
    cr_assert_str_eq(s->name, "sample");
    cr_assert_eq(s->block_tokens, 64);
    cr_assert_eq(s->shared, 130);
    cr_assert_eq(s->request_count, 4);
    const rp_request *r = trace.requests;
    cr_assert_eq(r[0].in, 200);
    cr_assert_eq(r[0].out, 60);
    cr_assert_eq(r[0].agent, 0);
    cr_assert_eq(r[0].stop, RP_STOP_TOOL);
    cr_assert_float_eq(r[0].took_s, 1.5, 1e-9);
    /* A sub-agent's clock starts with it. */
    cr_assert_float_eq(r[1].at_s, 4.0, 1e-9);
    cr_assert_eq(r[1].agent, 1);
    cr_assert_float_eq(r[2].at_s, 4.75, 1e-9);
    cr_assert_eq(r[2].agent, 2);
    cr_assert_float_eq(r[3].at_s, 9.0, 1e-9);
    cr_assert_eq(r[3].agent, 0);
    cr_assert(r[3].tool_result);
    cr_assert_not(r[0].tool_result);
    rp_trace_deinit(&trace);
}

Test(replay_trace, a_prompt_past_its_blocks_goes_on_as_the_next_one_does)
{
    read_sample("session.json");
    /* 200 tokens, 3 blocks of 64: the last 8 and the answer are the next prompt's. */
    cr_assert_eq(common(prompt(0, 0, 260), prompt(0, 3, 260), 260), 260);
    /* The next prompt's blocks end at 320; beyond them a prompt has tokens of its own. */
    cr_assert_eq(common(prompt(0, 0, 400), prompt(0, 3, 400), 400), 320);
    rp_trace_deinit(&trace);
}

Test(replay_trace, reads_ranges_and_keeps_sessions_apart)
{
    read_sample("compact.jsonl");
    cr_assert_eq(trace.session_count, 2);
    cr_assert_eq(trace.sessions[0].request_count, 2);
    cr_assert_eq(trace.sessions[1].request_count, 1, "a request without a prompt is left out");
    cr_assert_eq(common(prompt(0, 0, 640), prompt(0, 1, 640), 640), 640);
    cr_assert_lt(common(prompt(0, 0, 640), prompt(1, 0, 640), 640), 8, "ids are local");
    cr_assert_not(trace.open);
    rp_trace_deinit(&trace);
}

Test(replay_trace, reads_single_requests_whose_ids_all_share)
{
    read_sample("requests.jsonl");
    cr_assert_eq(trace.session_count, 1);
    cr_assert_eq(trace.request_count, 3);
    cr_assert(trace.open);
    cr_assert_float_eq(trace.requests[2].at_s, 1.5, 1e-9);
    cr_assert_eq(common(prompt(0, 0, 600), prompt(0, 1, 600), 600), 512);
    cr_assert_eq(common(prompt(0, 0, 1024), prompt(0, 2, 1024), 1024), 1024);
    rp_trace_deinit(&trace);
}

Test(replay_trace, equal_tokens_whether_ids_stand_alone_or_in_ranges)
{
    cr_assert_eq(read_text("{\"id\":\"a\",\"hash_id_scope\":\"global\",\"requests\":[{\"t\":0,"
                           "\"in\":192,\"out\":1,\"hash_ids\":[5,6,9]}]}"),
                 BASE_OK);
    cr_assert_eq(read_text("{\"id\":\"b\",\"hash_id_scope\":\"global\",\"requests\":[{\"t\":0,"
                           "\"in\":192,\"out\":1,\"hash_ranges\":[[5,6],[9,9]]}]}"),
                 BASE_OK);
    cr_assert_eq(common(prompt(0, 0, 192), prompt(1, 0, 192), 192), 192);
    rp_trace_deinit(&trace);
}

Test(replay_trace, an_error_names_file_and_line_and_leaves_nothing)
{
    static const char *const bad[] = {
        "{\"id\":\"x\",\"requests\":[{\"t\":0,\"in\":64,\"hash_ids\":[1",
        "[]",
        "{}",
        "7",
        "{\"requests\":{}}",
        "{\"requests\":[3]}",
        "{\"requests\":[{\"in\":5}]}",
        "{\"requests\":[{\"t\":0}]}",
        "{\"requests\":[{\"t\":-1,\"in\":5}]}",
        "{\"requests\":[{\"t\":1e300,\"in\":5}]}",
        "{\"requests\":[{\"t\":\"0\",\"in\":5}]}",
        "{\"requests\":[{\"t\":0,\"in\":5000000}]}",
        "{\"requests\":[{\"t\":0,\"in\":-5}]}",
        "{\"requests\":[{\"t\":0,\"in\":1.5}]}",
        "{\"requests\":[{\"t\":0,\"in\":640,\"hash_ids\":[1,-2]}]}",
        "{\"requests\":[{\"t\":0,\"in\":640,\"hash_ids\":\"1\"}]}",
        "{\"requests\":[{\"t\":0,\"in\":640,\"hash_ids\":[99999999999999999]}]}",
        "{\"requests\":[{\"t\":0,\"in\":640,\"hash_ranges\":[[2,1]]}]}",
        "{\"requests\":[{\"t\":0,\"in\":640,\"hash_ranges\":[[1]]}]}",
        "{\"requests\":[{\"t\":0,\"in\":640,\"hash_ranges\":[5]}]}",
        "{\"requests\":[{\"t\":0,\"in\":64},{\"t\":0,\"type\":\"subagent\"}]}",
        "{\"block_size\":-1,\"requests\":[]}",
        "{\"timestamp\":0}",
        "{\"timestamp\":-1,\"input_length\":5}",
        "{\"timestamp\":0,\"input_length\":5,\"hash_ids\":{}}",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cr_assert_eq(read_text(bad[i]), BASE_FORMAT, "taken: %s", bad[i]);
        cr_assert_eq(strncmp(err.text, "name:7: ", 8), 0, "%s", err.text);
        cr_assert_eq(trace.session_count + trace.request_count + trace.run_count, 0, "%s", bad[i]);
    }
    trace.lenient = true;
    cr_assert_eq(read_text(bad[0]), BASE_OK);
    cr_assert_eq(trace.skipped, 1);
    rp_trace_deinit(&trace);
}

Test(replay_trace, what_a_range_claims_is_bounded_by_the_prompt)
{
    cr_assert_eq(read_text("{\"requests\":[{\"t\":0,\"in\":640,\"hash_ranges\":[[0,281474976710656]"
                           "]}]}"),
                 BASE_OK, "%s", err.text);
    cr_assert_eq(trace.runs[0].count, 10);
    rp_trace_deinit(&trace);
}

Test(replay_trace, sub_agents_cannot_nest_without_bound)
{
    static char text[8192] = "{\"requests\":[";
    for (int i = 0; i < 20; i++)
        strcat(text, "{\"t\":0,\"type\":\"subagent\",\"requests\":[");
    for (int i = 0; i < 20; i++)
        strcat(text, "]}");
    strcat(text, "]}");
    cr_assert_eq(read_text(text), BASE_TOO_LONG, "%s", err.text);
    rp_trace_deinit(&trace);
}

Test(replay_trace, damaged_lines_are_refused_or_read_but_never_end_the_process)
{
    static const char line[] =
        "{\"id\":\"one\",\"block_size\":64,\"requests\":[{\"t\":0.0,\"type\":\"n\",\"in\":700,"
        "\"out\":9,\"hash_ranges\":[[1,10]],\"stop\":\"tool_use\"},{\"t\":3.0,\"in\":830,\"out\":9,"
        "\"hash_ids\":[1,2,3]},{\"t\":1,\"type\":\"subagent\",\"requests\":[{\"t\":0,\"in\":64}]}]"
        "}";
    static int32_t tokens[1024];
    for (uint32_t i = 0; i < 20000; i++) {
        char text[sizeof line];
        size_t length = sizeof line - 1;
        memcpy(text, line, sizeof line);
        base_rand4 d = base_rand(11, 0, i);
        uint32_t slips = 1 + d.v[0] % 3;
        for (uint32_t k = 0; k < slips; k++) {
            base_rand4 e = base_rand(11, 1 + k, i);
            text[e.v[0] % length] = "0123456789-.eE{}[]\",:ntx\xff"[e.v[1] % 25];
        }
        if (d.v[1] % 4 == 0)
            length = d.v[2] % length;
        err = (base_err)BASE_ERR_INIT;
        if (rp_trace_read_line(&trace, text, length, "fuzz", 1, &err) == BASE_OK)
            for (size_t r = 0; r < trace.request_count; r++) {
                const rp_request *q = &trace.requests[r];
                rp_tokens(&trace, trace.sessions, q, tokens, q->in < 1024 ? q->in : 1024);
            }
        rp_trace_deinit(&trace);
    }
}

Test(replay_trace, a_missing_or_empty_file_is_named)
{
    cr_assert_eq(rp_trace_read(&trace, "/nonexistent/x.jsonl", &err), BASE_IO);
    cr_assert(strstr(err.text, "/nonexistent/x.jsonl") != NULL, "%s", err.text);
    err = (base_err)BASE_ERR_INIT;
    cr_assert_eq(rp_trace_read(&trace, "/dev/null", &err), BASE_FORMAT);
    char path[] = "/tmp/test-replay.XXXXXX";
    int fd = mkstemp(path);
    cr_assert(fd >= 0);
    static const char text[] = "{\"timestamp\":0,\"input_length\":5}\n\nnot json\n";
    cr_assert_eq(write(fd, text, sizeof text - 1), (ssize_t)sizeof text - 1);
    close(fd);
    err = (base_err)BASE_ERR_INIT;
    cr_assert_eq(rp_trace_read(&trace, path, &err), BASE_FORMAT);
    cr_assert(strstr(err.text, ":3: ") != NULL, "%s", err.text);
    unlink(path);
    rp_trace_deinit(&trace);
}

/* ---- the generator ---- */

Test(replay_gen, statistics_stay_within_their_bounds)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        rp_gen_options o = RP_GEN_DEFAULT;
        rp_stats s;
        o.seed = seed;
        o.sessions = 100;
        cr_assert_eq(rp_generate(&trace, &o, &err), BASE_OK, "%s", err.text);
        cr_assert_eq(rp_trace_stats(&s, &trace, &err), BASE_OK);
        cr_assert(s.turns_median >= 28 && s.turns_median <= 39, "turns %g", s.turns_median);
        cr_assert(s.start_median >= 10500 && s.start_median <= 15000, "start %g", s.start_median);
        cr_assert(s.appended_median >= 1900 && s.appended_median <= 2500, "appended %g",
                  s.appended_median);
        cr_assert(s.output_median >= 450 && s.output_median <= 550, "out %g", s.output_median);
        cr_assert(s.gap_median_s >= 4.6 && s.gap_median_s <= 5.8, "gap %g", s.gap_median_s);
        cr_assert(s.gap_p99_s >= 60 && s.gap_p99_s <= 110, "gap p99 %g", s.gap_p99_s);
        cr_assert(s.ratio >= 110 && s.ratio <= 150, "in:out %g", s.ratio);
        double main_turns = 0;
        for (size_t i = 0; i < trace.request_count; i++)
            main_turns += trace.requests[i].agent == 0;
        double forks = (double)s.forks / main_turns, cuts = (double)s.compactions / main_turns;
        cr_assert(forks >= 0.06 && forks <= 0.10, "forks %g", forks);
        cr_assert(cuts >= 0.015 && cuts <= 0.045, "compactions %g", cuts);
        rp_plan plan;
        rp_outcome ideal;
        rp_plan_options p = {.lanes = 8};
        cr_assert_eq(rp_plan_make(&plan, &trace, &p, &err), BASE_OK);
        cr_assert_eq(rp_simulate(&ideal, &plan, RP_INFINITE, 1, &err), BASE_OK);
        double hit = (double)ideal.hit_tokens / (double)plan.input_tokens;
        cr_assert(hit >= 0.94 && hit <= 0.97, "ideal hit %g", hit);
        rp_plan_deinit(&plan);
        rp_trace_deinit(&trace);
    }
}

Test(replay_gen, a_seed_gives_the_same_trace_and_another_seed_another)
{
    rp_trace again = {0}, other = {0};
    rp_gen_options o = RP_GEN_DEFAULT;
    o.sessions = 8;
    rp_generate(&trace, &o, &err);
    rp_generate(&again, &o, &err);
    o.seed = 2;
    rp_generate(&other, &o, &err);
    cr_assert_eq(trace.request_count, again.request_count);
    for (size_t i = 0; i < trace.request_count; i++) {
        cr_assert_eq(trace.requests[i].in, again.requests[i].in);
        cr_assert_eq(trace.requests[i].at_s, again.requests[i].at_s);
    }
    cr_assert(other.request_count != trace.request_count ||
              other.requests[0].in != trace.requests[0].in);
    rp_trace_deinit(&trace);
    rp_trace_deinit(&again);
    rp_trace_deinit(&other);
}

Test(replay_gen, a_fork_begins_with_its_parents_tokens)
{
    static int32_t a[300000], b[300000];
    rp_gen_options o = RP_GEN_DEFAULT;
    o.sessions = 4;
    cr_assert_eq(rp_generate(&trace, &o, &err), BASE_OK);
    uint32_t seen = 0;
    for (size_t i = 1; i < trace.sessions[0].request_count; i++) {
        const rp_request *r = &trace.requests[i], *parent = r - 1;
        if (r->agent == 0 || parent->agent != 0)
            continue;
        rp_tokens(&trace, trace.sessions, parent, a, parent->in + parent->out);
        rp_tokens(&trace, trace.sessions, r, b, r->in);
        cr_assert_gt(r->in, parent->in + parent->out);
        cr_assert_eq(memcmp(a, b, (parent->in + parent->out) * sizeof *a), 0);
        seen++;
    }
    cr_assert_gt(seen, 0);
    rp_trace_deinit(&trace);
}
