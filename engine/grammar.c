/* The graph and its checks. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/num.h"
#include "engine/grammar_internal.h"

#define NODES_MAX_DEFAULT (1u << 19)
#define WORK_MAX_DEFAULT (1u << 24)
#define MEMORY_MAX_DEFAULT ((size_t)64 << 20)
#define DEPTH_MAX_DEFAULT 256
#define DEPTH_MAX_LIMIT 4096

void gr_fail(gr_compile *c, base_code code, const char *param, const char *fmt, ...)
{
    char text[192], pointer[GR_POINTER_SIZE] = "";
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (param == NULL && c->at != NULL)
        gr_pointer(c->at, NULL, pointer);
    base_fail_param(c->err, code, param == NULL ? pointer : param, "%s%s%s", text,
                    pointer[0] == '\0' ? "" : " at ", pointer);
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

uint32_t gr_place_height(const eng_grammar *g, const gr_array *array, uint32_t place,
                         uint32_t matches, uint32_t avoid)
{
    uint32_t least = GR_INFINITE;
    for (uint32_t i = 0; i < array->item_count; i++) {
        const gr_item *item = &g->items.data[array->items + i];
        uint32_t index = item->index == GR_INFINITE ? array->prefix : item->index;
        uint32_t height = gr_rule_height(g, item->rule);
        if (index == place && (item->matches & matches) == matches &&
            (item->matches & avoid) == 0 && height < least)
            least = height;
    }
    return least;
}

/* Frames that the least member of those that are not declared needs. */
static uint32_t extra_height(const eng_grammar *g, const gr_object *object)
{
    uint32_t least = GR_INFINITE;
    for (uint32_t i = 0; i < object->extra_count; i++) {
        uint32_t height = gr_rule_height(g, g->lists.data[object->extra_rules + i]);
        least = height < least ? height : least;
    }
    return least;
}

/* Frames that the least members of an object need: those required, and others up to its minimum. */
static uint32_t members_height(const eng_grammar *g, const gr_object *object)
{
    uint32_t required = 0, least = 0, more = extra_height(g, object);
    for (uint32_t i = 0; i < object->members; i++)
        if (g->bits.data[object->required + i / 64] >> i % 64 & 1) {
            uint32_t height = gr_rule_height(g, g->lists.data[object->rules + i]);
            least = height > least ? height : least;
            required++;
        }
    if (required > object->max)
        return GR_INFINITE;
    /* The heights of optional ones in turn, until enough are no higher. */
    uint32_t lack = object->min > required ? object->min - required : 0, below = 0;
    while (lack > 0) {
        uint32_t next = more, count = 0;
        for (uint32_t i = 0; i < object->members; i++) {
            uint32_t height = gr_rule_height(g, g->lists.data[object->rules + i]);
            if ((g->bits.data[object->required + i / 64] >> i % 64 & 1) || height < below)
                continue;
            count = height < next ? 1 : count + (height == next);
            next = height < next ? height : next;
        }
        least = next > least ? next : least;
        lack = next == more || count >= lack ? 0 : lack - count;
        below = next + 1;
    }
    return least;
}

/* Frames of an item that counts for `matches` and for none of `avoid`, at the best place. */
static uint32_t matching_height(const eng_grammar *g, const gr_array *array, uint32_t matches,
                                uint32_t avoid)
{
    uint32_t best = GR_INFINITE;
    for (uint32_t i = 0; i <= array->prefix; i++) {
        uint32_t need = gr_place_height(g, array, i, matches, avoid);
        best = need < best ? need : best;
    }
    return best;
}

/* Frames that the least items of an array need: as many as its minimum, and those it wants. */
static uint32_t items_height(const eng_grammar *g, const gr_array *array)
{
    uint32_t least = 0, wanted = 0;
    uint64_t sum = 0;
    if (array->min > array->max)
        return GR_INFINITE;
    for (uint32_t i = 0; i < array->min && i <= array->prefix; i++) {
        uint32_t need = gr_place_height(g, array, i, 0, 0);
        least = need > least ? need : least;
    }
    for (uint32_t w = 0; w < array->want_count; w++) {
        sum += array->want[w].min;
        wanted |= (uint32_t)(array->want[w].min > 0) << w;
    }
    for (uint32_t w = 0; w < array->want_count; w++) {
        if (array->want[w].min > base_min(array->max, array->want[w].max))
            return GR_INFINITE;
        /* Where they do not find room one by one, an item has to count for all. */
        uint32_t matches = sum > array->max ? wanted : 1u << w;
        /* And some of them for none of a set that may not be counted as often. */
        for (uint32_t set = 0; set >> array->want_count == 0; set++) {
            uint64_t room = 0;
            for (uint32_t v = 0; v < array->want_count; v++)
                room += set >> v & 1 ? array->want[v].max : 0;
            if (room < array->want[w].min) {
                uint32_t best = matching_height(g, array, matches, set);
                least = best > least ? best : least;
            }
        }
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
    case GR_BLANK:
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
        need = gr_rule_height(g, node->a);
        /* The last thing that a rule does takes its frame's place. */
        if (g->nodes.data[node->b].kind == GR_RETURN)
            return need == GR_INFINITE ? need : need - 1;
        return need > heights[node->b] ? need : heights[node->b];
    case GR_RETURN:
    case GR_ACCEPT:
        return 0;
    case GR_OBJECT_END:
        need = members_height(g, &g->objects.data[node->a]);
        return need > heights[node->c] ? need : heights[node->c];
    case GR_ARRAY_END:
        need = items_height(g, &g->arrays.data[node->a]);
        return need > heights[node->c] ? need : heights[node->c];
    case GR_SPACE:
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
    for (uint32_t i = 0; i < g->nodes.count; i++) {
        g->nodes.data[i].height = (uint16_t)base_min(heights[i], UINT16_MAX);
        if (heights[i] == GR_INFINITE)
            g->nodes.data[i].kind = GR_DEAD;
    }
    for (uint32_t i = 0; i < g->edges.count; i++)
        if (heights[g->edges.data[i].to] == GR_INFINITE)
            g->edges.data[i].to = GR_NONE;
    for (uint32_t i = 0; i < g->objects.count; i++)
        g->objects.data[i].extra_height = extra_height(g, &g->objects.data[i]);
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
        if (gr_rule_height(c->g, c->g->root) > c->g->depth_max)
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
