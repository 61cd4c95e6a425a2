/* A GPU backend against the cpu's, on fresh random data at the true shapes of M3.1 and at nano's:
 *   gpu_check MODULE.so [SEED [small]]      small: nano's shapes alone, for slow tools
 * Exit 77 without a GPU. A plain program, so that it runs where only the module and it are.
 *
 * Values: |gpu - cpu| <= 2e-5 of the row's largest value (the cpu's written reductions are within
 * 1e-5 of the plain formula). Rows: the same bits alone, in any chunk and under a recorded graph.
 */
#include "kernels/backend.h"

#include "engine/base/num.h"
#include "engine/base/rand.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHARE 2e-5

static kn_device *gpu, *cpu;
static uint64_t seed = 1;
static int failures, checks;

static void verdict(bool fine, const char *what, const char *fmt, double a, double b)
{
    checks++;
    failures += !fine;
    printf("%s %s", fine ? "[pass]" : "[fail]", what);
    if (fmt) {
        printf(": ");
        printf(fmt, a, b);
    }
    printf("\n");
    fflush(stdout);
}

/* ---- memory ---- */

static void *host(size_t bytes)
{
    void *p = aligned_alloc(256, base_align_up(bytes + 256, 256));
    if (!p)
        exit(1);
    return p;
}

static void *on_gpu(const void *src, size_t bytes)
{
    base_err err = BASE_ERR_INIT;
    void *p = gpu->backend->alloc(gpu, bytes, &err);
    if (!p) {
        printf("[fail] %s\n", err.text);
        exit(1);
    }
    if (src)
        gpu->backend->upload(gpu, p, src, bytes);
    else
        gpu->backend->fill(gpu, p, bytes, 0, 0, NULL);
    return p;
}

static float *from_gpu(const void *src, size_t count)
{
    float *p = host(count * 4);
    gpu->backend->download(gpu, p, src, count * 4);
    return p;
}

static float *floats(size_t count, float size)
{
    static uint64_t stream;
    float *p = host(count * 4);
    stream++;
    for (size_t i = 0; i < count; i += 4) {
        const base_rand4 r = base_rand(seed, stream, i / 4);
        for (size_t j = 0; j < 4 && i + j < count; j++)
            p[i + j] = size * (float)(2.0 * base_rand_unit(r.v[j]) - 1.0);
    }
    return p;
}

static uint8_t *bytes_of(size_t count, uint8_t and_with, uint8_t add)
{
    static uint64_t stream = 1u << 20;
    uint8_t *p = host(count);
    stream++;
    for (size_t i = 0; i < count; i += 16) {
        const base_rand4 r = base_rand(seed, stream, i / 16);
        for (size_t j = 0; j < 16 && i + j < count; j++)
            p[i + j] = (uint8_t)((r.v[j / 4] >> 8 * (j % 4) & and_with) + add);
    }
    return p;
}

typedef struct pair {
    kn_weight cpu, gpu;
} pair;

/* Entries around 0.05. */
static pair weight(kn_type type, uint32_t rows, uint32_t cols)
{
    const size_t n = (size_t)rows * cols;
    kn_weight w = {.type = type, .rows = rows, .cols = cols, .scale_global = 1.0f};
    size_t bytes = n * 4, scales = 0;
    void *data = NULL, *scale = NULL;
    if (type == KN_F32) {
        data = floats(n, 0.1f);
    } else if (type == KN_BF16) {
        bytes = n * 2;
        float *f = floats(n, 0.1f);
        uint16_t *h = data = host(bytes);
        for (size_t i = 0; i < n; i++)
            h[i] = kn_f32_to_bf16(f[i]);
        free(f);
    } else if (type == KN_MXFP8) {
        bytes = n;
        scales = n / 32;
        uint8_t *b = data = bytes_of(n, 0xff, 0);
        for (size_t i = 0; i < n; i++)
            if ((b[i] & 0x7f) == 0x7f)
                b[i] ^= 1; /* no NaN */
        scale = bytes_of(scales, 3, 127 - 14);
    } else {
        bytes = n / 2;
        scales = n / 16;
        data = bytes_of(bytes, 0xff, 0);
        scale = bytes_of(scales, 0x3f, 0x20);
        w.scale_global = 40.0f;
    }
    w.data = data;
    w.scale = scale;
    pair p = {w, w};
    p.gpu.data = on_gpu(data, bytes);
    if (scale)
        p.gpu.scale = on_gpu(scale, scales);
    const size_t packed = kn_pack_bytes(&w);
    if (packed) {
        void *tiles = host(packed);
        kn_pack(tiles, &w);
        p.cpu.tiles = tiles;
    }
    return p;
}

