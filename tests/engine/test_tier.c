/* The engine with its disk tier, on small random models: what comes back is what was computed, to
 * the bit; nobody waits for a disk but who needs it; what the disk loses, damages or refuses is
 * computed again; what must not reach it does not. */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/engine_internal.h"
#include "loop_rig.h"

#define NANO SOURCE_ROOT "/config/models/nano"
#define DISK_BYTES (256u << 20)

/* ---- the disk ---- */

static char dir[32], kv_dir[40];

static void make_dir(void)
{
    snprintf(dir, sizeof dir, "/tmp/engine-tier-XXXXXX");
    cr_assert(mkdtemp(dir) != NULL);
    snprintf(kv_dir, sizeof kv_dir, "%s/kv", dir);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    return remove(path);
}

static void remove_dir(void)
{
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static _Atomic uint32_t read_delay_ms, reads;
static _Atomic uint32_t gate = UINT32_MAX; /* so many reads; the rest wait until it is raised */
static _Atomic bool reads_fail, disk_is_full;

static ssize_t slow_pread(int fd, void *bytes, size_t length, off_t offset)
{
    uint32_t number = atomic_fetch_add(&reads, 1);
    while (number >= atomic_load(&gate))
        usleep(1000);
    if (atomic_load(&read_delay_ms) > 0)
        usleep(atomic_load(&read_delay_ms) * 1000);
    if (atomic_load(&reads_fail)) {
        errno = EIO;
        return -1;
    }
    return pread(fd, bytes, length, offset);
}

static ssize_t full_pwrite(int fd, const void *bytes, size_t length, off_t offset)
{
    if (atomic_load(&disk_is_full)) {
        errno = ENOSPC;
        return -1;
    }
    return pwrite(fd, bytes, length, offset);
}

static const kv_store_io faulty = {.pread = slow_pread, .pwrite = full_pwrite};

static eng_options disk_options(void)
{
    eng_options opts = options();
    opts.disk = kv_dir;
    opts.disk_bytes = DISK_BYTES;
    opts.disk_io = &faulty;
    opts.disk_retry_ms = 50;
    opts.disk_group_bytes = 1; /* layer by layer, however small they are */
    return opts;
}

/* Waits until all that ended has been written. */
static void settle(eng_engine *engine)
{
    check_clean(engine);
}

/* Stops the engine, which writes what is queued, and starts another. */
static eng_engine *restart(eng_engine *engine, const eng_options *opts)
{
    eng_destroy(engine);
    return start(opts);
}

/* A turn behind another one: its tokens, what it answered and `more` new ones. */
static uint32_t go_on(int32_t *tokens, uint32_t count, const result *r, uint32_t more,
                      uint64_t seed)
{
    memcpy(tokens + count, r->tokens, r->count * sizeof *tokens);
    make_prompt(tokens + count + r->count, more, seed);
    return count + r->count + more;
}

/* ---- what comes back ---- */

/* Bytes of all rows of tokens[0..count) that memory has, plane by plane; NULL if it lacks the
 * drafter's. */
static uint8_t *rows_of(eng_engine *engine, kv_store_kind kind, const int32_t *tokens,
                        uint32_t count, size_t *length)
{
    const kv_layout *layout =
        kind == KV_STORE_TARGET ? eng_model_layout(engine->model) : &engine->tier.draft_layout;
    uint32_t pages[64];
    kv_match match = kv_index_match(engine->index, 1, tokens, count, pages, base_now_ns());
    cr_assert_eq(match.tokens, count);
    uint8_t *bytes = malloc((size_t)match.page_count * layout->record_bytes), *at = bytes;
    bool whole = true;
    for (uint32_t i = 0; i < match.page_count; i++) {
        uint32_t rows = count - i * KV_PAGE_TOKENS;
        rows = rows < KV_PAGE_TOKENS ? rows : KV_PAGE_TOKENS;
        whole &= engine->draft_whole[pages[i]];
        for (uint32_t p = 0; p < layout->plane_count; p++) {
            const kv_plane *plane = &layout->planes[p];
            bool k = plane->type == KV_PLANE_K || plane->type == KV_PLANE_DRAFT_K;
            bool v = plane->type == KV_PLANE_V || plane->type == KV_PLANE_DRAFT_V;
            kn_kv_copy_out(kind == KV_STORE_TARGET ? engine->kv : engine->draft_kv, at, pages[i],
                           plane->layer,
                           k   ? KN_PLANE_K
                           : v ? KN_PLANE_V
                               : KN_PLANE_INDEX,
                           plane->head, rows);
            at += (size_t)rows * plane->row_bytes;
        }
        kv_pool_unref(engine->pool, pages[i]);
    }
    *length = (size_t)(at - bytes);
    if (kind == KV_STORE_TARGET || whole)
        return bytes;
    free(bytes);
    return NULL;
}

Test(eng_tier, a_restart_brings_back_the_same_bits, .timeout = 240)
{
    static int32_t tokens[2048];
    static result first, restored, computed;
    const char *const formats[] = {"nvfp4", "fp8", "bf16", "f32"};
    make_dir();
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        eng_options opts = disk_options();
        opts.kv = formats[f];
        eng_engine *engine = start(&opts);
        make_prompt(tokens, 700, f);
        run(engine, tokens, 700, 90, 0, &first);
        cr_assert_eq(first.usage.restored_tokens, 0);
        engine = restart(engine, &opts);
        uint32_t count = go_on(tokens, 700, &first, 60, 1);
        cr_assert_eq(eng_peek_cached(engine, 1, tokens, count), 789); /* the last is not run */
        run(engine, tokens, count, 40, 0, &restored);
        cr_assert_eq(restored.usage.cached_tokens, 789);
        cr_assert_eq(restored.usage.restored_tokens, 789);
        cr_assert_eq(eng_get_stats(engine).restored_tokens, 789);
        settle(engine);
        size_t lengths[2];
        uint8_t *back = rows_of(engine, KV_STORE_TARGET, tokens, count, &lengths[0]);
        eng_destroy(engine);
        opts.disk = NULL;
        engine = start(&opts);
        run(engine, tokens, count, 40, 0, &computed);
        cr_assert_eq(computed.usage.cached_tokens, 0);
        uint8_t *anew = rows_of(engine, KV_STORE_TARGET, tokens, count, &lengths[1]);
        cr_assert_eq(lengths[0], lengths[1]);
        cr_assert_eq(memcmp(back, anew, lengths[0]), 0, "%s: rows differ", formats[f]);
        same(&computed, &restored, formats[f]);
        free(back);
        free(anew);
        eng_destroy(engine);
    }
    remove_dir();
}

