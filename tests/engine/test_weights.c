/* Checkpoint files that are as they should be, and every way in which they are not; then
 * configurations likewise. Files are written to a temporary directory of each test. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/model_internal.h"

static char dir[64];

static void enter(void)
{
    strcpy(dir, "/tmp/test-weights-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
}

static void leave(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", dir);
    cr_assert_eq(system(command), 0);
}

static void write_bytes(const char *name, const void *bytes, size_t length)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    cr_assert_not_null(f);
    cr_assert_eq(fwrite(bytes, 1, length, f), length);
    fclose(f);
}

/* A safetensors file of this header and so many data bytes (0, 1, 2, …). `length` replaces the
 * header's true length unless it is negative. */
static void write_tensors(const char *name, const char *header, size_t data, int64_t length)
{
    size_t n = strlen(header);
    uint8_t *bytes = malloc(8 + n + data);
    uint64_t claimed = length >= 0 ? (uint64_t)length : n;
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(claimed >> (8 * i));
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < data; i++)
        bytes[8 + n + i] = (uint8_t)i;
    write_bytes(name, bytes, 8 + n + data);
    free(bytes);
}

static base_code open_dir(eng_files **files, base_err *err)
{
    *err = (base_err)BASE_ERR_INIT;
    return eng_files_open(files, dir, err);
}

static void expect_error(const char *what, base_code code, const char *const *texts)
{
    eng_files *files;
    base_err err;
    cr_expect_eq(open_dir(&files, &err), code, "%s: %s %s", what, base_code_name(err.code),
                 err.text);
    cr_expect_null(files);
    for (int i = 0; i < 3 && texts[i] != NULL; i++)
        cr_expect_not_null(strstr(err.text, texts[i]), "%s: \"%s\" lacks \"%s\"", what, err.text,
                           texts[i]);
}

/* ---- good files ---- */

Test(weights, reads_what_a_file_holds, .init = enter, .fini = leave)
{
    eng_files *files;
    base_err err;
    write_tensors("model.safetensors",
                  "{\"__metadata__\":{\"format\":\"pt\",\"x\":\"{\"},\"a\":{\"dtype\":\"F32\","
                  "\"shape\":[2,3],"
                  "\"data_offsets\":[0,24]}, "
                  "\"b.\\u0063\":{\"data_offsets\":[24,26],\"shape\":[],\"dtype\":\"BF16\"},"
                  "\"empty\":{\"dtype\":\"U8\",\"shape\":[0,7],\"data_offsets\":[26,26]},"
                  "\"q\":{\"dtype\":\"F8_E4M3\",\"shape\":[1],\"data_offsets\":[26,27]}}   ",
                  27, -1);
    cr_assert_eq(open_dir(&files, &err), BASE_OK, "%s", err.text);
    cr_expect_eq(eng_files_count(files), 4);
    cr_expect_eq(eng_files_bytes(files), 27);
    const eng_tensor *a = eng_files_find(files, "a"), *b = eng_files_find(files, "b.c");
    cr_assert_not_null(a);
    cr_assert_not_null(b);
    cr_expect_eq(a->dims, 2);
    cr_expect_eq(a->shape[1], 3);
    cr_expect_eq(a->dtype, ENG_F32);
    cr_expect_eq(b->dims, 0);
    cr_expect_eq(b->bytes, 2);
    cr_expect_eq(((const uint8_t *)b->data)[0], 24);
    cr_expect_str_eq(b->file, "model.safetensors");
    cr_expect_eq(eng_files_find(files, "empty")->bytes, 0);
    cr_expect_null(eng_files_find(files, "c"));
    cr_expect_null(eng_files_find(files, ""));
    eng_files_close(files);
}

