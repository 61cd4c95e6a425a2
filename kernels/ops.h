/* kernels/ops: every operation's promise. Backends (cpu now; cuda, hip) implement the table
 * `kn_ops`; model code calls it through a kn_device and never asks which one it is.
 *
 * Shapes are row-major. "rows" are tokens of one step: decode, verify and prefill rows alike.
 * Activations are float in the device's memory. A row's bits are a function of its own inputs and
 * of the cache contents below its position: never of `rows`, of its neighbours, of how a prompt was
 * cut into chunks or of the thread count.
 *
 * THE WRITTEN REDUCTIONS of the cpu backend (version KN_CPU_REDUCTION; avx2 and avx512 give the
 * same bits): dot(x, w, n)    lane j of 16 takes k = j, j+16, …, ascending: acc[j] = fma(x[k],
 * w[k], acc[j]), w exact in float (codes times block scales); a last part of fewer than 16 acts as
 * if padded with zeros. Then the tree sum16: for h in 8, 4, 2, 1: acc[j] += acc[j+h], j < h. dot
 * with NVFP4 weights: integers within a group of 16. e = the exponent of the group's largest |x|
 * (2^e <= |x| < 2^(e+1)); q[k] = x[k] * 2^(21-e) rounded to the nearest integer, ties to even; S =
 * the sum of 2 * code[k] * q[k], exact in 32 bits. Lane j of 8 takes groups j, j+8, …, ascending:
 * acc[j] = fma((float)S, scale * 2^(e-22), acc[j]); then for h in 4, 2, 1: acc[j] += acc[j+h], j <
 * h; then the quotient by scale_global. A group below 2^-90 counts as zeros, one that holds an
 * infinity or NaN gives NaN. q errs by at most 2^-22 of the group's largest value. sum of squares
 * the same with x = w; mean and rsqrt in float: 1.0f / sqrtf(mean + eps). attention       blocks of
 * 128 positions in ascending number. In a block: s[t] = scale * dot(q, k[t], head_dim); m' = max(m,
 * max s); c = kn_exp(m - m'); p[t] = kn_exp(s[t] - m'); l = fma(l, c, sum16 of lanes t mod 16 of
 * p); o[d] = fma-chain over t ascending, started from o[d] * c. After the last: o[d] / l. Masked
 * positions (u > t) are skipped, as if p were 0. softmax, gates  sigmoid(x) = 1.0f / (1.0f +
 * kn_exp(-x)). kn_exp is the polynomial of kernels/cpu/math.h, the same operations in every
 * variant. MoE             experts of a row in ascending id: acc = fma(weight, expert_out, acc),
 * starting from 0; then + shared; then the residual is added once: x = x + acc. Reasons for float
 * lanes with FMA: the variants agree to the bit with no emulation, and the result stays within a
 * few ulp of a float oracle on the dequantised file. Reasons for integers with NVFP4: one byte
 * product serves where a float one needs the code decoded, a third of the instructions; 23 bits of
 * x because 16 err by more than the golden vectors' 1e-5.
 *
 * The variant "ref" is the plain formula: scalar, double sums, never tuned, every weight and page
 * type. Tests compare the others and the golden vectors with it.
 *
 * Thread: the engine's, with the device's own pool below it. Fails: only where a base_code is
 * returned. No allocation in an operation: scratch is sized by kn_device_create. */
#pragma once
#include "engine/base/err.h"

#define KN_CPU_REDUCTION 2
#define KN_PAGE_TOKENS 128 /* positions a page, equal to the MSA block */
#define KN_BLOCK_TOKENS 128

typedef enum kn_type {
    KN_F32,
    KN_BF16,
    KN_MXFP8, /* e4m3 bytes [rows, cols], e8m0 scales [rows, cols/32]: value * 2^(scale-127) (OCP MX
                 v1.0) */
    KN_NVFP4, /* e2m1 nibbles [rows, cols/2] (even column low), e4m3 scales [rows, cols/16]; value *
                 scale / scale_global */
} kn_type;

/* A matrix as stored, [rows = outputs, cols = inputs]. Borrowed memory (the mapped checkpoint, or a
 * repack). */
typedef struct kn_weight {
    kn_type type;
    uint32_t rows, cols;
    const void *data;
    const void *scale;  /* NULL for F32 and BF16 */
    float scale_global; /* NVFP4: stored as the inverse, so divided by; else 1 */
    const void *tiles;  /* NULL, or what kn_pack made of it, at a multiple of 64: the same products,
                           faster */
} kn_weight;

