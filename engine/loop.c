/* The engine thread and its step loop.
 *
 * A request becomes a sequence: prompt tokens (borrowed), output tokens (own), pages, and `run`,
 * the count of positions whose K/V lie in pages. Known tokens are prompt + output; a sequence whose
 * known tokens exceed `run` by one decodes, by more it prefills. Forced tokens (a call that
 * tool_choice demands) and a sequence that was preempted are just more known tokens, so they need
 * no path of their own.
 *
 *   QUEUED --admit, as sched.c picks: match the prefix, STARTED--> ACTIVE --finish, DONE--> (slot
 * free)
 *      ^------------- preempt: pages go back, tokens stay -----|
 *
 * A step: drain the mailbox, admit, propose drafts, plan rows, run the model, sample each picked
 * row in order, hand events to the sink, flush. A drafted token is kept only if it equals the
 * target's own draw at that position, so a draft changes nothing but speed.
 *
 * Invariants:
 *  1. pages[i] of an active sequence covers positions 128i…; the sequence holds one reference on
 * each.
 *  2. Rows at positions >= run may hold rejected drafts; they are not counted in `filled` and are
 * overwritten.
 *  3. The index lists only rows < run.
 *
 * Threads: mailbox and statistics are shared; everything else is the engine thread's. The index has
 * a lock only because eng_peek_cached reads it from workers. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/base/thread.h"
#include "engine/engine_internal.h"

#define SLOW_US_MAX 60000000
#define FORCED_TOKENS 64 /* appended at once */
/* A step that begins so long after the last one found caches cold and threads parked: it says
 * nothing about steps in a row. */
#define PAUSE_NS 300000
#define CHUNK_MIN 8 /* prefill rows of a step at least, however long it takes */

#define SURE 0.8 /* of the predicted work: less time than that is too little for certain */

#define WAIT_NS 5000000 /* for the disk tier: a deadline or a cancel is late by so much at most */

static int32_t token_at(const eng_sequence *seq, uint32_t position)
{
    return position < seq->request.token_count ? seq->request.tokens[position]
                                               : seq->output[position - seq->request.token_count];
}

/* ---- parts of one event ---- */

void eng__add_part(void *ctx, const eng_part *part)
{
    eng_sequence *seq = ctx;
    eng_engine *engine = seq->engine;
    if (engine->slot_count == engine->slot_max) {
        uint32_t max = engine->slot_max * 2;
        eng_part_slot *slots = realloc(engine->slots, max * sizeof *slots);
        if (slots != NULL)
            engine->slots = slots;
        eng_part *parts = realloc(engine->parts, max * sizeof *parts);
        if (parts != NULL)
            engine->parts = parts;
        if (slots == NULL || parts == NULL) {
            base_fail(&seq->err, BASE_NOMEM, "out of memory for output events");
            return;
        }
        engine->slot_max = max;
    }
    /* Neighbours of one kind become one part: a step that accepts eight tokens sends one delta. */
    eng_part_slot *last = engine->slot_count > 0 ? &engine->slots[engine->slot_count - 1] : NULL;
    bool joins = last != NULL && last->kind == part->kind && last->call == part->call &&
                 part->kind != ENG_PART_CALL_BEGIN && part->kind != ENG_PART_CALL_END;
    size_t offset = engine->part_text.length;
    base_buf_add(&engine->part_text, part->text, part->length);
    if (engine->part_text.failed)
        base_fail(&seq->err, BASE_NOMEM, "out of memory for output text");
    if (part->kind == ENG_PART_CALL_BEGIN)
        seq->call_class = eng__call_class(seq, part->text, part->length);
    if (joins)
        last->length += part->length;
    else
        engine->slots[engine->slot_count++] = (eng_part_slot){
            .kind = part->kind, .call = part->call, .offset = offset, .length = part->length};
}

static void emit(eng_engine *engine, eng_sequence *seq, eng_event_kind kind)
{
    for (uint32_t i = 0; i < engine->slot_count; i++) {
        const eng_part_slot *slot = &engine->slots[i];
        engine->parts[i] =
            (eng_part){.kind = slot->kind,
                       .call = slot->call,
                       .text = slot->length > 0 ? engine->part_text.data + slot->offset : "",
                       .length = slot->length};
    }
    eng_event event = {
        .kind = kind,
        .id = seq->request.id,
        .user = seq->request.user,
        .usage = seq->usage,
        .tokens = seq->output + seq->told,
        .token_count = seq->output_count - seq->told,
        .logprobs = seq->logprobs != NULL ? seq->logprobs + seq->told : NULL,
        .prompt_logprobs = engine->scores,
        .prompt_logprob_count = engine->score_count,
        .parts = engine->parts,
        .part_count = engine->slot_count,
        .finish = seq->finish,
        .stop_index = seq->stop_index,
        .run_tokens = seq->run_tokens,
        .err = seq->err,
    };
    seq->told = seq->output_count;
    engine->options.sink.event(engine->options.sink.ctx, &event);
    engine->told_any = true;
    engine->slot_count = engine->score_count = 0;
    base_buf_clear(&engine->part_text);
}

/* ---- ending ---- */

static void note_finish(eng_sequence *seq, eng_finish finish)
{
    if (seq->finished)
        return;
    seq->finished = true;
    seq->finish = finish;
}

