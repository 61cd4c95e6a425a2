/* gw_memory: the runs of recent turns in front of the database, by id and in lists.
 *
 * A run stands in up to three lists (slot, lineage, under) and lives as long as one of them. A list
 * that is here is either complete (it has every run that the ledger has under its key, maybe none)
 * or it only adds to what the database knows. Bounded in bytes; the list that was used longest ago
 * goes first, whole, so that `complete` stays true of what remains. One mutex; a look-up copies a
 * few kilobytes under it.
 *
 * Invariants: 1. `bytes` is the sum over the lists and the runs. 2. Every name points to a run that
 * stands in a list that is here. */
#include "gateway/ledger_internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"

#define BUCKETS_MIN 1024

typedef struct held {
    gw_run run;
    uint32_t lists; /* that it stands in */
} held;

typedef struct list {
    struct list *chain;         /* in its bucket */
    struct list *newer, *older; /* by use */
    gw_digest key;
    held **runs; /* oldest first */
    uint32_t count, capacity;
    bool complete;
} list;

typedef struct name {
    struct name *chain;
    gw_id id;
    held *run;
} name;

struct gw_memory {
    pthread_mutex_t mutex; /* guards all of it */
    uint64_t bytes, bytes_max, generation, spilled, runs;
    list **lists;
    name **names;
    uint32_t list_count, name_count;
    uint32_t list_buckets, name_buckets; /* powers of two */
    list *newest, *oldest;
};

static uint64_t digest_hash(const gw_digest *digest)
{
    uint64_t hash;
    memcpy(&hash, digest->bytes + 8, sizeof(hash));
    return hash;
}

/* FNV-1a: ids are random already. */
static uint64_t id_hash(const char *id)
{
    uint64_t hash = 14695981039346656037u;
    for (; *id; id++)
        hash = (hash ^ (unsigned char)*id) * 1099511628211u;
    return hash;
}

static list **list_place(gw_memory *memory, const gw_digest *key)
{
    list **at = &memory->lists[digest_hash(key) & (memory->list_buckets - 1)];
    while (*at && !gw_digest_equal(&(*at)->key, key))
        at = &(*at)->chain;
    return at;
}

static name **name_place(gw_memory *memory, const char *id)
{
    name **at = &memory->names[id_hash(id) & (memory->name_buckets - 1)];
    while (*at && strcmp((*at)->id.text, id) != 0)
        at = &(*at)->chain;
    return at;
}

static void unlink_use(gw_memory *memory, list *l)
{
    *(l->newer ? &l->newer->older : &memory->newest) = l->older;
    *(l->older ? &l->older->newer : &memory->oldest) = l->newer;
    l->newer = l->older = NULL;
}

static void link_use(gw_memory *memory, list *l)
{
    l->older = memory->newest;
    l->newer = NULL;
    *(memory->newest ? &memory->newest->newer : &memory->oldest) = l;
    memory->newest = l;
}

static void touch(gw_memory *memory, list *l)
{
    if (memory->newest == l)
        return;
    unlink_use(memory, l);
    link_use(memory, l);
}

/* ---- runs ---- */

static size_t run_bytes(const gw_run *run)
{
    return sizeof(held) + run->token_count * sizeof(*run->tokens) +
           run->id_count * (sizeof(*run->ids) + sizeof(name));
}

static void held_free(held *h)
{
    if (!h)
        return;
    free(h->run.ids);
    free(h->run.tokens);
    free(h);
}

/* Stands in no list yet, and is not counted. */
static held *held_new(const gw_run *run)
{
    held *h = calloc(1, sizeof(*h));
    if (!h)
        return NULL;
    h->run = *run;
    h->run.ids = NULL;
    h->run.id_count = 0;
    h->run.tokens = malloc(base_max(run->token_count * sizeof(*run->tokens), 1));
    if (!h->run.tokens) {
        free(h);
        return NULL;
    }
    memcpy(h->run.tokens, run->tokens, run->token_count * sizeof(*run->tokens));
    return h;
}

