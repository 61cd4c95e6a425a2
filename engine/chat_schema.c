/* The types that a function's JSON schema declares for its arguments, and the conversion of a
 * leaf's text.
 *
 * Understood: type (a name or a list), enum, const, properties, additionalProperties, items, anyOf,
 * oneOf, allOf, local $ref, nullable. Alternatives are merged into one set of types: the text
 * itself decides among them, the narrowest type first and string last. Nodes are made when they are
 * first asked about, one for each schema of the text, so recursive schemas end. */
#include <stdlib.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/num.h"
#include "engine/base/utf8.h"
#include "engine/chat_internal.h"

/* Schemas that one node may merge (alternatives and references); more are ignored. */
#define MERGE_MAX 64
/* Longest name that is compared with one written with escapes. */
#define ESCAPED_MAX 1024

typedef struct node {
    eng_text text;
    eng_text choices;     /* the raw list of `enum`, or the raw value of `const` */
    int32_t items, extra; /* `extra`: additionalProperties */
    uint8_t kinds;
    bool read;
} node;

typedef struct property {
    int32_t owner; /* -1: an empty slot */
    int32_t node;
    uint32_t at, length; /* the name, in `names` */
} property;

struct chat_schema {
    node *nodes;
    uint32_t node_count, node_capacity;
    int32_t *by_text;     /* [2 * node_capacity] open addressing by the schema's place, -1: empty */
    property *properties; /* open addressing by owner and name */
    uint32_t property_count, property_mask;
    base_buf names;
    bool failed;
};

/* ---- JSON ---- */

void chat_json_string(base_buf *out, const char *text, size_t length)
{
    if (base_utf8_valid(text, length)) {
        base_buf_json_string(out, text, length);
        return;
    }
    base_buf clean;
    base_buf_init(&clean, 0);
    for (size_t i = 0; i < length;) {
        size_t n = base_utf8_char(text + i, length - i, NULL);
        if (n > 0) {
            base_buf_add(&clean, text + i, n);
            i += n;
            continue;
        }
        /* One replacement for the longest beginning of a character that stands here. */
        for (n = 1; n < 4 && i + n < length && base_utf8_complete(text + i, n + 1) == 0; n++) {
        }
        base_buf_puts(&clean, "\xEF\xBF\xBD");
        i += n;
    }
    base_buf_json_string(out, clean.data, clean.length);
    out->failed = out->failed || clean.failed;
    base_buf_deinit(&clean);
}

bool chat_json_is(const char *raw, size_t raw_length, const char *text, size_t length)
{
    if (memchr(raw, '\\', raw_length) == NULL)
        return raw_length == length + 2 && memcmp(raw + 1, text, length) == 0;
    char copy[ESCAPED_MAX + 1];
    if (length > ESCAPED_MAX || memchr(text, '\0', length) != NULL)
        return false;
    memcpy(copy, text, length);
    copy[length] = '\0';
    return base_json_string_is(raw, raw_length, copy);
}

static bool key_is(const base_json *json, const char *name, size_t length)
{
    return chat_json_is(json->raw, json->raw_length, name, length);
}

eng_text chat_json_member(eng_text object, const char *name, size_t length)
{
    base_json json;
    eng_text found = {0};
    if (object.data == NULL)
        return found;
    base_json_init(&json, object.data, object.length, BASE_JSON_DEPTH_MAX);
    if (base_json_next(&json) != BASE_JSON_OBJECT_BEGIN)
        return found;
    while (base_json_next(&json) == BASE_JSON_KEY) {
        bool same = key_is(&json, name, length);
        if (!base_json_skip(&json))
            return found;
        if (same)
            found = (eng_text){json.raw, json.raw_length};
    }
    return found;
}

/* ---- nodes ---- */

/* The slot of the node that is made from this place, or the empty one where it would stand. */
static int32_t *find_node(chat_schema *schema, const char *text)
{
    uint32_t size = 2 * schema->node_capacity;
    for (uint32_t i = (uint32_t)(((uintptr_t)text * 0x9E3779B97F4A7C15u) >> 32);; i++) {
        int32_t *slot = &schema->by_text[i % size];
        if (*slot < 0 || schema->nodes[*slot].text.data == text)
            return slot;
    }
}

