/* eng_draft: the DSpark drafter: one block pass, a Markov chain over its base logits, a confidence
 * per position (DeepSeek DSpark, arXiv paper and DeepSpec code; MiniMax-M3.1's layout of tensors
 * under `dspark/`).
 *
 * Its context K/V lie in pages with the target's page numbers (kn_kv of its own shape), so whoever
 * has a target page has the draft's context of the same positions. Every row that the target runs
 * is appended. Thread: engine. No allocation after load. */
#pragma once
#include "engine/model.h"
#include "engine/sample.h"

typedef struct eng_draft eng_draft;

/* Shares the model's device, embedding and head; of a model that was only looked at, it is looked
 * at too. Fails naming file and key. */
base_code eng_draft_load(eng_draft **out, const eng_model *model, const char *dir,
                         uint32_t rows_max, uint32_t blocks_max, base_err *err);
void eng_draft_destroy(eng_draft *draft);
uint32_t eng_draft_block(const eng_draft *draft);  /* most tokens a block proposes */
uint32_t eng_draft_window(const eng_draft *draft); /* context positions it sees; 0: all */
/* Hex, of what its context's rows follow from besides the target's features. */
const char *eng_draft_fingerprint(const eng_draft *draft);
uint32_t eng_draft_features(const eng_draft *draft,
                            const uint32_t **layers); /* feature layers and their count */
kn_kv_shape eng_draft_kv_shape(const eng_draft *draft, uint32_t page_count);

/* Context K/V of rows just run, from their features [rows, count * hidden], device memory. */
void eng_draft_append(eng_draft *draft, kn_kv *kv, const kn_rows *rows, const float *features);

typedef struct eng_draft_input {
    int32_t anchor;        /* sampled, not yet run */
    uint32_t anchor_pos;   /* context is positions < anchor_pos, cut to the window */
    uint32_t context_from; /* and to those from here on: earlier ones have no rows */
    const uint32_t *pages;
    const eng_sampling *sampling; /* temperature > 0: the chain picks with the same Gumbel noise as
                                     the target will */
    uint64_t output_index;        /* of the first drafted token */
    uint32_t choice;
    /* A grammar's mask for the next drafted token, given the one drafted before (-1 at first);
     * NULL: everything may be drafted. */
    const uint32_t *(*mask)(void *ctx, int32_t previous);
    void *mask_ctx;
    uint32_t mask_vocab; /* ids that a mask has bits for */
} eng_draft_input;

/* For each input up to `length` tokens (<= block) and the confidence of each, in [0, 1]. tokens,
 * confidence: [inputs, block]. */
void eng_draft_propose(eng_draft *draft, kn_kv *kv, const eng_draft_input *inputs,
                       uint32_t input_count, uint32_t length, int32_t *tokens, float *confidence);
/* Inspection for tests: base logits + Markov correction of the last pass, [length, inputs, vocab].
 * A pass takes as many inputs as fit the model's rows_max; all of them unless there are very many.
 */
const float *eng_draft_last_logits(const eng_draft *draft);
