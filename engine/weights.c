/* The tensors of a checkpoint: one pass over each file's header with the JSON scanner, no tree in
 * between, so that the 89,632 names of a full model take a tenth of a second.
 *
 * A file is 8 bytes of header length (little-endian), the header (a JSON object: __metadata__, and
 * name to {dtype, shape, data_offsets}), then the data, which the tensors cover without overlaps;
 * gaps are an error of whoever wanted all tensors (eng_files__gap). Nothing in a file is trusted: a
 * length, an offset or a product of dimensions is used only after it has been compared with the
 * file's size. */
#include "engine/weights.h"
#include "engine/model_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/arena.h"
#include "engine/base/json.h"
#include "engine/base/num.h"

#define HEADER_MAX 100000000u /* the bound of the format's own reader */
#define INDEX_MAX 100000000u
#define FILES_MAX 4096
#define NAME_MAX_BYTES 512
#define JSON_DEPTH 16
#define SLOT_EMPTY UINT32_MAX

typedef struct mapped_file {
    const char *name; /* without the directory */
    const uint8_t *map;
    size_t size;
    size_t header_length;
    struct timespec changed; /* when the file was written last */
} mapped_file;

struct eng_files {
    base_arena *arena; /* names */
    mapped_file *files;
    uint32_t file_count, file_max;
    eng_tensor *tensors;
    uint32_t count, max;
    uint32_t *slots; /* open addressing: tensor numbers; a power of two, at most half full */
    uint32_t slot_count;
    uint64_t bytes;
    char gap[192]; /* the first bytes that belong to no tensor, as a message */
};

/* ---- look-up ---- */

static uint32_t hash_name(const char *name, size_t length)
{
    return (uint32_t)XXH3_64bits(name, length);
}

/* The slot of `name`, or the empty one where it belongs. */
static uint32_t slot_of(const eng_files *f, const char *name, size_t length)
{
    uint32_t at = hash_name(name, length) & (f->slot_count - 1);
    while (f->slots[at] != SLOT_EMPTY && strcmp(f->tensors[f->slots[at]].name, name) != 0)
        at = (at + 1) & (f->slot_count - 1);
    return at;
}

static bool grow_slots(eng_files *f)
{
    uint32_t count = f->slot_count == 0 ? 256 : f->slot_count * 2;
    uint32_t *slots = malloc(count * sizeof *slots);
    if (slots == NULL)
        return false;
    memset(slots, 0xFF, count * sizeof *slots);
    free(f->slots);
    f->slots = slots;
    f->slot_count = count;
    for (uint32_t i = 0; i < f->count; i++)
        slots[slot_of(f, f->tensors[i].name, strlen(f->tensors[i].name))] = i;
    return true;
}

/* ---- one header entry ---- */

typedef struct dtype_info {
    const char *name;
    eng_dtype dtype;
    uint32_t bytes;
} dtype_info;

static const dtype_info DTYPES[] = {
    {"BF16", ENG_BF16, 2},     {"F32", ENG_F32, 4},
    {"F16", ENG_F16, 2},       {"F8_E4M3", ENG_F8_E4M3, 1},
    {"U8", ENG_U8, 1},         {"I8", ENG_I8, 1},
    {"I32", ENG_I32, 4},       {"I64", ENG_I64, 8},
    {"F8_E8M0", ENG_U8, 1}, /* scale bytes; files of this family call them U8 */
    {"F64", ENG_OTHER, 8},     {"U16", ENG_OTHER, 2},
    {"U32", ENG_OTHER, 4},     {"U64", ENG_OTHER, 8},
    {"I16", ENG_OTHER, 2},     {"BOOL", ENG_OTHER, 1},
    {"F8_E5M2", ENG_OTHER, 1},
};

const char *eng_dtype__name(eng_dtype dtype)
{
    for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
        if (DTYPES[i].dtype == dtype && dtype != ENG_OTHER)
            return DTYPES[i].name;
    return "another type";
}

/* Digits only: shapes and offsets are non-negative integers. */
static bool read_u64(const base_json *json, uint64_t *out)
{
    uint64_t value = 0;
    if (json->raw_length == 0 || json->raw_length > 20)
        return false;
    for (size_t i = 0; i < json->raw_length; i++) {
        char c = json->raw[i];
        if (c < '0' || c > '9' || __builtin_mul_overflow(value, (uint64_t)10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(c - '0'), &value))
            return false;
    }
    *out = value;
    return true;
}

