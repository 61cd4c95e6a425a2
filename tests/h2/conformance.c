/* The checks that h2spec makes of an HTTP/2 server (https://github.com/summerwind/h2spec: 146 and
 * one strict), written anew over raw frames and named as it names them, against the program itself:
 * over clear text, then over TLS. RFC 9113 kept the numbers of RFC 7540's sections 3 to 7 by and
 * large; the names are those of RFC 7540, as h2spec's are.
 *
 *   conformance PROGRAM MODEL
 *
 * A check passes as there: a connection error is a GOAWAY with the code, or the connection's end; a
 * stream error may be either of them or RST_STREAM with the code. Each check has a connection of
 * its own. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/h2/wire.h"

#define WAIT_MS 10000 /* for what must come; never spent when all is well */
#define PATH "/openapi.json"

enum {
    NO_ERROR,
    PROTOCOL_ERROR,
    FLOW_CONTROL_ERROR = 3,
    STREAM_CLOSED = 5,
    FRAME_SIZE_ERROR,
    REFUSED_STREAM,
    CANCEL,
    COMPRESSION_ERROR
};
#define CODE(c) (1u << (c))

typedef struct suite {
    const char *address;
    bool tls;
    wire w;
    const char *group, *section, *text;
    int number;
    bool failed, open;
    uint32_t run_count, fail_count, waived_count;
    uint32_t streams_max; /* the server's SETTINGS_MAX_CONCURRENT_STREAMS */
    unsigned char block[40000];
    size_t length; /* of the header block that is being made */
} suite;

static void fail(suite *s, const char *format, ...)
{
    va_list args;
    if (!s->failed) {
        printf("[FAIL] %s %s/%s/%d %s: ", s->tls ? "tls" : "h2c", s->group, s->section, s->number,
               s->text);
        va_start(args, format);
        vprintf(format, args);
        va_end(args);
        putchar('\n');
    }
    s->failed = true;
}

static void end_check(suite *s)
{
    if (!s->open)
        return;
    wire_close(&s->w);
    s->open = false;
    s->run_count++;
    s->fail_count += s->failed;
}

static void begin_check(suite *s, const char *section, int number, const char *text)
{
    end_check(s);
    s->section = section;
    s->number = number;
    s->text = text;
    s->failed = false;
    s->open = true;
    s->streams_max = 0;
    wire_open(&s->w, s->address, s->tls, NULL);
}

/* ---- saying ---- */

static void put(suite *s, int type, int flags, uint32_t stream, const void *payload, size_t length)
{
    wire_put(&s->w, type, flags, stream, payload,
             length); /* a server that has closed is seen when reading */
}

static void put_raw(suite *s, const void *bytes, size_t length)
{
    wire_send(&s->w, bytes, length, WAIT_MS);
}

static void put_settings(suite *s, uint16_t id, uint32_t value)
{
    unsigned char setting[6] = {(unsigned char)(id >> 8),     (unsigned char)id,
                                (unsigned char)(value >> 24), (unsigned char)(value >> 16),
                                (unsigned char)(value >> 8),  (unsigned char)value};
    put(s, SETTINGS, 0, 0, setting, 6);
}

static void put_window(suite *s, uint32_t stream, uint32_t by)
{
    unsigned char delta[4] = {(unsigned char)(by >> 24), (unsigned char)(by >> 16),
                              (unsigned char)(by >> 8), (unsigned char)by};
    put(s, WINDOW_UPDATE, 0, stream, delta, 4);
}

static void put_reset(suite *s, uint32_t stream, uint8_t code)
{
    put(s, RST_STREAM, 0, stream, (unsigned char[]){0, 0, 0, code}, 4);
}

static void put_priority(suite *s, uint32_t stream, uint32_t parent, bool exclusive, uint8_t weight)
{
    put(s, PRIORITY, 0, stream,
        (unsigned char[]){exclusive ? 0x80 : 0, 0, 0, (unsigned char)parent, weight}, 5);
}

/* Header blocks are made in s->block. */
static void request(suite *s, const char *method)
{
    s->length = wire_request(s->block, method, PATH, s->tls);
}

static void field(suite *s, const char *name, const char *value)
{
    s->length += wire_field(s->block + s->length, name, value);
}

static void bytes(suite *s, const void *more, size_t length)
{
    memcpy(s->block + s->length, more, length);
    s->length += length;
}

/* A block of one long field, as the text of CONTINUATION frames. */
static void dummy(suite *s)
{
    char value[1001];
    memset(value, 'x', 1000);
    value[1000] = '\0';
    s->length = 0;
    field(s, "x-dummy0", value);
}

static void put_headers(suite *s, uint32_t stream, int flags)
{
    put(s, HEADERS, flags, stream, s->block, s->length);
}

static void get_page(suite *s, uint32_t stream)
{
    request(s, "GET");
    put_headers(s, stream, END_STREAM | END_HEADERS);
}

static void post_begins(suite *s, uint32_t stream)
{
    request(s, "POST");
    put_headers(s, stream, END_HEADERS);
}

/* ---- hearing ---- */

static const char *name_of(const wire_frame *f)
{
    static const char *const names[] = {"DATA",          "HEADERS",      "PRIORITY", "RST_STREAM",
                                        "SETTINGS",      "PUSH_PROMISE", "PING",     "GOAWAY",
                                        "WINDOW_UPDATE", "CONTINUATION"};
    return f->type < sizeof names / sizeof *names ? names[f->type] : "an unknown frame";
}