static void unname(gw_memory *memory, held *h)
{
    for (uint32_t i = 0; i < h->run.id_count; i++) {
        name **place = name_place(memory, h->run.ids[i].text);
        name *n = *place;
        if (!n || n->run != h)
            continue;
        *place = n->chain;
        memory->name_count--;
        free(n);
    }
}

/* Doubles a table when it holds as many entries as buckets; without memory the chains grow longer
 * instead. */
static void grow_names(gw_memory *memory)
{
    if (memory->name_count < memory->name_buckets)
        return;
    name **more = calloc(memory->name_buckets * 2, sizeof(*more));
    if (!more)
        return;
    for (uint32_t i = 0; i < memory->name_buckets; i++)
        for (name *n = memory->names[i], *next; n; n = next) {
            next = n->chain;
            name **at = &more[id_hash(n->id.text) & (memory->name_buckets * 2 - 1)];
            n->chain = *at;
            *at = n;
        }
    free(memory->names);
    memory->names = more;
    memory->name_buckets *= 2;
}

/* Ids more for a run that stands in a list. Without memory they are on disk only. */
static void add_names(gw_memory *memory, held *h, const gw_id *ids, uint32_t count)
{
    gw_id *more = count ? realloc(h->run.ids, (h->run.id_count + count) * sizeof(*more)) : NULL;
    if (!more)
        return;
    h->run.ids = more;
    for (uint32_t i = 0; i < count; i++) {
        if (*name_place(memory, ids[i].text))
            continue; /* ids are random: this one names this run already */
        name *n = malloc(sizeof(*n));
        if (!n)
            return;
        *n = (name){.id = ids[i], .run = h};
        grow_names(memory);
        *name_place(memory, ids[i].text) = n;
        memory->name_count++;
        more[h->run.id_count++] = ids[i];
        memory->bytes += sizeof(*more) + sizeof(*n);
    }
}

gw_run *gw_run_copy(const gw_run *run, base_arena *arena)
{
    gw_run *copy = base_arena_alloc(arena, sizeof(*copy));
    int32_t *tokens = base_arena_alloc(arena, base_max(run->token_count * sizeof(*tokens), 1));
    if (!copy || !tokens)
        return NULL;
    *copy = *run;
    copy->ids = NULL;
    copy->id_count = 0;
    copy->tokens = tokens;
    memcpy(tokens, run->tokens, run->token_count * sizeof(*tokens));
    return copy;
}

gw_found gw_run_choose(const gw_run **out, gw_run *const *runs, uint32_t count, gw_want *want)
{
    *out = NULL;
    for (uint32_t i = 0; i < count; i++) {
        const gw_run *run = runs[i];
        if (strcmp(run->template_id, want->template_id) != 0) {
            want->other_template = true;
            continue;
        }
        if (want->reasoning) {
            if (!*out && run->has_reasoning && gw_digest_equal(&run->reasoning, want->reasoning))
                *out = run;
        } else if (!*out) {
            *out = run;
        } else if ((*out)->has_reasoning != run->has_reasoning ||
                   !gw_digest_equal(&(*out)->reasoning, &run->reasoning)) {
            *out = NULL;
            return GW_FOUND_AMBIGUOUS;
        }
    }
    return *out ? GW_FOUND_RUN : GW_FOUND_NONE;
}

/* ---- lists ---- */

static void release(gw_memory *memory, held *h)
{
    if (--h->lists)
        return;
    unname(memory, h);
    memory->bytes -= run_bytes(&h->run);
    memory->runs--;
    held_free(h);
}

static size_t list_bytes(const list *l)
{
    return sizeof(*l) + l->capacity * sizeof(*l->runs);
}

static void drop_list(gw_memory *memory, list *l)
{
    *list_place(memory, &l->key) = l->chain;
    unlink_use(memory, l);
    memory->bytes -= list_bytes(l);
    memory->list_count--;
    for (uint32_t i = 0; i < l->count; i++)
        release(memory, l->runs[i]);
    free(l->runs);
    free(l);
}

