/* Reading turns and items back, and forgetting them. */
#include "gateway/ledger_internal.h"

#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/num.h"
#include "gateway/ledger_stream.h"

#define CHAIN_MAX 100000 /* turns of one prompt, against a loop in a damaged file */

/* One turn's own part of a prompt, on the way up. */
typedef struct piece {
    struct piece *below;
    int32_t *prompt, *run;
    uint32_t prompt_count, run_count, base;
} piece;

/* A turn without output has no run. */
static bool run_fits(sqlite3_stmt *s, int column, const piece *p)
{
    gw_digest digest, wanted;
    if (sqlite3_column_type(s, column) == SQLITE_NULL)
        return !p->run_count;
    gw_hash hash = gw_hash_open();
    gw_tokens_digest(&hash, &wanted, p->run, p->run_count);
    bool fits =
        !hash.failed && gw_column_digest(s, column, &digest) && gw_digest_equal(&digest, &wanted);
    gw_hash_close(&hash);
    return fits;
}

base_code gw_turn_tokens(gw_db *c, gw_turn_row *out, int64_t row, base_arena *arena, base_err *err)
{
    piece *top = NULL;
    size_t total = 0;
    uint32_t depth = 0;
    for (int64_t at = row; at;) {
        sqlite3_stmt *s = gw_db_statement(c, GW_SQL_TURN_UP);
        piece *p = base_arena_calloc(arena, 1, sizeof(*p));
        if (!p)
            return base_fail(err, BASE_NOMEM, "no memory for a turn");
        if (!s)
            return gw_db_error(c, err, "cannot read a turn");
        sqlite3_bind_int64(s, 1, at);
        int code = sqlite3_step(s);
        bool good = code == SQLITE_ROW && ++depth < CHAIN_MAX;
        int64_t parent = 0;
        if (good) {
            void *prompt, *run;
            parent = sqlite3_column_int64(s, 0);
            p->base = (uint32_t)sqlite3_column_int64(s, 1);
            good = gw_column_numbers(s, 2, &prompt, &p->prompt_count, arena) &&
                   gw_column_numbers(s, 3, &run, &p->run_count, arena);
            p->prompt = good ? prompt : NULL;
            p->run = good ? run : NULL;
            good = good && gw_column_turn_fits(s, 2, 5, 6, 7) && run_fits(s, 8, p);
            /* The run begins with tokens that the prompt ends with. */
            uint32_t lead =
                (uint32_t)base_min((size_t)sqlite3_column_int64(s, 4), good ? p->run_count : 0);
            p->run += lead;
            p->run_count -= good ? lead : p->run_count;
        }
        sqlite3_reset(s);
        if (!good)
            return base_fail(err, BASE_FORMAT, "the tokens of turn row %lld are damaged",
                             (long long)at);
        p->below = top;
        top = p;
        total += (size_t)p->prompt_count + p->run_count;
        at = p->base ? parent : 0;
    }
    out->prompt = base_arena_alloc(arena, base_max(total * sizeof(*out->prompt), 1));
    if (!out->prompt)
        return base_fail(err, BASE_NOMEM, "no memory for a turn");
    for (piece *p = top; p; p = p->below) {
        if (p->base != out->prompt_count)
            return base_fail(err, BASE_FORMAT,
                             "the tokens of turn row %lld do not follow their parent's",
                             (long long)row);
        memcpy(out->prompt + out->prompt_count, p->prompt, p->prompt_count * sizeof(*p->prompt));
        out->prompt_count += p->prompt_count;
        out->run = out->prompt + out->prompt_count;
        out->run_count = p->run_count;
        memcpy(out->run, p->run, p->run_count * sizeof(*p->run));
        out->prompt_count += p->below ? p->run_count : 0;
    }
    return BASE_OK;
}

