/* 16 float lanes in one AVX-512 register. What each operation promises is said in v16_scalar.h. */
#ifndef CM_V16_H
#define CM_V16_H

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "f16.h"

#define V16_INLINE static inline __attribute__((always_inline, unused))
#define V16_UNROLL _Pragma("GCC unroll 16") /* before a short loop over registers */
#define V16_ACCUMULATORS 24 /* that a kernel can hold beside its operands */
#define V16_CHAINS 12       /* independent multiply-adds that hide their latency */
#define V16_KEEP(a) __asm__ volatile("" : "+v"(a)) /* the value is needed here */

typedef __m512 v16;
typedef __mmask16 v16_mask;

V16_INLINE v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
V16_INLINE v16 v16_set1(float x) { return _mm512_set1_ps(x); }
V16_INLINE v16 v16_zero(void) { return _mm512_setzero_ps(); }
V16_INLINE v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
V16_INLINE v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
V16_INLINE v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
V16_INLINE v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
V16_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
V16_INLINE v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
V16_INLINE v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
V16_INLINE float v16_fma1(float a, float b, float c) {
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}
V16_INLINE void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }

V16_INLINE v16_mask v16_lanes(int n) {
    return (v16_mask)(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1);
}
V16_INLINE v16 v16_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(v16_lanes(n), p); }
V16_INLINE void v16_store_n(float *p, v16 a, int n) { _mm512_mask_storeu_ps(p, v16_lanes(n), a); }

V16_INLINE v16 v16_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
V16_INLINE v16 v16_load_f16_8(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)p)));
}
V16_INLINE void v16_store_f16(uint16_t *p, v16 a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
V16_INLINE void v16_store_f16_8(uint16_t *p, v16 a) {
    __m256i all = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(all));
}

V16_INLINE v16_mask v16_less(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
V16_INLINE v16_mask v16_not_less(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
V16_INLINE v16 v16_select(v16_mask m, v16 a, v16 b) { return _mm512_mask_mov_ps(b, m, a); }
V16_INLINE v16 v16_first(int n, v16 a, v16 b) { return _mm512_mask_mov_ps(b, v16_lanes(n), a); }

V16_INLINE v16 v16_round(v16 a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
V16_INLINE v16 v16_scale2(v16_mask keep, v16 p, v16 n) { return _mm512_maskz_scalef_ps(keep, p, n); }

V16_INLINE v16 v16_swap_pairs(v16 a) { return _mm512_permute_ps(a, 0xb1); }
/* distance is a constant: 1, 2, 4 or 8. */
V16_INLINE v16 v16_swap(v16 a, int distance) {
    return distance == 1   ? _mm512_permute_ps(a, 0xb1)
           : distance == 2 ? _mm512_permute_ps(a, 0x4e)
           : distance == 4 ? _mm512_shuffle_f32x4(a, a, 0xb1)
                           : _mm512_shuffle_f32x4(a, a, 0x4e);
}
V16_INLINE v16 v16_load_twice(const float *p, int n) {
    __m512i index = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(index, v16_load_n(p, n / 2));
}
V16_INLINE v16 v16_negate_even(v16 a) {
    return _mm512_castsi512_ps(
        _mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi64(UINT32_C(0x80000000))));
}

/* One step of a reduction of several rows at once: of each pair (a, b), `lo` collects the halves that come
 * first and `hi` those that are added to them. Three shuffles and adds per row, and the order of "halves". */
#define V16_FOLD_ROWS(OP)                                                                                    \
    v16 t8[8], t4[4], t2[2];                                                                                 \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {\
        v16 a = rows[i + 8 * j], b = rows[i + 8 * j + 4];                                                    \
        t8[2 * i + j] = OP(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));              \
    }                                                                                                        \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) t4[i] =                                              \
        OP(_mm512_shuffle_f32x4(t8[2 * i], t8[2 * i + 1], 0x88),                                             \
           _mm512_shuffle_f32x4(t8[2 * i], t8[2 * i + 1], 0xdd));                                            \
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {                                                    \
        __m512d a = _mm512_castps_pd(t4[2 * i]), b = _mm512_castps_pd(t4[2 * i + 1]);                        \
        t2[i] = OP(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));  \
    }                                                                                                        \
    return OP(_mm512_shuffle_ps(t2[0], t2[1], 0x88), _mm512_shuffle_ps(t2[0], t2[1], 0xdd))

V16_INLINE v16 v16_sum_rows(const v16 rows[16]) { V16_FOLD_ROWS(_mm512_add_ps); }
V16_INLINE v16 v16_max_rows(const v16 rows[16]) { V16_FOLD_ROWS(_mm512_max_ps); }
#undef V16_FOLD_ROWS

#define V16_FOLD(OP256, OP)                                                                                  \
    __m256 h8 = OP256(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));                              \
    __m128 h4 = OP(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));                                \
    __m128 h2 = OP(h4, _mm_movehl_ps(h4, h4));                                                               \
    return _mm_cvtss_f32(OP(h2, _mm_movehdup_ps(h2)))

V16_INLINE float v16_sum(v16 a) { V16_FOLD(_mm256_add_ps, _mm_add_ps); }
V16_INLINE float v16_hmax(v16 a) { V16_FOLD(_mm256_max_ps, _mm_max_ps); }
#undef V16_FOLD

#include "v16_math.h"

#endif