static void shrink(gw_memory *memory)
{
    while (memory->bytes > memory->bytes_max && memory->oldest) {
        uint64_t runs = memory->runs;
        drop_list(memory, memory->oldest);
        memory->spilled += runs - memory->runs;
    }
}

static void grow_lists(gw_memory *memory)
{
    if (memory->list_count < memory->list_buckets)
        return;
    list **more = calloc(memory->list_buckets * 2, sizeof(*more));
    if (!more)
        return;
    for (uint32_t i = 0; i < memory->list_buckets; i++)
        for (list *l = memory->lists[i], *next; l; l = next) {
            next = l->chain;
            list **at = &more[digest_hash(&l->key) & (memory->list_buckets * 2 - 1)];
            l->chain = *at;
            *at = l;
        }
    free(memory->lists);
    memory->lists = more;
    memory->list_buckets *= 2;
}

/* The list under `key`, made if it is not there; NULL without memory. */
static list *list_of(gw_memory *memory, const gw_digest *key, bool complete)
{
    list *l = *list_place(memory, key);
    if (l) {
        touch(memory, l);
        return l;
    }
    l = calloc(1, sizeof(*l));
    if (!l)
        return NULL;
    l->key = *key;
    l->complete = complete;
    grow_lists(memory);
    *list_place(memory, key) = l;
    link_use(memory, l);
    memory->list_count++;
    memory->bytes += list_bytes(l);
    return l;
}

/* The same tokens in the same slot. */
static held *list_find(const list *l, const gw_run *run)
{
    for (uint32_t i = 0; l && i < l->count; i++)
        if (gw_digest_equal(&l->runs[i]->run.tokens_digest, &run->tokens_digest) &&
            gw_digest_equal(&l->runs[i]->run.slot, &run->slot))
            return l->runs[i];
    return NULL;
}

static void list_add(gw_memory *memory, list *l, held *h)
{
    if (list_find(l, &h->run))
        return;
    if (l->count == GW_LIST_RUNS_MAX) {
        l->complete = false;
        return;
    }
    if (l->count == l->capacity) {
        uint32_t wanted = l->capacity ? l->capacity * 2 : 1;
        held **more = realloc(l->runs, wanted * sizeof(*more));
        if (!more) {
            l->complete = false;
            return;
        }
        memory->bytes += (wanted - l->capacity) * sizeof(*more);
        l->runs = more;
        l->capacity = wanted;
    }
    if (!h->lists++) {
        memory->runs++;
        memory->bytes += run_bytes(&h->run);
    }
    l->runs[l->count++] = h;
}

/* ---- looking ---- */

gw_found gw_memory_choose(gw_memory *memory, gw_run **out, uint64_t *generation,
                          const gw_digest *key, gw_want *want, base_arena *arena)
{
    gw_found found = GW_FOUND_UNKNOWN;
    gw_run *runs[GW_LIST_RUNS_MAX];
    const gw_run *chosen;
    *out = NULL;
    pthread_mutex_lock(&memory->mutex);
    *generation = memory->generation;
    list *l = *list_place(memory, key);
    if (l) {
        touch(memory, l);
        for (uint32_t i = 0; i < l->count; i++)
            runs[i] = &l->runs[i]->run;
        found = gw_run_choose(&chosen, runs, l->count, want);
        /* Equal reasoning is a hit whatever else there is; two that differ are ambiguous whatever
         * else there is. */
        bool sure = l->complete || found == GW_FOUND_AMBIGUOUS ||
                    (found == GW_FOUND_RUN && want->reasoning);
        if (!sure || (chosen && !(*out = gw_run_copy(chosen, arena))))
            found = GW_FOUND_UNKNOWN;
    }
    pthread_mutex_unlock(&memory->mutex);
    return found;
}

uint32_t gw_memory_list(gw_memory *memory, gw_run **out, bool *complete, uint64_t *generation,
                        const gw_digest *key, base_arena *arena)
{
    uint32_t count = 0;
    pthread_mutex_lock(&memory->mutex);
    *generation = memory->generation;
    list *l = *list_place(memory, key);
    *complete = l && l->complete;
    if (l)
        touch(memory, l);
    for (uint32_t i = 0; l && i < l->count; i++) {
        out[count] = gw_run_copy(&l->runs[i]->run, arena);
        count += out[count] != NULL;
    }
    pthread_mutex_unlock(&memory->mutex);
    return count;
}