/* What it took in truth is its tenant's to pay, and how long it was teaches the forecast. */
static void settle(eng_engine *engine, const eng_sequence *seq)
{
    bool whole = seq->finish == ENG_FINISH_STOP || seq->finish == ENG_FINISH_LENGTH;
    pthread_mutex_lock(&engine->lock);
    if (seq->started)
        eng_admission_settle(engine->admission, seq->waiter.tenant,
                             seq->taken_ns - seq->charged_ns);
    if (whole && !seq->request.prefill_only && seq->err.code == BASE_OK)
        eng_forecast_observe_end(engine->forecast, seq->output_max, seq->output_count);
    pthread_mutex_unlock(&engine->lock);
}

/* Sends DONE and frees the sequence; its pages have been dealt with. */
static void close_sequence(eng_engine *engine, eng_sequence *seq)
{
    uint64_t now = base_now_ns();
    engine->moved = true;
    eng__tier_abandon(engine, seq);
    if (seq->decoder != NULL)
        eng_decoder_finish(seq->decoder);
    seq->usage.prompt_tokens = seq->request.token_count;
    seq->usage.output_tokens = seq->output_count;
    seq->usage.reasoning_tokens =
        seq->decoder != NULL ? eng_decoder_reasoning_tokens(seq->decoder) : 0;
    seq->usage.decode_ns = seq->first_ns != 0 ? now - seq->first_ns : 0;
    if (seq->request.prefill_only && seq->started)
        seq->usage.prefill_ns = now - seq->admitted_ns;
    settle(engine, seq);
    if (seq->stop_index < 0)
        seq->run_tokens = seq->output_count;
    if (seq->err.code != BASE_OK && seq->finish != ENG_FINISH_CANCELLED)
        seq->finish = ENG_FINISH_ERROR;
    if (seq->finish == ENG_FINISH_STOP && seq->decoder != NULL &&
        eng_decoder_calls(seq->decoder) > 0)
        seq->finish = ENG_FINISH_CALLS;
    ENG_COUNT(engine, finished, 1);
    ENG_COUNT(engine, cancelled, seq->finish == ENG_FINISH_CANCELLED);
    ENG_COUNT(engine, failed, seq->finish == ENG_FINISH_ERROR);
    ENG_COUNT(engine, reasoning_tokens, seq->usage.reasoning_tokens);
    emit(engine, seq, ENG_EVENT_DONE);
    eng__sequence_destroy(seq);
}

static void retire(eng_engine *engine, uint32_t at)
{
    eng_sequence *seq = engine->active[at];
    if (engine->lost.code == BASE_OK)
        eng__leave_pages(engine, seq);
    eng__drop_pages(engine, seq);
    engine->active[at] = engine->active[--engine->active_count];
    engine->crowded = false;
    close_sequence(engine, seq);
}

/* Gives a sequence's pages back and lets it wait, at its old rank; it goes on from its exact tokens
 * later. */
static void preempt(eng_engine *engine, uint32_t at)
{
    eng_sequence *seq = engine->active[at];
    uint32_t listed = eng__list_pages(engine, seq);
    eng_past_note(&engine->past, seq->request.space, eng__known_tokens(seq, listed), listed);
    eng__drop_pages(engine, seq);
    engine->active[at] = engine->active[--engine->active_count];
    engine->moved = true;
    seq->draft_count = 0;
    seq->next = engine->queue_head;
    engine->queue_head = seq;
    if (engine->queue_tail == NULL)
        engine->queue_tail = seq;
    engine->waiting++;
    engine->crowded = true;
    seq->waiter.entry.cost_ns = 0; /* it has paid */
    seq->waiter.told_ns = 0;
    pthread_mutex_lock(&engine->lock);
    eng_admission_enter(engine->admission, &seq->waiter, seq->request.weight);
    pthread_mutex_unlock(&engine->lock);
    base_log(BASE_LOG_DEBUG, "seq_preempted id=%llu run=%u", (unsigned long long)seq->request.id,
             seq->run);
}

/* ---- output ---- */

bool eng__is_end_token(const eng_engine *engine, int32_t token)
{
    for (uint32_t i = 0; i < engine->end_token_count; i++)
        if (engine->end_tokens[i] == token)
            return true;
    return false;
}

bool eng__ends_turn(const eng_engine *engine, const eng_sequence *seq, int32_t token)
{
    if (eng__is_end_token(engine, token) && !seq->request.sampling.ignore_eos)
        return true;
    for (uint32_t i = 0; i < seq->request.sampling.stop_token_count; i++)
        if (seq->request.sampling.stop_tokens[i] == token)
            return true;
    return false;
}

static void push_token(eng_engine *engine, eng_sequence *seq, int32_t token)
{
    size_t length = 0;
    const char *bytes = eng_tok_bytes(engine->tok, token, &length);
    if (eng_decoder_push(seq->decoder, token, bytes != NULL ? bytes : "",
                         bytes != NULL ? length : 0))
        return;
    seq->stop_index = eng_decoder_stop_index(seq->decoder);
    if (seq->stop_index < 0) {
        base_fail(&seq->err, BASE_NOMEM, "out of memory for output text");
        note_finish(seq, ENG_FINISH_ERROR);
        return;
    }
    seq->run_tokens = eng_decoder_whole_tokens(seq->decoder);
    note_finish(seq, ENG_FINISH_STOP);
}

/* The decoder closes an open call at the end of turn; raw text has no turns and shows no special
 * token for it. */
static void push_end(eng_engine *engine, eng_sequence *seq, int32_t token)
{
    if (seq->request.parse == ENG_PARSE_CHAT && token == eng_codec_end_token(engine->codec))
        push_token(engine, seq, token);
}

