/* A program for comparisons with other validators: a command a line on stdin, a line or more of
 * answers on stdout.
 *
 *   S JSON        compiles a schema: `ok`, or `refused` with code, pointer and reason
 *   D JSON        a document, judged as a validator reads it (any order, any number): 1 or 0
 *   G SEED COUNT  so many documents that the grammar of the last schema accepts, one a line;
 *                 a walk that gets too long is an empty line, one that is stuck says `!` and its
 * text
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/rand.h"
#include "engine/grammar.h"

#define DOCUMENT_MAX 3000u

typedef struct follower {
    eng_grammar *grammar;
    eng_grammar_run *run;
    const eng_vocab *vocab; /* of bytes, for who writes; else NULL */
} follower;

static void drop(follower *f)
{
    if (f->run != NULL)
        eng_grammar_run_destroy(f->run);
    eng_grammar_unref(f->grammar);
    *f = (follower){.vocab = f->vocab};
}

static const char *byte_text(const void *context, int32_t id, size_t *length)
{
    *length = 1;
    return (const char *)context + id;
}

static base_code make(follower *f, const char *schema, const eng_grammar_options *options,
                      base_err *err)
{
    drop(f);
    base_code code = eng_grammar_schema(&f->grammar, schema, strlen(schema), options, err);
    return code != BASE_OK ? code : eng_grammar_run_create(&f->run, f->grammar, f->vocab, err);
}

static bool judged(follower *f, const char *text)
{
    eng_grammar_state state;
    eng_grammar_start(&state, f->run);
    bool is = eng_grammar_advance(&state, text, strlen(text)) && eng_grammar_accepts(&state);
    eng_grammar_end(&state);
    return is;
}

/* A random walk, byte by byte, that likes to close what is open. */
static void generate(follower *f, uint64_t seed, uint64_t round)
{
    static char text[DOCUMENT_MAX + 1];
    size_t length = 0;
    bool stuck = false;
    eng_grammar_state state;
    eng_grammar_start(&state, f->run);
    while (length < DOCUMENT_MAX) {
        base_rand4 r = base_rand(seed, round, length);
        uint8_t may[256];
        uint32_t count = 0;
        if (eng_grammar_accepts(&state) && (length > 200 || r.v[0] % 3 == 0))
            break;
        size_t n = eng_grammar_forced(&state, text + length, DOCUMENT_MAX - length);
        if (n > 0) {
            (void)eng_grammar_advance(&state, text + length, n);
            length += n;
            continue;
        }
        const uint32_t *mask = eng_grammar_mask(&state, NULL, 0);
        for (uint32_t b = 1; b < 256; b++)
            if (mask[b / 32] >> b % 32 & 1)
                may[count++] = (uint8_t)b;
        if (count == 0) {
            stuck = !eng_grammar_accepts(&state);
            break;
        }
        uint8_t pick = may[r.v[1] % count];
        for (uint32_t i = 0; i < count; i++)
            if (strchr("\"]}", may[i]) != NULL && r.v[2] % 4 == 0)
                pick = may[i];
        text[length] = (char)pick;
        (void)eng_grammar_advance(&state, text + length, 1);
        length++;
    }
    if (!stuck && !eng_grammar_accepts(&state))
        length = 0;
    printf("%s%.*s\n", stuck ? "! " : "", (int)length, text);
    eng_grammar_end(&state);
}

int main(void)
{
    static const eng_grammar_options any = {.space = ENG_GRAMMAR_SPACE_COMPACT,
                                            .any_order = true,
                                            .any_number = true,
                                            .any_format = true};
    static const eng_grammar_options own = {.space = ENG_GRAMMAR_SPACE_SINGLE, .any_format = true};
    follower judge = {0}, writer = {0};
    char every[256];
    eng_vocab *bytes;
    base_err failed = BASE_ERR_INIT;
    for (uint32_t b = 0; b < 256; b++)
        every[b] = (char)b;
    if (eng_vocab_create(&bytes, byte_text, every, 256, &failed) != BASE_OK)
        return 1;
    writer.vocab = bytes;
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    while ((length = getline(&line, &capacity, stdin)) > 2) {
        line[length - (line[length - 1] == '\n')] = '\0';
        base_err err = BASE_ERR_INIT;
        unsigned long long seed, count;
        if (line[0] == 'S') {
            base_code code = make(&judge, line + 2, &any, &err);
            if (code == BASE_OK)
                code = make(&writer, line + 2, &own, &err);
            if (code == BASE_OK)
                printf("ok\n");
            else
                printf("refused %d %s %s\n", (int)code, err.param, err.text);
        } else if (line[0] == 'D' && judge.run != NULL) {
            printf("%d\n", judged(&judge, line + 2));
        } else if (line[0] == 'G' && writer.run != NULL &&
                   sscanf(line + 2, "%llu %llu", &seed, &count) == 2) {
            for (uint64_t i = 0; i < count; i++)
                generate(&writer, seed, i);
        } else {
            printf("what?\n");
        }
        fflush(stdout);
    }
    free(line);
    drop(&judge);
    drop(&writer);
    eng_vocab_destroy(bytes);
    return 0;
}
