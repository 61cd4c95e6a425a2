/* engine: prompts in, token events out. The one engine header that the gateway includes.
 *
 * One engine thread owns scheduler, pages and device; it never sees a socket. Requests go in
 * through a bounded mailbox; events come out through the sink, on the engine thread, in order per
 * request. Rendering, tokenizing and decoding are pure functions of immutable tables: any thread
 * may call them. */
#pragma once
#include "engine/base/arena.h"
#include "engine/base/buf.h"
#include "engine/base/err.h"

typedef struct eng_engine eng_engine;

/* ---- conversations ---- */

typedef enum eng_role {
    ENG_ROLE_ROOT,   /* replaces the identity sentence of the system turn */
    ENG_ROLE_SYSTEM, /* system or developer: the developer turn if it is the first message, else a
                        developer turn in place */
    ENG_ROLE_USER,
    ENG_ROLE_ASSISTANT,
    ENG_ROLE_TOOL,
} eng_role;

typedef struct eng_text {
    const char *data; /* UTF-8; need not be terminated. NULL: absent */
    size_t length;
} eng_text;

typedef struct eng_call {
    eng_text id; /* not rendered: order is the only link */
    eng_text name;
    eng_text arguments; /* JSON text of an object; its numbers keep their text */
} eng_call;

typedef struct eng_item {
    eng_role role;
    eng_text text;         /* parts already joined without separator */
    eng_text reasoning;    /* assistant only */
    const eng_call *calls; /* assistant only */
    uint32_t call_count;
    /* Exact tokens of an assistant item that this engine generated: what followed `]~b]ai\n` up to
     * and including the end-of-turn token (or where it was cut; the codec closes it). When set,
     * nothing of the item is rendered but `rest`, which follows the tokens: text that a client
     * returned of a run beyond its last whole token, see eng_run_seen. */
    const int32_t *tokens;
    uint32_t token_count;
    eng_text rest;
} eng_item;

typedef enum eng_thinking {
    ENG_THINK_DEFAULT,
    ENG_THINK_ENABLED,
    ENG_THINK_DISABLED,
    ENG_THINK_ADAPTIVE
} eng_thinking;

typedef struct eng_chat {
    const eng_item *items;
    uint32_t item_count;
    const eng_text *tools; /* JSON text of each function object {name, description, parameters}, as
                              the client wrote it */
    uint32_t tool_count;
    eng_thinking thinking;
    eng_text effort; /* absent: no effort line */
    bool no_generation_prompt;
    bool continue_last; /* the last assistant item is left open for the model to go on */
    /* If not NULL, these tokens stand for all that comes before items[0], an assistant's with
     * `tokens`, and for the beginning of its turn: nothing of that is rendered again. */
    const int32_t *prefix;
    uint32_t prefix_count;
} eng_chat;

typedef struct eng_prompt {
    int32_t *tokens; /* in the arena */
    uint32_t token_count;
    uint32_t *item_end;       /* [item_count] tokens of the prompt up to and including that item */
    bool starts_in_reasoning; /* the generation prompt ends inside reasoning */
    eng_thinking thinking;    /* with the model's default filled in */
} eng_prompt;

/* Renders and tokenizes. Text of clients never becomes a special token. Stops with BASE_TOO_LONG as
 * soon as the count passes `token_max` (0: the context window); the text of the error holds both
 * numbers ("maximum context length is N tokens … you requested M", M exact up to 16 windows).
 * `text`, if not NULL, gets the rendered text. Thread: any. */
base_code eng_render(const eng_engine *engine, eng_prompt *out, const eng_chat *chat,
                     uint32_t token_max, base_buf *text, base_arena *arena, base_err *err);
/* Plain text to tokens in the arena; with `specials`, the text of special tokens becomes their id.
 */
base_code eng_tokenize(const eng_engine *engine, int32_t **tokens, uint32_t *token_count,
                       eng_text text, bool specials, uint32_t token_max, base_arena *arena,
                       base_err *err);
/* Appends the bytes of tokens (may end inside a character). Unknown ids: BASE_INVALID. */
base_code eng_detokenize(const eng_engine *engine, base_buf *out, const int32_t *tokens,
                         uint32_t token_count, base_err *err);

