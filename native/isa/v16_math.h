/* exp2, exp, SiLU and GELU over 16 lanes: one source for every instruction set.
 *
 * Included at the end of each v16_*.h. Every step is one correctly rounded operation, and no operation may be
 * contracted or reordered, so the lanes hold the same bits wherever this is compiled. Nothing here calls libm.
 */
#ifndef CM_V16_MATH_H
#define CM_V16_MATH_H

#define CM_LOG2E 0x1.715476p+0f       /* log2(e), and what single precision loses of it */
#define CM_LOG2E_TAIL 0x1.4ae0cp-26f

/* 2**r for |r| <= 0.5, degree 6, a minimax fit with p(0) = 1 exactly: below 0.8 ulp as evaluated here. */
V16_INLINE v16 v16_exp2_poly(v16 r) {
    v16 p = v16_fma(v16_set1(0x1.41fbbcp-13f), r, v16_set1(0x1.5f3e52p-10f));
    p = v16_fma(p, r, v16_set1(0x1.3b2d4cp-7f));
    p = v16_fma(p, r, v16_set1(0x1.c6aef2p-5f));
    p = v16_fma(p, r, v16_set1(0x1.ebfbd8p-3f));
    p = v16_fma(p, r, v16_set1(0x1.62e430p-1f));
    return v16_fma(p, r, v16_set1(1.0f));
}

/* 2**x for x <= 128, or NaN. 0 below -126, so that no result is subnormal; inf at 128; NaN stays NaN. */
V16_INLINE v16 v16_exp2_upto128(v16 x) {
    v16 n = v16_round(x);
    return v16_scale2(v16_not_less(x, v16_set1(-126.0f)), v16_exp2_poly(v16_sub(x, n)), n);
}

/* The same to 3e-6 of the result, for what will be rounded to 8 bits. */
V16_INLINE v16 v16_exp2_coarse_upto128(v16 x) {
    v16 n = v16_round(x), r = v16_sub(x, n);
    v16 p = v16_fma(v16_set1(0x1.3a02ccp-7f), r, v16_set1(0x1.c9fc46p-5f));
    p = v16_fma(p, r, v16_set1(0x1.ec0378p-3f));
    p = v16_fma(p, r, v16_set1(0x1.62e12cp-1f));
    p = v16_fma(p, r, v16_set1(1.0f));
    return v16_scale2(v16_not_less(x, v16_set1(-126.0f)), p, n);
}

/* 2**x for any x. */
V16_INLINE v16 v16_exp2(v16 x) {
    return v16_exp2_upto128(v16_min(v16_set1(128.0f), x)); /* min hands on its second operand when that is NaN */
}

/* e**x. The product x * log2(e) is never rounded before the nearest integer has left it, so that the error
 * stays near 1 ulp over the whole range. */
V16_INLINE v16 v16_exp(v16 x) {
    v16 log2e = v16_set1(CM_LOG2E);
    v16 t = v16_mul(x, log2e);
    v16 n = v16_round(v16_min(v16_set1(128.0f), t));
    v16 r = v16_fma(x, v16_set1(CM_LOG2E_TAIL), v16_fma(x, log2e, v16_sub(v16_zero(), n)));
    /* 0 up to and including -126, the first float above being -0x1.f7fffep+6: t is rounded, so that at -126
     * itself the result might be a little below 2**-126. */
    v16 y = v16_scale2(v16_not_less(t, v16_set1(-0x1.f7fffep+6f)), v16_exp2_poly(r), n);
    return v16_select(v16_not_less(t, v16_set1(128.0f)), v16_add(t, v16_set1(INFINITY)), y); /* inf, or NaN */
}

/* x / (1 + e**-x) */
V16_INLINE v16 v16_silu(v16 x) {
    return v16_div(x, v16_add(v16_set1(1.0f), v16_exp(v16_sub(v16_zero(), x))));
}

/* GELU by tanh, x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / (1 + e**-2u). */
V16_INLINE v16 v16_gelu(v16 x) {
    v16 slope = v16_fma(v16_mul(x, x), v16_set1(-0x1.2444f2p-4f), v16_set1(-0x1.988454p+0f));
    return v16_div(x, v16_add(v16_set1(1.0f), v16_exp(v16_mul(x, slope))));
}

#endif