static void store_token(eng_sequence *seq, int32_t token)
{
    seq->output[seq->output_count++] = token;
    if (seq->counts.output != NULL && seq->counts.output[token] < UINT16_MAX)
        seq->counts.output[token]++;
}

/* Whoever holds the output to a grammar hears of each token, behind the decoder. */
static void follow_grammar(eng_sequence *seq, int32_t token)
{
    if (seq->constrain == NULL ||
        eng_constrain_take(seq->constrain, token, eng_decoder_in_reasoning(seq->decoder)))
        return;
    base_fail(&seq->err, BASE_CONFLICT, "the output left its grammar");
    note_finish(seq, ENG_FINISH_ERROR);
}

/* Tokens that nobody sampled; they have logprob 0. */
static void append_forced(eng_engine *engine, eng_sequence *seq, const int32_t *tokens,
                          uint32_t count)
{
    for (uint32_t i = 0; i < count && !seq->finished; i++) {
        if (seq->logprobs != NULL)
            seq->logprobs[seq->output_count] = (eng_logprob){.token = tokens[i]};
        store_token(seq, tokens[i]);
        if (eng__is_end_token(engine, tokens[i])) {
            push_end(engine, seq, tokens[i]);
            seq->closing = true; /* ends once what is known has been run */
        } else
            push_token(engine, seq, tokens[i]);
        follow_grammar(seq, tokens[i]);
        if (seq->output_count == seq->output_max)
            note_finish(seq, ENG_FINISH_LENGTH);
    }
}

/* Whether the call that tool_choice demands is to be opened now: visible text may begin, and none
 * has been forced. */
static bool force_due(const eng_sequence *seq)
{
    if (seq->force_count == 0 || seq->finished || eng_decoder_in_reasoning(seq->decoder))
        return false;
    if (seq->request.thinking != ENG_THINK_ADAPTIVE || seq->output_count > 0)
        return true;
    return false; /* adaptive: the first token decides whether there is reasoning */
}

static void force_call(eng_engine *engine, eng_sequence *seq)
{
    if (!force_due(seq))
        return;
    uint32_t count = seq->force_count;
    seq->force_count = 0;
    append_forced(engine, seq, seq->force, count);
}

/* Where the grammar leaves one way on, nobody asks the model. */
static void force_grammar(eng_engine *engine, eng_sequence *seq)
{
    int32_t tokens[FORCED_TOKENS];
    uint32_t count;
    if (seq->constrain == NULL)
        return;
    while (!seq->finished && !seq->closing &&
           (count = eng_constrain_forced(seq->constrain, tokens, FORCED_TOKENS)) > 0) {
        uint32_t before = seq->output_count;
        append_forced(engine, seq, tokens, count);
        ENG_COUNT(engine, forced_tokens, seq->output_count - before);
    }
    if (!seq->finished && !seq->closing && eng_constrain_stuck(seq->constrain)) {
        base_fail(&seq->err, BASE_TOO_LONG, "the output has reached a bound of its grammar");
        note_finish(seq, ENG_FINISH_ERROR);
    }
}

/* Takes one sampled token. False once the sequence is finished. */
static bool take_token(eng_engine *engine, eng_sequence *seq, int32_t token)
{
    store_token(seq, token);
    if (eng__ends_turn(engine, seq, token)) {
        push_end(engine, seq, token);
        note_finish(seq, ENG_FINISH_STOP);
        return false;
    }
    push_token(engine, seq, token);
    follow_grammar(seq, token);
    if (!seq->finished && seq->close_count > 0 &&
        eng_decoder_calls(seq->decoder) >= seq->request.call_max) {
        append_forced(engine, seq, seq->close, seq->close_count);
    }
    if (!seq->finished && seq->output_count == seq->output_max)
        note_finish(seq, ENG_FINISH_LENGTH);
    force_call(engine, seq);
    force_grammar(engine, seq);
    return !seq->finished && !seq->closing;
}

/* ---- a step ---- */

/* One STEP event with all that is new: a finished sequence's too, since the parts are kept for one
 * sequence at a time. */
static void deliver(eng_engine *engine, eng_sequence *seq)
{
    uint32_t fresh = seq->output_count - seq->told;
    if (fresh == 0)
        return;
    ENG_COUNT(engine, output_tokens, fresh);
    emit(engine, seq, ENG_EVENT_STEP);
}

