/* What gemm_tile.inc needs, in AVX-512 with VNNI: 16 rows in a register. */
#include <immintrin.h>
#include <string.h>

#include "gemm_layout.h"

#define LANES 16
#define TILE_TOKENS 8
#define TILES(Z, format)                                                                                     \
    Z(format, 1, 1) Z(format, 1, 2) Z(format, 1, 3) Z(format, 1, 4) Z(format, 1, 8)                          \
    Z(format, 2, 1) Z(format, 2, 2) Z(format, 2, 3) Z(format, 2, 4) Z(format, 2, 5) Z(format, 2, 6)
#define TILES_FLOAT(Z, format) Z(format, 2, 8)
#define TILE_STRIPS(format, panels, tokens) (panels)

#define V static inline __attribute__((always_inline, unused))

typedef __m512i vint;
typedef __m512 vflt;
typedef __m512i vdot;

/* vpdpbusd adds into int32: sums of any length are exact. */
#define CHAIN_4 4
#define CHAIN_5 4
#define CHAIN_6 4
#define DOT8_SIGNED 0

V vint v_line(const uint8_t *p) { return _mm512_loadu_si512(p); }
V vint v_low(vint x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
V vint v_high(vint x) { return v_low(_mm512_srli_epi16(x, 4)); }

/* Shifts of 16-bit units do: bits that cross into the other byte fall under the mask. */
V vint v_shift(vint x, const int left) {
    switch (left) {
    case 4: return _mm512_slli_epi16(x, 4);
    case 3: return _mm512_slli_epi16(x, 3);
    case 2: return _mm512_slli_epi16(x, 2);
    case 1: return _mm512_slli_epi16(x, 1);
    case -1: return _mm512_srli_epi16(x, 1);
    case -2: return _mm512_srli_epi16(x, 2);
    case -3: return _mm512_srli_epi16(x, 3);
    default: return x;
    }
}
V vint v_merge(vint x, vint h, const int from, const int width) {
    vint mask = _mm512_set1_epi8((char)(((1 << width) - 1) << 4));
    return _mm512_ternarylogic_epi32(x, v_shift(h, 4 - from), mask, 0xf8); /* x | (h & mask) */
}

V vint v_token(const int8_t *q) {
    int32_t codes;
    memcpy(&codes, q, 4);
    return _mm512_set1_epi32(codes);
}
V vint v_izero(void) { return _mm512_setzero_si512(); }
V vint v_start(const int32_t *neg, const int shift) {
    return _mm512_slli_epi32(_mm512_set1_epi32(*neg), (unsigned)shift);
}
V vdot v_dot_begin(vint start) { return start; }
V vdot v_dot(vdot d, vint codes, vint token) { return _mm512_dpbusd_epi32(d, codes, token); }
V vint v_dot_fold(vdot d, vint start) {
    (void)start;
    return d;
}
V vint v_dot8(vint sum, vint codes, vint token) { return _mm512_dpbusd_epi32(sum, codes, token); }

V vflt v_zero(void) { return _mm512_setzero_ps(); }
V vflt v_all(const float *p) { return _mm512_set1_ps(*p); }
V vflt v_f16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
V vflt v_bf16(const uint8_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
V vflt v_f32(const uint8_t *p) { return _mm512_loadu_ps(p); }
V vflt v_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
V vflt v_float(vint x) { return _mm512_cvtepi32_ps(x); }
V vflt v_mul(vflt a, vflt b) { return _mm512_mul_ps(a, b); }
V vflt v_fma(vflt a, vflt b, vflt c) { return _mm512_fmadd_ps(a, b, c); }
V vflt v_fnma(vflt a, vflt b, vflt c) { return _mm512_fnmadd_ps(a, b, c); }
V void v_store(float *p, vflt x) { _mm512_storeu_ps(p, x); }

/* Q6_K: the sum of a block is an integer below 2^24, and so is each of its halves times its scale, so that f32
 * holds them exactly; multiplying as floats spares the slow 32-bit integer product. */
typedef __m512 vsum;
typedef __m512 vscale;
V vscale v_q6_scale(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
V vint v_q6_begin(const int16_t *halves, const int half) { /* 32 * halves[half] */
    int32_t both;
    memcpy(&both, halves, 4);
    vint x = _mm512_set1_epi32(both);
    return half ? _mm512_srai_epi32(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)), 11)
                : _mm512_srai_epi32(_mm512_slli_epi32(x, 16), 11);
}
V vsum v_q6_start(const int8_t *scales, const int16_t *halves) {
    (void)scales;
    (void)halves;
    return _mm512_setzero_ps();
}
V vsum v_q6_fold(vsum sum, vdot d, vscale scale) { return _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), scale, sum); }
V vflt v_q6_float(vsum sum) { return sum; }

/* Two panels by 4 tokens beat one by 8 (by 5 % in Q4_0 and Q8_0): half the loads of tokens, and two streams of
 * weights. Float formats keep one kind of sum only, so that 16 of them still leave registers. */
static int tile_panels(int format, int num_tokens) {
    (void)format;
    (void)num_tokens;
    return 2;
}

static int tile_tokens(int format, int num_panels, int left) {
    if (left >= 8 && (num_panels == 1 || cm_is_float_format(format)))
        return 8;
    if (num_panels == 2 && (left == 5 || left == 6)) /* one more tile of 1 or 2 would be far from full speed */
        return left;
    return left < 4 ? left : 4;
}
