/* The step: every thread walks the list of operations and does its part of each. */
#define _GNU_SOURCE
#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "engine.h"
#include "rope.h"
#include "sampling.h"

/* How an operation is split over threads. */
typedef enum split {
    BY_TOKEN_GROUPS,  /* groups of 4 token rows, the same for every operation */
    BY_OUTPUT_GROUPS, /* groups of 4 output rows, likewise */
    BY_RUNS,          /* runs of rows within a block, likewise */
    BY_TAKING         /* whoever is free takes the next */
} split;

static split split_of(const cm_engine *e, const cm_op *op) {
    switch (op->kind) {
    case CM_OP_EMBED: case CM_OP_ROPE_TABLE: return BY_TOKEN_GROUPS;
    case CM_OP_RMSNORM: case CM_OP_ACT_PACK: case CM_OP_NORM_ADD:
        return e->buffers[op->src].space == CM_SPACE_TOKENS ? BY_TOKEN_GROUPS : BY_OUTPUT_GROUPS;
    case CM_OP_GATHER_OUT: return BY_OUTPUT_GROUPS;
    case CM_OP_HEAD_NORM: case CM_OP_ROPE: case CM_OP_KV_STORE: return BY_RUNS;
    default: return BY_TAKING;
    }
}

int cm_ops_chain(const cm_engine *e, const cm_op *first, const cm_op *second) {
    /* Operations of a fixed split only read rows of their own part, but for GATHER_OUT, which reads any row. */
    return second->kind != CM_OP_GATHER_OUT && split_of(e, first) != BY_TAKING &&
           split_of(e, first) == split_of(e, second);
}

/* Part `thread` of [0, count). */
typedef struct range {
    int begin, end;
} range;

static range part_of(const cm_engine *e, int count, int thread) {
    return (range){(int)((int64_t)count * thread / e->threads), (int)((int64_t)count * (thread + 1) / e->threads)};
}

/* Rows of one thread: whole groups, so that packing can follow without a barrier. */
static range rows_of(const cm_engine *e, int num_rows, int thread, range *groups) {
    *groups = part_of(e, (num_rows + CM_TOKEN_GROUP - 1) / CM_TOKEN_GROUP, thread);
    range rows = {groups->begin * CM_TOKEN_GROUP, groups->end * CM_TOKEN_GROUP};
    rows.begin = rows.begin < num_rows ? rows.begin : num_rows;
    rows.end = rows.end < num_rows ? rows.end : num_rows;
    return rows;
}

/* ---- operations on rows ---- */

static int32_t position_of_row(const cm_batch *b, int seq, int row) {
    return b->seq_pos[seq] + row - b->seq_row[seq];
}

static void rope_table(cm_engine *e, range rows) {
    const cm_batch *b = e->batch;
    int half = e->rope_dim / 2, seq = 0;
    for (int row = rows.begin; row < rows.end; row++) {
        while (row >= b->seq_row[seq + 1])
            seq++;
        for (int i = 0; i < 2 && e->inv_freq[i]; i++)
            cm_rope_row(e->cos[i] + (size_t)row * (size_t)half, e->sin[i] + (size_t)row * (size_t)half, e->inv_freq[i],
                        half, e->rope_magnitude[i], position_of_row(b, seq, row));
    }
}

