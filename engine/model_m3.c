/* MiniMax-M3 and M3.1-Flash: which tensors a layer has, and the forward pass as a straight list of
 * operations.
 *
 * One description serves both: an MSA layer has index projections, a mixture layer has a router,
 * and the storage format of every matrix is its own (M3 in BF16 or MXFP8, M3.1 with NVFP4 experts).
 * The residual stream is float. */
#include "engine/model_internal.h"

#define TEXT "language_model."
#define LAYER TEXT "model.layers.%u."

/* Vision towers and multi-token prediction: known, and not part of the text engine. */
static const char *const SKIPPED[] = {"vision_tower.", "multi_modal_projector.", "patch_merge_mlp.",
                                      TEXT "model.mtp."};

static void bind_attention(eng_m3_layer *w, eng_binder *b, const eng_model_config *c, uint32_t l)
{
    uint32_t q = c->q_heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    eng_binder__floats(b, &w->norm_in, 0, c->hidden, LAYER "input_layernorm.weight", l);
    eng_binder__floats(b, &w->norm_post, 0, c->hidden, LAYER "post_attention_layernorm.weight", l);
    eng_binder__floats(b, &w->q_norm, 0, c->head_dim, LAYER "self_attn.q_norm.weight", l);
    eng_binder__floats(b, &w->k_norm, 0, c->head_dim, LAYER "self_attn.k_norm.weight", l);
    eng_binder__weight(b, &w->q, q, c->hidden, LAYER "self_attn.q_proj", l);
    eng_binder__weight(b, &w->k, kv, c->hidden, LAYER "self_attn.k_proj", l);
    eng_binder__weight(b, &w->v, kv, c->hidden, LAYER "self_attn.v_proj", l);
    eng_binder__weight(b, &w->o, c->hidden, q, LAYER "self_attn.o_proj", l);
    if (!c->sparse[l])
        return;
    eng_binder__weight(b, &w->index_q, c->index_heads * c->index_dim, c->hidden,
                       LAYER "self_attn.index_q_proj", l);
    eng_binder__weight(b, &w->index_k, c->index_dim, c->hidden, LAYER "self_attn.index_k_proj", l);
    eng_binder__floats(b, &w->index_q_norm, 0, c->index_dim, LAYER "self_attn.index_q_norm.weight",
                       l);
    eng_binder__floats(b, &w->index_k_norm, 0, c->index_dim, LAYER "self_attn.index_k_norm.weight",
                       l);
}

static void bind_mixture(eng_m3_layer *w, eng_binder *b, const eng_model_config *c, uint32_t l)
{
    eng_binder__floats(b, &w->router, c->experts, c->hidden, LAYER "block_sparse_moe.gate.weight",
                       l);
    eng_binder__floats(b, &w->bias, 0, c->experts, LAYER "block_sparse_moe.e_score_correction_bias",
                       l);
    w->w1 = base_arena_calloc(b->arena, c->experts, sizeof *w->w1);
    w->w2 = base_arena_calloc(b->arena, c->experts, sizeof *w->w2);
    w->w3 = base_arena_calloc(b->arena, c->experts, sizeof *w->w3);
    if (base_arena_failed(b->arena))
        return;
    for (uint32_t e = 0; e < c->experts; e++) {
        eng_binder__weight(b, &w->w1[e], c->expert_inner, c->hidden,
                           LAYER "block_sparse_moe.experts.%u.w1", l, e);
        eng_binder__weight(b, &w->w3[e], c->expert_inner, c->hidden,
                           LAYER "block_sparse_moe.experts.%u.w3", l, e);
        eng_binder__weight(b, &w->w2[e], c->hidden, c->expert_inner,
                           LAYER "block_sparse_moe.experts.%u.w2", l, e);
    }
    if (c->shared_inner == 0)
        return;
    eng_binder__weight(b, &w->shared_gate, c->shared_inner, c->hidden,
                       LAYER "block_sparse_moe.shared_experts.gate_proj", l);
    eng_binder__weight(b, &w->shared_up, c->shared_inner, c->hidden,
                       LAYER "block_sparse_moe.shared_experts.up_proj", l);
    eng_binder__weight(b, &w->shared_down, c->hidden, c->shared_inner,
                       LAYER "block_sparse_moe.shared_experts.down_proj", l);
}

base_code eng_m3__bind(eng_m3 *out, eng_binder *binder, const eng_model_config *config)
{
    const eng_model_config *c = config;
    eng_binder__skip(binder, SKIPPED, sizeof SKIPPED / sizeof *SKIPPED);
    eng_binder__weight(binder, &out->embedding, c->vocab, c->hidden, TEXT "model.embed_tokens");
    eng_binder__weight(binder, &out->head, c->vocab, c->hidden, TEXT "lm_head");
    eng_binder__floats(binder, &out->norm, 0, c->hidden, TEXT "model.norm.weight");
    out->layers = base_arena_calloc(binder->arena, c->layers, sizeof *out->layers);
    for (uint32_t l = 0;
         l < c->layers && binder->code == BASE_OK && !base_arena_failed(binder->arena); l++) {
        eng_m3_layer *w = &out->layers[l];
        bind_attention(w, binder, c, l);
        if (c->moe[l]) {
            bind_mixture(w, binder, c, l);
            continue;
        }
        eng_binder__weight(binder, &w->gate, c->dense_inner, c->hidden, LAYER "mlp.gate_proj", l);
        eng_binder__weight(binder, &w->up, c->dense_inner, c->hidden, LAYER "mlp.up_proj", l);
        eng_binder__weight(binder, &w->down, c->hidden, c->dense_inner, LAYER "mlp.down_proj", l);
    }
    if (base_arena_failed(binder->arena) && binder->code == BASE_OK)
        binder->code = base_fail(binder->err, BASE_NOMEM, "no memory for the weights' tables");
    return binder->code;
}

