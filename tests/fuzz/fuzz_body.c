/* Bodies of requests, from the exchange to the engine's door: parsed on a worker, looked up in the
 * ledger, rendered, and refused by an engine that is full, so that nothing is stored.
 *
 * The first byte says who reads the rest: see `ways`. Every answer is JSON, and never 500. */
#include "tests/fuzz/fuzz.h"

#define cr_assert(condition, ...) MUST(condition)
#define cr_assert_eq(a, b, ...) MUST((a) == (b))
#define cr_assert_not_null(pointer, ...) MUST((pointer) != NULL)
#include "tests/gateway/fake.h"

#include "gateway/api_conversations.h"
#include "gateway/api_messages.h"
#include "gateway/api_responses.h"
#include "gateway/api_sessions.h"
#include "gateway/api_text.h"
#include "gateway/append.h"
#include "gateway/pin.h"
#include "gateway/seal.h"

const char *gw_exchange_query(const gw_exchange *exchange)
{
    (void)exchange;
    return "";
}

void eng_pin(eng_engine *e, uint64_t space, const int32_t *tokens, uint32_t count, uint64_t seconds)
{
    (void)e;
    (void)space;
    (void)tokens;
    (void)count;
    (void)seconds;
}

uint32_t eng_peek_cached(eng_engine *e, uint64_t space, const int32_t *tokens, uint32_t token_count)
{
    (void)e;
    (void)space;
    (void)tokens;
    (void)token_count;
    return 0;
}

static char turns[96], append[96], pin[96];

static const struct way {
    char letter;
    void (*handle)(gw_app *app, gw_exchange *exchange);
    const char *path;
} ways[] = {
    {'c', gw_api_chat_handle, "/v1/chat/completions"},
    {'C', gw_api_chat_render, "/v1/chat/completions/render"},
    {'p', gw_api_completions_handle, "/v1/completions"},
    {'m', gw_api_messages_handle, "/v1/messages"},
    {'M', gw_api_messages_count, "/v1/messages/count_tokens"},
    {'r', gw_api_responses_handle, "/v1/responses"},
    {'R', gw_api_responses_count, "/v1/responses/input_tokens"},
    {'t', gw_api_tokenize, "/tokenize"},
    {'d', gw_api_detokenize, "/detokenize"},
    {'s', gw_api_sessions_turn, turns},
    {'a', gw_api_sessions_append, append},
    {'n', gw_api_sessions_pin, pin},
};

/* The answer, whose status is given back. */
static int ask(const struct way *way, const char *body, size_t length, base_buf *out)
{
    gw_exchange *e = calloc(1, sizeof *e);
    MUST(e != NULL);
    e->body = body;
    e->length = length;
    e->path = way->path;
    e->headers[0][0] = "content-type";
    e->headers[0][1] = "application/json";
    engine.refuse = BASE_FULL;
    way->handle(&app, e);
    for (int i = 0; i < 4000 && !e->ended && !e->dead; i++)
        pump(5);
    MUST(e->ended);
    while (pump(0)) /* the turn lets go of what it holds */
        ;
    *out = e->out;
    int status = e->status;
    free(e);
    return status;
}

static void start(void)
{
    base_err err = BASE_ERR_INIT;
    base_buf out;
    fake_conf.sessions_count_max = 20;
    fake_conf.sessions_items_max = 10;
    fake_conf.sessions_queue_wait_ms = 60000;
    fake_conf.sessions_append_bytes_max = 3000;
    fake_conf.sessions_append_bytes_total_max = 5000;
    fake_conf.sessions_pin_seconds_max = 100;
    fake_conf.conversations_count_max = fake_conf.conversations_items_max = 16;
    fake_conf.limits_body_bytes_max = 1u << 20;
    fake_conf.limits_n_max = 4;
    fake_start();
    const gw_pins_options pins = {.page_count = 40, .percent_max = 50, .tenant_percent_max = 25};
    MUST(gw_pins_create(&app.pins, &pins, &err) == BASE_OK);
    MUST(gw_appends_create(&app.appends, &app, &err) == BASE_OK);
    MUST(gw_seal_open(&app.seal, fake_directory, &err) == BASE_OK);
    static const char session[] = "{\"model\":\"fake\"}";
    const struct way create = {'S', gw_api_sessions_create, "/v1/sessions"};
    MUST(ask(&create, session, sizeof session - 1, &out) == 200);
    json_t *json = json_loadb(out.data, out.length, 0, NULL);
    const char *id = json_string_value(json_object_get(json, "id"));
    MUST(id != NULL);
    snprintf(turns, sizeof turns, "/v1/sessions/%s/turns", id);
    snprintf(append, sizeof append, "/v1/sessions/%s/append", id);
    snprintf(pin, sizeof pin, "/v1/sessions/%s/pin", id);
    json_decref(json);
    base_buf_deinit(&out);
}

static void stop(void)
{
    fake_stop();
    gw_pins_destroy(app.pins);
    gw_appends_destroy(app.appends);
    gw_seal_close(app.seal);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool started;
    if (!started) {
        started = true;
        start();
        atexit(stop);
    }
    for (size_t i = 0; size > 0 && i < sizeof ways / sizeof *ways; i++)
        if (ways[i].letter == (char)data[0]) {
            base_buf out;
            char *body = fuzz_copy(data + 1, size - 1);
            int status = ask(&ways[i], body, size - 1, &out);
            MUST(status >= 200 && status != 500 && status < 600);
            json_t *json = json_loadb(out.data, out.length, JSON_ALLOW_NUL | JSON_DECODE_ANY, NULL);
            MUST(json != NULL);
            json_decref(json);
            base_buf_deinit(&out);
            free(body);
        }
    return 0;
}
