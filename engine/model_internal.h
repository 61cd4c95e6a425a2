/* model_internal: what the files that load a model share: configuration, binding of tensors to
 * weights, random shapes. For engine/{weights,config,model,model_m3,random,draft}.c, tools/model.c
 * and their tests. */
#pragma once
#define XXH_STATIC_LINKING_ONLY
#include <limits.h>
#include <xxhash.h>

#include "engine/base/arena.h"
#include "engine/memory.h"
#include "engine/model.h"
#include "engine/weights.h"

/* ---- weights.c ---- */

const char *eng_dtype__name(eng_dtype dtype);
/* A message about bytes that belong to no tensor, which the format forbids; NULL if there are none.
 */
const char *eng_files__gap(const eng_files *files);
/* File sizes, headers, and the first and last 4 KiB of every tensor. */
void eng_files__digest(const eng_files *files, XXH3_state_t *state);
/* Of the files' sizes and of the times when they were written last. */
uint64_t eng_files__stamp(const eng_files *files);
/* Lets go of the files' pages, which come back from disk when somebody reads them. */
void eng_files__release(const eng_files *files);

/* ---- config.c ---- */

#define ENG_END_TOKENS_MAX 8

/* config.json and generation_config.json of a model directory. */
typedef struct eng_config_file {
    eng_model_config model;
    int32_t end_tokens[ENG_END_TOKENS_MAX];
    uint32_t end_token_count;
    bool nvfp4_experts; /* quantization_config says so */
    bool mxfp8;         /* likewise, for the other linears */
} eng_config_file;

/* `name` is what the model will be called. BASE_FORMAT or BASE_UNSUPPORTED with file, key and
 * reason. */
base_code eng_config__read(eng_config_file *out, const char *dir, const char *name, base_err *err);

/* dspark/config.json. */
typedef struct eng_draft_config {
    uint32_t hidden, layers, vocab, q_heads, kv_heads, head_dim, rotary_dim, inner;
    float eps, rope_theta, act_alpha, act_limit;
    uint32_t window; /* 0: the whole context */
    uint32_t block;
    int32_t noise_token;
    uint32_t target_layers[ENG_FEATURES_MAX], target_layer_count; /* ascending */
    uint32_t markov_rank;
    bool confidence, confidence_markov;
} eng_draft_config;

base_code eng_config__read_draft(eng_draft_config *out, const char *dir,
                                 const eng_model_config *target, base_err *err);

/* ---- model.c: binding ---- */

/* Takes tensors out of a set of files; what nobody took is an error at the end. */
typedef struct eng_binder {
    const eng_files *files;
    base_arena *arena;    /* copies: norms as floats, weights that lie unaligned in the file */
    uint8_t *taken;       /* [count] */
    kn_weight **packable; /* in the arena: the matrices that kn_pack has a form for */
    uint32_t packable_count;
    eng_piece *bound; /* in the arena: the arrays that operations read */
    uint32_t bound_count;
    base_err *err;
    base_code code; /* the first failure; later calls do nothing */
} eng_binder;

base_code eng_binder__init(eng_binder *binder, const eng_files *files, base_arena *arena,
                           base_err *err);