static void forget(pair *p)
{
    const size_t n = (size_t)p->cpu.rows * p->cpu.cols;
    const size_t bytes = p->cpu.type == KN_F32     ? n * 4
                         : p->cpu.type == KN_BF16  ? n * 2
                         : p->cpu.type == KN_MXFP8 ? n
                                                   : n / 2;
    gpu->backend->free(gpu, (void *)p->gpu.data, bytes);
    if (p->gpu.scale)
        gpu->backend->free(gpu, (void *)p->gpu.scale, p->cpu.type == KN_MXFP8 ? n / 32 : n / 16);
    free((void *)p->cpu.data);
    free((void *)p->cpu.scale);
    free((void *)p->cpu.tiles);
}

/* ---- comparisons ---- */

static void close_rows(const char *what, const float *got, const float *want, size_t rows,
                       size_t width, double share)
{
    double worst = 0.0;
    for (size_t r = 0; r < rows; r++) {
        double most = 1e-30;
        for (size_t i = 0; i < width; i++)
            most = fmax(most, fabs(want[r * width + i]));
        for (size_t i = 0; i < width; i++) {
            const double e = fabs((double)got[r * width + i] - want[r * width + i]) / most;
            worst = e > worst || e != e ? e : worst;
        }
    }
    verdict(worst <= share, what, "%.2e of the row's largest, bound %.0e", worst, share);
}

static void same(const char *what, const float *a, const float *b, size_t count)
{
    size_t differ = 0;
    for (size_t i = 0; i < count; i++)
        differ += memcmp(&a[i], &b[i], 4) != 0;
    verdict(differ == 0, what, differ ? "%.0f of %.0f values have other bits" : NULL,
            (double)differ, (double)count);
}

/* ---- the operations ---- */

static void check_linear(kn_type type, uint32_t outs, uint32_t cols, uint32_t rows)
{
    static const char *const names[] = {"f32", "bf16", "mxfp8", "nvfp4"};
    char what[128];
    pair w = weight(type, outs, cols);
    float *x = floats((size_t)rows * cols, 3.0f), *y = floats((size_t)rows * outs, 1.0f);
    for (uint32_t r = 0; r < rows; r++) /* rows of different sizes */
        for (uint32_t k = 0; k < cols; k++)
            x[(size_t)r * cols + k] *= ldexpf(1.0f, (int)(r % 7) - 3);
    float *gx = on_gpu(x, (size_t)rows * cols * 4), *gy = on_gpu(y, (size_t)rows * outs * 4);
    gpu->ops->linear(gpu, gy, gx, &w.gpu, rows, true);
    float *all = from_gpu(gy, (size_t)rows * outs);
    static const uint32_t chunks[] = {1, 3, 8, 40};
    for (size_t c = 0; c < 4; c++) {
        gpu->backend->upload(gpu, gy, y, (size_t)rows * outs * 4);
        for (uint32_t r = 0; r < rows; r += chunks[c])
            gpu->ops->linear(gpu, gy + (size_t)r * outs, gx + (size_t)r * cols, &w.gpu,
                             rows - r < chunks[c] ? rows - r : chunks[c], true);
        float *cut = from_gpu(gy, (size_t)rows * outs);
        snprintf(what, sizeof what, "linear %s %ux%u, %u rows in chunks of %u: same bits",
                 names[type], outs, cols, rows, chunks[c]);
        same(what, cut, all, (size_t)rows * outs);
        free(cut);
    }
    cpu->ops->linear(cpu, y, x, &w.cpu, rows, true);
    snprintf(what, sizeof what, "linear %s %ux%u, %u rows", names[type], outs, cols, rows);
    close_rows(what, all, y, rows, outs, SHARE);
    gpu->backend->free(gpu, gx, (size_t)rows * cols * 4);
    gpu->backend->free(gpu, gy, (size_t)rows * outs * 4);
    forget(&w);
    free(x);
    free(y);
    free(all);
}

