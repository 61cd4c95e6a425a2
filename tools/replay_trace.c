/* Readers of traces; see replay_trace.h for the formats. The objects are parsed by jansson, line by
 * line; nothing here trusts a number before it has been checked. */
#include "tools/replay_trace.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/buf.h"

/* Seconds; a longer session is a broken clock. */
#define SECONDS_MAX 1e9
#define ID_MAX ((json_int_t)1 << 48)
#define MOONCAKE_BLOCK_TOKENS 512

static bool grow(void **list, size_t *room, size_t count, size_t size, base_err *err)
{
    if (count < *room)
        return true;
    size_t more = *room < 64 ? 64 : *room * 2;
    void *bigger = realloc(*list, more * size);
    if (bigger == NULL) {
        base_fail(err, BASE_NOMEM, "no memory for %zu trace entries", more);
        return false;
    }
    *list = bigger;
    *room = more;
    return true;
}

void rp_trace_deinit(rp_trace *trace)
{
    free(trace->sessions);
    free(trace->requests);
    free(trace->runs);
    *trace = (rp_trace){0};
}

rp_session *rp_trace_add_session(rp_trace *trace, const char *name, base_err *err)
{
    if (!grow((void **)&trace->sessions, &trace->session_room, trace->session_count,
              sizeof *trace->sessions, err))
        return NULL;
    rp_session *session = &trace->sessions[trace->session_count++];
    *session = (rp_session){
        .scope = ++trace->scopes, .block_tokens = 1, .request_at = trace->request_count};
    snprintf(session->name, sizeof session->name, "%s", name);
    return session;
}

rp_request *rp_trace_add_request(rp_trace *trace, base_err *err)
{
    if (trace->request_count >= RP_REQUESTS_MAX) {
        base_fail(err, BASE_TOO_LONG, "more than %u requests", RP_REQUESTS_MAX);
        return NULL;
    }
    if (!grow((void **)&trace->requests, &trace->request_room, trace->request_count,
              sizeof *trace->requests, err))
        return NULL;
    rp_request *request = &trace->requests[trace->request_count++];
    *request = (rp_request){.run_at = trace->run_count};
    trace->sessions[trace->session_count - 1].request_count++;
    return request;
}

base_code rp_trace_add_run(rp_trace *trace, uint64_t first, uint32_t count, base_err *err)
{
    rp_request *request = &trace->requests[trace->request_count - 1];
    if (request->run_count > 0) {
        rp_run *last = &trace->runs[trace->run_count - 1];
        if (last->first + last->count == first && count <= UINT32_MAX - last->count) {
            last->count += count;
            return BASE_OK;
        }
    }
    if (!grow((void **)&trace->runs, &trace->run_room, trace->run_count, sizeof *trace->runs, err))
        return BASE_NOMEM;
    trace->runs[trace->run_count++] = (rp_run){first, count};
    request->run_count++;
    return BASE_OK;
}

static int by_time(const void *a, const void *b)
{
    const rp_request *x = a, *y = b;
    if (x->at_s != y->at_s)
        return x->at_s < y->at_s ? -1 : 1;
    return x->run_at < y->run_at ? -1 : x->run_at > y->run_at; /* as they stood */
}

void rp_trace_close_session(rp_trace *trace)
{
    rp_session *session = &trace->sessions[trace->session_count - 1];
    if (session->request_count > 0)
        qsort(trace->requests + session->request_at, session->request_count,
              sizeof *trace->requests, by_time);
}

/* ---- values out of an object ---- */

static base_code get_count(const json_t *object, const char *key, json_int_t max, bool required,
                           json_int_t *out, base_err *err)
{
    const json_t *value = json_object_get(object, key);
    *out = 0;
    if (value == NULL || json_is_null(value))
        return required ? base_fail(err, BASE_FORMAT, "%s is missing", key) : BASE_OK;
    if (!json_is_integer(value))
        return base_fail(err, BASE_FORMAT, "%s is no integer", key);
    *out = json_integer_value(value);
    if (*out < 0 || *out > max)
        return base_fail(err, BASE_FORMAT, "%s %lld is not within 0 … %lld", key, (long long)*out,
                         (long long)max);
    return BASE_OK;
}

