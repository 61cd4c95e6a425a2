/* See the header. */
#include "engine/grammar_run.h"

#include <stdlib.h>

#include "engine/base/num.h"

/* Words of each pool, touched only as far as they are used. */
#define POOL_WORDS (1u << 20)
#define TABLE_SIZE (1u << 19)
#define TABLE_SIZE_FIRST (1u << 14) /* it doubles, so that a short text touches little memory */
/* Threads of one configuration; more are refused. */
#define THREADS_MAX 8192u
#define VISITED_SIZE (4u * THREADS_MAX)
#define STEPS_SIZE (1u << 15)
/* Runs whose memory is kept for the next, if their tables are no larger. */
#define SPARES_MAX 16u
#define SPARE_TABLE_MAX (1u << 16)

/* ---- frames and configurations ---- */

static uint32_t mix(uint32_t hash, uint32_t word)
{
    hash = (hash ^ word) * 0x9E3779B1u;
    return hash ^ hash >> 15;
}

static uint32_t hash_words(const uint32_t *words, uint32_t count, uint32_t hash)
{
    for (uint32_t i = 0; i < count; i++)
        hash = mix(hash, words[i]);
    return mix(hash, count);
}

static uint32_t frame_size(const uint32_t *frame)
{
    return GR_FRAME_WORDS + 2 * (frame[GR_FRAME_SHAPE] & 0xFFFF);
}

static uint32_t config_size(const uint32_t *config)
{
    return GR_CONFIG_PAIRS + 2 * config[GR_CONFIG_THREADS];
}

static uint32_t frame_hash(const uint32_t *frame)
{
    return hash_words(frame, frame_size(frame), 1);
}

static uint32_t config_hash(const uint32_t *config)
{
    return hash_words(config + GR_CONFIG_PAIRS, 2 * config[GR_CONFIG_THREADS],
                      config[GR_CONFIG_ACCEPTS] | config[GR_CONFIG_STYLE] << 1);
}

static void pool_rehash(gr_pool *p)
{
    memset(p->table, 0, p->size * sizeof *p->table);
    p->entries = 0;
    for (uint32_t at = 1; at < p->used; at += p->size_of(p->words + at)) {
        uint32_t slot = p->hash_of(p->words + at) & (p->size - 1);
        while (p->table[slot] != 0)
            slot = (slot + 1) & (p->size - 1);
        p->table[slot] = at;
        p->entries++;
    }
}

/* Stores the `size` words that the caller wrote behind the pool's end, or finds them. */
static uint32_t pool_intern(eng_grammar_run *run, gr_pool *p, uint32_t hash, uint32_t size,
                            uint32_t skip)
{
    const uint32_t *fresh = p->words + p->used;
    uint32_t slot = hash & (p->size - 1);
    for (; p->table[slot] != 0; slot = (slot + 1) & (p->size - 1)) {
        const uint32_t *old = p->words + p->table[slot];
        /* `skip`: the word of a configuration that is no part of what it is. */
        bool same = true;
        for (uint32_t i = 0; same && i < size; i++)
            same = i == skip || old[i] == fresh[i];
        if (same)
            return p->table[slot];
    }
    if (p->entries >= TABLE_SIZE - TABLE_SIZE / 4) {
        run->full = true;
        return 0;
    }
    uint32_t at = p->used;
    p->table[slot] = at;
    p->entries++;
    p->used += size;
    if (p->entries > p->size / 2 && p->size < TABLE_SIZE) {
        p->size *= 2;
        pool_rehash(p);
    }
    return at;
}

static bool pool_room(eng_grammar_run *run, const gr_pool *p, uint32_t size)
{
    if (size < POOL_WORDS - p->used)
        return true;
    run->full = true;
    return false;
}

static uint32_t frame_depth(const eng_grammar_run *run, uint32_t frame)
{
    return frame == 0 ? 0 : gr_frame_at(run, frame)[GR_FRAME_SHAPE] >> 16;
}

static uint32_t frame_make(eng_grammar_run *run, uint32_t parent, uint32_t next, uint32_t words)
{
    uint32_t size = GR_FRAME_WORDS + 2 * words;
    if (!pool_room(run, &run->frames, size))
        return 0;
    uint32_t *frame = run->frames.words + run->frames.used;
    memset(frame, 0, size * sizeof *frame);
    frame[GR_FRAME_PARENT] = parent;
    frame[GR_FRAME_NEXT] = next;
    frame[GR_FRAME_SHAPE] = (frame_depth(run, parent) + 1) << 16 | words;
    return pool_intern(run, &run->frames, frame_hash(frame), size, UINT32_MAX);
}

