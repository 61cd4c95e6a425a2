/* whimbrel-model: looks at checkpoints, makes random ones, and runs one sequence the plain way.
 *
 * `generate` is the reference loop that the engine is compared with: one sequence, its pages a
 * private list, every token by eng_sample. A drafted token is kept only if it equals that draw.
 *
 * Exit: 0 done, 1 a check failed, 2 bad arguments or a model that does not fit. */
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/chat.h"
#include "engine/draft.h"
#include "engine/model_internal.h"
#include "engine/sample.h"
#include "engine/token.h"
#include "tools/chat_file.h"
#include "tools/gguf.h"

#define EXIT_BAD 2
#define ROWS_MAX 512
#define ARENA_MAX ((size_t)1 << 30)

static const char USAGE[] =
    "whimbrel-model COMMAND …\n"
    "\n"
    "  info DIR [--json]                       shape, formats, bytes, fingerprint\n"
    "  verify DIR [--full]                     names, shapes, dtypes, counts and bytes; --full "
    "reads every value\n"
    "  random SHAPE DIR [--seed N] [--layers N] [--no-draft]\n"
    "                                          a checkpoint of random weights: tiny, nano, "
    "m3.1-flash\n"
    "  export-gguf DIR FILE [--exact]          the same weights for llama.cpp (architecture "
    "minimax-m3): NVFP4 and\n"
    "                                          BF16 as they are, MXFP8 as Q8_0; --exact: all "
    "as floats, to compare logits\n"
    "  tokens DIR [TEXT…] [--specials] [--decode] [--json]\n"
    "                                          token ids of TEXT or of standard input; --decode: "
    "ids to text\n"
    "  generate DIR [--prompt TEXT | --chat FILE | --ids FILE] [options]\n"
    "                                          FILE may be - for standard input\n"
    "      --prompt TEXT     plain text, in which special tokens count\n"
    "      --chat FILE       {\"messages\": […], \"tools\": […], \"thinking\": …, \"effort\": …}\n"
    "      --ids FILE        token ids between spaces; prints ids instead of text\n"
    "      --max N           most new tokens (256)\n"
    "      --temperature T   0 is greedy (0)\n"
    "      --top-p P  --top-k K  --min-p P  --seed N\n"
    "      --draft auto|off|N  tokens of a draft block to verify (auto: cut by confidence)\n"
    "      --ignore-eos      go on past the end of the turn\n"
    "      --raw             with --chat: the output as it is, special tokens included\n"
    "      --json            one JSON object with tokens, text and times\n"
    "  For info, verify and generate DIR may be random:SHAPE?layers=N&seed=N.\n"
    "\n"
    "  For every command that loads: --backend cpu|auto|cuda|hip, --variant auto|ref|avx2|avx512, "
    "--kv nvfp4|fp8|bf16|f32, "
    "--threads N, --context N,\n"
    "  --draft-dir DIR (DIR/dspark)\n";

/* ---- arguments ---- */

typedef struct arguments {
    const char *prompt, *chat, *ids, *draft, *draft_dir;
    const char *backend, *variant, *kv;
    uint32_t threads, context, max, layers;
    eng_sampling sampling;
    bool seeded;
    bool exact, full, json, specials, decode, raw, no_draft;
    char **rest;
    int rest_count;
} arguments;

enum {
    OPT_PROMPT = 256,
    OPT_CHAT,
    OPT_IDS,
    OPT_MAX,
    OPT_TEMPERATURE,
    OPT_TOP_P,
    OPT_TOP_K,
    OPT_MIN_P,
    OPT_SEED,
    OPT_DRAFT,
    OPT_DRAFT_DIR,
    OPT_IGNORE_EOS,
    OPT_RAW,
    OPT_JSON,
    OPT_FULL,
    OPT_EXACT,
    OPT_LAYERS,
    OPT_NO_DRAFT,
    OPT_SPECIALS,
    OPT_DECODE,
    OPT_VARIANT,
    OPT_BACKEND,
    OPT_KV,
    OPT_THREADS,
    OPT_CONTEXT,
    OPT_HELP,
};

static const struct option OPTIONS[] = {
    {"prompt", required_argument, NULL, OPT_PROMPT},
    {"chat", required_argument, NULL, OPT_CHAT},
    {"ids", required_argument, NULL, OPT_IDS},
    {"max", required_argument, NULL, OPT_MAX},
    {"temperature", required_argument, NULL, OPT_TEMPERATURE},
    {"top-p", required_argument, NULL, OPT_TOP_P},
    {"top-k", required_argument, NULL, OPT_TOP_K},
    {"min-p", required_argument, NULL, OPT_MIN_P},
    {"seed", required_argument, NULL, OPT_SEED},
    {"draft", required_argument, NULL, OPT_DRAFT},
    {"draft-dir", required_argument, NULL, OPT_DRAFT_DIR},
    {"ignore-eos", no_argument, NULL, OPT_IGNORE_EOS},
    {"raw", no_argument, NULL, OPT_RAW},
    {"json", no_argument, NULL, OPT_JSON},
    {"full", no_argument, NULL, OPT_FULL},
    {"exact", no_argument, NULL, OPT_EXACT},
    {"layers", required_argument, NULL, OPT_LAYERS},
    {"no-draft", no_argument, NULL, OPT_NO_DRAFT},
    {"specials", no_argument, NULL, OPT_SPECIALS},
    {"decode", no_argument, NULL, OPT_DECODE},
    {"variant", required_argument, NULL, OPT_VARIANT},
    {"backend", required_argument, NULL, OPT_BACKEND},
    {"kv", required_argument, NULL, OPT_KV},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"context", required_argument, NULL, OPT_CONTEXT},
    {"help", no_argument, NULL, OPT_HELP},
    {0},
};

static int bad(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

static int bad(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "whimbrel-model: ");
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
    return EXIT_BAD;
}

static int bad_err(const base_err *err)
{
    return bad("%s", err->text);
}

static uint64_t number(const char *option, const char *text, uint64_t min, uint64_t max)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value < min || value > max)
        exit(bad("--%s %s is not a number from %llu to %llu", option, text, (unsigned long long)min,
                 (unsigned long long)max));
    return value;
}

