/* Tenants and keys: who gets in, with which header, as whom. */
#include <criterion/criterion.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/ledger.h"
#include "gateway/tenant.h"

static char directory[64];
static gw_ledger *ledger;
static gw_tenants *tenants;

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static void open_all(void)
{
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_ledger_open(&ledger, &(gw_ledger_options){.path = directory}, &err), BASE_OK,
                 "%s", err.text);
    cr_assert_eq(gw_tenants_create(&tenants, ledger, &err), BASE_OK, "%s", err.text);
}

static void close_all(void)
{
    gw_tenants_destroy(tenants);
    gw_ledger_close(ledger);
}

static void begin(void)
{
    strcpy(directory, "/tmp/whimbrel-tenant-XXXXXX");
    cr_assert_not_null(mkdtemp(directory));
    open_all();
}

static void end(void)
{
    close_all();
    nftw(directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

TestSuite(tenant, .init = begin, .fini = end, .timeout = 30);

static gw_auth as(const char *authorization, const char *api_key, gw_identity *out)
{
    gw_identity identity;
    return gw_tenants_authenticate(tenants, out ? out : &identity, authorization, api_key,
                                   "192.0.2.1", GW_SCOPE_INFER);
}

static const char key[] = "KEY-of-sixteen-or-more";

static void add(const char *text, const char *tenant, uint32_t scopes)
{
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_tenants_add(tenants, text, tenant, NULL, NULL, "label", scopes, &err), BASE_OK,
                 "%s", err.text);
}

Test(tenant, without_keys_loopback_is_the_tenant_default)
{
    static const struct {
        const char *remote;
        gw_auth auth;
    } rows[] = {{"127.0.0.1", GW_AUTH_OK},
                {"127.9.9.9", GW_AUTH_OK},
                {"::1", GW_AUTH_OK},
                {"::ffff:127.0.0.1", GW_AUTH_OK},
                {"10.0.0.1", GW_AUTH_NOT_LOCAL},
                {"::ffff:10.0.0.1", GW_AUTH_NOT_LOCAL},
                {"", GW_AUTH_NOT_LOCAL},
                {"localhost", GW_AUTH_NOT_LOCAL},
                {"2001:db8::1", GW_AUTH_NOT_LOCAL}};
    cr_assert_not(gw_tenants_keyed(tenants));
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        gw_identity identity;
        cr_expect_eq(gw_tenants_authenticate(tenants, &identity, "Bearer made-up", NULL,
                                             rows[i].remote, GW_SCOPE_ALL),
                     rows[i].auth, "%s", rows[i].remote);
        cr_expect_str_eq(identity.name, "default");
    }
}

Test(tenant, headers_and_keys)
{
    add(key, "acme", GW_SCOPE_INFER);
    cr_assert(gw_tenants_keyed(tenants));
    static const struct {
        const char *authorization, *api_key;
        gw_auth auth;
    } rows[] = {
        {"Bearer KEY-of-sixteen-or-more", NULL, GW_AUTH_OK},
        {"bearer KEY-of-sixteen-or-more", NULL, GW_AUTH_OK},
        {"BEARER   KEY-of-sixteen-or-more ", NULL, GW_AUTH_OK},
        {NULL, "KEY-of-sixteen-or-more", GW_AUTH_OK},
        {"Bearer KEY-of-sixteen-or-more", "KEY-of-sixteen-or-more", GW_AUTH_OK},
        {"Bearer KEY-of-sixteen-or-more", "KEY-of-sixteen-or-less", GW_AUTH_WRONG},
        {"Bearer KEY-of-sixteen-or-morex", NULL, GW_AUTH_WRONG},
        {"Bearer KEY-of-sixteen-or-mor", NULL, GW_AUTH_WRONG},
        {"Bearer key-of-sixteen-or-more", NULL, GW_AUTH_WRONG},
        {"Bearer ", NULL, GW_AUTH_WRONG},
        {"Bearer", NULL, GW_AUTH_WRONG},
        {"", NULL, GW_AUTH_WRONG},
        {"Basic KEY-of-sixteen-or-more", NULL, GW_AUTH_WRONG},
        {"BearerKEY-of-sixteen-or-more", NULL, GW_AUTH_WRONG},
        {"Bearer KEY-of-sixteen-or-more, Bearer KEY-of-sixteen-or-more", NULL, GW_AUTH_WRONG},
        {NULL, "", GW_AUTH_WRONG},
        {NULL, NULL, GW_AUTH_MISSING},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        gw_identity identity;
        cr_expect_eq(as(rows[i].authorization, rows[i].api_key, &identity), rows[i].auth, "row %zu",
                     i);
        if (rows[i].auth == GW_AUTH_OK)
            cr_expect_str_eq(identity.name, "acme");
    }
    char longer[4096];
    memset(longer, 'k', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = '\0';
    cr_assert_eq(as(NULL, longer, NULL), GW_AUTH_WRONG);
    cr_assert_eq(gw_tenants_authenticate(tenants, &(gw_identity){0}, NULL, NULL, "127.0.0.1",
                                         GW_SCOPE_INFER),
                 GW_AUTH_MISSING, "with keys loopback is as good as any");
}

Test(tenant, scopes_are_asked_for)
{
    add(key, "acme", GW_SCOPE_INFER);
    gw_identity identity;
    cr_assert_eq(
        gw_tenants_authenticate(tenants, &identity, NULL, key, "192.0.2.1", GW_SCOPE_ADMIN),
        GW_AUTH_SCOPE);
    cr_assert_eq(gw_tenants_authenticate(tenants, &identity, NULL, key, "192.0.2.1",
                                         GW_SCOPE_INFER | GW_SCOPE_RAW),
                 GW_AUTH_SCOPE);
    uint32_t scopes;
    cr_assert_eq(gw_scopes_parse(&scopes, "inference,admin", NULL), BASE_OK);
    cr_assert_eq(scopes, GW_SCOPE_INFER | GW_SCOPE_ADMIN);
    cr_assert_eq(gw_scopes_parse(&scopes, "all", NULL), BASE_OK);
    cr_assert_eq(scopes, GW_SCOPE_ALL);
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_scopes_parse(&scopes, "inference,root", &err), BASE_INVALID);
    cr_assert_not_null(strstr(err.text, "root"));
    cr_assert_eq(gw_scopes_parse(&scopes, "", NULL), BASE_INVALID);
}

