/* gw_slices: see the header. */
#include "gateway/slice.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/num.h"
#include "gateway/body.h"

#define BYTES_MAX (32u << 20)
#define BODY_MIN 4096   /* below, parsing all costs less */
#define ELEMENT_MIN 256 /* the same of an element */
#define ELEMENTS_MAX 16384
#define TREE_FACTOR 3 /* bytes of a kept element with its tree, by its raw bytes */
#define BUCKETS 16384 /* a power of two; a few hundred sessions of fifty elements */
#define NOTE_MIN 512  /* shorter texts are hashed in less than a note takes to be looked up */
#define NOTES_MAX 8   /* of an element */
#define NOTE_DEPTH 3  /* below the element: content, parts, their text */
#define CUT SIZE_MAX

/* ---- the scan ---- */

static size_t pass_space(const char *text, size_t at, size_t length)
{
    while (at < length &&
           (text[at] == ' ' || text[at] == '\n' || text[at] == '\r' || text[at] == '\t'))
        at++;
    return at;
}

/* Behind the string that begins at `at`. */
static size_t pass_string(const char *text, size_t at, size_t length)
{
    at++;
    while ((at = gw_next_mark(text, at, length)) < length && text[at] == '\\')
        at += 2;
    return at < length ? at + 1 : CUT;
}

/* Behind the value that begins at `at`. */
static size_t pass_value(const char *text, size_t at, size_t length)
{
    size_t begin = at, depth = 0;
    while (at < length) {
        char c = text[at];
        bool closes = c == '}' || c == ']';
        if (c == '"') {
            at = pass_string(text, at, length);
            if (at == CUT || !depth)
                return at;
        } else if (c == '{' || c == '[') {
            depth++;
            at++;
        } else if (closes && depth) {
            at++;
            if (!--depth)
                return at;
        } else if (!depth && (closes || c == ',' || pass_space(text, at, length) > at)) {
            return at > begin ? at : CUT;
        } else {
            at++;
        }
    }
    return CUT;
}

/* Behind the array that begins at `at`. */
static size_t scan_array(gw_slice *out, uint32_t max, uint32_t *count, const char *text, size_t at,
                         size_t length)
{
    *count = 0;
    at = pass_space(text, at + 1, length);
    if (at < length && text[at] == ']')
        return at + 1;
    for (;;) {
        size_t end = pass_value(text, at, length);
        if (end == CUT)
            return CUT;
        if (*count < max)
            out[*count] = (gw_slice){at, end - at};
        ++*count;
        at = pass_space(text, end, length);
        if (at < length && text[at] == ']')
            return at + 1;
        if (at == length || text[at] != ',')
            return CUT;
        at = pass_space(text, at + 1, length);
    }
}

uint32_t gw_slice_scan(gw_slice *out, uint32_t max, const char **name, const char *text,
                       size_t length)
{
    static const char *const names[] = {"messages", "input"};
    uint32_t count = UINT32_MAX;
    size_t at = pass_space(text, 0, length);
    *name = NULL;
    if (at == length || text[at] != '{')
        return UINT32_MAX;
    do {
        at = pass_space(text, at + 1, length);
        size_t key = at;
        if (at == length || text[at] != '"' || (at = pass_string(text, at, length)) == CUT ||
            memchr(text + key, '\\', at - key)) /* a name in disguise is not looked through */
            return UINT32_MAX;
        size_t key_length = at - key - 2;
        at = pass_space(text, at, length);
        if (at == length || text[at] != ':')
            return UINT32_MAX;
        at = pass_space(text, at + 1, length);
        const char *found = NULL;
        for (int i = 0; i < 2; i++)
            if (strlen(names[i]) == key_length && memcmp(names[i], text + key + 1, key_length) == 0)
                found = names[i];
        bool array = at < length && text[at] == '[';
        if (found && *name && *name != found && array)
            return UINT32_MAX; /* which of them counts is the dialect's to say */
        if (found && !array && *name == found)
            return UINT32_MAX;
        if (found && array)
            *name = found;
        at = found && array ? scan_array(out, max, &count, text, at, length)
                            : pass_value(text, at, length);
        if (at == CUT)
            return UINT32_MAX;
        at = pass_space(text, at, length);
    } while (at < length && text[at] == ',');
    bool whole = at < length && text[at] == '}' && pass_space(text, at + 1, length) == length;
    return whole && *name ? count : UINT32_MAX;
}

