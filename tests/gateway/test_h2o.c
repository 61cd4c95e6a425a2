/* What the patches of tools/h2o promise, seen through the transport. With the system's libh2o there
 * is nothing to test. */
#include "tests/gateway/server_rig.h"

#if WHIMBREL_H2O_PATCHED

enum { NO_ERROR = 0, REFUSED = 7, CALM = 11 };
enum { PING = 6, CONTINUATION = 9 };
enum { END_STREAM = 1, END_HEADERS = 4 };

static uint32_t number_at(const unsigned char *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static frame got;

/* The error code of the next GOAWAY, UINT32_MAX if the connection ends without one; its last stream
 * goes to `last`. */
static uint32_t next_goaway(client *c, uint32_t *last)
{
    while (get_frame(c, &got))
        if (got.type == GOAWAY) {
            if (last != NULL)
                *last = number_at(got.payload);
            return number_at(got.payload + 4);
        }
    return UINT32_MAX;
}

/* The code of the RST_STREAM that ends a stream without an answer, UINT32_MAX if something else
 * comes. */
static uint32_t next_reset(client *c, uint32_t stream)
{
    while (get_frame(c, &got))
        if (got.stream == stream)
            return got.type == RST ? number_at(got.payload) : UINT32_MAX;
    return UINT32_MAX;
}

/* The status that an answer begins with, which libh2o encodes in one of two ways. */
static int next_status(client *c, uint32_t stream)
{
    while (get_frame(c, &got))
        if (got.type == HEADERS && got.stream == stream) {
            const unsigned char *p = got.payload;
            return p[0] == 0x88   ? 200
                   : p[0] == 0x8c ? 400
                   : p[0] == 8    ? atoi((const char *)p + 2)
                                  : 0;
        }
    return -1;
}

static client greeted(void)
{
    client c = dial();
    greet(&c, 65535);
    return c;
}

static void expect_served(client *c, uint32_t stream)
{
    put_request(c, stream, "GET", "/about", false);
    cr_expect_eq(finish_stream(c, stream, NULL, NULL), DATA, "the connection is not usable");
}

static size_t request_block(unsigned char *block, const char *method, const char *path)
{
    size_t n = hpack(block, ":method", method);
    n += hpack(block + n, ":scheme", "http");
    n += hpack(block + n, ":authority", "127.0.0.1");
    return n + hpack(block + n, ":path", path);
}

static void *drain_soon(void *arg)
{
    gw_server_drain(server, 8000);
    gw_server_cut(server, 0);
    return NULL;
}

static bool one_open(void)
{
    return gw_server_get_stats(server).open_connections == 1;
}

Test(h2o, what_arrives_while_the_server_leaves_is_served, .timeout = 60)
{
    start(NULL);
    unsigned char block[256];
    client c = greeted();
    size_t n = request_block(block, "GET", "/about");
    put_request(&c, 1, "POST", "/echo", true);
    put_frame(&c, DATA, 0, 1, "ab", 2);
    put_frame(&c, HEADERS, END_STREAM, 3, block, 10);
    cr_assert(within(2000, one_open));
    nanosleep(&(struct timespec){.tv_nsec = 200 * 1000000}, NULL);
    pthread_t thread;
    uint64_t begin = base_now_ns();
    pthread_create(&thread, NULL, drain_soon, NULL);
    uint32_t last = 0;
    cr_assert_eq(next_goaway(&c, &last), (uint32_t)NO_ERROR);
    cr_expect_eq(last, 0x7fffffffu);
    cr_assert_eq(next_goaway(&c, &last), (uint32_t)NO_ERROR);
    cr_expect_eq(last, 3u);
    /* A header block that goes on, which made the library spin; a new stream; the rest of a body.
     */
    put_frame(&c, CONTINUATION, END_HEADERS, 3, block + 10, n - 10);
    cr_expect_eq(finish_stream(&c, 3, NULL, NULL), DATA);
    put_request(&c, 5, "GET", "/about", false);
    cr_expect_eq(next_reset(&c, 5), (uint32_t)REFUSED);
    put_frame(&c, DATA, END_STREAM, 1, "cd", 2);
    base_buf body;
    base_buf_init(&body, 0);
    cr_expect_eq(finish_stream(&c, 1, &body, NULL), DATA);
    cr_expect_eq(body.length, 4u);
    base_buf_deinit(&body);
    cr_expect_not(get_frame(&c, &got), "the connection stays");
    pthread_join(thread, NULL);
    cr_expect_lt((base_now_ns() - begin) / MS, 6000u);
    hang_up(&c);
    stop();
}

/* One HPACK integer (RFC 7541, 5.1). */
static size_t hpack_number(const unsigned char **p, unsigned bits)
{
    size_t mask = (1u << bits) - 1, value = *(*p)++ & mask, shift = 0;
    if (value == mask)
        do {
            value += (size_t)(**p & 127) << shift;
            shift += 7;
        } while (*(*p)++ & 128);
    return value;
}

/* How many references to the dynamic table a header block holds; its size updates go to `update`,
 * -1 if there is none. */
static uint32_t count_references(const unsigned char *p, size_t length, long *update)
{
    uint32_t count = 0;
    *update = -1;
    for (const unsigned char *end = p + length; p < end;) {
        size_t index = 0, strings = 1;
        if (*p >= 128) {
            index = hpack_number(&p, 7);
            strings = 0;
        } else if (*p >= 64) {
            index = hpack_number(&p, 6);
        } else if (*p >= 32) {
            *update = (long)hpack_number(&p, 5);
            continue;
        } else {
            index = hpack_number(&p, 4);
        }
        count += index > 61;
        if (strings != 0)
            strings += index == 0;
        while (strings-- > 0) {
            size_t text = hpack_number(&p, 7);
            p += text;
        }
    }
    return count;
}

static uint32_t references_of_answer(client *c, uint32_t stream, long *update)
{
    put_request(c, stream, "GET", "/about", false);
    while (get_frame(c, &got))
        if (got.type == HEADERS && got.stream == stream) {
            uint32_t count = count_references(got.payload, got.length, update);
            finish_stream(c, stream, NULL, NULL);
            return count;
        }
    cr_assert_fail("no answer");
    return 0;
}

Test(h2o, a_client_that_keeps_no_header_table_can_read_the_answers)
{
    start(NULL);
    long update;
    client c = greeted();
    cr_expect_eq(references_of_answer(&c, 1, &update), 0u);
    cr_expect_gt(references_of_answer(&c, 3, &update), 0u, "the test sees no references");
    put_frame(&c, SETTINGS, 0, 0, "\0\x01\0\0\0\0", 6);
    cr_expect_eq(references_of_answer(&c, 5, &update), 0u);
    cr_expect_eq(update, 0, "%ld", update);
    cr_expect_eq(references_of_answer(&c, 7, &update), 0u);
    cr_expect_eq(update, -1);
    put_frame(&c, SETTINGS, 0, 0, "\0\x01\0\x01\0\0", 6); /* more than the server's own */
    cr_expect_eq(references_of_answer(&c, 9, &update), 0u);
    cr_expect_eq(update, 4096, "%ld", update);
    cr_expect_gt(references_of_answer(&c, 11, &update), 0u);
    hang_up(&c);
    stop();
}

/* B131 */
Test(h2o, a_body_over_the_limit_is_refused_before_it_is_read)
{
    start(SETS("--set=limits.body_bytes_max=100000"));
    static const char some[16384];
    for (int declared = 0; declared < 2; declared++) {
        unsigned char block[256];
        client c = greeted();
        size_t n = request_block(block, "POST", "/echo");
        if (declared)
            n += hpack(block + n, "content-length", "10737418240");
        put_frame(&c, HEADERS, END_HEADERS, 1, block, n);
        for (int i = 0; i < (declared ? 1 : 7); i++)
            put_frame(&c, DATA, 0, 1, some, i == 6 ? 1700 : sizeof some);
        base_buf body;
        base_buf_init(&body, 0);
        cr_expect_eq(next_status(&c, 1), 413);
        cr_expect_eq(finish_stream(&c, 1, &body, NULL), DATA);
        cr_expect_not_null(strstr(body.data, "\"request_too_large\""), "%s", body.data);
        base_buf_deinit(&body);
        cr_expect_eq(next_reset(&c, 1), (uint32_t)NO_ERROR);
        for (int i = 0; i < 3; i++) /* was on its way */
            put_frame(&c, DATA, 0, 1, some, sizeof some);
        expect_served(&c, 3);
        hang_up(&c);
    }
    stop();
}

/* B132 */
Test(h2o, no_one_is_told_to_continue_with_a_body_over_the_limit)
{
    start(SETS("--set=limits.body_bytes_max=100000"));
    client c = dial();
    puts_to(&c, "POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
                "Content-Length: 10737418240\r\n\r\n");
    char *text = slurp(&c, NULL);
    cr_expect_eq(strncmp(text, "HTTP/1.1 413 ", 13), 0, "%s", text);
    cr_expect_not_null(strstr(text, "\"request_too_large\""), "%s", text);
    free(text);
    hang_up(&c);
    c = dial();
    puts_to(&c, "POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n"
                "Connection: close\r\n\r\n");
    char block[64] = "";
    cr_expect_gt(get(&c, block, sizeof block - 1), 0);
    cr_expect_eq(strncmp(block, "HTTP/1.1 100 ", 13), 0, "%s", block);
    puts_to(&c, "abc");
    text = slurp(&c, NULL);
    cr_expect_not_null(strstr(text, "\r\n\r\nabc"), "%s", text);
    free(text);
    hang_up(&c);

    /* A client that sends all before it reads gets its answer too. */
    c = dial();
    puts_to(&c, "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3000000\r\n\r\n");
    char *big = calloc(1, 3000000);
    cr_expect(put(&c, big, 3000000));
    free(big);
    text = slurp(&c, NULL);
    cr_expect_eq(strncmp(text, "HTTP/1.1 413 ", 13), 0, "%s", text);
    free(text);
    hang_up(&c);
    cr_expect(within(3000, none_open));
    stop();
}

Test(h2o, heads_that_two_parsers_may_read_differently_are_refused)
{
    static const struct {
        const char *head, *reason;
    } shapes[] = {
        {"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n"
         "0\r\n\r\nG",
         "both content-length and transfer-encoding"},
        {"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
         "more than one content-length"},
        {"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
         "more than one content-length"},
        {"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc", "content-length"},
        {"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3,3\r\n\r\nabc", "content-length"},
        {"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
         "transfer-encoding"},
        {"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: "
         "chunked\r\n\r\n0\r\n\r\n",
         "more than one transfer-encoding"},
        {"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "HTTP/1.0"},
        {"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
         "chunked"},
        {"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: "
         "chunked\r\n\r\n3;x\nabc\r\n0\r\n\r\n",
         "chunked"},
        {"GET /about HTTP/1.1\nHost: a\n\n", "without CR"},
        {"GET /about HTTP/1.1\r\nHost: a\r\nX: b\nY: c\r\n\r\n", "without CR"},
        {"GET /about HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n", "folded"},
        {"GET /about HTTP/1.1\r\nX: b\r\n\r\n", "host is missing"},
        {"GET /about HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "more than one host"},
    };
    start(NULL);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        char *text = talk(shapes[i].head);
        cr_expect_eq(strncmp(text, "HTTP/1.1 400 ", 13), 0, "%s: %s", shapes[i].head, text);
        cr_expect_not_null(strstr(text, shapes[i].reason), "%s: %s", shapes[i].head, text);
        cr_expect_not_null(strstr(text, "\"invalid_request_error\""), "%s", text);
        cr_expect_null(strstr(text + 13, "HTTP/1.1 "), "what follows was read as a request: %s",
                       text);
        free(text);
    }
    /* What cannot be parsed at all. */
    static const char *const broken[] = {"GET /about HTTP/1.1\r\nHost : a\r\n\r\n",
                                         "GET  /about HTTP/1.1\r\nHost: a\r\n\r\n",
                                         "GET /about HTTP/1.1\r\nHost: a\rX: b\r\n\r\n",
                                         "GET /about HTTP/1.1\r\nHost: a\r\nX\r\n\r\n"};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        char *text = talk(broken[i]);
        cr_expect_eq(strncmp(text, "HTTP/1.1 400 ", 13), 0, "%s: %s", broken[i], text);
        free(text);
    }
    cr_expect_eq(handled_count, 0u);
    char *text = talk("GET /about HTTP/1.0\r\n\r\n"); /* HTTP/1.0 has no host */
    cr_expect_not_null(strstr(text, " 200 "), "%s", text);
    free(text);
    stop();
}

Test(h2o, a_trailer_is_no_header)
{
    start(NULL);
    client c = greeted();
    unsigned char block[64];
    put_request(&c, 1, "POST", "/about", true);
    put_frame(&c, DATA, 0, 1, "ab", 2);
    put_frame(&c, HEADERS, END_STREAM | END_HEADERS, 1, block, hpack(block, "x-twice", "forged"));
    base_buf body;
    base_buf_init(&body, 0);
    cr_expect_eq(finish_stream(&c, 1, &body, NULL), DATA);
    cr_expect_null(strstr(body.data, "forged"), "%s", body.data);
    base_buf_deinit(&body);
    hang_up(&c);
    stop();
}

/* Sends `count` times what `one` sends, as long as the server takes it; then the connection must
 * end with `code`. */
static void expect_flood_ends(uint32_t code, uint32_t count, bool (*one)(client *c, uint32_t i))
{
    client c = greeted(), honest = greeted();
    for (uint32_t i = 0; i < count && one(&c, i); i++)
        ;
    uint32_t ended = next_goaway(&c, NULL);
    /* Closed with bytes unread, the kernel may drop the GOAWAY on the way. */
    cr_expect(ended == code || ended == UINT32_MAX, "%u", ended);
    hang_up(&c);
    expect_served(&honest, 1);
    hang_up(&honest);
    cr_expect(within(2000, none_open));
}

static bool reset_by_client(client *c, uint32_t i)
{
    return put_request(c, 2 * i + 1, "GET", "/hold", false) &&
           put_frame(c, RST, 0, 2 * i + 1, "\0\0\0\x08", 4);
}

static bool reset_by_window(client *c, uint32_t i)
{
    return put_request(c, 2 * i + 1, "GET", "/hold", false) &&
           put_frame(c, WINDOW, 0, 2 * i + 1, "\0\0\0\0", 4);
}

static bool reset_by_data(client *c, uint32_t i)
{
    return put_request(c, 2 * i + 1, "GET", "/hold", false) &&
           put_frame(c, DATA, 0, 2 * i + 1, "x", 1);
}

static bool reset_before_its_end(client *c, uint32_t i)
{
    return put_request(c, 2 * i + 1, "POST", "/hold", true) &&
           put_frame(c, RST, 0, 2 * i + 1, "\0\0\0\x08", 4);
}

/* B126, and its like in which the server is made to reset the stream (CVE-2025-8671). */
Test(h2o, requests_that_are_begun_and_reset_are_bounded, .timeout = 60)
{
    start(NULL);
    bool (*const floods[])(client *, uint32_t) = {reset_by_client, reset_by_window, reset_by_data,
                                                  reset_before_its_end};
    for (size_t i = 0; i < sizeof floods / sizeof *floods; i++) {
        handled_count = gone_count = 0;
        expect_flood_ends(CALM, 20000, floods[i]);
        cr_expect_leq(handled_count, 202u, "%u requests were run", handled_count);
        if (i < 3)
            cr_expect_eq(gone_count, handled_count - 1, "a request did not end with its stream");
    }
    stop();
}

static bool a_ping(client *c, uint32_t i)
{
    return put_frame(c, PING, 0, 0, "12345678", 8);
}

static bool a_setting(client *c, uint32_t i)
{
    return put_frame(c, SETTINGS, 0, 0, "\0\x03\0\0\0\x64", 6);
}

static bool an_empty_frame(client *c, uint32_t i)
{
    return (i > 0 || put_request(c, 1, "POST", "/echo", true)) && put_frame(c, DATA, 0, 1, "", 0);
}

static bool an_unknown_frame(client *c, uint32_t i)
{
    return put_frame(c, 0x20, 0, 0, "", 0);
}

Test(h2o, frames_without_content_are_bounded, .timeout = 60)
{
    start(NULL);
    bool (*const floods[])(client *, uint32_t) = {a_ping, a_setting, an_empty_frame,
                                                  an_unknown_frame};
    for (size_t i = 0; i < sizeof floods / sizeof *floods; i++)
        expect_flood_ends(CALM, 200000, floods[i]);
    stop();
}

static bool a_continuation(client *c, uint32_t i)
{
    unsigned char block[64];
    if (i == 0)
        return put_frame(c, HEADERS, END_STREAM, 1, block, hpack(block, ":method", "GET"));
    return put_frame(c, CONTINUATION, 0, 1, block, hpack(block, "x", "y"));
}

static bool a_large_continuation(client *c, uint32_t i)
{
    static const unsigned char block[16000];
    return i == 0 ? a_continuation(c, 0) : put_frame(c, CONTINUATION, 0, 1, block, sizeof block);
}

/* B134 */
Test(h2o, header_blocks_are_bounded, .timeout = 60)
{
    start(NULL);
    long before = resident_kib();
    expect_flood_ends(CALM, 10000, a_continuation);
    expect_flood_ends(CALM, 10000, a_large_continuation);
    cr_expect_eq(handled_count, 2u); /* the honest ones' */

    /* A frame in between. */
    client c = greeted();
    unsigned char block[20000];
    put_frame(&c, HEADERS, END_STREAM, 1, block, hpack(block, ":method", "GET"));
    put_frame(&c, PING, 0, 0, "12345678", 8);
    cr_expect_eq(next_goaway(&c, NULL), 1u);
    hang_up(&c);

    /* One entry of 4000 bytes in the table, and 11,000 references to it: 44 MB of headers in 15 KB.
     */
    for (int round = 0; round < 20; round++) {
        c = greeted();
        size_t n = request_block(block, "GET", "/about");
        static const unsigned char entry[] = {0x40, 1, 'x', 0x7f, 0xa1, 0x1e}; /* 127 + 3873 */
        memcpy(block + n, entry, sizeof entry);
        memset(block + n + sizeof entry, 'y', 4000);
        n += sizeof entry + 4000;
        memset(block + n, 0xbe, 11000);
        put_frame(&c, HEADERS, END_STREAM | END_HEADERS, 1, block, n + 11000);
        cr_expect_eq(next_goaway(&c, NULL), (uint32_t)CALM);
        hang_up(&c);
    }
#ifndef __SANITIZE_ADDRESS__ /* which keeps what was freed */
    cr_expect_lt(resident_kib() - before, 32768, "%ld KiB", resident_kib() - before);
#else
    (void)before;
#endif

    /* 64 KiB in one field. */
    c = greeted();
    size_t n = request_block(block, "GET", "/about");
    static const unsigned char field[] = {0x40, 1, 'x', 0x7f, 0x81, 0xff, 0x03}; /* 127 + 65409 */
    memcpy(block + n, field, sizeof field);
    put_frame(&c, HEADERS, END_STREAM, 1, block, n + sizeof field);
    memset(block, 'z', 16384);
    for (int i = 0; i < 4; i++)
        put_frame(&c, CONTINUATION, i == 3 ? END_HEADERS : 0, 1, block, 16384);
    cr_expect_eq(next_status(&c, 1), 431);
    hang_up(&c);
    stop();
}

#else

Test(h2o, the_system_library_is_not_patched)
{
    cr_skip("built with -Dh2o=system");
}

#endif
