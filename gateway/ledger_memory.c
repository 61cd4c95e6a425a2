/* gw_memory: the runs of recent turns, by slot and by call id, in front of the database.
 *
 * A slot that is here is either complete (it lists every run that the ledger has for it, maybe
 * none) or it only adds to what the database knows. Bounded in bytes; the slot that was used
 * longest ago goes first, whole, so that `complete` stays true of what remains. One mutex; a
 * look-up copies a few kilobytes under it.
 *
 * Invariants: 1. `bytes` is the sum over the slots. 2. Every call entry points to a run of a slot
 * that is here. */
#include "gateway/ledger_internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"

#define BUCKETS_MIN 1024

typedef struct slot {
    struct slot *chain;         /* in its bucket */
    struct slot *newer, *older; /* by use */
    gw_digest key;
    gw_run *runs;
    uint32_t run_count;
    bool complete;
    size_t bytes;
} slot;

typedef struct call {
    struct call *chain;
    gw_id id;
    gw_run *run;
} call;

struct gw_memory {
    pthread_mutex_t mutex; /* guards all of it */
    uint64_t bytes, bytes_max, generation, spilled, runs;
    slot **slots;
    call **calls;
    uint32_t slot_count, call_count;
    uint32_t slot_buckets, call_buckets; /* powers of two */
    slot *newest, *oldest;
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

static slot **slot_place(gw_memory *memory, const gw_digest *key)
{
    slot **at = &memory->slots[digest_hash(key) & (memory->slot_buckets - 1)];
    while (*at && !gw_digest_equal(&(*at)->key, key))
        at = &(*at)->chain;
    return at;
}

static call **call_place(gw_memory *memory, const char *id)
{
    call **at = &memory->calls[id_hash(id) & (memory->call_buckets - 1)];
    while (*at && strcmp((*at)->id.text, id) != 0)
        at = &(*at)->chain;
    return at;
}

static void unlink_use(gw_memory *memory, slot *s)
{
    *(s->newer ? &s->newer->older : &memory->newest) = s->older;
    *(s->older ? &s->older->newer : &memory->oldest) = s->newer;
    s->newer = s->older = NULL;
}

static void link_use(gw_memory *memory, slot *s)
{
    s->older = memory->newest;
    s->newer = NULL;
    *(memory->newest ? &memory->newest->newer : &memory->oldest) = s;
    memory->newest = s;
}

static void touch(gw_memory *memory, slot *s)
{
    if (memory->newest == s)
        return;
    unlink_use(memory, s);
    link_use(memory, s);
}

static size_t run_bytes(const gw_run *run)
{
    return sizeof(*run) + run->token_count * sizeof(*run->tokens) +
           run->call_count * (sizeof(*run->calls) + sizeof(call));
}

static void run_free(gw_run *run)
{
    if (!run)
        return;
    free(run->calls);
    free(run->tokens);
    free(run);
}

static void drop_slot(gw_memory *memory, slot *s)
{
    slot **at = slot_place(memory, &s->key);
    *at = s->chain;
    unlink_use(memory, s);
    memory->bytes -= s->bytes;
    memory->slot_count--;
    for (gw_run *run = s->runs, *next; run; run = next) {
        next = run->next;
        for (uint32_t i = 0; i < run->call_count; i++) {
            call **place = call_place(memory, run->calls[i].text);
            call *c = *place;
            if (!c || c->run != run)
                continue;
            *place = c->chain;
            memory->call_count--;
            free(c);
        }
        memory->runs--;
        run_free(run);
    }
    free(s);
}

static void shrink(gw_memory *memory)
{
    while (memory->bytes > memory->bytes_max && memory->oldest) {
        memory->spilled += memory->oldest->run_count;
        drop_slot(memory, memory->oldest);
    }
}

/* Doubles a table when it holds as many entries as buckets; without memory the chains grow longer
 * instead. */
static void grow_slots(gw_memory *memory)
{
    if (memory->slot_count < memory->slot_buckets)
        return;
    slot **more = calloc(memory->slot_buckets * 2, sizeof(*more));
    if (!more)
        return;
    for (uint32_t i = 0; i < memory->slot_buckets; i++)
        for (slot *s = memory->slots[i], *next; s; s = next) {
            next = s->chain;
            slot **at = &more[digest_hash(&s->key) & (memory->slot_buckets * 2 - 1)];
            s->chain = *at;
            *at = s;
        }
    free(memory->slots);
    memory->slots = more;
    memory->slot_buckets *= 2;
}

static void grow_calls(gw_memory *memory)
{
    if (memory->call_count < memory->call_buckets)
        return;
    call **more = calloc(memory->call_buckets * 2, sizeof(*more));
    if (!more)
        return;
    for (uint32_t i = 0; i < memory->call_buckets; i++)
        for (call *c = memory->calls[i], *next; c; c = next) {
            next = c->chain;
            call **at = &more[id_hash(c->id.text) & (memory->call_buckets * 2 - 1)];
            c->chain = *at;
            *at = c;
        }
    free(memory->calls);
    memory->calls = more;
    memory->call_buckets *= 2;
}

static slot *new_slot(gw_memory *memory, const gw_digest *key, bool complete)
{
    slot *s = calloc(1, sizeof(*s));
    if (!s)
        return NULL;
    s->key = *key;
    s->complete = complete;
    s->bytes = sizeof(*s);
    grow_slots(memory);
    *slot_place(memory, key) = s;
    link_use(memory, s);
    memory->slot_count++;
    memory->bytes += s->bytes;
    return s;
}

/* A call id more for a run that is here. */
static bool name_run(gw_memory *memory, gw_run *run, const gw_id *id)
{
    if (*call_place(memory, id->text))
        return true; /* ids are random: this one names this run already */
    call *c = malloc(sizeof(*c));
    if (!c)
        return false;
    *c = (call){.id = *id, .run = run};
    grow_calls(memory);
    *call_place(memory, id->text) = c;
    memory->call_count++;
    return true;
}

static gw_run *run_new(const gw_run *run)
{
    gw_run *copy = malloc(sizeof(*copy));
    if (!copy)
        return NULL;
    *copy = *run;
    copy->next = NULL;
    copy->tokens = malloc(base_max(run->token_count * sizeof(*run->tokens), 1));
    copy->calls = malloc(base_max(run->call_count * sizeof(*run->calls), 1));
    if (!copy->tokens || !copy->calls) {
        run_free(copy);
        return NULL;
    }
    memcpy(copy->tokens, run->tokens, run->token_count * sizeof(*run->tokens));
    if (run->call_count)
        memcpy(copy->calls, run->calls, run->call_count * sizeof(*run->calls));
    return copy;
}

/* Appends to the slot, or adds the call ids if these tokens are there already. False: it is not in
 * the slot now. */
static bool put_run(gw_memory *memory, slot *s, const gw_run *run)
{
    gw_run **at = &s->runs;
    for (; *at; at = &(*at)->next) {
        gw_run *have = *at;
        if (!gw_digest_equal(&have->tokens_digest, &run->tokens_digest))
            continue;
        gw_id *ids =
            realloc(have->calls, base_max((have->call_count + run->call_count) * sizeof(*ids), 1));
        if (!ids)
            return true; /* the run is here; its new ids are on disk */
        have->calls = ids;
        for (uint32_t i = 0; i < run->call_count; i++) {
            if (!name_run(memory, have, &run->calls[i]))
                break;
            ids[have->call_count++] = run->calls[i];
            s->bytes += sizeof(*ids) + sizeof(call);
            memory->bytes += sizeof(*ids) + sizeof(call);
        }
        return true;
    }
    if (s->run_count >= GW_SLOT_RUNS_MAX)
        return false;
    gw_run *copy = run_new(run);
    if (!copy)
        return false;
    *at = copy;
    s->run_count++;
    memory->runs++;
    s->bytes += run_bytes(copy);
    memory->bytes += run_bytes(copy);
    for (uint32_t i = 0; i < copy->call_count; i++)
        name_run(memory, copy, &copy->calls[i]);
    return true;
}

gw_run *gw_run_copy(const gw_run *run, base_arena *arena)
{
    gw_run *copy = base_arena_alloc(arena, sizeof(*copy));
    int32_t *tokens = base_arena_alloc(arena, base_max(run->token_count * sizeof(*tokens), 1));
    if (!copy || !tokens)
        return NULL;
    *copy = *run;
    copy->next = NULL;
    copy->calls = NULL;
    copy->call_count = 0;
    copy->tokens = tokens;
    memcpy(tokens, run->tokens, run->token_count * sizeof(*tokens));
    return copy;
}

gw_found gw_memory_slot(gw_memory *memory, gw_run **out, uint64_t *generation, const gw_digest *key,
                        const gw_digest *reasoning, base_arena *arena)
{
    gw_found found = GW_FOUND_UNKNOWN;
    *out = NULL;
    pthread_mutex_lock(&memory->mutex);
    *generation = memory->generation;
    slot *s = *slot_place(memory, key);
    if (!s)
        goto out;
    touch(memory, s);
    const gw_run *chosen = NULL;
    bool differ = false;
    for (const gw_run *run = s->runs; run; run = run->next) {
        if (reasoning) {
            if (!chosen && run->has_reasoning && gw_digest_equal(&run->reasoning, reasoning))
                chosen = run;
            continue;
        }
        if (!chosen)
            chosen = run;
        else if (chosen->has_reasoning != run->has_reasoning ||
                 !gw_digest_equal(&chosen->reasoning, &run->reasoning))
            differ = true;
    }
    /* Equal reasoning is a hit whatever else there is; two that differ are ambiguous whatever else
     * there is. */
    if (differ)
        found = GW_FOUND_AMBIGUOUS;
    else if (chosen && (reasoning || s->complete))
        found = (*out = gw_run_copy(chosen, arena)) ? GW_FOUND_RUN : GW_FOUND_UNKNOWN;
    else if (s->complete)
        found = GW_FOUND_NONE;
out:
    pthread_mutex_unlock(&memory->mutex);
    return found;
}

gw_found gw_memory_call(gw_memory *memory, gw_run **out, const char *id, base_arena *arena)
{
    *out = NULL;
    pthread_mutex_lock(&memory->mutex);
    const call *c = *call_place(memory, id);
    if (c)
        *out = gw_run_copy(c->run, arena);
    pthread_mutex_unlock(&memory->mutex);
    return *out ? GW_FOUND_RUN : GW_FOUND_NONE;
}

void gw_memory_fill(gw_memory *memory, const gw_digest *key, gw_run *const *runs, uint32_t count,
                    uint64_t generation)
{
    pthread_mutex_lock(&memory->mutex);
    slot *s = *slot_place(memory, key);
    if (memory->generation == generation && count <= GW_SLOT_RUNS_MAX) {
        if (!s)
            s = new_slot(memory, key, false);
        bool all = s != NULL;
        for (uint32_t i = 0; s && i < count; i++)
            all &= put_run(memory, s, runs[i]);
        if (all)
            s->complete = true;
        shrink(memory);
    }
    pthread_mutex_unlock(&memory->mutex);
}

void gw_memory_add(gw_memory *memory, const gw_run *run, bool alone)
{
    pthread_mutex_lock(&memory->mutex);
    memory->generation++;
    slot *s = *slot_place(memory, &run->slot);
    if (!s)
        s = new_slot(memory, &run->slot, alone);
    if (s) {
        touch(memory, s);
        if (!put_run(memory, s, run))
            s->complete = false;
        shrink(memory);
    }
    pthread_mutex_unlock(&memory->mutex);
}

void gw_memory_forget(gw_memory *memory, const gw_digest *key)
{
    pthread_mutex_lock(&memory->mutex);
    memory->generation++;
    slot *s = *slot_place(memory, key);
    if (s)
        drop_slot(memory, s);
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
    memory->slot_buckets = memory->call_buckets = BUCKETS_MIN;
    memory->slots = calloc(BUCKETS_MIN, sizeof(*memory->slots));
    memory->calls = calloc(BUCKETS_MIN, sizeof(*memory->calls));
    if (!memory->slots || !memory->calls) {
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
        drop_slot(memory, memory->oldest);
    pthread_mutex_destroy(&memory->mutex);
    free(memory->slots);
    free(memory->calls);
    free(memory);
}