/* Bytes of the streaming form of a matrix, a multiple of 64; 0: its type has none. */
size_t kn_pack_bytes(const kn_weight *weight);
/* Writes it. Different outputs of one matrix may not be packed by different threads. */
void kn_pack(void *dst, const kn_weight *weight);
#define KN_PACK_VERSION 1 /* of that form */

/* ---- pages ---- */

typedef enum kn_kv_type {
    KN_KV_NVFP4, /* a row of n dims: n/2 code bytes then n/16 e4m3 scale bytes */
    KN_KV_FP8,   /* n e4m3 bytes, scale 1 */
    KN_KV_BF16,
    KN_KV_F32,
} kn_kv_type;

#define KN_LAYERS_MAX 128

typedef struct kn_kv_shape {
    kn_kv_type type;
    uint32_t layers;
    uint32_t kv_heads, head_dim;
    uint32_t index_dim;               /* 0: no layer has index keys */
    uint8_t has_index[KN_LAYERS_MAX]; /* per layer: one index key per position beside K and V */
    uint32_t page_count;
} kn_kv_shape;

/* Bytes of one position of one K or V head (or of an index key) in a page: nvfp4 dims*9/16, fp8
 * dims, bf16 2*dims, … */
static inline uint32_t kn_kv_row_bytes(kn_kv_type type, uint32_t dims)
{
    switch (type) {
    case KN_KV_NVFP4:
        return dims / 2 + dims / 16;
    case KN_KV_FP8:
        return dims;
    case KN_KV_BF16:
        return dims * 2;
    default:
        return dims * 4;
    }
}

typedef enum kn_plane_kind { KN_PLANE_K, KN_PLANE_V, KN_PLANE_INDEX } kn_plane_kind;

typedef struct kn_kv kn_kv;         /* the device's page memory */
typedef struct kn_device kn_device; /* threads or streams, and scratch */

/* ---- one step's rows ---- */

typedef struct kn_rows {
    uint32_t rows;
    const int32_t *token; /* [rows] */
    const int32_t
        *pos; /* [rows] position in its sequence; rows of one sequence stand together, ascending */
    const uint32_t *seq; /* [rows] index into pages */
    const uint32_t *const
        *pages; /* [sequences] page numbers; entry i covers positions 128i … 128i+127 */
} kn_rows;

/* ---- operations' arguments ---- */

typedef struct kn_rope {
    const float *cos, *sin; /* [positions, rotary_dim/2]; angle = (float)pos * inv_freq in float */
    uint32_t rotary_dim;    /* NeoX halves: dims i and i + rotary_dim/2; the rest passes through */
} kn_rope;

/* Norm, Q, K, V, index Q and index K projections, per-head norms, RoPE, and the insert into pages.
 * With NVFP4 or FP8 pages q and index q are rounded to BF16, then to E4M3 (RNE, saturating at 448),
 * and K, V, index K to BF16, then to the page type; with BF16 pages all are rounded to BF16; with
 * F32 pages nothing is. Norms are Gemma's: y = x * rsqrt(mean(x^2)+eps) * (1+w), w float. */
typedef struct kn_attn_in {
    const float *x; /* [rows, hidden] residual stream; read only */
    uint32_t hidden, q_heads, kv_heads, head_dim;
    uint32_t index_heads,
        index_dim; /* index_heads 0: dense layer, the index pointers below are NULL */
    float eps;
    const float *norm; /* [hidden] */
    const kn_weight *q, *k, *v, *index_q, *index_k;
    const float *q_norm, *k_norm;             /* [head_dim] */
    const float *index_q_norm, *index_k_norm; /* [index_dim] */
    kn_rope rope;
    uint32_t layer;
    float *q_out;       /* [rows, q_heads * head_dim] */
    float *index_q_out; /* [rows, index_heads * index_dim] */
} kn_attn_in;

/* MSA selection. Score of block b for index head h: max over visible u of dot(iq_h, ik_u). Always
 * the own block (and `local - 1` before it, and the first `init`); the rest by (score high, block
 * number low). */
typedef struct kn_select {
    const float *index_q;
    uint32_t index_heads, index_dim, layer;
    uint32_t topk, init, local;
    int32_t *blocks; /* [rows, index_heads, topk] chosen block numbers, ascending, then -1 */
    float *margin;   /* NULL, or [rows, index_heads]: last chosen score less the first left out;
                        INFINITY if none is left */
} kn_select;

/* Attention of each row over positions <= its own: all of them (blocks NULL) or those of the chosen
 * blocks. Query head j reads KV head j / (q_heads / kv_heads) and the selection of that KV head.
 * Scale 1/sqrt(head_dim). */