static void write_shards(const char *map)
{
    char index[2048];
    write_tensors("one.safetensors",
                  "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
                  "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
                  8, -1);
    write_tensors("two.safetensors",
                  "{\"c\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2, -1);
    snprintf(index, sizeof index, "{\"metadata\":{\"total_size\":10},%s}", map);
    write_bytes("model.safetensors.index.json", index, strlen(index));
}

Test(weights, follows_an_index, .init = enter, .fini = leave)
{
    eng_files *files;
    base_err err;
    write_shards("\"weight_map\":{\"a\":\"one.safetensors\",\"c\":\"two.safetensors\",\"b\":\"one."
                 "safetensors\"}");
    cr_assert_eq(open_dir(&files, &err), BASE_OK, "%s", err.text);
    cr_expect_eq(eng_files_count(files), 3);
    cr_expect_str_eq(eng_files_find(files, "c")->file, "two.safetensors");
    eng_files_close(files);
}

Test(weights, bad_indexes_are_named, .init = enter, .fini = leave)
{
    static const struct {
        const char *what, *map;
        base_code code;
        const char *texts[3];
    } CASES[] = {
        {"unlisted tensor",
         "\"weight_map\":{\"a\":\"one.safetensors\",\"c\":\"two.safetensors\"}",
         BASE_FORMAT,
         {"index.json", "lists 2 tensors, the files hold 3"}},
        {"wrong file",
         "\"weight_map\":{\"a\":\"one.safetensors\",\"c\":\"one.safetensors\"}",
         BASE_FORMAT,
         {"tensor c is not in one.safetensors"}},
        {"absent tensor", "\"weight_map\":{\"z\":\"one.safetensors\"}", BASE_FORMAT, {"tensor z"}},
        {"absent file",
         "\"weight_map\":{\"a\":\"three.safetensors\"}",
         BASE_NOT_FOUND,
         {"three.safetensors"}},
        {"outside",
         "\"weight_map\":{\"a\":\"../one.safetensors\"}",
         BASE_FORMAT,
         {"../one.safetensors", "folder"}},
        {"hidden", "\"weight_map\":{\"a\":\".\"}", BASE_FORMAT, {"folder"}},
        {"number", "\"weight_map\":{\"a\":7}", BASE_FORMAT, {"not a name with a file"}},
        {"list", "\"weight_map\":[]", BASE_FORMAT, {"weight_map is not an object"}},
        {"no map", "\"map\":{}", BASE_FORMAT, {"weight_map is missing"}},
        {"cut", "\"weight_map\":{\"a\":", BASE_FORMAT, {"index.json"}},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        write_shards(CASES[i].map);
        expect_error(CASES[i].what, CASES[i].code, CASES[i].texts);
    }
}

Test(weights, a_name_in_two_shards_is_refused, .init = enter, .fini = leave)
{
    static const char *const TEXTS[3] = {"two.safetensors", "tensor a is there twice",
                                         "one.safetensors"};
    write_shards("\"weight_map\":{\"a\":\"one.safetensors\",\"c\":\"two.safetensors\",\"b\":\"one."
                 "safetensors\"}");
    write_tensors("two.safetensors",
                  "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2, -1);
    expect_error("twice", BASE_FORMAT, TEXTS);
}

/* ---- bad files ---- */

#define ENTRY(dtype, shape, offsets)                                                               \
    "{\"w\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

Test(weights, malformed_files_name_file_and_tensor, .init = enter, .fini = leave)
{
    static const struct {
        const char *what, *header;
        size_t data;
        int64_t length;
        const char *texts[3];
    } CASES[] = {
        {"truncated data",
         ENTRY("\"F32\"", "[2]", "[0,8]"),
         7,
         -1,
         {"model.safetensors", "tensor w", "truncated"}},
        {"truncated header", "{\"w\":", 0, 4000, {"header of 4000 bytes", "truncated"}},
        {"huge header", "{}", 0, INT64_MAX, {"header of 9223372036854775807 bytes", "exceeds"}},
        {"header over its bound", "{}", 0, 100000001, {"exceeds 100000000"}},
        {"no object", "[]", 0, -1, {"not a JSON object"}},
        {"empty header", "", 0, -1, {"not a JSON object"}},
        {"bad JSON", "{\"w\":{\"dtype\"", 0, -1, {"tensor w", "bad JSON"}},
        {"text behind", "{} {}", 0, -1, {"more text"}},
        {"entry a number", "{\"w\":3}", 0, -1, {"tensor w", "not an object"}},
        {"no dtype",
         "{\"w\":{\"shape\":[1],\"data_offsets\":[0,4]}}",
         4,
         -1,
         {"tensor w", "dtype is missing"}},
        {"no shape",
         "{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}",
         4,
         -1,
         {"tensor w", "shape is missing"}},
        {"no offsets",
         "{\"w\":{\"dtype\":\"F32\",\"shape\":[1]}}",
         4,
         -1,
         {"tensor w", "data_offsets is missing"}},
        {"unknown dtype",
         ENTRY("\"F4\"", "[1]", "[0,4]"),
         4,
         -1,
         {"tensor w", "unknown dtype \"F4\""}},
        {"dtype a number", ENTRY("4", "[1]", "[0,4]"), 4, -1, {"tensor w", "dtype"}},
        {"shape and offsets disagree",
         ENTRY("\"F32\"", "[3]", "[0,8]"),
         8,
         -1,
         {"tensor w", "12 bytes", "8"}},
        {"overflowing shape",
         ENTRY("\"F32\"", "[4294967296,4294967296,4]", "[0,0]"),
         0,
         -1,
         {"tensor w", "overflows"}},
        {"backwards", ENTRY("\"U8\"", "[1]", "[4,3]"), 4, -1, {"tensor w", "backwards"}},
        {"offset past 2^64",
         ENTRY("\"U8\"", "[1]", "[0,99999999999999999999]"),
         4,
         -1,
         {"tensor w", "data_offsets"}},
        {"negative size", ENTRY("\"U8\"", "[-1]", "[0,1]"), 1, -1, {"tensor w", "shape"}},
        {"fraction", ENTRY("\"U8\"", "[1.0]", "[0,1]"), 1, -1, {"tensor w", "shape"}},
        {"nine dimensions",
         ENTRY("\"U8\"", "[1,1,1,1,1,1,1,1,1]", "[0,1]"),
         1,
         -1,
         {"tensor w", "at most 8"}},
        {"three offsets", ENTRY("\"U8\"", "[1]", "[0,1,1]"), 1, -1, {"tensor w", "two offsets"}},
        {"empty name",
         "{\"\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
         0,
         -1,
         {"name is empty"}},
        {"zero in a name",
         "{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
         0,
         -1,
         {"zero"}},
        {"name twice",
         "{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
         2,
         -1,
         {"tensor w", "twice"}},
        {"overlap",
         "{\"v\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"w\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3,7]}}",
         7,
         -1,
         {"tensor w overlaps v"}},
        {"deep",
         "{\"w\":{\"x\":[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]}}",
         0,
         -1,
         {"tensor w", "bad JSON"}},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        write_tensors("model.safetensors", CASES[i].header, CASES[i].data, CASES[i].length);
        expect_error(CASES[i].what, BASE_FORMAT, CASES[i].texts);
    }
    static const char *const SHORT[3] = {"too few"};
    write_bytes("model.safetensors", "1234567", 7);
    expect_error("7 bytes", BASE_FORMAT, SHORT);
    write_bytes("model.safetensors", "", 0);
    expect_error("no bytes", BASE_FORMAT, SHORT);
}

