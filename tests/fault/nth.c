/* Put before the C library (LD_PRELOAD) of the program under test: the Nth call of one function
 * fails as the system lets it fail. WHIMBREL_FAULT="pthread_create:3"; when that call has come, a
 * byte is written to the descriptor WHIMBREL_FAULT_FD. Files alone are meant, never sockets. */
#undef _FILE_OFFSET_BITS /* else pwrite were another name of pwrite64 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *name = "";
static long nth;
static int told = -1;
static _Atomic long calls;

__attribute__((constructor)) static void begin(void)
{
    const char *fault = getenv("WHIMBREL_FAULT"), *fd = getenv("WHIMBREL_FAULT_FD");
    const char *colon = fault != NULL ? strchr(fault, ':') : NULL;
    if (colon == NULL || fd == NULL)
        return;
    nth = atol(colon + 1);
    told = atoi(fd);
    name = strndup(fault, (size_t)(colon - fault));
}

static bool fails(const char *function)
{
    if (strcmp(function, name) != 0 || ++calls != nth)
        return false;
    (void)syscall(SYS_write, told, "!", 1);
    return true;
}

static void *next(const char *function)
{
    return dlsym(RTLD_NEXT, function);
}

#define FAIL(error)                                                                                \
    do {                                                                                           \
        errno = (error);                                                                           \
        return -1;                                                                                 \
    } while (0)

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                   void *arg)
{
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (real == NULL)
        *(void **)&real = next("pthread_create");
    return fails("pthread_create") ? EAGAIN : real(thread, attributes, run, arg);
}

int fsync(int fd)
{
    if (fails("fsync"))
        FAIL(EIO);
    return (int)syscall(SYS_fsync, fd);
}

int fdatasync(int fd)
{
    if (fails("fsync"))
        FAIL(EIO);
    return (int)syscall(SYS_fdatasync, fd);
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset)
{
    if (fails("pwrite"))
        FAIL(ENOSPC);
    return syscall(SYS_pwrite64, fd, bytes, length, offset);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off_t offset)
{
    return pwrite(fd, bytes, length, offset);
}

ssize_t pread(int fd, void *bytes, size_t length, off_t offset)
{
    if (fails("pread"))
        FAIL(EIO);
    return syscall(SYS_pread64, fd, bytes, length, offset);
}

ssize_t pread64(int fd, void *bytes, size_t length, off_t offset)
{
    return pread(fd, bytes, length, offset);
}
