/* replay_trace: recorded and generated sessions, as requests over runs of block ids.
 *
 * A request's prompt is a list of runs of consecutive block ids; a block stands for `block_tokens`
 * tokens that depend on nothing but (scope, id), so equal ids give equal text.
 *
 * Read are, found by content; a file may be packed as .xz:
 *
 *   Weka session: a JSON object a file, `requests` with `hash_ids` of 64-token blocks, sub-agents
 *   nested
 *
 *   its compact form: a session a line, `hash_ranges` [[first, last], …] in place of `hash_ids`
 *
 *   Mooncake: a request a line, `timestamp` in ms, 512-token blocks whose ids all requests share
 *
 * Limits: RP_TOKENS_MAX tokens a prompt, RP_LINE_MAX bytes a line or object, RP_NESTING_MAX
 * sub-agents deep. Every number is checked; an error names file and line. Thread: one. */
#pragma once
#include "engine/base/err.h"

#define RP_TOKENS_MAX (1u << 22)
#define RP_LINE_MAX ((size_t)256 << 20)
#define RP_NESTING_MAX 8
#define RP_REQUESTS_MAX (1u << 24)

typedef struct rp_run {
    uint64_t first;
    uint32_t count; /* blocks */
} rp_run;

typedef enum rp_stop { RP_STOP_OTHER, RP_STOP_END, RP_STOP_TOOL } rp_stop;

typedef struct rp_request {
    double at_s;      /* since the session's start */
    double took_s;    /* recorded time of the call, 0 if unknown */
    uint32_t in, out; /* tokens */
    size_t run_at;    /* into rp_trace.runs */
    uint32_t run_count;
    uint16_t agent;   /* 0 the main line; sub-agents count from 1 within the session */
    uint8_t stop;     /* rp_stop: what the answer ended with */
    bool tool_result; /* the prompt's end is the result of a tool */
} rp_request;

typedef struct rp_session {
    char name[48];
    uint64_t scope;                   /* ids of one scope mean the same text */
    uint32_t block_tokens;            /* 1: runs of tokens */
    uint32_t shared;                  /* tokens of tools and system prompt, 0 if unknown */
    double start_s;                   /* recorded or generated arrival, used when lanes are not */
    size_t request_at, request_count; /* into rp_trace.requests, in the order of at_s */
} rp_session;

typedef struct rp_trace {
    rp_session *sessions;
    rp_request *requests;
    rp_run *runs;
    size_t session_count, request_count, run_count;
    size_t session_room, request_room, run_room;
    uint64_t scopes;  /* handed out so far */
    uint64_t skipped; /* lines left out by `lenient` */
    size_t stream;    /* 1 + the session that Mooncake lines are added to, 0: none */
    bool open;        /* arrivals are recorded and lanes do not apply */
    bool lenient;     /* skip a malformed line and count it, do not fail */
} rp_trace;

void rp_trace_deinit(rp_trace *trace);
/* Adds a file's sessions. BASE_IO, BASE_FORMAT, BASE_TOO_LONG or BASE_NOMEM with "file:line: what".
 */
base_code rp_trace_read(rp_trace *trace, const char *path, base_err *err);
/* As rp_trace_read, one line of either JSONL form. `name` and `line` are for the error. */
base_code rp_trace_read_line(rp_trace *trace, const char *text, size_t length, const char *name,
                             uint32_t line, base_err *err);

/* Building blocks of readers and the generator. Requests and runs belong to the last session and
 * request added. */
rp_session *rp_trace_add_session(rp_trace *trace, const char *name, base_err *err);
rp_request *rp_trace_add_request(rp_trace *trace, base_err *err);
base_code rp_trace_add_run(rp_trace *trace, uint64_t first, uint32_t count, base_err *err);
/* Sorts the last session's requests by time. */
void rp_trace_close_session(rp_trace *trace);

/* Writes the first `count` tokens of a request's prompt and what follows it. Past its blocks stand
 * the tokens of the same agent's next request if that begins with the same blocks (so the answer is
 * what the client sends back), and then tokens that nobody else has. */
void rp_tokens(const rp_trace *trace, const rp_session *session, const rp_request *request,
               int32_t *out, uint32_t count);
