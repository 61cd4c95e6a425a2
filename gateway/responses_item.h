/* responses_item: what Responses clients send as `input`, read into the gateway's own items.
 *
 * On the wire an assistant's turn is several items: reasoning, messages, calls. Neighbours of that
 * kind become one eng_item, which is what the ledger knows a turn by. Kinds that this gateway does
 * not know are left out: clients keep items of hosted tools in their history. Thread: worker. */
#pragma once
#include "gateway/turn.h"

typedef struct gw_sealed {
    eng_text text;
    const char *field; /* "input", and the index there */
    uint32_t at;
    bool kept;      /* it came with a conversation's item: of no use if it is damaged */
    bool compacted; /* the item's text stands for others before it */
} gw_sealed;

typedef struct gw_item_list {
    gw_turn *turn;
    eng_item *items;
    eng_text *ids;     /* which call a result answers */
    gw_sealed *sealed; /* runs that came with an assistant's reasoning, what was compacted */
    uint32_t count, capacity;
    const char *field; /* that is read, and the index of the item there */
    uint32_t at;
    bool open;      /* the last item is an assistant's and may grow */
    bool kept;      /* a conversation's items are read */
    json_t *stored; /* trees of items from the ledger, which texts point into; the owner's */
} gw_item_list;

/* A string or an array. Fails with the field's path below `path`. */
base_code gw_items_read(gw_item_list *list, const json_t *input, const char *path, base_err *err);
/* One item of an array, at `path`. */
base_code gw_items_read_one(gw_item_list *list, const json_t *item, const char *path,
                            base_err *err);
/* An item as the ledger keeps it. */
base_code gw_items_add_stored(gw_item_list *list, const char *json, base_err *err);
/* A message of that role, ahead of or between the others. */
base_code gw_items_add(gw_item_list *list, eng_role role, eng_text text, base_err *err);
/* The item that a reference names: of a stored response's output or of a conversation, as its
 * client has it; the tree is the caller's. 404 item_not_found at `path`. */
base_code gw_items_resolve(gw_turn *turn, json_t **out, const char *id, const char *path,
                           base_err *err);
