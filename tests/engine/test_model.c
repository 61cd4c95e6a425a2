/* The forward pass: golden vectors of the tiny models on every variant, and that a row's bits
 * depend on nothing but its own sequence. */
#include "tests/engine/golden_rig.h"

static const golden_bounds NVFP4 = {
    .logits = 0.01, .margin = 0.01, .draft_logits = 0.01, .draft_gap = 0.02, .confidence = 0.005};
static const golden_bounds F32 = {
    .logits = 1e-4, .margin = 0.01, .draft_logits = 2e-4, .draft_gap = 1e-3, .confidence = 1e-4};

Test(model, tiny_with_nvfp4_pages_matches_the_oracle, .timeout = 240)
{
    golden_file("tiny-nvfp4.safetensors", VECTORS, "tiny", "auto", "nvfp4", true, 1500, 256,
                &NVFP4);
}

Test(model, tiny_with_f32_pages_matches_the_oracle, .timeout = 240)
{
    golden_file("tiny-f32.safetensors", VECTORS, "tiny", "auto", "f32", true, 700, 100, &F32);
}

Test(model, m3_with_f32_pages_matches_the_oracle, .timeout = 240)
{
    golden_file("tiny-m3-f32.safetensors", VECTORS, "tiny-m3", "auto", "f32", false, 700, 256,
                &F32);
}

Test(model, m3_with_nvfp4_pages_matches_the_oracle, .timeout = 240)
{
    golden_file("tiny-m3-nvfp4.safetensors", VECTORS, "tiny-m3", "auto", "nvfp4", false, 700, 33,
                &NVFP4);
}

Test(model, reference_variant_matches_the_oracle, .timeout = 240)
{
    golden_file("tiny-nvfp4.safetensors", VECTORS, "tiny", "ref", "nvfp4", true, 129, 256, &NVFP4);
    golden_file("tiny-m3-f32.safetensors", VECTORS, "tiny-m3", "ref", "f32", false, 128, 256, &F32);
}

/* The logits of `file`, computed by a program that nobody here wrote, of checkpoint tiny-m3. */
static void outside_logits(const char *file, double bound)
{
    static const char *const VARIANTS[] = {"ref", "auto"};
    static const char *const PROMPTS[] = {"1", "128", "513", "700"};
    eng_files *v = rig_vectors(file);
    for (int i = 0; i < 2; i++) {
        rig r;
        rig_open(&r, VECTORS "/tiny-m3", VARIANTS[i], "f32", 1024, NULL, KN_KV_F32);
        for (int p = 0; p < 4; p++) {
            const uint32_t vocab = r.config->vocab;
            const uint32_t tokens = (uint32_t)rig_tensor(v, PROMPTS[p], ".ids")->shape[0];
            const uint32_t count = (uint32_t)rig_tensor(v, PROMPTS[p], ".rows")->shape[0];
            int32_t *ids = rig_values(v, PROMPTS[p], ".ids");
            int32_t *rows = rig_values(v, PROMPTS[p], ".rows");
            float *want = rig_values(v, PROMPTS[p], ".logits");
            float *got = malloc((size_t)tokens * vocab * sizeof *got);
            rig_run(&r, 0, ids, 0, tokens, 256, got);
            for (uint32_t k = 0; k < count; k++) {
                double d =
                    rig_distance(got + (size_t)rows[k] * vocab, want + (size_t)k * vocab, vocab);
                cr_expect(d <= bound, "%s, %s, %s tokens, row %d: logits differ by %g", file,
                          VARIANTS[i], PROMPTS[p], rows[k], d);
            }
            free(got);
            free(want);
            free(rows);
            free(ids);
        }
        rig_close(&r);
    }
    eng_files_close(v);
}

/* It computes in float32, which moves its own logits by up to 6.5e-6 of the 9 that they reach. */
Test(model, m3_matches_the_transformers_library, .timeout = 240)
{
    outside_logits("tiny-m3-transformers.safetensors", 3e-5);
}

/* Its attention rounds values to half floats, whatever the pages hold: a part in 2,048. */
Test(model, m3_matches_llama_cpp, .timeout = 240)
{
    outside_logits("tiny-m3-llama.safetensors", 3e-3);
}

/* ---- equal bits ---- */

