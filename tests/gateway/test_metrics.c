#include <criterion/criterion.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/metrics.h"

static gw_metrics *metrics;
static base_buf out;

static void make(void)
{
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_metrics_create(&metrics, &err), BASE_OK);
    base_buf_init(&out, 0);
}

static void unmake(void)
{
    base_buf_deinit(&out);
    gw_metrics_destroy(metrics);
}

TestSuite(metrics, .init = make, .fini = unmake);

static void render(void)
{
    const gw_app app = {.started_ms = 1790000000500};
    base_buf_clear(&out);
    gw_metrics_render(metrics, &app, &out);
    cr_assert_not(out.failed);
}

static void expect_line(const char *line)
{
    char whole[256];
    snprintf(whole, sizeof whole, "\n%s\n", line);
    cr_expect_not_null(strstr(out.data, whole), "no line \"%s\" in\n%s", line, out.data);
}

Test(metrics, requests_are_counted_by_route_and_status)
{
    char spelled[] = "/v1/models"; /* another address, the same route */
    gw_metrics_request(metrics, "/v1/models", 200);
    gw_metrics_request(metrics, spelled, 200);
    gw_metrics_request(metrics, "/v1/models", 404);
    gw_metrics_request(metrics, "/v1/models", 418);
    render();
    expect_line("whimbrel_requests_total{route=\"/v1/models\",status=\"200\"} 2");
    expect_line("whimbrel_requests_total{route=\"/v1/models\",status=\"404\"} 1");
    expect_line("whimbrel_requests_total{route=\"/v1/models\",status=\"other\"} 1");
    expect_line("whimbrel_start_time_seconds 1790000000.5");
}

Test(metrics, series_are_bounded)
{
    char routes[1000][16];
    for (size_t i = 0; i < 1000; i++) {
        snprintf(routes[i], sizeof routes[i], "/r%zu", i);
        gw_metrics_request(metrics, routes[i], 200);
    }
    render();
    size_t series = 0;
    for (const char *at = out.data; (at = strstr(at, "\nwhimbrel_requests_total{")) != NULL; at++)
        series++;
    cr_expect_eq(series, GW_ROUTES_MAX + 1u, "%zu", series);
    expect_line("whimbrel_requests_total{route=\"other\",status=\"200\"} 872");
}

Test(metrics, buckets_are_cumulative_and_their_bound_belongs_to_them)
{
    gw_metrics_observe(metrics, GW_TTFT, 0.001);
    gw_metrics_observe(metrics, GW_TTFT, 0.0011);
    gw_metrics_observe(metrics, GW_TTFT, 1000);
    gw_metrics_observe(metrics, GW_PROMPT_TOKENS, 0);
    gw_metrics_observe(metrics, GW_PROMPT_TOKENS, 17);
    render();
    expect_line("whimbrel_ttft_seconds_bucket{le=\"0.001\"} 1");
    expect_line("whimbrel_ttft_seconds_bucket{le=\"0.0025\"} 2");
    expect_line("whimbrel_ttft_seconds_bucket{le=\"120\"} 2");
    expect_line("whimbrel_ttft_seconds_bucket{le=\"+Inf\"} 3");
    expect_line("whimbrel_ttft_seconds_sum 1000.0021");
    expect_line("whimbrel_ttft_seconds_count 3");
    expect_line("whimbrel_prompt_tokens_bucket{le=\"16\"} 1");
    expect_line("whimbrel_prompt_tokens_bucket{le=\"64\"} 2");
    expect_line("whimbrel_prompt_tokens_sum 17");
}

/* Every sample stands below a HELP and a TYPE of its family, once a family. */
Test(metrics, the_text_is_well_formed)
{
    gw_metrics_add(metrics, GW_TURNS_STORED, 3);
    gw_metrics_request(metrics, "/health", 200);
    render();
    expect_line("whimbrel_turns_stored_total 3");
    char family[128] = "", seen[8192] = " ", *save = NULL;
    for (char *line = strtok_r(out.data, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        char name[128], key[140];
        if (sscanf(line, "# HELP %127s", name) == 1) {
            snprintf(key, sizeof key, " %s ", name);
            cr_expect_null(strstr(seen, key), "%s twice", name);
            strcat(seen, key + 1);
            strcpy(family, name);
            continue;
        }
        if (sscanf(line, "# TYPE %127s", name) == 1) {
            cr_expect_str_eq(name, family);
            continue;
        }
        cr_expect_eq(strncmp(line, family, strlen(family)), 0, "%s is not of %s", line, family);
        cr_expect(strncmp(line, "whimbrel_", 9) == 0 || strncmp(line, "process_", 8) == 0);
        char *space = strrchr(line, ' '), *end;
        cr_assert_not_null(space);
        strtod(space + 1, &end);
        cr_expect_eq(*end, '\0', "%s", line);
    }
}

static void *count_many(void *arg)
{
    for (int i = 0; i < 20000; i++) {
        gw_metrics_add(metrics, GW_SPLICED_ITEMS, 1);
        gw_metrics_observe(metrics, GW_ITL, 0.5);
        gw_metrics_request(metrics, i % 2 == 0 ? "/shared" : "/other", 200);
    }
    return NULL;
}

Test(metrics, nothing_is_lost_between_threads)
{
    pthread_t threads[4];
    int numbers[4] = {0, 1, 2, 3};
    for (size_t i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, count_many, &numbers[i]);
    for (size_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    render();
    expect_line("whimbrel_spliced_items_total 80000");
    expect_line("whimbrel_itl_seconds_sum 40000");
    expect_line("whimbrel_requests_total{route=\"/shared\",status=\"200\"} 40000");
    expect_line("whimbrel_requests_total{route=\"/other\",status=\"200\"} 40000");
}