gw_run *gw_memory_named(gw_memory *memory, const char *id, base_arena *arena)
{
    pthread_mutex_lock(&memory->mutex);
    const name *n = *name_place(memory, id);
    gw_run *run = n ? gw_run_copy(&n->run->run, arena) : NULL;
    pthread_mutex_unlock(&memory->mutex);
    return run;
}

/* ---- changing ---- */

void gw_memory_fill(gw_memory *memory, const gw_digest *key, gw_run *const *runs, uint32_t count,
                    uint64_t generation)
{
    pthread_mutex_lock(&memory->mutex);
    list *l = memory->generation == generation && count <= GW_LIST_RUNS_MAX
                  ? list_of(memory, key, false)
                  : NULL;
    bool all = l != NULL;
    for (uint32_t i = 0; l && i < count; i++) {
        if (list_find(l, runs[i]))
            continue;
        /* It may stand in its slot's list already. */
        held *h = list_find(*list_place(memory, &runs[i]->slot), runs[i]);
        if (!h)
            h = held_new(runs[i]);
        uint32_t before = l->count;
        if (h)
            list_add(memory, l, h);
        all &= l->count > before;
        if (h && !h->lists)
            held_free(h);
    }
    if (all)
        l->complete = true;
    shrink(memory);
    pthread_mutex_unlock(&memory->mutex);
}

void gw_memory_add(gw_memory *memory, const gw_run *run, bool alone)
{
    pthread_mutex_lock(&memory->mutex);
    memory->generation++;
    list *slot = list_of(memory, &run->slot, alone);
    held *h = list_find(slot, run);
    if (!h)
        h = held_new(run);
    const gw_digest *keys[] = {&run->slot, &run->lineage, &run->under};
    for (int i = 0; h && i < (run->bodied ? 3 : 1); i++) {
        list *l = i ? list_of(memory, keys[i], false) : slot;
        if (l)
            list_add(memory, l, h);
    }
    if (!h && slot)
        slot->complete = false;
    if (h && h->lists)
        add_names(memory, h, run->ids, run->id_count);
    else
        held_free(h);
    shrink(memory);
    pthread_mutex_unlock(&memory->mutex);
}

void gw_memory_forget(gw_memory *memory, const gw_digest *keys, uint32_t count)
{
    pthread_mutex_lock(&memory->mutex);
    memory->generation++;
    for (uint32_t i = 0; i < count; i++) {
        list *l = *list_place(memory, &keys[i]);
        if (l)
            drop_list(memory, l);
    }
    pthread_mutex_unlock(&memory->mutex);
}

void gw_memory_stats(gw_memory *memory, gw_ledger_stats *out)
{
    pthread_mutex_lock(&memory->mutex);
    out->memory_bytes = memory->bytes;
    out->memory_runs = memory->runs;
    out->spilled = memory->spilled;
    pthread_mutex_unlock(&memory->mutex);
}

gw_memory *gw_memory_create(uint64_t bytes_max)
{
    gw_memory *memory = calloc(1, sizeof(*memory));
    if (!memory)
        return NULL;
    pthread_mutex_init(&memory->mutex, NULL);
    memory->bytes_max = bytes_max;
    memory->list_buckets = memory->name_buckets = BUCKETS_MIN;
    memory->lists = calloc(BUCKETS_MIN, sizeof(*memory->lists));
    memory->names = calloc(BUCKETS_MIN, sizeof(*memory->names));
    if (!memory->lists || !memory->names) {
        gw_memory_destroy(memory);
        return NULL;
    }
    return memory;
}

void gw_memory_destroy(gw_memory *memory)
{
    if (!memory)
        return;
    while (memory->oldest)
        drop_list(memory, memory->oldest);
    pthread_mutex_destroy(&memory->mutex);
    free(memory->lists);
    free(memory->names);
    free(memory);
}
