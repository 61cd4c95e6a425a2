/* Sets of strings, and the characters of JSON strings, as the graph's states that read bytes. */
#include "engine/grammar_set.h"

typedef struct lowering {
    gr_compile *c;
    const gr_dfa *dfa;
    uint32_t *entry;      /* [states] */
    uint32_t (*tails)[3]; /* [states]: nodes that read 1 to 3 continuation bytes of any kind */
    GR_VECTOR(gr_edge) edges;
} lowering;

static uint32_t tail(gr_compile *c, uint32_t (*tails)[3], uint32_t to, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i++) {
        if ((*tails)[i] == 0)
            (*tails)[i] = gr_bytes_add(c, &(gr_edge){0x80, 0xBF, to}, 1);
        to = (*tails)[i];
    }
    return to;
}

/* Edges of the byte with `rest` continuation bytes behind it, for the values lo..hi of them all;
 * `mark` is added to the byte's own value. */
static uint32_t byte_edges(gr_compile *c, gr_edge out[3], uint32_t lo, uint32_t hi, uint32_t rest,
                           uint32_t mark, uint32_t (*tails)[3], uint32_t to)
{
    uint32_t shift = 6 * rest, unit = (1u << shift) - 1;
    uint32_t first = lo >> shift, last = hi >> shift, n = 0;
    gr_edge inner[3];
    if (rest > 0 && first <= last && ((lo & unit) != 0 || (first == last && (hi & unit) != unit))) {
        uint32_t top = first == last ? hi & unit : unit;
        uint32_t k = byte_edges(c, inner, lo & unit, top, rest - 1, 0x80, tails, to);
        out[n++] =
            (gr_edge){(uint8_t)(mark + first), (uint8_t)(mark + first), gr_bytes_add(c, inner, k)};
        first++;
    }
    if (rest > 0 && first <= last && (hi & unit) != unit) {
        uint32_t k = byte_edges(c, inner, 0, hi & unit, rest - 1, 0x80, tails, to);
        out[n++] =
            (gr_edge){(uint8_t)(mark + last), (uint8_t)(mark + last), gr_bytes_add(c, inner, k)};
        if (last == 0)
            return n;
        last--;
    }
    if (first <= last)
        out[n++] =
            (gr_edge){(uint8_t)(mark + first), (uint8_t)(mark + last), tail(c, tails, to, rest)};
    return n;
}

/* The edges of the code points lo..hi from 0x80 on, surrogates left out. */
static uint32_t utf8_edges(gr_compile *c, gr_edge out[16], uint32_t lo, uint32_t hi,
                           uint32_t (*tails)[3], uint32_t to)
{
    static const struct {
        uint32_t lo, hi, rest, mark;
    } parts[] = {{0x80, 0x7FF, 1, 0xC0},
                 {0x800, 0xD7FF, 2, 0xE0},
                 {0xE000, 0xFFFF, 2, 0xE0},
                 {0x10000, GR_CODE_MAX, 3, 0xF0}};
    uint32_t n = 0;
    for (size_t i = 0; i < 4; i++) {
        uint32_t from = lo > parts[i].lo ? lo : parts[i].lo;
        uint32_t until = hi < parts[i].hi ? hi : parts[i].hi;
        if (from <= until)
            n += byte_edges(c, out + n, from, until, parts[i].rest, parts[i].mark, tails, to);
    }
    return n;
}

static uint32_t hex_edges(gr_edge out[3], uint32_t lo, uint32_t hi, uint32_t to)
{
    uint32_t n = 0;
    if (lo <= 9)
        out[n++] = (gr_edge){(uint8_t)('0' + lo), (uint8_t)('0' + (hi < 9 ? hi : 9)), to};
    if (hi >= 10) {
        uint32_t from = lo > 10 ? lo - 10 : 0;
        out[n++] = (gr_edge){(uint8_t)('A' + from), (uint8_t)('A' + hi - 10), to};
        out[n++] = (gr_edge){(uint8_t)('a' + from), (uint8_t)('a' + hi - 10), to};
    }
    return n;
}

/* \u00hh for the controls lo..hi. */
static uint32_t control_escape(gr_compile *c, uint32_t lo, uint32_t hi, uint32_t to)
{
    gr_edge first[2], second[3];
    uint32_t n = 0;
    for (uint32_t high = 0; high < 2; high++) {
        uint32_t from = lo > high * 16 ? lo : high * 16,
                 until = hi < high * 16 + 15 ? hi : high * 16 + 15;
        if (from > until)
            continue;
        uint32_t k = hex_edges(second, from & 15, until & 15, to);
        first[n++] =
            (gr_edge){(uint8_t)('0' + high), (uint8_t)('0' + high), gr_bytes_add(c, second, k)};
    }
    return gr_literal(c, "00", 2, gr_bytes_add(c, first, n));
}

