/* The DSpark drafter.
 *
 * - context: f = norm(fc(features of the target's layers)); every draft layer has its own K and V
 * of f, the K normed and rotated to the token's position. f does not pass the layer's input norm,
 * and there are no queries for it.
 * - block: [anchor, noise, noise, …] at the positions from the anchor's on, through the layers;
 * rows of a block see each other both ways and the context below the anchor, within the window.
 * - chain: row k gives base logits U_k for the token behind it; logits_k = U_k + W2 W1[x_(k-1)],
 * x_0 the anchor. The pick is the sampler's own: greedy, or with the noise it will use at that
 * output index.
 * - confidence: sigmoid(w · [h_k; W1[x_(k-1)]] + b), h_k after the final norm.
 *
 * A block is always run whole, since its rows depend on one another; only the logits and the chain
 * stop at `length`. Inputs are run in passes of as many blocks as the device's scratch holds. */
#include "engine/draft.h"
#include "engine/memory.h"
#include "engine/model_internal.h"
#include "engine/sample_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "engine/base/thread.h"

#define PREFIX "language_model.model.dspark."
#define LAYER PREFIX "layers.%u.decoder_layer."

typedef struct draft_layer {
    const float *norm_in, *norm_post, *q_norm, *k_norm;
    kn_weight q, k, v, o, gate, up, down;
} draft_layer;

struct eng_draft {
    eng_draft_config config;
    kn_device *device;
    const kn_weight *embedding, *head; /* the target's */
    const kn_rope *rope;               /* the target's */
    kn_kv_type kv_type;
    uint32_t rows_max; /* of one append */
    uint32_t pass_max; /* blocks of one pass */
    base_arena *arena;
    eng_files *files;
    eng_repack *pack;
    eng_memory weights, step_memory;
    char fingerprint[33];

    kn_weight fc, markov_in, markov_out;
    const float *hidden_norm, *final_norm, *confidence, *confidence_bias;
    draft_layer *layers;

    /* device memory. append: [rows_max, …]; propose: [pass_max * block, …] */
    float *feature; /* hidden */
    float *k, *v;   /* kv_heads * head_dim */
    float *x, *normed, *q, *out;
    float *logits; /* [block, pass_max, vocab]: packed by step */
    float *markov; /* [pass_max, markov_rank] */
    /* where the host reads the last three of propose if memory is not shared, else NULL */
    float *host_normed, *host_logits, *host_markov;
    /* propose, per row */
    int32_t *ids, *positions;
    /* and per block of a pass */
    const uint32_t **pages;
    uint32_t *lo, *hi;
    uint32_t *pick; /* [block * pass_max] rows in the order of the chain: by step, then by block */
    int32_t *last;  /* [pass_max] token before the step's */
};

/* ---- load ---- */

static void bind_layer(draft_layer *w, eng_binder *b, const eng_draft_config *c, uint32_t l)
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
    eng_binder__weight(b, &w->gate, c->inner, c->hidden, LAYER "mlp.gate_proj", l);
    eng_binder__weight(b, &w->up, c->inner, c->hidden, LAYER "mlp.up_proj", l);
    eng_binder__weight(b, &w->down, c->hidden, c->inner, LAYER "mlp.down_proj", l);
}

static base_code bind(eng_draft *d, eng_binder *b)
{
    const eng_draft_config *c = &d->config;
    eng_binder__weight(b, &d->fc, c->hidden, c->target_layer_count * c->hidden, PREFIX "fc");
    eng_binder__floats(b, &d->hidden_norm, 0, c->hidden, PREFIX "hidden_norm.weight");
    eng_binder__floats(b, &d->final_norm, 0, c->hidden, PREFIX "final_norm.weight");
    eng_binder__weight(b, &d->markov_in, c->vocab, c->markov_rank, PREFIX "markov_head.markov_w1");
    eng_binder__weight(b, &d->markov_out, c->vocab, c->markov_rank, PREFIX "markov_head.markov_w2");
    if (c->confidence) {
        d->confidence =
            eng_binder__host_floats(b, 1, c->hidden + (c->confidence_markov ? c->markov_rank : 0),
                                    PREFIX "confidence_head.proj.weight");
        d->confidence_bias = eng_binder__host_floats(b, 0, 1, PREFIX "confidence_head.proj.bias");
    }
    d->layers = base_arena_calloc(d->arena, c->layers, sizeof *d->layers);
    for (uint32_t l = 0; d->layers != NULL && l < c->layers; l++)
        bind_layer(&d->layers[l], b, c, l);
    if (d->layers == NULL && b->code == BASE_OK)
        b->code = base_fail(b->err, BASE_NOMEM, "no memory for the draft's tables");
    return eng_binder__finish(b);
}

