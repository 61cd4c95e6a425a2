#include "gateway/openapi.h"

#include <jansson.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/admin_call.h"
#include "openapi_admin.h"
#include "openapi_documents.h"

#define COUNT (sizeof openapi_documents / sizeof *openapi_documents)

/* The first document gives version and title; paths and schemas of the others are added. */
static char *merge(void)
{
    json_t *whole = json_loads(openapi_documents[0], 0, NULL);
    json_t *schemas = json_object_get(json_object_get(whole, "components"), "schemas");
    json_t *paths = json_object_get(whole, "paths"), *tags = json_object_get(whole, "tags");
    bool good = whole != NULL;
    json_object_set_new(json_object_get(whole, "info"), "version", json_string(WHIMBREL_VERSION));
    for (size_t i = 1; good && i < COUNT; i++) {
        json_t *one = json_loads(openapi_documents[i], 0, NULL);
        json_t *more = json_object_get(json_object_get(one, "components"), "schemas");
        size_t wanted = json_object_size(schemas) + json_object_size(more);
        size_t wanted_paths =
            json_object_size(paths) + json_object_size(json_object_get(one, "paths"));
        good = one && !json_object_update(schemas, more) &&
               !json_object_update(paths, json_object_get(one, "paths")) &&
               !json_array_extend(tags, json_object_get(one, "tags")) &&
               json_object_size(schemas) == wanted && json_object_size(paths) == wanted_paths;
        json_decref(one);
    }
    char *text = good ? json_dumps(whole, JSON_COMPACT) : NULL;
    json_decref(whole);
    return text;
}

static char *merged;

static void make(void)
{
    merged = merge();
}

const char *gw_openapi_text(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make);
    return merged;
}

void gw_openapi_get(gw_app *app, gw_exchange *exchange)
{
    static const gw_header headers[] = {{"content-type", "application/json"}};
    const char *text = gw_openapi_text();
    (void)app;
    if (text)
        gw_respond(exchange, 200, headers, 1, text, strlen(text));
    else
        gw_error_respond(exchange, 503, "server_error", NULL, NULL, "no memory for the document");
}

void gw_openapi_admin_get(gw_app *app, gw_exchange *exchange)
{
    gw_identity identity;
    base_buf out;
    if (!gw_admin_admit(app, exchange, &identity))
        return;
    base_buf_init(&out, 0);
    base_buf_puts(&out, openapi_admin[0]);
    gw_admin_respond(exchange, &out);
    base_buf_deinit(&out);
}
