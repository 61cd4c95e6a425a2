/* A lane plays one session at a time: it waits until a request is due, sends it, reads the stream,
 * and puts what the server answered into the history that the next request sends.
 *
 *   IDLE → DUE (next_request; a new session if the old one has ended) → BUSY (launch) → DUE | IDLE
 *   (finish)
 *
 * How many characters make a token is learnt from the prompts that the server counted. */
#include "tools/replay_server.h"

#include <curl/curl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/buf.h"
#include "engine/base/clock.h"
#include "engine/base/rand.h"

#define REQUEST_SECONDS_MAX 600L
#define ANSWER_BYTES_MAX ((size_t)16 << 20)
#define AGENTS_MAX 256
#define CALLS_MAX 16
#define BUCKETS 6

static const uint32_t bucket_end[BUCKETS] = {64, 256, 1024, 4096, 16384, UINT32_MAX};

/* One agent's conversation. */
typedef struct talk {
    json_t *messages;
    const rp_request *last;
    uint32_t known; /* tokens that the server holds of it: its last prompt and answer */
} talk;

typedef struct call {
    base_buf id, name, arguments;
} call;

typedef enum lane_state { LANE_IDLE, LANE_DUE, LANE_BUSY } lane_state;

typedef struct run run;

typedef struct lane {
    run *r;
    lane_state state;
    const rp_session *session;
    uint32_t next, sent; /* request within the session; requests sent */
    talk *talks;
    uint32_t talk_count;
    uint64_t due_ns, sent_ns, first_ns;
    CURL *curl;
    struct curl_slist *headers;
    char *body;
    bool fresh; /* the conversation begins or was rewritten with this request */
    /* the stream */
    base_buf line, text, reasoning;
    call calls[CALLS_MAX];
    uint32_t call_count;
    uint32_t prompt, cached, completion;
    bool has_usage, finished, broken;
    char error[160];
} lane;

typedef struct bucket {
    double *ms;
    uint32_t count, room;
} bucket;

struct run {
    const rp_trace *trace;
    const rp_server_options *o;
    CURLM *multi;
    lane *lanes;
    uint32_t next_session, next_request; /* the second: within it, if it is open */
    uint64_t start_ns;
    uint64_t words; /* drawn so far */
    double chars_sent, tokens_counted;
    bucket buckets[BUCKETS];
    uint64_t prompt, cached, ideal, completion, decode_ns;
    uint32_t turns, failed, forks, rewrites;
    char mark[32];
};

/* ---- text ---- */

static const char *const words[] = {
    "harbour", "lantern", "orchard", "signal",  "velvet", "compass", "meadow",  "copper",
    "the",     "of",      "return",  "if",      "value",  "file",    "line",    "error",
    "test",    "build",   "index",   "pointer", "queue",  "thread",  "between", "after",
    "open",    "close",   "number",  "result",  "check",  "path",    "name",    "table"};

/* Words of about `tokens` tokens. */
static void add_words(run *r, base_buf *out, double tokens)
{
    double ratio = r->tokens_counted > 1000 ? r->chars_sent / r->tokens_counted : 4;
    size_t end = out->length + (size_t)(tokens * ratio) + 1;
    while (out->length < end && !out->failed) {
        uint32_t draw = base_rand(r->o->seed, 5, r->words++).v[0];
        base_buf_puts(out, words[draw % (sizeof words / sizeof *words)]);
        base_buf_puts(out, draw >> 28 == 0 ? ".\n" : " ");
    }
}

static json_t *message(run *r, const char *role, const char *lead, double tokens)
{
    base_buf text;
    base_buf_init(&text, ANSWER_BYTES_MAX);
    base_buf_puts(&text, lead);
    add_words(r, &text, tokens);
    json_t *m = json_pack("{s:s,s:s}", "role", role, "content", text.data != NULL ? text.data : "");
    base_buf_deinit(&text);
    return m;
}

static json_t *tools(void)
{
    static const char text[] =
        "[{\"type\":\"function\",\"function\":{\"name\":\"read_file\",\"description\":\"Read a "
        "file.\",\"parameters\":{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\"}"
        "},\"required\":[\"path\"]}}},{\"type\":\"function\",\"function\":{\"name\":\"run_shell\","
        "\"description\":\"Run a command.\",\"parameters\":{\"type\":\"object\",\"properties\":{"
        "\"command\":{\"type\":\"string\"}},\"required\":[\"command\"]}}}]";
    return json_loadb(text, sizeof text - 1, 0, NULL);
}

