/* dashboard: see the header. */
#include "gateway/dashboard.h"

#include <string.h>

#include "gateway/api_error.h"

struct embedded_file {
    const char *path, *type, *etag; /* the tag with its quotes */
    const char *bytes;
    size_t length;
};
#include "dashboard_files.h"

#define FILE_COUNT (sizeof dashboard_files / sizeof *dashboard_files)
#define ROOT "/dashboard"

/* Texts of clients and models are shown here, so nothing that is not one of our own files may run:
 * no inline script, no inline style, no other host, no frame around it. */
static const char policy[] = "default-src 'self'; base-uri 'none'; form-action 'self'; "
                             "frame-ancestors 'none'; object-src 'none'";

/* Of a list of tags, or *; weak ones are compared like strong ones (RFC 9110, 13.1.2). */
static bool names_tag(const char *list, const char *etag)
{
    return list && (strcmp(list, "*") == 0 || strstr(list, etag));
}

void gw_dashboard_get(gw_app *app, gw_exchange *exchange)
{
    const char *path = gw_exchange_path(exchange) + strlen(ROOT);
    (void)app;
    if (*path == '\0') { /* relative names need the slash */
        static const gw_header to[] = {{"location", ROOT "/"}};
        gw_respond(exchange, 302, to, 1, "", 0);
        return;
    }
    path++;
    if (*path == '\0')
        path = "index.html";
    for (size_t i = 0; i < FILE_COUNT; i++) {
        const struct embedded_file *file = &dashboard_files[i];
        if (strcmp(file->path, path) != 0)
            continue;
        const gw_header headers[] = {
            {"etag", file->etag},
            {"cache-control", "no-cache"}, /* asked for each time, sent once */
            {"content-security-policy", policy},
            {"x-content-type-options", "nosniff"},
            {"referrer-policy", "no-referrer"},
            {"content-type", file->type},
        };
        size_t count = sizeof headers / sizeof *headers;
        if (names_tag(gw_exchange_header(exchange, "if-none-match"), file->etag))
            gw_respond(exchange, 304, headers, count - 1, "", 0);
        else
            gw_respond(exchange, 200, headers, count, file->bytes, file->length);
        return;
    }
    gw_error_not_found(exchange);
}
