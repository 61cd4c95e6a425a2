/* Start and stop, in order. Everything that can fail for a reason outside of us fails here, before
 * anyone is served, in one line that names the file or key, with exit status 2. */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/crash.h"
#include "engine/base/log.h"
#include "gateway/admin_session.h"
#include "gateway/append.h"
#include "gateway/bridge.h"
#include "gateway/conf.h"
#include "gateway/events.h"
#include "gateway/inherit.h"
#include "gateway/ledger.h"
#include "gateway/live.h"
#include "gateway/lock.h"
#include "gateway/metrics.h"
#include "gateway/otlp.h"
#include "gateway/pin.h"
#include "gateway/route.h"
#include "gateway/seal.h"
#include "gateway/tape.h"
#include "gateway/tenant.h"
#include "gateway/upload.h"
#include "gateway/work.h"

#define EXIT_UNUSABLE 2
#define TICK_MS_MAX 1000      /* of the bridge; a keep-alive is late by at most this */
#define HAND_BACK_MS 2000     /* for the errors that end what still runs at the drain's deadline */
#define BRIDGE_DRAIN_MS 10000 /* for a step that runs and the commits of what was cut */
#define WATCHDOG_SLACK_MS 15000
#define TAPES_BYTES_MAX (64u << 20) /* of answers kept for retries */
#define TAPES_COUNT_MAX 8192        /* running streams and those answers */
#define SPARE_FDS 128               /* listeners, epoll, database, weights */

static void sleep_ms(uint32_t ms)
{
    struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

static base_code make_data_directory(const gw_conf *conf, base_err *err)
{
    if (mkdir(conf->data_path, 0700) != 0 && errno != EEXIST)
        return base_fail_param(err, BASE_IO, "data.path", "data.path %.120s: %s", conf->data_path,
                               strerror(errno));
    if (access(conf->data_path, R_OK | W_OK | X_OK) != 0)
        return base_fail_param(err, BASE_IO, "data.path", "data.path %.120s: %s", conf->data_path,
                               strerror(errno));
    return BASE_OK;
}

static void raise_descriptor_limit(const gw_conf *conf)
{
    struct rlimit limit;
    rlim_t needed = (rlim_t)conf->limits_connections_max + SPARE_FDS;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed)
        return;
    limit.rlim_cur = limit.rlim_max < needed ? limit.rlim_max : needed;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur < needed)
        base_log(BASE_LOG_WARN, "descriptors limit=%llu wanted=%llu key=limits.connections_max",
                 (unsigned long long)limit.rlim_cur, (unsigned long long)needed);
}

static base_code create_engine(gw_app *app, base_err *err)
{
    const gw_conf *conf = app->conf;
    const char *draft = conf->model_draft;
    char kv[PATH_MAX], costs[PATH_MAX];
    if ((size_t)snprintf(kv, sizeof kv, "%s/kv", conf->data_path) >= sizeof kv ||
        (size_t)snprintf(costs, sizeof costs, "%s/costs", conf->data_path) >= sizeof costs)
        return base_fail_param(err, BASE_INVALID, "data.path", "data.path is too long");
    if (strcmp(draft, "auto") == 0)
        draft = NULL;
    else if (strcmp(draft, "off") == 0)
        draft = "";
    const eng_options options = {
        .model = conf->model_path,
        .draft = draft,
        .backend = conf->engine_backend,
        .modules = getenv("WHIMBREL_MODULES"),
        .variant = conf->engine_cpu,
        .kv = conf->engine_kv,
        .threads = conf->engine_threads,
        .kv_bytes = conf->engine_kv_bytes_max,
        .context_max = conf->engine_context_max_tokens,
        .sequences_max = conf->engine_sequences_max,
        .queue_max = conf->engine_queue_max,
        .step_rows_max = conf->engine_step_rows_max,
        .prefill_chunk = conf->engine_prefill_chunk_tokens,
        .step_ms_target = conf->engine_step_ms_target,
        .step_stretch_percent = conf->engine_step_stretch_percent,
        .queue_ns_max = conf->admission_queue_ms_max * 1000000ull,
        .tenant_percent = conf->admission_tenant_percent_max,
        .draft_tokens = conf->engine_draft,
        .costs = costs,
        .packed = conf->data_path,
        .packed_bytes_max = conf->engine_packed_bytes_max,
        .evict_lru = strcmp(conf->cache_policy, "lru") == 0,
        .disk = conf->cache_disk ? kv : NULL,
        .disk_bytes = conf->cache_disk_bytes,
        .disk_write_bytes_s = conf->cache_disk_write_bytes_s,
        .disk_write_bytes_day = conf->cache_disk_write_bytes_day,
        .sink = gw_bridge_sink(app->bridge),
        .slow_step_us = conf->engine_slow_step_us,
        .slow_row_ns = conf->engine_slow_row_ns,
        .null = conf->engine_null,
    };
    return eng_create(&app->engine, &options, err);
}