/* Takes the cached prefix and makes sure that the rest has room. False: not now. */
static bool take_pages(eng_engine *engine, eng_sequence *seq)
{
    /* All but the last known token may come from the cache: its row is needed for logits, unless
     * none are wanted; and so are those of rows that give the prompt's logprobs. */
    uint32_t count = eng__scores(seq) ? seq->scored : eng__known(seq) - !seq->closing;
    const int32_t *tokens = eng__known_tokens(seq, count);
    eng__match_pages(engine, seq, tokens, count);
    if (!eng__scores(seq) && eng__tier_fetch(engine, seq, tokens, count))
        return false;
    uint32_t tail = seq->run % KV_PAGE_TOKENS;
    uint32_t want =
        (eng__known(seq) + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS - seq->page_count + (tail != 0);
    if (engine->tier.ahead.seq == seq)
        want -= engine->tier.ahead.page_count;
    /* Wait while others run and free their pages; alone, everything can be evicted. */
    bool room =
        eng__make_room(engine, want) || (engine->active_count == 0 && !eng__tier_wait(engine) &&
                                         eng__force_room(engine, tail != 0));
    if (!room || (tail != 0 && !eng__own_last_page(engine, seq, tail))) {
        eng__drop_pages(engine, seq);
        return false;
    }
    if (!seq->started && seq->run < count)
        seq->usage.evicted_tokens =
            eng_past_gone(&engine->past, seq->request.space, tokens, count, seq->run);
    return true;
}

static void tell_start(eng_engine *engine, eng_sequence *seq)
{
    uint64_t now = base_now_ns();
    seq->started = true;
    seq->admitted_ns = now;
    seq->usage.prompt_tokens = seq->request.token_count;
    seq->usage.cached_tokens = seq->run;
    if (seq->run > seq->restored_from)
        seq->usage.restored_tokens =
            (uint32_t)base_min(seq->run, seq->restored_to) - seq->restored_from;
    seq->usage.queue_ns = now - seq->submitted_ns;
    ENG_COUNT(engine, prompt_tokens, seq->request.token_count);
    ENG_COUNT(engine, cached_tokens, seq->run);
    ENG_COUNT(engine, restored_tokens, seq->usage.restored_tokens);
    emit(engine, seq, ENG_EVENT_STARTED);
}

/* Whether the request that it follows has yet to run its prompt; one that is not there is over. */
static bool must_wait(const eng_engine *engine, const eng_sequence *seq)
{
    uint64_t id = seq->request.follows;
    if (id == 0)
        return false;
    for (uint32_t i = 0; i < engine->active_count; i++)
        if (engine->active[i]->request.id == id)
            return engine->active[i]->first_ns == 0;
    for (const eng_sequence *other = engine->queue_head; other != seq; other = other->next)
        if (other->request.id == id)
            return other->first_ns == 0;
    return false;
}

/* Takes it out of the queue; `runs`: to run. */
static void unqueue(eng_engine *engine, eng_sequence *seq, bool runs)
{
    eng_sequence **link = &engine->queue_head, *before = NULL;
    while (*link != seq) {
        before = *link;
        link = &before->next;
    }
    *link = seq->next;
    if (engine->queue_tail == seq)
        engine->queue_tail = before;
    engine->waiting--;
    engine->moved = true;
    pthread_mutex_lock(&engine->lock);
    if (runs) {
        eng_admission_runs(engine->admission, &seq->waiter, base_now_ns() - seq->submitted_ns);
        seq->charged_ns += seq->waiter.entry.cost_ns;
    }
    eng_admission_leave(engine->admission, &seq->waiter);
    pthread_mutex_unlock(&engine->lock);
}

/* Past its deadline; or it would be, for certain, if it began now, and its client asked not to. */
static bool is_late(const eng_sequence *seq, uint64_t now)
{
    uint64_t deadline = seq->request.deadline_ns;
    double work = seq->request.deadline_binds && !seq->started ? SURE * seq->work_ns : 0;
    return deadline != 0 && (double)now + work > (double)deadline;
}

/* Those that nobody waits for any more leave the queue. */
static void drop_late(eng_engine *engine)
{
    uint64_t now = base_now_ns();
    for (eng_sequence *seq = engine->queue_head, *next; seq != NULL; seq = next) {
        next = seq->next;
        if (!seq->cancelled && !is_late(seq, now))
            continue;
        unqueue(engine, seq, false);
        note_finish(seq, seq->cancelled ? ENG_FINISH_CANCELLED : ENG_FINISH_DEADLINE);
        close_sequence(engine, seq);
    }
}

/* The next in line; those whose pages are on their way back from disk, or are made by the request
 * that they follow, let others pass. NULL: nobody may run now. */
static eng_sequence *next_in_line(eng_engine *engine)
{
    if (engine->queue_head == NULL || engine->crowded ||
        engine->active_count + engine->tier.waiting >= engine->options.sequences_max)
        return NULL;
    for (eng_sequence *seq = engine->queue_head; seq != NULL; seq = seq->next)
        seq->waiter.entry.ready = seq->fetch == NULL && !must_wait(engine, seq);
    pthread_mutex_lock(&engine->lock);
    eng_waiter *waiter = eng_admission_pick(engine->admission);
    pthread_mutex_unlock(&engine->lock);
    return waiter != NULL ? (eng_sequence *)((char *)waiter - offsetof(eng_sequence, waiter))
                          : NULL;
}

static void admit(eng_engine *engine)
{
    eng_sequence *seq;
    if (engine->active_count == 0)
        engine->crowded = false;
    engine->page_bound = engine->crowded;
    drop_late(engine);
    while ((seq = next_in_line(engine)) != NULL) {
        if (!take_pages(engine, seq)) {
            if (seq->fetch != NULL)
                continue;
            engine->page_bound = true;
            return;
        }
        unqueue(engine, seq, true);
        if (!seq->started)
            tell_start(engine, seq);
        eng__ahead_adopt(engine, seq);
        engine->active[engine->active_count++] = seq;
        if (seq->closing && seq->run == eng__known(seq))
            note_finish(seq, ENG_FINISH_STOP);
        force_call(engine, seq);
        force_grammar(engine, seq);
        deliver(engine, seq);
    }
}

/* The step's rows up to position `run` count. */
static void raise_run(eng_engine *engine, eng_sequence *seq, uint32_t run)
{
    if (engine->keeps)
        eng__keep_rows(engine, seq, run - seq->run);
    eng__raise_filled(engine, seq, run);
}

/* Samples the picked rows of one sequence in order, as if tokens came one by one. */
static void sample_sequence(eng_engine *engine, eng_sequence *seq, uint32_t first_pick,
                            uint32_t picks, uint32_t run_before)
{
    uint32_t accepted = 0, judged = 0;
    for (uint32_t j = 0; j < picks; j++) {
        eng_sampler_input input = {
            .logits = engine->logits + (size_t)(first_pick + j) * engine->config->vocab,
            .vocab = engine->info.vocab,
            .sampling = &seq->request.sampling,
            .counts = &seq->counts,
            .end_tokens = engine->end_tokens,
            .end_token_count = engine->end_token_count,
            .ban = seq->request.tool_choice == ENG_TOOL_NONE ? eng_codec_call_token(engine->codec)
                                                             : -1,
            .mask = seq->constrain != NULL ? eng_constrain_mask(seq->constrain) : NULL,
            .output_index = seq->output_count,
        };
        eng_logprob *logprob = seq->logprobs != NULL ? &seq->logprobs[seq->output_count] : NULL;
        uint64_t begun = base_now_ns();
        int32_t token = engine->options.null ? eng__null_token(engine, seq)
                                             : eng_sample(&input, logprob, engine->scratch);
        if (engine->options.null && logprob != NULL)
            *logprob = (eng_logprob){.token = token};
        ENG_COUNT(engine, sample_ns, base_now_ns() - begun);
        uint32_t before = seq->output_count;
        bool on = take_token(engine, seq, token);
        /* A forced call begins behind this token: the drafts behind it are void. */
        bool forced = seq->output_count != before + 1;
        if (j + 1 == picks)
            break;
        judged++;
        if (token != seq->draft[j])
            break;
        accepted++;
        if (!on || forced)
            break;
    }
    if (picks > 1)
        eng__judge(engine, seq, picks - 1, judged, accepted);
    /* Rows up to the last accepted one count; those behind it hold rejected drafts. */
    raise_run(engine, seq, run_before + accepted + 1);
    seq->usage.steps++;
}

/* Whether the row's logits give the logprob of the prompt's next token. */
static bool is_scored(const eng_sequence *seq, uint32_t position)
{
    return seq->request.prompt_logprobs && position >= seq->scored &&
           position + 1 < seq->request.token_count;
}

/* Tells the prompt's logprobs that its rows [run, run + rows) of this step give; returns how many.
 * Nothing of the request's sampling bends them. */
static uint32_t score_prompt(eng_engine *engine, eng_sequence *seq, uint32_t first_pick,
                             uint32_t rows)
{
    uint32_t count = 0;
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t position = seq->run + r;
        if (!is_scored(seq, position))
            continue;
        eng_sample_logprob(&engine->scores[count],
                           engine->logits + (size_t)(first_pick + count) * engine->config->vocab,
                           engine->info.vocab, token_at(seq, position + 1),
                           seq->request.sampling.top_logprobs);
        count++;
    }
    seq->scored += count;
    engine->score_count = count;
    if (count > 0)
        emit(engine, seq, ENG_EVENT_STEP);
    return count;
}

