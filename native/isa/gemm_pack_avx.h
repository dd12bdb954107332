/* act_pack with 256-bit registers, for every vector instruction set: 4 tokens at a time, which is one group.
 * What it computes is said in gemm_scalar.h. */
#include <immintrin.h>
#include <string.h>

#include "kernels.h"

/* Largest magnitude of each of 4 tokens' 32 values, as f32 bits (those order as integers, NaN last). */
static inline __m128i group_max_bits(const __m256 x[4][4]) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i m[4];
    for (int t = 0; t < 4; t++) {
        m[t] = _mm256_and_si256(_mm256_castps_si256(x[t][0]), magnitude);
        for (int i = 1; i < 4; i++)
            m[t] = _mm256_max_epi32(m[t], _mm256_and_si256(_mm256_castps_si256(x[t][i]), magnitude));
    }
    __m256i m01 = _mm256_max_epi32(_mm256_unpacklo_epi32(m[0], m[1]), _mm256_unpackhi_epi32(m[0], m[1]));
    __m256i m23 = _mm256_max_epi32(_mm256_unpacklo_epi32(m[2], m[3]), _mm256_unpackhi_epi32(m[2], m[3]));
    __m256i all = _mm256_max_epi32(_mm256_unpacklo_epi64(m01, m23), _mm256_unpackhi_epi64(m01, m23));
    return _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

/* Sum over 16 k of 4 tokens' codes. a, b: [2 groups][4 tokens][4 k] each. */
static inline __m128i group_sums(__m256i a, __m256i b) {
    const __m256i ones = _mm256_set1_epi8(1);
    __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(ones, a), _mm256_maddubs_epi16(ones, b));
    __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    return _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}

/* 32 k of 4 tokens: q [8][4 tokens][4 k]. */
static inline void pack_group(cm_act_block *block, int8_t *q, const __m256 x[4][4]) {
    __m128i max_bits = group_max_bits(x);
    __m128 amax = _mm_castsi128_ps(max_bits), limit = _mm_set1_ps(0x1.fffffep127f);
    __m128 bad = _mm_castsi128_ps(_mm_cmpgt_epi32(max_bits, _mm_set1_epi32(0x7f7fffff))); /* infinite or NaN */
    __m128 inv = _mm_div_ps(_mm_set1_ps(127), amax), scale = _mm_div_ps(amax, _mm_set1_ps(127));
    __m128 tiny = _mm_cmpgt_ps(inv, limit);
    scale = _mm_blendv_ps(_mm_andnot_ps(tiny, scale), _mm_castsi128_ps(_mm_set1_epi32(0x7fc00000)), bad);
    inv = _mm_andnot_ps(_mm_or_ps(tiny, bad), inv);

    float inverse[4];
    int32_t is_bad[4];
    _mm_storeu_ps(inverse, inv);
    _mm_storeu_ps((float *)is_bad, bad);
    __m256i bytes[4]; /* of token t: groups 0 2 4 6, then 1 3 5 7 */
    for (int t = 0; t < 4; t++) {
        __m256 factor = _mm256_set1_ps(inverse[t]);
        __m256i code[4];
        for (int i = 0; i < 4; i++)
            code[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[t][i], factor)); /* to nearest even */
        bytes[t] = _mm256_packs_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3]));
        bytes[t] = _mm256_andnot_si256(_mm256_set1_epi32(is_bad[t]), bytes[t]); /* infinity * 0 */
    }
    __m256i lo01 = _mm256_unpacklo_epi32(bytes[0], bytes[1]), lo23 = _mm256_unpacklo_epi32(bytes[2], bytes[3]);
    __m256i hi01 = _mm256_unpackhi_epi32(bytes[0], bytes[1]), hi23 = _mm256_unpackhi_epi32(bytes[2], bytes[3]);
    __m256i groups[4] = {_mm256_unpacklo_epi64(lo01, lo23), _mm256_unpackhi_epi64(lo01, lo23),
                         _mm256_unpacklo_epi64(hi01, hi23), _mm256_unpackhi_epi64(hi01, hi23)};
    for (int i = 0; i < 4; i++)
        _mm256_storeu_si256((__m256i *)(q + 32 * i), groups[i]);

    __m128i lo = group_sums(groups[0], groups[1]), hi = group_sums(groups[2], groups[3]);
    __m128i sum = _mm_add_epi32(lo, hi), zero = _mm_setzero_si128();
    __m128i neg_lo = _mm_sub_epi32(zero, lo), neg_hi = _mm_sub_epi32(zero, hi);
    _mm_storeu_ps(block->scale, scale);
    _mm_storeu_ps(block->scaled_sum, _mm_mul_ps(scale, _mm_cvtepi32_ps(sum)));
    _mm_storeu_si128((__m128i *)block->neg_sum, _mm_sub_epi32(zero, sum));
    _mm_storeu_si128((__m128i *)block->neg_halves, _mm_blend_epi16(neg_lo, _mm_slli_epi32(neg_hi, 16), 0xaa));
}

/* f [k][4 tokens]; rows of tokens that do not exist are NULL. */
static void interleave_floats(float *f, const float *const rows[4], size_t k) {
    for (size_t i = 0; i < k; i++)
        for (size_t t = 0; t < 4; t++)
            f[i * 4 + t] = rows[t] ? rows[t][i] : 0;
}

static void interleave_full(float *f, const float *const rows[4], size_t k) {
    size_t i = 0;
    for (; i + 4 <= k; i += 4) {
        __m128 r0 = _mm_loadu_ps(rows[0] + i), r1 = _mm_loadu_ps(rows[1] + i);
        __m128 r2 = _mm_loadu_ps(rows[2] + i), r3 = _mm_loadu_ps(rows[3] + i);
        _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
        _mm_storeu_ps(f + i * 4, r0);
        _mm_storeu_ps(f + i * 4 + 4, r1);
        _mm_storeu_ps(f + i * 4 + 8, r2);
        _mm_storeu_ps(f + i * 4 + 12, r3);
    }
    const float *const rest[4] = {rows[0] + i, rows[1] + i, rows[2] + i, rows[3] + i};
    interleave_floats(f + i * 4, rest, k - i);
}

static void act_pack(cm_act *dst, const float *src, size_t src_stride, int group_begin, int group_end, int forms) {
    const size_t k = (size_t)dst->k;
    for (int g = group_begin; g < group_end; g++) {
        const float *rows[4];
        int have = dst->num_tokens - g * CM_TOKEN_GROUP;
        for (int t = 0; t < 4; t++)
            rows[t] = t < have ? src + (size_t)(g * CM_TOKEN_GROUP + t) * src_stride : NULL;
        if (forms & CM_ACT_INT8)
            for (size_t b = 0; b < k / 32; b++) {
                __m256 x[4][4];
                for (int t = 0; t < 4; t++)
                    for (int i = 0; i < 4; i++)
                        x[t][i] = rows[t] ? _mm256_loadu_ps(rows[t] + b * 32 + (size_t)i * 8) : _mm256_setzero_ps();
                pack_group(dst->blocks + (size_t)g * (k / 32) + b, dst->q + ((size_t)g * k + b * 32) * 4, x);
            }
        if (forms & CM_ACT_F32) {
            float *f = dst->f + (size_t)g * k * 4;
            if (have >= 4)
                interleave_full(f, rows, k);
            else
                interleave_floats(f, rows, k);
        }
    }
}
