/* What a request meets before and instead of a handler, over a socket, with the real engine on the
 * tiny model. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <ftw.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/log.h"
#include "gateway/bridge.h"
#include "gateway/conf.h"
#include "gateway/ledger.h"
#include "gateway/lock.h"
#include "gateway/metrics.h"
#include "gateway/route.h"
#include "gateway/tenant.h"
#include "gateway/work.h"

static gw_app app;
static gw_conf *conf;
static char data_path[] = "/tmp/whimbrel-route-XXXXXX", trace_path[64];

static void start(const char *more)
{
    char data[64], trace[96];
    cr_assert_not_null(mkdtemp(data_path));
    snprintf(data, sizeof data, "--data=%s", data_path);
    snprintf(trace_path, sizeof trace_path, "%s/trace", data_path);
    snprintf(trace, sizeof trace, "--trace=%s", trace_path);
    char *argv[] = {"test",
                    data,
                    trace,
                    "--listen=127.0.0.1:0",
                    "--set=admin.listen=127.0.0.1:0",
                    "--set=log.level=error",
                    "--set=model.aliases=friend,*",
                    "--set=server.cors_origins=https://app.example",
                    (char *)more};
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_conf_create(&conf, NULL, more != NULL ? 9 : 8, argv, &err), BASE_OK, "%s",
                 err.text);
    base_log_set_level(conf->log_level);
    app = (gw_app){.conf = conf, .started_ms = 1790000000000};
    const gw_ledger_options ledger = {.path = data_path, .cached_ttl_s = 60};
    cr_assert_eq(gw_metrics_create(&app.metrics, &err), BASE_OK);
    cr_assert_eq(gw_ledger_open(&app.ledger, &ledger, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(gw_tenants_create(&app.tenants, app.ledger, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(gw_bridge_create(&app.bridge, 100, &err), BASE_OK);
    const eng_options options = {.model = TINY_MODEL,
                                 .draft = "",
                                 .backend = "cpu",
                                 .variant = "auto",
                                 .kv = "nvfp4",
                                 .threads = 1,
                                 .kv_bytes = 64u << 20,
                                 .sequences_max = 2,
                                 .queue_max = 4,
                                 .step_rows_max = 64,
                                 .prefill_chunk = 64,
                                 .sink = gw_bridge_sink(app.bridge)};
    cr_assert_eq(eng_create(&app.engine, &options, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(gw_workers_create(&app.workers, 1, 16, &err), BASE_OK);
    cr_assert_eq(gw_locks_create(&app.locks, 4, &err), BASE_OK);
    cr_assert_eq(gw_route_open_trace(conf, &err), BASE_OK, "%s", err.text);
    const gw_server_options server = {
        .conf = conf, .handler = gw_route_handle, .ended = gw_route_ended, .ctx = &app};
    cr_assert_eq(gw_server_create(&app.server, &server, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(gw_server_start(app.server, NULL), BASE_OK);
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *walk)
{
    return remove(path);
}

static void stop(void)
{
    gw_server_drain(app.server, 500);
    gw_server_cut(app.server, 0);
    cr_expect(gw_bridge_drain(app.bridge, 5000));
    gw_workers_destroy(app.workers);
    gw_server_destroy(app.server);
    gw_locks_destroy(app.locks);
    eng_destroy(app.engine);
    gw_bridge_destroy(app.bridge);
    gw_tenants_destroy(app.tenants);
    gw_ledger_close(app.ledger);
    gw_metrics_destroy(app.metrics);
    gw_conf_destroy(conf);
    nftw(data_path, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

/* Sends `head` ("GET /x HTTP/1.1" and header lines, each ended by CRLF) and `body`; the whole
 * answer, freed by the next. */
