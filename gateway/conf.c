/* The table of keys and what is made from it.
 *
 * A row says everything about a key; gw_conf has one field a row, found by its offset. Every value
 * passes through set_text or set_json and the bounds of its row, whether it is a default, from a
 * file or from the command line. */
#include "gateway/conf.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/buf.h"
#include "engine/base/json.h"

typedef enum kind {
    TEXT,   /* char * */
    CHOICE, /* char *, one of `choices` */
    LIST,   /* gw_conf_list */
    U32,
    U64,
    BOOL,
    DRAFT, /* int32_t: "auto" -1, "off" 0, or a number */
    LEVEL, /* base_log_level */
} kind;

typedef struct row {
    const char *key;
    kind kind;
    size_t offset;
    const char *fallback; /* the default, as --set would take it */
    uint64_t min, max;
    const char *choices; /* of CHOICE and LEVEL, separated by | */
    bool live;           /* read again on SIGHUP; all others at start only */
    const char *help;
} row;

#define K 1024ull
#define M (1024 * K)
#define G (1024 * M)
#define DAY_MS (24ull * 3600 * 1000)
#define AT(field) offsetof(gw_conf, field)

/* Sections stand together; the order is the order of default.json. */
static const row rows[] = {
    {"model.path", TEXT, AT(model_path), "config/models/nano",
     .help = "checkpoint directory, or random:SHAPE?layers=N&seed=N"},
    {"model.draft", TEXT, AT(model_draft), "auto",
     .help = "draft directory; auto: MODEL/dspark if it is there; off"},
    {"model.aliases", LIST, AT(model_aliases), "",
     .help = "names that requests may give besides the model's own; *: any"},

    {"engine.backend", CHOICE, AT(engine_backend), "auto", .choices = "auto|cpu|cuda|hip",
     .help = "device to run on"},
    {"engine.cpu", CHOICE, AT(engine_cpu), "auto", .choices = "auto|ref|avx2|avx512",
     .help = "variant of the cpu backend"},
    {"engine.kv", CHOICE, AT(engine_kv), "nvfp4", .choices = "nvfp4|fp8|bf16|f32",
     .help = "format of cached keys and values"},
    {"engine.threads", U32, AT(engine_threads), "0", 0, 1024,
     .help = "threads of the cpu backend; 0: one a core"},
    {"engine.kv_bytes_max", U64, AT(engine_kv_bytes_max), "536870912", 1 * M, 1024 * G,
     .help = "memory for pages"},
    {"engine.context_max_tokens", U32, AT(engine_context_max_tokens), "0", 0, 16777216,
     .help = "window; 0: the model's"},
    {"engine.sequences_max", U32, AT(engine_sequences_max), "32", 1, 4096,
     .help = "sequences that run at once"},
    {"engine.queue_max", U32, AT(engine_queue_max), "256", 1, 65536,
     .help = "requests that wait; more are refused with 503"},
    {"engine.step_rows_max", U32, AT(engine_step_rows_max), "512", 1, 65536,
     .help = "token rows of one step"},
    {"engine.prefill_chunk_tokens", U32, AT(engine_prefill_chunk_tokens), "256", 1, 65536,
     .help = "prompt tokens of one sequence in one step"},
    {"engine.step_ms_target", U32, AT(engine_step_ms_target), "50", 0, 60000,
     .help = "prompt tokens in a step beside other sequences' are cut to about this time; 0: not"},
    {"engine.step_stretch_percent", U32, AT(engine_step_stretch_percent), "100", 0, 10000,
     .help = "and so that it takes at most so much longer than without them; 0: not"},
    {"engine.packed_bytes_max", U64, AT(engine_packed_bytes_max), "68719476736", 0, 1024 * 1024 * G,
     .help = "repacked weights up to so many bytes are kept in DATA; 0: none"},
    {"engine.draft", DRAFT, AT(engine_draft), "auto", 0, 7,
     .help = "draft tokens a step: auto, off, 1 to 7"},
    {"engine.slow_step_us", U32, AT(engine_slow_step_us), "0", 0, 10000000,
     .help = "tests: sleep so long in every step"},
    {"engine.slow_row_ns", U32, AT(engine_slow_row_ns), "0", 0, 1000000000,
     .help = "tests: and so long for each token row of it"},
    {"engine.null", BOOL, AT(engine_null), "false",
     .help = "tests and benches: no model is run, every answer is a fixed script; memory alone"},

    {"admission.queue_ms_max", U32, AT(admission_queue_ms_max), "300000", 0, DAY_MS,
     .help = "predicted wait for the engine; more is refused with 503; 0: no bound"},
    {"admission.tenant_percent_max", U32, AT(admission_tenant_percent_max), "80", 1, 100,
     .help = "of engine.queue_max and of that wait, what one tenant may fill; more is 429"},

    {"server.listen", TEXT, AT(server_listen), "127.0.0.1:8080",
     .help = "ADDR:PORT or unix:/PATH for HTTP/1.1 and h2c; port 0: any free one"},
    {"server.tls_listen", TEXT, AT(server_tls_listen), "",
     .help = "ADDR:PORT or unix:/PATH for TLS; empty: none"},
    {"server.tls_cert", TEXT, AT(server_tls_cert), "",
     .help = "PEM file, the chain, leaf first; on SIGHUP all three are read again"},
    {"server.tls_key", TEXT, AT(server_tls_key), "", .help = "PEM file"},
    {"server.tls_client_ca", TEXT, AT(server_tls_client_ca), "",
     .help = "PEM file; clients must show a certificate that one of these signed; empty: none"},
    {"server.unix_mode", TEXT, AT(server_unix_mode), "0600",
     .help = "permissions of the files of unix:/PATH, octal"},
    {"server.loops", U32, AT(server_loops), "0", 0, 256,
     .help = "network threads; 0: one for every four cores"},
    {"server.header_bytes_max", U32, AT(server_header_bytes_max), "65536", 1 * K, 256 * K,
     .help = "path and headers of a request; more is 431"},
    {"server.keepalive_ms", U32, AT(server_keepalive_ms), "15000", 10, DAY_MS,
     .help = "a silent stream gets a comment so often"},
    {"server.resume_ms", U32, AT(server_resume_ms), "10000", 0, DAY_MS,
     .help = "stored streams and requests with an Idempotency-Key go on without their client for "
             "so long"},
    {"server.idempotency_ms", U32, AT(server_idempotency_ms), "600000", 0, DAY_MS,
     .help = "an answer is given again to the same Idempotency-Key for so long"},
    {"server.drain_ms", U32, AT(server_drain_ms), "30000", 0, DAY_MS,
     .help = "after SIGTERM, time for running requests"},
    {"server.cors_origins", LIST, AT(server_cors_origins), "",
     .help = "web origins that may call; *: any"},
    {"server.hosts", LIST, AT(server_hosts), "",
     .help = "names accepted in Host while there are no keys"},
    {"server.insecure", BOOL, AT(server_insecure), "false",
     .help = "serve beyond loopback without keys"},

    {"limits.body_bytes_max", U64, AT(limits_body_bytes_max), "33554432", 1 * K, 1 * G,
     .help = "a request body; more is 413"},
    {"limits.body_bytes_total_max", U64, AT(limits_body_bytes_total_max), "268435456", 1 * M,
     1024 * G, .help = "bodies of all requests together"},
    {"limits.answer_bytes_total_max", U64, AT(limits_answer_bytes_total_max), "268435456", 1 * M,
     1024 * G, .help = "bytes of answers that wait for their clients, together"},
    {"limits.connections_max", U32, AT(limits_connections_max), "1024", 1, 1000000,
     .help = "connections of the public ports"},
    {"limits.output_tokens_max", U32, AT(limits_output_tokens_max), "0", 0, 16777216,
     .help = "tokens of an answer; 0: what the window leaves"},
    {"limits.json_depth_max", U32, AT(limits_json_depth_max), "128", 8, BASE_JSON_DEPTH_MAX,
     .help = "nesting of a body"},
    {"limits.n_max", U32, AT(limits_n_max), "8", 1, 128, .help = "choices of a request"},
    {"limits.idle_connection_ms", U32, AT(limits_idle_connection_ms), "75000", 100, DAY_MS,
     .help = "a connection without a request and without bytes"},
    {"limits.head_ms", U32, AT(limits_head_ms), "15000", 100, DAY_MS,
     .help = "from the first to the last byte of a request's head (HTTP/1.1)"},
    {"limits.upload_ms", U32, AT(limits_upload_ms), "600000", 100, DAY_MS,
     .help = "from the first to the last byte of a request"},
    {"limits.write_stall_ms", U32, AT(limits_write_stall_ms), "30000", 100, DAY_MS,
     .help = "a client that takes no byte of its answer"},
    {"limits.request_timeout_ms", U32, AT(limits_request_timeout_ms), "600000", 0, DAY_MS,
     .help = "a whole request; 0: no bound"},

    {"admin.listen", TEXT, AT(admin_listen), "127.0.0.1:8081",
     .help = "ADDR:PORT of the admin listener; empty: none"},
    /* Longer than any step: a chunk of prefill takes tenths of a second. */
    {"health.stalled_ms", U32, AT(health_stalled_ms), "15000", 100, DAY_MS,
     .help = "/health/ready is 503 once the engine has work and makes no step for so long"},
    {"metrics.public", BOOL, AT(metrics_public), "false",
     .help = "/metrics on the public ports too"},
    {"metrics.vllm_names", BOOL, AT(metrics_vllm_names), "false",
     .help = "the same numbers under vLLM's well-known names as well"},

    {"cache.disk", BOOL, AT(cache_disk), "true", .help = "pages outlive the process, in DATA/kv"},
    {"cache.disk_bytes", U64, AT(cache_disk_bytes), "4294967296", 16 * M, 1024 * 1024 * G,
     .help = "on disk at most; what was used longest ago goes"},
    {"cache.disk_write_bytes_s", U64, AT(cache_disk_write_bytes_s), "0", 0, 1024 * G,
     .help = "budget of writing a second; 0: no bound"},
    {"cache.disk_write_bytes_day", U64, AT(cache_disk_write_bytes_day), "0", 0, 1024 * 1024 * G,
     .help = "budget of writing a day (UTC), kept over restarts; 0: no bound"},
    {"cache.policy", CHOICE, AT(cache_policy), "value", .choices = "value|lru",
     .help = "which pages leave memory first: worth least, or used longest ago"},

    {"data.path", TEXT, AT(data_path), "data",
     .help = "directory of everything that lasts; made if it is not there"},
    {"ledger.cached_ttl_s", U32, AT(ledger_cached_ttl_s), "86400", 0, 366ull * 86400,
     .help = "turns that nobody asked to keep; 0: not on disk"},
    {"ledger.restore", CHOICE, AT(ledger_restore), "auto", .choices = "auto|linked|off",
     .help =
         "hidden reasoning for clients that drop it: where it fits alone, by minted ids, never"},
    {"ledger.volatile_lines", BOOL, AT(ledger_volatile_lines), "false",
     .help = "tell system texts that change by dates, counters and ids alone from edited ones"},
    {"ledger.kept_ttl_s", U32, AT(ledger_kept_ttl_s), "0", 0, 100ull * 366 * 86400,
     .help = "turns that were to be kept; 0: until they are deleted"},
    {"ledger.bytes_max", U64, AT(ledger_bytes_max), "17179869184", 0, 1024 * G,
     .help = "whimbrel.db; past it the oldest cached turns go, kept ones are refused; 0: no bound"},
    {"ledger.tenant_bytes_max", U64, AT(ledger_tenant_bytes_max), "0", 0, 1024 * G,
     .help = "the same for one tenant; 0: no bound"},

    {"sessions.count_max", U32, AT(sessions_count_max), "10000", 1, 10000000,
     .help = "native sessions of a tenant; more are refused with 429"},
    {"sessions.items_max", U32, AT(sessions_items_max), "1000", 1, 100000,
     .help = "items that one turn brings"},
    {"sessions.queue_max", U32, AT(sessions_queue_max), "16", 0, 65536,
     .help = "turns that wait for one of the same session; more are refused with 409"},
    {"sessions.queue_wait_ms", U32, AT(sessions_queue_wait_ms), "30000", 0, DAY_MS,
     .help = "how long they wait; then 409"},
    {"sessions.append_bytes_max", U64, AT(sessions_append_bytes_max), "4194304", 1 * K, 1 * G,
     .help = "tool results that wait for a session's turn; more is 413"},
    {"sessions.append_bytes_total_max", U64, AT(sessions_append_bytes_total_max), "67108864",
     64 * K, 1024 * G, .help = "the same of all sessions; the longest untouched give way"},
    {"sessions.pin_seconds_max", U32, AT(sessions_pin_seconds_max), "3600", 0, 366ull * 86400,
     .help = "longest pin of a session's pages"},
    {"sessions.pin_percent_max", U32, AT(sessions_pin_percent_max), "50", 0, 100,
     .help = "of the pages in memory, what pins may hold; more is 429"},
    {"sessions.pin_tenant_percent_max", U32, AT(sessions_pin_tenant_percent_max), "25", 0, 100,
     .help = "the same for one tenant"},

    {"conversations.count_max", U32, AT(conversations_count_max), "10000", 1, 10000000,
     .help = "conversations of a tenant; more are refused with 429"},
    {"conversations.items_max", U32, AT(conversations_items_max), "10000", 1, 1000000,
     .help = "items of a conversation; more are refused with 400"},

    {"log.level", LEVEL, AT(log_level), "info", .choices = "debug|info|warn|error", .live = true,
     .help = "least level that is written"},
    {"log.access", BOOL, AT(log_access), "true", .help = "one line a request"},
    {"log.trace_path", TEXT, AT(log_trace_path), "",
     .help = "file for one JSON line a request; empty: none"},
    {"otlp.endpoint", TEXT, AT(otlp_endpoint), "",
     .help = "URL of a trace collector, http://HOST:4318/v1/traces; empty: none"},

    {"workers.threads", U32, AT(workers_threads), "0", 0, 256,
     .help = "threads that parse and tokenize bodies up to 64 KiB, as many for those up to 1 MiB, "
             "a fourth and one for larger ones; 0: one for every two cores"},
    {"workers.queue_max", U32, AT(workers_queue_max), "256", 1, 65536,
     .help = "requests of each of the three sizes that wait for one"},
};
#define ROW_COUNT (sizeof rows / sizeof *rows)

