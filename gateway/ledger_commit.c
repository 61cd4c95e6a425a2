/* Writing a turn. On the writer. */
#include "gateway/ledger_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "gateway/ledger_admin.h"

#define USAGE_TTL_MS_MIN 3600000 /* counts of turns that keep nothing else */
#define LOCKED_MS 50             /* wait for a lock that was not free for busy_ms */

/* Digests and the run, before the transaction begins. */
static void prepare_work(gw_ledger *ledger, gw_work *w, gw_commit *commit)
{
    gw_hash *hash = &ledger->hash;
    const gw_digest *parent = &commit->match->chain[commit->item_count];
    *w = (gw_work){.commit = commit, .alone = true};
    gw_run *run = &w->run;
    run->tenant = commit->root->tenant;
    snprintf(run->template_id, sizeof(run->template_id), "%s", commit->root->template_id);
    gw_item_visible(hash, &run->visible, &commit->answer);
    run->has_reasoning = gw_item_reasoning(hash, &run->reasoning, commit->answer.reasoning);
    gw_tokens_digest(hash, &run->tokens_digest, commit->run, commit->run_count);
    gw_slot(hash, &run->slot, parent, &run->visible);
    gw_item_own(hash, &w->own, &run->visible, &commit->answer);
    if (commit->splice)
        gw_node_run(hash, &w->node, parent, &run->tokens_digest);
    else
        gw_node_item(hash, &w->node, parent, &w->own);
    gw_id_set(&run->turn, commit->turn);
    gw_id_set(&run->session, commit->session);
    uint32_t head = commit->prompt_count - (uint32_t)base_min(commit->lead, commit->prompt_count);
    gw_sequence_hash(run->head, commit->prompt, head, NULL, 0);
    run->head_tokens = head;
    gw_sequence_hash(run->sequence, commit->prompt, commit->prompt_count,
                     commit->run + commit->lead, commit->run_count - commit->lead);
    run->sequence_tokens = commit->prompt_count + commit->run_count - commit->lead;
    run->tokens = (int32_t *)commit->run;
    run->token_count = commit->run_count;
    run->bodied = !gw_digest_equal(&commit->match->body, &(gw_digest){0});
    if (run->bodied) { /* a native turn follows its head: nobody looks for it by what was said */
        gw_lineage(hash, &run->lineage, &commit->match->body, &run->visible);
        gw_under(hash, &run->under, &commit->match->body);
    }
    if (!commit->match->parent_guessed)
        run->parent = commit->match->parent;
    run->front = commit->match->front;
    run->space = commit->space;
    snprintf(run->fingerprint, sizeof(run->fingerprint), "%s",
             commit->root->fingerprint ? commit->root->fingerprint : "");
    run->ended_ms = commit->ended_ms;
}

static bool find_or_add_item(gw_db *c, int64_t *id, int64_t tenant, const gw_digest *digest,
                             int kind, const eng_item *item, const gw_root *root)
{
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_ITEM_FIND);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, gw_digest_prefix(digest));
    gw_bind_digest(s, 2, digest);
    sqlite3_bind_int64(s, 3, tenant);
    if (!gw_db_scalar(s, id))
        return false;
    if (*id)
        return true;
    base_buf json;
    base_buf_init(&json, 0);
    if (item)
        gw_item_json(&json, item);
    else
        gw_root_json(&json, root);
    s = json.failed ? NULL : gw_db_statement(c, GW_SQL_ITEM_ADD);
    bool ok = s != NULL;
    if (ok) {
        sqlite3_bind_int64(s, 1, gw_digest_prefix(digest));
        gw_bind_digest(s, 2, digest);
        sqlite3_bind_int64(s, 3, tenant);
        sqlite3_bind_int(s, 4, kind);
        sqlite3_bind_text64(s, 5, json.data, json.length, SQLITE_STATIC, SQLITE_UTF8);
        sqlite3_bind_int64(s, 6, gw_item_sum(json.data, json.length));
        ok = gw_db_execute(s);
        *id = sqlite3_last_insert_rowid(c->db);
    }
    base_buf_deinit(&json);
    return ok;
}

static bool find_node(gw_db *c, int64_t *id, int64_t tenant, const gw_digest *digest)
{
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NODE_FIND);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, gw_digest_prefix(digest));
    gw_bind_digest(s, 2, digest);
    sqlite3_bind_int64(s, 3, tenant);
    return gw_db_scalar(s, id);
}

