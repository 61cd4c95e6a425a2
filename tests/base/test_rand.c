/* Known-answer vectors of the Random123 distribution (kat_vectors, philox4x32 with 10 rounds). */
#include <criterion/criterion.h>

#include "engine/base/rand.h"

Test(base_rand, philox_gives_the_published_answers)
{
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } vectors[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        base_rand4 got = base_philox(vectors[i].counter, vectors[i].key);
        for (int j = 0; j < 4; j++)
            cr_assert_eq(got.v[j], vectors[i].want[j], "vector %d, word %d: %08x", i, j, got.v[j]);
    }
}

Test(base_rand, seed_stream_and_index_all_count)
{
    uint64_t base[3] = {1, 2, 3};
    base_rand4 want = base_rand(1, 2, 3), again = base_rand(1, 2, 3);
    for (int j = 0; j < 4; j++)
        cr_assert_eq(want.v[j], again.v[j]);
    for (int field = 0; field < 3; field++)
        for (int bit = 0; bit < 64; bit++) {
            uint64_t v[3] = {base[0], base[1], base[2]};
            v[field] ^= 1ull << bit;
            base_rand4 got = base_rand(v[0], v[1], v[2]);
            cr_assert(got.v[0] != want.v[0] || got.v[1] != want.v[1]);
        }
}

Test(base_rand, unit_never_touches_its_ends)
{
    cr_assert_gt(base_rand_unit(0), 0.0);
    cr_assert_lt(base_rand_unit(UINT32_MAX), 1.0);
    double sum = 0;
    for (uint64_t i = 0; i < 100000; i++)
        sum += base_rand_unit(base_rand(5, 6, i).v[i % 4]);
    cr_assert_float_eq(sum / 100000, 0.5, 0.005);
}
