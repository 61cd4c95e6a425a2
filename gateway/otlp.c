/* gw_otlp: see the header. libcurl is loaded when an endpoint is set, not linked: it brings twenty
 * libraries along, which would double the time a server takes to start. */
#include "gateway/otlp.h"

#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include <curl/curl.h>

#include "engine/base/buf.h"
#include "engine/base/log.h"
#include "engine/base/num.h"

#define BATCH 256 /* requests of one message: about 600 KB of JSON */
#define BATCH_MS 1000
#define TIMEOUT_MS 5000
#define RETRY_MS_MIN 1000
#define RETRY_MS_MAX 30000
#define TRIES_MAX 6
#define SPAN_INTERNAL 1 /* SpanKind, of opentelemetry/proto/trace/v1/trace.proto */
#define SPAN_SERVER 2
#define STATUS_ERROR "\"code\":2"

typedef struct curl_api {
    void *library;
    __typeof__(curl_easy_init) *init;
    __typeof__(curl_easy_setopt) *set;
    __typeof__(curl_easy_perform) *perform;
    __typeof__(curl_easy_getinfo) *get;
    __typeof__(curl_easy_cleanup) *cleanup;
    __typeof__(curl_slist_append) *append;
    __typeof__(curl_slist_free_all) *free_all;
} curl_api;

typedef struct record {
    gw_live_request request;
    gw_trace trace;
} record;

struct gw_otlp {
    curl_api api;
    CURL *curl; /* the thread's, as the next three */
    struct curl_slist *headers;
    record batch[BATCH];
    base_buf json;
    pthread_t thread;
    pthread_cond_t wake;
    pthread_mutex_t mutex; /* guards all below */
    record ring[GW_OTLP_QUEUE];
    uint32_t first, count;
    gw_otlp_stats stats;
    bool stopping;
};

/* ---- the message ---- */

