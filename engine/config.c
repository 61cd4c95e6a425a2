/* config.json, generation_config.json and dspark/config.json, as MiniMax-M3 and M3.1-Flash write
 * them: read with jansson, every value checked against what the forward pass can do. A key that
 * would change the mathematics and is not offered is refused by name rather than ignored; keys that
 * do not matter to it are not looked at. */
#include "engine/model_internal.h"

#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define CONFIG_BYTES_MAX (4u << 20)
#define HIDDEN_MAX 65536
#define CONTEXT_MAX (1u << 24) /* positions stay exact in float */

/* The sentence that opens the system turn of the vendor's template. */
#define IDENTITY_REST                                                                              \
    ", developed by MiniMax. Knowledge cutoff: January 2026. Founded in early 2022, MiniMax is a " \
    "global AI "                                                                                   \
    "foundation model company committed to advancing the frontiers of AI towards AGI."
static const char IDENTITY_M31[] = "Your model version is MiniMax-M3.1" IDENTITY_REST;
static const char IDENTITY_M3[] = "Your model version is MiniMax-M3" IDENTITY_REST;

/* ---- reading values; the first failure sticks ---- */

typedef struct reader {
    const char *file;
    const json_t *object;
    base_err *err;
    base_code code;
} reader;

static void fail(reader *r, base_code code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static void fail(reader *r, base_code code, const char *fmt, ...)
{
    char text[160];
    va_list args;
    if (r->code != BASE_OK)
        return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    r->code = base_fail(r->err, code, "%s: %s", r->file, text);
}

static const json_t *value_of(const reader *r, const char *key)
{
    const json_t *value = json_object_get(r->object, key);
    return json_is_null(value) ? NULL : value;
}

static uint32_t integer(reader *r, const char *key, const json_t *value, uint32_t min, uint32_t max)
{
    if (r->code != BASE_OK)
        return min;
    if (!json_is_integer(value)) {
        fail(r, BASE_FORMAT, "%s is not an integer", key);
        return min;
    }
    json_int_t n = json_integer_value(value);
    if (n < (json_int_t)min || n > (json_int_t)max) {
        fail(r, BASE_FORMAT, "%s %lld is outside %u to %u", key, (long long)n, min, max);
        return min;
    }
    return (uint32_t)n;
}

static uint32_t need_u32(reader *r, const char *key, uint32_t min, uint32_t max)
{
    const json_t *value = value_of(r, key);
    if (value == NULL)
        fail(r, BASE_FORMAT, "%s is missing", key);
    return integer(r, key, value, min, max);
}

static uint32_t get_u32(reader *r, const char *key, uint32_t fallback, uint32_t min, uint32_t max)
{
    const json_t *value = value_of(r, key);
    return value == NULL ? fallback : integer(r, key, value, min, max);
}

static float get_float(reader *r, const char *key, double fallback, double min, double max)
{
    const json_t *value = value_of(r, key);
    double x = value == NULL ? fallback : json_number_value(value);
    if (value != NULL && !json_is_number(value))
        fail(r, BASE_FORMAT, "%s is not a number", key);
    else if (!(x >= min && x <= max))
        fail(r, BASE_FORMAT, "%s %g is outside %g to %g", key, x, min, max);
    return (float)x;
}

static bool get_bool(reader *r, const char *key, bool fallback)
{
    const json_t *value = value_of(r, key);
    if (value != NULL && !json_is_boolean(value))
        fail(r, BASE_FORMAT, "%s is neither true nor false", key);
    return value == NULL ? fallback : json_is_true(value);
}

static const char *get_string(reader *r, const char *key, const char *fallback)
{
    const json_t *value = value_of(r, key);
    if (value != NULL && !json_is_string(value))
        fail(r, BASE_FORMAT, "%s is not a string", key);
    return json_is_string(value) ? json_string_value(value) : fallback;
}

/* The only value of a switch that is offered here; also what an absent key means. */
static void only_bool(reader *r, const char *key, bool offered)
{
    if (get_bool(r, key, offered) != offered)
        fail(r, BASE_UNSUPPORTED, "%s %s is not offered", key, offered ? "false" : "true");
}

static void only_string(reader *r, const char *key, const char *offered)
{
    const char *value = get_string(r, key, offered);
    if (value != NULL && strcmp(value, offered) != 0)
        fail(r, BASE_UNSUPPORTED, "%s \"%.40s\" is not offered, only \"%s\"", key, value, offered);
}

static reader child(reader *r, const char *key)
{
    reader c = *r;
    const json_t *value = value_of(r, key);
    if (value != NULL && !json_is_object(value))
        fail(r, BASE_FORMAT, "%s is not an object", key);
    c.object = json_is_object(value) ? value : NULL;
    c.code = r->code;
    return c;
}

/* A 0 or 1 for each layer; `fallback` for all if the key is absent. */
static void layer_flags(reader *r, const char *key, uint8_t *out, uint32_t layers, uint8_t fallback)
{
    const json_t *value = value_of(r, key);
    if (value != NULL && (!json_is_array(value) || json_array_size(value) != layers)) {
        fail(r, BASE_FORMAT, "%s is not an array of %u flags, one a layer", key, layers);
        return;
    }
    for (uint32_t i = 0; i < layers; i++) {
        const json_t *flag = json_array_get(value, i);
        out[i] = value == NULL ? fallback : json_integer_value(flag) != 0;
        if (value != NULL &&
            (!json_is_integer(flag) || (json_integer_value(flag) & ~(json_int_t)1) != 0)) {
            fail(r, BASE_FORMAT, "%s, layer %u: neither 0 nor 1", key, i);
            return;
        }
    }
}

static base_code load_json(json_t **out, const char *dir, const char *file, bool optional,
                           base_err *err)
{
    char path[4096];
    json_error_t error;
    base_buf text;
    base_code code = BASE_OK;
    *out = NULL;
    snprintf(path, sizeof path, "%s/%s", dir, file);
    FILE *f = fopen(path, "rbe");
    if (f == NULL) {
        if (optional && errno == ENOENT)
            return BASE_OK;
        return base_fail(err, errno == ENOENT ? BASE_NOT_FOUND : BASE_IO, "cannot open %.140s: %s",
                         path, strerror(errno));
    }
    base_buf_init(&text, 0);
    char chunk[4096];
    size_t n;
    while (text.length <= CONFIG_BYTES_MAX && (n = fread(chunk, 1, sizeof chunk, f)) > 0 &&
           !text.failed)
        base_buf_add(&text, chunk, n);
    if (ferror(f))
        code = base_fail(err, BASE_IO, "cannot read %.140s: %s", path, strerror(errno));
    else if (text.failed)
        code = base_fail(err, BASE_NOMEM, "out of memory for %s", file);
    else if (text.length > CONFIG_BYTES_MAX)
        code = base_fail(err, BASE_FORMAT, "%s: more than %u bytes", file, CONFIG_BYTES_MAX);
    else if ((*out = json_loadb(text.data != NULL ? text.data : "", text.length, 0, &error)) ==
             NULL)
        code = base_fail(err, BASE_FORMAT, "%s: line %d: %.100s", file, error.line, error.text);
    else if (!json_is_object(*out))
        code = base_fail(err, BASE_FORMAT, "%s: not a JSON object", file);
    if (code != BASE_OK) {
        json_decref(*out);
        *out = NULL;
    }
    fclose(f);
    base_buf_deinit(&text);
    return code;
}

/* ---- what target and draft share ---- */

/* One failure is known to both, so that the code that is returned is that of the message. */
static void join(reader *r, reader *part)
{
    r->code = part->code = r->code != BASE_OK ? r->code : part->code;
}

static void read_rope(reader *r, uint32_t head_dim, float *theta, uint32_t *rotary_dim)
{
    reader rope = child(r, "rope_parameters"), scaling = child(r, "rope_scaling");
    const char *type = get_string(&scaling, "rope_type", get_string(&scaling, "type", "default"));
    float part, given;
    join(r, &scaling);
    if (scaling.object != NULL && strcmp(type, "default") != 0)
        fail(r, BASE_UNSUPPORTED, "rope_scaling \"%.40s\" is not offered", type);
    join(r, &rope);
    only_string(&rope, "rope_type", "default");
    given = get_float(&rope, "rope_theta", 5e6, 1, 1e12);
    part = get_float(&rope, "partial_rotary_factor", 0.5, 0, 1);
    join(r, &rope);
    *theta = get_float(r, "rope_theta", given, 1, 1e12);
    part = get_float(r, "partial_rotary_factor", part, 0, 1);
    *rotary_dim = get_u32(r, "rotary_dim", (uint32_t)((float)head_dim * part), 0, head_dim);
    if (*rotary_dim % 2 != 0)
        fail(r, BASE_FORMAT, "rotary_dim %u is odd", *rotary_dim);
}

/* Switches of the architecture that the forward pass takes for granted. */
static void check_switches(reader *r)
{
    only_bool(r, "use_gemma_norm", true);
    only_bool(r, "use_qk_norm", true);
    only_string(r, "qk_norm_type", "per_head");
    only_bool(r, "attention_output_gate", false);
    only_bool(r, "attention_bias", false);
    only_string(r, "hidden_act", "swigluoai");
    only_bool(r, "tie_word_embeddings", false);
    if (get_float(r, "swiglu_beta", 1, -100, 100) != 1)
        fail(r, BASE_UNSUPPORTED, "swiglu_beta other than 1 is not offered");
}

static void check_multiple(reader *r, const char *key, uint32_t value, uint32_t of)
{
    if (value % of != 0)
        fail(r, BASE_FORMAT, "%s %u is not a multiple of %u", key, value, of);
}

static void read_heads(reader *r, uint32_t *q_heads, uint32_t *kv_heads, uint32_t *head_dim)
{
    *q_heads = need_u32(r, "num_attention_heads", 1, 1024);
    *kv_heads = need_u32(r, "num_key_value_heads", 1, 256);
    *head_dim = need_u32(r, "head_dim", 16, 512);
    check_multiple(r, "num_attention_heads", *q_heads, *kv_heads);
    check_multiple(r, "head_dim", *head_dim, 16);
}

static void read_quantization(reader *root, eng_config_file *out)
{
    reader q = child(root, "quantization_config");
    if (q.object == NULL) {
        root->code = q.code;
        return;
    }
    const char *method = get_string(&q, "quant_method", NULL);
    if (method == NULL)
        fail(&q, BASE_FORMAT, "quantization_config.quant_method is missing");
    else if (strcmp(method, "mxfp8") != 0)
        fail(&q, BASE_UNSUPPORTED,
             "quantization_config.quant_method \"%.40s\" is not offered, only \"mxfp8\"", method);
    const json_t *block = value_of(&q, "weight_block_size");
    if (block != NULL &&
        (json_array_size(block) != 2 || json_integer_value(json_array_get(block, 0)) != 1 ||
         json_integer_value(json_array_get(block, 1)) != 32))
        fail(&q, BASE_UNSUPPORTED, "quantization_config.weight_block_size is not [1, 32]");
    const char *moe = get_string(&q, "moe_quant_algo", NULL);
    if (moe != NULL && strcmp(moe, "NVFP4") != 0 && strcmp(moe, "MXFP8") != 0)
        fail(&q, BASE_UNSUPPORTED, "quantization_config.moe_quant_algo \"%.40s\" is not offered",
             moe);
    only_string(&q, "moe_quant_format", "nvfp4-pack-quantized");
    out->mxfp8 = true;
    out->nvfp4_experts = moe != NULL && strcmp(moe, "NVFP4") == 0;
    root->code = q.code;
}

/* ---- the target ---- */

static void check_architecture(reader *root, reader *text)
{
    const json_t *list = value_of(root, "architectures");
    const char *name = json_string_value(json_array_get(list, 0));
    const char *type = get_string(root, "model_type", NULL);
    if (name == NULL)
        name = json_string_value(json_array_get(value_of(text, "architectures"), 0));
    if (name != NULL && strncmp(name, "MiniMaxM3", 9) != 0)
        fail(root, BASE_UNSUPPORTED, "architectures \"%.60s\" is not of the MiniMax-M3 family",
             name);
    if (name == NULL && (type == NULL || strncmp(type, "minimax_m3", 10) != 0))
        fail(root, BASE_UNSUPPORTED,
             "neither architectures nor model_type names the MiniMax-M3 family");
}

static void read_sparse(reader *text, eng_model_config *c)
{
    reader s = child(text, "sparse_attention_config");
    uint8_t no_value[KN_LAYERS_MAX];
    bool any = false;
    if (s.object == NULL || !get_bool(&s, "use_sparse_attention", true)) {
        text->code = s.code;
        return;
    }
    layer_flags(&s, "sparse_attention_freq", c->sparse, c->layers, 1);
    layer_flags(&s, "sparse_disable_index_value", no_value, c->layers, 1);
    for (uint32_t i = 0; i < c->layers && s.code == BASE_OK; i++) {
        any = any || c->sparse[i];
        if (c->sparse[i] && !no_value[i])
            fail(&s, BASE_UNSUPPORTED,
                 "sparse_disable_index_value, layer %u: an index value is not offered", i);
    }
    if (any) {
        c->index_heads = need_u32(&s, "sparse_num_index_heads", 1, 256);
        c->index_dim = need_u32(&s, "sparse_index_dim", 16, 512);
        c->topk_blocks = need_u32(&s, "sparse_topk_blocks", 1, 64);
        /* Older files count tokens: blocks are rounded up, and the local ones get the own block on
         * top. */
        uint32_t init = get_u32(&s, "sparse_init_tokens", 0, 0, CONTEXT_MAX);
        uint32_t local = get_u32(&s, "sparse_local_tokens", 0, 0, CONTEXT_MAX);
        c->init_blocks =
            get_u32(&s, "sparse_init_block", (init + KN_BLOCK_TOKENS - 1) / KN_BLOCK_TOKENS, 0, 64);
        c->local_blocks = get_u32(&s, "sparse_local_block",
                                  (local + KN_BLOCK_TOKENS - 1) / KN_BLOCK_TOKENS + 1, 1, 64);
        uint32_t block = get_u32(&s, "sparse_block_size", KN_BLOCK_TOKENS, 1, CONTEXT_MAX);
        if (block != KN_BLOCK_TOKENS)
            fail(&s, BASE_UNSUPPORTED, "sparse_block_size %u is not offered, only %d", block,
                 KN_BLOCK_TOKENS);
        only_string(&s, "sparse_score_type", "max");
        check_multiple(&s, "sparse_index_dim", c->index_dim, 16);
        if (c->index_heads != c->kv_heads)
            fail(&s, BASE_UNSUPPORTED,
                 "sparse_num_index_heads %u differs from num_key_value_heads %u", c->index_heads,
                 c->kv_heads);
        if (c->init_blocks + c->local_blocks > c->topk_blocks)
            fail(&s, BASE_FORMAT,
                 "sparse_init_block %u and sparse_local_block %u exceed sparse_topk_blocks %u",
                 c->init_blocks, c->local_blocks, c->topk_blocks);
        if (c->rotary_dim > c->index_dim)
            fail(&s, BASE_FORMAT, "sparse_index_dim %u is below rotary_dim %u", c->index_dim,
                 c->rotary_dim);
    }
    text->code = s.code;
}

static void read_mixture(reader *t, eng_model_config *c)
{
    bool any_moe = false, any_dense = false;
    const json_t *freq = value_of(t, "moe_layer_freq");
    if (json_is_integer(freq)) {
        uint32_t all = integer(t, "moe_layer_freq", freq, 0, 1);
        memset(c->moe, (int)all, c->layers);
    } else {
        layer_flags(t, "moe_layer_freq", c->moe, c->layers, 0);
    }
    for (uint32_t i = 0; i < c->layers; i++)
        *(c->moe[i] ? &any_moe : &any_dense) = true;
    if (any_dense) {
        c->dense_inner = need_u32(t, "dense_intermediate_size", 1, HIDDEN_MAX * 4);
        check_multiple(t, "dense_intermediate_size", c->dense_inner, 16);
    }
    if (!any_moe)
        return;
    only_string(t, "scoring_func", "sigmoid");
    only_bool(t, "use_routing_bias", true);
    c->experts = need_u32(t, "num_local_experts", 1, 4096);
    c->experts_topk = need_u32(t, "num_experts_per_tok", 1, 64);
    c->expert_inner = need_u32(t, "intermediate_size", 1, HIDDEN_MAX * 4);
    c->routed_scale = get_float(t, "routed_scaling_factor", 1, 1e-6, 1e6);
    check_multiple(t, "intermediate_size", c->expert_inner, 16);
    if (c->experts_topk > c->experts)
        fail(t, BASE_FORMAT, "num_experts_per_tok %u exceeds num_local_experts %u", c->experts_topk,
             c->experts);
    if (get_u32(t, "n_shared_experts", 1, 0, 1) == 1) {
        c->shared_inner = need_u32(t, "shared_intermediate_size", 1, HIDDEN_MAX * 4);
        check_multiple(t, "shared_intermediate_size", c->shared_inner, 16);
    }
}

static void read_whimbrel(reader *root, eng_config_file *out)
{
    reader w = child(root, "whimbrel");
    eng_model_config *c = &out->model;
    bool m31 = out->nvfp4_experts;
    const char *identity = get_string(&w, "identity", m31 ? IDENTITY_M31 : IDENTITY_M3);
    const char *thinking = get_string(&w, "default_thinking", m31 ? "enabled" : "adaptive");
    if (identity[0] == '\0' || strlen(identity) >= sizeof c->identity)
        fail(&w, BASE_FORMAT, "whimbrel.identity is empty or exceeds %zu bytes",
             sizeof c->identity - 1);
    else
        memcpy(c->identity, identity, strlen(identity) + 1);
    if (strcmp(thinking, "enabled") == 0)
        c->thinking = ENG_THINK_ENABLED;
    else if (strcmp(thinking, "disabled") == 0)
        c->thinking = ENG_THINK_DISABLED;
    else if (strcmp(thinking, "adaptive") == 0)
        c->thinking = ENG_THINK_ADAPTIVE;
    else
        fail(&w, BASE_FORMAT,
             "whimbrel.default_thinking \"%.40s\" is none of enabled, disabled, adaptive",
             thinking);
    root->code = w.code;
}

/* eos_token_id: an id or an array of ids. */
static void read_end_tokens(reader *r, eng_config_file *out)
{
    const json_t *value = value_of(r, "eos_token_id");
    size_t count = json_is_array(value) ? json_array_size(value) : 1;
    if (value == NULL)
        return;
    if (count > ENG_END_TOKENS_MAX) {
        fail(r, BASE_FORMAT, "eos_token_id lists %zu tokens, more than %d", count,
             ENG_END_TOKENS_MAX);
        return;
    }
    for (size_t i = 0; i < count; i++)
        out->end_tokens[i] = (int32_t)integer(
            r, "eos_token_id", json_is_array(value) ? json_array_get(value, i) : value, 0,
            out->model.vocab - 1);
    out->end_token_count = (uint32_t)count;
}

static base_code read_generation(eng_config_file *out, const char *dir, base_err *err)
{
    json_t *json;
    base_code code = load_json(&json, dir, "generation_config.json", true, err);
    if (code != BASE_OK || json == NULL)
        return code;
    reader r = {.file = "generation_config.json", .object = json, .err = err};
    read_end_tokens(&r, out);
    json_decref(json);
    return r.code;
}

base_code eng_config__read(eng_config_file *out, const char *dir, const char *name, base_err *err)
{
    eng_model_config *c = &out->model;
    json_t *json;
    *out = (eng_config_file){0};
    base_code code = load_json(&json, dir, "config.json", false, err);
    if (code != BASE_OK)
        return code;
    reader root = {.file = "config.json", .object = json, .err = err};
    reader t = child(&root, "text_config");
    if (t.object == NULL)
        t.object = json; /* a text-only file has no text_config */
    t.code = root.code;
    check_architecture(&root, &t);
    read_quantization(&root, out);
    t.code = root.code;

    snprintf(c->name, sizeof c->name, "%s", name);
    c->hidden = need_u32(&t, "hidden_size", 32, HIDDEN_MAX);
    check_multiple(&t, "hidden_size", c->hidden, 32);
    c->layers = need_u32(&t, "num_hidden_layers", 1, KN_LAYERS_MAX);
    c->vocab = need_u32(&t, "vocab_size", 2, 1u << 24);
    c->context_max = need_u32(&t, "max_position_embeddings", 1, CONTEXT_MAX);
    read_heads(&t, &c->q_heads, &c->kv_heads, &c->head_dim);
    c->eps = get_float(&t, "rms_norm_eps", 1e-6, 1e-12, 1);
    c->act_alpha = get_float(&t, "swiglu_alpha", 1.702, 0, 1000);
    c->act_limit = get_float(&t, "swiglu_limit", 7, 1e-6, 1e30);
    read_rope(&t, c->head_dim, &c->rope_theta, &c->rotary_dim);
    check_switches(&t);
    if (t.code == BASE_OK)
        read_mixture(&t, c);
    if (t.code == BASE_OK)
        read_sparse(&t, c);
    root.code = t.code;
    read_whimbrel(&root, out);
    if (root.code == BASE_OK)
        read_end_tokens(&root, out);
    json_decref(json);
    return root.code != BASE_OK ? root.code : read_generation(out, dir, err);
}

/* ---- the draft ---- */

/* Every layer slides over the same window, or none does. */
static uint32_t read_window(reader *t, uint32_t layers)
{
    const json_t *types = value_of(t, "layer_types");
    uint32_t sliding = 0;
    if (types == NULL)
        return value_of(t, "sliding_window") != NULL ? need_u32(t, "sliding_window", 1, CONTEXT_MAX)
                                                     : 0;
    if (json_array_size(types) != layers)
        fail(t, BASE_FORMAT, "layer_types is not an array of %u names", layers);
    for (uint32_t i = 0; i < layers && t->code == BASE_OK; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (type != NULL && strcmp(type, "sliding_attention") == 0)
            sliding++;
        else if (type == NULL || strcmp(type, "full_attention") != 0)
            fail(t, BASE_UNSUPPORTED, "layer_types, layer %u: \"%.40s\" is not offered", i,
                 type != NULL ? type : "");
    }
    if (sliding != 0 && sliding != layers)
        fail(t, BASE_UNSUPPORTED,
             "layer_types mixes sliding and full attention, which is not offered");
    return sliding != 0 ? need_u32(t, "sliding_window", 1, CONTEXT_MAX) : 0;
}

static void read_target_layers(reader *t, eng_draft_config *c, uint32_t layers)
{
    const json_t *ids = value_of(t, "dspark_target_layer_ids");
    size_t count = json_array_size(ids);
    if (count == 0 || count > ENG_FEATURES_MAX) {
        fail(t, BASE_FORMAT, "dspark_target_layer_ids is not an array of 1 to %d layers",
             ENG_FEATURES_MAX);
        return;
    }
    for (size_t i = 0; i < count; i++)
        c->target_layers[i] =
            integer(t, "dspark_target_layer_ids", json_array_get(ids, i), 0, layers - 1);
    /* The features are joined in ascending order whatever order the file lists them in. */
    for (size_t i = 1; i < count; i++)
        for (size_t j = i; j > 0 && c->target_layers[j - 1] > c->target_layers[j]; j--) {
            uint32_t id = c->target_layers[j];
            c->target_layers[j] = c->target_layers[j - 1];
            c->target_layers[j - 1] = id;
        }
    for (size_t i = 1; i < count; i++)
        if (c->target_layers[i] == c->target_layers[i - 1])
            fail(t, BASE_FORMAT, "dspark_target_layer_ids lists %u twice", c->target_layers[i]);
    c->target_layer_count = (uint32_t)count;
}

static void must_match(reader *t, const char *key, uint32_t value, uint32_t target)
{
    if (value != target)
        fail(t, BASE_FORMAT, "%s %u differs from the target's %u", key, value, target);
}

base_code eng_config__read_draft(eng_draft_config *out, const char *dir,
                                 const eng_model_config *target, base_err *err)
{
    eng_draft_config *c = out;
    json_t *json;
    *out = (eng_draft_config){0};
    base_code code = load_json(&json, dir, "config.json", false, err);
    if (code != BASE_OK)
        return code;
    reader root = {.file = "config.json", .object = json, .err = err};
    eng_config_file formats = {0};
    const char *name = json_string_value(json_array_get(value_of(&root, "architectures"), 0));
    if (name == NULL || strcmp(name, "DSparkMiniMaxDraftModel") != 0)
        fail(&root, BASE_UNSUPPORTED,
             "architectures \"%.60s\" is not offered, only \"DSparkMiniMaxDraftModel\"",
             name != NULL ? name : "");
    read_quantization(&root, &formats);
    reader t = child(&root, "text_config");
    if (t.object == NULL)
        t.object = json;
    t.code = root.code;
    c->hidden = need_u32(&t, "hidden_size", 32, HIDDEN_MAX);
    c->layers = need_u32(&t, "num_hidden_layers", 1, KN_LAYERS_MAX);
    c->vocab = need_u32(&t, "vocab_size", 2, 1u << 24);
    must_match(&t, "hidden_size", c->hidden, target->hidden);
    must_match(&t, "vocab_size", c->vocab, target->vocab);
    read_heads(&t, &c->q_heads, &c->kv_heads, &c->head_dim);
    c->eps = get_float(&t, "rms_norm_eps", 1e-6, 1e-12, 1);
    c->act_alpha = get_float(&t, "swiglu_alpha", 1.702, 0, 1000);
    c->act_limit = get_float(&t, "swiglu_limit", 7, 1e-6, 1e30);
    read_rope(&t, c->head_dim, &c->rope_theta, &c->rotary_dim);
    check_switches(&t);
    only_bool(&t, "dspark_use_dense_ffn", true);
    only_bool(&t, "dspark_hybrid_context_fusion", false);
    only_string(&t, "dspark_markov_head_type", "vanilla");
    if (value_of(&t, "sparse_attention_config") != NULL)
        fail(&t, BASE_UNSUPPORTED,
             "sparse_attention_config: a draft with sparse attention is not offered");
    c->inner =
        get_u32(&t, "dspark_ffn_hidden_size",
                get_u32(&t, "dense_intermediate_size", 0, 1, HIDDEN_MAX * 4), 1, HIDDEN_MAX * 4);
    if (c->inner == 0)
        fail(&t, BASE_FORMAT, "dspark_ffn_hidden_size is missing");
    check_multiple(&t, "dspark_ffn_hidden_size", c->inner, 16);
    c->block = need_u32(&t, "dspark_block_size", 1, ENG_ROPE_SLACK);
    c->noise_token = (int32_t)need_u32(&t, "dspark_noise_token_id", 0, c->vocab - 1);
    c->markov_rank = need_u32(&t, "dspark_markov_rank", 1, 65536);
    c->confidence = get_bool(&t, "enable_confidence_head", false);
    c->confidence_markov = get_bool(&t, "confidence_head_with_markov", false);
    if (t.code == BASE_OK)
        c->window = read_window(&t, c->layers);
    if (t.code == BASE_OK)
        read_target_layers(&t, c, target->layers);
    json_decref(json);
    return t.code;
}