/* The frame with one more in its count (kept at `saturate`), and a bit set. */
static uint32_t frame_with(eng_grammar_run *run, uint32_t old, uint32_t saturate, uint32_t bit)
{
    uint32_t size = frame_size(gr_frame_at(run, old));
    if (!pool_room(run, &run->frames, size))
        return 0;
    uint32_t *frame = run->frames.words + run->frames.used;
    memcpy(frame, gr_frame_at(run, old), size * sizeof *frame);
    if (frame[GR_FRAME_COUNT] < saturate)
        frame[GR_FRAME_COUNT]++;
    if (bit != GR_INFINITE)
        frame[GR_FRAME_WORDS + bit / 32] |= 1u << bit % 32;
    return pool_intern(run, &run->frames, frame_hash(frame), size, UINT32_MAX);
}

/* The frame after an item: one more, and what it counts for. */
static uint32_t frame_item(eng_grammar_run *run, uint32_t old, const gr_array *array,
                           const gr_item *item)
{
    uint32_t size = frame_size(gr_frame_at(run, old));
    if (item->matches == 0)
        return frame_with(run, old, array->saturate, item->value);
    if (!pool_room(run, &run->frames, size))
        return 0;
    uint32_t *frame = run->frames.words + run->frames.used;
    memcpy(frame, gr_frame_at(run, old), size * sizeof *frame);
    if (frame[GR_FRAME_COUNT] < array->saturate)
        frame[GR_FRAME_COUNT]++;
    for (uint32_t w = 0; w < array->want_count; w++) {
        uint32_t keep = array->want[w].max == GR_INFINITE ? array->want[w].min : array->want[w].max;
        if ((item->matches >> w & 1) && frame[GR_FRAME_WORDS + w] < keep)
            frame[GR_FRAME_WORDS + w]++;
    }
    return pool_intern(run, &run->frames, frame_hash(frame), size, UINT32_MAX);
}

/* ---- guards ---- */

static uint64_t seen_word(const uint32_t *frame, uint32_t word)
{
    return frame[GR_FRAME_WORDS + 2 * word] | (uint64_t)frame[GR_FRAME_WORDS + 2 * word + 1] << 32;
}

static bool seen(const uint32_t *frame, uint32_t bit)
{
    return frame[GR_FRAME_WORDS + bit / 32] >> bit % 32 & 1;
}

/* Required members still missing, with index below `below`. */
static uint32_t missing(const eng_grammar *g, const gr_object *object, const uint32_t *frame,
                        uint32_t below)
{
    uint32_t n = 0;
    for (uint32_t w = 0; w < object->words && w * 64 < below; w++) {
        uint64_t lack = g->bits.data[object->required + w] & ~seen_word(frame, w);
        if (below - w * 64 < 64)
            lack &= ((uint64_t)1 << (below - w * 64)) - 1;
        n += (uint32_t)__builtin_popcountll(lack);
    }
    return n;
}

/* Whether so many frames find room above this one. */
static bool height_fits(const eng_grammar *g, const uint32_t *frame, uint32_t height)
{
    return height <= g->depth_max - (frame[GR_FRAME_SHAPE] >> 16);
}

static bool member_usable(const eng_grammar *g, const gr_object *object, const uint32_t *frame,
                          uint32_t member)
{
    return height_fits(g, frame, gr_rule_height(g, g->lists.data[object->rules + member]));
}

static bool extra_usable(const eng_grammar *g, const gr_object *object, const uint32_t *frame)
{
    return height_fits(g, frame, object->extra_height);
}

static bool member_allowed(const eng_grammar *g, const gr_object *object, const uint32_t *frame,
                           uint32_t member)
{
    if (seen(frame, member) || !member_usable(g, object, frame, member))
        return false;
    if (object->ordered) {
        /* Nothing at or behind it, nothing required left out before it. */
        for (uint32_t w = member / 64; w < object->words; w++) {
            uint64_t set = seen_word(frame, w);
            if (w == member / 64)
                set &= ~(((uint64_t)1 << member % 64) - 1);
            if (set != 0)
                return false;
        }
        if (missing(g, object, frame, member) > 0)
            return false;
    }
    if (!object->counted)
        return true;
    bool required = g->bits.data[object->required + member / 64] >> member % 64 & 1;
    uint32_t lack = missing(g, object, frame, object->members) - required;
    if (object->max != GR_INFINITE && frame[GR_FRAME_COUNT] + 1 + lack > object->max)
        return false;
    if (object->ordered && !extra_usable(g, object, frame)) {
        uint32_t left = 0;
        for (uint32_t i = member + 1; i < object->members; i++)
            left += member_usable(g, object, frame, i);
        if (frame[GR_FRAME_COUNT] + 1 + left < object->min)
            return false;
    }
    return true;
}

