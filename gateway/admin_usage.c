#include "gateway/admin_usage.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gateway/dialect.h"
#include "gateway/ledger_admin.h"

#define ROWS_DEFAULT 1000
#define ROWS_MAX 10000
#define DAY_MAX 3000000 /* since 1970: past every calendar that matters */

static const struct {
    const char *name;
    size_t offset;
    uint64_t scale; /* to the unit of the name */
} columns[] = {
    {"turns", offsetof(gw_sums, turns), 1},
    {"cancelled", offsetof(gw_sums, cancelled), 1},
    {"failed", offsetof(gw_sums, failed), 1},
    {"prompt_tokens", offsetof(gw_sums, prompt_tokens), 1},
    {"cached_tokens", offsetof(gw_sums, cached_tokens), 1},
    {"restored_tokens", offsetof(gw_sums, restored_tokens), 1},
    {"output_tokens", offsetof(gw_sums, output_tokens), 1},
    {"reasoning_tokens", offsetof(gw_sums, reasoning_tokens), 1},
    {"drafted_tokens", offsetof(gw_sums, drafted), 1},
    {"accepted_tokens", offsetof(gw_sums, accepted), 1},
    {"queue_ns", offsetof(gw_sums, queue_us), 1000},
    {"prefill_ns", offsetof(gw_sums, prefill_us), 1000},
    {"decode_ns", offsetof(gw_sums, decode_us), 1000},
    {"lost_tokens", offsetof(gw_sums, lost_tokens), 1},
};
#define COLUMNS (sizeof columns / sizeof *columns)

static uint64_t column(const gw_sums *sums, size_t index)
{
    uint64_t value;
    memcpy(&value, (const char *)sums + columns[index].offset, sizeof value);
    return value * columns[index].scale;
}

/* Cached tokens times the mean prefill time of an uncached one. */
static double saved_seconds(const gw_sums *s)
{
    uint64_t uncached = s->prompt_tokens - s->cached_tokens;
    return uncached ? (double)s->cached_tokens * (double)s->prefill_us * 1e-6 / (double)uncached
                    : 0;
}

/* ---- days ---- */

static void put_day(char out[16], int64_t day)
{
    struct tm tm;
    time_t at = (time_t)(day * 86400);
    if (!gmtime_r(&at, &tm) || !strftime(out, 16, "%Y-%m-%d", &tm))
        snprintf(out, 16, "-");
}

/* `fallback` if it is absent. */
static base_code read_day(int64_t *out, gw_admin_call *call, const char *name, int64_t fallback,
                          base_err *err)
{
    const char *text;
    struct tm tm = {0};
    char again[16];
    *out = fallback;
    GW_TRY(gw_query_text(&text, call->query, name, call->arena, err));
    if (!text)
        return BASE_OK;
    const char *end = strptime(text, "%Y-%m-%d", &tm);
    time_t at = end && !*end ? timegm(&tm) : -1;
    if (at >= 0)
        put_day(again, at / 86400);
    if (at < 0 || strcmp(again, text) != 0) /* 31 February, or without its zeros */
        return base_fail_param(err, BASE_INVALID, name, "%s must be a day as 2026-01-31", name);
    *out = at / 86400;
    return BASE_OK;
}

/* ---- the report ---- */

static base_code read_by(uint32_t *out, gw_admin_call *call, base_err *err)
{
    static const char *const words[] = {"day", "tenant", "tool", "session"};
    const char *text;
    *out = 0;
    GW_TRY(gw_query_text(&text, call->query, "by", call->arena, err));
    while (text && *text) {
        size_t length = strcspn(text, ","), i = 0;
        while (i < 4 && (strlen(words[i]) != length || strncmp(words[i], text, length) != 0))
            i++;
        *out |= 1u << i; /* bit 4: an unknown word */
        text += length + (text[length] == ',');
    }
    if (!*out || *out > GW_BY_SESSION)
        return base_fail_param(err, BASE_INVALID, "by",
                               "by must be a list of day, tenant and tool, or session alone");
    return BASE_OK;
}

static base_code read_filter(gw_usage_filter *out, gw_admin_call *call, base_err *err)
{
    int64_t limit;
    const char *tenant;
    gw_identity identity = {0};
    GW_TRY(read_by(&out->by, call, err));
    GW_TRY(read_day(&out->day_min, call, "from", 0, err));
    GW_TRY(read_day(&out->day_max, call, "to", DAY_MAX, err));
    GW_TRY(gw_query_int(&limit, call->query, "limit", 1, ROWS_MAX, ROWS_DEFAULT, err));
    GW_TRY(gw_query_text(&tenant, call->query, "tenant", call->arena, err));
    if (tenant && !gw_tenants_named(call->app->tenants, &identity, tenant))
        return base_fail_param(err, BASE_NOT_FOUND, "tenant", "there is no such tenant");
    out->tenant = identity.tenant;
    out->limit = (uint32_t)limit;
    return BASE_OK;
}

