/* cpu/mlp: the dense MLP and the mixture of experts.
 *
 * Both are two parallel regions: gate, up and activation by (expert, tile of inner); then down by
 * tiles of hidden. In the second a piece walks the experts upwards and keeps the sum of its outputs
 * for all rows, so that a row's experts are added in ascending id whatever the batch. Rows are
 * grouped by expert; a slot is one (row, expert) pair. */
#include "kernels/cpu/variant.h"

#define ROUTE_ROWS 32 /* rows a piece of routing */

INLINE v16 swiglu(v16 g, v16 u, const kn_act *act)
{
    const v16 limit = v16_set1(act->limit);
    g = v16_min(g, limit);
    u = v16_max(v16_min(u, limit), v16_set1(-act->limit));
    const v16 e = v16_exp(v16_mul(v16_set1(-act->alpha), g));
    const v16 sigmoid = v16_div(v16_set1(1.0f), v16_add(v16_set1(1.0f), e));
    return v16_mul(v16_mul(v16_add(u, v16_set1(1.0f)), g), sigmoid);
}

/* h[r, o] = act(gate(x[r])[o], up(x[r])[o]) for first <= o < last. */
static void gate_up(cpu_device *d, uint32_t thread, float *h, size_t h_stride, const cpu_in *in,
                    uint32_t rows, const kn_weight *gate, const kn_weight *up, uint32_t first,
                    uint32_t last, const kn_act *act)
{
    float *g = d->threads[thread].y0;
    float *u = d->threads[thread].y1;
    const uint32_t outs = last - first;
    cpu_matmul(d, thread, g, outs, in, rows, gate, first, last, false);
    cpu_matmul(d, thread, u, outs, in, rows, up, first, last, false);
    for (uint32_t r = 0; r < rows; r++) {
        float *at = h + r * h_stride + first;
        const size_t from = (size_t)r * outs;
        uint32_t o = 0;
        for (; o + 16 <= outs; o += 16)
            v16_store(at + o, swiglu(v16_load(g + from + o), v16_load(u + from + o), act));
        if (o < outs)
            v16_store_part(at + o, outs - o,
                           swiglu(v16_load_part(g + from + o, outs - o),
                                  v16_load_part(u + from + o, outs - o), act));
    }
}

/* Outputs that y0, y1, y2 hold for so many rows. */
static uint32_t outs_max(const cpu_device *d, uint32_t rows)
{
    return (uint32_t)((uint64_t)CPU_TILE_OUTS * d->rows_max / (rows ? rows : 1));
}

/* ---- dense ---- */

typedef struct mlp_job {
    cpu_device *d;
    const kn_mlp *a;
    float *x; /* first row of this pass */
    cpu_in in, activations;
    uint32_t rows, outs;
} mlp_job;

static void mlp_gate_up(void *ctx, uint32_t piece, uint32_t thread)
{
    const mlp_job *job = ctx;
    const kn_mlp *a = job->a;
    const uint32_t first = piece * job->outs;
    gate_up(job->d, thread, job->d->wide, a->inner, &job->in, job->rows, a->gate, a->up, first,
            min_u32(first + job->outs, a->inner), &a->act);
}

static void mlp_down(void *ctx, uint32_t piece, uint32_t thread)
{
    const mlp_job *job = ctx;
    const kn_mlp *a = job->a;
    const uint32_t first = piece * job->outs;
    cpu_matmul(job->d, thread, job->x + first, a->hidden, &job->activations, job->rows, a->down,
               first, min_u32(first + job->outs, a->hidden), true);
}

