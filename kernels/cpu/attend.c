/* cpu/attend: MSA selection, attention over pages, and the draft block's window attention.
 *
 * Rows of one sequence form groups of up to CPU_GROUP_ROWS. A piece of work is a group x a kv head
 * (attention) or a group x a range of blocks (selection); it decodes a block of keys once,
 * transposed to [dim][128 positions], and all rows of the group that want the block use it. With
 * sixteen positions in the lanes, the sixteen partial sums of the written dot product are sixteen
 * registers and its tree is fifteen plain additions.
 *
 * A row's running maximum, sum and output wait in scratch and in `out` between blocks, which come
 * in ascending number for every row: the order of ops.h. */
#include "kernels/cpu/variant.h"

#define SELECT_BLOCKS 16 /* blocks a piece of selection */

#ifdef KN_VARIANT_AVX512
#define SCORE_HEADS 2
#define SCORE_LANES 2
#define VALUE_HEADS 4
#define VALUE_LANES 4
#define STRAIGHT_HEADS 4
#define STRAIGHT_KEYS 4
#else
#define SCORE_HEADS 1
#define SCORE_LANES 1
#define VALUE_HEADS 2
#define VALUE_LANES 2
#define STRAIGHT_HEADS 2
#define STRAIGHT_KEYS 2
#endif

/* ---- reading pages ---- */

/* Dims [i, i + 16) of a stored row. type is a constant of the caller. */
INLINE v16 row_lanes(const kn_kv_type type, const uint8_t *row, uint32_t dims, uint32_t i)
{
    switch (type) {
    case KN_KV_NVFP4:
        return v16_pick(i16_nibbles(row + i / 2), kn_cpu_nvfp4_table[row[dims / 2 + i / 16]]);
    case KN_KV_FP8:
        return v16_mul(v16_e4m3_256th(_mm_loadu_si128((const __m128i *)(row + i))),
                       v16_set1(256.0f));
    case KN_KV_BF16:
        return v16_bf16((const uint16_t *)row + i);
    default:
        return v16_load((const float *)row + i);
    }
}

INLINE void keys_of_type(const kn_kv_type type, float *keys, const uint8_t *plane,
                         uint32_t row_bytes, uint32_t dims, uint32_t count)
{
    for (uint32_t t = 0; t < count; t += 16)
        for (uint32_t i = 0; i < dims; i += 16) {
            v16 r[16];
            UNROLL for (uint32_t j = 0; j < 16; j++) r[j] =
                row_lanes(type, plane + (size_t)(t + j) * row_bytes, dims, i);
            v16_transpose(r);
            UNROLL for (uint32_t j = 0; j < 16; j++)
                v16_store(keys + (size_t)(i + j) * KN_BLOCK_TOKENS + t, r[j]);
        }
}

INLINE void values_of_type(const kn_kv_type type, float *values, const uint8_t *plane,
                           uint32_t row_bytes, uint32_t dims, uint32_t count)
{
    for (uint32_t t = 0; t < count; t++)
        for (uint32_t i = 0; i < dims; i += 16)
            v16_store(values + (size_t)t * dims + i,
                      row_lanes(type, plane + (size_t)t * row_bytes, dims, i));
}

/* keys[dim][position] of the first `count` rows, rounded up to 16: what a page holds past them is
 * read and never used. */
static void read_keys(kn_kv_type type, float *keys, const uint8_t *plane, uint32_t row_bytes,
                      uint32_t dims, uint32_t count)
{
    switch (type) {
    case KN_KV_NVFP4:
        keys_of_type(KN_KV_NVFP4, keys, plane, row_bytes, dims, count);
        break;
    case KN_KV_FP8:
        keys_of_type(KN_KV_FP8, keys, plane, row_bytes, dims, count);
        break;
    case KN_KV_BF16:
        keys_of_type(KN_KV_BF16, keys, plane, row_bytes, dims, count);
        break;
    case KN_KV_F32:
        keys_of_type(KN_KV_F32, keys, plane, row_bytes, dims, count);
        break;
    }
}

/* values[position][dim]. */
static void read_values(kn_kv_type type, float *values, const uint8_t *plane, uint32_t row_bytes,
                        uint32_t dims, uint32_t count)
{
    switch (type) {
    case KN_KV_NVFP4:
        values_of_type(KN_KV_NVFP4, values, plane, row_bytes, dims, count);
        break;
    case KN_KV_FP8:
        values_of_type(KN_KV_FP8, values, plane, row_bytes, dims, count);
        break;
    case KN_KV_BF16:
        values_of_type(KN_KV_BF16, values, plane, row_bytes, dims, count);
        break;
    case KN_KV_F32:
        values_of_type(KN_KV_F32, values, plane, row_bytes, dims, count);
        break;
    }
}

