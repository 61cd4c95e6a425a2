/* Pages and what reads and writes them: projections with insert, selection, attention, the draft
 * block. Bounds as in test_ops.c. */
#include "tests/numerics/support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const type_names[] = {"nvfp4", "fp8", "bf16", "f32"};

/* ---- rows of two sequences ---- */

#define PAGES 40
#define LAYERS 3
#define LAYER 1

/* Positions that a step may hold: around every edge of a block and of the top-k. */
static const int32_t edge_pos[] = {0,   1,   15,  16,  126, 127, 128,  129,
                                   255, 256, 511, 512, 513, 640, 1000, 1535};
#define EDGES ((uint32_t)(sizeof edge_pos / sizeof *edge_pos))

typedef struct step {
    uint32_t count;
    int32_t token[140], pos[140];
    uint32_t seq[140];
    uint32_t table[2][16];
    const uint32_t *pages[2];
} step;

static void init_step(step *s)
{
    memset(s, 0, sizeof *s);
    for (uint32_t i = 0; i < 16; i++) {
        s->table[0][i] = (i * 7 + 3) % PAGES;
        s->table[1][i] = (i * 11 + 5) % PAGES;
    }
    s->pages[0] = s->table[0];
    s->pages[1] = s->table[1];
}

static void add_row(step *s, uint32_t seq, int32_t pos)
{
    s->seq[s->count] = seq;
    s->pos[s->count++] = pos;
}

static kn_rows rows_of(const step *s, uint32_t first, uint32_t count)
{
    return (kn_rows){.rows = count,
                     .token = s->token + first,
                     .pos = s->pos + first,
                     .seq = s->seq + first,
                     .pages = s->pages};
}

static kn_kv_shape shape_of(kn_kv_type type, uint32_t kv_heads, uint32_t head_dim,
                            uint32_t index_dim)
{
    return (kn_kv_shape){.type = type,
                         .layers = LAYERS,
                         .kv_heads = kv_heads,
                         .head_dim = head_dim,
                         .index_dim = index_dim,
                         .has_index = {0, 1, 1},
                         .page_count = PAGES};
}

/* Query values as attn_in leaves them for the page type. */
static float *query_values(uint64_t seed, size_t count, kn_kv_type type, float size)
{
    float *q = random_floats(seed, count, size);
    for (size_t i = 0; i < count && type != KN_KV_F32; i++) {
        q[i] = kn_bf16_to_f32(kn_f32_to_bf16(q[i]));
        if (type != KN_KV_BF16)
            q[i] = kn_e4m3_to_f32(kn_f32_to_e4m3(q[i]));
    }
    return q;
}

/* ---- pages ---- */

Test(pages, copies_go_out_and_in_again)
{
    kn_device *device = open_device("auto", 1);
    for (kn_kv_type type = KN_KV_NVFP4; type <= KN_KV_F32; type++) {
        const kn_kv_shape shape = shape_of(type, 3, 48, 32);
        const size_t row = kn_kv_row_bytes(type, 48);
        const size_t index_row = kn_kv_row_bytes(type, 32);
        cr_assert_eq(kn_kv_page_bytes(&shape) % 64, 0);
        cr_assert_geq(kn_kv_page_bytes(&shape), 128 * (LAYERS * 6 * row + 2 * index_row));
        kn_kv *kv = open_pages(device, &shape);
        fill_pages(kv, 1, 1.0f);
        uint8_t *before = zeroed(128 * row);
        uint8_t *after = zeroed(128 * row);
        /* A copy of 5 rows changes 5 rows of every plane and nothing else. */
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (kn_plane_kind kind = KN_PLANE_K; kind <= KN_PLANE_INDEX; kind++) {
                if (kind == KN_PLANE_INDEX && !shape.has_index[layer])
                    continue;
                const size_t bytes = kind == KN_PLANE_INDEX ? index_row : row;
                const uint32_t head = kind == KN_PLANE_INDEX ? 0 : 2;
                uint8_t *source = zeroed(128 * bytes);
                kn_kv_copy_out(kv, source, 9, layer, kind, head, 128);
                kn_kv_copy_out(kv, before, 4, layer, kind, head, 128);
                cr_assert(memcmp(source, before, 128 * bytes) != 0);
                kn_kv_copy_in(kv, source, 4, layer, kind, head, 5);
                kn_kv_copy_out(kv, after, 4, layer, kind, head, 128);
                cr_assert_arr_eq(after, source, 5 * bytes);
                cr_assert_arr_eq(after + 5 * bytes, before + 5 * bytes, 123 * bytes);
            }
        kn_kv_copy_out(kv, before, 11, 2, KN_PLANE_V, 1, 128);
        kn_kv_copy_page(kv, 11, 12, 77);
        kn_kv_copy_out(kv, after, 11, 2, KN_PLANE_V, 1, 128);
        uint8_t *from = zeroed(128 * row);
        kn_kv_copy_out(kv, from, 12, 2, KN_PLANE_V, 1, 128);
        cr_assert_arr_eq(after, from, 77 * row);
        cr_assert_arr_eq(after + 77 * row, before + 77 * row, 51 * row);
        kn_kv_destroy(kv);
    }
    kn_device_destroy(device);
}

