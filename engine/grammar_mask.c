/* Masks: the tokens that may follow a configuration, as bits.
 *
 * A mask is made class by class (grammar_vocab.h): where a thread reads every byte of a class and
 * stays where it is, as inside a string, all tokens of the class are allowed at once; the others
 * walk the class's trie. */
#include "engine/grammar_run.h"

/* Threads of one configuration whose loops are followed each by itself. */
#define LOOPING_MAX 4u

static void set_bits(uint32_t *mask, const int32_t *same, int32_t id)
{
    for (; id >= 0; id = same[id])
        mask[id / 32] |= 1u << id % 32;
}

static void mask_or(uint32_t *mask, const uint32_t *other, uint32_t words)
{
    for (uint32_t i = 0; i < words; i++)
        mask[i] |= other[i];
}

/* The tokens of a class with at most `limit` characters. */
static void mask_class(uint32_t *mask, const gr_token_class *class, uint32_t words, uint32_t limit)
{
    uint32_t most = class->count == 0 ? 0 : class->chars[class->count - 1];
    if (limit >= most) {
        mask_or(mask, class->mask, words);
        return;
    }
    uint32_t summed = limit < GR_SUMMED ? limit : GR_SUMMED;
    mask_or(mask, class->upto[summed - 1], words);
    for (uint32_t i = class->upto_count[summed - 1]; i < class->count && class->chars[i] <= limit;
         i++)
        mask[class->ids[i] / 32] |= 1u << class->ids[i] % 32;
}

/* Characters that a thread can read of a class and that lead nowhere else, whichever they are: 0 if
 * it walks the trie instead. */
static uint32_t loop_limit(const eng_grammar_run *run, gr_thread t, uint32_t class_index)
{
    const eng_grammar *g = run->grammar;
    const gr_node *node = &g->nodes.data[t.node];
    uint32_t left = GR_INFINITE;
    if (!(node->loops >> class_index & 1))
        return 0;
    if (node->c != 0 && g->lengths.data[node->c - 1].max != GR_INFINITE)
        left = g->lengths.data[node->c - 1].max + 1 - gr_frame_at(run, t.frame)[GR_FRAME_COUNT];
    if (node->runs != 0)
        left = g->runs.data[node->runs - 1].limit[class_index];
    return left;
}

/* Characters of a class that may follow a configuration, whichever they are: GR_INFINITE if any
 * number, 0 if not all of them may or it is not easily seen. */
static uint32_t run_length(const eng_grammar_run *run, uint32_t config, uint32_t class_index)
{
    const uint32_t *words = run->configs.words + config;
    uint32_t limit = 0;
    bool alone = class_index <= GR_CLASS_ASCII;
    for (uint32_t i = 0; i < words[GR_CONFIG_THREADS]; i++) {
        const uint32_t *pair = words + GR_CONFIG_PAIRS + 2 * i;
        uint32_t left = loop_limit(run, (gr_thread){pair[0], pair[1]}, class_index);
        if (left >= run->vocab->chars_max)
            return GR_INFINITE;
        if (left > 0) {
            alone = alone && limit == 0;
            limit = left;
            continue;
        }
        const gr_node *node = &run->grammar->nodes.data[pair[0]];
        const gr_edge *edge = &run->grammar->edges.data[node->a];
        for (uint32_t k = 0; alone && k < node->b; k++)
            alone = edge[k].lo == edge[k].hi && !gr_class_has(class_index, edge[k].lo);
    }
    return alone ? limit : 0;
}

/* The tokens of a trie that may follow. `class_index`: whose characters alone the tokens hold, so
 * that where any of those may follow no byte has to be tried; GR_CLASS_REST: none. */
static void mask_walk(eng_grammar_run *run, uint32_t *mask, const gr_trie *trie,
                      const int32_t *same, uint32_t config, uint32_t class_index)
{
    uint32_t path[GR_TOKEN_BYTES_MAX + 1];
    path[0] = config;
    for (uint32_t i = 0; i < trie->count;) {
        const gr_trie_node *node = &trie->nodes[i];
        uint32_t to = gr_run_step(run, path[node->depth], node->byte);
        if (to == 0) {
            run->full = false;
            i = node->end;
            continue;
        }
        path[node->depth + 1] = to;
        set_bits(mask, same, node->token);
        i++;
        uint32_t limit = class_index < GR_CLASS_REST ? run_length(run, to, class_index) : 0;
        if (limit == 0)
            continue;
        for (; i < node->end; i++)
            if ((uint32_t)(trie->nodes[i].depth - node->depth) <= limit)
                set_bits(mask, same, trie->nodes[i].token);
    }
}

/* Tokens that begin with characters on which a thread stays where it is, or gets to a state that
 * only their number decides: their other bytes are followed once for each number, and for all
 * numbers at once as soon as one more changes nothing. */
