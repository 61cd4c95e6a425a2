/* The graph and its checks, the vocabulary's tries, and the automaton that follows a text.
 *
 * A configuration is the set of threads (state, frame) that the text so far may be in, closed over
 * steps that read nothing, so every thread stands before a byte. Frames and configurations are
 * stored once (hash-consed) in two pools of 32-bit words; their number is their place. A frame's
 * parent lies before it, so one ascending pass sweeps the pool.
 *
 * A mask is made class by class (grammar_internal.h): where a thread reads every byte of a class
 * and stays where it is, as inside a string, all tokens of the class are allowed at once; the other
 * threads walk the class's trie, and only the small class of odd tokens is always walked. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "engine/grammar_internal.h"

#define NODES_MAX_DEFAULT (1u << 19)
#define WORK_MAX_DEFAULT (1u << 24)
#define MEMORY_MAX_DEFAULT ((size_t)64 << 20)
#define DEPTH_MAX_DEFAULT 256
#define DEPTH_MAX_LIMIT 4096
/* Longer tokens are never allowed: none of a real vocabulary is. */
#define TOKEN_BYTES_MAX 256
/* Threads of one configuration; more are refused. */
#define THREADS_MAX 8192u
#define VISITED_SIZE (4u * THREADS_MAX)
/* Words of each pool, touched only as far as they are used. */
#define POOL_WORDS (1u << 20)
#define TABLE_SIZE (1u << 19)
#define STEPS_SIZE (1u << 16)
#define MASKS 64u

/* ---- compiling ---- */

void gr_fail(gr_compile *c, base_code code, const char *param, const char *fmt, ...)
{
    char text[192];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    base_fail_param(c->err, code, param == NULL ? "" : param, "%s", text);
    longjmp(c->fail, (int)code);
}

void *gr_alloc(gr_compile *c, size_t count, size_t size)
{
    gr_work(c, 1 + count * size / 256);
    void *p = base_arena_calloc(c->arena, count > 0 ? count : 1, size);
    if (p == NULL)
        gr_fail(c, BASE_TOO_LONG, NULL, "the grammar needs more than %zu bytes to compile",
                c->options.limits.memory_max);
    return p;
}

void gr_work(gr_compile *c, size_t steps)
{
    if (steps > c->work)
        gr_fail(c, BASE_TOO_LONG, NULL, "the grammar needs more than %u steps to compile",
                c->options.limits.work_max);
    c->work -= (uint32_t)steps;
}

void gr_grow(gr_compile *c, void **data, uint32_t *count, uint32_t *capacity, size_t size)
{
    if (*count == *capacity) {
        /* Edges are the most there is: about four a node. */
        uint32_t more = *capacity == 0 ? 64 : *capacity * 2;
        if (more > 8 * c->g->nodes_max)
            gr_fail(c, BASE_TOO_LONG, NULL, "the grammar has more than %u states", c->g->nodes_max);
        void *grown = realloc(*data, more * size);
        if (grown == NULL)
            gr_fail(c, BASE_NOMEM, NULL, "no memory for a grammar");
        *data = grown;
        *capacity = more;
    }
    memset((char *)*data + *count * size, 0, size);
    ++*count;
}

uint32_t gr_node_add(gr_compile *c, gr_kind kind, uint32_t a, uint32_t b, uint32_t next)
{
    if (c->g->nodes.count >= c->g->nodes_max)
        gr_fail(c, BASE_TOO_LONG, NULL, "the grammar has more than %u states", c->g->nodes_max);
    gr_work(c, 1);
    *gr_push(c, &c->g->nodes) = (gr_node){.kind = (uint8_t)kind, .a = a, .b = b, .c = next};
    return c->g->nodes.count - 1;
}

void gr_bytes_set(gr_compile *c, uint32_t node, const gr_edge *edges, uint32_t count)
{
    uint32_t first = c->g->edges.count;
    gr_work(c, count);
    for (uint32_t i = 0; i < count; i++)
        *gr_push(c, &c->g->edges) = edges[i];
    c->g->nodes.data[node].kind = GR_BYTES;
    c->g->nodes.data[node].a = first;
    c->g->nodes.data[node].b = count;
}

uint32_t gr_bytes_add(gr_compile *c, const gr_edge *edges, uint32_t count)
{
    uint32_t node = gr_node_add(c, GR_BYTES, 0, 0, 0);
    gr_bytes_set(c, node, edges, count);
    return node;
}

void gr_fork_set(gr_compile *c, uint32_t node, const uint32_t *targets, uint32_t count)
{
    uint32_t first = c->g->lists.count;
    gr_work(c, count);
    for (uint32_t i = 0; i < count; i++)
        *gr_push(c, &c->g->lists) = targets[i];
    c->g->nodes.data[node].kind = GR_FORK;
    c->g->nodes.data[node].a = first;
    c->g->nodes.data[node].b = count;
}

uint32_t gr_fork_add(gr_compile *c, const uint32_t *targets, uint32_t count)
{
    if (count == 0)
        return GR_NONE;
    if (count == 1)
        return targets[0];
    uint32_t node = gr_node_add(c, GR_FORK, 0, 0, 0);
    gr_fork_set(c, node, targets, count);
    return node;
}

uint32_t gr_literal(gr_compile *c, const char *bytes, size_t length, uint32_t next)
{
    for (size_t i = length; i-- > 0;) {
        uint8_t byte = (uint8_t)bytes[i];
        next = gr_bytes_add(c, &(gr_edge){byte, byte, next}, 1);
    }
    return next;
}

uint32_t gr_rule_add(gr_compile *c)
{
    *gr_push(c, &c->g->rules) = (gr_rule){.height = GR_INFINITE};
    return c->g->rules.count - 1;
}

