/* 16 float lanes in plain C: the specification of v16_avx2.h and v16_avx512.h.
 *
 * Operations are IEEE single precision, rounded to nearest, subnormals kept. max and min are those of the
 * SSE instructions: `a > b ? a : b`, so the second operand when either is NaN. Which NaN an operation on NaNs
 * gives is not specified. "Halves" is the order of every horizontal sum: lane l takes l+8, then l+4, l+2, l+1.
 */
#ifndef CM_V16_H
#define CM_V16_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "f16.h"

#define V16_INLINE static inline __attribute__((unused)) /* not forced: with sanitizers that takes minutes */
#define V16_UNROLL _Pragma("GCC unroll 1") /* before a short loop over registers */
#define V16_ACCUMULATORS 6 /* that a kernel can hold beside its operands */
#define V16_CHAINS 4       /* independent multiply-adds that hide their latency */
#define V16_KEEP(a) __asm__ volatile("" : "+m"(a)) /* the value is needed here */

typedef struct v16 {
    float lane[16];
} v16;
typedef uint32_t v16_mask; /* bit l: lane l */

#define V16_EACH(expr)                                                                                       \
    v16 out;                                                                                                 \
    for (int i = 0; i < 16; i++)                                                                             \
        out.lane[i] = (expr);                                                                                \
    return out

V16_INLINE v16 v16_load(const float *p) { V16_EACH(p[i]); }
V16_INLINE v16 v16_set1(float x) { V16_EACH(x); }
V16_INLINE v16 v16_zero(void) { return v16_set1(0.0f); }
V16_INLINE v16 v16_add(v16 a, v16 b) { V16_EACH(a.lane[i] + b.lane[i]); }
V16_INLINE v16 v16_sub(v16 a, v16 b) { V16_EACH(a.lane[i] - b.lane[i]); }
V16_INLINE v16 v16_mul(v16 a, v16 b) { V16_EACH(a.lane[i] * b.lane[i]); }
V16_INLINE v16 v16_div(v16 a, v16 b) { V16_EACH(a.lane[i] / b.lane[i]); }
V16_INLINE v16 v16_max(v16 a, v16 b) { V16_EACH(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
V16_INLINE v16 v16_min(v16 a, v16 b) { V16_EACH(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
V16_INLINE float v16_fma1(float a, float b, float c) { return fmaf(a, b, c); } /* one lane */
V16_INLINE void v16_store(float *p, v16 a) { memcpy(p, a.lane, sizeof a.lane); }

/* a * b + c, rounded once. Not inlined: it is 16 library calls. */
static __attribute__((noinline, unused)) v16 v16_fma(v16 a, v16 b, v16 c) {
    V16_EACH(fmaf(a.lane[i], b.lane[i], c.lane[i]));
}

/* The first n lanes, 0 <= n <= 16; the others read as zero and are not written. */
V16_INLINE v16 v16_load_n(const float *p, int n) { V16_EACH(i < n ? p[i] : 0.0f); }
V16_INLINE void v16_store_n(float *p, v16 a, int n) { memcpy(p, a.lane, (size_t)n * sizeof(float)); }

V16_INLINE v16 v16_load_f16(const uint16_t *p) { V16_EACH(cm_f32_from_f16(p[i])); }
V16_INLINE v16 v16_load_f16_8(const uint16_t *p) { V16_EACH(i < 8 ? cm_f32_from_f16(p[i]) : 0.0f); }
V16_INLINE void v16_store_f16(uint16_t *p, v16 a) {
    for (int i = 0; i < 16; i++)
        p[i] = cm_f16_from_f32(a.lane[i]);
}
V16_INLINE void v16_store_f16_8(uint16_t *p, v16 a) {
    for (int i = 0; i < 8; i++)
        p[i] = cm_f16_from_f32(a.lane[i]);
}

V16_INLINE v16_mask v16_less(v16 a, v16 b) {
    v16_mask out = 0;
    for (int i = 0; i < 16; i++)
        out |= (v16_mask)(a.lane[i] < b.lane[i]) << i;
    return out;
}
V16_INLINE v16 v16_select(v16_mask m, v16 a, v16 b) { V16_EACH(m >> i & 1 ? a.lane[i] : b.lane[i]); }
V16_INLINE v16_mask v16_not_less(v16 a, v16 b) { return ~v16_less(a, b); } /* so NaN is not less */
/* Lane l of a where l < n, else of b; any n. */
V16_INLINE v16 v16_first(int n, v16 a, v16 b) { V16_EACH(i < n ? a.lane[i] : b.lane[i]); }

/* To the nearest integer, ties to even. */
V16_INLINE v16 v16_round(v16 a) {
    /* Any |x| of 2**23 or more is an integer already (or infinite, or NaN). */
    V16_EACH(fabsf(a.lane[i]) < 0x1p23f ? copysignf(fabsf(a.lane[i]) + 0x1p23f - 0x1p23f, a.lane[i]) : a.lane[i]);
}
/* p * 2**n where keep, else 0. In kept lanes n is an integer from -126 to 128 and p is 0.5 to 2, but p = 1 at 128
 * and p >= 1 at -126, so that no result is subnormal; or p is NaN, and so is the result. */
V16_INLINE v16 v16_scale2(v16_mask keep, v16 p, v16 n) {
    for (int i = 0; i < 16; i++) {
        if (!(keep >> i & 1))
            p.lane[i] = 0.0f;
        else if (n.lane[i] >= -126.0f && n.lane[i] <= 128.0f)
            p.lane[i] = cm_float_of(cm_bits_of(p.lane[i]) + ((uint32_t)(int32_t)n.lane[i] << 23));
    }
    return p;
}

/* Lanes 1 0 3 2 5 4 ... */
V16_INLINE v16 v16_swap_pairs(v16 a) { V16_EACH(a.lane[i ^ 1]); }
/* Lane l has lane l ^ distance of a: 1, 2, 4 or 8. */
V16_INLINE v16 v16_swap(v16 a, int distance) { V16_EACH(a.lane[i ^ distance]); }
/* p[0] p[0] p[1] p[1] ... of the first n/2 floats at p, n even; zero from lane n on. */
V16_INLINE v16 v16_load_twice(const float *p, int n) { V16_EACH(i < n ? p[i / 2] : 0.0f); }
/* The sign of the even lanes flipped. */
V16_INLINE v16 v16_negate_even(v16 a) { V16_EACH(i & 1 ? a.lane[i] : -a.lane[i]); }

V16_INLINE float v16_sum(v16 a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            a.lane[i] += a.lane[i + half];
    return a.lane[0];
}
V16_INLINE float v16_hmax(v16 a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            a.lane[i] = a.lane[i] > a.lane[i + half] ? a.lane[i] : a.lane[i + half];
    return a.lane[0];
}
/* Lane r = v16_sum(rows[r]), and the same of the maxima. */
V16_INLINE v16 v16_sum_rows(const v16 rows[16]) { V16_EACH(v16_sum(rows[i])); }
V16_INLINE v16 v16_max_rows(const v16 rows[16]) { V16_EACH(v16_hmax(rows[i])); }
#undef V16_EACH

#include "v16_math.h"

#endif
