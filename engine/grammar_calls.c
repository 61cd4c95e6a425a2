/* Calls as the graph (the format: MiniMax-M3.1's chat template; NS is its separator token):
 *
 *   NS<tool_call> \n  ( NS<invoke name="F">  { NS<K> value NS</K> }  NS</invoke> \n )+
 * NS</tool_call>
 *
 * A value is what the decoder (chat_decode.c) will read as JSON that the schema allows: it looks at
 * the types that it derives from the schema (chat_schema.c), so every way of writing a value is
 * offered only where those types make it that value. Strings stand as they are, without quotes or
 * escapes, and never hold the separator's spelling; numbers, booleans and null as in JSON; objects
 * and lists as tags inside. Where a text could be two things (a string under `string | integer`
 * that looks like a number) the decoder takes the narrower, and the string does not get that text.
 *
 * Objects without named members (maps) and lists with rules between their items are written as JSON
 * text, since no grammar can see to it that a tag closes with the name it was opened with.
 *
 * Less is offered than the schema allows where the notation has no room for it: members that the
 * schema does not name beside those that it names. Refused: a required member whose name cannot be
 * a tag. */
#include "engine/grammar_calls.h"

#include <stdlib.h>

#include "engine/constrain.h"
#include "engine/grammar_schema.h"

const eng_grammar_options gr_calls_options = {.any_order = true};

_Static_assert(ENG_CONSTRAIN_CALL_CLOSE == GR_MARK_FIRST, "marks are no text");
/* The loops of a node that reads any byte but marks. */
#define ANY_TEXT (GR_CLASS_ALL_TEXT | 1u << GR_CLASS_REST | GR_UNIFORM)

/* ---- tools ---- */

base_code gr_tool_read(gr_tool *tool, eng_text json, base_err *err)
{
    eng_text name = chat_json_member(json, "name", 4);
    tool->schema = chat_json_member(json, "parameters", 10);
    base_buf_init(&tool->text, 0);
    if (name.length >= 2 && name.data[0] == '"')
        base_json_unescape(&tool->text, name.data, name.length);
    if (tool->text.failed)
        return base_fail(err, BASE_NOMEM, "no memory for a tool");
    if (tool->text.length == 0)
        return base_fail(err, BASE_INVALID, "a tool has no name");
    tool->name = (eng_text){tool->text.data, tool->text.length};
    if (tool->schema.length == 0 || tool->schema.data[0] != '{')
        tool->schema = (eng_text){0};
    if (tool->schema.data != NULL) {
        tool->types = chat_schema_create(tool->schema);
        if (tool->types == NULL)
            return base_fail(err, BASE_NOMEM, "no memory for a tool");
    }
    return BASE_OK;
}

void gr_tool_deinit(gr_tool *tool)
{
    chat_schema_destroy(tool->types);
    base_buf_deinit(&tool->text);
    *tool = (gr_tool){0};
}

/* ---- values ---- */

/* The rule of a term as the decoder sees it: `node` of its types, -1 if it knows none. */
typedef struct value {
    term *term;
    int32_t node;
    uint32_t rule;
    struct value *next;
} value;

typedef struct notation {
    gr_compile *c;
    schema *s;
    chat_schema *types;
    value *values, **end;
    gr_dfa *plain;                                   /* texts without the separator's spelling */
    gr_dfa *null, *boolean, *number, *list, *object; /* texts that the decoder takes for these */
} notation;

static uint32_t value_rule(notation *n, term *t, int32_t node)
{
    for (value *v = n->values; v != NULL; v = v->next) {
        gr_work(n->c, 1);
        if (v->term == t && v->node == node)
            return v->rule;
    }
    value *made = gr_alloc(n->c, 1, sizeof *made);
    *made = (value){t, node, gr_rule_add(n->c), NULL};
    n->c->g->rules.data[made->rule].start = GR_NONE;
    *n->end = made;
    n->end = &made->next;
    return made->rule;
}

