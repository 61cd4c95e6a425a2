/* What chat.c (render) and chat_decode.c (decode) share. */
#pragma once
#include "engine/chat.h"

#define CHAT_NS "]<]minimax[>["
#define CHAT_THINK "<mm:think>"
#define CHAT_THINK_END "</mm:think>"

typedef enum chat_special {
    CHAT_BEGIN,     /* begin of document */
    CHAT_TURN,      /* begin of turn */
    CHAT_END,       /* end of turn */
    CHAT_SEPARATOR, /* NS: stands before every structural tag */
    CHAT_CALL,
    CHAT_CALL_CLOSE,
    CHAT_REASON,
    CHAT_REASON_CLOSE,
    CHAT_SPECIALS,
} chat_special;

struct eng_codec {
    const eng_tok *tok;
    char *identity;
    eng_thinking thinking; /* never DEFAULT */
    int32_t id[CHAT_SPECIALS];
    char digest[33];
};