Test(pages, shapes_that_do_not_fit_are_refused)
{
    kn_device *device = open_device("auto", 1);
    kn_kv_shape bad[5];
    for (int i = 0; i < 5; i++)
        bad[i] = shape_of(KN_KV_NVFP4, 2, 32, 32);
    bad[0].head_dim = 40;
    bad[1].index_dim = 8;
    bad[2].page_count = 0;
    bad[3].layers = KN_LAYERS_MAX + 1;
    bad[4].page_count = UINT32_MAX; /* far more memory than there is */
    bad[4].head_dim = 512;
    bad[4].kv_heads = 1024;
    for (int i = 0; i < 5; i++) {
        base_err err = BASE_ERR_INIT;
        kn_kv *kv = NULL;
        cr_assert_neq(kn_kv_create(&kv, device, &bad[i], &err), BASE_OK, "shape %d", i);
        cr_assert_neq(err.text[0], 0);
        cr_assert_null(kv);
    }
    kn_device_destroy(device);
}

/* ---- attn_in ---- */

typedef struct in_case {
    kn_attn_in a;
    kn_kv_shape shape;
    const step *step;
} in_case;

typedef struct in_result {
    float *q, *iq;
    uint8_t *planes; /* [kind K, V: heads; index][pages of both sequences' first two] rows */
    size_t plane_bytes;
} in_result;

static in_result run_in(const char *variant, uint32_t threads, const in_case *c, uint32_t chunk)
{
    kn_device *device = open_device(variant, threads);
    kn_kv *kv = open_pages(device, &c->shape);
    const step *s = c->step;
    const size_t q_width = (size_t)c->a.q_heads * c->a.head_dim;
    const size_t iq_width = (size_t)c->a.index_heads * c->a.index_dim;
    in_result out = {.q = zeroed(s->count * q_width * sizeof(float)),
                     .iq = zeroed(s->count * iq_width * sizeof(float) + 1)};
    for (uint32_t r = 0; r < s->count; r += chunk) {
        const uint32_t n = chunk < s->count - r ? chunk : s->count - r;
        const kn_rows rows = rows_of(s, r, n);
        kn_attn_in a = c->a;
        a.x += (size_t)r * a.hidden;
        a.q_out = out.q + r * q_width;
        a.index_q_out = out.iq + r * iq_width;
        device->ops->attn_in(device, kv, &rows, &a);
    }
    const size_t row = kn_kv_row_bytes(c->shape.type, c->shape.head_dim);
    const size_t index_row =
        c->a.index_heads ? kn_kv_row_bytes(c->shape.type, c->shape.index_dim) : 0;
    out.plane_bytes = (size_t)PAGES * KN_PAGE_TOKENS * (2 * c->shape.kv_heads * row + index_row);
    uint8_t *at = out.planes = zeroed(out.plane_bytes);
    for (uint32_t page = 0; page < PAGES; page++) {
        for (uint32_t h = 0; h < c->shape.kv_heads; h++)
            for (kn_plane_kind kind = KN_PLANE_K; kind <= KN_PLANE_V;
                 kind++, at += KN_PAGE_TOKENS * row)
                kn_kv_copy_out(kv, at, page, c->a.layer, kind, h, KN_PAGE_TOKENS);
        if (index_row)
            kn_kv_copy_out(kv, at, page, c->a.layer, KN_PLANE_INDEX, 0, KN_PAGE_TOKENS);
        at += KN_PAGE_TOKENS * index_row;
    }
    kn_kv_destroy(kv);
    kn_device_destroy(device);
    return out;
}