static uint32_t mark(gr_compile *c, uint8_t byte, uint32_t next)
{
    return gr_bytes_add(c, &(gr_edge){byte, byte, next}, 1);
}

/* NS + `<` or `</` + name + `>` */
static uint32_t tag(gr_compile *c, bool close, gr_text name, uint32_t next)
{
    next = gr_literal(c, ">", 1, next);
    next = gr_literal(c, name.data, name.length, next);
    next = gr_literal(c, close ? "</" : "<", close ? 2 : 1, next);
    return mark(c, ENG_CONSTRAIN_SEPARATOR, next);
}

/* Names whose closing tags mean something else. */
static const gr_text taken[] = {{"invoke", 6}, {"tool_call", 9}};

static bool can_be_tag(gr_text name)
{
    if (name.length == 0 || name.length > 512 || name.data[0] == '/')
        return false;
    for (size_t i = 0; i < name.length; i++)
        if ((uint8_t)name.data[i] < 0x20 || strchr("<>\"]", name.data[i]) != NULL)
            return false;
    return !gr_same(name, taken[0]) && !gr_same(name, taken[1]);
}

#define WS "[ \\t\\r\\n]*"

/* Texts without the separator's spelling. */
static gr_dfa *unspelled(gr_compile *c)
{
    static const char spelling[] = "\\]<\\]minimax\\[>\\[";
    return gr_dfa_op(c, gr_dfa_all(c),
                     gr_dfa_regex(c, spelling, sizeof spelling - 1, false, "text", NULL), GR_MINUS);
}

/* The texts of a string: never the separator's spelling, nor what the decoder takes for a narrower
 * type. */
static gr_dfa *text_set(notation *n, gr_dfa *set, uint8_t kinds)
{
    if (n->plain == NULL)
        n->plain = unspelled(n->c);
    set = gr_dfa_and(n->s, set, n->plain);
    if (kinds == 0 || kinds == CHAT_STRING)
        return set;
    const struct {
        uint8_t kinds;
        gr_dfa **kept;
        const char *text;
    } others[] = {
        {CHAT_NULL, &n->null, WS "null" WS},
        {CHAT_BOOLEAN, &n->boolean, WS "(true|false)" WS},
        {CHAT_INTEGER | CHAT_NUMBER, &n->number, WS "-?[0-9]+(\\.[0-9]+)?([eE][+-]?[0-9]+)?" WS},
        {CHAT_ARRAY, &n->list, WS "\\[[\\s\\S]*"},
        {CHAT_OBJECT, &n->object, WS "\\{[\\s\\S]*"},
    };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if ((kinds & others[i].kinds) != 0)
            set = gr_dfa_op(n->c, set, gr_pattern(n->s, others[i].kept, others[i].text), GR_MINUS);
    return set;
}

static uint32_t lower_text(notation *n, const bundle *b, uint8_t kinds)
{
    gr_compile *c = n->c;
    gr_dfa *set = text_set(n, b->string, kinds);
    if (b->length_min == 0 && b->length_max == GR_INFINITE)
        return gr_dfa_lower(c, set, false, n->s->ret);
    /* A guard counts where any place may be the last; elsewhere the length is part of the set, or a
     * text could be led to where it may neither go on nor end. */
    bool anywhere = true;
    for (uint32_t i = 0; i < set->count; i++)
        anywhere = anywhere && set->accept[i];
    if (!anywhere)
        return gr_dfa_lower(c,
                            gr_dfa_and(n->s, set, gr_dfa_length(c, b->length_min, b->length_max)),
                            false, n->s->ret);
    *gr_push(c, &c->g->lengths) = (gr_length){b->length_min, b->length_max};
    uint32_t start = gr_dfa_lower_counted(c, set, c->g->lengths.count - 1, n->s->ret);
    if (start == GR_NONE)
        return GR_NONE;
    uint32_t rule = gr_rule_add(c);
    c->g->rules.data[rule].start = start;
    return gr_node_add(c, GR_CALL, rule, n->s->ret, 0);
}

