/* The disk tier's parts, for store*.c and their tests: record format (store_format.c), tree of
 * records (store_tree.c), rows (store_db.c), segment files (store_file.c), writing (store_write.c),
 * reading back (store_read.c); store.c has the engine's calls.
 *
 * A record of kind k is the layout's planes cut into groups at layer borders (at least
 * KV_GROUP_BYTES for whole pages), each group 4,096-aligned in its segment, so that a layer can be
 * read alone and past the system's page cache:
 *
 *   group:  0 "WKVP"  4 u16 version  6 u8 kind  7 u8 rows  8 u64 record id  16 u64 chain  24 u32
 * group  28 u32 first plane 32 u32 plane count  36 u32 group bytes  40 u64 0  48 u64 0  56 u64 sum
 * of bytes [0, 56) and of all plane sums 64 u64 sum of each plane, then the planes' first `rows`
 * rows one after the other, then zeros
 *
 * Little-endian; sums are XXH3-64. `chain` binds a record to its world, namespace and all tokens
 * before it: root  = XXH3(length and bytes of fingerprint, layout id, numerics; space) page  =
 * XXH3(chain of the page before, kind, rows, tokens);  side record = XXH3(root of its world, chain
 * of its page, kind, rows) A segment begins with a block of 4,096: "WKVSEG01", u64 number, u64 sum
 * of these 16 bytes, zeros.
 *
 *   FREE -> QUEUED -> WRITING -> STORED -> DEAD (its row is to go) -> GRAVE (its bytes are to go)
 * -> FREE QUEUED, WRITING -> LOST (dropped meanwhile; the writer frees it, or makes it DEAD if its
 * row was committed) */
#pragma once
#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>

#include "cache/store.h"

#define KV_REC_NONE UINT32_MAX
#define KV_SEGMENT_NONE UINT32_MAX
#define KV_BLOCK 4096u
#define KV_GROUP_BYTES (256u << 10)
#define KV_GROUP_HEAD 64u
#define KV_SEGMENTS_MAX 4096u
#define KV_BATCH_RECORDS 64u
#define KV_BATCH_BYTES (8u << 20)
#define KV_READ_BYTES (1u << 20) /* neighbours of one group are read together up to this */
#define KV_SCHEMA 1

typedef enum kv_rec_state {
    KV_REC_FREE,
    KV_REC_ROOT,
    KV_REC_QUEUED,
    KV_REC_WRITING,
    KV_REC_STORED,
    KV_REC_DEAD,
    KV_REC_GRAVE,
    KV_REC_LOST,
} kv_rec_state;

typedef struct kv_rec {
    uint64_t id, chain, space;
    uint64_t offset; /* in its segment */
    int64_t used_ms;
    uint32_t length;  /* on disk */
    uint32_t segment; /* place in store->segments; KV_SEGMENT_NONE: no bytes */
    uint32_t parent;  /* the record of the page before, the root, or a side record's page */
    uint32_t child, next, prev;
    uint32_t by_first, by_page; /* next in their bucket */
    uint32_t side;              /* the side record */
    uint32_t older, newer;      /* by use; `older` also links lists of the dead */
    uint32_t seg_next, seg_prev;
    uint32_t holds; /* restores that may read it */
    uint8_t state, kind, rows;
    bool foreign; /* of another world: no tree, no tokens */
    bool dirty;   /* used_ms has not been written down */
    bool listed;  /* in the order of use */
} kv_rec;

typedef struct kv_group {
    uint32_t first_plane, plane_count;
} kv_group;

/* One kind of record: its planes' groups. */
typedef struct kv_form {
    const kv_layout *layout; /* NULL: none of this kind */
    kv_group *groups;
    uint32_t group_count;
    uint32_t group_bytes_max; /* of a whole page */
    uint64_t root;            /* chain over the world alone */
    int64_t world;            /* row of the table of worlds */
} kv_form;

typedef struct kv_segment {
    uint32_t number;
    int fd;        /* buffered; -1: the entry is free */
    int fd_direct; /* -1: the file system has none */
    uint64_t end, punched, live;
    uint32_t users; /* readers inside */
    uint32_t first; /* records in it */
    bool sealed;    /* nothing is appended any more */
} kv_segment;

typedef struct kv_job {
    uint32_t rec, page;
} kv_job;

struct kv_restore {
    kv_store *store;
    kv_restore *next;
    uint32_t first_page, page_count, tokens, draft_from;
    uint64_t bytes, read_bytes;
    uint32_t *recs, *pages; /* [slots_max] */
    uint8_t *draft;         /* side record: 0 none, 1 to be read, 2 in place */
    uint32_t *left;         /* by group: pages that have not been dealt with */
    bool started, cancelled;
    bool drafting; /* handing out side records */
    uint32_t group, at;
    uint32_t reading; /* items in the readers' hands */
    uint64_t begin_ns;
    _Atomic uint32_t planes, good;
    _Atomic bool done;
};