static void lower_state(lowering *l, uint32_t state, uint32_t node, bool json)
{
    static const char shorts[] = "\bb\ff\nn\rr\tt";
    gr_compile *c = l->c;
    const gr_dfa *dfa = l->dfa;
    GR_VECTOR(gr_edge) escapes = {0};
    l->edges.count = 0;
    uint8_t ascii[128];
    memset(ascii, 0, sizeof ascii);
    bool wide = false;
    for (uint32_t i = dfa->first[state]; i < dfa->first[state + 1]; i++) {
        gr_range r = dfa->ranges[i];
        uint32_t to = l->entry[r.to];
        for (uint32_t ch = r.lo; ch < 0x80 && ch <= r.hi;) {
            if (json && ch < 0x20) {
                uint32_t hi = r.hi < 0x1F ? r.hi : 0x1F;
                *gr_add(c, &escapes) = (gr_edge){'u', 'u', control_escape(c, ch, hi, to)};
                for (size_t k = 0; k < sizeof shorts - 1; k += 2)
                    if ((uint32_t)shorts[k] >= ch && (uint32_t)shorts[k] <= hi)
                        *gr_add(c, &escapes) =
                            (gr_edge){(uint8_t)shorts[k + 1], (uint8_t)shorts[k + 1], to};
                ch = hi + 1;
            } else if (json && (ch == '"' || ch == '\\')) {
                *gr_add(c, &escapes) = (gr_edge){(uint8_t)ch, (uint8_t)ch, to};
                ch++;
            } else {
                uint32_t hi = ch;
                while (hi < r.hi && hi < 0x7F && !(json && (hi + 1 == '"' || hi + 1 == '\\')))
                    hi++;
                *gr_add(c, &l->edges) = (gr_edge){(uint8_t)ch, (uint8_t)hi, to};
                for (uint32_t k = ch; r.to == state && k <= hi; k++)
                    ascii[k] = 1;
                ch = hi + 1;
            }
        }
        if (r.hi >= 0x80) {
            gr_edge out[16];
            uint32_t n = utf8_edges(c, out, r.lo, r.hi, &l->tails[r.to], to);
            for (uint32_t k = 0; k < n; k++)
                *gr_add(c, &l->edges) = out[k];
            wide = wide || (r.to == state && r.lo <= 0x80 && r.hi == GR_CODE_MAX);
        }
    }
    if (escapes.count > 0)
        *gr_add(c, &l->edges) = (gr_edge){'\\', '\\', gr_bytes_add(c, escapes.data, escapes.count)};
    gr_bytes_set(c, node, l->edges.data, l->edges.count);
    uint32_t loops = 0;
    for (uint32_t k = 0; k <= GR_CLASS_ASCII; k++) {
        uint8_t ch = 0;
        while (ch < 0x80 && (ascii[ch] || !gr_class_has(k, ch)))
            ch++;
        loops |= (uint32_t)(ch == 0x80) << k;
    }
    if (wide && (loops >> GR_CLASS_ASCII & 1) && ascii[0x7F])
        loops |= 1u << GR_CLASS_TEXT;
    c->g->nodes.data[node].loops = (uint8_t)loops | GR_UNIFORM;
}

/* Longest run that is counted; no token has more characters. */
#define RUN_MAX 300u

/* How many code points of lo..hi a class has. */
static uint32_t class_share(uint32_t class_index, uint32_t lo, uint32_t hi)
{
    uint32_t n = 0;
    for (uint32_t ch = lo; ch < 0x80 && ch <= hi; ch++)
        n += gr_class_has(class_index, (uint8_t)ch) || (ch == 0x7F && class_index == GR_CLASS_TEXT);
    if (class_index == GR_CLASS_TEXT && hi >= 0x80)
        n += hi - (lo > 0x80 ? lo : 0x80) + 1;
    return n;
}

/* Where a state reads whole classes, though not for ever, as under a maxLength: if the shortest and
 * the longest run of a class are equal, its tokens up to that many characters may follow and no
 * others, as only a quote can lead out of a string. */