/* ---- scores ---- */

/* dot[h][t] of HEADS queries with LANES x 16 positions from `keys` on. Partial sums j and j + 8 are
 * formed together and joined at once; j runs 0 4 2 6 1 5 3 7, so that each further level of the
 * tree joins what was made last. */
INLINE void dot_lanes(const int HEADS, const int LANES, v16 *dot, const float *const *q,
                      const float *keys, uint32_t dims)
{
    v16 level[3][4];
    UNROLL for (int step = 0; step < 8; step++)
    {
        const int j = (step & 1) << 2 | (step & 2) | step >> 2;
        v16 lo[4], hi[4];
        UNROLL for (int i = 0; i < HEADS * LANES; i++) lo[i] = hi[i] = v16_zero();
        for (uint32_t k = (uint32_t)j; k < dims; k += 16) {
            v16 a[2], b[2];
            UNROLL for (int l = 0; l < LANES; l++)
            {
                a[l] = v16_load(keys + (size_t)k * KN_BLOCK_TOKENS + l * 16);
                b[l] = v16_load(keys + (size_t)(k + 8) * KN_BLOCK_TOKENS + l * 16);
            }
            UNROLL for (int h = 0; h < HEADS; h++)
            {
                const v16 qa = v16_set1(q[h][k]);
                const v16 qb = v16_set1(q[h][k + 8]);
                UNROLL for (int l = 0; l < LANES; l++)
                {
                    lo[h * LANES + l] = v16_fma(qa, a[l], lo[h * LANES + l]);
                    hi[h * LANES + l] = v16_fma(qb, b[l], hi[h * LANES + l]);
                }
            }
        }
        UNROLL for (int i = 0; i < HEADS * LANES; i++)
        {
            v16 sum = v16_add(lo[i], hi[i]);
            if (step & 1) {
                sum = v16_add(level[0][i], sum);
                if (step & 2) {
                    sum = v16_add(level[1][i], sum);
                    if (step & 4)
                        dot[i] = v16_add(level[2][i], sum);
                    else
                        level[2][i] = sum;
                } else {
                    level[1][i] = sum;
                }
            } else {
                level[0][i] = sum;
            }
        }
    }
}

INLINE void score_heads(const int HEADS, float *s, const float *const *q, const float *keys,
                        uint32_t dims, uint32_t groups)
{
    uint32_t g = 0;
    for (; g + SCORE_LANES <= groups; g += SCORE_LANES) {
        v16 dot[4];
        dot_lanes(HEADS, SCORE_LANES, dot, q, keys + g * 16, dims);
        UNROLL for (int h = 0; h < HEADS; h++) UNROLL for (uint32_t l = 0; l < SCORE_LANES; l++)
            v16_store(s + (size_t)h * KN_BLOCK_TOKENS + (g + l) * 16,
                      dot[(uint32_t)h * SCORE_LANES + l]);
    }
    for (; g < groups; g++) {
        v16 dot[4];
        dot_lanes(HEADS, 1, dot, q, keys + g * 16, dims);
        UNROLL for (int h = 0; h < HEADS; h++)
            v16_store(s + (size_t)h * KN_BLOCK_TOKENS + g * 16, dot[h]);
    }
}

/* The same from a plane as it stands, for so few queries that a transposed copy does not pay: lanes
 * run over the dims, and sum16 is taken for several keys at once. s[h][t] for first <= t < count
 * rounded up to STRAIGHT_KEYS. */
INLINE void straight_of_type(const kn_kv_type type, const int HEADS, float *s, const float *q,
                             const uint8_t *plane, uint32_t row_bytes, uint32_t dims,
                             uint32_t first, uint32_t count)
{
    for (uint32_t t = first; t < count; t += STRAIGHT_KEYS) {
        const uint8_t *row = plane + (size_t)t * row_bytes;
        v16 acc[16];
        UNROLL for (int i = 0; i < HEADS * STRAIGHT_KEYS; i++) acc[i] = v16_zero();
        for (uint32_t i = 0; i < dims; i += 16) {
            v16 key[STRAIGHT_KEYS];
            UNROLL for (uint32_t k = 0; k < STRAIGHT_KEYS; k++) key[k] =
                row_lanes(type, row + (size_t)k * row_bytes, dims, i);
            UNROLL for (int h = 0; h < HEADS; h++)
            {
                const v16 a = v16_load(q + (size_t)h * dims + i);
                UNROLL for (int k = 0; k < STRAIGHT_KEYS; k++) acc[h * STRAIGHT_KEYS + k] =
                    v16_fma(a, key[k], acc[h * STRAIGHT_KEYS + k]);
            }
        }
        float sum[16];
        const int count_acc = HEADS * STRAIGHT_KEYS;
        UNROLL for (int i = 0; i < count_acc; i += 4)
        {
            const int top = count_acc - 1;
            _mm_storeu_ps(sum + i, v16_sum4(acc[i], acc[i + 1], acc[i + 2 < top ? i + 2 : top],
                                            acc[i + 3 < top ? i + 3 : top]));
        }
        UNROLL for (int h = 0; h < HEADS; h++)
            memcpy(s + (size_t)h * KN_BLOCK_TOKENS + t, sum + h * STRAIGHT_KEYS,
                   STRAIGHT_KEYS * sizeof *s);
    }
}

