/* failing_alloc: the C library's allocations, counted, and the Nth of them refused. The linker puts
 * these in place of its own (`failing_alloc_args` of tests/meson.build); what other libraries
 * allocate themselves is not counted. Included by one source of a program. Thread: any. */
#pragma once
#include <stdbool.h>
#include <stdlib.h>

static _Atomic long left = -1; /* allocations until one fails; negative: none does */
static _Atomic long alive;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_aligned_alloc(size_t align, size_t size);
void *__real_realloc(void *at, size_t size);
char *__real_strdup(const char *text);
void __real_free(void *at);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_aligned_alloc(size_t align, size_t size);
void *__wrap_realloc(void *at, size_t size);
char *__wrap_strdup(const char *text);
void __wrap_free(void *at);

static bool fails(void)
{
    return left >= 0 && left-- == 0;
}

static void *count(void *at)
{
    alive += at != NULL;
    return at;
}

void *__wrap_malloc(size_t size)
{
    return fails() ? NULL : count(__real_malloc(size));
}

void *__wrap_calloc(size_t number, size_t size)
{
    return fails() ? NULL : count(__real_calloc(number, size));
}

void *__wrap_aligned_alloc(size_t align, size_t size)
{
    return fails() ? NULL : count(__real_aligned_alloc(align, size));
}

void *__wrap_realloc(void *at, size_t size)
{
    if (fails())
        return NULL;
    return at == NULL ? count(__real_realloc(at, size)) : __real_realloc(at, size);
}

char *__wrap_strdup(const char *text)
{
    return fails() ? NULL : count(__real_strdup(text));
}

void __wrap_free(void *at)
{
    alive -= at != NULL;
    __real_free(at);
}