/* On a thread of the ledger, or a worker. */
static base_code erase_pages(void *ctx, uint64_t space, const int32_t *tokens, uint32_t count,
                             uint32_t kept, base_err *err)
{
    return eng_erase(ctx, space, tokens, count, kept, err);
}

/* An address that others reach needs keys. */
static base_code check_reach(const gw_app *app, const gw_inherited *inherited, base_err *err)
{
    const gw_conf *conf = app->conf;
    char passed[3][GW_ADDRESS_MAX];
    const char *listens[][2] = {{"server.listen", conf->server_listen},
                                {"server.tls_listen", conf->server_tls_listen},
                                {"admin.listen", conf->admin_listen}};
    const int fds[] = {inherited->listen, inherited->tls, inherited->admin};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        if (fds[i] >= 0 && gw_socket_address(fds[i], passed[i]))
            listens[i][1] = passed[i];
    if (gw_tenants_keyed(app->tenants) || conf->server_insecure)
        return BASE_OK;
    for (size_t i = 0; i < sizeof listens / sizeof *listens; i++)
        if (listens[i][1][0] != '\0' && !gw_conf_is_loopback(listens[i][1]))
            return base_fail_param(
                err, BASE_DENIED, listens[i][0],
                "%s %.40s reaches beyond this machine and there are no keys: make one "
                "(POST /admin/v1/keys) or set server.insecure=true",
                listens[i][0], listens[i][1]);
    return BASE_OK;
}

static base_code create_pins(gw_app *app, base_err *err)
{
    const gw_pins_options options = {
        .page_count = eng_get_info(app->engine)->page_count,
        .percent_max = app->conf->sessions_pin_percent_max,
        .tenant_percent_max = app->conf->sessions_pin_tenant_percent_max,
    };
    return gw_pins_create(&app->pins, &options, err);
}

static base_code create_otlp(gw_app *app, base_err *err)
{
    const char *endpoint = app->conf->otlp_endpoint;
    return endpoint[0] != '\0' ? gw_otlp_create(&app->otlp, endpoint, err) : BASE_OK;
}

static base_code start(gw_app *app, base_err *err)
{
    const gw_conf *conf = app->conf;
    base_code code;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t workers =
        conf->workers_threads != 0 ? conf->workers_threads : (uint32_t)((cores + 1) / 2);
    uint32_t tick_ms = conf->server_keepalive_ms / 4;
    tick_ms = tick_ms < 5 ? 5 : tick_ms > TICK_MS_MAX ? TICK_MS_MAX : tick_ms;
    const gw_ledger_options ledger = {.path = conf->data_path,
                                      .cached_ttl_s = conf->ledger_cached_ttl_s,
                                      .kept_ttl_s = conf->ledger_kept_ttl_s,
                                      .bytes_max = conf->ledger_bytes_max,
                                      .tenant_bytes_max = conf->ledger_tenant_bytes_max,
                                      .erases = true};
    gw_inherited inherited;
    const gw_server_options server = {.conf = conf,
                                      .inherited = &inherited,
                                      .handler = gw_route_handle,
                                      .arriving = gw_upload_arriving,
                                      .arrived = gw_upload_arrived,
                                      .ended = gw_route_ended,
                                      .ctx = app};
    if ((code = gw_inherit(&inherited, conf, getenv("LISTEN_PID"), getenv("LISTEN_FDS"),
                           getenv("LISTEN_FDNAMES"), err)) != BASE_OK ||
        (code = make_data_directory(conf, err)) != BASE_OK ||
        (code = gw_route_open_trace(conf, err)) != BASE_OK ||
        (code = gw_metrics_create(&app->metrics, err)) != BASE_OK ||
        (code = gw_events_create(&app->events, err)) != BASE_OK ||
        (code = gw_cookies_create(&app->cookies, err)) != BASE_OK ||
        (code = gw_live_create(&app->live, app->events, err)) != BASE_OK ||
        (code = create_otlp(app, err)) != BASE_OK ||
        (code = gw_ledger_open(&app->ledger, &ledger, err)) != BASE_OK ||
        (code = gw_seal_open(&app->seal, conf->data_path, err)) != BASE_OK ||
        (code = gw_tenants_create(&app->tenants, app->ledger, err)) != BASE_OK ||
        (code = check_reach(app, &inherited, err)) != BASE_OK ||
        (code = gw_bridge_create(&app->bridge, tick_ms, err)) != BASE_OK ||
        (code = gw_tapes_create(&app->tapes, conf->server_idempotency_ms, TAPES_BYTES_MAX,
                                TAPES_COUNT_MAX, err)) != BASE_OK ||
        (code = gw_locks_create(&app->locks, conf->sessions_queue_max, err)) != BASE_OK ||
        (code = gw_appends_create(&app->appends, app, err)) != BASE_OK ||
        (code = create_engine(app, err)) != BASE_OK || (code = create_pins(app, err)) != BASE_OK ||
        (code = gw_workers_create(&app->workers, workers, conf->workers_queue_max, err)) !=
            BASE_OK ||
        (code = gw_server_create(&app->server, &server, err)) != BASE_OK)
        return code;
    gw_ledger_set_erase(app->ledger, erase_pages, app->engine);
    if (conf->server_insecure)
        gw_tenants_open_to_all(app->tenants);
    if ((code = gw_server_start(app->server, err)) != BASE_OK) {
        gw_server_destroy(app->server);
        app->server = NULL;
    }
    return code;
}

