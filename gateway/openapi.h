/* openapi: the description of the public endpoints, GET /openapi.json.
 *
 * One document for each group of endpoints stands in config/openapi/ and in the program; they are
 * merged at the first call. Thread: any; the text is constant. */
#pragma once
#include "gateway/app.h"
#include "gateway/server.h"

/* The merged document; NULL if memory is used up or two documents describe the same thing. */
const char *gw_openapi_text(void);
void gw_openapi_get(gw_app *app, gw_exchange *exchange);
/* GET /admin/v1/openapi.json: the operator's calls, a document of their own. */
void gw_openapi_admin_get(gw_app *app, gw_exchange *exchange);
