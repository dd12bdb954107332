/* The table every instruction set fills in, and the arguments of its kernels.
 *
 * Each isa/<name>.c defines one constant table by including the templates of native/isa with its own
 * primitives. Whatever the table, a kernel gives the same bits as the scalar one, which is the specification:
 * integer dots are exact, and each output element is one chain of float operations in a fixed order, so
 * neither the tile, nor the batch, nor the instruction set shows in a result.
 *
 * Kernels do not allocate, do not check and do not fail: everything they are handed was validated when the
 * model was bound. Buffers belong to the caller. Work is split by the caller over panels, rows or units only;
 * any split gives the same bits. A table is complete: callers never test a pointer for NULL.
 */
#ifndef CM_KERNELS_H
#define CM_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define CM_PANEL_ROWS 16   /* outputs in a panel of a packed matrix */
#define CM_TOKEN_GROUP 4   /* tokens that lie interleaved in packed activations */
#define CM_BLOCK_TOKENS 32 /* positions in a block of the KV arena */

/* Weight formats: the type numbers of GGUF files. */
enum {
    CM_F32 = 0,
    CM_F16 = 1,
    CM_Q4_0 = 2,
    CM_Q4_1 = 3,
    CM_Q5_0 = 6,
    CM_Q5_1 = 7,
    CM_Q8_0 = 8,
    CM_Q4_K = 12,
    CM_Q5_K = 13,
    CM_Q6_K = 14,
    CM_BF16 = 30,
};

/* ---- packed weights ("R16") ---- */

/* 16 rows of a matrix: [codes plane][scales plane], from a 64-byte boundary. The file format of a row of
 * panels, so the size is pinned. */
typedef struct cm_panel {
    uint64_t offset; /* bytes from the base of the weights */
    uint32_t format; /* of this panel: fused matrices mix formats */
    uint32_t reserved;
} cm_panel;
_Static_assert(sizeof(cm_panel) == 16, "panel tables are read from pack files");

typedef struct cm_matrix {
    int32_t n, k;       /* outputs, inputs */
    int32_t num_panels; /* num_panels * 16 >= n; rows from n on are zero padding */
    int32_t reserved;
    const cm_panel *panels; /* [num_panels] */
} cm_matrix;

/* ---- packed activations ---- */

/* What 32 k of 4 tokens need beside their codes. One form serves all integer formats. */
typedef struct cm_act_block {
    float scale[4];      /* amax / 127 */
    float scaled_sum[4]; /* scale * (float)(sum of codes) */
    /* Negative, because dots start from -zero point * sum: zero points are powers of 2, so that is one shift. */
    int32_t neg_sum[4];       /* -(sum of codes) */
    int16_t neg_halves[4][2]; /* -(sum of codes 0..15), -(sum of codes 16..31), for Q6_K */
} cm_act_block;
_Static_assert(sizeof(cm_act_block) == 64, "one cache line");

/* Rows of a matrix product's input. Tokens past num_tokens in the last group of 4 are zero.
 * The three buffers start on 64 bytes; the unused forms may be NULL. */
typedef struct cm_act {
    int32_t k, num_tokens;
    int8_t *q;            /* [ceil(num_tokens/4)][k/4][4 tokens][4 k] */
    cm_act_block *blocks; /* [ceil(num_tokens/4)][k/32] */
    float *f;             /* [ceil(num_tokens/4)][k][4 tokens], for F32, F16 and BF16 panels */
} cm_act;

/* Forms that act_pack writes. */
enum { CM_ACT_INT8 = 1, CM_ACT_F32 = 2 };

/* ---- matrix product ---- */

enum {
    CM_EPI_STORE = 0,    /* dst = y */
    CM_EPI_ADD = 1,      /* dst = dst + y: residual */
    CM_EPI_SILU_GLU = 2, /* panels alternate gate, up: dst = silu(gate) * up */
    CM_EPI_GELU_GLU = 3, /* likewise with gelu */
    CM_EPI_ARGMAX = 4,   /* no dst; see below */
};

/* y[t][r] = sum over k of w[r][k] * x[t][k] (+ bias[r]), then the epilogue.
 * dst columns are panel * 16 + row (the GLUs: half as many); padding rows of the last panel are written too,
 * so dst rows are num_panels * 16 (or * 8) floats wide. */
typedef struct cm_gemm {
    const uint8_t *base; /* weights */
    const cm_matrix *w;
    const cm_act *x;
    int32_t epilogue;
    const float *bias; /* [num_panels * 16] or NULL */
    float *dst;        /* [num_tokens][dst_stride] */
    size_t dst_stride; /* in floats */
    /* ARGMAX. The caller starts best at -inf and best_id at -1 and reduces over threads; among equal values the
     * lowest id wins. Only rows below w->n count. NaN is never best. */
    float *best;          /* [num_tokens] */
    int32_t *best_id;     /* [num_tokens] */
    uint8_t *nonfinite;   /* [num_tokens], set to 1 when a logit is NaN or infinite; may be NULL */
    float *const *logits; /* [num_tokens] rows of n floats to fill, each or the whole may be NULL */
} cm_gemm;

