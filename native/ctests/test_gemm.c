/* Matrix kernels of every supported instruction set against scalar, on blocks of exactly the promised size: for the
 * sanitizers. What the numbers should be is tested in Python. */
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coremill.h"
#include "dispatch.h"

static uint64_t state = 88172645463325252u;

static uint32_t random32(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static void *block(size_t len) { /* the kernels' buffers start on 64 bytes */
    void *p = NULL;
    int failed = posix_memalign(&p, 64, len ? len : 1);
    assert(!failed);
    return p;
}

typedef struct problem {
    int n, k, num_panels, num_tokens;
    uint8_t *weights;
    cm_panel *table;
    float *src;
} problem;

/* Random bytes, which are codes as good as any; as f16 scales they may not be infinite or NaN. */
static problem make_problem(const int *formats, int num_panels, int n, int k, int num_tokens) {
    problem p = {.n = n, .k = k, .num_panels = num_panels, .num_tokens = num_tokens};
    size_t total = 0;
    p.table = block((size_t)num_panels * sizeof *p.table);
    for (int i = 0; i < num_panels; i++) {
        p.table[i] = (cm_panel){.offset = total, .format = (uint32_t)formats[i]};
        total += cm_panel_bytes(formats[i], k);
    }
    p.weights = block(total);
    for (size_t i = 0; i < total; i += 2) {
        uint16_t v = (uint16_t)(random32() & 0xbbff); /* no exponent of all ones, in f16, bf16 or f32 */
        memcpy(p.weights + i, &v, 2);
    }
    p.src = block((size_t)num_tokens * (size_t)k * 4);
    for (size_t i = 0; i < (size_t)num_tokens * (size_t)k; i++)
        p.src[i] = (float)(int32_t)random32() * 0x1p-31f;
    return p;
}

static void free_problem(problem *p) {
    free(p->weights);
    free(p->table);
    free(p->src);
}

/* Everything a call writes, one after another. */
static int is_glu(int epilogue) {
    return epilogue == CM_EPI_SILU_GLU || epilogue == CM_EPI_GELU_GLU;
}

static uint8_t *run(const cm_kernels *kernels, const problem *p, int epilogue, size_t *len) {
    size_t k = (size_t)p->k, tokens = (size_t)p->num_tokens, groups = (tokens + 3) / 4;
    size_t width = (size_t)p->num_panels * (is_glu(epilogue) ? 8 : 16), integers = k % 32 == 0;
    cm_act x = {.k = p->k, .num_tokens = p->num_tokens};
    x.q = block(integers * groups * k * 4);
    x.blocks = block(integers * groups * (k / 32) * sizeof *x.blocks);
    x.f = block(groups * k * 16);
    kernels->act_pack(&x, p->src, k, 0, (int)groups, integers ? CM_ACT_INT8 | CM_ACT_F32 : CM_ACT_F32);

    cm_matrix w = {.n = p->n, .k = p->k, .num_panels = p->num_panels, .panels = p->table};
    cm_gemm g = {.base = p->weights, .w = &w, .x = &x, .epilogue = epilogue};
    float *bias = block((size_t)p->num_panels * 64);
    for (int i = 0; i < p->num_panels * 16; i++)
        bias[i] = (float)i;
    g.bias = bias;
    uint8_t *out;
    if (epilogue == CM_EPI_ARGMAX) {
        size_t row = (size_t)p->n * 4;
        *len = tokens * (8 + row);
        out = block(*len);
        float **logits = block(tokens * sizeof *logits);
        g.best = (float *)out;
        g.best_id = (int32_t *)(out + tokens * 4);
        for (size_t t = 0; t < tokens; t++) {
            g.best[t] = -INFINITY;
            g.best_id[t] = -1;
            logits[t] = (float *)(out + tokens * 8 + t * row);
        }
        g.logits = logits;
        kernels->gemm(&g, 0, p->num_panels);
        free(logits);
    } else {
        *len = tokens * width * 4;
        out = block(*len);
        memset(out, 0, *len);
        g.dst = (float *)out;
        g.dst_stride = width;
        kernels->gemm(&g, 0, p->num_panels);
    }
    free(x.q);
    free(x.blocks);
    free(x.f);
    free(bias);
    return out;
}

static void compare(const problem *p) {
    for (int epilogue = CM_EPI_STORE; epilogue <= CM_EPI_ARGMAX; epilogue++) {
        if (is_glu(epilogue) && p->num_panels % 2)
            continue;
        size_t len;
        uint8_t *expected = run(&cm_kernels_scalar, p, epilogue, &len);
        for (int isa = 0; isa < cm_isa_count(); isa++) {
            if (!cm_isa_supported(isa))
                continue;
            uint8_t *got = run(cm_kernels_of(isa), p, epilogue, &len);
            if (memcmp(got, expected, len) != 0) {
                printf("%s: format %u, n %d, k %d, %d tokens, epilogue %d\n", cm_isa_name(isa), p->table[0].format,
                       p->n, p->k, p->num_tokens, epilogue);
                exit(1);
            }
            free(got);
        }
        free(expected);
    }
}

static void test_gather(const problem *p) {
    cm_matrix w = {.n = p->n, .k = p->k, .num_panels = p->num_panels, .panels = p->table};
    int32_t *ids = block(2 * sizeof *ids);
    float *rows = block(2 * (size_t)p->k * 4);
    ids[0] = p->n - 1;
    ids[1] = 0;
    cm_gather_rows(p->weights, &w, ids, 2, rows, (size_t)p->k, 1);
    free(ids);
    free(rows);
}

int main(void) {
    static const int formats[] = {CM_F32,  CM_F16,  CM_BF16, CM_Q4_0, CM_Q4_1, CM_Q5_0,
                                  CM_Q5_1, CM_Q8_0, CM_Q4_K, CM_Q5_K, CM_Q6_K};
    enum { NUM = sizeof formats / sizeof *formats };
    static const int tokens[] = {1, 2, 3, 4, 5, 8, 13, 130};
    for (int f = 0; f < NUM; f++) {
        int is_float = f < 3, k = is_float ? 9 : f >= 8 ? 256 : 96;
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
            int num_panels = 1 + (int)t % 4;
            /* The last panel of another format, where k suits both. */
            int last = num_panels == 4 && formats[f] != CM_BF16 && formats[f] != CM_Q8_0 ? (f + 1) % NUM : f;
            int panel_formats[4] = {formats[f], formats[f], formats[f], formats[last]};
            problem p = make_problem(panel_formats, num_panels, num_panels * 16 - (int)t, k, tokens[t]);
            compare(&p);
            test_gather(&p);
            free_problem(&p);
        }
    }
    puts("ok");
    return 0;
}