static void check_in(kn_kv_type type, bool sparse)
{
    enum { HIDDEN = 160, Q = 6, KV = 2, DIM = 48, IDIM = 32 };
    step *s = zeroed(sizeof *s);
    init_step(s);
    for (int32_t p = 90; p < 170; p++)
        add_row(s, 0, p);
    for (int32_t p = 0; p < 49; p++)
        add_row(s, 1, p);
    float *cos = zeroed(256 * 8 * sizeof *cos);
    float *sin = zeroed(256 * 8 * sizeof *sin);
    for (int i = 0; i < 256 * 8; i++) {
        cos[i] = cosf((float)(i / 8) * powf(1e4f, -(float)(i % 8) / 8));
        sin[i] = sinf((float)(i / 8) * powf(1e4f, -(float)(i % 8) / 8));
    }
    const kn_weight q = random_weight(1, KN_MXFP8, Q * DIM, HIDDEN);
    const kn_weight k = random_weight(2, KN_MXFP8, KV * DIM, HIDDEN);
    const kn_weight v = random_weight(3, KN_BF16, KV * DIM, HIDDEN);
    const kn_weight iq = random_weight(4, KN_NVFP4, KV * IDIM, HIDDEN);
    const kn_weight ik = random_weight(5, KN_F32, IDIM, HIDDEN);
    const in_case c = {.a = {.x = random_floats(6, (size_t)s->count * HIDDEN, 2.0f),
                             .hidden = HIDDEN,
                             .q_heads = Q,
                             .kv_heads = KV,
                             .head_dim = DIM,
                             .index_heads = sparse ? KV : 0,
                             .index_dim = sparse ? IDIM : 0,
                             .eps = 1e-6f,
                             .norm = random_floats(7, HIDDEN, 0.5f),
                             .q = &q,
                             .k = &k,
                             .v = &v,
                             .index_q = sparse ? &iq : NULL,
                             .index_k = sparse ? &ik : NULL,
                             .q_norm = random_floats(8, DIM, 0.5f),
                             .k_norm = random_floats(9, DIM, 0.5f),
                             .index_q_norm = sparse ? random_floats(10, IDIM, 0.5f) : NULL,
                             .index_k_norm = sparse ? random_floats(11, IDIM, 0.5f) : NULL,
                             .rope = {.cos = cos, .sin = sin, .rotary_dim = 16},
                             .layer = sparse ? LAYER : 0},
                       .shape = shape_of(type, KV, DIM, IDIM),
                       .step = s};
    const size_t q_count = (size_t)s->count * Q * DIM;
    const size_t iq_count = sparse ? (size_t)s->count * KV * IDIM : 0;
    const in_result expect = run_in("ref", 1, &c, s->count);
    const in_result cut = run_in("ref", 1, &c, 9);
    same_bits(cut.q, expect.q, q_count, "attn_in, ref: q");
    same_bits(cut.iq, expect.iq, iq_count, "attn_in, ref: index q");
    cr_assert_arr_eq(cut.planes, expect.planes, expect.plane_bytes, "attn_in, ref: pages");
    const char *names[2];
    const uint32_t variants = vector_variants(names);
    const in_result got = run_in(names[0], 1, &c, s->count);
    for (uint32_t i = 0; i < variants; i++)
        for (uint32_t threads = 1; threads <= 2; threads++)
            for (int n = 0; n < 8; n++) {
                const in_result other = run_in(names[i], threads, &c, chunk_sizes[n]);
                same_bits(other.q, got.q, q_count, "attn_in: q");
                same_bits(other.iq, got.iq, iq_count, "attn_in: index q");
                cr_assert_arr_eq(other.planes, got.planes, got.plane_bytes,
                                 "attn_in: pages, %s, chunks of %u", names[i], chunk_sizes[n]);
            }
    if (type == KN_KV_F32) {
        within_rows(got.q, expect.q, s->count, Q * DIM, 1e-5f, "attn_in: q");
        within_rows(got.iq, expect.iq, s->count, iq_count / s->count, 1e-5f, "attn_in: index q");
        within_rows((const float *)got.planes, (const float *)expect.planes,
                    got.plane_bytes / 4 / DIM, DIM, 1e-5f, "attn_in: pages");
        return;
    }
    /* A value that stands within rounding noise of the border of two codes may fall on either side;
     * that is rare, and then the step is one code. */
    size_t moved = 0;
    for (size_t i = 0; i < q_count; i++) {
        moved += got.q[i] != expect.q[i];
        cr_assert(fabsf(got.q[i] - expect.q[i]) <= 0.14f * fabsf(expect.q[i]) + 0.002f);
    }
    for (size_t i = 0; i < got.plane_bytes; i++)
        moved += got.planes[i] != expect.planes[i];
    cr_assert_leq(moved, (q_count + 129 * (KV * DIM + IDIM)) / 200,
                  "attn_in, %s: %zu codes differ from ref", type_names[type], moved);
}

