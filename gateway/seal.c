/* seal: see the header. A signature is HMAC-SHA256 over version, tenant and turn. Every use of the
 * file has a key of its own, HMAC(file, name of the use), so that one can never make what another
 * accepts. */
#include "gateway/seal.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define KEY_BYTES 32
#define MAC_BYTES 32
#define ID_BYTES 12
#define VERSION 1
#define PAYLOAD_BYTES (1 + ID_BYTES + MAC_BYTES)
#define NONCE_BYTES 12
#define TAG_BYTES 16
#define SEALED_BYTES_MAX (64u << 20) /* of a content: far beyond any run of tokens */
_Static_assert(PAYLOAD_BYTES % 3 == 0 && PAYLOAD_BYTES / 3 * 4 == GW_SEAL_TEXT_BYTES, "no padding");

static const char mark[] = "whim1."; /* of sealed texts; no letter of base64 is a dot */

struct gw_seal {
    uint8_t key[MAC_BYTES];  /* of signatures */
    uint8_t root[MAC_BYTES]; /* that the keys of sealed texts are derived from */
};

static base_code fail_at(base_err *err, base_code code, const char *path, const char *what)
{
    return base_fail_param(err, code, "data.path", "%.120s: %s", path, what);
}

/* Under another name first: a key is there whole or not at all. */
static base_code make_key(const char *path, uint8_t key[KEY_BYTES], base_err *err)
{
    char fresh[512];
    snprintf(fresh, sizeof fresh, "%s.new", path);
    if (getrandom(key, KEY_BYTES, 0) != KEY_BYTES)
        return fail_at(err, BASE_IO, path, "the system gives no random bytes");
    unlink(fresh);
    int fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return fail_at(err, BASE_IO, fresh, strerror(errno));
    bool written = write(fd, key, KEY_BYTES) == KEY_BYTES && fsync(fd) == 0;
    int reason = errno;
    if (close(fd) != 0 && written) {
        written = false;
        reason = errno;
    }
    if (written && rename(fresh, path) != 0) {
        written = false;
        reason = errno;
    }
    if (written)
        return BASE_OK;
    unlink(fresh);
    return fail_at(err, BASE_IO, path, strerror(reason));
}

static base_code read_key(int fd, const char *path, uint8_t key[KEY_BYTES], base_err *err)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return fail_at(err, BASE_IO, path, strerror(errno));
    if ((st.st_mode & 077) != 0)
        return fail_at(err, BASE_DENIED, path, "others may use this key; its mode must be 0600");
    ssize_t got = read(fd, key, KEY_BYTES);
    if (got < 0)
        return fail_at(err, BASE_IO, path, strerror(errno));
    if (got != KEY_BYTES)
        return fail_at(err, BASE_FORMAT, path, "a key has 32 bytes; this file has less");
    return BASE_OK;
}

base_code gw_seal_open(gw_seal **out, const char *directory, base_err *err)
{
    static const char use[] = "whimbrel thinking signature 1", sealed[] = "whimbrel sealed text 1";
    char path[480];
    uint8_t key[KEY_BYTES];
    unsigned length = 0;
    *out = NULL;
    snprintf(path, sizeof path, "%s/key", directory);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    base_code code = fd >= 0           ? read_key(fd, path, key, err)
                     : errno == ENOENT ? make_key(path, key, err)
                                       : fail_at(err, BASE_IO, path, strerror(errno));
    if (fd >= 0)
        close(fd);
    if (code != BASE_OK)
        return code;
    gw_seal *seal = calloc(1, sizeof *seal);
    if (seal == NULL)
        return base_fail(err, BASE_NOMEM, "no memory for the key");
    if (HMAC(EVP_sha256(), key, KEY_BYTES, (const uint8_t *)use, sizeof use, seal->key, &length) ==
            NULL ||
        HMAC(EVP_sha256(), key, KEY_BYTES, (const uint8_t *)sealed, sizeof sealed, seal->root,
             &length) == NULL) {
        free(seal);
        return fail_at(err, BASE_IO, path, "HMAC-SHA256 is not available");
    }
    OPENSSL_cleanse(key, sizeof key);
    *out = seal;
    return BASE_OK;
}

void gw_seal_close(gw_seal *seal)
{
    if (seal == NULL)
        return;
    OPENSSL_cleanse(seal, sizeof *seal);
    free(seal);
}

/* `payload` holds version and id already. */
static bool make_mac(const gw_seal *seal, uint8_t mac[MAC_BYTES], int64_t tenant,
                     const uint8_t *payload)
{
    uint8_t message[1 + ID_BYTES + 8];
    unsigned length = 0;
    memcpy(message, payload, 1 + ID_BYTES);
    for (int i = 0; i < 8; i++)
        message[1 + ID_BYTES + i] = (uint8_t)((uint64_t)tenant >> (8 * i));
    return HMAC(EVP_sha256(), seal->key, sizeof seal->key, message, sizeof message, mac, &length) !=
           NULL;
}