INLINE void straight_heads(const kn_kv_type type, float *s, const float *q, uint32_t heads,
                           const uint8_t *plane, uint32_t row_bytes, uint32_t dims, uint32_t first,
                           uint32_t count)
{
    uint32_t h = 0;
    for (; h + STRAIGHT_HEADS <= heads; h += STRAIGHT_HEADS)
        straight_of_type(type, STRAIGHT_HEADS, s + (size_t)h * KN_BLOCK_TOKENS,
                         q + (size_t)h * dims, plane, row_bytes, dims, first, count);
    for (; h + 2 <= heads; h += 2)
        straight_of_type(type, 2, s + (size_t)h * KN_BLOCK_TOKENS, q + (size_t)h * dims, plane,
                         row_bytes, dims, first, count);
    for (; h < heads; h++)
        straight_of_type(type, 1, s + (size_t)h * KN_BLOCK_TOKENS, q + (size_t)h * dims, plane,
                         row_bytes, dims, first, count);
}

/* Keys of one block: a plane, and its transposed copy if there is one. */
typedef struct key_block {
    kn_kv_type type;
    const uint8_t *plane;
    uint32_t row_bytes, dims;
    const float *transposed; /* NULL: read straight from the plane */
} key_block;

/* `queries` heads of all rows will use the block: decides whether a transposed copy, made into
 * `scratch`, pays. */
static key_block open_keys(kn_kv_type type, const uint8_t *plane, uint32_t row_bytes, uint32_t dims,
                           uint32_t count, uint32_t queries, float *scratch)
{
    key_block k = {.type = type, .plane = plane, .row_bytes = row_bytes, .dims = dims};
    if (queries > 2 * STRAIGHT_HEADS) {
        read_keys(type, scratch, plane, row_bytes, dims, count);
        k.transposed = scratch;
    }
    return k;
}

/* s[h][t] = dot(q[h], key t) for first <= t < count, and some garbage up to the next multiple of
 * 16; first is a multiple of 16. q rows `dims` apart, s rows KN_BLOCK_TOKENS apart. */
static void scores(float *s, const float *q, uint32_t heads, const key_block *k, uint32_t first,
                   uint32_t count)
{
    const uint32_t dims = k->dims;
    if (!k->transposed) {
        switch (k->type) {
        case KN_KV_NVFP4:
            straight_heads(KN_KV_NVFP4, s, q, heads, k->plane, k->row_bytes, dims, first, count);
            break;
        case KN_KV_FP8:
            straight_heads(KN_KV_FP8, s, q, heads, k->plane, k->row_bytes, dims, first, count);
            break;
        case KN_KV_BF16:
            straight_heads(KN_KV_BF16, s, q, heads, k->plane, k->row_bytes, dims, first, count);
            break;
        case KN_KV_F32:
            straight_heads(KN_KV_F32, s, q, heads, k->plane, k->row_bytes, dims, first, count);
            break;
        }
        return;
    }
    const uint32_t groups = ceil_div(count - first, 16);
    const float *keys = k->transposed + first;
    s += first;
    uint32_t h = 0;
    for (; h + SCORE_HEADS <= heads; h += SCORE_HEADS) {
        const float *at[2] = {q + (size_t)h * dims, q + (size_t)(h + SCORE_HEADS - 1) * dims};
        score_heads(SCORE_HEADS, s + (size_t)h * KN_BLOCK_TOKENS, at, keys, dims, groups);
    }
    for (; h < heads; h++) {
        const float *at[1] = {q + (size_t)h * dims};
        score_heads(1, s + (size_t)h * KN_BLOCK_TOKENS, at, keys, dims, groups);
    }
}

/* ---- one block of one row ---- */

/* o[h][i] = fma chain over begin <= t < count from o[h][i] * c[h], for HEADS heads and LANES x 16
 * dims. */