static void make_id(char *out, uint32_t digits)
{
    uint8_t bytes[GW_TRACE_ID_MAX / 2];
    while (getrandom(bytes, digits / 2, 0) != (ssize_t)(digits / 2))
        ;
    for (uint32_t i = 0; i < digits / 2; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

static void put_text(base_buf *out, const char *key, const char *text)
{
    if (!text[0])
        return;
    base_buf_printf(out, ",{\"key\":\"%s\",\"value\":{\"stringValue\":", key);
    base_buf_json_text(out, text, strlen(text));
    base_buf_puts(out, "}}");
}

static void put_count(base_buf *out, const char *key, int64_t value)
{
    base_buf_printf(out, ",{\"key\":\"%s\",\"value\":{\"intValue\":\"%" PRId64 "\"}}", key, value);
}

/* Opens a span up to its attributes; `parent` "": a root. Times are Unix milliseconds. */
static void put_span(base_buf *out, const char *trace, const char *span, const char *parent,
                     int kind, const char *name, int64_t begin_ms, int64_t end_ms)
{
    base_buf_printf(out,
                    "{\"traceId\":\"%s\",\"spanId\":\"%s\",\"parentSpanId\":\"%s\",\"kind\":%d,"
                    "\"name\":",
                    trace, span, parent, kind);
    base_buf_json_text(out, name, strlen(name));
    base_buf_printf(out,
                    ",\"startTimeUnixNano\":\"%" PRId64 "000000\",\"endTimeUnixNano\":\"%" PRId64
                    "000000\"",
                    begin_ms, base_max(end_ms, begin_ms));
}

static void put_phase(base_buf *out, const char *trace, const char *parent, const char *name,
                      int64_t begin_ms, int64_t end_ms)
{
    char span[GW_SPAN_ID_MAX + 1];
    if (!begin_ms)
        return;
    make_id(span, GW_SPAN_ID_MAX);
    base_buf_puts(out, ",");
    put_span(out, trace, span, parent, SPAN_INTERNAL, name, begin_ms, end_ms);
    base_buf_puts(out, "}");
}

static void put_request(base_buf *out, const record *one)
{
    const gw_live_request *r = &one->request;
    char name[32 + GW_LIVE_TEXT_MAX], made[GW_TRACE_ID_MAX + 1], span[GW_SPAN_ID_MAX + 1];
    const char *trace = one->trace.id[0] ? one->trace.id : made;
    make_id(made, GW_TRACE_ID_MAX);
    make_id(span, GW_SPAN_ID_MAX);
    bool text = strcmp(r->dialect, "completions") == 0;
    snprintf(name, sizeof name, "%s %s", r->dialect, r->model);
    put_span(out, trace, span, one->trace.parent, SPAN_SERVER, name, r->received_ms,
             r->ended_ms);
    base_buf_printf(out,
                    ",\"attributes\":[{\"key\":\"gen_ai.operation.name\",\"value\":"
                    "{\"stringValue\":\"%s\"}}",
                    text ? "text_completion" : "chat");
    put_text(out, "gen_ai.request.model", r->model);
    put_text(out, "whimbrel.request", r->id.text);
    put_text(out, "whimbrel.turn", r->turn.text);
    put_text(out, "whimbrel.session", r->session.text);
    put_text(out, "whimbrel.tenant", r->tenant);
    put_text(out, "whimbrel.dialect", r->dialect);
    if (r->status)
        put_count(out, "http.response.status_code", r->status);
    if (r->matched) {
        put_count(out, "gen_ai.usage.input_tokens", r->prompt_tokens);
        put_count(out, "gen_ai.usage.cache_read.input_tokens", r->cached_tokens);
        put_count(out, "whimbrel.restored_tokens", r->restored_tokens);
        put_count(out, "gen_ai.usage.output_tokens", r->output_tokens);
        put_count(out, "whimbrel.passes", r->passes);
    }
    if (r->finish >= 0)
        base_buf_printf(out,
                        ",{\"key\":\"gen_ai.response.finish_reasons\",\"value\":{\"arrayValue\":"
                        "{\"values\":[{\"stringValue\":\"%s\"}]}}}",
                        gw_live_finish_name(r->finish));
    /* A client that left is no error. */
    base_buf_printf(out, "],\"status\":{%s}}",
                    r->status >= 500 || r->finish == ENG_FINISH_ERROR ? STATUS_ERROR : "");
    int64_t decode = r->first_ms ? r->first_ms : r->ended_ms;
    put_phase(out, trace, span, "queue", r->queued_ms, r->started_ms ? r->started_ms : r->ended_ms);
    put_phase(out, trace, span, "prefill", r->started_ms, decode);
    put_phase(out, trace, span, "decode", r->first_ms, r->ended_ms);
}

static void put_message(base_buf *out, const record *records, uint32_t count)
{
    base_buf_puts(
        out, "{\"resourceSpans\":[{\"resource\":{\"attributes\":[{\"key\":\"service.name\","
             "\"value\":{\"stringValue\":\"whimbrel\"}},{\"key\":\"service.version\",\"value\":"
             "{\"stringValue\":\"" WHIMBREL_VERSION "\"}}]},\"scopeSpans\":[{\"scope\":"
             "{\"name\":\"whimbrel\"},\"spans\":[");
    for (uint32_t i = 0; i < count; i++) {
        base_buf_puts(out, i ? "," : "");
        put_request(out, &records[i]);
    }
    base_buf_puts(out, "]}]}]}");
}

/* ---- sending ---- */

static size_t ignore(char *data, size_t size, size_t count, void *ctx)
{
    (void)data;
    (void)ctx;
    return size * count;
}

/* 0: taken; 1: worth another try; -1: refused. */
static int send_message(gw_otlp *o, long timeout_ms)
{
    long status = 0;
    o->api.set(o->curl, CURLOPT_TIMEOUT_MS, timeout_ms);
    o->api.set(o->curl, CURLOPT_POSTFIELDS, o->json.data);
    o->api.set(o->curl, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)o->json.length);
    if (o->api.perform(o->curl) != CURLE_OK)
        return 1;
    o->api.get(o->curl, CURLINFO_RESPONSE_CODE, &status);
    return status / 100 == 2 ? 0 : status == 429 || (status >= 502 && status <= 504) ? 1 : -1;
}

/* With the mutex: until something is to be done, or `ms` have passed. */
static void wait_ms(gw_otlp *o, uint32_t ms)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (!o->stopping && pthread_cond_timedwait(&o->wake, &o->mutex, &until) != ETIMEDOUT)
        ;
}

/* With the mutex; lets go of it meanwhile. False: the collector did not take it. */
static bool send_batch(gw_otlp *o)
{
    uint32_t count = (uint32_t)base_min(o->count, BATCH), wait = RETRY_MS_MIN;
    for (uint32_t i = 0; i < count; i++)
        o->batch[i] = o->ring[(o->first + i) % GW_OTLP_QUEUE];
    o->first = (o->first + count) % GW_OTLP_QUEUE;
    o->count -= count;
    int state = 1;
    for (int tries = 0; state == 1 && tries < TRIES_MAX; tries++) {
        if (tries) {
            if (o->stopping)
                break;
            wait_ms(o, wait);
            wait = (uint32_t)base_min(2 * wait, RETRY_MS_MAX);
        }
        bool last = o->stopping;
        pthread_mutex_unlock(&o->mutex);
        if (!tries) {
            base_buf_clear(&o->json);
            put_message(&o->json, o->batch, count);
        }
        state = o->json.failed ? -1 : send_message(o, last ? GW_OTLP_LAST_MS : TIMEOUT_MS);
        pthread_mutex_lock(&o->mutex);
    }
    if (state == 0) {
        o->stats.sent += count;
        return true;
    }
    o->stats.failed += count;
    base_log(BASE_LOG_WARN, "otlp_failed requests=%u reason=%s", count,
             state < 0 ? "refused" : "not reached");
    return false;
}

static void *run(void *arg)
{
    gw_otlp *o = arg;
    pthread_setname_np(pthread_self(), "otlp");
    pthread_mutex_lock(&o->mutex);
    while (!o->stopping || o->count) {
        while (!o->stopping && !o->count)
            pthread_cond_wait(&o->wake, &o->mutex);
        if (o->count < BATCH)
            wait_ms(o, BATCH_MS);
        /* One that is away is not waited for twice at the end. */
        if (o->count && !send_batch(o) && o->stopping)
            break;
    }
    pthread_mutex_unlock(&o->mutex);
    return NULL;
}