Test(eng_tier, another_world_is_not_served, .timeout = 120)
{
    static int32_t tokens[200];
    static result first, other;
    make_dir();
    eng_options opts = disk_options();
    eng_engine *engine = start(&opts);
    make_prompt(tokens, 200, 1);
    run(engine, tokens, 200, 4, 0, &first);
    eng_options others[3] = {opts, opts, opts};
    others[0].model = "random:tiny?seed=4"; /* other weights */
    others[1].kv = "fp8";                   /* another layout */
    others[2].variant = "ref";              /* another reduction */
    for (int i = 0; i < 3; i++) {
        engine = restart(engine, &others[i]);
        run(engine, tokens, 200, 4, 0, &other);
        cr_assert_eq(other.usage.cached_tokens, 0, "world %d", i);
    }
    engine = restart(engine, &opts);
    eng_request req = request(tokens, 200, 4, 0, &other);
    req.space = 2; /* another namespace */
    submit(engine, &req);
    wait_done(&other, 1);
    cr_assert_eq(other.usage.cached_tokens, 0);
    run(engine, tokens, 200, 4, 0, &other); /* and the first one is still there */
    cr_assert_eq(other.usage.restored_tokens, 199);
    same(&first, &other, "after other worlds");
    eng_destroy(engine);
    remove_dir();
}

/* Memory has the beginning, the disk what follows; the run begins inside a page. */
Test(eng_tier, memory_and_disk_meet_inside_a_page, .timeout = 120)
{
    static int32_t tokens[1000];
    static result first, shorter, plain;
    make_dir();
    eng_options opts = disk_options();
    eng_engine *engine = start(&opts);
    make_prompt(tokens, 1000, 2);
    run(engine, tokens, 1000, 8, 0, &first);
    for (uint32_t have = 1; have < 1000; have += 111) {
        engine = restart(engine, &opts);
        run(engine, tokens, have, 1, 0, &shorter); /* so much is read, and one row computed */
        run(engine, tokens, 1000, 8, 0, &plain);
        cr_assert_eq(plain.usage.cached_tokens, 999);
        cr_assert_eq(plain.usage.restored_tokens, 999 - have);
        same(&first, &plain, "memory and disk");
        settle(engine);
    }
    eng_destroy(engine);
    remove_dir();
}

/* Where a token is computed sooner than it is read, it is computed; memory's part is used all the
 * same. What the disk brings per second is kv_store's to measure. */
Test(eng_tier, reading_must_beat_computing, .timeout = 120)
{
    static int32_t tokens[600];
    static result first, shorter, other;
    make_dir();
    eng_options opts = disk_options();
    eng_engine *engine = start(&opts);
    make_prompt(tokens, 600, 7);
    run(engine, tokens, 600, 8, 0, &first);
    for (int pays = 0; pays < 2; pays++) {
        engine = restart(engine, &opts);
        run(engine, tokens, 200, 1, 0, &shorter);
        settle(engine);
        engine->tier.token_s = pays ? 1.0 : 1e-12; /* nothing runs */
        run(engine, tokens, 600, 8, 0, &other);
        cr_assert_eq(other.usage.restored_tokens, pays ? 399 : 0, "%u",
                     other.usage.restored_tokens);
        cr_assert_eq(other.usage.cached_tokens, pays ? 599 : 200);
        same(&first, &other, "read or computed");
        settle(engine);
    }
    eng_destroy(engine);
    remove_dir();
}

/* ---- the drafter's rows ---- */

#define TURNS 5

/* A conversation, by exact tokens; before every turn but the first a restart, or none. The turns
 * run with the drafter, or all but the last without. */