static void make_ids(int32_t *ids, uint32_t count, uint32_t seed)
{
    for (uint32_t i = 0; i < count; i++)
        ids[i] = (int32_t)(base_rand(seed, 1, i).v[0] % 256);
}

static float *logits_of(const char *spec, const char *variant, const char *kv, const int32_t *ids,
                        uint32_t count, uint32_t chunk)
{
    rig r;
    rig_open(&r, spec, variant, kv, 1024, NULL, KN_KV_BF16);
    float *logits = malloc((size_t)count * r.config->vocab * sizeof *logits);
    rig_run(&r, 0, ids, 0, count, chunk, logits);
    rig_close(&r);
    return logits;
}

#define EQUAL_TOKENS 700

Test(model, chunks_do_not_change_a_bit, .timeout = 240)
{
    static const uint32_t CHUNKS[] = {1, 7, 128, 129};
    static const char *const KV[] = {"nvfp4", "fp8", "bf16", "f32"};
    int32_t ids[EQUAL_TOKENS];
    make_ids(ids, EQUAL_TOKENS, 3);
    for (size_t k = 0; k < sizeof KV / sizeof *KV; k++) {
        float *whole = logits_of("random:tiny", "auto", KV[k], ids, EQUAL_TOKENS, 256);
        for (size_t i = 0; i < sizeof CHUNKS / sizeof *CHUNKS; i++) {
            float *cut = logits_of("random:tiny", "auto", KV[k], ids, EQUAL_TOKENS, CHUNKS[i]);
            cr_expect_eq(memcmp(whole, cut, (size_t)EQUAL_TOKENS * 320 * sizeof *cut), 0,
                         "%s pages: chunks of %u change a logit", KV[k], CHUNKS[i]);
            free(cut);
        }
        free(whole);
    }
}

Test(model, variants_give_the_same_bits, .timeout = 240)
{
    static const char *const SPECS[] = {"random:tiny", VECTORS "/tiny-m3"};
    int32_t ids[EQUAL_TOKENS];
    make_ids(ids, EQUAL_TOKENS, 4);
    kn_device_options probe = {
        .variant = "avx512", .threads = 1, .rows_max = 1, .width_max = 16, .context_max = 128};
    kn_device *device;
    if (kn_device_create(&device, &probe, NULL) != BASE_OK)
        cr_skip_test("this processor has no AVX-512");
    kn_device_destroy(device);
    for (size_t i = 0; i < sizeof SPECS / sizeof *SPECS; i++) {
        float *a = logits_of(SPECS[i], "avx2", "nvfp4", ids, EQUAL_TOKENS, 256);
        float *b = logits_of(SPECS[i], "avx512", "nvfp4", ids, EQUAL_TOKENS, 64);
        cr_expect_eq(memcmp(a, b, (size_t)EQUAL_TOKENS * 320 * sizeof *a), 0, "%s differs",
                     SPECS[i]);
        free(a);
        free(b);
    }
}

/* With F32 pages nothing is discrete but selection and routing, so that the two may differ by
 * rounding only. */
Test(model, reference_and_tuned_variants_agree, .timeout = 240)
{
    int32_t ids[200];
    make_ids(ids, 200, 5);
    float *a = logits_of("random:tiny?seed=9", "ref", "f32", ids, 200, 100);
    float *b = logits_of("random:tiny?seed=9", "auto", "f32", ids, 200, 100);
    double d = rig_distance(a, b, 200 * 320);
    cr_expect(d < 1e-3, "logits differ by %g", d);
    free(a);
    free(b);
}