/* They do not hide a tensor that is missing, so they are told apart from what makes a file
 * unreadable. */
Test(weights, bytes_of_no_tensor_are_noted, .init = enter, .fini = leave)
{
    static const struct {
        const char *header, *text;
        size_t data;
    } CASES[] = {
        {ENTRY("\"U8\"", "[1]", "[0,1]"), NULL, 1},
        {ENTRY("\"U8\"", "[1]", "[0,1]"), "model.safetensors: 8 bytes after the last tensor", 9},
        {ENTRY("\"U8\"", "[1]", "[3,4]"), "model.safetensors: 3 bytes before tensor w", 4},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        eng_files *files;
        base_err err;
        write_tensors("model.safetensors", CASES[i].header, CASES[i].data, -1);
        cr_assert_eq(open_dir(&files, &err), BASE_OK, "%s", err.text);
        const char *gap = eng_files__gap(files);
        cr_expect(CASES[i].text == NULL ? gap == NULL
                                        : gap != NULL && strstr(gap, CASES[i].text) != NULL,
                  "%s", gap);
        eng_files_close(files);
    }
}

Test(weights, absent_files_are_named, .init = enter, .fini = leave)
{
    static const char *const NEITHER[3] = {"holds neither"}, *const IRREGULAR[3] = {
                                                                 "not a regular file"};
    char path[128];
    eng_files *files;
    base_err err = BASE_ERR_INIT;
    expect_error("empty folder", BASE_NOT_FOUND, NEITHER);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    mkdir(path, 0777);
    expect_error("a folder", BASE_IO, IRREGULAR);
    cr_expect_eq(eng_files_open_one(&files, "/nowhere/x.safetensors", &err), BASE_NOT_FOUND);
}

/* Cutting a good file anywhere gives an error, never a crash or a tensor outside the file. */
Test(weights, every_truncation_is_an_error, .init = enter, .fini = leave)
{
    FILE *f = fopen(VECTORS "/tiny/dspark/model.safetensors", "rb");
    static uint8_t bytes[1 << 20];
    if (f == NULL)
        cr_skip_test("the tiny checkpoint is not there");
    size_t length = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    for (size_t cut = 0; cut < length; cut += cut < 9000 ? 37 : 4099) {
        eng_files *files;
        base_err err;
        write_bytes("model.safetensors", bytes, cut);
        cr_expect_neq(open_dir(&files, &err), BASE_OK, "cut at %zu", cut);
    }
}

/* Damage to any byte of a header is refused or harmless: what is handed out lies inside the file.
 */
