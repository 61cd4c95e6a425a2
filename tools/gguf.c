/* The file (ggml-org/ggml, docs/gguf.md, version 3): magic, counts, key-value pairs, tensor infos,
 * then every tensor's data at a multiple of 32 bytes. Keys and tensor names are those of
 * llama.cpp's conversion/minimax.py. Tensors are written one after the other; nothing is kept.
 *
 *   NVFP4   per 64 values: four E4M3 scale bytes, then four groups of 8 bytes, value i of a group
 * in the low half of byte i, value i + 8 in the high half; the tensor's factor is a tensor of its
 * own, NAME.scale (one value an expert), that multiplies Q8_0    per 32 values: a half float, then
 * 32 signed bytes */
#include "tools/gguf.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/model_internal.h"

#define ARCH "minimax-m3"
#define ALIGN 32
#define NVFP4_BLOCK 64
#define Q8_BLOCK 32
#define ARENA_MAX ((size_t)1 << 30)
/* llama.cpp has these two as constants of the activation. */
#define ACT_ALPHA 1.702f
#define ACT_LIMIT 7.0f
#define GATING_SIGMOID 2

enum { TYPE_F32 = 0, TYPE_Q8_0 = 8, TYPE_BF16 = 30, TYPE_NVFP4 = 40 };
enum { KV_U32 = 4, KV_I32 = 5, KV_F32 = 6, KV_BOOL = 7, KV_STRING = 8, KV_ARRAY = 9 };

/* What one tensor is written from. */
typedef struct source {
    const kn_weight *weights; /* [count] matrices of one shape, or */
    const float *floats;      /* [rows, cols]; a norm's are written plus 1 */
    uint32_t count, rows, cols;
    bool norm, scales; /* scales: of `weights`, one value each */
    int type;
    uint64_t bytes;
} source;

typedef struct writer {
    base_buf head;
    uint64_t pairs;
    source *sources;
    size_t source_count, source_max;
    uint64_t data_bytes;
    bool exact; /* every value as a float */
    gguf_summary *summary;
    base_err *err;
    base_code code;
} writer;

/* ---- the head ---- */

static void add(writer *w, const void *bytes, size_t length)
{
    base_buf_add(&w->head, bytes, length);
}

static void add_u32(writer *w, uint32_t value)
{
    add(w, &value, sizeof value);
}

static void add_u64(writer *w, uint64_t value)
{
    add(w, &value, sizeof value);
}

static void add_string(writer *w, const char *text, size_t length)
{
    add_u64(w, length);
    add(w, text, length);
}

static void add_key(writer *w, const char *key, uint32_t type)
{
    add_string(w, key, strlen(key));
    add_u32(w, type);
    w->pairs++;
}

static void pair_u32(writer *w, const char *key, uint32_t value)
{
    add_key(w, key, KV_U32);
    add_u32(w, value);
}

static void pair_f32(writer *w, const char *key, float value)
{
    add_key(w, key, KV_F32);
    add(w, &value, sizeof value);
}

static void pair_bool(writer *w, const char *key, bool value)
{
    uint8_t byte = value;
    add_key(w, key, KV_BOOL);
    add(w, &byte, 1);
}

static void pair_string(writer *w, const char *key, const char *value)
{
    add_key(w, key, KV_STRING);
    add_string(w, value, strlen(value));
}

static void begin_array(writer *w, const char *key, uint32_t type, uint64_t count)
{
    add_key(w, key, KV_ARRAY);
    add_u32(w, type);
    add_u64(w, count);
}

/* ---- tensors ---- */

