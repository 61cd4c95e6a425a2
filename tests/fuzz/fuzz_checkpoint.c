/* The files of a model directory as anybody may have made them: tensors' headers and config.json.
 *
 * The first byte says what the rest is: f a whole safetensors file; h a header, before which its
 * length is put and behind which the second byte times eight zeros; i an index, beside a shard
 * named `a` with one tensor `t`; c config.json, g generation_config.json, d dspark/config.json,
 * each beside a good config.json. */
#include "tests/fuzz/fuzz.h"

#include <sys/stat.h>

#include "engine/model_internal.h"

/* Enough for the other files to be read. */
static const char good_config[] =
    "{\"architectures\":[\"MiniMaxM3SparseForCausalLM\"],\"hidden_size\":128,\"num_hidden_layers\":"
    "4,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,\"vocab_size\":320,"
    "\"max_position_embeddings\":32768,\"dense_intermediate_size\":64}";

static void look(eng_files *files, size_t size)
{
    uint64_t bytes = 0;
    static volatile uint8_t sum; /* so that the bytes are read */
    for (uint32_t i = 0; i < eng_files_count(files); i++) {
        const eng_tensor *t = eng_files_at(files, i);
        MUST(eng_files_find(files, t->name) == t);
        bytes += t->bytes;
        if (t->bytes > 0)
            sum = sum ^ ((const uint8_t *)t->data)[0] ^ ((const uint8_t *)t->data)[t->bytes - 1];
    }
    MUST(bytes == eng_files_bytes(files) && bytes <= size);
    MUST(eng_files_find(files, "no such tensor") == NULL || bytes > 0);
    (void)eng_files__gap(files);
    XXH3_state_t *state = XXH3_createState();
    MUST(state != NULL && XXH3_128bits_reset(state) == XXH_OK);
    eng_files__digest(files, state);
    XXH3_freeState(state);
    eng_files_close(files);
}

static void tensors(const void *file, size_t size)
{
    static int fd = -1;
    base_err err = BASE_ERR_INIT;
    eng_files *files;
    if (eng_files_open_one(&files, fuzz_file(&fd, file, size), &err) == BASE_OK)
        look(files, size);
    else
        MUST(err.code != BASE_OK && err.text[0] != '\0');
}

static char folder[64];

static void put(const char *name, const void *data, size_t size)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    MUST(file != NULL && fwrite(data, 1, size, file) == size);
    MUST(fclose(file) == 0);
}

static void remove_folder(void)
{
    static const char *const names[] = {"config.json",
                                        "generation_config.json",
                                        "dspark/config.json",
                                        "dspark",
                                        "a",
                                        "model.safetensors.index.json",
                                        ""};
    char path[128];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        remove(path);
    }
}

static void make_folder(void)
{
    static const char shard[] =
        "\x40\0\0\0\0\0\0\0"
        "{\"t\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}        "
        "12345678";
    char path[128];
    if (folder[0] != '\0')
        return;
    strcpy(folder, "/dev/shm/fuzz-checkpoint-XXXXXX");
    if (access("/dev/shm", W_OK) != 0)
        strcpy(folder, "/tmp/fuzz-checkpoint-XXXXXX");
    MUST(mkdtemp(folder) != NULL);
    atexit(remove_folder);
    snprintf(path, sizeof path, "%s/dspark", folder);
    MUST(mkdir(path, 0700) == 0);
    put("a", shard, sizeof shard - 1);
}

static void shards(const void *data, size_t size)
{
    base_err err = BASE_ERR_INIT;
    eng_files *files;
    put("model.safetensors.index.json", data, size);
    if (eng_files_open(&files, folder, &err) == BASE_OK)
        look(files, 1u << 20);
    else
        MUST(err.code != BASE_OK && err.text[0] != '\0');
}

static void config(char kind, const void *data, size_t size)
{
    base_err err = BASE_ERR_INIT;
    eng_config_file file;
    eng_draft_config draft;
    char path[128];
    snprintf(path, sizeof path, "%s/generation_config.json", folder);
    if (kind == 'g')
        put("generation_config.json", data, size);
    else
        unlink(path);
    put("config.json", kind == 'c' ? data : good_config,
        kind == 'c' ? size : sizeof good_config - 1);
    base_code code = eng_config__read(&file, folder, "fuzz", &err);
    MUST(code == err.code);
    if (code != BASE_OK)
        return;
    MUST(file.end_token_count <= ENG_END_TOKENS_MAX);
    if (kind == 'd') {
        put("dspark/config.json", data, size);
        snprintf(path, sizeof path, "%s/dspark", folder);
        MUST(eng_config__read_draft(&draft, path, &file.model, &err) == err.code);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    if (data[0] == 'f') {
        tensors(data + 1, size - 1);
    } else if (data[0] == 'h') {
        size_t header = size - 2, zeros = 8 * (size_t)data[1];
        char *file = calloc(1, 8 + header + zeros);
        MUST(file != NULL);
        for (int i = 0; i < 8; i++)
            file[i] = (char)((uint64_t)header >> 8 * i);
        memcpy(file + 8, data + 2, header);
        tensors(file, 8 + header + zeros);
        free(file);
    } else if (data[0] == 'i') {
        make_folder();
        shards(data + 1, size - 1);
    } else if (data[0] == 'c' || data[0] == 'g' || data[0] == 'd') {
        make_folder();
        config((char)data[0], data + 1, size - 1);
    }
    return 0;
}