/* How much of a run (as eng_item.tokens) a client has that returns the beginning of its text: the
 * first `*seen` tokens lie wholly inside, `*rest` is what `text` has beyond them (borrowed from
 * it). A text that ends inside the reasoning is `reasoning`, with `text` empty; otherwise the
 * reasoning of the run counts as seen. White space before the run's text is passed over. False if
 * the text is not the beginning of what the run says. Thread: any. */
bool eng_run_seen(const eng_engine *engine, uint32_t *seen, eng_text *rest, const int32_t *tokens,
                  uint32_t token_count, eng_text reasoning, eng_text text);

/* ---- structured output ---- */

typedef enum eng_tool_choice {
    ENG_TOOL_AUTO,
    ENG_TOOL_NONE, /* the token that opens a call block is banned; the prompt keeps its tools, so
                      its cache stays */
    ENG_TOOL_REQUIRED, /* visible output is calls */
    ENG_TOOL_NAMED,    /* and of tool_name alone */
} eng_tool_choice;

typedef struct eng_grammar eng_grammar; /* compiled, immutable, counted by references */

typedef enum eng_format_kind {
    ENG_FORMAT_TEXT,   /* anything */
    ENG_FORMAT_OBJECT, /* any JSON object */
    ENG_FORMAT_SCHEMA, /* text: a JSON Schema */
    ENG_FORMAT_REGEX,  /* text: the whole output matches; ECMAScript without back references and
                          look-around */
    ENG_FORMAT_GBNF,   /* text: llama.cpp's notation */
    ENG_FORMAT_CHOICE, /* one of the choices */
} eng_format_kind;

typedef struct eng_format {
    eng_format_kind kind;
    eng_text text;
    const eng_text *choices;
    uint32_t choice_count;
} eng_format;

/* What the visible output of a turn may be. */
typedef struct eng_output {
    eng_format format;     /* of text that is no call */
    const eng_text *tools; /* as in eng_chat */
    uint32_t tool_count;
    const bool *strict;  /* [tool_count] arguments follow the tool's schema; NULL: none has to */
    const bool *allowed; /* [tool_count] may be called; NULL: all */
    eng_tool_choice tool_choice; /* REQUIRED, NAMED: calls alone */
    eng_text tool_name;
    uint32_t call_max; /* 0: no bound */
    /* [tool_count]; NULL: none. Kind REGEX, GBNF or CHOICE makes the tool a custom one: a call's
     * only argument is the one property of its `parameters`, a text that follows this, whatever
     * `strict` says. TEXT: an ordinary tool. A GBNF grammar may not spell the template's separator;
     * texts of the other kinds that do are left out. */
    const eng_format *inputs;
} eng_output;

/* Compiles it; NULL in `out` if nothing is asked for that free output would not give. Where calls
 * are held to a schema although no one said strict (a tool that is required or named), a schema
 * that cannot be enforced leaves the arguments free. BASE_UNSUPPORTED: a keyword that cannot be
 * enforced; the text names it, err->param is the JSON pointer of its schema, and `tool`, if not
 * NULL, says whose (UINT32_MAX: the format's). BASE_INVALID: not of its kind, or it admits nothing.
 * BASE_TOO_LONG: a limit of compiling. Thread: any. */
base_code eng_output_compile(eng_grammar **out, const eng_output *output, uint32_t *tool,
                             base_err *err);
void eng_grammar_unref(eng_grammar *grammar); /* NULL is fine */

/* ---- requests ---- */

typedef struct eng_bias {
    int32_t token;
    float value; /* added to the logit; -100 or less bans it */
} eng_bias;

typedef struct eng_sampling {
    float temperature;                         /* 0: greedy */
    float top_p;                               /* 1: off */
    uint32_t top_k;                            /* 0: off */
    float min_p;                               /* 0: off */
    float presence_penalty, frequency_penalty; /* over output tokens, OpenAI's definition */
    float repetition_penalty;                  /* over prompt and output, 1: off */
    uint64_t seed;
    const eng_bias *bias;
    uint32_t bias_count;
    uint32_t min_tokens; /* end tokens are banned before */
    bool ignore_eos;
    const int32_t *stop_tokens;
    uint32_t stop_token_count;
    bool logprobs;
    uint32_t top_logprobs; /* 0-20 */
} eng_sampling;

#define ENG_SAMPLING_DEFAULT                                                                       \
    {                                                                                              \
        .temperature = 1, .top_p = 1, .repetition_penalty = 1                                      \
    }