Test(weights, damaged_headers_do_no_harm, .init = enter, .fini = leave)
{
    static uint8_t bytes[1 << 20];
    FILE *f = fopen(VECTORS "/tiny/dspark/model.safetensors", "rb");
    if (f == NULL)
        cr_skip_test("the tiny checkpoint is not there");
    size_t length = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    static const uint8_t DAMAGE[] = {0, '0', '9', '"', '}', ']', '-', 0xFF, ','};
    for (size_t at = 0; at < 1500; at += 3) {
        uint8_t saved = bytes[at];
        eng_files *files;
        base_err err;
        uint64_t sum = 0;
        bytes[at] = DAMAGE[at / 3 % sizeof DAMAGE];
        write_bytes("model.safetensors", bytes, length);
        bytes[at] = saved;
        if (open_dir(&files, &err) != BASE_OK)
            continue;
        for (uint32_t i = 0; i < eng_files_count(files); i++) {
            const eng_tensor *t = eng_files_at(files, i);
            for (uint64_t k = 0; k < t->bytes; k++)
                sum += ((const uint8_t *)t->data)[k];
        }
        cr_expect(sum > 0);
        eng_files_close(files);
    }
}

/* As many names as the full model has. */
Test(weights, ninety_thousand_names_are_found_fast, .init = enter, .fini = leave, .timeout = 60)
{
    enum { COUNT = 89632 };
    base_buf header;
    base_err err;
    eng_files *files;
    char name[128];
    base_buf_init(&header, 0);
    base_buf_puts(&header, "{");
    for (int i = 0; i < COUNT; i++)
        base_buf_printf(
            &header,
            "%s\"language_model.model.layers.%d.block_sparse_moe.experts.%d.w%d.weight_packed\":"
            "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
            i > 0 ? "," : "", i / 1536, i % 512, i / 512 % 3, i, i + 1);
    base_buf_puts(&header, "}");
    write_tensors("model.safetensors", header.data, COUNT, -1);
    base_buf_deinit(&header);
    uint64_t began = base_now_ns();
    cr_assert_eq(open_dir(&files, &err), BASE_OK, "%s", err.text);
    uint64_t opened = base_now_ns();
    for (int i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name,
                 "language_model.model.layers.%d.block_sparse_moe.experts.%d.w%d.weight_packed",
                 i / 1536, i % 512, i / 512 % 3);
        cr_assert_not_null(eng_files_find(files, name));
    }
    fprintf(stderr, "%d names: opened in %.1f ms, found in %.1f ms\n", COUNT,
            (double)(opened - began) * 1e-6, (double)(base_now_ns() - opened) * 1e-6);
    /* Generous: sanitizers and a busy machine. Linear search would take minutes. */
    cr_expect(base_now_ns() - began < 10000000000u);
    eng_files_close(files);
}

/* ---- configuration ---- */

/* Edits of the tiny checkpoint's config.json: the first occurrence of `from` becomes `to`. */
typedef struct edit {
    const char *from, *to;
    base_code code;
    const char *texts[3];
} edit;

static char *read_text(const char *path)
{
    static char text[1 << 16];
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        cr_skip_test("the tiny checkpoint is not there");
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = '\0';
    return text;
}

static void write_edited(const char *text, const edit *e)
{
    char *out = malloc(strlen(text) + strlen(e->to) + 1);
    const char *at = strstr(text, e->from);
    cr_assert_not_null(at, "the configuration has no %s", e->from);
    memcpy(out, text, (size_t)(at - text));
    strcpy(out + (at - text), e->to);
    strcat(out, at + strlen(e->from));
    write_bytes("config.json", out, strlen(out));
    free(out);
}

