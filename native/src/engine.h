/* Inside of an engine, shared by engine.c (life), engine_threads.c (what each thread has, and threads on the cores of
 * others), engine_check.c (what is refused) and engine_ops.c (the step). */
#ifndef CM_ENGINE_H
#define CM_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#include "coremill.h"
#include "kernels.h"
#include "threads.h"

typedef struct cm_engine_buffer {
    int32_t kind, space, width;
    int32_t forms;  /* ACT: what the matrices that read it need */
    size_t stride;  /* ROWS: floats, a whole number of panels */
    size_t max_rows;
    float *rows;    /* [max_rows][stride] */
    cm_act act;
} cm_engine_buffer;

/* A stretch of rows of one sequence within one block: the unit in which keys and values are stored, so that the
 * thread that zeroes a fresh block is the one that fills it. */
typedef struct cm_run {
    int32_t seq, row, num_rows;
} cm_run;

/* What each thread of a step has for itself. O: max_outputs. */
typedef struct cm_thread_scratch {
    float *best;         /* [O] best logit among the panels it took */
    int32_t *best_id;    /* [O] its token */
    uint8_t *nonfinite;  /* [O] */
    uint8_t *attention;  /* [attention_scratch_len] */
    uint8_t *sample;     /* [sample_scratch_len] */
} cm_thread_scratch;

struct cm_engine {
    const cm_kernels *kernels;
    cm_team *team;
    int threads; /* of the next step: own_threads and those borrowed */
    int own_threads, max_step_tokens, max_sequences, max_outputs, max_positions, vocab_size, allow_all_logits;
    const uint8_t *weights;
    uint64_t *progress;

    int num_ops, num_buffers, num_matrices, num_vectors, num_blocks;
    cm_op *ops;
    uint8_t *barrier_after; /* [num_ops] */
    cm_engine_buffer *buffers;
    cm_matrix *matrices;
    cm_vector_ref *vectors;

    cm_kv kv;
    int rope_dim, rope_pairing;
    double rope_magnitude[2];
    double *inv_freq[2]; /* [rope_dim / 2], the second perhaps NULL */

    /* Scratch: one anonymous mapping, laid out once. T: max_step_tokens, O: max_outputs, S: max_sequences. */
    uint8_t *scratch;
    size_t scratch_len;
    float *cos[2], *sin[2];   /* [T][rope_dim / 2], for each inv_freq */
    int32_t *output_row;      /* [O] row of the step that each output comes from */
    int32_t *sample_seq;      /* [S] sequence of each sample */
    int32_t *sample_output;   /* [S] its output */
    cm_run *runs;             /* [T] */
    float *logits;            /* [O][vocab_size] */
    float **logit_rows;       /* [O] NULL where nobody reads them */
    uint8_t *huge_tried;      /* [arena regions of 2 MiB] */
    uint64_t num_regions;
    size_t attention_scratch_len, sample_scratch_len;
    /* The first own_threads lie in the scratch, each further one in a mapping of its own, which begins at `best`. */
    cm_thread_scratch *of_thread; /* [num_of_thread] */
    int num_of_thread;

    /* The step under way. */
    const cm_batch *batch;
    cm_step_result *results;
    int num_outputs, num_samples, num_runs;

    /* Profile; NULL when off. */
    double *op_seconds;
    uint64_t *op_calls;
};

#define CM_ROUND_UP(x, to) (((x) + (to)-1) / (to) * (to))

/* The next `bytes` at `*at`, on a cache line; with base NULL only *at moves. */
static inline void *cm_take(uint8_t *base, size_t *at, size_t bytes) {
    size_t offset = *at;
    *at += CM_ROUND_UP(bytes, (size_t)64);
    return base ? base + offset : NULL;
}

/* Takes what a thread has for itself but `sample`, which greedy runs never touch. */
void cm_thread_place(const cm_engine *e, cm_thread_scratch *t, uint8_t *base, size_t *at);
/* Bytes of the mapping of a borrowed thread. */
size_t cm_borrowed_len(const cm_engine *e);
void cm_threads_free(cm_engine *e);

/* All print to err and return -1 when something is wrong. The first checks plain numbers and every index of a
 * configuration and the shapes it leads to; afterwards the engine is consistent. */
int cm_engine_check_config(const cm_engine_config *c, char *err, size_t err_len);
int cm_engine_check_batch(const cm_engine *e, const cm_batch *b, char *err, size_t err_len);
int cm_engine_check_borrowed(const cm_engine *e, const int32_t *cores, int num_cores, char *err, size_t err_len);

/* Which form of activations a panel format multiplies with. */
int cm_format_form(uint32_t format);

/* One thread's part of the whole step. */
void cm_engine_walk(void *engine, int thread);
/* Whether the operations may follow one another without a barrier: each thread then reads only what it wrote. */
int cm_ops_chain(const cm_engine *e, const cm_op *first, const cm_op *second);

#endif
