/* Segment files of the disk tier: kv/seg-XXXXXXXX.kv, appended to by the writer, read by anyone
 * with a use on them. What is erased becomes a hole, or zeros where the file system has no holes.
 */
#include "cache/store_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "engine/base/num.h"

static void name_of(char out[32], uint32_t number)
{
    snprintf(out, 32, "seg-%08x.kv", number);
}

int kv_store__write_at(kv_store *store, int fd, const uint8_t *bytes, size_t length,
                       uint64_t offset)
{
    while (length > 0) {
        ssize_t done = store->options.io.pwrite(fd, bytes, length, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done < 0 ? errno : ENOSPC;
        bytes += done;
        length -= (size_t)done;
        offset += (uint64_t)done;
    }
    return 0;
}

int kv_store__read_at(kv_store *store, int fd, uint8_t *bytes, size_t length, uint64_t offset)
{
    while (length > 0) {
        ssize_t done = store->options.io.pread(fd, bytes, length, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done < 0 ? errno : ENODATA; /* the file is shorter than its rows say */
        bytes += done;
        length -= (size_t)done;
        offset += (uint64_t)done;
    }
    return 0;
}

uint32_t kv_store__segment_by_number(const kv_store *store, uint32_t number)
{
    for (uint32_t i = 0; i < KV_SEGMENTS_MAX; i++)
        if (store->segments[i].fd >= 0 && store->segments[i].number == number)
            return i;
    return KV_SEGMENT_NONE;
}

static uint32_t free_entry(const kv_store *store)
{
    for (uint32_t i = 0; i < KV_SEGMENTS_MAX; i++)
        if (store->segments[i].fd < 0)
            return i;
    return KV_SEGMENT_NONE;
}

static void adopt(kv_store *store, uint32_t at, uint32_t number, int fd, uint64_t end, bool sealed)
{
    char name[32];
    name_of(name, number);
    store->segments[at] = (kv_segment){
        .number = number,
        .fd = fd,
        .fd_direct = store->options.direct
                         ? openat(store->dir_fd, name, O_RDONLY | O_DIRECT | O_CLOEXEC)
                         : -1,
        .end = end,
        .first = KV_REC_NONE,
        .sealed = sealed,
    };
    store->segment_count++;
    store->bytes += end;
    if (number >= store->segment_next)
        store->segment_next = number + 1;
}

base_code kv_store__files_open(kv_store *store, base_err *err)
{
    int fd = dup(store->dir_fd);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    struct dirent *entry;
    if (dir == NULL) {
        if (fd >= 0)
            close(fd);
        return base_fail(err, BASE_IO, "%s: %s", store->dir, strerror(errno));
    }
    rewinddir(dir);
    while ((entry = readdir(dir)) != NULL) {
        uint32_t number;
        char name[32];
        uint8_t head[KV_BLOCK];
        struct stat info;
        if (sscanf(entry->d_name, "seg-%8x.kv", &number) != 1)
            continue;
        name_of(name, number);
        if (strcmp(name, entry->d_name) != 0)
            continue;
        uint32_t at = free_entry(store);
        int seg = at == KV_SEGMENT_NONE ? -1 : openat(store->dir_fd, name, O_RDWR | O_CLOEXEC);
        if (seg < 0 || fstat(seg, &info) != 0 || !S_ISREG(info.st_mode)) {
            base_log(BASE_LOG_WARN, "kv_segment_unreadable file=%s", name);
            if (seg >= 0)
                close(seg);
            continue;
        }
        if (info.st_size < (off_t)KV_BLOCK ||
            kv_store__read_at(store, seg, head, KV_BLOCK, 0) != 0 ||
            !kv_segment__head_fits(head, number)) {
            base_log(BASE_LOG_WARN, "kv_segment_dropped file=%s bytes=%lld", name,
                     (long long)info.st_size);
            store->stats.swept_bytes += (uint64_t)info.st_size;
            close(seg);
            unlinkat(store->dir_fd, name, 0);
            if (number >= store->segment_next)
                store->segment_next = number + 1;
            continue;
        }
        adopt(store, at, number, seg, (uint64_t)info.st_size, true);
    }
    closedir(dir);
    return BASE_OK;
}

bool kv_store__punch(kv_store *store, uint32_t segment, uint64_t offset, uint64_t length)
{
    static const uint8_t zeros[64 * 1024];
    int fd = store->segments[segment].fd;
    if (!store->no_punch) {
        if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                      (off_t)length) == 0)
            return true;
        if (errno == EOPNOTSUPP)
            store->no_punch = true;
    }
    for (uint64_t at = 0; at < length; at += sizeof zeros)
        if (kv_store__write_at(store, fd, zeros, base_min(sizeof zeros, length - at),
                               offset + at) != 0) {
            base_log(BASE_LOG_ERROR, "kv_erase_failed segment=%u offset=%llu",
                     store->segments[segment].number, (unsigned long long)offset);
            break;
        }
    return false;
}