static uint8_t *converse(const char *model, bool again, bool bare, result turns[TURNS],
                         size_t *length)
{
    uint8_t *rows = NULL;
    static const char *const SAID[TURNS] = {
        "Hello! My name is Mira and I live in Lisbon. What can you do for me?",
        "Please write three sentences about the weather in spring.",
        "Thanks. What is my name, and where do I live?", "Count from one to twenty, please.",
        "Please say again, word for word, the three sentences about the weather."};
    base_err err = BASE_ERR_INIT;
    make_dir();
    eng_options opts = disk_options();
    opts.model = model;
    opts.draft_tokens = bare ? 0 : 4;
    eng_engine *engine = start(&opts);
    base_arena *arena = base_arena_create(1 << 16, 1 << 24);
    eng_item items[2 * TURNS];
    for (uint32_t t = 0; t < TURNS; t++) {
        items[2 * t] = (eng_item){.role = ENG_ROLE_USER, .text = {SAID[t], strlen(SAID[t])}};
        eng_chat chat = {.items = items, .item_count = 2 * t + 1, .thinking = ENG_THINK_DISABLED};
        eng_prompt prompt;
        cr_assert_eq(eng_render(engine, &prompt, &chat, 0, NULL, arena, &err), BASE_OK, "%s",
                     err.text);
        if (bare && t == TURNS - 1)
            opts.draft_tokens = 4;
        if (again && t > 0)
            engine = restart(engine, &opts);
        eng_request req = request(prompt.tokens, prompt.token_count, 100, 0, &turns[t]);
        req.parse = ENG_PARSE_CHAT;
        req.thinking = prompt.thinking;
        req.sampling.ignore_eos = false;
        submit(engine, &req);
        wait_done(&turns[t], 1);
        cr_assert_eq(turns[t].usage.restored_tokens > 0, again && t > 0);
        if (t == TURNS - 1)
            rows = rows_of(engine, KV_STORE_DRAFT, prompt.tokens, prompt.token_count, length);
        items[2 * t + 1] = (eng_item){
            .role = ENG_ROLE_ASSISTANT, .tokens = turns[t].tokens, .token_count = turns[t].count};
    }
    settle(engine);
    eng_destroy(engine);
    base_arena_destroy(arena);
    remove_dir();
    return rows;
}

Test(eng_tier, drafts_are_accepted_as_if_nothing_had_happened, .timeout = 240)
{
    static result live[TURNS], restored[TURNS], bare[TURNS];
    bool trained = access(NANO "/model.safetensors", R_OK) == 0;
    const char *model = trained ? NANO : SOURCE_ROOT "/tests/vectors/tiny";
    uint32_t accepted = 0, drafted = 0;
    size_t lengths[3];
    uint8_t *rows = converse(model, false, false, live, &lengths[0]);
    uint8_t *back = converse(model, true, false, restored, &lengths[1]);
    cr_assert(rows != NULL && back != NULL);
    cr_assert_eq(lengths[0], lengths[1]);
    cr_assert_eq(memcmp(rows, back, lengths[0]), 0, "the drafter's rows differ");
    for (uint32_t t = 0; t < TURNS; t++) {
        same(&live[t], &restored[t], "drafted after a restart");
        cr_assert_eq(restored[t].usage.drafted, live[t].usage.drafted);
        cr_assert_eq(restored[t].usage.accepted, live[t].usage.accepted);
        accepted += live[t].usage.accepted;
        drafted += live[t].usage.drafted;
    }
    cr_assert_gt(drafted, 0);
    /* Pages that never had the drafter's rows are masked, not taken for what they are not. */
    cr_assert(converse(model, true, true, bare, &lengths[2]) == NULL);
    for (uint32_t t = 0; t < TURNS; t++)
        same(&live[t], &bare[t], "drafted without the drafter's rows");
    cr_log_info("accepted of drafted: %u of %u; last turn live %u/%u, restored %u/%u, without side "
                "records %u/%u",
                accepted, drafted, live[TURNS - 1].usage.accepted, live[TURNS - 1].usage.drafted,
                restored[TURNS - 1].usage.accepted, restored[TURNS - 1].usage.drafted,
                bare[TURNS - 1].usage.accepted, bare[TURNS - 1].usage.drafted);
    if (trained)
        cr_assert_gt(2 * accepted, drafted);
    free(rows);
    free(back);
}

/* ---- nobody else waits ---- */

typedef struct gaps {
    uint64_t ns[2 * OUTPUT_MAX];
    uint32_t count;
} gaps;

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void add_gaps(gaps *out, const result *r, uint64_t from, uint64_t to)
{
    for (uint32_t i = 1; i < r->count; i++)
        if (r->at_ns[i - 1] >= from && r->at_ns[i] <= to && out->count < 2 * OUTPUT_MAX)
            out->ns[out->count++] = r->at_ns[i] - r->at_ns[i - 1];
}

static double quantile_ms(gaps *g, double q)
{
    qsort(g->ns, g->count, sizeof *g->ns, by_size);
    return g->count == 0 ? 0 : (double)g->ns[(uint32_t)(q * (g->count - 1))] * 1e-6;
}

