/* Life of an engine: everything it will ever need is checked, laid out and mapped once. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "rope.h"
#include "sampling.h"

#define HUGE_PAGE ((size_t)2 << 20)

/* Newer than some C libraries' headers. */
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* ---- layout of the scratch ---- */

static void place_buffer(cm_engine_buffer *b, uint8_t *base, size_t *at) {
    if (b->kind == CM_BUFFER_ROWS) {
        b->rows = cm_take(base, at, b->max_rows * b->stride * sizeof(float));
        return;
    }
    size_t groups = CM_ROUND_UP(b->max_rows, (size_t)CM_TOKEN_GROUP) / CM_TOKEN_GROUP, k = (size_t)b->width;
    b->act.k = b->width;
    if (b->forms & CM_ACT_INT8) {
        b->act.q = cm_take(base, at, groups * k * CM_TOKEN_GROUP);
        b->act.blocks = cm_take(base, at, groups * (k / 32) * sizeof(cm_act_block));
    }
    if (b->forms & CM_ACT_F32)
        b->act.f = cm_take(base, at, groups * k * CM_TOKEN_GROUP * sizeof(float));
}

/* Called twice: with base NULL to learn the length, then to set the pointers. */
static size_t place(cm_engine *e, uint8_t *base) {
    size_t at = 0, rows = (size_t)e->max_step_tokens, outputs = (size_t)e->max_outputs;
    size_t half = (size_t)e->rope_dim / 2;
    for (int i = 0; i < e->num_buffers; i++)
        place_buffer(&e->buffers[i], base, &at);
    for (int i = 0; i < 2 && e->inv_freq[i]; i++) {
        e->cos[i] = cm_take(base, &at, rows * half * sizeof(float));
        e->sin[i] = cm_take(base, &at, rows * half * sizeof(float));
    }
    e->output_row = cm_take(base, &at, outputs * sizeof(int32_t));
    e->sample_seq = cm_take(base, &at, (size_t)e->max_sequences * sizeof(int32_t));
    e->sample_output = cm_take(base, &at, (size_t)e->max_sequences * sizeof(int32_t));
    e->runs = cm_take(base, &at, rows * sizeof(cm_run));
    e->logit_rows = cm_take(base, &at, outputs * sizeof(float *));
    for (int i = 0; i < e->own_threads; i++)
        cm_thread_place(e, &e->of_thread[i], base, &at);
    e->huge_tried = cm_take(base, &at, e->num_regions);
    /* Last, as greedy runs never touch them. */
    for (int i = 0; i < e->own_threads; i++)
        e->of_thread[i].sample = cm_take(base, &at, e->sample_scratch_len);
    e->logits = cm_take(base, &at, outputs * (size_t)e->vocab_size * sizeof(float));
    return at;
}

static int map_scratch(cm_engine *e, char *err, size_t err_len) {
    e->scratch_len = CM_ROUND_UP(place(e, NULL), HUGE_PAGE);
    /* Room to start on a huge page; the slack is never touched, so it costs addresses only. */
    size_t mapped = e->scratch_len + HUGE_PAGE;
    uint8_t *memory = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        snprintf(err, err_len, "scratch of %zu bytes: %s", e->scratch_len, strerror(errno));
        return -1;
    }
    uint8_t *aligned = (uint8_t *)CM_ROUND_UP((uintptr_t)memory, HUGE_PAGE);
    if (aligned != memory)
        munmap(memory, (size_t)(aligned - memory));
    if (aligned + e->scratch_len != memory + mapped)
        munmap(aligned + e->scratch_len, (size_t)(memory + mapped - aligned) - e->scratch_len);
    madvise(aligned, e->scratch_len, MADV_HUGEPAGE); /* advice only */
    e->scratch = aligned;
    place(e, aligned);
    return 0;
}

/* ---- making ---- */

