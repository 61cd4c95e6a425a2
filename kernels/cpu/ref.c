/* cpu/ref: the plain formulas of ops.h, scalar, sums in double, every weight and page type. Never
 * tuned: what the other variants and the golden vectors are compared with. Runs on the calling
 * thread alone. */
#include "kernels/cpu/device.h"

#include <math.h>
#include <string.h>

/* ---- weights ---- */

/* Row `row` of a matrix in float, before the division by scale_global. */
static void decode_row(float *dst, const kn_weight *w, size_t row)
{
    const size_t cols = w->cols;
    switch (w->type) {
    case KN_F32:
        memcpy(dst, (const float *)w->data + row * cols, cols * sizeof(float));
        break;
    case KN_BF16:
        for (size_t k = 0; k < cols; k++)
            dst[k] = kn_bf16_to_f32(((const uint16_t *)w->data)[row * cols + k]);
        break;
    case KN_MXFP8:
        for (size_t k = 0; k < cols; k++)
            dst[k] = kn_e4m3_to_f32(((const uint8_t *)w->data)[row * cols + k]) *
                     kn_e8m0_to_f32(((const uint8_t *)w->scale)[row * (cols / 32) + k / 32]);
        break;
    case KN_NVFP4:
        for (size_t k = 0; k < cols; k++) {
            const uint8_t byte = ((const uint8_t *)w->data)[row * (cols / 2) + k / 2];
            dst[k] = kn_e2m1_to_f32(k & 1 ? byte >> 4 : byte & 15) *
                     kn_e4m3_to_f32(((const uint8_t *)w->scale)[row * (cols / 16) + k / 16]);
        }
        break;
    }
}

static double global_of(const kn_weight *w)
{
    return w->type == KN_NVFP4 ? w->scale_global : 1.0;
}

static double dot(const float *a, const float *b, size_t n)
{
    double sum = 0.0;
    for (size_t k = 0; k < n; k++)
        sum += (double)a[k] * b[k];
    return sum;
}

static void linear_rows(cpu_device *d, float *y, const float *x, const kn_weight *w, uint32_t rows,
                        bool add)
{
    float *decoded = d->threads[0].tile;
    CHECK(w->cols <= d->tile_floats);
    for (uint32_t o = 0; o < w->rows; o++) {
        decode_row(decoded, w, o);
        for (uint32_t r = 0; r < rows; r++) {
            const double sum = dot(x + (size_t)r * w->cols, decoded, w->cols) / global_of(w);
            float *at = y + (size_t)r * w->rows + o;
            *at = (float)(add ? *at + sum : sum);
        }
    }
}

static void linear(kn_device *device, float *y, const float *x, const kn_weight *w, uint32_t rows,
                   bool add)
{
    linear_rows(cpu_of(device), y, x, w, rows, add);
}

static void embed(kn_device *device, float *y, const kn_weight *table, const int32_t *ids,
                  uint32_t rows)
{
    for (uint32_t r = 0; r < rows; r++) {
        float *at = y + (size_t)r * table->cols;
        CHECK(ids[r] >= 0 && (uint32_t)ids[r] < table->rows);
        decode_row(at, table, (uint32_t)ids[r]);
        for (uint32_t k = 0; k < table->cols; k++)
            at[k] = (float)(at[k] / global_of(table));
    }
}

/* ---- norms ---- */

static void norm_row(float *y, const float *x, const float *w, uint32_t cols, float eps)
{
    const double rs = 1.0 / sqrt(dot(x, x, cols) / cols + eps);
    for (uint32_t k = 0; k < cols; k++)
        y[k] = (float)(x[k] * rs * (1.0 + w[k]));
}

static void norm(kn_device *device, float *y, const float *x, const float *w, uint32_t rows,
                 uint32_t cols, float eps)
{
    for (uint32_t r = 0; r < rows; r++)
        norm_row(y + (size_t)r * cols, x + (size_t)r * cols, w, cols, eps);
}