static base_code get_seconds(const json_t *object, const char *key, double scale, bool required,
                             double *out, base_err *err)
{
    const json_t *value = json_object_get(object, key);
    *out = 0;
    if (value == NULL || json_is_null(value))
        return required ? base_fail(err, BASE_FORMAT, "%s is missing", key) : BASE_OK;
    double v = json_is_number(value) ? json_number_value(value) * scale : -1;
    if (!(v >= 0 && v <= SECONDS_MAX))
        return base_fail(err, BASE_FORMAT, "%s is no number of seconds within 0 … %g", key,
                         SECONDS_MAX);
    *out = v;
    return BASE_OK;
}

static bool lists(const json_t *object, const char *key, const char *word)
{
    const json_t *item;
    size_t i;
    json_array_foreach(json_object_get(object, key), i, item)
    {
        const char *text = json_string_value(item);
        if (text != NULL && strcmp(text, word) == 0)
            return true;
    }
    return false;
}

/* hash_ids or hash_ranges; blocks past the prompt's length are left out. */
static base_code read_blocks(rp_trace *trace, const json_t *object, uint32_t blocks_max,
                             base_err *err)
{
    const json_t *ids = json_object_get(object, "hash_ids"),
                 *ranges = json_object_get(object, "hash_ranges"), *item;
    size_t i;
    uint32_t have = 0;
    if ((ids != NULL && !json_is_array(ids)) || (ranges != NULL && !json_is_array(ranges)))
        return base_fail(err, BASE_FORMAT, "hash_ids or hash_ranges is no array");
    json_array_foreach(ids, i, item)
    {
        json_int_t id = json_is_integer(item) ? json_integer_value(item) : -1;
        if (id < 0 || id > ID_MAX)
            return base_fail(err, BASE_FORMAT, "hash_ids[%zu] is no id within 0 … 2^48", i);
        if (have++ >= blocks_max)
            break;
        if (rp_trace_add_run(trace, (uint64_t)id, 1, err) != BASE_OK)
            return err != NULL ? err->code : BASE_NOMEM;
    }
    json_array_foreach(ranges, i, item)
    {
        const json_t *a = json_array_get(item, 0), *b = json_array_get(item, 1);
        json_int_t first = json_is_integer(a) ? json_integer_value(a) : -1;
        json_int_t last = json_is_integer(b) ? json_integer_value(b) : -1;
        if (json_array_size(item) != 2 || first < 0 || last < first || last > ID_MAX)
            return base_fail(err, BASE_FORMAT, "hash_ranges[%zu] is no [first, last]", i);
        json_int_t count = last - first + 1, room = (json_int_t)blocks_max - have;
        if (count > room)
            count = room;
        if (count == 0)
            break;
        if (rp_trace_add_run(trace, (uint64_t)first, (uint32_t)count, err) != BASE_OK)
            return err != NULL ? err->code : BASE_NOMEM;
        have += (uint32_t)count;
    }
    return BASE_OK;
}

/* ---- Weka sessions ---- */

typedef struct weka {
    uint32_t block_tokens;
    uint16_t agents;
} weka;

static base_code read_requests(rp_trace *trace, const json_t *list, weka *w, uint16_t agent,
                               double start_s, int depth, base_err *err);

