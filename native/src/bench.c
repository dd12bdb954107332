/* What this machine's cores can do: bare dots, and matrix products with weights in L1 or from memory.
 * Threads start each product together at a barrier and the slowest ends it. A neighbour on the machine disturbs
 * some products of a pass but rarely the same in all, so the best time of each counts, and these are added up. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "coremill.h"
#include "dispatch.h"
#include "gemm_layout.h"

enum { MAX_THREADS = 1024, HUGE_PAGE = 2 << 20 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- products on several threads ---- */

typedef struct bench {
    const cm_kernels *kernels;
    const cm_gemm *gemm; /* [num_matrices], run one after another as layers are */
    double *best;        /* [num_matrices] seconds */
    int num_matrices, num_passes, num_threads;
    pthread_barrier_t barrier;
} bench;

typedef struct bench_thread {
    bench *bench;
    int index;
    pthread_t id;
} bench_thread;

static void *run_thread(void *arg) {
    bench_thread *self = arg;
    bench *b = self->bench;
    for (int pass = 0; pass <= b->num_passes; pass++) { /* the first one warms up */
        for (int i = 0; i < b->num_matrices; i++) {
            int panels = b->gemm[i].w->num_panels;
            pthread_barrier_wait(&b->barrier);
            double start = now();
            b->kernels->gemm(b->gemm + i, panels * self->index / b->num_threads,
                             panels * (self->index + 1) / b->num_threads);
            if (b->num_threads > 1)
                pthread_barrier_wait(&b->barrier);
            double seconds = now() - start;
            if (self->index == 0 && (pass == 1 || seconds < b->best[i]))
                b->best[i] = seconds;
        }
    }
    return NULL;
}

/* Sum of best times, or -1 when no threads can be had. */
static double run_bench(bench *b) {
    bench_thread *threads = calloc((size_t)b->num_threads, sizeof *threads);
    b->best = calloc((size_t)b->num_matrices, sizeof *b->best);
    double sum = -1;
    int started = 0;
    if (threads && b->best) {
        pthread_barrier_init(&b->barrier, NULL, (unsigned)b->num_threads);
        for (int i = 0; i < b->num_threads; i++)
            threads[i] = (bench_thread){.bench = b, .index = i};
        while (started < b->num_threads - 1 &&
               pthread_create(&threads[started + 1].id, NULL, run_thread, &threads[started + 1]) == 0)
            started++;
        if (started == b->num_threads - 1) {
            run_thread(&threads[0]);
            sum = 0;
            for (int i = 0; i < b->num_matrices; i++)
                sum += b->best[i];
        }
        for (int i = 1; i <= started; i++) {
            if (sum < 0) /* it waits at the barrier, and would for ever */
                pthread_cancel(threads[i].id);
            pthread_join(threads[i].id, NULL);
        }
        pthread_barrier_destroy(&b->barrier);
    }
    free(threads);
    free(b->best);
    return sum;
}

/* ---- memory ---- */

/* Whole huge pages where the system gives them; NULL when there is no memory. */
static uint8_t *take(size_t len) {
    len = (len + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void *p = NULL;
    if (posix_memalign(&p, HUGE_PAGE, len) != 0)
        return NULL;
    madvise(p, len, MADV_HUGEPAGE);
    return p;
}

static void fill_random(uint8_t *p, size_t len, uint16_t keep, uint16_t set) {
    uint64_t x = 0x9e3779b97f4a7c15u;
    for (size_t i = 0; i + 2 <= len; i += 2) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        uint16_t v = (uint16_t)((x & keep) | set);
        memcpy(p + i, &v, 2);
    }
}

/* ---- products ---- */

double cm_bench_dot(int isa, double seconds) {
    if (!cm_isa_supported(isa))
        return -1;
    const cm_kernels *kernels = cm_kernels_of(isa);
    double best = 0;
    for (double start = now(), begin = start; begin - start < seconds;) {
        uint64_t done = kernels->dot_rounds(20000);
        double end = now(), rate = (double)done / (end - begin);
        best = rate > best ? rate : best;
        begin = end;
    }
    return best;
}

