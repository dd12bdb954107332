/* Inside of an engine, shared by engine.c (life), engine_check.c (what is refused) and engine_ops.c (the step). */
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

struct cm_engine {
    const cm_kernels *kernels;
    cm_team *team;
    int threads, max_step_tokens, max_sequences, max_outputs, max_positions, vocab_size, allow_all_logits;
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
    double rope_magnitude;
    double *inv_freq; /* [rope_dim / 2] */

    /* Scratch: one anonymous mapping, laid out once. T: max_step_tokens, O: max_outputs, S: max_sequences. */
    uint8_t *scratch;
    size_t scratch_len;
    float *cos, *sin;         /* [T][rope_dim / 2] */
    int32_t *output_row;      /* [O] row of the step that each output comes from */
    int32_t *sample_seq;      /* [S] sequence of each sample */
    int32_t *sample_output;   /* [S] its output */
    cm_run *runs;             /* [T] */
    float *logits;            /* [O][vocab_size] */
    float **logit_rows;       /* [O] NULL where nobody reads them */
    float *best;              /* [threads][O] */
    int32_t *best_id;         /* [threads][O] */
    uint8_t *nonfinite;       /* [threads][O] */
    uint8_t *attention_scratch; /* [threads][attention_scratch_len] */
    size_t attention_scratch_len;
    uint8_t *sample_scratch; /* [threads][sample_scratch_len] */
    size_t sample_scratch_len;
    uint8_t *huge_tried; /* [arena regions of 2 MiB] */
    uint64_t num_regions;

    /* The step under way. */
    const cm_batch *batch;
    cm_step_result *results;
    int num_outputs, num_samples, num_runs;

    /* Profile; NULL when off. */
    double *op_seconds;
    uint64_t *op_calls;
};

#define CM_ROUND_UP(x, to) (((x) + (to)-1) / (to) * (to))

/* Both print to err and return -1 when something is wrong. The first checks plain numbers and every index of a
 * configuration and the shapes it leads to; afterwards the engine is consistent. */
int cm_engine_check_config(const cm_engine_config *c, char *err, size_t err_len);
int cm_engine_check_batch(const cm_engine *e, const cm_batch *b, char *err, size_t err_len);

/* Which form of activations a panel format multiplies with. */
int cm_format_form(uint32_t format);

/* One thread's part of the whole step. */
void cm_engine_walk(void *engine, int thread);
/* Whether the operations may follow one another without a barrier: each thread then reads only what it wrote. */
int cm_ops_chain(const cm_engine *e, const cm_op *first, const cm_op *second);

#endif