/* ---- the rest ---- */

static base_code load(curl_api *api, base_err *err)
{
    const struct {
        const char *name;
        void *at;
    } wanted[] = {{"curl_easy_init", &api->init},         {"curl_easy_setopt", &api->set},
                  {"curl_easy_perform", &api->perform},   {"curl_easy_getinfo", &api->get},
                  {"curl_easy_cleanup", &api->cleanup},   {"curl_slist_append", &api->append},
                  {"curl_slist_free_all", &api->free_all}};
    api->library = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *symbol = api->library ? dlsym(api->library, wanted[i].name) : NULL;
        if (!symbol)
            return base_fail_param(err, BASE_UNSUPPORTED, "otlp.endpoint",
                                   "otlp.endpoint needs libcurl.so.4 (Debian: libcurl4)");
        memcpy(wanted[i].at, &symbol, sizeof symbol);
    }
    return BASE_OK;
}

static base_code prepare(gw_otlp *o, const char *endpoint, base_err *err)
{
    o->curl = o->api.init();
    o->headers = o->api.append(NULL, "content-type: application/json");
    if (!o->curl || !o->headers)
        return base_fail(err, BASE_NOMEM, "no memory for the export of traces");
    o->api.set(o->curl, CURLOPT_NOSIGNAL, 1L);
    o->api.set(o->curl, CURLOPT_PROTOCOLS_STR, "http,https");
    o->api.set(o->curl, CURLOPT_HTTPHEADER, o->headers);
    o->api.set(o->curl, CURLOPT_WRITEFUNCTION, ignore);
    o->api.set(o->curl, CURLOPT_USERAGENT, "whimbrel/" WHIMBREL_VERSION);
    if (o->api.set(o->curl, CURLOPT_URL, endpoint) != CURLE_OK)
        return base_fail(err, BASE_NOMEM, "no memory for the export of traces");
    return BASE_OK;
}

base_code gw_otlp_create(gw_otlp **out, const char *endpoint, base_err *err)
{
    pthread_condattr_t monotonic;
    *out = NULL;
    if (strncmp(endpoint, "http://", 7) != 0 && strncmp(endpoint, "https://", 8) != 0)
        return base_fail_param(err, BASE_INVALID, "otlp.endpoint",
                               "otlp.endpoint %.80s is no URL: http://HOST:4318/v1/traces",
                               endpoint);
    gw_otlp *o = calloc(1, sizeof *o);
    if (!o)
        return base_fail(err, BASE_NOMEM, "no memory for the export of traces");
    base_buf_init(&o->json, 0);
    pthread_mutex_init(&o->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&o->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    base_code code = load(&o->api, err);
    if (!code)
        code = prepare(o, endpoint, err);
    if (!code && pthread_create(&o->thread, NULL, run, o) != 0)
        code = base_fail(err, BASE_NOMEM, "no thread for the export of traces");
    if (code) {
        o->stopping = true;
        o->thread = 0;
        gw_otlp_destroy(o);
        return code;
    }
    *out = o;
    return BASE_OK;
}

void gw_otlp_destroy(gw_otlp *otlp)
{
    if (!otlp)
        return;
    if (!otlp->stopping) {
        pthread_mutex_lock(&otlp->mutex);
        otlp->stopping = true;
        pthread_cond_signal(&otlp->wake);
        pthread_mutex_unlock(&otlp->mutex);
        pthread_join(otlp->thread, NULL);
    }
    if (otlp->curl)
        otlp->api.cleanup(otlp->curl);
    if (otlp->headers)
        otlp->api.free_all(otlp->headers);
    /* The library stays loaded: its own libraries keep state of the process. */
    pthread_cond_destroy(&otlp->wake);
    pthread_mutex_destroy(&otlp->mutex);
    base_buf_deinit(&otlp->json);
    free(otlp);
}

void gw_otlp_request(gw_otlp *otlp, const gw_live_request *request, const gw_trace *trace)
{
    if (!otlp || (trace->id[0] && !trace->sampled))
        return;
    pthread_mutex_lock(&otlp->mutex);
    if (otlp->count == GW_OTLP_QUEUE) {
        otlp->stats.dropped++;
    } else {
        otlp->ring[(otlp->first + otlp->count++) % GW_OTLP_QUEUE] = (record){*request, *trace};
        if (otlp->count == 1 || otlp->count == BATCH)
            pthread_cond_signal(&otlp->wake);
    }
    pthread_mutex_unlock(&otlp->mutex);
}

gw_otlp_stats gw_otlp_get_stats(gw_otlp *otlp)
{
    pthread_mutex_lock(&otlp->mutex);
    gw_otlp_stats stats = otlp->stats;
    stats.queued = otlp->count;
    pthread_mutex_unlock(&otlp->mutex);
    return stats;
}