static uint32_t lower_number(notation *n, const bundle *b, uint8_t kinds)
{
    bundle narrowed = *b;
    /* What has a fraction is no integer to the decoder. */
    if ((kinds & CHAT_NUMBER) == 0)
        narrowed.number = gr_dfa_and(n->s, b->number,
                                     gr_pattern(n->s, &n->s->integer, "-?(0|[1-9][0-9]*)(\\.0+)?"));
    return narrowed.number != NULL && narrowed.number->count == 0
               ? GR_NONE
               : gr_lower_number(n->s, &narrowed);
}

/* Members as tags, in any order. `known`: the decoder's types of the object; `empty`: no text at
 * all is the empty object. */
static uint32_t lower_members(notation *n, const object *o, const dom *at, int32_t known,
                              bool empty)
{
    gr_compile *c = n->c;
    uint32_t count = 0, index = c->g->objects.count;
    uint32_t *rules = gr_alloc(c, o->count, sizeof *rules);
    uint32_t *ways = gr_alloc(c, o->count, sizeof *ways);
    bool *required = gr_alloc(c, o->count, sizeof *required);
    member **kept = gr_alloc(c, o->count, sizeof *kept);
    for (uint32_t i = 0; i < o->count; i++) {
        member *m = &o->members[i];
        if (m->value->never)
            continue;
        if (can_be_tag(m->name)) {
            int32_t types = chat_schema_member(n->types, known, m->name.data, m->name.length, NULL);
            kept[count] = m;
            required[count] = m->required;
            rules[count++] = value_rule(n, m->value, types);
        } else if (m->required) {
            gr_wrong(n->s, BASE_UNSUPPORTED, at, "required", "%.*s cannot be the name of a tag",
                     (int)gr_least((uint32_t)m->name.length, 64), m->name.data);
        }
    }
    /* What only a member without a name here could satisfy is written as JSON, or not at all. */
    if (o->min > count || o->want_count > 0)
        return GR_NONE;
    *gr_push(c, &c->g->objects) = (gr_object){0};
    uint32_t end = gr_node_add(c, GR_OBJECT_END, index, 0, n->s->ret);
    uint32_t choose = gr_node_add(c, GR_FORK, 0, 0, 0);
    uint32_t after =
        gr_fork_add(c, (uint32_t[]){gr_node_add(c, GR_MORE, index, 0, choose), end}, 2);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t next = gr_node_add(c, GR_CALL, rules[i], tag(c, true, kept[i]->name, after), 0);
        ways[i] = gr_node_add(c, GR_KEY, index, i, tag(c, false, kept[i]->name, next));
    }
    gr_fork_set(c, choose, ways, count);
    gr_object_fill(c, index, &(gr_shape){count, rules, required, o->min, o->max, NULL, 0, false});
    return gr_framed(c, gr_fork_add(c, (uint32_t[]){choose, end}, empty ? 2 : 1),
                     c->g->objects.data[index].words, n->s->ret);
}

/* A list of one kind of items, as `<item>` tags. */
static uint32_t lower_items(notation *n, const array *a, int32_t known, bool empty)
{
    static const gr_text item = {"item", 4};
    gr_compile *c = n->c;
    uint32_t index = c->g->arrays.count, max = a->rest->never ? 0 : a->max;
    if (a->min > max)
        return GR_NONE;
    gr_array out = {.min = a->min,
                    .max = max,
                    .saturate = max == GR_INFINITE ? a->min : max,
                    .items = c->g->items.count,
                    .item_count = !a->rest->never};
    *gr_push(c, &c->g->arrays) = out;
    uint32_t rule = value_rule(n, a->rest, chat_schema_items(n->types, known));
    *gr_push(c, &c->g->items) = (gr_item){GR_INFINITE, GR_INFINITE, rule, 0};
    uint32_t end = gr_node_add(c, GR_ARRAY_END, index, 0, n->s->ret);
    uint32_t choose = gr_node_add(c, GR_FORK, 0, 0, 0);
    uint32_t after =
        gr_fork_add(c, (uint32_t[]){gr_node_add(c, GR_MORE_ITEMS, index, 0, choose), end}, 2);
    uint32_t next = gr_node_add(c, GR_CALL, rule, tag(c, true, item, after), 0);
    uint32_t way = gr_node_add(c, GR_ITEM, index, out.items, tag(c, false, item, next));
    gr_fork_set(c, choose, &way, out.item_count);
    return gr_framed(c, gr_fork_add(c, (uint32_t[]){choose, end}, empty ? 2 : 1), 0, n->s->ret);
}