Test(attention, in)
{
    for (kn_kv_type type = KN_KV_NVFP4; type <= KN_KV_F32; type++) {
        check_in(type, true);
        check_in(type, false);
    }
}

/* ---- kv_put ---- */

Test(attention, kv_put_stores_rows)
{
    static const char *const variants[] = {"ref", "avx2", "avx512"};
    step *s = zeroed(sizeof *s);
    init_step(s);
    for (uint32_t i = 0; i < EDGES; i++)
        add_row(s, i & 1, edge_pos[i]);
    for (kn_kv_type type = KN_KV_NVFP4; type <= KN_KV_F32; type++)
        for (int v = 0; v < 3; v++) {
            kn_device *device = open_device(variants[v], 1);
            if (!device)
                continue;
            const kn_kv_shape shape = shape_of(type, 2, 32, 32);
            kn_kv *kv = open_pages(device, &shape);
            const float *k = random_floats(1, (size_t)s->count * 64, 3.0f);
            const float *values = random_floats(2, (size_t)s->count * 64, 3.0f);
            const kn_rows rows = rows_of(s, 0, s->count);
            device->ops->kv_put(device, kv, &rows, LAYER, k, values);
            const uint32_t bytes = kn_kv_row_bytes(type, 32);
            for (uint32_t r = 0; r < s->count; r++)
                for (uint32_t h = 0; h < 2; h++) {
                    uint8_t plane[128 * 32 * 4], want[128];
                    kn_kv_copy_out(kv, plane, s->pages[s->seq[r]][s->pos[r] / 128], LAYER,
                                   KN_PLANE_V, h, 128);
                    store_row(type, want, values + ((size_t)r * 2 + h) * 32, 32);
                    cr_assert_arr_eq(plane + (size_t)(s->pos[r] % 128) * bytes, want, bytes,
                                     "%s %s", variants[v], type_names[type]);
                }
            kn_kv_destroy(kv);
            kn_device_destroy(device);
        }
}

/* ---- selection ---- */

typedef struct pick {
    int32_t blocks[EDGES * 2][3][8];
    float margin[EDGES * 2][3];
} pick;

typedef struct select_case {
    const float *iq;
    const step *step;
    uint32_t heads, dim, topk, init, local;
} select_case;

