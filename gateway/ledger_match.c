/* Look-ups: what is known of a request. The rules are at gw_ledger_match in the header.
 *
 * Two chains of nodes run through the items: the whole one, which begins with all that stands in
 * front (tools, mode, effort) and gives slots; and the body's, which leaves that and the system
 * text in front out and gives lineages. What is equal in the first is equal in the second. */
#include "gateway/ledger_internal.h"

#include <string.h>

#include "engine/base/log.h"
#include "engine/base/num.h"

#define ANCESTORS_MAX 4096 /* turns looked at behind a linked one */

const char *gw_miss_name(gw_miss miss)
{
    static const char *const names[GW_MISS_COUNT] = {
        [GW_MISS_NEW] = "new session",
        [GW_MISS_VOLATILE] = "volatile header",
        [GW_MISS_TOOLS] = "tools changed",
        [GW_MISS_MODE] = "effort or mode changed",
        [GW_MISS_RESTORED] = "reasoning dropped and restored",
        [GW_MISS_AMBIGUOUS] = "ambiguous",
        [GW_MISS_EDITED] = "edited history",
        [GW_MISS_EVICTED] = "evicted",
        [GW_MISS_TENANT] = "tenant boundary",
        [GW_MISS_MODEL] = "model changed",
        [GW_MISS_UNWRITTEN] = "not yet written",
    };
    return miss < GW_MISS_COUNT ? names[miss] : NULL;
}

const char *gw_restore_name(gw_restore restore)
{
    static const char *const names[] = {"auto", "linked", "off"};
    return names[restore];
}

bool gw_restore_parse(gw_restore *out, const char *text)
{
    for (gw_restore i = GW_RESTORE_AUTO; i <= GW_RESTORE_OFF; i++)
        if (strcmp(gw_restore_name(i), text) == 0) {
            *out = i;
            return true;
        }
    return false;
}

uint32_t gw_match_continues(const gw_match *match, const int32_t *prompt, uint32_t prompt_count)
{
    bool part = match->parent_seen > 0;
    uint32_t count = part ? match->parent_head_tokens : match->parent_tokens;
    uint64_t hash[2];
    if (!match->parent.text[0] || (uint64_t)count + match->parent_seen > prompt_count)
        return 0;
    gw_sequence_hash(hash, prompt, count, NULL, 0);
    if (memcmp(hash, part ? match->parent_head : match->parent_sequence, sizeof(hash)) != 0)
        return 0;
    return count + match->parent_seen;
}

bool gw_ledger_departs(gw_ledger *ledger, uint32_t *same, int64_t tenant, const gw_match *match,
                       const int32_t *prompt, uint32_t prompt_count, base_arena *arena)
{
    gw_turn_row row;
    if (!match->parent.text[0] ||
        gw_ledger_turn(ledger, &row, tenant, match->parent.text, arena, NULL) ||
        row.retention == GW_RETAIN_USAGE)
        return false;
    uint32_t at = 0;
    while (at < prompt_count && at < row.prompt_count && prompt[at] == row.prompt[at])
        at++;
    while (at < prompt_count && at >= row.prompt_count && at - row.prompt_count < row.run_count &&
           prompt[at] == row.run[at - row.prompt_count])
        at++;
    *same = at;
    return true;
}