/* Members that the schema does not name may stand beside those that it does. */
static bool has_extras(const object *o)
{
    for (uint32_t i = 0; i < o->class_count; i++)
        if (!o->classes[i].value->never)
            return true;
    return false;
}

/* The value as JSON text, which the decoder takes as it stands. */
static uint32_t lower_json(notation *n, const bundle *b, uint8_t types, const dom *at)
{
    bundle only = *b;
    only.types = types;
    return gr_lower_bundle(n->s, &only, at);
}

static void lower_value(notation *n, value *v)
{
    gr_compile *c = n->c;
    const uint8_t kinds = chat_schema_kinds(n->types, v->node);
    const alts *a = v->term->never ? gr_alts_new(n->s, 1) : gr_term_open(n->s, v->term, 0);
    const dom *at = v->term->count > 0 ? v->term->lits[0].node : n->s->root;
    c->at = at;
    uint32_t *ways = gr_alloc(c, 9 * (size_t)a->count + 1, sizeof *ways), count = 0;
    for (uint32_t i = 0; i < a->count; i++) {
        const bundle *b = a->data[i];
        if ((b->types & T_STRING) && (kinds == 0 || (kinds & CHAT_STRING)))
            ways[count++] = lower_text(n, b, kinds);
        if ((b->types & T_NUMBER) && (kinds & (CHAT_INTEGER | CHAT_NUMBER)))
            ways[count++] = lower_number(n, b, kinds);
        if ((b->types & T_NULL) && (kinds & CHAT_NULL))
            ways[count++] = gr_literal(c, "null", 4, n->s->ret);
        if ((b->types & T_TRUE) && (kinds & CHAT_BOOLEAN))
            ways[count++] = gr_literal(c, "true", 4, n->s->ret);
        if ((b->types & T_FALSE) && (kinds & CHAT_BOOLEAN))
            ways[count++] = gr_literal(c, "false", 5, n->s->ret);
        if ((b->types & T_OBJECT) && (kinds & CHAT_OBJECT)) {
            /* An empty text is a string if it may be, else an object, else a list. */
            bool tags = b->object != NULL && b->object->count > 0 && !(kinds & CHAT_ARRAY);
            if (tags)
                ways[count++] = lower_members(n, b->object, at, v->node, !(kinds & CHAT_STRING));
            if (!tags || (kinds & CHAT_STRING) || has_extras(b->object) ||
                b->object->want_count > 0)
                ways[count++] = lower_json(n, b, T_OBJECT, at);
        }
        if ((b->types & T_ARRAY) && (kinds & CHAT_ARRAY)) {
            const array *list = b->array;
            bool tags = list != NULL && list->count == 0 && !list->unique && list->want_count == 0;
            bool clear = !(kinds & (CHAT_STRING | CHAT_OBJECT));
            if (tags)
                ways[count++] = lower_items(n, list, v->node, clear);
            if (!tags || !clear)
                ways[count++] = lower_json(n, b, T_ARRAY, at);
        }
    }
    uint32_t start = gr_fork_add(c, ways, count);
    c->g->rules.data[v->rule].start = start;
}

/* ---- calls ---- */