/* Array of integers; false if it is anything else or longer than `max`. */
static bool read_numbers(base_json *json, uint64_t *out, uint32_t max, uint32_t *count)
{
    if (base_json_next(json) != BASE_JSON_ARRAY_BEGIN)
        return false;
    for (*count = 0;; (*count)++) {
        base_json_kind kind = base_json_next(json);
        if (kind == BASE_JSON_ARRAY_END)
            return true;
        if (kind != BASE_JSON_NUMBER || *count == max || !read_u64(json, &out[*count]))
            return false;
    }
}

static const dtype_info *read_dtype(base_json *json)
{
    if (base_json_next(json) != BASE_JSON_STRING)
        return NULL;
    for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
        if (base_json_string_is(json->raw, json->raw_length, DTYPES[i].name))
            return &DTYPES[i];
    return NULL;
}

/* The scanner stands behind a name; reads its object into *t. `data_bytes` is what the file holds
 * behind the header. */
static base_code read_tensor(base_json *json, eng_tensor *t, const uint8_t *data,
                             uint64_t data_bytes, base_err *err)
{
    const dtype_info *dtype = NULL;
    uint64_t offsets[2] = {0}, bytes;
    uint32_t offset_count = 0;
    bool has_shape = false;
    if (base_json_next(json) != BASE_JSON_OBJECT_BEGIN)
        return base_fail(err, BASE_FORMAT, "its entry is not an object");
    for (;;) {
        base_json_kind kind = base_json_next(json);
        if (kind == BASE_JSON_OBJECT_END)
            break;
        if (kind != BASE_JSON_KEY)
            return base_fail(err, BASE_FORMAT, "bad JSON: %s",
                             json->error != NULL ? json->error : "cut");
        if (base_json_string_is(json->raw, json->raw_length, "dtype")) {
            if ((dtype = read_dtype(json)) == NULL)
                return base_fail(err, BASE_FORMAT, "unknown dtype %.*s",
                                 (int)base_min(json->raw_length, 24), json->raw);
        } else if (base_json_string_is(json->raw, json->raw_length, "shape")) {
            if (!read_numbers(json, t->shape, 8, &t->dims))
                return base_fail(err, BASE_FORMAT, "shape is not an array of at most 8 sizes");
            has_shape = true;
        } else if (base_json_string_is(json->raw, json->raw_length, "data_offsets")) {
            if (!read_numbers(json, offsets, 2, &offset_count) || offset_count != 2)
                return base_fail(err, BASE_FORMAT, "data_offsets is not an array of two offsets");
        } else if (!base_json_skip(json)) {
            return base_fail(err, BASE_FORMAT, "bad JSON: %s", json->error);
        }
    }
    if (dtype == NULL || !has_shape || offset_count != 2)
        return base_fail(err, BASE_FORMAT, "%s is missing",
                         dtype == NULL ? "dtype" : (!has_shape ? "shape" : "data_offsets"));
    bytes = dtype->bytes;
    for (uint32_t i = 0; i < t->dims; i++)
        if (__builtin_mul_overflow(bytes, t->shape[i], &bytes))
            return base_fail(err, BASE_FORMAT, "the product of its shape overflows");
    if (offsets[0] > offsets[1])
        return base_fail(err, BASE_FORMAT, "data_offsets %llu, %llu run backwards",
                         (unsigned long long)offsets[0], (unsigned long long)offsets[1]);
    if (offsets[1] > data_bytes)
        return base_fail(err, BASE_FORMAT, "data_offsets end at %llu of %llu bytes (truncated?)",
                         (unsigned long long)offsets[1], (unsigned long long)data_bytes);
    if (offsets[1] - offsets[0] != bytes)
        return base_fail(err, BASE_FORMAT, "shape and dtype make %llu bytes, data_offsets %llu",
                         (unsigned long long)bytes, (unsigned long long)(offsets[1] - offsets[0]));
    t->dtype = dtype->dtype;
    t->bytes = bytes;
    t->data = data + offsets[0];
    return BASE_OK;
}

