/* Several answers to one request: indexes, ends, sums, cuts and what the ledger keeps of them. */
#include "fake.h"

static void begin(void)
{
    fake_conf.limits_n_max = 8;
    fake_start();
}

TestSuite(choices, .init = begin, .fini = fake_stop, .timeout = 20);

#define HELLO "{\"model\":\"fake\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"

static void say(int choice, const char *text, uint32_t cached)
{
    engine_turn_to(choice);
    engine_started(cached);
    engine_part(ENG_PART_TEXT, 0, text);
}

/* The fake's DONE says 3 cached and 1 reasoning token each. */
static void end(int choice, uint32_t output)
{
    engine_turn_to(choice);
    engine_done(ENG_FINISH_STOP, output, -1, output);
}

Test(choices, those_of_a_prompt_follow_its_first_with_seeds_of_their_own)
{
    uint64_t seeds[2][3];
    for (int k = 0; k < 2; k++) {
        gw_exchange *e = send_text(HELLO ",\"n\":3,\"seed\":11}");
        cr_assert(admit(e));
        int from = 3 * k;
        cr_assert_eq(atomic_load(&engine.submitted), from + 3);
        for (int i = 0; i < 3; i++) {
            const eng_request *r = &engine.all[from + i];
            seeds[k][i] = r->sampling.seed;
            cr_assert_eq(r->follows, i ? engine.all[from].id : 0);
            cr_assert_eq(r->tokens, engine.all[from].tokens, "one prompt for all");
            cr_assert_lt(r->sampling.seed, 1ull << 53);
        }
        for (int i = 0; i < 3; i++)
            end(from + i, 1);
        pump_until_over(e);
        free_exchange(e);
    }
    cr_assert_eq(seeds[0][0], 11);
    cr_assert(seeds[0][1] != 11 && seeds[0][2] != 11 && seeds[0][1] != seeds[0][2]);
    cr_assert_eq(memcmp(seeds[0], seeds[1], sizeof seeds[0]), 0, "the same again");
}

Test(choices, a_whole_answer_waits_for_all_and_sums_up)
{
    gw_exchange *e = send_text(HELLO ",\"n\":3}");
    cr_assert(admit(e));
    say(0, "zero", 0);
    say(2, "two", 5);
    say(1, "one", 5);
    end(2, 3);
    end(0, 4);
    pump_all();
    cr_assert(!e->ended);
    end(1, 5);
    pump_until_over(e);
    cr_assert_eq(e->status, 200);
    json_t *json = answer_json(e);
    cr_assert_eq(json_array_size(at(json, "choices")), 3);
    const char *const texts[] = {"zero", "one", "two"};
    for (size_t i = 0; i < 3; i++) {
        json_t *choice = json_array_get(at(json, "choices"), i);
        cr_assert_eq(json_integer_value(at(choice, "index")), (json_int_t)i);
        cr_assert_str_eq(text_at(choice, "message.content"), texts[i]);
        cr_assert_str_eq(text_at(choice, "finish_reason"), "stop");
    }
    cr_assert_eq(json_integer_value(at(json, "usage.prompt_tokens")), engine.request.token_count,
                 "once");
    cr_assert_eq(json_integer_value(at(json, "usage.completion_tokens")), 12);
    cr_assert_eq(json_integer_value(at(json, "usage.prompt_tokens_details.cached_tokens")), 3);
    cr_assert_eq(json_integer_value(at(json, "usage.completion_tokens_details.reasoning_tokens")),
                 3);
    /* Each is a turn of the ledger, in one session. */
    base_arena *arena = base_arena_create(4096, 1 << 20);
    gw_turn_row row;
    for (size_t i = 0; i < 3; i++) {
        char path[64];
        snprintf(path, sizeof path, "usage.whimbrel.choices.%zu.turn", i);
        cr_assert_eq(gw_ledger_turn(app.ledger, &row, 1, text_at(json, path), arena, NULL),
                     BASE_OK);
        cr_assert_str_eq(row.session.text, text_at(json, "usage.whimbrel.session"));
    }
    cr_assert_eq(gw_account_total(gw_tenants_account(app.tenants)).turns, 1);
    cr_assert_eq(gw_account_total(gw_tenants_account(app.tenants)).output_tokens, 12);
    base_arena_destroy(arena);
    json_decref(json);
    free_exchange(e);
    /* Whichever the client goes on from, its tokens are there. */
    for (size_t i = 0; i < 3; i++) {
        char body[512];
        snprintf(body, sizeof body,
                 HELLO ",{\"role\":\"assistant\",\"content\":\"%s\"},{\"role\":\"user\","
                       "\"content\":\"on\"}]}",
                 texts[i]);
        *strstr(body, "]") = ' '; /* of the first message's list */
        e = send_text(body);
        cr_assert(admit(e));
        cr_assert_eq(engine.spliced, 1, "choice %zu", i);
        engine_done(ENG_FINISH_STOP, 1, -1, 0);
        pump_until_over(e);
        free_exchange(e);
    }
}

