/* kv_store: the disk tier. Pages that leave memory, or the process, come back from here.
 *
 * A record is one page's rows, plane by plane, each plane with its own checksum, in append-only
 * segment files; a row of kv/index.db says where it lies and which tokens it holds. Bytes are
 * synced before their row is committed. The rows of the running world (weights fingerprint,
 * kv_layout, numerics) are a tree of pages in memory, compared token by token; those of another
 * world are never matched and go first when room is needed. The prefix tree (cache/index.h) knows
 * memory only, the store knows disk only, and a page may be in either or both: a match asks the
 * index first and the store for what follows. A restored page enters the index as a computed one
 * does, by insert. Threads: the engine's calls take one short lock and never wait for a disk; a
 * writer thread owns index.db and the segments' ends; reader threads fill pages. Everything is
 * allocated by open. Deleting the folder costs speed only. */
#pragma once
#include <sys/types.h>

#include "cache/page.h"

typedef struct kv_store kv_store;

typedef enum kv_store_kind {
    KV_STORE_TARGET, /* the model's planes */
    KV_STORE_DRAFT,  /* the drafter's planes of the same positions: a side record */
} kv_store_kind;

/* Lent by the engine. A page number is all that is known of a page; rows [0, rows) of one plane lie
 * packed in `bytes`. Called on the store's threads: copy_out reads rows below `filled` of a page on
 * which the store holds a reference, copy_in fills a page that the engine has set aside for a
 * restore. False: the device failed. */
typedef struct kv_store_device {
    void *ctx;
    bool (*copy_out)(void *ctx, kv_store_kind kind, uint32_t page, uint32_t plane, uint32_t rows,
                     void *bytes);
    bool (*copy_in)(void *ctx, kv_store_kind kind, uint32_t page, uint32_t plane, uint32_t rows,
                    const void *bytes);
    void (*wake)(void *ctx); /* something is there to poll; NULL is fine. Any thread of the store,
                                no lock held */
} kv_store_device;

/* The system's calls, so that tests can let the Nth one fail. NULL members: the system's own. */
typedef struct kv_store_io {
    ssize_t (*pwrite)(int fd, const void *bytes, size_t length, off_t offset);
    ssize_t (*pread)(int fd, void *bytes, size_t length, off_t offset);
    int (*fdatasync)(int fd);
    int64_t (*wall_ms)(void);
} kv_store_io;

typedef struct kv_store_options {
    const char *dir;               /* the kv/ folder; made if absent (its parent is there) */
    const char *fingerprint;       /* of the weights, adapter included */
    const char *numerics;          /* backend and reduction version */
    const kv_layout *layout;       /* borrowed, with its planes */
    const char *draft_fingerprint; /* NULL with draft */
    const kv_layout *draft;        /* NULL: no side records */
    kv_store_device device;
    kv_store_io io;
    uint64_t bytes_max; /* on disk; the least recently used records go */
    uint64_t
        segment_bytes; /* a segment is closed past this; 0: 256 MiB, more for large bytes_max */
    uint64_t write_bytes_s;   /* budget a second; 0: none */
    uint64_t write_bytes_day; /* budget a (UTC) day, kept over restarts; 0: none */
    uint32_t records_max;     /* in memory at 0.7 KB each; 0: from bytes_max, at most 2^20 */
    uint32_t queue_max;       /* pages waiting to be written; 0: 256 */
    uint32_t restores_max;    /* at once; 0: 32 */
    uint32_t slots_max;       /* pages of the longest sequence */
    uint32_t readers;         /* threads; 0: 4 */
    uint32_t retry_ms;        /* pause after a failed write; 0: 30,000 */
    uint32_t group_bytes; /* least that is read at a time; 0: 256 KiB. Tests: part of the format */
    uint64_t other_ttl_s; /* records of another world go after this long; 0: 14 days */
    double read_bytes_s;  /* what a read is thought to bring before any was measured; 0: 1e9 */
    bool direct;          /* reads pass the system's page cache by, where the file system can */
} kv_store_options;

/* Rows that do not fit, torn tails and bytes without a row are dropped here. A corrupt index.db is
 * moved to index.db.corrupt and begun anew. Fails, naming the file: BASE_CONFLICT locked by another
 * process, BASE_UNSUPPORTED a newer schema, BASE_IO read-only or refused, BASE_NOMEM. */
base_code kv_store_open(kv_store **out, kv_pool *pool, const kv_store_options *options,
                        base_err *err);
/* Writes what is queued unless `abandon`, ends the threads and gives every page back. No restore
 * may be left. NULL is fine. */
void kv_store_close(kv_store *store, bool abandon);

/* ---- writing: engine thread ---- */

/* Offers tokens[0..count) of a namespace with their pages (rows below `filled`). Pages that are not
 * on disk yet are queued, each with a reference that the store takes; from page `draft_from` on
 * with their side record (UINT32_MAX: none; a page that came back without one has none to give).
 * What finds no room in the queue, in the records or in the day's budget is refused and counted.
 * Returns records queued. `space` is the persistent salt of the namespace. */
