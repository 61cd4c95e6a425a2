#include <criterion/criterion.h>

#include <string.h>

#include "engine/base/buf.h"

Test(base_buf, appends_are_terminated)
{
    base_buf buf;
    base_buf_init(&buf, 0);
    base_buf_add(&buf, NULL, 0);
    cr_assert_str_eq(buf.data, "");
    base_buf_puts(&buf, "ab");
    base_buf_printf(&buf, "-%d-%s", 42, "x");
    cr_assert_str_eq(buf.data, "ab-42-x");
    cr_assert_eq(buf.length, 7);
    for (int i = 0; i < 10000; i++)
        base_buf_printf(&buf, "%d,", i);
    cr_assert_not(buf.failed);
    cr_assert_eq(buf.length, strlen(buf.data));
    base_buf_clear(&buf);
    cr_assert_eq(buf.length, 0);
    cr_assert_str_eq(buf.data, "");
    base_buf_deinit(&buf);
    cr_assert_null(buf.data);
}

Test(base_buf, the_bound_refuses_whole_appends)
{
    base_buf buf;
    base_buf_init(&buf, 5);
    base_buf_puts(&buf, "abc");
    base_buf_puts(&buf, "de");
    cr_assert_not(buf.failed);
    base_buf_puts(&buf, "f");
    cr_assert(buf.failed);
    cr_assert_str_eq(buf.data, "abcde");
    base_buf_drop(&buf, 3);
    base_buf_puts(&buf, "g");
    cr_assert_str_eq(buf.data, "de", "a failed buffer takes nothing more");
    base_buf_clear(&buf);
    base_buf_printf(&buf, "%s", "123456");
    cr_assert(buf.failed);
    cr_assert_str_eq(buf.data, "");
    cr_assert_eq(buf.length, 0);
    base_buf_clear(&buf);
    cr_assert_not(base_buf_reserve(&buf, SIZE_MAX));
    cr_assert(buf.failed);
    base_buf_deinit(&buf);
    base_buf_init(&buf, 0);
    cr_assert_not(base_buf_reserve(&buf, SIZE_MAX));
    base_buf_deinit(&buf);
}

Test(base_buf, drop_takes_from_the_front)
{
    base_buf buf;
    base_buf_init(&buf, 0);
    base_buf_drop(&buf, 3);
    base_buf_puts(&buf, "abcdef");
    base_buf_drop(&buf, 2);
    cr_assert_str_eq(buf.data, "cdef");
    base_buf_drop(&buf, 99);
    cr_assert_eq(buf.length, 0);
    base_buf_puts(&buf, "z");
    cr_assert_str_eq(buf.data, "z");
    base_buf_deinit(&buf);
}

Test(base_buf, json_strings_escape_what_json_must)
{
    base_buf buf;
    base_buf_init(&buf, 0);
    const char text[] = "a\"b\\c\n\r\t\b\x01\x1F\x7F/\xC3\xA9\0z";
    base_buf_json_string(&buf, text, sizeof text - 1);
    cr_assert_str_eq(buf.data,
                     "\"a\\\"b\\\\c\\n\\r\\t\\u0008\\u0001\\u001f\x7F/\xC3\xA9\\u0000z\"");
    base_buf_clear(&buf);
    base_buf_json_string(&buf, NULL, 0);
    cr_assert_str_eq(buf.data, "\"\"");
    base_buf_deinit(&buf);
}