static uint32_t code_of(const wire_frame *f)
{
    const unsigned char *p = f->payload + (f->type == GOAWAY ? 4 : 0);
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

/* Waits for a frame of the type; those of others are passed over. False, and the check has failed,
 * if it does not come. */
static bool want(suite *s, wire_frame *f, int type)
{
    uint32_t code = 0;
    int ended_by = -1;
    for (;;) {
        wire_event event = wire_get(&s->w, f, WAIT_MS);
        if (event == WIRE_FRAME && f->type == type)
            return true;
        if (event == WIRE_FRAME && (f->type == GOAWAY || f->type == RST_STREAM)) {
            ended_by = f->type;
            code = code_of(f);
        } else if (event != WIRE_FRAME) {
            fail(s, "wanted frame type %d; %s%s %u", type,
                 event == WIRE_CLOSED ? "closed" : "silence",
                 ended_by == GOAWAY       ? " after GOAWAY"
                 : ended_by == RST_STREAM ? " after RST_STREAM"
                                          : "",
                 code);
            return false;
        }
    }
}

/* The connection ends, with one of the codes or without a word; for stream errors a stream may end
 * instead. */
static void want_error(suite *s, uint32_t codes, bool stream_too)
{
    wire_frame f, last = {0};
    for (bool any = false;; any = true) {
        wire_event event = wire_get(&s->w, &f, WAIT_MS);
        if (event == WIRE_CLOSED)
            return;
        if (event == WIRE_SILENT) {
            fail(s, "no error; last was %s", any ? name_of(&last) : "nothing");
            return;
        }
        if (f.type == GOAWAY || (stream_too && f.type == RST_STREAM)) {
            uint32_t code = code_of(&f);
            if (code < 32 && (codes & CODE(code)) != 0)
                return;
            if (f.type == GOAWAY) {
                fail(s, "GOAWAY with code %u", code);
                return;
            }
        }
        last = f;
    }
}

static void want_connection_error(suite *s, uint32_t codes)
{
    want_error(s, codes, false);
}

static void want_stream_error(suite *s, uint32_t codes)
{
    want_error(s, codes, true);
}

static void want_close(suite *s)
{
    wire_frame f;
    wire_event event;
    while ((event = wire_get(&s->w, &f, WAIT_MS)) == WIRE_FRAME)
        ;
    if (event != WIRE_CLOSED)
        fail(s, "the connection stays open");
}

static void want_headers(suite *s, uint32_t stream)
{
    wire_frame f;
    if (want(s, &f, HEADERS) && f.stream != stream)
        fail(s, "HEADERS on stream %u", f.stream);
}

static void want_data_of(suite *s, uint32_t length)
{
    wire_frame f;
    if (want(s, &f, DATA) && f.length != length)
        fail(s, "DATA of %u bytes", f.length);
}

static void want_pong(suite *s, const char *text)
{
    wire_frame f;
    if (want(s, &f, PING) &&
        ((f.flags & ACK) == 0 || f.length != 8 || memcmp(f.payload, text, 8) != 0))
        fail(s, "PING with flags %d", f.flags);
}

static void want_pong_or_close(suite *s, const char *text)
{
    wire_frame f;
    for (wire_event event; (event = wire_get(&s->w, &f, WAIT_MS)) != WIRE_CLOSED;) {
        if (event == WIRE_SILENT) {
            fail(s, "neither PING nor the end");
            return;
        }
        if (f.type == PING && (f.flags & ACK) != 0 && memcmp(f.payload, text, 8) == 0)
            return;
    }
}

static void ping_pong(suite *s)
{
    put(s, PING, 0, 0, "h2spec\0\0", 8);
    want_pong(s, "h2spec\0\0");
}

static void ping_pong_or_close(suite *s)
{
    put(s, PING, 0, 0, "h2spec\0\0", 8);
    want_pong_or_close(s, "h2spec\0\0");
}

static void want_settings(suite *s, bool acknowledged)
{
    wire_frame f;
    if (want(s, &f, SETTINGS) && ((f.flags & ACK) != 0) != acknowledged)
        fail(s, "SETTINGS with flags %d", f.flags);
}

/* Preface and settings of both sides, acknowledged by both. */
static void shake(suite *s)
{
    wire_frame f;
    wire_greet(&s->w);
    if (!want(s, &f, SETTINGS))
        return;
    for (size_t i = 0; i + 6 <= f.length; i += 6)
        if (f.payload[i] == 0 && f.payload[i + 1] == 3)
            s->streams_max = (uint32_t)f.payload[i + 4] << 8 | f.payload[i + 5];
    put(s, SETTINGS, ACK, 0, NULL, 0);
    want_settings(s, true);
}

#define CHECK(section, number, text) begin_check(s, section, number, text), shake(s)
#define CHECK_BARE(section, number, text) begin_check(s, section, number, text)

/* ---- generic: what must be accepted ---- */

static void accepted(suite *s)
{
    s->group = "generic";
    CHECK_BARE("1", 1, "Sends a client connection preface");
    wire_greet(&s->w);
    want_settings(s, false);

    CHECK("2", 1, "Sends a PRIORITY frame on idle stream");
    put_priority(s, 1, 0, false, 255);
    ping_pong(s);
    CHECK("2", 2, "Sends a WINDOW_UPDATE frame on half-closed (remote) stream");
    put_settings(s, 4, 0);
    get_page(s, 1);
    put_window(s, 1, 1);
    want_data_of(s, 1);
    CHECK("2", 3, "Sends a PRIORITY frame on half-closed (remote) stream");
    put_settings(s, 4, 0);
    get_page(s, 1);
    put_priority(s, 1, 0, false, 255);
    put_window(s, 1, 1);
    want_data_of(s, 1);
    CHECK("2", 4, "Sends a RST_STREAM frame on half-closed (remote) stream");
    get_page(s, 1);
    put_reset(s, 1, CANCEL);
    ping_pong_or_close(s);
    CHECK("2", 5, "Sends a PRIORITY frame on closed stream");
    get_page(s, 1);
    for (wire_frame f; want(s, &f, DATA) && (f.flags & END_STREAM) == 0;)
        if (f.length != 0) {
            put_window(s, 0, f.length);
            put_window(s, 1, f.length);
        }
    put_priority(s, 1, 0, false, 255);
    ping_pong(s);

    CHECK("3.1", 1, "Sends a DATA frame");
    post_begins(s, 1);
    put(s, DATA, END_STREAM, 1, "test", 4);
    want_headers(s, 1);
    CHECK("3.1", 2, "Sends multiple DATA frames");
    post_begins(s, 1);
    put(s, DATA, 0, 1, "test", 4);
    put(s, DATA, END_STREAM, 1, "test", 4);
    want_headers(s, 1);
    CHECK("3.1", 3, "Sends a DATA frame with padding");
    post_begins(s, 1);
    put(s, DATA, END_STREAM | PADDED, 1, "\5test\0\0\0\0\0", 10);
    want_headers(s, 1);

    CHECK("3.2", 1, "Sends a HEADERS frame");
    get_page(s, 1);
    want_headers(s, 1);
    CHECK("3.2", 2, "Sends a HEADERS frame with padding");
    request(s, "GET");
    memmove(s->block + 1, s->block, s->length);
    s->block[0] = 8;
    s->length++;
    bytes(s, "\0\0\0\0\0\0\0\0", 8);
    put_headers(s, 1, END_STREAM | END_HEADERS | PADDED);
    want_headers(s, 1);
    CHECK("3.2", 3, "Sends a HEADERS frame with priority");
    request(s, "GET");
    memmove(s->block + 5, s->block, s->length);
    memcpy(s->block, "\0\0\0\0\xff", 5);
    s->length += 5;
    put_headers(s, 1, END_STREAM | END_HEADERS | PRIORITIZED);
    want_headers(s, 1);

    CHECK("3.3", 1, "Sends a PRIORITY frame with priority 1");
    put_priority(s, 1, 0, false, 0);
    get_page(s, 1);
    want_headers(s, 1);
    CHECK("3.3", 2, "Sends a PRIORITY frame with priority 256");
    put_priority(s, 1, 0, false, 255);
    get_page(s, 1);
    want_headers(s, 1);
    CHECK("3.3", 3, "Sends a PRIORITY frame with stream dependency");
    put_priority(s, 3, 1, false, 0);
    get_page(s, 1);
    want_headers(s, 1);
    CHECK("3.3", 4, "Sends a PRIORITY frame with exclusive");
    put_priority(s, 1, 0, true, 0);
    get_page(s, 1);
    want_headers(s, 1);
    CHECK("3.3", 5,
          "Sends a PRIORITY frame for an idle stream, then send a HEADER frame for a lower stream "
          "ID");
    put_priority(s, 3, 0, false, 255);
    get_page(s, 1);
    want_headers(s, 1);

    CHECK("3.4", 1, "Sends a RST_STREAM frame");
    post_begins(s, 1);
    put_reset(s, 1, CANCEL);
    ping_pong_or_close(s);

    CHECK("3.5", 1, "Sends a SETTINGS frame");
    put(s, SETTINGS, 0, 0,
        "\0\1\0\0\x10\0\0\2\0\0\0\1\0\3\0\0\0\x64\0\4\0\0\xff\xff\0\5\0\0\x40\0\0\6\0\0\0\x64", 36);
    want_settings(s, true);
    CHECK("3.7", 1, "Sends a PING frame");
    ping_pong(s);
    CHECK("3.8", 1, "Sends a GOAWAY frame");
    put(s, GOAWAY, 0, 0, "\0\0\0\0\0\0\0\0h2spec", 14);
    ping_pong_or_close(s);
    CHECK("3.9", 1, "Sends a WINDOW_UPDATE frame with stream ID 0");
    put_window(s, 0, 1);
    ping_pong(s);
    CHECK("3.9", 2, "Sends a WINDOW_UPDATE frame with stream ID 1");
    get_page(s, 1);
    put_window(s, 1, 1);
    want_headers(s, 1);

    CHECK("3.10", 1, "Sends a CONTINUATION frame");
    request(s, "GET");
    put(s, HEADERS, END_STREAM, 1, s->block, 5);
    put(s, CONTINUATION, END_HEADERS, 1, s->block + 5, s->length - 5);
    want_headers(s, 1);
    CHECK("3.10", 2, "Sends multiple CONTINUATION frames");
    request(s, "GET");
    put(s, HEADERS, END_STREAM, 1, s->block, 5);
    put(s, CONTINUATION, 0, 1, s->block + 5, 5);
    put(s, CONTINUATION, END_HEADERS, 1, s->block + 10, s->length - 10);
    want_headers(s, 1);

    CHECK("4", 1, "Sends a GET request");
    get_page(s, 1);
    want_headers(s, 1);
    CHECK("4", 2, "Sends a HEAD request");
    request(s, "HEAD");
    put_headers(s, 1, END_STREAM | END_HEADERS);
    want_headers(s, 1);
    CHECK("4", 3, "Sends a POST request");
    post_begins(s, 1);
    put(s, DATA, END_STREAM, 1, "test", 4);
    want_headers(s, 1);
    CHECK("4", 4, "Sends a POST request with trailers");
    request(s, "POST");
    field(s, "trailer", "x-test");
    put_headers(s, 1, END_HEADERS);
    put(s, DATA, 0, 1, "test", 4);
    s->length = 0;
    field(s, "x-test", "ok");
    put_headers(s, 1, END_STREAM | END_HEADERS);
    want_headers(s, 1);

    /* RFC 7541, 6: every representation of a field. The names are h2spec's; its bytes say what each
     * is. */
    static const char x_test[] = "\x06x-test\x06h2spec", agent[] = "\x0auser-agent\x06h2spec";
    static const unsigned char huffman[] =
        "\x85\xf2\xb2\x4a\x84\xff\x84\x9c\x48\xac\xa4"; /* x-test: h2spec */
    static const unsigned char huffman_agent[] =
        "\x87\xb5\x05\xb1\x61\xcc\x5a\x93\x84\x9c\x48\xac\xa4";
    static const struct {
        const char *text;
        unsigned char first;
        const void *rest;
        size_t length;
    } forms[] = {
        {"Sends a indexed header field representation", 0xba, "", 0},
        {"Sends a literal header field with incremental indexing - indexed name", 0x7a,
         "\x06h2spec", 7},
        {"Sends a literal header field with incremental indexing - indexed name (with Huffman "
         "coding)",
         0x7a, "\x84\x9c\x48\xac\xa4", 5},
        {"Sends a literal header field with incremental indexing - new name", 0x40, x_test,
         sizeof x_test - 1},
        {"Sends a literal header field with incremental indexing - new name (with Huffman coding)",
         0x40, huffman, sizeof huffman - 1},
        {"Sends a literal header field without indexing - indexed name", 0x0f, "\x2b\x06h2spec", 8},
        {"Sends a literal header field without indexing - indexed name (with Huffman coding)", 0x0f,
         "\x2b\x84\x9c\x48\xac\xa4", 6},
        {"Sends a literal header field without indexing - new name", 0x00, agent, sizeof agent - 1},
        {"Sends a literal header field without indexing - new name (huffman encoded)", 0x00,
         huffman_agent, sizeof huffman_agent - 1},
        {"Sends a literal header field never indexed - indexed name", 0x1f, "\x2b\x06h2spec", 8},
        {"Sends a literal header field never indexed - indexed name (huffman encoded)", 0x1f,
         "\x2b\x84\x9c\x48\xac\xa4", 6},
        {"Sends a literal header field never indexed - new name", 0x10, x_test, sizeof x_test - 1},
        {"Sends a literal header field never indexed - new name (huffman encoded)", 0x10, huffman,
         sizeof huffman - 1},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        CHECK("5", (int)i + 1, forms[i].text);
        request(s, "GET");
        bytes(s, &forms[i].first, 1);
        bytes(s, forms[i].rest, forms[i].length);
        put_headers(s, 1, END_STREAM | END_HEADERS);
        want_headers(s, 1);
    }
    static const char *const updates[] = {"\x3f\x61",
                                          "\x3f\x61\x3f\xe1\x1f"}; /* 128; 128 and 4096 */
    for (int i = 0; i < 2; i++) {
        CHECK("5", 14 + i,
              i == 0 ? "Sends a dynamic table size update"
                     : "Sends multiple dynamic table size update");
        s->length = 0;
        bytes(s, updates[i], strlen(updates[i]));
        s->length += wire_request(s->block + s->length, "GET", PATH, s->tls);
        put_headers(s, 1, END_STREAM | END_HEADERS);
        want_headers(s, 1);
    }
    end_check(s);
}

/* ---- http2: RFC 9113, sections 3 to 5 ---- */

static void streams(suite *s)
{
    s->group = "http2";
    CHECK_BARE("3.5", 1, "Sends client connection preface");
    wire_greet(&s->w);
    want_settings(s, false);
    /* Clear text has one port for HTTP/1.1 and HTTP/2: the answer to this is "400 Bad Request", and
     * the end. */
    CHECK_BARE("3.5", 2, "Sends invalid connection preface");
    put_raw(s, "INVALID CONNECTION PREFACE\r\n\r\n", 30);
    while (wire_fill(&s->w, WAIT_MS))
        s->w.at = s->w.length;
    if (!s->w.closed)
        fail(s, "the connection stays open");

    CHECK("4.1", 1, "Sends a frame with unknown type");
    put(s, 0x16, 0, 0, "\0\0\0\0\0\0\0\0", 8);
    ping_pong(s);
    CHECK("4.1", 2, "Sends a frame with undefined flag");
    put(s, PING, 0x16, 0, "\0\0\0\0\0\0\0\0", 8);
    want_pong(s, "\0\0\0\0\0\0\0\0");
    CHECK("4.1", 3, "Sends a frame with reserved field bit");
    put(s, PING, 0x16, 0x80000000, "\0\0\0\0\0\0\0\0", 8);
    want_pong(s, "\0\0\0\0\0\0\0\0");
    static const char large[16385];
    CHECK("4.2", 1, "Sends a DATA frame with 2^14 octets in length");
    post_begins(s, 1);
    put(s, DATA, END_STREAM, 1, large, 16384);
    want_headers(s, 1);
    CHECK("4.2", 2, "Sends a large size DATA frame that exceeds the SETTINGS_MAX_FRAME_SIZE");
    post_begins(s, 1);
    put(s, DATA, END_STREAM, 1, large, 16385);
    want_stream_error(s, CODE(FRAME_SIZE_ERROR));
    CHECK("4.2", 3, "Sends a large size HEADERS frame that exceeds the SETTINGS_MAX_FRAME_SIZE");
    char value[4001];
    memset(value, 'x', 4000);
    value[4000] = '\0';
    request(s, "GET");
    for (int i = 0; i < 5; i++)
        field(s, "x-dummy", value);
    put_headers(s, 1, END_STREAM | END_HEADERS);
    want_connection_error(s, CODE(FRAME_SIZE_ERROR));
    CHECK("4.3", 1, "Sends invalid header block fragment");
    put(s, HEADERS, END_STREAM | END_HEADERS, 1, "\x40", 1);
    want_connection_error(s, CODE(COMPRESSION_ERROR));
    CHECK("4.3", 2, "Sends a PRIORITY frame while sending the header blocks");
    request(s, "GET");
    put_headers(s, 1, 0);
    put_priority(s, 1, 0, false, 255);
    dummy(s);
    put(s, CONTINUATION, END_HEADERS, 1, s->block, s->length);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("4.3", 3, "Sends a HEADERS frame to another stream while sending the header blocks");
    request(s, "GET");
    put_headers(s, 1, 0);
    put_headers(s, 3, END_STREAM | END_HEADERS);
    want_connection_error(s, CODE(PROTOCOL_ERROR));

    CHECK("5.1", 1, "idle: Sends a DATA frame");
    put(s, DATA, END_STREAM, 1, "test", 4);
    want_stream_error(s, CODE(PROTOCOL_ERROR) | CODE(STREAM_CLOSED));
    CHECK("5.1", 2, "idle: Sends a RST_STREAM frame");
    put_reset(s, 1, CANCEL);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("5.1", 3, "idle: Sends a WINDOW_UPDATE frame");
    put_window(s, 1, 100);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("5.1", 4, "idle: Sends a CONTINUATION frame");
    request(s, "GET");
    put(s, CONTINUATION, END_HEADERS, 1, s->block, s->length);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("5.1", 5, "half closed (remote): Sends a DATA frame");
    get_page(s, 1);
    put(s, DATA, END_STREAM, 1, "test", 4);
    want_stream_error(s, CODE(STREAM_CLOSED));
    CHECK("5.1", 6, "half closed (remote): Sends a HEADERS frame");
    get_page(s, 1);
    get_page(s, 1);
    want_stream_error(s, CODE(STREAM_CLOSED));
    CHECK("5.1", 7, "half closed (remote): Sends a CONTINUATION frame");
    get_page(s, 1);
    put(s, CONTINUATION, END_HEADERS, 1, s->block, s->length);
    want_stream_error(s, CODE(STREAM_CLOSED) | CODE(PROTOCOL_ERROR));
    CHECK("5.1", 8, "closed: Sends a DATA frame after sending RST_STREAM frame");
    post_begins(s, 1);
    put_reset(s, 1, CANCEL);
    put(s, DATA, END_STREAM, 1, "test", 4);
    want_stream_error(s, CODE(STREAM_CLOSED));
    CHECK("5.1", 9, "closed: Sends a HEADERS frame after sending RST_STREAM frame");
    post_begins(s, 1);
    put_reset(s, 1, CANCEL);
    get_page(s, 1);
    want_stream_error(s, CODE(STREAM_CLOSED));
    CHECK("5.1", 10, "closed: Sends a CONTINUATION frame after sending RST_STREAM frame");
    post_begins(s, 1);
    put_reset(s, 1, CANCEL);
    dummy(s);
    put(s, CONTINUATION, END_HEADERS, 1, s->block, s->length);
    want_stream_error(s, CODE(STREAM_CLOSED) | CODE(PROTOCOL_ERROR));
    for (int i = 0; i < 3; i++) {
        static const char *const texts[] = {"closed: Sends a DATA frame",
                                            "closed: Sends a HEADERS frame",
                                            "closed: Sends a CONTINUATION frame"};
        CHECK("5.1", 11 + i, texts[i]);
        request(s, "HEAD"); /* whose answer ends without a window */
        put_headers(s, 1, END_STREAM | END_HEADERS);
        wire_frame f;
        bool ended = false;
        while (!ended && wire_get(&s->w, &f, WAIT_MS) == WIRE_FRAME)
            ended = f.stream == 1 && (f.flags & END_STREAM) != 0;
        if (!ended)
            fail(s, "the stream did not close");
        if (i == 0) {
            put(s, DATA, END_STREAM, 1, "test", 4);
            want_stream_error(s, CODE(STREAM_CLOSED));
        } else if (i == 1) {
            put_headers(s, 1, END_STREAM | END_HEADERS);
            want_connection_error(s, CODE(STREAM_CLOSED));
        } else {
            dummy(s);
            put(s, CONTINUATION, END_HEADERS, 1, s->block, s->length);
            want_connection_error(s, CODE(STREAM_CLOSED) | CODE(PROTOCOL_ERROR));
        }
    }
    CHECK("5.1.1", 1, "Sends even-numbered stream identifier");
    get_page(s, 2);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("5.1.1", 2, "Sends stream identifier that is numerically smaller than previous");
    get_page(s, 5);
    get_page(s, 3);
    /* RFC 9113 5.1.1 wants PROTOCOL_ERROR; a stream below an opened one has been closed by that,
     * so 5.1's STREAM_CLOSED is as true, and h2spec takes the end of the connection that follows.
     */
    want_connection_error(s, CODE(PROTOCOL_ERROR) | CODE(STREAM_CLOSED));
    CHECK(
        "5.1.2", 1,
        "Sends HEADERS frames that causes their advertised concurrent stream limit to be exceeded");
    if (s->streams_max == 0)
        fail(s, "no limit was announced");
    put_settings(s, 4, 0);
    request(s, "GET");
    for (uint32_t i = 0; i <= s->streams_max; i++)
        put_headers(s, 2 * i + 1, END_STREAM | END_HEADERS);
    want_stream_error(s, CODE(PROTOCOL_ERROR) | CODE(REFUSED_STREAM));
    CHECK("5.3.1", 1, "Sends HEADERS frame that depends on itself");
    s->length = 0;
    bytes(s, "\0\0\0\1\xff", 5);
    s->length += wire_request(s->block + 5, "GET", PATH, s->tls);
    put_headers(s, 1, END_STREAM | END_HEADERS | PRIORITIZED);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
    CHECK("5.3.1", 2, "Sends PRIORITY frame that depend on itself");
    put_priority(s, 1, 1, false, 255);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
    CHECK("5.4.1", 1, "Sends an invalid PING frame for connection close");
    put(s, PING, 0, 3, "\0\0\0\0\0\0\0\0", 8);
    want_close(s);
    CHECK("5.4.1", 2, "Sends an invalid PING frame to receive GOAWAY frame");
    put(s, PING, 0, 3, "\0\0\0\0\0\0\0\0", 8);
    wire_frame f;
    want(s, &f, GOAWAY);
    CHECK("5.5", 1, "Sends an unknown extension frame");
    put(s, 0x16, 0, 0, "\0\0\0\0\0\0\0\0", 8);
    ping_pong(s);
    CHECK("5.5", 2, "Sends an unknown extension frame in the middle of a header block");
    request(s, "GET");
    put_headers(s, 1, END_STREAM);
    put(s, 0x16, 0, 0, "\0\0\0\0\0\0\0\0", 8);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    end_check(s);
}

/* ---- http2: RFC 9113, sections 6 and 7 ---- */

static void frames(suite *s)
{
    wire_frame f;
    s->group = "http2";
    CHECK("6.1", 1, "Sends a DATA frame with 0x0 stream identifier");
    put(s, DATA, END_STREAM, 0, "test", 4);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.1", 2,
          "Sends a DATA frame on the stream that is not in \"open\" or \"half-closed (local)\" "
          "state");
    request(s, "POST");
    put_headers(s, 1, END_STREAM | END_HEADERS);
    put(s, DATA, END_STREAM, 1, "test", 4);
    want_stream_error(s, CODE(STREAM_CLOSED));
    CHECK("6.1", 3, "Sends a DATA frame with invalid pad length");
    request(s, "POST");
    field(s, "content-length", "4");
    put_headers(s, 1, END_HEADERS);
    put(s, DATA, END_STREAM | PADDED, 1, "\6Test", 5);
    want_connection_error(s, CODE(PROTOCOL_ERROR));

    CHECK("6.2", 1, "Sends a HEADERS frame without the END_HEADERS flag, and a PRIORITY frame");
    request(s, "GET");
    put_headers(s, 1, 0);
    put_priority(s, 1, 0, false, 255);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.2", 2, "Sends a HEADERS frame to another stream while sending a HEADERS frame");
    request(s, "GET");
    put_headers(s, 1, 0);
    put_headers(s, 3, END_STREAM | END_HEADERS);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.2", 3, "Sends a HEADERS frame with 0x0 stream identifier");
    get_page(s, 0);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.2", 4, "Sends a HEADERS frame with invalid pad length");
    s->length = 1;
    s->length += wire_request(s->block + 1, "GET", PATH, s->tls);
    s->block[0] = (unsigned char)(s->length + 1);
    put_headers(s, 1, END_STREAM | END_HEADERS | PADDED);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.3", 1, "Sends a PRIORITY frame with 0x0 stream identifier");
    put_priority(s, 0, 0, false, 255);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.3", 2, "Sends a PRIORITY frame with a length other than 5 octets");
    get_page(s, 1);
    put(s, PRIORITY, 0, 1, "\x80\0\0\1", 4);
    want_stream_error(s, CODE(FRAME_SIZE_ERROR));
    CHECK("6.4", 1, "Sends a RST_STREAM frame with 0x0 stream identifier");
    put_reset(s, 0, CANCEL);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.4", 2, "Sends a RST_STREAM frame on a idle stream");
    put_reset(s, 1, CANCEL);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.4", 3, "Sends a RST_STREAM frame with a length other than 4 octets");
    get_page(s, 1);
    put(s, RST_STREAM, 0, 1, "\0\0\0", 3);
    want_stream_error(s, CODE(FRAME_SIZE_ERROR));

    CHECK("6.5", 1, "Sends a SETTINGS frame with ACK flag and payload");
    put(s, SETTINGS, ACK, 0, "\0", 1);
    want_connection_error(s, CODE(FRAME_SIZE_ERROR));
    CHECK("6.5", 2, "Sends a SETTINGS frame with a stream identifier other than 0x0");
    put(s, SETTINGS, 0, 1, "\0\3\0\0\0\x64", 6);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.5", 3, "Sends a SETTINGS frame with a length other than a multiple of 6 octets");
    put(s, SETTINGS, 0, 0, "\0\3\0", 3);
    want_stream_error(s, CODE(PROTOCOL_ERROR) | CODE(FRAME_SIZE_ERROR));
    CHECK("6.5.2", 1, "SETTINGS_ENABLE_PUSH (0x2): Sends the value other than 0 or 1");
    put_settings(s, 2, 2);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.5.2", 2,
          "SETTINGS_INITIAL_WINDOW_SIZE (0x4): Sends the value above the maximum flow control "
          "window size");
    put_settings(s, 4, 0x80000000);
    want_connection_error(s, CODE(FLOW_CONTROL_ERROR));
    CHECK("6.5.2", 3, "SETTINGS_MAX_FRAME_SIZE (0x5): Sends the value below the initial value");
    put_settings(s, 5, 16383);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.5.2", 4,
          "SETTINGS_MAX_FRAME_SIZE (0x5): Sends the value above the maximum allowed frame size");
    put_settings(s, 5, 16777216);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.5.2", 5, "Sends a SETTINGS frame with unknown identifier");
    put_settings(s, 0xff, 1);
    ping_pong(s);
    CHECK("6.5.3", 1, "Sends multiple values of SETTINGS_INITIAL_WINDOW_SIZE");
    put(s, SETTINGS, 0, 0, "\0\4\0\0\0\x64\0\4\0\0\0\1", 12);
    get_page(s, 1);
    want_data_of(s, 1);
    CHECK("6.5.3", 2, "Sends a SETTINGS frame without ACK flag");
    put_settings(s, 2, 0);
    want_settings(s, true);

    CHECK("6.7", 1, "Sends a PING frame");
    ping_pong(s);
    CHECK("6.7", 2, "Sends a PING frame with ACK");
    put(s, PING, ACK, 0, "invalid\0", 8);
    ping_pong(s);
    CHECK("6.7", 3, "Sends a PING frame with a stream identifier field value other than 0x0");
    put(s, PING, 0, 1, "\0\0\0\0\0\0\0\0", 8);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.7", 4, "Sends a PING frame with a length field value other than 8");
    put(s, PING, 0, 0, "\0\0\0\0\0\0", 6);
    want_connection_error(s, CODE(FRAME_SIZE_ERROR));
    CHECK("6.8", 1, "Sends a GOAWAY frame with a stream identifier other than 0x0");
    put(s, GOAWAY, 0, 1, "\0\0\0\0\0\0\0\0", 8);
    want_connection_error(s, CODE(PROTOCOL_ERROR));

    CHECK("6.9", 1, "Sends a WINDOW_UPDATE frame with a flow control window increment of 0");
    put_window(s, 0, 0);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.9", 2,
          "Sends a WINDOW_UPDATE frame with a flow control window increment of 0 on a stream");
    post_begins(s, 1);
    put_window(s, 1, 0);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.9", 3, "Sends a WINDOW_UPDATE frame with a length other than 4 octets");
    put(s, WINDOW_UPDATE, 0, 0, "\0\0\1", 3);
    want_connection_error(s, CODE(FRAME_SIZE_ERROR));
    CHECK("6.9.1", 1,
          "Sends SETTINGS frame to set the initial window size to 1 and sends HEADERS frame");
    put_settings(s, 4, 1);
    get_page(s, 1);
    want_data_of(s, 1);
    CHECK("6.9.1", 2,
          "Sends multiple WINDOW_UPDATE frames increasing the flow control window to above 2^31-1");
    put_window(s, 0, 0x7fffffff);
    put_window(s, 0, 0x7fffffff);
    if (want(s, &f, GOAWAY) && code_of(&f) != FLOW_CONTROL_ERROR)
        fail(s, "GOAWAY with code %u", code_of(&f));
    CHECK("6.9.1", 3,
          "Sends multiple WINDOW_UPDATE frames increasing the flow control window to above 2^31-1 "
          "on a stream");
    post_begins(s, 1);
    put_window(s, 1, 0x7fffffff);
    put_window(s, 1, 0x7fffffff);
    if (want(s, &f, RST_STREAM) && (code_of(&f) != FLOW_CONTROL_ERROR || f.stream != 1))
        fail(s, "RST_STREAM of %u with code %u", f.stream, code_of(&f));
    CHECK("6.9.2", 1, "Changes SETTINGS_INITIAL_WINDOW_SIZE after sending HEADERS frame");
    put_settings(s, 4, 0);
    get_page(s, 1);
    put_settings(s, 4, 1);
    want_data_of(s, 1);
    CHECK("6.9.2", 2, "Sends a SETTINGS frame for window size to be negative");
    put_settings(s, 4, 3);
    get_page(s, 1);
    want_data_of(s, 3);
    put_settings(s, 4, 2); /* -1 */
    put_window(s, 1, 2);
    want_data_of(s, 1);
    CHECK(
        "6.9.2", 3,
        "Sends a SETTINGS_INITIAL_WINDOW_SIZE settings with an exceeded maximum window size value");
    put_settings(s, 4, 0x80000000);
    want_connection_error(s, CODE(FLOW_CONTROL_ERROR));

    CHECK("6.10", 1, "Sends multiple CONTINUATION frames preceded by a HEADERS frame");
    request(s, "GET");
    put_headers(s, 1, END_STREAM);
    dummy(s);
    put(s, CONTINUATION, 0, 1, s->block, s->length);
    put(s, CONTINUATION, END_HEADERS, 1, s->block, s->length);
    want_headers(s, 1);
    CHECK("6.10", 2, "Sends a CONTINUATION frame followed by any frame other than CONTINUATION");
    request(s, "POST");
    put_headers(s, 1, 0);
    dummy(s);
    put(s, CONTINUATION, 0, 1, s->block, s->length);
    put(s, DATA, END_STREAM, 1, "test", 4);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.10", 3, "Sends a CONTINUATION frame with 0x0 stream identifier");
    request(s, "GET");
    put_headers(s, 1, END_STREAM);
    dummy(s);
    put(s, CONTINUATION, END_HEADERS, 0, s->block, s->length);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.10", 4,
          "Sends a CONTINUATION frame preceded by a HEADERS frame with END_HEADERS flag");
    get_page(s, 1);
    dummy(s);
    put(s, CONTINUATION, END_HEADERS, 1, s->block, s->length);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.10", 5,
          "Sends a CONTINUATION frame preceded by a CONTINUATION frame with END_HEADERS flag");
    request(s, "GET");
    put_headers(s, 1, END_STREAM);
    dummy(s);
    put(s, CONTINUATION, END_HEADERS, 1, s->block, s->length);
    put(s, CONTINUATION, END_HEADERS, 1, s->block, s->length);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    CHECK("6.10", 6, "Sends a CONTINUATION frame preceded by a DATA frame");
    request(s, "POST");
    put_headers(s, 1, 0);
    put(s, DATA, END_STREAM, 1, "test", 4);
    dummy(s);
    put(s, CONTINUATION, END_HEADERS, 1, s->block, s->length);
    want_connection_error(s, CODE(PROTOCOL_ERROR));

    CHECK("7", 1, "Sends a GOAWAY frame with unknown error code");
    put(s, GOAWAY, 0, 0, "\0\0\0\0\0\0\0\xff", 8);
    ping_pong_or_close(s);
    CHECK("7", 2, "Sends a RST_STREAM frame with unknown error code");
    post_begins(s, 1);
    put_reset(s, 1, 0xff);
    ping_pong_or_close(s);
    end_check(s);
}

