/* whimbrel-db: looks a data directory over, backs it up while a server runs, restores and migrates.
 *
 * A backup is a directory that a server could start on: whimbrel.db, written by VACUUM INTO from
 * one moment of the running database, and the key that sealed what clients hold. kv/ is not in it:
 * losing it costs speed only. Nothing here waits for a server and no server waits for it, but a
 * backup's read keeps the log from being cut while it lasts.
 *
 * Exit: 0 done and right, 1 something is wrong with the data, 2 bad arguments or it cannot be done.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache/store.h"
#include "gateway/ledger_internal.h"

#define EXIT_WRONG 1
#define EXIT_BAD 2
#define BUSY_MS 3000
#define PATH_BYTES 4096
#define KEY_BYTES_MAX 4096

static const char USAGE[] =
    "whimbrel-db COMMAND DATA …\n"
    "\n"
    "  check DATA [--no-kv]        every page, row and sum of whimbrel.db and of kv/; a line for "
    "each\n"
    "                              table, a line for each fault\n"
    "  info DATA                   schema, tables, bytes, tenants\n"
    "  backup DATA TO              a copy in the new directory TO, while a server runs or not\n"
    "  restore DATA FROM [--force] the backup FROM, checked first, into DATA, which must hold no\n"
    "                              whimbrel.db; --force replaces it and empties kv/\n"
    "  migrate DATA                to this program's schema; a server does the same at its start\n"
    "\n"
    "  check and info may run beside a server; kv/ is looked at only without one.\n"
    "  Exit status: 0 done and right, 1 something is wrong with the data, 2 bad arguments or it "
    "cannot be done.\n";

static int bad(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

static int bad(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fputs("whimbrel-db: ", stderr);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
    return EXIT_BAD;
}

static int bad_err(const base_err *err)
{
    return bad("%s", err->text);
}

static bool join(char out[PATH_BYTES], const char *directory, const char *name)
{
    return (size_t)snprintf(out, PATH_BYTES, "%s/%s", directory, name) < PATH_BYTES;
}

/* ---- the database ---- */

static base_code pragma(gw_db *c, const char *sql, int64_t *out, base_err *err)
{
    sqlite3_stmt *s = NULL;
    bool ok = sqlite3_prepare_v2(c->db, sql, -1, &s, NULL) == SQLITE_OK && gw_db_scalar(s, out);
    sqlite3_finalize(s);
    return ok ? BASE_OK : gw_db_error(c, err, "cannot read");
}

/* Opens DIRECTORY/whimbrel.db to look at it; no file is changed. */
static base_code open_database(gw_db **out, int64_t *version, const char *directory, base_err *err)
{
    char path[PATH_BYTES];
    int64_t application = 0;
    *out = NULL;
    if (!join(path, directory, "whimbrel.db"))
        return base_fail(err, BASE_INVALID, "%.64s… is too long", directory);
    if (access(path, F_OK) != 0)
        return base_fail(err, BASE_NOT_FOUND, "%.150s: %s", path, strerror(errno));
    base_code code = gw_db_open(out, path, BUSY_MS, false, err);
    if (code)
        return code;
    sqlite3_db_config((*out)->db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, NULL);
    code = pragma(*out, "PRAGMA user_version", version, err);
    if (!code)
        code = pragma(*out, "PRAGMA application_id", &application, err);
    if (!code && application != GW_SCHEMA_APPLICATION)
        code = base_fail(err, BASE_FORMAT, "%.120s is a database of another program", path);
    if (!code && *version > GW_SCHEMA_VERSION)
        code = base_fail(err, BASE_UNSUPPORTED,
                         "%.90s: schema %lld is newer than %d, the newest that this program knows",
                         path, (long long)*version, GW_SCHEMA_VERSION);
    if (code) {
        gw_db_close(*out);
        *out = NULL;
    }
    return code;
}

/* A file that cannot be opened because it is damaged is something wrong, not something missing. */
static int unopened(const base_err *err)
{
    bad_err(err);
    return err->code == BASE_FORMAT ? EXIT_WRONG : EXIT_BAD;
}

static void report(void *ctx, const char *what, uint64_t rows, const char *wrong)
{
    (void)ctx;
    if (wrong)
        printf("wrong  %s: %s\n", what, wrong);
    else
        printf("ok     %s: %llu\n", what, (unsigned long long)rows);
}

static void report_fault_only(void *ctx, const char *what, uint64_t rows, const char *wrong)
{
    if (wrong)
        report(ctx, what, rows, wrong);
}

/* ---- check ---- */