typedef struct flag {
    const char *group; /* its heading in the help; NULL: that of the one before */
    const char *name;
    const char *key; /* NULL: not a key's short form */
    bool takes_value;
    const char *value, *help; /* of the help: what stands behind the name, and what it does */
} flag;

static const flag flags[] = {
    {"What is served", "--model", "model.path", true, "DIR",
     "checkpoint, or random:SHAPE?layers=N&seed=N"},
    {NULL, "--draft", "model.draft", true, "DIR", "draft model; auto: MODEL/dspark; off"},
    {"Where", "--listen", "server.listen", true, "ADDR:PORT",
     "HTTP/1.1 and h2c; port 0: any free one"},
    {NULL, "--data", "data.path", true, "DIR", "all that lasts: sessions, keys, cached pages"},
    {"How", "--backend", "engine.backend", true, "NAME", "auto, cpu, cuda or hip"},
    {NULL, "--kv", "engine.kv", true, "TYPE", "cached keys and values: nvfp4, fp8, bf16 or f32"},
    {"Configuration", "--config", NULL, true, "FILE",
     "JSON, as --print-config writes it; keys may be left out"},
    {NULL, "--set", NULL, true, "KEY=VALUE", "any key below; lists with commas; may be repeated"},
    {NULL, "--print-config", NULL, false, "", "the effective configuration, then exit"},
    {"Looking", "--trace", "log.trace_path", true, "FILE",
     "one JSON line a request, sizes and times only"},
    {NULL, "--version", NULL, false, "", "then exit"},
    {NULL, "--help", NULL, false, "", "then exit"},
};
#define FLAG_COUNT (sizeof flags / sizeof *flags)

