#include "engine/base/scrub.h"

#include <pthread.h>
#include <sqlite3.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NAME "whimbrel-scrub"
#define PAGE_BYTES_MAX 65536
/* The first byte of an overflow or trunk page is the highest of a page number. Below so many pages
 * it is less than 2, the least first byte of a b-tree page. */
#define PAGES_MAX 0x02000000
/* Of a frame of the log: page number, then the pages of the database if the frame ends a
 * transaction, else 0. The page follows. */
#define FRAME_HEAD_BYTES 24
#define FRAMES_BYTES (64 * (FRAME_HEAD_BYTES + 4096)) /* a turn's transaction takes about 30 */
#define WRITE_BYTES_MAX (128 * 1024 - 1) /* SQLite's own file system takes no more in one call */
#define WRITE_LOCK 0 /* of the locks in shared memory; whoever holds it may append to the log */

/* Stands behind what the file system below keeps of an open file. */
typedef struct more {
    sqlite3_io_methods methods;     /* of this file: those below, but for some */
    const sqlite3_io_methods *real; /* those below */
    struct more *other;             /* a database's log, a log's database; NULL: none is open */
    /* Of a log. */
    uint8_t *frames;   /* [FRAMES_BYTES], NULL: not needed so far, or no memory */
    size_t held;       /* bytes in `frames`: written as far as SQLite knows */
    sqlite3_int64 at;  /* where they go */
    sqlite3_int64 end; /* of the last write; -1: something else came since */
    bool head, last;   /* it was a frame's head; the last head ends a transaction */
} more;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static sqlite3_vfs *under, scrubbing;
static size_t more_at; /* in an open file */
static bool registered;

static more *more_of(sqlite3_file *file)
{
    return (more *)((char *)file + more_at);
}

static uint32_t get2(const uint8_t *at)
{
    return (uint32_t)at[0] << 8 | at[1];
}

/* ---- databases ---- */

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
    const sqlite3_io_methods *real = more_of(file)->real;
    uint8_t page[PAGE_BYTES_MAX];
    uint32_t size = (uint32_t)length, from, to;
    sqlite3_int64 file_bytes;
    bool whole = length >= 512 && length <= PAGE_BYTES_MAX && (size & (size - 1)) == 0 &&
                 offset % length == 0;
    if (!whole || real->xFileSize(file, &file_bytes) != SQLITE_OK ||
        file_bytes / length >= PAGES_MAX || offset / length >= PAGES_MAX ||
        !find_gap(bytes, size, offset ? 0 : 100, &from, &to))
        return real->xWrite(file, bytes, length, offset);
    memcpy(page, bytes, size);
    memset(page + from, 0, to - from);
    return real->xWrite(file, page, length, offset);
}

/* Frames that are still held when the right to append is given back are of no transaction, and
 * their place is the next one's. */
static int lock_shared(sqlite3_file *file, int from, int count, int flags)
{
    more *m = more_of(file), *log = m->other;
    bool ends = (flags & SQLITE_SHM_UNLOCK) && (flags & SQLITE_SHM_EXCLUSIVE) && from <= WRITE_LOCK;
    if (ends && log && log->held) {
        log->held = 0;
        log->end = -1;
    }
    return m->real->xShmLock(file, from, count, flags);
}

/* ---- logs ---- */

static int write_held(sqlite3_file *file)
{
    more *m = more_of(file);
    size_t held = m->held;
    int code = SQLITE_OK;
    m->held = 0;
    for (size_t done = 0; done < held && code == SQLITE_OK; done += WRITE_BYTES_MAX) {
        size_t length = held - done < WRITE_BYTES_MAX ? held - done : WRITE_BYTES_MAX;
        code = m->real->xWrite(file, m->frames + done, (int)length, m->at + (sqlite3_int64)done);
    }
    return code;
}

/* Only a whole frame, head and page one behind the other, is held; the transaction's last page
 * writes all. Whoever rewrites heads reads in between (see read_log), so none of these is held. */
