/* What the ledger's tests share: a directory of their own, a ledger in it, and a conversation in
 * few words. */
#pragma once
#include <criterion/criterion.h>
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "gateway/ledger_internal.h"

static char directory[64];

static inline int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static inline void make_directory(void)
{
    strcpy(directory, "/tmp/whimbrel-ledger-XXXXXX");
    cr_assert_not_null(mkdtemp(directory));
}

static inline void remove_directory(void)
{
    nftw(directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static inline gw_ledger *open_ledger(void)
{
    gw_ledger *ledger = NULL;
    base_err err = BASE_ERR_INIT;
    gw_ledger_options options = {.path = directory, .cached_ttl_s = 3600, .busy_ms = 200};
    cr_assert_eq(gw_ledger_open(&ledger, &options, &err), BASE_OK, "%s", err.text);
    return ledger;
}

static inline base_err open_error(const gw_ledger_options *options)
{
    gw_ledger *ledger = NULL;
    base_err err = BASE_ERR_INIT;
    cr_assert_neq(gw_ledger_open(&ledger, options, &err), BASE_OK);
    cr_assert_str_eq(err.param, "data.path");
    return err;
}

static inline sqlite3 *open_raw(void)
{
    char path[128];
    sqlite3 *db;
    snprintf(path, sizeof(path), "%s/whimbrel.db", directory);
    cr_assert_eq(sqlite3_open(path, &db), SQLITE_OK);
    sqlite3_busy_timeout(db, 5000);
    return db;
}

static inline int64_t count_rows(const char *sql)
{
    sqlite3 *db = open_raw();
    sqlite3_stmt *s;
    cr_assert_eq(sqlite3_prepare_v2(db, sql, -1, &s, NULL), SQLITE_OK, "%s", sqlite3_errmsg(db));
    cr_assert_eq(sqlite3_step(s), SQLITE_ROW);
    int64_t value = sqlite3_column_int64(s, 0);
    sqlite3_finalize(s);
    sqlite3_close(db);
    return value;
}

/* ---- a conversation in few words ---- */

/* What a test makes lives as long as its process; it stays reachable, so that a leak of the ledger
 * stands out. */
void *volatile test_ledger_kept[65536];
static inline void *keep(void *made)
{
    static atomic_uint count;
    cr_assert_not_null(made);
    test_ledger_kept[atomic_fetch_add(&count, 1) % 65536] = made;
    return made;
}

static inline eng_text text(const char *t)
{
    return (eng_text){t, t ? strlen(t) : 0};
}

static inline eng_item user(const char *t)
{
    return (eng_item){.role = ENG_ROLE_USER, .text = text(t)};
}

static inline eng_item assistant(const char *t, const char *reasoning)
{
    return (eng_item){.role = ENG_ROLE_ASSISTANT, .text = text(t), .reasoning = text(reasoning)};
}

/* One call; lives as long as the test. */
static inline eng_item caller(const char *t, const char *reasoning, const char *id,
                              const char *name, const char *arguments)
{
    eng_call *call = keep(calloc(1, sizeof(*call)));
    *call = (eng_call){text(id), text(name), text(arguments)};
    eng_item item = assistant(t, reasoning);
    item.calls = call;
    item.call_count = 1;
    return item;
}

typedef struct told {
    gw_commit commit;
    sem_t done;
    base_arena *arena;
    gw_match match;
    gw_id id;
} told;

static inline void on_done(gw_commit *commit)
{
    sem_post(&((told *)commit)->done);
}

static int64_t tenant = 1;
static const char *template_id = "template-one";
static gw_retention retention = GW_RETAIN_CACHED;
static const char *echo;
static int64_t ended_ms; /* 0: now */
static const eng_text tool_texts[] = {{"{\"name\":\"f\"}", 12}};
static inline gw_root root(void)
{
    return (gw_root){.tenant = tenant,
                     .template_id = template_id,
                     .tools = tool_texts,
                     .tool_count = 1,
                     .thinking = ENG_THINK_ENABLED,
                     .effort = {"high", 4}};
}

static inline void make_tenants(gw_ledger *ledger)
{
    int64_t id;
    uint64_t salt;
    cr_assert_eq(gw_ledger_tenant_put(ledger, &id, &salt, "default", NULL), BASE_OK);
    cr_assert_eq(id, 1);
    cr_assert_eq(gw_ledger_tenant_put(ledger, &id, &salt, "other", NULL), BASE_OK);
    cr_assert_eq(id, 2);
}

static inline gw_match match_under(gw_ledger *ledger, const gw_root *r, eng_item *items,
                                   uint32_t count)
{
    gw_match match;
    base_err err = BASE_ERR_INIT;
    base_arena *arena = keep(base_arena_create(4096, 16 << 20)); /* left to the process's end */
    for (uint32_t i = 0; i < count; i++)
        items[i].tokens = NULL;
    cr_assert_eq(gw_ledger_match(ledger, &match, r, items, count, arena, &err), BASE_OK, "%s",
                 err.text);
    return match;
}

static inline gw_match match_of(gw_ledger *ledger, eng_item *items, uint32_t count)
{
    gw_root r = root();
    return match_under(ledger, &r, items, count);
}

/* One turn: what was asked, what was answered with which tokens; waits for the commit. The prompt's
 * tokens are made up: 1000 and up for each item, the run's own for a spliced one. */
static inline told *turn_with(gw_ledger *ledger, const gw_root *r, eng_item *items, uint32_t count,
                              eng_item answer, const int32_t *run, uint32_t run_count)
{
    told *t = keep(calloc(1, sizeof(*t)));
    sem_init(&t->done, 0, 0);
    t->arena = keep(base_arena_create(4096, 16 << 20));
    t->id = gw_id_mint("turn_");
    eng_item *own = keep(calloc(count + 1, sizeof(*own)));
    memcpy(own, items, count * sizeof(*own));
    for (uint32_t i = 0; i < count; i++)
        own[i].tokens = NULL;
    cr_assert_eq(gw_ledger_match(ledger, &t->match, r, own, count, t->arena, NULL), BASE_OK);
    int32_t *prompt = keep(calloc(4096, sizeof(*prompt)));
    uint32_t prompt_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t k = 0; k < own[i].token_count && own[i].tokens; k++)
            prompt[prompt_count++] = own[i].tokens[k];
        if (!own[i].tokens)
            prompt[prompt_count++] = 1000 + (int32_t)own[i].text.length;
    }
    static const uint32_t steps[] = {1, 2};
    gw_root *kept = keep(malloc(sizeof(*kept)));
    *kept = *r;
    t->commit = (gw_commit){
        .done = on_done,
        .retention = retention,
        .turn = t->id.text,
        .session = "sess_0123456789abcdef01234567",
        .label = "label",
        .request = "req_1",
        .response = "chatcmpl-1",
        .dialect = "chat",
        .model = "nano",
        .root = kept,
        .match = &t->match,
        .items = own,
        .item_count = count,
        .answer = answer,
        .splice = true,
        .prompt = prompt,
        .run = run,
        .prompt_count = prompt_count,
        .run_count = run_count,
        .steps = steps,
        .step_count = 2,
        .finish = ENG_FINISH_STOP,
        .usage = {.prompt_tokens = prompt_count, .output_tokens = run_count, .cached_tokens = 7},
        .seed = 0xfedcba9876543210u,
        .space = 7,
        .echo = echo,
        .created_ms = ended_ms ? ended_ms : base_wall_ms(),
        .ended_ms = ended_ms ? ended_ms : base_wall_ms()};
    cr_assert(gw_ledger_commit(ledger, &t->commit));
    sem_wait(&t->done);
    return t;
}

