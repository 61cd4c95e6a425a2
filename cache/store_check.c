/* kv_store_audit: see the header. The model is not at hand, so the sizes of a world's planes are
 * not known: they follow from the first record whose planes fit their sums, each plane being
 * `rows` equal rows, and hold for every other record of that world. */
#include "cache/store_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define BUSY_MS 250
#define RECORD_BYTES_MAX (1u << 30)
#define PLANES_MAX 65536u

typedef struct world {
    int64_t id;
    uint64_t root;
    uint32_t *row_bytes; /* of each plane, 0: not known yet */
    uint32_t plane_max;
} world;

typedef struct known {
    uint64_t id, chain, space;
    uint8_t kind, rows;
} known;

typedef struct audit {
    const char *dir;
    kv_audit *out;
    void (*wrong)(void *ctx, const char *text);
    void *ctx;
    sqlite3 *db;
    world *worlds;
    uint32_t world_count;
    known *known; /* ascending by id */
    uint64_t known_count;
    int segment_fd;
    uint64_t segment; /* that is open; UINT64_MAX: none */
    uint8_t *bytes;   /* of one record */
    size_t bytes_max;
} audit;

static void tell(audit *a, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void tell(audit *a, const char *fmt, ...)
{
    char text[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    a->out->wrong++;
    a->wrong(a->ctx, text);
}

static uint64_t get(const uint8_t *at, size_t bytes)
{
    uint64_t value = 0;
    memcpy(&value, at, bytes);
    return value;
}

static base_code broken(audit *a, base_err *err)
{
    return base_fail(err, BASE_IO, "%s/index.db: %s", a->dir, sqlite3_errmsg(a->db));
}

static base_code open_index(audit *a, base_err *err)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/index.db", a->dir);
    int rc = sqlite3_open_v2(path, &a->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL);
    sqlite3_stmt *stmt = NULL;
    if (rc == SQLITE_OK) {
        sqlite3_busy_timeout(a->db, BUSY_MS);
        sqlite3_db_config(a->db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, NULL);
        rc = sqlite3_prepare_v2(a->db, "PRAGMA user_version", -1, &stmt, NULL);
    }
    if (rc == SQLITE_OK)
        rc = sqlite3_step(stmt);
    int version = rc == SQLITE_ROW ? sqlite3_column_int(stmt, 0) : 0;
    sqlite3_finalize(stmt);
    if ((rc & 0xFF) == SQLITE_BUSY)
        return base_fail(err, BASE_CONFLICT, "%s is in use by another process", a->dir);
    if (rc == SQLITE_ROW && version != KV_SCHEMA)
        return base_fail(err, BASE_UNSUPPORTED, "%s/index.db: schema %d, this program knows %d",
                         a->dir, version, KV_SCHEMA);
    if (rc == SQLITE_ROW)
        return BASE_OK;
    if ((rc & 0xFF) == SQLITE_CANTOPEN)
        return broken(a, err);
    tell(a, "%s/index.db: %s", a->dir, sqlite3_errstr(rc));
    return BASE_FORMAT;
}

static base_code check_file(audit *a, base_err *err)
{
    sqlite3_stmt *stmt;
    int rc = sqlite3_prepare_v2(a->db, "PRAGMA integrity_check(8)", -1, &stmt, NULL);
    if (rc != SQLITE_OK)
        return broken(a, err);
    while ((rc = sqlite3_step(stmt)) == SQLITE_ROW) {
        const char *text = (const char *)sqlite3_column_text(stmt, 0);
        if (text == NULL || strcmp(text, "ok") != 0)
            tell(a, "%s/index.db: %s", a->dir, text != NULL ? text : "no answer");
    }
    sqlite3_finalize(stmt);
    if (rc != SQLITE_DONE)
        tell(a, "%s/index.db: %s", a->dir, sqlite3_errstr(rc));
    return BASE_OK;
}

static base_code load_worlds(audit *a, base_err *err)
{
    sqlite3_stmt *stmt;
    if (sqlite3_prepare_v2(a->db, "SELECT id,fingerprint,layout,numerics FROM worlds", -1, &stmt,
                           NULL) != SQLITE_OK)
        return broken(a, err);
    base_code code = BASE_OK;
    while (code == BASE_OK && sqlite3_step(stmt) == SQLITE_ROW) {
        const char *texts[3];
        for (int i = 0; i < 3; i++) {
            texts[i] = (const char *)sqlite3_column_text(stmt, i + 1);
            texts[i] = texts[i] != NULL ? texts[i] : "";
        }
        world *more = realloc(a->worlds, (a->world_count + 1) * sizeof *more);
        if (more == NULL) {
            code = base_fail(err, BASE_NOMEM, "no memory for the tier's worlds");
            break;
        }
        a->worlds = more;
        a->worlds[a->world_count++] = (world){.id = sqlite3_column_int64(stmt, 0),
                                              .root = kv_form__root(texts[0], texts[1], texts[2])};
    }
    sqlite3_finalize(stmt);
    a->out->worlds = a->world_count;
    return code;
}

static world *world_of(audit *a, int64_t id)
{
    for (uint32_t i = 0; i < a->world_count; i++)
        if (a->worlds[i].id == id)
            return &a->worlds[i];
    return NULL;
}

static const known *known_by_id(const audit *a, uint64_t id)
{
    uint64_t low = 0, high = a->known_count;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (a->known[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < a->known_count && a->known[low].id == id ? &a->known[low] : NULL;
}

/* ---- a record's bytes ---- */

static bool use_segment(audit *a, uint64_t number)
{
    char path[4096];
    uint8_t head[KV_BLOCK];
    if (a->segment == number)
        return a->segment_fd >= 0;
    if (a->segment_fd >= 0)
        close(a->segment_fd);
    a->segment = number;
    snprintf(path, sizeof path, "%s/seg-%08x.kv", a->dir, (unsigned)number);
    a->segment_fd = open(path, O_RDONLY | O_CLOEXEC);
    if (a->segment_fd >= 0 && (pread(a->segment_fd, head, KV_BLOCK, 0) != (ssize_t)KV_BLOCK ||
                               !kv_segment__head_fits(head, (uint32_t)number))) {
        close(a->segment_fd);
        a->segment_fd = -1;
    }
    a->out->segments += a->segment_fd >= 0;
    return a->segment_fd >= 0;
}

static bool read_record(audit *a, const kv_row_key *row)
{
    if (row->length > a->bytes_max) {
        uint8_t *more = realloc(a->bytes, row->length);
        if (more == NULL)
            return false;
        a->bytes = more;
        a->bytes_max = row->length;
    }
    for (size_t at = 0; at < row->length;) {
        ssize_t done =
            pread(a->segment_fd, a->bytes + at, row->length - at, (off_t)(row->offset + at));
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return false;
        at += (size_t)done;
    }
    return true;
}

/* The bytes of one plane's rows by their sum: the first multiple of `rows` that fits. 0: none. */
static uint32_t size_by_sum(const uint8_t *bytes, uint32_t left, uint32_t rows, uint64_t sum)
{
    XXH3_state_t state;
    uint32_t found = 0;
    XXH3_64bits_reset(&state);
    for (uint32_t at = 0; found == 0 && left - at >= rows; at += rows) {
        XXH3_64bits_update(&state, bytes + at, rows);
        if (XXH3_64bits_digest(&state) == sum)
            found = at + rows;
    }
    return found;
}

static bool note_planes(world *w, uint32_t planes)
{
    if (planes <= w->plane_max)
        return true;
    uint32_t *more = planes <= PLANES_MAX ? realloc(w->row_bytes, planes * sizeof *more) : NULL;
    if (more == NULL)
        return false;
    memset(more + w->plane_max, 0, (planes - w->plane_max) * sizeof *more);
    w->row_bytes = more;
    w->plane_max = planes;
    return true;
}

/* One group at `bytes`; sets its length and moves *plane on. NULL if all is as sealed. */
static const char *check_group(world *w, const kv_row_key *row, uint32_t group, uint32_t *plane,
                               const uint8_t *bytes, uint64_t left, uint64_t *length)
{
    if (memcmp(bytes, "WKVP", 4) != 0 || bytes[6] != row->kind || bytes[7] != row->filled ||
        get(bytes + 8, 8) != row->id || get(bytes + 16, 8) != row->chain ||
        get(bytes + 24, 4) != group || get(bytes + 28, 4) != *plane)
        return "another record stands there";
    uint32_t count = (uint32_t)get(bytes + 32, 4);
    *length = get(bytes + 36, 4);
    if (count == 0 || count > PLANES_MAX || *length % KV_BLOCK != 0 || *length > left ||
        KV_GROUP_HEAD + 8ull * count > *length || !note_planes(w, *plane + count))
        return "its head makes no sense";
    const uint8_t *sums = bytes + KV_GROUP_HEAD;
    if (get(bytes + 56, 8) != kv_group__head_sum(bytes, sums, count))
        return "its head does not fit its sum";
    uint64_t at = KV_GROUP_HEAD + 8ull * count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t *row_bytes = &w->row_bytes[*plane + i];
        uint64_t sum = get(sums + 8 * i, 8), bytes_of = *row_bytes * row->filled;
        if (*row_bytes == 0) {
            bytes_of =
                size_by_sum(bytes + at, (uint32_t)(*length - at), (uint32_t)row->filled, sum);
            *row_bytes = (uint32_t)(bytes_of / row->filled);
        }
        if (bytes_of == 0 || bytes_of > *length - at || XXH3_64bits(bytes + at, bytes_of) != sum)
            return "a plane does not fit its sum";
        at += bytes_of;
    }
    *plane += count;
    return NULL;
}

static const char *check_record(audit *a, world *w, const kv_row_key *row)
{
    if (row->segment > UINT32_MAX || !use_segment(a, row->segment))
        return "its segment is missing or damaged";
    if (row->offset < KV_BLOCK || row->offset % KV_BLOCK != 0 || row->length == 0 ||
        row->length % KV_BLOCK != 0 || row->length > RECORD_BYTES_MAX)
        return "its place makes no sense";
    if (!read_record(a, row))
        return "its bytes cannot be read";
    uint32_t plane = 0, group = 0;
    for (uint64_t at = 0, length; at < row->length; at += length, group++) {
        const char *why =
            check_group(w, row, group, &plane, a->bytes + at, row->length - at, &length);
        if (why != NULL)
            return why;
    }
    return NULL;
}

/* ---- rows ---- */

/* The row itself and its parent. */
static const char *check_row(audit *a, const world *w, const kv_row_key *row, const int32_t *tokens,
                             int64_t sum)
{
    if (kv_row__sum(row, tokens) != sum)
        return "it does not fit its sum";
    if (w == NULL)
        return "its world is missing";
    uint64_t root[2] = {w->root, row->space}, before = XXH3_64bits(root, sizeof root);
    const known *parent = row->parent != 0 ? known_by_id(a, row->parent) : NULL;
    if (row->parent != 0) {
        if (parent == NULL || parent->space != row->space || parent->kind != KV_STORE_TARGET)
            return "the page before it is missing";
        before = parent->chain;
    }
    if (row->kind == KV_STORE_TARGET)
        return row->chain == kv_form__page_chain(before, (uint32_t)row->filled, tokens)
                   ? NULL
                   : "its tokens do not fit its chain";
    kv_form form = {.root = w->root};
    return parent != NULL && parent->rows == row->filled &&
                   row->chain == kv_form__side_chain(&form, before, (uint32_t)row->filled)
               ? NULL
               : "it does not fit its page";
}

static void take_row(audit *a, sqlite3_stmt *stmt)
{
    uint64_t fields[10];
    for (int i = 0; i < 10; i++)
        fields[i] = (uint64_t)sqlite3_column_int64(stmt, i);
    kv_row_key row = {fields[0], fields[1], fields[2], fields[3], fields[4],
                      fields[5], fields[6], fields[7], fields[8], fields[9]};
    const int32_t *tokens = sqlite3_column_blob(stmt, 11);
    uint64_t token_bytes = (uint64_t)sqlite3_column_bytes(stmt, 11);
    const char *why = NULL;
    world *w = world_of(a, (int64_t)row.world);
    if (row.kind > KV_STORE_DRAFT || row.filled == 0 || row.filled > KV_PAGE_TOKENS ||
        token_bytes != (row.kind == KV_STORE_TARGET ? row.filled * sizeof *tokens : 0))
        why = "its values make no sense";
    if (why == NULL)
        why =
            check_row(a, w, &row, token_bytes == 0 ? NULL : tokens, sqlite3_column_int64(stmt, 10));
    if (why == NULL)
        why = check_record(a, w, &row);
    if (why != NULL) {
        tell(a, "%s: record %llu: %s", a->dir, (unsigned long long)row.id, why);
        return;
    }
    a->out->records++;
    a->out->bytes += row.length;
    a->known[a->known_count++] =
        (known){row.id, row.chain, row.space, (uint8_t)row.kind, (uint8_t)row.filled};
}

static base_code check_rows(audit *a, base_err *err)
{
    sqlite3_stmt *stmt;
    int64_t rows = 0;
    if (sqlite3_prepare_v2(a->db, "SELECT count(*) FROM pages", -1, &stmt, NULL) != SQLITE_OK)
        return broken(a, err);
    if (sqlite3_step(stmt) == SQLITE_ROW)
        rows = sqlite3_column_int64(stmt, 0);
    sqlite3_finalize(stmt);
    a->known = calloc((size_t)rows + 1, sizeof *a->known);
    if (a->known == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for %lld rows", (long long)rows);
    if (sqlite3_prepare_v2(a->db,
                           "SELECT id,world,space,parent,kind,filled,chain,segment,offset,length,"
                           "sum,tokens FROM pages ORDER BY id",
                           -1, &stmt, NULL) != SQLITE_OK)
        return broken(a, err);
    int rc;
    for (int64_t at = 0; (rc = sqlite3_step(stmt)) == SQLITE_ROW && at < rows; at++)
        take_row(a, stmt);
    sqlite3_finalize(stmt);
    if (rc != SQLITE_DONE)
        tell(a, "%s/index.db: %s", a->dir, sqlite3_errstr(rc));
    return BASE_OK;
}

base_code kv_store_audit(kv_audit *out, const char *dir, void (*wrong)(void *ctx, const char *text),
                         void *ctx, base_err *err)
{
    *out = (kv_audit){0};
    audit a = {.dir = dir,
               .out = out,
               .wrong = wrong,
               .ctx = ctx,
               .segment_fd = -1,
               .segment = UINT64_MAX};
    base_code code = open_index(&a, err);
    if (code == BASE_OK)
        code = check_file(&a, err);
    if (code == BASE_OK)
        code = load_worlds(&a, err);
    if (code == BASE_OK)
        code = check_rows(&a, err);
    sqlite3_close(a.db);
    if (a.segment_fd >= 0)
        close(a.segment_fd);
    for (uint32_t i = 0; i < a.world_count; i++)
        free(a.worlds[i].row_bytes);
    free(a.worlds);
    free(a.known);
    free(a.bytes);
    /* What is wrong has been told. */
    return code == BASE_FORMAT ? BASE_OK : code;
}