/* ---- forward ---- */

/* The residual stream of this layer into its place in every row of `features`, if it is one of the
 * wanted layers. */
static void tap(kn_device *device, float *features, const float *x, uint32_t rows, uint32_t hidden,
                uint32_t layer, const uint32_t *feature_layers, uint32_t feature_count)
{
    const size_t row = hidden * sizeof *x;
    for (uint32_t i = 0; i < feature_count; i++)
        if (feature_layers[i] == layer)
            device->backend->copy(device, features + (size_t)i * hidden, feature_count * row, x,
                                  row, row, rows);
}

void eng_m3__layers(const eng_m3 *m3, const eng_model_config *config, kn_device *device,
                    const kn_rope *rope, const eng_m3_scratch *scratch, kn_kv *kv,
                    const kn_rows *rows, uint32_t first, uint32_t end,
                    const uint32_t *feature_layers, uint32_t feature_count, float *features,
                    const eng_model_probe *probe)
{
    const eng_model_config *c = config;
    const kn_ops *ops = device->ops;
    const eng_m3_scratch *s = scratch;
    const kn_act act = {.alpha = c->act_alpha, .limit = c->act_limit};

    if (first == 0)
        ops->embed(device, s->x, &m3->embedding, rows->token, rows->rows);
    for (uint32_t l = first; l < end; l++) {
        const eng_m3_layer *w = &m3->layers[l];
        const bool sparse = c->sparse[l];
        const kn_attn_in in = {
            .x = s->x,
            .hidden = c->hidden,
            .q_heads = c->q_heads,
            .kv_heads = c->kv_heads,
            .head_dim = c->head_dim,
            .index_heads = sparse ? c->index_heads : 0,
            .index_dim = sparse ? c->index_dim : 0,
            .eps = c->eps,
            .norm = w->norm_in,
            .q = &w->q,
            .k = &w->k,
            .v = &w->v,
            .index_q = sparse ? &w->index_q : NULL,
            .index_k = sparse ? &w->index_k : NULL,
            .q_norm = w->q_norm,
            .k_norm = w->k_norm,
            .index_q_norm = w->index_q_norm,
            .index_k_norm = w->index_k_norm,
            .rope = *rope,
            .layer = l,
            .q_out = s->q,
            .index_q_out = sparse ? s->index_q : NULL,
        };
        ops->attn_in(device, kv, rows, &in);
        if (sparse) {
            const kn_select select = {
                .index_q = s->index_q,
                .index_heads = c->index_heads,
                .index_dim = c->index_dim,
                .layer = l,
                .topk = c->topk_blocks,
                .init = c->init_blocks,
                .local = c->local_blocks,
                .blocks = s->blocks,
                .margin = probe != NULL ? s->margin : NULL,
            };
            ops->select(device, kv, rows, &select);
        }
        const kn_attend attend = {
            .q = s->q,
            .q_heads = c->q_heads,
            .kv_heads = c->kv_heads,
            .head_dim = c->head_dim,
            .layer = l,
            .blocks = sparse ? s->blocks : NULL,
            .topk = c->topk_blocks,
            .out = s->out,
        };
        ops->attend(device, kv, rows, &attend);
        ops->linear(device, s->x, s->out, &w->o, rows->rows, true);
        if (c->moe[l]) {
            const kn_moe moe = {
                .x = s->x,
                .hidden = c->hidden,
                .inner = c->expert_inner,
                .shared_inner = c->shared_inner,
                .experts = c->experts,
                .topk = c->experts_topk,
                .eps = c->eps,
                .routed_scale = c->routed_scale,
                .norm = w->norm_post,
                .router = w->router,
                .bias = w->bias,
                .w1 = w->w1,
                .w2 = w->w2,
                .w3 = w->w3,
                .shared_gate = c->shared_inner > 0 ? &w->shared_gate : NULL,
                .shared_up = c->shared_inner > 0 ? &w->shared_up : NULL,
                .shared_down = c->shared_inner > 0 ? &w->shared_down : NULL,
                .act = act,
                .route_ids = probe != NULL ? s->route_ids : NULL,
                .route_weights = probe != NULL ? s->route_weights : NULL,
            };
            ops->moe(device, rows->rows, &moe);
        } else {
            const kn_mlp mlp = {
                .x = s->x,
                .hidden = c->hidden,
                .inner = c->dense_inner,
                .eps = c->eps,
                .norm = w->norm_post,
                .gate = &w->gate,
                .up = &w->up,
                .down = &w->down,
                .act = act,
            };
            ops->mlp(device, rows->rows, &mlp);
        }
        tap(device, features, s->x, rows->rows, c->hidden, l, feature_layers, feature_count);
        if (probe != NULL)
            probe->layer(probe->ctx, l, s->x, sparse ? s->blocks : NULL, sparse ? s->margin : NULL,
                         c->moe[l] ? s->route_ids : NULL, c->moe[l] ? s->route_weights : NULL);
    }
}

void eng_m3__head(const eng_m3 *m3, const eng_model_config *config, kn_device *device,
                  const eng_m3_scratch *scratch, const uint32_t *pick, uint32_t picks,
                  float *logits)
{
    if (picks > 0)
        device->ops->head(device, logits, scratch->x, m3->norm, &m3->head, pick, picks,
                          config->hidden, config->eps);
}
