/* Plain C for any x86-64: the specification of every kernel. */
#include "v16_scalar.h"

#include "gemm_scalar.h"

#include "gemm_driver.inc"
#include "ops.inc"
#include "dot_scalar.h"
#include "kv_store.inc"
#include "attention.inc"

static uint64_t dot_rounds(uint64_t iterations) {
    int32_t sum[8] = {0};
    for (uint64_t i = 0; i < iterations; i++) {
        for (int j = 0; j < 8; j++)
            sum[j] += (int32_t)(uint8_t)i * (int8_t)(i + (uint64_t)j);
        __asm__ volatile("" : : "r"(sum) : "memory");
    }
    return iterations * 8;
}

const cm_kernels cm_kernels_scalar = {
    .name = "scalar",
    .act_pack = act_pack,
    .gemm = gemm,
    .gather_rows = cm_gather_rows,
    .dot_rounds = dot_rounds,
    CM_FLOAT_KERNELS,
};
