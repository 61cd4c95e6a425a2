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
    if (c->options.space == ENG_GRAMMAR_SPACE_SINGLE) {
        uint32_t blank = gr_bytes_add(c, &(gr_edge){' ', ' ', next}, 1);
        c->g->nodes.data[blank].kind = GR_BLANK;
        return gr_node_add(c, GR_SPACE, blank, 0, next);
    }
    uint32_t at = next;
    for (uint32_t i = 0; i < 24; i++) {
        uint32_t byte = gr_bytes_add(c, &(gr_edge){' ', ' ', at}, 1);
        at = gr_fork_add(c, (uint32_t[]){byte, next}, 2);
    }
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
    if (kept->count == 0) /* a bound or a constant beyond what a double tells apart */
        kept = gr_dfa_op(
            c, set,
            gr_pattern(s, &s->long_number, "0|-?[1-9][0-9]*|-?(0|[1-9][0-9]*)\\.[0-9]*[1-9]"),
            GR_AND);
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

/* ---- objects ---- */

static bool want_has(const names *want, gr_text name)
{
    return want->set == NULL || gr_dfa_has(want->set, name.data, name.length);
}

static object *object_copy(schema *s, const object *o)
{
    object *copy = gr_alloc(s->c, 1, sizeof *copy);
    *copy = *o;
    copy->members = gr_alloc(s->c, o->count, sizeof *copy->members);
    if (o->count > 0)
        memcpy(copy->members, o->members, o->count * sizeof *copy->members);
    return copy;
}

static void want_drop(object *o, uint32_t want)
{
    memmove(o->wants + want, o->wants + want + 1, (o->want_count - want - 1) * sizeof *o->wants);
    o->want_count--;
}

/* One member may be what two wants ask for. */
static void pair_wants(schema *s, const object *o, uint32_t from, object **out, uint32_t *count,
                       uint32_t max, const dom *at)
{
    if (*count == max)
        gr_wrong(s, BASE_UNSUPPORTED, at, "not", "more than %u alternatives", max);
    for (uint32_t i = from; i < o->want_count; i++)
        for (uint32_t k = 0; k < i; k++) {
            object *one = object_copy(s, o);
            one->wants[k].set = gr_dfa_and(s, o->wants[k].set, o->wants[i].set);
            one->wants[k].value = gr_term_and(s, o->wants[k].value, o->wants[i].value);
            want_drop(one, i);
            if (one->wants[k].set == NULL || one->wants[k].set->count > 0)
                pair_wants(s, one, i, out, count, max, at);
        }
    out[(*count)++] = object_copy(s, o);
}

object **gr_object_settle(schema *s, const object *o, uint32_t *count, const dom *at)
{
    object **out = gr_alloc(s->c, ALTERNATIVES_MAX, sizeof *out);
    *count = 0;
    pair_wants(s, o, 1, out, count, ALTERNATIVES_MAX, at);
    for (uint32_t i = 0; i < *count; i++)
        for (uint32_t w = 0; w < out[i]->want_count; w++)
            for (uint32_t k = 0; k < out[i]->count; k++) {
                const member *m = &out[i]->members[k];
                if (m->value->never || !want_has(&out[i]->wants[w], m->name))
                    continue;
                if (*count == ALTERNATIVES_MAX)
                    gr_wrong(s, BASE_UNSUPPORTED, at, "not", "more than %u alternatives",
                             ALTERNATIVES_MAX);
                object *met = object_copy(s, out[i]);
                met->members[k].value = gr_term_and(s, m->value, met->wants[w].value);
                met->members[k].required = true;
                want_drop(met, w);
                out[(*count)++] = met;
                names *want = &out[i]->wants[w];
                want->set = gr_dfa_op(s->c, want->set == NULL ? gr_dfa_all(s->c) : want->set,
                                      gr_dfa_texts(s->c, &m->name, 1), GR_MINUS);
            }
    return out;
}

