/* AVX-512 F, BW, VL, DQ and VNNI. */
#include <immintrin.h>

#include "kernels.h"

static int32_t dot_u8s8(const uint8_t *a, const int8_t *b, size_t n) {
    __m512i acc = _mm512_setzero_si512();
    for (size_t i = 0; i < n; i += 64) {
        __mmask64 lanes = n - i >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << (n - i)) - 1;
        acc = _mm512_dpbusd_epi32(acc, _mm512_maskz_loadu_epi8(lanes, a + i),
                                  _mm512_maskz_loadu_epi8(lanes, b + i));
    }
    return _mm512_reduce_add_epi32(acc);
}

const cm_kernels cm_kernels_avx512_vnni = {
    .name = "avx512_vnni",
    .dot_u8s8 = dot_u8s8,
};
