/* Row kernels and attention on exact-size heap blocks, for the sanitizers: every instruction set against scalar. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coremill.h"
#include "dispatch.h"

static uint64_t state = 1;

static int below(int n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)n);
}

static float *random_floats(size_t n) {
    float *x = malloc(n * sizeof(float));
    assert(x);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(below(2001) - 1000) * 0x1p-8f;
    return x;
}

static float *copy_of(const float *from, size_t n) {
    float *x = malloc(n * sizeof(float));
    assert(x);
    memcpy(x, from, n * sizeof(float));
    return x;
}

static void test_rows(const cm_kernels *kernels) {
    const cm_kernels *scalar = &cm_kernels_scalar;
    for (int width = 1; width < 70; width += 3) {
        size_t n = (size_t)width * 5;
        float *src = random_floats(n), *weight = random_floats((size_t)width);
        float *a = copy_of(src, n), *b = copy_of(src, n), sums[2];
        kernels->rmsnorm(a, (size_t)width, src, (size_t)width, weight, width, 1e-5f, 0, 5);
        scalar->rmsnorm(b, (size_t)width, src, (size_t)width, weight, width, 1e-5f, 0, 5);
        assert(memcmp(a, b, n * sizeof(float)) == 0);

        float total = kernels->softmax_weights(a, src, (int)n, 4.0f, 0.5f, sums);
        assert(total == scalar->softmax_weights(b, src, (int)n, 4.0f, 0.5f, sums));
        assert(memcmp(a, b, n * sizeof(float)) == 0);

        int rot_dim = width & ~1;
        for (int pairing = 0; rot_dim && pairing < 2; pairing++) {
            kernels->rope(a, 5, width, rot_dim, weight, weight + width - rot_dim / 2, pairing);
            scalar->rope(b, 5, width, rot_dim, weight, weight + width - rot_dim / 2, pairing);
            assert(memcmp(a, b, n * sizeof(float)) == 0);
        }
        free(src), free(weight), free(a), free(b);
    }
}

/* Two sequences in one step: `tokens` of the first from `before`, one of the second. */
static void test_shape(const cm_kernels *kernels, int type, int head_dim, int num_kv_heads, int group, int before,
                       int tokens) {
    const cm_kernels *both[2] = {&cm_kernels_scalar, kernels};
    int length[2] = {before + tokens, 1 + below(70)}, num_blocks[2], num_heads = num_kv_heads * group;
    for (int s = 0; s < 2; s++)
        num_blocks[s] = (length[s] + CM_BLOCK_TOKENS - 1) / CM_BLOCK_TOKENS;
    int total = num_blocks[0] + num_blocks[1];
    int32_t *blocks = malloc((size_t)total * sizeof(int32_t));
    for (int i = 0; i < total; i++)
        blocks[i] = total - 1 - i;
    size_t head_bytes = cm_kv_head_len(type, head_dim), layer_bytes = head_bytes * (size_t)num_kv_heads;
    size_t arena_bytes = layer_bytes * (size_t)total, width = (size_t)(num_heads * head_dim);
    size_t kv_width = (size_t)(num_kv_heads * head_dim), out_len = width * (size_t)(tokens + 1);
    float *q = random_floats(out_len), *out[2];
    float *k[2], *v[2];
    for (int s = 0; s < 2; s++) {
        k[s] = random_floats(kv_width * (size_t)length[s]);
        v[s] = random_floats(kv_width * (size_t)length[s]);
    }
    int32_t seq_row[3] = {0, tokens, tokens + 1}, seq_pos[2] = {before, length[1] - 1};
    int32_t begin[2] = {0, num_blocks[0]};
    uint8_t *arena[2];
    for (int i = 0; i < 2; i++) {
        arena[i] = aligned_alloc(64, arena_bytes);
        memset(arena[i], 0xff, arena_bytes);
        cm_kv kv = {arena[i], layer_bytes, layer_bytes, head_bytes, 1, num_kv_heads, head_dim, type};
        for (int s = 0; s < 2; s++) {
            int half = length[s] / 2; /* a run of rows, then row by row */
            both[i]->kv_store(&kv, 0, k[s], v[s], kv_width, half, 0, blocks + begin[s]);
            for (int t = half; t < length[s]; t++)
                both[i]->kv_store(&kv, 0, k[s] + (size_t)t * kv_width, v[s] + (size_t)t * kv_width, kv_width, 1, t,
                                  blocks + begin[s]);
        }
        out[i] = copy_of(q, out_len);
        cm_attn a = {.kv = kv,
                     .num_heads = num_heads,
                     .scale = 0.3f,
                     .q = q,
                     .q_stride = width,
                     .out = out[i],
                     .out_stride = width,
                     .num_seqs = 2,
                     .seq_row = seq_row,
                     .seq_pos = seq_pos,
                     .block_begin = begin,
                     .blocks = blocks};
        void *scratch = aligned_alloc(64, (both[i]->attention_scratch_bytes + 63) / 64 * 64);
        memset(scratch, 0xff, both[i]->attention_scratch_bytes);
        for (int unit = both[i]->attention_units(&a) - 1; unit >= 0; unit--)
            both[i]->attention(&a, unit, scratch);
        free(scratch);
    }
    assert(memcmp(arena[0], arena[1], arena_bytes) == 0);
    assert(memcmp(out[0], out[1], out_len * sizeof(float)) == 0);
    for (int i = 0; i < 2; i++)
        free(arena[i]), free(out[i]), free(k[i]), free(v[i]);
    free(q), free(blocks);
}

int main(void) {
    static const int head_dims[] = {8, 16, 24, 64, 80, 128, 256};
    for (int isa = 0; isa < cm_isa_count(); isa++) {
        if (!cm_isa_supported(isa))
            continue;
        test_rows(cm_kernels_of(isa));
        for (int i = 0; i < 56; i++)
            test_shape(cm_kernels_of(isa), i % 2 ? CM_KV_Q8 : CM_KV_F16, head_dims[i % 7], 1 + below(2), 1 + below(9),
                       below(80), 1 + below(i % 3 ? 4 : 40));
    }
    puts("ok");
    return 0;
}
