/* base/arena: memory that is freed all at once; one a request, which travels with it between
 * threads.
 *
 * Blocks double from `first` up to 1 MiB. Out of memory, or a sum past `max`, gives NULL and sets
 * the failed flag, so that a phase of many small allocations may test base_arena_failed once at its
 * end if it checks what it dereferences. Thread: one at a time. */
#pragma once
#include "engine/base/err.h"

typedef struct base_arena base_arena;

/* `max` bounds the sum of all blocks, in bytes. NULL if memory is used up. */
base_arena *base_arena_create(size_t first, size_t max);
void base_arena_destroy(base_arena *arena); /* NULL is fine */
/* 16-byte aligned, not cleared. NULL if the bound or memory is used up; the failed flag is set
 * then. */
void *base_arena_alloc(base_arena *arena, size_t size);
/* As base_arena_alloc, zeroed, `count` elements of `size`; checked multiplication. */
void *base_arena_calloc(base_arena *arena, size_t count, size_t size);
/* A terminated copy; `length` bytes need not be terminated. NULL as base_arena_alloc. */
char *base_arena_copy(base_arena *arena, const void *bytes, size_t length);
bool base_arena_failed(const base_arena *arena);
size_t base_arena_bytes(const base_arena *arena);
