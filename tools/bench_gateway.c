/* g.ledger: what the ledger costs a turn that brings a long history, a conversation of 200 items
 * and 400 KB (a tool loop: calls with arguments, results of some kilobytes), on one thread.
 *
 *   g.ledger.slices     all elements but the last one as they came before: the scan, their trees
 *                       and notes, the match that gives every assistant item its tokens     us
 *   g.ledger.canonical  none of them: parsed and canonicalised                        us
 *   g.ledger.match      of both, the match alone                                      us
 *
 * The bytes are what gw_body_mend left, so its pass (it is every body's) is in none of them. */
#include <jansson.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "gateway/body.h"
#include "gateway/ledger.h"
#include "gateway/slice.h"
#include "tools/bench.h"

#define ITEMS 200
#define RUN_TOKENS 80
#define ROUNDS 7
#define REPS 5

typedef struct commit {
    gw_commit commit;
    sem_t done;
} commit;

typedef struct house {
    char path[64];
    gw_ledger *ledger;
    gw_root root;
    base_buf bodies[2]; /* without the last element, and with it */
    bool wrong;
} house;

/* ---- the conversation ---- */

static void make_body(base_buf *out, uint32_t count)
{
    char filler[3600];
    for (size_t i = 0; i < sizeof filler; i++)
        filler[i] = "the quick brown fox jumps, "[i % 27];
    base_buf_init(out, 512 << 10);
    base_buf_puts(out,
                  "{\"model\":\"nano\",\"messages\":[{\"role\":\"user\",\"content\":\"Go on.\"}");
    for (uint32_t i = 1; i < count; i++)
        if (i % 2)
            base_buf_printf(
                out,
                ",{\"role\":\"assistant\",\"content\":\"Step %u.\",\"tool_calls\":[{\"id\":"
                "\"own-%u\",\"type\":\"function\",\"function\":{\"name\":\"run\",\"arguments\":"
                "\"{\\\"path\\\":\\\"%.300s\\\",\\\"line\\\":%u}\"}}]}",
                i, i, filler, i);
        else
            base_buf_printf(out,
                            ",{\"role\":\"tool\",\"tool_call_id\":\"own-%u\",\"content\":\"%u "
                            "%.3550s\\n\"}",
                            i - 1, i, filler);
    base_buf_puts(out, "]}");
}

static eng_text text_of(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);
    return (eng_text){json_string_value(value), json_string_length(value)};
}

/* As the chat dialect reads them; in the arena. */
static eng_item *read_items(const json_t *body, uint32_t *count, base_arena *arena)
{
    const json_t *list = json_object_get(body, "messages");
    *count = (uint32_t)json_array_size(list);
    eng_item *items = base_arena_calloc(arena, *count + 1, sizeof *items);
    for (uint32_t i = 0; i < *count; i++) {
        const json_t *message = json_array_get(list, i), *calls, *function;
        const char *role = json_string_value(json_object_get(message, "role"));
        items[i].role = role[0] == 'u'   ? ENG_ROLE_USER
                        : role[0] == 't' ? ENG_ROLE_TOOL
                                         : ENG_ROLE_ASSISTANT;
        items[i].text = text_of(message, "content");
        if ((calls = json_object_get(message, "tool_calls")) == NULL)
            continue;
        eng_call *call = base_arena_calloc(arena, 1, sizeof *call);
        function = json_object_get(json_array_get(calls, 0), "function");
        *call = (eng_call){text_of(json_array_get(calls, 0), "id"), text_of(function, "name"),
                           text_of(function, "arguments")};
        items[i].calls = call;
        items[i].call_count = 1;
    }
    return items;
}

/* ---- the ledger ---- */

static void on_done(gw_commit *c)
{
    sem_post(&((commit *)c)->done);
}

/* One turn an assistant item. */
static bool fill(house *h)
{
    static const uint32_t steps[] = {RUN_TOKENS};
    base_arena *arena = base_arena_create(1 << 20, 512 << 20);
    json_t *body = NULL;
    char *text = base_arena_copy(arena, h->bodies[1].data, h->bodies[1].length);
    bool ok = text && !gw_body_parse(&body, text, h->bodies[1].length, NULL);
    uint32_t count = 0;
    eng_item *items = ok ? read_items(body, &count, arena) : NULL;
    int32_t *prompt = base_arena_calloc(arena, ITEMS * 1000, sizeof *prompt);
    for (uint32_t i = 1; ok && i < count; i += 2) {
        int32_t run[RUN_TOKENS];
        for (int32_t k = 0; k < RUN_TOKENS; k++)
            run[k] = (int32_t)i * 100 + k;
        gw_match match;
        gw_id turn = gw_id_mint("turn_");
        ok = !gw_ledger_match(h->ledger, &match, &h->root, items, i, arena, NULL);
        commit c = {.commit = {.done = on_done,
                               .retention = GW_RETAIN_CACHED,
                               .turn = turn.text,
                               .session = "sess_bench",
                               .dialect = "chat",
                               .model = "bench",
                               .root = &h->root,
                               .match = &match,
                               .items = items,
                               .item_count = i,
                               .answer = items[i],
                               .splice = true,
                               .prompt = prompt,
                               .prompt_count = i * 1000,
                               .run = run,
                               .run_count = RUN_TOKENS,
                               .steps = steps,
                               .step_count = 1}};
        sem_init(&c.done, 0, 0);
        ok = ok && gw_ledger_commit(h->ledger, &c.commit);
        if (ok)
            sem_wait(&c.done);
        ok = ok && c.commit.stored;
        sem_destroy(&c.done);
    }
    json_decref(body);
    base_arena_destroy(arena);
    return ok;
}

