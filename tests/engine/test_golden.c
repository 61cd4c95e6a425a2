/* The bundled model against the oracle: tests/vectors/nano-nvfp4.safetensors
 * (tests/vectors/README.md says what is in it). */
#include "tests/engine/golden_rig.h"

/* The text is what it is, so some prompts are sensitive: the file says how far noise moves each
 * row's logits. */
static const golden_bounds NANO = {.logits = 0.02,
                                   .moved_counts = true,
                                   .cascades = true,
                                   .gap = 0.05,
                                   .draft_logits = 0.05,
                                   .draft_gap = 0.1,
                                   .confidence = 0.02};

/* Sanitizers make the long prompts cost minutes and check nothing that the short ones do not. */
#ifdef __SANITIZE_ADDRESS__
#define LONGEST 513
#else
#define LONGEST 8192
#endif

static void need_nano(void)
{
    if (access(MODELS "/nano/model.safetensors", R_OK) != 0)
        cr_skip_test("config/models/nano has no weights yet");
}

Test(golden, nano_matches_the_oracle, .timeout = 500)
{
    need_nano();
    golden_file("nano-nvfp4.safetensors", MODELS, "nano", "auto", "nvfp4", true, LONGEST, 256,
                &NANO);
}

/* ---- long operations from the oracle's own inputs ---- */

/* Pages that hold the given planes of one layer, for positions < count, and a table of them in
 * descending order. */
static void fill_plane(kn_kv *kv, const uint32_t *pages, uint32_t layer, kn_plane_kind kind,
                       uint32_t head, const uint8_t *rows, uint32_t count, uint32_t row_bytes)
{
    for (uint32_t at = 0; at < count; at += KN_PAGE_TOKENS) {
        uint32_t n = count - at < KN_PAGE_TOKENS ? count - at : KN_PAGE_TOKENS;
        kn_kv_copy_in(kv, rows + (size_t)at * row_bytes, pages[at / KN_PAGE_TOKENS], layer, kind,
                      head, n);
    }
}

static void check_select(rig *r, const eng_files *v, const char *name)
{
    const eng_model_config *c = r->config;
    const uint32_t layer = 6, rows = (uint32_t)rig_tensor(v, name, ".pos")->shape[0];
    const uint32_t count = (uint32_t)rig_tensor(v, name, ".ik_rows")->shape[0],
                   lists = rows * c->index_heads;
    float *iq = rig_values(v, name, ".iq"), *margin = rig_values(v, name, ".margin");
    uint8_t *ik = rig_values(v, name, ".ik_rows");
    int32_t *pos = rig_values(v, name, ".pos"), *want = rig_values(v, name, ".blocks");
    int32_t *got = malloc((size_t)lists * c->topk_blocks * sizeof *got);
    uint32_t *seq = calloc(rows, sizeof *seq);
    float *got_margin = malloc(lists * sizeof *got_margin);
    const uint32_t *tables[1] = {r->pages[0]};
    kn_device *device = eng_model_device(r->model);
    fill_plane(r->kv, r->pages[0], layer, KN_PLANE_INDEX, 0, ik, count,
               kn_kv_row_bytes(KN_KV_NVFP4, c->index_dim));
    kn_rows batch = {.rows = rows, .pos = pos, .seq = seq, .pages = tables};
    kn_select select = {.index_q = iq,
                        .index_heads = c->index_heads,
                        .index_dim = c->index_dim,
                        .layer = layer,
                        .topk = c->topk_blocks,
                        .init = c->init_blocks,
                        .local = c->local_blocks,
                        .blocks = got,
                        .margin = got_margin};
    device->ops->select(device, r->kv, &batch, &select);
    for (uint32_t i = 0; i < lists; i++)
        if ((double)margin[i] > 1e-4)
            cr_expect_eq(memcmp(got + i * c->topk_blocks, want + i * c->topk_blocks,
                                c->topk_blocks * sizeof *got),
                         0, "%s: row %u head %u", name, i / c->index_heads, i % c->index_heads);
    free(iq);
    free(margin);
    free(ik);
    free(pos);
    free(want);
    free(got);
    free(seq);
    free(got_margin);
}

static void check_attend(rig *r, const eng_files *v, const char *name)
{
    const eng_model_config *c = r->config;
    const uint32_t layer = 6, rows = (uint32_t)rig_tensor(v, name, ".pos")->shape[0];
    const uint32_t count = (uint32_t)rig_tensor(v, name, ".k_rows")->shape[1];
    const uint32_t row_bytes = kn_kv_row_bytes(KN_KV_NVFP4, c->head_dim);
    const size_t width = (size_t)c->q_heads * c->head_dim;
    float *q = rig_values(v, name, ".q"), *want = rig_values(v, name, ".sparse");
    uint8_t *k = rig_values(v, name, ".k_rows"), *val = rig_values(v, name, ".v_rows");
    int32_t *pos = rig_values(v, name, ".pos"), *blocks = rig_values(v, name, ".blocks");
    float *got = malloc(rows * width * sizeof *got);
    uint32_t *seq = calloc(rows, sizeof *seq);
    const uint32_t *tables[1] = {r->pages[0]};
    kn_device *device = eng_model_device(r->model);
    for (uint32_t h = 0; h < c->kv_heads; h++) {
        fill_plane(r->kv, r->pages[0], layer, KN_PLANE_K, h, k + (size_t)h * count * row_bytes,
                   count, row_bytes);
        fill_plane(r->kv, r->pages[0], layer, KN_PLANE_V, h, val + (size_t)h * count * row_bytes,
                   count, row_bytes);
    }
    kn_rows batch = {.rows = rows, .pos = pos, .seq = seq, .pages = tables};
    kn_attend attend = {.q = q,
                        .q_heads = c->q_heads,
                        .kv_heads = c->kv_heads,
                        .head_dim = c->head_dim,
                        .layer = layer,
                        .blocks = blocks,
                        .topk = c->topk_blocks,
                        .out = got};
    device->ops->attend(device, r->kv, &batch, &attend);
    double largest = 0;
    for (size_t i = 0; i < rows * width; i++)
        largest = fmax(largest, fabs((double)want[i]));
    double d = rig_distance(got, want, rows * width);
    cr_expect(d <= 1e-5 * largest, "%s: differs by %g of %g", name, d, largest);
    free(q);
    free(want);
    free(k);
    free(val);
    free(pos);
    free(blocks);
    free(got);
    free(seq);
}

Test(golden, long_selection_and_attention_match_the_oracle, .timeout = 300)
{
    static const char *const VARIANTS[] = {"auto", "ref"};
    need_nano();
    eng_files *v = rig_vectors("nano-nvfp4.safetensors");
    for (size_t i = 0; i < sizeof VARIANTS / sizeof *VARIANTS; i++) {
        rig r;
        rig_open(&r, MODELS "/nano", VARIANTS[i], "nvfp4", 8192, NULL, KN_KV_BF16);
        check_select(&r, v, "8000.select.6");
        check_attend(&r, v, "2049.attend.6");
        rig_close(&r);
    }
    eng_files_close(v);
}

/* The reference variant is plain and slow: the shortest prompt and its continuation. */
Test(golden, nano_on_the_reference_variant_matches_the_oracle, .timeout = 500)
{
    need_nano();
    golden_file("nano-nvfp4.safetensors", MODELS, "nano", "ref", "nvfp4", false, 1, 128, &NANO);
}
