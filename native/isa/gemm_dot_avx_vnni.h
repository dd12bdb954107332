/* Dots by the VEX-encoded vpdpbusd, which adds into int32: sums of any length are exact. */
#define CHAIN_4 4
#define CHAIN_5 4
#define CHAIN_6 4
#define DOT8_SIGNED 0
/* 16 registers: float formats need 8 sums to hide latency; integer ones need them for sums of two kinds. */
#define TILE_STRIPS(format, panels, tokens) (cm_is_float_format(format) || tokens == 1 ? 2 : 1)

typedef __m256i vdot;

V vdot v_dot_begin(vint start) { return start; }
V vdot v_dot(vdot d, vint codes, vint token) { return _mm256_dpbusd_avx_epi32(d, codes, token); }
V vint v_dot_fold(vdot d, vint start) {
    (void)start;
    return d;
}
V vint v_dot8(vint sum, vint codes, vint token) { return _mm256_dpbusd_avx_epi32(sum, codes, token); }

/* Q6_K: as in gemm_avx512.h, in floats that are exact integers. */
typedef __m256 vsum;
typedef __m256 vscale;

V vscale v_q6_scale(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
V vint v_q6_begin(const int16_t *halves, const int half) { /* 32 * halves[half] */
    int32_t both;
    memcpy(&both, halves, 4);
    vint x = _mm256_set1_epi32(both);
    return half ? _mm256_srai_epi32(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)), 11)
                : _mm256_srai_epi32(_mm256_slli_epi32(x, 16), 11);
}
V vsum v_q6_start(const int8_t *scales, const int16_t *halves) {
    (void)scales;
    (void)halves;
    return _mm256_setzero_ps();
}
V vsum v_q6_fold(vsum sum, vdot d, vscale scale) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(d), scale, sum); }
V vflt v_q6_float(vsum sum) { return sum; }
