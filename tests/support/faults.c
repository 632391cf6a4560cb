/* Faults of a disk, at the Nth change below a folder.
 *
 * A library for LD_PRELOAD (support/faults.py). It counts the calls of a Python program that create,
 * write, move or delete something below FAULT_FOLDER. Without this variable, nothing happens. Others:
 *
 *   FAULT_KIND   kill    SIGKILL immediately before the change
 *                ENOSPC  the disk is full from this change on: what needs space fails
 *                EIO     this change alone fails
 *   FAULT_AT     the number of the change, from 1; without it, the fault does not happen
 *   FAULT_LOG    a file that gets a line for each change that counts
 */

#define _GNU_SOURCE
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
#include <sys/uio.h>
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
    if (strncmp(path, folder, strlen(folder)))
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

/* Count a change of a name in an open folder, or of an open file itself if the name is NULL. */
static int fault_at(const char *call, int file, const char *name, int needs_space) {
    char path[2 * PATH_MAX + 2], link[64];
    if (!getenv("FAULT_FOLDER"))
        return 0;
    ssize_t length = 0;
    if (!name || name[0] != '/') {
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        length = readlink(file == AT_FDCWD ? "/proc/self/cwd" : link, path, PATH_MAX);
        if (length < 0)
            return 0;
    }
    snprintf(path + length, PATH_MAX + 2, "%s%s", name && length ? "/" : "", name ? name : "");
    return fault(call, path, needs_space);
}

/* Define a system call that fails at a fault. */
#define CALL(type, name, parameters, test, ...)                             \
    type name parameters {                                                  \
        int number = test;                                                  \
        if (number) {                                                       \
            errno = number;                                                 \
            return -1;                                                      \
        }                                                                   \
        return syscall(SYS_##name, __VA_ARGS__);                            \
    }
/* Give a function the name for files of any size too. Python calls one of the two. */
#define ALSO(type, name, parameters, other) \
    type other parameters __attribute__((alias(#name)));

/* --- open files -------------------------------------------------------------------------- */

int openat(int folder, const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;
    va_end(more);
    int is_written = (flags & O_ACCMODE) != O_RDONLY;
    int number = is_written ? fault_at("open", folder, path, flags & O_CREAT) : 0;
    if (number) {
        errno = number;
        return -1;
    }
    return syscall(SYS_openat, folder, path, flags, mode);
}
ALSO(int, openat, (int, const char *, int, ...), openat64)

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;
    va_end(more);
    return openat(AT_FDCWD, path, flags, mode);
}
ALSO(int, open, (const char *, int, ...), open64)

CALL(ssize_t, write, (int file, const void *data, size_t size),
     fault_at("write", file, NULL, 1), file, data, size)
CALL(ssize_t, sendfile, (int file, int source, off_t *start, size_t size),
     fault_at("write", file, NULL, 1), file, source, start, size)
ALSO(ssize_t, sendfile, (int, int, off64_t *, size_t), sendfile64)
CALL(int, ftruncate, (int file, off_t size),
     fault_at("truncate", file, NULL, 1), file, size)
ALSO(int, ftruncate, (int, off64_t), ftruncate64)
CALL(int, fsync, (int file), fault_at("fsync", file, NULL, 1), file)

/* --- names ------------------------------------------------------------------------------- */

CALL(int, mkdirat, (int folder, const char *path, mode_t mode),
     fault_at("mkdir", folder, path, 1), folder, path, mode)
CALL(int, renameat, (int from, const char *old, int to, const char *new),
     fault_at("rename", to, new, 1), from, old, to, new)
CALL(int, linkat, (int from, const char *old, int to, const char *new, int flags),
     fault_at("link", to, new, 1), from, old, to, new, flags)
CALL(int, symlinkat, (const char *old, int to, const char *new),
     fault_at("link", to, new, 1), old, to, new)
CALL(int, unlinkat, (int folder, const char *path, int flags),
     fault_at("delete", folder, path, 0), folder, path, flags)

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }
int symlink(const char *old, const char *new) { return symlinkat(old, AT_FDCWD, new); }
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