static void rope_row(float *x, const kn_rope *rope, int32_t pos)
{
    const uint32_t half = rope->rotary_dim / 2;
    const float *cos = rope->cos + (size_t)pos * half;
    const float *sin = rope->sin + (size_t)pos * half;
    for (uint32_t i = 0; i < half; i++) {
        const double a = x[i];
        const double b = x[i + half];
        x[i] = (float)(a * cos[i] - b * sin[i]);
        x[i + half] = (float)(b * cos[i] + a * sin[i]);
    }
}

static void head_norm_rope(kn_device *device, float *x, const float *w, uint32_t rows,
                           uint32_t heads, uint32_t dim, float eps, const kn_rope *rope,
                           const int32_t *pos)
{
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t h = 0; h < heads; h++) {
            float *at = x + ((size_t)r * heads + h) * dim;
            norm_row(at, at, w, dim, eps);
            if (rope->rotary_dim)
                rope_row(at, rope, pos[r]);
        }
    }
}

/* ---- pages ---- */

static float round_bf16(float x)
{
    return kn_bf16_to_f32(kn_f32_to_bf16(x));
}

/* Queries as the page type wants them. */
static void round_query(float *q, size_t n, kn_kv_type type)
{
    for (size_t i = 0; i < n && type != KN_KV_F32; i++) {
        q[i] = round_bf16(q[i]);
        if (type != KN_KV_BF16)
            q[i] = kn_e4m3_to_f32(kn_f32_to_e4m3(q[i]));
    }
}

static void store_row(uint8_t *dst, const float *x, uint32_t dims, kn_kv_type type)
{
    for (uint32_t i = 0; i < dims; i++) {
        const float b = round_bf16(x[i]);
        const uint16_t code = kn_f32_to_bf16(x[i]);
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
                    group[j] = round_bf16(x[i + j]);
                kn_nvfp4_quantize16(dst + i / 2, dst + dims / 2 + i / 16, group);
            }
            break;
        }
    }
}

static void load_row(float *x, const uint8_t *src, uint32_t dims, kn_kv_type type)
{
    for (uint32_t i = 0; i < dims; i++) {
        uint16_t code;
        switch (type) {
        case KN_KV_F32:
            memcpy(&x[i], src + 4 * i, 4);
            break;
        case KN_KV_BF16:
            memcpy(&code, src + 2 * i, 2);
            x[i] = kn_bf16_to_f32(code);
            break;
        case KN_KV_FP8:
            x[i] = kn_e4m3_to_f32(src[i]);
            break;
        case KN_KV_NVFP4:
            x[i] = kn_nvfp4_read(src[i / 2] >> 4 * (i & 1) & 15, src[dims / 2 + i / 16]);
            break;
        }
    }
}

/* The stored row of a position. */
static uint8_t *row_at(const kn_kv *kv, const kn_rows *rows, uint32_t seq, int32_t pos,
                       uint32_t layer, kn_plane_kind kind, uint32_t head)
{
    const uint32_t page = rows->pages[seq][pos / KN_PAGE_TOKENS];
    const uint32_t bytes = kind == KN_PLANE_INDEX ? kv->index_row_bytes : kv->row_bytes;
    CHECK(page < kv->shape.page_count);
    return cpu_kv_plane(kv, page, layer, kind, head) + (size_t)(pos % KN_PAGE_TOKENS) * bytes;
}

static void insert(kn_kv *kv, const kn_rows *rows, uint32_t layer, kn_plane_kind kind,
                   const float *x, uint32_t heads, uint32_t dims)
{
    for (uint32_t r = 0; r < rows->rows; r++)
        for (uint32_t h = 0; h < heads; h++)
            store_row(row_at(kv, rows, rows->seq[r], rows->pos[r], layer, kind, h),
                      x + ((size_t)r * heads + h) * dims, dims, kv->shape.type);
}

