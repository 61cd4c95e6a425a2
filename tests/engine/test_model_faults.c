/* Loading a model and its draft when the Nth allocation fails, for every N: it says so, and nothing
 * leaks. */
#include <criterion/criterion.h>

#include <string.h>

#include "engine/draft.h"
#include "tests/failing_alloc.h"

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