static void *copy_of(const void *source, size_t bytes) {
    void *copy = malloc(bytes);
    if (copy)
        memcpy(copy, source, bytes);
    return copy;
}

static void set_numbers(cm_engine *e, const cm_engine_config *c) {
    e->threads = e->own_threads = e->num_of_thread = c->threads;
    e->max_step_tokens = c->max_step_tokens;
    e->max_sequences = c->max_sequences;
    e->allow_all_logits = c->all_logits;
    e->max_outputs = c->all_logits ? c->max_step_tokens : c->max_sequences;
    e->max_positions = c->max_positions;
    e->vocab_size = c->vocab_size;
    e->weights = c->weights;
    e->progress = c->progress;
    e->num_ops = c->num_ops;
    e->num_buffers = c->num_buffers;
    e->num_matrices = c->num_matrices;
    e->num_vectors = c->num_vectors;
    e->num_blocks = c->num_blocks;
    e->rope_dim = c->rope_dim;
    e->rope_pairing = c->rope_pairing;
    memcpy(e->rope_magnitude, c->rope_magnitude, sizeof e->rope_magnitude);
    e->kv.arena = c->arena;
    e->kv.num_layers = c->num_layers;
    e->kv.num_kv_heads = c->num_kv_heads;
    e->kv.head_dim = c->head_dim;
    e->kv.type = c->kv_type;
    e->kv.head_bytes = cm_kv_head_len(c->kv_type, c->head_dim);
    e->kv.layer_bytes = e->kv.head_bytes * (size_t)c->num_kv_heads;
    e->kv.block_bytes = e->kv.layer_bytes * (size_t)c->num_layers;
    e->num_regions = (uintptr_t)c->arena % HUGE_PAGE == 0 ? c->arena_len / HUGE_PAGE : 0;
    e->attention_scratch_len = CM_ROUND_UP(e->kernels->attention_scratch_bytes, (size_t)64);
    e->sample_scratch_len = cm_sample_scratch_bytes(c->vocab_size);
}

static int set_tables(cm_engine *e, const cm_engine_config *c) {
    e->ops = copy_of(c->ops, (size_t)c->num_ops * sizeof(cm_op));
    e->vectors = copy_of(c->vectors, (size_t)c->num_vectors * sizeof(cm_vector_ref));
    for (int i = 0; i < 2 && c->inv_freq[i]; i++)
        e->inv_freq[i] = copy_of(c->inv_freq[i], (size_t)c->rope_dim / 2 * sizeof(double));
    e->of_thread = calloc((size_t)c->threads, sizeof(cm_thread_scratch));
    e->barrier_after = calloc((size_t)c->num_ops, 1);
    e->buffers = calloc((size_t)c->num_buffers, sizeof(cm_engine_buffer));
    e->matrices = calloc((size_t)c->num_matrices, sizeof(cm_matrix));
    if (c->profile) {
        e->op_seconds = calloc((size_t)c->num_ops, sizeof(double));
        e->op_calls = calloc((size_t)c->num_ops, sizeof(uint64_t));
    }
    if (!e->ops || !e->vectors || !e->inv_freq[0] || (c->inv_freq[1] && !e->inv_freq[1]) || !e->of_thread || !e->barrier_after || !e->buffers || !e->matrices ||
        (c->profile && (!e->op_seconds || !e->op_calls)))
        return -1;
    for (int i = 0; i < c->num_buffers; i++) {
        cm_engine_buffer *b = &e->buffers[i];
        b->kind = c->buffers[i].kind;
        b->space = c->buffers[i].space;
        b->width = c->buffers[i].width;
        b->stride = CM_ROUND_UP((size_t)b->width, (size_t)CM_PANEL_ROWS);
        b->max_rows = (size_t)(b->space == CM_SPACE_OUTPUTS ? e->max_outputs : e->max_step_tokens);
    }
    for (int i = 0; i < c->num_matrices; i++) {
        const cm_matrix_ref *m = &c->matrices[i];
        e->matrices[i] = (cm_matrix){.n = m->n, .k = m->k, .num_panels = m->num_panels,
                                     .panels = (const cm_panel *)(c->weights + m->panels_offset)};
    }
    for (int i = 0; i < e->num_ops; i++) {
        const cm_op *op = &e->ops[i];
        if (op->kind == CM_OP_GEMM || op->kind == CM_OP_HEAD)
            for (int p = 0; p < e->matrices[op->matrix].num_panels; p++)
                e->buffers[op->src].forms |= cm_format_form(e->matrices[op->matrix].panels[p].format);
        /* The end of a run is a barrier of its own. */
        e->barrier_after[i] = i + 1 < e->num_ops && !cm_ops_chain(e, op, op + 1);
    }
    return 0;
}