static void unsupported(writer *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void unsupported(writer *w, const char *fmt, ...)
{
    char text[160];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (w->code == BASE_OK)
        w->code = base_fail(w->err, BASE_UNSUPPORTED, ARCH " of llama.cpp: %s", text);
}

static uint64_t row_bytes(int type, uint32_t cols)
{
    switch (type) {
    case TYPE_NVFP4:
        return (uint64_t)cols / NVFP4_BLOCK * 36;
    case TYPE_Q8_0:
        return (uint64_t)cols / Q8_BLOCK * 34;
    case TYPE_BF16:
        return (uint64_t)cols * 2;
    default:
        return (uint64_t)cols * 4;
    }
}

static void add_info(writer *w, source s, const char *name)
{
    if (w->code != BASE_OK)
        return;
    if (w->source_count == w->source_max) {
        size_t max = w->source_max > 0 ? 2 * w->source_max : 256;
        source *more = realloc(w->sources, max * sizeof *more);
        if (more == NULL) {
            w->code = base_fail(w->err, BASE_NOMEM, "out of memory for %zu tensors", max);
            return;
        }
        w->sources = more;
        w->source_max = max;
    }
    uint32_t dims = s.count > 1 && !s.scales ? 3 : (s.rows > 0 ? 2 : 1);
    uint64_t rows = (uint64_t)(s.rows > 0 ? s.rows : 1) * (s.scales ? 1 : s.count);
    uint64_t values = rows * s.cols;
    s.bytes = rows * row_bytes(s.type, s.cols);
    add_string(w, name, strlen(name));
    add_u32(w, dims);
    add_u64(w, s.cols);
    if (dims > 1)
        add_u64(w, s.rows);
    if (dims > 2)
        add_u64(w, s.count);
    add_u32(w, (uint32_t)s.type);
    add_u64(w, w->data_bytes);
    w->data_bytes += (s.bytes + ALIGN - 1) / ALIGN * ALIGN;
    w->sources[w->source_count++] = s;
    gguf_summary *sum = w->summary;
    sum->tensors++;
    *(s.type == TYPE_NVFP4  ? &sum->nvfp4
      : s.type == TYPE_Q8_0 ? &sum->q8_0
      : s.type == TYPE_BF16 ? &sum->bf16
                            : &sum->f32) += values;
}

/* A matrix, or `count` of one shape. */
static void tensor(writer *w, const kn_weight *weights, uint32_t count, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static void tensor(writer *w, const kn_weight *weights, uint32_t count, const char *fmt, ...)
{
    static const int TYPES[] = {[KN_F32] = TYPE_F32,
                                [KN_BF16] = TYPE_BF16,
                                [KN_MXFP8] = TYPE_Q8_0,
                                [KN_NVFP4] = TYPE_NVFP4};
    char base[96], name[112];
    va_list args;
    va_start(args, fmt);
    vsnprintf(base, sizeof base, fmt, args);
    va_end(args);
    source s = {.weights = weights,
                .count = count,
                .rows = weights->rows,
                .cols = weights->cols,
                .type = w->exact ? TYPE_F32 : TYPES[weights->type]};
    if (s.type == TYPE_NVFP4 && s.cols % NVFP4_BLOCK != 0)
        unsupported(w, "%s: rows of %u values are no multiple of %d", base, s.cols, NVFP4_BLOCK);
    for (uint32_t i = 1; i < count; i++)
        if (weights[i].type != weights->type)
            unsupported(w, "%s: experts of several formats", base);
    snprintf(name, sizeof name, "%s.weight", base);
    add_info(w, s, name);
    if (s.type != TYPE_NVFP4)
        return;
    snprintf(name, sizeof name, "%s.scale", base);
    add_info(w, (source){.weights = weights, .count = count, .cols = count, .scales = true}, name);
}

static void floats(writer *w, const float *values, uint32_t rows, uint32_t cols, bool norm,
                   const char *fmt, ...) __attribute__((format(printf, 6, 7)));

static void floats(writer *w, const float *values, uint32_t rows, uint32_t cols, bool norm,
                   const char *fmt, ...)
{
    char name[112];
    va_list args;
    va_start(args, fmt);
    vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    add_info(w, (source){.floats = values, .count = 1, .rows = rows, .cols = cols, .norm = norm},
             name);
}

/* ---- data ---- */

/* Round to nearest even; |x| < 65504. */
static uint16_t half_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude < 0x38800000) { /* below 2^-14: multiples of 2^-24 */
        float scaled = ldexpf(fabsf(x), 24);
        return (uint16_t)(sign | (uint32_t)lrintf(scaled));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
}

static void mxfp8_row(float *out, const kn_weight *m, uint32_t row)
{
    const uint8_t *codes = (const uint8_t *)m->data + (size_t)row * m->cols;
    const uint8_t *scales = (const uint8_t *)m->scale + (size_t)row * (m->cols / 32);
    for (uint32_t i = 0; i < m->cols; i++)
        out[i] = kn_e4m3_to_f32(codes[i]) * kn_e8m0_to_f32(scales[i / 32]);
}

static void nvfp4_values(float *out, const kn_weight *m, uint32_t row)
{
    const uint8_t *codes = (const uint8_t *)m->data + (size_t)row * (m->cols / 2);
    const uint8_t *scales = (const uint8_t *)m->scale + (size_t)row * (m->cols / 16);
    for (uint32_t i = 0; i < m->cols; i++)
        out[i] = kn_e2m1_to_f32(codes[i / 2] >> (i % 2 * 4) & 15) * kn_e4m3_to_f32(scales[i / 16]) /
                 m->scale_global;
}

static void float_row(float *out, const kn_weight *m, uint32_t row)
{
    const size_t at = (size_t)row * m->cols;
    if (m->type == KN_MXFP8)
        mxfp8_row(out, m, row);
    else if (m->type == KN_NVFP4)
        nvfp4_values(out, m, row);
    else if (m->type == KN_F32)
        memcpy(out, (const float *)m->data + at, m->cols * sizeof *out);
    else
        for (uint32_t i = 0; i < m->cols; i++)
            out[i] = kn_bf16_to_f32(((const uint16_t *)m->data)[at + i]);
}

static void q8_0_row(uint8_t *out, const float *x, uint32_t cols)
{
    for (uint32_t b = 0; b < cols / Q8_BLOCK; b++, x += Q8_BLOCK, out += 34) {
        float most = 0;
        for (uint32_t i = 0; i < Q8_BLOCK; i++)
            most = fmaxf(most, fabsf(x[i]));
        float step = most / 127, inverse = step > 0 ? 1 / step : 0;
        uint16_t half = half_of(step);
        memcpy(out, &half, 2);
        for (uint32_t i = 0; i < Q8_BLOCK; i++)
            out[2 + i] = (uint8_t)(int8_t)lrintf(x[i] * inverse);
    }
}

static void nvfp4_row(uint8_t *out, const kn_weight *m, uint32_t row)
{
    const uint8_t *codes = (const uint8_t *)m->data + (size_t)row * (m->cols / 2);
    const uint8_t *scales = (const uint8_t *)m->scale + (size_t)row * (m->cols / 16);
    for (uint32_t b = 0; b < m->cols / NVFP4_BLOCK; b++, out += 36)
        for (uint32_t g = 0; g < 4; g++) {
            const uint8_t *from = codes + (b * 4 + g) * 8;
            out[g] = scales[b * 4 + g] & 0x7f;
            for (uint32_t i = 0; i < 8; i++) {
                uint8_t low = from[i / 2] >> (i % 2 * 4) & 15;
                uint8_t high = from[4 + i / 2] >> (i % 2 * 4) & 15;
                out[4 + g * 8 + i] = (uint8_t)(low | high << 4);
            }
        }
}

static bool write_weights(FILE *f, const source *s, uint8_t *out, float *row)
{
    size_t bytes = row_bytes(s->type, s->cols);
    for (uint32_t e = 0; e < s->count; e++)
        for (uint32_t r = 0; r < s->rows; r++) {
            const kn_weight *m = &s->weights[e];
            const void *from = out;
            if (s->type == TYPE_NVFP4) {
                nvfp4_row(out, m, r);
            } else if (s->type == TYPE_Q8_0) {
                mxfp8_row(row, m, r);
                q8_0_row(out, row, s->cols);
            } else if (s->type == TYPE_F32) {
                float_row(row, m, r);
                from = row;
            } else {
                from = (const uint8_t *)m->data + r * bytes;
            }
            if (fwrite(from, 1, bytes, f) != bytes)
                return false;
        }
    return true;
}

static bool write_source(FILE *f, const source *s, uint8_t *out, float *row)
{
    static const uint8_t ZERO[ALIGN];
    bool good = true;
    if (s->weights != NULL && !s->scales) {
        good = write_weights(f, s, out, row);
    } else {
        uint64_t values = (uint64_t)(s->rows > 0 ? s->rows : 1) * s->cols;
        for (uint64_t i = 0; i < values && good; i++) {
            float value =
                s->scales ? 1 / s->weights[i].scale_global : s->floats[i] + (s->norm ? 1.0f : 0.0f);
            good = fwrite(&value, sizeof value, 1, f) == 1;
        }
    }
    size_t rest = (ALIGN - s->bytes % ALIGN) % ALIGN;
    return good && fwrite(ZERO, 1, rest, f) == rest;
}

/* ---- what goes in ---- */

static void add_shape(writer *w, const eng_model_config *c, uint32_t dense)
{
    pair_string(w, "general.architecture", ARCH);
    pair_string(w, "general.name", c->name);
    pair_u32(w, "general.alignment", ALIGN);
    pair_u32(w, ARCH ".vocab_size", c->vocab);
    pair_u32(w, ARCH ".context_length", c->context_max);
    pair_u32(w, ARCH ".embedding_length", c->hidden);
    pair_u32(w, ARCH ".block_count", c->layers);
    pair_u32(w, ARCH ".leading_dense_block_count", dense);
    pair_u32(w, ARCH ".feed_forward_length", dense > 0 ? c->dense_inner : c->expert_inner);
    pair_u32(w, ARCH ".expert_feed_forward_length", c->expert_inner);
    pair_u32(w, ARCH ".expert_count", c->experts);
    pair_u32(w, ARCH ".expert_used_count", c->experts_topk);
    pair_u32(w, ARCH ".expert_shared_count", c->shared_inner / c->expert_inner);
    pair_f32(w, ARCH ".expert_weights_scale", c->routed_scale);
    pair_bool(w, ARCH ".expert_weights_norm", true);
    pair_u32(w, ARCH ".expert_gating_func", GATING_SIGMOID);
    pair_u32(w, ARCH ".attention.head_count", c->q_heads);
    pair_u32(w, ARCH ".attention.head_count_kv", c->kv_heads);
    pair_u32(w, ARCH ".attention.key_length", c->head_dim);
    pair_u32(w, ARCH ".attention.value_length", c->head_dim);
    pair_f32(w, ARCH ".attention.layer_norm_rms_epsilon", c->eps);
    pair_u32(w, ARCH ".attention.indexer.head_count", c->index_heads);
    pair_u32(w, ARCH ".attention.indexer.key_length", c->index_dim);
    pair_u32(w, ARCH ".attention.indexer.top_k", c->topk_blocks);
    pair_u32(w, ARCH ".attention.indexer.block_size", KN_BLOCK_TOKENS);
    pair_u32(w, ARCH ".attention.indexer.local_blocks", c->local_blocks);
    pair_u32(w, ARCH ".rope.dimension_count", c->rotary_dim);
    pair_f32(w, ARCH ".rope.freq_base", c->rope_theta);
}

/* Vocabulary and merges as tokenizer.json spells them, which is llama.cpp's own spelling too. */
static void add_tokenizer(writer *w, const char *dir, const eng_config_file *file)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    json_t *root = json_load_file(path, 0, NULL), *model = json_object_get(root, "model"),
           *vocab = json_object_get(model, "vocab"), *merges = json_object_get(model, "merges"),
           *added = json_object_get(root, "added_tokens"), *value;
    uint32_t count = file->model.vocab;
    const char *key, **names = calloc(count, sizeof *names);
    int32_t *types = calloc(count, sizeof *types);
    size_t i;
    if (names == NULL || types == NULL || !json_is_object(vocab) || !json_is_array(merges)) {
        if (w->code == BASE_OK)
            w->code = base_fail(w->err, BASE_FORMAT, "%.120s: no vocabulary and merges", path);
        goto out;
    }
    json_object_foreach(vocab, key, value)
    {
        json_int_t id = json_integer_value(value);
        if (id >= 0 && id < count) {
            names[id] = key;
            types[id] = 1; /* ordinary */
        }
    }
    json_array_foreach(added, i, value)
    {
        json_int_t id = json_integer_value(json_object_get(value, "id"));
        if (id >= 0 && id < count) {
            names[id] = json_string_value(json_object_get(value, "content"));
            types[id] = 3; /* control */
        }
    }
    pair_string(w, "tokenizer.ggml.model", "gpt2");
    pair_string(w, "tokenizer.ggml.pre", "minimax-m2");
    begin_array(w, "tokenizer.ggml.tokens", KV_STRING, count);
    for (uint32_t id = 0; id < count; id++) {
        char unused[32];
        snprintf(unused, sizeof unused, "[unused%u]", id);
        const char *name = names[id] != NULL ? names[id] : unused;
        add_string(w, name, strlen(name));
    }
    begin_array(w, "tokenizer.ggml.token_type", KV_I32, count);
    for (uint32_t id = 0; id < count; id++)
        add_u32(w, types[id] != 0 ? (uint32_t)types[id] : 5); /* unused */
    begin_array(w, "tokenizer.ggml.merges", KV_STRING, json_array_size(merges));
    json_array_foreach(merges, i, value)
    {
        char pair[1024] = "";
        if (json_is_array(value))
            snprintf(pair, sizeof pair, "%s %s", json_string_value(json_array_get(value, 0)),
                     json_string_value(json_array_get(value, 1)));
        const char *text = json_is_string(value) ? json_string_value(value) : pair;
        add_string(w, text, strlen(text));
    }
    if (file->end_token_count > 0)
        pair_u32(w, "tokenizer.ggml.eos_token_id", (uint32_t)file->end_tokens[0]);
    pair_bool(w, "tokenizer.ggml.add_bos_token", false);
out:
    free(names);
    free(types);
    json_decref(root);
}

