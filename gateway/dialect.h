/* dialect: what the dialects share: readers of a request's fields on a worker, writers of records
 * on the loop.
 *
 * Readers follow body.h: absent and null leave things as they are, what is wrong is BASE_INVALID
 * (or BASE_UNSUPPORTED) with the field's path in err->param. Unless it says otherwise a reader
 * takes turn->json and writes the turn's plan; texts point into the tree or the arena and live as
 * long as the turn. */
#pragma once
#include "engine/base/json.h"
#include "gateway/body.h"
#include "gateway/turn.h"

#define GW_PATH_BYTES 96              /* of a field's path; base_err keeps 47 of them */
#define GW_NAME_BYTES_MAX 256         /* of names, ids and enumerations in a body */
#define GW_TOOL_NAME_MAX 128          /* characters */
#define GW_REPLACEMENT "\xEF\xBF\xBD" /* U+FFFD */

/* Returns from the caller with the code of a call that failed. */
#define GW_TRY(call)                                                                               \
    do {                                                                                           \
        base_code code_ = (call);                                                                  \
        if (code_)                                                                                 \
            return code_;                                                                          \
    } while (0)

/* ---- errors and texts ---- */

base_code gw_no_memory(base_err *err);
base_code gw_unsupported(base_err *err, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void gw_name_path(char out[GW_PATH_BYTES], const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* For `%.*s`: the whole characters among the first `max` bytes of a client's text. */
int gw_shown(const char *text, size_t max);
eng_text gw_text_of(const char *text);        /* NULL: absent */
eng_text gw_text_of_json(const json_t *text); /* "" if it is not a string */
/* A buffer's bytes in the turn's arena, terminated; frees the buffer in any case. */
base_code gw_keep(gw_turn *turn, eng_text *out, base_buf *buf, base_err *err);

/* ---- the body ---- */

/* The raw text of the array of that name, copied: the body goes before the turn. "[]" if there is
 * none. */
base_code gw_keep_raw(gw_turn *turn, eng_text *out, const char *name, base_err *err);
/* Parses the body into turn->json and reads `model`, which must be there. */
base_code gw_parse_body(gw_turn *turn, base_err *err);
/* Elements of a raw array, one after the other. */
void gw_raw_begin(base_json *array, eng_text raw);
eng_text gw_raw_next(base_json *array);
/* The object that holds an engine's own field: the body, or the `extra_body` that a client
 * forwarded as it stood. */
const json_t *gw_holder(const gw_turn *turn, const char *name);

/* ---- items ---- */

/* A string, or parts whose texts are joined without separator, as the template joins them; absent
 * and null are "". Parts that are not text are refused. `path` names `content` itself. */
base_code gw_read_content(gw_turn *turn, eng_text *out, const json_t *content, const char *path,
                          base_err *err);
/* A custom tool's input is free text; in the prompt it reads like a call with one argument. */
base_code gw_custom_arguments(gw_turn *turn, eng_text *out, eng_text input, base_err *err);
/* Arguments are rendered as parameters, so they must be an object; "" and null become the empty
 * one. True if a call of a turn's items has others; an item that the ledger gave tokens for is not
 * rendered and may hold what it likes. For `check`. */
bool gw_bad_arguments(gw_turn *turn, uint32_t *item, uint32_t *call);

/* ---- tools ---- */

/* How a dialect writes a tool. */
typedef struct gw_tool_form {
    const char *inner;  /* member that holds the function; NULL: the tool itself does */
    const char *schema; /* member of the parameters */
    bool strict;        /* other kinds of tools are refused; else they are left out of the prompt */
    bool custom;        /* those of type "custom" are custom tools, see call.h */
} gw_tool_form;

/* `raw` is the text of the array: the schemas' numbers and the order of their members must reach
 * the prompt as the client wrote them. Without `inner` a tool becomes a function object whose parts
 * stand in the order in which clients of the form with it send them, so that a session may change
 * its dialect and keep its cache. */
base_code gw_read_tools(gw_turn *turn, const gw_tool_form *form, eng_text raw, base_err *err);
/* tool_choice and parallel_tool_calls in OpenAI's forms, once turn->json holds the tools. A choice
 * of a tool that is left out of the prompt, if such are, is none. */
base_code gw_read_tool_choice(gw_turn *turn, const gw_tool_form *form, base_err *err);
/* Makes it the request's tool_name. */
base_code gw_find_tool(gw_turn *turn, const gw_tool_form *form, const char *name, const char *param,
                       base_err *err);
/* none, auto, required (or any). */
base_code gw_read_tool_mode(gw_turn *turn, const char *mode, const char *param, base_err *err);
/* allowed_tools {mode, tools}: the prompt keeps all tools, so that its cached prefix stays; the
 * others cannot be called. One allowed tool that is required becomes a named choice. */
base_code gw_read_allowed_tools(gw_turn *turn, const gw_tool_form *form, const json_t *choice,
                                base_err *err);

/* ---- the other fields ---- */

/* temperature, top_p, top_k, seed. */
base_code gw_read_sampling_basic(gw_turn *turn, base_err *err);
/* Those, penalties, min_p, min_tokens, ignore_eos, stop_token_ids, logit_bias, stop and
 * include_stop_str_in_output. */
base_code gw_read_sampling(gw_turn *turn, base_err *err);
/* A string or an array of at most `max` strings. */
base_code gw_read_stops(gw_turn *turn, const char *name, uint32_t max, base_err *err);
/* Token ids of a JSON array, in the arena. */
base_code gw_read_tokens(gw_turn *turn, int32_t **out, uint32_t *count, const json_t *list,
                         const char *name, base_err *err);
/* A bound of the output, at least 1, into request.max_tokens, which stays if it is absent. */
base_code gw_read_limit(gw_turn *turn, const char *name, bool *seen, base_err *err);
/* The levels of effort that a model knows. An unknown one is a hint that nobody understands and is
 * ignored, so that no client text lands in the system turn. NULL is fine. */
void gw_set_effort(gw_turn *turn, const char *effort);
/* The same, and `none` and `minimal` mean no thinking; the others wake a model that does not think
 * unless it is asked to. */
void gw_set_effort_or_none(gw_turn *turn, const char *effort);
/* A map of strings within the vendor's bounds, as JSON. */
base_code gw_read_metadata(gw_turn *turn, base_err *err);
/* The session's label: session_id, else the header's name (there already), else prompt_cache_key,
 * which is as good a guess. And cache_salt. */
base_code gw_read_label(gw_turn *turn, base_err *err);
/* prediction: a text, whose tokens are tried as drafts. */
base_code gw_read_prediction(gw_turn *turn, base_err *err);
/* Strings that are read for their type alone. */
base_code gw_read_hints(gw_turn *turn, const char *const *names, size_t count, base_err *err);

/* ---- writing ---- */

void gw_put_string(base_buf *out, const char *data, size_t length); /* NULL data is "" */
void gw_put_text(base_buf *out, const base_buf *text);
void gw_put_ids(base_buf *out, const int32_t *tokens, uint32_t count); /* `[1,2]` */
/* `"id":…,"object":…,"created":…,"model":…,"system_fingerprint":…` */
void gw_put_head(const gw_turn *turn, base_buf *out, const char *object);
/* JSON has no infinity; the vendor writes -9999.0 for what is out of reach. */
double gw_shown_logprob(float logprob);
/* `,"tool_calls":[…]` in the chat dialect's form; nothing without calls, as several clients test
 * for the key. */
void gw_put_calls(base_buf *out, const gw_turn *turn);
/* `,"type":…,"function":{…}` of one of them. */
void gw_put_call_body(base_buf *out, const gw_turn_call *call);
/* A call of one of the ledger's items as the client got it: it is a custom tool's if it says so or
 * `tools` does, the client's list, NULL: none. */
void gw_put_made_call(base_buf *out, const json_t *made, const json_t *tools);
/* For gw_commit.told, what turns that said the same do not share: the ids of the answer's calls,
 * and which are custom tools'. For `ending`. */
void gw_tell_calls(gw_turn *turn);
/* True if the answer has a whole call. */
bool gw_turn_called(const gw_turn *turn);
/* One record, whole; a failed buffer makes the turn lossy instead. */
void gw_write_record(gw_turn *turn, const base_buf *record);
/* The end of streams of OpenAI's older dialects. */
void gw_write_done(gw_turn *turn);
/* A comment, which resets the idle timers of sockets. */
void gw_write_comment(gw_turn *turn);
/* An error as a whole answer or, in a stream, as a record without event name that ends it: half an
 * answer must not look whole. `record` is scratch. */
void gw_fail_plain(gw_turn *turn, base_buf *record, const gw_error_row *row, const char *param,
                   const char *message);

/* ---- lists ---- */

void gw_percent_decode(char *text); /* in place */
/* A parameter of a query, percent-decoded and cut to the buffer; false if it is absent. */
bool gw_query_value(const char *query, const char *name, char *out, size_t size);

typedef struct gw_page {
    char after[128]; /* "": from the beginning */
    uint32_t limit;  /* 1 to 100 */
    bool oldest_first;
} gw_page;
/* after, limit (20), order (desc). */
base_code gw_page_read(gw_page *out, const char *query, base_err *err);
/* `{"object":"list","data":[…],"first_id","last_id","has_more"}` of a list with the oldest first.
 */
base_code gw_page_put(const gw_page *page, base_buf *out, const json_t *list, base_err *err);
