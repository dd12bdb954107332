/* AVX2 with the VEX-encoded vpdpbusd of client CPUs that have no AVX-512. */
#include "v16_avx2.h"

#include "gemm_ymm.h"
#include "gemm_dot_avx_vnni.h"
#include "gemm_pack_avx.h"
#include "gemm_tile.inc"

#include "gemm_driver.inc"
#include "ops.inc"
#include "attention.inc"

static uint64_t dot_rounds(uint64_t iterations) {
    __m256i sum[12], a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-5);
    for (int j = 0; j < 12; j++)
        sum[j] = _mm256_setzero_si256();
    for (uint64_t i = 0; i < iterations; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++)
            sum[j] = _mm256_dpbusd_avx_epi32(sum[j], a, b);
    }
    for (int j = 0; j < 12; j++)
        __asm__ volatile("" : : "x"(sum[j]));
    return iterations * 12 * 32;
}

const cm_kernels cm_kernels_avx_vnni = {
    .name = "avx_vnni",
    .act_pack = act_pack,
    .gemm = gemm,
    .gather_rows = cm_gather_rows,
    .dot_rounds = dot_rounds,
    CM_FLOAT_KERNELS,
};
