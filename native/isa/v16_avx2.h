/* 16 float lanes in two AVX registers. What each operation promises is said in v16_scalar.h. */
#ifndef CM_V16_H
#define CM_V16_H

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "f16.h"

#define V16_INLINE static inline __attribute__((always_inline, unused))
#define V16_UNROLL _Pragma("GCC unroll 16") /* before a short loop over registers */
#define V16_ACCUMULATORS 6 /* that a kernel can hold beside its operands */
#define V16_CHAINS 6       /* independent multiply-adds that hide their latency */
#define V16_KEEP(a) __asm__ volatile("" : "+x"((a).lo), "+x"((a).hi)) /* the value is needed here */

typedef struct v16 {
    __m256 lo, hi;
} v16;
typedef struct v16_mask {
    __m256 lo, hi;
} v16_mask;

V16_INLINE v16 v16_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
V16_INLINE v16 v16_set1(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
V16_INLINE v16 v16_zero(void) { return v16_set1(0.0f); }
V16_INLINE v16 v16_add(v16 a, v16 b) { return (v16){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
V16_INLINE v16 v16_sub(v16 a, v16 b) { return (v16){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
V16_INLINE v16 v16_mul(v16 a, v16 b) { return (v16){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
V16_INLINE v16 v16_div(v16 a, v16 b) { return (v16){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
V16_INLINE v16 v16_max(v16 a, v16 b) { return (v16){_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
V16_INLINE v16 v16_min(v16 a, v16 b) { return (v16){_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
V16_INLINE v16 v16_fma(v16 a, v16 b, v16 c) {
    return (v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
V16_INLINE float v16_fma1(float a, float b, float c) {
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}
V16_INLINE void v16_store(float *p, v16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}

/* All bits of lane l set where l < n. */
V16_INLINE v16_mask v16_lanes(int n) {
    __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (v16_mask){_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), index)),
                      _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), index))};
}
V16_INLINE v16 v16_load_n(const float *p, int n) {
    v16_mask m = v16_lanes(n);
    return (v16){_mm256_maskload_ps(p, _mm256_castps_si256(m.lo)),
                 _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi))};
}
V16_INLINE void v16_store_n(float *p, v16 a, int n) {
    v16_mask m = v16_lanes(n);
    _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), a.lo);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), a.hi);
}

V16_INLINE v16 v16_load_f16(const uint16_t *p) {
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
V16_INLINE v16 v16_load_f16_8(const uint16_t *p) {
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_setzero_ps()};
}
V16_INLINE void v16_store_f16_8(uint16_t *p, v16 a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
V16_INLINE void v16_store_f16(uint16_t *p, v16 a) {
    v16_store_f16_8(p, a);
    v16_store_f16_8(p + 8, (v16){a.hi, a.hi});
}

V16_INLINE v16_mask v16_less(v16 a, v16 b) {
    return (v16_mask){_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
V16_INLINE v16_mask v16_not_less(v16 a, v16 b) {
    return (v16_mask){_mm256_cmp_ps(a.lo, b.lo, _CMP_NLT_UQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_NLT_UQ)};
}
V16_INLINE v16 v16_select(v16_mask m, v16 a, v16 b) {
    return (v16){_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
V16_INLINE v16 v16_first(int n, v16 a, v16 b) { return v16_select(v16_lanes(n), a, b); }

V16_INLINE v16 v16_round(v16 a) {
    return (v16){_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                 _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
V16_INLINE __m256 v16_scale2_half(__m256 keep, __m256 p, __m256 n) {
    /* NaN converts to 0x80000000, whose shift is 0: p keeps its NaN. */
    __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_and_ps(keep, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent)));
}
V16_INLINE v16 v16_scale2(v16_mask keep, v16 p, v16 n) {
    return (v16){v16_scale2_half(keep.lo, p.lo, n.lo), v16_scale2_half(keep.hi, p.hi, n.hi)};
}

V16_INLINE v16 v16_swap_pairs(v16 a) { return (v16){_mm256_permute_ps(a.lo, 0xb1), _mm256_permute_ps(a.hi, 0xb1)}; }
/* distance is a constant: 1, 2, 4 or 8. */
V16_INLINE v16 v16_swap(v16 a, int distance) {
    return distance == 1   ? (v16){_mm256_permute_ps(a.lo, 0xb1), _mm256_permute_ps(a.hi, 0xb1)}
           : distance == 2 ? (v16){_mm256_permute_ps(a.lo, 0x4e), _mm256_permute_ps(a.hi, 0x4e)}
           : distance == 4 ? (v16){_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)}
                           : (v16){a.hi, a.lo};
}
V16_INLINE v16 v16_load_twice(const float *p, int n) {
    __m256 a = _mm256_maskload_ps(p, _mm256_castps_si256(v16_lanes(n / 2).lo));
    return (v16){_mm256_permutevar8x32_ps(a, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
                 _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}
V16_INLINE v16 v16_negate_even(v16 a) {
    __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi64x(UINT32_C(0x80000000)));
    return (v16){_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
}

/* Several rows at once: of each pair (a, b), one shuffle collects the halves that come first and another those
 * that are added to them, in the order of "halves". */
#define V16_FOLD_ROWS8(OP, out, first)                                                                       \
    do {                                                                                                     \
        __m256 t8[8], t4[4], t2[2];                                                                          \
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) t8[i] =                                          \
            OP(rows[first + i].lo, rows[first + i].hi);                                                      \
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) t4[i] =                                          \
            OP(_mm256_permute2f128_ps(t8[i], t8[i + 4], 0x20),                                               \
               _mm256_permute2f128_ps(t8[i], t8[i + 4], 0x31));                                              \
        _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {                                                \
            __m256d a = _mm256_castps_pd(t4[2 * i]), b = _mm256_castps_pd(t4[2 * i + 1]);                    \
            t2[i] = OP(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),                                           \
                       _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));                                          \
        }                                                                                                    \
        out = OP(_mm256_shuffle_ps(t2[0], t2[1], 0x88), _mm256_shuffle_ps(t2[0], t2[1], 0xdd));              \
    } while (0)
#define V16_FOLD_ROWS(OP)                                                                                    \
    v16 out;                                                                                                 \
    V16_FOLD_ROWS8(OP, out.lo, 0);                                                                           \
    V16_FOLD_ROWS8(OP, out.hi, 8);                                                                           \
    return out

V16_INLINE v16 v16_sum_rows(const v16 rows[16]) { V16_FOLD_ROWS(_mm256_add_ps); }
V16_INLINE v16 v16_max_rows(const v16 rows[16]) { V16_FOLD_ROWS(_mm256_max_ps); }
#undef V16_FOLD_ROWS
#undef V16_FOLD_ROWS8

#define V16_FOLD(OP256, OP)                                                                                  \
    __m256 h8 = OP256(a.lo, a.hi);                                                                           \
    __m128 h4 = OP(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));                                \
    __m128 h2 = OP(h4, _mm_movehl_ps(h4, h4));                                                               \
    return _mm_cvtss_f32(OP(h2, _mm_movehdup_ps(h2)))

V16_INLINE float v16_sum(v16 a) { V16_FOLD(_mm256_add_ps, _mm_add_ps); }
V16_INLINE float v16_hmax(v16 a) { V16_FOLD(_mm256_max_ps, _mm_max_ps); }
#undef V16_FOLD

#include "v16_math.h"

#endif