static void add_layer(writer *w, const eng_model_config *c, const eng_m3_layer *l, uint32_t i,
                      bool dense)
{
    const uint32_t h = c->hidden;
    floats(w, l->norm_in, 0, h, true, "blk.%u.attn_norm.weight", i);
    floats(w, l->norm_post, 0, h, true, "blk.%u.ffn_norm.weight", i);
    floats(w, l->q_norm, 0, c->head_dim, true, "blk.%u.attn_q_norm.weight", i);
    floats(w, l->k_norm, 0, c->head_dim, true, "blk.%u.attn_k_norm.weight", i);
    tensor(w, &l->q, 1, "blk.%u.attn_q", i);
    tensor(w, &l->k, 1, "blk.%u.attn_k", i);
    tensor(w, &l->v, 1, "blk.%u.attn_v", i);
    tensor(w, &l->o, 1, "blk.%u.attn_output", i);
    if (dense) {
        tensor(w, &l->gate, 1, "blk.%u.ffn_gate", i);
        tensor(w, &l->up, 1, "blk.%u.ffn_up", i);
        tensor(w, &l->down, 1, "blk.%u.ffn_down", i);
        return;
    }
    floats(w, l->router, c->experts, h, false, "blk.%u.ffn_gate_inp.weight", i);
    floats(w, l->bias, 0, c->experts, false, "blk.%u.exp_probs_b.bias", i);
    tensor(w, l->w1, c->experts, "blk.%u.ffn_gate_exps", i);
    tensor(w, l->w2, c->experts, "blk.%u.ffn_down_exps", i);
    tensor(w, l->w3, c->experts, "blk.%u.ffn_up_exps", i);
    tensor(w, &l->shared_gate, 1, "blk.%u.ffn_gate_shexp", i);
    tensor(w, &l->shared_up, 1, "blk.%u.ffn_up_shexp", i);
    tensor(w, &l->shared_down, 1, "blk.%u.ffn_down_shexp", i);
    tensor(w, &l->index_q, 1, "blk.%u.indexer.q_proj", i);
    tensor(w, &l->index_k, 1, "blk.%u.indexer.k_proj", i);
    floats(w, l->index_q_norm, 0, c->index_dim, true, "blk.%u.indexer.q_norm.weight", i);
    floats(w, l->index_k_norm, 0, c->index_dim, true, "blk.%u.indexer.k_norm.weight", i);
}

