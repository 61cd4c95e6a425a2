/* What the fuzz targets share: a file of memory to give to readers of files, and checks that end
 * the process. */
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* A path that reads as these bytes, until the next call with the same `*fd`, which begins as -1. */
static inline const char *fuzz_file(int *fd, const void *data, size_t size)
{
    static char path[64];
    if (*fd < 0)
        *fd = memfd_create("fuzz", MFD_CLOEXEC);
    MUST(*fd >= 0 && ftruncate(*fd, 0) == 0 && pwrite(*fd, data, size, 0) == (ssize_t)size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", *fd);
    return path;
}

/* A copy that ends where its memory ends, so that a byte past it is seen. */
static inline char *fuzz_copy(const void *data, size_t size)
{
    char *copy = malloc(size > 0 ? size : 1);
    MUST(copy != NULL);
    memcpy(copy, data, size);
    return copy;
}
