/* eng_model: a checkpoint of the MiniMax-M3 family, ready to run: configuration, tensors, device,
 * forward pass.
 *
 * The forward pass is a straight list of operations of kernels/ops.h. Thread: load anywhere; the
 * rest is the engine's. */
#pragma once
#include "cache/page.h"
#include "engine/base/err.h"
#include "engine/engine.h"
#include "kernels/ops.h"

typedef struct eng_model eng_model;

typedef struct eng_model_options {
    /* "cpu", "auto": the first module that has a device, else the cpu, or a module's name. NULL:
     * `kernels`, or the cpu where that is NULL, too. */
    const char *backend;
    const char *modules; /* folder that is searched first; NULL: none */
    const kn_backend *kernels;
    const char *variant; /* of the cpu */
    const char *kv;      /* "nvfp4" | "fp8" | "bf16" | "f32" */
    uint32_t threads, rows_max, context_max;
    const char *packed;        /* folder that keeps repacked weights; NULL: none */
    uint64_t packed_bytes_max; /* of a part, target or draft; larger ones are not kept */
    bool look; /* names, shapes and dtypes only: no weight is read, and nothing can be run */
} eng_model_options;

#define ENG_FEATURES_MAX 8

typedef struct eng_model_config {
    char name[96];
    char identity[512]; /* opens the system turn: config.json whimbrel.identity, or M3.1's / M3's
                           own sentence */
    eng_thinking thinking;
    uint32_t hidden, layers, vocab, q_heads, kv_heads, head_dim, rotary_dim, context_max;
    float eps, rope_theta, act_alpha, act_limit, routed_scale;
    uint32_t dense_inner, expert_inner, shared_inner, experts, experts_topk;
    uint32_t index_heads, index_dim, topk_blocks, init_blocks, local_blocks;
    uint8_t sparse[KN_LAYERS_MAX]; /* MSA layer */
    uint8_t moe[KN_LAYERS_MAX];
} eng_model_config;

/* `spec` is a directory or "random:SHAPE?layers=N&seed=N" (SHAPE: nano, tiny, mid, m3.1-flash).
 * Fails naming file, key and reason: missing or superfluous tensors, shapes, dtypes, offsets,
 * quantisation that does not fit. */
base_code eng_model_load(eng_model **out, const char *spec, const eng_model_options *options,
                         base_err *err);
void eng_model_destroy(eng_model *model);
const eng_model_config *eng_model_get_config(const eng_model *model);
const char *eng_model_dir(const eng_model *model); /* NULL for random shapes */
/* tokenizer.json of the directory, or the one a random shape generated; readable until
 * eng_model_destroy. */
const char *eng_model_tokenizer_path(const eng_model *model);
/* Tokens that end a turn (generation_config eos_token_id, else config's); may be none. */
const int32_t *eng_model_end_tokens(const eng_model *model, uint32_t *count);
const char *eng_model_fingerprint(const eng_model *model); /* hex */
uint64_t eng_model_weight_bytes(const eng_model *model);
kn_device *eng_model_device(const eng_model *model);
const kv_layout *eng_model_layout(const eng_model *model);
kn_kv_shape eng_model_kv_shape(const eng_model *model, uint32_t page_count);
const kn_weight *eng_model_embedding(const eng_model *model);
const kn_weight *eng_model_head(const eng_model *model);
const kn_rope *eng_model_rope(const eng_model *model);

/* One step. logits [picks, vocab], on the host, of the rows listed in pick. `features`, if not
 * NULL, device memory, gets [rows, feature_count * hidden]: the residual stream after the layers in
 * feature_layers (ascending), concatenated. No allocation. rows->rows <= rows_max. */
void eng_model_forward(eng_model *model, kn_kv *kv, const kn_rows *rows, const uint32_t *pick,
                       uint32_t picks, float *logits, const uint32_t *feature_layers,
                       uint32_t feature_count, float *features);

/* Layers [first, end) of a step that is run in parts, others' steps between them: `x` [rows,
 * hidden], device memory, is the caller's and goes from one part to the next; layer 0 begins it. No
 * logits. */
void eng_model_forward_layers(eng_model *model, kn_kv *kv, const kn_rows *rows, float *x,
                              uint32_t first, uint32_t end, const uint32_t *feature_layers,
                              uint32_t feature_count, float *features);

/* ---- inspection, for tests and tools: called after each layer with its residual stream, selection
 * and routes, where the host can read them until it returns ---- */
typedef struct eng_model_probe {
    void (*layer)(void *ctx, uint32_t layer, const float *x, const int32_t *blocks,
                  const float *margin, const int32_t *route_ids, const float *route_weights);
    void *ctx;
} eng_model_probe;
/* NULL: off. Fails: BASE_NOMEM, where what it sees has to be copied. */
base_code eng_model_set_probe(eng_model *model, const eng_model_probe *probe, base_err *err);