static bool extra_allowed(const eng_grammar *g, const gr_object *object, const uint32_t *frame)
{
    if (!extra_usable(g, object, frame))
        return false;
    uint32_t lack = missing(g, object, frame, object->members);
    if (object->ordered && lack > 0)
        return false;
    return object->max == GR_INFINITE || frame[GR_FRAME_COUNT] + 1 + lack <= object->max;
}

static bool more_members(const eng_grammar *g, const gr_object *object, const uint32_t *frame)
{
    if (extra_allowed(g, object, frame))
        return true;
    for (uint32_t i = 0; i < object->members; i++)
        if (member_allowed(g, object, frame, i))
            return true;
    return false;
}

/* How many more items must count for want `w`, once an item has that counts for `matches`. */
static uint32_t want_left(const gr_array *array, const uint32_t *frame, uint32_t w,
                          uint32_t matches)
{
    uint32_t count = frame[GR_FRAME_WORDS + w] + (matches >> w & 1);
    return count < array->want[w].min ? array->want[w].min - count : 0;
}

/* How many items that count for want `w` may come yet, once one has that counts for `matches`. */
static uint64_t want_room(const gr_array *array, const uint32_t *frame, uint32_t w,
                          uint32_t matches)
{
    return array->want[w].max == GR_INFINITE
               ? GR_INFINITE
               : array->want[w].max - frame[GR_FRAME_WORDS + w] - (matches >> w & 1);
}

/* Whether `need` items that count for want `w` and for none of `avoid` find places behind the item
 * at `count`. */
static bool places_fit(const eng_grammar *g, const gr_array *array, const uint32_t *frame,
                       uint32_t w, uint32_t avoid, uint64_t need)
{
    uint64_t places = 0;
    /* Past the prefix there is no end of places but max. */
    if (height_fits(g, frame, gr_place_height(g, array, array->prefix, 1u << w, avoid)))
        return true;
    for (uint32_t i = frame[GR_FRAME_COUNT] + 1; i < array->prefix && i < array->max; i++)
        places += height_fits(g, frame, gr_place_height(g, array, i, 1u << w, avoid));
    return places >= need;
}

/* Whether what is still wanted finds room behind the item that comes next. */
static bool wants_fit(const eng_grammar *g, const gr_array *array, const gr_item *item,
                      const uint32_t *frame)
{
    uint32_t most = 0, sum = 0, wanted = 0;
    for (uint32_t w = 0; w < array->want_count; w++)
        if ((item->matches >> w & 1) && frame[GR_FRAME_WORDS + w] >= array->want[w].max)
            return false;
    for (uint32_t w = 0; w < array->want_count; w++) {
        uint32_t left = want_left(array, frame, w, item->matches);
        most = left > most ? left : most;
        sum += left;
        wanted |= (uint32_t)(left > 0) << w;
        /* Of those that count for any of a set, only so many may come as the set has room for. */
        for (uint32_t set = 0; set >> array->want_count == 0 && left > 0; set++) {
            uint64_t room = 0;
            for (uint32_t v = 0; v < array->want_count; v++)
                room += set >> v & 1 ? want_room(array, frame, v, item->matches) : 0;
            if (room < left && !places_fit(g, array, frame, w, set, left - room))
                return false;
        }
    }
    if (array->max == GR_INFINITE || most == 0)
        return true;
    bool shared = height_fits(g, frame, gr_place_height(g, array, array->prefix, wanted, 0));
    return frame[GR_FRAME_COUNT] + 1 + (shared ? most : sum) <= array->max;
}

