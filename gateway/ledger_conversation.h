/* ledger_conversation: conversations and their items, as the Conversations API shows them.
 *
 * An item is the JSON that its client gets, with its id. Items of a turn on a conversation are
 * added in the turn's own transaction, so a conversation never holds half a turn. Deleting a
 * conversation deletes its items and the turns that ran on it, with their tokens and pages; what a
 * kept turn elsewhere builds on stays as long as that one, and is no longer found. An item that is
 * deleted alone leaves the conversation, not the turns that saw it. Thread: any that may block;
 * others' conversations are unknown (BASE_NOT_FOUND). */
#pragma once
#include "gateway/ledger.h"

typedef struct gw_conversation_row {
    int64_t row, created_ms;
    const char *metadata; /* JSON, NULL if none */
} gw_conversation_row;

typedef struct gw_conversation_item {
    const char *id, *json;
} gw_conversation_item;

typedef struct gw_conversation_new {
    int64_t tenant, created_ms;
    const char *id, *metadata;
    const gw_conversation_item *items;
    uint32_t count;
    uint32_t count_max; /* conversations of the tenant; BASE_FULL past it */
} gw_conversation_new;

base_code gw_conversation_create(gw_ledger *ledger, const gw_conversation_new *fresh,
                                 base_err *err);
base_code gw_conversation_read(gw_ledger *ledger, gw_conversation_row *out, int64_t tenant,
                               const char *id, base_arena *arena, base_err *err);
base_code gw_conversation_update(gw_ledger *ledger, int64_t tenant, const char *id,
                                 const char *metadata, base_err *err);
/* Nothing of it is in any file once this returned. */
base_code gw_conversation_delete(gw_ledger *ledger, int64_t tenant, const char *id, base_err *err);

/* BASE_FULL if there were more than `items_max` then. */
base_code gw_conversation_add(gw_ledger *ledger, int64_t tenant, const char *id,
                              const gw_conversation_item *items, uint32_t count, uint32_t items_max,
                              base_err *err);

typedef struct gw_conversation_query {
    const char *after;  /* behind the item of this id; NULL: from the beginning of the order */
    uint32_t limit;     /* items of a page; 0: all that there are */
    uint64_t bytes_max; /* a page ends when it holds so many; all of them are BASE_TOO_LONG then */
    bool oldest_first;
} gw_conversation_query;

typedef struct gw_conversation_page {
    gw_conversation_item *items; /* in the arena */
    uint32_t count;
    bool more;
} gw_conversation_page;

/* An `after` that is not there is BASE_INVALID. */
base_code gw_conversation_list(gw_ledger *ledger, gw_conversation_page *out, int64_t tenant,
                               const char *id, const gw_conversation_query *query,
                               base_arena *arena, base_err *err);
base_code gw_conversation_item_read(gw_ledger *ledger, char **json, int64_t tenant, const char *id,
                                    const char *item, base_arena *arena, base_err *err);
/* The newest item of that id in any of the tenant's conversations. */
base_code gw_conversation_item_find(gw_ledger *ledger, char **json, int64_t tenant,
                                    const char *item, base_arena *arena, base_err *err);
base_code gw_conversation_item_delete(gw_ledger *ledger, int64_t tenant, const char *id,
                                      const char *item, base_err *err);
