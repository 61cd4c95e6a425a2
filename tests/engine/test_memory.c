/* Models and the whole engine on a device whose memory the host cannot touch (guard_backend.h):
 * every bit as on the cpu. */
#include "tests/engine/guard_backend.h"
#include "tests/engine/loop_rig.h"
#include "tests/engine/model_rig.h"

/* ---- blocks ---- */

static kn_device *open_device(const kn_backend *backend)
{
    const kn_device_options options = {.backend = backend,
                                       .variant = "auto",
                                       .threads = 1,
                                       .rows_max = 4,
                                       .width_max = 64,
                                       .context_max = 128};
    kn_device *device = NULL;
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(kn_device_create(&device, &options, &err), BASE_OK, "%s", err.text);
    return device;
}

Test(memory, pieces_are_aligned_and_apart)
{
    kn_device *device = open_device(&guard_backend);
    float *a, *c;
    uint8_t *b;
    const eng_piece pieces[] = {{&a, 3, sizeof *a}, {&b, 0, 1}, {&c, 65, sizeof *c}};
    eng_memory memory;
    cr_assert_eq(eng_memory_take(&memory, device, pieces, 3, NULL), BASE_OK);
    cr_expect_eq((uintptr_t)a % 256, 0);
    cr_expect_null(b);
    cr_expect_eq((uint8_t *)c - (uint8_t *)a, 256);
    cr_expect_eq(memory.bytes, 256 + 512);
    eng_memory_free(&memory);
    eng_memory_free(&memory);
    cr_expect_eq(guard.held, 0);
    kn_device_destroy(device);
}

Test(memory, arrays_move_where_memory_is_not_shared)
{
    static const float VALUES[] = {1, 2, 3}, MORE[] = {4, 5};
    for (int shared = 0; shared < 2; shared++) {
        kn_device *device = open_device(shared ? NULL : &guard_backend);
        const float *a = VALUES, *b = MORE;
        float room[3], *read;
        const eng_piece pieces[] = {{&a, 3, sizeof *a}, {&b, 2, sizeof *b}};
        eng_memory memory;
        cr_expect_eq(eng_memory_is_shared(device), shared != 0);
        cr_assert_eq(eng_memory_move(&memory, device, pieces, 2, NULL), BASE_OK);
        cr_expect_eq(a == VALUES, shared != 0);
        read = eng_memory_read(device, shared ? NULL : room, a, sizeof room);
        cr_expect_arr_eq(read, VALUES, sizeof VALUES);
        cr_expect_eq(read == room, shared == 0);
        read = eng_memory_read(device, shared ? NULL : room, b, sizeof MORE);
        cr_expect_arr_eq(read, MORE, sizeof MORE);
        eng_memory_free(&memory);
        kn_device_destroy(device);
    }
}

Test(memory, too_much_is_an_error_and_changes_nothing)
{
    kn_device *device = open_device(&guard_backend);
    float *a = NULL, *b = NULL;
    base_err err = BASE_ERR_INIT;
    eng_memory memory;
    guard.memory_max = 1 << 20;
    const eng_piece large[] = {{&a, 1, 1}, {&b, 1 << 20, 1}};
    cr_expect_eq(eng_memory_take(&memory, device, large, 2, &err), BASE_NOMEM);
    cr_expect_not_null(strstr(err.text, "guard: no memory for"));
    cr_expect_null(a);
    cr_expect_null(memory.block);
    const eng_piece overflow[] = {{&a, SIZE_MAX / 2, 4}},
                    sum[] = {{&a, SIZE_MAX / 4, 1}, {&b, SIZE_MAX / 2, 1}};
    cr_expect_eq(eng_memory_take(&memory, device, overflow, 1, NULL), BASE_NOMEM);
    cr_expect_eq(eng_memory_take(&memory, device, sum, 2, NULL), BASE_NOMEM);
    kn_device_destroy(device);
}

/* ---- models ---- */

#define PROMPT 300
#define STEPS 40
#define BLOCK 7

/* All that a model gives for a prompt in chunks, single steps, a copied page and drafts. */
typedef struct outcome {
    float *logits; /* [PROMPT + 2 * STEPS, vocab] */
    int32_t drafts[3 * BLOCK];
    float confidence[3 * BLOCK];
    float draft_logits[3 * BLOCK * 16]; /* the first of each row */
    uint32_t vocab;
} outcome;

