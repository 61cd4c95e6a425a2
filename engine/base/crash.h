/* base/crash: what is told when the process dies by a fault of its own.
 *
 * On SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT: one line on stderr with the signal, the address
 * and the thread's name, the return addresses of the calls (program(+offset): `addr2line -fe
 * program offset` names them), and then the end by that same signal. Never what memory holds. Not
 * in builds with a sanitizer, which tell more. */
#pragma once

/* Once, before other threads are made: the handlers, and a stack for the main thread's. */
void base_crash_install(void);
/* A stack of its own for the calling thread's handlers, so that an overflow of its stack is told
 * too; kept until the process ends. Nothing before install. */
void base_crash_cover_thread(void);