static float real(const char *option, const char *text)
{
    char *end;
    float value = strtof(text, &end);
    if (text[0] == '\0' || *end != '\0')
        exit(bad("--%s %s is not a number", option, text));
    return value;
}

static void parse_arguments(arguments *a, int argc, char **argv)
{
    int option, index = 0;
    *a = (arguments){.draft = "auto", .max = 256, .sampling = ENG_SAMPLING_DEFAULT};
    a->sampling.temperature = 0;
    while ((option = getopt_long(argc, argv, "", OPTIONS, &index)) != -1) {
        const char *name = option >= OPT_PROMPT ? OPTIONS[index].name : "";
        switch (option) {
        case OPT_PROMPT:
            a->prompt = optarg;
            break;
        case OPT_CHAT:
            a->chat = optarg;
            break;
        case OPT_IDS:
            a->ids = optarg;
            break;
        case OPT_MAX:
            a->max = (uint32_t)number(name, optarg, 1, 1u << 24);
            break;
        case OPT_TEMPERATURE:
            a->sampling.temperature = real(name, optarg);
            break;
        case OPT_TOP_P:
            a->sampling.top_p = real(name, optarg);
            break;
        case OPT_TOP_K:
            a->sampling.top_k = (uint32_t)number(name, optarg, 0, UINT32_MAX);
            break;
        case OPT_MIN_P:
            a->sampling.min_p = real(name, optarg);
            break;
        case OPT_SEED:
            a->sampling.seed = number(name, optarg, 0, UINT64_MAX);
            a->seeded = true;
            break;
        case OPT_DRAFT:
            a->draft = optarg;
            break;
        case OPT_DRAFT_DIR:
            a->draft_dir = optarg;
            break;
        case OPT_IGNORE_EOS:
            a->sampling.ignore_eos = true;
            break;
        case OPT_RAW:
            a->raw = true;
            break;
        case OPT_JSON:
            a->json = true;
            break;
        case OPT_EXACT:
            a->exact = true;
            break;
        case OPT_FULL:
            a->full = true;
            break;
        case OPT_LAYERS:
            a->layers = (uint32_t)number(name, optarg, 1, KN_LAYERS_MAX);
            break;
        case OPT_NO_DRAFT:
            a->no_draft = true;
            break;
        case OPT_SPECIALS:
            a->specials = true;
            break;
        case OPT_DECODE:
            a->decode = true;
            break;
        case OPT_BACKEND:
            a->backend = optarg;
            break;
        case OPT_VARIANT:
            a->variant = optarg;
            break;
        case OPT_KV:
            a->kv = optarg;
            break;
        case OPT_THREADS:
            a->threads = (uint32_t)number(name, optarg, 0, 64);
            break;
        case OPT_CONTEXT:
            a->context = (uint32_t)number(name, optarg, 1, 1u << 24);
            break;
        case OPT_HELP:
            fputs(USAGE, stdout);
            exit(0);
        default:
            exit(EXIT_BAD); /* getopt_long has said why */
        }
    }
    a->rest = argv + optind;
    a->rest_count = argc - optind;
}

/* The whole of a file, or of standard input for "-". */
static base_code read_all(base_buf *out, const char *path, base_err *err)
{
    char chunk[65536];
    size_t n;
    FILE *f = strcmp(path, "-") == 0 ? stdin : fopen(path, "rbe");
    if (f == NULL)
        return base_fail(err, BASE_IO, "cannot open %.140s: %s", path, strerror(errno));
    while ((n = fread(chunk, 1, sizeof chunk, f)) > 0)
        base_buf_add(out, chunk, n);
    bool failed = ferror(f) != 0;
    if (f != stdin)
        fclose(f);
    base_buf_add(out, "", 0);
    if (failed)
        return base_fail(err, BASE_IO, "cannot read %.140s", path);
    return out->failed ? base_fail(err, BASE_NOMEM, "%.140s is too large", path) : BASE_OK;
}

/* ---- loading ---- */

typedef struct loaded {
    eng_model *model;
    const eng_model_config *config;
    eng_draft *draft; /* NULL: none */
    char draft_dir[4096];
    base_arena *arena;
} loaded;

static void unload(loaded *l)
{
    eng_draft_destroy(l->draft);
    eng_model_destroy(l->model);
    base_arena_destroy(l->arena);
}

/* `look`: nothing will be run. */
static base_code load(loaded *l, const arguments *a, const char *spec, uint32_t rows_max,
                      bool with_draft, bool look, base_err *err)
{
    eng_model_options options = {.backend = a->backend,
                                 .modules = getenv("WHIMBREL_MODULES"),
                                 .variant = a->variant,
                                 .kv = a->kv,
                                 .threads = a->threads,
                                 .rows_max = rows_max,
                                 .context_max = a->context,
                                 .look = look};
    *l = (loaded){.arena = base_arena_create(1 << 16, ARENA_MAX)};
    if (l->arena == NULL)
        return base_fail(err, BASE_NOMEM, "out of memory");
    base_code code = eng_model_load(&l->model, spec, &options, err);
    if (code != BASE_OK)
        return code;
    l->config = eng_model_get_config(l->model);
    if (a->draft_dir != NULL)
        snprintf(l->draft_dir, sizeof l->draft_dir, "%s", a->draft_dir);
    else if (eng_model_dir(l->model) != NULL)
        snprintf(l->draft_dir, sizeof l->draft_dir, "%s/dspark", eng_model_dir(l->model));
    if (!with_draft || l->draft_dir[0] == '\0' ||
        (a->draft_dir == NULL && access(l->draft_dir, F_OK) != 0))
        return BASE_OK;
    return eng_draft_load(&l->draft, l->model, l->draft_dir, rows_max, 1, err);
}

/* ---- info and verify ---- */

typedef struct format_sum {
    const char *name;
    uint64_t tensors, values, bytes;
} format_sum;

enum { SUM_NVFP4, SUM_MXFP8, SUM_BF16, SUM_F32, SUM_OTHER, SUM_COUNT };

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

