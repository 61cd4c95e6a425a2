/* whimbrel-session: a scripted agent that plays a tool session against a server over HTTP/2.
 *
 * It is a client and nothing else: it draws tools, names and values from a seed, asks in plain
 * English, runs the calls that the model makes against made-up results, and says of each call
 * whether it is the one the request meant. The server sees an ordinary OpenAI chat completion; what
 * was expected never leaves this program.
 *
 * HTTP/2 by prior knowledge (h2c). */
#include <curl/curl.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/clock.h"
#include "engine/base/rand.h"

#define TURNS 3
#define REQUEST_SECONDS_MAX 120L

/* ---- what there is to draw from ---- */

static const char *const cities[] = {"Oslo",   "Lisbon", "Kyoto", "Nairobi", "Quito", "Tallinn",
                                     "Galway", "Bergen", "Turin", "Hobart",  "Ghent", "Porto",
                                     "Izmir",  "Cusco",  "Malmo", "Leeds"};
static const char *const people[] = {"ann",  "bo",   "carla", "dmitri", "esra", "farid",
                                     "gwen", "hugo", "ines",  "jonas",  "kira", "liam"};
static const char *const hosts[] = {"example.com", "example.org", "mail.test", "post.example"};
static const char *const files[] = {"notes/plan.md", "src/main.c",  "report.txt",
                                    "docs/setup.md", "config.yaml", "data/sales.csv",
                                    "todo.txt",      "README.md"};
static const char *const tasks[] = {"water the plants", "call the bank",     "buy milk",
                                    "renew the lease",  "feed the cat",      "send the invoice",
                                    "book a dentist",   "pick up the parcel"};
static const char *const hours[] = {"8 am", "9 am", "10 am", "noon", "3 pm", "5pm", "6 pm", "8 pm"};
static const char *const subjects[] = {"Budget",  "Lunch",   "Schedule",
                                       "Invoice", "Meeting", "Travel plans"};
static const char *const bodies[] = {"See you on Friday",     "The numbers are ready",
                                     "Please call me back",   "I will be late",
                                     "The order has arrived", "Thanks for your help"};
static const char *const skies[] = {"rain", "sunny", "cloudy", "snow", "windy", "fog"};
static const char *const words[] = {"harbour", "lantern", "orchard", "signal",
                                    "velvet",  "compass", "meadow",  "copper"};

#define DRAW(rng, list) (list)[draw(rng, sizeof(list) / sizeof *(list))]

typedef struct dice {
    uint64_t seed, index;
} dice;

static uint32_t draw(dice *rng, uint32_t bound)
{
    return base_rand(rng->seed, 0, rng->index++).v[0] % bound;
}

/* ---- scenarios: a tool, a request, the call it means, a result and a word its answer must carry
 * ---- */

typedef struct task {
    const char *tool; /* JSON of the tool object */
    char ask[256];
    char name[32];
    json_t *arguments;
    char result[256];
    char answer[64];
} task;

static void set(char *out, size_t size, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(out, size, fmt, args);
    va_end(args);
}

#define TOOL(name, text, properties, required)                                                     \
    "{\"type\":\"function\",\"function\":{\"name\":\"" name "\",\"description\":\"" text           \
    "\",\"parameters\":{\"type\":\"object\",\"properties\":{" properties                           \
    "},\"required\":[" required "]}}}"
#define STRING(name, text) "\"" name "\":{\"type\":\"string\",\"description\":\"" text "\"}"
#define INTEGER(name, text) "\"" name "\":{\"type\":\"integer\",\"description\":\"" text "\"}"

static void make_weather(task *t, dice *rng)
{
    static const char *const asks[] = {
        "What's the weather in %s?", "How is the weather in %s right now?",
        "Do I need an umbrella in %s?", "Check the weather for %s, please."};
    const char *city = DRAW(rng, cities), *sky = DRAW(rng, skies);
    t->tool = TOOL("get_weather", "Get the current weather for a city.",
                   STRING("city", "The city name"), "\"city\"");
    set(t->name, sizeof t->name, "get_weather");
    set(t->ask, sizeof t->ask, DRAW(rng, asks), city);
    t->arguments = json_pack("{s:s}", "city", city);
    set(t->result, sizeof t->result, "{\"temperature\": %u, \"condition\": \"%s\"}",
        3 + draw(rng, 25), sky);
    set(t->answer, sizeof t->answer, "%s", sky);
}