/* The rule of a tool's arguments. */
static uint32_t arguments_rule(gr_compile *c, const gr_tool *tool)
{
    static const char none[] = "{\"type\":\"object\",\"additionalProperties\":false}";
    notation *n = gr_alloc(c, 1, sizeof *n);
    n->c = c;
    n->types = tool->types;
    n->end = &n->values;
    n->s = tool->schema.data == NULL ? gr_schema_begin(c, none, sizeof none - 1)
                                     : gr_schema_begin(c, tool->schema.data, tool->schema.length);
    n->s->barred = text_set(n, NULL, 0);
    const alts *a = gr_term_open(n->s, gr_term_lit(n->s, n->s->root, L_SCHEMA), 0);
    uint32_t *ways = gr_alloc(c, (size_t)a->count * ALTERNATIVES_MAX, sizeof *ways), count = 0;
    for (uint32_t i = 0; i < a->count; i++) {
        const bundle *b = a->data[i];
        const object *o = b->object == NULL ? gr_object_any(n->s) : b->object;
        uint32_t settled = 0;
        object **each =
            b->types & T_OBJECT ? gr_object_settle(n->s, o, &settled, n->s->root) : NULL;
        for (uint32_t k = 0; k < settled; k++)
            ways[count++] = lower_members(n, each[k], n->s->root, 0, true);
    }
    uint32_t rule = gr_rule_add(c), start = gr_fork_add(c, ways, count);
    c->g->rules.data[rule].start = start;
    for (value *v = n->values; v != NULL; v = v->next)
        lower_value(n, v);
    gr_lower_queue(n->s);
    return rule;
}

/* Any arguments: text and tags, up to the end of the call. */
static uint32_t free_rule(gr_compile *c)
{
    static const char name[] = "[^<>\"/\\]\\x00-\\x1f][^<>\"\\]\\x00-\\x1f]{0,127}";
    uint32_t rule = gr_rule_add(c), ret = gr_node_add(c, GR_RETURN, 0, 0, 0);
    gr_dfa *tags = gr_dfa_regex(c, name, sizeof name - 1, true, "name", NULL);
    tags = gr_dfa_op(c, tags, gr_dfa_texts(c, taken, 2), GR_MINUS);
    uint32_t choose = gr_node_add(c, GR_FORK, 0, 0, 0);
    uint32_t text = gr_bytes_add(c, &(gr_edge){0, ENG_CONSTRAIN_CALL_CLOSE - 1, choose}, 1);
    uint32_t end = gr_dfa_lower(c, tags, false, gr_literal(c, ">", 1, choose));
    uint32_t close = gr_literal(c, "/", 1, end);
    uint32_t open = gr_fork_add(c, (uint32_t[]){close, end}, 2);
    open = mark(c, ENG_CONSTRAIN_SEPARATOR, gr_literal(c, "<", 1, open));
    gr_fork_set(c, choose, (uint32_t[]){text, open, ret}, 3);
    c->g->nodes.data[text].loops = ANY_TEXT;
    c->g->rules.data[rule].start = choose;
    return rule;
}

uint32_t gr_prose_rule(gr_compile *c)
{
    uint32_t rule = gr_rule_add(c), ret = gr_node_add(c, GR_RETURN, 0, 0, 0);
    uint32_t choose = gr_node_add(c, GR_FORK, 0, 0, 0);
    uint32_t text = gr_bytes_add(c, &(gr_edge){0, ENG_CONSTRAIN_CALL_CLOSE - 1, choose}, 1);
    gr_fork_set(c, choose, (uint32_t[]){text, ret}, 2);
    c->g->nodes.data[text].loops = ANY_TEXT;
    c->g->rules.data[rule].start = choose;
    return rule;
}

