/* call: one call of an answer as it grows, and custom tools, whose calls are one text.
 *
 * In the prompt a custom tool is a function with one parameter, `input`, a string; so its calls
 * read like all others and any model that calls functions can make them. What the model made,
 * {"input":"…"}, is taken apart again as it comes, so that the client gets the bare text; arguments
 * of another form, which no grammar held to this one, reach it as they stand. Thread: one at a
 * time. */
#pragma once
#include <jansson.h>

#include "gateway/ledger.h"

typedef struct gw_turn_call {
    gw_id id; /* minted, 128 random bits: names the run in the ledger */
    base_buf name, arguments;
    bool whole;
    bool custom; /* the client sees `input` instead of the arguments */
    /* ---- of a custom one ---- */
    base_buf input;
    size_t taken; /* bytes of the arguments that were taken apart */
    enum { GW_INPUT_HEAD, GW_INPUT_TEXT, GW_INPUT_OVER, GW_INPUT_RAW } state;
} gw_turn_call;

/* The name is whole. `tools`: the client's list, where type "custom" makes a tool a custom one;
 * NULL: there are none. */
void gw_call_named(gw_turn_call *call, const json_t *tools);
/* More of the arguments; returns what is new of what the client sees, borrowed until the next one.
 * Without memory a buffer has failed. */
eng_text gw_call_add(gw_turn_call *call, const char *text, size_t length);
/* What the client sees. */
const base_buf *gw_call_shown(const gw_turn_call *call);
bool gw_call_failed(const gw_turn_call *call);
void gw_call_deinit(gw_turn_call *call);

/* The function object that a custom tool is in the prompt, appended. Description NULL data: none;
 * `syntax` and `grammar` say what is not enforced and so is told to the model; NULL: nothing. */
void gw_put_custom(base_buf *out, eng_text name, eng_text description, const char *syntax,
                   eng_text grammar);