static void check_small_ops(void)
{
    const uint32_t rows = 37, cols = 6144, heads = 48, dim = 128;
    float *x = floats((size_t)rows * cols, 3.0f), *w = floats(cols, 0.5f);
    float *gx = on_gpu(x, (size_t)rows * cols * 4), *gw = on_gpu(w, cols * 4);
    float *y = host((size_t)rows * cols * 4), *gy = on_gpu(NULL, (size_t)rows * cols * 4);
    cpu->ops->norm(cpu, y, x, w, rows, cols, 1e-6f);
    gpu->ops->norm(gpu, gy, gx, gw, rows, cols, 1e-6f);
    close_rows("norm", from_gpu(gy, (size_t)rows * cols), y, rows, cols, 1e-6);

    float *cs = floats(8192 * 32, 1.0f), *sn = floats(8192 * 32, 1.0f);
    int32_t pos[37];
    for (int i = 0; i < 37; i++)
        pos[i] = i * 211;
    kn_rope rope = {cs, sn, 64};
    kn_rope grope = {on_gpu(cs, 8192 * 128), on_gpu(sn, 8192 * 128), 64};
    cpu->ops->head_norm_rope(cpu, x, w, rows, heads, dim, 1e-6f, &rope, pos);
    gpu->ops->head_norm_rope(gpu, gx, gw, rows, heads, dim, 1e-6f, &grope, pos);
    close_rows("head_norm_rope", from_gpu(gx, (size_t)rows * cols), x, rows, cols, 1e-6);

    static const kn_type types[] = {KN_F32, KN_BF16, KN_MXFP8, KN_NVFP4};
    for (int t = 0; t < 4; t++) {
        pair table = weight(types[t], 640, 384);
        int32_t ids[37];
        for (int i = 0; i < 37; i++)
            ids[i] = (i * 97) % 640;
        for (int tiled = 0; tiled < 2; tiled++) {
            if (tiled) { /* the same memory as a matrix: another kn_weight at its own place */
                forget(&table);
                table = weight(types[t], 640, 384);
                float *one = on_gpu(NULL, 384 * 4), *many = on_gpu(NULL, 640 * 4);
                gpu->ops->linear(gpu, many, one, &table.gpu, 1, false);
            }
            cpu->ops->embed(cpu, y, &table.cpu, ids, rows);
            gpu->ops->embed(gpu, gy, &table.gpu, ids, rows);
            char what[64];
            snprintf(what, sizeof what, "embed, type %d%s: same bits", t,
                     tiled ? ", in tiles" : "");
            same(what, from_gpu(gy, (size_t)rows * 384), y, (size_t)rows * 384);
        }
        forget(&table);
    }
    uint8_t table[256];
    for (int i = 0; i < 256; i++)
        table[i] = (uint8_t)(i * 7 + 3);
    uint8_t *a = host(100000), *b = on_gpu(NULL, 100000);
    cpu->backend->fill(cpu, a, 99999, 5, 1ull << 40 | 9, table);
    gpu->backend->fill(gpu, b, 99999, 5, 1ull << 40 | 9, table);
    float *got = from_gpu(b, 25000);
    verdict(memcmp(a, got, 99999) == 0, "fill: same bytes", NULL, 0, 0);
}

/* Sizes of a model. */
typedef struct shape {
    const char *name;
    uint32_t hidden, q_heads, kv_heads, head_dim, index_heads, index_dim, topk;
    uint32_t inner, shared, dense, experts, routes, rotary;
} shape;

static const shape shapes[] = {
    {"nano", 384, 8, 2, 64, 2, 64, 4, 128, 128, 768, 16, 2, 32},
    {"m3.1", 6144, 64, 4, 128, 4, 128, 16, 3072, 3072, 12288, 8, 4, 64},
};

/* Rows of two sequences: 3 at the end of one of `context` tokens, the rest from position 0 of
 * another. */
static kn_rows make_rows(uint32_t rows, uint32_t context, const uint32_t *const pages[2])
{
    int32_t *token = host(rows * 4), *pos = host(rows * 4);
    uint32_t *seq = host(rows * 4);
    for (uint32_t r = 0; r < rows; r++) {
        seq[r] = r < 3 ? 0 : 1;
        pos[r] = (int32_t)(r < 3 ? context - 3 + r : r - 3);
        token[r] = (int32_t)r;
    }
    return (kn_rows){rows, token, pos, seq, pages};
}

static kn_rows part_of(const kn_rows *all, uint32_t first, uint32_t rows)
{
    return (kn_rows){rows, all->token + first, all->pos + first, all->seq + first, all->pages};
}

static size_t plane_bytes(const kn_kv *kv, kn_plane_kind kind)
{
    return (size_t)128 * (kind == KN_PLANE_INDEX ? kv->index_row_bytes : kv->row_bytes);
}

