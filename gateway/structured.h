/* structured: what a request says its output must look like, from the body to the engine's grammar.
 *
 * Read and applied: response_format (json_object, json_schema) and the same under the names of
 * other dialects; the engine's own structured_outputs {json, json_object, regex, choice, grammar},
 * guided_json, guided_regex, guided_choice, guided_grammar, grammar (all of vLLM and llama.cpp);
 * strict tools, tool_choice required, named and allowed_tools. Schemas are taken as raw text, so
 * that their numbers keep every digit. A schema that cannot be enforced is refused whether or not
 * it says strict: an answer that only looks like it was held to one is worse than none. Thread:
 * worker. */
#pragma once
#include "gateway/dialect.h"

/* `format` may be NULL. The raw text is looked up in turn->body under `keys`, a NULL-terminated
 * path to the object. `inner`: the member that holds schema and name ("json_schema"), NULL: itself.
 */
base_code gw_read_format(gw_turn *turn, const json_t *format, const char *const *keys,
                         const char *inner, base_err *err);
/* The engine's own fields; two formats in one request are refused. */
base_code gw_read_engine_formats(gw_turn *turn, base_err *err);
/* Makes request.grammar from the turn's format, tools and tool choice; the turn frees it. */
base_code gw_hold_output(gw_turn *turn, base_err *err);