/* Checked and complete but for scratch and threads. */
static cm_engine *prepare(const cm_engine_config *c, char *err, size_t err_len) {
    if (!cm_active()) {
        snprintf(err, err_len, "no instruction set has been selected");
        return NULL;
    }
    if (cm_engine_check_config(c, err, err_len) < 0)
        return NULL;
    cm_engine *e = calloc(1, sizeof *e);
    if (!e) {
        snprintf(err, err_len, "out of memory");
        return NULL;
    }
    e->kernels = cm_active();
    set_numbers(e, c);
    if (set_tables(e, c) == 0)
        return e;
    snprintf(err, err_len, "out of memory for a plan of %d operations", c->num_ops);
    cm_engine_destroy(e);
    return NULL;
}

cm_engine *cm_engine_create(const cm_engine_config *c, char *err, size_t err_len) {
    cm_engine *e = prepare(c, err, err_len);
    if (!e || (map_scratch(e, err, err_len) == 0 && (e->team = cm_team_create(c->threads, c->cores, err, err_len))))
        return e;
    cm_engine_destroy(e);
    return NULL;
}

uint64_t cm_engine_scratch_needed(const cm_engine_config *c, char *err, size_t err_len) {
    cm_engine *e = prepare(c, err, err_len);
    uint64_t bytes = e ? CM_ROUND_UP(place(e, NULL), HUGE_PAGE) : 0;
    cm_engine_destroy(e);
    return bytes;
}

void cm_engine_destroy(cm_engine *e) {
    if (!e)
        return;
    cm_team_destroy(e->team);
    if (e->scratch)
        munmap(e->scratch, e->scratch_len);
    cm_threads_free(e);
    free(e->ops);
    free(e->vectors);
    free(e->inv_freq[0]);
    free(e->inv_freq[1]);
    free(e->barrier_after);
    free(e->buffers);
    free(e->matrices);
    free(e->op_seconds);
    free(e->op_calls);
    free(e);
}

/* ---- a step ---- */

/* Which rows become outputs, and what is sampled from which. */
static void plan_outputs(cm_engine *e, const cm_batch *b) {
    e->num_outputs = b->all_logits ? b->num_rows : 0;
    e->num_samples = 0;
    for (int row = 0; row < e->num_outputs; row++) {
        e->output_row[row] = row;
        e->logit_rows[row] = e->logits + (size_t)row * (size_t)e->vocab_size;
    }
    for (int s = 0; s < b->num_seqs; s++) {
        if (!b->sampling[s].wanted)
            continue;
        int row = b->seq_row[s + 1] - 1, output = row;
        if (!b->all_logits) {
            output = e->num_outputs++;
            e->output_row[output] = row;
            e->logit_rows[output] =
                b->sampling[s].temperature > 0 ? e->logits + (size_t)output * (size_t)e->vocab_size : NULL;
        }
        e->sample_seq[e->num_samples] = s;
        e->sample_output[e->num_samples++] = output;
    }
}

