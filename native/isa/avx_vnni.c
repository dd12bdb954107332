/* AVX2 with the VEX-encoded vpdpbusd of client CPUs that have no AVX-512. */
#include <immintrin.h>

#include "kernels.h"

static int32_t dot_u8s8(const uint8_t *a, const int8_t *b, size_t n) {
    __m256i acc = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 32 <= n; i += 32)
        acc = _mm256_dpbusd_avx_epi32(acc, _mm256_loadu_si256((const __m256i *)(a + i)),
                                      _mm256_loadu_si256((const __m256i *)(b + i)));
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(acc), _mm256_extracti128_si256(acc, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    int32_t sum = _mm_cvtsi128_si32(half);
    for (; i < n; i++)
        sum += (int32_t)a[i] * b[i];
    return sum;
}

const cm_kernels cm_kernels_avx_vnni = {
    .name = "avx_vnni",
    .dot_u8s8 = dot_u8s8,
};