static const char *ask(gw_listener listener, const char *head, const char *body)
{
    static base_buf answer;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct timeval limit = {.tv_sec = 10};
    to.sin_port = htons((uint16_t)atoi(strrchr(gw_server_address(app.server, listener), ':') + 1));
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    cr_assert_eq(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    base_buf_clear(&answer);
    base_buf_puts(&answer, head);
    if (strstr(head, "Host:") == NULL)
        base_buf_puts(&answer, "Host: localhost:80\r\n");
    base_buf_printf(&answer, "Connection: close\r\nContent-Length: %zu\r\n\r\n%s", strlen(body),
                    body);
    cr_assert_eq(send(fd, answer.data, answer.length, MSG_NOSIGNAL), (ssize_t)answer.length);
    base_buf_clear(&answer);
    char block[4096];
    for (ssize_t n; (n = recv(fd, block, sizeof block, 0)) > 0;)
        base_buf_add(&answer, block, (size_t)n);
    close(fd);
    return answer.length > 0 ? answer.data : "";
}

typedef struct row {
    gw_listener listener;
    const char *head, *body;
    int status;
    const char *has, *lacks; /* NULL: nothing to look for */
} row;

static void check(const row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const char *text = ask(rows[i].listener, rows[i].head, rows[i].body);
        cr_expect_eq(atoi(text + strcspn(text, " ")), rows[i].status, "%s\n%s", rows[i].head, text);
        if (rows[i].has != NULL)
            cr_expect_not_null(strstr(text, rows[i].has), "%s\nlacks %s:\n%s", rows[i].head,
                               rows[i].has, text);
        if (rows[i].lacks != NULL)
            cr_expect_null(strstr(text, rows[i].lacks), "%s\nhas %s:\n%s", rows[i].head,
                           rows[i].lacks, text);
        cr_expect_not_null(strstr(text, "\r\nx-request-id: req_"), "%s\n%s", rows[i].head, text);
    }
}

#define PUB GW_LISTENER_PUBLIC
#define ADM GW_LISTENER_ADMIN
#define GET(path) "GET " path " HTTP/1.1\r\n"
#define JSON "Content-Type: application/json\r\n"
#define CHAT "POST /v1/chat/completions HTTP/1.1\r\n"
#define CHECK_ROWS(rows) check(rows, sizeof rows / sizeof *rows)

Test(route, paths_methods_and_shapes, .timeout = 60)
{
    start(NULL);
    static const row rows[] = {
        {PUB, GET("/"), "", 200, "\"whimbrel\"", NULL},
        {PUB, "HEAD / HTTP/1.1\r\n", "", 200, NULL, "\"whimbrel\""},
        {PUB, GET("/health"), "", 200, "{\"status\":\"ok\"}", NULL},
        {PUB, GET("/healthz"), "", 200, NULL, NULL},
        {PUB, GET("/livez"), "", 200, NULL, NULL},
        {PUB, GET("/ping"), "", 200, NULL, NULL},
        {PUB, GET("/readyz"), "", 200, NULL, NULL},
        {PUB, GET("/health/ready/"), "", 200, "\"ready\"", NULL},
        {PUB, GET("/v1/models"), "", 200,
         "{\"object\":\"list\",\"data\":[{\"id\":\"tiny\",\"object\":\"model\"", "\"*\""},
        {PUB, GET("/v1/models?limit=1"), "", 200, "\"friend\"", NULL},
        {PUB, GET("/v1/models/") "anthropic-version: 2023-06-01\r\n", "", 200,
         "\"has_more\":false,\"first_id\":\"tiny\"", "\"object\""},
        {PUB, GET("/v1/models/tiny"), "", 200, "{\"id\":\"tiny\",\"object\":\"model\"", NULL},
        {PUB, GET("/v1/models/any%20name"), "", 200, "\"any name\"", NULL},
        {PUB, GET("/v1/models/tiny") "anthropic-version: 2023-06-01\r\n", "", 200,
         "\"type\":\"model\"", NULL},
        {PUB, GET("/nothing"), "", 404, "\"error\"", NULL},
        {PUB, GET("/v1/modelsx"), "", 404, NULL, NULL},
        {PUB, GET("/v1/models/..%2f..%2fetc"), "", 404, NULL, NULL},
        {PUB, GET("/metrics"), "", 404, NULL, NULL},
        {PUB, GET("/admin/v1/keys"), "", 404, NULL, NULL},
        {PUB, "DELETE /v1/models HTTP/1.1\r\n", "", 405, "allow: OPTIONS, GET, HEAD", NULL},
        {PUB, "PUT /v1/chat/completions HTTP/1.1\r\n", "", 405, "allow: OPTIONS, POST, GET, HEAD",
         NULL},
        {PUB, "OPTIONS /v1/chat/completions HTTP/1.1\r\n", "", 204,
         "allow: OPTIONS, POST, GET, HEAD", "access-control"},
        {PUB, "OPTIONS /nothing HTTP/1.1\r\n", "", 404, NULL, NULL},
        {PUB, CHAT, "{}", 415, "\"error\"", NULL},
        {PUB, CHAT "Content-Type: text/plain\r\n", "{}", 415, NULL, NULL},
        {PUB, CHAT "Content-Type: application/jsonp\r\n", "{}", 415, NULL, NULL},
        {PUB, CHAT JSON "Content-Encoding: gzip\r\n", "{}", 415, NULL, NULL},
        {PUB, CHAT "Content-Type: Application/JSON; charset=utf-8\r\n", "{}", 400,
         "\"param\":\"model\"", NULL},
        {ADM, GET("/health"), "", 200, NULL, NULL},
        {ADM, GET("/v1/models"), "", 404, NULL, NULL},
        {ADM, GET("/metrics"), "", 200, "# TYPE whimbrel_steps_total counter", NULL},
        {ADM, GET("/metrics"), "", 200,
         "whimbrel_requests_total{route=\"/v1/models/{id}\",status=\"200\"} 3\n", "/nothing"},
    };
    CHECK_ROWS(rows);
    atomic_store(&app.draining, 1);
    static const row draining[] = {
        {PUB, GET("/health"), "", 200, NULL, NULL},
        {PUB, GET("/health/ready"), "", 503, "\"draining\"", NULL},
        {PUB, CHAT JSON, "{}", 503, "retry-after-ms", NULL},
    };
    CHECK_ROWS(draining);
    char trace[4096] = "";
    FILE *file = fopen(trace_path, "r");
    cr_assert_not_null(file);
    cr_assert_not_null(fgets(trace, sizeof trace, file));
    fclose(file);
    cr_expect_not_null(strstr(trace, "\"method\":\"GET\",\"path\":\"/\",\"http\":1,\"status\":200"),
                       "%s", trace);
    stop();
}