static bool item_allowed(const eng_grammar *g, const gr_array *array, const gr_item *item,
                         const uint32_t *frame)
{
    uint32_t count = frame[GR_FRAME_COUNT];
    if (item->index != GR_INFINITE ? count != item->index : count < array->prefix)
        return false;
    if (item->value != GR_INFINITE && seen(frame, item->value))
        return false;
    if (array->max != GR_INFINITE && count >= array->max)
        return false;
    return array->want_count == 0 || wants_fit(g, array, item, frame);
}

static bool more_items(const eng_grammar *g, const gr_array *array, const uint32_t *frame)
{
    for (uint32_t i = 0; i < array->item_count; i++) {
        const gr_item *item = &g->items.data[array->items + i];
        if (item_allowed(g, array, item, frame) &&
            height_fits(g, frame, gr_rule_height(g, item->rule)))
            return true;
    }
    return false;
}

static bool wants_met(const gr_array *array, const uint32_t *frame)
{
    for (uint32_t w = 0; w < array->want_count; w++)
        if (want_left(array, frame, w, 0) > 0)
            return false;
    return true;
}

/* ---- closing ---- */

/* Where the stack has no room for what must come, a way is not entered, so none ends for that. */
static void visit(eng_grammar_run *run, uint32_t node, uint32_t frame)
{
    const eng_grammar *g = run->grammar;
    if (g->nodes.data[node].kind == GR_DEAD ||
        frame_depth(run, frame) + g->nodes.data[node].height > g->depth_max)
        return;
    uint32_t slot = mix(mix(7, node), frame) & (VISITED_SIZE - 1);
    for (; run->visited_at[slot] == run->visit; slot = (slot + 1) & (VISITED_SIZE - 1))
        if (run->visited[slot].node == node && run->visited[slot].frame == frame)
            return;
    if (run->visited_count >= VISITED_SIZE / 2) {
        run->full = true;
        return;
    }
    run->visited_count++;
    run->visited_at[slot] = run->visit;
    run->visited[slot] = (gr_thread){node, frame};
    run->todo[run->todo_count++] = (gr_thread){node, frame};
}

static void closing_begin(eng_grammar_run *run, gr_style style)
{
    run->visit++;
    if (run->visit == 0) {
        memset(run->visited_at, 0, VISITED_SIZE * sizeof *run->visited_at);
        run->visit = 1;
    }
    run->visited_count = run->todo_count = run->done_count = 0;
    run->accepts = false;
    run->style = style;
}

static void call(eng_grammar_run *run, const gr_node *node, uint32_t frame)
{
    const eng_grammar *g = run->grammar;
    const gr_rule *rule = &g->rules.data[node->a];
    uint32_t parent = frame, next = node->b;
    /* A call that is the last thing a rule does needs that rule's frame no more, so a list written
     * as a rule that ends in itself stays flat. */
    if (g->nodes.data[next].kind == GR_RETURN) {
        parent = gr_frame_at(run, frame)[GR_FRAME_PARENT];
        next = gr_frame_at(run, frame)[GR_FRAME_NEXT];
    }
    uint32_t made = frame_make(run, parent, next, rule->words);
    if (made != 0)
        visit(run, rule->start, made);
}