static void check_attention(const shape *s, kn_kv_type type, uint32_t context, uint32_t rows)
{
    static const char *const kinds[] = {"nvfp4", "fp8", "bf16", "f32"};
    char what[160];
    base_err err = BASE_ERR_INIT;
    const uint32_t n_pages = context / 128 + 1, extra = rows / 128 + 1;
    kn_kv_shape ks = {type, 2, s->kv_heads, s->head_dim, s->index_dim, {1, 1}, n_pages + extra};
    kn_kv *ckv, *gkv;
    if (kn_kv_create(&ckv, cpu, &ks, &err) || kn_kv_create(&gkv, gpu, &ks, &err)) {
        printf("[fail] %s\n", err.text);
        exit(1);
    }
    /* Keys and values as a model would leave them, by kv_put; index keys by copying K's bytes. */
    uint32_t *table[2] = {host(n_pages * 4), host(extra * 4)};
    for (uint32_t i = 0; i < n_pages; i++)
        table[0][i] = n_pages - 1 - i; /* not in order */
    for (uint32_t i = 0; i < extra; i++)
        table[1][i] = n_pages + i;
    const uint32_t *const pages[2] = {table[0], table[1]};
    for (uint32_t p = 0; p < n_pages; p++)
        for (int kind = 0; kind < 3; kind++)
            for (uint32_t h = 0; h < (kind == KN_PLANE_INDEX ? 1 : s->kv_heads); h++) {
                const uint32_t dim = kind == KN_PLANE_INDEX ? s->index_dim : s->head_dim;
                const size_t bytes = plane_bytes(ckv, (kn_plane_kind)kind), row = bytes / 128;
                float *x = floats((size_t)128 * dim, 2.0f);
                uint8_t *b = host(bytes);
                for (uint32_t u = 0; u < 128; u++)
                    for (uint32_t k = 0; k < dim; k += 16) {
                        float g[16];
                        for (int i = 0; i < 16; i++)
                            g[i] = kn_bf16_to_f32(kn_f32_to_bf16(x[u * dim + k + i]));
                        for (int i = 0; i < 16; i++) {
                            const uint16_t h16 = kn_f32_to_bf16(g[i]);
                            if (type == KN_KV_FP8)
                                b[u * row + k + i] = kn_f32_to_e4m3(g[i]);
                            else if (type == KN_KV_BF16)
                                memcpy(b + u * row + 2 * (k + i), &h16, 2);
                            else if (type == KN_KV_F32)
                                memcpy(b + u * row + 4 * (k + i), &x[u * dim + k + i], 4);
                        }
                        if (type == KN_KV_NVFP4)
                            kn_nvfp4_quantize16(b + u * row + k / 2, b + u * row + dim / 2 + k / 16,
                                                g);
                    }
                kn_kv_copy_in(ckv, b, p, 1, (kn_plane_kind)kind, h, 128);
                kn_kv_copy_in(gkv, b, p, 1, (kn_plane_kind)kind, h, 128);
                free(x);
                free(b);
            }
    const uint32_t qw = s->q_heads * s->head_dim, iw = s->index_heads * s->index_dim;
    const uint32_t kw = s->kv_heads * s->head_dim;
    float *x = floats((size_t)rows * s->hidden, 1.0f), *norm = floats(s->hidden, 0.3f);
    float *qn = floats(s->head_dim, 0.3f), *kn = floats(s->head_dim, 0.3f);
    float *iqn = floats(s->index_dim, 0.3f), *ikn = floats(s->index_dim, 0.3f);
    const size_t rope_bytes = (size_t)(context + rows) * s->rotary / 2 * 4;
    float *cs = host(rope_bytes), *sn = host(rope_bytes);
    for (size_t i = 0; i < rope_bytes / 4; i++) {
        cs[i] = cosf((float)(i % 9973));
        sn[i] = sinf((float)(i % 9973));
    }
    pair q = weight(KN_MXFP8, qw, s->hidden), k = weight(KN_MXFP8, kw, s->hidden),
         v = weight(KN_MXFP8, kw, s->hidden), iq = weight(KN_MXFP8, iw, s->hidden),
         ik = weight(KN_MXFP8, s->index_dim, s->hidden);
    const kn_rows at = make_rows(rows, context, pages);
    kn_attn_in in = {x,
                     s->hidden,
                     s->q_heads,
                     s->kv_heads,
                     s->head_dim,
                     s->index_heads,
                     s->index_dim,
                     1e-6f,
                     norm,
                     &q.cpu,
                     &k.cpu,
                     &v.cpu,
                     &iq.cpu,
                     &ik.cpu,
                     qn,
                     kn,
                     iqn,
                     ikn,
                     {cs, sn, s->rotary},
                     1,
                     NULL,
                     NULL};
    in.q_out = host((size_t)rows * qw * 4);
    in.index_q_out = host((size_t)rows * iw * 4);
    kn_attn_in gin = in;
    gin.x = on_gpu(x, (size_t)rows * s->hidden * 4);
    gin.norm = on_gpu(norm, s->hidden * 4);
    gin.q = &q.gpu;
    gin.k = &k.gpu;
    gin.v = &v.gpu;
    gin.index_q = &iq.gpu;
    gin.index_k = &ik.gpu;
    gin.q_norm = on_gpu(qn, s->head_dim * 4);
    gin.k_norm = on_gpu(kn, s->head_dim * 4);
    gin.index_q_norm = on_gpu(iqn, s->index_dim * 4);
    gin.index_k_norm = on_gpu(ikn, s->index_dim * 4);
    gin.rope.cos = on_gpu(cs, rope_bytes);
    gin.rope.sin = on_gpu(sn, rope_bytes);
    gin.q_out = on_gpu(NULL, (size_t)rows * qw * 4);
    gin.index_q_out = on_gpu(NULL, (size_t)rows * iw * 4);

    cpu->ops->attn_in(cpu, ckv, &at, &in);
    gpu->ops->attn_in(gpu, gkv, &at, &gin);
    float *gq = from_gpu(gin.q_out, (size_t)rows * qw);
    float *giq = from_gpu(gin.index_q_out, (size_t)rows * iw);
    snprintf(what, sizeof what, "attn_in %s %s", s->name, kinds[type]);
    /* A value beside a border of E4M3 or BF16 may fall on the other side. */
    size_t off = 0;
    for (size_t i = 0; i < (size_t)rows * qw; i++)
        off += fabsf(gq[i] - in.q_out[i]) > 1e-5f * (1.0f + fabsf(in.q_out[i]));
    verdict(off <= (size_t)rows * qw / (type == KN_KV_BF16 ? 100 : 500) + 1, what,
            "%.0f of %.0f queries on the other side of a border", (double)off, (double)rows * qw);
    /* The pages: the same codes but for such borders; then the cpu goes on with the gpu's. */
    size_t codes = 0, differ = 0;
    for (uint32_t p = 0; p < ks.page_count; p++)
        for (int kind = 0; kind < 3; kind++)
            for (uint32_t h = 0; h < (kind == KN_PLANE_INDEX ? 1 : s->kv_heads); h++) {
                const size_t bytes = plane_bytes(ckv, (kn_plane_kind)kind);
                uint8_t *a = host(bytes), *b = host(bytes);
                kn_kv_copy_out(ckv, a, p, 1, (kn_plane_kind)kind, h, 128);
                kn_kv_copy_out(gkv, b, p, 1, (kn_plane_kind)kind, h, 128);
                for (size_t i = 0; i < bytes; i++) {
                    codes++;
                    differ += a[i] != b[i];
                }
                kn_kv_copy_in(ckv, b, p, 1, (kn_plane_kind)kind, h, 128);
                free(a);
                free(b);
            }
    snprintf(what, sizeof what, "attn_in %s %s: pages", s->name, kinds[type]);
    const double written = (double)rows * (2 * s->kv_heads + 1) * ckv->row_bytes;
    verdict(type == KN_KV_F32 || (double)differ <= 2 + written / 100, what,
            "%.0f of %.0f bytes differ", (double)differ, written);

    memcpy(in.q_out, gq, (size_t)rows * qw * 4);
    memcpy(in.index_q_out, giq, (size_t)rows * iw * 4);
    const size_t choices = (size_t)rows * s->index_heads * s->topk;
    kn_select sel = {in.index_q_out,
                     s->index_heads,
                     s->index_dim,
                     1,
                     s->topk,
                     0,
                     1,
                     host(choices * 4),
                     host((size_t)rows * s->index_heads * 4)};
    kn_select gsel = sel;
    gsel.index_q = gin.index_q_out;
    gsel.blocks = on_gpu(NULL, choices * 4);
    gsel.margin = on_gpu(NULL, (size_t)rows * s->index_heads * 4);
    cpu->ops->select(cpu, ckv, &at, &sel);
    gpu->ops->select(gpu, gkv, &at, &gsel);
    int32_t *gb = (int32_t *)from_gpu(gsel.blocks, choices);
    float *gm = from_gpu(gsel.margin, (size_t)rows * s->index_heads);
    size_t other = 0;
    for (size_t i = 0; i < (size_t)rows * s->index_heads; i++)
        other += memcmp(gb + i * s->topk, sel.blocks + i * s->topk, s->topk * 4) != 0 &&
                 sel.margin[i] > 1e-3f;
    snprintf(what, sizeof what, "select %s %s at %u", s->name, kinds[type], context);
    verdict(other == 0, what, "%.0f choices differ (margins above 1e-3)", (double)other, 0);
    double margin = 0.0;
    for (size_t i = 0; i < (size_t)rows * s->index_heads; i++)
        if (isfinite(sel.margin[i]) || isfinite(gm[i]))
            margin = fmax(margin, fabs(gm[i] - sel.margin[i]));
    snprintf(what, sizeof what, "select %s %s at %u: margins", s->name, kinds[type], context);
    verdict(margin < 1e-2, what, "%.2e apart", margin, 0);

    for (int dense = 0; dense < 2; dense++) {
        kn_attend at_c = {in.q_out, s->q_heads, s->kv_heads, s->head_dim,
                          1,        sel.blocks, s->topk,     host((size_t)rows * qw * 4)};
        kn_attend at_g = at_c;
        gpu->backend->upload(gpu, gsel.blocks, sel.blocks, choices * 4);
        at_g.q = gin.q_out;
        at_g.blocks = gsel.blocks;
        at_g.out = on_gpu(NULL, (size_t)rows * qw * 4);
        if (dense)
            at_c.blocks = at_g.blocks = NULL;
        cpu->ops->attend(cpu, ckv, &at, &at_c);
        gpu->ops->attend(gpu, gkv, &at, &at_g);
        float *all = from_gpu(at_g.out, (size_t)rows * qw);
        snprintf(what, sizeof what, "attend %s %s at %u%s", s->name, kinds[type], context,
                 dense ? ", all blocks" : "");
        close_rows(what, all, at_c.out, rows, qw, SHARE);
        /* Each row alone; the selection and the insert too. */
        if (!dense)
            for (uint32_t r = 0; r < rows; r += r < 4 ? 1 : 17) {
                const kn_rows one = part_of(&at, r, 1);
                kn_attn_in i1 = gin;
                i1.x = gin.x + (size_t)r * s->hidden;
                i1.q_out = gin.q_out + (size_t)r * qw;
                i1.index_q_out = gin.index_q_out + (size_t)r * iw;
                gpu->ops->attn_in(gpu, gkv, &one, &i1);
                kn_select s1 = gsel;
                s1.index_q = i1.index_q_out;
                s1.blocks = gsel.blocks + (size_t)r * s->index_heads * s->topk;
                s1.margin = gsel.margin + (size_t)r * s->index_heads;
                gpu->ops->select(gpu, gkv, &one, &s1);
                kn_attend a1 = at_g;
                a1.q = i1.q_out;
                a1.blocks = s1.blocks;
                a1.out = at_g.out + (size_t)r * qw;
                gpu->ops->attend(gpu, gkv, &one, &a1);
            }
        float *alone = from_gpu(at_g.out, (size_t)rows * qw);
        snprintf(what, sizeof what, "attend %s %s at %u, rows alone: same bits", s->name,
                 kinds[type], context);
        if (!dense)
            same(what, alone, all, (size_t)rows * qw);
    }
    forget(&q);
    forget(&k);
    forget(&v);
    forget(&iq);
    forget(&ik);
    kn_kv_destroy(ckv);
    kn_kv_destroy(gkv);
}