INLINE void value_lanes(const int HEADS, const int LANES, float *o, const float *c, const float *p,
                        const float *values, uint32_t dims, uint32_t begin, uint32_t count)
{
    v16 acc[16];
    UNROLL for (int h = 0; h < HEADS; h++) UNROLL for (int l = 0; l < LANES; l++)
        acc[h * LANES + l] = v16_mul(v16_load(o + (size_t)h * dims + l * 16), v16_set1(c[h]));
    for (uint32_t t = begin; t < count; t++) {
        v16 v[4];
        UNROLL for (int l = 0; l < LANES; l++) v[l] = v16_load(values + (size_t)t * dims + l * 16);
        UNROLL for (int h = 0; h < HEADS; h++)
        {
            const v16 w = v16_set1(p[h * KN_BLOCK_TOKENS + t]);
            UNROLL for (int l = 0; l < LANES; l++) acc[h * LANES + l] =
                v16_fma(w, v[l], acc[h * LANES + l]);
        }
    }
    UNROLL for (int h = 0; h < HEADS; h++) UNROLL for (int l = 0; l < LANES; l++)
        v16_store(o + (size_t)h * dims + l * 16, acc[h * LANES + l]);
}

INLINE void value_heads(const int HEADS, float *o, const float *c, const float *p,
                        const float *values, uint32_t dims, uint32_t begin, uint32_t count)
{
    uint32_t i = 0;
    for (; i + VALUE_LANES * 16 <= dims; i += VALUE_LANES * 16)
        value_lanes(HEADS, VALUE_LANES, o + i, c, p, values + i, dims, begin, count);
    for (; i < dims; i += 16)
        value_lanes(HEADS, 1, o + i, c, p, values + i, dims, begin, count);
}

/* One block for `heads` query heads of a row, which sees its positions begin <= t < count: m, l
 * [heads] and o [heads, dims] are the running state. */
static void attend_block(float *p, float *m, float *l, float *o, const float *q, uint32_t heads,
                         const key_block *keys, const float *values, uint32_t begin, uint32_t count,
                         float scale)
{
    float c[CPU_GROUP_HEADS_MAX];
    const uint32_t dims = keys->dims;
    const uint32_t base = begin & ~15u; /* whole groups of masked positions are left out */
    const v16 none = v16_set1(-INFINITY);
    scores(p, q, heads, keys, base, count);
    for (uint32_t h = 0; h < heads; h++) {
        float *s = p + (size_t)h * KN_BLOCK_TOKENS;
        v16 top = none;
        for (uint32_t t = base; t < count; t += 16) {
            v16 a = v16_mul(v16_set1(scale), v16_load(s + t));
            if (count - t < 16)
                a = v16_first(a, none, count - t);
            if (t < begin)
                a = v16_first(none, a, begin - t);
            v16_store(s + t, a);
            top = v16_max(a, top);
        }
        const float max = v16_hmax(top);
        const float next = max > m[h] ? max : m[h];
        v16 sum = v16_zero();
        for (uint32_t t = base; t < count; t += 16) {
            /* exp(-inf) is 0 where positions are masked. */
            const v16 e = v16_exp(v16_sub(v16_load(s + t), v16_set1(next)));
            v16_store(s + t, e);
            sum = v16_add(sum, e);
        }
        c[h] = kn_exp(m[h] - next);
        m[h] = next;
        l[h] = fmaf(l[h], c[h], v16_sum(sum));
    }
    uint32_t h = 0;
    for (; h + VALUE_HEADS <= heads; h += VALUE_HEADS)
        value_heads(VALUE_HEADS, o + (size_t)h * dims, c + h, p + (size_t)h * KN_BLOCK_TOKENS,
                    values, dims, begin, count);
    for (; h < heads; h++)
        value_heads(1, o + (size_t)h * dims, c + h, p + (size_t)h * KN_BLOCK_TOKENS, values, dims,
                    begin, count);
}

static void start_state(float *m, float *l, float *o, uint32_t heads, uint32_t dims)
{
    for (uint32_t h = 0; h < heads; h++) {
        m[h] = -INFINITY;
        l[h] = 0.0f;
    }
    memset(o, 0, (size_t)heads * dims * sizeof *o);
}

static void end_state(const float *l, float *o, uint32_t heads, uint32_t dims)
{
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t i = 0; i < dims; i += 16) {
            float *at = o + (size_t)h * dims + i;
            v16_store(at, v16_div(v16_load(at), v16_set1(l[h])));
        }
}

/* ---- groups of rows ---- */

