/* whimbrel-model verify on a checkpoint of MiniMax-M3.1-Flash: all 89,632 tensors at their true
 * sizes, 250 GB of which the disk holds only headers and scalars: the rest are holes.
 *
 * The list of tensors is written here once more, from the published table of the model's MXFP8
 * release and the loaders of M3.1, so that it agrees with the engine's only if both are right. */
#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/clock.h"

enum {
    HIDDEN = 6144,
    LAYERS = 60,
    DENSE_LAYERS = 3,
    VOCAB = 200064,
    Q = 8192,
    KV = 512,
    HEAD = 128,
    DENSE = 12288,
    INNER = 3072,
    EXPERTS = 128,
    VISION = 1280,
    VISION_INNER = 5120,
    VISION_LAYERS = 32,
    DRAFT_LAYERS = 5,
    MARKOV = 256,
    SCALARS = EXPERTS * 3 * 2, /* of a layer */
};

/* One thing that is wrong with a checkpoint; NULL: nothing. */
typedef struct fault {
    const char *tensor;
    const char *dtype; /* another one of as many bytes; "": the tensor is missing */
    bool turned;       /* rows and columns have changed places */
} fault;

static char dir[64];
static fault wrong;

/* One file in the making: scalars first, then what is a hole. */
typedef struct shard {
    base_buf header;
    uint64_t scalars, offset;
    char name[64];
} shard;

static uint32_t tensor_count;
static uint64_t tensor_bytes;

static void begin(shard *s, uint32_t scalars, const char *name)
{
    *s = (shard){.offset = scalars * sizeof(float)};
    snprintf(s->name, sizeof s->name, "%s", name);
    base_buf_init(&s->header, 0);
    base_buf_puts(&s->header, "{\"__metadata__\":{\"format\":\"pt\"}");
}

static void put(shard *s, base_buf *map, const char *dtype, uint32_t size, const uint64_t *dims,
                uint32_t dim_count, const char *name)
{
    uint64_t bytes = size, *at = dim_count == 0 ? &s->scalars : &s->offset;
    uint64_t shape[5] = {0};
    bool is_wrong = wrong.tensor != NULL && strcmp(name, wrong.tensor) == 0;
    if (is_wrong && wrong.dtype != NULL && wrong.dtype[0] == '\0')
        return;
    for (uint32_t i = 0; i < dim_count; i++) {
        shape[i] = dims[is_wrong && wrong.turned ? dim_count - 1 - i : i];
        bytes *= shape[i];
    }
    base_buf_printf(&s->header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", name,
                    is_wrong && wrong.dtype != NULL ? wrong.dtype : dtype);
    for (uint32_t i = 0; i < dim_count; i++)
        base_buf_printf(&s->header, i > 0 ? ",%llu" : "%llu", (unsigned long long)shape[i]);
    base_buf_printf(&s->header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)*at,
                    (unsigned long long)(*at + bytes));
    *at += bytes;
    tensor_count++;
    tensor_bytes += bytes;
    if (map != NULL)
        base_buf_printf(map, "%s\"%s\":\"%s\"", map->data[map->length - 1] == '{' ? "" : ",", name,
                        s->name);
}

static void put2(shard *s, base_buf *map, const char *dtype, uint32_t size, uint64_t rows,
                 uint64_t cols, const char *fmt, ...) __attribute__((format(printf, 7, 8)));

/* [rows, cols]; rows 0: [cols]; both 0: one number. */
static void put2(shard *s, base_buf *map, const char *dtype, uint32_t size, uint64_t rows,
                 uint64_t cols, const char *fmt, ...)
{
    char name[200];
    const uint64_t dims[2] = {rows, cols};
    va_list args;
    va_start(args, fmt);
    vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    put(s, map, dtype, size, rows > 0 ? dims : dims + 1, cols == 0 ? 0 : rows > 0 ? 2 : 1, name);
}

static void put_mxfp8(shard *s, base_buf *map, uint64_t rows, uint64_t cols, const char *at,
                      const char *name)
{
    put2(s, map, "F8_E4M3", 1, rows, cols, "%s%s.weight", at, name);
    put2(s, map, "U8", 1, rows, cols / 32, "%s%s.weight_scale_inv", at, name);
}