static const edit TARGET_EDITS[] = {
    {"\"hidden_size\": 128",
     "\"hidden_size\": 100",
     BASE_FORMAT,
     {"config.json", "hidden_size 100", "multiple of 32"}},
    {"\"hidden_size\": 128",
     "\"hidden_size\": \"128\"",
     BASE_FORMAT,
     {"hidden_size is not an integer"}},
    {"\"hidden_size\": 128", "\"hidden_size\": -128", BASE_FORMAT, {"hidden_size -128 is outside"}},
    {"\"hidden_size\": 128", "\"hidden_sizes\": 128", BASE_FORMAT, {"hidden_size is missing"}},
    {"\"num_hidden_layers\": 4",
     "\"num_hidden_layers\": 400",
     BASE_FORMAT,
     {"num_hidden_layers 400"}},
    {"\"num_hidden_layers\": 4",
     "\"num_hidden_layers\": 5",
     BASE_FORMAT,
     {"moe_layer_freq", "5 flags"}},
    {"\"num_key_value_heads\": 2",
     "\"num_key_value_heads\": 3",
     BASE_FORMAT,
     {"num_attention_heads 4"}},
    {"\"head_dim\": 32", "\"head_dim\": 40", BASE_FORMAT, {"head_dim 40"}},
    {"\"rope_theta\": 10000.0", "\"rope_theta\": 0", BASE_FORMAT, {"rope_theta 0"}},
    {"\"rotary_dim\": 16", "\"rotary_dim\": 15", BASE_FORMAT, {"rotary_dim 15 is odd"}},
    {"\"rotary_dim\": 16", "\"rotary_dim\": 64", BASE_FORMAT, {"rotary_dim 64"}},
    {"\"rotary_dim\": 16",
     "\"rope_scaling\": {\"rope_type\": \"yarn\"}, \"rotary_dim\": 16",
     BASE_UNSUPPORTED,
     {"rope_scaling \"yarn\""}},
    {"\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 0", BASE_FORMAT, {"rms_norm_eps"}},
    {"\"use_gemma_norm\": true",
     "\"use_gemma_norm\": false",
     BASE_UNSUPPORTED,
     {"use_gemma_norm false"}},
    {"\"use_qk_norm\": true", "\"use_qk_norm\": false", BASE_UNSUPPORTED, {"use_qk_norm"}},
    {"\"per_head\"", "\"per_layer\"", BASE_UNSUPPORTED, {"qk_norm_type", "per_layer"}},
    {"\"attention_output_gate\": false",
     "\"attention_output_gate\": true",
     BASE_UNSUPPORTED,
     {"attention_output_gate"}},
    {"\"swigluoai\"", "\"silu\"", BASE_UNSUPPORTED, {"hidden_act \"silu\""}},
    {"\"swiglu_limit\": 7.0", "\"swiglu_beta\": 0", BASE_UNSUPPORTED, {"swiglu_beta"}},
    {"\"scoring_func\": \"sigmoid\"",
     "\"scoring_func\": \"softmax\"",
     BASE_UNSUPPORTED,
     {"scoring_func"}},
    {"\"use_routing_bias\": true", "\"use_routing_bias\": 1", BASE_FORMAT, {"use_routing_bias"}},
    {"\"num_experts_per_tok\": 2",
     "\"num_experts_per_tok\": 5",
     BASE_FORMAT,
     {"num_experts_per_tok 5"}},
    {"\"n_shared_experts\": 1", "\"n_shared_experts\": 2", BASE_FORMAT, {"n_shared_experts 2"}},
    {"\"sparse_block_size\": 128",
     "\"sparse_block_size\": 64",
     BASE_UNSUPPORTED,
     {"sparse_block_size 64"}},
    {"\"sparse_score_type\": \"max\"",
     "\"sparse_score_type\": \"mean\"",
     BASE_UNSUPPORTED,
     {"sparse_score_type"}},
    {"\"sparse_num_index_heads\": 2",
     "\"sparse_num_index_heads\": 4",
     BASE_UNSUPPORTED,
     {"sparse_num_index_heads 4"}},
    {"\"sparse_local_block\": 1",
     "\"sparse_local_block\": 9",
     BASE_FORMAT,
     {"sparse_local_block 9"}},
    {"\"sparse_topk_blocks\": 4",
     "\"sparse_topk_blocks\": 0",
     BASE_FORMAT,
     {"sparse_topk_blocks 0"}},
    {"\"sparse_index_dim\": 32", "\"sparse_index_dim\": 8", BASE_FORMAT, {"sparse_index_dim 8"}},
    {"\"MiniMaxM3SparseForConditionalGeneration\"",
     "\"LlamaForCausalLM\"",
     BASE_UNSUPPORTED,
     {"architectures \"LlamaForCausalLM\""}},
    {"\"quant_method\": \"mxfp8\"",
     "\"quant_method\": \"awq\"",
     BASE_UNSUPPORTED,
     {"quant_method \"awq\""}},
    {"\"moe_quant_algo\": \"NVFP4\"",
     "\"moe_quant_algo\": \"INT4\"",
     BASE_UNSUPPORTED,
     {"moe_quant_algo \"INT4\""}},
    {"\"nvfp4-pack-quantized\"",
     "\"modelopt\"",
     BASE_UNSUPPORTED,
     {"moe_quant_format \"modelopt\""}},
    {"\"quantization_config\"",
     "\"whimbrel\": {\"identity\": \"\"}, \"quantization_config\"",
     BASE_FORMAT,
     {"whimbrel.identity"}},
    {"\"quantization_config\"",
     "\"whimbrel\": {\"default_thinking\": \"maybe\"}, \"quantization_config\"",
     BASE_FORMAT,
     {"default_thinking \"maybe\""}},
    {"\"text_config\": {", "\"text_config\": {,", BASE_FORMAT, {"config.json: line"}},
    {"\"eos_token_id\": 313", "\"eos_token_id\": 320", BASE_FORMAT, {"eos_token_id 320"}},
};