static bool add_node(gw_db *c, int64_t *id, int64_t tenant, const gw_digest *digest, int64_t parent,
                     int64_t item, int64_t run)
{
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_NODE_ADD);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, gw_digest_prefix(digest));
    gw_bind_digest(s, 2, digest);
    sqlite3_bind_int64(s, 3, tenant);
    gw_bind_id(s, 4, parent);
    sqlite3_bind_int64(s, 5, item);
    gw_bind_id(s, 6, run);
    if (!gw_db_execute(s))
        return false;
    *id = sqlite3_last_insert_rowid(c->db);
    return true;
}

/* The nodes of the request, from the deepest that is there already; then the answer's. */
static bool add_nodes(gw_db *c, int64_t *last, const gw_work *w, int64_t run)
{
    const gw_commit *commit = w->commit;
    int64_t tenant = commit->root->tenant, node = 0;
    uint32_t next = commit->item_count + 1;
    while (next > 0) {
        if (!find_node(c, &node, tenant, &commit->match->chain[next - 1]))
            return false;
        if (node)
            break;
        next--;
    }
    for (; next <= commit->item_count; next++) {
        int64_t item;
        const eng_item *source = next ? &commit->items[next - 1] : NULL;
        const gw_digest *own = next ? &commit->match->own[next - 1] : &commit->match->chain[0];
        if (!find_or_add_item(c, &item, tenant, own, source ? (int)source->role : -1, source,
                              commit->root) ||
            !add_node(c, &node, tenant, &commit->match->chain[next], node, item, 0))
            return false;
    }
    if (commit->run_count == commit->lead) {
        *last = node;
        return true;
    }
    if (!find_node(c, last, tenant, &w->node))
        return false;
    int64_t item;
    return *last || (find_or_add_item(c, &item, tenant, &w->own, ENG_ROLE_ASSISTANT,
                                      &commit->answer, NULL) &&
                     add_node(c, last, tenant, &w->node, node, item, run));
}

static bool add_calls(gw_db *c, const gw_commit *commit, int64_t run)
{
    for (uint32_t i = 0; i < commit->answer.call_count; i++) {
        sqlite3_stmt *s = gw_db_statement(c, GW_SQL_CALL_ADD);
        if (!s)
            return false;
        const char *id = commit->answer.calls[i].id.data;
        sqlite3_bind_int64(s, 1, gw_public_key(id));
        gw_bind_text(s, 2, id);
        sqlite3_bind_int64(s, 3, run);
        if (!gw_db_execute(s))
            return false;
    }
    return true;
}

static bool add_run(gw_db *c, int64_t *id, gw_work *w)
{
    const gw_commit *commit = w->commit;
    const gw_run *run = &w->run;
    *id = 0;
    if (commit->run_count == commit->lead)
        return true;
    sqlite3_stmt *s;
    if (commit->splice) {
        s = gw_db_statement(c, GW_SQL_RUN_FIND);
        if (!s)
            return false;
        sqlite3_bind_int64(s, 1, gw_digest_prefix(&run->slot));
        gw_bind_digest(s, 2, &run->slot);
        gw_bind_digest(s, 3, &run->tokens_digest);
        sqlite3_bind_int64(s, 4, run->tenant);
        if (!gw_db_scalar(s, id))
            return false;
        if (*id)
            return add_calls(c, commit, *id);
    }
    base_buf tokens;
    base_buf_init(&tokens, 0);
    gw_put_numbers(&tokens, commit->run, commit->run_count);
    s = tokens.failed ? NULL : gw_db_statement(c, GW_SQL_RUN_ADD);
    bool ok = s != NULL;
    if (ok) {
        sqlite3_bind_int64(s, 1, run->tenant);
        gw_bind_text(s, 2, run->template_id);
        if (commit->splice) {
            sqlite3_bind_int64(s, 3, gw_digest_prefix(&run->slot));
            gw_bind_digest(s, 4, &run->slot);
        }
        gw_bind_digest(s, 5, &run->visible);
        if (run->has_reasoning)
            gw_bind_digest(s, 6, &run->reasoning);
        gw_bind_digest(s, 7, &run->tokens_digest);
        gw_bind_text(s, 8, run->turn.text);
        gw_bind_text(s, 9, run->session.text);
        sqlite3_bind_blob(s, 10, run->sequence, sizeof(run->sequence), SQLITE_STATIC);
        sqlite3_bind_int64(s, 11, run->sequence_tokens);
        sqlite3_bind_int64(s, 12, run->token_count);
        sqlite3_bind_blob64(s, 13, tokens.data, tokens.length, SQLITE_STATIC);
        if (commit->splice && run->bodied) {
            sqlite3_bind_int64(s, 14, gw_digest_prefix(&run->lineage));
            gw_bind_digest(s, 15, &run->lineage);
            sqlite3_bind_int64(s, 16, gw_digest_prefix(&run->under));
            gw_bind_digest(s, 17, &run->under);
        }
        if (run->parent.text[0])
            gw_bind_text(s, 18, run->parent.text);
        sqlite3_bind_blob(s, 19, &run->front, sizeof(run->front), SQLITE_STATIC);
        sqlite3_bind_blob(s, 20, run->head, sizeof(run->head), SQLITE_STATIC);
        sqlite3_bind_int64(s, 21, run->head_tokens);
        sqlite3_bind_int64(s, 22, (int64_t)run->space);
        gw_bind_text(s, 23, run->fingerprint);
        sqlite3_bind_int64(s, 24, run->ended_ms);
        ok = gw_db_execute(s);
        *id = sqlite3_last_insert_rowid(c->db);
    }
    base_buf_deinit(&tokens);
    return ok && (!commit->splice || add_calls(c, commit, *id));
}

