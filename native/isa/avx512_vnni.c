/* AVX-512 F, BW, VL, DQ and VNNI. */
#include "v16_avx512.h"

#include "gemm_avx512.h"
#include "gemm_pack_avx.h"
#include "gemm_tile.inc"

#include "gemm_driver.inc"
#include "ops.inc"
#include "attention.inc"

static uint64_t dot_rounds(uint64_t iterations) {
    __m512i sum[16], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-5);
    for (int j = 0; j < 16; j++)
        sum[j] = _mm512_setzero_si512();
    for (uint64_t i = 0; i < iterations; i++) {
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            sum[j] = _mm512_dpbusd_epi32(sum[j], a, b);
    }
    for (int j = 0; j < 16; j++)
        __asm__ volatile("" : : "v"(sum[j]));
    return iterations * 16 * 64;
}

const cm_kernels cm_kernels_avx512_vnni = {
    .name = "avx512_vnni",
    .act_pack = act_pack,
    .gemm = gemm,
    .gather_rows = cm_gather_rows,
    .dot_rounds = dot_rounds,
    CM_FLOAT_KERNELS,
};
