/* Loading a model: a directory (or a random shape written to a private one), its configuration, its
 * tensors bound to weights, a device, and the memory of one step. The forward pass itself is the
 * family's: model_m3.c.
 *
 * Tensors stay where they are mapped. Copies are made of norms (as floats) and of BF16 or F32
 * matrices that lie at odd addresses in the file, which the format permits and vector loads of
 * typed pointers do not. */
#include "engine/model_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/thread.h"
#include "kernels/module.h"

struct eng_model {
    eng_config_file file;
    char *dir;
    bool is_random;   /* dir was ours and is gone once loaded */
    int tokenizer_fd; /* its tokenizer.json, which outlives the name; -1: none */
    char tokenizer[PATH_MAX];
    char fingerprint[33];
    kn_kv_type kv_type;
    uint32_t rows_max, width_max, context_max;
    base_arena *arena;
    eng_files *files;
    eng_m3 m3;
    eng_piece *bound; /* in the arena */
    uint32_t bound_count;
    char *packed; /* options.packed */
    uint64_t packed_bytes_max;
    kn_weight **packable;
    uint32_t packable_count;
    eng_repack *pack;
    kn_device *device;
    eng_memory weights, rope_memory, step_memory;
    kn_rope rope;
    eng_m3_scratch scratch;
    float *logits; /* [HEAD_ROWS, vocab] where the caller's are not the device's */
    kv_plane *planes;
    kv_layout layout;
    eng_model_probe probe;
    bool has_probe;
    uint32_t probe_rows; /* of the step that it looks at */
    eng_m3_scratch room; /* what it is shown, where memory is not shared; in room.x's block */
};

#define HEAD_ROWS 256u /* whose logits are on their way to the host at a time */

/* ---- binding ---- */

base_code eng_binder__init(eng_binder *binder, const eng_files *files, base_arena *arena,
                           base_err *err)
{
    *binder = (eng_binder){.files = files, .arena = arena, .err = err};
    binder->taken = calloc(eng_files_count(files) + 1, 1);
    binder->packable =
        base_arena_calloc(arena, eng_files_count(files) + 1, sizeof *binder->packable);
    binder->bound = base_arena_calloc(arena, eng_files_count(files) + 1, sizeof *binder->bound);
    if (binder->taken == NULL || binder->packable == NULL || binder->bound == NULL)
        binder->code =
            base_fail(err, BASE_NOMEM, "out of memory for %u tensors", eng_files_count(files));
    return binder->code;
}

void eng_binder__deinit(eng_binder *binder)
{
    free(binder->taken);
}

#define NAME_BYTES 256

static void format_name(char name[NAME_BYTES], const char *fmt, va_list args)
{
    int n = vsnprintf(name, NAME_BYTES, fmt, args);
    CHECK(n > 0 && n < NAME_BYTES - 32); /* names are ours; 32 for a suffix */
}

/* The tensor NAME SUFFIX, marked as taken; NULL if there is none. */
static const eng_tensor *take(eng_binder *b, const char *name, const char *suffix)
{
    char whole[NAME_BYTES + 32];
    snprintf(whole, sizeof whole, "%s%s", name, suffix);
    const eng_tensor *t = eng_files_find(b->files, whole);
    if (t != NULL)
        b->taken[t - eng_files_at(b->files, 0)] = 1;
    return t;
}

