/* The specification of the matrix kernels, in plain C: what every other instruction set must reproduce bit by
 * bit. Provides act_pack, gemm_tile, gather_rows; the loops and epilogues around gemm_tile are in gemm_driver.inc.
 *
 * One output element is one chain of f32 operations, in k order:
 *   F32, F16, BF16        acc = fma(w, x, acc) for each k
 *   Q4_0, Q5_0, Q8_0      acc = fma((float)isum, d * da, acc)              for each block of 32 k
 *   Q4_1, Q5_1            the same, then acc = fma(m, da * (float)sum(q), acc)
 *   Q4_K, Q5_K            as Q4_1 with d * scale for d and -(dmin * minimum) for m (both products exact)
 *   Q6_K                  acc = fma((float)(scale0 * isum0 + scale1 * isum1), d * da, acc), halves of 16 k
 * where isum = sum of (code - zero point) * q is exact, q and da being the token's 8-bit codes and their scale.
 */
#include <math.h>
#include <string.h>

#include "f16.h"
#include "gemm_layout.h"

/* ---- activations ---- */

static float f16_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return cm_f32_from_f16(h);
}

/* Round to nearest, ties to even, for |x| < 2^22: after the first addition no fraction bits are left. */
static float round_even(float x) {
    return (x + 0x1.8p23f) - 0x1.8p23f;
}

/* Quantises 32 values of one token into lane t of a group's block; q: the group's [8][4 tokens][4 k].
 * A block with an infinity or a NaN gets scale NaN, so that it shows in every output it takes part in. */
static void pack_block(cm_act_block *block, int8_t *q, int t, const float *x) {
    uint32_t max_bits = 0;
    for (int i = 0; i < 32; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff; /* magnitudes order as their bits do, and NaN comes last */
        max_bits = bits > max_bits ? bits : max_bits;
    }
    float amax = cm_float_of(max_bits), scale, inv;
    if (max_bits >= 0x7f800000) {
        scale = cm_float_of(0x7fc00000);
        inv = 0;
    } else {
        scale = amax / 127.0f;
        inv = 127.0f / amax;
        if (inv > 0x1.fffffep127f) /* all zero, or too small to be told from it */
            scale = inv = 0;
    }
    int32_t sum[2] = {0, 0};
    for (int i = 0; i < 32; i++) {
        /* |x * inv| <= 127 up to one rounding, so no clamp is needed. */
        int code = inv == 0 ? 0 : (int)round_even(x[i] * inv);
        q[(i / 4 * 4 + t) * 4 + i % 4] = (int8_t)code;
        sum[i / 16] += code;
    }
    block->scale[t] = scale;
    block->scaled_sum[t] = scale * (float)(sum[0] + sum[1]);
    block->neg_sum[t] = -(sum[0] + sum[1]);
    block->neg_halves[t][0] = (int16_t)-sum[0];
    block->neg_halves[t][1] = (int16_t)-sum[1];
}

static void act_pack(cm_act *dst, const float *src, size_t src_stride, int group_begin, int group_end, int forms) {
    const size_t k = (size_t)dst->k;
    for (int g = group_begin; g < group_end; g++) {
        for (int t = 0; t < CM_TOKEN_GROUP; t++) {
            int token = g * CM_TOKEN_GROUP + t;
            const float *x = token < dst->num_tokens ? src + (size_t)token * src_stride : NULL;
            static const float zeros[32];
            if (forms & CM_ACT_INT8)
                for (size_t b = 0; b < k / 32; b++)
                    pack_block(dst->blocks + (size_t)g * (k / 32) + b, dst->q + ((size_t)g * k + b * 32) * 4, t,
                               x ? x + b * 32 : zeros);
            if (forms & CM_ACT_F32)
                for (size_t i = 0; i < k; i++)
                    dst->f[((size_t)g * k + i) * 4 + (size_t)t] = x ? x[i] : 0;
        }
    }
}

/* ---- weights ---- */

/* Codes of row r in one block of 32 k, zero point taken off. */
static void unpack_row(int8_t *restrict w, const uint8_t *codes, int format, int r) {
    int bits = cm_code_bits(format), zero = cm_has_minima(format) ? 0 : 1 << cm_zero_shift(format);
    for (int i = 0; i < 32; i++) {
        int j = i / 4; /* group */
        const uint8_t *at = codes + 4 * r + i % 4;
        int code;
        if (bits == 8)
            code = at[CM_LINE * j];
        else
            code = at[CM_LINE * (j % 4)] >> (j / 4 * 4) & 15;
        if (bits == 5)
            code |= (at[CM_LINE * 4] >> j & 1) << 4;
        if (bits == 6)
            code |= (at[CM_LINE * (4 + j / 4)] >> (2 * (j % 4)) & 3) << 4;
        w[i] = (int8_t)(code - zero);
    }
}

/* Scale and minimum of row r in block b. Q6_K: the d of the block; its integer scales come on top. */
static void block_scales(float *d, float *m, const uint8_t *scales, int format, size_t b, int r) {
    const uint8_t *at;
    switch (format) {
    case CM_Q4_K:
    case CM_Q5_K:
        at = scales + b / CM_SUPER_BLOCKS * CM_K45_STRIDE;
        *d = f16_at(at + 2 * r) * (float)at[CM_K45_SCALE + b % CM_SUPER_BLOCKS * 16 + (size_t)r];
        *m = -(f16_at(at + CM_K45_DMIN + 2 * r) * (float)at[CM_K45_MIN + b % CM_SUPER_BLOCKS * 16 + (size_t)r]);
        break;
    case CM_Q6_K:
        *d = f16_at(scales + b / CM_SUPER_BLOCKS * CM_Q6K_STRIDE + 2 * r);
        *m = 0;
        break;
    default:
        at = scales + b * (size_t)cm_legacy_stride(format) + 2 * r;
        *d = f16_at(at);
        *m = cm_has_minima(format) ? f16_at(at + CM_LEGACY_MIN) : 0;
    }
}

