/* The prefix cache's rows of whimbrel-bench.
 *
 * p.match.T.N.warm: longest cached prefix of T tokens, N sessions resident; the same session again.
 *
 * p.match.T.N.cold: the same for a session drawn at random.
 *
 * p.match.T.N.ledger: the same session by the hint that its last match left: the first T tokens are
 * known to be those of then, pages and references remain.
 *
 * p.insert: a turn of 2,200 tokens listed behind 128K that are known, by the match's hint, in pages
 * that have held others before.
 *
 * p.branch: a fork at any token of 128K: match, a page or two, insert with the split of an edge,
 * references back. p.branch.insert: the insert alone.
 *
 * p.evict: pages freed by kv_index_evict out of a full pool of a million, by last use.
 * p.evict.value: by value, among them the calls that rank all leaves anew.
 *
 * The prompt is written just before it is timed, as a server has just put it together; what is cold
 * is the tree. The limit of p.match is one thread's measured read rate on the 4 bytes a token that
 * the tree keeps.
 *
 * Peers are plain C of other servers' algorithms, over the same sessions in the same rounds:
 *   sha256   chain of SHA-256(parent's hash, 16 tokens), each looked up in a table of 64-bit keys
 *   xxh3     the same with XXH3 of 64 bits
 *   read     no peer: the tree's rows of a session, read and not compared
 *   trie     a node a token; holds as many sessions as 32 M nodes allow, laid out in order
 *
 * 10,000 sessions of 128K tokens share the first 112K by groups of two or three, so that the tree
 * holds 2.4 GB and not 5: more than four times the last-level cache, and two draws of one group are
 * rare. */
#include "tools/bench.h"

#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "cache/index_internal.h" /* where the tree keeps its rows */
#include "engine/base/clock.h"
#include "engine/base/rand.h"

#define ROUNDS 7
#define REPS 9
#define SPACE 1
#define LONG 131072
#define BLOCK_TOKENS 16 /* vLLM's default */
#define TRIE_NODES ((size_t)32 << 20)
#define NO_NODE UINT32_MAX
#define TURN_TOKENS 2200

typedef struct shape {
    const char *name;
    uint32_t tokens, sessions, groups, shared;
} shape;

static const shape shapes[] = {{"4K.1K", 4096, 1000, 1000, 0},
                               {"4K.10K", 4096, 10000, 10000, 0},
                               {"128K.1K", LONG, 1000, 1000, 0},
                               {"128K.10K", LONG, 10000, 4000, 114688}};

static bool wrong(const char *bench, const char *what)
{
    fprintf(stderr, "whimbrel-bench: %s: %s\n", bench, what);
    return false;
}

static uint64_t mix(uint64_t h)
{
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9u;
    h = (h ^ h >> 27) * 0x94D049BB133111EBu;
    return h ^ h >> 31;
}

/* Tokens of a session: those of its group, then its own. */
static void fill(int32_t *tokens, const shape *s, uint32_t session, uint32_t from, uint32_t count)
{
    uint64_t group = mix(session % s->groups + 1), own = mix(session + ((uint64_t)1 << 40));
    for (uint32_t i = from; i < count; i++) {
        uint64_t key = (i < s->shared ? group : own) + i;
        tokens[i] = (int32_t)((key * 0x9E3779B97F4A7C15u >> 40) % 200000);
    }
}

/* ---- a table of 64-bit keys ---- */

typedef struct table {
    uint64_t *keys;
    size_t mask;
} table;

static bool table_make(table *t, size_t count)
{
    size_t size = 1024;
    while (size < count * 3 / 2)
        size *= 2;
    t->keys = calloc(size, sizeof *t->keys);
    t->mask = size - 1;
    return t->keys != NULL;
}

static void table_put(table *t, uint64_t key)
{
    size_t at = key & t->mask;
    while (t->keys[at] != 0 && t->keys[at] != key)
        at = (at + 1) & t->mask;
    t->keys[at] = key;
}