static bool grow_nodes(chat_schema *schema)
{
    uint32_t capacity = schema->node_capacity * 2 + 16;
    node *nodes = realloc(schema->nodes, capacity * sizeof *nodes);
    if (nodes != NULL)
        schema->nodes = nodes;
    int32_t *by_text = malloc(2 * (size_t)capacity * sizeof *by_text);
    if (nodes == NULL || by_text == NULL) {
        free(by_text);
        schema->failed = true;
        return false;
    }
    memset(by_text, 0xFF, 2 * (size_t)capacity * sizeof *by_text);
    free(schema->by_text);
    schema->by_text = by_text;
    schema->node_capacity = capacity;
    for (uint32_t i = 0; i < schema->node_count; i++)
        *find_node(schema, schema->nodes[i].text.data) = (int32_t)i;
    return true;
}

static int32_t add_node(chat_schema *schema, eng_text text)
{
    if (schema->node_count == schema->node_capacity && !grow_nodes(schema))
        return -1;
    int32_t *slot = find_node(schema, text.data);
    if (*slot >= 0)
        return *slot;
    schema->nodes[schema->node_count] = (node){.text = text, .items = -1, .extra = -1};
    return *slot = (int32_t)schema->node_count++;
}

static uint32_t property_hash(int32_t owner, const char *name, size_t length)
{
    uint32_t hash = 2166136261u ^ (uint32_t)owner * 0x9E3779B9u;
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)name[i]) * 16777619u;
    return hash ^ hash >> 15;
}

/* The slot of a property, or the empty one where it would stand. */
static property *find_property(chat_schema *schema, int32_t owner, const char *name, size_t length)
{
    for (uint32_t i = property_hash(owner, name, length);; i++) {
        property *slot = &schema->properties[i & schema->property_mask];
        if (slot->owner < 0 || (slot->owner == owner && slot->length == length &&
                                memcmp(schema->names.data + slot->at, name, length) == 0))
            return slot;
    }
}

static bool grow_properties(chat_schema *schema)
{
    property *old = schema->properties;
    uint32_t old_size = old == NULL ? 0 : schema->property_mask + 1,
             size = old_size == 0 ? 64 : 2 * old_size;
    property *properties = malloc(size * sizeof *properties);
    if (properties == NULL) {
        schema->failed = true;
        return false;
    }
    memset(properties, 0xFF, size * sizeof *properties);
    schema->properties = properties;
    schema->property_mask = size - 1;
    for (uint32_t i = 0; i < old_size; i++)
        if (old[i].owner >= 0)
            *find_property(schema, old[i].owner, schema->names.data + old[i].at, old[i].length) =
                old[i];
    free(old);
    return true;
}

/* Adds a member unless an earlier alternative has named it. */
static void add_property(chat_schema *schema, int32_t owner, const base_json *key, eng_text text)
{
    if (2 * (schema->property_count + 1) > schema->property_mask && !grow_properties(schema))
        return;
    size_t at = schema->names.length;
    base_json_unescape(&schema->names, key->raw, key->raw_length);
    base_buf_add(&schema->names, "", 1);
    if (schema->names.failed || at > UINT32_MAX) {
        schema->failed = true;
        return;
    }
    size_t length = schema->names.length - 1 - at;
    property *slot = find_property(schema, owner, schema->names.data + at, length);
    int32_t made = slot->owner < 0 ? add_node(schema, text) : -1;
    if (made < 0)
        return;
    *slot =
        (property){.owner = owner, .node = made, .at = (uint32_t)at, .length = (uint32_t)length};
    schema->property_count++;
}

static void add_properties(chat_schema *schema, int32_t owner, eng_text object)
{
    base_json json;
    base_json_init(&json, object.data, object.length, BASE_JSON_DEPTH_MAX);
    if (base_json_next(&json) != BASE_JSON_OBJECT_BEGIN)
        return;
    while (base_json_next(&json) == BASE_JSON_KEY) {
        base_json key = json;
        if (!base_json_skip(&json))
            return;
        add_property(schema, owner, &key, (eng_text){json.raw, json.raw_length});
    }
}

static uint8_t kind_of_name(const base_json *json)
{
    static const char *const names[] = {"null",   "boolean", "integer", "number",
                                        "string", "array",   "object"};
    for (int i = 0; i < 7; i++)
        if (base_json_string_is(json->raw, json->raw_length, names[i]))
            return (uint8_t)(1 << i);
    return 0;
}