static void close_one(eng_grammar_run *run, gr_thread t)
{
    const eng_grammar *g = run->grammar;
    const gr_node *node = &g->nodes.data[t.node];
    const uint32_t *frame = gr_frame_at(run, t.frame);
    uint32_t to = t.frame;
    switch ((gr_kind)node->kind) {
    case GR_DEAD:
        return;
    case GR_BYTES:
    case GR_BLANK:
        if (run->done_count < THREADS_MAX)
            run->done[run->done_count++] = t;
        else
            run->full = true;
        return;
    case GR_FORK:
        for (uint32_t i = 0; i < node->b; i++)
            visit(run, g->lists.data[node->a + i], t.frame);
        return;
    case GR_CALL:
        call(run, node, t.frame);
        return;
    case GR_RETURN:
        visit(run, frame[GR_FRAME_NEXT], frame[GR_FRAME_PARENT]);
        return;
    case GR_ACCEPT:
        run->accepts = true;
        return;
    case GR_SPACE:
        if (run->style != GR_STYLE_NONE)
            visit(run, node->a, t.frame);
        if (run->style == GR_STYLE_BLANK)
            return;
        break;
    case GR_KEY: {
        const gr_object *object = &g->objects.data[node->a];
        if (!member_allowed(g, object, frame, node->b))
            return;
        to = frame_with(run, t.frame, object->counted ? GR_INFINITE : 0, node->b);
        break;
    }
    case GR_EXTRA: {
        const gr_object *object = &g->objects.data[node->a];
        if (!extra_allowed(g, object, frame))
            return;
        /* Past both bounds nobody asks how many there were. */
        uint32_t saturate = !object->counted             ? 0
                            : object->max != GR_INFINITE ? GR_INFINITE
                                                         : object->min;
        to = frame_with(run, t.frame, saturate, object->ordered ? object->members : GR_INFINITE);
        break;
    }
    case GR_MORE:
        if (!more_members(g, &g->objects.data[node->a], frame))
            return;
        break;
    case GR_OBJECT_END: {
        const gr_object *object = &g->objects.data[node->a];
        if (missing(g, object, frame, object->members) > 0 ||
            (object->counted && frame[GR_FRAME_COUNT] < object->min))
            return;
        break;
    }
    case GR_ITEM: {
        const gr_array *array = &g->arrays.data[node->a];
        const gr_item *item = &g->items.data[node->b];
        if (!item_allowed(g, array, item, frame))
            return;
        to = frame_item(run, t.frame, array, item);
        break;
    }
    case GR_MORE_ITEMS:
        if (!more_items(g, &g->arrays.data[node->a], frame))
            return;
        break;
    case GR_ARRAY_END: {
        const gr_array *array = &g->arrays.data[node->a];
        if (frame[GR_FRAME_COUNT] < array->min || !wants_met(array, frame))
            return;
        break;
    }
    case GR_CHAR: {
        const gr_length *length = &g->lengths.data[node->a];
        if (frame[GR_FRAME_COUNT] >= length->max)
            return;
        to = frame_with(run, t.frame, length->max == GR_INFINITE ? length->min : length->max,
                        GR_INFINITE);
        break;
    }
    case GR_STRING_END:
        if (frame[GR_FRAME_COUNT] < g->lengths.data[node->a].min)
            return;
        break;
    }
    if (to != 0)
        visit(run, node->c, to);
}

static int by_node(const void *pa, const void *pb)
{
    const gr_thread *a = pa, *b = pb;
    if (a->node != b->node)
        return a->node < b->node ? -1 : 1;
    return a->frame < b->frame ? -1 : a->frame > b->frame;
}

/* The configuration of the threads in `done`; 0 if there is nothing, or no room. */
static uint32_t config_store(eng_grammar_run *run)
{
    uint32_t n = run->done_count, size = GR_CONFIG_PAIRS + 2 * n;
    if (run->full || (n == 0 && !run->accepts) || !pool_room(run, &run->configs, size))
        return 0;
    if (n > 32) {
        qsort(run->done, n, sizeof *run->done, by_node);
    } else {
        for (uint32_t i = 1; i < n; i++)
            for (uint32_t j = i; j > 0 && by_node(&run->done[j - 1], &run->done[j]) > 0; j--) {
                gr_thread t = run->done[j];
                run->done[j] = run->done[j - 1];
                run->done[j - 1] = t;
            }
    }
    uint32_t *config = run->configs.words + run->configs.used;
    config[GR_CONFIG_THREADS] = n;
    config[GR_CONFIG_ACCEPTS] = run->accepts;
    config[GR_CONFIG_STYLE] = run->style;
    config[GR_CONFIG_MASK] = 0;
    memcpy(config + GR_CONFIG_PAIRS, run->done, n * sizeof *run->done);
    return pool_intern(run, &run->configs, config_hash(config), size, GR_CONFIG_MASK);
}

uint32_t gr_run_part(eng_grammar_run *run, const gr_thread *threads, uint32_t count,
                     uint32_t config)
{
    memcpy(run->done, threads, count * sizeof *threads);
    run->done_count = count;
    run->accepts = false;
    run->style = (gr_style)run->configs.words[config + GR_CONFIG_STYLE];
    return config_store(run);
}

uint32_t gr_run_some(eng_grammar_run *run, const gr_thread *threads, uint32_t count, uint32_t whole,
                     uint32_t config)
{
    return count == whole ? config : gr_run_part(run, threads, count, config);
}

static uint32_t closing_end(eng_grammar_run *run)
{
    while (run->todo_count > 0 && !run->full)
        close_one(run, run->todo[--run->todo_count]);
    return config_store(run);
}

