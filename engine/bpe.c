/* Byte-pair merging of one pre-token: always the merge of lowest rank, leftmost first, until none
 * is left.
 *
 * Most pre-tokens are tokens as they stand. Up to SHORT_MAX bytes the lowest rank is found by a
 * scan; above, by a heap over a linked list, O(n log n). A pre-token longer than CHUNK bytes is cut
 * there (at a character): its pieces are merged apart, which bounds scratch and time for rulers,
 * base64 and the like, at the cost of one boundary in 16 KiB that whole merging might have crossed.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/base/num.h"
#include "engine/token_internal.h"

#define SHORT_MAX 48
#define CHUNK 16384
#define NIL UINT32_MAX

typedef struct merge_work {
    int32_t sym[CHUNK], merged[CHUNK];
    uint32_t prev[CHUNK], next[CHUNK];
    uint32_t rank[CHUNK]; /* of the pair that begins here, TOK_NO_RANK if none or if merged away */
    uint64_t
        heap[3 * CHUNK]; /* rank << 32 | position; an entry is stale when rank[position] differs */
    uint32_t heap_count;
} merge_work;

static void merge_short(tok_encoder *encoder, const unsigned char *bytes, uint32_t count)
{
    const eng_tok *tok = encoder->tok;
    int32_t sym[SHORT_MAX], merged[SHORT_MAX];
    uint32_t rank[SHORT_MAX];
    for (uint32_t i = 0; i < count; i++)
        sym[i] = tok->byte_id[bytes[i]];
    for (uint32_t i = 0; i + 1 < count; i++) {
        const tok_pair *pair = tok_pair_find(tok, sym[i], sym[i + 1]);
        rank[i] = pair == NULL ? TOK_NO_RANK : pair->rank;
        merged[i] = pair == NULL ? -1 : pair->id;
    }
    for (;;) {
        uint32_t best = TOK_NO_RANK, at = 0;
        for (uint32_t i = 0; i + 1 < count; i++)
            if (rank[i] < best) {
                best = rank[i];
                at = i;
            }
        if (best == TOK_NO_RANK)
            break;
        sym[at] = merged[at];
        count--;
        for (uint32_t i = at + 1; i < count; i++) {
            sym[i] = sym[i + 1];
            rank[i] = rank[i + 1];
            merged[i] = merged[i + 1];
        }
        for (uint32_t i = at == 0 ? 0 : at - 1; i <= at && i + 1 < count; i++) {
            const tok_pair *pair = tok_pair_find(tok, sym[i], sym[i + 1]);
            rank[i] = pair == NULL ? TOK_NO_RANK : pair->rank;
            merged[i] = pair == NULL ? -1 : pair->id;
        }
    }
    for (uint32_t i = 0; i < count; i++)
        eng_ids_add(encoder->out, sym[i]);
}

static void heap_push(merge_work *work, uint64_t entry)
{
    uint32_t i = work->heap_count++;
    while (i > 0 && work->heap[(i - 1) / 2] > entry) {
        work->heap[i] = work->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    work->heap[i] = entry;
}

/* The hole sinks to a leaf and the last entry rises from there: it belongs near the bottom nearly
 * always, and the way down has no branch that depends on the entries. */
static uint64_t heap_pop(merge_work *work)
{
    uint64_t *heap = work->heap, top = heap[0], last = heap[--work->heap_count];
    uint32_t i = 0, count = work->heap_count;
    for (uint32_t child = 1; child + 1 < count; child = 2 * i + 1) {
        child += heap[child + 1] < heap[child];
        heap[i] = heap[child];
        i = child;
    }
    if (2 * i + 1 < count) {
        heap[i] = heap[2 * i + 1];
        i = 2 * i + 1;
    }
    while (i > 0 && heap[(i - 1) / 2] > last) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = last;
    return top;
}

/* Looks up the pair that begins at `i` and queues its merge. */
static void queue_pair(const eng_tok *tok, merge_work *work, uint32_t i)
{
    const tok_pair *pair =
        work->next[i] == NIL ? NULL : tok_pair_find(tok, work->sym[i], work->sym[work->next[i]]);
    work->rank[i] = pair == NULL ? TOK_NO_RANK : pair->rank;
    if (pair == NULL)
        return;
    work->merged[i] = pair->id;
    heap_push(work, (uint64_t)pair->rank << 32 | i);
}

static void merge_long(tok_encoder *encoder, const unsigned char *bytes, uint32_t count)
{
    const eng_tok *tok = encoder->tok;
    merge_work *work = encoder->work;
    work->heap_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        work->sym[i] = tok->byte_id[bytes[i]];
        work->prev[i] = i == 0 ? NIL : i - 1;
        work->next[i] = i + 1 == count ? NIL : i + 1;
    }
    for (uint32_t i = 0; i < count; i++)
        queue_pair(tok, work, i);
    while (work->heap_count > 0) {
        uint64_t top = heap_pop(work);
        uint32_t i = (uint32_t)top;
        if (work->rank[i] != top >> 32)
            continue;
        uint32_t gone = work->next[i];
        work->sym[i] = work->merged[i];
        work->rank[gone] = TOK_NO_RANK;
        work->next[i] = work->next[gone];
        if (work->next[i] != NIL)
            work->prev[work->next[i]] = i;
        queue_pair(tok, work, i);
        if (work->prev[i] != NIL)
            queue_pair(tok, work, work->prev[i]);
    }
    for (uint32_t i = 0; i != NIL && !encoder->out->failed; i = work->next[i])
        eng_ids_add(encoder->out, work->sym[i]);
}

/* Length of a chunk at the front that does not end inside a character. */
static size_t chunk_length(const char *bytes, size_t length)
{
    if (length <= CHUNK)
        return length;
    size_t cut = CHUNK;
    while (cut > CHUNK - 4 && ((unsigned char)bytes[cut] & 0xC0) == 0x80)
        cut--;
    return cut;
}

void tok_merge(tok_encoder *encoder, const char *bytes, size_t length)
{
    const eng_tok *tok = encoder->tok;
    if (length <= tok->word_max) {
        int32_t id = tok_word(tok, bytes, length);
        uint8_t flags = id < 0 ? 0 : tok->pieces[id].flags;
        if ((flags & TOK_ADDED) == 0 &&
            ((flags & TOK_WHOLE) != 0 || (id >= 0 && tok->ignore_merges))) {
            eng_ids_add(encoder->out, id);
            return;
        }
    }
    if (length <= SHORT_MAX) {
        merge_short(encoder, (const unsigned char *)bytes, (uint32_t)length);
        return;
    }
    if (encoder->work == NULL && (encoder->work = malloc(sizeof(merge_work))) == NULL) {
        encoder->out->failed = true;
        return;
    }
    const char *before = NULL;
    size_t before_length = 0, ids_from = 0;
    while (length > 0 && !encoder->out->failed) {
        size_t part = chunk_length(bytes, length), ids_to = encoder->out->count;
        if (part == before_length && memcmp(before, bytes, part) == 0) {
            for (size_t i = ids_from; i < ids_to && !encoder->out->failed;
                 i++) /* a ruler: as the chunk before */
                eng_ids_add(encoder->out, encoder->out->data[i]);
        } else {
            merge_long(encoder, (const unsigned char *)bytes, (uint32_t)part);
        }
        ids_from = ids_to;
        before = bytes;
        before_length = part;
        bytes += part;
        length -= part;
    }
}