typedef enum secured { SECURED, NOT_NOW, PREEMPTED } secured;

/* One order among all that run, so that the first of them always gets on. */
static bool runs_before(const eng_sequence *a, const eng_sequence *b)
{
    uint64_t x = a->waiter.entry.rank, y = b->waiter.entry.rank;
    return x < y || (x == y && a->number < b->number);
}

/* Grants pages to the planned rows; a sequence that gets none waits for those of the disk tier, is
 * preempted, or makes the last in rank of the others go. */
static secured secure_pages(eng_engine *engine, uint32_t at)
{
    eng_sequence *seq = engine->active[at];
    uint32_t end = seq->run + engine->plan[at].rows;
    while (!eng__grow_pages(engine, seq, end)) {
        if (eng__tier_wait(engine))
            return NOT_NOW;
        uint32_t victim = UINT32_MAX;
        for (uint32_t i = 0; i < engine->active_count; i++)
            if (i != at &&
                (victim == UINT32_MAX || runs_before(engine->active[victim], engine->active[i])))
                victim = i;
        if (victim == UINT32_MAX) {
            if (eng__force_room(engine, 1))
                continue;
            base_fail(&seq->err, BASE_NOMEM, "page memory is too small for %u tokens",
                      eng__known(seq));
            note_finish(seq, ENG_FINISH_ERROR);
            engine->moved = true;
            return PREEMPTED;
        }
        if (runs_before(engine->active[victim], seq))
            victim = at;
        preempt(engine, victim);
        return PREEMPTED;
    }
    return SECURED;
}

static void reap(eng_engine *engine)
{
    uint64_t now = base_now_ns();
    for (uint32_t i = engine->active_count; i-- > 0;) {
        eng_sequence *seq = engine->active[i];
        if (seq->cancelled)
            note_finish(seq, ENG_FINISH_CANCELLED);
        else if (seq->request.deadline_ns != 0 && now > seq->request.deadline_ns)
            note_finish(seq, ENG_FINISH_DEADLINE);
        if (seq->finished)
            retire(engine, i);
    }
}