static uint32_t rule_height(const eng_grammar *g, uint32_t rule)
{
    return g->rules.data[rule].height;
}

/* Least frames of an item at a place that counts for all `matches`. */
static uint32_t place_height(const eng_grammar *g, const gr_array *array, uint32_t place,
                             uint32_t matches)
{
    uint32_t least = GR_INFINITE;
    for (uint32_t i = 0; i < array->item_count; i++) {
        const gr_item *item = &g->items.data[array->items + i];
        uint32_t index = item->index == GR_INFINITE ? array->prefix : item->index;
        uint32_t height = rule_height(g, item->rule);
        if (index == place && (item->matches & matches) == matches && height < least)
            least = height;
    }
    return least;
}

/* Frames above its own that a node needs until its rule returns. */
static uint32_t node_height(const eng_grammar *g, const uint32_t *heights, uint32_t index)
{
    const gr_node *node = &g->nodes.data[index];
    uint32_t least = GR_INFINITE, need;
    switch ((gr_kind)node->kind) {
    case GR_DEAD:
        return GR_INFINITE;
    case GR_BYTES:
        for (uint32_t i = 0; i < node->b; i++) {
            need = heights[g->edges.data[node->a + i].to];
            least = need < least ? need : least;
        }
        return least;
    case GR_FORK:
        for (uint32_t i = 0; i < node->b; i++) {
            need = heights[g->lists.data[node->a + i]];
            least = need < least ? need : least;
        }
        return least;
    case GR_CALL:
        need = rule_height(g, node->a);
        return need > heights[node->b] ? need : heights[node->b];
    case GR_RETURN:
    case GR_ACCEPT:
        return 0;
    case GR_OBJECT_END: {
        const gr_object *object = &g->objects.data[node->a];
        least = heights[node->c];
        for (uint32_t i = 0; i < object->members; i++)
            if (g->bits.data[object->required + i / 64] >> i % 64 & 1) {
                need = rule_height(g, g->lists.data[object->rules + i]);
                least = need > least ? need : least;
            }
        return least;
    }
    case GR_ARRAY_END: {
        const gr_array *array = &g->arrays.data[node->a];
        least = heights[node->c];
        if (array->min > array->max)
            return GR_INFINITE;
        for (uint32_t i = 0; i < array->min && i <= array->prefix; i++) {
            need = place_height(g, array, i, 0);
            least = need > least ? need : least;
        }
        for (uint32_t w = 0; w < array->want_count; w++) {
            uint32_t best = GR_INFINITE;
            for (uint32_t i = 0; array->want[w].min > 0 && i <= array->prefix; i++) {
                need = place_height(g, array, i, 1u << w);
                best = need < best ? need : best;
            }
            if (array->want[w].min > 0)
                least = best > least ? best : least;
        }
        return least;
    }
    case GR_KEY:
    case GR_EXTRA:
    case GR_MORE:
    case GR_ITEM:
    case GR_MORE_ITEMS:
    case GR_CHAR:
    case GR_STRING_END:
        return heights[node->c];
    }
    return GR_INFINITE;
}

void gr_heights(gr_compile *c)
{
    eng_grammar *g = c->g;
    uint32_t *heights = gr_alloc(c, g->nodes.count, sizeof *heights);
    memset(heights, 0xFF, g->nodes.count * sizeof *heights);
    /* Values only fall, so the passes end; most graphs are built from their ends, which one
     * ascending pass follows. */
    for (bool changed = true, down = false; changed; down = !down) {
        changed = false;
        gr_work(c, g->nodes.count + g->edges.count / 4 + 1);
        for (uint32_t k = 0; k < g->nodes.count; k++) {
            uint32_t i = down ? g->nodes.count - 1 - k : k;
            uint32_t height = node_height(g, heights, i);
            if (height < heights[i]) {
                heights[i] = height;
                changed = true;
            }
        }
        for (uint32_t i = 0; i < g->rules.count; i++) {
            uint32_t start = heights[g->rules.data[i].start];
            uint32_t height = start == GR_INFINITE ? GR_INFINITE : start + 1;
            if (height < g->rules.data[i].height) {
                g->rules.data[i].height = height;
                changed = true;
            }
        }
    }
    for (uint32_t i = 0; i < g->nodes.count; i++)
        if (heights[i] == GR_INFINITE)
            g->nodes.data[i].kind = GR_DEAD;
    for (uint32_t i = 0; i < g->edges.count; i++)
        if (heights[g->edges.data[i].to] == GR_INFINITE)
            g->edges.data[i].to = GR_NONE;
}

base_code gr_compile_run(eng_grammar **out, gr_body *body, void *context,
                         const eng_grammar_options *options, base_err *err)
{
    static const eng_grammar_options none = {0};
    *out = NULL;
    gr_compile *c = calloc(1, sizeof *c);
    eng_grammar *g = calloc(1, sizeof *g);
    base_code code;
    if (c == NULL || g == NULL) {
        free(c);
        free(g);
        return base_fail(err, BASE_NOMEM, "no memory for a grammar");
    }
    c->g = g;
    c->err = err;
    c->options = options == NULL ? none : *options;
    eng_grammar_limits *limits = &c->options.limits;
    limits->nodes_max = limits->nodes_max > 0 ? limits->nodes_max : NODES_MAX_DEFAULT;
    limits->work_max = limits->work_max > 0 ? limits->work_max : WORK_MAX_DEFAULT;
    limits->memory_max = limits->memory_max > 0 ? limits->memory_max : MEMORY_MAX_DEFAULT;
    limits->depth_max = limits->depth_max > 0 ? limits->depth_max : DEPTH_MAX_DEFAULT;
    limits->depth_max = (uint32_t)base_min(limits->depth_max, DEPTH_MAX_LIMIT);
    g->refs = 1;
    g->nodes_max = (uint32_t)base_min(limits->nodes_max, 1u << 26);
    g->depth_max = limits->depth_max;
    c->work = limits->work_max;
    c->arena = base_arena_create(4096, limits->memory_max);
    if (c->arena == NULL) {
        code = base_fail(err, BASE_NOMEM, "no memory for a grammar");
    } else if ((code = (base_code)setjmp(c->fail)) == BASE_OK) {
        gr_node_add(c, GR_DEAD, 0, 0, 0);
        gr_node_add(c, GR_ACCEPT, 0, 0, 0);
        c->g->root = body(c, context);
        gr_heights(c);
        if (rule_height(c->g, c->g->root) > c->g->depth_max)
            gr_fail(c, BASE_INVALID, NULL, "the grammar admits no text");
    }
    /* Locals that changed after setjmp are read through the heap only. */
    g = c->g;
    base_arena_destroy(c->arena);
    free(c);
    if (code != BASE_OK) {
        eng_grammar_unref(g);
        return code;
    }
    *out = g;
    return BASE_OK;
}