static int format_of(const eng_tensor *t)
{
    if (ends_with(t->name, ".weight_packed") || ends_with(t->name, ".weight_scale") ||
        ends_with(t->name, ".weight_global_scale") || ends_with(t->name, ".input_global_scale"))
        return SUM_NVFP4;
    if (t->dtype == ENG_F8_E4M3 || ends_with(t->name, ".weight_scale_inv"))
        return SUM_MXFP8;
    return t->dtype == ENG_BF16 ? SUM_BF16 : (t->dtype == ENG_F32 ? SUM_F32 : SUM_OTHER);
}

/* Weights a tensor stands for; scales stand for none. */
static uint64_t values_of(const eng_tensor *t)
{
    uint64_t count = 1;
    for (uint32_t i = 0; i < t->dims; i++)
        count *= t->shape[i];
    if (ends_with(t->name, ".weight_packed"))
        return count * 2;
    return strstr(t->name, "_scale") != NULL ? 0 : count;
}

static void sum_formats(format_sum sums[SUM_COUNT], const eng_files *files)
{
    static const char *const NAMES[] = {"nvfp4", "mxfp8", "bf16", "f32", "other"};
    for (int i = 0; i < SUM_COUNT; i++)
        sums[i] = (format_sum){.name = NAMES[i]};
    for (uint32_t i = 0; i < eng_files_count(files); i++) {
        const eng_tensor *t = eng_files_at(files, i);
        format_sum *s = &sums[format_of(t)];
        s->tensors++;
        s->values += values_of(t);
        s->bytes += t->bytes;
    }
}

static uint32_t count_flags(const uint8_t *flags, uint32_t n)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        count += flags[i] != 0;
    return count;
}

static json_t *formats_json(const eng_files *files)
{
    format_sum sums[SUM_COUNT];
    json_t *out = json_object();
    sum_formats(sums, files);
    for (int i = 0; i < SUM_COUNT; i++)
        if (sums[i].tensors > 0)
            json_object_set_new(out, sums[i].name,
                                json_pack("{s:I, s:I, s:I}", "tensors", (json_int_t)sums[i].tensors,
                                          "values", (json_int_t)sums[i].values, "bytes",
                                          (json_int_t)sums[i].bytes));
    return out;
}

static void print_formats(const eng_files *files)
{
    format_sum sums[SUM_COUNT];
    sum_formats(sums, files);
    for (int i = 0; i < SUM_COUNT; i++)
        if (sums[i].tensors > 0)
            printf("  %-6s %8llu tensors %14llu values %15llu bytes\n", sums[i].name,
                   (unsigned long long)sums[i].tensors, (unsigned long long)sums[i].values,
                   (unsigned long long)sums[i].bytes);
}

static int run_info(const arguments *a)
{
    base_err err = BASE_ERR_INIT;
    loaded l;
    eng_files *draft_files = NULL;
    if (a->rest_count != 1)
        return bad("info takes one folder");
    base_code code = load(&l, a, a->rest[0], 64, true, false, &err);
    if (code == BASE_OK && l.draft != NULL)
        code = eng_files_open(&draft_files, l.draft_dir, &err);
    if (code != BASE_OK) {
        unload(&l);
        return bad_err(&err);
    }
    const eng_model_config *c = l.config;
    const eng_files *files = eng_model__files(l.model);
    const kv_layout *layout = eng_model_layout(l.model);
    uint32_t sparse = count_flags(c->sparse, c->layers), moe = count_flags(c->moe, c->layers);
    if (a->json) {
        json_t *out = json_pack(
            "{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:o, s:s, s:s, s:I}",
            "name", c->name, "layers", c->layers, "hidden", c->hidden, "q_heads", c->q_heads,
            "kv_heads", c->kv_heads, "head_dim", c->head_dim, "vocab", c->vocab, "context",
            c->context_max, "sparse_layers", sparse, "moe_layers", moe, "experts", c->experts,
            "experts_topk", c->experts_topk, "bytes", (json_int_t)eng_files_bytes(files), "formats",
            formats_json(files), "fingerprint", eng_model_fingerprint(l.model), "layout",
            layout->id, "page_bytes", (json_int_t)layout->record_bytes);
        if (draft_files != NULL)
            json_object_set_new(out, "draft",
                                json_pack("{s:i, s:I, s:o}", "block", eng_draft_block(l.draft),
                                          "bytes", (json_int_t)eng_files_bytes(draft_files),
                                          "formats", formats_json(draft_files)));
        json_dumpf(out, stdout, JSON_COMPACT);
        putchar('\n');
        json_decref(out);
    } else {
        printf("name         %s\n", c->name);
        printf("layers       %u: %u with sparse attention, %u with experts\n", c->layers, sparse,
               moe);
        printf("hidden       %u; attention %u query and %u key heads of %u, rotary %u, theta %g\n",
               c->hidden, c->q_heads, c->kv_heads, c->head_dim, c->rotary_dim,
               (double)c->rope_theta);
        if (sparse > 0)
            printf("selection    %u of the 128-token blocks by %u index heads of %u\n",
                   c->topk_blocks, c->index_heads, c->index_dim);
        if (moe > 0)
            printf("experts      %u of %u, inner %u; shared %u\n", c->experts_topk, c->experts,
                   c->expert_inner, c->shared_inner);
        printf("vocabulary   %u; context %u\n", c->vocab, c->context_max);
        printf("identity     %s\n", c->identity);
        printf("weights      %llu bytes in %u tensors\n",
               (unsigned long long)eng_files_bytes(files), eng_files_count(files));
        print_formats(files);
        printf("pages        %llu bytes each, layout %s\n",
               (unsigned long long)layout->record_bytes, layout->id);
        printf("fingerprint  %s\n", eng_model_fingerprint(l.model));
        if (draft_files != NULL) {
            printf("draft        block %u, %llu bytes in %u tensors\n", eng_draft_block(l.draft),
                   (unsigned long long)eng_files_bytes(draft_files), eng_files_count(draft_files));
            print_formats(draft_files);
        }
    }
    eng_files_close(draft_files);
    unload(&l);
    return 0;
}

/* The number of tensors a checkpoint of this shape has, vision left out, when every matrix is
 * stored alike: `linear` tensors for each, `expert` for each of the experts' three. */
