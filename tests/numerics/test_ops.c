/* Every operation on every variant: against ref within a bound, and bit for bit between variants,
 * thread counts and cuts of the rows.
 *
 * Bounds. linear: a float sum of n products in sixteen lanes errs by less than (n/16 + 5) * 2^-24
 * of the sum of magnitudes; 2^-20 covers n up to 12,000 with room. norms: a mean over many squares
 * errs by a few 2^-24, square root, division and two products add 2^-24 each: 2^-21 relative. Whole
 * operations (mlp, moe, attention) chain such steps; 1e-5 of the row's largest value is what the
 * golden vectors allow too. */
#include "tests/numerics/support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define ROWS 129

/* An operation on the rows [first, first + rows) of a case: writes rows x width floats to out. */
typedef void run_fn(kn_device *device, const void *ctx, uint32_t first, uint32_t rows, float *out);

static void run_in_chunks(kn_device *device, run_fn *run, const void *ctx, uint32_t chunk,
                          size_t width, float *out)
{
    for (uint32_t r = 0; r < ROWS; r += chunk)
        run(device, ctx, r, chunk < ROWS - r ? chunk : ROWS - r, out + r * width);
}

/* All rows by ref into `expect`, and cut, with the same bits; then every variant, thread count and
 * cut: equal bits among them. What the vector variants agree on goes to `got`. */
static void run_everywhere(const char *what, run_fn *run, const void *ctx, size_t width,
                           float *expect, float *got)
{
    const char *names[2];
    const uint32_t variants = vector_variants(names);
    kn_device *ref = open_device("ref", 1);
    run(ref, ctx, 0, ROWS, expect);
    float *other = zeroed(ROWS * width * sizeof *other);
    for (uint32_t r = 0; r < 7; r++) /* alone */
        run(ref, ctx, r, 1, other + r * width);
    run(ref, ctx, 7, ROWS - 7, other + 7 * width);
    same_bits(other, expect, ROWS * width, what);
    kn_device_destroy(ref);
    for (uint32_t v = 0; v < variants; v++)
        for (uint32_t threads = 1; threads <= 3; threads++) {
            kn_device *device = open_device(names[v], threads);
            for (int c = 0; c < 8; c++) {
                char label[128];
                snprintf(label, sizeof label, "%s, %s, %u threads, chunks of %u", what, names[v],
                         threads, chunk_sizes[c]);
                float *out = v == 0 && threads == 1 && c == 0 ? got : other;
                run_in_chunks(device, run, ctx, chunk_sizes[c], width, out);
                same_bits(out, got, ROWS * width, label);
            }
            kn_device_destroy(device);
        }
}

/* ---- norm ---- */

typedef struct norm_case {
    const float *x, *w;
    uint32_t heads, cols; /* cols of one head */
    kn_rope rope;
    const int32_t *pos;
} norm_case;

static void run_norm(kn_device *device, const void *ctx, uint32_t first, uint32_t rows, float *out)
{
    const norm_case *c = ctx;
    device->ops->norm(device, out, c->x + (size_t)first * c->cols, c->w, rows, c->cols, 1e-6f);
}

Test(ops, norm)
{
    static const uint32_t cols[] = {1, 15, 16, 64, 384, 397, 1536};
    for (size_t i = 0; i < sizeof cols / sizeof *cols; i++) {
        const size_t n = (size_t)ROWS * cols[i];
        norm_case c = {.x = random_floats(i, n, 3.0f),
                       .w = random_floats(i + 50, cols[i], 1.0f),
                       .cols = cols[i]};
        float *expect = zeroed(n * sizeof(float));
        float *got = zeroed(n * sizeof(float));
        float *bound = zeroed(n * sizeof(float));
        run_everywhere("norm", run_norm, &c, cols[i], expect, got);
        for (size_t k = 0; k < n; k++)
            bound[k] = fabsf(expect[k]) * 0x1p-21f;
        within(got, expect, n, bound, 1, "norm");
    }
}

static kn_rope make_rope(uint32_t rotary_dim, uint32_t positions)
{
    const uint32_t half = rotary_dim / 2;
    float *cos = zeroed((size_t)positions * half * sizeof *cos);
    float *sin = zeroed((size_t)positions * half * sizeof *sin);
    for (uint32_t p = 0; p < positions; p++)
        for (uint32_t i = 0; i < half; i++) {
            const float angle = (float)p * powf(10000.0f, -2.0f * (float)i / (float)rotary_dim);
            cos[p * half + i] = cosf(angle);
            sin[p * half + i] = sinf(angle);
        }
    return (kn_rope){.cos = cos, .sin = sin, .rotary_dim = rotary_dim};
}