/* ---- what is known ---- */

/* What the ledger found of a text in a kept tree; the text is known by where it stands. */
typedef struct note {
    struct note *chain, *next; /* in its bucket; of the same entry */
    const char *text;
    size_t length;
    bool known;
    uint8_t kind;
    uint8_t digest[GW_SLICE_DIGEST_BYTES];
} note;

typedef struct entry {
    struct entry *chain;
    struct entry *newer, *older; /* by use */
    XXH128_hash_t key;
    int64_t tenant;
    json_t *tree;
    note *notes;
    uint32_t note_count;
    size_t length;
    char bytes[];
} entry;

struct gw_slices {
    pthread_mutex_t mutex; /* guards all of it */
    entry *buckets[BUCKETS];
    note *notes[BUCKETS];
    entry *newest, *oldest;
    uint64_t bytes_max;
    gw_slice_stats stats;
};

static uint64_t entry_bytes(const entry *e)
{
    return sizeof(*e) + e->note_count * sizeof(note) + TREE_FACTOR * (uint64_t)e->length;
}

static entry **place(gw_slices *slices, const entry *like, const char *bytes)
{
    entry **at = &slices->buckets[like->key.low64 & (BUCKETS - 1)];
    while (*at &&
           !(XXH128_isEqual((*at)->key, like->key) && (*at)->tenant == like->tenant &&
             (*at)->length == like->length && memcmp((*at)->bytes, bytes, like->length) == 0))
        at = &(*at)->chain;
    return at;
}

static void unlink_use(gw_slices *slices, entry *e)
{
    *(e->newer ? &e->newer->older : &slices->newest) = e->older;
    *(e->older ? &e->older->newer : &slices->oldest) = e->newer;
}

static void link_use(gw_slices *slices, entry *e)
{
    e->newer = NULL;
    e->older = slices->newest;
    *(slices->newest ? &slices->newest->newer : &slices->oldest) = e;
    slices->newest = e;
}

static note **note_place(gw_slices *slices, const char *text)
{
    note **at = &slices->notes[XXH3_64bits(&text, sizeof(text)) & (BUCKETS - 1)];
    while (*at && (*at)->text != text)
        at = &(*at)->chain;
    return at;
}

/* A place for a note on each long text of a tree that is kept from now on. Without memory there is
 * none, and the text is hashed each time. */
static void make_notes(gw_slices *slices, entry *e, json_t *at, int depth)
{
    const char *key;
    size_t i;
    json_t *child;
    if (json_is_string(at) && json_string_length(at) >= NOTE_MIN && e->note_count < NOTES_MAX) {
        note *n = calloc(1, sizeof(*n));
        if (!n)
            return;
        *n = (note){
            .text = json_string_value(at), .length = json_string_length(at), .next = e->notes};
        e->notes = n;
        e->note_count++;
        *note_place(slices, n->text) = n;
    } else if (json_is_object(at) && depth) {
        json_object_foreach(at, key, child) make_notes(slices, e, child, depth - 1);
    } else if (json_is_array(at) && depth) {
        json_array_foreach(at, i, child) make_notes(slices, e, child, depth - 1);
    }
}

static void drop_oldest(gw_slices *slices)
{
    entry *e = slices->oldest;
    *place(slices, e, e->bytes) = e->chain;
    unlink_use(slices, e);
    slices->stats.bytes -= entry_bytes(e);
    for (note *n = e->notes, *next; n; n = next) {
        next = n->next;
        *note_place(slices, n->text) = n->chain;
        free(n);
    }
    json_decref(e->tree);
    free(e);
}