/* Prefill rows beside others' next tokens: what fits the time that those may wait for theirs. */
static uint32_t chunk_of(const eng_engine *engine, uint32_t decoding, uint32_t context)
{
    const eng_options *options = &engine->options;
    double ns = options->step_ms_target * 1e6;
    double plain = eng_forecast_step(engine->forecast, decoding, 0, context) *
                   (1 + options->step_stretch_percent / 100.0);
    if (options->step_stretch_percent > 0 && plain > 0)
        ns = ns > 0 ? fmin(ns, plain) : plain;
    if (ns <= 0 || decoding == 0)
        return options->prefill_chunk;
    uint32_t rows =
        eng_forecast_rows(engine->forecast, decoding, ns, context, options->prefill_chunk);
    return (uint32_t)base_min(options->prefill_chunk, base_max(rows, CHUNK_MIN));
}

static uint32_t furthest(const eng_engine *engine)
{
    uint32_t context = 0;
    for (uint32_t i = 0; i < engine->active_count; i++)
        context = (uint32_t)base_max(context, engine->active[i]->run);
    return context;
}

static uint32_t plan_rows(eng_engine *engine)
{
    uint32_t decoding = 0;
    for (uint32_t i = 0; i < engine->active_count; i++) {
        eng_sequence *seq = engine->active[i];
        engine->plan[i] = (eng_sched_seq){.need = eng__known(seq) - seq->run,
                                          .draft = seq->draft_count,
                                          .rank = seq->waiter.entry.rank,
                                          .picks_all = eng__scores(seq)};
        if (engine->plan[i].need == 1)
            decoding++;
    }
    uint32_t chunk = chunk_of(engine, decoding, furthest(engine));
    if (decoding > 0)
        atomic_store_explicit(&engine->chunk, chunk, memory_order_relaxed);
    eng_sched_limits limits = {.rows_max = engine->options.step_rows_max,
                               .prefill_chunk = chunk,
                               .picks_max = engine->picks_max};
    return eng_sched_plan(engine->plan, engine->active_count, &limits, engine->order);
}

/* Whether the device has failed, which ends everything that runs or waits; what comes later is
 * refused (engine.c, post). */
static bool device_lost(eng_engine *engine)
{
    kn_device *device = eng_model_device(engine->model);
    base_err err = BASE_ERR_INIT;
    if (engine->options.null || device->backend->status(device, &err) == BASE_OK)
        return false;
    if (engine->lost.code == BASE_OK) {
        base_log(BASE_LOG_ERROR, "device_lost reason=\"%s\"", err.text);
        pthread_mutex_lock(&engine->lock);
        engine->lost = err;
        pthread_mutex_unlock(&engine->lock);
    }
    for (uint32_t i = 0; i < engine->active_count; i++) {
        base_fail(&engine->active[i]->err, BASE_DEVICE, "%s", err.text);
        note_finish(engine->active[i], ENG_FINISH_ERROR);
    }
    while (engine->queue_head != NULL) {
        eng_sequence *seq = engine->queue_head;
        unqueue(engine, seq, false);
        base_fail(&seq->err, BASE_DEVICE, "%s", err.text);
        note_finish(seq, ENG_FINISH_ERROR);
        close_sequence(engine, seq);
    }
    engine->kept_count = 0; /* nobody will read them */
    engine->moved = true;
    return true;
}