void cpu_mlp(kn_device *device, uint32_t rows, const kn_mlp *a)
{
    cpu_device *d = cpu_of(device);
    CHECK(rows <= d->rows_max && a->hidden <= d->width_max && a->inner <= d->width_max);
    mlp_job job = {.d = d,
                   .a = a,
                   .x = a->x,
                   .in = {.x = d->normed, .stride = a->hidden},
                   .activations = {.x = d->wide, .stride = a->inner},
                   .rows = rows};
    cpu_norm_rows(d, d->normed, a->x, a->norm, NULL, rows, a->hidden, a->eps);
    if (a->gate->type == KN_NVFP4 || a->up->type == KN_NVFP4)
        cpu_quantize(d, &job.in, 0, rows, a->hidden);
    job.outs = cpu_piece_outs(d, rows, a->hidden, a->inner, outs_max(d, rows));
    kn_pool_run(d->base.pool, mlp_gate_up, &job, ceil_div(a->inner, job.outs));
    if (a->down->type == KN_NVFP4)
        cpu_quantize(d, &job.activations, 1, rows, a->inner);
    job.outs = cpu_piece_outs(d, rows, a->inner, a->hidden, UINT32_MAX);
    kn_pool_run(d->base.pool, mlp_down, &job, ceil_div(a->hidden, job.outs));
}

/* ---- mixture ---- */

typedef struct moe_job {
    cpu_device *d;
    const kn_moe *a;
    float *x;       /* first row of this pass */
    uint32_t rows;  /* of this pass */
    int32_t *ids;   /* [rows, topk] */
    float *weights; /* [rows, topk] */
    float *shared;  /* [rows, shared_inner] within d->wide, behind the slots */
    cpu_in in, activations, shared_activations;
    uint32_t outs;
} moe_job;

/* The topk experts of one row by p + bias (ties: lower id), then in ascending id with their
 * weights. p has the logits. */
static void route_row(const kn_moe *a, float *p, int32_t *ids, float *weights)
{
    for (uint32_t e = 0; e < a->experts; e++)
        p[e] = 1.0f / (1.0f + kn_exp(-p[e]));
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->topk; i++) {
        int32_t best = -1;
        float best_score = 0.0f;
        for (uint32_t e = 0, c = 0; e < a->experts; e++) {
            if (c < count && ids[c] == (int32_t)e) {
                c++;
                continue;
            }
            const float score = p[e] + a->bias[e];
            if (best < 0 || score > best_score) {
                best = (int32_t)e;
                best_score = score;
            }
        }
        uint32_t at = count++;
        for (; at > 0 && ids[at - 1] > best; at--)
            ids[at] = ids[at - 1];
        ids[at] = best;
    }
    float total = 0.0f;
    for (uint32_t i = 0; i < a->topk; i++)
        total += p[ids[i]];
    for (uint32_t i = 0; i < a->topk; i++)
        weights[i] = p[ids[i]] / total * a->routed_scale;
}

static void moe_route(void *ctx, uint32_t piece, uint32_t thread)
{
    const moe_job *job = ctx;
    const kn_moe *a = job->a;
    const uint32_t last = min_u32(job->rows, (piece + 1) * ROUTE_ROWS);
    for (uint32_t r = piece * ROUTE_ROWS; r < last; r++)
        route_row(a, job->d->logits + (size_t)r * a->experts, job->ids + (size_t)r * a->topk,
                  job->weights + (size_t)r * a->topk);
}

/* Counting sort of the (row, expert) pairs by expert; rows stay ascending within one. */
static void group_slots(moe_job *job)
{
    cpu_device *d = job->d;
    const uint32_t experts = job->a->experts;
    const uint32_t pairs = job->rows * job->a->topk;
    uint32_t *first = d->expert_first;
    memset(first, 0, (experts + 1) * sizeof *first);
    for (uint32_t i = 0; i < pairs; i++)
        first[job->ids[i] + 1]++;
    for (uint32_t e = 0; e < experts; e++)
        first[e + 1] += first[e];
    for (uint32_t i = 0; i < pairs; i++) {
        const uint32_t slot = first[job->ids[i]]++;
        d->slot_rows[slot] = i / job->a->topk;
        d->slot_weights[slot] = job->weights[i];
    }
    for (uint32_t e = experts; e > 0; e--)
        first[e] = first[e - 1];
    first[0] = 0;
}