static const row *find_row(const char *key)
{
    for (size_t i = 0; i < ROW_COUNT; i++)
        if (strcmp(rows[i].key, key) == 0)
            return &rows[i];
    return NULL;
}

/* Levenshtein distance, of names below WORD_MAX characters. */
#define WORD_MAX 64
static size_t distance(const char *a, const char *b)
{
    size_t line[WORD_MAX], width = strlen(b);
    if (width >= WORD_MAX || strlen(a) >= WORD_MAX)
        return SIZE_MAX;
    for (size_t j = 0; j <= width; j++)
        line[j] = j;
    for (size_t i = 1; a[i - 1] != '\0'; i++) {
        size_t diagonal = line[0];
        line[0] = i;
        for (size_t j = 1; j <= width; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = line[j];
            if (line[j] + 1 < best)
                best = line[j] + 1;
            if (line[j - 1] + 1 < best)
                best = line[j - 1] + 1;
            line[j] = best;
        }
    }
    return line[width];
}

static base_code unknown_key(const char *key, base_err *err)
{
    const char *nearest = rows[0].key;
    size_t least = SIZE_MAX;
    for (size_t i = 0; i < ROW_COUNT; i++) {
        size_t d = distance(key, rows[i].key);
        /* The name without its section is how most mistakes look. */
        const char *name = strchr(rows[i].key, '.') + 1;
        if (strcmp(key, name) == 0)
            d = 0;
        if (d < least) {
            least = d;
            nearest = rows[i].key;
        }
    }
    return base_fail_param(err, BASE_INVALID, key, "unknown key \"%.60s\"; the nearest is \"%s\"",
                           key, nearest);
}