static uint64_t expected_tensors(const eng_model_config *c, uint64_t linear, uint64_t expert)
{
    uint64_t moe = count_flags(c->moe, c->layers), sparse = count_flags(c->sparse, c->layers);
    return 3 + c->layers * (4 + 4 * linear) + sparse * (2 + 2 * linear) +
           (c->layers - moe) * 3 * linear +
           moe * (2 + (c->shared_inner > 0 ? 3 * linear : 0) + (uint64_t)c->experts * 3 * expert);
}

typedef struct full_check {
    uint64_t values, failures;
    double amax;
    uint8_t scale_min, scale_max; /* MXFP8 scale bytes */
    float block_max;              /* NVFP4 block scales */
    char first[256];
} full_check;

static void note_failure(full_check *f, const eng_tensor *t, uint64_t at, const char *what)
{
    if (f->failures++ == 0)
        snprintf(f->first, sizeof f->first, "%.40s: tensor %.80s, value %llu: %s", t->file, t->name,
                 (unsigned long long)at, what);
}

static void check_values(full_check *f, const eng_tensor *t)
{
    const uint8_t *data = t->data;
    bool block_scale = ends_with(t->name, ".weight_scale");
    if (t->dtype == ENG_F32 || t->dtype == ENG_BF16) {
        size_t size = t->dtype == ENG_F32 ? 4 : 2;
        for (uint64_t i = 0; i < t->bytes / size; i++) {
            uint16_t half;
            float x;
            memcpy(t->dtype == ENG_F32 ? (void *)&x : (void *)&half, data + i * size, size);
            if (t->dtype == ENG_BF16)
                x = kn_bf16_to_f32(half);
            if (!isfinite(x))
                note_failure(f, t, i, "not finite");
            else if (strstr(t->name, "_scale") == NULL)
                f->amax = fmax(f->amax, fabs((double)x));
        }
        f->values += t->bytes / size;
    } else if (t->dtype == ENG_F8_E4M3) {
        for (uint64_t i = 0; i < t->bytes; i++) {
            if ((data[i] & 0x7F) == 0x7F)
                note_failure(f, t, i, "NaN");
            else if (block_scale && (data[i] & 0x80) != 0)
                note_failure(f, t, i, "a negative scale");
            else if (block_scale)
                f->block_max = fmaxf(f->block_max, kn_e4m3_to_f32(data[i]));
        }
        f->values += t->bytes;
    } else if (ends_with(t->name, ".weight_scale_inv")) {
        for (uint64_t i = 0; i < t->bytes; i++) {
            if (data[i] == 255)
                note_failure(f, t, i, "a NaN scale");
            f->scale_min = data[i] < f->scale_min ? data[i] : f->scale_min;
            f->scale_max = data[i] > f->scale_max ? data[i] : f->scale_max;
        }
        f->values += t->bytes;
    }
}

static bool print_full(const char *what, const eng_files *files)
{
    full_check f = {.scale_min = 255};
    for (uint32_t i = 0; i < eng_files_count(files); i++)
        check_values(&f, eng_files_at(files, i));
    if (f.failures > 0) {
        printf("FAIL %s values: %llu bad, first %s\n", what, (unsigned long long)f.failures,
               f.first);
        return false;
    }
    printf("ok   %s values: %llu read, all finite; largest plain value %.4g", what,
           (unsigned long long)f.values, f.amax);
    if (f.scale_max >= f.scale_min)
        printf(", MXFP8 scales 2^%d to 2^%d", f.scale_min - 127, f.scale_max - 127);
    if (f.block_max > 0)
        printf(", NVFP4 block scales up to %.4g", (double)f.block_max);
    putchar('\n');
    return true;
}

/* The index's own sum of bytes, where it has one. */
static bool check_total(const char *dir, const eng_files *files)
{
    char path[4096];
    json_error_t error;
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    json_t *index = json_load_file(path, 0, &error);
    json_int_t total = 0;
    bool has =
        index != NULL && json_unpack(index, "{s:{s:I}}", "metadata", "total_size", &total) == 0;
    json_decref(index);
    if (!has || (uint64_t)total == eng_files_bytes(files))
        return true;
    printf("FAIL bytes: the index's total_size is %lld, the tensors have %llu\n", (long long)total,
           (unsigned long long)eng_files_bytes(files));
    return false;
}

static bool check_counts(const loaded *l, const eng_files *files)
{
    uint64_t text = 0, packed = 0, inputs = 0, pairs = 0;
    for (uint32_t i = 0; i < eng_files_count(files); i++) {
        const char *name = eng_files_at(files, i)->name;
        text += strncmp(name, "language_model.", 15) == 0 && strstr(name, ".mtp.") == NULL;
        packed += ends_with(name, ".weight_packed");
        inputs += ends_with(name, ".input_global_scale");
        pairs += ends_with(name, ".weight_scale_inv");
    }
    const eng_model_config *c = l->config;
    uint64_t experts = (uint64_t)count_flags(c->moe, c->layers) * c->experts * 3;
    uint64_t expert = packed == experts && packed > 0 ? (inputs > 0 ? 4 : 3)
                                                      : (pairs >= experts && pairs > 0 ? 2 : 1);
    uint64_t expected = expected_tensors(c, pairs > 0 ? 2 : 1, expert);
    if (packed > 0 && inputs != 0 && inputs != packed) {
        printf("FAIL counts: %llu of %llu NVFP4 matrices have an input_global_scale\n",
               (unsigned long long)inputs, (unsigned long long)packed);
        return false;
    }
    if (text != expected) {
        /* Matrices of one kind in several formats: the names were checked one by one, the formula
         * does not apply. */
        printf("ok   counts: %llu text tensors in mixed formats (a uniform checkpoint would have "
               "%llu)\n",
               (unsigned long long)text, (unsigned long long)expected);
        return true;
    }
    printf("ok   counts: %llu text tensors as the shape demands, %llu others\n",
           (unsigned long long)text, (unsigned long long)(eng_files_count(files) - text));
    return true;
}

