#include <criterion/criterion.h>

#include <signal.h>
#include <string.h>

#include "engine/base/err.h"
#include "engine/base/num.h"
#include "engine/base/thread.h"
#include "engine/base/utf8.h"

Test(base_err, the_first_error_wins)
{
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(
        base_fail_param(&err, BASE_TOO_LONG, "max_tokens", "max_tokens %d exceeds %d", 9, 8),
        BASE_TOO_LONG);
    cr_assert_eq(base_fail(&err, BASE_IO, "later"), BASE_IO,
                 "its own code is returned all the same");
    cr_assert_eq(err.code, BASE_TOO_LONG);
    cr_assert_str_eq(err.text, "max_tokens 9 exceeds 8");
    cr_assert_str_eq(err.param, "max_tokens");
}

Test(base_err, context_goes_before_the_text)
{
    base_err err = BASE_ERR_INIT;
    base_wrap(&err, "nothing failed");
    cr_assert_str_eq(err.text, "");
    base_fail(&err, BASE_FORMAT, "row %d", 3);
    base_wrap(&err, "table %s", "turns");
    cr_assert_str_eq(err.text, "table turns: row 3");
    cr_assert_eq(err.code, BASE_FORMAT);
}

Test(base_err, null_is_allowed)
{
    cr_assert_eq(base_fail(NULL, BASE_FULL, "x"), BASE_FULL);
    base_wrap(NULL, "x");
}

Test(base_err, long_texts_are_cut_between_characters)
{
    /* A text of two-byte characters at every alignment against the bound. */
    for (int shift = 0; shift < 2; shift++) {
        char long_text[400];
        memset(long_text, 'a', 1);
        for (int i = 0; i < 190; i++)
            memcpy(long_text + shift + 2 * i, "\xC3\xA9", 2);
        long_text[380] = '\0';
        base_err err = BASE_ERR_INIT;
        base_fail_param(&err, BASE_INVALID, long_text, "%s", long_text);
        cr_assert(base_utf8_valid(err.text, strlen(err.text)));
        cr_assert(base_utf8_valid(err.param, strlen(err.param)));
        cr_assert_geq(strlen(err.text), sizeof err.text - 2);
        cr_assert_geq(strlen(err.param), sizeof err.param - 2);
        base_wrap(&err, "x");
        cr_assert(base_utf8_valid(err.text, strlen(err.text)));
        base_wrap(&err, "%s", long_text);
        cr_assert(base_utf8_valid(err.text, strlen(err.text)));
        cr_assert_lt(strlen(err.text), sizeof err.text);
    }
}

Test(base_err, every_code_has_a_name)
{
    for (int code = BASE_OK; code <= BASE_CLOSED; code++) {
        cr_assert_str_neq(base_code_name((base_code)code), "unknown");
        for (int other = BASE_OK; other < code; other++)
            cr_assert_str_neq(base_code_name((base_code)code), base_code_name((base_code)other));
    }
    cr_assert_str_eq(base_code_name((base_code)99), "unknown");
    cr_assert_str_eq(base_code_name((base_code)-1), "unknown");
}

Test(base_err, check_stops_the_process, .signal = SIGABRT)
{
    CHECK(1 + 1 == 2);
    CHECK(1 + 1 == 3);
}

Test(base_num, overflow_is_told_and_leaves_the_result)
{
    size_t out = 7;
    cr_assert(base_mul(&out, 3, 5));
    cr_assert_eq(out, 15);
    cr_assert_not(base_mul(&out, SIZE_MAX / 2 + 1, 2));
    cr_assert_not(base_add(&out, SIZE_MAX, 1));
    cr_assert_eq(out, 15);
    cr_assert(base_add(&out, SIZE_MAX - 1, 1));
    cr_assert_eq(out, SIZE_MAX);
    cr_assert_eq(base_align_up(0, 16), 0);
    cr_assert_eq(base_align_up(1, 16), 16);
    cr_assert_eq(base_align_up(32, 16), 32);
    cr_assert_eq(base_min(3, 4), 3);
    cr_assert_eq(base_max(3, 4), 4);
}

Test(base_thread, a_thread_has_one_role)
{
    cr_assert(base_thread_is(BASE_THREAD_ENGINE), "tests may call anything");
    base_thread_enter(BASE_THREAD_LOOP, "loop");
    cr_assert(base_thread_is(BASE_THREAD_LOOP));
    cr_assert_not(base_thread_is(BASE_THREAD_ENGINE));
    base_thread_enter(BASE_THREAD_OTHER, "test");
}