static bool find_or_add_session(gw_db *c, int64_t *id, const gw_commit *commit)
{
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_SESSION_FIND);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, gw_public_key(commit->session));
    gw_bind_text(s, 2, commit->session);
    sqlite3_bind_int64(s, 3, commit->root->tenant);
    if (!gw_db_scalar(s, id))
        return false;
    if (*id)
        return true;
    s = gw_db_statement(c, GW_SQL_SESSION_ADD);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, gw_public_key(commit->session));
    gw_bind_text(s, 2, commit->session);
    sqlite3_bind_int64(s, 3, commit->root->tenant);
    gw_bind_text(s, 4, commit->label);
    gw_bind_text(s, 5, commit->model);
    sqlite3_bind_int64(s, 6, commit->created_ms);
    if (!gw_db_execute(s))
        return false;
    *id = sqlite3_last_insert_rowid(c->db);
    return true;
}

/* The parent turn, if it is on disk; `base` tokens of its prompt and run are how this prompt
 * begins. */
static bool find_parent(gw_db *c, int64_t *id, uint32_t *base, const gw_commit *commit)
{
    const gw_match *match = commit->match;
    *id = 0;
    *base = 0;
    if (match->parent_guessed || !match->parent.text[0])
        return true;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_TURN_FIND);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, gw_public_key(match->parent.text));
    gw_bind_text(s, 2, match->parent.text);
    sqlite3_bind_int64(s, 3, commit->root->tenant);
    if (!gw_db_scalar(s, id))
        return false;
    if (*id && !match->parent_seen)
        *base = gw_match_continues(match, commit->prompt, commit->prompt_count);
    return true;
}

typedef struct turn_links {
    int64_t session, parent, node, run;
    uint32_t base;
} turn_links;

