/* A device of bytes for the tests of the disk tier: the rows of a page follow from the tokens
 * before them, so that what comes back can be checked without having kept it. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/store.h"

#define FIX_PAGES 512
#define FIX_TOKENS_MAX (64 * KV_PAGE_TOKENS)

typedef struct fix_device {
    const kv_layout *layouts[2];
    uint8_t *bytes[2]; /* [FIX_PAGES][record_bytes], plane by plane */
    bool fail_out, fail_in;
} fix_device;

static inline void fix_device_init(fix_device *d, const kv_layout *target, const kv_layout *draft)
{
    *d = (fix_device){.layouts = {target, draft}};
    for (int k = 0; k < 2; k++)
        if (d->layouts[k] != NULL)
            d->bytes[k] = calloc(FIX_PAGES, d->layouts[k]->record_bytes);
}

static inline void fix_device_deinit(fix_device *d)
{
    free(d->bytes[0]);
    free(d->bytes[1]);
}

static inline uint8_t *fix_plane(const fix_device *d, int kind, uint32_t page, uint32_t plane)
{
    const kv_layout *layout = d->layouts[kind];
    uint8_t *at = d->bytes[kind] + page * layout->record_bytes;
    for (uint32_t i = 0; i < plane; i++)
        at += (size_t)layout->planes[i].row_bytes * KV_PAGE_TOKENS;
    return at;
}

static inline bool fix_copy_out(void *ctx, kv_store_kind kind, uint32_t page, uint32_t plane,
                                uint32_t rows, void *bytes)
{
    fix_device *d = ctx;
    memcpy(bytes, fix_plane(d, (int)kind, page, plane),
           (size_t)rows * d->layouts[kind]->planes[plane].row_bytes);
    return !d->fail_out;
}

static inline bool fix_copy_in(void *ctx, kv_store_kind kind, uint32_t page, uint32_t plane,
                               uint32_t rows, const void *bytes)
{
    fix_device *d = ctx;
    memcpy(fix_plane(d, (int)kind, page, plane), bytes,
           (size_t)rows * d->layouts[kind]->planes[plane].row_bytes);
    return !d->fail_in;
}

/* A number for tokens[0..count) and the namespace. */
static inline uint64_t fix_hash(uint64_t h, int32_t token)
{
    h = (h ^ (uint32_t)token) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 29;
}

static inline uint8_t fix_byte(uint64_t hash, uint32_t plane, uint32_t i)
{
    uint64_t h = (hash + plane * 131u + i) * 0xBF58476D1CE4E5B9u;
    h = (h ^ h >> 32) * 0x94D049BB133111EBu;
    return (uint8_t)(h >> 56);
}

/* "Computes" rows [from, to) of a sequence. */
static inline void fix_compute(fix_device *d, uint64_t space, const int32_t *tokens, uint32_t from,
                               uint32_t to, const uint32_t *pages)
{
    uint64_t hash = space;
    for (uint32_t t = 0; t < to; t++) {
        hash = fix_hash(hash, tokens[t]);
        for (int k = 0; k < 2 && t >= from; k++)
            for (uint32_t p = 0; d->layouts[k] != NULL && p < d->layouts[k]->plane_count; p++) {
                uint32_t bytes = d->layouts[k]->planes[p].row_bytes;
                uint8_t *row = fix_plane(d, k, pages[t / KV_PAGE_TOKENS], p) +
                               (size_t)(t % KV_PAGE_TOKENS) * bytes;
                for (uint32_t i = 0; i < bytes; i++)
                    row[i] = fix_byte(hash, p + 64u * (uint32_t)k, i);
            }
    }
}

/* Whether rows [from, to) are what fix_compute makes; pages[0] is the page of position `base`. */
static inline bool fix_right(const fix_device *d, int kind, uint64_t space, const int32_t *tokens,
                             uint32_t from, uint32_t to, const uint32_t *pages, uint32_t base)
{
    uint64_t hash = space;
    for (uint32_t t = 0; t < to; t++) {
        hash = fix_hash(hash, tokens[t]);
        for (uint32_t p = 0; t >= from && p < d->layouts[kind]->plane_count; p++) {
            uint32_t bytes = d->layouts[kind]->planes[p].row_bytes;
            const uint8_t *row = fix_plane(d, kind, pages[(t - base) / KV_PAGE_TOKENS], p) +
                                 (size_t)(t % KV_PAGE_TOKENS) * bytes;
            for (uint32_t i = 0; i < bytes; i++)
                if (row[i] != fix_byte(hash, p + 64u * (uint32_t)kind, i))
                    return false;
        }
    }
    return true;
}

static inline void fix_remove_dir(const char *dir)
{
    char command[4200];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    if (system(command) != 0)
        abort();
}