static base_code read_name(eng_files *f, const base_json *json, const char **out, size_t *length,
                           base_err *err)
{
    base_buf buf;
    base_code code = BASE_OK;
    /* Names are plain but in theory. */
    if (memchr(json->raw, '\\', json->raw_length) == NULL && json->raw_length > 2 &&
        json->raw_length <= NAME_MAX_BYTES + 2) {
        *length = json->raw_length - 2;
        *out = base_arena_copy(f->arena, json->raw + 1, *length);
        return *out != NULL ? BASE_OK : base_fail(err, BASE_NOMEM, "out of memory for names");
    }
    base_buf_init(&buf, 0);
    base_json_unescape(&buf, json->raw, json->raw_length);
    if (buf.failed)
        code = base_fail(err, BASE_NOMEM, "out of memory for names");
    else if (buf.length == 0 || buf.length > NAME_MAX_BYTES ||
             memchr(buf.data, 0, buf.length) != NULL)
        code =
            base_fail(err, BASE_FORMAT,
                      "a tensor's name is empty, holds a zero or exceeds %d bytes", NAME_MAX_BYTES);
    else if ((*out = base_arena_copy(f->arena, buf.data, buf.length)) == NULL)
        code = base_fail(err, BASE_NOMEM, "out of memory for names");
    *length = buf.length;
    base_buf_deinit(&buf);
    return code;
}

static base_code add_tensor(eng_files *f, base_json *json, const mapped_file *file, base_err *err)
{
    eng_tensor t = {.file = file->name};
    size_t length;
    base_code code = read_name(f, json, &t.name, &length, err);
    if (code != BASE_OK)
        return code;
    const uint8_t *data = file->map + 8 + file->header_length;
    code = read_tensor(json, &t, data, file->size - 8 - file->header_length, err);
    if (code != BASE_OK) {
        base_wrap(err, "tensor %.90s", t.name);
        return code;
    }
    if (f->count == f->max) {
        uint32_t max = f->max == 0 ? 256 : f->max * 2;
        eng_tensor *tensors = realloc(f->tensors, max * sizeof *tensors);
        if (tensors == NULL)
            return base_fail(err, BASE_NOMEM, "out of memory for %u tensors", max);
        f->tensors = tensors;
        f->max = max;
    }
    if (f->count >= f->slot_count / 2 && !grow_slots(f))
        return base_fail(err, BASE_NOMEM, "out of memory for %u tensors", f->max);
    uint32_t slot = slot_of(f, t.name, length);
    if (f->slots[slot] != SLOT_EMPTY)
        return base_fail(err, BASE_FORMAT, "tensor %.90s is there twice, first in %s", t.name,
                         f->tensors[f->slots[slot]].file);
    f->slots[slot] = f->count;
    f->tensors[f->count++] = t;
    f->bytes += t.bytes;
    return BASE_OK;
}

/* ---- one file ---- */

static int by_data(const void *a, const void *b)
{
    const eng_tensor *x = *(const eng_tensor *const *)a, *y = *(const eng_tensor *const *)b;
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes; /* empty ones first */
}

/* Bytes that belong to no tensor are kept for the end: if a tensor is missing, that is the better
 * message. */
static void note_gap(eng_files *f, const mapped_file *file, uint64_t bytes, const char *before)
{
    if (f->gap[0] == '\0')
        snprintf(f->gap, sizeof f->gap, "%.40s: %llu bytes %s %.90s belong to none", file->name,
                 (unsigned long long)bytes,
                 before != NULL ? "before tensor" : "after the last tensor",
                 before != NULL ? before : "");
}

