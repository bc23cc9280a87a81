/* As long as the file HANG_FILE exists, calls on paths below HANG_PATH do not return; with
   LD_PRELOAD, as on a network file system that hangs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_on(void) {
    const char *file = getenv("HANG_FILE");
    return file && syscall(SYS_faccessat, AT_FDCWD, file, F_OK) == 0;
}
static void hold(const char *path) {
    const char *below = getenv("HANG_PATH");
    while (path && below && *below && !strncmp(path, below, strlen(below)) && is_on()) usleep(20000);
}
static void hold_fd(int fd) {
    char link[64], path[4096];
    if (!is_on()) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size > 0) { path[size] = 0; hold(path); }
}
#define NEXT(name) static __typeof__(&name) next; if (!next) next = dlsym(RTLD_NEXT, #name)
#define OPEN(name) int name(const char *path, int flags, ...) { NEXT(name); va_list more; va_start(more, flags); \
    int mode = va_arg(more, int); va_end(more); hold(path); return next(path, flags, mode); }
#define OPENAT(name) int name(int at, const char *path, int flags, ...) { NEXT(name); va_list more; va_start(more, flags); \
    int mode = va_arg(more, int); va_end(more); hold(path); return next(at, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
int stat(const char *p, struct stat *s) { NEXT(stat); hold(p); return next(p, s); }
int stat64(const char *p, struct stat64 *s) { NEXT(stat64); hold(p); return next(p, s); }
int fstatat(int a, const char *p, struct stat *s, int f) { NEXT(fstatat); hold(p); return next(a, p, s, f); }
int fstatat64(int a, const char *p, struct stat64 *s, int f) { NEXT(fstatat64); hold(p); return next(a, p, s, f); }
int rename(const char *a, const char *b) { NEXT(rename); hold(a); return next(a, b); }
int renameat(int x, const char *a, int y, const char *b) { NEXT(renameat); hold(a); return next(x, a, y, b); }
int link(const char *a, const char *b) { NEXT(link); hold(b); return next(a, b); }
int linkat(int x, const char *a, int y, const char *b, int f) { NEXT(linkat); hold(b); return next(x, a, y, b, f); }
int unlink(const char *p) { NEXT(unlink); hold(p); return next(p); }
int mkdir(const char *p, mode_t m) { NEXT(mkdir); hold(p); return next(p, m); }
int fsync(int fd) { NEXT(fsync); hold_fd(fd); return next(fd); }
int fdatasync(int fd) { NEXT(fdatasync); hold_fd(fd); return next(fd); }
ssize_t write(int fd, const void *b, size_t n) { NEXT(write); if (fd > 2) hold_fd(fd); return next(fd, b, n); }
