#define _GNU_SOURCE
#include "threads.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Rounds of a spin before a thread sleeps. A pause is 40 to 140 cycles on the CPUs we know, so this is about
 * 20 to 80 microseconds: longer than a barrier between threads that run, shorter than a scheduler's slice. */
enum { SPIN_ROUNDS = 1500 };

/* A number that only grows, and those who wait for it to. Alone on its cache line. */
typedef struct event {
    _Alignas(64) atomic_uint number;
    atomic_uint num_sleepers;
} event;

typedef struct helper {
    cm_team *team;
    int index;
    pthread_t thread;
} helper;

struct cm_team {
    event start;   /* a step begins (or the team ends) */
    event passed;  /* a barrier opens */
    _Alignas(64) atomic_int num_arrived;
    _Alignas(64) atomic_int next_unit;
    _Alignas(64) int num_threads;
    int num_helpers; /* those really running */
    int ending;
    void (*fn)(void *arg, int thread);
    void *arg;
    helper helpers[];
};

static long futex(atomic_uint *word, int operation, unsigned value) {
    return syscall(SYS_futex, word, operation, value, NULL, NULL, 0);
}

/* Returns when the event's number is no longer `seen`. */
static void wait_beyond(event *e, unsigned seen) {
    for (int i = 0; i < SPIN_ROUNDS; i++) {
        if (atomic_load_explicit(&e->number, memory_order_acquire) != seen)
            return;
        __builtin_ia32_pause();
    }
    /* Announced before the kernel compares the number: a raise either sees the sleeper or changes the number
     * before it sleeps. */
    atomic_fetch_add(&e->num_sleepers, 1);
    while (atomic_load(&e->number) == seen)
        futex(&e->number, FUTEX_WAIT_PRIVATE, seen);
    atomic_fetch_sub(&e->num_sleepers, 1);
}

static void raise_event(event *e) {
    atomic_fetch_add(&e->number, 1);
    if (atomic_load(&e->num_sleepers))
        futex(&e->number, FUTEX_WAKE_PRIVATE, INT_MAX);
}

void cm_team_barrier(cm_team *team) {
    if (team->num_threads == 1) {
        atomic_store_explicit(&team->next_unit, 0, memory_order_relaxed);
        return;
    }
    /* Cannot change before this thread has arrived. */
    unsigned seen = atomic_load(&team->passed.number);
    if (atomic_fetch_add(&team->num_arrived, 1) == team->num_threads - 1) {
        atomic_store(&team->num_arrived, 0);
        atomic_store(&team->next_unit, 0);
        raise_event(&team->passed);
    } else {
        wait_beyond(&team->passed, seen);
    }
}

int cm_team_take(cm_team *team, int count) {
    return atomic_fetch_add_explicit(&team->next_unit, count, memory_order_relaxed);
}

void cm_team_run(cm_team *team, void (*fn)(void *, int), void *arg) {
    atomic_store(&team->next_unit, 0);
    if (team->num_threads > 1) {
        team->fn = fn;
        team->arg = arg;
        raise_event(&team->start);
    }
    fn(arg, 0);
    cm_team_barrier(team);
}

static void *helper_main(void *arg) {
    helper *self = arg;
    cm_team *team = self->team;
    /* A new team starts at 0, and no start is raised before the previous run's last barrier: none is missed. */
    for (unsigned seen = 0;; seen++) {
        wait_beyond(&team->start, seen);
        if (team->ending)
            return NULL;
        team->fn(team->arg, self->index);
        cm_team_barrier(team);
    }
}

static int start_helper(helper *h, const int32_t *cores, char *err, size_t err_len) {
    pthread_attr_t attr;
    sigset_t all, before;
    int rc = pthread_attr_init(&attr);
    if (rc == 0 && cores) {
        /* Above 1,023 cores a fixed cpu_set_t is too short. */
        size_t bytes = CPU_ALLOC_SIZE((size_t)cores[h->index] + 1);
        cpu_set_t *set = CPU_ALLOC((size_t)cores[h->index] + 1);
        rc = set ? 0 : ENOMEM;
        if (set) {
            CPU_ZERO_S(bytes, set);
            CPU_SET_S((size_t)cores[h->index], bytes, set);
            rc = pthread_attr_setaffinity_np(&attr, bytes, set);
            CPU_FREE(set);
        }
    }
    /* Signals are for Python's thread. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (rc == 0)
        rc = pthread_create(&h->thread, &attr, helper_main, h);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    if (rc != 0)
        snprintf(err, err_len, "starting thread %d%s: %s", h->index, cores ? " on its core" : "", strerror(rc));
    return rc ? -1 : 0;
}

cm_team *cm_team_create(int threads, const int32_t *cores, char *err, size_t err_len) {
    size_t bytes = sizeof(cm_team) + (size_t)threads * sizeof(helper);
    cm_team *team = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!team) {
        snprintf(err, err_len, "out of memory for %d threads", threads);
        return NULL;
    }
    memset(team, 0, bytes);
    team->num_threads = threads;
    for (int i = 1; i < threads; i++) {
        helper *h = &team->helpers[team->num_helpers];
        *h = (helper){.team = team, .index = i};
        if (start_helper(h, cores, err, err_len) < 0) {
            cm_team_destroy(team);
            return NULL;
        }
        team->num_helpers++;
    }
    return team;
}

void cm_team_destroy(cm_team *team) {
    if (!team)
        return;
    team->ending = 1;
    raise_event(&team->start);
    for (int i = 0; i < team->num_helpers; i++)
        pthread_join(team->helpers[i].thread, NULL);
    free(team);
}
