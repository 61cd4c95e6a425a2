/* response_compact: items of type "compaction": a summary that stands for the turns before it.
 *
 * The vendor says that its encrypted_content is opaque. Here it is the summary's text, sealed for
 * the tenant: a client carries it and cannot read or change it, nothing of it is stored, and it
 * works after a restart. In the prompt it is a user's message that says what it is. */
#pragma once
#include "gateway/responses_item.h"

/* Adds what an item stands for to the list. One that was changed or is another tenant's is refused
 * (400 invalid_encrypted_content, naming the field); another server's says to the model that
 * something is missing. Worker. */
base_code gw_compaction_read(gw_item_list *list, const json_t *item, const char *path,
                             base_err *err);
/* Whether a user's message is what a compaction became in an earlier prompt. */
bool gw_compaction_wrote(eng_text text);
