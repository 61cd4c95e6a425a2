/* Checkpoints of random weights in M3.1-Flash's own formats, for tests and measurements that need a
 * model's shape and not its sense. A tensor's bytes are a function of (seed, its name), so a layer
 * is the same whatever is generated around it.
 *
 * Values are near normal with deviation 1/sqrt(inputs), which keeps activations at their size from
 * layer to layer. They are drawn in their storage format: element codes from a table of the normal
 * distribution's quantiles, scales around a fixed one; nothing is quantised, so that gigabytes take
 * seconds.
 *
 * The tokenizer has a token for each byte and the special tokens that the chat format needs; ids
 * above stay unused. */
#include "engine/model_internal.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/num.h"
#include "engine/base/rand.h"
#include "engine/base/utf8.h"

#define PREFIX "random:"
#define DRAFT_BLOCK 7
#define CHUNK (1u << 20)

typedef struct shape {
    const char *name;
    uint32_t hidden, layers, dense_layers, vocab, context;
    uint32_t q_heads, kv_heads, head_dim, rotary_dim;
    uint32_t theta;
    uint32_t dense_inner, expert_inner, shared_inner, experts, experts_topk;
    uint32_t index_dim, topk_blocks;
    uint32_t draft_layers, draft_inner, window, markov_rank;
    uint32_t targets[5], target_count;
    bool mxfp8_experts; /* as M3's own MXFP8 release; else NVFP4 */
} shape;

static const shape SHAPES[] = {
    /* the shape of tests/vectors/tiny */
    {.name = "tiny",
     .hidden = 128,
     .layers = 4,
     .dense_layers = 1,
     .vocab = 320,
     .context = 32768,
     .q_heads = 4,
     .kv_heads = 2,
     .head_dim = 32,
     .rotary_dim = 16,
     .theta = 10000,
     .dense_inner = 64,
     .expert_inner = 64,
     .shared_inner = 32,
     .experts = 4,
     .experts_topk = 2,
     .index_dim = 32,
     .topk_blocks = 4,
     .draft_layers = 2,
     .draft_inner = 64,
     .window = 256,
     .markov_rank = 16,
     .targets = {0, 2, 3},
     .target_count = 3},
    /* the same with MXFP8 experts */
    {.name = "tiny-mxfp8",
     .hidden = 128,
     .layers = 4,
     .dense_layers = 1,
     .vocab = 320,
     .context = 32768,
     .q_heads = 4,
     .kv_heads = 2,
     .head_dim = 32,
     .rotary_dim = 16,
     .theta = 10000,
     .dense_inner = 64,
     .expert_inner = 64,
     .shared_inner = 32,
     .experts = 4,
     .experts_topk = 2,
     .index_dim = 32,
     .topk_blocks = 4,
     .draft_layers = 2,
     .draft_inner = 64,
     .window = 256,
     .markov_rank = 16,
     .targets = {0, 2, 3},
     .target_count = 3,
     .mxfp8_experts = true},
    /* the shape of config/models/nano */
    {.name = "nano",
     .hidden = 384,
     .layers = 8,
     .dense_layers = 2,
     .vocab = 5120,
     .context = 32768,
     .q_heads = 8,
     .kv_heads = 2,
     .head_dim = 64,
     .rotary_dim = 32,
     .theta = 500000,
     .dense_inner = 768,
     .expert_inner = 128,
     .shared_inner = 128,
     .experts = 16,
     .experts_topk = 2,
     .index_dim = 64,
     .topk_blocks = 4,
     .draft_layers = 2,
     .draft_inner = 512,
     .window = 4096,
     .markov_rank = 64,
     .targets = {1, 4, 7},
     .target_count = 3},
    /* larger than any cache and small enough to be made for a measurement: 1.7 GB */
    {.name = "mid",
     .hidden = 2048,
     .layers = 12,
     .dense_layers = 1,
     .vocab = 32768,
     .context = 65536,
     .q_heads = 16,
     .kv_heads = 4,
     .head_dim = 128,
     .rotary_dim = 64,
     .theta = 5000000,
     .dense_inner = 6144,
     .expert_inner = 1024,
     .shared_inner = 1024,
     .experts = 32,
     .experts_topk = 4,
     .index_dim = 128,
     .topk_blocks = 16,
     .draft_layers = 5,
     .draft_inner = 4096,
     .window = 4096,
     .markov_rank = 256,
     .targets = {2, 4, 7, 9, 11},
     .target_count = 5},
    {.name = "m3.1-flash",
     .hidden = 6144,
     .layers = 60,
     .dense_layers = 3,
     .vocab = 200064,
     .context = 1048576,
     .q_heads = 64,
     .kv_heads = 4,
     .head_dim = 128,
     .rotary_dim = 64,
     .theta = 5000000,
     .dense_inner = 12288,
     .expert_inner = 3072,
     .shared_inner = 3072,
     .experts = 128,
     .experts_topk = 4,
     .index_dim = 128,
     .topk_blocks = 16,
     .draft_layers = 5,
     .draft_inner = 12288,
     .window = 4096,
     .markov_rank = 256,
     .targets = {3, 17, 31, 45, 59},
     .target_count = 5},
};

