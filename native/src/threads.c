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
/* Of a helper: kernels keep what is large in the engine's scratch. */
enum { STACK_BYTES = 1 << 20 };

/* A number that only grows, and those who wait for it to. Alone on its cache line. */
typedef struct event {
    _Alignas(64) atomic_uint number;
    atomic_uint num_sleepers;
} event;

/* Each has a start of its own, so that those who are not wanted sleep through a run. */
typedef struct helper {
    event start; /* a run begins (or the team ends) */
    cm_team *team;
    int index;
    int32_t core; /* where it is pinned, if it is */
    pthread_t thread;
} helper;

struct cm_team {
    event passed; /* a barrier opens */
    _Alignas(64) atomic_int num_arrived;
    _Alignas(64) atomic_int next_unit;
    _Alignas(64) int num_threads; /* of a run, the caller's included; changes between runs only */
    int num_own;                  /* of them not borrowed */
    int num_helpers;              /* started so far */
    int ending;
    void (*fn)(void *arg, int thread);
    void *arg;
    helper **helpers; /* [num_helpers]; the first take part in a run */
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
    /* Neither can change before this thread has arrived; afterwards the next run may have other threads. */
    unsigned seen = atomic_load(&team->passed.number);
    int num_others = team->num_threads - 1;
    if (atomic_fetch_add(&team->num_arrived, 1) == num_others) {
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
        for (int i = 0; i < team->num_threads - 1; i++)
            raise_event(&team->helpers[i]->start);
    }
    fn(arg, 0);
    cm_team_barrier(team);
}

static void *helper_main(void *arg) {
    helper *self = arg;
    cm_team *team = self->team;
    /* A new helper's number is 0, and no start is raised before the previous run's last barrier: none is missed. */
    for (unsigned seen = 0;; seen++) {
        wait_beyond(&self->start, seen);
        if (team->ending)
            return NULL;
        team->fn(team->arg, self->index);
        cm_team_barrier(team);
    }
}

/* The set of one core, for CPU_FREE; NULL without memory. Above 1,023 cores a fixed cpu_set_t is too short. */
static cpu_set_t *set_of(int32_t core, size_t *bytes) {
    *bytes = CPU_ALLOC_SIZE((size_t)core + 1);
    cpu_set_t *set = CPU_ALLOC((size_t)core + 1);
    if (set) {
        CPU_ZERO_S(*bytes, set);
        CPU_SET_S((size_t)core, *bytes, set);
    }
    return set;
}

/* Both return an error number; 0 when done. core: NULL for anywhere. */
static int start_helper(helper *h, const int32_t *core) {
    pthread_attr_t attr;
    sigset_t all, before;
    size_t bytes;
    int rc = pthread_attr_init(&attr);
    if (rc != 0)
        return rc;
    rc = pthread_attr_setstacksize(&attr, STACK_BYTES);
    if (rc == 0 && core) {
        cpu_set_t *set = set_of(*core, &bytes);
        rc = set ? pthread_attr_setaffinity_np(&attr, bytes, set) : ENOMEM;
        CPU_FREE(set);
        h->core = *core;
    }
    /* Signals are for Python's thread. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (rc == 0)
        rc = pthread_create(&h->thread, &attr, helper_main, h);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return rc;
}

static int move_helper(helper *h, int32_t core) {
    if (h->core == core)
        return 0;
    size_t bytes;
    cpu_set_t *set = set_of(core, &bytes);
    int rc = set ? pthread_setaffinity_np(h->thread, bytes, set) : ENOMEM;
    CPU_FREE(set);
    if (rc == 0)
        h->core = core;
    return rc;
}

static int add_helper(cm_team *team, const int32_t *core) {
    helper **longer = realloc(team->helpers, (size_t)(team->num_helpers + 1) * sizeof *longer);
    if (longer)
        team->helpers = longer;
    helper *h = longer ? aligned_alloc(64, sizeof *h) : NULL;
    if (!h)
        return ENOMEM;
    *h = (helper){.team = team, .index = team->num_helpers + 1};
    int rc = start_helper(h, core);
    if (rc == 0)
        team->helpers[team->num_helpers++] = h;
    else
        free(h);
    return rc;
}

/* Always -1. */
static int refused(int thread, const int32_t *core, int rc, char *err, size_t err_len) {
    char where[32] = "";
    if (core)
        snprintf(where, sizeof where, " on CPU %d", *core);
    snprintf(err, err_len, "starting thread %d%s: %s", thread, where, strerror(rc));
    return -1;
}

cm_team *cm_team_create(int threads, const int32_t *cores, char *err, size_t err_len) {
    cm_team *team = aligned_alloc(64, sizeof *team);
    if (!team) {
        snprintf(err, err_len, "out of memory for %d threads", threads);
        return NULL;
    }
    memset(team, 0, sizeof *team);
    team->num_threads = team->num_own = threads;
    for (int i = 1; i < threads; i++) {
        int rc = add_helper(team, cores ? &cores[i] : NULL);
        if (rc != 0) {
            refused(i, cores ? &cores[i] : NULL, rc, err, err_len);
            cm_team_destroy(team);
            return NULL;
        }
    }
    return team;
}

int cm_team_borrow(cm_team *team, const int32_t *cores, int num_cores, char *err, size_t err_len) {
    team->num_threads = team->num_own;
    for (int i = 0; i < num_cores; i++) {
        int at = team->num_own - 1 + i;
        int rc = at < team->num_helpers ? move_helper(team->helpers[at], cores[i]) : add_helper(team, &cores[i]);
        if (rc != 0)
            return refused(at + 1, &cores[i], rc, err, err_len);
    }
    team->num_threads = team->num_own + num_cores;
    return team->num_threads;
}

void cm_team_destroy(cm_team *team) {
    if (!team)
        return;
    team->ending = 1;
    for (int i = 0; i < team->num_helpers; i++)
        raise_event(&team->helpers[i]->start);
    for (int i = 0; i < team->num_helpers; i++) {
        pthread_join(team->helpers[i]->thread, NULL);
        free(team->helpers[i]);
    }
    free(team->helpers);
    free(team);
}