static char dir[64], draft_dir[128];

static void write_model(const char *shape)
{
    base_err err = BASE_ERR_INIT;
    strcpy(dir, "/tmp/test-memory-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    snprintf(draft_dir, sizeof draft_dir, "%s/dspark", dir);
    cr_assert_eq(eng_random__write(dir, shape, 0, 5, true, &err), BASE_OK, "%s", err.text);
}

static void remove_model(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", dir);
    cr_assert_eq(system(command), 0);
}

static outcome run_model(const kn_backend *backend, const char *kv)
{
    static const eng_sampling GREEDY = {.top_p = 1, .repetition_penalty = 1};
    outcome o;
    int32_t ids[PROMPT + STEPS];
    rig r;
    rig_open_on(&r, backend, dir, "auto", kv, 512, draft_dir, KN_KV_BF16);
    o.vocab = r.config->vocab;
    o.logits = malloc((size_t)(PROMPT + 2 * STEPS) * o.vocab * sizeof *o.logits);
    make_prompt(ids, PROMPT + STEPS, 8);
    rig_run(&r, 0, ids, 0, PROMPT, 77, o.logits);
    rig_run(&r, 0, ids + PROMPT, PROMPT, STEPS, 1, o.logits + (size_t)PROMPT * o.vocab);
    /* Sequence 1 goes on from copies of the first two pages and of 44 rows of the third. */
    for (uint32_t i = 0; i < 3; i++) {
        const uint32_t rows = i < 2 ? KN_PAGE_TOKENS : PROMPT - 2 * KN_PAGE_TOKENS;
        kn_kv_copy_page(r.kv, r.pages[1][i], r.pages[0][i], rows);
        kn_kv_copy_page(r.draft_kv, r.pages[1][i], r.pages[0][i], rows);
    }
    rig_run(&r, 1, ids + PROMPT, PROMPT, STEPS, 3, o.logits + (size_t)(PROMPT + STEPS) * o.vocab);
    eng_draft_input inputs[3];
    for (uint32_t i = 0; i < 3; i++)
        inputs[i] = (eng_draft_input){.anchor = ids[200 + i],
                                      .anchor_pos = 200 + i,
                                      .pages = r.pages[i % 2],
                                      .sampling = &GREEDY,
                                      .output_index = i};
    eng_draft_propose(r.draft, r.draft_kv, inputs, 3, BLOCK, o.drafts, o.confidence);
    const float *draft_logits = eng_draft_last_logits(r.draft);
    for (uint32_t i = 0; i < 3 * BLOCK; i++)
        memcpy(o.draft_logits + 16 * i, draft_logits + (size_t)i * o.vocab, 16 * sizeof(float));
    rig_close(&r);
    return o;
}

static void compare(const char *shape, const char *kv)
{
    write_model(shape);
    outcome host = run_model(NULL, kv), device = run_model(&guard_backend, kv);
    remove_model();
    const size_t row = host.vocab * sizeof(float);
    for (uint32_t i = 0; i < PROMPT + 2 * STEPS; i++)
        cr_assert_eq(memcmp(host.logits + i * (size_t)host.vocab,
                            device.logits + i * (size_t)host.vocab, row),
                     0, "%s, %s: row %u differs", shape, kv, i);
    cr_expect_arr_eq(host.drafts, device.drafts, sizeof host.drafts);
    cr_expect_arr_eq(host.confidence, device.confidence, sizeof host.confidence);
    cr_expect_arr_eq(host.draft_logits, device.draft_logits, sizeof host.draft_logits);
    cr_expect_gt(guard.replays, 10, "%u graphs were run, %u of them again", guard.graph_runs,
                 guard.replays);
    free(host.logits);
    free(device.logits);
}

Test(memory, tiny_is_the_same_to_the_bit, .timeout = 120)
{
    compare("tiny", "nvfp4");
}

Test(memory, mxfp8_experts_and_bf16_pages_too, .timeout = 120)
{
    compare("tiny-mxfp8", "bf16");
}

Test(memory, nano_is_the_same_to_the_bit, .timeout = 120)
{
    compare("nano", "nvfp4");
}

typedef struct seen {
    rig *r;
    double sum[64];
} seen;

static void see_layer(void *ctx, uint32_t layer, const float *x, const int32_t *blocks,
                      const float *margin, const int32_t *route_ids, const float *route_weights)
{
    seen *s = ctx;
    const eng_model_config *c = s->r->config;
    for (uint32_t i = 0; i < s->r->rows * c->hidden; i++)
        s->sum[layer] += (double)x[i] * (i % 7);
    for (uint32_t i = 0; blocks != NULL && i < s->r->rows * c->index_heads; i++)
        s->sum[layer] += blocks[i * c->topk_blocks] + (isfinite(margin[i]) ? (double)margin[i] : 1);
    for (uint32_t i = 0; route_ids != NULL && i < s->r->rows * c->experts_topk; i++)
        s->sum[layer] += route_ids[i] * (double)route_weights[i];
}

Test(memory, a_probe_sees_the_same, .timeout = 60)
{
    int32_t ids[40];
    seen host, device;
    make_prompt(ids, 40, 9);
    for (int shared = 0; shared < 2; shared++) {
        rig r;
        seen *s = shared ? &host : &device;
        *s = (seen){.r = &r};
        const eng_model_probe probe = {.layer = see_layer, .ctx = s};
        rig_open_on(&r, shared ? NULL : &guard_backend, "random:tiny", "auto", "nvfp4", 256, NULL,
                    KN_KV_BF16);
        cr_assert_eq(eng_model_set_probe(r.model, &probe, NULL), BASE_OK);
        rig_run(&r, 0, ids, 0, 40, 17, NULL);
        rig_close(&r);
    }
    cr_expect_arr_eq(host.sum, device.sum, sizeof host.sum);
    cr_expect_neq(host.sum[3], 0);
}

/* ---- the engine ---- */

#define REQUESTS 5

static void run_engine(const kn_backend *backend, const char *model, int32_t drafts,
                       result *results)
{
    static int32_t prompts[REQUESTS][400];
    static const uint32_t LENGTHS[REQUESTS] = {300, 90, 300, 290, 17};
    eng_options opts = options();
    eng_request requests[REQUESTS];
    opts.kernels = backend;
    opts.model = model;
    opts.draft_tokens = drafts;
    opts.kv_bytes = 16 << 20;
    eng_engine *engine = start(&opts);
    cr_expect_str_eq(eng_get_info(engine)->numerics, backend != NULL ? "guard-1" : "cpu-2");
    /* The third and fourth part from the first inside its third page. */
    for (uint32_t i = 0; i < REQUESTS; i++)
        make_prompt(prompts[i], LENGTHS[i], i == 2 || i == 3 ? 0 : i);
    prompts[2][270] = prompts[3][280] = 7;
    for (uint32_t i = 0; i < REQUESTS; i++)
        requests[i] = request(prompts[i], LENGTHS[i], 60, i % 2 == 0 ? 0 : 0.9f, &results[i]);
    submit(engine, &requests[0]);
    wait_done(results, 1);
    for (uint32_t i = 1; i < REQUESTS; i++)
        submit(engine, &requests[i]);
    wait_done(results + 1, REQUESTS - 1);
    check_clean(engine);
    eng_destroy(engine);
}

static void compare_engines(const char *model, int32_t drafts)
{
    static result host[REQUESTS], device[REQUESTS];
    run_engine(NULL, model, drafts, host);
    run_engine(&guard_backend, model, drafts, device);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        same(&host[i], &device[i], model);
        cr_expect_eq(host[i].usage.cached_tokens, device[i].usage.cached_tokens);
        cr_expect_eq(device[i].finish, ENG_FINISH_LENGTH);
    }
    cr_expect_gt(device[2].usage.cached_tokens, 256, "no page was shared and copied");
    cr_expect_eq(guard.held, 0);
}