typedef struct kn_attend {
    const float *q;
    uint32_t q_heads, kv_heads, head_dim, layer;
    const int32_t *blocks; /* as kn_select.blocks with index_heads == kv_heads, or NULL */
    uint32_t topk;
    float *out; /* [rows, q_heads * head_dim] */
} kn_attend;

/* SwiGLU-OAI: g' = min(g, limit), u' = clamp(u, -limit, limit); (u' + 1) * g' * sigmoid(alpha *
 * g'). */
typedef struct kn_act {
    float alpha, limit;
} kn_act;

/* x += down(act(gate(n), up(n))), n = norm(x). */
typedef struct kn_mlp {
    float *x; /* [rows, hidden], in and out */
    uint32_t hidden, inner;
    float eps;
    const float *norm;
    const kn_weight *gate, *up, *down;
    kn_act act;
} kn_mlp;

/* n = norm(x); p = sigmoid(router n) in float; the topk of p + bias (ties: lower id); weights p /
 * sum * routed_scale; x += sum of weight * expert(n), experts in ascending id, + shared(n). */
typedef struct kn_moe {
    float *x;
    uint32_t hidden, inner, shared_inner; /* shared_inner 0: no shared expert */
    uint32_t experts, topk;
    float eps, routed_scale;
    const float *norm;
    const float *router, *bias;    /* [experts, hidden], [experts]; float */
    const kn_weight *w1, *w2, *w3; /* [experts] gate, down, up */
    const kn_weight *shared_gate, *shared_up, *shared_down;
    kn_act act;
    int32_t *route_ids;   /* NULL, or [rows, topk], ascending id */
    float *route_weights; /* NULL, or [rows, topk] */
} kn_moe;

/* Window attention of DSpark draft blocks. Query row r belongs to block r / block_rows; it sees all
 * block_rows keys of its own block (both ways, no causal mask) and the context positions [lo, hi)
 * of its sequence. Context K and V lie in `kv`, a kn_kv of the draft's own shape (no index keys,
 * BF16 or F32) that is indexed by the same page numbers as the target's, so that sharing, forks and
 * reuse of target pages carry the draft's context along. Order of the written reduction: the
 * context's blocks of 128 positions ascending, then the draft block as one more block. */
typedef struct kn_draft_attend {
    const float *q; /* [blocks * block_rows, q_heads * head_dim], normed and rotated */
    const float *block_k, *block_v; /* [blocks * block_rows, kv_heads * head_dim] */
    uint32_t blocks, block_rows;
    uint32_t q_heads, kv_heads, head_dim, layer;
    const uint32_t *const *pages; /* [blocks] page table of the block's sequence */
    const uint32_t *lo,
        *hi;         /* [blocks] context positions; the block's first row stands at position hi */
    uint32_t window; /* 0: none; else row i of a block sees context positions >= hi + i + 1 - window
                        only */
    float *out;      /* [blocks * block_rows, q_heads * head_dim] */
} kn_draft_attend;

/* ---- the table ---- */

typedef struct kn_ops {
    const char *name; /* "cpu-ref", "cpu-avx2", "cpu-avx512" */

    /* y[r] = table row of ids[r]; y [rows, cols]. An id outside the table is the caller's bug
     * (CHECK). */
    void (*embed)(kn_device *device, float *y, const kn_weight *table, const int32_t *ids,
                  uint32_t rows);
    /* Gemma RMSNorm, y may be x. w float [cols]. */
    void (*norm)(kn_device *device, float *y, const float *x, const float *w, uint32_t rows,
                 uint32_t cols, float eps);
    /* Per-head form: x is [rows, heads, dim], one w [dim]; then RoPE at pos[r] if rope->rotary_dim
     * > 0. In place. */
    void (*head_norm_rope)(kn_device *device, float *x, const float *w, uint32_t rows,
                           uint32_t heads, uint32_t dim, float eps, const kn_rope *rope,
                           const int32_t *pos);
    /* y = x W^T, or y += with `add`. x [rows, w->cols], y [rows, w->rows]. */
    void (*linear)(kn_device *device, float *y, const float *x, const kn_weight *w, uint32_t rows,
                   bool add);
    void (*attn_in)(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attn_in *args);
    void (*select)(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_select *args);
    void (*attend)(kn_device *device, kn_kv *kv, const kn_rows *rows, const kn_attend *args);
    void (*mlp)(kn_device *device, uint32_t rows, const kn_mlp *args);
    void (*moe)(kn_device *device, uint32_t rows, const kn_moe *args);
    /* logits[i] = head(norm(x[pick[i]])), i < picks; logits [picks, head->rows]. */
    void (*head)(kn_device *device, float *logits, const float *x, const float *norm,
                 const kn_weight *head, const uint32_t *pick, uint32_t picks, uint32_t hidden,
                 float eps);
    /* Writes K and V [rows, kv_heads * head_dim] (normed and rotated) of one layer at (seq, pos) of
     * the rows, rounded to the page type. Used for the draft's context. */
    void (*kv_put)(kn_device *device, kn_kv *kv, const kn_rows *rows, uint32_t layer,
                   const float *k, const float *v);
    void (*draft_attend)(kn_device *device, const kn_kv *kv, const kn_draft_attend *args);
} kn_ops;

