/* eng_files: the tensors of a checkpoint directory: model.safetensors, or shards by
 * model.safetensors.index.json, mapped read-only (format: huggingface/safetensors, 8-byte
 * little-endian header length, JSON header, data).
 *
 * Every offset, shape and size is checked before a tensor is handed out. Look-up by hash. Thread:
 * load anywhere, read any. */
#pragma once
#include "engine/base/err.h"

typedef enum eng_dtype {
    ENG_F32,
    ENG_F16,
    ENG_BF16,
    ENG_F8_E4M3,
    ENG_U8,
    ENG_I8,
    ENG_I32,
    ENG_I64,
    ENG_OTHER,
} eng_dtype;

typedef struct eng_tensor {
    const char *name;
    eng_dtype dtype;
    uint32_t dims;
    uint64_t shape[8];
    const void *data; /* mapped; not necessarily aligned to more than the file's own offsets */
    uint64_t bytes;
    const char *file; /* for messages */
} eng_tensor;

typedef struct eng_files eng_files;

base_code eng_files_open(eng_files **out, const char *dir, base_err *err);
/* One file by path (test vectors). */
base_code eng_files_open_one(eng_files **out, const char *path, base_err *err);
void eng_files_close(eng_files *files);
const eng_tensor *eng_files_find(const eng_files *files, const char *name); /* NULL: absent */
uint32_t eng_files_count(const eng_files *files);
const eng_tensor *eng_files_at(const eng_files *files, uint32_t i);
uint64_t eng_files_bytes(const eng_files *files);