/* Where a blank may stand, the byte that comes decides it for all of the text. */
static gr_style style_behind(const eng_grammar_run *run, uint32_t config, uint8_t byte)
{
    const uint32_t *words = run->configs.words + config;
    if (words[GR_CONFIG_STYLE] != GR_STYLE_OPEN)
        return (gr_style)words[GR_CONFIG_STYLE];
    for (uint32_t i = 0; i < words[GR_CONFIG_THREADS]; i++)
        if (run->grammar->nodes.data[words[GR_CONFIG_PAIRS + 2 * i]].kind == GR_BLANK)
            return byte == ' ' ? GR_STYLE_BLANK : GR_STYLE_NONE;
    return GR_STYLE_OPEN;
}

uint32_t gr_run_step(eng_grammar_run *run, uint32_t config, uint8_t byte)
{
    const eng_grammar *g = run->grammar;
    gr_step *cached = &run->steps[mix(mix(3, config), byte) & (STEPS_SIZE - 1)];
    if (cached->config == config && cached->byte == byte + 1u)
        return cached->to;
    closing_begin(run, style_behind(run, config, byte));
    uint32_t count = run->configs.words[config + GR_CONFIG_THREADS];
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t *pair = run->configs.words + config + GR_CONFIG_PAIRS + 2 * i;
        const gr_node *node = &g->nodes.data[pair[0]];
        const gr_edge *edge = &g->edges.data[node->a];
        for (uint32_t k = 0; k < node->b; k++)
            if (byte >= edge[k].lo && byte <= edge[k].hi)
                visit(run, edge[k].to, pair[1]);
    }
    uint32_t to = closing_end(run);
    if (!run->full)
        *cached = (gr_step){config, to, byte + 1u};
    return to;
}

/* ---- sweeping ---- */

static void steps_forget(eng_grammar_run *run)
{
    memset(run->steps, 0, STEPS_SIZE * sizeof *run->steps);
    memset(run->mask_config, 0, sizeof run->mask_config);
    memset(run->mask_used, 0, sizeof run->mask_used);
}

/* Keeps what the live states and the start reach. `moved` first marks, then maps. */
static void sweep(eng_grammar_run *run)
{
    gr_pool *frames = &run->frames, *configs = &run->configs;
    uint32_t *moved = run->moved;
    memset(moved, 0, configs->used * sizeof *moved);
    moved[run->start] = 1;
    for (const eng_grammar_state *s = run->states; s != NULL; s = s->next)
        moved[s->config] = 1;
    uint32_t end = 1;
    for (uint32_t at = 1, size; at < configs->used; at += size) {
        size = config_size(configs->words + at);
        if (moved[at] == 0)
            continue;
        memmove(configs->words + end, configs->words + at, size * sizeof *moved);
        configs->words[end + GR_CONFIG_MASK] = 0;
        moved[at] = end;
        end += size;
    }
    configs->used = end;
    run->start = moved[run->start];
    for (eng_grammar_state *s = run->states; s != NULL; s = s->next)
        s->config = s->config == 0 ? 0 : moved[s->config];

    memset(moved, 0, frames->used * sizeof *moved);
    for (uint32_t at = 1; at < configs->used; at += config_size(configs->words + at))
        for (uint32_t i = 0; i < configs->words[at + GR_CONFIG_THREADS]; i++)
            for (uint32_t f = configs->words[at + GR_CONFIG_PAIRS + 2 * i + 1];
                 f != 0 && moved[f] == 0; f = frames->words[f + GR_FRAME_PARENT])
                moved[f] = 1;
    end = 1;
    for (uint32_t at = 1, size; at < frames->used; at += size) {
        size = frame_size(frames->words + at);
        if (moved[at] == 0)
            continue;
        memmove(frames->words + end, frames->words + at, size * sizeof *moved);
        uint32_t *parent = &frames->words[end + GR_FRAME_PARENT];
        *parent = *parent == 0 ? 0 : moved[*parent];
        moved[at] = end;
        end += size;
    }
    frames->used = end;
    for (uint32_t at = 1; at < configs->used; at += config_size(configs->words + at))
        for (uint32_t i = 0; i < configs->words[at + GR_CONFIG_THREADS]; i++) {
            uint32_t *frame = &configs->words[at + GR_CONFIG_PAIRS + 2 * i + 1];
            *frame = *frame == 0 ? 0 : moved[*frame];
        }
    pool_rehash(frames);
    pool_rehash(configs);
    steps_forget(run);
}