static void attn_in(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attn_in *a)
{
    cpu_device *d = cpu_of(device);
    const uint32_t n = rows->rows;
    const kn_kv_type type = kv->shape.type;
    CHECK(n <= d->rows_max && a->hidden <= d->width_max);
    norm(device, d->normed, a->x, a->norm, n, a->hidden, a->eps);

    linear_rows(d, a->q_out, d->normed, a->q, n, false);
    head_norm_rope(device, a->q_out, a->q_norm, n, a->q_heads, a->head_dim, a->eps, &a->rope,
                   rows->pos);
    round_query(a->q_out, (size_t)n * a->q_heads * a->head_dim, type);

    CHECK((size_t)n * a->kv_heads * a->head_dim <= d->wide_floats);
    linear_rows(d, d->wide, d->normed, a->k, n, false);
    head_norm_rope(device, d->wide, a->k_norm, n, a->kv_heads, a->head_dim, a->eps, &a->rope,
                   rows->pos);
    insert(kv, rows, a->layer, KN_PLANE_K, d->wide, a->kv_heads, a->head_dim);

    linear_rows(d, d->wide, d->normed, a->v, n, false);
    insert(kv, rows, a->layer, KN_PLANE_V, d->wide, a->kv_heads, a->head_dim);
    if (!a->index_heads)
        return;

    linear_rows(d, a->index_q_out, d->normed, a->index_q, n, false);
    head_norm_rope(device, a->index_q_out, a->index_q_norm, n, a->index_heads, a->index_dim, a->eps,
                   &a->rope, rows->pos);
    round_query(a->index_q_out, (size_t)n * a->index_heads * a->index_dim, type);

    linear_rows(d, d->wide, d->normed, a->index_k, n, false);
    head_norm_rope(device, d->wide, a->index_k_norm, n, 1, a->index_dim, a->eps, &a->rope,
                   rows->pos);
    insert(kv, rows, a->layer, KN_PLANE_INDEX, d->wide, 1, a->index_dim);
}

static void kv_put(kn_device *device, kn_kv *kv, const kn_rows *rows, uint32_t layer,
                   const float *k, const float *v)
{
    insert(kv, rows, layer, KN_PLANE_K, k, kv->shape.kv_heads, kv->shape.head_dim);
    insert(kv, rows, layer, KN_PLANE_V, v, kv->shape.kv_heads, kv->shape.head_dim);
}

/* ---- selection ---- */

static void select_row(cpu_device *d, kn_kv *kv, const kn_rows *rows, const kn_select *a,
                       uint32_t r, uint32_t h)
{
    double *score = (double *)d->scores;
    const float *iq = a->index_q + ((size_t)r * a->index_heads + h) * a->index_dim;
    const int32_t own = rows->pos[r] / KN_BLOCK_TOKENS;
    float *key = d->threads[0].p;
    for (int32_t b = 0; b <= own; b++)
        score[b] = -INFINITY;
    for (int32_t u = 0; u <= rows->pos[r]; u++) {
        load_row(key, row_at(kv, rows, rows->seq[r], u, a->layer, KN_PLANE_INDEX, 0), a->index_dim,
                 kv->shape.type);
        score[u / KN_BLOCK_TOKENS] = fmax(score[u / KN_BLOCK_TOKENS], dot(iq, key, a->index_dim));
    }

    int32_t *chosen = a->blocks + ((size_t)r * a->index_heads + h) * a->topk;
    uint32_t count = 0;
    double last = INFINITY;
    for (int32_t b = 0; b <= own; b++)
        if (b < (int32_t)a->init || b > own - (int32_t)a->local) {
            CHECK(count < a->topk);
            chosen[count++] = b;
            score[b] = NAN; /* out of the contest */
        }
    double next = -INFINITY;
    while (1) {
        int32_t best = -1;
        for (int32_t b = 0; b <= own; b++)
            if (!isnan(score[b]) && (best < 0 || score[b] > score[best]))
                best = b;
        if (best < 0) {
            last = INFINITY; /* none is left out */
            next = 0.0;
            break;
        }
        if (count == a->topk) {
            next = score[best];
            break;
        }
        last = score[best];
        score[best] = NAN;
        chosen[count++] = best;
    }
    for (uint32_t i = 1; i < count; i++)
        for (uint32_t j = i; j > 0 && chosen[j - 1] > chosen[j]; j--) {
            const int32_t t = chosen[j];
            chosen[j] = chosen[j - 1];
            chosen[j - 1] = t;
        }
    for (uint32_t i = count; i < a->topk; i++)
        chosen[i] = -1;
    if (a->margin)
        a->margin[(size_t)r * a->index_heads + h] = (float)(last - next);
}