Test(eng_tier, others_go_on_while_a_slow_disk_reads, .timeout = 240)
{
    static int32_t old[900], busy[2][20];
    static result first, back, streams[2];
    static gaps during, without;
    make_dir();
    eng_options opts = disk_options();
    opts.slow_step_us = 3000;
    eng_engine *engine = start(&opts);
    make_prompt(old, 900, 3);
    run(engine, old, 900, 4, 0, &first);
    engine = restart(engine, &opts);
    for (int i = 0; i < 2; i++)
        make_prompt(busy[i], 20, 10 + (uint64_t)i);
    eng_request reqs[3];
    for (int i = 0; i < 2; i++) {
        reqs[i] = request(busy[i], 20, 400, 0, &streams[i]);
        submit(engine, &reqs[i]);
    }
    usleep(500000);
    atomic_store(&reads, 0);
    atomic_store(&read_delay_ms, 200);
    uint64_t begin = base_now_ns();
    reqs[2] = request(old, 900, 4, 0, &back);
    submit(engine, &reqs[2]);
    wait_done(&back, 1);
    uint64_t end = begin + back.usage.queue_ns;
    wait_done(streams, 2);
    atomic_store(&read_delay_ms, 0);
    cr_assert_geq(atomic_load(&reads), 1);
    cr_assert_eq(back.usage.restored_tokens, 899);
    cr_assert_geq(back.usage.queue_ns, 200000000u, "it did not wait for its pages");
    same(&first, &back, "slowly restored");
    for (int i = 0; i < 2; i++) {
        add_gaps(&during, &streams[i], begin, end);
        add_gaps(&without, &streams[i], 0, begin);
    }
    cr_log_info("inter-token ms without and during reads of 200 ms: p50 %.2f %.2f, p99 %.2f %.2f",
                quantile_ms(&without, 0.5), quantile_ms(&during, 0.5), quantile_ms(&without, 0.99),
                quantile_ms(&during, 0.99));
    /* Steps go on as before: a few of them would fill the time if each waited for a read. */
    double step_ms = quantile_ms(&without, 0.5);
    cr_assert_lt(quantile_ms(&during, 0.5), 3 * step_ms);
    cr_assert_gt(during.count * step_ms * 4, 2 * (double)(end - begin) * 1e-6, "%u gaps of %.1f ms",
                 during.count, step_ms);
    eng_destroy(engine);
    remove_dir();
}

/* Waits until a layer has run while the others are still on disk. */
static void wait_ahead(const eng_engine *engine)
{
    for (int i = 0; eng_get_stats(engine).ahead_layers == 0; i++) {
        cr_assert_lt(i, 30000, "nothing runs ahead");
        usleep(1000);
    }
}

/* The first layer is read, the rest is held back until it has been used; then all comes, or the
 * disk fails, or the client leaves. */
Test(eng_tier, rows_run_ahead_of_the_pages_before_them, .timeout = 240)
{
    enum { COME, FAIL, CANCEL, WAYS };
    static int32_t tokens[2048];
    static result first, back, computed;
    make_dir();
    eng_options opts = disk_options();
    opts.disk_readers = 1; /* reads are let through in order */
    eng_engine *engine = start(&opts);
    make_prompt(tokens, 700, 5);
    run(engine, tokens, 700, 90, 0, &first);
    uint32_t count = go_on(tokens, 700, &first, 200, 6);
    for (int way = 0; way < WAYS; way++) {
        engine = restart(engine, &opts);
        atomic_store(&reads, 0);
        atomic_store(&gate, 7); /* the first layer of the seven pages of 789 tokens */
        eng_request req = request(tokens, count, 40, 0, &back);
        req.no_disk = true; /* each way finds the same */
        submit(engine, &req);
        wait_ahead(engine);
        if (way == FAIL)
            atomic_store(&reads_fail, true);
        if (way == CANCEL)
            eng_cancel(engine, req.id);
        else
            atomic_store(&gate, UINT32_MAX);
        wait_done(&back, 1);
        atomic_store(&gate, UINT32_MAX);
        atomic_store(&reads_fail, false);
        eng_stats stats = eng_get_stats(engine);
        cr_assert_eq(stats.ahead_tokens, way == COME ? count - 789 - 1 : 0, "way %d: %lu", way,
                     stats.ahead_tokens);
        settle(engine);
        if (way == CANCEL) {
            cr_assert_eq(back.finish, ENG_FINISH_CANCELLED);
            continue;
        }
        cr_assert_eq(back.usage.cached_tokens, way == COME ? 789 : 0);
        cr_assert_eq(back.usage.restored_tokens, way == COME ? 789 : 0);
        size_t lengths[2];
        uint8_t *ahead = rows_of(engine, KV_STORE_TARGET, tokens, count, &lengths[0]);
        eng_options plain = options();
        eng_engine *other = start(&plain);
        run(other, tokens, count, 40, 0, &computed);
        uint8_t *anew = rows_of(other, KV_STORE_TARGET, tokens, count, &lengths[1]);
        cr_assert_eq(lengths[0], lengths[1]);
        cr_assert_eq(memcmp(ahead, anew, lengths[0]), 0, "way %d: rows differ", way);
        same(&computed, &back, "run ahead");
        free(ahead);
        free(anew);
        eng_destroy(other);
        if (way == FAIL) { /* what could not be read is gone; it is written for the last way */
            engine = restart(engine, &opts);
            run(engine, tokens, 700, 90, 0, &first);
        }
    }
    eng_destroy(engine);
    remove_dir();
}