static void step(eng_engine *engine)
{
    uint64_t before = base_now_ns();
    engine->warm = before - engine->stepped_ns < PAUSE_NS;
    if (engine->options.draft_tokens != 0)
        eng__propose(engine);
    plan_rows(engine);
    for (uint32_t i = 0; i < engine->active_count; i++) {
        secured pages = engine->plan[i].rows > 0 ? secure_pages(engine, i) : SECURED;
        if (pages == PREEMPTED)
            return; /* the set of sequences changed: plan again */
        if (pages == NOT_NOW)
            engine->plan[i].rows = 0;
    }
    uint32_t rows = 0, picks = 0, prefilling = 0, decoding = 0, prefill_rows = 0, tokens = 0;
    bool scores = false; /* more logits than other prefills: their time says nothing about those */
    for (uint32_t i = 0; i < engine->active_count; i++) {
        eng_sequence *seq = engine->active[i];
        uint32_t n = engine->plan[i].rows, need = engine->plan[i].need;
        engine->row_pages[i] = seq->pages;
        engine->pick_start[i] = picks;
        prefilling += need > 1;
        decoding += n > 0 && need == 1;
        prefill_rows += need > 1 ? n : 0;
        scores |= n > 0 && engine->plan[i].picks_all;
        for (uint32_t r = 0; r < n; r++) {
            engine->row_token[rows + r] =
                r < need ? token_at(seq, seq->run + r) : seq->draft[r - need];
            engine->row_pos[rows + r] = (int32_t)(seq->run + r);
            engine->row_seq[rows + r] = i;
            if (is_scored(seq, seq->run + r) || (r + 1 >= need && !seq->closing))
                engine->pick[picks++] = rows + r;
        }
        rows += n;
    }
    if (rows == 0)
        return;
    kn_rows batch = {.rows = rows,
                     .token = engine->row_token,
                     .pos = engine->row_pos,
                     .seq = engine->row_seq,
                     .pages = engine->row_pages};
    const uint32_t *layers = NULL;
    uint32_t layer_count = engine->draft != NULL ? eng_draft_features(engine->draft, &layers) : 0;
    uint64_t forward = base_now_ns();
    if (!engine->options.null)
        eng_model_forward(engine->model, engine->kv, &batch, engine->pick, picks, engine->logits,
                          layers, layer_count, engine->features);
    /* One sequence's decoding rows wait until the drafter is asked. */
    engine->keeps = engine->draft != NULL && engine->active_count == 1 && engine->plan[0].need == 1;
    if (engine->draft != NULL && !engine->keeps)
        eng_draft_append(engine->draft, engine->draft_kv, &batch, engine->features);
    engine->moved = true;
    if (device_lost(engine))
        return;
    forward = base_now_ns() - forward;
    ENG_COUNT(engine, forward_ns, forward);
    if ((engine->warm || prefilling > 0) && !scores)
        eng_spec_observe_step(&engine->spec, rows, prefilling > 0, furthest(engine), forward);
    if (prefilling > 0 && !scores)
        eng__tier_observe_prefill(engine, rows, forward);
    for (uint32_t i = 0; i < engine->active_count; i++) {
        eng_sequence *seq = engine->active[i];
        uint32_t n = engine->plan[i].rows, need = engine->plan[i].need;
        if (n == 0)
            continue;
        uint32_t scored = score_prompt(engine, seq, engine->pick_start[i], n);
        if (n < need || seq->closing) {
            raise_run(engine, seq, seq->run + n);
            if (seq->closing && seq->run == eng__known(seq))
                note_finish(seq, ENG_FINISH_STOP);
            continue;
        }
        uint32_t told = seq->output_count;
        sample_sequence(engine, seq, engine->pick_start[i] + scored, n - need + 1,
                        seq->run + need - 1);
        tokens += need == 1 ? seq->output_count - told : 0;
        if (seq->first_ns == 0) {
            seq->first_ns = base_now_ns();
            seq->usage.ttft_ns = seq->first_ns - seq->submitted_ns;
            seq->usage.prefill_ns = seq->first_ns - seq->admitted_ns;
            eng__list_pages(engine, seq);
        }
        deliver(engine, seq);
    }
    uint64_t slow_ns =
        engine->options.slow_step_us * 1000ull + (uint64_t)engine->options.slow_row_ns * rows;
    if (slow_ns > 0)
        usleep((useconds_t)base_min(slow_ns / 1000, SLOW_US_MAX));
    ENG_COUNT(engine, steps, 1);
    ENG_COUNT(engine, step_rows, rows);
    engine->stepped_ns = base_now_ns();
    ENG_COUNT(engine, busy_ns, engine->stepped_ns - before);
    for (uint32_t i = 0; i < engine->active_count; i++)
        engine->active[i]->taken_ns +=
            (double)(engine->stepped_ns - before) * engine->plan[i].rows / rows;
    if ((engine->warm || prefilling > 0) && !scores) {
        engine->last.sequences = decoding;
        engine->last.prefill = prefill_rows;
        engine->last.context = furthest(engine);
        engine->last.tokens = tokens;
        engine->last.ns = engine->stepped_ns - before;
    }
    ENG_GAUGE(engine, prefilling, prefilling);
}

/* ---- the mailbox ---- */

static void mark_cancelled(eng_engine *engine, uint64_t id)
{
    for (uint32_t i = 0; i < engine->active_count; i++)
        if (engine->active[i]->request.id == id)
            engine->active[i]->cancelled = true;
    for (eng_sequence *seq = engine->queue_head; seq != NULL; seq = seq->next)
        if (seq->request.id == id)
            seq->cancelled = true; /* out of the queue before anyone is admitted */
}

static void check_all(eng_engine *engine, base_err *err)
{
    if (engine->active_count > 0 || engine->queue_head != NULL) {
        base_fail(err, BASE_CONFLICT, "%u sequences are running", engine->active_count);
        return;
    }
    uint32_t listed = kv_index_get_stats(engine->index).pages, fetched = eng__tier_pages(engine);
    uint32_t held = kv_pool_page_count(engine->pool) - kv_pool_free_count(engine->pool);
    if (!kv_pool_check(engine->pool, err) || !kv_index_check(engine->index, err) ||
        (engine->tier.store != NULL && !kv_store_check(engine->tier.store, err)))
        return;
    /* What waits to be written is listed, too, unless it was erased since; eng_check has flushed.
     */
    if (held != listed + fetched)
        base_fail(err, BASE_CONFLICT, "%u pages are held, the index lists %u, fetches %u", held,
                  listed, fetched);
}

static void obey(eng_engine *engine, eng_order *orders)
{
    for (eng_order *order = orders; order != NULL; order = order->next) {
        pthread_mutex_lock(&engine->index_lock);
        if (order->kind == ENG_ORDER_CHECK)
            check_all(engine, &order->err);
        else if (order->kind == ENG_ORDER_PIN)
            kv_index_pin(engine->index, order->space, order->tokens, order->count, order->until_ns);
        else if (order->kind == ENG_ORDER_ERASE)
            kv_index_erase(engine->index, order->space, order->tokens, order->count, order->kept);
        else
            kv_index_drop(engine->index, order->space);
        pthread_mutex_unlock(&engine->index_lock);
        if (order->kind == ENG_ORDER_ERASE)
            eng__tier_erase(engine, order->space, order->tokens, order->count, order->kept);
        else if (order->kind == ENG_ORDER_DROP)
            eng__tier_drop(engine, order->space);
    }
    if (orders == NULL)
        return;
    eng__update_gauges(engine);
    pthread_mutex_lock(&engine->lock);
    for (eng_order *order = orders, *next; order != NULL; order = next) {
        next = order->next; /* once it is done, it is its giver's again */
        order->done = true;
    }
    pthread_cond_broadcast(&engine->ordered);
    pthread_mutex_unlock(&engine->lock);
}