static void make_mail(task *t, dice *rng)
{
    const char *subject = DRAW(rng, subjects), *body = DRAW(rng, bodies);
    char to[64];
    set(to, sizeof to, "%s@%s", DRAW(rng, people), DRAW(rng, hosts));
    t->tool = TOOL("send_email", "Send an email to one recipient.",
                   STRING("to", "Recipient address") "," STRING(
                       "subject", "Subject line") "," STRING("body", "Text of the mail"),
                   "\"to\",\"subject\",\"body\"");
    set(t->name, sizeof t->name, "send_email");
    set(t->ask, sizeof t->ask, "Send an email to %s with the subject \"%s\" saying \"%s\".", to,
        subject, body);
    t->arguments = json_pack("{s:s,s:s,s:s}", "to", to, "subject", subject, "body", body);
    set(t->result, sizeof t->result, "{\"status\": \"sent\", \"id\": \"m-%u\"}",
        1000 + draw(rng, 9000));
    set(t->answer, sizeof t->answer, "sent");
}

static void make_file(task *t, dice *rng)
{
    static const char *const asks[] = {"Read the file %s.", "Show me what is inside %s.",
                                       "What does %s say?", "Open %s, please."};
    const char *path = DRAW(rng, files), *word = DRAW(rng, words);
    t->tool =
        TOOL("read_file", "Read a text file.", STRING("path", "Path of the file"), "\"path\"");
    set(t->name, sizeof t->name, "read_file");
    set(t->ask, sizeof t->ask, DRAW(rng, asks), path);
    t->arguments = json_pack("{s:s}", "path", path);
    set(t->result, sizeof t->result, "%s", word);
    set(t->answer, sizeof t->answer, "%s", word);
}

static void make_reminder(task *t, dice *rng)
{
    const char *what = DRAW(rng, tasks);
    char when[32];
    set(when, sizeof when, "at %s", DRAW(rng, hours));
    t->tool = TOOL("set_reminder", "Create a reminder.",
                   STRING("text", "What to be reminded of") "," STRING("time", "When to remind"),
                   "\"text\",\"time\"");
    set(t->name, sizeof t->name, "set_reminder");
    set(t->ask, sizeof t->ask, "Remind me to %s %s.", what, when);
    t->arguments = json_pack("{s:s,s:s}", "text", what, "time", when);
    set(t->result, sizeof t->result, "{\"status\": \"created\", \"id\": \"r-%u\"}",
        10 + draw(rng, 90));
    set(t->answer, sizeof t->answer, "created");
}

static void make_timer(task *t, dice *rng)
{
    static const char *const asks[] = {"Set a timer for %u minutes.",
                                       "Start a %u minute timer, please.",
                                       "Give me a timer of %u minutes."};
    uint32_t minutes = 2 + draw(rng, 58);
    t->tool = TOOL("set_timer", "Start a countdown timer.", INTEGER("minutes", "How many minutes"),
                   "\"minutes\"");
    set(t->name, sizeof t->name, "set_timer");
    set(t->ask, sizeof t->ask, DRAW(rng, asks), minutes);
    t->arguments = json_pack("{s:i}", "minutes", (int)minutes);
    set(t->result, sizeof t->result, "{\"status\": \"running\"}");
    set(t->answer, sizeof t->answer, "running");
}

static void make_search(task *t, dice *rng)
{
    static const char *const asks[] = {"Search the web for %s %s.", "Look up %s %s online."};
    const char *a = DRAW(rng, words), *b = DRAW(rng, words), *hit = DRAW(rng, words);
    char query[64];
    set(query, sizeof query, "%s %s", a, b);
    t->tool =
        TOOL("web_search", "Search the web.", STRING("query", "Words to search for"), "\"query\"");
    set(t->name, sizeof t->name, "web_search");
    set(t->ask, sizeof t->ask, DRAW(rng, asks), a, b);
    t->arguments = json_pack("{s:s}", "query", query);
    set(t->result, sizeof t->result, "{\"title\": \"The %s\"}", hit);
    set(t->answer, sizeof t->answer, "%s", hit);
}

static void (*const makers[])(task *, dice *) = {make_weather,  make_mail,  make_file,
                                                 make_reminder, make_timer, make_search};
#define MAKERS (sizeof makers / sizeof *makers)

/* ---- one streamed request ---- */

typedef struct reply {
    base_buf line, text, reasoning, arguments;
    json_t *calls; /* as the message has them */
    json_t *usage;
    json_t *error;
    char finish[32];
    uint64_t sent_ns, first_ns, done_ns;
    bool broken; /* a record did not parse */
} reply;

static void reply_init(reply *r)
{
    *r = (reply){0};
    base_buf_init(&r->line, 1 << 20);
    base_buf_init(&r->text, 1 << 20);
    base_buf_init(&r->reasoning, 1 << 20);
    base_buf_init(&r->arguments, 1 << 20);
    r->calls = json_array();
}