Test(config, bad_values_name_file_key_and_reason, .init = enter, .fini = leave)
{
    const char *text = read_text(VECTORS "/tiny/config.json");
    for (size_t i = 0; i < sizeof TARGET_EDITS / sizeof *TARGET_EDITS; i++) {
        const edit *e = &TARGET_EDITS[i];
        eng_config_file config;
        base_err err = BASE_ERR_INIT;
        write_edited(text, e);
        cr_expect_eq(eng_config__read(&config, dir, "x", &err), e->code, "%s: %s", e->to, err.text);
        for (int k = 0; k < 3 && e->texts[k] != NULL; k++)
            cr_expect_not_null(strstr(err.text, e->texts[k]), "%s: \"%s\" lacks \"%s\"", e->to,
                               err.text, e->texts[k]);
    }
}

static const edit DRAFT_EDITS[] = {
    {"\"hidden_size\": 128",
     "\"hidden_size\": 64",
     BASE_FORMAT,
     {"config.json", "hidden_size 64", "target's 128"}},
    {"\"vocab_size\": 320", "\"vocab_size\": 321", BASE_FORMAT, {"vocab_size 321"}},
    {"\"dspark_markov_head_type\": \"vanilla\"",
     "\"dspark_markov_head_type\": \"rnn\"",
     BASE_UNSUPPORTED,
     {"dspark_markov_head_type \"rnn\""}},
    {"\"dspark_block_size\": 7", "\"dspark_block_size\": 0", BASE_FORMAT, {"dspark_block_size 0"}},
    {"\"dspark_noise_token_id\": 317",
     "\"dspark_noise_token_id\": 320",
     BASE_FORMAT,
     {"dspark_noise_token_id 320"}},
    {"\"dspark_target_layer_ids\": [",
     "\"dspark_target_layer_ids\": [-1,",
     BASE_FORMAT,
     {"dspark_target_layer_ids -1"}},
    {"\"dspark_target_layer_ids\": [",
     "\"dspark_target_layer_ids\": [2,",
     BASE_FORMAT,
     {"lists 2 twice"}},
    {"\"dspark_target_layer_ids\": [",
     "\"dspark_target_layer_ids\": [4,",
     BASE_FORMAT,
     {"dspark_target_layer_ids 4"}},
    {"\"sparse_attention_config\": null",
     "\"sparse_attention_config\": {}",
     BASE_UNSUPPORTED,
     {"sparse_attention_config"}},
    {"\"sliding_attention\"", "\"full_attention\"", BASE_UNSUPPORTED, {"layer_types mixes"}},
    {"\"sliding_attention\"", "\"linear\"", BASE_UNSUPPORTED, {"layer_types", "linear"}},
    {"\"dspark_use_dense_ffn\": true",
     "\"dspark_use_dense_ffn\": false",
     BASE_UNSUPPORTED,
     {"dspark_use_dense_ffn"}},
    {"\"hybrid_context_fusion\": false", "\"hybrid_context_fusion\": 1", BASE_OK, {NULL}},
    {"\"dspark_hybrid_context_fusion\": false",
     "\"dspark_hybrid_context_fusion\": true",
     BASE_UNSUPPORTED,
     {"dspark_hybrid_context_fusion"}},
    {"\"DSparkMiniMaxDraftModel\"", "\"Qwen3DSparkModel\"", BASE_UNSUPPORTED, {"Qwen3DSparkModel"}},
};

Test(config, bad_drafts_are_named, .init = enter, .fini = leave)
{
    eng_config_file target;
    base_err err = BASE_ERR_INIT;
    const char *text = read_text(VECTORS "/tiny/dspark/config.json");
    cr_assert_eq(eng_config__read(&target, VECTORS "/tiny", "tiny", &err), BASE_OK, "%s", err.text);
    for (size_t i = 0; i < sizeof DRAFT_EDITS / sizeof *DRAFT_EDITS; i++) {
        const edit *e = &DRAFT_EDITS[i];
        eng_draft_config config;
        err = (base_err)BASE_ERR_INIT;
        write_edited(text, e);
        cr_expect_eq(eng_config__read_draft(&config, dir, &target.model, &err), e->code, "%s: %s",
                     e->to, err.text);
        for (int k = 0; k < 3 && e->texts[k] != NULL; k++)
            cr_expect_not_null(strstr(err.text, e->texts[k]), "%s: \"%s\" lacks \"%s\"", e->to,
                               err.text, e->texts[k]);
    }
}