static void select_blocks(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_select *a)
{
    cpu_device *d = cpu_of(device);
    for (uint32_t r = 0; r < rows->rows; r++) {
        CHECK(rows->pos[r] >= 0 && (uint32_t)rows->pos[r] < d->context_max);
        for (uint32_t h = 0; h < a->index_heads; h++)
            select_row(d, kv, rows, a, r, h);
    }
}

/* ---- attention ---- */

/* Softmax of score[0 … count) in place, scaled by 1/sqrt(dim) first. */
static void softmax(double *score, size_t count, uint32_t dim)
{
    double max = -INFINITY;
    double sum = 0.0;
    for (size_t i = 0; i < count; i++)
        max = fmax(max, score[i] /= sqrt(dim));
    for (size_t i = 0; i < count; i++)
        sum += score[i] = exp(score[i] - max);
    for (size_t i = 0; i < count; i++)
        score[i] /= sum;
}

static bool is_chosen(const kn_attend *a, uint32_t r, uint32_t kv_head, int32_t block)
{
    if (!a->blocks)
        return true;
    const int32_t *chosen = a->blocks + ((size_t)r * a->kv_heads + kv_head) * a->topk;
    for (uint32_t i = 0; i < a->topk; i++)
        if (chosen[i] == block)
            return true;
    return false;
}

static void attend_head(cpu_device *d, kn_kv *kv, const kn_rows *rows, const kn_attend *a,
                        uint32_t r, uint32_t head)
{
    const uint32_t dim = a->head_dim;
    const uint32_t kv_head = head / (a->q_heads / a->kv_heads);
    const float *q = a->q + ((size_t)r * a->q_heads + head) * dim;
    double *p = (double *)d->scores;
    float *row = d->threads[0].p;
    double *sum = (double *)d->threads[0].block_k;
    size_t count = 0;
    for (int32_t u = 0; u <= rows->pos[r]; u++)
        if (is_chosen(a, r, kv_head, u / KN_BLOCK_TOKENS)) {
            load_row(row, row_at(kv, rows, rows->seq[r], u, a->layer, KN_PLANE_K, kv_head), dim,
                     kv->shape.type);
            p[count++] = dot(q, row, dim);
        }
    softmax(p, count, dim);
    memset(sum, 0, dim * sizeof *sum);
    count = 0;
    for (int32_t u = 0; u <= rows->pos[r]; u++)
        if (is_chosen(a, r, kv_head, u / KN_BLOCK_TOKENS)) {
            load_row(row, row_at(kv, rows, rows->seq[r], u, a->layer, KN_PLANE_V, kv_head), dim,
                     kv->shape.type);
            for (uint32_t i = 0; i < dim; i++)
                sum[i] += p[count] * row[i];
            count++;
        }
    for (uint32_t i = 0; i < dim; i++)
        a->out[((size_t)r * a->q_heads + head) * dim + i] = (float)sum[i];
}

static void attend(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attend *a)
{
    cpu_device *d = cpu_of(device);
    for (uint32_t r = 0; r < rows->rows; r++) {
        CHECK(rows->pos[r] >= 0 && (uint32_t)rows->pos[r] < d->context_max);
        for (uint32_t h = 0; h < a->q_heads; h++)
            attend_head(d, kv, rows, a, r, h);
    }
}

/* Key or value row of a draft block for one kv head: context position u < hi from the pages, the
 * block's own rows at hi and up. `row` is scratch. */
