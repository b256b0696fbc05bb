/* Faults of the operating system, made to order inside a real server process (LD_PRELOAD).
 *
 * FAULT_CONTROL names a file of CONTROL_BYTES that the test has mapped as well (tests/faults/shim.py): it sets rules
 * there at any time and reads how often they were applied. A rule holds for calls of some kinds on files whose path
 * contains its words. The first `skip` such calls pass; then at most `limit` of them (0: all) get the action:
 *
 *   FAIL        returns `error`, and does nothing
 *   STOP        SIGSTOP to the process before the call; after SIGCONT the call is made
 *   STOP_AFTER  the same after the call
 *   SHORT       (a write) only `amount` bytes are written, as a disk may do that is about to be full
 *   TORN        (a write) only `amount` bytes are written, then SIGKILL
 *   HOLD        this thread waits until the rule is taken away; the others go on
 *   COUNT       nothing: the call is only counted
 *
 * With O_DIRECT, `amount` is rounded down to whole blocks. The wall clock is off by `clock_offset_s`.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, OPEN = 4, ALLOCATE = 8, RENAME = 16, RANGE = 32, TRUNCATE = 64, THREAD = 128 };
enum { OFF, FAIL, STOP, STOP_AFTER, SHORT, TORN, HOLD, COUNT };
enum { RULES = 8, BLOCK = 4096, IOV_MAX_HERE = 1024, CONTROL_BYTES = 128 + RULES * 128 };

struct rule {
    uint32_t calls, action;
    int32_t error, skip, limit, hits;
    int64_t amount;
    char path[96];
};

struct control {
    int64_t clock_offset_s;
    char unused[120];
    struct rule rules[RULES];
};

static struct control *control;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("FAULT_CONTROL");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) control = mapped;
    close(fd);
}

static struct rule *rule_for(unsigned call, const char *path) {
    for (int i = 0; control && i < RULES; i++) {
        struct rule *rule = &control->rules[i];
        uint32_t action = __atomic_load_n(&rule->action, __ATOMIC_ACQUIRE);
        if (action == OFF || !(rule->calls & call) || !strstr(path, rule->path)) continue;
        if (__atomic_fetch_sub(&rule->skip, 1, __ATOMIC_SEQ_CST) > 0) continue;
        if (rule->limit && __atomic_load_n(&rule->hits, __ATOMIC_SEQ_CST) >= rule->limit) continue;
        __atomic_add_fetch(&rule->hits, 1, __ATOMIC_SEQ_CST);
        if (action != COUNT) return rule;
    }
    return NULL;
}

static struct rule *rule_for_fd(unsigned call, int fd) {
    char link[32], path[4096];
    if (!control) return NULL;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    errno = before;
    if (size < 0) return NULL;
    path[size] = 0;
    return rule_for(call, path);
}

/* What comes before the call. True: the call fails with errno. */
static int before(struct rule *rule) {
    if (!rule) return 0;
    if (rule->action == FAIL) {
        errno = rule->error;
        return 1;
    }
    if (rule->action == STOP) raise(SIGSTOP);
    while (__atomic_load_n(&rule->action, __ATOMIC_ACQUIRE) == HOLD) usleep(1000);
    return 0;
}

static void after(struct rule *rule) {
    int keep = errno;
    if (rule && rule->action == STOP_AFTER) raise(SIGSTOP);
    errno = keep;
}

/* The first bytes of a vector. */
static int cut(const struct iovec *from, int count, struct iovec *to, size_t bytes) {
    int used = 0;
    for (; used < count && used < IOV_MAX_HERE && bytes; used++) {
        to[used] = from[used];
        if (to[used].iov_len > bytes) to[used].iov_len = bytes;
        bytes -= to[used].iov_len;
    }
    return used;
}

/* Every write comes through here; offset -1: where the file stands. */
static ssize_t write_vector(int fd, const struct iovec *iov, int count, off_t offset, int flags) {
    struct rule *rule = rule_for_fd(WRITE, fd);
    if (before(rule)) return -1;
    struct iovec some[IOV_MAX_HERE];
    int torn = rule && rule->action == TORN;
    if (torn || (rule && rule->action == SHORT)) {
        size_t bytes = (size_t)rule->amount;
        if (fcntl(fd, F_GETFL) & O_DIRECT) bytes -= bytes % BLOCK;
        count = cut(iov, count, some, bytes);
        iov = some;
    }
    ssize_t written = syscall(SYS_pwritev2, fd, iov, (long)count, (long)offset, 0L, (long)flags);
    if (torn) {
        kill(getpid(), SIGKILL);
        pause();
    }
    after(rule);
    return written;
}