/* What one benchmark of products works on; all NULL at first. */
typedef struct product {
    uint8_t *weights, *acts, *blocks;
    float *src, *dst;
    cm_panel *table;
    cm_gemm *gemm; /* [num_matrices] */
} product;

static void product_free(product *p) {
    free(p->weights);
    free(p->acts);
    free(p->blocks);
    free(p->src);
    free(p->dst);
    free(p->table);
    free(p->gemm);
}

/* 0, or -1 when there is no memory. stored: panels of weights that exist; the others are the first one again. */
static int product_make(product *p, int format, int num_panels, size_t k, size_t num_tokens, size_t num_matrices,
                        size_t stored) {
    size_t bytes = cm_panel_bytes(format, (int32_t)k), groups = (num_tokens + 3) / 4;
    size_t codes = cm_is_float_format(format) ? 0 : cm_codes_bytes(format, k);
    size_t total = (size_t)num_panels * num_matrices;
    p->weights = take(stored * bytes);
    p->acts = take(groups * k * 16);
    p->blocks = take(groups * k * 2 + 64);
    p->src = (float *)take(num_tokens * k * 4);
    p->dst = (float *)take(num_tokens * (size_t)num_panels * 64);
    p->table = calloc(total, sizeof *p->table);
    p->gemm = calloc(num_matrices, sizeof *p->gemm);
    if (!p->weights || !p->acts || !p->blocks || !p->src || !p->dst || !p->table || !p->gemm)
        return -1;
    for (size_t i = 0; i < total; i++) {
        p->table[i] = (cm_panel){.offset = i < stored ? i * bytes : 0, .format = (uint32_t)format};
        if (i < stored) {
            uint8_t *panel = p->weights + i * bytes;
            fill_random(panel, codes, 0xffff, 0);
            fill_random(panel + codes, bytes - codes, 0x03ff, 0x2000); /* as f16, about 0.01 */
        }
    }
    for (size_t i = 0; i < num_tokens * k; i++)
        p->src[i] = (float)(int)(i * 2654435761u % 2001) - 1000;
    return 0;
}

double cm_bench_gemm(int isa, int format, int n, int k, int num_tokens, int num_matrices, int num_passes,
                     int num_threads) {
    if (!cm_isa_supported(isa) || !cm_panel_bytes(format, k) || n < 16 || num_tokens < 1 || num_matrices < 0 ||
        num_passes < 1 || num_threads < 1 || num_threads > MAX_THREADS)
        return -1;
    const cm_kernels *kernels = cm_kernels_of(isa);
    int hot = num_matrices == 0, panels = n / 16, is_float = cm_is_float_format(format);
    num_matrices = hot ? 1 : num_matrices;
    product p = {0};
    double seconds = -1;
    if (product_make(&p, format, panels, (size_t)k, (size_t)num_tokens, (size_t)num_matrices,
                     hot ? 1 : (size_t)panels * (size_t)num_matrices) == 0) {
        cm_act x = {.k = k, .num_tokens = num_tokens};
        if (is_float) {
            x.f = (float *)p.acts;
        } else {
            x.q = (int8_t *)p.acts;
            x.blocks = (cm_act_block *)p.blocks;
        }
        kernels->act_pack(&x, p.src, (size_t)k, 0, (num_tokens + 3) / 4, is_float ? CM_ACT_F32 : CM_ACT_INT8);
        cm_matrix *w = calloc((size_t)num_matrices, sizeof *w);
        for (int i = 0; w && i < num_matrices; i++) {
            const cm_panel *table = p.table + (size_t)i * (size_t)panels;
            w[i] = (cm_matrix){.n = panels * 16, .k = k, .num_panels = panels, .panels = table};
            p.gemm[i] = (cm_gemm){.base = p.weights, .w = w + i, .x = &x, .epilogue = CM_EPI_STORE,
                                  .dst = p.dst, .dst_stride = (size_t)panels * 16};
        }
        bench b = {.kernels = kernels, .gemm = p.gemm, .num_matrices = num_matrices, .num_passes = num_passes,
                   .num_threads = num_threads};
        seconds = w ? run_bench(&b) : -1;
        free(w);
    }
    product_free(&p);
    return seconds;
}
