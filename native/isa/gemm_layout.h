/* Where things lie inside a panel of a packed matrix, format by format.
 *
 * A panel is 16 rows: [codes plane][scales plane]. Along k, codes come in blocks of 32 (float formats: one k at
 * a time) and scales in blocks of 32 (legacy formats) or 256 (K-quants).
 *
 *   code line      64 bytes = 16 rows x 4 consecutive k, byte 4 * row + i; group j of a block is k = 4j .. 4j + 3
 *   4 bits         4 lines: line j has group j in the low nibbles, group j + 4 in the high ones
 *   5 bits         ... then 1 line, whose bit j is bit 4 of the codes of group j
 *   6 bits         ... then 2 lines: line h has bits 4-5 of group 4h + i at bit 2i
 *   8 bits         8 lines, w + 128
 */
#ifndef CM_GEMM_LAYOUT_H
#define CM_GEMM_LAYOUT_H

#include "kernels.h"

#define CM_LINE 64
#define CM_BLOCK_K 32
#define CM_SUPER_BLOCKS 8 /* blocks of 32 in a K-quant's 256 */

/* Bytes of scales per 256 k of a K-quant, and where its parts start. */
#define CM_K45_STRIDE 320 /* 16 f16 d, 16 f16 dmin, 8 x 16 u8 scale, 8 x 16 u8 minimum */
#define CM_K45_DMIN 32
#define CM_K45_SCALE 64
#define CM_K45_MIN 192
#define CM_Q6K_STRIDE 288 /* 16 f16 d, 16 x 16 i8 scale, one per 16 k */
#define CM_Q6K_SCALE 32

/* Start of the minima in the scales of a block of Q4_1 or Q5_1. */
#define CM_LEGACY_MIN 32

/* What a tile should fetch of the panels to come: their blocks b with (b & mask) == phase. */
typedef struct tile_prefetch {
    ptrdiff_t ahead; /* bytes from this panel to the one to fetch */
    size_t mask, phase;
} tile_prefetch;

/* All take a compile-time constant format in the kernels, and vanish. */

static inline int cm_code_bits(int format) {
    switch (format) {
    case CM_Q4_0:
    case CM_Q4_1:
    case CM_Q4_K:
        return 4;
    case CM_Q5_0:
    case CM_Q5_1:
    case CM_Q5_K:
        return 5;
    case CM_Q6_K:
        return 6;
    case CM_Q8_0:
        return 8;
    case CM_F32:
        return 32;
    default:
        return 16;
    }
}

static inline int cm_is_float_format(int format) {
    return format == CM_F32 || format == CM_F16 || format == CM_BF16;
}

static inline int cm_has_minima(int format) {
    return format == CM_Q4_1 || format == CM_Q5_1 || format == CM_Q4_K || format == CM_Q5_K;
}

/* log2 of the code that stands for 0; meaningless for formats with minima. */
static inline int cm_zero_shift(int format) {
    return cm_code_bits(format) - 1;
}

/* Code lines of a block of 32 k. */
static inline int cm_block_lines(int format) {
    return cm_code_bits(format);
}

/* Bytes of the codes plane. */
static inline size_t cm_codes_bytes(int format, size_t k) {
    return CM_PANEL_ROWS * k * (size_t)cm_code_bits(format) / 8;
}

/* Bytes of scales for a block of 32 k of a legacy format. */
static inline int cm_legacy_stride(int format) {
    return cm_has_minima(format) ? 64 : 32;
}

#endif