Test(memory, the_engine_answers_alike, .timeout = 120)
{
    compare_engines(MODEL, 0);
}

Test(memory, the_engine_answers_alike_with_drafts, .timeout = 120)
{
    write_model("tiny");
    compare_engines(dir, 4);
    remove_model();
}

/* ---- faults ---- */

static void run_lost(eng_engine *engine)
{
    static int32_t prompt[200];
    static result r[2];
    eng_request requests[2];
    base_err err = BASE_ERR_INIT;
    make_prompt(prompt, 200, 1);
    for (uint32_t i = 0; i < 2; i++)
        requests[i] = request(prompt, 200 - i, 30, 0, &r[i]);
    cr_assert_eq(eng_submit_all(engine, requests, 2, NULL, &err), BASE_OK, "%s", err.text);
    wait_done(r, 2);
    for (uint32_t i = 0; i < 2; i++)
        cr_expect_eq(r[i].finish, guard.lost ? ENG_FINISH_ERROR : ENG_FINISH_LENGTH);
    check_clean(engine);
    if (!guard.lost)
        return;
    cr_expect_eq(eng_submit(engine, &requests[0], &err), BASE_CLOSED);
    cr_expect_not_null(strstr(err.text, "lost the device"), "%s", err.text);
}

/* Whatever operation it is that loses it. */
Test(memory, a_lost_device_ends_what_runs_and_refuses_the_rest, .timeout = 120)
{
    eng_options opts = options();
    uint32_t lost = 0;
    opts.kernels = &guard_backend;
    opts.kv_bytes = 16 << 20;
    for (long at = 0; at < 4000; at = at * 2 + 7) {
        guard.fail_op = at;
        eng_engine *engine = start(&opts);
        run_lost(engine);
        lost += guard.lost;
        eng_destroy(engine);
        cr_expect_eq(guard.held, 0, "operation %ld", at);
    }
    cr_expect_gt(lost, 5);
}