/* d->groups[i] = first row of group i, and the end behind the last. Returns the count. */
static uint32_t form_groups(cpu_device *d, const kn_rows *rows, uint32_t first, uint32_t last)
{
    uint32_t groups = 0;
    for (uint32_t r = first; r < last; r++) {
        CHECK(rows->pos[r] >= 0 && (uint32_t)rows->pos[r] < d->context_max);
        if (r == first || rows->seq[r] != rows->seq[r - 1] ||
            r - d->groups[groups - 1] == CPU_GROUP_ROWS)
            d->groups[groups++] = r;
    }
    d->groups[groups] = last;
    return groups;
}

/* Positions of block `b` that a row sees. */
static uint32_t visible(const kn_rows *rows, uint32_t r, int32_t b)
{
    return min_u32((uint32_t)(rows->pos[r] - b * KN_BLOCK_TOKENS) + 1, KN_BLOCK_TOKENS);
}

static const uint8_t *block_plane(const kn_kv *kv, const kn_rows *rows, uint32_t seq, int32_t b,
                                  uint32_t layer, kn_plane_kind kind, uint32_t head)
{
    const uint32_t page = rows->pages[seq][b];
    CHECK(page < kv->shape.page_count);
    return cpu_kv_plane(kv, page, layer, kind, head);
}

/* Asks for the first `rows` rows of a plane: a plane is too short for the hardware to see a stream
 * in it. */
static void prefetch_plane(const uint8_t *plane, uint32_t row_bytes, uint32_t rows)
{
    for (size_t i = 0; i < (size_t)rows * row_bytes; i += 64)
        __builtin_prefetch(plane + i, 0, 2);
}

/* ---- attention ---- */

typedef struct attend_job {
    cpu_device *d;
    kn_kv *kv;
    const kn_rows *rows;
    const kn_attend *a;
    float scale;
} attend_job;

static const int32_t *chosen_of(const kn_attend *a, uint32_t r, uint32_t kv_head)
{
    return a->blocks + ((size_t)r * a->kv_heads + kv_head) * a->topk;
}

/* The row's first block from the cursor on, or INT32_MAX. */
static int32_t next_block(const attend_job *job, uint32_t r, uint32_t kv_head, uint32_t cursor)
{
    const int32_t own = job->rows->pos[r] / KN_BLOCK_TOKENS;
    if (!job->a->blocks)
        return (int32_t)cursor <= own ? (int32_t)cursor : INT32_MAX;
    if (cursor == job->a->topk)
        return INT32_MAX;
    const int32_t b = chosen_of(job->a, r, kv_head)[cursor];
    CHECK(b <= own);
    return b < 0 ? INT32_MAX : b;
}

static void attend_piece(void *ctx, uint32_t piece, uint32_t thread)
{
    const attend_job *job = ctx;
    const kn_attend *a = job->a;
    const cpu_thread *t = &job->d->threads[thread];
    const uint32_t group = piece / a->kv_heads;
    const uint32_t kv_head = piece % a->kv_heads;
    const uint32_t heads = a->q_heads / a->kv_heads;
    const uint32_t dims = a->head_dim;
    const uint32_t first = job->d->groups[group];
    const uint32_t rows = job->d->groups[group + 1] - first;
    const uint32_t seq = job->rows->seq[first];
    uint32_t cursor[CPU_GROUP_ROWS] = {0};
    int32_t block[CPU_GROUP_ROWS];

    for (uint32_t i = 0; i < rows; i++) {
        const size_t at = ((size_t)(first + i) * a->q_heads + kv_head * heads) * dims;
        start_state(t->m + i * heads, t->l + i * heads, a->out + at, heads, dims);
        block[i] = next_block(job, first + i, kv_head, 0);
    }
    for (;;) {
        int32_t b = INT32_MAX;
        for (uint32_t i = 0; i < rows; i++)
            b = block[i] < b ? block[i] : b;
        if (b == INT32_MAX)
            break;
        uint32_t count = 0;
        uint32_t users = 0;
        for (uint32_t i = 0; i < rows; i++)
            if (block[i] == b) {
                const uint32_t sees = visible(job->rows, first + i, b);
                count = sees > count ? sees : count;
                users++;
            }
        const uint8_t *v_plane =
            block_plane(job->kv, job->rows, seq, b, a->layer, KN_PLANE_V, kv_head);
        prefetch_plane(v_plane, job->kv->row_bytes, count);
        const key_block keys =
            open_keys(job->kv->shape.type,
                      block_plane(job->kv, job->rows, seq, b, a->layer, KN_PLANE_K, kv_head),
                      job->kv->row_bytes, dims, count, users * heads, t->block_k);
        read_values(job->kv->shape.type, t->block_v, v_plane, job->kv->row_bytes, dims, count);
        for (uint32_t i = 0; i < rows; i++) {
            if (block[i] != b)
                continue;
            const size_t at = ((size_t)(first + i) * a->q_heads + kv_head * heads) * dims;
            attend_block(t->p, t->m + i * heads, t->l + i * heads, a->out + at, a->q + at, heads,
                         &keys, t->block_v, 0, visible(job->rows, first + i, b), job->scale);
            block[i] = next_block(job, first + i, kv_head, ++cursor[i]);
        }
    }
    for (uint32_t i = 0; i < rows; i++)
        end_state(t->l + i * heads,
                  a->out + ((size_t)(first + i) * a->q_heads + kv_head * heads) * dims, heads,
                  dims);
}

