/* Measuring attention, and the ceiling of its arithmetic, on the calling thread. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "coremill.h"
#include "dispatch.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static void fill_random(float *x, size_t n, uint64_t *state) {
    for (size_t i = 0; i < n; i++)
        x[i] = (float)next_random(state) * 0x1p-30f - 1.0f;
}

/* Everything one measurement needs, so that it is freed in one place. */
typedef struct bench {
    cm_attn attn;
    size_t arena_bytes;
    float *rows; /* q, then out */
    float *kv_rows;
    int32_t *ints;
    void *scratch;
} bench;

static void bench_free(bench *b) {
    if (b->attn.kv.arena && b->attn.kv.arena != MAP_FAILED)
        munmap(b->attn.kv.arena, b->arena_bytes);
    free(b->rows);
    free(b->kv_rows);
    free(b->ints);
    free(b->scratch);
}

/* Sequences of `context` positions with their last `query_rows` in the step, in blocks in random order. */
static int bench_make(bench *b, const cm_kernels *kernels, int kv_type, int num_heads, int num_kv_heads,
                      int head_dim, int num_layers, int context, int query_rows, int num_seqs) {
    int seq_blocks = (context + CM_BLOCK_TOKENS - 1) / CM_BLOCK_TOKENS, num_blocks = seq_blocks * num_seqs;
    size_t head_bytes = cm_kv_head_len(kv_type, head_dim), width = (size_t)(num_heads * head_dim);
    size_t kv_width = (size_t)(num_kv_heads * head_dim), num_rows = (size_t)(query_rows * num_seqs);
    uint64_t random = 1;
    cm_kv kv = {.head_bytes = head_bytes,
                .layer_bytes = head_bytes * (size_t)num_kv_heads,
                .block_bytes = head_bytes * (size_t)(num_kv_heads * num_layers),
                .num_layers = num_layers,
                .num_kv_heads = num_kv_heads,
                .head_dim = head_dim,
                .type = kv_type};
    b->arena_bytes = kv.block_bytes * (size_t)num_blocks;
    kv.arena = mmap(NULL, b->arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    b->attn.kv = kv;
    b->rows = aligned_alloc(64, num_rows * width * 8 + 64 - num_rows * width * 8 % 64);
    b->kv_rows = malloc(2 * CM_BLOCK_TOKENS * kv_width * sizeof(float));
    b->ints = malloc((size_t)(num_blocks + 3 * num_seqs + 1) * sizeof(int32_t));
    b->scratch = aligned_alloc(64, (kernels->attention_scratch_bytes + 63) / 64 * 64);
    if (kv.arena == MAP_FAILED || !b->rows || !b->kv_rows || !b->ints || !b->scratch)
        return -1;
    madvise(kv.arena, b->arena_bytes, MADV_HUGEPAGE);

    int32_t *blocks = b->ints, *block_begin = blocks + num_blocks, *seq_pos = block_begin + num_seqs;
    int32_t *seq_row = seq_pos + num_seqs;
    for (int i = 0; i < num_blocks; i++) { /* a random permutation */
        int j = (int)(next_random(&random) % (uint32_t)(i + 1));
        blocks[i] = blocks[j];
        blocks[j] = i;
    }
    for (int s = 0; s <= num_seqs; s++)
        seq_row[s] = s * query_rows;
    for (int s = 0; s < num_seqs; s++) {
        block_begin[s] = s * seq_blocks;
        seq_pos[s] = context - query_rows;
    }
    fill_random(b->rows, num_rows * width, &random);
    fill_random(b->kv_rows, 2 * CM_BLOCK_TOKENS * kv_width, &random);
    for (int i = 0; i < num_blocks; i++)
        for (int layer = 0; layer < num_layers; layer++)
            kernels->kv_store(&kv, layer, b->kv_rows, b->kv_rows + CM_BLOCK_TOKENS * kv_width, kv_width,
                              CM_BLOCK_TOKENS, 0, blocks + i);
    b->attn = (cm_attn){.kv = kv,
                        .num_heads = num_heads,
                        .scale = 0.125f,
                        .q = b->rows,
                        .q_stride = width,
                        .out = b->rows + num_rows * width,
                        .out_stride = width,
                        .num_seqs = num_seqs,
                        .seq_row = seq_row,
                        .seq_pos = seq_pos,
                        .block_begin = block_begin,
                        .blocks = blocks};
    return 0;
}

double cm_bench_attention(int isa, int kv_type, int num_heads, int num_kv_heads, int head_dim, int num_layers,
                          int context, int query_rows, int num_seqs, int repeats) {
    const cm_kernels *kernels = cm_isa_supported(isa) ? cm_kernels_of(isa) : NULL;
    if (!kernels || num_kv_heads < 1 || num_heads < num_kv_heads || num_heads % num_kv_heads || head_dim < 8 ||
        head_dim > 256 || head_dim % 8 || !cm_kv_head_len(kv_type, head_dim) || num_layers < 1 || query_rows < 1 || context < query_rows || num_seqs < 1)
        return -1.0;
    bench b = {0};
    double best = -1.0;
    if (bench_make(&b, kernels, kv_type, num_heads, num_kv_heads, head_dim, num_layers, context, query_rows,
                   num_seqs) == 0) {
        int units = kernels->attention_units(&b.attn);
        for (int i = 0; i <= repeats; i++) { /* the first pass only warms up */
            double begin = now();
            for (int layer = 0; layer < num_layers; layer++) {
                b.attn.layer = layer;
                for (int unit = 0; unit < units; unit++)
                    kernels->attention(&b.attn, unit, b.scratch);
            }
            double seconds = (now() - begin) / num_layers;
            if (i > 0 && (best < 0.0 || seconds < best))
                best = seconds;
        }
    }
    bench_free(&b);
    return best;
}

double cm_bench_fma(int isa, double seconds) {
    const cm_kernels *kernels = cm_isa_supported(isa) ? cm_kernels_of(isa) : NULL;
    if (!kernels)
        return -1.0;
    double begin = now(), best = 0.0, end;
    do {
        double from = now();
        uint64_t macs = kernels->fma_rounds(100000);
        end = now();
        if ((double)macs / (end - from) > best)
            best = (double)macs / (end - from);
    } while (end - begin < seconds);
    return best;
}
