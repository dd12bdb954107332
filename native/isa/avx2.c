/* AVX2 with FMA, F16C and BMI2: the baseline of every machine worth running on. */
#include <immintrin.h>

#include "kernels.h"

static int32_t dot_u8s8(const uint8_t *a, const int8_t *b, size_t n) {
    __m256i acc = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        /* Widened first: vpmaddubsw would saturate for large a. */
        __m256i wide_a = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(a + i)));
        __m256i wide_b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(b + i)));
        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(wide_a, wide_b));
    }
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(acc), _mm256_extracti128_si256(acc, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    int32_t sum = _mm_cvtsi128_si32(half);
    for (; i < n; i++)
        sum += (int32_t)a[i] * b[i];
    return sum;
}

const cm_kernels cm_kernels_avx2 = {
    .name = "avx2",
    .dot_u8s8 = dot_u8s8,
};