void gr_object_fill(gr_compile *c, uint32_t index, const gr_shape *shape)
{
    gr_object out = {.members = shape->count, .min = shape->min, .max = shape->max};
    out.ordered = shape->ordered && shape->count > 0;
    out.counted = shape->min > 0 || shape->max != GR_INFINITE;
    out.words = shape->count == 0 ? 0 : (shape->count + 64) / 64;
    out.required = c->g->bits.count;
    for (uint32_t i = 0; i < out.words; i++)
        *gr_push(c, &c->g->bits) = 0;
    for (uint32_t i = 0; i < shape->count; i++)
        if (shape->required[i])
            c->g->bits.data[out.required + i / 64] |= (uint64_t)1 << i % 64;
    out.rules = c->g->lists.count;
    for (uint32_t i = 0; i < shape->count; i++)
        *gr_push(c, &c->g->lists) = shape->rules[i];
    out.extra_rules = c->g->lists.count;
    out.extra_count = shape->extra_count;
    for (uint32_t i = 0; i < shape->extra_count; i++)
        *gr_push(c, &c->g->lists) = shape->extra_rules[i];
    c->g->objects.data[index] = out;
}

uint32_t gr_framed(gr_compile *c, uint32_t start, uint32_t words, uint32_t next)
{
    uint32_t rule = gr_rule_add(c);
    c->g->rules.data[rule].start = start;
    c->g->rules.data[rule].words = words;
    return gr_node_add(c, GR_CALL, rule, next, 0);
}

/* `:` and a value, up to `next`. */
static uint32_t lower_value(schema *s, uint32_t rule, uint32_t next)
{
    uint32_t at = gr_node_add(s->c, GR_CALL, rule, next, 0);
    at = gr_literal(s->c, ":", 1, space(s, true, at));
    return space(s, false, at);
}

/* A member whose name is none of `others`: one for each class of names, those of `within` (NULL:
 * all) with values that are `value`, too: where it begins, and the rule of its value. Returns how
 * many. */
static uint32_t lower_extras(schema *s, const object *o, const gr_dfa *others, gr_dfa *within,
                             term *value, uint32_t after, uint32_t *ways, uint32_t *rules)
{
    gr_compile *c = s->c;
    uint32_t count = 0;
    for (uint32_t i = 0; i < o->class_count; i++) {
        term *both = gr_term_and(s, o->classes[i].value, value);
        gr_dfa *set = gr_dfa_and(s, o->classes[i].set, s->barred);
        if (both->never)
            continue;
        set = gr_dfa_and(s, set, within);
        if (others != NULL)
            set = gr_dfa_op(c, set == NULL ? gr_dfa_all(c) : set, others, GR_MINUS);
        if (set != NULL && set->count == 0)
            continue;
        rules[count] = gr_rule_of(s, both);
        uint32_t at = lower_value(s, rules[count], after);
        if (set == NULL) {
            uint32_t chars = gr_node_add(c, GR_BYTES, 0, 0, 0);
            gr_string_char(c, chars, chars, at);
            at = gr_literal(c, "\"", 1, chars);
        } else {
            at = gr_literal(c, "\"", 1, gr_dfa_lower(c, set, true, gr_literal(c, "\"", 1, at)));
        }
        ways[count++] = at;
    }
    return count;
}

static uint32_t lower_key(schema *s, gr_text key, uint32_t next)
{
    gr_compile *c = s->c;
    base_buf name;
    base_buf_init(&name, 0);
    base_buf_json_string(&name, key.data, key.length);
    /* The buffer must not outlive a longjmp, so its bytes move to the arena first. */
    char *copy = name.failed ? NULL : base_arena_copy(c->arena, name.data, name.length);
    size_t length = name.length;
    base_buf_deinit(&name);
    if (copy == NULL)
        gr_fail(c, BASE_NOMEM, NULL, "no memory for a grammar");
    bool plain = true;
    for (size_t k = 0; k < key.length; k++)
        plain = plain && (uint8_t)key.data[k] >= 0x20;
    if (plain)
        return gr_literal(c, copy, length, next);
    /* a control has two spellings */
    return gr_literal(
        c, "\"", 1, gr_dfa_lower(c, gr_dfa_texts(c, &key, 1), true, gr_literal(c, "\"", 1, next)));
}