static base_code check_fit(const eng_draft *d, const eng_model *model, base_err *err)
{
    const eng_draft_config *c = &d->config;
    const eng_model_config *t = eng_model_get_config(model);
    size_t width = base_max(c->inner, (size_t)c->q_heads * c->head_dim);
    width = base_max(width, c->markov_rank);
    if (c->rope_theta != t->rope_theta || c->rotary_dim != t->rotary_dim)
        return base_fail(
            err, BASE_UNSUPPORTED,
            "config.json: rope_theta %g and rotary_dim %u differ from the target's %g and %u",
            (double)c->rope_theta, c->rotary_dim, (double)t->rope_theta, t->rotary_dim);
    if (width > eng_model__width_max(model))
        return base_fail(err, BASE_UNSUPPORTED,
                         "config.json: rows of %zu values are wider than the target's %u", width,
                         eng_model__width_max(model));
    if (d->pass_max == 0)
        return base_fail(err, BASE_INVALID,
                         "steps of %u rows are too short for a draft block of %u",
                         eng_model__rows_max(model), c->block);
    return BASE_OK;
}

static void *array(eng_draft *d, size_t count, size_t per_item, size_t size)
{
    return base_arena_calloc(d->arena, count * per_item, size);
}

static base_code make_scratch(eng_draft *d, base_err *err)
{
    const eng_draft_config *c = &d->config;
    const size_t drafted = (size_t)d->pass_max * c->block, rows = base_max(d->rows_max, drafted),
                 q = (size_t)c->q_heads * c->head_dim, kv = (size_t)c->kv_heads * c->head_dim;
    const eng_piece pieces[] = {
        {&d->feature, rows * c->hidden, sizeof(float)},
        {&d->x, rows * c->hidden, sizeof(float)},
        {&d->normed, rows * c->hidden, sizeof(float)},
        {&d->k, rows * kv, sizeof(float)},
        {&d->v, rows * kv, sizeof(float)},
        {&d->q, rows * q, sizeof(float)},
        {&d->out, rows * q, sizeof(float)},
        {&d->logits, drafted * c->vocab, sizeof(float)},
        {&d->markov, (size_t)d->pass_max * c->markov_rank, sizeof(float)},
    };
    if (!eng_memory_is_shared(d->device)) {
        d->host_normed = array(d, drafted, c->hidden, sizeof(float));
        d->host_logits = array(d, drafted, c->vocab, sizeof(float));
        d->host_markov = array(d, d->pass_max, c->markov_rank, sizeof(float));
    }
    d->ids = array(d, rows, 1, sizeof(int32_t));
    d->positions = array(d, rows, 1, sizeof(int32_t));
    d->pages = array(d, d->pass_max, 1, sizeof *d->pages);
    d->lo = array(d, d->pass_max, 1, sizeof(uint32_t));
    d->hi = array(d, d->pass_max, 1, sizeof(uint32_t));
    d->pick = array(d, d->pass_max, c->block, sizeof(uint32_t));
    d->last = array(d, d->pass_max, 1, sizeof(int32_t));
    if (base_arena_failed(d->arena))
        return base_fail(err, BASE_NOMEM, "no memory for %u draft blocks", d->pass_max);
    return eng_memory_take(&d->step_memory, d->device, pieces, sizeof pieces / sizeof *pieces, err);
}

