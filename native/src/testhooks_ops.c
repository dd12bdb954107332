/* Row kernels and attention of any supported instruction set, whichever is active: for tests. */
#include <stdlib.h>
#include <string.h>

#include "coremill.h"
#include "dispatch.h"

static const cm_kernels *usable(int isa) {
    return cm_isa_supported(isa) ? cm_kernels_of(isa) : NULL;
}

static cm_kv geometry_of(uint8_t *arena, const int64_t *geometry) {
    return (cm_kv){.arena = arena,
                   .block_bytes = (size_t)geometry[0],
                   .layer_bytes = (size_t)geometry[1],
                   .head_bytes = (size_t)geometry[2],
                   .num_layers = (int32_t)geometry[3],
                   .num_kv_heads = (int32_t)geometry[4],
                   .head_dim = (int32_t)geometry[5],
                   .type = (int32_t)geometry[6]};
}

int cm_test_map(int isa, int op, void *dst, const void *src, size_t n) {
    const cm_kernels *kernels = usable(isa);
    if (!kernels)
        return -1;
    kernels->map(op, dst, src, n);
    return 0;
}

int cm_test_rmsnorm(int isa, float *dst, size_t dst_stride, const float *src, size_t src_stride, const float *weight,
                    int width, float eps, int row_begin, int row_end) {
    const cm_kernels *kernels = usable(isa);
    if (!kernels)
        return -1;
    kernels->rmsnorm(dst, dst_stride, src, src_stride, weight, width, eps, row_begin, row_end);
    return 0;
}

int cm_test_rope(int isa, float *row, int num_heads, int head_dim, int rot_dim, const float *cos, const float *sin,
                 int pairing) {
    const cm_kernels *kernels = usable(isa);
    if (!kernels)
        return -1;
    kernels->rope(row, num_heads, head_dim, rot_dim, cos, sin, pairing);
    return 0;
}

int cm_test_softmax_weights(int isa, float *dst, const float *logits, int n, float max, float inv_temp,
                            float *chunk_sums, float *total) {
    const cm_kernels *kernels = usable(isa);
    if (!kernels)
        return -1;
    *total = kernels->softmax_weights(dst, logits, n, max, inv_temp, chunk_sums);
    return 0;
}

int cm_test_kv_store(int isa, uint8_t *arena, const int64_t *geometry, int layer, const float *k, const float *v,
                     size_t stride, int num_rows, int first_pos, const int32_t *blocks) {
    const cm_kernels *kernels = usable(isa);
    if (!kernels)
        return -1;
    cm_kv kv = geometry_of(arena, geometry);
    kernels->kv_store(&kv, layer, k, v, stride, num_rows, first_pos, blocks);
    return 0;
}

int cm_test_attention(int isa, uint8_t *arena, const int64_t *geometry, int layer, int num_heads, float scale,
                      const float *q, size_t q_stride, float *out, size_t out_stride, int num_seqs,
                      const int32_t *seq_row, const int32_t *seq_pos, const int32_t *block_begin,
                      const int32_t *blocks, int first_unit) {
    const cm_kernels *kernels = usable(isa);
    if (!kernels)
        return -1;
    cm_attn a = {.kv = geometry_of(arena, geometry),
                 .layer = layer,
                 .num_heads = num_heads,
                 .scale = scale,
                 .q = q,
                 .q_stride = q_stride,
                 .out = out,
                 .out_stride = out_stride,
                 .num_seqs = num_seqs,
                 .seq_row = seq_row,
                 .seq_pos = seq_pos,
                 .block_begin = block_begin,
                 .blocks = blocks};
    int units = kernels->attention_units(&a);
    void *scratch = aligned_alloc(64, (kernels->attention_scratch_bytes + 63) / 64 * 64);
    if (!scratch)
        return -2;
    memset(scratch, 0xff, kernels->attention_scratch_bytes); /* NaN: nothing may depend on what was there */
    for (int i = 0; i < units; i++)
        kernels->attention(&a, (first_unit + i) % units, scratch);
    free(scratch);
    return units;
}
