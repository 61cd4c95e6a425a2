/* What others see of a turn: its entry in gw_live, made from the turn's own state. */
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/utf8.h"
#include "gateway/otlp.h"
#include "gateway/turn.h"

static void cut(char *out, size_t size, const char *text, size_t length)
{
    if (length >= size)
        length = base_utf8_complete(text, size - 1);
    if (length)
        memcpy(out, text, length);
    out[length] = '\0';
}

static gw_phase phase_of(const gw_turn *first)
{
    bool all_done = true, any_first = false;
    for (uint32_t i = 0; i < first->choice_count; i++) {
        all_done &= first->choices[i]->done_seen;
        any_first |= first->choices[i]->first_ns != 0;
    }
    if (first->state == GW_TURN_PREPARING)
        return GW_PHASE_PREPARE;
    if (first->state == GW_TURN_OVER)
        return GW_PHASE_DONE;
    return all_done            ? GW_PHASE_COMMIT
           : any_first         ? GW_PHASE_DECODE
           : first->started_ms ? GW_PHASE_PREFILL
                               : GW_PHASE_QUEUE;
}

/* The worker's fields are read only once it is done with them. */
static void describe(const gw_turn *first, gw_live_request *out)
{
    uint64_t now_ns = base_now_ns();
    int64_t now_ms = base_wall_ms();
    gw_phase phase = phase_of(first);
    *out = (gw_live_request){.dialect = first->dialect->name,
                             .turn = first->id,
                             .phase = phase,
                             .background = first->background,
                             .choices = first->choice_count,
                             .received_ms = first->created_ms,
                             .queued_ms = first->queued_ms,
                             .started_ms = first->started_ms,
                             .finish = first->done_seen ? (int)first->finish : -1,
                             .status = first->status};
    memcpy(out->id.text, first->request_id, sizeof out->id.text);
    memcpy(out->tenant, first->identity.name, sizeof out->tenant);
    if (first->label)
        cut(out->label, sizeof out->label, first->label, strlen(first->label));
    if (phase == GW_PHASE_DONE)
        out->ended_ms = now_ms;
    if (phase == GW_PHASE_PREPARE)
        return;
    out->session = first->session;
    out->stream = first->stream;
    if (first->model)
        cut(out->model, sizeof out->model, first->model, strlen(first->model));
    uint64_t first_ns = 0;
    for (uint32_t i = 0; i < first->choice_count; i++) {
        const gw_turn *turn = first->choices[i];
        out->passes += turn->step_count;
        if (turn->first_ns && (!first_ns || turn->first_ns < first_ns))
            first_ns = turn->first_ns;
        if (!out->tool[0] && turn->done_seen && turn->call_count)
            cut(out->tool, sizeof out->tool,
                turn->calls[0].name.data ? turn->calls[0].name.data : "",
                turn->calls[0].name.length);
    }
    eng_usage usage = gw_turn_usage(first);
    out->prompt_tokens = first->prompt.token_count;
    out->matched = first->started_ms != 0;
    if (out->matched) {
        out->prompt_tokens = usage.prompt_tokens;
        out->cached_tokens = usage.cached_tokens;
        out->restored_tokens = usage.restored_tokens;
    }
    out->output_tokens = usage.output_tokens;
    if (first_ns)
        out->first_ms = now_ms - (int64_t)((now_ns - first_ns) / 1000000);
}

void gw_turn_show_begin(gw_turn *turn)
{
    gw_live_request now;
    if (turn->dialect->dry || !turn->app->live)
        return;
    describe(turn, &now);
    gw_live_enter(turn->app->live, &turn->live, &now);
}

void gw_turn_show(gw_turn *turn)
{
    gw_live_request now;
    gw_turn *first = turn->first;
    if (!first->live.listed)
        return;
    describe(first, &now);
    gw_live_change(first->app->live, &first->live, &now);
}

void gw_turn_show_end(gw_turn *turn)
{
    gw_live_request now;
    if (!turn->live.listed)
        return;
    describe(turn, &now);
    gw_live_leave(turn->app->live, &turn->live, &now);
    gw_otlp_request(turn->app->otlp, &now, &turn->trace);
}