static void find_runs(lowering *l, const uint32_t *nodes)
{
    gr_compile *c = l->c;
    const gr_dfa *dfa = l->dfa;
    uint16_t *least = gr_alloc(c, dfa->count, sizeof *least);
    uint16_t *most = gr_alloc(c, dfa->count, sizeof *most);
    gr_runs *all = gr_alloc(c, dfa->count, sizeof *all);
    uint32_t range_count = dfa->first[dfa->count];
    uint32_t *share = gr_alloc(c, range_count, sizeof *share);
    bool *uniform = gr_alloc(c, dfa->count, sizeof *uniform);
    uint8_t *mixed = gr_alloc(c, dfa->count, sizeof *mixed);
    for (uint32_t k = 0; k < GR_CLASS_REST; k++) {
        uint32_t whole = class_share(k, 0, GR_CODE_MAX);
        for (uint32_t i = 0; i < range_count; i++)
            share[i] = class_share(k, dfa->ranges[i].lo, dfa->ranges[i].hi);
        for (uint32_t s = 0; s < dfa->count; s++) {
            uint32_t covered = 0;
            for (uint32_t i = dfa->first[s]; i < dfa->first[s + 1]; i++)
                covered += share[i];
            least[s] = covered == whole ? RUN_MAX : 0;
            most[s] = 0;
        }
        gr_work(c, range_count);
        for (bool changed = true; changed;) {
            changed = false;
            gr_work(c, range_count);
            for (uint32_t s = dfa->count; s-- > 0;) {
                uint32_t low = RUN_MAX, high = 0;
                for (uint32_t i = dfa->first[s]; i < dfa->first[s + 1]; i++) {
                    uint32_t to = dfa->ranges[i].to;
                    if (share[i] == 0)
                        continue;
                    uint32_t run = to == s ? RUN_MAX : most[to] + 1u;
                    high = run > high ? run : high;
                    low = least[to] + 1u < low ? least[to] + 1u : low;
                }
                high = high > RUN_MAX ? RUN_MAX : high;
                low = least[s] == 0 ? 0 : low;
                changed = changed || high != most[s] || low != least[s];
                most[s] = (uint16_t)high;
                least[s] = (uint16_t)low;
            }
        }
        for (uint32_t s = 0; s < dfa->count; s++) {
            all[s].limit[k] = least[s] == most[s] ? least[s] : 0;
            uniform[s] = all[s].limit[k] > 0;
        }
        /* Whether the state after some characters is the same whichever they were. */
        for (bool changed = true; changed;) {
            changed = false;
            gr_work(c, range_count);
            for (uint32_t s = dfa->count; s-- > 0;) {
                uint32_t only = GR_NOWHERE;
                bool is = uniform[s];
                for (uint32_t i = dfa->first[s]; is && i < dfa->first[s + 1]; i++) {
                    uint32_t to = dfa->ranges[i].to;
                    if (share[i] == 0)
                        continue;
                    is = (only == GR_NOWHERE || only == to) &&
                         (uniform[to] || all[to].limit[k] == 0);
                    only = to;
                }
                changed = changed || is != uniform[s];
                uniform[s] = is;
            }
        }
        for (uint32_t s = 0; s < dfa->count; s++)
            if (all[s].limit[k] > 0 && !uniform[s])
                mixed[s] = 1;
    }
    for (uint32_t s = 0; s < dfa->count; s++) {
        uint8_t loops = 0;
        for (uint32_t k = 0; k < GR_CLASS_REST; k++)
            loops |= (uint8_t)((all[s].limit[k] > 0) << k);
        if (loops == 0 || nodes[s] == GR_NONE || c->g->runs.count == UINT16_MAX)
            continue;
        *gr_push(c, &c->g->runs) = all[s];
        c->g->nodes.data[nodes[s]].runs = (uint16_t)c->g->runs.count;
        c->g->nodes.data[nodes[s]].loops = loops | (mixed[s] ? 0 : GR_UNIFORM);
    }
}

static lowering begin(gr_compile *c, const gr_dfa *dfa)
{
    return (lowering){.c = c,
                      .dfa = dfa,
                      .entry = gr_alloc(c, dfa->count, sizeof(uint32_t)),
                      .tails = gr_alloc(c, dfa->count, sizeof(uint32_t[3]))};
}

