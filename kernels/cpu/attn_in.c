/* cpu/attn_in: norm, the projections, per-head norms, RoPE, rounding, and the insert into pages.
 * Three parallel regions: norms by rows, all projections by tiles of outputs, the rest by rows. */
#include "kernels/cpu/variant.h"

#define ROWS_A_PIECE 4
#define PARTS 5

typedef struct attn_part {
    const kn_weight *w;
    float *y;
    uint32_t outs, pieces;
} attn_part;

typedef struct attn_in_job {
    cpu_device *d;
    kn_kv *kv;
    const kn_rows *rows;
    const kn_attn_in *a;
    cpu_in in;
    attn_part part[PARTS];
    uint32_t parts;
    float *k, *v, *index_k;
} attn_in_job;

static void add_part(attn_in_job *job, const kn_weight *w, float *y)
{
    attn_part *part = &job->part[job->parts++];
    *part = (attn_part){.w = w, .y = y};
    part->outs = cpu_piece_outs(job->d, job->rows->rows, w->cols, w->rows, UINT32_MAX);
    part->pieces = ceil_div(w->rows, part->outs);
    if (w->type == KN_NVFP4 && !job->in.q)
        cpu_quantize(job->d, &job->in, 0, job->rows->rows, w->cols);
}

static void project(void *ctx, uint32_t piece, uint32_t thread)
{
    const attn_in_job *job = ctx;
    const attn_part *part = job->part;
    for (; piece >= part->pieces; part++)
        piece -= part->pieces;
    const uint32_t first = piece * part->outs;
    cpu_matmul(job->d, thread, part->y + first, part->w->rows, &job->in, job->rows->rows, part->w,
               first, min_u32(first + part->outs, part->w->rows), false);
}

/* ---- rounding and storing ---- */

static void round_query(float *q, uint32_t n, kn_kv_type type)
{
    if (type == KN_KV_F32)
        return;
    for (uint32_t i = 0; i < n; i += 16) {
        const v16 b = v16_round_bf16(v16_load(q + i));
        v16_store(q + i, type == KN_KV_BF16 ? b : v16_round_e4m3(b));
    }
}

/* kn_nvfp4_quantize16 on lanes. The quotient of a BF16 value and an E4M3 scale cannot round onto a
 * threshold: both have so few bits that a value off the threshold is off by 2^-9 of it. */
INLINE void quantize16(uint8_t *codes, uint8_t *scale, v16 x)
{
    static const uint8_t by_half[16] = {0, 1, 2, 3, 4, 4, 5, 5,
                                        6, 6, 6, 6, 7, 7, 7, 7}; /* code of value * 2 */
    const v16 a = i16_float(i16_and(v16_bits(x), i16_set1(0x7fffffff)));
    const float raw = v16_hmax(a) / 6.0f;
    *scale = kn_f32_to_e4m3(raw > 448.0f ? 448.0f : raw > 1.0f / 512.0f ? raw : 1.0f / 512.0f);
    const v16 q = v16_div(a, v16_set1(kn_e4m3_to_f32(*scale)));
    /* One mantissa bit, steps of a half below 2: as v16_round_e4m3, with 2^(e+22). */
    const v16 top = v16_min(q, v16_set1(6.0f));
    const i16 exponent = i16_and(v16_bits(top), i16_set1(0x7f800000));
    const v16 big = i16_float(i16_add(i16_max(exponent, i16_set1(127 << 23)), i16_set1(22 << 23)));
    const v16 rounded = v16_sub(v16_add(top, big), big);
    const i16 code = i16_lookup(v16_to_int(v16_add(rounded, rounded)),
                                _mm_loadu_si128((const __m128i *)by_half));
    const i16 sign = i16_and(i16_shr(v16_bits(x), 28), i16_set1(8));
    /* A magnitude of zero loses its sign. */
    const i16 nibble = i16_or(code, i16_and(sign, i16_sar(i16_sub(i16_set1(0), code), 31)));
    const __m128i pairs = _mm_maddubs_epi16(i16_low_bytes(nibble), _mm_set1_epi16(0x1001));
    _mm_storel_epi64((__m128i *)codes, _mm_packus_epi16(pairs, pairs));
}

static void store_row(uint8_t *dst, const float *x, uint32_t dims, kn_kv_type type)
{
    if (type == KN_KV_F32) {
        memcpy(dst, x, dims * sizeof *x);
        return;
    }
    for (uint32_t i = 0; i < dims; i += 16) {
        const v16 b = v16_round_bf16(v16_load(x + i));
        if (type == KN_KV_NVFP4) {
            quantize16(dst + i / 2, dst + dims / 2 + i / 16, b);
        } else if (type == KN_KV_FP8) {
            _mm_storeu_si128((__m128i *)(dst + i), v16_e4m3_codes(v16_round_e4m3(b)));
        } else {
            uint32_t bits[16];
            memcpy(bits, &b, sizeof bits);
            for (uint32_t j = 0; j < 16; j++) {
                const uint16_t code = (uint16_t)(bits[j] >> 16);
                memcpy(dst + 2 * (i + j), &code, sizeof code);
            }
        }
    }
}

/* Where position pos of a sequence stands: its page, and its row in each plane. */
static uint32_t page_of(const kn_kv *kv, const kn_rows *rows, uint32_t r)
{
    const uint32_t page = rows->pages[rows->seq[r]][rows->pos[r] / KN_PAGE_TOKENS];
    CHECK(page < kv->shape.page_count);
    return page;
}

