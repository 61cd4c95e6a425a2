/* gw_conf: the configuration, read once at start and then constant.
 *
 * conf.c holds one table of keys; the flags, --print-config, --help and config/default.json come
 * from it. Values are taken in this order, the later one wins: the default, the file of --config,
 * --set and the other flags. A value that does not parse, is out of its bounds or does not fit
 * another key is BASE_INVALID with the key in err->param. Thread: any, after gw_conf_create. */
#pragma once
#include <stdio.h>

#include "engine/base/err.h"
#include "engine/base/log.h"

struct json_t;

typedef struct gw_conf_list {
    char **items;
    uint32_t count;
} gw_conf_list;

/* One field a key: section.name is section_name. Strings are never NULL. */
typedef struct gw_conf {
    char *model_path;           /* directory, or "random:SHAPE?layers=N&seed=N" */
    char *model_draft;          /* directory, "auto" (MODEL/dspark if it exists) or "off" */
    gw_conf_list model_aliases; /* further names that requests may give; "*" is any name */

    char *engine_backend;    /* "auto", "cpu", "cuda", "hip" */
    char *engine_cpu;        /* "auto", "ref", "avx2", "avx512" */
    char *engine_kv;         /* "nvfp4", "fp8", "bf16", "f32" */
    uint32_t engine_threads; /* 0: one a core */
    uint64_t engine_kv_bytes_max;
    uint32_t engine_context_max_tokens; /* 0: the model's */
    uint32_t engine_sequences_max;
    uint32_t engine_queue_max;
    uint32_t engine_step_rows_max;
    uint32_t engine_prefill_chunk_tokens;
    uint32_t engine_step_ms_target, engine_step_stretch_percent;
    uint64_t engine_packed_bytes_max;
    int32_t engine_draft; /* draft tokens a step: -1 auto, 0 off, 1-7 */
    uint32_t engine_slow_step_us, engine_slow_row_ns;
    bool engine_null;

    uint32_t admission_queue_ms_max; /* 0: no bound */
    uint32_t admission_tenant_percent_max;

    char *server_listen; /* ADDR:PORT, "[::1]:8080", "unix:/path"; port 0 lets the system choose */
    char *server_tls_listen;                                       /* "": no TLS */
    char *server_tls_cert, *server_tls_key, *server_tls_client_ca; /* read again on SIGHUP */
    char *server_unix_mode;                                        /* octal digits */
    uint32_t server_loops;                                         /* 0: one for every four cores */
    uint32_t server_header_bytes_max;
    uint32_t server_keepalive_ms;
    uint32_t server_resume_ms, server_idempotency_ms;
    uint32_t server_drain_ms;
    gw_conf_list server_cors_origins; /* "https://app.example"; "*" is any */
    gw_conf_list server_hosts;        /* names of this server, for Host without keys */
    bool server_insecure;

    uint64_t limits_body_bytes_max;
    uint64_t limits_body_bytes_total_max;
    uint64_t limits_answer_bytes_total_max;
    uint32_t limits_connections_max;
    uint32_t limits_output_tokens_max; /* 0: what the window leaves */
    uint32_t limits_json_depth_max;
    uint32_t limits_n_max;
    uint32_t limits_idle_connection_ms;
    uint32_t limits_head_ms;
    uint32_t limits_upload_ms;
    uint32_t limits_write_stall_ms;
    uint32_t limits_request_timeout_ms; /* 0: none */

    char *admin_listen; /* "": no admin listener */
    uint32_t health_stalled_ms;
    bool metrics_public;
    bool metrics_vllm_names;

    bool cache_disk;
    uint64_t cache_disk_bytes;
    uint64_t cache_disk_write_bytes_s, cache_disk_write_bytes_day; /* 0: no bound */
    char *cache_policy;                                            /* "value", "lru" */

    char *data_path;
    char *ledger_restore; /* "auto", "linked", "off" */
    bool ledger_volatile_lines;
    uint32_t ledger_cached_ttl_s, ledger_kept_ttl_s;
    uint64_t ledger_bytes_max, ledger_tenant_bytes_max;

    uint32_t sessions_count_max;
    uint32_t sessions_items_max;
    uint32_t sessions_queue_max;
    uint32_t sessions_queue_wait_ms;
    uint64_t sessions_append_bytes_max;
    uint64_t sessions_append_bytes_total_max;
    uint32_t sessions_pin_seconds_max;
    uint32_t sessions_pin_percent_max, sessions_pin_tenant_percent_max;

    uint32_t conversations_count_max, conversations_items_max;

    base_log_level log_level; /* live: read again on SIGHUP */
    bool log_access;
    char *otlp_endpoint;  /* "": none */
    char *log_trace_path; /* "": none; one JSON line a finished request */

    uint32_t workers_threads; /* 0: one for every two cores */
    uint32_t workers_queue_max;
} gw_conf;

/* What the command line asks for. */
typedef enum gw_conf_action {
    GW_CONF_SERVE,
    GW_CONF_PRINT,
    GW_CONF_VERSION,
    GW_CONF_HELP,
} gw_conf_action;

/* From the arguments of main; `action` may be NULL. */
base_code gw_conf_create(gw_conf **out, gw_conf_action *action, int argc, char *const *argv,
                         base_err *err);
void gw_conf_destroy(gw_conf *conf); /* NULL is fine */

/* Live keys by their full names ({"log.level":"debug"}), which are all checked before any is set.
 * BASE_INVALID names a key that is unknown, not live or out of its bounds. Pure. */
base_code gw_conf_change(base_log_level *level, const struct json_t *changes, base_err *err);
/* The effective configuration as JSON; without arguments it is config/default.json to the byte. */
void gw_conf_print(const gw_conf *conf, FILE *file);
/* True if the address is of this machine only: 127.x, ::1, localhost, or unix:/path. */
bool gw_conf_is_loopback(const char *listen);
/* Flags and keys with type, default and bounds. */
void gw_conf_help(FILE *file);
