/* The signed frame (see tm_slurm/events/signed.py):
 *
 *     length (4 bytes, big endian)  {"kind":"signed_event","payload":"…JSON…","mac":"…hex…"}
 *
 * mac = HMAC-SHA-256(the job's secret, "tm_slurm event 1" 0 payload). The payload names the leader's term, so that it
 * is of no use to another leader, and has a nonce, so that it is of no use a second time. */
#include "notify.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

enum { PAYLOAD_MAX = 2048, NONCE_BYTES = 16, MAC_BYTES = 32 };

static const char LABEL[] = "tm_slurm event 1"; /* its end, a zero, is signed too */

static void to_hex(const unsigned char *bytes, size_t count, char *hex)
{
    for (size_t i = 0; i < count; i++)
        snprintf(hex + 2 * i, 3, "%02x", bytes[i]);
}

static bool payload_make(const struct request *request, const struct leader *leader, char *payload, size_t size)
{
    unsigned char nonce[NONCE_BYTES];
    char hex[2 * NONCE_BYTES + 1];
    struct text text = text_in(payload, size);
    if (getrandom(nonce, sizeof nonce, GRND_NONBLOCK) != sizeof nonce)
        return false;
    to_hex(nonce, sizeof nonce, hex);
    text_add(&text, "{\"v\":1,\"job\":%lu,\"restart\":%lu,\"term\":%llu,\"at\":%.6f,\"nonce\":\"%s\",\"node\":",
             (unsigned long)request->job, (unsigned long)request->restart, (unsigned long long)leader->term,
             request->at, hex);
    text_add_json(&text, request->node);
    text_add(&text, ",\"kind\":");
    text_add_json(&text, request->kind);
    text_add(&text, ",\"source\":");
    text_add_json(&text, request->source);
    text_add(&text, ",\"fact\":");
    text_add_json(&text, request->fact);
    text_add(&text, ",\"reason\":");
    text_add_json(&text, request->reason);
    text_add(&text, "}");
    return !text.full;
}

size_t message_make(const struct request *request, const struct leader *leader, const unsigned char *secret,
                    size_t secret_length, unsigned char frame[FRAME_MAX + 4])
{
    char payload[PAYLOAD_MAX], mac_hex[2 * MAC_BYTES + 1];
    unsigned char signed_text[sizeof LABEL + PAYLOAD_MAX], mac[EVP_MAX_MD_SIZE];
    unsigned int mac_length = 0;
    if (!payload_make(request, leader, payload, sizeof payload))
        return 0;
    size_t length = strlen(payload);
    memcpy(signed_text, LABEL, sizeof LABEL);
    memcpy(signed_text + sizeof LABEL, payload, length);
    if (!HMAC(EVP_sha256(), secret, (int)secret_length, signed_text, sizeof LABEL + length, mac, &mac_length) ||
        mac_length != MAC_BYTES)
        return 0;
    to_hex(mac, MAC_BYTES, mac_hex);
    struct text text = text_in((char *)frame + 4, FRAME_MAX);
    text_add(&text, "{\"kind\":\"signed_event\",\"payload\":");
    text_add_json(&text, payload);
    text_add(&text, ",\"mac\":\"%s\"}", mac_hex);
    if (text.full)
        return 0;
    uint32_t size = (uint32_t)(FRAME_MAX - text.left);
    for (int i = 0; i < 4; i++)
        frame[i] = (unsigned char)(size >> (24 - 8 * i));
    return size + 4;
}
