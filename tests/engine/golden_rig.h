/* golden_rig: one prompt of a golden vector file against the model: logits, residual stream,
 * selections, greedy continuation, and the draft. What the vectors mean and why the bounds are what
 * they are: tests/vectors/README.md. */
#pragma once
#include "tests/engine/model_rig.h"

#define GREEDY 48

typedef struct golden_bounds {
    double logits; /* plus 2 * moved, the oracle's own sensitivity, where `moved_counts` */
    bool moved_counts;
    double margin;       /* selections are compared where the oracle's margin exceeds it */
    bool cascades;       /* natural prompts: see golden_selections */
    double gap;          /* greedy tokens past `kept` are compared up to the first gap below it */
    double draft_logits; /* plus 2 * the largest `moved` of the prompt, likewise */
    double draft_gap, confidence;
} golden_bounds;

typedef struct golden_trace {
    rig *r;
    const int32_t *wanted; /* rows whose residual stream is kept */
    uint32_t wanted_count;
    float *hidden;   /* [layers, wanted_count, hidden] */
    int32_t *blocks; /* [layers, tokens, heads, topk] */
    uint32_t tokens;
} golden_trace;

static inline void golden_layer(void *ctx, uint32_t layer, const float *x, const int32_t *blocks,
                                const float *margin, const int32_t *route_ids,
                                const float *route_weights)
{
    golden_trace *t = ctx;
    const eng_model_config *c = t->r->config;
    const size_t list = (size_t)c->index_heads * c->topk_blocks;
    for (uint32_t i = 0; i < t->wanted_count; i++) {
        uint32_t row = (uint32_t)t->wanted[i];
        if (row >= t->r->first_row && row < t->r->first_row + t->r->rows)
            memcpy(t->hidden + ((size_t)layer * t->wanted_count + i) * c->hidden,
                   x + (size_t)(row - t->r->first_row) * c->hidden, c->hidden * sizeof *x);
    }
    if (blocks != NULL && t->r->first_row + t->r->rows <= t->tokens)
        memcpy(t->blocks + ((size_t)layer * t->tokens + t->r->first_row) * list, blocks,
               t->r->rows * list * sizeof *blocks);
}

/* Counts over all prompts of a file, printed at its end. */
typedef struct golden_sums {
    double logits, hidden, draft;
    uint64_t selections, skipped, differ;
} golden_sums;

/* Every selection is compared. Where the oracle's margin exceeds the bound it must be equal; except
 * that in a long natural prompt one code that rounds the other way changes the inputs of every
 * later layer, so no margin tells there what must agree. The oracle reran each prompt with noise of
 * 1e-6 and stored margin 0 where its own selection changed; with `cascades` a prompt may differ in
 * at most as many selections as the oracle did from itself: in none where it changed none. */
static inline void golden_selections(const golden_trace *t, const eng_files *v, const char *name,
                                     const golden_bounds *b, golden_sums *sums)
{
    uint64_t differ_here = 0, unstable = 0;
    const eng_model_config *c = t->r->config;
    uint8_t *blocks = rig_values(v, name, ".blocks");
    float *margin = rig_values(v, name, ".margin");
    uint32_t sparse = 0;
    for (uint32_t l = 0; l < c->layers; l++) {
        for (uint32_t i = 0; c->sparse[l] && i < t->tokens * c->index_heads; i++) {
            const size_t at = (size_t)sparse * t->tokens * c->index_heads + i;
            const int32_t *got =
                t->blocks + ((size_t)l * t->tokens * c->index_heads + i) * c->topk_blocks;
            bool differ = false;
            for (uint32_t k = 0; k < c->topk_blocks; k++)
                differ = differ || (blocks[at * c->topk_blocks + k] == 255
                                        ? -1
                                        : blocks[at * c->topk_blocks + k]) != got[k];
            sums->selections++;
            sums->skipped += !b->cascades && (double)margin[at] <= b->margin;
            sums->differ += differ;
            differ_here += differ;
            unstable += margin[at] == 0;
            cr_expect(b->cascades || !differ || (double)margin[at] <= b->margin,
                      "%s: layer %u row %u head %u selects otherwise, margin %g", name, l,
                      i / c->index_heads, i % c->index_heads, (double)margin[at]);
        }
        sparse += c->sparse[l] != 0;
    }
    if (b->cascades) {
        cr_expect(differ_here <= unstable,
                  "%s: %llu selections differ, the oracle's own noise changed %llu", name,
                  (unsigned long long)differ_here, (unsigned long long)unstable);
        fprintf(stderr, "%s: %llu selections differ, %llu under the oracle's own noise\n", name,
                (unsigned long long)differ_here, (unsigned long long)unstable);
    }
    free(blocks);
    free(margin);
}

