/* The quantised matrices of a checkpoint in the form that the cpu's vector variants stream
 * (kernels/cpu/tiles.h), in one anonymous mapping on huge pages where the system grants them:
 * a file's pages are of 4 KiB, and walking them costs a sixth of the bandwidth. That is also why
 * the file that keeps them from one start to the next is read and not mapped: its sums have to be
 * compared anyway, and the copy comes along.
 *
 *   head | sums of CHUNK bytes each | up to the next 4,096 | the matrices, as they lie in memory
 *
 * The head names the checkpoint (the key: its fingerprint and its files' times), the form and the
 * lengths, and ends in a sum of itself and of the sums. A file that differs in anything is made
 * anew; one that is cut short or damaged, too. It is written beside and renamed over, by a thread
 * of its own behind the start, which nobody waits for. */
#include "engine/model_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/thread.h"

#define CHUNK ((size_t)1 << 20)
#define ALIGN 4096
#define FREE_SHARE 10 /* of the disk, a tenth stays free */

static const char MAGIC[8] = "WHBPACK1";

typedef struct pack_head {
    char magic[8];
    uint32_t version, matrices; /* KN_PACK_VERSION */
    uint64_t bytes;             /* of the matrices */
    uint8_t key[16];
    uint64_t sum; /* of all before and of the chunks' sums */
} pack_head;

struct eng_repack {
    uint8_t *memory;
    size_t bytes;
    pack_head head;
    uint64_t *sums; /* [chunks]; NULL: no file is kept */
    char path[PATH_MAX], beside[PATH_MAX + 8];
    bool from_file;
    bool writing; /* `writer` is to be joined */
    atomic_bool stop;
    pthread_t writer;
};

/* ---- packing ---- */

typedef struct pack_job {
    kn_weight *const *weights;
    uint8_t *memory;
    const size_t *offsets;
} pack_job;

static void pack_one(void *ctx, uint32_t i)
{
    const pack_job *job = ctx;
    kn_pack(job->memory + job->offsets[i], job->weights[i]);
}

/* ---- the file ---- */

static size_t chunks_of(const eng_repack *pack)
{
    return (pack->bytes + CHUNK - 1) / CHUNK;
}

static size_t chunk_bytes(const eng_repack *pack, size_t i)
{
    return base_min(CHUNK, pack->bytes - i * CHUNK);
}

/* Where the matrices begin. */
static size_t data_offset(const eng_repack *pack)
{
    return base_align_up(sizeof(pack_head) + chunks_of(pack) * sizeof *pack->sums, ALIGN);
}

static uint64_t head_sum(const eng_repack *pack)
{
    const uint64_t own = XXH3_64bits(&pack->head, offsetof(pack_head, sum));
    return XXH3_64bits_withSeed(pack->sums, chunks_of(pack) * sizeof *pack->sums, own);
}

static bool read_all(int fd, void *to, size_t bytes, size_t offset)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(fd, (uint8_t *)to + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    return true;
}

static bool write_all(int fd, const void *from, size_t bytes, size_t offset)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pwrite(fd, (const uint8_t *)from + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return false;
        done += (size_t)n;
    }
    return true;
}

typedef struct read_job {
    const eng_repack *pack;
    int fd;
    atomic_bool bad;
} read_job;

static void read_chunk(void *ctx, uint32_t i)
{
    read_job *job = ctx;
    const eng_repack *pack = job->pack;
    uint8_t *to = pack->memory + i * CHUNK;
    const size_t bytes = chunk_bytes(pack, i);
    if (!atomic_load(&job->bad) && (!read_all(job->fd, to, bytes, data_offset(pack) + i * CHUNK) ||
                                    XXH3_64bits(to, bytes) != pack->sums[i]))
        atomic_store(&job->bad, true);
}