static uint32_t lower_settled(schema *s, const object *o)
{
    gr_compile *c = s->c;
    uint32_t count = 0, index = c->g->objects.count, capacity = o->count + o->want_count;
    uint32_t *rules = gr_alloc(c, capacity, sizeof *rules);
    bool *required = gr_alloc(c, capacity, sizeof *required);
    member **kept = gr_alloc(c, o->count, sizeof *kept);
    gr_text *declared = gr_alloc(c, o->count, sizeof *declared);
    for (uint32_t i = 0; i < o->count; i++) {
        declared[i] = o->members[i].name;
        if (o->members[i].value->never)
            continue;
        kept[count] = &o->members[i];
        required[count] = o->members[i].required;
        rules[count++] = gr_rule_of(s, o->members[i].value);
    }
    *gr_push(c, &c->g->objects) = (gr_object){0};
    uint32_t node_end = gr_literal(c, "}", 1, s->ret);
    uint32_t end = gr_node_add(c, GR_OBJECT_END, index, 0, space(s, false, node_end));
    uint32_t choose = gr_node_add(c, GR_FORK, 0, 0, 0);
    uint32_t comma = gr_literal(c, ",", 1, space(s, true, choose));
    comma = gr_node_add(c, GR_MORE, index, 0, space(s, false, comma));
    uint32_t after = gr_fork_add(c, (uint32_t[]){comma, end}, 2);
    uint32_t *ways = gr_alloc(c, capacity + o->class_count, sizeof *ways);
    uint32_t *extras = gr_alloc(c, o->class_count, sizeof *extras);
    uint32_t *extra_rules = gr_alloc(c, o->class_count, sizeof *extra_rules);
    for (uint32_t i = 0; i < count; i++)
        ways[i] = gr_node_add(c, GR_KEY, index, i,
                              lower_key(s, kept[i]->name, lower_value(s, rules[i], after)));
    gr_dfa *others = o->count == 0 ? NULL : gr_dfa_texts(c, declared, o->count);
    /* A want is a required member whose name is any of a set: name and value are one rule. */
    for (uint32_t i = 0; i < o->want_count; i++, count++) {
        uint32_t n = lower_extras(s, o, others, o->wants[i].set, o->wants[i].value, s->ret, extras,
                                  extra_rules);
        uint32_t start = gr_fork_add(c, extras, n);
        rules[count] = gr_rule_add(c);
        c->g->rules.data[rules[count]].start = start;
        required[count] = true;
        ways[count] =
            gr_node_add(c, GR_KEY, index, count, gr_node_add(c, GR_CALL, rules[count], after, 0));
    }
    uint32_t extra_count = lower_extras(s, o, others, NULL, s->always, after, extras, extra_rules);
    for (uint32_t i = 0; i < extra_count; i++)
        ways[count + i] = gr_node_add(c, GR_EXTRA, index, 0, extras[i]);
    gr_fork_set(c, choose, ways, count + extra_count);
    uint32_t begin = gr_fork_add(c, (uint32_t[]){choose, end}, 2);
    begin = gr_literal(c, "{", 1, space(s, false, begin));
    if (extra_count == 0 && o->min > count)
        return GR_NONE;
    gr_object_fill(c, index,
                   &(gr_shape){count, rules, required, o->min, o->max, extra_rules, extra_count,
                               !c->options.any_order});
    return gr_framed(c, begin, c->g->objects.data[index].words, s->ret);
}

static uint32_t lower_object(schema *s, const object *o, const dom *at)
{
    if (o->want_count == 0)
        return lower_settled(s, o);
    uint32_t count, n = 0;
    object **each = gr_object_settle(s, o, &count, at);
    uint32_t *ways = gr_alloc(s->c, count, sizeof *ways);
    for (uint32_t i = 0; i < count; i++)
        ways[n++] = lower_settled(s, each[i]);
    return gr_fork_add(s->c, ways, n);
}

/* ---- arrays ---- */

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
        node = gr_resolve(s, node, list, "$ref");
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

#define ITEMS_MAX 8192u /* ways to write one, of an array */