/* Everything one match needs. */
typedef struct lookup {
    gw_ledger *ledger;
    const gw_root *root;
    gw_match *match;
    eng_item *items;
    uint32_t item_count;
    base_arena *arena;
    gw_db *reader; /* taken at the first miss in memory */
    bool broken;   /* the database failed: what is not in memory is unknown */
    gw_hash hash;
    const gw_run *last;           /* run of the last item found */
    bool exact;                   /* it stood under its own chain */
    bool unknown, ambiguous;      /* assistant items behind the last exact one that got no tokens */
    bool foreign, other_template; /* ids of other tenants, runs of another template */
    /* Turns behind one that the client holds, newest first; read when first needed. */
    gw_run **ancestors;
    uint32_t ancestor_count, ancestor_next; /* those below `next` are still ahead */
    bool ancestors_read;
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

/* ---- lists ---- */

/* All runs of a list on disk, at most GW_LIST_RUNS_MAX + 1. */
static uint32_t read_list(lookup *l, gw_run **runs, gw_sql sql, const gw_digest *key)
{
    sqlite3_stmt *s = gw_db_statement(l->reader, sql);
    if (!s) {
        lookup_failed(l);
        return 0;
    }
    sqlite3_bind_int64(s, 1, gw_digest_prefix(key));
    gw_bind_digest(s, 2, key);
    sqlite3_bind_int64(s, 3, l->root->tenant);
    sqlite3_bind_int(s, 4, GW_LIST_RUNS_MAX + 1);
    uint32_t count = 0;
    int code;
    while (count <= GW_LIST_RUNS_MAX && (code = sqlite3_step(s)) == SQLITE_ROW) {
        gw_run *run = gw_column_run(s, l->arena);
        if (run)
            runs[count++] = run;
    }
    bool failed = count <= GW_LIST_RUNS_MAX && code != SQLITE_DONE;
    sqlite3_reset(s);
    if (failed)
        lookup_failed(l);
    return count;
}

/* One run of the list under `key`, by rules 1 and 3. */
static gw_found find_in(lookup *l, gw_run **out, gw_sql sql, const gw_digest *key, gw_want *want)
{
    gw_memory *memory = l->ledger->memory;
    uint64_t generation;
    gw_found found = gw_memory_choose(memory, out, &generation, key, want, l->arena);
    if (found != GW_FOUND_UNKNOWN || !reader_of(l))
        return found == GW_FOUND_UNKNOWN ? GW_FOUND_NONE : found;
    gw_run *runs[GW_LIST_RUNS_MAX + 1];
    uint32_t count = read_list(l, runs, sql, key);
    if (l->broken)
        return GW_FOUND_NONE;
    gw_memory_fill(memory, key, runs, count, generation);
    /* Memory may know runs that never went to disk, so it is asked again before the rows alone
     * decide. */
    found = gw_memory_choose(memory, out, &generation, key, want, l->arena);
    if (found != GW_FOUND_UNKNOWN)
        return found;
    const gw_run *chosen;
    found = gw_run_choose(&chosen, runs, count, want);
    *out = (gw_run *)chosen;
    return found;
}

/* ---- ids ---- */

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

/* A run by the id of a call or a turn. */
static gw_run *read_named(lookup *l, gw_sql sql, const char *id)
{
    sqlite3_stmt *s = gw_db_statement(l->reader, sql);
    if (!s) {
        lookup_failed(l);
        return NULL;
    }
    sqlite3_bind_int64(s, 1, gw_public_key(id));
    gw_bind_text(s, 2, id);
    if (sql != GW_SQL_CALL)
        sqlite3_bind_int64(s, 3, l->root->tenant);
    gw_run *run = sqlite3_step(s) == SQLITE_ROW ? gw_column_run(s, l->arena) : NULL;
    sqlite3_reset(s);
    return run;
}

static gw_run *find_named(lookup *l, gw_sql sql, const char *id)
{
    gw_run *run = gw_memory_named(l->ledger->memory, id, l->arena);
    if (!run && reader_of(l))
        run = read_named(l, sql, id);
    if (!run)
        return NULL;
    if (run->tenant != l->root->tenant) {
        l->foreign = true;
        return NULL;
    }
    if (strcmp(run->template_id, l->root->template_id) != 0) {
        l->other_template = true;
        return NULL;
    }
    return run;
}

/* The run that minted one of the item's call ids. */
static gw_run *find_call(lookup *l, const eng_item *item)
{
    for (uint32_t i = 0; i < item->call_count; i++) {
        if (!looks_minted(item->calls[i].id))
            continue;
        char id[GW_ID_MAX];
        memcpy(id, item->calls[i].id.data, 37);
        id[37] = '\0';
        gw_run *run = find_named(l, GW_SQL_CALL, id);
        if (run)
            return run;
    }
    return NULL;
}

static bool fits(const gw_run *run, const gw_digest *visible, const gw_digest *reasoning)
{
    return gw_digest_equal(&run->visible, visible) &&
           (!reasoning || (run->has_reasoning && gw_digest_equal(&run->reasoning, reasoning)));
}

/* The turns that the last turn named by an item behind `index` continued. */
static void read_ancestors(lookup *l, uint32_t index)
{
    gw_run *run = NULL;
    l->ancestors_read = true;
    for (uint32_t i = l->item_count; i-- > index + 1 && !run;)
        if (l->items[i].role == ENG_ROLE_ASSISTANT)
            run = find_call(l, &l->items[i]);
    if (!run)
        return;
    uint32_t room = base_min(l->item_count, ANCESTORS_MAX);
    l->ancestors = base_arena_calloc(l->arena, room, sizeof(gw_run *));
    while (l->ancestors && l->ancestor_count < room && run->parent.text[0]) {
        run = find_named(l, GW_SQL_TURN_RUN, run->parent.text);
        if (!run)
            break;
        l->ancestors[l->ancestor_count++] = run;
    }
    l->ancestor_next = l->ancestor_count;
}

/* Rule 4: oldest first, as the items come. */
static gw_run *find_ancestor(lookup *l, uint32_t index, const gw_digest *visible,
                             const gw_digest *reasoning)
{
    if (!l->ancestors_read)
        read_ancestors(l, index);
    for (uint32_t i = l->ancestor_next; i-- > 0;)
        if (fits(l->ancestors[i], visible, reasoning)) {
            l->ancestor_next = i;
            return l->ancestors[i];
        }
    return NULL;
}

/* ---- beginnings of runs ---- */

static uint32_t list_under(lookup *l, gw_run **runs, const gw_digest *key)
{
    gw_memory *memory = l->ledger->memory;
    uint64_t generation;
    bool complete;
    uint32_t count = gw_memory_list(memory, runs, &complete, &generation, key, l->arena);
    if (complete || !reader_of(l))
        return count;
    gw_run *rows[GW_LIST_RUNS_MAX + 1];
    uint32_t row_count = read_list(l, rows, GW_SQL_UNDER, key);
    if (l->broken)
        return count;
    gw_memory_fill(memory, key, rows, row_count, generation);
    for (uint32_t i = 0; i < row_count; i++) {
        bool have = false;
        for (uint32_t k = 0; k < count; k++)
            have |= gw_digest_equal(&runs[k]->slot, &rows[i]->slot) &&
                    gw_digest_equal(&runs[k]->tokens_digest, &rows[i]->tokens_digest);
        if (!have && count < 2 * GW_LIST_RUNS_MAX)
            runs[count++] = rows[i];
    }
    return count;
}

/* Rule 6. `seen` tokens of the run are taken, `rest` is rendered behind them. */
static gw_found find_begun(lookup *l, gw_run **out, uint32_t *seen, eng_text *rest,
                           const eng_item *item, const gw_digest *reasoning)
{
    eng_text text = gw_text_trim(item->text), thought = gw_text_trim(item->reasoning);
    *out = NULL;
    if (!l->root->engine || item->call_count || (!text.length && !thought.length))
        return GW_FOUND_NONE;
    gw_digest key;
    gw_under(&l->hash, &key, &l->match->body);
    gw_run *runs[2 * GW_LIST_RUNS_MAX];
    uint32_t count = list_under(l, runs, &key);
    const gw_run *hidden = NULL;
    bool differ = false;
    for (uint32_t i = 0; i < count; i++) {
        gw_run *run = runs[i];
        uint32_t tokens;
        eng_text beyond;
        if (strcmp(run->template_id, l->root->template_id) != 0 ||
            (text.length && reasoning && !gw_digest_equal(&run->reasoning, reasoning)) ||
            !eng_run_seen(l->root->engine, &tokens, &beyond, run->tokens, run->token_count, thought,
                          text))
            continue;
        if (!reasoning) {
            differ |= hidden && (hidden->has_reasoning != run->has_reasoning ||
                                 !gw_digest_equal(&hidden->reasoning, &run->reasoning));
            hidden = run;
            if (run->has_reasoning &&
                (l->root->restore != GW_RESTORE_AUTO || text.length < GW_PREFIX_BYTES_MIN))
                continue;
        }
        if (*out && tokens <= *seen)
            continue; /* of equals the first, so that the choice stays */
        *out = run;
        *seen = tokens;
        *rest = beyond;
    }
    if (differ)
        *out = NULL;
    return differ ? GW_FOUND_AMBIGUOUS : *out ? GW_FOUND_RUN : GW_FOUND_NONE;
}

/* ---- items ---- */

/* The run of an item whose text is whole, by rules 1 to 5. `linked`: by an id. */
static gw_found find_whole(lookup *l, gw_run **out, bool *linked, uint32_t index,
                           const gw_digest *slot, const gw_digest *visible,
                           const gw_digest *reasoning)
{
    gw_want want = {.template_id = l->root->template_id, .reasoning = reasoning};
    gw_run *run = find_call(l, &l->items[index]);
    *linked = true;
    *out = run && fits(run, visible, reasoning) ? run : NULL;
    if (*out)
        return GW_FOUND_RUN;
    *linked = false;
    gw_found found = find_in(l, out, GW_SQL_SLOT, slot, &want);
    /* What the slot may not give, a link may. */
    if (found == GW_FOUND_RUN &&
        (reasoning || !(*out)->has_reasoning || l->root->restore == GW_RESTORE_AUTO))
        return found;
    run = find_ancestor(l, index, visible, reasoning);
    if (run) {
        *linked = true;
        *out = run;
        return GW_FOUND_RUN;
    }
    if (found != GW_FOUND_NONE)
        return found;
    gw_digest lineage;
    gw_lineage(&l->hash, &lineage, &l->match->body, visible);
    found = find_in(l, out, GW_SQL_LINEAGE, &lineage, &want);
    l->other_template |= want.other_template;
    return found;
}

/* Takes a run; `seen` of its tokens, 0: all. */
static void take(lookup *l, eng_item *item, uint32_t index, const gw_run *run, uint32_t seen,
                 const gw_digest *slot, const gw_digest *sent)
{
    gw_match *match = l->match;
    item->tokens = run->tokens;
    item->token_count = seen ? seen : run->token_count;
    match->spliced++;
    match->restored += !sent && run->has_reasoning;
    l->last = run;
    l->exact = gw_digest_equal(&run->slot, slot);
    if (l->exact) {
        match->last = (int32_t)index;
        l->unknown = l->ambiguous = false;
    }
    match->parent_seen = seen;
}

/* The assistant item at `index`; sets its tokens and the nodes after it. */
static void match_item(lookup *l, uint32_t index)
{
    gw_match *match = l->match;
    eng_item *item = &l->items[index];
    gw_digest *node = &match->chain[index + 1], *own = &match->own[index];
    gw_digest visible, slot, reasoning, tokens, *sent = NULL;
    gw_item_visible(&l->hash, &visible, item);
    if (gw_item_reasoning(&l->hash, &reasoning, item->reasoning))
        sent = &reasoning;
    gw_item_own(&l->hash, own, &visible, item);
    gw_slot(&l->hash, &slot, &match->chain[index], &visible);
    gw_run *run;
    uint32_t seen = 0;
    bool linked;
    gw_found found = find_whole(l, &run, &linked, index, &slot, &visible, sent);
    if (found == GW_FOUND_NONE) {
        found = find_begun(l, &run, &seen, &item->rest, item, sent);
        if (found == GW_FOUND_RUN)
            gw_slot(&l->hash, &slot, &match->chain[index], &run->visible);
    } else if (found == GW_FOUND_RUN && !sent && run->has_reasoning &&
               (l->root->restore == GW_RESTORE_OFF ||
                (l->root->restore == GW_RESTORE_LINKED && !linked))) {
        found = GW_FOUND_NONE;
    }
    if (found != GW_FOUND_RUN) {
        match->rendered++;
        l->unknown = true;
        l->ambiguous |= found == GW_FOUND_AMBIGUOUS;
        gw_node_item(&l->hash, node, &match->chain[index], own);
        gw_node_item(&l->hash, &match->body, &match->body, own);
        return;
    }
    take(l, item, index, run, seen, &slot, sent);
    if (!seen) {
        gw_node_run(&l->hash, node, &match->chain[index], &run->tokens_digest);
        gw_node_run(&l->hash, &match->body, &match->body, &run->tokens_digest);
        return;
    }
    /* What was taken and what was rendered are both part of the node. */
    gw_tokens_digest(&l->hash, &tokens, item->tokens, seen);
    gw_node_item(&l->hash, node, &match->chain[index], own);
    gw_node_run(&l->hash, node, node, &tokens);
    gw_node_item(&l->hash, &match->body, &match->body, own);
    gw_node_run(&l->hash, &match->body, &match->body, &tokens);
}

/* ---- what changed ---- */

/* The run of the newest turn of the client's label. Behind a label there may be any conversation of
 * the tenant, so it only tells what differs. */
static const gw_run *find_label(lookup *l)
{
    bool goes_on = false;
    for (uint32_t i = 0; i < l->item_count; i++)
        goes_on |= l->items[i].role == ENG_ROLE_ASSISTANT;
    return goes_on && l->root->session && reader_of(l)
               ? read_named(l, GW_SQL_LABEL_RUN, l->root->session)
               : NULL;
}

/* Of a prompt that does not go on from this run's: what in front of it is different. */
static gw_miss compare_front(const gw_front *now, const gw_front *then)
{
    return !then->mode                 ? GW_MISS_EDITED
           : now->tools != then->tools ? GW_MISS_TOOLS
           : now->mode != then->mode   ? GW_MISS_MODE
           : now->system == then->system || !now->stable || now->stable != then->stable
               ? GW_MISS_EDITED
               : GW_MISS_VOLATILE;
}

static void conclude(lookup *l)
{
    gw_match *match = l->match;
    const gw_run *run = l->last;
    gw_miss front = GW_MISS_NONE;
    if (!run && !l->ambiguous && !l->foreign && !l->other_template) {
        run = find_label(l);
        match->parent_guessed = run != NULL;
        if (run && strcmp(run->template_id, l->root->template_id) != 0)
            l->other_template = true;
    }
    if (run) {
        match->parent = run->turn;
        match->session = run->session;
        memcpy(match->parent_sequence, run->sequence, sizeof(run->sequence));
        memcpy(match->parent_head, run->head, sizeof(run->head));
        match->parent_tokens = run->sequence_tokens;
        match->parent_head_tokens = run->head_tokens;
        match->parent_space = run->space;
        match->parent_earlier = run->ended_ms < l->ledger->opened_ms;
        match->parent_model = run->fingerprint[0] && l->root->fingerprint &&
                              strcmp(run->fingerprint, l->root->fingerprint) != 0;
        if (!l->exact)
            front = compare_front(&match->front, &run->front);
    }
    if (l->last && l->exact && !l->unknown)
        match->miss = match->restored ? GW_MISS_RESTORED : GW_MISS_NONE;
    else if (!l->last && l->other_template)
        match->miss = GW_MISS_MODEL;
    else if (!l->last && l->foreign)
        match->miss = GW_MISS_TENANT;
    else if (front && front != GW_MISS_EDITED)
        match->miss = front;
    else if (l->ambiguous)
        match->miss = GW_MISS_AMBIGUOUS;
    else
        match->miss = run ? GW_MISS_EDITED : GW_MISS_NEW;
}

/* gw_item_visible of an item that no call is in; hashing the results of tools would be most of what
 * a long history costs. */
static void find_visible(lookup *l, gw_digest *out, const eng_item *item)
{
    gw_slices *slices = l->ledger->slices;
    if (!item->call_count && gw_slices_recall(slices, out->bytes, item->text.data,
                                              item->text.length, (uint8_t)item->role))
        return;
    gw_item_visible(&l->hash, out, item);
    if (!item->call_count && !l->hash.failed)
        gw_slices_note(slices, out->bytes, item->text.data, item->text.length, (uint8_t)item->role);
}

base_code gw_ledger_match(gw_ledger *ledger, gw_match *out, const gw_root *root, eng_item *items,
                          uint32_t item_count, base_arena *arena, base_err *err)
{
    *out = (gw_match){.last = -1};
    out->chain = base_arena_calloc(arena, (size_t)item_count + 1, sizeof(*out->chain));
    out->own = base_arena_calloc(arena, base_max(item_count, 1), sizeof(*out->own));
    lookup l = {.ledger = ledger,
                .root = root,
                .match = out,
                .items = items,
                .item_count = item_count,
                .arena = arena,
                .hash = gw_hash_open()};
    if (out->chain && out->own) {
        uint32_t front = gw_item_front_count(items, item_count);
        gw_item_root(&l.hash, &out->chain[0], root);
        gw_item_body(&l.hash, &out->body, root->tenant);
        for (uint32_t i = 0; i < item_count; i++) {
            if (items[i].role == ENG_ROLE_ASSISTANT) {
                match_item(&l, i);
                continue;
            }
            find_visible(&l, &out->own[i], &items[i]);
            gw_node_item(&l.hash, &out->chain[i + 1], &out->chain[i], &out->own[i]);
            if (i >= front)
                gw_node_item(&l.hash, &out->body, &out->body, &out->own[i]);
        }
        gw_item_front(&out->front, root, items, out->own, front);
        conclude(&l);
    }
    bool failed = l.hash.failed || base_arena_failed(arena);
    gw_hash_close(&l.hash);
    if (l.reader)
        gw_reader_give(ledger, l.reader);
    return failed ? base_fail(err, BASE_NOMEM, "no memory to look the conversation up") : BASE_OK;
}