/* ---- the stream ---- */

static void lane_clear(lane *l)
{
    base_buf_clear(&l->line);
    base_buf_clear(&l->text);
    base_buf_clear(&l->reasoning);
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        base_buf_clear(&l->calls[i].id);
        base_buf_clear(&l->calls[i].name);
        base_buf_clear(&l->calls[i].arguments);
    }
    l->call_count = 0;
    l->prompt = l->cached = l->completion = 0;
    l->has_usage = l->finished = l->broken = false;
    l->first_ns = 0;
    l->error[0] = '\0';
}

static void add_string(base_buf *out, const json_t *value)
{
    if (json_is_string(value))
        base_buf_add(out, json_string_value(value), json_string_length(value));
}

static void on_calls(lane *l, const json_t *calls)
{
    const json_t *piece;
    size_t i;
    json_array_foreach(calls, i, piece)
    {
        json_int_t at = json_integer_value(json_object_get(piece, "index"));
        if (at < 0 || at >= CALLS_MAX) {
            l->broken = true;
            return;
        }
        call *c = &l->calls[at];
        const json_t *function = json_object_get(piece, "function");
        if ((uint32_t)at >= l->call_count)
            l->call_count = (uint32_t)at + 1;
        add_string(&c->id, json_object_get(piece, "id"));
        add_string(&c->name, json_object_get(function, "name"));
        add_string(&c->arguments, json_object_get(function, "arguments"));
    }
}

static uint32_t count_of(const json_t *object, const char *key)
{
    json_int_t v = json_integer_value(json_object_get(object, key));
    return v < 0 ? 0 : v > (json_int_t)UINT32_MAX / 2 ? UINT32_MAX / 2 : (uint32_t)v;
}

static void on_data(lane *l, const char *text, size_t length)
{
    if (length == 6 && memcmp(text, "[DONE]", 6) == 0)
        return;
    json_t *event = json_loadb(text, length, 0, NULL);
    if (event == NULL) {
        l->broken = true;
        return;
    }
    const json_t *error = json_object_get(event, "error");
    if (json_is_object(error))
        snprintf(l->error, sizeof l->error, "%s",
                 json_string_value(json_object_get(error, "message")) ?: "error event");
    const json_t *choice = json_array_get(json_object_get(event, "choices"), 0);
    const json_t *delta = json_object_get(choice, "delta");
    size_t before = l->text.length + l->reasoning.length;
    add_string(&l->text, json_object_get(delta, "content"));
    add_string(&l->reasoning, json_object_get(delta, "reasoning_content"));
    on_calls(l, json_object_get(delta, "tool_calls"));
    if (l->first_ns == 0 && (l->text.length + l->reasoning.length > before || l->call_count > 0))
        l->first_ns = base_now_ns();
    if (json_is_string(json_object_get(choice, "finish_reason")))
        l->finished = true;
    const json_t *usage = json_object_get(event, "usage");
    if (json_is_object(usage)) {
        l->has_usage = true;
        l->prompt = count_of(usage, "prompt_tokens");
        l->completion = count_of(usage, "completion_tokens");
        l->cached = count_of(json_object_get(usage, "prompt_tokens_details"), "cached_tokens");
    }
    json_decref(event);
}

static size_t on_bytes(char *bytes, size_t size, size_t count, void *user)
{
    lane *l = user;
    base_buf_add(&l->line, bytes, size * count);
    if (l->line.failed || l->text.failed)
        return 0; /* longer than any answer */
    char *end;
    size_t done = 0;
    while (done < l->line.length &&
           (end = memchr(l->line.data + done, '\n', l->line.length - done)) != NULL) {
        char *line = l->line.data + done;
        size_t length = (size_t)(end - line);
        done += length + 1;
        if (length > 0 && line[length - 1] == '\r')
            length--;
        if (length > 5 && memcmp(line, "data:", 5) == 0) {
            size_t skip = line[5] == ' ' ? 6 : 5;
            on_data(l, line + skip, length - skip);
        }
    }
    base_buf_drop(&l->line, done);
    return size * count;
}

