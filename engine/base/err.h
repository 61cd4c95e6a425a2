/* base/err: error codes, error text and checks.
 *
 * A function that can fail returns a base_code and takes a base_err, which may be NULL. The first
 * error wins: base_fail on an error that is already set changes nothing. base_wrap puts context
 * before a text that is set. Thread: any. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum base_code {
    BASE_OK = 0,
    BASE_INVALID,     /* a value of the caller is wrong: bad request, bad flag */
    BASE_TOO_LONG,    /* a prompt, body or name exceeds its bound */
    BASE_NOMEM,       /* memory, pages or slots are used up */
    BASE_FULL,        /* a bounded queue is full; try later */
    BASE_IO,          /* the operating system refused */
    BASE_FORMAT,      /* bytes of a file, socket or row do not fit their format */
    BASE_UNSUPPORTED, /* well formed, but not offered here */
    BASE_NOT_FOUND,
    BASE_CONFLICT,
    BASE_DENIED,
    BASE_CANCELLED,
    BASE_TIMEOUT,
    BASE_DEVICE, /* an accelerator failed */
    BASE_CLOSED, /* draining or shut down */
} base_code;

typedef struct base_err {
    base_code code; /* BASE_OK while nothing failed */
    char text[192]; /* names the thing, its value and its bound; always terminated */
    char param[48]; /* the request field or configuration key at fault, "" if none */
} base_err;

#define BASE_ERR_INIT                                                                              \
    {                                                                                              \
        .code = BASE_OK                                                                            \
    }

/* Sets `err` unless it is NULL or already set. Returns `code`, so that `return base_fail(...)`
 * reads well. */
base_code base_fail(base_err *err, base_code code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* As base_fail, naming the request field or key at fault. */
base_code base_fail_param(base_err *err, base_code code, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* Puts "context: " before the text of an error that is set. */
void base_wrap(base_err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
const char *base_code_name(base_code code);

_Noreturn void base_panic(const char *file, int line, const char *what);

/* What only we can break. No byte from a socket, file or model may trip one. */
#define CHECK(cond) ((cond) ? (void)0 : base_panic(__FILE__, __LINE__, #cond))
#ifdef NDEBUG
#define DCHECK(cond) ((void)0)
#else
#define DCHECK(cond) CHECK(cond)
#endif