static bool one_of(const char *choices, const char *value, size_t *index)
{
    size_t length = strlen(value);
    for (const char *at = choices;; at++, ++*index) {
        const char *end = strchrnul(at, '|');
        if ((size_t)(end - at) == length && memcmp(at, value, length) == 0)
            return true;
        if (*end == '\0')
            return false;
        at = end;
    }
}

static void *field(gw_conf *conf, const row *r)
{
    return (char *)conf + r->offset;
}

static base_code no_memory(base_err *err)
{
    return base_fail(err, BASE_NOMEM, "no memory for the configuration");
}

static void list_free(gw_conf_list *list)
{
    for (uint32_t i = 0; i < list->count; i++)
        free(list->items[i]);
    free(list->items);
    *list = (gw_conf_list){0};
}

static base_code list_add(gw_conf_list *list, const char *text, size_t length, base_err *err)
{
    char **items = realloc(list->items, (list->count + 1) * sizeof *items);
    if (items == NULL)
        return no_memory(err);
    list->items = items;
    if ((items[list->count] = strndup(text, length)) == NULL)
        return no_memory(err);
    list->count++;
    return BASE_OK;
}

static base_code set_string(gw_conf *conf, const row *r, const char *value, base_err *err)
{
    size_t index = 0;
    if (r->choices != NULL && !one_of(r->choices, value, &index))
        return base_fail_param(err, BASE_INVALID, r->key, "%s \"%.60s\" is not one of %s", r->key,
                               value, r->choices);
    if (r->kind == LEVEL) {
        *(base_log_level *)field(conf, r) =
            (base_log_level)index; /* the choices are in the enum's order */
        return BASE_OK;
    }
    char *copy = strdup(value);
    if (copy == NULL)
        return no_memory(err);
    free(*(char **)field(conf, r));
    *(char **)field(conf, r) = copy;
    return BASE_OK;
}

