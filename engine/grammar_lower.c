/* A schema's terms as the graph of JSON text. */
#include <stdlib.h>

#include "engine/grammar_schema.h"

uint32_t gr_rule_of(schema *s, term *t)
{
    if (t->rule == 0) {
        t->rule = gr_rule_add(s->c) + 1;
        s->c->g->rules.data[t->rule - 1].start = GR_NONE;
        *s->queue_end = t;
        s->queue_end = &t->queued;
    }
    return t->rule - 1;
}

/* An optional blank, or what the options say, before `next`. `separator`: behind ':' or ','. */
static uint32_t space(schema *s, bool separator, uint32_t next)
{
    gr_compile *c = s->c;
    if (c->options.space == ENG_GRAMMAR_SPACE_COMPACT ||
        (c->options.space == ENG_GRAMMAR_SPACE_SINGLE && !separator))
        return next;
    uint32_t blanks = c->options.space == ENG_GRAMMAR_SPACE_SINGLE ? 1 : 24, at = next;
    for (uint32_t i = 0; i < blanks; i++) {
        uint32_t byte = gr_bytes_add(c, &(gr_edge){' ', ' ', at}, 1);
        at = gr_fork_add(c, (uint32_t[]){byte, next}, 2);
    }
    if (blanks == 1)
        return at;
    uint32_t line = gr_bytes_add(c, &(gr_edge){'\n', '\n', at}, 1);
    return gr_fork_add(c, (uint32_t[]){line, at}, 2);
}

uint32_t gr_lower_number(schema *s, const bundle *b)
{
    gr_compile *c = s->c;
    gr_dfa *set = b->number;
    if (c->options.any_number) {
        if (set == NULL)
            set =
                gr_pattern(s, &s->plain_number, "-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?");
        return gr_dfa_lower(c, set, false, s->ret);
    }
    if (set == NULL)
        return gr_dfa_lower(
            c,
            gr_pattern(s, &s->plain_number,
                       "-?(0|[1-9][0-9]{0,14})(\\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?"),
            false, s->ret);
    /* One way to write each number: an integer has no fraction. */
    gr_dfa *once = gr_pattern(s, &s->canonical_number,
                              "0|-?[1-9][0-9]{0,17}|-?(0|[1-9][0-9]{0,14})\\.[0-9]{0,14}[1-9]");
    gr_dfa *kept = gr_dfa_op(c, set, once, GR_AND);
    return gr_dfa_lower(c, kept->count > 0 ? kept : set, false, s->ret);
}

static uint32_t lower_string(schema *s, const bundle *b)
{
    gr_compile *c = s->c;
    uint32_t end;
    if (b->string != NULL || s->barred != NULL) {
        gr_dfa *set = gr_dfa_and(s, b->string, s->barred);
        if (b->length_min > 0 || b->length_max != GR_INFINITE)
            set = gr_dfa_and(s, set, gr_dfa_length(c, b->length_min, b->length_max));
        end = gr_literal(c, "\"", 1, s->ret);
        return gr_literal(c, "\"", 1, gr_dfa_lower(c, set, true, end));
    }
    uint32_t chars = gr_node_add(c, GR_BYTES, 0, 0, 0);
    if (b->length_min == 0 && b->length_max == GR_INFINITE) {
        gr_string_char(c, chars, chars, s->ret);
        return gr_literal(c, "\"", 1, chars);
    }
    *gr_push(c, &c->g->lengths) = (gr_length){b->length_min, b->length_max};
    uint32_t guard = c->g->lengths.count - 1;
    uint32_t fork = gr_node_add(c, GR_FORK, 0, 0, 0);
    end = gr_node_add(c, GR_STRING_END, guard, 0, gr_literal(c, "\"", 1, s->ret));
    uint32_t one = gr_node_add(c, GR_CHAR, guard, 0, chars);
    gr_fork_set(c, fork, (uint32_t[]){one, end}, 2);
    gr_string_char(c, chars, fork, GR_NONE);
    c->g->nodes.data[chars].c = guard + 1;
    uint32_t rule = gr_rule_add(c), start = gr_literal(c, "\"", 1, fork);
    c->g->rules.data[rule].start = start;
    return gr_node_add(c, GR_CALL, rule, s->ret, 0);
}

