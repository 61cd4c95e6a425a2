#include "tests/numerics/support.h"

#include "engine/base/json.h"
#include "engine/base/rand.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const uint32_t chunk_sizes[8] = {1, 2, 3, 7, 8, 17, 64, 129};

/* ---- random inputs ---- */

float random_value(uint64_t seed, uint64_t index)
{
    return (float)(2.0 * base_rand_unit(base_rand(seed, 0, index).v[0]) - 1.0);
}

/* What the tests take is given back when the process ends; the list keeps leak checkers quiet until
 * then. */
typedef struct block {
    _Alignas(64) struct block *next;
} block;

static block *taken;

void *zeroed(size_t bytes)
{
    const size_t size = (sizeof(block) + bytes + 127) & ~(size_t)63;
    block *p = aligned_alloc(64, size);
    cr_assert_not_null(p);
    memset(p, 0, size);
    p->next = taken;
    taken = p;
    return p + 1;
}

/* Gives back everything taken since `mark`, a former value of `taken`. */
static void release_to(block *mark)
{
    while (taken != mark) {
        block *next = taken->next;
        free(taken);
        taken = next;
    }
}

float *random_floats(uint64_t seed, size_t count, float size)
{
    float *p = zeroed(count * sizeof *p);
    for (size_t i = 0; i < count; i++)
        p[i] = random_value(seed, i) * size;
    return p;
}

kn_weight random_weight(uint64_t seed, kn_type type, uint32_t rows, uint32_t cols)
{
    const size_t count = (size_t)rows * cols;
    kn_weight w = {.type = type, .rows = rows, .cols = cols, .scale_global = 1.0f};
    switch (type) {
    case KN_F32:
        w.data = random_floats(seed, count, 0.1f);
        break;
    case KN_BF16: {
        uint16_t *p = zeroed(count * sizeof *p);
        for (size_t i = 0; i < count; i++)
            p[i] = kn_f32_to_bf16(random_value(seed, i) * 0.1f);
        w.data = p;
        break;
    }
    case KN_MXFP8: {
        uint8_t *p = zeroed(count);
        uint8_t *s = zeroed(count / 32);
        for (size_t i = 0; i < count; i++) {
            p[i] = (uint8_t)base_rand(seed, 1, i).v[0];
            if ((p[i] & 0x7f) == 0x7f) /* NaN: no checkpoint has it */
                p[i] = 0x80;
        }
        for (size_t i = 0; i < count / 32; i++)
            s[i] = (uint8_t)(110 + base_rand(seed, 2, i).v[0] % 9);
        w.data = p;
        w.scale = s;
        break;
    }
    case KN_NVFP4: {
        uint8_t *p = zeroed(count / 2);
        uint8_t *s = zeroed(count / 16);
        for (size_t i = 0; i < count / 2; i++)
            p[i] = (uint8_t)base_rand(seed, 1, i).v[0];
        for (size_t i = 0; i < count / 16; i++)
            s[i] = (uint8_t)(base_rand(seed, 2, i).v[0] %
                             0x7f); /* all finite positive scales, 0 and subnormals too */
        w.data = p;
        w.scale = s;
        w.scale_global = 1237.5f;
        break;
    }
    }
    return w;
}

kn_weight absolute_weight(const kn_weight *w)
{
    const size_t count = (size_t)w->rows * w->cols;
    const size_t bytes = w->type == KN_F32     ? count * 4
                         : w->type == KN_BF16  ? count * 2
                         : w->type == KN_MXFP8 ? count
                                               : count / 2;
    uint8_t *p = zeroed(bytes);
    memcpy(p, w->data, bytes);
    for (size_t i = 0; i < bytes; i++) {
        if (w->type == KN_NVFP4)
            p[i] &= 0x77;
        else if (w->type == KN_MXFP8 ||
                 i % (w->type == KN_F32 ? 4 : 2) == (w->type == KN_F32 ? 3u : 1u))
            p[i] &= 0x7f;
    }
    kn_weight absolute = *w;
    absolute.data = p;
    absolute.tiles = NULL;
    return absolute;
}

kn_weight packed_weight(const kn_weight *w)
{
    kn_weight packed = *w;
    const size_t bytes = kn_pack_bytes(w);
    if (bytes) {
        cr_assert_eq(bytes % 64, 0);
        void *tiles = zeroed(bytes);
        kn_pack(tiles, w);
        packed.tiles = tiles;
    }
    return packed;
}

/* ---- devices ---- */