void gw_seal_turn(const gw_seal *seal, char out[GW_SEAL_TEXT_BYTES + 1], int64_t tenant,
                  const gw_id *turn)
{
    uint8_t payload[PAYLOAD_BYTES] = {VERSION};
    const char *hex = turn->text + strlen("turn_");
    out[0] = '\0';
    for (int i = 0; i < ID_BYTES; i++)
        if (sscanf(hex + 2 * i, "%2hhx", &payload[1 + i]) != 1)
            return;
    if (make_mac(seal, payload + 1 + ID_BYTES, tenant, payload))
        EVP_EncodeBlock((uint8_t *)out, payload, PAYLOAD_BYTES);
}

bool gw_seal_read(const gw_seal *seal, gw_id *turn, int64_t tenant, eng_text text)
{
    uint8_t payload[PAYLOAD_BYTES], mac[MAC_BYTES];
    if (text.length != GW_SEAL_TEXT_BYTES ||
        EVP_DecodeBlock(payload, (const uint8_t *)text.data, GW_SEAL_TEXT_BYTES) != PAYLOAD_BYTES ||
        payload[0] != VERSION || !make_mac(seal, mac, tenant, payload) ||
        CRYPTO_memcmp(mac, payload + 1 + ID_BYTES, MAC_BYTES) != 0)
        return false;
    int at = snprintf(turn->text, sizeof turn->text, "turn_");
    for (int i = 0; i < ID_BYTES; i++)
        at += snprintf(turn->text + at, sizeof turn->text - (size_t)at, "%02x", payload[1 + i]);
    return true;
}

/* ---- sealed texts ---- */

/* Keys for encryption and nonces of a use, and the associated data. */
typedef struct box {
    uint8_t key[MAC_BYTES], nonce_key[MAC_BYTES];
    base_buf bound; /* tenant, then `bound` */
} box;

static bool box_open(box *b, const gw_seal *seal, const char *use, int64_t tenant, eng_text bound)
{
    unsigned length = 0;
    uint8_t bytes[8];
    base_buf_init(&b->bound, 0);
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)((uint64_t)tenant >> (8 * i));
    base_buf_add(&b->bound, bytes, sizeof bytes);
    base_buf_add(&b->bound, bound.data ? bound.data : "", bound.length);
    return !b->bound.failed &&
           HMAC(EVP_sha256(), seal->root, MAC_BYTES, (const uint8_t *)use, strlen(use), b->key,
                &length) != NULL &&
           HMAC(EVP_sha256(), b->key, MAC_BYTES, (const uint8_t *)mark, sizeof mark, b->nonce_key,
                &length) != NULL;
}

static void box_close(box *b)
{
    base_buf_deinit(&b->bound);
    OPENSSL_cleanse(b, sizeof *b);
}

/* HMAC over the length of the associated data, that data and the content. */
static bool make_nonce(const box *b, uint8_t nonce[NONCE_BYTES], const void *content, size_t length)
{
    uint8_t mac[MAC_BYTES];
    size_t mac_length = sizeof mac;
    uint64_t bound_length = b->bound.length;
    EVP_PKEY *key = EVP_PKEY_new_raw_private_key(EVP_PKEY_HMAC, NULL, b->nonce_key, MAC_BYTES);
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    bool good = key != NULL && ctx != NULL &&
                EVP_DigestSignInit(ctx, NULL, EVP_sha256(), NULL, key) == 1 &&
                EVP_DigestSignUpdate(ctx, &bound_length, sizeof bound_length) == 1 &&
                EVP_DigestSignUpdate(ctx, b->bound.data, b->bound.length) == 1 &&
                EVP_DigestSignUpdate(ctx, content, length) == 1 &&
                EVP_DigestSignFinal(ctx, mac, &mac_length) == 1;
    EVP_MD_CTX_free(ctx);
    EVP_PKEY_free(key);
    memcpy(nonce, mac, NONCE_BYTES);
    return good;
}

/* `out` has room for nonce, content and tag. */
static bool encrypt(const box *b, uint8_t *out, const void *content, size_t length)
{
    int count = 0, rest = 0;
    EVP_CIPHER_CTX *ctx = EVP_CIPHER_CTX_new();
    bool good =
        ctx != NULL && make_nonce(b, out, content, length) &&
        EVP_EncryptInit_ex(ctx, EVP_aes_256_gcm(), NULL, b->key, out) == 1 &&
        EVP_EncryptUpdate(ctx, NULL, &count, (uint8_t *)b->bound.data, (int)b->bound.length) == 1 &&
        EVP_EncryptUpdate(ctx, out + NONCE_BYTES, &count, content, (int)length) == 1 &&
        EVP_EncryptFinal_ex(ctx, out + NONCE_BYTES + count, &rest) == 1 &&
        EVP_CIPHER_CTX_ctrl(ctx, EVP_CTRL_GCM_GET_TAG, TAG_BYTES, out + NONCE_BYTES + length) == 1;
    EVP_CIPHER_CTX_free(ctx);
    return good;
}