static void check_mixture(const shape *s, kn_type type, uint32_t rows, bool dense)
{
    char what[160];
    const size_t n = (size_t)rows * s->hidden;
    float *x = floats(n, 1.0f), *norm = floats(s->hidden, 0.3f);
    float *gx = on_gpu(x, n * 4), *gnorm = on_gpu(norm, s->hidden * 4);
    const kn_act act = {1.702f, 7.0f};
    pair *up = calloc(s->experts * 3, sizeof *up);
    kn_weight *w[6];
    for (int i = 0; i < 6; i++)
        w[i] = calloc(s->experts, sizeof(kn_weight));
    const uint32_t count = dense ? 1 : s->experts, inner = dense ? s->dense : s->inner;
    for (uint32_t e = 0; e < count; e++)
        for (int i = 0; i < 3; i++) {
            up[e * 3 + i] =
                i == 2 ? weight(type, s->hidden, inner) : weight(type, inner, s->hidden);
            w[i][e] = up[e * 3 + i].cpu;
            w[3 + i][e] = up[e * 3 + i].gpu;
        }
    pair shared[3] = {weight(KN_MXFP8, s->shared, s->hidden),
                      weight(KN_MXFP8, s->shared, s->hidden),
                      weight(KN_MXFP8, s->hidden, s->shared)};
    float *router = floats((size_t)s->experts * s->hidden, 0.1f), *bias = floats(s->experts, 0.1f);
    float *grouter = on_gpu(router, (size_t)s->experts * s->hidden * 4);
    float *gbias = on_gpu(bias, s->experts * 4);
    kn_mlp m = {x, s->hidden, inner, 1e-6f, norm, &w[0][0], &w[1][0], &w[2][0], act};
    kn_mlp gm = {gx, s->hidden, inner, 1e-6f, gnorm, &w[3][0], &w[4][0], &w[5][0], act};
    kn_moe e = {x,
                s->hidden,
                s->inner,
                s->shared,
                s->experts,
                s->routes,
                1e-6f,
                2.0f,
                norm,
                router,
                bias,
                w[0],
                w[2],
                w[1],
                &shared[0].cpu,
                &shared[1].cpu,
                &shared[2].cpu,
                act,
                host(rows * s->routes * 4),
                host(rows * s->routes * 4)};
    kn_moe ge = {gx,
                 s->hidden,
                 s->inner,
                 s->shared,
                 s->experts,
                 s->routes,
                 1e-6f,
                 2.0f,
                 gnorm,
                 grouter,
                 gbias,
                 w[3],
                 w[5],
                 w[4],
                 &shared[0].gpu,
                 &shared[1].gpu,
                 &shared[2].gpu,
                 act,
                 on_gpu(NULL, rows * s->routes * 4),
                 on_gpu(NULL, rows * s->routes * 4)};
    float *before = host(n * 4);
    memcpy(before, x, n * 4);
    if (dense) {
        cpu->ops->mlp(cpu, rows, &m);
        gpu->ops->mlp(gpu, rows, &gm);
    } else {
        cpu->ops->moe(cpu, rows, &e);
        gpu->ops->moe(gpu, rows, &ge);
    }
    float *all = from_gpu(gx, n);
    snprintf(what, sizeof what, "%s %s type %d, %u rows", dense ? "mlp" : "moe", s->name, type,
             rows);
    if (dense) {
        close_rows(what, all, x, rows, s->hidden, SHARE);
    } else {
        int32_t *ids = (int32_t *)from_gpu(ge.route_ids, (size_t)rows * s->routes);
        size_t other = 0;
        for (uint32_t r = 0; r < rows; r++)
            if (memcmp(ids + r * s->routes, e.route_ids + r * s->routes, s->routes * 4)) {
                other++;
                memcpy(x + (size_t)r * s->hidden, all + (size_t)r * s->hidden, s->hidden * 4);
            }
        close_rows(what, all, x, rows, s->hidden, SHARE);
        verdict(other <= rows / 50, what, "%.0f rows took other experts", (double)other, 0);
    }
    gpu->backend->upload(gpu, gx, before, n * 4);
    static const uint32_t chunks[] = {1, 5, 8, 61};
    for (int c = 0; c < 4; c++) {
        gpu->backend->upload(gpu, gx, before, n * 4);
        for (uint32_t r = 0; r < rows; r += chunks[c]) {
            const uint32_t count_now = rows - r < chunks[c] ? rows - r : chunks[c];
            kn_mlp g1 = gm;
            kn_moe e1 = ge;
            g1.x = e1.x = gx + (size_t)r * s->hidden;
            if (dense)
                gpu->ops->mlp(gpu, count_now, &g1);
            else
                gpu->ops->moe(gpu, count_now, &e1);
        }
        float *cut = from_gpu(gx, n);
        snprintf(what, sizeof what, "%s %s type %d, %u rows in chunks of %u: same bits",
                 dense ? "mlp" : "moe", s->name, type, rows, chunks[c]);
        same(what, cut, all, n);
        free(cut);
    }
    for (uint32_t i = 0; i < count * 3; i++)
        forget(&up[i]);
    for (int i = 0; i < 3; i++)
        forget(&shared[i]);
}