static int run_verify(const arguments *a)
{
    base_err err = BASE_ERR_INIT;
    loaded l;
    eng_files *draft_files = NULL;
    eng_tok *tok = NULL;
    eng_codec *codec = NULL;
    if (a->rest_count != 1)
        return bad("verify takes one folder");
    base_code code = load(&l, a, a->rest[0], 64, true, true, &err);
    if (code == BASE_OK)
        code = eng_tok_load(&tok, eng_model_tokenizer_path(l.model), &err);
    if (code == BASE_OK)
        code = eng_codec_create(&codec, tok, l.config->identity, l.config->thinking, &err);
    if (code == BASE_OK && eng_tok_vocab(tok) > l.config->vocab)
        code = base_fail(&err, BASE_FORMAT,
                         "tokenizer.json: %u tokens exceed the model's vocab_size %u",
                         eng_tok_vocab(tok), l.config->vocab);
    if (code == BASE_OK && l.draft != NULL)
        code = eng_files_open(&draft_files, l.draft_dir, &err);
    bool ok = code == BASE_OK;
    if (ok) {
        const eng_files *files = eng_model__files(l.model);
        printf("ok   names, shapes, dtypes and offsets: %u tensors, %llu bytes\n",
               eng_files_count(files), (unsigned long long)eng_files_bytes(files));
        print_formats(files);
        ok = check_counts(&l, files) && ok;
        if (eng_model_dir(l.model) != NULL)
            ok = check_total(eng_model_dir(l.model), files) && ok;
        printf("ok   tokenizer: %u tokens of %u\n", eng_tok_vocab(tok), l.config->vocab);
        if (draft_files != NULL)
            printf("ok   draft: %u tensors, %llu bytes\n", eng_files_count(draft_files),
                   (unsigned long long)eng_files_bytes(draft_files));
        if (a->full) {
            ok = print_full("model", files) && ok;
            if (draft_files != NULL)
                ok = print_full("draft", draft_files) && ok;
        }
    } else {
        printf("FAIL %s\n", err.text);
    }
    eng_files_close(draft_files);
    eng_codec_destroy(codec);
    eng_tok_destroy(tok);
    unload(&l);
    return ok ? 0 : 1;
}

/* ---- random and tokens ---- */

static int run_random(const arguments *a)
{
    base_err err = BASE_ERR_INIT;
    if (a->rest_count != 2)
        return bad("random takes a shape and a folder");
    if (mkdir(a->rest[1], 0777) != 0 && errno != EEXIST)
        return bad("cannot create %s: %s", a->rest[1], strerror(errno));
    if (eng_random__write(a->rest[1], a->rest[0], a->layers, a->seeded ? a->sampling.seed : 1,
                          !a->no_draft, &err) != BASE_OK)
        return bad_err(&err);
    return 0;
}

static void print_ids(const int32_t *ids, size_t count, bool json)
{
    fputs(json ? "[" : "", stdout);
    for (size_t i = 0; i < count; i++)
        printf("%s%d", i == 0 ? "" : (json ? "," : " "), ids[i]);
    puts(json ? "]" : "");
}

/* Integers between spaces, commas or brackets. */
static base_code parse_ids(eng_ids *out, const char *text, uint32_t vocab, base_err *err)
{
    for (const char *at = text + strspn(text, " \t\r\n,[]"); *at != '\0';
         at += strspn(at, " \t\r\n,[]")) {
        char *end;
        long id = strtol(at, &end, 10);
        if (end == at || id < 0 || (unsigned long)id >= vocab)
            return base_fail(err, BASE_INVALID, "\"%.20s\" is not a token id below %u", at, vocab);
        eng_ids_add(out, (int32_t)id);
        at = end;
    }
    return out->failed ? base_fail(err, BASE_NOMEM, "too many ids") : BASE_OK;
}

static void print_text(const eng_tok *tok, const int32_t *ids, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char *bytes = eng_tok_bytes(tok, ids[i], &length);
        if (bytes != NULL)
            fwrite(bytes, 1, length, stdout);
    }
}

static int run_tokens(const arguments *a)
{
    base_err err = BASE_ERR_INIT;
    char path[4096];
    eng_tok *tok = NULL;
    base_buf text;
    eng_ids ids;
    if (a->rest_count < 1)
        return bad("tokens takes a folder");
    base_buf_init(&text, 0);
    eng_ids_init(&ids, 1u << 28);
    snprintf(path, sizeof path, "%s/tokenizer.json", a->rest[0]);
    base_code code = eng_tok_load(&tok, path, &err);
    for (int i = 1; i < a->rest_count; i++) {
        base_buf_puts(&text, i > 1 ? " " : "");
        base_buf_puts(&text, a->rest[i]);
    }
    if (code == BASE_OK && a->rest_count == 1)
        code = read_all(&text, "-", &err);
    if (code == BASE_OK && a->decode)
        code = parse_ids(&ids, text.data != NULL ? text.data : "", eng_tok_vocab(tok), &err);
    else if (code == BASE_OK)
        code = eng_tok_encode(tok, &ids, text.data != NULL ? text.data : "", text.length,
                              a->specials, &err);
    if (code == BASE_OK && a->decode)
        print_text(tok, ids.data, ids.count);
    else if (code == BASE_OK)
        print_ids(ids.data, ids.count, a->json);
    base_buf_deinit(&text);
    eng_ids_deinit(&ids);
    eng_tok_destroy(tok);
    return code == BASE_OK ? 0 : bad_err(&err);
}

/* ---- generate ---- */

typedef struct generation {
    loaded l;
    eng_tok *tok;
    eng_codec *codec;
    kn_kv *kv, *draft_kv;
    uint32_t *pages;
    uint32_t block;  /* draft tokens a round may verify; 0: none */
    bool cut;        /* by confidence */
    float *logits;   /* [block + 1, vocab] */
    float *features; /* [ROWS_MAX, count * hidden], device memory */
    eng_memory feature_memory;
    void *scratch;
    int32_t end_tokens[ENG_END_TOKENS_MAX + 1];
    uint32_t end_token_count;

    eng_ids prompt, output;
    eng_prompt rendered; /* with --chat */
    eng_chat chat;
    const char *finish;
    uint64_t prefill_ns, decode_ns;
    uint32_t steps, drafted, accepted;
} generation;

