/* ledger_conversation: conversations and their items, as the Conversations API shows them.
 *
 * An item is the JSON that its client gets, with its id. Items of a turn on a conversation are
 * added in the turn's own transaction, so a conversation never holds half a turn. Deleting a
 * conversation deletes its items; the turns that ran on it stay responses of their own. Thread: any
 * that may block; others' conversations are unknown (BASE_NOT_FOUND). */
#pragma once
#include "gateway/ledger.h"

typedef struct gw_conversation_row {
    int64_t row, created_ms;
    const char *metadata; /* JSON, NULL if none */
} gw_conversation_row;

typedef struct gw_conversation_item {
    const char *id, *json;
} gw_conversation_item;

base_code gw_conversation_create(gw_ledger *ledger, int64_t tenant, const char *id,
                                 const char *metadata, int64_t created_ms,
                                 const gw_conversation_item *items, uint32_t count, base_err *err);
base_code gw_conversation_read(gw_ledger *ledger, gw_conversation_row *out, int64_t tenant,
                               const char *id, base_arena *arena, base_err *err);
base_code gw_conversation_update(gw_ledger *ledger, int64_t tenant, const char *id,
                                 const char *metadata, base_err *err);
base_code gw_conversation_delete(gw_ledger *ledger, int64_t tenant, const char *id, base_err *err);

base_code gw_conversation_add(gw_ledger *ledger, int64_t tenant, const char *id,
                              const gw_conversation_item *items, uint32_t count, base_err *err);
/* At most `limit` items (0: all) behind the item `after` (NULL: from the beginning of the order),
 * in the arena. An `after` that is not there is BASE_INVALID. */
base_code gw_conversation_list(gw_ledger *ledger, gw_conversation_item **out, uint32_t *count,
                               bool *more, int64_t tenant, const char *id, const char *after,
                               uint32_t limit, bool oldest_first, base_arena *arena, base_err *err);
base_code gw_conversation_item_read(gw_ledger *ledger, char **json, int64_t tenant, const char *id,
                                    const char *item, base_arena *arena, base_err *err);
base_code gw_conversation_item_delete(gw_ledger *ledger, int64_t tenant, const char *id,
                                      const char *item, base_err *err);
