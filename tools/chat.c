/* whimbrel-chat: a terminal client of native sessions.
 *
 * A turn sends only what is new; the server holds the conversation. Answers are shown as they come,
 * reasoning dimmed, calls of tools with their arguments. Tools come from a file; their results are
 * typed, or echoed from the arguments. Whatever a model or server says is printed without control
 * characters, so that no text can steer the terminal. Ctrl-C cancels the turn that runs, and leaves
 * where none does. */
#include <curl/curl.h>
#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/buf.h"

#define ANSWER_BYTES_MAX (64u << 20)
#define TOOL_ROUNDS_MAX 16 /* calls and results on one line of the user's */
#define EXIT_USAGE 2

static const char usage_text[] =
    "usage: whimbrel-chat [--url http://127.0.0.1:8080] [--model NAME] [--key KEY]\n"
    "                     [--system TEXT] [--tools FILE] [--session ID] [--max-tokens N]\n\n"
    "Talks to a model in a native session, which the server keeps.\n\n"
    "  --url         of the server's public port\n"
    "  --model       the first that the server offers\n"
    "  --key         or WHIMBREL_API_KEY; a server without keys needs none\n"
    "  --system      text that stands before a new session\n"
    "  --tools       JSON array of function tools, for a new session\n"
    "  --session     goes on with that one\n"
    "  --max-tokens  bound of one answer (1024)\n\n"
    "While it runs:\n\n"
    "  /sessions     the latest sessions; /open ID goes on with one\n"
    "  /new          begins another\n"
    "  /turns        the turns of this one\n"
    "  /fork [TURN]  a session that shares everything up to that turn, or to the last\n"
    "  /why          why the last turn was not wholly cached, and what it took\n"
    "  /system TEXT  for the next session\n"
    "  /help, /quit\n\n"
    "A call of a tool is shown; type its result, or nothing to echo its arguments back.\n"
    "Exit status: 0; 1 the server could not be reached or refused; 2 wrong arguments.\n";

/* Terminal styles, empty when the output is a file. */
static const char *bold = "\033[1m", *dim = "\033[2m", *yellow = "\033[33m", *red = "\033[31m",
                  *plain = "\033[0m";

static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal_number)
{
    (void)signal_number;
    interrupted = 1;
}

typedef struct chat {
    CURL *curl;
    struct curl_slist *headers;
    const char *url, *system;
    char model[256], session[64];
    json_t *tools;     /* NULL: none */
    json_t *last_turn; /* NULL: none yet */
    long tokens_max;
    bool typed; /* lines come from a person */
} chat;

/* ---- output ---- */

/* Bytes of the world without what a terminal obeys: C0 and C1 controls and DEL are shown as '?'. */
static void put_safe(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)text[i];
        bool c1 = byte == 0xC2 && i + 1 < length && (unsigned char)text[i + 1] < 0xA0;
        if (c1)
            i++;
        if (c1 || byte == 0x7F || (byte < 0x20 && byte != '\n' && byte != '\t'))
            putchar('?');
        else
            putchar(byte);
    }
}

static void put_text(const char *text)
{
    put_safe(text ? text : "", text ? strlen(text) : 0);
}