static void store_kv(kn_kv *kv, uint32_t page, size_t slot, uint32_t layer, kn_plane_kind kind,
                     uint32_t head, const float *x)
{
    store_row(cpu_kv_plane(kv, page, layer, kind, head) + slot * kv->row_bytes, x,
              kv->shape.head_dim, kv->shape.type);
}

static void finish_row(const attn_in_job *job, uint32_t r)
{
    const kn_attn_in *a = job->a;
    kn_kv *kv = job->kv;
    const int32_t pos = job->rows->pos[r];
    const uint32_t page = page_of(kv, job->rows, r);
    const size_t slot = (size_t)(pos % KN_PAGE_TOKENS);
    const kn_kv_type type = kv->shape.type;
    const uint32_t dim = a->head_dim;

    float *q = a->q_out + (size_t)r * a->q_heads * dim;
    for (uint32_t h = 0; h < a->q_heads; h++)
        cpu_head_row(q + h * dim, a->q_norm, dim, a->eps, &a->rope, pos);
    round_query(q, a->q_heads * dim, type);
    for (uint32_t h = 0; h < a->kv_heads; h++) {
        float *k = job->k + ((size_t)r * a->kv_heads + h) * dim;
        cpu_head_row(k, a->k_norm, dim, a->eps, &a->rope, pos);
        store_kv(kv, page, slot, a->layer, KN_PLANE_K, h, k);
        store_kv(kv, page, slot, a->layer, KN_PLANE_V, h,
                 job->v + ((size_t)r * a->kv_heads + h) * dim);
    }
    if (!a->index_heads)
        return;
    float *iq = a->index_q_out + (size_t)r * a->index_heads * a->index_dim;
    for (uint32_t h = 0; h < a->index_heads; h++)
        cpu_head_row(iq + h * a->index_dim, a->index_q_norm, a->index_dim, a->eps, &a->rope, pos);
    round_query(iq, a->index_heads * a->index_dim, type);
    float *ik = job->index_k + (size_t)r * a->index_dim;
    cpu_head_row(ik, a->index_k_norm, a->index_dim, a->eps, &a->rope, pos);
    store_row(cpu_kv_plane(kv, page, a->layer, KN_PLANE_INDEX, 0) + slot * kv->index_row_bytes, ik,
              a->index_dim, type);
}

static void finish_piece(void *ctx, uint32_t piece, uint32_t thread)
{
    const attn_in_job *job = ctx;
    const uint32_t last = min_u32(job->rows->rows, (piece + 1) * ROWS_A_PIECE);
    for (uint32_t r = piece * ROWS_A_PIECE; r < last; r++)
        finish_row(job, r);
}

void cpu_attn_in(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attn_in *a)
{
    cpu_device *d = cpu_of(device);
    const size_t n = rows->rows;
    CHECK(n <= d->rows_max && a->hidden <= d->width_max);
    CHECK(a->layer < kv->shape.layers && a->kv_heads == kv->shape.kv_heads &&
          a->head_dim == kv->shape.head_dim);
    CHECK(!a->index_heads ||
          (a->index_dim == kv->shape.index_dim && kv->shape.has_index[a->layer]));
    const size_t kv_floats = n * a->kv_heads * a->head_dim;
    CHECK(2 * kv_floats + n * a->index_dim <= d->wide_floats);
    attn_in_job job = {.d = d,
                       .kv = kv,
                       .rows = rows,
                       .a = a,
                       .k = d->wide,
                       .v = d->wide + kv_floats,
                       .index_k = d->wide + 2 * kv_floats};
    cpu_norm_rows(d, d->normed, a->x, a->norm, NULL, rows->rows, a->hidden, a->eps);
    job.in = (cpu_in){.x = d->normed, .stride = a->hidden};
    add_part(&job, a->q, a->q_out);
    add_part(&job, a->k, job.k);
    add_part(&job, a->v, job.v);
    if (a->index_heads) {
        add_part(&job, a->index_q, a->index_q_out);
        add_part(&job, a->index_k, job.index_k);
    }
    uint32_t pieces = 0;
    for (uint32_t i = 0; i < job.parts; i++)
        pieces += job.part[i].pieces;
    kn_pool_run(d->base.pool, project, &job, pieces);
    kn_pool_run(d->base.pool, finish_piece, &job, ceil_div(rows->rows, ROWS_A_PIECE));
}

void cpu_kv_put(kn_device *device, kn_kv *kv, const kn_rows *rows, uint32_t layer, const float *k,
                const float *v)
{
    const uint32_t heads = kv->shape.kv_heads;
    const size_t dim = kv->shape.head_dim;
    CHECK(layer < kv->shape.layers);
    for (uint32_t r = 0; r < rows->rows; r++) {
        const uint32_t page = page_of(kv, rows, r);
        const size_t slot = (size_t)(rows->pos[r] % KN_PAGE_TOKENS);
        for (uint32_t h = 0; h < heads; h++) {
            store_kv(kv, page, slot, layer, KN_PLANE_K, h, k + (r * (size_t)heads + h) * dim);
            store_kv(kv, page, slot, layer, KN_PLANE_V, h, v + (r * (size_t)heads + h) * dim);
        }
    }
}