static const float *draft_row(const kn_kv *kv, const kn_draft_attend *a, kn_plane_kind kind,
                              const float *own, uint32_t block, uint32_t kv_head, uint32_t u,
                              float *row)
{
    if (u >= a->hi[block])
        return own + (((size_t)block * a->block_rows + u - a->hi[block]) * a->kv_heads + kv_head) *
                         a->head_dim;
    const uint32_t page = a->pages[block][u / KN_PAGE_TOKENS];
    CHECK(page < kv->shape.page_count);
    load_row(row,
             cpu_kv_plane(kv, page, a->layer, kind, kv_head) +
                 (size_t)(u % KN_PAGE_TOKENS) * kv->row_bytes,
             a->head_dim, kv->shape.type);
    return row;
}

static void draft_attend(kn_device *device, const kn_kv *kv, const kn_draft_attend *a)
{
    cpu_device *d = cpu_of(device);
    double *p = (double *)d->scores;
    double *sum = (double *)d->threads[0].block_k;
    float *row = d->threads[0].p;
    for (uint32_t r = 0; r < a->blocks * a->block_rows; r++) {
        const uint32_t block = r / a->block_rows;
        const uint32_t hi = a->hi[block];
        uint32_t low = a->lo[block];
        if (a->window && hi + r % a->block_rows + 1 > a->window + low)
            low = hi + r % a->block_rows + 1 - a->window;
        low = low < hi ? low : hi; /* of the context none is left; the own block stays */
        const uint32_t count = hi - low + a->block_rows;
        CHECK(count <= d->score_floats / 2);
        for (uint32_t h = 0; h < a->q_heads; h++) {
            const uint32_t kv_head = h / (a->q_heads / a->kv_heads);
            const size_t at = ((size_t)r * a->q_heads + h) * a->head_dim;
            for (uint32_t i = 0; i < count; i++)
                p[i] = dot(a->q + at,
                           draft_row(kv, a, KN_PLANE_K, a->block_k, block, kv_head, low + i, row),
                           a->head_dim);
            softmax(p, count, a->head_dim);
            memset(sum, 0, a->head_dim * sizeof *sum);
            for (uint32_t i = 0; i < count; i++) {
                const float *v =
                    draft_row(kv, a, KN_PLANE_V, a->block_v, block, kv_head, low + i, row);
                for (uint32_t k = 0; k < a->head_dim; k++)
                    sum[k] += p[i] * v[k];
            }
            for (uint32_t k = 0; k < a->head_dim; k++)
                a->out[at + k] = (float)sum[k];
        }
    }
}

/* ---- MLP and mixture ---- */

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static double swiglu(double g, double u, const kn_act *act)
{
    g = fmin(g, act->limit);
    u = fmin(fmax(u, -act->limit), act->limit);
    return (u + 1.0) * g * sigmoid(act->alpha * g);
}

/* sum[o] += weight * down(act(gate x, up x)) for one row. */
static void expert_row(cpu_device *d, double *sum, double weight, const float *x,
                       const kn_weight *gate, const kn_weight *up, const kn_weight *down,
                       const kn_act *act)
{
    float *decoded = d->threads[0].tile;
    float *h = d->wide;
    CHECK(gate->cols <= d->tile_floats && down->cols <= d->wide_floats);
    for (uint32_t i = 0; i < gate->rows; i++) {
        decode_row(decoded, gate, i);
        const double g = dot(x, decoded, gate->cols) / global_of(gate);
        decode_row(decoded, up, i);
        const double u = dot(x, decoded, up->cols) / global_of(up);
        h[i] = (float)swiglu(g, u, act);
    }
    for (uint32_t o = 0; o < down->rows; o++) {
        decode_row(decoded, down, o);
        sum[o] += weight * (dot(h, decoded, down->cols) / global_of(down));
    }
}