static void run_select(const char *variant, uint32_t threads, kn_kv_type type, const select_case *c,
                       uint32_t chunk, bool equal_blocks, pick *out)
{
    kn_device *device = open_device(variant, threads);
    const kn_kv_shape shape = shape_of(type, c->heads, 32, c->dim);
    kn_kv *kv = open_pages(device, &shape);
    fill_pages(kv, 3, 1.0f);
    if (equal_blocks) {
        /* The pages of blocks 2, 5 and 6 of both sequences hold the same index keys. */
        uint8_t *plane = zeroed((size_t)128 * kn_kv_row_bytes(type, c->dim));
        kn_kv_copy_out(kv, plane, c->step->table[0][2], LAYER, KN_PLANE_INDEX, 0, 128);
        for (int i = 0; i < 2; i++) {
            kn_kv_copy_in(kv, plane, c->step->table[i][2], LAYER, KN_PLANE_INDEX, 0, 128);
            kn_kv_copy_in(kv, plane, c->step->table[i][5], LAYER, KN_PLANE_INDEX, 0, 128);
            kn_kv_copy_in(kv, plane, c->step->table[i][6], LAYER, KN_PLANE_INDEX, 0, 128);
        }
    }
    int32_t *blocks = zeroed(c->step->count * c->heads * c->topk * sizeof *blocks);
    float *margin = zeroed(c->step->count * c->heads * sizeof *margin);
    for (uint32_t r = 0; r < c->step->count; r += chunk) {
        const uint32_t n = chunk < c->step->count - r ? chunk : c->step->count - r;
        const kn_rows rows = rows_of(c->step, r, n);
        const kn_select a = {.index_q = c->iq + (size_t)r * c->heads * c->dim,
                             .index_heads = c->heads,
                             .index_dim = c->dim,
                             .layer = LAYER,
                             .topk = c->topk,
                             .init = c->init,
                             .local = c->local,
                             .blocks = blocks + (size_t)r * c->heads * c->topk,
                             .margin = margin + (size_t)r * c->heads};
        device->ops->select(device, kv, &rows, &a);
    }
    for (uint32_t r = 0; r < c->step->count; r++)
        for (uint32_t h = 0; h < c->heads; h++) {
            memcpy(out->blocks[r][h], blocks + ((size_t)r * c->heads + h) * c->topk,
                   c->topk * sizeof *blocks);
            out->margin[r][h] = margin[(size_t)r * c->heads + h];
        }
    kn_kv_destroy(kv);
    kn_device_destroy(device);
}

/* What must hold of any selection: ascending, padded with -1, own block and the forced ones in. */
static void check_rules(const select_case *c, const pick *p)
{
    for (uint32_t r = 0; r < c->step->count; r++)
        for (uint32_t h = 0; h < c->heads; h++) {
            const int32_t *b = p->blocks[r][h];
            const int32_t own = c->step->pos[r] / 128;
            const uint32_t want = (uint32_t)own + 1 < c->topk ? (uint32_t)own + 1 : c->topk;
            uint32_t forced = 0;
            for (uint32_t i = 0; i < c->topk; i++) {
                cr_assert_eq(i < want, b[i] >= 0);
                if (i < want) {
                    cr_assert(b[i] <= own);
                    cr_assert(i == 0 || b[i] > b[i - 1]);
                    forced += b[i] < (int32_t)c->init || b[i] > own - (int32_t)c->local;
                }
            }
            uint32_t must = 0;
            for (int32_t k = 0; k <= own; k++)
                must += k < (int32_t)c->init || k > own - (int32_t)c->local;
            cr_assert_eq(forced, must);
            /* Without a choice by score, or with nothing left out, there is no margin. */
            cr_assert_eq(isinf(p->margin[r][h]), want == (uint32_t)own + 1 || must == want,
                         "row %u: margin %g", r, p->margin[r][h]);
        }
}

