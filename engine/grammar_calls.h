/* The text of tool calls as a grammar: MiniMax-M3.1's notation, its special tokens as the bytes of
 * constrain.h. */
#pragma once
#include "engine/chat_internal.h"
#include "engine/grammar_internal.h"

typedef struct gr_tool {
    uint32_t index;  /* the caller's */
    eng_text name;   /* decoded, owned by `text` */
    eng_text schema; /* `parameters`, borrowed from the tool's JSON; absent if there is none */
    bool free;       /* any arguments */
    const eng_format *input; /* of a custom tool's one text; NULL: none */
    base_buf text;
    chat_schema *types; /* how the decoder will read the arguments */
} gr_tool;

/* Members in any order: the model's own order stays as likely as it is. */
extern const eng_grammar_options gr_calls_options;

/* Reads name and parameters of a function object's JSON. `tool` is zeroed but for `index`. */
base_code gr_tool_read(gr_tool *tool, eng_text json, base_err *err);
void gr_tool_deinit(gr_tool *tool);

/* A text of this format; of TEXT: any without a call. `held`: the texts that a regex and choices
 * keep to beside that; NULL: all. */
uint32_t gr_format_rule(gr_compile *c, const eng_format *format, const gr_dfa *held);
/* Any text without a call. */
uint32_t gr_prose_rule(gr_compile *c);
/* A block of calls of these tools, each with its arguments; `call_max` 0: any number. Sets `at` to
 * the index of the tool that is compiled, and to UINT32_MAX at the end. */
uint32_t gr_calls_rule(gr_compile *c, const gr_tool *tools, uint32_t tool_count, uint32_t call_max,
                       uint32_t *at);
