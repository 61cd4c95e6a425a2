/* gw_tls: the TLS context of the listener: TLS 1.2 and 1.3, ALPN h2 and http/1.1. */
#pragma once
#include <openssl/ssl.h>

#include "engine/base/err.h"

/* `cert` is a PEM file with the chain, leaf first; `key` its private key. If `client_ca` is not "",
 * clients must show a certificate that one of those in that PEM file signed. BASE_IO or BASE_FORMAT
 * name the file. Thread: any. */
base_code gw_tls_create(SSL_CTX **out, const char *cert, const char *key, const char *client_ca,
                        base_err *err);