static base_code read_request(rp_trace *trace, const json_t *object, weka *w, uint16_t agent,
                              double start_s, int depth, base_err *err)
{
    double at, took;
    json_int_t in, out;
    if (!json_is_object(object))
        return base_fail(err, BASE_FORMAT, "no object");
    if (get_seconds(object, "t", 1, true, &at, err) != BASE_OK)
        return BASE_FORMAT;
    const char *type = json_string_value(json_object_get(object, "type"));
    if (type != NULL && strcmp(type, "subagent") == 0) {
        if (depth >= RP_NESTING_MAX || w->agents == UINT16_MAX)
            return base_fail(err, BASE_TOO_LONG, "more than %d sub-agents inside each other",
                             RP_NESTING_MAX);
        /* Its times count from its own start. */
        return read_requests(trace, json_object_get(object, "requests"), w, ++w->agents,
                             start_s + at, depth + 1, err);
    }
    if (get_count(object, "in", RP_TOKENS_MAX, true, &in, err) != BASE_OK ||
        get_count(object, "out", RP_TOKENS_MAX, false, &out, err) != BASE_OK ||
        get_seconds(object, "api_time", 1, false, &took, err) != BASE_OK)
        return BASE_FORMAT;
    if (in == 0)
        return BASE_OK; /* a call that failed before it was counted */
    rp_request *request = rp_trace_add_request(trace, err);
    if (request == NULL)
        return BASE_NOMEM;
    const char *stop = json_string_value(json_object_get(object, "stop"));
    request->at_s = start_s + at;
    request->took_s = took;
    request->in = (uint32_t)in;
    request->out = (uint32_t)out;
    request->agent = agent;
    request->tool_result = lists(object, "input_types", "tool_result");
    request->stop = stop == NULL                    ? RP_STOP_OTHER
                    : strcmp(stop, "tool_use") == 0 ? RP_STOP_TOOL
                    : strcmp(stop, "end_turn") == 0 ? RP_STOP_END
                                                    : RP_STOP_OTHER;
    return read_blocks(trace, object, (uint32_t)in / w->block_tokens, err);
}

static base_code read_requests(rp_trace *trace, const json_t *list, weka *w, uint16_t agent,
                               double start_s, int depth, base_err *err)
{
    const json_t *item;
    size_t i;
    if (!json_is_array(list))
        return base_fail(err, BASE_FORMAT, "requests is no array");
    json_array_foreach(list, i, item)
    {
        base_code code = read_request(trace, item, w, agent, start_s, depth, err);
        if (code != BASE_OK) {
            base_wrap(err, "requests[%zu]", i);
            return code;
        }
    }
    return BASE_OK;
}

static base_code read_weka(rp_trace *trace, const json_t *object, base_err *err)
{
    const char *id = json_string_value(json_object_get(object, "id"));
    json_int_t block, tools, system;
    if (get_count(object, "block_size", 65536, false, &block, err) != BASE_OK ||
        get_count(object, "tool_tokens", RP_TOKENS_MAX, false, &tools, err) != BASE_OK ||
        get_count(object, "system_tokens", RP_TOKENS_MAX, false, &system, err) != BASE_OK)
        return BASE_FORMAT;
    weka w = {.block_tokens = block > 0 ? (uint32_t)block : 64};
    rp_session *session = rp_trace_add_session(trace, id != NULL ? id : "session", err);
    if (session == NULL)
        return BASE_NOMEM;
    const char *scope = json_string_value(json_object_get(object, "hash_id_scope"));
    if (scope != NULL && strcmp(scope, "global") == 0)
        session->scope = 0;
    session->block_tokens = w.block_tokens;
    session->shared = (uint32_t)(tools + system);
    base_code code = read_requests(trace, json_object_get(object, "requests"), &w, 0, 0, 0, err);
    rp_trace_close_session(trace);
    return code;
}

/* ---- Mooncake ---- */

/* All lines of a file are one open session: arrivals are recorded, ids are shared. */
static base_code read_mooncake(rp_trace *trace, const json_t *object, base_err *err)
{
    json_int_t in, out;
    double at;
    if (get_seconds(object, "timestamp", 1e-3, true, &at, err) != BASE_OK ||
        get_count(object, "input_length", RP_TOKENS_MAX, true, &in, err) != BASE_OK ||
        get_count(object, "output_length", RP_TOKENS_MAX, false, &out, err) != BASE_OK)
        return BASE_FORMAT;
    if (trace->stream == 0 || trace->stream != trace->session_count) {
        rp_session *session = rp_trace_add_session(trace, "requests", err);
        if (session == NULL)
            return BASE_NOMEM;
        session->block_tokens = MOONCAKE_BLOCK_TOKENS;
        trace->stream = trace->session_count;
    }
    trace->open = true;
    if (in == 0)
        return BASE_OK;
    rp_request *request = rp_trace_add_request(trace, err);
    if (request == NULL)
        return BASE_NOMEM;
    request->at_s = at;
    request->in = (uint32_t)in;
    request->out = (uint32_t)out;
    /* The last block is counted even if it is not full. */
    return read_blocks(trace, object,
                       ((uint32_t)in + MOONCAKE_BLOCK_TOKENS - 1) / MOONCAKE_BLOCK_TOKENS, err);
}