static void mask_tails(eng_grammar_run *run, uint32_t *mask, uint32_t config, uint32_t class_index,
                       gr_thread t, uint32_t limit)
{
    const gr_token_rest *rest = &run->vocab->rests[class_index];
    const gr_node *node = &run->grammar->nodes.data[t.node];
    bool fixed = false;
    if (node->c != 0) {
        const gr_length *guard = &run->grammar->lengths.data[node->c - 1];
        uint32_t count = gr_frame_at(run, t.frame)[GR_FRAME_COUNT];
        fixed = count >= guard->min && guard->max - count >= run->vocab->chars_max;
    }
    const uint8_t any = class_index == GR_CLASS_DIGIT ? '0' : 'a';
    config = gr_run_part(run, &t, 1, config);
    config = config == 0 ? 0 : gr_run_step(run, config, any);
    if (config != 0 && (fixed || gr_run_step(run, config, any) == config)) {
        mask_walk(run, mask, &rest->tails, run->vocab->same[GR_SAME_TAIL], config, GR_CLASS_REST);
        return;
    }
    for (uint32_t n = 1; n <= rest->chars_max && n <= limit && config != 0; n++) {
        mask_walk(run, mask, &rest->tails_of[n - 1], run->vocab->same[GR_SAME_COUNTED], config,
                  GR_CLASS_REST);
        config = gr_run_step(run, config, any);
    }
}

static void mask_make(eng_grammar_run *run, uint32_t *mask, uint32_t config)
{
    const eng_vocab *vocab = run->vocab;
    const int32_t *same = vocab->same[GR_SAME_TOKEN];
    uint32_t count = run->configs.words[config + GR_CONFIG_THREADS];
    memset(mask, 0, vocab->words * sizeof *mask);
    for (uint32_t k = 0; k <= GR_CLASS_MARK; k++) {
        /* The threads are copied for each class: storing a configuration sorts them in place. */
        const bool text = k < GR_CLASS_REST;
        const gr_trie *trie = &vocab->classes[k].trie;
        const gr_trie *rest_trie = text ? &vocab->rests[k].trie : NULL;
        uint32_t limit = 0, others = 0, loops = 0;
        run->full = false; /* what found no room is refused alone */
        if (trie->count == 0 && (rest_trie == NULL || rest_trie->count == 0))
            continue;
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t *pair = run->configs.words + config + GR_CONFIG_PAIRS + 2 * i;
            uint32_t left =
                k < GR_CLASS_MARK ? loop_limit(run, (gr_thread){pair[0], pair[1]}, k) : 0;
            limit = left > limit ? left : limit;
            if (left == 0)
                run->other[others++] = (gr_thread){pair[0], pair[1]};
            else if (text)
                run->looping[loops++] = (gr_thread){pair[0], pair[1]};
        }
        if (limit > 0)
            mask_class(mask, &vocab->classes[k], vocab->words, limit);
        uint32_t config_rest = gr_run_some(run, run->other, others, count, config);
        if (config_rest != 0)
            mask_walk(run, mask, trie, same, config_rest, k);
        if (rest_trie == NULL || rest_trie->count == 0)
            continue;
        for (uint32_t i = 0; i < loops; i++) {
            const gr_node *node = &run->grammar->nodes.data[run->looping[i].node];
            if (loops <= LOOPING_MAX && (node->loops & GR_UNIFORM))
                mask_tails(run, mask, config, k, run->looping[i],
                           loop_limit(run, run->looping[i], k));
            else
                run->other[others++] = run->looping[i];
        }
        config_rest = gr_run_some(run, run->other, others, count, config);
        if (config_rest != 0)
            mask_walk(run, mask, rest_trie, same, config_rest, GR_CLASS_REST);
    }
}

static uint32_t mask_slot(eng_grammar_run *run, uint32_t config)
{
    for (; run->mask_used[run->mask_hand]; run->mask_hand = (run->mask_hand + 1) % GR_MASKS)
        run->mask_used[run->mask_hand] = 0;
    uint32_t slot = run->mask_hand;
    run->mask_hand = (run->mask_hand + 1) % GR_MASKS;
    if (run->mask_config[slot] != 0)
        run->configs.words[run->mask_config[slot] + GR_CONFIG_MASK] = 0;
    run->mask_config[slot] = config;
    run->configs.words[config + GR_CONFIG_MASK] = slot + 1;
    return slot;
}

const uint32_t *eng_grammar_mask(eng_grammar_state *state, const int32_t *end_tokens,
                                 uint32_t end_token_count)
{
    eng_grammar_run *run = state->run;
    CHECK(run->vocab != NULL);
    gr_run_make_room(run);
    uint32_t config = state->config, slot;
    bool fresh = config == 0 || run->configs.words[config + GR_CONFIG_MASK] == 0;
    if (config == 0)
        slot = run->mask_hand;
    else if (fresh)
        slot = mask_slot(run, config);
    else
        slot = run->configs.words[config + GR_CONFIG_MASK] - 1;
    uint32_t *mask = run->masks + (size_t)slot * run->vocab->words;
    if (config == 0) {
        if (run->mask_config[slot] != 0)
            run->configs.words[run->mask_config[slot] + GR_CONFIG_MASK] = 0;
        run->mask_config[slot] = 0;
        memset(mask, 0, run->vocab->words * sizeof *mask);
    } else if (fresh) {
        mask_make(run, mask, config);
    }
    run->mask_used[slot] = 1;
    for (uint32_t i = 0; i < end_token_count; i++) {
        uint32_t id = (uint32_t)end_tokens[i];
        if (id >= run->vocab->count)
            continue;
        mask[id / 32] &= ~(1u << id % 32);
        if (eng_grammar_accepts(state))
            mask[id / 32] |= 1u << id % 32;
    }
    return mask;
}
