/* What chat.c (render), chat_decode.c (the decoder's states), chat_tree.c (argument values) and
 * chat_schema.c (their types) share. */
#pragma once
#include "engine/chat.h"

#define CHAT_NS "]<]minimax[>["
#define CHAT_THINK "<mm:think>"
#define CHAT_THINK_END "</mm:think>"

typedef enum chat_special {
    CHAT_BEGIN,     /* begin of document */
    CHAT_TURN,      /* begin of turn */
    CHAT_END,       /* end of turn */
    CHAT_SEPARATOR, /* NS: stands before every structural tag */
    CHAT_CALL,
    CHAT_CALL_CLOSE,
    CHAT_REASON,
    CHAT_REASON_CLOSE,
    CHAT_SPECIALS,
} chat_special;

struct eng_codec {
    const eng_tok *tok;
    char *identity;
    eng_thinking thinking; /* never DEFAULT */
    int32_t id[CHAT_SPECIALS];
    char digest[33];
};

/* ---- types of arguments (chat_schema.c) ---- */

enum {
    CHAT_NULL = 1,
    CHAT_BOOLEAN = 2,
    CHAT_INTEGER = 4,
    CHAT_NUMBER = 8,
    CHAT_STRING = 16,
    CHAT_ARRAY = 32,
    CHAT_OBJECT = 64,
};

/* The JSON schema of one function's parameters, read as far as it is asked about. A node is one
 * schema; -1 stands for "no schema", and every question may be asked of it. Where memory runs out
 * it says nothing, and chat_schema_failed is true. */
typedef struct chat_schema chat_schema;

/* `parameters` is JSON text, borrowed; the root is node 0. NULL if memory is used up. */
chat_schema *chat_schema_create(eng_text parameters);
void chat_schema_destroy(chat_schema *schema);      /* NULL is fine */
bool chat_schema_failed(const chat_schema *schema); /* NULL has not */
/* The types it allows, 0 if it does not say. */
uint8_t chat_schema_kinds(chat_schema *schema, int32_t node);
/* The schema of a member; `declared` (may be NULL) tells whether `properties` names it. */
int32_t chat_schema_member(chat_schema *schema, int32_t node, const char *name, size_t length,
                           bool *declared);
int32_t chat_schema_items(chat_schema *schema, int32_t node);
/* Appends a leaf's text as a JSON value of the narrowest type that the schema allows and the text
 * has, a string otherwise. */
void chat_schema_convert(chat_schema *schema, int32_t node, base_buf *out, const char *text,
                         size_t length);

/* Appends bytes as a JSON string; what is no UTF-8 becomes U+FFFD. */
void chat_json_string(base_buf *out, const char *text, size_t length);
/* Compares a raw JSON string with bytes. */
bool chat_json_is(const char *raw, size_t raw_length, const char *text, size_t length);
/* The raw value of a member of a JSON object; absent (data NULL) if there is none or the text is no
 * object. */
eng_text chat_json_member(eng_text object, const char *name, size_t length);

/* ---- values made of tags (chat_tree.c) ---- */

/* The value of one parameter while its tags arrive: objects as child tags, lists as `item` tags or
 * repeated ones. */
typedef struct chat_tree chat_tree;

chat_tree *chat_tree_create(void);
void chat_tree_destroy(chat_tree *tree); /* NULL is fine */
/* Begins a value; `schema` is borrowed until the next begin. */
void chat_tree_begin(chat_tree *tree, chat_schema *schema, int32_t node, const char *name,
                     size_t length);
/* Begins another value of the same parameter: it becomes a list. */
void chat_tree_again(chat_tree *tree);
void chat_tree_text(chat_tree *tree, const char *text, size_t length);
typedef enum chat_tree_result {
    CHAT_TREE_TAKEN,
    CHAT_TREE_CLOSED, /* the parameter's own closing tag */
    CHAT_TREE_ABOVE,  /* an opening tag that cannot be inside: the parameter was not closed */
} chat_tree_result;
chat_tree_result chat_tree_open(chat_tree *tree, const char *name, size_t length);
chat_tree_result chat_tree_close(chat_tree *tree, const char *name, size_t length);
/* True if the same tag coming again would make a list of it: its type allows one and no `item` was
 * seen. */
bool chat_tree_may_repeat(chat_tree *tree);
/* Appends the JSON value. */
void chat_tree_write(chat_tree *tree, base_buf *out);
bool chat_tree_failed(const chat_tree *tree);