Test(config, older_spellings_and_defaults, .init = enter, .fini = leave)
{
    eng_config_file config;
    base_err err = BASE_ERR_INIT;
    char text[1 << 15], *at;
    strcpy(text, read_text(VECTORS "/tiny/config.json"));
    cr_assert_eq(eng_config__read(&config, VECTORS "/tiny", "tiny", &err), BASE_OK, "%s", err.text);
    cr_expect_eq(config.end_token_count, 1);
    cr_expect_eq(config.end_tokens[0], 313);
    cr_expect(config.nvfp4_experts);
    cr_expect_not_null(strstr(config.model.identity, "MiniMax-M3.1,"));
    cr_expect_eq(config.model.thinking, ENG_THINK_ENABLED);
    cr_assert_eq(eng_config__read(&config, VECTORS "/tiny-m3", "tiny-m3", &err), BASE_OK, "%s",
                 err.text);
    cr_expect_not_null(strstr(config.model.identity, "MiniMax-M3,"));
    cr_expect_eq(config.model.thinking, ENG_THINK_ADAPTIVE);
    /* Token counts for blocks: rounded up, the local one plus the own block. */
    at = strstr(text, "\"sparse_init_block\": 0");
    memcpy(at, "\"sparse_init_tokens\":1", strlen("\"sparse_init_tokens\":1"));
    at = strstr(text, "\"sparse_local_block\": 1");
    memcpy(at, "\"sparse_local_tokens\":9", strlen("\"sparse_local_tokens\":9"));
    write_bytes("config.json", text, strlen(text));
    cr_assert_eq(eng_config__read(&config, dir, "x", &err), BASE_OK, "%s", err.text);
    cr_expect_eq(config.model.init_blocks, 1);
    cr_expect_eq(config.model.local_blocks, 2);
    /* An identity of the folder's own replaces the vendor's sentence. */
    strcpy(text,
           "{\"whimbrel\": {\"identity\": \"I am one.\", \"default_thinking\": \"disabled\"},");
    strcat(text, read_text(VECTORS "/tiny/config.json") + 1);
    write_bytes("config.json", text, strlen(text));
    cr_assert_eq(eng_config__read(&config, dir, "x", &err), BASE_OK, "%s", err.text);
    cr_expect_str_eq(config.model.identity, "I am one.");
    cr_expect_eq(config.model.thinking, ENG_THINK_DISABLED);
}

/* ---- tensors that do not fit the configuration ---- */

/* Writes the random tiny checkpoint with one change to its header's text (same length), then loads
 * it. */
static void expect_load(const char *from, const char *to, base_code code, const char *const *texts)
{
    static char bytes[1 << 20];
    char path[256];
    base_err err = BASE_ERR_INIT;
    eng_model *m;
    eng_model_options options = {.threads = 1, .rows_max = 8, .context_max = 256};
    cr_assert_eq(eng_random__write(dir, "tiny", 0, 1, false, &err), BASE_OK, "%s", err.text);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    FILE *f = fopen(path, "rb");
    size_t length = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    cr_assert_eq(strlen(from), strlen(to), "%s", to);
    char *at = memmem(bytes, length, from, strlen(from));
    cr_assert_not_null(at, "%s", from);
    memcpy(at, to, strlen(to));
    write_bytes("model.safetensors", bytes, length);
    cr_expect_eq(eng_model_load(&m, dir, &options, &err), code, "%s: %s", to, err.text);
    for (int i = 0; i < 3 && texts[i] != NULL; i++)
        cr_expect_not_null(strstr(err.text, texts[i]), "%s: \"%s\" lacks \"%s\"", to, err.text,
                           texts[i]);
    eng_model_destroy(m);
}

#define L0 "language_model.model.layers.0."
#define MOE "language_model.model.layers.1.block_sparse_moe."