static int write_log(sqlite3_file *file, const void *bytes, int length, sqlite3_int64 offset)
{
    more *m = more_of(file);
    bool head = length == FRAME_HEAD_BYTES, goes_on = offset == m->end && head != m->head;
    int code = SQLITE_OK;
    if (goes_on && !m->frames)
        m->frames = malloc(FRAMES_BYTES);
    goes_on = goes_on && m->frames && length <= FRAMES_BYTES;
    if (!goes_on || m->held + (size_t)length > FRAMES_BYTES)
        code = write_held(file);
    if (code == SQLITE_OK && goes_on) {
        if (!m->held)
            m->at = offset;
        memcpy(m->frames + m->held, bytes, (size_t)length);
        m->held += (size_t)length;
    } else if (code == SQLITE_OK) {
        code = m->real->xWrite(file, bytes, length, offset);
    }
    m->end = offset + length;
    m->head = head;
    if (head)
        m->last = memcmp((const char *)bytes + 4, "\0\0\0\0", 4) != 0;
    else if (code == SQLITE_OK && m->last)
        code = write_held(file);
    return code;
}

static int read_log(sqlite3_file *file, void *bytes, int length, sqlite3_int64 offset)
{
    int code = write_held(file);
    more_of(file)->end = -1;
    return code != SQLITE_OK ? code : more_of(file)->real->xRead(file, bytes, length, offset);
}

static int truncate_log(sqlite3_file *file, sqlite3_int64 size)
{
    int code = write_held(file);
    more_of(file)->end = -1;
    return code != SQLITE_OK ? code : more_of(file)->real->xTruncate(file, size);
}

static int sync_log(sqlite3_file *file, int flags)
{
    int code = write_held(file);
    return code != SQLITE_OK ? code : more_of(file)->real->xSync(file, flags);
}

static int size_log(sqlite3_file *file, sqlite3_int64 *size)
{
    int code = write_held(file);
    return code != SQLITE_OK ? code : more_of(file)->real->xFileSize(file, size);
}

static int close_log(sqlite3_file *file)
{
    more *m = more_of(file);
    m->other->other = NULL;
    free(m->frames);
    return m->real->xClose(file);
}

/* ---- all ---- */

static int open_file(sqlite3_vfs *vfs, const char *name, sqlite3_file *file, int flags, int *out)
{
    (void)vfs;
    int code = under->xOpen(under, name, file, flags, out);
    bool log = (flags & SQLITE_OPEN_WAL) != 0;
    if (code != SQLITE_OK || !(flags & (SQLITE_OPEN_MAIN_DB | SQLITE_OPEN_WAL)) || !file->pMethods)
        return code;
    more *m = more_of(file);
    *m = (more){.methods = *file->pMethods, .real = file->pMethods, .end = -1};
    if (log) {
        m->other = more_of(sqlite3_database_file_object(name));
        m->other->other = m;
        m->methods.xWrite = write_log;
        m->methods.xRead = read_log;
        m->methods.xTruncate = truncate_log;
        m->methods.xSync = sync_log;
        m->methods.xFileSize = size_log;
        m->methods.xClose = close_log;
    } else {
        m->methods.xWrite = write_page;
        m->methods.xShmLock = lock_shared;
    }
    file->pMethods = &m->methods;
    return code;
}

static void register_vfs(void)
{
    /* Counting SQLite's memory costs a lock for every piece of it. Refused if somebody began to use
     * it before, which is fine. */
    sqlite3_config(SQLITE_CONFIG_MEMSTATUS, 0);
    if (sqlite3_initialize() != SQLITE_OK || !(under = sqlite3_vfs_find(NULL)))
        return;
    more_at = ((size_t)under->szOsFile + 15) / 16 * 16;
    scrubbing = *under;
    scrubbing.szOsFile = (int)(more_at + sizeof(more));
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