static bool table_has(const table *t, uint64_t key)
{
    size_t at = key & t->mask;
    while (t->keys[at] != 0 && t->keys[at] != key)
        at = (at + 1) & t->mask;
    return t->keys[at] == key;
}

/* ---- hash chains ---- */

typedef struct chain {
    uint8_t hash[32]; /* of the parent chain so far; zeros at the start */
} chain;

typedef uint64_t chain_fn(chain *l, const int32_t *block);

static EVP_MD_CTX *sha_ctx;
static EVP_MD *sha_md;

static uint64_t sha_step(chain *l, const int32_t *block)
{
    uint64_t key;
    EVP_DigestInit_ex2(sha_ctx, sha_md, NULL);
    EVP_DigestUpdate(sha_ctx, l->hash, sizeof l->hash);
    EVP_DigestUpdate(sha_ctx, block, BLOCK_TOKENS * sizeof *block);
    EVP_DigestFinal_ex(sha_ctx, l->hash, NULL);
    memcpy(&key, l->hash, sizeof key);
    return key | 1; /* not 0 */
}

static uint64_t xxh_step(chain *l, const int32_t *block)
{
    uint64_t seed;
    memcpy(&seed, l->hash, sizeof seed);
    uint64_t key = XXH3_64bits_withSeed(block, BLOCK_TOKENS * sizeof *block, seed);
    memcpy(l->hash, &key, sizeof key);
    return key | 1;
}

static chain chain_put(table *t, chain_fn *step, chain l, const int32_t *tokens, uint32_t from,
                       uint32_t count)
{
    for (uint32_t i = from; i + BLOCK_TOKENS <= count; i += BLOCK_TOKENS)
        table_put(t, step(&l, tokens + i));
    return l;
}

static uint32_t chain_match(const table *t, chain_fn *step, const int32_t *tokens, uint32_t count)
{
    chain l = {{0}};
    uint32_t i = 0;
    while (i + BLOCK_TOKENS <= count && table_has(t, step(&l, tokens + i)))
        i += BLOCK_TOKENS;
    return i;
}

/* ---- a trie of tokens ---- */

typedef struct trie_node {
    int32_t token;
    uint32_t child, next;
} trie_node;

typedef struct trie {
    trie_node *nodes; /* node 0 is the root */
    uint32_t count, sessions;
} trie;

static uint32_t trie_child(const trie *t, uint32_t at, int32_t token)
{
    uint32_t child = t->nodes[at].child;
    while (child != NO_NODE && t->nodes[child].token != token)
        child = t->nodes[child].next;
    return child;
}

static void trie_put(trie *t, const int32_t *tokens, uint32_t count)
{
    uint32_t at = 0;
    if (t->count + (size_t)count > TRIE_NODES)
        return;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t child = trie_child(t, at, tokens[i]);
        if (child == NO_NODE) {
            child = t->count++;
            t->nodes[child] = (trie_node){tokens[i], NO_NODE, t->nodes[at].child};
            t->nodes[at].child = child;
        }
        at = child;
    }
    t->sessions++;
}

static uint32_t trie_match(const trie *t, const int32_t *tokens, uint32_t count)
{
    uint32_t at = 0, i = 0;
    while (i < count && (at = trie_child(t, at, tokens[i])) != NO_NODE)
        i++;
    return i;
}

/* ---- everything resident ---- */

/* What a turn and a page of it may cost, by the figures. */
#define TURN_US 2.0
#define PAGE_US 0.05

typedef struct house {
    const shape *shape;
    kv_pool *pool;
    kv_index *index;
    table sha, xxh;
    trie trie;
    int32_t *tokens; /* one prompt, and a turn more */
    uint32_t *pages;
    uint32_t (*ends)[2]; /* first and last page of each session */
    kv_hint hint;        /* of the last match */
    uint64_t clock;
} house;