static bool add_turn(gw_ledger *ledger, gw_db *c, const gw_work *w, gw_retention retention,
                     const turn_links *links)
{
    char tool[GW_USAGE_TOOL_MAX + 1];
    const gw_commit *commit = w->commit;
    const eng_usage *usage = &commit->usage;
    bool content = retention != GW_RETAIN_USAGE;
    int64_t ttl = (int64_t)ledger->options.cached_ttl_s * 1000;
    if (!content && ttl < USAGE_TTL_MS_MIN)
        ttl = USAGE_TTL_MS_MIN;
    base_buf prompt, steps;
    base_buf_init(&prompt, 0);
    base_buf_init(&steps, 0);
    if (content) {
        gw_put_numbers(&prompt, commit->prompt + links->base, commit->prompt_count - links->base);
        gw_put_numbers(&steps, commit->steps, commit->step_count);
    }
    sqlite3_stmt *s = prompt.failed || steps.failed ? NULL : gw_db_statement(c, GW_SQL_TURN_ADD);
    bool ok = s != NULL;
    if (ok) {
        sqlite3_bind_int64(s, 1, commit->root->tenant);
        sqlite3_bind_int64(s, 2, gw_public_key(commit->turn));
        gw_bind_text(s, 3, commit->turn);
        gw_bind_id(s, 4, links->session);
        gw_bind_id(s, 5, links->parent);
        gw_bind_id(s, 6, links->node);
        gw_bind_id(s, 7, links->run);
        sqlite3_bind_int(s, 8, commit->status);
        sqlite3_bind_int(s, 9, commit->finish);
        sqlite3_bind_int(s, 10, retention);
        gw_bind_text(s, 11, commit->dialect);
        gw_bind_text(s, 12, commit->request);
        if (commit->response && commit->response[0]) {
            sqlite3_bind_int64(s, 13, gw_public_key(commit->response));
            gw_bind_text(s, 14, commit->response);
        }
        gw_bind_text(s, 15, commit->model);
        gw_bind_text(s, 16, commit->root->template_id);
        gw_bind_text(s, 17, commit->fingerprint);
        gw_bind_text(s, 18, commit->numerics);
        gw_bind_text(s, 19, content ? commit->metadata : NULL);
        gw_bind_text(s, 20, gw_miss_name(commit->cache.miss));
        sqlite3_bind_int64(s, 21, links->base);
        if (content) {
            sqlite3_bind_blob64(s, 22, prompt.data ? prompt.data : "", prompt.length,
                                SQLITE_STATIC);
            sqlite3_bind_blob64(s, 24, steps.data ? steps.data : "", steps.length, SQLITE_STATIC);
        }
        sqlite3_bind_int64(s, 23, commit->lead);
        sqlite3_bind_int64(s, 25, (int64_t)commit->seed);
        const uint64_t columns[] = {usage->prompt_tokens,
                                    usage->cached_tokens,
                                    usage->restored_tokens,
                                    usage->output_tokens,
                                    usage->reasoning_tokens,
                                    usage->drafted,
                                    usage->accepted,
                                    usage->steps,
                                    usage->queue_ns / 1000,
                                    usage->prefill_ns / 1000,
                                    usage->ttft_ns / 1000,
                                    usage->decode_ns / 1000,
                                    (uint64_t)commit->created_ms,
                                    (uint64_t)commit->ended_ms};
        for (int i = 0; i < 14; i++)
            sqlite3_bind_int64(s, 26 + i, (int64_t)columns[i]);
        int64_t kept_ttl = (int64_t)ledger->options.kept_ttl_s * 1000;
        if (retention != GW_RETAIN_KEPT || kept_ttl)
            sqlite3_bind_int64(s, 40,
                               commit->ended_ms + (retention == GW_RETAIN_KEPT ? kept_ttl : ttl));
        const char *echo = retention == GW_RETAIN_KEPT ? commit->echo : NULL;
        gw_bind_text(s, 41, echo);
        sqlite3_bind_int64(s, 42,
                           gw_turn_sum(prompt.data, prompt.length, steps.data, steps.length, echo));
        if (content)
            sqlite3_bind_int64(s, 43, (int64_t)commit->space);
        sqlite3_bind_int64(s, 44, commit->cache.lost);
        if (commit->cache.diff_item >= 0) {
            sqlite3_bind_int64(s, 45, commit->cache.diff_item);
            sqlite3_bind_int64(s, 46, commit->cache.diff_token);
        }
        gw_usage_tool(tool, commit);
        gw_bind_text(s, 47, tool[0] ? tool : NULL);
        gw_bind_id(s, 48, commit->extra);
        ok = gw_db_execute(s);
    }
    base_buf_deinit(&prompt);
    base_buf_deinit(&steps);
    return ok && gw_usage_commit(c, commit);
}

static bool store(gw_ledger *ledger, gw_db *c, gw_work *w)
{
    const gw_commit *commit = w->commit;
    turn_links links = {0};
    gw_retention retention = commit->retention;
    if (retention == GW_RETAIN_CACHED && !ledger->options.cached_ttl_s)
        retention = GW_RETAIN_USAGE;
    if (commit->splice) {
        int64_t other;
        sqlite3_stmt *s = gw_db_statement(c, GW_SQL_RUN_OTHER);
        if (!s)
            return false;
        sqlite3_bind_int64(s, 1, gw_digest_prefix(&w->run.slot));
        gw_bind_digest(s, 2, &w->run.slot);
        gw_bind_digest(s, 3, &w->run.tokens_digest);
        if (!gw_db_scalar(s, &other))
            return false;
        w->alone = !other;
    }
    if (retention == GW_RETAIN_USAGE)
        return add_turn(ledger, c, w, retention, &links);
    if (!find_or_add_session(c, &links.session, commit) ||
        !find_parent(c, &links.parent, &links.base, commit) || !add_run(c, &links.run, w) ||
        !add_nodes(c, &links.node, w, commit->splice ? links.run : 0) ||
        !add_turn(ledger, c, w, retention, &links))
        return false;
    sqlite3_stmt *s = gw_db_statement(c, GW_SQL_SESSION_USE);
    if (!s)
        return false;
    sqlite3_bind_int64(s, 1, links.session);
    sqlite3_bind_int64(s, 2, sqlite3_last_insert_rowid(c->db));
    sqlite3_bind_int64(s, 3, commit->ended_ms);
    sqlite3_bind_int(s, 4, commit->moves_head && commit->status == GW_TURN_COMPLETED);
    return gw_db_execute(s) && gw_stream_commit(c, commit) && gw_conversation_commit(c, commit);
}

