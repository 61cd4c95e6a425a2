/* What the decoding sequences of a step draft, and what is learned from how it went. Thread:
 * engine.
 *
 * Copies of earlier text and predictions cost nothing to make, so they are looked up first; the
 * draft pass is run if its expected gain over them pays for it. Each sequence then offers the
 * better of the two, and the step verifies as much of all offers as makes the most tokens a second.
 * With a fixed length (measurements) only the drafter is asked, and so much of its block is
 * verified. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/num.h"
#include "engine/engine_internal.h"
#include "kernels/backend.h"

#define SAVE_EVERY_NS 60000000000u

static uint32_t room_of(const eng_sequence *seq)
{
    return seq->output_max - seq->output_count - 1;
}

/* Those that wait for their next token and have room for more than one, in `order`. Returns how
 * many. */
static uint32_t gather(eng_engine *engine, uint32_t *context)
{
    uint32_t count = 0;
    *context = 0;
    for (uint32_t i = 0; i < engine->active_count; i++) {
        eng_sequence *seq = engine->active[i];
        seq->draft_count = 0;
        seq->offer.count = 0;
        if (eng__known(seq) - seq->run != 1 || seq->output_count == 0 || seq->closing ||
            seq->output_max - seq->output_count < 2)
            continue;
        engine->order[count++] = i;
        *context = (uint32_t)base_max(*context, seq->run);
    }
    return count;
}

static void follow_script(eng_engine *engine, uint32_t count)
{
    const eng_options *options = &engine->options;
    uint32_t most =
        options->draft_tokens > 0 ? (uint32_t)options->draft_tokens : ENG_SPEC_BLOCK_MAX;
    for (uint32_t i = 0; i < count; i++) {
        eng_sequence *seq = engine->active[engine->order[i]];
        seq->draft_count = (uint32_t)base_min(base_min(most, ENG_SPEC_BLOCK_MAX), room_of(seq));
        for (uint32_t j = 0; j < seq->draft_count; j++)
            seq->draft[j] =
                options->draft_script[(seq->output_count + j) % options->draft_script_count];
    }
}

/* ---- the drafter's context ---- */

static float *kept_features(const eng_engine *engine, uint32_t row, size_t *width)
{
    const uint32_t *layers;
    *width = (size_t)eng_draft_features(engine->draft, &layers) * engine->config->hidden;
    return engine->features + (engine->options.step_rows_max + row) * *width;
}

void eng__settle_rows(eng_engine *engine)
{
    uint32_t most = engine->options.step_rows_max;
    size_t width;
    for (uint32_t at = 0; at < engine->kept_count; at += most) {
        const uint32_t *pages = engine->kept_seq->pages;
        kn_rows rows = {.rows = (uint32_t)base_min(engine->kept_count - at, most),
                        .token = engine->kept_token + at,
                        .pos = engine->kept_pos + at,
                        .seq = engine->kept_zeros,
                        .pages = &pages};
        eng_draft_append(engine->draft, engine->draft_kv, &rows, kept_features(engine, at, &width));
    }
    engine->kept_count = 0;
}

void eng__keep_rows(eng_engine *engine, eng_sequence *seq, uint32_t count)
{
    kn_device *device = eng_model_device(engine->model);
    size_t width;
    CHECK(count <= ENG_KEPT_MAX);
    if (engine->kept_seq != seq || engine->kept_count + count > ENG_KEPT_MAX)
        eng__settle_rows(engine);
    float *to = kept_features(engine, engine->kept_count, &width);
    size_t row = width * sizeof *to;
    device->backend->copy(device, to, row, engine->features, row, row, count);
    for (uint32_t r = 0; r < count; r++) {
        engine->kept_token[engine->kept_count + r] = engine->row_token[r];
        engine->kept_pos[engine->kept_count + r] = (int32_t)(seq->run + r);
    }
    engine->kept_seq = seq;
    engine->kept_count += count;
}

/* ---- drafts ---- */

/* The draft pass for all of them: tokens and confidences into the step's arrays. */
static void run_drafter(eng_engine *engine, uint32_t count, uint32_t context)
{
    for (uint32_t i = 0; i < count; i++) {
        eng_sequence *seq = engine->active[engine->order[i]];
        engine->draft_inputs[i] = (eng_draft_input){
            .anchor = seq->output[seq->output_count - 1],
            .anchor_pos = seq->run,
            .context_from = seq->draft_from,
            .pages = seq->pages,
            .sampling = &seq->request.sampling,
            .output_index = seq->output_count,
        };
        if (seq->constrain != NULL) {
            eng_constrain_draft(seq->constrain);
            engine->draft_inputs[i].mask = eng_constrain_draft_mask;
            engine->draft_inputs[i].mask_ctx = seq->constrain;
            engine->draft_inputs[i].mask_vocab = engine->info.vocab;
        }
    }
    /* What one round leaves is part of what a round costs; what rounds without drafts have left is
     * not. */
    if (engine->kept_count > 1 + ENG_SPEC_BLOCK_MAX)
        eng__settle_rows(engine);
    uint64_t before = base_now_ns();
    eng__settle_rows(engine);
    eng_draft_propose(engine->draft, engine->draft_kv, engine->draft_inputs, count,
                      eng_draft_block(engine->draft), engine->draft_tokens,
                      engine->draft_confidence);
    uint64_t taken = base_now_ns() - before;
    if (engine->warm)
        eng_spec_observe_draft(&engine->spec, count, context, taken);
    ENG_COUNT(engine, draft_ns, taken);
}