gw_slices *gw_slices_create(uint64_t bytes_max)
{
    gw_slices *slices = calloc(1, sizeof(*slices));
    if (!slices)
        return NULL;
    pthread_mutex_init(&slices->mutex, NULL);
    slices->bytes_max = bytes_max ? bytes_max : BYTES_MAX;
    return slices;
}

void gw_slices_destroy(gw_slices *slices)
{
    if (!slices)
        return;
    gw_slices_clear(slices);
    pthread_mutex_destroy(&slices->mutex);
    free(slices);
}

void gw_slices_clear(gw_slices *slices)
{
    pthread_mutex_lock(&slices->mutex);
    while (slices->oldest)
        drop_oldest(slices);
    pthread_mutex_unlock(&slices->mutex);
}

gw_slice_stats gw_slices_get_stats(gw_slices *slices)
{
    pthread_mutex_lock(&slices->mutex);
    gw_slice_stats stats = slices->stats;
    pthread_mutex_unlock(&slices->mutex);
    return stats;
}

/* ---- notes ---- */

static note *note_of(gw_slices *slices, const char *text, size_t length)
{
    note *n = *note_place(slices, text);
    return n && n->length == length ? n : NULL;
}

bool gw_slices_recall(gw_slices *slices, uint8_t *digest, const char *text, size_t length,
                      uint8_t kind)
{
    if (length < NOTE_MIN)
        return false;
    pthread_mutex_lock(&slices->mutex);
    const note *n = note_of(slices, text, length);
    bool known = n && n->known && n->kind == kind;
    if (known)
        memcpy(digest, n->digest, sizeof(n->digest));
    pthread_mutex_unlock(&slices->mutex);
    return known;
}

void gw_slices_note(gw_slices *slices, const uint8_t *digest, const char *text, size_t length,
                    uint8_t kind)
{
    if (length < NOTE_MIN)
        return;
    pthread_mutex_lock(&slices->mutex);
    note *n = note_of(slices, text, length);
    if (n) {
        n->known = true;
        n->kind = kind;
        memcpy(n->digest, digest, sizeof(n->digest));
    }
    pthread_mutex_unlock(&slices->mutex);
}

/* ---- parsing ---- */

/* One body on its way. */
typedef struct parsing {
    const char *text, *name;
    size_t length;
    gw_slice *at;
    uint32_t count;
    json_t **known;  /* [count]: with a reference each, NULL: not known */
    entry **entries; /* [count]: made for what is not, NULL: too short, or no memory */
} parsing;

/* False without memory. */
static bool look_up(gw_slices *slices, parsing *p, int64_t tenant)
{
    XXH128_hash_t *keys = malloc(p->count * sizeof(*keys));
    p->known = calloc(p->count, sizeof(*p->known));
    p->entries = calloc(p->count, sizeof(*p->entries));
    if (!keys || !p->known || !p->entries) {
        free(keys);
        return false;
    }
    for (uint32_t i = 0; i < p->count; i++)
        if (p->at[i].length >= ELEMENT_MIN)
            keys[i] =
                XXH3_128bits_withSeed(p->text + p->at[i].begin, p->at[i].length, (uint64_t)tenant);
    pthread_mutex_lock(&slices->mutex);
    for (uint32_t i = 0; i < p->count; i++) {
        if (p->at[i].length < ELEMENT_MIN)
            continue;
        entry like = {.key = keys[i], .tenant = tenant, .length = p->at[i].length};
        entry *e = *place(slices, &like, p->text + p->at[i].begin);
        if (e) {
            unlink_use(slices, e);
            link_use(slices, e);
            p->known[i] = json_incref(e->tree);
        }
    }
    pthread_mutex_unlock(&slices->mutex);
    for (uint32_t i = 0; i < p->count; i++) {
        size_t length = p->at[i].length;
        /* What would push out all else is not kept. */
        if (p->known[i] || length < ELEMENT_MIN || length * TREE_FACTOR > slices->bytes_max / 4)
            continue;
        p->entries[i] = malloc(sizeof(entry) + length);
        if (!p->entries[i])
            continue;
        *p->entries[i] = (entry){.key = keys[i], .tenant = tenant, .length = length};
        memcpy(p->entries[i]->bytes, p->text + p->at[i].begin, length);
    }
    free(keys);
    return true;
}