static void row_op(cm_engine *e, const cm_op *op, int thread) {
    int outputs = split_of(e, op) == BY_OUTPUT_GROUPS;
    range groups, rows = rows_of(e, outputs ? e->num_outputs : e->batch->num_rows, thread, &groups);
    if (rows.begin == rows.end)
        return;
    cm_engine_buffer *src = op->src >= 0 ? &e->buffers[op->src] : NULL;
    cm_engine_buffer *dst = op->dst >= 0 ? &e->buffers[op->dst] : NULL;
    switch (op->kind) {
    case CM_OP_EMBED:
        e->kernels->gather_rows(e->weights, &e->matrices[op->matrix], e->batch->tokens + rows.begin,
                                rows.end - rows.begin, dst->rows + (size_t)rows.begin * dst->stride, dst->stride,
                                op->factor);
        break;
    case CM_OP_ROPE_TABLE:
        rope_table(e, rows);
        break;
    case CM_OP_RMSNORM: {
        const cm_vector_ref *v = &e->vectors[op->vector];
        e->kernels->rmsnorm(dst->rows, dst->stride, src->rows, src->stride, (const float *)(e->weights + v->offset),
                            v->length, op->factor, rows.begin, rows.end);
        break;
    }
    case CM_OP_NORM_ADD: {
        const cm_vector_ref *v = &e->vectors[op->vector];
        e->kernels->rmsnorm(src->rows, src->stride, src->rows, src->stride, (const float *)(e->weights + v->offset),
                            v->length, op->factor, rows.begin, rows.end);
        for (int r = rows.begin; r < rows.end; r++) {
            float *to = dst->rows + (size_t)r * dst->stride;
            const float *from = src->rows + (size_t)r * src->stride;
            for (int32_t i = 0; i < v->length; i++)
                to[i] += from[i];
        }
        break;
    }
    case CM_OP_ACT_PACK:
        e->kernels->act_pack(&dst->act, src->rows, src->stride, groups.begin, groups.end, dst->forms);
        break;
    case CM_OP_GATHER_OUT:
        for (int i = rows.begin; i < rows.end; i++)
            memcpy(dst->rows + (size_t)i * dst->stride, src->rows + (size_t)e->output_row[i] * src->stride,
                   src->stride * sizeof(float));
        break;
    }
}

/* ---- operations on runs ---- */

static void run_op(cm_engine *e, const cm_op *op, int thread) {
    const cm_batch *b = e->batch;
    range part = part_of(e, e->num_runs, thread);
    size_t half = (size_t)e->rope_dim / 2;
    for (int i = part.begin; i < part.end; i++) {
        const cm_run *run = &e->runs[i];
        if (op->kind == CM_OP_KV_STORE) {
            cm_engine_buffer *src = &e->buffers[op->src];
            const float *row = src->rows + (size_t)run->row * src->stride;
            e->kernels->kv_store(&e->kv, op->layer, row + op->column[0], row + op->column[1], src->stride,
                                 run->num_rows, position_of_row(b, run->seq, run->row),
                                 b->blocks + b->block_begin[run->seq]);
            continue;
        }
        cm_engine_buffer *dst = &e->buffers[op->dst];
        for (int r = run->row; r < run->row + run->num_rows; r++) {
            float *row = dst->rows + (size_t)r * dst->stride;
            if (op->kind == CM_OP_HEAD_NORM) {
                float *heads = row + op->column[0];
                size_t len = (size_t)e->kv.head_dim;
                e->kernels->rmsnorm(heads, len, heads, len, (const float *)(e->weights + e->vectors[op->vector].offset),
                                    e->kv.head_dim, op->factor, 0, op->heads[0]);
                continue;
            }
            for (int which = 0; which < 2; which++)
                e->kernels->rope(row + op->column[which], op->heads[which], e->kv.head_dim, e->rope_dim,
                                 e->cos[op->rope] + (size_t)r * half, e->sin[op->rope] + (size_t)r * half,
                                 e->rope_pairing);
        }
    }
}

/* ---- operations whose parts are taken ---- */

/* Panels per take: few enough that all threads end together, whole pairs for GLU, fours for narrow batches. */
static int panels_per_take(const cm_engine *e, int num_panels) {
    if (e->threads == 1)
        return num_panels;
    int count = (num_panels + e->threads * 6 - 1) / (e->threads * 6);
    return count >= 4 ? CM_ROUND_UP(count, 4) : 2;
}

static void gemm_op(cm_engine *e, const cm_op *op, int thread) {
    const cm_engine_buffer *src = &e->buffers[op->src];
    const cm_matrix *w = &e->matrices[op->matrix];
    cm_gemm g = {.base = e->weights, .w = w, .x = &src->act};
    if (op->bias >= 0)
        g.bias = (const float *)(e->weights + e->vectors[op->bias].offset);
    if (op->kind == CM_OP_HEAD) {
        const cm_thread_scratch *own = &e->of_thread[thread];
        g.epilogue = CM_EPI_ARGMAX;
        g.best = own->best;
        g.best_id = own->best_id;
        g.nonfinite = own->nonfinite;
        g.logits = e->logit_rows;
        for (int i = 0; i < e->num_outputs; i++) {
            g.best[i] = -INFINITY;
            g.best_id[i] = -1;
            g.nonfinite[i] = 0;
        }
    } else {
        g.epilogue = op->epilogue;
        g.dst = e->buffers[op->dst].rows;
        g.dst_stride = e->buffers[op->dst].stride;
    }
    if (src->act.num_tokens == 0)
        return;
    int step = panels_per_take(e, w->num_panels);
    for (int p = cm_team_take(e->team, step); p < w->num_panels; p = cm_team_take(e->team, step))
        e->kernels->gemm(&g, p, p + step < w->num_panels ? p + step : w->num_panels);
}