static void put_nvfp4(shard *s, base_buf *map, uint64_t rows, uint64_t cols, const char *at,
                      const char *name)
{
    put2(s, map, "U8", 1, rows, cols / 2, "%s%s.weight_packed", at, name);
    put2(s, map, "F8_E4M3", 1, rows, cols / 16, "%s%s.weight_scale", at, name);
    put2(s, map, "F32", 4, 0, 0, "%s%s.weight_global_scale", at, name);
    put2(s, map, "F32", 4, 0, 0, "%s%s.input_global_scale", at, name);
}

static void put_attention(shard *s, base_buf *map, const char *at)
{
    static const char *const NORMS[] = {"input_layernorm", "post_attention_layernorm"};
    for (int i = 0; i < 2; i++)
        put2(s, map, "BF16", 2, 0, HIDDEN, "%s%s.weight", at, NORMS[i]);
    put2(s, map, "BF16", 2, 0, HEAD, "%sself_attn.q_norm.weight", at);
    put2(s, map, "BF16", 2, 0, HEAD, "%sself_attn.k_norm.weight", at);
    put_mxfp8(s, map, Q, HIDDEN, at, "self_attn.q_proj");
    put_mxfp8(s, map, KV, HIDDEN, at, "self_attn.k_proj");
    put_mxfp8(s, map, KV, HIDDEN, at, "self_attn.v_proj");
    put_mxfp8(s, map, HIDDEN, Q, at, "self_attn.o_proj");
}

static void put_mlp(shard *s, base_buf *map, uint64_t inner, const char *at)
{
    put_mxfp8(s, map, inner, HIDDEN, at, "gate_proj");
    put_mxfp8(s, map, inner, HIDDEN, at, "up_proj");
    put_mxfp8(s, map, HIDDEN, inner, at, "down_proj");
}

static void put_layer(shard *s, base_buf *map, uint32_t layer)
{
    char at[96], part[128];
    snprintf(at, sizeof at, "language_model.model.layers.%u.", layer);
    put_attention(s, map, at);
    put_mxfp8(s, map, KV, HIDDEN, at, "self_attn.index_q_proj");
    put_mxfp8(s, map, HEAD, HIDDEN, at, "self_attn.index_k_proj");
    put2(s, map, "BF16", 2, 0, HEAD, "%sself_attn.index_q_norm.weight", at);
    put2(s, map, "BF16", 2, 0, HEAD, "%sself_attn.index_k_norm.weight", at);
    if (layer < DENSE_LAYERS) {
        snprintf(part, sizeof part, "%smlp.", at);
        put_mlp(s, map, DENSE, part);
        return;
    }
    put2(s, map, "F32", 4, EXPERTS, HIDDEN, "%sblock_sparse_moe.gate.weight", at);
    put2(s, map, "F32", 4, 0, EXPERTS, "%sblock_sparse_moe.e_score_correction_bias", at);
    snprintf(part, sizeof part, "%sblock_sparse_moe.shared_experts.", at);
    put_mlp(s, map, INNER, part);
    for (int e = 0; e < EXPERTS; e++) {
        snprintf(part, sizeof part, "%sblock_sparse_moe.experts.%d.", at, e);
        put_nvfp4(s, map, INNER, HIDDEN, part, "w1");
        put_nvfp4(s, map, HIDDEN, INNER, part, "w2");
        put_nvfp4(s, map, INNER, HIDDEN, part, "w3");
    }
}

static void put_biased(shard *s, base_buf *map, uint64_t rows, uint64_t cols, const char *name)
{
    put2(s, map, "BF16", 2, rows, cols, "%s.weight", name);
    put2(s, map, "BF16", 2, 0, rows > 0 ? rows : cols, "%s.bias", name);
}