/* base + W2 W1[before], from the draft's own file. */
static inline void golden_markov(const eng_files *draft, float *logits, int32_t before,
                                 uint32_t vocab)
{
    const eng_tensor *w1 =
        eng_files_find(draft, "language_model.model.dspark.markov_head.markov_w1.weight");
    const eng_tensor *w2 =
        eng_files_find(draft, "language_model.model.dspark.markov_head.markov_w2.weight");
    const uint32_t rank = (uint32_t)w1->shape[1];
    for (uint32_t v = 0; v < vocab; v++) {
        double sum = 0;
        for (uint32_t k = 0; k < rank; k++) {
            uint16_t a, b;
            memcpy(&a, (const uint8_t *)w1->data + 2 * ((size_t)before * rank + k), 2);
            memcpy(&b, (const uint8_t *)w2->data + 2 * ((size_t)v * rank + k), 2);
            sum += (double)kn_bf16_to_f32(a) * (double)kn_bf16_to_f32(b);
        }
        logits[v] = (float)((double)logits[v] + sum);
    }
}

static inline void golden_draft(rig *r, const eng_files *v, const eng_files *draft,
                                const char *name, const int32_t *text, uint32_t tokens,
                                const golden_bounds *b, double moved, golden_sums *sums)
{
    static const eng_sampling GREEDY_SAMPLING = {.top_p = 1, .repetition_penalty = 1};
    const uint32_t block = eng_draft_block(r->draft), vocab = r->config->vocab;
    const eng_tensor *anchors_t = rig_tensor(v, name, ".draft.anchors");
    if (anchors_t == NULL)
        return;
    int32_t *anchors = rig_values(v, name, ".draft.anchors"),
            *want = rig_values(v, name, ".draft.tokens");
    float *gap = rig_values(v, name, ".draft.gap"),
          *want_confidence = rig_values(v, name, ".draft.confidence");
    float *base =
        rig_tensor(v, name, ".draft.base") != NULL ? rig_values(v, name, ".draft.base") : NULL;
    int32_t got[64];
    float confidence[64];
    for (uint32_t a = 0; a < anchors_t->shape[0]; a++) {
        eng_draft_input in = {.anchor = text[anchors[a]],
                              .anchor_pos = (uint32_t)anchors[a],
                              .pages = r->pages[0],
                              .sampling = &GREEDY_SAMPLING};
        eng_draft_propose(r->draft, r->draft_kv, &in, 1, block, got, confidence);
        for (uint32_t k = 0; k < block; k++) {
            int32_t before = k == 0 ? in.anchor : want[a * block + k - 1];
            if (base != NULL) {
                float *logits = base + ((size_t)a * block + k) * vocab;
                golden_markov(draft, logits, before, vocab);
                double d = rig_distance(logits, eng_draft_last_logits(r->draft) + (size_t)k * vocab,
                                        vocab);
                sums->draft = d > sums->draft ? d : sums->draft;
                cr_expect(d <= b->draft_logits + 2 * moved,
                          "%s: draft at %d, row %u: logits differ by %g", name, anchors[a], k, d);
            }
            cr_expect(fabs((double)confidence[k] - (double)want_confidence[a * block + k]) <=
                          b->confidence + moved,
                      "%s: draft at %d, row %u: confidence %g, not %g", name, anchors[a], k,
                      (double)confidence[k], (double)want_confidence[a * block + k]);
            if (got[k] != want[a * block + k]) {
                cr_expect((double)gap[a * block + k] <= b->draft_gap + 4 * moved,
                          "%s: draft at %d, row %u: token %d, not %d, gap %g", name, anchors[a], k,
                          got[k], want[a * block + k], (double)gap[a * block + k]);
                break; /* later rows follow another token */
            }
        }
    }
    /* Greedy speculation over the continuation, round by round. */
    const eng_tensor *rounds_t = rig_tensor(v, name, ".draft.rounds");
    int32_t *rounds = rig_values(v, name, ".draft.rounds");
    uint32_t at = 0, others = 0;
    for (uint32_t round = 0; round < rounds_t->shape[0]; round++) {
        uint32_t p = tokens + at, right = 0;
        eng_draft_input in = {
            .anchor = text[p], .anchor_pos = p, .pages = r->pages[0], .sampling = &GREEDY_SAMPLING};
        eng_draft_propose(r->draft, r->draft_kv, &in, 1, block, got, confidence);
        while (right < block && got[right] == text[p + 1 + right])
            right++;
        others += (int32_t)right != rounds[round];
        at += (uint32_t)rounds[round] + 1;
    }
    /* A near tie of two draft logits may end a round elsewhere; where the vectors' own sensitivity
     * counts, allow a few. */
    cr_expect_leq(others, b->moved_counts ? 1 + rounds_t->shape[0] / 10 : 0,
                  "%s: %u of %llu rounds accept otherwise", name, others,
                  (unsigned long long)rounds_t->shape[0]);
    free(anchors);
    free(want);
    free(gap);
    free(want_confidence);
    free(base);
    free(rounds);
}

