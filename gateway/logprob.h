/* logprob: which token stands for which text.
 *
 * The list of the wire has one entry for every token of the visible text, so that its bytes joined
 * are the text. Tokens that are marks (end of thinking, end of turn, a call's block) or reasoning
 * have no place there. The engine tells tokens and texts apart, so they are put together here by
 * their bytes: a text takes the tokens at the front that spell it, and what it passes over were
 * marks. Thread: the turn's loop. */
#pragma once
#include "gateway/turn.h"

/* Lengths of a waiting token's bytes and of its entry's JSON in the two buffers. */
typedef struct gw_waiting {
    uint32_t byte_count, json_count;
} gw_waiting;

/* Zeroed is empty. */
typedef struct gw_logprobs {
    uint32_t top; /* alternatives of an entry */
    /* Entries `{"token","logprob","bytes","top_logprobs"}` with commas between, which the caller
     * takes out and clears. */
    base_buf entries;
    /* Tokens of the output that no text was given out for yet: marks and held text. */
    base_buf bytes, json, unmatched;
    gw_waiting *waiting;
    uint32_t count, capacity;
    bool keep;    /* all tokens' entries stay in `log`, to be played again */
    base_buf log; /* with commas between */
} gw_logprobs;

/* The tokens of a step, before its parts. Without memory the turn becomes lossy. */
void gw_logprobs_step(gw_logprobs *list, gw_turn *turn, const eng_event *event);
/* The same for one token whose entry is known: its bytes and JSON. False without memory. */
bool gw_logprobs_feed(gw_logprobs *list, const char *bytes, size_t length, eng_text json);
/* A part of the answer; its visible text makes entries. */
void gw_logprobs_part(gw_logprobs *list, const eng_part *part);
void gw_logprobs_deinit(gw_logprobs *list);
