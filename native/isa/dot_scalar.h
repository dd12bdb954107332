/* Dots of 8-bit codes in 16 lanes, in plain C: the specification of dot_avx2.h, dot_avx_vnni.h and dot_avx512.h.
 *
 * One side of a dot are 16 lanes x 4 codes, the other 4 codes that every lane gets; one side is signed and the other
 * unsigned, as vpdpbusd wants it. Sums are exact: any 8-bit codes, up to 2^16 of them.
 */
#ifndef CM_DOT_H
#define CM_DOT_H

#define DOT_FOUR_BYTES 4 /* of 4 codes as dot_each reads them */
#define DOT_PARTS 1      /* of a dot: loads and sums are made part by part, which leaves registers free */

typedef struct v16i {
    int32_t lane[16];
} v16i;
typedef struct dot_lanes {
    uint8_t code[64];
} dot_lanes;
typedef struct dot_four {
    uint8_t code[4];
} dot_four;

V16_INLINE v16i v16i_set1(int32_t x) {
    v16i out;
    for (int i = 0; i < 16; i++)
        out.lane[i] = x;
    return out;
}
V16_INLINE v16 v16i_float(v16i a) { /* lanes below 2^24 in size, so exact */
    v16 out;
    for (int i = 0; i < 16; i++)
        out.lane[i] = (float)a.lane[i];
    return out;
}

/* 64 codes: lane l has codes 4 l to 4 l + 3. */
V16_INLINE dot_lanes dot_load_u8(const uint8_t *p, int part) {
    (void)part;
    dot_lanes out;
    memcpy(out.code, p, 64);
    return out;
}
V16_INLINE dot_lanes dot_load_s8(const uint8_t *p, int part) { return dot_load_u8(p, part); }
V16_INLINE dot_four dot_each(const uint8_t *p, int part) {
    (void)part;
    dot_four out;
    memcpy(out.code, p, 4);
    return out;
}

/* sum + the dots of unsigned lanes with signed b, and of signed lanes with unsigned b. */
V16_INLINE v16i dot_u8s8(v16i sum, dot_lanes a, dot_four b) {
    for (int i = 0; i < 64; i++)
        sum.lane[i / 4] += a.code[i] * (int8_t)b.code[i % 4];
    return sum;
}
V16_INLINE v16i dot_s8u8(v16i sum, dot_lanes a, dot_four b) {
    for (int i = 0; i < 64; i++)
        sum.lane[i / 4] += (int8_t)a.code[i] * b.code[i % 4];
    return sum;
}

/* The low byte of each lane's bits: as it is, and as four times four codes for dot_each. */
V16_INLINE void v16_store_low_bytes(uint8_t *p, v16 a) {
    for (int i = 0; i < 16; i++)
        p[i] = (uint8_t)cm_bits_of(a.lane[i]);
}
V16_INLINE void dot_put_s8(uint8_t *p, v16 a) { v16_store_low_bytes(p, a); }
V16_INLINE void dot_put_u8(uint8_t *p, v16 a) { v16_store_low_bytes(p, a); }

#endif