static void put_vision(shard *s, base_buf *map)
{
    static const char *const PROJECTIONS[] = {"q_proj", "k_proj", "v_proj", "out_proj"};
    static const uint64_t PATCH[] = {VISION, 3, 2, 14, 14};
    char name[128];
    put(s, map, "F32", 4, PATCH, 5, "vision_tower.vision_model.embeddings.patch_embedding.weight");
    put_biased(s, map, 0, VISION, "vision_tower.vision_model.pre_layrnorm");
    for (int l = 0; l < VISION_LAYERS; l++) {
        char at[80];
        snprintf(at, sizeof at, "vision_tower.vision_model.encoder.layers.%d.", l);
        for (int i = 1; i <= 2; i++) {
            snprintf(name, sizeof name, "%slayer_norm%d", at, i);
            put_biased(s, map, 0, VISION, name);
            snprintf(name, sizeof name, "%smlp.fc%d", at, i);
            put_biased(s, map, i == 1 ? VISION_INNER : VISION, i == 1 ? VISION : VISION_INNER,
                       name);
        }
        for (int i = 0; i < 4; i++) {
            snprintf(name, sizeof name, "%sself_attn.%s", at, PROJECTIONS[i]);
            put_biased(s, map, VISION, VISION, name);
        }
    }
    put_biased(s, map, HIDDEN, VISION, "multi_modal_projector.linear_1");
    put_biased(s, map, HIDDEN, HIDDEN, "multi_modal_projector.linear_2");
    put_biased(s, map, HIDDEN, 4 * HIDDEN, "patch_merge_mlp.linear_1");
    put_biased(s, map, HIDDEN, HIDDEN, "patch_merge_mlp.linear_2");
}

static void put_draft(shard *s)
{
    static const char at[] = "language_model.model.dspark.";
    char part[128];
    put2(s, NULL, "BF16", 2, HIDDEN, 5 * HIDDEN, "%sfc.weight", at);
    put2(s, NULL, "BF16", 2, 0, HIDDEN, "%shidden_norm.weight", at);
    put2(s, NULL, "BF16", 2, 0, HIDDEN, "%sfinal_norm.weight", at);
    put2(s, NULL, "BF16", 2, VOCAB, MARKOV, "%smarkov_head.markov_w1.weight", at);
    put2(s, NULL, "BF16", 2, VOCAB, MARKOV, "%smarkov_head.markov_w2.weight", at);
    put2(s, NULL, "BF16", 2, 1, HIDDEN + MARKOV, "%sconfidence_head.proj.weight", at);
    put2(s, NULL, "BF16", 2, 0, 1, "%sconfidence_head.proj.bias", at);
    for (int l = 0; l < DRAFT_LAYERS; l++) {
        snprintf(part, sizeof part, "%slayers.%d.decoder_layer.", at, l);
        put_attention(s, NULL, part);
        snprintf(part, sizeof part, "%slayers.%d.decoder_layer.mlp.", at, l);
        put_mlp(s, NULL, DENSE, part);
    }
}

static FILE *create(const char *folder, const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s%s/%s", dir, folder, name);
    FILE *f = fopen(path, "wb");
    cr_assert_not_null(f, "%s", path);
    return f;
}

/* Every scalar is 1; behind them the file is a hole. */
static void finish(shard *s, const char *folder, uint32_t scalars)
{
    static float ones[SCALARS];
    uint8_t length[8];
    base_buf_puts(&s->header, "}");
    while (s->header.length % 8 != 0)
        base_buf_puts(&s->header, " ");
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)((uint64_t)s->header.length >> (8 * i));
    for (uint32_t i = 0; i < scalars; i++)
        ones[i] = 1;
    FILE *f = create(folder, s->name);
    cr_assert_eq(fwrite(length, 1, 8, f), 8);
    cr_assert_eq(fwrite(s->header.data, 1, s->header.length, f), s->header.length);
    cr_assert_eq(fwrite(ones, sizeof *ones, scalars, f), scalars);
    cr_assert_eq(fflush(f), 0);
    cr_assert_eq(ftruncate(fileno(f), (off_t)(8 + s->header.length + s->offset)), 0);
    fclose(f);
    base_buf_deinit(&s->header);
}

static void add_flags(FILE *f, const char *key, int layers, int first)
{
    fprintf(f, "\"%s\":[", key);
    for (int i = 0; i < layers; i++)
        fprintf(f, i > 0 ? ",%d" : "%d", i >= first);
    fprintf(f, "],");
}

static const char SHAPE[] =
    "\"hidden_size\":6144,\"vocab_size\":200064,\"num_attention_heads\":64,"
    "\"num_key_value_heads\":4,\"head_dim\":128,\"max_position_embeddings\":1048576,"
    "\"rope_theta\":5000000,\"rotary_dim\":64,\"partial_rotary_factor\":0.5,"
    "\"rms_norm_eps\":1e-6,\"use_gemma_norm\":true,\"use_qk_norm\":true,"
    "\"qk_norm_type\":\"per_head\",\"attention_output_gate\":false,\"hidden_act\":\"swigluoai\","
    "\"swiglu_alpha\":1.702,\"swiglu_limit\":7.0,\"dense_intermediate_size\":12288,";

