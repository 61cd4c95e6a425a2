/* A schema's text as a tree, and what its references name. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/grammar_schema.h"

#define DEPTH_MAX 128 /* of the schema's text */

void gr_pointer(const dom *node, const char *keyword, char out[GR_POINTER_SIZE])
{
    char text[400]; /* a pointer too long for a message loses its end */
    snprintf(out, GR_POINTER_SIZE, "%s%s", keyword == NULL ? "" : "/",
             keyword == NULL ? "" : keyword);
    for (; node != NULL && node->parent != NULL; node = node->parent) {
        if (node->parent->kind == BASE_JSON_ARRAY_BEGIN)
            snprintf(text, sizeof text, "/%u%s", node->index, out);
        else
            snprintf(text, sizeof text, "/%.*s%s", (int)node->key.length, node->key.data, out);
        memcpy(out, text, GR_POINTER_SIZE - 1);
        out[GR_POINTER_SIZE - 1] = '\0';
    }
}

void gr_wrong(schema *s, base_code code, const dom *node, const char *keyword, const char *fmt, ...)
{
    char text[128], pointer[GR_POINTER_SIZE];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    gr_pointer(node, keyword, pointer);
    gr_fail(s->c, code, pointer, "%s at %s: %s", keyword == NULL ? "schema" : keyword, pointer,
            text);
}

static gr_text decoded(schema *s, const char *raw, size_t length)
{
    if (memchr(raw, '\\', length) == NULL)
        return (gr_text){raw + 1, length - 2};
    base_buf buf;
    base_buf_init(&buf, 0);
    base_json_unescape(&buf, raw, length);
    char *copy = buf.failed ? NULL : base_arena_copy(s->c->arena, buf.data, buf.length);
    gr_text text = {copy, buf.length};
    base_buf_deinit(&buf);
    if (copy == NULL)
        gr_fail(s->c, BASE_NOMEM, NULL, "no memory for a grammar");
    return text;
}

dom *gr_dom_parse(schema *s, const char *bytes, size_t length)
{
    base_json json;
    dom *top = NULL, *root = NULL;
    gr_text key = {0};
    base_json_init(&json, bytes, length, DEPTH_MAX);
    for (;;) {
        base_json_kind kind = base_json_next(&json);
        gr_work(s->c, 1 + json.raw_length / 64);
        if (kind == BASE_JSON_ERROR)
            gr_fail(s->c, BASE_INVALID, NULL, "the schema is no JSON: %s at byte %zu", json.error,
                    json.pos);
        if (kind == BASE_JSON_END)
            return root;
        if (kind == BASE_JSON_KEY) {
            key = decoded(s, json.raw, json.raw_length);
            continue;
        }
        if (kind == BASE_JSON_OBJECT_END || kind == BASE_JSON_ARRAY_END) {
            top = top->parent;
            continue;
        }
        dom *node = gr_alloc(s->c, 1, sizeof *node);
        node->kind = kind;
        node->parent = top;
        if (kind == BASE_JSON_STRING)
            node->text = decoded(s, json.raw, json.raw_length);
        else if (kind == BASE_JSON_NUMBER)
            node->text = (gr_text){json.raw, json.raw_length};
        if (top == NULL) {
            root = node;
        } else {
            node->key = key;
            node->index = top->last == NULL ? 0 : top->last->index + 1;
            *(top->last == NULL ? &top->first : &top->last->next) = node;
            top->last = node;
        }
        if (kind == BASE_JSON_OBJECT_BEGIN || kind == BASE_JSON_ARRAY_BEGIN)
            top = node;
    }
}

bool gr_is(gr_text text, const char *what)
{
    return text.length == strlen(what) && memcmp(text.data, what, text.length) == 0;
}

bool gr_same(gr_text a, gr_text b)
{
    return a.length == b.length && (a.length == 0 || memcmp(a.data, b.data, a.length) == 0);
}

dom *gr_get(const dom *node, const char *key)
{
    dom *found = NULL;
    if (node->kind == BASE_JSON_OBJECT_BEGIN)
        for (dom *child = node->first; child != NULL; child = child->next)
            if (gr_is(child->key, key))
                found = child; /* the last of equal names counts */
    return found;
}

dom *gr_dom_walk(dom *node, const dom *top)
{
    if (node->first != NULL)
        return node->first;
    while (node != top && node->next == NULL)
        node = node->parent;
    return node == top ? NULL : node->next;
}

static bool holds_values(const dom *node)
{
    return node->parent != NULL && node->parent->kind == BASE_JSON_OBJECT_BEGIN &&
           (gr_is(node->key, "enum") || gr_is(node->key, "const"));
}

static dom *id_of(const dom *node)
{
    dom *id = gr_get(node, "$id");
    if (id == NULL)
        id = gr_get(node, "id");
    return id != NULL && id->kind == BASE_JSON_STRING && id->text.length > 0 ? id : NULL;
}