static void check_select(kn_kv_type type, uint32_t heads, uint32_t dim, uint32_t topk,
                         uint32_t init, uint32_t local, bool equal_blocks)
{
    step *s = zeroed(sizeof *s);
    init_step(s);
    for (uint32_t seq = 0; seq < 2; seq++)
        for (uint32_t i = 0; i < EDGES; i++)
            add_row(s, seq, edge_pos[i]);
    float *iq = query_values(4, (size_t)s->count * heads * dim, type, 2.0f);
    memset(iq + (size_t)(EDGES - 1) * heads * dim, 0,
           dim * sizeof *iq); /* all scores equal: low blocks win */
    const select_case c = {.iq = iq,
                           .step = s,
                           .heads = heads,
                           .dim = dim,
                           .topk = topk,
                           .init = init,
                           .local = local};
    pick *expect = zeroed(sizeof *expect);
    pick *got = zeroed(sizeof *got);
    pick *other = zeroed(sizeof *other);
    const char *names[2];
    const uint32_t variants = vector_variants(names);
    run_select("ref", 1, type, &c, s->count, equal_blocks, expect);
    check_rules(&c, expect);
    run_select("ref", 1, type, &c, 5, equal_blocks, other);
    cr_assert_arr_eq(other, expect, sizeof *expect, "select: ref, chunks of 5");
    run_select(names[0], 1, type, &c, s->count, equal_blocks, got);
    for (uint32_t r = 0; r < s->count; r++)
        for (uint32_t h = 0; h < heads; h++)
            if (expect->margin[r][h] > 1e-4f || expect->margin[r][h] == 0.0f) {
                cr_assert_arr_eq(got->blocks[r][h], expect->blocks[r][h], topk * sizeof(int32_t),
                                 "row %u head %u, margin %g", r, h, expect->margin[r][h]);
                if (!isinf(expect->margin[r][h]))
                    cr_assert_float_eq(got->margin[r][h], expect->margin[r][h], 1e-4);
            }
    check_rules(&c, got);
    for (uint32_t i = 0; i < variants; i++)
        for (uint32_t threads = 1; threads <= 2; threads++) {
            static const uint32_t chunks[] = {1, 2, 5, 31, 32};
            for (int n = 0; n < 5; n++) {
                run_select(names[i], threads, type, &c, chunks[n], equal_blocks, other);
                cr_assert_arr_eq(other, got, sizeof *got, "select: %s, %u threads, chunks of %u",
                                 names[i], threads, chunks[n]);
            }
        }
    if (topk == 4 && init == 0 && local == 1)
        for (uint32_t i = 0; i < 4; i++) {
            static const int32_t zero_query[4] = {0, 1, 2, 11};
            cr_assert_eq(got->blocks[EDGES - 1][0][i], zero_query[i]);
        }
}

Test(attention, select)
{
    check_select(KN_KV_NVFP4, 2, 64, 4, 0, 1, false);
    check_select(KN_KV_NVFP4, 2, 64, 4, 0, 1, true);
    check_select(KN_KV_NVFP4, 1, 128, 8, 0, 1, true);
    check_select(KN_KV_FP8, 3, 32, 4, 1, 2, false);
    check_select(KN_KV_BF16, 2, 48, 3, 1, 1, true);
    check_select(KN_KV_F32, 2, 16, 1, 0, 1, false);
}

/* ---- attention ---- */

typedef struct attend_case {
    const float *q;
    const step *step;
    uint32_t q_heads, kv_heads, dim;
    const int32_t *blocks;
    uint32_t topk;
} attend_case;

static float *run_attend(const char *variant, uint32_t threads, kn_kv_type type,
                         const attend_case *c, uint32_t chunk)
{
    kn_device *device = open_device(variant, threads);
    const kn_kv_shape shape = shape_of(type, c->kv_heads, c->dim, 32);
    kn_kv *kv = open_pages(device, &shape);
    fill_pages(kv, 5, 2.0f);
    const size_t width = (size_t)c->q_heads * c->dim;
    float *out = random_floats(1, c->step->count * width, NAN);
    for (uint32_t r = 0; r < c->step->count; r += chunk) {
        const uint32_t n = chunk < c->step->count - r ? chunk : c->step->count - r;
        const kn_rows rows = rows_of(c->step, r, n);
        const kn_attend a = {.q = c->q + r * width,
                             .q_heads = c->q_heads,
                             .kv_heads = c->kv_heads,
                             .head_dim = c->dim,
                             .layer = LAYER,
                             .blocks =
                                 c->blocks ? c->blocks + (size_t)r * c->kv_heads * c->topk : NULL,
                             .topk = c->topk,
                             .out = out + r * width};
        device->ops->attend(device, kv, &rows, &a);
    }
    kn_kv_destroy(kv);
    kn_device_destroy(device);
    return out;
}