static int q6k_scale(const uint8_t *scales, size_t b, int half, int r) {
    const uint8_t *at = scales + b / CM_SUPER_BLOCKS * CM_Q6K_STRIDE + CM_Q6K_SCALE;
    return (int8_t)at[(2 * (b % CM_SUPER_BLOCKS) + (size_t)half) * 16 + (size_t)r];
}

static float float_weight(const uint8_t *panel, int format, size_t k, int r) {
    size_t at = k * 16 + (size_t)r;
    uint32_t bits = 0;
    if (format == CM_F32)
        memcpy(&bits, panel + at * 4, 4);
    else if (format == CM_BF16)
        memcpy((uint8_t *)&bits + 2, panel + at * 2, 2);
    else
        return f16_at(panel + at * 2);
    return cm_float_of(bits);
}

/* ---- matrix product ---- */

static void float_tile(const uint8_t *panel, int format, const cm_act *x, int token, int num, float *out) {
    const size_t k = (size_t)x->k;
    for (int t = 0; t < num; t++) {
        const float *f = x->f + (size_t)((token + t) / 4) * k * 4 + (size_t)((token + t) % 4);
        for (int r = 0; r < 16; r++) {
            float acc = 0;
            for (size_t i = 0; i < k; i++)
                acc = fmaf(float_weight(panel, format, i, r), f[i * 4], acc);
            out[t * 16 + r] = acc;
        }
    }
}

static void integer_tile(const uint8_t *panel, int format, const cm_act *x, int token, int num, float *out) {
    const size_t k = (size_t)x->k, num_blocks = k / 32;
    const uint8_t *scales = panel + cm_codes_bytes(format, k);
    for (int r = 0; r < 16; r++) {
        for (int t = 0; t < num; t++)
            out[t * 16 + r] = 0;
        for (size_t b = 0; b < num_blocks; b++) {
            int8_t w[32];
            float d, m;
            unpack_row(w, panel + b * (size_t)cm_block_lines(format) * CM_LINE, format, r);
            block_scales(&d, &m, scales, format, b, r);
            for (int t = 0; t < num; t++) {
                size_t group = (size_t)((token + t) / 4);
                int lane = (token + t) % 4;
                const cm_act_block *block = x->blocks + group * num_blocks + b;
                const int8_t *q = x->q + (group * k + b * 32) * 4 + lane * 4;
                int32_t half[2] = {0, 0};
                for (int i = 0; i < 32; i++)
                    half[i / 16] += w[i] * q[i / 4 * 16 + i % 4];
                if (format == CM_Q6_K) {
                    half[0] *= q6k_scale(scales, b, 0, r);
                    half[1] *= q6k_scale(scales, b, 1, r);
                }
                float acc = fmaf((float)(half[0] + half[1]), d * block->scale[lane], out[t * 16 + r]);
                if (cm_has_minima(format))
                    acc = fmaf(m, block->scaled_sum[lane], acc);
                out[t * 16 + r] = acc;
            }
        }
    }
}

#define TILE_TOKENS 4
static int tile_tokens(int format, int num_panels, int left) {
    (void)format;
    (void)num_panels;
    return left < TILE_TOKENS ? left : TILE_TOKENS;
}

static int tile_panels(int format, int num_tokens) {
    (void)format;
    (void)num_tokens;
    return 1;
}

/* out [num tokens][16] = the panel's 16 rows times tokens token .. token + num - 1. */
static void gemm_tile(const uint8_t *const *panels, int num_panels, int format, const cm_act *x, int token, int num,
                      const tile_prefetch *pf, float *out) {
    (void)pf;
    (void)num_panels;
    if (cm_is_float_format(format))
        float_tile(panels[0], format, x, token, num, out);
    else
        integer_tile(panels[0], format, x, token, num, out);
}

/* ---- embedding rows ---- */

void cm_gather_rows(const uint8_t *base, const cm_matrix *w, const int32_t *ids, int num, float *dst,
                    size_t dst_stride, float scale) {
    const size_t k = (size_t)w->k;
    for (int i = 0; i < num; i++) {
        const cm_panel *p = w->panels + ids[i] / 16;
        const uint8_t *panel = base + p->offset;
        int format = (int)p->format, r = ids[i] % 16;
        float *row = dst + (size_t)i * dst_stride;
        if (cm_is_float_format(format)) {
            for (size_t j = 0; j < k; j++)
                row[j] = float_weight(panel, format, j, r);
        } else {
            const uint8_t *scales = panel + cm_codes_bytes(format, k);
            for (size_t b = 0; b < k / 32; b++) {
                int8_t codes[32];
                float d, m, half[2];
                unpack_row(codes, panel + b * (size_t)cm_block_lines(format) * CM_LINE, format, r);
                block_scales(&d, &m, scales, format, b, r);
                /* All products are exact; only the minimum's addition rounds. */
                half[0] = format == CM_Q6_K ? d * (float)q6k_scale(scales, b, 0, r) : d;
                half[1] = format == CM_Q6_K ? d * (float)q6k_scale(scales, b, 1, r) : d;
                for (int j = 0; j < 32; j++) {
                    float v = half[j / 16] * (float)codes[j];
                    row[b * 32 + (size_t)j] = cm_has_minima(format) ? v + m : v;
                }
            }
        }
        if (scale != 1)
            for (size_t j = 0; j < k; j++)
                row[j] *= scale;
    }
}
