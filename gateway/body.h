/* body: a request's JSON, made fit for jansson within bounds, and readers that name the field at
 * fault.
 *
 * jansson refuses things that real clients send, so a linear pass comes first and mends a private
 * copy:
 *   - A lone surrogate escape (JavaScript's JSON.stringify writes one for an emoji that was cut in
 * two, in a tool result for example) becomes U+FFFD: `\ud83d` turns into `\ufffd`, the same six
 * bytes. It must not kill the turn.
 *   - `\u0000` inside a value is kept (JSON_ALLOW_NUL) and reaches the tokenizer; in a member's
 * name it is refused, as C strings could not hold it. Names, ids and models with NUL are refused by
 * the readers.
 *   - An integer beyond 64 bits or a number beyond doubles becomes a nearby double in jansson's
 * tree; what is given back or told to the model (tools, schemas) is taken from the text, where its
 * numbers keep every digit.
 *   - Bytes that are not UTF-8 are refused: nobody can say what was meant, and the model's text
 * would not be what was sent.
 *   - Duplicate member names: the last one wins, as in JavaScript and Python.
 * Depth, the number of values (a tree of ten million zeros would cost 300 MB) and the length of a
 * number (jansson copies it byte by byte and strtod reads every digit: seconds for 30 MB) are
 * bounded before anything is built. Thread: any; on a worker for bodies of real size. */
#pragma once
#include <jansson.h>

#include "engine/base/arena.h"
#include "engine/base/buf.h"
#include "engine/base/err.h"
#include "engine/engine.h"

#define GW_BODY_VALUES_MAX 2000000 /* about 100 MB of tree at worst */
#define GW_BODY_NUMBER_MAX 1024    /* characters; 17 digits tell any double */

/* The next quote or backslash from `at` on, or `length`. */
size_t gw_next_mark(const char *text, size_t at, size_t length);
/* The value of four hex digits, -1 if they are none. */
int gw_hex4(const char *text);
/* Checks and mends `text` in place. BASE_INVALID, with the byte's position. */
base_code gw_body_mend(char *text, size_t length, uint32_t depth_max, base_err *err);
/* The raw bytes of a member of the top-level object, after gw_body_mend; the last one of that name.
 * False if it is absent. */
bool gw_body_member(eng_text *out, const char *text, size_t length, const char *name);
/* Parses what gw_body_mend passed, or what was written from such; out-of-range numbers are nearby
 * doubles in the tree, which is the caller's (json_decref). text[length] is 0. BASE_INVALID if it
 * is not one JSON object. */
base_code gw_body_parse(json_t **out, const char *text, size_t length, base_err *err);
/* Appends JSON that is well formed, without the white space between its tokens. */
void gw_put_raw(base_buf *out, eng_text json);

/* Readers: absent and null leave `out` as it is and return BASE_OK. A wrong type or a value out of
 * bounds is BASE_INVALID with the path in err->param. `path` is the path of the object, "" at the
 * top. `seen`, if not NULL, is set when a value was read. */
base_code gw_read_bool(bool *out, bool *seen, const json_t *object, const char *path,
                       const char *name, base_err *err);
base_code gw_read_int(int64_t *out, bool *seen, const json_t *object, const char *path,
                      const char *name, int64_t min, int64_t max, base_err *err);
base_code gw_read_number(float *out, bool *seen, const json_t *object, const char *path,
                         const char *name, double min, double max, base_err *err);
/* Borrowed from the tree; may hold NUL. */
base_code gw_read_text(eng_text *out, const json_t *object, const char *path, const char *name,
                       base_err *err);
/* A name: no NUL, at most `max` bytes; terminated. */
base_code gw_read_name(const char **out, const json_t *object, const char *path, const char *name,
                       size_t max, base_err *err);
/* NULL if absent or null. */
base_code gw_read_object(json_t **out, const json_t *object, const char *path, const char *name,
                         base_err *err);
base_code gw_read_array(json_t **out, const json_t *object, const char *path, const char *name,
                        base_err *err);
/* "expected a string at `path.name`, got an array", for types that the readers do not cover. */
base_code gw_wrong_type(const char *path, const char *name, const char *expected, const json_t *got,
                        base_err *err);
/* The template links results to calls by order alone, clients by id; so the results after an
 * assistant turn are put into the order of its calls. Results that answer none of them stay behind
 * in their own order. */
void gw_order_results(eng_item *items, eng_text *ids, size_t count);