static void write_config(void)
{
    FILE *f = create("", "config.json");
    fprintf(f,
            "{\"architectures\":[\"MiniMaxM3SparseForConditionalGeneration\"],"
            "\"model_type\":\"minimax_m3_vl\",\"tie_word_embeddings\":false,\"text_config\":{"
            "%s\"num_hidden_layers\":60,\"intermediate_size\":3072,"
            "\"shared_intermediate_size\":3072,\"n_shared_experts\":1,\"num_local_experts\":128,"
            "\"num_experts_per_tok\":4,\"scoring_func\":\"sigmoid\",\"use_routing_bias\":true,",
            SHAPE);
    add_flags(f, "moe_layer_freq", LAYERS, DENSE_LAYERS);
    fprintf(f, "\"routed_scaling_factor\":2.0,\"sparse_attention_config\":{");
    add_flags(f, "sparse_attention_freq", LAYERS, 0);
    add_flags(f, "sparse_disable_index_value", LAYERS, 0);
    fprintf(f, "\"use_sparse_attention\":true,\"sparse_index_dim\":128,"
               "\"sparse_num_index_heads\":4,\"sparse_topk_blocks\":16,\"sparse_block_size\":128,"
               "\"sparse_score_type\":\"max\",\"sparse_init_block\":0,\"sparse_local_block\":1}},"
               "\"quantization_config\":{\"quant_method\":\"mxfp8\",\"weight_block_size\":[1,32],"
               "\"moe_quant_algo\":\"NVFP4\",\"moe_quant_format\":\"nvfp4-pack-quantized\"}}");
    fclose(f);
    f = create("/dspark", "config.json");
    fprintf(f,
            "{\"architectures\":[\"DSparkMiniMaxDraftModel\"],\"text_config\":{%s"
            "\"num_hidden_layers\":5,\"dspark_ffn_hidden_size\":12288,",
            SHAPE);
    add_flags(f, "moe_layer_freq", DRAFT_LAYERS, DRAFT_LAYERS);
    fprintf(f,
            "\"sparse_attention_config\":null,\"dspark_use_dense_ffn\":true,"
            "\"sliding_window\":4096,\"dspark_block_size\":7,\"dspark_noise_token_id\":200058,"
            "\"dspark_target_layer_ids\":[3,17,31,45,59],\"dspark_markov_rank\":256,"
            "\"dspark_markov_head_type\":\"vanilla\",\"enable_confidence_head\":true,"
            "\"confidence_head_with_markov\":true},"
            "\"quantization_config\":{\"quant_method\":\"mxfp8\",\"weight_block_size\":[1,32]}}");
    fclose(f);
}

static void copy_text(const char *name)
{
    static char text[1 << 20];
    FILE *from = fopen(VECTORS "/tiny/tokenizer.json", "rb"), *to = create("", name);
    cr_assert_not_null(from);
    size_t n = fread(text, 1, sizeof text, from);
    cr_assert_eq(fwrite(text, 1, n, to), n);
    fclose(from);
    fclose(to);
}

/* One file a layer, as `wrong` has it. */
static void write_checkpoint(void)
{
    shard s;
    base_buf map;
    char name[64];
    tensor_count = 0;
    tensor_bytes = 0;
    base_buf_init(&map, 0);
    base_buf_puts(&map, "{\"weight_map\":{");
    begin(&s, 0, "model-00000.safetensors");
    put2(&s, &map, "BF16", 2, VOCAB, HIDDEN, "language_model.model.embed_tokens.weight");
    put2(&s, &map, "BF16", 2, VOCAB, HIDDEN, "language_model.lm_head.weight");
    put2(&s, &map, "BF16", 2, 0, HIDDEN, "language_model.model.norm.weight");
    put_vision(&s, &map);
    finish(&s, "", 0);
    for (uint32_t l = 0; l < LAYERS; l++) {
        uint32_t scalars = l < DENSE_LAYERS ? 0 : SCALARS;
        snprintf(name, sizeof name, "model-%05u.safetensors", l + 1);
        begin(&s, scalars, name);
        put_layer(&s, &map, l);
        finish(&s, "", scalars);
    }
    base_buf_printf(&map, "},\"metadata\":{\"total_size\":%llu}}",
                    (unsigned long long)tensor_bytes);
    cr_assert_not(map.failed);
    FILE *f = create("", "model.safetensors.index.json");
    cr_assert_eq(fwrite(map.data, 1, map.length, f), map.length);
    fclose(f);
    base_buf_deinit(&map);
}