static void reply_deinit(reply *r)
{
    base_buf_deinit(&r->line);
    base_buf_deinit(&r->text);
    base_buf_deinit(&r->reasoning);
    base_buf_deinit(&r->arguments);
    json_decref(r->calls);
    json_decref(r->usage);
    json_decref(r->error);
}

static void take_call(reply *r, const json_t *delta)
{
    size_t index = (size_t)json_integer_value(json_object_get(delta, "index"));
    json_t *function = json_object_get(delta, "function");
    if (index == json_array_size(r->calls)) {
        json_array_append_new(r->calls,
                              json_pack("{s:s,s:s,s:{s:s,s:s}}", "id",
                                        json_string_value(json_object_get(delta, "id")) ?: "",
                                        "type", "function", "function", "name",
                                        json_string_value(json_object_get(function, "name")) ?: "",
                                        "arguments", ""));
        base_buf_clear(&r->arguments);
    }
    json_t *call = json_array_get(r->calls, index);
    const char *more = json_string_value(json_object_get(function, "arguments"));
    if (call == NULL || more == NULL)
        return;
    base_buf_puts(&r->arguments, more);
    json_object_set_new(json_object_get(call, "function"), "arguments",
                        json_string(r->arguments.data != NULL ? r->arguments.data : ""));
}

static void take_record(reply *r, const char *data)
{
    if (strcmp(data, "[DONE]") == 0)
        return;
    json_t *record = json_loads(data, 0, NULL);
    if (record == NULL) {
        r->broken = true;
        return;
    }
    json_t *error = json_object_get(record, "error"), *usage = json_object_get(record, "usage");
    if (error != NULL)
        r->error = json_incref(error);
    if (json_is_object(usage) && r->usage == NULL)
        r->usage = json_incref(usage);
    json_t *choice = json_array_get(json_object_get(record, "choices"), 0);
    json_t *delta = json_object_get(choice, "delta");
    const char *text = json_string_value(json_object_get(delta, "content"));
    const char *reasoning = json_string_value(json_object_get(delta, "reasoning_content"));
    const char *finish = json_string_value(json_object_get(choice, "finish_reason"));
    json_t *calls = json_object_get(delta, "tool_calls");
    if (r->first_ns == 0 && ((text != NULL && *text != '\0') || reasoning != NULL || calls != NULL))
        r->first_ns = base_now_ns();
    if (text != NULL)
        base_buf_puts(&r->text, text);
    if (reasoning != NULL)
        base_buf_puts(&r->reasoning, reasoning);
    size_t i;
    json_t *call;
    json_array_foreach(calls, i, call) take_call(r, call);
    if (finish != NULL)
        set(r->finish, sizeof r->finish, "%s", finish);
    json_decref(record);
}

static size_t on_bytes(char *bytes, size_t size, size_t count, void *ctx)
{
    reply *r = ctx;
    base_buf_add(&r->line, bytes, size * count);
    char *end;
    while (r->line.length > 0 && (end = memchr(r->line.data, '\n', r->line.length)) != NULL) {
        *end = '\0';
        if (strncmp(r->line.data, "data: ", 6) == 0)
            take_record(r, r->line.data + 6);
        base_buf_drop(&r->line, (size_t)(end - r->line.data) + 1);
    }
    return size * count;
}

/* False, with a line on stderr, if there was no proper answer. */
static bool ask(CURL *curl, const char *url, json_t *body, reply *r)
{
    char *text = json_dumps(body, JSON_COMPACT);
    char where[512];
    struct curl_slist *headers = curl_slist_append(NULL, "content-type: application/json");
    set(where, sizeof where, "%s/v1/chat/completions", url);
    curl_easy_setopt(curl, CURLOPT_URL, where);
    curl_easy_setopt(curl, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_2_PRIOR_KNOWLEDGE);
    /* A connection a request: libcurl 7.88 fails to take up a prior-knowledge connection again
     * ("Error in the HTTP2 framing layer"), whatever the server. */
    curl_easy_setopt(curl, CURLOPT_FORBID_REUSE, 1L);
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(curl, CURLOPT_POSTFIELDS, text);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_bytes);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, r);
    curl_easy_setopt(curl, CURLOPT_TIMEOUT, REQUEST_SECONDS_MAX);
    r->sent_ns = base_now_ns();
    CURLcode code = curl_easy_perform(curl);
    r->done_ns = base_now_ns();
    long status = 0;
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    curl_slist_free_all(headers);
    free(text);
    if (code != CURLE_OK)
        fprintf(stderr, "whimbrel-session: %s: %s\n", where, curl_easy_strerror(code));
    else if (status != 200)
        fprintf(stderr, "whimbrel-session: %s: HTTP %ld %s\n", where, status,
                r->line.data != NULL ? r->line.data : "");
    else if (r->error != NULL)
        fprintf(stderr, "whimbrel-session: the stream ended in an error: %s\n",
                json_string_value(json_object_get(r->error, "message")) ?: "");
    else if (r->broken || r->finish[0] == '\0')
        fprintf(stderr, "whimbrel-session: the stream was not well formed\n");
    else
        return true;
    return false;
}

