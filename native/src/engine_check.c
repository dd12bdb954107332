/* Everything a configuration or a batch can get wrong, found before a pointer is followed. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "engine.h"
#include "sampling.h"

/* Sizes up to these keep every product below 2^63. */
enum { MAX_WIDTH = 1 << 24, MAX_ROWS = 1 << 16, MAX_THREADS = 1024, MAX_ITEMS = 1 << 20 };
/* What the attention kernels can do (isa/attention.inc). */
enum { MAX_HEAD_DIM = 256, HEAD_DIM_STEP = 8 };

typedef struct check {
    const cm_engine_config *c;
    char *err;
    size_t err_len;
    int op; /* index in the plan, for messages; -1 outside */
} check;

__attribute__((format(printf, 2, 3))) static int refuse(const check *k, const char *format, ...) {
    va_list args;
    size_t used = 0;
    if (k->op >= 0) {
        snprintf(k->err, k->err_len, "operation %d: ", k->op);
        used = strnlen(k->err, k->err_len);
    }
    va_start(args, format);
    vsnprintf(k->err + used, k->err_len - used, format, args);
    va_end(args);
    return -1;
}

/* ---- weights ---- */

typedef struct format_size {
    int form, block_len;
    int code_bytes, scale_bytes; /* of 16 rows and block_len k */
} format_size;

static format_size size_of_format(uint32_t format) {
    switch (format) {
    case CM_F32: return (format_size){CM_ACT_F32, 1, 64, 0};
    case CM_F16: case CM_BF16: return (format_size){CM_ACT_F32, 1, 32, 0};
    case CM_Q4_0: return (format_size){CM_ACT_INT8, 32, 256, 32};
    case CM_Q4_1: return (format_size){CM_ACT_INT8, 32, 256, 64};
    case CM_Q5_0: return (format_size){CM_ACT_INT8, 32, 320, 32};
    case CM_Q5_1: return (format_size){CM_ACT_INT8, 32, 320, 64};
    case CM_Q8_0: return (format_size){CM_ACT_INT8, 32, 512, 32};
    case CM_Q4_K: return (format_size){CM_ACT_INT8, 256, 2048, 320};
    case CM_Q5_K: return (format_size){CM_ACT_INT8, 256, 2560, 320};
    case CM_Q6_K: return (format_size){CM_ACT_INT8, 256, 3072, 288};
    default: return (format_size){0, 1, 0, 0};
    }
}

int cm_format_form(uint32_t format) {
    return size_of_format(format).form;
}

static int check_matrix(const check *k, int index) {
    const cm_engine_config *c = k->c;
    const cm_matrix_ref *m = &c->matrices[index];
    if (m->n < 1 || m->n > MAX_WIDTH || m->k < 1 || m->k > MAX_WIDTH || m->num_panels < 1 ||
        (int64_t)m->num_panels * CM_PANEL_ROWS < m->n || m->num_panels > MAX_WIDTH / CM_PANEL_ROWS)
        return refuse(k, "matrix %d: %d panels of %d x %d", index, m->num_panels, m->n, m->k);
    uint64_t table_len = (uint64_t)m->num_panels * sizeof(cm_panel);
    if (m->panels_offset % 8 || m->panels_offset > c->weights_len || table_len > c->weights_len - m->panels_offset)
        return refuse(k, "matrix %d: its table of panels is not inside the weights", index);
    const cm_panel *panels = (const cm_panel *)(c->weights + m->panels_offset);
    for (int i = 0; i < m->num_panels; i++) {
        format_size size = size_of_format(panels[i].format);
        if (!size.form)
            return refuse(k, "matrix %d, panel %d: unknown format %u", index, i, panels[i].format);
        if (m->k % size.block_len)
            return refuse(k, "matrix %d, panel %d: k %d is not a multiple of %d", index, i, m->k, size.block_len);
        uint64_t len = (uint64_t)(m->k / size.block_len) * (uint64_t)(size.code_bytes + size.scale_bytes);
        if (panels[i].offset % 64 || panels[i].offset > c->weights_len || len > c->weights_len - panels[i].offset)
            return refuse(k, "matrix %d, panel %d: not inside the weights", index, i);
    }
    return 0;
}

