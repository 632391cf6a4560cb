/* Faults of a disk and of a clock, at the Nth change below a folder.
 *
 * A library for LD_PRELOAD (support/faults.py). It counts the calls of a process that create, write,
 * move or delete something below FAULT_FOLDER, of every library: Python, Rust and C++. Without this
 * variable, nothing happens. Others:
 *
 *   FAULT_KIND   kill    SIGKILL immediately before the change
 *                ENOSPC  the disk is full from this change on: what needs space fails
 *                EIO     this change alone fails
 *                clock   the clock shows FAULT_SECONDS more from this change on
 *   FAULT_AT     the number of the change, from 1; without it, the fault does not happen
 *   FAULT_LOG    a file that gets a line for each change that counts
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_int changes;

static void note(const char *call, const char *path) {
    const char *log = getenv("FAULT_LOG");
    char line[PATH_MAX + 100];
    if (!log)
        return;
    int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT, 0666);
    int length = snprintf(line, sizeof line, "%s %s\n", call, path);
    syscall(SYS_write, file, line, length);
    syscall(SYS_close, file);
}

/* Count a change; return the errno with which it fails, or 0. */
static int fault(const char *call, const char *path, int needs_space) {
    const char *folder = getenv("FAULT_FOLDER"), *kind = getenv("FAULT_KIND");
    const char *at = getenv("FAULT_AT");
    if (!folder || strncmp(path, folder, strlen(folder)))
        return 0;
    int number = ++changes;
    note(call, path);
    if (!kind || !at || number < atoi(at))
        return 0;
    if (!strcmp(kind, "ENOSPC"))
        return needs_space ? ENOSPC : 0;
    if (number > atoi(at))
        return 0;
    if (!strcmp(kind, "kill"))
        syscall(SYS_kill, getpid(), SIGKILL);
    return strcmp(kind, "EIO") ? 0 : EIO;
}

static int fault_at(const char *call, int folder, const char *name, int needs_space) {
    char path[2 * PATH_MAX + 2], link[64];
    if (!getenv("FAULT_FOLDER"))
        return 0;
    ssize_t length = 0;
    if (name[0] != '/') {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        length = readlink(folder == AT_FDCWD ? "/proc/self/cwd" : link, path, PATH_MAX);
        if (length < 0)
            return 0;
        path[length++] = '/';
    }
    snprintf(path + length, PATH_MAX, "%s", name);
    return fault(call, path, needs_space);
}

static int fault_of(const char *call, int file) {
    char path[PATH_MAX + 1], link[64];
    if (!getenv("FAULT_FOLDER"))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX);
    if (length < 0)
        return 0;
    path[length] = 0;
    return fault(call, path, 1);
}

/* Define a function that fails at a fault and is that of the C library otherwise. */
#define WRAP(type, name, parameters, arguments, test)                       \
    type name parameters {                                                  \
        static type(*next) parameters;                                      \
        if (!next)                                                          \
            next = (type(*) parameters)dlsym(RTLD_NEXT, #name);             \
        int number = test;                                                  \
        if (number) {                                                       \
            errno = number;                                                 \
            return (type)-1;                                                \
        }                                                                   \
        return next arguments;                                              \
    }

/* --- opening ----------------------------------------------------------------------------- */

#define IS_WRITTEN(flags) (((flags) & O_ACCMODE) != O_RDONLY)

static int mode_of(int flags, va_list more) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;
}

#define WRAP_OPEN(name)                                                     \
    int name(const char *path, int flags, ...) {                            \
        static int (*next)(const char *, int, ...);                         \
        if (!next)                                                          \
            next = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name); \
        va_list more;                                                       \
        va_start(more, flags);                                              \
        int mode = mode_of(flags, more);                                    \
        va_end(more);                                                       \
        int number = IS_WRITTEN(flags)                                      \
            ? fault_at("open", AT_FDCWD, path, flags & O_CREAT) : 0;        \
        if (number) {                                                       \
            errno = number;                                                 \
            return -1;                                                      \
        }                                                                   \
        return next(path, flags, mode);                                     \
    }
#define WRAP_OPENAT(name)                                                   \
    int name(int folder, const char *path, int flags, ...) {                \
        static int (*next)(int, const char *, int, ...);                    \
        if (!next)                                                          \
            next = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name); \
        va_list more;                                                       \
        va_start(more, flags);                                              \
        int mode = mode_of(flags, more);                                    \
        va_end(more);                                                       \
        int number = IS_WRITTEN(flags)                                      \
            ? fault_at("open", folder, path, flags & O_CREAT) : 0;          \
        if (number) {                                                       \
            errno = number;                                                 \
            return -1;                                                      \
        }                                                                   \
        return next(folder, path, flags, mode);                             \
    }
