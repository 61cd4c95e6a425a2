/* kernels/backend: what a place of computation offers beside the operations: memory, copies, pages,
 * and the step as a graph. The cpu's is built in; "cuda" and "hip" are modules, whimbrel-NAME.so,
 * that export one symbol, kn_backend_get, so that the server itself needs no library of a GPU.
 *
 * WHERE ARGUMENTS LIE. Device memory: what operations read and write of activations (x, q, out,
 * index_q, blocks, margin, route_ids, route_weights, logits, features), and of weights
 * (kn_weight.data and .scale, norms, router, bias, the rope's tables). Host memory: the structs
 * themselves, the kn_weight structs (also arrays of them: w1, w2, w3), every array of a kn_rows,
 * `ids`, `pos`, `pick`, and of kn_draft_attend pages (and what they point to), lo and hi. On the
 * cpu both are the same memory. A kn_weight that one operation has seen may not move or change
 * while the device lives: a backend keeps tables by its address.
 *
 * ORDER. All of a device's work is done in the order of the calls, by one stream. Operations and
 * `upload` may return before the work is done; `download` and `wait` return after it. A fault of
 * the device (lost, illegal address) makes later calls do nothing; `status` says so, once the
 * step's results were downloaded. Thread: the engine's. */
#pragma once
#include "kernels/ops.h"

#define KN_BACKEND_VERSION 1
#define KN_BACKEND_SYMBOL "kn_backend_get"

struct kn_backend {
    uint32_t version;
    const char *name;     /* "cpu", "cuda", "hip" */
    const char *numerics; /* name and version of its written reductions: "cpu-2", "cuda-1" */

    /* ops, impl and backend of *out are set; kn_device_create adds the pool, and gives
     * options->threads its final value first. Fails: BASE_INVALID,
     * BASE_UNSUPPORTED (no such device or variant: named), BASE_NOMEM, BASE_DEVICE. */
    base_code (*create)(kn_device **out, const kn_device_options *options, base_err *err);
    void (*destroy)(kn_device *device);
    /* One line for the log: "NVIDIA H200, sm_90, 132 processors, 139.8 GiB". Valid while the device
     * lives. */
    const char *(*describe)(const kn_device *device);

    /* Device memory, at a multiple of 256, contents undefined; NULL with BASE_NOMEM in `err`.
     * Weights: one large piece, cut at multiples of 256, is far faster than a call a tensor. `free`
     * gets the same size back; NULL is fine. */
    void *(*alloc)(kn_device *device, size_t bytes, base_err *err);
    void (*free)(kn_device *device, void *memory, size_t bytes);
    /* Bytes the backend can still give, of how many in all; on the cpu 0 and 0: not known. */
    void (*memory)(const kn_device *device, size_t *available, size_t *total);

    /* `src` may be reused on return. */
    void (*upload)(kn_device *device, void *dst, const void *src, size_t bytes);
    void (*download)(kn_device *device, void *dst, const void *src, size_t bytes);
    /* Within the device: `count` pieces of `bytes`, strides in bytes; the ranges do not overlap.
     * May stand inside a graph (features of a step). */
    void (*copy)(kn_device *device, void *dst, size_t dst_stride, const void *src,
                 size_t src_stride, size_t bytes, size_t count);
    /* Byte i becomes table[byte i % 16 of base_rand(seed, stream, i / 16), words little-endian]
     * (engine/base/rand.h), so that a checkpoint made in place has the bytes of one made in a file;
     * `table` NULL: zeros. `dst` at a multiple of 16. */
    void (*fill)(kn_device *device, void *dst, size_t bytes, uint64_t seed, uint64_t stream,
                 const uint8_t table[256]);
    void (*wait)(kn_device *device);
    /* Sticky: BASE_OK, or BASE_DEVICE with what failed. */
    base_code (*status)(const kn_device *device, base_err *err);

    /* Announces one step's rows: token, pos, seq and the entries of the page tables up to each
     * row's position are staged once. Operations that get this same kn_rows (by address), or its
     * token or pos arrays, use what was staged, until the next rows_begin; other rows are staged
     * call by call. The arrays must not change meanwhile. */
    void (*rows_begin)(kn_device *device, const kn_rows *rows);

    /* A step as a graph. After rows_begin: true means "issue the operations and call graph_end",
     * which also runs them; false means that the graph of this key was run already, so skip them
     * and graph_end. Between the two stand only embed, attn_in, select, attend, linear, mlp, moe,
     * norm and copy, of the begun rows, with no other host array; never head, draft_attend, upload
     * or download. `key` names everything that the caller may vary for one row count: range of
     * layers, buffers, tapped layers, probe or not. The backend adds the row count and a bucket of
     * the longest context. Always true where there are no graphs, and graph_end then does nothing.
     */
    bool (*graph_begin)(kn_device *device, uint64_t key);
    void (*graph_end)(kn_device *device);

    /* Rows [0, tokens) of every plane of `from` into `to`. */
    void (*kv_copy_page)(kn_kv *kv, uint32_t to, uint32_t from, uint32_t tokens);
};

/* Of a module: NULL if it serves another version. */
typedef const kn_backend *kn_backend_get_fn(uint32_t version);

extern const kn_backend kn_backend_cpu;

/* ---- pages: laid out alike in every backend ---- */

struct kn_kv {
    kn_device *device;
    const kn_backend *backend;
    kn_kv_shape shape;
    size_t page_bytes;
    size_t layer_offset[KN_LAYERS_MAX];
    uint32_t row_bytes, index_row_bytes;
    uint8_t *pages; /* device memory */
    size_t bytes;
};

/* First byte of a plane within its page: KN_PAGE_TOKENS rows of kn_kv_row_bytes. A page holds layer
 * by layer the K heads, the V heads and, where the layer has one, the index plane: the order of the
 * records on disk. */
static inline size_t kn_kv_plane_offset(const kn_kv *kv, uint32_t layer, kn_plane_kind kind,
                                        uint32_t head)
{
    const size_t plane = kind == KN_PLANE_K   ? head
                         : kind == KN_PLANE_V ? kv->shape.kv_heads + head
                                              : 2 * kv->shape.kv_heads;
    return kv->layer_offset[layer] + plane * kv->row_bytes * (size_t)KN_PAGE_TOKENS;
}
