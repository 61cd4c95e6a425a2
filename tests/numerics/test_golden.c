/* The golden vectors of the outside oracle, operation by operation, from its own inputs and the
 * checkpoint tests/vectors/ tiny: codes, scales, selections and routes equal, floats within 1e-5 of
 * the row's largest value (the bound that the vectors state). Every variant. */
#include "tests/numerics/support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { HIDDEN = 128, Q = 4, KV = 2, DIM = 32 };

static const tensors *checkpoint;
static const tensors *ops_file;

static void open_files(void)
{
    checkpoint = open_tensors("tiny/model.safetensors");
    ops_file = open_tensors("ops.safetensors");
}

TestSuite(golden, .init = open_files);

/* Runs `body` with a device of every variant that the processor has. */
static const char *const all_variants[] = {"ref", "avx2", "avx512"};

static kn_device *device_of(int variant)
{
    return open_device(all_variants[variant], 2);
}

#define FOR_EACH_DEVICE(d)                                                                         \
    for (int variant_ = 0; variant_ < 3; variant_++)                                               \
        for (kn_device *d = device_of(variant_); d; kn_device_destroy(d), d = NULL)

/* "layers.L." before a name, or the name alone for layer -1. */
static const char *name_of(int layer, const char *name)
{
    static char full[192];
    if (layer < 0)
        snprintf(full, sizeof full, "language_model.%s", name);
    else
        snprintf(full, sizeof full, "language_model.model.layers.%d.%s", layer, name);
    return full;
}

/* A matrix of the checkpoint in the format it is stored in. */
static kn_weight weight_of(int layer, const char *short_name)
{
    const char *name = name_of(layer, short_name);
    kn_weight w = {.scale_global = 1.0f};
    if (strstr(name, ".experts.")) {
        const tensor t = get_tensor(checkpoint, "%s.weight_packed", name);
        w.type = KN_NVFP4;
        w.rows = t.shape[0];
        w.cols = t.shape[1] * 2;
        w.data = t.data;
        w.scale = get_tensor(checkpoint, "%s.weight_scale", name).data;
        memcpy(&w.scale_global, get_tensor(checkpoint, "%s.weight_global_scale", name).data, 4);
        return w;
    }
    const tensor t = get_tensor(checkpoint, "%s.weight", name);
    w.rows = t.shape[0];
    w.cols = t.shape[1];
    w.data = t.data;
    if (strcmp(t.dtype, "BF16") == 0) {
        w.type = KN_BF16;
    } else if (strcmp(t.dtype, "F32") == 0) {
        w.type = KN_F32;
    } else {
        w.type = KN_MXFP8;
        w.scale = get_tensor(checkpoint, "%s.weight_scale_inv", name).data;
    }
    return w;
}

/* A norm's weights in float. */
static float *norm_of(int layer, const char *short_name)
{
    const tensor t = get_tensor(checkpoint, "%s.weight", name_of(layer, short_name));
    float *w = zeroed(t.count * sizeof *w);
    for (size_t i = 0; i < t.count; i++)
        w[i] = kn_bf16_to_f32(((const uint16_t *)t.data)[i]);
    return w;
}

static const float *floats(const char *fmt, int layer)
{
    char name[64];
    snprintf(name, sizeof name, fmt, layer);
    const tensor t = get_tensor(ops_file, "%s", name);
    cr_assert_str_eq(t.dtype, "F32", "%s", name);
    return t.data;
}

static const int32_t *ints(const char *fmt, int layer)
{
    char name[64];
    snprintf(name, sizeof name, fmt, layer);
    const tensor t = get_tensor(ops_file, "%s", name);
    cr_assert_str_eq(t.dtype, "I32", "%s", name);
    return t.data;
}

static const uint8_t *bytes(const char *fmt, int layer)
{
    char name[64];
    snprintf(name, sizeof name, fmt, layer);
    const tensor t = get_tensor(ops_file, "%s", name);
    cr_assert_str_eq(t.dtype, "U8", "%s", name);
    return t.data;
}

