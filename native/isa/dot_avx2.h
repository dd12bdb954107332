/* Dots of 8-bit codes without VNNI. What each operation promises is said in dot_scalar.h.
 *
 * vpmaddubsw saturates where both sides use all 8 bits, so codes are widened to int16: a lane's codes 0 and 2 are one
 * part of a dot and 1 and 3 the other, which takes no shuffle, and so are the four codes of the other side.
 */
#ifndef CM_DOT_H
#define CM_DOT_H

#define DOT_FOUR_BYTES 8
#define DOT_PARTS 2

typedef struct v16i {
    __m256i lo, hi;
} v16i;
typedef v16i dot_lanes;
typedef __m256i dot_four;

V16_INLINE v16i v16i_set1(int32_t x) { return (v16i){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
V16_INLINE v16 v16i_float(v16i a) { return (v16){_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

V16_INLINE dot_lanes dot_load_u8(const uint8_t *p, int part) {
    __m256i lo = _mm256_loadu_si256((const __m256i *)p), hi = _mm256_loadu_si256((const __m256i *)(p + 32));
    __m256i low = _mm256_set1_epi16(0xff);
    return part == 0 ? (v16i){_mm256_and_si256(lo, low), _mm256_and_si256(hi, low)}
                     : (v16i){_mm256_srli_epi16(lo, 8), _mm256_srli_epi16(hi, 8)};
}
V16_INLINE dot_lanes dot_load_s8(const uint8_t *p, int part) {
    __m256i lo = _mm256_loadu_si256((const __m256i *)p), hi = _mm256_loadu_si256((const __m256i *)(p + 32));
    if (part == 0) {
        lo = _mm256_slli_epi16(lo, 8);
        hi = _mm256_slli_epi16(hi, 8);
    }
    return (v16i){_mm256_srai_epi16(lo, 8), _mm256_srai_epi16(hi, 8)};
}
V16_INLINE dot_four dot_each(const uint8_t *p, int part) {
    int32_t pair;
    memcpy(&pair, p + 4 * part, 4);
    return _mm256_set1_epi32(pair);
}
V16_INLINE v16i dot_u8s8(v16i sum, dot_lanes a, dot_four b) {
    return (v16i){_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b)),
                  _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b))};
}
V16_INLINE v16i dot_s8u8(v16i sum, dot_lanes a, dot_four b) { return dot_u8s8(sum, a, b); }

V16_INLINE void v16_store_low_bytes(uint8_t *p, v16 a) {
    __m256i low = _mm256_set1_epi32(0xff);
    __m256i words = _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(a.lo), low),
                                        _mm256_and_si256(_mm256_castps_si256(a.hi), low));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i *)p,
                     _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
/* 16 numbers of 32 bits that fit int16, in fours of order 0 2 1 3. */
V16_INLINE void dot_put_wide(uint8_t *p, __m256i lo, __m256i hi) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
    words = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i *)p, words);
}
V16_INLINE void dot_put_s8(uint8_t *p, v16 a) {
    __m256i lo = _mm256_castps_si256(a.lo), hi = _mm256_castps_si256(a.hi);
    dot_put_wide(p, _mm256_srai_epi32(_mm256_slli_epi32(lo, 24), 24), _mm256_srai_epi32(_mm256_slli_epi32(hi, 24), 24));
}
V16_INLINE void dot_put_u8(uint8_t *p, v16 a) {
    __m256i low = _mm256_set1_epi32(0xff);
    dot_put_wide(p, _mm256_and_si256(_mm256_castps_si256(a.lo), low), _mm256_and_si256(_mm256_castps_si256(a.hi), low));
}

#endif
