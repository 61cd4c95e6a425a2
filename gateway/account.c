/* gw_account: see the header. A linear table: tenants are few, and one is added up once a turn. */
#include "gateway/account.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "gateway/tenant.h"

typedef struct row {
    int64_t tenant;
    char name[GW_TENANT_NAME_MAX + 1];
    gw_usage_totals totals;
} row;

struct gw_account {
    pthread_mutex_t mutex; /* guards what follows */
    uint32_t count;
    gw_usage_totals total;
    row rows[GW_ACCOUNT_MAX]; /* the last one is "other" once it is used */
};

base_code gw_account_create(gw_account **out, base_err *err)
{
    gw_account *account = calloc(1, sizeof(*account));
    if (!account)
        return base_fail(err, BASE_NOMEM, "no memory for the accounts");
    pthread_mutex_init(&account->mutex, NULL);
    *out = account;
    return BASE_OK;
}

void gw_account_destroy(gw_account *account)
{
    if (!account)
        return;
    pthread_mutex_destroy(&account->mutex);
    free(account);
}

static void add(gw_usage_totals *totals, const eng_usage *usage, gw_outcome outcome, bool stored)
{
    totals->turns++;
    totals->cancelled += outcome == GW_OUTCOME_CANCELLED;
    totals->failed += outcome == GW_OUTCOME_FAILED;
    totals->unstored += !stored;
    totals->prompt_tokens += usage->prompt_tokens;
    totals->cached_tokens += usage->cached_tokens;
    totals->restored_tokens += usage->restored_tokens;
    totals->output_tokens += usage->output_tokens;
    totals->reasoning_tokens += usage->reasoning_tokens;
    totals->drafted += usage->drafted;
    totals->accepted += usage->accepted;
    totals->queue_ns += usage->queue_ns;
    totals->prefill_ns += usage->prefill_ns;
    totals->decode_ns += usage->decode_ns;
}

void gw_account_add(gw_account *account, int64_t tenant, const char *name, const eng_usage *usage,
                    gw_outcome outcome, bool stored)
{
    pthread_mutex_lock(&account->mutex);
    uint32_t i = 0;
    while (i < account->count && account->rows[i].tenant != tenant)
        i++;
    if (i >= GW_ACCOUNT_MAX - 1)
        i = GW_ACCOUNT_MAX - 1;
    if (i >= account->count) {
        bool other = i == GW_ACCOUNT_MAX - 1;
        account->count = i + 1;
        account->rows[i].tenant = other ? -1 : tenant;
        snprintf(account->rows[i].name, sizeof(account->rows[i].name), "%s",
                 other ? "other" : name);
    }
    add(&account->rows[i].totals, usage, outcome, stored);
    add(&account->total, usage, outcome, stored);
    pthread_mutex_unlock(&account->mutex);
}

gw_usage_totals gw_account_total(gw_account *account)
{
    pthread_mutex_lock(&account->mutex);
    gw_usage_totals total = account->total;
    pthread_mutex_unlock(&account->mutex);
    return total;
}

void gw_account_each(gw_account *account,
                     void (*each)(void *ctx, const char *name, const gw_usage_totals *totals),
                     void *ctx)
{
    pthread_mutex_lock(&account->mutex);
    for (uint32_t i = 0; i < account->count; i++)
        each(ctx, account->rows[i].name, &account->rows[i].totals);
    pthread_mutex_unlock(&account->mutex);
}