static inline told *turn(gw_ledger *ledger, eng_item *items, uint32_t count, eng_item answer,
                         const int32_t *run, uint32_t run_count)
{
    gw_root r = root();
    told *t = turn_with(ledger, &r, items, count, answer, run, run_count);
    cr_assert(t->commit.stored || retention == GW_RETAIN_USAGE, "%s", t->commit.err.text);
    return t;
}

#define RUN(...)                                                                                   \
    ((const int32_t[]){__VA_ARGS__}), (sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static inline bool has_tokens(const eng_item *item, const int32_t *run, size_t count)
{
    return item->tokens && item->token_count == count &&
           memcmp(item->tokens, run, count * sizeof(*run)) == 0;
}

/* Whether any file of the directory holds these bytes. */
static inline bool files_hold(const char *path, const char *needle)
{
    DIR *dir = opendir(path);
    cr_assert_not_null(dir);
    bool found = false;
    for (struct dirent *entry; !found && (entry = readdir(dir));) {
        char name[512];
        snprintf(name, sizeof(name), "%s/%s", path, entry->d_name);
        int fd = open(name, O_RDONLY);
        struct stat st;
        if (fd < 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || !st.st_size) {
            if (fd >= 0)
                close(fd);
            continue;
        }
        /* Read, never mapped: the ledger cuts its log meanwhile, and a map past a file's end is
           SIGBUS. */
        char *bytes = malloc((size_t)st.st_size);
        size_t size = 0;
        for (ssize_t got; size < (size_t)st.st_size &&
                          (got = read(fd, bytes + size, (size_t)st.st_size - size)) > 0;)
            size += (size_t)got;
        found = memmem(bytes, size, needle, strlen(needle)) != NULL;
        if (found)
            fprintf(stderr, "%s is in %s\n", needle, name);
        free(bytes);
        close(fd);
    }
    closedir(dir);
    return found;
}