void cpu_attend(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attend *a)
{
    cpu_device *d = cpu_of(device);
    CHECK(rows->rows <= d->rows_max && a->layer < kv->shape.layers);
    CHECK(a->kv_heads == kv->shape.kv_heads && a->head_dim == kv->shape.head_dim);
    CHECK(a->q_heads % a->kv_heads == 0 && a->q_heads / a->kv_heads <= CPU_GROUP_HEADS_MAX);
    attend_job job = {
        .d = d, .kv = kv, .rows = rows, .a = a, .scale = 1.0f / sqrtf((float)a->head_dim)};
    kn_pool_run(d->base.pool, attend_piece, &job,
                form_groups(d, rows, 0, rows->rows) * a->kv_heads);
}

/* ---- selection ---- */

typedef struct select_job {
    cpu_device *d;
    kn_kv *kv;
    const kn_rows *rows;
    const kn_select *a;
    uint32_t first, last; /* rows of this pass */
    uint32_t blocks;      /* of its longest row: the stride of scores */
    uint32_t ranges;      /* of SELECT_BLOCKS */
} select_job;

/* scores[row - first][head][b] for the blocks of a range. */
static void score_piece(void *ctx, uint32_t piece, uint32_t thread)
{
    const select_job *job = ctx;
    const kn_select *a = job->a;
    const cpu_thread *t = &job->d->threads[thread];
    const uint32_t group = piece / job->ranges;
    const uint32_t first = job->d->groups[group];
    const uint32_t last = job->d->groups[group + 1];
    const uint32_t seq = job->rows->seq[first];
    const int32_t begin = (int32_t)(piece % job->ranges * SELECT_BLOCKS);
    int32_t end = job->rows->pos[last - 1] / KN_BLOCK_TOKENS + 1;
    end = end < begin + SELECT_BLOCKS ? end : begin + SELECT_BLOCKS;
    for (int32_t b = begin; b < end; b++) {
        if (b + 1 < end)
            prefetch_plane(block_plane(job->kv, job->rows, seq, b + 1, a->layer, KN_PLANE_INDEX, 0),
                           job->kv->index_row_bytes, visible(job->rows, last - 1, b + 1));
        const key_block keys =
            open_keys(job->kv->shape.type,
                      block_plane(job->kv, job->rows, seq, b, a->layer, KN_PLANE_INDEX, 0),
                      job->kv->index_row_bytes, a->index_dim, visible(job->rows, last - 1, b),
                      (last - first) * a->index_heads, t->block_k);
        for (uint32_t r = first; r < last; r++) {
            if (job->rows->pos[r] < b * KN_BLOCK_TOKENS)
                continue;
            const uint32_t count = visible(job->rows, r, b);
            scores(t->p, a->index_q + (size_t)r * a->index_heads * a->index_dim, a->index_heads,
                   &keys, 0, count);
            for (uint32_t h = 0; h < a->index_heads; h++) {
                const float *s = t->p + (size_t)h * KN_BLOCK_TOKENS;
                v16 top = v16_set1(-INFINITY);
                for (uint32_t i = 0; i < count; i += 16) {
                    v16 x = v16_load(s + i);
                    if (count - i < 16)
                        x = v16_first(x, v16_set1(-INFINITY), count - i);
                    top = v16_max(x, top); /* a NaN score counts as none */
                }
                job->d->scores[((size_t)(r - job->first) * a->index_heads + h) * job->blocks +
                               (uint32_t)b] = v16_hmax(top);
            }
        }
    }
}

/* Is (score, block) ranked before (other, other_block)? */
static bool ranks_before(float score, int32_t block, float other, int32_t other_block)
{
    return score > other || (score == other && block < other_block);
}

