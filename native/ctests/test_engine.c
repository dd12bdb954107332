/* The engine under the sanitizers: a small random model in exact-size memory, stepped by one thread, by several and
 * by a number that changes, with batches of every shape; and sampling at the edges. Numbers are checked from Python
 * (tests/worker/test_model.py); here the same bytes and nothing out of bounds are the point. */
#define _GNU_SOURCE
#include <assert.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coremill.h"
#include "kernels.h"

enum { VOCAB = 50, HIDDEN = 32, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 8, FFN = 48, BLOCKS = 12, MAX_ROWS = 40, MAX_SEQS = 5 };
enum { QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM };

static uint32_t state = 1;

static uint32_t next_random(void) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static float random_float(void) {
    return (float)next_random() / 8388608.0f - 1.0f;
}

/* ---- a model in memory ---- */

static uint8_t *weights;
static size_t weights_used;

static size_t take(size_t bytes) {
    size_t at = weights_used;
    weights_used += (bytes + 63) / 64 * 64;
    return at;
}

static cm_matrix_ref make_matrix(int n, int k) {
    int panels = (n + 15) / 16;
    size_t table = take((size_t)panels * sizeof(cm_panel)), panel_bytes = (size_t)k * 16 * sizeof(float);
    for (int p = 0; p < panels; p++) {
        cm_panel *panel = (cm_panel *)(weights + table) + p;
        *panel = (cm_panel){.offset = take(panel_bytes), .format = CM_F32};
        float *values = (float *)(weights + panel->offset);
        for (int i = 0; i < k * 16; i++)
            values[i] = p * 16 + i % 16 < n ? 0.3f * random_float() : 0;
    }
    return (cm_matrix_ref){.n = n, .k = k, .num_panels = panels, .panels_offset = table};
}

static cm_vector_ref make_vector(int length) {
    size_t at = take((size_t)length * sizeof(float));
    for (int i = 0; i < length; i++)
        ((float *)(weights + at))[i] = 1 + 0.1f * random_float();
    return (cm_vector_ref){.offset = at, .length = length};
}

enum { B_X, B_NORM, B_NORM_ACT, B_QKV, B_ATTN, B_ATTN_ACT, B_FFN, B_FFN_ACT, B_OUT, B_OUT_ACT, NUM_BUFFERS };
enum { M_EMBED, M_QKV, M_O, M_GATE_UP, M_DOWN, NUM_MATRICES };

static const cm_buffer buffers[NUM_BUFFERS] = {
    [B_X] = {CM_BUFFER_ROWS, CM_SPACE_TOKENS, HIDDEN},
    [B_NORM] = {CM_BUFFER_ROWS, CM_SPACE_TOKENS, HIDDEN},
    [B_NORM_ACT] = {CM_BUFFER_ACT, CM_SPACE_TOKENS, HIDDEN},
    [B_QKV] = {CM_BUFFER_ROWS, CM_SPACE_TOKENS, QKV},
    [B_ATTN] = {CM_BUFFER_ROWS, CM_SPACE_TOKENS, HEADS * HEAD_DIM},
    [B_ATTN_ACT] = {CM_BUFFER_ACT, CM_SPACE_TOKENS, HEADS * HEAD_DIM},
    [B_FFN] = {CM_BUFFER_ROWS, CM_SPACE_TOKENS, FFN},
    [B_FFN_ACT] = {CM_BUFFER_ACT, CM_SPACE_TOKENS, FFN},
    [B_OUT] = {CM_BUFFER_ROWS, CM_SPACE_OUTPUTS, HIDDEN},
    [B_OUT_ACT] = {CM_BUFFER_ACT, CM_SPACE_OUTPUTS, HIDDEN},
};

#define OP(...) {.dst = -1, .src = -1, .matrix = -1, .bias = -1, .vector = -1, __VA_ARGS__}
#define K_COLUMN (HEADS * HEAD_DIM)
#define V_COLUMN ((HEADS + KV_HEADS) * HEAD_DIM)