void gr_run_make_room(eng_grammar_run *run)
{
    run->full = false;
    if (run->frames.used > POOL_WORDS / 2 || run->configs.used > POOL_WORDS / 2 ||
        run->frames.entries > TABLE_SIZE / 2 || run->configs.entries > TABLE_SIZE / 2)
        sweep(run);
}

/* ---- runs and states ---- */

/* Fresh memory costs a fault a page: here, not in the step that makes the first mask. */
static void touch(void *memory, size_t bytes)
{
    for (size_t at = 0; memory != NULL && at < bytes; at += 4096)
        ((volatile char *)memory)[at] = 0;
}

static bool pool_init(gr_pool *p, uint32_t (*hash_of)(const uint32_t *),
                      uint32_t (*size_of)(const uint32_t *))
{
    p->words = calloc(POOL_WORDS, sizeof *p->words);
    p->table = calloc(TABLE_SIZE, sizeof *p->table);
    p->size = TABLE_SIZE_FIRST;
    p->hash_of = hash_of;
    p->size_of = size_of;
    p->used = 1;
    touch(p->words, POOL_WORDS / 64 * sizeof *p->words);
    touch(p->table, TABLE_SIZE_FIRST * sizeof *p->table);
    return p->words != NULL && p->table != NULL;
}

void gr_run_free(eng_grammar_run *run)
{
    free(run->frames.words);
    free(run->frames.table);
    free(run->configs.words);
    free(run->configs.table);
    free(run->moved);
    free(run->todo);
    free(run->done);
    free(run->visited);
    free(run->visited_at);
    free(run->steps);
    free(run->masks);
    free(run);
}

static eng_grammar_run *run_allocate(const eng_vocab *vocab)
{
    eng_grammar_run *run = calloc(1, sizeof *run);
    if (run == NULL)
        return NULL;
    bool whole = pool_init(&run->frames, frame_hash, frame_size);
    whole = pool_init(&run->configs, config_hash, config_size) && whole;
    run->moved = calloc(POOL_WORDS, sizeof *run->moved);
    run->todo = calloc(VISITED_SIZE, sizeof *run->todo);
    run->done = calloc(3 * (size_t)THREADS_MAX, sizeof *run->done);
    run->visited = calloc(VISITED_SIZE, sizeof *run->visited);
    run->visited_at = calloc(VISITED_SIZE, sizeof *run->visited_at);
    run->steps = calloc(STEPS_SIZE, sizeof *run->steps);
    if (vocab != NULL)
        run->masks = calloc((size_t)GR_MASKS * vocab->words + 1, sizeof *run->masks);
    if (!whole || run->moved == NULL || run->todo == NULL || run->done == NULL ||
        run->visited == NULL || run->visited_at == NULL || run->steps == NULL ||
        (vocab != NULL && run->masks == NULL)) {
        gr_run_free(run);
        return NULL;
    }
    touch(run->visited, VISITED_SIZE * sizeof *run->visited);
    touch(run->visited_at, VISITED_SIZE * sizeof *run->visited_at);
    touch(run->steps, STEPS_SIZE * sizeof *run->steps);
    if (vocab != NULL)
        touch(run->masks, 4 * (size_t)vocab->words * sizeof *run->masks);
    run->other = run->done + THREADS_MAX;
    run->looping = run->other + THREADS_MAX;
    return run;
}

static void pool_clear(gr_pool *p)
{
    memset(p->table, 0, p->size * sizeof *p->table);
    p->size = TABLE_SIZE_FIRST;
    p->entries = 0;
    p->used = 1;
}

static eng_grammar_run *spare_take(const eng_vocab *vocab)
{
    gr_spares *spares = vocab->spares;
    pthread_mutex_lock(&spares->lock);
    eng_grammar_run *run = spares->first;
    if (run != NULL) {
        spares->first = run->next_spare;
        spares->count--;
    }
    pthread_mutex_unlock(&spares->lock);
    if (run == NULL)
        return NULL;
    pool_clear(&run->frames);
    pool_clear(&run->configs);
    steps_forget(run);
    return run;
}

/* One that used much of its memory gives it back. */
static bool spare_give(const eng_vocab *vocab, eng_grammar_run *run)
{
    gr_spares *spares = vocab->spares;
    if (run->frames.size > SPARE_TABLE_MAX || run->configs.size > SPARE_TABLE_MAX)
        return false;
    pthread_mutex_lock(&spares->lock);
    bool kept = spares->count < SPARES_MAX;
    if (kept) {
        run->next_spare = spares->first;
        spares->first = run;
        spares->count++;
    }
    pthread_mutex_unlock(&spares->lock);
    return kept;
}