Test(tenant, tenants_and_salts_survive_a_restart)
{
    char minted[GW_KEY_TEXT_MAX + 1];
    cr_assert_eq(gw_tenants_mint(tenants, minted, "acme", NULL, NULL, "l", GW_SCOPE_ALL, NULL),
                 BASE_OK);
    add(key, "globex", GW_SCOPE_INFER);
    gw_identity one, two, again;
    cr_assert_eq(as(NULL, minted, &one), GW_AUTH_OK);
    cr_assert_eq(as(NULL, key, &two), GW_AUTH_OK);
    cr_assert_neq(one.tenant, two.tenant);
    cr_assert_neq(one.salt, two.salt);
    cr_assert_neq(one.salt, 0);
    close_all();
    open_all();
    cr_assert_eq(as(NULL, minted, &again), GW_AUTH_OK);
    cr_assert_eq(again.tenant, one.tenant);
    cr_assert_eq(again.salt, one.salt);
    cr_assert_eq(again.key, one.key);
}

Test(tenant, a_key_is_stored_as_its_hash_only)
{
    add(key, "acme", GW_SCOPE_INFER);
    close_all();
    char command[128];
    snprintf(command, sizeof(command), "grep -rq KEY-of %s", directory);
    cr_assert_neq(system(command), 0);
    open_all();
}

Test(tenant, revoked_keys_open_nothing_and_cannot_be_added_again)
{
    add(key, "acme", GW_SCOPE_INFER);
    add("another-key-of-sixteen", "acme", GW_SCOPE_INFER);
    gw_key_info info[4];
    cr_assert_eq(gw_tenants_keys(tenants, info, 4), 2);
    cr_assert_str_eq(info[0].tenant_name, "acme");
    cr_assert_eq(strlen(info[0].hint), 8);
    cr_assert_eq(gw_tenants_revoke(tenants, info[0].key, false, NULL), BASE_OK);
    cr_assert_eq(gw_tenants_revoke(tenants, info[0].key, false, NULL), BASE_NOT_FOUND);
    cr_assert_eq(as(NULL, key, NULL), GW_AUTH_WRONG);
    cr_assert_eq(gw_tenants_add(tenants, key, "acme", NULL, NULL, "l", GW_SCOPE_INFER, NULL),
                 BASE_CONFLICT);
    close_all();
    open_all();
    cr_assert_eq(as(NULL, key, NULL), GW_AUTH_WRONG);
    cr_assert_eq(as(NULL, "another-key-of-sixteen", NULL), GW_AUTH_OK);
}

Test(tenant, a_sharing_group_has_one_namespace)
{
    gw_identity one, two, other;
    base_err err = BASE_ERR_INIT;
    add(key, "one", GW_SCOPE_INFER);
    cr_assert_eq(as(NULL, key, &other), GW_AUTH_OK);
    cr_assert_eq(gw_tenants_add(tenants, "key-two-of-sixteen", "two", "team", NULL, "", 1, NULL),
                 BASE_OK);
    cr_assert_eq(gw_tenants_add(tenants, "key-one-of-sixteen", "one", "team", NULL, "", 1, NULL),
                 BASE_OK);
    for (int round = 0; round < 2; round++) {
        cr_assert_eq(as(NULL, key, &one), GW_AUTH_OK);
        cr_assert_eq(as(NULL, "key-two-of-sixteen", &two), GW_AUTH_OK);
        cr_assert_eq(one.salt, two.salt);
        cr_assert_neq(one.salt, other.salt);
        cr_assert_neq(one.tenant, two.tenant);
        close_all();
        open_all();
    }
    gw_key_info info[4];
    cr_assert_eq(gw_tenants_keys(tenants, info, 4), 3);
    cr_assert_str_eq(info[0].group, "team");
    cr_assert_eq(gw_tenants_add(tenants, "key-six-of-sixteen", "one", "others", NULL, "", 1, &err),
                 BASE_CONFLICT);
    cr_assert_str_eq(err.param, "group");
    cr_assert_eq(gw_tenants_add(tenants, "key-six-of-sixteen", "one", "a b", NULL, "", 1, NULL),
                 BASE_INVALID);
    cr_assert_eq(as(NULL, "key-six-of-sixteen", NULL), GW_AUTH_WRONG);
}