/* Chooses for one row and head; score[b] for b <= own. */
static void choose(const kn_select *a, const float *score, int32_t own, int32_t *chosen,
                   float *margin)
{
    const uint32_t topk = a->topk;
    uint32_t count = 0;
    if ((uint32_t)own + 1 <= topk) {
        for (int32_t b = 0; b <= own; b++)
            chosen[count++] = b;
        for (; count < topk; count++)
            chosen[count] = -1;
        *margin = INFINITY;
        return;
    }
    const int32_t init_end = (int32_t)a->init;
    const int32_t local_begin = own - (int32_t)a->local + 1;
    for (int32_t b = 0; b <= own; b++)
        if (b < init_end || b >= local_begin) {
            CHECK(count < topk);
            chosen[count++] = b;
        }
    /* The ranked ones, best first, with one place more for the first that is left out. */
    int32_t ranked[CPU_TOPK_MAX + 1];
    float ranked_score[CPU_TOPK_MAX + 1];
    const uint32_t places = topk - count + 1;
    uint32_t used = 0;
    for (int32_t b = init_end; b < local_begin; b++) {
        if (used == places && !ranks_before(score[b], b, ranked_score[used - 1], ranked[used - 1]))
            continue;
        uint32_t at = used < places ? used++ : used - 1;
        for (; at > 0 && ranks_before(score[b], b, ranked_score[at - 1], ranked[at - 1]); at--) {
            ranked[at] = ranked[at - 1];
            ranked_score[at] = ranked_score[at - 1];
        }
        ranked[at] = b;
        ranked_score[at] = score[b];
    }
    *margin = used == places && places > 1 ? ranked_score[places - 2] - ranked_score[places - 1]
                                           : INFINITY;
    for (uint32_t i = 0; i + 1 < places && i < used; i++) {
        uint32_t at = count++;
        for (; at > 0 && chosen[at - 1] > ranked[i]; at--)
            chosen[at] = chosen[at - 1];
        chosen[at] = ranked[i];
    }
    for (; count < topk; count++)
        chosen[count] = -1;
}

static void choose_piece(void *ctx, uint32_t piece, uint32_t thread)
{
    const select_job *job = ctx;
    const kn_select *a = job->a;
    const uint32_t last = min_u32(job->last, job->first + (piece + 1) * CPU_GROUP_ROWS);
    for (uint32_t r = job->first + piece * CPU_GROUP_ROWS; r < last; r++)
        for (uint32_t h = 0; h < a->index_heads; h++) {
            float margin;
            const size_t at = (size_t)r * a->index_heads + h;
            choose(a,
                   job->d->scores + ((size_t)(r - job->first) * a->index_heads + h) * job->blocks,
                   job->rows->pos[r] / KN_BLOCK_TOKENS, a->blocks + at * a->topk, &margin);
            if (a->margin)
                a->margin[at] = margin;
        }
}

void cpu_select(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_select *a)
{
    cpu_device *d = cpu_of(device);
    CHECK(rows->rows <= d->rows_max && a->layer < kv->shape.layers &&
          kv->shape.has_index[a->layer]);
    CHECK(a->index_dim == kv->shape.index_dim);
    CHECK(a->index_heads >= 1 && a->index_heads <= CPU_INDEX_HEADS_MAX);
    CHECK(a->topk >= 1 && a->topk <= CPU_TOPK_MAX && a->local >= 1);
    uint32_t longest = 0;
    for (uint32_t r = 0; r < rows->rows; r++) {
        CHECK(rows->pos[r] >= 0 && (uint32_t)rows->pos[r] < d->context_max);
        const uint32_t blocks = (uint32_t)rows->pos[r] / KN_BLOCK_TOKENS + 1;
        longest = blocks > longest ? blocks : longest;
    }
    select_job job = {.d = d, .kv = kv, .rows = rows, .a = a, .blocks = longest};
    job.ranges = ceil_div(longest, SELECT_BLOCKS);
    const uint32_t pass =
        min_u32(rows->rows, (uint32_t)(d->score_floats / ((size_t)a->index_heads * longest + 1)));
    for (uint32_t r = 0; r < rows->rows; r += pass) {
        job.first = r;
        job.last = min_u32(r + pass, rows->rows);
        /* While all blocks are chosen no score is needed. */
        if (longest > a->topk)
            kn_pool_run(d->base.pool, score_piece, &job,
                        form_groups(d, rows, job.first, job.last) * job.ranges);
        kn_pool_run(d->base.pool, choose_piece, &job,
                    ceil_div(job.last - job.first, CPU_GROUP_ROWS));
    }
}

/* ---- the draft block ---- */

typedef struct draft_job {
    cpu_device *d;
    const kn_kv *kv;
    const kn_draft_attend *a;
    float scale;
} draft_job;

/* First context position that row i of a block sees. */
static uint32_t draft_low(const kn_draft_attend *a, uint32_t block, uint32_t i)
{
    const uint32_t after = a->hi[block] + i + 1;
    const uint32_t low = a->window && after > a->window ? after - a->window : 0;
    return low > a->lo[block] ? low : a->lo[block];
}