/* Tables by the formula of ops.h: the angle is a float product. */
static kn_rope rope_of(uint32_t positions, float theta, uint32_t rotary_dim)
{
    const uint32_t half = rotary_dim / 2;
    float *c = zeroed((size_t)positions * half * sizeof *c);
    float *s = zeroed((size_t)positions * half * sizeof *s);
    for (uint32_t p = 0; p < positions; p++)
        for (uint32_t i = 0; i < half; i++) {
            const float inv_freq = (float)pow(theta, -2.0 * i / rotary_dim);
            const float angle = (float)p * inv_freq;
            c[p * half + i] = (float)cos((double)angle);
            s[p * half + i] = (float)sin((double)angle);
        }
    return (kn_rope){.cos = c, .sin = s, .rotary_dim = rotary_dim};
}

static uint32_t positions_of(const int32_t *pos, uint32_t count)
{
    int32_t top = 0;
    for (uint32_t i = 0; i < count; i++)
        top = pos[i] > top ? pos[i] : top;
    return (uint32_t)top + 1;
}

/* ---- single operations ---- */

Test(golden, norm)
{
    FOR_EACH_DEVICE(d)
    {
        float y[6 * HIDDEN];
        d->ops->norm(d, y, floats("norm.x", 0), floats("norm.w", 0), 6, HIDDEN, 1e-6f);
        within_rows(y, floats("norm.y", 0), 6, HIDDEN, 1e-5f, d->ops->name);
    }
}

Test(golden, head_norm_and_rope)
{
    const int32_t *pos = ints("rope.pos", 0);
    const kn_rope rope = rope_of(positions_of(pos, 8), 1e4f, 16);
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 8; k++) {
            cr_assert_float_eq(rope.cos[pos[i] * 8 + k], floats("rope.cos", 0)[i * 8 + k], 2e-7);
            cr_assert_float_eq(rope.sin[pos[i] * 8 + k], floats("rope.sin", 0)[i * 8 + k], 2e-7);
        }
    FOR_EACH_DEVICE(d)
    {
        float x[8 * 2 * DIM];
        memcpy(x, floats("rope.x", 0), sizeof x);
        d->ops->head_norm_rope(d, x, floats("rope.w", 0), 8, 2, DIM, 1e-6f, &rope, pos);
        within_rows(x, floats("rope.y", 0), 16, DIM, 1e-5f, d->ops->name);
    }
}

Test(golden, embed)
{
    const kn_weight table = weight_of(-1, "model.embed_tokens");
    FOR_EACH_DEVICE(d)
    {
        float y[5 * HIDDEN];
        d->ops->embed(d, y, &table, ints("embed.ids", 0), 5);
        same_bits(y, floats("embed.y", 0), 5 * HIDDEN, d->ops->name);
    }
}

Test(golden, linear)
{
    static const struct {
        int layer;
        const char *name, *y;
    } t[] = {{1, "self_attn.q_proj", "linear.mxfp8.y"},
             {1, "block_sparse_moe.experts.2.w1", "linear.nvfp4.y"},
             {-1, "lm_head", "linear.bf16.y"}};
    for (int i = 0; i < 3; i++) {
        const kn_weight w = weight_of(t[i].layer, t[i].name);
        FOR_EACH_DEVICE(d)
        {
            float y[5 * 320];
            d->ops->linear(d, y, floats("linear.x", 0), &w, 5, false);
            within_rows(y, floats(t[i].y, 0), 5, w.rows, 1e-5f, d->ops->name);
        }
    }
}

Test(golden, head)
{
    const kn_weight head = weight_of(-1, "lm_head");
    const float *norm = norm_of(-1, "model.norm");
    static const uint32_t pick[4] = {0, 1, 2, 3};
    FOR_EACH_DEVICE(d)
    {
        float y[4 * 320];
        d->ops->head(d, y, floats("head.x", 0), norm, &head, pick, 4, HIDDEN, 1e-6f);
        within_rows(y, floats("head.logits", 0), 4, 320, 1e-5f, d->ops->name);
    }
}