static uint32_t lower_array(schema *s, const array *a, const dom *at)
{
    gr_compile *c = s->c;
    uint32_t index = c->g->arrays.count, min = a->min, max = a->max, count = a->count;
    gr_array out = {.items = c->g->items.count};
    some wants[WANTS_MAX];
    for (uint32_t i = 0; i < a->want_count; i++) {
        const some *w = &a->wants[i];
        if (w->value->never || (w->min == 0 && w->max == GR_INFINITE))
            continue;
        count = gr_most(count, w->from);
        out.want[out.want_count].min = w->min;
        out.want[out.want_count].max = w->max;
        wants[out.want_count++] = *w;
    }
    term **prefix = gr_alloc(c, count, sizeof *prefix);
    for (uint32_t i = 0; i < count; i++)
        prefix[i] = i < a->count ? a->prefix[i] : a->rest;
    if (a->rest->never)
        max = gr_least(max, count);
    for (uint32_t i = 0; i < count; i++)
        if (prefix[i]->never)
            max = gr_least(max, i);
    bool unique = a->unique && max > 1;
    dom *values[UNIQUE_MAX];
    uint32_t value_count = 0;
    if (unique &&
        (count > 0 || out.want_count > 0 || !few_values(s, a->rest, values, &value_count)))
        gr_wrong(s, BASE_UNSUPPORTED, at, "uniqueItems", "the items are no small enum");
    if (unique)
        max = gr_least(max, value_count);
    if (min > max)
        return GR_NONE;
    out.min = min;
    out.max = max;
    out.prefix = count;
    out.saturate = max == GR_INFINITE ? gr_most(min, count) : max;
    uint32_t kinds = unique ? value_count : 1u << out.want_count;
    if ((size_t)(count + 1) * kinds > ITEMS_MAX || (out.want_count > 2 && max != GR_INFINITE))
        gr_wrong(s, BASE_UNSUPPORTED, at, "contains", "too many ways to write an item");
    *gr_push(c, &c->g->arrays) = (gr_array){0};
    uint32_t end = gr_literal(c, "]", 1, s->ret);
    end = gr_node_add(c, GR_ARRAY_END, index, 0, space(s, false, end));
    uint32_t choose = gr_node_add(c, GR_FORK, 0, 0, 0);
    uint32_t comma = gr_literal(c, ",", 1, space(s, true, choose));
    comma = gr_node_add(c, GR_MORE_ITEMS, index, 0, space(s, false, comma));
    uint32_t after = gr_fork_add(c, (uint32_t[]){comma, end}, 2);
    uint32_t way_count = 0;
    uint32_t *ways = gr_alloc(c, (size_t)(count + 1) * kinds, sizeof *ways);
    for (uint32_t i = 0; i <= count; i++)
        for (uint32_t k = 0; k < kinds; k++) {
            term *t = i < count ? prefix[i] : a->rest;
            bool here = true; /* no want counts before it begins */
            if (unique)
                t = gr_term_and(s, t, gr_term_lit(s, values[k], L_VALUE));
            for (uint32_t w = 0; w < out.want_count; w++) {
                bool matches = !unique && (k >> w & 1);
                if (matches)
                    t = gr_term_and(s, t, wants[w].value);
                else if (wants[w].max != GR_INFINITE && i >= wants[w].from)
                    t = gr_term_and(s, t, gr_term_not(s, wants[w].value, at));
                here = here && (!matches || i >= wants[w].from);
            }
            if (t->never || !here)
                continue;
            uint32_t rule = gr_rule_of(s, t);
            *gr_push(c, &c->g->items) = (gr_item){i < count ? i : GR_INFINITE,
                                                  unique ? k : GR_INFINITE, rule, unique ? 0 : k};
            uint32_t next = gr_node_add(c, GR_CALL, rule, after, 0);
            ways[way_count++] = gr_node_add(c, GR_ITEM, index, c->g->items.count - 1, next);
        }
    out.item_count = c->g->items.count - out.items;
    gr_fork_set(c, choose, ways, way_count);
    uint32_t begin = gr_fork_add(c, (uint32_t[]){choose, end}, 2);
    begin = gr_literal(c, "[" /* ] */, 1, space(s, false, begin));
    c->g->arrays.data[index] = out;
    return gr_framed(c, begin, unique ? 1 : (out.want_count + 1) / 2, s->ret);
}

static void lower_term(schema *s, term *t)
{
    gr_compile *c = s->c;
    const alts *a = t->never ? gr_alts_new(s, 1) : gr_term_open(s, t, 0);
    const dom *at = t->count > 0 ? t->lits[0].node : s->root;
    c->at = at;
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
            ways[count++] = lower_object(s, b->object == NULL ? gr_object_any(s) : b->object, at);
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
        return lower_object(s, b->object == NULL ? gr_object_any(s) : b->object, at);
    return lower_array(s, b->array == NULL ? gr_array_any(s) : b->array, at);
}

void gr_lower_queue(schema *s)
{
    for (term *t = s->queue; t != NULL; t = t->queued)
        lower_term(s, t);
    s->c->at = NULL;
}