static void house_free(house *h)
{
    kv_index_destroy(h->index);
    kv_pool_destroy(h->pool);
    free(h->sha.keys);
    free(h->xxh.keys);
    free(h->trie.nodes);
    free(h->tokens);
    free(h->pages);
    free(h->ends);
    *h = (house){0};
}

/* Lists tokens[0..count), taking pages for what is not there; `*insert_us` is what the listing
 * took. Returns false if the pool is used up. */
static bool settle(house *h, uint64_t space, uint32_t count, double *insert_us)
{
    uint64_t owner = ++h->clock;
    kv_hint hint = {0};
    kv_match m = kv_index_match_from(h->index, space, &hint, h->tokens, count, h->pages, h->clock);
    uint32_t kept = m.tokens / KV_PAGE_TOKENS, all = (count + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    if (kept < m.page_count)
        kv_pool_unref(h->pool, h->pages[kept]);
    for (uint32_t p = kept; p < all; p++) {
        uint32_t left = count - p * KV_PAGE_TOKENS;
        h->pages[p] = kv_pool_alloc(h->pool, owner);
        if (h->pages[p] == KV_PAGE_NONE)
            return false;
        kv_pool_set_filled(h->pool, h->pages[p], owner,
                           left < KV_PAGE_TOKENS ? left : KV_PAGE_TOKENS);
    }
    uint64_t before = base_now_ns();
    bool listed =
        kv_index_insert_from(h->index, space, &hint, h->tokens, count, h->pages, h->clock);
    if (insert_us != NULL)
        *insert_us = (double)(base_now_ns() - before) / 1e3;
    for (uint32_t p = 0; p < all; p++) {
        if (p >= kept)
            kv_pool_release(h->pool, h->pages[p], owner);
        kv_pool_unref(h->pool, h->pages[p]);
    }
    return listed;
}

static bool house_make(house *h, const shape *s, uint32_t spare_pages, bool peers)
{
    size_t distinct = (size_t)s->groups * s->shared + (size_t)s->sessions * (s->tokens - s->shared);
    uint32_t pages = (uint32_t)(distinct / KV_PAGE_TOKENS) + s->sessions + spare_pages;
    *h = (house){.shape = s};
    h->tokens = malloc((s->tokens + TURN_TOKENS) * sizeof *h->tokens);
    h->pages = malloc(((s->tokens + TURN_TOKENS) / KV_PAGE_TOKENS + 2) * sizeof *h->pages);
    h->ends = malloc(s->sessions * sizeof *h->ends);
    if (h->tokens == NULL || h->pages == NULL || h->ends == NULL ||
        kv_pool_create(&h->pool, pages, NULL) != BASE_OK ||
        kv_index_create(&h->index, h->pool, 4 * s->sessions + 65536, NULL) != BASE_OK)
        return false;
    if (peers) {
        h->trie.nodes = malloc(TRIE_NODES * sizeof *h->trie.nodes);
        if (h->trie.nodes == NULL || !table_make(&h->sha, distinct / BLOCK_TOKENS) ||
            !table_make(&h->xxh, distinct / BLOCK_TOKENS))
            return false;
        h->trie.nodes[0] = (trie_node){0, NO_NODE, NO_NODE};
        h->trie.count = 1;
    }
    /* Group by group, so that the peers hash a shared prefix once. */
    uint32_t last = (s->tokens - 1) / KV_PAGE_TOKENS;
    for (uint32_t g = 0; g < s->groups; g++) {
        chain sha = {{0}}, xxh = {{0}};
        fill(h->tokens, s, g, 0, s->shared);
        if (peers) {
            sha = chain_put(&h->sha, sha_step, sha, h->tokens, 0, s->shared);
            xxh = chain_put(&h->xxh, xxh_step, xxh, h->tokens, 0, s->shared);
        }
        for (uint32_t n = g; n < s->sessions; n += s->groups) {
            fill(h->tokens, s, n, s->shared, s->tokens);
            if (!settle(h, SPACE, s->tokens, NULL))
                return false;
            h->ends[n][0] = h->pages[0];
            h->ends[n][1] = h->pages[last];
            if (!peers)
                continue;
            chain_put(&h->sha, sha_step, sha, h->tokens, s->shared, s->tokens);
            chain_put(&h->xxh, xxh_step, xxh, h->tokens, s->shared, s->tokens);
            trie_put(&h->trie, h->tokens, s->tokens);
        }
    }
    return true;
}

/* ---- p.match ---- */

/* READ: a session's rows in the tree, read and not compared, by a thread that need not look for
 * them: what memory gives for 512 KiB from anywhere, which is less than for a long read. */
enum { SHA, XXH, TRIE, READ, PEERS };
enum { WARM, COLD, LEDGER, STATES };
static const char *const states[STATES] = {"warm", "cold", "ledger"};

static double median_of(double *v, int n)
{
    for (int i = 1; i < n; i++)
        for (int j = i; j > 0 && v[j] < v[j - 1]; j--) {
            double kept = v[j];
            v[j] = v[j - 1];
            v[j - 1] = kept;
        }
    return v[n / 2];
}

/* The trie was filled group by group: its n-th session. */
static uint32_t trie_session(const shape *s, uint32_t n)
{
    uint32_t of_group = (s->sessions + s->groups - 1) / s->groups;
    return n / of_group + n % of_group * s->groups;
}

/* One match by `way` (PEERS: the tree) in µs; negative if it is wrong. */
static double match_once(house *h, uint32_t session, int way, bool known)
{
    volatile uint64_t sum = 0; /* read, so that reading the rows is not left out */
    const shape *s = h->shape;
    const int32_t *shared = h->index->tokens + (size_t)h->ends[session][0] * KV_PAGE_TOKENS,
                  *own = h->index->tokens + ((size_t)h->ends[session][1] + 1) * KV_PAGE_TOKENS -
                         (s->tokens - s->shared);
    uint32_t found = 0, count = s->tokens;
    kv_match m = {0};
    if (!known)
        h->hint = (kv_hint){0};
    uint64_t before = base_now_ns();
    if (way == SHA)
        found = chain_match(&h->sha, sha_step, h->tokens, count);
    else if (way == XXH)
        found = chain_match(&h->xxh, xxh_step, h->tokens, count);
    else if (way == TRIE)
        found = trie_match(&h->trie, h->tokens, count);
    else if (way == READ) {
        sum = bench_read_all(shared, s->shared * sizeof *shared) +
              bench_read_all(own, (s->tokens - s->shared) * sizeof *own);
        found = count;
    } else
        m = kv_index_match_from(h->index, SPACE, &h->hint, h->tokens, count, h->pages, ++h->clock);
    double us = (double)(base_now_ns() - before) / 1e3;
    if (way != PEERS)
        return found == count && (way != READ || sum != 0) ? us : -1;
    bool right =
        m.tokens == count && m.page_count == (count + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS &&
        h->pages[0] == h->ends[session][0] && h->pages[m.page_count - 1] == h->ends[session][1];
    for (uint32_t p = 0; p < m.page_count; p++)
        kv_pool_unref(h->pool, h->pages[p]);
    return right ? us : -1;
}

/* Where this session parts from what is there, each way says so. */
static bool matches_are_exact(house *h)
{
    const shape *s = h->shape;
    for (uint32_t i = 0; i < 32; i++) {
        uint32_t cut = base_rand(5, 1, i).v[0] % s->tokens,
                 session = base_rand(5, 1, i).v[1] % h->trie.sessions;
        fill(h->tokens, s, session, 0, s->tokens);
        h->tokens[cut] = 200001;
        kv_match m = kv_index_match(h->index, SPACE, h->tokens, s->tokens, h->pages, ++h->clock);
        for (uint32_t p = 0; p < m.page_count; p++)
            kv_pool_unref(h->pool, h->pages[p]);
        uint32_t blocks = cut / BLOCK_TOKENS * BLOCK_TOKENS;
        if (m.tokens != cut || chain_match(&h->sha, sha_step, h->tokens, s->tokens) != blocks ||
            chain_match(&h->xxh, xxh_step, h->tokens, s->tokens) != blocks)
            return false;
    }
    return true;
}

static bool bench_match(const shape *s, double read_gbs)
{
    static const char *const names[PEERS] = {"sha256", "xxh3", "trie", "read"};
    house h;
    char name[48], config[160];
    bool right = house_make(&h, s, 64, true);
    if (!right) {
        house_free(&h);
        return wrong("p.match", "no memory for the sessions");
    }
    right = matches_are_exact(&h);
    size_t resident =
        ((size_t)s->groups * s->shared + (size_t)s->sessions * (s->tokens - s->shared)) * 4;
    long llc = sysconf(_SC_LEVEL3_CACHE_SIZE);
    for (int state = 0; state < STATES && right; state++) {
        bool cold = state == COLD;
        samples own = {0};
        bench_peer peers[PEERS] = {0};
        uint64_t drawn = 0;
        for (int r = 0; r < ROUNDS && right; r++)
            for (int k = 0; k <= PEERS && right; k++) {
                int way = (k + r) % (PEERS + 1); /* each is first in turn */
                double us[REPS];
                uint32_t bound = way == TRIE ? h.trie.sessions : s->sessions;
                /* The first one is not counted; it leaves the hint. */
                for (int i = -1; i < REPS && right; i++) {
                    uint32_t session = cold ? base_rand(9, 2, drawn++).v[0] % bound : 0;
                    if (way == TRIE && cold)
                        session = trie_session(s, session);
                    if (cold || i < 0)
                        fill(h.tokens, s, session, 0, s->tokens);
                    double t = match_once(&h, session, way, state == LEDGER && i >= 0);
                    right = t >= 0;
                    if (i >= 0)
                        us[i] = t;
                }
                samples *to = way == PEERS ? &own : &peers[way].s;
                to->v[to->n++] = median_of(us, REPS);
            }
        if (!right)
            break;
        for (int k = 0; k < PEERS; k++)
            peers[k].name = names[k];
        snprintf(name, sizeof name, "p.match.%s.%s", s->name, states[state]);
        snprintf(config, sizeof config,
                 "%u sessions, tree %.2f GB = %.1fx LLC, blocks of %d, trie %u sessions",
                 s->sessions, (double)resident / 1e9,
                 llc > 0 ? (double)resident / (double)llc : 0.0, BLOCK_TOKENS, h.trie.sessions);
        bench_report_beside(name, config, "us", false, &own,
                            state == LEDGER ? 0 : s->tokens * 4.0 / (read_gbs * 1e3),
                            "read 4 B/token", peers, PEERS);
    }
    base_err err = BASE_ERR_INIT;
    if (right && (!kv_index_check(h.index, &err) || !kv_pool_check(h.pool, &err)))
        right = wrong("p.match", err.text);
    house_free(&h);
    return right ? true : wrong("p.match", "a match is not what was listed");
}

/* ---- p.insert, p.branch ---- */

static const shape long_few = {"128K.200", LONG, 200, 200, 0};

/* Hands out every page that is left, lists it and takes it back, as in a server that has run for a
 * while: no page is touched for the first time by what is timed. */
static bool wear(house *h)
{
    uint32_t pages = kv_pool_free_count(h->pool), most = LONG / KV_PAGE_TOKENS;
    bool right = true;
    for (uint32_t n = 0; pages > 0 && right; n++) {
        uint32_t some = pages < most ? pages : most;
        fill(h->tokens, &long_few, 1000000 + n, 0, some * KV_PAGE_TOKENS);
        right = settle(h, SPACE + 1, some * KV_PAGE_TOKENS, NULL);
        pages -= some;
    }
    kv_index_drop(h->index, SPACE + 1);
    return right;
}

static bool bench_insert(void)
{
    house h;
    samples own = {0};
    bench_peer peers[2] = {{.name = "sha256"}, {.name = "xxh3"}};
    uint32_t count = LONG + TURN_TOKENS, turn_pages = (count + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS,
             kept = LONG / KV_PAGE_TOKENS;
    bool right = house_make(&h, &long_few, 64 * 200, true) && wear(&h);
    for (int r = 0; r < ROUNDS && right; r++) {
        double us[3][REPS];
        for (int i = 0; i < REPS && right; i++) {
            uint32_t session = (uint32_t)(r * REPS + i);
            fill(h.tokens, &long_few, session, 0, count);
            uint64_t owner = ++h.clock;
            kv_hint hint = {0};
            kv_match m =
                kv_index_match_from(h.index, SPACE, &hint, h.tokens, LONG, h.pages, h.clock);
            right = m.tokens == LONG;
            for (uint32_t p = kept; p < turn_pages && right; p++) {
                uint32_t left = count - p * KV_PAGE_TOKENS;
                h.pages[p] = kv_pool_alloc(h.pool, owner);
                right = h.pages[p] != KV_PAGE_NONE;
                if (right)
                    kv_pool_set_filled(h.pool, h.pages[p], owner,
                                       left < KV_PAGE_TOKENS ? left : KV_PAGE_TOKENS);
            }
            if (!right)
                break;
            uint64_t before = base_now_ns();
            right = kv_index_insert_from(h.index, SPACE, &hint, h.tokens, count, h.pages, h.clock);
            us[0][i] = (double)(base_now_ns() - before) / 1e3;
            for (uint32_t p = 0; p < turn_pages; p++) {
                if (p >= kept)
                    kv_pool_release(h.pool, h.pages[p], owner);
                kv_pool_unref(h.pool, h.pages[p]);
            }
            right = right && kv_index_peek(h.index, SPACE, h.tokens, count) == count;
            /* The peers keep the hash of what is known and hash the turn alone, too. */
            for (int way = 0; way < 2; way++) {
                before = base_now_ns();
                chain_put(way == SHA ? &h.sha : &h.xxh, way == SHA ? sha_step : xxh_step,
                          (chain){{(uint8_t)session}}, h.tokens, LONG, count);
                us[1 + way][i] = (double)(base_now_ns() - before) / 1e3;
            }
        }
        own.v[own.n++] = median_of(us[0], REPS);
        for (int way = 0; way < 2; way++)
            peers[way].s.v[peers[way].s.n++] = median_of(us[1 + way], REPS);
    }
    base_err err = BASE_ERR_INIT;
    right = right && kv_index_check(h.index, &err) && kv_pool_check(h.pool, &err);
    if (right)
        bench_report_beside("p.insert", "2,200 tokens in 18 pages behind 128K known ones", "us",
                            false, &own, TURN_US + PAGE_US * (turn_pages - kept),
                            "2 us a turn and 50 ns a page", peers, 2);
    house_free(&h);
    return right ? true : wrong("p.insert", "what was listed is not found");
}

static bool bench_branch(double read_gbs)
{
    house h;
    samples whole = {0}, insert = {0};
    bool right = house_make(&h, &long_few, 4096, false) && wear(&h);
    double mean = 0;
    for (int r = 0; r < ROUNDS && right; r++) {
        double us[REPS], insert_us[REPS];
        for (int i = 0; i < REPS && right; i++) {
            base_rand4 d = base_rand(3, (uint64_t)r, (uint64_t)i);
            uint32_t cut = 1 + d.v[0] % (LONG - 1), session = d.v[1] % long_few.sessions;
            fill(h.tokens, &long_few, session, 0, cut);
            for (uint32_t k = 0; k < 16; k++)
                h.tokens[cut + k] = 200001 + r * REPS + i;
            uint64_t before = base_now_ns();
            right = settle(&h, SPACE, cut + 16, &insert_us[i]);
            us[i] = (double)(base_now_ns() - before) / 1e3;
            mean += (double)cut / (ROUNDS * REPS);
            right = right && kv_index_peek(h.index, SPACE, h.tokens, cut + 16) == cut + 16;
        }
        whole.v[whole.n++] = median_of(us, REPS);
        insert.v[insert.n++] = median_of(insert_us, REPS);
    }
    base_err err = BASE_ERR_INIT;
    right = right && kv_index_check(h.index, &err) && kv_pool_check(h.pool, &err);
    if (right) {
        bench_report("p.branch",
                     "fork at any token of 128K: match, one or two pages, insert with split, "
                     "references back",
                     "us", false, &whole, mean * 4.0 / (read_gbs * 1e3), "read 4 B/token");
        bench_report("p.branch.insert", "the insert of p.branch by the match's hint", "us", false,
                     &insert, TURN_US + PAGE_US, "2 us a turn and 50 ns a page");
    }
    house_free(&h);
    return right ? true : wrong("p.branch", "a fork is not found");
}

/* ---- p.evict ---- */

static const shape many = {"4K.32K", 4096, 32768, 32768, 0}; /* 1,048,576 pages */

static bool bench_evict(bool by_value)
{
    house h;
    samples own = {0};
    bool right = house_make(&h, &many, 0, false);
    double most = 0;
    if (right && by_value)
        kv_index_set_policy(h.index, KV_POLICY_VALUE, 16); /* ranks anew every fifth call */
    for (int r = 0; r < ROUNDS && right; r++) {
        double ns[REPS];
        for (int i = 0; i < REPS && right; i++) {
            uint32_t had = kv_pool_free_count(h.pool), want = had + 1000;
            uint64_t before = base_now_ns();
            uint32_t freed = kv_index_evict(h.index, want, ++h.clock);
            ns[i] = (double)(base_now_ns() - before) / 1000;
            most = ns[i] > most ? ns[i] : most;
            right = freed == 1000 && kv_pool_free_count(h.pool) == want;
        }
        own.v[own.n++] = median_of(ns, REPS);
    }
    /* The oldest sessions went, the newest are whole. */
    if (right) {
        fill(h.tokens, &many, 0, 0, many.tokens);
        right = kv_index_peek(h.index, SPACE, h.tokens, many.tokens) < 16; /* of chance */
        fill(h.tokens, &many, many.sessions - 1, 0, many.tokens);
        right = right && kv_index_peek(h.index, SPACE, h.tokens, many.tokens) == many.tokens;
    }
    char config[128];
    snprintf(config, sizeof config,
             "1,000 at a time of 1,048,576 listed, 32,768 sessions; longest call %.0f us", most);
    if (right)
        bench_report(by_value ? "p.evict.value" : "p.evict", config, "ns/page", false, &own,
                     PAGE_US * 1e3, "50 ns a page");
    house_free(&h);
    return right ? true : wrong("p.evict", "the wrong pages went");
}

bool bench_cache(double read_gbs)
{
    bool right = true;
    sha_ctx = EVP_MD_CTX_new();
    sha_md = EVP_MD_fetch(NULL, "SHA256", NULL);
    if (sha_ctx == NULL || sha_md == NULL)
        return wrong("p.match", "OpenSSL has no SHA-256");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        bool wanted = false;
        for (int k = 0; k < STATES; k++) {
            char name[48];
            snprintf(name, sizeof name, "p.match.%s.%s", shapes[i].name, states[k]);
            wanted |= bench_wanted(name);
        }
        if (wanted)
            right &= bench_match(&shapes[i], read_gbs);
    }
    if (bench_wanted("p.insert"))
        right &= bench_insert();
    if (bench_wanted("p.branch"))
        right &= bench_branch(read_gbs);
    if (bench_wanted("p.evict"))
        right &= bench_evict(false);
    if (bench_wanted("p.evict.value"))
        right &= bench_evict(true);
    EVP_MD_free(sha_md);
    EVP_MD_CTX_free(sha_ctx);
    return right;
}