static const char *string_at(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

static long long integer_at(const json_t *object, const char *key)
{
    return (long long)json_integer_value(json_object_get(object, key));
}

static void complain(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fflush(stdout);
    fputs(red, stderr);
    vfprintf(stderr, fmt, args);
    fprintf(stderr, "%s\n", plain);
    va_end(args);
}

/* ---- HTTP ---- */

typedef struct answer {
    base_buf bytes; /* of a whole answer, or of the line that is incomplete */
    char event[32];
    bool stream;
    enum shown { NOTHING, REASONING, TEXT, CALL } shown; /* what stands on this line */
    json_t *turn, *error;
} answer;

/* Another kind, and another call, begin on a line of their own. */
static void begin(answer *a, enum shown shown)
{
    const char *const styles[] = {"", dim, "", yellow};
    if (a->shown == shown && shown != CALL)
        return;
    if (a->shown != NOTHING)
        printf("%s\n", plain);
    fputs(styles[shown], stdout);
    a->shown = shown;
}

static void take_delta(answer *a, const json_t *delta)
{
    const char *type = string_at(delta, "type");
    if (strcmp(type, "tool_call") != 0) {
        begin(a, strcmp(type, "reasoning") == 0 ? REASONING : TEXT);
        put_text(string_at(delta, "text"));
    } else if (json_object_get(delta, "name")) {
        begin(a, CALL);
        put_text(string_at(delta, "name"));
        putchar(' ');
    } else {
        put_text(string_at(delta, "arguments"));
    }
    fflush(stdout);
}

static void take_line(answer *a, const char *line)
{
    if (strncmp(line, "event: ", 7) == 0) {
        snprintf(a->event, sizeof a->event, "%s", line + 7);
        return;
    }
    if (strncmp(line, "data: ", 6) != 0)
        return;
    json_t *data = json_loads(line + 6, 0, NULL);
    if (strcmp(a->event, "turn.delta") == 0) {
        take_delta(a, data);
    } else if (strcmp(a->event, "turn.completed") == 0 && !a->turn) {
        a->turn = json_incref(json_object_get(data, "turn"));
    } else if (strcmp(a->event, "error") == 0 && !a->error) {
        a->error = json_incref(json_object_get(data, "error"));
    }
    json_decref(data);
}

static size_t on_bytes(char *bytes, size_t size, size_t count, void *ctx)
{
    answer *a = ctx;
    char *end;
    base_buf_add(&a->bytes, bytes, size * count);
    if (a->bytes.failed)
        return 0;
    while (a->stream && a->bytes.length > 0 &&
           (end = memchr(a->bytes.data, '\n', a->bytes.length)) != NULL) {
        *end = '\0';
        take_line(a, a->bytes.data);
        base_buf_drop(&a->bytes, (size_t)(end - a->bytes.data) + 1);
    }
    return size * count;
}

static size_t on_header(char *bytes, size_t size, size_t count, void *ctx)
{
    static const char type[] = "content-type: text/event-stream";
    answer *a = ctx;
    if (size * count >= sizeof type - 1 && strncasecmp(bytes, type, sizeof type - 1) == 0)
        a->stream = true;
    return size * count;
}

static int on_progress(void *ctx, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d)
{
    (void)ctx, (void)a, (void)b, (void)c, (void)d;
    return interrupted;
}

/* The answer's object, a stream's last turn; NULL, with a line on stderr, if there is none. `body`
 * is taken, NULL: none. */
static json_t *call(chat *c, const char *method, const char *path, json_t *body)
{
    char where[1024];
    answer a = {0};
    json_t *out = NULL;
    long status = 0;
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    base_buf_init(&a.bytes, ANSWER_BYTES_MAX);
    snprintf(where, sizeof where, "%s%s", c->url, path);
    interrupted = 0;
    curl_easy_reset(c->curl);
    curl_easy_setopt(c->curl, CURLOPT_URL, where);
    curl_easy_setopt(c->curl, CURLOPT_CUSTOMREQUEST, method);
    curl_easy_setopt(c->curl, CURLOPT_HTTPHEADER, c->headers);
    curl_easy_setopt(c->curl, CURLOPT_WRITEFUNCTION, on_bytes);
    curl_easy_setopt(c->curl, CURLOPT_WRITEDATA, &a);
    curl_easy_setopt(c->curl, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(c->curl, CURLOPT_HEADERDATA, &a);
    curl_easy_setopt(c->curl, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(c->curl, CURLOPT_XFERINFOFUNCTION, on_progress);
    if (text)
        curl_easy_setopt(c->curl, CURLOPT_POSTFIELDS, text);
    CURLcode code = curl_easy_perform(c->curl);
    curl_easy_getinfo(c->curl, CURLINFO_RESPONSE_CODE, &status);
    if (a.shown != NOTHING)
        printf("%s\n", plain);
    if (code == CURLE_ABORTED_BY_CALLBACK) {
        complain("cancelled");
    } else if (code != CURLE_OK) {
        complain("%s: %s", c->url, curl_easy_strerror(code));
    } else if (a.stream) {
        out = json_incref(a.turn);
        if (!out && !a.error)
            complain("the stream ended before the turn did");
    } else {
        out = a.bytes.data ? json_loadb(a.bytes.data, a.bytes.length, 0, NULL) : NULL;
        if (status != 200 || !out) {
            a.error = json_incref(json_object_get(out, "error"));
            json_decref(out);
            out = NULL;
            if (!a.error)
                complain("%s: HTTP %ld", where, status);
        }
    }
    if (a.error) {
        fputs(red, stdout);
        put_text(string_at(a.error, "message"));
        printf("%s\n", plain);
    }
    interrupted = 0;
    base_buf_deinit(&a.bytes);
    json_decref(a.turn);
    json_decref(a.error);
    json_decref(body);
    free(text);
    return out;
}

/* ---- sessions ---- */

static void leave_session(chat *c)
{
    c->session[0] = '\0';
    json_decref(c->last_turn);
    c->last_turn = NULL;
}

static void enter(chat *c, const json_t *session)
{
    leave_session(c);
    snprintf(c->session, sizeof c->session, "%s", string_at(session, "id"));
    snprintf(c->model, sizeof c->model, "%s", string_at(session, "model"));
    printf("%s%s, %lld turns, model %s%s\n", dim, c->session, integer_at(session, "turns"),
           c->model, plain);
}

static bool open_session(chat *c, const char *id)
{
    char path[160];
    snprintf(path, sizeof path, "/v1/sessions/%.100s", id);
    json_t *session = call(c, "GET", path, NULL);
    if (session)
        enter(c, session);
    json_decref(session);
    return session != NULL;
}

static bool make_session(chat *c)
{
    json_t *body = json_pack("{s:s}", "model", c->model);
    if (c->system && *c->system)
        json_object_set_new(body, "system", json_string(c->system));
    if (c->tools)
        json_object_set(body, "tools", c->tools);
    json_t *session = call(c, "POST", "/v1/sessions", body);
    if (session)
        enter(c, session);
    json_decref(session);
    return session != NULL;
}

static bool choose_model(chat *c)
{
    if (c->model[0])
        return true;
    json_t *list = call(c, "GET", "/v1/models", NULL);
    snprintf(c->model, sizeof c->model, "%s",
             string_at(json_array_get(json_object_get(list, "data"), 0), "id"));
    json_decref(list);
    return c->model[0] != '\0';
}

static void show_figures(const json_t *turn)
{
    json_t *usage = json_object_get(turn, "usage"), *own = json_object_get(usage, "whimbrel");
    json_t *first = json_object_get(own, "ttft_ms");
    printf("%s%lld of %lld cached, %lld made, first after %.0f ms%s\n", dim,
           integer_at(json_object_get(turn, "cache"), "hit"), integer_at(usage, "prompt_tokens"),
           integer_at(usage, "completion_tokens"), json_number_value(first), plain);
}

/* Results for the calls of a turn's answer, as items; NULL if it made none. */
static json_t *run_tools(chat *c, const json_t *turn)
{
    json_t *items = json_object_get(turn, "items");
    json_t *calls =
        json_object_get(json_array_get(items, json_array_size(items) - 1), "tool_calls");
    json_t *results = json_array_size(calls) > 0 ? json_array() : NULL, *one;
    size_t i;
    json_array_foreach(calls, i, one)
    {
        json_t *function = json_object_get(one, "function");
        const char *echo = string_at(function, "arguments");
        char *line = NULL;
        size_t size = 0;
        ssize_t length = 0;
        if (c->typed) {
            fputs(yellow, stdout);
            put_text(string_at(function, "name"));
            printf("%s returns> ", plain);
            fflush(stdout);
            length = getline(&line, &size, stdin);
            if (length > 0 && line[length - 1] == '\n')
                line[--length] = '\0';
        }
        json_array_append_new(results,
                              json_pack("{s:s,s:s,s:s}", "role", "tool", "tool_call_id",
                                        string_at(one, "id"), "content", length > 0 ? line : echo));
        free(line);
    }
    return results;
}

static bool run_turn(chat *c, const char *text)
{
    char path[160];
    json_t *items = json_pack("[{s:s,s:s}]", "role", "user", "content", text);
    if (!items) {
        complain("this line is not UTF-8");
        return true;
    }
    if (!c->session[0] && !make_session(c)) {
        json_decref(items);
        return false;
    }
    snprintf(path, sizeof path, "/v1/sessions/%s/turns", c->session);
    for (int round = 0; items && round < TOOL_ROUNDS_MAX; round++) {
        json_t *turn = call(c, "POST", path,
                            json_pack("{s:o,s:b,s:I}", "items", items, "stream", 1,
                                      "max_output_tokens", (json_int_t)c->tokens_max));
        items = NULL;
        if (!turn)
            return false;
        json_decref(c->last_turn);
        c->last_turn = turn;
        show_figures(turn);
        items = run_tools(c, turn);
    }
    json_decref(items);
    return true;
}

/* ---- commands ---- */

static void show_time(long long seconds)
{
    char text[32];
    time_t at = (time_t)seconds;
    struct tm tm;
    strftime(text, sizeof text, "%Y-%m-%d %H:%M", localtime_r(&at, &tm));
    fputs(text, stdout);
}

static bool list_sessions(chat *c)
{
    json_t *list = call(c, "GET", "/v1/sessions?limit=20", NULL), *one;
    size_t i;
    json_array_foreach(json_object_get(list, "data"), i, one)
    {
        printf("%s%s%s  ", strcmp(string_at(one, "id"), c->session) == 0 ? bold : "",
               string_at(one, "id"), plain);
        show_time(integer_at(one, "used_at"));
        printf("  %3lld turns  %s\n", integer_at(one, "turns"),
               json_is_object(json_object_get(one, "forked_from")) ? "fork" : "");
    }
    json_decref(list);
    return list != NULL;
}

static bool list_turns(chat *c)
{
    char path[160];
    snprintf(path, sizeof path, "/v1/sessions/%s/turns?order=asc&limit=100", c->session);
    json_t *list = call(c, "GET", path, NULL), *one;
    size_t i;
    json_array_foreach(json_object_get(list, "data"), i, one)
    {
        json_t *usage = json_object_get(one, "usage");
        const char *text = string_at(json_array_get(json_object_get(one, "items"), 0), "content");
        printf("%s  %-10s %6lld cached of %6lld  ", string_at(one, "id"), string_at(one, "status"),
               integer_at(json_object_get(one, "cache"), "hit"),
               integer_at(usage, "prompt_tokens"));
        put_safe(text, strnlen(text, strcspn(text, "\n") < 40 ? strcspn(text, "\n") : 40));
        putchar('\n');
    }
    json_decref(list);
    return list != NULL;
}

static bool fork_session(chat *c, const char *turn)
{
    char path[160];
    snprintf(path, sizeof path, "/v1/sessions/%s/fork", c->session);
    json_t *session =
        call(c, "POST", path, *turn ? json_pack("{s:s}", "turn", turn) : json_object());
    if (session)
        enter(c, session);
    json_decref(session);
    return session != NULL;
}

static void show_why(const chat *c)
{
    json_t *own = json_object_get(json_object_get(c->last_turn, "usage"), "whimbrel");
    json_t *cache = json_object_get(own, "cache"), *diff = json_object_get(cache, "first_diff");
    if (!c->last_turn) {
        puts("no turn yet");
        return;
    }
    show_figures(c->last_turn);
    const char *reason = string_at(cache, "reason");
    printf("%s", *reason ? reason : "nothing that was known is missing");
    if (json_is_object(diff))
        printf("; it departs at item %lld, token %lld", integer_at(diff, "item"),
               integer_at(diff, "token"));
    if (integer_at(cache, "lost") > 0)
        printf("; %lld known tokens were computed again", integer_at(cache, "lost"));
    printf("\nqueue %.1f ms, prefill %.1f ms, decode %.1f ms; %lld of %lld drafts accepted, "
           "%lld tokens from disk\n",
           json_number_value(json_object_get(own, "queue_ms")),
           json_number_value(json_object_get(own, "prefill_ms")),
           json_number_value(json_object_get(own, "decode_ms")), integer_at(own, "accepted"),
           integer_at(own, "drafted"), integer_at(own, "restored_tokens"));
}

/* False: it failed. */
static bool command(chat *c, char *line, bool *quit)
{
    char *rest = line + strcspn(line, " ");
    if (*rest)
        *rest++ = '\0';
    bool in_session = c->session[0] != '\0';
    if (strcmp(line, "/quit") == 0 || strcmp(line, "/exit") == 0) {
        *quit = true;
    } else if (strcmp(line, "/help") == 0) {
        fputs(strstr(usage_text, "While it runs"), stdout);
    } else if (strcmp(line, "/sessions") == 0) {
        return list_sessions(c);
    } else if (strcmp(line, "/open") == 0 && *rest) {
        return open_session(c, rest);
    } else if (strcmp(line, "/new") == 0) {
        leave_session(c);
        return make_session(c);
    } else if (strcmp(line, "/system") == 0) {
        free((char *)c->system);
        c->system = strdup(rest);
        leave_session(c);
    } else if (strcmp(line, "/why") == 0) {
        show_why(c);
    } else if (strcmp(line, "/turns") == 0 && in_session) {
        return list_turns(c);
    } else if (strcmp(line, "/fork") == 0 && in_session) {
        return fork_session(c, rest);
    } else {
        complain("%s %s; /help lists what there is", line,
                 strcmp(line, "/open") == 0                                  ? "needs an id"
                 : strcmp(line, "/turns") == 0 || strcmp(line, "/fork") == 0 ? "needs a session"
                                                                             : "is no command");
        return false;
    }
    return true;
}

/* Status for main. Piped in, the first failure ends it; a person may go on. */
static int talk(chat *c)
{
    char *line = NULL;
    size_t size = 0;
    int status = 0;
    for (bool quit = false; !quit && (c->typed || status == 0);) {
        if (c->typed)
            printf("%s>%s ", bold, plain);
        fflush(stdout);
        interrupted = 0;
        ssize_t length = getline(&line, &size, stdin);
        if (length < 0) /* the end, or Ctrl-C */
            break;
        if (length > 0 && line[length - 1] == '\n')
            line[--length] = '\0';
        if (length == 0)
            continue;
        bool done = line[0] == '/' ? command(c, line, &quit) : run_turn(c, line);
        status = done || c->typed ? 0 : 1;
    }
    if (c->typed)
        putchar('\n');
    free(line);
    return status;
}

static int bad_usage(const char *what)
{
    fprintf(stderr, "whimbrel-chat: %s\n%s", what, usage_text);
    return EXIT_USAGE;
}

int main(int argc, char **argv)
{
    chat c = {.url = "http://127.0.0.1:8080", .tokens_max = 1024};
    const char *key = getenv("WHIMBREL_API_KEY"), *session = NULL, *tools = NULL, *system = "";
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            fputs(usage_text, stdout);
            return 0;
        }
        if (i + 1 == argc)
            return bad_usage("a flag lacks its value, or is none");
        const char *flag = argv[i], *value = argv[++i];
        if (strcmp(flag, "--url") == 0)
            c.url = value;
        else if (strcmp(flag, "--model") == 0)
            snprintf(c.model, sizeof c.model, "%s", value);
        else if (strcmp(flag, "--key") == 0)
            key = value;
        else if (strcmp(flag, "--system") == 0)
            system = value;
        else if (strcmp(flag, "--tools") == 0)
            tools = value;
        else if (strcmp(flag, "--session") == 0)
            session = value;
        else if (strcmp(flag, "--max-tokens") == 0)
            c.tokens_max = strtol(value, NULL, 10);
        else
            return bad_usage(flag);
    }
    if (c.tokens_max < 1)
        return bad_usage("--max-tokens must be at least 1");
    json_error_t why;
    if (tools)
        c.tools = json_load_file(tools, 0, &why);
    if (tools && !json_is_array(c.tools)) {
        fprintf(stderr, "whimbrel-chat: %s: %s\n", tools, c.tools ? "no array of tools" : why.text);
        return EXIT_USAGE;
    }
    if (!isatty(STDOUT_FILENO))
        bold = dim = yellow = red = plain = "";
    c.typed = isatty(STDIN_FILENO);
    c.system = strdup(system);
    const struct sigaction action = {.sa_handler = on_interrupt}; /* no SA_RESTART: getline ends */
    sigaction(SIGINT, &action, NULL);
    curl_global_init(CURL_GLOBAL_DEFAULT);
    c.curl = curl_easy_init();
    c.headers = curl_slist_append(NULL, "content-type: application/json");
    if (key) {
        char header[256];
        snprintf(header, sizeof header, "authorization: Bearer %s", key);
        c.headers = curl_slist_append(c.headers, header);
    }
    int status = choose_model(&c) && (!session || open_session(&c, session)) ? talk(&c) : 1;
    curl_slist_free_all(c.headers);
    curl_easy_cleanup(c.curl);
    curl_global_cleanup();
    json_decref(c.tools);
    json_decref(c.last_turn);
    free((char *)c.system);
    return status;
}