Test(golden, mlp)
{
    const kn_weight gate = weight_of(0, "mlp.gate_proj");
    const kn_weight up = weight_of(0, "mlp.up_proj");
    const kn_weight down = weight_of(0, "mlp.down_proj");
    const float *norm = norm_of(0, "post_attention_layernorm");
    FOR_EACH_DEVICE(d)
    {
        float x[6 * HIDDEN];
        memcpy(x, floats("mlp.0.x", 0), sizeof x);
        const kn_mlp a = {.x = x,
                          .hidden = HIDDEN,
                          .inner = gate.rows,
                          .eps = 1e-6f,
                          .norm = norm,
                          .gate = &gate,
                          .up = &up,
                          .down = &down,
                          .act = {.alpha = 1.702f, .limit = 7.0f}};
        d->ops->mlp(d, 6, &a);
        within_rows(x, floats("mlp.0.y", 0), 6, HIDDEN, 1e-5f, d->ops->name);
    }
}

/* The activation alone, through an MLP whose matrices are unit ones: gate and up values stand in
 * the row. */
Test(golden, activation)
{
    enum { N = 400, PAIRS = 40 };
    const float *gate = floats("act.gate", 0);
    const float *up = floats("act.up", 0);
    const float *y = floats("act.y", 0);
    float *norm = zeroed(2 * PAIRS * sizeof *norm);
    float *unit_gate = zeroed(PAIRS * 2 * PAIRS * sizeof *unit_gate);
    float *unit_up = zeroed(PAIRS * 2 * PAIRS * sizeof *unit_up);
    float *unit_down = zeroed(2 * PAIRS * PAIRS * sizeof *unit_down);
    for (int i = 0; i < PAIRS; i++) {
        unit_gate[i * 2 * PAIRS + i] = 1.0f;
        unit_up[i * 2 * PAIRS + PAIRS + i] = 1.0f;
        unit_down[i * PAIRS + i] = 1.0f;
    }
    const kn_weight g = {
        .type = KN_F32, .rows = PAIRS, .cols = 2 * PAIRS, .data = unit_gate, .scale_global = 1.0f};
    const kn_weight u = {
        .type = KN_F32, .rows = PAIRS, .cols = 2 * PAIRS, .data = unit_up, .scale_global = 1.0f};
    const kn_weight dn = {
        .type = KN_F32, .rows = 2 * PAIRS, .cols = PAIRS, .data = unit_down, .scale_global = 1.0f};
    FOR_EACH_DEVICE(d)
    {
        for (int first = 0; first < N; first += PAIRS) {
            /* The norm divides by the root mean square; its weight puts the row's size back. */
            float x[2 * PAIRS];
            double square = 0.0;
            for (int i = 0; i < PAIRS; i++) {
                x[i] = gate[first + i];
                x[PAIRS + i] = up[first + i];
                square += (double)x[i] * x[i] + (double)x[PAIRS + i] * x[PAIRS + i];
            }
            for (int i = 0; i < 2 * PAIRS; i++)
                norm[i] = (float)(sqrt(square / (2 * PAIRS) + 1e-6) - 1.0);
            const kn_mlp a = {.x = x,
                              .hidden = 2 * PAIRS,
                              .inner = PAIRS,
                              .eps = 1e-6f,
                              .norm = norm,
                              .gate = &g,
                              .up = &u,
                              .down = &dn,
                              .act = {.alpha = 1.702f, .limit = 7.0f}};
            d->ops->mlp(d, 1, &a);
            for (int i = 0; i < PAIRS; i++) {
                const float want = gate[first + i] + y[first + i];
                cr_assert_float_eq(x[i], want,
                                   1e-5f * (fabsf(gate[first + i]) + fabsf(y[first + i]) + 1.0f),
                                   "%s: gate %g up %g: %g, not %g", d->ops->name, gate[first + i],
                                   up[first + i], x[i], want);
            }
        }
    }
}

