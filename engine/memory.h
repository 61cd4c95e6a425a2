/* eng_memory: a block of a device's memory, cut into what operations read and write.
 *
 * The cpu's memory is the host's: there arrays that exist already are used where they lie, and the
 * host reads results in place. Elsewhere they are copied (kernels/backend.h, WHERE ARGUMENTS LIE).
 * Pieces begin at multiples of 256. Thread: one at a time. */
#pragma once
#include "kernels/backend.h"

typedef struct eng_memory {
    kn_device *device;
    void *block; /* NULL: none */
    size_t bytes;
} eng_memory;

/* `count` elements of `size`, which the pointer whose address is `at` is to point to. */
typedef struct eng_piece {
    void *at;
    size_t count, size;
} eng_piece;

/* Whether host and device share their memory. */
static inline bool eng_memory_is_shared(const kn_device *device)
{
    return device->backend == &kn_backend_cpu;
}

/* One block for all pieces, contents undefined; an empty piece's pointer becomes NULL. The caller
 * frees it before the device goes. Fails: BASE_NOMEM, with *out empty and no pointer changed. */
base_code eng_memory_take(eng_memory *out, kn_device *device, const eng_piece *pieces,
                          uint32_t count, base_err *err);
/* The arrays that the pieces' pointers point to, moved into one block; what they pointed to before
 * stays its owner's. With shared memory nothing is moved and *out is empty. Fails as take does. */
base_code eng_memory_move(eng_memory *out, kn_device *device, const eng_piece *pieces,
                          uint32_t count, base_err *err);
void eng_memory_free(eng_memory *memory); /* an empty one is fine */

/* `bytes` of device memory for the host: where they lie, or copied to `room`, which may be NULL if
 * memory is shared. Waits for the operations that write them. */
void *eng_memory_read(kn_device *device, void *room, const void *at, size_t bytes);