static void report_kv(void *ctx, const char *text)
{
    (void)ctx;
    printf("wrong  kv: %s\n", text);
}

/* 0, 1 or 2. A tier that is not there is none. */
static int check_kv(const char *directory)
{
    char path[PATH_BYTES];
    kv_audit audit;
    base_err err = BASE_ERR_INIT;
    if (!join(path, directory, "kv/index.db") || access(path, F_OK) != 0) {
        puts("ok     kv: none");
        return 0;
    }
    join(path, directory, "kv");
    base_code code = kv_store_audit(&audit, path, report_kv, NULL, &err);
    if (code == BASE_CONFLICT) {
        puts("-      kv: in use by a server, not looked at");
        return 0;
    }
    if (code)
        return bad_err(&err);
    if (audit.wrong)
        return EXIT_WRONG;
    printf("ok     kv: %llu records, %llu bytes\n", (unsigned long long)audit.records,
           (unsigned long long)audit.bytes);
    return 0;
}

static int run_check(const char *directory, bool kv)
{
    gw_db *c;
    int64_t version;
    base_err err = BASE_ERR_INIT;
    if (open_database(&c, &version, directory, &err))
        return unopened(&err);
    if (version < GW_SCHEMA_VERSION) {
        gw_db_close(c);
        return bad("%s: schema %lld is older than %d: run whimbrel-db migrate first", directory,
                   (long long)version, GW_SCHEMA_VERSION);
    }
    /* One moment of the database for all that is compared. */
    bool right = sqlite3_exec(c->db, "BEGIN", NULL, NULL, NULL) == SQLITE_OK;
    right = gw_db_check(c, &(gw_check){.report = report}) && right;
    gw_db_close(c);
    int status = kv ? check_kv(directory) : 0;
    return !right ? EXIT_WRONG : status;
}

/* ---- info ---- */

static int run_info(const char *directory)
{
    static const char *const tables[] = {"tenants", "keys",  "sessions", "turns",
                                         "items",   "nodes", "runs",     "calls"};
    gw_db *c;
    int64_t version, pages = 0, free_pages = 0, size = 0;
    base_err err = BASE_ERR_INIT;
    if (open_database(&c, &version, directory, &err))
        return unopened(&err);
    base_code code = pragma(c, "PRAGMA page_count", &pages, &err);
    if (!code)
        code = pragma(c, "PRAGMA freelist_count", &free_pages, &err);
    if (!code)
        code = pragma(c, "PRAGMA page_size", &size, &err);
    if (!code)
        printf("schema   %lld%s\nbytes    %lld\nfree     %lld\n", (long long)version,
               version < GW_SCHEMA_VERSION ? " (older than this program's)" : "",
               (long long)(pages * size), (long long)(free_pages * size));
    for (size_t i = 0; !code && i < sizeof tables / sizeof *tables; i++) {
        char sql[64];
        int64_t rows = 0;
        snprintf(sql, sizeof sql, "SELECT count(*) FROM %s", tables[i]);
        code = pragma(c, sql, &rows, &err);
        if (!code)
            printf("%-8s %lld\n", tables[i], (long long)rows);
    }
    sqlite3_stmt *s = NULL;
    if (!code && version == GW_SCHEMA_VERSION) {
        if (sqlite3_prepare_v2(c->db,
                               "SELECT t.name, s.bytes, g.name FROM tenants t JOIN stored s ON "
                               "s.tenant=t.id LEFT JOIN groups g ON g.id=t.sharing ORDER BY t.id",
                               -1, &s, NULL) != SQLITE_OK)
            code = gw_db_error(c, &err, "cannot read tenants");
        while (!code && sqlite3_step(s) == SQLITE_ROW) {
            const char *group = (const char *)sqlite3_column_text(s, 2);
            printf("tenant   %s bytes=%lld%s%s\n", sqlite3_column_text(s, 0),
                   (long long)sqlite3_column_int64(s, 1), group ? " group=" : "",
                   group ? group : "");
        }
        sqlite3_finalize(s);
    }
    gw_db_close(c);
    return code ? unopened(&err) : 0;
}

/* ---- copying ---- */

static base_code system_error(base_err *err, const char *path)
{
    return base_fail(err, BASE_IO, "%.150s: %s", path, strerror(errno));
}

static base_code sync_path(const char *path, base_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool ok = fd >= 0 && fsync(fd) == 0;
    base_code code = ok ? BASE_OK : system_error(err, path);
    if (fd >= 0)
        close(fd);
    return code;
}