static void check_moe(int layer)
{
    enum { EXPERTS = 4, ROWS = 8, TOPK = 2 };
    kn_weight w1[EXPERTS], w2[EXPERTS], w3[EXPERTS];
    for (int e = 0; e < EXPERTS; e++) {
        char name[64];
        snprintf(name, sizeof name, "block_sparse_moe.experts.%d.w1", e);
        w1[e] = weight_of(layer, name);
        name[strlen(name) - 1] = '2';
        w2[e] = weight_of(layer, name);
        name[strlen(name) - 1] = '3';
        w3[e] = weight_of(layer, name);
    }
    const kn_weight gate = weight_of(layer, "block_sparse_moe.shared_experts.gate_proj");
    const kn_weight up = weight_of(layer, "block_sparse_moe.shared_experts.up_proj");
    const kn_weight down = weight_of(layer, "block_sparse_moe.shared_experts.down_proj");
    const kn_weight router = weight_of(layer, "block_sparse_moe.gate");
    const float *norm = norm_of(layer, "post_attention_layernorm");
    const float *bias =
        get_tensor(checkpoint, "%s", name_of(layer, "block_sparse_moe.e_score_correction_bias"))
            .data;
    FOR_EACH_DEVICE(d)
    {
        float x[ROWS * HIDDEN], weights[ROWS * TOPK];
        int32_t ids[ROWS * TOPK];
        memcpy(x, floats("moe.%d.x", layer), sizeof x);
        const kn_moe a = {.x = x,
                          .hidden = HIDDEN,
                          .inner = w1[0].rows,
                          .shared_inner = gate.rows,
                          .experts = EXPERTS,
                          .topk = TOPK,
                          .eps = 1e-6f,
                          .routed_scale = 2.0f,
                          .norm = norm,
                          .router = router.data,
                          .bias = bias,
                          .w1 = w1,
                          .w2 = w2,
                          .w3 = w3,
                          .shared_gate = &gate,
                          .shared_up = &up,
                          .shared_down = &down,
                          .act = {.alpha = 1.702f, .limit = 7.0f},
                          .route_ids = ids,
                          .route_weights = weights};
        d->ops->moe(d, ROWS, &a);
        cr_assert_arr_eq(ids, ints("moe.%d.ids", layer), sizeof ids, "%s: routes", d->ops->name);
        within_rows(weights, floats("moe.%d.weights", layer), ROWS, TOPK, 1e-5f, d->ops->name);
        within_rows(x, floats("moe.%d.y", layer), ROWS, HIDDEN, 1e-5f, d->ops->name);
    }
}

Test(golden, moe)
{
    check_moe(1);
    check_moe(3);
}

/* ---- pages ---- */

static const uint32_t page_table[16] = {5, 2, 9, 0, 11, 7, 3, 12, 1, 10, 4, 13, 6, 8, 14, 15};
static const uint32_t *const tables[2] = {page_table, page_table};
static const uint32_t zero_seq[64];
static const int32_t zero_token[64];

static kn_kv *pages_of(kn_device *d, kn_kv_type type)
{
    const kn_kv_shape shape = {.type = type,
                               .layers = 4,
                               .kv_heads = KV,
                               .head_dim = DIM,
                               .index_dim = DIM,
                               .has_index = {1, 1, 1, 1},
                               .page_count = 16};
    return open_pages(d, &shape);
}

static kn_rows rows_at(const int32_t *pos, uint32_t count)
{
    return (kn_rows){
        .rows = count, .token = zero_token, .pos = pos, .seq = zero_seq, .pages = tables};
}

