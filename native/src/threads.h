/* The threads of one engine: they run the same function, meet at barriers, and sleep between steps.
 *
 * Waiting spins for some microseconds and then sleeps on a futex, so that an idle engine costs no CPU and a
 * thread whose core is taken by a neighbour holds nobody in a spin for long.
 */
#ifndef CM_THREADS_H
#define CM_THREADS_H

#include <stddef.h>
#include <stdint.h>

typedef struct cm_team cm_team;

/* `threads` threads, the caller's included; helper i is pinned to cores[i] unless cores is NULL. Returns NULL
 * with a message in err, with nothing left running. */
cm_team *cm_team_create(int threads, const int32_t *cores, char *err, size_t err_len);
void cm_team_destroy(cm_team *team);

/* Between two runs: from the next one on num_cores further threads take part, pinned to these cores, and no others;
 * 0 ends that. They are started when first wanted and sleep while they are not. Returns the number of threads of a
 * run, or -1 with a message in err and no further thread taking part. */
int cm_team_borrow(cm_team *team, const int32_t *cores, int num_cores, char *err, size_t err_len);

/* Runs fn(arg, thread) on all threads, thread 0 being the caller; returns when all have returned. */
void cm_team_run(cm_team *team, void (*fn)(void *arg, int thread), void *arg);

/* From within fn: waits until all threads are here. Also rewinds the counter of cm_team_take. */
void cm_team_barrier(cm_team *team);

/* From within fn: the first of `count` further units of work, to be shared out between two barriers. */
int cm_team_take(cm_team *team, int count);

#endif