#define ENG_TOP_LOGPROBS_MAX 20

typedef enum eng_parse {
    ENG_PARSE_RAW,  /* all text as ENG_PART_TEXT */
    ENG_PARSE_CHAT, /* reasoning, text and calls apart */
} eng_parse;

#define ENG_PREDICTION_MAX (1u << 20)

typedef struct eng_request {
    uint64_t id; /* caller's, unique while it runs */
    void *user;  /* handed back with every event */
    const int32_t *tokens;
    uint32_t token_count;
    uint64_t space;      /* cache namespace; requests share pages within one only */
    uint32_t max_tokens; /* at least 1; clamped to the window */
    eng_sampling sampling;
    eng_parse parse;
    bool starts_in_reasoning; /* from eng_prompt */
    eng_thinking thinking;    /* from eng_prompt */
    const eng_text *tools;    /* as in eng_chat, for the types of arguments */
    uint32_t tool_count;
    eng_tool_choice tool_choice;
    eng_text tool_name;
    uint32_t call_max;     /* 0: no bound; 1: parallel_tool_calls false */
    const eng_text *stops; /* stop strings, matched in visible text */
    uint32_t stop_count;
    uint64_t deadline_ns; /* base_now_ns clock; 0: none */
    /* The deadline is the client's: what would end past it is not begun. */
    bool deadline_binds;
    /* Whose it is, and how much of the machine's time that one has beside others: 1 (or 0) to
     * 1000. Of one tenant, a smaller priority goes first: -10 to 10. */
    uint64_t tenant;
    uint32_t weight;
    int32_t priority;
    /* Id of a request submitted before or with this one: this one waits until that one has run its
     * prompt, or is over, and others pass it meanwhile; so another answer to the same prompt finds
     * its pages. 0: none. */
    uint64_t follows;
    /* What is visible of the output follows it, from the end of reasoning to the end of the turn;
     * gets a reference. Needs memory of about 10 MB while the request lives. NULL: free. */
    eng_grammar *grammar;
    /* The prompt is run and listed in the cache, nothing is sampled: DONE with ENG_FINISH_STOP and
     * no output. Yields to those that decode, as every prefill does. max_tokens and all that shapes
     * output is ignored. */
    bool prefill_only;
    /* Tokens that the output will likely contain, in order: drafted from where the output agrees
     * with them, so a right guess costs less time and a wrong one changes nothing. Not part of the
     * prompt. At most ENG_PREDICTION_MAX. */
    const int32_t *prediction;
    uint32_t prediction_count;
    /* What only this request's tokens would bring to the disk stays in memory. */
    bool no_disk;
    /* The prompt's own tokens get logprobs too, from the second one on, with sampling.top_logprobs
     * alternatives; STEP events bring them before there is output. They come of the prompt's rows,
     * so those are run whatever the cache has. */
    bool prompt_logprobs;
    /* A hint: nobody goes on from here. What the path has to itself is the first to make room. */
    bool session_over;
} eng_request;

typedef enum eng_part_kind {
    ENG_PART_REASONING,
    ENG_PART_TEXT,
    ENG_PART_CALL_BEGIN, /* text: the function's name, whole */
    ENG_PART_CALL_ARGS,  /* text: a fragment of the arguments' JSON */
    ENG_PART_CALL_END,
} eng_part_kind;

typedef struct eng_part {
    eng_part_kind kind;
    uint32_t call;    /* index of the call within the turn */
    const char *text; /* whole characters of UTF-8 */
    size_t length;
} eng_part;

typedef struct eng_logprob {
    int32_t token;
    float logprob;
    uint32_t top_count;
    int32_t top_token[ENG_TOP_LOGPROBS_MAX];
    float top_logprob[ENG_TOP_LOGPROBS_MAX];
} eng_logprob;

typedef enum eng_finish {
    ENG_FINISH_STOP,   /* end of turn, a stop token or a stop string */
    ENG_FINISH_CALLS,  /* end of turn with at least one whole call */
    ENG_FINISH_LENGTH, /* max_tokens or the window */
    ENG_FINISH_CANCELLED,
    ENG_FINISH_DEADLINE,
    ENG_FINISH_ERROR,
} eng_finish;