static void fail_tensor(eng_binder *b, base_code code, const eng_tensor *t, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static void fail_tensor(eng_binder *b, base_code code, const eng_tensor *t, const char *fmt, ...)
{
    char why[96];
    va_list args;
    va_start(args, fmt);
    vsnprintf(why, sizeof why, fmt, args);
    va_end(args);
    if (b->code == BASE_OK)
        b->code = base_fail(b->err, code, "%.40s: tensor %s: %s", t->file, t->name, why);
}

static void fail_missing(eng_binder *b, const char *name, const char *suffix)
{
    if (b->code == BASE_OK)
        b->code = base_fail(b->err, BASE_FORMAT, "tensor %s%s is missing", name, suffix);
}

/* [rows, cols]; rows 0: [cols]. */
static bool check_shape(eng_binder *b, const eng_tensor *t, uint64_t rows, uint64_t cols)
{
    char found[96] = "";
    size_t at = 0;
    if (rows == 0 ? t->dims == 1 && t->shape[0] == cols
                  : t->dims == 2 && t->shape[0] == rows && t->shape[1] == cols)
        return true;
    for (uint32_t i = 0; i < t->dims && at < sizeof found - 24; i++)
        at += (size_t)snprintf(found + at, sizeof found - at, i > 0 ? ", %llu" : "%llu",
                               (unsigned long long)t->shape[i]);
    if (rows == 0)
        fail_tensor(b, BASE_FORMAT, t, "shape [%.40s], not [%llu]", found,
                    (unsigned long long)cols);
    else
        fail_tensor(b, BASE_FORMAT, t, "shape [%.40s], not [%llu, %llu]", found,
                    (unsigned long long)rows, (unsigned long long)cols);
    return false;
}

static bool check_dtype(eng_binder *b, const eng_tensor *t, eng_dtype dtype, eng_dtype or_dtype)
{
    if (t->dtype == dtype || t->dtype == or_dtype)
        return true;
    fail_tensor(b, BASE_FORMAT, t, "%s, not %s", eng_dtype__name(t->dtype), eng_dtype__name(dtype));
    return false;
}

/* The tensor's bytes, at an address that is a multiple of `align`. */
static const void *aligned(eng_binder *b, const eng_tensor *t, size_t align)
{
    if ((uintptr_t)t->data % align == 0)
        return t->data;
    void *copy = base_arena_alloc(b->arena, t->bytes);
    if (copy == NULL)
        fail_tensor(b, BASE_NOMEM, t, "no memory for an aligned copy");
    else
        memcpy(copy, t->data, t->bytes);
    return copy;
}

/* An array that operations read; every one comes from a tensor of its own. */
static void note_bound(eng_binder *b, const void *at, size_t bytes)
{
    CHECK(b->bound_count < eng_files_count(b->files));
    b->bound[b->bound_count++] = (eng_piece){.at = (void *)at, .count = bytes, .size = 1};
}

static void bind_nvfp4(eng_binder *b, kn_weight *out, const char *name, const eng_tensor *packed)
{
    const eng_tensor *scale = take(b, name, ".weight_scale"),
                     *global = take(b, name, ".weight_global_scale");
    const eng_tensor *input =
        take(b, name, ".input_global_scale"); /* of activations: not needed, may be absent */
    if (scale == NULL || global == NULL) {
        fail_missing(b, name, scale == NULL ? ".weight_scale" : ".weight_global_scale");
        return;
    }
    if (out->cols % 16 != 0) {
        fail_tensor(b, BASE_FORMAT, packed, "%u inputs are not a multiple of the block of 16",
                    out->cols);
        return;
    }
    if (!check_dtype(b, packed, ENG_U8, ENG_I8) ||
        !check_shape(b, packed, out->rows, out->cols / 2) ||
        !check_dtype(b, scale, ENG_F8_E4M3, ENG_F8_E4M3) ||
        !check_shape(b, scale, out->rows, out->cols / 16) ||
        !check_dtype(b, global, ENG_F32, ENG_F32) ||
        (input != NULL && !check_dtype(b, input, ENG_F32, ENG_F32)))
        return;
    if (global->bytes != 4) {
        fail_tensor(b, BASE_FORMAT, global, "more than one value");
        return;
    }
    memcpy(&out->scale_global, global->data, 4);
    if (!(out->scale_global > 0 && isfinite(out->scale_global))) {
        fail_tensor(b, BASE_FORMAT, global, "%g is not a positive number",
                    (double)out->scale_global);
        return;
    }
    out->type = KN_NVFP4;
    out->data = packed->data;
    out->scale = scale->data;
    note_bound(b, &out->data, packed->bytes);
    note_bound(b, &out->scale, scale->bytes);
}

static void bind_mxfp8(eng_binder *b, kn_weight *out, const char *name, const eng_tensor *t)
{
    const eng_tensor *scale = take(b, name, ".weight_scale_inv");
    if (scale == NULL) {
        fail_missing(b, name, ".weight_scale_inv");
        return;
    }
    if (out->cols % 32 != 0) {
        fail_tensor(b, BASE_FORMAT, t, "%u inputs are not a multiple of the block of 32",
                    out->cols);
        return;
    }
    if (!check_dtype(b, t, ENG_F8_E4M3, ENG_F8_E4M3) || !check_shape(b, t, out->rows, out->cols) ||
        !check_dtype(b, scale, ENG_U8, ENG_U8) || !check_shape(b, scale, out->rows, out->cols / 32))
        return;
    out->type = KN_MXFP8;
    out->data = t->data;
    out->scale = scale->data;
    note_bound(b, &out->data, t->bytes);
    note_bound(b, &out->scale, scale->bytes);
}

static void bind_plain(eng_binder *b, kn_weight *out, const eng_tensor *t)
{
    if (t->dtype != ENG_BF16 && t->dtype != ENG_F32) {
        fail_tensor(b, BASE_UNSUPPORTED, t, "%s weights are not offered",
                    eng_dtype__name(t->dtype));
        return;
    }
    if (!check_shape(b, t, out->rows, out->cols))
        return;
    out->type = t->dtype == ENG_BF16 ? KN_BF16 : KN_F32;
    out->data = aligned(b, t, t->dtype == ENG_BF16 ? 2 : 4);
    note_bound(b, &out->data, t->bytes);
}

void eng_binder__weight(eng_binder *binder, kn_weight *out, uint32_t rows, uint32_t cols,
                        const char *fmt, ...)
{
    char name[NAME_BYTES];
    va_list args;
    va_start(args, fmt);
    format_name(name, fmt, args);
    va_end(args);
    *out = (kn_weight){.rows = rows, .cols = cols, .scale_global = 1};
    if (binder->code != BASE_OK)
        return;
    const eng_tensor *other = take(binder, name, ".weight_scale_2");
    if (other != NULL) {
        fail_tensor(binder, BASE_UNSUPPORTED, other,
                    "ModelOpt's NVFP4 is not offered, only nvfp4-pack-quantized");
        return;
    }
    const eng_tensor *packed = take(binder, name, ".weight_packed"),
                     *plain = take(binder, name, ".weight");
    if (packed != NULL && plain != NULL)
        fail_tensor(binder, BASE_FORMAT, packed, "there is a .weight too");
    else if (packed != NULL)
        bind_nvfp4(binder, out, name, packed);
    else if (plain == NULL)
        fail_missing(binder, name, ".weight");
    else if (plain->dtype == ENG_F8_E4M3)
        bind_mxfp8(binder, out, name, plain);
    else
        bind_plain(binder, out, plain);
    if (binder->code == BASE_OK && kn_pack_bytes(out) > 0)
        binder->packable[binder->packable_count++] = out;
}

static const float *bind_floats(eng_binder *binder, uint32_t rows, uint32_t cols, const char *name)
{
    if (binder->code != BASE_OK)
        return NULL;
    const eng_tensor *t = take(binder, name, "");
    if (t == NULL) {
        fail_missing(binder, name, "");
        return NULL;
    }
    if (t->dtype != ENG_BF16 && t->dtype != ENG_F32) {
        fail_tensor(binder, BASE_UNSUPPORTED, t, "%s is not offered here, only BF16 and F32",
                    eng_dtype__name(t->dtype));
        return NULL;
    }
    if (!check_shape(binder, t, rows, cols))
        return NULL;
    if (t->dtype == ENG_F32)
        return aligned(binder, t, sizeof(float));
    size_t count = (size_t)(rows > 0 ? rows : 1) * cols;
    float *out = base_arena_calloc(binder->arena, count, sizeof *out);
    if (out == NULL) {
        fail_tensor(binder, BASE_NOMEM, t, "no memory for a copy as floats");
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, (const uint8_t *)t->data + 2 * i, 2);
        out[i] = kn_bf16_to_f32(bits);
    }
    return out;
}

