/* IEEE half precision in plain C, bit for bit what F16C does. */
#ifndef CM_F16_H
#define CM_F16_H

#include <stdint.h>
#include <string.h>

static inline float cm_float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t cm_bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* Exact; NaNs keep their payload and become quiet. */
static inline float cm_f32_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest > 0x7c00)
        return cm_float_of(sign | 0x7fc00000 | rest << 13);
    if (rest == 0x7c00)
        return cm_float_of(sign | 0x7f800000);
    if (rest >= 0x0400)
        return cm_float_of(sign | ((rest << 13) + (112u << 23)));
    return cm_float_of(sign | cm_bits_of((float)rest * 0x1p-24f)); /* zero or subnormal */
}

/* Round to nearest, ties to even; overflow gives infinity; NaNs keep the top of their payload. */
static inline uint16_t cm_f16_from_f32(float x) {
    uint32_t bits = cm_bits_of(x);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (bits >> 13 & 0x3ff));
    if (bits >= 0x477ff000) /* 65520, halfway past the largest half */
        return (uint16_t)(sign | 0x7c00);
    if (bits >= 0x38800000) { /* 2**-14: normal */
        bits += 0x0fff + (bits >> 13 & 1);
        return (uint16_t)(sign | (bits - (112u << 23)) >> 13);
    }
    /* Subnormal: adding 0.5 puts the last kept bit, 2**-24, on the last bit of the sum, which the addition rounds. */
    return (uint16_t)(sign | (cm_bits_of(cm_float_of(bits) + 0.5f) - 0x3f000000));
}

#endif