static void check_attend(kn_kv_type type, uint32_t q_heads, uint32_t kv_heads, uint32_t dim,
                         uint32_t topk)
{
    step *s = zeroed(sizeof *s);
    init_step(s);
    for (uint32_t i = 0; i < EDGES; i++)
        add_row(s, 0, edge_pos[i]);
    for (int32_t p = 700; p < 790; p++) /* more rows than share a decoded block */
        add_row(s, 1, p);
    int32_t *blocks = zeroed((size_t)s->count * kv_heads * (topk + 1) * sizeof *blocks);
    for (uint32_t i = 0; i < s->count * kv_heads && topk; i++) {
        const int32_t own = s->pos[i / kv_heads] / 128;
        uint32_t n = 0;
        for (int32_t b = 0; b <= own; b++)
            if (b == own || (n + 1 < topk && (random_value(8, i * 16 + (uint32_t)b) > 0.2f)))
                blocks[i * topk + n++] = b;
        for (; n < topk; n++)
            blocks[i * topk + n] = -1;
    }
    const attend_case c = {.q = query_values(6, (size_t)s->count * q_heads * dim, type, 3.0f),
                           .step = s,
                           .q_heads = q_heads,
                           .kv_heads = kv_heads,
                           .dim = dim,
                           .blocks = topk ? blocks : NULL,
                           .topk = topk};
    const size_t width = (size_t)q_heads * dim;
    const char *names[2];
    const uint32_t variants = vector_variants(names);
    const float *expect = run_attend("ref", 1, type, &c, s->count);
    same_bits(run_attend("ref", 1, type, &c, 1), expect, s->count * width,
              "attend: ref, rows alone");
    const float *got = run_attend(names[0], 1, type, &c, s->count);
    within_rows(got, expect, s->count, width, 1e-5f, "attend");
    for (uint32_t i = 0; i < variants; i++)
        for (uint32_t threads = 1; threads <= 2; threads++) {
            static const uint32_t chunks[] = {1, 3, 8, 17, 106};
            for (int n = 0; n < 5; n++) {
                char label[96];
                snprintf(label, sizeof label, "attend, %s pages, %s, %u threads, chunks of %u",
                         type_names[type], names[i], threads, chunks[n]);
                same_bits(run_attend(names[i], threads, type, &c, chunks[n]), got, s->count * width,
                          label);
            }
        }
}

Test(attention, attend_sparse)
{
    check_attend(KN_KV_NVFP4, 8, 2, 64, 4);
    check_attend(KN_KV_FP8, 6, 2, 48, 3);
    check_attend(KN_KV_BF16, 5, 1, 32, 4);
    check_attend(KN_KV_F32, 3, 3, 16, 2);
}

Test(attention, attend_dense)
{
    check_attend(KN_KV_NVFP4, 8, 2, 64, 0);
    check_attend(KN_KV_FP8, 4, 2, 80, 0);
    check_attend(KN_KV_BF16, 16, 1, 128, 0);
    check_attend(KN_KV_F32, 4, 2, 32, 0);
}

/* Choosing all blocks is dense attention, to the bit. */
Test(attention, all_blocks_chosen_is_dense)
{
    step *s = zeroed(sizeof *s);
    init_step(s);
    int32_t blocks[EDGES][2][12];
    for (uint32_t i = 0; i < EDGES; i++) {
        add_row(s, 0, edge_pos[i]);
        for (int h = 0; h < 2; h++)
            for (int32_t b = 0; b < 12; b++)
                blocks[i][h][b] = b <= edge_pos[i] / 128 ? b : -1;
    }
    attend_case c = {.q = query_values(6, (size_t)s->count * 4 * 32, KN_KV_NVFP4, 3.0f),
                     .step = s,
                     .q_heads = 4,
                     .kv_heads = 2,
                     .dim = 32,
                     .blocks = &blocks[0][0][0],
                     .topk = 12};
    const char *names[2];
    const uint32_t variants = vector_variants(names);
    for (uint32_t i = 0; i < variants; i++) {
        c.blocks = &blocks[0][0][0];
        const float *sparse = run_attend(names[i], 2, KN_KV_NVFP4, &c, s->count);
        c.blocks = NULL;
        same_bits(sparse, run_attend(names[i], 2, KN_KV_NVFP4, &c, s->count),
                  (size_t)s->count * 128, "dense");
    }
}

