#include "engine/base/thread.h"

#include <pthread.h>

#include "engine/base/crash.h"

static _Thread_local base_thread_role current;

void base_thread_enter(base_thread_role role, const char *name)
{
    current = role;
    pthread_setname_np(pthread_self(), name);
    base_crash_cover_thread();
}

bool base_thread_is(base_thread_role role)
{
    return current == role || current == BASE_THREAD_OTHER;
}