static inline void golden_prompt(rig *r, const eng_files *v, const eng_files *draft,
                                 const char *name, uint32_t chunk, const golden_bounds *b,
                                 golden_sums *sums)
{
    const eng_model_config *c = r->config;
    const uint32_t tokens = (uint32_t)rig_tensor(v, name, ".ids")->shape[0];
    const uint32_t wanted = (uint32_t)rig_tensor(v, name, ".rows")->shape[0];
    int32_t *ids = rig_values(v, name, ".ids"), *rows = rig_values(v, name, ".rows");
    float *want_logits = rig_values(v, name, ".logits"),
          *want_hidden = rig_values(v, name, ".hidden");
    float *moved = rig_tensor(v, name, ".moved") != NULL ? rig_values(v, name, ".moved") : NULL;
    int32_t *greedy = rig_values(v, name, ".greedy");
    float *gap = rig_values(v, name, ".gap");
    int32_t *kept = rig_tensor(v, name, ".kept") != NULL ? rig_values(v, name, ".kept") : NULL;
    float *logits = malloc((size_t)tokens * c->vocab * sizeof *logits);
    golden_trace trace = {.r = r, .wanted = rows, .wanted_count = wanted, .tokens = tokens};
    trace.hidden = calloc((size_t)c->layers * wanted * c->hidden, sizeof(float));
    trace.blocks =
        calloc((size_t)c->layers * tokens * c->index_heads * c->topk_blocks, sizeof(int32_t));
    eng_model_probe probe = {.layer = golden_layer, .ctx = &trace};

    cr_assert_eq(eng_model_set_probe(r->model, &probe, NULL), BASE_OK);
    rig_run(r, 0, ids, 0, tokens, chunk, logits);
    eng_model_set_probe(r->model, NULL, NULL);
    double most_moved = 0;
    for (uint32_t i = 0; i < wanted; i++) {
        double bound = b->logits + (b->moved_counts && moved != NULL ? 2 * (double)moved[i] : 0);
        double d = rig_distance(logits + (size_t)rows[i] * c->vocab,
                                want_logits + (size_t)i * c->vocab, c->vocab);
        if (b->moved_counts && moved != NULL)
            most_moved = fmax(most_moved, (double)moved[i]);
        sums->logits = d > sums->logits ? d : sums->logits;
        cr_expect(d <= bound, "%s: row %d: logits differ by %g, bound %g", name, rows[i], d, bound);
    }
    double d = rig_distance(trace.hidden, want_hidden + (size_t)wanted * c->hidden,
                            (size_t)c->layers * wanted * c->hidden);
    sums->hidden = d > sums->hidden ? d : sums->hidden;
    golden_selections(&trace, v, name, b, sums);

    /* The oracle's continuation is run whatever we would have chosen, so that every step is judged
     * by itself. */
    int32_t *text = malloc((tokens + GREEDY) * sizeof *text);
    float *last = malloc(c->vocab * sizeof *last);
    bool sure = true;
    /* Natural prompts have steps whose two best logits are nearer than the oracle's own noise moves
     * them: such a step is not judged, every other one is. */
    double tie =
        b->moved_counts && moved != NULL ? fmax(b->gap, (double)moved[wanted - 1]) : b->gap;
    memcpy(text, ids, tokens * sizeof *text);
    memcpy(text + tokens, greedy, GREEDY * sizeof *text);
    memcpy(last, logits + (size_t)(tokens - 1) * c->vocab, c->vocab * sizeof *last);
    for (uint32_t i = 0; i < GREEDY; i++) {
        sure = sure && (double)gap[i] >= tie;
        bool due = b->moved_counts ? (double)gap[i] >= tie
                                   : sure || (kept != NULL && (int32_t)i < kept[0]);
        int32_t got = rig_argmax(last, c->vocab);
        cr_expect(got == greedy[i] || !due, "%s: greedy token %u is %d, not %d, gap %g", name, i,
                  got, greedy[i], (double)gap[i]);
        rig_run(r, 0, &greedy[i], tokens + i, 1, 1, last);
    }
    if (r->draft != NULL)
        golden_draft(r, v, draft, name, text, tokens, b, most_moved, sums);
    free(text);
    free(last);
    free(trace.hidden);
    free(trace.blocks);
    free(logits);
    free(kept);
    free(gap);
    free(greedy);
    free(moved);
    free(want_hidden);
    free(want_logits);
    free(rows);
    free(ids);
}