/* Stored rows 0 ... tokens - 1 of one plane of a sequence. */
static void put_rows(kn_kv *kv, const void *rows, uint32_t tokens, uint32_t layer,
                     kn_plane_kind kind, uint32_t head)
{
    const uint32_t bytes = kn_kv_row_bytes(kn_kv_get_shape(kv)->type, DIM);
    for (uint32_t t = 0; t < tokens; t += KN_PAGE_TOKENS)
        kn_kv_copy_in(kv, (const uint8_t *)rows + (size_t)t * bytes, page_table[t / KN_PAGE_TOKENS],
                      layer, kind, head, tokens - t < KN_PAGE_TOKENS ? tokens - t : KN_PAGE_TOKENS);
}

/* The stored row of one position. */
static void get_row(const kn_kv *kv, void *row, int32_t pos, uint32_t layer, kn_plane_kind kind,
                    uint32_t head)
{
    const uint32_t bytes = kn_kv_row_bytes(kn_kv_get_shape(kv)->type, DIM);
    uint8_t plane[KN_PAGE_TOKENS * DIM * 4];
    kn_kv_copy_out(kv, plane, page_table[pos / KN_PAGE_TOKENS], layer, kind, head, KN_PAGE_TOKENS);
    memcpy(row, plane + (size_t)(pos % KN_PAGE_TOKENS) * bytes, bytes);
}

static void compare_stored(const kn_kv *kv, const char *name, const void *want, int32_t pos,
                           uint32_t layer, kn_plane_kind kind, uint32_t head)
{
    uint8_t row[DIM * 4];
    get_row(kv, row, pos, layer, kind, head);
    if (kn_kv_get_shape(kv)->type == KN_KV_F32) {
        float x[DIM];
        memcpy(x, row, sizeof x);
        within_rows(x, want, 1, DIM, 1e-5f, name);
    } else {
        cr_assert_arr_eq(row, want, 18, "%s: position %d, plane %d, head %u", name, pos, kind,
                         head);
    }
}

static void check_in(int layer, kn_kv_type type)
{
    const int32_t *pos = ints("attn_in.%d.pos", layer);
    const uint32_t rows = 8;
    const kn_rope rope = rope_of(positions_of(pos, rows), 1e4f, 16);
    const kn_weight q = weight_of(layer, "self_attn.q_proj");
    const kn_weight k = weight_of(layer, "self_attn.k_proj");
    const kn_weight v = weight_of(layer, "self_attn.v_proj");
    const kn_weight iq = weight_of(layer, "self_attn.index_q_proj");
    const kn_weight ik = weight_of(layer, "self_attn.index_k_proj");
    const bool plain = type == KN_KV_F32;
    FOR_EACH_DEVICE(d)
    {
        kn_kv *kv = pages_of(d, type);
        float q_out[8 * Q * DIM], iq_out[8 * KV * DIM];
        const kn_attn_in a = {.x = floats("attn_in.%d.x", layer),
                              .hidden = HIDDEN,
                              .q_heads = Q,
                              .kv_heads = KV,
                              .head_dim = DIM,
                              .index_heads = KV,
                              .index_dim = DIM,
                              .eps = 1e-6f,
                              .norm = norm_of(layer, "input_layernorm"),
                              .q = &q,
                              .k = &k,
                              .v = &v,
                              .index_q = &iq,
                              .index_k = &ik,
                              .q_norm = norm_of(layer, "self_attn.q_norm"),
                              .k_norm = norm_of(layer, "self_attn.k_norm"),
                              .index_q_norm = norm_of(layer, "self_attn.index_q_norm"),
                              .index_k_norm = norm_of(layer, "self_attn.index_k_norm"),
                              .rope = rope,
                              .layer = (uint32_t)layer,
                              .q_out = q_out,
                              .index_q_out = iq_out};
        const kn_rows step = rows_at(pos, rows);
        d->ops->attn_in(d, kv, &step, &a);
        if (plain) {
            within_rows(q_out, floats("attn_in.%d.f32.q", layer), rows * Q, DIM, 1e-5f,
                        d->ops->name);
            within_rows(iq_out, floats("attn_in.%d.f32.iq", layer), rows * KV, DIM, 1e-5f,
                        d->ops->name);
        } else {
            same_bits(q_out, floats("attn_in.%d.q", layer), rows * Q * DIM, d->ops->name);
            same_bits(iq_out, floats("attn_in.%d.iq", layer), rows * KV * DIM, d->ops->name);
            const uint8_t *code = bytes("attn_in.%d.q_bytes", layer);
            for (uint32_t i = 0; i < rows * Q * DIM; i++)
                cr_assert_eq(kn_f32_to_e4m3(q_out[i]), code[i]);
        }
        for (uint32_t r = 0; r < rows; r++) {
            for (uint32_t h = 0; h < KV; h++) {
                const uint32_t plain_at = (r * KV + h) * DIM;
                const uint32_t row_at = (h * rows + r) * 18;
                compare_stored(kv, d->ops->name,
                               plain ? (const void *)(floats("attn_in.%d.f32.k", layer) + plain_at)
                                     : bytes("attn_in.%d.k_rows", layer) + row_at,
                               pos[r], a.layer, KN_PLANE_K, h);
                compare_stored(kv, d->ops->name,
                               plain ? (const void *)(floats("attn_in.%d.f32.v", layer) + plain_at)
                                     : bytes("attn_in.%d.v_rows", layer) + row_at,
                               pos[r], a.layer, KN_PLANE_V, h);
            }
            compare_stored(kv, d->ops->name,
                           plain ? (const void *)(floats("attn_in.%d.f32.ik", layer) + r * DIM)
                                 : bytes("attn_in.%d.ik_rows", layer) + r * 18,
                           pos[r], a.layer, KN_PLANE_INDEX, 0);
        }
        kn_kv_destroy(kv);
    }
}