/* Its layers are dense in both halves first, then sparse in both. */
static uint32_t check_layers(writer *w, const eng_model_config *c)
{
    uint32_t dense = 0;
    while (dense < c->layers && !c->moe[dense])
        dense++;
    for (uint32_t l = dense; l < c->layers; l++)
        if (!c->moe[l] || !c->sparse[l])
            unsupported(w, "layer %u behind the first mixture is not sparse in both halves", l);
    for (uint32_t l = 0; l < dense; l++)
        w->summary->dense_only_layers += c->sparse[l];
    if (w->summary->dense_only_layers > 0)
        w->summary->equal_tokens = c->topk_blocks * KN_BLOCK_TOKENS;
    if (dense == c->layers || c->shared_inner == 0 || c->shared_inner % c->expert_inner != 0)
        unsupported(w, "shared experts of %u beside experts of %u", c->shared_inner,
                    c->expert_inner);
    if (c->index_heads != c->kv_heads)
        unsupported(w, "%u index heads for %u KV heads", c->index_heads, c->kv_heads);
    if (c->init_blocks > 0)
        unsupported(w, "%u blocks that are always attended to at the start", c->init_blocks);
    if (c->act_alpha != ACT_ALPHA || c->act_limit != ACT_LIMIT)
        unsupported(w, "swiglu_alpha %g, swiglu_limit %g", (double)c->act_alpha,
                    (double)c->act_limit);
    return dense;
}