struct kv_store {
    kv_store_options options;
    kv_pool *pool;
    kv_form forms[2]; /* by kv_store_kind */
    char *dir;
    int dir_fd;

    /* writer's (open's before it runs) */
    sqlite3 *db;
    sqlite3_stmt *begin, *commit, *rollback, *insert, *remove, *move, *touch, *set;
    uint8_t *batch; /* KV_BLOCK-aligned, batch_bytes */
    size_t batch_bytes;
    kv_job jobs_now[KV_BATCH_RECORDS]; /* with what is written of them: */
    kv_rec recs_now[KV_BATCH_RECORDS];
    uint64_t parents_now[KV_BATCH_RECORDS]; /* ids */
    int32_t tokens_now[KV_BATCH_RECORDS][KV_PAGE_TOKENS];
    int64_t last_touch_ms;
    uint64_t next_write_ns, resume_ns;
    bool no_punch; /* the file system has no holes */
    bool log_used; /* there were commits since the last checkpoint */

    pthread_mutex_t lock;
    /* guarded by lock: */
    pthread_cond_t work, reads, idle;
    kv_rec *recs;                 /* [records_max] */
    int32_t *tokens;              /* [records_max][KV_PAGE_TOKENS] */
    uint32_t rec_free, rec_used;  /* list of those given back; how many were ever taken */
    uint32_t *by_first, *by_page; /* buckets; roots are in by_page */
    uint32_t bucket_mask;
    uint32_t newest, oldest;
    uint32_t dead, grave; /* lists */
    uint32_t graves_held; /* wait for a restore to end */
    uint64_t next_id;
    kv_segment segments[KV_SEGMENTS_MAX];
    uint32_t segment_count, segment_next; /* entries in use; next number */
    uint32_t active;                      /* segment that is appended to */
    kv_job *jobs;                         /* ring of queue_max */
    uint32_t job_first, job_count;
    uint32_t *released; /* pages to unref, [held_max] */
    uint32_t released_count, held_max;
    uint64_t bytes; /* on disk */
    int64_t day;
    uint64_t day_bytes;
    kv_restore *restores, *restores_free;
    kv_restore *reading_first, *reading_last;
    double rate_bytes, rate_s;
    uint64_t rate_ns; /* when it was last measured */
    bool stop, abandon;
    bool paused, broken;              /* after an error; for good */
    bool full;                        /* the last write found no room on the disk */
    bool scrub;                       /* erased rows may still stand in the log */
    bool busy;                        /* the writer is at work */
    uint32_t taken;                   /* jobs that it is at */
    uint32_t failures, failures_told; /* of the writer, ever; when a flush last told */
    kv_store_stats stats;

    pthread_t writer, *readers;
    uint32_t reader_count;
    bool writer_runs;
};

/* ---- store_format.c ---- */
base_code kv_form__init(kv_form *form, const kv_layout *layout, const char *fingerprint,
                        const char *numerics, uint32_t group_bytes, base_err *err);
void kv_form__deinit(kv_form *form);
uint64_t kv_form__root(const char *fingerprint, const char *layout, const char *numerics);
/* Bytes on disk of one group, and of all before group `group` (group_count: of the record). */
uint32_t kv_form__group_bytes(const kv_form *form, uint32_t group, uint32_t rows);
uint64_t kv_form__group_offset(const kv_form *form, uint32_t group, uint32_t rows);
uint64_t kv_form__root_chain(const kv_form *form, uint64_t space);
uint64_t kv_form__page_chain(uint64_t before, uint32_t rows, const int32_t *tokens);
uint64_t kv_form__side_chain(const kv_form *form, uint64_t page, uint32_t rows);
typedef struct kv_group_key {
    uint64_t id, chain;
    uint8_t kind, rows;
    uint32_t group;
} kv_group_key;
/* Where plane i of the group begins in it. */
uint32_t kv_form__plane_offset(const kv_form *form, uint32_t group, uint32_t plane, uint32_t rows);
/* Head and sums of a group whose planes lie in place; the rest is zeroed. */
void kv_form__seal(const kv_form *form, const kv_group_key *key, uint8_t *bytes);
/* Over a group's head without its own sum, and over the planes' sums. */
uint64_t kv_group__head_sum(const uint8_t *head, const uint8_t *sums, uint32_t plane_count);
/* NULL if all is as sealed, else what is wrong. */
const char *kv_form__verify(const kv_form *form, const kv_group_key *key, const uint8_t *bytes);
void kv_segment__head(uint8_t bytes[KV_BLOCK], uint32_t number);
bool kv_segment__head_fits(const uint8_t bytes[KV_BLOCK], uint32_t number);

