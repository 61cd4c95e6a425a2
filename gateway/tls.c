#include "gateway/tls.h"

#include <errno.h>
#include <openssl/err.h>
#include <string.h>
#include <unistd.h>

#include <h2o.h>
#include <h2o/http2.h>

/* In the order of preference; libh2o's own list lacks the second. */
static const h2o_iovec_t protocols[] = {{H2O_STRLIT("h2")}, {H2O_STRLIT("http/1.1")}, {NULL, 0}};

static base_code refuse(SSL_CTX *ctx, const char *key, const char *file, base_err *err)
{
    unsigned long first = ERR_peek_error();
    const char *reason = first != 0 ? ERR_reason_error_string(first) : NULL;
    ERR_clear_error();
    SSL_CTX_free(ctx);
    return base_fail_param(err, BASE_FORMAT, key, "%s %s: %s", key, file,
                           reason != NULL ? reason : "not usable");
}

static base_code readable(const char *key, const char *file, base_err *err)
{
    if (access(file, R_OK) == 0)
        return BASE_OK;
    return base_fail_param(err, BASE_IO, key, "%s %s: %s", key, file, strerror(errno));
}

static bool demand_certificates(SSL_CTX *ctx, const char *client_ca)
{
    STACK_OF(X509_NAME) *names = SSL_load_client_CA_file(client_ca);
    if (names == NULL || SSL_CTX_load_verify_file(ctx, client_ca) != 1) {
        sk_X509_NAME_pop_free(names, X509_NAME_free);
        return false;
    }
    SSL_CTX_set_client_CA_list(ctx, names); /* takes them */
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    return true;
}

base_code gw_tls_create(SSL_CTX **out, const char *cert, const char *key, const char *client_ca,
                        base_err *err)
{
    base_code code;
    if ((code = readable("server.tls_cert", cert, err)) != BASE_OK ||
        (code = readable("server.tls_key", key, err)) != BASE_OK ||
        (client_ca[0] != '\0' &&
         (code = readable("server.tls_client_ca", client_ca, err)) != BASE_OK))
        return code;
    ERR_clear_error();
    SSL_CTX *ctx = SSL_CTX_new(TLS_server_method());
    if (ctx == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for the TLS context");
    SSL_CTX_set_min_proto_version(ctx, TLS1_2_VERSION);
    SSL_CTX_set_options(ctx, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION |
                                 SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_IGNORE_UNEXPECTED_EOF);
    /* HTTP/2 forbids everything without forward secrecy and AEAD (RFC 9113, appendix A). */
    if (SSL_CTX_set_cipher_list(ctx, "ECDHE+AESGCM:ECDHE+CHACHA20") != 1 ||
        SSL_CTX_set_session_id_context(ctx, (const unsigned char *)"whimbrel", 8) != 1)
        return refuse(ctx, "server.tls_cert", cert, err);
    if (SSL_CTX_use_certificate_chain_file(ctx, cert) != 1)
        return refuse(ctx, "server.tls_cert", cert, err);
    if (SSL_CTX_use_PrivateKey_file(ctx, key, SSL_FILETYPE_PEM) != 1 ||
        SSL_CTX_check_private_key(ctx) != 1)
        return refuse(ctx, "server.tls_key", key, err);
    if (client_ca[0] != '\0' && !demand_certificates(ctx, client_ca))
        return refuse(ctx, "server.tls_client_ca", client_ca, err);
    h2o_ssl_register_alpn_protocols(ctx, protocols);
    *out = ctx;
    return BASE_OK;
}