static uint8_t kinds_of_type(eng_text type)
{
    base_json json;
    base_json_init(&json, type.data, type.length, 2);
    base_json_kind kind = base_json_next(&json);
    if (kind == BASE_JSON_STRING)
        return kind_of_name(&json);
    uint8_t kinds = 0;
    if (kind == BASE_JSON_ARRAY_BEGIN)
        while (base_json_next(&json) == BASE_JSON_STRING)
            kinds |= kind_of_name(&json);
    return kinds;
}

static uint8_t kind_of_value(base_json_kind kind, const base_json *json)
{
    switch (kind) {
    case BASE_JSON_NULL:
        return CHAT_NULL;
    case BASE_JSON_TRUE:
    case BASE_JSON_FALSE:
        return CHAT_BOOLEAN;
    case BASE_JSON_NUMBER:
        for (size_t i = 0; i < json->raw_length; i++)
            if (json->raw[i] == '.' || (json->raw[i] | 0x20) == 'e')
                return CHAT_NUMBER;
        return CHAT_INTEGER;
    case BASE_JSON_STRING:
        return CHAT_STRING;
    case BASE_JSON_ARRAY_BEGIN:
        return CHAT_ARRAY;
    case BASE_JSON_OBJECT_BEGIN:
        return CHAT_OBJECT;
    default:
        return 0;
    }
}

/* The types of the values of `enum` (a list) or of `const` (one value). */
static uint8_t kinds_of_choices(eng_text choices, bool list)
{
    base_json json;
    uint8_t kinds = 0;
    base_json_init(&json, choices.data, choices.length, BASE_JSON_DEPTH_MAX);
    base_json_kind kind = base_json_next(&json);
    if (list)
        kind = base_json_next(&json);
    while (kind != BASE_JSON_ERROR && kind != BASE_JSON_END && kind != BASE_JSON_ARRAY_END) {
        kinds |= kind_of_value(kind, &json);
        if ((kind == BASE_JSON_ARRAY_BEGIN || kind == BASE_JSON_OBJECT_BEGIN) &&
            !base_json_skip(&json))
            break;
        kind = base_json_next(&json);
    }
    return kinds;
}

/* The schema that a local reference ("#/$defs/name") points to; absent if there is none. */
static eng_text follow_ref(chat_schema *schema, const base_json *ref)
{
    base_buf path;
    eng_text at = {0};
    base_buf_init(&path, 0);
    base_json_unescape(&path, ref->raw, ref->raw_length);
    const char *p = path.data;
    schema->failed = schema->failed || path.failed;
    if (p != NULL && !path.failed && p[0] == '#') {
        at = schema->nodes[0].text;
        for (p++; *p == '/' && at.data != NULL;) {
            const char *end = strchrnul(++p, '/');
            char name[256];
            size_t n = 0;
            while (p < end && n + 1 < sizeof name) {
                bool tilde = p[0] == '~' && (p[1] == '0' || p[1] == '1');
                name[n++] = tilde ? (p[1] == '0' ? '~' : '/') : *p;
                p += tilde ? 2 : 1;
            }
            at = chat_json_member(at, name, n);
            p = end;
        }
    }
    base_buf_deinit(&path);
    return at;
}

/* Schemas that still have to be merged into a node. */
typedef struct pending {
    eng_text list[MERGE_MAX];
    uint32_t count, seen;
} pending;

static void push_pending(pending *todo, eng_text text)
{
    if (text.data == NULL || todo->seen == MERGE_MAX)
        return;
    todo->list[todo->count++] = text;
    todo->seen++;
}

static void push_alternatives(pending *todo, eng_text list)
{
    base_json json;
    base_json_init(&json, list.data, list.length, BASE_JSON_DEPTH_MAX);
    if (base_json_next(&json) != BASE_JSON_ARRAY_BEGIN)
        return;
    while (base_json_next(&json) == BASE_JSON_OBJECT_BEGIN && base_json_skip(&json))
        push_pending(todo, (eng_text){json.raw, json.raw_length});
}

static void set_child(chat_schema *schema, int32_t owner, bool items, eng_text text)
{
    const node *n = &schema->nodes[owner];
    if ((items ? n->items : n->extra) >= 0 || text.length == 0 || text.data[0] != '{')
        return;
    int32_t made = add_node(schema, text);
    if (items)
        schema->nodes[owner].items = made;
    else
        schema->nodes[owner].extra = made;
}