static int check_vector(const check *k, int index) {
    const cm_vector_ref *v = &k->c->vectors[index];
    if (v->length < 1 || v->length > MAX_WIDTH || v->offset % 64 || v->offset > k->c->weights_len ||
        (uint64_t)v->length * sizeof(float) > k->c->weights_len - v->offset)
        return refuse(k, "vector %d: %d floats are not inside the weights", index, v->length);
    return 0;
}

/* ---- operations ---- */

/* The buffer, or NULL with a message when it is not what the operation needs. space -1: any. */
static const cm_buffer *need_buffer(const check *k, int index, int kind, int space) {
    if (index < 0 || index >= k->c->num_buffers) {
        refuse(k, "buffer %d of %d", index, k->c->num_buffers);
        return NULL;
    }
    const cm_buffer *b = &k->c->buffers[index];
    if (b->kind != kind || (space >= 0 && b->space != space)) {
        refuse(k, "buffer %d is of the wrong kind", index);
        return NULL;
    }
    return b;
}

static int64_t stride_of(const cm_buffer *b) {
    return CM_ROUND_UP((int64_t)b->width, CM_PANEL_ROWS);
}

/* Heads [column, column + heads * head_dim) lie within a row. */
static int check_heads(const check *k, const cm_op *op, const cm_buffer *b, int which, int heads) {
    int64_t end = (int64_t)op->column[which] + (int64_t)heads * k->c->head_dim;
    if (heads < 1 || heads > MAX_WIDTH || op->column[which] < 0 || end > stride_of(b))
        return refuse(k, "%d heads from column %d do not fit in a row of %d", heads, op->column[which], b->width);
    return 0;
}

static int check_matrix_op(const check *k, const cm_op *op) {
    const cm_engine_config *c = k->c;
    int head = op->kind == CM_OP_HEAD, glu = !head && (op->epilogue == CM_GEMM_SILU_GLU || op->epilogue == CM_GEMM_GELU_GLU);
    const cm_buffer *src = need_buffer(k, op->src, CM_BUFFER_ACT, head ? CM_SPACE_OUTPUTS : -1);
    if (!src)
        return -1;
    if (op->matrix < 0 || op->matrix >= c->num_matrices)
        return refuse(k, "matrix %d of %d", op->matrix, c->num_matrices);
    const cm_matrix_ref *m = &c->matrices[op->matrix];
    if (m->k != src->width)
        return refuse(k, "matrix %d takes %d inputs, buffer %d has %d", op->matrix, m->k, op->src, src->width);
    int64_t outputs = (int64_t)m->num_panels * CM_PANEL_ROWS;
    if (op->bias != -1 && (op->bias < 0 || op->bias >= c->num_vectors || c->vectors[op->bias].length != outputs))
        return refuse(k, "bias %d is not a vector of %lld", op->bias, (long long)outputs);
    if (head)
        return m->n == c->vocab_size ? 0 : refuse(k, "%d logits for a vocabulary of %d", m->n, c->vocab_size);
    const cm_buffer *dst = need_buffer(k, op->dst, CM_BUFFER_ROWS, src->space);
    if (!dst)
        return -1;
    if (op->epilogue < CM_GEMM_STORE || op->epilogue > CM_GEMM_GELU_GLU || (glu && m->num_panels % 2))
        return refuse(k, "epilogue %d over %d panels", op->epilogue, m->num_panels);
    outputs /= glu ? 2 : 1;
    if (outputs > stride_of(dst))
        return refuse(k, "matrix %d gives %lld outputs, buffer %d has %d", op->matrix, (long long)outputs, op->dst,
                      dst->width);
    return 0;
}

static int check_epsilon(const check *k, const cm_op *op) {
    return op->factor >= 0 && op->factor <= 1 ? 0 : refuse(k, "epsilon %g", (double)op->factor);
}