kn_device *open_device(const char *variant, uint32_t threads)
{
    const kn_device_options options = {.variant = variant,
                                       .threads = threads,
                                       .rows_max = ROWS_MAX,
                                       .width_max = WIDTH_MAX,
                                       .context_max = CONTEXT_MAX};
    base_err err = BASE_ERR_INIT;
    kn_device *device = NULL;
    if (kn_device_create(&device, &options, &err) == BASE_UNSUPPORTED)
        return NULL;
    cr_assert_not_null(device, "%s", err.text);
    return device;
}

uint32_t vector_variants(const char *names[2])
{
    static const char *const all[] = {"avx2", "avx512"};
    uint32_t count = 0;
    for (int i = 0; i < 2; i++) {
        kn_device *device = open_device(all[i], 1);
        if (device)
            names[count++] = all[i];
        kn_device_destroy(device);
    }
    if (!count)
        cr_skip_test("this processor has neither AVX2 nor AVX-512");
    return count;
}

/* ---- pages ---- */

void store_row(kn_kv_type type, uint8_t *dst, const float *x, uint32_t dims)
{
    for (uint32_t i = 0; i < dims; i++) {
        const uint16_t code = kn_f32_to_bf16(x[i]);
        const float b = kn_bf16_to_f32(code);
        switch (type) {
        case KN_KV_F32:
            memcpy(dst + 4 * i, &x[i], 4);
            break;
        case KN_KV_BF16:
            memcpy(dst + 2 * i, &code, 2);
            break;
        case KN_KV_FP8:
            dst[i] = kn_f32_to_e4m3(b);
            break;
        case KN_KV_NVFP4:
            if (i % 16 == 0) {
                float group[16];
                for (uint32_t j = 0; j < 16; j++)
                    group[j] = kn_bf16_to_f32(kn_f32_to_bf16(x[i + j]));
                kn_nvfp4_quantize16(dst + i / 2, dst + dims / 2 + i / 16, group);
            }
            break;
        }
    }
}

/* Calls `fn` for every plane; `at` is where the plane stands in an image of all pages. */
static void each_plane(kn_kv *kv, uint8_t *image,
                       void (*fn)(kn_kv *kv, uint8_t *at, uint32_t page, uint32_t layer,
                                  kn_plane_kind kind, uint32_t head))
{
    const kn_kv_shape *shape = kn_kv_get_shape(kv);
    const size_t row = kn_kv_row_bytes(shape->type, shape->head_dim);
    const size_t index_row = kn_kv_row_bytes(shape->type, shape->index_dim);
    for (uint32_t page = 0; page < shape->page_count; page++)
        for (uint32_t layer = 0; layer < shape->layers; layer++) {
            for (uint32_t head = 0; head < shape->kv_heads; head++)
                for (kn_plane_kind kind = KN_PLANE_K; kind <= KN_PLANE_V; kind++) {
                    fn(kv, image, page, layer, kind, head);
                    image += row * KN_PAGE_TOKENS;
                }
            if (shape->has_index[layer]) {
                fn(kv, image, page, layer, KN_PLANE_INDEX, 0);
                image += index_row * KN_PAGE_TOKENS;
            }
        }
}

static uint64_t plane_seed;
static float plane_size;

static void make_plane(kn_kv *kv, uint8_t *at, uint32_t page, uint32_t layer, kn_plane_kind kind,
                       uint32_t head)
{
    const kn_kv_shape *shape = kn_kv_get_shape(kv);
    const uint32_t dims = kind == KN_PLANE_INDEX ? shape->index_dim : shape->head_dim;
    const uint32_t bytes = kn_kv_row_bytes(shape->type, dims);
    const uint64_t key = plane_seed * 1000003 + ((page * 131u + layer) * 7u + kind) * 67u + head;
    block *mark = taken;
    float *x = random_floats(key, (size_t)dims * KN_PAGE_TOKENS, plane_size);
    for (uint32_t t = 0; t < KN_PAGE_TOKENS; t++)
        store_row(shape->type, at + (size_t)t * bytes, x + (size_t)t * dims, dims);
    release_to(mark);
}

static void put_plane(kn_kv *kv, uint8_t *at, uint32_t page, uint32_t layer, kn_plane_kind kind,
                      uint32_t head)
{
    kn_kv_copy_in(kv, at, page, layer, kind, head, KN_PAGE_TOKENS);
}

void fill_pages(kn_kv *kv, uint64_t seed, float size)
{
    /* A test fills many page memories alike: the last image is kept. */
    static uint8_t *image;
    static kn_kv_shape image_shape;
    const kn_kv_shape *shape = kn_kv_get_shape(kv);
    if (!image || seed != plane_seed || size != plane_size ||
        memcmp(&image_shape, shape, sizeof *shape) != 0) {
        image = zeroed(kn_kv_page_bytes(shape) * shape->page_count);
        image_shape = *shape;
        plane_seed = seed;
        plane_size = size;
        each_plane(kv, image, make_plane);
    }
    each_plane(kv, image, put_plane);
}

