/* The quantised matrices of a checkpoint in the form that the cpu's vector variants stream
 * (kernels/cpu/tiles.h), in one anonymous mapping on huge pages where the system grants them:
 * a file's pages are of 4 KiB, and walking them costs a sixth of the bandwidth. */
#include "engine/model_internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "engine/base/num.h"

struct eng_repack {
    void *memory;
    size_t bytes;
};

typedef struct pack_job {
    kn_weight *const *weights;
    uint8_t *memory;
    size_t *offsets;
} pack_job;

static void pack_one(void *ctx, uint32_t i)
{
    const pack_job *job = ctx;
    kn_weight *w = job->weights[i];
    kn_pack(job->memory + job->offsets[i], w);
    w->tiles = job->memory + job->offsets[i];
}

base_code eng_repack__create(eng_repack **out, kn_weight *const *weights, uint32_t count,
                             kn_device *device, base_err *err)
{
    *out = NULL;
    if (count == 0 || strcmp(device->ops->name, "cpu-ref") == 0)
        return BASE_OK; /* ref reads the stored form */
    eng_repack *pack = calloc(1, sizeof *pack);
    size_t *offsets = malloc(count * sizeof *offsets);
    bool good = pack != NULL && offsets != NULL;
    size_t bytes = 0;
    for (uint32_t i = 0; good && i < count; i++) {
        offsets[i] = bytes;
        good = base_add(&bytes, bytes, kn_pack_bytes(weights[i]));
    }
    void *memory =
        good ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
             : MAP_FAILED;
    if (memory == MAP_FAILED) {
        free(offsets);
        free(pack);
        return base_fail(err, BASE_NOMEM, "no memory for %zu bytes of repacked weights", bytes);
    }
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
    *pack = (eng_repack){.memory = memory, .bytes = bytes};
    pack_job job = {.weights = weights, .memory = memory, .offsets = offsets};
    kn_device_parallel(device, pack_one, &job, count);
    free(offsets);
    (void)mprotect(memory, bytes, PROT_READ); /* nobody writes weights from here on */
    *out = pack;
    return BASE_OK;
}

void eng_repack__destroy(eng_repack *pack)
{
    if (pack == NULL)
        return;
    munmap(pack->memory, pack->bytes);
    free(pack);
}