/* Keys and values of the block's own rows: at most CPU_GROUP_ROWS, so that they are one block of
 * the reduction. */
static void read_draft_block(const cpu_thread *t, const kn_draft_attend *a, uint32_t block,
                             uint32_t kv_head)
{
    const uint32_t dims = a->head_dim;
    const size_t stride = (size_t)a->kv_heads * dims;
    const size_t at = (size_t)block * a->block_rows * stride + (size_t)kv_head * dims;
    for (uint32_t i = 0; i < a->block_rows; i += 16)
        for (uint32_t k = 0; k < dims; k += 16) {
            v16 lanes[16];
            for (uint32_t j = 0; j < 16; j++)
                lanes[j] =
                    v16_load(a->block_k + at + min_u32(i + j, a->block_rows - 1) * stride + k);
            v16_transpose(lanes);
            for (uint32_t j = 0; j < 16; j++)
                v16_store(t->block_k + (size_t)(k + j) * KN_BLOCK_TOKENS + i, lanes[j]);
        }
    for (uint32_t i = 0; i < a->block_rows; i++)
        memcpy(t->block_v + (size_t)i * dims, a->block_v + at + i * stride, dims * sizeof(float));
}

static void draft_piece(void *ctx, uint32_t piece, uint32_t thread)
{
    const draft_job *job = ctx;
    const kn_draft_attend *a = job->a;
    const kn_kv *kv = job->kv;
    const cpu_thread *t = &job->d->threads[thread];
    const uint32_t block = piece / a->kv_heads;
    const uint32_t kv_head = piece % a->kv_heads;
    const uint32_t heads = a->q_heads / a->kv_heads;
    const uint32_t dims = a->head_dim;
    const uint32_t hi = a->hi[block];
    const size_t stride = (size_t)a->q_heads * dims;
    const size_t at = (size_t)block * a->block_rows * stride + (size_t)kv_head * heads * dims;
    for (uint32_t r = 0; r < a->block_rows; r++)
        start_state(t->m + r * heads, t->l + r * heads, a->out + at + r * stride, heads, dims);
    for (uint32_t b = draft_low(a, block, 0) / KN_BLOCK_TOKENS; b * KN_BLOCK_TOKENS < hi; b++) {
        const uint32_t page = a->pages[block][b];
        const uint32_t base = b * KN_BLOCK_TOKENS;
        const uint32_t count = min_u32(hi - base, KN_BLOCK_TOKENS);
        CHECK(page < kv->shape.page_count);
        const key_block keys =
            open_keys(kv->shape.type, cpu_kv_plane(kv, page, a->layer, KN_PLANE_K, kv_head),
                      kv->row_bytes, dims, count, a->block_rows * heads, t->block_k);
        read_values(kv->shape.type, t->block_v,
                    cpu_kv_plane(kv, page, a->layer, KN_PLANE_V, kv_head), kv->row_bytes, dims,
                    count);
        for (uint32_t r = 0; r < a->block_rows; r++) {
            const uint32_t low = draft_low(a, block, r);
            const uint32_t begin = low > base ? low - base : 0;
            if (begin < count)
                attend_block(t->p, t->m + r * heads, t->l + r * heads, a->out + at + r * stride,
                             a->q + at + r * stride, heads, &keys, t->block_v, begin, count,
                             job->scale);
        }
    }
    read_draft_block(t, a, block, kv_head);
    const key_block own = {.dims = dims, .transposed = t->block_k};
    for (uint32_t r = 0; r < a->block_rows; r++) {
        attend_block(t->p, t->m + r * heads, t->l + r * heads, a->out + at + r * stride,
                     a->q + at + r * stride, heads, &own, t->block_v, 0, a->block_rows, job->scale);
        end_state(t->l + r * heads, a->out + at + r * stride, heads, dims);
    }
}

void cpu_draft_attend(kn_device *device, const kn_kv *kv, const kn_draft_attend *a)
{
    cpu_device *d = cpu_of(device);
    CHECK(a->block_rows >= 1 && a->block_rows <= CPU_GROUP_ROWS && a->layer < kv->shape.layers);
    CHECK(a->kv_heads == kv->shape.kv_heads && a->head_dim == kv->shape.head_dim);
    CHECK(a->q_heads % a->kv_heads == 0 && a->q_heads / a->kv_heads <= CPU_GROUP_HEADS_MAX);
    draft_job job = {.d = d, .kv = kv, .a = a, .scale = 1.0f / sqrtf((float)a->head_dim)};
    kn_pool_run(d->base.pool, draft_piece, &job, a->blocks * a->kv_heads);
}