/* Ids 256 and up, in this order. */
static const char *const SPECIALS[] = {"]!p~[",       "]~b]",         "[e~[",  "]!d~[",
                                       "<tool_call>", "</tool_call>", "]~!b[", "]<]minimax[>[",
                                       "<mm:think>",  "</mm:think>"};
#define SPECIAL_COUNT (sizeof SPECIALS / sizeof *SPECIALS)
#define ID_PAD 256
#define ID_END 258
#define ID_BEGIN 262
#define ID_NOISE 263

/* ---- the plan of a file: its tensors in order ---- */

typedef enum fill_kind {
    FILL_BF16,  /* normal */
    FILL_F32,   /* normal */
    FILL_VALUE, /* one F32 number */
    FILL_MXFP8, /* elements */
    FILL_MXFP8_SCALE,
    FILL_NVFP4, /* two codes a byte */
    FILL_NVFP4_SCALE,
} fill_kind;

typedef struct planned {
    const char *name;
    fill_kind kind;
    uint64_t rows, cols; /* of the stored array; rows 0: one dimension */
    float value;         /* deviation, or the number */
    uint8_t scale;       /* MXFP8: the larger of the two scale bytes */
} planned;

typedef struct plan {
    base_arena *arena;
    planned *tensors;
    uint32_t count, max;
    bool failed;
} plan;

static const char *const FILL_DTYPE[] = {
    [FILL_BF16] = "BF16",           [FILL_F32] = "F32",        [FILL_VALUE] = "F32",
    [FILL_MXFP8] = "F8_E4M3",       [FILL_MXFP8_SCALE] = "U8", [FILL_NVFP4] = "U8",
    [FILL_NVFP4_SCALE] = "F8_E4M3",
};

static uint64_t bytes_of(const planned *t)
{
    uint64_t count = (t->rows > 0 ? t->rows : 1) * t->cols;
    return t->kind == FILL_BF16
               ? count * 2
               : (t->kind == FILL_F32 || t->kind == FILL_VALUE ? count * 4 : count);
}