Test(eng_tier, fetches_end_with_their_requests, .timeout = 120)
{
    static int32_t tokens[6][700];
    static result first[6], other[6];
    make_dir();
    eng_options opts = disk_options();
    opts.sequences_max = 2;
    eng_engine *engine = start(&opts);
    for (uint32_t i = 0; i < 6; i++) {
        make_prompt(tokens[i], 700, 20 + i);
        run(engine, tokens[i], 700, 4, 0, &first[i]);
    }
    engine = restart(engine, &opts);
    atomic_store(&read_delay_ms, 2000);
    eng_request reqs[6];
    for (uint32_t i = 0; i < 6; i++) {
        reqs[i] = request(tokens[i], 700, 4, 0, &other[i]);
        reqs[i].deadline_ns = i == 1 ? base_now_ns() + 20000000 : 0;
        submit(engine, &reqs[i]);
    }
    usleep(30000);
    uint64_t before = base_now_ns();
    eng_cancel(engine, reqs[0].id); /* it is being fetched */
    wait_done(other, 2);
    cr_assert_lt(base_now_ns() - before, 1500000000u, "a cancel waited for the disk");
    atomic_store(&read_delay_ms, 100);
    cr_assert_eq(other[0].finish, ENG_FINISH_CANCELLED);
    cr_assert_eq(other[1].finish, ENG_FINISH_DEADLINE);
    wait_done(other + 2, 4);
    atomic_store(&read_delay_ms, 0);
    for (uint32_t i = 2; i < 6; i++) {
        /* Once reads have shown how slow they are, computing is quicker. */
        cr_assert(other[i].usage.restored_tokens == 699 || other[i].usage.cached_tokens == 0);
        same(&first[i], &other[i], "fetched behind cancelled ones");
    }
    settle(engine);
    /* And with the engine. */
    engine = restart(engine, &opts);
    atomic_store(&read_delay_ms, 100);
    for (uint32_t i = 0; i < 2; i++) {
        reqs[i] = request(tokens[i], 700, 4, 0, &other[i]);
        submit(engine, &reqs[i]);
    }
    usleep(30000);
    eng_destroy(engine);
    cr_assert_eq(other[0].finish, ENG_FINISH_CANCELLED);
    cr_assert_eq(other[1].finish, ENG_FINISH_CANCELLED);
    remove_dir();
}

/* ---- faults ---- */

/* Spoils `length` bytes in the middle of each file that matches; returns how many there were. */
static uint32_t spoil(const char *pattern, off_t at, size_t length)
{
    char path[sizeof kv_dir + 32];
    glob_t found;
    snprintf(path, sizeof path, "%s/%s", kv_dir, pattern);
    cr_assert_eq(glob(path, 0, NULL, &found), 0, "no %s", path);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        int fd = open(found.gl_pathv[i], O_RDWR);
        uint8_t bytes[256];
        cr_assert_leq(length, sizeof bytes);
        cr_assert_eq(pread(fd, bytes, length, at), (ssize_t)length);
        for (size_t j = 0; j < length; j++)
            bytes[j] ^= 0x5A;
        cr_assert_eq(pwrite(fd, bytes, length, at), (ssize_t)length);
        close(fd);
    }
    uint32_t count = (uint32_t)found.gl_pathc;
    globfree(&found);
    return count;
}

static void cut(const char *pattern, off_t length)
{
    char path[sizeof kv_dir + 32];
    glob_t found;
    snprintf(path, sizeof path, "%s/%s", kv_dir, pattern);
    cr_assert_eq(glob(path, 0, NULL, &found), 0, "no %s", path);
    for (size_t i = 0; i < found.gl_pathc; i++)
        cr_assert_eq(truncate(found.gl_pathv[i], length), 0);
    globfree(&found);
}

Test(eng_tier, damage_is_found_and_computed_again, .timeout = 240)
{
    static int32_t tokens[900];
    static result first, other;
    enum { PLANE, HEAD, CUT, INDEX, ROW, GONE, WAYS };
    for (int way = 0; way < WAYS; way++) {
        make_dir();
        eng_options opts = disk_options();
        eng_engine *engine = start(&opts);
        make_prompt(tokens, 900, 30);
        run(engine, tokens, 900, 4, 0, &first);
        eng_destroy(engine);
        char command[512];
        switch (way) {
        case PLANE: /* a few bytes of the first page's planes */
            spoil("seg-*.kv", 4096 + 2000, 16);
            break;
        case HEAD:
            spoil("seg-*.kv", 4096, 16);
            break;
        case CUT:
            cut("seg-*.kv", 4096 + 100);
            break;
        case INDEX: /* the schema's page */
            spoil("index.db", 0, 200);
            break;
        case ROW: /* another token in every row */
            snprintf(command, sizeof command,
                     "python3 -c \"import sqlite3;c=sqlite3.connect('%s/index.db');"
                     "c.execute('update pages set tokens=zeroblob(length(tokens))');c.commit()\"",
                     kv_dir);
            cr_assert_eq(system(command), 0);
            break;
        default:
            snprintf(command, sizeof command, "rm -r '%s'", kv_dir);
            cr_assert_eq(system(command), 0);
        }
        engine = start(&opts);
        run(engine, tokens, 900, 4, 0, &other);
        same(&first, &other, "after damage");
        cr_assert_eq(other.usage.cached_tokens, 0, "way %d: %u", way, other.usage.cached_tokens);
        if (way == PLANE || way == HEAD)
            cr_assert_gt(eng_get_stats(engine).disk_corrupt, 0);
        settle(engine);
        /* What was computed again is written again. */
        engine = restart(engine, &opts);
        run(engine, tokens, 900, 4, 0, &other);
        cr_assert_eq(other.usage.restored_tokens, 899, "way %d", way);
        same(&first, &other, "written again");
        eng_destroy(engine);
        remove_dir();
    }
}

