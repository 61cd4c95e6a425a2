/* The value of one parameter, gathered from its tags and written as JSON when it is whole.
 *
 * It has to be whole first: whether a tag is a member or the first element of a list shows only
 * when it comes again. Nodes are an array linked by index, in the order of their tags; same-named
 * children of one node are chained through a table, so that any number of them costs linear time.
 * Nesting is bounded: a tag below DEPTH_MAX is text of its parent. */
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "engine/chat_internal.h"

#define DEPTH_MAX 64

typedef struct node {
    int32_t parent, first, last, next; /* children in order */
    int32_t same,
        same_last; /* the next child of that name; of the first one: the last of its chain */
    bool repeat;   /* not the first child of its name */
    uint8_t kinds;
    int32_t schema;
    uint32_t name_at, name_length; /* in `names` */
    size_t text_at, text_length;   /* in `text`; what stands before the first child */
} node;

struct chat_tree {
    chat_schema *schema;
    node *nodes; /* node 0 stands for the parameter; its children are its values, all of one name */
    uint32_t node_count, node_capacity;
    int32_t at; /* the innermost open node */
    uint32_t depth;
    base_buf names, text;
    int32_t *table; /* first children by parent and name; -1 is empty */
    uint32_t table_size, table_count;
    bool failed;
};

chat_tree *chat_tree_create(void)
{
    chat_tree *tree = calloc(1, sizeof *tree);
    if (tree != NULL)
        tree->at = -1;
    return tree;
}

void chat_tree_destroy(chat_tree *tree)
{
    if (tree == NULL)
        return;
    free(tree->nodes);
    free(tree->table);
    base_buf_deinit(&tree->names);
    base_buf_deinit(&tree->text);
    free(tree);
}

bool chat_tree_failed(const chat_tree *tree)
{
    return tree->failed || tree->names.failed || tree->text.failed;
}

static bool name_is(const chat_tree *tree, const node *n, const char *name, size_t length)
{
    return n->name_length == length && memcmp(tree->names.data + n->name_at, name, length) == 0;
}

static uint32_t hash(int32_t parent, const char *name, size_t length)
{
    uint32_t value = 2166136261u ^ (uint32_t)parent * 0x9E3779B9u;
    for (size_t i = 0; i < length; i++)
        value = (value ^ (unsigned char)name[i]) * 16777619u;
    return value ^ value >> 15;
}

static int32_t *slot_of(chat_tree *tree, int32_t parent, const char *name, size_t length)
{
    for (uint32_t i = hash(parent, name, length);; i++) {
        int32_t *slot = &tree->table[i & (tree->table_size - 1)];
        if (*slot < 0 || (tree->nodes[*slot].parent == parent &&
                          name_is(tree, &tree->nodes[*slot], name, length)))
            return slot;
    }
}

static bool grow_table(chat_tree *tree)
{
    uint32_t old_size = tree->table_size;
    int32_t *old = tree->table;
    uint32_t size = old_size == 0 ? 64 : 2 * old_size;
    int32_t *table = malloc(size * sizeof *table);
    if (table == NULL)
        return false;
    memset(table, 0xFF, size * sizeof *table);
    tree->table = table;
    tree->table_size = size;
    for (uint32_t i = 0; i < old_size; i++)
        if (old[i] >= 0) {
            const node *n = &tree->nodes[old[i]];
            *slot_of(tree, n->parent, tree->names.data + n->name_at, n->name_length) = old[i];
        }
    free(old);
    return true;
}

/* Links node `made` as the last child of its parent and into the chain of its name. */
static void link_child(chat_tree *tree, int32_t made)
{
    node *n = &tree->nodes[made], *parent = &tree->nodes[n->parent];
    if (parent->last >= 0)
        tree->nodes[parent->last].next = made;
    else
        parent->first = made;
    parent->last = made;
    int32_t *slot = slot_of(tree, n->parent, tree->names.data + n->name_at, n->name_length);
    if (*slot < 0) {
        *slot = made;
        tree->table_count++;
        return;
    }
    node *first = &tree->nodes[*slot];
    n->repeat = true;
    tree->nodes[first->same_last].same = made;
    first->same_last = made;
}

static int32_t add_node(chat_tree *tree, int32_t parent, int32_t schema, const char *name,
                        size_t length)
{
    if (tree->node_count == tree->node_capacity) {
        uint32_t capacity = 2 * tree->node_capacity + 16;
        node *nodes = realloc(tree->nodes, capacity * sizeof *nodes);
        if (nodes == NULL)
            return -1;
        tree->nodes = nodes;
        tree->node_capacity = capacity;
    }
    if (2 * (tree->table_count + 1) > tree->table_size && !grow_table(tree))
        return -1;
    int32_t made = (int32_t)tree->node_count;
    node n = {.parent = parent,
              .first = -1,
              .last = -1,
              .next = -1,
              .same = -1,
              .same_last = made,
              .schema = schema};
    n.kinds = chat_schema_kinds(tree->schema, schema);
    n.name_at = (uint32_t)tree->names.length;
    n.name_length = (uint32_t)length;
    base_buf_add(&tree->names, name, length);
    if (tree->names.failed || tree->names.length > UINT32_MAX)
        return -1;
    tree->nodes[tree->node_count++] = n;
    if (parent >= 0)
        link_child(tree, made);
    return made;
}