/* ---- a turn ---- */

static talk *talk_of(lane *l, const rp_request *request)
{
    return &l->talks[request->agent < AGENTS_MAX ? request->agent : AGENTS_MAX - 1];
}

/* Blocks with which both prompts begin. */
static uint64_t common_blocks(const rp_trace *trace, const rp_request *a, const rp_request *b)
{
    const rp_run *x = trace->runs + a->run_at, *y = trace->runs + b->run_at;
    uint64_t common = 0;
    for (uint32_t i = 0; i < a->run_count && i < b->run_count; i++) {
        if (x[i].first != y[i].first)
            break;
        uint32_t both = x[i].count < y[i].count ? x[i].count : y[i].count;
        common += both;
        if (x[i].count != y[i].count)
            break;
    }
    return common;
}

static void begin(lane *l, talk *t, const rp_request *request)
{
    run *r = l->r;
    char lead[96];
    json_decref(t->messages);
    t->messages = json_array();
    t->known = 0;
    double shared = l->session->shared > 0 ? l->session->shared : request->in * 0.5;
    if (shared > request->in)
        shared = request->in;
    snprintf(lead, sizeof lead, "%sYou are a coding agent. ", r->mark);
    json_array_append_new(t->messages, message(r, "system", lead, shared * r->o->scale));
    snprintf(lead, sizeof lead, "%s, request %u: ", l->session->name, l->next);
    json_array_append_new(t->messages,
                          message(r, "user", lead, (request->in - shared) * r->o->scale));
}

#define BLOCK_CHARS_PER_TOKEN 4.0 /* fixed, so that a block is the same text in every request */

/* A request that stands alone: blocks of equal ids are equal text. */
static void begin_alone(lane *l, talk *t, const rp_request *request)
{
    run *r = l->r;
    char lead[96];
    base_buf text;
    double left = request->in * r->o->scale;
    base_buf_init(&text, ANSWER_BYTES_MAX);
    for (uint32_t i = 0; i < request->run_count; i++) {
        const rp_run *blocks = &r->trace->runs[request->run_at + i];
        for (uint32_t b = 0; b < blocks->count && left > 0; b++) {
            double tokens = l->session->block_tokens * r->o->scale;
            tokens = tokens < left ? tokens : left;
            left -= tokens;
            size_t end = text.length + (size_t)(tokens * BLOCK_CHARS_PER_TOKEN) + 1;
            for (uint64_t n = 0; text.length < end && !text.failed; n++) {
                uint32_t draw = base_rand(r->o->seed ^ (blocks->first + b) << 16, 6, n).v[0];
                base_buf_puts(&text, words[draw % (sizeof words / sizeof *words)]);
                base_buf_puts(&text, " ");
            }
        }
    }
    snprintf(lead, sizeof lead, "%sYou are an assistant.", r->mark);
    json_decref(t->messages);
    t->messages =
        json_pack("[{s:s,s:s},{s:s,s:s}]", "role", "system", "content", lead, "role", "user",
                  "content", text.length > 0 && !text.failed ? text.data : "Hello.");
    t->known = 0;
    base_buf_deinit(&text);
}

/* Brings the history of the request's agent to what it sends. */
static void prepare(lane *l, const rp_request *request)
{
    run *r = l->r;
    talk *t = talk_of(l, request), *main = &l->talks[0];
    l->fresh = r->trace->open;
    if (r->trace->open) {
        begin_alone(l, t, request);
        return;
    }
    if (t->messages == NULL && request->agent > 0 && main->last != NULL &&
        common_blocks(r->trace, main->last, request) * l->session->block_tokens * 2 > request->in) {
        /* A fork: the parent's history, and then its own way. */
        t->messages = json_deep_copy(main->messages);
        t->last = main->last;
        t->known = main->known;
        r->forks++;
    }
    if (t->messages == NULL) {
        begin(l, t, request);
        l->fresh = true;
    } else if (request->in < t->last->in * 0.7) {
        begin(l, t, request);
        l->fresh = true;
        r->rewrites++;
    } else {
        double more = ((double)request->in - t->last->in - t->last->out) * r->o->scale;
        json_t *last = json_array_get(t->messages, json_array_size(t->messages) - 1);
        json_t *calls = json_object_get(last, "tool_calls");
        size_t n = json_array_size(calls);
        more = more < 4 ? 4 : more;
        for (size_t i = 0; i < n; i++) {
            json_t *m = message(r, "tool", "", more / (double)n);
            json_object_set(m, "tool_call_id", json_object_get(json_array_get(calls, i), "id"));
            json_array_append_new(t->messages, m);
        }
        if (n == 0)
            json_array_append_new(t->messages, message(r, "user", "", more));
    }
    t->last = request;
}