/* The tensors [first, count) are those of `file`: they must not overlap. */
static base_code check_cover(eng_files *f, uint32_t first, const mapped_file *file, base_err *err)
{
    uint32_t count = f->count - first;
    const uint8_t *at = file->map + 8 + file->header_length, *end = file->map + file->size;
    const eng_tensor **sorted = malloc((count + 1) * sizeof *sorted);
    base_code code = BASE_OK;
    if (sorted == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory for %u tensors", count);
    for (uint32_t i = 0; i < count; i++)
        sorted[i] = &f->tensors[first + i];
    qsort(sorted, count, sizeof *sorted, by_data);
    for (uint32_t i = 0; i < count && code == BASE_OK; i++) {
        const uint8_t *data = sorted[i]->data;
        if (data < at)
            code = base_fail(err, BASE_FORMAT, "tensor %.70s overlaps %.70s", sorted[i]->name,
                             sorted[i - 1]->name);
        else if (data > at)
            note_gap(f, file, (uint64_t)(data - at), sorted[i]->name);
        at = data + sorted[i]->bytes;
    }
    if (code == BASE_OK && at != end)
        note_gap(f, file, (uint64_t)(end - at), NULL);
    free(sorted);
    return code;
}

static base_code map_file(const char *path, const uint8_t **map, struct stat *st, base_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return base_fail(err, errno == ENOENT ? BASE_NOT_FOUND : BASE_IO, "cannot open %s: %s",
                         path, strerror(errno));
    base_code code = BASE_OK;
    if (fstat(fd, st) != 0 || !S_ISREG(st->st_mode)) {
        code = base_fail(err, BASE_IO, "%s is not a regular file", path);
    } else if (st->st_size < 8) {
        code = base_fail(err, BASE_FORMAT, "%s: %lld bytes are too few for a safetensors file",
                         path, (long long)st->st_size);
    } else {
        void *at = mmap(NULL, (size_t)st->st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (at == MAP_FAILED)
            code = base_fail(err, BASE_IO, "cannot map %s: %s", path, strerror(errno));
        else
            *map = at;
    }
    close(fd);
    return code;
}

static base_code parse_header(eng_files *f, mapped_file *file, base_err *err)
{
    uint64_t length = 0;
    uint32_t first = f->count;
    base_json json;
    for (int i = 7; i >= 0; i--)
        length = length << 8 | file->map[i];
    if (length > HEADER_MAX)
        return base_fail(err, BASE_FORMAT, "header of %llu bytes exceeds %u",
                         (unsigned long long)length, HEADER_MAX);
    if (length > file->size - 8)
        return base_fail(err, BASE_FORMAT,
                         "header of %llu bytes, but the file ends after %llu (truncated?)",
                         (unsigned long long)length, (unsigned long long)file->size - 8);
    file->header_length = length;
    base_json_init(&json, (const char *)file->map + 8, length, JSON_DEPTH);
    if (base_json_next(&json) != BASE_JSON_OBJECT_BEGIN)
        return base_fail(err, BASE_FORMAT, "the header is not a JSON object");
    for (;;) {
        base_json_kind kind = base_json_next(&json);
        if (kind == BASE_JSON_OBJECT_END)
            break;
        if (kind != BASE_JSON_KEY)
            return base_fail(err, BASE_FORMAT, "header, byte %zu: %s", json.pos, json.error);
        if (base_json_string_is(json.raw, json.raw_length, "__metadata__")) {
            if (!base_json_skip(&json))
                return base_fail(err, BASE_FORMAT, "header, byte %zu: %s", json.pos, json.error);
            continue;
        }
        base_code code = add_tensor(f, &json, file, err);
        if (code != BASE_OK)
            return code;
    }
    if (base_json_next(&json) != BASE_JSON_END)
        return base_fail(err, BASE_FORMAT, "header, byte %zu: more text after the object",
                         json.pos);
    return check_cover(f, first, file, err);
}

/* Maps one file and reads its header; `name` is what messages call it. */
static base_code add_file(eng_files *f, const char *path, const char *name, base_err *err)
{
    mapped_file file = {.name = base_arena_copy(f->arena, name, strlen(name))};
    if (f->file_count == f->file_max) {
        uint32_t max = f->file_max == 0 ? 4 : f->file_max * 2;
        mapped_file *files = realloc(f->files, max * sizeof *files);
        if (files == NULL)
            return base_fail(err, BASE_NOMEM, "out of memory for %u files", max);
        f->files = files;
        f->file_max = max;
    }
    if (file.name == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory for names");
    struct stat st;
    base_code code = map_file(path, &file.map, &st, err);
    if (code != BASE_OK)
        return code;
    file.size = (size_t)st.st_size;
    file.changed = st.st_mtim;
    f->files[f->file_count++] = file;
    code = parse_header(f, &f->files[f->file_count - 1], err);
    if (code != BASE_OK)
        base_wrap(err, "%s", name);
    return code;
}

/* ---- shards ---- */

static bool is_plain_name(const char *name)
{
    return name[0] != '\0' && name[0] != '.' && strchr(name, '/') == NULL && strlen(name) < 200;
}

/* The file number of a shard, mapping it the first time it is named. */
static base_code shard_of(eng_files *f, const char *dir, const char *name, uint32_t *out,
                          base_err *err)
{
    char path[4096];
    /* Names come in runs of the same file, so the last one is nearly always right. */
    for (uint32_t i = f->file_count; i-- > 0;)
        if (strcmp(f->files[i].name, name) == 0) {
            *out = i;
            return BASE_OK;
        }
    if (!is_plain_name(name))
        return base_fail(err, BASE_FORMAT,
                         "weight_map names the file \"%.80s\", which is not in the folder", name);
    if (f->file_count == FILES_MAX)
        return base_fail(err, BASE_FORMAT, "weight_map names more than %d files", FILES_MAX);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    *out = f->file_count;
    return add_file(f, path, name, err);
}

/* weight_map: name to file. Every name must be in that file, and no file may hold another. */
static base_code read_weight_map(eng_files *f, const char *dir, base_json *json, base_err *err)
{
    base_buf name, file;
    base_code code = BASE_OK;
    uint64_t named = 0;
    base_buf_init(&name, 0);
    base_buf_init(&file, 0);
    if (base_json_next(json) != BASE_JSON_OBJECT_BEGIN)
        code = base_fail(err, BASE_FORMAT, "weight_map is not an object");
    while (code == BASE_OK) {
        base_json_kind kind = base_json_next(json);
        uint32_t at = 0;
        if (kind == BASE_JSON_OBJECT_END)
            break;
        if (kind != BASE_JSON_KEY) {
            code = base_fail(err, BASE_FORMAT, "byte %zu: %s", json->pos, json->error);
            break;
        }
        base_buf_clear(&name);
        base_buf_clear(&file);
        base_json_unescape(&name, json->raw, json->raw_length);
        if (base_json_next(json) == BASE_JSON_STRING)
            base_json_unescape(&file, json->raw, json->raw_length);
        if (name.failed || file.failed) {
            code = base_fail(err, BASE_NOMEM, "out of memory for names");
            break;
        }
        if (name.length == 0 || file.length == 0) {
            code = base_fail(err, BASE_FORMAT,
                             "weight_map, before byte %zu: not a name with a file", json->pos);
            break;
        }
        if ((code = shard_of(f, dir, file.data, &at, err)) != BASE_OK)
            break;
        const eng_tensor *t = eng_files_find(f, name.data);
        if (t == NULL || t->file != f->files[at].name)
            code = base_fail(err, BASE_FORMAT,
                             "tensor %.90s is not in %.60s, where weight_map puts it", name.data,
                             file.data);
        named++;
    }
    if (code == BASE_OK && named != f->count)
        code = base_fail(err, BASE_FORMAT, "weight_map lists %llu tensors, the files hold %u",
                         (unsigned long long)named, f->count);
    base_buf_deinit(&name);
    base_buf_deinit(&file);
    return code;
}

static base_code open_index(eng_files *f, const char *dir, const char *path, base_err *err)
{
    const uint8_t *map = NULL;
    struct stat st;
    base_json json;
    bool found = false;
    base_code code = map_file(path, &map, &st, err);
    if (code != BASE_OK)
        return code;
    size_t size = (size_t)st.st_size;
    if (size > INDEX_MAX) {
        code = base_fail(err, BASE_FORMAT, "%zu bytes exceed %u", size, INDEX_MAX);
        goto out;
    }
    base_json_init(&json, (const char *)map, size, JSON_DEPTH);
    if (base_json_next(&json) != BASE_JSON_OBJECT_BEGIN)
        code = base_fail(err, BASE_FORMAT, "not a JSON object");
    while (code == BASE_OK) {
        base_json_kind kind = base_json_next(&json);
        if (kind == BASE_JSON_OBJECT_END)
            break;
        if (kind != BASE_JSON_KEY) {
            code = base_fail(err, BASE_FORMAT, "byte %zu: %s", json.pos, json.error);
        } else if (!found && base_json_string_is(json.raw, json.raw_length, "weight_map")) {
            code = read_weight_map(f, dir, &json, err);
            found = true;
        } else if (!base_json_skip(&json)) {
            code = base_fail(err, BASE_FORMAT, "byte %zu: %s", json.pos, json.error);
        }
    }
    if (code == BASE_OK && !found)
        code = base_fail(err, BASE_FORMAT, "weight_map is missing");
out:
    munmap((void *)map, size);
    if (code != BASE_OK)
        base_wrap(err, "model.safetensors.index.json");
    return code;
}

/* ---- the header's functions ---- */

static base_code create(eng_files **out, base_err *err)
{
    eng_files *f = calloc(1, sizeof *f);
    *out = NULL;
    if (f == NULL || (f->arena = base_arena_create(1 << 14, SIZE_MAX)) == NULL || !grow_slots(f)) {
        eng_files_close(f);
        return base_fail(err, BASE_NOMEM, "out of memory for a checkpoint's names");
    }
    *out = f;
    return BASE_OK;
}

base_code eng_files_open(eng_files **out, const char *dir, base_err *err)
{
    char single[4096], index[4096];
    eng_files *f;
    base_code code = create(&f, err);
    *out = NULL;
    if (code != BASE_OK)
        return code;
    snprintf(single, sizeof single, "%s/model.safetensors", dir);
    snprintf(index, sizeof index, "%s/model.safetensors.index.json", dir);
    if (access(single, F_OK) == 0)
        code = add_file(f, single, "model.safetensors", err);
    else if (access(index, F_OK) == 0)
        code = open_index(f, dir, index, err);
    else
        code = base_fail(err, BASE_NOT_FOUND,
                         "%.120s holds neither model.safetensors nor its index", dir);
    if (code != BASE_OK) {
        eng_files_close(f);
        return code;
    }
    *out = f;
    return BASE_OK;
}

base_code eng_files_open_one(eng_files **out, const char *path, base_err *err)
{
    eng_files *f;
    base_code code = create(&f, err);
    *out = NULL;
    if (code != BASE_OK)
        return code;
    const char *slash = strrchr(path, '/');
    code = add_file(f, path, slash != NULL ? slash + 1 : path, err);
    if (code != BASE_OK) {
        eng_files_close(f);
        return code;
    }
    *out = f;
    return BASE_OK;
}

void eng_files_close(eng_files *files)
{
    if (files == NULL)
        return;
    for (uint32_t i = 0; i < files->file_count; i++)
        munmap((void *)files->files[i].map, files->files[i].size);
    free(files->files);
    free(files->tensors);
    free(files->slots);
    base_arena_destroy(files->arena);
    free(files);
}

const eng_tensor *eng_files_find(const eng_files *files, const char *name)
{
    uint32_t at = files->slots[slot_of(files, name, strlen(name))];
    return at == SLOT_EMPTY ? NULL : &files->tensors[at];
}

uint32_t eng_files_count(const eng_files *files)
{
    return files->count;
}

const eng_tensor *eng_files_at(const eng_files *files, uint32_t i)
{
    DCHECK(i < files->count);
    return &files->tensors[i];
}

uint64_t eng_files_bytes(const eng_files *files)
{
    return files->bytes;
}

const char *eng_files__gap(const eng_files *files)
{
    return files->gap[0] != '\0' ? files->gap : NULL;
}

void eng_files__release(const eng_files *files)
{
    for (uint32_t i = 0; i < files->file_count; i++)
        (void)madvise((void *)files->files[i].map, files->files[i].size, MADV_DONTNEED);
}

/* ---- digest ---- */

#define ENDS_BYTES 4096

uint64_t eng_files__stamp(const eng_files *files)
{
    uint64_t stamp = 0;
    for (uint32_t i = 0; i < files->file_count; i++) {
        const mapped_file *file = &files->files[i];
        const uint64_t own[3] = {file->size, (uint64_t)file->changed.tv_sec,
                                 (uint64_t)file->changed.tv_nsec};
        stamp = XXH3_64bits_withSeed(own, sizeof own, stamp);
    }
    return stamp;
}

void eng_files__digest(const eng_files *files, XXH3_state_t *state)
{
    for (uint32_t i = 0; i < files->file_count; i++) {
        const mapped_file *file = &files->files[i];
        uint64_t size = file->size;
        XXH3_128bits_update(state, &size, sizeof size);
        XXH3_128bits_update(state, file->map, 8 + file->header_length);
    }
    for (uint32_t i = 0; i < files->count; i++) {
        const eng_tensor *t = &files->tensors[i];
        const uint8_t *data = t->data;
        size_t head = base_min(t->bytes, ENDS_BYTES);
        size_t tail = base_min(t->bytes - head, ENDS_BYTES);
        XXH3_128bits_update(state, data, head);
        XXH3_128bits_update(state, data + t->bytes - tail, tail);
    }
}