static base_code set_number(gw_conf *conf, const row *r, uint64_t value, base_err *err)
{
    if (value < r->min || value > r->max)
        return base_fail_param(err, BASE_INVALID, r->key,
                               "%s %" PRIu64 " is not within %" PRIu64 " and %" PRIu64, r->key,
                               value, r->min, r->max);
    if (r->kind == U64)
        *(uint64_t *)field(conf, r) = value;
    else if (r->kind == U32)
        *(uint32_t *)field(conf, r) = (uint32_t)value;
    else
        *(int32_t *)field(conf, r) = (int32_t)value;
    return BASE_OK;
}

static bool draft_word(gw_conf *conf, const row *r, const char *value)
{
    if (strcmp(value, "auto") != 0 && strcmp(value, "off") != 0)
        return false;
    *(int32_t *)field(conf, r) = value[0] == 'a' ? -1 : 0;
    return true;
}

static base_code set_text(gw_conf *conf, const row *r, const char *value, base_err *err)
{
    base_code code = BASE_OK;
    switch (r->kind) {
    case TEXT:
    case CHOICE:
    case LEVEL:
        return set_string(conf, r, value, err);
    case LIST: {
        gw_conf_list list = {0};
        for (const char *at = value; code == BASE_OK && *at != '\0';) {
            const char *end = strchrnul(at, ',');
            if (end != at)
                code = list_add(&list, at, (size_t)(end - at), err);
            at = *end == ',' ? end + 1 : end;
        }
        list_free(field(conf, r));
        *(gw_conf_list *)field(conf, r) = list;
        return code;
    }
    case BOOL:
        if (strcmp(value, "true") != 0 && strcmp(value, "false") != 0)
            return base_fail_param(err, BASE_INVALID, r->key, "%s \"%.60s\" is not true or false",
                                   r->key, value);
        *(bool *)field(conf, r) = value[0] == 't';
        return BASE_OK;
    case DRAFT:
        if (draft_word(conf, r, value))
            return BASE_OK;
        /* fallthrough */
    case U32:
    case U64: {
        char *end;
        errno = 0;
        unsigned long long number = strtoull(value, &end, 10);
        if (!isdigit((unsigned char)value[0]) || *end != '\0' || errno != 0)
            return base_fail_param(err, BASE_INVALID, r->key, "%s \"%.60s\" is not a whole number",
                                   r->key, value);
        return set_number(conf, r, number, err);
    }
    }
    return code;
}

static base_code set_json(gw_conf *conf, const row *r, const json_t *value, base_err *err)
{
    static const char *const wants[] = {
        [TEXT] = "a string",
        [CHOICE] = "a string",
        [LIST] = "an array of strings",
        [U32] = "a whole number",
        [U64] = "a whole number",
        [BOOL] = "true or false",
        [DRAFT] = "auto, off or a whole number",
        [LEVEL] = "a string",
    };
    base_code code = BASE_OK;
    switch (r->kind) {
    case TEXT:
    case CHOICE:
    case LEVEL:
        if (json_is_string(value))
            return set_string(conf, r, json_string_value(value), err);
        break;
    case LIST: {
        if (!json_is_array(value))
            break;
        list_free(field(conf, r));
        for (size_t i = 0; i < json_array_size(value) && code == BASE_OK; i++) {
            const json_t *item = json_array_get(value, i);
            if (!json_is_string(item))
                return base_fail_param(err, BASE_INVALID, r->key, "%s[%zu] is not a string", r->key,
                                       i);
            code = list_add(field(conf, r), json_string_value(item), json_string_length(item), err);
        }
        return code;
    }
    case BOOL:
        if (!json_is_boolean(value))
            break;
        *(bool *)field(conf, r) = json_is_true(value);
        return BASE_OK;
    case DRAFT:
        if (json_is_string(value) && draft_word(conf, r, json_string_value(value)))
            return BASE_OK;
        /* fallthrough */
    case U32:
    case U64:
        if (json_is_integer(value) && json_integer_value(value) >= 0)
            return set_number(conf, r, (uint64_t)json_integer_value(value), err);
        break;
    }
    return base_fail_param(err, BASE_INVALID, r->key, "%s must be %s", r->key, wants[r->kind]);
}