/* An item's JSON, its sum in the next column. NULL without memory; *good: it fits its sum. */
static char *column_item(sqlite3_stmt *s, int column, base_arena *arena, bool *good)
{
    const void *data = sqlite3_column_text(s, column);
    size_t length = (size_t)sqlite3_column_bytes(s, column);
    *good = gw_column_sum_fits(s, column + 1, gw_item_sum(data, length));
    return *good ? base_arena_copy(arena, data, length) : NULL;
}

static gw_miss miss_of(const char *name)
{
    for (gw_miss miss = GW_MISS_NEW; name && miss < GW_MISS_COUNT; miss++)
        if (strcmp(gw_miss_name(miss), name) == 0)
            return miss;
    return GW_MISS_NONE;
}

static base_code read_turn(gw_db *c, gw_turn_row *out, int64_t tenant, const char *turn,
                           base_arena *arena, base_err *err)
{
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_TURN_READ);
    if (!s)
        return gw_db_error(c, err, "cannot read a turn");
    sqlite3_bind_int64(s, 1, gw_public_key(turn));
    gw_bind_text(s, 2, turn);
    sqlite3_bind_int64(s, 3, tenant);
    int code = sqlite3_step(s);
    if (code != SQLITE_ROW) {
        sqlite3_reset(s);
        return code == SQLITE_DONE ? base_fail(err, BASE_NOT_FOUND, "there is no such turn")
                                   : gw_db_error(c, err, "cannot read a turn");
    }
    int64_t row = sqlite3_column_int64(s, 0), node = sqlite3_column_int64(s, 22);
    gw_id_set(&out->turn, (const char *)sqlite3_column_text(s, 1));
    gw_id_set(&out->session, (const char *)sqlite3_column_text(s, 2));
    gw_id_set(&out->parent, (const char *)sqlite3_column_text(s, 3));
    out->status = (gw_turn_status)sqlite3_column_int(s, 4);
    out->finish = (eng_finish)sqlite3_column_int(s, 5);
    out->retention = (gw_retention)sqlite3_column_int(s, 6);
    void *steps = NULL;
    bool good = gw_column_numbers(s, 7, &steps, &out->step_count, arena);
    out->steps = steps;
    out->seed = (uint64_t)sqlite3_column_int64(s, 8);
    uint32_t *counts[] = {&out->usage.prompt_tokens,    &out->usage.cached_tokens,
                          &out->usage.restored_tokens,  &out->usage.output_tokens,
                          &out->usage.reasoning_tokens, &out->usage.drafted,
                          &out->usage.accepted,         &out->usage.steps};
    for (int i = 0; i < 8; i++)
        *counts[i] = (uint32_t)sqlite3_column_int64(s, 9 + i);
    out->usage.queue_ns = (uint64_t)sqlite3_column_int64(s, 17) * 1000;
    out->usage.prefill_ns = (uint64_t)sqlite3_column_int64(s, 18) * 1000;
    out->usage.ttft_ns = (uint64_t)sqlite3_column_int64(s, 19) * 1000;
    out->usage.decode_ns = (uint64_t)sqlite3_column_int64(s, 20) * 1000;
    out->created_ms = sqlite3_column_int64(s, 21);
    out->ended_ms = sqlite3_column_int64(s, 23);
    if (sqlite3_column_type(s, 24) == SQLITE_TEXT)
        out->echo =
            base_arena_copy(arena, sqlite3_column_text(s, 24), (size_t)sqlite3_column_bytes(s, 24));
    out->cache.miss = miss_of((const char *)sqlite3_column_text(s, 25));
    out->cache.lost = (uint32_t)sqlite3_column_int64(s, 26);
    out->cache.diff_item =
        sqlite3_column_type(s, 27) == SQLITE_NULL ? -1 : sqlite3_column_int(s, 27);
    out->cache.diff_token = (uint32_t)sqlite3_column_int64(s, 28);
    if (sqlite3_column_type(s, 29) == SQLITE_TEXT)
        out->dialect =
            base_arena_copy(arena, sqlite3_column_text(s, 29), (size_t)sqlite3_column_bytes(s, 29));
    sqlite3_reset(s);
    if (!good)
        return base_fail(err, BASE_FORMAT, "the steps of turn row %lld are damaged",
                         (long long)row);
    if (out->retention == GW_RETAIN_USAGE)
        return BASE_OK;
    if (node && out->usage.output_tokens) {
        s = gw_db_statement(c, GW_SQL_ANSWER);
        if (!s)
            return gw_db_error(c, err, "cannot read an answer");
        sqlite3_bind_int64(s, 1, node);
        if (sqlite3_step(s) == SQLITE_ROW)
            out->answer = column_item(s, 0, arena, &good);
        sqlite3_reset(s);
        if (!good)
            return base_fail(err, BASE_FORMAT, "the answer of turn row %lld is damaged",
                             (long long)row);
    }
    return gw_turn_tokens(c, out, row, arena, err);
}