static void run_head(kn_device *device, const void *ctx, uint32_t first, uint32_t rows, float *out)
{
    const norm_case *c = ctx;
    const size_t width = (size_t)c->heads * c->cols;
    memcpy(out, c->x + first * width, rows * width * sizeof *out);
    device->ops->head_norm_rope(device, out, c->w, rows, c->heads, c->cols, 1e-6f, &c->rope,
                                c->pos + first);
}

Test(ops, head_norm_rope)
{
    static const struct {
        uint32_t heads, dim, rotary;
    } t[] = {{8, 64, 32}, {3, 128, 64}, {2, 32, 16}, {1, 64, 0}, {2, 48, 24}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        const size_t width = (size_t)t[i].heads * t[i].dim;
        int32_t pos[ROWS];
        for (int r = 0; r < ROWS; r++)
            pos[r] = r * 7;
        norm_case c = {.x = random_floats(i, ROWS * width, 3.0f),
                       .w = random_floats(i + 50, t[i].dim, 1.0f),
                       .heads = t[i].heads,
                       .cols = t[i].dim,
                       .rope = make_rope(t[i].rotary, ROWS * 7),
                       .pos = pos};
        float *expect = zeroed(ROWS * width * sizeof(float));
        float *got = zeroed(ROWS * width * sizeof(float));
        run_everywhere("head_norm_rope", run_head, &c, width, expect, got);
        within_rows(got, expect, ROWS, width, 0x1p-20f, "head_norm_rope");
    }
}

/* ---- linear, embed, head ---- */

typedef struct linear_case {
    const float *x, *start, *norm;
    const kn_weight *w;
    bool add;
} linear_case;

static void run_linear(kn_device *device, const void *ctx, uint32_t first, uint32_t rows,
                       float *out)
{
    const linear_case *c = ctx;
    memcpy(out, c->start + (size_t)first * c->w->rows, (size_t)rows * c->w->rows * sizeof *out);
    device->ops->linear(device, out, c->x + (size_t)first * c->w->cols, c->w, rows, c->add);
}

static void check_linear(kn_type type, uint32_t outs, uint32_t cols, bool add, size_t misalign)
{
    const kn_weight w = random_weight(outs * 31 + cols, type, outs, cols);
    const kn_weight w_abs = absolute_weight(&w);
    float *x = random_floats(cols, (size_t)ROWS * cols + misalign, 1.0f) + misalign;
    float *x_abs = zeroed((size_t)ROWS * cols * sizeof(float));
    for (size_t i = 0; i < (size_t)ROWS * cols; i++)
        x_abs[i] = fabsf(x[i]);
    const size_t n = (size_t)ROWS * outs;
    linear_case c = {.x = x, .start = random_floats(3, n, add ? 1.0f : NAN), .w = &w, .add = add};
    float *expect = zeroed(n * sizeof(float));
    float *got = zeroed(n * sizeof(float));
    float *bound = zeroed(n * sizeof(float));
    char what[64];
    snprintf(what, sizeof what, "linear of type %d, %u x %u", type, outs, cols);
    run_everywhere(what, run_linear, &c, outs, expect, got);
    kn_device *ref = open_device("ref", 1);
    ref->ops->linear(ref, bound, x_abs, &w_abs, ROWS, false);
    for (size_t i = 0; i < n; i++)
        bound[i] = bound[i] * 0x1p-20f + fabsf(expect[i]) * 0x1p-23f;
    within(got, expect, n, bound, 1, what);
    kn_device_destroy(ref);

    const kn_weight packed = packed_weight(&w);
    if (!packed.tiles)
        return;
    float *again = zeroed(n * sizeof(float));
    c.w = &packed;
    run_everywhere("packed", run_linear, &c, outs, expect, again);
    same_bits(again, got, n, "packed and stored form");
}

