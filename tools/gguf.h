/* gguf: a checkpoint of the MiniMax-M3 family as a GGUF file of llama.cpp's architecture
 * `minimax-m3`, so that another program runs the same weights. */
#pragma once
#include "engine/base/err.h"

typedef struct gguf_summary {
    uint64_t bytes;                           /* of the file */
    uint64_t tensors, nvfp4, q8_0, bf16, f32; /* tensors in all, and values by format */
    uint32_t dense_only_layers; /* sparse here, dense there: equal up to `equal_tokens` only */
    uint32_t equal_tokens;
} gguf_summary;

/* NVFP4 and BF16 stay to the bit; MXFP8 becomes Q8_0, the nearest that llama.cpp has (33/32 bytes a
 * value each); norms get their 1 added, as it expects. BASE_UNSUPPORTED names what its architecture
 * cannot express; BASE_IO leaves no file. */
base_code gguf_export(const char *dir, const char *path, bool exact, gguf_summary *summary,
                      base_err *err);