static void forward(generation *g, const int32_t *tokens, uint32_t start, uint32_t count,
                    const uint32_t *pick, uint32_t picks)
{
    int32_t pos[ROWS_MAX];
    uint32_t seq[ROWS_MAX] = {0};
    const uint32_t *tables[1] = {g->pages}, *layers = NULL;
    uint32_t layer_count = g->l.draft != NULL ? eng_draft_features(g->l.draft, &layers) : 0;
    for (uint32_t i = 0; i < count; i++)
        pos[i] = (int32_t)(start + i);
    kn_rows rows = {.rows = count, .token = tokens, .pos = pos, .seq = seq, .pages = tables};
    eng_model_forward(g->l.model, g->kv, &rows, pick, picks, g->logits, layers, layer_count,
                      g->features);
    if (g->l.draft != NULL)
        eng_draft_append(g->l.draft, g->draft_kv, &rows, g->features);
}

static int32_t choose(generation *g, const arguments *a, uint32_t row)
{
    eng_sampler_input in = {.logits = g->logits + (size_t)row * g->l.config->vocab,
                            .vocab = g->l.config->vocab < eng_tok_vocab(g->tok)
                                         ? g->l.config->vocab
                                         : eng_tok_vocab(g->tok),
                            .sampling = &a->sampling,
                            .end_tokens = g->end_tokens,
                            .end_token_count = g->end_token_count,
                            .ban = -1,
                            .output_index = g->output.count};
    int32_t token = eng_sample(&in, NULL, g->scratch);
    eng_ids_add(&g->output, token);
    return token;
}

static bool is_end(const generation *g, int32_t token)
{
    for (uint32_t i = 0; i < g->end_token_count; i++)
        if (g->end_tokens[i] == token)
            return true;
    return false;
}

/* Draft tokens behind `anchor` worth verifying. The cut looks only at the confidences before it, so
 * it does not bias what is accepted. */
static uint32_t propose(generation *g, const arguments *a, int32_t anchor, uint32_t position,
                        uint32_t most, int32_t *tokens)
{
    int32_t drafted[ENG_ROPE_SLACK];
    float confidence[ENG_ROPE_SLACK], chance = 1;
    uint32_t length = g->block < most ? g->block : most, count = 0;
    eng_draft_input in = {.anchor = anchor,
                          .anchor_pos = position,
                          .pages = g->pages,
                          .sampling = &a->sampling,
                          .output_index = g->output.count};
    if (length == 0)
        return 0;
    eng_draft_propose(g->l.draft, g->draft_kv, &in, 1, length, drafted, confidence);
    while (count < length) {
        chance *= confidence[count];
        if (g->cut && chance < 0.3f)
            break;
        tokens[count] = drafted[count];
        count++;
    }
    return count;
}

static void run_loop(generation *g, const arguments *a)
{
    uint32_t context = a->context, count = (uint32_t)g->prompt.count;
    uint64_t began = base_now_ns();
    for (uint32_t at = 0; at < count; at += ROWS_MAX) {
        uint32_t n = count - at < ROWS_MAX ? count - at : ROWS_MAX, last = n - 1;
        forward(g, g->prompt.data + at, at, n, &last, at + n == count ? 1 : 0);
    }
    g->prefill_ns = base_now_ns() - began;
    began = base_now_ns();
    uint32_t run = count; /* positions that are in pages */
    int32_t token = choose(g, a, 0);
    g->finish = "length";
    while (!is_end(g, token) && g->output.count < a->max && run < context) {
        int32_t rows[ENG_ROPE_SLACK + 1] = {token};
        uint32_t pick[ENG_ROPE_SLACK + 1], drafted = 0, kept = 0;
        size_t most = a->max - g->output.count - 1;
        if (most > context - run - 1)
            most = context - run - 1;
        if (g->block > 0)
            drafted = propose(g, a, token, run, (uint32_t)most, rows + 1);
        for (uint32_t i = 0; i <= drafted; i++)
            pick[i] = i;
        forward(g, rows, run, drafted + 1, pick, drafted + 1);
        g->steps++;
        g->drafted += drafted;
        for (;;) {
            token = choose(g, a, kept);
            run++;
            if (kept == drafted || token != rows[kept + 1] || is_end(g, token))
                break;
            kept++;
        }
        g->accepted += kept;
    }
    if (is_end(g, token))
        g->finish = "stop";
    g->decode_ns = base_now_ns() - began;
}

static base_code read_prompt(generation *g, const arguments *a, base_err *err)
{
    base_buf text;
    base_code code = BASE_OK;
    base_buf_init(&text, (size_t)1 << 30);
    if ((a->prompt != NULL) + (a->chat != NULL) + (a->ids != NULL) > 1)
        code = base_fail(err, BASE_INVALID, "--prompt, --chat and --ids exclude one another");
    else if (a->prompt != NULL)
        base_buf_puts(&text, a->prompt);
    else
        code = read_all(&text, a->chat != NULL ? a->chat : (a->ids != NULL ? a->ids : "-"), err);
    const char *data = text.data != NULL ? text.data : "";
    if (code != BASE_OK)
        goto out;
    if (a->ids != NULL) {
        code = parse_ids(&g->prompt, data, g->l.config->vocab, err);
    } else if (a->chat != NULL) {
        /* The chat points into the text for as long as the decoder knows the tools. */
        char *copy = base_arena_copy(g->l.arena, data, text.length);
        code = copy == NULL ? base_fail(err, BASE_NOMEM, "the conversation is too large")
                            : chat_file_parse(&g->chat, copy, text.length, g->l.arena, err);
        if (code == BASE_OK)
            code = eng_codec_render(g->codec, &g->rendered, &g->chat, a->context, a->context, NULL,
                                    g->l.arena, err);
        for (uint32_t i = 0; code == BASE_OK && i < g->rendered.token_count; i++)
            eng_ids_add(&g->prompt, g->rendered.tokens[i]);
    } else {
        code = eng_tok_encode(g->tok, &g->prompt, data, text.length, true, err);
    }
    if (code == BASE_OK && g->prompt.count == 0)
        code = base_fail(err, BASE_INVALID, "the prompt is empty");
    if (code == BASE_OK && g->prompt.count >= a->context)
        code = base_fail(err, BASE_TOO_LONG, "the prompt's %zu tokens fill the context of %u",
                         g->prompt.count, a->context);
out:
    base_buf_deinit(&text);
    return code;
}