static base_code write_file(writer *w, const char *path)
{
    uint32_t cols_max = 1;
    for (size_t i = 0; i < w->source_count; i++)
        cols_max = w->sources[i].cols > cols_max ? w->sources[i].cols : cols_max;
    uint8_t *out = malloc((size_t)cols_max * 4);
    float *row = malloc(cols_max * sizeof *row);
    if (out == NULL || row == NULL) {
        free(out);
        free(row);
        return base_fail(w->err, BASE_NOMEM, "out of memory");
    }
    FILE *f = fopen(path, "wbe");
    bool good = f != NULL;
    good = good && fwrite(w->head.data, 1, w->head.length, f) == w->head.length;
    for (size_t i = 0; i < w->source_count && good; i++)
        good = write_source(f, &w->sources[i], out, row);
    int why = errno;
    if (f != NULL && fclose(f) != 0) {
        good = false;
        why = errno;
    }
    free(out);
    free(row);
    if (good)
        return BASE_OK;
    if (f != NULL)
        unlink(path);
    return base_fail(w->err, BASE_IO, "%.140s: %s", path, strerror(why));
}

static void describe(writer *w, const char *dir, const eng_config_file *file, const eng_m3 *m3)
{
    const eng_model_config *c = &file->model;
    uint32_t dense = check_layers(w, c);
    if (w->code != BASE_OK)
        return;
    /* The counts stand before what they count: pairs first, into a buffer of their own. */
    add_shape(w, c, dense);
    add_tokenizer(w, dir, file);
    base_buf pairs = w->head;
    base_buf_init(&w->head, 0);
    tensor(w, &m3->embedding, 1, "token_embd");
    floats(w, m3->norm, 0, c->hidden, true, "output_norm.weight");
    tensor(w, &m3->head, 1, "output");
    for (uint32_t l = 0; l < c->layers; l++)
        add_layer(w, c, &m3->layers[l], l, l < dense);
    base_buf infos = w->head;
    base_buf_init(&w->head, 0);
    add(w, "GGUF", 4);
    add_u32(w, 3);
    add_u64(w, w->source_count);
    add_u64(w, w->pairs);
    add(w, pairs.data, pairs.length);
    add(w, infos.data, infos.length);
    while (w->head.length % ALIGN != 0)
        add(w, "", 1);
    if ((w->head.failed || pairs.failed || infos.failed) && w->code == BASE_OK)
        w->code = base_fail(w->err, BASE_NOMEM, "out of memory");
    w->summary->bytes = w->head.length + w->data_bytes;
    base_buf_deinit(&pairs);
    base_buf_deinit(&infos);
}