static void mlp(kn_device *device, uint32_t rows, const kn_mlp *a)
{
    cpu_device *d = cpu_of(device);
    double *sum = (double *)d->scores;
    CHECK(a->hidden <= d->width_max && a->hidden <= d->score_floats / 2);
    for (uint32_t r = 0; r < rows; r++) {
        float *x = a->x + (size_t)r * a->hidden;
        norm_row(d->normed, x, a->norm, a->hidden, a->eps);
        memset(sum, 0, a->hidden * sizeof *sum);
        expert_row(d, sum, 1.0, d->normed, a->gate, a->up, a->down, &a->act);
        for (uint32_t k = 0; k < a->hidden; k++)
            x[k] = (float)(x[k] + sum[k]);
    }
}

static void moe_row(cpu_device *d, const kn_moe *a, float *x, int32_t *ids, float *weights)
{
    float *p = d->logits;
    norm_row(d->normed, x, a->norm, a->hidden, a->eps);
    for (uint32_t e = 0; e < a->experts; e++)
        p[e] = (float)sigmoid((float)dot(d->normed, a->router + (size_t)e * a->hidden, a->hidden));

    bool taken[CPU_TOPK_MAX * 64] = {false};
    float total = 0.0f;
    for (uint32_t i = 0; i < a->topk; i++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t e = 0; e < a->experts; e++)
            if (!taken[e] && (best == UINT32_MAX || p[e] + a->bias[e] > p[best] + a->bias[best]))
                best = e;
        taken[best] = true;
    }
    for (uint32_t e = 0, i = 0; e < a->experts; e++)
        if (taken[e]) {
            ids[i++] = (int32_t)e;
            total += p[e];
        }
    for (uint32_t i = 0; i < a->topk; i++)
        weights[i] = p[ids[i]] / total * a->routed_scale;

    double *sum = (double *)d->scores;
    memset(sum, 0, a->hidden * sizeof *sum);
    for (uint32_t i = 0; i < a->topk; i++)
        expert_row(d, sum, weights[i], d->normed, &a->w1[ids[i]], &a->w3[ids[i]], &a->w2[ids[i]],
                   &a->act);
    if (a->shared_inner)
        expert_row(d, sum, 1.0, d->normed, a->shared_gate, a->shared_up, a->shared_down, &a->act);
    for (uint32_t k = 0; k < a->hidden; k++)
        x[k] = (float)(x[k] + sum[k]);
}

static void moe(kn_device *device, uint32_t rows, const kn_moe *a)
{
    cpu_device *d = cpu_of(device);
    CHECK(a->hidden <= d->width_max && a->hidden <= d->score_floats / 2);
    CHECK(a->experts <= d->width_max && a->experts <= CPU_TOPK_MAX * 64);
    CHECK(a->topk >= 1 && a->topk <= CPU_TOPK_MAX && a->topk <= a->experts);
    for (uint32_t r = 0; r < rows; r++)
        moe_row(d, a, a->x + (size_t)r * a->hidden,
                a->route_ids ? a->route_ids + (size_t)r * a->topk : d->route_ids,
                a->route_weights ? a->route_weights + (size_t)r * a->topk : d->route_weights);
}

static void head(kn_device *device, float *logits, const float *x, const float *norm_w,
                 const kn_weight *w, const uint32_t *pick, uint32_t picks, uint32_t hidden,
                 float eps)
{
    cpu_device *d = cpu_of(device);
    CHECK(picks <= d->rows_max && hidden <= d->width_max);
    for (uint32_t i = 0; i < picks; i++)
        norm_row(d->normed + (size_t)i * hidden, x + (size_t)pick[i] * hidden, norm_w, hidden, eps);
    linear_rows(d, logits, d->normed, w, picks, false);
}

const kn_ops kn_cpu_ops_ref = {
    .name = "cpu-ref",
    .embed = embed,
    .norm = norm,
    .head_norm_rope = head_norm_rope,
    .linear = linear,
    .attn_in = attn_in,
    .select = select_blocks,
    .attend = attend,
    .mlp = mlp,
    .moe = moe,
    .head = head,
    .kv_put = kv_put,
    .draft_attend = draft_attend,
};