/* All prompts of `file` with at most `tokens_max` tokens against the model in `folder` (below
 * `root`). */
static inline void golden_file(const char *file, const char *root, const char *folder,
                               const char *variant, const char *kv, bool with_draft,
                               uint32_t tokens_max, uint32_t chunk, const golden_bounds *bounds)
{
    eng_files *v = rig_vectors(file), *draft = NULL;
    base_err err = BASE_ERR_INIT;
    char dir[1024], draft_dir[1100];
    uint32_t longest = 0, prompts = 0;
    golden_sums sums = {0};
    rig r;
    snprintf(dir, sizeof dir, "%s/%s", root, folder);
    snprintf(draft_dir, sizeof draft_dir, "%s/dspark", dir);
    for (uint32_t i = 0; i < eng_files_count(v); i++) {
        const eng_tensor *t = eng_files_at(v, i);
        size_t length = strlen(t->name);
        if (length > 4 && strcmp(t->name + length - 4, ".ids") == 0 && t->shape[0] <= tokens_max &&
            t->shape[0] > longest)
            longest = (uint32_t)t->shape[0];
    }
    rig_open(&r, dir, variant, kv,
             (longest + GREEDY + KN_PAGE_TOKENS) / KN_PAGE_TOKENS * KN_PAGE_TOKENS,
             with_draft ? draft_dir : NULL, KN_KV_F32);
    if (with_draft)
        cr_assert_eq(eng_files_open(&draft, draft_dir, &err), BASE_OK, "%s", err.text);
    for (uint32_t i = 0; i < eng_files_count(v); i++) {
        const eng_tensor *t = eng_files_at(v, i);
        size_t length = strlen(t->name);
        char name[64] = "";
        if (length <= 4 || length - 4 >= sizeof name || strcmp(t->name + length - 4, ".ids") != 0 ||
            t->shape[0] > tokens_max)
            continue;
        memcpy(name, t->name, length - 4);
        golden_prompt(&r, v, draft, name, chunk, bounds, &sums);
        prompts++;
    }
    cr_assert(prompts > 0, "%s holds no prompt of at most %u tokens", file, tokens_max);
    cr_expect(sums.skipped * 100 <= sums.selections,
              "%s: %llu of %llu selections are too close to compare", file,
              (unsigned long long)sums.skipped, (unsigned long long)sums.selections);
    fprintf(stderr,
            "%s, %s, %u prompts: logits within %.2g, residuals %.2g, draft logits %.2g; selections "
            "%llu, %llu too close, "
            "%llu differ\n",
            file, eng_model_device(r.model)->ops->name, prompts, sums.logits, sums.hidden,
            sums.draft, (unsigned long long)sums.selections, (unsigned long long)sums.skipped,
            (unsigned long long)sums.differ);
    eng_files_close(draft);
    eng_files_close(v);
    rig_close(&r);
}