Test(choices, a_stream_interleaves_and_ends_once)
{
    gw_exchange *e =
        send_text(HELLO ",\"n\":2,\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    cr_assert(admit(e));
    say(0, "a", 0);
    say(1, "b", 5);
    engine_turn_to(0);
    engine_part(ENG_PART_TEXT, 0, "c");
    end(1, 2);
    pump_all();
    cr_assert(!e->ended);
    engine_turn_to(0);
    engine_part(ENG_PART_TEXT, 0, "d");
    end(0, 4);
    pump_until_over(e);
    char *text = strndup(e->out.data, e->out.length), seen[64] = "";
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        cr_assert_eq(strncmp(line, "data: ", 6), 0);
        if (strcmp(line, "data: [DONE]") == 0) {
            strcat(seen, "D");
            continue;
        }
        json_t *json = json_loads(line + 6, 0, NULL);
        if (!json_array_size(at(json, "choices"))) {
            cr_assert_eq(json_integer_value(at(json, "usage.completion_tokens")), 6);
            strcat(seen, "U");
        } else {
            const char *content = json_string_value(at(json, "choices.0.delta.content"));
            snprintf(seen + strlen(seen), 8, "%d%s",
                     (int)json_integer_value(at(json, "choices.0.index")), content ? content : ".");
        }
        json_decref(json);
    }
    cr_assert_str_eq(seen, "010a1b0c1.0d0.UD");
    free(text);
    free_exchange(e);
}

Test(choices, a_client_that_leaves_cancels_all)
{
    gw_exchange *e = send_text(HELLO ",\"n\":3,\"stream\":true}");
    cr_assert(admit(e));
    say(0, "a", 0);
    pump_all();
    end(1, 1);
    pump_all();
    leave(e);
    cr_assert_eq(atomic_load(&engine.cancelled), 2, "one was over");
    for (int i = 0; i < 3; i += 2) {
        engine_turn_to(i);
        engine_done(ENG_FINISH_CANCELLED, 1, -1, 1);
    }
    pump_all();
    free_exchange(e);
}

Test(choices, one_that_fails_fails_the_request_and_ends_the_others)
{
    gw_exchange *e = send_text(HELLO ",\"n\":3}");
    cr_assert(admit(e));
    say(0, "a", 0);
    engine_turn_to(1);
    engine_event((eng_event){
        .kind = ENG_EVENT_DONE,
        .finish = ENG_FINISH_ERROR,
        .stop_index = -1,
        .err = {.code = BASE_DEVICE, .text = "for the test"},
    });
    pump_until_over(e);
    cr_assert_eq(e->status, 500);
    cr_assert_eq(atomic_load(&engine.cancelled), 2);
    for (int i = 0; i < 3; i += 2) {
        engine_turn_to(i);
        engine_done(ENG_FINISH_CANCELLED, 1, -1, 1);
    }
    pump_all();
    free_exchange(e);
}

Test(choices, what_the_engine_refuses_is_refused_whole)
{
    engine.refuse = BASE_FULL;
    gw_exchange *e = send_text(HELLO ",\"n\":8,\"stream\":true}");
    cr_assert(!admit(e));
    cr_assert_eq(e->status, 503);
    free_exchange(e);
    e = send_text(HELLO ",\"n\":9}");
    cr_assert(!admit(e));
    cr_assert_eq(e->status, 400);
    free_exchange(e);
}

Test(choices, a_stop_string_is_shown_if_it_is_asked_for)
{
    for (int shown = 0; shown < 2; shown++) {
        char body[256];
        snprintf(body, sizeof body,
                 HELLO ",\"stop\":[\"x\",\"END\"],\"include_stop_str_in_output\":%s}",
                 shown ? "true" : "false");
        gw_exchange *e = send_text(body);
        cr_assert(admit(e));
        engine_part(ENG_PART_TEXT, 0, "abc");
        engine_done(ENG_FINISH_STOP, 4, 1, 3);
        pump_until_over(e);
        json_t *json = answer_json(e);
        cr_assert_str_eq(text_at(json, "choices.0.message.content"), shown ? "abcEND" : "abc");
        json_decref(json);
        free_exchange(e);
    }
}