base_code gw_ledger_turn(gw_ledger *ledger, gw_turn_row *out, int64_t tenant, const char *turn,
                         base_arena *arena, base_err *err)
{
    memset(out, 0, sizeof(*out));
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = read_turn(c, out, tenant, turn, arena, err);
    gw_reader_give(ledger, c);
    return code;
}

static base_code read_items(gw_db *c, char ***out, uint32_t *count, int64_t node, base_arena *arena,
                            base_err *err)
{
    char **list = NULL;
    uint32_t capacity = 0;
    for (int64_t at = node; at;) {
        sqlite3_stmt *s = gw_db_statement(c, GW_SQL_ITEM_UP);
        if (!s)
            return gw_db_error(c, err, "cannot read items");
        sqlite3_bind_int64(s, 1, at);
        if (sqlite3_step(s) != SQLITE_ROW || *count >= CHAIN_MAX) {
            sqlite3_reset(s);
            return base_fail(err, BASE_FORMAT, "the items of node row %lld are damaged",
                             (long long)node);
        }
        at = sqlite3_column_int64(s, 0);
        char *data = NULL;
        bool item = sqlite3_column_int(s, 1) >= 0; /* the root is none */
        bool good = true;
        if (item)
            data = column_item(s, 2, arena, &good);
        sqlite3_reset(s);
        if (!good)
            return base_fail(err, BASE_FORMAT, "an item above node row %lld is damaged",
                             (long long)node);
        if (item && *count == capacity) {
            uint32_t wanted = capacity ? capacity * 2 : 64;
            char **more = base_arena_alloc(arena, wanted * sizeof(*more));
            if (more && *count)
                memcpy(more, list, *count * sizeof(*more));
            list = more;
            capacity = wanted;
        }
        if (item && (!list || !data))
            return base_fail(err, BASE_NOMEM, "no memory for the items of a turn");
        if (item)
            list[(*count)++] = data;
    }
    for (uint32_t i = 0; i < *count / 2; i++) {
        char *data = list[i];
        list[i] = list[*count - 1 - i];
        list[*count - 1 - i] = data;
    }
    *out = list;
    return BASE_OK;
}

base_code gw_ledger_items(gw_ledger *ledger, char ***out, uint32_t *count, int64_t tenant,
                          const char *turn, base_arena *arena, base_err *err)
{
    *out = NULL;
    *count = 0;
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    int64_t node = 0;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_TURN_NODE);
    if (s) {
        sqlite3_bind_int64(s, 1, gw_public_key(turn));
        gw_bind_text(s, 2, turn);
        sqlite3_bind_int64(s, 3, tenant);
    }
    base_code code = !gw_db_scalar(s, &node) ? gw_db_error(c, err, "cannot read a turn")
                     : !node ? base_fail(err, BASE_NOT_FOUND, "there is no such turn")
                             : read_items(c, out, count, node, arena, err);
    gw_reader_give(ledger, c);
    gw_stream_row stream = {0};
    if (!code && *count && !gw_stream_read(ledger, &stream, tenant, turn, arena, NULL))
        (*out)[*count - 1] = gw_item_with_calls((*out)[*count - 1], stream.told, arena);
    return code;
}