typedef struct eng_usage {
    uint32_t prompt_tokens;
    uint32_t cached_tokens;   /* of the prompt, found in memory or on disk */
    uint32_t restored_tokens; /* of the cached ones, read back from disk */
    /* Of the prompt, behind the cached ones: once listed in this process and gone since. In whole
     * pages, from a memory of the pages listed last; what it has forgotten counts as never listed.
     */
    uint32_t evicted_tokens;
    uint32_t output_tokens, reasoning_tokens;
    uint32_t drafted, accepted; /* draft tokens verified, and those of them that were kept */
    uint32_t predicted_accepted, predicted_rejected; /* those of them that came from a prediction */
    uint32_t steps;                                  /* forward passes that made output tokens */
    uint64_t queue_ns, prefill_ns, ttft_ns, decode_ns;
    uint64_t forecast_ns; /* what queue_ns was predicted to be when it was let in */
} eng_usage;

typedef enum eng_event_kind { ENG_EVENT_STARTED, ENG_EVENT_STEP, ENG_EVENT_DONE } eng_event_kind;

/* Everything pointed to is the engine's until the sink's event function returns. */
typedef struct eng_event {
    eng_event_kind kind;
    uint64_t id;
    void *user;
    /* STARTED: prompt_tokens, cached_tokens, restored_tokens, evicted_tokens, queue_ns,
     * forecast_ns; DONE: all */
    eng_usage usage;
    /* STEP and DONE */
    const int32_t *tokens; /* output tokens of this step, exact; the end token included */
    uint32_t token_count;
    const eng_logprob *logprobs; /* [token_count], or NULL */
    /* STEP: the next ones of the prompt, see eng_request */
    const eng_logprob *prompt_logprobs;
    uint32_t prompt_logprob_count;
    const eng_part *parts;
    uint32_t part_count;
    /* DONE */
    eng_finish finish;
    int32_t stop_index;  /* which stop string ended it, or -1 */
    uint32_t run_tokens; /* output tokens that belong to the turn (those before a stop string that
                            are wholly returned) */
    base_err err;        /* ENG_FINISH_ERROR */
} eng_event;

typedef struct eng_sink {
    void (*event)(void *ctx, const eng_event *event);
    void (*flush)(void *ctx); /* after the last event of a step: one wakeup */
    void *ctx;
} eng_sink;

/* ---- the engine ---- */

typedef struct eng_options {
    const char *model;    /* directory, or "random:SHAPE?layers=N&seed=N" */
    const char *draft;    /* directory; NULL: MODEL/dspark if it exists; "": none */
    const char *backend;  /* "auto", "cpu" or a module's name: "cuda", "hip" */
    const char *modules;  /* folder that is searched for modules first; NULL: none */
    const char *variant;  /* cpu: "auto", "ref", "avx2", "avx512" */
    const char *kv;       /* "nvfp4", "fp8", "bf16", "f32" */
    uint32_t threads;     /* 0: one a core */
    uint64_t kv_bytes;    /* bound of page memory */
    uint32_t context_max; /* 0: the model's */
    uint32_t sequences_max, queue_max, step_rows_max, prefill_chunk;
    uint64_t queue_ns_max;   /* who would wait longer is refused; 0: no bound */
    uint32_t tenant_percent; /* of queue_max and queue_ns_max, for one tenant; 0: all of it */
    uint32_t step_ms_target; /* prefill rows beside those that decode are cut so that a step takes
                                about so long; 0: by prefill_chunk alone */
    uint32_t step_stretch_percent; /* and by at most so much longer than one without them; 0: not */
    int32_t draft_tokens; /* 0: off; 1…block: so many of the drafter's; -1: as many as pay, copies
                             of earlier text among them */
    const char *costs;    /* file that keeps the measured times of steps; NULL: none */
    const char *packed;   /* folder that keeps repacked weights; NULL: none */
    uint64_t packed_bytes_max; /* of target or draft; larger ones are not kept */
    bool evict_lru;            /* what was used longest ago goes first; else what is worth least */
    const char
        *disk; /* folder of the disk tier, made if absent (its parent is there); NULL: none */
    uint64_t disk_bytes;                               /* on disk at most */
    uint64_t disk_write_bytes_s, disk_write_bytes_day; /* budgets of writing; 0: none */
    eng_sink sink;
    /* tests; 0 in production */
    uint32_t slow_step_us; /* sleep so long in every step */
    uint32_t slow_row_ns;  /* and so long for each of its rows */
    /* No model is run: answers are a script (null.c), through the same queue, planner, pages,
     * decoder and events. Nothing is drafted, and nothing goes to disk; backend, numerics and
     * fingerprint say "null". */
    bool null;
    /* Every step drafts draft_script[(output index) % count] and on, whatever that is worth. */
    const int32_t *draft_script;
    uint32_t draft_script_count;
    uint32_t disk_retry_ms;            /* pause after a failed write; 0: the store's own */
    uint32_t disk_group_bytes;         /* least that is read at a time; 0: the store's own */
    uint32_t disk_readers;             /* threads that read; 0: the store's own */
    const struct kv_store_io *disk_io; /* the disk's calls; NULL: the system's */
    const struct kn_backend *kernels;  /* instead of `backend`'s; NULL: that */
} eng_options;