uint32_t gr_format_rule(gr_compile *c, const eng_format *format, const gr_dfa *held)
{
    gr_text text = {format->text.data, format->text.length};
    static const char any[] = "{\"type\":\"object\"}";
    gr_dfa *set;
    gr_text *texts;
    switch (format->kind) {
    case ENG_FORMAT_OBJECT:
        return gr_schema_rule(c, (gr_text){any, sizeof any - 1});
    case ENG_FORMAT_SCHEMA:
        return gr_schema_rule(c, text);
    case ENG_FORMAT_GBNF:
        return gr_gbnf_rule(c, text);
    case ENG_FORMAT_REGEX:
        set = gr_dfa_regex(c, text.data, text.length, true, "regex", "regex");
        return gr_set_rule(c, held == NULL ? set : gr_dfa_op(c, set, held, GR_AND));
    case ENG_FORMAT_CHOICE:
        texts = gr_alloc(c, format->choice_count, sizeof *texts);
        for (uint32_t i = 0; i < format->choice_count; i++)
            texts[i] = (gr_text){format->choices[i].data, format->choices[i].length};
        set = gr_dfa_texts(c, texts, format->choice_count);
        return gr_set_rule(c, held == NULL ? set : gr_dfa_op(c, set, held, GR_AND));
    case ENG_FORMAT_TEXT:
        break;
    }
    return gr_prose_rule(c);
}

/* The rule of a custom tool's arguments: one tag, its text as the format says. */
static uint32_t input_rule(gr_compile *c, const gr_tool *tool)
{
    schema *s = NULL;
    const dom *only = NULL;
    if (tool->schema.data != NULL) {
        s = gr_schema_begin(c, tool->schema.data, tool->schema.length);
        const dom *properties = gr_get(s->root, "properties");
        only = properties == NULL ? NULL : properties->first;
    }
    if (only == NULL || only->next != NULL || !can_be_tag(only->key))
        gr_fail(c, BASE_INVALID, NULL, "a custom tool has one parameter whose name can be a tag");
    uint32_t text = gr_format_rule(c, tool->input, unspelled(c));
    uint32_t ret = gr_node_add(c, GR_RETURN, 0, 0, 0);
    uint32_t rule = gr_rule_add(c);
    uint32_t start =
        tag(c, false, only->key, gr_node_add(c, GR_CALL, text, tag(c, true, only->key, ret), 0));
    c->g->rules.data[rule].start = start;
    return rule;
}

uint32_t gr_calls_rule(gr_compile *c, const gr_tool *tools, uint32_t tool_count, uint32_t call_max,
                       uint32_t *at)
{
    uint32_t *ways = gr_alloc(c, tool_count, sizeof *ways);
    uint32_t ret = gr_node_add(c, GR_RETURN, 0, 0, 0);
    uint32_t choose = gr_node_add(c, GR_FORK, 0, 0, 0);
    uint32_t close = mark(c, ENG_CONSTRAIN_SEPARATOR, mark(c, ENG_CONSTRAIN_CALL_CLOSE, ret));
    uint32_t after = call_max == 1 ? close : gr_fork_add(c, (uint32_t[]){choose, close}, 2);
    uint32_t ending = mark(c, ENG_CONSTRAIN_SEPARATOR, gr_literal(c, "</invoke>\n", 10, after));
    for (uint32_t i = 0; i < tool_count; i++) {
        const gr_tool *tool = &tools[i];
        *at = tool->index;
        if (memchr(tool->name.data, '"', tool->name.length) != NULL ||
            memchr(tool->name.data, '\n', tool->name.length) != NULL)
            gr_fail(c, BASE_UNSUPPORTED, NULL, "a tool's name cannot hold a quote or a line end");
        uint32_t arguments = tool->input != NULL ? input_rule(c, tool)
                             : tool->free        ? free_rule(c)
                                                 : arguments_rule(c, tool);
        uint32_t next = gr_node_add(c, GR_CALL, arguments, ending, 0);
        next = gr_literal(c, "\">", 2, next);
        next = gr_literal(c, tool->name.data, tool->name.length, next);
        next = gr_literal(c, "<invoke name=\"", 14, next);
        ways[i] = mark(c, ENG_CONSTRAIN_SEPARATOR, next);
    }
    *at = UINT32_MAX;
    gr_fork_set(c, choose, ways, tool_count);
    uint32_t block = mark(c, ENG_CONSTRAIN_CALL, gr_literal(c, "\n", 1, choose));
    uint32_t rule = gr_rule_add(c), start = mark(c, ENG_CONSTRAIN_SEPARATOR, block);
    c->g->rules.data[rule].start = start;
    return rule;
}