kn_kv *open_pages(kn_device *device, const kn_kv_shape *shape)
{
    base_err err = BASE_ERR_INIT;
    kn_kv *kv = NULL;
    cr_assert_eq(kn_kv_create(&kv, device, shape, &err), BASE_OK, "%s", err.text);
    return kv;
}

/* ---- comparisons ---- */

void same_bits(const void *a, const void *b, size_t count, const char *what)
{
    const uint32_t *x = a;
    const uint32_t *y = b;
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(x[i], y[i], "%s: word %zu of %zu is %08x and %08x", what, i, count, x[i],
                     y[i]);
}

void within(const float *a, const float *b, size_t count, const float *bound, size_t width,
            const char *what)
{
    for (size_t i = 0; i < count; i++)
        cr_assert(fabs((double)a[i] - b[i]) <= bound[i / width],
                  "%s: value %zu of row %zu is %.9g, not %.9g (+-%.3g)", what, i % width, i / width,
                  a[i], b[i], bound[i / width]);
}

void within_rows(const float *a, const float *b, size_t rows, size_t width, float share,
                 const char *what)
{
    for (size_t r = 0; r < rows; r++) {
        float largest = 0.0f;
        for (size_t i = 0; i < width; i++)
            largest = fmaxf(largest, fabsf(b[r * width + i]));
        const float bound = share * largest;
        within(a + r * width, b + r * width, width, &bound, width, what);
    }
}

/* ---- vectors ---- */

struct tensors {
    char *bytes;
    size_t length;
    size_t header; /* length of the JSON header, which stands at byte 8 */
};

bool have_tensors(const char *name)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", VECTORS, name);
    return access(path, R_OK) == 0;
}

tensors *open_tensors(const char *name)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", VECTORS, name);
    FILE *f = fopen(path, "rb");
    cr_assert_not_null(f, "%s cannot be opened", path);
    tensors *file = zeroed(sizeof *file);
    fseek(f, 0, SEEK_END);
    file->length = (size_t)ftell(f);
    rewind(f);
    file->bytes = zeroed(file->length);
    cr_assert_eq(fread(file->bytes, 1, file->length, f), file->length);
    fclose(f);
    uint64_t header;
    memcpy(&header, file->bytes, 8);
    cr_assert(header < file->length - 8, "%s: header of %zu bytes", path, (size_t)header);
    file->header = header;
    return file;
}

/* Reads the value of one tensor's object. */
static tensor read_entry(const tensors *file, base_json *json)
{
    tensor t = {.count = 1, .shape = {1, 1, 1, 1}};
    size_t begin = 0;
    char key[32] = "";
    for (uint32_t depth = 0, at = 0;;) {
        const base_json_kind kind = base_json_next(json);
        if (kind == BASE_JSON_OBJECT_BEGIN || kind == BASE_JSON_ARRAY_BEGIN) {
            depth++;
            at = 0;
        } else if (kind == BASE_JSON_OBJECT_END || kind == BASE_JSON_ARRAY_END) {
            if (--depth == 0)
                break;
        } else if (kind == BASE_JSON_KEY) {
            snprintf(key, sizeof key, "%.*s", (int)json->raw_length - 2, json->raw + 1);
        } else if (kind == BASE_JSON_STRING) {
            char *dtype = zeroed(json->raw_length);
            memcpy(dtype, json->raw + 1, json->raw_length - 2);
            t.dtype = dtype;
        } else if (kind == BASE_JSON_NUMBER) {
            const uint64_t value = strtoull(json->raw, NULL, 10);
            if (strcmp(key, "shape") == 0) {
                cr_assert(at < 4);
                t.shape[at] = (uint32_t)value;
                t.count *= value;
            } else if (at == 0) {
                begin = value;
            }
            at++;
        } else {
            cr_assert_fail("bad header");
        }
    }
    cr_assert(8 + file->header + begin <= file->length);
    t.data = file->bytes + 8 + file->header + begin;
    return t;
}

tensor get_tensor(const tensors *file, const char *fmt, ...)
{
    char name[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    base_json json;
    base_json_init(&json, file->bytes + 8, file->header, 8);
    cr_assert_eq(base_json_next(&json), BASE_JSON_OBJECT_BEGIN);
    while (base_json_next(&json) == BASE_JSON_KEY) {
        if (base_json_string_is(json.raw, json.raw_length, name))
            return read_entry(file, &json);
        cr_assert(base_json_skip(&json));
    }
    cr_assert_fail("tensor %s is missing", name);
    return (tensor){0};
}