#pragma GCC diagnostic ignored "-Woverride-init"
static const cm_op ops[] = {
    OP(.kind = CM_OP_EMBED, .dst = B_X, .matrix = M_EMBED, .factor = 1),
    OP(.kind = CM_OP_ROPE_TABLE),
    OP(.kind = CM_OP_RMSNORM, .dst = B_NORM, .src = B_X, .vector = 0, .factor = 1e-5f),
    OP(.kind = CM_OP_ACT_PACK, .dst = B_NORM_ACT, .src = B_NORM),
    OP(.kind = CM_OP_GEMM, .dst = B_QKV, .src = B_NORM_ACT, .matrix = M_QKV, .bias = 1),
    OP(.kind = CM_OP_ROPE, .dst = B_QKV, .column = {0, K_COLUMN}, .heads = {HEADS, KV_HEADS}),
    OP(.kind = CM_OP_KV_STORE, .src = B_QKV, .column = {K_COLUMN, V_COLUMN}),
    OP(.kind = CM_OP_ATTENTION, .dst = B_ATTN, .src = B_QKV, .heads = {HEADS}, .factor = 0.35f),
    OP(.kind = CM_OP_ACT_PACK, .dst = B_ATTN_ACT, .src = B_ATTN),
    OP(.kind = CM_OP_GEMM, .dst = B_X, .src = B_ATTN_ACT, .matrix = M_O, .epilogue = CM_GEMM_ADD),
    OP(.kind = CM_OP_ACT_PACK, .dst = B_NORM_ACT, .src = B_X),
    OP(.kind = CM_OP_GEMM, .dst = B_FFN, .src = B_NORM_ACT, .matrix = M_GATE_UP, .epilogue = CM_GEMM_SILU_GLU),
    OP(.kind = CM_OP_ACT_PACK, .dst = B_FFN_ACT, .src = B_FFN),
    OP(.kind = CM_OP_GEMM, .dst = B_X, .src = B_FFN_ACT, .matrix = M_DOWN, .epilogue = CM_GEMM_ADD),
    OP(.kind = CM_OP_GATHER_OUT, .dst = B_OUT, .src = B_X),
    OP(.kind = CM_OP_RMSNORM, .dst = B_OUT, .src = B_OUT, .vector = 0, .factor = 1e-5f),
    OP(.kind = CM_OP_ACT_PACK, .dst = B_OUT_ACT, .src = B_OUT),
    OP(.kind = CM_OP_HEAD, .src = B_OUT_ACT, .matrix = M_EMBED),
    OP(.kind = CM_OP_SAMPLE),
};

static cm_matrix_ref matrices[NUM_MATRICES];
static cm_vector_ref vectors[2];
static const double inv_freq[HEAD_DIM / 2] = {1.0, 0.1, 0.01, 0.001};

static void make_model(void) {
    weights = aligned_alloc(64, 1 << 17);
    matrices[M_EMBED] = make_matrix(VOCAB, HIDDEN);
    matrices[M_QKV] = make_matrix(QKV, HIDDEN);
    matrices[M_O] = make_matrix(HIDDEN, HEADS * HEAD_DIM);
    matrices[M_GATE_UP] = make_matrix(2 * FFN, HIDDEN);
    matrices[M_DOWN] = make_matrix(HIDDEN, FFN);
    vectors[0] = make_vector(HIDDEN);
    vectors[1] = make_vector(QKV);
    assert(weights_used <= 1 << 17);
}

static cm_engine *make_engine(uint8_t *arena, size_t arena_len, int kv_type, int threads, uint64_t *progress) {
    cm_engine_config config = {
        .weights = weights, .weights_len = weights_used, .ops = ops, .buffers = buffers, .matrices = matrices,
        .vectors = vectors, .num_ops = sizeof ops / sizeof ops[0], .num_buffers = NUM_BUFFERS,
        .num_matrices = NUM_MATRICES, .num_vectors = 2, .vocab_size = VOCAB, .max_positions = 128,
        .max_step_tokens = MAX_ROWS, .max_sequences = MAX_SEQS, .all_logits = 1, .arena = arena,
        .arena_len = arena_len, .kv_type = kv_type, .num_blocks = BLOCKS, .num_layers = 1, .num_kv_heads = KV_HEADS,
        .head_dim = HEAD_DIM, .rope_dim = HEAD_DIM, .inv_freq = {inv_freq}, .rope_magnitude = {1}, .threads = threads,
        .progress = progress, .profile = 1,
    };
    char err[200];
    cm_engine *engine = cm_engine_create(&config, err, sizeof err);
    if (!engine)
        puts(err);
    assert(engine);
    return engine;
}

/* ---- steps ---- */

/* A CPU that this process may use. */
static int32_t some_core(unsigned choice) {
    cpu_set_t set;
    assert(sched_getaffinity(0, sizeof set, &set) == 0);
    for (int core = 0, at = (int)(choice % (unsigned)CPU_COUNT(&set));; core++)
        if (CPU_ISSET(core, &set) && at-- == 0)
            return core;
}

/* Sequences that grow by random numbers of rows until their two blocks are full. Everything a step gives is
 * appended to `out`. borrowing: before every other step the number of borrowed cores changes, or which they are. */