static int check_row_op(const check *k, const cm_op *op) {
    const cm_engine_config *c = k->c;
    const cm_buffer *src, *dst;
    switch (op->kind) {
    case CM_OP_EMBED:
        if (!(dst = need_buffer(k, op->dst, CM_BUFFER_ROWS, CM_SPACE_TOKENS)))
            return -1;
        if (op->matrix < 0 || op->matrix >= c->num_matrices || c->matrices[op->matrix].n < c->vocab_size ||
            c->matrices[op->matrix].k > stride_of(dst))
            return refuse(k, "matrix %d is no embedding of %d tokens in rows of %d", op->matrix, c->vocab_size,
                          dst->width);
        return 0;
    case CM_OP_RMSNORM: case CM_OP_NORM_ADD:
        if (!(src = need_buffer(k, op->src, CM_BUFFER_ROWS, -1)) ||
            !(dst = need_buffer(k, op->dst, CM_BUFFER_ROWS, src->space)))
            return -1;
        if (op->vector < 0 || op->vector >= c->num_vectors || c->vectors[op->vector].length > stride_of(src) ||
            c->vectors[op->vector].length > stride_of(dst))
            return refuse(k, "vector %d is no weight for rows of %d", op->vector, src->width);
        if (op->kind == CM_OP_NORM_ADD && op->dst == op->src)
            return refuse(k, "rows cannot be added to themselves");
        return check_epsilon(k, op);
    case CM_OP_ACT_PACK:
        if (!(src = need_buffer(k, op->src, CM_BUFFER_ROWS, -1)) ||
            !(dst = need_buffer(k, op->dst, CM_BUFFER_ACT, src->space)))
            return -1;
        return dst->width <= stride_of(src) ? 0 : refuse(k, "%d inputs from rows of %d", dst->width, src->width);
    default: /* CM_OP_GATHER_OUT */
        if (!(src = need_buffer(k, op->src, CM_BUFFER_ROWS, CM_SPACE_TOKENS)) ||
            !(dst = need_buffer(k, op->dst, CM_BUFFER_ROWS, CM_SPACE_OUTPUTS)))
            return -1;
        return dst->width == src->width ? 0 : refuse(k, "rows of %d into rows of %d", src->width, dst->width);
    }
}

static int check_attention_op(const check *k, const cm_op *op) {
    const cm_engine_config *c = k->c;
    int rope = op->kind == CM_OP_ROPE, norm = op->kind == CM_OP_HEAD_NORM;
    const cm_buffer *b = need_buffer(k, rope || norm ? op->dst : op->src, CM_BUFFER_ROWS, CM_SPACE_TOKENS);
    if (!b)
        return -1;
    if (norm) {
        if (op->vector < 0 || op->vector >= c->num_vectors || c->vectors[op->vector].length != c->head_dim)
            return refuse(k, "vector %d is no weight for heads of %d", op->vector, c->head_dim);
        return check_heads(k, op, b, 0, op->heads[0]) < 0 ? -1 : check_epsilon(k, op);
    }
    if (rope && (op->rope < 0 || op->rope > 1 || !c->inv_freq[op->rope]))
        return refuse(k, "table %d of rotary positions", op->rope);
    if (rope)
        return check_heads(k, op, b, 0, op->heads[0]) < 0 || check_heads(k, op, b, 1, op->heads[1]) < 0 ? -1 : 0;
    if (op->layer < 0 || op->layer >= c->num_layers)
        return refuse(k, "layer %d of %d", op->layer, c->num_layers);
    if (op->kind == CM_OP_KV_STORE)
        return check_heads(k, op, b, 0, c->num_kv_heads) < 0 || check_heads(k, op, b, 1, c->num_kv_heads) < 0 ? -1 : 0;
    const cm_buffer *dst = need_buffer(k, op->dst, CM_BUFFER_ROWS, CM_SPACE_TOKENS);
    if (!dst || check_heads(k, op, b, 0, op->heads[0]) < 0)
        return -1;
    if (op->heads[0] % c->num_kv_heads || (int64_t)op->heads[0] * c->head_dim > stride_of(dst))
        return refuse(k, "%d heads over %d KV heads into rows of %d", op->heads[0], c->num_kv_heads, dst->width);
    if (op->window < 0)
        return refuse(k, "window %d", op->window);
    return op->dst == op->src ? refuse(k, "attention cannot overwrite its input") : 0;
}

static int check_op(const check *k, const cm_op *op) {
    switch (op->kind) {
    case CM_OP_ROPE_TABLE: case CM_OP_SAMPLE: return 0;
    case CM_OP_EMBED: case CM_OP_RMSNORM: case CM_OP_ACT_PACK: case CM_OP_GATHER_OUT:
    case CM_OP_NORM_ADD: return check_row_op(k, op);
    case CM_OP_GEMM: case CM_OP_HEAD: return check_matrix_op(k, op);
    case CM_OP_ROPE: case CM_OP_KV_STORE: case CM_OP_ATTENTION:
    case CM_OP_HEAD_NORM: return check_attention_op(k, op);
    default: return refuse(k, "unknown kind %d", op->kind);
    }
}