/* ---- a session ---- */

/* Terminal styles, empty when the output is a file. */
static const char *bold = "\033[1m", *dim = "\033[2m", *green = "\033[32m", *red = "\033[31m",
                  *plain = "\033[0m";

typedef struct tally {
    uint32_t calls, calls_right, answers, answers_right;
    bool json;
} tally;

static bool call_right(const json_t *calls, const task *t)
{
    if (json_array_size(calls) != 1)
        return false;
    json_t *function = json_object_get(json_array_get(calls, 0), "function");
    const char *name = json_string_value(json_object_get(function, "name"));
    json_t *arguments =
        json_loads(json_string_value(json_object_get(function, "arguments")) ?: "", 0, NULL);
    bool right = name != NULL && strcmp(name, t->name) == 0 && json_equal(arguments, t->arguments);
    json_decref(arguments);
    return right;
}

static void print_figures(const reply *r)
{
    json_t *details = json_object_get(r->usage, "prompt_tokens_details");
    json_t *own = json_object_get(r->usage, "whimbrel");
    double decode_ms = json_number_value(json_object_get(own, "decode_ms"));
    long long output = json_integer_value(json_object_get(r->usage, "completion_tokens"));
    printf("      %sprompt %lld tokens, %lld cached; ttft %.1f ms; %lld tokens", dim,
           (long long)json_integer_value(json_object_get(r->usage, "prompt_tokens")),
           (long long)json_integer_value(json_object_get(details, "cached_tokens")),
           r->first_ns != 0 ? (double)(r->first_ns - r->sent_ns) / 1e6 : 0.0, output);
    if (decode_ms > 0 && output > 1)
        printf(" at %.0f tok/s", (double)(output - 1) * 1000 / decode_ms);
    long long drafted = json_integer_value(json_object_get(own, "drafted"));
    if (drafted > 0)
        printf("; drafts %lld of %lld kept",
               (long long)json_integer_value(json_object_get(own, "accepted")), drafted);
    printf("%s\n", plain);
}

static json_t *assistant_message(const reply *r)
{
    json_t *message = json_pack("{s:s,s:s?}", "role", "assistant", "content",
                                r->text.length > 0 ? r->text.data : NULL);
    if (r->reasoning.length > 0)
        json_object_set_new(message, "reasoning_content", json_string(r->reasoning.data));
    if (json_array_size(r->calls) > 0)
        json_object_set(message, "tool_calls", r->calls);
    return message;
}

/* A turn: the request, its calls run, and the answer. False if the server failed. */
static bool play_turn(CURL *curl, const char *url, json_t *body, const task *t, uint32_t turn,
                      tally *sum)
{
    json_t *messages = json_object_get(body, "messages");
    json_array_append_new(messages, json_pack("{s:s,s:s}", "role", "user", "content", t->ask));
    printf("  %s%u. user%s %s\n", bold, turn, plain, t->ask);
    /* A model may call more than once; a few rounds, then the turn is over whatever it does. */
    for (int round = 0; round < 3; round++) {
        reply r;
        reply_init(&r);
        if (!ask(curl, url, body, &r)) {
            reply_deinit(&r);
            return false;
        }
        json_array_append_new(messages, assistant_message(&r));
        if (r.reasoning.length > 0)
            printf("     %sthinks %s%s\n", dim, r.reasoning.data, plain);
        if (r.text.length > 0)
            printf("     says   %s\n", r.text.data);
        size_t i;
        json_t *call;
        bool right = round == 0 && call_right(r.calls, t);
        json_array_foreach(r.calls, i, call)
        {
            json_t *function = json_object_get(call, "function");
            const char *style = right ? green : red, *verdict = right ? "right" : "wrong";
            printf("     calls  %s(%s)%s%s%s%s\n",
                   json_string_value(json_object_get(function, "name")),
                   json_string_value(json_object_get(function, "arguments")), round > 0 ? "" : "  ",
                   round > 0 ? "" : style, round > 0 ? "" : verdict, round > 0 ? "" : plain);
            json_array_append_new(messages,
                                  json_pack("{s:s,s:s,s:s}", "role", "tool", "tool_call_id",
                                            json_string_value(json_object_get(call, "id")),
                                            "content", t->result));
        }
        size_t calls = json_array_size(r.calls);
        if (round == 0) {
            sum->calls++;
            sum->calls_right += right;
            if (calls == 0)
                printf("     %sno call, %s was meant%s\n", red, t->name, plain);
        }
        if (calls == 0 && round > 0) {
            sum->answers++;
            sum->answers_right += r.text.length > 0 && strstr(r.text.data, t->answer) != NULL;
        }
        print_figures(&r);
        reply_deinit(&r);
        if (calls == 0)
            return true;
        printf("     tool   %s\n", t->result);
    }
    return true;
}