/* ---- devices ---- */

typedef struct kn_backend kn_backend; /* kernels/backend.h */
typedef struct kn_pool kn_pool;

typedef struct kn_device_options {
    const kn_backend *backend; /* NULL: the cpu's */
    const char *variant;       /* of the cpu: "auto", "ref", "avx2", "avx512" */
    uint32_t index;            /* which GPU */
    size_t memory_max;         /* bytes of its memory that may be taken; 0: no bound */
    uint32_t threads;          /* 0: one a core, at most 64 */
    uint32_t rows_max;         /* of one step */
    uint32_t width_max; /* largest of hidden, q_heads*head_dim, inner, shared_inner, experts*… a row
                           needs */
    uint32_t context_max;
} kn_device_options;

struct kn_device {
    const kn_ops *ops;
    const kn_backend *backend;
    kn_pool *pool; /* threads of the host */
    void *impl;
};

/* Fails: BASE_UNSUPPORTED (variant unknown, or the CPU lacks it: named; no such GPU), BASE_NOMEM,
 * BASE_DEVICE. */
base_code kn_device_create(kn_device **out, const kn_device_options *options, base_err *err);
void kn_device_destroy(kn_device *device); /* NULL is fine */
/* Work pieces over the host's threads of a device: fn(ctx, i) for every i < count, the caller takes
 * part; returns when all are done. */
void kn_device_parallel(kn_device *device, void (*fn)(void *ctx, uint32_t i), void *ctx,
                        uint32_t count);

/* Work is about to come: threads that sleep begin to wake, which takes as long as the caller's own
 * way there. Thread: any. */
void kn_device_wake(kn_device *device);

/* The device must outlive its pages. */
base_code kn_kv_create(kn_kv **out, kn_device *device, const kn_kv_shape *shape, base_err *err);
void kn_kv_destroy(kn_kv *kv);
const kn_kv_shape *kn_kv_get_shape(const kn_kv *kv);
/* Bytes one page takes in the device's memory. */
size_t kn_kv_page_bytes(const kn_kv_shape *shape);
/* The record side: a plane (layer, kind, head) of a page, its first `tokens` rows of
 * kn_kv_row_bytes each. `head` is 0 for the index plane. */
void kn_kv_copy_out(const kn_kv *kv, void *dst, uint32_t page, uint32_t layer, kn_plane_kind kind,
                    uint32_t head, uint32_t tokens);
void kn_kv_copy_in(kn_kv *kv, const void *src, uint32_t page, uint32_t layer, kn_plane_kind kind,
                   uint32_t head, uint32_t tokens);
/* Rows [0, tokens) of every plane of `from` into `to`. */
void kn_kv_copy_page(kn_kv *kv, uint32_t to, uint32_t from, uint32_t tokens);

/* ---- conversions, shared by tests, export and random checkpoints (scalar, exact) ---- */
float kn_e4m3_to_f32(uint8_t code); /* NaN codes give NaN */
uint8_t kn_f32_to_e4m3(float x);    /* RNE, saturating at 448; NaN gives 0x7F */
float kn_e2m1_to_f32(uint8_t nibble);
float kn_e8m0_to_f32(uint8_t code);
float kn_bf16_to_f32(uint16_t x);
uint16_t kn_f32_to_bf16(float x); /* RNE; NaN stays NaN */
/* One group of 16 (MiniMax-M3.1's KV rule): scale = e4m3(clamp(amax/6, 1/512, 448)), codes by
 * thresholds times the stored scale, ties to even, a zero magnitude is stored as +0. `x` holds BF16
 * values. */
void kn_nvfp4_quantize16(uint8_t codes[8], uint8_t *scale, const float x[16]);
/* e4m3(e2m1 * scale): the second rounding on read. */
float kn_nvfp4_read(uint8_t nibble, uint8_t scale);
