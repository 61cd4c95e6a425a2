/* What a turn's visible output may be, as one grammar: text, calls, or either. */
#include <stdlib.h>

#include "engine/grammar_calls.h"

typedef struct job {
    const eng_output *output;
    gr_tool *tools;
    uint32_t tool_count;
    bool prose, calls;
    uint32_t *tool; /* being compiled, for errors */
} job;

/* root = text | calls | prose calls, as far as they may come. */
static uint32_t output_body(gr_compile *c, void *context)
{
    job *j = context;
    uint32_t ways[3], count = 0, ret = gr_node_add(c, GR_RETURN, 0, 0, 0);
    *j->tool = UINT32_MAX;
    uint32_t text = j->prose ? gr_format_rule(c, &j->output->format, NULL) : 0;
    if (j->prose)
        ways[count++] = gr_node_add(c, GR_CALL, text, ret, 0);
    if (j->calls) {
        uint32_t calls = gr_calls_rule(c, j->tools, j->tool_count, j->output->call_max, j->tool);
        uint32_t block = gr_node_add(c, GR_CALL, calls, ret, 0);
        ways[count++] = block;
        if (j->prose && j->output->format.kind == ENG_FORMAT_TEXT)
            ways[count++] = gr_node_add(c, GR_CALL, text, block, 0);
    }
    uint32_t rule = gr_rule_add(c), start = gr_fork_add(c, ways, count);
    c->g->rules.data[rule].start = start;
    return rule;
}

/* A tool that nobody calls strict, on its own: where its schema cannot be enforced, its arguments
 * are free. */
static uint32_t trial_body(gr_compile *c, void *context)
{
    uint32_t tool;
    return gr_calls_rule(c, context, 1, 1, &tool);
}

static bool is_strict(const eng_output *o, uint32_t tool)
{
    return (o->strict != NULL && o->strict[tool]) ||
           (o->inputs != NULL && o->inputs[tool].kind != ENG_FORMAT_TEXT);
}

static base_code read_tools(job *j, bool typed, base_err *err)
{
    const eng_output *o = j->output;
    for (uint32_t i = 0; i < o->tool_count; i++) {
        gr_tool tool = {.index = i};
        if (o->inputs != NULL && o->inputs[i].kind != ENG_FORMAT_TEXT)
            tool.input = &o->inputs[i];
        bool strict = is_strict(o, i);
        base_code code = gr_tool_read(&tool, o->tools[i], err);
        if (code != BASE_OK) {
            gr_tool_deinit(&tool);
            return code;
        }
        bool named = o->tool_choice != ENG_TOOL_NAMED ||
                     (tool.name.length == o->tool_name.length &&
                      memcmp(tool.name.data, o->tool_name.data, tool.name.length) == 0);
        if (!named || (o->allowed != NULL && !o->allowed[i])) {
            gr_tool_deinit(&tool);
            continue;
        }
        tool.free = !strict && !typed;
        if (typed && !strict) {
            base_err ignored = BASE_ERR_INIT;
            eng_grammar *trial = NULL;
            tool.free =
                gr_compile_run(&trial, trial_body, &tool, &gr_calls_options, &ignored) != BASE_OK;
            eng_grammar_unref(trial);
        }
        j->tools[j->tool_count++] = tool;
    }
    return BASE_OK;
}

base_code eng_output_compile(eng_grammar **out, const eng_output *output, uint32_t *tool,
                             base_err *err)
{
    uint32_t ignored;
    job j = {.output = output, .tool = tool != NULL ? tool : &ignored};
    bool demanded =
        output->tool_choice == ENG_TOOL_REQUIRED || output->tool_choice == ENG_TOOL_NAMED;
    bool strict = false;
    for (uint32_t i = 0; i < output->tool_count; i++)
        strict = strict || is_strict(output, i);
    bool bounded = output->call_max > 0 || output->allowed != NULL || strict;
    *out = NULL;
    *j.tool = UINT32_MAX;
    j.prose = !demanded;
    j.calls = output->tool_count > 0 && output->tool_choice != ENG_TOOL_NONE;
    if (!demanded && output->format.kind == ENG_FORMAT_TEXT && !(j.calls && bounded))
        return BASE_OK;
    j.tools = calloc(output->tool_count + 1, sizeof *j.tools);
    base_code code = j.tools != NULL ? BASE_OK : base_fail(err, BASE_NOMEM, "no memory for tools");
    if (code == BASE_OK && j.calls)
        code = read_tools(&j, demanded || output->allowed != NULL, err);
    j.calls = j.calls && j.tool_count > 0;
    if (code == BASE_OK && !j.calls && !j.prose)
        code = base_fail(err, BASE_INVALID, "no tool may be called, but one has to be");
    /* Text alone is compiled with the defaults; one with calls under theirs. */
    if (code == BASE_OK)
        code = gr_compile_run(out, output_body, &j, j.calls ? &gr_calls_options : NULL, err);
    for (uint32_t i = 0; i < j.tool_count; i++) {
        /* Types that could not all be read may be wrong ones. */
        if (code == BASE_OK && chat_schema_failed(j.tools[i].types)) {
            eng_grammar_unref(*out);
            *out = NULL;
            code = base_fail(err, BASE_NOMEM, "no memory for tools");
        }
        gr_tool_deinit(&j.tools[i]);
    }
    free(j.tools);
    return code;
}