static bool decrypt(const box *b, uint8_t *content, const uint8_t *in, size_t length)
{
    int count = 0, rest = 0;
    EVP_CIPHER_CTX *ctx = EVP_CIPHER_CTX_new();
    bool good =
        ctx != NULL && EVP_DecryptInit_ex(ctx, EVP_aes_256_gcm(), NULL, b->key, in) == 1 &&
        EVP_DecryptUpdate(ctx, NULL, &count, (uint8_t *)b->bound.data, (int)b->bound.length) == 1 &&
        EVP_DecryptUpdate(ctx, content, &count, in + NONCE_BYTES, (int)length) == 1 &&
        EVP_CIPHER_CTX_ctrl(ctx, EVP_CTRL_GCM_SET_TAG, TAG_BYTES,
                            (void *)(in + NONCE_BYTES + length)) == 1 &&
        EVP_DecryptFinal_ex(ctx, content + count, &rest) == 1;
    EVP_CIPHER_CTX_free(ctx);
    return good;
}

base_code gw_seal_wrap(const gw_seal *seal, base_buf *out, const char *use, int64_t tenant,
                       eng_text bound, const void *content, size_t length, base_err *err)
{
    if (length > SEALED_BYTES_MAX || bound.length > SEALED_BYTES_MAX)
        return base_fail(err, BASE_TOO_LONG, "%zu bytes are too many to seal", length);
    size_t bytes = NONCE_BYTES + length + TAG_BYTES, letters = (bytes + 2) / 3 * 4;
    uint8_t *sealed = malloc(bytes), *text = malloc(letters + 1);
    box b;
    bool good = box_open(&b, seal, use, tenant, bound) && sealed != NULL && text != NULL;
    base_code code = good ? BASE_OK : base_fail(err, BASE_NOMEM, "no memory to seal");
    if (good && !encrypt(&b, sealed, length ? content : "", length))
        code = base_fail(err, BASE_IO, "AES-256-GCM is not available");
    if (code == BASE_OK) {
        EVP_EncodeBlock(text, sealed, (int)bytes);
        base_buf_puts(out, mark);
        base_buf_add(out, text, letters);
    }
    box_close(&b);
    free(sealed);
    free(text);
    return code;
}

bool gw_seal_is_ours(eng_text text)
{
    return text.length > sizeof mark - 1 && memcmp(text.data, mark, sizeof mark - 1) == 0;
}

base_code gw_seal_unwrap(const gw_seal *seal, base_buf *out, const char *use, int64_t tenant,
                         eng_text bound, eng_text text, base_err *err)
{
    if (!gw_seal_is_ours(text))
        return base_fail(err, BASE_FORMAT, "this was not sealed here");
    const char *letters = text.data + sizeof mark - 1;
    size_t count = text.length - (sizeof mark - 1), padding = 0;
    while (padding < 2 && count > padding && letters[count - 1 - padding] == '=')
        padding++;
    size_t bytes = count / 4 * 3 - padding;
    if (count % 4 != 0 || count / 4 * 3 < NONCE_BYTES + TAG_BYTES + padding ||
        count > 2 * (size_t)SEALED_BYTES_MAX)
        return base_fail(err, BASE_DENIED, "what was sealed here came back changed");
    size_t length = bytes - NONCE_BYTES - TAG_BYTES;
    uint8_t *sealed = malloc(bytes + padding + 1), *content = malloc(length + 1);
    uint8_t *again = malloc(count + 1);
    box b;
    bool good = box_open(&b, seal, use, tenant, bound) && sealed != NULL && content != NULL &&
                again != NULL;
    base_code code = good ? BASE_OK : base_fail(err, BASE_NOMEM, "no memory to unseal");
    /* Encoded again it must be the same: spare bits of the last letter count too. */
    bool same =
        good &&
        EVP_DecodeBlock(sealed, (const uint8_t *)letters, (int)count) == (int)(bytes + padding) &&
        EVP_EncodeBlock(again, sealed, (int)bytes) == (int)count &&
        memcmp(again, letters, count) == 0;
    if (good && (!same || !decrypt(&b, content, sealed, length)))
        code = base_fail(err, BASE_DENIED, "what was sealed here came back changed");
    if (code == BASE_OK)
        base_buf_add(out, content, length);
    box_close(&b);
    free(sealed);
    free(content);
    free(again);
    return code;
}