base_code gguf_export(const char *dir, const char *path, bool exact, gguf_summary *summary,
                      base_err *err)
{
    writer w = {.exact = exact, .summary = summary, .err = err};
    const char *slash = strrchr(dir, '/');
    eng_config_file file;
    eng_files *files = NULL;
    eng_binder binder = {0};
    eng_m3 m3;
    *summary = (gguf_summary){0};
    base_buf_init(&w.head, 0);
    base_arena *arena = base_arena_create(1 << 16, ARENA_MAX);
    if (arena == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory");
    w.code = eng_config__read(&file, dir, slash != NULL && slash[1] != '\0' ? slash + 1 : dir, err);
    if (w.code == BASE_OK)
        w.code = eng_files_open(&files, dir, err);
    if (w.code == BASE_OK)
        w.code = eng_binder__init(&binder, files, arena, err);
    if (w.code == BASE_OK)
        w.code = eng_m3__bind(&m3, &binder, &file.model);
    if (w.code == BASE_OK)
        describe(&w, dir, &file, &m3);
    if (w.code == BASE_OK)
        w.code = write_file(&w, path);
    eng_binder__deinit(&binder);
    eng_files_close(files);
    base_arena_destroy(arena);
    base_buf_deinit(&w.head);
    free(w.sources);
    return w.code;
}