Test(golden, attn_in)
{
    check_in(0, KN_KV_F32);
    check_in(2, KN_KV_F32);
    check_in(0, KN_KV_NVFP4);
    check_in(2, KN_KV_NVFP4);
}

Test(golden, select)
{
    enum { ROWS = 14, TOPK = 4 };
    FOR_EACH_DEVICE(d)
    {
        kn_kv *kv = pages_of(d, KN_KV_NVFP4);
        put_rows(kv, bytes("select.ik_rows", 0), 1100, 1, KN_PLANE_INDEX, 0);
        int32_t blocks[ROWS * KV * TOPK];
        float margin[ROWS * KV];
        const kn_select a = {.index_q = floats("select.iq", 0),
                             .index_heads = KV,
                             .index_dim = DIM,
                             .layer = 1,
                             .topk = TOPK,
                             .local = 1,
                             .blocks = blocks,
                             .margin = margin};
        const kn_rows step = rows_at(ints("select.pos", 0), ROWS);
        d->ops->select(d, kv, &step, &a);
        cr_assert_arr_eq(blocks, ints("select.blocks", 0), sizeof blocks, "%s", d->ops->name);
        const float *want = floats("select.margin", 0);
        for (int i = 0; i < ROWS * KV; i++)
            cr_assert(margin[i] == want[i] || fabsf(margin[i] - want[i]) <= 1e-4f,
                      "%s: margin %g, not %g", d->ops->name, margin[i], want[i]);
        kn_kv_destroy(kv);
    }
}

Test(golden, attend)
{
    enum { ROWS = 7, TOPK = 4 };
    FOR_EACH_DEVICE(d)
    {
        kn_kv *kv = pages_of(d, KN_KV_NVFP4);
        for (uint32_t h = 0; h < KV; h++) {
            put_rows(kv, bytes("attend.k_rows", 0) + h * 700 * 18, 700, 2, KN_PLANE_K, h);
            put_rows(kv, bytes("attend.v_rows", 0) + h * 700 * 18, 700, 2, KN_PLANE_V, h);
        }
        float out[ROWS * Q * DIM];
        kn_attend a = {.q = floats("attend.q", 0),
                       .q_heads = Q,
                       .kv_heads = KV,
                       .head_dim = DIM,
                       .layer = 2,
                       .blocks = ints("attend.blocks", 0),
                       .topk = TOPK,
                       .out = out};
        const kn_rows step = rows_at(ints("attend.pos", 0), ROWS);
        d->ops->attend(d, kv, &step, &a);
        within_rows(out, floats("attend.sparse", 0), ROWS, Q * DIM, 1e-5f, d->ops->name);
        a.blocks = NULL;
        d->ops->attend(d, kv, &step, &a);
        within_rows(out, floats("attend.dense", 0), ROWS, Q * DIM, 1e-5f, d->ops->name);
        kn_kv_destroy(kv);
    }
}

