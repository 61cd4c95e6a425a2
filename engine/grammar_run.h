/* The automaton that follows a text: what grammar_run.c lends to grammar_mask.c.
 *
 * A configuration is the set of threads (state, frame) that the text so far may be in, closed over
 * steps that read nothing, so every thread stands before a byte. Frames and configurations are
 * stored once (hash-consed) in two pools of 32-bit words; their number is their place. A frame's
 * parent lies before it, so one ascending pass sweeps the pool. */
#pragma once
#include "engine/grammar_vocab.h"

#define GR_MASKS 64u /* kept by a run */

enum { GR_FRAME_PARENT, GR_FRAME_NEXT, GR_FRAME_COUNT, GR_FRAME_SHAPE, GR_FRAME_WORDS };
enum { GR_CONFIG_THREADS, GR_CONFIG_ACCEPTS, GR_CONFIG_STYLE, GR_CONFIG_MASK, GR_CONFIG_PAIRS };

/* What stands at every GR_SPACE of a text: the first one decides. */
typedef enum gr_style { GR_STYLE_OPEN, GR_STYLE_BLANK, GR_STYLE_NONE } gr_style;

typedef struct gr_pool {
    uint32_t *words; /* word 0 is not used, so that 0 is no entry */
    uint32_t used;
    uint32_t *table; /* open addressing; the first `size` are in use */
    uint32_t size, entries;
    uint32_t (*hash_of)(const uint32_t *entry), (*size_of)(const uint32_t *entry);
} gr_pool;

typedef struct gr_thread {
    uint32_t node, frame;
} gr_thread;

typedef struct gr_step {
    uint32_t config, to;
    uint32_t byte; /* 1 + byte, 0 for an empty slot */
} gr_step;

struct eng_grammar_run {
    eng_grammar *grammar;
    const eng_vocab *vocab;
    gr_pool frames, configs;
    uint32_t *moved; /* while sweeping */
    bool full;       /* a pool or a bound was hit; what was asked for is refused */
    /* Closing over steps that read nothing. */
    gr_thread *todo, *done, *other, *looping;
    uint32_t todo_count, done_count;
    gr_thread *visited;
    uint32_t *visited_at;
    uint32_t visit, visited_count;
    bool accepts;
    gr_style style;
    gr_step *steps;
    uint32_t *masks; /* [GR_MASKS][words] */
    uint32_t mask_config[GR_MASKS];
    uint8_t mask_used[GR_MASKS];
    uint32_t mask_hand;
    uint32_t start;
    eng_grammar_state *states;
    struct eng_grammar_run *next_spare;
};

static inline const uint32_t *gr_frame_at(const eng_grammar_run *run, uint32_t frame)
{
    return run->frames.words + frame;
}

/* Its memory, for good. */
void gr_run_free(eng_grammar_run *run);
/* Sweeps what no state reaches once a pool is half full. Numbers of configurations change, but for
 * those in states. */
void gr_run_make_room(eng_grammar_run *run);
/* The configuration behind one more byte; 0 if there is none, or no room (run->full). */
uint32_t gr_run_step(eng_grammar_run *run, uint32_t config, uint8_t byte);
/* The configuration of `threads` alone, in the style of `config`. */
uint32_t gr_run_part(eng_grammar_run *run, const gr_thread *threads, uint32_t count,
                     uint32_t config);
/* The same of some of the `whole` threads of `config`. */
uint32_t gr_run_some(eng_grammar_run *run, const gr_thread *threads, uint32_t count, uint32_t whole,
                     uint32_t config);