/* In the reverse order of start. Requests end first, then what they stood on. */
static void stop(gw_app *app)
{
    if (app->server != NULL) {
        if (!gw_server_drain(app->server, app->conf->server_drain_ms)) {
            base_log(BASE_LOG_WARN, "drain_overdue exchanges=%u",
                     gw_server_get_stats(app->server).open_exchanges);
            gw_live_hand_back(app->live, app->engine);
            gw_server_cut(app->server, HAND_BACK_MS);
        } else {
            gw_server_cut(app->server, 0);
        }
        if (!gw_bridge_drain(app->bridge, BRIDGE_DRAIN_MS)) {
            /* The engine hangs: nothing below can be taken down. What clients were told is
             * committed. */
            base_log(BASE_LOG_ERROR, "engine_hangs ports=%u", gw_bridge_open_ports(app->bridge));
            _exit(EXIT_SUCCESS);
        }
    }
    gw_workers_destroy(app->workers);
    gw_server_destroy(app->server);
    gw_pins_destroy(app->pins);
    gw_appends_destroy(app->appends);
    gw_tapes_destroy(app->tapes);
    gw_locks_destroy(app->locks);
    if (app->ledger != NULL)
        gw_ledger_set_erase(app->ledger, NULL, NULL);
    eng_destroy(app->engine);
    gw_bridge_destroy(app->bridge);
    gw_tenants_destroy(app->tenants);
    gw_seal_close(app->seal);
    gw_ledger_close(app->ledger);
    gw_live_destroy(app->live);
    gw_otlp_destroy(app->otlp);
    gw_events_destroy(app->events);
    gw_cookies_destroy(app->cookies);
    gw_metrics_destroy(app->metrics);
}

/* The net below an orderly end: a join that does not come back, whatever the reason. The system's
 * libh2o knows one, which tools/h2o mends: its loop spins on a CONTINUATION after the last GOAWAY.
 * What clients were told is committed by then. */
static void *watchdog(void *arg)
{
    sleep_ms(*(const uint32_t *)arg + WATCHDOG_SLACK_MS);
    base_log(BASE_LOG_ERROR, "shutdown_overdue");
    _exit(EXIT_SUCCESS);
}

/* What a signal means; written by main. */
typedef enum phase { LOADING, SERVING, STOPPING } phase;
static _Atomic int phase_now = LOADING;
static sem_t wanted; /* posted after one of these is set */
static _Atomic bool stop_wanted, renewal_wanted;

typedef struct command {
    int argc;
    char **argv;
} command;

static void reread_live_keys(const command *line)
{
    base_err err = BASE_ERR_INIT;
    gw_conf *conf;
    if (gw_conf_create(&conf, NULL, line->argc, line->argv, &err) != BASE_OK) {
        base_log(BASE_LOG_ERROR, "config_kept reason=\"%s\"", err.text);
        return;
    }
    base_log_set_level(conf->log_level);
    gw_conf_destroy(conf);
}

static void renew_tls(gw_server *server)
{
    base_err err = BASE_ERR_INIT;
    if (gw_server_tls_address(server) == NULL)
        return;
    if (gw_server_renew_tls(server, &err) != BASE_OK)
        base_log(BASE_LOG_ERROR, "tls_kept reason=\"%s\"", err.text);
    else
        base_log(BASE_LOG_INFO, "tls_renewed");
}