static bool is_section(const char *name)
{
    size_t length = strlen(name);
    for (size_t i = 0; i < ROW_COUNT; i++)
        if (strncmp(rows[i].key, name, length) == 0 && rows[i].key[length] == '.')
            return true;
    return false;
}

static base_code load_file(gw_conf *conf, const char *path, base_err *err)
{
    json_error_t at;
    base_code code = BASE_OK;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &at);
    if (root == NULL)
        return json_error_code(&at) == json_error_cannot_open_file
                   ? base_fail_param(err, BASE_IO, "--config", "cannot open %.100s: %s", path,
                                     strerror(errno))
                   : base_fail_param(err, BASE_FORMAT, "--config", "%.60s line %d: %.80s", path,
                                     at.line, at.text);
    if (!json_is_object(root))
        code = base_fail_param(err, BASE_FORMAT, "--config", "%.100s is not a JSON object", path);
    const char *section, *name;
    json_t *members, *value;
    if (code == BASE_OK)
        json_object_foreach(root, section, members)
        {
            if (!json_is_object(members)) {
                code = is_section(section) ? base_fail_param(err, BASE_INVALID, section,
                                                             "%s must be an object", section)
                                           : unknown_key(section, err);
                goto out;
            }
            json_object_foreach(members, name, value)
            {
                char key[128];
                snprintf(key, sizeof key, "%s.%s", section, name);
                const row *r = find_row(key);
                code = r == NULL ? unknown_key(key, err) : set_json(conf, r, value, err);
                if (code != BASE_OK)
                    goto out;
            }
        }
out:
    if (code == BASE_INVALID)
        base_wrap(err, "%.60s", path);
    json_decref(root);
    return code;
}

static base_code set_pair(gw_conf *conf, const char *pair, base_err *err)
{
    char key[128];
    const char *equals = strchr(pair, '=');
    if (equals == NULL || (size_t)(equals - pair) >= sizeof key)
        return base_fail_param(err, BASE_INVALID, "--set", "--set \"%.60s\" is not KEY=VALUE",
                               pair);
    memcpy(key, pair, (size_t)(equals - pair));
    key[equals - pair] = '\0';
    const row *r = find_row(key);
    return r == NULL ? unknown_key(key, err) : set_text(conf, r, equals + 1, err);
}

/* A flag, its value taken from "--flag=value" or the next argument. */
static base_code next_flag(const flag **out, const char **value, int argc, char *const *argv,
                           int *at, base_err *err)
{
    const char *arg = argv[(*at)++];
    size_t length = (size_t)(strchrnul(arg, '=') - arg), least = SIZE_MAX;
    const flag *nearest = &flags[0];
    char name[WORD_MAX];
    snprintf(name, sizeof name, "%.*s", (int)(length < sizeof name ? length : sizeof name - 1),
             arg);
    for (size_t i = 0; i < FLAG_COUNT; i++) {
        size_t d = distance(name, flags[i].name);
        if (d < least) {
            least = d;
            nearest = &flags[i];
        }
    }
    if (least != 0)
        return base_fail_param(err, BASE_INVALID, "argv",
                               "unknown argument \"%.60s\"; the nearest flag is %s", arg,
                               nearest->name);
    *out = nearest;
    *value = NULL;
    if (arg[length] == '=')
        *value = arg + length + 1;
    else if (nearest->takes_value && *at < argc)
        *value = argv[(*at)++];
    if (nearest->takes_value != (*value != NULL))
        return base_fail_param(err, BASE_INVALID, nearest->name, "%s %s", nearest->name,
                               nearest->takes_value ? "needs a value" : "takes no value");
    return BASE_OK;
}

static base_code below(const char *key, uint64_t value, const char *bound_key, uint64_t bound,
                       base_err *err)
{
    if (value <= bound)
        return BASE_OK;
    return base_fail_param(err, BASE_INVALID, key, "%s %" PRIu64 " exceeds %s %" PRIu64, key, value,
                           bound_key, bound);
}