static void enter(void)
{
    char path[128];
    snprintf(dir, sizeof dir, "/tmp/whimbrel-flash-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/dspark", dir);
    cr_assert_eq(mkdir(path, 0700), 0);
    write_config();
    copy_text("tokenizer.json");
}

static void leave(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    cr_expect_eq(system(command), 0);
}

static double seconds(struct timeval t)
{
    return (double)t.tv_sec + (double)t.tv_usec * 1e-6;
}

/* What the program printed; its status in *status. */
static const char *verify(int *status)
{
    static char out[1 << 14];
    char command[512];
    struct rusage before;
    getrusage(RUSAGE_CHILDREN, &before);
    snprintf(command, sizeof command, PROGRAM " verify %s 2>&1", dir);
    uint64_t began = base_now_ns();
    FILE *f = popen(command, "r");
    cr_assert_not_null(f);
    size_t n = fread(out, 1, sizeof out - 1, f);
    out[n] = '\0';
    *status = pclose(f);
    struct rusage after;
    getrusage(RUSAGE_CHILDREN, &after);
    fprintf(stderr, "verify: %.2f s, of which processor %.2f s\n%s",
            (double)(base_now_ns() - began) * 1e-9,
            seconds(after.ru_utime) + seconds(after.ru_stime) - seconds(before.ru_utime) -
                seconds(before.ru_stime),
            out);
    return out;
}

#define EXPERT "language_model.model.layers.31.block_sparse_moe.experts.77.w2."

Test(flash, every_tensor_of_the_model_is_verified, .init = enter, .fini = leave, .timeout = 120)
{
    static const struct {
        fault fault;
        const char *says;
    } CASES[] = {
        {{.tensor = EXPERT "weight_packed", .turned = true}, EXPERT "weight_packed: shape ["},
        {{.tensor = EXPERT "weight_scale", .dtype = "I8"}, EXPERT "weight_scale: I8, not F8_E4M3"},
        {{.tensor = EXPERT "weight_global_scale", .dtype = ""},
         EXPERT "weight_global_scale is missing"},
        {{.tensor = "language_model.model.layers.0.self_attn.index_k_proj.weight", .dtype = ""},
         "language_model.model.layers.0.self_attn.index_k_proj.weight is missing"},
    };
    int status;
    shard draft;
    uint32_t count;
    uint64_t bytes;
    char wanted[128];
    write_checkpoint();
    count = tensor_count;
    bytes = tensor_bytes;
    cr_assert_eq(count, 89632);
    cr_assert(bytes > 250090000000u && bytes < 250120000000u, "%llu", (unsigned long long)bytes);
    begin(&draft, 0, "model.safetensors");
    tensor_count = 0;
    tensor_bytes = 0;
    put_draft(&draft);
    finish(&draft, "/dspark", 0);
    cr_assert_eq(tensor_count, 97);

    const char *out = verify(&status);
    cr_expect_eq(status, 0);
    snprintf(wanted, sizeof wanted, "offsets: %u tensors, %llu bytes\n", count,
             (unsigned long long)bytes);
    cr_expect_not_null(strstr(out, wanted), "%s", wanted);
    cr_expect_not_null(strstr(out, "87552 tensors   413122166784 values"));
    cr_expect_not_null(strstr(out, "10560208896 values"));
    cr_expect_not_null(strstr(out, "89109 text tensors as the shape demands, 523 others"));
    snprintf(wanted, sizeof wanted, "draft: 97 tensors, %llu bytes",
             (unsigned long long)tensor_bytes);
    cr_expect_not_null(strstr(out, wanted), "%s", wanted);

    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        wrong = CASES[i].fault;
        write_checkpoint();
        out = verify(&status);
        cr_expect_neq(status, 0);
        cr_expect_not_null(strstr(out, CASES[i].says), "%s", CASES[i].says);
    }
    wrong = (fault){0};
    write_checkpoint();
    snprintf(wanted, sizeof wanted, "truncate -s -1 %s/model-00060.safetensors", dir);
    cr_assert_eq(system(wanted), 0);
    out = verify(&status);
    cr_expect_neq(status, 0);
    cr_expect_not_null(strstr(out, "model-00060.safetensors: tensor"));
    cr_expect_not_null(strstr(out, "data_offsets end at"));
}