Test(model, a_row_does_not_depend_on_its_neighbours, .timeout = 240)
{
    enum { LENGTH = 300, STEP = 40 };
    static const uint32_t LENGTHS[RIG_SEQUENCES] = {LENGTH, LENGTH - 77, LENGTH - 150};
    int32_t ids[RIG_SEQUENCES][LENGTH];
    float *alone[RIG_SEQUENCES];
    rig r;
    for (uint32_t s = 0; s < RIG_SEQUENCES; s++) {
        make_ids(ids[s], LENGTH, 10 + s);
        alone[s] = logits_of("random:tiny", "auto", "nvfp4", ids[s], LENGTHS[s], 256);
    }
    rig_open(&r, "random:tiny", "auto", "nvfp4", 1024, NULL, KN_KV_BF16);
    float *logits = malloc((size_t)RIG_ROWS * 320 * sizeof *logits);
    /* Steps that hold rows of all three, each at its own place. */
    for (uint32_t at = 0; at < LENGTH; at += STEP) {
        const uint32_t *tables[RIG_SEQUENCES] = {r.pages[0], r.pages[1], r.pages[2]};
        int32_t token[RIG_ROWS], pos[RIG_ROWS];
        uint32_t seq[RIG_ROWS], pick[RIG_ROWS], n = 0;
        for (uint32_t s = 0; s < RIG_SEQUENCES; s++)
            for (uint32_t i = at; i < at + STEP && i < LENGTHS[s]; i++, n++) {
                token[n] = ids[s][i];
                pos[n] = (int32_t)i;
                seq[n] = s;
                pick[n] = n;
            }
        kn_rows rows = {.rows = n, .token = token, .pos = pos, .seq = seq, .pages = tables};
        eng_model_forward(r.model, r.kv, &rows, pick, n, logits, NULL, 0, NULL);
        for (uint32_t i = 0; i < n; i++)
            cr_expect_eq(memcmp(logits + (size_t)i * 320, alone[seq[i]] + (size_t)pos[i] * 320,
                                320 * sizeof *logits),
                         0, "sequence %u position %d differs in company", seq[i], pos[i]);
    }
    free(logits);
    for (uint32_t s = 0; s < RIG_SEQUENCES; s++)
        free(alone[s]);
    rig_close(&r);
}

/* Rows written past the accepted ones and then overwritten leave no trace. */
Test(model, overwritten_rows_leave_no_trace, .timeout = 240)
{
    enum { LENGTH = 260 };
    int32_t ids[LENGTH], other[8];
    rig r;
    make_ids(ids, LENGTH, 20);
    make_ids(other, 8, 21);
    float *plain = logits_of("random:tiny", "auto", "nvfp4", ids, LENGTH, 256);
    float *logits = malloc((size_t)LENGTH * 320 * sizeof *logits);
    rig_open(&r, "random:tiny", "auto", "nvfp4", 1024, NULL, KN_KV_BF16);
    for (uint32_t at = 0; at < LENGTH; at += 5) {
        uint32_t n = LENGTH - at < 5 ? LENGTH - at : 5;
        rig_run(&r, 0, other, at, 8, 8, NULL);
        rig_run(&r, 0, ids + at, at, n, n, logits + (size_t)at * 320);
    }
    cr_expect_eq(memcmp(plain, logits, (size_t)LENGTH * 320 * sizeof *logits), 0);
    free(plain);
    free(logits);
    rig_close(&r);
}

Test(model, mxfp8_experts_as_in_m3, .timeout = 240)
{
    int32_t ids[200];
    make_ids(ids, 200, 6);
    float *a = logits_of("random:tiny-mxfp8", "ref", "f32", ids, 200, 100);
    float *b = logits_of("random:tiny-mxfp8", "auto", "f32", ids, 200, 100);
    double d = rig_distance(a, b, 200 * 320);
    cr_expect(d < 1e-3, "logits differ by %g", d);
    free(a);
    free(b);
}

/* The format lets tensors start anywhere; a header that is one byte longer moves all of them to odd
 * addresses. */
Test(model, odd_addresses_change_nothing, .timeout = 240)
{
    static const char *const SPECS[] = {"tiny", "tiny-mxfp8"};
    static uint8_t bytes[1 << 20];
    char dir[] = "/tmp/test-model-XXXXXX", path[128], command[128];
    int32_t ids[150];
    make_ids(ids, 150, 7);
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    for (size_t i = 0; i < sizeof SPECS / sizeof *SPECS; i++) {
        base_err err = BASE_ERR_INIT;
        uint64_t header;
        cr_assert_eq(eng_random__write(dir, SPECS[i], 0, 3, false, &err), BASE_OK, "%s", err.text);
        float *even = logits_of(dir, "auto", "nvfp4", ids, 150, 150);
        FILE *f = fopen(path, "rb");
        size_t length = fread(bytes, 1, sizeof bytes - 1, f);
        fclose(f);
        memcpy(&header, bytes, 8);
        memmove(bytes + 8 + header + 1, bytes + 8 + header, length - 8 - header);
        bytes[8 + header] = ' ';
        header++;
        memcpy(bytes, &header, 8);
        f = fopen(path, "wb");
        cr_assert_eq(fwrite(bytes, 1, length + 1, f), length + 1);
        fclose(f);
        float *odd = logits_of(dir, "auto", "nvfp4", ids, 150, 150);
        cr_expect_eq(memcmp(even, odd, 150 * 320 * sizeof *odd), 0, "%s", SPECS[i]);
        free(even);
        free(odd);
    }
    snprintf(command, sizeof command, "rm -r %s", dir);
    cr_assert_eq(system(command), 0);
}