/* ops.h's reduction for NVFP4, word for word. */
static float nvfp4_dot(const float *x, const kn_weight *w, uint32_t out)
{
    float acc[8] = {0};
    for (uint32_t g = 0; g < w->cols / 16; g++) {
        float largest = 0;
        for (uint32_t i = 0; i < 16; i++)
            largest = fmaxf(largest, fabsf(x[g * 16 + i]));
        if (largest < 0x1p-90f)
            continue;
        const int e = ilogbf(largest);
        int64_t s = 0;
        for (uint32_t i = 0; i < 16; i++) {
            const uint32_t k = g * 16 + i;
            const uint8_t byte = ((const uint8_t *)w->data)[((size_t)out * w->cols + k) / 2];
            const float code = kn_e2m1_to_f32(k & 1 ? byte >> 4 : byte & 15);
            s += (int64_t)(2.0f * code) * (int64_t)rintf(ldexpf(x[k], 21 - e));
        }
        cr_assert(s > INT32_MIN && s < INT32_MAX);
        const float scale =
            kn_e4m3_to_f32(((const uint8_t *)w->scale)[((size_t)out * w->cols) / 16 + g]);
        acc[g % 8] = fmaf((float)s, scale * ldexpf(1.0f, e - 22), acc[g % 8]);
    }
    for (int h = 4; h > 0; h /= 2)
        for (int j = 0; j < h; j++)
            acc[j] += acc[j + h];
    return acc[0] / w->scale_global;
}

Test(ops, nvfp4_follows_the_written_reduction)
{
    const char *names[2];
    const uint32_t variants = vector_variants(names);
    const uint32_t outs = 40, cols = 16 * 21, rows = 7;
    const kn_weight w = random_weight(77, KN_NVFP4, outs, cols);
    const kn_weight packed = packed_weight(&w);
    float *x = random_floats(78, (size_t)rows * cols, 1.0f);
    for (uint32_t k = 0; k < cols; k++) {
        x[cols + k] *= ldexpf(1.0f, (int)(k % 37) * 3 - 50); /* outliers */
        x[2 * cols + k] = k % 3 ? 0.0f : -x[2 * cols + k] * 1e30f;
        x[3 * cols + k] *= k < 16 ? 1e-35f : 1e-28f; /* the first group counts as zeros */
        x[4 * cols + k] = ldexpf(k % 2 ? 1.0f : -1.0f, (int)(k / 16) - 8);
        x[5 * cols + k] = nextafterf(2.0f, 0.0f);
    }
    for (uint32_t v = 0; v < variants; v++) {
        kn_device *device = open_device(names[v], 1);
        float *y = zeroed((size_t)rows * outs * sizeof *y);
        device->ops->linear(device, y, x, &packed, rows, false);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t o = 0; o < outs; o++) {
                const float want = nvfp4_dot(x + (size_t)r * cols, &w, o);
                cr_assert(y[r * outs + o] == want, "%s: row %u output %u is %.9g, not %.9g",
                          names[v], r, o, y[r * outs + o], want);
            }
        x[6 * cols + 5] = INFINITY;
        device->ops->linear(device, y, x, &packed, rows, false);
        for (uint32_t o = 0; o < outs; o++) {
            cr_assert(isnan(y[6 * outs + o]));
            cr_assert(isfinite(y[o]));
        }
        x[6 * cols + 5] = 0;
        kn_device_destroy(device);
    }
}

