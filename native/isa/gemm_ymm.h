/* What gemm_tile.inc needs and AVX2 and AVX-VNNI share: 8 rows in a register, panels of two of them. */
#include <immintrin.h>
#include <string.h>

#include "gemm_layout.h"

#define LANES 8
#define TILE_TOKENS 4
#define TILES(Z, format) Z(format, 1, 1) Z(format, 1, 2) Z(format, 1, 3) Z(format, 1, 4)
#define TILES_FLOAT(Z, format)

#define V static inline __attribute__((always_inline, unused))

typedef __m256i vint;
typedef __m256 vflt;

V vint v_line(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
V vint v_low(vint x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
V vint v_high(vint x) { return v_low(_mm256_srli_epi16(x, 4)); }

/* Shifts of 16-bit units do: bits that cross into the other byte fall under the mask. */
V vint v_merge(vint x, vint h, const int from, const int width) {
    vint shifted = from <= 4 ? _mm256_slli_epi16(h, 4 - from) : _mm256_srli_epi16(h, from - 4);
    return _mm256_or_si256(x, _mm256_and_si256(shifted, _mm256_set1_epi8((char)(((1 << width) - 1) << 4))));
}

V vint v_token(const int8_t *q) {
    int32_t codes;
    memcpy(&codes, q, 4);
    return _mm256_set1_epi32(codes);
}
V vint v_izero(void) { return _mm256_setzero_si256(); }
V vint v_start(const int32_t *neg, const int shift) { return _mm256_slli_epi32(_mm256_set1_epi32(*neg), shift); }

V vflt v_zero(void) { return _mm256_setzero_ps(); }
V vflt v_all(const float *p) { return _mm256_set1_ps(*p); }
V vflt v_f16(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
V vflt v_bf16(const uint8_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
V vflt v_f32(const uint8_t *p) { return _mm256_loadu_ps((const float *)p); }
V vflt v_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
V vflt v_float(vint x) { return _mm256_cvtepi32_ps(x); }
V vflt v_mul(vflt a, vflt b) { return _mm256_mul_ps(a, b); }
V vflt v_fma(vflt a, vflt b, vflt c) { return _mm256_fmadd_ps(a, b, c); }
V vflt v_fnma(vflt a, vflt b, vflt c) { return _mm256_fnmadd_ps(a, b, c); }
V void v_store(float *p, vflt x) { _mm256_storeu_ps(p, x); }

static int tile_panels(int format, int num_tokens) {
    (void)format;
    (void)num_tokens;
    return 1;
}

static int tile_tokens(int format, int num_panels, int left) {
    (void)format;
    (void)num_panels;
    return left < TILE_TOKENS ? left : TILE_TOKENS;
}
