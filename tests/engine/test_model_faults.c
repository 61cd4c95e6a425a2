/* Loading a model and its draft when the Nth allocation fails, for every N: it says so, and nothing
 * leaks. The linker puts the counting versions in place of the C library's (see meson.build); what
 * jansson and xxHash allocate themselves is not counted. */
#include <criterion/criterion.h>

#include <stdlib.h>
#include <string.h>

#include "engine/draft.h"

static long left = -1; /* allocations until one fails; negative: none does */
static long alive;

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

static const eng_model_options OPTIONS = {
    .variant = "auto", .kv = "nvfp4", .threads = 1, .rows_max = 16, .context_max = 128};

/* Every load of `spec` with one failing allocation; returns how many allocations a whole load
 * makes. */
static long load_all(const char *spec)
{
    for (long n = 0;; n++) {
        base_err err = BASE_ERR_INIT;
        eng_model *m;
        alive = 0;
        left = n;
        base_code code = eng_model_load(&m, spec, &OPTIONS, &err);
        bool done = left >= 0; /* fewer were made than it takes to fail */
        left = -1;
        cr_assert(code == BASE_NOMEM || done, "%s, allocation %ld: %s %s", spec, n,
                  base_code_name(code), err.text);
        cr_assert_eq(code == BASE_OK, m != NULL);
        cr_assert(code == BASE_OK || err.text[0] != '\0');
        eng_model_destroy(m);
        cr_assert_eq(alive, 0, "%s, allocation %ld: %ld blocks are left", spec, n, alive);
        if (done)
            return n;
    }
}

Test(model_faults, loading_a_model_fails_cleanly, .timeout = 300)
{
    cr_expect_gt(load_all(VECTORS "/tiny"), 10);
    cr_expect_gt(load_all(VECTORS "/tiny-m3"), 10); /* shards by an index */
    cr_expect_gt(load_all("random:tiny?layers=2"), 10);
}

Test(model_faults, loading_a_draft_fails_cleanly, .timeout = 300)
{
    base_err err = BASE_ERR_INIT;
    eng_model *m;
    cr_assert_eq(eng_model_load(&m, VECTORS "/tiny", &OPTIONS, &err), BASE_OK, "%s", err.text);
    for (long n = 0;; n++) {
        eng_draft *d;
        err = (base_err)BASE_ERR_INIT;
        alive = 0;
        left = n;
        base_code code = eng_draft_load(&d, m, VECTORS "/tiny/dspark", 16, 4, &err);
        bool done = left >= 0;
        left = -1;
        cr_assert(code == BASE_NOMEM || done, "allocation %ld: %s %s", n, base_code_name(code),
                  err.text);
        cr_assert_eq(code == BASE_OK, d != NULL);
        eng_draft_destroy(d);
        cr_assert_eq(alive, 0, "allocation %ld: %ld blocks are left", n, alive);
        if (done)
            break;
    }
    eng_model_destroy(m);
}
