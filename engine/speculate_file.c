/* What eng_spec has learned, in a file: so that a server drafts right from its first request.
 *
 *   "WHBSPEC1" | digest of the key | eng_spec_learned as it lies in memory | XXH3 of all before
 *
 * The key names device, model and binary, so the layout is the reader's own; anything else is
 * refused whole. Written beside and renamed over, without a sync: after a crash the sum tells. */
#include "engine/speculate.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

static const char MAGIC[8] = "WHBSPEC1";

typedef struct image {
    char magic[8];
    uint8_t key[16];
    eng_spec_learned learned;
    uint64_t sum;
} image;

static void digest(uint8_t out[16], const char *key)
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(key, strlen(key)));
    memcpy(out, canonical.digest, 16);
}

static uint64_t sum_of(const image *file)
{
    return XXH3_64bits(file, offsetof(image, sum));
}

base_code eng_spec_load(eng_spec_learned *learned, const char *path, const char *key, base_err *err)
{
    image file;
    char more;
    uint8_t own[16];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return base_fail(err, errno == ENOENT ? BASE_NOT_FOUND : BASE_IO, "%.120s: %s", path,
                         strerror(errno));
    ssize_t n = read(fd, &file, sizeof file);
    bool longer = n == (ssize_t)sizeof file && read(fd, &more, 1) != 0;
    close(fd);
    if (n < 0)
        return base_fail(err, BASE_IO, "%.120s: cannot be read", path);
    if (n != (ssize_t)sizeof file || longer || memcmp(file.magic, MAGIC, sizeof MAGIC) != 0 ||
        file.sum != sum_of(&file))
        return base_fail(err, BASE_FORMAT, "%.120s: no whole file of measured times", path);
    digest(own, key);
    if (memcmp(file.key, own, sizeof own) != 0)
        return base_fail(err, BASE_CONFLICT, "%.120s: of another device, model or binary", path);
    if (!eng_spec_check(&file.learned))
        return base_fail(err, BASE_FORMAT, "%.120s: holds impossible values", path);
    *learned = file.learned;
    return BASE_OK;
}

base_code eng_spec_save(const eng_spec_learned *learned, const char *path, const char *key,
                        base_err *err)
{
    image file;
    char beside[4096];
    if ((size_t)snprintf(beside, sizeof beside, "%s.new", path) >= sizeof beside)
        return base_fail(err, BASE_INVALID, "%.120s…: the path is too long", path);
    memset(&file, 0, sizeof file); /* gaps between fields are summed, too */
    memcpy(file.magic, MAGIC, sizeof MAGIC);
    digest(file.key, key);
    file.learned = *learned;
    file.sum = sum_of(&file);
    int fd = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return base_fail(err, BASE_IO, "%.120s: %s", beside, strerror(errno));
    errno = 0;
    bool good = write(fd, &file, sizeof file) == (ssize_t)sizeof file;
    good &= close(fd) == 0;
    if (good && rename(beside, path) == 0)
        return BASE_OK;
    base_fail(err, BASE_IO, "%.120s: %s", beside, errno != 0 ? strerror(errno) : "cut short");
    unlink(beside);
    return BASE_IO;
}