Test(eng_tier, serving_goes_on_when_the_disk_does_not, .timeout = 120)
{
    static int32_t tokens[3][600];
    static result first[3], other;
    make_dir();
    eng_options opts = disk_options();
    eng_engine *engine = start(&opts);
    for (uint32_t i = 0; i < 3; i++)
        make_prompt(tokens[i], 600, 40 + i);
    atomic_store(&disk_is_full, true);
    run(engine, tokens[0], 600, 8, 0, &first[0]);
    for (int i = 0; i < 200 && !eng_get_stats(engine).disk_full; i++)
        usleep(10000);
    eng_stats stats = eng_get_stats(engine);
    cr_assert(stats.disk_full);
    cr_assert_gt(stats.disk_errors, 0);
    cr_assert_eq(stats.disk_records, 0);
    run(engine, tokens[1], 600, 8, 0, &first[1]);
    cr_assert_eq(first[1].finish, ENG_FINISH_LENGTH);
    check_clean(engine);
    /* Room again: it writes again by itself. */
    atomic_store(&disk_is_full, false);
    for (int i = 0; i < 200 && eng_get_stats(engine).disk_records == 0; i++) {
        usleep(60000);
        run(engine, tokens[2], 600, 8, 0, &first[2]);
    }
    stats = eng_get_stats(engine);
    cr_assert(!stats.disk_full);
    cr_assert_gt(stats.disk_records, 0);
    settle(engine);
    engine = restart(engine, &opts);
    run(engine, tokens[2], 600, 8, 0, &other);
    cr_assert_eq(other.usage.restored_tokens, 599);
    same(&first[2], &other, "written after the disk had room");
    /* Reads that fail: computed again. */
    engine = restart(engine, &opts);
    atomic_store(&reads_fail, true);
    run(engine, tokens[2], 600, 8, 0, &other);
    atomic_store(&reads_fail, false);
    cr_assert_eq(other.usage.cached_tokens, 0);
    same(&first[2], &other, "computed after a failed read");
    cr_assert_gt(eng_get_stats(engine).disk_errors, 0);
    settle(engine);
    eng_destroy(engine);
    remove_dir();
}

Test(eng_tier, an_index_that_cannot_be_had_is_named, .timeout = 120)
{
    base_err err = BASE_ERR_INIT;
    eng_engine *second = NULL;
    make_dir();
    eng_options opts = disk_options();
    eng_engine *engine = start(&opts);
    cr_assert_eq(eng_create(&second, &opts, &err), BASE_CONFLICT);
    cr_assert(strstr(err.text, "index.db") != NULL, "%s", err.text);
    eng_destroy(engine);
    remove_dir();
}

/* ---- kill -9 ---- */

enum { VICTIMS = 5, VICTIM_TOKENS = 700, VICTIM_OUTPUT = 40 };
static int32_t victims[VICTIMS][VICTIM_TOKENS + VICTIM_OUTPUT];

/* Turns on and on, until it is killed; says when the first one was told. */
static void live_until_killed(uint64_t seed, int told)
{
    static result r;
    eng_options opts = disk_options();
    eng_engine *engine = start(&opts);
    for (uint64_t turn = 0;; turn++) {
        base_rand4 d = base_rand(seed, 4, turn);
        int32_t *tokens = victims[d.v[0] % VICTIMS];
        run(engine, tokens, 1 + d.v[1] % VICTIM_TOKENS, 1 + d.v[2] % VICTIM_OUTPUT, 0, &r);
        if (turn == 0 && write(told, "x", 1) != 1)
            abort();
    }
}

Test(eng_tier, killed_at_any_moment_it_brings_back_the_same_bits, .timeout = 3000)
{
    static result plain[VICTIMS], back;
    uint8_t *rows[VICTIMS];
    size_t lengths[VICTIMS], length;
    uint32_t rounds = getenv("WHIMBREL_LONG") != NULL ? 200 : 6, restored = 0, asked = 0;
    uint64_t seed = base_now_ns();
    make_dir();
    eng_options opts = options();
    eng_engine *engine = start(&opts);
    for (uint32_t i = 0; i < VICTIMS; i++) {
        make_prompt(victims[i], VICTIM_TOKENS, 80 + i);
        run(engine, victims[i], VICTIM_TOKENS, 8, 0, &plain[i]);
        rows[i] = rows_of(engine, KV_STORE_TARGET, victims[i], VICTIM_TOKENS, &lengths[i]);
    }
    eng_destroy(engine);
    opts = disk_options();
    for (uint32_t round = 0; round < rounds; round++) {
        int told[2];
        char byte;
        cr_assert_eq(pipe(told), 0);
        pid_t child = fork();
        cr_assert_geq(child, 0);
        if (child == 0)
            live_until_killed(seed + round, told[1]);
        close(told[1]);
        cr_assert_eq(read(told[0], &byte, 1), 1);
        close(told[0]);
        usleep(base_rand(seed, 5, round).v[0] % 200000);
        kill(child, SIGKILL);
        int status;
        cr_assert_eq(waitpid(child, &status, 0), child);
        cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "it died by itself: %x",
                  (unsigned)status);
        engine = start(&opts);
        for (uint32_t i = 0; i < VICTIMS; i++) {
            run(engine, victims[i], VICTIM_TOKENS, 8, 0, &back);
            same(&plain[i], &back, "after a kill");
            restored += back.usage.restored_tokens;
            asked += VICTIM_TOKENS - 1;
            uint8_t *bytes = rows_of(engine, KV_STORE_TARGET, victims[i], VICTIM_TOKENS, &length);
            cr_assert_eq(length, lengths[i]);
            cr_assert_eq(memcmp(bytes, rows[i], length), 0, "seed %llu round %u: rows differ",
                         (unsigned long long)seed, round);
            free(bytes);
        }
        /* The next one starts with little on disk, or with what was written now. */
        base_err err = BASE_ERR_INIT;
        if (round % 2 == 0)
            cr_assert_eq(eng_drop(engine, 1, &err), BASE_OK, "%s", err.text);
        settle(engine);
        eng_destroy(engine);
    }
    cr_log_info("%u rounds: %u of %u tokens restored", rounds, restored, asked);
    cr_assert_gt(restored, 0);
    for (uint32_t i = 0; i < VICTIMS; i++)
        free(rows[i]);
    remove_dir();
}

