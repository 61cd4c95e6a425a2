/* model_rig: one model, optionally its draft, and enough pages for a few sequences; for tests of
 * the forward pass.
 *
 * Every sequence has its own run of pages. Nothing is shared between two rigs, so that two runs can
 * be compared. */
#pragma once
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/draft.h"
#include "engine/base/rand.h"
#include "engine/model_internal.h"

#define RIG_ROWS 256
#define RIG_SEQUENCES 3

typedef struct rig {
    eng_model *model;
    const eng_model_config *config;
    kn_kv *kv;
    eng_draft *draft;
    kn_kv *draft_kv;
    uint32_t context, pages_each;
    uint32_t *pages[RIG_SEQUENCES];
    float *features; /* [RIG_ROWS, count * hidden] with a draft; device memory */
    eng_memory feature_memory;
    uint32_t first_row, rows; /* of the chunk that runs, for a probe */
} rig;

static inline void rig_open_on(rig *r, const kn_backend *backend, const char *spec,
                               const char *variant, const char *kv, uint32_t context,
                               const char *draft_dir, kn_kv_type draft_type)
{
    base_err err = BASE_ERR_INIT;
    eng_model_options options = {.kernels = backend,
                                 .variant = variant,
                                 .kv = kv,
                                 .threads = 2,
                                 .rows_max = RIG_ROWS,
                                 .context_max = context};
    *r = (rig){.context = context, .pages_each = context / KN_PAGE_TOKENS + 1};
    cr_assert_eq(eng_model_load(&r->model, spec, &options, &err), BASE_OK, "%s", err.text);
    r->config = eng_model_get_config(r->model);
    kn_kv_shape shape = eng_model_kv_shape(r->model, r->pages_each * RIG_SEQUENCES);
    cr_assert_eq(kn_kv_create(&r->kv, eng_model_device(r->model), &shape, &err), BASE_OK, "%s",
                 err.text);
    for (uint32_t s = 0; s < RIG_SEQUENCES; s++) {
        r->pages[s] = malloc(r->pages_each * sizeof(uint32_t));
        /* Neighbours in a sequence are not neighbours in memory. */
        for (uint32_t i = 0; i < r->pages_each; i++)
            r->pages[s][i] = (r->pages_each - 1 - i) * RIG_SEQUENCES + s;
    }
    if (draft_dir == NULL)
        return;
    const uint32_t *layers;
    cr_assert_eq(eng_draft_load(&r->draft, r->model, draft_dir, RIG_ROWS, 8, &err), BASE_OK, "%s",
                 err.text);
    shape = eng_draft_kv_shape(r->draft, r->pages_each * RIG_SEQUENCES);
    shape.type = draft_type;
    cr_assert_eq(kn_kv_create(&r->draft_kv, eng_model_device(r->model), &shape, &err), BASE_OK,
                 "%s", err.text);
    const eng_piece piece = {
        &r->features, (size_t)RIG_ROWS * eng_draft_features(r->draft, &layers) * r->config->hidden,
        sizeof *r->features};
    cr_assert_eq(eng_memory_take(&r->feature_memory, eng_model_device(r->model), &piece, 1, &err),
                 BASE_OK, "%s", err.text);
}

static inline void rig_open(rig *r, const char *spec, const char *variant, const char *kv,
                            uint32_t context, const char *draft_dir, kn_kv_type draft_type)
{
    rig_open_on(r, NULL, spec, variant, kv, context, draft_dir, draft_type);
}

static inline void rig_close(rig *r)
{
    for (uint32_t s = 0; s < RIG_SEQUENCES; s++)
        free(r->pages[s]);
    eng_memory_free(&r->feature_memory);
    kn_kv_destroy(r->draft_kv);
    eng_draft_destroy(r->draft);
    kn_kv_destroy(r->kv);
    eng_model_destroy(r->model);
}

/* Runs ids at positions from `start` of sequence `s` in chunks; logits of every row into `logits`
 * [count, vocab] unless it is NULL. */
static inline void rig_run(rig *r, uint32_t s, const int32_t *ids, uint32_t start, uint32_t count,
                           uint32_t chunk, float *logits)
{
    const uint32_t *tables[RIG_SEQUENCES] = {r->pages[0], r->pages[1], r->pages[2]};
    int32_t pos[RIG_ROWS];
    uint32_t seq[RIG_ROWS], pick[RIG_ROWS];
    cr_assert(start + count <= r->context);
    for (uint32_t at = 0; at < count; at += chunk) {
        uint32_t n = count - at < chunk ? count - at : chunk;
        for (uint32_t i = 0; i < n; i++) {
            pos[i] = (int32_t)(start + at + i);
            seq[i] = s;
            pick[i] = i;
        }
        kn_rows rows = {.rows = n, .token = ids + at, .pos = pos, .seq = seq, .pages = tables};
        const uint32_t *layers = NULL;
        uint32_t layer_count = r->draft != NULL ? eng_draft_features(r->draft, &layers) : 0;
        r->first_row = start + at;
        r->rows = n;
        eng_model_forward(r->model, r->kv, &rows, pick, logits != NULL ? n : 0,
                          logits != NULL ? logits + (size_t)at * r->config->vocab : NULL, layers,
                          layer_count, r->features);
        if (r->draft != NULL)
            eng_draft_append(r->draft, r->draft_kv, &rows, r->features);
    }
}

static inline int32_t rig_argmax(const float *x, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return (int32_t)best;
}

static inline double rig_distance(const float *a, const float *b, size_t n)
{
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        worst = d > worst || isnan(d) ? d : worst;
    }
    return worst;
}

/* The tensor `prefix` + `name`, or NULL. */
static inline const eng_tensor *rig_tensor(const eng_files *files, const char *prefix,
                                           const char *name)
{
    char whole[256];
    snprintf(whole, sizeof whole, "%s%s", prefix, name);
    return eng_files_find(files, whole);
}

/* Its values, copied to aligned memory the caller frees. */
static inline void *rig_values(const eng_files *files, const char *prefix, const char *name)
{
    const eng_tensor *t = rig_tensor(files, prefix, name);
    cr_assert(t != NULL, "%s%s is missing", prefix, name);
    void *copy = malloc(t->bytes + 1);
    memcpy(copy, t->data, t->bytes);
    return copy;
}

/* The golden vectors `file` of tests/vectors; skips the test with a reason if they are not there.
 */
static inline eng_files *rig_vectors(const char *file)
{
    base_err err = BASE_ERR_INIT;
    eng_files *files;
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", VECTORS, file);
    base_code code = eng_files_open_one(&files, path, &err);
    if (code == BASE_NOT_FOUND)
        cr_skip_test("%s is not there", file);
    cr_assert_eq(code, BASE_OK, "%s", err.text);
    return files;
}