static base_code parse_draft(generation *g, const arguments *a, base_err *err)
{
    uint32_t block = g->l.draft != NULL ? eng_draft_block(g->l.draft) : 0;
    char *end;
    if (strcmp(a->draft, "off") == 0)
        return BASE_OK;
    if (strcmp(a->draft, "auto") == 0) {
        g->block = block;
        g->cut = true;
        return BASE_OK;
    }
    unsigned long n = strtoul(a->draft, &end, 10);
    if (a->draft[0] < '0' || a->draft[0] > '9' || *end != '\0' || n > block)
        return base_fail(err, BASE_INVALID, "--draft %.20s is none of auto, off, 0 to %u", a->draft,
                         block);
    g->block = (uint32_t)n;
    return BASE_OK;
}

static base_code open_generation(generation *g, arguments *a, base_err *err)
{
    base_code code = load(&g->l, a, a->rest[0], ROWS_MAX, strcmp(a->draft, "off") != 0, false, err);
    if (code != BASE_OK)
        return code;
    a->context = eng_model__context_max(g->l.model);
    if ((code = parse_draft(g, a, err)) != BASE_OK ||
        (code = eng_tok_load(&g->tok, eng_model_tokenizer_path(g->l.model), err)) != BASE_OK ||
        (code = eng_sampling_check(&a->sampling, g->l.config->vocab, err)) != BASE_OK)
        return code;
    const int32_t *ends = eng_model_end_tokens(g->l.model, &g->end_token_count);
    memcpy(g->end_tokens, ends, g->end_token_count * sizeof *ends);
    if (a->chat != NULL) {
        code =
            eng_codec_create(&g->codec, g->tok, g->l.config->identity, g->l.config->thinking, err);
        if (code != BASE_OK)
            return code;
        if (!is_end(g, eng_codec_end_token(g->codec)))
            g->end_tokens[g->end_token_count++] = eng_codec_end_token(g->codec);
    }
    if ((code = read_prompt(g, a, err)) != BASE_OK)
        return code;
    /* Pages for the positions that this run can reach, not for the whole window. */
    size_t reach = g->prompt.count + a->max + ENG_ROPE_SLACK;
    uint32_t page_count =
        (uint32_t)((reach < a->context ? reach : a->context) / KN_PAGE_TOKENS + 1);
    kn_kv_shape shape = eng_model_kv_shape(g->l.model, page_count);
    if ((code = kn_kv_create(&g->kv, eng_model_device(g->l.model), &shape, err)) != BASE_OK)
        return code;
    if (g->l.draft != NULL) {
        const uint32_t *layers;
        shape = eng_draft_kv_shape(g->l.draft, page_count);
        if ((code = kn_kv_create(&g->draft_kv, eng_model_device(g->l.model), &shape, err)) !=
            BASE_OK)
            return code;
        const eng_piece piece = {&g->features,
                                 (size_t)ROWS_MAX * eng_draft_features(g->l.draft, &layers) *
                                     g->l.config->hidden,
                                 sizeof *g->features};
        if ((code = eng_memory_take(&g->feature_memory, eng_model_device(g->l.model), &piece, 1,
                                    err)) != BASE_OK)
            return code;
    }
    g->pages = base_arena_calloc(g->l.arena, page_count, sizeof *g->pages);
    g->logits =
        base_arena_calloc(g->l.arena, (size_t)(g->block + 1) * g->l.config->vocab, sizeof(float));
    g->scratch = base_arena_alloc(g->l.arena, eng_sample_scratch(g->l.config->vocab));
    if (base_arena_failed(g->l.arena))
        return base_fail(err, BASE_NOMEM, "out of memory");
    for (uint32_t i = 0; i < page_count; i++)
        g->pages[i] = i;
    return BASE_OK;
}

/* What the decoder gives out, gathered for --json or printed. */
typedef struct parts {
    base_buf reasoning, text;
    json_t *calls;
    base_buf name, call_arguments;
} parts;

static void take_part(void *ctx, const eng_part *part)
{
    parts *p = ctx;
    switch (part->kind) {
    case ENG_PART_REASONING:
        base_buf_add(&p->reasoning, part->text, part->length);
        break;
    case ENG_PART_TEXT:
        base_buf_add(&p->text, part->text, part->length);
        break;
    case ENG_PART_CALL_BEGIN:
        base_buf_clear(&p->name);
        base_buf_clear(&p->call_arguments);
        base_buf_add(&p->name, part->text, part->length);
        break;
    case ENG_PART_CALL_ARGS:
        base_buf_add(&p->call_arguments, part->text, part->length);
        break;
    case ENG_PART_CALL_END:
        json_array_append_new(
            p->calls, json_pack("{s:s%, s:s%}", "name", p->name.data != NULL ? p->name.data : "",
                                p->name.length, "arguments",
                                p->call_arguments.data != NULL ? p->call_arguments.data : "",
                                p->call_arguments.length));
        break;
    }
}

static base_code decode_parts(generation *g, parts *p, base_err *err)
{
    eng_decoder *decoder;
    eng_decoder_options options = {.parse = ENG_PARSE_CHAT,
                                   .starts_in_reasoning = g->rendered.starts_in_reasoning,
                                   .thinking = g->rendered.thinking,
                                   .tools = g->chat.tools,
                                   .tool_count = g->chat.tool_count,
                                   .part = take_part,
                                   .ctx = p};
    base_code code = eng_decoder_create(&decoder, g->codec, &options, err);
    if (code != BASE_OK)
        return code;
    for (size_t i = 0; i < g->output.count; i++) {
        size_t length = 0;
        const char *bytes = eng_tok_bytes(g->tok, g->output.data[i], &length);
        if (!eng_decoder_push(decoder, g->output.data[i], bytes, length))
            break;
    }
    eng_decoder_finish(decoder);
    eng_decoder_destroy(decoder);
    return BASE_OK;
}

static json_t *string_of(const base_buf *b)
{
    json_t *out = json_stringn(b->data != NULL ? b->data : "", b->length);
    return out != NULL ? out : json_null(); /* not UTF-8 */
}