static uint32_t lower_object(schema *s, const object *o)
{
    gr_compile *c = s->c;
    uint32_t count = 0, index = c->g->objects.count;
    uint32_t *rules = gr_alloc(c, o->count, sizeof *rules);
    member **kept = gr_alloc(c, o->count, sizeof *kept);
    gr_text *declared = gr_alloc(c, o->count, sizeof *declared);
    uint32_t class_count = 0;
    for (uint32_t i = 0; i < o->count; i++) {
        declared[i] = o->members[i].name;
        if (o->members[i].value->never)
            continue;
        kept[count] = &o->members[i];
        rules[count++] = gr_rule_of(s, o->members[i].value);
    }
    *gr_push(c, &c->g->objects) = (gr_object){0};
    uint32_t node_end = gr_literal(c, "}", 1, s->ret);
    uint32_t end = gr_node_add(c, GR_OBJECT_END, index, 0, space(s, false, node_end));
    uint32_t choose = gr_node_add(c, GR_FORK, 0, 0, 0);
    uint32_t comma = gr_literal(c, ",", 1, space(s, true, choose));
    comma = gr_node_add(c, GR_MORE, index, 0, space(s, false, comma));
    uint32_t after = gr_fork_add(c, (uint32_t[]){comma, end}, 2);
    uint32_t *ways = gr_alloc(c, count + o->class_count, sizeof *ways);
    base_buf name;
    base_buf_init(&name, 0);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = gr_node_add(c, GR_CALL, rules[i], after, 0);
        at = gr_literal(c, ":", 1, space(s, true, at));
        at = space(s, false, at);
        base_buf_clear(&name);
        base_buf_json_string(&name, kept[i]->name.data, kept[i]->name.length);
        /* The buffer must not outlive a longjmp, so its bytes move to the arena first. */
        char *copy = name.failed ? NULL : base_arena_copy(c->arena, name.data, name.length);
        size_t length = name.length;
        base_buf_deinit(&name);
        base_buf_init(&name, 0);
        if (copy == NULL)
            gr_fail(c, BASE_NOMEM, NULL, "no memory for a grammar");
        bool plain = true;
        for (size_t k = 0; k < kept[i]->name.length; k++)
            plain = plain && (uint8_t)kept[i]->name.data[k] >= 0x20;
        if (plain)
            at = gr_literal(c, copy, length, at);
        else /* a control has two spellings */
            at = gr_literal(c, "\"", 1,
                            gr_dfa_lower(c, gr_dfa_texts(c, &kept[i]->name, 1), true,
                                         gr_literal(c, "\"", 1, at)));
        ways[i] = gr_node_add(c, GR_KEY, index, i, at);
    }
    uint32_t way_count = count;
    gr_dfa *others = o->count == 0 ? NULL : gr_dfa_texts(c, declared, o->count);
    for (uint32_t i = 0; i < o->class_count; i++) {
        if (o->classes[i].value->never)
            continue;
        gr_dfa *set = gr_dfa_and(s, o->classes[i].set, s->barred);
        if (others != NULL)
            set = gr_dfa_op(c, set == NULL ? gr_dfa_all(c) : set, others, GR_MINUS);
        if (set != NULL && set->count == 0)
            continue;
        uint32_t at = gr_node_add(c, GR_CALL, gr_rule_of(s, o->classes[i].value), after, 0);
        at = gr_literal(c, ":", 1, space(s, true, at));
        at = space(s, false, at);
        if (set == NULL) {
            uint32_t chars = gr_node_add(c, GR_BYTES, 0, 0, 0);
            gr_string_char(c, chars, chars, at);
            at = gr_literal(c, "\"", 1, chars);
        } else {
            at = gr_literal(c, "\"", 1, gr_dfa_lower(c, set, true, gr_literal(c, "\"", 1, at)));
        }
        ways[way_count++] = gr_node_add(c, GR_EXTRA, index, 0, at);
        class_count++;
    }
    gr_fork_set(c, choose, ways, way_count);
    uint32_t begin = gr_fork_add(c, (uint32_t[]){choose, end}, 2);
    begin = gr_literal(c, "{", 1, space(s, false, begin));
    gr_object out = {.members = count, .min = o->min, .max = o->max};
    out.extras = class_count > 0;
    out.ordered = !c->options.any_order && count > 0;
    out.counted = o->min > 0 || o->max != GR_INFINITE;
    out.words = count == 0 ? 0 : (count + 64) / 64;
    out.required = c->g->bits.count;
    for (uint32_t i = 0; i < out.words; i++)
        *gr_push(c, &c->g->bits) = 0;
    for (uint32_t i = 0; i < count; i++)
        if (kept[i]->required)
            c->g->bits.data[out.required + i / 64] |= (uint64_t)1 << i % 64;
    out.rules = c->g->lists.count;
    for (uint32_t i = 0; i < count; i++)
        *gr_push(c, &c->g->lists) = rules[i];
    if (!out.extras && o->min > count)
        return GR_NONE;
    c->g->objects.data[index] = out;
    uint32_t rule = gr_rule_add(c);
    c->g->rules.data[rule].start = begin;
    c->g->rules.data[rule].words = out.words;
    return gr_node_add(c, GR_CALL, rule, s->ret, 0);
}

