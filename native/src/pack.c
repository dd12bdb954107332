/* Rows of a GGUF tensor to R16 panels (layout: kernels.md section 1; block formats: ggml's ggml-common.h).
 *
 * Nothing is rounded: codes and scales are moved, and K-quant sub-block scales widened from 6 bits to bytes.
 * A panel is [codes plane][scales plane]. In the codes plane byte 4*r + i of a 64-byte line belongs to row r
 * and k = 4*group + i; so a group of 4 codes of one row is one 32-bit word here, loaded from the source with
 * a few shifts and masks and stored at word r of its line.
 */
#include <string.h>

#include "coremill.h"
#include "kernels.h"

enum { ROWS = CM_PANEL_ROWS, LINE = 64 };

/* Bytes of a run of block_len elements: of one row in the file, and of 16 rows in the two planes. */
typedef struct format_info {
    int32_t block_len, file_bytes, code_bytes, scale_bytes;
} format_info;

static const format_info *find_format(int32_t format) {
    static const format_info infos[] = {
        [CM_F32] = {1, 4, 4 * ROWS, 0},
        [CM_F16] = {1, 2, 2 * ROWS, 0},
        [CM_BF16] = {1, 2, 2 * ROWS, 0},
        [CM_Q4_0] = {32, 18, 4 * LINE, 2 * ROWS},
        [CM_Q4_1] = {32, 20, 4 * LINE, 4 * ROWS},
        [CM_Q5_0] = {32, 22, 5 * LINE, 2 * ROWS},
        [CM_Q5_1] = {32, 24, 5 * LINE, 4 * ROWS},
        [CM_Q8_0] = {32, 34, 8 * LINE, 2 * ROWS},
        [CM_Q4_K] = {256, 144, 8 * 4 * LINE, 20 * ROWS},
        [CM_Q5_K] = {256, 176, 8 * 5 * LINE, 20 * ROWS},
        [CM_Q6_K] = {256, 210, 8 * 6 * LINE, 18 * ROWS},
    };
    if (format < 0 || format >= (int32_t)(sizeof infos / sizeof infos[0]) || !infos[format].block_len)
        return NULL;
    return &infos[format];
}

static uint32_t load32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static void store32(uint8_t *p, uint32_t v) {
    memcpy(p, &v, sizeof v);
}

/* 16-bit values are moved, never computed with. */
static void copy16(uint8_t *dst, const uint8_t *src) {
    memcpy(dst, src, 2);
}

/* Bits 0, 4, 8, ... 28 of x, side by side. */
static uint32_t every_fourth_bit(uint32_t x) {
    x &= 0x11111111u;
    x = (x | x >> 3) & 0x03030303u;
    x = (x | x >> 6) & 0x000f000fu;
    return (x | x >> 12) & 0xffu;
}

/* A panel being filled: one row of `src` at a time. `blocks` counts the format's own blocks in k. */
typedef struct panel {
    uint8_t *codes, *scales;
    int32_t blocks;
} panel;

static void pack_floats(const panel *p, const uint8_t *src, int row, size_t size) {
    for (int32_t k = 0; k < p->blocks; k++)
        memcpy(p->codes + (size_t)k * ROWS * size + (size_t)row * size, src + (size_t)k * size, size);
}

static void pack_q8_0(const panel *p, const uint8_t *src, int row) {
    uint8_t *codes = p->codes + 4 * row, *scales = p->scales + 2 * row;
    for (int32_t b = 0; b < p->blocks; b++, src += 34, codes += 8 * LINE, scales += 2 * ROWS) {
        copy16(scales, src);
        for (int j = 0; j < 8; j++)
            store32(codes + j * LINE, load32(src + 2 + 4 * j) ^ 0x80808080u);
    }
}

/* Q4_0, Q4_1, Q5_0, Q5_1: d, (m,) (32 high bits,) 16 bytes whose low nibbles are k 0..15 and high nibbles
 * k 16..31. That is also where our lines have them, so a line takes the source's words as they are. */