static void attention_op(cm_engine *e, const cm_op *op, int thread) {
    const cm_batch *b = e->batch;
    const cm_engine_buffer *src = &e->buffers[op->src], *dst = &e->buffers[op->dst];
    cm_attn a = {
        .kv = e->kv, .layer = op->layer, .num_heads = op->heads[0], .window = op->window,
        .scale = op->factor,
        .q = src->rows + op->column[0], .q_stride = src->stride, .out = dst->rows, .out_stride = dst->stride,
        .num_seqs = b->num_seqs, .seq_row = b->seq_row, .seq_pos = b->seq_pos,
        .block_begin = b->block_begin, .blocks = b->blocks,
    };
    void *scratch = e->of_thread[thread].attention;
    int num_units = e->kernels->attention_units(&a);
    for (int unit = cm_team_take(e->team, 1); unit < num_units; unit = cm_team_take(e->team, 1))
        e->kernels->attention(&a, unit, scratch);
}

static void sample_one(cm_engine *e, int index, int thread) {
    const cm_batch *b = e->batch;
    int seq = e->sample_seq[index], output = e->sample_output[index];
    float best = -INFINITY;
    int32_t best_id = -1, nonfinite = 0;
    for (int t = 0; t < e->threads; t++) {
        const cm_thread_scratch *of = &e->of_thread[t];
        float value = of->best[output];
        int32_t id = of->best_id[output];
        nonfinite |= of->nonfinite[output];
        /* Threads took panels in any order, so equal values are settled here. */
        if (id >= 0 && (best_id < 0 || value > best || (value == best && id < best_id))) {
            best = value;
            best_id = id;
        }
    }
    if (nonfinite || best_id < 0) {
        e->results[index] = (cm_step_result){-1, CM_SAMPLE_NONFINITE};
        return;
    }
    if (b->sampling[seq].temperature > 0) {
        cm_sample_scratch scratch = cm_sample_scratch_at(e->of_thread[thread].sample, e->vocab_size);
        /* The sampled token's own position: the one after the sequence's last row. */
        best_id = cm_sample(e->kernels, e->logit_rows[output], e->vocab_size, best, &b->sampling[seq],
                            position_of_row(b, seq, b->seq_row[seq + 1]), &scratch);
    }
    e->results[index] = (cm_step_result){best_id, CM_SAMPLE_OK};
}

static void run_part(cm_engine *e, const cm_op *op, int thread) {
    switch (op->kind) {
    case CM_OP_GEMM: case CM_OP_HEAD: gemm_op(e, op, thread); break;
    case CM_OP_ATTENTION: attention_op(e, op, thread); break;
    case CM_OP_HEAD_NORM: case CM_OP_ROPE: case CM_OP_KV_STORE: run_op(e, op, thread); break;
    case CM_OP_SAMPLE:
        for (int i = cm_team_take(e->team, 1); i < e->num_samples; i = cm_team_take(e->team, 1))
            sample_one(e, i, thread);
        break;
    default: row_op(e, op, thread); break;
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void cm_engine_walk(void *engine, int thread) {
    cm_engine *e = engine;
    int profiling = thread == 0 && e->op_seconds;
    double begin = profiling ? now() : 0;
    for (int i = 0; i < e->num_ops; i++) {
        run_part(e, &e->ops[i], thread);
        if (e->barrier_after[i])
            cm_team_barrier(e->team);
        /* Another process watches this number: standing still means a stuck step. */
        if (thread == 0 && e->progress)
            __atomic_store_n(e->progress, *e->progress + 1, __ATOMIC_RELAXED);
        if (profiling) {
            double end = now();
            e->op_seconds[i] += end - begin;
            e->op_calls[i]++;
            begin = end;
        }
    }
}