base_code eng_grammar_run_create(eng_grammar_run **out, eng_grammar *grammar,
                                 const eng_vocab *vocab, base_err *err)
{
    *out = NULL;
    eng_grammar_run *run = vocab == NULL ? NULL : spare_take(vocab);
    if (run == NULL)
        run = run_allocate(vocab);
    if (run == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for a grammar's run");
    run->grammar = eng_grammar_ref(grammar);
    run->vocab = vocab;
    run->full = false;
    closing_begin(run, GR_STYLE_OPEN);
    const gr_rule *root = &grammar->rules.data[grammar->root];
    visit(run, root->start, frame_make(run, 0, 1, root->words));
    run->start = closing_end(run);
    if (run->start == 0) {
        eng_grammar_run_destroy(run);
        return base_fail(err, BASE_TOO_LONG, "the grammar has more than %u ways to begin",
                         THREADS_MAX);
    }
    *out = run;
    return BASE_OK;
}

void eng_grammar_run_destroy(eng_grammar_run *run)
{
    if (run == NULL)
        return;
    DCHECK(run->states == NULL);
    eng_grammar_unref(run->grammar);
    run->grammar = NULL;
    if (run->vocab == NULL || !spare_give(run->vocab, run))
        gr_run_free(run);
}

static void state_link(eng_grammar_state *state, eng_grammar_run *run, uint32_t config)
{
    *state = (eng_grammar_state){run, config, run->states, &run->states};
    if (run->states != NULL)
        run->states->link = &state->next;
    run->states = state;
}

void eng_grammar_start(eng_grammar_state *state, eng_grammar_run *run)
{
    state_link(state, run, run->start);
}

void eng_grammar_clone(eng_grammar_state *out, const eng_grammar_state *state)
{
    state_link(out, state->run, state->config);
}

void eng_grammar_end(eng_grammar_state *state)
{
    if (state->run == NULL)
        return;
    *state->link = state->next;
    if (state->next != NULL)
        state->next->link = state->link;
    *state = (eng_grammar_state){0};
}

bool eng_grammar_advance(eng_grammar_state *state, const char *bytes, size_t length)
{
    eng_grammar_run *run = state->run;
    uint32_t before = state->config;
    /* The state's own place is swept along; the one to go back to is kept by a second state. */
    eng_grammar_state back;
    eng_grammar_clone(&back, state);
    for (size_t i = 0; i < length && state->config != 0; i++) {
        gr_run_make_room(run);
        state->config = gr_run_step(run, state->config, (uint8_t)bytes[i]);
    }
    bool done = state->config != 0 && before != 0;
    if (!done)
        state->config = back.config;
    eng_grammar_end(&back);
    return done;
}

bool eng_grammar_accepts(const eng_grammar_state *state)
{
    return state->config != 0 && state->run->configs.words[state->config + GR_CONFIG_ACCEPTS];
}

/* The only byte that may follow, -1 if there are several or none. */
static int only_byte(const eng_grammar_run *run, uint32_t config)
{
    const eng_grammar *g = run->grammar;
    const uint32_t *words = run->configs.words + config;
    int only = -1;
    if (words[GR_CONFIG_ACCEPTS])
        return -1;
    for (uint32_t i = 0; i < words[GR_CONFIG_THREADS]; i++) {
        const gr_node *node = &g->nodes.data[words[GR_CONFIG_PAIRS + 2 * i]];
        for (uint32_t k = 0; k < node->b; k++) {
            const gr_edge *edge = &g->edges.data[node->a + k];
            if (edge->to == GR_NONE)
                continue;
            if (edge->lo != edge->hi || (only >= 0 && only != edge->lo))
                return -1;
            only = edge->lo;
        }
    }
    return only;
}

size_t eng_grammar_forced(eng_grammar_state *state, char *out, size_t max)
{
    eng_grammar_run *run = state->run;
    size_t n = 0;
    gr_run_make_room(run);
    uint32_t config = state->config;
    for (int byte; n < max && config != 0 && (byte = only_byte(run, config)) >= 0;) {
        config = gr_run_step(run, config, (uint8_t)byte);
        if (config == 0)
            break;
        out[n++] = (char)byte;
    }
    return n;
}
