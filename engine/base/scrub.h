/* base/scrub: SQLite files in which nothing is left of what was deleted, and whose log takes one
 * write a transaction.
 *
 * With secure_delete SQLite zeroes a deleted cell and a freed page, but not what it leaves behind
 * when it moves cells between pages: copies of them stay in the gap between a page's cell pointers
 * and its cells, and go to the file with the page. This file system zeroes that gap in every b-tree
 * page that is written to a database. Frames of the log carry checksums and pass as they are, so
 * the files are clean once a checkpoint has copied the log and cut it (SQLITE_CHECKPOINT_TRUNCATE).
 *
 * SQLite writes the log a frame at a time, head and page apart, each with a seek: some 120 calls of
 * the system for a turn's 30 pages. Here the frames of a transaction are gathered and written with
 * the last one, whose head says that it is that, before SQLite hears that the write is done; what
 * fails then fails the commit. Nobody else reads frames of an unfinished transaction, and the
 * connection's own reads write them first.
 *
 * Not for databases with auto_vacuum, whose pointer pages have other forms. The one part of base
 * that needs more than libc: it is a library of its own, for those who speak SQL. Thread: any. */
#pragma once

/* The name to give to sqlite3_open_v2; NULL, the default file system, if SQLite has no memory for
 * another. */
const char *base_scrub_vfs(void);