Test(golden, attend_f32)
{
    FOR_EACH_DEVICE(d)
    {
        kn_kv *kv = pages_of(d, KN_KV_F32);
        for (uint32_t h = 0; h < KV; h++) {
            put_rows(kv, floats("attend_f32.k", 0) + h * 140 * DIM, 140, 0, KN_PLANE_K, h);
            put_rows(kv, floats("attend_f32.v", 0) + h * 140 * DIM, 140, 0, KN_PLANE_V, h);
        }
        float out[4 * Q * DIM];
        const kn_attend a = {.q = floats("attend_f32.q", 0),
                             .q_heads = Q,
                             .kv_heads = KV,
                             .head_dim = DIM,
                             .layer = 0,
                             .out = out};
        const kn_rows step = rows_at(ints("attend_f32.pos", 0), 4);
        d->ops->attend(d, kv, &step, &a);
        within_rows(out, floats("attend_f32.dense", 0), 4, Q * DIM, 1e-5f, d->ops->name);
        kn_kv_destroy(kv);
    }
}

/* The vectors' context entries stand at positions 0 ... 19 of two sequences. */
Test(golden, draft_attend)
{
    enum { ENTRIES = 20 };
    static const uint32_t first_page = 3, second_page = 8;
    const uint32_t *const pages[2] = {&first_page, &second_page};
    int32_t pos[2 * ENTRIES];
    uint32_t seq[2 * ENTRIES];
    for (int i = 0; i < 2 * ENTRIES; i++) {
        pos[i] = i % ENTRIES;
        seq[i] = (uint32_t)(i / ENTRIES);
    }
    FOR_EACH_DEVICE(d)
    {
        kn_kv *kv = pages_of(d, KN_KV_F32);
        const kn_rows rows = {
            .rows = 2 * ENTRIES, .token = zero_token, .pos = pos, .seq = seq, .pages = pages};
        d->ops->kv_put(d, kv, &rows, 1, floats("draft.ctx_k", 0), floats("draft.ctx_v", 0));
        float out[14 * Q * DIM];
        const kn_draft_attend a = {.q = floats("draft.q", 0),
                                   .block_k = floats("draft.block_k", 0),
                                   .block_v = floats("draft.block_v", 0),
                                   .blocks = 2,
                                   .block_rows = 7,
                                   .q_heads = Q,
                                   .kv_heads = KV,
                                   .head_dim = DIM,
                                   .layer = 1,
                                   .pages = pages,
                                   .lo = (const uint32_t *)ints("draft.lo", 0),
                                   .hi = (const uint32_t *)ints("draft.hi", 0),
                                   .out = out};
        d->ops->draft_attend(d, kv, &a);
        within_rows(out, floats("draft.out", 0), 14, Q * DIM, 1e-5f, d->ops->name);
        kn_kv_destroy(kv);
    }
}

/* ---- long contexts of the nano model ---- */

/* Stored NVFP4 rows of one plane, page i of the sequence in page i. */
static void put_plane_rows(kn_kv *kv, const uint8_t *rows, uint32_t tokens, uint32_t bytes,
                           kn_plane_kind kind, uint32_t head)
{
    for (uint32_t t = 0; t < tokens; t += KN_PAGE_TOKENS)
        kn_kv_copy_in(kv, rows + (size_t)t * bytes, t / KN_PAGE_TOKENS, 0, kind, head,
                      tokens - t < KN_PAGE_TOKENS ? tokens - t : KN_PAGE_TOKENS);
}

