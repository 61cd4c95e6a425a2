/* Sealed texts: what was sealed comes back for its use, tenant and bound alone, and a changed
 * letter is noticed wherever it stands. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gateway/seal.h"

static char directory[] = "/tmp/whimbrel-seal-XXXXXX";
static gw_seal *seal;

static void start(void)
{
    base_err err = BASE_ERR_INIT;
    cr_assert_not_null(mkdtemp(directory));
    cr_assert_eq(gw_seal_open(&seal, directory, &err), BASE_OK, "%s", err.text);
}

static void stop(void)
{
    char path[64];
    gw_seal_close(seal);
    snprintf(path, sizeof path, "%s/key", directory);
    unlink(path);
    rmdir(directory);
}

TestSuite(seal_text, .init = start, .fini = stop, .timeout = 20);

static const eng_text bound = {"parent", 6};

static base_code open_as(base_buf *out, const char *use, int64_t tenant, eng_text with,
                         const base_buf *text)
{
    base_buf_clear(out);
    return gw_seal_unwrap(seal, out, use, tenant, with, (eng_text){text->data, text->length}, NULL);
}

Test(seal_text, comes_back_for_its_use_tenant_and_bound_alone)
{
    base_buf text, back;
    base_buf_init(&text, 0);
    base_buf_init(&back, 0);
    for (size_t length = 0; length < 70; length++) {
        char content[70];
        for (size_t i = 0; i < length; i++)
            content[i] = (char)(i * 7 + length);
        base_buf_clear(&text);
        cr_assert_eq(gw_seal_wrap(seal, &text, "run", 7, bound, content, length, NULL), BASE_OK);
        cr_assert_eq(open_as(&back, "run", 7, bound, &text), BASE_OK);
        cr_assert_eq(back.length, length);
        cr_assert(!length || memcmp(back.data, content, length) == 0);
    }
    cr_expect_eq(open_as(&back, "export", 7, bound, &text), BASE_DENIED);
    cr_expect_eq(open_as(&back, "run", 8, bound, &text), BASE_DENIED);
    cr_expect_eq(open_as(&back, "run", 7, (eng_text){"paren", 5}, &text), BASE_DENIED);
    cr_expect_eq(back.length, 0);
    base_buf_deinit(&text);
    base_buf_deinit(&back);
}

Test(seal_text, every_changed_letter_is_noticed)
{
    base_buf text, back;
    base_buf_init(&text, 0);
    base_buf_init(&back, 0);
    cr_assert_eq(gw_seal_wrap(seal, &text, "run", 7, bound, "what the model thought", 22, NULL),
                 BASE_OK);
    for (size_t i = 0; i < text.length; i++) {
        char was = text.data[i];
        text.data[i] = was == 'A' ? 'B' : 'A';
        cr_expect_neq(open_as(&back, "run", 7, bound, &text), BASE_OK, "letter %zu", i);
        text.data[i] = was;
        base_buf cut = text;
        cut.length = i;
        cr_expect_neq(open_as(&back, "run", 7, bound, &cut), BASE_OK, "length %zu", i);
    }
    base_buf other = {.data = "gAAAAABo_strangers", .length = 18};
    cr_expect_eq(open_as(&back, "run", 7, bound, &other), BASE_FORMAT);
    base_buf_deinit(&text);
    base_buf_deinit(&back);
}

Test(seal_text, the_same_content_seals_to_the_same_text)
{
    base_buf a, b, c;
    base_buf_init(&a, 0);
    base_buf_init(&b, 0);
    base_buf_init(&c, 0);
    gw_seal_wrap(seal, &a, "run", 7, bound, "one", 3, NULL);
    gw_seal_wrap(seal, &b, "run", 7, bound, "one", 3, NULL);
    gw_seal_wrap(seal, &c, "run", 7, bound, "two", 3, NULL);
    cr_assert_eq(a.length, b.length);
    cr_expect_eq(memcmp(a.data, b.data, a.length), 0);
    cr_expect_neq(memcmp(a.data, c.data, a.length), 0);
    base_buf_deinit(&a);
    base_buf_deinit(&b);
    base_buf_deinit(&c);
}