/* ---- taps, layout, random shapes ---- */

typedef struct tap_trace {
    rig *r;
    float *hidden; /* [layers, rows, hidden] */
} tap_trace;

static void tap_layer(void *ctx, uint32_t layer, const float *x, const int32_t *blocks,
                      const float *margin, const int32_t *route_ids, const float *route_weights)
{
    tap_trace *t = ctx;
    const eng_model_config *c = t->r->config;
    memcpy(t->hidden + (size_t)layer * t->r->rows * c->hidden, x,
           (size_t)t->r->rows * c->hidden * sizeof *x);
    cr_expect((route_ids != NULL) == (c->moe[layer] != 0));
    cr_expect((blocks != NULL) == (c->sparse[layer] != 0));
    for (uint32_t i = 0; route_ids != NULL && i < t->r->rows; i++) {
        float sum = 0;
        for (uint32_t k = 0; k < c->experts_topk; k++) {
            sum += route_weights[i * c->experts_topk + k];
            cr_expect(k == 0 ||
                      route_ids[i * c->experts_topk + k] > route_ids[i * c->experts_topk + k - 1]);
        }
        cr_expect_float_eq(sum, c->routed_scale, 1e-5f);
    }
}

Test(model, features_are_the_raw_residual_after_a_layer)
{
    static const uint32_t LAYERS[] = {0, 2, 3};
    int32_t ids[20], pos[20];
    uint32_t seq[20] = {0}, pick = 19;
    rig r;
    rig_open(&r, "random:tiny", "auto", "nvfp4", 256, NULL, KN_KV_BF16);
    const uint32_t hidden = r.config->hidden, *tables[1] = {r.pages[0]};
    float logits[320], *features = malloc(20 * 3 * hidden * sizeof *features);
    tap_trace trace = {.r = &r, .hidden = malloc((size_t)4 * 20 * hidden * sizeof(float))};
    eng_model_probe probe = {.layer = tap_layer, .ctx = &trace};
    make_ids(ids, 20, 30);
    for (int i = 0; i < 20; i++)
        pos[i] = i;
    kn_rows rows = {.rows = 20, .token = ids, .pos = pos, .seq = seq, .pages = tables};
    r.rows = 20;
    cr_assert_eq(eng_model_set_probe(r.model, &probe, NULL), BASE_OK);
    eng_model_forward(r.model, r.kv, &rows, &pick, 1, logits, LAYERS, 3, features);
    for (uint32_t i = 0; i < 20; i++)
        for (uint32_t k = 0; k < 3; k++)
            cr_expect_eq(memcmp(features + (i * 3 + k) * hidden,
                                trace.hidden + ((size_t)LAYERS[k] * 20 + i) * hidden,
                                hidden * sizeof(float)),
                         0);
    free(features);
    free(trace.hidden);
    rig_close(&r);
}

Test(model, layout_lists_planes_in_record_order)
{
    base_err err = BASE_ERR_INIT;
    eng_model *m;
    eng_model_options options = {.kv = "nvfp4", .threads = 1, .rows_max = 8, .context_max = 256};
    cr_assert_eq(eng_model_load(&m, VECTORS "/tiny-m3", &options, &err), BASE_OK, "%s", err.text);
    const kv_layout *layout = eng_model_layout(m);
    kn_kv_shape shape = eng_model_kv_shape(m, 1);
    /* Layer 0 is dense: two K, two V; layers 1 and 2 have an index plane behind them. */
    cr_assert_eq(layout->plane_count, 4 + 5 + 5);
    cr_expect_eq(layout->planes[0].type, KV_PLANE_K);
    cr_expect_eq(layout->planes[1].head, 1);
    cr_expect_eq(layout->planes[2].type, KV_PLANE_V);
    cr_expect_eq(layout->planes[4].layer, 1);
    cr_expect_eq(layout->planes[8].type, KV_PLANE_INDEX);
    cr_expect_eq(layout->planes[0].row_bytes, 18);
    cr_expect_eq(layout->record_bytes, kn_kv_page_bytes(&shape));
    eng_model_destroy(m);
}

