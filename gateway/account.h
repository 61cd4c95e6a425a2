/* gw_account: usage totals per tenant, the one place where they are added up.
 *
 * A turn is added once, when its engine work is over, whatever its end; so the sums agree with the
 * usage objects that clients saw. Bounded to GW_ACCOUNT_MAX tenants; later ones share one row named
 * "other". Thread: any; one mutex. */
#pragma once
#include "engine/engine.h"

typedef struct gw_account gw_account;

#define GW_ACCOUNT_MAX 1024

typedef struct gw_usage_totals {
    uint64_t turns, cancelled, failed, unstored;
    uint64_t prompt_tokens, cached_tokens, restored_tokens, output_tokens, reasoning_tokens;
    uint64_t drafted, accepted;
    uint64_t queue_ns, prefill_ns, decode_ns;
} gw_usage_totals;

typedef enum gw_outcome { GW_OUTCOME_DONE, GW_OUTCOME_CANCELLED, GW_OUTCOME_FAILED } gw_outcome;

base_code gw_account_create(gw_account **out, base_err *err);
void gw_account_destroy(gw_account *account); /* NULL is fine */
/* `name` is copied when the tenant is new. */
void gw_account_add(gw_account *account, int64_t tenant, const char *name, const eng_usage *usage,
                    gw_outcome outcome, bool stored);
gw_usage_totals gw_account_total(gw_account *account);
/* Calls `row` for every tenant, with the mutex held: it must not call back. */
void gw_account_each(gw_account *account,
                     void (*row)(void *ctx, const char *name, const gw_usage_totals *totals),
                     void *ctx);