/* Merges one schema object into node `at`. */
static void merge_schema(chat_schema *schema, int32_t at, eng_text text, pending *todo)
{
    base_json json;
    uint8_t typed = 0, implied = 0;
    base_json_init(&json, text.data, text.length, BASE_JSON_DEPTH_MAX);
    if (base_json_next(&json) != BASE_JSON_OBJECT_BEGIN)
        return;
    while (base_json_next(&json) == BASE_JSON_KEY) {
        base_json key = json;
        if (!base_json_skip(&json))
            return;
        eng_text value = {json.raw, json.raw_length};
        if (key_is(&key, "type", 4)) {
            typed |= kinds_of_type(value);
        } else if (key_is(&key, "enum", 4) || key_is(&key, "const", 5)) {
            bool list = key.raw[1] == 'e';
            implied |= kinds_of_choices(value, list);
            if (schema->nodes[at].choices.data == NULL)
                schema->nodes[at].choices = value;
        } else if (key_is(&key, "properties", 10)) {
            implied |= CHAT_OBJECT;
            add_properties(schema, at, value);
        } else if (key_is(&key, "items", 5)) {
            implied |= CHAT_ARRAY;
            set_child(schema, at, true, value);
        } else if (key_is(&key, "additionalProperties", 20)) {
            set_child(schema, at, false, value);
        } else if (key_is(&key, "anyOf", 5) || key_is(&key, "oneOf", 5) ||
                   key_is(&key, "allOf", 5)) {
            push_alternatives(todo, value);
        } else if (key_is(&key, "$ref", 4) && value.data[0] == '"') {
            push_pending(todo, follow_ref(schema, &json));
        } else if (key_is(&key, "nullable", 8) && value.data[0] == 't') {
            typed |= CHAT_NULL;
        }
    }
    schema->nodes[at].kinds |= (typed & ~CHAT_NULL) != 0 || typed == CHAT_NULL ? typed : implied;
}

/* The node, read if it was not yet; NULL for -1. */
static const node *get(chat_schema *schema, int32_t at)
{
    if (schema == NULL || at < 0)
        return NULL;
    if (!schema->nodes[at].read) {
        pending todo = {.count = 0};
        schema->nodes[at].read = true;
        push_pending(&todo, schema->nodes[at].text);
        while (todo.count > 0)
            merge_schema(schema, at, todo.list[--todo.count], &todo);
    }
    return &schema->nodes[at];
}

chat_schema *chat_schema_create(eng_text parameters)
{
    chat_schema *schema = calloc(1, sizeof *schema);
    if (schema == NULL)
        return NULL;
    if (!grow_properties(schema) || add_node(schema, parameters) < 0) {
        chat_schema_destroy(schema);
        return NULL;
    }
    return schema;
}

void chat_schema_destroy(chat_schema *schema)
{
    if (schema == NULL)
        return;
    free(schema->nodes);
    free(schema->by_text);
    free(schema->properties);
    base_buf_deinit(&schema->names);
    free(schema);
}

bool chat_schema_failed(const chat_schema *schema)
{
    return schema != NULL && schema->failed;
}

uint8_t chat_schema_kinds(chat_schema *schema, int32_t at)
{
    const node *n = get(schema, at);
    return n == NULL ? 0 : n->kinds;
}

int32_t chat_schema_member(chat_schema *schema, int32_t at, const char *name, size_t length,
                           bool *declared)
{
    const node *n = get(schema, at);
    const property *slot = n == NULL ? NULL : find_property(schema, at, name, length);
    bool found = slot != NULL && slot->owner >= 0;
    if (declared != NULL)
        *declared = found;
    return found ? slot->node : n != NULL ? n->extra : -1;
}

int32_t chat_schema_items(chat_schema *schema, int32_t at)
{
    const node *n = get(schema, at);
    return n == NULL ? -1 : n->items;
}

/* ---- conversion ---- */

static eng_text trim(eng_text text)
{
    while (text.length > 0 && memchr(" \t\r\n", text.data[0], 4) != NULL) {
        text.data++;
        text.length--;
    }
    while (text.length > 0 && memchr(" \t\r\n", text.data[text.length - 1], 4) != NULL)
        text.length--;
    return text;
}