void chat_tree_begin(chat_tree *tree, chat_schema *schema, int32_t schema_node, const char *name,
                     size_t length)
{
    tree->schema = schema;
    tree->node_count = 0;
    base_buf_clear(&tree->names);
    base_buf_clear(&tree->text);
    if (tree->table_count > 0)
        memset(tree->table, 0xFF, tree->table_size * sizeof *tree->table);
    tree->table_count = 0;
    if (add_node(tree, -1, schema_node, name, length) < 0) {
        tree->failed = true;
        tree->node_count = 0;
        tree->at = -1;
        return;
    }
    chat_tree_again(tree);
}

void chat_tree_again(chat_tree *tree)
{
    if (tree->node_count == 0)
        return;
    /* The name is copied: adding a node may move the names. */
    const node *root = &tree->nodes[0];
    base_buf name;
    base_buf_init(&name, 0);
    base_buf_add(&name, tree->names.data + root->name_at, root->name_length);
    tree->at = name.failed ? -1 : add_node(tree, 0, root->schema, name.data, root->name_length);
    base_buf_deinit(&name);
    tree->depth = 1;
    tree->failed = tree->failed || tree->at < 0;
}

void chat_tree_text(chat_tree *tree, const char *text, size_t length)
{
    if (tree->at < 0)
        return;
    node *n = &tree->nodes[tree->at];
    if (n->first >= 0)
        return; /* between children: layout */
    if (n->text_length == 0)
        n->text_at = tree->text.length;
    base_buf_add(&tree->text, text, length);
    n->text_length = tree->text.length - n->text_at;
}

static bool only(uint8_t kinds, uint8_t allowed)
{
    return kinds != 0 && (kinds & ~allowed) == 0;
}

#define SCALARS (CHAT_NULL | CHAT_BOOLEAN | CHAT_INTEGER | CHAT_NUMBER | CHAT_STRING)

static int32_t child_schema(chat_tree *tree, const node *parent, const char *name, size_t length)
{
    bool declared, item = length == 4 && memcmp(name, "item", 4) == 0;
    int32_t member = chat_schema_member(tree->schema, parent->schema, name, length, &declared);
    if (declared || (parent->kinds & CHAT_ARRAY) == 0)
        return member;
    int32_t items = chat_schema_items(tree->schema, parent->schema);
    return item ? items : chat_schema_member(tree->schema, items, name, length, NULL);
}

/* Puts a tag that is no tag here back into the text. */
static void tag_as_text(chat_tree *tree, const char *before, const char *name, size_t length)
{
    chat_tree_text(tree, CHAT_NS, sizeof CHAT_NS - 1);
    chat_tree_text(tree, before, strlen(before));
    chat_tree_text(tree, name, length);
    chat_tree_text(tree, ">", 1);
}

chat_tree_result chat_tree_open(chat_tree *tree, const char *name, size_t length)
{
    if (tree->at < 0)
        return CHAT_TREE_TAKEN;
    /* A number cannot hold tags: it was not closed. */
    while (only(tree->nodes[tree->at].kinds, SCALARS & (uint8_t)~CHAT_STRING)) {
        if (tree->nodes[tree->at].parent == 0)
            return CHAT_TREE_ABOVE;
        tree->at = tree->nodes[tree->at].parent;
        tree->depth--;
    }
    const node *parent = &tree->nodes[tree->at];
    if (only(parent->kinds, SCALARS) && parent->parent == 0)
        return CHAT_TREE_ABOVE;
    if (only(parent->kinds, SCALARS) || tree->depth >= DEPTH_MAX) {
        tag_as_text(tree, "<", name, length);
        return CHAT_TREE_TAKEN;
    }
    int32_t made = add_node(tree, tree->at, child_schema(tree, parent, name, length), name, length);
    if (made < 0) {
        tree->failed = true;
        return CHAT_TREE_TAKEN;
    }
    tree->at = made;
    tree->depth++;
    return CHAT_TREE_TAKEN;
}

/* `text NS</name>` in an object that declares `name`: its opening tag was left out. */
static bool close_unopened(chat_tree *tree, const char *name, size_t length)
{
    node *n = &tree->nodes[tree->at];
    bool declared;
    int32_t schema = chat_schema_member(tree->schema, n->schema, name, length, &declared);
    if (!declared || n->text_length == 0 || n->first >= 0)
        return false;
    int32_t made = add_node(tree, tree->at, schema, name, length);
    if (made < 0)
        return false;
    n = &tree->nodes[tree->at];
    tree->nodes[made].text_at = n->text_at;
    tree->nodes[made].text_length = n->text_length;
    n->text_length = 0;
    return true;
}