static void put_sums(base_buf *out, const char *open, const gw_sums *sums)
{
    base_buf_puts(out, open);
    for (size_t i = 0; i < COLUMNS; i++)
        base_buf_printf(out, "\"%s\":%" PRIu64 ",", columns[i].name, column(sums, i));
    base_buf_printf(out, "\"saved_seconds\":%.6f}", saved_seconds(sums));
}

static void put_row(base_buf *out, const gw_usage_row *row, uint32_t by)
{
    char day[16];
    base_buf_puts(out, "{\"object\":\"usage.row\"");
    if (by & GW_BY_DAY) {
        put_day(day, row->day);
        gw_put_member(out, "day", day);
    }
    if (by & GW_BY_TENANT)
        gw_put_member(out, "tenant", row->tenant);
    if (by & GW_BY_TOOL)
        gw_put_member(out, "tool", row->tool);
    if (by & GW_BY_SESSION)
        gw_put_member(out, "session", row->session);
    put_sums(out, ",", &row->sums);
}

/* RFC 4180: texts in quotes. A text that a spreadsheet would take for a formula gets an apostrophe
 * in front: clients choose the names of their tools. */
static void put_csv_text(base_buf *out, const char *text)
{
    base_buf_puts(out, text[0] && strchr("=+-@\t\r", text[0]) ? "\"'" : "\"");
    for (; *text; text++)
        base_buf_printf(out, *text == '"' ? "\"\"" : "%c", *text);
    base_buf_puts(out, "\",");
}

static void put_csv(base_buf *out, const gw_usage_row *rows, uint32_t count, uint32_t by)
{
    static const char *const names[] = {"day,", "tenant,", "tool,", "session,"};
    for (size_t i = 0; i < 4; i++)
        base_buf_puts(out, by & 1u << i ? names[i] : "");
    for (size_t i = 0; i < COLUMNS; i++)
        base_buf_printf(out, "%s,", columns[i].name);
    base_buf_puts(out, "saved_seconds\r\n");
    for (uint32_t r = 0; r < count; r++) {
        char day[16];
        put_day(day, rows[r].day);
        if (by & GW_BY_DAY)
            base_buf_printf(out, "%s,", day);
        const char *const texts[] = {rows[r].tenant, rows[r].tool, rows[r].session};
        for (size_t i = 0; i < 3; i++)
            if (by & (GW_BY_TENANT << i))
                put_csv_text(out, texts[i]);
        for (size_t i = 0; i < COLUMNS; i++)
            base_buf_printf(out, "%" PRIu64 ",", column(&rows[r].sums, i));
        base_buf_printf(out, "%.6f\r\n", saved_seconds(&rows[r].sums));
    }
}

static void put_json(base_buf *out, const gw_usage_filter *f, const gw_usage_row *rows,
                     uint32_t count, const gw_sums *total, bool more)
{
    static const char *const names[] = {"day", "tenant", "tool", "session"};
    char from[16], to[16];
    const char *comma = "";
    put_day(from, f->day_min);
    put_day(to, f->day_max);
    base_buf_puts(out, "{\"object\":\"usage.report\",\"by\":[");
    for (size_t i = 0; i < 4; i++)
        if (f->by & 1u << i) {
            base_buf_printf(out, "%s\"%s\"", comma, names[i]);
            comma = ",";
        }
    base_buf_puts(out, "]");
    gw_put_member(out, "from", f->day_min ? from : NULL);
    gw_put_member(out, "to", f->day_max != DAY_MAX ? to : NULL);
    put_sums(out, ",\"totals\":{", total);
    base_buf_puts(out, ",\"data\":[");
    for (uint32_t i = 0; i < count; i++) {
        base_buf_puts(out, i ? "," : "");
        put_row(out, &rows[i], f->by);
    }
    base_buf_printf(out, "],\"has_more\":%s}", more ? "true" : "false");
}

static base_code report(gw_admin_call *call, base_err *err)
{
    gw_usage_filter filter = {0};
    gw_usage_row *rows;
    gw_sums total;
    uint32_t count;
    bool more;
    const char *format;
    GW_TRY(gw_query_text(&format, call->query, "format", call->arena, err));
    bool csv = format && strcmp(format, "csv") == 0;
    if (format && !csv && strcmp(format, "json") != 0)
        return base_fail_param(err, BASE_INVALID, "format", "format must be json or csv");
    GW_TRY(read_filter(&filter, call, err));
    GW_TRY(gw_admin_usage_list(call->app->ledger, &rows, &count, &more, &total, &filter,
                               call->arena, err));
    if (csv) {
        call->type = "text/csv; charset=utf-8; header=present";
        put_csv(&call->out, rows, count, filter.by);
    } else {
        put_json(&call->out, &filter, rows, count, &total, more);
    }
    return BASE_OK;
}

void gw_admin_usage_report(gw_app *app, gw_exchange *exchange)
{
    gw_admin_begin(app, exchange, report);
}