static size_t run(int kv_type, int threads, int borrowing, int seed, cm_step_result *out) {
    size_t arena_len = BLOCKS * KV_HEADS * cm_kv_head_bytes(kv_type, HEAD_DIM);
    uint8_t *arena = aligned_alloc(64, arena_len);
    memset(arena, 0xff, arena_len); /* NaN until a block is first used */
    uint64_t progress = 0;
    cm_engine *engine = make_engine(arena, arena_len, kv_type, threads, &progress);
    int32_t done[MAX_SEQS] = {0}, active = MAX_SEQS;
    size_t num_out = 0, num_steps = 0;
    state = (uint32_t)seed;
    while (active > 0) {
        int32_t tokens[MAX_ROWS], seq_row[MAX_SEQS + 1] = {0}, seq_pos[MAX_SEQS], block_begin[MAX_SEQS + 1] = {0};
        int32_t blocks[2 * MAX_SEQS];
        cm_sampling sampling[MAX_SEQS];
        cm_batch b = {0, 0, tokens, seq_row, seq_pos, block_begin, blocks, sampling, next_random() % 4 == 0};
        active = 0;
        for (int s = 0; s < MAX_SEQS; s++) {
            int rows = 1 + (int)next_random() % (MAX_ROWS / MAX_SEQS);
            rows = rows < 64 - done[s] ? rows : 64 - done[s];
            if (rows == 0)
                continue;
            active++;
            for (int i = 0; i < rows; i++)
                tokens[b.num_rows++] = (int32_t)next_random() % VOCAB;
            seq_pos[b.num_seqs] = done[s];
            blocks[2 * b.num_seqs] = 2 * s + 2;
            blocks[2 * b.num_seqs + 1] = 2 * s + 1;
            sampling[b.num_seqs] = (cm_sampling){.wanted = next_random() % 3 != 0, .temperature = (double)(s % 3),
                                                 .top_p = s % 2 ? 0.8 : 1.0, .top_k = s, .min_p = 0.01, .seed = 7};
            done[s] += rows;
            b.num_seqs++;
            seq_row[b.num_seqs] = b.num_rows;
            block_begin[b.num_seqs] = 2 * b.num_seqs;
        }
        if (active == 0)
            break;
        char err[200];
        if (borrowing && num_steps % 2 == 0) {
            unsigned choice = (unsigned)num_steps / 2 * 2654435761u >> 16;
            int32_t cores[2] = {some_core(choice), some_core(choice / 2)};
            assert(cm_engine_borrow(engine, cores, (int)(choice / 4 % 3), err, sizeof err) == 0);
        }
        int got = cm_engine_step(engine, &b, out + num_out, err, sizeof err);
        assert(got >= 0);
        num_out += (size_t)got;
        num_steps++;
    }
    assert(progress == num_steps * sizeof ops / sizeof ops[0]);
    cm_engine_destroy(engine);
    free(arena);
    return num_out;
}

static void test_steps(int kv_type) {
    static cm_step_result alone[1000], together[1000];
    for (int seed = 1; seed <= 3; seed++) {
        size_t count = run(kv_type, 1, 0, seed, alone);
        assert(count > 20);
        for (size_t i = 0; i < count; i++)
            assert(alone[i].status == CM_SAMPLE_OK && alone[i].token >= 0 && alone[i].token < VOCAB);
        /* Many threads on few cores take their time: those that come and go need no further seeds. */
        for (int threads = 1; threads <= 4; threads++)
            for (int borrowing = threads == 1; borrowing <= (threads < 3 && seed == 1); borrowing++) {
                assert(run(kv_type, threads, borrowing, seed, together) == count);
                assert(memcmp(alone, together, count * sizeof alone[0]) == 0);
            }
    }
}

static void test_borrowing_what_is_not_there(void) {
    size_t arena_len = BLOCKS * KV_HEADS * cm_kv_head_bytes(cm_kv_type("f16"), HEAD_DIM);
    uint8_t *arena = aligned_alloc(64, arena_len);
    cm_engine *engine = make_engine(arena, arena_len, cm_kv_type("f16"), 1, NULL);
    uint64_t before = cm_engine_scratch_bytes(engine);
    char err[200] = "";
    int32_t cores[2] = {some_core(0), -1};
    assert(cm_engine_borrow(engine, cores, 2, err, sizeof err) == -1 && strcmp(err, "core -1") == 0);
    cores[1] = 1 << 20; /* a number no machine has */
    assert(cm_engine_borrow(engine, cores, 2, err, sizeof err) == -1 && strstr(err, "on CPU 1048576"));
    assert(cm_engine_borrow(engine, cores, 1 << 20, err, sizeof err) == -1 && strstr(err, "1048576 cores borrowed"));
    assert(cm_engine_borrow(engine, cores, 1, err, sizeof err) == 0);
    assert(cm_engine_scratch_bytes(engine) > before);
    cm_engine_destroy(engine);
    free(arena);
}

static void test_sampling_edges(void) {
    char err[100];
    int32_t tokens[20];
    for (int n = 1; n < 600; n += 37) {
        float *logits = malloc((size_t)n * sizeof(float));
        for (int i = 0; i < n; i++)
            logits[i] = 5 * random_float();
        for (int k = 0; k <= n + 1; k += n / 2 + 1)
            for (int p = 1; p <= 4; p++) {
                cm_sampling s = {.temperature = 0.9, .top_p = p / 4.0, .top_k = k, .min_p = 0.001 * p, .seed = 3};
                assert(cm_sample_logits(logits, n, &s, 0, 20, tokens, err, sizeof err) == 0);
                for (int i = 0; i < 20; i++)
                    assert(tokens[i] >= 0 && tokens[i] < n);
            }
        free(logits);
    }
}

int main(void) {
    char err[256];
    make_model();
    for (int isa = 0; isa < cm_isa_count(); isa++)
        if (cm_isa_supported(isa)) {
            assert(cm_isa_select(cm_isa_name(isa), err, sizeof err) == isa);
            test_steps(cm_kv_type("f16"));
            test_steps(cm_kv_type("q8"));
            test_sampling_edges();
        }
    test_borrowing_what_is_not_there();
    free(weights);
    puts("ok");
    return 0;
}