/* ---- the whole configuration ---- */

static int check_numbers(const check *k) {
    const cm_engine_config *c = k->c;
    const struct {
        const char *name;
        int64_t value, low, high;
    } limits[] = {
        {"num_ops", c->num_ops, 1, MAX_ITEMS},
        {"num_buffers", c->num_buffers, 1, MAX_ITEMS},
        {"num_matrices", c->num_matrices, 1, MAX_ITEMS},
        {"num_vectors", c->num_vectors, 1, MAX_ITEMS},
        {"vocab_size", c->vocab_size, 1, MAX_WIDTH},
        {"max_positions", c->max_positions, 1, 1 << 30},
        {"max_step_tokens", c->max_step_tokens, 1, MAX_ROWS},
        {"max_sequences", c->max_sequences, 1, c->max_step_tokens},
        {"num_blocks", c->num_blocks, 1, INT32_MAX},
        {"num_layers", c->num_layers, 1, 1 << 12},
        {"num_kv_heads", c->num_kv_heads, 1, 1 << 20},
        {"head_dim", c->head_dim, HEAD_DIM_STEP, MAX_HEAD_DIM},
        {"kv_type", c->kv_type, CM_KV_F16, CM_KV_Q8},
        {"rope_dim", c->rope_dim, 2, c->head_dim},
        {"rope_pairing", c->rope_pairing, 0, 1},
        {"threads", c->threads, 1, MAX_THREADS},
    };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
        if (limits[i].value < limits[i].low || limits[i].value > limits[i].high)
            return refuse(k, "%s is %lld, not %lld to %lld", limits[i].name, (long long)limits[i].value,
                          (long long)limits[i].low, (long long)limits[i].high);
    if (c->head_dim % HEAD_DIM_STEP)
        return refuse(k, "head_dim is %d, not a multiple of %d", c->head_dim, HEAD_DIM_STEP);
    if (c->rope_dim % 2)
        return refuse(k, "rope_dim is %d, not even", c->rope_dim);
    if (!c->inv_freq[0])
        return refuse(k, "inv_freq is missing");
    for (int table = 0; table < 2 && c->inv_freq[table]; table++) {
        for (int i = 0; i < c->rope_dim / 2; i++)
            if (!(c->inv_freq[table][i] >= 0 && c->inv_freq[table][i] <= 1))
                return refuse(k, "inv_freq[%d][%d] is %g, not 0 to 1", table, i, c->inv_freq[table][i]);
        if (!(c->rope_magnitude[table] > 0 && c->rope_magnitude[table] < 1e6))
            return refuse(k, "rope_magnitude[%d] is %g", table, c->rope_magnitude[table]);
    }
    for (int i = 0; c->cores && i < c->threads; i++)
        if (c->cores[i] < 0 || c->cores[i] > MAX_ITEMS)
            return refuse(k, "core %d", c->cores[i]);
    return 0;
}

static int check_memory(const check *k) {
    const cm_engine_config *c = k->c;
    if (!c->weights || (uintptr_t)c->weights % 64 || !c->arena || (uintptr_t)c->arena % 64)
        return refuse(k, "weights and arena must start on 64 bytes");
    /* 2^12 layers * 2^20 heads * 2^8 * 128 bytes is 2^47; the number of blocks is divided, not multiplied. */
    uint64_t block = (uint64_t)c->num_layers * (uint64_t)c->num_kv_heads * cm_kv_head_len(c->kv_type, c->head_dim);
    if ((uint64_t)c->num_blocks > c->arena_len / block)
        return refuse(k, "an arena of %llu bytes does not hold %d blocks of %llu", (unsigned long long)c->arena_len,
                      c->num_blocks, (unsigned long long)block);
    for (int i = 0; i < c->num_buffers; i++) {
        const cm_buffer *b = &c->buffers[i];
        if (b->kind < CM_BUFFER_ROWS || b->kind > CM_BUFFER_ACT || b->space < CM_SPACE_TOKENS ||
            b->space > CM_SPACE_OUTPUTS || b->width < 1 || b->width > MAX_WIDTH)
            return refuse(k, "buffer %d: kind %d, space %d, width %d", i, b->kind, b->space, b->width);
    }
    return 0;
}