void eng_binder__floats(eng_binder *binder, const float **out, uint32_t rows, uint32_t cols,
                        const char *fmt, ...)
{
    char name[NAME_BYTES];
    va_list args;
    va_start(args, fmt);
    format_name(name, fmt, args);
    va_end(args);
    *out = bind_floats(binder, rows, cols, name);
    if (*out != NULL)
        note_bound(binder, out, (size_t)(rows > 0 ? rows : 1) * cols * sizeof(float));
}

const float *eng_binder__host_floats(eng_binder *binder, uint32_t rows, uint32_t cols,
                                     const char *name)
{
    return bind_floats(binder, rows, cols, name);
}

void eng_binder__skip(eng_binder *binder, const char *const *prefixes, uint32_t count)
{
    for (uint32_t i = 0; binder->taken != NULL && i < eng_files_count(binder->files); i++)
        for (uint32_t j = 0; j < count; j++)
            if (strncmp(eng_files_at(binder->files, i)->name, prefixes[j], strlen(prefixes[j])) ==
                0)
                binder->taken[i] = 1;
}

base_code eng_binder__finish(eng_binder *binder)
{
    const eng_tensor *first = NULL;
    uint32_t left = 0;
    for (uint32_t i = 0; binder->code == BASE_OK && i < eng_files_count(binder->files); i++)
        if (!binder->taken[i]) {
            first = first == NULL ? eng_files_at(binder->files, i) : first;
            left++;
        }
    if (left > 0)
        fail_tensor(binder, BASE_FORMAT, first,
                    "the configuration has no place for it (%u such tensors)", left);
    if (binder->code == BASE_OK && eng_files__gap(binder->files) != NULL)
        binder->code = base_fail(binder->err, BASE_FORMAT, "%s", eng_files__gap(binder->files));
    return binder->code;
}

/* ---- rope ---- */

typedef struct rope_job {
    float *cos, *sin;
    const float *inverse; /* [half] */
    uint32_t half;
    uint32_t first, count; /* positions */
} rope_job;

#define ROPE_PIECE 1024u
#define ROPE_PIECES 32u /* at a time */

static void fill_rope(void *ctx, uint32_t piece)
{
    const rope_job *job = ctx;
    uint32_t end = (uint32_t)base_min((size_t)(piece + 1) * ROPE_PIECE, job->count);
    for (uint32_t p = piece * ROPE_PIECE; p < end; p++)
        for (uint32_t i = 0; i < job->half; i++) {
            /* The angle is a product in float, as in the engines that the models were trained with:
             * off by up to 0.03 rad near position 10^6, and that error is part of the model. */
            float angle = (float)(job->first + p) * job->inverse[i];
            job->cos[(size_t)p * job->half + i] = (float)cos((double)angle);
            job->sin[(size_t)p * job->half + i] = (float)sin((double)angle);
        }
}

