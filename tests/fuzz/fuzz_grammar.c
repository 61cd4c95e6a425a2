/* The compilers of grammars on any bytes, and a walk through what they make.
 *
 * The first byte says what the rest is: s a schema, a the same as a validator reads it, t the
 * parameters of a strict tool, g GBNF, r a regular expression. Whatever compiles is followed for a
 * while; a place where neither the end nor any byte may come is a bug of the guards. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "engine/grammar.h"

#define WALK_BYTES 96u
/* A step costs what there are alternatives, at most the graph's nodes; beyond these, fewer bytes.
 */
#define WALK_NODES 1024u

/* Small bounds: what is looked for is the wrong, not the large. */
static const eng_grammar_limits limits = {
    .nodes_max = 1u << 14, .work_max = 1u << 19, .memory_max = (size_t)16 << 20, .depth_max = 24};

static eng_grammar *tool_grammar(const char *text, size_t length, base_err *err)
{
    base_buf json;
    base_buf_init(&json, 0);
    base_buf_puts(&json, "{\"name\":\"f\",\"parameters\":");
    base_buf_add(&json, text, length);
    base_buf_puts(&json, "}");
    eng_text tool = {json.data, json.length};
    const bool strict = true;
    const eng_output output = {.tools = &tool,
                               .tool_count = 1,
                               .strict = &strict,
                               .tool_choice = ENG_TOOL_REQUIRED,
                               .call_max = 1};
    eng_grammar *grammar = NULL;
    (void)eng_output_compile(&grammar, &output, NULL, err);
    base_buf_deinit(&json);
    return grammar;
}

static eng_grammar *compile(char kind, const char *text, size_t length, base_err *err)
{
    eng_grammar_options options = {.limits = limits};
    eng_grammar *grammar = NULL;
    switch (kind) {
    case 'a':
        options.any_order = options.any_number = true;
        options.space = ENG_GRAMMAR_SPACE_LOOSE;
        (void)eng_grammar_schema(&grammar, text, length, &options, err);
        break;
    case 's':
        (void)eng_grammar_schema(&grammar, text, length, &options, err);
        break;
    case 't':
        return tool_grammar(text, length, err);
    case 'g':
        (void)eng_grammar_gbnf(&grammar, text, length, &options, err);
        break;
    case 'r':
        (void)eng_grammar_regex(&grammar, text, length, &options, err);
        break;
    default:
        break;
    }
    return grammar;
}

/* One byte on, the first that may follow from `from` on; false if none may. */
static bool step(eng_grammar_state *state, uint32_t from)
{
    for (uint32_t i = 0; i < 256; i++) {
        char byte = (char)(from + i);
        if (eng_grammar_advance(state, &byte, 1))
            return true;
    }
    return false;
}

static void walk(eng_grammar *grammar, const uint8_t *data, size_t size)
{
    base_err err = BASE_ERR_INIT;
    eng_grammar_run *run;
    eng_grammar_state state;
    char forced[32];
    if (eng_grammar_run_create(&run, grammar, NULL, &err) != BASE_OK)
        return;
    eng_grammar_start(&state, run);
    uint32_t nodes = eng_grammar_nodes(grammar);
    uint32_t bytes = nodes > WALK_NODES ? WALK_BYTES * WALK_NODES / nodes : WALK_BYTES;
    for (uint32_t i = 0; i < bytes; i++) {
        size_t n = eng_grammar_forced(&state, forced, sizeof forced);
        if (n > 0 && !eng_grammar_advance(&state, forced, n)) {
            fprintf(stderr, "what is forced is refused\n");
            abort();
        }
        bool ends = eng_grammar_accepts(&state);
        if (!step(&state, data[i % size] * 7u + i)) {
            /* A set of threads that has no room is refused, too; nothing this small has one. */
            if (!ends) {
                fprintf(stderr, "nothing may follow\n");
                abort();
            }
            break;
        }
    }
    eng_grammar_end(&state);
    eng_grammar_run_destroy(run);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    base_err err = BASE_ERR_INIT;
    if (size < 2)
        return 0;
    char *copy = malloc(size - 1); /* so that a byte past its end is seen */
    if (copy == NULL)
        return 0;
    memcpy(copy, data + 1, size - 1);
    eng_grammar *grammar = compile((char)data[0], copy, size - 1, &err);
    if (grammar == NULL && memchr("astgr", data[0], 5) != NULL && err.code == BASE_OK &&
        data[0] != 't') {
        fprintf(stderr, "refused without a reason\n");
        abort();
    }
    /* A run takes memory by the megabyte, so one grammar of eight is walked. */
    uint32_t sum = 0;
    for (size_t i = 0; i < size; i++)
        sum += data[i];
    if (grammar != NULL && sum % 8 == 0)
        walk(grammar, data, size);
    eng_grammar_unref(grammar);
    free(copy);
    return 0;
}