/* ---- what must not be there ---- */

/* Whether any file of the tier holds these bytes. */
static bool disk_holds(const void *bytes, size_t length)
{
    char path[sizeof kv_dir + 8];
    glob_t found;
    bool holds = false;
    snprintf(path, sizeof path, "%s/*", kv_dir);
    cr_assert_eq(glob(path, 0, NULL, &found), 0);
    for (size_t i = 0; i < found.gl_pathc && !holds; i++) {
        FILE *file = fopen(found.gl_pathv[i], "rb");
        struct stat st;
        cr_assert(file != NULL && fstat(fileno(file), &st) == 0);
        uint8_t *all = malloc((size_t)st.st_size + 1);
        size_t got = fread(all, 1, (size_t)st.st_size, file);
        holds = memmem(all, got, bytes, length) != NULL;
        free(all);
        fclose(file);
    }
    globfree(&found);
    return holds;
}

/* Rows [32, 96) of the first K plane of a page of tokens[0..count). */
static size_t some_rows(eng_engine *engine, const int32_t *tokens, uint32_t count, uint32_t page,
                        uint8_t *out)
{
    uint32_t pages[64], row = eng_model_layout(engine->model)->planes[0].row_bytes;
    uint8_t all[KV_PAGE_TOKENS * 256];
    kv_match match = kv_index_match(engine->index, 1, tokens, count, pages, base_now_ns());
    cr_assert_gt(match.page_count, page);
    cr_assert_leq(row, 256);
    kn_kv_copy_out(engine->kv, all, pages[page], 0, KN_PLANE_K, 0, 96);
    for (uint32_t i = 0; i < match.page_count; i++)
        kv_pool_unref(engine->pool, pages[i]);
    memcpy(out, all + 32 * row, 64 * row);
    return 64 * row;
}

Test(eng_tier, what_is_not_for_the_disk_does_not_reach_it, .timeout = 120)
{
    static int32_t tokens[1000];
    static result first, other;
    static uint8_t shared[64 * 256], secret[64 * 256];
    make_dir();
    eng_options opts = disk_options();
    eng_engine *engine = start(&opts);
    make_prompt(tokens, 1000, 50);
    run(engine, tokens, 384, 1, 0, &first); /* this may be written */
    eng_request req = request(tokens, 1000, 20, 0, &other);
    req.no_disk = true;
    submit(engine, &req);
    wait_done(&other, 1);
    cr_assert_eq(other.usage.cached_tokens, 384);
    cr_assert_eq(eng_peek_cached(engine, 1, tokens, 1000), 1000); /* memory has it */
    settle(engine);
    size_t length = some_rows(engine, tokens, 1000, 1, shared);
    cr_assert_eq(some_rows(engine, tokens, 1000, 5, secret), length);
    cr_assert(disk_holds(shared, length));
    cr_assert(disk_holds(tokens + 200, 40 * sizeof *tokens));
    cr_assert(!disk_holds(secret, length));
    cr_assert(!disk_holds(tokens + 600, 40 * sizeof *tokens));
    engine = restart(engine, &opts);
    cr_assert(!disk_holds(secret, length));
    cr_assert(!disk_holds(tokens + 600, 40 * sizeof *tokens));
    run(engine, tokens, 1000, 4, 0, &other);
    cr_assert_eq(other.usage.restored_tokens, 384);
    eng_destroy(engine);
    remove_dir();
}

