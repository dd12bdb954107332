/* Dots of 8-bit codes with the vpdpbusd of AVX-512 VNNI. What each operation promises is said in dot_scalar.h. */
#ifndef CM_DOT_H
#define CM_DOT_H

#define DOT_FOUR_BYTES 4
#define DOT_PARTS 1

typedef __m512i v16i;
typedef __m512i dot_lanes;
typedef __m512i dot_four;

V16_INLINE v16i v16i_set1(int32_t x) { return _mm512_set1_epi32(x); }
V16_INLINE v16 v16i_float(v16i a) { return _mm512_cvtepi32_ps(a); }

V16_INLINE dot_lanes dot_load_u8(const uint8_t *p, int part) {
    (void)part;
    return _mm512_loadu_si512(p); }
V16_INLINE dot_lanes dot_load_s8(const uint8_t *p, int part) { return dot_load_u8(p, part); }
V16_INLINE dot_four dot_each(const uint8_t *p, int part) {
    (void)part;
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
V16_INLINE v16i dot_u8s8(v16i sum, dot_lanes a, dot_four b) { return _mm512_dpbusd_epi32(sum, a, b); }
V16_INLINE v16i dot_s8u8(v16i sum, dot_lanes a, dot_four b) { return _mm512_dpbusd_epi32(sum, b, a); }

V16_INLINE void v16_store_low_bytes(uint8_t *p, v16 a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_castps_si512(a)));
}
V16_INLINE void dot_put_s8(uint8_t *p, v16 a) { v16_store_low_bytes(p, a); }
V16_INLINE void dot_put_u8(uint8_t *p, v16 a) { v16_store_low_bytes(p, a); }

#endif
