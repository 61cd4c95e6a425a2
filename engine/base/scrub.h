/* base/scrub: SQLite files in which nothing is left of what was deleted.
 *
 * With secure_delete SQLite zeroes a deleted cell and a freed page, but not what it leaves behind
 * when it moves cells between pages: copies of them stay in the gap between a page's cell pointers
 * and its cells, and go to the file with the page. This file system zeroes that gap in every b-tree
 * page that is written to a database. Frames of the log carry checksums and pass as they are, so
 * the files are clean once a checkpoint has copied the log and cut it (SQLITE_CHECKPOINT_TRUNCATE).
 *
 * Not for databases with auto_vacuum, whose pointer pages have other forms. The one part of base
 * that needs more than libc: it is a library of its own, for those who speak SQL. Thread: any. */
#pragma once

/* The name to give to sqlite3_open_v2; NULL, the default file system, if SQLite has no memory for
 * another. */
const char *base_scrub_vfs(void);
