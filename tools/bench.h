/* bench: what the parts of whimbrel-bench share. A part measures in rounds, verifies its results
 * and reports; a wrong result prints no time. Thread: main. */
#pragma once
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/engine.h"

#define BENCH_SAMPLES_MAX 64

typedef struct samples {
    double v[BENCH_SAMPLES_MAX];
    int n;
} samples;

/* Another algorithm, measured in the same rounds. */
typedef struct bench_peer {
    const char *name;
    samples s;
} bench_peer;

/* One row: the median of `s` beside the best round and the spread. `limit` 0: none; `higher`:
 * larger is better. */
void bench_report(const char *bench, const char *config, const char *unit, bool higher, samples *s,
                  double limit, const char *basis);
/* As bench_report, with peers and the ratios of medians. */
void bench_report_beside(const char *bench, const char *config, const char *unit, bool higher,
                         samples *s, double limit, const char *basis, bench_peer *peers,
                         int peer_count);
/* True if the command line asks for rows whose name begins so. */
bool bench_wanted(const char *name);

/* Reads `bytes` (a multiple of 256, aligned to 64) as fast as one thread can; returns what keeps
 * the compiler from leaving that out. */
uint64_t bench_read_all(const void *at, size_t bytes);

/* ---- engines ---- */

#define BENCH_OUTPUT_MAX 1024

/* One request on its way; kept by the caller until it is done. */
typedef struct bench_run {
    int32_t tokens[BENCH_OUTPUT_MAX];
    uint64_t at_ns[BENCH_OUTPUT_MAX]; /* when each came */
    uint32_t count;
    eng_usage usage;
    bool done;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} bench_run;

/* The command line's model and threads, no drafts, events into bench_run. */
eng_options bench_engine_options(void);
eng_engine *bench_engine_start(const eng_options *options); /* ends the program if it cannot */
void bench_submit(eng_engine *engine, bench_run *r, eng_request request); /* likewise */
void bench_wait(bench_run *r);

/* What the machine can do at best: [0] one thread, [1] all of them. */
typedef struct bench_limits {
    uint32_t threads;
    double read_gbs[2], fma_gflops[2];
} bench_limits;

/* Weight bytes that one token's forward pass reads, and its multiply-adds (attention over the
 * context left out). */
struct eng_model_config;
double bench_token_bytes(const struct eng_model_config *config, double *macs);

/* ---- parts ---- */

/* c.gemv, c.gemm, c.pool, c.model.big: the cpu backend alone. False if a result was wrong. */
bool bench_kernels(const bench_limits *limits);

/* e.spec, e.host, e.idle, e.mixed: drafts that pay, the host's share of a step, and prefill beside
 * a stream. False if drafted tokens differ. */
bool bench_engine(void);
/* p.match, p.insert, p.evict, p.branch: the prefix tree beside hash chains and a token trie.
 * `read_gbs`: what one thread reads. False if a result was wrong. */
bool bench_cache(double read_gbs);
/* g.commit: the end of a turn in the ledger. False if a turn was not stored or the database is
 * wrong afterwards. */
bool bench_commit(void);
/* p.restart, p.itl: the disk tier under an engine. False if an answer differs. */
bool bench_restart(const char *model, uint32_t threads);
/* s.*: masks, compiling, and a model under a grammar. False if an answer was not whole. */
bool bench_grammar(const char *model, uint32_t threads);
/* g.ledger: what the ledger costs a turn with a long history. False if a result was wrong. */
bool bench_gateway(void);
/* g.h2.raw, g.sse.tok, g.flood, g.mem: the transport, and the program with the null engine.
 * False if an answer is missing. */
bool bench_wire(const char *program, const char *model);
/* p.tier: a restore from the disk tier beside plain O_DIRECT reads. False if a result was wrong. */
bool bench_store(void);
