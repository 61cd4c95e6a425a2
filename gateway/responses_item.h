/* responses_item: what Responses clients send as `input`, read into the gateway's own items.
 *
 * On the wire an assistant's turn is several items: reasoning, messages, calls. Neighbours of that
 * kind become one eng_item, which is what the ledger knows a turn by. Kinds that this gateway does
 * not know are left out: clients keep items of hosted tools in their history. Thread: worker. */
#pragma once
#include "gateway/turn.h"

typedef struct gw_sealed {
    eng_text text;
    uint32_t at; /* index in `input` */
} gw_sealed;

typedef struct gw_item_list {
    gw_turn *turn;
    eng_item *items;
    eng_text *ids;     /* which call a result answers */
    gw_sealed *sealed; /* runs that came with an assistant's reasoning */
    uint32_t count, capacity;
    uint32_t at;    /* index in `input` of the item that is read */
    bool open;      /* the last item is an assistant's and may grow */
    json_t *stored; /* trees of items from the ledger, which texts point into; the owner's */
} gw_item_list;

/* A string or an array. Fails with the field's path below `path`. */
base_code gw_items_read(gw_item_list *list, const json_t *input, const char *path, base_err *err);
/* One item of an array, at `path`. */
base_code gw_items_read_one(gw_item_list *list, const json_t *item, const char *path,
                            base_err *err);
/* An item as the ledger keeps it. */
base_code gw_items_add_stored(gw_item_list *list, const char *json, base_err *err);
/* A system message, ahead of or between the others. */
base_code gw_items_add_system(gw_item_list *list, eng_text text, base_err *err);