typedef struct eng_info {
    const char *name;    /* folder name, or the random shape's */
    const char *backend; /* "cpu-avx512" … */
    const char *kv;
    char fingerprint[33]; /* of the weights: config, tokenizer, template, headers, sizes, ends of
                             tensors */
    char numerics[33];    /* backend and reduction version */
    char template_id[33]; /* of tokenizer and chat template: keys stored token runs */
    uint32_t context_max, vocab, layers, hidden;
    uint64_t weight_bytes, page_bytes;
    uint32_t page_count, page_tokens;
    uint32_t draft_block;  /* 0: no draft */
    eng_thinking thinking; /* default */
} eng_info;

/* Loads, checks and starts the engine thread. Fails with file, key and reason (BASE_FORMAT,
 * BASE_UNSUPPORTED, BASE_IO, BASE_NOMEM; the disk tier's index: BASE_CONFLICT another process has
 * it, BASE_UNSUPPORTED a newer schema, BASE_IO). */
base_code eng_create(eng_engine **out, const eng_options *options, base_err *err);
/* Stops the thread; running requests get DONE with ENG_FINISH_CANCELLED first. */
void eng_destroy(eng_engine *engine); /* NULL is fine */
const eng_info *eng_get_info(const eng_engine *engine);

typedef enum eng_refusal {
    ENG_ADMITTED,
    ENG_REFUSED_COUNT,    /* queue_max requests wait */
    ENG_REFUSED_TIME,     /* it would wait for longer than queue_ns_max */
    ENG_REFUSED_TENANT,   /* its tenant has its part of the queue */
    ENG_REFUSED_DEADLINE, /* it would end past its client's deadline */
    ENG_REFUSALS,
} eng_refusal;

/* What admission found. Times are predictions. */
typedef struct eng_verdict {
    eng_refusal refusal;
    uint64_t wait_ns;  /* in the queue */
    uint64_t work_ns;  /* from there to its end */
    uint64_t retry_ns; /* refused: it may be let in after so long; 0: no wait helps */
} eng_verdict;

/* Copies what it needs but tokens, prediction, tools, stops, bias, stop_tokens and tool_name, which
 * the caller keeps until DONE. BASE_FULL if the queue is full or BASE_TIMEOUT if a deadline that
 * binds cannot be met, BASE_INVALID / BASE_TOO_LONG if the request does not fit; no event follows
 * then. Thread: any. */
base_code eng_submit(eng_engine *engine, const eng_request *request, base_err *err);
/* All of them, in this order, or none. `verdict`, if not NULL, is filled where the code is BASE_OK,
 * BASE_FULL or BASE_TIMEOUT. */
base_code eng_submit_all(eng_engine *engine, const eng_request *requests, uint32_t count,
                         eng_verdict *verdict, base_err *err);
/* The request ends at the next step boundary with ENG_FINISH_CANCELLED, in the queue and in prefill
 * too; unknown ids are ignored. Thread: any. */
void eng_cancel(eng_engine *engine, uint64_t id);
/* How many of these tokens are cached now, in memory or on disk; an estimate, for admission.
 * Thread: any; takes two short locks. */
uint32_t eng_peek_cached(eng_engine *engine, uint64_t space, const int32_t *tokens,
                         uint32_t token_count);

/* An edge of the prefix tree in memory, see kv_edge. */
typedef struct eng_edge {
    uint32_t id, parent; /* parent UINT32_MAX: it begins at the first token */
    uint64_t space;
    uint32_t start, tokens, pages, children;
    bool in_use, pinned;
    uint64_t used_ns; /* base_now_ns clock */
} eng_edge;
/* At most `max` edges, those nearest to the first token first; returns how many. Thread: any; holds
 * a lock that the engine takes at each step, in time that grows with the edges listed. */