/* ---- files ---- */

static base_code read_object(rp_trace *trace, const json_t *object, base_err *err)
{
    size_t sessions = trace->session_count, requests = trace->request_count,
           runs = trace->run_count;
    size_t own = sessions > 0 ? trace->sessions[sessions - 1].request_count : 0;
    base_code code = json_object_get(object, "requests") != NULL ? read_weka(trace, object, err)
                     : json_object_get(object, "timestamp") != NULL
                         ? read_mooncake(trace, object, err)
                         : base_fail(err, BASE_FORMAT,
                                     "neither a session (requests) "
                                     "nor a request (timestamp)");
    if (code != BASE_OK) { /* nothing of it stays */
        trace->session_count = sessions;
        trace->request_count = requests;
        trace->run_count = runs;
        if (sessions > 0)
            trace->sessions[sessions - 1].request_count = own;
    }
    return code;
}

static base_code read_text(rp_trace *trace, const char *text, size_t length, const char *name,
                           uint32_t line, base_err *err)
{
    json_error_t bad;
    base_err own = BASE_ERR_INIT;
    json_t *object = json_loadb(text, length, JSON_REJECT_DUPLICATES, &bad);
    base_code code = object == NULL ? base_fail(&own, BASE_FORMAT, "no JSON: %.100s", bad.text)
                     : !json_is_object(object) ? base_fail(&own, BASE_FORMAT, "no JSON object")
                                               : read_object(trace, object, &own);
    uint32_t at = line + (object == NULL && bad.line > 1 ? (uint32_t)bad.line - 1 : 0);
    json_decref(object);
    if (code == BASE_FORMAT && trace->lenient) {
        trace->skipped++;
        return BASE_OK;
    }
    return code == BASE_OK ? code : base_fail(err, code, "%s:%u: %s", name, at, own.text);
}

base_code rp_trace_read_line(rp_trace *trace, const char *text, size_t length, const char *name,
                             uint32_t line, base_err *err)
{
    return read_text(trace, text, length, name, line, err);
}