static void pack_legacy(const panel *p, const uint8_t *src, int row, int has_min, int has_high) {
    const int head = 2 + 2 * has_min, src_bytes = head + 4 * has_high + 16;
    const int code_bytes = (4 + has_high) * LINE, scale_bytes = (1 + has_min) * 2 * ROWS;
    uint8_t *codes = p->codes + 4 * row, *scales = p->scales + 2 * row;
    for (int32_t b = 0; b < p->blocks; b++, src += src_bytes, codes += code_bytes, scales += scale_bytes) {
        copy16(scales, src);
        if (has_min)
            copy16(scales + 2 * ROWS, src + 2);
        const uint8_t *low = src + head + 4 * has_high;
        for (int j = 0; j < 4; j++)
            store32(codes + j * LINE, load32(low + 4 * j));
        if (has_high) {
            uint32_t high = load32(src + head), line = 0;
            for (int i = 0; i < 4; i++)
                line |= every_fourth_bit(high >> i) << (8 * i);
            store32(codes + 4 * LINE, line);
        }
    }
}

/* Q4_K and Q5_K keep eight 6-bit scales and minima in 12 bytes: the first four whole, of the last four the low
 * nibbles apart and the two high bits on top of the first four. */
static void unpack_scales_k4(const uint8_t *packed, uint8_t *scales, uint8_t *minima) {
    for (int j = 0; j < 4; j++) {
        scales[j] = packed[j] & 63;
        minima[j] = packed[j + 4] & 63;
        scales[j + 4] = (uint8_t)((packed[j + 8] & 15) | (packed[j] >> 6) << 4);
        minima[j + 4] = (uint8_t)(packed[j + 8] >> 4 | (packed[j + 4] >> 6) << 4);
    }
}

/* Q4_K, Q5_K: d, dmin, 12 bytes of scales, (32 bytes: bit b is the high bit of 32-block b,) then for each pair of
 * 32-blocks 32 bytes: low nibbles the first, high nibbles the second. */
static void pack_k45(const panel *p, const uint8_t *src, int row, int has_high) {
    const int src_bytes = 144 + 32 * has_high, code_bytes = (4 + has_high) * LINE;
    uint8_t *codes = p->codes + 4 * row;
    for (int32_t s = 0; s < p->blocks; s++, src += src_bytes) {
        uint8_t sc[8], mn[8];
        uint8_t *plane = p->scales + (size_t)s * 20 * ROWS;
        unpack_scales_k4(src + 4, sc, mn);
        copy16(plane + 2 * row, src);
        copy16(plane + 2 * ROWS + 2 * row, src + 2);
        for (int b = 0; b < 8; b++) {
            plane[(4 + b) * ROWS + row] = sc[b];
            plane[(12 + b) * ROWS + row] = mn[b];
        }
        const uint8_t *high = src + 16, *low = src + 16 + 32 * has_high;
        for (int b = 0; b < 8; b++, codes += code_bytes) {
            const uint8_t *pair = low + 32 * (b / 2);
            const int shift = 4 * (b & 1);
            for (int j = 0; j < 4; j++) {
                uint32_t first = load32(pair + 4 * j) >> shift & 0x0f0f0f0fu;
                uint32_t second = load32(pair + 16 + 4 * j) >> shift & 0x0f0f0f0fu;
                store32(codes + j * LINE, first | second << 4);
            }
            if (has_high) {
                uint32_t line = 0;
                for (int j = 0; j < 8; j++)
                    line |= (load32(high + 4 * j) >> b & 0x01010101u) << j;
                store32(codes + 4 * LINE, line);
            }
        }
    }
}

/* Q6_K: 128 bytes of low nibbles, 64 of bit pairs, 16 i8 scales, d. In each half of 128 k, 32-block t (0..3) has its
 * nibbles in bytes 32*(t&1).. (low for t < 2, else high) and its bit pairs at bit 2t of 32 bytes. */
static void pack_q6_k(const panel *p, const uint8_t *src, int row) {
    uint8_t *codes = p->codes + 4 * row;
    for (int32_t s = 0; s < p->blocks; s++, src += 210) {
        uint8_t *plane = p->scales + (size_t)s * 18 * ROWS;
        copy16(plane + 2 * row, src + 208);
        for (int b = 0; b < 16; b++)
            plane[(2 + b) * ROWS + row] = src[192 + b];
        for (int b = 0; b < 8; b++, codes += 6 * LINE) {
            const int half = b / 4, t = b % 4, shift = 4 * (t / 2);
            const uint8_t *low = src + 64 * half + 32 * (t & 1), *high = src + 128 + 32 * half;
            uint32_t lines[2] = {0, 0};
            for (int j = 0; j < 4; j++) {
                uint32_t first = load32(low + 4 * j) >> shift & 0x0f0f0f0fu;
                uint32_t second = load32(low + 16 + 4 * j) >> shift & 0x0f0f0f0fu;
                store32(codes + j * LINE, first | second << 4);
            }
            for (int j = 0; j < 8; j++)
                lines[j / 4] |= (load32(high + 4 * j) >> (2 * t) & 0x03030303u) << (2 * (j % 4));
            store32(codes + 4 * LINE, lines[0]);
            store32(codes + 5 * LINE, lines[1]);
        }
    }
}

