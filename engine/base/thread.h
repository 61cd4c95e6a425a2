/* base/thread: who runs what. A header names its thread and the code checks it:
 * DCHECK(base_thread_is(BASE_THREAD_ENGINE)). */
#pragma once
#include <stdbool.h>

typedef enum base_thread_role {
    BASE_THREAD_OTHER, /* main, tests, tools */
    BASE_THREAD_LOOP,
    BASE_THREAD_ENGINE,
    BASE_THREAD_WORKER,
    BASE_THREAD_WRITER, /* owns the database */
} base_thread_role;

/* Called first thing by a thread; also names it for debuggers (at most 15 characters). */
void base_thread_enter(base_thread_role role, const char *name);
/* True for OTHER too, so that tests may call single-threaded code directly. */
bool base_thread_is(base_thread_role role);
