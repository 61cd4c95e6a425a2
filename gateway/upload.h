/* gw_uploads: bodies of `…/append` on their way, prefilled as they arrive.
 *
 * libh2o gives a request to its handler when the body is whole; over HTTP/1.1 the server shows what
 * has come of it before (gw_arrival). Here such a request is recognised by its head, its key,
 * session and call are looked up by a worker, and from then on what comes is handed to append.h,
 * which runs the model over it. None of this decides anything: the request is checked and its text
 * taken when it is whole, and a client that leaves before has appended nothing. Thread: the loop's;
 * the look-up is a worker's. */
#pragma once
#include "gateway/app.h"

/* For gw_server_options; ctx is the gw_app. */
void *gw_upload_arriving(void *ctx, const gw_arrival *arrival, void *upload);
void gw_upload_arrived(void *ctx, void *upload);