/* Drafts behind one that ends the turn could never be kept. */
static uint32_t up_to_end(const eng_engine *engine, const eng_sequence *seq, const int32_t *tokens,
                          uint32_t count)
{
    for (uint32_t j = 0; j < count; j++)
        if (eng__ends_turn(engine, seq, tokens[j]))
            return j + 1;
    return count;
}

static bool is_sampled(const eng_sequence *seq)
{
    return seq->request.sampling.temperature > 0;
}

static void offer_copy(eng_engine *engine, eng_sequence *seq, eng_spec_offer *offer)
{
    eng_copy_draft draft = {0};
    if (seq->copy != NULL)
        draft = eng_copy_propose(seq->copy, seq->output_count, seq->draft,
                                 (uint32_t)base_min(ENG_SPEC_BLOCK_MAX, room_of(seq)));
    offer->kind = draft.predicted ? ENG_SPEC_PREDICTION : ENG_SPEC_COPY;
    offer->sampled = is_sampled(seq);
    offer->count = up_to_end(engine, seq, seq->draft, draft.count);
    for (uint32_t j = 0; j < offer->count; j++)
        offer->bin[j] = (uint8_t)eng_spec_bin_match(draft.match + j);
    eng_spec_fill(&engine->spec, offer);
}

static void offer_block(eng_engine *engine, eng_sequence *seq, eng_spec_offer *offer, uint32_t i)
{
    uint32_t block = eng_draft_block(engine->draft);
    offer->kind = ENG_SPEC_BLOCK;
    offer->sampled = is_sampled(seq);
    offer->count = up_to_end(engine, seq, engine->draft_tokens + (size_t)i * block,
                             (uint32_t)base_min(block, room_of(seq)));
    for (uint32_t j = 0; j < offer->count; j++)
        offer->bin[j] =
            (uint8_t)eng_spec_bin_confidence(engine->draft_confidence[(size_t)i * block + j]);
    eng_spec_fill(&engine->spec, offer);
}

static void take_block(eng_engine *engine, eng_sequence *seq, uint32_t i, uint32_t count)
{
    memcpy(seq->draft, engine->draft_tokens + (size_t)i * eng_draft_block(engine->draft),
           count * sizeof *seq->draft);
}

/* Each offers its block where that promises more than its copy. The pass has been run, but the next
 * round will pay for one again, so a round is as long as with it. */
static void offer_blocks(eng_engine *engine, uint32_t count, uint32_t context, double draft_ns,
                         uint32_t rows_max)
{
    for (uint32_t i = 0; i < count; i++) {
        eng_sequence *seq = engine->active[engine->order[i]];
        eng_spec_offer block = {0}, *copy = &engine->offers[i];
        offer_block(engine, seq, &block, i);
        double with_block = eng_spec_choose(&engine->spec, &block, 1, context, draft_ns, rows_max);
        eng_spec_observe_offer(&engine->spec, &seq->history, &block);
        if (copy->count > 0 &&
            eng_spec_choose(&engine->spec, copy, 1, context, draft_ns, rows_max) > with_block)
            continue;
        *copy = block;
        take_block(engine, seq, i, block.count);
    }
}

/* The drafts' first tokens that a grammar admits; the rest would be verified for nothing. */
static uint32_t admitted(eng_sequence *seq, uint32_t count)
{
    int32_t previous = -1;
    eng_constrain_draft(seq->constrain);
    for (uint32_t j = 0; j < count; j++) {
        const uint32_t *mask = eng_constrain_draft_mask(seq->constrain, previous);
        uint32_t token = (uint32_t)seq->draft[j];
        if ((mask[token / 32] >> token % 32 & 1) == 0)
            return j;
        previous = seq->draft[j];
    }
    return count;
}

static void propose_fixed(eng_engine *engine, uint32_t count, uint32_t context)
{
    if (engine->draft == NULL)
        return;
    run_drafter(engine, count, context);
    for (uint32_t i = 0; i < count; i++) {
        eng_sequence *seq = engine->active[engine->order[i]];
        offer_block(engine, seq, &seq->offer, i);
        seq->draft_count = (uint32_t)base_min(engine->spec.fixed, seq->offer.count);
        take_block(engine, seq, i, seq->draft_count);
    }
}

