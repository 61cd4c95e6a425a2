#include "engine/past.h"

#include <stdlib.h>
#include <xxhash.h>

#include "cache/page.h"
#include "engine/base/num.h"

#define MARKS_PER_PAGE 8 /* what is gone is remembered for several fillings of the memory */
#define MARKS_MIN 1024
#define MARKS_MAX (1u << 20)

bool eng_past_init(eng_past *past, uint32_t page_count)
{
    size_t count = MARKS_MIN;
    while (count < base_min((size_t)page_count * MARKS_PER_PAGE, MARKS_MAX))
        count *= 2;
    past->marks = calloc(count, sizeof *past->marks);
    past->mask = (uint32_t)count - 1;
    return past->marks != NULL;
}

void eng_past_deinit(eng_past *past)
{
    free(past->marks);
}

static uint64_t next_mark(uint64_t mark, const int32_t *page)
{
    return XXH3_64bits_withSeed(page, KV_PAGE_TOKENS * sizeof *page, mark);
}

void eng_past_note(eng_past *past, uint64_t space, const int32_t *tokens, uint32_t count)
{
    uint64_t mark = space;
    for (uint32_t at = 0; at + KV_PAGE_TOKENS <= count; at += KV_PAGE_TOKENS) {
        mark = next_mark(mark, tokens + at);
        past->marks[mark & past->mask] = mark;
    }
}

uint32_t eng_past_gone(const eng_past *past, uint64_t space, const int32_t *tokens, uint32_t count,
                       uint32_t from)
{
    uint64_t mark = space;
    uint32_t end = from;
    for (uint32_t at = 0; at + KV_PAGE_TOKENS <= count; at += KV_PAGE_TOKENS) {
        mark = next_mark(mark, tokens + at);
        if (at + KV_PAGE_TOKENS <= from)
            continue;
        if (past->marks[mark & past->mask] != mark)
            break;
        end = at + KV_PAGE_TOKENS;
    }
    return end - from;
}