/* The values of a term that has few; false if it may have more. */
static bool few_values(schema *s, term *t, dom **out, uint32_t *count)
{
    *count = 0;
    if (t->count != 1 || t->lits[0].kind != L_SCHEMA)
        return false;
    dom *node = t->lits[0].node, *list;
    for (uint32_t i = 0; (list = gr_get(node, "$ref")) != NULL && list->kind == BASE_JSON_STRING;
         i++) {
        if (i == 16)
            return false;
        node = gr_resolve(s, node, list);
    }
    list = gr_get(node, "enum");
    if (list == NULL || list->kind != BASE_JSON_ARRAY_BEGIN)
        return false;
    for (dom *k = list->first; k != NULL; k = k->next) {
        if (*count == UNIQUE_MAX || (k->kind != BASE_JSON_STRING && k->kind != BASE_JSON_NULL &&
                                     k->kind != BASE_JSON_TRUE && k->kind != BASE_JSON_FALSE))
            return false;
        bool twice = false;
        for (uint32_t i = 0; i < *count; i++)
            twice = twice || (out[i]->kind == k->kind && gr_same(out[i]->text, k->text));
        if (!twice)
            out[(*count)++] = k;
    }
    return true;
}

static uint32_t lower_array(schema *s, const array *a, const dom *at)
{
    gr_compile *c = s->c;
    uint32_t index = c->g->arrays.count, min = a->min, max = a->max, count = a->count;
    if (a->rest->never)
        max = gr_least(max, count);
    for (uint32_t i = 0; i < count; i++)
        if (a->prefix[i]->never)
            max = gr_least(max, i);
    bool unique = a->unique && max > 1;
    dom *values[UNIQUE_MAX];
    uint32_t value_count = 0;
    if (unique &&
        (count > 0 || a->contains != NULL || !few_values(s, a->rest, values, &value_count)))
        gr_wrong(s, BASE_UNSUPPORTED, at, "uniqueItems", "the items are no small enum");
    if (unique)
        max = gr_least(max, value_count);
    if (min > max)
        return GR_NONE;
    *gr_push(c, &c->g->arrays) = (gr_array){0};
    gr_array out = {.min = min, .max = max, .prefix = count, .contains = a->contains_min};
    if (a->contains == NULL)
        out.contains = 0;
    out.saturate = max == GR_INFINITE ? gr_most(min, count) : max;
    uint32_t *rules = gr_alloc(c, count + 1, sizeof *rules);
    for (uint32_t i = 0; i <= count; i++)
        rules[i] = gr_rule_of(s, i < count ? a->prefix[i] : a->rest);
    uint32_t end = gr_literal(c, "]", 1, s->ret);
    end = gr_node_add(c, GR_ARRAY_END, index, 0, space(s, false, end));
    uint32_t choose = gr_node_add(c, GR_FORK, 0, 0, 0);
    uint32_t comma = gr_literal(c, ",", 1, space(s, true, choose));
    comma = gr_node_add(c, GR_MORE_ITEMS, index, 0, space(s, false, comma));
    uint32_t after = gr_fork_add(c, (uint32_t[]){comma, end}, 2);
    uint32_t way_count = 0;
    uint32_t *ways = gr_alloc(c, 2 * (size_t)count + 2 + value_count, sizeof *ways);
    for (uint32_t i = 0; i <= count; i++)
        for (uint32_t k = 0; k < (out.contains > 0 ? 2 : unique ? value_count : 1); k++) {
            term *t = i < count ? a->prefix[i] : a->rest;
            if (t->never)
                continue;
            if (unique)
                t = gr_term_and(s, t, gr_term_lit(s, values[k], L_VALUE));
            else if (k == 1)
                t = gr_term_and(s, t, a->contains);
            uint32_t rule = gr_rule_of(s, t);
            if (out.contains > 0 && k == 1)
                out.contains_rule = rule;
            *gr_push(c, &c->g->items) =
                (gr_item){i < count ? i : GR_INFINITE, unique ? k : GR_INFINITE, !unique && k == 1};
            uint32_t next = gr_node_add(c, GR_CALL, rule, after, 0);
            ways[way_count++] = gr_node_add(c, GR_ITEM, index, c->g->items.count - 1, next);
        }
    gr_fork_set(c, choose, ways, way_count);
    uint32_t begin = gr_fork_add(c, (uint32_t[]){choose, end}, 2);
    begin = gr_literal(c, "[" /* ] */, 1, space(s, false, begin));
    out.rules = c->g->lists.count;
    for (uint32_t i = 0; i <= count; i++)
        *gr_push(c, &c->g->lists) = rules[i];
    c->g->arrays.data[index] = out;
    uint32_t rule = gr_rule_add(c);
    c->g->rules.data[rule].start = begin;
    c->g->rules.data[rule].words = unique || out.contains > 0;
    return gr_node_add(c, GR_CALL, rule, s->ret, 0);
}

