#include "engine/base/scrub.h"

#include <pthread.h>
#include <sqlite3.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define NAME "whimbrel-scrub"
#define PAGE_BYTES_MAX 65536
/* The first byte of an overflow or trunk page is the highest of a page number. Below so many pages
 * it is less than 2, the least first byte of a b-tree page. */
#define PAGES_MAX 0x02000000

static pthread_once_t once = PTHREAD_ONCE_INIT;
static sqlite3_vfs *under, scrubbing;
static sqlite3_io_methods methods;             /* those of database files, but for xWrite */
static const sqlite3_io_methods *real_methods; /* of the file system below; set by the first open */
static pthread_mutex_t open_mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the two above */
static bool registered;

static uint32_t get2(const uint8_t *at)
{
    return (uint32_t)at[0] << 8 | at[1];
}

/* Where the gap of a b-tree page begins and ends; false if it is another page, or none of it fits
 * the format. */
static bool find_gap(const uint8_t *page, uint32_t size, uint32_t head, uint32_t *from,
                     uint32_t *to)
{
    uint8_t kind = page[head];
    if (kind != 2 && kind != 5 && kind != 10 && kind != 13)
        return false;
    uint32_t cells = get2(page + head + 3), content = get2(page + head + 5);
    uint32_t pointers = head + (kind < 10 ? 12 : 8);
    content = content ? content : 65536;
    if (content > size || cells > size / 2 || pointers + 2 * cells > content)
        return false;
    for (uint32_t i = 0; i < cells; i++)
        if (get2(page + pointers + 2 * i) < content)
            return false;
    *from = pointers + 2 * cells;
    *to = content;
    return true;
}

static int write_page(sqlite3_file *file, const void *bytes, int length, sqlite3_int64 offset)
{
    uint8_t page[PAGE_BYTES_MAX];
    uint32_t size = (uint32_t)length, from, to;
    sqlite3_int64 file_bytes;
    bool whole = length >= 512 && length <= PAGE_BYTES_MAX && (size & (size - 1)) == 0 &&
                 offset % length == 0;
    if (!whole || real_methods->xFileSize(file, &file_bytes) != SQLITE_OK ||
        file_bytes / length >= PAGES_MAX || offset / length >= PAGES_MAX ||
        !find_gap(bytes, size, offset ? 0 : 100, &from, &to))
        return real_methods->xWrite(file, bytes, length, offset);
    memcpy(page, bytes, size);
    memset(page + from, 0, to - from);
    return real_methods->xWrite(file, page, length, offset);
}

static int open_file(sqlite3_vfs *vfs, const char *name, sqlite3_file *file, int flags, int *out)
{
    (void)vfs;
    int code = under->xOpen(under, name, file, flags, out);
    if (code != SQLITE_OK || !(flags & SQLITE_OPEN_MAIN_DB) || !file->pMethods)
        return code;
    pthread_mutex_lock(&open_mutex);
    if (!real_methods) {
        real_methods = file->pMethods;
        methods = *real_methods;
        methods.xWrite = write_page;
    }
    /* Another set of methods (another way of locking): such a file is left as it is. */
    if (file->pMethods == real_methods)
        file->pMethods = &methods;
    pthread_mutex_unlock(&open_mutex);
    return code;
}

static void register_vfs(void)
{
    /* Counting SQLite's memory costs a lock for every piece of it. Refused if somebody began to use
     * it before, which is fine. */
    sqlite3_config(SQLITE_CONFIG_MEMSTATUS, 0);
    if (sqlite3_initialize() != SQLITE_OK || !(under = sqlite3_vfs_find(NULL)))
        return;
    scrubbing = *under;
    scrubbing.pNext = NULL;
    scrubbing.zName = NAME;
    scrubbing.xOpen = open_file;
    registered = sqlite3_vfs_register(&scrubbing, 0) == SQLITE_OK;
}

const char *base_scrub_vfs(void)
{
    pthread_once(&once, register_vfs);
    return registered ? NAME : NULL;
}
