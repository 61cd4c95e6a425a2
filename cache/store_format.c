/* How a page looks on disk; the drawing is in store_internal.h. Pure. */
#include "cache/store_internal.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/num.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "records are written as they lie in memory");

#define VERSION 1

static void put(uint8_t *at, uint64_t value, size_t bytes)
{
    memcpy(at, &value, bytes);
}

uint64_t kv_form__root(const char *fingerprint, const char *layout, const char *numerics)
{
    const char *parts[] = {fingerprint, layout, numerics};
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        uint64_t length = strlen(parts[i]);
        XXH3_64bits_update(&state, &length, sizeof length);
        XXH3_64bits_update(&state, parts[i], length);
    }
    return XXH3_64bits_digest(&state);
}

base_code kv_form__init(kv_form *form, const kv_layout *layout, const char *fingerprint,
                        const char *numerics, uint32_t group_bytes, base_err *err)
{
    *form = (kv_form){.layout = layout};
    form->groups = calloc(layout->plane_count, sizeof *form->groups);
    if (form->groups == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for a record of %u planes",
                         layout->plane_count);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < layout->plane_count; i++) {
        const kv_plane *plane = &layout->planes[i];
        if (i == 0 || (plane->layer != plane[-1].layer && bytes >= group_bytes)) {
            form->groups[form->group_count++] = (kv_group){.first_plane = i};
            bytes = 0;
        }
        form->groups[form->group_count - 1].plane_count++;
        bytes += (uint64_t)plane->row_bytes * KV_PAGE_TOKENS;
        if (bytes > UINT32_MAX / 4) {
            kv_form__deinit(form);
            return base_fail(err, BASE_UNSUPPORTED, "a layer of a page is larger than 1 GiB");
        }
    }
    for (uint32_t i = 0; i < form->group_count; i++)
        form->group_bytes_max = (uint32_t)base_max(form->group_bytes_max,
                                                   kv_form__group_bytes(form, i, KV_PAGE_TOKENS));
    form->root = kv_form__root(fingerprint, layout->id, numerics);
    return BASE_OK;
}

void kv_form__deinit(kv_form *form)
{
    free(form->groups);
    *form = (kv_form){0};
}

static uint32_t head_bytes(const kv_group *group)
{
    return KV_GROUP_HEAD + 8 * group->plane_count;
}

uint32_t kv_form__plane_offset(const kv_form *form, uint32_t group, uint32_t plane, uint32_t rows)
{
    const kv_group *g = &form->groups[group];
    uint32_t offset = head_bytes(g);
    for (uint32_t i = 0; i < plane; i++)
        offset += form->layout->planes[g->first_plane + i].row_bytes * rows;
    return offset;
}

uint32_t kv_form__group_bytes(const kv_form *form, uint32_t group, uint32_t rows)
{
    return (uint32_t)base_align_up(
        kv_form__plane_offset(form, group, form->groups[group].plane_count, rows), KV_BLOCK);
}

uint64_t kv_form__group_offset(const kv_form *form, uint32_t group, uint32_t rows)
{
    uint64_t offset = 0;
    for (uint32_t i = 0; i < group; i++)
        offset += kv_form__group_bytes(form, i, rows);
    return offset;
}

uint64_t kv_form__root_chain(const kv_form *form, uint64_t space)
{
    uint64_t key[2] = {form->root, space};
    return XXH3_64bits(key, sizeof key);
}

uint64_t kv_form__page_chain(uint64_t before, uint32_t rows, const int32_t *tokens)
{
    uint8_t key[16 + KV_PAGE_TOKENS * sizeof(int32_t)];
    put(key, before, 8);
    put(key + 8, KV_STORE_TARGET | (uint64_t)rows << 8, 8);
    memcpy(key + 16, tokens, rows * sizeof *tokens);
    return XXH3_64bits(key, 16 + rows * sizeof *tokens);
}

uint64_t kv_form__side_chain(const kv_form *form, uint64_t page, uint32_t rows)
{
    uint64_t key[3] = {form->root, page, KV_STORE_DRAFT | (uint64_t)rows << 8};
    return XXH3_64bits(key, sizeof key);
}

static void put_head(const kv_form *form, const kv_group_key *key, uint8_t *head)
{
    const kv_group *group = &form->groups[key->group];
    memset(head, 0, KV_GROUP_HEAD);
    memcpy(head, "WKVP", 4);
    put(head + 4, VERSION, 2);
    head[6] = key->kind;
    head[7] = key->rows;
    put(head + 8, key->id, 8);
    put(head + 16, key->chain, 8);
    put(head + 24, key->group, 4);
    put(head + 28, group->first_plane, 4);
    put(head + 32, group->plane_count, 4);
    put(head + 36, kv_form__group_bytes(form, key->group, key->rows), 4);
}

uint64_t kv_group__head_sum(const uint8_t *head, const uint8_t *sums, uint32_t plane_count)
{
    uint64_t parts[2] = {XXH3_64bits(head, KV_GROUP_HEAD - 8),
                         XXH3_64bits(sums, 8 * (size_t)plane_count)};
    return XXH3_64bits(parts, sizeof parts);
}

void kv_form__seal(const kv_form *form, const kv_group_key *key, uint8_t *bytes)
{
    const kv_group *group = &form->groups[key->group];
    uint32_t offset = head_bytes(group);
    put_head(form, key, bytes);
    for (uint32_t i = 0; i < group->plane_count; i++) {
        uint32_t length = form->layout->planes[group->first_plane + i].row_bytes * key->rows;
        put(bytes + KV_GROUP_HEAD + 8 * i, XXH3_64bits(bytes + offset, length), 8);
        offset += length;
    }
    put(bytes + 56, kv_group__head_sum(bytes, bytes + KV_GROUP_HEAD, group->plane_count), 8);
    memset(bytes + offset, 0, base_align_up(offset, KV_BLOCK) - offset);
}

const char *kv_form__verify(const kv_form *form, const kv_group_key *key, const uint8_t *bytes)
{
    const kv_group *group = &form->groups[key->group];
    uint32_t offset = head_bytes(group);
    uint8_t head[KV_GROUP_HEAD];
    put_head(form, key, head);
    put(head + 56, kv_group__head_sum(head, bytes + KV_GROUP_HEAD, group->plane_count), 8);
    if (memcmp(head, bytes, KV_GROUP_HEAD) != 0)
        return "head";
    for (uint32_t i = 0; i < group->plane_count; i++) {
        uint32_t length = form->layout->planes[group->first_plane + i].row_bytes * key->rows;
        uint64_t sum = XXH3_64bits(bytes + offset, length);
        if (memcmp(&sum, bytes + KV_GROUP_HEAD + 8 * i, 8) != 0)
            return "plane";
        offset += length;
    }
    return NULL;
}

void kv_segment__head(uint8_t bytes[KV_BLOCK], uint32_t number)
{
    memset(bytes, 0, KV_BLOCK);
    memcpy(bytes, "WKVSEG01", 8);
    put(bytes + 8, number, 8);
    put(bytes + 16, XXH3_64bits(bytes, 16), 8);
}

bool kv_segment__head_fits(const uint8_t bytes[KV_BLOCK], uint32_t number)
{
    uint8_t want[KV_BLOCK];
    kv_segment__head(want, number);
    return memcmp(bytes, want, KV_BLOCK) == 0;
}
