/* Exact dots without VNNI: vpmaddubsw multiplies u8 by s8 and adds pairs into int16.
 *
 * Activation codes stay within +-127, so a pair of products is at most 2 * code * 127, and sums of
 * 8 groups of 4-bit (30,480), 4 of 5-bit (31,496) or 2 of 6-bit codes (32,004) fit int16 (32,767): only then does
 * vpmaddwd widen to int32. A CHAIN counts lines; a line of 4 or 5 bits holds 2 groups.
 */
#define CHAIN_4 4
#define CHAIN_5 2
#define CHAIN_6 2
#define DOT8_SIGNED 1
/* Tokens are broadcast by loads, of which there are two a cycle: each serves both vectors of rows. That the float sums
 * do not fit the 16 registers then costs one load and store each per block of 32 k. */
#define TILE_STRIPS(format, panels, tokens) 2

typedef __m256i vdot;

V vdot v_dot_begin(vint start) {
    (void)start;
    return _mm256_setzero_si256();
}
V vdot v_dot(vdot d, vint codes, vint token) { return _mm256_add_epi16(d, _mm256_maddubs_epi16(codes, token)); }
V vint v_dot_fold(vdot d, vint start) {
    return _mm256_add_epi32(start, _mm256_madd_epi16(d, _mm256_set1_epi16(1)));
}
/* 8 bits: the sign of w goes to the activation, so that a pair is at most 2 * 128 * 127 = 32,512. */
V vint v_dot8(vint sum, vint codes, vint token) {
    vint w = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    vint pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(token, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* Q6_K: vpmaddwd multiplies by the integer scale as it widens, and makes the start value of both halves at once:
 * 32 * (scale0 * -sum0 + scale1 * -sum1), the scales times 32 still being int16. */
typedef __m256i vsum;
typedef __m256i vscale; /* each scale twice, as int16 */

V vscale v_q6_scale(const int8_t *p) {
    __m128i s = _mm_loadl_epi64((const __m128i *)p);
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(s, s));
}
V vint v_q6_begin(const int16_t *halves, const int half) {
    (void)halves;
    (void)half;
    return _mm256_setzero_si256();
}
V vsum v_q6_start(const int8_t *scales, const int16_t *halves) {
    int32_t both;
    memcpy(&both, halves, 4);
    __m128i s0 = _mm_loadl_epi64((const __m128i *)scales), s1 = _mm_loadl_epi64((const __m128i *)(scales + 16));
    __m256i pairs = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(s0, s1)), 5);
    return _mm256_madd_epi16(pairs, _mm256_set1_epi32(both));
}
V vsum v_q6_fold(vsum sum, vdot d, vscale scale) { return _mm256_add_epi32(sum, _mm256_madd_epi16(d, scale)); }
V vflt v_q6_float(vsum sum) { return _mm256_cvtepi32_ps(sum); }