/* The one thread that takes signals: they are blocked in all others. Of main's order of stopping,
 * the first signal while serving is the beginning; while loading, and the second time, there is
 * nothing to wait for. */
static void *signal_main(void *arg)
{
    sigset_t signals;
    int got;
    pthread_setname_np(pthread_self(), "signals");
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGHUP);
    for (;;) {
        if (sigwait(&signals, &got) != 0)
            continue;
        if (got == SIGHUP) {
            reread_live_keys(arg);
            atomic_store(&renewal_wanted, true); /* main's, once it serves */
            sem_post(&wanted);
        } else if (atomic_exchange(&phase_now, STOPPING) == SERVING) {
            base_log(BASE_LOG_INFO, "stopping signal=%d", got);
            atomic_store(&stop_wanted, true);
            sem_post(&wanted);
        } else {
            base_log(BASE_LOG_WARN, "stopped_at_once signal=%d", got);
            _exit(EXIT_SUCCESS);
        }
    }
    return NULL;
}

/* False if the system gives no thread. */
static bool run_detached(void *(*run)(void *), void *arg)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, arg) != 0)
        return false;
    pthread_detach(thread);
    return true;
}

static void block_signals(void)
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file at its limit is a failed write, not our end */
}

static void print_ready(const gw_app *app, uint64_t begin)
{
    const eng_info *info = eng_get_info(app->engine);
    const char *tls = gw_server_tls_address(app->server),
               *admin = gw_server_address(app->server, GW_LISTENER_ADMIN);
    const char *address = gw_server_address(app->server, GW_LISTENER_PUBLIC);
    printf("ready %s%s model=%s backend=%s ms=%llu\n",
           strncmp(address, "unix:", 5) == 0 ? "" : "http://", address, info->name, info->backend,
           (unsigned long long)((base_now_ns() - begin) / 1000000));
    fflush(stdout);
    gw_notify(getenv("NOTIFY_SOCKET"), "READY=1");
    base_log(BASE_LOG_INFO, "listening tls=%s admin=%s keys=%d", tls != NULL ? tls : "off",
             admin != NULL ? admin : "off", gw_tenants_keyed(app->tenants));
}

int main(int argc, char **argv)
{
    static command line; /* of a thread that may outlive main's frame */
    static uint32_t drain_ms;
    uint64_t begin = base_now_ns();
    base_err err = BASE_ERR_INIT;
    gw_conf *conf = NULL;
    gw_conf_action action;
    if (gw_conf_create(&conf, &action, argc, argv, &err) != BASE_OK) {
        fprintf(stderr, "whimbrel: %s\n", err.text);
        return EXIT_UNUSABLE;
    }
    if (action != GW_CONF_SERVE) {
        if (action == GW_CONF_PRINT)
            gw_conf_print(conf, stdout);
        else if (action == GW_CONF_VERSION)
            puts("whimbrel " WHIMBREL_VERSION);
        else
            gw_conf_help(stdout);
        gw_conf_destroy(conf);
        return fflush(stdout) != 0 || ferror(stdout) != 0 ? EXIT_FAILURE : EXIT_SUCCESS;
    }
    base_log_set_level(conf->log_level);
    block_signals(); /* before any thread is made */
    base_crash_install();
    sem_init(&wanted, 0, 0);
    line.argc = argc;
    line.argv = argv;
    if (!run_detached(signal_main, &line)) {
        fprintf(stderr, "whimbrel: no thread to take signals\n");
        gw_conf_destroy(conf);
        return EXIT_UNUSABLE;
    }
    raise_descriptor_limit(conf);

    gw_app app = {.conf = conf, .started_ms = base_wall_ms()};
    int status = EXIT_SUCCESS;
    if (start(&app, &err) != BASE_OK) {
        fprintf(stderr, "whimbrel: %s\n", err.text);
        status = EXIT_UNUSABLE;
    } else {
        atomic_store(&phase_now, SERVING);
        print_ready(&app, begin);
        while (!atomic_load(&stop_wanted))
            if (sem_wait(&wanted) == 0 && atomic_exchange(&renewal_wanted, false))
                renew_tls(app.server);
        atomic_store(&app.draining, 1);
        gw_notify(getenv("NOTIFY_SOCKET"), "STOPPING=1");
        drain_ms = conf->server_drain_ms;
        if (!run_detached(watchdog, &drain_ms))
            base_log(BASE_LOG_WARN, "shutdown_unwatched");
    }
    stop(&app);
    gw_conf_destroy(conf);
    return status;
}