/* ---- http2: section 8 ---- */

static void malformed(suite *s, const char *section, int number, const char *text, const char *name,
                      const char *value)
{
    CHECK(section, number, text);
    request(s, "GET");
    field(s, name, value);
    put_headers(s, 1, END_STREAM | END_HEADERS);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
}

static void omitted(suite *s, int number, const char *text, const char *name)
{
    static const char *const names[] = {":method", ":scheme", ":path", ":authority"};
    const char *const values[] = {"GET", s->tls ? "https" : "http", PATH, "127.0.0.1"};
    CHECK("8.1.2.3", number, text);
    s->length = 0;
    for (int i = 0; i < 4; i++)
        if (strcmp(names[i], name) != 0)
            field(s, names[i], values[i]);
    put_headers(s, 1, END_STREAM | END_HEADERS);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
}

static void messages(suite *s)
{
    s->group = "http2";
    CHECK("8.1", 1, "Sends a second HEADERS frame without the END_STREAM flag");
    post_begins(s, 1);
    put(s, DATA, 0, 1, "test", 4);
    s->length = 0;
    field(s, "x-test", "ok");
    put_headers(s, 1, END_HEADERS);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
    malformed(s, "8.1.2", 1,
              "Sends a HEADERS frame that contains the header field name in uppercase letters",
              "X-TEST", "ok");
    malformed(s, "8.1.2.1", 1, "Sends a HEADERS frame that contains a unknown pseudo-header field",
              ":test", "ok");
    malformed(s, "8.1.2.1", 2,
              "Sends a HEADERS frame that contains the pseudo-header field defined for response",
              ":status", "200");
    CHECK("8.1.2.1", 3, "Sends a HEADERS frame that contains a pseudo-header field as trailers");
    post_begins(s, 1);
    put(s, DATA, 0, 1, "test", 4);
    s->length = 0;
    field(s, ":method", "POST");
    put_headers(s, 1, END_STREAM | END_HEADERS);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
    CHECK("8.1.2.1", 4,
          "Sends a HEADERS frame that contains a pseudo-header field that appears in a header "
          "block after a regular header field");
    s->length = 0;
    field(s, "x-test", "ok");
    s->length += wire_request(s->block + s->length, "GET", PATH, s->tls);
    put_headers(s, 1, END_STREAM | END_HEADERS);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
    malformed(s, "8.1.2.2", 1,
              "Sends a HEADERS frame that contains the connection-specific header field",
              "connection", "keep-alive");
    malformed(s, "8.1.2.2", 2,
              "Sends a HEADERS frame that contains the TE header field with any value other than "
              "\"trailers\"",
              "te", "trailers, deflate");
    CHECK("8.1.2.3", 1, "Sends a HEADERS frame with empty \":path\" pseudo-header field");
    s->length = wire_request(s->block, "GET", "", s->tls);
    put_headers(s, 1, END_STREAM | END_HEADERS);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
    omitted(s, 2, "Sends a HEADERS frame that omits \":method\" pseudo-header field", ":method");
    omitted(s, 3, "Sends a HEADERS frame that omits \":scheme\" pseudo-header field", ":scheme");
    omitted(s, 4, "Sends a HEADERS frame that omits \":path\" pseudo-header field", ":path");
    malformed(s, "8.1.2.3", 5,
              "Sends a HEADERS frame with duplicated \":method\" pseudo-header field", ":method",
              "GET");
    malformed(s, "8.1.2.3", 6,
              "Sends a HEADERS frame with duplicated \":scheme\" pseudo-header field", ":scheme",
              s->tls ? "https" : "http");
    malformed(s, "8.1.2.3", 7,
              "Sends a HEADERS frame with duplicated \":path\" pseudo-header field", ":path", PATH);
    CHECK("8.1.2.6", 1,
          "Sends a HEADERS frame with the \"content-length\" header field which does not equal the "
          "DATA frame payload length");
    request(s, "POST");
    field(s, "content-length", "1");
    put_headers(s, 1, END_HEADERS);
    put(s, DATA, END_STREAM, 1, "test", 4);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
    CHECK("8.1.2.6", 2,
          "Sends a HEADERS frame with the \"content-length\" header field which does not equal the "
          "sum of the multiple DATA frames payload length");
    request(s, "POST");
    field(s, "content-length", "1");
    put_headers(s, 1, END_HEADERS);
    put(s, DATA, 0, 1, "test", 4);
    put(s, DATA, END_STREAM, 1, "test", 4);
    want_stream_error(s, CODE(PROTOCOL_ERROR));
    CHECK("8.2", 1, "Sends a PUSH_PROMISE frame");
    s->length = 0;
    bytes(s, "\0\0\0\3", 4);
    s->length += wire_request(s->block + 4, "GET", PATH, s->tls);
    put(s, PUSH_PROMISE, END_HEADERS, 1, s->block, s->length);
    want_connection_error(s, CODE(PROTOCOL_ERROR));
    end_check(s);
}