ssize_t write(int fd, const void *data, size_t size) {
    struct iovec one = {(void *)data, size};
    return write_vector(fd, &one, 1, -1, 0);
}

ssize_t writev(int fd, const struct iovec *iov, int count) { return write_vector(fd, iov, count, -1, 0); }

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    struct iovec one = {(void *)data, size};
    return write_vector(fd, &one, 1, offset, 0);
}

ssize_t pwritev(int fd, const struct iovec *iov, int count, off_t offset) {
    return write_vector(fd, iov, count, offset, 0);
}

ssize_t pwritev2(int fd, const struct iovec *iov, int count, off_t offset, int flags) {
    return write_vector(fd, iov, count, offset, flags);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return pwrite(fd, data, size, offset); }
ssize_t pwritev64(int fd, const struct iovec *iov, int count, off64_t offset) {
    return write_vector(fd, iov, count, offset, 0);
}
ssize_t pwritev64v2(int fd, const struct iovec *iov, int count, off64_t offset, int flags) {
    return write_vector(fd, iov, count, offset, flags);
}

/* Calls on a descriptor that give 0 or -1. */
#define ON_FD(kind, fd, number, ...)                 \
    do {                                             \
        struct rule *rule = rule_for_fd(kind, fd);   \
        if (before(rule)) return -1;                 \
        int done = (int)syscall(number, __VA_ARGS__); \
        after(rule);                                 \
        return done;                                 \
    } while (0)

int fsync(int fd) { ON_FD(SYNC, fd, SYS_fsync, fd); }
int fdatasync(int fd) { ON_FD(SYNC, fd, SYS_fdatasync, fd); }
int sync_file_range(int fd, off64_t offset, off64_t size, unsigned flags) {
    ON_FD(RANGE, fd, SYS_sync_file_range, fd, (long)offset, (long)size, (long)flags);
}
int ftruncate(int fd, off_t size) { ON_FD(TRUNCATE, fd, SYS_ftruncate, fd, (long)size); }
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int fallocate(int fd, int mode, off_t offset, off_t size) {
    ON_FD(ALLOCATE, fd, SYS_fallocate, fd, (long)mode, (long)offset, (long)size);
}
int fallocate64(int fd, int mode, off64_t offset, off64_t size) { return fallocate(fd, mode, offset, size); }
int posix_fallocate(int fd, off_t offset, off_t size) { return fallocate(fd, 0, offset, size) ? errno : 0; }
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return posix_fallocate(fd, offset, size); }

static int open_at(int directory, const char *path, int flags, mode_t mode) {
    struct rule *rule = rule_for(OPEN, path);
    if (before(rule)) return -1;
    int fd = (int)syscall(SYS_openat, directory, path, flags, (long)mode);
    after(rule);
    return fd;
}

#define MODE(flags)                                   \
    mode_t mode = 0;                                  \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {          \
        va_list more;                                 \
        va_start(more, flags);                        \
        mode = va_arg(more, mode_t);                  \
        va_end(more);                                 \
    }

int open(const char *path, int flags, ...) {
    MODE(flags)
    return open_at(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags)
    return open_at(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}
int openat(int directory, const char *path, int flags, ...) {
    MODE(flags)
    return open_at(directory, path, flags, mode);
}
int openat64(int directory, const char *path, int flags, ...) {
    MODE(flags)
    return open_at(directory, path, flags | O_LARGEFILE, mode);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    struct rule *rule = rule_for(RENAME, to);
    if (before(rule)) return -1;
    int done = (int)syscall(SYS_renameat2, from_directory, from, to_directory, to, 0L);
    after(rule);
    return done;
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

/* (no path: its rules have no words) */
int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*work)(void *), void *argument) {
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    return before(rule_for(THREAD, "")) ? errno : real(thread, how, work, argument);
}

static int64_t offset_s(void) {
    return control ? __atomic_load_n(&control->clock_offset_s, __ATOMIC_ACQUIRE) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(clock, now);
    if (!done && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s();
    return done;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