static void plan_runs(cm_engine *e, const cm_batch *b) {
    e->num_runs = 0;
    for (int s = 0; s < b->num_seqs; s++)
        for (int row = b->seq_row[s], pos = b->seq_pos[s]; row < b->seq_row[s + 1];) {
            int rows = CM_BLOCK_TOKENS - pos % CM_BLOCK_TOKENS;
            if (rows > b->seq_row[s + 1] - row)
                rows = b->seq_row[s + 1] - row;
            e->runs[e->num_runs++] = (cm_run){s, row, rows};
            row += rows;
            pos += rows;
        }
}

/* The part of the arena that a fresh block lies in becomes huge pages before its first use: a shared mapping
 * gets them on request only. Best effort, once per region; 2 MiB are zeroed, as by 512 small faults. */
static void want_huge_pages(cm_engine *e, int32_t block) {
    size_t begin = (size_t)block * e->kv.block_bytes;
    size_t last = (begin + e->kv.block_bytes - 1) / HUGE_PAGE;
    for (size_t region = begin / HUGE_PAGE; region <= last && region < e->num_regions; region++)
        if (!e->huge_tried[region]) {
            e->huge_tried[region] = 1;
            /* A region without any page yet is refused: reading makes the first one. */
            (void)*(volatile const uint8_t *)(e->kv.arena + region * HUGE_PAGE);
            madvise(e->kv.arena + region * HUGE_PAGE, HUGE_PAGE, MADV_COLLAPSE);
        }
}

static void prepare_blocks(cm_engine *e, const cm_batch *b) {
    for (int i = 0; i < e->num_runs; i++) {
        const cm_run *run = &e->runs[i];
        int pos = b->seq_pos[run->seq] + run->row - b->seq_row[run->seq];
        want_huge_pages(e, b->blocks[b->block_begin[run->seq] + pos / CM_BLOCK_TOKENS]);
    }
}

int cm_engine_step(cm_engine *e, const cm_batch *b, cm_step_result *results, char *err, size_t err_len) {
    if (cm_engine_check_batch(e, b, err, err_len) < 0)
        return -1;
    e->batch = b;
    e->results = results;
    plan_outputs(e, b);
    plan_runs(e, b);
    prepare_blocks(e, b);
    for (int i = 0; i < e->num_buffers; i++)
        e->buffers[i].act.num_tokens = e->buffers[i].space == CM_SPACE_OUTPUTS ? e->num_outputs : b->num_rows;
    cm_team_run(e->team, cm_engine_walk, e);
    return e->num_samples;
}

const float *cm_engine_logits(const cm_engine *e, size_t *stride) {
    *stride = (size_t)e->vocab_size;
    return e->logits;
}

uint64_t cm_engine_scratch_bytes(const cm_engine *e) {
    return e->scratch_len + cm_borrowed_len(e) * (size_t)(e->num_of_thread - e->own_threads);
}

int cm_engine_profile(const cm_engine *e, double *seconds, uint64_t *calls) {
    if (!e->op_seconds)
        return 0;
    memcpy(seconds, e->op_seconds, (size_t)e->num_ops * sizeof(double));
    memcpy(calls, e->op_calls, (size_t)e->num_ops * sizeof(uint64_t));
    return 1;
}

int cm_engine_copy_block(cm_engine *e, int32_t source, int32_t target, int32_t num_tokens, char *err, size_t err_len) {
    if (source < 0 || source >= e->num_blocks || target < 0 || target >= e->num_blocks || source == target ||
        num_tokens < 0 || num_tokens > CM_BLOCK_TOKENS) {
        snprintf(err, err_len, "%d tokens of block %d to block %d: blocks are 0 to %d, tokens 0 to %d", num_tokens,
                 source, target, e->num_blocks - 1, CM_BLOCK_TOKENS);
        return -1;
    }
    want_huge_pages(e, target);
    cm_kv_copy_tokens(&e->kv, source, target, num_tokens);
    if (e->progress)
        __atomic_fetch_add(e->progress, 1, __ATOMIC_RELAXED);
    return 0;
}