/* The body with a 0 for each known element; to be freed, NULL without memory. */
static char *without_known(const parsing *p, size_t *length)
{
    size_t from = 0, to = 0;
    char *out = malloc(p->length + 1);
    if (!out)
        return NULL;
    for (uint32_t i = 0; i < p->count; i++) {
        if (!p->known[i])
            continue;
        memcpy(out + to, p->text + from, p->at[i].begin - from);
        to += p->at[i].begin - from;
        out[to++] = '0';
        from = p->at[i].begin + p->at[i].length;
    }
    memcpy(out + to, p->text + from, p->length - from);
    to += p->length - from;
    out[to] = '\0';
    *length = to;
    return out;
}

/* Puts the known trees into the new one, and keeps what it has of others. */
static bool join(gw_slices *slices, parsing *p, json_t *root)
{
    json_t *array = json_object_get(root, p->name);
    if (json_array_size(array) != p->count)
        return false;
    for (uint32_t i = 0; i < p->count; i++)
        if (p->known[i] && json_array_set(array, i, p->known[i]))
            return false;
    pthread_mutex_lock(&slices->mutex);
    for (uint32_t i = 0; i < p->count; i++) {
        entry *e = p->entries[i];
        slices->stats.known += p->known[i] != NULL;
        slices->stats.parsed += p->known[i] == NULL;
        entry **at = e ? place(slices, e, e->bytes) : NULL;
        if (!at || *at)
            continue; /* another request brought it meanwhile */
        e->tree = json_incref(json_array_get(array, i));
        make_notes(slices, e, e->tree, NOTE_DEPTH);
        *at = e;
        link_use(slices, e);
        slices->stats.bytes += entry_bytes(e);
        p->entries[i] = NULL;
    }
    while (slices->stats.bytes > slices->bytes_max)
        drop_oldest(slices);
    pthread_mutex_unlock(&slices->mutex);
    return true;
}

/* NULL: to be parsed as a whole, which also says what is wrong with it. */
static json_t *parse_unknown(gw_slices *slices, parsing *p, int64_t tenant)
{
    size_t length;
    json_t *root = NULL;
    char *rest = look_up(slices, p, tenant) ? without_known(p, &length) : NULL;
    if (rest && !gw_body_parse(&root, rest, length, NULL) && !join(slices, p, root)) {
        json_decref(root);
        root = NULL;
    }
    free(rest);
    for (uint32_t i = 0; i < p->count && p->known && p->entries; i++) {
        json_decref(p->known[i]);
        free(p->entries[i]);
    }
    free(p->known);
    free(p->entries);
    return root;
}

base_code gw_slices_parse(gw_slices *slices, json_t **out, char *text, size_t length,
                          int64_t tenant, base_err *err)
{
    json_t *root = NULL;
    gw_slice *at = slices && length >= BODY_MIN ? malloc(ELEMENTS_MAX * sizeof(*at)) : NULL;
    if (at) {
        parsing p = {.text = text, .length = length, .at = at};
        p.count = gw_slice_scan(at, ELEMENTS_MAX, &p.name, text, length);
        if (p.count && p.count <= ELEMENTS_MAX)
            root = parse_unknown(slices, &p, tenant);
        free(at);
    }
    if (!root)
        return gw_body_parse(out, text, length, err);
    *out = root;
    return BASE_OK;
}