void kv_store__segment_close(kv_store *store, uint32_t at, bool remove)
{
    kv_segment *seg = &store->segments[at];
    char name[32];
    name_of(name, seg->number);
    if (remove) {
        unlinkat(store->dir_fd, name, 0);
        store->bytes -= seg->end - seg->punched;
    }
    close(seg->fd);
    if (seg->fd_direct >= 0)
        close(seg->fd_direct);
    seg->fd = seg->fd_direct = -1;
    store->segment_count--;
    if (store->active == at)
        store->active = KV_SEGMENT_NONE;
}

static int by_offset(const void *a, const void *b)
{
    const kv_rec *x = *(kv_rec *const *)a, *y = *(kv_rec *const *)b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* Frees [from, to) of a segment, between two records. */
static void sweep_gap(kv_store *store, uint32_t at, uint64_t from, uint64_t to)
{
    if (from >= to)
        return;
    if (kv_store__punch(store, at, from, to - from)) {
        store->segments[at].punched += to - from;
        store->bytes -= to - from;
    }
}

void kv_store__files_sweep(kv_store *store)
{
    uint32_t newest = KV_SEGMENT_NONE;
    for (uint32_t at = 0; at < KV_SEGMENTS_MAX; at++) {
        kv_segment *seg = &store->segments[at];
        uint32_t count = 0;
        if (seg->fd < 0)
            continue;
        for (uint32_t r = seg->first; r != KV_REC_NONE; r = store->recs[r].seg_next)
            count++;
        kv_rec **list = count == 0 ? NULL : malloc(count * sizeof *list);
        if (count == 0) {
            store->stats.swept_bytes += seg->end;
            kv_store__segment_close(store, at, true);
            continue;
        }
        if (list == NULL)
            continue; /* swept at the next start */
        count = 0;
        for (uint32_t r = seg->first; r != KV_REC_NONE; r = store->recs[r].seg_next)
            list[count++] = &store->recs[r];
        qsort(list, count, sizeof *list, by_offset);
        uint64_t end = KV_BLOCK;
        for (uint32_t i = 0; i < count; i++) {
            sweep_gap(store, at, end, list[i]->offset);
            end = base_max(end, list[i]->offset + list[i]->length);
        }
        free(list);
        if (seg->end > end) {
            store->stats.swept_bytes += seg->end - end;
            store->bytes -= seg->end - end;
            if (ftruncate(seg->fd, (off_t)end) != 0)
                base_log(BASE_LOG_WARN, "kv_truncate_failed segment=%u", seg->number);
            seg->end = end;
        }
        if (newest == KV_SEGMENT_NONE || seg->number > store->segments[newest].number)
            newest = at;
    }
    if (newest != KV_SEGMENT_NONE && store->segments[newest].end < store->options.segment_bytes) {
        store->active = newest;
        store->segments[newest].sealed = false;
    }
}

uint32_t kv_store__segment_for(kv_store *store, uint64_t bytes, int *error)
{
    uint32_t at = store->active;
    if (at != KV_SEGMENT_NONE && store->segments[at].end + bytes <= store->options.segment_bytes)
        return at;
    if (at != KV_SEGMENT_NONE && store->segments[at].end == KV_BLOCK)
        return at; /* empty: one record may be larger than a segment */
    char name[32];
    uint8_t head[KV_BLOCK];
    uint32_t number = store->segment_next;
    name_of(name, number);
    kv_segment__head(head, number);
    uint32_t entry = free_entry(store);
    if (entry == KV_SEGMENT_NONE) {
        *error = EMFILE;
        return KV_SEGMENT_NONE;
    }
    int fd = openat(store->dir_fd, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) {
        *error = errno;
        if (errno == EEXIST)
            store->segment_next++;
        return KV_SEGMENT_NONE;
    }
    *error = kv_store__write_at(store, fd, head, KV_BLOCK, 0);
    if (*error == 0 && fsync(store->dir_fd) != 0)
        *error = errno;
    if (*error != 0) {
        close(fd);
        unlinkat(store->dir_fd, name, 0);
        return KV_SEGMENT_NONE;
    }
    pthread_mutex_lock(&store->lock);
    if (at != KV_SEGMENT_NONE)
        store->segments[at].sealed = true;
    adopt(store, entry, number, fd, KV_BLOCK, false);
    store->active = entry;
    pthread_mutex_unlock(&store->lock);
    return entry;
}
