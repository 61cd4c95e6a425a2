/* Look-ups: what is known of a request. The rules are at gw_ledger_match in the header. */
#include "gateway/ledger_internal.h"

#include <string.h>

#include "engine/base/log.h"
#include "engine/base/num.h"

bool gw_match_continues(const gw_match *match, const int32_t *prompt, uint32_t prompt_count)
{
    uint64_t sequence[2];
    if (match->last < 0 || match->parent_tokens > prompt_count)
        return false;
    gw_sequence_hash(sequence, prompt, match->parent_tokens, NULL, 0);
    return memcmp(sequence, match->parent_sequence, sizeof(sequence)) == 0;
}

/* Everything one match needs. */
typedef struct lookup {
    gw_ledger *ledger;
    const gw_root *root;
    base_arena *arena;
    gw_db *reader; /* taken at the first miss in memory */
    bool broken;   /* the database failed: what is not in memory is unknown */
    gw_hash hash;
} lookup;

static gw_db *reader_of(lookup *l)
{
    if (l->reader || l->broken)
        return l->reader;
    base_err err = BASE_ERR_INIT;
    l->reader = gw_reader_take(l->ledger, &err);
    if (!l->reader) {
        l->broken = true;
        base_log(BASE_LOG_ERROR, "lookup_failed reason=\"%s\"", err.text);
    }
    return l->reader;
}

static void lookup_failed(lookup *l)
{
    l->broken = true;
    base_log(BASE_LOG_ERROR, "lookup_failed reason=\"%s\"", sqlite3_errmsg(l->reader->db));
}

/* All runs of a slot on disk, at most GW_SLOT_RUNS_MAX + 1. */
static uint32_t read_slot(lookup *l, gw_run **runs, const gw_digest *slot)
{
    sqlite3_stmt *s = gw_db_statement(l->reader, GW_SQL_SLOT);
    if (!s) {
        lookup_failed(l);
        return 0;
    }
    sqlite3_bind_int64(s, 1, gw_digest_prefix(slot));
    gw_bind_digest(s, 2, slot);
    sqlite3_bind_int64(s, 3, l->root->tenant);
    sqlite3_bind_int(s, 4, GW_SLOT_RUNS_MAX + 1);
    uint32_t count = 0;
    int code;
    while (count <= GW_SLOT_RUNS_MAX && (code = sqlite3_step(s)) == SQLITE_ROW) {
        gw_run *run = gw_column_run(s, l->arena);
        if (run)
            runs[count++] = run;
    }
    bool failed = count <= GW_SLOT_RUNS_MAX && code != SQLITE_DONE;
    sqlite3_reset(s);
    if (failed)
        lookup_failed(l);
    return count;
}

static gw_found choose(gw_run **out, gw_run *const *runs, uint32_t count,
                       const gw_digest *reasoning)
{
    *out = NULL;
    for (uint32_t i = 0; i < count; i++) {
        if (reasoning) {
            if (!*out && runs[i]->has_reasoning && gw_digest_equal(&runs[i]->reasoning, reasoning))
                *out = runs[i];
        } else if (!*out) {
            *out = runs[i];
        } else if ((*out)->has_reasoning != runs[i]->has_reasoning ||
                   !gw_digest_equal(&(*out)->reasoning, &runs[i]->reasoning)) {
            *out = NULL;
            return GW_FOUND_AMBIGUOUS;
        }
    }
    return *out ? GW_FOUND_RUN : GW_FOUND_NONE;
}

static gw_found find_slot(lookup *l, gw_run **out, const gw_digest *slot,
                          const gw_digest *reasoning)
{
    gw_memory *memory = l->ledger->memory;
    uint64_t generation;
    gw_found found = gw_memory_slot(memory, out, &generation, slot, reasoning, l->arena);
    if (found != GW_FOUND_UNKNOWN || !reader_of(l))
        return found == GW_FOUND_UNKNOWN ? GW_FOUND_NONE : found;
    gw_run *runs[GW_SLOT_RUNS_MAX + 1];
    uint32_t count = read_slot(l, runs, slot);
    if (l->broken)
        return GW_FOUND_NONE;
    gw_memory_fill(memory, slot, runs, count, generation);
    /* Memory may know runs that never went to disk, so it is asked again before the rows alone
     * decide. */
    found = gw_memory_slot(memory, out, &generation, slot, reasoning, l->arena);
    return found == GW_FOUND_UNKNOWN ? choose(out, runs, count, reasoning) : found;
}

/* "call_" and 32 hex digits: ours, as far as the form goes. */
static bool looks_minted(eng_text id)
{
    if (id.length != 5 + 32 || memcmp(id.data, "call_", 5) != 0)
        return false;
    for (size_t i = 5; i < id.length; i++)
        if (!((id.data[i] >= '0' && id.data[i] <= '9') || (id.data[i] >= 'a' && id.data[i] <= 'f')))
            return false;
    return true;
}