/* The type of JSON text, 0 if it is none. A number without fraction or exponent is an integer, as
 * is one whose fraction is zero (JSON Schema's rule). */
static uint8_t kind_of_text(eng_text text)
{
    base_json json;
    if (text.length == 0)
        return 0;
    base_json_init(&json, text.data, text.length, BASE_JSON_DEPTH_MAX);
    base_json_kind first = base_json_next(&json), kind = first;
    while (kind != BASE_JSON_END && kind != BASE_JSON_ERROR)
        kind = base_json_next(&json);
    if (kind == BASE_JSON_ERROR)
        return 0;
    if (first != BASE_JSON_NUMBER)
        return kind_of_value(first, &json);
    size_t whole = strspn(text.data, "-0123456789");
    whole = base_min(whole, text.length);
    bool zero = whole < text.length && text.data[whole] == '.';
    for (size_t i = whole + 1; zero && i < text.length; i++)
        zero = text.data[i] == '0';
    return whole == text.length || zero ? CHAT_INTEGER : CHAT_NUMBER;
}

/* The value of `enum` or `const` that is written like `text`: its raw JSON, a string only if
 * nothing else is. */
static eng_text find_choice(eng_text choices, eng_text text, eng_text trimmed)
{
    base_json json;
    eng_text found = {0};
    if (choices.data == NULL)
        return found;
    base_json_init(&json, choices.data, choices.length, BASE_JSON_DEPTH_MAX);
    for (;;) {
        base_json_kind kind = base_json_next(&json);
        if (kind == BASE_JSON_END || kind == BASE_JSON_ERROR)
            return found;
        if (kind == BASE_JSON_STRING && found.data == NULL && key_is(&json, text.data, text.length))
            found = (eng_text){json.raw, json.raw_length};
        bool scalar = kind == BASE_JSON_NULL || kind == BASE_JSON_TRUE || kind == BASE_JSON_FALSE ||
                      kind == BASE_JSON_NUMBER;
        if (scalar && json.raw_length == trimmed.length &&
            memcmp(json.raw, trimmed.data, trimmed.length) == 0)
            return (eng_text){json.raw, json.raw_length};
    }
}

/* What stands for no text at all. */
static const char *empty_value(uint8_t kinds)
{
    if (kinds == 0 || (kinds & CHAT_STRING) != 0)
        return "\"\"";
    if ((kinds & CHAT_OBJECT) != 0)
        return "{}";
    if ((kinds & CHAT_ARRAY) != 0)
        return "[]";
    return (kinds & CHAT_NULL) != 0 ? "null" : "\"\"";
}

void chat_schema_convert(chat_schema *schema, int32_t at, base_buf *out, const char *bytes,
                         size_t length)
{
    const node *n = get(schema, at);
    uint8_t kinds = n == NULL ? 0 : n->kinds;
    eng_text text = {length == 0 ? "" : bytes, length}, trimmed = trim(text);
    if (length == 0 || (trimmed.length == 0 && (kinds & CHAT_STRING) == 0 && kinds != 0)) {
        base_buf_puts(out, empty_value(kinds));
        return;
    }
    eng_text choice = n == NULL ? (eng_text){0} : find_choice(n->choices, text, trimmed);
    if (choice.data != NULL) {
        base_buf_add(out, choice.data, choice.length);
        return;
    }
    uint8_t kind = kinds == 0 || kinds == CHAT_STRING ? 0 : kind_of_text(trimmed);
    bool fits = (kinds & kind) != 0 || (kind == CHAT_INTEGER && (kinds & CHAT_NUMBER) != 0);
    if (fits && kind != CHAT_STRING) {
        base_buf_add(out, trimmed.data, trimmed.length);
    } else if ((kinds & CHAT_ARRAY) != 0 && (kinds & CHAT_STRING) == 0) {
        /* One value where a list is wanted: a list of it. A list of lists is not looked into, so
         * this goes one deep. */
        int32_t items = n->items;
        base_buf_add(out, "[", 1);
        if ((chat_schema_kinds(schema, items) & CHAT_ARRAY) != 0)
            chat_json_string(out, text.data, text.length);
        else
            chat_schema_convert(schema, items, out, text.data, text.length);
        base_buf_add(out, "]", 1);
    } else {
        chat_json_string(out, text.data, text.length);
    }
}
