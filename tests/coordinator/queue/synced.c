/* For LD_PRELOAD: after each fsync and fdatasync of a file whose name holds "jobs.sqlite", PATH.synced is what is
 * certain to be on the disk: the file as it was then. A test puts these copies in place of the files, as a loss of power
 * would in the worst case. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void keep_copy(int fd)
{
    char link[64], path[PATH_MAX], beside[PATH_MAX + 16], copy[PATH_MAX + 16];
    static char buffer[1 << 16]; /* one thread of the tested process writes */
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return;
    path[length] = 0;
    if (!strstr(path, "jobs.sqlite"))
        return;
    snprintf(beside, sizeof beside, "%s.synced.new", path);
    snprintf(copy, sizeof copy, "%s.synced", path);
    int out = open(beside, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    off_t offset = 0;
    ssize_t count;
    while ((count = pread(fd, buffer, sizeof buffer, offset)) > 0) {
        if (write(out, buffer, count) != count)
            _exit(99);
        offset += count;
    }
    close(out);
    rename(beside, copy);
}

#define WRAP(NAME)                                                                                                     \
    int NAME(int fd)                                                                                                   \
    {                                                                                                                  \
        static int (*original)(int);                                                                                   \
        if (!original)                                                                                                 \
            original = (int (*)(int))dlsym(RTLD_NEXT, #NAME);                                                          \
        int result = original(fd);                                                                                     \
        if (!result)                                                                                                   \
            keep_copy(fd);                                                                                             \
        return result;                                                                                                 \
    }

WRAP(fsync)
WRAP(fdatasync)