/* Under lock. */
static bool has_mail(const eng_engine *engine)
{
    return engine->stop || engine->woken || engine->inbox_head != NULL ||
           engine->cancels.count > 0 || engine->orders != NULL;
}

/* Under lock. */
static void wait_a_little(eng_engine *engine)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += WAIT_NS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&engine->wake, &engine->lock, &until);
}

void eng__wait(eng_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    if (!engine->woken)
        wait_a_little(engine);
    engine->woken = false;
    pthread_mutex_unlock(&engine->lock);
}

/* What each that runs still takes of the machine, for those who ask how long they would wait. */
static void foresee(eng_engine *engine)
{
    const eng_forecast *forecast = engine->forecast;
    uint32_t count = engine->active_count, context = furthest(engine);
    double token = count > 0 ? eng_forecast_decode(forecast, count, 1, context) / count : 0;
    for (uint32_t i = 0; i < count; i++) {
        const eng_sequence *seq = engine->active[i];
        uint32_t known = eng__known(seq), to_run = known - seq->run - (known > seq->run);
        uint32_t out = seq->output_count, tokens = seq->request.prefill_only ? 0 : seq->expected;
        /* One that says more than was expected will say some more. */
        tokens = (uint32_t)base_min(seq->output_max, base_max(tokens, out + tokens / 4 + 1)) - out;
        double prefill = to_run > 0 ? seq->prefill_ns * to_run / fmax(seq->uncached, to_run) : 0;
        engine->left[i] = tokens * token + prefill;
    }
}

/* Under lock. */
static void tell_admission(eng_engine *engine)
{
    if (engine->last.ns != 0) {
        eng_forecast_observe_step(engine->forecast, engine->last.sequences, engine->last.prefill,
                                  engine->last.context, engine->last.ns);
        eng_forecast_observe_tokens(engine->forecast, engine->last.sequences, engine->last.tokens);
        engine->last.ns = 0;
    }
    eng_admission_running(engine->admission, engine->left, engine->active_count,
                          engine->page_bound ? engine->active_count
                                             : engine->options.sequences_max);
}

/* Takes what came in; waits if there is nothing to do, or nothing that can be done before the disk
 * tier has moved. False when the engine is to stop. */
static bool drain(eng_engine *engine)
{
    bool busy = engine->active_count > 0 || engine->queue_head != NULL;
    if (!busy)
        eng__save_costs(engine, false);
    foresee(engine);
    pthread_mutex_lock(&engine->lock);
    tell_admission(engine);
    if (busy && !engine->moved && !has_mail(engine))
        wait_a_little(engine);
    while (!busy && !has_mail(engine))
        pthread_cond_wait(&engine->wake, &engine->lock);
    bool woken = engine->woken;
    engine->woken = engine->moved = false;
    if (engine->inbox_head != NULL) {
        if (engine->queue_tail != NULL)
            engine->queue_tail->next = engine->inbox_head;
        else
            engine->queue_head = engine->inbox_head;
        engine->queue_tail = engine->inbox_tail;
        engine->inbox_head = engine->inbox_tail = NULL;
    }
    __typeof__(engine->cancels) taken = engine->cancels;
    engine->cancels = engine->cancels_taken;
    engine->cancels_taken = taken;
    eng_order *orders = engine->orders;
    engine->orders = NULL;
    bool on = !engine->stop;
    pthread_mutex_unlock(&engine->lock);
    for (uint32_t i = 0; i < taken.count; i++)
        mark_cancelled(engine, taken.ids[i]);
    engine->cancels_taken.count = 0;
    eng__tier_poll(engine);
    if (woken)
        eng__update_gauges(engine);
    obey(engine, orders);
    ENG_GAUGE(engine, queued, engine->waiting);
    return on;
}

void eng__update_gauges(eng_engine *engine)
{
    ENG_GAUGE(engine, running, engine->active_count);
    ENG_GAUGE(engine, queued, engine->waiting);
    if (engine->active_count == 0)
        ENG_GAUGE(engine, prefilling, 0);
    ENG_GAUGE(engine, pages_free, kv_pool_free_count(engine->pool));
    kv_index_stats stats = kv_index_get_stats(engine->index);
    ENG_GAUGE(engine, index_nodes, stats.nodes);
    ENG_GAUGE(engine, index_pages, stats.pages);
}

void *eng__run(void *arg)
{
    eng_engine *engine = arg;
    base_thread_enter(BASE_THREAD_ENGINE, "engine");
    while (drain(engine)) {
        admit(engine);
        reap(engine);
        if (engine->active_count > 0)
            step(engine);
        reap(engine);
        if (engine->told_any) {
            engine->told_any = false;
            eng__update_gauges(engine);
            engine->options.sink.flush(engine->options.sink.ctx);
        }
    }
    while (engine->active_count > 0) {
        note_finish(engine->active[0], ENG_FINISH_CANCELLED);
        retire(engine, 0);
    }
    while (engine->queue_head != NULL) {
        eng_sequence *seq = engine->queue_head;
        unqueue(engine, seq, false);
        note_finish(seq, ENG_FINISH_CANCELLED);
        close_sequence(engine, seq);
    }
    eng__tier_end_fetches(engine);
    eng__save_costs(engine, true);
    engine->options.sink.flush(engine->options.sink.ctx);
    pthread_mutex_lock(&engine->lock);
    engine->stopped = true;
    eng_order *orders = engine->orders;
    engine->orders = NULL;
    pthread_mutex_unlock(&engine->lock);
    obey(engine, orders);
    return NULL;
}