static bool play_session(CURL *curl, const char *url, const char *model, uint64_t seed, tally *sum)
{
    dice rng = {.seed = seed};
    uint32_t order[MAKERS];
    for (uint32_t i = 0; i < MAKERS; i++) {
        uint32_t at = draw(&rng, i + 1);
        order[i] = order[at];
        order[at] = i;
    }
    /* Three of the tools are used, one more is there to be left alone. */
    task tasks_drawn[TURNS + 1] = {0};
    json_t *tools = json_array();
    for (uint32_t i = 0; i < TURNS + 1; i++) {
        makers[order[i]](&tasks_drawn[i], &rng);
        json_array_append_new(tools, json_loads(tasks_drawn[i].tool, 0, NULL));
    }
    json_t *body = json_pack("{s:s,s:[],s:o,s:b,s:{s:b},s:i,s:i}", "model", model, "messages",
                             "tools", tools, "stream", 1, "stream_options", "include_usage", 1,
                             "temperature", 0, "max_completion_tokens", 400);
    printf("session seed=%llu, tools", (unsigned long long)seed);
    for (uint32_t i = 0; i < TURNS + 1; i++)
        printf(" %s", tasks_drawn[i].name);
    printf("\n");
    bool good = true;
    for (uint32_t i = 0; i < TURNS && good; i++)
        good = play_turn(curl, url, body, &tasks_drawn[i], i + 1, sum);
    json_decref(body);
    for (uint32_t i = 0; i < TURNS + 1; i++)
        json_decref(tasks_drawn[i].arguments);
    return good;
}

static int usage(FILE *out)
{
    fprintf(out, "usage: whimbrel-session [--url http://127.0.0.1:8080] [--model nano] [--seed N] "
                 "[--sessions N]\n"
                 "                        [--right-min PERCENT]\n\n"
                 "Plays scripted tool sessions of three turns over HTTP/2 and says of each call "
                 "whether it was the one\n"
                 "that was meant. Exit status: 0 when every session ran to its end (and, with "
                 "--right-min, at least\n"
                 "that share of the calls was right), 1 otherwise, 2 for wrong arguments.\n");
    return out == stderr ? 2 : 0;
}

int main(int argc, char **argv)
{
    const char *url = "http://127.0.0.1:8080", *model = "nano";
    uint64_t seed = (uint64_t)(time(NULL) / 86400); /* the day */
    uint32_t sessions = 1, right_min = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0)
            return usage(stdout);
        if (i + 1 == argc)
            return usage(stderr);
        const char *value = argv[++i];
        if (strcmp(argv[i - 1], "--url") == 0)
            url = value;
        else if (strcmp(argv[i - 1], "--model") == 0)
            model = value;
        else if (strcmp(argv[i - 1], "--seed") == 0)
            seed = strtoull(value, NULL, 10);
        else if (strcmp(argv[i - 1], "--sessions") == 0)
            sessions = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(argv[i - 1], "--right-min") == 0)
            right_min = (uint32_t)strtoul(value, NULL, 10);
        else
            return usage(stderr);
    }
    if (!isatty(STDOUT_FILENO))
        bold = dim = green = red = plain = "";
    curl_global_init(CURL_GLOBAL_DEFAULT);
    CURL *curl = curl_easy_init();
    tally sum = {0};
    bool good = curl != NULL;
    for (uint32_t i = 0; i < sessions && good; i++)
        good = play_session(curl, url, model, seed + i, &sum);
    printf("calls right: %u of %u; answers that carry the result: %u of %u\n", sum.calls_right,
           sum.calls, sum.answers_right, sum.answers);
    curl_easy_cleanup(curl);
    curl_global_cleanup();
    return good && sum.calls_right * 100 >= right_min * sum.calls ? 0 : 1;
}
