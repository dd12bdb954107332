/* Matrix kernels of any supported instruction set, whichever is active: for tests. */
#include "coremill.h"
#include "dispatch.h"

/* NULL when the CPU cannot run it (or the mask hides it), so that a test cannot die of an illegal instruction. */
static const cm_kernels *usable(int isa) {
    return cm_isa_supported(isa) ? cm_kernels_of(isa) : NULL;
}

int cm_test_act_pack(int isa, int k, int num_tokens, const float *src, size_t src_stride, int forms, int8_t *q,
                     void *blocks, float *f) {
    const cm_kernels *kernels = usable(isa);
    if (!kernels)
        return -1;
    cm_act act = {.k = k, .num_tokens = num_tokens, .q = q, .blocks = blocks, .f = f};
    int groups = (num_tokens + CM_TOKEN_GROUP - 1) / CM_TOKEN_GROUP;
    kernels->act_pack(&act, src, src_stride, 0, groups / 2, forms); /* any split gives the same bytes */
    kernels->act_pack(&act, src, src_stride, groups / 2, groups, forms);
    return 0;
}

int cm_test_gemm(int isa, const uint8_t *base, int n, int k, const void *panels, int num_panels, int num_tokens,
                 const int8_t *q, const void *blocks, const float *f, int epilogue, const float *bias, float *dst,
                 size_t dst_stride, float *best, int32_t *best_id, uint8_t *nonfinite, float *const *logits,
                 int panel_begin, int panel_end) {
    const cm_kernels *kernels = usable(isa);
    if (!kernels)
        return -1;
    cm_matrix w = {.n = n, .k = k, .num_panels = num_panels, .panels = panels};
    cm_act x = {.k = k, .num_tokens = num_tokens, .q = (int8_t *)q, .blocks = (void *)blocks, .f = (float *)f};
    cm_gemm g = {.base = base,
                 .w = &w,
                 .x = &x,
                 .epilogue = epilogue,
                 .bias = bias,
                 .dst = dst,
                 .dst_stride = dst_stride,
                 .best = best,
                 .best_id = best_id,
                 .nonfinite = nonfinite,
                 .logits = logits};
    kernels->gemm(&g, panel_begin, panel_end);
    return 0;
}

int cm_test_gather_rows(int isa, const uint8_t *base, int n, int k, const void *panels, int num_panels,
                        const int32_t *ids, int num, float *dst, size_t dst_stride, float scale) {
    const cm_kernels *kernels = usable(isa);
    if (!kernels)
        return -1;
    cm_matrix w = {.n = n, .k = k, .num_panels = num_panels, .panels = panels};
    kernels->gather_rows(base, &w, ids, num, dst, dst_stride, scale);
    return 0;
}