chat_tree_result chat_tree_close(chat_tree *tree, const char *name, size_t length)
{
    if (tree->at < 0)
        return CHAT_TREE_CLOSED;
    uint32_t depth = tree->depth;
    for (int32_t at = tree->at; at > 0; at = tree->nodes[at].parent, depth--) {
        if (!name_is(tree, &tree->nodes[at], name, length))
            continue;
        tree->at = tree->nodes[at].parent;
        tree->depth = depth - 1;
        return tree->at == 0 ? CHAT_TREE_CLOSED : CHAT_TREE_TAKEN;
    }
    if (!close_unopened(tree, name, length) && only(tree->nodes[tree->at].kinds, CHAT_STRING))
        tag_as_text(tree, "</", name, length);
    return CHAT_TREE_TAKEN;
}

static bool is_list(const chat_tree *tree, const node *n)
{
    if (n->first < 0 || !name_is(tree, &tree->nodes[n->first], "item", 4))
        return false;
    return n->kinds == 0 || (n->kinds & CHAT_ARRAY) != 0 || (n->kinds & CHAT_OBJECT) == 0;
}

bool chat_tree_may_repeat(chat_tree *tree)
{
    if (tree->node_count == 0)
        return false;
    const node *root = &tree->nodes[0];
    return (root->kinds & CHAT_ARRAY) != 0 && root->last > 0 &&
           !is_list(tree, &tree->nodes[root->last]);
}

/* ---- writing ---- */

typedef enum frame_kind { FRAME_OBJECT, FRAME_LIST, FRAME_CHAIN } frame_kind;

typedef struct frame {
    frame_kind kind;
    int32_t next; /* the child to write next, -1 when through */
    bool any;     /* something was written before */
} frame;

static bool blank(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if (memchr(" \t\r\n", text[i], 4) == NULL)
            return false;
    return true;
}

/* A node's own text; where no node has any there is no buffer to point into. */
static const char *text_of(const chat_tree *tree, const node *n)
{
    return n->text_length == 0 ? "" : tree->text.data + n->text_at;
}

/* A container's opening bracket and its frame. */
static frame open_container(chat_tree *tree, base_buf *out, const node *n)
{
    frame f = {.kind = is_list(tree, n) ? FRAME_LIST : FRAME_OBJECT, .next = n->first};
    base_buf_add(out, f.kind == FRAME_LIST ? "[" : "{", 1);
    const char *text = text_of(tree, n);
    if (f.kind == FRAME_OBJECT && n->text_length > 0 && !blank(text, n->text_length)) {
        base_buf_puts(out, "\"$text\":"); /* text beside child tags is not lost */
        chat_json_string(out, text, n->text_length);
        f.any = true;
    }
    return f;
}

/* Takes the next child of a frame, -1 at its end. Members of one name are one child: the chain's
 * first. */
static int32_t take_child(const chat_tree *tree, frame *f)
{
    int32_t at = f->next;
    while (at >= 0 && f->kind == FRAME_OBJECT && tree->nodes[at].repeat)
        at = tree->nodes[at].next;
    if (at >= 0)
        f->next = f->kind == FRAME_CHAIN ? tree->nodes[at].same : tree->nodes[at].next;
    return at;
}

/* The schema of a leaf: an element of a chain is one of the list's items. */
static int32_t leaf_schema(chat_tree *tree, const node *n, bool in_chain)
{
    return in_chain && (n->kinds & CHAT_ARRAY) != 0 ? chat_schema_items(tree->schema, n->schema)
                                                    : n->schema;
}

void chat_tree_write(chat_tree *tree, base_buf *out)
{
    frame frames[2 * DEPTH_MAX + 4];
    uint32_t count = 0;
    if (tree->node_count < 2) {
        base_buf_puts(out, "null");
        return;
    }
    int32_t at = tree->nodes[0].first;
    bool in_chain = false;
    for (;;) {
        const node *n = &tree->nodes[at];
        if (!in_chain && n->same >= 0 && (count == 0 || frames[count - 1].kind == FRAME_OBJECT)) {
            base_buf_add(out, "[", 1);
            frames[count++] = (frame){.kind = FRAME_CHAIN, .next = at};
        } else if (n->first >= 0) {
            frames[count++] = open_container(tree, out, n);
        } else {
            chat_schema_convert(tree->schema, leaf_schema(tree, n, in_chain), out, text_of(tree, n),
                                n->text_length);
        }
        while (count > 0 && (at = take_child(tree, &frames[count - 1])) < 0)
            base_buf_add(out, frames[--count].kind == FRAME_OBJECT ? "}" : "]", 1);
        if (count == 0)
            return;
        frame *f = &frames[count - 1];
        if (f->any)
            base_buf_add(out, ",", 1);
        f->any = true;
        in_chain = f->kind == FRAME_CHAIN;
        if (f->kind == FRAME_OBJECT) {
            chat_json_string(out, tree->names.data + tree->nodes[at].name_at,
                             tree->nodes[at].name_length);
            base_buf_add(out, ":", 1);
        }
    }
}
