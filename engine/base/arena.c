#include "engine/base/arena.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"

#define BLOCK_MAX ((size_t)1 << 20)

typedef struct block {
    struct block *next;
    size_t size; /* of data */
    size_t used;
    _Alignas(16) unsigned char data[];
} block;

struct base_arena {
    block *head; /* the block that is being filled */
    size_t next_size;
    size_t total, max;
    bool failed;
};

base_arena *base_arena_create(size_t first, size_t max)
{
    base_arena *arena = calloc(1, sizeof *arena);
    if (arena == NULL)
        return NULL;
    arena->next_size = base_max(first, 256);
    arena->max = max;
    return arena;
}

void base_arena_destroy(base_arena *arena)
{
    if (arena == NULL)
        return;
    for (block *b = arena->head; b != NULL;) {
        block *next = b->next;
        free(b);
        b = next;
    }
    free(arena);
}

void *base_arena_alloc(base_arena *arena, size_t size)
{
    size_t need;
    if (!base_add(&need, size, 15)) {
        arena->failed = true;
        return NULL;
    }
    need &= ~(size_t)15;
    block *b = arena->head;
    if (b == NULL || b->size - b->used < need) {
        size_t data = base_max(need, arena->next_size), whole, total;
        size_t left = arena->max - arena->total;
        if (left > sizeof *b && data > left - sizeof *b)
            data = base_max(need, left - sizeof *b); /* the last block is what the bound leaves */
        if (!base_add(&whole, data, sizeof *b) || !base_add(&total, arena->total, whole) ||
            total > arena->max || (b = malloc(whole)) == NULL) {
            arena->failed = true;
            return NULL;
        }
        *b = (block){.next = arena->head, .size = data};
        arena->head = b;
        arena->total = total;
        arena->next_size = base_min(base_max(arena->next_size, data) * 2, BLOCK_MAX);
    }
    void *out = b->data + b->used;
    b->used += need;
    return out;
}

void *base_arena_calloc(base_arena *arena, size_t count, size_t size)
{
    size_t bytes;
    if (!base_mul(&bytes, count, size)) {
        arena->failed = true;
        return NULL;
    }
    void *out = base_arena_alloc(arena, bytes);
    if (out != NULL)
        memset(out, 0, bytes);
    return out;
}

char *base_arena_copy(base_arena *arena, const void *bytes, size_t length)
{
    size_t size;
    if (!base_add(&size, length, 1)) {
        arena->failed = true;
        return NULL;
    }
    char *out = base_arena_alloc(arena, size);
    if (out == NULL)
        return NULL;
    if (length > 0)
        memcpy(out, bytes, length);
    out[length] = '\0';
    return out;
}

bool base_arena_failed(const base_arena *arena)
{
    return arena->failed;
}

size_t base_arena_bytes(const base_arena *arena)
{
    return arena->total;
}