/* ---- store_tree.c: under lock ---- */
uint32_t kv_store__rec_take(kv_store *store); /* KV_REC_NONE: all in use */
void kv_store__rec_give(kv_store *store, uint32_t at);
uint32_t kv_store__root(kv_store *store, uint64_t space, bool make);
void kv_store__root_tidy(kv_store *store, uint32_t at); /* frees a root that nothing hangs on */
/* Puts a record whose kind, parent, rows and tokens are set where it belongs. */
void kv_store__link(kv_store *store, uint32_t at);
/* A whole page with these tokens. */
uint32_t kv_store__find_page(const kv_store *store, uint32_t parent, const int32_t *tokens);
/* The child that begins with most of tokens[0..count), at least *best + 1; *best is raised. `any`:
 * those not yet stored, too. */
uint32_t kv_store__find_tail(const kv_store *store, uint32_t parent, const int32_t *tokens,
                             uint32_t count, bool any, uint32_t *best);
void kv_store__list(kv_store *store, uint32_t at); /* into the order of use, behind its parent */
void kv_store__touch_path(kv_store *store, uint32_t at,
                          int64_t now_ms); /* a page and all before it */
/* Takes a record and all that hangs on it out; returns how many. Their rows and bytes go later. */
uint32_t kv_store__drop(kv_store *store, uint32_t at);
/* Drops what was used longest ago until `bytes` more fit and `records` have gone. Returns records
 * dropped. */
uint32_t kv_store__make_room(kv_store *store, uint64_t bytes, uint32_t records);
void kv_store__place(kv_store *store, uint32_t at, uint32_t segment,
                     uint64_t offset); /* notes where its bytes lie */
void kv_store__unplace(kv_store *store, uint32_t at);

/* ---- store_db.c: the writer, or open ---- */
typedef struct kv_row_key {
    uint64_t id, world, space, parent, kind, filled, chain, segment, offset, length;
} kv_row_key;
/* What its column `sum` must be; `tokens` NULL for a side record. Pure. */
int64_t kv_row__sum(const kv_row_key *row, const int32_t *tokens);
base_code kv_store__db_open(kv_store *store, base_err *err);
base_code kv_store__db_load(kv_store *store,
                            base_err *err); /* rows into the tree; BASE_FORMAT: corrupt */
base_code kv_store__db_reset(kv_store *store, base_err *err); /* moves a corrupt file aside */
void kv_store__db_close(kv_store *store);
base_code kv_store__db_begin(kv_store *store);
base_code kv_store__db_commit(kv_store *store);
void kv_store__db_rollback(kv_store *store);
base_code kv_store__db_insert(kv_store *store, const kv_rec *rec, const int32_t *tokens,
                              uint64_t parent_id, uint32_t segment_number);
base_code kv_store__db_remove(kv_store *store, uint64_t id);
base_code kv_store__db_move(kv_store *store, const kv_rec *rec, const int32_t *tokens,
                            uint64_t parent_id, uint32_t segment_number);
base_code kv_store__db_touch(kv_store *store, uint64_t id, int64_t used_ms);
base_code kv_store__db_set(kv_store *store, const char *key, int64_t value);
base_code kv_store__db_checkpoint(kv_store *store, bool erased);

/* ---- store_file.c: the writer, or open ---- */
base_code kv_store__files_open(kv_store *store, base_err *err); /* the segments in the folder */
void kv_store__files_sweep(kv_store *store); /* after the rows: bytes that no row names */
uint32_t kv_store__segment_by_number(const kv_store *store, uint32_t number);
/* A segment with room for more bytes; KV_SEGMENT_NONE and an errno if none can be made. */
uint32_t kv_store__segment_for(kv_store *store, uint64_t bytes, int *error);
void kv_store__segment_close(kv_store *store, uint32_t at, bool remove);
int kv_store__write_at(kv_store *store, int fd, const uint8_t *bytes, size_t length,
                       uint64_t offset); /* 0 or an errno */
int kv_store__read_at(kv_store *store, int fd, uint8_t *bytes, size_t length, uint64_t offset);
bool kv_store__punch(kv_store *store, uint32_t segment, uint64_t offset,
                     uint64_t length); /* true: the blocks are free */

/* ---- store_write.c ---- */
void *kv_store__writer(void *arg); /* thread */
/* Under lock: gives back what waits; each is counted in `refused`. */
void kv_store__refuse_jobs(kv_store *store, uint64_t *refused);
/* Under lock: whether anything queued, dropped or erased is yet to reach the disk. */
bool kv_store__has_work(const kv_store *store);

/* ---- store_read.c ---- */
base_code kv_store__reads_init(kv_store *store, base_err *err);
void kv_store__reads_deinit(kv_store *store);
void *kv_store__reader(void *arg);

/* ---- store.c ---- */
int64_t kv_store__now_ms(const kv_store *store);