/* ---- resources ---- */

static size_t find(gr_text text, size_t from, const char *set)
{
    while (from < text.length && (text.data[from] == '\0' || strchr(set, text.data[from]) == NULL))
        from++;
    return from;
}

/* Bytes of `scheme:` at the beginning, 0 if there is none. */
static size_t scheme_of(gr_text uri)
{
    size_t end = find(uri, 0, ":/?#");
    return end > 0 && end < uri.length && uri.data[end] == ':' ? end + 1 : 0;
}

/* Where the path begins: behind `scheme:` and `//authority`. */
static size_t path_of(gr_text uri)
{
    size_t at = scheme_of(uri);
    if (uri.length >= at + 2 && uri.data[at] == '/' && uri.data[at + 1] == '/')
        at = find(uri, at + 2, "/?#");
    return at;
}

/* Takes `.` and `..` out of the path text[from, end), which begins behind its first slash; returns
 * its new end. */
static size_t undot(char *text, size_t from, size_t end)
{
    size_t to = from;
    for (size_t i = from, n; i < end; i += n + 1) {
        n = find((gr_text){text, end}, i, "/") - i;
        if (n == 2 && memcmp(text + i, "..", 2) == 0) {
            for (to -= to > from; to > from && text[to - 1] != '/'; to--) {
            }
        } else if (n != 1 || text[i] != '.') {
            memmove(text + to, text + i, n);
            to += n;
            if (i + n < end)
                text[to++] = '/';
        }
    }
    return to;
}

/* `reference`, without a fragment, seen from `base` (RFC 3986, 5.2). */
static gr_text uri_join(schema *s, gr_text base, gr_text reference)
{
    if (reference.length == 0 || scheme_of(reference) > 0 || base.length == 0)
        return reference.length == 0 ? base : reference;
    size_t scheme = scheme_of(base), path = path_of(base), keep = find(base, path, "?#");
    bool host = reference.length >= 2 && memcmp(reference.data, "//", 2) == 0;
    if (host)
        keep = scheme;
    else if (reference.data[0] == '/')
        keep = path;
    else
        while (reference.data[0] != '?' && keep > path && base.data[keep - 1] != '/')
            keep--;
    char *out = gr_alloc(s->c, base.length + reference.length + 2, 1);
    size_t length = keep;
    memcpy(out, base.data, keep);
    if (keep == path && path > scheme && strchr("/?", reference.data[0]) == NULL)
        out[length++] = '/';
    memcpy(out + length, reference.data, reference.length);
    length += reference.length;
    if (host)
        return (gr_text){out, length};
    size_t from = path + (path < length && out[path] == '/');
    size_t end = find((gr_text){out, length}, from, "?"), to = undot(out, from, end);
    memmove(out + to, out + end, length - end);
    return (gr_text){out, to + length - end};
}

static gr_text without_fragment(gr_text uri)
{
    return (gr_text){uri.data, find(uri, 0, "#")};
}

void gr_dom_resources(schema *s)
{
    dom **end = &s->root->next_resource;
    for (dom *node = s->root; node != NULL; node = gr_dom_walk(node, s->root)) {
        dom *id = id_of(node);
        bool values = false;
        gr_work(s->c, 1);
        for (dom *up = node; up != NULL && !values; up = up->parent)
            values = holds_values(up) && up->kind != BASE_JSON_OBJECT_BEGIN;
        bool own = node->parent == NULL || (id != NULL && id->text.data[0] != '#' && !values);
        if (own && node->parent != NULL && s->draft <= 7 && gr_get(node, "$ref") != NULL)
            own = false;
        node->root = own ? node : node->parent->root;
        s->evaluates = s->evaluates || gr_is(node->key, "unevaluatedItems") ||
                       gr_is(node->key, "unevaluatedProperties");
        s->dynamic = s->dynamic || gr_is(node->key, "$dynamicRef");
        if (!own)
            continue;
        gr_text base = node->parent == NULL ? (gr_text){0} : node->parent->root->uri;
        if (id != NULL)
            node->uri = uri_join(s, base, without_fragment(id->text));
        if (node->parent != NULL) {
            *end = node;
            end = &node->next_resource;
        }
    }
}

/* ---- references ---- */

static int hex_digit(char ch)
{
    return ch >= '0' && ch <= '9'                 ? ch - '0'
           : (ch | 32) >= 'a' && (ch | 32) <= 'f' ? (ch | 32) - 'a' + 10
                                                  : -1;
}

