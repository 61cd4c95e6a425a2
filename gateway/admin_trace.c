/* Turns as a trace in the forms that whimbrel-replay reads, see tools/replay_trace.h: a session a
 * line with runs of 64-token blocks (Weka's compact form), or a request a line with 512-token
 * blocks (Mooncake). A block's id stands for its tokens and all before them in its namespace; ids
 * count up as blocks appear, so that nothing of a text can be told from them. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/num.h"
#include "gateway/admin_usage.h"
#include "gateway/dialect.h"
#include "gateway/ledger_admin.h"

#define TURNS_DEFAULT 10000
#define TURNS_MAX 100000
#define BYTES_MAX (256u << 20) /* of a trace */
#define BLOCKS_MAX (1u << 22)  /* distinct ones, 64 MB of table */
#define WEKA_TOKENS 64
#define MOONCAKE_TOKENS 512

/* Hash of a block's path to its id; open addressing, at most half full. */
typedef struct blocks {
    struct {
        XXH128_hash_t key;
        uint32_t id; /* 0: free */
    } * slots;
    uint32_t mask, count;
} blocks;

static bool grow(blocks *b)
{
    uint32_t size = b->slots ? (b->mask + 1) * 2 : 1024;
    blocks more = {.slots = calloc(size, sizeof *more.slots), .mask = size - 1, .count = b->count};
    if (!more.slots)
        return false;
    for (uint32_t i = 0; b->slots && i <= b->mask; i++) {
        uint32_t at = (uint32_t)b->slots[i].key.low64 & more.mask;
        while (b->slots[i].id && more.slots[at].id)
            at = (at + 1) & more.mask;
        if (b->slots[i].id)
            more.slots[at] = b->slots[i];
    }
    free(b->slots);
    *b = more;
    return true;
}

/* From 1 on; 0 without memory, or past BLOCKS_MAX. `*fresh`: nobody had it before. */
static uint32_t id_of(blocks *b, XXH128_hash_t key, bool *fresh)
{
    *fresh = false;
    if (b->count >= BLOCKS_MAX || ((!b->slots || b->count * 2 > b->mask) && !grow(b)))
        return 0;
    uint32_t at = (uint32_t)key.low64 & b->mask;
    for (; b->slots[at].id; at = (at + 1) & b->mask)
        if (XXH128_isEqual(b->slots[at].key, key))
            return b->slots[at].id;
    *fresh = true;
    b->slots[at].key = key;
    return b->slots[at].id = ++b->count;
}

typedef struct trace {
    gw_admin_call *call;
    blocks blocks;
    bool mooncake, contents;
    int64_t session_row, start_ms; /* of the session, or of all */
    uint32_t in_line;              /* requests of the line so far */
} trace;

static base_code too_much(base_err *err)
{
    return base_fail(err, BASE_FULL,
                     "this trace is too long for one answer: ask for a session, a tenant, or a "
                     "lower limit");
}

/* The ids of a prompt's blocks: whole ones, and with Mooncake the rest as one more. `*known`:
 * tokens of the first blocks that came before. */
static base_code put_blocks(trace *t, const gw_trace_turn *turn, const int32_t *tokens,
                            uint32_t count, uint32_t *known, base_err *err)
{
    base_buf *out = &t->call->out;
    uint32_t size = t->mooncake ? MOONCAKE_TOKENS : WEKA_TOKENS, first = 0, last = 0;
    uint64_t chain[2] = {turn->space, size};
    bool all_known = true, any = false;
    *known = 0;
    for (uint32_t at = 0; at < count && (t->mooncake || count - at >= size); at += size) {
        uint32_t length = (uint32_t)base_min(size, count - at);
        bool fresh;
        XXH128_hash_t key = XXH3_128bits_withSeed(tokens + at, length * sizeof *tokens,
                                                  chain[0] ^ (chain[1] * 0x9E3779B97F4A7C15u));
        chain[0] = key.low64;
        chain[1] = key.high64;
        uint32_t id = id_of(&t->blocks, key, &fresh);
        if (!id)
            return too_much(err);
        all_known &= !fresh;
        *known += all_known ? length : 0;
        if (t->mooncake) {
            base_buf_printf(out, at ? ",%u" : "%u", id);
        } else if (last && id == last + 1) {
            last = id;
        } else {
            if (last)
                base_buf_printf(out, "%s[%u,%u]", any ? "," : "", first, last);
            any |= last != 0;
            first = last = id;
        }
    }
    if (!t->mooncake && last)
        base_buf_printf(out, "%s[%u,%u]", any ? "," : "", first, last);
    return BASE_OK;
}

static base_code put_text(trace *t, const int32_t *tokens, uint32_t count, base_err *err)
{
    base_buf text;
    base_buf_init(&text, BYTES_MAX);
    base_code code = eng_detokenize(t->call->app->engine, &text, tokens, count, err);
    base_buf_puts(&t->call->out, ",\"text\":");
    base_buf_json_text(&t->call->out, text.data ? text.data : "", text.length);
    t->call->out.failed |= text.failed;
    base_buf_deinit(&text);
    return code;
}

