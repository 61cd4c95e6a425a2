/* Everything that the handler calls is async-signal-safe, or made so: backtrace() loads its
 * unwinder at the first call, which install makes. Should the unwinder wait for a lock that the
 * crash holds, an alarm ends the process. */
#include "engine/base/crash.h"

#include <execinfo.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define STACK_BYTES (64u << 10) /* a frame with AVX-512 and AMX state is 11 KiB */
#define FRAMES_MAX 64
#define HANDLER_SECONDS_MAX 5

static const struct {
    int number;
    const char *name;
} fatal[] = {{SIGSEGV, "SIGSEGV"},
             {SIGBUS, "SIGBUS"},
             {SIGFPE, "SIGFPE"},
             {SIGILL, "SIGILL"},
             {SIGABRT, "SIGABRT"}};
#define FATAL_COUNT (sizeof fatal / sizeof *fatal)

static bool installed;

static char *add(char *at, const char *end, const char *text)
{
    while (*text != '\0' && at < end)
        *at++ = *text++;
    return at;
}

static char *add_hex(char *at, const char *end, uintptr_t value)
{
    char digits[2 * sizeof value + 1], *first = digits + sizeof digits - 1;
    *first = '\0';
    do
        *--first = "0123456789abcdef"[value & 15];
    while ((value >>= 4) != 0);
    return add(add(at, end, "0x"), end, first);
}

static void on_crash(int number, siginfo_t *info, void *context)
{
    static atomic_flag begun = ATOMIC_FLAG_INIT;
    char line[192], thread[16] = "", *at = line, *end = line + sizeof line - 1;
    void *frames[FRAMES_MAX];
    (void)context;
    while (atomic_flag_test_and_set(&begun))
        pause(); /* another thread's crash ends us */
    alarm(HANDLER_SECONDS_MAX);
    const char *name = "?";
    for (size_t i = 0; i < FATAL_COUNT; i++)
        if (fatal[i].number == number)
            name = fatal[i].name;
    prctl(PR_GET_NAME, thread);
    at = add(add(at, end, "level=error crashed signal="), end, name);
    if (info->si_code > 0) /* the kernel's, not somebody's kill */
        at = add_hex(add(at, end, " address="), end, (uintptr_t)info->si_addr);
    at = add(add(at, end, " thread="), end, thread);
    *at++ = '\n';
    (void)!write(STDERR_FILENO, line, (size_t)(at - line));
    backtrace_symbols_fd(frames, backtrace(frames, FRAMES_MAX), STDERR_FILENO);
    raise(number); /* blocked until this returns, and the handler is reset */
}

void base_crash_cover_thread(void)
{
    if (!installed)
        return;
    void *memory = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED)
        sigaltstack(&(stack_t){.ss_sp = memory, .ss_size = STACK_BYTES}, NULL);
}

void base_crash_install(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)on_crash;
#else
    void *frame;
    struct sigaction action = {.sa_sigaction = on_crash,
                               .sa_flags = (int)(SA_SIGINFO | SA_ONSTACK | SA_RESETHAND)};
    backtrace(&frame, 1);
    installed = true;
    base_crash_cover_thread();
    sigfillset(&action.sa_mask);
    sigdelset(&action.sa_mask, SIGALRM);
    for (size_t i = 0; i < FATAL_COUNT; i++)
        sigaction(fatal[i].number, &action, NULL);
#endif
}