static void lower_term(schema *s, term *t)
{
    gr_compile *c = s->c;
    const alts *a = t->never ? gr_alts_new(s, 1) : gr_term_open(s, t, 0);
    const dom *at = t->count > 0 ? t->lits[0].node : s->root;
    uint32_t *ways = gr_alloc(c, 7 * (size_t)a->count, sizeof *ways), count = 0;
    /* Scalars of all alternatives are joined, so that they cost one thread. */
    uint8_t types = 0;
    bundle number = {0}, string = {0};
    bool any_number = false, any_string = false;
    for (uint32_t i = 0; i < a->count; i++) {
        const bundle *b = a->data[i];
        bool lengths = b->length_min > 0 || b->length_max != GR_INFINITE;
        types |= b->types & (T_NULL | T_TRUE | T_FALSE);
        any_number = any_number || ((b->types & T_NUMBER) && b->number == NULL);
        any_string = any_string || ((b->types & T_STRING) && b->string == NULL && !lengths);
    }
    for (uint32_t i = 0; i < a->count; i++) {
        const bundle *b = a->data[i];
        if ((b->types & T_NUMBER) && !any_number)
            number.number =
                number.number == NULL ? b->number : gr_dfa_op(c, number.number, b->number, GR_OR);
        if ((b->types & T_STRING) && !any_string)
            ways[count++] = lower_string(s, b);
        if (b->types & T_OBJECT)
            ways[count++] = lower_object(s, b->object == NULL ? gr_object_any(s) : b->object);
        if (b->types & T_ARRAY)
            ways[count++] = lower_array(s, b->array == NULL ? gr_array_any(s) : b->array, at);
    }
    uint32_t *more = gr_alloc(c, count + 5, sizeof *more);
    memcpy(more, ways, count * sizeof *more);
    string.length_max = GR_INFINITE;
    if (any_string)
        more[count++] = lower_string(s, &string);
    if (any_number || number.number != NULL)
        more[count++] = gr_lower_number(s, &number);
    if (types & T_NULL)
        more[count++] = gr_literal(c, "null", 4, s->ret);
    if (types & T_TRUE)
        more[count++] = gr_literal(c, "true", 4, s->ret);
    if (types & T_FALSE)
        more[count++] = gr_literal(c, "false", 5, s->ret);
    uint32_t start = gr_fork_add(c, more, count);
    c->g->rules.data[t->rule - 1].start = start;
}

uint32_t gr_lower_bundle(schema *s, const bundle *b, const dom *at)
{
    if (b->types & T_OBJECT)
        return lower_object(s, b->object == NULL ? gr_object_any(s) : b->object);
    return lower_array(s, b->array == NULL ? gr_array_any(s) : b->array, at);
}

void gr_lower_queue(schema *s)
{
    for (term *t = s->queue; t != NULL; t = t->queued)
        lower_term(s, t);
}