static bool open_house(house *h)
{
    *h = (house){.root = {.template_id = "bench", .thinking = ENG_THINK_ENABLED}};
    strcpy(h->path, "/tmp/whimbrel-bench-XXXXXX");
    uint64_t salt;
    make_body(&h->bodies[0], ITEMS - 1);
    make_body(&h->bodies[1], ITEMS);
    gw_ledger_options options = {.path = h->path, .cached_ttl_s = 3600};
    return mkdtemp(h->path) && !gw_ledger_open(&h->ledger, &options, NULL) &&
           !gw_ledger_tenant_put(h->ledger, &h->root.tenant, &salt, "default", NULL) && fill(h);
}

static void close_house(house *h)
{
    static const char *const files[] = {"whimbrel.db", "whimbrel.db-wal", "whimbrel.db-shm",
                                        "whimbrel.lock"};
    char path[128];
    gw_ledger_close(h->ledger);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "%s/%s", h->path, files[i]);
        unlink(path);
    }
    rmdir(h->path);
    base_buf_deinit(&h->bodies[0]);
    base_buf_deinit(&h->bodies[1]);
}

/* Microseconds from the body to its tokens; `match` of that the match alone. */
static double turn(house *h, gw_slices *slices, int which, double *match_us)
{
    base_arena *arena = base_arena_create(1 << 20, 256 << 20);
    char *text = base_arena_copy(arena, h->bodies[which].data, h->bodies[which].length);
    json_t *body = NULL;
    gw_match match = {0};
    uint32_t count = 0;
    uint64_t begin = base_now_ns(), middle = 0;
    bool ok = text && !gw_slices_parse(slices, &body, text, h->bodies[which].length, 1, NULL);
    eng_item *items = ok ? read_items(body, &count, arena) : NULL;
    middle = base_now_ns();
    ok = ok && !gw_ledger_match(h->ledger, &match, &h->root, items, count, arena, NULL);
    uint64_t end = base_now_ns();
    h->wrong |= !ok || match.spliced != count / 2 || match.rendered;
    for (uint32_t i = 1; ok && i < count; i += 2)
        h->wrong |= items[i].token_count != RUN_TOKENS || items[i].tokens[0] != (int32_t)i * 100;
    json_decref(body);
    base_arena_destroy(arena);
    *match_us = (double)(end - middle) * 1e-3;
    return (double)(end - begin) * 1e-3;
}

static double best_turn(house *h, bool known, double *match_us)
{
    double best = 0;
    for (int i = 0; i < REPS; i++) {
        double match, us;
        gw_slices *slices = known ? gw_ledger_slices(h->ledger) : NULL;
        if (known) {
            gw_slices_clear(slices);
            turn(h, slices, 0, &match); /* the turn before */
        }
        us = turn(h, slices, 1, &match);
        if (i == 0 || us < best) {
            best = us;
            *match_us = match;
        }
    }
    return best;
}

bool bench_gateway(void)
{
    static const char *const names[] = {"g.ledger.slices", "g.ledger.canonical", "g.ledger.match"};
    if (!bench_wanted(names[0]) && !bench_wanted(names[1]) && !bench_wanted(names[2]))
        return true;
    house h;
    samples rows[3] = {0};
    bool ok = open_house(&h);
    for (int r = 0; ok && r < ROUNDS; r++) {
        double match;
        rows[0].v[rows[0].n++] = best_turn(&h, true, &match);
        rows[2].v[rows[2].n++] = match;
        rows[1].v[rows[1].n++] = best_turn(&h, false, &match);
    }
    char config[96];
    snprintf(config, sizeof config, "%d items, %zu KB, %d runs of %d tokens in memory", ITEMS,
             h.bodies[1].length / 1000, ITEMS / 2, RUN_TOKENS);
    ok = ok && !h.wrong;
    for (int i = 0; ok && i < 3; i++)
        if (bench_wanted(names[i]))
            bench_report(names[i], config, "us", false, &rows[i], i == 1 ? 8000 : 500,
                         "the aim, not a limit of the machine");
    if (!ok)
        fprintf(stderr, "g.ledger: a wrong result\n");
    close_house(&h);
    return ok;
}