/* A compact copy of one moment of the database as a new file, on the disk when it returns. */
static base_code copy_database(gw_db *c, const char *path, base_err *err)
{
    sqlite3_stmt *s = NULL;
    unlink(path);
    bool ok = sqlite3_prepare_v2(c->db, "VACUUM INTO ?1", -1, &s, NULL) == SQLITE_OK &&
              sqlite3_bind_text(s, 1, path, -1, SQLITE_STATIC) == SQLITE_OK && gw_db_execute(s);
    base_code code = ok ? BASE_OK : gw_db_error(c, err, "cannot copy");
    sqlite3_finalize(s);
    return code ? code : sync_path(path, err);
}

/* FROM/key to TO/key, if there is one. */
static base_code copy_key(const char *from, const char *to, base_err *err)
{
    char source[PATH_BYTES], part[PATH_BYTES], target[PATH_BYTES], bytes[KEY_BYTES_MAX];
    if (!join(source, from, "key") || !join(part, to, "key.part") || !join(target, to, "key"))
        return base_fail(err, BASE_INVALID, "%.64s… is too long", to);
    int in = open(source, O_RDONLY | O_CLOEXEC);
    if (in < 0)
        return errno == ENOENT ? BASE_OK : system_error(err, source);
    ssize_t length = read(in, bytes, sizeof bytes);
    close(in);
    if (length <= 0)
        return base_fail(err, BASE_IO, "%.150s cannot be read", source);
    int out = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool ok = out >= 0 && write(out, bytes, (size_t)length) == length && fsync(out) == 0;
    base_code code = ok ? BASE_OK : system_error(err, part);
    if (out >= 0)
        close(out);
    if (!code && rename(part, target) != 0)
        code = system_error(err, target);
    if (code)
        unlink(part);
    explicit_bzero(bytes, sizeof bytes);
    return code;
}

static bool is_empty(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *entry;
    bool empty = dir != NULL;
    while (empty && (entry = readdir(dir)) != NULL)
        empty = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
    if (dir != NULL)
        closedir(dir);
    return empty;
}

/* ---- backup ---- */

static base_code make_target(const char *path, base_err *err)
{
    if (mkdir(path, 0700) == 0)
        return BASE_OK;
    if (errno != EEXIST)
        return system_error(err, path);
    return is_empty(path)
               ? BASE_OK
               : base_fail(err, BASE_CONFLICT, "%.120s is there and not an empty directory", path);
}

static int run_backup(const char *directory, const char *to)
{
    gw_db *c = NULL;
    int64_t version;
    char part[PATH_BYTES], target[PATH_BYTES];
    base_err err = BASE_ERR_INIT;
    if (!join(part, to, "whimbrel.db.part") || !join(target, to, "whimbrel.db"))
        return bad("%.64s… is too long", to);
    if (open_database(&c, &version, directory, &err))
        return unopened(&err);
    base_code code = make_target(to, &err);
    if (!code) {
        code = copy_database(c, part, &err);
        if (!code && rename(part, target) != 0)
            code = system_error(&err, target);
        if (code)
            unlink(part);
    }
    gw_db_close(c);
    if (!code)
        code = copy_key(directory, to, &err);
    if (!code)
        code = sync_path(to, &err);
    if (code)
        return unopened(&err);
    struct stat info = {0};
    stat(target, &info);
    printf("backup   %s schema=%lld bytes=%lld\n", to, (long long)version, (long long)info.st_size);
    return 0;
}

/* ---- restore ---- */

/* Pages of tenants that the backup may not know; without them it is slower once. */
static base_code empty_kv(const char *directory, base_err *err)
{
    char path[PATH_BYTES], file[PATH_BYTES];
    struct dirent *entry;
    join(path, directory, "kv");
    DIR *dir = opendir(path);
    if (dir == NULL)
        return errno == ENOENT ? BASE_OK : system_error(err, path);
    base_code code = BASE_OK;
    while (!code && (entry = readdir(dir)) != NULL)
        if (entry->d_type == DT_REG && join(file, path, entry->d_name) && unlink(file) != 0)
            code = system_error(err, file);
    closedir(dir);
    return code;
}

/* The log of what is replaced must be gone before the new file stands in its place. */
static base_code replace(const char *directory, const char *part, base_err *err)
{
    static const char *const ends[] = {"whimbrel.db-wal", "whimbrel.db-shm"};
    char path[PATH_BYTES];
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (join(path, directory, ends[i]) && unlink(path) != 0 && errno != ENOENT)
            return system_error(err, path);
    join(path, directory, "whimbrel.db");
    if (rename(part, path) != 0)
        return system_error(err, path);
    return sync_path(directory, err);
}