/* ---- attention over paged blocks ---- */

/* How keys and values lie in a block. Per (block, layer, kv head), for f16: K [head_dim][32], then V [32][head_dim];
 * for q8: see isa/kv_store.inc. */
enum { CM_KV_F16 = 0, CM_KV_Q8 = 1 };

/* Geometry of the arena. */
typedef struct cm_kv {
    uint8_t *arena;
    size_t block_bytes, layer_bytes, head_bytes; /* strides */
    int32_t num_layers, num_kv_heads, head_dim;
    int32_t type;
} cm_kv;

/* Bytes of one KV head in a block; 0 when there is no such type. */
size_t cm_kv_head_len(int type, int head_dim);
/* Makes block `target` the first num_tokens tokens of `source`, and zeros. */
void cm_kv_copy_tokens(const cm_kv *kv, int32_t source, int32_t target, int num_tokens);

typedef struct cm_attn {
    cm_kv kv;
    int32_t layer, num_heads, window; /* see CM_OP_ATTENTION */
    float scale;
    const float *q; /* row = token of the step, [num_heads][head_dim] */
    size_t q_stride;
    float *out; /* likewise */
    size_t out_stride;
    int32_t num_seqs;
    const int32_t *seq_row;     /* [num_seqs + 1] first row of each sequence in the step */
    const int32_t *seq_pos;     /* [num_seqs] position of that first row */
    const int32_t *block_begin; /* [num_seqs] */
    const int32_t *blocks;      /* blocks[block_begin[s] + i] holds positions 32 i .. 32 i + 31 of sequence s */
} cm_attn;

/* Lane functions that `map` applies, for tests. */
enum { CM_MAP_EXP2 = 0, CM_MAP_EXP = 1, CM_MAP_SILU = 2, CM_MAP_TO_F16 = 3, CM_MAP_FROM_F16 = 4, CM_MAP_GELU = 5 };

/* ---- the table ---- */

/* gather_rows of every table: a lookup of single rows gains nothing from wide registers. */
void cm_gather_rows(const uint8_t *base, const cm_matrix *w, const int32_t *ids, int num, float *dst,
                    size_t dst_stride, float scale);

typedef struct cm_kernels {
    const char *name;

    /* GEMM */

    /* Packs groups [group_begin, group_end) of 4 tokens of src [dst->num_tokens][src_stride]. */
    void (*act_pack)(cm_act *dst, const float *src, size_t src_stride, int group_begin, int group_end, int forms);
    /* Panels [panel_begin, panel_end) for all tokens; even bounds for the GLUs. */
    void (*gemm)(const cm_gemm *g, int panel_begin, int panel_end);
    /* Dequantised rows, each value as ggml defines it, then times scale when scale != 1. Writes k floats a row. */
    void (*gather_rows)(const uint8_t *base, const cm_matrix *w, const int32_t *ids, int num, float *dst,
                        size_t dst_stride, float scale);
    /* Bare dot instructions of this set on registers, for measuring the machine: runs `iterations` rounds and
     * returns the number of multiply-adds done. */
    uint64_t (*dot_rounds)(uint64_t iterations);

    /* OPS */

    void (*rmsnorm)(float *dst, size_t dst_stride, const float *src, size_t src_stride, const float *weight,
                    int width, float eps, int row_begin, int row_end);
    /* One token row in place. Pairing 0: (2i, 2i + 1) "norm"; 1: (i, i + rot_dim / 2) "neox". */
    void (*rope)(float *row, int num_heads, int head_dim, int rot_dim, const float *cos, const float *sin,
                 int pairing);
    /* Rows of one sequence. When a row's position is a multiple of 32, this layer's part of its block is zeroed
     * first. */
    void (*kv_store)(const cm_kv *kv, int layer, const float *k, const float *v, size_t stride, int num_rows,
                     int first_pos, const int32_t *blocks);
    int (*attention_units)(const cm_attn *a);
    /* Units are independent; the engine hands them out by an atomic counter. scratch: 64-byte aligned. */
    void (*attention)(const cm_attn *a, int unit, void *scratch);
    size_t attention_scratch_bytes;
    /* dst = exp((logits - max) * inv_temp); returns the total in canonical order, chunk_sums: one per 256. */
    float (*softmax_weights)(float *dst, const float *logits, int n, float max, float inv_temp, float *chunk_sums);
    /* Tests: one lane function over n values, floats or f16. Measuring: float multiply-adds on registers, as
     * dot_rounds. */
    void (*map)(int op, void *dst, const void *src, size_t n);
    uint64_t (*fma_rounds)(uint64_t iterations);
} cm_kernels;

extern const cm_kernels cm_kernels_scalar;
extern const cm_kernels cm_kernels_avx2;
extern const cm_kernels cm_kernels_avx_vnni;
extern const cm_kernels cm_kernels_avx512_vnni;

/* The kernels chosen by cm_isa_select; NULL before the first successful selection. */
extern const cm_kernels *cm_active(void);

#endif
