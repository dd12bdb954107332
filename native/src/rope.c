#include "rope.h"

#include "coremill.h"

/* pi/2 in parts of 22 bits (the last of 53): a multiple below 2^31 of each of the first three is exact. */
#define PIO2_1 0x1.921fbp+0
#define PIO2_2 0x1.5110bp-22
#define PIO2_3 0x1.1846980p-44
#define PIO2_4 0x1.3198a2e037073p-69
#define TWO_OVER_PI 0x1.45f306dc9c883p-1

/* Adding and taking away 1.5 * 2^52 rounds to the nearest integer. */
#define ROUNDER 0x1.8p+52

/* Taylor polynomials, 1/n! in powers of r^2. On |r| <= pi/4 the first term left out is below 1e-18. */
static double sin_near_zero(double r) {
    double z = r * r;
    double p = 1.0 / 355687428096000.0;
    p = p * z - 1.0 / 1307674368000.0;
    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    return r + r * z * p;
}

static double cos_near_zero(double r) {
    double z = r * r;
    double p = 1.0 / 20922789888000.0;
    p = p * z - 1.0 / 87178291200.0;
    p = p * z + 1.0 / 479001600.0;
    p = p * z - 1.0 / 3628800.0;
    p = p * z + 1.0 / 40320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    p = p * z - 1.0 / 2.0;
    return 1.0 + z * p;
}

void cm_sincos(double x, double *sin_x, double *cos_x) {
    double turns = x * TWO_OVER_PI + ROUNDER - ROUNDER; /* quarter turns, a whole number */
    double r = x - turns * PIO2_1;
    r -= turns * PIO2_2;
    r -= turns * PIO2_3;
    r -= turns * PIO2_4;
    double s = sin_near_zero(r), c = cos_near_zero(r);
    switch ((int64_t)turns & 3) {
    case 0: *sin_x = s, *cos_x = c; break;
    case 1: *sin_x = c, *cos_x = -s; break;
    case 2: *sin_x = -s, *cos_x = -c; break;
    default: *sin_x = -c, *cos_x = s; break;
    }
}

void cm_rope_row(float *cos, float *sin, const double *inv_freq, int32_t half, double magnitude, int64_t position) {
    for (int32_t i = 0; i < half; i++) {
        double s, c;
        cm_sincos((double)position * inv_freq[i], &s, &c);
        cos[i] = (float)(c * magnitude);
        sin[i] = (float)(s * magnitude);
    }
}