/* Another process that holds the lock for long must not hold up the end of every turn meanwhile:
 * the full wait comes once, then little until it is free. */
static void wait_for_lock(gw_ledger *ledger, uint32_t ms)
{
    if (ms == ledger->waits_ms)
        return;
    ledger->waits_ms = ms;
    sqlite3_busy_timeout(ledger->writer->db, (int)ms);
}

/* One transaction for works[0, count). The error of the first statement that failed. */
static base_code transact(gw_ledger *ledger, gw_work *works, uint32_t count, base_err *err)
{
    gw_db *c = ledger->writer;
    atomic_fetch_add(&ledger->transaction_count, 1);
    if (!gw_db_simple(c, GW_SQL_BEGIN)) {
        base_code code = gw_db_error(c, err, "cannot begin");
        wait_for_lock(ledger, code == BASE_CONFLICT ? LOCKED_MS : ledger->options.busy_ms);
        return code;
    }
    wait_for_lock(ledger, ledger->options.busy_ms);
    for (uint32_t i = 0; i < count; i++) {
        if (ledger->hash.failed || !store(ledger, c, &works[i])) {
            base_code code = ledger->hash.failed
                                 ? base_fail(err, BASE_NOMEM, "no memory to hash a turn")
                                 : gw_db_error(c, err, "cannot write a turn");
            gw_db_simple(c, GW_SQL_ROLLBACK);
            return code ? code : base_fail(err, BASE_NOMEM, "no memory to write a turn");
        }
    }
    if (gw_db_simple(c, GW_SQL_COMMIT))
        return BASE_OK;
    base_code code = gw_db_error(c, err, "cannot commit");
    gw_db_simple(c, GW_SQL_ROLLBACK);
    return code;
}

static void remember(gw_ledger *ledger, gw_work *w)
{
    gw_commit *commit = w->commit;
    if (!commit->splice || commit->run_count == commit->lead || ledger->hash.failed)
        return;
    uint32_t calls = commit->answer.call_count;
    gw_id *ids = calloc((size_t)calls + 1, sizeof(*ids));
    for (uint32_t i = 0; ids && i < calls; i++)
        gw_id_set(&ids[i], commit->answer.calls[i].id.data);
    if (ids)
        gw_id_set(&ids[calls], commit->turn);
    w->run.ids = ids;
    w->run.id_count = ids ? calls + 1 : 0;
    gw_memory_add(ledger->memory, &w->run, w->alone);
    free(ids);
}

void gw_write_batch(gw_ledger *ledger, gw_commit *commits)
{
    uint32_t count = 0;
    for (gw_commit *commit = commits; commit; commit = commit->next)
        prepare_work(ledger, &ledger->works[count++], commit);
    base_err err = BASE_ERR_INIT;
    base_code code = transact(ledger, ledger->works, count, &err);
    for (uint32_t i = 0; i < count; i++) {
        gw_work *w = &ledger->works[i];
        gw_commit *commit = w->commit;
        commit->err = err;
        /* A lock, a full or failing disk is nobody's turn's fault, and trying again is no help. */
        if (code && count > 1 && code != BASE_CONFLICT && code != BASE_IO) {
            commit->err = (base_err)BASE_ERR_INIT;
            commit->stored = transact(ledger, w, 1, &commit->err) == BASE_OK;
        } else {
            commit->stored = !code;
        }
        /* What is on disk of a turn that keeps nothing is its count; nobody may take that for a
         * stored turn. */
        if (commit->retention == GW_RETAIN_USAGE ||
            (commit->retention == GW_RETAIN_CACHED && !ledger->options.cached_ttl_s))
            commit->stored = false;
        atomic_fetch_add(&ledger->commit_count, 1);
        if (commit->err.code)
            atomic_fetch_add(&ledger->failure_count, 1);
        remember(ledger, w);
    }
    ledger->hash.failed = false;
    for (gw_commit *commit = commits, *next; commit; commit = next) {
        next = commit->next; /* `done` gives the memory back */
        commit->done(commit);
    }
}