Test(eng_tier, what_is_erased_is_gone_from_memory_and_disk, .timeout = 120)
{
    static int32_t tokens[2][900];
    static result first[2], other;
    static uint8_t kept[64 * 256], gone[64 * 256];
    base_err err = BASE_ERR_INIT;
    make_dir();
    eng_options opts = disk_options();
    eng_engine *engine = start(&opts);
    make_prompt(tokens[0], 900, 60);
    memcpy(tokens[1], tokens[0], 256 * sizeof **tokens); /* they share two pages */
    make_prompt(tokens[1] + 256, 644, 61);
    for (int i = 0; i < 2; i++)
        run(engine, tokens[i], 900, 4, 0, &first[i]);
    settle(engine);
    size_t length = some_rows(engine, tokens[0], 900, 1, kept);
    some_rows(engine, tokens[0], 900, 4, gone);
    cr_assert(disk_holds(kept, length) && disk_holds(gone, length));
    cr_assert_eq(eng_erase(engine, 1, tokens[0], 900, 256, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(eng_peek_cached(engine, 1, tokens[0], 900), 256);
    cr_assert_eq(eng_peek_cached(engine, 1, tokens[1], 900), 900);
    cr_assert(disk_holds(kept, length));
    cr_assert(!disk_holds(gone, length));
    cr_assert(!disk_holds(tokens[0] + 600, 40 * sizeof **tokens));
    engine = restart(engine, &opts);
    run(engine, tokens[0], 900, 4, 0, &other);
    cr_assert_eq(other.usage.restored_tokens, 256);
    same(&first[0], &other, "erased and computed again");
    /* A fetch that is under way when its rows are erased lists nothing. */
    engine = restart(engine, &opts);
    atomic_store(&read_delay_ms, 100);
    eng_request req = request(tokens[1], 900, 4, 0, &other);
    submit(engine, &req);
    usleep(30000);
    cr_assert_eq(eng_drop(engine, 1, &err), BASE_OK, "%s", err.text);
    wait_done(&other, 1);
    atomic_store(&read_delay_ms, 0);
    cr_assert_eq(other.usage.cached_tokens, 0);
    same(&first[1], &other, "dropped while fetched");
    cr_assert_eq(eng_drop(engine, 1, &err), BASE_OK, "%s", err.text);
    cr_assert_eq(eng_get_stats(engine).disk_records, 0);
    cr_assert(!disk_holds(kept, length));
    settle(engine);
    eng_destroy(engine);
    remove_dir();
}

/* ---- little memory ---- */

Test(eng_tier, what_left_memory_is_told_apart_and_comes_from_disk, .timeout = 120)
{
    static int32_t tokens[6][900];
    static result first[6], other;
    make_dir();
    eng_options opts = disk_options();
    eng_engine *engine = start(&opts);
    uint64_t page_bytes = eng_get_info(engine)->page_bytes;
    opts.kv_bytes = page_bytes * (2048 / 128 + 4); /* two of the six fit */
    for (int disk = 0; disk < 2; disk++) {
        opts.disk = disk ? kv_dir : NULL;
        engine = restart(engine, &opts);
        for (uint32_t i = 0; i < 6; i++) {
            make_prompt(tokens[i], 900, 70 + i);
            run(engine, tokens[i], 900, 8, 0, &first[i]);
            settle(engine);
            cr_assert_eq(first[i].usage.evicted_tokens, 0);
        }
        run(engine, tokens[0], 900, 8, 0, &other);
        same(&first[0], &other, "evicted");
        cr_assert_eq(other.usage.cached_tokens, disk ? 899 : 0);
        cr_assert_eq(other.usage.restored_tokens, disk ? 899 : 0);
        cr_assert_eq(other.usage.evicted_tokens, disk ? 0 : 896);
    }
    eng_destroy(engine);
    remove_dir();
}

/* Prompts that share, branch, come back and crowd each other out of a memory of a few pages, over
 * restarts, give what they give alone. */
Test(eng_tier, random_turns_equal_uncached_ones, .timeout = 3000)
{
    enum { LIVE = 4, TREES = 3, LONGEST = 900 };
    static int32_t tokens[LIVE][LONGEST];
    static result cached[LIVE], alone;
    const char *seed_text = getenv("WHIMBREL_TEST_SEED");
    uint64_t seed = seed_text != NULL ? strtoull(seed_text, NULL, 10) : 20;
    uint32_t rounds = getenv("WHIMBREL_LONG") != NULL ? 400 : 12, restored = 0;
    make_dir();
    eng_options plain = options(), opts = disk_options();
    eng_engine *reference = start(&plain);
    opts.kv_bytes = eng_get_info(reference)->page_bytes * (2048 / 128 + 3);
    opts.step_rows_max = 100;
    opts.prefill_chunk = 50;
    opts.disk_bytes = 8 << 20;
    eng_engine *engine = start(&opts);
    for (uint32_t round = 0; round < rounds; round++) {
        base_rand4 dice = base_rand(seed, 2, round);
        if (dice.v[0] % 5 == 0)
            engine = restart(engine, &opts);
        eng_request reqs[LIVE];
        uint32_t counts[LIVE];
        for (uint32_t i = 0; i < LIVE; i++) {
            base_rand4 d = base_rand(seed, 3, round * LIVE + i);
            /* A path in one of a few trees: a trunk, then a branch of it. */
            uint32_t trunk = d.v[0] % 500, branch = d.v[1] % 3;
            counts[i] = 1 + d.v[2] % (LONGEST - 1);
            make_prompt(tokens[i], counts[i], 100 + d.v[3] % TREES);
            if (counts[i] > trunk)
                make_prompt(tokens[i] + trunk, counts[i] - trunk, 200 + branch);
            reqs[i] = request(tokens[i], counts[i], 1 + d.v[1] % 24, 0, &cached[i]);
            reqs[i].no_disk = d.v[0] % 7 == 0;
            submit(engine, &reqs[i]);
            if (d.v[1] % 11 == 0)
                eng_cancel(engine, reqs[i].id);
        }
        wait_done(cached, LIVE);
        for (uint32_t i = 0; i < LIVE; i++) {
            eng_request req = request(tokens[i], counts[i], reqs[i].max_tokens, 0, &alone);
            req.space = 1000 + round * LIVE + i;
            submit(reference, &req);
            wait_done(&alone, 1);
            restored += cached[i].usage.restored_tokens;
            if (cached[i].finish == ENG_FINISH_CANCELLED)
                alone.count = cached[i].count;
            else
                cr_assert_eq(cached[i].finish, ENG_FINISH_LENGTH, "seed %llu round %u",
                             (unsigned long long)seed, round);
            same(&alone, &cached[i], "random turns");
        }
        if (round % 4 == 0)
            settle(engine);
    }
    cr_assert_gt(restored, 0);
    cr_log_info("%u rounds, %u tokens restored", rounds, restored);
    settle(engine);
    eng_destroy(engine);
    eng_destroy(reference);
    remove_dir();
}
