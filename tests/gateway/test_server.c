/* The transport with a handler of its own: raw sockets, hand-made HTTP/2 frames, TLS, and curl.
 * Ports are the system's choice, each test is a process, times are bounds and not measurements. */
#include "tests/gateway/server_rig.h"

Test(server, an_exchange_shows_the_request)
{
    start(NULL);
    char *text = talk("GET /x/../about?a=1&b HTTP/1.1\r\nHost: here:1\r\nX-Twice: a\r\nx-twice: "
                      "b\r\nConnection: close\r\n\r\n");
    cr_expect_not_null(strstr(text, "GET /about?a=1&b h1 here:1 127.0.0.1 0 a, b"), "%s", text);
    cr_expect_not_null(strstr(text, "x-request-id: req_"), "%s", text);
    free(text);
    text = talk(
        "POST /about HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        "1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\nX-T: 1\r\n\r\n");
    cr_expect_not_null(strstr(text, "POST /about? h1 a 127.0.0.1 3 -"), "%s", text);
    free(text);
    text = talk("HEAD /about HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    cr_expect_not_null(strstr(text, "Content-Length: 3"), "%s", text);
    cr_expect_str_eq(strstr(text, "\r\n\r\n"), "\r\n\r\n", "a body for HEAD: %s", text);
    free(text);
    client c = dial();
    greet(&c, 65535);
    put_request(&c, 1, "GET", "/about", false);
    base_buf body;
    base_buf_init(&body, 0);
    cr_expect_eq(finish_stream(&c, 1, &body, NULL), DATA);
    cr_expect_str_eq(body.data, "GET /about? h2 127.0.0.1 127.0.0.1 0 -");
    base_buf_deinit(&body);
    hang_up(&c);
    stop();
}

Test(server, what_no_handler_should_see_is_refused)
{
    start(SETS("--set=server.header_bytes_max=2048", "--set=limits.body_bytes_max=100000"));
    char *text = talk("GET /%00etc HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    cr_expect_not_null(strstr(text, " 400 "), "%s", text);
    free(text);
    char request[8192];
    snprintf(request, sizeof request,
             "GET /about HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX: %05000d\r\n\r\n", 1);
    text = talk(request);
    cr_expect_not_null(strstr(text, " 431 "), "%s", text);
    free(text);
    cr_expect_eq(handled_count, 0u);

    /* Past the limit: a JSON 413 on both protocols. */
    char *big = calloc(1, 200001);
    memset(big, 'x', 200000);
    client c = dial();
    puts_to(&c, "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n");
    cr_expect(put(&c, big, 200000));
    text = slurp(&c, NULL);
    cr_expect_not_null(strstr(text, " 413 "), "%s", text);
    cr_expect_not_null(strstr(text, "\"request_too_large\""), "%s", text);
    free(text);
    hang_up(&c);
    c = dial();
    greet(&c, 65535);
    put_request(&c, 1, "POST", "/echo", true);
    for (size_t at = 0; at < 200000; at += 10000)
        cr_expect(put_frame(&c, DATA, at + 10000 == 200000, 1, big + at, 10000));
    base_buf body;
    base_buf_init(&body, 0);
    cr_expect_eq(finish_stream(&c, 1, &body, NULL), DATA);
    cr_expect_not_null(strstr(body.data, "\"request_too_large\""), "%s", body.data);
    put_request(&c, 3, "GET", "/about", false);
    cr_expect_eq(finish_stream(&c, 3, NULL, NULL), DATA);
    base_buf_deinit(&body);
    hang_up(&c);
    free(big);
    stop();
}

static void expect_gone(client *c, uint64_t since)
{
    cr_expect(within(1000, one_gone), "nobody noticed");
    cr_expect_lt((gone_ns - since) / MS, 500u, "%llu ms",
                 (unsigned long long)((gone_ns - since) / MS));
    gone_count = 0;
    handled_count = 0;
    close(c->fd);
    SSL_free(c->ssl);
    cr_expect(within(2000, none_open), "something stays open");
}

static void leave(client *c, bool answer_began)
{
    char block[4096];
    cr_assert(within(2000, one_handled));
    if (answer_began)
        cr_assert_gt(get(c, block, sizeof block), 0);
    nanosleep(&(struct timespec){.tv_nsec = 50 * 1000000}, NULL);
    uint64_t now = base_now_ns();
    shutdown(c->fd, SHUT_RDWR);
    expect_gone(c, now);
}

Test(server, a_client_that_leaves_is_noticed, .timeout = 60)
{
    start_tls(NULL);
    for (int began = 0; began < 2; began++) {
        const char *path = began ? "/live" : "/hold";
        char request[128];
        snprintf(request, sizeof request,
                 "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", path);
        client c = dial();
        puts_to(&c, request);
        leave(&c, began);
        c = dial_tls(alpn_http1, sizeof alpn_http1);
        puts_to(&c, request);
        leave(&c, began);
        c = dial();
        greet(&c, 65535);
        put_request(&c, 1, "GET", path, false);
        leave(&c, began);
        c = dial_tls(alpn_h2, sizeof alpn_h2);
        greet(&c, 65535);
        put_request(&c, 1, "GET", path, false);
        leave(&c, began);

        /* A reset ends one stream; the connection goes on. */
        c = dial();
        greet(&c, 65535);
        put_request(&c, 1, "GET", path, false);
        cr_assert(within(2000, one_handled));
        uint64_t now = base_now_ns();
        put_frame(&c, RST, 0, 1, "\0\0\0\x08", 4);
        cr_expect(within(500, one_gone));
        put_request(&c, 3, "GET", "/about", false);
        cr_expect_eq(finish_stream(&c, 3, NULL, NULL), DATA);
        shutdown(c.fd, SHUT_RDWR);
        expect_gone(&c, now);

        /* On HTTP/1.1 a closed sending side alone means that nobody waits. */
        c = dial();
        puts_to(&c, request);
        cr_assert(within(2000, one_handled));
        now = base_now_ns();
        shutdown(c.fd, SHUT_WR);
        expect_gone(&c, now);
    }
    /* What can be answered at once is, to a half-closed client too. */
    client c = dial();
    puts_to(&c, "GET /about HTTP/1.1\r\nHost: a\r\n\r\n");
    shutdown(c.fd, SHUT_WR);
    char *text = slurp(&c, NULL);
    cr_expect_not_null(strstr(text, "GET /about"), "%s", text);
    free(text);
    hang_up(&c);
    stop();
}

Test(server, each_record_is_a_data_frame)
{
    start(NULL);
    client c = dial();
    greet(&c, 65535);
    put_request(&c, 1, "GET", "/records?20", false);
    uint32_t frames = 0;
    base_buf body;
    base_buf_init(&body, 0);
    finish_stream(&c, 1, &body, &frames);
    cr_expect_eq(frames, 20u);
    cr_expect_eq(body.length, 20 * 14u);
    /* Behind a slow reader they are joined; nothing is lost. */
    base_buf_clear(&body);
    put_request(&c, 3, "GET", "/records?5000", false);
    finish_stream(&c, 3, &body, NULL);
    cr_expect_eq(body.length, 5000 * 14u);
    base_buf_deinit(&body);
    hang_up(&c);
    stop();
}

static void expect_pattern(const char *bytes, size_t length, size_t total)
{
    cr_expect_eq(length, total);
    for (size_t i = 0; i < length && i < total; i++)
        if ((unsigned char)bytes[i] != pattern(i)) {
            cr_expect_fail("byte %zu differs", i);
            return;
        }
}

Test(server, a_slow_reader_holds_little_memory_and_loses_nothing, .timeout = 60)
{
    start(NULL);
    size_t total = 60u << 20;
    long before = resident_kib();
    client c = dial(), slow = dial();
    puts_to(&slow, "GET /flood?62914560 HTTP/1.0\r\nHost: a\r\n\r\n");
    greet(&c, 100);
    put_request(&c, 1, "GET", "/flood?62914560", false);
    put_request(&c, 3, "GET", "/about", false);
    nanosleep(&(struct timespec){.tv_nsec = 300 * 1000000}, NULL);
    cr_expect_lt(resident_kib() - before, 8192, "%ld KiB", resident_kib() - before);
    cr_expect_eq(gone_count, 0u);
    base_buf body;
    base_buf_init(&body, 0);
    open_window(&c, 0, 1u << 30);
    open_window(&c, 1, 1u << 30);
    cr_expect_eq(finish_stream(&c, 1, &body, NULL), DATA);
    expect_pattern(body.data, body.length, total);
    base_buf_deinit(&body);
    size_t length;
    char *text = slurp(&slow, &length);
    char *begin = strstr(text, "\r\n\r\n") + 4;
    expect_pattern(begin, length - (size_t)(begin - text), total);
    free(text);
    cr_expect_gt(drained_count, 2u);
    hang_up(&c);
    hang_up(&slow);
    stop();
}

Test(server, a_reader_that_stops_is_cut_and_its_neighbour_is_not, .timeout = 60)
{
    start(SETS("--set=limits.write_stall_ms=400", "--set=limits.idle_connection_ms=1500"));
    client c = dial();
    uint64_t begin = base_now_ns();
    puts_to(&c, "GET /flood?62914560 HTTP/1.1\r\nHost: a\r\n\r\n");
    cr_expect(within(3000, one_gone));
    cr_expect_gt((gone_ns - begin) / MS, 350u);
    cr_expect_lt((gone_ns - begin) / MS, 2000u);
    cr_expect(within(1000, none_open));
    hang_up(&c);
    gone_count = 0;

    c = dial();
    greet(&c, 100);
    put_request(&c, 1, "GET", "/flood?62914560", false);
    cr_expect(within(3000, one_gone));
    put_request(&c, 3, "GET", "/about", false);
    base_buf body;
    base_buf_init(&body, 0);
    cr_expect_eq(finish_stream(&c, 3, &body, NULL), DATA, "the connection died with the stream");
    base_buf_deinit(&body);
    cr_expect(within(4000, none_open), "a stuck stream keeps its connection");
    hang_up(&c);

    /* A whole answer that nobody reads is cut too. */
    gone_count = 0;
    c = dial();
    int small = 4096;
    setsockopt(c.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    char *big = calloc(1, 20u << 20);
    puts_to(&c, "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 20971520\r\n\r\n");
    cr_expect(put(&c, big, 20u << 20));
    cr_expect(within(4000, none_open));
    free(big);
    hang_up(&c);
    stop();
}

Test(server, a_handler_that_does_not_wait_loses_its_stream)
{
    start(NULL);
    client c = dial();
    greet(&c, 100);
    put_request(&c, 1, "GET", "/rude?31457280", false);
    cr_expect(within(1000, one_handled));
    nanosleep(&(struct timespec){.tv_nsec = 300 * 1000000}, NULL);
    put_request(&c, 3, "GET", "/about", false);
    cr_expect_eq(finish_stream(&c, 3, NULL, NULL), DATA);
    hang_up(&c);
    stop();
}

Test(server, idle_and_slow_clients_are_let_go, .timeout = 60)
{
    start(SETS("--set=limits.idle_connection_ms=500", "--set=limits.upload_ms=1200"));
    client idle = dial(), stalled = dial(), kept = dial(), busy = dial(), two = dial();
    uint64_t begin = base_now_ns();
    puts_to(&stalled, "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nabc");
    puts_to(&kept, "GET /about HTTP/1.1\r\nHost: a\r\n\r\n");
    puts_to(&busy, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    greet(&two, 65535);
    put_request(&two, 1, "POST", "/echo", true);
    put_frame(&two, DATA, 0, 1, "abc", 3);
    client *all[] = {&idle, &stalled, &kept, &two};
    for (size_t i = 0; i < 4; i++) {
        free(slurp(all[i], NULL));
        cr_expect_gt((base_now_ns() - begin) / MS, 450u, "client %zu", i);
        cr_expect_lt((base_now_ns() - begin) / MS, 2500u, "client %zu", i);
        hang_up(all[i]);
    }
    cr_expect_eq(gone_count, 0u, "a request that runs is not idle");
    hang_up(&busy);

    /* Bytes that drip keep a connection from being idle, but not for ever. */
    client drip = dial();
    begin = base_now_ns();
    puts_to(&drip, "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n");
    while (puts_to(&drip, "x") && base_now_ns() - begin < 5000 * MS)
        nanosleep(&(struct timespec){.tv_nsec = 100 * 1000000}, NULL);
    cr_expect_gt((base_now_ns() - begin) / MS, 1100u);
    cr_expect_lt((base_now_ns() - begin) / MS, 2500u);
    hang_up(&drip);

    /* A slow but steady upload goes through: longer than a silence may be, shorter than the bound.
     */
    client steady = dial();
    puts_to(&steady,
            "POST /about HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 9\r\n\r\n");
    for (int i = 0; i < 9; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 100 * 1000000}, NULL);
        puts_to(&steady, "x");
    }
    char *text = slurp(&steady, NULL);
    cr_expect_not_null(strstr(text, " 200 "), "%s", text);
    free(text);
    hang_up(&steady);
    stop();
}

Test(server, a_head_that_drips_is_let_go_and_makes_room, .timeout = 60)
{
    start(SETS("--set=limits.head_ms=2500", "--set=limits.connections_max=3"));
    client drips[3];
    for (size_t i = 0; i < 3; i++) {
        drips[i] = dial();
        puts_to(&drips[i], "GET /about HTTP/1.1\r\nHost: a\r\nX: ");
    }
    nanosleep(&(struct timespec){.tv_sec = 1, .tv_nsec = 200 * 1000000}, NULL);
    client honest = dial(); /* there is no room, but for one whose request never came */
    puts_to(&honest, "GET /about HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    char *text = slurp(&honest, NULL);
    cr_expect_not_null(strstr(text, " 200 "), "%s", text);
    free(text);
    hang_up(&honest);
    cr_expect_geq(gw_server_get_stats(server).kicked, 1u);
    uint64_t begin = base_now_ns();
    while (gw_server_get_stats(server).kicked < 3 && base_now_ns() - begin < 5000 * MS) {
        for (size_t i = 0; i < 3; i++)
            puts_to(&drips[i], "x");
        nanosleep(&(struct timespec){.tv_nsec = 50 * 1000000}, NULL);
    }
    cr_expect_eq(gw_server_get_stats(server).kicked, 3u);
    cr_expect_eq(handled_count, 1u);
    for (size_t i = 0; i < 3; i++)
        hang_up(&drips[i]);

    /* After a pause on a kept connection a head has its whole time again. */
    client kept = dial();
    char block[4096];
    puts_to(&kept, "GET /about HTTP/1.1\r\nHost: a\r\n\r\n");
    cr_expect_gt(get(&kept, block, sizeof block), 0);
    nanosleep(&(struct timespec){.tv_sec = 2, .tv_nsec = 700 * 1000000}, NULL);
    puts_to(&kept, "GET /about HTTP/1.1\r\nHo");
    nanosleep(&(struct timespec){.tv_nsec = 300 * 1000000}, NULL);
    puts_to(&kept, "st: a\r\n\r\n");
    cr_expect_gt(get(&kept, block, sizeof block), 0);
    hang_up(&kept);
    stop();
}

Test(server, answers_that_nobody_takes_are_bounded_together, .timeout = 60)
{
    start(SETS("--set=limits.answer_bytes_total_max=20000000"));
    client c = dial(), other = dial();
    greet(&c, 0);
    greet(&other, 0);
    put_request(&other, 1, "GET", "/records?1000", false);
    for (uint32_t i = 0; i < 40; i++)
        put_request(&c, 2 * i + 1, "GET", "/records?100000", false); /* 1.4 MB each */
    char block[4096];
    while (get(&c, block, sizeof block) > 0)
        ;
    hang_up(&c);
    cr_expect_eq(gw_server_get_stats(server).kicked, 1u);
    open_window(&other, 1, 1u << 20);
    base_buf body;
    base_buf_init(&body, 0);
    cr_expect_eq(finish_stream(&other, 1, &body, NULL), DATA, "the neighbour went with it");
    cr_expect_eq(body.length, 14000u);
    base_buf_deinit(&body);
    hang_up(&other);
    stop();
}

Test(server, bodies_of_all_clients_are_bounded_together, .timeout = 60)
{
    start(
        SETS("--set=limits.body_bytes_max=8000000", "--set=limits.body_bytes_total_max=16000000"));
    client all[10];
    char *big = calloc(1, 6000000);
    for (size_t i = 0; i < 10; i++) {
        all[i] = dial();
        struct timeval limit = {.tv_usec = 300000};
        setsockopt(all[i].fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
        if (i % 2 == 0) {
            puts_to(&all[i], "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 6000001\r\n\r\n");
            put(&all[i], big, 6000000);
        } else {
            greet(&all[i], 65535);
            put_request(&all[i], 1, "POST", "/echo", true);
            for (size_t at = 0; at < 6000000; at += 10000)
                if (!put_frame(&all[i], DATA, 0, 1, big, 10000))
                    break;
        }
    }
    nanosleep(&(struct timespec){.tv_nsec = 300 * 1000000}, NULL);
    gw_server_stats stats = gw_server_get_stats(server);
    cr_expect_geq(stats.kicked, 6u, "%llu", (unsigned long long)stats.kicked);
    cr_expect_leq(stats.open_connections, 4u, "%u", stats.open_connections);
    client honest = dial();
    puts_to(&honest, "GET /about HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    char *text = slurp(&honest, NULL);
    cr_expect_not_null(strstr(text, " 200 "), "%s", text);
    free(text);
    hang_up(&honest);
    for (size_t i = 0; i < 10; i++)
        hang_up(&all[i]);
    free(big);
    stop();
}

Test(server, a_flood_of_resets_is_stopped, .timeout = 60)
{
    start(NULL);
    for (int held = 0; held < 2; held++) {
        client c = dial(), honest = dial();
        greet(&c, 65535);
        handled_count = 0;
        gone_count = 0;
        for (uint32_t i = 0; i < 20000; i++)
            if (!put_request(&c, 2 * i + 1, "GET", held ? "/hold" : "/about", false) ||
                !put_frame(&c, RST, 0, 2 * i + 1, "\0\0\0\x08", 4))
                break;
        char block[65536];
        while (get(&c, block, sizeof block) > 0)
            ;
        cr_expect_lt(handled_count, 1000u, "%u requests were run", handled_count);
        puts_to(&honest, "GET /about HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        char *text = slurp(&honest, NULL);
        cr_expect_not_null(strstr(text, " 200 "), "%s", text);
        free(text);
        hang_up(&honest);
        hang_up(&c);
        cr_expect(within(1000, none_open));
    }
    stop();
}

Test(server, connections_are_bounded_and_idle_ones_make_room, .timeout = 60)
{
    start(SETS("--set=limits.connections_max=4"));
    client busy[3], idle = dial(), late;
    for (size_t i = 0; i < 3; i++) {
        busy[i] = dial();
        puts_to(&busy[i], "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    }
    late = dial();
    puts_to(&late, "GET /about HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    nanosleep(&(struct timespec){.tv_nsec = 300 * 1000000}, NULL);
    cr_expect_leq(gw_server_get_stats(server).open_connections, 4u);
    client admin = dial_to(gw_server_address(server, GW_LISTENER_ADMIN));
    puts_to(&admin, "GET /about HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    char *text = slurp(&admin, NULL);
    cr_expect_not_null(strstr(text, " 200 "), "the operator is locked out");
    free(text);
    hang_up(&admin);
    text = slurp(&late, NULL);
    cr_expect_not_null(strstr(text, " 200 "), "%s", text);
    free(text);
    hang_up(&late);
    hang_up(&idle);
    for (size_t i = 0; i < 3; i++)
        hang_up(&busy[i]);
    stop();
}

static void *drain_now(void *arg)
{
    uint64_t begin = base_now_ns();
    gw_server_drain(server, 5000);
    gw_server_cut(server, 0);
    return (void *)(uintptr_t)((base_now_ns() - begin) / MS);
}

static bool all_late(void)
{
    return handled_count == 3;
}

Test(server, draining_finishes_what_runs_and_closes_what_idles, .timeout = 60)
{
    start(NULL);
    client idle = dial(), kept = dial(), late = dial(), two = dial(), quiet = dial();
    puts_to(&kept, "GET /about HTTP/1.1\r\nHost: a\r\n\r\n");
    char block[4096];
    cr_assert_gt(get(&kept, block, sizeof block), 0);
    greet(&quiet, 65535);
    puts_to(&late, "GET /late HTTP/1.1\r\nHost: a\r\n\r\n");
    greet(&two, 65535);
    put_request(&two, 1, "GET", "/late", false);
    cr_assert(within(2000, all_late));
    pthread_t thread;
    void *ms;
    pthread_create(&thread, NULL, drain_now, NULL);
    char *text = slurp(&late, NULL);
    cr_expect_not_null(strstr(text, "late"), "%s", text);
    free(text);
    base_buf body;
    base_buf_init(&body, 0);
    cr_expect_eq(finish_stream(&two, 1, &body, NULL), DATA);
    cr_expect_str_eq(body.data, "late");
    base_buf_deinit(&body);
    free(slurp(&idle, NULL));
    free(slurp(&kept, NULL));
    free(slurp(&quiet, NULL));
    pthread_join(thread, &ms);
    cr_expect_lt((uintptr_t)ms, 2500u, "%zu ms", (size_t)(uintptr_t)ms);
    client *all[] = {&idle, &kept, &late, &two, &quiet};
    for (size_t i = 0; i < 5; i++)
        hang_up(all[i]);
    stop();
}

Test(server, draining_cuts_what_does_not_end, .timeout = 60)
{
    start(NULL);
    client one = dial(), two = dial(), live = dial();
    puts_to(&one, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    puts_to(&live, "GET /live HTTP/1.1\r\nHost: a\r\n\r\n");
    greet(&two, 65535);
    put_request(&two, 1, "GET", "/hold", false);
    cr_assert(within(2000, all_late));
    uint64_t begin = base_now_ns();
    gw_server_drain(server, 300);
    gw_server_cut(server, 0);
    cr_expect_lt((base_now_ns() - begin) / MS, 1500u);
    cr_expect_eq(gone_count, 3u);
    hang_up(&one);
    hang_up(&two);
    hang_up(&live);
    stop();
}

Test(server, an_upload_during_draining_is_answered, .timeout = 60)
{
    start(NULL);
    static const char some[400];
    client c = dial();
    greet(&c, 65535);
    put_request(&c, 1, "POST", "/about", true);
    for (int i = 0; i < 3; i++)
        put_frame(&c, DATA, 0, 1, some, sizeof some);
    nanosleep(&(struct timespec){.tv_nsec = 200 * 1000000}, NULL);
    pthread_t thread;
    pthread_create(&thread, NULL, drain_now, NULL);
    for (int i = 0; i < 8; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 200 * 1000000}, NULL);
        put_frame(&c, DATA, i == 7, 1, "0123456789", 10);
    }
    base_buf body;
    base_buf_init(&body, 0);
    cr_expect_eq(finish_stream(&c, 1, &body, NULL), DATA);
    cr_expect(body.length > 0);
    base_buf_deinit(&body);
    pthread_join(thread, NULL);
    hang_up(&c);
    stop();
}

/* Waits until what was shown ends so. */
static void wait_shown(const char *end)
{
    bool seen = false;
    for (int i = 0; !seen; i++) {
        cr_assert_lt(i, 5000, "\"%s\" was never shown: %s", end, shown);
        nanosleep(&(struct timespec){.tv_nsec = 2 * 1000000}, NULL);
        pthread_mutex_lock(&shown_mutex);
        size_t length = strlen(shown), tail = strlen(end);
        seen = length >= tail && strcmp(shown + length - tail, end) == 0;
        pthread_mutex_unlock(&shown_mutex);
    }
}

static bool one_arrived(void)
{
    return arrived_count == 1;
}

static bool two_arrived(void)
{
    return arrived_count == 2;
}

Test(server, a_body_is_shown_while_it_is_on_its_way, .timeout = 60)
{
    start(NULL);
    client c = dial();
    puts_to(&c, "POST /slow HTTP/1.1\r\nhost: h\r\ncontent-length: 15\r\n\r\nfirst ");
    wait_shown("\r\n\r\nfirst ");
    puts_to(&c, "second ");
    wait_shown("\r\n\r\nfirst second ");
    cr_assert_eq(arrived_count + handled_count, 0);
    puts_to(&c, "xx");
    cr_assert(within(5000, one_arrived));
    cr_assert_eq(handled_count, 1);
    /* On the same connection, in chunks: without their frames. */
    puts_to(&c,
            "POST /slow HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n6\r\nthird \r\n");
    wait_shown("\r\n\r\nthird ");
    puts_to(&c, "7\r\nfourth \r\n3\r\nfi");
    wait_shown("\r\n\r\nthird fourth fi");
    hang_up(&c); /* and then it leaves */
    cr_assert(within(5000, two_arrived));
    cr_assert_eq(handled_count, 1);
    cr_assert(within(5000, none_open));
    /* Other requests are nobody's. */
    c = dial();
    puts_to(&c,
            "POST /echo HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\nconnection: close\r\n\r\nab");
    nanosleep(&(struct timespec){.tv_nsec = 150 * 1000000}, NULL);
    puts_to(&c, "cd");
    char *answer_text = slurp(&c, NULL);
    cr_assert_not_null(strstr(answer_text, "abcd"));
    free(answer_text);
    hang_up(&c);
    cr_assert_eq(arrived_count, 2);
    stop();
}

static _Atomic uint32_t run_count;
static uint32_t last_of[4];
static _Atomic bool in_order = true;

typedef struct numbered {
    gw_message message;
    uint32_t poster, number;
} numbered;

static void check_order(gw_message *message)
{
    numbered *n = (numbered *)message;
    if (n->number != last_of[n->poster] + 1)
        in_order = false;
    last_of[n->poster] = n->number;
    free(n);
    run_count++;
}

static gw_loop *_Atomic some_loop;

static void *post_many(void *arg)
{
    for (uint32_t i = 1; i <= 20000; i++) {
        numbered *n = calloc(1, sizeof *n);
        *n =
            (numbered){.message.run = check_order, .poster = (uint32_t)(uintptr_t)arg, .number = i};
        gw_loop_post(some_loop, &n->message);
    }
    return NULL;
}

static void find_loop(void *ctx, gw_exchange *exchange)
{
    some_loop = gw_exchange_loop(exchange);
    gw_respond(exchange, 200, NULL, 0, "", 0);
}

static bool all_run(void)
{
    return run_count == 80000;
}

Test(server, messages_arrive_once_and_in_order)
{
    char *argv[] = {"test", "--listen=127.0.0.1:0", "--set=admin.listen=", "--set=server.loops=2"};
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_conf_create(&conf, NULL, 4, argv, &err), BASE_OK);
    gw_server_options options = {.conf = conf, .handler = find_loop};
    cr_assert_eq(gw_server_create(&server, &options, &err), BASE_OK, "%s", err.text);
    cr_expect_null(gw_server_address(server, GW_LISTENER_ADMIN));
    cr_expect_eq(gw_server_loop_count(server), 2u);
    cr_assert_eq(gw_server_start(server, NULL), BASE_OK);
    free(talk("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"));
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, post_many, (void *)i);
    for (size_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    cr_expect(within(5000, all_run));
    cr_expect(in_order);
    stop();
}

Test(server, an_address_in_use_is_named)
{
    start(NULL);
    char listen[64];
    snprintf(listen, sizeof listen, "--listen=%s", gw_server_address(server, GW_LISTENER_PUBLIC));
    char *argv[] = {"test", listen, "--set=admin.listen="};
    base_err err = BASE_ERR_INIT;
    gw_conf *other;
    gw_server *second;
    cr_assert_eq(gw_conf_create(&other, NULL, 3, argv, &err), BASE_OK);
    gw_server_options options = {.conf = other, .handler = handle};
    cr_expect_eq(gw_server_create(&second, &options, &err), BASE_IO);
    cr_expect_str_eq(err.param, "server.listen");
    cr_expect_not_null(strstr(err.text, listen + 9), "%s", err.text);
    gw_conf_destroy(other);
    stop();
}

static void expect_curl(const char *flags, const char *url, const char *path, const char *version)
{
    char command[512], text[4096];
    snprintf(command, sizeof command,
             "curl -sS --max-time 10 -o - -w ' %%{http_version}' %s %s%s 2>&1", flags, url, path);
    FILE *pipe = popen(command, "r");
    size_t n = fread(text, 1, sizeof text - 1, pipe);
    text[n] = '\0';
    cr_expect_eq(pclose(pipe), 0, "%s: %s", command, text);
    char *end = strrchr(text, ' ');
    cr_assert_not_null(end, "%s", command);
    cr_expect_str_eq(end + 1, version, "%s: %s", command, text);
}

Test(server, curl_gets_through_on_every_protocol, .timeout = 60)
{
    if (system("command -v curl >/dev/null 2>&1") != 0)
        cr_skip("no curl here");
    start_tls(NULL);
    char clear[64], tls[64];
    snprintf(clear, sizeof clear, "http://%s", gw_server_address(server, GW_LISTENER_PUBLIC));
    snprintf(tls, sizeof tls, "https://%s", gw_server_tls_address(server));
    expect_curl("--http1.1", clear, "/records?3", "1.1");
    expect_curl("--http1.0", clear, "/records?3", "1.1"); /* the library names its own version */
    expect_curl("--http2-prior-knowledge", clear, "/records?3", "2");
    expect_curl("--http2", clear, "/records?3", "2");
    expect_curl("-k --http1.1", tls, "/records?3", "1.1");
    expect_curl("-k --http2", tls, "/records?3", "2");
    expect_curl("-k --tls-max 1.2 --http2", tls, "/about", "2");
    expect_curl("-d abc -H 'Expect: 100-continue' --http1.1", clear, "/echo", "1.1");
    stop();
}

Test(server, an_aborted_stream_does_not_look_whole)
{
    start(NULL);
    char *text = talk("GET /abort HTTP/1.1\r\nHost: a\r\n\r\n");
    cr_expect_null(strstr(text, "\r\n0\r\n\r\n"), "%s", text);
    free(text);
    client c = dial();
    greet(&c, 65535);
    put_request(&c, 1, "GET", "/abort", false);
    cr_expect_eq(finish_stream(&c, 1, NULL, NULL), RST);
    hang_up(&c);
    stop();
}