Test(route, without_keys_a_web_page_of_another_name_gets_nothing, .timeout = 60)
{
    start("--set=server.hosts=gate.example");
    static const row rows[] = {
        {PUB, GET("/health") "Host: evil.example\r\n", "", 421, "\"error\"", NULL},
        {PUB, GET("/health") "Host: 127.0.0.1.evil.example:8080\r\n", "", 421, NULL, NULL},
        {PUB, GET("/health") "Host: [::1\r\n", "", 421, NULL, NULL},
        {PUB, GET("/health") "Host: 10.0.0.7:8080\r\n", "", 200, NULL, NULL},
        {PUB, GET("/health") "Host: [::1]:8080\r\n", "", 200, NULL, NULL},
        {PUB, GET("/health") "Host: LocalHost\r\n", "", 200, NULL, NULL},
        {PUB, GET("/health") "Host: Gate.example:443\r\n", "", 200, NULL, NULL},
        {PUB, GET("/health") "Origin: null\r\n", "", 403, "\"origin_not_allowed\"", NULL},
        {PUB, GET("/health") "Origin: http://localhost:81\r\n", "", 403, NULL, "access-control"},
        {PUB, GET("/health") "Origin: http://localhost:80\r\n", "", 200, NULL, "access-control"},
        {PUB, GET("/health") "Origin: https://app.example\r\n", "", 200,
         "access-control-allow-origin: https://app.example", NULL},
        {PUB,
         "OPTIONS /v1/chat/completions HTTP/1.1\r\nOrigin: "
         "https://app.example\r\nAccess-Control-Request-Headers: x-y\r\n",
         "", 204, "access-control-allow-headers: x-y", NULL},
        {ADM, "POST /admin/v1/keys HTTP/1.1\r\n" JSON "Origin: http://evil.example\r\n",
         "{\"scopes\":[\"admin\"]}", 403, NULL, NULL},
        {ADM, "POST /admin/v1/keys HTTP/1.1\r\nContent-Type: text/plain\r\n",
         "{\"scopes\":[\"admin\"]}", 415, NULL, NULL},
    };
    CHECK_ROWS(rows);
    stop();
}