static base_code make_fingerprint(eng_draft *d, base_err *err)
{
    XXH128_canonical_t canonical;
    XXH3_state_t *state = XXH3_createState();
    if (state == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for a digest");
    XXH3_128bits_reset(state);
    XXH3_128bits_update(state, &d->config.eps, sizeof d->config.eps);
    eng_files__digest(d->files, state);
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
    XXH3_freeState(state);
    for (size_t i = 0; i < sizeof canonical.digest; i++)
        snprintf(d->fingerprint + 2 * i, 3, "%02x", canonical.digest[i]);
    return BASE_OK;
}

static base_code load(eng_draft *d, const eng_model *model, const char *dir, uint32_t rows_max,
                      uint32_t blocks_max, base_err *err)
{
    eng_binder binder;
    base_code code = eng_config__read_draft(&d->config, dir, eng_model_get_config(model), err);
    if (code != BASE_OK)
        return code;
    d->device = eng_model_device(model);
    d->embedding = eng_model_embedding(model);
    d->head = eng_model_head(model);
    d->rope = eng_model_rope(model);
    /* The draft keeps BF16 beside a target of fewer bits, as it was trained; F32 pages are for
     * comparison with oracles. */
    d->kv_type = eng_model_kv_shape(model, 1).type == KN_KV_F32 ? KN_KV_F32 : KN_KV_BF16;
    d->rows_max = rows_max;
    d->pass_max = (uint32_t)base_min(blocks_max, eng_model__rows_max(model) / d->config.block);
    if ((d->arena = base_arena_create(1 << 16, SIZE_MAX)) == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory");
    code = check_fit(d, model, err);
    if (code == BASE_OK)
        code = eng_files_open(&d->files, dir, err);
    if (code != BASE_OK)
        return code;
    code = eng_binder__init(&binder, d->files, d->arena, err);
    if (code == BASE_OK)
        code = bind(d, &binder);
    if (code == BASE_OK && d->device == NULL) { /* the model was only looked at */
        eng_binder__deinit(&binder);
        return BASE_OK;
    }
    if (code == BASE_OK)
        code = make_fingerprint(d, err);
    if (code == BASE_OK) {
        const eng_repack_options kept = eng_model__packed(model, "draft", d->fingerprint, d->files);
        code = eng_repack__create(&d->pack, binder.packable, binder.packable_count, &kept,
                                  d->device, err);
    }
    if (code == BASE_OK)
        code = eng_memory_move(&d->weights, d->device, binder.bound, binder.bound_count, err);
    if (code == BASE_OK && (d->pack != NULL || d->weights.block != NULL))
        eng_files__release(d->files);
    eng_binder__deinit(&binder);
    return code == BASE_OK ? make_scratch(d, err) : code;
}

base_code eng_draft_load(eng_draft **out, const eng_model *model, const char *dir,
                         uint32_t rows_max, uint32_t blocks_max, base_err *err)
{
    *out = NULL;
    eng_draft *d = calloc(1, sizeof *d);
    if (d == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory");
    base_code code = load(d, model, dir, rows_max, blocks_max, err);
    if (code != BASE_OK) {
        const char *slash = strrchr(dir, '/');
        base_wrap(err, "draft %.32s", slash != NULL && slash[1] != '\0' ? slash + 1 : dir);
        eng_draft_destroy(d);
        return code;
    }
    *out = d;
    return BASE_OK;
}

void eng_draft_destroy(eng_draft *draft)
{
    if (draft == NULL)
        return;
    eng_memory_free(&draft->step_memory);
    eng_memory_free(&draft->weights);
    eng_repack__destroy(draft->pack);
    eng_files_close(draft->files);
    base_arena_destroy(draft->arena);
    free(draft);
}

uint32_t eng_draft_block(const eng_draft *draft)
{
    return draft->config.block;
}

uint32_t eng_draft_window(const eng_draft *draft)
{
    return draft->config.window;
}

const char *eng_draft_fingerprint(const eng_draft *draft)
{
    return draft->fingerprint;
}

uint32_t eng_draft_features(const eng_draft *draft, const uint32_t **layers)
{
    *layers = draft->config.target_layers;
    return draft->config.target_layer_count;
}

kn_kv_shape eng_draft_kv_shape(const eng_draft *draft, uint32_t page_count)
{
    const eng_draft_config *c = &draft->config;
    return (kn_kv_shape){.type = draft->kv_type,
                         .layers = c->layers,
                         .kv_heads = c->kv_heads,
                         .head_dim = c->head_dim,
                         .page_count = page_count};
}

/* ---- context ---- */

void eng_draft_append(eng_draft *draft, kn_kv *kv, const kn_rows *rows, const float *features)
{
    const eng_draft_config *c = &draft->config;
    kn_device *device = draft->device;
    const kn_ops *ops = device->ops;
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    CHECK(rows->rows <= draft->rows_max);
    ops->linear(device, draft->feature, features, &draft->fc, rows->rows, false);
    ops->norm(device, draft->feature, draft->feature, draft->hidden_norm, rows->rows, c->hidden,
              c->eps);
    for (uint32_t l = 0; l < c->layers; l++) {
        const draft_layer *w = &draft->layers[l];
        ops->linear(device, draft->k, draft->feature, &w->k, rows->rows, false);
        ops->linear(device, draft->v, draft->feature, &w->v, rows->rows, false);
        ops->head_norm_rope(device, draft->k, w->k_norm, rows->rows, c->kv_heads, c->head_dim,
                            c->eps, draft->rope, rows->pos);
        ops->kv_put(device, kv, rows, l, draft->k, draft->v);
    }
}

/* ---- block ---- */

/* The blocks' rows through the layers; x is left before the final norm. */
static void run_blocks(eng_draft *d, const kn_kv *kv, const eng_draft_input *inputs, uint32_t count)
{
    const eng_draft_config *c = &d->config;
    kn_device *device = d->device;
    const kn_ops *ops = device->ops;
    const uint32_t rows = count * c->block;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t at = inputs[i].anchor_pos;
        d->pages[i] = inputs[i].pages;
        d->hi[i] = at;
        d->lo[i] = c->window > 0 && at + 1 > c->window ? at + 1 - c->window : 0;
        d->lo[i] = (uint32_t)base_max(d->lo[i], inputs[i].context_from);
        for (uint32_t j = 0; j < c->block; j++) {
            d->ids[i * c->block + j] = j == 0 ? inputs[i].anchor : c->noise_token;
            d->positions[i * c->block + j] = (int32_t)(at + j);
        }
    }
    ops->embed(device, d->x, d->embedding, d->ids, rows);
    for (uint32_t l = 0; l < c->layers; l++) {
        const draft_layer *w = &d->layers[l];
        ops->norm(device, d->normed, d->x, w->norm_in, rows, c->hidden, c->eps);
        ops->linear(device, d->q, d->normed, &w->q, rows, false);
        ops->linear(device, d->k, d->normed, &w->k, rows, false);
        ops->linear(device, d->v, d->normed, &w->v, rows, false);
        ops->head_norm_rope(device, d->q, w->q_norm, rows, c->q_heads, c->head_dim, c->eps, d->rope,
                            d->positions);
        ops->head_norm_rope(device, d->k, w->k_norm, rows, c->kv_heads, c->head_dim, c->eps,
                            d->rope, d->positions);
        const kn_draft_attend attend = {
            .q = d->q,
            .block_k = d->k,
            .block_v = d->v,
            .blocks = count,
            .block_rows = c->block,
            .q_heads = c->q_heads,
            .kv_heads = c->kv_heads,
            .head_dim = c->head_dim,
            .layer = l,
            .pages = d->pages,
            .lo = d->lo,
            .hi = d->hi,
            .window = c->window,
            .out = d->out,
        };
        ops->draft_attend(device, kv, &attend);
        ops->linear(device, d->x, d->out, &w->o, rows, true);
        const kn_mlp mlp = {
            .x = d->x,
            .hidden = c->hidden,
            .inner = c->inner,
            .eps = c->eps,
            .norm = w->norm_post,
            .gate = &w->gate,
            .up = &w->up,
            .down = &w->down,
            .act = {.alpha = c->act_alpha, .limit = c->act_limit},
        };
        ops->mlp(device, rows, &mlp);
    }
}

/* ---- chain ---- */

typedef struct pick_job {
    eng_draft *draft;
    const eng_draft_input *inputs;
    float *logits; /* [inputs, vocab] of this step, where the host reads them */
    uint32_t step;
} pick_job;

static void pick_one(void *ctx, uint32_t i)
{
    const pick_job *job = ctx;
    const eng_draft_input *in = &job->inputs[i];
    const uint32_t vocab = job->draft->config.vocab;
    const float *logits = job->logits + (size_t)i * vocab;
    const float temperature = in->sampling->temperature;
    job->draft->last[i] = temperature < ENG_SAMPLE__TEMPERATURE_MIN
                              ? eng_sample__greedy(logits, vocab)
                              : eng_sample__draw(logits, vocab, temperature, in->sampling->seed,
                                                 in->output_index + job->step, in->choice);
}

static float confidence_of(const eng_draft *d, const float *hidden, const float *markov)
{
    const eng_draft_config *c = &d->config;
    if (!c->confidence)
        return 1;
    double sum = (double)d->confidence_bias[0];
    for (uint32_t i = 0; i < c->hidden; i++)
        sum += (double)hidden[i] * (double)d->confidence[i];
    for (uint32_t i = 0; c->confidence_markov && i < c->markov_rank; i++)
        sum += (double)markov[i] * (double)d->confidence[c->hidden + i];
    return (float)(1 / (1 + exp(-sum)));
}

static void run_pass(eng_draft *d, const kn_kv *kv, const eng_draft_input *inputs, uint32_t count,
                     uint32_t length, int32_t *tokens, float *confidence)
{
    const eng_draft_config *c = &d->config;
    kn_device *device = d->device;
    const kn_ops *ops = device->ops;
    const float *normed = NULL;
    run_blocks(d, kv, inputs, count);
    for (uint32_t step = 0; step < length; step++)
        for (uint32_t i = 0; i < count; i++)
            d->pick[step * count + i] = i * c->block + step;
    ops->head(device, d->logits, d->x, d->final_norm, d->head, d->pick, length * count, c->hidden,
              c->eps);
    if (c->confidence) {
        ops->norm(device, d->normed, d->x, d->final_norm, count * c->block, c->hidden, c->eps);
        normed = eng_memory_read(device, d->host_normed, d->normed,
                                 (size_t)count * c->block * c->hidden * sizeof *normed);
    }
    for (uint32_t i = 0; i < count; i++)
        d->last[i] = inputs[i].anchor;
    for (uint32_t step = 0; step < length; step++) {
        pick_job job = {.draft = d, .inputs = inputs, .step = step};
        const size_t values = (size_t)count * c->vocab, at = step * values;
        ops->embed(device, d->markov, &d->markov_in, d->last, count);
        ops->linear(device, d->logits + at, d->markov, &d->markov_out, count, true);
        job.logits = eng_memory_read(device, d->host_logits != NULL ? d->host_logits + at : NULL,
                                     d->logits + at, values * sizeof(float));
        const float *markov = eng_memory_read(device, d->host_markov, d->markov,
                                              (size_t)count * c->markov_rank * sizeof *markov);
        for (uint32_t i = 0; i < count; i++)
            if (inputs[i].mask != NULL)
                eng_sample__mask(job.logits + (size_t)i * c->vocab, inputs[i].mask_vocab,
                                 inputs[i].mask(inputs[i].mask_ctx, step > 0 ? d->last[i] : -1));
        if (count > 1)
            kn_device_parallel(device, pick_one, &job, count);
        else
            pick_one(&job, 0);
        for (uint32_t i = 0; i < count; i++) {
            tokens[i * c->block + step] = d->last[i];
            confidence[i * c->block + step] =
                confidence_of(d, normed + (size_t)(i * c->block + step) * c->hidden,
                              markov + (size_t)i * c->markov_rank);
        }
    }
}

void eng_draft_propose(eng_draft *draft, kn_kv *kv, const eng_draft_input *inputs,
                       uint32_t input_count, uint32_t length, int32_t *tokens, float *confidence)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    CHECK(length <= draft->config.block);
    for (uint32_t at = 0; at < input_count; at += draft->pass_max) {
        uint32_t count = (uint32_t)base_min(draft->pass_max, input_count - at);
        run_pass(draft, kv, inputs + at, count, length, tokens + (size_t)at * draft->config.block,
                 confidence + (size_t)at * draft->config.block);
    }
}

const float *eng_draft_last_logits(const eng_draft *draft)
{
    return draft->host_logits != NULL ? draft->host_logits : draft->logits;
}
