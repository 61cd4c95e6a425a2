/* eng_engine inside: what engine.c (submitting, start and stop) and loop.c (the engine thread)
 * share. */
#pragma once
#include <pthread.h>
#include <stdatomic.h>

#include "cache/index.h"
#include "engine/chat.h"
#include "engine/draft.h"
#include "engine/engine.h"
#include "engine/model.h"
#include "engine/sample.h"
#include "engine/sched.h"
#include "engine/speculate.h"
#include "engine/token.h"

typedef struct eng_sequence {
    eng_request request; /* its pointers are the caller's until DONE */
    uint64_t number;     /* arrival order, and owner of append rights; never 0 */
    uint64_t submitted_ns, admitted_ns, first_ns;
    struct eng_sequence *next; /* in the mailbox and in the queue */
    bool started;              /* STARTED was sent */
    bool cancelled;

    int32_t *output; /* [max_tokens] */
    uint32_t output_count;
    uint32_t output_max;
    uint32_t told;  /* output tokens that events have carried */
    int32_t *force; /* tokens to append once visible text may begin */
    uint32_t force_count;
    int32_t *close; /* tokens that close a call block */
    uint32_t close_count;
    base_arena *arena; /* of force and close */
    eng_counts counts;
    eng_logprob *logprobs; /* [output_max] if asked for */
    eng_decoder *decoder;

    uint32_t *pages; /* [pages_max] */
    uint32_t page_count;
    uint32_t run;
    uint32_t draft_count;
    int32_t draft[ENG_SPEC_BLOCK_MAX];
    eng_usage usage;
    bool closing; /* nothing is sampled any more: what is known is run, then it ends. The end was
                     forced, or only the prompt was to be run */
    bool finished;
    eng_finish finish;
    int32_t stop_index;
    uint32_t run_tokens;
    base_err err;
    struct eng_engine *engine; /* for the decoder's callback */
} eng_sequence;

/* What another thread wants done at a step's border; on its stack, it waits for `done`. */
typedef struct eng_order {
    enum { ENG_ORDER_CHECK, ENG_ORDER_PIN, ENG_ORDER_ERASE, ENG_ORDER_DROP } kind;
    uint64_t space;
    const int32_t *tokens;
    uint32_t count, kept;
    uint64_t until_ns;
    base_err err;
    bool done;
    struct eng_order *next;
} eng_order;

typedef struct eng_part_slot {
    eng_part_kind kind;
    uint32_t call;
    size_t offset, length; /* in part_text */
} eng_part_slot;

struct eng_engine {
    eng_options options;
    eng_info info;
    eng_model *model;
    const eng_model_config *config;
    eng_draft *draft;
    eng_tok *tok;
    eng_codec *codec;
    kn_kv *kv, *draft_kv;
    kv_pool *pool;
    kv_index *index;
    pthread_mutex_t index_lock;
    uint32_t pages_max; /* of one eng_sequence */
    int32_t end_tokens[8];
    uint32_t end_token_count;
    eng_spec spec;

    eng_sequence **active; /* [sequences_max] */
    uint32_t active_count;
    eng_sequence *queue_head, *queue_tail;
    uint64_t numbers;
    bool crowded; /* a sequence was preempted: admit nobody until one of those left has ended */

    /* one step's arrays, allocated at start */
    eng_sched_seq *plan;
    uint32_t *order;
    int32_t *row_token, *row_pos;
    uint32_t *row_seq, *pick, *pick_start;
    const uint32_t **row_pages;
    float *logits, *features;
    void *scratch;
    uint32_t picks_max;
    eng_draft_input *draft_inputs;
    uint32_t *draft_lengths;
    int32_t *draft_tokens;
    float *draft_confidence;

    /* events of one sequence and step */
    base_buf part_text;
    eng_part_slot *slots;
    eng_part *parts;
    uint32_t slot_count, slot_max;
    bool told_any;

    /* mailbox */
    pthread_mutex_t lock;
    pthread_cond_t wake, ordered;
    eng_sequence *inbox_head, *inbox_tail;
    struct {
        uint64_t *ids;
        uint32_t count, max;
    } cancels, cancels_taken; /* the second is the engine thread's, swapped by drain */
    _Atomic uint32_t waiting; /* submitted and not active: inbox and queue */
    eng_order *orders;        /* newest first: each stands for itself */
    bool stop, stopped;
    pthread_t thread;
    bool thread_running;

    struct {
        _Atomic uint64_t requests, finished, cancelled, failed, prompt_tokens, cached_tokens,
            output_tokens, reasoning_tokens, drafted, accepted, steps, step_rows, busy_ns,
            evicted_pages;
        _Atomic uint32_t queued, running, prefilling, pages_free, index_nodes, index_pages;
    } stats;
};

#define ENG_COUNT(engine, field, n)                                                                \
    atomic_fetch_add_explicit(&(engine)->stats.field, (n), memory_order_relaxed)
#define ENG_GAUGE(engine, field, n)                                                                \
    atomic_store_explicit(&(engine)->stats.field, (n), memory_order_relaxed)

void eng__sequence_destroy(eng_sequence *seq); /* NULL is fine */
bool eng__is_end_token(const eng_engine *engine, int32_t token);
/* The decoder's callback; ctx is the sequence. */
void eng__add_part(void *ctx, const eng_part *part);
void eng__update_gauges(eng_engine *engine);
/* The engine thread's main function; arg is the engine. */
void *eng__run(void *arg);
