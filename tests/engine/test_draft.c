/* The drafter on random weights: a draft depends on nothing but its own input and context, and its
 * chain picks what the sampler would. Against the oracle it is tested with the forward pass
 * (test_model.c, test_golden.c). */
#include "tests/engine/model_rig.h"

#include "engine/sample_internal.h"

#define LENGTH 500
#define BLOCK 7

static char dir[64];

static void enter(void)
{
    base_err err = BASE_ERR_INIT;
    strcpy(dir, "/tmp/test-draft-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    cr_assert_eq(eng_random__write(dir, "tiny", 0, 5, true, &err), BASE_OK, "%s", err.text);
}

static void leave(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", dir);
    cr_assert_eq(system(command), 0);
}

static void open_rig(rig *r, const char *variant)
{
    char draft[128];
    snprintf(draft, sizeof draft, "%s/dspark", dir);
    rig_open(r, dir, variant, "nvfp4", 1024, draft, KN_KV_BF16);
    cr_assert_eq(eng_draft_block(r->draft), BLOCK);
}

static void make_ids(int32_t *ids, uint32_t count, uint32_t seed)
{
    for (uint32_t i = 0; i < count; i++)
        ids[i] = (int32_t)(base_rand(seed, 1, i).v[0] % 256);
}

typedef struct proposal {
    int32_t tokens[BLOCK];
    float confidence[BLOCK];
} proposal;

static const eng_sampling GREEDY_SAMPLING = {.top_p = 1, .repetition_penalty = 1};

static eng_draft_input input_at(const rig *r, uint32_t s, const int32_t *ids, uint32_t at,
                                const eng_sampling *sampling)
{
    return (eng_draft_input){.anchor = ids[at],
                             .anchor_pos = at,
                             .pages = r->pages[s],
                             .sampling = sampling,
                             .output_index = at + 11,
                             .choice = 1};
}

static proposal propose(rig *r, uint32_t s, const int32_t *ids, uint32_t at,
                        const eng_sampling *sampling)
{
    proposal p;
    eng_draft_input in = input_at(r, s, ids, at, sampling);
    eng_draft_propose(r->draft, r->draft_kv, &in, 1, BLOCK, p.tokens, p.confidence);
    return p;
}

static const uint32_t ANCHORS[] = {0, 1, 6, 127, 128, 200, 255, 256, 257, 262, 263, 400, 499};
#define ANCHOR_COUNT (sizeof ANCHORS / sizeof *ANCHORS)

/* The context of an anchor is the positions below it, whatever was appended above or in which
 * steps. */
Test(draft, chunks_and_later_rows_do_not_matter, .init = enter, .fini = leave, .timeout = 120)
{
    int32_t ids[LENGTH];
    proposal whole[ANCHOR_COUNT];
    rig r;
    make_ids(ids, LENGTH, 1);
    open_rig(&r, "auto");
    rig_run(&r, 0, ids, 0, LENGTH, 256, NULL);
    for (size_t i = 0; i < ANCHOR_COUNT; i++)
        whole[i] = propose(&r, 0, ids, ANCHORS[i], &GREEDY_SAMPLING);
    rig_close(&r);

    open_rig(&r, "auto");
    uint32_t run = 0;
    for (size_t i = 0; i < ANCHOR_COUNT; i++) {
        if (ANCHORS[i] > run)
            rig_run(&r, 0, ids + run, run, ANCHORS[i] - run, 13, NULL);
        run = ANCHORS[i];
        proposal p = propose(&r, 0, ids, ANCHORS[i], &GREEDY_SAMPLING);
        cr_expect_arr_eq(p.tokens, whole[i].tokens, sizeof p.tokens, "anchor %u", ANCHORS[i]);
        cr_expect_arr_eq(p.confidence, whole[i].confidence, sizeof p.confidence, "anchor %u",
                         ANCHORS[i]);
    }
    rig_close(&r);
}

Test(draft, company_does_not_matter, .init = enter, .fini = leave, .timeout = 120)
{
    int32_t ids[RIG_SEQUENCES][LENGTH], tokens[8 * BLOCK];
    float confidence[8 * BLOCK];
    eng_draft_input inputs[8];
    rig r;
    open_rig(&r, "auto");
    for (uint32_t s = 0; s < RIG_SEQUENCES; s++) {
        make_ids(ids[s], LENGTH, 10 + s);
        rig_run(&r, s, ids[s], 0, LENGTH, 256, NULL);
    }
    eng_sampling warm = GREEDY_SAMPLING;
    warm.temperature = 0.8f;
    warm.seed = 3;
    for (uint32_t i = 0; i < 8; i++)
        inputs[i] =
            input_at(&r, i % 3, ids[i % 3], ANCHORS[i + 4], i % 2 == 0 ? &GREEDY_SAMPLING : &warm);
    eng_draft_propose(r.draft, r.draft_kv, inputs, 8, BLOCK, tokens, confidence);
    for (uint32_t i = 0; i < 8; i++) {
        proposal p =
            propose(&r, i % 3, ids[i % 3], ANCHORS[i + 4], i % 2 == 0 ? &GREEDY_SAMPLING : &warm);
        cr_expect_arr_eq(p.tokens, tokens + i * BLOCK, sizeof p.tokens, "input %u", i);
        cr_expect_arr_eq(p.confidence, confidence + i * BLOCK, sizeof p.confidence, "input %u", i);
    }
    rig_close(&r);
}

/* A shorter draft is the front of a longer one. */
Test(draft, length_only_cuts, .init = enter, .fini = leave, .timeout = 120)
{
    int32_t ids[LENGTH], tokens[BLOCK];
    float confidence[BLOCK];
    rig r;
    make_ids(ids, LENGTH, 20);
    open_rig(&r, "auto");
    rig_run(&r, 0, ids, 0, LENGTH, 256, NULL);
    proposal whole = propose(&r, 0, ids, 300, &GREEDY_SAMPLING);
    for (uint32_t length = 0; length <= BLOCK; length++) {
        eng_draft_input in = input_at(&r, 0, ids, 300, &GREEDY_SAMPLING);
        eng_draft_propose(r.draft, r.draft_kv, &in, 1, length, tokens, confidence);
        cr_expect_eq(memcmp(tokens, whole.tokens, length * sizeof *tokens), 0, "length %u", length);
        cr_expect_eq(memcmp(confidence, whole.confidence, length * sizeof *confidence), 0,
                     "length %u", length);
    }
    rig_close(&r);
}

Test(draft, the_chain_picks_what_the_sampler_would, .init = enter, .fini = leave, .timeout = 120)
{
    int32_t ids[LENGTH];
    rig r;
    char scratch[8192];
    make_ids(ids, LENGTH, 30);
    open_rig(&r, "auto");
    cr_assert_leq(eng_sample_scratch(r.config->vocab), sizeof scratch);
    rig_run(&r, 0, ids, 0, LENGTH, 256, NULL);
    for (uint32_t i = 0; i < 40; i++) {
        eng_sampling s = GREEDY_SAMPLING;
        s.temperature = i % 4 == 0 ? 0 : 0.3f * (float)(i % 4);
        s.seed = i;
        proposal p = propose(&r, 0, ids, 10 * i + 3, &s);
        for (uint32_t k = 0; k < BLOCK; k++) {
            eng_sampler_input in = {.logits = eng_draft_last_logits(r.draft) +
                                              (size_t)k * r.config->vocab,
                                    .vocab = r.config->vocab,
                                    .sampling = &s,
                                    .ban = -1,
                                    .output_index = 10 * i + 3 + 11 + k,
                                    .choice = 1};
            cr_expect_eq(p.tokens[k], eng_sample(&in, NULL, scratch), "draft %u, token %u", i, k);
            cr_expect(p.confidence[k] > 0 && p.confidence[k] < 1);
        }
    }
    rig_close(&r);
}

Test(draft, reference_and_tuned_variants_agree, .init = enter, .fini = leave, .timeout = 240)
{
    int32_t ids[300];
    rig a, b;
    double worst = 0;
    make_ids(ids, 300, 40);
    open_rig(&a, "ref");
    open_rig(&b, "auto");
    rig_run(&a, 0, ids, 0, 300, 256, NULL);
    rig_run(&b, 0, ids, 0, 300, 256, NULL);
    for (uint32_t at = 100; at < 300; at += 50) {
        proposal p = propose(&a, 0, ids, at, &GREEDY_SAMPLING),
                 q = propose(&b, 0, ids, at, &GREEDY_SAMPLING);
        /* Chains part where two logits are close; up to there the logits are comparable. */
        for (uint32_t k = 0; k < BLOCK; k++) {
            double d = rig_distance(eng_draft_last_logits(a.draft) + (size_t)k * 320,
                                    eng_draft_last_logits(b.draft) + (size_t)k * 320, 320);
            worst = d > worst ? d : worst;
            if (p.tokens[k] != q.tokens[k])
                break;
        }
    }
    cr_expect(worst < 0.02, "logits differ by %g", worst);
    rig_close(&a);
    rig_close(&b);
}

static void expect_draft_error(uint32_t rows_max, const char *draft, base_code code,
                               const char *text)
{
    base_err err = BASE_ERR_INIT;
    eng_model *m;
    eng_draft *d;
    eng_model_options options = {.threads = 1, .rows_max = rows_max, .context_max = 256};
    cr_assert_eq(eng_model_load(&m, dir, &options, &err), BASE_OK, "%s", err.text);
    cr_expect_eq(eng_draft_load(&d, m, draft, rows_max, 4, &err), code, "%s", err.text);
    cr_expect_null(d);
    cr_expect_not_null(strstr(err.text, text), "\"%s\" lacks \"%s\"", err.text, text);
    eng_model_destroy(m);
}

Test(draft, what_does_not_fit_is_named, .init = enter, .fini = leave, .timeout = 120)
{
    char draft[128], path[192];
    snprintf(draft, sizeof draft, "%s/dspark", dir);
    expect_draft_error(3, draft, BASE_INVALID, "draft block of 7");
    expect_draft_error(8, "/nowhere", BASE_NOT_FOUND, "/nowhere/config.json");
    snprintf(path, sizeof path, "%s/model.safetensors", draft);
    cr_assert_eq(truncate(path, 100000), 0);
    expect_draft_error(8, draft, BASE_FORMAT, "truncated");
    unlink(path);
    expect_draft_error(8, draft, BASE_NOT_FOUND, "model.safetensors");
    /* The target's own file in its place: a folder of the wrong kind. */
    expect_draft_error(8, dir, BASE_UNSUPPORTED, "MiniMaxM3SparseForConditionalGeneration");
}