eng_grammar *eng_grammar_ref(eng_grammar *grammar)
{
    __atomic_fetch_add(&grammar->refs, 1, __ATOMIC_RELAXED);
    return grammar;
}

void eng_grammar_unref(eng_grammar *g)
{
    if (g == NULL || __atomic_sub_fetch(&g->refs, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    free(g->nodes.data);
    free(g->edges.data);
    free(g->lists.data);
    free(g->rules.data);
    free(g->objects.data);
    free(g->arrays.data);
    free(g->items.data);
    free(g->lengths.data);
    free(g->runs.data);
    free(g->bits.data);
    free(g);
}

size_t eng_grammar_bytes(const eng_grammar *g)
{
    return sizeof *g + g->nodes.capacity * sizeof(gr_node) + g->edges.capacity * sizeof(gr_edge) +
           g->lists.capacity * sizeof(uint32_t) + g->rules.capacity * sizeof(gr_rule) +
           g->objects.capacity * sizeof(gr_object) + g->arrays.capacity * sizeof(gr_array) +
           g->items.capacity * sizeof(gr_item) + g->lengths.capacity * sizeof(gr_length) +
           g->runs.capacity * sizeof(gr_runs) + g->bits.capacity * sizeof(uint64_t);
}

uint32_t eng_grammar_nodes(const eng_grammar *g)
{
    return g->nodes.count;
}

/* ---- the vocabulary ---- */

typedef struct trie_node {
    uint8_t byte;
    uint16_t depth; /* of this byte, from 0 */
    uint32_t end;   /* the node after this one's subtree */
    int32_t token;  /* that ends here, -1 if none */
} trie_node;

typedef struct token_text {
    const char *bytes;
    uint32_t length, chars;
    int32_t id;
    uint8_t class_index;
} token_text;

typedef struct vocab_class {
    trie_node *nodes;
    uint32_t node_count;
    int32_t *ids; /* by characters, fewest first */
    uint16_t *chars;
    uint32_t count;
    uint32_t *mask; /* of all ids */
} vocab_class;

struct eng_vocab {
    uint32_t count, words;
    int32_t *same; /* [count] another token with the same bytes, -1 if none */
    vocab_class classes[GR_CLASSES];
};

bool gr_class_has(uint32_t class_index, uint8_t b)
{
    switch (class_index) {
    case GR_CLASS_LOWER:
        return b >= 'a' && b <= 'z';
    case GR_CLASS_DIGIT:
        return b >= '0' && b <= '9';
    case GR_CLASS_WORD:
        return (b >= 'a' && b <= 'z') || (b >= 'A' && b <= 'Z') || (b >= '0' && b <= '9');
    case GR_CLASS_NAME:
        return gr_class_has(GR_CLASS_WORD, b) || (b != 0 && strchr("_-./:", b) != NULL);
    default:
        return b >= 0x20 && b < 0x7F && b != '"' && b != '\\';
    }
}

static void classify(token_text *token)
{
    for (uint32_t k = 0; k <= GR_CLASS_ASCII; k++) {
        uint32_t i = 0;
        while (i < token->length && gr_class_has(k, (uint8_t)token->bytes[i]))
            i++;
        if (i == token->length) {
            token->class_index = (uint8_t)k;
            token->chars = token->length;
            return;
        }
    }
    token->class_index = GR_CLASS_REST;
    size_t whole = base_utf8_complete(token->bytes, token->length);
    if (!base_utf8_valid(token->bytes, whole))
        return;
    for (uint32_t i = 0; i < token->length; i++) {
        uint8_t b = (uint8_t)token->bytes[i];
        if (b < 0x20 || b == '"' || b == '\\')
            return;
        token->chars += (b & 0xC0) != 0x80;
    }
    token->class_index = GR_CLASS_TEXT;
}

static int by_bytes(const void *pa, const void *pb)
{
    const token_text *a = pa, *b = pb;
    if (a->class_index != b->class_index)
        return a->class_index < b->class_index ? -1 : 1;
    int d = memcmp(a->bytes, b->bytes, base_min(a->length, b->length));
    if (d != 0)
        return d;
    if (a->length != b->length)
        return a->length < b->length ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

static int by_chars(const void *pa, const void *pb)
{
    const token_text *a = pa, *b = pb;
    if (a->chars != b->chars)
        return a->chars < b->chars ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

static uint32_t shared_prefix(const token_text *a, const token_text *b)
{
    uint32_t n = 0;
    while (n < a->length && n < b->length && a->bytes[n] == b->bytes[n])
        n++;
    return n;
}

static bool class_build(eng_vocab *vocab, vocab_class *class, token_text *tokens, uint32_t count)
{
    uint32_t nodes = 0;
    for (uint32_t i = 0; i < count; i++)
        nodes += tokens[i].length - (i > 0 ? shared_prefix(&tokens[i - 1], &tokens[i]) : 0);
    class->nodes = calloc(nodes + 1, sizeof *class->nodes);
    class->ids = calloc(count + 1, sizeof *class->ids);
    class->chars = calloc(count + 1, sizeof *class->chars);
    class->mask = calloc(vocab->words + 1, sizeof *class->mask);
    if (class->nodes == NULL || class->ids == NULL || class->chars == NULL || class->mask == NULL)
        return false;
    uint32_t open[TOKEN_BYTES_MAX], depth = 0, at = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t keep = i > 0 ? shared_prefix(&tokens[i - 1], &tokens[i]) : 0;
        for (; depth > keep; depth--)
            class->nodes[open[depth - 1]].end = at;
        for (; depth < tokens[i].length; depth++) {
            class->nodes[at] = (trie_node){
                .byte = (uint8_t)tokens[i].bytes[depth], .depth = (uint16_t)depth, .token = -1};
            open[depth] = at++;
        }
        int32_t *ends = &class->nodes[open[depth - 1]].token;
        vocab->same[tokens[i].id] = *ends;
        *ends = tokens[i].id;
        class->mask[tokens[i].id / 32] |= 1u << tokens[i].id % 32;
    }
    for (; depth > 0; depth--)
        class->nodes[open[depth - 1]].end = at;
    class->node_count = at;
    class->count = count;
    qsort(tokens, count, sizeof *tokens, by_chars);
    for (uint32_t i = 0; i < count; i++) {
        class->ids[i] = tokens[i].id;
        class->chars[i] = (uint16_t)tokens[i].chars;
    }
    return true;
}

base_code eng_vocab_create(eng_vocab **out, eng_vocab_bytes *bytes, const void *context,
                           uint32_t count, base_err *err)
{
    *out = NULL;
    eng_vocab *vocab = calloc(1, sizeof *vocab);
    token_text *tokens = calloc((size_t)count + 1, sizeof *tokens);
    uint32_t used = 0;
    bool whole = vocab != NULL && tokens != NULL;
    if (whole) {
        vocab->count = count;
        vocab->words = (count + 31) / 32;
        vocab->same = calloc((size_t)count + 1, sizeof *vocab->same);
        whole = vocab->same != NULL;
    }
    for (uint32_t id = 0; whole && id < count; id++) {
        size_t length = 0;
        const char *text = bytes(context, (int32_t)id, &length);
        vocab->same[id] = -1;
        if (text == NULL || length == 0 || length > TOKEN_BYTES_MAX)
            continue;
        tokens[used] = (token_text){.bytes = text, .length = (uint32_t)length, .id = (int32_t)id};
        classify(&tokens[used++]);
    }
    if (whole)
        qsort(tokens, used, sizeof *tokens, by_bytes);
    for (uint32_t k = 0, first = 0; whole && k < GR_CLASSES; k++) {
        uint32_t n = 0;
        while (first + n < used && tokens[first + n].class_index == k)
            n++;
        whole = class_build(vocab, &vocab->classes[k], tokens + first, n);
        first += n;
    }
    free(tokens);
    if (!whole) {
        eng_vocab_destroy(vocab);
        return base_fail(err, BASE_NOMEM, "no memory for the tries of %u tokens", count);
    }
    *out = vocab;
    return BASE_OK;
}

static const char *ordinary_bytes(const void *context, int32_t id, size_t *length)
{
    return eng_tok_is_special(context, id) ? NULL : eng_tok_bytes(context, id, length);
}

base_code eng_vocab_create_tok(eng_vocab **out, const eng_tok *tok, base_err *err)
{
    return eng_vocab_create(out, ordinary_bytes, tok, eng_tok_vocab(tok), err);
}

void eng_vocab_destroy(eng_vocab *vocab)
{
    if (vocab == NULL)
        return;
    for (uint32_t k = 0; k < GR_CLASSES; k++) {
        free(vocab->classes[k].nodes);
        free(vocab->classes[k].ids);
        free(vocab->classes[k].chars);
        free(vocab->classes[k].mask);
    }
    free(vocab->same);
    free(vocab);
}

uint32_t eng_vocab_words(const eng_vocab *vocab)
{
    return vocab->words;
}

/* ---- frames and configurations ---- */

enum { FRAME_PARENT, FRAME_NEXT, FRAME_COUNT, FRAME_SHAPE, FRAME_WORDS };
enum { CONFIG_THREADS, CONFIG_ACCEPTS, CONFIG_MASK, CONFIG_PAIRS };

typedef struct pool {
    uint32_t *words; /* word 0 is not used, so that 0 is no entry */
    uint32_t used;
    uint32_t *table; /* open addressing, TABLE_SIZE */
    uint32_t entries;
} pool;

typedef struct thread {
    uint32_t node, frame;
} thread;

typedef struct step {
    uint32_t config, to;
    uint32_t byte; /* 1 + byte, 0 for an empty slot */
} step;

struct eng_grammar_run {
    eng_grammar *grammar;
    const eng_vocab *vocab;
    pool frames, configs;
    uint32_t *moved; /* [POOL_WORDS] while sweeping */
    bool full;       /* a pool or a bound was hit; what was asked for is refused */
    /* Closing over steps that read nothing. */
    thread *todo, *done;
    uint32_t todo_count, done_count;
    thread *visited;
    uint32_t *visited_at;
    uint32_t visit, visited_count;
    bool accepts;
    step *steps;
    uint32_t *masks; /* [MASKS][words] */
    uint32_t mask_config[MASKS];
    uint8_t mask_used[MASKS];
    uint32_t mask_hand;
    uint32_t start;
    eng_grammar_state *states;
};

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
    return FRAME_WORDS + 2 * (frame[FRAME_SHAPE] & 0xFFFF);
}

static uint32_t config_size(const uint32_t *config)
{
    return CONFIG_PAIRS + 2 * config[CONFIG_THREADS];
}

static uint32_t frame_hash(const uint32_t *frame)
{
    return hash_words(frame, frame_size(frame), 1);
}

static uint32_t config_hash(const uint32_t *config)
{
    return hash_words(config + CONFIG_PAIRS, 2 * config[CONFIG_THREADS], config[CONFIG_ACCEPTS]);
}

/* Stores the `size` words that the caller wrote behind the pool's end, or finds them. */
static uint32_t pool_intern(eng_grammar_run *run, pool *p, uint32_t hash, uint32_t size,
                            uint32_t skip)
{
    const uint32_t *fresh = p->words + p->used;
    uint32_t slot = hash & (TABLE_SIZE - 1);
    for (; p->table[slot] != 0; slot = (slot + 1) & (TABLE_SIZE - 1)) {
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
    p->table[slot] = p->used;
    p->entries++;
    p->used += size;
    return p->table[slot];
}

static bool pool_room(eng_grammar_run *run, const pool *p, uint32_t size)
{
    if (size < POOL_WORDS - p->used)
        return true;
    run->full = true;
    return false;
}

static const uint32_t *frame_at(const eng_grammar_run *run, uint32_t frame)
{
    return run->frames.words + frame;
}

static uint32_t frame_depth(const eng_grammar_run *run, uint32_t frame)
{
    return frame == 0 ? 0 : frame_at(run, frame)[FRAME_SHAPE] >> 16;
}

static uint32_t frame_make(eng_grammar_run *run, uint32_t parent, uint32_t next, uint32_t words)
{
    uint32_t size = FRAME_WORDS + 2 * words;
    if (!pool_room(run, &run->frames, size))
        return 0;
    uint32_t *frame = run->frames.words + run->frames.used;
    memset(frame, 0, size * sizeof *frame);
    frame[FRAME_PARENT] = parent;
    frame[FRAME_NEXT] = next;
    frame[FRAME_SHAPE] = (frame_depth(run, parent) + 1) << 16 | words;
    return pool_intern(run, &run->frames, frame_hash(frame), size, UINT32_MAX);
}

/* The frame with one more in its count (kept at `saturate`), and a bit set. */
static uint32_t frame_with(eng_grammar_run *run, uint32_t old, uint32_t saturate, uint32_t bit)
{
    uint32_t size = frame_size(frame_at(run, old));
    if (!pool_room(run, &run->frames, size))
        return 0;
    uint32_t *frame = run->frames.words + run->frames.used;
    memcpy(frame, frame_at(run, old), size * sizeof *frame);
    if (frame[FRAME_COUNT] < saturate)
        frame[FRAME_COUNT]++;
    if (bit != GR_INFINITE)
        frame[FRAME_WORDS + bit / 32] |= 1u << bit % 32;
    return pool_intern(run, &run->frames, frame_hash(frame), size, UINT32_MAX);
}

/* The frame after an item: one more, and what it counts for. */
static uint32_t frame_item(eng_grammar_run *run, uint32_t old, const gr_array *array,
                           const gr_item *item)
{
    uint32_t size = frame_size(frame_at(run, old));
    if (item->matches == 0)
        return frame_with(run, old, array->saturate, item->value);
    if (!pool_room(run, &run->frames, size))
        return 0;
    uint32_t *frame = run->frames.words + run->frames.used;
    memcpy(frame, frame_at(run, old), size * sizeof *frame);
    if (frame[FRAME_COUNT] < array->saturate)
        frame[FRAME_COUNT]++;
    for (uint32_t w = 0; w < array->want_count; w++) {
        uint32_t keep = array->want[w].max == GR_INFINITE ? array->want[w].min : array->want[w].max;
        if ((item->matches >> w & 1) && frame[FRAME_WORDS + w] < keep)
            frame[FRAME_WORDS + w]++;
    }
    return pool_intern(run, &run->frames, frame_hash(frame), size, UINT32_MAX);
}

/* ---- guards ---- */

static uint64_t seen_word(const uint32_t *frame, uint32_t word)
{
    return frame[FRAME_WORDS + 2 * word] | (uint64_t)frame[FRAME_WORDS + 2 * word + 1] << 32;
}

static bool seen(const uint32_t *frame, uint32_t bit)
{
    return frame[FRAME_WORDS + bit / 32] >> bit % 32 & 1;
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

static bool member_usable(const eng_grammar *g, const gr_object *object, uint32_t member)
{
    return rule_height(g, g->lists.data[object->rules + member]) != GR_INFINITE;
}

static bool member_allowed(const eng_grammar *g, const gr_object *object, const uint32_t *frame,
                           uint32_t member)
{
    if (seen(frame, member) || !member_usable(g, object, member))
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
    if (object->max != GR_INFINITE && frame[FRAME_COUNT] + 1 + lack > object->max)
        return false;
    if (object->ordered && !object->extras) {
        uint32_t left = 0;
        for (uint32_t i = member + 1; i < object->members; i++)
            left += member_usable(g, object, i);
        if (frame[FRAME_COUNT] + 1 + left < object->min)
            return false;
    }
    return true;
}

static bool extra_allowed(const eng_grammar *g, const gr_object *object, const uint32_t *frame)
{
    if (!object->extras)
        return false;
    uint32_t lack = missing(g, object, frame, object->members);
    if (object->ordered && lack > 0)
        return false;
    return object->max == GR_INFINITE || frame[FRAME_COUNT] + 1 + lack <= object->max;
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
    uint32_t count = frame[FRAME_WORDS + w] + (matches >> w & 1);
    return count < array->want[w].min ? array->want[w].min - count : 0;
}

/* Whether what is still wanted finds room behind the item that comes next. */
static bool wants_fit(const eng_grammar *g, const gr_array *array, const gr_item *item,
                      const uint32_t *frame)
{
    uint32_t count = frame[FRAME_COUNT], most = 0, sum = 0;
    for (uint32_t w = 0; w < array->want_count; w++) {
        uint32_t left = want_left(array, frame, w, item->matches), places = 0;
        if ((item->matches >> w & 1) && frame[FRAME_WORDS + w] >= array->want[w].max)
            return false;
        most = left > most ? left : most;
        sum += left;
        /* Past the prefix there is no end of places but max. */
        if (left == 0 || place_height(g, array, array->prefix, 1u << w) != GR_INFINITE)
            continue;
        for (uint32_t i = count + 1; i < array->prefix && i < array->max; i++)
            places += place_height(g, array, i, 1u << w) != GR_INFINITE;
        if (places < left)
            return false;
    }
    if (array->max == GR_INFINITE || most == 0)
        return true;
    bool shared =
        place_height(g, array, array->prefix, (1u << array->want_count) - 1) != GR_INFINITE;
    return count + 1 + (shared ? most : sum) <= array->max;
}

static bool item_allowed(const eng_grammar *g, const gr_array *array, const gr_item *item,
                         const uint32_t *frame)
{
    uint32_t count = frame[FRAME_COUNT];
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
        if (item_allowed(g, array, item, frame) && rule_height(g, item->rule) != GR_INFINITE)
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

static void visit(eng_grammar_run *run, uint32_t node, uint32_t frame)
{
    if (node == GR_NONE || run->grammar->nodes.data[node].kind == GR_DEAD)
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
    run->visited[slot] = (thread){node, frame};
    run->todo[run->todo_count++] = (thread){node, frame};
}

static void closing_begin(eng_grammar_run *run)
{
    run->visit++;
    if (run->visit == 0) {
        memset(run->visited_at, 0, VISITED_SIZE * sizeof *run->visited_at);
        run->visit = 1;
    }
    run->visited_count = run->todo_count = run->done_count = 0;
    run->accepts = false;
}

static void call(eng_grammar_run *run, const gr_node *node, uint32_t frame)
{
    const eng_grammar *g = run->grammar;
    const gr_rule *rule = &g->rules.data[node->a];
    uint32_t parent = frame, next = node->b;
    /* A call that is the last thing a rule does needs that rule's frame no more, so a list written
     * as a rule that ends in itself stays flat. */
    if (g->nodes.data[next].kind == GR_RETURN) {
        parent = frame_at(run, frame)[FRAME_PARENT];
        next = frame_at(run, frame)[FRAME_NEXT];
    }
    if (rule->height > g->depth_max || frame_depth(run, parent) + rule->height > g->depth_max)
        return;
    uint32_t made = frame_make(run, parent, next, rule->words);
    if (made != 0)
        visit(run, rule->start, made);
}

static void close_one(eng_grammar_run *run, thread t)
{
    const eng_grammar *g = run->grammar;
    const gr_node *node = &g->nodes.data[t.node];
    const uint32_t *frame = frame_at(run, t.frame);
    uint32_t to = t.frame;
    switch ((gr_kind)node->kind) {
    case GR_DEAD:
        return;
    case GR_BYTES:
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
        visit(run, frame[FRAME_NEXT], frame[FRAME_PARENT]);
        return;
    case GR_ACCEPT:
        run->accepts = true;
        return;
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
            (object->counted && frame[FRAME_COUNT] < object->min))
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
        if (frame[FRAME_COUNT] < array->min || !wants_met(array, frame))
            return;
        break;
    }
    case GR_CHAR: {
        const gr_length *length = &g->lengths.data[node->a];
        if (frame[FRAME_COUNT] >= length->max)
            return;
        to = frame_with(run, t.frame, length->max == GR_INFINITE ? length->min : length->max,
                        GR_INFINITE);
        break;
    }
    case GR_STRING_END:
        if (frame[FRAME_COUNT] < g->lengths.data[node->a].min)
            return;
        break;
    }
    if (to != 0)
        visit(run, node->c, to);
}

static int by_node(const void *pa, const void *pb)
{
    const thread *a = pa, *b = pb;
    if (a->node != b->node)
        return a->node < b->node ? -1 : 1;
    return a->frame < b->frame ? -1 : a->frame > b->frame;
}

/* The configuration of the threads in `done`; 0 if there is nothing, or no room. */
static uint32_t config_store(eng_grammar_run *run)
{
    uint32_t n = run->done_count, size = CONFIG_PAIRS + 2 * n;
    if (run->full || (n == 0 && !run->accepts) || !pool_room(run, &run->configs, size))
        return 0;
    if (n > 32) {
        qsort(run->done, n, sizeof *run->done, by_node);
    } else {
        for (uint32_t i = 1; i < n; i++)
            for (uint32_t j = i; j > 0 && by_node(&run->done[j - 1], &run->done[j]) > 0; j--) {
                thread t = run->done[j];
                run->done[j] = run->done[j - 1];
                run->done[j - 1] = t;
            }
    }
    uint32_t *config = run->configs.words + run->configs.used;
    config[CONFIG_THREADS] = n;
    config[CONFIG_ACCEPTS] = run->accepts;
    config[CONFIG_MASK] = 0;
    memcpy(config + CONFIG_PAIRS, run->done, n * sizeof *run->done);
    return pool_intern(run, &run->configs, config_hash(config), size, CONFIG_MASK);
}

static uint32_t closing_end(eng_grammar_run *run)
{
    while (run->todo_count > 0 && !run->full)
        close_one(run, run->todo[--run->todo_count]);
    return config_store(run);
}

static uint32_t step_bytes(eng_grammar_run *run, uint32_t config, uint8_t byte)
{
    const eng_grammar *g = run->grammar;
    step *cached = &run->steps[mix(mix(3, config), byte) & (STEPS_SIZE - 1)];
    if (cached->config == config && cached->byte == byte + 1u)
        return cached->to;
    closing_begin(run);
    uint32_t count = run->configs.words[config + CONFIG_THREADS];
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t *pair = run->configs.words + config + CONFIG_PAIRS + 2 * i;
        const gr_node *node = &g->nodes.data[pair[0]];
        const gr_edge *edge = &g->edges.data[node->a];
        for (uint32_t k = 0; k < node->b; k++)
            if (byte >= edge[k].lo && byte <= edge[k].hi)
                visit(run, edge[k].to, pair[1]);
    }
    uint32_t to = closing_end(run);
    if (!run->full)
        *cached = (step){config, to, byte + 1u};
    return to;
}

/* ---- sweeping ---- */

static void pool_rehash(pool *p, uint32_t (*hash)(const uint32_t *),
                        uint32_t (*size)(const uint32_t *))
{
    memset(p->table, 0, TABLE_SIZE * sizeof *p->table);
    p->entries = 0;
    for (uint32_t at = 1; at < p->used; at += size(p->words + at)) {
        uint32_t slot = hash(p->words + at) & (TABLE_SIZE - 1);
        while (p->table[slot] != 0)
            slot = (slot + 1) & (TABLE_SIZE - 1);
        p->table[slot] = at;
        p->entries++;
    }
}

static void steps_forget(eng_grammar_run *run)
{
    memset(run->steps, 0, STEPS_SIZE * sizeof *run->steps);
    memset(run->mask_config, 0, sizeof run->mask_config);
    memset(run->mask_used, 0, sizeof run->mask_used);
}

/* Keeps what the live states and the start reach. `moved` first marks, then maps. */
static void sweep(eng_grammar_run *run)
{
    pool *frames = &run->frames, *configs = &run->configs;
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
        configs->words[end + CONFIG_MASK] = 0;
        moved[at] = end;
        end += size;
    }
    configs->used = end;
    run->start = moved[run->start];
    for (eng_grammar_state *s = run->states; s != NULL; s = s->next)
        s->config = s->config == 0 ? 0 : moved[s->config];

    memset(moved, 0, frames->used * sizeof *moved);
    for (uint32_t at = 1; at < configs->used; at += config_size(configs->words + at))
        for (uint32_t i = 0; i < configs->words[at + CONFIG_THREADS]; i++)
            for (uint32_t f = configs->words[at + CONFIG_PAIRS + 2 * i + 1];
                 f != 0 && moved[f] == 0; f = frames->words[f + FRAME_PARENT])
                moved[f] = 1;
    end = 1;
    for (uint32_t at = 1, size; at < frames->used; at += size) {
        size = frame_size(frames->words + at);
        if (moved[at] == 0)
            continue;
        memmove(frames->words + end, frames->words + at, size * sizeof *moved);
        uint32_t *parent = &frames->words[end + FRAME_PARENT];
        *parent = *parent == 0 ? 0 : moved[*parent];
        moved[at] = end;
        end += size;
    }
    frames->used = end;
    for (uint32_t at = 1; at < configs->used; at += config_size(configs->words + at))
        for (uint32_t i = 0; i < configs->words[at + CONFIG_THREADS]; i++) {
            uint32_t *frame = &configs->words[at + CONFIG_PAIRS + 2 * i + 1];
            *frame = *frame == 0 ? 0 : moved[*frame];
        }
    pool_rehash(frames, frame_hash, frame_size);
    pool_rehash(configs, config_hash, config_size);
    steps_forget(run);
}

static void make_room(eng_grammar_run *run)
{
    run->full = false;
    if (run->frames.used > POOL_WORDS / 2 || run->configs.used > POOL_WORDS / 2 ||
        run->frames.entries > TABLE_SIZE / 2 || run->configs.entries > TABLE_SIZE / 2)
        sweep(run);
}

/* ---- runs and states ---- */

static bool pool_init(pool *p)
{
    p->words = calloc(POOL_WORDS, sizeof *p->words);
    p->table = calloc(TABLE_SIZE, sizeof *p->table);
    p->used = 1;
    return p->words != NULL && p->table != NULL;
}

base_code eng_grammar_run_create(eng_grammar_run **out, eng_grammar *grammar,
                                 const eng_vocab *vocab, base_err *err)
{
    *out = NULL;
    eng_grammar_run *run = calloc(1, sizeof *run);
    if (run == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for a grammar's run");
    run->grammar = eng_grammar_ref(grammar);
    run->vocab = vocab;
    bool whole = pool_init(&run->frames);
    whole = pool_init(&run->configs) && whole;
    run->moved = calloc(POOL_WORDS, sizeof *run->moved);
    run->todo = calloc(VISITED_SIZE, sizeof *run->todo);
    run->done = calloc(THREADS_MAX, sizeof *run->done);
    run->visited = calloc(VISITED_SIZE, sizeof *run->visited);
    run->visited_at = calloc(VISITED_SIZE, sizeof *run->visited_at);
    run->steps = calloc(STEPS_SIZE, sizeof *run->steps);
    if (vocab != NULL)
        run->masks = calloc((size_t)MASKS * vocab->words + 1, sizeof *run->masks);
    if (!whole || run->moved == NULL || run->todo == NULL || run->done == NULL ||
        run->visited == NULL || run->visited_at == NULL || run->steps == NULL ||
        (vocab != NULL && run->masks == NULL)) {
        eng_grammar_run_destroy(run);
        return base_fail(err, BASE_NOMEM, "no memory for a grammar's run");
    }
    closing_begin(run);
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
        make_room(run);
        state->config = step_bytes(run, state->config, (uint8_t)bytes[i]);
    }
    bool done = state->config != 0 && before != 0;
    if (!done)
        state->config = back.config;
    eng_grammar_end(&back);
    return done;
}

bool eng_grammar_accepts(const eng_grammar_state *state)
{
    return state->config != 0 && state->run->configs.words[state->config + CONFIG_ACCEPTS];
}

/* The only byte that may follow, -1 if there are several or none. */
static int only_byte(const eng_grammar_run *run, uint32_t config)
{
    const eng_grammar *g = run->grammar;
    const uint32_t *words = run->configs.words + config;
    int only = -1;
    if (words[CONFIG_ACCEPTS])
        return -1;
    for (uint32_t i = 0; i < words[CONFIG_THREADS]; i++) {
        const gr_node *node = &g->nodes.data[words[CONFIG_PAIRS + 2 * i]];
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
    make_room(run);
    uint32_t config = state->config;
    for (int byte; n < max && config != 0 && (byte = only_byte(run, config)) >= 0;) {
        config = step_bytes(run, config, (uint8_t)byte);
        if (config == 0)
            break;
        out[n++] = (char)byte;
    }
    return n;
}

/* ---- masks ---- */

static void mask_class(uint32_t *mask, const vocab_class *class, uint32_t words, uint32_t limit)
{
    uint32_t lo = 0, hi = class->count;
    while (lo < hi) { /* ids[..lo] have at most `limit` characters */
        uint32_t mid = (lo + hi) / 2;
        if (class->chars[mid] <= limit)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo == class->count) {
        for (uint32_t i = 0; i < words; i++)
            mask[i] |= class->mask[i];
        return;
    }
    for (uint32_t i = 0; i < lo; i++)
        mask[class->ids[i] / 32] |= 1u << class->ids[i] % 32;
}

static void mask_walk(eng_grammar_run *run, uint32_t *mask, const vocab_class *class,
                      uint32_t config)
{
    uint32_t path[TOKEN_BYTES_MAX + 1];
    path[0] = config;
    for (uint32_t i = 0; i < class->node_count;) {
        const trie_node *node = &class->nodes[i];
        uint32_t to = step_bytes(run, path[node->depth], node->byte);
        if (to == 0) {
            run->full = false;
            i = node->end;
            continue;
        }
        path[node->depth + 1] = to;
        for (int32_t id = node->token; id >= 0; id = run->vocab->same[id])
            mask[id / 32] |= 1u << id % 32;
        i++;
    }
}

static void mask_make(eng_grammar_run *run, uint32_t *mask, uint32_t config)
{
    const eng_grammar *g = run->grammar;
    const eng_vocab *vocab = run->vocab;
    uint32_t count = run->configs.words[config + CONFIG_THREADS];
    memset(mask, 0, vocab->words * sizeof *mask);
    for (uint32_t k = 0; k < GR_CLASSES; k++) {
        uint32_t limit = 0;
        if (vocab->classes[k].count == 0)
            continue;
        run->done_count = 0;
        run->accepts = false;
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t *pair = run->configs.words + config + CONFIG_PAIRS + 2 * i;
            const gr_node *node = &g->nodes.data[pair[0]];
            if (!(node->loops >> k & 1)) {
                run->done[run->done_count++] = (thread){pair[0], pair[1]};
                continue;
            }
            uint32_t left = GR_INFINITE;
            if (node->c != 0 && g->lengths.data[node->c - 1].max != GR_INFINITE)
                left = g->lengths.data[node->c - 1].max + 1 - frame_at(run, pair[1])[FRAME_COUNT];
            if (node->runs != 0)
                left = g->runs.data[node->runs - 1].limit[k];
            limit = left > limit ? left : limit;
        }
        if (limit > 0)
            mask_class(mask, &vocab->classes[k], vocab->words, limit);
        uint32_t rest = run->done_count == count ? config : config_store(run);
        if (rest != 0)
            mask_walk(run, mask, &vocab->classes[k], rest);
    }
}

static uint32_t mask_slot(eng_grammar_run *run, uint32_t config)
{
    for (; run->mask_used[run->mask_hand]; run->mask_hand = (run->mask_hand + 1) % MASKS)
        run->mask_used[run->mask_hand] = 0;
    uint32_t slot = run->mask_hand;
    run->mask_hand = (run->mask_hand + 1) % MASKS;
    if (run->mask_config[slot] != 0)
        run->configs.words[run->mask_config[slot] + CONFIG_MASK] = 0;
    run->mask_config[slot] = config;
    run->configs.words[config + CONFIG_MASK] = slot + 1;
    return slot;
}

const uint32_t *eng_grammar_mask(eng_grammar_state *state, const int32_t *end_tokens,
                                 uint32_t end_token_count)
{
    eng_grammar_run *run = state->run;
    CHECK(run->vocab != NULL);
    make_room(run);
    uint32_t config = state->config, slot;
    bool fresh = config == 0 || run->configs.words[config + CONFIG_MASK] == 0;
    if (config == 0)
        slot = run->mask_hand;
    else if (fresh)
        slot = mask_slot(run, config);
    else
        slot = run->configs.words[config + CONFIG_MASK] - 1;
    uint32_t *mask = run->masks + (size_t)slot * run->vocab->words;
    if (config == 0) {
        if (run->mask_config[slot] != 0)
            run->configs.words[run->mask_config[slot] + CONFIG_MASK] = 0;
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