Test(model, fingerprint_follows_the_weights)
{
    char seen[3][33];
    static const char *const SPECS[] = {"random:tiny?seed=1", "random:tiny?seed=2", "random:tiny"};
    for (int i = 0; i < 3; i++) {
        base_err err = BASE_ERR_INIT;
        eng_model *m;
        eng_model_options options = {.threads = 1, .rows_max = 8, .context_max = 256};
        cr_assert_eq(eng_model_load(&m, SPECS[i], &options, &err), BASE_OK, "%s", err.text);
        snprintf(seen[i], 33, "%s", eng_model_fingerprint(m));
        cr_expect_eq(strlen(seen[i]), 32);
        eng_model_destroy(m);
    }
    cr_expect_str_neq(seen[0], seen[1]);
    cr_expect_str_eq(seen[0], seen[2]);
}

/* The folder is gone as soon as the model is loaded; the tokenizer stays readable. */
Test(model, random_shapes_leave_nothing_behind)
{
    base_err err = BASE_ERR_INIT;
    eng_model *m;
    eng_model_options options = {.threads = 1, .rows_max = 8, .context_max = 256};
    char path[256], text[64] = "";
    cr_assert_eq(eng_model_load(&m, "random:nano?layers=3&seed=7", &options, &err), BASE_OK, "%s",
                 err.text);
    ssize_t length = readlink(eng_model_tokenizer_path(m), path, sizeof path - 1);
    cr_assert(length > 0);
    path[length] = '\0';
    cr_expect_not_null(strstr(path, "/tokenizer.json (deleted)"), "%s", path);
    *strrchr(path, '/') = '\0';
    cr_expect_neq(access(path, F_OK), 0, "%s is still there", path);
    snprintf(path, sizeof path, "%s", eng_model_tokenizer_path(m));
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f);
    cr_expect_not_null(fgets(text, sizeof text, f));
    cr_expect_eq(text[0], '{');
    fclose(f);
    cr_expect_null(eng_model_dir(m));
    cr_expect_eq(eng_model_get_config(m)->layers, 3);
    cr_expect_eq(eng_model_get_config(m)->moe[0], 0);
    cr_expect_eq(eng_model_get_config(m)->moe[1], 1);
    eng_model_destroy(m);
    cr_expect_neq(access(path, F_OK), 0);
}

Test(model, bad_specs_and_options_are_named)
{
    static const struct {
        const char *spec, *kv, *variant, *text;
        uint32_t context;
    } CASES[] = {
        {"random:huge", "nvfp4", "auto", "huge", 0},
        {"random:tiny?layers=5", "nvfp4", "auto", "has 4 layers, not 5", 0},
        {"random:tiny?layers=x", "nvfp4", "auto", "layers=x", 0},
        {"random:tiny?depth=2", "nvfp4", "auto", "depth=2", 0},
        {"random:m3.1-flash", "nvfp4", "auto", "GB of weights", 0},
        {"random:tiny", "int4", "auto", "int4", 0},
        {"random:tiny", "nvfp4", "sse9", "sse9", 0},
        {"random:tiny", "nvfp4", "auto", "40000", 40000},
        {"/nowhere", "nvfp4", "auto", "/nowhere/config.json", 0},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        base_err err = BASE_ERR_INIT;
        eng_model *m;
        eng_model_options options = {.kv = CASES[i].kv,
                                     .variant = CASES[i].variant,
                                     .threads = 1,
                                     .rows_max = 8,
                                     .context_max = CASES[i].context};
        cr_expect_neq(eng_model_load(&m, CASES[i].spec, &options, &err), BASE_OK, "%s",
                      CASES[i].spec);
        cr_expect_null(m);
        cr_expect_not_null(strstr(err.text, CASES[i].text), "%s: \"%s\" lacks \"%s\"",
                           CASES[i].spec, err.text, CASES[i].text);
    }
}