Test(ops, linear)
{
    /* Tails of the outputs, of the columns, of scale panels; one and several panels of columns. */
    static const struct {
        kn_type type;
        uint32_t outs, cols;
    } t[] = {{KN_F32, 16, 384},    {KN_F32, 5, 7},      {KN_F32, 1, 400},     {KN_F32, 33, 1553},
             {KN_BF16, 64, 384},   {KN_BF16, 131, 397}, {KN_BF16, 6, 1600},   {KN_MXFP8, 128, 384},
             {KN_MXFP8, 66, 32},   {KN_MXFP8, 7, 544},  {KN_MXFP8, 20, 1568}, {KN_NVFP4, 128, 384},
             {KN_NVFP4, 384, 128}, {KN_NVFP4, 9, 16},   {KN_NVFP4, 35, 272},  {KN_NVFP4, 20, 1584}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        check_linear(t[i].type, t[i].outs, t[i].cols, i % 2 == 1, i % 3);
}

static void run_embed(kn_device *device, const void *ctx, uint32_t first, uint32_t rows, float *out)
{
    const linear_case *c = ctx;
    int32_t ids[ROWS];
    for (uint32_t r = 0; r < rows; r++)
        ids[r] = (int32_t)((first + r) * 37 % c->w->rows);
    device->ops->embed(device, out, c->w, ids, rows);
}

Test(ops, embed_is_exact)
{
    for (kn_type type = KN_F32; type <= KN_NVFP4; type++) {
        const kn_weight w = random_weight(type, type, 100, 416);
        const linear_case c = {.w = &w};
        float *expect = zeroed(ROWS * 416 * sizeof(float));
        float *got = zeroed(ROWS * 416 * sizeof(float));
        run_everywhere("embed", run_embed, &c, 416, expect, got);
        same_bits(got, expect, ROWS * 416, "embed");
    }
}

static void run_lm_head(kn_device *device, const void *ctx, uint32_t first, uint32_t rows,
                        float *out)
{
    const linear_case *c = ctx;
    uint32_t pick[ROWS];
    for (uint32_t r = 0; r < rows; r++)
        pick[r] = (first + r) * 5 % ROWS;
    device->ops->head(device, out, c->x, c->norm, c->w, pick, rows, c->w->cols, 1e-6f);
}

Test(ops, head)
{
    const kn_weight w = random_weight(5, KN_BF16, 331, 384);
    const linear_case c = {
        .x = random_floats(6, ROWS * 384, 2.0f), .norm = random_floats(7, 384, 0.5f), .w = &w};
    float *expect = zeroed(ROWS * 331 * sizeof(float));
    float *got = zeroed(ROWS * 331 * sizeof(float));
    run_everywhere("head", run_lm_head, &c, 331, expect, got);
    within_rows(got, expect, ROWS, 331, 1e-6f, "head");
}

/* ---- mlp and moe ---- */

static void run_mlp(kn_device *device, const void *ctx, uint32_t first, uint32_t rows, float *out)
{
    kn_mlp a = *(const kn_mlp *)ctx;
    memcpy(out, a.x + (size_t)first * a.hidden, (size_t)rows * a.hidden * sizeof *out);
    a.x = out;
    device->ops->mlp(device, rows, &a);
}

Test(ops, mlp)
{
    for (kn_type type = KN_F32; type <= KN_NVFP4; type++) {
        const kn_weight gate = random_weight(1, type, 224, 128);
        const kn_weight up = random_weight(2, type, 224, 128);
        const kn_weight stored = random_weight(3, type, 128, 224);
        const kn_weight down = packed_weight(&stored);
        const kn_mlp a = {.x = random_floats(4, ROWS * 128, 4.0f),
                          .hidden = 128,
                          .inner = 224,
                          .eps = 1e-6f,
                          .norm = random_floats(5, 128, 0.5f),
                          .gate = &gate,
                          .up = &up,
                          .down = &down,
                          .act = {.alpha = 1.702f, .limit = 7.0f}};
        float *expect = zeroed(ROWS * 128 * sizeof(float));
        float *got = zeroed(ROWS * 128 * sizeof(float));
        run_everywhere("mlp", run_mlp, &a, 128, expect, got);
        within_rows(got, expect, ROWS, 128, 1e-5f, "mlp");
    }
}

typedef struct moe_case {
    kn_moe a;
} moe_case;

/* A row's output, then its ids as floats, then its weights. */
static void run_moe(kn_device *device, const void *ctx, uint32_t first, uint32_t rows, float *out)
{
    kn_moe a = *(const kn_moe *)ctx;
    const size_t width = a.hidden + 2 * a.topk;
    float *x = zeroed((size_t)rows * a.hidden * sizeof *x);
    memcpy(x, a.x + (size_t)first * a.hidden, (size_t)rows * a.hidden * sizeof *x);
    a.x = x;
    a.route_ids = zeroed(rows * a.topk * sizeof(int32_t));
    a.route_weights = zeroed(rows * a.topk * sizeof(float));
    device->ops->moe(device, rows, &a);
    for (uint32_t r = 0; r < rows; r++) {
        memcpy(out + r * width, x + (size_t)r * a.hidden, a.hidden * sizeof *out);
        for (uint32_t k = 0; k < a.topk; k++) {
            out[r * width + a.hidden + k] = (float)a.route_ids[r * a.topk + k];
            out[r * width + a.hidden + a.topk + k] = a.route_weights[r * a.topk + k];
        }
    }
}

static void check_moe(kn_type type, uint32_t experts, uint32_t topk, uint32_t inner,
                      uint32_t shared_inner)
{
    const uint32_t hidden = 160;
    kn_weight w1[64], w2[64], w3[64];
    for (uint32_t e = 0; e < experts; e++) {
        w1[e] = random_weight(e * 3 + 10, type, inner, hidden);
        w2[e] = random_weight(e * 3 + 11, type, hidden, inner);
        w3[e] = random_weight(e * 3 + 12, type, inner, hidden);
        if (e % 2) {
            w1[e] = packed_weight(&w1[e]);
            w2[e] = packed_weight(&w2[e]);
        }
    }
    const kn_weight gate = random_weight(1, KN_MXFP8, shared_inner, hidden);
    const kn_weight up = random_weight(2, KN_MXFP8, shared_inner, hidden);
    const kn_weight down = random_weight(3, KN_MXFP8, hidden, shared_inner);
    const kn_moe a = {.x = random_floats(4, ROWS * hidden, 4.0f),
                      .hidden = hidden,
                      .inner = inner,
                      .shared_inner = shared_inner,
                      .experts = experts,
                      .topk = topk,
                      .eps = 1e-6f,
                      .routed_scale = 2.0f,
                      .norm = random_floats(5, hidden, 0.5f),
                      .router = random_floats(6, (size_t)experts * hidden, 0.2f),
                      .bias = random_floats(7, experts, 0.3f),
                      .w1 = w1,
                      .w2 = w2,
                      .w3 = w3,
                      .shared_gate = shared_inner ? &gate : NULL,
                      .shared_up = shared_inner ? &up : NULL,
                      .shared_down = shared_inner ? &down : NULL,
                      .act = {.alpha = 1.702f, .limit = 7.0f}};
    const size_t width = hidden + 2 * topk;
    float *expect = zeroed(ROWS * width * sizeof(float));
    float *got = zeroed(ROWS * width * sizeof(float));
    run_everywhere("moe", run_moe, &a, width, expect, got);
    for (uint32_t r = 0; r < ROWS; r++) {
        const float *g = got + r * width;
        const float *e = expect + r * width;
        same_bits(g + hidden, e + hidden, topk, "moe: ids");
        within_rows(g + hidden + topk, e + hidden + topk, 1, topk, 1e-6f, "moe: weights");
        within_rows(g, e, 1, hidden, 1e-5f, "moe");
        for (uint32_t k = 1; k < topk; k++)
            cr_assert(g[hidden + k] > g[hidden + k - 1], "ids ascend");
    }
}

Test(ops, moe)
{
    check_moe(KN_NVFP4, 16, 2, 128, 128);
    check_moe(KN_NVFP4, 7, 3, 48, 0);
    check_moe(KN_MXFP8, 33, 4, 64, 96);
    check_moe(KN_BF16, 4, 1, 20, 32);
    check_moe(KN_F32, 4, 4, 24, 32);
}

Test(ops, moe_ties_go_to_the_lower_id)
{
    static const char *const variants[] = {"ref", "avx2", "avx512"};
    const kn_weight w = random_weight(1, KN_NVFP4, 32, 32);
    const kn_weight all[6] = {w, w, w, w, w, w};
    float zero[6 * 32] = {0};
    const float bias[6] = {0, 1, 0, 1, 1, 0};
    for (int v = 0; v < 3; v++) {
        kn_device *device = open_device(variants[v], 1);
        if (!device)
            continue;
        float *x = random_floats(2, 32, 1.0f);
        int32_t ids[4];
        float weights[4];
        const kn_moe a = {.x = x,
                          .hidden = 32,
                          .inner = 32,
                          .experts = 6,
                          .topk = 4,
                          .eps = 1e-6f,
                          .routed_scale = 2.0f,
                          .norm = zero,
                          .router = zero,
                          .bias = bias,
                          .w1 = all,
                          .w2 = all,
                          .w3 = all,
                          .act = {.alpha = 1.702f, .limit = 7.0f},
                          .route_ids = ids,
                          .route_weights = weights};
        device->ops->moe(device, 1, &a);
        static const int32_t expect[4] = {0, 1, 3, 4};
        cr_assert_arr_eq(ids, expect, sizeof ids);
        for (int i = 0; i < 4; i++)
            cr_assert_float_eq(weights[i], 0.5f, 1e-6);
        kn_device_destroy(device);
    }
}