/* Fills the memory from the file; else says why not. */
static const char *read_file(eng_repack *pack, kn_device *device)
{
    struct stat st;
    pack_head head;
    int fd = open(pack->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? "there is none yet" : "it cannot be opened";
    const char *why = NULL;
    if (fstat(fd, &st) != 0 || !read_all(fd, &head, sizeof head, 0) ||
        memcmp(head.magic, MAGIC, sizeof MAGIC) != 0)
        why = "it is none of ours";
    else if (memcmp(&head, &pack->head, offsetof(pack_head, sum)) != 0)
        why = "it is of another checkpoint or form";
    else if ((size_t)st.st_size != data_offset(pack) + pack->bytes)
        why = "it is cut short";
    else if (!read_all(fd, pack->sums, chunks_of(pack) * sizeof *pack->sums, sizeof head) ||
             head.sum != head_sum(pack))
        why = "its head is damaged";
    if (why == NULL) {
        read_job job = {.pack = pack, .fd = fd};
        kn_device_parallel(device, read_chunk, &job, (uint32_t)chunks_of(pack));
        why = atomic_load(&job.bad) ? "it is damaged" : NULL;
    }
    close(fd);
    return why;
}

/* Leaves room on the disk for others. */
static bool has_room(const eng_repack *pack)
{
    struct statvfs fs;
    char folder[PATH_MAX];
    const char *slash = strrchr(pack->path, '/');
    snprintf(folder, sizeof folder, "%.*s", slash != NULL ? (int)(slash - pack->path + 1) : 1,
             slash != NULL ? pack->path : ".");
    return statvfs(folder, &fs) == 0 &&
           pack->bytes / fs.f_frsize + fs.f_blocks / FREE_SHARE < fs.f_bavail;
}

static const char *write_file(eng_repack *pack)
{
    if (!has_room(pack))
        return "a tenth of the disk is to stay free";
    int fd = open(pack->beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return strerror(errno);
    bool good = true;
    for (size_t i = 0; i < chunks_of(pack) && good; i++) {
        const uint8_t *from = pack->memory + i * CHUNK;
        pack->sums[i] = XXH3_64bits(from, chunk_bytes(pack, i));
        good = !atomic_load(&pack->stop) &&
               write_all(fd, from, chunk_bytes(pack, i), data_offset(pack) + i * CHUNK);
    }
    pack->head.sum = head_sum(pack);
    good = good && write_all(fd, &pack->head, sizeof pack->head, 0) &&
           write_all(fd, pack->sums, chunks_of(pack) * sizeof *pack->sums, sizeof pack->head);
    const int failure = errno;
    good = close(fd) == 0 && good && rename(pack->beside, pack->path) == 0;
    if (good)
        return NULL;
    (void)unlink(pack->beside);
    return atomic_load(&pack->stop) ? "stopped" : strerror(failure);
}

static void *write_behind(void *arg)
{
    eng_repack *pack = arg;
    base_thread_enter(BASE_THREAD_OTHER, "weights");
    const char *why = write_file(pack);
    if (why == NULL)
        base_log(BASE_LOG_INFO, "weights_kept bytes=%zu", pack->bytes);
    else if (!atomic_load(&pack->stop))
        base_log(BASE_LOG_WARN, "weights_not_kept reason=\"%s\"", why);
    return NULL;
}

/* ---- both ---- */

/* Names the file, if one is to be kept. False: out of memory. */
static bool name_file(eng_repack *pack, const eng_repack_options *options, uint32_t count)
{
    if (options->path[0] == '\0')
        return true;
    snprintf(pack->beside, sizeof pack->beside, "%s.new", options->path);
    (void)unlink(pack->beside); /* of a process that was killed */
    if (pack->bytes > options->bytes_max) {
        /* What an earlier start kept is not wanted any more. */
        if (unlink(options->path) == 0)
            base_log(BASE_LOG_INFO, "weights_dropped reason=\"%zu bytes exceed %llu\"", pack->bytes,
                     (unsigned long long)options->bytes_max);
        return true;
    }
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(options->key, strlen(options->key)));
    memcpy(pack->head.magic, MAGIC, sizeof MAGIC);
    pack->head.version = KN_PACK_VERSION;
    pack->head.matrices = count;
    pack->head.bytes = pack->bytes;
    memcpy(pack->head.key, canonical.digest, sizeof pack->head.key);
    pack->sums = calloc(chunks_of(pack), sizeof *pack->sums);
    snprintf(pack->path, sizeof pack->path, "%s", options->path);
    return pack->sums != NULL;
}

static base_code fill(eng_repack *pack, kn_weight *const *weights, uint32_t count,
                      const eng_repack_options *options, kn_device *device, const size_t *offsets,
                      base_err *err)
{
    const uint64_t before = base_now_ns();
    void *memory =
        mmap(NULL, pack->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return base_fail(err, BASE_NOMEM, "no memory for %zu bytes of repacked weights",
                         pack->bytes);
    (void)madvise(memory, pack->bytes, MADV_HUGEPAGE);
    pack->memory = memory;
    if (!name_file(pack, options, count))
        return base_fail(err, BASE_NOMEM, "out of memory");
    const char *why = pack->sums != NULL ? read_file(pack, device) : NULL;
    pack->from_file = pack->sums != NULL && why == NULL;
    if (!pack->from_file) {
        pack_job job = {.weights = weights, .memory = pack->memory, .offsets = offsets};
        kn_device_parallel(device, pack_one, &job, count);
    }
    for (uint32_t i = 0; i < count; i++)
        weights[i]->tiles = pack->memory + offsets[i];
    (void)mprotect(memory, pack->bytes, PROT_READ); /* nobody writes weights from here on */
    if (pack->sums != NULL)
        base_log(BASE_LOG_INFO, "weights_packed from=%s bytes=%zu ms=%.1f%s%s%s",
                 pack->from_file ? "file" : "checkpoint", pack->bytes,
                 (double)(base_now_ns() - before) / 1e6, why != NULL ? " reason=\"" : "",
                 why != NULL ? why : "", why != NULL ? "\"" : "");
    pack->writing = pack->sums != NULL && !pack->from_file &&
                    pthread_create(&pack->writer, NULL, write_behind, pack) == 0;
    return BASE_OK;
}

base_code eng_repack__create(eng_repack **out, kn_weight *const *weights, uint32_t count,
                             const eng_repack_options *options, kn_device *device, base_err *err)
{
    *out = NULL;
    /* ref reads the stored form, and so does whoever has memory of its own. */
    if (count == 0 || !eng_memory_is_shared(device) || strcmp(device->ops->name, "cpu-ref") == 0)
        return BASE_OK;
    eng_repack *pack = calloc(1, sizeof *pack);
    size_t *offsets = malloc(count * sizeof *offsets);
    bool good = pack != NULL && offsets != NULL;
    for (uint32_t i = 0; good && i < count; i++) {
        offsets[i] = pack->bytes;
        good = base_add(&pack->bytes, pack->bytes, kn_pack_bytes(weights[i]));
    }
    base_code code = good ? fill(pack, weights, count, options, device, offsets, err)
                          : base_fail(err, BASE_NOMEM, "no memory to repack %u matrices", count);
    free(offsets);
    if (code != BASE_OK) {
        eng_repack__destroy(pack);
        return code;
    }
    *out = pack;
    return BASE_OK;
}

bool eng_repack__from_file(const eng_repack *pack)
{
    return pack->from_file;
}

void eng_repack__settle(eng_repack *pack)
{
    if (pack == NULL || !pack->writing)
        return;
    pthread_join(pack->writer, NULL);
    pack->writing = false;
}

void eng_repack__destroy(eng_repack *pack)
{
    if (pack == NULL)
        return;
    atomic_store(&pack->stop, true);
    eng_repack__settle(pack);
    if (pack->memory != NULL)
        munmap(pack->memory, pack->bytes);
    free(pack->sums);
    free(pack);
}