/* ---- hpack: RFC 7541 ---- */

static void undecodable(suite *s, const char *section, int number, const char *text,
                        const void *more, size_t length, bool at_start)
{
    CHECK(section, number, text);
    s->length = 0;
    if (at_start)
        bytes(s, more, length);
    s->length += wire_request(s->block + s->length, "GET", PATH, s->tls);
    if (!at_start)
        bytes(s, more, length);
    put_headers(s, 1, END_STREAM | END_HEADERS);
    want_connection_error(s, CODE(COMPRESSION_ERROR));
}

static void hpack(suite *s)
{
    s->group = "hpack";
    undecodable(s, "2.3.3", 1, "Sends a indexed header field representation with invalid index",
                "\xc6", 1, false);
    undecodable(s, "2.3.3", 2, "Sends a literal header field representation with invalid index",
                "\x7f\x07\0", 3, false);
    undecodable(s, "4.2", 1, "Sends a dynamic table size update at the end of header block", "\x21",
                1, false);
    undecodable(
        s, "5.2", 1,
        "Sends a Huffman-encoded string literal representation with padding longer than 7 bits",
        "\0\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff", 12, false);
    undecodable(s, "5.2", 2, "Sends a Huffman-encoded string literal representation padded by zero",
                "\0\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90", 11, false);
    undecodable(s, "5.2", 3,
                "Sends a Huffman-encoded string literal representation containing the EOS symbol",
                "\0\x85\xf2\xb2\x4a\x84\xff\x87\x49\x51\xff\xff\xff\xfa\x7f", 15, false);
    undecodable(s, "6.1", 1, "Sends a indexed header field representation with index 0", "\x80", 1,
                false);
    undecodable(
        s, "6.3", 1,
        "Sends a dynamic table size update larger than the value of SETTINGS_HEADER_TABLE_SIZE",
        "\x3f\xe2\x1f", 3, true);
    end_check(s);
}

