/* Dots of 8-bit codes with the vpdpbusd of AVX-VNNI. What each operation promises is said in dot_scalar.h. */
#ifndef CM_DOT_H
#define CM_DOT_H

#define DOT_FOUR_BYTES 4
#define DOT_PARTS 1

typedef struct v16i {
    __m256i lo, hi;
} v16i;
typedef v16i dot_lanes;
typedef __m256i dot_four;

V16_INLINE v16i v16i_set1(int32_t x) { return (v16i){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
V16_INLINE v16 v16i_float(v16i a) { return (v16){_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

V16_INLINE dot_lanes dot_load_u8(const uint8_t *p, int part) {
    (void)part;
    return (v16i){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
V16_INLINE dot_lanes dot_load_s8(const uint8_t *p, int part) { return dot_load_u8(p, part); }
V16_INLINE dot_four dot_each(const uint8_t *p, int part) {
    (void)part;
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
V16_INLINE v16i dot_u8s8(v16i sum, dot_lanes a, dot_four b) {
    return (v16i){_mm256_dpbusd_avx_epi32(sum.lo, a.lo, b), _mm256_dpbusd_avx_epi32(sum.hi, a.hi, b)};
}
V16_INLINE v16i dot_s8u8(v16i sum, dot_lanes a, dot_four b) {
    return (v16i){_mm256_dpbusd_avx_epi32(sum.lo, b, a.lo), _mm256_dpbusd_avx_epi32(sum.hi, b, a.hi)};
}

V16_INLINE void v16_store_low_bytes(uint8_t *p, v16 a) {
    __m256i low = _mm256_set1_epi32(0xff);
    __m256i words = _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(a.lo), low),
                                        _mm256_and_si256(_mm256_castps_si256(a.hi), low));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i *)p,
                     _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
V16_INLINE void dot_put_s8(uint8_t *p, v16 a) { v16_store_low_bytes(p, a); }
V16_INLINE void dot_put_u8(uint8_t *p, v16 a) { v16_store_low_bytes(p, a); }

#endif
