#include "gateway/ledger_completion.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "gateway/body.h"
#include "gateway/ledger_internal.h"
#include "gateway/ledger_stream.h"

#define ID_PREFIX "chatcmpl-"
#define ID_DIGITS 24
#define COLUMNS                                                                                    \
    "t.public, t.created_ms, t.status, t.finish, t.prompt_tokens, t.cached_tokens, "               \
    "t.output_tokens, t.reasoning_tokens, t.seed, t.echo, t.metadata, i.data, i.sum, s.told, "     \
    "t.response_key IS NOT NULL"
#define FROM                                                                                       \
    " FROM turns t LEFT JOIN nodes n ON n.id=t.node AND t.output_tokens>0 LEFT JOIN items i ON "   \
    "i.id=n.item LEFT JOIN streams s ON s.public_key=t.public_key AND s.turn=t.public"
#define STORED "t.tenant=?1 AND t.dialect='chat' AND t.echo IS NOT NULL"

bool gw_completion_turn(gw_id *out, const char *id)
{
    size_t prefix = strlen(ID_PREFIX);
    if (strncmp(id, ID_PREFIX, prefix) != 0 || strlen(id) != prefix + ID_DIGITS ||
        strspn(id + prefix, "0123456789abcdef") != ID_DIGITS)
        return false;
    snprintf(out->text, sizeof out->text, "turn_%s", id + prefix);
    return true;
}

static const char *column(sqlite3_stmt *s, int at, base_arena *arena)
{
    if (sqlite3_column_type(s, at) == SQLITE_NULL)
        return NULL;
    const void *text = sqlite3_column_text(s, at);
    return base_arena_copy(arena, text, (size_t)sqlite3_column_bytes(s, at));
}

static base_code read_row(gw_completion *out, sqlite3_stmt *s, base_arena *arena, base_err *err)
{
    *out = (gw_completion){
        .created_ms = sqlite3_column_int64(s, 1),
        .status = (gw_turn_status)sqlite3_column_int(s, 2),
        .finish = (eng_finish)sqlite3_column_int(s, 3),
        .usage = {.prompt_tokens = (uint32_t)sqlite3_column_int64(s, 4),
                  .cached_tokens = (uint32_t)sqlite3_column_int64(s, 5),
                  .output_tokens = (uint32_t)sqlite3_column_int64(s, 6),
                  .reasoning_tokens = (uint32_t)sqlite3_column_int64(s, 7)},
        .seed = (uint64_t)sqlite3_column_int64(s, 8),
        .echo = column(s, 9, arena),
        .metadata = column(s, 10, arena),
    };
    gw_id_set(&out->turn, (const char *)sqlite3_column_text(s, 0));
    if (sqlite3_column_type(s, 11) != SQLITE_NULL) {
        const void *data = sqlite3_column_text(s, 11);
        if (!gw_column_sum_fits(s, 12, gw_item_sum(data, (size_t)sqlite3_column_bytes(s, 11))))
            return base_fail(err, BASE_FORMAT, "the answer of turn %s is damaged", out->turn.text);
        char *answer = (char *)column(s, 11, arena);
        out->answer = answer ? gw_item_with_calls(answer, column(s, 13, arena), arena) : NULL;
    }
    return base_arena_failed(arena) ? base_fail(err, BASE_NOMEM, "no memory for a completion")
                                    : BASE_OK;
}

base_code gw_completion_read(gw_ledger *ledger, gw_completion *out, int64_t tenant,
                             const char *turn, base_arena *arena, base_err *err)
{
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    sqlite3_stmt *s = gw_db_prepare(c, "SELECT " COLUMNS FROM
                                       " WHERE t.public_key=?2 AND t.public=?3 AND " STORED);
    base_code code = BASE_OK;
    int step = SQLITE_ERROR;
    if (s) {
        sqlite3_bind_int64(s, 1, tenant);
        sqlite3_bind_int64(s, 2, gw_public_key(turn));
        gw_bind_text(s, 3, turn);
        step = sqlite3_step(s);
    }
    if (step == SQLITE_ROW)
        code = read_row(out, s, arena, err);
    else if (step == SQLITE_DONE)
        code = base_fail(err, BASE_NOT_FOUND, "there is no such completion");
    else
        code = gw_db_error(c, err, "cannot read a completion");
    sqlite3_finalize(s);
    gw_reader_give(ledger, c);
    return code;
}

static json_t *column_json(sqlite3_stmt *s, int at)
{
    const char *text = (const char *)sqlite3_column_text(s, at);
    json_t *json = NULL;
    if (text)
        gw_body_parse(&json, text, strlen(text), NULL);
    return json;
}

