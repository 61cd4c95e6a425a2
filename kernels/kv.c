/* kernels/kv: page memory, laid out alike on every backend. */
#include "kernels/backend.h"

#include "engine/base/num.h"

#include <stdlib.h>

#define ALIGN 64
#define DIM_MAX 512

/* Bytes of a layer's planes. */
static size_t layer_bytes(const kn_kv_shape *shape, uint32_t layer)
{
    const size_t kv = 2 * (size_t)shape->kv_heads * kn_kv_row_bytes(shape->type, shape->head_dim);
    const size_t index =
        shape->has_index[layer] ? kn_kv_row_bytes(shape->type, shape->index_dim) : 0;
    return (kv + index) * KN_PAGE_TOKENS;
}

size_t kn_kv_page_bytes(const kn_kv_shape *shape)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < shape->layers; i++)
        bytes += layer_bytes(shape, i);
    return base_align_up(bytes, ALIGN);
}

static base_code check_shape(const kn_kv_shape *shape, base_err *err)
{
    if (shape->layers == 0 || shape->layers > KN_LAYERS_MAX)
        return base_fail(err, BASE_INVALID, "pages: %u layers, must be 1 to %d", shape->layers,
                         KN_LAYERS_MAX);
    if (shape->kv_heads == 0 || shape->kv_heads > 1024)
        return base_fail(err, BASE_INVALID, "pages: %u kv heads, must be 1 to 1024",
                         shape->kv_heads);
    if (shape->head_dim == 0 || shape->head_dim % 16 || shape->head_dim > DIM_MAX)
        return base_fail(err, BASE_INVALID, "pages: head_dim %u, must be a multiple of 16 up to %d",
                         shape->head_dim, DIM_MAX);
    if (shape->index_dim % 16 || shape->index_dim > DIM_MAX)
        return base_fail(err, BASE_INVALID,
                         "pages: index_dim %u, must be a multiple of 16 up to %d", shape->index_dim,
                         DIM_MAX);
    if (shape->page_count == 0)
        return base_fail(err, BASE_INVALID, "pages: page_count 0, must be at least 1");
    return BASE_OK;
}

base_code kn_kv_create(kn_kv **out, kn_device *device, const kn_kv_shape *shape, base_err *err)
{
    const base_code code = check_shape(shape, err);
    if (code)
        return code;
    kn_kv *kv = calloc(1, sizeof *kv);
    if (!kv)
        return base_fail(err, BASE_NOMEM, "pages: out of memory");
    kv->device = device;
    kv->backend = device->backend;
    kv->shape = *shape;
    kv->page_bytes = kn_kv_page_bytes(shape);
    kv->row_bytes = kn_kv_row_bytes(shape->type, shape->head_dim);
    kv->index_row_bytes = kn_kv_row_bytes(shape->type, shape->index_dim);
    size_t offset = 0;
    for (uint32_t i = 0; i < shape->layers; i++) {
        kv->layer_offset[i] = offset;
        offset += layer_bytes(shape, i);
    }
    if (base_mul(&kv->bytes, kv->page_bytes, shape->page_count))
        kv->pages = device->backend->alloc(device, kv->bytes, NULL);
    if (!kv->pages) {
        base_fail(err, BASE_NOMEM, "pages: no memory for %u pages of %zu bytes", shape->page_count,
                  kv->page_bytes);
        free(kv);
        return BASE_NOMEM;
    }
    *out = kv;
    return BASE_OK;
}

void kn_kv_destroy(kn_kv *kv)
{
    if (!kv)
        return;
    kv->backend->free(kv->device, kv->pages, kv->bytes);
    free(kv);
}

const kn_kv_shape *kn_kv_get_shape(const kn_kv *kv)
{
    return &kv->shape;
}

/* The plane's first byte after checking that it exists; *bytes gets the length of its first
 * `tokens` rows. */
static uint8_t *plane_rows(const kn_kv *kv, uint32_t page, uint32_t layer, kn_plane_kind kind,
                           uint32_t head, uint32_t tokens, size_t *bytes)
{
    CHECK(page < kv->shape.page_count);
    CHECK(layer < kv->shape.layers);
    CHECK(tokens <= KN_PAGE_TOKENS);
    if (kind == KN_PLANE_INDEX)
        CHECK(kv->shape.has_index[layer] && head == 0);
    else
        CHECK(head < kv->shape.kv_heads);
    *bytes = (size_t)tokens * (kind == KN_PLANE_INDEX ? kv->index_row_bytes : kv->row_bytes);
    return kv->pages + page * kv->page_bytes + kn_kv_plane_offset(kv, layer, kind, head);
}

void kn_kv_copy_out(const kn_kv *kv, void *dst, uint32_t page, uint32_t layer, kn_plane_kind kind,
                    uint32_t head, uint32_t tokens)
{
    size_t bytes;
    const uint8_t *plane = plane_rows(kv, page, layer, kind, head, tokens, &bytes);
    kv->backend->download(kv->device, dst, plane, bytes);
}

void kn_kv_copy_in(kn_kv *kv, const void *src, uint32_t page, uint32_t layer, kn_plane_kind kind,
                   uint32_t head, uint32_t tokens)
{
    size_t bytes;
    uint8_t *plane = plane_rows(kv, page, layer, kind, head, tokens, &bytes);
    kv->backend->upload(kv->device, plane, src, bytes);
}

void kn_kv_copy_page(kn_kv *kv, uint32_t to, uint32_t from, uint32_t tokens)
{
    CHECK(to < kv->shape.page_count && from < kv->shape.page_count && tokens <= KN_PAGE_TOKENS);
    if (to != from)
        kv->backend->kv_copy_page(kv, to, from, tokens);
}