Test(golden, nano_select_and_attend)
{
    static const char *const file_name = "nano-nvfp4.safetensors";
    if (!have_tensors(file_name))
        cr_skip_test("the nano model's vectors are not here");
    const tensors *file = open_tensors(file_name);
    uint32_t table[64];
    for (uint32_t i = 0; i < 64; i++)
        table[i] = i;
    const uint32_t *const pages[1] = {table};
    const tensor ik = get_tensor(file, "8000.select.6.ik_rows");
    const tensor iq = get_tensor(file, "8000.select.6.iq"); /* [rows, heads, dim] */
    const int32_t *blocks = get_tensor(file, "8000.select.6.blocks").data;
    const float *margin = get_tensor(file, "8000.select.6.margin").data;
    const tensor q = get_tensor(file, "2049.attend.6.q");
    const tensor k = get_tensor(file, "2049.attend.6.k_rows"); /* [kv_heads, tokens, bytes] */
    const tensor chosen = get_tensor(file, "2049.attend.6.blocks");
    const kn_kv_shape shape = {.type = KN_KV_NVFP4,
                               .layers = 1,
                               .kv_heads = k.shape[0],
                               .head_dim = q.shape[2],
                               .index_dim = iq.shape[2],
                               .has_index = {1},
                               .page_count = 64};
    FOR_EACH_DEVICE(d)
    {
        kn_kv *kv = open_pages(d, &shape);
        put_plane_rows(kv, ik.data, ik.shape[0], ik.shape[1], KN_PLANE_INDEX, 0);
        int32_t *got = zeroed(iq.shape[0] * iq.shape[1] * 4 * sizeof *got);
        const kn_rows select_rows = {.rows = iq.shape[0],
                                     .token = zero_token,
                                     .pos = get_tensor(file, "8000.select.6.pos").data,
                                     .seq = zero_seq,
                                     .pages = pages};
        const kn_select select = {.index_q = iq.data,
                                  .index_heads = iq.shape[1],
                                  .index_dim = iq.shape[2],
                                  .topk = 4,
                                  .local = 1,
                                  .blocks = got};
        d->ops->select(d, kv, &select_rows, &select);
        for (uint32_t i = 0; i < iq.shape[0] * iq.shape[1]; i++)
            if (margin[i] > 1e-4f) /* below, the rounding of float sums decides */
                cr_assert_arr_eq(got + i * 4, blocks + i * 4, 4 * sizeof *got, "%s: row %u",
                                 d->ops->name, i);

        for (uint32_t h = 0; h < k.shape[0]; h++) {
            const size_t at = (size_t)h * k.shape[1] * k.shape[2];
            put_plane_rows(kv, (const uint8_t *)k.data + at, k.shape[1], k.shape[2], KN_PLANE_K, h);
            put_plane_rows(kv, (const uint8_t *)get_tensor(file, "2049.attend.6.v_rows").data + at,
                           k.shape[1], k.shape[2], KN_PLANE_V, h);
        }
        float *out = zeroed(q.count * sizeof *out);
        const kn_rows attend_rows = {.rows = q.shape[0],
                                     .token = zero_token,
                                     .pos = get_tensor(file, "2049.attend.6.pos").data,
                                     .seq = zero_seq,
                                     .pages = pages};
        const kn_attend attend = {.q = q.data,
                                  .q_heads = q.shape[1],
                                  .kv_heads = k.shape[0],
                                  .head_dim = q.shape[2],
                                  .blocks = chosen.data,
                                  .topk = chosen.shape[2],
                                  .out = out};
        d->ops->attend(d, kv, &attend_rows, &attend);
        within_rows(out, get_tensor(file, "2049.attend.6.sparse").data, q.shape[0],
                    (size_t)q.shape[1] * q.shape[2], 1e-5f, d->ops->name);
        kn_kv_destroy(kv);
    }
}