/* ---- the draft block ---- */

static float *run_draft(const char *variant, uint32_t threads, kn_kv_type type,
                        const kn_draft_attend *c)
{
    kn_device *device = open_device(variant, threads);
    const kn_kv_shape shape = {.type = type,
                               .layers = 2,
                               .kv_heads = c->kv_heads,
                               .head_dim = c->head_dim,
                               .page_count = PAGES};
    kn_kv *kv = open_pages(device, &shape);
    fill_pages(kv, 9, 2.0f);
    kn_draft_attend a = *c;
    a.out = random_floats(1, (size_t)a.blocks * a.block_rows * a.q_heads * a.head_dim, NAN);
    device->ops->draft_attend(device, kv, &a);
    kn_kv_destroy(kv);
    kn_device_destroy(device);
    return a.out;
}

Test(attention, draft_block)
{
    step *s = zeroed(sizeof *s);
    init_step(s);
    const uint32_t *const pages[6] = {s->pages[0], s->pages[1], s->pages[0],
                                      s->pages[1], s->pages[0], s->pages[1]};
    static const uint32_t lo[6] = {0, 0, 5, 1, 300, 130};
    static const uint32_t hi[6] = {0, 1, 5, 128, 700, 517};
    static const uint32_t windows[] = {0, 256, 3, 1};
    for (int w = 0; w < 4; w++)
        for (kn_kv_type type = KN_KV_BF16; type <= KN_KV_F32; type++) {
            const kn_draft_attend c = {.q = random_floats(1, 6 * 7 * 6 * 48, 2.0f),
                                       .block_k = random_floats(2, 6 * 7 * 2 * 48, 2.0f),
                                       .block_v = random_floats(3, 6 * 7 * 2 * 48, 2.0f),
                                       .blocks = 6,
                                       .block_rows = 7,
                                       .q_heads = 6,
                                       .kv_heads = 2,
                                       .head_dim = 48,
                                       .layer = 1,
                                       .pages = pages,
                                       .lo = lo,
                                       .hi = hi,
                                       .window = windows[w]};
            const char *names[2];
            const uint32_t variants = vector_variants(names);
            const float *expect = run_draft("ref", 1, type, &c);
            const float *got = run_draft(names[0], 1, type, &c);
            within_rows(got, expect, 42, 6 * 48, 1e-5f, "draft_attend");
            for (uint32_t b = 0; b < 6 && type == KN_KV_F32; b++) { /* each block alone */
                kn_draft_attend one = c;
                one.blocks = 1;
                one.q += b * 7 * 6 * 48;
                one.block_k += b * 7 * 2 * 48;
                one.block_v += b * 7 * 2 * 48;
                one.pages += b;
                one.lo += b;
                one.hi += b;
                const size_t at = (size_t)b * 7 * 6 * 48;
                same_bits(run_draft("ref", 1, type, &one), expect + at, 7 * 6 * 48,
                          "draft_attend: ref, a block alone");
                for (uint32_t i = 0; i < variants; i++)
                    same_bits(run_draft(names[i], 2, type, &one), got + at, 7 * 6 * 48,
                              "draft_attend: a block alone");
            }
            for (uint32_t i = 0; i < variants; i++)
                for (uint32_t threads = 1; threads <= 3; threads++)
                    same_bits(run_draft(names[i], threads, type, &c), got, 42 * 6 * 48,
                              "draft_attend");
        }
}
