/* Loaded before libc (LD_PRELOAD): lists the calls that change files below a folder, or makes one of them fail.

   Inert until faults_arm(folder, list, call, path, nth, kind): with a `list`, a descriptor, each call becomes a line
   "call path"; else the nth such call on that path fails as `kind` says. Paths are relative to `folder`; `path` may
   contain wildcards. System calls without libc are not intercepted. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, FAIL_EIO, FAIL_ENOSPC, SHORT, KILL, TORN };

static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX], wanted_call[32], wanted_path[PATH_MAX];
static int list = -1, wanted_nth, kind, armed, met, full;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

void faults_arm(const char *below, int to, const char *call, const char *path, int nth, int what) {
    snprintf(folder, sizeof folder, "%s", below);
    snprintf(wanted_call, sizeof wanted_call, "%s", call);
    snprintf(wanted_path, sizeof wanted_path, "%s", path);
    list = to, wanted_nth = nth, kind = what, met = 0, full = 0, armed = 1;
}

void faults_disarm(void) { armed = 0; }

/* Whether the point was reached. */
int faults_met(void) { return met > wanted_nth; }

/* The fault of this call, or NOTHING; sets errno. grows: a full disk refuses the call. */
static int at(const char *call, int directory, const char *path, int descriptor, int grows) {
    char whole[2 * PATH_MAX], link[64];
    int saved = errno, todo = NOTHING;
    if (!armed) return NOTHING;
    whole[0] = 0;
    if (!path || (path[0] != '/' && directory != AT_FDCWD)) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", path ? directory : descriptor);
        ssize_t n = readlink(link, whole, PATH_MAX - 1);
        whole[n < 0 ? 0 : n] = 0;
        if (path) strcat(whole, "/");
    } else if (path[0] != '/') {
        if (!getcwd(whole, PATH_MAX)) whole[0] = 0;
        strcat(whole, "/");
    }
    if (path) strncat(whole, path, PATH_MAX - 1);
    size_t n = strlen(folder);
    if (strncmp(whole, folder, n) || whole[n] != '/') {
        errno = saved;
        return NOTHING;
    }
    pthread_mutex_lock(&one);
    if (list >= 0) {
        dprintf(list, "%s %s\n", call, whole + n + 1);
    } else {
        if (!strcmp(call, wanted_call) && !fnmatch(wanted_path, whole + n + 1, 0) && met++ == wanted_nth) {
            todo = kind;
            full = kind == FAIL_ENOSPC;
        } else if (full && grows) {
            todo = FAIL_ENOSPC;
        }
    }
    pthread_mutex_unlock(&one);
    if (todo == KILL) {
        kill(getpid(), SIGKILL);
        pause();
    }
    errno = todo == FAIL_EIO ? EIO : todo == FAIL_ENOSPC ? ENOSPC : saved;
    return todo;
}

#define FAILS(...) \
    do { \
        int todo = at(__VA_ARGS__); \
        if (todo == FAIL_EIO || todo == FAIL_ENOSPC) return -1; \
    } while (0)

/* A write of `size` bytes: all, half, or half before the process is killed. */
#define WRITES(call, fd, size, real_call) \
    int todo = at(call, 0, NULL, fd, 1); \
    if (todo == FAIL_EIO || todo == FAIL_ENOSPC) return -1; \
    if ((todo == SHORT || todo == TORN) && size > 1) size /= 2; \
    ssize_t done = real_call; \
    if (todo == TORN) { \
        kill(getpid(), SIGKILL); \
        pause(); \
    } \
    return done

ssize_t write(int fd, const void *bytes, size_t size) {
    REAL(write);
    WRITES("write", fd, size, real(fd, bytes, size));
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) {
    REAL(pwrite);
    WRITES("pwrite", fd, size, real(fd, bytes, size, offset));
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset) {
    REAL(pwrite64);
    WRITES("pwrite", fd, size, real(fd, bytes, size, offset));
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    WRITES("writev", fd, count, real(fd, parts, count));
}

int fsync(int fd) {
    REAL(fsync);
    FAILS("fsync", 0, NULL, fd, 0);
    return real(fd);
}

int fdatasync(int fd) {
    REAL(fdatasync);
    FAILS("fsync", 0, NULL, fd, 0);
    return real(fd);
}

int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    FAILS("truncate", 0, NULL, fd, 0);
    return real(fd, size);
}

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    FAILS("truncate", 0, NULL, fd, 0);
    return real(fd, size);
}

int truncate(const char *path, off_t size) {
    REAL(truncate);
    FAILS("truncate", AT_FDCWD, path, 0, 0);
    return real(path, size);
}

int truncate64(const char *path, off64_t size) {
    REAL(truncate64);
    FAILS("truncate", AT_FDCWD, path, 0, 0);
    return real(path, size);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    FAILS("rename", AT_FDCWD, from, 0, 1);
    return real(from, to);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    REAL(renameat);
    FAILS("rename", from_directory, from, 0, 1);
    return real(from_directory, from, to_directory, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    FAILS("mkdir", AT_FDCWD, path, 0, 1);
    return real(path, mode);
}

int mkdirat(int directory, const char *path, mode_t mode) {
    REAL(mkdirat);
    FAILS("mkdir", directory, path, 0, 1);
    return real(directory, path, mode);
}

int symlink(const char *to, const char *path) {
    REAL(symlink);
    FAILS("symlink", AT_FDCWD, path, 0, 1);
    return real(to, path);
}

int unlink(const char *path) {
    REAL(unlink);
    FAILS("unlink", AT_FDCWD, path, 0, 0);
    return real(path);
}

int unlinkat(int directory, const char *path, int flags) {
    REAL(unlinkat);
    FAILS("unlink", directory, path, 0, 0);
    return real(directory, path, flags);
}

int rmdir(const char *path) {
    REAL(rmdir);
    FAILS("unlink", AT_FDCWD, path, 0, 0);
    return real(path);
}

/* Only if opened for writing. */
#define OPENS(name, signature, directory, ...) \
    int name signature { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if ((flags & O_ACCMODE) != O_RDONLY) FAILS("open", directory, path, 0, flags & O_CREAT); \
        return real(__VA_ARGS__, flags, mode); \
    }

OPENS(open, (const char *path, int flags, ...), AT_FDCWD, path)
OPENS(open64, (const char *path, int flags, ...), AT_FDCWD, path)
OPENS(openat, (int directory, const char *path, int flags, ...), directory, directory, path)
OPENS(openat64, (int directory, const char *path, int flags, ...), directory, directory, path)

#define STREAM(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(name); \
        int todo = mode[0] == 'r' && !strchr(mode, '+') ? NOTHING : at("open", AT_FDCWD, path, 0, 1); \
        return todo == FAIL_EIO || todo == FAIL_ENOSPC ? NULL : real(path, mode); \
    }

STREAM(fopen)
STREAM(fopen64)