static base_code check(const gw_conf *conf, base_err *err)
{
    base_code code;
    if (conf->server_tls_listen[0] != '\0' &&
        (conf->server_tls_cert[0] == '\0' || conf->server_tls_key[0] == '\0')) {
        const char *missing =
            conf->server_tls_cert[0] == '\0' ? "server.tls_cert" : "server.tls_key";
        return base_fail_param(err, BASE_INVALID, missing, "server.tls_listen needs %s", missing);
    }
    const char *mode = conf->server_unix_mode;
    size_t digits = strspn(mode, "01234567");
    if (digits == 0 || mode[digits] != '\0' || strtoul(mode, NULL, 8) > 0777)
        return base_fail_param(err, BASE_INVALID, "server.unix_mode",
                               "server.unix_mode \"%.20s\" is not an octal number up to 0777",
                               mode);
    if ((code = below("limits.body_bytes_max", conf->limits_body_bytes_max,
                      "limits.body_bytes_total_max", conf->limits_body_bytes_total_max, err)) !=
            BASE_OK ||
        (code = below("engine.prefill_chunk_tokens", conf->engine_prefill_chunk_tokens,
                      "engine.step_rows_max", conf->engine_step_rows_max, err)) != BASE_OK)
        return code;
    return below("engine.sequences_max", conf->engine_sequences_max, "engine.step_rows_max",
                 conf->engine_step_rows_max, err);
}

base_code gw_conf_create(gw_conf **out, gw_conf_action *action, int argc, char *const *argv,
                         base_err *err)
{
    gw_conf *conf = calloc(1, sizeof *conf);
    gw_conf_action wanted = GW_CONF_SERVE;
    const flag *f;
    const char *value;
    base_code code = conf == NULL ? no_memory(err) : BASE_OK;
    for (size_t i = 0; i < ROW_COUNT && code == BASE_OK; i++)
        code = set_text(conf, &rows[i], rows[i].fallback, err);
    /* Files first: a flag beats a file wherever it stands. */
    for (int at = 1; at < argc && code == BASE_OK;)
        if ((code = next_flag(&f, &value, argc, argv, &at, err)) == BASE_OK &&
            strcmp(f->name, "--config") == 0)
            code = load_file(conf, value, err);
    for (int at = 1; at < argc && code == BASE_OK;) {
        if ((code = next_flag(&f, &value, argc, argv, &at, err)) != BASE_OK)
            break;
        if (f->key != NULL)
            code = set_text(conf, find_row(f->key), value, err);
        else if (strcmp(f->name, "--set") == 0)
            code = set_pair(conf, value, err);
        else if (strcmp(f->name, "--print-config") == 0)
            wanted = GW_CONF_PRINT;
        else if (strcmp(f->name, "--version") == 0)
            wanted = GW_CONF_VERSION;
        else if (strcmp(f->name, "--help") == 0)
            wanted = GW_CONF_HELP;
    }
    if (code == BASE_OK)
        code = check(conf, err);
    if (code != BASE_OK) {
        gw_conf_destroy(conf);
        return code;
    }
    if (action != NULL)
        *action = wanted;
    *out = conf;
    return BASE_OK;
}

base_code gw_conf_change(base_log_level *level, const json_t *changes, base_err *err)
{
    gw_conf changed = {.log_level = *level}; /* all that is live */
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)changes, key, value)
    {
        const row *r = find_row(key);
        if (r != NULL && !r->live)
            return base_fail_param(err, BASE_INVALID, r->key, "%s is read at the start only",
                                   r->key);
        base_code code = r == NULL ? unknown_key(key, err) : set_json(&changed, r, value, err);
        if (code != BASE_OK)
            return code;
    }
    *level = changed.log_level;
    return BASE_OK;
}

void gw_conf_destroy(gw_conf *conf)
{
    if (conf == NULL)
        return;
    for (size_t i = 0; i < ROW_COUNT; i++) {
        if (rows[i].kind == TEXT || rows[i].kind == CHOICE)
            free(*(char **)field(conf, &rows[i]));
        else if (rows[i].kind == LIST)
            list_free(field(conf, &rows[i]));
    }
    free(conf);
}

static void print_value(base_buf *out, const gw_conf *conf, const row *r)
{
    const void *at = (const char *)conf + r->offset;
    const char *word = NULL;
    switch (r->kind) {
    case TEXT:
    case CHOICE:
        word = *(char *const *)at;
        break;
    case LIST: {
        const gw_conf_list *list = at;
        base_buf_puts(out, "[");
        for (uint32_t i = 0; i < list->count; i++) {
            if (i > 0)
                base_buf_puts(out, ", ");
            base_buf_json_string(out, list->items[i], strlen(list->items[i]));
        }
        base_buf_puts(out, "]");
        return;
    }
    case U32:
        base_buf_printf(out, "%" PRIu32, *(const uint32_t *)at);
        return;
    case U64:
        base_buf_printf(out, "%" PRIu64, *(const uint64_t *)at);
        return;
    case BOOL:
        base_buf_puts(out, *(const bool *)at ? "true" : "false");
        return;
    case DRAFT: {
        int32_t draft = *(const int32_t *)at;
        if (draft > 0) {
            base_buf_printf(out, "%" PRId32, draft);
            return;
        }
        word = draft < 0 ? "auto" : "off";
        break;
    }
    case LEVEL: {
        size_t index = (size_t) * (const base_log_level *)at;
        const char *from = r->choices;
        while (index-- > 0)
            from = strchr(from, '|') + 1;
        base_buf_json_string(out, from, (size_t)(strchrnul(from, '|') - from));
        return;
    }
    }
    base_buf_json_string(out, word, strlen(word));
}