static void propose_adaptive(eng_engine *engine, uint32_t count, uint32_t context)
{
    eng_spec *spec = &engine->spec;
    uint32_t rows_max = engine->picks_max - (uint32_t)base_min(engine->picks_max, count);
    for (uint32_t i = 0; i < count; i++) {
        eng_sequence *seq = engine->active[engine->order[i]];
        offer_copy(engine, seq, &engine->offers[i]);
        engine->histories[i] =
            seq->history.tokens > 0 ? &seq->history : &spec->learned.history[is_sampled(seq)];
    }
    double rate = eng_spec_choose(spec, engine->offers, count, context, 0, rows_max);
    if (engine->draft != NULL &&
        eng_spec_worthwhile(spec, engine->histories, count, context, rate)) {
        run_drafter(engine, count, context);
        double draft_ns = eng_cost_of(&spec->learned.draft, count, context);
        offer_blocks(engine, count, context, draft_ns, rows_max);
        eng_spec_choose(spec, engine->offers, count, context, draft_ns, rows_max);
    }
    for (uint32_t i = 0; i < count; i++) {
        eng_sequence *seq = engine->active[engine->order[i]];
        seq->offer = engine->offers[i];
        seq->draft_count = seq->offer.length;
        if (seq->constrain != NULL && seq->draft_count > 0 && seq->offer.kind != ENG_SPEC_BLOCK)
            seq->draft_count = admitted(seq, seq->draft_count);
    }
}

void eng__propose(eng_engine *engine)
{
    uint32_t context, count = gather(engine, &context);
    if (count == 0)
        return;
    if (engine->options.draft_script != NULL)
        follow_script(engine, count);
    else if (engine->spec.fixed > 0)
        propose_fixed(engine, count, context);
    else
        propose_adaptive(engine, count, context);
}

void eng__judge(eng_engine *engine, eng_sequence *seq, uint32_t verified, uint32_t judged,
                uint32_t accepted)
{
    eng_usage *usage = &seq->usage;
    usage->drafted += verified;
    usage->accepted += accepted;
    ENG_COUNT(engine, drafted, verified);
    ENG_COUNT(engine, accepted, accepted);
    if (seq->offer.count == 0) /* a script's */
        return;
    eng_spec_observe_round(&engine->spec, &seq->offer, judged, accepted);
    if (seq->offer.kind == ENG_SPEC_COPY) {
        ENG_COUNT(engine, copied, verified);
        ENG_COUNT(engine, copied_accepted, accepted);
    } else if (seq->offer.kind == ENG_SPEC_PREDICTION) {
        usage->predicted_accepted += accepted;
        usage->predicted_rejected += verified - accepted;
        ENG_COUNT(engine, predicted, verified);
        ENG_COUNT(engine, predicted_accepted, accepted);
    }
}

/* ---- the file ---- */

/* What the times depend on: the processor and its threads, the weights, and this program (another
 * build has other kernels). */
static void costs_key(const eng_engine *engine, char *key, size_t size)
{
    char line[256], processor[128] = "";
    struct stat binary = {0};
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f != NULL && processor[0] == '\0' && fgets(line, sizeof line, f) != NULL)
        sscanf(line, "model name : %127[^\n]", processor);
    if (f != NULL)
        fclose(f);
    if (stat("/proc/self/exe", &binary) != 0)
        binary = (struct stat){0};
    snprintf(key, size, "%s|%s|threads=%u|%s|%s|%s|%lld.%lld.%ld", engine->info.backend, processor,
             engine->options.threads, engine->info.fingerprint,
             engine->draft != NULL ? eng_draft_fingerprint(engine->draft) : "", engine->info.kv,
             (long long)binary.st_size, (long long)binary.st_mtim.tv_sec, binary.st_mtim.tv_nsec);
}

void eng__load_costs(eng_engine *engine)
{
    char key[512];
    base_err err = BASE_ERR_INIT;
    if (engine->options.costs == NULL)
        return;
    costs_key(engine, key, sizeof key);
    base_code code = eng_spec_load(&engine->spec.learned, engine->options.costs, key, &err);
    if (code != BASE_OK && code != BASE_NOT_FOUND)
        base_log(code == BASE_CONFLICT ? BASE_LOG_INFO : BASE_LOG_WARN,
                 "costs_refused reason=\"%s\"", err.text);
}

void eng__save_costs(eng_engine *engine, bool last)
{
    char key[512];
    base_err err = BASE_ERR_INIT;
    uint64_t steps = atomic_load_explicit(&engine->stats.steps, memory_order_relaxed);
    if (engine->options.costs == NULL || steps == engine->costs_steps)
        return;
    uint64_t now = base_now_ns();
    if (!last && now - engine->costs_ns < SAVE_EVERY_NS)
        return;
    engine->costs_steps = steps;
    engine->costs_ns = now;
    costs_key(engine, key, sizeof key);
    if (eng_spec_save(&engine->spec.learned, engine->options.costs, key, &err) != BASE_OK)
        base_log(BASE_LOG_WARN, "costs_not_kept reason=\"%s\"", err.text);
}
