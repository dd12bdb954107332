/* Teams that grow and shrink between runs: everybody wanted takes part in each phase exactly once, nobody else does. */
#define _GNU_SOURCE
#include <assert.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "threads.h"

enum { PHASES = 20, UNITS = 50, MOST = 6, RUNS = 100 };

typedef struct work {
    cm_team *team;
    int phases_of[MOST];    /* by thread */
    int on[MOST];           /* CPU it ran on */
    int units[PHASES][UNITS];
} work;

static void work_on(void *arg, int thread) {
    work *w = arg;
    for (int phase = 0; phase < PHASES; phase++) {
        w->phases_of[thread]++;
        for (int i = cm_team_take(w->team, 3); i < UNITS; i = cm_team_take(w->team, 3))
            for (int j = i; j < i + 3 && j < UNITS; j++)
                w->units[phase][j] += phase ? w->units[phase - 1][UNITS - 1 - j] : 1;
        cm_team_barrier(w->team);
    }
    w->on[thread] = sched_getcpu();
}

static void check_run(cm_team *team, int threads) {
    static work w;
    memset(&w, 0, sizeof w);
    w.team = team;
    cm_team_run(team, work_on, &w);
    for (int i = 0; i < MOST; i++)
        assert(w.phases_of[i] == (i < threads ? PHASES : 0));
    for (int i = 0; i < UNITS; i++)
        assert(w.units[PHASES - 1][i] == 1);
}

static void test_sizes_that_change(int own, const int32_t *cores, int num_cores) {
    char err[200];
    unsigned state = (unsigned)own;
    cm_team *team = cm_team_create(own, NULL, err, sizeof err);
    assert(team);
    check_run(team, own);
    for (int run = 0; run < RUNS; run++) {
        state = state * 1664525u + 1013904223u;
        int borrowed = (int)(state >> 16) % (MOST - own + 1);
        int32_t at[MOST];
        for (int i = 0; i < borrowed; i++)
            at[i] = cores[(int)(state >> (8 + i)) % num_cores];
        assert(cm_team_borrow(team, at, borrowed, err, sizeof err) == own + borrowed);
        check_run(team, own + borrowed);
        if (run % 50 == 0)
            usleep(1000); /* all of them asleep */
    }
    cm_team_destroy(team);
}

static void test_borrowed_threads_run_where_they_should(const int32_t *cores, int num_cores) {
    char err[200];
    static work w;
    cm_team *team = cm_team_create(1, NULL, err, sizeof err);
    for (int i = 0; i < num_cores; i++) {
        assert(cm_team_borrow(team, &cores[i], 1, err, sizeof err) == 2);
        memset(&w, 0, sizeof w);
        w.team = team;
        cm_team_run(team, work_on, &w);
        assert(w.on[1] == cores[i]);
    }
    assert(cm_team_borrow(team, &(int32_t){1 << 20}, 1, err, sizeof err) == -1 && strstr(err, "CPU 1048576"));
    check_run(team, 1);
    cm_team_destroy(team);
}

int main(void) {
    cpu_set_t set;
    int32_t cores[CPU_SETSIZE], num_cores = 0;
    assert(sched_getaffinity(0, sizeof set, &set) == 0);
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET((size_t)core, &set))
            cores[num_cores++] = core;
    for (int own = 1; own <= 3; own++)
        test_sizes_that_change(own, cores, num_cores);
    test_borrowed_threads_run_where_they_should(cores, num_cores);
    puts("ok");
    return 0;
}