int cm_engine_check_config(const cm_engine_config *c, char *err, size_t err_len) {
    check k = {c, err, err_len, -1};
    if (check_numbers(&k) < 0 || check_memory(&k) < 0)
        return -1;
    for (int i = 0; i < c->num_matrices; i++)
        if (check_matrix(&k, i) < 0)
            return -1;
    for (int i = 0; i < c->num_vectors; i++)
        if (check_vector(&k, i) < 0)
            return -1;
    for (k.op = 0; k.op < c->num_ops; k.op++)
        if (check_op(&k, &c->ops[k.op]) < 0)
            return -1;
    return 0;
}

/* ---- a batch ---- */

static int check_sequence(const check *k, const cm_engine *e, const cm_batch *b, int s) {
    int32_t rows = b->seq_row[s + 1] - b->seq_row[s], pos = b->seq_pos[s];
    if (pos < 0 || pos > e->max_positions - rows)
        return refuse(k, "sequence %d: positions %d + %d, limit %d", s, pos, rows, e->max_positions);
    int32_t needed = (pos + rows + CM_BLOCK_TOKENS - 1) / CM_BLOCK_TOKENS;
    int32_t begin = b->block_begin[s], end = b->block_begin[s + 1];
    if (begin < 0 || end < begin || end - begin < needed)
        return refuse(k, "sequence %d: %d blocks, needs %d", s, end - begin, needed);
    for (int32_t i = begin; i < begin + needed; i++)
        if (b->blocks[i] < 0 || b->blocks[i] >= e->num_blocks)
            return refuse(k, "sequence %d: block %d of %d", s, b->blocks[i], e->num_blocks);
    const char *problem = b->sampling[s].wanted ? cm_sampling_problem(&b->sampling[s]) : NULL;
    return problem ? refuse(k, "sequence %d: %s", s, problem) : 0;
}

int cm_engine_check_batch(const cm_engine *e, const cm_batch *b, char *err, size_t err_len) {
    check k = {NULL, err, err_len, -1};
    if (b->num_rows < 1 || b->num_rows > e->max_step_tokens)
        return refuse(&k, "%d rows, not 1 to %d", b->num_rows, e->max_step_tokens);
    if (b->num_seqs < 1 || b->num_seqs > e->max_sequences)
        return refuse(&k, "%d sequences, not 1 to %d", b->num_seqs, e->max_sequences);
    if (b->all_logits && !e->allow_all_logits)
        return refuse(&k, "this engine was not made for all logits");
    for (int s = 0; s <= b->num_seqs; s++) {
        int32_t low = s == 0 ? 0 : s == b->num_seqs ? b->num_rows : 1;
        int32_t high = s == 0 ? 0 : s == b->num_seqs ? b->num_rows : b->num_rows - 1;
        if (b->seq_row[s] < low || b->seq_row[s] > high)
            return refuse(&k, "sequence %d starts at row %d of %d", s, b->seq_row[s], b->num_rows);
    }
    for (int s = 0; s < b->num_seqs; s++)
        if (b->seq_row[s] >= b->seq_row[s + 1])
            return refuse(&k, "sequence %d has no rows", s);
    for (int i = 0; i < b->num_rows; i++)
        if (b->tokens[i] < 0 || b->tokens[i] >= e->vocab_size)
            return refuse(&k, "row %d: token %d of %d", i, b->tokens[i], e->vocab_size);
    for (int s = 0; s < b->num_seqs; s++)
        if (check_sequence(&k, e, b, s) < 0)
            return -1;
    return 0;
}

int cm_engine_check_borrowed(const cm_engine *e, const int32_t *cores, int num_cores, char *err, size_t err_len) {
    check k = {NULL, err, err_len, -1};
    if (num_cores < 0 || num_cores > MAX_THREADS - e->own_threads)
        return refuse(&k, "%d cores borrowed, not 0 to %d", num_cores, MAX_THREADS - e->own_threads);
    for (int i = 0; i < num_cores; i++)
        if (cores[i] < 0 || cores[i] > MAX_ITEMS)
            return refuse(&k, "core %d", cores[i]);
    return 0;
}
