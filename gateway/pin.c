#include "gateway/pin.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/ledger.h"

typedef struct pin {
    int64_t tenant;
    gw_id session;
    uint32_t pages;
    uint64_t until_ns;
} pin;

struct gw_pins {
    gw_pins_options options;
    pthread_mutex_t mutex; /* guards all below */
    pin *list;             /* in no order */
    uint32_t count, capacity;
    uint64_t refused;
};

base_code gw_pins_create(gw_pins **out, const gw_pins_options *options, base_err *err)
{
    gw_pins *pins = calloc(1, sizeof *pins);
    if (!pins)
        return base_fail(err, BASE_NOMEM, "no memory for pins");
    pins->options = *options;
    pthread_mutex_init(&pins->mutex, NULL);
    *out = pins;
    return BASE_OK;
}

void gw_pins_destroy(gw_pins *pins)
{
    if (!pins)
        return;
    pthread_mutex_destroy(&pins->mutex);
    free(pins->list);
    free(pins);
}

/* Under the mutex. */
static void expire(gw_pins *pins, uint64_t now_ns)
{
    for (uint32_t i = pins->count; i-- > 0;)
        if (pins->list[i].until_ns <= now_ns)
            pins->list[i] = pins->list[--pins->count];
}

static bool is_of(const pin *p, int64_t tenant, const char *session)
{
    return p->tenant == tenant && strcmp(p->session.text, session) == 0;
}

/* Under the mutex; NULL without memory. */
static pin *place_for(gw_pins *pins, int64_t tenant, const char *session)
{
    for (uint32_t i = 0; i < pins->count; i++)
        if (is_of(&pins->list[i], tenant, session))
            return &pins->list[i];
    if (pins->count == pins->capacity) {
        uint32_t wanted = pins->capacity ? 2 * pins->capacity : 16;
        pin *more = realloc(pins->list, wanted * sizeof *more);
        if (!more)
            return NULL;
        pins->list = more;
        pins->capacity = wanted;
    }
    return &pins->list[pins->count++];
}

static base_code check(gw_pins *pins, int64_t tenant, const char *session, uint32_t pages,
                       base_err *err)
{
    uint64_t all = pages, own = pages;
    for (uint32_t i = 0; i < pins->count; i++) {
        const pin *p = &pins->list[i];
        if (is_of(p, tenant, session))
            continue;
        all += p->pages;
        own += p->tenant == tenant ? p->pages : 0;
    }
    const struct {
        const char *key;
        uint64_t pages;
        uint32_t percent;
    } bounds[] = {
        {"sessions.pin_tenant_percent_max", own, pins->options.tenant_percent_max},
        {"sessions.pin_percent_max", all, pins->options.percent_max},
    };
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) {
        uint64_t max = (uint64_t)pins->options.page_count * bounds[i].percent / 100;
        if (bounds[i].pages > max)
            return base_fail_param(err, BASE_FULL, "seconds",
                                   "with the session's %u pages %llu would be pinned, the limit "
                                   "is %llu (%s)",
                                   pages, (unsigned long long)bounds[i].pages,
                                   (unsigned long long)max, bounds[i].key);
    }
    return BASE_OK;
}

base_code gw_pin_put(gw_pins *pins, int64_t tenant, const char *session, uint32_t pages,
                     uint64_t until_ns, uint64_t now_ns, base_err *err)
{
    pthread_mutex_lock(&pins->mutex);
    expire(pins, now_ns);
    base_code code = check(pins, tenant, session, pages, err);
    pin *p = code ? NULL : place_for(pins, tenant, session);
    if (p) {
        *p = (pin){.tenant = tenant, .pages = pages, .until_ns = until_ns};
        snprintf(p->session.text, sizeof p->session.text, "%s", session);
    } else if (!code) {
        code = base_fail(err, BASE_NOMEM, "no memory for a pin");
    }
    pins->refused += code == BASE_FULL;
    pthread_mutex_unlock(&pins->mutex);
    return code;
}

void gw_pin_drop(gw_pins *pins, int64_t tenant, const char *session)
{
    pthread_mutex_lock(&pins->mutex);
    for (uint32_t i = pins->count; i-- > 0;)
        if (is_of(&pins->list[i], tenant, session))
            pins->list[i] = pins->list[--pins->count];
    pthread_mutex_unlock(&pins->mutex);
}

gw_pins_stats gw_pins_get_stats(gw_pins *pins, uint64_t now_ns)
{
    pthread_mutex_lock(&pins->mutex);
    expire(pins, now_ns);
    gw_pins_stats stats = {.sessions = pins->count, .refused = pins->refused};
    for (uint32_t i = 0; i < pins->count; i++)
        stats.pages += pins->list[i].pages;
    pthread_mutex_unlock(&pins->mutex);
    return stats;
}
