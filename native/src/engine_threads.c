/* What each thread of an engine has for itself, and the threads it has on the cores of others. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "engine.h"

void cm_thread_place(const cm_engine *e, cm_thread_scratch *t, uint8_t *base, size_t *at) {
    t->best = cm_take(base, at, (size_t)e->max_outputs * sizeof(float));
    t->best_id = cm_take(base, at, (size_t)e->max_outputs * sizeof(int32_t));
    t->nonfinite = cm_take(base, at, (size_t)e->max_outputs);
    t->attention = cm_take(base, at, e->attention_scratch_len);
}

static size_t place_borrowed(const cm_engine *e, cm_thread_scratch *t, uint8_t *base) {
    size_t at = 0;
    cm_thread_place(e, t, base, &at);
    t->sample = cm_take(base, &at, e->sample_scratch_len);
    return at;
}

size_t cm_borrowed_len(const cm_engine *e) {
    return place_borrowed(e, &(cm_thread_scratch){0}, NULL);
}

/* Scratch for `threads` threads in all; it is kept, since who was lent to once will be again. */
static int more_scratch(cm_engine *e, int threads) {
    while (e->num_of_thread < threads) {
        cm_thread_scratch *longer = realloc(e->of_thread, (size_t)(e->num_of_thread + 1) * sizeof *longer);
        if (!longer)
            return -1;
        e->of_thread = longer;
        uint8_t *memory = mmap(NULL, cm_borrowed_len(e), PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            return -1;
        place_borrowed(e, &e->of_thread[e->num_of_thread++], memory);
    }
    return 0;
}

int cm_engine_borrow(cm_engine *e, const int32_t *cores, int num_cores, char *err, size_t err_len) {
    e->threads = cm_team_borrow(e->team, NULL, 0, err, err_len);
    if (cm_engine_check_borrowed(e, cores, num_cores, err, err_len) < 0)
        return -1;
    if (more_scratch(e, e->own_threads + num_cores) < 0) {
        snprintf(err, err_len, "scratch of %zu bytes for each of %d threads: %s", cm_borrowed_len(e), num_cores,
                 strerror(errno));
        return -1;
    }
    int threads = cm_team_borrow(e->team, cores, num_cores, err, err_len);
    if (threads < 0)
        return -1;
    e->threads = threads;
    return 0;
}

void cm_threads_free(cm_engine *e) {
    for (int i = e->own_threads; i < e->num_of_thread; i++)
        munmap(e->of_thread[i].best, cm_borrowed_len(e));
    free(e->of_thread);
}