static gw_run *find_call(lookup *l, const eng_item *item, const gw_digest *visible,
                         const gw_digest *reasoning)
{
    for (uint32_t i = 0; i < item->call_count; i++) {
        if (!looks_minted(item->calls[i].id))
            continue;
        char id[GW_ID_MAX];
        memcpy(id, item->calls[i].id.data, 37);
        id[37] = '\0';
        gw_run *run;
        if (gw_memory_call(l->ledger->memory, &run, id, l->arena) == GW_FOUND_NONE &&
            reader_of(l)) {
            sqlite3_stmt *s = gw_db_statement(l->reader, GW_SQL_CALL);
            if (!s) {
                lookup_failed(l);
                return NULL;
            }
            sqlite3_bind_int64(s, 1, gw_public_key(id));
            gw_bind_text(s, 2, id);
            sqlite3_bind_int64(s, 3, l->root->tenant);
            if (sqlite3_step(s) == SQLITE_ROW)
                run = gw_column_run(s, l->arena);
            sqlite3_reset(s);
        }
        if (run && run->tenant == l->root->tenant &&
            strcmp(run->template_id, l->root->template_id) == 0 &&
            gw_digest_equal(&run->visible, visible) &&
            (!reasoning || (run->has_reasoning && gw_digest_equal(&run->reasoning, reasoning))))
            return run;
    }
    return NULL;
}

static void note_reason(gw_match *match, const char *reason)
{
    if (!match->reason)
        match->reason = reason;
}

/* The assistant item at `index`; sets its tokens and the node after it. */
static void match_item(lookup *l, gw_match *match, eng_item *item, uint32_t index)
{
    const gw_digest *parent = &match->chain[index];
    gw_digest visible, slot, reasoning, *sent = NULL;
    gw_item_visible(&l->hash, &visible, item);
    if (gw_item_reasoning(&l->hash, &reasoning, item->reasoning))
        sent = &reasoning;
    gw_item_own(&l->hash, &match->own[index], &visible, item);
    gw_slot(&l->hash, &slot, parent, &visible);
    /* A call id that we minted names one run and comes first; the slot decides where there is none.
     */
    gw_run *run = find_call(l, item, &visible, sent);
    gw_found found = run ? GW_FOUND_RUN : find_slot(l, &run, &slot, sent);
    if (found != GW_FOUND_RUN || strcmp(run->template_id, l->root->template_id) != 0) {
        match->rendered++;
        note_reason(match, found == GW_FOUND_AMBIGUOUS ? "ambiguous"
                           : match->spliced            ? "edited history"
                                                       : "unknown history");
        gw_node_item(&l->hash, &match->chain[index + 1], parent, &match->own[index]);
        return;
    }
    item->tokens = run->tokens;
    item->token_count = run->token_count;
    match->spliced++;
    match->restored += !sent && run->has_reasoning;
    gw_node_run(&l->hash, &match->chain[index + 1], parent, &run->tokens_digest);
    if (!gw_digest_equal(&run->slot, &slot)) {
        note_reason(match, "prefix changed");
    } else {
        match->last = (int32_t)index;
        match->parent = run->turn;
        memcpy(match->parent_sequence, run->sequence, sizeof(run->sequence));
        match->parent_tokens = run->sequence_tokens;
    }
    match->session = run->session;
}

base_code gw_ledger_match(gw_ledger *ledger, gw_match *out, const gw_root *root, eng_item *items,
                          uint32_t item_count, base_arena *arena, base_err *err)
{
    *out = (gw_match){.last = -1};
    out->chain = base_arena_calloc(arena, (size_t)item_count + 1, sizeof(*out->chain));
    out->own = base_arena_calloc(arena, base_max(item_count, 1), sizeof(*out->own));
    lookup l = {.ledger = ledger, .root = root, .arena = arena, .hash = gw_hash_open()};
    if (out->chain && out->own) {
        gw_item_root(&l.hash, &out->chain[0], root);
        for (uint32_t i = 0; i < item_count; i++) {
            if (items[i].role == ENG_ROLE_ASSISTANT) {
                match_item(&l, out, &items[i], i);
                continue;
            }
            gw_item_visible(&l.hash, &out->own[i], &items[i]);
            gw_node_item(&l.hash, &out->chain[i + 1], &out->chain[i], &out->own[i]);
        }
    }
    bool failed = l.hash.failed || base_arena_failed(arena);
    gw_hash_close(&l.hash);
    if (l.reader)
        gw_reader_give(ledger, l.reader);
    return failed ? base_fail(err, BASE_NOMEM, "no memory to look the conversation up") : BASE_OK;
}