static bool launch(lane *l)
{
    run *r = l->r;
    const rp_request *request = &r->trace->requests[l->session->request_at + l->next];
    prepare(l, request);
    double out = request->out * r->o->scale;
    json_int_t output = out < 1 ? 1 : out > r->o->output_max ? r->o->output_max : (json_int_t)out;
    json_t *body = json_pack("{s:s,s:O,s:o,s:b,s:{s:b},s:I,s:I}", "model", r->o->model, "messages",
                             talk_of(l, request)->messages, "tools", tools(), "stream", 1,
                             "stream_options", "include_usage", 1, "max_completion_tokens", output,
                             "seed", (json_int_t)r->o->seed);
    free(l->body);
    l->body = json_dumps(body, JSON_COMPACT);
    json_decref(body);
    if (l->body == NULL)
        return false;
    lane_clear(l);
    char url[1024];
    snprintf(url, sizeof url, "%s/v1/chat/completions", r->o->url);
    curl_easy_reset(l->curl);
    curl_easy_setopt(l->curl, CURLOPT_URL, url);
    curl_easy_setopt(l->curl, CURLOPT_HTTP_VERSION,
                     r->o->http2 ? (long)CURL_HTTP_VERSION_2_PRIOR_KNOWLEDGE
                                 : (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(l->curl, CURLOPT_HTTPHEADER, l->headers);
    curl_easy_setopt(l->curl, CURLOPT_POSTFIELDS, l->body);
    curl_easy_setopt(l->curl, CURLOPT_POSTFIELDSIZE, (long)strlen(l->body));
    curl_easy_setopt(l->curl, CURLOPT_WRITEFUNCTION, on_bytes);
    curl_easy_setopt(l->curl, CURLOPT_WRITEDATA, l);
    curl_easy_setopt(l->curl, CURLOPT_PRIVATE, l);
    curl_easy_setopt(l->curl, CURLOPT_TIMEOUT, REQUEST_SECONDS_MAX);
    curl_easy_setopt(l->curl, CURLOPT_NOSIGNAL, 1L);
    /* With libcurl 7.88 the second request of a prior-knowledge connection fails in a multi handle
     * ("Error in the HTTP2 framing layer"). */
    curl_easy_setopt(l->curl, CURLOPT_FRESH_CONNECT, (long)r->o->http2);
    curl_easy_setopt(l->curl, CURLOPT_FORBID_REUSE, (long)r->o->http2);
    l->sent_ns = base_now_ns();
    l->state = LANE_BUSY;
    l->sent++;
    return curl_multi_add_handle(r->multi, l->curl) == CURLM_OK;
}

/* The same value with spaces that the model did not write. */
static char *reserialise(const char *arguments)
{
    json_t *value = json_loads(arguments, JSON_DECODE_ANY, NULL);
    char *text =
        value != NULL ? json_dumps(value, JSON_ENCODE_ANY | JSON_SORT_KEYS | JSON_INDENT(1)) : NULL;
    json_decref(value);
    return text;
}

static void add_answer(lane *l, talk *t)
{
    rp_habit habit = l->r->o->habit;
    json_t *m = json_pack("{s:s,s:s?}", "role", "assistant", "content",
                          l->text.length > 0  ? l->text.data
                          : l->call_count > 0 ? NULL
                                              : "");
    if (m == NULL) /* bytes that are no UTF-8: cannot be sent back */
        m = json_pack("{s:s,s:s}", "role", "assistant", "content", "");
    if (habit != RP_HABIT_DROP && l->reasoning.length > 0)
        json_object_set_new(m, "reasoning_content", json_string(l->reasoning.data));
    if (l->call_count > 0) {
        json_t *calls = json_array();
        for (uint32_t i = 0; i < l->call_count; i++) {
            call *c = &l->calls[i];
            const char *text = c->arguments.length > 0 ? c->arguments.data : "{}";
            char *other = habit == RP_HABIT_RESERIALISE ? reserialise(text) : NULL;
            json_array_append_new(calls, json_pack("{s:s,s:s,s:{s:s,s:s}}", "id",
                                                   c->id.length > 0 ? c->id.data : "", "type",
                                                   "function", "function", "name",
                                                   c->name.length > 0 ? c->name.data : "",
                                                   "arguments", other != NULL ? other : text));
            free(other);
        }
        json_object_set_new(m, "tool_calls", calls);
    }
    json_array_append_new(t->messages, m);
}

static void put_time(bucket *b, double ms)
{
    if (b->count == b->room) {
        uint32_t room = b->room < 64 ? 64 : b->room * 2;
        double *more = realloc(b->ms, room * sizeof *more);
        if (more == NULL)
            return;
        b->ms = more;
        b->room = room;
    }
    b->ms[b->count++] = ms;
}

static void leave(lane *l)
{
    for (uint32_t i = 0; i < AGENTS_MAX; i++) {
        json_decref(l->talks[i].messages);
        l->talks[i] = (talk){0};
    }
    l->session = NULL;
    l->state = LANE_IDLE;
}

static double seconds_of(double recorded, const rp_server_options *o)
{
    if (recorded < 0 || o->speed <= 0)
        return 0;
    return (recorded < o->pause_max_s ? recorded : o->pause_max_s) / o->speed;
}

/* The request is answered: counts it, and the next one becomes due. */
static void finish(lane *l, CURLcode code)
{
    run *r = l->r;
    const rp_request *request = &r->trace->requests[l->session->request_at + l->next];
    talk *t = talk_of(l, request);
    long status = 0;
    curl_easy_getinfo(l->curl, CURLINFO_RESPONSE_CODE, &status);
    curl_multi_remove_handle(r->multi, l->curl);
    uint64_t now = base_now_ns();
    bool full =
        status == 400 && strstr(l->line.data != NULL ? l->line.data : "", "context") != NULL;
    if (code != CURLE_OK || status != 200 || l->error[0] != '\0' || l->broken || !l->finished ||
        !l->has_usage) {
        if (!full) {
            r->failed++;
            fprintf(stderr, "whimbrel-replay: %s, request %u: %s%s%.200s\n", l->session->name,
                    l->next,
                    code != CURLE_OK      ? curl_easy_strerror(code)
                    : status != 200       ? "refused: "
                    : l->error[0] != '\0' ? "error in the stream: "
                                          : "the stream is not whole",
                    l->error, status != 200 && l->line.data != NULL ? l->line.data : "");
        }
        leave(l);
        return;
    }
    uint32_t uncached = l->prompt > l->cached ? l->prompt - l->cached : 0, b = 0;
    while (uncached > bucket_end[b])
        b++;
    if (l->first_ns != 0)
        put_time(&r->buckets[b], (double)(l->first_ns - l->sent_ns) / 1e6);
    uint32_t ideal = l->fresh ? 0 : t->known < l->prompt ? t->known : l->prompt;
    /* A new conversation may still share the tools and system prompt of an earlier one: what was
     * found there was possible. */
    r->ideal += ideal > l->cached ? ideal : l->cached;
    r->prompt += l->prompt;
    r->cached += l->cached;
    r->completion += l->completion;
    r->decode_ns += l->first_ns != 0 ? now - l->first_ns : 0;
    r->turns++;
    if (l->fresh) {
        r->chars_sent += (double)strlen(l->body);
        r->tokens_counted += l->prompt;
    }
    t->known = l->prompt + l->completion;
    if (r->o->json) {
        printf("{\"session\":\"%s\",\"request\":%u,\"agent\":%u,\"prompt\":%u,\"cached\":%u,"
               "\"ideal\":%u,\"output\":%u,\"ttft_ms\":%.3f}\n",
               l->session->name, l->next, request->agent, l->prompt, l->cached, ideal,
               l->completion, l->first_ns != 0 ? (double)(l->first_ns - l->sent_ns) / 1e6 : -1.0);
        fflush(stdout);
    }
    add_answer(l, t);
    l->next++;
    if (r->trace->open || l->next >= l->session->request_count ||
        (r->o->turns_max > 0 && l->sent >= r->o->turns_max) ||
        (r->o->context_max > 0 && t->known > r->o->context_max)) {
        leave(l);
        return;
    }
    double wait = request[1].at_s - request->at_s - request->took_s;
    l->due_ns = now + (uint64_t)(seconds_of(wait, r->o) * 1e9);
    l->state = LANE_DUE;
}

/* ---- all lanes ---- */

static bool lane_open(lane *l, run *r)
{
    l->r = r;
    l->talks = calloc(AGENTS_MAX, sizeof *l->talks);
    l->curl = curl_easy_init();
    l->headers = curl_slist_append(NULL, "content-type: application/json");
    if (r->o->key != NULL) {
        char header[512];
        snprintf(header, sizeof header, "authorization: Bearer %s", r->o->key);
        l->headers = curl_slist_append(l->headers, header);
    }
    base_buf_init(&l->line, ANSWER_BYTES_MAX);
    base_buf_init(&l->text, ANSWER_BYTES_MAX);
    base_buf_init(&l->reasoning, ANSWER_BYTES_MAX);
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        base_buf_init(&l->calls[i].id, 4096);
        base_buf_init(&l->calls[i].name, 4096);
        base_buf_init(&l->calls[i].arguments, ANSWER_BYTES_MAX);
    }
    return l->talks != NULL && l->curl != NULL && l->headers != NULL;
}

static void lane_close(lane *l)
{
    if (l->talks != NULL)
        leave(l);
    free(l->talks);
    if (l->curl != NULL)
        curl_easy_cleanup(l->curl);
    curl_slist_free_all(l->headers);
    free(l->body);
    base_buf_deinit(&l->line);
    base_buf_deinit(&l->text);
    base_buf_deinit(&l->reasoning);
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        base_buf_deinit(&l->calls[i].id);
        base_buf_deinit(&l->calls[i].name);
        base_buf_deinit(&l->calls[i].arguments);
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_totals(run *r)
{
    double share = r->prompt > 0 ? 100.0 * (double)r->cached / (double)r->prompt : 0;
    double ideal = r->ideal > 0 ? 100.0 * (double)r->cached / (double)r->ideal : 0;
    if (r->trace->open) { /* what could have been found depends on what came before */
        printf(r->o->json ? "{\"requests\":%u,\"failed\":%u,\"prompt\":%llu,\"cached_pct\":%.2f,"
                            "\"output\":%llu}\n"
                          : "%u requests, %u failed; %llu prompt tokens, cached %.2f %%; %llu "
                            "output tokens\n",
               r->turns, r->failed, (unsigned long long)r->prompt, share,
               (unsigned long long)r->completion);
        return;
    }
    const char *form =
        r->o->json ? "{\"turns\":%u,\"failed\":%u,\"forks\":%u,\"rewrites\":%u,\"prompt\":%llu,"
                     "\"cached_pct\":%.2f,\"of_ideal_pct\":%.2f,\"output\":%llu}\n"
                   : "%u turns, %u failed, %u forks, %u rewritten histories; %llu prompt tokens, "
                     "cached %.2f %%, %.2f %% of ideal; %llu output tokens\n";
    printf(form, r->turns, r->failed, r->forks, r->rewrites, (unsigned long long)r->prompt, share,
           ideal, (unsigned long long)r->completion);
}

static void print_buckets(run *r)
{
    if (!r->o->json)
        printf("%-18s %7s %10s %10s %10s\n", "uncached tokens", "turns", "TTFT p50", "p95", "max");
    for (uint32_t b = 0; b < BUCKETS; b++) {
        bucket *k = &r->buckets[b];
        if (k->count == 0)
            continue;
        qsort(k->ms, k->count, sizeof *k->ms, by_value);
        char name[24];
        if (bucket_end[b] == UINT32_MAX)
            snprintf(name, sizeof name, "> %u", bucket_end[b - 1]);
        else
            snprintf(name, sizeof name, "<= %u", bucket_end[b]);
        printf(r->o->json ? "{\"uncached\":\"%s\",\"turns\":%u,\"ttft_p50_ms\":%.3f,"
                            "\"ttft_p95_ms\":%.3f,\"ttft_max_ms\":%.3f}\n"
                          : "%-18s %7u %7.1f ms %7.1f ms %7.1f ms\n",
               name, k->count, k->ms[k->count / 2], k->ms[(size_t)(k->count * 0.95)],
               k->ms[k->count - 1]);
    }
}

/* The next request of an open trace, due at its recorded arrival. */
static void take_request(run *r, lane *l)
{
    l->session = &r->trace->sessions[r->next_session];
    l->next = r->next_request++;
    l->sent = 0;
    if (r->next_request >= l->session->request_count) {
        r->next_session++;
        r->next_request = 0;
    }
    if (l->next >= l->session->request_count)
        return; /* an empty one */
    double at_s = r->trace->requests[l->session->request_at + l->next].at_s;
    l->due_ns = r->start_ns + (r->o->speed > 0 ? (uint64_t)(at_s / r->o->speed * 1e9) : 0);
    l->state = LANE_DUE;
}

/* Gives idle lanes sessions and sends what is due; returns lanes that are not idle, and in
 * `*wait_ms` the time until the next is due. */
static uint32_t step(run *r, int *wait_ms, base_err *err)
{
    uint32_t alive = 0;
    uint64_t now = base_now_ns();
    *wait_ms = 1000;
    for (uint32_t i = 0; i < r->o->lanes; i++) {
        lane *l = &r->lanes[i];
        while (l->state == LANE_IDLE && r->next_session < r->trace->session_count) {
            if (r->trace->open) {
                take_request(r, l);
                continue;
            }
            l->session = &r->trace->sessions[r->next_session++];
            l->next = l->sent = 0;
            l->due_ns = now;
            l->state = l->session->request_count > 0 ? LANE_DUE : LANE_IDLE;
        }
        if (l->state == LANE_DUE && l->due_ns <= now && !launch(l)) {
            base_fail(err, BASE_NOMEM, "no memory for a request");
            return 0;
        }
        if (l->state == LANE_DUE && (l->due_ns - now) / 1000000 < (uint64_t)*wait_ms)
            *wait_ms = (int)((l->due_ns - now) / 1000000) + 1;
        alive += l->state != LANE_IDLE;
    }
    return alive;
}

base_code rp_server_run(const rp_trace *trace, const rp_server_options *options, base_err *err)
{
    run r = {.trace = trace, .o = options, .start_ns = base_now_ns()};
    curl_global_init(CURL_GLOBAL_DEFAULT);
    r.multi = curl_multi_init();
    r.lanes = calloc(options->lanes, sizeof *r.lanes);
    bool ready = r.multi != NULL && r.lanes != NULL;
    for (uint32_t i = 0; ready && i < options->lanes; i++)
        ready = lane_open(&r.lanes[i], &r);
    if (!ready)
        base_fail(err, BASE_NOMEM, "no memory for %u lanes", options->lanes);
    if (options->cold)
        snprintf(r.mark, sizeof r.mark, "[rid:%012llx] ",
                 (unsigned long long)(base_wall_ms() & 0xFFFFFFFFFFFF));
    int wait_ms, running;
    while (ready && step(&r, &wait_ms, err) > 0) {
        curl_multi_perform(r.multi, &running);
        CURLMsg *done;
        int left;
        bool any = false;
        while ((done = curl_multi_info_read(r.multi, &left)) != NULL) {
            lane *l = NULL;
            curl_easy_getinfo(done->easy_handle, CURLINFO_PRIVATE, (char **)&l);
            finish(l, done->data.result);
            any = true;
        }
        if (!any)
            curl_multi_poll(r.multi, NULL, 0, wait_ms, NULL);
    }
    if (ready) {
        print_totals(&r);
        print_buckets(&r);
    }
    for (uint32_t i = 0; r.lanes != NULL && i < options->lanes; i++)
        if (r.lanes[i].r != NULL)
            lane_close(&r.lanes[i]);
    for (uint32_t b = 0; b < BUCKETS; b++)
        free(r.buckets[b].ms);
    free(r.lanes);
    if (r.multi != NULL)
        curl_multi_cleanup(r.multi);
    curl_global_cleanup();
    if (r.failed > 0)
        base_fail(err, BASE_IO, "%u of %u turns failed", r.failed, r.failed + r.turns);
    return !ready ? BASE_NOMEM : r.failed > 0 ? BASE_IO : BASE_OK;
}