base_code eng_rope__create(kn_rope *out, eng_memory *memory, kn_device *device, uint32_t rotary_dim,
                           float theta, uint32_t count, base_err *err)
{
    const uint32_t half = rotary_dim / 2, most = ROPE_PIECES * ROPE_PIECE;
    const size_t row = half * sizeof(float);
    float inverse[256], *cos, *sin;
    *out = (kn_rope){.rotary_dim = rotary_dim};
    *memory = (eng_memory){0};
    if (half == 0)
        return BASE_OK;
    CHECK(half <= sizeof inverse / sizeof *inverse);
    float *room = malloc(base_min(count, most) * row * 2);
    if (room == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for rotary angles of %u positions", count);
    const eng_piece pieces[] = {{&cos, count, row}, {&sin, count, row}};
    base_code code = eng_memory_take(memory, device, pieces, 2, err);
    for (uint32_t i = 0; i < half; i++)
        inverse[i] = (float)pow((double)theta, -2.0 * i / rotary_dim);
    for (uint32_t first = 0; code == BASE_OK && first < count; first += most) {
        const uint32_t n = (uint32_t)base_min(most, count - first);
        rope_job job = {.cos = room,
                        .sin = room + (size_t)n * half,
                        .inverse = inverse,
                        .half = half,
                        .first = first,
                        .count = n};
        kn_device_parallel(device, fill_rope, &job, (n + ROPE_PIECE - 1) / ROPE_PIECE);
        device->backend->upload(device, cos + (size_t)first * half, job.cos, n * row);
        device->backend->upload(device, sin + (size_t)first * half, job.sin, n * row);
    }
    free(room);
    if (code == BASE_OK) {
        out->cos = cos;
        out->sin = sin;
    }
    return code;
}

/* ---- fingerprint ---- */

/* A file's length and bytes; an absent one counts as length 0. */
static base_code digest_file(XXH3_state_t *state, const char *dir, const char *name, base_err *err)
{
    char path[PATH_MAX], chunk[65536];
    uint64_t length = 0;
    size_t n;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "rbe");
    if (f == NULL && errno != ENOENT)
        return base_fail(err, BASE_IO, "cannot open %.140s: %s", path, strerror(errno));
    while (f != NULL && (n = fread(chunk, 1, sizeof chunk, f)) > 0) {
        XXH3_128bits_update(state, chunk, n);
        length += n;
    }
    bool failed = f != NULL && ferror(f);
    if (f != NULL)
        fclose(f);
    if (failed)
        return base_fail(err, BASE_IO, "cannot read %.140s", path);
    XXH3_128bits_update(state, &length, sizeof length);
    return BASE_OK;
}

