#include <criterion/criterion.h>

#include <stdint.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/rand.h"

Test(base_arena, allocations_are_aligned_and_do_not_overlap)
{
    base_arena *arena = base_arena_create(64, 1 << 24);
    enum { COUNT = 2000 };
    static unsigned char *at[COUNT];
    static size_t size[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        base_rand4 r = base_rand(1, 0, i);
        size[i] = r.v[0] % 8 == 0 ? r.v[1] % 40000 : r.v[1] % 100;
        at[i] = base_arena_alloc(arena, size[i]);
        cr_assert_not_null(at[i]);
        cr_assert_eq((uintptr_t)at[i] % 16, 0);
        memset(at[i], (int)(i % 251), size[i]);
    }
    for (uint32_t i = 0; i < COUNT; i++)
        for (size_t j = 0; j < size[i]; j++)
            cr_assert_eq(at[i][j], i % 251);
    cr_assert_not(base_arena_failed(arena));
    base_arena_destroy(arena);
    base_arena_destroy(NULL);
}

Test(base_arena, the_bound_holds_and_can_be_used_up)
{
    for (size_t max = 1000; max < 3000000; max = max * 3 + 7) {
        base_arena *arena = base_arena_create(256, max);
        size_t got = 0;
        while (base_arena_alloc(arena, 100) != NULL) {
            got += 100;
            cr_assert_leq(base_arena_bytes(arena), max);
        }
        cr_assert(base_arena_failed(arena));
        cr_assert_leq(base_arena_bytes(arena), max);
        cr_assert_geq(got, max / 2, "only %zu of %zu bytes could be had", got, max);
        base_arena_destroy(arena);
    }
}

Test(base_arena, what_does_not_fit_is_refused_and_flagged)
{
    size_t sizes[] = {1001, SIZE_MAX, SIZE_MAX - 15, SIZE_MAX - 16, SIZE_MAX / 2};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        base_arena *arena = base_arena_create(16, 1000);
        cr_assert_null(base_arena_alloc(arena, sizes[i]));
        cr_assert(base_arena_failed(arena));
        cr_assert_not_null(base_arena_alloc(arena, 100), "a later one that fits is served");
        cr_assert(base_arena_failed(arena), "the flag stays");
        base_arena_destroy(arena);
    }
    base_arena *arena = base_arena_create(16, 1000);
    cr_assert_null(base_arena_calloc(arena, SIZE_MAX / 2, 3));
    cr_assert(base_arena_failed(arena));
    base_arena_destroy(arena);
    arena = base_arena_create(16, 1000);
    cr_assert_null(base_arena_copy(arena, "x", SIZE_MAX));
    cr_assert(base_arena_failed(arena));
    base_arena_destroy(arena);
    arena = base_arena_create(16, 0);
    cr_assert_null(base_arena_alloc(arena, 1));
    base_arena_destroy(arena);
}

Test(base_arena, copies_are_terminated_and_calloc_is_zero)
{
    base_arena *arena = base_arena_create(4096, 1 << 20);
    memset(base_arena_alloc(arena, 1000), 0xFF, 1000);
    cr_assert_str_eq(base_arena_copy(arena, "abcdef", 3), "abc");
    cr_assert_str_eq(base_arena_copy(arena, NULL, 0), "");
    unsigned char *zero = base_arena_calloc(arena, 100, 7);
    for (int i = 0; i < 700; i++)
        cr_assert_eq(zero[i], 0);
    base_arena_destroy(arena);
}