static base_code put_mooncake(trace *t, const gw_trace_turn *turn, const gw_turn_row *row,
                              base_err *err)
{
    uint32_t known;
    base_buf_printf(&t->call->out,
                    "{\"timestamp\":%lld,\"input_length\":%u,\"output_length\":%u,\"hash_ids\":[",
                    (long long)(turn->created_ms - t->start_ms), row->prompt_count,
                    turn->output_tokens);
    GW_TRY(put_blocks(t, turn, row->prompt, row->prompt_count, &known, err));
    base_buf_puts(&t->call->out, "]}\n");
    return BASE_OK;
}

static base_code put_weka(trace *t, const gw_trace_turn *turn, const gw_turn_row *row,
                          base_err *err)
{
    uint32_t known;
    base_buf *out = &t->call->out;
    const char *stop = turn->finish == ENG_FINISH_CALLS  ? "tool_use"
                       : turn->finish == ENG_FINISH_STOP ? "end_turn"
                                                         : "other";
    base_buf_printf(out,
                    "%s{\"t\":%.3f,\"in\":%u,\"out\":%u,\"api_time\":%.3f,\"stop\":\"%s\","
                    "\"input_types\":[\"%s\"],\"hash_ranges\":[",
                    t->in_line++ ? "," : "", (double)(turn->created_ms - t->start_ms) * 1e-3,
                    row->prompt_count, turn->output_tokens,
                    (double)(turn->ended_ms - turn->created_ms) * 1e-3, stop,
                    turn->gives_result ? "tool_result" : "text");
    GW_TRY(put_blocks(t, turn, row->prompt, row->prompt_count, &known, err));
    base_buf_puts(out, "]");
    if (t->contents)
        GW_TRY(put_text(t, row->prompt + known, row->prompt_count - known, err));
    base_buf_puts(out, "}");
    return BASE_OK;
}

static void begin_line(trace *t, const gw_trace_turn *turn)
{
    if (t->in_line)
        base_buf_puts(&t->call->out, "]}\n");
    t->session_row = turn->session_row;
    t->start_ms = turn->created_ms;
    t->in_line = 0;
    base_buf_printf(&t->call->out,
                    "{\"id\":\"%s\",\"block_size\":%d,\"hash_id_scope\":\"global\",\"requests\":[",
                    turn->session.text, WEKA_TOKENS);
}

static base_code put_turn(trace *t, const gw_trace_turn *turn, base_err *err)
{
    gw_turn_row row;
    base_arena *arena = base_arena_create(4096, 64u << 20);
    base_code code = arena ? gw_ledger_turn(t->call->app->ledger, &row, turn->tenant,
                                            turn->turn.text, arena, err)
                           : base_fail(err, BASE_NOMEM, "no memory for a turn");
    if (!code && !t->mooncake && turn->session_row != t->session_row)
        begin_line(t, turn);
    if (!code)
        code = (t->mooncake ? put_mooncake : put_weka)(t, turn, &row, err);
    base_arena_destroy(arena);
    if (!code && (t->call->out.failed || t->call->out.length > BYTES_MAX))
        return too_much(err);
    return code;
}

static base_code read_flag(bool *out, gw_admin_call *call, const char *name, const char *yes,
                           const char *no, base_err *err)
{
    const char *text;
    GW_TRY(gw_query_text(&text, call->query, name, call->arena, err));
    *out = text && strcmp(text, yes) == 0;
    return !text || *out || strcmp(text, no) == 0
               ? BASE_OK
               : base_fail_param(err, BASE_INVALID, name, "%s must be %s or %s", name, no, yes);
}

static base_code run(gw_admin_call *call, base_err *err)
{
    trace t = {.call = call};
    int64_t limit;
    uint32_t count;
    const char *session, *tenant;
    gw_identity identity = {0};
    gw_session_view view;
    gw_trace_turn *turns;
    GW_TRY(read_flag(&t.mooncake, call, "format", "mooncake", "weka", err));
    GW_TRY(read_flag(&t.contents, call, "contents", "true", "false", err));
    GW_TRY(gw_query_int(&limit, call->query, "limit", 1, TURNS_MAX, TURNS_DEFAULT, err));
    GW_TRY(gw_query_text(&session, call->query, "session", call->arena, err));
    GW_TRY(gw_query_text(&tenant, call->query, "tenant", call->arena, err));
    if (tenant && !gw_tenants_named(call->app->tenants, &identity, tenant))
        return base_fail_param(err, BASE_NOT_FOUND, "tenant", "there is no such tenant");
    if (session)
        GW_TRY(gw_admin_session_read(call->app->ledger, &view, session, call->arena, err));
    GW_TRY(gw_admin_trace_list(call->app->ledger, &turns, &count, identity.tenant, session,
                               t.mooncake, (uint32_t)limit, call->arena, err));
    call->type = "application/x-ndjson";
    t.start_ms = count ? turns[0].created_ms : 0;
    base_code code = BASE_OK;
    for (uint32_t i = 0; i < count && !code; i++)
        code = put_turn(&t, &turns[i], err);
    if (t.in_line)
        base_buf_puts(&call->out, "]}\n");
    free(t.blocks.slots);
    return code;
}

void gw_admin_trace(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, run);
}