static uint32_t expert_outs(const moe_job *job, uint32_t rows, uint32_t inner)
{
    return cpu_piece_outs(job->d, rows, job->a->hidden, inner, outs_max(job->d, rows));
}

/* piece_first[e] for the experts, [experts] for the shared one, [experts + 1] the count. */
static uint32_t count_pieces(const moe_job *job)
{
    cpu_device *d = job->d;
    const kn_moe *a = job->a;
    uint32_t pieces = 0;
    for (uint32_t e = 0; e < a->experts; e++) {
        const uint32_t rows = d->expert_first[e + 1] - d->expert_first[e];
        d->piece_first[e] = pieces;
        if (rows)
            pieces += ceil_div(a->inner, expert_outs(job, rows, a->inner));
    }
    d->piece_first[a->experts] = pieces;
    if (a->shared_inner)
        pieces += ceil_div(a->shared_inner, expert_outs(job, job->rows, a->shared_inner));
    return d->piece_first[a->experts + 1] = pieces;
}

static void moe_gate_up(void *ctx, uint32_t piece, uint32_t thread)
{
    const moe_job *job = ctx;
    const kn_moe *a = job->a;
    cpu_device *d = job->d;
    uint32_t e = 0;
    while (d->piece_first[e + 1] <= piece)
        e++;
    const uint32_t tile = piece - d->piece_first[e];
    if (e == a->experts) {
        const uint32_t outs = expert_outs(job, job->rows, a->shared_inner);
        gate_up(d, thread, job->shared, a->shared_inner, &job->in, job->rows, a->shared_gate,
                a->shared_up, tile * outs, min_u32((tile + 1) * outs, a->shared_inner), &a->act);
        return;
    }
    const uint32_t slot = d->expert_first[e];
    const uint32_t rows = d->expert_first[e + 1] - slot;
    const uint32_t outs = expert_outs(job, rows, a->inner);
    cpu_in in = job->in;
    in.index = d->slot_rows + slot;
    gate_up(d, thread, d->wide + (size_t)slot * a->inner, a->inner, &in, rows, &a->w1[e], &a->w3[e],
            tile * outs, min_u32((tile + 1) * outs, a->inner), &a->act);
}

/* sum[row of i] = fma(weight of i, y[i], sum[row of i]) for `rows` slots. */
static void add_weighted(float *sum, const float *y, const uint32_t *slot_rows,
                         const float *weights, uint32_t rows, uint32_t outs)
{
    for (uint32_t i = 0; i < rows; i++) {
        float *at = sum + (size_t)slot_rows[i] * outs;
        const float *from = y + (size_t)i * outs;
        const v16 w = v16_set1(weights[i]);
        uint32_t o = 0;
        for (; o + 16 <= outs; o += 16)
            v16_store(at + o, v16_fma(w, v16_load(from + o), v16_load(at + o)));
        if (o < outs)
            v16_store_part(
                at + o, outs - o,
                v16_fma(w, v16_load_part(from + o, outs - o), v16_load_part(at + o, outs - o)));
    }
}

/* The same rows without the first `skip`. */
static cpu_in rows_from(const cpu_in *in, uint32_t skip)
{
    cpu_in from = *in;
    from.x += skip * in->stride;
    if (in->q)
        from.q += skip * in->q_stride;
    return from;
}