/* Two clients that others wrote, if they are installed: not one request may fail. */
static void outside(suite *s)
{
    static const char *const commands[][2] = {
        {"h2load", "h2load -n 2000 -c 10 -m 20 %s://%s/health 2>&1 | grep -q ' 2000 succeeded, 0 "
                   "failed, 0 errored, 0 timeout'"},
        {"nghttp", "nghttp -n %s://%s" PATH " >/dev/null 2>&1"},
        {"nghttp", "nghttp -n --header-table-size=0 %s://%s" PATH " >/dev/null 2>&1"},
    };
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        char command[256];
        snprintf(command, sizeof command, "command -v %s >/dev/null", commands[i][0]);
        if (system(command) != 0) {
            printf("[SKIP] %s is not installed\n", commands[i][0]);
            s->waived_count++;
            continue;
        }
        snprintf(command, sizeof command, commands[i][1], s->tls ? "https" : "http", s->address);
        s->run_count++;
        if (system(command) != 0) {
            s->fail_count++;
            printf("[FAIL] %s\n", command);
        }
    }
}

int main(int argc, char **argv)
{
    static suite s;
    if (argc != 3) {
        fprintf(stderr, "usage: conformance PROGRAM MODEL\n");
        return 2;
    }
    wire_server server = wire_serve(argv[1], argv[2], NULL);
    for (int tls = 0; tls < 2; tls++) {
        s.tls = tls;
        s.address = tls ? server.tls : server.clear;
        uint32_t before = s.run_count;
        accepted(&s);
        streams(&s);
        frames(&s);
        messages(&s);
        hpack(&s);
        printf("%s: %u checks\n", tls ? "tls" : "h2c", s.run_count - before);
        outside(&s);
    }
    s.run_count++;
    if (!wire_stop(&server)) {
        s.fail_count++;
        puts("[FAIL] the server does not end well");
    }
    printf("[====] Synthesis: Tested: %u | Passing: %u | Failing: %u | Crashing: 0\n",
           s.run_count + s.waived_count, s.run_count - s.fail_count, s.fail_count);
    return s.fail_count != 0;
}