static void put(plan *p, planned t, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

static void put(plan *p, planned t, const char *fmt, ...)
{
    char name[160];
    va_list args;
    va_start(args, fmt);
    int length = vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    if (p->count == p->max) {
        uint32_t max = p->max == 0 ? 256 : p->max * 2;
        planned *tensors = realloc(p->tensors, max * sizeof *tensors);
        if (tensors == NULL) {
            p->failed = true;
            return;
        }
        p->tensors = tensors;
        p->max = max;
    }
    t.name = base_arena_copy(p->arena, name, (size_t)length);
    p->failed = p->failed || t.name == NULL;
    p->tensors[p->count++] = t;
}

static float deviation(uint32_t inputs)
{
    return 1.0f / sqrtf((float)inputs);
}

static void put_bf16(plan *p, uint32_t rows, uint32_t cols, float value, const char *at,
                     const char *name)
{
    put(p, (planned){.kind = FILL_BF16, .rows = rows, .cols = cols, .value = value}, "%s%s", at,
        name);
}

/* Half of the blocks have the scale 2^e, half 2^(e-1): their mean square is 0.625 * 4^e. The
 * elements' deviation is what is left, 24 to 48, in the middle of E4M3's range. */
static void put_mxfp8(plan *p, uint32_t rows, uint32_t cols, const char *at, const char *name)
{
    float wanted = deviation(cols) / sqrtf(0.625f);
    int e = (int)floorf(log2f(wanted / 24));
    put(p, (planned){.kind = FILL_MXFP8, .rows = rows, .cols = cols, .value = ldexpf(wanted, -e)},
        "%s%s.weight", at, name);
    put(p,
        (planned){
            .kind = FILL_MXFP8_SCALE, .rows = rows, .cols = cols / 32, .scale = (uint8_t)(127 + e)},
        "%s%s.weight_scale_inv", at, name);
}

/* Codes are uniform over E2M1's values (mean square 137/16), scales over the eight E4M3 values from
 * 1 to 1.875 (mean square 2.1484375). */
static void put_nvfp4(plan *p, uint32_t rows, uint32_t cols, const char *at, const char *name)
{
    float global = sqrtf(137.0f / 16 * 2.1484375f) / deviation(cols);
    put(p, (planned){.kind = FILL_NVFP4, .rows = rows, .cols = cols / 2}, "%s%s.weight_packed", at,
        name);
    put(p, (planned){.kind = FILL_NVFP4_SCALE, .rows = rows, .cols = cols / 16},
        "%s%s.weight_scale", at, name);
    put(p, (planned){.kind = FILL_VALUE, .cols = 1, .value = global}, "%s%s.weight_global_scale",
        at, name);
    put(p, (planned){.kind = FILL_VALUE, .cols = 1, .value = 448}, "%s%s.input_global_scale", at,
        name);
}

static void plan_attention(plan *p, const shape *s, const char *at)
{
    uint32_t q = s->q_heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    put_bf16(p, 0, s->hidden, 0.1f, at, "input_layernorm.weight");
    put_bf16(p, 0, s->hidden, 0.1f, at, "post_attention_layernorm.weight");
    put_bf16(p, 0, s->head_dim, 0.2f, at, "self_attn.q_norm.weight");
    put_bf16(p, 0, s->head_dim, 0.2f, at, "self_attn.k_norm.weight");
    put_mxfp8(p, q, s->hidden, at, "self_attn.q_proj");
    put_mxfp8(p, kv, s->hidden, at, "self_attn.k_proj");
    put_mxfp8(p, kv, s->hidden, at, "self_attn.v_proj");
    put_mxfp8(p, s->hidden, q, at, "self_attn.o_proj");
}

static void plan_mlp(plan *p, uint32_t hidden, uint32_t inner, const char *at)
{
    put_mxfp8(p, inner, hidden, at, "gate_proj");
    put_mxfp8(p, inner, hidden, at, "up_proj");
    put_mxfp8(p, hidden, inner, at, "down_proj");
}

static void plan_mixture(plan *p, const shape *s, uint32_t layer)
{
    char at[128];
    void (*put_expert)(plan *, uint32_t, uint32_t, const char *, const char *) =
        s->mxfp8_experts ? put_mxfp8 : put_nvfp4;
    snprintf(at, sizeof at, "language_model.model.layers.%u.block_sparse_moe.", layer);
    put(p,
        (planned){.kind = FILL_F32,
                  .rows = s->experts,
                  .cols = s->hidden,
                  .value = 2 * deviation(s->hidden)},
        "%sgate.weight", at);
    put(p, (planned){.kind = FILL_F32, .cols = s->experts, .value = 0.05f},
        "%se_score_correction_bias", at);
    for (uint32_t e = 0; e < s->experts; e++) {
        snprintf(at, sizeof at, "language_model.model.layers.%u.block_sparse_moe.experts.%u.",
                 layer, e);
        put_expert(p, s->expert_inner, s->hidden, at, "w1");
        put_expert(p, s->hidden, s->expert_inner, at, "w2");
        put_expert(p, s->expert_inner, s->hidden, at, "w3");
    }
    snprintf(at, sizeof at, "language_model.model.layers.%u.block_sparse_moe.shared_experts.",
             layer);
    plan_mlp(p, s->hidden, s->shared_inner, at);
}

static void plan_model(plan *p, const shape *s)
{
    char at[128];
    put_bf16(p, s->vocab, s->hidden, 1, "language_model.model.", "embed_tokens.weight");
    put_bf16(p, s->vocab, s->hidden, 2 * deviation(s->hidden), "language_model.", "lm_head.weight");
    put_bf16(p, 0, s->hidden, 0.1f, "language_model.model.", "norm.weight");
    for (uint32_t l = 0; l < s->layers; l++) {
        snprintf(at, sizeof at, "language_model.model.layers.%u.", l);
        plan_attention(p, s, at);
        put_mxfp8(p, s->kv_heads * s->index_dim, s->hidden, at, "self_attn.index_q_proj");
        put_mxfp8(p, s->index_dim, s->hidden, at, "self_attn.index_k_proj");
        put_bf16(p, 0, s->index_dim, 0.2f, at, "self_attn.index_q_norm.weight");
        put_bf16(p, 0, s->index_dim, 0.2f, at, "self_attn.index_k_norm.weight");
        if (l >= s->dense_layers) {
            plan_mixture(p, s, l);
            continue;
        }
        snprintf(at, sizeof at, "language_model.model.layers.%u.mlp.", l);
        plan_mlp(p, s->hidden, s->dense_inner, at);
    }
}

static void plan_draft(plan *p, const shape *s)
{
    static const char at[] = "language_model.model.dspark.";
    char layer[128];
    uint32_t joined = s->target_count * s->hidden;
    put_bf16(p, s->hidden, joined, deviation(joined), at, "fc.weight");
    put_bf16(p, 0, s->hidden, 0.1f, at, "hidden_norm.weight");
    put_bf16(p, 0, s->hidden, 0.1f, at, "final_norm.weight");
    put_bf16(p, s->vocab, s->markov_rank, 1, at, "markov_head.markov_w1.weight");
    put_bf16(p, s->vocab, s->markov_rank, deviation(s->markov_rank), at,
             "markov_head.markov_w2.weight");
    put_bf16(p, 1, s->hidden + s->markov_rank, deviation(s->hidden + s->markov_rank), at,
             "confidence_head.proj.weight");
    put_bf16(p, 0, 1, 0.1f, at, "confidence_head.proj.bias");
    for (uint32_t l = 0; l < s->draft_layers; l++) {
        snprintf(layer, sizeof layer, "%slayers.%u.decoder_layer.", at, l);
        plan_attention(p, s, layer);
        snprintf(layer, sizeof layer, "%slayers.%u.decoder_layer.mlp.", at, l);
        plan_mlp(p, s->hidden, s->draft_inner, layer);
    }
}

/* ---- drawing ---- */

/* Quantiles (i + 0.5) / 256 of the standard normal distribution. */
static void fill_quantiles(float out[256])
{
    for (int i = 0; i < 256; i++) {
        double lo = -6, hi = 6, p = (i + 0.5) / 256;
        for (int step = 0; step < 60; step++) {
            double mid = (lo + hi) / 2;
            *(0.5 * erfc(-mid * M_SQRT1_2) < p ? &lo : &hi) = mid;
        }
        out[i] = (float)lo;
    }
}

/* The sum of two quantiles is closer to normal than one and has 65,536 values. */
static float normal(const float quantiles[256], uint32_t bits, float value)
{
    return (quantiles[bits & 255] + quantiles[bits >> 8 & 255]) * (value * (float)M_SQRT1_2);
}

/* `elements` of t from number `from` on (a multiple of 16) into `out`. */
static void draw(uint8_t *out, const planned *t, uint64_t seed, uint64_t from, uint64_t elements,
                 const float quantiles[256], const uint8_t codes[256])
{
    uint64_t stream = XXH3_64bits(t->name, strlen(t->name));
    bool wide = t->kind == FILL_BF16 || t->kind == FILL_F32; /* 16 random bits an element, else 8 */
    for (uint64_t i = 0; i < elements; i += wide ? 8 : 16) {
        base_rand4 r = base_rand(seed, stream, (from + i) / (wide ? 8 : 16));
        uint64_t n = base_min(elements - i, wide ? 8 : 16);
        for (uint64_t j = 0; j < n; j++) {
            uint32_t bits = wide ? r.v[j / 2] >> (j % 2 * 16) : r.v[j / 4] >> (j % 4 * 8);
            uint64_t at = i + j;
            uint16_t half;
            float number;
            switch (t->kind) {
            case FILL_BF16:
                half = kn_f32_to_bf16(normal(quantiles, bits, t->value));
                memcpy(out + 2 * at, &half, 2);
                break;
            case FILL_F32:
                number = normal(quantiles, bits, t->value);
                memcpy(out + 4 * at, &number, 4);
                break;
            case FILL_VALUE:
                memcpy(out + 4 * at, &t->value, 4);
                break;
            case FILL_MXFP8:
                out[at] = codes[bits & 255];
                break;
            case FILL_MXFP8_SCALE:
                out[at] = (uint8_t)(t->scale - (bits & 1));
                break;
            case FILL_NVFP4:
                out[at] = (uint8_t)bits;
                break;
            case FILL_NVFP4_SCALE:
                out[at] = (uint8_t)(0x38 + (bits & 7)); /* 1 to 1.875 */
                break;
            }
        }
    }
}

static bool write_tensor(FILE *f, const planned *t, uint64_t seed, const float quantiles[256],
                         uint8_t *chunk)
{
    uint8_t codes[256];
    uint64_t count = (t->rows > 0 ? t->rows : 1) * t->cols, size = bytes_of(t) / count,
             step = CHUNK / size;
    for (int i = 0; i < 256; i++)
        codes[i] = kn_f32_to_e4m3(quantiles[i] * t->value);
    for (uint64_t from = 0; from < count; from += step) {
        uint64_t n = base_min(step, count - from);
        draw(chunk, t, seed, from, n, quantiles, codes);
        if (fwrite(chunk, size, n, f) != n)
            return false;
    }
    return true;
}

/* ---- files ---- */

static base_code write_failed(const char *path, base_err *err)
{
    return base_fail(err, BASE_IO, "cannot write %.140s: %s", path, strerror(errno));
}

static base_code write_plan(const char *dir, const plan *p, uint64_t seed, base_err *err)
{
    char path[4096];
    float quantiles[256];
    base_buf header;
    uint64_t offset = 0;
    base_code code = BASE_OK;
    base_buf_init(&header, 0);
    base_buf_puts(&header, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (uint32_t i = 0; i < p->count; i++) {
        const planned *t = &p->tensors[i];
        uint64_t bytes = bytes_of(t);
        base_buf_printf(&header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name,
                        FILL_DTYPE[t->kind]);
        if (t->rows > 0)
            base_buf_printf(&header, "%llu,", (unsigned long long)t->rows);
        base_buf_printf(&header, "%llu],\"data_offsets\":[%llu,%llu]}", (unsigned long long)t->cols,
                        (unsigned long long)offset, (unsigned long long)(offset + bytes));
        offset += bytes;
    }
    base_buf_puts(&header, "}");
    while (header.length % 8 != 0 && !header.failed)
        base_buf_puts(&header, " ");
    uint8_t *chunk = malloc(CHUNK);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    FILE *f = fopen(path, "wbe");
    if (header.failed || chunk == NULL) {
        code = base_fail(err, BASE_NOMEM, "out of memory for %s", path);
    } else if (f == NULL) {
        code = write_failed(path, err);
    } else {
        uint8_t length[8];
        for (int i = 0; i < 8; i++)
            length[i] = (uint8_t)((uint64_t)header.length >> (8 * i));
        bool ok = fwrite(length, 1, 8, f) == 8 &&
                  fwrite(header.data, 1, header.length, f) == header.length;
        fill_quantiles(quantiles);
        for (uint32_t i = 0; i < p->count && ok; i++)
            ok = write_tensor(f, &p->tensors[i], seed, quantiles, chunk);
        if (!ok)
            code = write_failed(path, err);
    }
    if (f != NULL && fclose(f) != 0 && code == BASE_OK)
        code = write_failed(path, err);
    free(chunk);
    base_buf_deinit(&header);
    return code;
}

static base_code write_text(const char *dir, const char *name, base_buf *text, base_err *err)
{
    char path[4096];
    base_code code = BASE_OK;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    if (text->failed)
        return base_fail(err, BASE_NOMEM, "out of memory for %s", name);
    FILE *f = fopen(path, "wbe");
    if (f == NULL)
        return write_failed(path, err);
    if (fwrite(text->data, 1, text->length, f) != text->length)
        code = write_failed(path, err);
    if (fclose(f) != 0 && code == BASE_OK)
        code = write_failed(path, err);
    return code;
}

static void add_flags(base_buf *b, const char *key, uint32_t layers, uint32_t first)
{
    base_buf_printf(b, "  \"%s\": [", key);
    for (uint32_t i = 0; i < layers; i++)
        base_buf_printf(b, "%s%d", i > 0 ? ", " : "", i >= first);
    base_buf_puts(b, "],\n");
}

static void add_common(base_buf *b, const shape *s, uint32_t layers)
{
    base_buf_printf(b,
                    "  \"hidden_size\": %u,\n  \"num_hidden_layers\": %u,\n  \"vocab_size\": %u,\n",
                    s->hidden, layers, s->vocab);
    base_buf_printf(
        b, "  \"num_attention_heads\": %u,\n  \"num_key_value_heads\": %u,\n  \"head_dim\": %u,\n",
        s->q_heads, s->kv_heads, s->head_dim);
    base_buf_printf(
        b, "  \"max_position_embeddings\": %u,\n  \"rope_theta\": %u,\n  \"rotary_dim\": %u,\n",
        s->context, s->theta, s->rotary_dim);
    base_buf_puts(
        b,
        "  \"partial_rotary_factor\": 0.5,\n  \"rms_norm_eps\": 1e-06,\n  \"use_gemma_norm\": "
        "true,\n"
        "  \"use_qk_norm\": true,\n  \"qk_norm_type\": \"per_head\",\n  \"attention_output_gate\": "
        "false,\n"
        "  \"hidden_act\": \"swigluoai\",\n  \"swiglu_alpha\": 1.702,\n  \"swiglu_limit\": 7.0,\n"
        "  \"tie_word_embeddings\": false,\n");
}

static const char QUANTIZATION[] = " \"quantization_config\": {\n  \"quant_method\": \"mxfp8\",\n  "
                                   "\"activation_scheme\": \"dynamic\",\n"
                                   "  \"weight_block_size\": [1, 32]";

static base_code write_config(const char *dir, const shape *s, base_err *err)
{
    base_buf b;
    base_buf_init(&b, 0);
    base_buf_printf(&b,
                    "{\n \"architectures\": [\"MiniMaxM3SparseForConditionalGeneration\"],\n"
                    " \"model_type\": \"minimax_m3_vl\",\n \"torch_dtype\": \"bfloat16\",\n"
                    " \"bos_token_id\": %d,\n \"eos_token_id\": %d,\n \"text_config\": {\n"
                    "  \"architectures\": [\"MiniMaxM3SparseForCausalLM\"],\n",
                    ID_BEGIN, ID_END);
    add_common(&b, s, s->layers);
    base_buf_printf(&b, "  \"dense_intermediate_size\": %u,\n  \"intermediate_size\": %u,\n",
                    s->dense_inner, s->expert_inner);
    base_buf_printf(&b, "  \"shared_intermediate_size\": %u,\n  \"n_shared_experts\": 1,\n",
                    s->shared_inner);
    add_flags(&b, "moe_layer_freq", s->layers, s->dense_layers);
    base_buf_printf(&b, "  \"num_local_experts\": %u,\n  \"num_experts_per_tok\": %u,\n",
                    s->experts, s->experts_topk);
    base_buf_puts(&b, "  \"scoring_func\": \"sigmoid\",\n  \"use_routing_bias\": true,\n"
                      "  \"routed_scaling_factor\": 2.0,\n  \"sparse_attention_config\": {\n");
    base_buf_printf(&b,
                    "  \"use_sparse_attention\": true,\n  \"sparse_index_dim\": %u,\n"
                    "  \"sparse_num_index_heads\": %u,\n  \"sparse_topk_blocks\": %u,\n",
                    s->index_dim, s->kv_heads, s->topk_blocks);
    add_flags(&b, "sparse_attention_freq", s->layers, 0);
    add_flags(&b, "sparse_disable_index_value", s->layers, 0);
    base_buf_puts(&b, "  \"sparse_block_size\": 128,\n  \"sparse_score_type\": \"max\",\n"
                      "  \"sparse_init_block\": 0,\n  \"sparse_local_block\": 1\n  }\n },\n");
    base_buf_puts(&b, QUANTIZATION);
    if (!s->mxfp8_experts)
        base_buf_puts(&b, ",\n  \"moe_quant_algo\": \"NVFP4\",\n  \"moe_quant_format\": "
                          "\"nvfp4-pack-quantized\"");
    base_buf_puts(&b, "\n },\n");
    base_buf_printf(&b,
                    " \"whimbrel\": {\n  \"name\": \"%s\",\n"
                    "  \"identity\": \"You are a model of random weights.\",\n"
                    "  \"default_thinking\": \"disabled\"\n }\n}\n",
                    s->name);
    base_code code = write_text(dir, "config.json", &b, err);
    base_buf_clear(&b);
    base_buf_printf(&b, "{\"bos_token_id\": %d, \"eos_token_id\": %d, \"pad_token_id\": %d}\n",
                    ID_BEGIN, ID_END, ID_PAD);
    if (code == BASE_OK)
        code = write_text(dir, "generation_config.json", &b, err);
    base_buf_deinit(&b);
    return code;
}

static base_code write_draft_config(const char *dir, const shape *s, base_err *err)
{
    base_buf b;
    base_buf_init(&b, 0);
    base_buf_puts(&b,
                  "{\n \"architectures\": [\"DSparkMiniMaxDraftModel\"],\n \"text_config\": {\n");
    add_common(&b, s, s->draft_layers);
    base_buf_printf(&b, "  \"dense_intermediate_size\": %u,\n  \"dspark_ffn_hidden_size\": %u,\n",
                    s->draft_inner, s->draft_inner);
    add_flags(&b, "moe_layer_freq", s->draft_layers, s->draft_layers);
    base_buf_puts(&b, "  \"sparse_attention_config\": null,\n  \"dspark_use_dense_ffn\": true,\n  "
                      "\"layer_types\": [");
    for (uint32_t i = 0; i < s->draft_layers; i++)
        base_buf_printf(&b, "%s\"sliding_attention\"", i > 0 ? ", " : "");
    base_buf_printf(&b, "],\n  \"sliding_window\": %u,\n  \"dspark_block_size\": %d,\n", s->window,
                    DRAFT_BLOCK);
    base_buf_printf(&b, "  \"dspark_noise_token_id\": %d,\n  \"dspark_target_layer_ids\": [",
                    ID_NOISE);
    for (uint32_t i = 0; i < s->target_count; i++)
        base_buf_printf(&b, "%s%u", i > 0 ? ", " : "", s->targets[i]);
    base_buf_printf(&b, "],\n  \"dspark_markov_rank\": %u,\n", s->markov_rank);
    base_buf_puts(
        &b, "  \"dspark_markov_head_type\": \"vanilla\",\n  \"enable_confidence_head\": true,\n"
            "  \"confidence_head_with_markov\": true,\n  \"dspark_hybrid_context_fusion\": false\n "
            "},\n");
    base_buf_puts(&b, QUANTIZATION);
    base_buf_puts(&b, "\n }\n}\n");
    base_code code = write_text(dir, "config.json", &b, err);
    base_buf_deinit(&b);
    return code;
}

/* The o200k-family split pattern of the vendor's tokenizer, as a JSON string's content. */
static const char SPLIT[] =
    "[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?[\\\\p{Lu}\\\\p{Lt}\\\\p{Lm}\\\\p{Lo}\\\\p{M}]*[\\\\p{Ll}\\\\p{"
    "Lm}\\\\p{Lo}\\\\p{M}]+"
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?[\\\\p{Lu}\\\\p{Lt}\\\\p{Lm}\\\\p{"
    "Lo}\\\\p{M}]+"
    "[\\\\p{Ll}\\\\p{Lm}\\\\p{Lo}\\\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\\\p{N}{1,3}|"
    " ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+";

static base_code write_tokenizer(const char *dir, base_err *err)
{
    base_buf b;
    uint32_t extra = 0;
    base_buf_init(&b, 0);
    base_buf_puts(&b, "{\n \"version\": \"1.0\",\n \"added_tokens\": [\n");
    for (size_t i = 0; i < SPECIAL_COUNT; i++)
        base_buf_printf(
            &b,
            "  {\"id\": %zu, \"content\": \"%s\", \"single_word\": false, \"lstrip\": false, "
            "\"rstrip\": false, \"normalized\": false, \"special\": true}%s\n",
            256 + i, SPECIALS[i], i + 1 < SPECIAL_COUNT ? "," : "");
    base_buf_puts(&b, " ],\n \"normalizer\": null,\n \"pre_tokenizer\": {\"type\": \"Sequence\", "
                      "\"pretokenizers\": [\n"
                      "  {\"type\": \"Split\", \"pattern\": {\"Regex\": \"");
    base_buf_puts(&b, SPLIT);
    base_buf_puts(
        &b,
        "\"}, \"behavior\": \"Isolated\", \"invert\": false},\n"
        "  {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "
        "\"use_regex\": false}]},\n \"post_processor\": null,\n"
        " \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, \"trim_offsets\": "
        "true, "
        "\"use_regex\": true},\n \"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": "
        "null,\n"
        "  \"byte_fallback\": false, \"ignore_merges\": false, \"merges\": [],\n  \"vocab\": {");
    for (uint32_t byte = 0; byte < 256; byte++) {
        /* The byte-level alphabet of GPT-2: printable bytes stand for themselves, the rest for
         * U+0100 and up. */
        bool printable = (byte >= 33 && byte < 127) || (byte >= 161 && byte != 173);
        char letter[4];
        size_t length = base_utf8_encode(letter, printable ? byte : 256 + extra++);
        base_buf_puts(&b, byte > 0 ? ", " : "");
        base_buf_json_string(&b, letter, length);
        base_buf_printf(&b, ": %u", byte);
    }
    base_buf_puts(&b, "}}\n}\n");
    base_code code = write_text(dir, "tokenizer.json", &b, err);
    base_buf_deinit(&b);
    return code;
}

/* ---- the header's functions ---- */

bool eng_random__is(const char *spec)
{
    return strncmp(spec, PREFIX, strlen(PREFIX)) == 0;
}

static bool read_number(const char *text, size_t length, uint64_t max, uint64_t *out)
{
    uint64_t value = 0;
    if (length == 0)
        return false;
    for (size_t i = 0; i < length; i++)
        if (text[i] < '0' || text[i] > '9' || __builtin_mul_overflow(value, (uint64_t)10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(text[i] - '0'), &value))
            return false;
    *out = value;
    return value <= max;
}

base_code eng_random__parse(const char *spec, char shape_name[32], uint32_t *layers, uint64_t *seed,
                            base_err *err)
{
    const char *at = spec + strlen(PREFIX);
    size_t length = strcspn(at, "?");
    *layers = 0;
    *seed = 1;
    if (length >= 32)
        return base_fail(err, BASE_UNSUPPORTED, "\"%.60s\" names no random shape", spec);
    memcpy(shape_name, at, length);
    shape_name[length] = '\0';
    for (at += length; *at != '\0'; at += strcspn(at, "&")) {
        uint64_t value = 0;
        at++; /* ? or & */
        size_t end = strcspn(at, "&");
        if (strncmp(at, "layers=", 7) == 0 && end >= 7 &&
            read_number(at + 7, end - 7, KN_LAYERS_MAX, &value) && value > 0)
            *layers = (uint32_t)value;
        else if (strncmp(at, "seed=", 5) == 0 && end >= 5 &&
                 read_number(at + 5, end - 5, UINT64_MAX, &value))
            *seed = value;
        else
            return base_fail(err, BASE_INVALID,
                             "\"%.60s\": \"%.*s\" is neither layers=1 to %d nor seed=N", spec,
                             (int)base_min(end, 40), at, KN_LAYERS_MAX);
    }
    return BASE_OK;
}

static const shape *find_shape(const char *name)
{
    for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++)
        if (strcmp(SHAPES[i].name, name) == 0)
            return &SHAPES[i];
    return NULL;
}

/* Fewer layers keep both kinds of them where there are at least two, and the draft's targets among
 * them. */
static base_code cut(shape *s, uint32_t layers, base_err *err)
{
    uint32_t kept = 0;
    if (layers == 0)
        return BASE_OK;
    if (layers > s->layers)
        return base_fail(err, BASE_INVALID, "random shape %s has %u layers, not %u", s->name,
                         s->layers, layers);
    s->layers = layers;
    s->dense_layers = (uint32_t)base_min(s->dense_layers, layers / 2);
    for (uint32_t i = 0; i < s->target_count; i++)
        if (s->targets[i] < layers)
            s->targets[kept++] = s->targets[i];
    if (kept == 0)
        s->targets[kept++] = layers - 1;
    s->target_count = kept;
    return BASE_OK;
}

/* The bytes lie in the page cache while the model runs; more than the machine has would be read
 * from disk in every step. */
static base_code check_memory(const plan *p, const shape *s, base_err *err)
{
    uint64_t bytes = 0,
             memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    for (uint32_t i = 0; i < p->count; i++)
        bytes += bytes_of(&p->tensors[i]);
    if (bytes <= memory / 4 * 3)
        return BASE_OK;
    return base_fail(err, BASE_UNSUPPORTED,
                     "random shape %s of %u layers has %.1f GB of weights, this machine %.1f GB of "
                     "memory; use layers=N",
                     s->name, s->layers, (double)bytes * 1e-9, (double)memory * 1e-9);
}

static base_code write_tensors(const char *dir, const shape *s, uint64_t seed, bool draft,
                               base_err *err)
{
    plan p = {.arena = base_arena_create(1 << 14, SIZE_MAX)};
    if (p.arena != NULL)
        (draft ? plan_draft : plan_model)(&p, s);
    base_code code = p.arena == NULL || p.failed
                         ? base_fail(err, BASE_NOMEM, "out of memory for a random checkpoint")
                         : check_memory(&p, s, err);
    if (code == BASE_OK)
        code = write_plan(dir, &p, seed, err);
    free(p.tensors);
    base_arena_destroy(p.arena);
    return code;
}

base_code eng_random__write(const char *dir, const char *shape_name, uint32_t layers, uint64_t seed,
                            bool draft, base_err *err)
{
    char path[4096];
    const shape *found = find_shape(shape_name);
    if (found == NULL)
        return base_fail(
            err, BASE_UNSUPPORTED,
            "random shape \"%.32s\" is none of tiny, tiny-mxfp8, nano, mid, m3.1-flash",
            shape_name);
    shape s = *found;
    base_code code = cut(&s, layers, err);
    if (code == BASE_OK)
        code = write_tensors(dir, &s, seed, false, err);
    if (code == BASE_OK)
        code = write_config(dir, &s, err);
    if (code == BASE_OK)
        code = write_tokenizer(dir, err);
    if (code != BASE_OK || !draft)
        return code;
    snprintf(path, sizeof path, "%s/dspark", dir);
    if (mkdir(path, 0777) != 0 && errno != EEXIST)
        return write_failed(path, err);
    code = write_tensors(path, &s, seed, true, err);
    return code == BASE_OK ? write_draft_config(path, &s, err) : code;
}