static void moe_down(void *ctx, uint32_t piece, uint32_t thread)
{
    const moe_job *job = ctx;
    const kn_moe *a = job->a;
    cpu_device *d = job->d;
    const cpu_thread *t = &d->threads[thread];
    const uint32_t first = piece * job->outs;
    const uint32_t last = min_u32(first + job->outs, a->hidden);
    const uint32_t outs = last - first;
    float *sum = t->y2;
    memset(sum, 0, (size_t)job->rows * outs * sizeof *sum);
    for (uint32_t e = 0; e < a->experts; e++) {
        const uint32_t slot = d->expert_first[e];
        const uint32_t rows = d->expert_first[e + 1] - slot;
        if (!rows)
            continue;
        const cpu_in in = rows_from(&job->activations, slot);
        cpu_matmul(d, thread, t->y0, outs, &in, rows, &a->w2[e], first, last, false);
        add_weighted(sum, t->y0, d->slot_rows + slot, d->slot_weights + slot, rows, outs);
    }
    if (a->shared_inner)
        cpu_matmul(d, thread, sum, outs, &job->shared_activations, job->rows, a->shared_down, first,
                   last, true);
    for (uint32_t r = 0; r < job->rows; r++) {
        float *x = job->x + (size_t)r * a->hidden + first;
        for (uint32_t o = 0; o < outs; o++)
            x[o] += sum[(size_t)r * outs + o];
    }
}

static bool is_nvfp4(const kn_weight *w)
{
    return w && w->type == KN_NVFP4;
}

static void moe_pass(moe_job *job)
{
    cpu_device *d = job->d;
    const kn_moe *a = job->a;
    const kn_weight router = {.type = KN_F32,
                              .rows = a->experts,
                              .cols = a->hidden,
                              .data = a->router,
                              .scale_global = 1.0f};
    cpu_norm_rows(d, d->normed, job->x, a->norm, NULL, job->rows, a->hidden, a->eps);
    cpu_linear(&d->base, d->logits, d->normed, &router, job->rows, false);
    kn_pool_run(d->base.pool, moe_route, job, ceil_div(job->rows, ROUTE_ROWS));
    group_slots(job);
    const uint32_t slots = job->rows * a->topk;
    job->shared = d->wide + (size_t)slots * a->inner;
    job->in = (cpu_in){.x = d->normed, .stride = a->hidden};
    job->activations = (cpu_in){.x = d->wide, .stride = a->inner};
    job->shared_activations = (cpu_in){.x = job->shared, .stride = a->shared_inner};
    if (is_nvfp4(a->w1) || is_nvfp4(a->w3) || is_nvfp4(a->shared_gate) || is_nvfp4(a->shared_up))
        cpu_quantize(d, &job->in, 0, job->rows, a->hidden);
    kn_pool_run(d->base.pool, moe_gate_up, job, count_pieces(job));
    if (is_nvfp4(a->w2))
        cpu_quantize(d, &job->activations, 1, slots, a->inner);
    if (is_nvfp4(a->shared_down)) /* the inputs are not needed any more */
        cpu_quantize(d, &job->shared_activations, 0, job->rows, a->shared_inner);
    job->outs = cpu_piece_outs(d, job->rows, a->inner * a->topk + a->shared_inner, a->hidden,
                               outs_max(d, job->rows));
    kn_pool_run(d->base.pool, moe_down, job, ceil_div(a->hidden, job->outs));
}

void cpu_moe(kn_device *device, uint32_t rows, const kn_moe *a)
{
    cpu_device *d = cpu_of(device);
    CHECK(rows <= d->rows_max && a->hidden <= d->width_max && a->experts <= d->width_max);
    CHECK(a->topk >= 1 && a->topk <= CPU_TOPK_MAX && a->topk <= a->experts);
    const size_t row_floats = (size_t)a->topk * a->inner + a->shared_inner;
    CHECK(row_floats <= d->wide_floats);
    const size_t row_bytes = a->topk * cpu_quant_row(a->inner);
    CHECK(row_bytes <= d->quant_bytes[1]);
    const uint32_t pass =
        min_u32((uint32_t)(d->wide_floats / row_floats), (uint32_t)(d->quant_bytes[1] / row_bytes));
    for (uint32_t r = 0; r < rows; r += pass) {
        moe_job job = {
            .d = d, .a = a, .x = a->x + (size_t)r * a->hidden, .rows = min_u32(pass, rows - r)};
        job.ids = a->route_ids ? a->route_ids + (size_t)r * a->topk : d->route_ids;
        job.weights = a->route_weights ? a->route_weights + (size_t)r * a->topk : d->route_weights;
        moe_pass(&job);
    }
}