Test(tenant, the_last_admin_key_stays_while_there_are_others)
{
    add(key, "acme", GW_SCOPE_INFER);
    add("first-admin-of-sixteen", "acme", GW_SCOPE_ADMIN);
    add("second-admin-of-sixteen", "acme", GW_SCOPE_ALL);
    gw_key_info info[4];
    base_err err = BASE_ERR_INIT;
    cr_assert_eq(gw_tenants_keys(tenants, info, 4), 3);
    cr_assert_eq(gw_tenants_revoke(tenants, info[1].key, false, NULL), BASE_OK);
    cr_assert_eq(gw_tenants_revoke(tenants, info[2].key, false, &err), BASE_CONFLICT);
    cr_assert_not_null(strstr(err.text, "force=true"), "%s", err.text);
    cr_assert_eq(as(NULL, "second-admin-of-sixteen", NULL), GW_AUTH_OK);
    /* Alone it may go: loopback is open again then. */
    cr_assert_eq(gw_tenants_revoke(tenants, info[0].key, false, NULL), BASE_OK);
    cr_assert_eq(gw_tenants_revoke(tenants, info[2].key, false, NULL), BASE_OK);
    cr_assert_not(gw_tenants_keyed(tenants));
}

Test(tenant, the_last_admin_key_goes_by_force)
{
    add(key, "acme", GW_SCOPE_INFER);
    add("first-admin-of-sixteen", "acme", GW_SCOPE_ADMIN);
    gw_key_info info[4];
    cr_assert_eq(gw_tenants_keys(tenants, info, 4), 2);
    cr_assert_eq(gw_tenants_revoke(tenants, info[1].key, true, NULL), BASE_OK);
    cr_assert_eq(as(NULL, key, NULL), GW_AUTH_OK);
}

Test(tenant, bad_names_and_keys_are_refused_by_field)
{
    static const struct {
        const char *key, *tenant;
        uint32_t scopes;
        const char *param;
    } rows[] = {{"short", "acme", 1, "key"},
                {"sixteen chars or more with blanks", "acme", 1, "key"},
                {"control-\n-character-key", "acme", 1, "key"},
                {"KEY-of-sixteen-or-more", "", 1, "tenant"},
                {"KEY-of-sixteen-or-more", "a b", 1, "tenant"},
                {"KEY-of-sixteen-or-more", "a/../b", 1, "tenant"},
                {"KEY-of-sixteen-or-more", "acme", 0, "scopes"},
                {"KEY-of-sixteen-or-more", "acme", 64, "scopes"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        base_err err = BASE_ERR_INIT;
        cr_expect_eq(gw_tenants_add(tenants, rows[i].key, rows[i].tenant, NULL, NULL, "l",
                                    rows[i].scopes, &err),
                     BASE_INVALID, "row %zu", i);
        cr_expect_str_eq(err.param, rows[i].param);
    }
}

static void count_row(void *ctx, const char *name, const gw_usage_totals *totals)
{
    (void)name;
    *(uint64_t *)ctx += totals->turns;
}

Test(tenant, accounts_add_up)
{
    gw_account *account = gw_tenants_account(tenants);
    eng_usage usage = {.prompt_tokens = 10, .cached_tokens = 4, .output_tokens = 3};
    for (int64_t i = 0; i < GW_ACCOUNT_MAX + 100; i++) {
        char name[32];
        snprintf(name, sizeof(name), "t%lld", (long long)i);
        gw_account_add(account, i + 1, name, &usage, i % 2 ? GW_OUTCOME_CANCELLED : GW_OUTCOME_DONE,
                       i % 3 != 0);
    }
    gw_usage_totals total = gw_account_total(account);
    cr_assert_eq(total.turns, GW_ACCOUNT_MAX + 100);
    cr_assert_eq(total.prompt_tokens, 10 * (GW_ACCOUNT_MAX + 100));
    cr_assert_eq(total.cancelled, (GW_ACCOUNT_MAX + 100) / 2);
    uint64_t sum = 0;
    gw_account_each(account, count_row, &sum);
    cr_assert_eq(sum, total.turns, "the rest shares one row");
}