/* What stands behind the first # of a reference, without percent signs. */
static gr_text fragment_of(schema *s, gr_text text)
{
    char *part = gr_alloc(s->c, text.length + 1, 1);
    size_t length = 0;
    for (size_t i = find(text, 0, "#") + 1; i < text.length; i++) {
        if (text.data[i] == '%' && i + 2 < text.length && hex_digit(text.data[i + 1]) >= 0 &&
            hex_digit(text.data[i + 2]) >= 0) {
            part[length++] = (char)(hex_digit(text.data[i + 1]) * 16 + hex_digit(text.data[i + 2]));
            i += 2;
        } else {
            part[length++] = text.data[i];
        }
    }
    return (gr_text){part, length};
}

static bool is_named(const dom *node, const char *keyword, gr_text name)
{
    const dom *anchor = gr_get(node, keyword);
    return anchor != NULL && anchor->kind == BASE_JSON_STRING && gr_same(anchor->text, name);
}

/* The node of this resource that has the name; NULL if none has. */
static dom *anchored(schema *s, dom *root, gr_text name, bool dynamic)
{
    for (dom *node = root; node != NULL; node = gr_dom_walk(node, root)) {
        gr_work(s->c, 1);
        if (node->root != root)
            continue;
        if (is_named(node, "$dynamicAnchor", name) || (!dynamic && is_named(node, "$anchor", name)))
            return node;
        dom *id = dynamic ? NULL : id_of(node);
        if (id != NULL && id->text.data[0] == '#' &&
            gr_same((gr_text){id->text.data + 1, id->text.length - 1}, name))
            return node;
    }
    return NULL;
}

/* The node at a JSON pointer; NULL if there is none. */
static dom *pointed(schema *s, dom *node, gr_text pointer)
{
    for (size_t i = 1; node != NULL; i++) {
        char *name = gr_alloc(s->c, pointer.length + 1, 1);
        size_t n = 0;
        for (; i < pointer.length && pointer.data[i] != '/'; i++) {
            char next = i + 1 < pointer.length ? pointer.data[i + 1] : 0;
            if (pointer.data[i] == '~' && (next == '0' || next == '1'))
                name[n++] = pointer.data[++i] == '0' ? '~' : '/';
            else
                name[n++] = pointer.data[i];
        }
        dom *child = NULL;
        for (dom *k = node->first; k != NULL; k = k->next) {
            char place[16];
            gr_work(s->c, 1);
            snprintf(place, sizeof place, "%u", k->index);
            if (node->kind == BASE_JSON_OBJECT_BEGIN ? gr_same(k->key, (gr_text){name, n})
                                                     : gr_is((gr_text){name, n}, place))
                child = k;
        }
        node = child;
        if (i >= pointer.length)
            break;
    }
    return node;
}

dom *gr_resolve(schema *s, const dom *at, const dom *ref, const char *keyword)
{
    gr_text part = fragment_of(s, ref->text), own = without_fragment(ref->text);
    dom *root = at->root;
    if (own.length > 0) {
        gr_text uri = uri_join(s, root->uri, own);
        for (root = s->root; root != NULL; root = root->next_resource) {
            gr_work(s->c, 1);
            if (gr_same(root->uri, uri))
                break;
        }
        if (root == NULL)
            gr_wrong(s, BASE_UNSUPPORTED, at, keyword, "%.*s is not in this document",
                     (int)ref->text.length, ref->text.data);
    }
    if (part.length == 0)
        return root;
    dom *node = part.data[0] == '/' ? pointed(s, root, part) : anchored(s, root, part, false);
    if (node == NULL)
        gr_wrong(s, BASE_INVALID, at, keyword, "%.*s leads nowhere", (int)ref->text.length,
                 ref->text.data);
    return node;
}

dom *gr_resolve_dynamic(schema *s, const dom *at, const dom *ref)
{
    dom *node = gr_resolve(s, at, ref, "$dynamicRef");
    gr_text name = fragment_of(s, ref->text);
    if (!is_named(node, "$dynamicAnchor", name))
        return node;
    for (const scope *in = s->in; in != NULL; in = in->outer) {
        dom *other = anchored(s, in->resource, name, true);
        node = other != NULL ? other : node;
    }
    return node;
}

const scope *gr_enter(schema *s, const scope *in, const dom *node)
{
    dom *resource = node->root;
    bool matters = false;
    if (!s->dynamic || resource == NULL)
        return in;
    /* The outermost counts, so entering a resource again changes nothing. */
    for (const scope *k = in; k != NULL; k = k->outer)
        if (k->resource == resource)
            return in;
    for (dom *k = resource; k != NULL && !matters; k = gr_dom_walk(k, resource)) {
        gr_work(s->c, 1);
        matters = k->root == resource && gr_get(k, "$dynamicAnchor") != NULL;
    }
    if (!matters)
        return in;
    for (scope *k = s->scopes; k != NULL; k = k->next)
        if (k->resource == resource && k->outer == in)
            return k;
    scope *made = gr_alloc(s->c, 1, sizeof *made);
    *made = (scope){resource, in, s->scopes};
    return s->scopes = made;
}
