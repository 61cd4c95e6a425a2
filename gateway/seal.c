/* seal: see the header. HMAC-SHA256 over version, tenant and turn, under a key derived for this use
 * alone, so that other uses of the file can never make a signature. */
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
_Static_assert(PAYLOAD_BYTES % 3 == 0 && PAYLOAD_BYTES / 3 * 4 == GW_SEAL_TEXT_BYTES, "no padding");

struct gw_seal {
    uint8_t key[MAC_BYTES];
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
    static const char use[] = "whimbrel thinking signature 1";
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
        NULL) {
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