uint32_t gr_dfa_lower(gr_compile *c, const gr_dfa *dfa, bool json, uint32_t next)
{
    if (dfa->count == 0)
        return GR_NONE;
    lowering l = begin(c, dfa);
    uint32_t *nodes = gr_alloc(c, dfa->count, sizeof *nodes);
    /* Ends first, so that heights settle in one pass. */
    for (uint32_t s = dfa->count; s-- > 0;) {
        bool reads = dfa->first[s] < dfa->first[s + 1];
        nodes[s] = reads ? gr_node_add(c, GR_BYTES, 0, 0, 0) : GR_NONE;
        if (dfa->accept[s] && reads)
            l.entry[s] = gr_fork_add(c, (uint32_t[]){nodes[s], next}, 2);
        else
            l.entry[s] = dfa->accept[s] ? next : nodes[s];
    }
    for (uint32_t s = dfa->count; s-- > 0;)
        if (nodes[s] != GR_NONE)
            lower_state(&l, s, nodes[s], json);
    if (json)
        find_runs(&l, nodes);
    return l.entry[0];
}

uint32_t gr_dfa_lower_counted(gr_compile *c, const gr_dfa *dfa, uint32_t guard, uint32_t next)
{
    if (dfa->count == 0)
        return GR_NONE;
    lowering l = begin(c, dfa);
    uint32_t *nodes = gr_alloc(c, dfa->count, sizeof *nodes);
    uint32_t end = gr_node_add(c, GR_STRING_END, guard, 0, next);
    for (uint32_t s = dfa->count; s-- > 0;) {
        nodes[s] = gr_node_add(c, GR_BYTES, 0, 0, 0);
        uint32_t more = gr_node_add(c, GR_CHAR, guard, 0, nodes[s]);
        l.entry[s] = dfa->accept[s] ? gr_fork_add(c, (uint32_t[]){more, end}, 2) : more;
    }
    for (uint32_t s = dfa->count; s-- > 0;) {
        lower_state(&l, s, nodes[s], false);
        c->g->nodes.data[nodes[s]].c = guard + 1;
    }
    return l.entry[0];
}

void gr_string_char(gr_compile *c, uint32_t node, uint32_t to, uint32_t quote_to)
{
    gr_edge edges[32], hexes[3], parts[8];
    uint32_t tails[1][3] = {{0, 0, 0}}, n = 0;
    uint32_t h1 = gr_bytes_add(c, hexes, hex_edges(hexes, 0, 15, to));
    uint32_t h2 = gr_bytes_add(c, hexes, hex_edges(hexes, 0, 15, h1));
    uint32_t h3 = gr_bytes_add(c, hexes, hex_edges(hexes, 0, 15, h2));
    /* A high surrogate needs its low one: alone it is no character. */
    uint32_t k = hex_edges(parts, 12, 15, h2);
    uint32_t low = gr_bytes_add(c, parts, k);
    low = gr_bytes_add(c, (gr_edge[]){{'D', 'D', low}, {'d', 'd', low}}, 2);
    low = gr_literal(c, "\\u", 2, low);
    low = gr_bytes_add(c, hexes, hex_edges(hexes, 0, 15, low));
    low = gr_bytes_add(c, hexes, hex_edges(hexes, 0, 15, low));
    k = hex_edges(parts, 0, 7, h2);
    k += hex_edges(parts + k, 8, 11, low);
    uint32_t d = gr_bytes_add(c, parts, k);
    k = hex_edges(parts, 0, 12, h3);
    parts[k++] = (gr_edge){'D', 'D', d};
    parts[k++] = (gr_edge){'d', 'd', d};
    k += hex_edges(parts + k, 14, 15, h3);
    uint32_t u = gr_bytes_add(c, parts, k);
    gr_edge escapes[9];
    for (k = 0; k < 8; k++)
        escapes[k] = (gr_edge){(uint8_t) "\"\\/bfnrt"[k], (uint8_t) "\"\\/bfnrt"[k], to};
    escapes[8] = (gr_edge){'u', 'u', u};
    uint32_t escape_node = gr_bytes_add(c, escapes, 9);
    edges[n++] = (gr_edge){0x20, 0x21, to};
    if (quote_to != GR_NONE)
        edges[n++] = (gr_edge){'"', '"', quote_to};
    edges[n++] = (gr_edge){0x23, 0x5B, to};
    edges[n++] = (gr_edge){'\\', '\\', escape_node};
    edges[n++] = (gr_edge){0x5D, 0x7F, to};
    n += utf8_edges(c, edges + n, 0x80, GR_CODE_MAX, &tails[0], to);
    gr_bytes_set(c, node, edges, n);
    c->g->nodes.data[node].loops = GR_CLASS_ALL_TEXT | GR_UNIFORM;
}