static void print_json(generation *g, const arguments *a, const parts *p)
{
    json_t *tokens = json_array(), *out;
    base_buf raw;
    base_buf_init(&raw, 0);
    for (size_t i = 0; i < g->output.count; i++) {
        size_t length = 0;
        const char *bytes = eng_tok_bytes(g->tok, g->output.data[i], &length);
        json_array_append_new(tokens, json_integer(g->output.data[i]));
        base_buf_add(&raw, bytes != NULL ? bytes : "", length);
    }
    out = json_pack("{s:i, s:o, s:s, s:o}", "prompt_tokens", (int)g->prompt.count, "tokens", tokens,
                    "finish", g->finish, "raw", string_of(&raw));
    if (a->chat != NULL)
        json_object_update_new(out,
                               json_pack("{s:o, s:o, s:O}", "reasoning", string_of(&p->reasoning),
                                         "text", string_of(&p->text), "calls", p->calls));
    json_object_update_new(
        out, json_pack("{s:f, s:f, s:i, s:i, s:i}", "prefill_ms", (double)g->prefill_ns * 1e-6,
                       "decode_ms", (double)g->decode_ns * 1e-6, "steps", (int)g->steps, "drafted",
                       (int)g->drafted, "accepted", (int)g->accepted));
    json_dumpf(out, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(out);
    base_buf_deinit(&raw);
}

static void print_times(const generation *g)
{
    double prefill = (double)g->prefill_ns * 1e-9, decode = (double)g->decode_ns * 1e-9;
    size_t made = g->output.count > 0 ? g->output.count - 1 : 0; /* the first one is prefill's */
    fprintf(
        stderr,
        "%zu prompt tokens in %.1f ms (%.0f tok/s); %zu tokens in %.1f ms (%.0f tok/s), finish %s",
        g->prompt.count, prefill * 1e3, (double)g->prompt.count / prefill, g->output.count,
        decode * 1e3, decode > 0 ? (double)made / decode : 0.0, g->finish);
    if (g->block > 0)
        fprintf(stderr, "; %u steps, %u of %u drafted tokens kept", g->steps, g->accepted,
                g->drafted);
    fputc('\n', stderr);
}

static void print_parts(const parts *p)
{
    if (p->reasoning.length > 0)
        printf("<mm:think>%.*s</mm:think>\n", (int)p->reasoning.length, p->reasoning.data);
    if (p->text.length > 0)
        printf("%.*s\n", (int)p->text.length, p->text.data);
    for (size_t i = 0; i < json_array_size(p->calls); i++) {
        const json_t *call = json_array_get(p->calls, i);
        printf("%s(%s)\n", json_string_value(json_object_get(call, "name")),
               json_string_value(json_object_get(call, "arguments")));
    }
}

static int run_generate(arguments *a)
{
    base_err err = BASE_ERR_INIT;
    generation g = {0};
    parts p = {.calls = json_array()};
    if (a->rest_count != 1)
        return bad("generate takes one folder");
    eng_ids_init(&g.prompt, 1u << 26);
    eng_ids_init(&g.output, 1u << 26);
    base_buf_init(&p.reasoning, 0);
    base_buf_init(&p.text, 0);
    base_buf_init(&p.name, 0);
    base_buf_init(&p.call_arguments, 0);
    base_code code = open_generation(&g, a, &err);
    if (code == BASE_OK) {
        run_loop(&g, a);
        if (a->chat != NULL && !a->raw)
            code = decode_parts(&g, &p, &err);
    }
    if (code == BASE_OK) {
        if (a->json)
            print_json(&g, a, &p);
        else if (a->ids != NULL)
            print_ids(g.output.data, g.output.count, false);
        else if (a->chat != NULL && !a->raw)
            print_parts(&p);
        else
            print_text(g.tok, g.output.data, g.output.count);
        if (!a->json && a->ids == NULL && (a->chat == NULL || a->raw))
            putchar('\n');
        if (!a->json)
            print_times(&g);
    }
    base_buf_deinit(&p.reasoning);
    base_buf_deinit(&p.text);
    base_buf_deinit(&p.name);
    base_buf_deinit(&p.call_arguments);
    json_decref(p.calls);
    eng_ids_deinit(&g.prompt);
    eng_ids_deinit(&g.output);
    eng_memory_free(&g.feature_memory);
    kn_kv_destroy(g.draft_kv);
    kn_kv_destroy(g.kv);
    eng_codec_destroy(g.codec);
    eng_tok_destroy(g.tok);
    unload(&g.l);
    return code == BASE_OK ? 0 : bad_err(&err);
}

static int run_export(const arguments *a)
{
    base_err err = BASE_ERR_INIT;
    gguf_summary sum;
    if (a->rest_count != 2)
        return bad("export-gguf takes a folder and a file");
    if (gguf_export(a->rest[0], a->rest[1], a->exact, &sum, &err) != BASE_OK)
        return bad_err(&err);
    printf("%s: %llu tensors, %llu bytes; values: nvfp4 %llu, q8_0 %llu, bf16 %llu, f32 %llu\n",
           a->rest[1], (unsigned long long)sum.tensors, (unsigned long long)sum.bytes,
           (unsigned long long)sum.nvfp4, (unsigned long long)sum.q8_0,
           (unsigned long long)sum.bf16, (unsigned long long)sum.f32);
    if (sum.dense_only_layers > 0)
        printf("the first %u layers attend to everything there: the same up to %u tokens of "
               "context\n",
               sum.dense_only_layers, sum.equal_tokens);
    return 0;
}

int main(int argc, char **argv)
{
    arguments a;
    if (argc < 2) {
        fputs(USAGE, stderr);
        return EXIT_BAD;
    }
    const char *command = argv[1];
    if (strcmp(command, "--help") == 0 || strcmp(command, "help") == 0) {
        fputs(USAGE, stdout);
        return 0;
    }
    parse_arguments(&a, argc - 1, argv + 1);
    if (strcmp(command, "info") == 0)
        return run_info(&a);
    if (strcmp(command, "verify") == 0)
        return run_verify(&a);
    if (strcmp(command, "random") == 0)
        return run_random(&a);
    if (strcmp(command, "export-gguf") == 0)
        return run_export(&a);
    if (strcmp(command, "tokens") == 0)
        return run_tokens(&a);
    if (strcmp(command, "generate") == 0)
        return run_generate(&a);
    return bad("\"%s\" is none of info, verify, random, export-gguf, tokens, generate; see --help",
               command);
}