Test(binding, tensors_that_do_not_fit_are_named, .init = enter, .fini = leave)
{
    static const struct {
        const char *from, *to;
        base_code code;
        const char *texts[3];
    } CASES[] = {
        {L0 "self_attn.q_proj.weight\"",
         L0 "self_attn.q_prox.weight\"",
         BASE_FORMAT,
         {"tensor " L0 "self_attn.q_proj.weight is missing"}},
        {L0 "self_attn.q_proj.weight_scale_inv",
         L0 "self_attn.q_proj.weight_scale_xxx",
         BASE_FORMAT,
         {L0 "self_attn.q_proj.weight_scale_inv is missing"}},
        {L0 "self_attn.index_k_norm.weight",
         L0 "self_attn.index_x_norm.weight",
         BASE_FORMAT,
         {L0 "self_attn.index_k_norm.weight is missing"}},
        {MOE "experts.2.w3.weight_scale\"",
         MOE "experts.2.w3.weight_scalx\"",
         BASE_FORMAT,
         {MOE "experts.2.w3.weight_scale is missing"}},
        {MOE "experts.2.w3.input_global_scale",
         MOE "experts.2.w3.input_global_scalx",
         BASE_FORMAT,
         {"input_global_scalx", "no place", "1 such"}},
        {MOE "experts.2.w3.input_global_scale",
         MOE "experts.2.w3.weight_scale_2....",
         BASE_FORMAT,
         {"no place"}},
        {"embed_tokens.weight\":{\"dtype\":\"BF16\",\"shape\":[320,128]",
         "embed_tokens.weight\":{\"dtype\":\"BF16\",\"shape\":[160,256]",
         BASE_FORMAT,
         {"embed_tokens.weight", "[160, 256]", "[320, 128]"}},
        {"lm_head.weight\":{\"dtype\":\"BF16\"",
         "lm_head.weight\":{\"dtype\":\"F16\" ",
         BASE_UNSUPPORTED,
         {"model.safetensors", "lm_head.weight", "F16"}},
        {"model.norm.weight\":{\"dtype\":\"BF16\"",
         "model.norm.weight\":{\"dtype\":\"F16\" ",
         BASE_UNSUPPORTED,
         {"model.norm.weight", "F16"}},
        {"q_proj.weight_scale_inv\":{\"dtype\":\"U8\"",
         "q_proj.weight_scale_inv\":{\"dtype\":\"I8\"",
         BASE_FORMAT,
         {"weight_scale_inv", "I8"}},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++)
        expect_load(CASES[i].from, CASES[i].to, CASES[i].code, CASES[i].texts);
}

Test(binding, modelopt_and_vision_names, .init = enter, .fini = leave)
{
    static const char *const MODELOPT[3] = {"w1.weight_scale_2", "ModelOpt"}, *const NONE[3] = {
                                                                                  NULL};
    /* input_global_scale has the longer name, so the ModelOpt one takes its place in an entry of
     * the same length. */
    expect_load("\"" MOE "experts.0.w1.input_global_scale\":{",
                "\"" MOE "experts.0.w1.weight_scale_2\":    {", BASE_UNSUPPORTED, MODELOPT);
    /* A tensor of the vision tower in the place of one that may be absent. */
    static const char FROM[] = "\"" MOE "experts.0.w1.input_global_scale\"",
                      VISION[] = "\"vision_tower.";
    char to[sizeof FROM];
    memset(to, '_', sizeof to);
    memcpy(to, VISION, sizeof VISION - 1);
    strcpy(to + sizeof FROM - 2, "\"");
    expect_load(FROM, to, BASE_OK, NONE);
}

Test(binding, appended_bytes_are_refused, .init = enter, .fini = leave)
{
    char path[256];
    base_err err = BASE_ERR_INIT;
    eng_model *m;
    eng_model_options options = {.threads = 1, .rows_max = 8, .context_max = 256};
    cr_assert_eq(eng_random__write(dir, "tiny", 0, 1, false, &err), BASE_OK, "%s", err.text);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    FILE *f = fopen(path, "ab");
    fputs("more", f);
    fclose(f);
    cr_expect_eq(eng_model_load(&m, dir, &options, &err), BASE_FORMAT);
    cr_expect_not_null(strstr(err.text, "4 bytes after the last tensor"), "%s", err.text);
}

/* A global scale that is not a positive number would make every weight of the expert infinite or
 * NaN. */
Test(binding, global_scales_must_be_positive, .init = enter, .fini = leave)
{
    static const float BAD[] = {0, -1, INFINITY, NAN};
    char path[256];
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        base_err err = BASE_ERR_INIT;
        eng_files *files;
        eng_model *m;
        eng_model_options options = {.threads = 1, .rows_max = 8, .context_max = 256};
        cr_assert_eq(eng_random__write(dir, "tiny", 0, 1, false, &err), BASE_OK, "%s", err.text);
        cr_assert_eq(eng_files_open(&files, dir, &err), BASE_OK, "%s", err.text);
        const eng_tensor *t = eng_files_find(files, MOE "experts.3.w2.weight_global_scale");
        const eng_tensor *first = eng_files_at(files, 0);
        long offset = (const char *)t->data - (const char *)first->data;
        long header;
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        FILE *f = fopen(path, "r+b");
        cr_assert_eq(fread(&header, 8, 1, f), 1);
        fseek(f, 8 + header + offset, SEEK_SET);
        cr_assert_eq(fwrite(&BAD[i], 4, 1, f), 1);
        fclose(f);
        eng_files_close(files);
        cr_expect_eq(eng_model_load(&m, dir, &options, &err), BASE_FORMAT, "%g", (double)BAD[i]);
        cr_expect_not_null(strstr(err.text, "experts.3.w2.weight_global_scale"), "%s", err.text);
    }
}