void eng_binder__deinit(eng_binder *binder);
bool eng_binder__has(const eng_binder *binder, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* The matrix `name`, stored as BF16 or F32 `.weight`, an MXFP8 pair or an NVFP4 group. */
void eng_binder__weight(eng_binder *binder, kn_weight *out, uint32_t rows, uint32_t cols,
                        const char *fmt, ...) __attribute__((format(printf, 5, 6)));
/* BF16 or F32 values as floats, from the arena unless they lie aligned as F32 in the file. [rows,
 * cols], or [cols] with rows 0. */
void eng_binder__floats(eng_binder *binder, const float **out, uint32_t rows, uint32_t cols,
                        const char *fmt, ...) __attribute__((format(printf, 5, 6)));
/* The same for values that no operation reads: they stay on the host. */
const float *eng_binder__host_floats(eng_binder *binder, uint32_t rows, uint32_t cols,
                                     const char *name);
/* Marks every tensor below one of the prefixes as known and unused. */
void eng_binder__skip(eng_binder *binder, const char *const *prefixes, uint32_t count);
/* Fails if a tensor was not taken; names the first and how many. */
base_code eng_binder__finish(eng_binder *binder);

/* ---- repack.c ---- */

typedef struct eng_repack eng_repack;

/* Where the copies are kept from one start to the next. */
typedef struct eng_repack_options {
    char path[PATH_MAX]; /* "": nowhere */
    char key[64];        /* of the checkpoint; a file with another one is made anew */
    uint64_t bytes_max;  /* more are not kept, and what was kept before is removed */
} eng_repack_options;

/* Packs the matrices, or reads what an earlier start kept, and points their `tiles` at the copies,
 * which live until destroy. *out is NULL if the device reads the stored form. A file that is
 * missing, another's or damaged, or that cannot be written, costs time only. Fails: BASE_NOMEM. */
base_code eng_repack__create(eng_repack **out, kn_weight *const *weights, uint32_t count,
                             const eng_repack_options *options, kn_device *device, base_err *err);
/* NULL is fine. A file that is still being written is not kept. */
void eng_repack__destroy(eng_repack *pack);
bool eng_repack__from_file(const eng_repack *pack);
/* Waits until the file is written. */
void eng_repack__settle(eng_repack *pack);
/* The options for a part of the model that was loaded. */
eng_repack_options eng_model__packed(const eng_model *model, const char *part,
                                     const char *fingerprint, const eng_files *files);
eng_repack *eng_model__repack(const eng_model *model); /* NULL: none */

/* cos and sin for positions < count, in `memory`, which is the caller's to free. */
base_code eng_rope__create(kn_rope *out, eng_memory *memory, kn_device *device, uint32_t rotary_dim,
                           float theta, uint32_t count, base_err *err);

/* Positions past the context window that a draft block may reach. */
#define ENG_ROPE_SLACK 64

uint32_t eng_model__rows_max(const eng_model *model);
uint32_t eng_model__width_max(const eng_model *model);
uint32_t eng_model__context_max(const eng_model *model);
const eng_files *eng_model__files(const eng_model *model);

/* ---- model_m3.c ---- */

typedef struct eng_m3_layer {
    const float *norm_in, *norm_post, *q_norm, *k_norm, *index_q_norm, *index_k_norm;
    kn_weight q, k, v, o, index_q, index_k;
    kn_weight gate, up, down;                      /* dense MLP */
    const float *router, *bias;                    /* mixture */
    kn_weight *w1, *w2, *w3;                       /* [experts] */
    kn_weight shared_gate, shared_up, shared_down; /* shared_inner > 0 */
} eng_m3_layer;

typedef struct eng_m3 {
    kn_weight embedding, head;
    const float *norm;
    eng_m3_layer *layers;
} eng_m3;

/* Arrays in the binder's arena. */
base_code eng_m3__bind(eng_m3 *out, eng_binder *binder, const eng_model_config *config);

/* One step's memory, the device's. */
typedef struct eng_m3_scratch {
    float *x;             /* [rows_max, hidden] */
    float *q, *out;       /* [rows_max, q_heads * head_dim] */
    float *index_q;       /* [rows_max, index_heads * index_dim] */
    int32_t *blocks;      /* [rows_max, index_heads, topk_blocks] */
    float *margin;        /* [rows_max, index_heads] */
    int32_t *route_ids;   /* [rows_max, experts_topk] */
    float *route_weights; /* the same */
} eng_m3_scratch;

/* Layers [first, end) over the residual stream in scratch->x, which layer 0 begins. */
void eng_m3__layers(const eng_m3 *m3, const eng_model_config *config, kn_device *device,
                    const kn_rope *rope, const eng_m3_scratch *scratch, kn_kv *kv,
                    const kn_rows *rows, uint32_t first, uint32_t end,
                    const uint32_t *feature_layers, uint32_t feature_count, float *features,
                    const eng_model_probe *probe);
void eng_m3__head(const eng_m3 *m3, const eng_model_config *config, kn_device *device,
                  const eng_m3_scratch *scratch, const uint32_t *pick, uint32_t picks,
                  float *logits);

/* ---- random.c ---- */

/* True if `spec` names a random shape ("random:…"). */
bool eng_random__is(const char *spec);
/* "random:SHAPE?layers=N&seed=N" into its parts. layers 0: as the shape has. */
base_code eng_random__parse(const char *spec, char shape[32], uint32_t *layers, uint64_t *seed,
                            base_err *err);
/* Writes config.json, generation_config.json, tokenizer.json, model.safetensors and, with `draft`,
 * dspark/ into `dir`, which must exist. BASE_UNSUPPORTED for unknown shapes and for one that needs
 * more memory than the machine has free. */
base_code eng_random__write(const char *dir, const char *shape, uint32_t layers, uint64_t seed,
                            bool draft, base_err *err);