static void pack_row(int32_t format, const panel *p, const uint8_t *src, int row) {
    switch (format) {
    case CM_F32: pack_floats(p, src, row, 4); break;
    case CM_F16:
    case CM_BF16: pack_floats(p, src, row, 2); break;
    case CM_Q4_0: pack_legacy(p, src, row, 0, 0); break;
    case CM_Q4_1: pack_legacy(p, src, row, 1, 0); break;
    case CM_Q5_0: pack_legacy(p, src, row, 0, 1); break;
    case CM_Q5_1: pack_legacy(p, src, row, 1, 1); break;
    case CM_Q8_0: pack_q8_0(p, src, row); break;
    case CM_Q4_K: pack_k45(p, src, row, 0); break;
    case CM_Q5_K: pack_k45(p, src, row, 1); break;
    case CM_Q6_K: pack_q6_k(p, src, row); break;
    default: break; /* cm_pack_panels has refused it */
    }
}

uint64_t cm_panel_bytes(int32_t format, int32_t k) {
    const format_info *info = find_format(format);
    if (!info || k <= 0 || k % info->block_len)
        return 0;
    uint64_t blocks = (uint64_t)(k / info->block_len);
    uint64_t bytes = blocks * (uint64_t)(info->code_bytes + info->scale_bytes);
    return (bytes + LINE - 1) / LINE * LINE;
}

int cm_pack_panels(int32_t format, const uint8_t *src, size_t src_len, int32_t k, int32_t num_rows, uint8_t *dst,
                   size_t dst_len, size_t dst_stride) {
    const format_info *info = find_format(format);
    const uint64_t panel_bytes = cm_panel_bytes(format, k);
    if (!panel_bytes || num_rows <= 0 || dst_stride < panel_bytes)
        return -1;
    const size_t row_bytes = (size_t)(k / info->block_len) * (size_t)info->file_bytes;
    const size_t num_panels = ((size_t)num_rows + ROWS - 1) / ROWS;
    if (src_len / row_bytes != (size_t)num_rows || src_len % row_bytes || dst_len < panel_bytes ||
        (dst_len - panel_bytes) / dst_stride < num_panels - 1)
        return -1;

    panel p = {.blocks = k / info->block_len};
    const size_t code_bytes = (size_t)p.blocks * (size_t)info->code_bytes;
    const size_t used = code_bytes + (size_t)p.blocks * (size_t)info->scale_bytes;
    for (size_t i = 0; i < num_panels; i++, dst += dst_stride) {
        const int32_t left = num_rows - (int32_t)(i * ROWS), rows = left < ROWS ? left : ROWS;
        p.codes = dst;
        p.scales = dst + code_bytes;
        if (rows < ROWS)
            memset(dst, 0, used);
        memset(dst + used, 0, panel_bytes - used);
        for (int row = 0; row < rows; row++, src += row_bytes)
            pack_row(format, &p, src, row);
    }
    return 0;
}

int64_t cm_pack_check_panels(const uint8_t *table, size_t table_len, int32_t k, uint64_t begin, uint64_t end) {
    if (table_len % sizeof(cm_panel))
        return 0;
    for (size_t i = 0; i < table_len / sizeof(cm_panel); i++) {
        cm_panel entry; /* copied, so that the table may lie anywhere */
        memcpy(&entry, table + i * sizeof entry, sizeof entry);
        const uint64_t bytes = entry.format <= INT32_MAX ? cm_panel_bytes((int32_t)entry.format, k) : 0;
        if (!bytes || entry.reserved || entry.offset % LINE || entry.offset < begin || entry.offset > end ||
            bytes > end - entry.offset)
            return (int64_t)i;
    }
    return -1;
}