#define WRAP_FOPEN(name)                                                    \
    FILE *name(const char *path, const char *mode) {                        \
        static FILE *(*next)(const char *, const char *);                   \
        if (!next)                                                          \
            next = (FILE * (*)(const char *, const char *))dlsym(RTLD_NEXT, #name); \
        int number = strpbrk(mode, "wa+") ? fault_at("open", AT_FDCWD, path, 1) : 0; \
        if (number) {                                                       \
            errno = number;                                                 \
            return NULL;                                                    \
        }                                                                   \
        return next(path, mode);                                            \
    }

WRAP_OPEN(open)
WRAP_OPEN(open64)
WRAP_OPENAT(openat)
WRAP_OPENAT(openat64)
WRAP_FOPEN(fopen)
WRAP_FOPEN(fopen64)

/* --- writing ----------------------------------------------------------------------------- */

WRAP(ssize_t, write, (int file, const void *data, size_t size), (file, data, size),
     fault_of("write", file))
WRAP(ssize_t, writev, (int file, const struct iovec *data, int count), (file, data, count),
     fault_of("write", file))
WRAP(ssize_t, pwrite, (int file, const void *data, size_t size, off_t start),
     (file, data, size, start), fault_of("write", file))
WRAP(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t start),
     (file, data, size, start), fault_of("write", file))
WRAP(ssize_t, sendfile, (int file, int source, off_t *start, size_t size),
     (file, source, start, size), fault_of("write", file))
WRAP(ssize_t, sendfile64, (int file, int source, off64_t *start, size_t size),
     (file, source, start, size), fault_of("write", file))
WRAP(ssize_t, copy_file_range,
     (int source, off64_t *from, int file, off64_t *to, size_t size, unsigned flags),
     (source, from, file, to, size, flags), fault_of("write", file))

size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    static size_t (*next)(const void *, size_t, size_t, FILE *);
    if (!next)
        next = (size_t(*)(const void *, size_t, size_t, FILE *))dlsym(RTLD_NEXT, "fwrite");
    int number = fault_of("write", fileno(file));
    if (number) {
        errno = number;
        return 0;
    }
    return next(data, size, count, file);
}

WRAP(int, ftruncate, (int file, off_t size), (file, size), fault_of("truncate", file))
WRAP(int, ftruncate64, (int file, off64_t size), (file, size), fault_of("truncate", file))
WRAP(int, truncate, (const char *path, off_t size), (path, size),
     fault_at("truncate", AT_FDCWD, path, 0))
WRAP(int, truncate64, (const char *path, off64_t size), (path, size),
     fault_at("truncate", AT_FDCWD, path, 0))
WRAP(int, fsync, (int file), (file), fault_of("fsync", file))
WRAP(int, fdatasync, (int file), (file), fault_of("fsync", file))

/* --- names ------------------------------------------------------------------------------- */

WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode),
     fault_at("mkdir", AT_FDCWD, path, 1))
WRAP(int, mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode),
     fault_at("mkdir", folder, path, 1))
WRAP(int, rename, (const char *old, const char *new), (old, new),
     fault_at("rename", AT_FDCWD, new, 1))
WRAP(int, renameat, (int from, const char *old, int to, const char *new), (from, old, to, new),
     fault_at("rename", to, new, 1))
WRAP(int, link, (const char *old, const char *new), (old, new),
     fault_at("link", AT_FDCWD, new, 1))
WRAP(int, linkat, (int from, const char *old, int to, const char *new, int flags),
     (from, old, to, new, flags), fault_at("link", to, new, 1))
WRAP(int, symlink, (const char *old, const char *new), (old, new),
     fault_at("link", AT_FDCWD, new, 1))
WRAP(int, symlinkat, (const char *old, int to, const char *new), (old, to, new),
     fault_at("link", to, new, 1))
WRAP(int, unlink, (const char *path), (path), fault_at("delete", AT_FDCWD, path, 0))
WRAP(int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags),
     fault_at("delete", folder, path, 0))
WRAP(int, rmdir, (const char *path), (path), fault_at("delete", AT_FDCWD, path, 0))

/* --- clock ------------------------------------------------------------------------------- */

static long shift(void) {
    const char *kind = getenv("FAULT_KIND"), *at = getenv("FAULT_AT");
    if (!kind || strcmp(kind, "clock") || !at || changes < atoi(at))
        return 0;
    return atol(getenv("FAULT_SECONDS"));
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int failed = syscall(SYS_clock_gettime, clock, time);
    if (!failed && clock == CLOCK_REALTIME)
        time->tv_sec += shift();
    return failed;
}