Test(memory, every_allocation_may_fail, .timeout = 120)
{
    eng_options opts = options();
    opts.kernels = &guard_backend;
    opts.kv_bytes = 16 << 20;
    for (long at = 0;; at++) {
        base_err err = BASE_ERR_INIT;
        eng_engine *engine = NULL;
        guard.fail_alloc = at;
        base_code code = eng_create(&engine, &opts, &err);
        if (code == BASE_OK) {
            cr_expect_gt(at, 3);
            eng_destroy(engine);
            break;
        }
        cr_assert_eq(code, BASE_NOMEM, "allocation %ld: %s", at, err.text);
        cr_assert_neq(err.text[0], '\0');
        cr_assert_eq(guard.held, 0, "allocation %ld", at);
        cr_assert_null(guard.inner, "allocation %ld", at);
    }
}

/* ---- modules ---- */

Test(memory, a_module_serves_as_the_cpu_does, .timeout = 60)
{
    static result host, device;
    static int32_t prompt[150];
    make_prompt(prompt, 150, 2);
    for (int i = 0; i < 2; i++) {
        eng_options opts = options();
        opts.backend = i == 0 ? "cpu" : "auto"; /* there is no whimbrel-cuda.so, but one for hip */
        opts.modules = MODULES;
        opts.kv_bytes = 16 << 20;
        eng_engine *engine = start(&opts);
        cr_expect_str_eq(eng_get_info(engine)->numerics, i == 0 ? "cpu-2" : "guard-1");
        run(engine, prompt, 150, 40, 0, i == 0 ? &host : &device);
        check_clean(engine);
        eng_destroy(engine);
    }
    same(&host, &device, "module");
}

Test(memory, modules_that_cannot_serve_are_named)
{
    static const struct {
        const char *backend, *modules, *text;
    } CASES[] = {
        {"nix", "/nowhere", "there is no whimbrel-nix.so in /nowhere"},
        {"../hip", MODULES, "none of auto, cpu, cuda, hip"},
        {"", MODULES, "none of auto, cpu, cuda, hip"},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        eng_options opts = options();
        base_err err = BASE_ERR_INIT;
        eng_engine *engine = NULL;
        opts.backend = CASES[i].backend;
        opts.modules = CASES[i].modules;
        cr_expect_eq(eng_create(&engine, &opts, &err), BASE_UNSUPPORTED);
        cr_expect_null(engine);
        cr_expect_not_null(strstr(err.text, CASES[i].text), "%s", err.text);
    }
}
