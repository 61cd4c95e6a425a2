/* The choices of a request: turns that share the first one's plan, and what they come to together.
 */
#include "gateway/turn_internal.h"

#include <string.h>

#include "engine/base/num.h"

/* Another answer to the request: its plan, by reference, and a turn of its own. */
static base_code add_choice(gw_turn *first, uint32_t index, base_err *err)
{
    gw_turn *turn = base_arena_calloc(first->arena, 1, sizeof(*turn));
    if (!turn)
        return base_fail(err, BASE_NOMEM, "no memory for a choice");
    *turn = (gw_turn){
        .port = {.event = first->port.event},
        .app = first->app,
        .dialect = first->dialect,
        .first = first,
        .leader = first,
        .choice = index,
        .loop = first->loop,
        .identity = first->identity,
        .state = GW_TURN_QUEUED,
        .path = first->path,
        .id = gw_id_mint("turn_"),
        .session = first->session,
        .response = first->response,
        .received_ns = first->received_ns,
        .created_ms = first->created_ms,
        .arena = first->arena,
        .json = first->json,
        .stream = first->stream,
        .exact_steps = first->exact_steps,
        .model = first->model,
        .label = first->label,
        .metadata = first->metadata,
        .cache_salt = first->cache_salt,
        .retention = first->retention,
        .custom_tools = first->custom_tools,
        .shows_stop = first->shows_stop,
        .items = first->items,
        .chat = first->chat,
        .request = first->request,
        .root = first->root,
        .match = first->match,
        .prompt = first->prompt,
        .expected_tokens = first->expected_tokens,
        .continues = first->continues,
        .cache = first->cache,
        .stop_index = -1,
        .committed.run = first->committed.run,
    };
    memcpy(turn->request_id, first->request_id, sizeof(turn->request_id));
    turn->request.id = gw_request_id();
    first->choices[index] = turn;
    base_code code = gw_port_join(&turn->port, &first->port, err);
    turn->port_open = !code;
    if (!code)
        code = turn->dialect->choose(turn, err);
    if (!code && turn->leader == turn)
        gw_turn__expect(turn); /* it has a prompt of its own */
    return code;
}

base_code gw_turn__make_choices(gw_turn *turn, base_err *err)
{
    uint32_t count = turn->answer_count;
    if (count == 1)
        return BASE_OK;
    gw_turn **choices = base_arena_calloc(turn->arena, count, sizeof(*choices));
    if (!choices)
        return base_fail(err, BASE_NOMEM, "no memory for choices");
    choices[0] = turn;
    turn->choices = choices;
    base_code code = BASE_OK;
    for (uint32_t i = 1; i < count && !code; i++) {
        code = add_choice(turn, i, err);
        turn->choice_count += choices[i] != NULL;
    }
    return code;
}

/* ---- all of them together ---- */

bool gw_turn_all_told(const gw_turn *turn)
{
    return turn->first->told_count == turn->first->choice_count;
}

eng_usage gw_turn_usage(const gw_turn *turn)
{
    const gw_turn *first = turn->first;
    eng_usage sum = first->usage;
    for (uint32_t i = 1; i < first->choice_count; i++) {
        const eng_usage *one = &first->choices[i]->usage;
        if (first->choices[i]->leader == first->choices[i]) {
            sum.prompt_tokens += one->prompt_tokens;
            sum.cached_tokens += one->cached_tokens;
            sum.restored_tokens += one->restored_tokens;
            sum.evicted_tokens += one->evicted_tokens;
        }
        sum.output_tokens += one->output_tokens;
        sum.reasoning_tokens += one->reasoning_tokens;
        sum.drafted += one->drafted;
        sum.accepted += one->accepted;
        sum.predicted_accepted += one->predicted_accepted;
        sum.predicted_rejected += one->predicted_rejected;
        sum.steps += one->steps;
        sum.decode_ns = base_max(sum.decode_ns, one->decode_ns);
    }
    return sum;
}

void gw_turn_extension(const gw_turn *turn, base_buf *out)
{
    const gw_turn *first = turn->first;
    const eng_usage all = gw_turn_usage(first), *usage = &all;
    const gw_cache_note *cache = &first->cache;
    bool stored = true;
    for (uint32_t i = 0; i < first->choice_count; i++)
        stored &= first->choices[i]->stored;
    const char *reason = gw_miss_name(cache->miss);
    base_buf_printf(out,
                    "\"whimbrel\":{\"session\":\"%s\",\"turn\":\"%s\",\"cached_tokens\":%u,"
                    "\"restored_tokens\":%u,",
                    first->session.text, first->id.text, usage->cached_tokens,
                    usage->restored_tokens);
    if (first->choice_count > 1) {
        base_buf_puts(out, "\"choices\":[");
        for (uint32_t i = 0; i < first->choice_count; i++)
            base_buf_printf(out, "%s{\"turn\":\"%s\",\"cached_tokens\":%u}", i ? "," : "",
                            first->choices[i]->id.text, first->choices[i]->usage.cached_tokens);
        base_buf_puts(out, "],");
    }
    base_buf_printf(out, "\"cache\":{\"hit\":%u,\"lost\":%u", usage->cached_tokens, cache->lost);
    if (reason)
        base_buf_printf(out, ",\"reason\":\"%s\"", reason);
    if (cache->diff_item >= 0)
        base_buf_printf(out, ",\"first_diff\":{\"item\":%d,\"token\":%u}", (int)cache->diff_item,
                        cache->diff_token);
    base_buf_printf(out,
                    "},\"queue_ms\":%.3f,\"forecast_ms\":%.3f,\"prefill_ms\":%.3f,\"ttft_ms\":%.3f,"
                    "\"decode_ms\":%.3f,",
                    (double)usage->queue_ns * 1e-6, (double)usage->forecast_ns * 1e-6,
                    (double)usage->prefill_ns * 1e-6, (double)usage->ttft_ns * 1e-6,
                    (double)usage->decode_ns * 1e-6);
    base_buf_printf(out,
                    "\"drafted\":%u,\"accepted\":%u,\"stored\":%s,\"backend\":", usage->drafted,
                    usage->accepted, stored ? "true" : "false");
    const char *backend = eng_get_info(turn->app->engine)->backend;
    base_buf_json_string(out, backend, strlen(backend));
    base_buf_puts(out, "}");
}