Test(route, keys_open_and_close_the_doors, .timeout = 60)
{
    start("--set=metrics.public=true");
    static const row before[] = {
        {PUB, GET("/v1/models") "Authorization: Bearer made-up\r\n", "", 200, NULL, NULL},
        {PUB, GET("/metrics"), "", 200, "whimbrel_info{version=", NULL},
        {ADM, GET("/admin/v1/keys"), "", 200, "\"data\":[]", NULL},
        {ADM, "POST /admin/v1/keys HTTP/1.1\r\n" JSON, "{}", 400, "\"param\":\"scopes\"", NULL},
        {ADM, "POST /admin/v1/keys HTTP/1.1\r\n" JSON, "[]", 400, NULL, NULL},
        {ADM, "POST /admin/v1/keys HTTP/1.1\r\n" JSON, "{\"tenant\":7}", 400,
         "\"param\":\"tenant\"", NULL},
        {ADM, "POST /admin/v1/keys HTTP/1.1\r\n" JSON, "{\"scopes\":[\"root\"]}", 400, NULL, NULL},
    };
    CHECK_ROWS(before);
    char key[64], user[64], head[256];
    const char *text = ask(ADM, "POST /admin/v1/keys HTTP/1.1\r\n" JSON,
                           "{\"tenant\":\"ops\",\"scopes\":[\"inference\",\"admin\"]}");
    cr_assert_not_null(strstr(text, "\"key\":\"wb_"), "%s", text);
    snprintf(key, sizeof key, "%.51s", strstr(text, "wb_"));
    snprintf(head, sizeof head, "POST /admin/v1/keys HTTP/1.1\r\n" JSON "x-api-key: %s\r\n", key);
    text = ask(ADM, head, "{\"tenant\":\"team\"}");
    cr_assert_not_null(strstr(text, "\"key\":\"wb_"), "%s", text);
    snprintf(user, sizeof user, "%.51s", strstr(text, "wb_"));
    char heads[8][256];
    snprintf(heads[0], sizeof heads[0], GET("/v1/models") "Authorization: bearer %s\r\n", user);
    snprintf(heads[1], sizeof heads[1], GET("/v1/models") "x-api-key: %s\r\nHost: gate.example\r\n",
             user);
    snprintf(heads[2], sizeof heads[2], GET("/v1/models") "Authorization: Bearer %sx\r\n", user);
    snprintf(heads[3], sizeof heads[3],
             GET("/v1/models") "Authorization: Bearer %s\r\nAuthorization: Bearer x\r\n", user);
    snprintf(heads[4], sizeof heads[4], GET("/admin/v1/keys") "x-api-key: %s\r\n", user);
    snprintf(heads[5], sizeof heads[5], GET("/admin/v1/keys") "x-api-key: %s\r\n", key);
    snprintf(heads[6], sizeof heads[6], "DELETE /admin/v1/keys/2 HTTP/1.1\r\nx-api-key: %s\r\n",
             key);
    const row after[] = {
        {PUB, GET("/v1/models"), "", 401, "\"invalid_api_key\"", NULL},
        {PUB, CHAT JSON, "{}", 401, NULL, NULL},
        {PUB, heads[0], "", 200, NULL, NULL},
        {PUB, heads[1], "", 200, NULL, NULL},
        {PUB, heads[2], "", 401, NULL, NULL},
        {PUB, heads[3], "", 401, NULL, NULL},
        {PUB, GET("/health"), "", 200, NULL, NULL},
        {ADM, GET("/admin/v1/keys"), "", 401, NULL, NULL},
        {ADM, GET("/metrics"), "", 200, NULL, NULL},
        {ADM, GET("/metrics") "Host: evil.example\r\n", "", 421, NULL, NULL},
        {ADM, heads[4], "", 403, "\"permission_error\"", NULL},
        {ADM, heads[5], "", 200, "\"tenant\":\"team\",\"label\":\"\",\"scopes\":[\"inference\"]",
         "wb_"},
        {ADM, heads[6], "", 200, "\"deleted\":true", NULL},
        {ADM, heads[6], "", 404, NULL, NULL},
        {PUB, heads[0], "", 401, NULL, NULL},
    };
    CHECK_ROWS(after);
    stop();
}