static void check_draft(void)
{
    base_err err = BASE_ERR_INIT;
    const uint32_t n = 2, dim = 64, heads = 8, rows = 7, blocks = 2;
    for (int type = KN_KV_BF16; type <= KN_KV_F32; type++) {
        kn_kv_shape ks = {(kn_kv_type)type, 1, n, dim, 0, {0}, 12};
        kn_kv *ckv, *gkv;
        if (kn_kv_create(&ckv, cpu, &ks, &err) || kn_kv_create(&gkv, gpu, &ks, &err))
            exit(1);
        uint32_t t0[] = {3, 1, 4, 0}, t1[] = {5, 9, 2, 6, 8};
        const uint32_t *const pages[2] = {t0, t1};
        for (uint32_t b = 0; b < 2; b++) {
            const uint32_t count = b ? 600 : 400;
            int32_t *pos = host(count * 4);
            uint32_t *seq = host(count * 4);
            for (uint32_t i = 0; i < count; i++) {
                pos[i] = (int32_t)i;
                seq[i] = b;
            }
            const kn_rows at = {count, pos, pos, seq, pages};
            float *k = floats((size_t)count * n * dim, 1.0f),
                  *v = floats((size_t)count * n * dim, 1.0f);
            cpu->ops->kv_put(cpu, ckv, &at, 0, k, v);
            gpu->ops->kv_put(gpu, gkv, &at, 0, on_gpu(k, (size_t)count * n * dim * 4),
                             on_gpu(v, (size_t)count * n * dim * 4));
        }
        kn_kv_copy_page(ckv, 11, 5, 77);
        kn_kv_copy_page(gkv, 11, 5, 77);
        uint8_t a[128 * 64 * 4], b[128 * 64 * 4];
        kn_kv_copy_out(ckv, a, 11, 0, KN_PLANE_V, 1, 77);
        kn_kv_copy_out(gkv, b, 11, 0, KN_PLANE_V, 1, 77);
        verdict(memcmp(a, b, (size_t)77 * ckv->row_bytes) == 0,
                "kv_put and kv_copy_page: same bytes", NULL, 0, 0);
        const uint32_t lo[] = {0, 130}, hi[] = {0, 600};
        const size_t qn = (size_t)blocks * rows * heads * dim, kn = (size_t)blocks * rows * n * dim;
        float *q = floats(qn, 1.0f), *k = floats(kn, 1.0f), *v = floats(kn, 1.0f);
        for (uint32_t window = 0; window <= 400; window += 200) {
            uint32_t hi_now[] = {window ? 390 : hi[0], hi[1]};
            kn_draft_attend d = {q,   k, v,     blocks, rows,   heads,  n,
                                 dim, 0, pages, lo,     hi_now, window, host(qn * 4)};
            kn_draft_attend g = d;
            g.q = on_gpu(q, qn * 4);
            g.block_k = on_gpu(k, kn * 4);
            g.block_v = on_gpu(v, kn * 4);
            g.out = on_gpu(NULL, qn * 4);
            cpu->ops->draft_attend(cpu, ckv, &d);
            gpu->ops->draft_attend(gpu, gkv, &g);
            close_rows("draft_attend", from_gpu(g.out, qn), d.out, blocks * rows, heads * dim,
                       SHARE);
        }
        kn_kv_destroy(ckv);
        kn_kv_destroy(gkv);
    }
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: gpu_check MODULE.so [SEED [small]]\n");
        return 2;
    }
    if (argc > 2)
        seed = strtoull(argv[2], NULL, 10);
    /* Without a slash it would be looked for elsewhere. */
    char *path = realpath(argv[1], NULL);
    void *module = dlopen(path ? path : argv[1], RTLD_NOW | RTLD_LOCAL);
    kn_backend_get_fn *get = module ? (kn_backend_get_fn *)dlsym(module, KN_BACKEND_SYMBOL) : NULL;
    const kn_backend *backend = get ? get(KN_BACKEND_VERSION) : NULL;
    if (!backend) {
        fprintf(stderr, "gpu_check: %s\n", module ? "not a module of this version" : dlerror());
        return 1;
    }
    base_err err = BASE_ERR_INIT;
    const kn_device_options options = {
        .backend = backend, .rows_max = 1024, .width_max = 16384, .context_max = 1 << 18};
    const base_code code = kn_device_create(&gpu, &options, &err);
    if (code == BASE_UNSUPPORTED) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    const kn_device_options plain = {
        .variant = "auto", .rows_max = 1024, .width_max = 16384, .context_max = 1 << 18};
    if (code || kn_device_create(&cpu, &plain, &err)) {
        fprintf(stderr, "gpu_check: %s\n", err.text);
        return 1;
    }
    printf("%s, seed %llu\n", backend->describe(gpu), (unsigned long long)seed);
    const bool small = argc > 3 && strcmp(argv[3], "small") == 0;
    check_small_ops();
    if (!small) {
        check_linear(KN_F32, 128, 6144, 9);
        check_linear(KN_BF16, 2048, 6144, 9);
        check_linear(KN_MXFP8, 9216, 6144, 9);
        check_linear(KN_NVFP4, 3072, 6144, 9);
        check_linear(KN_NVFP4, 6144, 3072, 70);
        check_linear(KN_MXFP8, 6144, 8192, 70);
    }
    check_linear(KN_BF16, 1024, 384, 70);
    check_linear(KN_MXFP8, 768, 384, 200);
    check_linear(KN_NVFP4, 384, 128, 200);
    check_linear(KN_BF16, 5, 100, 3);
    check_linear(KN_MXFP8, 24, 96, 3);
    check_linear(KN_NVFP4, 24, 48, 3);
    for (int s = 0; s < (small ? 1 : 2); s++) {
        for (int type = 0; type < 4; type++)
            check_attention(&shapes[s], (kn_kv_type)type, s ? 5000 : 3001, 40);
        check_mixture(&shapes[s], KN_NVFP4, 130, false);
        check_mixture(&shapes[s], KN_MXFP8, s ? 40 : 130, true);
    }
    check_mixture(&shapes[0], KN_BF16, 130, false);
    check_draft();
    base_err fault = BASE_ERR_INIT;
    verdict(backend->status(gpu, &fault) == BASE_OK, "no fault", NULL, 0, 0);
    if (fault.text[0])
        printf("%s\n", fault.text);
    kn_device_destroy(gpu);
    kn_device_destroy(cpu);
    printf("%d checks, %d failed\n", checks, failures);
    return failures != 0;
}