static base_code make_fingerprint(eng_model *m, base_err *err)
{
    static const char *const FILES[] = {"config.json", "tokenizer.json", "chat_template.jinja"};
    base_code code = BASE_OK;
    XXH128_canonical_t canonical;
    XXH3_state_t *state = XXH3_createState();
    if (state == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for a digest");
    XXH3_128bits_reset(state);
    for (size_t i = 0; i < sizeof FILES / sizeof *FILES && code == BASE_OK; i++)
        code = digest_file(state, m->dir, FILES[i], err);
    if (code == BASE_OK) {
        eng_files__digest(m->files, state);
        XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
        for (size_t i = 0; i < sizeof canonical.digest; i++)
            snprintf(m->fingerprint + 2 * i, 3, "%02x", canonical.digest[i]);
    }
    XXH3_freeState(state);
    return code;
}

/* ---- random shapes ---- */

static const char *const RANDOM_FILES[] = {"model.safetensors", "tokenizer.json",
                                           "generation_config.json", "config.json"};

static base_code make_random(eng_model *m, const char *spec, char name[32], base_err *err)
{
    char path[] = "/tmp/whimbrel-XXXXXX";
    uint32_t layers;
    uint64_t seed;
    base_code code = eng_random__parse(spec, name, &layers, &seed, err);
    if (code != BASE_OK)
        return code;
    if (mkdtemp(path) == NULL)
        return base_fail(err, BASE_IO, "cannot create %s: %s", path, strerror(errno));
    m->is_random = true;
    if ((m->dir = strdup(path)) == NULL) {
        rmdir(path);
        return base_fail(err, BASE_NOMEM, "out of memory");
    }
    return eng_random__write(m->dir, name, layers, seed, false, err);
}

/* The mapping keeps the tensors' bytes and a descriptor the tokenizer's, so the folder can go as
 * soon as it is read: a process that is killed leaves nothing. */
static void remove_random(eng_model *m)
{
    char path[PATH_MAX];
    for (size_t i = 0; i < sizeof RANDOM_FILES / sizeof *RANDOM_FILES; i++) {
        snprintf(path, sizeof path, "%s/%s", m->dir, RANDOM_FILES[i]);
        unlink(path);
    }
    rmdir(m->dir);
}

static base_code keep_tokenizer(eng_model *m, base_err *err)
{
    m->tokenizer_fd = open(m->tokenizer, O_RDONLY | O_CLOEXEC);
    if (m->tokenizer_fd < 0)
        return base_fail(err, BASE_IO, "cannot open %.140s: %s", m->tokenizer, strerror(errno));
    snprintf(m->tokenizer, sizeof m->tokenizer, "/proc/self/fd/%d", m->tokenizer_fd);
    return BASE_OK;
}

/* ---- load ---- */

static base_code parse_kv(kn_kv_type *out, const char *kv, base_err *err)
{
    static const char *const NAMES[] = {
        [KN_KV_NVFP4] = "nvfp4", [KN_KV_FP8] = "fp8", [KN_KV_BF16] = "bf16", [KN_KV_F32] = "f32"};
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (strcmp(kv != NULL ? kv : "nvfp4", NAMES[i]) == 0) {
            *out = (kn_kv_type)i;
            return BASE_OK;
        }
    return base_fail(err, BASE_UNSUPPORTED, "page type \"%.32s\" is none of nvfp4, fp8, bf16, f32",
                     kv);
}

static const char *folder_name(const char *dir, char buffer[PATH_MAX])
{
    if (realpath(dir, buffer) == NULL)
        snprintf(buffer, PATH_MAX, "%s", dir);
    const char *slash = strrchr(buffer, '/');
    return slash != NULL && slash[1] != '\0' ? slash + 1 : buffer;
}

/* The widest row that an operation of target or draft sees; the device sizes its scratch by it. */
static uint32_t width_of(const eng_model_config *c)
{
    size_t width = base_max(c->hidden, (size_t)c->q_heads * c->head_dim);
    width = base_max(width, c->dense_inner);
    width = base_max(width, (size_t)c->experts_topk * c->expert_inner);
    width = base_max(width, c->shared_inner);
    width = base_max(width, c->experts);
    width = base_max(width, (size_t)c->index_heads * c->index_dim);
    return (uint32_t)width;
}

static base_code make_scratch(eng_model *m, base_err *err)
{
    const eng_model_config *c = &m->file.model;
    const size_t rows = m->rows_max, q = (size_t)c->q_heads * c->head_dim;
    eng_m3_scratch *s = &m->scratch;
    const eng_piece pieces[] = {
        {&s->x, rows * c->hidden, sizeof(float)},
        {&s->q, rows * q, sizeof(float)},
        {&s->out, rows * q, sizeof(float)},
        {&s->index_q, rows * c->index_heads * c->index_dim, sizeof(float)},
        {&s->blocks, rows * c->index_heads * c->topk_blocks, sizeof(int32_t)},
        {&s->margin, rows * c->index_heads, sizeof(float)},
        {&s->route_ids, rows * c->experts_topk, sizeof(int32_t)},
        {&s->route_weights, rows * c->experts_topk, sizeof(float)},
        {&m->logits, eng_memory_is_shared(m->device) ? 0 : base_min(rows, HEAD_ROWS),
         c->vocab * sizeof(float)},
    };
    return eng_memory_take(&m->step_memory, m->device, pieces, sizeof pieces / sizeof *pieces, err);
}

/* Record order: layer by layer K heads, V heads, index. */
static base_code make_layout(eng_model *m, base_err *err)
{
    const eng_model_config *c = &m->file.model;
    uint32_t row = kn_kv_row_bytes(m->kv_type, c->head_dim),
             index_row = kn_kv_row_bytes(m->kv_type, c->index_dim);
    uint32_t count = 0;
    m->planes = calloc((size_t)c->layers * (2 * c->kv_heads + 1), sizeof *m->planes);
    if (m->planes == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for a page layout");
    for (uint16_t l = 0; l < c->layers; l++) {
        for (uint16_t h = 0; h < c->kv_heads; h++)
            m->planes[count++] =
                (kv_plane){.type = KV_PLANE_K, .layer = l, .head = h, .row_bytes = row};
        for (uint16_t h = 0; h < c->kv_heads; h++)
            m->planes[count++] =
                (kv_plane){.type = KV_PLANE_V, .layer = l, .head = h, .row_bytes = row};
        if (c->sparse[l])
            m->planes[count++] =
                (kv_plane){.type = KV_PLANE_INDEX, .layer = l, .row_bytes = index_row};
    }
    return kv_layout_init(&m->layout, m->planes, count, err);
}

static base_code check_options(eng_model *m, const eng_model_options *options, base_err *err)
{
    eng_model_config *c = &m->file.model;
    if (options->rows_max == 0)
        return base_fail(err, BASE_INVALID, "rows_max must be at least 1");
    if (options->context_max > c->context_max)
        return base_fail_param(err, BASE_INVALID, "model.context_max",
                               "context_max %u exceeds the model's max_position_embeddings %u",
                               options->context_max, c->context_max);
    m->rows_max = options->rows_max;
    m->context_max = options->context_max != 0 ? options->context_max : c->context_max;
    m->width_max = width_of(c);
    m->packed_bytes_max = options->packed_bytes_max;
    if (options->packed != NULL && !m->is_random && (m->packed = strdup(options->packed)) == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory");
    return parse_kv(&m->kv_type, options->kv, err);
}

static base_code load_tensors(eng_model *m, base_err *err)
{
    eng_binder binder;
    base_code code = eng_files_open(&m->files, m->dir, err);
    if (code != BASE_OK)
        return code;
    if ((m->arena = base_arena_create(1 << 16, SIZE_MAX)) == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory");
    code = eng_binder__init(&binder, m->files, m->arena, err);
    if (code == BASE_OK)
        code = eng_m3__bind(&m->m3, &binder, &m->file.model);
    if (code == BASE_OK)
        code = eng_binder__finish(&binder);
    m->packable = binder.packable;
    m->packable_count = binder.packable_count;
    m->bound = binder.bound;
    m->bound_count = binder.bound_count;
    eng_binder__deinit(&binder);
    return code;
}

eng_repack_options eng_model__packed(const eng_model *model, const char *part,
                                     const char *fingerprint, const eng_files *files)
{
    eng_repack_options options = {.bytes_max = model->packed_bytes_max};
    if (model->packed != NULL)
        snprintf(options.path, sizeof options.path, "%s/%s.packed", model->packed, part);
    snprintf(options.key, sizeof options.key, "%s %016llx", fingerprint,
             (unsigned long long)eng_files__stamp(files));
    return options;
}

eng_repack *eng_model__repack(const eng_model *model)
{
    return model->pack;
}

/* The device of the backend that is asked for. */
static base_code open_device(eng_model *m, const eng_model_options *options,
                             kn_device_options *device, base_err *err)
{
    static const char *const MODULES[] = {"cuda", "hip"};
    const char *name =
        options->kernels == NULL && options->backend != NULL ? options->backend : "cpu";
    if (strcmp(name, "cpu") == 0)
        return kn_device_create(&m->device, device, err);
    if (strcmp(name, "auto") != 0) {
        base_code code = kn_module_open(&device->backend, name, options->modules, err);
        return code == BASE_OK ? kn_device_create(&m->device, device, err) : code;
    }
    for (size_t i = 0; i < sizeof MODULES / sizeof *MODULES; i++) {
        base_err why = BASE_ERR_INIT;
        if (kn_module_open(&device->backend, MODULES[i], options->modules, &why) == BASE_OK &&
            kn_device_create(&m->device, device, &why) == BASE_OK)
            return BASE_OK;
        base_log(BASE_LOG_DEBUG, "backend_passed_over reason=\"%s\"", why.text);
    }
    device->backend = NULL;
    return kn_device_create(&m->device, device, err);
}

static base_code load(eng_model *m, const char *spec, const eng_model_options *options,
                      base_err *err)
{
    char name[32], buffer[PATH_MAX];
    base_code code;
    if (eng_random__is(spec)) {
        code = make_random(m, spec, name, err);
    } else {
        m->dir = strdup(spec);
        code = m->dir != NULL ? BASE_OK : base_fail(err, BASE_NOMEM, "out of memory");
    }
    if (code != BASE_OK)
        return code;
    snprintf(m->tokenizer, sizeof m->tokenizer, "%s/tokenizer.json", m->dir);
    code =
        eng_config__read(&m->file, m->dir, m->is_random ? name : folder_name(m->dir, buffer), err);
    if (code == BASE_OK)
        code = check_options(m, options, err);
    if (code == BASE_OK)
        code = load_tensors(m, err);
    if (code == BASE_OK)
        code = make_layout(m, err);
    if (options->look)
        return code;
    if (code == BASE_OK)
        code = make_fingerprint(m, err);
    if (code == BASE_OK) {
        kn_device_options device = {.backend = options->kernels,
                                    .variant = options->variant != NULL ? options->variant : "auto",
                                    .threads = options->threads,
                                    .rows_max = m->rows_max,
                                    .width_max = m->width_max,
                                    .context_max = m->context_max};
        code = open_device(m, options, &device, err);
    }
    if (code == BASE_OK) {
        const eng_repack_options kept = eng_model__packed(m, "target", m->fingerprint, m->files);
        code = eng_repack__create(&m->pack, m->packable, m->packable_count, &kept, m->device, err);
    }
    if (code == BASE_OK)
        code = eng_memory_move(&m->weights, m->device, m->bound, m->bound_count, err);
    if (code == BASE_OK && (m->pack != NULL || m->weights.block != NULL))
        eng_files__release(m->files);
    if (code == BASE_OK)
        code = eng_rope__create(&m->rope, &m->rope_memory, m->device, m->file.model.rotary_dim,
                                m->file.model.rope_theta, m->context_max + ENG_ROPE_SLACK, err);
    if (code == BASE_OK)
        code = make_scratch(m, err);
    return code;
}

base_code eng_model_load(eng_model **out, const char *spec, const eng_model_options *options,
                         base_err *err)
{
    *out = NULL;
    eng_model *m = calloc(1, sizeof *m);
    if (m == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory");
    m->tokenizer_fd = -1;
    base_code code = load(m, spec, options, err);
    if (code == BASE_OK && m->is_random)
        code = keep_tokenizer(m, err);
    if (m->is_random && m->dir != NULL)
        remove_random(m);
    if (code != BASE_OK) {
        char buffer[PATH_MAX];
        /* The folder's name is enough to find it, and leaves room for a tensor's name and the
         * reason. */
        base_wrap(err, "%.32s", m->is_random ? spec : folder_name(spec, buffer));
        eng_model_destroy(m);
        return code;
    }
    *out = m;
    return BASE_OK;
}

void eng_model_destroy(eng_model *model)
{
    if (model == NULL)
        return;
    eng_memory_free(&model->step_memory);
    eng_memory_free(&model->rope_memory);
    eng_memory_free(&model->weights);
    kn_device_destroy(model->device);
    eng_repack__destroy(model->pack);
    eng_files_close(model->files);
    base_arena_destroy(model->arena);
    free(model->planes);
    free(model->packed);
    free(model->room.x);
    if (model->tokenizer_fd >= 0)
        close(model->tokenizer_fd);
    free(model->dir);
    free(model);
}

/* ---- getters ---- */

const eng_model_config *eng_model_get_config(const eng_model *model)
{
    return &model->file.model;
}

const char *eng_model_dir(const eng_model *model)
{
    return model->is_random ? NULL : model->dir;
}

const char *eng_model_tokenizer_path(const eng_model *model)
{
    return model->tokenizer;
}

const int32_t *eng_model_end_tokens(const eng_model *model, uint32_t *count)
{
    *count = model->file.end_token_count;
    return model->file.end_tokens;
}

const char *eng_model_fingerprint(const eng_model *model)
{
    return model->fingerprint;
}

uint64_t eng_model_weight_bytes(const eng_model *model)
{
    return eng_files_bytes(model->files);
}

kn_device *eng_model_device(const eng_model *model)
{
    return model->device;
}

const kv_layout *eng_model_layout(const eng_model *model)
{
    return &model->layout;
}

kn_kv_shape eng_model_kv_shape(const eng_model *model, uint32_t page_count)
{
    const eng_model_config *c = &model->file.model;
    kn_kv_shape shape = {.type = model->kv_type,
                         .layers = c->layers,
                         .kv_heads = c->kv_heads,
                         .head_dim = c->head_dim,
                         .index_dim = c->index_dim,
                         .page_count = page_count};
    memcpy(shape.has_index, c->sparse, sizeof shape.has_index);
    return shape;
}

const kn_weight *eng_model_embedding(const eng_model *model)
{
    return &model->m3.embedding;
}

const kn_weight *eng_model_head(const eng_model *model)
{
    return &model->m3.head;
}

const kn_rope *eng_model_rope(const eng_model *model)
{
    return &model->rope;
}

uint32_t eng_model__rows_max(const eng_model *model)
{
    return model->rows_max;
}

uint32_t eng_model__width_max(const eng_model *model)
{
    return model->width_max;
}

uint32_t eng_model__context_max(const eng_model *model)
{
    return model->context_max;
}

const eng_files *eng_model__files(const eng_model *model)
{
    return model->files;
}

/* ---- a step ---- */

/* Names the graph of these layers: what of a step is neither its rows nor the model's own. */
static uint64_t graph_key(const float *x, uint32_t first, uint32_t end,
                          const uint32_t *feature_layers, uint32_t feature_count,
                          const float *features)
{
    struct {
        const float *x, *features;
        uint32_t first, end, count, layers[ENG_FEATURES_MAX];
    } key;
    CHECK(feature_count <= ENG_FEATURES_MAX);
    memset(&key, 0, sizeof key);
    key.x = x;
    key.features = features;
    key.first = first;
    key.end = end;
    key.count = feature_count;
    for (uint32_t i = 0; i < feature_count; i++)
        key.layers[i] = feature_layers[i];
    return XXH3_64bits(&key, sizeof key);
}

static void run_layers(eng_model *m, const eng_m3_scratch *scratch, kn_kv *kv, const kn_rows *rows,
                       uint32_t first, uint32_t end, const uint32_t *feature_layers,
                       uint32_t feature_count, float *features, const eng_model_probe *probe)
{
    const kn_backend *backend = m->device->backend;
    if (features == NULL)
        feature_count = 0;
    CHECK(rows->rows >= 1);
    CHECK(rows->rows <= m->rows_max);
    backend->rows_begin(m->device, rows);
    /* A probe reads between the operations, which a graph does not allow. */
    if (probe == NULL &&
        !backend->graph_begin(
            m->device, graph_key(scratch->x, first, end, feature_layers, feature_count, features)))
        return;
    eng_m3__layers(&m->m3, &m->file.model, m->device, &m->rope, scratch, kv, rows, first, end,
                   feature_layers, feature_count, features, probe);
    if (probe == NULL)
        backend->graph_end(m->device);
}

/* Shows the caller's probe a layer where the host can read it. */
static void show_layer(void *ctx, uint32_t layer, const float *x, const int32_t *blocks,
                       const float *margin, const int32_t *route_ids, const float *route_weights)
{
    const eng_model *m = ctx;
    const eng_model_config *c = &m->file.model;
    const eng_m3_scratch *room = &m->room;
    const size_t rows = m->probe_rows, heads = rows * c->index_heads,
                 routes = rows * c->experts_topk;
    x = eng_memory_read(m->device, room->x, x, rows * c->hidden * sizeof *x);
    if (blocks != NULL) {
        blocks = eng_memory_read(m->device, room->blocks, blocks,
                                 heads * c->topk_blocks * sizeof *blocks);
        margin = eng_memory_read(m->device, room->margin, margin, heads * sizeof *margin);
    }
    if (route_ids != NULL) {
        route_ids =
            eng_memory_read(m->device, room->route_ids, route_ids, routes * sizeof *route_ids);
        route_weights = eng_memory_read(m->device, room->route_weights, route_weights,
                                        routes * sizeof *route_weights);
    }
    m->probe.layer(m->probe.ctx, layer, x, blocks, margin, route_ids, route_weights);
}

static void run_head(eng_model *m, const uint32_t *pick, uint32_t picks, float *logits)
{
    const eng_model_config *c = &m->file.model;
    if (m->logits == NULL) {
        eng_m3__head(&m->m3, c, m->device, &m->scratch, pick, picks, logits);
        return;
    }
    for (uint32_t at = 0, n; at < picks; at += n) {
        n = (uint32_t)base_min(picks - at, base_min(m->rows_max, HEAD_ROWS));
        eng_m3__head(&m->m3, c, m->device, &m->scratch, pick + at, n, m->logits);
        m->device->backend->download(m->device, logits + (size_t)at * c->vocab, m->logits,
                                     (size_t)n * c->vocab * sizeof *logits);
    }
}

void eng_model_forward(eng_model *model, kn_kv *kv, const kn_rows *rows, const uint32_t *pick,
                       uint32_t picks, float *logits, const uint32_t *feature_layers,
                       uint32_t feature_count, float *features)
{
    const eng_model_probe show = {.layer = show_layer, .ctx = model};
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    model->probe_rows = rows->rows;
    run_layers(model, &model->scratch, kv, rows, 0, model->file.model.layers, feature_layers,
               feature_count, features, model->has_probe ? &show : NULL);
    run_head(model, pick, picks, logits);
}

void eng_model_forward_layers(eng_model *model, kn_kv *kv, const kn_rows *rows, float *x,
                              uint32_t first, uint32_t end, const uint32_t *feature_layers,
                              uint32_t feature_count, float *features)
{
    DCHECK(base_thread_is(BASE_THREAD_ENGINE));
    CHECK(end <= model->file.model.layers);
    eng_m3_scratch scratch = model->scratch;
    scratch.x = x;
    run_layers(model, &scratch, kv, rows, first, end, feature_layers, feature_count, features,
               NULL);
}

/* Room on the host for one step of what a probe sees, in one block that begins with x. */
static base_code make_room(eng_model *m, base_err *err)
{
    const eng_model_config *c = &m->file.model;
    const size_t rows = m->rows_max, x = rows * c->hidden, heads = rows * c->index_heads,
                 routes = rows * c->experts_topk;
    if (m->room.x != NULL || eng_memory_is_shared(m->device))
        return BASE_OK;
    float *block = calloc(x + heads * (c->topk_blocks + 1) + 2 * routes, sizeof *block);
    if (block == NULL)
        return base_fail(err, BASE_NOMEM, "no memory to look at steps of %u rows", m->rows_max);
    m->room = (eng_m3_scratch){.x = block, .margin = block + x};
    m->room.route_weights = m->room.margin + heads;
    m->room.route_ids = (int32_t *)(m->room.route_weights + routes);
    m->room.blocks = m->room.route_ids + routes;
    return BASE_OK;
}

base_code eng_model_set_probe(eng_model *model, const eng_model_probe *probe, base_err *err)
{
    base_code code = probe != NULL ? make_room(model, err) : BASE_OK;
    model->has_probe = probe != NULL && code == BASE_OK;
    if (model->has_probe)
        model->probe = *probe;
    return code;
}