static bool fits(sqlite3_stmt *s, const gw_completion_query *query)
{
    bool fits = true;
    if (query->model) {
        json_t *echo = column_json(s, 9);
        const char *model = json_string_value(json_object_get(echo, "model"));
        fits = model && strcmp(model, query->model) == 0;
        json_decref(echo);
    }
    if (fits && json_object_size(query->metadata)) {
        json_t *metadata = column_json(s, 10), *value;
        const char *name;
        json_object_foreach((json_t *)query->metadata, name, value) fits &=
            json_equal(json_object_get(metadata, name), value) == 1;
        json_decref(metadata);
    }
    return fits;
}

static base_code find_after(gw_db *c, int64_t *created, int64_t *id, int64_t tenant,
                            const gw_completion_query *query, base_err *err)
{
    *created = *id = query->oldest_first ? INT64_MIN : INT64_MAX;
    if (!query->after[0])
        return BASE_OK;
    sqlite3_stmt *s = gw_db_prepare(c, "SELECT t.created_ms, t.id FROM turns t WHERE "
                                       "t.public_key=?2 AND t.public=?3 AND " STORED);
    if (!s)
        return gw_db_error(c, err, "cannot list completions");
    sqlite3_bind_int64(s, 1, tenant);
    sqlite3_bind_int64(s, 2, gw_public_key(query->after));
    gw_bind_text(s, 3, query->after);
    bool found = sqlite3_step(s) == SQLITE_ROW;
    if (found) {
        *created = sqlite3_column_int64(s, 0);
        *id = sqlite3_column_int64(s, 1);
    }
    sqlite3_finalize(s);
    return found ? BASE_OK : base_fail(err, BASE_NOT_FOUND, "there is no such completion");
}

base_code gw_completion_list(gw_ledger *ledger, gw_completion **out, uint32_t *count, bool *more,
                             int64_t tenant, const gw_completion_query *query, base_arena *arena,
                             base_err *err)
{
    static const char newest[] =
        "SELECT " COLUMNS FROM " WHERE " STORED " AND t.response_key IS NOT NULL AND "
        "(t.created_ms, t.id) < (?2, ?3) ORDER BY t.created_ms DESC, t.id DESC";
    static const char oldest[] = "SELECT " COLUMNS FROM " WHERE " STORED
                                 " AND t.response_key IS NOT NULL AND (t.created_ms, t.id) > "
                                 "(?2, ?3) ORDER BY t.created_ms, t.id";
    int64_t created, id;
    *count = 0;
    *more = false;
    *out = base_arena_calloc(arena, query->limit, sizeof **out);
    if (!*out)
        return base_fail(err, BASE_NOMEM, "no memory for a list");
    gw_db *c = gw_reader_take(ledger, err);
    if (!c)
        return err && err->code ? err->code : BASE_IO;
    base_code code = find_after(c, &created, &id, tenant, query, err);
    sqlite3_stmt *s = code ? NULL : gw_db_prepare(c, query->oldest_first ? oldest : newest);
    if (!code && !s)
        code = gw_db_error(c, err, "cannot list completions");
    if (s) {
        sqlite3_bind_int64(s, 1, tenant);
        sqlite3_bind_int64(s, 2, created);
        sqlite3_bind_int64(s, 3, id);
    }
    int step;
    while (!code && !*more && (step = sqlite3_step(s)) != SQLITE_DONE) {
        if (step != SQLITE_ROW) {
            code = gw_db_error(c, err, "cannot list completions");
        } else if (fits(s, query)) {
            *more = *count == query->limit;
            if (!*more)
                code = read_row(&(*out)[(*count)++], s, arena, err);
        }
    }
    sqlite3_finalize(s);
    gw_reader_give(ledger, c);
    return code;
}

typedef struct update {
    int64_t tenant;
    const char *turn, *metadata;
} update;

/* On the writer. */
static base_code run_update(gw_ledger *ledger, gw_db *c, void *ctx, base_err *err)
{
    const update *u = ctx;
    (void)ledger;
    sqlite3_stmt *s =
        gw_db_prepare(c, "UPDATE turns AS t SET metadata=?4 WHERE t.public_key=?2 AND t.public=?3 "
                         "AND t.response_key IS NOT NULL AND " STORED);
    if (!s)
        return gw_db_error(c, err, "cannot change a completion");
    sqlite3_bind_int64(s, 1, u->tenant);
    sqlite3_bind_int64(s, 2, gw_public_key(u->turn));
    gw_bind_text(s, 3, u->turn);
    gw_bind_text(s, 4, u->metadata);
    if (!gw_db_run(s))
        return gw_db_error(c, err, "cannot change a completion");
    return sqlite3_changes(c->db) ? BASE_OK
                                  : base_fail(err, BASE_NOT_FOUND, "there is no such completion");
}

base_code gw_completion_update(gw_ledger *ledger, int64_t tenant, const char *turn,
                               const char *metadata, base_err *err)
{
    update u = {tenant, turn, metadata};
    return gw_on_writer(ledger, run_update, &u, err);
}