uint32_t kv_store_write(kv_store *store, uint64_t space, const int32_t *tokens, uint32_t count,
                        const uint32_t *pages, uint32_t draft_from);
/* Gives back the references on pages that have been copied out. Call it once a step, and after a
 * wake. */
void kv_store_poll(kv_store *store);
/* Gives up what is queued, for its pages; what is being copied out comes back soon. */
void kv_store_shed(kv_store *store);

/* ---- reading: engine thread ---- */

typedef struct kv_restore kv_restore; /* a run of pages on their way back */

/* The length of tokens[0..count) that is on disk. Any thread. */
uint32_t kv_store_peek(kv_store *store, uint64_t space, const int32_t *tokens, uint32_t count);
/* Looks for more than the first `from` tokens, which memory has. NULL if there is nothing more or
 * restores_max are under way. Holds the records until kv_restore_end. The run begins with the page
 * that holds position `from`, whole. */
kv_restore *kv_store_find(kv_store *store, uint64_t space, const int32_t *tokens, uint32_t count,
                          uint32_t from);
uint32_t
kv_restore_tokens(const kv_restore *restore); /* from the sequence's start to the run's end */
uint32_t
kv_restore_first_page(const kv_restore *restore); /* in the sequence: from / KV_PAGE_TOKENS */
uint32_t kv_restore_page_count(const kv_restore *restore);
uint64_t kv_restore_bytes(const kv_restore *restore); /* that will be read */
/* Whether reading beats recomputing: pure. `gain_tokens` would be recomputed at `token_s` seconds
 * each. */
bool kv_restore_pays(uint64_t bytes, double bytes_s, double latency_s, uint32_t gain_tokens,
                     double token_s);
/* What reads bring now: measured over finished restores; an old figure drifts back to
 * options.read_bytes_s. */
double kv_store_read_rate(kv_store *store);
/* Begins to fill pages[0..page_count), which the caller has allocated and nobody else sees. Layers
 * arrive in record order over the whole run; side records from page `draft_from` of the run come
 * last (UINT32_MAX: none). */
void kv_restore_start(kv_restore *restore, const uint32_t *pages, uint32_t draft_from);
/* How many planes, counted in record order, are in place on every page of the run: a forward pass
 * over later positions may use those layers. May fall to a shorter run: see kv_restore_good. */
uint32_t kv_restore_planes(const kv_restore *restore);
/* Pages from the run's start that are, or still may become, whole: a damaged or unread one ends the
 * run before it. */
uint32_t kv_restore_good(const kv_restore *restore);
bool kv_restore_done(const kv_restore *restore); /* nothing is read any more; good is final */
/* Whether page i of the run has its side record in place; once done. */
bool kv_restore_has_draft(const kv_restore *restore, uint32_t i);
void kv_restore_cancel(kv_restore *restore); /* reads no further; done follows soon */
/* Frees the restore: before its start, or when done. The pages are the caller's. */
void kv_restore_end(kv_restore *restore);

/* ---- forgetting: any thread; never matched from the call on, gone from the files after
 * kv_store_flush ---- */

void kv_store_erase_space(kv_store *store, uint64_t space);
/* Every record that holds a row at or past `kept` on the path of tokens[0..count), with all that
 * follows it. `kept`: what living sessions share. */
void kv_store_erase(kv_store *store, uint64_t space, const int32_t *tokens, uint32_t count,
                    uint32_t kept);
/* Waits until everything queued is written or refused and everything erased is gone from the files.
 * False if it could not be: the disk fails or is full. Not for the engine thread; poll meanwhile if
 * queue and pool are small. */
bool kv_store_flush(kv_store *store);

typedef struct kv_store_stats {
    uint64_t records, bytes; /* on disk, of this world and others */
    uint64_t queued;         /* records waiting or being written */
    uint64_t held;           /* references on pages of the pool */
    uint64_t written_records, written_bytes, read_records, read_bytes;
    uint64_t refused_queue, refused_budget, refused_stopped, refused_records;
    uint64_t disk_full, write_errors, read_errors, corrupt;
    uint64_t evicted, erased, swept_bytes, swept_records, compacted_segments;
    bool writing; /* false: paused after an error, or the index is damaged */
    bool full;    /* the last thing that was written did not fit on the disk */
} kv_store_stats;
kv_store_stats kv_store_get_stats(kv_store *store);
/* False and a text if an invariant of the records in memory is broken. */
bool kv_store_check(kv_store *store, base_err *err);

/* ---- looking over a folder that nobody has open, for tools ---- */

typedef struct kv_audit {
    uint64_t worlds, records, bytes; /* that are as they were written */
    uint64_t segments;               /* files that were read */
    uint64_t wrong;
} kv_audit;
/* Rows against their sums, their parents and their worlds; records against their heads and the sums
 * of their planes, all of them. `wrong` is called with a line for each fault. Reads every byte,
 * changes nothing. Fails: BASE_CONFLICT in use by another process, BASE_UNSUPPORTED another schema,
 * BASE_IO no such folder or unreadable, BASE_NOMEM. */
base_code kv_store_audit(kv_audit *out, const char *dir, void (*wrong)(void *ctx, const char *text),
                         void *ctx, base_err *err);