/* A packed file is read through the xz program. */
static FILE *open_packed(const char *path, pid_t *pid)
{
    int ends[2];
    if (pipe(ends) != 0)
        return NULL;
    *pid = fork();
    if (*pid == 0) {
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        execlp("xz", "xz", "-dc", "--", path, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    if (*pid > 0)
        return fdopen(ends[0], "r");
    close(ends[0]);
    return NULL;
}

/* Appends bytes up to and with `stop` (EOF: all there are); false past RP_LINE_MAX or memory. */
static bool read_until(FILE *in, int stop, base_buf *out)
{
    int c;
    while (!out->failed && (c = getc_unlocked(in)) != EOF) {
        char byte = (char)c;
        base_buf_add(out, &byte, 1);
        if (c == stop)
            break;
    }
    return !out->failed;
}

/* `{` or `{"id": …,` alone on the first line: an object that goes on, the original form. */
static bool begins_object(const base_buf *line)
{
    json_error_t bad;
    json_t *value = json_loadb(line->data, line->length, 0, &bad);
    size_t first = strspn(line->data, " \t"), end = line->length;
    json_decref(value);
    while (end > 0 && strchr(" \t\r\n", line->data[end - 1]) != NULL)
        end--;
    return value == NULL && line->data[first] == '{' && end > 0 && line->data[end - 1] != '}';
}

static base_code read_stream(rp_trace *trace, FILE *in, const char *path, base_err *err)
{
    base_buf line;
    base_code code = BASE_OK;
    base_buf_init(&line, RP_LINE_MAX);
    for (uint32_t number = 1; code == BASE_OK; number++) {
        base_buf_clear(&line);
        bool whole = read_until(in, '\n', &line);
        if (whole && number == 1 && line.length > 0 && begins_object(&line))
            whole = read_until(in, EOF, &line);
        if (!whole)
            code = base_fail(err, BASE_TOO_LONG, "%s:%u: longer than %zu bytes, or than memory",
                             path, number, RP_LINE_MAX);
        else if (line.length == 0)
            break;
        else if (strspn(line.data, " \t\r\n") < line.length)
            code = read_text(trace, line.data, line.length, path, number, err);
    }
    if (code == BASE_OK && ferror(in))
        code = base_fail(err, BASE_IO, "%s: %s", path, strerror(errno));
    base_buf_deinit(&line);
    return code;
}

base_code rp_trace_read(rp_trace *trace, const char *path, base_err *err)
{
    size_t length = strlen(path), before = trace->request_count;
    pid_t pid = 0;
    bool packed = length > 3 && strcmp(path + length - 3, ".xz") == 0;
    if (access(path, R_OK) != 0)
        return base_fail(err, BASE_IO, "%s: %s", path, strerror(errno));
    FILE *in = packed ? open_packed(path, &pid) : fopen(path, "r");
    if (in == NULL)
        return base_fail(err, BASE_IO, "%s: %s", path, strerror(errno));
    trace->stream = 0;
    base_code code = read_stream(trace, in, path, err);
    fclose(in);
    int status = 0;
    if (packed && waitpid(pid, &status, 0) == pid && status != 0 && code == BASE_OK)
        code = base_fail(err, BASE_IO, "%s: xz did not unpack it", path);
    if (code == BASE_OK && trace->stream != 0)
        rp_trace_close_session(trace);
    if (code == BASE_OK && trace->request_count == before)
        code = base_fail(err, BASE_FORMAT, "%s: holds no request", path);
    return code;
}

/* ---- tokens ---- */

#define VOCAB 200000u

static uint64_t mix(uint64_t h)
{
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9u; /* the finisher of SplitMix64 */
    h = (h ^ h >> 27) * 0x94D049BB133111EBu;
    return h ^ h >> 31;
}

static int32_t token_of(uint64_t key, uint32_t offset)
{
    return (int32_t)((mix(key + offset * 0x9E3779B97F4A7C15u) >> 32) * VOCAB >> 32);
}

/* A stream of its own for a request: no block key equals it, as block keys come out of mix(). */
static uint64_t own_key(const rp_trace *trace, const rp_request *request)
{
    return mix(~(uint64_t)(request - trace->requests));
}

/* Writes tokens [from, count) of the blocks alone; returns where they end. */
static uint32_t block_tokens(const rp_trace *trace, const rp_session *session,
                             const rp_request *request, int32_t *out, uint32_t from, uint32_t count)
{
    uint32_t at = 0;
    uint64_t scope = mix(session->scope + 1);
    for (uint32_t r = 0; r < request->run_count && at < count; r++) {
        const rp_run *run = &trace->runs[request->run_at + r];
        uint32_t b = from > at ? (from - at) / session->block_tokens : 0;
        if (b > run->count)
            b = run->count;
        at += b * session->block_tokens;
        for (; b < run->count && at < count; b++) {
            uint64_t key = mix(scope ^ (run->first + b));
            for (uint32_t i = 0; i < session->block_tokens && at < count; i++, at++)
                if (at >= from)
                    out[at] = token_of(key, i);
        }
    }
    return at;
}

/* True if `next` begins with the blocks of `request` and has more. */
static bool goes_on(const rp_trace *trace, const rp_request *request, const rp_request *next)
{
    const rp_run *a = trace->runs + request->run_at, *b = trace->runs + next->run_at;
    if (next->run_count < request->run_count || next->in <= request->in)
        return false;
    for (uint32_t i = 0; i < request->run_count; i++)
        if (a[i].first != b[i].first || b[i].count < a[i].count ||
            (b[i].count > a[i].count && i + 1 < request->run_count))
            return false;
    return true;
}

void rp_tokens(const rp_trace *trace, const rp_session *session, const rp_request *request,
               int32_t *out, uint32_t count)
{
    uint32_t done = block_tokens(trace, session, request, out, 0, count);
    if (done < count) {
        const rp_request *end = trace->requests + session->request_at + session->request_count;
        const rp_request *next = request + 1;
        while (next < end && next->agent != request->agent)
            next++;
        if (next < end && goes_on(trace, request, next)) {
            uint32_t known =
                block_tokens(trace, session, next, out, done, next->in < count ? next->in : count);
            done = known > done ? known : done;
        }
    }
    for (uint64_t key = own_key(trace, request); done < count; done++)
        out[done] = token_of(key, done);
}