uint32_t eng_list_index(eng_engine *engine, eng_edge *out, uint32_t max);

/* The next three wait for a step's border. Thread: any but the engine's and those that must not
 * block; nothing happens once the engine is stopping. */

/* Keeps what is cached of these tokens in memory for so long from now; the longest pin wins, and 0
 * ends them all. */
void eng_pin(eng_engine *engine, uint64_t space, const int32_t *tokens, uint32_t count,
             uint64_t seconds);
/* Removes the rows at and past `kept` on the path of tokens[0..count), with all that follows its
 * end, from memory and disk; branches that leave the path earlier stay. `kept`: what living
 * sessions share. Returns when they are gone from the files, too. A request that still runs on the
 * path lists it again when it ends. BASE_IO: memory is rid of them and they are matched no more,
 * but the disk refused; BASE_CLOSED. */
base_code eng_erase(eng_engine *engine, uint64_t space, const int32_t *tokens, uint32_t count,
                    uint32_t kept, base_err *err);
/* The same for a whole namespace. */
base_code eng_drop(eng_engine *engine, uint64_t space, base_err *err);

typedef struct eng_stats {
    uint64_t requests, finished, cancelled, failed;
    uint64_t prompt_tokens, cached_tokens, restored_tokens;
    uint64_t output_tokens, reasoning_tokens, drafted, accepted;
    uint64_t forced_tokens;                 /* of the output, that a grammar left one way for */
    uint64_t copied, copied_accepted;       /* drafted and accepted: copies of earlier text */
    uint64_t predicted, predicted_accepted; /* the same of predictions */
    uint64_t steps, step_rows, busy_ns;
    uint64_t ahead_layers, ahead_tokens; /* run while pages before them were read; of those, kept */
    uint64_t forward_ns, draft_ns, sample_ns; /* parts of busy_ns */
    uint32_t queued, running, prefilling;
    uint64_t refused[ENG_REFUSALS]; /* requests; [ENG_ADMITTED]: let in */
    uint64_t queued_ns;             /* machine time that is predicted for those that wait */
    uint32_t queued_tenants;        /* whose they are */
    uint64_t forecast_level;        /* 1000: steps take what the learned tables say */
    uint32_t pages_free, pages_total, index_nodes, index_pages;
    uint64_t evicted_pages;
    /* the disk tier */
    uint64_t disk_records, disk_bytes, disk_queued; /* there now; waiting to be written */
    uint64_t disk_written_bytes, disk_read_bytes;
    uint64_t
        disk_refused; /* records that found no room in queue, budget or bound, or the tier paused */
    uint64_t disk_dropped;              /* records that went for room or were damaged */
    uint64_t disk_corrupt, disk_errors; /* damaged records; calls that failed, a full disk's too */
    bool disk_open, disk_paused;        /* paused: nothing is written for now */
    bool disk_full;                     /* paused, and the last failure was a full disk */
} eng_stats;
eng_stats eng_get_stats(
    const eng_engine *engine); /* thread: any; each counter is exact, the set is not a snapshot */
/* True if no sequence runs and every page is free or in the index, each once. For tests. Thread:
 * any. */
bool eng_check(eng_engine *engine, base_err *err);

/* ---- replay ---- */

/* The events of an answer once more, from its output tokens and the lengths of its steps, byte for
 * byte as the engine gave them out: what a stored stream is resumed from. Of `request`, as it was
 * submitted, this reads parse, starts_in_reasoning, thinking, tools, stops and the sampling's
 * stop_tokens and ignore_eos. The sink gets one STEP a step (tokens past the steps' sum are one
 * more; a step of length 0 is none) and, if the answer has `ended`, one without tokens for what was
 * still held back; it may be called with no parts. BASE_INVALID: a token is none of the model's;
 * BASE_NOMEM. Thread: any; the sink's function runs on it, its flush is not called. */
base_code eng_replay(const eng_engine *engine, const eng_request *request, const int32_t *tokens,
                     uint32_t token_count, const uint32_t *steps, uint32_t step_count, bool ended,
                     const eng_sink *sink, base_err *err);
