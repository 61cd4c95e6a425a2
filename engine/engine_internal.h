/* eng_engine inside: what engine.c (submitting, start and stop) and loop.c (the engine thread)
 * share. */
#pragma once
#include <pthread.h>
#include <stdatomic.h>

#include "cache/index.h"
#include "cache/store.h"
#include "engine/admission.h"
#include "engine/chat.h"
#include "engine/constrain.h"
#include "engine/copy.h"
#include "engine/draft.h"
#include "engine/engine.h"
#include "engine/memory.h"
#include "engine/model.h"
#include "engine/past.h"
#include "engine/sample.h"
#include "engine/sched.h"
#include "engine/speculate.h"
#include "engine/token.h"

#define ENG_FETCHES_MAX 32

/* Pages of a waiting sequence on their way back from disk. */
typedef struct eng_fetch {
    kv_restore *restore;      /* NULL: free */
    struct eng_sequence *seq; /* NULL: it ended meanwhile */
    uint32_t from;            /* tokens that memory had */
    uint64_t owner;           /* of the pages' append rights */
    uint32_t *pages;          /* [pages_max], page_count of them held */
    uint32_t page_count;
    bool stale; /* rows of its namespace were erased since: nothing of it is listed */
} eng_fetch;

typedef struct eng_sequence {
    eng_request request; /* its pointers are the caller's until DONE */
    uint64_t number;     /* arrival order, and owner of append rights; never 0 */
    uint64_t submitted_ns, admitted_ns, first_ns;
    eng_waiter waiter; /* in the book while it waits; its rank holds for ever */
    uint32_t expected; /* output tokens */
    uint32_t uncached; /* of its prompt, as it looked when it came */
    double prefill_ns; /* predicted for its prompt */
    double work_ns;    /* and from its start to its end */
    double charged_ns; /* machine time that its tenant paid; taken: what it was in truth */
    double taken_ns;
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
    uint32_t scored;       /* rows of the prompt whose logits gave the next token's logprob */
    eng_decoder *decoder;
    eng_constrain *constrain; /* NULL: the output is free */

    uint32_t *pages; /* [pages_max] */
    kv_hint hint;    /* where its path stood in the index last */
    uint32_t page_count;
    uint32_t run;
    uint32_t draft_from; /* the drafter has no rows before it */
    eng_fetch *fetch;    /* it waits for these pages; `pages` holds what memory had before them */
    bool fetched;        /* the disk was asked */
    uint32_t restored_from, restored_to; /* tokens that it brought */
    uint64_t call_class;                 /* namespace and name of the last call, for the pause */
    eng_copy *copy;                      /* NULL: nothing is copied */
    uint32_t draft_count;
    int32_t draft[ENG_SPEC_BLOCK_MAX];
    eng_spec_offer offer; /* what `draft` is a part of; count 0: a script's */
    eng_spec_history history;
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

/* Prompt rows that run while the pages before them are still read, see ahead.c. */
typedef struct eng_ahead {
    struct eng_sequence *seq; /* whose they are; NULL: nobody runs ahead */
    eng_fetch *fetch;         /* NULL: the pages are there, the sequence waits for its admission */
    uint32_t from, rows;      /* positions [from, from + rows) */
    uint32_t layer;           /* the next to run */
    uint32_t last_page;       /* of what is read, if it ends inside one; else KV_PAGE_NONE */
    uint32_t *pages;          /* page_count of them behind those, held */
    uint32_t page_count;
    kn_rows batch;
    /* [step_rows_max] each */
    int32_t *token, *pos;
    uint32_t *zeros;
    const uint32_t *table[1];
    eng_memory memory;   /* of the next two */
    float *x, *features; /* [step_rows_max, …] */
} eng_ahead;

/* The disk tier, see tier.c. */
typedef struct eng_tier {
    kv_store *store; /* NULL: none */
    kv_plane *draft_planes;
    kv_layout draft_layout;
    eng_fetch fetches[ENG_FETCHES_MAX];
    uint32_t fetch_max;
    uint32_t waiting; /* sequences that wait for a fetch */
    eng_ahead ahead;
    double token_s;    /* of a prefill token, averaged; 0: none was measured */
    uint64_t short_ns; /* since when pages are short while the tier holds some; 0: not now */
} eng_tier;

struct eng_engine {
    eng_options options;
    eng_info info;
    eng_model *model;
    const eng_model_config *config;
    eng_draft *draft;
    eng_tok *tok;
    eng_codec *codec;
    eng_vocab *vocab; /* for the masks of grammars */
    kn_kv *kv, *draft_kv;
    kv_pool *pool;
    kv_index *index;
    pthread_mutex_t index_lock;
    eng_tier tier;
    eng_past past;
    bool *draft_whole;  /* [page_count] the drafter has its rows of every row of the page */
    uint32_t pages_max; /* of one eng_sequence */
    int32_t end_tokens[8];
    uint32_t end_token_count;
    eng_ids script; /* of the null engine */
    eng_spec spec;
    /* Under `lock`; the forecast in it is changed by the engine thread alone, which reads it
     * without. */
    eng_admission *admission;
    eng_forecast *forecast; /* of admission */
    double *left;           /* [sequences_max] of one pass */
    struct {                /* the last step, until the forecast has it; ns 0: it has */
        uint32_t sequences, prefill, context, tokens;
        uint64_t ns;
    } last;
    _Atomic uint32_t chunk;         /* prefill rows that the last step had room for beside others */
    bool page_bound;                /* the next in line waits for pages, not for a slot */
    uint64_t stepped_ns;            /* when the last step ended */
    bool warm;                      /* this one follows it without a pause */
    char *costs_path;               /* options.costs, written as long as the engine lives */
    uint64_t costs_ns, costs_steps; /* when the file was written, and after how many steps */

    eng_sequence **active; /* [sequences_max] */
    uint32_t active_count;
    eng_sequence *queue_head, *queue_tail;
    uint64_t numbers;
    bool moved;   /* this pass of the loop changed something */
    bool crowded; /* a sequence was preempted: admit nobody until one of those left has ended */

    /* one step's arrays, allocated at start */
    eng_sched_seq *plan;
    uint32_t *order;
    int32_t *row_token, *row_pos;
    uint32_t *row_seq, *pick, *pick_start;
    const uint32_t **row_pages;
    float *logits;
    float *features; /* [step_rows_max + ENG_KEPT_MAX, …] device memory, see eng__keep_rows */
    eng_memory feature_memory;
    int32_t *kept_token, *kept_pos; /* [ENG_KEPT_MAX] of kept_seq, kept_count of them */
    uint32_t *kept_zeros;
    uint32_t kept_count;
    eng_sequence *kept_seq;
    bool keeps; /* this step's rows are put aside */
    void *scratch;
    uint32_t picks_max;
    eng_draft_input *draft_inputs;
    int32_t *draft_tokens;
    float *draft_confidence;
    eng_spec_offer *offers;
    const eng_spec_history **histories;

    /* events of one sequence and step */
    base_buf part_text;
    eng_part_slot *slots;
    eng_part *parts;
    uint32_t slot_count, slot_max;
    eng_logprob *scores; /* [picks_max] of the prompt, score_count of them for the next event */
    uint32_t score_count;
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
    bool woken;               /* the store has something to poll */
    bool stop, stopped;
    base_err lost; /* code set: the device has failed, and nothing is run any more */
    pthread_t thread;
    bool thread_running;

    struct {
        _Atomic uint64_t requests, finished, cancelled, failed, prompt_tokens, cached_tokens,
            output_tokens, reasoning_tokens, drafted, accepted, steps, step_rows, busy_ns,
            evicted_pages, restored_tokens, forced_tokens, copied, copied_accepted, predicted,
            predicted_accepted, forward_ns, draft_ns, sample_ns, ahead_layers, ahead_tokens;
        _Atomic uint32_t queued, running, prefilling, pages_free, index_nodes, index_pages;
    } stats;
};

#define ENG_COUNT(engine, field, n)                                                                \
    atomic_fetch_add_explicit(&(engine)->stats.field, (n), memory_order_relaxed)
#define ENG_GAUGE(engine, field, n)                                                                \
    atomic_store_explicit(&(engine)->stats.field, (n), memory_order_relaxed)

void eng__sequence_destroy(eng_sequence *seq); /* NULL is fine */
bool eng__is_end_token(const eng_engine *engine, int32_t token);
/* Whether the turn ends with this token if the sequence samples it. */
bool eng__ends_turn(const eng_engine *engine, const eng_sequence *seq, int32_t token);
/* The decoder's callback; ctx is the sequence. */
void eng__add_part(void *ctx, const eng_part *part);
void eng__update_gauges(eng_engine *engine);
/* The engine thread's main function; arg is the engine. */
void *eng__run(void *arg);
/* Waits for the store's wake, a few milliseconds at most. */
void eng__wait(eng_engine *engine);

/* Whether tokens of the prompt still wait for their logprobs. */
static inline bool eng__scores(const eng_sequence *seq)
{
    return seq->request.prompt_logprobs && seq->scored + 1 < seq->request.token_count;
}

/* ---- pages.c ---- */

static inline uint32_t eng__known(const eng_sequence *seq)
{
    return seq->request.token_count + seq->output_count;
}

/* The first `count` known tokens, whole; in the step's scratch if they reach into the output. */
const int32_t *eng__known_tokens(const eng_sequence *seq, uint32_t count);
/* Makes room for `count` free pages by eviction; false if that many cannot be had now. */
bool eng__make_room(eng_engine *engine, uint32_t count);
/* Makes room even of what is pinned: for a sequence that runs alone. */
bool eng__force_room(eng_engine *engine, uint32_t count);
uint32_t eng__alloc_page(eng_engine *engine, uint64_t owner); /* KV_PAGE_NONE: no room */
/* Takes the pages of the longest cached prefix of these tokens: page_count, run, draft_from. */
void eng__match_pages(eng_engine *engine, eng_sequence *seq, const int32_t *tokens, uint32_t count);
void eng__drop_pages(eng_engine *engine, eng_sequence *seq);
/* Lists what has been run, so that others (and this one's next turn) find it. Returns its tokens.
 */
uint32_t eng__list_pages(eng_engine *engine, eng_sequence *seq);
/* Lists and offers to the disk what a turn has run, and notes that its session pauses. */
void eng__leave_pages(eng_engine *engine, eng_sequence *seq);
/* What a pause behind this call waits for. */
uint64_t eng__call_class(const eng_sequence *seq, const char *name, size_t length);
/* The append right on the last page, filled to `tokens` rows; or a copy of those rows, in a page of
 * its own. False: no room. */
bool eng__own_last_page(eng_engine *engine, eng_sequence *seq, uint32_t tokens);
/* Pages for positions up to `end`, exclusive. False: no room. */
bool eng__grow_pages(eng_engine *engine, eng_sequence *seq, uint32_t end);
void eng__raise_filled(eng_engine *engine, eng_sequence *seq, uint32_t run);

/* ---- propose.c ---- */

#define ENG_KEPT_MAX 64

/* Features of the step's first `count` rows, those of `seq` from seq->run on that were kept, are
 * put aside for the drafter: their context K/V are made when somebody reads them, many rows at
 * once. At most ENG_KEPT_MAX rows. */
void eng__keep_rows(eng_engine *engine, eng_sequence *seq, uint32_t count);
/* Makes the K/V of all rows that were put aside: before the draft pass, and before `seq`'s pages
 * are listed for others. */
void eng__settle_rows(eng_engine *engine);
/* Fills `draft` of every sequence that decodes. */
void eng__propose(eng_engine *engine);
/* Of `verified` draft tokens the first `judged` were compared and the first `accepted` kept. */
void eng__judge(eng_engine *engine, eng_sequence *seq, uint32_t verified, uint32_t judged,
                uint32_t accepted);
void eng__load_costs(eng_engine *engine);
/* At most once a minute, unless it is the last time. */
void eng__save_costs(eng_engine *engine, bool last);

/* ---- null.c ---- */

base_code eng__null_open(eng_engine *engine, base_err *err);
/* The next token of an answer. */
int32_t eng__null_token(const eng_engine *engine, const eng_sequence *seq);

/* ---- ahead.c ---- */

base_code eng__ahead_open(eng_engine *engine, base_err *err);
void eng__ahead_close(eng_engine *engine);
/* Prepares the rows behind a restore that has just begun, if there are enough. */
void eng__ahead_begin(eng_engine *engine, eng_fetch *fetch);
/* Runs the layers whose pages are in place: one if others run meanwhile, unless all is read. */
void eng__ahead_run(eng_engine *engine, const eng_fetch *fetch);
/* The restore is over; `whole`: all of it is listed. */
void eng__ahead_settle(eng_engine *engine, const eng_fetch *fetch, bool whole);
/* The sequence was admitted: the rows become its own if they fit where it stands. */
void eng__ahead_adopt(eng_engine *engine, eng_sequence *seq);
void eng__ahead_drop(eng_engine *engine);

/* ---- tier.c ---- */

base_code eng__tier_open(eng_engine *engine, base_err *err);
void eng__tier_close(eng_engine *engine); /* no fetch is left */
/* Begins to read what the disk has of tokens[0..count) beyond what `seq` has just matched. True:
 * the sequence waits (seq->fetch) and keeps its matched pages, whole ones only. */
bool eng__tier_fetch(eng_engine *engine, eng_sequence *seq, const int32_t *tokens, uint32_t count);
/* Once a pass of the loop: takes back what was written, settles fetches that are done. */
void eng__tier_poll(eng_engine *engine);
void eng__tier_abandon(eng_engine *engine, eng_sequence *seq); /* the sequence ends */
void eng__tier_end_fetches(eng_engine *engine);                /* waits */
uint32_t eng__tier_pages(const eng_engine *engine);            /* held by fetches */
/* Whether to wait for pages that the tier holds. It gives them up if that takes long. */
bool eng__tier_wait(eng_engine *engine);
/* Offers tokens[0..count), which the sequence has run. */
void eng__tier_write(eng_engine *engine, const eng_sequence *seq, const int32_t *tokens,
                     uint32_t count);
void eng__tier_observe_prefill(eng_engine *engine, uint32_t rows, uint64_t ns);
void eng__tier_erase(eng_engine *engine, uint64_t space, const int32_t *tokens, uint32_t count,
                     uint32_t kept);
void eng__tier_drop(eng_engine *engine, uint64_t space);
