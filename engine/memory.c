#include "engine/memory.h"

#include <string.h>

#include "engine/base/num.h"

#define ALIGN 256

static base_code lay_out(size_t *out, const eng_piece *pieces, uint32_t count, base_err *err)
{
    size_t total = 0;
    for (uint32_t i = 0; i < count; i++) {
        size_t bytes;
        if (!base_mul(&bytes, pieces[i].count, pieces[i].size) || !base_add(&total, total, bytes) ||
            total > SIZE_MAX / 2)
            return base_fail(err, BASE_NOMEM, "device memory: the sizes overflow");
        total = base_align_up(total, ALIGN);
    }
    *out = total;
    return BASE_OK;
}

/* Pointers of any type are written as what they are: bytes. */
static void *pointer_of(const eng_piece *piece)
{
    void *pointer;
    memcpy(&pointer, piece->at, sizeof pointer);
    return pointer;
}

static base_code take(eng_memory *out, kn_device *device, const eng_piece *pieces, uint32_t count,
                      bool moves, base_err *err)
{
    *out = (eng_memory){.device = device};
    base_code code = lay_out(&out->bytes, pieces, count, err);
    if (code == BASE_OK && out->bytes > 0 &&
        (out->block = device->backend->alloc(device, out->bytes, err)) == NULL)
        code = BASE_NOMEM;
    if (code != BASE_OK) {
        out->bytes = 0;
        return code;
    }
    uint8_t *next = out->block;
    for (uint32_t i = 0; i < count; i++) {
        const size_t bytes = pieces[i].count * pieces[i].size;
        void *at = bytes > 0 ? next : NULL;
        if (moves && bytes > 0)
            device->backend->upload(device, at, pointer_of(&pieces[i]), bytes);
        memcpy(pieces[i].at, &at, sizeof at);
        next += base_align_up(bytes, ALIGN);
    }
    return BASE_OK;
}

base_code eng_memory_take(eng_memory *out, kn_device *device, const eng_piece *pieces,
                          uint32_t count, base_err *err)
{
    return take(out, device, pieces, count, false, err);
}

base_code eng_memory_move(eng_memory *out, kn_device *device, const eng_piece *pieces,
                          uint32_t count, base_err *err)
{
    *out = (eng_memory){.device = device};
    return eng_memory_is_shared(device) ? BASE_OK : take(out, device, pieces, count, true, err);
}

void eng_memory_free(eng_memory *memory)
{
    if (memory->block != NULL)
        memory->device->backend->free(memory->device, memory->block, memory->bytes);
    *memory = (eng_memory){0};
}

void *eng_memory_read(kn_device *device, void *room, const void *at, size_t bytes)
{
    if (eng_memory_is_shared(device))
        return (void *)at;
    device->backend->download(device, room, at, bytes);
    return room;
}
