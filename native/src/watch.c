/* No orphans: a worker ends with the process that started it, whatever its interpreter is doing. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "coremill.h"

enum { ORPHAN_EXIT_STATUS = 3 };

static void *watch(void *arg) {
    int fd = (int)(intptr_t)arg;
    char byte;
    ssize_t got;
    do
        got = read(fd, &byte, 1);
    while (got > 0 || (got < 0 && errno == EINTR));
    _exit(ORPHAN_EXIT_STATUS);
}

int cm_watch_parent(int fd, char *err, size_t err_len) {
    /* A stopped process cannot read, but the kernel can kill it. Its parent is the thread that started it, which the
     * coordinator keeps for as long as it has workers. Should the parent be gone already, the pipe says so. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0) {
        snprintf(err, err_len, "prctl(PR_SET_PDEATHSIG): %s", strerror(errno));
        return -1;
    }
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t all, before;
    int rc = pthread_attr_init(&attr);
    if (rc == 0) {
        pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        /* Signals are for Python's thread. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        rc = pthread_create(&thread, &attr, watch, (void *)(intptr_t)fd);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attr);
    }
    if (rc != 0)
        snprintf(err, err_len, "starting the parent watcher: %s", strerror(rc));
    return rc ? -1 : 0;
}