static int run_restore(const char *directory, const char *from, bool force)
{
    gw_db *c = NULL;
    int64_t version;
    int lock = -1;
    char part[PATH_BYTES], target[PATH_BYTES];
    base_err err = BASE_ERR_INIT;
    if (!join(part, directory, "whimbrel.db.part") || !join(target, directory, "whimbrel.db"))
        return bad("%.64s… is too long", directory);
    if (open_database(&c, &version, from, &err))
        return unopened(&err);
    /* An older schema has fewer columns than the checks know; SQLite's own are done by the copy. */
    if (version == GW_SCHEMA_VERSION && !gw_db_check(c, &(gw_check){.report = report_fault_only})) {
        gw_db_close(c);
        bad("%s is damaged; nothing was changed", from);
        return EXIT_WRONG;
    }
    base_code code = BASE_OK;
    if (mkdir(directory, 0700) != 0 && errno != EEXIST)
        code = system_error(&err, directory);
    if (!code)
        code = gw_data_lock(&lock, directory, &err);
    if (!code && !force && access(target, F_OK) == 0)
        code = base_fail(&err, BASE_CONFLICT, "%.120s is there; --force replaces it", target);
    if (!code)
        code = copy_database(c, part, &err);
    if (!code && force)
        code = empty_kv(directory, &err);
    if (!code)
        code = copy_key(from, directory, &err);
    if (!code)
        code = replace(directory, part, &err);
    if (code)
        unlink(part);
    gw_db_close(c);
    if (lock >= 0)
        close(lock);
    if (code)
        return unopened(&err);
    printf("restored %s schema=%lld\n", directory, (long long)version);
    return 0;
}

/* ---- migrate ---- */

static int run_migrate(const char *directory)
{
    gw_db *c = NULL;
    int64_t version;
    int lock = -1;
    char path[PATH_BYTES];
    base_err err = BASE_ERR_INIT;
    if (open_database(&c, &version, directory, &err))
        return unopened(&err);
    gw_db_close(c);
    c = NULL;
    join(path, directory, "whimbrel.db");
    base_code code = gw_data_lock(&lock, directory, &err);
    if (!code)
        code = gw_db_open(&c, path, BUSY_MS, true, &err);
    if (!code)
        code = gw_schema_migrate(c->db, &err);
    gw_db_close(c);
    if (lock >= 0)
        close(lock);
    if (code)
        return unopened(&err);
    if (version == GW_SCHEMA_VERSION)
        printf("schema   %d already\n", GW_SCHEMA_VERSION);
    else
        printf("schema   %lld to %d\n", (long long)version, GW_SCHEMA_VERSION);
    return 0;
}

/* ---- arguments ---- */

/* Takes `name` out of the arguments. */
static bool take_flag(int *argc, char **argv, const char *name)
{
    for (int i = 2; i < *argc; i++) {
        if (strcmp(argv[i], name) != 0)
            continue;
        memmove(argv + i, argv + i + 1, (size_t)(*argc - i - 1) * sizeof *argv);
        --*argc;
        return true;
    }
    return false;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fputs(USAGE, stderr);
        return EXIT_BAD;
    }
    const char *command = argv[1];
    if (strcmp(command, "--help") == 0 || strcmp(command, "help") == 0) {
        fputs(USAGE, stdout);
        return 0;
    }
    umask(077);
    static const struct {
        const char *name, *flag;
        int arguments;
    } commands[] = {{"check", "--no-kv", 1},
                    {"info", NULL, 1},
                    {"backup", NULL, 2},
                    {"restore", "--force", 2},
                    {"migrate", NULL, 1}};
    size_t at = 0, count = sizeof commands / sizeof *commands;
    while (at < count && strcmp(commands[at].name, command) != 0)
        at++;
    if (at == count)
        return bad("\"%s\" is none of check, info, backup, restore, migrate; see --help", command);
    bool flag = commands[at].flag != NULL && take_flag(&argc, argv, commands[at].flag);
    for (int i = 2; i < argc; i++)
        if (argv[i][0] == '-')
            return bad("%s knows no %s; see --help", command, argv[i]);
    if (argc - 2 != commands[at].arguments)
        return bad("%s takes %s; see --help", command,
                   commands[at].arguments == 1 ? "one directory" : "two directories");
    switch (at) {
    case 0:
        return run_check(argv[2], !flag);
    case 1:
        return run_info(argv[2]);
    case 2:
        return run_backup(argv[2], argv[3]);
    case 3:
        return run_restore(argv[2], argv[3], flag);
    default:
        return run_migrate(argv[2]);
    }
}