void gw_conf_print(const gw_conf *conf, FILE *file)
{
    base_buf out;
    base_buf_init(&out, 0);
    base_buf_puts(&out, "{");
    for (size_t i = 0; i < ROW_COUNT; i++) {
        const char *dot = strchr(rows[i].key, '.');
        size_t section = (size_t)(dot - rows[i].key) + 1;
        bool opens = i == 0 || strncmp(rows[i].key, rows[i - 1].key, section) != 0;
        if (opens) {
            base_buf_puts(&out, i == 0 ? "\n  " : "\n  },\n  ");
            base_buf_json_string(&out, rows[i].key, section - 1);
            base_buf_puts(&out, ": {");
        } else {
            base_buf_puts(&out, ",");
        }
        base_buf_printf(&out, "\n    \"%s\": ", dot + 1);
        print_value(&out, conf, &rows[i]);
    }
    base_buf_puts(&out, "\n  }\n}\n");
    if (!out.failed)
        fwrite(out.data, 1, out.length, file);
    base_buf_deinit(&out);
}

/* Headings of the keys' sections, in the order of the table. */
static const struct {
    const char *section, *title;
} sections[] = {
    {"model", "Model"},
    {"engine", "Engine"},
    {"server", "Server"},
    {"limits", "Limits"},
    {"admin", "Admin listener"},
    {"metrics", "Metrics"},
    {"cache", "Cache of pages"},
    {"data", "Data directory"},
    {"ledger", "Ledger of sessions"},
    {"sessions", "Native sessions"},
    {"conversations", "Conversations"},
    {"log", "Log"},
    {"workers", "Worker threads"},
};

static void help_section(FILE *file, const char *key)
{
    size_t length = strcspn(key, ".");
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
        if (strncmp(sections[i].section, key, length) == 0 && !sections[i].section[length]) {
            fprintf(file, "\n%s\n", sections[i].title);
            return;
        }
    fprintf(file, "\n%.*s\n", (int)length, key);
}

void gw_conf_help(FILE *file)
{
    fputs("usage: whimbrel [FLAG]...\n\n"
          "Serves OpenAI's and Anthropic's APIs to agents and remembers their sessions. Prints a\n"
          "line that begins with \"ready\" once it serves; SIGTERM lets what runs end first.\n\n"
          "  whimbrel --model DIR                      on 127.0.0.1:8080, state in ./data\n"
          "  whimbrel --config FILE --set log.level=warn\n\n"
          "The operator's side is at http://127.0.0.1:8081 (admin.listen): /dashboard/, /metrics "
          "and /admin/v1/.\n",
          file);
    for (size_t i = 0; i < FLAG_COUNT; i++) {
        char name[40];
        if (flags[i].group)
            fprintf(file, "\n%s\n", flags[i].group);
        snprintf(name, sizeof name, "%s %s", flags[i].name, flags[i].value);
        fprintf(file, "  %-22s  %s%s%s%s\n", name, flags[i].help, flags[i].key ? " [" : "",
                flags[i].key ? flags[i].key : "", flags[i].key ? "]" : "");
    }
    fputs("\nKEYS, with their defaults; an unknown one is refused\n", file);
    for (size_t i = 0; i < ROW_COUNT; i++) {
        const row *r = &rows[i];
        size_t section = strcspn(r->key, ".");
        if (i == 0 || strncmp(r->key, rows[i - 1].key, section + 1) != 0)
            help_section(file, r->key);
        fprintf(file, "  %s=%s\n      %s", r->key, r->fallback, r->help);
        if (r->choices != NULL)
            fprintf(file, " (%s)", r->choices);
        else if (r->max != 0)
            fprintf(file, " (%" PRIu64 " to %" PRIu64 ")", r->min, r->max);
        fputs(r->live ? "; read again on SIGHUP\n" : "\n", file);
    }
}

bool gw_conf_is_loopback(const char *listen)
{
    if (strncmp(listen, "unix:", 5) == 0)
        return true;
    char host[INET6_ADDRSTRLEN + 2];
    const char *colon = strrchr(listen, ':');
    size_t length = colon != NULL ? (size_t)(colon - listen) : strlen(listen);
    if (length >= sizeof host)
        return false;
    memcpy(host, listen, length);
    host[length] = '\0';
    struct in_addr four;
    return strcmp(host, "localhost") == 0 || strcmp(host, "[::1]") == 0 ||
           (inet_pton(AF_INET, host, &four) == 1 && ntohl(four.s_addr) >> 24 == 127);
}
